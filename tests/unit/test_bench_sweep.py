"""The sweep against a fake engine: what it runs, in which order, and what it leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from kqview import Capture, ModelInfo
from kqview.bench import facts, rows, runs, sweep
from kqview.bench.pairs import Pairs
from kqview.errors import InvalidCapture, OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

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
) -> list[rows.SweepRow | rows.LeftOut]:
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
    assert isinstance(probs, rows.SweepRow)
    assert [row.name for row in (off, logits, probs)] == [
        f"context-16-flash-{name}" for name in ("off", "logits", "probs")
    ]
    assert probs.pairs == Pairs([1000.0] * 5, [2000.0] * 5)
    assert isinstance(logits, rows.SweepRow)
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
    assert [row.name for row in found] == sweep.SweepPlan(
        contexts=(16, 32), captures=("logits", "probs")
    ).row_names
    short, long = engines[0].prompts[0], engines[0].prompts[-1]
    assert (len(short), len(long)) == (16, 32)
    assert long[:16] == short  # what the slot holds is not evaluated again


def test_way_that_is_refused_leaves_the_others() -> None:
    logits, probs = measure([], captures=("top-8", "logits"))[-2:]
    refused = measure([], captures=("top-8", "logits"))[0]
    assert isinstance(refused, rows.LeftOut)
    assert refused.name == "context-16-flash-top-8"
    assert "top_k is not in this version" in refused.reason
    assert not refused.is_failure
    assert isinstance(logits, rows.SweepRow)
    assert isinstance(probs, rows.SweepRow)


def test_context_without_room_is_left_out_and_the_shorter_ones_are_measured() -> None:
    found = measure([], memory_tokens=100, contexts=(16, 1024), captures=("logits",))
    assert [row.name for row in found] == [
        "context-1024-flash-*", "context-16-flash-off", "context-16-flash-logits",
    ]  # fmt: skip
    assert isinstance(found[0], rows.LeftOut)


def test_progress_reaches_the_number_of_runs_also_where_rows_are_left_out() -> None:
    engines: list[FakeEngine] = []

    def open_engine(n_ctx: int, flash_attn: bool) -> Any:
        if n_ctx > 100:
            raise OutOfMemory("no room")
        engines.append(FakeEngine(n_ctx, flash_attn))
        return engines[-1]

    plan = sweep.SweepPlan(contexts=(16, 1024), captures=("logits", "top-8"), n_tokens=8)
    done: list[int] = []
    list(sweep.sweep(open_engine, plan, lambda _, n_runs: done.append(n_runs)))
    assert sum(done) == plan.n_runs


# ---- what is measured


def test_ten_heads_of_24_layers_are_two_heads_in_five_layers() -> None:
    capture = sweep.chosen_heads(MODEL)
    assert capture == Capture("logits", layers=(2, 7, 12, 16, 21), heads=(4, 12))


def test_chosen_heads_of_a_small_model_are_as_many_as_there_are() -> None:
    small = SimpleNamespace(attention_layers=(1, 3), n_head=4)
    capture = sweep.chosen_heads(small)  # pyright: ignore[reportArgumentType]
    assert capture.layers == (1, 3)
    assert capture.heads == (0, 1, 2, 3)


def test_every_name_of_a_capture_is_known() -> None:
    assert tuple(sweep.captures(MODEL)) == sweep.CAPTURE_NAMES


def test_contexts_beyond_the_model_or_the_memory_are_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_token = 2 * 2 * 24 * 4 * 64 + 2 * 4 * 512 * 16 + 12 * 24 * 16 * 4
    monkeypatch.setattr(sweep, "physical_memory_bytes", lambda: int((4936 + n_token * 1100) / 0.9))
    fitting, left_out = sweep.fitting_contexts(MODEL, (4096, 256, 1200, 1024))
    assert fitting == [256, 1024]
    assert [row.name for row in left_out] == ["context 1,200", "context 4,096"]
    assert "GB may be used" in left_out[0].reason
    assert left_out[1].reason == "the model was trained with 2,048 tokens"
    assert sweep.fitting_contexts(MODEL, (256,), trained_only=False) == ([256], [])


def test_shorter_prompt_of_random_ids_begins_a_longer_one() -> None:
    assert runs.prompt_ids(100, 32000) == runs.prompt_ids(1000, 32000)[:100]


# ---- the table


def row(capture: str, n_context: int, ratio: float) -> rows.SweepRow:
    pairs = Pairs([10.0] * 5, [10.0 * ratio] * 5)
    return rows.SweepRow(capture, True, n_context, n_context * 4, pairs)


def test_table_has_a_line_a_capture_and_a_column_a_context() -> None:
    found = [row("off", 256, 1.0), row("probs", 256, 1.05), row("probs", 1024, 0.98)]
    (table,) = rows.tables(found)
    assert table.columns == ["capture", "bytes a token", "256 tokens", "1,024 tokens"]
    assert table.lines == [
        ["none: ms a token", "", "10.00", "10.00"],
        ["none, once more", "1.02 kB", "+0.0 (+0.0)", ""],
        ["probs", "4.1 kB", "+5.0 (+5.0)", "-2.0 (-2.0)"],
    ]


def test_overhead_of_few_pairs_has_no_bound() -> None:
    assert rows.overhead(Pairs([1.0], [1.5])) == "+50.0"


# ---- the machine


def test_cpu_name_shows_what_a_virtual_machine_hides(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(
        "model name\t: Chip\ncpu family\t: 6\nmodel\t\t: 167\nflags\t\t: sse avx avx2\n"
    )
    assert facts.cpu_name(path) == "Chip (family 6, model 167, avx2)"


def test_facts_are_plain_values_that_name_the_commits() -> None:
    found = facts.facts()
    assert len(found["llama_cpp_commit"]) == 40
    assert found["n_cores"] >= 1
    assert np.datetime64(found["date"][:19]) > np.datetime64("2024-01-01")
