"""Steering: calls a request's mods in each step and combines their actions. Knows no engine.

Each step is one forward pass: `Steering.step` tells the mods of the pass, of the token sampled from
its logits and of the tokens added, and turns their actions into one `Decision`. It is a generator
of calls, so that synchronous and asynchronous consumers share it: `run` makes each call through a
`ModCaller` and sends the outcome in.

Within a step, tokens are a list of pieces, not visible outside before the decision. Backtrack
removes pieces from its end first, then tokens added in earlier steps. Finally the list is cut where
the text ends: at an end-of-text token, at the limit of tokens, or after a stop string.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from kqview import _core
from kqview.arguments import checked_ids
from kqview.edit import Edit
from kqview.errors import (
    BusyError,
    EmittedError,
    InvalidActionError,
    InvalidToken,
    ModFailed,
    RequestError,
)
from kqview.mods.actions import (
    ALLOWED,
    Action,
    AdjustedLogits,
    AdjustedPrefill,
    Backtrack,
    EmitError,
    ForceOutput,
    ForceTokens,
    Noop,
    SetEdits,
    Terminal,
    ToolCalls,
    check_action,
    check_size,
    to_logits,
)
from kqview.mods.calls import SILENT, CallOutcome, EventCall, ModCaller, at_once, failure
from kqview.mods.decorator import BoundMod
from kqview.mods.events import (
    Added,
    ContextInfo,
    Dialogue,
    Event,
    ForwardPass,
    Prefilled,
    RequestEnd,
    Sampled,
)
from kqview.mods.failures import ModFailure, describe
from kqview.trace import TraceAction, TraceEvent, TraceRecorder
from kqview.trace.record import Object
from kqview.trace.recorder import INPUT_CHARACTERS
from kqview.types import Usage

_TOP_TOKENS: Final = 20
# Limit of steps of a request, so that mods that keep backtracking cannot run forever.
_STEPS_PER_TOKEN: Final = 16
_STEPS_MORE: Final = 256
_PROCESSED: Final = "logits of logits_processor"

LogitsProcessor = Callable[[list[int], NDArray[np.float32]], Any]
Stopping = Callable[[list[int]], object]
Forcing = Callable[[Sequence[int], Sequence[int]], Sequence[int]]
Pick = Callable[[], _core.PickedToken]
Steps = Generator[EventCall | Pick, Any, "Decision"]
"""Calls to make, outcomes or tokens to send in; returns a decision."""
Cut = Callable[[int, Sequence[int]], int | None]
_Said = CallOutcome | _core.PickedToken
_Ending = tuple[Terminal, TraceAction | None]
_Telling = Generator[EventCall | Pick, Any, _Ending | None]


@dataclass(slots=True)
class Decision:
    """What to do after a step.

    Attributes:
        n_removed: Number of tokens of earlier steps to take back.
        ids: Ids to add after that.
        n_sampled: 1 if the first of *ids* is the sampled token; 0 if all are forced.
        end: Finish reason, if the request ends with this step.
        replaces_all: Whether *ids* are the whole text, which the model does not evaluate.
        picked: The sampled token.
        tool_calls: Payload of ToolCalls, with end "tool_calls".
        error: Error to raise, for EmitError.
        prompt: Ids of the prompt to evaluate; of Prefilled only.
        max_tokens: Limit of tokens to generate; of Prefilled only.
        edits: What the edits of the request are from then on; None: as before.
    """

    n_removed: int = 0
    ids: list[int] = field(default_factory=list[int])
    n_sampled: int = 0
    end: str | None = None
    replaces_all: bool = False
    picked: _core.PickedToken | None = None
    tool_calls: Any = None
    error: EmittedError | None = None
    prompt: list[int] = field(default_factory=list[int])
    max_tokens: int = 0
    edits: _core.EditPlan | None = None


@dataclass(slots=True)
class _SteeredPiece:
    """A token of the step, and the place in a record's tokens that it comes from."""

    id: int
    record: TraceEvent | TraceAction | None
    place: int
    is_forced: bool


