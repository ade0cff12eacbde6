"""Generation: the tokens of one request, taken synchronously or with ``async for``.

Both ways share `_receive`, which turns an event of the core into a Token or into rows of the
prompt; they differ in how they wait. Rows of the prompt come before the first token, so iterating
over one of the two stores what it meets of the other. The synchronous wait is in C++ (without the
GIL, interrupted by signals). The asynchronous wait and the handling of waits for a slot are in
`waiting.py`.

A generation has ended when `_reason` is set, which only `_end` does.
"""

import asyncio
import contextlib
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Final, Generic, Self, TypedDict, cast

from kqview import _core
from kqview.coloured.rows import Rows
from kqview.errors import BusyError, InvalidCapture, KqviewError, RequestError
from kqview.generation.display import N_REMEMBERED, generation_html, generation_rows
from kqview.generation.prompt import PromptAttention
from kqview.generation.text import TextStream
from kqview.generation.waiting import HANDOVER_S, LoopWaker, SlotWait, Taker, Turns
from kqview.mods.failures import ModFailure
from kqview.option_names import NamesResults
from kqview.trace import Trace
from kqview.types import Capture, ModelInfo, PromptBlock, Reply, Token, Usage
from kqview.types.json_schema import Parsed, parsed
from kqview.types.stats import FinishReason, read_fields
from kqview.types.token import Context

_Event = _core.TokenEvent | _core.PromptEvent | _core.ForwardEvent | _core.EndEvent

# How long a coroutine may take tokens without a wait before it yields to its event loop.
_TURN_S: Final = 0.002


class GenerationFacts(TypedDict):
    """The keyword arguments of Generation."""

    request_id: str
    context: Context
    model: ModelInfo
    fingerprint: Callable[[], str]
    n_keep: int
    capture: Capture | None
    stop: Sequence[str]
    schema: str | None
    token_bytes: Callable[[int], bytes]
    waker: Callable[[], LoopWaker]
    on_end: Callable[[], None]
    turns: Turns


