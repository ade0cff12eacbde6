"""Bodies of the KoboldAI API with attention: typed requests and replies, field for field.

Requests accept every name that this protocol, its forks and the dream protocol use for the same
thing. Unknown names are ignored.
"""

from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.attention_protocol import AttentionFields, AttentionValues, Logprobs
from kqview.server.models.attention import Aggregation, Format
from kqview.types.capture import DType

API_VERSION: Final = "1.2.5"
"""Version of the KoboldAI United API, by which clients decide what to send."""
KOBOLDCPP_VERSION: Final = "1.101"
"""The KoboldCpp whose routes these are."""


class StreamBody(AttentionFields):
    """A generation that is streamed; see `AttentionFields`."""


class QueryFields(Struct, kw_only=True):
    """Fields of `StreamBody` that the URL's query may give if the body does not."""

    attention_format: Format | None = None
    attention_values: AttentionValues | None = None
    aggregation_mode: Aggregation | None = None
    dtype: DType | None = None


# ---- text and ids


class TokenizeBody(Struct, kw_only=True):
    """Text to tokenize.

    Attributes:
        text: The text, such as "Anna is a".
        content: Another name for ``text``.
        add_special_tokens: Whether tokens that the model wants around a text are added; false if
            not given.
        add_special: Another name for it.
        with_pieces: Whether each id comes with its text; true if not given.
    """

    text: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None


class TokenText(Struct):
    """One token.

    Attributes:
        token_id: Its id, such as 259.
        text: The text that it completes, such as " a".
    """

    token_id: int
    text: str | UnsetType = UNSET


class Tokenized(Struct):
    """Tokens of a text.

    Attributes:
        tokens: Each token; their texts join to the whole.
        token_ids: Their ids, such as [259, 354].
        token_count: How many there are, such as 2.
    """

    tokens: list[TokenText]
    token_ids: list[int]
    token_count: int


class DetokenizeBody(Struct, kw_only=True):
    """Ids to turn into text.

    Attributes:
        token_ids: The ids, such as [259, 354].
        tokens: Another name for ``token_ids``.
    """

    token_ids: list[int] | None = None
    tokens: list[int] | None = None


class Detokenized(Struct):
    """Text of ids.

    Attributes:
        text: The text, such as "Anna is a".
    """

    text: str


class TokenCountBody(Struct, kw_only=True):
    """Text whose tokens to count.

    Attributes:
        prompt: The text, such as "Anna is a".
        special: Whether tokens that the model wants around it count.
    """

    prompt: str | None = None
    special: bool = True


class TokenCount(Struct):
    """How many tokens, and which.

    Attributes:
        value: How many, such as 2; -1 in a failure.
        ids: Which, such as [259, 354].
    """

    value: int
    ids: list[int]


class ExtraDetokenizeBody(Struct, kw_only=True):
    """Ids to turn into text.

    Attributes:
        ids: The ids, such as [259, 354].
    """

    ids: list[int]


class ExtraDetokenized(Struct):
    """Text of ids.

    Attributes:
        result: The text, such as "Anna is a".
        success: Whether there is one.
    """

    result: str
    success: bool


# ---- what runs


class Model(Struct, kw_only=True):
    """What a client needs to read attention and to stay within the context.

    Attributes:
        result: Its name, such as "demo".
        model_name: The same, such as "demo".
        vocab_size: Tokens of the vocabulary, such as 1024.
        num_layers: Layers, such as 4.
        num_attention_heads: Heads of each, such as 8.
        num_key_value_heads: Heads with keys and values of their own, such as 4.
        embedding_size: Numbers for each token between layers, such as 256.
        max_context_length: Longest prompt in tokens, such as 2048.
        max_trained_context: Tokens that it was trained with, such as 512.
        bos_token_id: Id that begins a text, such as 1; -1 if there is none.
        eos_token_id: Id that ends one, such as 2; -1 if there is none.
        eot_token_id: Id that ends a message, such as 2; -1 if there is none.
        rope_freq_base: Base frequency of its positions, such as 10000.0.
        rope_freq_scale: Factor of its positions, such as 1.0.
        attention_layers: Layers that rows come from, in their order, such as [3, 7]; absent if all
            do.
    """

    result: str
    model_name: str
    vocab_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    embedding_size: int
    max_context_length: int
    max_trained_context: int
    bos_token_id: int
    eos_token_id: int
    eot_token_id: int
    rope_freq_base: float
    rope_freq_scale: float
    attention_layers: tuple[int, ...] | UnsetType = UNSET


