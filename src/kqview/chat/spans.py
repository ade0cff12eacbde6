"""Spans: where each message of a rendered chat ends, and how those of a role begin.

Pure; calls the template that it is given.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, NamedTuple, Protocol

from kqview.errors import RequestError

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that templates write into special tokens, such as ``'<|' + role + '|>'``."""

_OTHER: Final = "\u241fother\u241f"


class Part(NamedTuple):
    """A piece of a rendered chat: the text of one special token, or ordinary text."""

    text: str
    is_special: bool


class Render(Protocol):
    """Renders messages with the template and options of one call."""

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> Sequence[Part]: ...


def message_ends(
    text: str,
    messages: Sequence[Mapping[str, Any]],
    render: Render,
    *,
    ends_of_turn: Sequence[str],
) -> list[int]:
    """Index in *text* at which each message ends, ascending.

    The first k messages rendered alone are usually the beginning of the whole: that is where the
    k-th ends. Some templates write a message differently if it is the last one (Qwen3 keeps its
    reasoning), or not at all (Gemma writes a system message into the next one). There, another
    content shows where the next message's content begins; the message before it ends after the last
    end of a turn up to there.

    Args:
        text: The whole chat.
        messages: Its messages.
        render: Renders messages as *text* was rendered.
        ends_of_turn: Texts of the special tokens that end a message.
    """
    ends: list[int] = []
    for n in range(1, len(messages) + 1):
        begun = ends[-1] if ends else 0
        part = _rendered(render, messages[:n])
        if part is not None and len(part) >= begun and text.startswith(part):
            ends.append(len(part))
        elif n == len(messages):
            ends.append(len(text))
        else:
            ends.append(_end_before(text, messages, n, render, begun, ends_of_turn))
    return ends


def _end_before(
    text: str,
    messages: Sequence[Mapping[str, Any]],
    n: int,
    render: Render,
    begun: int,
    ends_of_turn: Sequence[str],
) -> int:
    """Where message n - 1 ends, counted from 0, judged by where the content of message n begins."""
    changed = [*messages[:n], {**messages[n], "content": _OTHER}, *messages[n + 1 :]]
    other = _rendered(render, changed, add_generation_prompt=True)
    if other is None:
        return begun
    content = begun + _n_shared(text[begun:], other[begun:])
    end = begun
    for mark in ends_of_turn:
        place = text.rfind(mark, begun, content)
        end = end if place < 0 else max(end, place + len(mark))
    while begun < end < content and text[end].isspace():
        end += 1
    return end


def _rendered(
    render: Render, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
) -> str | None:
    try:
        parts = render(messages, add_generation_prompt=add_generation_prompt)
    except RequestError:  # many templates insist on certain roles
        return None
    return "".join(part.text for part in parts)


def _n_shared(one: str, other: str) -> int:
    pairs: Iterable[tuple[str, str]] = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# ---- headers

_SAID: Final = "\u241fsaid\u241f"
_CALL: Final[Mapping[str, Any]] = {
    "type": "function",
    "id": "abcdefghi",
    "function": {"name": "f", "arguments": {}},
}
_USER: Final = {"role": "user", "content": _SAID}
_ANSWER: Final = {"role": "assistant", "content": _SAID}
# Role -> a chat whose last message has it, and is not the first one if that has more before it.
# Of roles that begin alike, the first one counts.
_PROBES: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "user": (_USER, _ANSWER, _USER),
    "assistant": (_USER, _ANSWER),
    "system": ({"role": "system", "content": _SAID},),
    "tool": (
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": _SAID, "tool_call_id": "abcdefghi", "name": "f"},
    ),
}


def role_headers(render: Render, *, ends_of_turn: Sequence[str]) -> dict[str, list[Part]]:
    """What precedes the content in a message of each role, without white space around it.

    Roles that the template refuses, or writes nothing before, are left out.
    """
    headers: dict[str, list[Part]] = {}
    for role, chat in _PROBES.items():
        # A template may want the user's words after the system's.
        for messages in (chat, [*chat, _USER]):
            try:
                parts = render(messages, add_generation_prompt=False)
            except RequestError:
                continue
            text = "".join(part.text for part in parts)
            ends = message_ends(text, messages, render, ends_of_turn=ends_of_turn)
            n = len(chat) - 1
            start = ends[n - 1] if n else 0
            stop = text.find(_SAID, start)
            if stop >= 0 and (header := _stripped(_between(parts, start, stop))):
                headers[role] = header
                break
    return headers


def _between(parts: Iterable[Part], start: int, stop: int) -> list[Part]:
    """The parts of these characters."""
    found: list[Part] = []
    at = 0
    for part in parts:
        text = part.text[max(0, start - at) : max(0, stop - at)]
        at += len(part.text)
        if text:
            found.append(Part(text, part.is_special and text == part.text))
    return found


def _stripped(parts: list[Part]) -> list[Part]:
    """*parts* without white space around them; adjacent ones are never both ordinary text."""
    if parts and not parts[0].is_special:
        parts = [Part(parts[0].text.lstrip(), False), *parts[1:]]
    if parts and not parts[-1].is_special:
        parts = [*parts[:-1], Part(parts[-1].text.rstrip(), False)]
    return [part for part in parts if part.text]
