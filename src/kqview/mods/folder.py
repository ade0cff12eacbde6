"""ModFolder: mods by name from a folder of Python files, for servers.

A mod named ``brief`` is what the file ``brief.py`` defines, in this order:

- ``make``, a function that returns the mod; it gets the options of the request by name.
- the mod with the file's name, such as ``brief``.
- the only mod in the file.

A class derived from `Mod` gets the options by name when it is instantiated; a function takes none.

A file runs when its mod is first requested, and again after it has changed; running requests keep
the version they began with. Code comes only from the folder: names are checked, and nothing that a
caller sends is ever executed.
"""

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

from kqview.durable import FileIdentity
from kqview.errors import ModFileError, RequestError, shown
from kqview.mods.decorator import FunctionMod, Mod, check_mods

_log: Final = logging.getLogger("kqview.mods")
_SUFFIX: Final = ".py"
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_MAKE: Final = "make"
_MODULE: Final = "kqview_mods_folder_"  # before the name of a mod, in sys.modules
_MOST_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class ModInfo:
    """A mod in the folder.

    Attributes:
        name: Name by which requests select it.
        summary: First line of its file's docstring, "" without one.
        error: Why its file cannot be used; None if it can.
    """

    name: str
    summary: str
    error: str | None


@dataclass(frozen=True, slots=True)
class _LoadedFile:
    """A loaded file: its identity, and how to make its mod or why that fails."""

    identity: FileIdentity
    make: Callable[..., Any] | None
    takes_options: bool = True
    summary: str = ""
    error: str | None = None


class ModFolder:
    """The mods of a folder; any thread. Methods may take time: they read and run files.

    Args:
        path: The folder.

    Raises:
        RequestError: The folder does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        if not os.path.isdir(self.path):
            raise RequestError(
                f"mods_dir is {os.fspath(path)!r}, which is not a folder; create it, or name one",
                parameter="mods_dir",
            )
        self._lock = threading.Lock()
        self._loaded: dict[str, _LoadedFile] = {}

    def names(self) -> list[str]:
        """Names of all mods, sorted; runs nothing."""
        found: list[str] = []
        for entry in os.scandir(self.path):
            stem, suffix = os.path.splitext(entry.name)
            if suffix == _SUFFIX and _NAME.fullmatch(stem) and entry.is_file():
                found.append(stem)
        return sorted(found)

    def list(self) -> list[ModInfo]:
        """All mods; runs the files that are new or have changed."""
        infos: list[ModInfo] = []
        for name in self.names():
            loaded = self._load(name)
            if loaded is not None:
                infos.append(ModInfo(name, loaded.summary, loaded.error))
        return infos

    def get(self, name: str, options: Mapping[str, Any] | None = None) -> Any:
        """Return the mod *name* for one request.

        Args:
            name: Name of the mod.
            options: Options of the mod by name; None for none.

        Raises:
            RequestError: There is no such mod, or it does not take these options.
            ModFileError: Its file cannot be loaded, or fails to make the mod.
        """
        loaded = self._load(name) if _NAME.fullmatch(name) else None
        if loaded is None:
            known = self.names()
            listed = ", ".join(known[:_MOST_SHOWN]) + (", ..." if len(known) > _MOST_SHOWN else "")
            raise RequestError(
                f"mods has {shown(name)}, which this server does not have; "
                f"{f'it has {listed}' if known else 'it has no mods'}",
                parameter="mods",
            )
        if loaded.make is None:
            raise ModFileError(f"mod {name} cannot be used: {loaded.error}; see the server's log")
        given = dict(options or {})
        if given and not loaded.takes_options:
            raise RequestError(f"mod {name} takes no options; send its name", parameter="mods")
        try:
            made = loaded.make(**given)
        except (TypeError, ValueError) as error:
            # RequestError is a ValueError: the sender of the options needs the mod's message.
            raise RequestError(f"mod {name}: {error}", parameter="mods") from error
        except (Exception, SystemExit) as error:
            _log.exception("mod %s cannot be made", name)
            raise ModFileError(
                f"mod {name} cannot be used: {type(error).__name__}; see the server's log"
            ) from error
        try:
            check_mods([made])
        except RequestError as error:
            _log.error("%s of mod %s did not return a mod: %s", _MAKE, name, error)
            raise ModFileError(
                f"mod {name} cannot be used: its {_MAKE} does not return a mod"
            ) from None
        return made

    # ---- files

    def _load(self, name: str) -> _LoadedFile | None:
        """The current file of *name*; None if there is none."""
        path = os.path.join(self.path, name + _SUFFIX)
        with self._lock:
            identity, loaded = FileIdentity.at(path), self._loaded.get(name)
            if identity is None:
                self._loaded.pop(name, None)
                return None
            if loaded is None or not identity.has_content_of(loaded.identity):
                loaded = self._loaded[name] = _load(name, path, identity)
            return loaded


def _load(name: str, path: str, identity: FileIdentity) -> _LoadedFile:
    # Classes look up their module by name; the bytecode cache is bypassed, because it
    # would serve a file that changes twice within a second in its older version.
    module = sys.modules[_MODULE + name] = ModuleType(_MODULE + name)
    module.__file__ = path
    try:
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)  # a file of the operator's
        make, takes_options = _maker(name, module)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        # Not only Exception: a file may call sys.exit.
        _log.exception("mod %s cannot be loaded from %s", name, path)
        return _LoadedFile(identity, None, error=f"{type(error).__name__} in its file")
    summary = (module.__doc__ or "").strip().partition("\n")[0]
    _log.info("mod %s is loaded from %s", name, path)
    return _LoadedFile(identity, make, takes_options, summary)


def _maker(name: str, module: ModuleType) -> tuple[Callable[..., Any], bool]:
    """What makes the mod of *module*, and whether it takes options.

    Raises:
        LookupError: It has no mod, or several and none with its name.
    """
    members: dict[str, Any] = vars(module)
    make = members.get(_MAKE)
    if callable(make):
        return cast("Callable[..., Any]", make), True
    mods = {key: value for key, value in members.items() if _is_mod(value, module)}
    found = mods.get(name.replace("-", "_"))
    if found is None:
        if len(mods) != 1:
            raise LookupError(
                f"{name}{_SUFFIX} has {len(mods)} mods; define one, call one of them {name}, or "
                f"define a function {_MAKE}"
            )
        [found] = mods.values()
    if isinstance(found, type):
        return cast("Callable[..., Any]", found), True
    return (lambda: found), False


def _is_mod(value: object, module: ModuleType) -> bool:
    """Whether *value* is a mod that *module* defines, not one that it imports."""
    if isinstance(value, type):
        return issubclass(value, Mod) and value.__module__ == module.__name__
    if isinstance(value, FunctionMod):
        return getattr(value.function, "__module__", None) == module.__name__
    return isinstance(value, Mod)
