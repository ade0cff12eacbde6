"""Chat: what every dialect with messages shares, from the request to the pieces of the answer.

`prepare` turns a neutral `ChatRequest` into a `ChatWork`: the request for the service, and how its
answer is read (`kqview.chat.turn.Reading`). Nothing here knows a protocol.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from kqview.chat import CHATML, formats, tool_format
from kqview.chat.reasoning import Split, opened_by
from kqview.chat.tool_format import Reasoning, Tool
from kqview.chat.turn import (
    N_END,
    AnswerReader,
    Call,
    Choice,
    Delta,
    Reading,
    chosen_tools,
    constrained,
    continued,
    reading_of,
    reasoning_of,
    template_for,
)
from kqview.engine import Engine
from kqview.errors import RequestError
from kqview.mods.events import Dialogue
from kqview.server.api.wire.mods_field import calls_of, removed
from kqview.server.api.wire.reasoning_cap import cap_of
from kqview.server.errors import renamed
from kqview.server.models.request import AttentionWanted, GenerateRequest
from kqview.server.models.run import Removal, Run
from kqview.server.settings import ReasoningFormat
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
    reading: Reading


def prepare(engine: Engine, chat: ChatRequest) -> ChatWork:
    """Render *chat* as a prompt, and constrain the answer if it has to be a call or JSON.

    Any thread; a template may take seconds, so not the event loop's (`Service.converted`).

    Raises:
        RequestError: A message or a tool is malformed, tools and a grammar exclude each other, or
            as `Engine.apply_chat_template`.
    """
    ids, begun, source, tools = _prompt(engine, chat)
    # What the answer continues decides whether it begins inside of reasoning.
    end = engine.detokenize(ids[-N_END:]) if ids else ""
    opened = opened_by(end, begun)
    reading = reading_of(source, opened, tools)
    split = reading.split
    is_harmony = split.mode == "harmony"
    if chat.split is not None:
        split = chat.split(source, end, split)
    sampling, names, may_reason = chat.sampling, dict(chat.names), True
    if tools or chat.schema is not None:
        reasoning = reasoning_of(source, end, opened)
        sampling = _constrained(engine, chat, source, tools, reasoning)
        if sampling.grammar is not chat.sampling.grammar:
            names["grammar"] = "tools" if tools else names.get("json_schema", "response_format")
        # A grammar that is not the client's own allows reasoning and its marks, or has none of it.
        may_reason = sampling is chat.sampling or is_harmony or reasoning.how != "no"
    dialogue = Dialogue(chat.messages, tools or None) if chat.options.get("mods") else None
    forcing = None
    max_tokens = WHOLE_CONTEXT if chat.max_tokens is None else chat.max_tokens
    if may_reason and chat.reasoning_budget is not None:
        most = max_tokens if chat.options.get("context_shift") else min(max_tokens, engine.n_ctx)
        forcing = cap_of(
            chat.reasoning_budget, split, chat.sampling, max_tokens=most, names=chat.names
        )
    request = GenerateRequest(
        prompt=ids,
        max_tokens=max_tokens,
        sampling=sampling,
        request_id=chat.request_id,
        attention=chat.attention,
        n_samples=chat.n_samples,
        names=names,
        dialogue=dialogue,
        forcing=forcing,
        **chat.options,
    )
    stops = (sampling.stop,) if isinstance(sampling.stop, str) else tuple(sampling.stop)
    if chat.reasoning == "none" and not (is_harmony and tools):
        split = Split(mode="none")
    return ChatWork(request, replace(reading, split=split, stops=stops))


def _constrained(
    engine: Engine, chat: ChatRequest, source: str, tools: list[Tool], reasoning: Reasoning
) -> Sampling:
    native = formats.format_of(source)
    # A template that has no place for tools shows them in Hermes' format.
    form = native if tool_format.knows_tools(source) or native == "harmony" else "hermes"
    try:
        return constrained(
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


def prompt_of(engine: Engine, chat: ChatRequest) -> tuple[list[int], str]:
    """Ids of the prompt, and the text of the answer that it already begins; any thread.

    Raises:
        RequestError: As `prepare`.
    """
    prompt = _prompt(engine, chat)
    return prompt.ids, prompt.begun


class _Prompt(NamedTuple):
    """A rendered chat, with its template and the tools that may be called."""

    ids: list[int]
    begun: str
    source: str
    tools: list[Tool]


def _prompt(engine: Engine, chat: ChatRequest) -> _Prompt:
    messages: list[Any] = list(chat.messages)
    try:
        tools = offered = _tools(chat)
        source = chat.chat_template
        if source is None:
            source = template_for(engine.model, has_tools=bool(tools)) or CHATML
        is_of_tools = bool(tools)
        for i, message in enumerate(messages):
            if not isinstance(content := message.get("content"), str):
                _check_is_text(i, content)
            is_of_tools |= message.get("role") in ("tool", "function")
            is_of_tools |= bool(message.get("tool_calls"))
        begun = continued(messages, chat.continues)
        if is_of_tools and not tool_format.knows_tools(source):
            messages, offered = tool_format.tools_as_text(messages, tools), []
        ids = engine.apply_chat_template(
            messages,
            tools=offered or None,
            add_generation_prompt=chat.adds_generation_prompt,
            continue_final_message=begun is not None,
            chat_template=source,
            template_options=chat.template_options or None,
        )
    except RequestError as error:
        names = {"template_options": "chat_template_kwargs", **chat.names}
        raise renamed(error, names) from None
    return _Prompt(ids, begun or "", source, tools)


def _check_is_text(i: int, content: object) -> None:
    for j, part in enumerate(tool_format.objects_of(content)):
        kind = part.get("type")
        if kind in ("image_url", "image", "input_image", "input_audio", "file", "input_file"):
            raise RequestError(
                f"messages[{i}].content[{j}] is of type {kind}, and this model reads text only; "
                "send parts of type text",
                parameter="messages",
            )


def _tools(chat: ChatRequest) -> list[Tool]:
    """The tools that may be called."""
    if chat.tool_choice == "none":
        return []
    allowed = chat.allowed_tools if chat.tool_name is None else [chat.tool_name]
    needs_call = chat.tool_choice == "required"
    if not (chat.tools or needs_call or allowed):
        return []
    return chosen_tools(chat.tools, needs_call=needs_call, allowed=allowed)


# ---- answers


@dataclass(frozen=True, slots=True)
class TakenBack:
    """What is left of an answer of which mods took tokens back.

    Attributes:
        reader: Reads on.
        removed: What the client is to drop, in the form of ``removed``.
        deltas: What is left. The client has all of it but the calls, which are to be sent again.
    """

    reader: AnswerReader
    removed: dict[str, Any]
    deltas: list[Delta]


def taken_back(reader: AnswerReader, removal: Removal) -> TakenBack:
    """Mods took tokens back: a reader of what is left, and what the client is to hear."""
    left = AnswerReader(reader.reading)
    deltas = [delta for text in removal.texts for delta in left.feed(text)]
    lost = removed(removal, reader.n_content - left.n_content)
    if n := reader.n_reasoning - left.n_reasoning:
        lost["reasoning_characters"] = n
    if reader.n_calls:  # calls cannot be shortened: all of them are sent again
        lost["tool_calls"] = reader.n_calls
    return TakenBack(left, lost, deltas)


def mod_calls(reader: AnswerReader, payload: object) -> list[Delta]:
    """A mod ended the answer with these calls."""
    return reader.call(
        Call(one.id, one.function.name, one.function.arguments) for one in calls_of(payload)
    )


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
