"""SteeredGeneration: a generation whose forward passes wait for mods or for callables.

The core hands out each forward pass as a ForwardEvent and leaves the slot out of its steps until it
is answered. `Steering` decides; here its decision becomes the answer, the text and the tokens. All
tokens of a decision are yielded before the next forward pass is taken.

A request with mods is submitted at the first iteration: its mods see the prompt first, and async
mods need the consumer's event loop for that.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, Unpack, cast

from kqview import _core
from kqview.errors import BusyError, ClosedError, RequestError
from kqview.generation.stream import Generation, GenerationFacts
from kqview.generation.waiting import Taker
from kqview.mods.events import Dialogue
from kqview.mods.failures import ModFailure
from kqview.mods.steering import Decision, Steering, Steps
from kqview.trace import Trace
from kqview.types import PromptBlock, Token
from kqview.types.token import Context

if TYPE_CHECKING:
    from kqview.generation.text import Mark

_READY_AT_ONCE: Final = 32  # tokens between which other tasks run
_CORE_ENDS: Final = {"stop", "length", "stop_token", "error"}


class MakeSteering(Protocol):
    """Makes the Steering of a generation from what they share."""

    def __call__(
        self, *, ids: list[int], text: Callable[[], str], note: Callable[[], object]
    ) -> Steering: ...


class _Unsubmitted:
    """Stands in for the core's handle until the request is submitted."""

    end = None
    slot = -1
    is_parked = False
    n_cached = 0

    def cancel(self) -> None: ...
    def wait_settled(self) -> None: ...
    def arm_settled(self, _waiter: object) -> bool:
        return True

    def disarm(self, _waiter: object) -> None: ...


