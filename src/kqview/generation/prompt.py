"""PromptAttention: attention rows and hidden states of a prompt, in blocks or as one array."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self, cast

import numpy as np

from kqview.coloured.rows import Rows
from kqview.errors import InvalidCapture, OutOfMemory
from kqview.generation.display import HandedRows, prompt_html, prompt_rows
from kqview.types import Capture, PromptBlock, Score, Usage, forms
from kqview.types.forms import Array, Framework
from kqview.types.token import AnyAttention, AnyPositions, Attention, Context, Positions


class BlockSource(Protocol):
    """The source of the blocks: a Generation."""

    def next_block(self) -> PromptBlock | None: ...
    async def anext_block(self) -> PromptBlock | None: ...
    def peek_block(self, within_s: float) -> PromptBlock | None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...
    async def aclose(self) -> None: ...
    @property
    def usage(self) -> Usage: ...


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
        source: BlockSource,
        start: int,
        context: Callable[[], Context],
        capture: Capture,
        *,
        count_copied: Callable[[int], None],
        budget_bytes: int = 0,
        score: Score | None = None,
    ) -> None:
        self.score = score
        self._source = source
        self._count_copied = count_copied
        self.start = start
        self._context = context
        self.capture = capture
        self._budget_bytes = budget_bytes
        self._handed = HandedRows()
        self._kept: _Whole | None = None  # what was joined, with hidden states

    @property
    def n_rows(self) -> int:
        return self._context().n_prompt - self.start

    @property
    def column_ids(self) -> list[int]:
        """The token id that each column stands for: the whole prompt."""
        context = self._context()
        return context.ids[: context.n_prompt]

    @property
    def column_texts(self) -> list[str]:
        """The text of each of `column_ids`; bytes that are not UTF-8 on their own become U+FFFD."""
        return [self._context().text_of(i) for i in self.column_ids]

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layers that were captured, in the order of the rows."""
        return tuple(self.capture.layers or ())

    @property
    def heads(self) -> tuple[int, ...]:
        """The heads of each layer that were captured, in the order of the rows."""
        return self._context().heads_of(self.capture)

    def __repr__(self) -> str:
        """One line; takes no block."""
        facts = f"start={self.start}, n_rows={self.n_rows}, kind={self.capture.kind!r}"
        return f"PromptAttention({facts})"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PromptBlock:
        while (block := self._source.next_block()) is not None:
            if self._is_taken(block):
                return block
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PromptBlock:
        while (block := await self._source.anext_block()) is not None:
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
            Shape ``(n_layers, n_heads, n_rows, n_context)`` in the dtype of the capture; see
            PromptBlock for reductions, ``top_k`` and layers that differ in heads. A view if one
            block holds all rows; otherwise a copy, which counts in `EngineStats.copied_bytes`.

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
            self._source.cancel()
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
        if first.n_rows == self.n_rows:
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
                    wholes[i] = self._copied(wholes[i], part, i_row)
            i_row += block.n_rows
            values = part = first = block = None  # free their memory for the next one
            block = next(self, None)
        whole = _Whole(*wholes)
        self._handed.add(self.start, whole.rows, whole.positions)
        return whole

    def _copied(self, whole: Any, part: Any, i_row: int) -> Any:
        """*whole* with *part* copied to *i_row* of the axis of rows, the second to last.

        A *whole* of None begins here. Both may be tuples, an array a layer.
        """
        if isinstance(part, tuple):
            parts = cast("tuple[Any, ...]", part)
            wholes = whole or [None] * len(parts)
            return tuple(map(self._copied, wholes, parts, [i_row] * len(parts)))
        if whole is None:
            shape = (*part.shape[:-2], self.n_rows, part.shape[-1])
            n_bytes = math.prod(shape) * part.itemsize
            if self._budget_bytes and n_bytes > self._budget_bytes:
                raise OutOfMemory(
                    f"the array needs {n_bytes} bytes, but attention_budget_bytes is "
                    f"{self._budget_bytes}; iterate the blocks, or capture fewer layers, heads "
                    "or rows (last=)"
                )
            whole = np.empty(shape, part.dtype)
        whole[..., i_row : i_row + part.shape[-2], :] = part
        self._count_copied(part.nbytes)
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
        context, peek = self._context(), self._source.peek_block
        return prompt_html(context, self.capture, self.n_rows, self._handed, peek)

    def close(self) -> None:
        """Stop computing; views stay valid."""
        self._source.close()

    async def aclose(self) -> None:
        """Like `close`, without blocking the event loop."""
        await self._source.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _values_of(block: PromptBlock) -> _Whole:
    if block.rows is None and block.hidden is None:
        raise InvalidCapture(f"on_full='drop' dropped the rows from {block.start} on; use 'wait'")
    return _Whole(block.rows, block.positions, block.hidden)


def all_rows(attention: PromptAttention) -> Rows:
    """The rows that something holds; if there are none, take all blocks. For code of kqview.

    Raises:
        InvalidCapture: Every block was taken already, and nothing holds its rows. Also as for
            `PromptAttention.array`.
        OutOfMemory: As for `PromptAttention.array`.
    """
    context, capture = attention._context, attention.capture  # pyright: ignore[reportPrivateUsage]
    parts = list(attention._handed.held())  # pyright: ignore[reportPrivateUsage]
    if parts:
        return prompt_rows(context(), capture, parts)
    whole = (attention.array(), None) if capture.top_k is None else attention.top_k()
    return prompt_rows(context(), capture, [(attention.start, *whole)])
