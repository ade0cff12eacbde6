"""Bodies of OpenAI's API, with the further fields of llama.cpp's server, and ours for attention.

Unknown fields are ignored, null is as if absent.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.attention_field import Attention
from kqview.server.api.wire.attention_protocol import TokenLogprob
from kqview.server.api.wire.chat_message import MessageObject, ToolObject
from kqview.server.api.wire.event_parts import ModCall, PromptAttention, TokenAttention
from kqview.server.api.wire.llama_fields import LlamaFields, Timings

Object = dict[str, Any]

# ---- attention that is kept


class KeptRow(Struct, kw_only=True):
    """A row that is kept: its token, and the shape of its values.

    Attributes:
        n: Index of the token, from 0, such as 0.
        token_id: Its id, such as 259.
        text: The text that it completes, such as " t".
        shape: Shape of its values, such as [4, 8, 6]; empty for "sparse" and "viz", which are JSON.
    """

    n: int
    token_id: int
    text: str
    shape: tuple[int, ...]


class KeptChoice(Struct, kw_only=True):
    """Rows of one choice.

    Attributes:
        index: Of the choice, from 0, such as 0.
        n_left_out: Rows that did not fit into the memory for them, such as 0.
        rows: Its rows, the oldest first.
    """

    index: int
    n_left_out: int
    rows: list[KeptRow]


class KeptAttention(Struct, kw_only=True):
    """Reply of ``GET /v1/attention/{id}``: which rows of a reply are kept.

    Attributes:
        id: Id of the reply, such as "chatcmpl-1".
        object: Always "attention".
        values: What rows hold: "logits", "scores" or "probs", such as "probs".
        format: Format of the rows, such as "per_layer".
        dtype: Type of their values, such as "float32"; little-endian.
        layers: Layers that they are of, in the order of their first axis, such as [0, 1, 2, 3].
        choices: Rows of each choice.
    """

    id: str
    object: Literal["attention"] = "attention"
    values: str
    format: str
    dtype: str
    layers: tuple[int, ...]
    choices: list[KeptChoice]


# ---- requests


class StreamOptions(Struct, kw_only=True):
    """Options of a stream.

    Attributes:
        include_usage: Whether a last chunk has the usage; false if not given.
    """

    include_usage: bool | None = None


class GenerateFields(LlamaFields, kw_only=True):
    """Fields of both kinds of completions.

    Attributes:
        stream_options: Options of a stream.
        attention: Which attention to send with each token; true for all defaults.
    """

    model: str | None = None
    stream_options: StreamOptions | None = None
    attention: Attention | bool | None = None


class ChatBody(GenerateFields, kw_only=True):
    """Body of ``POST /v1/chat/completions``.

    Attributes:
        messages: The conversation, the oldest message first, such as [{"role": "user", "content":
            "Who is Anna?"}]. Roles are those of the model's template; a content is a text or a list
            of parts of type "text".
        tools: Functions that the model may call, such as [{"type": "function", "function": {"name":
            "weather", "parameters": {"type": "object"}}}].
        tool_choice: "auto", "none", "required", or the one to call, such as {"type": "function",
            "function": {"name": "weather"}}; "auto" if not given.
        parallel_tool_calls: Whether there may be several calls; true if not given.
        response_format: Form of the answer, held by a grammar: {"type": "text"}, {"type":
            "json_object"} or a schema, such as {"type": "json_schema", "json_schema": {"schema":
            {"type": "object"}}}.
        top_logprobs: So many of the most probable tokens with each, such as 3, where ``logprobs``
            is true. They are before bias, grammar and samplers.
        reasoning_format: "none" leaves reasoning in ``content``; the others send it as
            ``reasoning_content``. "auto" if not given.
        reasoning_effort: How much to think, for templates that know it, such as "low".
        chat_template_kwargs: Variables for the model's chat template, such as {"enable_thinking":
            false}.
        add_generation_prompt: Whether the prompt ends with the beginning of an answer; true if not
            given.
        continue_final_message: Whether the answer goes on with the last message, which is the
            assistant's.
    """

    messages: Annotated[list[MessageObject], msgspec.Meta(max_length=65_536)]
    tools: Annotated[list[ToolObject], msgspec.Meta(max_length=1024)] | None = None
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
    """Body of ``POST /v1/completions``.

    Attributes:
        prompt: A text, such as "Anna is a", ids, or a list of these.
        echo: Whether the reply begins with the prompt; with ``logprobs`` also with those of the
            prompt. False if not given.
        suffix: Has to be "": it is not supported. Use ``/infill``.
        best_of: Has to be that of ``n``, such as 1: no text is thrown away.
    """

    prompt: str | Annotated[list[Any], msgspec.Meta(max_length=65_536)]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class EmbeddingsBody(Struct, kw_only=True):
    """Body of ``POST /v1/embeddings``.

    Attributes:
        input: A text, such as "Anna is a teacher.", ids, {"content": [{"type": "text", "text":
            "Anna"}]}, or a list of these.
        model: Id of a configured model, such as "demo"; the default model if not given.
        encoding_format: Numbers, or base64 of little-endian float32; "float" if not given.
        dimensions: Length to which vectors are cut, such as 64; they are scaled to length 1 again.
            All if not given.
    """

    input: str | dict[str, Any] | Annotated[list[Any], msgspec.Meta(max_length=65_536)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


# ---- replies


class PromptDetails(Struct):
    """Of the prompt's tokens.

    Attributes:
        cached_tokens: Those that were in the cache, such as 0.
    """

    cached_tokens: int


class Usage(Struct, kw_only=True):
    """Tokens of a request.

    Attributes:
        prompt_tokens: Tokens of the prompt, such as 12.
        completion_tokens: Tokens that were generated, such as 20.
        total_tokens: Both together, such as 32.
        prompt_tokens_details: More about those of the prompt.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Function(Struct, kw_only=True):
    """A function that the model calls.

    Attributes:
        name: Its name, such as "weather".
        arguments: Its arguments as JSON, such as "{\\"city\\": \\"Rome\\"}"; in a stream a piece of
            that.
    """

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(Struct, kw_only=True):
    """A call, or in a stream a piece of one, whose first has ``id`` and ``name``.

    Attributes:
        index: Of the call in a stream, from 0, such as 0.
        id: Id of the call, which its result repeats, such as "call_1".
        type: Always "function".
        function: What is called.
    """

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: Function


