"""The mod kit: questions that the model answers within its text, flows of them, and the chat.

- Strategies say what an answer may look like: `ChoicesStrat`, `UntilStrat`, `CharsStrat`,
  `ListStrat` and, with llguidance, `RegexStrat` and `JsonSchemaStrat`.
- `SelfPrompt` and `self_prompt_mod` ask one question; an `EraseMode` says what stays of it.
- `FlowEngine` asks questions whose answers decide what comes next.
- `get_conversation`, `get_schemas` and `tool_call_pairs` read the chat behind a request.

Everything that belongs to a request is freed with it, and nothing is shared between requests.
"""

from kqview.mods.kit.constraints import JsonSchemaStrat as JsonSchemaStrat, RegexStrat as RegexStrat
from kqview.mods.kit.dialogue import (
    ToolCallPair as ToolCallPair,
    get_conversation as get_conversation,
    get_schemas as get_schemas,
    tool_call_pairs as tool_call_pairs,
)
from kqview.mods.kit.flow import (
    FlowDefinition as FlowDefinition,
    FlowEngine as FlowEngine,
    FlowMod as FlowMod,
    FlowQuestion as FlowQuestion,
    FlowState as FlowState,
    Route as Route,
    route_message as route_message,
    route_noop as route_noop,
    route_output as route_output,
    route_question as route_question,
    route_summary as route_summary,
    route_tool as route_tool,
)
from kqview.mods.kit.self_prompt import (
    Asking as Asking,
    EraseMode as EraseMode,
    SelfPrompt as SelfPrompt,
    SelfPromptMod as SelfPromptMod,
    self_prompt_mod as self_prompt_mod,
    tokenize as tokenize,
)
from kqview.mods.kit.strategies import (
    CharsMode as CharsMode,
    CharsStrat as CharsStrat,
    ChoicesStrat as ChoicesStrat,
    ListStrat as ListStrat,
    Strategy as Strategy,
    StrategyDescription as StrategyDescription,
    UntilEndType as UntilEndType,
    UntilStrat as UntilStrat,
)
