"""Slot: one sequence of an engine and what its KV cache holds."""

from kqview import _core


class Slot:
    """One of an engine's sequences.

    Attributes:
        id: Index in ``engine.slots``.
    """

    def __init__(self, core: _core.Engine, slot_id: int) -> None:
        self._core = core
        self.id = slot_id

    @property
    def tokens(self) -> list[int]:
        """Ids in the KV cache.

        After a generation: its prompt and what it generated without the last id, which was sampled
        but not decoded. A generation that was closed early leaves what was handed out.

        Raises:
            ClosedError: The engine is closed.
        """
        return self._core.slot_tokens(self.id)

    @property
    def n_tokens(self) -> int:
        """Number of ids in the KV cache."""
        return len(self.tokens)

    @property
    def is_busy(self) -> bool:
        """Whether a generation works in this slot now."""
        return self._core.slot_is_busy(self.id)

    def __repr__(self) -> str:
        return f"Slot(id={self.id})"
