"""Who may call: origin of the page, key, and how often; the same check for HTTP and WebSockets.

Belongs to the event loop. Keys are compared in constant time and all of them each time, so that the
time of an answer tells nothing about a key.
"""

import hashlib
import hmac
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Literal
from urllib.parse import urlsplit

from starlette.datastructures import Headers, QueryParams
from starlette.types import Scope

from kqview.server.caller import Caller
from kqview.server.errors import Forbidden, RateLimited, Unauthorized
from kqview.server.settings import Settings

Access = Literal["open", "user", "admin"]

_MOST_CLIENTS: Final = 10_000


class Gate:
    """Lets a request in, or raises why not."""

    def __init__(self, settings: Settings) -> None:
        """Enforce *settings*."""
        self._settings = settings
        self._rate = _RateLimit(settings.rate_limit) if settings.rate_limit else None
        self._origins = frozenset(settings.cors_origins)

    def check(self, scope: Scope, *, access: Access) -> Caller:
        """Check one request or WebSocket.

        Raises:
            Forbidden: The page's origin is not allowed, or the key is no admin key.
            Unauthorized: A key is needed and none, or an unknown one, was sent.
            RateLimited: The client asks too often; guessing keys counts too.
        """
        headers = Headers(scope=scope)
        self._check_origin(headers)
        settings = self._settings
        key = self._key(scope, headers)
        is_admin = _is_one_of(key, settings.admin_keys)
        is_user = _is_one_of(key, settings.api_keys) or is_admin
        caller = Caller(_address(scope))
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

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or "*" in self._origins or origin in self._origins:
            return
        if _is_own_page(origin, headers.get("host", "")):
            return
        raise Forbidden(
            f"auth.check: pages of {origin!r} may not call; add it to cors_origins (--cors-origin)"
        )

    def _key(self, scope: Scope, headers: Headers) -> str:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token:
            return token.strip()
        key = headers.get("x-api-key", "")
        if not key and scope["type"] == "websocket" and self._settings.query_key:
            key = QueryParams(scope["query_string"]).get("api_key", "")
        return key


def _is_one_of(key: str, known: Sequence[str]) -> bool:
    # Digests are of one length, so that not even that of a key shows.
    given = _sha256(key)
    matches = [hmac.compare_digest(given, _sha256(one)) for one in known]
    return any(matches)


def _sha256(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_own_page(origin: str, host: str) -> bool:
    """Whether a page came from this server.

    A name proves nothing: whoever owns it may let it mean 127.0.0.1 (DNS rebinding).
    """
    try:
        parts = urlsplit(origin)
        if not host or parts.netloc != host:
            return False
        if parts.hostname != "localhost":
            ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        return False
    return True


def _address(scope: Scope) -> str:
    address: str = (scope.get("client") or ("local", 0))[0]
    if ":" not in address:
        return address
    # A client of IPv6 has a whole network to call from.
    try:
        return str(ipaddress.ip_network(f"{address.partition('%')[0]}/64", strict=False))
    except ValueError:
        return address


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
