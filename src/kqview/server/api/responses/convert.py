"""Requests of the Responses API as neutral chat requests. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

from kqview.errors import RequestError
from kqview.server.api.responses import schema
from kqview.server.api.responses.schema import Object
from kqview.server.api.wire.chat import ChatRequest, content_of, options_of_effort
from kqview.server.api.wire.citations import with_documents

_ROLES: Final = ("user", "assistant", "system", "developer")
_MOST_TOP: Final = 20  # OpenAI's
_TEXTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
# What needs responses that the server keeps, and what to do instead.
_KEPT: Final[Mapping[str, str]] = {
    "previous_response_id": "send the whole conversation in input",
    "conversation": "send the whole conversation in input",
    "prompt": "send its text in instructions",
    "background": "ask again, or stream the response",
    "store": "leave it out, or send false",
}


def check_stateless(body: schema.InputBody) -> None:
    """Refuse what works only where responses are kept.

    Raises:
        RequestError: The body has such a field.
    """
    for name, remedy in _KEPT.items():
        if getattr(body, name, None):
            raise RequestError(
                f"{name} is given, but this server keeps no responses; {remedy}", parameter=name
            )


def messages_of(body: schema.InputBody) -> list[Object]:
    """The conversation as messages for a chat template; instructions are the first one.

    Raises:
        RequestError: An item is of a kind that cannot be read.
    """
    messages: list[Object] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not body.input:
        raise RequestError("input is empty; send text or at least one item", parameter="input")
    turn: Object | None = None  # of the assistant: reasoning, text and calls are items of their own
    for i, item in enumerate(body.input):
        where = f"input[{i}]"
        if item.type == "reasoning" or item.type == "function_call" or item.role == "assistant":
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add_to_turn(where, turn, item)
            continue
        turn = None
        messages.append(_message(where, item))
    return messages


def _message(where: str, item: schema.Item) -> Object:
    if item.type == "function_call_output":
        if item.call_id is None:
            raise RequestError(f"{where}: call_id is missing; name the call that this answers")
        content = _content(f"{where}.output", item.output or "")
        return {"role": "tool", "tool_call_id": item.call_id, "content": content}
    if item.type != "message":
        raise RequestError(
            f"{where}: type is {item.type!r}; send messages, reasoning, function_call and "
            "function_call_output"
        )
    if item.role not in _ROLES:
        raise RequestError(f"{where}: role is {item.role!r}; use {', '.join(_ROLES)}")
    return {"role": item.role, "content": _content(f"{where}.content", item.content or "")}


def _add_to_turn(where: str, turn: Object, item: schema.Item) -> None:
    if item.type == "function_call":
        if item.name is None or item.call_id is None:
            raise RequestError(f"{where}: name or call_id of the call is missing")
        function = {"name": item.name, "arguments": item.arguments or ""}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    elif item.type == "reasoning":
        thoughts = item.content or item.summary or ""
        known = turn.get("reasoning_content", "")
        turn["reasoning_content"] = known + _joined(f"{where}.content", thoughts)
    else:
        turn["content"] += _joined(f"{where}.content", item.content or "")


def _content(where: str, content: str | Sequence[schema.Part]) -> str | list[Object]:
    """Text, or text parts where there are several."""
    if isinstance(content, str):
        return content
    return content_of([_text(f"{where}[{i}]", part) for i, part in enumerate(content)])


def _joined(where: str, content: str | Sequence[schema.Part]) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text(f"{where}[{i}]", part) for i, part in enumerate(content))


def _text(where: str, part: schema.Part) -> str:
    if part.type == "refusal":
        return part.refusal or ""
    if part.type not in _TEXTS:
        raise RequestError(f"{where}: type is {part.type!r}, but the model reads text only")
    return part.text or ""


def tools_of(body: schema.InputBody) -> list[Object]:
    """Tools as functions for a chat template; those that OpenAI's servers run are left out.

    Raises:
        RequestError: A function has no name.
    """
    tools: list[Object] = []
    for i, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            continue
        if tool.name is None:
            raise RequestError(f"tools[{i}]: name is missing; name the function")
        function = {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.parameters or {"type": "object", "properties": {}},
        }
        tools.append({"type": "function", "function": function})
    return tools


def tool_choice_of(
    body: schema.InputBody,
) -> tuple[Literal["auto", "none", "required"], str | None, list[str] | None]:
    """``tool_choice``, ``tool_name`` and ``allowed_tools`` of a `ChatRequest`.

    Raises:
        RequestError: What it names is not a function.
    """
    chosen = body.tool_choice
    if chosen is None or isinstance(chosen, str):
        return chosen or "auto", None, None
    if chosen.type == "allowed_tools":
        names = [tool.name for tool in chosen.tools or () if tool.type == "function"]
        if chosen.mode is None or not names or None in names:
            raise RequestError(
                "tool_choice of type allowed_tools has no mode, or tools without a name; send "
                '"mode": "auto" or "required", and "tools": [{"type": "function", "name": ...}]',
                parameter="tool_choice",
            )
        return chosen.mode, None, [name for name in names if name is not None]
    if chosen.type != "function" or chosen.name is None:
        raise RequestError(
            f"tool_choice is of type {chosen.type!r}; name a function, or send none, auto or "
            "required",
            parameter="tool_choice",
        )
    return "required", chosen.name, None


def schema_of(body: schema.InputBody) -> Object | None:
    """The schema that the text has to follow, None for any text.

    Raises:
        RequestError: It is missing.
    """
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.schema is None:
        raise RequestError("text.format has no schema; send one, or type json_object")
    return form.schema


def template_options_of(body: schema.InputBody) -> Object:
    """Variables of the template, such as ``reasoning_effort``."""
    effort = None if body.reasoning is None else body.reasoning.effort
    return options_of_effort(body.chat_template_kwargs, effort)


def prompt_of(body: schema.InputBody) -> ChatRequest:
    """The prompt that *body* asks for.

    Raises:
        RequestError: It needs kept responses, or a part of it cannot work.
    """
    check_stateless(body)
    choice, name, allowed = tool_choice_of(body)
    messages, documents = with_documents(messages_of(body), body.documents or ())
    return ChatRequest(
        messages=messages,
        documents=documents,
        tools=tools_of(body),
        tool_choice=choice,
        tool_name=name,
        allowed_tools=allowed,
        parallel_calls=body.parallel_tool_calls is not False and name is None,
        schema=schema_of(body),
        template_options=template_options_of(body),
        names={"messages": "input", "json_schema": "text.format"},
    )


def chat_of(body: schema.ResponsesBody) -> ChatRequest:
    """What *body* asks for; errors as of `prompt_of`."""
    n_top = body.top_logprobs or 0
    if not 0 <= n_top <= _MOST_TOP:
        raise RequestError(f"top_logprobs is {n_top}, allowed are 0 to {_MOST_TOP}")
    n_logprobs = n_top if LOGPROBS in (body.include or ()) else None
    chat = prompt_of(body)
    names = {**chat.names, "top_logprobs": "top_logprobs"}
    if body.max_output_tokens is not None:
        names["max_tokens"] = "max_output_tokens"
    return replace(chat, top_logprobs=n_logprobs, max_tokens=body.max_output_tokens, names=names)


LOGPROBS: Final = "message.output_text.logprobs"
"""What ``include`` has if logprobs are wanted."""
