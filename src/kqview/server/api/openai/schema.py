"""Bodies of OpenAI's API, with the further fields of llama.cpp's server, and ours for attention.

Unknown fields are ignored, null is as if absent.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.attention import AttentionField
from kqview.server.api.wire.chat_message import (
    ANY_TOOLS,
    EffortField,
    GenerationPromptField,
    MessageObject,
    OtherTemplateField,
    ParallelCallsField,
    TemplateField,
    ToolObject,
)
from kqview.server.api.wire.citations import (
    Annotation,
    DocumentsField,
    GroundingField,
    HeadsField,
    InjectionField,
    InjectionFound,
)
from kqview.server.api.wire.event_parts import ModCall, PromptRows, TokenRows
from kqview.server.api.wire.fields import LlamaFields, ModelField, Timings
from kqview.server.api.wire.logprobs import TextLogprobs, TokenLogprob
from kqview.server.api.wire.prompts import TEXTS, TextsUsage
from kqview.server.web.described import about

Object = dict[str, Any]

# ---- attention that is kept


class KeptRow(Struct, kw_only=True):
    """A row that is kept: its token, and the shape of its values."""

    n: Annotated[int, about("Index of the token, from 0.", 0)]
    token_id: Annotated[int, about("Its id.", 259)]
    text: Annotated[str, about("The text that it completes.", " t")]
    shape: Annotated[
        tuple[int, ...],
        about('Shape of its values; empty for "sparse" and "viz", which are JSON.', [4, 8, 6]),
    ]


class KeptChoice(Struct, kw_only=True):
    """Rows of one choice."""

    index: Annotated[int, about("Of the choice, from 0.", 0)]
    n_left_out: Annotated[int, about("Rows that did not fit into the memory for them.", 0)]
    rows: Annotated[list[KeptRow], about("Its rows, the oldest first.")]


class KeptAttention(Struct, kw_only=True):
    """Reply of ``GET /v1/attention/{id}``: which rows of a reply are kept."""

    id: Annotated[str, about("Id of the reply.", "chatcmpl-1")]
    object: Literal["attention"] = "attention"
    values: Annotated[str, about('What rows hold: "logits", "scores" or "probs".', "probs")]
    format: Annotated[str, about("Format of the rows.", "per_layer")]
    dtype: Annotated[str, about("Type of their values; little-endian.", "float32")]
    layers: Annotated[
        tuple[int, ...],
        about("Layers that they are of, in the order of their first axis.", [0, 1, 2, 3]),
    ]
    choices: Annotated[list[KeptChoice], about("Rows of each choice.")]


# ---- requests


class StreamOptions(Struct, kw_only=True):
    """Options of a stream."""

    include_usage: Annotated[
        bool | None, about("Whether a last chunk has the usage.", default=False)
    ] = None


class GenerateFields(LlamaFields, kw_only=True):
    """Fields of both kinds of completions."""

    stream_options: Annotated[StreamOptions | None, about("Options of a stream.")] = None
    attention: AttentionField = None


class ChatBody(GenerateFields, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[
        list[MessageObject],
        msgspec.Meta(max_length=65_536),
        about(
            "The conversation, the oldest message first. Roles are those of the model's "
            'template; a content is a text or a list of parts of type "text".',
            [{"role": "user", "content": "Who is Anna?"}],
        ),
    ]
    tools: Annotated[
        Annotated[list[ToolObject], msgspec.Meta(max_length=1024)] | None, ANY_TOOLS
    ] = None
    tool_choice: Annotated[
        str | Object | None,
        about(
            '"auto", "none", "required", or the one to call.',
            {"type": "function", "function": {"name": "weather"}},
            default="auto",
        ),
    ] = None
    parallel_tool_calls: ParallelCallsField = None
    response_format: Annotated[
        Object | None,
        about(
            'Form of the answer, held by a grammar: {"type": "text"}, {"type": "json_object"} '
            "or a schema.",
            {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        ),
    ] = None
    top_logprobs: Annotated[
        int | None,
        about(
            "So many of the most probable tokens with each, where ``logprobs`` is true. They "
            "are before bias, grammar and samplers.",
            3,
        ),
    ] = None
    reasoning_format: Annotated[
        Literal["none", "auto", "deepseek", "deepseek-legacy"] | None,
        about(
            '"none" leaves reasoning in ``content``; the others send it as ``reasoning_content``.',
            default="auto",
        ),
    ] = None
    reasoning_effort: EffortField = None
    chat_template_kwargs: TemplateField = None
    documents: DocumentsField = None
    citation_heads: HeadsField = None
    grounding: GroundingField = None
    injection: InjectionField = None
    add_generation_prompt: GenerationPromptField = None
    continue_final_message: Annotated[
        bool | str | None,
        about("Whether the answer goes on with the last message, which is the assistant's."),
    ] = None


class ChatCountBody(ChatBody, kw_only=True):
    """Body of ``POST /v1/chat/completions/input_tokens``."""

    chat_template: OtherTemplateField = None


class CompletionBody(GenerateFields, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[
        str | Annotated[list[Any], msgspec.Meta(max_length=65_536)],
        about("A text, ids, or a list of these.", "Anna is a"),
    ]
    echo: Annotated[
        bool | None,
        about(
            "Whether the reply begins with the prompt; with ``logprobs`` also with those of the "
            "prompt. False if not given."
        ),
    ] = None
    suffix: Annotated[
        str | None, about('Has to be "": it is not supported. Use ``/infill``.', "")
    ] = None
    best_of: Annotated[int | None, about("Has to be that of ``n``: no text is thrown away.", 1)] = (
        None
    )


class EmbeddingsBody(Struct, kw_only=True):
    """Body of ``POST /v1/embeddings``."""

    input: Annotated[
        str | dict[str, Any] | Annotated[list[Any], msgspec.Meta(max_length=65_536)], TEXTS
    ]
    model: ModelField = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        about("Numbers, or base64 of little-endian float32.", default="float"),
    ] = None
    dimensions: Annotated[
        int | None,
        about(
            "Length to which vectors are cut; they are scaled to length 1 again. All if not given.",
            64,
        ),
    ] = None


# ---- replies


class PromptDetails(Struct):
    """Of the prompt's tokens."""

    cached_tokens: Annotated[int, about("Those that were in the cache.", 0)]


