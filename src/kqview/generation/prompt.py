"""PromptAttention: the rows of a prompt's own tokens, block by block or as one array."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from kqview.errors import InvalidCapture, OutOfMemory
from kqview.types import PromptBlock, Usage
from kqview.types.token import Attention, Positions


class BlockSource(Protocol):
    """Where blocks come from: a Generation."""

    def next_block(self) -> PromptBlock | None: ...
    async def anext_block(self) -> PromptBlock | None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...
    async def aclose(self) -> None: ...
    @property
    def usage(self) -> Usage: ...


class PromptAttention:
    """Iterator and async iterator of PromptBlock, in order of position; also a context manager.

    The engine computes one block ahead. Each block's rows are a zero-copy view: drop it to make
    room for the next ones where memory is short.

    Whatever iterating, `array` or `top_k` raises ends it, as with Generation.

    Attributes:
        start: Position of the first row's query.
        n_rows: Rows of all blocks together.

    Raises (while iterating):
        PoolExhausted: The blocks held fill the budget and ``on_full`` does not allow to go on.
        ClosedError: The engine was closed meanwhile.
        DecodeError: llama.cpp failed; the engine goes on.
    """

    def __init__(
        self,
        source: BlockSource,
        start: int,
        n_prompt: int,
        *,
        count_copied: Callable[[int], None],
        budget_bytes: int = 0,
    ) -> None:
        self._source = source
        self._count_copied = count_copied
        self.start = start
        self.n_rows = n_prompt - start
        self._budget_bytes = budget_bytes

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PromptBlock:
        block = self._source.next_block()
        if block is None:
            raise StopIteration
        return block

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PromptBlock:
        block = await self._source.anext_block()
        if block is None:
            raise StopAsyncIteration
        return block

    def array(self) -> Attention:
        """The rows of all blocks that are left, as one array.

        Returns:
            Shape ``(n_layers, n_heads, n_rows, n_context)``, the dtype of the capture, or what
            PromptBlock says of reductions, ``top_k`` and layers that differ in heads. A view where
            one block holds everything; else a copy, which the engine's statistics count.

        Raises:
            OutOfMemory: It does not fit beside the blocks.
            InvalidCapture: ``on_full="drop"`` dropped a block.
        """
        return self._whole(with_positions=False)[0]

    def top_k(self) -> tuple[Attention, Positions]:
        """As `array`, for ``Capture(top_k=k)``: values and their int32 positions.

        Raises:
            InvalidCapture: The capture has no ``top_k``.
        """
        rows, positions = self._whole(with_positions=True)
        if positions is None:
            raise InvalidCapture("the capture has no top_k; pass Capture(top_k=k), or use array()")
        return rows, positions

    def _whole(self, *, with_positions: bool) -> tuple[Attention, Any]:
        try:
            return self._joined(with_positions=with_positions)
        except BaseException:  # the blocks taken so far are gone with it
            self._source.cancel()
            raise

    def _joined(self, *, with_positions: bool) -> tuple[Attention, Any]:
        first = next(self, None)
        if first is None:
            raise InvalidCapture("every block was taken already; ask for a new one")
        if first.n_rows == self.n_rows:
            next(self, None)  # the end: `usage` is final then
            return _rows_of(first), first.positions
        rows = _Joined(self.n_rows, self._budget_bytes, self._count_copied)
        positions = _Joined(self.n_rows, self._budget_bytes, self._count_copied)
        i_row, block = 0, first
        while block is not None:
            rows.add(_rows_of(block), i_row)
            if with_positions and block.positions is not None:
                positions.add(block.positions, i_row)
            i_row += block.n_rows
            first = block = None  # its memory is needed for the next one
            block = next(self, None)
        return rows.whole, positions.whole

    @property
    def usage(self) -> Usage:
        """Token counts and seconds; ``prefill_s`` is the time of all blocks."""
        return self._source.usage

    def close(self) -> None:
        """Stop computing; views stay valid."""
        self._source.close()

    async def aclose(self) -> None:
        """As `close`, without blocking the event loop."""
        await self._source.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Joined:
    """Arrays of blocks copied into whole ones along their axis of rows, the last but one."""

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
        raise InvalidCapture(f"the rows from {block.start} on were dropped; use on_full='wait'")
    return block.rows
