"""kqview.bench: the statistics of pairs, the sweep against a fake engine, its tables and facts."""

from __future__ import annotations

from math import comb
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pytest
from hypothesis import strategies as st

from kqview import Capture, ModelInfo
from kqview.bench import pairs, records, sweep
from kqview.bench.pairs import Pairs
from kqview.errors import InvalidCapture, OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Iterator


ratios = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=60)


def rank_of_bound(n: int) -> int | None:
    """1-based rank of the bound among n distinct values."""
    bound = pairs.median_upper_bound(list(range(1, n + 1)))
    return None if bound is None else int(bound)


# ---- quantiles


def test_quantile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="values is empty"):
        pairs.quantile([], 0.5)


# ---- the bound


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_bound_of_fewer_than_5_ratios_does_not_exist(n: int) -> None:
    assert rank_of_bound(n) is None


@pytest.mark.parametrize("n", [5, 8, 20, 21, 101])
def test_bound_has_the_least_rank_that_covers_95_percent(n: int) -> None:
    rank = rank_of_bound(n)
    assert rank is not None

    def coverage(k: int) -> float:
        return sum(comb(n, j) for j in range(k)) / 2**n

    assert coverage(rank - 1) < 0.95 <= coverage(rank)


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


def test_rounds_give_a_drift_no_effect_on_the_median_ratio() -> None:
    # Time goes by 1 with every run: after two rounds each way has run equally late.
    clock = iter(range(1, 100))
    ways = {name: (lambda: float(next(clock))) for name in "ABC"}
    totals = {name: 0.0 for name in "ABC"}
    for times in pairs.rounds(ways, 4):
        for name, time in times.items():
            totals[name] += time
    assert len(set(totals.values())) == 1


# ---- sweep


MODEL = ModelInfo(
    name="toy", architecture="llama", n_vocab=50, n_layer=24, n_head=16, n_head_kv=4,
    n_embd=1024, n_ctx_train=2048, attention_layers=tuple(range(24)), attention_scale=0.5,
    bos_token_id=0, eos_token_id=None, eot_token_id=None, pad_token_id=None, special_tokens={},
    rope_freq_base=1e4, rope_freq_scale=1.0, chat_template=None, n_params=1234, size_bytes=4936,
    file_type="F32", classifier_labels=(), metadata={},
)  # fmt: skip


class FakeEngine:
    """Its clock goes by 1 s a token, and by 2 s where probs are captured."""

    def __init__(self, n_ctx: int, flash_attn: bool) -> None:
        self.n_ctx, self.flash_attn, self.model = n_ctx, flash_attn, MODEL
        self.now = 0.0
        self.captures: list[Capture | None] = []
        self.prompts: list[list[int]] = []
        self.is_closed = False

    def generate(
        self, prompt: list[int], *, max_tokens: int, capture: Capture | None = None, **_: Any
    ) -> Iterator[SimpleNamespace]:
        if capture is not None and capture.top_k:
            raise InvalidCapture("capture: top_k is not in this version; leave it out")
        if max_tokens > 1:
            self.captures.append(capture)
        self.prompts.append(prompt)
        for _ in range(max_tokens):
            self.now += 2.0 if capture is not None and capture.kind == "probs" else 1.0
            yield SimpleNamespace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True


def measure(
    engines: list[FakeEngine], memory_tokens: int = 10**6, **options: Any
) -> list[records.SweepRow | records.LeftOut]:
    def open_engine(n_ctx: int, flash_attn: bool) -> Any:
        if n_ctx > memory_tokens:
            raise OutOfMemory("engine.open: no room")
        engines.append(FakeEngine(n_ctx, flash_attn))
        return engines[-1]

    plan = sweep.SweepPlan(
        now_s=lambda: engines[-1].now, n_rounds=5, n_tokens=8,
        **{"contexts": (16,), "flash_attn": (True,), "captures": ("logits", "probs"), **options},
    )  # fmt: skip
    return list(sweep.sweep(open_engine, plan))


def test_sweep_compares_each_way_with_the_run_without_capture() -> None:
    off, logits, probs = measure([])
    assert isinstance(probs, records.SweepRow)
    assert [row.name for row in (off, logits, probs)] == [
        f"context-16-flash-{name}" for name in ("off", "logits", "probs")
    ]
    assert probs.pairs == Pairs([1000.0] * 5, [2000.0] * 5)
    assert isinstance(logits, records.SweepRow)
    assert logits.pairs.median_ratio == 1.0
    assert probs.bytes_per_token == 24 * 16 * 16 * 4


