"""Writes tests/engine/ARCHITECTURES.md: for each architecture its layers and the largest errors.

``python -m tests.support.archs_table [--print]`` (needs test-llama-archs and kq-eval-rows of
bench/peers). The figures are those that tests/engine/test_architectures.py asserts limits on.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .archs import ROOT, Checks, make_models

if TYPE_CHECKING:
    from .archs import Report

PATH = ROOT / "tests" / "engine" / "ARCHITECTURES.md"
HEAD = """\
# Architectures

Written by `python -m tests.support.archs_table`; `test_architectures.py` asserts the limits. The
models are the tiny random ones of llama.cpp's own `test-llama-archs`: architecture and variant.
"Expected" lists the layers for which a stock build of the same llama.cpp, with flash attention off,
computes a `kq_soft_max-<layer>`; "got" lists the layers whose rows kqview returns, in both modes.

An error is max|a - b| / max|b| of a row (layer, head, token) compared with the stock build's
tensors: logits, scores and probs of 6 tokens generated after 20, and probs of the prompt's own
tokens, with an F32 cache. "off" and "on" mean flash attention in kqview; the reference always has
it off. With flash attention on, the first layer shows what the tap itself adds; the layers above
also show what llama.cpp's flash attention rounds (K, V and the sums of V, to F16).

- attend: diffusion models have no KV cache and do not generate token by token; `Engine.attend`
  returns all rows, and each token sees both directions.
- Probs sum to less than 1 if the softmax has a sink, which is an extra logit without a column. In
  deepseek4 compressed keys, which stand for several tokens each, also take a share.
- No model is left out and none aborts.
- Slots are saved and restored exactly (`test_architectures_cache.py`), also those of the models
  with sliding windows, an indexer or recurrent state. Refused: deepseek4, whose compressed keys
  have a state of their own, and the diffusion models, which have no cache.
- llama.cpp's generator leaves some out. With tiny models made by hand, rows of apertus, bert,
  bitnet, eurobert, gemma-embedding, gemma3n, jina-bert-v2 and v3, llama-embed, modern-bert,
  neo-bert, nomic-bert, nomic-bert-moe, step35 and t5encoder were as near to the stock build's.

| model | runs by | layers expected | layers got | heads | sum of probs | error, off \
| on, first layer | on, all layers |
|---|---|---|---|---|---|---|---|---|
"""


def row_of(report: Report) -> str:
    """One line of the table."""
    got = {tuple(layers) for layers in report.layers.values()}
    heads = sorted(set(report.n_heads))
    low = min((low for low, _ in report.sums.values()), default=None)
    cells = [
        report.name,
        report.mode,
        _layers(report.expected_layers),
        " or ".join(_layers(list(layers)) for layers in sorted(got)),
        "-".join(map(str, heads)) or "none",
        "" if low is None else "1" if low > 1 - 1e-6 else f"from {low:.2f}",
        *(
            "" if not report.expected_layers else "0" if error == 0 else f"{error:.0e}"
            for error in (
                report.largest(False),
                report.largest(True, first_layer=True),
                report.largest(True),
            )
        ),
    ]
    if report.failure:
        cells[3] = report.failure
    return "| " + " | ".join(cells) + " |\n"


def _layers(layers: list[int]) -> str:
    if not layers:
        return "none"
    if len(layers) > 2 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}-{layers[-1]}"
    return ", ".join(map(str, layers))


def main(arguments: list[str]) -> None:
    """Make the models, check them, and write (or print) the table."""
    with tempfile.TemporaryDirectory(prefix="kqview-architectures-") as folder:
        checks = Checks(make_models(Path(folder)))
        table = HEAD + "".join(row_of(checks[name]) for name in checks)
        checks.close()
    if "--print" in arguments:
        print(table, end="")
    else:
        PATH.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
