"""Replay: rebuilds what a request generated from the events and actions of its trace.

An Added event appends its tokens. The actions of its calls then apply:

- Backtrack removes the last ``backtrack_steps`` tokens. At an Added event its own tokens follow at
  once; at others an Added event brings them.
- ForceTokens at an Added event appends its tokens; at others an Added event brings them.
- ForceOutput replaces everything with its tokens, ToolCalls and EmitError with nothing.

Tokens beyond ``n_kept`` of an event or action, such as the end of the text, are not output, but a
Backtrack counts them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kqview.trace.record import Trace, TraceAction, TraceEvent


@dataclass(slots=True)
class ReplayedToken:
    """A token that is or was in the output.

    Attributes:
        id: Its id.
        is_forced: Whether a mod wrote it.
        is_kept: Whether it is text; what ends the text is not.
        is_removed: Whether it was taken back.
    """

    id: int
    is_forced: bool
    is_kept: bool
    is_removed: bool = False


def final_ids(trace: Trace) -> list[int]:
    """Return the ids of the output, rebuilt from *trace*; equals its ``final_token_ids``.

    The result is shorter if a limit cut off events, see `Trace.is_cut`.
    """
    return [one.id for one in pieces(trace) if one.is_kept and not one.is_removed]


def pieces(trace: Trace) -> list[ReplayedToken]:
    """Return every token of *trace* in text order, including those that were taken back."""
    actions: list[list[TraceAction]] = [[] for _ in trace.events]
    for action in trace.actions:
        if action.is_applied:
            event = trace.mod_calls[action.mod_call_sequence].event_sequence_order
            actions[event].append(action)
    found: list[ReplayedToken] = []
    for event, applied in zip(trace.events, actions, strict=True):
        is_added = event.event_type == "Added"
        if is_added:
            found += _pieces(event.added_tokens or (), event, is_forced=bool(event.forced))
        for action in applied:
            written = _pieces(action.tokens or (), action, is_forced=True)
            match action.action_type:
                case "Backtrack":
                    _take_back(found, action.backtrack_steps or 0)
                    found += written if is_added else ()
                case "ForceTokens" if is_added:
                    found += written
                case "ForceOutput" | "ToolCalls" | "EmitError":
                    _take_back(found, len(found))
                    return found + written if action.action_type == "ForceOutput" else found
                case _:
                    pass
    return found


def _pieces(
    ids: Iterable[int], of: TraceEvent | TraceAction, *, is_forced: bool
) -> list[ReplayedToken]:
    n_kept = (of.details or {}).get("n_kept")
    return [
        ReplayedToken(one, is_forced, n_kept is None or i < n_kept) for i, one in enumerate(ids)
    ]


def _take_back(found: list[ReplayedToken], n: int) -> None:
    there = [piece for piece in found if not piece.is_removed]
    for piece in there[max(0, len(there) - n) :]:
        piece.is_removed = True
