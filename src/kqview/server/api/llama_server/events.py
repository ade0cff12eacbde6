"""Completions of llama.cpp's server while they come: events of a stream, or one reply. Pure."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import exp
from types import MappingProxyType
from typing import Any, Final, cast

import msgspec
from msgspec import UNSET

from kqview.engine import Engine
from kqview.generation.stream import Generation
from kqview.server.api.llama_server import schema
from kqview.server.api.llama_server.convert import generation_settings
from kqview.server.api.wire.attention import ReplyLists
from kqview.server.api.wire.chat import ReplyWriter
from kqview.server.api.wire.failures import error_body
from kqview.server.api.wire.fields import (
    Clock,
    first,
    most_tokens_of,
    names_of,
    options_of,
    prompt_progress,
    sampling_of,
    timings,
)
from kqview.server.api.wire.mods_field import removed, tool_calls_of
from kqview.server.api.wire.reasoning_cap import cap_of_texts
from kqview.server.errors import Answer
from kqview.server.models.run import GenerateRequest, Removal, Run, Step
from kqview.server.settings import Settings
from kqview.server.web.endpoint import NEXT_DATA
from kqview.stop_strings import ShownText
from kqview.types import PromptBlock, Token

_TOKEN_BYTES: Final = 256  # of memory: an id, its text, its place in lists
_LOGPROB_BYTES: Final = 512
_STOP_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "stop": "eos",
        "stop_token": "eos",
        "stop_sequence": "word",
        "length": "limit",
        "tool_calls": "eos",
    }
)


class CompletionText:
    """One text: what was sent of it, and what the reply says of it at its end."""

    def __init__(self, index: int, prompt: str, n_prompt: int, stops: str | Sequence[str]) -> None:
        """Begin the text of sample *index*, after *n_prompt* tokens; *stops* are not shown."""
        self.index = index
        self.prompt = prompt
        self.n_prompt = n_prompt
        self.ids: list[int] = []
        self.logprobs: list[tuple[int, Any]] = []  # JSON, and where its text begins
        self.has_discarded = False
        self._n_text = 0
        self.shown = ShownText((stops,) if isinstance(stops, str) else stops)
        self.clock = Clock(index)

    def add(self, token: Token) -> str:
        """Add a token; returns the text that may be shown now."""
        self.clock.note()
        self.ids.append(token.id)
        self.has_discarded = self.has_discarded or bool(token.discarded)
        self._n_text += len(token.text)
        return self.shown.feed(token.text)

    def keep(self, token: Token, logprob: schema.CompletionLogprob) -> None:
        """Keep the logprob of the token that was just added.

        As JSON: a large reply has objects enough for the garbage collector to stop the event loop.
        """
        data = msgspec.Raw(msgspec.json.encode(logprob))
        self.logprobs.append((self._n_text - len(token.text), data))

    def is_late(self, limit_ms: int | None, text: str) -> bool:
        """Whether it ends with the line that *text* ends, after *limit_ms* of generating."""
        first_s = self.clock.first_s
        if not limit_ms or limit_ms < 0 or "\n" not in text or first_s is None:
            return False
        return 1000 * (time.monotonic() - first_s) > limit_ms


class CompletionEvents(ReplyWriter):
    """``data: {...}`` for each token, and for the end of each text; no ``[DONE]``."""

    def __init__(
        self,
        body: schema.CompletionFields,
        prompts: Sequence[tuple[Sequence[int], str]],
        engine: Engine,
        settings: Settings,
        *,
        request_id: str,
        model: str,
    ) -> None:
        """Write what *body* asks for.

        Args:
            body: The request.
            prompts: Ids and text of each prompt.
            engine: The engine that will answer.
            settings: Those of the server.
            request_id: Its name.
            model: Name of the model.

        Raises:
            RequestError: Or one of its kinds: it cannot work.
            NotSupported: As `sampling_of`.
        """
        endless = settings.max_tokens if settings.context_shift else engine.n_ctx
        wanted = first(most_tokens_of(body, "max_tokens"), endless)
        n = self._most_tokens = min(wanted, settings.max_tokens)
        tokenize = partial(engine.tokenize, add_special=False, parse_special=False)
        sampling = sampling_of(body, tokenize=tokenize)
        names, forcing = names_of(body), None
        if (budget := most_tokens_of(body, "reasoning_budget")) is not None:
            texts = [text for _, text in prompts]
            forcing = cap_of_texts(budget, texts, sampling, max_tokens=max(n, 1), names=names)
        (ids, _), *more = prompts
        self.request = GenerateRequest(
            prompt=ids,
            more_prompts=tuple(ids for ids, _ in more),
            max_tokens=max(n, 1),
            sampling=sampling,
            request_id=request_id,
            n_samples=first(body.n_cmpl, body.n, 1),
            names=names,
            forcing=forcing,
            **options_of(body, settings),
        )
        ends = (engine.model.eos_token_id, engine.model.eot_token_id)
        ids_of_ends = [id_ for id_ in ends if id_ is not None]
        self._settings = generation_settings(
            body, sampling, wanted, drafter=engine.draft, ends=ids_of_ends
        )
        self._is_prefill = n == 0  # the one token that comes is not shown
        self._body = body
        self._model = model
        self._bytes_of = engine.token_bytes
        self._prompts = prompts

    @cached_property
    def _samples(self) -> list[CompletionText]:
        """Of a run that was admitted: before, there may be any number."""
        stops, n = self.request.sampling.stop, self.request.n_samples
        texts = [one for one in self._prompts for _ in range(n)]
        return [CompletionText(i, text, len(ids), stops) for i, (ids, text) in enumerate(texts)]

    # ---- a stream

    def prompt(self, run: Run, block: PromptBlock) -> list[bytes]:
        """Nothing."""
        return []

    def token(self, run: Run, step: Step) -> list[bytes]:
        """One token, with the text that may be shown now."""
        if self._is_prefill:
            return []
        sample, text = self._added(run, step)
        token, body = step.token, self._body
        partial = self._partial(run, sample, text, [token.id])
        if token.logprob is not None:
            partial.completion_probabilities = [self._logprob(token)]
        events = [partial]
        if body.return_progress and len(sample.ids) == 1:
            events = [*self._progress(run, sample), partial]
        return [NEXT_DATA.join(map(msgspec.json.encode, events))]

    def removed(self, run: Run, removal: Removal) -> list[bytes]:
        """What a client is to drop, in an event of its own."""
        if self._is_prefill:
            return []
        sample = self._samples[removal.sample]
        del sample.ids[removal.n_left :]
        lost = removed(removal, sample.shown.take_back(removal.text))
        partial = self._partial(run, sample, "", [])
        return [msgspec.json.encode(msgspec.structs.replace(partial, removed=lost))]

    def done(self, run: Run) -> list[bytes]:
        """The end of each text, after what was held back of it."""
        events: list[bytes] = []
        for sample in self._samples:
            rest = sample.shown.rest(self._text(run, sample))
            if rest:
                events.append(msgspec.json.encode(self._partial(run, sample, rest, [])))
            events.append(msgspec.json.encode(self._end(run, sample, is_stream=True)))
        return [NEXT_DATA.join(events)]

    def error(self, run: Run | None, answer: Answer) -> list[bytes]:
        """What went wrong."""
        return [msgspec.json.encode(error_body(answer))]

    # ---- one reply

    def add(self, lists: ReplyLists, run: Run, step: Step) -> None:
        """Add a token of a reply that is not streamed."""
        if self._is_prefill:
            return
        sample, _ = self._added(run, step)
        token, n_bytes = step.token, _TOKEN_BYTES
        if token.logprob is not None:
            sample.keep(token, self._logprob(token))
            n_bytes += _LOGPROB_BYTES * (1 + len(token.top_logprobs or ()))
        run.hold.take(n_bytes)
        self.n_bytes += n_bytes

    def whole(self, run: Run, lists: ReplyLists) -> bytes:
        """The reply: an object, or a list of them for several texts."""
        ends = [self._end(run, sample, is_stream=False) for sample in self._samples]
        return msgspec.json.encode(ends if len(ends) > 1 else ends[0])

    # ---- parts

    def _added(self, run: Run, step: Step) -> tuple[CompletionText, str]:
        sample = self._samples[step.sample]
        text = sample.add(step.token)
        if sample.is_late(self._body.t_max_predict_ms, text):
            run.generations[step.sample].cancel()
        return sample, text

    def _text(self, run: Run, sample: CompletionText) -> str:
        return "" if self._is_prefill else run.generations[sample.index].text

    def _partial(
        self, run: Run, sample: CompletionText, text: str, ids: list[int]
    ) -> schema.Partial:
        return schema.Partial(
            index=sample.index,
            content=text,
            tokens=ids,
            id_slot=_slot(run.generations[sample.index]),
            tokens_predicted=len(sample.ids),
            tokens_evaluated=sample.n_prompt,
            timings=sample.clock.timings(run) if self._body.timings_per_token else UNSET,
        )

    def _progress(self, run: Run, sample: CompletionText) -> list[schema.Partial]:
        empty = msgspec.structs.replace(self._partial(run, sample, "", []), tokens_predicted=0)
        has_timings = self._body.timings_per_token
        return [
            msgspec.structs.replace(
                empty, prompt_progress=progress, timings=spent if has_timings else UNSET
            )
            for progress, spent in prompt_progress(sample.clock.timings(run))
        ]

    def _end(self, run: Run, sample: CompletionText, *, is_stream: bool) -> Any:
        generation = run.generations[sample.index]
        text, usage = self._text(run, sample), generation.usage
        # A prompt that is only evaluated has a hidden token; how that ended means nothing.
        reason = "length" if self._is_prefill else generation.finish_reason
        stop_match = "" if self._is_prefill else generation.stop_match or ""
        n_tokens = len(sample.ids)
        n_predicted = n_tokens + (reason == "stop")  # the end of text counts
        is_full = reason == "length" and n_tokens < self._most_tokens
        is_cut = reason == "cancelled" and run.error is None
        # A text that begins with its stop word has no tokens to show.
        keeps_empty = not text and not stop_match
        shown = [one for start, one in sample.logprobs if start < len(text) or keeps_empty]
        keeps_ids = bool(self._body.return_tokens) and not is_stream
        reply = schema.Completion(
            index=sample.index,
            content="" if is_stream else text,
            tokens=sample.ids if keeps_ids else [],
            id_slot=_slot(generation),
            model=self._model,
            tokens_predicted=n_predicted,
            tokens_evaluated=sample.n_prompt,
            generation_settings=dict(self._settings),
            prompt=sample.prompt,
            has_new_line="\n" in text,
            truncated=is_full or sample.has_discarded,
            stop_type="limit" if is_cut else _STOP_TYPES.get(reason or "", "none"),
            stopping_word=stop_match,
            tokens_cached=sample.n_prompt + max(0, n_tokens - 1),
            timings=timings(replace(usage, completion_tokens=n_predicted)),
            completion_probabilities=UNSET if is_stream or not sample.logprobs else shown,
        )
        reply.tool_calls = tool_calls_of(generation)
        if not self._body.response_fields:
            return reply
        return _named(msgspec.json.decode(msgspec.json.encode(reply)), self._body.response_fields)

    def _logprob(self, token: Token) -> schema.CompletionLogprob:
        assert token.logprob is not None
        one = schema.CompletionLogprob(token.id, *self._written(token.id))
        top, of = token.top_logprobs or (), schema.CompletionTopLogprob
        if self.request.sampling.post_sampling_probs:
            one.prob = exp(token.logprob)
            one.top_probs = [of(id_, *self._written(id_), prob=exp(p)) for id_, p in top]
        else:
            one.logprob = token.logprob
            one.top_logprobs = [of(id_, *self._written(id_), p) for id_, p in top]
        return one

    def _written(self, id_: int) -> tuple[str, list[int]]:
        data = self._bytes_of(id_)
        return data.decode("utf-8", "replace"), list(data)


def _slot(generation: Generation) -> int:
    return -1 if generation.slot is None else generation.slot


def _named(reply: Mapping[str, Any], paths: Sequence[str]) -> Mapping[str, Any]:
    """The values of *reply* that *paths* name; a slash leads into an object."""
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = reply
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = cast("dict[str, Any]", value)[name]
        else:
            found[path] = value
    return found
