"""Corpora: attention, hidden states, scores, embeddings and texts of many documents, on disk.

`extract` evaluates the documents of a source and writes a folder, which `open_corpus` reads. A run
that ends, however it ends, goes on where it was when it is started again.
"""

from kqview.corpora.extraction import Estimate, estimate, extract
from kqview.corpora.reader import Corpus, Entry, open_corpus
from kqview.corpora.sources import Columns

__all__ = ["Columns", "Corpus", "Entry", "Estimate", "estimate", "extract", "open_corpus"]
