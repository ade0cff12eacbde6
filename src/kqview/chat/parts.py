"""Parts of a chat: of its messages, and of its rendered text.

Imports little: the helper processes of templates load it.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple, cast

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that templates write into special tokens, such as ``'<|' + role + '|>'``."""


def text_of(content: object) -> str:
    """Text of a message's content, whose parts are joined by line ends."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in objects_of(content))


def object_of(value: object) -> dict[str, Any]:
    """*value* if it is a JSON object, else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def objects_of(value: object) -> list[dict[str, Any]]:
    """The objects of *value* if it is a list, else none."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", item) for item in items if isinstance(item, dict)]


class PromptPart(NamedTuple):
    """A piece of a rendered chat: the text of one special token, or ordinary text."""

    text: str
    is_special: bool


def text_of_parts(parts: Iterable[PromptPart]) -> str:
    """What the model reads; special tokens and contents look alike in it."""
    return "".join(part.text for part in parts)


def between(parts: Iterable[PromptPart], start: int, stop: int) -> list[PromptPart]:
    """The parts of these characters, without white space around them."""
    found: list[PromptPart] = []
    at = 0
    for part in parts:
        text = part.text[max(0, start - at) : max(0, stop - at)]
        at += len(part.text)
        found.append(PromptPart(text, part.is_special and text == part.text))
    found = [part for part in found if part.text]
    if found and not found[0].is_special:
        found[0] = PromptPart(found[0].text.lstrip(), False)
    if found and not found[-1].is_special:
        found[-1] = PromptPart(found[-1].text.rstrip(), False)
    return [part for part in found if part.text]
