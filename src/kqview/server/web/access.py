"""Who may call, and what a key may: hosts, origins of pages, keys, rate.

A browser lets any page call whatever its user's machine can reach. Two checks keep foreign pages
out: the Host header has to name this server (DNS rebinding points somebody else's name at it), and
the page's origin has to be allowed.

Belongs to the event loop. Every known key is compared, in constant time, so the time of an answer
says nothing about a key.
"""

import hashlib
import hmac
import ipaddress
import math
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from starlette.datastructures import Headers, QueryParams
from starlette.types import Scope

from kqview.errors import RequestError
from kqview.server.errors import Forbidden, RateLimited, Unauthorized
from kqview.server.live_config import LiveConfig
from kqview.server.settings import Settings
from kqview.server.web.peers import client_name


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

    def check_key(self, settings: Settings, to_do: str) -> None:
        """Raise Unauthorized if the server has keys and none of them was sent."""
        if (settings.api_keys or settings.admin_keys) and not self.owner:
            raise Unauthorized(f"an API key is needed to {to_do}; send Authorization: Bearer KEY")

    def check_admin_key(self, settings: Settings, to_do: str) -> None:
        """Raise Forbidden if the server has admin keys and none of them was sent."""
        if settings.admin_keys and not self.is_admin:
            raise Forbidden(f"an admin key is needed to {to_do}")

    def check_edits(self, settings: Settings) -> None:
        """Raise if *settings* let nobody, or only admin keys, change what a model computes."""
        if settings.edits == "off":
            raise RequestError(
                "edits are off on this server; start it with --edits all, or leave them out",
                parameter="edits",
            )
        if settings.edits == "admin" and not self.is_admin:
            raise Forbidden("edits need an admin key on this server (--edits admin)")


ANYONE: Final = Caller("anyone")
"""A caller without a key. On a server with keys nothing belongs to it."""


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
        self._hosts = self._live.derived(
            lambda config: frozenset(
                {config.settings.host.lower(), *config.settings.allowed_hosts}
            ),
            _Hosts,
        )

    def check(self, scope: Scope, *, access: Access) -> Caller:
        """Check one request or WebSocket, to an operation with this *access*.

        Raises:
            Forbidden: The Host is not a name of this server, the page's origin is not allowed, or
                the key is not an admin key.
            Unauthorized: A key is needed and none, or an unknown one, was sent.
            RateLimited: The client sends too many requests; guessing keys counts too.
        """
        headers, settings, state = Headers(scope=scope), self._live.settings, scope.get("state", {})
        names = self._hosts.value
        # Its own Host, and the one that its proxy forwarded.
        hosts = [*headers.getlist("host"), *filter(None, [state.get("forwarded_host")])]
        for host in hosts:
            if not names.takes_any and not names.is_own(host, scope):
                raise Forbidden(
                    f"this server is not called {host!r}; use its address, or add the "
                    "name to allowed_hosts (--allowed-hosts)"
                )
        if "origin" in headers or headers.get("sec-fetch-site") == "cross-site":
            self._check_page(scope, headers, hosts)
        name = state.get("client_name") or client_name((scope.get("client") or ("local", 0))[0])
        key, owner, is_user, is_admin = sent_key(headers), "", False, False
        if not key and scope["type"] == "websocket" and settings.query_key:
            key = QueryParams(scope["query_string"]).get("api_key", "")
        if key:
            is_admin = _is_one_of(key, settings.admin_keys)
            is_user = _is_one_of(key, settings.api_keys) or is_admin
            if is_user or access == "any_key":
                owner = key_digest(key)
        # In the rate limit, guesses count for the address.
        caller = Caller(f"key-{owner[:8]}" if is_user else name, is_admin, owner)
        if access == "open":
            return caller
        if (rate := self._rate.value) is not None:
            rate.take(caller.name)
        if access == "admin" and not settings.admin_keys:
            raise Forbidden("the server has no admin key (--admin-key); start it with one")
        if access == "admin" and is_user and not is_admin:
            raise Forbidden("an admin key is needed; the key sent is not one")
        has_keys = settings.api_keys or (access == "any_key" and settings.admin_keys)
        if not owner and (has_keys or access == "admin"):
            what = "the API key is unknown" if key else "an API key is needed"
            raise Unauthorized(f"{what}; send Authorization: Bearer KEY, or X-Api-Key")
        return caller

    def _check_page(self, scope: Scope, headers: Headers, hosts: list[str]) -> None:
        """Refuse what a page of another site sends, unless its origin is allowed."""
        allowed, origin = self._live.settings.cors_origins, headers.get("origin")
        if origin is None:
            # Pages embed and send things without an origin; following a link to here is fine.
            is_link = scope.get("method") in ("GET", "HEAD") and (
                headers.get("sec-fetch-mode") == "navigate"
            )
            if is_link or "*" in allowed:
                return
        elif is_allowed_origin(origin, allowed) or self._hosts.value.is_own_page(
            origin, hosts, scope
        ):
            return
        page = "another site" if origin is None else repr(origin)
        raise Forbidden(
            f"pages of {page} may not call this server; add their origin to cors_origins "
            "(--cors-origin)"
        )


LOOPBACK_ORIGIN: Final = re.compile(
    r"https?://(?:(?:[a-z0-9-]+\.)*localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?"
)
"""Origins of pages on this machine, at any port; no name that somebody else could own."""


def is_allowed_origin(origin: str, allowed: Sequence[str]) -> bool:
    """Whether *allowed*, the setting ``cors_origins``, includes *origin*."""
    if "*" in allowed or (origin in allowed and origin != "loopback"):
        return True
    return "loopback" in allowed and LOOPBACK_ORIGIN.fullmatch(origin) is not None


class _Hosts:
    """The names of this server."""

    def __init__(self, names: frozenset[str]) -> None:
        self.takes_any = "*" in names
        self._names = names
        self._suffixes = tuple(name[1:] for name in self._names if name.startswith("*."))

    def is_own_page(self, origin: str, hosts: Sequence[str], scope: Scope) -> bool:
        """Whether the page came from this server, as *hosts* name it."""
        scheme, _, netloc = origin.partition("://")
        default = {"http": ":80", "https": ":443"}.get(scheme)
        is_https = scope.get("scheme") in ("https", "wss")
        if default is None or not netloc or (is_https and scheme != "https"):
            return False
        own = (host.lower().removesuffix(default) for host in hosts if self.is_own(host, scope))
        return netloc in own

    def is_own(self, host: str, scope: Scope) -> bool:
        """Whether *host* is a name of this server, be it one of many."""
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
