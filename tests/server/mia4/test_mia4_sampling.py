"""Sampling of a request: every field from every level, what has no effect, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kqview import Sampling
from kqview.errors import RequestError
from kqview.server.apps.mia4.passport import FIELDS, check_sampling, merge
from kqview.server.errors import Unprocessable, answer_of

LEVELS = ("default", "passport", "preset", "custom")
# Of each field a value for each level, in their order. Mirostat's own need it on, the penalties'
# and the truncations' need it off; `NEEDS` says what goes with a field so that it has an effect.
VALUES: dict[str, tuple[Any, Any, Any, Any]] = {
    "temperature": (0.5, 0.6, 0.7, 0.9),
    "top_p": (0.5, 0.6, 0.7, 0.9),
    "top_k": (10, 20, 30, 50),
    "repeat_penalty": (1.05, 1.1, 1.2, 1.3),
    "min_p": (0.01, 0.02, 0.03, 0.04),
    "typical_p": (0.5, 0.6, 0.7, 0.9),
    "presence_penalty": (0.1, 0.2, 0.3, -0.4),
    "frequency_penalty": (0.1, 0.2, 0.3, -0.4),
    "repeat_last_n": (32, 128, -1, 256),
    "penalize_nl": (True, True, True, True),
    "seed": (1, 2, 3, 4),
    "mirostat": (1, 2, 1, 2),
    "mirostat_tau": (4.0, 3.0, 2.0, 6.0),
    "mirostat_eta": (0.2, 0.3, 0.4, 0.05),
    "max_tokens": (16, 32, 64, 128),
    "top_n_sigma": (1.0, 2.0, 3.0, 4.0),
    "min_keep": (1, 2, 3, 4),
    "min_tokens": (1, 2, 3, 4),
    "dynatemp_range": (0.1, 0.2, 0.3, 0.4),
    "dynatemp_exponent": (1.1, 1.2, 1.3, 1.4),
    "dry_multiplier": (0.1, 0.2, 0.3, 0.4),
    "dry_base": (1.1, 1.2, 1.3, 1.4),
    "dry_allowed_length": (1, 3, 4, 5),
    "dry_penalty_last_n": (32, 128, -1, 256),
    "xtc_probability": (0.1, 0.2, 0.3, 0.4),
    "xtc_threshold": (0.2, 0.3, 0.4, 0.45),
    "ignore_eos": (True, False, True, False),
}
NEEDS: dict[str, dict[str, Any]] = {
    "repeat_last_n": {"repeat_penalty": 1.1},
    "penalize_nl": {"repeat_penalty": 1.1},
    "mirostat_tau": {"mirostat": 1},
    "mirostat_eta": {"mirostat": 2},
    "dynatemp_exponent": {"dynatemp_range": 0.1},
    "dry_base": {"dry_multiplier": 0.1},
    "dry_allowed_length": {"dry_multiplier": 0.1},
    "dry_penalty_last_n": {"dry_multiplier": 0.1},
    "xtc_threshold": {"xtc_probability": 0.1},
}


@pytest.mark.parametrize("level", range(4), ids=LEVELS)
@pytest.mark.parametrize("name", VALUES)
def test_value_comes_from_the_highest_level_that_has_one(name: str, level: int):
    given = [{name: value} for value in VALUES[name][: level + 1]]
    default, passport, preset, custom = given + [{}] * (4 - len(given))
    merged = merge(passport, preset, custom, {**default, **NEEDS.get(name, {})})
    expected = VALUES[name][level]
    assert merged.values[name] == expected
    assert merged.origin[name] == LEVELS[level]
    assert merged.filtered_out == []
    if name == "max_tokens":
        assert merged.max_tokens == expected
    elif name != "penalize_nl":
        assert getattr(merged.sampling, name) == expected


def test_every_number_of_the_sampler_is_in_the_table():
    known = {"penalize_nl", "max_tokens"}
    assert set(VALUES) == known | {
        name
        for name, default in ((name, getattr(Sampling(), name)) for name in Sampling.__slots__)
        if name == "seed" or isinstance(default, int | float)
        if name not in ("top_logprobs", "post_sampling_probs")
    }


def test_fields_mix_levels_and_keep_the_order_of_the_contract():
    merged = merge(
        {"temperature": 0.2, "top_p": 0.5}, {"top_p": 0.6, "top_k": 7}, {"top_k": 9, "seed": 5}
    )
    assert tuple(merged.values) == tuple(merged.origin) == FIELDS
    assert {name: merged.origin[name] for name in ("temperature", "top_p", "top_k", "seed")} == {
        "temperature": "passport", "top_p": "preset", "top_k": "custom", "seed": "custom",
    }  # fmt: skip
    assert merged.sampling == Sampling(temperature=0.2, top_p=0.6, top_k=9, seed=5)
    assert "filtered_out" not in merged.as_object()


def test_null_leaves_the_value_of_the_level_below():
    merged = merge({"temperature": 0.2}, {}, {"temperature": None, "max_output_tokens": None})
    assert (merged.sampling.temperature, merged.origin["temperature"]) == (0.2, "passport")
    assert merged.max_tokens is None


def test_limit_of_tokens_has_two_names():
    assert merge({"max_tokens": 5}, {}, {"max_output_tokens": 7}).values["max_tokens"] == 7
    assert merge({}, {}, {"max_output_tokens": 7, "max_tokens": 7}).max_tokens == 7
    with pytest.raises(Unprocessable, match="7 and 8"):
        merge({}, {}, {"max_output_tokens": 7, "max_tokens": 8})


def test_limit_of_reasoning_is_merged_beside_the_sampling():
    assert merge({}, {}, {}).reasoning_max_tokens is None
    merged = merge({"reasoning_max_tokens": 64}, {"reasoning_max_tokens": 0}, {})
    assert merged.reasoning_max_tokens == 0
    assert "reasoning_max_tokens" not in merged.values
    merged = merge({"reasoning_max_tokens": 64}, {}, {"reasoning_max_tokens": -1})
    assert merged.reasoning_max_tokens is None


def test_minus_one_asks_for_a_random_seed():
    merged = merge({"seed": 7}, {}, {"seed": -1})
    assert merged.sampling.seed is None
    assert merged.origin["seed"] == "custom"


MIROSTAT = {"mirostat_tau": 4.0, "mirostat_eta": 0.2}
TRUNCATIONS = {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9, "xtc_probability": 0.1}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"grammar": "root ::= [a]", "top_a": 1, "logit_bias": {}}, "grammar logit_bias top_a"),
        ({"top_logprobs": 3, "post_sampling_probs": True}, "post_sampling_probs top_logprobs"),
        ({"temperature": 0, "seed": 1, **TRUNCATIONS}, " ".join(sorted([*TRUNCATIONS, "seed"]))),
        ({"temperature": 0, "mirostat": 2, **MIROSTAT}, "mirostat mirostat_eta mirostat_tau"),
        ({"temperature": 0, "dynatemp_range": 1, "seed": 1}, ""),
        ({"mirostat": 1, "seed": 1, **TRUNCATIONS, **MIROSTAT}, " ".join(sorted(TRUNCATIONS))),
        ({"mirostat": 0, **MIROSTAT}, "mirostat_eta mirostat_tau"),
        (TRUNCATIONS, ""),
        ({"repeat_last_n": 0, "repeat_penalty": 1.1, "penalize_nl": True},
         "penalize_nl repeat_penalty"),
        ({"repeat_last_n": 64, "presence_penalty": 0.0}, "repeat_last_n"),
        ({"repeat_penalty": 1.1, "penalize_nl": True}, ""),
        ({"repeat_penalty": 1.1, "penalize_nl": False}, "penalize_nl"),
        ({"dry_base": 2.0, "xtc_threshold": 0.2, "dynatemp_exponent": 2.0},
         "dry_base dynatemp_exponent xtc_threshold"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("level", ["passport", "preset", "custom"])
def test_fields_without_effect_are_named(level: str, given: dict[str, Any], expected: str):
    levels: dict[str, dict[str, Any]] = {"passport": {}, "preset": {}, "custom": {}}
    levels[level] = given
    assert merge(**levels).filtered_out == expected.split()


def test_default_without_effect_is_not_named():
    merged = merge({}, {}, {"temperature": 0}, {"top_p": 0.5})
    assert merged.filtered_out == []
    assert merged.as_object()["top_p"] == 0.5


def test_field_of_a_passport_is_named_if_the_request_makes_it_meaningless():
    assert merge({"top_p": 0.5}, {}, {"temperature": 0}).filtered_out == ["top_p"]


def test_value_that_is_not_possible_shows_what_happens_instead():
    merged = merge({}, {}, {"penalize_nl": False, "repeat_penalty": 1.1})
    assert merged.values["penalize_nl"] is True
    assert merged.as_object()["filtered_out"] == ["penalize_nl"]


def test_names_that_a_client_makes_up_stay_few_and_short():
    merged = merge({}, {}, {f"{i:03}" + "x" * 1000: 1 for i in range(200)})
    assert len(merged.filtered_out) == 64
    assert max(map(len, merged.filtered_out)) == 80


WRONG: dict[str, list[Any]] = {
    "temperature": [-0.1, math.nan, math.inf, True, "1", [], 10**400],
    "top_p": [0, 1.1, math.nan, False],
    "top_k": [-1, 1.5, 2**31, True, "40"],
    "repeat_penalty": [0, -1, math.nan],
    "min_p": [-0.1, 1.5],
    "typical_p": [0, 2],
    "presence_penalty": [math.nan, math.inf, True],
    "frequency_penalty": [math.nan, -math.inf, "0"],
    "repeat_last_n": [-2, 0.5, 2**31],
    "penalize_nl": [1, "true", 0.0],
    "seed": [-2, 2**32, 1.5, True],
    "mirostat": [-1, 3, True, 1.5],
    "mirostat_tau": [0, -1, math.nan],
    "mirostat_eta": [0, -1, math.inf],
    "max_tokens": [0, -1, 1.5, True, 2**31, 10**400],
    "max_output_tokens": [0, -1, "9", False],
    "reasoning_max_tokens": [-2, 1.5, True, 2**31],
    "ignore_eos": [0, "yes"],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG.items() for value in values],
    ids=lambda value: str(value)[:12],
)
def test_impossible_value_is_refused_by_the_name_of_its_field(name: str, value: Any):
    with pytest.raises(Unprocessable, match=f"^{name} must be") as caught:
        merge({}, {}, {name: value})
    answer = answer_of(caught.value)
    assert (answer.status, answer.parameter) == (422, name)
    # The same value in a configuration is found when that is read.
    with pytest.raises(RequestError, match=f"^{name} must be"):
        check_sampling(name, value)


def test_configuration_may_have_every_field_and_no_other():
    for name, values in VALUES.items():
        check_sampling(name, values[1])
    check_sampling("max_output_tokens", 9)
    check_sampling("reasoning_max_tokens", -1)
    with pytest.raises(RequestError, match="heat is no field"):
        check_sampling("heat", 1.0)
