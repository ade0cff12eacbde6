"""Generation and PromptAttention: the tokens of one request, and the rows of its prompt.

A Generation takes Tokens and rows of its prompt from a source: `PlainSource`, or `SteeredSource`
where mods or callables steer. Rows of the prompt come before the first token, so iterating over one
of the two stores what it meets of the other. Both are taken synchronously or with ``async for``.

A generation has ended when the reason of its transcript is set.
"""

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Self, cast

import numpy as np

from kqview.coloured.rows import Rows
from kqview.errors import BusyError, InvalidCapture, OutOfMemory, RequestError
from kqview.generation.display import (
    HandedRows,
    generation_html,
    generation_rows,
    prompt_html,
    prompt_rows,
)
from kqview.generation.source import LoopWaker, PlainSource
from kqview.generation.steered import SteeredSource
from kqview.mods.failures import ModFailure
from kqview.option_names import OF_GENERATION, NamesAttributes
from kqview.trace import Trace
from kqview.types import ModelInfo, PromptBlock, Reply, Score, Token, Usage, forms
from kqview.types.forms import Array, Framework
from kqview.types.json_schema import Parsed, parsed
from kqview.types.stats import FinishReason
from kqview.types.token import AnyAttention, AnyPositions, Attention, Context, Positions


class Generation(NamesAttributes, Generic[Parsed]):
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

    _elsewhere = OF_GENERATION

    def __init__(
        self,
        source: PlainSource | SteeredSource,
        *,
        request_id: str,
        model: ModelInfo,
        fingerprint: Callable[[], str],
        schema: str | None = None,
    ) -> None:
        self._source = source
        self._transcript = source.transcript
        self._request_id = request_id
        self._model = model
        self._fingerprint = fingerprint
        self._schema = schema
        self._blocks: deque[PromptBlock] = deque()
        self._ahead: Token | None = None  # received while reading rows of the prompt
        self._is_awaited = False
        self._reply_of: Callable[[str], Reply] = Reply
        self._reply: tuple[str, Reply] | None = None  # with the text that it was made of
        source.begin(self)

    # ---- iteration

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        ahead, self._ahead = self._ahead, None
        while ahead is None:
            received = self._take()
            if received is None:
                raise StopIteration
            if isinstance(received, Token):
                return received
            self._blocks.append(received)
        return ahead

    def _take(self) -> Token | PromptBlock | None:
        """What comes next, None at the end; waits."""
        if self._is_awaited:
            raise self._busy()
        self._source.check_sync()
        try:
            return self._source.take()
        except BusyError:  # the caller may iterate again later
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        ahead, self._ahead = self._ahead, None
        while ahead is None:
            received = await self._atake()
            if received is None:
                raise StopAsyncIteration
            if isinstance(received, Token):
                return received
            self._blocks.append(received)
        return ahead

    async def _atake(self) -> Token | PromptBlock | None:
        """Like `_take`, without blocking the event loop."""
        if self._is_awaited:
            raise self._busy()
        self._is_awaited = True
        try:
            return await self._source.atake()
        except BusyError:
            raise
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._is_awaited = False

    def _busy(self) -> BusyError:
        return BusyError(
            f"a task already waits for the next token of {self._request_id}; iterate it once"
        )

    def _store(self, received: Token | PromptBlock) -> None:
        if isinstance(received, Token):
            self._ahead = received
        else:
            self._blocks.append(received)

    def _fail(self, error: BaseException) -> None:
        """End the generation because iterating raises *error*."""
        self._ahead = None
        self._source.stop("error" if isinstance(error, Exception) else "cancelled", error)

    # ---- ending

    def cancel(self) -> None:
        """End the generation at the engine's next step; returns at once. Any thread."""
        if self._transcript.reason is None:
            self._ahead = None
            self._source.stop("cancelled")

    def close(self) -> None:
        """End the generation and wait until its slot is rolled back to the last token taken."""
        self.cancel()
        self._source.handle.cancel()
        self._source.handle.wait_settled()

    async def aclose(self) -> None:
        """Like `close`, without blocking the event loop."""
        self.cancel()
        handle = self._source.handle
        handle.cancel()
        await LoopWaker().wait(handle, handle.arm_settled)

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
        return self._transcript.text.take_delta(is_over=self._transcript.reason is not None)

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
        capture = self._transcript.capture
        if capture is None or not capture.prompt:
            raise InvalidCapture(
                "the prompt is not captured; pass capture=Capture(..., prompt=True)"
            )
        return self.blocks()

    def blocks(
        self, *, first: int = 0, budget_bytes: int = 0, score: Score | None = None
    ) -> "PromptAttention":
        """Rows of the prompt from position *first* on, for `Engine.attend`.

        Args:
            first: Position of the first row.
            budget_bytes: Maximum size of the copy that `PromptAttention.array` makes; 0 for no
                limit.
            score: Takes the scores of its tokens, if the request asks for them.
        """
        source = self._source
        return PromptAttention(self, source, first, budget_bytes=budget_bytes, score=score)

    def take_blocks(self, score: Score | None) -> None:
        """Take all rows of the prompt, for `next_block` to return without waiting.

        Args:
            score: Takes the scores of its tokens, if the request asks for them.
        """
        while (received := self._take()) is not None:
            if score is not None and isinstance(received, PromptBlock) and received.scores:
                score.set(received.start, received.scores)
            else:
                self._store(received)

    def next_block(self) -> PromptBlock | None:
        """The next rows of the prompt, None if there are no more; blocks until they arrive."""
        while not self._blocks and self._ahead is None and not self._transcript.ids:
            received = self._take()
            if received is None:
                break
            self._store(received)
        return self._blocks.popleft() if self._blocks else None

    async def anext_block(self) -> PromptBlock | None:
        """Like `next_block`, without blocking the event loop."""
        while not self._blocks and self._ahead is None and not self._transcript.ids:
            received = await self._atake()
            if received is None:
                break
            self._store(received)
        return self._blocks.popleft() if self._blocks else None

    def peek_block(self, within_s: float) -> PromptBlock | None:
        """The first rows of the prompt, which stay to be taken; None if they are not here in time.

        Before anything was taken. An error is left to who takes them.
        """
        transcript = self._transcript
        is_begun = self._ahead is not None or transcript.ids or transcript.reason is not None
        if not self._blocks and not is_begun and not self._is_awaited:
            received = self._source.peek(within_s)
            if received is not None:
                self._store(received)
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
        return self._transcript.context.ids[: self._transcript.context.n_prompt]

    @property
    def tokens(self) -> list[int]:
        """Ids handed out so far; not Token objects, which would keep their attention in memory.

        With mods, without those that were taken back, and with all those that a step added.
        """
        ids = list(self._transcript.ids)
        if self._ahead is not None:  # received, and not handed out
            ids.pop()
        return ids

    @property
    def text(self) -> str:
        """Text handed out so far, up to the stop sequence if one was found.

        ``Token.text`` is never cut there: the texts of the tokens join to the exact output. For
        text to show while it comes, see `deltas`.
        """
        return self._transcript.text.text_before_stop

    @property
    def stop_match(self) -> str | None:
        """The stop sequence that ended the generation; None if none did."""
        return self._transcript.text.stop_match

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the generation ended; None while it runs.

        "stop": the model ended its text; "length": max_tokens is reached or the slot is full;
        "stop_token"; "stop_sequence"; "cancelled", also by an interrupt or the end of its task;
        "error": iterating raised the error. "tool_calls": a mod ended it with ToolCalls.
        """
        return cast("FinishReason | None", self._transcript.reason)

    @property
    def usage(self) -> Usage:
        """Token counts and seconds; the seconds are 0 until the generation has ended."""
        return self._source.usage

    @property
    def slot(self) -> int | None:
        """Index of the slot that the generation uses; None while it waits for one."""
        slot = self._source.handle.slot
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
        return parsed(self._schema, self.reply.content, self._transcript.reason)

    # ---- mods

    @property
    def mods(self) -> tuple[Any, ...]:
        """The mods of this request; for a `kqview.Mod`, the copy with the request's state."""
        return self._source.mods

    @property
    def trace(self) -> Trace | None:
        """What happened in each step; None without mods, unless ``trace=True`` was given.

        It grows while the request runs and is complete once `finish_reason` is set. It belongs to
        the caller and outlives the generation.
        """
        return self._source.trace

    @property
    def mod_errors(self) -> tuple[ModFailure, ...]:
        """The calls of mods that failed, in order; the first 100, the trace has all."""
        return self._source.mod_errors

    @property
    def tool_calls(self) -> Any:
        """The payload of a mod's ToolCalls, with finish reason "tool_calls"; otherwise None."""
        return self._source.tool_calls

    @property
    def n_removed(self) -> int:
        """Number of yielded tokens that mods took back since the last one was yielded.

        The next token has this number as ``Token.n_removed``. At the end of the generation, drop
        that many from the text received.
        """
        return self._transcript.n_removed

    def _repr_html_(self) -> str:
        """The text so far, coloured by attention, for a notebook.

        Choose a layer, a head and a token to see what it looked at. Displaying takes no token and
        waits for none: a generation that runs shows what was taken from it so far. It holds no
        attention either, so rows are shown of the tokens that you still have, such as
        ``tokens = list(generation)``; the last 8,192 at most. Of many rows, the display keeps what
        fits in 2 MiB and says what it leaves out.
        """
        one = self._transcript
        tokens = one.held_tokens()
        return generation_html(self._request_id, one.reason, one.context, one.capture, tokens)

    def __repr__(self) -> str:
        return (
            f"Generation(request_id={self._request_id!r}, n_tokens={len(self._transcript.ids)}, "
            f"finish_reason={self.finish_reason!r})"
        )