class Result(Struct):
    """One text.

    Attributes:
        result: The text, such as "1.2.5".
    """

    result: str


class Number(Struct):
    """One number.

    Attributes:
        value: The number, such as 2048.
    """

    value: int


class Word(Struct):
    """One text.

    Attributes:
        value: The text, such as "".
    """

    value: str


class Words(Struct):
    """A list of texts.

    Attributes:
        values: The texts, such as [].
    """

    values: list[str]


class Status(Struct):
    """Whether the server is there.

    Attributes:
        status: Always "ok", such as "ok".
    """

    status: str


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

    result: str = "KoboldCpp"
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
        name: Its name, such as "kqview".
        version: Its version, such as "0.1.0".
    """

    name: str
    version: str


class Api(Struct, kw_only=True):
    """An API of the server.

    Attributes:
        name: Its name, such as "KoboldAI API".
        rel_url: Where its routes begin, such as "/api".
        documentation: Path of its documentation, such as "/docs".
        version: Its version, such as "1.2.5".
    """

    name: str
    rel_url: str
    documentation: str
    version: str


class Apis(Struct):
    """APIs of the server.

    Attributes:
        koboldai: KoboldAI's.
    """

    koboldai: Api


class ServiceInfo(Struct, kw_only=True):
    """Which APIs are here, as KoboldAI's services tell each other.

    Attributes:
        version: Version of this form, such as "0.2".
        software: What serves.
        api: Its APIs.
    """

    version: str
    software: Software
    api: Apis


class Perf(Struct, kw_only=True):
    """What the last generation cost, and what the server does now.

    Attributes:
        last_process: Milliseconds for a token of the prompt, such as 0.7.
        last_eval: Milliseconds for a generated token, such as 2.0.
        last_token_count: Tokens that were generated, such as 20.
        last_input_count: Tokens of the prompt, such as 12.
        last_process_time: Seconds of the prompt, such as 0.0085.
        last_eval_time: Seconds of generating, such as 0.04.
        last_process_speed: Tokens of the prompt a second, such as 1411.8.
        last_eval_speed: Generated tokens a second, such as 500.0.
        last_seed: Its seed, such as 7; -1 if none was given.
        total_gens: Generations so far, such as 3.
        total_img_gens: Always 0.
        stop_reason: Why it ended: -1 none, 0 length, 1 the model ended its text, 2 a stop of the
            request, such as 0.
        queue: Requests that wait, such as 0.
        idle: 1 if nothing runs, such as 1.
        uptime: Seconds since the start, such as 60.0.
        idletime: Seconds since the last generation, such as 12.0.
        quiet: Always false.
        hordeexitcounter: Always 0.
    """

    last_process: float
    last_eval: float
    last_token_count: int
    last_input_count: int
    last_process_time: float
    last_eval_time: float
    last_process_speed: float
    last_eval_speed: float
    last_seed: int
    total_gens: int
    total_img_gens: int = 0
    stop_reason: int
    queue: int
    idle: int
    uptime: float
    idletime: float
    quiet: bool = False
    hordeexitcounter: int = 0


# ---- generations that run


class RunBody(Struct, kw_only=True):
    """Which generation is meant.

    Attributes:
        genkey: KoboldAI's name of the request, such as "KCPP1234".
        request_id: Name of the request, such as "r1".
    """

    genkey: str | None = None
    request_id: str | None = None


class Aborted(Struct):
    """Whether something was ended; texts, not booleans.

    Attributes:
        success: "true" if a generation was ended, else "false", such as "true".
        done: "true" if it was clear which was meant, such as "true".
    """

    success: str
    done: str


class ResultText(Struct):
    """Text so far.

    Attributes:
        text: The text, such as " teacher."; "" if nothing runs.
    """

    text: str


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
