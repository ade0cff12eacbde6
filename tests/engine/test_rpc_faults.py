"""Faults of RPC servers: every one is a typed error that names the server, within a limit.

Impostors and answers that llama.cpp would abort over; connections cut after any number of bytes;
servers that say nothing more; and fork, exit and signals while a server hangs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kqview
from kqview import Engine, errors
from tests.support import rpc_server
from tests.support.processes import FORK, free_port, output_of, wait_until_asleep
from tests.support.rpc_server import HOST, RpcServer, impostor, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.engine.conftest import MakeEngine


# ---- servers that are none

SOON_S = 20.0
DEVICE_COUNT, ALLOC_BUFFER, GET_ALIGNMENT, GET_MAX_SIZE, GET_BASE, DEVICE_MEMORY = (
    *(15, 0, 1, 2, 3, 11),
)


def refused(model: Path, endpoint: str, timeout_s: float = 5) -> str:
    """Open an engine on *endpoint*, which must fail soon; return the message."""
    began = time.monotonic()
    with pytest.raises(errors.ModelLoadError) as caught:
        Engine(model, n_ctx=256, n_threads=1, rpc_servers=[endpoint], rpc_timeout_s=timeout_s)
    assert time.monotonic() - began < SOON_S
    assert endpoint in str(caught.value)
    return str(caught.value)


def test_port_without_a_listener_is_refused(tiny_llama: Path) -> None:
    assert "refuses connections" in refused(tiny_llama, f"{HOST}:{free_port()}")


def test_host_that_does_not_exist_is_refused(tiny_llama: Path) -> None:
    assert "unknown host name" in refused(tiny_llama, "no-such-host.invalid:50052")


def test_file_that_is_missing_is_said_before_a_server_is_asked(tmp_path: Path) -> None:
    with pytest.raises(errors.ModelLoadError, match=r"none\.gguf"):
        Engine(tmp_path / "none.gguf", rpc_servers=[f"{HOST}:{free_port()}"])


def test_listener_that_never_answers_is_given_up(tiny_llama: Path) -> None:
    with impostor(read_and_say_nothing) as endpoint:
        assert "did not answer within 0.5 s" in refused(tiny_llama, endpoint, timeout_s=0.5)


def read_and_say_nothing(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def close_at_once(connection: socket.socket) -> None:
    """Say nothing."""


def close_after_the_request(connection: socket.socket) -> None:
    rpc_server.read_request(connection)


def speak_http(connection: socket.socket) -> None:
    rpc_server.read_request(connection)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def send_noise(connection: socket.socket) -> None:
    rpc_server.read_request(connection)
    connection.sendall(bytes(range(256)) * 16)


def stop_in_the_middle(connection: socket.socket) -> None:
    rpc_server.read_request(connection)
    connection.sendall(struct.pack("<QBB", 28, 7, 0))


def greet_as_6_0(connection: socket.socket) -> None:
    rpc_server.greet(connection, 6, 0)


def greet_as_7_1(connection: socket.socket) -> None:
    rpc_server.greet(connection, 7, 1)


@pytest.mark.parametrize(
    ("talk", "why"),
    [
        (close_at_once, "when it was greeted"),
        (close_after_the_request, "closed the connection when it was greeted"),
        (speak_http, "does not speak ggml's RPC protocol"),
        (send_noise, "does not speak ggml's RPC protocol"),
        (stop_in_the_middle, "closed the connection"),
        (greet_as_6_0, "speaks version 6.0 of the RPC protocol, version 7.0 is needed"),
        (greet_as_7_1, "speaks version 7.1"),
        (rpc_server.greet, "closed the connection while the engine was opened"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_impostor_is_refused(
    tiny_llama: Path, talk: Callable[[socket.socket], None], why: str
) -> None:
    with impostor(talk) as endpoint:
        assert why in refused(tiny_llama, endpoint)


# What a server in its right mind answers while an engine is opened.
SOUND = {
    DEVICE_COUNT: struct.pack("<I", 1),
    GET_ALIGNMENT: struct.pack("<Q", 64),
    GET_MAX_SIZE: struct.pack("<Q", 2**40),
    DEVICE_MEMORY: struct.pack("<QQ", 2**30, 2**30),
    ALLOC_BUFFER: struct.pack("<QQ", 4096, 2**40),
    GET_BASE: struct.pack("<Q", 4096),
}


def server_with(answers: dict[int, bytes]) -> Callable[[socket.socket], None]:
    """A server that greets, gives these answers and closes at the first question beyond."""

    def talk(connection: socket.socket) -> None:
        rpc_server.greet(connection)
        while True:
            command, _ = rpc_server.read_request(connection)
            if (payload := answers.get(command)) is not None:
                rpc_server.answer(connection, payload)
            elif command in (4, 5, 6, 10, 12, 16, 17):  # not answered
                continue
            else:
                return

    return talk


@pytest.mark.parametrize(
    ("command", "payload", "why"),
    [
        (DEVICE_COUNT, struct.pack("<I", 0), "0 as the number of its devices"),
        (DEVICE_COUNT, struct.pack("<I", 2**31), "as the number of its devices"),
        (DEVICE_COUNT, b"", "0 bytes where 4 are due"),
        (DEVICE_COUNT, bytes(100_000), "100000 bytes where 4 are due"),
        (GET_ALIGNMENT, struct.pack("<Q", 0), "0 as alignment"),
        (GET_ALIGNMENT, struct.pack("<Q", 3), "3 as alignment"),
        (GET_ALIGNMENT, struct.pack("<Q", 2**40), "as alignment"),
        (GET_MAX_SIZE, struct.pack("<Q", 0), "0 as its largest buffer"),
        (ALLOC_BUFFER, struct.pack("<QQ", 4096, 1), "1 as the size of a buffer"),
        (GET_BASE, struct.pack("<Q", 0), "0 as the address of a buffer"),
    ],
)
def test_answer_that_llama_cpp_would_abort_over_is_refused(
    tiny_llama: Path, command: int, payload: bytes, why: str
) -> None:
    with impostor(server_with({**SOUND, command: payload})) as endpoint:
        assert why in refused(tiny_llama, endpoint)


@pytest.mark.parametrize("last", [*SOUND])
def test_server_that_leaves_at_any_question_is_refused(tiny_llama: Path, last: int) -> None:
    answers = {command: payload for command, payload in SOUND.items() if command != last}
    with impostor(server_with(answers)) as endpoint:
        assert "closed the connection while" in refused(tiny_llama, endpoint)


def test_server_without_memory_is_out_of_memory(tiny_llama: Path) -> None:
    answers = {**SOUND, ALLOC_BUFFER: struct.pack("<QQ", 0, 0)}
    with (
        impostor(server_with(answers)) as endpoint,
        pytest.raises(errors.OutOfMemory, match="unable to allocate"),
    ):
        Engine(tiny_llama, n_ctx=256, n_threads=1, rpc_servers=[endpoint])


@pytest.mark.needs("host layers")
def test_server_with_too_many_devices_is_refused_with_the_limit(tiny_llama: Path) -> None:
    answers = {**SOUND, DEVICE_COUNT: struct.pack("<I", 16)}
    with (
        impostor(server_with(answers)) as endpoint,
        pytest.raises(errors.RequestError, match=r"16 .*\b15\b"),
    ):
        Engine(tiny_llama, n_ctx=256, n_threads=1, rpc_servers=[endpoint])


# ---- connections that are cut
#
# A relay between the engine and a server counts what the server says and cuts the connection
# there. llama.cpp by itself ends the process at nearly each of these places.

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
HELLO_BYTES = 36
N_CUTS = 40


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


@pytest.mark.needs("peers")
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


# ---- servers that say nothing more
#
# A stopped process stands for a machine that vanished from the network: its connections stay open.

PROMPT = list(range(65, 80))


@pytest.fixture
def servers() -> Iterator[list[RpcServer]]:
    with serving() as first, serving() as second:
        yield [first, second]


@pytest.mark.needs("peers")
def test_server_that_vanishes_while_rows_are_captured_ends_all_its_requests_in_time(
    make_engine: MakeEngine, tiny_llama: Path, servers: list[RpcServer]
) -> None:
    engine = make_engine(
        tiny_llama, rpc_servers=[s.endpoint for s in servers], rpc_timeout_s=2, n_slots=2
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


@pytest.mark.needs("peers")
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


# ---- fork, exit and signals while a server hangs

SOURCE = Path(kqview.__file__).parents[1]
START = """
import gc, os, signal, sys, threading, time
from kqview import Engine, errors
MODEL, ENDPOINT = sys.argv[1:3]
SERVER = int(sys.argv[3])
PROMPT = list(range(65, 80))
def open_engine(**options):
    return Engine(MODEL, **{"n_ctx": 512, "n_threads": 1, "rpc_servers": [ENDPOINT], **options})
