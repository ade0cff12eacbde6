"""Mods on an engine: what they change, what their requests hand out, and every way these can end.

The rules of several mods and of each action are tested in ``tests/unit/mods/test_steering.py``.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Edit, Engine, errors, mod
from kqview.mods import (
    ActionBuilder,
    Added,
    AdjustedLogits,
    Backtrack,
    EmitError,
    ForceOutput,
    ForceTokens,
    ForwardPass,
    Mod,
    ModTokenizer,
    Prefilled,
    RequestEnd,
    Sampled,
    ToolCalls,
)
from kqview.mods.calls import ModCaller
from kqview.trace import final_ids
from tests.support.mods import at
from tests.support.rows import near, random_ids
from tests.support.tiny_gguf import END_OF_TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kqview.mods.decorator import BoundMod
    from kqview.mods.events import Event
    from tests.engine.conftest import MakeEngine

PROMPT = random_ids(12)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
EVENTS = [Prefilled, ForwardPass, Sampled, Added]
WAIT_S = 60.0
LOGITS_LIMIT = near(2e-5, "logits")  # of up to 6; 1.1e-5 with AVX2


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    # float32 all through, so that logits can be compared.
    options: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}
    with Engine(tiny_llama, n_ctx=256, n_slots=2, n_threads=1, **options) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[int]:
    return generate(engine, max_tokens=12).tokens


def generate(engine: Engine, *mods: Any, **options: Any) -> Any:
    """A generation that has ended."""
    generation = start(engine, *mods, **options)
    for _ in generation:
        pass
    return generation


async def run(generation: Any, *, is_async: bool) -> None:
    if is_async:
        async for _ in generation:
            pass
    else:
        generation.read()


def start(engine: Engine, *mods: Any, **options: Any) -> Any:
    return engine.generate(PROMPT, mods=mods, **{"max_tokens": 12, **GREEDY, **options})


quiet = pytest.mark.filterwarnings("ignore::kqview.mods.ModWarning")


def failures(generation: Any) -> list[str]:
    calls = [one for one in generation.trace.mod_calls if one.exception_occurred][:100]
    errors_of = generation.mod_errors
    assert [(one.mod, one.event, one.step, one.error) for one in errors_of] == [
        (one.mod_name, one.event_type, one.step, one.exception_message) for one in calls
    ]
    return [one.error for one in errors_of]


def await_idle(engine: Engine) -> None:
    for slot in range(len(engine.slots)):
        engine.generate(PROMPT, max_tokens=1, slot=slot, **GREEDY).read()
    assert not any(slot.is_busy for slot in engine.slots)


# ---- nothing changes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"capture": "probs", "top_logprobs": 3},
        {"temperature": 1.2, "seed": 5, "repeat_penalty": 1.3, "top_k": 30},
        {"stop": ["\x00never"], "max_tokens": 5, "capture": Capture("scores", top_k=4)},
    ],
)
def test_noop_mods_hand_out_what_a_plain_request_does(engine: Engine, options: dict[str, Any]):
    options = {**GREEDY, "max_tokens": 12, **options}
    expected = list(engine.generate(PROMPT, **options))
    tokens = list(engine.generate(PROMPT, mods=[mod(lambda event: None)], **options))
    for token, other in zip(tokens, expected, strict=True):
        assert (token.id, token.text, token.index) == (other.id, other.text, other.index)
        assert (token.logprob, token.top_logprobs) == (other.logprob, other.top_logprobs)
        assert (token.forced, token.n_removed) == (False, 0)
        for name in ("attention", "attention_positions"):
            got, wanted = getattr(token, name), getattr(other, name)
            assert (got is None) == (wanted is None)
            if got is not None:
                np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("options", "n_prompt_steps"),
    [({}, 1), ({"capture": Capture("logits")}, 1), ({"deterministic": True}, 2)],
)
def test_next_token_is_evaluated_while_a_mod_looks_at_this_one(
    engine: Engine, plain: list[int], options: dict[str, Any], n_prompt_steps: int
):
    generate(engine)  # the prompt is cached
    n_before = engine.stats().n_decodes + n_prompt_steps
    n_seen: list[int] = []

    @mod
    def slow(event: Event, actions: ActionBuilder, tokenizer: ModTokenizer) -> None:
        if isinstance(event, ForwardPass):
            await_decodes(engine, n_before + min(event.step, len(plain) - 1))
            n_seen.append(engine.stats().n_decodes - n_before)

    assert generate(engine, slow, **options).tokens == plain
    # A step ahead of each answer but the last, and none twice.
    assert n_seen == [*range(1, len(plain)), len(plain) - 1]


def await_decodes(engine: Engine, n: int) -> None:
    """Wait until the engine has made *n* steps, and a little for one more."""
    deadline = time.monotonic() + WAIT_S
    while engine.stats().n_decodes < n:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.005)


def test_request_without_mods_has_nothing_of_them(engine: Engine):
    generation = generate(engine)
    assert (generation.mods, generation.trace, generation.tool_calls) == ((), None, None)
    assert generation.n_removed == 0


def test_trace_alone_records_the_steps(engine: Engine, plain: list[int]):
    generation = generate(engine, trace=True)
    assert generation.tokens == plain
    assert len(generation.trace.events) == 1 + 3 * len(plain)
    assert generation.trace.mod_calls == []
    assert generate(engine, mod(lambda event: None), trace=False).trace is None


# ---- logits, attention, views


class Counting(Mod):
    """Handles one event by a method and one by what a request's `begin` puts in its place."""

    def begin(self, request_id: str, tokenizer: ModTokenizer) -> None:
        self.seen: list[type] = []
        self.on_sampled = lambda event, actions, tokenizer: self.seen.append(type(event))

    def on_added(self, event: Added, actions: ActionBuilder, tokenizer: ModTokenizer) -> None:
        self.seen.append(Added)


