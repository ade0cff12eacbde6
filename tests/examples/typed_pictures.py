"""Pictures of whatever carries attention: tokens, generations, prompts, results of map, arrays."""

import tempfile
from pathlib import Path

import numpy as np

import kqview
from kqview import Engine, Finished, Token

engine = Engine.demo()
prompt = "Anna has a red ball. Then Anna"
tokens: list[Token] = list(engine.generate(prompt, max_tokens=4, temperature=0, capture="probs"))
running = engine.generate(prompt, max_tokens=4, temperature=0, capture="probs")
results: list[Finished] = list(engine.map([prompt], max_tokens=4, capture="probs"))
attention = engine.attend(prompt)
array = np.full((2, 4, 3, 3), 1 / 3, np.float32)

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    kqview.viz.to_html(folder / "tokens.html", tokens, title="Tokens")
    kqview.viz.to_html(folder / "running.html", running)
    kqview.viz.to_html(folder / "prompt.html", attention)
    kqview.viz.to_html(folder / "array.html", array, ["The", " cat", " sat"], causal=False)
    page = kqview.viz.coloured(results[0])
    print(sorted(file.name for file in folder.iterdir()), len(page.html) > 1000)
for figure in (
    kqview.viz.head_grid(results[0], layers=[1, 2]),
    kqview.viz.heatmap(tokens, layer=1, head=1, title="Layer 1, head 1"),
):
    print(figure.get_suptitle())
engine.close()
