"""OpenAI's completions as they are sent, in chunks or one object, and who writes them. Pure.

With attention in the reply, each token is a chunk of its own, even if its text is held back for a
moment; without it, chunks are pieces of text.
"""

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview import __version__
from kqview.chat.turn import AnswerReader, Delta, Reading
from kqview.server.api.openai import schema
from kqview.server.api.openai.schema import ChoiceLogprobs, ToolCall, Usage
from kqview.server.api.wire.attention import ReplyLists, event_pieces
from kqview.server.api.wire.chat import ChatRemoved, ReplyWriter, taken_back, written_calls
from kqview.server.api.wire.citations import (
    Annotation,
    Cited,
    Citing,
    Injection,
    InjectionFound,
    Sources,
    UrlFacts,
)
from kqview.server.api.wire.event_parts import ModCall, PromptAttention, TokenAttention
from kqview.server.api.wire.failures import error_body
from kqview.server.api.wire.fields import Clock, Progress, Timings, prompt_progress, timings
from kqview.server.api.wire.logprobs import (
    LOGPROB_BYTES,
    TextLogprobs,
    logprobs_of,
    of_token,
    token_logprob,
)
from kqview.server.api.wire.mods_field import removed, tool_calls_of
from kqview.server.errors import Answer
from kqview.server.models.run import GenerateRequest, Removal, Run, Step, TokenLogprobs
from kqview.server.web.described import about
from kqview.server.web.endpoint import NEXT_DATA
from kqview.stop_strings import ShownText, TextStream
from kqview.types import PromptBlock, Score, Token

_DONE: Final = b"[DONE]"
FINGERPRINT: Final = f"kqview-{__version__}"
_STOPPED: Final = frozenset({"stop", "stop_token", "stop_sequence", "cancelled", "tool_calls"})

# ---- chunks


class AnswerDelta(Struct, kw_only=True):
    """What is new in an answer."""

    role: Annotated[
        Literal["assistant"] | UnsetType,
        about('Always "assistant"; in the first chunk of an answer.'),
    ] = UNSET
    content: Annotated[
        str | UnsetType | None, about("Text that is new; null in the first chunk.", "Anna")
    ] = UNSET
    reasoning_content: Annotated[str | UnsetType, about("Reasoning that is new.", "The user")] = (
        UNSET
    )
    tool_calls: Annotated[
        list[ToolCall] | UnsetType, about("Calls that begin, and pieces of their arguments.")
    ] = UNSET
    annotations: Annotated[
        list[Annotation] | UnsetType,
        about("What a sentence that has ended is from, in a chunk of its own."),
    ] = UNSET
    injection: InjectionFound = UNSET


Index = Annotated[int, about("Of the answer, from 0.", 0)]
FinishReason = Annotated[
    str | None,
    about(
        'Why it ended; "length" and "tool_calls" are the others. Null before its last chunk.',
        "stop",
    ),
]
Row = Annotated[TokenAttention | UnsetType, about("Attention of the token, if asked for.")]
PromptRows = Annotated[
    PromptAttention | UnsetType, about("Rows of the prompt, if asked for, in a chunk of their own.")
]
TakenBack = Annotated[ChatRemoved | UnsetType, about("What mods took back, in a chunk of its own.")]


class ChatChunkChoice(Struct, kw_only=True):
    """What is new in one of the answers."""

    index: Index
    delta: Annotated[AnswerDelta, about("The new part.")]
    logprobs: Annotated[ChoiceLogprobs | None, about("Those of the token, if asked for.")] = None
    finish_reason: FinishReason = None
    attention: Row = UNSET
    prompt_attention: PromptRows = UNSET
    removed: TakenBack = UNSET


class TextChunkChoice(Struct, kw_only=True):
    """What is new in one of the texts."""

    index: Index
    text: Annotated[str | UnsetType, about("Text that is new.", " t")] = UNSET
    logprobs: Annotated[
        TextLogprobs | None,
        about(
            "Those of the token, if asked for, in OpenAI's older form and that of chat "
            "completions; of the prompt in the first chunk, with ``echo``."
        ),
    ] = None
    finish_reason: FinishReason = None
    attention: Row = UNSET
    prompt_attention: PromptRows = UNSET
    removed: TakenBack = UNSET
    tool_calls: Annotated[list[ModCall] | UnsetType, about("Calls that a mod made.")] = UNSET


