"""Bodies of OpenAI's API, with the further fields of llama.cpp's server, and ours for attention.

Unknown fields are ignored, null is as if absent.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.attention_field import Attention
from kqview.server.api.wire.chat_message import MessageObject, ToolObject
from kqview.server.api.wire.event_parts import ModCall, PromptAttention, TokenAttention
from kqview.server.api.wire.llama_fields import LlamaFields, Timings
from kqview.server.api.wire.logprobs import TokenLogprob
from kqview.server.web.described import example

Object = dict[str, Any]

# ---- attention that is kept


class KeptRow(Struct, kw_only=True):
    """A row that is kept: its token, and the shape of its values.

    Attributes:
        n: Index of the token, from 0.
        token_id: Its id.
        text: The text that it completes.
        shape: Shape of its values; empty for "sparse" and "viz", which are JSON.
    """

    n: Annotated[int, example(0)]
    token_id: Annotated[int, example(259)]
    text: Annotated[str, example(" t")]
    shape: Annotated[tuple[int, ...], example([4, 8, 6])]


class KeptChoice(Struct, kw_only=True):
    """Rows of one choice.

    Attributes:
        index: Of the choice, from 0.
        n_left_out: Rows that did not fit into the memory for them.
        rows: Its rows, the oldest first.
    """

    index: Annotated[int, example(0)]
    n_left_out: Annotated[int, example(0)]
    rows: list[KeptRow]


class KeptAttention(Struct, kw_only=True):
    """Reply of ``GET /v1/attention/{id}``: which rows of a reply are kept.

    Attributes:
        id: Id of the reply.
        object: Always "attention".
        values: What rows hold: "logits", "scores" or "probs".
        format: Format of the rows.
        dtype: Type of their values; little-endian.
        layers: Layers that they are of, in the order of their first axis.
        choices: Rows of each choice.
    """

    id: Annotated[str, example("chatcmpl-1")]
    object: Literal["attention"] = "attention"
    values: Annotated[str, example("probs")]
    format: Annotated[str, example("per_layer")]
    dtype: Annotated[str, example("float32")]
    layers: Annotated[tuple[int, ...], example([0, 1, 2, 3])]
    choices: list[KeptChoice]


# ---- requests


class StreamOptions(Struct, kw_only=True):
    """Options of a stream.

    Attributes:
        include_usage: Whether a last chunk has the usage; false if not given.
    """

    include_usage: Annotated[bool | None, example(default=False)] = None


class GenerateFields(LlamaFields, kw_only=True):
    """Fields of both kinds of completions.

    Attributes:
        stream_options: Options of a stream.
        attention: Which attention to send with each token; true for all defaults.
    """

    model: Annotated[str | None, example("demo")] = None
    stream_options: StreamOptions | None = None
    attention: Attention | bool | None = None


class ChatBody(GenerateFields, kw_only=True):
    """Body of ``POST /v1/chat/completions``.

    Attributes:
        messages: The conversation, the oldest message first. Roles are those of the model's
            template; a content is a text or a list of parts of type "text".
        tools: Functions that the model may call.
        tool_choice: "auto", "none", "required", or the one to call; "auto" if not given.
        parallel_tool_calls: Whether there may be several calls; true if not given.
        response_format: Form of the answer, held by a grammar: {"type": "text"}, {"type":
            "json_object"} or a schema.
        top_logprobs: So many of the most probable tokens with each, where ``logprobs`` is true.
            They are before bias, grammar and samplers.
        reasoning_format: "none" leaves reasoning in ``content``; the others send it as
            ``reasoning_content``. "auto" if not given.
        reasoning_effort: How much to think, for templates that know it.
        chat_template_kwargs: Variables for the model's chat template.
        add_generation_prompt: Whether the prompt ends with the beginning of an answer; true if not
            given.
        continue_final_message: Whether the answer goes on with the last message, which is the
            assistant's.
    """

    messages: Annotated[
        list[MessageObject],
        msgspec.Meta(max_length=65_536),
        example([{"role": "user", "content": "Who is Anna?"}]),
    ]
    tools: Annotated[
        Annotated[list[ToolObject], msgspec.Meta(max_length=1024)] | None,
        example(
            [
                {
                    "type": "function",
                    "function": {"name": "weather", "parameters": {"type": "object"}},
                }
            ]
        ),
    ] = None
    tool_choice: Annotated[
        str | Object | None,
        example({"type": "function", "function": {"name": "weather"}}, default="auto"),
    ] = None
    parallel_tool_calls: Annotated[bool | None, example(default=True)] = None
    response_format: Annotated[
        Object | None,
        example({"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}),
    ] = None
    top_logprobs: Annotated[int | None, example(3)] = None
    reasoning_format: Annotated[
        Literal["none", "auto", "deepseek", "deepseek-legacy"] | None, example(default="auto")
    ] = None
    reasoning_effort: Annotated[str | None, example("low")] = None
    chat_template_kwargs: Annotated[Object | None, example({"enable_thinking": False})] = None
    add_generation_prompt: Annotated[bool | None, example(default=True)] = None
    continue_final_message: bool | str | None = None


class CompletionBody(GenerateFields, kw_only=True):
    """Body of ``POST /v1/completions``.

    Attributes:
        prompt: A text, ids, or a list of these.
        echo: Whether the reply begins with the prompt; with ``logprobs`` also with those of the
            prompt. False if not given.
        suffix: Has to be "": it is not supported. Use ``/infill``.
        best_of: Has to be that of ``n``: no text is thrown away.
    """

    prompt: Annotated[
        str | Annotated[list[Any], msgspec.Meta(max_length=65_536)], example("Anna is a")
    ]
    echo: bool | None = None
    suffix: Annotated[str | None, example("")] = None
    best_of: Annotated[int | None, example(1)] = None


class EmbeddingsBody(Struct, kw_only=True):
    """Body of ``POST /v1/embeddings``.

    Attributes:
        input: A text, ids, {"content": [{"type": "text", "text": "Anna"}]}, or a list of these.
        model: Id of a configured model; the default model if not given.
        encoding_format: Numbers, or base64 of little-endian float32; "float" if not given.
        dimensions: Length to which vectors are cut; they are scaled to length 1 again. All if not
            given.
    """

    input: Annotated[
        str | dict[str, Any] | Annotated[list[Any], msgspec.Meta(max_length=65_536)],
        example("Anna is a teacher."),
    ]
    model: Annotated[str | None, example("demo")] = None
    encoding_format: Annotated[Literal["float", "base64"] | None, example(default="float")] = None
    dimensions: Annotated[int | None, example(64)] = None


# ---- replies


class PromptDetails(Struct):
    """Of the prompt's tokens.

    Attributes:
        cached_tokens: Those that were in the cache.
    """

    cached_tokens: Annotated[int, example(0)]


class Usage(Struct, kw_only=True):
    """Tokens of a request.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Tokens that were generated.
        total_tokens: Both together.
        prompt_tokens_details: More about those of the prompt.
    """

    prompt_tokens: Annotated[int, example(12)]
    completion_tokens: Annotated[int, example(20)]
    total_tokens: Annotated[int, example(32)]
    prompt_tokens_details: PromptDetails


class Function(Struct, kw_only=True):
    """A function that the model calls.

    Attributes:
        name: Its name.
        arguments: Its arguments as JSON, such as "{\\"city\\": \\"Rome\\"}"; in a stream a piece of
            that.
    """

    name: Annotated[str | UnsetType, example("weather")] = UNSET
    arguments: Annotated[str, example('{"city": "Rome"}')]


class ToolCall(Struct, kw_only=True):
    """A call, or in a stream a piece of one, whose first has ``id`` and ``name``.

    Attributes:
        index: Of the call in a stream, from 0.
        id: Id of the call, which its result repeats.
        type: Always "function".
        function: What is called.
    """

    index: Annotated[int | UnsetType, example(0)] = UNSET
    id: Annotated[str | UnsetType, example("call_1")] = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: Function


class Message(Struct, kw_only=True):
    """An answer.

    Attributes:
        role: Always "assistant".
        content: Text of the answer; null if there are only calls.
        reasoning_content: What the model thought first.
        tool_calls: Functions that it calls.
    """

    role: Literal["assistant"] = "assistant"
    content: Annotated[str | None, example("Anna is a teacher.")]
    reasoning_content: Annotated[str | UnsetType, example("The user asks for a name.")] = UNSET
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
        index: Of the answer, from 0.
        message: The answer.
        logprobs: Those of its tokens, if asked for.
        finish_reason: Why it ended: "stop", "length" or "tool_calls".
        attention: Attention of each of its tokens, if asked for.
        prompt_attention: Rows of the prompt, if asked for.
    """

    index: Annotated[int, example(0)]
    message: Message
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Annotated[str, example("stop")]
    attention: list[TokenAttention] | UnsetType = UNSET
    prompt_attention: list[PromptAttention] | UnsetType = UNSET