def test_only_events_that_a_mod_handles_reach_it_without_a_trace(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    called: list[type] = []
    inner = ModCaller.answer

    def answer(self: ModCaller, one: BoundMod, event: Event) -> Any:
        called.append(type(event))
        return inner(self, one, event)

    monkeypatch.setattr(ModCaller, "answer", answer)
    for trace in (False, True):
        called.clear()
        generation = engine.generate(PROMPT, max_tokens=2, mods=[Counting()], trace=trace, **GREEDY)
        generation.read()
        assert generation.mods[0].seen == [Sampled, Added] * 2
        expected = (
            [Prefilled, *[ForwardPass, Sampled, Added] * 2] if trace else [Sampled, Added] * 2
        )
        assert called == expected


def test_views_of_events_outlive_the_generation_and_the_engine(
    make_engine: MakeEngine, tiny_llama: Path
):
    kept: list[tuple[Any, np.ndarray]] = []

    def keep(event: ForwardPass) -> None:
        for view in (event.logits, event.attention, event.hidden):
            assert isinstance(view, np.ndarray)
            assert not view.flags.writeable
            kept.append((view, view.copy()))

    capture = Capture("probs", hidden=[1])
    engine = make_engine(tiny_llama, poisons_blocks=True)
    generation = generate(engine, at(ForwardPass, keep), capture=capture)
    assert len(kept) == 3 * len(generation.tokens)
    del generation
    generate(engine)
    engine.close()
    gc.collect()
    for view, copy in kept:
        np.testing.assert_array_equal(view, copy)


def test_logits_are_those_that_the_next_token_is_the_best_of(engine: Engine, plain: list[int]):
    rows: list[np.ndarray] = []
    generate(engine, at(ForwardPass, lambda event: rows.append(event.logits)))
    assert [int(row.argmax()) for row in rows] == plain
    assert {(row.dtype, row.shape) for row in rows} == {
        (np.dtype(np.float32), (engine.model.n_vocab,))
    }


def first_logits(engine: Engine, ids: list[int]) -> np.ndarray:
    """Logits behind *ids*, evaluated from nothing."""
    rows: list[np.ndarray] = []
    look = at(ForwardPass, lambda event: rows.append(event.logits))
    engine.slots[1].clear()
    for _ in engine.generate(ids, max_tokens=1, mods=[look], slot=1, **GREEDY):
        pass
    return rows[0]


@pytest.mark.parametrize(
    ("event_type", "answer", "step"),
    [
        (ForwardPass, ForceTokens([65, 66, 67]), 3),
        (Added, ForceTokens([65, 66, 67]), 3),
        (ForwardPass, Backtrack(3), 5),
        (Sampled, Backtrack(4, [65, 66]), 5),
        (Added, Backtrack(1, [65]), 5),
        (Sampled, Backtrack(100), 4),
        (Sampled, Backtrack(100, [70]), 4),
    ],
)
def test_next_logits_and_rows_are_those_of_a_fresh_prefill(
    engine: Engine, event_type: type, answer: Any, step: int
):
    passes: list[ForwardPass] = []
    watch = at(ForwardPass, passes.append)
    generation = start(engine, watch, at(event_type, lambda _: answer, step), capture="probs")
    for _ in generation:
        if len(passes) <= step:
            continue
        ids = [*PROMPT, *generation.tokens]
        event = passes[-1]
        if event.n_tokens == len(ids):
            np.testing.assert_allclose(event.logits, first_logits(engine, ids), atol=LOGITS_LIMIT)
            assert event.attention is not None
            assert event.attention.shape[-1] == len(ids)
    ids = generation.tokens
    assert final_ids(generation.trace) == ids
    whole = [*PROMPT, *ids[:-1]]
    np.testing.assert_allclose(passes[-1].logits, first_logits(engine, whole), atol=LOGITS_LIMIT)
    assert passes[-1].n_tokens == len(whole)


def test_tokens_say_what_was_forced_and_taken_back(engine: Engine, plain: list[int]):
    force = at(ForwardPass, lambda event: ForceTokens([65, 66]), step=2)
    back = at(Sampled, lambda event: Backtrack(2, [67]), step=4)
    tokens = list(start(engine, force, back, capture="probs", top_logprobs=0))
    assert [token.id for token in tokens[:2]] == [plain[0], 65]
    assert [token.forced for token in tokens[:5]] == [False, True, True, False, True]
    assert [token.n_removed for token in tokens[:5]] == [0, 0, 0, 0, 2]
    assert [token.index for token in tokens[:5]] == [0, 1, 2, 3, 2]
    assert [token.logprob is None for token in tokens[:5]] == [False, True, True, False, True]
    # Rows of a chunk's later tokens were never computed, nor that of a token elsewhere.
    assert [token.attention is None for token in tokens[:5]] == [False, False, True, False, True]
    assert tokens[1].attention.shape[-1] == len(PROMPT) + 1


def test_token_temp_of_zero_is_the_largest_logit_at_any_temperature(
    engine: Engine, plain: list[int]
):
    cold = at(ForwardPass, lambda event: AdjustedLogits(event.logits, 0.0))
    assert generate(engine, cold, temperature=50.0, top_k=0, min_p=0.0).tokens == plain


# ---- text


def test_text_stays_right_when_parts_of_characters_are_taken_back(engine: Engine):
    bytes_ = list("a€".encode())
    force = at(ForwardPass, lambda event: ForceTokens(bytes_), step=1)
    back = at(Sampled, lambda event: Backtrack(2, list("b€c".encode())), step=2)
    tokens = []
    generation = start(engine, force, back, max_tokens=8)
    tokens = list(generation)
    expected = (b"a\xe2" + "b€c".encode()).decode("utf-8", "replace")
    assert bytes(generation.tokens[:7]) == b"a\xe2" + "b€c".encode()
    assert generation.text.startswith(expected)
    # Who follows the stream drops as many tokens as each token says.
    texts: list[str] = []
    for token in tokens:
        del texts[len(texts) - token.n_removed :]
        texts.append(token.text)
    assert len(texts) == len(generation.tokens)


def test_stop_string_inside_forced_tokens_ends_the_text(engine: Engine):
    force = at(ForwardPass, lambda event: ForceTokens(list(b"one two three")), step=2)
    generation = generate(engine, force, stop=["two"], max_tokens=30)
    assert (generation.finish_reason, generation.stop_match) == ("stop_sequence", "two")
    assert generation.text.endswith("one ")
    assert bytes(generation.tokens[-7:]) == b"one two"


def test_stop_string_that_was_taken_back_does_not_end_the_text(engine: Engine):
    force = at(ForwardPass, lambda event: ForceTokens(list(b"tw")), step=2)
    back = at(ForwardPass, lambda event: Backtrack(1, list(b"hree")), step=3)
    generation = generate(engine, force, back, stop=["two"], max_tokens=9)
    assert generation.finish_reason == "length"
    assert bytes(generation.tokens[1:6]) == b"three"


@pytest.mark.parametrize(
    ("stop", "expected"), [("zzz", ["The sun", "moon!"]), ("sunny", ["The ", "moon!"])]
)
def test_deltas_go_on_behind_text_that_was_taken_back_after_it_was_shown(
    engine: Engine, stop: str, expected: list[str]
):
    force = at(ForwardPass, lambda event: ForceTokens([*b"The sun"]), step=1)
    back = at(ForwardPass, lambda event: Backtrack(3, [*b"moon!"]), step=2)
    generation = start(engine, force, back, stop=[stop], max_tokens=9)
    assert list(generation.deltas()) == expected
    assert generation.text == "The moon!"


# ---- limits


@pytest.mark.parametrize("max_tokens", [6, 1000])
def test_forced_tokens_are_cut_at_the_limit_and_at_the_end_of_the_slot(
    engine: Engine, max_tokens: int
):
    force = at(ForwardPass, lambda event: ForceTokens([65] * 400), step=2)
    generation = generate(engine, force, max_tokens=max_tokens)
    assert generation.finish_reason == "length"
    plain = generate(engine, max_tokens=max_tokens)
    assert len(generation.tokens) == len(plain.tokens)


def test_backtrack_gives_the_tokens_back_to_the_limit(engine: Engine, plain: list[int]):
    generation = generate(engine, at(Sampled, lambda event: Backtrack(3), step=8))
    assert generation.tokens == plain
    assert generation.usage.completion_tokens == len(plain)


# ---- prompts


def test_adjusted_prefill_is_the_prompt(engine: Engine):
    other = random_ids(7, seed=3)

    @mod
    def adjust(event: Any, actions: Any) -> Any:
        if isinstance(event, Prefilled):
            assert event.prompt_ids == PROMPT
            return actions.adjust_prefill(other, max_steps=3)
        return None

    generation = generate(engine, adjust, capture=Capture("probs", prompt=True))
    plain = [token.id for token in engine.generate(other, max_tokens=3, **GREEDY)]
    assert generation.tokens == plain
    assert generation.usage.prompt_tokens == 7
    assert generation.trace.request.user_prompt_token_ids == other


def test_what_counts_from_the_end_of_the_prompt_is_of_the_adjusted_one(engine: Engine):
    longer = [*random_ids(9, seed=3), *PROMPT]
    adjust = mod(
        lambda event, actions: (
            actions.adjust_prefill(longer) if isinstance(event, Prefilled) else None
        )
    )
    edit = Edit.add(np.full(engine.model.n_embd, 0.5), 0, positions=[-1])
    adjusted = generate(engine, adjust, edits=[edit])
    want = list(engine.generate(longer, max_tokens=len(adjusted.tokens), edits=[edit], **GREEDY))
    assert adjusted.tokens == [token.id for token in want]
    shifted = list(start(engine, adjust, context_shift=True, n_keep=-1, max_tokens=engine.n_ctx))
    assert shifted[-1].discarded.start == len(longer)


def test_array_of_the_prompts_rows_is_that_of_the_adjusted_prompt(tiny_llama: Path):
    adjust = mod(
        lambda event, actions: (
            actions.adjust_prefill(PROMPT[:9]) if isinstance(event, Prefilled) else None
        )
    )
    capture = Capture("probs", prompt=True)
    with Engine(tiny_llama, n_ctx=256, n_threads=1, n_ubatch=4, n_batch=4) as engine:
        rows = start(engine, adjust, capture=capture, max_tokens=1).prompt_attention.array()
        expected = engine.attend(PROMPT[:9], capture).array()
    assert rows.shape[-2:] == (9, 9)
    np.testing.assert_allclose(rows, expected, atol=near(0), rtol=0)


# ---- terminal actions and ends


@pytest.mark.parametrize("event_type", EVENTS)
def test_force_output_is_the_whole_text(engine: Engine, event_type: type):
    step = 0 if event_type is Prefilled else 3
    output = at(event_type, lambda event: ForceOutput([*b"fixed", END_OF_TEXT, 65]), step)
    generation = start(engine, output)
    tokens = list(generation)
    assert (generation.text, generation.finish_reason) == ("fixed", "stop")
    assert generation.tokens == list(b"fixed")
    n_before = max(0, step - 1)
    assert [token.n_removed for token in tokens] == [*[0] * n_before, n_before, *[0] * 4]
    await_idle(engine)


@pytest.mark.parametrize("event_type", EVENTS)
def test_tool_calls_end_without_text(engine: Engine, event_type: type):
    step = 0 if event_type is Prefilled else 3
    payload = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    generation = generate(engine, at(event_type, lambda event: ToolCalls(payload), step))
    assert (generation.text, generation.tokens) == ("", [])
    assert (generation.finish_reason, generation.tool_calls) == ("tool_calls", payload)
    assert generation.n_removed == max(0, step - 1)
    await_idle(engine)


@pytest.mark.parametrize("event_type", EVENTS)
@pytest.mark.parametrize("is_async", [False, True])
async def test_emit_error_is_raised_from_iteration(
    engine: Engine, event_type: type, is_async: bool
):
    step = 0 if event_type is Prefilled else 3
    generation = start(engine, at(event_type, lambda event: EmitError("not this"), step))
    with pytest.raises(errors.EmittedError, match=r"^not this$"):
        await run(generation, is_async=is_async)
    assert (generation.finish_reason, generation.tokens) == ("error", [])
    assert "not this" in generation.trace.request.inference_stats["error"]
    await_idle(engine)


def leave_by_close(generation: Any) -> None:
    next(generation)
    generation.close()


def leave_by_error(generation: Any) -> None:
    with pytest.raises(LookupError):
        generation.read()


ENDS: dict[str, tuple[dict[str, Any], Callable[[Any], object]]] = {
    "length": ({}, lambda generation: generation.read()),
    "stop_sequence": ({"stop": ["x"], "logit_bias": {120: 100.0}}, lambda g: g.read()),
    "stop_token": ({"stop_tokens": [65], "logit_bias": {65: 100.0}}, lambda g: g.read()),
    "cancelled": ({}, leave_by_close),
    "error": ({"stopping": lambda ids: {}[0]}, leave_by_error),
    "stop": ({"stopping": lambda ids: True}, lambda generation: generation.read()),
}


@pytest.mark.parametrize("reason", ENDS)
def test_trace_and_end_hook_know_how_the_request_ended(engine: Engine, reason: str):
    ends: list[RequestEnd] = []
    options, leave = ENDS[reason]
    generation = start(engine, mod(on_end=ends.append)(lambda event: None), **options)
    leave(generation)
    generation.close()
    assert [end.finish_reason for end in ends] == [reason] == [generation.finish_reason]
    assert list(ends[0].ids) == generation.tokens
    assert isinstance(ends[0].error, LookupError) == (reason == "error")
    request = generation.trace.to_payload()["request"]
    assert request["inference_stats"]["finish_reason"] == reason
    assert request["completed_at"] is not None
    assert request["final_token_ids"] == generation.tokens
    assert (request["request_id"], request["mod_text"]) == (generation.request_id, "<lambda>")


def test_generation_that_is_never_iterated_ends_too(engine: Engine):
    ends: list[RequestEnd] = []
    generation = start(engine, mod(on_end=ends.append)(lambda event: None))
    assert generation.slot is None
    generation.close()
    assert [end.finish_reason for end in ends] == ["cancelled"]
    assert list(generation) == []


@pytest.mark.parametrize("n_taken", [0, 2])
def test_dropped_generation_frees_its_slot_and_calls_the_end_hook(engine: Engine, n_taken: int):
    ended = threading.Event()
    ends: list[RequestEnd] = []

    def on_end(end: RequestEnd) -> None:
        ends.append(end)
        ended.set()

    generation = start(engine, mod(on_end=on_end)(lambda event: None))
    for _ in range(n_taken):
        next(generation)
    trace = generation.trace
    del generation
    gc.collect()
    assert ended.wait(WAIT_S)
    assert (ends[0].finish_reason, len(ends[0].ids)) == ("cancelled", n_taken)
    assert trace.request.inference_stats["finish_reason"] == "cancelled"
    await_idle(engine)


@pytest.mark.parametrize("event_type", EVENTS)
def test_mod_may_cancel_its_own_generation(engine: Engine, event_type: type):
    order: list[str] = []

    def cancel(event: Any) -> None:
        generation.cancel()
        generation.close()
        order.append("mod")

    step = 0 if event_type is Prefilled else 3
    hooked = mod(on_end=lambda end: order.append(end.finish_reason))(
        lambda event: cancel(event) if type(event) is event_type and event.step == step else None
    )
    generation = start(engine, hooked)
    assert len(list(generation)) == max(0, step - 1)
    assert generation.finish_reason == "cancelled"
    assert order == ["mod", "cancelled"]
    await_idle(engine)


def test_engine_that_a_mod_closes_ends_its_generation(make_engine: MakeEngine, tiny_llama: Path):
    engine = make_engine(tiny_llama)
    generation = start(engine, at(Sampled, lambda event: engine.close(), step=2))
    with pytest.raises(errors.ClosedError):
        generation.read()
    assert generation.finish_reason == "error"
    assert len(generation.tokens) == 1


# ---- mods that fail, hang or call the engine


@quiet
@pytest.mark.parametrize("event_type", EVENTS)
@pytest.mark.parametrize("limit_s", [None, WAIT_S])
def test_mod_that_raises_changes_nothing(
    engine: Engine, plain: list[int], event_type: type, limit_s: float | None
):
    def fail(event: Any) -> None:
        raise ValueError("bad day")

    generation = generate(engine, at(event_type, fail), mod_time_limit_s=limit_s)
    assert generation.tokens == plain
    n_events = 1 if event_type is Prefilled else len(plain)
    assert failures(generation) == ["ValueError: bad day"] * n_events


@pytest.mark.parametrize("event_type", EVENTS)
@pytest.mark.parametrize("limit_s", [None, WAIT_S])
@pytest.mark.parametrize("is_async", [False, True])
async def test_guard_that_is_needed_and_fails_lets_no_text_through(
    engine: Engine, plain: list[int], event_type: type, limit_s: float | None, is_async: bool
):
    def fail(event: Any) -> None:
        return forbidden  # type: ignore[name-defined]  # noqa: F821

    guard = at(event_type, fail, step=0 if event_type is Prefilled else 3)
    options: dict[str, Any] = {"mod_time_limit_s": limit_s, "mods_strict": True}
    generation = start(engine, guard, trace=False, **options)
    with pytest.raises(errors.ModFailed, match="with NameError, and mods_strict") as raised:
        await run(generation, is_async=is_async)
    assert (raised.value.mod, type(raised.value.__cause__)) == (guard.name, NameError)
    assert generation.finish_reason == "error"
    assert generation.tokens == ([] if event_type is Prefilled else plain[:2])
    [failure] = generation.mod_errors
    assert failure.error == "NameError: name 'forbidden' is not defined"
    await_idle(engine)


@pytest.mark.parametrize("is_async", [False, True])
async def test_busy_error_of_a_mod_that_is_needed_ends_its_request(
    make_engine: MakeEngine, tiny_llama: Path, is_async: bool
):
    engine = make_engine(tiny_llama)

    def fails(event: Any) -> None:
        raise errors.BusyError("later")

    needed = at(Added, fails, step=2)
    needed.required = True
    generation = start(engine, needed)
    with pytest.raises(errors.ModFailed) as raised:
        await run(generation, is_async=is_async)
    assert isinstance(raised.value.__cause__, errors.BusyError)
    assert (generation.finish_reason, len(generation.tokens)) == ("error", 1)
    await_idle(engine)


def test_map_returns_the_failure_of_a_mod_that_is_needed(engine: Engine):
    @mod(required=True)
    def fails(event: Any) -> None:
        raise ValueError(event.request_id)

    found = list(engine.map([PROMPT, PROMPT], mods=[fails], on_error="return", **GREEDY))
    assert [(type(one.error), one.finish_reason) for one in found] == [
        (errors.ModFailed, "error")
    ] * 2


@quiet
@pytest.mark.parametrize("event_type", EVENTS)
@pytest.mark.parametrize("is_async", [False, True])
async def test_mod_that_hangs_is_left_behind(
    engine: Engine, plain: list[int], event_type: type, is_async: bool
):
    release = threading.Event()
    n_entered = 0

    def hang(event: Any) -> None:
        nonlocal n_entered
        n_entered += 1
        release.wait(WAIT_S)

    generation = start(engine, at(event_type, hang), mod_time_limit_s=0.05)
    try:
        await run(generation, is_async=is_async)
        assert generation.tokens == plain
        # On a machine that is slow enough, calls for other events exceed the limit too.
        assert n_entered <= 1
        found = failures(generation)
        assert "took more than the 0.05 s" in found[0]
        assert {one.partition(":")[0] for one in found} == {"TimeoutError"}
        assert any("earlier call" in one for one in found)
    finally:
        release.set()


@quiet
@pytest.mark.parametrize("event_type", EVENTS)
@pytest.mark.parametrize("limit_s", [None, WAIT_S])
@pytest.mark.parametrize("is_async", [False, True])
async def test_mod_may_generate_while_its_own_request_has_the_only_slot(
    make_engine: MakeEngine,
    tiny_llama: Path,
    event_type: type,
    limit_s: float | None,
    is_async: bool,
):
    engine = make_engine(tiny_llama)
    found: list[str] = []
    nested = at(
        event_type,
        lambda event: found.append(engine.generate(PROMPT, max_tokens=2, **GREEDY).read()),
        step=2,
    )
    generation = start(engine, nested, max_tokens=4, mod_time_limit_s=limit_s)
    await run(generation, is_async=is_async)
    assert len(generation.tokens) == 4
    assert len(found) == (0 if event_type is Prefilled else 1)
    assert failures(generation) == []
    # There is no second step of a prompt.
    assert engine.stats().n_parkings == (0 if event_type is Prefilled else 1)


async def test_async_mod_may_generate_while_its_own_request_has_the_only_slot(
    make_engine: MakeEngine, tiny_llama: Path
):
    engine = make_engine(tiny_llama)

    @mod
    async def nested(event: Any) -> None:
        if isinstance(event, ForwardPass) and event.step == 2:
            async for _ in engine.generate(PROMPT, max_tokens=2):
                pass

    for limit_s in (None, WAIT_S):
        generation = start(engine, nested, max_tokens=4, mod_time_limit_s=limit_s)
        async for _ in generation:
            pass
        assert len(generation.tokens) == 4
        assert failures(generation) == []


@quiet
@pytest.mark.parametrize("limit_s", [None, WAIT_S])
def test_mod_that_iterates_its_own_generation_is_told_so(
    engine: Engine, plain: list[int], limit_s: float | None
):
    take = mod(lambda event: next(generation))
    generation = start(engine, take, mod_time_limit_s=limit_s)
    generation.read()
    assert generation.tokens == plain
    assert len(failures(generation)) == 1 + 3 * len(plain)
    assert all("cannot iterate the generation that calls it" in one for one in failures(generation))


def test_forced_token_that_the_grammar_does_not_allow_is_refused(engine: Engine):
    force = at(ForwardPass, lambda event: ForceTokens([*b"no"]), step=2)
    generation = start(engine, force, grammar='root ::= "yes"+')
    with pytest.raises(errors.InvalidSampling):
        generation.read()
    assert generation.finish_reason == "error"
    await_idle(engine)


# ---- async, threads


async def test_async_mods_are_awaited_beside_each_other(engine: Engine, plain: list[int]):
    together = asyncio.Event()
    n_waiting = 0

    @mod
    async def meet(event: Any, actions: Any) -> Any:
        nonlocal n_waiting
        if isinstance(event, ForwardPass) and event.step == 2:
            n_waiting += 1
            if n_waiting == 2:
                together.set()
            await together.wait()
        return actions.noop()

    async def ids() -> list[int]:
        return [token.id async for token in start(engine, meet)]

    async with asyncio.timeout(WAIT_S):
        assert await asyncio.gather(ids(), ids()) == [plain, plain]


async def test_grammar_holds_on_an_event_loop_as_it_does_elsewhere(engine: Engine):
    options: dict[str, Any] = {"grammar": "root ::= [a-z ]*", "max_tokens": 12, **GREEDY}
    plain = engine.generate(PROMPT, **options)
    ids = [token.id for token in plain]
    steered = engine.generate(PROMPT, mods=[at(Added, lambda event: None)], **options)
    assert [token.id async for token in steered] == ids
    cancelled = engine.generate(PROMPT, mods=[at(Added, lambda event: None)], **options)
    await anext(cancelled)
    task = asyncio.ensure_future(anext(cancelled))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await cancelled.aclose()
    assert [token.id async for token in engine.generate(PROMPT, **options)] == ids


async def test_other_tasks_run_while_forced_tokens_are_handed_out(engine: Engine):
    n_turns = 0

    async def count() -> None:
        nonlocal n_turns
        while True:
            n_turns += 1
            await asyncio.sleep(0)

    output = at(Added, lambda event: ForceOutput([65] * 2000))
    generation = engine.generate(PROMPT, mods=[output], **GREEDY)
    first = await anext(generation)
    counting = asyncio.ensure_future(count())
    rest = [token.id async for token in generation]
    counting.cancel()
    assert [first.id, *rest] == [65] * 2000
    assert n_turns > 20


def test_async_mods_are_refused_in_a_synchronous_loop(engine: Engine):
    @mod
    async def slow(event: Any) -> None: ...

    with pytest.raises(errors.RequestError, match="iterate it with async for"):
        start(engine, slow).read()


def test_threads_with_mods_beside_plain_ones_get_what_they_get_alone(
    engine: Engine, plain: list[int]
):
    force = at(ForwardPass, lambda event: ForceTokens([65, 66]), step=3)
    back = at(Added, lambda event: Backtrack(2, [67]), step=6)
    alone = generate(engine, force, back).tokens
    found: list[Any] = []

    def work(mods: tuple[Any, ...], expected: list[int]) -> None:
        for _ in range(4):
            print("a thread that prints")
            found.append(generate(engine, *mods).tokens == expected)

    jobs = [((force, back), alone), ((), plain), ((force, back), alone), ((), plain)]
    threads = [threading.Thread(target=work, args=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == [True] * 16


# ---- logits_processor and stopping


def test_logits_processor_changes_every_step(engine: Engine):
    def only(ids: list[int], logits: np.ndarray) -> np.ndarray:
        assert ids[: len(PROMPT)] == PROMPT
        logits[:] = -np.inf
        logits[65 + len(ids) - len(PROMPT)] = 0
        return logits

    generation = generate(engine, logits_processor=only, max_tokens=4)
    assert generation.text == "ABCD"
    assert generation.trace is None


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1}, {"max_tokens": 5}, {"stop": "AAA"}, {"stop_tokens": [66]},
        {"stopping": lambda ids: len(ids) == len(PROMPT) + 3}, {"top_logprobs": 2, "max_tokens": 2},
        {"capture": Capture("probs", vocab_logits=True), "max_tokens": 3},
    ],
    ids="-".join,
)  # fmt: skip
def test_processor_does_the_same_with_and_without_a_trace(engine: Engine, options: dict[str, Any]):
    def process(ids: list[int], logits: np.ndarray) -> np.ndarray | None:
        n = len(ids) - len(PROMPT)
        logits[65 if n < 4 else 66 if n == 4 else END_OF_TEXT] = 1e4
        return None if n % 2 else np.array(logits, np.float64)

    def ran(**more: Any) -> list[Any]:
        generation = engine.generate(
            PROMPT, temperature=0, logits_processor=process, **options, **more
        )
        seen = [
            (token.id, token.text, token.forced, token.logprob, token.top_logprobs)
            for token in generation
        ]
        return [seen, generation.text, generation.finish_reason, generation.usage.completion_tokens]

    assert ran() == ran(trace=True)


