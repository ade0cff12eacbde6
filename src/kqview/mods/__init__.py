"""Mods: Python in the generation loop. They see each step of a request and may change it.

A mod is a function ``(event, actions, tokenizer)`` or a `Mod`; pass it as
``engine.generate(..., mods=[...])``. Events say what has just happened; the mod returns None or an
action, which it builds with ``actions``. All mods of a request are called for each event, in order,
before any of their actions is applied:

- Actions apply in the order of the mods. ForceOutput, ToolCalls, EmitError, Backtrack and
  AdjustedPrefill override the actions of later mods.
- Of several ForceTokens in one step, the first applies.
- Of several SetEdits in one step, the last applies.
- Logits that one mod has adjusted are what the next mod sees, and what is sampled from.

If a mod raises, or returns an action that the event does not allow, that counts as Noop: the
generation continues, a `ModWarning` says so, and `Generation.mod_errors` has the traceback. A mod
with ``required = True`` ends the request instead, as all do with ``mods_strict=True``.
"""

from kqview.mods.actions import (
    Action as Action,
    ActionBuilder as ActionBuilder,
    AdjustedLogits as AdjustedLogits,
    AdjustedPrefill as AdjustedPrefill,
    Backtrack as Backtrack,
    EmitError as EmitError,
    ForceOutput as ForceOutput,
    ForceTokens as ForceTokens,
    Noop as Noop,
    SetEdits as SetEdits,
    ToolCalls as ToolCalls,
)
from kqview.mods.decorator import FunctionMod as FunctionMod, Mod as Mod, mod as mod
from kqview.mods.events import (
    Added as Added,
    ContextInfo as ContextInfo,
    Event as Event,
    ForwardPass as ForwardPass,
    Prefilled as Prefilled,
    RequestEnd as RequestEnd,
    Sampled as Sampled,
)
from kqview.mods.failures import ModFailure as ModFailure, ModWarning as ModWarning
from kqview.mods.tokenizer import ModTokenizer as ModTokenizer
