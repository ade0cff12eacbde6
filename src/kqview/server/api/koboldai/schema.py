"""Bodies of the KoboldAI API besides those of generations, field for field.

Requests accept every name that the dialects and their forks use for the same thing. Unknown names
are ignored.
"""

from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.logprobs import Logprobs
from kqview.server.web.described import example

API_VERSION: Final = "1.2.5"
"""Version of the KoboldAI United API, by which clients decide what to send."""
KOBOLDCPP_VERSION: Final = "1.101"
"""The KoboldCpp whose routes these are."""


# ---- text and ids


class KoboldTokenizeBody(Struct, kw_only=True):
    """Text to tokenize.

    Attributes:
        text: The text.
        content: Another name for ``text``.
        add_special_tokens: Whether tokens that the model wants around a text are added; false if
            not given.
        add_special: Another name for it.
        with_pieces: Whether each id comes with its text; true if not given.
    """

    text: Annotated[str | None, example("Anna is a")] = None
    content: Annotated[str | None, example("Anna is a")] = None
    add_special_tokens: Annotated[bool | None, example(default=False)] = None
    add_special: bool | None = None
    with_pieces: Annotated[bool | None, example(default=True)] = None


class TokenText(Struct):
    """One token.

    Attributes:
        token_id: Its id.
        text: The text that it completes.
    """

    token_id: Annotated[int, example(259)]
    text: Annotated[str | UnsetType, example(" a")] = UNSET


class KoboldTokenized(Struct):
    """Tokens of a text.

    Attributes:
        tokens: Each token; their texts join to the whole.
        token_ids: Their ids.
        token_count: How many there are.
    """

    tokens: list[TokenText]
    token_ids: Annotated[list[int], example([259, 354])]
    token_count: Annotated[int, example(2)]


class KoboldDetokenizeBody(Struct, kw_only=True):
    """Ids to turn into text.

    Attributes:
        token_ids: The ids.
        tokens: Another name for ``token_ids``.
    """

    token_ids: Annotated[list[int] | None, example([259, 354])] = None
    tokens: Annotated[list[int] | None, example([259, 354])] = None


class Detokenized(Struct):
    """Text of ids.

    Attributes:
        text: The text.
    """

    text: Annotated[str, example("Anna is a")]


class TokenCountBody(Struct, kw_only=True):
    """Text whose tokens to count.

    Attributes:
        prompt: The text.
        special: Whether tokens that the model wants around it count.
    """

    prompt: Annotated[str | None, example("Anna is a")] = None
    special: bool = True


class KoboldTokenCount(Struct):
    """How many tokens, and which.

    Attributes:
        value: How many; -1 in a failure.
        ids: Which.
    """

    value: Annotated[int, example(2)]
    ids: Annotated[list[int], example([259, 354])]


class ExtraDetokenizeBody(Struct, kw_only=True):
    """Ids to turn into text.

    Attributes:
        ids: The ids.
    """

    ids: Annotated[list[int], example([259, 354])]


class ExtraDetokenized(Struct):
    """Text of ids.

    Attributes:
        result: The text.
        success: Whether there is one.
    """

    result: Annotated[str, example("Anna is a")]
    success: bool


# ---- what runs


class KoboldModel(Struct, kw_only=True):
    """What a client needs to read attention and to stay within the context.

    Attributes:
        result: Its name.
        model_name: The same.
        vocab_size: Tokens of the vocabulary.
        num_layers: Layers.
        num_attention_heads: Heads of each.
        num_key_value_heads: Heads with keys and values of their own.
        embedding_size: Numbers for each token between layers.
        max_context_length: Longest prompt in tokens.
        max_trained_context: Tokens that it was trained with.
        bos_token_id: Id that begins a text; -1 if there is none.
        eos_token_id: Id that ends one; -1 if there is none.
        eot_token_id: Id that ends a message; -1 if there is none.
        rope_freq_base: Base frequency of its positions.
        rope_freq_scale: Factor of its positions.
        attention_layers: Layers that rows come from, in their order; absent if all do.
    """

    result: Annotated[str, example("demo")]
    model_name: Annotated[str, example("demo")]
    vocab_size: Annotated[int, example(1024)]
    num_layers: Annotated[int, example(4)]
    num_attention_heads: Annotated[int, example(8)]
    num_key_value_heads: Annotated[int, example(4)]
    embedding_size: Annotated[int, example(256)]
    max_context_length: Annotated[int, example(2048)]
    max_trained_context: Annotated[int, example(512)]
    bos_token_id: Annotated[int, example(1)]
    eos_token_id: Annotated[int, example(2)]
    eot_token_id: Annotated[int, example(2)]
    rope_freq_base: Annotated[float, example(10000.0)]
    rope_freq_scale: Annotated[float, example(1.0)]
    attention_layers: Annotated[tuple[int, ...] | UnsetType, example([3, 7])] = UNSET


class ModelInfoReply(Struct, kw_only=True):
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


class LoadBody(Struct, kw_only=True):
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


class ModelsReply(Struct):
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


class Result(Struct):
    """One text.

    Attributes:
        result: The text.
    """

    result: Annotated[str, example("1.2.5")]


class Number(Struct):
    """One number.

    Attributes:
        value: The number.
    """

    value: Annotated[int, example(2048)]


class Word(Struct):
    """One text.

    Attributes:
        value: The text.
    """

    value: Annotated[str, example("")]


