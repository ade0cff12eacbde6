"""Layers on RPC servers: llama.cpp's own server in other processes on the loopback device.

Tokens and attention rows equal those of the same model in this process. A server that goes away
ends the requests that need it with an error that names the server, never the process;
test_rpc_faults.py has the rarer faults.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kqview import Capture, Edit, Engine, errors
from tests.support import tiny_gguf
from tests.support.processes import free_port
from tests.support.rpc_server import HOST, RpcServer, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kqview import Generation, Token
    from tests.engine.conftest import MakeEngine

pytestmark = pytest.mark.needs("peers")

PROMPT = list(range(65, 80))
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "top_logprobs": 0}
EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}
LOGPROB_TOLERANCE = 1e-4  # two builds of llama.cpp: kernels may differ
PROMPT_S = 20.0  # "soon" on a loaded machine; what is tested for would take minutes or never end


@pytest.fixture
def server() -> Iterator[RpcServer]:
    with serving() as one:
        yield one


@pytest.fixture
def other_server() -> Iterator[RpcServer]:
    with serving() as one:
        yield one


def tokens_of(engine: Engine, n: int = 20, **options: Any) -> list[tuple[int, float]]:
    generation = engine.generate(PROMPT, max_tokens=n, **{**GREEDY, **options})
    return [(token.id, token.logprob or 0.0) for token in generation]


def assert_same(got: list[tuple[int, float]], want: list[tuple[int, float]]) -> None:
    assert [token_id for token_id, _ in got] == [token_id for token_id, _ in want]
    assert [p for _, p in got] == pytest.approx([p for _, p in want], abs=LOGPROB_TOLERANCE)


def take_until_killed(generation: Generation, taken: list[Token], server: RpcServer) -> None:
    """Take tokens; the server dies at the 20th, and more are asked for."""
    for token in generation:
        taken.append(token)
        if len(taken) == 20:
            server.kill()


def wait_until_lost(engine: Engine, limit_s: float = PROMPT_S) -> str:
    """Generate until a server is missed; return what the error says."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            tokens_of(engine, 50)
        except errors.DecodeError as error:
            return str(error)
    pytest.fail("the engine goes on generating without its server")


# ---- values


@pytest.mark.parametrize("n_gpu_layers", [-1, 3, 1, 0])
def test_generation_over_one_server_equals_local(
    make_engine: MakeEngine, tiny_llama: Path, server: RpcServer, n_gpu_layers: int
) -> None:
    want = tokens_of(make_engine(tiny_llama, **EXACT))
    engine = make_engine(
        tiny_llama, rpc_servers=[server.endpoint], n_gpu_layers=n_gpu_layers, **EXACT
    )
    assert_same(tokens_of(engine), want)


