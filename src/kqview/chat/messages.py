"""Messages and tools of a chat, checked before a template sees them; tool calls in an answer.

A message is a mapping in the format of OpenAI's chat API and of transformers: ``role``,
``content`` and, for tools, ``tool_calls``, ``tool_call_id`` and ``name``. Other keys are passed on
to the template. Checking copies everything to plain dicts, lists and scalars, so that a template
can neither modify nor call anything that belongs to the caller.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, cast

from kqview import json_input
from kqview.arguments import invalid
from kqview.chat.functions import tool_of
from kqview.chat.json_text import decoded
from kqview.chat.spans import ROLES
from kqview.errors import RequestError
from kqview.types.reply import Reply, ToolCall

Message = Mapping[str, Any]

_ROLE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_NESTING_MAX: Final = 64
_WITHOUT_CONTENT: Final = frozenset({"assistant"})  # tool calls may be the whole message


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """*messages* as dicts.

    Raises:
        RequestError: *messages* is not a sequence of at least one message, or a message is
            malformed: a role that is not a name, content that is neither text nor a list of text
            parts, a tool call without a function name, a value that JSON cannot express.
    """
    checked = _each("messages", messages, _message)
    if not checked:
        raise RequestError("messages is empty; pass at least one message", parameter="messages")
    return checked


def checked_tools(tools: object) -> list[dict[str, Any]] | None:
    """*tools* as dicts of the form ``{"type": "function", "function": {"name": ...}}``.

    A bare function, ``{"name": ..., "parameters": ...}``, is wrapped in that form; a pydantic model
    is a function that has its name, description and fields; a Python function is described by its
    hints and docstring, see `functions.tool_of`.

    Raises:
        RequestError: *tools* is not a sequence of such mappings, models and functions.
    """
    return None if tools is None else _each("tools", tools, _tool) or None


def checked_options(options: object) -> dict[str, Any]:
    """Extra variables for the template, by name."""
    return {} if options is None else _mapping("template_options", options)


def _each(
    name: str, items: object, check: Callable[[str, object], dict[str, Any]]
) -> list[dict[str, Any]]:
    if isinstance(items, str | bytes) or not isinstance(items, Sequence):
        raise invalid(name, f"a list of {name}", type(items).__name__)
    given = cast("Sequence[object]", items)
    return [check(f"{name}[{i}]", item) for i, item in enumerate(given)]


def _message(where: str, value: object) -> dict[str, Any]:
    message = _mapping(where, value)
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise RequestError(
            f"{where}: role is {_shown(role)}; use a name such as {', '.join(ROLES)}"
        )
    if message.get("tool_calls") is not None:
        message["tool_calls"] = _calls(f"{where}: tool_calls", message["tool_calls"])
    elif "content" not in message or (message["content"] is None and role not in _WITHOUT_CONTENT):
        raise RequestError(f"{where}: content is missing; pass text, which may be empty")
    if "content" in message:
        _check_content(f"{where}: content", message["content"])
    for key in ("name", "tool_call_id"):
        if not isinstance(message.get(key, ""), str | None):
            raise RequestError(f"{where}: {key} is {_shown(message[key])}; pass text")
    # As in transformers: templates test for the key, and "content" may be null next to calls.
    return {key: item for key, item in message.items() if item is not None}


def _check_content(where: str, content: object) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RequestError(
            f"{where} is of type {type(content).__name__}; pass text or a list of parts"
        )
    for i, part in enumerate(cast("list[object]", content)):
        if not isinstance(part, dict):
            raise RequestError(f"{where}[{i}] is {_shown(part)}; pass a part such as {_PART}")
        fields = cast("dict[str, object]", part)
        if fields.get("type") != "text":
            raise RequestError(
                f"{where}[{i}]: type is {_shown(fields.get('type'))}; only 'text' is supported"
            )
        if not isinstance(fields.get("text"), str):
            raise RequestError(f"{where}[{i}]: text is missing; pass a part such as {_PART}")


_PART: Final = '{"type": "text", "text": "..."}'


def _calls(where: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{where} is {_shown(value)}; pass a list of calls")
    calls = cast("list[Any]", value)
    for i, call in enumerate(calls):
        fields: dict[str, Any] = _mapping(f"{where}[{i}]", call)
        function: dict[str, Any] = _mapping(f"{where}[{i}]", fields.get("function", fields))
        if not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{i}]: the name of the function is missing")
        # Clients of OpenAI's API send arguments as JSON text; templates expect objects.
        function["arguments"] = _arguments(f"{where}[{i}]", function.get("arguments", {}))
        calls[i] = {**fields, "function": function} if "function" in fields else function
    return calls


def _arguments(where: str, value: object) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json_input.loads(value) if value.strip() else {}
    except ValueError:
        raise RequestError(
            f"{where}: arguments is {_shown(value)}; pass an object or JSON text"
        ) from None


def _tool(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        value = _function_of(where, value)
    tool = _mapping(where, cast("Mapping[str, object]", value))
    if "function" not in tool and isinstance(tool.get("name"), str):
        return {"type": "function", "function": tool}
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(
        cast("dict[str, object]", function).get("name"), str
    ):
        raise RequestError(
            f"{where}: function or its name is missing; pass a tool such as "
            '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
        )
    return tool


def _function_of(where: str, value: object) -> dict[str, Any]:
    """A Python function, or one whose parameters are the fields of a pydantic model."""
    schema_of = getattr(value, "model_json_schema", None)
    if callable(value) and not isinstance(value, type):
        return tool_of(where, value)
    if not isinstance(value, type) or schema_of is None:
        raise RequestError(
            f"{where} is of type {type(value).__name__}; pass the function itself, a mapping, "
            '{"name": "...", "description": "...", "parameters": {...}}, or a pydantic model '
            "whose fields are its parameters",
            parameter="tools",
        )
    schema: dict[str, Any] = schema_of()
    about = {key: schema.pop(key) for key in ("description",) if key in schema}
    return _mapping(where, {"name": value.__name__, **about, "parameters": schema})


def _mapping(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} is of type {type(value).__name__}; pass a mapping")
    return _plain(where, cast("Mapping[object, object]", value), 0)


def _plain(where: str, value: object, nesting: int) -> Any:
    """A copy of *value* in JSON's types; subclasses, which may bring code, become plain values."""
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
                    raise RequestError(f"{where}: key {_shown(key)} is not text; use text keys")
            return {str(key): _plain(f"{where}.{key}", item, nesting + 1) for key, item in items}
        case list() | tuple():
            entries = cast("Sequence[object]", value)
            return [_plain(f"{where}[{i}]", item, nesting + 1) for i, item in enumerate(entries)]
        case _:
            raise RequestError(
                f"{where} is of type {type(value).__name__}; pass text, numbers, lists or mappings"
            )


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


