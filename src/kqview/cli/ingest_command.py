"""``kqview ingest``: receives traces of generations and shows them, until a signal ends it."""

import os
from typing import Annotated, Final

import typer

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
    database: Annotated[
        str,
        typer.Option(
            envvar="KQVIEW_INGEST_DATABASE",
            help="SQLite file, or database URL: sqlite:///FILE or "
            "postgresql://USER:PASSWORD@HOST/NAME.",
        ),
    ] = "traces.db",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _WEB.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.")] = DEFAULT_PORT,
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key of the operator, who sees and deletes everything; other readers see only "
            "traces whose user_api_key they send. Without any, everyone sees everything. May also "
            "be set as KQVIEW_INGEST_KEYS, separated by commas.",
        ),
    ] = None,
    post_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that may post traces; without any, everyone may. May also be set as "
            "KQVIEW_INGEST_POST_KEYS.",
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option(help="Listen for other machines even without keys.")
    ] = False,
    max_traces: Annotated[
        int, typer.Option(help="Maximum number of traces to keep; 0 for no limit.")
    ] = 0,
    max_stored_bytes: Annotated[
        int, typer.Option(help="Maximum bytes of traces, as posted, to keep; 0 for no limit.")
    ] = 0,
    max_age_s: Annotated[
        float, typer.Option(help="Seconds to keep a trace; 0 for no limit.")
    ] = 0.0,
    max_body_bytes: Annotated[int, typer.Option(help="Maximum size of a trace.")] = MOST_BODY_BYTES,
    max_posts: Annotated[
        int, typer.Option(help="Maximum number of posts at a time, waiting ones included.")
    ] = MOST_POSTS,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of pages that may call the API; loopback for pages of this machine, "
            "* for any. Default: loopback."
        ),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(help="Host name that clients may use, besides the address."),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address or network of a proxy whose X-Forwarded-For is trusted."),
    ] = None,
    ssl_certfile: Annotated[
        str | None, typer.Option(help="Certificate chain in PEM; turns on HTTPS.")
    ] = None,
    ssl_keyfile: Annotated[
        str | None, typer.Option(help="Private key of the certificate in PEM.")
    ] = None,
    access_log: Annotated[bool, typer.Option(help="One JSON line per request on stderr.")] = True,
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