def test_generation_over_two_servers_equals_local_and_uses_both(
    make_engine: MakeEngine,
    tiny_qwen2: Path,
    server: RpcServer,
    other_server: RpcServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    want = tokens_of(make_engine(tiny_qwen2, **EXACT))
    caplog.set_level(logging.DEBUG, "kqview.llama")
    endpoints = [server.endpoint, other_server.endpoint]
    engine = make_engine(tiny_qwen2, rpc_servers=endpoints, **EXACT)
    assert_same(tokens_of(engine), want)
    holders = [line for line in caplog.messages if "model buffer size" in line]
    for one in (server, other_server):
        assert any(f":{one.port}]" in line for line in holders), holders
    assert engine.system_info()["rpc_servers"] == [
        {"endpoint": endpoint, "n_devices": 1, "lost": None} for endpoint in endpoints
    ]


def test_several_slots_over_two_servers_equal_local(
    make_engine: MakeEngine, tiny_llama: Path, server: RpcServer, other_server: RpcServer
) -> None:
    prompts = [PROMPT, PROMPT[::-1], PROMPT * 3]

    def all_of(engine: Engine) -> list[list[int]]:
        running = [engine.generate(ids, max_tokens=15, **GREEDY) for ids in prompts]
        return [[token.id for token in one] for one in running]

    want = all_of(make_engine(tiny_llama, n_slots=3, **EXACT))
    endpoints = [server.endpoint, other_server.endpoint]
    assert all_of(make_engine(tiny_llama, n_slots=3, rpc_servers=endpoints, **EXACT)) == want


def test_long_prompt_in_chunks_over_two_servers_equals_local(
    make_engine: MakeEngine, tiny_llama: Path, server: RpcServer, other_server: RpcServer
) -> None:
    options = {"n_ubatch": 32, **EXACT}
    want = [
        t.id
        for t in make_engine(tiny_llama, **options).generate(PROMPT * 20, max_tokens=5, **GREEDY)
    ]
    endpoints = [server.endpoint, other_server.endpoint]
    engine = make_engine(tiny_llama, rpc_servers=endpoints, **options)
    assert [t.id for t in engine.generate(PROMPT * 20, max_tokens=5, **GREEDY)] == want


def test_slot_is_saved_and_restored_over_a_server(
    make_engine: MakeEngine, tiny_llama: Path, server: RpcServer
) -> None:
    local = make_engine(tiny_llama, **EXACT)
    engine = make_engine(tiny_llama, rpc_servers=[server.endpoint], **EXACT)
    tokens_of(engine, 8)
    blob = engine.slots[0].save()
    local.slots[0].restore(blob, exact=True)
    want = [t.id for t in local.generate(local.slots[0].tokens, max_tokens=9, **GREEDY)]
    engine.slots[0].clear()
    engine.slots[0].restore(blob, exact=True)
    assert [t.id for t in engine.generate(engine.slots[0].tokens, max_tokens=9, **GREEDY)] == want
    assert engine.slots[0].shift(2, 3) > 0
    tokens_of(engine, 3)


def test_quantised_weights_and_cache_with_flash_attention_are_close_to_local(
    make_engine: MakeEngine, tmp_path: Path, server: RpcServer
) -> None:
    model = tiny_gguf.write_model(tmp_path / "q8_0.gguf", n_embd=128, weight_type="Q8_0")
    options = {"kv_type": "q8_0", "flash_attn": True}
    want = tokens_of(make_engine(model, **options), 1)
    engine = make_engine(model, rpc_servers=[server.endpoint], **options)
    got = tokens_of(engine)
    assert len(got) == 20
    assert got[0][1] == pytest.approx(want[0][1], abs=0.05)


# ---- engines that share a server


def test_engines_on_one_server_take_turns_and_survive_each_other(
    make_engine: MakeEngine, tiny_llama: Path, tiny_qwen2: Path, server: RpcServer
) -> None:
    models = (tiny_llama, tiny_qwen2)
    want = {model: tokens_of(make_engine(model, **EXACT), 100) for model in models}
    failures: list[BaseException] = []

    def work(model: Path) -> None:
        try:
            for _ in range(4):
                with Engine(
                    model, n_ctx=512, n_threads=1, rpc_servers=[server.endpoint], **EXACT
                ) as engine:
                    assert_same(tokens_of(engine, 100), want[model])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert failures == []


def test_closed_engine_gives_its_server_to_another_process(
    make_engine: MakeEngine, tiny_llama: Path, server: RpcServer
) -> None:
    engine = make_engine(tiny_llama, rpc_servers=[server.endpoint])
    tokens_of(engine)
    engine.close()  # the object is still held, and its weights with it
    # By another name this process takes it for another server, and connects anew.
    again = make_engine(tiny_llama, rpc_servers=[f"localhost:{server.port}"])
    assert len(tokens_of(again)) == 20


def test_server_in_use_by_another_client_is_named(
    make_engine: MakeEngine, tiny_llama: Path, server: RpcServer
) -> None:
    make_engine(tiny_llama, rpc_servers=[server.endpoint])
    with pytest.raises(errors.ModelLoadError, match=f"localhost:{server.port}.*another client"):
        make_engine(tiny_llama, rpc_servers=[f"localhost:{server.port}"], rpc_timeout_s=1)


# ---- servers that go away


def test_server_killed_while_idle_fails_the_next_requests_with_its_name(
    make_engine: MakeEngine, tiny_llama: Path, server: RpcServer, other_server: RpcServer
) -> None:
    engine = make_engine(tiny_llama, rpc_servers=[server.endpoint, other_server.endpoint])
    tokens_of(engine)
    other_server.kill()
    began = time.monotonic()
    with pytest.raises(errors.DecodeError, match=other_server.endpoint) as caught:
        tokens_of(engine)
    assert "closed the connection" in str(caught.value)
    with pytest.raises(errors.DecodeError, match=other_server.endpoint):
        tokens_of(engine)
    with pytest.raises(errors.DecodeError, match=other_server.endpoint):
        engine.slots[0].save()
    lost = {one["endpoint"]: one["lost"] for one in engine.system_info()["rpc_servers"]}
    assert lost == {server.endpoint: None, other_server.endpoint: "closed the connection"}
    engine.close()
    assert time.monotonic() - began < PROMPT_S


def test_server_killed_during_close_does_no_harm(tiny_llama: Path) -> None:
    for delay_s in (0.0, 0.002, 0.01):
        with serving() as server:
            engine = Engine(tiny_llama, n_ctx=512, n_threads=1, rpc_servers=[server.endpoint])
            tokens_of(engine, 5)
            killer = threading.Timer(delay_s, server.kill)
            killer.start()
            engine.close()
            del engine
            killer.join()


def test_engine_closes_at_once_while_its_server_hangs(
    make_engine: MakeEngine, tiny_llama: Path, server: RpcServer
) -> None:
    engine = make_engine(tiny_llama, rpc_servers=[server.endpoint], rpc_timeout_s=3000)
    tokens_of(engine)
    server.stop()
    generation = engine.generate(PROMPT, max_tokens=10, **GREEDY)
    while engine.health().phase != "decoding":
        time.sleep(0.001)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < PROMPT_S
    with pytest.raises(errors.ClosedError):
        generation.read()


def test_new_engine_works_on_a_server_that_was_started_again(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    want = tokens_of(make_engine(tiny_llama, **EXACT))
    port = free_port()
    engines: list[Engine] = []
    for _ in range(3):
        with serving(port) as server:
            # The engines before, dead and not closed, still hold what they had.
            engine = make_engine(tiny_llama, rpc_servers=[server.endpoint], **EXACT)
            engines.append(engine)
            assert_same(tokens_of(engine), want)
    assert server.endpoint in wait_until_lost(engines[0])


def test_lost_server_leaves_other_engines_alone(
    make_engine: MakeEngine, tiny_llama: Path, server: RpcServer, other_server: RpcServer
) -> None:
    dying = make_engine(tiny_llama, rpc_servers=[server.endpoint])
    living = make_engine(tiny_llama, rpc_servers=[other_server.endpoint])
    local = make_engine(tiny_llama)
    server.kill()
    wait_until_lost(dying)
    assert len(tokens_of(living)) == len(tokens_of(local)) == 20


# ---- servers that cannot be used


def test_refused_connection_is_a_load_error_with_the_endpoint(tiny_llama: Path) -> None:
    endpoint = f"{HOST}:{free_port()}"
    with pytest.raises(errors.ModelLoadError, match=endpoint):
        Engine(tiny_llama, rpc_servers=[endpoint])


def test_second_server_that_is_missing_frees_the_first(
    make_engine: MakeEngine, tiny_llama: Path, server: RpcServer
) -> None:
    with pytest.raises(errors.ModelLoadError, match="refuses connections"):
        Engine(tiny_llama, rpc_servers=[server.endpoint, f"{HOST}:{free_port()}"])
    assert len(tokens_of(make_engine(tiny_llama, rpc_servers=[f"localhost:{server.port}"]))) == 20


# ---- attention rows

ROW_PROMPT = list(range(65, 95))
ROW_GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
TOLERANCE = {False: 1e-5, True: 2e-3}  # flash attention off and on, of the largest value of a row
F32 = NDArray[np.float32]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RpcServer]]:
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
    tokens = list(engine.generate(ROW_PROMPT, max_tokens=n, capture=capture, **ROW_GREEDY))
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
    # A server computes attention as llama.cpp does.
    kernel = {"attention_kernel": "llama.cpp"}
    options: dict[str, Any] = {"kv_type": "f32", "flash_attn": flash_attn, **kernel}
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


