"""The reply of ``POST /api/v1/generate``, for clients of KoboldAI and of the dream API.

Each token's attention is encoded when the token arrives, so that the engine gets its memory back;
the encoded pieces are joined once, at the end.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.generation.stream import Generation
from kqview.server.api.koboldai.events import (
    KoboldLeftOut,
    KoboldToken,
    details_of,
    dream_rows,
    dream_token,
    kobold_reason,
    watch,
)
from kqview.server.api.koboldai.failures import ReplyTooLarge
from kqview.server.api.koboldai.pruning import PrunableSentence
from kqview.server.api.koboldai.request import KoboldGenerateBody, KoboldPlan
from kqview.server.api.wire.attention import event_pieces
from kqview.server.api.wire.event_parts import AttentionObject, ModCall
from kqview.server.api.wire.fields import first
from kqview.server.api.wire.logprobs import Logprobs, LogprobsWriter
from kqview.server.api.wire.mods_field import calls_of
from kqview.server.models.run import Run, Step, TokenLogprobs
from kqview.server.web.budget import Reservation
from kqview.server.web.described import about
from kqview.types import ModelInfo, PromptBlock
from kqview.types.token import Attention

_NUMBER_BYTES: Final = 26  # the longest float in JSON, with its comma
_ENTRY_BYTES: Final = 512  # names, shape and text of a token
_LOGPROB_BYTES: Final = 192  # one of top_logprobs, in all lists together


class AttentionEntry(Struct):
    """A token with its attention object."""

    token_id: Annotated[int, about("Id of the token.", 259)]
    text: Annotated[str, about("The text that it completes.", " t")]
    attention: Annotated[AttentionObject, about("Its attention.")]
    sample: Annotated[int | UnsetType, about("Index of the sample, if there are several.", 0)] = (
        UNSET
    )


class PromptEntry(Struct):
    """Rows of the prompt."""

    start: Annotated[int, about("Position of the first token.", 0)]
    rows: Annotated[int, about("How many tokens.", 6)]
    attention: Annotated[
        AttentionObject,
        about("Their attention, with an axis for the rows before that of the columns."),
    ]


class SampleResult(Struct):
    """One sample, as KoboldAI's clients expect it."""

    text: Annotated[str, about("The text.", " teacher.")]
    finish_reason: Annotated[str, about('Why it ended: "stop" or "length".', "length")]
    prompt_tokens: Annotated[int, about("Tokens of the prompt.", 6)]
    completion_tokens: Annotated[int, about("Tokens that were generated.", 2)]
    logprobs: Annotated[
        Logprobs | UnsetType | None, about("Those of its tokens, if asked for.")
    ] = UNSET


class Details(KoboldLeftOut, kw_only=True):
    """What a reply tells of its request; times and counts are of its first sample."""

    reason: Annotated[
        str,
        about(
            'Why that ended exactly: "stop" if the model ended the text, "stop_token", '
            '"stop_sequence", "length", "cancelled" or "tool_calls".',
            "length",
        ),
    ]
    seed: Annotated[int, about("The seed that was used, also if the request gave none.", 2531011)]
    prompt_tokens: Annotated[int, about("Tokens of the prompt.", 7)]
    cached_tokens: Annotated[
        int, about("Those of them that were in a cache; the others were evaluated.", 0)
    ]
    queue_ms: Annotated[float, about("Milliseconds that it waited for a slot.", 0.1)]
    prompt_ms: Annotated[float, about("Milliseconds from then to the first token.", 4.2)]
    generation_ms: Annotated[float, about("Milliseconds from the first token to the last.", 1.7)]


