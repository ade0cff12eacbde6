"""Settings of the receiver: its database and limits and, in `web`, its address and keys."""

from dataclasses import dataclass, field
from typing import Final

from kqview.errors import RequestError
from kqview.server.settings import Settings, is_loopback

DEFAULT_PORT: Final = 6767
MOST_BODY_BYTES: Final = 75 * 2**20
MOST_POSTS: Final = 256
_MOST_CONNECTIONS: Final = 1024
_MEMORY_BYTES: Final = 2**30


def web_settings(
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    keys: tuple[str, ...] = (),
    post_keys: tuple[str, ...] = (),
    max_body_bytes: int = MOST_BODY_BYTES,
    cors_origins: tuple[str, ...] = ("loopback",),
    allowed_hosts: tuple[str, ...] = (),
    trusted_proxies: tuple[str, ...] = (),
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
    public: bool = False,
    access_log: bool = True,
) -> Settings:
    """Return the server's settings that apply to a receiver.

    Raises:
        RequestError: A setting is invalid.
    """
    return Settings(
        host=host,
        port=port,
        admin_keys=keys,
        api_keys=post_keys,
        max_body_bytes=max_body_bytes,
        cors_origins=cors_origins,
        allowed_hosts=allowed_hosts,
        trusted_proxies=trusted_proxies,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        public=public,
        access_log=access_log,
        memory_budget_bytes=max(_MEMORY_BYTES, 4 * max_body_bytes),
        max_connections=_MOST_CONNECTIONS,
        # One machine may post the traces of hundreds of requests at a time.
        max_connections_per_client=_MOST_CONNECTIONS // 2,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestSettings:
    """Settings of a receiver; checked when it is made.

    Attributes:
        database: A file for SQLite, or the URL of a database: ``sqlite:///FILE``,
            ``postgresql://USER:PASSWORD@HOST/NAME``.
        max_traces: Number of traces to keep, the newest ones; 0 for no limit.
        max_stored_bytes: Bytes of traces to keep, as posted; 0 for no limit.
        max_age_s: Seconds for which to keep a trace; 0 for no limit.
        max_posts: Maximum number of posts at a time, waiting ones included; more get 503.
        web: Address, keys and HTTP limits. ``admin_keys`` are the operator's, who sees and deletes
            everything; ``api_keys`` may post.
    """

    database: str = field(repr=False)  # it may hold a password
    max_traces: int = 0
    max_stored_bytes: int = 0
    max_age_s: float = 0.0
    max_posts: int = MOST_POSTS
    web: Settings = field(default_factory=web_settings)

    def __post_init__(self) -> None:
        """Check what ``web`` does not check."""
        for name in ("max_traces", "max_stored_bytes", "max_age_s"):
            if getattr(self, name) < 0:
                raise RequestError(f"{name} is {getattr(self, name)}; use 0 for no limit, or more")
        if self.max_posts < 1:
            raise RequestError(f"max_posts is {self.max_posts}; the minimum is 1")
        if self.web.api_keys and not self.web.admin_keys:
            raise RequestError(
                "post_keys are set without keys, so nobody could read; set a key too (--key)"
            )

    def check_bind(self) -> None:
        """Refuse to listen for other machines without keys.

        Raises:
            RequestError: The address is not a loopback address, a kind of key is missing, and
                ``public`` is off.
        """
        web = self.web
        if web.public or is_loopback(web.host) or (web.admin_keys and web.api_keys):
            return
        missing = " and ".join(
            name
            for name, keys in (
                ("--key for reading", web.admin_keys),
                ("--post-key for posting", web.api_keys),
            )
            if not keys
        )
        raise RequestError(
            f"{web.host} can be reached from other machines; set {missing}, listen on 127.0.0.1, "
            "or allow it (--public)"
        )
