"""Chat: what every dialect with messages shares, from the request to the events of its answer.

A dialect makes a neutral `ChatRequest` of its body, and `with_fields` adds what the fields say that
all of them have. `prepare` turns it into a `ChatWork`: the request for the service, and how its
answer is read (`kqview.chat.turn.Reading`). An `AnswerWriter` is made of that and writes the
answer; `answered` does all of it for one request.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, Self, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.chat import CHATML, formats, tool_format, turn
from kqview.chat.parts import objects_of
from kqview.chat.reasoning import Split
from kqview.chat.tool_format import CallDelta, ReasoningStart, Tool
from kqview.chat.turn import AnswerReader, Delta, Reading
from kqview.engine import Engine
from kqview.errors import RequestError
from kqview.mods.events import Dialogue
from kqview.server.api.wire.attention import (
    ATTENTION_NAMES,
    AttentionWriter,
    ReplyLists,
    attention_of,
    event_pieces,
)
from kqview.server.api.wire.citations import (
    Cited,
    Citing,
    Document,
    Guards,
    Injection,
    Sources,
    guards_of,
    instruction_of,
)
from kqview.server.api.wire.event_parts import Removed
from kqview.server.api.wire.fields import (
    first,
    most_tokens_of,
    names_of,
    options_of,
    sampling_of,
    with_defaults,
)
from kqview.server.api.wire.mods_field import calls_of, removed
from kqview.server.api.wire.reasoning_cap import cap_of, default_budget
from kqview.server.errors import Answer, renamed
from kqview.server.models.run import AttentionWanted, GenerateRequest, Removal, Run, Step
from kqview.server.models.service import Call
from kqview.server.models.stream import Events, Renderer
from kqview.server.models.texts import ID_BYTES
from kqview.server.settings import ReasoningFormat, Settings
from kqview.server.web.described import about
from kqview.server.web.endpoint import DATA_HEAD, DECODED_TIMES, EVENT_TAIL, NAMED_HEAD, HttpReply
from kqview.types import PromptBlock, Sampling, Token

ChooseSplit = Callable[[str, str, Split], Split]
"""Given a chat template, the end of a prompt and how answers are split by these, how they are."""

WHOLE_CONTEXT: Final = 2**31 - 1
"""``max_tokens`` of a request that sets no limit; the server's settings and the context do."""
# Templates may take seconds: their work is large enough for another thread.
LARGE: Final = 2**20


# ---- requests


_SAMPLING: Final = Sampling()


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
        top_logprobs: As of `Sampling`, if the API has a field of its own for it; for `with_fields`.
        stop: The same.
        attention: As in GenerateRequest.
        documents: Documents of the messages, of which the answer says what is from them.
        guards: What else is told of the request and its answer, and by which heads.
        names: As in GenerateRequest.
        options: Further fields of the GenerateRequest, such as ``slot``.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling: Sampling = _SAMPLING
    request_id: str = ""
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
    top_logprobs: int | None = None
    stop: Sequence[str] | None = None
    attention: AttentionWanted | None = None
    documents: Sequence[Document] = ()
    guards: Guards = field(default_factory=dict[str, Any])
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


