"""``kqview ingest``: receives traces of generations and shows them, until a signal ends it."""

import os
from typing import Final

from kqview.cli.option_groups import option
from kqview.cli.serve_command import listen, log_to_stderr
from kqview.ingest.settings import (
    DEFAULT_PORT,
    MOST_BODY_BYTES,
    MOST_POSTS,
    IngestSettings,
    web_settings,
)

_WEB: Final = web_settings()


def ingest(
    *,
    database: str = option(
        "traces.db",
        "SQLite file, or database URL: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME.",
        envvar="KQVIEW_INGEST_DATABASE",
    ),
    host: str = option(_WEB.host, "Address to listen on."),
    port: int = option(DEFAULT_PORT, "Port to listen on; 0 for a free one."),
    key: list[str] | None = option(
        None,
        "Key of the operator, who sees and deletes everything; other readers see only "
        "traces whose user_api_key they send. Without any, everyone sees everything. May also "
        "be set as KQVIEW_INGEST_KEYS, separated by commas.",
    ),
    post_key: list[str] | None = option(
        None,
        "Key that may post traces; without any, everyone may. May also be set as "
        "KQVIEW_INGEST_POST_KEYS.",
    ),
    public: bool = option(False, "Listen for other machines even without keys."),
    max_traces: int = option(0, "Maximum number of traces to keep; 0 for no limit."),
    max_stored_bytes: int = option(
        0, "Maximum bytes of traces, as posted, to keep; 0 for no limit."
    ),
    max_age_s: float = option(0.0, "Seconds to keep a trace; 0 for no limit."),
    max_body_bytes: int = option(MOST_BODY_BYTES, "Maximum size of a trace."),
    max_posts: int = option(
        MOST_POSTS, "Maximum number of posts at a time, waiting ones included."
    ),
    cors_origin: list[str] | None = option(
        None,
        "Origin of pages that may call the API; loopback for pages of this machine, "
        "* for any. Default: loopback.",
    ),
    allowed_hosts: list[str] | None = option(
        None, "Host name that clients may use, besides the address."
    ),
    trusted_proxy: list[str] | None = option(
        None, "Address or network of a proxy whose X-Forwarded-For is trusted."
    ),
    ssl_certfile: str | None = option(None, "Certificate chain in PEM; turns on HTTPS."),
    ssl_keyfile: str | None = option(None, "Private key of the certificate in PEM."),
    access_log: bool = option(True, "One JSON line per request on stderr."),
) -> None:
    """Receive traces of generations with mods, store them, and show them on a page.

    Engines post to /ingest. Traces are stored in traces.db in the current folder unless
    --database says otherwise.

    Examples:

    - `kqview ingest`
    - `kqview ingest --database postgresql://me@localhost/traces`
    - `kqview ingest --host 0.0.0.0 --key SECRET --post-key OTHER --max-traces 100000`
    """
    settings = IngestSettings(
        database=database,
        max_traces=max_traces,
        max_stored_bytes=max_stored_bytes,
        max_age_s=max_age_s,
        max_posts=max_posts,
        web=web_settings(
            host=host,
            port=port,
            keys=_keys(key, "KQVIEW_INGEST_KEYS"),
            post_keys=_keys(post_key, "KQVIEW_INGEST_POST_KEYS"),
            max_body_bytes=max_body_bytes,
            cors_origins=tuple(cors_origin or _WEB.cors_origins),
            allowed_hosts=tuple(allowed_hosts or ()),
            trusted_proxies=tuple(trusted_proxy or ()),
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
            public=public,
            access_log=access_log,
        ),
    )
    settings.check_bind()
    from kqview.cli.ingesting import run
    from kqview.ingest.app import create_app
    from kqview.server.web.security import tls_context

    tls_context(settings.web)
    with listen(host, port) as listener:  # a taken port is reported before the database is opened
        app = create_app(settings)
        log_to_stderr()
        run(app, listener)


def _keys(given: list[str] | None, name: str) -> tuple[str, ...]:
    """Keys of the command line, or else of the environment variable *name*."""
    parts = given or [one.strip() for one in os.environ.get(name, "").split(",")]
    return tuple(filter(None, parts))
