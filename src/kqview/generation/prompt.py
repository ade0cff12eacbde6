"""PromptAttention: the attention rows of a prompt, block by block or as one array."""

from collections.abc import Callable
from typing import Any, Protocol, Self

import numpy as np

from kqview.coloured.rows import Rows
from kqview.errors import InvalidCapture, OutOfMemory
from kqview.generation.display import HandedRows, prompt_html, prompt_rows
from kqview.types import Capture, PromptBlock, Usage
from kqview.types.forms import Framework, check_framework, check_hf, hf_form, lens_name
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


class PromptAttention:
    """Iterator and async iterator of PromptBlock, in order of position; also a context manager.

    The engine computes one block ahead. The rows of each block are a zero-copy view; if memory is
    short, drop a block to make room for the next ones.

    A notebook displays the prompt, coloured by the rows that you still have, or else by the first
    block, which stays to be taken.

    An exception raised by iterating, `array` or `top_k` ends the iteration, as with Generation.

    Attributes:
        start: Position of the first row's query.
        n_rows: Number of rows in all blocks together. A mod may still change it before the first.

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
        capture: Capture | None,
        *,
        count_copied: Callable[[int], None],
        budget_bytes: int = 0,
    ) -> None:
        self._source = source
        self._count_copied = count_copied
        self.start = start
        self._context = context
        self._capture = capture
        self._budget_bytes = budget_bytes
        self._handed = HandedRows()

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
    def capture(self) -> Capture | None:
        """What was captured, with its layers filled in."""
        return self._capture

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layers that were captured, in the order of the rows."""
        return tuple(self._capture.layers or ()) if self._capture is not None else ()

    @property
    def heads(self) -> tuple[int, ...]:
        """The heads of each layer that were captured, in the order of the rows."""
        return self._context().heads_of(self._capture)

    def __repr__(self) -> str:
        """One line; takes no block."""
        kind = None if self._capture is None else self._capture.kind
        return f"PromptAttention(start={self.start}, n_rows={self.n_rows}, kind={kind!r})"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PromptBlock:
        block = self._source.next_block()
        if block is None:
            raise StopIteration
        self._handed.add(block.start, block.rows, block.positions)
        return block

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PromptBlock:
        block = await self._source.anext_block()
        if block is None:
            raise StopAsyncIteration
        self._handed.add(block.start, block.rows, block.positions)
        return block

    def array(self) -> AnyAttention:
        """The rows of all remaining blocks as one array.

        Returns:
            Shape ``(n_layers, n_heads, n_rows, n_context)`` in the dtype of the capture; see
            PromptBlock for reductions, ``top_k`` and layers that differ in heads. A view if one
            block holds all rows; otherwise a copy, which counts in `EngineStats.copied_bytes`.

        Raises:
            OutOfMemory: The array needs more than ``attention_budget_bytes``.
            InvalidCapture: A block was dropped because of ``on_full="drop"``, or no block is left.
        """
        return self._whole(with_positions=False)[0]

    def top_k(self) -> tuple[AnyAttention, AnyPositions]:
        """Like `array`, for ``Capture(top_k=k)``: the values and their int32 positions.

        Raises:
            InvalidCapture: The capture has no ``top_k``.
        """
        rows, positions = self._whole(with_positions=True)
        if positions is None:
            raise InvalidCapture("the capture has no top_k; pass Capture(top_k=k), or use array()")
        return rows, positions

    def to_hf(self, framework: Framework = "np") -> tuple[Any, ...]:
        """The rows of all remaining blocks in the form of Hugging Face transformers.

        Args:
            framework: "np" for the arrays of `array`, "pt" for torch tensors with a copy of them.

        Returns:
            One array of shape ``(1, n_heads, n_rows, n_context)`` for each captured layer.

        Raises:
            InvalidCapture: The kind is not "probs", which is what transformers returns, or the
                capture has ``reduce``, ``top_k`` or ``spans``. Also as for `array`.
            OutOfMemory: As for `array`.
            KqviewError: torch is not installed.
        """
        check_framework(framework)
        if self._capture is not None:
            check_hf(self._capture)
        return hf_form(self.array(), framework)

    def named(self, framework: Framework = "np") -> dict[str, Any]:
        """The rows of all remaining blocks under the names of TransformerLens' activation cache.

        Args:
            framework: As in `to_hf`.

        Returns:
            ``blocks.{layer}.attn.hook_pattern`` for kind "probs" and
            ``blocks.{layer}.attn.hook_attn_scores`` for kind "scores", of shape
            ``(1, n_heads, n_rows, n_context)``.

        Raises:
            InvalidCapture: The kind is "qk", for which TransformerLens has no name, or the capture
                has ``reduce``, ``top_k`` or ``spans``. Also as for `array`.
            OutOfMemory: As for `array`.
            KqviewError: torch is not installed.
        """
        check_framework(framework)
        name = "" if self._capture is None else lens_name(self._capture)
        rows = hf_form(self.array(), framework)
        return {f"blocks.{i}.{name}": one for i, one in zip(self.layers, rows, strict=True)}

    def _whole(self, *, with_positions: bool) -> tuple[Attention, Any]:
        try:
            return self._joined(with_positions=with_positions)
        except BaseException:  # the blocks taken so far are lost
            self._source.cancel()
            raise

    def _joined(self, *, with_positions: bool) -> tuple[Attention, Any]:
        first = next(self, None)
        if first is None:
            raise InvalidCapture(
                "every block was taken already, and array() takes all of them; keep its result, or "
                "call attend or generate again"
            )
        if first.n_rows == self.n_rows:
            next(self, None)  # take the end, so that `usage` is final
            return _rows_of(first), first.positions
        rows = _Joined(self.n_rows, self._budget_bytes, self._count_copied)
        positions = _Joined(self.n_rows, self._budget_bytes, self._count_copied)
        i_row, block = 0, first
        while block is not None:
            rows.add(_rows_of(block), i_row)
            if with_positions and block.positions is not None:
                positions.add(block.positions, i_row)
            i_row += block.n_rows
            first = block = None  # free its memory for the next one
            block = next(self, None)
        self._handed.add(self.start, rows.whole, positions.whole)
        return rows.whole, positions.whole

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
        return prompt_html(context, self._capture, self.n_rows, self._handed, peek)

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


