"""A probe: which layer knows who a story is about? Trained on hidden states of a corpus."""

import itertools
import sys

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

import kqview
from kqview import Engine

people, things, places = ("Anna", "Tom"), ("ball", "key", "kite", "box"), ("mill", "bridge", "well")
stories = [
    {"id": f"{i}", "text": f"{who} found a {what} near the {where}. The day was", "who": who}
    for i, (who, what, where) in enumerate(itertools.product(people, things, places))
]
with Engine.demo(n_ctx=64) as engine:
    corpus = kqview.extract(
        stories,
        sys.argv[1],
        engine=engine,
        fields=["hidden"],  # of every layer
        pool="last",  # of the last token, long after the name
        keep=["who"],
    )
labels = np.array([entry.columns["who"] for entry in corpus])
states = np.stack([entry.hidden for entry in corpus])  # (n_documents, n_layers, n_embd)
for layer in range(states.shape[1]):
    probe = LogisticRegression(max_iter=1000)
    right = cross_val_score(probe, states[:, layer], labels, cv=4).mean()
    print(f"layer {layer}: {right:.2f}")
