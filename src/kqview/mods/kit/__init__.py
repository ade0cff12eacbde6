"""The mod kit: questions that the model answers within its text, flows of them, and the chat.

- Strategies say what an answer may look like: `ChoicesStrat`, `UntilStrat`, `CharsStrat`,
  `ListStrat` and, with llguidance, `RegexStrat` and `JsonSchemaStrat`.
- `SelfPrompt` and `self_prompt_mod` ask one question; an `EraseMode` says what stays of it.
- `FlowEngine` asks questions whose answers decide what comes next.
- `get_conversation`, `get_schemas` and `tool_call_pairs` read the chat behind a request.

Everything that belongs to a request is freed with it, and nothing is shared between requests.
"""

from kqview.mods.kit.constraints import JsonSchemaStrat, RegexStrat
from kqview.mods.kit.dialogue import ToolCallPair, get_conversation, get_schemas, tool_call_pairs
from kqview.mods.kit.flow import (
    FlowDefinition,
    FlowEngine,
    FlowMod,
    FlowQuestion,
    FlowState,
    Route,
    route_message,
    route_noop,
    route_output,
    route_question,
    route_summary,
    route_tool,
)
from kqview.mods.kit.self_prompt import (
    Asking,
    EraseMode,
    SelfPrompt,
    SelfPromptMod,
    self_prompt_mod,
    tokenize,
)
from kqview.mods.kit.strategies import (
    CharsMode,
    CharsStrat,
    ChoicesStrat,
    ListStrat,
    Strategy,
    StrategyDescription,
    UntilEndType,
    UntilStrat,
)

__all__ = [
    "Asking",
    "CharsMode",
    "CharsStrat",
    "ChoicesStrat",
    "EraseMode",
    "FlowDefinition",
    "FlowEngine",
    "FlowMod",
    "FlowQuestion",
    "FlowState",
    "JsonSchemaStrat",
    "ListStrat",
    "RegexStrat",
    "Route",
    "SelfPrompt",
    "SelfPromptMod",
    "Strategy",
    "StrategyDescription",
    "ToolCallPair",
    "UntilEndType",
    "UntilStrat",
    "get_conversation",
    "get_schemas",
    "route_message",
    "route_noop",
    "route_output",
    "route_question",
    "route_summary",
    "route_tool",
    "self_prompt_mod",
    "tokenize",
    "tool_call_pairs",
]
