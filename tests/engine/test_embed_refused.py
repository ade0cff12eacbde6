"""What `Engine.embed` refuses, typed and before anything runs, and what ends it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine
from kqview.errors import (
    ClosedError,
    InvalidToken,
    PromptTooLong,
    RequestError,
    UnsupportedModel,
)
from tests.support import encoder_gguf, tiny_gguf
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import MakeEngine


def test_pooling_is_one_of_the_names(tiny_llama: Path) -> None:
    for value in ("max", "", 1, True, ["mean"]):
        with pytest.raises(RequestError, match=r"pooling is .*'mean', 'cls', 'last', 'rank'"):
            Engine(tiny_llama, pooling=value)  # type: ignore[arg-type]


def test_pooling_for_a_classifier_needs_one(tiny_llama: Path, bert: Path) -> None:
    for model in (tiny_llama, bert):
        with pytest.raises(UnsupportedModel, match="no classifier head"):
            Engine(model, pooling="rank", n_ctx=64, n_threads=1)


def test_decoder_without_pooling_says_what_to_pass(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    assert engine.pooling is None
    with pytest.raises(UnsupportedModel, match="pooling='mean'"):
        engine.embed([1, 2, 3])


@pytest.mark.parametrize(
    ("texts", "error", "what"),
    [
        ([], RequestError, "no text"),
        ("", RequestError, "no tokens"),
        ([[1, 2], []], RequestError, "text 1: the prompt has no tokens"),
        (["a", ""], RequestError, "text 1: the prompt has no tokens"),
        ([1, 320], InvalidToken, "320"),
        ([1, -1], InvalidToken, "-1"),
        ([[1], [2, 10**12]], InvalidToken, "text 1"),
        ([True, False], InvalidToken, "True"),
        (["a", 5], RequestError, "text 1: got int"),
        ([1, "a"], InvalidToken, "'a'"),
        ([1.5], RequestError, "text 0: got float"),
        (b"bytes", RequestError, "got bytes"),
        (None, RequestError, "got NoneType"),
        (7, RequestError, "got int"),
        ({"text": 1}, RequestError, "got dict"),
        (["a", None], RequestError, "text 1: got NoneType"),
        ([("query", "document")], InvalidToken, "'query'"),
        (["ok", "\ud800"], RequestError, "text 1: character 0"),
        ([1] * 65, PromptTooLong, "65 tokens, an embedding takes it in one step, which holds 64"),
        ([[1], [1] * 65], PromptTooLong, "text 1: .*65 tokens.*64; raise n_ubatch"),
        ([[1], [1] * 513], PromptTooLong, "text 1: .*513 tokens, the model knows 512 positions"),
    ],
)
def test_bad_texts_are_refused_before_anything_runs(
    make_engine: MakeEngine, bert_mean: Path, texts: Any, error: type[Exception], what: str
) -> None:
    engine = make_engine(bert_mean, n_ubatch=64)
    with pytest.raises(error, match=what):
        engine.embed(texts)
    assert engine.stats().n_requests == 0
    assert engine.embed([1] * 64).shape == (64,)


def test_learned_positions_bound_the_context(make_engine: MakeEngine, tmp_path: Path) -> None:
    # llama.cpp ends the process at a position without a vector.
    model = encoder_gguf.write_bert(tmp_path / "short.gguf", n_positions=48)
    engine = make_engine(model, n_ctx=512, pooling="mean")
    assert engine.n_ctx == 48
    with pytest.raises(PromptTooLong, match="knows 48 positions"):
        engine.embed([1] * 49)
    with pytest.raises(PromptTooLong, match="knows 48 positions"):
        engine.attend([1] * 49)
    assert engine.embed([1] * 48).shape == (64,)


def test_model_without_vocabulary_embeds_ids(make_engine: MakeEngine, tmp_path: Path) -> None:
    model = tiny_gguf.write_preset(tmp_path / "none.gguf", "tiny_llama", vocab="none")
    engine = make_engine(model, pooling="mean")
    assert engine.embed([1, 2, 3]).shape == (64,)
    with pytest.raises(UnsupportedModel, match="no vocabulary"):
        engine.embed("text")


def test_closing_ends_what_waits(make_engine: MakeEngine, bert_mean: Path) -> None:
    engine = make_engine(bert_mean)
    ended: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                engine.embed([random_ids(300)] * 40)
        except ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while engine.stats().n_requests < 3:
        pass
    engine.close()
    thread.join(20)
    assert len(ended) == 1
    with pytest.raises(ClosedError):
        engine.embed("text")
