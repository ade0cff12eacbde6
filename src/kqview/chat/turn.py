"""Turn: what the next answer of a chat may be, and how it is taken apart.

Tools, the choice among them, a JSON schema and the reasoning of a model decide what an answer has
to look like; `constrained` makes sampling options of it, and a `Reading` says how to read it: an
`AnswerReader` takes the text of one answer as it comes.
Shared by `Engine.chat` and every API of the server. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, TypedDict, cast

from kqview import json_input
from kqview.chat import formats, tool_format
from kqview.chat.reasoning import THINK_TAGS, Piece, Split, TokenCounter, split_of
from kqview.chat.tool_format import CallDelta, CallReader, Format, Reasoning, Tool, Wanted
from kqview.errors import InvalidSampling, RequestError, shown
from kqview.stop_strings import ShownText
from kqview.types import ModelInfo, Sampling
from kqview.types.reply import Reply, ToolCall

N_END: Final = 32
"""Tokens at the end of a prompt that may hold the opening mark of reasoning."""


# ---- tools


class NamedFunction(TypedDict):
    """The function of a `NamedTool`."""

    name: str


class NamedTool(TypedDict):
    """The one function to call, as OpenAI's ``tool_choice`` names it."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["auto", "none", "required"] | str | NamedTool
"""Whether functions may be called: "required" asks for a call, a name or NamedTool for that one."""


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
        name = tool_format.object_of(given.get("function", given)).get("name")
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
        function = tool_format.object_of(tool.get("function"))
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
    return tool_format.text_of(messages[-1].get("content"))


def reasoning_of(source: str, end: str, opened: str | None) -> Reasoning:
    """The reasoning of a model with this chat template, after a prompt with this *end*."""
    if opened is not None:
        return Reasoning("open", opened)
    is_closed = end.rstrip().endswith(tuple(THINK_TAGS.values()))
    tag = next((tag for tag in THINK_TAGS if tag in source or THINK_TAGS[tag] in source), None)
    return Reasoning() if is_closed or tag is None else Reasoning("may", tag)


# ---- what an answer has to be


def constrained(
    sampling: Sampling,
    *,
    choice: Choice,
    schema: Mapping[str, Any] | str | None,
    form: Format,
    reasoning: Reasoning,
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
        answer = ChatAnswer()
        answer.add(AnswerReader(self).finish(text))
        return answer

    def reply(self, text: str) -> Reply:
        """The same as a Reply, without a call that was cut off."""
        answer = self.answer(text)
        calls = [call for one in answer.calls if (call := _call_of(one)) is not None]
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


def _call_of(call: WrittenCall) -> ToolCall | None:
    """*call* as callers get it; None if it was cut off."""
    try:
        arguments: object = json_input.loads(call.arguments) if call.arguments.strip() else {}
    except ValueError:
        return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(call.name, cast("dict[str, Any]", arguments), call.id)
