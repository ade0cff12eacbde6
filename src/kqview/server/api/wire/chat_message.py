"""What the messages and tools of a chat are, for readers of the API description.

A chat template may use fields that nobody here knows, so requests keep messages and tools as plain
objects, which `kqview.chat.turn` checks. The classes here only describe them: no value is made
of them.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.web.described import about, shown_as


class TextPart(Struct, kw_only=True):
    """A part of a content."""

    type: Annotated[Literal["text"], about('Always "text": models read nothing else.')]
    text: Annotated[str, about("The text.", "Who is Anna?")]


class CalledName(Struct, kw_only=True):
    """The function of a call."""

    name: Annotated[str, about("Its name.", "weather")]
    arguments: Annotated[Any, about("Its arguments, an object or its JSON.", "{}")] = UNSET


class EarlierCall(Struct, kw_only=True):
    """A call that the assistant made."""

    id: Annotated[
        Any, about("Name of the call, which the message with its result repeats.", "call_1")
    ] = UNSET
    type: Annotated[Any, about('"function" for OpenAI\'s clients.', "function")] = UNSET
    function: Annotated[CalledName | UnsetType, about("What was called.")] = UNSET


class ChatMessage(Struct, kw_only=True):
    """A message; the model's chat template sees its other fields too."""

    role: Annotated[
        str,
        msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9_.\-]{0,63}$"),
        about(
            'Who says it; also "system", "assistant" and "tool", as far as the template knows '
            "them.",
            "user",
        ),
    ]
    content: Annotated[
        str | list[TextPart] | None,
        about(
            "A text, or a list of parts. Null only beside calls, or in a message of the assistant.",
            "Who is Anna?",
        ),
    ] = None
    name: Annotated[
        str | None, about("Name of the speaker, or of the function of a result.", "weather")
    ] = None
    tool_calls: Annotated[list[EarlierCall] | None, about("Calls that the assistant made.")] = None
    tool_call_id: Annotated[
        str | None, about("The call that the message is the result of.", "call_1")
    ] = None


class ToolFunction(Struct, kw_only=True):
    """A function that may be called."""

    name: Annotated[str, about("Its name.", "weather")]
    description: Annotated[Any, about("What it does.", "The weather of a town.")] = UNSET
    parameters: Annotated[Any, about("JSON schema of its arguments.", {"type": "object"})] = UNSET


class ChatTool(Struct, kw_only=True):
    """A tool."""

    type: Annotated[Any, about('"function" for OpenAI\'s clients.', "function")] = UNSET
    function: Annotated[
        ToolFunction | UnsetType, about("The function; a tool may also be the function itself.")
    ] = UNSET


MessageObject = Annotated[dict[str, Any], shown_as(ChatMessage)]
ToolObject = Annotated[dict[str, Any], shown_as(ChatTool)]
TemplateField = Annotated[
    dict[str, Any] | None,
    about("Variables for the model's chat template.", {"enable_thinking": False}),
]
OtherTemplateField = Annotated[
    str | None,
    about(
        "Another chat template; the model's if not given. The server's setting "
        "request_chat_template allows it.",
        "{{ messages[0].content }}",
    ),
]
GenerationPromptField = Annotated[
    bool | None, about("Whether the prompt ends with the beginning of an answer.", default=True)
]
ParallelCallsField = Annotated[
    bool | None, about("Whether there may be several calls.", default=True)
]
EffortField = Annotated[
    str | None, about("How much to think, as ``reasoning_effort`` of the model's template.", "low")
]

ANY_MESSAGES: Final = about(
    "The conversation, the oldest message first.", [{"role": "user", "content": "Who is Anna?"}]
)
ANY_TOOLS: Final = about(
    "Functions that the model may call.", [{"type": "function", "function": {"name": "weather"}}]
)
"""What messages and tools are, in a body."""
