"""Parts of a rendered chat. Imports little: the helper processes of templates load it."""

from collections.abc import Iterable
from typing import Final, NamedTuple

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that templates write into special tokens, such as ``'<|' + role + '|>'``."""


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
