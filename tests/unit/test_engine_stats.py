"""EngineStats without an engine: rates, and the difference of two readings."""

from kqview import EngineStats, PoolStats, SlotStats


def test_rates_are_tokens_by_the_seconds_spent_on_them():
    stats = EngineStats(
        uptime_s=10, decode_tokens=300, decode_s=2, prefill_tokens=900, prefill_s=1.5
    )
    assert stats.tokens_per_s == 150
    assert stats.prefill_tokens_per_s == 600
    assert stats.busy_s == 3.5


def test_means_of_copies_and_views_are_zero_before_any():
    assert EngineStats().step_to_view_mean_s == 0.0
    assert EngineStats().device_copy_bytes_per_s == 0.0
    stats = EngineStats(
        captured_steps=4, step_to_view_s=2.0, device_copy_bytes=600, device_copy_s=0.5
    )
    assert stats.step_to_view_mean_s == 0.5
    assert stats.device_copy_bytes_per_s == 1200


def test_since_subtracts_what_grows_and_keeps_what_is_of_the_moment():
    earlier = EngineStats(uptime_s=1, n_tokens=10, decode_s=0.5, n_queued=9, graph_nodes_added=4)
    later = EngineStats(
        uptime_s=4,
        n_tokens=25,
        decode_s=2.5,
        n_queued=2,
        graph_nodes_added=3,
        slots=(SlotStats(0, "decode", 7, "me"),),
        pool=PoolStats(n_leased=5),
    )
    made = later.since(earlier)
    assert (made.uptime_s, made.n_tokens, made.decode_s) == (3, 15, 2)
    assert (made.n_queued, made.graph_nodes_added) == (2, 3)
    assert (made.slots, made.pool) == (later.slots, later.pool)
    assert later.since(later) == EngineStats(
        n_queued=2, graph_nodes_added=3, slots=later.slots, pool=later.pool, uptime_s=0
    )
