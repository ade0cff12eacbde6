"""Does re-ranking by attention beat BM25 and embeddings, also where no words are shared?

Eight documents about invented people, one of which answers. "words shared": the query names the
trade as the document does; "paraphrased": it has none of the document's content words. Baselines:
BM25 (bm25s) and the mean-pooled embeddings of the same model.
"""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

import numpy as np
from trials import HELD_OUT_SEED, Trial, mean_of, open_model, options, print_table

from kqview import guards, heads
from kqview.heads.calibration import ndcg
from kqview.heads.examples import TRADES

if TYPE_CHECKING:
    from collections.abc import Callable


bm25s: Any = importlib.import_module("bm25s")  # has no types


def by_words(query: str, documents: list[str]) -> list[float]:
    index = bm25s.BM25()
    index.index(bm25s.tokenize(documents, stopwords="en", show_progress=False), show_progress=False)
    tokens = bm25s.tokenize([query], stopwords="en", return_ids=False, show_progress=False)[0]
    known = [token for token in tokens if token in index.vocab_dict]
    return index.get_scores(known).tolist() if known else [0.0] * len(documents)


def main() -> None:
    given = options(n=40, n_calibration=40)
    made = heads.made_examples("rerank", given.n, seed=HELD_OUT_SEED)
    words = {does: trade for trade, does in TRADES.items()}
    rng = random.Random(0)
    queries = {
        "words shared": [f"Who is a {words[one['query'][4:-1]]}?" for one in made],
        "paraphrased": [one["query"] for one in made],
    }
    documents = [rng.sample(one["documents"], len(one["documents"])) for one in made]
    relevant = [
        new.index(one["documents"][one["relevant"][0]])
        for one, new in zip(made, documents, strict=True)
    ]
    trials: list[Trial] = []

    def add(method: str, score: Callable[[str, list[str]], object]) -> None:
        for condition, asked in queries.items():
            values: list[float] = []
            for query, texts, place in zip(asked, documents, relevant, strict=True):
                scores = score(query, texts)
                labels = np.eye(len(texts))[place]
                # ties are broken at random, or their order would decide
                noise = np.random.default_rng(place).random(len(texts)) * 1e-9
                values.append(ndcg(np.asarray(scores) + noise, labels))
            trials.append(Trial(method, condition, mean_of(values), given.n))

    add("BM25", by_words)
    with open_model(given, pooling="mean") as encoder:
        add("embeddings", lambda query, texts: encoder.embed(texts) @ encoder.embed(query))
    with open_model(given) as engine:
        file = heads.calibrate(
            engine, "rerank", heads.made_examples("rerank", given.calibration), progress=True
        )
        add("attention, all heads", lambda query, texts: guards.rerank(engine, query, texts))
        add(
            f"attention, {len(file.heads)} calibrated heads",
            lambda query, texts: guards.rerank(engine, query, texts, file),
        )
    print_table("nDCG@10", trials)


if __name__ == "__main__":
    main()