# ---- answers
#
# llama.cpp's own parser (its ``common`` library) knows more forms. It is not linked: it brings a
# second template engine and several times the code of this package's core, and it parses its own
# rendering of a template, not text.


Family = Literal["hermes", "llama", "mistral"]


def parse_tool_calls(text: str, family: Family | None = None) -> Reply:
    """Split *text*, such as ``Generation.text``, into content and tool calls.

    What does not parse stays text: the answer of a model is never an error. In arguments, a number
    that JSON does not have, such as NaN or 1e999, is the string that the model wrote, and half of a
    surrogate pair is U+FFFD.

    Args:
        text: The whole answer.
        family: The form of the calls:

            - "hermes" (Qwen 2.5 and 3, Hermes):
              ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``
            - "mistral": ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or the newer
              ``[TOOL_CALLS]name[ARGS]{...}``
            - "llama" (Llama 3): the whole answer is ``{"name": ..., "parameters": {...}}``, after
              an optional ``<|python_tag|>``

            None tries them in this order. Name the family if an answer may look like a call
            without being one.

    Raises:
        RequestError: *family* is unknown.
    """
    if family is not None and family not in _PARSERS:
        raise RequestError(f"family is {family!r}; choose from {', '.join(_PARSERS)}")
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
        # The generation may end before the closing mark.
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
    """The JSON value at *start* and its end; None and *start* if there is none."""
    try:
        return decoded(text, _skip_space(text, start))
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
    if isinstance(arguments, str):  # some models write JSON text inside JSON
        arguments, _ = _read_json(arguments, 0)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    id_ = id_ if isinstance(id_, str) else None
    return ToolCall(name, cast("dict[str, Any]", arguments), id_)


def _reply(content: Iterable[str], calls: Iterable[ToolCall]) -> Reply:
    return Reply("".join(content).strip(), tuple(calls))
