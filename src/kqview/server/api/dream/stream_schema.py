"""Events of the dream dialect's WebSocket, and its failures, for the description.

`events` writes them; a test compares what is sent with these types.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.dream.schema import GeneratedToken, PrunableSentence
from kqview.server.api.wire.event_parts import AttentionObject, ModCall, Removed, RunDetails


class Failure(Struct, kw_only=True):
    """What went wrong, with the numbers that belong to it.

    Attributes:
        type: Always "error".
        error: What was wrong, what the limit is and what to do, such as "prune_below is 2".
        error_code: Kind of the failure for programs, such as "INVALID_REQUEST".
        context_length: Longest prompt in tokens, such as 2048, of a prompt that is too long and
            where memory was short.
        prompt_tokens: Tokens of the prompt, such as 3000, if they were counted.
        vocab_size: Tokens of the vocabulary, such as 1024, of ids that are not in it.
        reply_bytes: Bytes that the reply may have, such as 300000000, if that is too much.
        limit_bytes: The most that it may have, such as 268435456.
        attention_used_mb: MiB of attention that is held, such as 900, where memory was short.
        attention_budget_mb: The most that may be held, such as 1024.
        vram_used_mb: MiB that all GPUs have in use, such as 9000, where memory was short.
        vram_total_mb: MiB that they have, such as 24000.
    """

    type: Literal["error"]
    error: str
    error_code: str
    context_length: int | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    vocab_size: int | UnsetType = UNSET
    reply_bytes: int | UnsetType = UNSET
    limit_bytes: int | UnsetType = UNSET
    attention_used_mb: int | UnsetType = UNSET
    attention_budget_mb: int | UnsetType = UNSET
    vram_used_mb: int | UnsetType = UNSET
    vram_total_mb: int | UnsetType = UNSET


class FailureDetail(Struct, kw_only=True):
    """A failure in KoboldAI's words.

    Attributes:
        msg: What was wrong, what the limit is and what to do, such as "top_p is 2".
        type: Kind of the failure, such as "bad_input".
    """

    msg: str
    type: str


class SharedFailure(Failure, kw_only=True):
    """What went wrong, on a route that KoboldAI's clients call too.

    Attributes:
        detail: The same as KoboldAI says it.
    """

    detail: FailureDetail


class ErrorEvent(Failure, kw_only=True):
    """A failure; of a generation that runs, its end.

    Attributes:
        request_id: Name of the request, such as "r1"; absent if the message had none.
    """

    request_id: str | UnsetType = UNSET


class TokenEvent(Struct, kw_only=True):
    """A token, with its attention if asked for.

    Attributes:
        type: Always "token".
        request_id: Name of the request, such as "r1".
        token: The token.
        sample: Index of the sample, such as 0, if there are several.
        attention: Its attention.
    """

    type: Literal["token"]
    request_id: str
    token: GeneratedToken
    sample: int | UnsetType = UNSET
    attention: AttentionObject | UnsetType = UNSET


class PromptEvent(Struct, kw_only=True):
    """Rows of the prompt, with ``prompt_attention``.

    Attributes:
        type: Always "prompt_attention".
        request_id: Name of the request, such as "r1".
        start: Position of their first token, such as 0.
        rows: How many tokens they are of, such as 6.
        attention: Their attention.
    """

    type: Literal["prompt_attention"]
    request_id: str
    start: int
    rows: int
    attention: AttentionObject


class RemovedEvent(Removed, kw_only=True):
    """What mods took back, which a client drops.

    Attributes:
        type: Always "removed".
        request_id: Name of the request, such as "r1".
        sample: Index of the sample, such as 0, if there are several.
    """

    type: Literal["removed"]
    request_id: str
    sample: int | UnsetType = UNSET


class PruningEvent(Struct, kw_only=True):
    """Sentences that got little attention, before the end, if there were ``sentences``.

    Attributes:
        type: Always "pruning_suggestion".
        request_id: Name of the request, such as "r1".
        prunable_sentences: The sentences, the one with the least attention first.
    """

    type: Literal["pruning_suggestion"]
    request_id: str
    prunable_sentences: list[PrunableSentence]


class SampleEnd(Struct, kw_only=True):
    """The end of a sample.

    Attributes:
        sample: Its index, such as 0.
        finish_reason: Why it ended, such as "length".
        total_tokens: Tokens that were generated, such as 2.
    """

    sample: int
    finish_reason: str
    total_tokens: int


class DoneEvent(RunDetails, kw_only=True):
    """The end, with the figures of the request.

    Attributes:
        type: Always "done".
        request_id: Name of the request, such as "r1".
        finish_reason: Why it ended: "stop", "stop_token", "stop_sequence", "length" or
            "cancelled", such as "length".
        total_tokens: Tokens that were generated, such as 2.
        generation_time_ms: Milliseconds from admission to the end, such as 4.
        samples: The end of each sample, if there are several.
        tool_calls: Calls that a mod made.
    """

    type: Literal["done"]
    request_id: str
    finish_reason: str
    total_tokens: int
    generation_time_ms: int
    samples: list[SampleEnd] | UnsetType = UNSET
    tool_calls: list[ModCall] | UnsetType = UNSET
