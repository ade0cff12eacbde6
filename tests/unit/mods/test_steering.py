"""Rules of steering: several mods, Backtrack, forced tokens, ends of a text; against a fake model.

`run` stands for the engine: it holds the ids, and hands every state of them out as a forward pass
whose logits depend on all ids. What the mods did is also rebuilt from the trace.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview.errors import (
    EmittedError,
    InvalidActionError,
    InvalidToken,
    ModFailed,
    RequestError,
)
from kqview.mods import (
    Added,
    AdjustedLogits,
    AdjustedPrefill,
    Backtrack,
    EmitError,
    ForceOutput,
    ForceTokens,
    ForwardPass,
    Mod,
    ModFailure,
    ModWarning,
    Noop,
    Prefilled,
    Sampled,
    ToolCalls,
    mod,
)
from kqview.mods.calls import ModCaller, at_once
from kqview.mods.decorator import begin
from kqview.mods.failures import ModFailures, logging_failures
from kqview.mods.steering import Decision, Steering
from kqview.trace import Trace, TraceRecorder, TraceRequest, final_ids
from tests.support.mods import FakeForward, Picked, at
from tests.support.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

N_VOCAB = 50
EOS = 0
PROMPT = [5, 6, 7]
TOKENIZER: Any = object()


ROWS = np.random.default_rng(7).normal(0, 3, (499, N_VOCAB)).astype(np.float32)
ROWS[:, EOS] = -1.0
ROWS.flags.writeable = False


def logits_after(ids: Sequence[int]) -> np.ndarray:
    return ROWS[hash(tuple(ids)) % len(ROWS)]


@dataclass
class Ran:
    ids: list[int]
    decision: Decision
    trace: Trace
    decisions: list[Decision]
    forwards: list[FakeForward]

    @property
    def end(self) -> str | None:
        return self.decision.end

    def actions(self, kind: str) -> list[bool]:
        """Whether each action of this kind was applied."""
        return [one.is_applied for one in self.trace.actions if one.action_type == kind]

    def seen(self) -> list[tuple[str, int]]:
        return [(one.event_type, one.step) for one in self.trace.events]


def steer(mods: Sequence[Any], ids: list[int], request_id: str = "r", **options: Any) -> Steering:
    def check_prompt(prompt: list[int]) -> None:
        if len(prompt) > 20:
            raise RequestError("prompt has more than 20 tokens", parameter="prompt")

    def text_of(token: int) -> str:
        return f"<{token}>"

    recorder = TraceRecorder(TraceRequest(request_id=request_id), text_of=text_of)
    given: dict[str, Any] = {
        "n_vocab": N_VOCAB,
        "ids": ids,
        "text": lambda: "".join(map(text_of, ids)),
        "recorder": recorder,
        "check_prompt": check_prompt,
        "plan_edits": lambda edits, n_tokens: None,
        "detokenize": lambda some: "".join(map(text_of, some)),
        "is_end": lambda token: token == EOS,
        "attention": lambda event: None,
        **options,
    }
    return Steering(request_id, begin(mods, request_id, TOKENIZER), ModCaller(TOKENIZER), **given)


def run(
    *mods: Any,
    max_tokens: int = 8,
    stops: frozenset[int] = frozenset(),
    stop_at: Sequence[int] = (),
    n_fixed: int = 0,
    **options: Any,
) -> Ran:
    """Generate with *mods*; a text ends behind the ids *stop_at*, as it would at a stop string.

    The first *n_fixed* generated ids cannot be taken back.
    """
    ids: list[int] = []
    steering = steer(mods, ids, **options)
    decisions: list[Decision] = []
    forwards: list[FakeForward] = []

    def cut(n_removed: int, added: Sequence[int]) -> int | None:
        whole = ids[: len(ids) - n_removed] + list(added)
        n_before = len(ids) - n_removed
        for n in range(1, len(added) + 1):
            end = n_before + n
            if stop_at and whole[max(0, end - len(stop_at)) : end] == list(stop_at):
                return n
        return None

    def take(decision: Decision | None) -> Decision:
        assert decision is not None
        assert 0 <= decision.n_removed <= len(ids)
        del ids[len(ids) - decision.n_removed :]
        ids.extend(decision.ids)
        decisions.append(decision)
        return decision

    decision = take(
        at_once(steering.run(steering.prefill(PROMPT, max_tokens=max_tokens), is_async=False))
    )
    prompt, limit = decision.prompt, decision.max_tokens
    while decision.end is None:
        context = [*prompt, *ids]
        n_removable = max(0, len(ids) - n_fixed)
        forward = FakeForward(
            logits_after(context), len(context), limit - len(ids), n_removable, stops
        )
        forwards.append(forward)
        decision = take(at_once(steering.run(steering.step(forward, cut), is_async=False)))
    steering.finish(decision.end)
    assert steering.recorder is not None
    trace = steering.recorder.trace
    assert trace.request.final_token_ids == ids
    assert final_ids(trace) == ids
    return Ran(ids, decision, trace, decisions, forwards)


PLAIN = run().ids


def others(*banned: int) -> Callable[[Any], AdjustedLogits]:
    """Mask *banned* ids, and EOS."""

    def make(event: Any) -> AdjustedLogits:
        row = event.logits.copy()
        row[[EOS, *banned]] = -np.inf
        return AdjustedLogits(row)

    return make


# ---- events


def test_events_come_once_with_step_0_and_then_in_triples_from_1():
    seen = run(mod(lambda event: None), max_tokens=3).seen()
    triples = [(name, n) for n in (1, 2, 3) for name in ("ForwardPass", "Sampled", "Added")]
    assert seen == [("Prefilled", 0), *triples]


def test_events_carry_what_they_say():
    events: list[Any] = []
    ids = run(mod(lambda event: events.append(event)), max_tokens=1).ids
    prefilled, forward, sampled, added = events
    assert (prefilled.prompt_ids, prefilled.max_steps) == (PROMPT, 1)
    assert forward.n_tokens == len(PROMPT)
    assert forward.logits.tolist() == logits_after(PROMPT).tolist()
    assert sampled.sampled_token == ids[0]
    assert (added.added_tokens, added.forced) == (ids, False)
    assert {event.request_id for event in events} == {"r"}


def test_prompt_that_a_mod_keeps_is_read_only():
    prompts: list[np.ndarray] = []
    run(at(Prefilled, lambda event: prompts.append(event.context_info.tokens)))
    with pytest.raises(ValueError, match="read-only"):
        prompts[0][0] = 1


# ---- prompts


def test_adjusted_prefill_replaces_the_prompt_and_the_limit():
    ran = run(at(Prefilled, lambda event: AdjustedPrefill([9, 8], 3)))
    assert ran.forwards[0].n_tokens == 2
    assert len(ran.ids) == 3
    assert ran.ids[0] == int(np.argmax(logits_after([9, 8])))


@pytest.mark.parametrize("steps", [None, 0])
def test_adjusted_prefill_without_tokens_or_steps_keeps_them(steps: int | None):
    assert run(at(Prefilled, lambda event: AdjustedPrefill([], steps))).ids == PLAIN


def test_first_adjusted_prefill_applies():
    first = at(Prefilled, lambda event: AdjustedPrefill([9, 8]))
    second = at(Prefilled, lambda event: AdjustedPrefill([1]))
    ran = run(first, second)
    assert ran.forwards[0].n_tokens == 2
    assert ran.actions("AdjustedPrefill") == [True, False]


def test_prompt_that_the_engine_refuses_is_a_noop_with_the_reason():
    with pytest.warns(ModWarning, match="more than 20 tokens"):
        ran = run(at(Prefilled, lambda event: AdjustedPrefill([1] * 21)))
    assert ran.ids == PLAIN
    assert "more than 20 tokens" in (ran.trace.mod_calls[0].exception_message or "")


# ---- logits


def test_adjusted_logits_hold_for_one_step():
    ran = run(at(ForwardPass, others(PLAIN[0]), step=1))
    assert ran.ids[0] != PLAIN[0]
    assert [one[0][0] is None for one in (f.picked_with for f in ran.forwards)] == [
        False,
        *[True] * (len(ran.forwards) - 1),
    ]


def test_later_mods_see_the_logits_that_earlier_ones_adjusted():
    runner_up = int(np.argsort(logits_after(PROMPT))[-2])
    seen: list[float] = []
    look = at(ForwardPass, lambda event: seen.append(float(event.logits[PLAIN[0]])), step=1)
    ban_best = at(ForwardPass, others(PLAIN[0]), step=1)
    ban_next = at(ForwardPass, others(runner_up), step=1)
    ran = run(look, ban_best, look, ban_next)
    assert seen[1] == -np.inf < seen[0]
    assert ran.ids[0] not in (PLAIN[0], runner_up)


def test_logits_of_an_earlier_mod_are_read_only_for_later_ones():
    errors: list[str] = []

    @mod
    def writes(event: Any) -> None:
        if isinstance(event, ForwardPass):
            with pytest.raises(ValueError, match="read-only") as caught:
                event.logits[0] = 1
            errors.append(str(caught.value))

    run(at(ForwardPass, others()), writes, max_tokens=1)
    assert len(errors) == 1


def test_last_temperature_that_is_given_applies():
    hot = at(ForwardPass, lambda event: AdjustedLogits(event.logits, 0.7))
    cold = at(ForwardPass, lambda event: AdjustedLogits(event.logits, 0.0))
    silent = at(ForwardPass, lambda event: AdjustedLogits(event.logits))
    assert run(hot, cold, silent).forwards[0].picked_with[0][1] == 0.0
    assert run(cold, hot).forwards[0].picked_with[0][1] == 0.7
    assert run(silent).forwards[0].picked_with[0][1] is None


# ---- forced tokens


@pytest.mark.parametrize("event_type", [ForwardPass, Sampled])
def test_forced_tokens_take_the_place_of_the_sampled_one(event_type: type):
    ran = run(at(event_type, lambda event: ForceTokens([3, 4]), step=1))
    assert ran.ids[:2] == [3, 4]
    assert ran.seen()[:5] == [
        *[("Prefilled", 0), ("ForwardPass", 1), ("Sampled", 1), ("Added", 1)],
        ("ForwardPass", 2),
    ]
    added = ran.trace.events[3]
    assert (added.added_tokens, added.forced) == ([3, 4], True)
    assert ran.decisions[1].n_sampled == 0
    assert ran.forwards[1].n_tokens == len(PROMPT) + 2


def test_forced_tokens_at_added_follow_the_sampled_one():
    ran = run(at(Added, lambda event: ForceTokens([3, 4]), step=1))
    assert ran.ids[:3] == [PLAIN[0], 3, 4]
    assert ran.decisions[1].n_sampled == 1
    assert [name for name, _ in ran.seen()].count("Added") == ran.seen()[-1][1]


def test_first_force_tokens_of_a_step_applies():
    at_pass = at(ForwardPass, lambda event: ForceTokens([3]), step=1)
    again = at(ForwardPass, lambda event: ForceTokens([4]), step=1)
    at_sampled = at(Sampled, lambda event: ForceTokens([9]), step=1)
    at_added = at(Added, lambda event: ForceTokens([8]), step=1)
    ran = run(at_pass, again, at_sampled, at_added)
    assert ran.ids[0] == 3
    assert ran.ids[1] not in (4, 8, 9)
    assert ran.actions("ForceTokens") == [True, False, False, False]


def test_next_step_may_force_again():
    ran = run(at(ForwardPass, lambda event: ForceTokens([event.step])), max_tokens=4)
    assert ran.ids == [1, 2, 3, 4]


def test_forced_tokens_discard_what_adjusted_logits_have_sampled():
    ran = run(at(ForwardPass, others(PLAIN[0]), 1), at(ForwardPass, lambda e: ForceTokens([3]), 1))
    assert ran.ids[0] == 3
    assert ran.actions("AdjustedLogits") == ran.actions("ForceTokens") == [True]


def test_no_forced_tokens_are_nothing():
    ran = run(at(ForwardPass, lambda event: ForceTokens([])))
    assert ran.ids == PLAIN


def test_token_that_ends_the_text_cuts_forced_ones():
    ran = run(at(ForwardPass, lambda event: ForceTokens([3, EOS, 4]), step=1))
    assert (ran.ids, ran.end) == ([3], "stop")
    assert ran.trace.events[-1].details == {
        "tokens_as_text": ["<3>", "<0>", "<4>"],
        "n_kept": 1,
    }


def test_stop_token_of_the_request_cuts_forced_ones():
    ran = run(at(ForwardPass, lambda event: ForceTokens([3, 4]), step=1), stops=frozenset({4}))
    assert (ran.ids, ran.end) == ([3], "stop_token")


def sample_eos(step: int) -> Any:
    def make(event: Any) -> AdjustedLogits:
        row = np.full(N_VOCAB, -10, np.float32)
        row[EOS] = 10
        return AdjustedLogits(row)

    return at(ForwardPass, make, step)


def test_forcing_at_sampled_goes_on_past_a_sampled_end():
    ran = run(sample_eos(1), at(Sampled, lambda event: ForceTokens([3]), step=1))
    assert ran.ids[0] == 3
    assert len(ran.ids) > 1


def test_forcing_at_added_cannot_go_on_past_a_sampled_end():
    ran = run(sample_eos(2), at(Added, lambda event: ForceTokens([3]), step=2))
    assert (ran.ids, ran.end) == (PLAIN[:1], "stop")
    assert ("Added", 2) in ran.seen()


def test_backtrack_at_added_goes_on_past_a_sampled_end():
    ran = run(sample_eos(2), at(Added, lambda event: Backtrack(1), step=2))
    assert ran.ids == PLAIN
    assert ran.end == "length"


def test_forced_tokens_beyond_the_limit_are_cut():
    ran = run(at(ForwardPass, lambda event: ForceTokens([3] * 20), step=2), max_tokens=4)
    assert (ran.ids, ran.end) == ([PLAIN[0], 3, 3, 3], "length")


def test_text_is_cut_behind_a_stop_string_inside_forced_tokens():
    force = at(ForwardPass, lambda event: ForceTokens([3, 4, 9, 8]), step=1)
    ran = run(force, stop_at=[4, 9])
    assert (ran.ids, ran.end) == ([3, 4, 9], "stop_sequence")


# ---- Backtrack


@pytest.mark.parametrize("event_type", [ForwardPass, Sampled])
def test_backtrack_removes_added_tokens_and_drops_the_sampled_one(event_type: type):
    ran = run(at(event_type, lambda event: Backtrack(2), step=4), max_tokens=8)
    assert (ran.decisions[4].n_removed, ran.decisions[4].ids) == (2, [])
    assert ("Added", 4) not in ran.seen()
    assert (("Sampled", 4) in ran.seen()) == (event_type is Sampled)
    # Without other logits, the same tokens come again.
    assert ran.ids == PLAIN


def test_backtrack_at_added_counts_the_tokens_just_added():
    ran = run(at(Added, lambda event: Backtrack(2), step=4))
    assert (ran.decisions[4].n_removed, ran.decisions[4].ids) == (1, [])
    assert ran.ids == PLAIN


def test_backtrack_at_added_may_leave_some_of_the_forced_tokens():
    force = at(ForwardPass, lambda event: ForceTokens([3, 4, 9]), step=2)
    back = at(Added, lambda event: Backtrack(2, [8]), step=2)
    ran = run(force, back)
    assert ran.ids[:3] == [PLAIN[0], 3, 8]
    assert (ran.decisions[2].n_removed, ran.decisions[2].ids) == (0, [3, 8])


@pytest.mark.parametrize(("event_type", "n_removed"), [(ForwardPass, 2), (Sampled, 2), (Added, 1)])
def test_backtrack_puts_other_tokens_in_place(event_type: type, n_removed: int):
    ran = run(at(event_type, lambda event: Backtrack(2, [3, 4]), step=4))
    n_kept = 3 - n_removed
    assert ran.ids[: n_kept + 2] == [*PLAIN[:n_kept], 3, 4]
    assert ran.decisions[4].n_removed == n_removed
    forced = [e.forced for e in ran.trace.events if (e.event_type, e.step) == ("Added", 4)]
    assert forced == [event_type is not Added]


@pytest.mark.parametrize("event_type", [ForwardPass, Sampled, Added])
def test_backtrack_stops_at_the_prompt(event_type: type):
    ran = run(at(event_type, lambda event: Backtrack(100, [3]), step=3))
    assert ran.ids[0] == 3
    assert ran.forwards[3].n_tokens == len(PROMPT) + 1
    taken_back = [a.backtrack_steps for a in ran.trace.actions if a.action_type == "Backtrack"]
    assert taken_back == [3 if event_type is Added else 2]


def test_backtrack_stops_at_tokens_that_the_slot_has_discarded():
    ran = run(at(Sampled, lambda event: Backtrack(5, [3]), step=5), n_fixed=3)
    assert ran.decisions[5].n_removed == 1
    assert ran.ids[:4] == [*PLAIN[:3], 3]


def test_backtrack_with_a_mask_takes_another_way():
    def ban(event: Any) -> Any:
        return others(PLAIN[1])(event) if event.n_tokens == len(PROMPT) + 1 else None

    ran = run(at(ForwardPass, ban), at(Added, lambda event: Backtrack(2), step=3))
    assert ran.ids[0] == PLAIN[0]
    assert ran.ids[1] != PLAIN[1]


def test_backtrack_of_nothing_without_tokens_asks_for_the_logits_again():
    ran = run(at(ForwardPass, lambda event: Backtrack(0), step=2))
    assert (ran.decisions[2].n_removed, ran.decisions[2].ids) == (0, [])
    assert ran.ids == PLAIN


def test_backtrack_leaves_out_what_later_mods_ask_for():
    back = at(Sampled, lambda event: Backtrack(1, [3]), step=2)
    later = [
        at(Sampled, lambda event: ForceTokens([4]), step=2),
        at(Sampled, lambda event: Backtrack(1, [9]), step=2),
        at(Sampled, lambda event: ForceOutput([8]), step=2),
    ]
    ran = run(back, *later)
    assert ran.ids[0] == 3
    assert not {4, 9, 8} & set(ran.ids[:2])
    assert ran.actions("Backtrack") == [True, False]
    assert ran.actions("ForceOutput") == [False]


def test_tokens_of_a_backtrack_follow_those_forced_before_it():
    force = at(ForwardPass, lambda event: ForceTokens([3]), step=2)
    back = at(Sampled, lambda event: Backtrack(1, [4]), step=2)
    assert run(force, back).ids[:2] == [3, 4]


def test_mods_that_take_back_for_ever_end_by_length():
    ran = run(at(Sampled, lambda event: Backtrack(1)), max_tokens=2)
    assert ran.end == "length"
    assert len(ran.forwards) == 2 * 16 + 256


# ---- terminal actions


@pytest.mark.parametrize("event_type", [Prefilled, ForwardPass, Sampled, Added])
def test_force_output_replaces_everything(event_type: type):
    step = 0 if event_type is Prefilled else 3
    ran = run(at(event_type, lambda event: ForceOutput([3, 4, EOS, 9]), step))
    assert (ran.ids, ran.end) == ([3, 4], "stop")
    assert ran.seen()[-1] == (event_type.__name__, step)
    assert len(ran.forwards) == step


@pytest.mark.parametrize("event_type", [Prefilled, ForwardPass, Sampled, Added])
def test_tool_calls_replace_everything(event_type: type):
    payload = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ran = run(at(event_type, lambda event: ToolCalls(payload)))
    assert (ran.ids, ran.end, ran.decision.tool_calls) == ([], "tool_calls", payload)
    assert ran.trace.actions[-1].tool_calls == payload


@pytest.mark.parametrize("event_type", [Prefilled, ForwardPass, Sampled, Added])
def test_emit_error_ends_with_its_text(event_type: type):
    ran = run(at(event_type, lambda event: EmitError("not this one")))
    assert (ran.ids, ran.end) == ([], "error")
    assert isinstance(ran.decision.error, EmittedError)
    assert str(ran.decision.error) == "not this one"


def test_first_terminal_action_applies_and_ends_the_step():
    called: list[str] = []
    force = at(ForwardPass, lambda event: ForceTokens([3]), step=1)
    output = at(ForwardPass, lambda event: ForceOutput([4]), step=1)
    error = at(ForwardPass, lambda event: EmitError("no"), step=1)
    look = mod(lambda event: called.append(type(event).__name__))
    ran = run(force, output, error, look)
    assert ran.ids == [4]
    assert called == ["Prefilled", "ForwardPass"]
    assert ran.actions("EmitError") == [False]


# ---- mods that fail


quiet = pytest.mark.filterwarnings("ignore::kqview.mods.ModWarning")
NONSENSE = [0, "text", [Noop()], object, {"tokens": [1]}, ForceTokens, Backtrack(1)]


@quiet
@pytest.mark.parametrize("event_type", [Prefilled, ForwardPass, Sampled, Added])
@pytest.mark.parametrize("answer", [*NONSENSE, ValueError("bad day"), TypeError("own")])
def test_mod_that_fails_is_a_noop_and_others_go_on(event_type: type, answer: Any):
    def make(event: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    later: list[Any] = []
    is_failure = not isinstance(answer, Backtrack) or event_type is Prefilled
    ran = run(at(event_type, make, step=0 if event_type is Prefilled else 2), mod(later.append))
    assert ran.ids == PLAIN
    assert len(later) == len(ran.trace.events)
    failed = [one for one in ran.trace.mod_calls if one.exception_occurred]
    assert len(failed) == is_failure
    assert all(one.execution_time_ms is not None for one in ran.trace.mod_calls)
    if is_failure:
        assert failed[0].event_type == event_type.__name__
        assert "Traceback" in (failed[0].exception_traceback or "")
    if isinstance(answer, Exception):
        assert failed[0].exception_message == f"{type(answer).__name__}: {answer}"
        assert "in make" in (failed[0].exception_traceback or "")


@quiet
def test_type_error_of_a_mod_is_not_answered_with_a_second_call():
    n_calls = 0

    @mod
    def fails(event: Any, actions: Any, tokenizer: Any) -> None:
        nonlocal n_calls
        n_calls += 1
        raise TypeError("missing 1 required positional argument")

    ran = run(fails, max_tokens=1)
    assert n_calls == len(ran.trace.events) == 4


@quiet
def test_exception_whose_text_fails_is_recorded():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def make(event: Any) -> None:
        raise Mute

    ran = run(at(Added, make, step=1))
    assert [o.exception_message for o in ran.trace.mod_calls if o.exception_occurred] == [
        "Mute: <no message>"
    ]


def test_keyboard_interrupt_in_a_mod_reaches_the_consumer():
    def make(event: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(at(Sampled, make))


# ---- logits_processor and stopping


def test_logits_processor_sees_all_ids_and_changes_its_row():
    seen: list[list[int]] = []

    def process(ids: list[int], logits: np.ndarray) -> None:
        seen.append(ids)
        logits[PLAIN[0]] = -np.inf

    ran = run(logits_processor=process, max_tokens=3)
    assert ran.ids[0] != PLAIN[0]
    assert seen == [[*PROMPT, *ran.ids[:n]] for n in range(3)]


def test_logits_processor_works_behind_the_mods():
    def process(ids: list[int], logits: np.ndarray) -> np.ndarray:
        assert logits[PLAIN[0]] == -np.inf
        return np.where(np.arange(N_VOCAB) == 9, 5.0, -5.0)[None]

    assert run(at(ForwardPass, others(PLAIN[0])), logits_processor=process).ids[0] == 9


@pytest.mark.parametrize("row", [np.full(N_VOCAB, np.nan), np.zeros(3), "x"])
def test_logits_processor_that_returns_nonsense_is_refused(row: Any):
    with pytest.raises(RequestError, match="logits of logits_processor") as caught:
        run(logits_processor=lambda ids, logits: row)
    assert caught.value.parameter == "logits_processor"


@pytest.mark.parametrize("option", ["logits_processor", "stopping", "forcing"])
def test_exceptions_of_callables_reach_the_consumer(option: str):
    def fails(*_: Any) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run(**{option: fails})


def test_stopping_sees_every_token_and_ends_the_request():
    seen: list[list[int]] = []

    def stops(ids: list[int]) -> bool:
        seen.append(ids)
        return len(ids) == len(PROMPT) + 3

    ran = run(stopping=stops)
    assert (ran.ids, ran.end) == (PLAIN[:3], "stop")
    assert seen == [[*PROMPT, *PLAIN[:n]] for n in (1, 2, 3)]


# ---- forcing


def test_forcing_sees_what_stays_and_what_a_step_adds():
    seen: list[tuple[list[int], list[int]]] = []

    def forcing(kept: Sequence[int], added: Sequence[int]) -> list[int]:
        seen.append((list(kept), list(added)))
        return [9, 10] if len(kept) == 2 else []

    ran = run(forcing=forcing, max_tokens=6)
    assert ran.ids[:5] == [*PLAIN[:3], 9, 10]
    assert seen[:4] == [([], []), ([], PLAIN[:1]), (PLAIN[:1], PLAIN[1:2]), (PLAIN[:2], PLAIN[2:3])]
    assert seen[4][0] == ran.ids[:5]
    assert [decision.n_sampled for decision in ran.decisions[1:5]] == [1, 1, 1, 1]
    assert final_ids(ran.trace) == ran.ids


def test_forcing_before_the_first_token_takes_its_place():
    ran = run(forcing=lambda kept, added: [] if kept or added else [9, 10], max_tokens=4)
    assert ran.ids[:2] == [9, 10]
    assert ran.decisions[1].n_sampled == 0
    assert final_ids(ran.trace) == ran.ids


def test_forcing_works_behind_the_mods():
    seen: list[tuple[list[int], list[int]]] = []

    def forcing(kept: Sequence[int], added: Sequence[int]) -> list[int]:
        seen.append((list(kept), list(added)))
        return [12] if added[-1:] == [11] else []

    force = at(ForwardPass, lambda event: ForceTokens([3]), step=1)
    back = at(Added, lambda event: Backtrack(2, [11]), step=3)
    ran = run(force, back, forcing=forcing, max_tokens=5)
    assert seen[0] == ([], [3])  # the mod has chosen the first token
    assert seen[2] == ([3], [11])
    assert ran.ids[:3] == [3, 11, 12]
    assert final_ids(ran.trace) == ran.ids


def test_forced_tokens_end_where_the_text_does():
    ran = run(forcing=lambda kept, added: [3, EOS, 4] if len(kept) == 1 else [])
    assert (ran.ids, ran.end) == ([*PLAIN[:2], 3], "stop")
    ran = run(forcing=lambda kept, added: [3, 4, 5] if len(kept) == 1 else [], max_tokens=4)
    assert (ran.ids, ran.end) == ([*PLAIN[:2], 3, 4], "length")
    assert final_ids(ran.trace) == ran.ids


@pytest.mark.parametrize("given", ["ab", [N_VOCAB], [-1], [1.5], 3, None])
def test_forcing_that_returns_nonsense_is_refused(given: Any):
    with pytest.raises(InvalidToken, match="forcing") as caught:
        run(forcing=lambda kept, added: given)
    assert caught.value.parameter == "forcing"


# ---- failures


class Broken(Mod):
    def on_prefilled(self, event: Any, actions: Any, tokenizer: Any) -> None:
        raise KeyError("of the mod")


def prefilled_twice(mods: Sequence[Any], request_id: str, **options: Any) -> Steering:
    steering = steer(mods, [], request_id, **options)
    for _ in range(2):
        at_once(steering.run(steering.prefill([1, 2], max_tokens=4), is_async=False))
    return steering


@pytest.mark.parametrize("recorder", [{}, {"recorder": None}])
def test_each_mod_warns_once_whatever_requests_have_it(recorder: Any):
    def raises(event: Any) -> None:
        raise KeyError("of the mod")

    def answers_wrongly(event: Any) -> Any:
        return 5

    broken = Broken()
    mods = [mod(raises), broken, answers_wrongly, mod(lambda event: None)]
    with pytest.warns(ModWarning) as caught:
        steered = [prefilled_twice(mods, request_id, **recorder) for request_id in ("r1", "r2")]
    for steering in steered:
        kept = [(one.mod, one.event, one.step, one.error[:9]) for one in steering.failures]
        assert kept == 2 * [
            ("raises", "Prefilled", 0, "KeyError:"),
            ("Broken", "Prefilled", 0, "KeyError:"),
            ("answers_wrongly", "Prefilled", 0, "InvalidAc"),
        ]
        assert "in raises" in steering.failures[0].traceback
    # They point at the line that raised; an answer has none, so that is the consumer's.
    lines = [
        raises.__code__.co_firstlineno + 1,
        Broken.on_prefilled.__code__.co_firstlineno + 1,
        prefilled_twice.__code__.co_firstlineno + 3,
    ]
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, line) for line in lines]


def test_failures_that_are_logged_warn_of_nothing(caplog: pytest.LogCaptureFixture):
    broken = Broken()
    with logging_failures():
        for request_id in ("r1", "r2"):
            prefilled_twice([broken], request_id)
    records = [record for record in caplog.records if record.name == "kqview.mods"]
    assert [record.levelname for record in records] == ["WARNING"] * 2
    assert ["r1" in records[0].getMessage(), "r2" in records[1].getMessage()] == [True, True]
    assert caplog.text.count("in on_prefilled") == 2  # with the traceback


def test_failures_of_a_long_request_are_kept_within_bounds():
    with logging_failures():
        failures = ModFailures("r")
    for step in range(200):
        failures.add(steer, ModFailure("steer", "Sampled", step, "KeyError: 1"), None)
    assert [one.step for one in failures.kept] == list(range(100))


@pytest.mark.parametrize("how", ["strict", "instance", "class", "function"])
@pytest.mark.parametrize("answer", [None, 5])
def test_mod_that_is_needed_ends_the_request_with_its_failure(how: str, answer: Any):
    def fails(event: Any) -> Any:
        if answer is None:
            raise KeyError("of the mod")
        return answer

    class Guard(Mod):
        required = how == "class"

        def on_sampled(self, event: Any, actions: Any, tokenizer: Any) -> Any:
            return fails(event)

    guard: Any = Guard()
    if how == "instance":
        guard.required = True
    elif how == "function":
        guard = mod(name="Guard", required=True)(
            lambda event: fails(event) if isinstance(event, Sampled) else None
        )
    later: list[Any] = []
    with pytest.raises(ModFailed, match="Guard failed at Sampled of step 1 with") as raised:
        run(guard, mod(later.append), is_strict=how == "strict")
    assert raised.value.mod == "Guard"
    assert type(raised.value.__cause__) is (KeyError if answer is None else InvalidActionError)
    assert [type(event) for event in later] == [Prefilled, ForwardPass]


# ---- the end


@pytest.mark.parametrize("is_error", [False, True])
def test_end_hooks_are_called_once_with_the_final_ids(is_error: bool):
    ends: list[Any] = []

    class Ends(Mod):
        required = True

        def on_end(self, end: Any) -> None:
            ends.append(end)
            raise RuntimeError("of the hook")

    ids: list[int] = [3, 4]
    steering = steer([Ends, mod(on_end=ends.append)(lambda event: None)], ids)
    if is_error:  # as all warnings are here
        steering.finish("cancelled")
    else:
        with pytest.warns(ModWarning, match="RuntimeError: of the hook"):
            steering.finish("cancelled")
    steering.finish("length")
    assert [(end.finish_reason, end.ids) for end in ends] == [("cancelled", (3, 4))] * 2
    assert [(one.event, one.step) for one in steering.failures] == [("RequestEnd", None)]


def test_request_that_ends_while_a_mod_runs_calls_the_hooks_after_it():
    order: list[str] = []

    def finish(event: Any) -> None:
        steering.finish("cancelled")
        order.append("mod")

    hooked = mod(on_end=lambda end: order.append("end"))(finish)
    steering = steer([hooked, mod(lambda event: order.append("later"))], [])
    assert at_once(steering.run(steering.prefill(PROMPT, max_tokens=1), is_async=False)) is None
    assert order == ["mod", "end"]


# ---- everything at once


def random_mod(seed: int) -> Any:
    rng = random.Random(seed)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(N_VOCAB) for _ in range(rng.randrange(most))]

    def answer(event: Any, actions: Any) -> Any:
        match rng.randrange(40):
            case 0:
                return actions.backtrack(rng.randrange(6))
            case 1 | 2:
                return actions.backtrack(rng.randrange(6), tokens(4))
            case 3 | 4 | 5:
                return actions.force_tokens(tokens(5))
            case 6 | 7:
                row = np.array([rng.gauss(0, 3) for _ in range(N_VOCAB)])
                return actions.adjust_logits(row, rng.choice([None, 0.0, 0.5]))
            case 8 if rng.random() < 0.3:
                raise ValueError("now and then")
            case 9 if rng.random() < 0.3:
                return rng.choice(NONSENSE)
            case 10 if rng.random() < 0.02:
                return rng.choice(
                    [ForceOutput(tokens(5)), ToolCalls([1]), EmitError("end"), ForceOutput([])]
                )
            case 11:
                return AdjustedPrefill(tokens(4), rng.randrange(200))
            case _:
                return None

    return mod(name=f"random {seed}")(answer)


@pytest.mark.full
@quiet
def test_trace_of_random_mods_rebuilds_the_ids():
    # `run` compares what the trace rebuilds with the ids that the decisions have made.
    n_steps = n_requests = 0
    ends: set[str | None] = set()
    while n_steps < 10_000:
        seed = n_requests * 2
        mods = [random_mod(seed + i) for i in range(1 + n_requests % 2)]
        ran = run(*mods, max_tokens=120, stops=frozenset({1}), stop_at=[2, 3])
        ends.add(ran.end)
        if n_requests % 20 == 0:
            assert final_ids(read_trace(ran.trace.to_json())) == ran.ids
        n_steps += len(ran.forwards)
        n_requests += 1
    assert ends >= {"length", "stop", "stop_token"}


async def test_slow_pick_does_not_hold_up_the_loop():
    picked_on: list[int] = []

    class Forward(FakeForward):
        def pick(self, logits: Any = None, temperature: float | None = None) -> Picked:
            picked_on.append(threading.get_ident())
            return super().pick(logits, temperature)

    for picks_slowly in (False, True):
        steering = steer([], [], picks_slowly=picks_slowly)
        await steering.run(steering.prefill(PROMPT, max_tokens=8), is_async=True)
        forward = Forward(logits_after(PROMPT), len(PROMPT), 8, 0)
        decisions = [
            await steering.run(steering.step(forward, lambda n, ids: None), is_async=True),
            at_once(steering.run(steering.step(forward, lambda n, ids: None), is_async=False)),
        ]
        ids = [[] if one is None else one.ids for one in decisions]
        assert ids == [[int(np.argmax(forward.logits))]] * 2
    assert [one == threading.get_ident() for one in picked_on] == [True, True, False, True]
