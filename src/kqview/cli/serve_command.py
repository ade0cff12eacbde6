"""``kqview serve``: serves the HTTP and WebSocket API until a signal ends it."""

import logging
import os
import signal
import socket
import sys
from functools import partial
from typing import Any, Final, NoReturn

import typer

from kqview.cli import hangups
from kqview.cli.model_file import check_model_file
from kqview.cli.options import fetch
from kqview.cli.server_options import CONFIG, ServerCommand, reader_of, with_settings
from kqview.errors import RequestError
from kqview.server.settings import Settings
from kqview.server.settings_table import rows_of
from kqview.server.web import supervisor
from kqview.system import HAS_FORK

COMMAND_CLASS: Final = ServerCommand
_CUT: Final = "ASGI callable returned without completing response."
_SUPERVISOR_MARGIN_S: Final = 5.0  # the worker's own watchdog, which knows more, goes first


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
    if config is None:
        hangups.release()
    read = reader_of(context, config, given)
    loaded = read()
    settings = loaded.config.settings
    one = [settings.model is not None, settings.demo, settings.hf is not None]
    if sum(one) != 1 and (any(one) or not loaded.config.models):
        raise RequestError(
            "name one model: --model FILE, --hf or --demo; or several with [models.ID] in a "
            "configuration file, --config FILE"
        )
    from kqview.cli.serving import HUNG_FACTOR, keep_freed_memory, run
    from kqview.server.app import create_app
    from kqview.server.web.tls import tls_context
    from kqview.server.web.worker import Supervised

    tls_context(settings)
    if settings.hf is not None:
        read = partial(read, model=fetch(settings.hf))
        loaded = read()
        settings = loaded.config.settings
    supervised = Supervised.from_env(os.environ)
    listener = supervised.listener if supervised else listen(settings.host, settings.port)
    with listener:
        if settings.model is not None:
            check_model_file(settings.model)
        app = create_app(loaded.config)  # reports wrong settings before anything starts
        if supervised is None and settings.supervise and hangups.is_program and HAS_FORK:
            hung_s = HUNG_FACTOR * settings.stall_timeout_s
            _become_supervisor(listener, settings, hung_s, reloads=config is not None)
        keep_freed_memory()
        log_to_stderr()
        reload = None if config is None else lambda: read().config
        run(app, settings, listener, supervised, reload)


def _become_supervisor(
    listener: socket.socket, settings: Settings, hung_s: float, *, reloads: bool
) -> NoReturn:
    """Replace this program and all that it has loaded by the supervisor of a worker."""
    listener.set_inheritable(True)
    sys.stdout.flush()
    sys.stderr.flush()
    limits = [
        listener.fileno(),
        settings.shutdown_grace_s,
        hung_s + _SUPERVISOR_MARGIN_S if hung_s else 0,
        int(settings.ssl_certfile is not None),
        int(reloads),
    ]
    script = [sys.executable, "-I", "-S", supervisor.__file__]
    # "-m" alone would import from the current folder first.
    worker = [sys.executable, "-I" if sys.flags.isolated else "-P", "-m", "kqview", *sys.argv[1:]]
    # They are kept for the supervisor's handlers: until it has them, any would just end it.
    signal.pthread_sigmask(signal.SIG_BLOCK, supervisor.STOPS)
    os.execv(sys.executable, [*script, *map(str, limits), *worker])


def listen(host: str, port: int) -> socket.socket:
    """The listening socket; opened before the model, so that a taken port is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def log_to_stderr() -> None:
    """Print the server's log lines, as they are; uvicorn's of clients that left are none."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("kqview.access", "kqview.server"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.getMessage() != _CUT)