class CompletionDetails(Struct):
    """Of the tokens that were generated."""

    accepted_prediction_tokens: Annotated[
        int, about("Those that had been guessed before, from ``prediction`` or the text so far.", 0)
    ]
    rejected_prediction_tokens: Annotated[
        int, about("Guesses that were not generated; they count nowhere else.", 0)
    ]


class Usage(Struct, kw_only=True):
    """Tokens of a request."""

    prompt_tokens: Annotated[int, about("Tokens of the prompt.", 12)]
    completion_tokens: Annotated[int, about("Tokens that were generated.", 20)]
    total_tokens: Annotated[int, about("Both together.", 32)]
    prompt_tokens_details: Annotated[PromptDetails, about("More about those of the prompt.")]
    completion_tokens_details: Annotated[
        CompletionDetails, about("More about those that were generated.")
    ]


class Function(Struct, kw_only=True):
    """A function that the model calls."""

    name: Annotated[str | UnsetType, about("Its name.", "weather")] = UNSET
    arguments: Annotated[
        str,
        about(
            'Its arguments as JSON, such as "{\\"city\\": \\"Rome\\"}"; in a stream a piece of '
            "that.",
            '{"city": "Rome"}',
        ),
    ]


class ToolCall(Struct, kw_only=True):
    """A call, or in a stream a piece of one, whose first has ``id`` and ``name``."""

    index: Annotated[int | UnsetType, about("Of the call in a stream, from 0.", 0)] = UNSET
    id: Annotated[str | UnsetType, about("Id of the call, which its result repeats.", "call_1")] = (
        UNSET
    )
    type: Literal["function"] | UnsetType = UNSET
    function: Annotated[Function, about("What is called.")]


class Message(Struct, kw_only=True):
    """An answer."""

    role: Literal["assistant"] = "assistant"
    content: Annotated[
        str | None, about("Text of the answer; null if there are only calls.", "Anna is a teacher.")
    ]
    reasoning_content: Annotated[
        str | UnsetType, about("What the model thought first.", "The user asks for a name.")
    ] = UNSET
    tool_calls: Annotated[list[ToolCall] | UnsetType, about("Functions that it calls.")] = UNSET
    annotations: Annotated[
        list[Annotation] | UnsetType,
        about("What its sentences are from, if there are ``documents``."),
    ] = UNSET
    injection: InjectionFound = UNSET


class ChoiceLogprobs(Struct):
    """Logprobs of the tokens of an answer."""

    content: Annotated[list[TokenLogprob], about("Each token with those that could have been.")]


class ChatChoice(Struct, kw_only=True):
    """One of the answers."""

    index: Annotated[int, about("Of the answer, from 0.", 0)]
    message: Annotated[Message, about("The answer.")]
    logprobs: Annotated[ChoiceLogprobs | None, about("Those of its tokens, if asked for.")] = None
    finish_reason: Annotated[str, about('Why it ended: "stop", "length" or "tool_calls".', "stop")]
    attention: TokenRows = UNSET
    prompt_attention: PromptRows = UNSET


class Verbose(Struct):
    """What became of a chat."""

    prompt: Annotated[str, about("Its prompt, with special tokens.", "<|im_start|>user")]


