"""What the messages and tools of a chat are, for readers of the API description.

A chat template may use fields that nobody here knows, so requests keep messages and tools as plain
objects, which `kqview.chat.messages` checks. The classes here only describe them: no value is made
of them.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.web.endpoint import shown_as


class TextPart(Struct, kw_only=True):
    """A part of a content.

    Attributes:
        type: Always "text": models read nothing else.
        text: The text, such as "Who is Anna?".
    """

    type: Literal["text"]
    text: str


class CalledName(Struct, kw_only=True):
    """The function of a call.

    Attributes:
        name: Its name, such as "weather".
        arguments: Its arguments, an object or its JSON, such as "{}".
    """

    name: str
    arguments: Any = UNSET


class EarlierCall(Struct, kw_only=True):
    """A call that the assistant made.

    Attributes:
        id: Name of the call, which the message with its result repeats, such as "call_1".
        type: "function" for OpenAI's clients, such as "function".
        function: What was called.
    """

    id: Any = UNSET
    type: Any = UNSET
    function: CalledName | UnsetType = UNSET


class ChatMessage(Struct, kw_only=True):
    """A message; the model's chat template sees its other fields too.

    Attributes:
        role: Who says it, such as "user"; also "system", "assistant" and "tool", as far as the
            template knows them.
        content: A text, such as "Who is Anna?", or a list of parts. Null only beside calls, or in a
            message of the assistant.
        name: Name of the speaker, or of the function of a result, such as "weather".
        tool_calls: Calls that the assistant made.
        tool_call_id: The call that the message is the result of, such as "call_1".
    """

    role: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9_.\-]{0,63}$")]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None


class ToolFunction(Struct, kw_only=True):
    """A function that may be called.

    Attributes:
        name: Its name, such as "weather".
        description: What it does, such as "The weather of a town.".
        parameters: JSON schema of its arguments, such as {"type": "object"}.
    """

    name: str
    description: Any = UNSET
    parameters: Any = UNSET


class ChatTool(Struct, kw_only=True):
    """A tool.

    Attributes:
        type: "function" for OpenAI's clients, such as "function".
        function: The function; a tool may also be the function itself.
    """

    type: Any = UNSET
    function: ToolFunction | UnsetType = UNSET


MessageObject = Annotated[dict[str, Any], shown_as(ChatMessage)]
ToolObject = Annotated[dict[str, Any], shown_as(ChatTool)]
