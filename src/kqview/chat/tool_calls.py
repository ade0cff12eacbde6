"""Tool calls read from the text that a model wrote.

Three families cover most models, each known by the mark that it writes:

- "hermes" (Qwen 2.5 and 3, Hermes): ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``
- "mistral": ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, and the newer form
  ``[TOOL_CALLS]name[ARGS]{...}``
- "llama" (Llama 3): ``{"name": ..., "parameters": {...}}``, all of the answer, after an optional
  ``<|python_tag|>``

llama.cpp's own parser (its ``common`` library) knows more forms. It is not linked: it brings
several times the code of this package's core along, with a second template engine, and works on
its own rendering of a template, not on text.

What does not parse is no call and stays text: a model's answer is never an error.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, cast

from kqview.errors import RequestError

Family = Literal["hermes", "llama", "mistral"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called.

    Attributes:
        name: The function's name, as the model wrote it: it may be none of the given tools.
        arguments: The arguments by name; not checked against any schema.
        id: The id that the model gave the call, None where its family has none.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None

    def to_message(self) -> dict[str, Any]:
        """The call as it stands in ``tool_calls`` of an assistant's message."""
        call: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "arguments": dict(self.arguments)},
        }
        return call if self.id is None else {"id": self.id, **call}


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, taken apart.

    Attributes:
        content: The text without its calls.
        tool_calls: The calls in the order in which they were written.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = field(default=())

    def to_message(self) -> dict[str, Any]:
        """The answer as an assistant's message for the next `Engine.chat`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.to_message() for call in self.tool_calls]
        return message


def parse_tool_calls(text: str, family: Family | None = None) -> Reply:
    """Split *text*, such as ``Generation.text``, into content and tool calls.

    Args:
        text: All that the model wrote.
        family: The form of its calls; None takes the first one of hermes, mistral and llama that
            finds a call. Name it where an answer may look like a call and is none: JSON with a
            "name" and "parameters" is one for llama.

    Raises:
        RequestError: *family* is not known.
    """
    if family is not None and family not in _PARSERS:
        raise RequestError(
            f"parse_tool_calls: family is {family!r}, known are {', '.join(_PARSERS)}"
        )
    for name, parse in _PARSERS.items():
        if family in (None, name):
            reply = parse(text)
            if reply.tool_calls:
                return reply
    return Reply(text)


_HERMES_START: Final = "<tool_call>"
_HERMES_END: Final = "</tool_call>"
_MISTRAL: Final = "[TOOL_CALLS]"
_MISTRAL_NAMED: Final = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]([\w-]+))?\[ARGS\]")
_PYTHON_TAG: Final = "<|python_tag|>"
_JSON: Final = json.JSONDecoder()


def _hermes(text: str) -> Reply:
    content: list[str] = []
    calls: list[ToolCall] = []
    end = 0
    while (start := text.find(_HERMES_START, end)) >= 0:
        value, stop = _read_json(text, start + len(_HERMES_START))
        call = _to_call(value, "arguments")
        after = _skip_space(text, stop)
        if call is None:
            content.append(text[end : start + len(_HERMES_START)])
            end = start + len(_HERMES_START)
            continue
        content.append(text[end:start])
        calls.append(call)
        # Generation may have ended before the mark was closed.
        closed = text.startswith(_HERMES_END, after)
        end = after + len(_HERMES_END) if closed else stop
    return _reply([*content, text[end:]], calls)


def _mistral(text: str) -> Reply:
    before, mark, rest = text.partition(_MISTRAL)
    if not mark:
        return Reply(text)
    value, stop = _read_json(rest, 0)
    if isinstance(value, list):
        found = [_to_call(item, "arguments") for item in cast("list[object]", value)]
        if found and None not in found:
            return _reply([before, rest[stop:]], [call for call in found if call])
        return Reply(text)
    calls: list[ToolCall] = []
    end = 0
    while match := _MISTRAL_NAMED.match(rest, end):
        arguments, stop = _read_json(rest, match.end())
        if not isinstance(arguments, dict):
            break
        calls.append(ToolCall(match[1], cast("dict[str, Any]", arguments), match[2]))
        end = stop
        if rest.startswith(_MISTRAL, end):
            end += len(_MISTRAL)
    return _reply([before, rest[end:]], calls)


def _llama(text: str) -> Reply:
    rest = text.strip().removeprefix(_PYTHON_TAG)
    calls: list[ToolCall] = []
    end = 0
    while end < len(rest):
        value, stop = _read_json(rest, end)
        call = _to_call(value, "parameters") or _to_call(value, "arguments")
        if call is None:
            return Reply(text)
        calls.append(call)
        end = _skip_space(rest, stop)
        end = _skip_space(rest, end + 1) if rest.startswith(";", end) else end
    return _reply([], calls)


_PARSERS: Final[Mapping[Family, Callable[[str], Reply]]] = MappingProxyType(
    {"hermes": _hermes, "mistral": _mistral, "llama": _llama}
)


def _read_json(text: str, start: int) -> tuple[object, int]:
    """The JSON value at *start* and where it ends; None and *start* where there is none."""
    try:
        return _JSON.raw_decode(text, _skip_space(text, start))
    except (ValueError, RecursionError):
        return None, start


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _to_call(value: object, key: str) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    fields = cast("dict[str, object]", value)
    name, arguments, id_ = fields.get("name"), fields.get(key), fields.get("id")
    if isinstance(arguments, str):  # some models write them as JSON text in JSON
        arguments, _ = _read_json(arguments, 0)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    id_ = id_ if isinstance(id_, str) else None
    return ToolCall(name, cast("dict[str, Any]", arguments), id_)


def _reply(content: Iterable[str], calls: Iterable[ToolCall]) -> Reply:
    return Reply("".join(content).strip(), tuple(calls))
