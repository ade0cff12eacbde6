"""Live: the configuration that counts at the moment, held once for a whole server.

It changes while the server runs (`App.reload`), so nothing keeps a copy of its values: whoever
needs one asks here each time it needs it. What takes work to make of a value, such as a folder
of mods or a table of networks, is made once for each value of it (`derived`).

The event loop's thread replaces it; any thread reads it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kqview.server.config import Config
from kqview.server.settings import Settings

_K = TypeVar("_K")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _State:
    """A configuration and what was made of it, in the order of `Live.derived`."""

    config: Config
    made: tuple[Any, ...] = ()


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
