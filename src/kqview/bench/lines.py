"""JSON lines: one measured row a line, on disk as soon as it is measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line to *path* and close it: a run that is stopped keeps what it has measured.

    Raises:
        OSError: *path* cannot be written.
        ValueError: *record* holds what JSON does not know.
    """
    line = json.dumps(record, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        size = file.seek(0, 2)
        if size:
            file.seek(size - 1)
            # A process that was killed in the middle of a line must not take the next one along.
            line = line if file.read(1) == b"\n" else f"\n{line}"
        file.write(line.encode())


def read(path: Path) -> list[dict[str, Any]]:
    """The records of *path*, oldest first; lines that were cut short are left out.

    Raises:
        OSError: *path* cannot be read.
        ValueError: It holds no record at all.
    """
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)  # pyright: ignore[reportUnknownArgumentType]
    if not records:
        raise ValueError(f"lines.read: {path} has no line of JSON; name a file that --save wrote")
    return records
