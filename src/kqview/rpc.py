"""RPC servers, machines that compute layers of a model: checks of the options of `Engine`."""

import re
from collections.abc import Iterable
from typing import Final, cast

from kqview.arguments import seconds
from kqview.errors import RequestError, shown

_PORT_MAX: Final = 2**16 - 1
_SERVERS_MAX: Final = 15  # ggml schedules 16 backends; one is the CPU of this machine
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_HOST_CHARACTERS_MAX: Final = 253


def rpc_endpoints(value: object) -> list[tuple[str, int]]:
    """The ``rpc_servers`` option of Engine as (host, port) pairs.

    Raises:
        RequestError: *value* is not ``"host:port"`` or a list of these, repeats a server, or names
            too many.
    """
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise RequestError(
            f"rpc_servers is {shown(value)}; pass a list such as ['192.168.0.2:50052']"
        )
    endpoints: list[tuple[str, int]] = []
    for item in value:  # pyright: ignore[reportUnknownVariableType]
        endpoint = _endpoint(item)  # pyright: ignore[reportUnknownArgumentType]
        if endpoint in endpoints:
            raise RequestError(
                f"rpc_servers names {shown(cast('object', item))} twice; name each server once"
            )
        endpoints.append(endpoint)
    if len(endpoints) > _SERVERS_MAX:
        raise RequestError(
            f"rpc_servers has {len(endpoints)} servers, the limit is {_SERVERS_MAX}; name fewer"
        )
    return endpoints


def rpc_timeout(value: object) -> float:
    """The ``rpc_timeout_s`` option of Engine, in seconds.

    Raises:
        RequestError: *value* is not a number of seconds from 0.001 to a day.
    """
    return seconds("rpc_timeout_s", value, 0.001, 86_400)


def _endpoint(item: object) -> tuple[str, int]:
    if not isinstance(item, str):
        raise RequestError(f"rpc_servers has {shown(item)}; write 'host:port'")
    host, colon, port = item.rpartition(":")
    if ":" in host:
        raise RequestError(
            f"rpc_servers has {shown(item)} with more than one colon, but llama.cpp's servers use "
            "IPv4 only; write 'host:port'"
        )
    if not colon:
        raise RequestError(
            f"rpc_servers has {shown(item)} without a port; write 'host:port', such as "
            "'192.168.0.2:50052' for the default port of llama.cpp's server"
        )
    if len(host) > _HOST_CHARACTERS_MAX or not _HOST.fullmatch(host):
        raise RequestError(
            f"rpc_servers has {shown(item)}; {shown(host)} is not a host name, write 'host:port'"
        )
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= _PORT_MAX):
        raise RequestError(
            f"rpc_servers has {shown(item)} with port {shown(port)}; "
            f"use a port from 1 to {_PORT_MAX}"
        )
    return host.lower(), int(port)
