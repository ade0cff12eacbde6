"""Turn: what a chat has so far, what its next answer may be, and how that is taken apart.

Messages and tools are checked before a template sees them. A message is a mapping in the format of
OpenAI's chat API and of transformers: ``role``, ``content`` and, for tools, ``tool_calls``,
``tool_call_id`` and ``name``. Other keys are passed on to the template. Checking copies everything
to plain dicts, lists and scalars, so that a template can neither modify nor call anything that
belongs to the caller.

Tools, the choice among them, a JSON schema and the reasoning of a model decide what an answer has
to look like; `constrained` makes sampling options of it, and a `Reading` says how to read it: an
`AnswerReader` takes the text of one answer as it comes.
Shared by `Engine.chat` and every API of the server. Pure.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, TypedDict, cast

from kqview import json_input
from kqview.arguments import invalid
from kqview.chat import formats, tool_format
from kqview.chat.functions import ToolLike, tool_of
from kqview.chat.parts import ROLES, object_of, objects_of, text_of
from kqview.chat.reasoning import THINK_TAGS, Piece, Split, TokenCounter, split_of
from kqview.chat.tool_format import (
    CALL_CLOSE,
    CALL_OPEN,
    CallDelta,
    CallReader,
    Format,
    ReasoningStart,
    Tool,
    Wanted,
)
from kqview.errors import InvalidSampling, RequestError, shown
from kqview.stop_strings import ShownText
from kqview.types import ModelInfo, Sampling
from kqview.types.reply import Reply, ToolCall

N_END: Final = 32
"""Tokens at the end of a prompt that may hold the opening mark of reasoning."""


# ---- messages

Message = Mapping[str, Any]

_ROLE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_RESULTS: Final = ("tool", "function")


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
    elif "content" not in message or (message["content"] is None and role != "assistant"):
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
        given: Any = function.setdefault("arguments", {})
        if isinstance(given, str):
            try:
                function["arguments"] = json_input.loads(given) if given.strip() else {}
            except json_input.TooDeep as error:
                raise RequestError(f"{where}[{i}]: arguments cannot be read: {error}") from None
            except ValueError:
                raise RequestError(
                    f"{where}[{i}]: arguments is {shown(given)}; pass an object or JSON text"
                ) from None
        calls[i] = {**fields, "function": function} if "function" in fields else function
    return calls


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
    if all(isinstance(key, str) and isinstance(item, str) for key, item in given.items()):
        texts = cast("Mapping[str, str]", given)  # with nothing in them to look at
        return {str(key): str.__str__(item) for key, item in texts.items()}
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


def tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolLike]
) -> list[dict[str, Any]]:
    """*messages* for a template that knows no tools: tools, calls and results are text.

    Calls are described in the form of Hermes, which `parse_tool_calls` reads.

    Args:
        messages: Of the chat.
        tools: To describe at the end of the system message, which is made if there is none.
    """
    shown: list[dict[str, Any]] = []
    for message in messages:
        made = _as_text(message)
        is_result = message.get("role") in _RESULTS
        if is_result and shown and shown[-1].get("role") == made["role"]:
            # Some templates want the roles to take turns.
            shown[-1] = {**shown[-1], "content": f"{shown[-1]['content']}\n{made['content']}"}
        else:
            shown.append(made)
    if not tools:
        return shown
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in checked_tools(tools) or ())
    text = (
        "You may call these functions to answer. Each line describes one as JSON:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, write its name and arguments as JSON, like this:\n"
        f'{CALL_OPEN}\n{{"name": "NAME", "arguments": {{...}}}}\n{CALL_CLOSE}'
    )
    first = shown[0] if shown else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": text}, *shown]
    return [{**first, "content": f"{text_of(first.get('content'))}\n\n{text}"}, *shown[1:]]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role in _RESULTS:
        content = f"<tool_response>\n{text_of(message.get('content'))}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = objects_of(message.get("tool_calls"))
    if role != "assistant" or not calls:
        return dict(message)
    texts = [text_of(message.get("content"))]
    for call in calls:
        function = object_of(call.get("function", call))
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function.get("name"), ensure_ascii=False)
        texts.append(f'{CALL_OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{CALL_CLOSE}')
    return {"role": "assistant", "content": "\n".join(text for text in texts if text)}


# ---- tools


class NamedFunction(TypedDict):
    """The function of a `NamedToolChoice`."""

    name: str


class NamedToolChoice(TypedDict):
    """The one function to call, as OpenAI's ``tool_choice`` names it."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["auto", "none", "required"] | str | NamedToolChoice
