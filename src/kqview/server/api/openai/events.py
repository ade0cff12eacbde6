"""Replies of OpenAI's API while they come: chunks of a stream, or one object. Pure.

With attention in the reply, each token is a chunk of its own, even if its text is held back for a
moment; without it, chunks are pieces of text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import msgspec

from kqview import __version__
from kqview.chat.tool_format import CallDelta
from kqview.chat.turn import Answer as ChatAnswer
from kqview.chat.turn import AnswerReader, Delta
from kqview.generation.text import TextStream
from kqview.server.api.openai.convert import Plan, usage_of
from kqview.server.api.wire.attention_field import AttentionWriter, Lists
from kqview.server.api.wire.chat_work import counts_of, finish_reason, mod_calls, taken_back
from kqview.server.api.wire.llama_fields import Clock, error_body, prompt_progress, timings
from kqview.server.api.wire.logprobs import LOGPROB_BYTES, logprobs_of, token_logprob
from kqview.server.api.wire.mods_field import removed, tool_calls_of
from kqview.server.api.wire.rows import event_pieces
from kqview.server.errors import Answer
from kqview.server.models.run import Removal, Run, Step, TokenLogprobs
from kqview.server.web.budget import Reservation
from kqview.stop_strings import ShownText
from kqview.types import PromptBlock, Score

Object = dict[str, Any]

HEAD: Final = b"data: "
"""How an event begins; there is no other line in it."""
_NEXT: Final = b"\n\n" + HEAD
_DONE: Final = b"[DONE]"
FINGERPRINT: Final = f"kqview-{__version__}"


class Sample:
    """One choice of the reply: what was sent of it, and when it began."""

    def __init__(self, plan: Plan, index: int) -> None:
        """Begin choice *index*."""
        self.index = index
        self.reader: AnswerReader | None = None
        self.has_begun = False
        if plan.reading is not None:
            self.reader = AnswerReader(plan.reading)
        stops = plan.request.sampling.stop
        self.shown = ShownText((stops,) if isinstance(stops, str) else stops)
        self.clock = Clock(index)


@dataclass(frozen=True, slots=True)
class EchoedLogprobs:
    """Logprobs of a prompt's tokens in OpenAI's older form.

    The first token has nothing before it, so its logprobs are null.
    """

    lists: Mapping[str, Sequence[msgspec.Raw]]
    whole: msgspec.Raw
    """The same as one object."""


def echoed_logprobs(score: Score, text: str, bytes_of: Callable[[int], bytes]) -> EchoedLogprobs:
    """Logprobs of a prompt whose text is *text*; any thread, because there may be many.

    Offsets are counted from its end: ids that the tokenizer put before it are no part of the text.
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
        lists["tokens"].append(_json(one.token))
        lists["token_logprobs"].append(_json(one.logprob if is_scored else None))
        lists["top_logprobs"].append(_json(shown if is_scored else None))
        lists["text_offset"].append(_json(max(0, len(text) - n)))
    return EchoedLogprobs(lists, _json(lists))


