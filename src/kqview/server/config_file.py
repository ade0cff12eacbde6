"""Config file: reads a whole configuration from a TOML file, the environment and flags.

A value of ``[server]`` is the flag's, else the environment's, else the file's, else the default;
the other tables are in the file alone. All errors of a file are found at once, each with its key.

Reads the file, and the files that hold keys and templates; opens no model. May take milliseconds.
"""

import dataclasses
import difflib
import re
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Union, cast, get_args, get_origin

import msgspec

from kqview.engine import check_opening
from kqview.errors import CapacityError, ModelError, RequestError, shown
from kqview.server.apps.mia4.sampling import REASONING_MAX_TOKENS, check_sampling
from kqview.server.config import Config, Model, SystemPrompt, annotations_of, facts_of
from kqview.server.settings import PREFIX, Settings, flag_of, texts_of
from kqview.server.web.security import tls_context

Key = tuple[str | int, ...]
"""Where a value is: names of tables and keys, and indices in arrays, such as ``("a", 0, "b")``."""

ENVIRONMENT: Final = PREFIX + "CONFIG"
"""Variable that names the file, as ``--config`` does."""

_MOST_BYTES: Final = 4 * 2**20
_SETTINGS: Final = {spec.name: spec for spec in dataclasses.fields(Settings)}
_TABLES: Final = tuple(name for name in Config.__struct_fields__ if name != "settings")
_TOP: Final = ("server", *_TABLES)
_INVALID_LINE: Final = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_INVALID_AT: Final = re.compile(r" - at `\$(.*)`$")
_MOST_ID: Final = 128  # characters
_MOST_NAMES: Final = 20  # in a message
_MOST_LEVELS: Final = 64
_INTEGER_BITS: Final = 63  # beside the sign
_TOO_DEEP: Final = "tables are nested too deeply"
_TOO_LARGE: Final = f"the number is too large; the limit is {2**_INTEGER_BITS - 1}"
_MOST_PROBLEMS: Final = 100
_ALL_KEYS: Final = "kqview config init prints all keys"
_WRONG: Final = object()