class Words(Struct):
    """A list of texts.

    Attributes:
        values: The texts.
    """

    values: Annotated[list[str], example([])]


class Status(Struct):
    """Whether the server is there.

    Attributes:
        status: Always "ok", such as "ok".
    """

    status: Annotated[str, example("ok")]


class Version(Struct, kw_only=True):
    """Which KoboldCpp this answers as, and which of its parts exist.

    Attributes:
        result: Always "KoboldCpp".
        version: Its version.
        protected: Whether a key is needed.
        llm: Whether it generates text.
        txt2img: Whether it draws.
        vision: Whether it reads pictures.
        audio: Whether it reads sound.
        transcribe: Whether it writes down speech.
        multiplayer: Whether stories are shared.
        websearch: Whether it searches the web.
        tts: Whether it speaks.
        embeddings: Whether KoboldCpp's own route of embeddings is there.
        savedata: Whether it keeps stories.
        admin: Whether KoboldCpp's administration is there; 0 for no.
    """

    result: Annotated[str, example("KoboldCpp")] = "KoboldCpp"
    version: str = KOBOLDCPP_VERSION
    protected: bool = False
    llm: bool = True
    txt2img: bool = False
    vision: bool = False
    audio: bool = False
    transcribe: bool = False
    multiplayer: bool = False
    websearch: bool = False
    tts: bool = False
    embeddings: bool = False
    savedata: bool = False
    admin: int = 0


class Software(Struct):
    """What serves.

    Attributes:
        name: Its name.
        version: Its version.
    """

    name: Annotated[str, example("kqview")]
    version: Annotated[str, example("0.1.0")]


class Api(Struct, kw_only=True):
    """An API of the server.

    Attributes:
        name: Its name.
        rel_url: Where its routes begin.
        documentation: Path of its documentation.
        version: Its version.
    """

    name: Annotated[str, example("KoboldAI API")]
    rel_url: Annotated[str, example("/api")]
    documentation: Annotated[str, example("/docs")]
    version: Annotated[str, example("1.2.5")]


class Apis(Struct):
    """APIs of the server.

    Attributes:
        koboldai: KoboldAI's.
    """

    koboldai: Api


class ServiceInfo(Struct, kw_only=True):
    """Which APIs are here, as KoboldAI's services tell each other.

    Attributes:
        version: Version of this form.
        software: What serves.
        api: Its APIs.
    """

    version: Annotated[str, example("0.2")]
    software: Software
    api: Apis


class Perf(Struct, kw_only=True):
    """What the last generation cost, and what the server does now.

    Attributes:
        last_process: Milliseconds for a token of the prompt.
        last_eval: Milliseconds for a generated token.
        last_token_count: Tokens that were generated.
        last_input_count: Tokens of the prompt.
        last_process_time: Seconds of the prompt.
        last_eval_time: Seconds of generating.
        last_process_speed: Tokens of the prompt a second.
        last_eval_speed: Generated tokens a second.
        last_seed: Its seed; -1 if none was given.
        total_gens: Generations so far.
        total_img_gens: Always 0.
        stop_reason: Why it ended: -1 none, 0 length, 1 the model ended its text, 2 a stop of the
            request.
        queue: Requests that wait.
        idle: 1 if nothing runs.
        uptime: Seconds since the start.
        idletime: Seconds since the last generation.
        quiet: Always false.
        hordeexitcounter: Always 0.
    """

    last_process: Annotated[float, example(0.7)]
    last_eval: Annotated[float, example(2.0)]
    last_token_count: Annotated[int, example(20)]
    last_input_count: Annotated[int, example(12)]
    last_process_time: Annotated[float, example(0.0085)]
    last_eval_time: Annotated[float, example(0.04)]
    last_process_speed: Annotated[float, example(1411.8)]
    last_eval_speed: Annotated[float, example(500.0)]
    last_seed: Annotated[int, example(7)]
    total_gens: Annotated[int, example(3)]
    total_img_gens: Annotated[int, example(0)] = 0
    stop_reason: Annotated[int, example(0)]
    queue: Annotated[int, example(0)]
    idle: Annotated[int, example(1)]
    uptime: Annotated[float, example(60.0)]
    idletime: Annotated[float, example(12.0)]
    quiet: bool = False
    hordeexitcounter: Annotated[int, example(0)] = 0


# ---- generations that run


class RunBody(Struct, kw_only=True):
    """Which generation is meant.

    Attributes:
        genkey: KoboldAI's name of the request.
        request_id: Name of the request.
    """

    genkey: Annotated[str | None, example("KCPP1234")] = None
    request_id: Annotated[str | None, example("r1")] = None


class Aborted(Struct):
    """Whether something was ended; texts, not booleans.

    Attributes:
        success: "true" if a generation was ended, else "false".
        done: "true" if it was clear which was meant.
    """

    success: Annotated[str, example("true")]
    done: Annotated[str, example("true")]


class ResultText(Struct):
    """Text so far.

    Attributes:
        text: The text; "" if nothing runs.
    """

    text: Annotated[str, example(" teacher.")]


class Texts(Struct):
    """Text of each result.

    Attributes:
        results: Each result.
    """

    results: list[ResultText]


class LastLogprobs(Struct):
    """Logprobs of the last generation that was asked for some.

    Attributes:
        logprobs: Those of its tokens; null if none were asked for.
    """

    logprobs: Logprobs | None


EMPTY: Final = msgspec.Raw(b"{}")
