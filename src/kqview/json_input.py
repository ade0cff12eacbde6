"""JSON from outside: one limit on its depth, found before it is decoded and without recursion.

Decoders and encoders recurse, and how deep they can depends on the version of Python and on who
calls them. The limit is the same for what is no JSON but becomes the same values: MessagePack,
TOML, and what callers pass as Python's lists and mappings.
Pure; needs no native core. The server counts long bodies with `kqview._core.count_values`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

DEPTH_MAX: Final = 128
"""Most lists and objects around a value."""

_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_NO_BRACKET: Final = re.compile(r"[^][{}]+")


class TooDeep(ValueError):
    """The JSON is nested more than `DEPTH_MAX` deep."""

    def __init__(self, depth: int | None = None) -> None:
        how = "too" if depth is None else depth
        super().__init__(f"it is nested {how} deep, the limit is {DEPTH_MAX}; make it flatter")


def check_depth(text: str) -> None:
    """Raise TooDeep if *text*, JSON or what shall be, is nested too deeply."""
    if text.count("[") + text.count("{") <= DEPTH_MAX:
        return
    depth = deepest = 0
    for bracket in _NO_BRACKET.sub("", _STRING.sub("", text)):
        depth = max(depth + (1 if bracket in "[{" else -1), 0)
        deepest = max(deepest, depth)
    if deepest > DEPTH_MAX:
        raise TooDeep(deepest)


def check_value(value: object) -> None:
    """Raise TooDeep if *value*, made by a caller, is nested too deeply, or contains itself."""
    inside: dict[int, Iterator[object]] = {0: iter([value])}  # each by its list's or mapping's id
    deepest = 0
    while inside:
        for one in next(reversed(inside.values())):
            if isinstance(one, Mapping | list | tuple):
                given = cast("Mapping[object, object] | list[object]", one)
                if id(given) in inside:
                    raise TooDeep
                inside[id(given)] = iter(given.values() if isinstance(given, Mapping) else given)
                deepest = max(deepest, len(inside) - 1)
                break
        else:
            inside.popitem()
    if deepest > DEPTH_MAX:
        raise TooDeep(deepest)


def loads(data: str | bytes) -> Any:
    """As `json.loads`.

    Raises:
        ValueError: It is no JSON. May be TooDeep.
    """
    text = (
        data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
    )
    check_depth(text)
    return json.loads(text)