def with_fields(
    chat: ChatRequest, body: Any, *, engine: Engine, settings: Settings, request_id: str = ""
) -> ChatRequest:
    """*chat*, which is what a dialect reads itself, with what other fields of *body* ask for.

    Args:
        chat: The prompt, and names of the dialect's own fields.
        body: The request, `LlamaFields` with ``attention`` and those of guards.
        engine: The engine that will answer.
        settings: For the server's defaults.
        request_id: As in GenerateRequest.

    Raises:
        RequestError: Or one of its kinds: it cannot work.
    """
    tokenize = partial(engine.tokenize, add_special=False, parse_special=False)
    sampling = sampling_of(body, tokenize=tokenize, top_logprobs=chat.top_logprobs, stop=chat.stop)
    names, json_schema = chat.names, chat.schema
    if json_schema is None and body.json_schema is not None:
        json_schema, names = body.json_schema, {**names, "json_schema": "json_schema"}
    # `prepare` decides how the answer is held to its schema.
    if sampling.json_schema is not None:
        sampling = replace(sampling, json_schema=None)
    budget = first(most_tokens_of(body, "reasoning_budget"), chat.reasoning_budget)
    if budget is None and settings.reasoning_budget >= 0:
        budget = default_budget(sampling, settings)
    guards: Guards = {}
    if chat.documents or first(body.grounding, body.injection) is not None:
        guards = guards_of(body, engine, settings, cites=bool(chat.documents))
    return replace(
        chat,
        sampling=sampling,
        request_id=request_id,
        max_tokens=first(chat.max_tokens, most_tokens_of(body, "max_tokens")),
        schema={"type": "object"} if json_schema == {} else json_schema,
        reasoning_budget=budget,
        attention=attention_of(body.attention, settings),
        guards=guards,
        names={**names_of(body), **ATTENTION_NAMES, **names},
        options=options_of(body, settings),
    )


def allowed_template(source: str | None, settings: Settings) -> str | None:
    """The chat template *source* of a request.

    Raises:
        RequestError: Requests may have none.
    """
    if source is not None and not settings.request_chat_template:
        raise RequestError(
            "chat_template is off for requests; leave it out, or let the operator set "
            "request_chat_template (--request-chat-template)",
            parameter="chat_template",
        )
    return source


def prompt_of(engine: Engine, chat: ChatRequest) -> tuple[list[int], str, list[Tool], str]:
    """Render *chat*; any thread.

    Returns:
        Ids of its prompt, text of the answer that it already begins, the tools that may be called,
        and the chat template.

    Raises:
        RequestError: As `prepare`.
    """
    messages: list[Any] = list(chat.messages)
    names = {"template_options": "chat_template_kwargs", **chat.names}
    try:
        tools: list[Tool] = []
        allowed = chat.allowed_tools if chat.tool_name is None else [chat.tool_name]
        needs_call = chat.tool_choice == "required"
        if chat.tool_choice != "none" and (chat.tools or needs_call or allowed):
            tools = turn.chosen_tools(chat.tools, needs_call=needs_call, allowed=allowed)
        source = chat.chat_template
        if source is None:
            source = turn.template_for(engine.model, has_tools=bool(tools)) or CHATML
        is_of_tools = bool(tools)
        for i, message in enumerate(messages):
            if not isinstance(content := message.get("content"), str):
                _check_is_text(i, content)
            is_of_tools |= message.get("role") in ("tool", "function")
            is_of_tools |= bool(message.get("tool_calls"))
        begun = turn.continued(messages, chat.continues)
        shown: Sequence[Tool] = tools
        if is_of_tools and not tool_format.knows_tools(source):
            messages, shown = turn.tools_as_text(messages, tools), ()
        ids = engine.apply_chat_template(
            messages,
            tools=shown or None,
            add_generation_prompt=chat.adds_generation_prompt,
            continue_final_message=begun is not None,
            chat_template=source,
            template_options=chat.template_options or None,
        )
    except RequestError as error:
        raise renamed(error, names) from None
    return ids, begun or "", tools, source


def _check_is_text(i: int, content: object) -> None:
    for j, part in enumerate(objects_of(content)):
        kind = part.get("type")
        if kind in ("image_url", "image", "input_image", "input_audio", "file", "input_file"):
            raise RequestError(
                f"messages[{i}].content[{j}] is of type {kind}, and this model reads text only; "
                "send parts of type text",
                parameter="messages",
            )


@dataclass(frozen=True, slots=True)
class ChatWork:
    """A chat that is ready to run: the request for the service, and how to read its answer."""

    request: GenerateRequest
    reading: Reading
    sources: Sources | None = None


