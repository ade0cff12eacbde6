"""Random captures, their rows computed beside the step by a kernel or by ggml's nodes.

Two engines compute the same steps; with KQVIEW_DEVICE_ROWS=ggml the second one computes rows by
ggml's nodes. What the first one hands out is compared with whole float32 rows of the second one,
reduced by numpy: kinds, layers, heads, reductions, types, lengths, slots and shifts by chance. A
device without a kernel uses the nodes twice, which then compares only what the nodes reduce.
"""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest

from kqview import Capture
from kqview.errors import UnsupportedModel
from tests.engine.conftest import FAKE_DEVICE
from tests.support import tiny_gguf
from tests.support.rows import KINDS, has_device, has_gpu, near, random_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kqview import Engine
    from kqview.types import Token
    from tests.engine.conftest import MakeEngine

    Rows = list[NDArray[np.float64]]  # (n_heads, n_context) of each layer

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("backend")]

# Head size, heads, KV heads. Groups of 1, 2, 7 and 8 queries; CUDA has flash attention for them.
SHAPES = {
    "64 x 4/2": (64, 4, 2),
    "64 x 7/1": (64, 7, 1),
    "96 x 4/4": (96, 4, 4),
    "128 x 8/1": (128, 8, 1),
    "256 x 2/1": (256, 2, 1),
}
# Largest difference of a row by its largest value. ggml-cuda takes several columns of F32 keys in
# TF32, rounds q to the type of 16-bit keys, and to 8 bits where keys are quantised.
KV_TYPES = {"f32": 2e-3, "f16": 2e-3, "bf16": 1e-2, "q8_0": 3e-2, "q4_0": 3e-2}
LENGTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 200, 255, 256, 257, 300, 511, 513, 700, 1000)
N_CTX, N_SLOTS, N_TOKENS = 1100, 3, 3
# Of models of other sorts, by llama.cpp's generator.
ARCHITECTURES = ("gpt-oss-moe", "gemma2-dense", "deepseek2-moe", "mpt-dense", "falcon-dense")
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "top_logprobs": 2}


def n_rounds() -> int:
    """Of a model and cache type: 1,000 in all on a GPU, few where the CPU computes the steps."""
    return 40 if has_gpu() else 3


@pytest.fixture(autouse=True)
def device(backend: str) -> Iterator[None]:
    if not has_device():
        pytest.skip("there is no device")
    if backend == "fake":
        FAKE_DEVICE.set(has_row_kernels=True)
    yield
    if backend == "fake":
        FAKE_DEVICE.set()


def random_capture(rng: Random, engine: Engine, n_heads: set[int]) -> Capture:
    """One of *engine*, whose layers have so many heads each."""
    model = engine.model
    kind = rng.choice(KINDS)
    options: dict[str, Any] = {"dtype": rng.choice(["float32", "float32", "float16"])}
    if rng.random() < 0.4:
        layers = list(model.attention_layers)
        options["layers"] = rng.sample(layers, rng.randint(1, len(layers)))
    if len(n_heads) == 1 and rng.random() < 0.4:
        (n_head,) = n_heads
        options["heads"] = rng.sample(range(n_head), rng.randint(1, n_head))
    reductions = ["mean_heads", "max_heads"] + ["mean", "max"] * (len(n_heads) < 2)
    if rng.random() < 0.5:
        options["reduce"] = rng.choice(reductions)
    if rng.random() < 0.3:
        options["top_k"] = rng.choice([1, 5, 8, 64, 2000])
    elif kind == "probs" and rng.random() < 0.4:
        starts = [rng.choice([0, 3, 64, 255, 256]) for _ in range(rng.randint(1, 6))]
        options["spans"] = [(i, rng.choice([None, i + 1, i + 40, i + 300])) for i in starts]
    if rng.random() < 0.2:
        options["hidden"] = rng.sample(range(model.n_layer), 1)
    return Capture(kind, **options)


def head_counts(engine: Engine) -> set[int]:
    """Of all layers."""
    (token,) = engine.generate([1], max_tokens=1, slot=0, capture="probs", **GREEDY)
    return {len(rows) for rows in rows_of(token)}


def rows_of(token: Token) -> Rows:
    assert token.attention is not None
    return [np.asarray(rows, np.float64) for rows in token.attention]


def reduced(rows: Rows, capture: Capture) -> Rows | NDArray[np.float64]:
    """What *capture*, but for top_k and dtype, leaves of whole rows of its layers."""
    if capture.heads is not None:
        rows = [one[list(capture.heads)] for one in rows]
    match capture.reduce:
        case None:
            made: Any = rows
        case "mean_heads":
            made = [one.mean(axis=0) for one in rows]
        case "max_heads":
            made = [one.max(axis=0) for one in rows]
        case "mean":
            made = [np.concatenate(rows).mean(axis=0)]
        case _:
            made = [np.concatenate(rows).max(axis=0)]
    if capture.spans:
        made = [
            np.stack([one[..., start:stop].sum(axis=-1) for start, stop in capture.spans], -1)
            for one in made
        ]
    return made


