"""Value types of the public API: the inputs and results of a generation.

Pure Python, one concept per file. Nothing here touches the native core or holds a native object, so
these types can be built, compared and tested without a model.
"""

from kqview.types.capture import Capture
from kqview.types.finished import Finished
from kqview.types.model import Classification, ModelInfo
from kqview.types.reply import Reply, ToolCall
from kqview.types.sampling import Sampling
from kqview.types.score import Score
from kqview.types.stats import EngineHealth, EngineStats, PoolStats, SlotStats, Usage
from kqview.types.text import ChatPrompt, SlotMessage, Tokenized
from kqview.types.token import PromptBlock, Token

__all__ = [
    "Capture",
    "ChatPrompt",
    "Classification",
    "EngineHealth",
    "EngineStats",
    "Finished",
    "ModelInfo",
    "PoolStats",
    "PromptBlock",
    "Reply",
    "Sampling",
    "Score",
    "SlotMessage",
    "SlotStats",
    "Token",
    "Tokenized",
    "ToolCall",
    "Usage",
]
