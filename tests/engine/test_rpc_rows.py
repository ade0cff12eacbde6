"""Attention rows of layers on RPC servers equal those of the same model in this process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kqview import Capture, Engine, errors
from tests.support import stock
from tests.support.rpc_server import RpcServer, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.engine.conftest import MakeEngine

pytestmark = pytest.mark.peers

PROMPT = list(range(65, 95))
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}
TOLERANCE = {False: 1e-5, True: 2e-3}  # flash attention off and on, of the largest value of a row
F32 = NDArray[np.float32]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RpcServer]]:
    try:
        stock.find_binary("ggml-rpc-server")
    except stock.PeersMissing as missing:
        pytest.skip(str(missing))
    with serving() as first, serving() as second:
        yield [first, second]


# Where the three layers of the model lie.
PLACES: dict[str, dict[str, Any]] = {
    "one server": {"n_servers": 1, "n_gpu_layers": -1},
    "two servers": {"n_servers": 2, "n_gpu_layers": -1},
    "one layer here": {"n_servers": 1, "n_gpu_layers": 3},
    "two layers here": {"n_servers": 2, "n_gpu_layers": 2},
    "output alone there": {"n_servers": 1, "n_gpu_layers": 1},
}


@pytest.fixture(params=PLACES.values(), ids=PLACES.keys())
def place(request: pytest.FixtureRequest, servers: list[RpcServer]) -> dict[str, Any]:
    """Options that put layers on servers."""
    where = request.param
    endpoints = [server.endpoint for server in servers[: where["n_servers"]]]
    return {"rpc_servers": endpoints, "n_gpu_layers": where["n_gpu_layers"]}


def rows_of(engine: Engine, capture: Capture | str, n: int = 12) -> tuple[list[int], list[F32]]:
    tokens = list(engine.generate(PROMPT, max_tokens=n, capture=capture, **GREEDY))
    return [token.id for token in tokens], [np.asarray(token.attention) for token in tokens]


def assert_rows_equal(got: list[F32], want: list[F32], tolerance: float) -> None:
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
        finite = np.isfinite(theirs)
        np.testing.assert_array_equal(np.isfinite(mine), finite)
        scale = np.abs(np.where(finite, theirs, 0)).max(axis=-1, keepdims=True)
        error = np.abs(np.where(finite, mine, 0) - np.where(finite, theirs, 0)) / scale
        assert error.max() <= tolerance


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("kind", ["logits", "scores", "probs"])
def test_rows_over_servers_equal_local_ones(
    make_engine: MakeEngine, tiny_qwen2: Path, place: dict[str, Any], kind: str, flash_attn: bool
) -> None:
    options = {"kv_type": "f32", "flash_attn": flash_attn}
    want_ids, want = rows_of(make_engine(tiny_qwen2, **options), kind)
    engine = make_engine(tiny_qwen2, **place, **options)
    ids, got = rows_of(engine, kind)
    assert ids == want_ids
    assert_rows_equal(got, want, TOLERANCE[flash_attn])
    assert not np.array_equal(got[-1][0], got[-1][1])  # the comparison sees which layer it is


@pytest.mark.parametrize(
    "capture",
    [
        Capture("probs", layers=[2, 0], heads=[3, 1]),
        Capture("probs", dtype="float16"),
        Capture("probs", reduce="mean_heads"),
        Capture("scores", reduce="max"),
        Capture("logits", reduce="mean"),
        Capture("logits", heads=[3, 1], reduce="mean_heads"),
        Capture("scores", heads=[2], reduce="max_heads"),
        Capture("logits", layers=[1]),
    ],
    ids=str,
)
def test_plans_over_two_servers_equal_local_ones(
    make_engine: MakeEngine, tiny_qwen2: Path, servers: list[RpcServer], capture: Capture
) -> None:
    _, want = rows_of(make_engine(tiny_qwen2, **EXACT), capture)
    endpoints = [server.endpoint for server in servers]
    _, got = rows_of(make_engine(tiny_qwen2, rpc_servers=endpoints, **EXACT), capture)
    assert_rows_equal(got, want, 2e-3 if capture.dtype == "float16" else 1e-5)


def test_a_server_sends_only_what_a_reduction_leaves(
    make_engine: MakeEngine, tiny_qwen2: Path, servers: list[RpcServer]
) -> None:
    engine = make_engine(tiny_qwen2, rpc_servers=[servers[0].endpoint], **EXACT)

    def sent_bytes(capture: Capture) -> int:
        before = engine.stats()
        rows_of(engine, capture)
        made = engine.stats().since(before)
        assert made.device_copies == made.captured_steps == 12  # one answer a step
        return made.device_copy_bytes

    whole = sent_bytes(Capture("logits"))  # 3 layers of 4 heads
    assert sent_bytes(Capture("logits", reduce="max_heads")) == whole // 4
    assert sent_bytes(Capture("logits", heads=[0, 2], reduce="mean_heads")) == whole // 4
    assert sent_bytes(Capture("logits", reduce="mean")) == whole // 12


def test_largest_values_and_hidden_states_over_two_servers_equal_local_ones(
    make_engine: MakeEngine, tiny_qwen2: Path, servers: list[RpcServer]
) -> None:
    capture = Capture("probs", top_k=3, hidden=[0, 2])

    def all_of(engine: Engine) -> list[tuple[Any, Any, Any]]:
        tokens = engine.generate(PROMPT, max_tokens=6, capture=capture, **GREEDY)
        return [
            (np.array(t.attention), np.array(t.attention_positions), np.array(t.hidden))
            for t in tokens
        ]

    endpoints = [server.endpoint for server in servers]
    want = all_of(make_engine(tiny_qwen2, **EXACT))
    got = all_of(make_engine(tiny_qwen2, rpc_servers=endpoints, **EXACT))
    for (values, positions, hidden), (values_, positions_, hidden_) in zip(got, want, strict=True):
        np.testing.assert_allclose(values, values_, rtol=1e-5)
        np.testing.assert_array_equal(positions, positions_)
        np.testing.assert_allclose(hidden, hidden_, rtol=1e-4, atol=1e-5)


def test_rows_of_the_prompt_over_servers_equal_local_ones(
    make_engine: MakeEngine, tiny_qwen2: Path, place: dict[str, Any]
) -> None:
    options = {"n_ubatch": 8, **EXACT}  # several chunks
    want = make_engine(tiny_qwen2, **options).attend(PROMPT, "probs").array()
    got = make_engine(tiny_qwen2, **place, **options).attend(PROMPT, "probs").array()
    assert_rows_equal([got], [want], 1e-5)


def test_rows_of_several_slots_over_two_servers_equal_local_ones(
    make_engine: MakeEngine, tiny_qwen2: Path, servers: list[RpcServer]
) -> None:
    prompts = [PROMPT, PROMPT[::-1], PROMPT[:7]]
    kinds = ["probs", "logits", None]

    def all_of(engine: Engine) -> list[list[Any]]:
        running = [
            engine.generate(ids, max_tokens=8, capture=kind, **GREEDY)
            for ids, kind in zip(prompts, kinds, strict=True)
        ]
        return [[token.attention for token in one] for one in running]

    endpoints = [server.endpoint for server in servers]
    want = all_of(make_engine(tiny_qwen2, n_slots=3, **EXACT))
    got = all_of(make_engine(tiny_qwen2, n_slots=3, rpc_servers=endpoints, **EXACT))
    assert_rows_equal(got[0] + got[1], want[0] + want[1], 1e-5)
    assert got[2] == [None] * 8


def test_captured_and_plain_requests_alternate_over_a_server(
    make_engine: MakeEngine, tiny_qwen2: Path, servers: list[RpcServer]
) -> None:
    local = make_engine(tiny_qwen2, **EXACT)
    engine = make_engine(tiny_qwen2, rpc_servers=[servers[0].endpoint], **EXACT)
    _, want = rows_of(local, "probs", 3)
    for _ in range(10):
        engine.generate(PROMPT, max_tokens=3, **GREEDY).read()
        assert_rows_equal(rows_of(engine, "probs", 3)[1], want, 1e-5)


def test_no_made_up_row_is_handed_out_when_a_server_dies(
    make_engine: MakeEngine, tiny_qwen2: Path, servers: list[RpcServer]
) -> None:
    with serving() as dying:
        endpoints = [servers[0].endpoint, dying.endpoint]
        engine = make_engine(tiny_qwen2, n_ctx=4096, rpc_servers=endpoints)
        generation = engine.generate(PROMPT, max_tokens=4000, capture="probs", **GREEDY)
        rows = [np.array(next(generation).attention)]
        threading.Timer(0.3, dying.kill).start()
        with pytest.raises(errors.DecodeError, match=dying.endpoint):
            rows.extend(np.array(token.attention) for token in generation)
    for row in rows:
        np.testing.assert_allclose(row.sum(axis=-1), 1, atol=1e-3)
