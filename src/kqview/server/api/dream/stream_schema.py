"""Events of the dream dialect's WebSocket, and its failures, for the description.

`events` writes them; a test compares what is sent with these types.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.dream.schema import GeneratedToken, PrunableSentence
from kqview.server.api.wire.event_parts import AttentionObject, ModCall, Removed, RunDetails
from kqview.server.web.described import example


class Failure(Struct, kw_only=True):
    """What went wrong, with the numbers that belong to it.

    Attributes:
        type: Always "error".
        error: What was wrong, what the limit is and what to do.
        error_code: Kind of the failure for programs.
        context_length: Longest prompt in tokens, of a prompt that is too long and where memory was
            short.
        prompt_tokens: Tokens of the prompt, if they were counted.
        vocab_size: Tokens of the vocabulary, of ids that are not in it.
        reply_bytes: Bytes that the reply may have, if that is too much.
        limit_bytes: The most that it may have.
        attention_used_mb: MiB of attention that is held, where memory was short.
        attention_budget_mb: The most that may be held.
        vram_used_mb: MiB that all GPUs have in use, where memory was short.
        vram_total_mb: MiB that they have.
    """

    type: Literal["error"]
    error: Annotated[str, example("prune_below is 2")]
    error_code: Annotated[str, example("INVALID_REQUEST")]
    context_length: Annotated[int | UnsetType, example(2048)] = UNSET
    prompt_tokens: Annotated[int | UnsetType, example(3000)] = UNSET
    vocab_size: Annotated[int | UnsetType, example(1024)] = UNSET
    reply_bytes: Annotated[int | UnsetType, example(300000000)] = UNSET
    limit_bytes: Annotated[int | UnsetType, example(268435456)] = UNSET
    attention_used_mb: Annotated[int | UnsetType, example(900)] = UNSET
    attention_budget_mb: Annotated[int | UnsetType, example(1024)] = UNSET
    vram_used_mb: Annotated[int | UnsetType, example(9000)] = UNSET
    vram_total_mb: Annotated[int | UnsetType, example(24000)] = UNSET


class FailureDetail(Struct, kw_only=True):
    """A failure in KoboldAI's words.

    Attributes:
        msg: What was wrong, what the limit is and what to do.
        type: Kind of the failure.
    """

    msg: Annotated[str, example("top_p is 2")]
    type: Annotated[str, example("bad_input")]


class SharedFailure(Failure, kw_only=True):
    """What went wrong, on a route that KoboldAI's clients call too.

    Attributes:
        detail: The same as KoboldAI says it.
    """

    detail: FailureDetail


class ErrorEvent(Failure, kw_only=True):
    """A failure; of a generation that runs, its end.

    Attributes:
        request_id: Name of the request; absent if the message had none.
    """

    request_id: Annotated[str | UnsetType, example("r1")] = UNSET


class TokenEvent(Struct, kw_only=True):
    """A token, with its attention if asked for.

    Attributes:
        type: Always "token".
        request_id: Name of the request.
        token: The token.
        sample: Index of the sample, if there are several.
        attention: Its attention.
    """

    type: Literal["token"]
    request_id: Annotated[str, example("r1")]
    token: GeneratedToken
    sample: Annotated[int | UnsetType, example(0)] = UNSET
    attention: AttentionObject | UnsetType = UNSET


class PromptEvent(Struct, kw_only=True):
    """Rows of the prompt, with ``prompt_attention``.

    Attributes:
        type: Always "prompt_attention".
        request_id: Name of the request.
        start: Position of their first token.
        rows: How many tokens they are of.
        attention: Their attention.
    """

    type: Literal["prompt_attention"]
    request_id: Annotated[str, example("r1")]
    start: Annotated[int, example(0)]
    rows: Annotated[int, example(6)]
    attention: AttentionObject


class RemovedEvent(Removed, kw_only=True):
    """What mods took back, which a client drops.

    Attributes:
        type: Always "removed".
        request_id: Name of the request.
        sample: Index of the sample, if there are several.
    """

    type: Literal["removed"]
    request_id: Annotated[str, example("r1")]
    sample: Annotated[int | UnsetType, example(0)] = UNSET


class PruningEvent(Struct, kw_only=True):
    """Sentences that got little attention, before the end, if there were ``sentences``.

    Attributes:
        type: Always "pruning_suggestion".
        request_id: Name of the request.
        prunable_sentences: The sentences, the one with the least attention first.
    """

    type: Literal["pruning_suggestion"]
    request_id: Annotated[str, example("r1")]
    prunable_sentences: list[PrunableSentence]


class SampleEnd(Struct, kw_only=True):
    """The end of a sample.

    Attributes:
        sample: Its index.
        finish_reason: Why it ended.
        total_tokens: Tokens that were generated.
    """

    sample: Annotated[int, example(0)]
    finish_reason: Annotated[str, example("length")]
    total_tokens: Annotated[int, example(2)]


class DoneEvent(RunDetails, kw_only=True):
    """The end, with the figures of the request.

    Attributes:
        type: Always "done".
        request_id: Name of the request.
        finish_reason: Why it ended: "stop", "stop_token", "stop_sequence", "length" or "cancelled".
        total_tokens: Tokens that were generated.
        generation_time_ms: Milliseconds from admission to the end.
        samples: The end of each sample, if there are several.
        tool_calls: Calls that a mod made.
    """

    type: Literal["done"]
    request_id: Annotated[str, example("r1")]
    finish_reason: Annotated[str, example("length")]
    total_tokens: Annotated[int, example(2)]
    generation_time_ms: Annotated[int, example(4)]
    samples: list[SampleEnd] | UnsetType = UNSET
    tool_calls: list[ModCall] | UnsetType = UNSET