def check_token(token: Token, whole: Token, capture: Capture, limit: float) -> None:
    """*token* has what *capture* leaves of the rows of *whole*, which has the same layers."""
    rows = rows_of(whole)
    wanted = reduced(rows, capture)
    given: Any = token.attention
    places: Any = token.attention_positions
    if capture.reduce in ("mean", "max"):
        given, places = [given], [places]
    # Exp makes differences of scores those of its result; a mean's error is that of its terms.
    if capture.kind == "probs":
        limit *= 4
    limit += 2e-3 if capture.dtype == "float16" else 1e-6
    assert len(given) == len(wanted)
    for i, want in enumerate(wanted):
        got = np.asarray(given[i], np.float64)
        terms = np.concatenate(rows) if capture.reduce in ("mean", "max") else rows[i]
        if capture.spans:
            terms = want
        most = limit * np.abs(terms[np.isfinite(terms)]).max()
        if capture.top_k:
            k = min(capture.top_k, want.shape[-1])
            largest = np.sort(want, axis=-1)[..., ::-1][..., :k]
            check_values(got, largest, most)
            want = np.take_along_axis(want, np.asarray(places[i], np.int64), -1)
            assert all(len(set(row)) == k for row in np.reshape(places[i], (-1, k)).tolist())
        check_values(got, want, most)


def check_values(got: NDArray[np.float64], want: NDArray[np.float64], most: float) -> None:
    assert got.shape == want.shape
    shown = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), shown)
    error = np.abs(np.where(shown, got, 0) - np.where(shown, want, 0)).max()
    assert error <= most, (error, most)


def whole(capture: Capture) -> Capture:
    """The float32 rows that *capture* is made of, and its hidden states."""
    return Capture(capture.kind, layers=capture.layers, hidden=capture.hidden)


class Pair:
    """Both engines, and the same work for each."""

    def __init__(self, make_engine: MakeEngine, model: Path, kv_type: str) -> None:
        options: dict[str, Any] = {
            "flash_attn": True, "kv_type": kv_type, "n_gpu_layers": -1, "device_rows": "beside",
            "n_slots": N_SLOTS, "n_ctx": N_CTX,
        }  # fmt: skip
        self.kv_type = kv_type
        self.kernel = make_engine(model, **options)
        with mock.patch.dict(os.environ, KQVIEW_DEVICE_ROWS="ggml"):
            self.nodes = make_engine(model, **options)
        try:
            list(self.nodes.generate([1, 2], max_tokens=1, slot=0, capture="probs", **GREEDY))
        except UnsupportedModel:  # a type that no node of this device multiplies
            self.nodes = self.kernel

    def shift(self, rng: Random, ids: list[int]) -> list[int]:
        """Bring *ids* into slot 0 and take some of them away; what is there then."""
        n_keep = rng.randrange(len(ids) - 8)
        n_discard = rng.randint(1, len(ids) - n_keep - 2)
        for engine in {self.kernel, self.nodes}:
            engine.slots[0].clear()
            engine.generate(ids, max_tokens=1, slot=0, **GREEDY).read()
            engine.slots[0].shift(n_keep, n_discard)
        return self.kernel.slots[0].tokens

    def check(
        self, prompts: Sequence[list[int]], captures: Sequence[Capture], **options: Any
    ) -> None:
        """Generations at once, one a slot."""
        # The same ids, though what shares a step differs between both.
        forced = {len(prompts[0]) % self.kernel.model.n_vocab: 100.0}
        how = {**GREEDY, **options, "max_tokens": N_TOKENS, "logit_bias": forced}
        found: list[list[list[Token]]] = []
        for engine, wanted in (
            (self.kernel, captures), (self.nodes, [whole(one) for one in captures]),
        ):  # fmt: skip
            if "reuse" not in options:
                for slot in engine.slots:
                    slot.clear()
            running = [
                engine.generate(ids, slot=i, capture=capture, **how)
                for i, (ids, capture) in enumerate(zip(prompts, wanted, strict=True))
            ]
            found.append([list(generation) for generation in running])
            if "reuse" in options:
                engine.slots[0].truncate(len(prompts[0]) - 1)
        n_nodes = [one.stats().graph_nodes_added for one in (self.kernel, self.nodes)]
        # Rows that are computed in the graph change what else is: the steps differ then.
        has_same_steps = len(prompts) == 1 and n_nodes[0] == n_nodes[1]
        limit = KV_TYPES[self.kv_type]
        if not has_same_steps:
            limit = near(limit, "quantised cache" if self.kv_type.startswith("q") else "rows")
        for ours, theirs, capture in zip(*found, captures, strict=True):
            assert [token.id for token in ours] == [token.id for token in theirs]
            for token, other in zip(ours, theirs, strict=True):
                check_token(token, other, capture, limit)
                if has_same_steps:
                    assert token.logprob == other.logprob
                    if capture.dtype == "float32" and capture.hidden:
                        np.testing.assert_array_equal(token.hidden, other.hidden)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_random_captures_are_whole_rows_reduced(
    make_engine: MakeEngine, tmp_path: Path, shape: str, kv_type: str
) -> None:
    head_size, n_head, n_head_kv = SHAPES[shape]
    model = tiny_gguf.write_model(
        tmp_path / "model.gguf", arch="llama", n_embd=head_size * n_head, n_head=n_head,
        n_head_kv=n_head_kv,
    )  # fmt: skip
    check_random(Pair(make_engine, model, kv_type), f"{shape} {kv_type}")


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
def test_random_captures_of_windows_and_layers_of_different_heads(
    make_engine: MakeEngine, tmp_path: Path, kv_type: str
) -> None:
    model = tiny_gguf.write_gemma4(tmp_path / "gemma4.gguf")
    check_random(Pair(make_engine, model, kv_type), kv_type)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_captures_of_other_architectures(
    make_engine: MakeEngine, architectures: dict[str, Path], name: str
) -> None:
    check_random(Pair(make_engine, architectures[name], "f16"), name)


