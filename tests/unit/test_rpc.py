"""The options that name RPC servers: what is accepted, and what is refused without asking any."""

from __future__ import annotations

import pytest

from kqview.engine_options import checked
from kqview.errors import RequestError
from kqview.rpc import rpc_endpoints


@pytest.mark.parametrize(
    ("value", "endpoints"),
    [
        ([], []),
        ("127.0.0.1:50052", [("127.0.0.1", 50052)]),
        (["gpu-1.example:1", "b_2:65535"], [("gpu-1.example", 1), ("b_2", 65535)]),
        (("A:1", "a:2"), [("a", 1), ("a", 2)]),
        ((f"h{i}:1" for i in range(15)), [(f"h{i}", 1) for i in range(15)]),
    ],
)
def test_endpoints_are_read(value: object, endpoints: list[tuple[str, int]]) -> None:
    assert rpc_endpoints(value) == endpoints


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("127.0.0.1", "without a port"),
        ("", "without a port"),
        (":50052", "not a host name"),
        ("a b:1", "not a host name"),
        ("a\0:1", "not a host name"),
        ("héros:1", "not a host name"),
        ("a#1:1", "not a host name"),
        ("-a:1", "not a host name"),
        ("a" * 254 + ":1", "not a host name"),
        ("[::1]:50052", "IPv4"),
        ("http://a:1", "IPv4"),
        ("a:", "a port from 1 to 65535"),
        ("a:0", "a port from 1 to 65535"),
        ("a:65536", "a port from 1 to 65535"),
        ("a:-1", "a port from 1 to 65535"),
        ("a: 1", "a port from 1 to 65535"),
        ("a:1x", "a port from 1 to 65535"),
        ("a:٣", "a port from 1 to 65535"),
        ("a:" + "1" * 5000, "a port from 1 to 65535"),
        (["a:1", "b:1", "A:01"], "names 'A:01' twice"),
        ([f"h{i}:1" for i in range(16)], "16 servers, the limit is 15"),
        ([("a", 1)], "write 'host:port'"),
        ([None], "write 'host:port'"),
        (50052, "a list such as"),
        (b"a:1", "a list such as"),
    ],
)
def test_other_values_are_refused(value: object, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        rpc_endpoints(value)


@pytest.mark.parametrize("value", [0.001, 1, 300.0, 86_400])
def test_timeouts_are_seconds(value: float) -> None:
    assert checked({"rpc_timeout_s": value})["rpc_timeout_s"] == value


@pytest.mark.parametrize("value", [0, -1, 86_401, float("nan"), float("inf"), True, "1"])
def test_other_timeouts_are_refused(value: object) -> None:
    with pytest.raises(RequestError, match="rpc_timeout_s"):
        checked({"rpc_timeout_s": value})
