"""A slot without an engine, for what `kqview.state` does with slots."""

from __future__ import annotations

from kqview.state.files import NO_MARKS, SlotMarks, StateFacts

FACTS = StateFacts("model", "f16")
BLOB = b"SES1" + bytes(100)


def blob_of(value: int, n: int = 100) -> bytes:
    """A blob of *n* bytes that *value* tells from others; no engine would take it."""
    return b"SES1" + bytes([value]) * (n - 4)


class FakeSlot:
    """A slot whose cache is a blob."""

    def __init__(
        self, blob: bytes = BLOB, facts: StateFacts = FACTS, marks: SlotMarks = NO_MARKS
    ) -> None:
        self.blob = blob
        self.facts = facts
        self.marks = marks

    def save_marked(self) -> tuple[bytes, SlotMarks]:
        return self.blob, self.marks

    def restore_marked(self, blob: bytes, marks: SlotMarks) -> int:
        self.blob, self.marks = blob, marks
        return len(blob)

    def state_facts(self) -> StateFacts:
        return self.facts
