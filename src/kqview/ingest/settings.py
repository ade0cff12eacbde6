"""Settings of the receiver: its database and limits and, in `web`, its address and keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kqview.errors import RequestError
from kqview.server.settings import Settings, is_loopback
from kqview.server.settings_table import Count, NotNegative, SettingRow, Size, rows_of, setting

_MOST_CONNECTIONS: Final = 1024
_MEMORY_BYTES: Final = 2**30

_WEB: Final[Mapping[str, Mapping[str, Any]]] = {
    "host": {},
    "port": {"default": 6767},
    "admin_keys": {
        "flag": "--key",
        "help": "key of the operator, who sees and deletes everything; other readers see only "
        "traces whose user_api_key they send. Without any, everyone sees everything. May also be "
        "set as KQVIEW_INGEST_KEYS, separated by commas",
    },
    "api_keys": {
        "flag": "--post-key",
        "help": "key that may post traces; without any, everyone may. May also be set as "
        "KQVIEW_INGEST_POST_KEYS",
    },
    "public": {"help": "listen for other machines even without keys"},
    "max_body_bytes": {"default": 75 * 2**20, "help": "maximum size of a trace"},
    "cors_origins": {},
    "allowed_hosts": {},
    "trusted_proxies": {},
    "ssl_certfile": {},
    "ssl_keyfile": {},
    "access_log": {"help": "one JSON line per request on stderr"},
}
WEB: Final[Mapping[str, SettingRow]] = {
    name: replace(rows_of(Settings)[name], **changes) for name, changes in _WEB.items()
}
"""The server's settings that a receiver has too."""


def web_settings(**given: Any) -> Settings:
    """The server's settings as they apply to a receiver; *given* are some of `WEB`, by name.

    Raises:
        RequestError: A setting is invalid.
    """
    values = {name: row.default for name, row in WEB.items()} | given
    return Settings(
        **values,
        memory_budget_bytes=max(_MEMORY_BYTES, 4 * values["max_body_bytes"]),
        max_connections=_MOST_CONNECTIONS,
        # One machine may post the traces of hundreds of requests at a time.
        max_connections_per_client=_MOST_CONNECTIONS // 2,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestSettings:
    """Settings of a receiver; checked when it is made.

    ``web`` is its address, keys and HTTP limits: ``admin_keys`` are the operator's, who sees and
    deletes everything; ``api_keys`` may post. The table has the meaning of the other fields.
    """

    database: str = setting(
        "traces.db",
        "SQLite file, or database URL: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME. May "
        "also be set as KQVIEW_INGEST_DATABASE",
        is_secret=True,  # it may hold a password
    )
    max_traces: Size = setting(0, "maximum number of traces to keep; 0 for no limit")
    max_stored_bytes: Size = setting(
        0, "maximum bytes of traces, as posted, to keep; 0 for no limit"
    )
    max_age_s: NotNegative = setting(0.0, "seconds to keep a trace; 0 for no limit")
    max_posts: Count = setting(256, "maximum number of posts at a time, waiting ones included")
    web: Settings = field(default_factory=web_settings)

    def __post_init__(self) -> None:
        """Check what ``web`` does not check."""
        for name, row in rows_of(IngestSettings).items():
            object.__setattr__(self, name, row.checked(getattr(self, name)))
        if self.web.api_keys and not self.web.admin_keys:
            raise RequestError(
                "api_keys are set without admin_keys, so nobody could read; set a key too (--key)"
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
        kinds = {"--key for reading": web.admin_keys, "--post-key for posting": web.api_keys}
        missing = " and ".join(name for name, keys in kinds.items() if not keys)
        raise RequestError(
            f"{web.host} can be reached from other machines; set {missing}, listen on 127.0.0.1, "
            "or allow it (--public)"
        )