def ids_of(engine, n=20):
    return [t.id for t in engine.generate(PROMPT, max_tokens=n, temperature=0, ignore_eos=True)]
"""


@pytest.fixture
def server() -> Iterator[RpcServer]:
    with serving() as one:
        yield one


def start(script: str, model: Path, server: RpcServer) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-c", START + FORK + textwrap.dedent(script)),
            *(str(model), server.endpoint, str(server.process.pid)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"},
    )


@pytest.mark.needs("peers")
def test_forked_child_neither_hangs_nor_disturbs_its_parents_server(
    tiny_llama: Path, server: RpcServer
) -> None:
    script = """
        engine, closed = open_engine(), open_engine()
        want = ids_of(engine)
        closed.close()
        generation = engine.generate(PROMPT, max_tokens=300, temperature=0, ignore_eos=True)
        next(generation)
        def check():
            global engine, closed, generation
            try:
                engine.generate(PROMPT)
            except errors.ClosedError as error:
                assert "forked" in str(error)
            engine.close()
            generation.close()
            engine = closed = generation = None
            gc.collect()  # frees what lies on the server, in the parent alone
            assert len(ids_of(open_engine(rpc_servers=None))) == 20
        for _ in range(3):
            assert in_child(check) == 0
        assert len(list(generation)) == 299
        assert ids_of(engine) == want
        print("parent")
    """
    assert output_of(start(script, tiny_llama, server)) == "parent"


@pytest.mark.needs("peers")
def test_forked_child_leaves_through_the_interpreter(tiny_llama: Path, server: RpcServer) -> None:
    script = """
        engine = open_engine()
        ids_of(engine)
        pid = fork()
        if pid == 0:
            signal.alarm(20)
        else:
            assert os.waitpid(pid, 0)[1] == 0
            print(len(ids_of(engine)))
    """
    assert output_of(start(script, tiny_llama, server)) == "20"


@pytest.mark.needs("peers")
@pytest.mark.parametrize(
    "body",
    [
        "pass",
        "os.kill(SERVER, signal.SIGKILL)",
        "os.kill(SERVER, signal.SIGSTOP); kept = engine.generate(PROMPT)\n"
        "while engine.health().phase != 'decoding': pass",
        "engine.close()",
    ],
    ids=["idle", "killed", "hung", "closed"],
)
def test_interpreter_exits_with_an_engine_on_a_server(
    tiny_llama: Path, server: RpcServer, body: str
) -> None:
    script = f"engine = open_engine()\nids_of(engine)\n{body}\nprint('end')"
    began = time.monotonic()
    assert output_of(start(script, tiny_llama, server)) == "end"
    assert time.monotonic() - began < 30


@pytest.mark.needs("peers")
def test_interrupt_ends_a_wait_for_a_server_that_hangs(tiny_llama: Path, server: RpcServer) -> None:
    script = """
        engine = open_engine()
        ids_of(engine)
        os.kill(SERVER, signal.SIGSTOP)
        try:
            print("go")
            ids_of(engine)
        except KeyboardInterrupt:
            print("interrupted")
    """
    process = start(script, tiny_llama, server)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "go"
    wait_until_asleep(process)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert output_of(process) == "interrupted"
    assert time.monotonic() - began < 20
