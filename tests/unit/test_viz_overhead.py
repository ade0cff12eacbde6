"""The overhead plot: each capture at its height over its context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kqview.bench.pairs import Pairs
from kqview.bench.rows import SweepRow

pytest.importorskip("matplotlib")

from kqview.viz import overhead_plot


def record(capture: str, n_context: int, ratio: float, *, flash: bool = True) -> dict[str, Any]:
    pairs = Pairs([10.0] * 5, [10.0 * ratio] * 5)
    return {"cpu": "chip", **SweepRow(capture, flash, n_context, 0, pairs).to_record()}


RECORDS = [
    record("off", 256, 1.01), record("off", 1024, 1.0), record("logits", 256, 1.03),
    record("logits", 1024, 1.05), record("probs", 1024, 1.07),
    record("logits", 256, 1.2, flash=False),
]  # fmt: skip


def heights(figure: Any, panel: int, capture: str) -> list[float]:
    (bars,) = [c for c in figure.axes[panel].containers if c.get_label() == capture]
    return [round(float(y), 6) for y in bars.lines[0].get_ydata()]


def test_line_has_the_median_of_each_context_in_percent():
    figure = overhead_plot(RECORDS)
    assert heights(figure, 0, "logits") == [3.0, 5.0]
    assert heights(figure, 0, "probs") == [7.0]
    assert heights(figure, 1, "logits") == [20.0]
    assert [axes.get_title("left") for axes in figure.axes] == [
        "flash attention on", "flash attention off",
    ]  # fmt: skip


def test_last_record_of_a_row_counts_and_other_rows_are_ignored():
    figure = overhead_plot([*RECORDS, record("probs", 1024, 1.5), {"row": "decode-flash-logits"}])
    assert heights(figure, 0, "probs") == [50.0]


def test_records_without_a_sweep_are_refused():
    with pytest.raises(ValueError, match="none of 1 records is a row of a sweep"):
        overhead_plot([{"row": "decode-flash-logits"}])


def test_script_draws_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import runpy

    from matplotlib.image import imread

    from kqview.bench import lines

    source, picture = tmp_path / "rows.jsonl", tmp_path / "x.png"
    for saved in RECORDS:
        lines.append(source, saved)
    script = Path(__file__).parents[2] / "bench" / "plot.py"
    monkeypatch.setattr("sys.argv", [str(script), str(source), "--out", str(picture)])
    runpy.run_path(str(script), run_name="__main__")
    assert len(np.unique(imread(picture).reshape(-1, 4), axis=0)) > 50
