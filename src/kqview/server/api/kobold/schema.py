"""Bodies of the KoboldAI API with attention: typed requests and replies, field for field.

Requests accept every name that this protocol, its forks and the dream protocol use for the same
thing. Unknown names are ignored.
"""

from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.attention_protocol import AttentionFields, AttentionValues, Logprobs
from kqview.server.attention import Aggregation, Format
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
    """Text to tokenize."""

    text: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None


class TokenText(Struct):
    """One token, with the text that it completes."""

    token_id: int
    text: str | UnsetType = UNSET


class Tokenized(Struct):
    """Tokens of a text; their texts join to it."""

    tokens: list[TokenText]
    token_ids: list[int]
    token_count: int


class DetokenizeBody(Struct, kw_only=True):
    """Ids to turn into text."""

    token_ids: list[int] | None = None
    tokens: list[int] | None = None


class Detokenized(Struct):
    """Text of ids."""

    text: str


class TokenCountBody(Struct, kw_only=True):
    """Text whose tokens to count; ``special``: with those that the model wants around it."""

    prompt: str | None = None
    special: bool = True


class TokenCount(Struct):
    """How many tokens, and which."""

    value: int
    ids: list[int]


class ExtraDetokenizeBody(Struct, kw_only=True):
    """Ids to turn into text."""

    ids: list[int]


class ExtraDetokenized(Struct):
    """Text of ids."""

    result: str
    success: bool


# ---- what runs


class Model(Struct, kw_only=True):
    """What a client needs to read attention and to stay within the context.

    ``attention_layers`` is there if not every layer has attention: rows are of these layers, in
    this order.
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
    """One text."""

    result: str


class Number(Struct):
    """One number."""

    value: int


class Word(Struct):
    """One text."""

    value: str


class Words(Struct):
    """A list of texts."""

    values: list[str]


class Status(Struct):
    """Whether the server is there."""

    status: str


class Version(Struct, kw_only=True):
    """Which KoboldCpp this answers as, and which of its parts exist."""

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


class Perf(Struct, kw_only=True):
    """What the last generation cost, and what the server does now.

    ``last_process`` and ``last_eval`` are milliseconds a token, the others seconds and tokens a
    second. ``stop_reason``: -1 none, 0 length, 1 the model ended its text, 2 a stop of the request.
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
    """Which generation is meant: that of a ``genkey`` or of a ``request_id``."""

    genkey: str | None = None
    request_id: str | None = None


class Aborted(Struct):
    """Whether something was ended, and whether the request was carried out; texts, not booleans."""

    success: str
    done: str


class ResultText(Struct):
    """Text so far."""

    text: str


class Texts(Struct):
    """Text of each result."""

    results: list[ResultText]


class LastLogprobs(Struct):
    """Logprobs of the last generation that was asked for some."""

    logprobs: Logprobs | None


EMPTY: Final = msgspec.Raw(b"{}")
