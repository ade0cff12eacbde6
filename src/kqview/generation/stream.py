"""Generation: the tokens of one request, taken synchronously or with ``async for``.

Both ways share `_receive`, which turns what the core hands over into a Token or into rows of the
prompt; they differ in how they wait. Rows of the prompt come before the first token: who iterates
one of the two keeps what he meets of the other. The synchronous wait is in C++ (no GIL, ends on
signals), the asynchronous one in `astream.py`.

Before a generation has a slot, waiting may never end: `turns.py`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import EllipsisType, TracebackType
from typing import Any, Final, Self

from kqview import _core
from kqview.errors import BusyError, InvalidCapture
from kqview.generation.astream import LoopWaker
from kqview.generation.prompt import PromptAttention
from kqview.generation.text import TextStream
from kqview.generation.turns import HANDOVER_S, Taker, Turns
from kqview.types import Capture, PromptBlock, Token, Usage

_TokenItem = tuple[int, float | None, list[tuple[int, float]] | None, Any, bool, int]
_Item = _TokenItem | tuple[int, int, Any]

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
        stop: tuple[str, ...],
        token_bytes: Callable[[int], bytes],
        waker: Callable[[], LoopWaker],
        on_end: Callable[[], None],
        turns: Turns,
        count_copied: Callable[[int], None],
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
        self.count_copied = count_copied
        self._text = TextStream(stop)
        self._ids: list[int] = []
        self._blocks: deque[PromptBlock] = deque()
        self._ahead: Token | None = None  # met while rows of the prompt were asked for
        self._reason: str | None = None
        self._is_stopped = False  # by us: the engine still has to roll its slot back
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
            item = self._handle.next()
            if isinstance(item, EllipsisType | list):
                item = self._wait_turn(item)
            self._taker.note()
            return self._receive(item)
        except BusyError:  # it goes on when that is over
            raise
        except BaseException as error:
            self._end_with(error)
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
            self._end_with(error)
            raise
        finally:
            self._is_awaited = False

    async def _atake_alone(self) -> Token | PromptBlock | None:
        if time.monotonic() > self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = time.monotonic() + _TURN_S
        has_waited = False
        while self._reason is None:
            item = self._handle.try_next(has_waited)
            if isinstance(item, EllipsisType | list):
                if isinstance(item, list):
                    self._turns.check_task(item, self._request_id, asyncio.current_task())
                has_waited = True
                await self._waker().wait(self._handle, self._handle.arm)
                continue
            if has_waited:
                self._turn_ends = time.monotonic() + _TURN_S
            self._taker.note(asyncio.current_task())
            return self._receive(item)
        return None

    def _check_alone(self) -> None:
        if self._is_awaited:
            raise BusyError(
                f"generation.next: a task waits for the next token of {self._request_id}; "
                "iterate it once"
            )

    def _wait_turn(self, answer: list[int] | EllipsisType) -> _Item | None:
        """Wait for the first item while the requests in *answer*, who wait too, have every slot."""
        holders: list[int] = []
        while True:
            if isinstance(answer, list):
                holders = answer
            is_late = answer is ... and self.slot is None
            is_ours = self._turns.is_of_thread(holders, self._request_id, is_late=is_late)
            item = self._handle.next(HANDOVER_S if is_ours else None, True)
            if not isinstance(item, EllipsisType | list):
                return item
            answer = item

    def _receive(self, item: _Item | None) -> Token | PromptBlock | None:
        if item is None:
            self._finish()
            return None
        if len(item) == 3:
            start, n_rows, rows = item
            attention, positions, hidden = rows or (None, None, None)
            return PromptBlock(start, n_rows, attention, positions, hidden)
        token_id, logprob, top, rows, is_last, n_discarded = item
        attention, positions, hidden = rows or (None, None, None)
        text = self._text.feed(self._token_bytes(token_id))
        token = Token(
            token_id, text, len(self._ids), logprob, top, attention, positions, hidden,
            capture=self._capture, discarded=range(self._n_keep, self._n_keep + n_discarded),
        )  # fmt: skip
        self._ids.append(token_id)
        self._taker.has_taken = True
        if self._text.stop_match is not None:
            self._stop("stop_sequence")
        elif is_last:
            token.text += self._text.flush()
            self._finish()
        return token

    def _finish(self) -> None:
        """The engine is done with the request: takes over its reason."""
        if self._reason is None:
            self._handle.peek_end()
            end = self._handle.end
            self._reason = end[0] if end else "error"
            self._text.flush()
            self._on_end()

    def _end_with(self, error: BaseException) -> None:
        """Iterating raises *error*: the end, whether the engine found it or it came from here."""
        end = self._handle.end
        if end is not None and end[0] == "error":
            self._finish()
        else:
            self._stop("error" if isinstance(error, Exception) else "cancelled")

    def _stop(self, reason: str) -> None:
        """We are done with the request: the engine rolls the slot back to the last token taken."""
        if self._reason is None:
            self._reason = reason
            self._is_stopped = True
            self._text.flush()
            self._ahead = None
            self._handle.cancel()
            self._on_end()

    # ---- ending it

    def cancel(self) -> None:
        """End the generation at the engine's next step; returns at once. Any thread."""
        self._stop("cancelled")

    def close(self) -> None:
        """End the generation and wait until its slot is rolled back to the last token taken."""
        self._stop("cancelled")
        if self._is_stopped:
            self._handle.wait_settled()

    async def aclose(self) -> None:
        """As `close`, without blocking the event loop."""
        self._stop("cancelled")
        if self._is_stopped:
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
                "generation.prompt_attention: rows of the prompt are not captured; "
                "pass capture=Capture(..., prompt=True)"
            )
        return PromptAttention(self, 0, self._n_prompt)

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
        self._handle.peek_end()
        end = self._handle.end
        if end is None:
            return Usage(prompt_tokens=self._n_prompt, completion_tokens=len(self._ids))
        _, prompt_tokens, cached_tokens, _, prefill_s, decode_s = end
        return Usage(prompt_tokens, cached_tokens, len(self._ids), prefill_s, decode_s)

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
