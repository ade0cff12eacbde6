"""``kqview serve``: serves the HTTP and WebSocket API until a signal ends it.

The options are made from the fields of `kqview.server.settings.Settings`, so flags and environment
variables cannot differ.
"""

import dataclasses
import inspect
import logging
import os
import socket
import sys
from typing import Annotated, Any, Final, NoReturn, get_type_hints

import typer

from kqview.cli.options import HubOption, fetch
from kqview.errors import RequestError
from kqview.server import supervisor
from kqview.server.settings import Settings, flag_of

is_program = False
"""Set by the entry point: this process runs the command alone, so the supervisor may replace it."""

_SUPERVISOR_MARGIN_S: Final = 5.0  # the worker's own watchdog, which knows more, goes first
_INSTALL: Final = 'run pip install "kqview[server]"'
_NEGATIVE: Final = {"slot_endpoints": "--no-slots"}


def serve(*, hf: str | None = None, **given: Any) -> None:
    """Serve text with the attention of every token over HTTP and WebSockets.

    Every option can be set in the environment as well: --port as KQVIEW_PORT, --api-key as
    KQVIEW_API_KEYS with commas between several. Options win. The flags of llama.cpp's llama-server
    and its variables, such as LLAMA_ARG_CTX_SIZE, work too; the variables count last.

    Examples:

    - `kqview serve --demo`
    - `kqview serve --model model.gguf --slots 4 --host 0.0.0.0 --api-key SECRET`
    - `kqview serve -m model.gguf -c 16384 -np 4 --port 8080`
    """
    # typer passes an empty list for a repeatable option that is not given
    values = {name: None if value == [] else value for name, value in given.items()}
    settings = Settings.from_env(os.environ, **values)
    if sum([settings.model is not None, settings.demo, hf is not None]) != 1:
        raise typer.BadParameter("name one model: --model FILE, --hf or --demo")
    settings.check_bind()
    try:
        from kqview.cli.serving import HUNG_FACTOR, keep_freed_memory, run
        from kqview.server import create_app
        from kqview.server.security import tls_context
        from kqview.server.worker import Supervised
    except ModuleNotFoundError as error:
        raise RequestError(
            f"kqview serve needs {error.name}, which is not installed; {_INSTALL}"
        ) from error
    tls_context(settings)
    if hf is not None:
        settings = dataclasses.replace(settings, model=fetch(hf))
    supervised = Supervised.from_env(os.environ)
    listener = supervised.listener if supervised else listen(settings.host, settings.port)
    with listener:
        app = create_app(settings)  # reports wrong settings before anything starts
        if supervised is None and settings.supervise and is_program and hasattr(os, "fork"):
            _become_supervisor(listener, settings, HUNG_FACTOR * settings.stall_timeout_s)
        keep_freed_memory()
        log_to_stderr()
        run(app, settings, listener, supervised)


def _become_supervisor(listener: socket.socket, settings: Settings, hung_s: float) -> NoReturn:
    """Replace this program and all that it has loaded by the supervisor of a worker."""
    listener.set_inheritable(True)
    sys.stdout.flush()
    sys.stderr.flush()
    limits = [
        listener.fileno(),
        settings.shutdown_grace_s,
        hung_s + _SUPERVISOR_MARGIN_S if hung_s else 0,
        int(settings.ssl_certfile is not None),
    ]
    script = [sys.executable, "-I", "-S", supervisor.__file__]
    # "-m" alone would import from the current folder first.
    worker = [sys.executable, "-I" if sys.flags.isolated else "-P", "-m", "kqview", *sys.argv[1:]]
    os.execv(sys.executable, [*script, *map(str, limits), *worker])


def _signature() -> inspect.Signature:
    kinds = get_type_hints(Settings)
    parameters = [
        inspect.Parameter("hf", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=HubOption)
    ]
    for spec in dataclasses.fields(Settings):
        kind = list[str] if kinds[spec.name] == tuple[str, ...] else kinds[spec.name]
        names = [flag_of(spec.name)]
        if kind is bool:
            names = [f"{names[0]}/{_NEGATIVE.get(spec.name, '--no-' + names[0][2:])}"]
        option = typer.Option(
            *names,
            help=f"{_sentence(spec.metadata['help'])}.{_default(spec.default)}",
        )
        parameters.append(
            inspect.Parameter(
                spec.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, option],
            )
        )
    return inspect.Signature(parameters)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _default(value: Any) -> str:
    if value is None or value == () or isinstance(value, bool):
        return ""
    shown: Any = ",".join(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType]
    return f" Default: {shown}."


serve.__signature__ = _signature()  # pyright: ignore[reportFunctionMemberAccess]


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
    """Print the server's log lines, as they are."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("kqview.access", "kqview.server"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False
