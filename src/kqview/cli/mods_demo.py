"""``kqview demo --mods``: the bundled mods at work on one prompt.

What a mod did is read from the trace of its generation, so tokens that it took back are shown too.
"""

from itertools import groupby
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.text import Text

from kqview.mods.attention import AlignAtt, LookbackGuard, ReRead
from kqview.mods.kit import ChoicesStrat, EraseMode, self_prompt_mod
from kqview.trace.replay import ReplayedToken, pieces
from kqview.types import Capture

if TYPE_CHECKING:
    from kqview import Engine, Mod
    from kqview.types.capture import Kind

Mark = Literal["sampled", "forced", "removed"]
# How a mark looks in a terminal, and the characters around it elsewhere.
_MARKS: dict[Mark, tuple[str, str, str]] = {
    "sampled": ("", "", ""),
    "forced": ("bold green", "{+", "+}"),
    "removed": ("red strike", "[-", "-]"),
}


def show_mods(console: Console, engine: "Engine", prompt: str, max_tokens: int) -> None:
    """Continue *prompt* without and with each mod."""
    source = prompt.partition(".")[0].strip()
    beginning = " ".join(source.split()[:5])
    # Heads that attend to what they copy.
    copying = Capture("probs", layers=[1], heads=[0, 1, 2, 3])
    colours = ChoicesStrat([" red", " blue", " silver"])
    shown: list[tuple[str, list[Mod], Capture | Kind | None]] = [
        ("Without a mod", [], None),
        (
            "A question, answered within choices and erased",
            [self_prompt_mod(" took the", colours, erase=EraseMode.ALL)],
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
        text = Text(prompt, style="dim")
        for mark, group in groupby((one for one in pieces(generation.trace) if one.is_kept), _mark):
            _append(text, engine.detokenize([one.id for one in group]), mark, console)
        console.print(text)
        console.print(f"finish reason: {generation.finish_reason}", style="dim", end="\n\n")


def _mark(piece: ReplayedToken) -> Mark:
    return "removed" if piece.is_removed else "forced" if piece.is_forced else "sampled"


def _append(text: Text, part: str, mark: Mark, console: Console) -> None:
    style, before, after = _MARKS[mark]
    shown = part if console.is_terminal else f"{before}{part}{after}"
    text.append(shown, style=f"not dim {style}")
