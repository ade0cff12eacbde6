"""Config file: reads a whole configuration from a TOML file, the environment and flags.

A value of ``[server]`` is the flag's, else the environment's, else the file's, else the default;
the other tables are in the file alone. All errors of a file are found at once, each with its key.

Reads the file, and the files that hold keys and templates; opens no model. May take milliseconds.
"""

import difflib
import inspect
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

import msgspec

from kqview.engine import check_opening
from kqview.errors import CapacityError, ModelError, RequestError, shown
from kqview.json_input import DEPTH_MAX
from kqview.server.apps.mia4.passport import REASONING_MAX_TOKENS, check_sampling
from kqview.server.config import TABLES, Config, ModelConfig, SystemPrompt
from kqview.server.settings import PREFIX, Settings, values_in
from kqview.server.settings_table import SettingRow, rows_of
from kqview.server.web.tls import tls_context

Key = tuple[str | int, ...]
"""Where a value is: names of tables and keys, and indices in arrays, such as ``("a", 0, "b")``."""

ENVIRONMENT: Final = PREFIX + "CONFIG"
"""Variable that names the file, as ``--config`` does."""

_MOST_BYTES: Final = 4 * 2**20
_MOST_ID: Final = 128  # characters
_MOST_NAMES: Final = 20  # in a message
_INTEGER_BITS: Final = 63  # beside the sign
_TOO_DEEP: Final = f"tables are nested too deeply, the limit is {DEPTH_MAX}"
_TOO_LARGE: Final = f"the number is too large; the limit is {2**_INTEGER_BITS - 1}"
_MOST_PROBLEMS: Final = 100
_ALL_KEYS: Final = "kqview config init prints all keys"


@dataclass(frozen=True, slots=True)
class Problem:
    """One error of a configuration.

    Attributes:
        text: What is wrong, and what to do.
        where: The file, the variable or the flag; or "".
    """

    text: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


class WrongConfig(RequestError):
    """A configuration has errors.

    Attributes:
        problems: Each of them; of very many the first, and how many more.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from.

    Attributes:
        kind: The level that decided.
        where: The file, the variable or the flag; "" for a default.
    """

    kind: Literal["default", "file", "environment", "flag"]
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".rstrip() if self.kind != "file" else self.where


_DEFAULT: Final = Origin("default")


@dataclass(frozen=True, slots=True)
class TableKey:
    """A key of a table, with its value; *row* is None where keys may have any name."""

    key: Key
    value: Any
    row: SettingRow | None


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a configuration, and its help."""

    key: Key
    help: str
    entries: Sequence[TableKey]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration as it was read.

    Attributes:
        config: What counts.
        path: The file, None without one.
        origins: Origin of each value that is not a default, by its key, such as
            ``("server", "port")``.
    """

    config: Config
    path: Path | None
    origins: Mapping[Key, Origin]

    def origin(self, *key: str | int) -> Origin:
        """Where the value at *key* comes from."""
        return self.origins.get(key, _DEFAULT)

    def tables(self) -> Iterator[Table]:
        """Its tables; without ``[models]`` the one model is that of ``[server]``."""
        has_models = ("models",) in self.origins
        return (one for one in tables_of(self.config) if has_models or one.key[0] != "models")

    def problems_of_files(self) -> list[Problem]:
        """What is wrong with the files and folders that are named; reads the models' headers.

        What is there when the server starts may differ, so `load` does not look.
        """
        found: list[Problem] = []
        for entry in (entry for table in self.tables() for entry in table.entries):
            place = entry.row and entry.row.place
            is_list = isinstance(entry.value, tuple)
            for i, path in enumerate(_elements(entry.value) if place and entry.value else ()):
                reason = _problem_of_place(str(place), path)
                if reason is None and entry.key[-1] in ("path", "model"):
                    reason = _refusal(partial(check_opening, path, n_ctx=1))
                if reason is None and entry.key[-1] == "ssl_certfile":
                    reason = _refusal(partial(tls_context, self.config.settings))
                if reason is not None:
                    name = name_of((*entry.key, i) if is_list else entry.key)
                    found.append(Problem(f"{name}: {reason}", self.origin(*entry.key).where))
        return found