def test_generation_is_busy_while_its_processor_runs(engine: Engine):
    def process(ids: list[int], logits: np.ndarray) -> None:
        with pytest.raises(errors.BusyError, match="cannot iterate"):
            next(generation)
        logits[:] = np.nan

    generation = engine.generate(PROMPT, max_tokens=2, logits_processor=process)
    with pytest.raises(errors.RequestError, match="cannot be sampled") as caught:
        generation.read()
    assert caught.value.parameter == "logits_processor"
    assert generation.finish_reason == "error"


def test_generation_that_its_processor_cancels_yields_nothing_more(engine: Engine):
    generation = engine.generate(
        PROMPT, max_tokens=9, logits_processor=lambda ids, logits: generation.cancel()
    )
    assert (generation.read(), generation.finish_reason) == ("", "cancelled")


@pytest.mark.parametrize(
    ("capture", "is_kept"),
    [
        (Capture("probs"), True), (Capture("probs", reduce="mean"), True),
        (Capture("probs", reduce="mean_heads"), True), (Capture("probs", reduce="max"), False),
        (Capture("scores", reduce="mean"), False), (Capture("probs", spans=[(0, 3)]), False),
    ],
    ids=str,
)  # fmt: skip
def test_trace_keeps_the_mean_attention_of_a_capture_that_has_it(
    engine: Engine, capture: Capture, is_kept: bool
):
    def kept(capture: Capture) -> list[Any]:
        generation = generate(engine, capture=capture, trace=True, max_tokens=2, temperature=0)
        assert generation.trace is not None
        events = generation.trace.events
        found = [(one.details or {}).get("attention") for one in events]
        return [one for one in found if one is not None]

    found = kept(capture)
    assert len(found) == (2 if is_kept else 0)
    for one, whole in zip(found, kept(Capture("probs")), strict=False):
        assert one["positions"][:3] == whole["positions"][:3]
        assert one["weights"] == pytest.approx(whole["weights"], abs=1e-4)


