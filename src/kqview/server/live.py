"""Live: the configuration that counts at the moment, held once for a whole server.

It changes while the server runs (`App.reload`), so nothing keeps a copy of its values: whoever
needs one asks here each time it needs it. What takes work to make of a value, such as a folder
of mods or a table of networks, is made once for each value of it (`derived`).

The event loop's thread replaces it; any thread reads it.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kqview.server.config import Config, needing_restart
from kqview.server.settings import Settings

_K = TypeVar("_K")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _State:
    """A configuration and what was made of it, in the order of `Live.derived`."""

    config: Config
    made: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a new configuration did, by the names of its keys.

    Attributes:
        changed: Keys whose new values count.
        needs_restart: Keys whose old values still count.
    """

    changed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"changed {', '.join(self.changed)}" if self.changed else "nothing changed"
        if self.needs_restart:
            text += f"; a restart is needed for {', '.join(self.needs_restart)}"
        return text


def reloaded(old: Config, new: Config) -> tuple[Config, Reloaded]:
    """*new*, with *old*'s values of what cannot change while the server runs."""
    changed: list[str] = []
    kept: dict[str, Any] = {}
    for spec in dataclasses.fields(Settings):
        before, after = getattr(old.settings, spec.name), getattr(new.settings, spec.name)
        if before == after:
            continue
        if spec.metadata["restart"]:
            kept[spec.name] = before
        else:
            changed.append(f"server.{spec.name}")
    needs_restart = [f"server.{name}" for name in kept]
    settings = dataclasses.replace(new.settings, **kept)
    tables: dict[str, Any] = {"settings": settings}
    for name in Config.__struct_fields__[1:]:
        before, after = getattr(old, name), getattr(new, name)
        tables[name] = before
        if before != after:
            tables[name], stays = _merged(before, after)
            needs_restart += [f"{name}.{one}" for one in stays]
            if tables[name] != before:
                changed.append(name)
    return Config(**tables), Reloaded(tuple(changed), tuple(needs_restart))


def _merged(old: Any, new: Any) -> tuple[Any, list[str]]:
    """A table, with the fields of *old* that need a restart; and the names of those that differ."""
    if not isinstance(new, msgspec.Struct):
        return new, []
    kept = {
        name: getattr(old, name)
        for name in needing_restart(type(new))
        if getattr(old, name) != getattr(new, name)
    }
    return msgspec.structs.replace(new, **kept), list(kept)


class Live:
    """The current `Config`, and what parts of the server made of it."""

    def __init__(self, config: Config) -> None:
        """Begin with *config*."""
        self._state = _State(config)
        self._recipes: list[tuple[Callable[[Config], Any], Callable[[Any], Any]]] = []

    @classmethod
    def of(cls, given: "Config | Settings | Live") -> "Live":
        """*given* if it is one; else a new one of a configuration that nobody replaces."""
        if isinstance(given, Live):
            return given
        return cls(given if isinstance(given, Config) else Config.of(given))

    @property
    def config(self) -> Config:
        """The configuration that counts at the moment."""
        return self._state.config

    @property
    def settings(self) -> Settings:
        """Its settings."""
        return self._state.config.settings

    def derived(self, part: Callable[[Config], _K], make: Callable[[_K], _T]) -> Callable[[], _T]:
        """A function that returns ``make(part(config))`` of the current configuration.

        *make* is called at once, and again only for a configuration whose *part* is another. What
        it raises, this raises, or `replace`.
        """
        index = len(self._recipes)
        self._recipes.append((part, make))
        self._state = _State(self.config, (*self._state.made, make(part(self.config))))
        return lambda: self._state.made[index]

    def replace(self, config: Config) -> None:
        """Let *config* count from here on.

        Everything derived from it is made before; if that raises, the old one still counts.
        """
        old = self._state
        made = tuple(
            before if part(config) == part(old.config) else make(part(config))
            for (part, make), before in zip(self._recipes, old.made, strict=True)
        )
        self._state = _State(config, made)
