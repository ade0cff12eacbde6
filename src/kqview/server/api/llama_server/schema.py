"""Bodies of llama.cpp's server: typed requests and replies, field for field.

Unknown names are ignored.
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.llama_fields import LlamaFields, Timings

# ---- text and ids

Parts = Annotated[list[int | str], msgspec.Meta(max_length=2**20)]
"""Ids and texts, which follow one another."""


class TokenizeBody(Struct, kw_only=True):
    """Text to tokenize, or a list of ids and texts."""

    content: str | Parts | None = None
    model: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class Piece(Struct):
    """A token and its text; its bytes where they are not UTF-8."""

    id: int
    piece: str | list[int]


class Tokenized(Struct):
    """Tokens of a text."""

    tokens: list[int | Piece]


class DetokenizeBody(Struct, kw_only=True):
    """Ids to turn into text."""

    tokens: list[int] | None = None
    model: str | None = None


class Content(Struct):
    """A text."""

    content: str


class TemplateBody(Struct, kw_only=True):
    """Messages of a chat."""

    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Prompt(Struct):
    """The text that a chat template makes."""

    prompt: str


class InputTokens(Struct):
    """How many tokens a chat has."""

    input_tokens: int
    object: str = "response.input_tokens"


# ---- completions


class CompletionBody(LlamaFields):
    """A prompt to complete: text, ids, a mixture of them, ``{"prompt_string": ...}``, or a list."""

    prompt: str | dict[str, Any] | list[Any] | None = None


class Extra(Struct, kw_only=True):
    """Another file of a project."""

    text: str
    filename: str = "tmp"


class InfillBody(LlamaFields):
    """Code with a gap: what precedes it, what follows it, and a beginning for it."""

    input_prefix: str | Parts | None = None
    input_suffix: str | Parts | None = None
    input_extra: Annotated[list[Extra], msgspec.Meta(max_length=4096)] | None = None
    prompt: str | None = None


class TopLogprob(Struct):
    """A token that could have been chosen; its ``prob`` with ``post_sampling_probs``."""

    id: int
    token: str
    bytes: list[int]
    logprob: float | UnsetType = UNSET
    prob: float | UnsetType = UNSET


class TokenLogprob(TopLogprob):
    """A token that was chosen, and those that could have been."""

    top_logprobs: list[TopLogprob] | UnsetType = UNSET
    top_probs: list[TopLogprob] | UnsetType = UNSET


class Progress(Struct):
    """How much of a prompt is evaluated."""

    total: int
    cache: int
    processed: int
    time_ms: int


class Partial(Struct, kw_only=True):
    """A token of a completion that is streamed."""

    index: int
    content: str
    tokens: list[int]
    stop: bool = False
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    timings: Timings | UnsetType = UNSET
    prompt_progress: Progress | UnsetType = UNSET
    completion_probabilities: list[TokenLogprob] | UnsetType = UNSET
    removed: dict[str, Any] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A completion, or the end of one that was streamed."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: str
    stopping_word: str
    tokens_cached: int
    timings: Timings
    completion_probabilities: list[TokenLogprob] | UnsetType = UNSET