class ChatCompletion(Struct, kw_only=True):
    """Reply of ``POST /v1/chat/completions``."""

    id: Annotated[str, about("Id of the reply; kept attention has it as its name.", "chatcmpl-1")]
    object: Literal["chat.completion"] = "chat.completion"
    created: Annotated[int, about("When it was made, in seconds since 1970.", 1767225600)]
    model: Annotated[str, about("The model, as the request names it.", "demo")]
    system_fingerprint: Annotated[str, about("What generated it.", "kqview-0.1.0")]
    choices: Annotated[list[ChatChoice], about("The answers.")]
    usage: Annotated[Usage, about("Tokens of the request.")]
    timings: Annotated[Timings, about("What it cost.")]
    verbose: Annotated[
        Verbose | UnsetType, about("The prompt, with ``verbose``.", {"prompt": "<|im_start|>user"})
    ] = msgspec.field(default=UNSET, name="__verbose")


class TextChoice(Struct, kw_only=True):
    """One of the texts."""

    index: Annotated[int, about("Of the text, from 0.", 0)]
    text: Annotated[str, about("The text.", " teacher.")]
    logprobs: Annotated[
        TextLogprobs | None,
        about(
            "Those of its tokens, if asked for, in OpenAI's older form and that of chat "
            "completions."
        ),
    ] = None
    finish_reason: Annotated[str, about('Why it ended: "stop" or "length".', "stop")]
    attention: TokenRows = UNSET
    prompt_attention: PromptRows = UNSET
    tool_calls: Annotated[list[ModCall] | UnsetType, about("Calls that a mod made.")] = UNSET


class TextCompletion(Struct, kw_only=True):
    """Reply of ``POST /v1/completions``."""

    id: Annotated[str, about("Id of the reply; kept attention has it as its name.", "cmpl-1")]
    object: Literal["text_completion"] = "text_completion"
    created: Annotated[int, about("When it was made, in seconds since 1970.", 1767225600)]
    model: Annotated[str, about("The model, as the request names it.", "demo")]
    system_fingerprint: Annotated[str, about("What generated it.", "kqview-0.1.0")]
    choices: Annotated[list[TextChoice], about("The texts.")]
    usage: Annotated[Usage, about("Tokens of the request.")]
    timings: Annotated[Timings, about("What it cost.")]


class Embedding(Struct, kw_only=True):
    """The vector of one text."""

    object: Literal["embedding"] = "embedding"
    index: Annotated[int, about("Of the text, from 0.", 0)]
    embedding: Annotated[
        list[float] | str, about("Its numbers, or base64 of little-endian float32.", [0.6, -0.8])
    ]


class Embeddings(Struct, kw_only=True):
    """Reply of ``POST /v1/embeddings``."""

    object: Literal["list"] = "list"
    model: Annotated[str, about("The model, as the request names it.", "demo")]
    data: Annotated[list[Embedding], about("The vectors, in the order of the texts.")]
    usage: Annotated[TextsUsage, about("Tokens of the request.")]


class ModelMeta(Struct, kw_only=True):
    """Facts about a model, as llama.cpp's server names them."""

    n_vocab: Annotated[int, about("Tokens of the vocabulary.", 1024)]
    n_ctx: Annotated[int, about("Longest prompt in tokens.", 2048)]
    n_ctx_train: Annotated[int, about("Tokens that it was trained with.", 512)]
    n_embd: Annotated[int, about("Length of a vector.", 256)]
    n_params: Annotated[int, about("Number of parameters.", 3200000)]
    size: Annotated[int, about("Bytes of its tensors.", 6400000)]
    ftype: Annotated[str, about("How its tensors are stored.", "F16")]
    architecture: Annotated[str, about("Architecture, as its file names it.", "llama")]


class ModelStatus(Struct, kw_only=True):
    """Whether a model is loaded."""

    value: Annotated[str, about('"unloaded", "loading" or "loaded".', "loaded")]
    failed: Annotated[bool | UnsetType, about("Whether loading it failed last.")] = UNSET
    progress: Annotated[float | UnsetType, about("Loaded fraction, 0..1.", 0.5)] = UNSET


class Model(Struct, kw_only=True):
    """A model that answers requests."""

    id: Annotated[str, about("Its id, for ``model`` of a request.", "demo")]
    object: Literal["model"] = "model"
    created: Annotated[int, about("When the list was made, in seconds since 1970.", 1767225600)]
    owned_by: Literal["llamacpp"] = "llamacpp"
    aliases: Annotated[list[str], about("Further names of it.", ["small"])]
    tags: Annotated[list[str], about("Always [].", [])]
    meta: Annotated[ModelMeta | None, about("Facts about it; null until it is loaded.")]
    status: Annotated[ModelStatus, about("Whether it is loaded.")]


class Models(Struct, kw_only=True):
    """Reply of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: Annotated[list[Model], about("The models.")]
    models: Annotated[list[Object], about("The same in Ollama's form.", [{"name": "demo"}])]
