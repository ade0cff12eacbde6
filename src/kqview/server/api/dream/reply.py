"""The reply of ``POST /api/v1/generate``, put together while the tokens come.

Each token's attention is encoded when it comes, so that the engine has its memory back; the encoded
pieces are joined once, at the end. Pure but for what it keeps; one thread at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import msgspec

from kqview.generation.stream import Generation
from kqview.server.api.attention_objects import event_pieces
from kqview.server.api.dream import schema
from kqview.server.api.dream.convert import Plan, ReplyTooLarge, kobold_reason
from kqview.server.api.dream.events import (
    Object,
    attention_parts,
    token_fields,
    watch,
)
from kqview.server.api.logprobs import Logprobs, LogprobsWriter
from kqview.server.attention import AttentionWanted
from kqview.server.budget import Hold
from kqview.server.run import Run, Step, TokenLogprobs
from kqview.server.wire import with_lists
from kqview.types import ModelInfo, PromptBlock

_NUMBER_BYTES: Final = 26  # a float in JSON with its comma, at the longest
_ENTRY_BYTES: Final = 512  # names, shape and text of a token
_LOGPROB_BYTES: Final = 192  # one of top_logprobs, in all lists together


def reply_bytes(plan: Plan, model: ModelInfo, *, n_prompt: int, n_ctx: int, packs: bool) -> int:
    """Most bytes that the reply of *plan* may have.

    Args:
        plan: Of the request.
        model: That answers.
        n_prompt: Tokens of the prompt.
        n_ctx: Tokens that a slot holds.
        packs: MessagePack in place of JSON.
    """
    n_tokens = max(1, min(plan.request.max_tokens, n_ctx - n_prompt + 1))
    entry = _ENTRY_BYTES + (plan.request.sampling.top_logprobs or 0) * _LOGPROB_BYTES
    total = entry * n_tokens
    shown = plan.shown
    if shown is not None:
        n_last = n_prompt + n_tokens - 1
        # Linear in the columns, so the mean of the first and the last row is that of all.
        ends = [_row_bytes(plan, shown, model, n, packs=packs) for n in (n_prompt, n_last)]
        total += n_tokens * sum(ends) // 2
    total *= plan.request.n_samples
    if shown is not None and shown.prompt:
        total += n_prompt * (_row_bytes(plan, shown, model, n_prompt, packs=packs) + _ENTRY_BYTES)
    return total


def _row_bytes(
    plan: Plan, shown: AttentionWanted, model: ModelInfo, n_context: int, *, packs: bool
) -> int:
    n_layers = len(model.attention_layers if shown.layers is None else shown.layers)
    n_heads = model.n_head if shown.heads is None else len(shown.heads)
    if shown.format == "viz":
        return 2 * n_layers * _NUMBER_BYTES
    if shown.format == "sparse":
        return min(shown.top_k, n_context) * (n_layers + 2) * _NUMBER_BYTES
    n_values = n_context * (n_layers * n_heads if shown.format == "per_layer" else 1)
    if shown.format == "aggregated" and plan.encoding is None and not packs:
        return n_values * _NUMBER_BYTES
    n_bytes = n_values * (2 if shown.dtype == "float16" else 4)
    return n_bytes if packs else -(-n_bytes // 3) * 4


def check_reply(n_bytes: int, limit_bytes: int, *, n_prompt: int) -> None:
    """Refuse a reply of *n_bytes* above the limit.

    Raises:
        ReplyTooLarge: It is.
    """
    if n_bytes > limit_bytes:
        raise ReplyTooLarge(
            f"generate.reply: it may have {n_bytes} bytes, the limit is {limit_bytes}; generate "
            "fewer tokens, ask for less attention (attention_format, attention_layers, dtype), or "
            "take the WebSocket /api/v1/generate/stream",
            reply_bytes=n_bytes,
            limit_bytes=limit_bytes,
            prompt_tokens=n_prompt,
        )


@dataclass(slots=True)
class _Sample:
    logprobs: LogprobsWriter
    tokens: list[bytes] = field(default_factory=list[bytes])
    entries: list[bytes] = field(default_factory=list[bytes])


class ReplyBuilder:
    """Takes what a run gives, and makes the body of it."""

    def __init__(
        self,
        plan: Plan,
        token_bytes: Callable[[int], bytes],
        hold: Hold,
        *,
        packs: bool,
        has_tokens: bool,
        has_logprobs: bool,
        trims_stop: bool,
    ) -> None:
        """Answer *plan*.

        Args:
            plan: Of the request.
            token_bytes: Bytes of a token by its id.
            hold: Counts what the reply takes in memory while it is built.
            packs: MessagePack in place of JSON.
            has_tokens: Send this dialect's own fields behind the results.
            has_logprobs: Send logprobs with the results.
            trims_stop: Leave the stop sequence out of the text.
        """
        # There are no frames beside a body.
        self._plan = plan if plan.encoding != "binary" else replace(plan, encoding="base64")
        self._token_bytes = token_bytes
        self._hold = hold
        self._packs = packs
        self._has_tokens = has_tokens
        self._has_logprobs = has_logprobs
        self._trims_stop = trims_stop
        self._samples = [
            _Sample(LogprobsWriter(packs=packs)) for _ in range(plan.request.n_samples)
        ]
        self._blocks: list[bytes] = []
        self.n_bytes = 0
        """Bytes of what was encoded so far."""

    def prompt(self, run: Run, block: PromptBlock) -> None:
        """Rows of the prompt."""
        assert block.rows is not None
        entry = {"start": block.start, "rows": block.n_rows}
        self._blocks.append(self._with_attention(run, entry, block.rows))

    def token(self, run: Run, step: Step) -> None:
        """One token."""
        token, sample = step.token, self._samples[step.sample]
        watch(self._plan, token)
        number = {"sample": step.sample} if len(self._samples) > 1 else {}
        if self._has_logprobs and token.logprob is not None:
            top = tuple(token.top_logprobs or ())
            one = TokenLogprobs(token.id, token.logprob, top)
            self._count(sample.logprobs.add(one, self._token_bytes))
        if self._has_tokens:
            fields = token_fields(token, self._text_of)
            sample.tokens.append(self._encoded({**fields, **number}))
            self._count(len(sample.tokens[-1]))
        if self._plan.shown is not None and token.attention is not None:
            entry = {"token_id": token.id, "text": token.text, **number}
            sample.entries.append(self._with_attention(run, entry, token.attention))

    def body(self, run: Run) -> bytes:
        """The whole reply; of a run that is over."""
        ends = list(zip(run.generations, self._samples, strict=True))
        head: Object = {"results": [self._result(one, sample) for one, sample in ends]}
        if self._plan.scores is not None:
            head["prunable_sentences"] = self._plan.scores.prunable()
        lists: list[tuple[str, Sequence[bytes]]] = []
        if self._has_tokens:
            head["generated_text"] = self._text(run.generations[0])
            head["finish_reason"] = run.finish_reason
            lists.append(("generated_tokens", [t for one in self._samples for t in one.tokens]))
        if self._plan.shown is not None:
            if self._plan.shown.prompt:
                lists.append(("prompt_attention", self._blocks))
            lists.append(("attention_data", [e for one in self._samples for e in one.entries]))
        self._hold.take(self.n_bytes)  # pieces and whole at a time
        whole = with_lists(head, lists, packs=self._packs)
        self._samples, self._blocks = [], []
        self._hold.put(2 * self.n_bytes)
        return whole

    def _result(self, generation: Generation, sample: _Sample) -> schema.SampleResult:
        usage = generation.usage
        result = schema.SampleResult(
            self._text(generation),
            kobold_reason(generation.finish_reason or "cancelled"),
            usage.prompt_tokens,
            usage.completion_tokens,
        )
        if self._has_logprobs:
            # Encoded already; the field says what it is of.
            result.logprobs = cast("Logprobs | None", sample.logprobs.whole())
        return result

    def _text_of(self, id_: int) -> str:
        return self._token_bytes(id_).decode("utf-8", "replace")

    def _text(self, generation: Generation) -> str:
        stop = "" if self._trims_stop else generation.stop_match or ""
        return generation.text + stop

    def _with_attention(self, run: Run, entry: Object, rows: Any) -> bytes:
        attention, data, _ = attention_parts(self._plan, rows, run.encoder, packs=self._packs)
        entry["attention"] = attention
        if self._packs:
            encoded = msgspec.msgpack.encode(entry)
        else:
            encoded = b"".join(event_pieces(entry, data))
        self._count(len(encoded))
        return encoded

    def _count(self, n_bytes: int) -> None:
        self._hold.take(n_bytes)
        self.n_bytes += n_bytes

    def _encoded(self, value: Object) -> bytes:
        encode = msgspec.msgpack.encode if self._packs else msgspec.json.encode
        return encode(value)