@dataclass(frozen=True, slots=True)
class Problem:
    """One error of a configuration.

    Attributes:
        text: What is wrong, and what to do.
        where: The file, with the line of what is no TOML; the variable or the flag; or "".
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
class Loaded:
    """A configuration as it was read.

    Attributes:
        config: What counts.
        path: The file, None without one.
        origins: Origin of each value that is not a default, by its key, such as
            ``("server", "port")``.
        places: The paths that it names: key, what it should be, and the path.
    """

    config: Config
    path: Path | None
    origins: Mapping[Key, Origin]
    places: Sequence[tuple[Key, str, str]]

    def origin(self, *key: str | int) -> Origin:
        """Where the value at *key* comes from."""
        return self.origins.get(key, _DEFAULT)

    def problems_of_files(self) -> list[Problem]:
        """What is wrong with the files and folders that are named; reads the models' headers.

        What is there when the server starts may differ, so `load` does not look.
        """
        order = {key: i for i, key in enumerate(self.origins)}
        found: list[Problem] = []
        for key, place, path in sorted(self.places, key=lambda one: order[self._given(one[0])]):
            reason = _problem_of_place(place, path)
            if reason is None and key[-1] in ("path", "model"):
                reason = _problem_of_model(path)
            if reason is None and key[-1] == "ssl_certfile":
                reason = _problem_of_tls(self.config.settings)
            if reason is not None:
                where = self.origins[self._given(key)].where
                found.append(Problem(f"{name_of(key)}: {reason}", where))
        return found

    def _given(self, key: Key) -> Key:
        """*key*, or the list that it is an element of, as it has an origin."""
        return key if key in self.origins else key[:-1]


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
    reader = _Reader(path)
    data = {} if path is None else reader.parsed(path)
    return reader.merged(data, environ or {}, flags or {}, variables or {})


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


class _Reader:
    """Reads one configuration, and collects what is wrong."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: list[Problem] = []
        self._origins: dict[Key, Origin] = {}
        self._places: list[tuple[Key, str, str]] = []

    # ---- the file

    def parsed(self, path: Path) -> dict[str, Any]:
        """The tables of the file, whatever is in them.

        Raises:
            WrongConfig: It is no TOML.
            OSError: It cannot be read.
        """
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise WrongConfig([Problem(f"the file has more than {_MOST_BYTES} bytes", str(path))])
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise WrongConfig([Problem("the file is no UTF-8", f"{path}:{line}")]) from None
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            match = _INVALID_LINE.search(str(error))
            line = int((match and match[1]) or raw.count(b"\n") + 1)
            reason = _INVALID_LINE.sub("", str(error))
            raise WrongConfig([Problem(f"{reason} (TOML)", f"{path}:{line}")]) from None
        except RecursionError:
            raise WrongConfig([Problem(_TOO_DEEP, str(path))]) from None
        except ValueError:  # a number of more digits than Python reads; it does not say where
            raise WrongConfig([Problem(_TOO_LARGE, str(path))]) from None
        self._origins = dict.fromkeys(_keys(data, path), Origin("file", str(path)))
        return data

    def merged(
        self,
        data: dict[str, Any],
        environ: Mapping[str, str],
        flags: Mapping[str, Any],
        variables: Mapping[str, str],
    ) -> Loaded:
        """As `load`."""
        for name in data:
            if name not in _TOP:
                self._unknown((name,), _TOP)
        has_models = bool(data.get("models"))
        given = self._settings(data.get("server", {}), environ, flags, variables, has_models)
        hints = annotations_of(Config)
        tables = {
            name: self._value(hints[name], data[name], (name,)) for name in _TABLES if name in data
        }
        models: dict[str, Model] = tables.pop("models", {})
        default = given.pop("model", None) if models else None
        if models:
            self._check_choice(models, default, given)
        settings = Settings(**given)
        self._check_settings(settings)
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
        return Loaded(config, self._path, self._origins, self._places)

    # ---- [server]

    def _settings(
        self,
        table: Any,
        environ: Mapping[str, str],
        flags: Mapping[str, Any],
        variables: Mapping[str, str],
        has_models: bool,
    ) -> dict[str, Any]:
        """The settings that are given anywhere, checked."""
        given: dict[str, Any] = {}
        for name, value in self._items(table, ("server",)):
            key = ("server", name)
            if name not in _SETTINGS:
                self._unknown(key, _SETTINGS)
                continue
            if name != "model" or not has_models:  # then it is an id
                is_list = isinstance(_SETTINGS[name].default, tuple)
                value = self._from_file(
                    value, key, {**_SETTINGS[name].metadata, "is_list": is_list}
                )
            if value is not _WRONG:
                given[name] = self._setting(name, value, key)
        texts = texts_of(environ)
        for name in _SETTINGS:
            key = ("server", name)
            if flags.get(name) is not None and name not in variables:
                value, origin = flags[name], Origin("flag", flag_of(name))
            elif name in texts:
                origin = Origin("environment", PREFIX + name.upper())
                try:
                    value = Settings.read(name, texts[name])
                except RequestError as error:
                    self._say(key, str(error), origin)
                    continue
            elif flags.get(name) is not None:
                value, origin = flags[name], Origin("environment", variables[name])
            else:
                continue
            self._forget_places(key)
            self._origins[key] = origin
            given[name] = self._setting(name, value, key)
            if name != "model" or not has_models:
                self._note_places(key, given[name], _SETTINGS[name].metadata["place"])
        return {name: value for name, value in given.items() if value is not _WRONG}

    def _setting(self, name: str, value: Any, key: Key) -> Any:
        try:
            return Settings.checked(name, value)
        except RequestError as error:
            self._say(key, str(error))
            return _WRONG

    # ---- the other tables

    def _value(self, kind: Any, value: Any, key: Key) -> Any:
        """*value* as *kind* wants it, or `_WRONG`, of which the reason is noted."""
        struct = _struct_in(kind)
        if struct is not None:
            return self._struct(struct, value, key)
        if get_origin(kind) is Mapping and _is_struct(get_args(kind)[1]):
            inner = get_args(kind)[1]
            items = list(self._items(value, key))
            return {name: self._value(inner, one, (*key, name)) for name, one in items}
        facts = facts_of(kind)
        value = self._from_file(value, key, facts)
        if value is _WRONG:
            return _WRONG
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            key, reason = _located(key, str(error))
            if isinstance(value, str) and "expected" in facts:
                reason = f"is {value!r}; write {facts['expected']}"
            if get_origin(kind) is Literal:
                reason = f"is {shown(value)}; choose from {', '.join(get_args(kind))}"
            self._say(key, f"{name_of(key)} {reason}")
            return _WRONG

    def _struct(self, kind: type[msgspec.Struct], value: Any, key: Key) -> msgspec.Struct:
        """*value* without what is wrong in it, which is noted."""
        hints = annotations_of(kind)
        values: dict[str, Any] = {}
        for name, one in self._items(value, key):
            if name not in hints:
                self._unknown((*key, name), hints)
                continue
            values[name] = self._value(hints[name], one, (*key, name))
            if kind is Model and name in _SETTINGS and values[name] is not _WRONG:
                values[name] = self._setting(name, values[name], (*key, name))
        found = kind(**{name: one for name, one in values.items() if one is not _WRONG})
        return self._prompt(found, key) if isinstance(found, SystemPrompt) else found

    def _items(self, table: Any, key: Key) -> Iterator[tuple[str, Any]]:
        if isinstance(table, dict):
            yield from table.items()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        else:
            self._say(key, f"{name_of(key)} is {shown(table)}; write a table, [{name_of(key)}]")

    def _prompt(self, prompt: SystemPrompt, key: Key) -> SystemPrompt:
        """*prompt* with its text, wherever that is."""
        if (prompt.text is None) == (prompt.file is None):
            self._say(key, f"{name_of(key)} needs text or file, and not both")
        elif prompt.file is not None:
            text = self._content(prompt.file, (*key, "file"))
            return SystemPrompt(text=text, version=prompt.version)
        return prompt

    # ---- files that values name

    def _from_file(self, value: Any, key: Key, facts: Mapping[str, Any]) -> Any:
        """*value* with its relative paths below the file's folder, and texts read from files."""
        if facts.get("is_text") and any(isinstance(one, dict) for one in _elements(value)):
            return self._texts(value, key, is_list=facts.get("is_list", False))
        place = facts.get("place")
        if place is None:
            return value
        if isinstance(value, list):
            value = [
                self._path_of(one) if isinstance(one, str) else one for one in _elements(value)
            ]
        elif isinstance(value, str):
            value = self._path_of(value)
        self._note_places(key, value, place)
        return value

    def _note_places(self, key: Key, value: Any, place: str | None) -> None:
        if place is None:
            return
        if isinstance(value, list | tuple):
            for i, one in enumerate(_elements(value)):
                self._note_places((*key, i), one, place)
        elif isinstance(value, str):
            self._places.append((key, place, value))

    def _forget_places(self, key: Key) -> None:
        self._places = [one for one in self._places if one[0][: len(key)] != key]

    def _path_of(self, text: str) -> str:
        assert self._path is not None
        try:
            path = Path(text).expanduser()
        except RuntimeError:  # "~somebody", who has no home: a name like any other
            path = Path(text)
        return text if path == Path(text) and path.is_absolute() else str(self._path.parent / path)

    def _texts(self, value: Any, key: Key, *, is_list: bool) -> Any:
        """The texts of ``{file = "..."}``, alone or in a list."""
        if not isinstance(value, list):
            return self._text(value, key, is_list=is_list)
        found: list[Any] = []
        for i, one in enumerate(_elements(value)):
            text: Any = self._text(one, (*key, i), is_list=True) if isinstance(one, dict) else one
            found += _elements(text)
        return _WRONG if _WRONG in found else found

    def _text(self, value: Any, key: Key, *, is_list: bool) -> Any:
        if set(value) != {"file"} or not isinstance(value["file"], str):
            self._say(key, f'{name_of(key)} is no text; write it, or {{file = "FILE"}}')
            return _WRONG
        path = self._path_of(value["file"])
        text = self._content(path, key)
        if text is None:
            return _WRONG
        if key[-1] == "chat_template":
            return text
        lines = [line.strip() for line in text.splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys or (len(keys) > 1 and not is_list):
            self._say(
                key,
                f"{name_of(key)}: {path} has {len(keys)} keys; write "
                + ("one on each line" if is_list else "one"),
            )
            return _WRONG
        return keys if is_list else keys[0]

    def _content(self, path: str, key: Key) -> str | None:
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: NUL in the name, or no UTF-8
            is_utf8 = not isinstance(error, UnicodeDecodeError)
            reason = (getattr(error, "strerror", "") or error) if is_utf8 else "it is no UTF-8"
            self._say(key, f"{name_of(key)}: {path} cannot be read: {reason}")
            return None

    # ---- what more than one value decides

    def _check_settings(self, settings: Settings) -> None:
        try:
            settings.check_bind()
        except RequestError as error:
            self._say(("server", "host"), str(error))

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
                check_sampling({name: value}, name_of(key))
            except RequestError as error:
                self._say((*key, name), str(error))

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

    def _unknown(self, key: Key, names: Mapping[str, Any] | Sequence[str]) -> None:
        *table, name = key
        where = f"[{name_of(tuple(table))}]" if table else "the file"
        is_told = len(self._found) < _MOST_PROBLEMS  # looking for names like it takes time
        hint = _hint(str(name), names, is_server=table == ["server"]) if is_told else _ALL_KEYS
        self._say(key, f"no key {shown_text(str(name))} in {where}; {hint}")

    def _say(self, key: Key, text: str, origin: Origin | None = None) -> None:
        self._found.append(Problem(text, (origin or self._origin_of(key)).where))

    def _origin_of(self, key: Key) -> Origin:
        while key and key not in self._origins:
            key = key[:-1]
        return self._origins.get(key, _DEFAULT)


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
        if len(key) > _MOST_LEVELS:
            raise WrongConfig([Problem(_TOO_DEEP, str(path))])
        if isinstance(value, dict):
            items = list(cast("dict[str, Any]", value).items())
            waiting += (((*key, name), one) for name, one in reversed(items))
        elif isinstance(value, list):
            parts = list(enumerate(cast("list[Any]", value)))
            waiting += (((*key, i), one) for i, one in reversed(parts))
        elif isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
            too_large.append(Problem(f"{name_of(key)}: {_TOO_LARGE}", str(path)))
    if too_large:
        raise WrongConfig(too_large)
    return found


def _hint(name: str, names: Mapping[str, Any] | Sequence[str], *, is_server: bool) -> str:
    """What may have been meant by *name*, none of *names*."""
    plain = name.replace("-", "_").lower()
    if plain in names:
        return f"it is {plain}"
    if is_server:
        flags = {flag_of(one).removeprefix("--").replace("-", "_"): one for one in _SETTINGS}
        if plain in flags:
            return f"it is {flags[plain]}"
    elif plain in _SETTINGS:
        return f"{plain} belongs in [server]"
    if is_server and plain in _TABLES:
        return f"[{plain}] is a table of its own"
    close = difflib.get_close_matches(plain, list(names), 1)
    if close:
        return f"is it {close[0]}?"
    return f"known are {', '.join(names)}" if len(names) <= _MOST_NAMES else _ALL_KEYS


def _elements(value: Any) -> list[Any]:
    """Those of a list, or *value* alone."""
    return list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else [value]


def _located(key: Key, text: str) -> tuple[Key, str]:
    """The key of the value that msgspec's *text* is about, and what is wrong with it."""
    at = _INVALID_AT.search(text)
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", at[1] if at else ""):
        key = (*key, name or int(index))
    plain = _INVALID_AT.sub("", text).replace("`", "").replace(" | null", "")
    return key, f"is wrong: {plain[:1].lower()}{plain[1:]}"


def _problem_of_place(place: str, path: str) -> str | None:
    file = Path(path)
    try:
        if place == "folder":
            return None if file.is_dir() else f"{path} is no folder"
        if place == "new":
            is_there = file.parent.is_dir() if not file.exists() else True
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


def _problem_of_model(path: str) -> str | None:
    try:
        check_opening(path, n_ctx=1)
    except ModelError as error:
        return str(error)
    except CapacityError:  # of this machine, at the moment
        return None
    return None


def _problem_of_tls(settings: Settings) -> str | None:
    try:
        tls_context(settings)
    except RequestError as error:
        return str(error)
    return None


# ---- types


def _members(kind: Any) -> Sequence[Any]:
    """The members of a union, without None; or *kind* alone."""
    if get_origin(kind) in (Union, types.UnionType):
        return [one for one in get_args(kind) if one is not types.NoneType]
    return [kind]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _struct_in(kind: Any) -> type[msgspec.Struct] | None:
    return next((one for one in _members(kind) if _is_struct(one)), None)
