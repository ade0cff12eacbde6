"""RPC servers, machines that compute layers of a model: checks of the options of `Engine`."""

import re
from collections.abc import Iterable
from typing import Final, cast

from kqview.arguments import invalid
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
    if isinstance(value, str):
        value = [value]
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise invalid("rpc_servers", "a list such as ['192.168.0.2:50052']", shown(value))
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


def _endpoint(item: object) -> tuple[str, int]:
    host, colon, port = item.rpartition(":") if isinstance(item, str) else ("", "", "")
    if not isinstance(item, str):
        fault = "is not a str"
    elif ":" in host:
        fault = "has more than one colon, but llama.cpp's servers use IPv4 only"
    elif not colon:
        fault = "is without a port; the default of llama.cpp's server is 50052"
    elif len(host) > _HOST_CHARACTERS_MAX or not _HOST.fullmatch(host):
        fault = f"has {shown(host)}, which is not a host name"
    elif not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= _PORT_MAX):
        fault = f"has port {shown(port)}; use a port from 1 to {_PORT_MAX}"
    else:
        return host.lower(), int(port)
    raise RequestError(
        f"rpc_servers: {shown(item)} {fault}; write 'host:port'", parameter="rpc_servers"
    )
