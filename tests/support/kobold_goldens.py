"""Goldens of the kobold dialect: bodies and replies of its documents, as they are written there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "server" / "kobold" / "goldens"


def golden(name: str) -> Any:
    """The value of ``goldens/NAME.json``."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
