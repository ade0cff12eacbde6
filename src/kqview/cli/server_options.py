"""Options of commands made of tables of settings, so that flags, variables and keys cannot differ.

Those of ``kqview serve`` and ``kqview config show`` take the flags of llama-server as well.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final

from typer.core import TyperCommand

from kqview.cli.option_groups import option, parameter
from kqview.cli.server_words import switch_off, tell, translated_words
from kqview.server.config_file import ENVIRONMENT
from kqview.server.settings_table import SettingRow

CONFIG: Any = option(
    None, "Configuration file in TOML; kqview config init prints one.", "--config",
    metavar="FILE", envvar=ENVIRONMENT, show_envvar=False,
)  # fmt: skip
VARIABLES: Final = "kqview.variables"  # in the context: settings that other variables gave


class ServerCommand(TyperCommand):
    """A command with the options of the server, which takes llama-server's flags as well."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, and the variables of llama-server."""
        words, ctx.meta[VARIABLES] = translated_words(args, tell)
        return super().parse_args(ctx, words)


def with_settings(
    rows: Iterable[SettingRow],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Show typer an option for each of *rows*, which the command takes as ``**given``."""
    options: list[inspect.Parameter] = []
    for row in rows:
        flag = row.flag
        if row.kind is bool:
            flag += f"/{switch_off(row)}"
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
