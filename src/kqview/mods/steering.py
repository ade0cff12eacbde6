"""Steering: calls a request's mods in each step and combines their actions. Knows no engine.

Each step is one forward pass: `Steering.step` tells the mods of the pass, of the token sampled from
its logits and of the tokens added, and turns their actions into one `Decision`. It is a generator
of calls, so that synchronous and asynchronous consumers share it: `run` and `arun` make each call
through a `Caller` and send the outcome in.

Within a step, tokens are a list of pieces, not visible outside before the decision. Backtrack
removes pieces from its end first, then tokens added in earlier steps. Finally the list is cut where
the text ends: at an end-of-text token, at the limit of tokens, or after a stop string.
"""

import asyncio
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kqview import _core
from kqview.arguments import checked_ids
from kqview.errors import (
    BusyError,
    EmittedError,
    InvalidActionError,
    InvalidToken,
    ModFailed,
    RequestError,
)
from kqview.mods.actions import (
    Action,
    AdjustedLogits,
    AdjustedPrefill,
    Backtrack,
    EmitError,
    ForceOutput,
    ForceTokens,
    Noop,
    Terminal,
    ToolCalls,
    check_action,
    check_size,
    to_logits,
)
from kqview.mods.calls import Call, Caller, Outcome, failure
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
from kqview.mods.logs import Log
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
Pick = Callable[[], "Picked"]
Steps = Generator[Call | Pick, Any, "Decision"]
"""Calls to make, outcomes or tokens to send in; returns a decision."""
Cut = Callable[[int, Sequence[int]], int | None]
_Telling = Generator[Call | Pick, Any, None]
_Ending = tuple[Terminal, TraceAction | None]


class Picked(Protocol):
    """A token that was sampled; `PickedToken` of the core."""

    @property
    def id(self) -> int: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def top_logprobs(self) -> list[tuple[int, float]] | None: ...


class Forward(Protocol):
    """A forward pass that waits for a decision; `ForwardEvent` of the core."""

    @property
    def logits(self) -> NDArray[np.float32]: ...
    @property
    def attention(self) -> Any: ...
    @property
    def positions(self) -> Any: ...
    @property
    def hidden(self) -> Any: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def n_left(self) -> int: ...
    @property
    def n_removable(self) -> int: ...
    def pick(
        self, logits: NDArray[np.float32] | None = None, temperature: float | None = None
    ) -> Picked: ...
    def ends(self, id: int) -> str | None: ...


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
    """

    n_removed: int = 0
    ids: list[int] = field(default_factory=list[int])
    n_sampled: int = 0
    end: str | None = None
    replaces_all: bool = False
    picked: Picked | None = None
    tool_calls: Any = None
    error: EmittedError | None = None
    prompt: list[int] = field(default_factory=list[int])
    max_tokens: int = 0


@dataclass(slots=True)
class _Piece:
    """A token of the step, and the place in a record's tokens that it comes from."""

    id: int
    record: TraceEvent | TraceAction | None
    place: int
    is_forced: bool


@dataclass(slots=True)
class _Step:
    """What mods have asked for so far in a step."""

    number: int
    n_removable: int = 0  # tokens of earlier steps that can be taken back
    logits: NDArray[np.float32] | None = None
    temperature: float | None = None
    forced: list[int] | None = None  # of the one ForceTokens that applies
    n_back: int = 0  # tokens of earlier steps
    is_dropped: bool = False  # whether a Backtrack has dropped the sampled token
    put_back: list[int] = field(default_factory=list[int])  # its own tokens
    pieces: list[_Piece] = field(default_factory=list[_Piece])  # since Added
    end: _Ending | None = None
    prefill: AdjustedPrefill | None = None