class _Joined:
    """Joins the arrays of blocks by copying them along the axis of rows, the second to last."""

    def __init__(self, n_rows: int, budget_bytes: int, count_copied: Callable[[int], None]) -> None:
        self.whole: Any = None
        self._count_copied = count_copied
        self._n_rows = n_rows
        self._budget_bytes = budget_bytes

    def add(self, part: Attention | Positions, i_row: int) -> None:
        parts: tuple[np.ndarray[Any, Any], ...] = part if isinstance(part, tuple) else (part,)
        if self.whole is None:
            wholes = tuple(self._room_for(array) for array in parts)
            self.whole = wholes if isinstance(part, tuple) else wholes[0]
        wholes = self.whole if isinstance(part, tuple) else (self.whole,)
        for whole, array in zip(wholes, parts, strict=True):
            whole[..., i_row : i_row + array.shape[-2], :] = array
            self._count_copied(array.nbytes)

    def _room_for(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        shape = (*array.shape[:-2], self._n_rows, array.shape[-1])
        n_bytes = int(np.prod(shape, dtype=np.int64)) * array.itemsize
        if self._budget_bytes and n_bytes > self._budget_bytes:
            raise OutOfMemory(
                f"the array needs {n_bytes} bytes, but attention_budget_bytes is "
                f"{self._budget_bytes}; iterate the blocks, or capture fewer layers, heads "
                "or rows (last=)"
            )
        return np.empty(shape, array.dtype)


def _rows_of(block: PromptBlock) -> Attention:
    if block.rows is None:
        raise InvalidCapture(f"on_full='drop' dropped the rows from {block.start} on; use 'wait'")
    return block.rows


def all_rows(attention: PromptAttention) -> Rows:
    """The rows that something holds; if there are none, take all blocks. For code of kqview.

    Raises:
        InvalidCapture: Every block was taken already, and nothing holds its rows. Also as for
            `PromptAttention.array`.
        OutOfMemory: As for `PromptAttention.array`.
    """
    context, capture = attention._context, attention._capture  # pyright: ignore[reportPrivateUsage]
    parts = list(attention._handed.held())  # pyright: ignore[reportPrivateUsage]
    if parts:
        return prompt_rows(context(), capture, parts)
    whole = attention._whole(with_positions=capture is not None and capture.top_k is not None)  # pyright: ignore[reportPrivateUsage]
    return prompt_rows(context(), capture, [(attention.start, *whole)])
