"""Anthropic's requests as neutral chat requests. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final, Literal

from kqview.chat.parts import object_of
from kqview.errors import RequestError
from kqview.server.api.anthropic import schema
from kqview.server.api.anthropic.schema import Object
from kqview.server.api.wire.chat import ChatRequest, content_of
from kqview.server.api.wire.citations import Document, shown_document
from kqview.server.api.wire.fields import most_tokens_of


def messages_of(body: schema.CountBody) -> list[Object]:
    """The conversation as messages for a chat template; the system prompt is the first one.

    Raises:
        RequestError: A block is of a kind that cannot be read.
    """
    messages: list[Object] = []
    if body.system:
        messages.append({"role": "system", "content": _content("system", body.system)})
    for i, message in enumerate(body.messages):
        messages += _messages(f"messages[{i}]", message)
    return messages


def _messages(where: str, message: schema.InputMessage) -> list[Object]:
    where += ".content"
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[schema.Block] = []
    thoughts: list[str] = []
    calls: list[Object] = []
    results: list[Object] = []
    for i, block in enumerate(message.content):
        match block.type:
            case "thinking":
                thoughts.append(block.thinking)
            case "redacted_thinking":
                pass  # only Anthropic can read it
            case "tool_use":
                calls.append(_call(f"{where}[{i}]", block))
            case "tool_result":
                content = _content(f"{where}[{i}].content", block.content or "")
                results.append(
                    {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
                )
            case _:
                texts.append(_text(f"{where}[{i}]", block))
    turn: Object = {"role": message.role, "content": _content(where, texts)}
    if thoughts:
        turn["reasoning_content"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    # Templates expect results directly after the calls.
    return results if results and len(turn) == 2 and not texts else [*results, turn]


def _call(where: str, block: schema.Block) -> Object:
    if not block.name:
        raise RequestError(f"{where}: name is missing; name the tool that was called")
    function = {"name": block.name, "arguments": block.input}
    return {"id": block.id, "type": "function", "function": function}


def _content(where: str, content: str | Sequence[schema.Block]) -> str | list[Object]:
    """Text, or text parts where there are several."""
    if isinstance(content, str):
        return content
    return content_of([_text(f"{where}[{i}]", block).text for i, block in enumerate(content)])


def _text(where: str, block: schema.Block) -> schema.Block:
    if block.type == "document":
        text = shown_document(_document(where, block, 0).text, block.title, block.context)
        return schema.Block(type="text", text=text)
    if block.type != "text":
        raise RequestError(f"{where}: type is {block.type!r}, but the model reads text only")
    return block


def _document(where: str, block: schema.Block, index: int) -> Document:
    source, title = block.source, block.title or ""
    if source is None or source.type not in ("text", "content"):
        kind = "nothing" if source is None else repr(source.type)
        raise RequestError(
            f"{where}: the source of the document is {kind}; the model reads text only, send a "
            "source of type text or content"
        )
    if source.type == "text":
        texts = [source.data]
    elif isinstance(source.content, str):
        texts = [source.content]
    else:
        blocks = enumerate(source.content or ())
        texts = [_text(f"{where}.source.content[{i}]", one).text for i, one in blocks]
    if not texts or not all(map(str.strip, texts)):
        raise RequestError(f"{where}: the document has an empty text; leave it out")
    if source.type == "text":
        return Document(texts[0], title, index=index)
    ends = [*accumulate(len(one) + 1 for one in texts)]  # with the line end behind each
    places = [(end - 1 - len(one), end - 1) for end, one in zip(ends, texts, strict=True)]
    return Document("\n".join(texts), title, index=index, blocks=places)


def documents_of(body: schema.CountBody) -> list[Document]:
    """Documents of the user that may be cited, in their order.

    Raises:
        RequestError: One is no text.
    """
    blocks = [
        (f"messages[{i}].content[{j}]", block)
        for i, message in enumerate(body.messages)
        if not isinstance(message.content, str)
        for j, block in enumerate(message.content)
        if block.type == "document"
    ]
    return [
        _document(where, block, i)
        for i, (where, block) in enumerate(blocks)
        if object_of(block.citations).get("enabled") is True
    ]


def tools_of(body: schema.CountBody) -> list[Object]:
    """Tools as functions for a chat template; those that Anthropic's servers run are left out."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            },
        }
        for tool in body.tools or ()
        if tool.input_schema is not None
    ]


def template_options_of(body: schema.CountBody) -> Object:
    """Variables of the template, such as ``enable_thinking`` and ``reasoning_effort``."""
    options = dict(body.chat_template_kwargs or {})
    if body.thinking is not None and body.thinking.type in ("enabled", "disabled"):
        options.setdefault("enable_thinking", body.thinking.type == "enabled")
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None:
        options.setdefault("reasoning_effort", _EFFORTS.get(effort, effort))
    return options


# Templates know three.
_EFFORTS: Final[Mapping[str, str]] = {"xhigh": "high", "max": "high"}


def prompt_of(body: schema.CountBody) -> ChatRequest:
    """The prompt that *body* asks for.

    Raises:
        RequestError: A message, a tool or the choice of tools cannot work.
    """
    chosen, form, thinking = body.tool_choice, body.output_config, body.thinking
    kind, name = "auto", None
    if chosen is not None:
        if chosen.type == "tool" and not chosen.name:
            raise RequestError("tool_choice has no name; name one of the tools, or send type any")
        name = chosen.name if chosen.type == "tool" else None
        kind = chosen.type
    return ChatRequest(
        messages=messages_of(body),
        tools=tools_of(body),
        tool_choice=_CHOICES[kind],
        tool_name=name,
        parallel_calls=name is None and not (chosen and chosen.disable_parallel_tool_use),
        schema=form.format.schema if form and form.format else None,
        template_options=template_options_of(body),
        reasoning_budget=(
            thinking.budget_tokens if thinking and thinking.type == "enabled" else None
        ),
    )


_CHOICES: Final[Mapping[str, Literal["auto", "none", "required"]]] = {
    "auto": "auto", "none": "none", "any": "required", "tool": "required",
}  # fmt: skip


def chat_of(body: schema.MessagesBody) -> ChatRequest:
    """What *body* asks for; errors as of `prompt_of`."""
    names = {"stop": "stop_sequences", "json_schema": "output_config.format"}
    if most_tokens_of(body, "reasoning_budget") is None:
        names["reasoning_budget"] = "thinking.budget_tokens"
    chat = prompt_of(body)
    return replace(chat, documents=documents_of(body), stop=body.stop_sequences, names=names)