def test_logits_processors_of_a_list_are_called_in_turn(engine: Engine):
    def only(ids: list[int], logits: np.ndarray) -> np.ndarray:
        return np.where(np.arange(logits.size) == 65, 1.0, -np.inf)

    def then(ids: list[int], logits: np.ndarray) -> None:
        assert logits[65] == 1
        logits[66] = 2

    assert generate(engine, logits_processor=[only, then], max_tokens=2).text == "BB"
    assert generate(engine, logits_processor=[], max_tokens=2).trace is None
    with pytest.raises(errors.RequestError, match=r"logits_processor\[1\] must be a function"):
        generate(engine, logits_processor=[only, 1], max_tokens=2)


@pytest.mark.parametrize("is_async", [False, True])
async def test_forcing_adds_tokens_to_a_step(engine: Engine, is_async: bool):
    def forcing(kept: Sequence[int], added: Sequence[int]) -> list[int]:
        if not kept and not added:
            return [65, 66]
        return [67] if len(kept) + len(added) == 4 else []

    generation = start(engine, forcing=forcing, max_tokens=8)
    await run(generation, is_async=is_async)
    assert generation.tokens[:2] == [65, 66]
    assert generation.tokens[4] == 67
    assert len(generation.tokens) == 8
    # What follows is what the model says after them.
    rest = engine.generate([*PROMPT, *generation.tokens[:5]], max_tokens=3, **GREEDY)
    rest.read()
    assert generation.tokens[5:] == rest.tokens
    assert generation.trace is None