class CompletionChunk(Struct, kw_only=True):
    """A piece of a reply."""

    id: Annotated[str, about("Id of the reply, the same in each chunk.", "chatcmpl-1")]
    object: Any  # of a kind of completions, as its choices
    created: Annotated[int, about("When it was begun, in seconds since 1970.", 1767225600)]
    model: Annotated[str, about("The model, as the request names it.", "demo")]
    system_fingerprint: Annotated[str, about("What generated it.", "kqview-0.1.0")]
    choices: Any
    usage: Annotated[
        Usage | UnsetType,
        about(
            "Tokens of the request, in a last chunk without choices, with "
            "``stream_options.include_usage``."
        ),
    ] = UNSET
    timings: Annotated[
        Timings | UnsetType,
        about(
            "What it cost, in the last chunk; in each one but that which begins a choice with "
            "``timings_per_token``."
        ),
    ] = UNSET
    prompt_progress: Annotated[
        Progress | UnsetType,
        about(
            "How much of the prompt is evaluated, with ``return_progress``, in chunks without "
            "choices before the first token."
        ),
    ] = UNSET


class ChatChunk(CompletionChunk, kw_only=True):
    """A piece of a chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: Annotated[
        list[ChatChunkChoice],
        about("The answer that it belongs to; none in the one with the usage."),
    ]


class TextChunk(CompletionChunk, kw_only=True):
    """A piece of a text completion."""

    object: Literal["text_completion"] = "text_completion"
    choices: Annotated[
        list[TextChunkChoice], about("The text that it belongs to; none in the one with the usage.")
    ]


# ---- logprobs


def echoed_logprobs(
    score: Score, text: str, bytes_of: Callable[[int], bytes]
) -> dict[str, list[msgspec.Raw]]:
    """Logprobs of a prompt whose text is *text*; any thread, because there may be many.

    They have OpenAI's older form. The first token has nothing before it, so its logprobs are null.
    Offsets are counted from the end: ids that the tokenizer put before it are no part of the text.
    """
    stream = TextStream()
    lengths = [len(stream.feed(bytes_of(id_))) for id_ in score.ids]
    lengths[-1] += len(stream.flush())
    n_left = [*accumulate(reversed(lengths))][::-1]
    tops = score.top_logprobs or [[] for _ in score.ids]
    lists: dict[str, list[msgspec.Raw]] = {
        name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    for id_, logprob, rank, top, n in zip(
        score.ids, score.logprobs.tolist(), score.ranks.tolist(), tops, n_left, strict=True
    ):
        one = token_logprob(TokenLogprobs(id_, logprob, tuple(top)), bytes_of)
        shown = {other.token: other.logprob for other in one.top_logprobs}
        is_scored = rank >= 0
        values = (
            one.token, one.logprob if is_scored else None, shown if is_scored else None,
            max(0, len(text) - n),
        )  # fmt: skip
        for elements, value in zip(lists.values(), values, strict=True):
            elements.append(msgspec.Raw(msgspec.json.encode(value)))
    return lists


# ---- who writes them


# Of a choice what is new: of an answer, or text; nothing where a chunk has only attention.
New = AnswerDelta | str | UnsetType


class _Choice:
    """What was sent of one choice, and when it began."""

    def __init__(self, writer: "CompletionWriter", index: int) -> None:
        self.index = index
        self.has_begun = False
        self.n_text = len(writer.echo(index))  # characters before the next token
        self.nothing: New = "" if writer.reading is None else AnswerDelta()
        self.citing = None if writer.sources is None else Citing(writer.sources)
        self.annotations: list[Annotation] = []
        self.clock = Clock(index)
        self.reader = None if writer.reading is None else AnswerReader(writer.reading)
        """None if it is no chat's."""
        stops = writer.request.sampling.stop
        self.shown = ShownText((stops,) if isinstance(stops, str) else stops)

    @property
    def injection(self) -> Injection | UnsetType:
        """Whether the data of a chat contain orders; known with the first token, if asked for."""
        return UNSET if self.citing is None else self.citing.injection

    def feed(self, run: Run, token: Token) -> list[AnswerDelta]:
        """What a token adds to the answer of a chat."""
        assert self.reader is not None
        deltas = self.reader.feed(token.text)
        if self.citing is None:
            return [*map(_delta, deltas)]
        run.hold.take(self.citing.bytes_per_token)
        self.citing.add(token, self.reader.n_content)
        return self.cited(deltas)

    def cited(self, deltas: Sequence[Delta], *, is_end: bool = False) -> list[AnswerDelta]:
        """*deltas*, and the citations of sentences that end in them."""
        new: list[AnswerDelta] = []
        if self.citing is None:
            return [*map(_delta, deltas)]
        for delta in deltas:
            if not delta.content:
                new.append(_delta(delta))
                continue
            for piece, cited in self.citing.feed(delta.content):
                if piece:
                    new.append(AnswerDelta(content=piece))
                new += self._annotated(cited)
        return [*new, *self._annotated(self.citing.finish())] if is_end else new

    def _annotated(self, cited: Cited | None) -> list[AnswerDelta]:
        if cited is None:
            return []
        one = Annotation(url_citation=cited.facts(UrlFacts))
        self.annotations.append(one)
        return [AnswerDelta(annotations=[one])]


