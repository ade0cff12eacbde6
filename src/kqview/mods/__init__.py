"""Mods: Python in the loop that generates. They see each step of a request, and may change it.

A mod is a function ``(event, actions, tokenizer)`` or a `Mod`; pass it as
``engine.generate(..., mods=[...])``. The events say where the request is; the mod returns None or
one of the actions, which it builds with ``actions``. All mods of a request are called for each
event, in their order, before any of their actions is applied:

- An event's actions apply in that order. ForceOutput, ToolCalls, EmitError, Backtrack and
  AdjustedPrefill leave out those of later mods.
- Of several ForceTokens in one step, the first applies.
- Logits that one mod has adjusted are what the next mod sees, and what is sampled from.

A mod that raises, or returns what the event does not allow, has answered Noop: generation goes on,
and the trace has the traceback.
"""

from kqview.mods.actions import (
    Action,
    ActionBuilder,
    AdjustedLogits,
    AdjustedPrefill,
    Backtrack,
    EmitError,
    ForceOutput,
    ForceTokens,
    Noop,
    ToolCalls,
)
from kqview.mods.decorator import FunctionMod, Mod, mod
from kqview.mods.events import (
    Added,
    ContextInfo,
    Event,
    ForwardPass,
    Prefilled,
    RequestEnd,
    Sampled,
)
from kqview.mods.tokenizer import ModTokenizer

__all__ = [
    "Action",
    "ActionBuilder",
    "Added",
    "AdjustedLogits",
    "AdjustedPrefill",
    "Backtrack",
    "ContextInfo",
    "EmitError",
    "Event",
    "ForceOutput",
    "ForceTokens",
    "ForwardPass",
    "FunctionMod",
    "Mod",
    "ModTokenizer",
    "Noop",
    "Prefilled",
    "RequestEnd",
    "Sampled",
    "ToolCalls",
    "mod",
]
