"""Config text: a configuration written as TOML, with the help of each key or with its origin.

Made of the fields of `Settings` and of the tables in `kqview.server.config` with their docstrings,
so that what is printed cannot differ from what is read.
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec

from kqview.server.config import Config, Model, annotations_of, facts_of
from kqview.server.config_file import Key, Loaded, name_of, shown_text
from kqview.server.settings import Settings

_WIDTH: Final = 100
_MASK: Final = "***"
_ID: Final = "ID"
_RESTART: Final = "; needs a restart"
_TABLE: Final = re.compile(r"^Table \[?[\w.]+\]?(?: of a model)?[:;,.]? ?")
_SETTINGS: Final = {spec.name: spec for spec in dataclasses.fields(Settings)}
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


@dataclass(frozen=True, slots=True)
class _Row:
    """A key of a table.

    Attributes:
        key: Where it is.
        value: Its value, None if it has none.
        help: What it means.
        is_secret: Whether its value is never shown.
    """

    key: Key
    value: Any
    help: str
    is_secret: bool = False


@dataclass(frozen=True, slots=True)
class _Table:
    key: Key
    help: str
    rows: Sequence[_Row]


def all_keys() -> str:
    """A file with all keys, their help and their defaults; unedited, it changes nothing."""
    config = Config(settings=Settings(), models={_ID: Model()})
    parts = [_HEAD]
    for table in _tables(config):
        mark = "#" if _ID in table.key else ""  # of which there may be any number
        lines = [*_comment(table.help), f"{mark}[{name_of(table.key)}]"]
        for row in table.rows:
            value = "" if row.value is None else f" {_written(row.value)}"
            lines += [*_comment(row.help), f"#{name_of(row.key[-1:])} ={value}"]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def effective(loaded: Loaded) -> str:
    """The values in effect, each with its origin, as TOML; secrets are masked."""
    parts: list[str] = []
    for table in _tables(loaded.config):
        if not table.rows or not _is_shown(loaded, table.key):
            continue
        written = [(_line(row), loaded.origin(*row.key)) for row in table.rows]
        width = min(max((len(line) for line, _ in written), default=0), 60)
        lines = [f"{line:<{width}}  # {origin}" for line, origin in written]
        parts.append("\n".join([f"[{name_of(table.key)}]", *lines]) + "\n")
    return "\n".join(parts)


def effective_values(loaded: Loaded) -> list[dict[str, Any]]:
    """The same for programs: ``key``, ``value``, ``origin`` and ``where`` of each."""
    return [
        {
            "key": name_of(row.key), "value": _masked(row),
            "origin": loaded.origin(*row.key).kind, "where": loaded.origin(*row.key).where,
        }
        for table in _tables(loaded.config)
        if _is_shown(loaded, table.key)
        for row in table.rows
    ]  # fmt: skip


def _is_shown(loaded: Loaded, key: Key) -> bool:
    # Without [models] the one model is that of [server].
    return key[0] != "models" or ("models",) in loaded.origins


def _line(row: _Row) -> str:
    name = name_of(row.key[-1:])
    return f"#{name} =" if row.value is None else f"{name} = {_written(_masked(row))}"


def _masked(row: _Row) -> Any:
    if not row.is_secret or row.value is None:
        return row.value
    return [_MASK] * len(row.value) if isinstance(row.value, tuple) else _MASK  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]


# ---- tables


def _tables(config: Config) -> Iterator[_Table]:
    rows = [
        _Row(
            ("server", spec.name), getattr(config.settings, spec.name), _help_of(spec),
            spec.metadata["is_secret"],
        )
        for spec in dataclasses.fields(Settings)
    ]  # fmt: skip
    yield _Table(("server",), "Settings; flags and environment variables set them as well.", rows)
    for name in Config.__struct_fields__[1:]:
        yield from _tables_in(name, (), getattr(config, name), "")


def _tables_in(name: str, parent: Key, value: Any, text: str) -> Iterator[_Table]:
    key = (*parent, name)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value)
        rows = [_Row((*key, one), part, "") for one, part in items.items() if not _is_table(part)]
        if rows or (not items and name == "sampling"):
            yield _Table(key, text, rows)
        elif not items and name != "models":
            yield _Table((*key, _ID), text, ())
        for one, part in items.items():
            if _is_table(part):
                yield from _tables_in(one, key, part, "")
        return
    kind = cast("type", value.__class__)
    about, texts = _documented(kind)
    hints = annotations_of(kind)
    parts = {field: getattr(value, field) for field in hints}
    rows = [
        _Row((*key, field), part, _help(field, hints[field], texts))
        for field, part in parts.items()
        if not _is_table(part)
    ]
    if rows:
        yield _Table(key, about or text, rows)
    for field, part in parts.items():
        if _is_table(part):
            yield from _tables_in(field, key, part, texts.get(field, ""))


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping | msgspec.Struct)


# ---- help


def _help_of(spec: "dataclasses.Field[Any]") -> str:
    return spec.metadata["help"] + (_RESTART if spec.metadata["restart"] else "")


def _help(field: str, annotation: Any, texts: Mapping[str, str]) -> str:
    text = texts.get(field, "")
    if not text and field in _SETTINGS:
        text = _SETTINGS[field].metadata["help"]
    return text + (_RESTART if facts_of(annotation).get("restart") else "")


def _documented(table: type) -> tuple[str, dict[str, str]]:
    """What a docstring says of its table, and of each of its fields."""
    text = re.sub("`+", "", inspect.cleandoc(table.__doc__ or ""))
    about, _, attributes = text.partition("\n\nAttributes:\n")
    found = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", attributes, re.M)
    texts = {name: " ".join(words.split()).removesuffix(".") for name, words in found}
    return _TABLE.sub("", " ".join(about.split())), texts


def _comment(text: str) -> list[str]:
    if not text:
        return []
    sentence = text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")
    return textwrap.wrap(sentence, _WIDTH, initial_indent="# ", subsequent_indent="# ")


# ---- values


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