"""Whether functions may be called: "required" asks for a call, a name for a call of that one."""


class Choice(NamedTuple):
    """Which of the tools may be called.

    Attributes:
        tools: These.
        needs_call: Whether one has to be.
        is_named: Whether the caller named the one.
    """

    tools: list[Tool]
    needs_call: bool
    is_named: bool


def choice_of(tools: Sequence[Tool], tool_choice: object) -> Choice:
    """The choice among *tools* in the terms of OpenAI's ``tool_choice``, None for "auto".

    The name of a tool alone is one too, unless it is one of OpenAI's words.

    Raises:
        RequestError: It is none of them, or names a function that is not among *tools*.
    """
    if tool_choice is None or (isinstance(tool_choice, str) and tool_choice in _CHOICES):
        needs_call = tool_choice == "required"
        chosen = [] if tool_choice == "none" else chosen_tools(tools, needs_call=needs_call)
        return Choice(chosen, needs_call, is_named=False)
    name, got = tool_choice, shown(tool_choice)
    if isinstance(tool_choice, Mapping):
        given = cast("Mapping[str, object]", tool_choice)
        name = object_of(given.get("function", given)).get("name")
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice is {got}; pass 'auto', 'none', 'required', the name of a tool or "
            '{"type": "function", "function": {"name": "..."}}',
            parameter="tool_choice",
        )
    return Choice(chosen_tools(tools, needs_call=True, allowed=[name]), True, is_named=True)


_CHOICES: Final = ("auto", "none", "required")
_LISTED: Final = 500  # characters of names in a message


def chosen_tools(
    tools: Sequence[Tool], *, needs_call: bool, allowed: Sequence[str] | None = None
) -> list[Tool]:
    """Those of *tools* that may be called.

    Args:
        tools: In the form of OpenAI's API.
        needs_call: Whether one has to be.
        allowed: Names of the only ones that may be, None for all.

    Raises:
        RequestError: A tool is malformed, or there is none to choose.
    """
    for i, tool in enumerate(tools):
        function = object_of(tool.get("function"))
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(
                f"tools[{i}] has no function with a name; send "
                '{"type": "function", "function": {"name": ..., "parameters": {...}}}',
                parameter="tools",
            )
        if not isinstance(function.get("parameters"), dict | None):
            raise RequestError(
                f"tools[{i}]: parameters is not an object; send a JSON schema", parameter="tools"
            )
    if needs_call and not tools:
        raise RequestError(
            "tool_choice asks for a call, but there are no tools; send some",
            parameter="tool_choice",
        )
    if allowed is None:
        return list(tools)
    known = [tool["function"]["name"] for tool in tools]
    for name in allowed:
        if name not in known:
            raise RequestError(
                f"tool_choice names {shown(name)}, which is not among the tools; name one of "
                f"{', '.join(known)[:_LISTED]}",
                parameter="tool_choice",
            )
    return [tool for tool in tools if tool["function"]["name"] in allowed]


# ---- prompts


def template_for(model: ModelInfo, *, has_tools: bool) -> str | None:
    """The template of *model* for a chat; files of some models have one more for tools."""
    own, metadata = model.chat_template, model.metadata
    named = metadata.get("tokenizer.chat_template.tool_use")
    is_own = own == metadata.get("tokenizer.chat_template")
    return named if named and is_own and (has_tools or own is None) else own


def continued(messages: Sequence[Mapping[str, Any]], wanted: bool | None = True) -> str | None:
    """Text of the last message if the answer continues it, None if it does not.

    Args:
        messages: Of the chat.
        wanted: Whether it does; None if the last message is the assistant's.

    Raises:
        RequestError: It cannot be continued.
    """
    is_answer = bool(messages) and messages[-1].get("role") == "assistant"
    if not (is_answer if wanted is None else wanted):
        return None
    if not is_answer:
        raise RequestError(
            "continue_final_message needs a last message of the assistant; add one, or leave it "
            "out",
            parameter="continue_final_message",
        )
    if messages[-1].get("tool_calls"):
        if wanted is None:
            return None
        raise RequestError(
            "an assistant's message with tool calls cannot be continued; end with another message",
            parameter="continue_final_message",
        )
    if len(messages) == 1:
        raise RequestError(
            "messages has a message of the assistant alone, which answers nothing; put the user's "
            "before it",
            parameter="messages",
        )
    if messages[-2].get("role") == "assistant":
        raise RequestError(
            "the last two messages are the assistant's; join them, or end with the user's"
        )
    return text_of(messages[-1].get("content"))


