"""Embeddings of a corpus in a vector index, and the documents nearest to a question."""

import sys

import faiss
import numpy as np

import kqview
from kqview import Engine

documents = {
    "ball": "Tom found a red ball in the garden.",
    "key": "Anna lost a silver key near the bridge.",
    "kite": "The blue kite of Ben flew over the mill.",
}
with Engine.demo(n_ctx=128, pooling="mean") as engine:
    corpus = kqview.extract(documents, sys.argv[1], engine=engine, fields=["embedding"])
    vectors = np.stack([entry.embedding for entry in corpus])
    index = faiss.IndexFlatIP(vectors.shape[1])  # of vectors of length 1: the cosine
    index.add(vectors)
    question = engine.embed("Anna lost a key near the old bridge.")
scores, found = index.search(question[None], 2)
print([corpus.ids[i] for i in found[0]], scores[0, 0] > scores[0, 1])