class _Whole(NamedTuple):
    rows: Attention | None
    positions: Positions | None
    hidden: Array | None


class PromptAttention:
    """Iterator and async iterator of PromptBlock, in order of position; also a context manager.

    The engine computes one block ahead. The rows of each block are a zero-copy view; if memory is
    short, drop a block to make room for the next ones.

    A notebook displays the prompt, coloured by the rows that you still have, or else by the first
    block, which stays to be taken.

    With hidden states, the arrays stay with this object: `array`, `top_k` and `hidden` may be read
    in any order and again. Without, what they return is the caller's alone.

    An exception raised by iterating, `array`, `top_k` or `hidden` ends the iteration, as with
    Generation.

    Attributes:
        start: Position of the first row's query.
        capture: What was captured, with its layers filled in.
        n_rows: Number of rows in all blocks together. A mod may still change it before the first.
        score: With ``attend(..., score=True)``, the log-probabilities of the tokens of which there
            are rows, but for the prompt's first; filled in as blocks are taken, so complete after
            `array`. Otherwise None.

    Raises (while iterating):
        PoolExhausted: The blocks still held fill the budget, and ``on_full`` does not allow
            continuing.
        ClosedError: The engine was closed.
        DecodeError: llama.cpp failed; the engine continues with other requests.
    """

    def __init__(
        self,
        generation: Generation[Any],
        source: PlainSource | SteeredSource,
        start: int,
        *,
        budget_bytes: int,
        score: Score | None,
    ) -> None:
        capture = source.transcript.capture
        assert capture is not None
        self.start = start
        self.capture = capture
        self.score = score
        self._generation = generation
        self._source = source
        self._budget_bytes = budget_bytes
        self._handed = HandedRows()
        self._kept: _Whole | None = None  # what was joined, with hidden states

    @property
    def context(self) -> Context:
        """What the tokens of the prompt are, and their texts."""
        return self._source.transcript.context

    @property
    def n_rows(self) -> int:
        return self.context.n_prompt - self.start

    @property
    def column_ids(self) -> list[int]:
        """The token id that each column stands for: the whole prompt."""
        context = self.context
        return context.ids[: context.n_prompt]

    @property
    def column_texts(self) -> list[str]:
        """The text of each of `column_ids`; bytes that are not UTF-8 on their own become U+FFFD."""
        return [self.context.text_of(i) for i in self.column_ids]

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layers that were captured, in the order of the rows."""
        return tuple(self.capture.layers or ())

    @property
    def heads(self) -> tuple[int, ...]:
        """The heads of each layer that were captured, in the order of the rows."""
        return self.context.heads_of(self.capture)

    def __repr__(self) -> str:
        """One line; takes no block."""
        facts = f"start={self.start}, n_rows={self.n_rows}, kind={self.capture.kind!r}"
        return f"PromptAttention({facts})"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PromptBlock:
        while (block := self._generation.next_block()) is not None:
            if self._is_taken(block):
                return block
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PromptBlock:
        while (block := await self._generation.anext_block()) is not None:
            if self._is_taken(block):
                return block
        raise StopAsyncIteration

    def _is_taken(self, block: PromptBlock) -> bool:
        """Whether *block* has rows; scores, which come behind the rows of their step, are kept."""
        if block.scores and self.score is not None:
            self.score.set(block.start, block.scores)
            return False
        self._handed.add(block.start, block.rows, block.positions)
        return True

    def array(self) -> AnyAttention:
        """The rows of all remaining blocks as one array.

        Returns:
            Shape ``(n_layers, n_heads, n_rows, n_context)`` in the dtype of the capture; the last
            row is that of the prompt's last token. See PromptBlock for reductions, ``top_k`` and
            layers that differ in heads. A view if one block holds all rows; otherwise a copy, which
            counts in `EngineStats.copied_bytes`.

        Raises:
            OutOfMemory: The array needs more than ``attention_budget_bytes``.
            InvalidCapture: A block was dropped because of ``on_full="drop"``, no block is left, or
                the capture has no layers, but hidden states alone.
        """
        if self._has_hidden and not self.layers:
            raise InvalidCapture(
                "the capture has hidden states alone; use hidden, or name layers in the Capture"
            )
        rows = self._whole(with_positions=False).rows
        assert rows is not None
        return rows

    def top_k(self) -> tuple[AnyAttention, AnyPositions]:
        """Like `array`, for ``Capture(top_k=k)``: the values and their int32 positions.

        Raises:
            InvalidCapture: The capture has no ``top_k``.
        """
        whole = self._whole(with_positions=True)
        if whole.positions is None:
            raise InvalidCapture("the capture has no top_k; pass Capture(top_k=k), or use array()")
        assert whole.rows is not None
        return whole.rows, whole.positions

    @property
    def hidden(self) -> Array:
        """Hidden states of all remaining blocks: the residual stream after each captured layer.

        With ``Capture(hidden=...)``. Shape ``(n_hidden_layers, n_rows, n_embd)`` in the dtype of
        the capture, read-only if one block holds all of it. Waits for the blocks, like `array`.

        Raises:
            OutOfMemory: The array needs more than ``attention_budget_bytes``.
            InvalidCapture: The capture has no ``hidden``. Also as for `array`.
        """
        if not self._has_hidden:
            raise InvalidCapture('the capture has no hidden states; pass Capture(hidden="all")')
        whole = self._whole(with_positions=False)
        assert whole.hidden is not None
        return whole.hidden

    @property
    def _has_hidden(self) -> bool:
        return len(self.capture.hidden) > 0

    def to_hf(self, framework: Framework = "np") -> tuple[Any, ...]:
        """The rows of all remaining blocks in the form of Hugging Face transformers.

        As `Token.to_hf`, with arrays of shape ``(1, n_heads, n_rows, n_context)``. Raises what that
        and `array` raise.
        """
        forms.check_framework(framework)
        forms.check_hf(self.capture)
        return forms.hf_form(self.array(), framework)

    def named(self, framework: Framework = "np") -> dict[str, Any]:
        """The rows of all remaining blocks under the names of TransformerLens' activation cache.

        As `Token.named`, with rows of shape ``(1, n_heads, n_rows, n_context)`` and hidden states
        of shape ``(1, n_rows, n_embd)``. Raises what that and `array` raise.
        """
        forms.check_framework(framework)
        named: dict[str, Any] = {}
        if self.layers or not self._has_hidden:
            name = forms.lens_name(self.capture)  # before a block is taken
            named |= forms.lens_form(self.layers, name, self.array(), framework)
        if self._has_hidden:
            layers = cast("Sequence[int]", self.capture.hidden)
            named |= forms.lens_form(layers, forms.RESIDUAL, self.hidden, framework)
        return named

    def _whole(self, *, with_positions: bool) -> _Whole:
        if self._kept is not None:
            return self._kept
        try:
            whole = self._joined(with_positions=with_positions or self._has_hidden)
        except BaseException:  # the blocks taken so far are lost
            self._generation.cancel()
            raise
        if self._has_hidden:
            self._kept = whole
        return whole

    def _joined(self, *, with_positions: bool) -> _Whole:
        first = next(self, None)
        if first is None:
            raise InvalidCapture(
                "every block was taken already, and array() takes all of them; keep its result, or "
                "call attend or generate again"
            )
        start = first.start
        n_rows = self.context.n_prompt - start
        if first.n_rows == n_rows:
            next(self, None)  # take the end, so that `usage` is final
            return _values_of(first)
        wholes: list[Any] = [None] * len(_Whole._fields)
        i_row, block = 0, first
        while block is not None:
            values = _values_of(block)
            if not with_positions:
                values = values._replace(positions=None)
            for i, part in enumerate(values):
                if part is not None:
                    wholes[i] = self._copied(wholes[i], part, i_row, n_rows)
            i_row += block.n_rows
            values = part = first = block = None  # free their memory for the next one
            block = next(self, None)
        whole = _Whole(*wholes)
        self._handed.add(start, whole.rows, whole.positions)
        return whole

    def _copied(self, whole: Any, part: Any, i_row: int, n_rows: int) -> Any:
        """*whole* with *part* copied to *i_row* of the *n_rows* of the second to last axis.

        A *whole* of None begins here. Both may be tuples, an array a layer.
        """
        if isinstance(part, tuple):
            parts = cast("tuple[Any, ...]", part)
            wholes = whole or [None] * len(parts)
            return tuple(
                self._copied(*one, i_row, n_rows) for one in zip(wholes, parts, strict=True)
            )
        if whole is None:
            shape = (*part.shape[:-2], n_rows, part.shape[-1])
            n_bytes = math.prod(shape) * part.itemsize
            if self._budget_bytes and n_bytes > self._budget_bytes:
                raise OutOfMemory(
                    f"the array needs {n_bytes} bytes, but attention_budget_bytes is "
                    f"{self._budget_bytes}; iterate the blocks, or capture fewer layers, heads "
                    "or rows (last=)"
                )
            whole = np.empty(shape, part.dtype)
        whole[..., i_row : i_row + part.shape[-2], :] = part
        self._source.handle.count_copied(part.nbytes)
        return whole

    @property
    def usage(self) -> Usage:
        """Token counts and seconds; ``prefill_s`` is the time for all blocks."""
        return self._source.usage

    def _repr_html_(self) -> str:
        """The prompt, coloured by attention, for a notebook.

        Choose a layer, a head and a token to see what it looked at. Displaying takes no block: it
        shows the rows that you still have, such as ``rows = attention.array()``; before anything
        was taken the first block, for which it waits two seconds at most. Of many rows, the display
        keeps what fits in 2 MiB and says what it leaves out.
        """
        context, peek = self.context, self._generation.peek_block
        return prompt_html(context, self.capture, self.n_rows, self._handed, peek)

    def close(self) -> None:
        """Stop computing; views stay valid."""
        self._generation.close()

    async def aclose(self) -> None:
        """Like `close`, without blocking the event loop."""
        await self._generation.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _values_of(block: PromptBlock) -> _Whole:
    if block.rows is None and block.hidden is None:
        raise InvalidCapture(f"on_full='drop' dropped the rows from {block.start} on; use 'wait'")
    return _Whole(block.rows, block.positions, block.hidden)


def count_copied(generation: Generation, n_bytes: int) -> None:
    """Add to `EngineStats.copied_bytes`; for code of kqview that copies attention out of a view."""
    generation._source.handle.count_copied(n_bytes)  # pyright: ignore[reportPrivateUsage]


def is_parked(generation: Generation) -> bool:
    """Whether it gave its slot up because nobody takes its tokens."""
    return generation._source.handle.is_parked  # pyright: ignore[reportPrivateUsage]


def rows_of_generation(generation: Generation) -> tuple[Rows, list[str]]:
    """Take the tokens that are left; the rows of all that something holds, and notes about others.

    For code of kqview that draws them.
    """
    transcript = generation._transcript  # pyright: ignore[reportPrivateUsage]
    held = transcript.held_tokens()
    held += generation  # else they would be gone before they are drawn
    return generation_rows(transcript.context, transcript.capture, transcript.held_tokens())


def rows_of_prompt(attention: PromptAttention) -> Rows:
    """The rows that something holds; if there are none, take all blocks. For code of kqview.

    Raises:
        InvalidCapture: Every block was taken already, and nothing holds its rows. Also as for
            `PromptAttention.array`.
        OutOfMemory: As for `PromptAttention.array`.
    """
    context, capture = attention.context, attention.capture
    parts = list(attention._handed.held())  # pyright: ignore[reportPrivateUsage]
    if parts:
        return prompt_rows(context, capture, parts)
    rows, positions = attention.top_k() if capture.top_k is not None else (attention.array(), None)
    return prompt_rows(context, capture, [(attention.start, rows, positions)])
