"""Activations for a sparse autoencoder, in the form that SAELens caches them.

SAELens reads a data set of rows of *context_size* tokens: ``token_ids``, and the activations in a
column called by the hook. Train with ``use_cached_activations=True`` and this folder as
``cached_activations_path``.
"""

import sys

from datasets import Array2D, Dataset, Features, Sequence, Value

import kqview
from kqview import Capture, Engine

CONTEXT_SIZE, LAYER = 32, 2
HOOK = f"blocks.{LAYER}.hook_resid_post"
text = "Tom found a red ball near the old mill. Anna took the ball and went home. " * 40
with Engine.demo(n_ctx=256) as engine:
    ids = engine.tokenize(text, add_special=False)
    windows = [ids[i : i + CONTEXT_SIZE] for i in range(0, len(ids), CONTEXT_SIZE)]
    corpus = kqview.extract(
        [one for one in windows if len(one) == CONTEXT_SIZE],
        f"{sys.argv[1]}/corpus",
        engine=engine,
        capture=Capture(layers=[], hidden=[LAYER]),
    )
    shape = (CONTEXT_SIZE, engine.model.n_embd)
features = Features(
    {HOOK: Array2D(shape, "float32"), "token_ids": Sequence(Value("int32"), length=CONTEXT_SIZE)}
)
rows = [{HOOK: entry.hidden[0], "token_ids": entry.token_ids} for entry in corpus]
activations = Dataset.from_list(rows, features=features)
activations.save_to_disk(f"{sys.argv[1]}/activations")
print(len(activations), activations.features[HOOK].shape)
