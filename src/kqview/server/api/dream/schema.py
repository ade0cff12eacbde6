"""Typed bodies and messages of the dream dialect, both directions.

Unknown fields are ignored. Fields shared with the kobold protocol are in `AttentionFields`; a field
that is absent or null takes its default.
"""

from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from kqview.server.api.attention_protocol import AttentionFields, Logprobs

Encoding = Literal["base64", "binary"]

SUBPROTOCOL: Final = "msgpack"
"""WebSocket subprotocol for messages in MessagePack."""


class Sentence(msgspec.Struct):
    """A range of the prompt whose attention is watched: ``start`` inclusive, ``end`` exclusive.

    Both are positions in ``input_ids``; turn_id and sentence_id are the client's and are returned
    unchanged.
    """

    turn_id: int | str
    sentence_id: int | str
    start: int
    end: int


class DreamFields(AttentionFields, kw_only=True):
    """Fields of a generation in this dialect, besides those of both protocols."""

    encoding: Encoding | None = None
    sentences: list[Sentence] | None = None
    prune_below: float | None = None


class GenerateBody(DreamFields, kw_only=True):
    """Body of ``POST /api/v1/generate``."""

    compression: Literal["gzip", "none"] | None = None


# ---- messages of the WebSocket, from the client


class Generate(DreamFields, kw_only=True, tag_field="type", tag="generate"):
    """Starts a generation; one at a time on a socket."""


class Cancel(msgspec.Struct, kw_only=True, tag_field="type", tag="cancel"):
    """Ends the generation of that name, or whichever runs; what was generated stays."""

    request_id: str | None = None


ClientMessage = Generate | Cancel


class Named(msgspec.Struct):
    """What is read of an invalid message, so that its error can name the request."""

    request_id: Any = None


# ---- replies


class LikelyToken(msgspec.Struct):
    """One of the most probable tokens at a position."""

    token_id: int
    text: str
    logprob: float | None


class GeneratedToken(msgspec.Struct):
    """A token that was generated; ``sample`` if there are several."""

    token_id: int
    text: str
    logprob: float | UnsetType | None = UNSET
    top_logprobs: list[LikelyToken] | UnsetType = UNSET
    sample: int | UnsetType = UNSET


class AttentionEntry(msgspec.Struct):
    """A token with its attention object."""

    token_id: int
    text: str
    attention: dict[str, Any]
    sample: int | UnsetType = UNSET


class PromptEntry(msgspec.Struct):
    """Rows of the prompt's tokens ``start .. start + rows``."""

    start: int
    rows: int
    attention: dict[str, Any]


class PrunableSentence(msgspec.Struct):
    """A sentence that got little attention from the generated tokens."""

    turn_id: int | str
    sentence_id: int | str
    max_attention: float


class SampleResult(msgspec.Struct):
    """One sample, as KoboldAI's clients expect it."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: Logprobs | UnsetType | None = UNSET


class GenerateReply(msgspec.Struct, kw_only=True):
    """Reply of ``POST /api/v1/generate``; all but ``results`` only if asked for.

    ``generated_text`` and ``finish_reason`` are those of the first sample.
    """

    results: list[SampleResult]
    generated_text: str | UnsetType = UNSET
    finish_reason: str | UnsetType = UNSET
    prunable_sentences: list[PrunableSentence] | UnsetType = UNSET
    generated_tokens: list[GeneratedToken] | UnsetType = UNSET
    prompt_attention: list[PromptEntry] | UnsetType = UNSET
    attention_data: list[AttentionEntry] | UnsetType = UNSET


class ModelInfoReply(msgspec.Struct, kw_only=True):
    """Reply of ``GET /api/v1/model/info``; null is what the model's file does not say.

    ``context_length`` is the longest prompt allowed, ``max_position_embeddings`` what the model was
    trained for. ``attention_layers`` are those that rows come from, in the order of the rows' first
    axis.
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
    """Body of ``POST /api/v1/model/load``; the numbers override the server's settings."""

    model: str
    n_ctx: int | None = None
    n_slots: int | None = None
    n_gpu_layers: int | None = None


class ModelsReply(msgspec.Struct):
    """Reply of ``GET /api/v1/models``: what may be loaded, and what is."""

    models: list[str]
    loaded: str | None