class Generation(NamesResults, Generic[Parsed]):
    """Iterator and async iterator of Token; also a context manager that closes it.

    It is its own iterator: a second loop continues where the first one stopped. Dropping it cancels
    the request. A notebook displays its text so far, coloured by the attention of the tokens that
    you still have; displaying takes no token and waits for none.

    Any exception raised by iterating ends the generation, as with an async generator: the errors
    below, but also KeyboardInterrupt, and the CancelledError of a task that was cancelled or hit
    ``asyncio.timeout``. The slot is then free, even while a stored exception
    (``gather(..., return_exceptions=True)``, a future, a notebook's traceback) keeps the generation
    itself alive. BusyError is the only exception that does not end it. To limit the wait for a
    token and continue afterwards, keep the task: ``await asyncio.wait({task}, timeout=1)``. An
    exception in the body of the loop does not reach the generation: use ``with`` to end it in that
    case.

    Raises (while iterating):
        PoolExhausted: The attention still held fills the budget, and ``on_full`` does not allow
            continuing; tokens and views handed out so far stay valid.
        BusyError: Another thread or task is iterating at this moment; or the generation waits for
            a slot, which others keep until their tokens are taken: at once if only the caller can
            do that, else when nobody has done it for 10 s. Iterate again when that has changed.
        ClosedError: The engine was closed.
        DecodeError: llama.cpp failed; the engine continues with other requests.
        EmittedError: A mod refused the request.
        ModFailed: A mod failed that the request needs.
    """

    def __init__(
        self,
        handle: _core.Generation | None,
        *,
        request_id: str,
        context: Context,
        model: ModelInfo,
        fingerprint: Callable[[], str],
        n_keep: int,
        capture: Capture | None,
        stop: Sequence[str],
        schema: str | None,
        token_bytes: Callable[[int], bytes],
        waker: Callable[[], LoopWaker],
        on_end: Callable[[], None],
        turns: Turns,
    ) -> None:
        self._request_id = request_id
        self._context = context
        self._model = model
        self._fingerprint = fingerprint
        self._n_keep = n_keep
        self._capture = capture
        self._token_bytes = token_bytes
        self._waker = waker
        self._on_end = on_end
        self._turns = turns
        self._taker = Taker(request_id)
        self._text = TextStream(stop)
        self._ids: list[int] = []
        # For displays, which show the attention that the caller still has.
        self._handed: deque[weakref.ref[Token]] = deque(maxlen=N_REMEMBERED)
        self._blocks: deque[PromptBlock] = deque()
        self._ahead: Token | None = None  # received while reading rows of the prompt
        self._reason: str | None = None
        self._is_awaited = False
        self._turn_ends = 0.0
        self._schema = schema
        self._reply_of: Callable[[str], Reply] = Reply
        self._reply: tuple[str, Reply] | None = None  # with the text that it was made of
        if handle is not None:
            self._adopt(handle)

    def _adopt(self, handle: _core.Generation) -> None:
        """Take the events of *handle* from here on."""
        self._handle = handle
        self._turns.add(handle.id, self, self._taker)

    # ---- iteration

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        ahead, self._ahead = self._ahead, None
        while ahead is None:
            received = self._take()
            if received is None:
                raise StopIteration
            ahead = self._token_of(received)
        return ahead

    def _take(self) -> Token | PromptBlock | None:
        """The next event of the core as a value, None at the end; waits."""
        if self._reason is not None:
            return None
        self._check_alone()
        try:
            event = self._handle.next()
            if isinstance(event, _core.WaitEvent):
                event = self._wait_turn(event)
            self._taker.note()
            return self._receive(event)
        except BusyError:  # the caller may iterate again later
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def _token_of(self, received: Token | PromptBlock) -> Token | None:
        """*received* if it is a token; rows of the prompt are stored."""
        if isinstance(received, Token):
            return received
        self._blocks.append(received)
        return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        ahead, self._ahead = self._ahead, None
        while ahead is None:
            received = await self._atake()
            if received is None:
                raise StopAsyncIteration
            ahead = self._token_of(received)
        return ahead

    async def _atake(self) -> Token | PromptBlock | None:
        """Like `_take`, without blocking the event loop."""
        self._check_alone()
        self._is_awaited = True
        try:
            return await self._atake_alone()
        except BusyError:
            raise
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._is_awaited = False

    async def _atake_alone(self) -> Token | PromptBlock | None:
        event = await self._anext_event()
        return None if event is None else self._receive(event)

    async def _anext_event(self) -> _Event | None:
        """The next event of the core, without blocking the event loop; None at the end."""
        if time.monotonic() > self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = time.monotonic() + _TURN_S
        has_waited, wait = False, None
        while self._reason is None:
            event = self._handle.try_next(has_waited)
            if isinstance(event, _core.WaitEvent):
                if event.holders:
                    self._turns.check_task(event.holders, self._request_id, asyncio.current_task())
                    wait = wait or SlotWait(self._turns, self._taker)
                    wait.note(event.holders)
                limit_s = wait.left_s if wait else None
                # When the time is over, the core is asked anew who keeps the slots.
                has_waited = await self._waker().wait_for(self._handle, self._handle.arm, limit_s)
                continue
            if has_waited:
                self._turn_ends = time.monotonic() + _TURN_S
            self._taker.note(asyncio.current_task())
            return event
        return None

    def _check_alone(self) -> None:
        if self._is_awaited:
            raise BusyError(
                f"a task already waits for the next token of {self._request_id}; iterate it once"
            )

    def _wait_turn(self, waits: _core.WaitEvent) -> _Event:
        """Wait for the next event while generations that cannot be parked hold every slot."""
        wait = SlotWait(self._turns, self._taker)
        holders: list[int] = []
        while True:
            holders = waits.holders or holders
            is_late = not waits.holders and self.slot is None
            is_ours = self._turns.is_of_thread(holders, self._request_id, is_late=is_late)
            if waits.holders:
                wait.note(waits.holders)
            left_s = wait.left_s
            if left_s is None:  # the core is asked anew who keeps the slots
                event = self._handle.next()
            else:
                event = self._handle.next(min(left_s, HANDOVER_S) if is_ours else left_s, True)
            if not isinstance(event, _core.WaitEvent):
                return event
            waits = event

    def _receive(self, event: _Event) -> Token | PromptBlock | None:
        if isinstance(event, _core.TokenEvent):
            return self._to_token(event)
        if isinstance(event, _core.PromptEvent):
            embedding = event.embedding
            return PromptBlock(
                event.start, event.n_rows, event.attention, event.positions,
                event.hidden if embedding is None else embedding, event.scores,
            )  # fmt: skip
        assert isinstance(event, _core.EndEvent)  # nothing steers it
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
            token.logits = event.logits
        if event.n_discarded:
            token.discarded = range(self._n_keep, self._n_keep + event.n_discarded)
        self._place(token)
        self._taker.has_taken = True
        end = event.end
        if self._text.stop_match is not None:
            self._stop("stop_sequence")
        elif end is not None:
            token.text += self._text.flush()
            self._end(end.finish_reason)
        return token

    def _place(self, token: Token) -> None:
        """Append *token* to the ids, and tell it which tokens are before it."""
        context = self._context
        token._context, token._n_before = context, len(context.ids)  # pyright: ignore[reportPrivateUsage]
        context.ids.append(token.id)
        self._ids.append(token.id)
        if self._capture is not None:
            self._handed.append(weakref.ref(token))

    def _end(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
            self._text.flush()
            self._on_end()

    def _stop(self, reason: str) -> None:
        """End the generation; the engine rolls the slot back to the last token taken."""
        if self._reason is None:
            self._ahead = None
            self._handle.cancel()
            self._end(reason)

    def _fail(self, error: BaseException) -> None:
        """End the generation because iterating raises *error*."""
        self._stop("error" if isinstance(error, Exception) else "cancelled")

    # ---- ending

    def cancel(self) -> None:
        """End the generation at the engine's next step; returns at once. Any thread."""
        self._stop("cancelled")

    def close(self) -> None:
        """End the generation and wait until its slot is rolled back to the last token taken."""
        self._stop("cancelled")
        self._handle.cancel()
        self._handle.wait_settled()

    async def aclose(self) -> None:
        """Like `close`, without blocking the event loop."""
        self._stop("cancelled")
        self._handle.cancel()
        await LoopWaker().wait(self._handle, self._handle.arm_settled)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def read(self) -> str:
        """Take all remaining tokens and return `text`."""
        for _ in self:
            pass
        return self.text

    async def aread(self) -> str:
        """Like `read`, without blocking the event loop."""
        async for _ in self:
            pass
        return self.text

    def deltas(self) -> Iterator[str]:
        """Iterate, yielding text that is safe to show instead of tokens.

        Whole characters, never a stop string nor text that may become part of one. They join to
        `text`, also those of several calls: each goes on behind the last delta, and text of tokens
        that you take in between is in the next one. Of a chat, that is the text as the model writes
        it, with reasoning and calls; `reply` takes it apart.

        A mod may take text back after it was yielded. Then the deltas go on with the text in its
        place; to follow such changes take tokens, see ``Token.n_removed``.
        """
        while next(self, None) is not None:  # the token is not kept: its attention holds memory
            if delta := self.take_delta():
                yield delta
        if rest := self.take_delta():
            yield rest

    async def adeltas(self) -> AsyncIterator[str]:
        """Like `deltas`, without blocking the event loop."""
        while await anext(self, None) is not None:
            if delta := self.take_delta():
                yield delta
        if rest := self.take_delta():
            yield rest

    def take_delta(self) -> str:
        """The text for the next delta, often "", of what was taken so far; takes no token.

        For a loop over tokens that also shows their text. Call it once more at the end: only then
        is text safe that looks like the beginning of a stop string.
        """
        return self._text.take_delta(is_over=self._reason is not None)

    def __reduce__(self) -> Any:
        """Refused: a generation runs in its engine.

        Raises:
            RequestError: Always.
        """
        raise RequestError(
            f"generation {self._request_id} cannot be copied or pickled; keep its text, tokens and "
            "arrays, or write them with kqview.save"
        )

    # ---- the prompt

    @property
    def prompt_attention(self) -> "PromptAttention":
        """Rows of the prompt's tokens, with ``Capture(prompt=True)``; an iterator of PromptBlock.

        They come before the first token. Each access gives a new iterator over the blocks that were
        not taken yet: keep it to read both its `array` and its `hidden`. Rows that are not taken
        stay in memory for as long as the generation does.

        Raises:
            InvalidCapture: The generation does not capture the rows of its prompt.
        """
        if self._capture is None or not self._capture.prompt:
            raise InvalidCapture(
                "the prompt is not captured; pass capture=Capture(..., prompt=True)"
            )
        return self.blocks()

    def blocks(self, *, first: int = 0, budget_bytes: int = 0) -> PromptAttention:
        """Rows of the prompt from position *first* on, for `Engine.attend`.

        Args:
            first: Position of the first row.
            budget_bytes: Maximum size of the copy that `PromptAttention.array` makes; 0 for no
                limit.
        """
        return PromptAttention(
            self,
            first,
            lambda: self._context,
            self._capture,
            count_copied=lambda n_bytes: self._handle.count_copied(n_bytes),
            budget_bytes=budget_bytes,
        )

    def take_blocks(self) -> None:
        """Take all rows of the prompt, for `next_block` to return without waiting."""
        while (received := self._take()) is not None:
            self._ahead = self._token_of(received)

    def next_block(self) -> PromptBlock | None:
        """The next rows of the prompt, None if there are no more; blocks until they arrive."""
        while not self._blocks and self._ahead is None and not self._ids:
            received = self._take()
            if received is None:
                break
            self._ahead = self._token_of(received)
        return self._blocks.popleft() if self._blocks else None

    async def anext_block(self) -> PromptBlock | None:
        """Like `next_block`, without blocking the event loop."""
        while not self._blocks and self._ahead is None and not self._ids:
            received = await self._atake()
            if received is None:
                break
            self._ahead = self._token_of(received)
        return self._blocks.popleft() if self._blocks else None

    def peek_block(self, within_s: float) -> PromptBlock | None:
        """The first rows of the prompt, which stay to be taken; None if they are not here in time.

        Before anything was taken. An error is left to who takes them.
        """
        is_begun = self._ahead is not None or self._ids or self._reason is not None
        if not self._blocks and not is_begun and not self._is_awaited:
            with contextlib.suppress(KqviewError):
                event = self._handle.next(within_s)
                if isinstance(event, _core.PromptEvent | _core.TokenEvent):
                    received = self._receive(event)
                    self._ahead = None if received is None else self._token_of(received)
        return self._blocks[0] if self._blocks else None

    # ---- facts

    @property
    def request_id(self) -> str:
        """The id passed to ``generate``, or else one that the engine made."""
        return self._request_id

    @property
    def model(self) -> ModelInfo:
        """Facts about the model."""
        return self._model

    def fingerprint(self) -> str:
        """Fingerprint of every byte of the model's files, read once per process.

        Raises:
            StateError: A file of the model changed after the engine was opened.
            OSError: A file cannot be read.
        """
        return self._fingerprint()

    @property
    def prompt_ids(self) -> list[int]:
        """Ids of the prompt, including the special tokens that a text was given.

        Mods may change it until the first token.
        """
        return self._context.ids[: self._context.n_prompt]

    @property
    def tokens(self) -> list[int]:
        """Ids handed out so far; not Token objects, which would keep their attention in memory.

        With mods, without those that were taken back, and with all those that a step added.
        """
        return list(self._ids)

    @property
    def text(self) -> str:
        """Text handed out so far, up to the stop sequence if one was found.

        ``Token.text`` is never cut there: the texts of the tokens join to the exact output. For
        text to show while it comes, see `deltas`.
        """
        return self._text.text_before_stop

    @property
    def stop_match(self) -> str | None:
        """The stop sequence that ended the generation; None if none did."""
        return self._text.stop_match

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the generation ended; None while it runs.

        "stop": the model ended its text; "length": max_tokens is reached or the slot is full;
        "stop_token"; "stop_sequence"; "cancelled", also by an interrupt or the end of its task;
        "error": iterating raised the error. "tool_calls": a mod ended it with ToolCalls.
        """
        return cast("FinishReason | None", self._reason)

    @property
    def usage(self) -> Usage:
        """Token counts and seconds; the seconds are 0 until the generation has ended."""
        end = self._handle.end
        if end is None:
            return Usage(
                prompt_tokens=self._context.n_prompt,
                completion_tokens=len(self._ids),
                cached_tokens=self._handle.n_cached,
            )
        return read_fields(Usage, end, completion_tokens=len(self._ids))

    @property
    def slot(self) -> int | None:
        """Index of the slot that the generation uses; None while it waits for one."""
        slot = self._handle.slot
        return None if slot < 0 else slot

    # ---- answers

    def read_reply_with(self, read: Callable[[str], Reply], schema: str | None) -> None:
        """Set how `reply` takes the text apart, and the JSON schema of its content; for `chat`."""
        self._reply_of, self._schema = read, schema

    @property
    def reply(self) -> Reply:
        """The text so far as the reply of a chat: content, tool calls with ids, and reasoning.

        ``reply.to_message()`` is the message for the next `Engine.chat`. A call whose arguments
        were cut off is not among its calls. Without `Engine.chat` all of the text is content.
        """
        text = self.text
        if self._reply is None or self._reply[0] != text:
            self._reply = text, self._reply_of(text)
        return self._reply[1]

    @property
    def schema(self) -> str | None:
        """Text of the ``json_schema`` that the answer follows, None without one."""
        return self._schema

    @property
    def parsed(self) -> Parsed:
        """The value that ``json_schema`` describes, once the generation has ended.

        An object of the type if ``json_schema`` is one, such as a pydantic model, else what
        ``json.loads`` makes of the text.

        Raises:
            RequestError: There is no ``json_schema``, the generation has not ended, or the text
                ended before its JSON did, such as at ``max_tokens``.
            ValueError: A check of the type that no schema expresses fails, for a pydantic model as
                its ValidationError.
        """
        return parsed(self._schema, self.reply.content, self._reason)

    # ---- mods; see SteeredGeneration

    @property
    def mods(self) -> tuple[Any, ...]:
        """The mods of this request; for a `kqview.Mod`, the copy with the request's state."""
        return ()

    @property
    def trace(self) -> Trace | None:
        """What happened in each step; None without mods, unless ``trace=True`` was given.

        It grows while the request runs and is complete once `finish_reason` is set. It belongs to
        the caller and outlives the generation.
        """
        return None

    @property
    def mod_errors(self) -> tuple[ModFailure, ...]:
        """The calls of mods that failed, in order; the first 100, the trace has all."""
        return ()

    @property
    def tool_calls(self) -> Any:
        """The payload of a mod's ToolCalls, with finish reason "tool_calls"; otherwise None."""
        return None

    @property
    def n_removed(self) -> int:
        """Number of yielded tokens that mods took back since the last one was yielded.

        The next token has this number as ``Token.n_removed``. At the end of the generation, drop
        that many from the text received.
        """
        return 0

    def _held_tokens(self) -> list[Token]:
        """The tokens with attention that were handed out and that something still holds."""
        found = [token for one in self._handed.copy() if (token := one()) is not None]
        # One that mods took back has the index of another one, or none.
        last = {token.index: token for token in found if token.attention is not None}
        ids = self._ids
        return [last[i] for i in sorted(last) if i < len(ids) and last[i].id == ids[i]]

    def _repr_html_(self) -> str:
        """The text so far, coloured by attention, for a notebook.

        Choose a layer, a head and a token to see what it looked at. Displaying takes no token and
        waits for none: a generation that runs shows what was taken from it so far. It holds no
        attention either, so rows are shown of the tokens that you still have, such as
        ``tokens = list(generation)``; the last 8,192 at most. Of many rows, the display keeps what
        fits in 2 MiB and says what it leaves out.
        """
        tokens = self._held_tokens()
        return generation_html(self._request_id, self._reason, self._context, self._capture, tokens)

    def __repr__(self) -> str:
        return (
            f"Generation(request_id={self._request_id!r}, n_tokens={len(self._ids)}, "
            f"finish_reason={self._reason!r})"
        )


def count_copied(generation: Generation, n_bytes: int) -> None:
    """Add to `EngineStats.copied_bytes`; for code of kqview that copies attention out of a view."""
    generation._handle.count_copied(n_bytes)  # pyright: ignore[reportPrivateUsage]


def is_parked(generation: Generation) -> bool:
    """Whether it gave its slot up because nobody takes its tokens."""
    return generation._handle.is_parked  # pyright: ignore[reportPrivateUsage]


def all_rows(generation: Generation) -> tuple[Rows, list[str]]:
    """Take the tokens that are left; the rows of all that something holds, and notes about others.

    For code of kqview that draws them.
    """
    held = generation._held_tokens()  # pyright: ignore[reportPrivateUsage]
    held += generation  # else they would be gone before they are drawn
    tokens = generation._held_tokens()  # pyright: ignore[reportPrivateUsage]
    context, capture = generation._context, generation._capture  # pyright: ignore[reportPrivateUsage]
    return generation_rows(context, capture, tokens)
