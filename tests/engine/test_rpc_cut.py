"""A connection cut after any number of bytes, in the whole life of an engine: always a typed error.

Between the engine and a server stands a relay that counts what the server says and cuts the
connection there. llama.cpp by itself ends the process at nearly each of these places.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine, errors
from tests.support import stock
from tests.support.rpc_server import HOST, RpcServer, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.peers

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
HELLO_BYTES = 36
N_CUTS = 40
SOON_S = 20.0


class Relay:
    """Passes one connection after the other on; ``limit`` bytes of the server's, None for all."""

    def __init__(self, server: RpcServer) -> None:
        self.limit: int | None = None
        self.n_bytes = 0  # that the server said in the newest connection
        self._target = (HOST, server.port)
        self._listener = socket.create_server((HOST, 0))
        self.endpoint = f"{HOST}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=30)
        self._listener.close()
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client, socket.create_connection(self._target) as server:
                    self.n_bytes = 0
                    for one in (client, server):
                        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    asking = threading.Thread(target=self._pass_on, args=(client, server, False))
                    asking.start()
                    self._pass_on(server, client, True)
                    asking.join()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer:
                    n_left = len(data) if self.limit is None else self.limit - self.n_bytes
                    self.n_bytes += len(data)
                    if n_left < len(data):
                        sink.sendall(data[:n_left])
                        break
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def endpoints() -> Iterator[tuple[Relay, list[str]]]:
    try:
        stock.find_binary("ggml-rpc-server")
    except stock.PeersMissing as missing:
        pytest.skip(str(missing))
    with serving() as first, serving() as second:
        relay = Relay(first)
        yield relay, [relay.endpoint, second.endpoint]
        relay.close()


def live(model: Path, endpoints: list[str], **options: Any) -> None:
    """Open an engine, make use of everything that asks a server, close it."""
    options = {"n_ctx": 512, "n_threads": 1, "n_slots": 2, "n_ubatch": 32, **options}
    with Engine(model, rpc_servers=endpoints, rpc_timeout_s=SOON_S, **options) as engine:
        prompts = [list(range(65, 65 + n)) for n in (5, 70)]
        for generation in [engine.generate(ids, max_tokens=20, **GREEDY) for ids in prompts]:
            generation.read()
        engine.slots[1].restore(engine.slots[0].save())
        engine.slots[0].shift(2, 3)
        engine.generate(list(range(65, 90)), max_tokens=5, slot=0, **GREEDY).read()


@pytest.mark.parametrize(
    "options",
    [{}, {"n_gpu_layers": 2}, {"kv_type": "f32", "flash_attn": False}],
    ids=["all there", "some here", "no flash attention"],
)
def test_connection_cut_anywhere_is_a_typed_error_with_the_server(
    tiny_llama: Path, endpoints: tuple[Relay, list[str]], options: dict[str, Any]
) -> None:
    relay, servers = endpoints
    live(tiny_llama, servers, **options)
    n_bytes = relay.n_bytes
    # Dense where an engine is opened (numbers, a few bytes each), then even over tensors.
    cuts = [*range(HELLO_BYTES, 400, 13), *range(400, n_bytes, n_bytes // N_CUTS)]
    seen: set[type] = set()
    for relay.limit in cuts:
        began = time.monotonic()
        with pytest.raises((errors.ModelLoadError, errors.DecodeError)) as caught:
            live(tiny_llama, servers, **options)
        assert relay.endpoint in str(caught.value)
        assert time.monotonic() - began < SOON_S
        seen.add(caught.type)
    assert seen == {errors.ModelLoadError, errors.DecodeError}
    relay.limit = None
    live(tiny_llama, servers, **options)
