"""Messages and tools of a chat, checked before any template sees them.

A message is a mapping as of OpenAI's chat format and of transformers: ``role``, ``content``, and
for tools ``tool_calls``, ``tool_call_id``, ``name``. Other keys are the template's business and
are handed on. The results are plain dicts, lists and scalars of our own, so that a template can
neither change what the caller holds nor call anything of it.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, cast

from kqview.errors import RequestError

Message = Mapping[str, Any]

# Roles that templates write into special tokens, such as '<|' + role + '|>'.
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")

_ROLE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_NESTING_MAX: Final = 64
_WITHOUT_CONTENT: Final = frozenset({"assistant"})  # a tool call may be all of it


def checked_messages(who: str, messages: object) -> list[dict[str, Any]]:
    """*messages* as dicts.

    Raises:
        RequestError: They are not a sequence of at least one message, or one is not well-formed:
            a role that is no name, content that is neither text nor a list of text parts, a tool
            call without a function name, a value that JSON does not know.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        got = type(messages).__name__
        raise RequestError(f"{who}: messages is of type {got}, a list of messages is needed")
    items = cast("Sequence[object]", messages)
    if not items:
        raise RequestError(f"{who}: messages is empty, at least one message is needed")
    return [_message(f"{who}: messages[{i}]", item) for i, item in enumerate(items)]


def checked_tools(who: str, tools: object) -> list[dict[str, Any]] | None:
    """*tools* as dicts of the form ``{"type": "function", "function": {"name": ...}}``.

    A bare function, ``{"name": ..., "parameters": ...}``, is put into that form.

    Raises:
        RequestError: They are no sequence of such mappings.
    """
    if tools is None:
        return None
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        got = type(tools).__name__
        raise RequestError(f"{who}: tools is of type {got}, a list of functions is needed")
    checked = [
        _tool(f"{who}: tools[{i}]", item) for i, item in enumerate(cast("Sequence[object]", tools))
    ]
    return checked or None


def checked_options(who: str, options: object) -> dict[str, Any]:
    """Further variables of a template, by name."""
    return {} if options is None else _mapping(f"{who}: template_options", options)


def _message(where: str, value: object) -> dict[str, Any]:
    message = _mapping(where, value)
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise RequestError(
            f"{where}: role is {_shown(role)}, a name is needed; usual are {', '.join(ROLES)}"
        )
    if message.get("tool_calls") is not None:
        message["tool_calls"] = _calls(f"{where}: tool_calls", message["tool_calls"])
    elif "content" not in message or (message["content"] is None and role not in _WITHOUT_CONTENT):
        raise RequestError(f"{where}: content is missing, text is needed; '' is allowed")
    if "content" in message:
        _check_content(f"{where}: content", message["content"])
    for key in ("name", "tool_call_id"):
        if not isinstance(message.get(key, ""), str | None):
            raise RequestError(f"{where}: {key} is {_shown(message[key])}, text is needed")
    # As transformers does: "content": null stands beside calls, and templates ask for the key.
    return {key: item for key, item in message.items() if item is not None}


def _check_content(where: str, content: object) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RequestError(
            f"{where} is of type {type(content).__name__}, text or a list of parts is needed"
        )
    for i, part in enumerate(cast("list[object]", content)):
        if not isinstance(part, dict):
            raise RequestError(f"{where}[{i}] is {_shown(part)}, a part such as {_PART} is needed")
        fields = cast("dict[str, object]", part)
        if fields.get("type") != "text":
            raise RequestError(
                f"{where}[{i}]: type is {_shown(fields.get('type'))}, only 'text' is supported"
            )
        if not isinstance(fields.get("text"), str):
            raise RequestError(f"{where}[{i}]: text is missing, parts look like {_PART}")


_PART: Final = '{"type": "text", "text": "..."}'


def _calls(where: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{where} is {_shown(value)}, a list of calls is needed")
    calls = cast("list[Any]", value)
    for i, call in enumerate(calls):
        fields: dict[str, Any] = _mapping(f"{where}[{i}]", call)
        function: dict[str, Any] = _mapping(f"{where}[{i}]", fields.get("function", fields))
        if not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{i}]: the function's name is missing, text is needed")
        # OpenAI's clients send arguments as JSON text, templates write them as objects.
        function["arguments"] = _arguments(f"{where}[{i}]", function.get("arguments", {}))
        calls[i] = {**fields, "function": function} if "function" in fields else function
    return calls


def _arguments(where: str, value: object) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError):
        raise RequestError(
            f"{where}: arguments are {_shown(value)}, an object or its JSON is needed"
        ) from None


def _tool(where: str, value: object) -> dict[str, Any]:
    tool = _mapping(where, value)
    if "function" not in tool and isinstance(tool.get("name"), str):
        return {"type": "function", "function": tool}
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(
        cast("dict[str, object]", function).get("name"), str
    ):
        raise RequestError(
            f"{where}: no function with a name; tools look like "
            '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
        )
    return tool


def _mapping(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} is of type {type(value).__name__}, a mapping is needed")
    return _plain(where, cast("Mapping[object, object]", value), 0)


def _plain(where: str, value: object, nesting: int) -> Any:
    """*value* as JSON's own types, copied. Bare str and int: a subclass could bring code along."""
    if nesting > _NESTING_MAX:
        raise RequestError(f"{where}: nested deeper than {_NESTING_MAX} levels; flatten it")
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int(value)
        case float():
            return float(value)
        case Mapping():
            items = cast("Mapping[object, object]", value).items()
            for key, _ in items:
                if not isinstance(key, str):
                    raise RequestError(f"{where}: key {_shown(key)} is no text; use text as keys")
            return {str(key): _plain(f"{where}.{key}", item, nesting + 1) for key, item in items}
        case list() | tuple():
            entries = cast("Sequence[object]", value)
            return [_plain(f"{where}[{i}]", item, nesting + 1) for i, item in enumerate(entries)]
        case _:
            raise RequestError(
                f"{where}: got {type(value).__name__}, text, numbers, lists and mappings are needed"
            )


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


# ---- answers


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