class SteeredGeneration(Generation):
    """A Generation with mods, a logits processor, a stopping rule or a trace."""

    def __init__(
        self,
        steering: MakeSteering,
        *,
        prompt: list[int],
        max_tokens: int,
        dialogue: Dialogue | None,
        submit: Callable[[list[int], int], _core.Generation],
        context_of: Callable[[list[int]], Context],
        **facts: Unpack[GenerationFacts],
    ) -> None:
        """Prepare a request without submitting it.

        Args:
            steering: Makes its Steering.
            prompt: Ids of its prompt.
            max_tokens: Limit of tokens to generate.
            dialogue: The chat that the prompt was made of, if it is one.
            submit: Submits the request with the prompt and limit as its mods leave them.
            context_of: The context of a prompt that its mods have changed.
            **facts: As for Generation.
        """
        super().__init__(None, **facts)
        self._handle = cast("_core.Generation", _Unsubmitted())
        self._submit = submit
        self._context_of = context_of
        self._is_submitted = False
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._dialogue = dialogue
        self._ready: deque[Token] = deque()
        self._marks: list[Mark] = []  # of the text before each id
        self._is_left = False  # whether the consumer has left before the end
        self._n_removed = 0
        self._decided: str | None = None
        self._tool_calls: Any = None
        self._error: BaseException | None = None  # while it ends the generation
        text = self._text
        self._steering = steering(
            ids=self._ids, text=lambda: text.text_before_stop, note=_noting(self._taker)
        )
        weakref.finalize(self, self._steering.drop).atexit = False

    # ---- iteration

    def _take(self) -> Token | PromptBlock | None:
        if (token := self._next_ready()) is not None:
            return token
        if self._reason is not None:
            return None
        self._check_alone()
        self._steering.check_idle()
        if self._steering.is_async:
            raise RequestError(
                f"{self._request_id} has async mods; iterate it with async for", parameter="mods"
            )
        try:
            return self._take_alone()
        except BusyError:  # the caller may iterate again later
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def _take_alone(self) -> Token | PromptBlock | None:
        try:
            return self._take_next()
        except ClosedError:
            if self._reason is None:
                raise
            return None  # it was cancelled during the step

    def _take_next(self) -> Token | PromptBlock | None:
        while self._reason is None:
            if not self._is_submitted:
                self._taker.note()
                self._begin(self._run(self._prefill()))
            else:
                event = self._handle.next()
                if isinstance(event, _core.WaitEvent):
                    event = self._wait_turn(event)
                self._taker.note()
                if not isinstance(event, _core.ForwardEvent):
                    return self._receive(event)
                self._taker.has_taken = True
                steering = self._steering
                decision = (
                    self._direct(event)
                    if steering.is_direct
                    else self._run(steering.step(event, self._cut))
                )
                self._decide(event, decision)
            if (token := self._next_ready()) is not None:
                return token
        return None

    async def _atake_alone(self) -> Token | PromptBlock | None:
        try:
            return await self._atake_next()
        except ClosedError:
            if self._reason is None:
                raise
            return None

    async def _atake_next(self) -> Token | PromptBlock | None:
        if (token := self._next_ready()) is not None:
            if len(self._ready) % _READY_AT_ONCE == 0:  # a mod may force thousands
                await asyncio.sleep(0)
            return token
        while self._reason is None:
            if not self._is_submitted:
                self._taker.note(asyncio.current_task())
                self._begin(await self._arun(self._prefill()))
            else:
                event = await self._anext_event()
                if event is None:
                    break
                if not isinstance(event, _core.ForwardEvent):
                    return self._receive(event)
                self._taker.has_taken = True
                steering = self._steering
                decision = (
                    self._direct(event)
                    if steering.is_direct
                    else await self._arun(steering.step(event, self._cut))
                )
                self._decide(event, decision)
            if (token := self._next_ready()) is not None:
                return token
        return None

    def peek_block(self, within_s: float) -> PromptBlock | None:
        return self._blocks[0] if self._blocks else None  # its mods run only as it is iterated

    def _next_ready(self) -> Token | None:
        return self._ready.popleft() if self._ready and not self._is_left else None

    def _receive(self, event: Any) -> Token | PromptBlock | None:
        if isinstance(event, _core.EndEvent):
            self._end(self._decided or event.finish_reason)
            return None
        return super()._receive(event)

    # ---- what the mods decide

    def _prefill(self) -> Steps:
        return self._steering.prefill(
            self._prompt, max_tokens=self._max_tokens, dialogue=self._dialogue
        )

    def _run(self, steps: Steps) -> Decision | None:
        try:
            return self._steering.run(steps)
        except BusyError as error:  # of a callable: its forward pass is gone, so this is the end
            self._fail(error)
            raise
        finally:
            self._taker.note()  # a mod with a time limit ran on another thread

    def _direct(self, event: _core.ForwardEvent) -> Decision | None:
        try:
            return self._steering.direct(event, self._cut)
        except BusyError as error:
            self._fail(error)
            raise

    async def _arun(self, steps: Steps) -> Decision | None:
        try:
            return await self._steering.arun(steps)
        except BusyError as error:
            self._fail(error)
            raise
        finally:
            self._taker.note(asyncio.current_task())

    def _begin(self, decision: Decision | None) -> None:
        """Submit the request with the prompt as the mods leave it, unless they have ended it."""
        if decision is None:  # it was cancelled meanwhile
            return
        self._is_submitted = True
        if decision.prompt != self._context.ids:
            self._context = self._context_of(decision.prompt)
        if decision.end is None:
            self._adopt(self._submit(decision.prompt, decision.max_tokens))
            return
        self._commit(decision, None)
        if decision.error is not None:
            raise decision.error
        self._end(decision.end)

    def _decide(self, event: _core.ForwardEvent, decision: Decision | None) -> None:
        """Answer *event*, and update the text."""
        if decision is None:
            return
        end = decision.end
        if end is not None and end not in _CORE_ENDS:
            end = "stop"
        try:
            if decision.replaces_all:
                event.answer(0, [], end)
            else:
                event.answer(decision.n_removed, decision.ids, end)
        except ClosedError:
            self._steering.void()
            return  # the next event says why
        except BaseException:
            self._steering.void()
            raise
        self._commit(decision, event)
        self._decided = decision.end
        if decision.error is not None:
            raise decision.error

    def _commit(self, decision: Decision, event: _core.ForwardEvent | None) -> None:
        if decision.n_removed:
            n_kept = len(self._ids) - decision.n_removed
            self._text.reset(self._marks[n_kept])
            del self._ids[n_kept:], self._marks[n_kept:]
            self._context = self._context.branch(n_kept)
            self._n_removed += decision.n_removed
        self._tool_calls = decision.tool_calls
        for i, token_id in enumerate(decision.ids):
            token = self._new_token(token_id, is_forced=i >= decision.n_sampled)
            token._has_pass = i == 0 and event is not None and not decision.n_removed  # pyright: ignore[reportPrivateUsage]
            if event is not None and token._has_pass:  # pyright: ignore[reportPrivateUsage]
                self._add_row(token, decision, event)
        if decision.end is not None and decision.ids:
            self._ready[-1].text += self._text.flush()

    def _new_token(self, token_id: int, *, is_forced: bool) -> Token:
        if not self._steering.is_direct:  # else nothing is taken back
            self._marks.append(self._text.mark())
        text = self._text.feed(self._token_bytes(token_id))
        token = Token(token_id, text, len(self._ids), forced=is_forced)
        token.n_removed, self._n_removed = self._n_removed, 0
        token.capture = self._capture
        self._place(token)
        self._ready.append(token)
        return token

    def _add_row(self, token: Token, decision: Decision, event: _core.ForwardEvent) -> None:
        """Fill in what the forward pass knows of the token that follows it."""
        if decision.picked is not None and not token.forced:
            token.logprob = decision.picked.logprob
            token.top_logprobs = decision.picked.top_logprobs
        if self._capture is not None:
            token.attention = event.attention
            token.attention_positions = event.positions
            token.hidden = event.hidden
            if self._capture.vocab_logits and not token.forced:
                token.logits = event.logits
        if event.n_discarded:
            token.discarded = range(self._n_keep, self._n_keep + event.n_discarded)

    def _cut(self, n_removed: int, ids: Sequence[int]) -> int | None:
        """How many of *ids* are left when a stop string is complete; None without one."""
        if not self._text.has_stops:
            return None
        n_kept = len(self._ids) - n_removed
        mark = self._marks[n_kept] if n_removed else self._text.mark()
        ahead = self._text.branch(mark)
        for n, token_id in enumerate(ids, 1):
            ahead.feed(self._token_bytes(token_id))
            if ahead.stop_match is not None:
                return n
        return None

    # ---- ending

    def _end(self, reason: str) -> None:
        if self._reason is None:
            super()._end(reason)
            self._steering.finish(reason, usage=self.usage, error=self._error)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        super()._fail(error)
        self._error = None  # its traceback would keep this generation alive

    def _stop(self, reason: str) -> None:
        if self._reason is None:
            self._is_left = True
            # What the mods have ended is not cancelled by a consumer that leaves.
            is_over = self._decided is not None and reason == "cancelled"
            super()._stop(self._decided or reason if is_over else reason)

    # ---- facts

    @property
    def trace(self) -> Trace | None:
        recorder = self._steering.recorder
        return None if recorder is None else recorder.trace

    @property
    def mods(self) -> tuple[Any, ...]:
        return tuple(one.mod for one in self._steering.mods)

    @property
    def mod_errors(self) -> tuple[ModFailure, ...]:
        return self._steering.failures

    @property
    def tool_calls(self) -> Any:
        return self._tool_calls

    @property
    def n_removed(self) -> int:
        return self._n_removed


def _noting(taker: Taker) -> Callable[[], None]:
    def note() -> None:
        """Note that the thread or task that runs a mod is one that takes from the generation."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # a thread without an event loop
            task = None
        taker.note(task)

    return note
