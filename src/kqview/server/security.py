"""Who may call: name of the server, origin of the page, key, and how often; HTTP and WebSockets.

A browser hands every page what its user's machine can reach. Two things keep other people's pages
out: the Host has to be a name that is ours (whoever owns another may let it mean this machine: DNS
rebinding), and the page's own origin has to be allowed, whatever it sends.

Belongs to the event loop. Keys are compared in constant time and all of them each time, so that the
time of an answer tells nothing about a key.
"""

import hashlib
import hmac
import ipaddress
import math
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Literal

from starlette.datastructures import Headers, QueryParams
from starlette.types import Scope

from kqview.server.caller import Caller
from kqview.server.errors import Forbidden, RateLimited, Unauthorized
from kqview.server.peers import client_name
from kqview.server.settings import Settings

Access = Literal["open", "user", "admin"]

_MOST_CLIENTS: Final = 10_000


class Gate:
    """Lets a request in, or raises why not."""

    def __init__(self, settings: Settings) -> None:
        """Enforce *settings*."""
        self._settings = settings
        self._rate = _RateLimit(settings.rate_limit) if settings.rate_limit else None
        self._hosts = _Hosts(settings)

    def check(self, scope: Scope, *, access: Access) -> Caller:
        """Check one request or WebSocket.

        Raises:
            Forbidden: The server is not called by a name of its own, the page's origin is not
                allowed, or the key is no admin key.
            Unauthorized: A key is needed and none, or an unknown one, was sent.
            RateLimited: The client asks too often; guessing keys counts too.
        """
        headers = Headers(scope=scope)
        hosts = self._check_hosts(scope, headers)
        self._check_origin(scope, headers, hosts)
        settings = self._settings
        key = self._key(scope, headers)
        is_admin = _is_one_of(key, settings.admin_keys)
        is_user = _is_one_of(key, settings.api_keys) or is_admin
        caller = Caller(client_name((scope.get("client") or ("local", 0))[0]))
        if is_user:
            owner = _sha256(key).hex()
            caller = Caller(f"key-{owner[:8]}", is_admin, owner)
        if access == "open":
            return caller
        self.count(caller)
        if access == "admin" and not settings.admin_keys:
            raise Forbidden("auth.check: there is no admin key; start the server with one")
        if access == "admin" and is_user and not is_admin:
            raise Forbidden("auth.check: an admin key is needed; the one sent is none")
        if not is_user and (settings.api_keys or access == "admin"):
            what = "the API key is unknown" if key else "an API key is needed"
            raise Unauthorized(f"auth.check: {what}; send Authorization: Bearer KEY, or X-Api-Key")
        return caller

    def count(self, caller: Caller) -> None:
        """Count one request of *caller*.

        Raises:
            RateLimited: It asks too often.
        """
        if self._rate is not None:
            self._rate.take(caller.name)

    def _check_hosts(self, scope: Scope, headers: Headers) -> list[str]:
        """The hosts that the request is for: what it says, and what its proxy was asked for."""
        hosts = headers.getlist("host")
        if forwarded := scope.get("state", {}).get("forwarded_host"):
            hosts.append(forwarded)
        for host in hosts:
            if not self._hosts.allows(host, scope):
                raise Forbidden(
                    f"auth.check: this server is not called {host!r}; use its address, or add the "
                    "name to allowed_hosts (--allowed-hosts)"
                )
        return hosts

    def _check_origin(self, scope: Scope, headers: Headers, hosts: list[str]) -> None:
        allowed = self._settings.cors_origins
        origin = headers.get("origin")
        if "*" in allowed or (origin is not None and is_allowed_origin(origin, allowed)):
            return
        if origin is None:
            # What pages embed and send without an origin; following a link to here is fine.
            is_link = scope.get("method") in ("GET", "HEAD") and (
                headers.get("sec-fetch-mode") == "navigate"
            )
            if headers.get("sec-fetch-site") != "cross-site" or is_link:
                return
        elif self._hosts.is_own_page(origin, hosts, scope):
            return
        page = "another site" if origin is None else repr(origin)
        raise Forbidden(
            f"auth.check: pages of {page} may not call; add their origin to cors_origins "
            "(--cors-origin)"
        )

    def _key(self, scope: Scope, headers: Headers) -> str:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token:
            return token.strip()
        key = headers.get("x-api-key", "")
        if not key and scope["type"] == "websocket" and self._settings.query_key:
            key = QueryParams(scope["query_string"]).get("api_key", "")
        return key


LOOPBACK_ORIGIN: Final = re.compile(
    r"https?://(?:(?:[a-z0-9-]+\.)*localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?"
)
"""Pages of this machine, at any port. No name that somebody else could own."""


def is_allowed_origin(origin: str, allowed: Sequence[str]) -> bool:
    """Whether *allowed*, the setting ``cors_origins``, has *origin*."""
    if "*" in allowed or (origin in allowed and origin != "loopback"):
        return True
    return "loopback" in allowed and LOOPBACK_ORIGIN.fullmatch(origin) is not None


class _Hosts:
    """The names that are this server's own."""

    def __init__(self, settings: Settings) -> None:
        self._takes_any = "*" in settings.allowed_hosts
        self._names = {settings.host.lower(), *settings.allowed_hosts}
        self._suffixes = tuple(name[1:] for name in self._names if name.startswith("*."))

    def allows(self, host: str, scope: Scope) -> bool:
        return self._takes_any or self._is_own(host, scope)

    def is_own_page(self, origin: str, hosts: Sequence[str], scope: Scope) -> bool:
        """Whether a page came from this server, as *hosts* name it."""
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
        # An address is nobody's to point elsewhere, and browsers keep localhost to themselves.
        if name == "localhost" or name.endswith(".localhost") or name in self._names:
            return True
        if name.endswith(self._suffixes):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            # Where it is called from within a program, what that calls it.
            return bool(name) and name == (scope.get("server") or ("", 0))[0]
        return True


def _is_one_of(key: str, known: Sequence[str]) -> bool:
    # Digests are of one length, so that not even that of a key shows.
    given = _sha256(key)
    matches = [hmac.compare_digest(given, _sha256(one)) for one in known]
    return any(matches)


def _sha256(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class _RateLimit:
    """A token bucket a client: a minute's worth at once, then as they refill."""

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
        if len(self._buckets) > _MOST_CLIENTS:  # the one that was quiet longest
            self._buckets.popitem(last=False)
        if is_refused:
            raise RateLimited(
                f"rate.take: {self._per_minute:g} requests a minute are the limit; wait a moment",
                retry_after_s=math.ceil((1 - level) / self._per_s),
            )