@pytest.mark.parametrize("option", ["logits_processor", "stopping", "forcing"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_callable_may_generate_while_its_own_request_has_the_only_slot(
    make_engine: MakeEngine, tiny_llama: Path, option: str, is_async: bool
):
    engine = make_engine(tiny_llama)

    def nested(*_: Any) -> Any:
        engine.generate(PROMPT, max_tokens=2).read()
        return [] if option == "forcing" else None

    generation = start(engine, **{option: nested})
    await run(generation, is_async=is_async)
    assert generation.finish_reason == "length"
    assert engine.stats().n_parkings >= 11


def test_rows_tell_which_tokens_a_mod_added_without_a_forward_pass(engine: Engine):
    force = at(ForwardPass, lambda event: ForceTokens([65, 66, 67]), step=2)
    back = at(Sampled, lambda event: Backtrack(2, [70]), step=5)
    tokens = list(generation := start(engine, force, back, capture="probs"))
    forced = [token for token in tokens if token.forced]
    assert [(token.id, token.attention is None) for token in forced] == [
        (65, False), (66, True), (67, True), (70, True),
    ]  # fmt: skip
    for token in forced[1:]:
        with pytest.raises(errors.InvalidCapture, match="a mod added it") as caught:
            _ = token.rows
        assert "on_full" not in str(caught.value)
    # What the message says instead.
    rows = engine.attend(generation.prompt_ids + generation.tokens).array()
    assert rows.shape[2] == len(PROMPT) + len(generation.tokens)


def test_context_shift_goes_on_with_mods(engine: Engine):
    force = at(ForwardPass, lambda event: ForceTokens([65] * 7) if event.step % 3 == 0 else None)
    back = at(Sampled, lambda event: Backtrack(3, [66]) if event.step % 7 == 0 else None)
    generation = start(engine, force, back, context_shift=True, max_tokens=400, capture="probs")
    tokens = list(generation)
    assert generation.finish_reason == "length"
    assert len(generation.tokens) == 400
    assert final_ids(generation.trace) == generation.tokens
    for token in tokens:
        if token.attention is not None and token.attention.shape[-1] > 0:
            n_before = len(PROMPT) + token.index - len(token.discarded)
            assert token.attention.shape[-1] == n_before


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"logits_processor": 5}, "logits_processor"),
        ({"stopping": "never"}, "stopping"),
        ({"forcing": [65]}, "forcing"),
        ({"mod_time_limit_s": -1}, "mod_time_limit_s"),
        ({"trace": "yes"}, "trace"),
        ({"mods": [5]}, "mods"),
        ({"mods": "mod"}, "mods"),
        ({"mods": [lambda: None]}, "mods"),
    ],
)
def test_options_that_are_none_are_refused_by_name(
    engine: Engine, options: dict[str, Any], name: str
):
    with pytest.raises(errors.RequestError, match=name) as caught:
        engine.generate(PROMPT, **options)
    assert caught.value.parameter == name