class Verbose(Struct):
    """What became of a chat.

    Attributes:
        prompt: Its prompt, with special tokens.
    """

    prompt: Annotated[str, example("<|im_start|>user")]


class ChatCompletion(Struct, kw_only=True):
    """Reply of ``POST /v1/chat/completions``.

    Attributes:
        id: Id of the reply; kept attention has it as its name.
        object: Always "chat.completion".
        created: When it was made, in seconds since 1970.
        model: The model, as the request names it.
        system_fingerprint: What generated it.
        choices: The answers.
        usage: Tokens of the request.
        timings: What it cost.
        __verbose: The prompt, with ``verbose``.
    """

    id: Annotated[str, example("chatcmpl-1")]
    object: Literal["chat.completion"] = "chat.completion"
    created: Annotated[int, example(1767225600)]
    model: Annotated[str, example("demo")]
    system_fingerprint: Annotated[str, example("kqview-0.1.0")]
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings
    verbose: Annotated[Verbose | UnsetType, example({"prompt": "<|im_start|>user"})] = (
        msgspec.field(default=UNSET, name="__verbose")
    )


class TextLogprobs(Struct, kw_only=True):
    """Logprobs in OpenAI's older form, and in that of chat completions.

    Of a prompt that is echoed there is only the older form, with nulls for its first token.

    Attributes:
        content: Each token with those that could have been, as in chat completions.
        tokens: Text of each token.
        token_logprobs: Logprob of each before bias, grammar and samplers.
        top_logprobs: The most probable tokens at each place by their texts.
        text_offset: Character of the text at which each token begins.
    """

    content: list[TokenLogprob] | UnsetType = UNSET
    tokens: Annotated[list[str], example([" a"])]
    token_logprobs: Annotated[list[float | None], example([-0.6])]
    top_logprobs: Annotated[list[dict[str, float] | None], example([{" a": -0.6, " the": -1.5}])]
    text_offset: Annotated[list[int], example([0])]


