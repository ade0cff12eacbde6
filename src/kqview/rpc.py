"""RPC servers, machines that compute layers of a model: checks of the options that name them."""

import re
from collections.abc import Iterable
from typing import Final, cast

from kqview import _core
from kqview.errors import RequestError, shown

_PORT_MAX: Final = 2**16 - 1
_SERVERS_MAX: Final = 15  # ggml schedules 16 backends, one of them is this machine's processor
_TIMEOUT_MAX_S: Final = 86_400.0
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_HOST_CHARACTERS_MAX: Final = 253


def rpc_endpoints(value: object) -> list[tuple[str, int]]:
    """The ``rpc_servers`` option of Engine as (host, port) pairs.

    Raises:
        RequestError: It is no ``"host:port"`` and no list of these, names a server twice, or names
            too many.
    """
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise RequestError(
            f"Engine: rpc_servers is {shown(value)}, a list such as ['192.168.0.2:50052'] is needed"
        )
    endpoints: list[tuple[str, int]] = []
    for item in value:  # pyright: ignore[reportUnknownVariableType]
        endpoint = _endpoint(item)  # pyright: ignore[reportUnknownArgumentType]
        if endpoint in endpoints:
            raise RequestError(
                f"Engine: rpc_servers names {shown(cast('object', item))} twice, a server "
                "takes part once; leave one out"
            )
        endpoints.append(endpoint)
    if len(endpoints) > _SERVERS_MAX:
        raise RequestError(
            f"Engine: rpc_servers has {len(endpoints)} servers, the limit is {_SERVERS_MAX}; "
            "name fewer"
        )
    return endpoints


def rpc_timeout(value: object) -> float:
    """The ``rpc_timeout_s`` option of Engine, in seconds.

    Raises:
        RequestError: It is no number of seconds from 0.001 to a day.
    """
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0.001 <= value <= _TIMEOUT_MAX_S
    ):
        return float(value)
    raise RequestError(
        f"Engine: rpc_timeout_s is {shown(value)}, seconds from 0.001 to {_TIMEOUT_MAX_S:.0f} "
        "are needed"
    )


def server_states(model: _core.Model) -> list[dict[str, object]]:
    """The RPC servers of a model: endpoint, n_devices, lost (why it is gone, else None)."""
    return [
        {"endpoint": endpoint, "n_devices": n_devices, "lost": loss or None}
        for endpoint, n_devices, loss in model.rpc_servers()
    ]


def _endpoint(item: object) -> tuple[str, int]:
    if not isinstance(item, str):
        raise RequestError(f"Engine: rpc_servers has {shown(item)}, a text 'host:port' is needed")
    host, colon, port = item.rpartition(":")
    if ":" in host:
        raise RequestError(
            f"Engine: rpc_servers has {shown(item)}, one colon is allowed: llama.cpp's servers "
            "have IPv4 addresses; write 'host:port'"
        )
    if not colon:
        raise RequestError(
            f"Engine: rpc_servers has {shown(item)}, a port is missing; write 'host:port', "
            "llama.cpp's server listens on 50052 unless told otherwise"
        )
    if len(host) > _HOST_CHARACTERS_MAX or not _HOST.fullmatch(host):
        raise RequestError(
            f"Engine: rpc_servers has {shown(item)}, {shown(host)} is no name of a host; "
            "write 'host:port'"
        )
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= _PORT_MAX):
        raise RequestError(
            f"Engine: rpc_servers has {shown(item)}, the port is {shown(port)}, "
            f"ports are 1..{_PORT_MAX}"
        )
    return host.lower(), int(port)
