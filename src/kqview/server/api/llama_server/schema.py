"""Bodies of llama.cpp's server: typed requests and replies, field for field.

Unknown names are ignored.
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.chat_message import MessageObject, ToolObject
from kqview.server.api.wire.event_parts import ModCall, Removed
from kqview.server.api.wire.llama_fields import LlamaFields, Progress, Timings

# ---- text and ids

Parts = Annotated[list[int | str], msgspec.Meta(max_length=2**20)]
"""Ids and texts, which follow one another."""


class TokenizeBody(Struct, kw_only=True):
    """Text to tokenize, or a list of ids and texts.

    Attributes:
        content: A text, such as "Anna is a", or a list of ids and texts.
        model: Id of a configured model, such as "demo"; the default model if not given.
        add_special: Whether tokens that the model wants around a text are added; false if not
            given.
        parse_special: Whether texts of special tokens become these tokens; true if not given.
        with_pieces: Whether each id comes with its text; false if not given.
    """

    content: str | Parts | None = None
    model: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class Piece(Struct):
    """A token and its text.

    Attributes:
        id: Its id, such as 259.
        piece: Its text, such as " a"; a list of its bytes where they are not UTF-8.
    """

    id: int
    piece: str | list[int]


class Tokenized(Struct):
    """Tokens of a text.

    Attributes:
        tokens: Ids, such as [259, 354], or objects with their texts.
    """

    tokens: list[int | Piece]


class DetokenizeBody(Struct, kw_only=True):
    """Ids to turn into text.

    Attributes:
        tokens: The ids, such as [259, 354].
        model: Id of a configured model, such as "demo"; the default model if not given.
    """

    tokens: list[int] | None = None
    model: str | None = None


class Content(Struct):
    """A text.

    Attributes:
        content: The text, such as "Anna is a".
    """

    content: str


class TemplateBody(Struct, kw_only=True):
    """Messages of a chat.

    Attributes:
        messages: The conversation, the oldest message first, such as [{"role": "user", "content":
            "Who is Anna?"}].
        model: Id of a configured model, such as "demo"; the default model if not given.
        tools: Functions that the model may call, such as [{"type": "function", "function": {"name":
            "weather"}}].
        add_generation_prompt: Whether the prompt ends with the beginning of an answer; true if not
            given.
        chat_template: Another chat template, such as "{{ messages[0].content }}"; the model's if
            not given. The server's setting request_chat_template allows it.
        chat_template_kwargs: Variables for the chat template, such as {"enable_thinking": false}.
    """

    messages: list[MessageObject] | None = None
    model: str | None = None
    tools: list[ToolObject] | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Prompt(Struct):
    """The text that a chat template makes.

    Attributes:
        prompt: The text, such as "user: Who is Anna?".
    """

    prompt: str


class InputTokens(Struct):
    """How many tokens a chat has.

    Attributes:
        input_tokens: How many there are, such as 12.
        object: Always "response.input_tokens".
    """

    input_tokens: int
    object: str = "response.input_tokens"


# ---- completions


class CompletionBody(LlamaFields):
    """A prompt to complete.

    Attributes:
        prompt: A text, such as "Anna is a", ids, a list of both, ``{"prompt_string": ...}``, or a
            list of these for several texts.
    """

    prompt: str | dict[str, Any] | list[Any] | None = None


class Extra(Struct, kw_only=True):
    """Another file of a project.

    Attributes:
        text: What is in it, such as "def area(r): ...".
        filename: Its name.
    """

    text: str
    filename: str = "tmp"


class InfillBody(LlamaFields):
    """Code with a gap.

    Attributes:
        input_prefix: What precedes the gap, such as "def area(r):\\n    return ".
        input_suffix: What follows it, such as "\\n".
        input_extra: Other files of the project.
        prompt: How the text in the gap begins, such as "3.14".
    """

    input_prefix: str | Parts | None = None
    input_suffix: str | Parts | None = None
    input_extra: Annotated[list[Extra], msgspec.Meta(max_length=4096)] | None = None
    prompt: str | None = None


class TopLogprob(Struct):
    """A token that could have been chosen.

    Attributes:
        id: Its id, such as 354.
        token: Its text, such as " the".
        bytes: Its bytes, such as [32, 116, 104, 101].
        logprob: Its logprob before bias, grammar and samplers, such as -1.5.
        prob: Its probability after all samplers, such as 0.22, with ``post_sampling_probs``.
    """

    id: int
    token: str
    bytes: list[int]
    logprob: float | UnsetType = UNSET
    prob: float | UnsetType = UNSET


class TokenLogprob(TopLogprob):
    """A token that was chosen, and those that could have been.

    Attributes:
        top_logprobs: The most probable tokens at its place, the most probable first.
        top_probs: The same with ``post_sampling_probs``.
    """

    top_logprobs: list[TopLogprob] | UnsetType = UNSET
    top_probs: list[TopLogprob] | UnsetType = UNSET


class Partial(Struct, kw_only=True):
    """A token of a completion that is streamed.

    Attributes:
        index: Of the text, from 0, such as 0.
        content: Text that is new, such as " t"; "" while it may be a stop sequence.
        tokens: Ids of it, such as [259].
        stop: Always false.
        id_slot: The slot that generates it, such as 0.
        tokens_predicted: Tokens so far, such as 1.
        tokens_evaluated: Tokens of the prompt, such as 6.
        timings: What it cost so far, with ``timings_per_token``.
        prompt_progress: How much of the prompt is evaluated, with ``return_progress``, in events
            before the first token.
        completion_probabilities: Logprobs of the token, with ``n_probs``.
        removed: What mods took back.
    """

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
    removed: Removed | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A completion, or the end of one that was streamed.

    Attributes:
        index: Of the text, from 0, such as 0.
        content: The text, such as " teacher."; "" at the end of a stream.
        tokens: Its ids, such as [], with ``return_tokens``.
        id_slot: The slot that generated it, such as 0.
        stop: Always true.
        model: The model, such as "demo".
        tokens_predicted: Tokens of the text, such as 2, and the one that ended it if the model did.
        tokens_evaluated: Tokens of the prompt, such as 6.
        generation_settings: How it was generated, such as {"temperature": 0.8}.
        prompt: The prompt, such as "Anna is a".
        has_new_line: Whether the text has a line end.
        truncated: Whether the context ended it, or was shifted.
        stop_type: Why it ended: "eos", "word" or "limit", such as "limit".
        stopping_word: The stop text that ended it, such as "".
        tokens_cached: Tokens that the slot holds afterwards, such as 7.
        timings: What it cost.
        completion_probabilities: Logprobs of each token, with ``n_probs``.
        tool_calls: Calls that a mod made.
        tool_calls: Calls that a mod made.
    """

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
    tool_calls: list[ModCall] | UnsetType = UNSET
