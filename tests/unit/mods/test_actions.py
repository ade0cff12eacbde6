"""Actions of mods: what each event allows, and values that are refused before anything happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kqview.errors import InvalidActionError, RequestError
from kqview.mods import (
    ActionBuilder,
    Added,
    AdjustedLogits,
    AdjustedPrefill,
    Backtrack,
    EmitError,
    ForceOutput,
    ForceTokens,
    ForwardPass,
    Noop,
    Prefilled,
    Sampled,
    ToolCalls,
)
from kqview.mods.actions import check_action

N_VOCAB = 10
ROW = np.linspace(-1, 1, N_VOCAB, dtype=np.float32)
EVENTS = {
    "Prefilled": Prefilled("r", 0, 8),
    "ForwardPass": ForwardPass("r", 1, ROW),
    "Sampled": Sampled("r", 1, 3),
    "Added": Added("r", 1, [3], False),
}
# Section 2.1 of the protocol: how each action is built, and the events that allow it.
EVERYWHERE = set(EVENTS)
IN_A_STEP = {"ForwardPass", "Sampled", "Added"}
MATRIX: dict[type, tuple[Any, Any, set[str]]] = {
    Noop: (Noop, lambda build: build.noop(), EVERYWHERE),
    AdjustedPrefill: (
        lambda: AdjustedPrefill([1], 4),
        lambda build: build.adjust_prefill([1], max_steps=4),
        {"Prefilled"},
    ),
    ForceTokens: (lambda: ForceTokens([1]), lambda build: build.force_tokens([1]), IN_A_STEP),
    Backtrack: (lambda: Backtrack(1, [2]), lambda build: build.backtrack(1, [2]), IN_A_STEP),
    AdjustedLogits: (
        lambda: AdjustedLogits(ROW),
        lambda build: build.adjust_logits(ROW),
        {"ForwardPass"},
    ),
    ForceOutput: (lambda: ForceOutput([1]), lambda build: build.force_output([1]), EVERYWHERE),
    ToolCalls: (lambda: ToolCalls({}), lambda build: build.tool_calls({}), EVERYWHERE),
    EmitError: (lambda: EmitError("no"), lambda build: build.emit_error("no"), EVERYWHERE),
}
PAIRS = [(action, event) for action in MATRIX for event in EVENTS]


@pytest.mark.parametrize(("action", "name"), PAIRS)
def test_matrix_decides_which_event_allows_which_action(action: type, name: str):
    make, build, allowed = MATRIX[action]
    event = EVENTS[name]
    if name in allowed:
        assert type(check_action(event, make(), N_VOCAB)) is action
        assert type(build(ActionBuilder(event))) is action
        return
    if action is not Noop:
        with pytest.raises(InvalidActionError, match=f"{action.__name__}.*{name}"):
            build(ActionBuilder(event))
    with pytest.raises(InvalidActionError, match=f"{action.__name__} is not allowed at {name}"):
        check_action(event, make(), N_VOCAB)


def test_error_is_a_value_error_and_names_what_is_allowed():
    with pytest.raises(ValueError, match=r"at Sampled, which allows Backtrack, .*Noop") as caught:
        ActionBuilder(EVENTS["Sampled"]).adjust_prefill([1])
    assert isinstance(caught.value, InvalidActionError)
    assert isinstance(caught.value, RequestError)


@pytest.mark.parametrize(
    "nonsense", [[Noop()], (), 0, "noop", Noop, object(), {"tokens": [1]}, True, np.zeros(3)]
)
def test_what_is_no_action_is_refused(nonsense: object):
    with pytest.raises(InvalidActionError, match="one action or None"):
        check_action(EVENTS["Added"], nonsense, N_VOCAB)


def test_subclasses_of_events_and_actions_are_refused():
    class Later(Sampled):
        pass

    class Forced(ForceTokens):
        pass

    with pytest.raises(InvalidActionError, match="not an event"):
        check_action(Later("r", 1, 3), ForceTokens([1]), N_VOCAB)
    with pytest.raises(InvalidActionError, match="one action"):
        check_action(EVENTS["Sampled"], Forced([1]), N_VOCAB)


@pytest.mark.parametrize("tokens", [[-1], [1.5], ["a"], "ab", b"ab", 5, None, [2**40], [True]])
@pytest.mark.parametrize("make", [ForceTokens, ForceOutput, AdjustedPrefill])
def test_ids_that_are_no_ids_are_refused(make: Any, tokens: object):
    with pytest.raises(InvalidActionError, match=f"tokens of {make.__name__}"):
        make(tokens)


@pytest.mark.parametrize(
    "action", [ForceTokens([1, 10]), Backtrack(0, [10]), ForceOutput([10]), ForceTokens([2**30])]
)
def test_ids_outside_the_vocabulary_are_refused(action: object):
    with pytest.raises(InvalidActionError, match="the vocabulary ends at 9"):
        check_action(EVENTS["Sampled"], action, N_VOCAB)


def test_ids_of_arrays_and_iterators_become_lists_of_int():
    assert ForceTokens(np.array([1, 2], np.int64)).tokens == [1, 2]  # type: ignore[arg-type]
    assert Backtrack(2, iter([3])).tokens == [3]  # type: ignore[arg-type]
    assert type(ForceOutput((np.int32(4),)).tokens[0]) is int  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [-1, 1.0, "1", None, True, 2**70])
def test_backtrack_refuses_what_is_no_count(n: object):
    with pytest.raises(InvalidActionError, match="n of Backtrack"):
        Backtrack(n)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [-1, 0.5, "8"])
def test_adjusted_prefill_refuses_max_steps_that_are_no_count(steps: object):
    with pytest.raises(InvalidActionError, match="max_steps of AdjustedPrefill"):
        AdjustedPrefill([1], steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.float16, np.int8, np.uint16, np.int64, ">f4"]
)
@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_logits_become_a_float32_row(dtype: Any, shape: tuple[int, ...]):
    given = np.array([1, 2, 3, 4], dtype).reshape(shape)
    row = AdjustedLogits(given).logits
    assert row.dtype == np.float32
    assert row.shape == (4,)
    assert row.flags.c_contiguous
    assert row.tolist() == [1, 2, 3, 4]


def test_logits_of_the_right_form_are_not_copied():
    assert np.shares_memory(AdjustedLogits(ROW).logits, ROW)
    assert np.shares_memory(AdjustedLogits(ROW[None]).logits, ROW)
    builder = ActionBuilder(EVENTS["ForwardPass"])
    assert np.shares_memory(builder.adjust_logits(token_temp=0.0).logits, ROW)


@pytest.mark.parametrize(
    ("logits", "fact"),
    [
        ([0.0, np.nan], "NaN"),
        ([0.0, np.inf], "inf"),
        ([0.0, 1e300], "above the range of float32"),
        ([-np.inf, -np.inf], "-inf for every token"),
        (np.zeros((2, 4)), r"\(2, 4\)"),
        (np.zeros((1, 1, 4)), r"\(1, 1, 4\)"),
        ([], r"\(0,\)"),
        (5.0, r"\(\)"),
        (["a"], "array of <U1"),
        ([True], "array of bool"),
        ([1j], "array of complex128"),
        ([object()], "array of object"),
        ([[1.0], [2.0, 3.0]], "list"),
        (None, "array of object"),
    ],
)
def test_logits_that_cannot_be_sampled_are_refused(logits: object, fact: str):
    with pytest.raises(InvalidActionError, match=f"logits of AdjustedLogits.*{fact}"):
        AdjustedLogits(logits)  # type: ignore[arg-type]


def test_logits_of_another_vocabulary_are_refused():
    with pytest.raises(InvalidActionError, match="have 9 values, but the vocabulary has 10"):
        check_action(EVENTS["ForwardPass"], AdjustedLogits(ROW[:9]), N_VOCAB)


@pytest.mark.parametrize("temperature", [-0.1, np.nan, np.inf, "hot", True, [1.0]])
def test_temperature_that_is_none_is_refused(temperature: object):
    with pytest.raises(InvalidActionError, match="token_temp"):
        AdjustedLogits(ROW, temperature)  # type: ignore[arg-type]


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize("payload", [object(), {1, 2}, float("nan"), b"x", ENDLESS])
def test_tool_calls_that_json_cannot_express_are_refused(payload: object):
    with pytest.raises(InvalidActionError, match="tool_calls of ToolCalls"):
        ToolCalls(payload)


def test_error_text_that_is_no_text_is_refused():
    with pytest.raises(InvalidActionError, match="err_str of EmitError must be a str, got 5"):
        EmitError(5)  # type: ignore[arg-type]
