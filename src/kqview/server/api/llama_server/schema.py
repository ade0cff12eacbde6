"""Bodies of llama.cpp's server: typed requests and replies, field for field.

Unknown names are ignored.
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.chat_message import MessageObject, ToolObject
from kqview.server.api.wire.event_parts import ModCall, Removed
from kqview.server.api.wire.llama_fields import LlamaFields, Progress, Timings
from kqview.server.web.described import example

# ---- text and ids

Parts = Annotated[list[int | str], msgspec.Meta(max_length=2**20)]
"""Ids and texts, which follow one another."""


class TokenizeBody(Struct, kw_only=True):
    """Text to tokenize, or a list of ids and texts.

    Attributes:
        content: A text, or a list of ids and texts.
        model: Id of a configured model; the default model if not given.
        add_special: Whether tokens that the model wants around a text are added; false if not
            given.
        parse_special: Whether texts of special tokens become these tokens; true if not given.
        with_pieces: Whether each id comes with its text; false if not given.
    """

    content: Annotated[str | Parts | None, example("Anna is a")] = None
    model: Annotated[str | None, example("demo")] = None
    add_special: Annotated[bool | None, example(default=False)] = None
    parse_special: Annotated[bool | None, example(default=True)] = None
    with_pieces: Annotated[bool | None, example(default=False)] = None


class Piece(Struct):
    """A token and its text.

    Attributes:
        id: Its id.
        piece: Its text; a list of its bytes where they are not UTF-8.
    """

    id: Annotated[int, example(259)]
    piece: Annotated[str | list[int], example(" a")]


class Tokenized(Struct):
    """Tokens of a text.

    Attributes:
        tokens: Ids, or objects with their texts.
    """

    tokens: Annotated[list[int | Piece], example([259, 354])]


class DetokenizeBody(Struct, kw_only=True):
    """Ids to turn into text.

    Attributes:
        tokens: The ids.
        model: Id of a configured model; the default model if not given.
    """

    tokens: Annotated[list[int] | None, example([259, 354])] = None
    model: Annotated[str | None, example("demo")] = None


class Content(Struct):
    """A text.

    Attributes:
        content: The text.
    """

    content: Annotated[str, example("Anna is a")]


class TemplateBody(Struct, kw_only=True):
    """Messages of a chat.

    Attributes:
        messages: The conversation, the oldest message first.
        model: Id of a configured model; the default model if not given.
        tools: Functions that the model may call.
        add_generation_prompt: Whether the prompt ends with the beginning of an answer; true if not
            given.
        chat_template: Another chat template; the model's if not given. The server's setting
            request_chat_template allows it.
        chat_template_kwargs: Variables for the chat template.
    """

    messages: Annotated[
        list[MessageObject] | None, example([{"role": "user", "content": "Who is Anna?"}])
    ] = None
    model: Annotated[str | None, example("demo")] = None
    tools: Annotated[
        list[ToolObject] | None, example([{"type": "function", "function": {"name": "weather"}}])
    ] = None
    add_generation_prompt: Annotated[bool | None, example(default=True)] = None
    chat_template: Annotated[str | None, example("{{ messages[0].content }}")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, example({"enable_thinking": False})] = (
        None
    )


class Prompt(Struct):
    """The text that a chat template makes.

    Attributes:
        prompt: The text.
    """

    prompt: Annotated[str, example("user: Who is Anna?")]


class InputTokens(Struct):
    """How many tokens a chat has.

    Attributes:
        input_tokens: How many there are.
        object: Always "response.input_tokens".
    """

    input_tokens: Annotated[int, example(12)]
    object: Annotated[str, example("response.input_tokens")] = "response.input_tokens"


# ---- completions


class CompletionBody(LlamaFields):
    """A prompt to complete.

    Attributes:
        prompt: A text, ids, a list of both, ``{"prompt_string": ...}``, or a list of these for
            several texts.
    """

    prompt: Annotated[str | dict[str, Any] | list[Any] | None, example("Anna is a")] = None


class Extra(Struct, kw_only=True):
    """Another file of a project.

    Attributes:
        text: What is in it.
        filename: Its name.
    """

    text: Annotated[str, example("def area(r): ...")]
    filename: str = "tmp"


class InfillBody(LlamaFields):
    """Code with a gap.

    Attributes:
        input_prefix: What precedes the gap.
        input_suffix: What follows it.
        input_extra: Other files of the project.
        prompt: How the text in the gap begins.
    """

    input_prefix: Annotated[str | Parts | None, example("def area(r):\n    return ")] = None
    input_suffix: Annotated[str | Parts | None, example("\n")] = None
    input_extra: Annotated[list[Extra], msgspec.Meta(max_length=4096)] | None = None
    prompt: Annotated[str | None, example("3.14")] = None


class TopLogprob(Struct):
    """A token that could have been chosen.

    Attributes:
        id: Its id.
        token: Its text.
        bytes: Its bytes.
        logprob: Its logprob before bias, grammar and samplers.
        prob: Its probability after all samplers, with ``post_sampling_probs``.
    """

    id: Annotated[int, example(354)]
    token: Annotated[str, example(" the")]
    bytes: Annotated[list[int], example([32, 116, 104, 101])]
    logprob: Annotated[float | UnsetType, example(-1.5)] = UNSET
    prob: Annotated[float | UnsetType, example(0.22)] = UNSET


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
        index: Of the text, from 0.
        content: Text that is new; "" while it may be a stop sequence.
        tokens: Ids of it.
        stop: Always false.
        id_slot: The slot that generates it.
        tokens_predicted: Tokens so far.
        tokens_evaluated: Tokens of the prompt.
        timings: What it cost so far, with ``timings_per_token``.
        prompt_progress: How much of the prompt is evaluated, with ``return_progress``, in events
            before the first token.
        completion_probabilities: Logprobs of the token, with ``n_probs``.
        removed: What mods took back.
    """

    index: Annotated[int, example(0)]
    content: Annotated[str, example(" t")]
    tokens: Annotated[list[int], example([259])]
    stop: bool = False
    id_slot: Annotated[int, example(0)]
    tokens_predicted: Annotated[int, example(1)]
    tokens_evaluated: Annotated[int, example(6)]
    timings: Timings | UnsetType = UNSET
    prompt_progress: Progress | UnsetType = UNSET
    completion_probabilities: list[TokenLogprob] | UnsetType = UNSET
    removed: Removed | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A completion, or the end of one that was streamed.

    Attributes:
        index: Of the text, from 0.
        content: The text; "" at the end of a stream.
        tokens: Its ids, with ``return_tokens``.
        id_slot: The slot that generated it.
        stop: Always true.
        model: The model.
        tokens_predicted: Tokens of the text, and the one that ended it if the model did.
        tokens_evaluated: Tokens of the prompt.
        generation_settings: How it was generated.
        prompt: The prompt.
        has_new_line: Whether the text has a line end.
        truncated: Whether the context ended it, or was shifted.
        stop_type: Why it ended: "eos", "word" or "limit".
        stopping_word: The stop text that ended it.
        tokens_cached: Tokens that the slot holds afterwards.
        timings: What it cost.
        completion_probabilities: Logprobs of each token, with ``n_probs``.
        tool_calls: Calls that a mod made.
        tool_calls: Calls that a mod made.
    """

    index: Annotated[int, example(0)]
    content: Annotated[str, example(" teacher.")]
    tokens: Annotated[list[int], example([])]
    id_slot: Annotated[int, example(0)]
    stop: bool = True
    model: Annotated[str, example("demo")]
    tokens_predicted: Annotated[int, example(2)]
    tokens_evaluated: Annotated[int, example(6)]
    generation_settings: Annotated[dict[str, Any], example({"temperature": 0.8})]
    prompt: Annotated[str, example("Anna is a")]
    has_new_line: bool
    truncated: bool
    stop_type: Annotated[str, example("limit")]
    stopping_word: Annotated[str, example("")]
    tokens_cached: Annotated[int, example(7)]
    timings: Timings
    completion_probabilities: list[TokenLogprob] | UnsetType = UNSET
    tool_calls: list[ModCall] | UnsetType = UNSET
