"""Messages and tools of a chat, checked before a template sees them.

A message is a mapping in the format of OpenAI's chat API and of transformers: ``role``,
``content`` and, for tools, ``tool_calls``, ``tool_call_id`` and ``name``. Other keys are passed on
to the template. Checking copies everything to plain dicts, lists and scalars, so that a template
can neither modify nor call anything that belongs to the caller.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from kqview import json_input
from kqview.arguments import invalid
from kqview.chat.functions import tool_of
from kqview.chat.parts import ROLES
from kqview.errors import RequestError, shown

Message = Mapping[str, Any]

_ROLE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
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
    """Extra variables for the template, by name.

    Raises:
        RequestError: *options* is not a mapping of what JSON can express, or has a text where
            templates want true or false.
    """
    found = {} if options is None else _mapping("template_options", options)
    thinks: object = found.get("enable_thinking")
    if isinstance(thinks, str):  # which a template would take for true, whatever it says
        raise RequestError(
            f"template_options has enable_thinking as text, {shown(thinks)}; pass true or false",
            parameter="template_options",
        )
    return found


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
        raise RequestError(f"{where}: role is {shown(role)}; use a name such as {', '.join(ROLES)}")
    if message.get("tool_calls") is not None:
        message["tool_calls"] = _calls(f"{where}: tool_calls", message["tool_calls"])
    elif "content" not in message or (message["content"] is None and role not in _WITHOUT_CONTENT):
        raise RequestError(f"{where}: content is missing; pass text, which may be empty")
    if not isinstance(message.get("content"), str | None):
        _check_parts(f"{where}: content", message["content"])
    for key in ("name", "tool_call_id"):
        if not isinstance(message.get(key, ""), str | None):
            raise RequestError(f"{where}: {key} is {shown(message[key])}; pass text")
    # As in transformers: templates test for the key, and "content" may be null next to calls.
    return {key: item for key, item in message.items() if item is not None}


def _check_parts(where: str, content: object) -> None:
    if not isinstance(content, list):
        raise RequestError(
            f"{where} is of type {type(content).__name__}; pass text or a list of parts"
        )
    for i, part in enumerate(cast("list[object]", content)):
        if not isinstance(part, dict):
            raise RequestError(f"{where}[{i}] is {shown(part)}; pass a part such as {_PART}")
        fields = cast("dict[str, object]", part)
        if fields.get("type") != "text":
            raise RequestError(
                f"{where}[{i}]: type is {shown(fields.get('type'))}; only 'text' is supported"
            )
        if not isinstance(fields.get("text"), str):
            raise RequestError(f"{where}[{i}]: text is missing; pass a part such as {_PART}")


_PART: Final = '{"type": "text", "text": "..."}'


def _calls(where: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{where} is {shown(value)}; pass a list of calls")
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
    except json_input.TooDeep as error:
        raise RequestError(f"{where}: arguments cannot be read: {error}") from None
    except ValueError:
        raise RequestError(
            f"{where}: arguments is {shown(value)}; pass an object or JSON text"
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
    given = cast("Mapping[object, object]", value)
    try:
        json_input.check_value(given)
    except json_input.TooDeep as error:
        raise RequestError(f"{where}: {error}") from None
    return _plain(where, given)


def _plain(where: str, value: object) -> Any:
    """A copy of *value* in JSON's types; subclasses, which may bring code, become plain values."""
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
                    raise RequestError(f"{where}: key {shown(key)} is not text; use text keys")
            return {str(key): _plain(f"{where}.{key}", item) for key, item in items}
        case list() | tuple():
            entries = cast("Sequence[object]", value)
            return [_plain(f"{where}[{i}]", item) for i, item in enumerate(entries)]
        case _:
            raise RequestError(
                f"{where} is of type {type(value).__name__}; pass text, numbers, lists or mappings"
            )