class TextChoice(Struct, kw_only=True):
    """One of the texts.

    Attributes:
        index: Of the text, from 0.
        text: The text.
        logprobs: Those of its tokens, if asked for, in OpenAI's older form and that of chat
            completions.
        finish_reason: Why it ended: "stop" or "length".
        attention: Attention of each of its tokens, if asked for.
        prompt_attention: Rows of the prompt, if asked for.
        tool_calls: Calls that a mod made.
        tool_calls: Calls that a mod made.
    """

    index: Annotated[int, example(0)]
    text: Annotated[str, example(" teacher.")]
    logprobs: TextLogprobs | None = None
    finish_reason: Annotated[str, example("stop")]
    attention: list[TokenAttention] | UnsetType = UNSET
    prompt_attention: list[PromptAttention] | UnsetType = UNSET
    tool_calls: list[ModCall] | UnsetType = UNSET


class TextCompletion(Struct, kw_only=True):
    """Reply of ``POST /v1/completions``.

    Attributes:
        id: Id of the reply; kept attention has it as its name.
        object: Always "text_completion".
        created: When it was made, in seconds since 1970.
        model: The model, as the request names it.
        system_fingerprint: What generated it.
        choices: The texts.
        usage: Tokens of the request.
        timings: What it cost.
    """

    id: Annotated[str, example("cmpl-1")]
    object: Literal["text_completion"] = "text_completion"
    created: Annotated[int, example(1767225600)]
    model: Annotated[str, example("demo")]
    system_fingerprint: Annotated[str, example("kqview-0.1.0")]
    choices: list[TextChoice]
    usage: Usage
    timings: Timings


