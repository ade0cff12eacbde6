"""Who may call, and who they are: hosts, origins, keys, rate, trusted proxies, TLS.

A browser lets any page call whatever its user's machine can reach. Two checks keep foreign pages
out: the Host header has to name this server (DNS rebinding points somebody else's name at it), and
the page's origin has to be allowed.

Anybody can send X-Forwarded-For. It counts only if the connection comes from a proxy that the
settings name, and then only the part that such proxies added: addresses are read from the right,
and the first one that is not a trusted proxy is the client.

Belongs to the event loop. Every known key is compared, in constant time, so the time of an answer
says nothing about a key.
"""

import hashlib
import hmac
import ipaddress
import math
import re
import ssl
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn

from starlette.datastructures import Headers, QueryParams
from starlette.types import Scope

from kqview.errors import RequestError
from kqview.server.config import Config
from kqview.server.errors import Forbidden, RateLimited, Unauthorized
from kqview.server.live_config import LiveConfig
from kqview.server.settings import Settings


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request, and so what of others' work they may see.

    What a request makes (a run, its text and logprobs, the figures of the last run; in dialects
    that have them sessions, slots and states) belongs to an ``owner``: the caller whose key was
    sent. A server without keys has one owner, so everybody there sees everything.

    Attributes:
        name: For logs and the rate limit: the address, or a short digest of the key.
        is_admin: Whether an admin key was sent.
        owner: Digest of the whole key, "" without a key.
    """

    name: str
    is_admin: bool = False
    owner: str = ""

    def may_see(self, owner: str) -> bool:
        """Whether this caller may see and end what *owner* made."""
        return self.is_admin or self.owner == owner

    def is_known(self, settings: Settings) -> bool:
        """Whether *settings* still have the key that was sent, with its rights."""
        if not self.owner:
            return not settings.api_keys
        users = () if self.is_admin else settings.api_keys
        return self.owner in map(key_digest, (*users, *settings.admin_keys))


ANYONE: Final = Caller("anyone")
"""A caller without a key. On a server with keys nothing belongs to it."""


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_IPV6_BITS: Final = 64  # a client of IPv6 has a whole network of addresses
_SCHEMES: Final = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
# A pair of Forwarded (RFC 7239), or the comma between what two proxies wrote.
_FORWARDED: Final = re.compile(
    r"""(?<![\w!#$%&'*+.^`|~-])([\w!#$%&'*+.^`|~-]+)=(?:"((?:[^"\\]|\\.)*)"|([^;,\s"]*))|(,)"""
)


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
        self._networks = [ipaddress.ip_network(text) for text in trusted_proxies]

    def trusts(self, address: str) -> bool:
        """Whether *address* belongs to a trusted proxy."""
        ip = _parsed(address) if self._networks else None
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


Access = Literal["open", "user", "admin", "any_key"]
"""Who may call: anyone; where there are keys, whoever has one; whoever has an admin key; or, where
there are keys, whoever sends any key, known or not, to see what belongs to it."""


_MOST_CLIENTS: Final = 10_000


class Gate:
    """Admits a request, or raises the reason why not."""

    def __init__(self, settings: Settings | LiveConfig) -> None:
        """Enforce *settings*."""
        self._live = LiveConfig.of(settings)
        self._rate = self._live.derived(
            lambda config: config.settings.rate_limit,
            lambda limit: _RateLimit(limit) if limit else None,
        )
        self._hosts = self._live.derived(_names_of, _Hosts)

    def check(self, scope: Scope, *, access: Access) -> Caller:
        """Check one request or WebSocket, to an operation with this *access*.

        Raises:
            Forbidden: The Host is not a name of this server, the page's origin is not allowed, or
                the key is not an admin key.
            Unauthorized: A key is needed and none, or an unknown one, was sent.
            RateLimited: The client sends too many requests; guessing keys counts too.
        """
        headers = Headers(scope=scope)
        hosts = self._check_hosts(scope, headers)
        self._check_origin(scope, headers, hosts)
        settings = self._live.settings
        key = self._key(scope, headers)
        is_admin = _is_one_of(key, settings.admin_keys)
        is_user = _is_one_of(key, settings.api_keys) or is_admin
        caller = Caller(client_name((scope.get("client") or ("local", 0))[0]))
        if is_user:
            owner = key_digest(key)
            caller = Caller(f"key-{owner[:8]}", is_admin, owner)
        elif access == "any_key" and key:  # in the rate limit, guesses count for the address
            caller = Caller(caller.name, owner=key_digest(key))
        if access == "open":
            return caller
        self.count(caller)
        if access == "admin" and not settings.admin_keys:
            raise Forbidden("the server has no admin key (--admin-key); start it with one")
        if access == "admin" and is_user and not is_admin:
            raise Forbidden("an admin key is needed; the key sent is not one")
        has_keys = settings.api_keys or (access == "any_key" and settings.admin_keys)
        if not caller.owner and (has_keys or access == "admin"):
            what = "the API key is unknown" if key else "an API key is needed"
            raise Unauthorized(f"{what}; send Authorization: Bearer KEY, or X-Api-Key")
        return caller

    def count(self, caller: Caller) -> None:
        """Count one request of *caller*.

        Raises:
            RateLimited: There were too many.
        """
        if (rate := self._rate()) is not None:
            rate.take(caller.name)

    def _check_hosts(self, scope: Scope, headers: Headers) -> list[str]:
        """The hosts that the request names: its own Host, and the one that its proxy forwarded."""
        hosts = headers.getlist("host")
        if forwarded := scope.get("state", {}).get("forwarded_host"):
            hosts.append(forwarded)
        for host in hosts:
            if not self._hosts().allows(host, scope):
                raise Forbidden(
                    f"this server is not called {host!r}; use its address, or add the "
                    "name to allowed_hosts (--allowed-hosts)"
                )
        return hosts

    def _check_origin(self, scope: Scope, headers: Headers, hosts: list[str]) -> None:
        allowed = self._live.settings.cors_origins
        origin = headers.get("origin")
        if "*" in allowed or (origin is not None and is_allowed_origin(origin, allowed)):
            return
        if origin is None:
            # Pages embed and send things without an origin; following a link to here is fine.
            is_link = scope.get("method") in ("GET", "HEAD") and (
                headers.get("sec-fetch-mode") == "navigate"
            )
            if headers.get("sec-fetch-site") != "cross-site" or is_link:
                return
        elif self._hosts().is_own_page(origin, hosts, scope):
            return
        page = "another site" if origin is None else repr(origin)
        raise Forbidden(
            f"pages of {page} may not call this server; add their origin to cors_origins "
            "(--cors-origin)"
        )

    def _key(self, scope: Scope, headers: Headers) -> str:
        key = sent_key(headers)
        if not key and scope["type"] == "websocket" and self._live.settings.query_key:
            key = QueryParams(scope["query_string"]).get("api_key", "")
        return key


LOOPBACK_ORIGIN: Final = re.compile(
    r"https?://(?:(?:[a-z0-9-]+\.)*localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?"
)
"""Origins of pages on this machine, at any port; no name that somebody else could own."""


def is_allowed_origin(origin: str, allowed: Sequence[str]) -> bool:
    """Whether *allowed*, the setting ``cors_origins``, includes *origin*."""
    if "*" in allowed or (origin in allowed and origin != "loopback"):
        return True
    return "loopback" in allowed and LOOPBACK_ORIGIN.fullmatch(origin) is not None


def _names_of(config: Config) -> frozenset[str]:
    return frozenset({config.settings.host.lower(), *config.settings.allowed_hosts})


class _Hosts:
    """The names of this server."""

    def __init__(self, names: frozenset[str]) -> None:
        self._takes_any = "*" in names
        self._names = names
        self._suffixes = tuple(name[1:] for name in self._names if name.startswith("*."))

    def allows(self, host: str, scope: Scope) -> bool:
        return self._takes_any or self._is_own(host, scope)

    def is_own_page(self, origin: str, hosts: Sequence[str], scope: Scope) -> bool:
        """Whether the page came from this server, as *hosts* name it."""
        scheme, _, netloc = origin.partition("://")
        default = {"http": ":80", "https": ":443"}.get(scheme)
        is_https = scope.get("scheme") in ("https", "wss")
        if default is None or not netloc or (is_https and scheme != "https"):
            return False
        own = (host.lower().removesuffix(default) for host in hosts if self._is_own(host, scope))
        return netloc in own

    def _is_own(self, host: str, scope: Scope) -> bool:
        name = host.partition(":")[0] if host[:1] != "[" else host[1:].partition("]")[0]
        name = name.lower().removesuffix(".")
        # Nobody can point an address elsewhere, and browsers resolve localhost themselves.
        if name == "localhost" or name.endswith(".localhost") or name in self._names:
            return True
        if name.endswith(self._suffixes):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            # Called from within a program, it has the name that the program gives.
            return bool(name) and name == (scope.get("server") or ("", 0))[0]
        return True


def _is_one_of(key: str, known: Sequence[str]) -> bool:
    # Digests have one length, so that not even the length of a key shows.
    given = _sha256(key)
    matches = [hmac.compare_digest(given, _sha256(one)) for one in known]
    return any(matches)


def _sha256(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def sent_key(headers: Headers) -> str:
    """The key in a request's headers, "" without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return headers.get("x-api-key", "")


def key_digest(key: str) -> str:
    """The name that a key is stored and compared by: SHA-256 of its bytes in a header, in hex."""
    return _sha256(key).hex()


class _RateLimit:
    """A token bucket for each client: a minute's worth at once, then as it refills."""

    def __init__(self, per_minute: float) -> None:
        self._per_minute = per_minute
        self._capacity = max(1.0, per_minute)
        self._per_s = per_minute / 60
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str) -> None:
        now = time.monotonic()
        level, then = self._buckets.pop(name, (self._capacity, now))
        level = min(self._capacity, level + (now - then) * self._per_s)
        is_refused = level < 1
        self._buckets[name] = (level if is_refused else level - 1), now
        if len(self._buckets) > _MOST_CLIENTS:  # of the client that was quiet longest
            self._buckets.popitem(last=False)
        if is_refused:
            raise RateLimited(
                f"the limit is {self._per_minute:g} requests a minute; wait before the next one",
                retry_after_s=math.ceil((1 - level) / self._per_s),
            )


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """The certificate that the server identifies itself with; None for plain HTTP.

    Raises:
        RequestError: A file cannot be read or holds something else, the key is encrypted, or it
            does not belong to the certificate.
    """
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise RequestError(
                "ssl_keyfile is given without ssl_certfile; give the certificate "
                "too (--ssl-certfile)"
            )
        return None
    _check(certificate, "ssl_certfile", b"-----BEGIN CERTIFICATE-----", "certificate")
    name = "ssl_certfile" if key is None else "ssl_keyfile"
    _check(key or certificate, name, b"PRIVATE KEY-----", "private key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise RequestError(
                f"the key in {key or certificate!r} does not belong to the "
                f"certificate in {certificate!r}; give the two that were made together"
            ) from None
        raise RequestError(
            f"ssl_certfile {certificate!r} and its key cannot be used: "
            f"{error.reason or error}; make them again"
        ) from None
    return context


def _check(path: str, name: str, mark: bytes, kind: str) -> None:
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(
            f"{name} {path!r} cannot be read: {reason}; name a readable file"
        ) from None
    if mark not in data:
        raise RequestError(f"{name} {path!r} holds no {kind} in PEM; name a file that does")


def _refuse_password() -> NoReturn:
    raise RequestError(
        "the private key is encrypted, and a server has nobody to ask for the passphrase; store it "
        "without a passphrase: openssl pkey -in KEY -out PLAIN"
    )
