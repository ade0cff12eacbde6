"""``kqview ingest``: receives traces of generations and shows them, until a signal ends it."""

import os
from typing import Any, Final

from kqview.cli.server_options import with_settings
from kqview.cli.starting import listen, log_to_stderr
from kqview.ingest.settings import WEB, IngestSettings, web_settings
from kqview.server.settings_table import rows_of

_ROWS: Final = {**rows_of(IngestSettings), **WEB}
_VARIABLES: Final = {
    "database": "KQVIEW_INGEST_DATABASE",
    "admin_keys": "KQVIEW_INGEST_KEYS",
    "api_keys": "KQVIEW_INGEST_POST_KEYS",
}


@with_settings(_ROWS.values())
def ingest(**given: Any) -> None:
    """Receive traces of generations with mods, store them, and show them on a page.

    Engines post to /ingest. Traces are stored in traces.db in the current folder unless
    --database says otherwise.

    Examples:

    - `kqview ingest`
    - `kqview ingest --database postgresql://me@localhost/traces`
    - `kqview ingest --host 0.0.0.0 --key SECRET --post-key OTHER --max-traces 100000`
    """
    values = {
        name: _ROWS[name].read(os.environ[variable])
        for name, variable in _VARIABLES.items()
        if os.environ.get(variable)
    }
    values |= {name: value for name, value in given.items() if value not in (None, [])}
    web = {name: values.pop(name) for name in WEB if name in values}
    settings = IngestSettings(web=web_settings(**web), **values)
    settings.check_bind()
    from kqview.cli.ingesting import run
    from kqview.ingest.app import create_app
    from kqview.server.web.tls import tls_context

    tls_context(settings.web)
    # A taken port is reported before the database is opened.
    with listen(settings.web.host, settings.web.port) as listener:
        app = create_app(settings)
        log_to_stderr()
        run(app, listener)