class CompletionWriter(ReplyWriter):
    """Writes a completion of a chat or a text."""

    def __init__(
        self,
        body: schema.GenerateFields,
        request: GenerateRequest,
        model: str,
        bytes_of: Callable[[int], bytes],
        *,
        is_prefill: bool,
        reading: Reading | None = None,
        sources: Sources | None = None,
        shown_prompt: str | None = None,
        echoes: Sequence[str] = (),
        echo_logprobs: int | None = None,
    ) -> None:
        """Write the reply to *request*.

        Args:
            body: As it was sent.
            request: For the service.
            model: Name of the model in the reply.
            bytes_of: Bytes of an id.
            is_prefill: Whether only the prompt is evaluated: the one token that comes is not shown.
            reading: How answers of a chat are read; None for completions.
            sources: What answers of a chat are judged by; None if nobody asks.
            shown_prompt: Text of the prompt for ``__verbose``; None without.
            echoes: Text of each prompt, which precedes the generated one; () without ``echo``.
            echo_logprobs: Number of most probable tokens to show with those of the prompt; None if
                it is not shown, or without logprobs.
        """
        self.body = body
        self.request = request
        self.reading = reading
        self.sources = sources
        self.echoes = echoes
        self.echo_logprobs = echo_logprobs
        self.echoed: Sequence[msgspec.Raw] = ()
        """The logprobs of each prompt that a stream shows."""
        self._model = model
        self._bytes_of = bytes_of
        self.is_prefill = is_prefill
        self._shown_prompt = shown_prompt
        self._created_s = int(time.time())

    def echo(self, sample: int) -> str:
        """What precedes the text of a sample."""
        return self.echoes[sample // self.request.n_samples] if self.echoes else ""

    @cached_property
    def _choices(self) -> list[_Choice]:
        """Of a stream, or with logprobs."""
        return [_Choice(self, i) for i in range(self.request.n_generations)]

    # ---- streamed

    def prompt(self, run: Run, block: PromptBlock) -> list[bytes]:
        """Rows of the prompt, in a chunk of their own."""
        fields, data = self.attention.prompt(run, block)
        if fields is None:
            return []
        choice = self._choices[0]
        nothing = UNSET if choice.reader is None else AnswerDelta()
        chunk = self._chunk(run, choice, nothing, prompt_attention=fields)
        return _encoded([chunk], data)

    def token(self, run: Run, step: Step) -> list[bytes]:
        """What is certain after one token, and its row."""
        choice, token = self._choices[step.sample], step.token
        if choice.citing is not None:
            choice.citing.judge(token)
        if self.is_prefill:
            return []
        choice.clock.note()
        is_first = not choice.has_begun
        chunks = self._begun(run, choice)
        if is_first and self.body.return_progress:
            for progress, spent in prompt_progress(choice.clock.timings(run)):
                chunks.append(self._chunk(run))
                chunks[-1].prompt_progress = progress
                if self.body.timings_per_token:
                    chunks[-1].timings = spent
        new: list[New] = []
        if choice.reader is not None:
            new += choice.feed(run, token)
        elif text := choice.shown.feed(token.text):
            new.append(text)
        logprobs = self._logprobs(choice, token)
        fields, data = self.attention.token(run, step)
        if not new and (logprobs is not None or fields is not None):
            new.append(choice.nothing)
        i_row = len(chunks)
        for one in new:
            chunks.append(self._chunk(run, choice, one))
            if self.body.timings_per_token:
                chunks[-1].timings = choice.clock.timings(run)
        if new:
            first: Any = chunks[i_row].choices[0]
            first.logprobs = logprobs
            if fields is not None:
                first.attention = fields
        return _encoded(chunks, data, i_row)

    def removed(self, run: Run, removal: Removal) -> list[bytes]:
        """What a client is to drop, in a chunk of its own."""
        if self.is_prefill:
            return []
        choice = self._choices[removal.sample]
        self.attention.removed(run, removal)
        choice.n_text -= removal.n_characters
        again: list[Delta] = []
        if choice.reader is not None:
            choice.reader, lost, left = taken_back(choice.reader, removal)
            if choice.citing is not None:
                choice.citing.take_back(removal.n_left)
                choice.annotations.clear()
                choice.cited(left)  # which the client has
            again = [delta for delta in left if delta.call is not None]
        else:
            lost = removed(removal, choice.shown.take_back(removal.text))
        chunks = self._begun(run, choice)
        chunks.append(self._chunk(run, choice, choice.nothing, removed=ChatRemoved(**lost)))
        chunks += [self._chunk(run, choice, _delta(delta)) for delta in again]
        if self.body.timings_per_token:
            for chunk in chunks:
                chunk.timings = choice.clock.timings(run)
        return _encoded(chunks)

    def done(self, run: Run) -> list[bytes]:
        """The end of each choice, the usage if asked for, and the mark of the end."""
        chunks: list[ChatChunk | TextChunk] = []
        for choice, generation in zip(self._choices, run.generations, strict=True):
            chunks += self._begun(run, choice)
            called: list[ModCall] | UnsetType = UNSET
            has_calls = False
            if (reader := choice.reader) is not None:
                deltas = reader.finish("" if self.is_prefill else generation.text)
                if generation.tool_calls is not None:
                    deltas += reader.call(written_calls(generation.tool_calls))
                has_calls = reader.has_calls
                new = choice.cited(deltas, is_end=True)
                chunks += [self._chunk(run, choice, one) for one in new]
            else:
                called = tool_calls_of(generation)
                rest = "" if self.is_prefill else choice.shown.rest(generation.text)
                if rest:
                    chunks.append(self._chunk(run, choice, rest))
            ended = "length" if self.is_prefill else generation.finish_reason
            reason = finish_reason(ended, has_calls=has_calls)
            more = {} if called is UNSET else {"tool_calls": called}
            chunks.append(self._chunk(run, choice, choice.nothing, finish_reason=reason, **more))
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            chunks.append(self._chunk(run))
            chunks[-1].usage = self._usage(run)
        chunks[-1].timings = self._choices[0].clock.timings(run)
        return [*_encoded(chunks), NEXT_DATA, _DONE]

    def error(self, run: Run | None, answer: Answer) -> list[bytes]:
        """What went wrong."""
        return [msgspec.json.encode(error_body(answer))]

    def _begun(self, run: Run, choice: _Choice) -> list[ChatChunk | TextChunk]:
        """The chunk that begins a choice: the role, or the echo of the prompt."""
        if choice.has_begun:
            return []
        choice.has_begun = True
        if choice.reader is not None:
            delta = AnswerDelta(role="assistant", content=None, injection=choice.injection)
            return [self._chunk(run, choice, delta)]
        echo, logprobs = self.echo(choice.index), None
        if self.echoed:
            logprobs = self.echoed[choice.index // self.request.n_samples]
        elif not echo:
            return []
        return [self._chunk(run, choice, echo, logprobs=logprobs)]

    def _chunk(
        self, run: Run, choice: _Choice | None = None, new: Any = UNSET, **more: Any
    ) -> ChatChunk | TextChunk:
        head: dict[str, Any] = {
            "id": run.request_id, "created": self._created_s, "model": self._model,
            "system_fingerprint": FINGERPRINT,
        }  # fmt: skip
        if self.reading is None:
            texts = (
                [] if choice is None else [TextChunkChoice(index=choice.index, text=new, **more)]
            )
            return TextChunk(choices=texts, **head)
        answers = [] if choice is None else [ChatChunkChoice(index=choice.index, delta=new, **more)]
        return ChatChunk(choices=answers, **head)

    # ---- whole

    def add(self, lists: ReplyLists, run: Run, step: Step) -> None:
        """Add a token's row and logprobs, encoded: the engine gets the memory of the row back."""
        if self.is_prefill:
            if (citing := self._choices[step.sample].citing) is not None:
                citing.judge(step.token)
            return
        logprobs = None
        if self.sources is not None:
            self._choices[step.sample].feed(run, step.token)
        if self.request.sampling.top_logprobs is not None:
            logprobs = self._logprobs(self._choices[step.sample], step.token)
        if logprobs is not None:
            run.hold.take(LOGPROB_BYTES)
            lists.add_each(step.sample, "logprobs", logprobs)
        lists.add(step.sample, "attention", *self.attention.token(run, step))

    def whole(self, run: Run, lists: ReplyLists) -> bytes:
        """The reply."""
        head: dict[str, Any] = {
            "id": run.request_id, "created": self._created_s, "model": self._model,
            "system_fingerprint": FINGERPRINT, "usage": self._usage(run),
            "timings": timings(run.generations[0].usage),
        }  # fmt: skip
        choices: list[Any] = [
            self._whole_choice(run, i, lists) for i in range(len(run.generations))
        ]
        if self.reading is None:
            return msgspec.json.encode(schema.TextCompletion(choices=choices, **head))
        verbose = UNSET if self._shown_prompt is None else schema.Verbose(self._shown_prompt)
        return msgspec.json.encode(schema.ChatCompletion(choices=choices, verbose=verbose, **head))

    def _whole_choice(
        self, run: Run, i: int, lists: ReplyLists
    ) -> schema.ChatChoice | schema.TextChoice:
        generation, reading = run.generations[i], self.reading
        text = "" if self.is_prefill else generation.text
        ended = "length" if self.is_prefill else generation.finish_reason
        rows: dict[str, Any] = lists.of(i)
        found: Any = lists.of(i, "logprobs") or None
        if reading is None:
            return schema.TextChoice(
                index=i, text=self.echo(i) + text, logprobs=found,
                finish_reason=finish_reason(ended, has_calls=False),
                tool_calls=tool_calls_of(generation), **rows,
            )  # fmt: skip
        answer = reading.answer(text)
        if ended == "tool_calls":
            answer.calls += written_calls(generation.tool_calls)
        message = schema.Message(
            content=answer.content if answer.content or not answer.calls else None,
            reasoning_content=answer.reasoning or UNSET,
            tool_calls=UNSET,
        )
        if self.sources is not None:
            choice = self._choices[i]
            assert choice.reader is not None
            choice.cited(choice.reader.finish(text), is_end=True)
            message.annotations, message.injection = choice.annotations, choice.injection
        if answer.calls:
            message.tool_calls = [
                ToolCall(
                    id=call.id, type="function",
                    function=schema.Function(name=call.name, arguments=call.arguments),
                )
                for call in answer.calls
            ]  # fmt: skip
        return schema.ChatChoice(
            index=i, message=message, logprobs=found,
            finish_reason=finish_reason(ended, has_calls=bool(answer.calls)), **rows,
        )  # fmt: skip

    # ---- both

    def _logprobs(self, choice: _Choice, token: Token) -> ChoiceLogprobs | TextLogprobs | None:
        """Logprobs of a token; None if there are none."""
        offset = choice.n_text
        choice.n_text += len(token.text)
        if (one := of_token(token)) is None:
            return None
        if self.reading is not None:
            return ChoiceLogprobs([token_logprob(one, self._bytes_of)])
        return logprobs_of([one], self._bytes_of, offset)

    def _usage(self, run: Run) -> Usage:
        """Tokens of all choices; each prompt counts once, a token that is not shown does not."""
        prompts = [one.usage for one in run.generations[:: run.request.n_samples]]
        n_prompt = sum(usage.prompt_tokens for usage in prompts)
        spent = [one.usage for one in run.generations]
        n = 0 if self.is_prefill else sum(one.completion_tokens for one in spent)
        n_guessed = sum(one.draft_tokens for one in spent)
        n_accepted = sum(one.accepted_tokens for one in spent)
        return Usage(
            prompt_tokens=n_prompt,
            completion_tokens=n,
            total_tokens=n_prompt + n,
            prompt_tokens_details=schema.PromptDetails(sum(one.cached_tokens for one in prompts)),
            completion_tokens_details=schema.CompletionDetails(n_accepted, n_guessed - n_accepted),
        )


def finish_reason(
    reason: str | None, *, has_calls: bool
) -> Literal["stop", "length", "tool_calls"]:
    """Why an answer ended, from the reason of its generation, in OpenAI's words."""
    if reason is not None and reason not in _STOPPED:
        return "length"
    return "tool_calls" if has_calls or reason == "tool_calls" else "stop"


def _delta(delta: Delta) -> AnswerDelta:
    if delta.call is None:
        if delta.reasoning:
            return AnswerDelta(reasoning_content=delta.reasoning)
        return AnswerDelta(content=delta.content)
    call = delta.call
    function = schema.Function(
        name=UNSET if call.name is None else call.name, arguments=call.arguments
    )
    if call.id is None:
        return AnswerDelta(tool_calls=[ToolCall(index=call.index, function=function)])
    return AnswerDelta(
        tool_calls=[ToolCall(index=call.index, id=call.id, type="function", function=function)]
    )


def _encoded(
    chunks: Sequence[CompletionChunk], data: bytes | None = None, i_data: int = 0
) -> list[bytes]:
    """Pieces of *chunks*; *data* is of the one at *i_data*."""
    pieces: list[bytes] = []
    for i, chunk in enumerate(chunks):
        if i:
            pieces.append(NEXT_DATA)
        pieces += event_pieces(chunk, data if i == i_data else None)
    return pieces
