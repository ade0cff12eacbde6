"""What the messages and tools of a chat are, for readers of the API description.

A chat template may use fields that nobody here knows, so requests keep messages and tools as plain
objects, which `kqview.chat.messages` checks. The classes here only describe them: no value is made
of them.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.web.described import example, shown_as


class TextPart(Struct, kw_only=True):
    """A part of a content.

    Attributes:
        type: Always "text": models read nothing else.
        text: The text.
    """

    type: Literal["text"]
    text: Annotated[str, example("Who is Anna?")]


class CalledName(Struct, kw_only=True):
    """The function of a call.

    Attributes:
        name: Its name.
        arguments: Its arguments, an object or its JSON.
    """

    name: Annotated[str, example("weather")]
    arguments: Annotated[Any, example("{}")] = UNSET


class EarlierCall(Struct, kw_only=True):
    """A call that the assistant made.

    Attributes:
        id: Name of the call, which the message with its result repeats.
        type: "function" for OpenAI's clients.
        function: What was called.
    """

    id: Annotated[Any, example("call_1")] = UNSET
    type: Annotated[Any, example("function")] = UNSET
    function: CalledName | UnsetType = UNSET


class ChatMessage(Struct, kw_only=True):
    """A message; the model's chat template sees its other fields too.

    Attributes:
        role: Who says it; also "system", "assistant" and "tool", as far as the template knows them.
        content: A text, or a list of parts. Null only beside calls, or in a message of the
            assistant.
        name: Name of the speaker, or of the function of a result.
        tool_calls: Calls that the assistant made.
        tool_call_id: The call that the message is the result of.
    """

    role: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9_.\-]{0,63}$"), example("user")]
    content: Annotated[str | list[TextPart] | None, example("Who is Anna?")] = None
    name: Annotated[str | None, example("weather")] = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: Annotated[str | None, example("call_1")] = None


class ToolFunction(Struct, kw_only=True):
    """A function that may be called.

    Attributes:
        name: Its name.
        description: What it does.
        parameters: JSON schema of its arguments.
    """

    name: Annotated[str, example("weather")]
    description: Annotated[Any, example("The weather of a town.")] = UNSET
    parameters: Annotated[Any, example({"type": "object"})] = UNSET


class ChatTool(Struct, kw_only=True):
    """A tool.

    Attributes:
        type: "function" for OpenAI's clients.
        function: The function; a tool may also be the function itself.
    """

    type: Annotated[Any, example("function")] = UNSET
    function: ToolFunction | UnsetType = UNSET


MessageObject = Annotated[dict[str, Any], shown_as(ChatMessage)]
ToolObject = Annotated[dict[str, Any], shown_as(ChatTool)]
