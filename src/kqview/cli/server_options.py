"""The options of ``kqview serve``, which are those of ``kqview config show`` as well.

They are made from the fields of `kqview.server.settings.Settings`, so that flags, environment
variables and keys of a configuration file cannot differ.
"""

import dataclasses
import inspect
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer
from typer.core import TyperCommand

from kqview.cli.llama_server_flags import translated
from kqview.errors import RequestError
from kqview.server.settings import PREFIX, Settings, flag_of
from kqview.server.web.supervisor import ENVIRONMENT

if TYPE_CHECKING:
    from kqview.server.config_file import Loaded

ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="FILE", envvar=PREFIX + "CONFIG", show_envvar=False,
        help="Configuration file in TOML; kqview config init prints one.",
    ),
]  # fmt: skip
_NEGATIVE: Final = {"slot_endpoints": "--no-slots"}
_VARIABLES: Final = "kqview.variables"  # in the context: settings that other variables gave
_THEIRS: Final = "LLAMA_"


class ServerCommand(TyperCommand):
    """A command with the options of the server, which takes llama-server's flags as well."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, and the variables of llama-server."""
        own = {flag_of(name): PREFIX + name.upper() for name in Settings.__dataclass_fields__}
        words = translated(args, _note, os.environ, own)
        ctx.meta[_VARIABLES] = _of_variables(args, own)
        return super().parse_args(ctx, words)


def _of_variables(args: list[str], own: Mapping[str, str]) -> dict[str, str]:
    """Settings that llama-server's variables give, and not the command line *args*; by name."""
    names = {flag_of(name): name for name in Settings.__dataclass_fields__}
    given = set(translated(args, _ignore))
    found: dict[str, str] = {}
    for variable in sorted(os.environ):
        if variable.startswith(_THEIRS):
            alone = {
                one: text
                for one, text in os.environ.items()
                if one == variable or not one.startswith(_THEIRS)
            }
            words = translated([], _ignore, alone, own)
            found |= {names[one]: variable for one in words if one in names and one not in given}
    return found


def _note(text: str) -> None:
    """Tell the operator; a worker, which has the same command line, does not repeat it."""
    if ENVIRONMENT not in os.environ:
        typer.echo(text, err=True)


def _ignore(_text: str) -> None:
    pass


@contextmanager
def needing_server() -> Generator[None]:
    """Imports of the server: if a package is missing, the error says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise RequestError(
            f"kqview serve needs {error.name}, which is not installed; "
            'run pip install "kqview[server]"'
        ) from error


def reader_of(
    context: typer.Context, config: str | None, given: Mapping[str, Any]
) -> "Callable[..., Loaded]":
    """A function that reads the configuration, as often as it is called.

    Args:
        context: Of the command, which `ServerCommand` has parsed.
        config: The file, None for none.
        given: Values of the options by the name of their setting.

    Returns:
        Takes settings that count as flags and raises as `kqview.server.config_file.load`.

    Raises:
        RequestError: A package that the server needs is not installed.
    """
    with needing_server():
        from kqview.server.config_file import load
    # typer passes an empty list for a repeatable option that is not given
    flags = {name: None if value == [] else value for name, value in given.items()}
    environ, variables = dict(os.environ), context.meta[_VARIABLES]
    path = None if config is None else Path(config)

    def read(**more: Any) -> "Loaded":
        return load(path, environ=environ, flags={**flags, **more}, variables=variables)

    return read


def parameters() -> list[inspect.Parameter]:
    """The context, ``config``, and an option for each setting."""
    named = [("context", typer.Context, inspect.Parameter.empty), ("config", ConfigOption, None)]
    kinds = get_type_hints(Settings)
    for spec in dataclasses.fields(Settings):
        kind = list[str] if kinds[spec.name] == tuple[str, ...] else kinds[spec.name]
        names = [flag_of(spec.name)]
        if kind is bool:
            names = [f"{names[0]}/{_NEGATIVE.get(spec.name, '--no-' + names[0][2:])}"]
        option = typer.Option(
            *names, help=f"{_sentence(spec.metadata['help'])}.{_default(spec.default)}"
        )
        named.append((spec.name, Annotated[kind | None, option], None))
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, kind, default in named
    ]


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _default(value: Any) -> str:
    if value is None or value == () or isinstance(value, bool):
        return ""
    shown: Any = ",".join(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType]
    return f" Default: {shown}."
