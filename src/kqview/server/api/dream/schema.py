"""Typed bodies and messages of the dream dialect, both directions.

Unknown fields are ignored. Fields shared with the kobold protocol are in `AttentionFields`; a field
that is absent or null takes its default.
"""

from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from kqview.server.api.wire.attention_protocol import AttentionFields, Logprobs
from kqview.server.api.wire.event_parts import AttentionObject, RunDetails

Encoding = Literal["base64", "binary"]

SUBPROTOCOL: Final = "msgpack"
"""WebSocket subprotocol for messages in MessagePack."""


class Sentence(msgspec.Struct):
    """A range of the prompt whose attention is watched.

    Attributes:
        turn_id: The client's; it is returned unchanged, such as 1.
        sentence_id: The same, such as 2.
        start: Position in ``input_ids`` where it begins, such as 0.
        end: Position before which it ends, such as 5.
    """

    turn_id: int | str
    sentence_id: int | str
    start: int
    end: int


class DreamFields(AttentionFields, kw_only=True):
    """Fields of a generation in this dialect, besides those of both protocols.

    Attributes:
        encoding: How values of "per_layer" and "aggregated" are sent: base64 in the JSON, or as a
            binary frame after it. Without it "aggregated" is a list of numbers, the others are
            base64.
        sentences: Ranges of the prompt to watch; those that get little attention are named at the
            end.
        prune_below: Attention below which a sentence is named, such as 0.01; 1 / tokens of the
            prompt if not given.
    """

    encoding: Encoding | None = None
    sentences: list[Sentence] | None = None
    prune_below: float | None = None


class GenerateBody(DreamFields, kw_only=True):
    """Body of ``POST /api/v1/generate``.

    Attributes:
        compression: "gzip" packs the reply for clients that accept it; "none" if not given.
    """

    compression: Literal["gzip", "none"] | None = None


# ---- messages of the WebSocket, from the client


class Generate(DreamFields, kw_only=True, tag_field="type", tag="generate"):
    """Starts a generation; one at a time on a socket."""


class Cancel(msgspec.Struct, kw_only=True, tag_field="type", tag="cancel"):
    """Ends the generation of that name, or whichever runs; what was generated stays.

    Attributes:
        request_id: The generation to end, such as "r1"; whichever runs if not given.
    """

    request_id: str | None = None


ClientMessage = Generate | Cancel


class Named(msgspec.Struct):
    """What is read of an invalid message, so that its error can name the request."""

    request_id: Any = None


# ---- replies


class LikelyToken(msgspec.Struct):
    """One of the most probable tokens at a position.

    Attributes:
        token_id: Its id, such as 354.
        text: Its text, such as " the".
        logprob: Its logprob before bias, grammar and samplers, such as -1.5.
    """

    token_id: int
    text: str
    logprob: float | None


class GeneratedToken(msgspec.Struct):
    """A token that was generated.

    Attributes:
        token_id: Its id, such as 259.
        text: The text that it completes, such as " t".
        logprob: Its logprob before bias, grammar and samplers, such as -0.6.
        top_logprobs: The most probable tokens at its place, if more were asked for than the token's
            own.
        sample: Index of the sample, such as 0, if there are several.
    """

    token_id: int
    text: str
    logprob: float | UnsetType | None = UNSET
    top_logprobs: list[LikelyToken] | UnsetType = UNSET
    sample: int | UnsetType = UNSET


class AttentionEntry(msgspec.Struct):
    """A token with its attention object.

    Attributes:
        token_id: Id of the token, such as 259.
        text: The text that it completes, such as " t".
        attention: Its attention.
        sample: Index of the sample, such as 0, if there are several.
    """

    token_id: int
    text: str
    attention: AttentionObject
    sample: int | UnsetType = UNSET


class PromptEntry(msgspec.Struct):
    """Rows of the prompt.

    Attributes:
        start: Position of the first token, such as 0.
        rows: How many tokens, such as 6.
        attention: Their attention, with an axis for the rows before that of the columns.
    """

    start: int
    rows: int
    attention: AttentionObject


class PrunableSentence(msgspec.Struct):
    """A sentence that got little attention from the generated tokens.

    Attributes:
        turn_id: That of the request, such as 1.
        sentence_id: That of the request, such as 2.
        max_attention: The most that it got from a token, such as 0.004.
    """

    turn_id: int | str
    sentence_id: int | str
    max_attention: float


