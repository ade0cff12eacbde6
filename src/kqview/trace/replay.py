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

from kqview.trace.record import Trace, TraceAction, TraceEvent


def final_ids(trace: Trace) -> list[int]:
    """Return the ids of the output, rebuilt from *trace*; equals its ``final_token_ids``.

    The result is shorter if a limit cut off events, see `Trace.is_cut`.
    """
    actions: list[list[TraceAction]] = [[] for _ in trace.events]
    for action in trace.actions:
        if action.is_applied:
            event = trace.mod_calls[action.mod_call_sequence].event_sequence_order
            actions[event].append(action)
    tape = _Tape()
    for event, applied in zip(trace.events, actions, strict=True):
        if event.event_type == "Added":
            tape.append(event.added_tokens or (), event)
        for action in applied:
            match action.action_type:
                case "Backtrack":
                    tape.take_back(action.backtrack_steps or 0)
                    if event.event_type == "Added":
                        tape.append(action.tokens or (), action)
                case "ForceTokens" if event.event_type == "Added":
                    tape.append(action.tokens or (), action)
                case "ForceOutput":
                    tape = _Tape()
                    tape.append(action.tokens or (), action)
                    return tape.kept()
                case "ToolCalls" | "EmitError":
                    return []
                case _:
                    pass
    return tape.kept()


class _Tape:
    """The ids so far, each with whether it is output."""

    def __init__(self) -> None:
        self._ids: list[tuple[int, bool]] = []

    def append(self, ids: Iterable[int], of: TraceEvent | TraceAction) -> None:
        n_kept = (of.details or {}).get("n_kept")
        self._ids += [(one, n_kept is None or i < n_kept) for i, one in enumerate(ids)]

    def take_back(self, n: int) -> None:
        del self._ids[max(0, len(self._ids) - n) :]

    def kept(self) -> list[int]:
        return [one for one, is_kept in self._ids if is_kept]
