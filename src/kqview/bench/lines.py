"""JSON lines: one measured row a line, on disk as soon as it is measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kqview.durable import append_line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line to *path*, on the disk when this returns; a run that is stopped keeps it.

    Raises:
        OSError: *path* cannot be written; it is as it was.
        ValueError: *record* holds what JSON does not know.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, json.dumps(record, allow_nan=False))


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