class GenerateReply(Struct, kw_only=True):
    """Reply of ``POST /api/v1/generate``; all but ``results`` and ``details`` only if asked for."""

    results: Annotated[list[SampleResult], about("Each sample.")]
    details: Annotated[Details, about("Figures of the request, and what had no effect.")]
    generated_text: Annotated[str | UnsetType, about("Text of the first sample.", " teacher.")] = (
        UNSET
    )
    finish_reason: Annotated[str | UnsetType, about("Why the first sample ended.", "length")] = (
        UNSET
    )
    tool_calls: Annotated[list[ModCall] | UnsetType, about("Calls that a mod made.")] = UNSET
    prunable_sentences: Annotated[
        list[PrunableSentence] | UnsetType,
        about("Sentences that got little attention, if there were ``sentences``."),
    ] = UNSET
    generated_tokens: Annotated[list[KoboldToken] | UnsetType, about("Every token.")] = UNSET
    prompt_attention: Annotated[
        list[PromptEntry] | UnsetType, about("Rows of the prompt, with ``prompt_attention``.")
    ] = UNSET
    attention_data: Annotated[
        list[AttentionEntry] | UnsetType, about("Every token with its attention.")
    ] = UNSET


def check_size(
    plan: KoboldPlan,
    model: ModelInfo,
    limit_bytes: int,
    *,
    n_prompt: int,
    n_ctx: int,
    packs: bool,
) -> int:
    """Most bytes that the reply to *plan* may have.

    Args:
        plan: The request's.
        model: The model that answers.
        limit_bytes: The most that are allowed.
        n_prompt: Tokens in the prompt.
        n_ctx: Tokens that a slot holds.
        packs: MessagePack instead of JSON.

    Raises:
        ReplyTooLarge: They are more than *limit_bytes*.
    """
    n_tokens = max(1, min(plan.request.max_tokens, n_ctx - n_prompt + 1))
    total = (_ENTRY_BYTES + (plan.request.sampling.top_logprobs or 0) * _LOGPROB_BYTES) * n_tokens
    if plan.rows is not None:
        # Linear in the columns, so the mean of the first and last row is the mean of all.
        ends = [
            _row_bytes(plan, model, n, packs=packs) for n in (n_prompt, n_prompt + n_tokens - 1)
        ]
        total += n_tokens * sum(ends) // 2
    total *= plan.request.n_samples
    if plan.rows is not None and plan.rows.wanted.prompt:
        total += n_prompt * (_row_bytes(plan, model, n_prompt, packs=packs) + _ENTRY_BYTES)
    if total > limit_bytes:
        raise ReplyTooLarge(
            f"the reply may have {total} bytes, the limit is {limit_bytes}; generate "
            "fewer tokens, ask for less attention (attention_format, attention_layers, dtype), or "
            "use the WebSocket /api/v1/generate/stream",
            reply_bytes=total,
            limit_bytes=limit_bytes,
            prompt_tokens=n_prompt,
        )
    return total


