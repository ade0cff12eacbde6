"""bench/harness.py and the pure parts around it: the figures that README.md publishes are right."""

from __future__ import annotations

import importlib
import json
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import harness, report

if TYPE_CHECKING:
    from types import ModuleType

BENCH = Path(harness.__file__).parent
ratios = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=60)


def rank_of_bound(n: int) -> int | None:
    """1-based rank of the bound among n distinct values."""
    bound = harness.median_upper_bound(list(range(1, n + 1)))
    return None if bound is None else int(bound)


# ---- quantiles


def test_quantile_of_odd_count_is_the_middle_value() -> None:
    assert harness.quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_quantile_between_two_values_is_interpolated() -> None:
    assert harness.quantile([10.0, 20.0], 0.25) == 12.5


@given(ratios, st.floats(0.0, 1.0))
def test_quantile_lies_between_smallest_and_largest_value(values: list[float], q: float) -> None:
    found = harness.quantile(values, q)
    assert min(values) - 1e-9 <= found <= max(values) + 1e-9


def test_quantile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        harness.quantile([], 0.5)


def test_quantile_beyond_one_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"q is 1\.5"):
        harness.quantile([1.0], 1.5)


# ---- the bound


def test_bound_of_20_ratios_is_the_15th_smallest() -> None:
    assert rank_of_bound(20) == 15


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_bound_of_fewer_than_5_ratios_does_not_exist(n: int) -> None:
    assert rank_of_bound(n) is None


@pytest.mark.parametrize("n", [5, 8, 10, 21, 40, 101])
def test_bound_has_the_least_rank_that_covers_95_percent(n: int) -> None:
    rank = rank_of_bound(n)
    assert rank is not None

    def coverage(k: int) -> float:
        return sum(comb(n, j) for j in range(k)) / 2**n

    assert coverage(rank - 1) < 0.95 <= coverage(rank)


@given(ratios)
def test_bound_is_never_below_the_median(values: list[float]) -> None:
    bound = harness.median_upper_bound(values)
    assert bound is None or bound >= harness.quantile(values, 0.5)


def test_bound_ignores_the_order_of_ratios() -> None:
    values = [1.5, 1.1, 1.2, 1.4, 1.3, 1.0]
    assert harness.median_upper_bound(values) == harness.median_upper_bound(sorted(values))


# ---- pairs


def test_median_ratio_follows_a_drift_that_medians_of_sides_do_not() -> None:
    # The machine grows slower from pair to pair, the candidate always costs a tenth more.
    pairs = harness.Pairs()
    for base in (1.0, 2.0, 4.0, 8.0, 16.0):
        pairs.add(base, base * 1.1)
    assert pairs.median_ratio == pytest.approx(1.1)
    assert pairs.upper_bound == pytest.approx(1.1)


def test_alternate_changes_the_first_run_from_pair_to_pair() -> None:
    order: list[str] = []

    def run(name: str, ms: float) -> float:
        order.append(name)
        return ms

    pairs = list(harness.alternate(lambda: run("A", 1.0), lambda: run("B", 2.0), 3))
    assert order == ["A", "B", "B", "A", "A", "B"]
    assert pairs == [(1.0, 2.0)] * 3


def test_step_ms_leaves_the_first_steps_out() -> None:
    assert harness.step_ms([0.0, 5.0, 5.01, 5.02, 5.03], n_skip=1) == pytest.approx(10.0)


def test_step_ms_is_not_moved_by_one_slow_step() -> None:
    assert harness.step_ms([0.0, 0.01, 0.02, 9.0, 9.01, 9.02]) == pytest.approx(10.0)


def test_mean_step_ms_counts_every_step() -> None:
    assert harness.mean_step_ms([1.0, 1.1, 1.3]) == pytest.approx(150.0)


# ---- the report


def timing(ratio: float, n_pairs: int, target: float | None) -> report.Timing:
    pairs = harness.Pairs([10.0] * n_pairs, [10.0 * ratio] * n_pairs)
    return report.Timing("r", "what", "against", "a token", pairs, target, "python bench/x.py")


@pytest.mark.parametrize(
    ("ratio", "n_pairs", "target", "verdict"),
    [(1.04, 20, 1.05, "yes"), (1.06, 20, 1.05, "no"), (1.0, 4, 1.05, "?"), (9.0, 20, None, "")],
)
def test_verdict_compares_the_bound_with_the_target(
    ratio: float, n_pairs: int, target: float | None, verdict: str
) -> None:
    assert timing(ratio, n_pairs, target).verdict == verdict


def test_json_line_keeps_every_single_time() -> None:
    line = json.loads(report.as_json(timing(1.5, 5, None), {"cpu": "some"}))
    assert line["pairs"] == {"baseline_ms": [10.0] * 5, "candidate_ms": [15.0] * 5}
    assert (line["row"], line["cpu"], line["upper_bound"]) == ("r", "some", 1.5)


def test_append_json_adds_to_the_file_of_the_day(tmp_path: Path) -> None:
    about: dict[str, Any] = {"date": "2025-01-02T03:04:05+00:00"}
    report.append_json(tmp_path / "results", [timing(1.0, 5, None)], about)
    path = report.append_json(tmp_path / "results", [timing(1.0, 5, None)], about)
    assert path.name == "2025-01-02.jsonl"
    assert len(path.read_text().splitlines()) == 2


def test_replace_marked_keeps_what_lies_around_the_markers() -> None:
    text = f"before {report.BEGIN} old {report.END} after"
    assert report.replace_marked(text, "new") == (f"before {report.BEGIN}\nnew\n{report.END} after")


def test_replace_marked_without_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match="markers missing"):
        report.replace_marked("no markers", "new")


def test_readme_has_the_markers_of_the_table() -> None:
    report.replace_marked((BENCH / "README.md").read_text(encoding="utf-8"), "new")


# ---- perf


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("counts")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("123456,,instructions:u,1000,100.00,,\n", 123456),
        ("<not supported>,,instructions:u,0,100.00,,\n", None),
        ("Error: no permission\n", None),
        ("", None),
    ],
)
def test_perf_output_is_a_count_or_none(counts: ModuleType, text: str, count: int | None) -> None:
    assert counts.parse_perf(text) == count
