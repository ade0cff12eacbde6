"""Pairs and their statistics: the figures that are published are right."""

from __future__ import annotations

from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kqview.bench import pairs

ratios = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=60)


def rank_of_bound(n: int) -> int | None:
    """1-based rank of the bound among n distinct values."""
    bound = pairs.median_upper_bound(list(range(1, n + 1)))
    return None if bound is None else int(bound)


# ---- quantiles


def test_quantile_of_odd_count_is_the_middle_value() -> None:
    assert pairs.quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_quantile_between_two_values_is_interpolated() -> None:
    assert pairs.quantile([10.0, 20.0], 0.25) == 12.5


@given(ratios, st.floats(0.0, 1.0))
def test_quantile_lies_between_smallest_and_largest_value(values: list[float], q: float) -> None:
    found = pairs.quantile(values, q)
    assert min(values) - 1e-9 <= found <= max(values) + 1e-9


def test_quantile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        pairs.quantile([], 0.5)


def test_quantile_beyond_one_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"q is 1\.5"):
        pairs.quantile([1.0], 1.5)


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
    bound = pairs.median_upper_bound(values)
    assert bound is None or bound >= pairs.quantile(values, 0.5)


def test_bound_ignores_the_order_of_ratios() -> None:
    values = [1.5, 1.1, 1.2, 1.4, 1.3, 1.0]
    assert pairs.median_upper_bound(values) == pairs.median_upper_bound(sorted(values))


# ---- pairs


def test_median_ratio_follows_a_drift_that_medians_of_sides_do_not() -> None:
    # The machine grows slower from pair to pair, the candidate always costs a tenth more.
    found = pairs.Pairs()
    for base in (1.0, 2.0, 4.0, 8.0, 16.0):
        found.add(base, base * 1.1)
    assert found.median_ratio == pytest.approx(1.1)
    assert found.upper_bound == pytest.approx(1.1)


def test_alternate_changes_the_first_run_from_pair_to_pair() -> None:
    order: list[str] = []

    def run(name: str, ms: float) -> float:
        order.append(name)
        return ms

    times = list(pairs.alternate(lambda: run("A", 1.0), lambda: run("B", 2.0), 3))
    assert order == ["A", "B", "B", "A", "A", "B"]
    assert times == [(1.0, 2.0)] * 3


def test_step_ms_leaves_the_first_steps_out() -> None:
    assert pairs.step_ms([0.0, 5.0, 5.01, 5.02, 5.03], n_skip=1) == pytest.approx(10.0)


def test_step_ms_is_not_moved_by_one_slow_step() -> None:
    assert pairs.step_ms([0.0, 0.01, 0.02, 9.0, 9.01, 9.02]) == pytest.approx(10.0)


def test_mean_step_ms_counts_every_step() -> None:
    assert pairs.mean_step_ms([1.0, 1.1, 1.3]) == pytest.approx(150.0)


def test_rounds_run_backwards_every_second_time_and_keep_the_names_in_order() -> None:
    order: list[str] = []

    def run(name: str, ms: float) -> float:
        order.append(name)
        return ms

    ways = {
        name: (lambda name=name, ms=ms: run(name, ms))
        for name, ms in zip("ABC", (1.0, 2.0, 3.0), strict=True)
    }
    found = list(pairs.rounds(ways, 3))
    assert "".join(order) == "ABCCBAABC"
    assert found == [{"A": 1.0, "B": 2.0, "C": 3.0}] * 3
    assert [list(times) for times in found] == [["A", "B", "C"]] * 3


def test_rounds_give_a_drift_no_effect_on_the_median_ratio() -> None:
    # Time goes by 1 with every run: after two rounds each way has run equally late.
    clock = iter(range(1, 100))
    ways = {name: (lambda: float(next(clock))) for name in "ABC"}
    totals = {name: 0.0 for name in "ABC"}
    for times in pairs.rounds(ways, 4):
        for name, time in times.items():
            totals[name] += time
    assert len(set(totals.values())) == 1


def test_spread_prints_three_quantiles() -> None:
    assert str(pairs.Spread.of([1.0, 2.0, 3.0])) == "1.20 / 2.00 / 2.80"
    assert str(pairs.Spread.of([1000.0, 2000.0])) == "1,100 / 1,500 / 1,900"
