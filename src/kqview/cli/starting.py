"""Starts ``kqview serve`` once its command line was read: supervisor, listening socket, log.

It imports what serves only in the process that does: the one that becomes the supervisor reads the
settings and no more.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NoReturn

from kqview.cli import hangups
from kqview.cli.model_file import check_model_file, fetch
from kqview.cli.server_words import plain_options, reader_of, tell, translated_words
from kqview.errors import RequestError
from kqview.server.config_file import Loaded
from kqview.server.settings import Settings
from kqview.server.web import supervisor
from kqview.server.web.tls import tls_context
from kqview.server.web.worker import HUNG_FACTOR, Supervised
from kqview.system import HAS_FORK

_CUT: Final = "ASGI callable returned without completing response."
_SUPERVISOR_MARGIN_S: Final = 5.0  # the worker's own watchdog, which knows more, goes first


def try_plainly(words: Sequence[str]) -> bool:
    """Run the command with *words*, unless they need typer, to show help or to refuse them.

    typer, and pydantic and rich that it imports, would stay: 11 MB, and 0.2 s of each start.
    """
    notes: list[str] = []
    try:
        own, variables = translated_words(words, notes.append)
    except RequestError:
        return False
    given = plain_options(own)
    if given is None:
        return False
    for note in notes:
        tell(note)
    config = given.pop("config")
    start(config, reader_of(config, given, variables))
    return True


def start(config: str | None, read: Callable[..., Loaded]) -> None:
    """Serve until a signal ends it.

    Args:
        config: The configuration file, None for none.
        read: What `reader_of` returned.

    Raises:
        RequestError: A setting is wrong.
        ModelLoadError: The model cannot be loaded.
        OSError: The port is taken, or a file cannot be read.
    """
    if config is None:
        hangups.release()
    loaded = read()
    settings = loaded.config.settings
    one = [settings.model is not None, settings.demo, settings.hf is not None]
    if sum(one) != 1 and (any(one) or not loaded.config.models):
        raise RequestError(
            "name one model: --model FILE, --hf or --demo; or several with [models.ID] in a "
            "configuration file, --config FILE"
        )
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
        if supervised is None and settings.supervise and hangups.is_program and HAS_FORK:
            hung_s = HUNG_FACTOR * settings.stall_timeout_s
            _become_supervisor(listener, settings, hung_s, reloads=config is not None)
        from kqview.cli.serving import keep_freed_memory, run
        from kqview.server.app import create_app

        app = create_app(loaded.config)  # reports wrong settings before anything starts
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
