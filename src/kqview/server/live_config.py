"""LiveConfig: the configuration in effect, held once for a whole server.

It changes while the server runs (`App.reload`), so nothing keeps a copy of its values: whoever
needs one asks here each time it needs it. What takes work to make of a value, such as a folder
of mods or a table of networks, is made once for each value of it (`derived`).

The event loop's thread replaces it; any thread reads it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kqview.server.config import TABLES, Config, ModelConfig
from kqview.server.settings import Settings
from kqview.server.settings_table import rows_of

_K = TypeVar("_K")
_T = TypeVar("_T")


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
    """*new*, with *old*'s values of what cannot change while the server runs.

    Args:
        old: What counts.
        new: What was read.
    """
    models, models_stay = _models_of(old, new)
    changed: list[str] = []
    stays: list[str] = []
    found: dict[str, Any] = {}
    for name in ("settings", *TABLES):
        before, now = getattr(old, name), getattr(new, name)
        table = "server" if name == "settings" else name
        kept = {
            key: getattr(before, key)
            for key, row in rows_of(now.__class__).items()
            if row.restart and getattr(before, key) != getattr(now, key)
        }
        stays += [f"{table}.{key}" for key in kept]
        found[name] = merged = dataclasses.replace(now, **kept)
        if name == "settings":
            rows = rows_of(Settings)
            changed += [f"server.{k}" for k in rows if getattr(merged, k) != getattr(before, k)]
            changed += ["models"] if [*models.items()] != [*old.models.items()] else []
        elif merged != before:
            changed.append(name)
    stays += ["models"] if models_stay else []
    return Config(models=models, **found), Reloaded(tuple(changed), tuple(stays))


def _models_of(old: Config, new: Config) -> tuple[Mapping[str, ModelConfig], bool]:
    """The models in effect, and whether they are not those of *new*."""
    if _is_one(old) and _is_one(new):  # of settings, which are compared themselves
        return old.models, False
    if _is_one(old) or _is_one(new):
        return old.models, old.models != new.models
    return new.models, False


def _is_one(config: Config) -> bool:
    """Whether the model is that of the settings."""
    return not config.models or config.models == Config.of(config.settings).models


@dataclass(slots=True)
class Derived(Generic[_T]):
    """What is made of a part of the configuration; ``value`` is that of the one in effect."""

    part: Callable[[Config], Any]
    make: Callable[[Any], _T]
    value: _T


class LiveConfig:
    """The current `Config`, and what parts of the server made of it.

    Attributes:
        config: The configuration in effect.
        settings: Its settings.
    """

    def __init__(self, config: Config) -> None:
        """Begin with *config*."""
        self.config = config
        self.settings = config.settings
        self._derived: list[Derived[Any]] = []

    @classmethod
    def of(cls, given: "Config | Settings | LiveConfig") -> "LiveConfig":
        """*given* if it is one; else a new one of a configuration that nobody replaces."""
        if isinstance(given, LiveConfig):
            return given
        return cls(given if isinstance(given, Config) else Config.of(given))

    def derived(self, part: Callable[[Config], _K], make: Callable[[_K], _T]) -> Derived[_T]:
        """``make(part(config))`` of the current configuration.

        *make* is called at once, and again only for a configuration whose *part* is another. What
        it raises, this raises, or `replace`.
        """
        one = Derived(part, make, make(part(self.config)))
        self._derived.append(one)
        return one

    def replace(self, config: Config) -> None:
        """Put *config* into effect.

        Everything derived from it is made before; if that raises, the old one stays in effect.
        """
        made = [
            one.value if one.part(config) == one.part(self.config) else one.make(one.part(config))
            for one in self._derived
        ]
        for one, value in zip(self._derived, made, strict=True):
            one.value = value
        self.config, self.settings = config, config.settings
