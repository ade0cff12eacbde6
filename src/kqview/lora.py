"""LoRA adapters of an engine: which are loaded, and with which scales a request runs."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from kqview.arguments import invalid, to_index, to_number
from kqview.errors import RequestError, shown

SCALE_MAX: Final = 1e6
LoraScales = Mapping[int | str, float]
"""Scale of each adapter to use, by its id, path or file name, with or without .gguf; the others
have scale 0."""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter that an engine has loaded.

    Attributes:
        id: Index in ``engine.lora``.
        path: The file as it was given to Engine.
        scale: Factor of its changes to the weights, for requests that set none; 0 leaves it out.
    """

    id: int
    path: str
    scale: float


class EngineLora:
    """The adapters of one engine and their default scales; any thread.

    Args:
        adapters: (path, scale) of each adapter, in the order of the engine's option.
    """

    def __init__(self, adapters: Sequence[tuple[str, float]]) -> None:
        self._paths = [path for path, _ in adapters]
        self.opened: Final = tuple(scale for _, scale in adapters)
        self.scales: tuple[float, ...] = self.opened  # replaced as a whole

    @property
    def adapters(self) -> tuple[LoraAdapter, ...]:
        """All adapters with their default scales."""
        return tuple(map(LoraAdapter, range(len(self._paths)), self._paths, self.scales))

    def scales_of(self, name: str, given: object) -> tuple[float, ...]:
        """A scale for each adapter: the default ones if *given* is None.

        Raises:
            RequestError: *given* is no mapping, names an adapter that is not loaded, or has a scale
                that is no number or out of range.
        """
        if given is None:
            return self.scales
        if not isinstance(given, Mapping):
            raise invalid(name, "a dict of scales by adapter id or file name", shown(given))
        scales = [0.0] * len(self._paths)
        for key, value in cast("Mapping[object, object]", given).items():
            scale = scale_of(value)
            if scale is None:
                raise invalid(
                    name,
                    f"a dict with scales from -{SCALE_MAX:g} to {SCALE_MAX:g}",
                    f"{shown(value)} for {shown(key)}",
                )
            for adapter_id in self._ids_of(name, key):
                scales[adapter_id] = scale
        return tuple(scales)

    def _ids_of(self, name: str, key: object) -> list[int]:
        if isinstance(key, str):
            names = [(path, os.path.basename(path)) for path in self._paths]
            found = [
                i for i, one in enumerate(names) if key in (*one, one[1].removesuffix(".gguf"))
            ]
        else:
            found = [i for i in range(len(self._paths)) if i == to_index(key)]
        if found:
            return found
        n = len(self._paths)
        loaded = f"adapters 0..{n - 1}" if n > 0 else "none; open it with Engine(..., lora=...)"
        raise RequestError(
            f"{name} names the adapter {shown(key)}, but the engine loaded {loaded}", parameter=name
        )


def scale_of(value: object) -> float | None:
    """*value* as a scale; None if it is no number or out of range."""
    scale = to_number(value)
    return scale if scale is not None and abs(scale) <= SCALE_MAX else None
