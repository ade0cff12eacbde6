"""Typed bodies and messages of the dream dialect, both directions.

Unknown fields are ignored. Fields shared with the kobold protocol are in `AttentionFields`; a field
that is absent or null takes its default.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from kqview.server.api.wire.attention_protocol import AttentionFields, Logprobs
from kqview.server.api.wire.event_parts import AttentionObject, RunDetails
from kqview.server.web.described import example

Encoding = Literal["base64", "binary"]

SUBPROTOCOL: Final = "msgpack"
"""WebSocket subprotocol for messages in MessagePack."""


class Sentence(msgspec.Struct):
    """A range of the prompt whose attention is watched.

    Attributes:
        turn_id: The client's; it is returned unchanged.
        sentence_id: The same.
        start: Position in ``input_ids`` where it begins.
        end: Position before which it ends.
    """

    turn_id: Annotated[int | str, example(1)]
    sentence_id: Annotated[int | str, example(2)]
    start: Annotated[int, example(0)]
    end: Annotated[int, example(5)]


class DreamFields(AttentionFields, kw_only=True):
    """Fields of a generation in this dialect, besides those of both protocols.

    Attributes:
        encoding: How values of "per_layer" and "aggregated" are sent: base64 in the JSON, or as a
            binary frame after it. Without it "aggregated" is a list of numbers, the others are
            base64.
        sentences: Ranges of the prompt to watch; those that get little attention are named at the
            end.
        prune_below: Attention below which a sentence is named; 1 / tokens of the prompt if not
            given.
    """

    encoding: Encoding | None = None
    sentences: list[Sentence] | None = None
    prune_below: Annotated[float | None, example(0.01)] = None


class GenerateBody(DreamFields, kw_only=True):
    """Body of ``POST /api/v1/generate``.

    Attributes:
        compression: "gzip" packs the reply for clients that accept it; "none" if not given.
    """

    compression: Annotated[Literal["gzip", "none"] | None, example(default="none")] = None


# ---- messages of the WebSocket, from the client


class Generate(DreamFields, kw_only=True, tag_field="type", tag="generate"):
    """Starts a generation; one at a time on a socket."""


class Cancel(msgspec.Struct, kw_only=True, tag_field="type", tag="cancel"):
    """Ends the generation of that name, or whichever runs; what was generated stays.

    Attributes:
        request_id: The generation to end; whichever runs if not given.
    """

    request_id: Annotated[str | None, example("r1")] = None


ClientMessage = Generate | Cancel


class Named(msgspec.Struct):
    """What is read of an invalid message, so that its error can name the request."""

    request_id: Any = None


# ---- replies


class LikelyToken(msgspec.Struct):
    """One of the most probable tokens at a position.

    Attributes:
        token_id: Its id.
        text: Its text.
        logprob: Its logprob before bias, grammar and samplers.
    """

    token_id: Annotated[int, example(354)]
    text: Annotated[str, example(" the")]
    logprob: Annotated[float | None, example(-1.5)]


class GeneratedToken(msgspec.Struct):
    """A token that was generated.

    Attributes:
        token_id: Its id.
        text: The text that it completes.
        logprob: Its logprob before bias, grammar and samplers.
        top_logprobs: The most probable tokens at its place, if more were asked for than the token's
            own.
        sample: Index of the sample, if there are several.
    """

    token_id: Annotated[int, example(259)]
    text: Annotated[str, example(" t")]
    logprob: Annotated[float | UnsetType | None, example(-0.6)] = UNSET
    top_logprobs: list[LikelyToken] | UnsetType = UNSET
    sample: Annotated[int | UnsetType, example(0)] = UNSET


class AttentionEntry(msgspec.Struct):
    """A token with its attention object.

    Attributes:
        token_id: Id of the token.
        text: The text that it completes.
        attention: Its attention.
        sample: Index of the sample, if there are several.
    """

    token_id: Annotated[int, example(259)]
    text: Annotated[str, example(" t")]
    attention: AttentionObject
    sample: Annotated[int | UnsetType, example(0)] = UNSET


class PromptEntry(msgspec.Struct):
    """Rows of the prompt.

    Attributes:
        start: Position of the first token.
        rows: How many tokens.
        attention: Their attention, with an axis for the rows before that of the columns.
    """

    start: Annotated[int, example(0)]
    rows: Annotated[int, example(6)]
    attention: AttentionObject


class PrunableSentence(msgspec.Struct):
    """A sentence that got little attention from the generated tokens.

    Attributes:
        turn_id: That of the request.
        sentence_id: That of the request.
        max_attention: The most that it got from a token.
    """

    turn_id: Annotated[int | str, example(1)]
    sentence_id: Annotated[int | str, example(2)]
    max_attention: Annotated[float, example(0.004)]


class SampleResult(msgspec.Struct):
    """One sample, as KoboldAI's clients expect it.

    Attributes:
        text: The text.
        finish_reason: Why it ended: "stop" or "length".
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Tokens that were generated.
        logprobs: Those of its tokens, if asked for.
    """

    text: Annotated[str, example(" teacher.")]
    finish_reason: Annotated[str, example("length")]
    prompt_tokens: Annotated[int, example(6)]
    completion_tokens: Annotated[int, example(2)]
    logprobs: Logprobs | UnsetType | None = UNSET


class Details(RunDetails, kw_only=True):
    """What a reply tells of its request.

    Attributes:
        reason: Why the first sample ended exactly: "stop" if the model ended the text,
            "stop_token", "stop_sequence", "length", "cancelled" or "tool_calls".
    """

    reason: Annotated[str, example("length")]


class GenerateReply(msgspec.Struct, kw_only=True):
    """Reply of ``POST /api/v1/generate``; all but ``results`` and ``details`` only if asked for.

    Attributes:
        results: Each sample.
        details: Figures of the request, and what had no effect.
        generated_text: Text of the first sample.
        finish_reason: Why the first sample ended.
        prunable_sentences: Sentences that got little attention, if there were ``sentences``.
        generated_tokens: Every token.
        prompt_attention: Rows of the prompt, with ``prompt_attention``.
        attention_data: Every token with its attention.
    """

    results: list[SampleResult]
    details: Details
    generated_text: Annotated[str | UnsetType, example(" teacher.")] = UNSET
    finish_reason: Annotated[str | UnsetType, example("length")] = UNSET
    prunable_sentences: list[PrunableSentence] | UnsetType = UNSET
    generated_tokens: list[GeneratedToken] | UnsetType = UNSET
    prompt_attention: list[PromptEntry] | UnsetType = UNSET
    attention_data: list[AttentionEntry] | UnsetType = UNSET


class ModelInfoReply(msgspec.Struct, kw_only=True):
    """Reply of ``GET /api/v1/model/info``; null is what the model's file does not say.

    Attributes:
        model_name: Its name.
        architecture: Its architecture.
        vocab_size: Tokens of the vocabulary.
        num_layers: Layers.
        num_attention_heads: Heads of each.
        num_key_value_heads: Heads with keys and values of their own.
        hidden_size: Numbers for each token between layers.
        max_position_embeddings: Tokens that it was trained with.
        rope_theta: Base frequency of its positions.
        bos_token_id: Id that begins a text.
        eos_token_id: Id that ends one.
        special_tokens: Texts and ids of special tokens.
        chat_template: Its chat template.
        torch_dtype: Always null.
        context_length: Longest prompt in tokens that is allowed.
        attention_layers: Layers that rows come from, in the order of the rows' first axis.
    """

    model_name: Annotated[str, example("demo")]
    architecture: Annotated[str | None, example("llama")]
    vocab_size: Annotated[int, example(1024)]
    num_layers: Annotated[int, example(4)]
    num_attention_heads: Annotated[int, example(8)]
    num_key_value_heads: Annotated[int, example(4)]
    hidden_size: Annotated[int, example(256)]
    max_position_embeddings: Annotated[int, example(512)]
    rope_theta: Annotated[float | None, example(10000.0)]
    bos_token_id: Annotated[int | None, example(1)]
    eos_token_id: Annotated[int | None, example(2)]
    special_tokens: Annotated[dict[str, str | int | None], example({"eos_token": "</s>"})]
    chat_template: Annotated[str | None, example("{{ messages }}")]
    torch_dtype: Annotated[None, example(None)]
    context_length: Annotated[int, example(2048)]
    attention_layers: Annotated[list[int], example([0, 1, 2, 3])]


class LoadBody(msgspec.Struct, kw_only=True):
    """Body of ``POST /api/v1/model/load``; the numbers override the server's settings.

    Attributes:
        model: Name of the file, as ``GET /api/v1/models`` lists it.
        n_ctx: Tokens that a slot holds.
        n_slots: Requests that run at the same time.
        n_gpu_layers: Layers on the GPU.
    """

    model: Annotated[str, example("model.gguf")]
    n_ctx: Annotated[int | None, example(4096)] = None
    n_slots: Annotated[int | None, example(2)] = None
    n_gpu_layers: Annotated[int | None, example(99)] = None


class ModelsReply(msgspec.Struct):
    """Reply of ``GET /api/v1/models``: what may be loaded, and what is.

    Attributes:
        models: Names for ``POST /api/v1/model/load``.
        loaded: The one of them that is loaded; the model's own name if it is none of them, null
            without one.
        model_name: The loaded model's name, as in ``/api/v1/model/info``.
    """

    models: Annotated[list[str], example(["model.gguf"])]
    loaded: Annotated[str | None, example("model.gguf")]
    model_name: Annotated[str | None, example("demo")]