def prepare(engine: Engine, chat: ChatRequest) -> ChatWork:
    """Render *chat* as a prompt, and constrain the answer if it has to be a call or JSON.

    Any thread; a template may take seconds, so not the event loop's (`Service.converted`).

    Raises:
        RequestError: A message or a tool is malformed, tools and a grammar exclude each other, or
            as `Engine.apply_chat_template`.
    """
    ids, begun, tools, source = prompt_of(engine, chat)
    # What the answer continues decides whether it begins inside of reasoning.
    end = b"".join(map(engine.token_bytes, ids[-turn.N_END :])).decode("utf-8", "replace")
    opened = turn.opened_by(end, begun)
    reading = turn.reading_of(source, opened, tools)
    split = reading.split
    is_harmony = split.mode == "harmony"
    if chat.split is not None:
        split = chat.split(source, end, split)
    sampling, names, may_reason = chat.sampling, dict(chat.names), True
    if tools or chat.schema is not None:
        reasoning = turn.reasoning_of(source, end, opened)
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
    sources = None
    if chat.guards:
        sources, request = _guarded(engine, chat, request)
    stops = (sampling.stop,) if isinstance(sampling.stop, str) else tuple(sampling.stop)
    if chat.reasoning == "none" and not (is_harmony and tools):
        split = Split(mode="none")
    return ChatWork(request, replace(reading, split=split, stops=stops), sources)


def _guarded(
    engine: Engine, chat: ChatRequest, request: GenerateRequest
) -> tuple[Sources, GenerateRequest]:
    """What the answers are judged by, and *request* with the capture that tells."""
    if chat.attention is not None:
        asked = "citations" if chat.documents else "injection"
        raise RequestError(
            f"attention and {asked} are asked for, but a request has one capture; leave one out",
            parameter="attention",
        )
    ids, instruction = cast("list[int]", request.prompt), instruction_of(chat.messages)
    sources = Sources.of(engine, ids, chat.documents, chat.guards, instruction)
    # Documents stay where they are.
    options = {"capture": sources.capture, "headers": sources.headers, "context_shift": False}
    return sources, replace(request, **options)


def _constrained(
    engine: Engine, chat: ChatRequest, source: str, tools: list[Tool], reasoning: ReasoningStart
) -> Sampling:
    native = formats.format_of(source)
    # A template that has no place for tools shows them in Hermes' format.
    form = native if tool_format.knows_tools(source) or native == "harmony" else "hermes"
    try:
        return turn.constrained(
            chat.sampling,
            choice=turn.Choice(tools, chat.tool_choice == "required", chat.tool_name is not None),
            schema=chat.schema,
            form=form,
            reasoning=reasoning,
            is_parallel=chat.parallel_calls,
            mark=partial(tool_format.said, engine.control_tokens),
        )
    except RequestError as error:
        raise renamed(error, chat.names) from None


