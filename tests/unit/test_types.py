"""The public value types: defaults, checks, sizes, printed form, forms of other libraries."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest

from kqview import PoolStats, SlotStats, errors
from kqview.errors import InvalidCapture, InvalidSampling, RequestError
from kqview.types import Capture, EngineStats, ModelInfo, Sampling, Token, Usage

MODEL = ModelInfo(
    name="toy",
    architecture="qwen2",
    n_vocab=100,
    n_layer=6,
    n_head=4,
    n_head_kv=2,
    n_embd=32,
    n_ctx_train=512,
    attention_layers=(1, 3, 5),
    attention_scale=0.25,
    bos_token_id=1,
    eos_token_id=2,
    eot_token_id=None,
    pad_token_id=None,
    special_tokens={"bos": "<s>"},
    rope_freq_base=1e4,
    rope_freq_scale=1.0,
    chat_template=None,
    n_params=1000,
    size_bytes=4000,
    file_type="F32",
    classifier_labels=(),
    metadata={},
)


@pytest.mark.parametrize("value", [MODEL, Sampling(), Capture(), Usage(), EngineStats()])
def test_value_type_refuses_assignment_and_survives_pickling(value: object):
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)
    assert pickle.loads(pickle.dumps(value)) == value


BAD_SAMPLING: dict[str, list[Any]] = {
    "temperature": [-0.1, math.nan, math.inf, 1e39, "hot", True],
    "top_k": [-1, 1.5, 2**31],
    "top_p": [-0.1, 0, 1.1, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "typical_p": [-0.1, 1.1, math.nan],
    "top_n_sigma": [-1.0, math.nan, math.inf],
    "min_keep": [-1, 1.5, 2**31],
    "dynatemp_range": [-0.1, 1001, math.nan],
    "dynatemp_exponent": [-0.1, 1001, math.nan],
    "repeat_penalty": [0.0, -1.0, math.inf],
    "repeat_last_n": [-2, 1.5],
    "presence_penalty": [math.nan, math.inf],
    "frequency_penalty": [math.nan, -math.inf],
    "dry_multiplier": [-1.0, math.nan],
    "dry_base": [0.5, 0.9, math.nan],
    "dry_allowed_length": [-1, 2**40],
    "dry_penalty_last_n": [-2],
    "dry_sequence_breakers": [("",), [5]],
    "xtc_probability": [-0.1, 1.1],
    "xtc_threshold": [-0.1, 1.1],
    "mirostat": [-1, 3],
    "mirostat_tau": [-1.0, 0, math.nan],
    "mirostat_eta": [-1.0, 0, math.nan],
    "seed": [-2, 2**32, 1.5],
    "logit_bias": [{1: math.nan}, {1: math.inf}, {-1: 1.0}, {1.5: 1.0}, {1: "x"}],
    "banned_tokens": [[-1], [1.5], [True], ["a"]],
    "min_tokens": [-1, 1.5],
    "begin_suppress": [[-1], [True]],
    "stop": ["", ["ok", ""], [5], [b"bytes"]],
    "stop_tokens": [[-1], [0.5], [2**31], ["1"]],
    "finish_on_length": ["stop", 1, True, np.array(["cut", "close"])],
    "top_logprobs": [-1, 1.5],
    "post_sampling_probs": [1, "yes"],
}


@pytest.mark.parametrize("option", BAD_SAMPLING)
def test_sampling_option_out_of_range_names_the_option(option: str):
    for value in BAD_SAMPLING[option]:
        with pytest.raises(InvalidSampling, match=rf"\b{option}\b.* must be .*, got ") as caught:
            Sampling(**{option: value})
        assert caught.value.parameter == option


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", 0),
        ("top_k", 0),
        ("top_p", 1),
        ("typical_p", 1),
        ("repeat_last_n", -1),
        ("presence_penalty", -2),
        ("seed", 0),
        ("seed", 2**32 - 2),
        ("top_logprobs", 0),
        ("mirostat", 2),
        ("temperature", np.float32(0.5)),
        ("top_k", np.int64(7)),
    ],
)
def test_sampling_keeps_values_at_the_limits(option: str, value: object):
    assert getattr(Sampling(**{option: value}), option) == value


def test_sampling_defaults_are_those_of_the_api():
    sampling = Sampling()
    assert (sampling.temperature, sampling.top_k) == (0.8, 40)
    assert (sampling.top_p, sampling.min_p) == (0.95, 0.05)
    assert (sampling.seed, sampling.top_logprobs, sampling.grammar) == (None, None, None)
    off = Sampling(typical_p=1, repeat_penalty=1, dry_multiplier=0, xtc_probability=0, mirostat=0)
    assert sampling == off


def test_sampling_normalises_collections_and_keeps_its_own():
    bias = {np.int32(3): -math.inf}
    sampling = Sampling(stop="end", banned_tokens=[1, 2], stop_tokens=[5], logit_bias=bias)
    bias[4] = 1.0
    assert sampling.stop == ("end",)
    assert sampling.banned_tokens == (1, 2)
    assert sampling.stop_tokens == (5,)
    assert sampling.logit_bias == {3: -math.inf}


@pytest.mark.parametrize(
    "options",
    [
        {"grammar": 'root ::= "a"', "json_schema": {}},
        {"grammar": 'root ::= "a"', "regex": "a"},
        {"json_schema": "{}", "regex": "a"},
    ],
)
def test_sampling_refuses_two_constraints(options: dict[str, Any]):
    with pytest.raises(InvalidSampling, match=r" and .*give one of them"):
        Sampling(**options)


def test_sampling_keeps_a_schema_as_text():
    schema = {"type": "string", "const": "é"}
    sampling = Sampling(json_schema=schema)
    assert isinstance(sampling.json_schema, str)
    assert "é" in sampling.json_schema
    assert json.loads(sampling.json_schema) == schema
    assert Sampling(json_schema=sampling.json_schema) == sampling


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("kind", "weights"),
        ("kind", None),
        ("dtype", "float64"),
        ("on_full", "panic"),
        ("reduce", "sum"),
        ("layers", [0, 0]),
        ("heads", [-(2**31) - 1]),
        ("layers", [-(2**31) - 1]),
        ("layers", []),
        ("layers", [True]),
        ("layers", "0,1"),
        ("layers", 3),
        ("layers", np.array(3)),
        ("spans", np.array(3)),
        ("heads", [0.5]),
        ("hidden", [2, 2]),
        ("top_k", 0),
        ("top_k", 1.5),
        ("wait_s", -1),
        ("wait_s", math.inf),
        ("wait_s", "long"),
    ],
)
def test_capture_option_not_well_formed_names_the_option(option: str, value: object):
    with pytest.raises(InvalidCapture, match=rf"\b{option}\b") as caught:
        Capture(**{option: value})
    assert caught.value.parameter == option


def test_capture_accepts_every_well_formed_option():
    capture = Capture(
        "probs",
        layers=np.array([3, 1]),
        heads=range(2),
        reduce="mean_heads",
        top_k=8,
        dtype="float16",
        prompt=True,
        hidden=[0],
        on_full="wait",
        wait_s=2,
    )
    assert (capture.layers, capture.heads, capture.hidden) == ((3, 1), (0, 1), (0,))
    assert hash(capture) == hash(dataclasses.replace(capture))


def test_spans_become_pairs_of_ints():
    spans = [(0, 3), [np.int64(2), None], np.array([4, 900]), range(3, 5)]
    capture = Capture("probs", spans=spans)  # pyright: ignore[reportArgumentType]
    assert capture.spans == ((0, 3), (2, None), (4, 900), (3, 5))
    assert hash(capture) == hash(dataclasses.replace(capture))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spans": []}, "no range"),
        ({"spans": [(0, 1)] * 513}, "512"),
        ({"spans": 3}, "spans must be ranges"),
        ({"spans": "01"}, "spans must be ranges"),
        ({"spans": [5]}, r"\(start, stop\)"),
        ({"spans": [(0, 1, 2)]}, r"\(start, stop\)"),
        ({"spans": [range(0, 4, 2)]}, r"\(start, stop\)"),
        ({"spans": ["01"]}, r"\(start, stop\)"),
        ({"spans": [(3, 3)]}, "start < stop"),
        ({"spans": [(-1, 3)]}, "start < stop"),
        ({"spans": [(0, 1.5)]}, "start < stop"),
        ({"spans": [(None, 2)]}, "start < stop"),
        ({"spans": [(0, 1)], "kind": "scores"}, "not of 'scores'"),
        ({"spans": [(0, 1)], "top_k": 2}, "top_k and spans"),
    ],
)
def test_spans_that_make_no_sense_are_refused_by_name(options: dict[str, Any], message: str):
    with pytest.raises(InvalidCapture, match=message) as caught:
        Capture(**{"kind": "probs", **options})
    assert caught.value.parameter == "spans"


def test_capture_of_turns_a_kind_into_a_capture():
    capture = Capture("scores", layers=[1])
    assert Capture.of(None) is None
    assert Capture.of("probs") == Capture(kind="probs")
    assert Capture.of(capture) is capture
    with pytest.raises(InvalidCapture, match="'everything'"):
        Capture.of("everything")
    with pytest.raises(InvalidCapture, match=r"capture must be .* True"):
        Capture.of(True)


@pytest.mark.parametrize("capture", [Capture(layers=[0]), Capture(heads=[4]), Capture(hidden=[6])])
def test_bytes_per_token_refuses_what_the_model_does_not_have(capture: Capture):
    with pytest.raises(InvalidCapture, match=r"\w+ has \[\d\], but the model"):
        capture.bytes_per_token(MODEL, 10)


def test_bytes_per_token_is_zero_for_a_model_without_attention():
    model = dataclasses.replace(MODEL, attention_layers=())
    assert Capture().bytes_per_token(model, 10) == 0
    assert Capture(reduce="mean").bytes_per_token(model, 10) == 0


def test_usage_rate_leaves_the_first_token_to_the_prefill():
    usage = Usage(
        prompt_tokens=30, cached_tokens=10, completion_tokens=11, prefill_s=2.0, decode_s=5.0
    )
    assert usage.tokens_per_s == 2.0
    assert usage.prefill_tokens_per_s == 10.0


@pytest.mark.parametrize("usage", [Usage(), Usage(completion_tokens=1, decode_s=1.0)])
def test_usage_rate_is_zero_below_two_tokens(usage: Usage):
    assert usage.tokens_per_s == 0.0


def test_token_repr_shows_shape_and_never_values():
    attention = np.full((2, 3, 500), 0.123, dtype=np.float32)
    token = Token(7, " a", 0, logprob=-0.5, top_logprobs=[(7, -0.5)], attention=attention)
    assert repr(token) == (
        "Token(id=7, text=' a', index=0, logprob=-0.5, top_logprobs=<1>, "
        "attention=<(2, 3, 500) float32>)"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 10**400},
        {"temperature": 1e39},
        {"top_p": 1e-300},
        {"top_k": 2**31},
        {"logit_bias": {1: 10**400}},
        {"logit_bias": {1: -(10**400)}},
        {"stop": 5},
        {"grammar": ""},
        {"regex": ""},
        {"json_schema": ""},
        {"banned_tokens": 5},
        {"banned_tokens": "12"},
    ],
)
def test_sampling_names_what_is_no_value_of_its_type(options: dict[str, object]):
    with pytest.raises(InvalidSampling) as caught:
        Sampling(**options)  # pyright: ignore[reportArgumentType]
    assert next(iter(options)) in str(caught.value)
    assert len(str(caught.value)) < 250


def test_none_is_an_option_that_is_not_given():
    none = dict.fromkeys(("stop", "stop_tokens", "banned_tokens", "logit_bias"))
    options: Any = {**none, "seed": None, "grammar": None}
    assert Sampling(**options) == Sampling()
    assert Sampling(**options).logit_bias is not Sampling(**options).logit_bias


def test_heads_are_counted_from_the_end():
    capture = Capture(heads=[-1, 0])
    assert capture.counted(MODEL).heads == (3, 0)
    assert capture.bytes_per_token(MODEL, 3) == Capture(heads=[3, 0]).bytes_per_token(MODEL, 3)
    for heads, match in (([-5], "has -5, but the model has 4"), ([-1, 3], "repeated")):
        with pytest.raises(InvalidCapture, match=match):
            Capture(heads=heads).counted(MODEL)


@pytest.mark.parametrize("n_context", ["x", 1.5, None, True, -1])
def test_bytes_of_a_token_need_a_number_of_columns_and_a_model(n_context: Any):
    with pytest.raises(InvalidCapture, match="n_context must be"):
        Capture().bytes_per_token(MODEL, n_context)
    with pytest.raises(RequestError, match="model must be"):
        Capture().bytes_per_token(n_context, 5)


# ---- Token in the forms of other libraries: Hugging Face, TransformerLens, DLPack

ROWS = np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5)
ROWS.flags.writeable = False


def token(capture: Capture | None, attention: Any = ROWS, **fields: Any) -> Token:
    return Token(1, "a", 0, attention=attention, capture=capture, **fields)


def test_hf_form_is_a_view_a_layer():
    layers = token(Capture("probs", layers=(4, 7))).to_hf()
    assert [layer.shape for layer in layers] == [(1, 3, 1, 5)] * 2
    for i, layer in enumerate(layers):
        np.testing.assert_array_equal(layer[0, :, 0], ROWS[i])
        assert np.shares_memory(layer, ROWS)


@pytest.mark.parametrize("kind", ["qk", "logits", "scores"])
def test_hf_form_is_refused_for_values_that_transformers_does_not_return(kind: Any):
    with pytest.raises(errors.InvalidCapture, match=f"has kind '{kind}'; capture 'probs'"):
        token(Capture(kind, layers=(4, 7))).to_hf()


def test_hf_form_of_layers_that_differ_in_heads():
    layers = token(Capture("probs", layers=(0, 1)), (ROWS[0], ROWS[1, :2])).to_hf()
    assert [layer.shape for layer in layers] == [(1, 3, 1, 5), (1, 2, 1, 5)]


@pytest.mark.parametrize(
    ("kind", "name"), [("probs", "hook_pattern"), ("scores", "hook_attn_scores")]
)
def test_names_are_those_of_transformer_lens(kind: Any, name: str):
    named = token(Capture(kind, layers=(4, 7))).named()
    assert list(named) == [f"blocks.4.attn.{name}", f"blocks.7.attn.{name}"]
    np.testing.assert_array_equal(named[f"blocks.7.attn.{name}"][0, :, 0], ROWS[1])


@pytest.mark.parametrize("kind", ["qk", "logits"])
def test_raw_products_have_no_name(kind: Any):
    with pytest.raises(errors.InvalidCapture, match=f"no name for kind '{kind}'"):
        token(Capture(kind, layers=(4, 7))).named()


def test_hidden_states_have_a_name():
    states = np.ones((1, 8), np.float32)
    named = token(Capture(layers=(), hidden=(3,)), None, hidden=states).named()
    assert list(named) == ["blocks.3.hook_resid_post"]
    assert named["blocks.3.hook_resid_post"].shape == (1, 1, 8)


@pytest.mark.parametrize(
    "capture",
    [Capture(reduce="mean_heads"), Capture(top_k=2), Capture("probs", spans=[(0, 5)])],
)
@pytest.mark.parametrize("form", ["to_hf", "named"])
def test_reduced_rows_are_refused(capture: Capture, form: str):
    with pytest.raises(errors.InvalidCapture, match="rows of single heads"):
        getattr(token(capture), form)()


@pytest.mark.parametrize("form", ["to_hf", "named"])
def test_without_capture_there_is_nothing(form: str):
    with pytest.raises(errors.InvalidCapture, match="pass capture="):
        getattr(token(None, None), form)()


def test_dlpack_shares_memory():
    shared = np.from_dlpack(ROWS)
    assert shared.__array_interface__["data"][0] == ROWS.__array_interface__["data"][0]


@pytest.mark.needs("torch")
def test_torch_shares_memory():
    import torch

    tensor = torch.from_dlpack(ROWS)
    assert tensor.data_ptr() == ROWS.__array_interface__["data"][0]
    assert tuple(tensor.shape) == ROWS.shape


# ---- EngineStats: rates, and the difference of two readings


def test_rates_are_tokens_by_the_seconds_spent_on_them():
    stats = EngineStats(
        uptime_s=10, decode_tokens=300, decode_s=2, prefill_tokens=900, prefill_s=1.5
    )
    assert stats.tokens_per_s == 150
    assert stats.prefill_tokens_per_s == 600
    assert stats.busy_s == 3.5


def test_means_of_copies_and_views_are_zero_before_any():
    assert EngineStats().step_to_view_mean_s == 0.0
    assert EngineStats().device_copy_bytes_per_s == 0.0
    stats = EngineStats(
        captured_steps=4, step_to_view_s=2.0, device_copy_bytes=600, device_copy_s=0.5
    )
    assert stats.step_to_view_mean_s == 0.5
    assert stats.device_copy_bytes_per_s == 1200


def test_since_subtracts_what_grows_and_keeps_what_is_of_the_moment():
    earlier = EngineStats(uptime_s=1, n_tokens=10, decode_s=0.5, n_queued=9, graph_nodes_added=4)
    later = EngineStats(
        uptime_s=4,
        n_tokens=25,
        decode_s=2.5,
        n_queued=2,
        graph_nodes_added=3,
        slots=(SlotStats(0, "decode", 7, "me"),),
        pool=PoolStats(n_leased=5),
    )
    made = later.since(earlier)
    assert (made.uptime_s, made.n_tokens, made.decode_s) == (3, 15, 2)
    assert (made.n_queued, made.graph_nodes_added) == (2, 3)
    assert (made.slots, made.pool) == (later.slots, later.pool)
    assert later.since(later) == EngineStats(
        n_queued=2, graph_nodes_added=3, slots=later.slots, pool=later.pool, uptime_s=0
    )