def check_random(pair: Pair, seed: str) -> None:
    rng = Random(seed)
    lengths = LENGTHS if has_gpu() else LENGTHS[:9]
    n_vocab = min(256, pair.kernel.model.n_vocab)
    n_heads = head_counts(pair.kernel)
    for i in range(n_rounds()):
        # Those of one text first: where others leave their cells differs from run to run, and with
        # it how attention is split among blocks.
        n_texts = 1 if i < 0.6 * n_rounds() else rng.choice([2, 3])
        prompts = [
            [one % n_vocab for one in random_ids(rng.choice(lengths), seed=100 * i + k)]
            for k in range(n_texts)
        ]
        captures = [random_capture(rng, pair.kernel, n_heads) for _ in prompts]
        how: dict[str, Any] = {}
        can_shift = not pair.kernel._core.shift_obstacle and pair.kv_type in ("f32", "f16")
        if n_texts == 1 and can_shift and rng.random() < 0.3:
            ids = random_ids(rng.choice([40, 100, 300]), seed=i)
            prompts = [[*pair.shift(rng, [one % n_vocab for one in ids]), 7]]
            how["reuse"] = "shift"
        try:
            pair.check(prompts, captures, **how)
        except UnsupportedModel:  # logits and scores of ALiBi, which only kernels have
            if all(one.kind == "probs" for one in captures):
                raise
        except AssertionError as failure:
            lengths_now = [len(ids) for ids in prompts]
            raise AssertionError(f"round {i}: {captures} of {lengths_now}, {how}") from failure
    if pair.nodes is not pair.kernel:
        assert pair.nodes.stats().device_kernel_rows == 0
        if has_gpu():
            assert pair.kernel.stats().device_kernel_rows > 0


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_capture_beside_the_step_changes_no_id_and_no_logprob(
    make_engine: MakeEngine, tmp_path: Path, kv_type: str
) -> None:
    model = tiny_gguf.write_model(tmp_path / "model.gguf", arch="llama", n_embd=256)
    engine = make_engine(
        model, n_gpu_layers=-1, device_rows="beside", flash_attn=True, kv_type=kv_type, n_slots=2
    )
    prompt = random_ids(150)
    others: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "slot": 1}

    def answers(capture: Capture | None, **options: Any) -> list[tuple[int, Any]]:
        tokens = engine.generate(
            prompt, max_tokens=30, slot=0, capture=capture, top_logprobs=5, ignore_eos=True,
            temperature=1.0, seed=3, **options,
        )  # fmt: skip
        return [(token.id, token.top_logprobs) for token in tokens]

    rng, n_heads = Random(kv_type), head_counts(engine)
    answers(None)  # from here on the slot holds the prompt: all prefill the same way
    plain, alone = answers(None), answers(None, deterministic=True)
    for _ in range(10 if has_gpu() else 3):
        capture = random_capture(rng, engine, n_heads)
        assert answers(capture) == plain, capture
        with engine.generate(random_ids(40), capture=capture, **others) as busy:
            next(busy)
            assert answers(capture, deterministic=True) == alone, capture
