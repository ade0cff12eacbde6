"""`Engine.embed`: vectors of texts, by encoders and by decoders that were opened with pooling.

Values are those of a float64 numpy transformer: BERT (`bert_reference`) or Llama (`reference`).
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview.errors import (
    BusyError,
    PromptTooLong,
    QueueFull,
)
from tests.support import encoder_gguf, tiny_gguf
from tests.support.bert_reference import BertReference
from tests.support.reference import relative_error
from tests.support.rows import random_ids, reference_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from .conftest import MakeEngine

# GELU is a table of float16 in llama.cpp: an argument beside a boundary takes the next entry.
TABLE = 1e-3
EXACT = 2e-5
POOL: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "mean": lambda rows: rows.mean(axis=0),
    "cls": lambda rows: rows[0],
    "last": lambda rows: rows[-1],
    "none": lambda rows: rows,
}
IDS = random_ids(41)


def unit(values: NDArray[Any]) -> NDArray[Any]:
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def texts_of(lengths: Sequence[int]) -> list[list[int]]:
    return [random_ids(n, seed=i) for i, n in enumerate(lengths)]


# ---- values


@pytest.mark.parametrize("n_tokens", [1, 2, 41, 300])
@pytest.mark.parametrize("pooling", POOL)
def test_embedding_of_encoder_equals_reference(
    make_engine: MakeEngine, bert: Path, pooling: str, n_tokens: int
) -> None:
    engine = make_engine(bert, pooling=pooling, flash_attn=False)
    ids = random_ids(n_tokens)
    want = POOL[pooling](BertReference(bert).rows(ids))
    raw = engine.embed(ids, normalize=False)
    assert raw.shape == want.shape
    assert relative_error(raw, want) <= TABLE
    assert relative_error(engine.embed(ids), unit(want)) <= TABLE


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("pooling", POOL)
def test_embedding_of_decoder_equals_reference(
    make_engine: MakeEngine, tiny_llama: Path, pooling: str, flash_attn: bool
) -> None:
    engine = make_engine(tiny_llama, pooling=pooling, flash_attn=flash_attn, kv_type="f32")
    want = POOL[pooling](reference_of(tiny_llama).forward(IDS, angle_type="f32").final)
    raw = engine.embed(IDS, normalize=False)
    assert raw.shape == want.shape
    assert relative_error(raw, want) <= (1e-2 if flash_attn else EXACT)


def test_encoder_of_an_encoder_decoder_model_is_pooled(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    model = encoder_gguf.write_t5(tmp_path / "t5.gguf")
    rows: Any = make_engine(model).embed(IDS, normalize=False)
    assert rows.shape == (41, encoder_gguf.N_EMBD)
    for pooling, pool in POOL.items():
        vector = make_engine(model, pooling=pooling).embed(IDS, normalize=False)
        assert relative_error(vector, pool(rows)) <= EXACT


def test_file_says_how_its_model_pools(
    make_engine: MakeEngine, bert: Path, bert_mean: Path
) -> None:
    engine = make_engine(bert_mean)
    assert engine.pooling == "mean"
    other = make_engine(bert_mean, pooling="cls")
    assert other.pooling == "cls"
    np.testing.assert_array_equal(engine.embed(IDS), make_engine(bert, pooling="mean").embed(IDS))
    np.testing.assert_array_equal(other.embed(IDS), make_engine(bert, pooling="cls").embed(IDS))
    # A file that says nothing: nothing is pooled.
    assert make_engine(bert).pooling == "none"


def test_decoder_whose_file_names_a_pooling_embeds_and_generates(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    model = add_key(tiny_llama, tmp_path / "embedding.gguf", "llama.pooling_type", 3)
    engine = make_engine(model)
    assert engine.pooling == "last"
    vector = engine.embed(IDS)
    np.testing.assert_array_equal(vector, make_engine(tiny_llama, pooling="last").embed(IDS))
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    ids = [token.id for token in engine.generate(IDS, **options)]
    assert ids == [token.id for token in make_engine(tiny_llama).generate(IDS, **options)]


def add_key(model: Path, path: Path, key: str, value: int) -> Path:
    """A copy of *model* with a u32 key more, and another one so that tensors stay aligned."""
    data = model.read_bytes()
    keys = {key: value, "x" * ((-len(key)) % 32): 0}
    entries = b"".join(
        struct.pack("<Q", len(name)) + name.encode() + struct.pack("<II", 4, number)
        for name, number in keys.items()
    )
    (n_keys,) = struct.unpack_from("<Q", data, 16)
    path.write_bytes(data[:16] + struct.pack("<Q", n_keys + 2) + entries + data[24:])
    return path


# ---- one and several


@pytest.mark.parametrize("n_slots", [1, 3])
def test_several_texts_equal_single_ones(
    make_engine: MakeEngine, bert_mean: Path, n_slots: int
) -> None:
    engine = make_engine(bert_mean, n_slots=n_slots)
    texts = texts_of([5, 33, 1, 120, 33, 2, 64] * 12)  # more than are submitted at a time
    vectors = engine.embed(texts)
    assert isinstance(vectors, np.ndarray)
    assert vectors.shape == (84, encoder_gguf.N_EMBD)
    assert vectors.dtype == np.float32
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_array_equal(engine.embed(text), vector)
    assert len(engine.embed([texts[0]])) == 1
    assert engine.stats().n_tokens == 0
    assert engine.stats().n_queued == 0


@pytest.mark.parametrize("n_slots", [1, 3, 5])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_slots_of_any_number_take_texts_of_full_length(
    make_engine: MakeEngine, tiny_llama: Path, pooling: str, n_slots: int
) -> None:
    # 3 and 5 do not divide n_ubatch: llama.cpp reserves a graph of a larger one.
    engine = make_engine(tiny_llama, pooling=pooling, n_slots=n_slots, n_ubatch=64, n_ctx=64)
    texts = texts_of([64] * n_slots)
    vectors = engine.embed(texts)
    engine.slots[0].clear()
    list(engine.generate(texts[0][:20], max_tokens=4, capture="probs"))
    np.testing.assert_array_equal(engine.embed(texts), vectors)


def test_nothing_pooled_gives_a_list_of_rows(make_engine: MakeEngine, bert: Path) -> None:
    engine = make_engine(bert)
    texts = texts_of([7, 30])
    found = engine.embed(texts)
    assert isinstance(found, list)
    assert [rows.shape for rows in found] == [(7, 64), (30, 64)]
    for rows in found:
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)


def test_text_is_tokenized_as_in_tokenize(make_engine: MakeEngine, bert_mean: Path) -> None:
    engine = make_engine(bert_mean)
    ids = engine.tokenize("Grüße, and <|im_end|>", add_special=True)
    np.testing.assert_array_equal(engine.embed("Grüße, and <|im_end|>"), engine.embed(ids))
    plain = engine.tokenize("<|im_end|>", parse_special=False)
    np.testing.assert_array_equal(
        engine.embed("<|im_end|>", parse_special=False), engine.embed(np.array(plain))
    )
    vectors = engine.embed(["one", "two"])
    np.testing.assert_array_equal(vectors[1], engine.embed("two"))


def test_arrays_are_the_callers_own(make_engine: MakeEngine, bert_mean: Path) -> None:
    engine = make_engine(bert_mean)
    first = engine.embed(IDS)
    kept = first.copy()
    second = engine.embed(IDS)
    second[:] = 0
    engine.embed(random_ids(41, seed=9))
    engine.close()
    np.testing.assert_array_equal(first, kept)
    assert first.flags.writeable


def test_product_of_normalised_vectors_is_their_cosine(
    make_engine: MakeEngine, bert_mean: Path
) -> None:
    engine = make_engine(bert_mean)
    texts = texts_of([20, 21])
    a, b = engine.embed(texts)
    x, y = engine.embed(texts, normalize=False).astype(np.float64)  # type: ignore[union-attr]
    assert abs(a @ b - x @ y / np.sqrt((x @ x) * (y @ y))) < 1e-6


# ---- beside other requests


def test_attention_and_embeddings_of_one_encoder(make_engine: MakeEngine, bert_mean: Path) -> None:
    engine = make_engine(bert_mean, n_slots=2)
    rows: Any = engine.attend(IDS, "probs").array()
    vector = engine.embed(IDS)
    for _ in range(3):
        np.testing.assert_array_equal(engine.attend(IDS, "probs").array(), rows)
        np.testing.assert_array_equal(engine.embed(IDS), vector)


def test_generation_between_embeddings_is_that_of_an_ordinary_engine(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    plain = make_engine(tiny_llama, n_slots=2, flash_attn=False, kv_type="f32")
    engine = make_engine(tiny_llama, n_slots=2, flash_attn=False, kv_type="f32", pooling="mean")
    options: dict[str, Any] = {
        "temperature": 0, "max_tokens": 12, "ignore_eos": True, "capture": "probs", "slot": 0,
    }  # fmt: skip
    want = list(plain.generate(IDS, **options))
    texts = texts_of([30, 200, 3])
    vectors = engine.embed(texts)
    generation = engine.generate(IDS, **options)
    found = []
    for token in generation:
        found.append(token)
        np.testing.assert_array_equal(engine.embed(texts), vectors)
    assert [token.id for token in found] == [token.id for token in want]
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a.attention, b.attention, rtol=1e-5, atol=1e-7)


def test_embedding_does_not_depend_on_what_the_slot_holds(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, pooling="mean")
    first = engine.embed(IDS)
    np.testing.assert_array_equal(engine.embed(IDS), first)
    engine.generate(IDS[:20], max_tokens=5, temperature=0).read()
    np.testing.assert_array_equal(engine.embed(IDS), first)


def test_long_text_comes_in_steps_where_the_last_token_pools(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    ids = random_ids(200)
    whole = make_engine(tiny_llama, pooling="last", flash_attn=False, kv_type="f32")
    parts = make_engine(tiny_llama, pooling="last", flash_attn=False, kv_type="f32", n_ubatch=48)
    assert relative_error(parts.embed(ids), whole.embed(ids)) <= EXACT
    mean = make_engine(tiny_llama, pooling="mean", n_ubatch=48)
    with pytest.raises(PromptTooLong, match=r"200 tokens.*48; raise n_ubatch"):
        mean.embed(ids)


def test_shift_between_embeddings(make_engine: MakeEngine, tiny_llama: Path) -> None:
    # llama.cpp reserves a graph that pools; 3 slots do not divide n_ubatch.
    engine = make_engine(tiny_llama, pooling="mean", n_slots=3, n_ubatch=64)
    vector = engine.embed(IDS)
    assert engine.slots[0].tokens == IDS
    assert engine.slots[0].shift(8, 16) == len(IDS) - 16
    np.testing.assert_array_equal(engine.embed(IDS), vector)


def test_adapter_changes_the_embedding_as_merged_weights_do(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    # An adapter makes llama.cpp reserve again in its first step, which pools here.
    lora, merged = tmp_path / "lora.gguf", tmp_path / "merged.gguf"
    tiny_gguf.write_lora(lora, "tiny_llama", merged=merged)
    options: dict[str, Any] = {"pooling": "mean", "n_slots": 3, "n_ubatch": 64, "flash_attn": False}
    model = tiny_gguf.write_preset(tmp_path / "base.gguf", "tiny_llama")
    want = make_engine(merged, **options).embed(IDS)
    assert relative_error(make_engine(model, lora=lora, **options).embed(IDS), want) <= 1e-3
    assert relative_error(make_engine(model, **options).embed(IDS), want) > 1e-2


def test_recurrent_model_embeds(make_engine: MakeEngine, tmp_path: Path) -> None:
    model = tiny_gguf.write_mamba(tmp_path / "mamba.gguf")
    rows: Any = make_engine(model, pooling="none").embed(IDS, normalize=False)
    engine = make_engine(model, pooling="mean")
    for _ in range(2):
        vector = engine.embed(IDS, normalize=False)
        assert relative_error(vector, rows.mean(axis=0)) <= 1e-4


def test_threads_embed_at_the_same_time(make_engine: MakeEngine, bert_mean: Path) -> None:
    engine = make_engine(bert_mean, n_slots=2)
    texts = texts_of([11, 29, 50, 8] * 5)
    want = engine.embed(texts)
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        found[i] = engine.embed(texts)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2, 3]
    for vectors in found.values():
        np.testing.assert_array_equal(vectors, want)


def test_embed_from_the_thread_that_keeps_every_slot_is_refused(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, pooling="mean", run_ahead=1)
    generation = engine.generate(IDS, max_tokens=100, ignore_eos=True)
    next(generation)
    with pytest.raises(BusyError):
        engine.embed(IDS)
    generation.close()
    assert engine.embed(IDS).shape == (64,)


def test_full_queue_of_others_is_told_and_own_texts_wait(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, pooling="mean", run_ahead=1)
    generations = []
    with pytest.raises(QueueFull):  # noqa: PT012
        for _ in range(2000):
            generations.append(engine.generate([1, 2], max_tokens=100, ignore_eos=True))
    with pytest.raises(QueueFull):
        engine.embed(texts_of([5] * 40))
    for generation in generations:
        generation.cancel()
    assert engine.embed(texts_of([5] * 40)).shape == (40, 64)  # type: ignore[union-attr]
