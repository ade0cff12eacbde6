"""Config text: a configuration written as TOML, with the help of each key or with its origin.

Made of the tables that are read, so that what is printed cannot differ from what is read.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from kqview.server.config import Config, ModelConfig
from kqview.server.config_file import Loaded, TableKey, name_of, shown_text, tables_of
from kqview.server.settings import Settings

_WIDTH: Final = 100
_MASK: Final = "***"
_ID: Final = "ID"
_RESTART: Final = "; needs a restart"
_HEAD: Final = """\
# Configuration of kqview serve --config FILE, in TOML.
#
# A line that begins with "#" and a key shows the default of that key: to change it, remove the "#"
# and edit the value. A key without a value has no default. A flag of kqview serve and a variable
# such as KQVIEW_PORT win over [server]. Relative paths begin at the folder of this file.
#
# A secret or a chat template may also be read from a file: {file = "NAME"}; a file of API keys has
# one on each line. kqview config check FILE finds errors. On SIGHUP a running server reads this
# file again; keys that say "needs a restart" keep their values.
"""


def all_keys() -> str:
    """A file with all keys, their help and their defaults; unedited, it changes nothing."""
    parts = [_HEAD]
    for table in tables_of(Config(settings=Settings(), models={_ID: ModelConfig()})):
        mark = "#" if _ID in table.key else ""  # of which there may be any number
        lines = [*_comment(table.help), f"{mark}[{name_of(table.key)}]"]
        for entry in table.entries:
            if entry.row is not None:
                lines += _comment(entry.row.help + (_RESTART if entry.row.restart else ""))
            value = "" if entry.value is None else f" {_written(entry.value)}"
            lines.append(f"#{name_of(entry.key[-1:])} ={value}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def effective(loaded: Loaded) -> str:
    """The values in effect, each with its origin, as TOML; secrets are masked."""
    parts: list[str] = []
    for table in loaded.tables():
        if not table.entries:
            continue
        written = [(_line(entry), loaded.origin(*entry.key)) for entry in table.entries]
        width = min(max(len(line) for line, _ in written), 60)
        lines = [f"{line:<{width}}  # {origin}" for line, origin in written]
        parts.append("\n".join([f"[{name_of(table.key)}]", *lines]) + "\n")
    return "\n".join(parts)


def effective_values(loaded: Loaded) -> list[dict[str, Any]]:
    """The same for programs: ``key``, ``value``, ``origin`` and ``where`` of each."""
    return [
        {
            "key": name_of(entry.key), "value": _masked(entry),
            "origin": loaded.origin(*entry.key).kind, "where": loaded.origin(*entry.key).where,
        }
        for table in loaded.tables()
        for entry in table.entries
    ]  # fmt: skip


def _line(entry: TableKey) -> str:
    name = name_of(entry.key[-1:])
    return f"#{name} =" if entry.value is None else f"{name} = {_written(_masked(entry))}"


def _masked(entry: TableKey) -> Any:
    if entry.row is None or not entry.row.is_secret or entry.value is None:
        return entry.value
    return [_MASK] * len(entry.value) if isinstance(entry.value, tuple) else _MASK  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]


def _comment(text: str) -> list[str]:
    if not text:
        return []
    sentence = " ".join(text.split())
    sentence = sentence[0].upper() + sentence[1:] + ("" if sentence.endswith(".") else ".")
    return textwrap.wrap(sentence, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _written(value: Any) -> str:
    """*value* in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return shown_text(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return "{" + ", ".join(f"{name_of((k,))} = {_written(one)}" for k, one in items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_written, cast("Sequence[Any]", value))) + "]"
    return str(value)
