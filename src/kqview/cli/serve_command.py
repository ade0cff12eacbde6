"""``kqview serve``: the HTTP and WebSocket API on a port, until it is told to end.

The options are the fields of `kqview.server.settings.Settings`, made from them, so that flag,
environment variable and table of the README cannot differ.
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
from kqview.server.settings import Settings

is_program = False
"""Whether this process is the command's own, as its entry point says: only that one is replaced."""

_SUPERVISOR_MARGIN_S: Final = 5.0  # the worker's own watchdog is to be first: it knows more
_NEEDS_EXTRA: Final = 'kqview serve needs more packages; pip install "kqview[server]"'
# Flags that the other commands have too, and lists that are given one by one.
_FLAGS: Final = {
    "n_slots": "--slots",
    "n_ctx": "--ctx",
    "n_threads": "--threads",
    "n_gpu_layers": "--ngl",
    "api_keys": "--api-key",
    "admin_keys": "--admin-key",
    "cors_origins": "--cors-origin",
    "trusted_proxies": "--trusted-proxy",
}


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def serve(*, hf: str | None = None, **given: Any) -> None:
    """Serve the API: text with the attention of every token, over HTTP and WebSockets.

    Every option is a variable of the environment too: --port is KQVIEW_PORT, --api-key is
    KQVIEW_API_KEYS, with commas between several. Options win.

    Examples:

    - `kqview serve --demo`
    - `kqview serve --model model.gguf --slots 4 --host 0.0.0.0 --api-key SECRET`
    """
    # typer gives an empty list for an option that was left out
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
        raise RequestError(f"serve: {error.name} is missing; {_NEEDS_EXTRA}") from error
    tls_context(settings)
    if hf is not None:
        settings = dataclasses.replace(settings, model=fetch(hf))
    supervised = Supervised.from_env(os.environ)
    listener = supervised.listener if supervised else _listen(settings.host, settings.port)
    with listener:
        app = create_app(settings)  # what it refuses is said before anything is started
        if supervised is None and settings.supervise and is_program and hasattr(os, "fork"):
            _become_supervisor(listener, settings, HUNG_FACTOR * settings.stall_timeout_s)
        keep_freed_memory()
        _log_to_stderr()
        run(app, settings, listener, supervised)


def _become_supervisor(listener: socket.socket, settings: Settings, hung_s: float) -> NoReturn:
    """Replace this program, with all that it has loaded, by the supervisor of a worker."""
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
    # "-m" alone would import from the current folder first, whatever lies in it.
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
            names = [f"{names[0]}/--no-{names[0][2:]}"]
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


def _listen(host: str, port: int) -> socket.socket:
    """The listening socket; opened before the model, so that a taken port is said at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("kqview.access", "kqview.server"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False