def content_of(texts: Sequence[str]) -> str | list[dict[str, Any]]:
    """*texts* as the content of a message: parts where there are several."""
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def options_of_effort(given: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Variables of the template: those that are *given*, and what else *effort* says."""
    options = dict(given or {})
    if effort == "none":
        options.setdefault("enable_thinking", False)
    elif effort is not None:
        options.setdefault("reasoning_effort", effort)
    return options


class InputTokens(Struct, kw_only=True):
    """How many tokens the prompt of a conversation has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: Annotated[int, about("How many there are.", 12)]


async def counted(call: Call, chat_of: Callable[[], ChatRequest]) -> int:
    """How many tokens the prompt of a chat has; raises as `prompt_of`."""
    engine = call.model.engine
    with call.hold.part() as ids:
        ids.take(ID_BYTES * call.n_body_bytes)
        return await call.service.converted(
            LARGE, call.hold, lambda: len(prompt_of(engine, chat_of())[0])
        )


# ---- replies


class ReplyWriter(Renderer, ABC):
    """Writes the reply to one request, streamed or whole."""

    head: ClassVar = DATA_HEAD
    """Begins each event of a stream."""
    request: GenerateRequest
    """What it writes the reply to."""
    attention: AttentionWriter
    """Set when the run has begun."""
    n_bytes: int = 0
    """About what the reply has of the request, and besides the lists."""

    @abstractmethod
    def add(self, lists: ReplyLists, run: Run, step: Step) -> None:
        """Add a token to a reply that is not streamed; may run in another thread."""

    @abstractmethod
    def whole(self, run: Run, lists: ReplyLists) -> bytes:
        """The reply that is not streamed, once the run has ended."""


async def answered(
    call: Call,
    body: Any,
    planned: Callable[..., ReplyWriter],
    *,
    prefix: str,
    before: Callable[..., Awaitable[None]] | None = None,
) -> HttpReply | Events:
    """The reply to a chat or a text.

    Args:
        call: The request.
        body: Its body, `LlamaFields`.
        planned: Makes the writer of the reply; runs in another thread.
        prefix: Of the reply's id.
        before: What is to be done before the run, given the call, the writer and its lists.
    """
    service, settings = call.service, call.service.settings
    body = with_defaults(body, settings)
    lists = ReplyLists(call.hold, settings.max_reply_bytes)
    with call.hold.part() as ids:  # a prompt that fits is small
        ids.take(ID_BYTES * call.n_body_bytes)
        writer = await service.converted(
            LARGE, call.hold, planned, body, request_id=prefix + uuid.uuid4().hex,
            engine=call.model.engine, settings=settings, model=body.model or call.model.name,
        )  # fmt: skip
        writer.n_bytes = call.n_body_bytes
        if isinstance(writer, AnswerWriter) and writer.request.dialogue is not None:
            call.hold.take(DECODED_TIMES * call.n_body_bytes)  # messages besides the body's own
        if before is not None:
            await before(call, writer, lists)
        run = await service.start(writer.request, call.caller, call.hold, model=call.model)
    return await written(call, run, writer, lists, streams=bool(body.stream))


async def written(
    call: Call, run: Run, writer: ReplyWriter, lists: ReplyLists, *, streams: bool
) -> HttpReply | Events:
    """*run* as a stream of events, or its whole reply, once it has ended."""
    offload = call.service.offload
    writer.attention = AttentionWriter(run, call.model.engine.model, call.service.kept)
    if streams:
        return Events(run, writer, writer.head, writer.n_bytes)
    async with run:
        if run.request.attention is not None and run.request.attention.prompt:
            async for block in run.prompt_blocks():
                await offload(LARGE, lists.prompt, writer.attention, run, block)
                del block  # the pool wants its memory back
        async for step in run.final_steps():
            await offload(step.n_bytes, writer.add, lists, run, step)
            del step
    body = await offload(lists.n_bytes + writer.n_bytes, writer.whole, run, lists)
    return HttpReply(body, headers=run.request.headers)


# ---- answers


class ChatRemoved(Removed, kw_only=True):
    """What mods took back of an answer, which a client drops."""

    reasoning_characters: Annotated[
        int | UnsetType, about("So many of the last characters of the reasoning.", 2)
    ] = UNSET
    tool_calls: Annotated[
        int | UnsetType,
        about("All calls, of which there were so many; those that are left are sent again.", 1),
    ] = UNSET


def taken_back(
    reader: AnswerReader, removal: Removal
) -> tuple[AnswerReader, dict[str, int], list[Delta]]:
    """What is left of an answer of which mods took tokens back.

    Returns:
        A reader that reads on; what the client is to drop, fields of a `ChatRemoved`; what is left.
        The client has all of that but the calls, which are to be sent again.
    """
    left = AnswerReader(reader.reading)
    deltas = [delta for text in removal.texts for delta in left.feed(text)]
    lost = removed(removal, reader.n_content - left.n_content)
    if n := reader.n_reasoning - left.n_reasoning:
        lost["reasoning_characters"] = n
    if reader.n_calls:  # calls cannot be shortened: all of them are sent again
        lost["tool_calls"] = reader.n_calls
    return left, lost, deltas


def written_calls(payload: object) -> list[turn.WrittenCall]:
    """The calls with which a mod ended an answer."""
    return [
        turn.WrittenCall(one.id, one.function.name, one.function.arguments)
        for one in calls_of(payload)
    ]


# ---- answers in named events

Part = Literal["reasoning", "text", "call"]


class AnswerWriter(ReplyWriter):
    """One answer as events that are named by their type, and as the whole that they add up to.

    An answer has parts, of which one is open at a time. What events begin and end the answer and
    its parts says a dialect. As of `Renderer` and `ReplyWriter`.
    """

    head = NAMED_HEAD
    prompt_event: ClassVar[type[Any]]
    token_event: ClassVar[type[Any]]
    """Events of rows of the prompt, and of a token."""
    removed_event: ClassVar[type[Any]]
    """What mods took back, a `ChatRemoved`."""
    _ends_with_citation: ClassVar = False
    """Whether a part of text ends with its first citation."""

    def __init__(self, body: Any, model: str, work: ChatWork, bytes_of: Callable[[int], bytes]):
        """Begin an answer.

        Args:
            body: The request.
            model: The name that the client called the model by.
            work: What to run, and how the answer is read.
            bytes_of: Bytes of an id, for logprobs.
        """
        self.request = work.request
        self.citing = None if work.sources is None else Citing(work.sources)
        """What the guards say; None if nobody asks."""
        self._body = body
        self._model = model
        self._bytes_of = bytes_of
        self._reader = AnswerReader(work.reading)
        self._has_begun = False
        self._parts: list[Any] = []  # the open one is as it was when it was opened
        self._open: Part | None = None
        self._pieces: list[str] = []  # of the open part

    @property
    def injection(self) -> Injection | UnsetType:
        """Whether the data contain orders; known with the first token, if asked for."""
        return UNSET if self.citing is None else self.citing.injection

    # ---- of a dialect

    @staticmethod
    @abstractmethod
    def chat_of(body: Any) -> ChatRequest:
        """What *body* asks for in fields of its dialect."""

    @abstractmethod
    def _started(self, run: Run | None) -> list[Struct]:
        """The events that begin an answer."""

    def _restart(self) -> None:
        """Mods took tokens back: all parts begin again."""
        self._parts.clear()
        self._pieces.clear()

    @abstractmethod
    def _opened(self, kind: Part, call: CallDelta | None) -> list[Struct]:
        """A part begins: add it to the parts."""

    @abstractmethod
    def _added(self, kind: Part, text: str) -> list[Struct]:
        """More of the open part."""

    @abstractmethod
    def _closed(self, kind: Part, text: str, *, is_cut: bool) -> tuple[Struct, list[Struct]]:
        """The open part is whole, with this *text*: it as it is now, and the events of that."""

    @abstractmethod
    def _cited(self, cited: Cited) -> list[Struct]:
        """A sentence of the open part is whole: note where it is from, for `_closed`."""

    @abstractmethod
    def _ended(self, run: Run) -> list[Struct]:
        """The events that end an answer whose parts are whole."""

    @abstractmethod
    def message(self, run: Run) -> Struct:
        """The whole answer; its parts are."""

    @classmethod
    def planned(
        cls, body: Any, *, request_id: str, engine: Engine, settings: Settings, model: str
    ) -> Self:
        """The writer of the answer to *body*; arguments and errors as of `with_fields`."""
        chat = with_fields(
            cls.chat_of(body), body, engine=engine, settings=settings, request_id=request_id
        )
        return cls(body, model, prepare(engine, chat), engine.token_bytes)

    # ---- streamed

    def prompt(self, run: Run, block: PromptBlock) -> list[bytes]:
        """Rows of the prompt."""
        events = self._begun(run)
        fields, data = self.attention.prompt(run, block)
        if fields is not None:
            events.append(self.prompt_event(attention=fields))
        return self._encoded(events, data)

    def token(self, run: Run, step: Step) -> list[bytes]:
        """What is clear with this token, and its row."""
        if self.citing is not None:
            self.citing.judge(step.token)
        events = self._begun(run) + self.feed(run, step.token)
        fields, data = self.attention.token(run, step)
        if fields is not None:
            events.append(self.token_event(attention=fields))
        return self._encoded(events, data)

    def removed(self, run: Run, removal: Removal) -> list[bytes]:
        """What a client is to drop; an event of ours."""
        self.attention.removed(run, removal)
        self._reader, lost, left = taken_back(self._reader, removal)
        self._open = None
        self._restart()
        if self.citing is not None:
            self.citing.take_back(removal.n_left)
        events = [*self._begun(run), self.removed_event(**lost)]
        for delta in left:
            again = self._written([delta])
            if delta.call is not None:
                events += again
        return self._encoded(events)

    def done(self, run: Run) -> list[bytes]:
        """The end."""
        return self._encoded(self._begun(run) + self.finish(run))

    @abstractmethod
    def error(self, run: Run | None, answer: Answer) -> list[bytes]:
        """What went wrong."""

    def _encoded(self, events: Sequence[Struct], data: bytes | None = None) -> list[bytes]:
        """Pieces of *events*, for a stream with `NAMED_HEAD`; *data* is of the last one."""
        pieces: list[bytes] = []
        for i, one in enumerate(events):
            head = EVENT_TAIL + NAMED_HEAD if i else b""
            pieces.append(b"%s%s\ndata: " % (head, name_of(one).encode()))
            pieces += event_pieces(one, data if i == len(events) - 1 else None)
        return pieces

    def _begun(self, run: Run | None) -> list[Struct]:
        # With the first token it is known how much of the prompt was in the cache.
        if self._has_begun:
            return []
        self._has_begun = True
        return self._started(run)

    # ---- whole

    def add(self, lists: ReplyLists, run: Run, step: Step) -> None:
        """Add a token to a reply that is not streamed."""
        self.feed(run, step.token)
        lists.add(step.sample, "attention", *self.attention.token(run, step))

    def whole(self, run: Run, lists: ReplyLists) -> bytes:
        """The reply that is not streamed."""
        self.finish(run)
        return msgspec.json.encode(msgspec.structs.replace(self.message(run), **lists.of(0)))

    # ---- both

    def feed(self, run: Run, token: Token) -> list[Struct]:
        """Add a token; returns the events of it."""
        deltas = self._reader.feed(token.text)
        if self.citing is not None:
            run.hold.take(self.citing.bytes_per_token)
            self.citing.add(token, self._reader.n_content)
        return self._written(deltas)

    def finish(self, run: Run) -> list[Struct]:
        """End the answer; returns the last events."""
        generation = run.generations[0]
        deltas = self._reader.finish(generation.text)
        if generation.tool_calls is not None:
            deltas += self._reader.call(written_calls(generation.tool_calls))
        events = self._written(deltas) + self._close(is_cut=run.finish_reason == "length")
        return events + self._ended(run)

    def _written(self, deltas: Sequence[Delta]) -> list[Struct]:
        events: list[Struct] = []
        for delta in deltas:
            kind: Part = "reasoning" if delta.reasoning else "text"
            text, call = delta.reasoning or delta.content, delta.call
            if call is not None:
                kind, text = "call", call.arguments
            elif not text:
                continue
            pieces: Iterable[tuple[str, Cited | None]] = [(text, None)]
            if self.citing is not None and kind == "text":
                pieces = self.citing.feed(text)
            for piece, cited in pieces:
                if kind != self._open or (call is not None and call.id is not None):
                    events += self._close()
                    self._open = kind
                    events += self._opened(kind, call)
                if piece:
                    self._pieces.append(piece)
                    events += self._added(kind, piece)
                if cited is not None:
                    events += self._cited(cited)
                    if self._ends_with_citation:
                        events += self._end_part()
        return events

    def _close(self, *, is_cut: bool = False) -> list[Struct]:
        if self._open is None:
            return []
        cited = None
        if self.citing is not None and self._open == "text":
            cited = self.citing.finish()
        events = [] if cited is None else self._cited(cited)
        return events + self._end_part(is_cut=is_cut)

    def _end_part(self, *, is_cut: bool = False) -> list[Struct]:
        assert self._open is not None
        kind, text = self._open, "".join(self._pieces)
        self._open = None
        self._pieces.clear()
        self._parts[-1], events = self._closed(kind, text, is_cut=is_cut)
        return events


def name_of(event: Struct) -> str:
    """The type of an event, which is its name."""
    return str(event.__struct_config__.tag or getattr(event, "type"))  # noqa: B009
