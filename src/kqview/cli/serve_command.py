"""``kqview serve``: serves the HTTP and WebSocket API until a signal ends it."""

from typing import Any, Final

import typer

from kqview.cli.server_options import CONFIG, VARIABLES, ServerCommand, with_settings
from kqview.cli.server_words import reader_of
from kqview.cli.starting import start
from kqview.server.settings import Settings
from kqview.server.settings_table import rows_of

COMMAND_CLASS: Final = ServerCommand


@with_settings(rows_of(Settings).values())
def serve(*, context: typer.Context, config: str | None = CONFIG, **given: Any) -> None:
    """Serve text with the attention of every token over HTTP and WebSockets.

    Every option can be set in the environment as well: --port as KQVIEW_PORT, --api-key as
    KQVIEW_API_KEYS, or in a configuration file (--config). Several values have commas between
    them. Options win over the environment, and that wins over the file. The flags of llama.cpp's
    llama-server and its variables, such as LLAMA_ARG_CTX_SIZE, work too; ours win over its
    variables.

    Examples:

    - `kqview serve --demo`
    - `kqview serve --model model.gguf --slots 4 --host 0.0.0.0 --api-key SECRET`
    - `kqview serve -m model.gguf -c 16384 -np 4 --port 8080`
    - `kqview serve --config kqview.toml`
    """
    start(config, reader_of(config, given, context.meta[VARIABLES]))