def test_sweep_runs_every_second_round_backwards_after_a_warm_up() -> None:
    engines: list[FakeEngine] = []
    measure(engines)
    (engine,) = engines
    kinds = [capture.kind[0] if capture else "-" for capture in engine.captures]
    forwards = "--lp"
    assert "".join(kinds) == forwards + (forwards + forwards[::-1]) * 2 + forwards
    assert engine.is_closed


def test_sweep_opens_an_engine_for_each_setting_that_holds_the_longest_run() -> None:
    engines: list[FakeEngine] = []
    found = measure(engines, contexts=(16, 32), flash_attn=(True, False))
    assert [(engine.n_ctx, engine.flash_attn) for engine in engines] == [(41, True), (41, False)]
    assert [row.name for row in found] == [
        f"context-{n_context}-{flash}-{capture}"
        for flash in ("flash", "plain")
        for n_context in (16, 32)
        for capture in ("off", "logits", "probs")
    ]
    short, long = engines[0].prompts[0], engines[0].prompts[-1]
    assert (len(short), len(long)) == (16, 32)
    assert long[:16] == short  # what the slot holds is not evaluated again


def test_way_that_is_refused_leaves_the_others() -> None:
    logits, probs = measure([], captures=("top-8", "logits"))[-2:]
    refused = measure([], captures=("top-8", "logits"))[0]
    assert isinstance(refused, records.LeftOut)
    assert refused.name == "context-16-flash-top-8"
    assert "top_k is not in this version" in refused.reason
    assert not refused.is_failure
    assert isinstance(logits, records.SweepRow)
    assert isinstance(probs, records.SweepRow)


def test_context_without_room_is_left_out_and_the_shorter_ones_are_measured() -> None:
    found = measure([], memory_tokens=100, contexts=(16, 1024), captures=("logits",))
    assert [row.name for row in found] == [
        "context-1024-flash-*", "context-16-flash-off", "context-16-flash-logits",
    ]  # fmt: skip
    assert isinstance(found[0], records.LeftOut)


# ---- what is measured


def test_ten_heads_of_24_layers_are_two_heads_in_five_layers() -> None:
    capture = sweep.chosen_heads(MODEL)
    assert capture == Capture("logits", layers=(2, 7, 12, 16, 21), heads=(4, 12))


def test_chosen_heads_of_a_small_model_are_as_many_as_there_are() -> None:
    small = SimpleNamespace(attention_layers=(1, 3), n_head=4)
    capture = sweep.chosen_heads(small)  # pyright: ignore[reportArgumentType]
    assert capture.layers == (1, 3)
    assert capture.heads == (0, 1, 2, 3)


def test_contexts_beyond_the_model_or_the_memory_are_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_token = 2 * 2 * 24 * 4 * 64 + 2 * 4 * 512 * 16 + 12 * 24 * 16 * 4
    monkeypatch.setattr(sweep, "physical_memory_bytes", lambda: int((4936 + n_token * 1100) / 0.9))
    fitting, left_out = sweep.fitting_contexts(MODEL, (4096, 256, 1200, 1024))
    assert fitting == [256, 1024]
    assert [row.name for row in left_out] == ["context 1,200", "context 4,096"]
    assert "it needs about" in left_out[0].reason
    assert left_out[1].reason == "the model was trained with 2,048 tokens"
    assert sweep.fitting_contexts(MODEL, (256,), trained_only=False) == ([256], [])


def test_shorter_prompt_of_random_ids_begins_a_longer_one() -> None:
    assert sweep.prompt_ids(100, 32000) == sweep.prompt_ids(1000, 32000)[:100]


# ---- the table


def row(capture: str, n_context: int, ratio: float) -> records.SweepRow:
    pairs = Pairs([10.0] * 5, [10.0 * ratio] * 5)
    return records.SweepRow(capture, True, n_context, n_context * 4, pairs)


def test_table_has_a_line_a_capture_and_a_column_a_context() -> None:
    found = [row("off", 256, 1.0), row("probs", 256, 1.05), row("probs", 1024, 0.98)]
    (table,) = records.tables(found)
    assert table.columns == ["capture", "bytes a token", "256 tokens", "1,024 tokens"]
    assert table.lines == [
        ["none: ms a token", "", "10.00", "10.00"],
        ["none, once more", "1.02 kB", "+0.0 (+0.0)", ""],
        ["probs", "4.1 kB", "+5.0 (+5.0)", "-2.0 (-2.0)"],
    ]


# ---- the machine
