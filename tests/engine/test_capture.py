"""What a request asks to capture: layers, heads, types, reductions, the k largest values.

Asking changes nothing else. Each comparison of two captures uses two fresh engines, so that both
prefill the same way and equal means bit for bit. Flash attention off and an F32 cache where ids of
different runs must agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, errors
from tests.support.rows import (
    KINDS,
    Kind,
    forward,
    has_device,
    has_gpu,
    largest_error,
    near,
    random_ids,
    run,
    same_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kqview.types import Token
    from tests.engine.conftest import MakeEngine

pytestmark = pytest.mark.usefixtures("backend")

PROMPT = random_ids(29)
N_LAYER, N_HEAD = 3, 4


@pytest.fixture(params=[False, True], ids=["flash_off", "flash_on"])
def flash_attn(request: pytest.FixtureRequest) -> bool:
    return request.param


def captured(
    make_engine: MakeEngine, model: Path, capture: Capture | str | None, **options: Any
) -> list[Token]:
    """Twelve tokens of an engine that does nothing else."""
    return run(make_engine(model, **options), PROMPT, 12, capture=capture)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layers", "heads"),
    [
        ((2, 0), None),
        (None, (3, 1)),
        ((1, 2, 0), (2, 0, 3)),
        ((1,), (2,)),
        ((2, 1, 0), (3, 2, 1, 0)),
    ],
)
def test_chosen_layers_and_heads_come_in_the_order_asked_for(
    make_engine: MakeEngine,
    tiny_llama: Path,
    kind: Kind,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    flash_attn: bool,
) -> None:
    full = captured(make_engine, tiny_llama, kind, flash_attn=flash_attn)
    chosen = captured(
        make_engine, tiny_llama, Capture(kind, layers=layers, heads=heads), flash_attn=flash_attn
    )
    rows = np.ix_(layers or range(N_LAYER), heads or range(N_HEAD))
    for part, whole in zip(chosen, full, strict=True):
        np.testing.assert_array_equal(np.asarray(part.attention), np.asarray(whole.attention)[rows])


def test_qk_and_logits_are_two_names_of_one_kind(make_engine: MakeEngine, tiny_llama: Path) -> None:
    rows = [run(make_engine(tiny_llama), PROMPT, 4, capture=kind) for kind in ("qk", "logits")]
    for one, other in zip(*rows, strict=True):
        assert one.rows.any()
        np.testing.assert_array_equal(one.rows, other.rows)
    assert [row[0].capture.kind for row in rows if row[0].capture] == ["qk", "logits"]


@pytest.mark.parametrize("kind", KINDS)
def test_float16_equals_float32_rounded(
    make_engine: MakeEngine, tiny_qwen2: Path, kind: Kind, flash_attn: bool
) -> None:
    wide = captured(make_engine, tiny_qwen2, kind, flash_attn=flash_attn)
    half = captured(make_engine, tiny_qwen2, Capture(kind, dtype="float16"), flash_attn=flash_attn)
    for a, b in zip(half, wide, strict=True):
        assert np.asarray(a.attention).dtype == np.float16
        np.testing.assert_array_equal(
            np.asarray(a.attention), np.asarray(b.attention).astype(np.float16)
        )


@pytest.mark.parametrize("capture", [*KINDS, Capture("probs", layers=[1], dtype="float16")])
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_capture_changes_no_id_and_no_logprob(
    make_engine: MakeEngine,
    tiny_llama: Path,
    capture: Capture | str,
    kv_type: str,
    flash_attn: bool,
) -> None:
    if has_gpu() and not flash_attn:
        pytest.skip("capture in the step's graph ends a fusion of ggml-cuda's: see EXACTNESS.md")
    with_capture, without = (
        run(
            make_engine(tiny_llama, kv_type=kv_type, flash_attn=flash_attn),
            PROMPT, 100, capture=asked, top_logprobs=5,
        )
        for asked in (capture, None)
    )  # fmt: skip
    assert all(token.attention is None for token in without)
    assert [token.id for token in with_capture] == [token.id for token in without]
    assert [token.logprob for token in with_capture] == [token.logprob for token in without]
    assert [token.top_logprobs for token in with_capture] == [
        token.top_logprobs for token in without
    ]


# What a request may ask for, and the nodes that it adds: a node a layer.
ALTERNATIVES: tuple[tuple[Capture | None, int], ...] = (
    (None, 0),
    (Capture("logits"), 3),
    (Capture("probs", layers=[2]), 1),
    (None, 0),
    (Capture("scores", layers=[0, 1]), 2),
    (Capture("probs", heads=[3, 0], dtype="float16"), 3),
    (Capture("logits", layers=[1, 2]), 2),
)


def test_200_alternating_requests_have_the_rows_of_engines_that_never_alternate(
    make_engine: MakeEngine, tiny_llama: Path, flash_attn: bool
) -> None:
    options = {"kv_type": "f32", "flash_attn": flash_attn}
    # Two prompts of one length: a stale graph would have the right shape.
    prompts = [random_ids(21, seed=1), random_ids(21, seed=2)]
    expected = [
        [
            run(make_engine(tiny_llama, **options), prompt, 3, capture=capture)
            for capture, _ in ALTERNATIVES
        ]
        for prompt in prompts
    ]
    engine = make_engine(tiny_llama, **options)
    order = np.random.default_rng(0).integers(0, len(ALTERNATIVES), 200)
    for turn, chosen in enumerate(order):
        capture, n_nodes = ALTERNATIVES[chosen]
        tokens = run(engine, prompts[turn % 2], 3, capture=capture)
        # Rows of kqview's own attention need no node, and a device takes several stock nodes for
        # each of ours.
        n_nodes = 0 if engine.attention_kernel == "kqview" else n_nodes
        assert engine.stats().graph_nodes_added == n_nodes or (has_device() and n_nodes)
        alone = expected[turn % 2][chosen]
        assert [token.id for token in tokens] == [token.id for token in alone]
        if capture is None:
            assert all(token.attention is None for token in tokens)
        else:
            assert same_rows(tokens, alone)


def test_requests_of_one_plan_share_their_graph(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    run(engine, PROMPT, 20, capture="probs")
    before = engine.stats()
    run(engine, [*PROMPT, *random_ids(5)], 20, capture="probs")
    after = engine.stats()
    # The prefill has a batch shape of its own, and so has the return to single tokens.
    assert after.graph_builds - before.graph_builds <= 2
    assert after.graph_reuses - before.graph_reuses >= 18


def test_engine_that_never_captures_adds_no_node(
    make_engine: MakeEngine, tiny_llama: Path, flash_attn: bool
) -> None:
    engine = make_engine(tiny_llama, flash_attn=flash_attn)
    run(engine, PROMPT, 20)
    stats = engine.stats()
    assert stats.graph_nodes_added == 0
    assert stats.attention_bytes == 0
    assert stats.pool.n_allocations == 0


def test_closed_generation_of_another_plan_leaves_rows_right(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, kv_type="f32", flash_attn=False)
    abandoned = engine.generate(PROMPT, max_tokens=100, ignore_eos=True, capture="probs")
    next(abandoned)
    abandoned.close()
    tokens = run(engine, PROMPT, 8, capture="logits")
    result = forward(tiny_llama, PROMPT, tokens)
    assert largest_error(tokens, result, "logits", PROMPT) <= near(1e-5)


def test_attention_bytes_count_what_was_handed_out(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    capture = Capture("probs", layers=[0, 2], heads=[1], dtype="float16")
    tokens = run(engine, PROMPT, 6, capture=capture)
    n_bytes = sum(np.asarray(token.attention).nbytes for token in tokens)
    assert engine.stats().attention_bytes == n_bytes
    assert n_bytes == sum(capture.bytes_per_token(engine.model, 29 + i) for i in range(6))


# ---- reductions and the k largest values: as numpy computes them from whole rows

PROMPT_40 = random_ids(40)
Array = np.ndarray[Any, Any]
REDUCTIONS: dict[Any, Callable[[Array], Array]] = {
    "mean_heads": lambda rows: rows.mean(1),
    "max_heads": lambda rows: rows.max(1),
    "mean": lambda rows: rows.mean((0, 1)),
    "max": lambda rows: rows.max((0, 1)),
}


def reduced_tokens(
    make_engine: MakeEngine, model: Path, capture: Capture, **options: Any
) -> list[Any]:
    engine = make_engine(model, **options)
    return run(engine, PROMPT_40, 5, capture=capture)


def largest(rows: Array, k: int) -> tuple[Array, Array]:
    """Values and positions of the k largest of the last axis, the earlier one among equals."""
    order = np.argsort(-rows, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(rows, order, -1), order


@pytest.mark.parametrize(
    ("reduce", "kind", "n_threads"),
    [
        (reduce, KINDS[(i + j) % len(KINDS)], n_threads)
        for i, reduce in enumerate(REDUCTIONS)
        for j, n_threads in enumerate((1, 2, 3, 6))
    ],
)
def test_reduced_rows_equal_numpy(
    make_engine: MakeEngine,
    tiny_llama: Path,
    reduce: Any,
    kind: Kind,
    n_threads: int,
    flash_attn: bool,
) -> None:
    options = {"flash_attn": flash_attn, "n_threads": n_threads}
    full = reduced_tokens(make_engine, tiny_llama, Capture(kind), **options)
    reduced = reduced_tokens(make_engine, tiny_llama, Capture(kind, reduce=reduce), **options)
    for whole, token in zip(full, reduced, strict=True):
        want = REDUCTIONS[reduce](whole.attention)
        assert token.attention.shape == want.shape
        assert token.attention.flags.c_contiguous
        scale = np.abs(whole.attention).max()
        np.testing.assert_allclose(token.attention, want, atol=1e-6 * scale)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_reductions_of_chosen_heads_and_layers_as_float16(
    make_engine: MakeEngine, tiny_llama: Path, reduce: Any, flash_attn: bool
) -> None:
    chosen: dict[str, Any] = {"layers": (2, 0), "heads": (3, 1, 0)}
    full = reduced_tokens(
        make_engine, tiny_llama, Capture("probs", **chosen), flash_attn=flash_attn
    )
    half = Capture("probs", reduce=reduce, dtype="float16", **chosen)
    for whole, token in zip(
        full, reduced_tokens(make_engine, tiny_llama, half, flash_attn=flash_attn), strict=True
    ):
        assert token.attention.dtype == np.float16
        np.testing.assert_allclose(token.attention, REDUCTIONS[reduce](whole.attention), atol=1e-3)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("n_threads", [1, 2])
def test_reduced_prompt_rows_equal_numpy(
    make_engine: MakeEngine, tiny_llama: Path, reduce: Any, n_threads: int, flash_attn: bool
) -> None:
    engine = make_engine(tiny_llama, n_ubatch=16, n_threads=n_threads, flash_attn=flash_attn)
    want = REDUCTIONS[reduce](engine.attend(PROMPT_40, "probs").array())
    got = engine.attend(PROMPT_40, Capture("probs", reduce=reduce)).array()
    assert isinstance(got, np.ndarray)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=near(1e-6))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 7, 40, 1000])
def test_the_k_largest_equal_a_sort(
    make_engine: MakeEngine, tiny_llama: Path, kind: Kind, k: int, flash_attn: bool
) -> None:
    full = reduced_tokens(make_engine, tiny_llama, Capture(kind), flash_attn=flash_attn)
    top = reduced_tokens(make_engine, tiny_llama, Capture(kind, top_k=k), flash_attn=flash_attn)
    for whole, token in zip(full, top, strict=True):
        values, positions = largest(whole.attention, k)
        np.testing.assert_array_equal(token.attention, values)
        np.testing.assert_array_equal(token.attention_positions, positions)
        assert token.attention.dtype == np.float32
        assert token.attention_positions.dtype == np.int32
        assert not token.attention_positions.flags.writeable


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_the_k_largest_of_reduced_rows(
    make_engine: MakeEngine, tiny_llama: Path, reduce: Any
) -> None:
    reduced = reduced_tokens(make_engine, tiny_llama, Capture("probs", reduce=reduce))
    top = reduced_tokens(make_engine, tiny_llama, Capture("probs", reduce=reduce, top_k=4))
    for whole, token in zip(reduced, top, strict=True):
        values, positions = largest(whole.attention, 4)
        # Where layers are joined on a device, and where on the host, sums have another order.
        error = 1e-6 if has_device() else 0
        np.testing.assert_allclose(token.attention, values, rtol=error, atol=0)
        np.testing.assert_array_equal(token.attention_positions, positions)


def test_the_k_largest_of_prompt_rows(make_engine: MakeEngine, tiny_llama: Path) -> None:
    # F32, so that what steps of 40 and of 16 tokens round in another way decides no half.
    full = make_engine(tiny_llama, kv_type="f32").attend(PROMPT_40, "probs").array()
    assert isinstance(full, np.ndarray)
    for n_ubatch in (512, 16):
        rows = make_engine(tiny_llama, kv_type="f32", n_ubatch=n_ubatch).attend(
            PROMPT_40, Capture("probs", top_k=3)
        )
        values, positions = rows.top_k()
        assert isinstance(values, np.ndarray)
        assert values.shape == positions.shape == (3, 4, 40, 3)  # type: ignore[union-attr]
        want, _ = largest(full, 3)
        np.testing.assert_allclose(values, want, atol=near(1e-5))
        seen = np.take_along_axis(full, np.asarray(positions, np.int64), -1)
        np.testing.assert_allclose(seen, want, atol=near(1e-5))


def test_positions_need_top_k(make_engine: MakeEngine, tiny_llama: Path) -> None:
    with pytest.raises(errors.InvalidCapture, match="top_k"):
        make_engine(tiny_llama).attend(PROMPT_40, "probs").top_k()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("reduce", [None, *REDUCTIONS])
@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("hidden", [(), (0, 2)])
def test_bytes_per_token_is_what_the_arrays_take(
    make_engine: MakeEngine, tiny_llama: Path, dtype: Any, reduce: Any, top_k: Any, hidden: Any
) -> None:
    capture = Capture("probs", dtype=dtype, reduce=reduce, top_k=top_k, hidden=hidden)
    engine = make_engine(tiny_llama)
    token = run(engine, PROMPT_40, 1, capture=capture)[0]
    arrays = (token.attention, token.attention_positions, token.hidden)
    n_bytes = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    assert capture.bytes_per_token(engine.model, len(PROMPT_40)) == n_bytes


def test_reductions_and_whole_rows_alternate(
    make_engine: MakeEngine, tiny_llama: Path, flash_attn: bool
) -> None:
    engine = make_engine(tiny_llama, flash_attn=flash_attn)
    captures = [Capture("probs"), *(Capture("probs", reduce=r) for r in REDUCTIONS)]
    captures += [Capture("probs", top_k=2), Capture("logits", hidden=[1])]
    run(engine, PROMPT_40, 3)  # from here on the slot holds the prompt: all prefill the same way
    first = [run(engine, PROMPT_40, 3, capture=capture) for capture in captures]
    for capture, before in zip(captures, first, strict=True):
        again = run(engine, PROMPT_40, 3, capture=capture)
        for a, b in zip(before, again, strict=True):
            np.testing.assert_array_equal(a.attention, b.attention)  # type: ignore[arg-type]


# ---- sums over spans

SPANS: list[tuple[int, int | None]] = [
    (0, 5),
    (3, 32),
    (32, None),
    (0, None),
    (29, 30),
    (900, None),
]


def summed(rows: Any) -> NDArray[np.float64]:
    """The sums of whole rows over SPANS, in float64."""
    wide = np.asarray(rows, np.float64)
    return np.stack([wide[..., start:stop].sum(-1) for start, stop in SPANS], -1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float16"},
        {"layers": (2, 0), "heads": (3, 1, 0)},
        {"reduce": "mean_heads"},
        {"reduce": "max", "dtype": "float16"},
    ],
    ids=lambda options: "-".join(options) or "all",
)
def test_spans_are_sums_of_whole_rows(
    make_engine: MakeEngine, tiny_llama: Path, options: dict[str, Any], flash_attn: bool
) -> None:
    whole, part = (
        captured(
            make_engine, tiny_llama, Capture("probs", spans=spans, **options), flash_attn=flash_attn
        )
        for spans in (None, SPANS)
    )
    half = options.get("dtype") == "float16"
    # A row of float16 has been rounded before it is summed here.
    near = {"rtol": 2e-3, "atol": 1e-5} if half else {"rtol": 2e-6, "atol": 1e-12}
    for sums, rows in zip(part, whole, strict=True):
        assert isinstance(sums.attention, np.ndarray)
        assert sums.attention.dtype == (np.float16 if half else np.float32)
        assert not sums.attention.flags.writeable
        np.testing.assert_allclose(sums.attention, summed(rows.attention), **near)
        assert not sums.attention[..., -1].any()  # a range of columns that are not there yet


def test_spans_of_every_row_of_a_prompt(
    make_engine: MakeEngine, tiny_llama: Path, flash_attn: bool
) -> None:
    engine = make_engine(tiny_llama, flash_attn=flash_attn)
    whole = engine.attend(PROMPT, Capture("probs")).array()
    sums = engine.attend(PROMPT, Capture("probs", spans=SPANS)).array()
    assert isinstance(sums, np.ndarray)
    assert sums.shape == (N_LAYER, N_HEAD, len(PROMPT), len(SPANS))
    np.testing.assert_allclose(sums, summed(whole), rtol=2e-6, atol=1e-12)


def test_spans_of_each_slot_and_after_a_shift_are_of_its_own_columns(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    # What shares a step with what depends on time, which moves last bits.
    engine = make_engine(tiny_llama, n_slots=3, n_ctx=64, kv_type="f32", flash_attn=False)
    shift: dict[str, Any] = {"context_shift": True, "n_keep": 4}

    def rows(spans: list[tuple[int, int | None]] | None) -> list[list[Token]]:
        capture = Capture("probs", spans=spans)
        jobs = [
            engine.generate(
                random_ids(n, seed=n), max_tokens=60, temperature=0, ignore_eos=True,
                capture=capture, slot=i, cache_prompt=False, **shift,
            )
            for i, n in enumerate((20, 33, 47))
        ]  # fmt: skip
        return [list(job) for job in jobs]

    for whole, part in zip(rows(None), rows(SPANS), strict=True):
        assert [token.id for token in part] == [token.id for token in whole]
        assert any(token.discarded for token in part)
        for sums, token in zip(part, whole, strict=True):
            assert sums.discarded == token.discarded
            np.testing.assert_allclose(
                np.asarray(sums.attention),
                summed(token.attention),
                rtol=near(1e-3),
                atol=near(1e-5),
            )


def test_spans_take_less_memory_and_the_same_nodes(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    # A device has nodes of its own, and kqview's attention has none.
    engine = make_engine(tiny_llama, n_gpu_layers=0, attention_kernel="llama.cpp")
    capture = Capture("probs", spans=[(0, 4), (4, None)])
    run(engine, PROMPT, 3, capture=capture)
    assert engine.stats().graph_nodes_added == N_LAYER
    n_bytes = engine.stats().attention_bytes
    assert (
        n_bytes == 3 * capture.bytes_per_token(engine.model, 1000) == 3 * N_LAYER * N_HEAD * 2 * 4
    )


# ---- the model's output


@pytest.mark.parametrize("layers", [None, ()])
def test_vocab_logits_are_what_the_next_token_is_chosen_from(
    make_engine: MakeEngine, tiny_llama: Path, layers: tuple[int, ...] | None
) -> None:
    engine = make_engine(tiny_llama)
    n_vocab = engine.model.n_vocab
    tokens = run(
        engine, PROMPT, 8, capture=Capture("probs", layers=layers, vocab_logits=True),
        top_logprobs=3, repeat_penalty=1.5, logit_bias={5: 4.0},
    )  # fmt: skip
    for token in tokens:
        assert (token.attention is None) == (layers == ())
        assert token.logits is not None
        assert (token.logits.shape, token.logits.dtype) == ((n_vocab,), np.float32)
        assert not token.logits.flags.writeable
        # As logprobs are: before bias and penalties.
        logits = token.logits.astype(np.float64)
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert token.logprob == pytest.approx(logprobs[token.id], abs=1e-4)
        assert token.top_logprobs is not None
        assert [one for one, _ in token.top_logprobs] == np.argsort(-logits)[:3].tolist()


def test_vocab_logits_stay_valid_and_count_in_the_pool(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    capture = Capture(layers=(), vocab_logits=True)
    engine = make_engine(tiny_llama, poisons_blocks=True)
    tokens = run(engine, PROMPT, 20, capture=capture)
    kept = [np.array(token.logits) for token in tokens]
    n_bytes = capture.bytes_per_token(engine.model, 500)
    assert n_bytes == 4 * engine.model.n_vocab
    assert engine.stats().attention_bytes == 20 * n_bytes
    assert engine.stats().pool.leased_bytes >= 20 * n_bytes
    logits = [token.logits for token in tokens]
    del tokens
    run(engine, random_ids(9), 20, capture=capture)
    for one, copy in zip(logits, kept, strict=True):
        assert one is not None
        np.testing.assert_array_equal(one, copy)
    assert not np.array_equal(kept[0], kept[1])
    assert engine.stats().graph_nodes_added == 0


def test_vocab_logits_of_a_steered_generation_are_the_models_own(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    options: dict[str, Any] = {"capture": Capture(layers=(), vocab_logits=True), "temperature": 0}
    plain = run(make_engine(tiny_llama), PROMPT, 6, **options)
    steered = run(
        make_engine(tiny_llama),
        PROMPT,
        6,
        logits_processor=lambda ids, logits: logits + 1,
        **options,
    )
    for one, other in zip(steered, plain, strict=True):
        assert one.id == other.id
        np.testing.assert_array_equal(one.logits, other.logits)  # type: ignore[arg-type]


def test_attend_has_no_vocab_logits(make_engine: MakeEngine, tiny_llama: Path) -> None:
    with pytest.raises(errors.InvalidCapture, match="leave vocab_logits out"):
        make_engine(tiny_llama).attend(PROMPT, Capture("probs", vocab_logits=True))
