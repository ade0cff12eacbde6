"""Generation: the tokens of one request, taken synchronously or with ``async for``.

Both ways share `_receive`, which turns an event of the core into a Token or into rows of the
prompt; they differ in how they wait. Rows of the prompt come before the first token: iterating one
of the two keeps what it meets of the other. The synchronous wait is in C++ (no GIL, ends on
signals), the asynchronous one in `waiting.py`, as is what a wait for a slot takes.

A generation has ended when `_reason` is set, which `_end` alone does.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from kqview import _core
from kqview.errors import BusyError, InvalidCapture
from kqview.generation.prompt import PromptAttention
from kqview.generation.text import TextStream
from kqview.generation.waiting import HANDOVER_S, LoopWaker, Taker, Turns
from kqview.types import Capture, PromptBlock, Token, Usage
from kqview.types.stats import read_fields

_Event = _core.TokenEvent | _core.PromptEvent | _core.EndEvent

# How long a coroutine may take tokens without a wait before others of its loop have their turn.
_TURN_S: Final = 0.002


class Generation:
    """Iterator and async iterator of Token; also a context manager that closes it.

    It is its own iterator: a second loop goes on where the first one stopped. Dropping it cancels
    the request.

    Whatever iterating raises ends it, as with an async generator: the errors below, and also
    KeyboardInterrupt, and the CancelledError of a task that was cancelled or ran into
    ``asyncio.timeout``. Its slot is then free, even while a stored exception (``gather(...,
    return_exceptions=True)``, a future, a notebook's traceback) keeps the generation itself alive.
    To wait for a token with a limit and go on afterwards, keep the task:
    ``await asyncio.wait({task}, timeout=1)``. BusyError alone ends nothing. An exception of the
    loop's own body does not pass through here: use ``with`` to end the generation then.

    Raises (while iterating):
        PoolExhausted: More attention is held than fits and ``on_full`` does not allow to go on;
            tokens and views handed out so far stay valid.
        BusyError: Another thread or task is iterating it at this moment; or it waits for a slot
            that only the one who iterates here can free. It goes on when that is done.
        ClosedError: The engine was closed meanwhile.
        DecodeError: llama.cpp failed; the engine goes on.
    """

    def __init__(
        self,
        handle: _core.Generation,
        *,
        request_id: str,
        n_prompt: int,
        n_keep: int,
        capture: Capture | None,
        stop: Sequence[str],
        token_bytes: Callable[[int], bytes],
        waker: Callable[[], LoopWaker],
        on_end: Callable[[], None],
        turns: Turns,
    ) -> None:
        self._handle = handle
        self._request_id = request_id
        self._n_prompt = n_prompt
        self._n_keep = n_keep
        self._capture = capture
        self._token_bytes = token_bytes
        self._waker = waker
        self._on_end = on_end
        self._turns = turns
        self._taker = Taker(request_id)
        self._text = TextStream(stop)
        self._ids: list[int] = []
        self._blocks: deque[PromptBlock] = deque()
        self._ahead: Token | None = None  # met while rows of the prompt were asked for
        self._reason: str | None = None
        self._is_awaited = False
        self._turn_ends = 0.0
        turns.add(handle.id, self, self._taker)

    # ---- iteration

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        while self._ahead is None:
            received = self._take()
            if received is None:
                raise StopIteration
            self._keep(received)
        return self._token_kept()

    def _take(self) -> Token | PromptBlock | None:
        """The next thing that the core hands over, None at the end; waits."""
        if self._reason is not None:
            return None
        self._check_alone()
        try:
            event = self._handle.next()
            if isinstance(event, _core.WaitEvent):
                event = self._wait_turn(event)
            self._taker.note()
            return self._receive(event)
        except BusyError:  # it goes on when that is over
            raise
        except BaseException as error:
            self._stop("error" if isinstance(error, Exception) else "cancelled")
            raise

    def _keep(self, received: Token | PromptBlock) -> None:
        if isinstance(received, Token):
            self._ahead = received
        else:
            self._blocks.append(received)

    def _token_kept(self) -> Token:
        token, self._ahead = self._ahead, None
        assert token is not None
        return token

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        while self._ahead is None:
            received = await self._atake()
            if received is None:
                raise StopAsyncIteration
            self._keep(received)
        return self._token_kept()

    async def _atake(self) -> Token | PromptBlock | None:
        """As `_take`, without blocking the event loop."""
        self._check_alone()
        self._is_awaited = True
        try:
            return await self._atake_alone()
        except BusyError:
            raise
        except BaseException as error:
            self._stop("error" if isinstance(error, Exception) else "cancelled")
            raise
        finally:
            self._is_awaited = False

    async def _atake_alone(self) -> Token | PromptBlock | None:
        if time.monotonic() > self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = time.monotonic() + _TURN_S
        has_waited = False
        while self._reason is None:
            event = self._handle.try_next(has_waited)
            if isinstance(event, _core.WaitEvent):
                if event.holders:
                    self._turns.check_task(event.holders, self._request_id, asyncio.current_task())
                has_waited = True
                await self._waker().wait(self._handle, self._handle.arm)
                continue
            if has_waited:
                self._turn_ends = time.monotonic() + _TURN_S
            self._taker.note(asyncio.current_task())
            return self._receive(event)
        return None

    def _check_alone(self) -> None:
        if self._is_awaited:
            raise BusyError(
                f"a task already waits for the next token of {self._request_id}; iterate it once"
            )

    def _wait_turn(self, waits: _core.WaitEvent) -> _Event:
        """Wait for the first event while others, who wait for their consumers, have every slot."""
        holders: list[int] = []
        while True:
            holders = waits.holders or holders
            is_late = not waits.holders and self.slot is None
            is_ours = self._turns.is_of_thread(holders, self._request_id, is_late=is_late)
            event = self._handle.next(HANDOVER_S if is_ours else None, True)
            if not isinstance(event, _core.WaitEvent):
                return event
            waits = event

    def _receive(self, event: _Event) -> Token | PromptBlock | None:
        if isinstance(event, _core.TokenEvent):
            return self._to_token(event)
        if isinstance(event, _core.PromptEvent):
            return PromptBlock(
                event.start, event.n_rows, event.attention, event.positions, event.embedding
            )
        self._end(event.finish_reason)
        return None

    def _to_token(self, event: _core.TokenEvent) -> Token:
        token_id = event.id
        text = self._text.feed(self._token_bytes(token_id))
        token = Token(token_id, text, len(self._ids), event.logprob, event.top_logprobs)
        if self._capture is not None:
            token.capture = self._capture
            token.attention = event.attention
            token.attention_positions = event.positions
            token.hidden = event.hidden
        if event.n_discarded:
            token.discarded = range(self._n_keep, self._n_keep + event.n_discarded)
        self._ids.append(token_id)
        self._taker.has_taken = True
        end = event.end
        if self._text.stop_match is not None:
            self._stop("stop_sequence")
        elif end is not None:
            token.text += self._text.flush()
            self._end(end.finish_reason)
        return token

    def _end(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
            self._text.flush()
            self._on_end()

    def _stop(self, reason: str) -> None:
        """End it from here: the engine rolls the slot back to the last token taken."""
        if self._reason is None:
            self._ahead = None
            self._handle.cancel()
            self._end(reason)

    # ---- ending it

    def cancel(self) -> None:
        """End the generation at the engine's next step; returns at once. Any thread."""
        self._stop("cancelled")

    def close(self) -> None:
        """End the generation and wait until its slot is rolled back to the last token taken."""
        self._stop("cancelled")
        self._handle.cancel()
        self._handle.wait_settled()

    async def aclose(self) -> None:
        """As `close`, without blocking the event loop."""
        self._stop("cancelled")
        self._handle.cancel()
        await LoopWaker().wait(self._handle, self._handle.arm_settled)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def read(self) -> str:
        """Take every remaining token and return `text`."""
        for _ in self:
            pass
        return self.text

    # ---- the prompt

    @property
    def prompt_attention(self) -> "PromptAttention":
        """Rows of the prompt's tokens, with ``Capture(prompt=True)``; an iterator of PromptBlock.

        They come before the first token. Rows that are never taken stay in memory as long as the
        generation does.

        Raises:
            InvalidCapture: The generation does not capture its prompt.
        """
        if self._capture is None or not self._capture.prompt:
            raise InvalidCapture(
                "rows of the prompt are not captured; pass capture=Capture(..., prompt=True)"
            )
        return self.blocks()

    def blocks(self, *, first: int = 0, budget_bytes: int = 0) -> PromptAttention:
        """Rows of the prompt from position *first* on, for `Engine.attend`.

        Args:
            first: Position of the first row.
            budget_bytes: Most bytes that `PromptAttention.array` may copy to; 0 for no limit.
        """
        return PromptAttention(
            self,
            first,
            self._n_prompt,
            count_copied=self._handle.count_copied,
            budget_bytes=budget_bytes,
        )

    def next_block(self) -> PromptBlock | None:
        """The next rows of the prompt, None when there are no more; blocks until they are there."""
        while not self._blocks and self._ahead is None and not self._ids:
            received = self._take()
            if received is None:
                break
            self._keep(received)
        return self._blocks.popleft() if self._blocks else None

    async def anext_block(self) -> PromptBlock | None:
        """As `next_block`, without blocking the event loop."""
        while not self._blocks and self._ahead is None and not self._ids:
            received = await self._atake()
            if received is None:
                break
            self._keep(received)
        return self._blocks.popleft() if self._blocks else None

    # ---- what is known

    @property
    def request_id(self) -> str:
        """The id given to ``generate``, else one that the engine made."""
        return self._request_id

    @property
    def tokens(self) -> list[int]:
        """Ids handed out so far. Ids alone: Token objects would keep all their attention alive."""
        return list(self._ids)

    @property
    def text(self) -> str:
        """Text handed out so far, without the stop sequence that ended it.

        The texts of the tokens are never cut: joined they are the exact output.
        """
        return self._text.text_before_stop

    @property
    def stop_match(self) -> str | None:
        """The stop sequence that ended the generation, None where none did."""
        return self._text.stop_match

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, None while it runs.

        "stop": the model ended its text; "length": max_tokens or a full slot; "stop_token";
        "stop_sequence"; "cancelled", by an interrupt or the end of its task too; "error": iterating
        raised it.
        """
        return self._reason

    @property
    def usage(self) -> Usage:
        """Token counts and seconds; the engine's own figures once the generation is over."""
        end = self._handle.end
        if end is None:
            return Usage(prompt_tokens=self._n_prompt, completion_tokens=len(self._ids))
        return read_fields(Usage, end, completion_tokens=len(self._ids))

    @property
    def slot(self) -> int | None:
        """Index of the slot it works in, None while it waits for one."""
        slot = self._handle.slot
        return None if slot < 0 else slot

    def __repr__(self) -> str:
        return (
            f"Generation(request_id={self._request_id!r}, n_tokens={len(self._ids)}, "
            f"finish_reason={self._reason!r})"
        )


def count_copied(generation: Generation, n_bytes: int) -> None:
    """Add to `EngineStats.copied_bytes`: code of kqview copied attention out of a view."""
    generation._handle.count_copied(n_bytes)  # pyright: ignore[reportPrivateUsage]