def _row_bytes(plan: KoboldPlan, model: ModelInfo, n_context: int, *, packs: bool) -> int:
    assert plan.rows is not None
    shown = plan.rows.wanted
    n_layers, n_heads = plan.rows.n_layers, plan.rows.n_heads
    if shown.format == "viz":
        return 2 * n_layers * _NUMBER_BYTES
    if shown.format == "sparse":
        return min(shown.top_k, n_context) * (n_layers + 2) * _NUMBER_BYTES
    n_columns = n_context if shown.spans is None else len(shown.spans)
    n_values = n_columns * (n_layers * n_heads if shown.format == "per_layer" else 1)
    if shown.format == "aggregated" and plan.encoding is None and not packs:
        return n_values * _NUMBER_BYTES
    n_bytes = n_values * (2 if shown.dtype == "float16" else 4)
    return n_bytes if packs else -(-n_bytes // 3) * 4


class ReplyBuilder:
    """Builds the reply's body from what a run yields; one thread at a time."""

    def __init__(
        self,
        plan: KoboldPlan,
        body: KoboldGenerateBody,
        token_bytes: Callable[[int], bytes],
        hold: Reservation,
        *,
        packs: bool,
    ) -> None:
        """Answer *plan*.

        Args:
            plan: The request's.
            body: The request.
            token_bytes: Bytes of a token by its id.
            hold: Counts the memory of the reply while it is built.
            packs: MessagePack instead of JSON.
        """
        # A body has no separate frames.
        self._plan = plan if plan.encoding != "binary" else replace(plan, encoding="base64")
        self._token_bytes = token_bytes
        self._hold = hold
        self._packs = packs
        self._encode = msgspec.msgpack.encode if packs else msgspec.json.encode
        shows = first(body.return_attention, body.output_attentions)
        # Dream's own fields follow the results of those who know either field.
        self._has_tokens = shows is not None
        # With attention the text keeps its stop sequence, as its tokens do.
        self._trims_stop = first(body.trim_stop, not shows)
        n_samples = range(plan.request.n_samples)
        self._logprobs: list[LogprobsWriter] = []
        if plan.request.sampling.top_logprobs is not None:
            self._logprobs = [LogprobsWriter(packs=packs) for _ in n_samples]
        self._tokens: list[list[msgspec.Raw]] = [[] for _ in n_samples]
        self._entries: list[list[msgspec.Raw]] = [[] for _ in n_samples]
        self._blocks: list[msgspec.Raw] = []
        self.n_bytes = 0
        """Bytes encoded so far."""

    def prompt(self, run: Run, block: PromptBlock) -> None:
        """Rows of the prompt."""
        assert block.rows is not None
        entry = self._entry(run, block.rows, PromptEntry, start=block.start, rows=block.n_rows)
        self._blocks.append(entry)

    def token(self, run: Run, step: Step) -> None:
        """One token."""
        token, sample = step.token, step.sample
        number = sample if len(self._tokens) > 1 else UNSET
        watch(self._plan, token)
        if self._logprobs and token.logprob is not None:
            top = tuple(token.top_logprobs or ())
            one = TokenLogprobs(token.id, token.logprob, top)
            self._count(self._logprobs[sample].add(one, self._token_bytes))
        if self._has_tokens:
            shown = dream_token(token, self._token_bytes, sample=number)
            self._tokens[sample].append(msgspec.Raw(self._encode(shown)))
            self._count(len(self._tokens[sample][-1]))
        if self._plan.rows is not None and token.attention is not None:
            entry = self._entry(
                run, token.attention, AttentionEntry,
                token_id=token.id, text=token.text, sample=number,
            )  # fmt: skip
            self._entries[sample].append(entry)

    def body(self, run: Run) -> bytes:
        """The whole reply of a run that is over."""
        plan = self._plan
        results = [self._result(run.generations[i], i) for i in range(len(self._tokens))]
        details = Details(reason=run.finish_reason, **details_of(run, plan.ignored))
        lists: dict[str, Any] = {}
        if plan.scores is not None:
            lists["prunable_sentences"] = plan.scores.prunable()
        if self._has_tokens:
            lists["generated_text"] = results[0].text
            lists["finish_reason"] = run.finish_reason
            if run.generations[0].tool_calls is not None:
                lists["tool_calls"] = calls_of(run.generations[0].tool_calls)
            lists["generated_tokens"] = [one for tokens in self._tokens for one in tokens]
        if plan.rows is not None:
            if plan.rows.wanted.prompt:
                lists["prompt_attention"] = self._blocks
            lists["attention_data"] = [one for entries in self._entries for one in entries]
        self._hold.take(self.n_bytes)  # the pieces and the whole at the same time
        whole = self._encode(GenerateReply(results=results, details=details, **lists))
        self._logprobs, self._tokens, self._entries, self._blocks = [], [], [], []
        self._hold.take(-2 * self.n_bytes)
        return whole

    def _result(self, generation: Generation, sample: int) -> SampleResult:
        stop = "" if self._trims_stop else generation.stop_match or ""
        return SampleResult(
            generation.text + stop,
            kobold_reason(generation.finish_reason or "cancelled"),
            generation.usage.prompt_tokens,
            generation.usage.completion_tokens,
            self._logprobs[sample].whole() if self._logprobs else UNSET,
        )

    def _entry(self, run: Run, values: Attention, kind: type[Struct], **fields: Any) -> msgspec.Raw:
        attention, data = dream_rows(self._plan, values, run.count_copied, packs=self._packs)
        entry = kind(attention=attention, **fields)
        if self._packs:
            encoded = msgspec.msgpack.encode(entry)
        else:
            encoded = b"".join(event_pieces(entry, data))
        self._count(len(encoded))
        return msgspec.Raw(encoded)

    def _count(self, n_bytes: int) -> None:
        self._hold.take(n_bytes)
        self.n_bytes += n_bytes