@dataclass(slots=True)
class _SteeredStep:
    """What mods have asked for so far in a step that goes on."""

    n_removable: int = 0
    """Number of tokens of earlier steps that can be taken back."""
    n_back: int = 0
    """Number of those that are."""
    logits: NDArray[np.float32] | None = None
    temperature: float | None = None
    is_dropped: bool = False
    """Whether no token is sampled, or the sampled one was dropped: a Backtrack came first."""
    instead: list[int] | None = None
    """What is added in place of the sampled token."""
    has_forced: bool = False
    """Whether a ForceTokens applies; later ones do not."""
    pieces: list[_SteeredPiece] = field(default_factory=list[_SteeredPiece])
    """The tokens of the step, since Added."""
    prefill: AdjustedPrefill | None = None
    edits: list[Edit] | None = None


@dataclass(eq=False, repr=False)
class Steering:
    """The mods and the callables of one request.

    Belongs to the consumer of the request: one thread or task at a time, except for `finish` and
    `drop`.

    Attributes:
        ids: The generated ids: the consumer's list, which it changes as decisions say.
        text: The generated text so far.
        recorder: Writes the trace; None for none.
        check_prompt: Raises RequestError for a prompt that the engine cannot take.
        detokenize: Text of ids.
        is_end: Whether an id ends a text.
        attention: The row of a forward pass as the trace keeps it; None to leave it out.
        picks_slowly: Whether sampling may take long, as with a grammar; then an event loop does not
            wait for it.
        plan_edits: Checks edits for a text of so many tokens.
        is_strict: Whether a mod that fails ends the request.
    """

    request_id: str
    mods: Sequence[BoundMod]
    caller: ModCaller
    _: KW_ONLY
    n_vocab: int
    ids: list[int]
    text: Callable[[], str]
    recorder: TraceRecorder | None = None
    logits_processor: LogitsProcessor | None = None
    stopping: Stopping | None = None
    forcing: Forcing | None = None
    check_prompt: Callable[[list[int]], object]
    detokenize: Callable[[list[int]], str]
    is_end: Callable[[int], bool]
    attention: Callable[[ForwardPass], Object | None]
    plan_edits: Callable[[list[Edit], int], _core.EditPlan]
    picks_slowly: bool = False
    is_strict: bool = False

    def __post_init__(self) -> None:
        self.is_async = any(one.is_async for one in self.mods)
        """Whether a mod must be awaited."""
        has_more = self.recorder or self.forcing or self.picks_slowly
        can_wait = self.is_async or self.caller.time_limit_s is not None
        self.is_direct = not (has_more or (self.mods and (can_wait or self.logits_processor)))
        """Whether `direct` does what `step` does."""
        kinds = ALLOWED if self.recorder else chain(*(one.handled for one in self.mods))
        self._told = frozenset(kinds)  # the events that anybody hears of
        self._prompt: list[int] = []
        self._prompt_text = ""
        self._n_steps = 0
        self._n_steps_max = 0
        self._records: list[TraceEvent | TraceAction] = []  # of this step, about the text
        self._said: deque[_Said] = deque()  # in this step, before `step` took over
        self._lock = threading.Lock()
        self._is_stepping = False
        self._has_ended = False
        self._end: tuple[RequestEnd, Usage | None] | None = None  # until the hooks know of it

    @property
    def failures(self) -> tuple[ModFailure, ...]:
        """The calls of mods that failed, the first 100."""
        return tuple(self.mods[0].failures.kept) if self.mods else ()

    # ---- before the first step

    def prefill(
        self, prompt: list[int], *, max_tokens: int, dialogue: Dialogue | None = None
    ) -> Steps:
        """Tell the mods of the prompt; the decision has the prompt and limit that apply.

        Args:
            prompt: Ids of the prompt.
            max_tokens: Limit of tokens to generate.
            dialogue: The chat that the prompt was made of, if it is one.
        """
        recorded = None
        if self.recorder is not None:
            recorded = self.recorder.prefilled(prompt_length=len(prompt), max_steps=max_tokens)
        tokens = np.array(prompt, np.int32)
        tokens.flags.writeable = False
        info = ContextInfo(tokens)
        if dialogue is not None:
            info = ContextInfo(tokens, dialogue.messages, dialogue.tools)
        event = Prefilled(self.request_id, 0, max_tokens, info)
        self._prompt = prompt
        step = _SteeredStep()
        end = yield from self._tell(event, recorded, step)
        decision = Decision(prompt=prompt, max_tokens=max_tokens)
        if step.prefill is not None:
            decision.prompt = step.prefill.tokens or prompt
            decision.max_tokens = step.prefill.max_steps or max_tokens
        self._prompt = decision.prompt
        self._set_edits(decision, step)
        self._n_steps_max = _STEPS_PER_TOKEN * decision.max_tokens + _STEPS_MORE
        if self.recorder is not None:
            text = self.detokenize(decision.prompt)
            self._prompt_text = text[-INPUT_CHARACTERS:]
            self.recorder.set_prompt(decision.prompt, text)
        return decision if end is None else self._terminate(decision, end)

    # ---- a step

    def step(
        self, forward: _core.ForwardEvent, cut: Cut, said: Sequence[_Said] | None = None
    ) -> Steps:
        """Tell the mods of a forward pass and what follows.

        Args:
            forward: The forward pass.
            cut: Given a number of ids to take back and ids to add, how many of these are left when
                a stop string is complete; None without one.
            said: What the first calls have returned to `direct`, and the token that it picked.
        """
        if said is None:
            self._n_steps += 1
        self._said = deque(said or ())
        self._records = []
        step = _SteeredStep(min(len(self.ids), forward.n_removable))
        end: _Ending | None = None
        if ForwardPass in self._told:
            end = yield from self._tell_forward(forward, step)
        if self.logits_processor is not None and not step.is_dropped and end is None:
            before = forward.logits if step.logits is None else step.logits
            step.logits = self._checked_row(self._processed(np.array(before)))
        if not self.ids and not step.has_forced and (forced := self._forced([], [])):
            step.instead = [*forced, *(step.instead or ())]
            step.has_forced = True
        decision = Decision()
        if end is None and not step.is_dropped:
            pick = partial(forward.pick, step.logits, step.temperature)
            picked: Any = self._said.popleft() if self._said else None
            if picked is None:
                picked = (yield pick) if self.picks_slowly else pick()
            decision.picked = picked
            recorded = None
            if self.recorder is not None:
                n_generated = len(self.ids)
                recorded = self.recorder.sampled(self._n_steps, picked.id, n_generated=n_generated)
            if Sampled in self._told:
                event = Sampled(self.request_id, self._n_steps, picked.id)
                end = yield from self._tell(event, recorded, step)
        if end is None:
            end = yield from self._tell_added(decision.picked, step)
        if end is not None:
            return self._terminate(decision, end)
        n_kept = len(self.ids) - step.n_back
        added = [piece.id for piece in step.pieces]
        if forced := self._forced(self.ids[:n_kept] if step.n_back else self.ids, added):
            _, record = self._record_added(forced, n_kept + len(added), is_forced=True)
            step.pieces += _pieces(forced, record, True)
        decision.n_removed = step.n_back
        self._set_edits(decision, step)
        self._fill(decision, step.pieces, forward, cut)
        if decision.end is None and self._stops(decision):
            decision.end = "stop"
        if decision.end is None and self._n_steps >= self._n_steps_max:
            decision.end = "length"
        return decision

    def direct(self, forward: _core.ForwardEvent, cut: Cut) -> Decision | None:
        """The decision of `step`, run at once; None if the request ended meanwhile.

        Between two tokens little of the interpreter is left in a core's cache, so that each line
        costs several times what it costs in a loop: the machinery of `step` takes 0.2 ms. It takes
        over when a mod acts or fails.
        """
        self.check_idle()
        self._is_stepping = True
        self._n_steps += 1
        said: list[_Said] = []
        try:
            decision = self._try_decide(forward, cut, said)
        finally:
            self._end_step()
        if self._has_ended:
            return None
        return decision or at_once(self.run(self.step(forward, cut, said), is_async=False))

    def _try_decide(
        self, forward: _core.ForwardEvent, cut: Cut, said: list[_Said]
    ) -> Decision | None:
        """The decision of a step in which no mod acts; None if one does."""
        if ForwardPass in self._told and self._acts(self._forward_pass(forward), said):
            return None
        logits = None
        if self.logits_processor is not None:
            given = np.array(forward.logits)
            row = self._processed(given)
            logits = given if row is given else self._checked_row(row)
        try:
            picked = forward.pick(logits)
        except RequestError as error:
            if logits is not None:
                error.parameter = "logits_processor"
            raise
        if self.mods:
            said.append(picked)
            step, ids = self._n_steps, [picked.id]
            if Sampled in self._told and self._acts(Sampled(self.request_id, step, *ids), said):
                return None
            if Added in self._told and self._acts(Added(self.request_id, step, ids, False), said):
                return None
        end = forward.ends(picked.id)
        if end is not None:
            return Decision(0, [], 0, end, False, picked)
        decision = Decision(0, [picked.id], 1, None, False, picked)
        if cut(0, decision.ids) is not None:
            decision.end = "stop_sequence"
        elif forward.n_left <= 1 or self._n_steps >= self._n_steps_max:
            decision.end = "length"
        elif self._stops(decision):
            decision.end = "stop"
        return decision

    def _acts(self, event: Event, said: list[_Said]) -> bool:
        """Call the mods that handle *event*; whether one acts or fails, or the request ended."""
        for one in self.mods:
            if type(event) in one.handled:
                outcome = self.caller.call_here(one, event)
                said.append(outcome)
                if outcome is not SILENT or self._has_ended:
                    return True
        return False

    def _forward_pass(self, forward: _core.ForwardEvent) -> ForwardPass:
        return ForwardPass(
            self.request_id,
            self._n_steps,
            forward.logits,
            forward.n_tokens,
            forward.attention,
            forward.positions,
            forward.hidden,
        )

    def _processed(self, given: NDArray[np.float32]) -> object:
        """What the logits processor makes of *given*, which it may change."""
        assert self.logits_processor is not None
        returned = self.logits_processor([*self._prompt, *self.ids], given)
        return given if returned is None else returned

    def _checked_row(self, row: object) -> NDArray[np.float32]:
        try:
            checked = to_logits(row, _PROCESSED)
            check_size(checked, self.n_vocab, _PROCESSED)
        except InvalidActionError as error:
            raise RequestError(str(error), parameter="logits_processor") from None
        return checked

    def _tell_forward(self, forward: _core.ForwardEvent, step: _SteeredStep) -> _Telling:
        event = self._forward_pass(forward)
        recorded = None
        if self.recorder is not None:
            top, entropy = _core.outlook(event.logits, _TOP_TOKENS)
            recorded = self.recorder.forward_pass(
                self._n_steps,
                n_generated=len(self.ids),
                input_text=(self._prompt_text + self.text())[-INPUT_CHARACTERS:],
                top_tokens=top,
                entropy=entropy,
                attention=self.attention(event),
            )
        return (yield from self._tell(event, recorded, step))

    def _tell_added(self, picked: _core.PickedToken | None, step: _SteeredStep) -> _Telling:
        is_forced = step.instead is not None
        tokens = [picked.id] if picked is not None and not is_forced else step.instead
        if not tokens:  # a Backtrack without others
            return None
        n_generated = len(self.ids) - step.n_back
        recorded, record = self._record_added(tokens, n_generated, is_forced=is_forced)
        step.pieces = _pieces(tokens, record, is_forced)
        if Added not in self._told:
            return None
        event = Added(self.request_id, self._n_steps, list(tokens), is_forced)
        return (yield from self._tell(event, recorded, step))

    def _record_added(
        self, tokens: Sequence[int], n_generated: int, *, is_forced: bool
    ) -> tuple[int | None, TraceEvent | None]:
        """The index of the event in the trace, and the event."""
        if self.recorder is None:
            return None, None
        recorded = self.recorder.added(
            self._n_steps, tokens, n_generated=n_generated, forced=is_forced
        )
        if recorded is None:
            return None, None
        record = self.recorder.trace.events[recorded]
        self._records.append(record)
        return recorded, record

    def _forced(self, kept: Sequence[int], added: Sequence[int]) -> list[int]:
        if self.forcing is None:
            return []
        tokens = checked_ids("the result of forcing", self.forcing(kept, added))
        for token in tokens:
            if token >= self.n_vocab:
                raise InvalidToken(
                    f"forcing returned token id {token}, the vocabulary has {self.n_vocab}; "
                    "return ids from tokenize()",
                    parameter="forcing",
                )
        return tokens

    # ---- mods

    def _tell(self, event: Event, recorded: int | None, step: _SteeredStep) -> _Telling:
        """Ask every mod, then apply their actions in order; returns one that ends the step."""
        answers: list[tuple[Action, int | None]] = []
        for one in self.mods:
            if self.recorder is None and type(event) not in one.handled:
                continue  # a trace shows every call
            called = None if self.recorder is None else self.recorder.call(recorded, one.name)
            log = None if self.recorder is None else partial(self.recorder.log, called)
            outcome: Any = self._said.popleft() if self._said else None
            if outcome is None:
                outcome = yield EventCall(one, event, log)
            if self.recorder is None and outcome.answer is None and outcome.error is None:
                continue  # see `direct`: every line costs
            action: Action = Noop()
            if outcome.error is None:
                try:
                    given = check_action(event, outcome.answer, self.n_vocab)
                    if isinstance(given, AdjustedPrefill) and given.tokens:
                        self.check_prompt(given.tokens)
                    if isinstance(given, SetEdits):
                        self.plan_edits(given.edits, self._n_tokens)
                    action = given
                except RequestError as error:
                    outcome = failure(error, outcome.time_ms)
            if self.recorder is not None:
                self.recorder.end_call(
                    called,
                    time_ms=outcome.time_ms,
                    error=outcome.error,
                    traceback=outcome.traceback,
                )
            if outcome.error is not None:
                self._fail(one, event, outcome.error, outcome)
            answers.append((action, called))
            if isinstance(action, AdjustedLogits) and isinstance(event, ForwardPass):
                event = replace(event, logits=action.logits.view())
                event.logits.flags.writeable = False
        end: _Ending | None = None
        is_open = True  # until an action overrides those of later mods
        for action, called in answers:
            is_applied = is_open and not (isinstance(action, ForceTokens) and step.has_forced)
            record = self._record(action, called, is_applied)
            if not is_applied:
                continue
            if isinstance(action, ForceOutput | ToolCalls | EmitError):
                end = action, record
            else:
                _apply(action, record, step, is_added=isinstance(event, Added))
            is_open = end is None and not isinstance(action, Backtrack | AdjustedPrefill)
        return end

    def _fail(self, mod: BoundMod, event: Event, error: str, outcome: CallOutcome) -> None:
        """Note that a call of *mod* failed; raises ModFailed if the request needs it."""
        failed = ModFailure(mod.name, type(event).__name__, event.step, error, outcome.traceback)
        is_fatal = self.is_strict or mod.is_required
        mod.failures.add(mod.given, failed, outcome.exception, is_raised=is_fatal)
        if is_fatal:
            kind = error.partition(":")[0]  # its text is not for the clients of a server
            why = "mods_strict" if self.is_strict else "its required = True"
            raise ModFailed(
                f"mod {mod.name} failed at {failed.place} with {kind}, and {why} ends the request",
                mod=mod.name,
            ) from outcome.exception

    @property
    def _n_tokens(self) -> int:
        return len(self._prompt) + len(self.ids)

    def _set_edits(self, decision: Decision, step: _SteeredStep) -> None:
        if step.edits is None:
            return
        decision.edits = plan = self.plan_edits(step.edits, self._n_tokens)
        if self.recorder is not None:
            start = self._n_tokens - decision.n_removed if self._n_steps else 0
            self.recorder.edited(start, [(one.hash, one.first) for one in plan.keys])

    def _record(self, action: Action, called: int | None, is_applied: bool) -> TraceAction | None:
        if self.recorder is None:
            return None
        known: dict[str, Any] = {}
        match action:
            case AdjustedPrefill(tokens, max_steps):
                known = {
                    "tokens": tokens,
                    "new_prompt": self.detokenize(tokens),
                    "new_length": len(tokens),
                    "adjusted_max_steps": max_steps or None,
                }
            case ForceTokens(tokens) | ForceOutput(tokens):
                known = {"tokens": tokens}
            case Backtrack(n, tokens):
                known = {"tokens": tokens or [], "backtrack_steps": n}
            case AdjustedLogits(logits, temperature):
                known = {"logits_shape": str([1, logits.size]), "temperature": temperature}
            case ToolCalls(payload):
                known = {"has_tool_calls": bool(payload), "tool_calls": payload}
            case EmitError(message):
                known = {"error_message": message}
            case Noop() | SetEdits():
                pass
        # Traces have no name for edits.
        name: Any = "Noop" if isinstance(action, SetEdits) else type(action).__name__
        record = self.recorder.action(called, name, is_applied=is_applied, **known)
        if record is not None:
            self._records.append(record)
        return record

    # ---- decisions

    def _fill(
        self, decision: Decision, pieces: list[_SteeredPiece], forward: _core.ForwardEvent, cut: Cut
    ) -> None:
        """Add the tokens of *pieces* up to the end of the text."""
        n_left = forward.n_left + decision.n_removed
        n_kept = len(pieces)
        for i, piece in enumerate(pieces):
            if i >= n_left:
                n_kept, decision.end = i, "length"
                break
            reason = forward.ends(piece.id)
            if reason is not None:
                n_kept, decision.end = i, reason
                break
        if decision.end is None and n_kept >= n_left:
            decision.end = "length"
        decision.ids = [piece.id for piece in pieces[:n_kept]]
        n_cut = cut(decision.n_removed, decision.ids) if decision.ids else None
        if n_cut is not None:
            n_kept, decision.end = n_cut, "stop_sequence"
            del decision.ids[n_cut:]
        decision.n_sampled = int(n_kept > 0 and not pieces[0].is_forced)
        for piece in reversed(pieces[n_kept:]):
            if piece.record is not None:  # of a record's tokens, the first that is left out counts
                _note(piece.record, n_kept=piece.place)

    def _stops(self, decision: Decision) -> bool:
        if self.stopping is None:
            return False
        n_stay = len(self.ids) - decision.n_removed
        return bool(self.stopping([*self._prompt, *self.ids[:n_stay], *decision.ids]))

    def _terminate(self, decision: Decision, end: _Ending) -> Decision:
        """*decision* as the terminal action asks: it replaces all that was generated."""
        action, record = end
        decision.n_removed = len(self.ids)
        decision.replaces_all = True
        match action:
            case ForceOutput(tokens):
                ends = (i for i, token in enumerate(tokens) if self.is_end(token))
                n_kept = next(ends, len(tokens))
                decision.ids = tokens[:n_kept]
                decision.end = "stop"
                if record is not None and n_kept < len(tokens):
                    _note(record, n_kept=n_kept)
            case ToolCalls(payload):
                decision.tool_calls = payload
                decision.end = "tool_calls"
            case EmitError(message):
                decision.error = EmittedError(message)
                decision.end = "error"
        return decision

    def void(self) -> None:
        """Mark the last step in the trace as without effect: it was not applied."""
        for record in self._records:
            if isinstance(record, TraceEvent):
                _note(record, n_kept=0)
            else:
                _note(record, is_applied=False)

    # ---- running the generators

    async def run(self, steps: Steps, *, is_async: bool) -> Decision | None:
        """Run `prefill` or `step`; None if the request ended meanwhile.

        Args:
            is_async: Whether calls are awaited. If not, they block, and nothing is waited for.
        """
        with self._lock:
            self.check_idle()
            self._is_stepping = True
        try:
            outcome: Any = None
            while True:
                try:
                    call = steps.send(outcome)
                except StopIteration as done:
                    return cast("Decision", done.value)
                if isinstance(call, EventCall):
                    outcome = await self.caller.call(call, is_async=is_async)
                else:
                    outcome = await asyncio.to_thread(call) if is_async else call()
                if self._has_ended:
                    self.void()
                    return None
        except BaseException:
            self.void()
            raise
        finally:
            steps.close()
            self._end_step()

    def _end_step(self) -> None:
        # Without the lock: `finish` sets the end before it looks whether a step runs, so one of the
        # two concludes, and `_conclude` does so once.
        self._is_stepping = False
        if self._end is not None:
            self._conclude()

    def check_idle(self) -> None:
        """Raise BusyError while a mod runs, which would wait for itself."""
        if self._is_stepping:
            raise BusyError(
                f"a mod of {self.request_id} is running and its generation waits for it; a mod "
                "cannot iterate the generation that calls it"
            )

    # ---- the end

    def finish(
        self, reason: str, *, usage: Usage | None = None, error: BaseException | None = None
    ) -> None:
        """The request has ended: finish its trace and call the end hooks, once; any thread.

        If a mod is running, this happens when it returns.
        """
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            self._end = RequestEnd(self.request_id, reason, tuple(self.ids), error), usage
            if self._is_stepping:
                return
        self._conclude()

    def drop(self) -> None:
        """Like `finish`, for a generation that was dropped, on a thread of its own.

        The garbage collector may run anywhere, also while its thread holds a lock of a mod.
        """
        with self._lock:
            if self._has_ended:
                return
        threading.Thread(
            target=self.finish, args=("cancelled",), name="kqview mods end", daemon=True
        ).start()

    def _conclude(self) -> None:
        with self._lock:
            if self._end is None:
                return
            # Not kept: through the traceback of its error it would keep the generation alive.
            (end, usage), self._end = self._end, None
        if self.recorder is not None:
            self.recorder.finish(
                end.finish_reason,
                ids=end.ids,
                text=self.text(),
                usage=usage,
                error=None if end.error is None else describe(end.error),
            )
        for one in self.mods:
            self.caller.end(one, end)
        self.caller.close()


