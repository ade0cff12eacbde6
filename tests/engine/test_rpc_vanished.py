"""A machine that vanishes from the network: its server keeps its connections and says nothing more.

A stopped process stands for it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine, errors
from tests.support import stock
from tests.support.rpc_server import RpcServer, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.engine.conftest import MakeEngine

pytestmark = pytest.mark.peers

PROMPT = list(range(65, 80))
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SOON_S = 20.0  # on a loaded machine; what is tested for would never end


@pytest.fixture
def servers() -> Iterator[list[RpcServer]]:
    try:
        stock.find_binary("ggml-rpc-server")
    except stock.PeersMissing as missing:
        pytest.skip(str(missing))
    with serving() as first, serving() as second:
        yield [first, second]


def test_server_that_vanishes_while_rows_are_captured_ends_all_its_requests_in_time(
    make_engine: MakeEngine, tiny_llama: Path, servers: list[RpcServer]
) -> None:
    engine = make_engine(
        tiny_llama, rpc_servers=[s.endpoint for s in servers], rpc_timeout_s=1, n_slots=2
    )
    running = [
        engine.generate(PROMPT, slot=i, max_tokens=4000, capture="probs", **GREEDY)
        for i in range(2)
    ]
    held = [next(generation).attention for generation in running]
    assert all(rows is not None for rows in held)
    servers[1].stop()
    began = time.monotonic()
    for generation in running:
        with pytest.raises(errors.DecodeError, match=f"{servers[1].endpoint} did not answer"):
            generation.read()
    assert time.monotonic() - began < SOON_S
    with pytest.raises(errors.DecodeError, match="open a new Engine"):
        engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < SOON_S


def test_server_that_vanishes_while_the_model_is_loaded_is_named_in_time(
    tiny_llama: Path, servers: list[RpcServer]
) -> None:
    def stop(fraction: float) -> None:
        if fraction > 0:
            servers[0].stop()

    began = time.monotonic()
    with pytest.raises(errors.ModelLoadError, match=f"{servers[0].endpoint} did not answer"):
        Engine(
            tiny_llama,
            n_threads=1,
            rpc_servers=[servers[0].endpoint],
            rpc_timeout_s=1,
            progress=stop,
        )
    assert time.monotonic() - began < SOON_S
