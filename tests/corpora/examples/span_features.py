"""Features of 2,000 documents: how much of an answer's attention goes to its context, by head."""

import sys

import numpy as np

import kqview
from kqview import Engine

records = [
    {"id": f"{i}", "text": f"Context: {who} has {i} {what}s. Question: who has them? Answer: {who}"}
    for i in range(500)
    for who, what in [("Anna", "ball")]
] + [
    {"id": f"{who}{i}", "text": f"Context: {who} saw a {what}. Question: what? Answer: a {what}"}
    for i in range(500)
    for who, what in [("Tom", "kite"), ("Ben", "key"), ("Mia", "box")]
]
with Engine.demo(n_ctx=128, n_slots=4) as engine:
    corpus = kqview.extract(
        records,
        sys.argv[1],
        engine=engine,
        spans={"context": r"Context: [^.]*\.", "question": r"Question: [^?]*\?"},
        last=1,
        group=256,
    )
features = np.stack([entry.attention[:, :, 0] for entry in corpus])
context = features[..., 0]  # (n_documents, n_layers, n_heads)
layer, head = np.unravel_index(context.mean(axis=0).argmax(), context.shape[1:])
print(features.shape, f"most on the context: layer {layer}, head {head}")
print(f"by document: {context[:, layer, head].min():.2f} to {context[:, layer, head].max():.2f}")
