"""``kqview demo --mods``: the bundled mods at work on one prompt.

What a mod did is read from the trace of its generation, so tokens that it took back are shown too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.text import Text

from kqview.mods.attention import AlignAtt, LookbackGuard, ReRead
from kqview.mods.kit import ChoicesStrat, EraseMode, self_prompt_mod

if TYPE_CHECKING:
    from kqview import Engine, Mod
    from kqview.trace import Trace, TraceAction, TraceEvent
    from kqview.types.capture import Kind

Mark = Literal["sampled", "forced", "removed"]
# How a mark looks in a terminal, and the characters around it elsewhere.
_STYLES: dict[Mark, str] = {"sampled": "", "forced": "bold green", "removed": "red strike"}
_SIGNS: dict[Mark, tuple[str, str]] = {
    "sampled": ("", ""),
    "forced": ("{+", "+}"),
    "removed": ("[-", "-]"),
}


@dataclass
class Piece:
    """A token that is or was in the text."""

    id: int
    mark: Mark


def show_mods(console: Console, engine: "Engine", prompt: str, max_tokens: int) -> None:
    """Continue *prompt* without and with each mod."""
    from kqview import Capture

    source = prompt.partition(".")[0].strip()
    beginning = " ".join(source.split()[:5])
    copying = Capture(
        "probs", layers=[1], heads=[0, 1, 2, 3]
    )  # heads that attend to what they copy
    shown: list[tuple[str, list[Mod], Capture | Kind | None]] = [
        ("Without a mod", [], None),
        (
            "A question, answered within choices and erased",
            [
                self_prompt_mod(
                    " took the", ChoicesStrat([" red", " blue", " silver"]), erase=EraseMode.ALL
                )
            ],
            None,
        ),
        (
            f"AlignAtt: stops before a token that attends to the end of {beginning!r}",
            [AlignAtt(beginning)],
            copying,
        ),
        (
            "LookbackGuard: takes back tokens that attend too little to the first sentence",
            [LookbackGuard(source, 0.3, "resample", window=8)],
            "probs",
        ),
        (
            "ReRead: repeats the first sentence once attention to it has faded",
            [ReRead(source, 0.2, reminder=f" {source}.", window=4, most=1)],
            "probs",
        ),
    ]
    legend = Text("Marked: ")
    _append(legend, "what a mod wrote", "forced", console)
    legend.append(", ")
    _append(legend, "what it took back", "removed", console)
    console.print(legend, end="\n\n")
    for title, mods, capture in shown:
        generation = engine.generate(
            prompt, max_tokens=max_tokens, temperature=0.0, capture=capture, mods=mods, trace=True
        )
        generation.read()
        assert generation.trace is not None
        console.print(title, style="bold", highlight=False)
        console.print(_text(console, engine, prompt, list(pieces(generation.trace))))
        console.print(f"finish reason: {generation.finish_reason}", style="dim", end="\n\n")


def pieces(trace: "Trace") -> list[Piece]:
    """Return every token of a trace in text order, including those that were taken back."""
    applied: list[list[TraceAction]] = [[] for _ in trace.events]
    for action in trace.actions:
        if action.is_applied:
            call = trace.mod_calls[action.mod_call_sequence]
            applied[call.event_sequence_order].append(action)
    found: list[Piece] = []
    for event, actions in zip(trace.events, applied, strict=True):
        is_added = event.event_type == "Added"
        if is_added:
            mark: Mark = "forced" if event.forced else "sampled"
            found += _kept(event.added_tokens or [], mark, event)
        for action in actions:
            if action.action_type == "Backtrack":
                _take_back(found, action.backtrack_steps or 0)
            if is_added and action.action_type in ("Backtrack", "ForceTokens"):
                found += _kept(action.tokens or [], "forced", action)
    return found


def _kept(ids: list[int], mark: Mark, of: "TraceEvent | TraceAction") -> Iterator[Piece]:
    """Those of *ids* that became text; the one that ends it does not."""
    n_kept = (of.details or {}).get("n_kept")
    return (Piece(id_, mark) for id_ in ids[: n_kept if isinstance(n_kept, int) else None])


def _take_back(found: list[Piece], n: int) -> None:
    there = [piece for piece in found if piece.mark != "removed"]
    for piece in there[max(0, len(there) - n) :]:
        piece.mark = "removed"


def _text(console: Console, engine: "Engine", prompt: str, found: list[Piece]) -> Text:
    text = Text(prompt, style="dim")
    ids: list[int] = []
    for i, piece in enumerate(found):
        ids.append(piece.id)
        if i + 1 == len(found) or found[i + 1].mark != piece.mark:
            _append(text, engine.detokenize(ids), piece.mark, console)
            ids = []
    return text


def _append(text: Text, part: str, mark: Mark, console: Console) -> None:
    before, after = ("", "") if console.is_terminal else _SIGNS[mark]
    text.append(f"{before}{part}{after}", style=f"not dim {_STYLES[mark]}")