def _json(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


class Parts:
    """What is written of a token besides its text: logprobs and attention."""

    def __init__(
        self,
        plan: Plan,
        bytes_of: Callable[[int], bytes],
        attention: AttentionWriter,
        echoed: Sequence[EchoedLogprobs] = (),
    ) -> None:
        """Write what *plan* asks for; *echoed* are the logprobs of each prompt that is shown."""
        self._plan = plan
        self._bytes_of = bytes_of
        self._echoed = echoed
        self.attention = attention
        self._n_text: dict[int, int] = {}  # characters before the next token, by choice

    def echoed(self, sample: int) -> EchoedLogprobs | None:
        """Logprobs of the prompt before a choice; None if there are none."""
        i = sample // self._plan.request.n_samples
        return self._echoed[i] if self._echoed else None

    def logprobs(self, step: Step) -> Object | None:
        """Logprobs of a token; None if there are none."""
        token = step.token
        offset = self._n_text.get(step.sample, len(self._plan.echo(step.sample)))
        self._n_text[step.sample] = offset + len(token.text)
        if token.logprob is None:
            return None
        one = TokenLogprobs(token.id, token.logprob, tuple(token.top_logprobs or ()))
        if self._plan.reading is not None:
            return {"content": [token_logprob(one, self._bytes_of)]}
        found = logprobs_of([one], self._bytes_of)
        assert found is not None
        return {**msgspec.structs.asdict(found), "text_offset": [offset]}

    def removed(self, run: Run, removal: Removal) -> None:
        """Mods took tokens back."""
        self.attention.removed(run, removal)
        if removal.sample in self._n_text:
            self._n_text[removal.sample] -= removal.n_characters


# ---- streams


class Chunks:
    """``data: {...}`` for what is new, the end of each choice, the usage, and ``[DONE]``."""

    def __init__(self, plan: Plan, parts: Parts, created_s: int) -> None:
        """Write what *plan* asks for."""
        self._plan = plan
        self._parts = parts
        self._created_s = created_s
        self._samples: dict[int, Sample] = {}

    def prompt(self, run: Run, block: PromptBlock) -> list[bytes]:
        """Rows of the prompt, in a chunk of their own."""
        fields, data = self._parts.attention.prompt(run, block)
        if fields is None:
            return []
        choice = self._choice(self._sample(0), {}, None)
        return event_pieces(self._chunk(run, [{**choice, "prompt_attention": fields}]), data)

    def token(self, run: Run, step: Step) -> list[bytes]:
        """What is certain after one token, and its row."""
        if self._plan.is_prefill:
            return []
        sample, token = self._sample(step.sample), step.token
        sample.clock.note()
        is_first = not sample.has_begun
        choices = self._begun(sample)
        if sample.reader is not None:
            texts = [_delta(delta) for delta in sample.reader.feed(token.text)]
        else:
            text = sample.shown.feed(token.text)
            texts = [{"text": text}] if text else []
        logprobs = self._parts.logprobs(step)
        fields, data = self._parts.attention.token(run, step)
        if not texts and (logprobs is not None or fields is not None):
            texts = [{} if sample.reader is not None else {"text": ""}]
        new = [self._choice(sample, text, None) for text in texts]
        if logprobs is not None:
            new[0]["logprobs"] = logprobs
        events = [event_pieces(self._chunk(run, [one]), None) for one in choices]
        if is_first and self._plan.has_progress:
            events += self._progress(run, sample)
        for i, choice in enumerate(new):
            if i == 0 and fields is not None:
                chunk = self._chunk(run, [{**choice, "attention": fields}], sample)
                events.append(event_pieces(chunk, data))
            else:
                events.append(event_pieces(self._chunk(run, [choice], sample), None))
        return _joined(events)

    def removed(self, run: Run, removal: Removal) -> list[bytes]:
        """What a client is to drop, in a chunk of its own."""
        if self._plan.is_prefill:
            return []
        sample = self._sample(removal.sample)
        self._parts.removed(run, removal)
        again: list[Delta] = []
        if sample.reader is not None:
            taken = taken_back(sample.reader, removal)
            sample.reader, lost = taken.reader, taken.removed
            again = [delta for delta in taken.deltas if delta.call is not None]
            empty: Object = {}
        else:
            lost = removed(removal, sample.shown.take_back(removal.text))
            empty = {"text": ""}
        choices = [*self._begun(sample), {**self._choice(sample, empty, None), "removed": lost}]
        choices += [self._choice(sample, _delta(delta), None) for delta in again]
        return _joined([event_pieces(self._chunk(run, [one], sample), None) for one in choices])

    def done(self, run: Run) -> list[bytes]:
        """The end of each choice, the usage if asked for, and the mark of the end."""
        chunks: list[Object] = []
        for i, generation in enumerate(run.generations):
            sample = self._sample(i)
            chunks += [self._chunk(run, [one]) for one in self._begun(sample)]
            rest: list[Object] = []
            has_calls = False
            if sample.reader is not None:
                text = "" if self._plan.is_prefill else generation.text
                deltas = sample.reader.finish(text)
                if generation.tool_calls is not None:
                    deltas += mod_calls(sample.reader, generation.tool_calls)
                rest = [_delta(delta) for delta in deltas]
                has_calls = sample.reader.has_calls
            elif not self._plan.is_prefill and (text := sample.shown.rest(generation.text)):
                rest = [{"text": text}]
            chunks += [self._chunk(run, [self._choice(sample, one, None)]) for one in rest]
            why = "length"
            if not self._plan.is_prefill:
                why = finish_reason(generation.finish_reason, has_calls=has_calls)
            last = {} if sample.reader is not None else {"text": "", **tool_calls_of(generation)}
            chunks.append(self._chunk(run, [self._choice(sample, last, why)]))
        if self._plan.has_usage:
            usage = usage_of(counts_of(run), is_prefill=self._plan.is_prefill)
            chunks.append({**self._chunk(run, []), "usage": usage})
        chunks[-1]["timings"] = self._sample(0).clock.timings(run)
        return _joined([*([msgspec.json.encode(one)] for one in chunks), [_DONE]])

    def error(self, run: Run | None, answer: Answer) -> list[bytes]:
        """What went wrong."""
        return [msgspec.json.encode(error_body(answer))]

    def _progress(self, run: Run, sample: Sample) -> list[Sequence[bytes]]:
        """Chunks about the prompt, before those of its first token."""
        chunks: list[Object] = []
        for progress, spent in prompt_progress(sample.clock.timings(run)):
            chunks.append({**self._chunk(run, []), "prompt_progress": progress})
            if self._plan.has_timings:
                chunks[-1]["timings"] = spent
        return [event_pieces(one, None) for one in chunks]

    def _sample(self, index: int) -> Sample:
        if index not in self._samples:
            self._samples[index] = Sample(self._plan, index)
        return self._samples[index]

    def _begun(self, sample: Sample) -> list[Object]:
        """The choice that begins a choice: the role, or the echo of the prompt."""
        if sample.has_begun:
            return []
        sample.has_begun = True
        if sample.reader is not None:
            return [self._choice(sample, {"role": "assistant", "content": None}, None)]
        echo, echoed = self._plan.echo(sample.index), self._parts.echoed(sample.index)
        if not echo and echoed is None:
            return []
        logprobs = None if echoed is None else echoed.whole
        return [{**self._choice(sample, {"text": echo}, None), "logprobs": logprobs}]

    def _choice(self, sample: Sample, new: Object, reason: str | None) -> Object:
        body = new if sample.reader is None else {"delta": new}
        return {"index": sample.index, **body, "logprobs": None, "finish_reason": reason}

    def _chunk(self, run: Run, choices: Sequence[Object], sample: Sample | None = None) -> Object:
        kind = "text_completion" if self._plan.reading is None else "chat.completion.chunk"
        chunk = _head(run, self._plan, kind, self._created_s)
        chunk["choices"] = choices
        if sample is not None and self._plan.has_timings:
            chunk["timings"] = sample.clock.timings(run)
        return chunk


def _head(run: Run, plan: Plan, kind: str, created_s: int) -> Object:
    return {
        "id": run.request_id,
        "object": kind,
        "created": created_s,
        "model": plan.model,
        "system_fingerprint": FINGERPRINT,
    }


def _delta(delta: Delta) -> Object:
    if delta.call is not None:
        return {"tool_calls": [_call(delta.call)]}
    return {"reasoning_content": delta.reasoning} if delta.reasoning else {"content": delta.content}


def _call(call: CallDelta) -> Object:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _joined(events: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Pieces of several events as those of one call."""
    pieces: list[bytes] = []
    for event in events:
        pieces += [_NEXT, *event] if pieces else event
    return pieces


# ---- one reply


class Whole:
    """The reply that is sent when every choice is complete.

    Attention and logprobs are encoded when their token arrives, so that the engine gets the memory
    of its rows back.
    """

    def __init__(
        self, plan: Plan, parts: Parts, created_s: int, hold: Reservation, most_bytes: int
    ) -> None:
        """Write what *plan* asks for, up to *most_bytes*, which are counted in *hold*."""
        self._plan = plan
        self._parts = parts
        self._created_s = created_s
        self._hold = hold
        self._lists = Lists(hold, most_bytes)

    @property
    def n_bytes(self) -> int:
        """Bytes of the lists so far."""
        return self._lists.n_bytes

    def echo(self, n_samples: int) -> None:
        """Add the logprobs of the prompts that are shown."""
        for i in range(n_samples):
            if (echoed := self._parts.echoed(i)) is not None:
                for name, elements in echoed.lists.items():
                    for element in elements:
                        self._lists.add(i, f"logprobs.{name}", element)

    def prompt(self, run: Run, block: PromptBlock) -> None:
        """Add rows of the prompt."""
        self._lists.prompt(self._parts.attention, run, block)

    def token(self, run: Run, step: Step) -> None:
        """Add a token's row and logprobs."""
        if self._plan.is_prefill:
            return
        logprobs = self._parts.logprobs(step)
        if logprobs is not None:
            self._hold.take(LOGPROB_BYTES)
            for name, values in logprobs.items():
                self._lists.add(step.sample, f"logprobs.{name}", values[0])
        self._lists.token(self._parts.attention, run, step)

    def body(self, run: Run) -> bytes:
        """The reply."""
        plan = self._plan
        is_chat = plan.reading is not None
        choices = [self._choice(run, i) for i in range(len(run.generations))]
        reply = _head(
            run, plan, "chat.completion" if is_chat else "text_completion", self._created_s
        )
        reply["choices"] = choices
        reply["usage"] = usage_of(counts_of(run), is_prefill=plan.is_prefill)
        reply["timings"] = timings(run.usage)
        if plan.shown_prompt is not None:
            reply["__verbose"] = {"prompt": plan.shown_prompt}
        return msgspec.json.encode(reply)

    def _choice(self, run: Run, i: int) -> Object:
        plan, generation = self._plan, run.generations[i]
        text = "" if plan.is_prefill else generation.text
        choice: Object = {"index": i}
        has_calls = False
        if plan.reading is not None:
            answer = ChatAnswer()
            reader = AnswerReader(plan.reading)
            answer.add(reader.finish(text))
            if generation.tool_calls is not None:
                answer.add(mod_calls(reader, generation.tool_calls))
            has_calls = bool(answer.calls)
            choice["message"] = _message(answer)
        else:
            choice["text"] = plan.echo(i) + text
            choice |= tool_calls_of(generation)
        choice["logprobs"] = self._logprobs(i)
        choice["finish_reason"] = (
            "length"
            if plan.is_prefill
            else finish_reason(generation.finish_reason, has_calls=has_calls)
        )
        for name, elements in self._lists.of(i).items():
            if name in ("attention", "prompt_attention"):
                choice[name] = elements
        return choice

    def _logprobs(self, i: int) -> Mapping[str, Any] | None:
        found = {
            name.removeprefix("logprobs."): elements
            for name, elements in self._lists.of(i).items()
            if name.startswith("logprobs.")
        }
        return found or None


def _message(answer: ChatAnswer) -> Object:
    content = answer.content if answer.content or not answer.calls else None
    message: Object = {"role": "assistant", "content": content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return message
