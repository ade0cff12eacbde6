"""Chat: what every dialect with messages shares, from the request to the pieces of the answer.

`prepare` turns a neutral `ChatRequest` into a `ChatWork`: the request for the service, and how its
answer is read. An `AnswerReader` takes the text of one sample as it comes and returns `Delta`s:
reasoning, content and tool calls, without stop sequences and marks. Nothing here knows a protocol.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

from kqview.chat import CHATML, formats, tool_format
from kqview.chat.reasoning import THINKING, Piece, Split, TokenCounter, split_of
from kqview.chat.tool_format import CallDelta, Format, Tool
from kqview.chat.turn import (
    N_END,
    Answer,
    Choice,
    Delta,
    Parts,
    chosen_tools,
    constrained,
    continued,
    opened_in,
    reasoning_of,
    template_for,
)
from kqview.engine import Engine
from kqview.errors import RequestError
from kqview.mods.events import Dialogue
from kqview.server.api.wire.mods_field import calls_of, removed
from kqview.server.api.wire.reasoning_cap import ReasoningCap, cap_of
from kqview.server.errors import renamed
from kqview.server.models.attention import AttentionWanted
from kqview.server.models.run import GenerateRequest, Removal, Run
from kqview.server.settings import ReasoningFormat
from kqview.stop_strings import ShownText
from kqview.types import Sampling

ChooseSplit = Callable[[str, str, Split], Split]
"""Given a chat template, the end of a prompt and how answers are split by these, how they are."""

WHOLE_CONTEXT: Final = 2**31 - 1
"""``max_tokens`` of a request that sets no limit; the server's settings and the context do."""

_STOPPED: Final = frozenset({"stop", "stop_token", "stop_sequence", "cancelled", "tool_calls"})


# ---- requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat as a dialect read it.

    Attributes:
        messages: In the form of OpenAI's chat API.
        sampling: How tokens are chosen; ``grammar`` is the client's own, ``json_schema`` unset.
        request_id: As in GenerateRequest.
        max_tokens: Most tokens to generate; None for as many as fit.
        tools: Functions, ``{"type": "function", "function": {"name": ..., "parameters": ...}}``.
        tool_choice: "required": at least one call; "none": tools are not shown.
        tool_name: The one function to call, with "required".
        allowed_tools: Names of the only functions that may be called, None for all; the others are
            not shown to the model.
        parallel_calls: Whether an answer may have several calls.
        schema: JSON schema of the answer, None for text.
        reasoning: "none" leaves reasoning in the content.
        reasoning_budget: Most tokens of reasoning, after which the answer begins; None for any
            number.
        split: Chooses how the answer is split, None for what the template says.
        template_options: Further variables of the template.
        chat_template: Instead of the model's own.
        adds_generation_prompt: Whether the prompt ends with the header of the answer.
        continues: Whether the last message, the assistant's, is continued; None if it is one.
        n_samples: Answers to generate.
        attention: As in GenerateRequest.
        names: As in GenerateRequest.
        options: Further fields of the GenerateRequest, such as ``slot``.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling: Sampling
    request_id: str
    max_tokens: int | None = None
    tools: Sequence[Tool] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str | None = None
    allowed_tools: Sequence[str] | None = None
    parallel_calls: bool = True
    schema: Mapping[str, Any] | None = None
    reasoning: ReasoningFormat = "auto"
    reasoning_budget: int | None = None
    split: ChooseSplit | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    chat_template: str | None = None
    adds_generation_prompt: bool = True
    continues: bool | None = None
    n_samples: int = 1
    attention: AttentionWanted | None = None
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class ChatWork:
    """A chat that is ready to run: the request for the service, and how to read its answer."""

    request: GenerateRequest
    reading: "Reading"


