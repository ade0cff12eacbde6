"""The command line of ``kqview serve``, read without typer where that does not matter.

A server lives long, and typer would stay in its memory. So what it would accept is read here, by
the same table of settings, and all else is left to it: help, mistakes, and rare ways to write.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from kqview.cli.llama_server_flags import translated
from kqview.demo import SMOLLM2, model_path
from kqview.server.config_file import ENVIRONMENT as CONFIG_VARIABLE, Loaded, load
from kqview.server.settings import PREFIX, Settings
from kqview.server.settings_table import SettingRow, rows_of
from kqview.server.web.supervisor import ENVIRONMENT
from kqview.system import HAS_FORK

_CONFIG: Final = "--config"
_NEGATIVE: Final = {"slot_endpoints": "--no-slots"}
_NUMBER: Final = re.compile(r"-?\d{1,18}(\.\d{1,18})?", re.ASCII)


def translated_words(
    words: Sequence[str], note: Callable[[str], object]
) -> tuple[list[str], dict[str, str]]:
    """*words* with llama-server's flags, and its variables, written as ours.

    Args:
        words: The command line behind ``serve``.
        note: Called with a line for the operator.

    Returns:
        The command line, and the settings in it that only variables gave, with these.

    Raises:
        RequestError: What they ask for is not there.
    """
    words = list(words)
    for i in range(len(words) - 1):
        if words[i : i + 2] == ["--demo", SMOLLM2]:
            words[i : i + 2] = ["--model", str(model_path(SMOLLM2))]
    rows = rows_of(Settings).values()
    own = {row.flag: PREFIX + row.name.upper() for row in rows}
    found, variables = translated(words, note, os.environ, own)
    return found, {row.name: variables[row.flag] for row in rows if row.flag in variables}


def tell(note: str) -> None:
    """Tell the operator; a worker, which has the same command line, does not repeat it."""
    if ENVIRONMENT not in os.environ:
        print(note, file=sys.stderr)


def switch_off(row: SettingRow) -> str:
    """The flag that turns the switch *row* off."""
    return _NEGATIVE.get(row.name, f"--no-{row.flag[2:]}")


def plain_options(words: Sequence[str]) -> dict[str, Any] | None:
    """What *words* give, by the name of the setting, and the file as ``config``.

    The same as typer would give, or None: only typer knows what it makes of them.
    """
    if not HAS_FORK:  # on Windows typer expands patterns and variables
        return None
    rows = rows_of(Settings).values()
    flags: dict[str, tuple[SettingRow | None, Any]] = {row.flag: (row, True) for row in rows}
    flags |= {switch_off(row): (row, False) for row in rows if row.kind is bool}
    flags[_CONFIG] = None, None
    given: dict[str, Any] = {"config": os.environ.get(CONFIG_VARIABLE) or None}
    left = iter(words)
    for word in left:
        flag, equals, text = word.partition("=")
        if flag not in flags:
            return None
        row, switch = flags[flag]
        if row is not None and row.kind is bool:
            if equals:
                return None
            given[row.name] = switch
            continue
        if not equals:
            text = next(left, "-")
            if text.startswith("-") and not _NUMBER.fullmatch(text):
                return None
        if not text.isprintable():
            return None
        if row is None:
            given["config"] = text
        elif row.kind is tuple:
            given.setdefault(row.name, []).append(text)
        elif (value := _value(row.kind, text)) is None:
            return None
        else:
            given[row.name] = value
    return given


def _value(kind: Any, text: str) -> Any:
    """*text* as a value of *kind*; None if it is none, or may be one."""
    if kind is str or (get_origin(kind) is Literal and text in get_args(kind)):
        return text
    if kind in (int, float) and _NUMBER.fullmatch(text) and (kind is float or "." not in text):
        return kind(text)
    return None


def reader_of(
    config: str | None, given: Mapping[str, Any], variables: Mapping[str, str]
) -> Callable[..., Loaded]:
    """A function that reads the configuration, as often as it is called.

    Args:
        config: The file, None for none.
        given: Values of the options by the name of their setting.
        variables: Those that only variables of llama-server gave, with these.

    Returns:
        Takes settings that count as flags and raises as `kqview.server.config_file.load`.
    """
    # typer passes an empty list for a repeatable option that is not given
    flags = {name: None if value == [] else value for name, value in given.items()}
    environ = dict(os.environ)
    path = None if config is None else Path(config)

    def read(**more: Any) -> Loaded:
        return load(path, environ=environ, flags={**flags, **more}, variables=variables)

    return read
