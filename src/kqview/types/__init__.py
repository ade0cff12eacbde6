"""Value types of the public API: the inputs and results of a generation.

Pure Python, one concept per file. Nothing here touches the native core or holds a native object, so
these types can be built, compared and tested without a model.
"""

from kqview.types.capture import Capture as Capture
from kqview.types.finished import Finished as Finished
from kqview.types.model import Classification as Classification, ModelInfo as ModelInfo
from kqview.types.reply import Reply as Reply, ToolCall as ToolCall
from kqview.types.sampling import Sampling as Sampling
from kqview.types.score import Score as Score
from kqview.types.stats import (
    EngineHealth as EngineHealth,
    EngineStats as EngineStats,
    PoolStats as PoolStats,
    SlotStats as SlotStats,
    Usage as Usage,
)
from kqview.types.text import (
    ChatPrompt as ChatPrompt,
    SlotMessage as SlotMessage,
    Tokenized as Tokenized,
)
from kqview.types.token import PromptBlock as PromptBlock, Token as Token
