"""Messages and tools of a chat, checked before any template sees them.

A message is a mapping as of OpenAI's chat format and of transformers: ``role``, ``content``, and
for tools ``tool_calls``, ``tool_call_id``, ``name``. Other keys are the template's business and
are handed on. The results are plain dicts, lists and scalars of our own, so that a template can
neither change what the caller holds nor call anything of it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

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