def prepare(engine: Engine, chat: ChatRequest) -> ChatWork:
    """Render *chat* as a prompt, and constrain the answer if it has to be a call or JSON.

    Any thread; a template may take seconds, so not the event loop's (`Service.converted`).

    Raises:
        RequestError: A message or a tool is malformed, tools and a grammar exclude each other, or
            as `Engine.apply_chat_template`.
    """
    source = _template_of(engine, chat)
    tools = _tools(chat)
    ids, begun = prompt_of(engine, chat)
    # What the answer continues decides whether it begins inside of reasoning.
    end = engine.detokenize(ids[-N_END:]) if ids else ""
    opened = opened_in(begun, end)
    native = formats.format_of(source)
    # A template that has no place for tools shows them in Hermes' format.
    form = native if tool_format.knows_tools(source) or native == "harmony" else "hermes"
    split = split_of(source, opened, may_call=bool(tools))
    is_harmony = split.mode == "harmony"
    if chat.split is not None:
        split = chat.split(source, end, split)
    reasoning = reasoning_of(source, end, opened)
    try:
        sampling = constrained(
            chat.sampling,
            choice=Choice(tools, chat.tool_choice == "required", chat.tool_name is not None),
            schema=chat.schema,
            form=form,
            reasoning=reasoning,
            is_parallel=chat.parallel_calls,
            mark=partial(tool_format.said, engine.control_tokens),
        )
    except RequestError as error:
        raise renamed(error, chat.names) from None
    names = dict(chat.names)
    if sampling.grammar is not chat.sampling.grammar:
        names["grammar"] = "tools" if tools else names.get("json_schema", "response_format")
    # A grammar that is not the client's own allows reasoning and its marks, or has none of it.
    may_reason = sampling is chat.sampling or is_harmony or reasoning.how != "no"
    dialogue = Dialogue(chat.messages, tools or None) if chat.options.get("mods") else None
    request = GenerateRequest(
        prompt=ids,
        max_tokens=WHOLE_CONTEXT if chat.max_tokens is None else chat.max_tokens,
        sampling=sampling,
        request_id=chat.request_id,
        attention=chat.attention,
        n_samples=chat.n_samples,
        names=names,
        dialogue=dialogue,
        forcing=_cap(engine, chat, split) if may_reason else None,
        **chat.options,
    )
    stops = (sampling.stop,) if isinstance(sampling.stop, str) else tuple(sampling.stop)
    texts = tool_format.text_parameters(tools)
    if chat.reasoning == "none" and not (is_harmony and tools):
        split = Split(mode="none")
    return ChatWork(request, Reading(split, native if tools else None, stops, texts))


def _cap(engine: Engine, chat: ChatRequest, split: Split) -> ReasoningCap | None:
    """The limit of the reasoning."""
    most = WHOLE_CONTEXT if chat.max_tokens is None else chat.max_tokens
    if not chat.options.get("context_shift"):
        most = min(most, engine.n_ctx)
    return cap_of(chat.reasoning_budget, split, chat.sampling, max_tokens=most, names=chat.names)


def _template_of(engine: Engine, chat: ChatRequest) -> str:
    """The template to use: that of the request, the model's own, or ChatML."""
    if chat.chat_template is not None:
        return chat.chat_template
    return template_for(engine.model, has_tools=bool(_tools(chat))) or CHATML


def prompt_of(engine: Engine, chat: ChatRequest) -> tuple[list[int], str]:
    """Ids of the prompt, and the text of the answer that it already begins; any thread.

    Raises:
        RequestError: As `prepare`.
    """
    try:
        return _prompt_of(engine, chat)
    except RequestError as error:
        names = {"template_options": "chat_template_kwargs", **chat.names}
        raise renamed(error, names) from None


def _prompt_of(engine: Engine, chat: ChatRequest) -> tuple[list[int], str]:
    source = _template_of(engine, chat)
    messages: list[Any] = list(chat.messages)
    for i, message in enumerate(messages):
        _check_is_text(i, message.get("content"))
    tools: Sequence[Tool] | None = _tools(chat) or None
    begun = continued(messages, chat.continues)
    render = partial(
        engine.apply_chat_template,
        add_generation_prompt=chat.adds_generation_prompt,
        continue_final_message=begun is not None,
        chat_template=source,
        template_options=chat.template_options,
    )
    if tool_format.knows_tools(source) or not (tools or any(map(_is_of_tools, messages))):
        ids = render(messages, tools=tools)
    else:
        ids = render(tool_format.tools_as_text(messages, tools or ()))
    return ids, begun or ""


def _check_is_text(i: int, content: object) -> None:
    for j, part in enumerate(tool_format.objects_of(content)):
        kind = part.get("type")
        if kind in ("image_url", "image", "input_image", "input_audio", "file", "input_file"):
            raise RequestError(
                f"messages[{i}].content[{j}] is of type {kind}, and this model reads text only; "
                "send parts of type text",
                parameter="messages",
            )


def _is_of_tools(message: Mapping[str, Any]) -> bool:
    return message.get("role") in ("tool", "function") or bool(message.get("tool_calls"))


def _tools(chat: ChatRequest) -> list[Tool]:
    """The tools that may be called."""
    if chat.tool_choice == "none":
        return []
    allowed = chat.allowed_tools if chat.tool_name is None else [chat.tool_name]
    return chosen_tools(chat.tools, needs_call=chat.tool_choice == "required", allowed=allowed)


