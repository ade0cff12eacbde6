"""Each script of bench/guards runs, with the demo model and few examples, and prints its table."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.full

GUARDS = Path(__file__).parents[2] / "bench" / "guards"
SHARED = {"trials", "packaged", "picture"}  # no table of their own
ARGUMENTS = {
    "align": ["--n", "2", "--calibration", "12"],
    "answers": ["--n", "2", "--calibration", "20"],
    "cite": ["--n", "2", "--calibration", "12", "--needles", "12"],
    "cost": ["--n", "1", "--contexts", "384"],
    "grounding": ["--n", "4", "--calibration", "20"],
    "injection": ["--n", "4", "--calibration", "24"],
    "rerank": ["--n", "2", "--calibration", "12"],
}


class WordCounts:
    """Stands in for bm25s.BM25 where that is not installed."""

    def index(self, documents: list[list[str]], *, show_progress: bool) -> None:
        self._documents = documents
        self.vocab_dict = {word: 0 for words in documents for word in words}

    def get_scores(self, words: list[str]) -> Any:
        return np.array([float(sum(map(one.count, words))) for one in self._documents])


def words_of(texts: list[str], **_: object) -> list[list[str]]:
    return [one.lower().split() for one in texts]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import a script as programs of its folder do, with the demo model in SmolLM2's place."""
    monkeypatch.syspath_prepend(GUARDS)  # pyright: ignore[reportUnknownMemberType]
    known, demo = set(sys.modules), Engine.demo

    def opened(_: str, **options: Any) -> Engine:
        options["n_threads"] = 1
        return demo(**options)

    monkeypatch.setattr(Engine, "demo", opened)
    if importlib.util.find_spec("bm25s") is None:
        stand_in: Any = SimpleNamespace(BM25=WordCounts, tokenize=words_of)
        monkeypatch.setitem(sys.modules, "bm25s", stand_in)
    yield importlib.import_module
    for name in {path.stem for path in GUARDS.glob("*.py")} - known:
        sys.modules.pop(name, None)


def test_all_scripts_are_here() -> None:
    assert {path.stem for path in GUARDS.glob("*.py")} == SHARED | ARGUMENTS.keys()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_script_prints_its_table(
    name: str,
    script: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", [f"{name}.py", *ARGUMENTS[name]])
    script(name).main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) > 5
    assert len({row.count("|") for row in rows}) == 1


def test_picture_of_heads_is_drawn(
    script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = script("picture")
    monkeypatch.setattr(picture, "TARGET", tmp_path / "heads.png")
    monkeypatch.setattr(picture, "N_EXAMPLES", 2)
    picture.main()
    assert picture.TARGET.read_bytes().startswith(b"\x89PNG")
