"""Who is at the other end: addresses of clients, directly or behind trusted proxies.

Anybody can send X-Forwarded-For. It counts only if the connection comes from a proxy that the
settings name, and then only the part that such proxies added: addresses are read from the right,
and the first one that is not a trusted proxy is the client.
"""

import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_MOST_NAMES: Final = 4096
_IPV6_BITS: Final = 64  # a client of IPv6 has a whole network of addresses
_SCHEMES: Final = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
# A pair of Forwarded (RFC 7239), or the comma between what two proxies wrote.
_FORWARDED: Final = re.compile(
    r"""(?<![\w!#$%&'*+.^`|~-])([\w!#$%&'*+.^`|~-]+)=(?:"((?:[^"\\]|\\.)*)"|([^;,\s"]*))|(,)"""
)


@lru_cache(_MOST_NAMES)  # a client sends many requests
def client_name(address: str) -> str:
    """The client that *address* counts as: the address itself, or its network of IPv6."""
    ip = _parsed(address)
    if ip is None:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(ip), _IPV6_BITS), strict=False))
    return str(ip)


@dataclass(frozen=True, slots=True)
class _Hop:
    """What one proxy says about its caller; "" for what it does not say."""

    address: str
    scheme: str
    host: str


class Peers:
    """Finds the client behind trusted proxies."""

    def __init__(self, trusted_proxies: Sequence[str]) -> None:
        """Trust *trusted_proxies*, addresses or networks, and nobody else."""
        self.are_any = bool(trusted_proxies)
        """Whether anybody is trusted."""
        self._networks = [ipaddress.ip_network(text) for text in trusted_proxies]

    def trusts(self, address: str) -> bool:
        """Whether *address* belongs to a trusted proxy."""
        ip = _parsed(address)
        return ip is not None and any(ip in network for network in self._networks)

    def resolve(self, scope: Scope) -> None:
        """Write into *scope* which client called the proxies, by which scheme and host.

        Replaces ``client`` and ``scheme``, and sets ``state["forwarded_host"]`` if a proxy names
        one. Changes nothing if the request does not come from a trusted proxy.
        """
        client = scope.get("client")
        if client is None or not self.trusts(client[0]):
            return
        hops = _hops(Headers(scope=scope))
        known: _Hop | None = None
        for hop in reversed(hops):
            if _parsed(hop.address) is None:  # "unknown": the trail ends here
                break
            known = hop
            if not self.trusts(hop.address):
                break
        if known is not None:
            scope["client"] = (str(_parsed(known.address)), 0)
        said = known or (hops[-1] if hops else _Hop("", "", ""))
        if scheme := _SCHEMES.get(said.scheme.lower()):
            is_socket = scope["type"] == "websocket"
            scope["scheme"] = scheme.replace("http", "ws") if is_socket else scheme
        if said.host:
            scope["state"]["forwarded_host"] = said.host


def _hops(headers: Headers) -> list[_Hop]:
    """What the proxies wrote; the nearest one comes last.

    X-Forwarded-For wins: most proxies write it, and pass on any Forwarded that they receive.
    """
    if "x-forwarded-for" not in headers and "forwarded" in headers:
        return list(_of_forwarded(",".join(headers.getlist("forwarded"))))
    scheme = _last(headers, "x-forwarded-proto")
    host = _last(headers, "x-forwarded-host")
    addresses = ",".join(headers.getlist("x-forwarded-for")).split(",")
    return [_Hop(_bare(text.strip()), scheme, host) for text in addresses]


def _last(headers: Headers, name: str) -> str:
    return ",".join(headers.getlist(name)).rpartition(",")[2].strip()


def _of_forwarded(text: str) -> Iterator[_Hop]:
    pairs: dict[str, str] = {}
    for name, quoted, plain, comma in _FORWARDED.findall(text):
        if comma:
            yield _hop_of(pairs)
            pairs = {}
        else:
            pairs[name.lower()] = re.sub(r"\\(.)", r"\1", quoted) or plain
    yield _hop_of(pairs)


def _hop_of(pairs: dict[str, str]) -> _Hop:
    return _Hop(_bare(pairs.get("for", "")), pairs.get("proto", ""), pairs.get("host", ""))


def _bare(text: str) -> str:
    """An address without its port."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text


def _parsed(address: str) -> _Address | None:
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    # How an IPv6 socket shows a client of IPv4; all of those would be one IPv6 network.
    return getattr(ip, "ipv4_mapped", None) or ip