# ---- answers


@dataclass(frozen=True, slots=True)
class Reading:
    """How an answer is read.

    Attributes:
        split: How it marks its reasoning.
        calls: Format of its calls, None if there are no tools.
        stops: Sequences that end it.
        texts: Parameters of each function that are text, as `tool_format.text_parameters`.
    """

    split: Split = THINKING
    calls: Format | None = None
    stops: tuple[str, ...] = ()
    texts: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])

    def reader(self) -> "AnswerReader":
        """A reader for one sample."""
        return AnswerReader(self)


@dataclass(frozen=True, slots=True)
class TakenBack:
    """What is left of an answer of which mods took tokens back.

    Attributes:
        reader: Reads on.
        removed: What the client is to drop, in the form of ``removed``.
        deltas: What is left. The client has all of it but the calls, which are to be sent again.
    """

    reader: "AnswerReader"
    removed: dict[str, Any]
    deltas: list[Delta]


class AnswerReader:
    """Reads one sample's text while it comes."""

    def __init__(self, reading: Reading) -> None:
        self._splitter = reading.split.splitter()
        self._parts = Parts(reading.split, reading.calls, reading.texts)
        self._shown = ShownText(reading.stops)
        self._n_content = self._n_reasoning = self._n_calls = 0  # returned so far
        self._reading = reading
        self.tokens = TokenCounter()
        """How many tokens of each kind there are, whole after `finish`."""

    @property
    def has_calls(self) -> bool:
        """Whether the answer has tool calls so far."""
        return self._parts.has_calls

    def feed(self, text: str) -> list[Delta]:
        """Add the text of a token; returns what is certain."""
        self.tokens.add(text)
        return self._counted(self._deltas(self._splitter.feed(self._shown.feed(text))))

    def take_back(self, removal: Removal) -> "TakenBack":
        """Mods took tokens back: a reader of what is left, and what the client is to hear."""
        reader = self._reading.reader()
        deltas = [delta for text in removal.texts for delta in reader.feed(text)]
        lost = removed(removal, self._n_content - reader._n_content)
        if n := self._n_reasoning - reader._n_reasoning:
            lost["reasoning_characters"] = n
        if self._n_calls:  # calls cannot be shortened: all of them are sent again
            lost["tool_calls"] = self._n_calls
        return TakenBack(reader, lost, deltas)

    def call(self, payload: object) -> list[Delta]:
        """A mod ended the answer with these calls."""
        calls = [
            CallDelta(self._n_calls + i, one.arguments, id=one.id, name=one.name)
            for i, one in enumerate(calls_of(payload))
        ]
        self._parts.has_calls = self.has_calls or bool(calls)
        return self._counted([Delta(call=one) for one in calls])

    def _counted(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            self._n_content += len(delta.content)
            self._n_reasoning += len(delta.reasoning)
            self._n_calls += delta.call is not None and delta.call.id is not None
        return deltas

    def finish(self, text: str) -> list[Delta]:
        """End the answer, whose whole text without the stop sequence is *text*."""
        pieces = self._splitter.feed(self._shown.rest(text)) + self._splitter.flush()
        deltas = self._deltas(pieces) + self._parts.flush()
        self.tokens.end()
        return self._counted(deltas)

    def _deltas(self, pieces: Sequence[Piece]) -> list[Delta]:
        self.tokens.classify(pieces)
        return self._parts.of(pieces)


def answer_of(reading: Reading, text: str) -> Answer:
    """The answer with this whole text, without its stop sequence."""
    answer = Answer()
    answer.add(reading.reader().finish(text))
    return answer


def finish_reason(
    reason: str | None, *, has_calls: bool
) -> Literal["stop", "length", "tool_calls"]:
    """Why an answer ended, from the reason of its generation, in OpenAI's words."""
    if reason is not None and reason not in _STOPPED:
        return "length"
    return "tool_calls" if has_calls or reason == "tool_calls" else "stop"


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of all samples of a run; each prompt counts once."""

    prompt: int
    cached: int
    completion: int

    @property
    def total(self) -> int:
        """Prompt and answers."""
        return self.prompt + self.completion


def counts_of(run: Run) -> TokenCounts:
    """Tokens of *run*, whole once it has ended."""
    prompts = [one.usage for one in run.generations[:: run.request.n_samples]]
    return TokenCounts(
        prompt=sum(usage.prompt_tokens for usage in prompts),
        cached=sum(usage.cached_tokens for usage in prompts),
        completion=sum(one.usage.completion_tokens for one in run.generations),
    )