def test_rows_beside_a_step_are_in_its_graph_on_a_server_and_the_log_says_so(
    make_engine: MakeEngine, tiny_qwen2: Path, servers: list[RpcServer],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    options: dict[str, Any] = {**EXACT, "flash_attn": True, "attention_kernel": "llama.cpp"}
    want_ids, want = rows_of(make_engine(tiny_qwen2, **options), "probs")
    endpoint = servers[0].endpoint
    engine = make_engine(tiny_qwen2, rpc_servers=[endpoint], device_rows="beside", **options)
    ids, got = rows_of(engine, "probs")
    assert ids == want_ids
    assert_rows_equal(got, want, TOLERANCE[True])
    assert engine.stats().graph_nodes_added > 0
    engine.close()
    (said,) = (line for line in caplog.messages if 'device_rows="beside"' in line)
    assert "has no effect on RPC" in said


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
        tokens = engine.generate(ROW_PROMPT, max_tokens=6, capture=capture, **ROW_GREEDY)
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
    want = make_engine(tiny_qwen2, **options).attend(ROW_PROMPT, "probs").array()
    got = make_engine(tiny_qwen2, **place, **options).attend(ROW_PROMPT, "probs").array()
    assert_rows_equal([got], [want], 1e-5)


def test_rows_of_several_slots_over_two_servers_equal_local_ones(
    make_engine: MakeEngine, tiny_qwen2: Path, servers: list[RpcServer]
) -> None:
    prompts = [ROW_PROMPT, ROW_PROMPT[::-1], ROW_PROMPT[:7]]
    kinds = ["probs", "logits", None]

    def all_of(engine: Engine) -> list[list[Any]]:
        running = [
            engine.generate(ids, max_tokens=8, capture=kind, **ROW_GREEDY)
            for ids, kind in zip(prompts, kinds, strict=True)
        ]
        return [[token.attention for token in one] for one in running]

    endpoints = [server.endpoint for server in servers]
    want = all_of(make_engine(tiny_qwen2, n_slots=3, **EXACT))
    got = all_of(make_engine(tiny_qwen2, n_slots=3, rpc_servers=endpoints, **EXACT))
    assert_rows_equal(got[0] + got[1], want[0] + want[1], 1e-5)
    assert got[2] == [None] * 8


def test_edits_over_two_servers_equal_local_ones(
    make_engine: MakeEngine, tiny_qwen2: Path, servers: list[RpcServer]
) -> None:
    endpoints = [server.endpoint for server in servers]
    local = make_engine(tiny_qwen2, **EXACT)
    engine = make_engine(tiny_qwen2, rpc_servers=endpoints, **EXACT)
    vector = np.random.default_rng(1).normal(size=local.model.n_embd)
    capture = Capture("probs", hidden="all")

    def all_of(engine: Engine, edit: Edit | None) -> list[F32]:
        options: dict[str, Any] = {"capture": capture, "edits": edit, **ROW_GREEDY}
        tokens = list(engine.generate(ROW_PROMPT, max_tokens=3, **options))
        return [np.array(one) for token in tokens for one in (token.attention, token.hidden)]

    plain = all_of(local, None)
    for edit in (
        Edit.add(vector, [0, 2], scale=0.7),
        Edit.scale_heads({(0, 1): 0.0, (2, -1): 2.0}),
        Edit.attention_bias([(2, 7)], 1.5),
    ):
        want = all_of(local, edit)
        assert_rows_equal(all_of(engine, edit), want, 1e-5)
        assert not np.allclose(want[0], plain[0], rtol=1e-3)
    with pytest.raises(errors.UnsupportedModel, match="edits: scores of layer 0"):
        all_of(engine, Edit.attention_bias([(2, 7)], 1.5, layers=[0], heads=[1]))


def test_captured_and_plain_requests_alternate_over_a_server(
    make_engine: MakeEngine, tiny_qwen2: Path, servers: list[RpcServer]
) -> None:
    local = make_engine(tiny_qwen2, **EXACT)
    engine = make_engine(tiny_qwen2, rpc_servers=[servers[0].endpoint], **EXACT)
    _, want = rows_of(local, "probs", 3)
    for _ in range(10):
        engine.generate(ROW_PROMPT, max_tokens=3, **ROW_GREEDY).read()
        assert_rows_equal(rows_of(engine, "probs", 3)[1], want, 1e-5)


def test_no_made_up_row_is_handed_out_when_a_server_dies(
    make_engine: MakeEngine, tiny_qwen2: Path, servers: list[RpcServer]
) -> None:
    with serving() as dying:
        endpoints = [servers[0].endpoint, dying.endpoint]
        engine = make_engine(tiny_qwen2, n_ctx=4096, rpc_servers=endpoints)
        generation = engine.generate(ROW_PROMPT, max_tokens=4000, capture="probs", **ROW_GREEDY)
        rows = [np.array(next(generation).attention)]
        tokens: list[Token] = []
        with pytest.raises(errors.DecodeError, match=dying.endpoint):
            take_until_killed(generation, tokens, dying)
    rows += [np.array(token.attention) for token in tokens]
    for row in rows:
        np.testing.assert_allclose(row.sum(axis=-1), 1, atol=1e-3)
