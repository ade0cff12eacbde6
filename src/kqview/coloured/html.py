"""Tokens coloured by attention, as HTML that needs nothing else.

A fragment has three parts. The first is a still picture with styles in its attributes: what is left
when a page drops scripts, as JupyterLab does in a notebook that is not trusted. The second is data,
the third a script (`view.js`) that draws the data into a shadow root, where it takes the place of
the picture and where styles of the page do not reach it. Nothing is loaded, and all text is
escaped.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kqview.coloured.encode import N_TEXTS_MAX, Encoded, encode
from kqview.coloured.rows import Rows, visible

CELL_BYTES: Final = 2 << 20
"""Bytes of attention in an output of a notebook; its texts and styles come on top."""

N_HEATS: Final = 10
_N_LISTED: Final = 5
_N_CHARACTERS_MAX: Final = 200  # of a token's text
_STILL: Final = (
    "This picture does not move: the page does not run its script. Trust the notebook, or run the "
    "cell again, to choose a layer, a head and a token."
)
_NOTE: Final = "margin:4px 0;font-size:0.875em"
_TEXT: Final = (
    "margin:2px 0 8px 0;max-height:21em;overflow:auto;line-height:1.9;white-space:pre-wrap;"
    "overflow-wrap:break-word"
)


def coloured_html(
    rows: Rows, *, title: str, notes: Sequence[str] = (), max_bytes: int = CELL_BYTES
) -> str:
    """*rows* as a fragment of HTML; without rows to show, their texts alone.

    Args:
        rows: What is shown.
        title: Its heading, on one line; "" for none.
        notes: Sentences below the text.
        max_bytes: How many bytes the attention may take.

    Raises:
        InvalidCapture: The values are no shares of each token.
    """
    n_left = max(0, len(rows.texts) - N_TEXTS_MAX)
    if not rows.rows or rows.at[-1] < n_left:  # none, or of tokens that are left out
        notes = [f"The first {n_left:,} tokens are left out."] * (n_left > 0) + list(notes)
        return _host(_picture(rows, n_left, None, title, notes))
    encoded = encode(rows, max_bytes)
    notes = [*encoded.omissions, *notes]
    if rows.reduce == "max_heads":
        notes.append("A layer shows the largest share among its heads.")
    if rows.kind != "probs":
        notes.append("The shares are the softmax of the scores that were captured.")
    data = {
        "title": title,
        "notes": notes,
        "texts": [_shown(text) for text in rows.texts[encoded.first_text :]],
        "nPrompt": None if rows.n_prompt is None else max(0, rows.n_prompt - encoded.first_text),
        "hasFirst": encoded.first_text == 0,
        "at": [at - encoded.first_text for at in rows.at[encoded.first_row :]],
        "nColumns": [n - encoded.first_text for n in rows.n_columns[encoded.first_row :]],
        "layers": encoded.layers,
        "nKept": encoded.n_kept,
        "values": encoded.values,
        "positions": encoded.positions,
    }
    still = _picture(rows, encoded.first_text, encoded, title, [*notes, _STILL])
    # A "<" could end the element.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        _host(f'{still}<script type="application/json">{text}</script>')
        + f"<script>{_script()}</script>"
    )


def document(fragment: str, title: str) -> str:
    """A whole page with *fragment* under *title*.

    Its policy lets it load nothing and run no other script.
    """
    digest = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_PAGE_STYLE}</style>\n"
        f"<main><h1>{escape(title)}</h1>{fragment}</main>\n</html>\n"
    )


_PAGE_STYLE: Final = (
    ":root{color-scheme:light dark;background:light-dark(#fff,#131314);"
    "color:light-dark(#1c1c1e,#e6e6e8)}"
    "body{margin:0}"
    "main{max-width:60rem;margin:auto;padding:1rem;font:16px/1.5 system-ui,sans-serif}"
    "h1{margin:0 0 .5rem;font-size:1.25rem}"
)


@cache
def _script() -> str:
    """The script with its styles, without comments and indents."""
    folder = files(__package__ or "")
    style = re.sub(r"/\*.*?\*/|\n\s*", "", (folder / "view.css").read_text("utf-8"), flags=re.S)
    style += "".join(f".heat{heat}{{{_heat_style(heat)}}}" for heat in range(1, N_HEATS + 1))
    script = (folder / "view.js").read_text("utf-8").replace("STYLE_OF_VIEW", json.dumps(style))
    return re.sub(r"^\s*(//.*)?\n?", "", script, flags=re.M)


# ---- the still picture


def _host(content: str) -> str:
    # The classes keep JupyterLab from setting formulas, the attribute its keys from acting in here.
    return (
        '<div class="kqview-attention tex2jax_ignore mathjax_ignore" '
        f'data-lm-suppress-shortcuts="true">{content}</div>'
    )


def _picture(
    rows: Rows, first_text: int, encoded: Encoded | None, title: str, notes: Sequence[str]
) -> str:
    texts = [_shown(text) for text in rows.texts[first_text:]]
    mean = np.zeros(len(texts), np.float32)
    if encoded is not None:
        mean[: len(encoded.mean)] = encoded.mean
        if first_text == 0:
            mean[0] = 0.0  # where idle heads put their mass; it makes all others pale
    levels = heats(mean)
    n_prompt = None if rows.n_prompt is None else max(0, rows.n_prompt - first_text)
    parts = (
        [("Text", 0, len(texts))]
        if n_prompt is None
        else [("Prompt", 0, n_prompt), ("Generated", n_prompt, len(texts))]
    )
    lines = [f'<p style="margin:4px 0"><strong>{escape(title)}</strong></p>'] * bool(title)
    for name, begin, end in parts:
        if begin == end:
            continue
        lines.append(f'<p style="{_NOTE}">{name}</p>')
        tokens = map(_token, texts[begin:end], levels[begin:end])
        lines.append(f'<p style="{_TEXT}">{"".join(tokens)}</p>')
    order: list[int] = np.argsort(-mean, kind="stable")[:_N_LISTED].tolist()
    largest = [i for i in order if mean[i] > 0]
    if largest:
        named = ", ".join(f"{quoted(texts[i])} {percent(float(mean[i]))}" for i in largest)
        lines.append(
            f'<p style="{_NOTE}">Looked at most, mean of all rows and heads: {escape(named)}</p>'
        )
    lines += [f'<p style="{_NOTE}">{escape(note)}</p>' for note in notes]
    return f"<div>{''.join(lines)}</div>"


def _token(text: str, heat: int) -> str:
    if heat == 0:
        return escape(text)
    return f'<span style="{_heat_style(heat)};border-radius:2px">{escape(text)}</span>'


def _heat_style(heat: int) -> str:
    """Rules and colours that JupyterLab lets through, right on light and dark pages."""
    width = -(-4 * heat // N_HEATS)
    colour = f"rgba(255,140,0,{0.055 * heat:.3g})"
    return f"background-color:{colour};border-bottom:{width}px solid #b86200"


def heats(shares: NDArray[np.float32]) -> list[int]:
    """How hot each share is, 0 to `N_HEATS`; the root makes small ones visible."""
    most = float(shares.max(initial=0.0))
    if most <= 0:
        return [0] * len(shares)
    return [int(level) for level in np.rint(N_HEATS * np.sqrt(shares / most))]


def quoted(text: str) -> str:
    """A token's text on one line, in quotes."""
    return f"“{' '.join(text.split()) or text}”"


def percent(share: float) -> str:
    """A share in percent, with a decimal where it is small."""
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def _shown(text: str) -> str:
    cut = text if len(text) <= _N_CHARACTERS_MAX else text[:_N_CHARACTERS_MAX] + "…"
    return visible(cut)