def load(
    path: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Loaded:
    """Read the configuration in the file *path*, under the environment and the flags.

    Args:
        path: The file; None for none.
        environ: Such as ``os.environ``.
        flags: Settings by field name; None counts as not given.
        variables: Those of *flags* that come from another program's variables, such as
            LLAMA_ARG_CTX_SIZE, and which: they count as the environment.

    Raises:
        WrongConfig: Anything in it is wrong; everything that is, is named.
        OSError: The file cannot be read.
    """
    data = {} if path is None else _parsed(path)
    reader = _Reader(data, path)
    given = reader.settings(environ or {}, flags or {}, variables or {})
    return Loaded(reader.config(given), path, reader.origins)


def tables_of(config: Config) -> Iterator[Table]:
    """The tables of *config* with their keys, in the order of the file."""
    about = "Settings; flags and environment variables set them as well."
    yield Table(("server",), about, _entries(("server",), config.settings))
    for name in Config.__struct_fields__[1:]:
        yield from _tables_in((name,), getattr(config, name), "")


def _tables_in(key: Key, value: Any, text: str) -> Iterator[Table]:
    """The table at *key* and those in it; *text* is its help, if the table itself has none."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value)
        rows: Mapping[str, SettingRow | None] = dict.fromkeys(items)
        entries = [
            TableKey((*key, n), part, None) for n, part in items.items() if not _is_table(part)
        ]
        if entries or (not items and key[-1] == "sampling"):
            yield Table(key, text, entries)
        elif not items and key != ("models",):
            yield Table((*key, "ID"), text, ())
    else:
        rows = rows_of(value.__class__)
        items = {name: getattr(value, name) for name in rows}
        if entries := _entries(key, value):
            yield Table(key, inspect.getdoc(value) or "", entries)
    for name, part in items.items():
        if _is_table(part):
            row = rows[name]
            yield from _tables_in((*key, name), part, row.help if row else "")


def _entries(key: Key, table: Any) -> list[TableKey]:
    return [
        TableKey((*key, name), getattr(table, name), row)
        for name, row in rows_of(table.__class__).items()
        if not _is_table(getattr(table, name))
    ]


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or is_dataclass(value)


def name_of(key: Key) -> str:
    """*key* as it is written in a file, such as ``models."a b".lora[0]``."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            plain = part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else shown_text(part)
            text += f".{plain}" if text else plain
    return text


def shown_text(text: str) -> str:
    """*text* as a TOML string."""
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")


def _parsed(path: Path) -> dict[str, Any]:
    """The tables of the file, whatever is in them.

    Raises:
        WrongConfig: It is no TOML.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    try:
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"the file has more than {_MOST_BYTES} bytes")
        return tomllib.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        reason = f"the file is no UTF-8 at line {raw.count(10, 0, error.start) + 1}"
    except tomllib.TOMLDecodeError as error:
        reason = f"{error} (TOML)"
    except RecursionError:  # far beyond the limit; `_keys` finds what is less deep
        reason = _TOO_DEEP
    except ValueError as error:  # also of a number of more digits than Python reads
        reason = str(error) if len(raw) > _MOST_BYTES else _TOO_LARGE
    raise WrongConfig([Problem(reason, str(path))]) from None


class _Reader:
    """Reads one configuration, and collects what is wrong.

    Attributes:
        origins: Origin of each value that is given.
    """

    def __init__(self, data: dict[str, Any], path: Path | None) -> None:
        """Read *data*, the tables of the file *path*.

        Raises:
            WrongConfig: Tables are nested too deeply, or numbers are too large.
        """
        self._data, self._path = data, path
        self._has_models = bool(data.get("models"))
        self._found: list[Problem] = []
        self.origins: dict[Key, Origin] = {}
        if path is not None:
            self.origins = dict.fromkeys(_keys(data, path), Origin("file", str(path)))

    def settings(
        self, environ: Mapping[str, str], flags: Mapping[str, Any], variables: Mapping[str, str]
    ) -> dict[str, Any]:
        """The settings that are given anywhere, checked."""
        for name in self._data:
            if name not in ("server", "models", *TABLES):
                self._unknown((name,), ("server", "models", *TABLES))
        given = self._fields(Settings, self._data.get("server", {}), ("server",))
        values = values_in(environ)
        for name, row in rows_of(Settings).items():
            value, origin = flags.get(name), Origin("flag", row.flag)
            if name in values and (value is None or name in variables):
                value, origin = values[name], Origin("environment", PREFIX + name.upper())
            elif value is None:
                continue
            elif name in variables:
                origin = Origin("environment", variables[name])
            self.origins["server", name] = origin
            try:
                given[name] = row.checked(value)
            except RequestError as error:
                self._say(("server", name), str(error))
        return given

    def config(self, given: dict[str, Any]) -> Config:
        """The configuration with the settings *given*.

        Raises:
            WrongConfig: Anything was wrong.
        """
        models: dict[str, ModelConfig] = {
            name: ModelConfig(**self._fields(ModelConfig, one, ("models", name)))
            for name, one in self._items(self._data.get("models", {}), ("models",))
        }
        tables = {
            name: kind(**self._fields(kind, self._data[name], (name,)))
            for name, kind in TABLES.items()
            if name in self._data
        }
        default = given.pop("model", None) if models else None
        if models:
            self._check_choice(models, default, given)
        settings = Settings(**given)
        try:
            settings.check_bind()
        except RequestError as error:
            self._say(("server", "host"), str(error))
        if not models and (settings.model is not None or settings.demo):
            models = dict(Config.of(settings).models)
        elif default in models:
            models = {default: models[default], **models}
        config = Config(settings=settings, models=models, **tables)
        self._check(config)
        if found := self._found:
            if n_more := len(found[_MOST_PROBLEMS:]):
                found[_MOST_PROBLEMS:] = [Problem(f"and {n_more} more errors", str(self._path))]
            raise WrongConfig(found)
        return config

    # ---- values

    def _fields(self, table: type, value: Any, key: Key) -> dict[str, Any]:
        """The fields of *table* that *value* has and that are right; the others are noted."""
        found: dict[str, Any] = {}
        rows = rows_of(table)
        for name, one in self._items(value, key):
            at = (*key, name)
            if name not in rows:
                self._unknown(at, rows)
                continue
            try:
                found[name] = self._value(rows[name], one, at)
            except RequestError as error:
                self._say(at, str(error))
        return found

    def _value(self, row: SettingRow, value: Any, key: Key) -> Any:
        kind = next((one for one in (row.kind, *get_args(row.kind)) if is_dataclass(one)), None)
        if kind is not None:
            found = cast("type", kind)(**self._fields(cast("type", kind), value, key))
            return self._prompt(found, key) if isinstance(found, SystemPrompt) else found
        if row.is_text:
            value = self._texts(value, key, row)
        is_id = key == ("server", "model") and self._has_models
        if row.place is not None and not is_id:
            paths = [
                self._path_of(one) if isinstance(one, str) else one for one in _elements(value)
            ]
            value = paths if isinstance(value, list) else paths[0]
        return row.checked(value, str(key[-1]) if key[0] == "server" else name_of(key))

    def _items(self, table: Any, key: Key) -> Iterable[tuple[str, Any]]:
        if isinstance(table, dict):
            return cast("dict[str, Any]", table).items()
        self._say(key, f"{name_of(key)} is {shown(table)}; write a table, [{name_of(key)}]")
        return ()

    def _prompt(self, prompt: SystemPrompt, key: Key) -> SystemPrompt:
        """*prompt* with its text, wherever that is."""
        if (prompt.text is None) == (prompt.file is None):
            raise RequestError(f"{name_of(key)} needs text or file, and not both")
        if prompt.file is None:
            return prompt
        text = self._content(prompt.file, (*key, "file"))
        return SystemPrompt(text=text, version=prompt.version)

    # ---- files that values name

    def _path_of(self, text: str) -> str:
        """*text* as a path, which begins at the file's folder if it is relative."""
        assert self._path is not None
        try:
            path = Path(text).expanduser()
        except RuntimeError:  # "~somebody", who has no home: a name like any other
            path = Path(text)
        return text if path == Path(text) and path.is_absolute() else str(self._path.parent / path)

    def _texts(self, value: Any, key: Key, row: SettingRow) -> Any:
        """*value* with what the files hold that ``{file = "NAME"}`` names, alone or in a list."""
        if not isinstance(value, list):
            return self._text(value, key, row) if isinstance(value, dict) else value
        found: list[Any] = []
        for i, one in enumerate(_elements(value)):
            is_file = isinstance(one, dict)
            found += self._text(one, (*key, i), row) if is_file and row.kind is tuple else [one]
        return found

    def _text(self, value: Any, key: Key, row: SettingRow) -> Any:
        if set(value) != {"file"} or not isinstance(value["file"], str):
            raise RequestError(f'{name_of(key)} is no text; write it, or {{file = "FILE"}}')
        path = self._path_of(value["file"])
        text = self._content(path, key)
        if not row.is_secret:
            return text
        lines = [line.strip() for line in text.splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        is_list = row.kind is tuple
        if not keys or (len(keys) > 1 and not is_list):
            remedy = "one on each line" if is_list else "one"
            raise RequestError(f"{name_of(key)}: {path} has {len(keys)} keys; write {remedy}")
        return keys if is_list else keys[0]

    def _content(self, path: str, key: Key) -> str:
        try:
            return Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            reason = "it is no UTF-8"
        except (OSError, ValueError) as error:  # ValueError: NUL in the name
            reason = getattr(error, "strerror", "") or str(error)
        raise RequestError(f"{name_of(key)}: {path} cannot be read: {reason}")

    # ---- what more than one value decides

    def _check(self, config: Config) -> None:
        harmony = config.llm.prompt.harmony
        if harmony.analysis_tag == harmony.final_tag:
            self._say(
                ("llm", "prompt", "harmony"),
                f"analysis_tag and final_tag are both {harmony.final_tag!r}; write two tags",
            )
        for name, preset in config.llm.reasoning_presets.items():
            self._check_sampling(preset, ("llm", "reasoning_presets", name))
        known: dict[str, str] = {}
        for id_, model in config.models.items():
            key = ("models", id_)
            if not id_ or not id_.isprintable() or id_ != id_.strip() or len(id_) > _MOST_ID:
                self._say(
                    key,
                    f"{name_of(key)}: an id is 1 to {_MOST_ID} printable characters without "
                    "spaces around them",
                )
            if (other := known.setdefault(id_.casefold(), id_)) != id_:
                self._say(key, f"{name_of(key)} and {other!r} differ in case alone; rename one")
            self._check_sampling(model.passport.sampling, (*key, "passport", "sampling"))

    def _check_sampling(self, values: Mapping[str, Any], key: Key) -> None:
        for name, value in values.items():
            if key[-1] == "sampling" and name == REASONING_MAX_TOKENS:
                self._say((*key, name), f"{name_of((*key, name))} is for presets; leave it out")
                continue
            try:
                check_sampling(name, value)
            except RequestError as error:
                self._say((*key, name), f"{name_of(key)}: {error}")

    def _check_choice(
        self, models: Mapping[str, Any], default: object, given: Mapping[str, Any]
    ) -> None:
        """Refuse settings that say what to serve beside ``[models]``, unless they name one."""
        if default is not None and default not in models:
            self._say(
                ("server", "model"),
                f"model is {default!r}, which is no id in [models]: {', '.join(models)}; name "
                "one of them as the default model, or leave model out",
            )
        for name in ("demo", "hf"):
            if given.get(name):
                text = f"{name} and [models] both say what to serve; leave {name} out"
                self._say(("server", name), text)
        if given.get("aliases"):
            self._say(
                ("server", "aliases"),
                "aliases are names of a single model; with [models] its ids are the names",
            )

    # ---- problems

    def _unknown(self, key: Key, names: Iterable[str]) -> None:
        *table, name = key
        where = f"[{name_of(tuple(table))}]" if table else "the file"
        is_told = len(self._found) < _MOST_PROBLEMS  # looking for names like it takes time
        hint = (
            _hint(str(name), list(names), is_server=table == ["server"]) if is_told else _ALL_KEYS
        )
        self._say(key, f"no key {shown_text(str(name))} in {where}; {hint}")

    def _say(self, key: Key, text: str) -> None:
        """Note what is wrong with the value at *key*, or with the table that lacks it."""
        while key and key not in self.origins:
            key = key[:-1]
        self._found.append(Problem(text, self.origins.get(key, _DEFAULT).where))


def _keys(data: Mapping[str, Any], path: Path) -> list[Key]:
    """Where each value is, in the order of the file.

    Raises:
        WrongConfig: Tables are nested too deeply, which dotted keys can be at any depth, or numbers
            have more bits than TOML's.
    """
    found: list[Key] = []
    too_large: list[Problem] = []
    waiting: list[tuple[Key, Any]] = [((), data)]
    while waiting:
        key, value = waiting.pop()
        found.append(key)
        if len(key) > DEPTH_MAX:
            raise WrongConfig([Problem(_TOO_DEEP, str(path))])
        parts: Iterable[tuple[str | int, Any]] = ()
        if isinstance(value, dict):
            parts = cast("dict[str, Any]", value).items()
        elif isinstance(value, list):
            parts = enumerate(cast("list[Any]", value))
        elif isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
            too_large.append(Problem(f"{name_of(key)}: {_TOO_LARGE}", str(path)))
        waiting += [((*key, part), one) for part, one in parts][::-1]
    if too_large:
        raise WrongConfig(too_large)
    return found


def _hint(name: str, names: Sequence[str], *, is_server: bool) -> str:
    """What may have been meant by *name*, none of *names*."""
    plain = name.replace("-", "_").lower()
    flags = {row.flag[2:].replace("-", "_"): one for one, row in rows_of(Settings).items()}
    if plain in names or (is_server and plain in flags):
        return f"it is {plain if plain in names else flags[plain]}"
    if not is_server and plain in rows_of(Settings):
        return f"{plain} belongs in [server]"
    if is_server and plain in ("models", *TABLES):
        return f"[{plain}] is a table of its own"
    close = difflib.get_close_matches(plain, names, 1)
    if close:
        return f"is it {close[0]}?"
    return f"known are {', '.join(names)}" if len(names) <= _MOST_NAMES else _ALL_KEYS


def _elements(value: Any) -> list[Any]:
    """Those of a list, or *value* alone."""
    return list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else [value]


# ---- whether what values name is there


def _problem_of_place(place: str, path: str) -> str | None:
    file = Path(path)
    try:
        if place == "folder":
            return None if file.is_dir() else f"{path} is no folder"
        if place == "new":
            is_there = file.exists() or file.parent.is_dir()
            return None if is_there else f"{path}: there is no folder {file.parent}"
        if not file.is_file():
            stem, _, scale = path.rpartition(":")  # an adapter may have :SCALE after its name
            if not (re.fullmatch(r"-?[0-9.]+", scale) and Path(stem).is_file()):
                return f"there is no file {path}"
            file = Path(stem)
        if place == "text":
            file.read_text(encoding="utf-8")
        else:
            file.open("rb").close()
    except UnicodeDecodeError:
        return f"{path} is no UTF-8"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None


def _refusal(check: Callable[[], object]) -> str | None:
    """Why *check* refuses; a lack of memory is that of this machine at the moment."""
    try:
        check()
    except CapacityError:
        return None
    except (ModelError, RequestError) as error:
        return str(error)
    return None
