"""Bodies of OpenAI's API, with the further fields of llama.cpp's server, and ours for attention.

Unknown fields are ignored, null is as if absent.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.attention_field import Attention
from kqview.server.api.attention_protocol import TokenLogprob
from kqview.server.api.llama_fields import LlamaFields, Timings

Object = dict[str, Any]
Objects = Annotated[list[Object], msgspec.Meta(max_length=65_536)]

# ---- attention that is kept


class KeptRow(Struct, kw_only=True):
    """A row that is kept: its token, and the shape of its values."""

    n: int
    token_id: int
    text: str
    shape: tuple[int, ...]


class KeptChoice(Struct, kw_only=True):
    """Rows of one choice; ``n_left_out`` did not fit into the memory for them."""

    index: int
    n_left_out: int
    rows: list[KeptRow]


class KeptAttention(Struct, kw_only=True):
    """Reply of ``GET /v1/attention/{id}``: which rows of a reply are kept."""

    id: str
    object: Literal["attention"] = "attention"
    values: str
    format: str
    dtype: str
    layers: tuple[int, ...]
    choices: list[KeptChoice]


# ---- requests


class StreamOptions(Struct, kw_only=True):
    """Options of a stream."""

    include_usage: bool | None = None


class GenerateFields(LlamaFields, kw_only=True):
    """Fields of both kinds of completions."""

    model: str | None = None
    stream_options: StreamOptions | None = None
    attention: Attention | bool | None = None


class ChatBody(GenerateFields, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Objects
    tools: Annotated[list[Object], msgspec.Meta(max_length=1024)] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    response_format: Object | None = None
    top_logprobs: int | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | str | None = None


class CompletionBody(GenerateFields, kw_only=True):
    """Body of ``POST /v1/completions``; the prompt is a text, ids, or a list of these."""

    prompt: str | Annotated[list[Any], msgspec.Meta(max_length=65_536)]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class EmbeddingsBody(Struct, kw_only=True):
    """Body of ``POST /v1/embeddings``; the input is a text, ids, or a list of these."""

    input: str | Annotated[list[Any], msgspec.Meta(max_length=65_536)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


# ---- replies


class PromptDetails(Struct):
    """Prompt tokens that were in the cache already."""

    cached_tokens: int


class Usage(Struct, kw_only=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Function(Struct, kw_only=True):
    """A function that the model calls; ``arguments`` is JSON."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(Struct, kw_only=True):
    """A call, or in a stream a piece of one, whose first has ``id`` and ``name``."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: Function


class Message(Struct, kw_only=True):
    """An answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChoiceLogprobs(Struct):
    """Logprobs of the tokens of an answer."""

    content: list[TokenLogprob]


class ChatChoice(Struct, kw_only=True):
    """One of the answers; ``attention`` has an entry for each of its tokens."""

    index: int
    message: Message
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str
    attention: list[Object] | UnsetType = UNSET
    prompt_attention: list[Object] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    """Reply of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


class TextChoice(Struct, kw_only=True):
    """One of the texts; ``logprobs`` has OpenAI's older form and that of chat completions."""

    index: int
    text: str
    logprobs: Object | None = None
    finish_reason: str
    attention: list[Object] | UnsetType = UNSET
    prompt_attention: list[Object] | UnsetType = UNSET


class TextCompletion(Struct, kw_only=True):
    """Reply of ``POST /v1/completions``."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    timings: Timings


class EmbeddingUsage(Struct):
    """Tokens of the texts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Struct, kw_only=True):
    """The vector of one text, as numbers or as base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Embeddings(Struct, kw_only=True):
    """Reply of ``POST /v1/embeddings``."""

    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class ModelMeta(Struct, kw_only=True):
    """Facts about a model, as llama.cpp's server names them."""

    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int
    ftype: str
    architecture: str


class ModelStatus(Struct, kw_only=True):
    """Whether a model is loaded: "unloaded", "loading" or "loaded".

    ``failed`` says that loading it failed last; ``progress`` is the loaded fraction, 0..1.
    """

    value: str
    failed: bool | UnsetType = UNSET
    progress: float | UnsetType = UNSET


class Model(Struct, kw_only=True):
    """A model that answers requests; ``meta`` is null until it is loaded."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["llamacpp"] = "llamacpp"
    aliases: list[str]
    tags: list[str]
    meta: ModelMeta | None
    status: ModelStatus


class Models(Struct, kw_only=True):
    """Reply of ``GET /v1/models``; ``models`` is the list in Ollama's form."""

    object: Literal["list"] = "list"
    data: list[Model]
    models: list[Object]