class Message(Struct, kw_only=True):
    """An answer.

    Attributes:
        role: Always "assistant".
        content: Text of the answer, such as "Anna is a teacher."; null if there are only calls.
        reasoning_content: What the model thought first, such as "The user asks for a name.".
        tool_calls: Functions that it calls.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChoiceLogprobs(Struct):
    """Logprobs of the tokens of an answer.

    Attributes:
        content: Each token with those that could have been.
    """

    content: list[TokenLogprob]


class ChatChoice(Struct, kw_only=True):
    """One of the answers.

    Attributes:
        index: Of the answer, from 0, such as 0.
        message: The answer.
        logprobs: Those of its tokens, if asked for.
        finish_reason: Why it ended: "stop", "length" or "tool_calls", such as "stop".
        attention: Attention of each of its tokens, if asked for.
        prompt_attention: Rows of the prompt, if asked for.
    """

    index: int
    message: Message
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str
    attention: list[TokenAttention] | UnsetType = UNSET
    prompt_attention: list[PromptAttention] | UnsetType = UNSET


class Verbose(Struct):
    """What became of a chat.

    Attributes:
        prompt: Its prompt, with special tokens, such as "<|im_start|>user".
    """

    prompt: str


class ChatCompletion(Struct, kw_only=True):
    """Reply of ``POST /v1/chat/completions``.

    Attributes:
        id: Id of the reply, such as "chatcmpl-1"; kept attention has it as its name.
        object: Always "chat.completion".
        created: When it was made, in seconds since 1970, such as 1767225600.
        model: The model, as the request names it, such as "demo".
        system_fingerprint: What generated it, such as "kqview-0.1.0".
        choices: The answers.
        usage: Tokens of the request.
        timings: What it cost.
        __verbose: The prompt, with ``verbose``, such as {"prompt": "<|im_start|>user"}.
    """

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings
    verbose: Verbose | UnsetType = msgspec.field(default=UNSET, name="__verbose")


class TextLogprobs(Struct, kw_only=True):
    """Logprobs in OpenAI's older form, and in that of chat completions.

    Of a prompt that is echoed there is only the older form, with nulls for its first token.

    Attributes:
        content: Each token with those that could have been, as in chat completions.
        tokens: Text of each token, such as [" a"].
        token_logprobs: Logprob of each before bias, grammar and samplers, such as [-0.6].
        top_logprobs: The most probable tokens at each place by their texts, such as
            [{" a": -0.6, " the": -1.5}].
        text_offset: Character of the text at which each token begins, such as [0].
    """

    content: list[TokenLogprob] | UnsetType = UNSET
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct, kw_only=True):
    """One of the texts.

    Attributes:
        index: Of the text, from 0, such as 0.
        text: The text, such as " teacher.".
        logprobs: Those of its tokens, if asked for, in OpenAI's older form and that of chat
            completions.
        finish_reason: Why it ended: "stop" or "length", such as "stop".
        attention: Attention of each of its tokens, if asked for.
        prompt_attention: Rows of the prompt, if asked for.
        tool_calls: Calls that a mod made.
        tool_calls: Calls that a mod made.
    """

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str
    attention: list[TokenAttention] | UnsetType = UNSET
    prompt_attention: list[PromptAttention] | UnsetType = UNSET
    tool_calls: list[ModCall] | UnsetType = UNSET


class TextCompletion(Struct, kw_only=True):
    """Reply of ``POST /v1/completions``.

    Attributes:
        id: Id of the reply, such as "cmpl-1"; kept attention has it as its name.
        object: Always "text_completion".
        created: When it was made, in seconds since 1970, such as 1767225600.
        model: The model, as the request names it, such as "demo".
        system_fingerprint: What generated it, such as "kqview-0.1.0".
        choices: The texts.
        usage: Tokens of the request.
        timings: What it cost.
    """

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    timings: Timings


class EmbeddingUsage(Struct):
    """Tokens of the texts.

    Attributes:
        prompt_tokens: Tokens of all texts, such as 6.
        total_tokens: The same, such as 6.
    """

    prompt_tokens: int
    total_tokens: int


class Embedding(Struct, kw_only=True):
    """The vector of one text.

    Attributes:
        object: Always "embedding".
        index: Of the text, from 0, such as 0.
        embedding: Its numbers, such as [0.6, -0.8], or base64 of little-endian float32.
    """

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Embeddings(Struct, kw_only=True):
    """Reply of ``POST /v1/embeddings``.

    Attributes:
        object: Always "list".
        model: The model, as the request names it, such as "demo".
        data: The vectors, in the order of the texts.
        usage: Tokens of the request.
    """

    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class ModelMeta(Struct, kw_only=True):
    """Facts about a model, as llama.cpp's server names them.

    Attributes:
        n_vocab: Tokens of the vocabulary, such as 1024.
        n_ctx: Longest prompt in tokens, such as 2048.
        n_ctx_train: Tokens that it was trained with, such as 512.
        n_embd: Length of a vector, such as 256.
        n_params: Number of parameters, such as 3200000.
        size: Bytes of its tensors, such as 6400000.
        ftype: How its tensors are stored, such as "F16".
        architecture: Architecture, as its file names it, such as "llama".
    """

    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int
    ftype: str
    architecture: str


class ModelStatus(Struct, kw_only=True):
    """Whether a model is loaded.

    Attributes:
        value: "unloaded", "loading" or "loaded", such as "loaded".
        failed: Whether loading it failed last.
        progress: Loaded fraction, 0..1, such as 0.5.
    """

    value: str
    failed: bool | UnsetType = UNSET
    progress: float | UnsetType = UNSET


class Model(Struct, kw_only=True):
    """A model that answers requests.

    Attributes:
        id: Its id, for ``model`` of a request, such as "demo".
        object: Always "model".
        created: When the list was made, in seconds since 1970, such as 1767225600.
        owned_by: Always "llamacpp".
        aliases: Further names of it, such as ["small"].
        tags: Always [].
        meta: Facts about it; null until it is loaded.
        status: Whether it is loaded.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["llamacpp"] = "llamacpp"
    aliases: list[str]
    tags: list[str]
    meta: ModelMeta | None
    status: ModelStatus


class Models(Struct, kw_only=True):
    """Reply of ``GET /v1/models``.

    Attributes:
        object: Always "list".
        data: The models.
        models: The same in Ollama's form, such as [{"name": "demo"}].
    """

    object: Literal["list"] = "list"
    data: list[Model]
    models: list[Object]
