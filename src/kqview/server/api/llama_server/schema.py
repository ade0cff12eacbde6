"""Bodies of llama.cpp's server: typed requests and replies, field for field.

Unknown names are ignored.
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.chat_message import (
    ANY_MESSAGES,
    ANY_TOOLS,
    GenerationPromptField,
    MessageObject,
    OtherTemplateField,
    TemplateField,
    ToolObject,
)
from kqview.server.api.wire.event_parts import ModCall, Removed
from kqview.server.api.wire.fields import LlamaFields, ModelField, Progress, Timings
from kqview.server.web.described import about

# ---- text and ids

Parts = Annotated[list[int | str], msgspec.Meta(max_length=2**20)]
"""Ids and texts, which follow one another."""


class TokenizeBody(Struct, kw_only=True):
    """Text to tokenize, or a list of ids and texts."""

    content: Annotated[
        str | Parts | None, about("A text, or a list of ids and texts.", "Anna is a")
    ] = None
    model: ModelField = None
    add_special: Annotated[
        bool | None,
        about("Whether tokens that the model wants around a text are added.", default=False),
    ] = None
    parse_special: Annotated[
        bool | None, about("Whether texts of special tokens become these tokens.", default=True)
    ] = None
    with_pieces: Annotated[
        bool | None, about("Whether each id comes with its text.", default=False)
    ] = None


class TokenPiece(Struct):
    """A token and its text."""

    id: Annotated[int, about("Its id.", 259)]
    piece: Annotated[
        str | list[int], about("Its text; a list of its bytes where they are not UTF-8.", " a")
    ]


class Tokenized(Struct):
    """Tokens of a text."""

    tokens: Annotated[
        list[int | TokenPiece], about("Ids, or objects with their texts.", [259, 354])
    ]


class DetokenizeBody(Struct, kw_only=True):
    """Ids to turn into text."""

    tokens: Annotated[list[int] | None, about("The ids.", [259, 354])] = None
    model: ModelField = None


class PlainText(Struct):
    """A text."""

    content: Annotated[str, about("The text.", "Anna is a")]


class TemplateBody(Struct, kw_only=True):
    """Messages of a chat."""

    messages: Annotated[list[MessageObject] | None, ANY_MESSAGES] = None
    model: ModelField = None
    tools: Annotated[list[ToolObject] | None, ANY_TOOLS] = None
    add_generation_prompt: GenerationPromptField = None
    chat_template: OtherTemplateField = None
    chat_template_kwargs: TemplateField = None


class TemplatePrompt(Struct):
    """The text that a chat template makes."""

    prompt: Annotated[str, about("The text.", "user: Who is Anna?")]


# ---- completions


class CompletionFields(LlamaFields, kw_only=True):
    """Fields of a text that is continued or filled in."""

    t_max_predict_ms: Annotated[
        int | None,
        about(
            "Ends the text at the first line end after so many milliseconds; no limit if "
            "not given.",
            500,
        ),
    ] = None


class CompletionBody(CompletionFields):
    """A prompt to complete."""

    prompt: Annotated[
        str | dict[str, Any] | list[Any] | None,
        about(
            'A text, ids, a list of both, ``{"prompt_string": ...}``, or a list of these for '
            "several texts.",
            "Anna is a",
        ),
    ] = None


class InfillFile(Struct, kw_only=True):
    """Another file of a project."""

    text: Annotated[str, about("What is in it.", "def area(r): ...")]
    filename: Annotated[str, about("Its name.")] = "tmp"


class InfillBody(CompletionFields):
    """Code with a gap."""

    input_prefix: Annotated[
        str | Parts | None, about("What precedes the gap.", "def area(r):\n    return ")
    ] = None
    input_suffix: Annotated[str | Parts | None, about("What follows it.", "\n")] = None
    input_extra: Annotated[
        Annotated[list[InfillFile], msgspec.Meta(max_length=4096)] | None,
        about("Other files of the project."),
    ] = None
    prompt: Annotated[str | None, about("How the text in the gap begins.", "3.14")] = None


class CompletionTopLogprob(Struct):
    """A token that could have been chosen."""

    id: Annotated[int, about("Its id.", 354)]
    token: Annotated[str, about("Its text.", " the")]
    bytes: Annotated[list[int], about("Its bytes.", [32, 116, 104, 101])]
    logprob: Annotated[
        float | UnsetType, about("Its logprob before bias, grammar and samplers.", -1.5)
    ] = UNSET
    prob: Annotated[
        float | UnsetType,
        about("Its probability after all samplers, with ``post_sampling_probs``.", 0.22),
    ] = UNSET


class CompletionLogprob(CompletionTopLogprob):
    """A token that was chosen, and those that could have been."""

    top_logprobs: Annotated[
        list[CompletionTopLogprob] | UnsetType,
        about("The most probable tokens at its place, the most probable first."),
    ] = UNSET
    top_probs: Annotated[
        list[CompletionTopLogprob] | UnsetType, about("The same with ``post_sampling_probs``.")
    ] = UNSET


class Partial(Struct, kw_only=True):
    """A token of a completion that is streamed."""

    index: Annotated[int, about("Of the text, from 0.", 0)]
    content: Annotated[str, about('Text that is new; "" while it may be a stop sequence.', " t")]
    tokens: Annotated[list[int], about("Ids of it.", [259])]
    stop: Annotated[bool, about("Always false.")] = False
    id_slot: Annotated[int, about("The slot that generates it.", 0)]
    tokens_predicted: Annotated[int, about("Tokens so far.", 1)]
    tokens_evaluated: Annotated[int, about("Tokens of the prompt.", 6)]
    timings: Annotated[
        Timings | UnsetType, about("What it cost so far, with ``timings_per_token``.")
    ] = UNSET
    prompt_progress: Annotated[
        Progress | UnsetType,
        about(
            "How much of the prompt is evaluated, with ``return_progress``, in events before "
            "the first token."
        ),
    ] = UNSET
    completion_probabilities: Annotated[
        list[CompletionLogprob] | UnsetType, about("Logprobs of the token, with ``n_probs``.")
    ] = UNSET
    removed: Annotated[Removed | UnsetType, about("What mods took back.")] = UNSET


class Completion(Struct, kw_only=True):
    """A completion, or the end of one that was streamed."""

    index: Annotated[int, about("Of the text, from 0.", 0)]
    content: Annotated[str, about('The text; "" at the end of a stream.', " teacher.")]
    tokens: Annotated[list[int], about("Its ids, with ``return_tokens``.", [])]
    id_slot: Annotated[int, about("The slot that generated it.", 0)]
    stop: Annotated[bool, about("Always true.")] = True
    model: Annotated[str, about("The model.", "demo")]
    tokens_predicted: Annotated[
        int, about("Tokens of the text, and the one that ended it if the model did.", 2)
    ]
    tokens_evaluated: Annotated[int, about("Tokens of the prompt.", 6)]
    generation_settings: Annotated[
        dict[str, Any], about("How it was generated.", {"temperature": 0.8})
    ]
    prompt: Annotated[str, about("The prompt.", "Anna is a")]
    has_new_line: Annotated[bool, about("Whether the text has a line end.")]
    truncated: Annotated[bool, about("Whether the context ended it, or was shifted.")]
    stop_type: Annotated[str, about('Why it ended: "eos", "word" or "limit".', "limit")]
    stopping_word: Annotated[str, about("The stop text that ended it.", "")]
    tokens_cached: Annotated[int, about("Tokens that the slot holds afterwards.", 7)]
    timings: Annotated[Timings, about("What it cost.")]
    completion_probabilities: Annotated[
        list[CompletionLogprob] | UnsetType, about("Logprobs of each token, with ``n_probs``.")
    ] = UNSET
    tool_calls: Annotated[list[ModCall] | UnsetType, about("Calls that a mod made.")] = UNSET