class EmbeddingUsage(Struct):
    """Tokens of the texts.

    Attributes:
        prompt_tokens: Tokens of all texts.
        total_tokens: The same.
    """

    prompt_tokens: Annotated[int, example(6)]
    total_tokens: Annotated[int, example(6)]


class Embedding(Struct, kw_only=True):
    """The vector of one text.

    Attributes:
        object: Always "embedding".
        index: Of the text, from 0.
        embedding: Its numbers, or base64 of little-endian float32.
    """

    object: Literal["embedding"] = "embedding"
    index: Annotated[int, example(0)]
    embedding: Annotated[list[float] | str, example([0.6, -0.8])]


class Embeddings(Struct, kw_only=True):
    """Reply of ``POST /v1/embeddings``.

    Attributes:
        object: Always "list".
        model: The model, as the request names it.
        data: The vectors, in the order of the texts.
        usage: Tokens of the request.
    """

    object: Literal["list"] = "list"
    model: Annotated[str, example("demo")]
    data: list[Embedding]
    usage: EmbeddingUsage


class ModelMeta(Struct, kw_only=True):
    """Facts about a model, as llama.cpp's server names them.

    Attributes:
        n_vocab: Tokens of the vocabulary.
        n_ctx: Longest prompt in tokens.
        n_ctx_train: Tokens that it was trained with.
        n_embd: Length of a vector.
        n_params: Number of parameters.
        size: Bytes of its tensors.
        ftype: How its tensors are stored.
        architecture: Architecture, as its file names it.
    """

    n_vocab: Annotated[int, example(1024)]
    n_ctx: Annotated[int, example(2048)]
    n_ctx_train: Annotated[int, example(512)]
    n_embd: Annotated[int, example(256)]
    n_params: Annotated[int, example(3200000)]
    size: Annotated[int, example(6400000)]
    ftype: Annotated[str, example("F16")]
    architecture: Annotated[str, example("llama")]


class ModelStatus(Struct, kw_only=True):
    """Whether a model is loaded.

    Attributes:
        value: "unloaded", "loading" or "loaded".
        failed: Whether loading it failed last.
        progress: Loaded fraction, 0..1.
    """

    value: Annotated[str, example("loaded")]
    failed: bool | UnsetType = UNSET
    progress: Annotated[float | UnsetType, example(0.5)] = UNSET


class Model(Struct, kw_only=True):
    """A model that answers requests.

    Attributes:
        id: Its id, for ``model`` of a request.
        object: Always "model".
        created: When the list was made, in seconds since 1970.
        owned_by: Always "llamacpp".
        aliases: Further names of it.
        tags: Always [].
        meta: Facts about it; null until it is loaded.
        status: Whether it is loaded.
    """

    id: Annotated[str, example("demo")]
    object: Literal["model"] = "model"
    created: Annotated[int, example(1767225600)]
    owned_by: Literal["llamacpp"] = "llamacpp"
    aliases: Annotated[list[str], example(["small"])]
    tags: Annotated[list[str], example([])]
    meta: ModelMeta | None
    status: ModelStatus


class Models(Struct, kw_only=True):
    """Reply of ``GET /v1/models``.

    Attributes:
        object: Always "list".
        data: The models.
        models: The same in Ollama's form.
    """

    object: Literal["list"] = "list"
    data: list[Model]
    models: Annotated[list[Object], example([{"name": "demo"}])]
