"""RPC servers that are none: whatever listens there, the refusal has the server's name."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

import pytest

from kqview import Engine, errors
from tests.support import rpc_server
from tests.support.rpc_server import HOST, free_port, impostor

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

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
    assert "name that is not known" in refused(tiny_llama, "no-such-host.invalid:50052")


def test_file_that_is_missing_is_said_before_a_server_is_asked(tmp_path: Path) -> None:
    with pytest.raises(errors.ModelLoadError, match=r"none\.gguf"):
        Engine(tmp_path / "none.gguf", rpc_servers=[f"{HOST}:{free_port()}"])


def test_listener_that_never_answers_is_given_up(tiny_llama: Path) -> None:
    with impostor(lambda connection: time.sleep(2)) as endpoint:
        assert "did not answer within 0.5 s" in refused(tiny_llama, endpoint, timeout_s=0.5)


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


def test_server_with_too_many_devices_is_refused_with_the_limit(tiny_llama: Path) -> None:
    answers = {**SOUND, DEVICE_COUNT: struct.pack("<I", 16)}
    with (
        impostor(server_with(answers)) as endpoint,
        pytest.raises(errors.RequestError, match="16 devices together, the limit is 15"),
    ):
        Engine(tiny_llama, n_ctx=256, n_threads=1, rpc_servers=[endpoint])
