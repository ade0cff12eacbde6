"""Events of OpenAI's Responses API, for the description.

`responses_events` and `responses_items` write them; a test compares what is sent with these types.
The name of an event is its ``type``.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.openai.responses_schema import OutputLogprob, Response
from kqview.server.api.wire.event_parts import PromptAttention, TokenAttention
from kqview.server.api.wire.llama_fields import Progress, Timings
from kqview.server.web.described import example


class Event(Struct, kw_only=True):
    """An event.

    Attributes:
        type: Its name.
        sequence_number: Its place in the stream, from 0.
    """

    sequence_number: Annotated[int, example(0)]


class ResponseEvent(Event, kw_only=True):
    """The response begins, or ends.

    Attributes:
        type: "response.created" and "response.in_progress" begin it; "response.completed",
            "response.incomplete" and "response.failed" end it.
        response: The response, as it is at that time.
        timings: What it cost, at the end.
        prompt_progress: How much of the prompt is evaluated, with ``return_progress``, in two more
            "response.in_progress" before the first token.
    """

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete",
        "response.failed",
    ]  # fmt: skip
    response: Response
    timings: Timings | UnsetType = UNSET
    prompt_progress: Progress | UnsetType = UNSET


class ItemEvent(Event, kw_only=True):
    """An item begins, or is whole.

    Attributes:
        type: "response.output_item.added" or "response.output_item.done".
        output_index: Of the item in the output, from 0.
        item: The item.
    """

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: Annotated[int, example(0)]
    item: Annotated[
        dict[str, Any],
        example(
            {
                "type": "message",
                "id": "msg_1",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
        ),
    ]


class OfItem(Event, kw_only=True):
    """An event about an item.

    Attributes:
        output_index: Of the item in the output, from 0.
        item_id: Id of the item.
    """

    output_index: Annotated[int, example(0)]
    item_id: Annotated[str, example("msg_1")]


class PartEvent(OfItem, kw_only=True):
    """A part of an item begins, or is whole.

    Attributes:
        type: "response.content_part.added" or "response.content_part.done".
        content_index: Always 0: an item has one part.
        part: The part.
    """

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: Annotated[int, example(0)]
    part: Annotated[
        dict[str, Any],
        example({"type": "output_text", "text": "Anna", "annotations": [], "logprobs": []}),
    ]


class TextDelta(OfItem, kw_only=True):
    """Text that is new.

    Attributes:
        type: Always "response.output_text.delta".
        content_index: Always 0: an item has one part.
        delta: The text.
        logprobs: Those of its tokens, if asked for.
        timings: What it cost so far, with ``timings_per_token``.
    """

    type: Literal["response.output_text.delta"]
    content_index: Annotated[int, example(0)]
    delta: Annotated[str, example("Anna")]
    logprobs: list[OutputLogprob]
    timings: Timings | UnsetType = UNSET


class TextDone(OfItem, kw_only=True):
    """Text that is whole.

    Attributes:
        type: Always "response.output_text.done".
        content_index: Always 0: an item has one part.
        text: The text.
        logprobs: Those of its tokens, if asked for.
    """

    type: Literal["response.output_text.done"]
    content_index: Annotated[int, example(0)]
    text: Annotated[str, example("Anna is a teacher.")]
    logprobs: list[OutputLogprob]


class ReasoningDelta(OfItem, kw_only=True):
    """Reasoning that is new.

    Attributes:
        type: Always "response.reasoning_text.delta".
        content_index: Always 0: an item has one part.
        delta: The text.
    """

    type: Literal["response.reasoning_text.delta"]
    content_index: Annotated[int, example(0)]
    delta: Annotated[str, example("The user")]


class ReasoningDone(OfItem, kw_only=True):
    """Reasoning that is whole.

    Attributes:
        type: Always "response.reasoning_text.done".
        content_index: Always 0: an item has one part.
        text: The text.
    """

    type: Literal["response.reasoning_text.done"]
    content_index: Annotated[int, example(0)]
    text: Annotated[str, example("The user asks for a name.")]


class ArgumentsDelta(OfItem, kw_only=True):
    """A piece of a call's arguments.

    Attributes:
        type: Always "response.function_call_arguments.delta".
        delta: The piece, such as "{\\"city\\": ".
    """

    type: Literal["response.function_call_arguments.delta"]
    delta: Annotated[str, example('{"city": ')]


class ArgumentsDone(OfItem, kw_only=True):
    """A call's arguments are whole.

    Attributes:
        type: Always "response.function_call_arguments.done".
        arguments: The arguments as JSON, such as "{\\"city\\": \\"Rome\\"}".
        name: Name of the function.
    """

    type: Literal["response.function_call_arguments.done"]
    arguments: Annotated[str, example('{"city": "Rome"}')]
    name: Annotated[str, example("weather")]


class AttentionEvent(Event, kw_only=True):
    """Attention of a token, if asked for; an event of kqview's own.

    Attributes:
        type: Always "response.attention".
        attention: The attention.
    """

    type: Literal["response.attention"]
    attention: TokenAttention


class PromptAttentionEvent(Event, kw_only=True):
    """Rows of the prompt, if asked for; an event of kqview's own.

    Attributes:
        type: Always "response.prompt_attention".
        attention: The rows.
    """

    type: Literal["response.prompt_attention"]
    attention: PromptAttention


class RemovedEvent(Event, kw_only=True):
    """What mods took back, which a client drops; an event of kqview's own.

    Attributes:
        type: Always "response.removed".
        tokens: So many of the last tokens.
        characters: So many of the last characters.
    """

    type: Literal["response.removed"]
    tokens: Annotated[int, example(1)]
    characters: Annotated[int, example(2)]
