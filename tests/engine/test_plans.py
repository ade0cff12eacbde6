"""What a request asks to capture, and that asking changes nothing else.

Each comparison of two captures uses two fresh engines, so that both prefill the same way and equal
means bit for bit. Flash attention off and an F32 cache where ids of different runs must agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture
from tests.support.devices import has_device
from tests.support.rows import (
    KINDS,
    Kind,
    forward,
    largest_error,
    random_ids,
    run,
    same_rows,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kqview.types import Token

    from .conftest import MakeEngine

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
        # A device takes several stock nodes for each of ours.
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
    assert largest_error(tokens, result, "logits", PROMPT) <= 1e-5


def test_attention_bytes_count_what_was_handed_out(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    capture = Capture("probs", layers=[0, 2], heads=[1], dtype="float16")
    tokens = run(engine, PROMPT, 6, capture=capture)
    n_bytes = sum(np.asarray(token.attention).nbytes for token in tokens)
    assert engine.stats().attention_bytes == n_bytes
    assert n_bytes == sum(capture.bytes_per_token(engine.model, 29 + i) for i in range(6))