def _apply(
    action: Noop | AdjustedPrefill | AdjustedLogits | SetEdits | ForceTokens | Backtrack,
    record: TraceAction | None,
    step: _SteeredStep,
    *,
    is_added: bool,
) -> None:
    """Note in *step* what *action*, an answer to Added or to an event before it, asks for."""
    match action:
        case Noop() | ForceTokens(tokens=[]):
            pass
        case AdjustedPrefill():
            step.prefill = action
        case SetEdits(edits):
            step.edits = edits
        case AdjustedLogits(logits, temperature):
            step.logits = logits
            step.temperature = step.temperature if temperature is None else temperature
        case ForceTokens(tokens):
            step.has_forced = True
            if is_added:
                step.pieces += _pieces(tokens, record, True)
            else:
                step.instead = tokens
        case Backtrack(n, tokens):
            n_pieces = min(n, len(step.pieces)) if is_added else 0
            n_back = min(n - n_pieces, step.n_removable - step.n_back)
            step.n_back += n_back
            if record is not None:
                record.backtrack_steps = n_pieces + n_back
            if is_added:
                del step.pieces[len(step.pieces) - n_pieces :]
                step.pieces += _pieces(tokens or [], record, True)
            else:
                step.is_dropped = True
                step.instead = [*(step.instead or ()), *(tokens or ())]


def _pieces(
    tokens: Sequence[int], record: TraceEvent | TraceAction | None, is_forced: bool
) -> list[_SteeredPiece]:
    return [_SteeredPiece(token, record, place, is_forced) for place, token in enumerate(tokens)]


def _note(record: TraceEvent | TraceAction, **details: Any) -> None:
    record.details = {**(record.details or {}), **details}