class SampleResult(msgspec.Struct):
    """One sample, as KoboldAI's clients expect it.

    Attributes:
        text: The text, such as " teacher.".
        finish_reason: Why it ended: "stop" or "length", such as "length".
        prompt_tokens: Tokens of the prompt, such as 6.
        completion_tokens: Tokens that were generated, such as 2.
        logprobs: Those of its tokens, if asked for.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: Logprobs | UnsetType | None = UNSET


class Details(RunDetails, kw_only=True):
    """What a reply tells of its request.

    Attributes:
        reason: Why the first sample ended exactly: "stop" if the model ended the text,
            "stop_token", "stop_sequence", "length", "cancelled" or "tool_calls", such as "length".
    """

    reason: str


class GenerateReply(msgspec.Struct, kw_only=True):
    """Reply of ``POST /api/v1/generate``; all but ``results`` and ``details`` only if asked for.

    Attributes:
        results: Each sample.
        details: Figures of the request, and what had no effect.
        generated_text: Text of the first sample, such as " teacher.".
        finish_reason: Why the first sample ended, such as "length".
        prunable_sentences: Sentences that got little attention, if there were ``sentences``.
        generated_tokens: Every token.
        prompt_attention: Rows of the prompt, with ``prompt_attention``.
        attention_data: Every token with its attention.
    """

    results: list[SampleResult]
    details: Details
    generated_text: str | UnsetType = UNSET
    finish_reason: str | UnsetType = UNSET
    prunable_sentences: list[PrunableSentence] | UnsetType = UNSET
    generated_tokens: list[GeneratedToken] | UnsetType = UNSET
    prompt_attention: list[PromptEntry] | UnsetType = UNSET
    attention_data: list[AttentionEntry] | UnsetType = UNSET


class ModelInfoReply(msgspec.Struct, kw_only=True):
    """Reply of ``GET /api/v1/model/info``; null is what the model's file does not say.

    Attributes:
        model_name: Its name, such as "demo".
        architecture: Its architecture, such as "llama".
        vocab_size: Tokens of the vocabulary, such as 1024.
        num_layers: Layers, such as 4.
        num_attention_heads: Heads of each, such as 8.
        num_key_value_heads: Heads with keys and values of their own, such as 4.
        hidden_size: Numbers for each token between layers, such as 256.
        max_position_embeddings: Tokens that it was trained with, such as 512.
        rope_theta: Base frequency of its positions, such as 10000.0.
        bos_token_id: Id that begins a text, such as 1.
        eos_token_id: Id that ends one, such as 2.
        special_tokens: Texts and ids of special tokens, such as {"eos_token": "</s>"}.
        chat_template: Its chat template, such as "{{ messages }}".
        torch_dtype: Always null.
        context_length: Longest prompt in tokens that is allowed, such as 2048.
        attention_layers: Layers that rows come from, in the order of the rows' first axis, such as
            [0, 1, 2, 3].
    """

    model_name: str
    architecture: str | None
    vocab_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    hidden_size: int
    max_position_embeddings: int
    rope_theta: float | None
    bos_token_id: int | None
    eos_token_id: int | None
    special_tokens: dict[str, str | int | None]
    chat_template: str | None
    torch_dtype: None
    context_length: int
    attention_layers: list[int]


class LoadBody(msgspec.Struct, kw_only=True):
    """Body of ``POST /api/v1/model/load``; the numbers override the server's settings.

    Attributes:
        model: Name of the file, as ``GET /api/v1/models`` lists it, such as "model.gguf".
        n_ctx: Tokens that a slot holds, such as 4096.
        n_slots: Requests that run at the same time, such as 2.
        n_gpu_layers: Layers on the GPU, such as 99.
    """

    model: str
    n_ctx: int | None = None
    n_slots: int | None = None
    n_gpu_layers: int | None = None


class ModelsReply(msgspec.Struct):
    """Reply of ``GET /api/v1/models``: what may be loaded, and what is.

    Attributes:
        models: Names for ``POST /api/v1/model/load``, such as ["model.gguf"].
        loaded: The one of them that is loaded, such as "model.gguf"; the model's own name if it is
            none of them, null without one.
        model_name: The loaded model's name, as in ``/api/v1/model/info``, such as "demo".
    """

    models: list[str]
    loaded: str | None
    model_name: str | None
