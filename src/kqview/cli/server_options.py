"""Options of commands made of tables of settings, so that flags, variables and keys cannot differ.

Those of ``kqview serve`` and ``kqview config show`` take the flags of llama-server as well.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from typer.core import TyperCommand

from kqview.cli.llama_server_flags import translated
from kqview.cli.option_groups import option, parameter
from kqview.demo import SMOLLM2, model_path
from kqview.server.settings import PREFIX, Settings
from kqview.server.settings_table import SettingRow, rows_of
from kqview.server.web.supervisor import ENVIRONMENT

if TYPE_CHECKING:
    from kqview.server.config_file import Loaded

CONFIG: Any = option(
    None, "Configuration file in TOML; kqview config init prints one.", "--config",
    metavar="FILE", envvar=PREFIX + "CONFIG", show_envvar=False,
)  # fmt: skip
_NEGATIVE: Final = {"slot_endpoints": "--no-slots"}
_VARIABLES: Final = "kqview.variables"  # in the context: settings that other variables gave


class ServerCommand(TyperCommand):
    """A command with the options of the server, which takes llama-server's flags as well."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, and the variables of llama-server."""
        for i in range(len(args) - 1):
            if args[i : i + 2] == ["--demo", SMOLLM2]:
                args = [*args[:i], "--model", str(model_path(SMOLLM2)), *args[i + 2 :]]
        rows = rows_of(Settings).values()
        own = {row.flag: PREFIX + row.name.upper() for row in rows}
        words, variables = translated(args, _note, os.environ, own)
        found = {row.name: variables[row.flag] for row in rows if row.flag in variables}
        ctx.meta[_VARIABLES] = found
        return super().parse_args(ctx, words)


def _note(text: str) -> None:
    """Tell the operator; a worker, which has the same command line, does not repeat it."""
    if ENVIRONMENT not in os.environ:
        typer.echo(text, err=True)


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
    """
    from kqview.server.config_file import load

    # typer passes an empty list for a repeatable option that is not given
    flags = {name: None if value == [] else value for name, value in given.items()}
    environ, variables = dict(os.environ), context.meta[_VARIABLES]
    path = None if config is None else Path(config)

    def read(**more: Any) -> "Loaded":
        return load(path, environ=environ, flags={**flags, **more}, variables=variables)

    return read


def with_settings(
    rows: Iterable[SettingRow],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Show typer an option for each of *rows*, which the command takes as ``**given``."""
    options: list[inspect.Parameter] = []
    for row in rows:
        flag = row.flag
        if row.kind is bool:
            flag += f"/{_NEGATIVE.get(row.name, f'--no-{flag[2:]}')}"
        text = f"{row.help[0].upper()}{row.help[1:]}."
        if row.default not in (None, ()) and row.kind is not bool:
            shown = ",".join(row.default) if row.kind is tuple else row.default
            text += f" Default: {shown}."
        kind = list[str] if row.kind is tuple else row.kind
        options.append(parameter(row.name, option(None, text, flag), kind | None))

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters.values()
        named = [one for one in own if one.kind == one.KEYWORD_ONLY]
        command.__signature__ = inspect.Signature([*named, *options])  # pyright: ignore[reportFunctionMemberAccess]
        return command

    return decorated