# ---- the tokenizer


def test_tokenizer_of_mods_has_the_names_that_users_know(make_engine: MakeEngine, tiny_llama: Path):
    found: list[ModTokenizer] = []
    engine = make_engine(tiny_llama)

    @mod
    def look(event: Any, actions: Any, tokenizer: Any) -> None:
        found.append(tokenizer)

    generate(engine, look, max_tokens=1)
    tokenizer = found[0]
    assert all(one is tokenizer for one in found)
    text = "a €<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == engine.tokenize(text, add_special=False)
    assert tokenizer.encode(text) == engine.tokenize(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a €"
    assert tokenizer.decode(ids[0]) == "a"
    assert tokenizer.eos_token_id == engine.model.eos_token_id
    assert tokenizer.bos_token_id == engine.model.bos_token_id
    vocabulary = tokenizer.get_vocab()
    assert len(vocabulary) == len(tokenizer) == tokenizer.vocab_size == engine.model.n_vocab
    assert sorted(vocabulary.values()) == list(range(len(tokenizer)))
    assert vocabulary["a"] == 97
    assert set(tokenizer.all_special_ids) == set(engine.control_tokens.values())


# ---- everything at once


def random_mod(seed: int) -> Any:
    rng = random.Random(seed)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(32, 127) for _ in range(rng.randrange(most))]

    def answer(event: Any, actions: Any) -> Any:
        match rng.randrange(20):
            case 0:
                return actions.backtrack(rng.randrange(5))
            case 1 | 2:
                return actions.backtrack(rng.randrange(5), tokens(4))
            case 3 | 4:
                return actions.force_tokens(tokens(5))
            case 5:
                return actions.adjust_logits(token_temp=rng.choice([None, 0.0, 2.0]))
            case 6:
                raise ValueError("now and then")
            case _:
                return None

    return mod(name=f"random {seed}")(answer)


@quiet
def test_trace_of_random_mods_rebuilds_the_ids_and_the_cache_is_right(engine: Engine):
    n_steps = seed = 0
    while n_steps < 300:
        seed += 1
        mods = [random_mod(seed * 3 + i) for i in range(1 + seed % 3)]
        seen: list[tuple[ForwardPass, list[int]]] = []
        watch = at(ForwardPass, lambda event: seen.append((event, [*PROMPT, *generation.tokens])))  # noqa: B023
        generation = start(
            engine, *mods, watch, max_tokens=40, slot=0, temperature=0.7, seed=seed,
        )  # fmt: skip
        generation.read()
        ids = generation.tokens
        assert final_ids(generation.trace) == ids == generation.trace.request.final_token_ids
        assert len(ids) <= 40
        event, evaluated = seen[-1]
        assert event.n_tokens == len(evaluated)
        np.testing.assert_allclose(event.logits, first_logits(engine, evaluated), atol=LOGITS_LIMIT)
        n_steps += len(seen)