class Steering:
    """The mods and the callables of one request.

    Belongs to the consumer of the request: one thread or task at a time, except for `finish` and
    `drop`.

    Args:
        request_id: The request.
        mods: Its mods, in order.
        caller: Calls them.
        n_vocab: Size of the vocabulary.
        ids: The generated ids: the consumer's list, which it changes as decisions say.
        text: The generated text so far.
        recorder: Writes the trace; None for none.
        logits_processor: As of `Engine.generate`.
        stopping: As of `Engine.generate`.
        forcing: As of `Engine.generate`.
        check_prompt: Raises RequestError for a prompt that the engine cannot take.
        detokenize: Text of ids.
        is_end: Whether an id ends a text.
        attention: The row of a forward pass as the trace keeps it; None to leave it out.
        picks_slowly: Whether sampling may take long, as with a grammar; then an event loop does not
            wait for it.
        is_strict: Whether a mod that fails ends the request.
    """

    def __init__(
        self,
        request_id: str,
        mods: Sequence[BoundMod],
        caller: Caller,
        *,
        n_vocab: int,
        ids: list[int],
        text: Callable[[], str],
        recorder: TraceRecorder | None = None,
        logits_processor: LogitsProcessor | None = None,
        stopping: Stopping | None = None,
        forcing: Forcing | None = None,
        check_prompt: Callable[[list[int]], object],
        detokenize: Callable[[list[int]], str],
        is_end: Callable[[int], bool],
        attention: Callable[[ForwardPass], Object | None],
        picks_slowly: bool = False,
        is_strict: bool = False,
    ) -> None:
        self.mods = mods
        self.recorder = recorder
        self._request_id = request_id
        self._caller = caller
        self._n_vocab = n_vocab
        self._ids = ids
        self._text = text
        self._logits_processor = logits_processor
        self._stopping = stopping
        self._forcing = forcing
        self._check_prompt = check_prompt
        self._detokenize = detokenize
        self._is_end = is_end
        self._attention = attention
        self._picks_slowly = picks_slowly
        self._is_strict = is_strict
        self._is_direct = not (mods or recorder or forcing or picks_slowly)
        self._prompt: list[int] = []
        self._prompt_text = ""
        self._n_steps = 0
        self._n_steps_max = 0
        self._records: list[TraceEvent | TraceAction] = []  # of this step, about the text
        self._lock = threading.Lock()
        self._is_stepping = False
        self._has_ended = False
        self._end: tuple[RequestEnd, Usage | None] | None = None  # until the hooks know of it

    @property
    def is_async(self) -> bool:
        """Whether a mod must be awaited."""
        return any(one.is_async for one in self.mods)

    @property
    def failures(self) -> tuple[ModFailure, ...]:
        """The calls of mods that failed, the first 100."""
        return tuple(self.mods[0].failures.kept) if self.mods else ()

    @property
    def is_direct(self) -> bool:
        """Whether `direct` does what `step` does: only a processor or a stopping rule steers."""
        return self._is_direct

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
        event = Prefilled(self._request_id, 0, max_tokens, info)
        so_far = _Step(0)
        yield from self._tell(event, recorded, so_far)
        decision = Decision(prompt=prompt, max_tokens=max_tokens)
        if so_far.prefill is not None:
            decision.prompt = so_far.prefill.tokens or prompt
            decision.max_tokens = so_far.prefill.max_steps or max_tokens
        self._prompt = decision.prompt
        self._n_steps_max = _STEPS_PER_TOKEN * decision.max_tokens + _STEPS_MORE
        if self.recorder is not None:
            text = self._detokenize(decision.prompt)
            self._prompt_text = text[-INPUT_CHARACTERS:]
            self.recorder.set_prompt(decision.prompt, text)
        if so_far.end is not None:
            return self._terminate(decision, so_far.end)
        return decision

    # ---- a step

    def step(self, forward: Forward, cut: Cut) -> Steps:
        """Tell the mods of a forward pass and what follows.

        Args:
            forward: The forward pass.
            cut: Given a number of ids to take back and ids to add, how many of these are left when
                a stop string is complete; None without one.
        """
        self._n_steps += 1
        self._records = []
        n_removable = min(len(self._ids), forward.n_removable)
        so_far = _Step(self._n_steps, n_removable)
        yield from self._forward_pass(forward, so_far)
        if not self._ids and so_far.forced is None:
            so_far.forced = self._forced([], []) or None
        decision = Decision()
        if not so_far.is_dropped and so_far.end is None:
            pick = partial(forward.pick, so_far.logits, so_far.temperature)
            picked: Picked = (yield pick) if self._picks_slowly else pick()
            decision.picked = picked
            yield from self._sampled(picked.id, so_far)
        if so_far.end is None:
            yield from self._added(decision.picked, so_far)
        if so_far.end is not None:
            return self._terminate(decision, so_far.end)
        self._force(so_far)
        decision.n_removed = so_far.n_back
        self._fill(decision, so_far.pieces, forward, cut)
        if decision.end is None and self._stops(decision):
            decision.end = "stop"
        if decision.end is None and self._n_steps >= self._n_steps_max:
            decision.end = "length"
        return decision

    def direct(self, forward: Forward, cut: Cut) -> Decision | None:
        """The decision of `step`, run at once; None if the request ended meanwhile.

        Between two tokens little of the interpreter is left in a core's cache, so that each line
        costs several times what it costs in a loop: the machinery of `step` takes 0.2 ms.
        """
        self.check_idle()
        self._is_stepping = True
        try:
            logits = None
            if self._logits_processor is not None:
                given = np.array(forward.logits)
                row = self._processed(given)
                logits = given if row is given else self._checked_row(row)
            try:
                picked = forward.pick(logits)
            except RequestError as error:
                if logits is not None:
                    error.parameter = "logits_processor"
                raise
            end = forward.ends(picked.id)
            if end is not None:
                return Decision(0, [], 0, end, False, picked)
            decision = Decision(0, [picked.id], 1, None, False, picked)
            if cut(0, decision.ids) is not None:
                decision.end = "stop_sequence"
            elif forward.n_left <= 1:
                decision.end = "length"
            elif self._stops(decision):
                decision.end = "stop"
            return None if self._has_ended else decision
        finally:
            self._is_stepping = False
            if self._end is not None:
                self._conclude()

    def _processed(self, given: NDArray[np.float32]) -> object:
        """What the logits processor makes of *given*, which it may change."""
        assert self._logits_processor is not None
        returned = self._logits_processor([*self._prompt, *self._ids], given)
        return given if returned is None else returned

    def _checked_row(self, row: object) -> NDArray[np.float32]:
        try:
            checked = to_logits(row, _PROCESSED)
            check_size(checked, self._n_vocab, _PROCESSED)
        except InvalidActionError as error:
            raise RequestError(str(error), parameter="logits_processor") from None
        return checked

    def _forward_pass(self, forward: Forward, so_far: _Step) -> _Telling:
        event = ForwardPass(
            self._request_id,
            so_far.number,
            forward.logits,
            forward.n_tokens,
            forward.attention,
            forward.positions,
            forward.hidden,
        )
        recorded = None
        if self.recorder is not None:
            top, entropy = _core.outlook(event.logits, _TOP_TOKENS)
            recorded = self.recorder.forward_pass(
                so_far.number,
                n_generated=len(self._ids),
                input_text=(self._prompt_text + self._text())[-INPUT_CHARACTERS:],
                top_tokens=top,
                entropy=entropy,
                attention=self._attention(event),
            )
        yield from self._tell(event, recorded, so_far)
        if self._logits_processor is None or so_far.is_dropped or so_far.end is not None:
            return
        before = event.logits if so_far.logits is None else so_far.logits
        so_far.logits = self._checked_row(self._processed(np.array(before)))

    def _sampled(self, token: int, so_far: _Step) -> _Telling:
        recorded = None
        if self.recorder is not None:
            recorded = self.recorder.sampled(so_far.number, token, n_generated=len(self._ids))
        yield from self._tell(Sampled(self._request_id, so_far.number, token), recorded, so_far)

    def _added(self, picked: Picked | None, so_far: _Step) -> _Telling:
        is_forced = so_far.is_dropped or so_far.forced is not None
        tokens = [*(so_far.forced or ()), *so_far.put_back]
        if not is_forced and picked is not None:
            tokens = [picked.id]
        if not tokens:  # a Backtrack without others
            return
        recorded, record = None, None
        if self.recorder is not None:
            n_generated = len(self._ids) - so_far.n_back
            recorded = self.recorder.added(
                so_far.number, tokens, n_generated=n_generated, forced=is_forced
            )
            if recorded is not None:
                record = self.recorder.trace.events[recorded]
                self._records.append(record)
        so_far.pieces = _pieces(tokens, record, is_forced)
        event = Added(self._request_id, so_far.number, list(tokens), is_forced)
        yield from self._tell(event, recorded, so_far)

    def _force(self, so_far: _Step) -> None:
        """Add what `forcing` wants behind the tokens of the step."""
        n_kept = len(self._ids) - so_far.n_back
        kept = self._ids[:n_kept] if so_far.n_back else self._ids
        added = [piece.id for piece in so_far.pieces]
        tokens = self._forced(kept, added)
        if not tokens:
            return
        record = None
        if self.recorder is not None:
            recorded = self.recorder.added(
                so_far.number, tokens, n_generated=n_kept + len(added), forced=True
            )
            if recorded is not None:
                record = self.recorder.trace.events[recorded]
                self._records.append(record)
        so_far.pieces += _pieces(tokens, record, True)

    def _forced(self, kept: Sequence[int], added: Sequence[int]) -> list[int]:
        if self._forcing is None:
            return []
        tokens = checked_ids("the result of forcing", self._forcing(kept, added))
        for token in tokens:
            if token >= self._n_vocab:
                raise InvalidToken(
                    f"forcing returned token id {token}, the vocabulary has {self._n_vocab}; "
                    "return ids from tokenize()",
                    parameter="forcing",
                )
        return tokens

    # ---- mods

    def _tell(self, event: Event, recorded: int | None, so_far: _Step) -> _Telling:
        """Ask every mod, then apply their actions in order."""
        answers: list[tuple[Action, int | None]] = []
        for one in self.mods:
            called = None if self.recorder is None else self.recorder.call(recorded, one.name)
            outcome: Outcome = yield Call(one, event, self._log_of(called))
            action: Action = Noop()
            if outcome.error is None:
                try:
                    action = self._checked(event, outcome.answer)
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
                event = replace(event, logits=_read_only(action.logits))
        is_open = True
        for action, called in answers:
            is_open = self._apply(action, called, type(event) is Added, so_far, is_open)

    def _fail(self, mod: BoundMod, event: Event, error: str, outcome: Outcome) -> None:
        """Note that a call of *mod* failed; raises ModFailed if the request needs it."""
        failed = ModFailure(mod.name, type(event).__name__, event.step, error, outcome.traceback)
        is_fatal = self._is_strict or mod.is_required
        mod.failures.add(mod.given, failed, outcome.exception, is_raised=is_fatal)
        if is_fatal:
            kind = error.partition(":")[0]  # its text is not for the clients of a server
            why = "mods_strict" if self._is_strict else "its required = True"
            raise ModFailed(
                f"mod {mod.name} failed at {failed.place} with {kind}, and {why} ends the request",
                mod=mod.name,
            ) from outcome.exception

    def _log_of(self, called: int | None) -> Log:
        recorder = self.recorder
        if recorder is None:
            return _ignore
        return lambda message, level: recorder.log(called, message, level)

    def _checked(self, event: Event, answer: object) -> Action:
        action = check_action(event, answer, self._n_vocab)
        if isinstance(action, AdjustedPrefill) and action.tokens:
            self._check_prompt(action.tokens)
        return action

    def _apply(
        self, action: Action, called: int | None, is_added: bool, so_far: _Step, is_open: bool
    ) -> bool:
        """Note what *action* asks for; returns whether those of later mods apply."""
        is_second = isinstance(action, ForceTokens) and so_far.forced is not None
        if not is_open or is_second:
            self._record(action, called, is_applied=False)
            return is_open
        match action:
            case Noop():
                self._record(action, called)
            case AdjustedLogits():
                self._record(action, called)
                so_far.logits = action.logits
                if action.token_temp is not None:
                    so_far.temperature = action.token_temp
            case ForceTokens():
                record = self._record(action, called)
                so_far.forced = action.tokens or None
                if is_added:
                    so_far.pieces += _pieces(action.tokens, record, True)
            case Backtrack():
                n_pieces = min(action.n, len(so_far.pieces)) if is_added else 0
                n_back = min(action.n - n_pieces, so_far.n_removable - so_far.n_back)
                record = self._record(action, called, n_removed=n_pieces + n_back)
                so_far.n_back += n_back
                if is_added:
                    del so_far.pieces[len(so_far.pieces) - n_pieces :]
                    so_far.pieces += _pieces(action.tokens or [], record, True)
                else:
                    so_far.is_dropped = True
                    so_far.put_back = action.tokens or []
                return False
            case AdjustedPrefill():
                self._record(action, called)
                so_far.prefill = action
                return False
            case ForceOutput() | ToolCalls() | EmitError():
                so_far.end = action, self._record(action, called)
                return False
        return True

    def _record(
        self,
        action: Action,
        called: int | None,
        *,
        is_applied: bool = True,
        n_removed: int | None = None,
    ) -> TraceAction | None:
        if self.recorder is None:
            return None
        known: dict[str, Any] = {}
        match action:
            case AdjustedPrefill():
                known = {
                    "tokens": action.tokens,
                    "new_prompt": self._detokenize(action.tokens),
                    "new_length": len(action.tokens),
                    "adjusted_max_steps": action.max_steps or None,
                }
            case ForceTokens() | ForceOutput():
                known = {"tokens": action.tokens}
            case Backtrack():
                known = {
                    "tokens": action.tokens or [],
                    "backtrack_steps": action.n if n_removed is None else n_removed,
                }
            case AdjustedLogits():
                known = {
                    "logits_shape": str([1, action.logits.size]),
                    "temperature": action.token_temp,
                }
            case ToolCalls():
                known = {
                    "has_tool_calls": bool(action.tool_calls),
                    "tool_calls": action.tool_calls,
                }
            case EmitError():
                known = {"error_message": action.err_str}
            case Noop():
                pass
        name: Any = type(action).__name__
        record = self.recorder.action(called, name, is_applied=is_applied, **known)
        if record is not None:
            self._records.append(record)
        return record

    # ---- decisions

    def _fill(self, decision: Decision, pieces: list[_Piece], forward: Forward, cut: Cut) -> None:
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
                piece.record.details = {**(piece.record.details or {}), "n_kept": piece.place}

    def _stops(self, decision: Decision) -> bool:
        if self._stopping is None:
            return False
        n_stay = len(self._ids) - decision.n_removed
        return bool(self._stopping([*self._prompt, *self._ids[:n_stay], *decision.ids]))

    def _terminate(self, decision: Decision, end: _Ending) -> Decision:
        """*decision* as the terminal action asks: it replaces all that was generated."""
        action, record = end
        decision.n_removed = len(self._ids)
        decision.replaces_all = True
        match action:
            case ForceOutput():
                is_end = self._is_end
                n_kept = next(
                    (i for i, token in enumerate(action.tokens) if is_end(token)),
                    len(action.tokens),
                )
                decision.ids = action.tokens[:n_kept]
                decision.end = "stop"
                if record is not None and n_kept < len(action.tokens):
                    record.details = {**(record.details or {}), "n_kept": n_kept}
            case ToolCalls():
                decision.tool_calls = action.tool_calls
                decision.end = "tool_calls"
            case EmitError():
                decision.error = EmittedError(action.err_str)
                decision.end = "error"
        return decision

    def void(self) -> None:
        """Mark the last step in the trace as without effect: it was not applied."""
        for record in self._records:
            nothing: Object = (
                {"n_kept": 0} if isinstance(record, TraceEvent) else {"is_applied": False}
            )
            record.details = {**(record.details or {}), **nothing}

    # ---- running the generators

    def run(self, steps: Steps) -> Decision | None:
        """Run `prefill` or `step` with calls that block; None if the request ended meanwhile."""
        self._enter()
        try:
            call = next(steps)
            while True:
                outcome = self._caller.call(call) if isinstance(call, Call) else call()
                if self._has_ended:
                    self.void()
                    return None
                call = steps.send(outcome)
        except StopIteration as done:
            decision: Decision = done.value
            return decision
        except BaseException:
            self.void()
            raise
        finally:
            steps.close()
            self._leave()

    async def arun(self, steps: Steps) -> Decision | None:
        """Like `run`, with calls that await."""
        self._enter()
        try:
            call = next(steps)
            while True:
                if isinstance(call, Call):
                    outcome = await self._caller.acall(call)
                else:
                    outcome = await asyncio.to_thread(call)
                if self._has_ended:
                    self.void()
                    return None
                call = steps.send(outcome)
        except StopIteration as done:
            decision: Decision = done.value
            return decision
        except BaseException:
            self.void()
            raise
        finally:
            steps.close()
            self._leave()

    def check_idle(self) -> None:
        """Raise BusyError while a mod runs, which would wait for itself."""
        if self._is_stepping:
            raise BusyError(
                f"a mod of {self._request_id} is running and its generation waits for it; a mod "
                "cannot iterate the generation that calls it"
            )

    def _enter(self) -> None:
        with self._lock:
            self.check_idle()
            self._is_stepping = True

    def _leave(self) -> None:
        with self._lock:
            self._is_stepping = False
        self._conclude()

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
            self._end = RequestEnd(self._request_id, reason, tuple(self._ids), error), usage
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
                text=self._text(),
                usage=usage,
                error=None if end.error is None else describe(end.error),
            )
        for one in self.mods:
            self._caller.end(one, end)
        self._caller.close()


def _pieces(
    tokens: Sequence[int], record: TraceEvent | TraceAction | None, is_forced: bool
) -> list[_Piece]:
    return [_Piece(token, record, place, is_forced) for place, token in enumerate(tokens)]


def _read_only(row: NDArray[np.float32]) -> NDArray[np.float32]:
    view = row.view()
    view.flags.writeable = False
    return view


def _ignore(_message: str, _level: object) -> None: ...