def opened_by(prompt_end: str, begun: str = "") -> str | None:
    """The mark of reasoning inside of which an answer begins, None if it does not.

    Args:
        prompt_end: Text at the end of the prompt.
        begun: Text of the answer that the prompt already has.
    """
    if begun:
        tags = (tag for tag, close in THINK_TAGS.items() if begun.rfind(tag) > begun.rfind(close))
        return next(tags, None)
    end = prompt_end.rstrip()
    return next((tag for tag in THINK_TAGS if end.endswith(tag)), None)


def reasoning_of(source: str, end: str, opened: str | None) -> ReasoningStart:
    """The reasoning of a model with this chat template, after a prompt with this *end*."""
    if opened is not None:
        return ReasoningStart("open", opened)
    is_closed = end.rstrip().endswith(tuple(THINK_TAGS.values()))
    tag = next((tag for tag in THINK_TAGS if tag in source or THINK_TAGS[tag] in source), None)
    return ReasoningStart() if is_closed or tag is None else ReasoningStart("may", tag)


# ---- what an answer has to be


def constrained(
    sampling: Sampling,
    *,
    choice: Choice,
    schema: Mapping[str, Any] | str | None,
    form: Format,
    reasoning: ReasoningStart,
    is_parallel: bool,
    mark: tool_format.Mark,
) -> Sampling:
    """*sampling* with a grammar if the answer has to be a call or JSON.

    Args:
        sampling: Its ``json_schema`` is not set.
        choice: The tools that may be called.
        schema: JSON schema of an answer without calls; None for any text.
        form: How calls are written.
        reasoning: What may precede the answer.
        is_parallel: Whether there may be several calls.
        mark: How a grammar says the text of a mark.

    Raises:
        InvalidSampling: *sampling* has a constraint of its own, or there are both a schema and a
            call that has to be made.
    """
    has_tools = bool(choice.tools)
    own = "grammar" if sampling.grammar is not None else "regex"
    if getattr(sampling, own) is not None and (has_tools or schema is not None):
        what = "tools" if has_tools else "a JSON schema"
        raise InvalidSampling(
            f"{own} cannot be combined with {what}; send one of them", parameter=own
        )
    needs_call = has_tools and choice.needs_call
    if needs_call and schema is not None:
        raise InvalidSampling(
            "json_schema cannot be combined with a tool_choice that asks for a call: no text of "
            "the answer could follow it; send one of them",
            parameter="json_schema",
        )
    if not needs_call and schema is None:
        return sampling
    if not has_tools and reasoning.how == "no" and not formats.FORMATS[form].answer:
        return replace(sampling, json_schema=schema)
    wanted = Wanted(
        calls=choice.tools,
        is_parallel=is_parallel and not choice.is_named,
        schema=schema,
        reasoning=reasoning,
    )
    return replace(sampling, grammar=tool_format.grammar(wanted, form, mark))


# ---- answers


@dataclass(frozen=True, slots=True)
class Delta:
    """What came next in an answer; exactly one of the three is set."""

    reasoning: str = ""
    content: str = ""
    call: CallDelta | None = None


@dataclass(slots=True)
class WrittenCall:
    """A tool call of an answer; ``arguments`` is JSON, incomplete if the answer was cut off."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChatAnswer:
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[WrittenCall] = field(default_factory=list[WrittenCall])

    def add(self, deltas: Iterable[Delta]) -> None:
        """Append *deltas*."""
        for delta in deltas:
            self.reasoning += delta.reasoning
            self.content += delta.content
            if delta.call is None:
                continue
            if delta.call.id is not None:
                self.calls.append(WrittenCall(delta.call.id, delta.call.name or ""))
            self.calls[-1].arguments += delta.call.arguments


@dataclass(frozen=True, slots=True)
class Reading:
    """How an answer is read.

    Attributes:
        split: How it marks its reasoning.
        calls: Format of its calls, None if there are no tools.
        stops: Sequences that end it.
        texts: Parameters of each function that are text, as `tool_format.text_parameters`.
    """

    split: Split = field(default_factory=Split)
    calls: Format | None = None
    stops: tuple[str, ...] = ()
    texts: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])

    def answer(self, text: str) -> ChatAnswer:
        """The answer with this whole text, without its stop sequence."""
        if self.calls is None and not any(mark in text for mark in self.split.marks):
            return ChatAnswer(content=text)
        answer = ChatAnswer()
        answer.add(AnswerReader(self).finish(text))
        return answer

    def reply(self, text: str) -> Reply:
        """The same as a Reply, without a call that was cut off."""
        answer = self.answer(text)
        calls: list[ToolCall] = []
        for one in answer.calls:
            with contextlib.suppress(ValueError):
                arguments: object = json_input.loads(one.arguments) if one.arguments.strip() else {}
                if isinstance(arguments, dict):
                    calls.append(ToolCall(one.name, cast("dict[str, Any]", arguments), one.id))
        return Reply(answer.content, tuple(calls), answer.reasoning)


def reading_of(source: str, opened: str | None, tools: Sequence[Tool]) -> Reading:
    """How an answer is read that a model with this chat template gives.

    Args:
        source: The template.
        opened: The mark of reasoning inside of which the answer begins, None if it does not.
        tools: Those that may be called.
    """
    split = split_of(source, opened, may_call=bool(tools))
    if not tools:
        return Reading(split)
    texts = tool_format.text_parameters(tools)
    return Reading(split, formats.format_of(source), texts=texts)


class AnswerReader:
    """Reads one answer's text while it comes: reasoning, content and calls, without marks.

    Attributes:
        reading: How.
        tokens: How many tokens of each kind there are, whole after `finish`.
        has_calls: Whether there are tool calls so far.
        n_content: Characters of content that were returned so far.
        n_reasoning: The same of reasoning.
        n_calls: Calls of which some was returned.
    """

    def __init__(self, reading: Reading) -> None:
        """Begin an answer."""
        split = reading.split
        self.reading = reading
        self.tokens = TokenCounter()
        self.has_calls = False
        self.n_content = self.n_reasoning = self.n_calls = 0
        self._splitter = split.splitter()
        self._shown = ShownText(reading.stops)
        # A call in a channel of its own needs no tools to be one.
        has_channels = split.mode == "harmony" and not split.has_recipients
        form = "harmony" if has_channels else reading.calls
        self._calls = CallReader(form, reading.texts) if form is not None else None

    def feed(self, text: str) -> list[Delta]:
        """Add the text of a token; returns what is certain."""
        self.tokens.add(text)
        return self._deltas(self._splitter.feed(self._shown.feed(text)))

    def finish(self, text: str) -> list[Delta]:
        """End the answer, whose whole text without the stop sequence is *text*."""
        pieces = self._splitter.feed(self._shown.rest(text)) + self._splitter.flush()
        deltas = self._deltas(pieces)
        if self._calls is not None:
            deltas += self._of_calls(self._calls.flush())
        self.tokens.end()
        return deltas

    def call(self, calls: Iterable[WrittenCall]) -> list[Delta]:
        """The answer ends with these calls, which are no part of its text."""
        return self._of_calls(
            CallDelta(i, one.arguments, id=one.id, name=one.name)
            for i, one in enumerate(calls, self.n_calls)
        )

    def _deltas(self, pieces: list[Piece]) -> list[Delta]:
        self.tokens.classify(pieces)
        deltas: list[Delta] = []
        for piece in pieces:
            if self._calls is not None and piece.kind != "call":
                deltas += self._of_calls(self._calls.end_channel())
            if piece.kind == "mark":
                continue
            if piece.kind == "reasoning":
                self.n_reasoning += len(piece.text)
                deltas.append(Delta(reasoning=piece.text))
            elif self._calls is None:
                self.n_content += len(piece.text)
                deltas.append(Delta(content=piece.text))
            elif piece.kind == "call":
                deltas += self._of_calls(self._calls.channel(piece.text, piece.name))
            else:
                deltas += self._of_calls(self._calls.feed(piece.text))
        return deltas

    def _of_calls(self, found: Iterable[str | CallDelta]) -> list[Delta]:
        """Text and pieces of calls, in which calls of the answer are apart from its content."""
        deltas: list[Delta] = []
        for one in found:
            if isinstance(one, str):
                self.n_content += len(one)
                deltas.append(Delta(content=one))
            else:
                self.has_calls = True
                self.n_calls += one.id is not None
                deltas.append(Delta(call=one))
        return deltas
