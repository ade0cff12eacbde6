"""What a test asks of captured rows: run a request, and the same rows of another computation.

Owns: the arithmetic of row indices (token k carries the row of query ``len(prompt) - 1 + k``), and
pairs of engines on the CPU and on devices.
Never: tolerates anything but another order of sums on a device; tolerances stand in the tests.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kqview import system_info

from .reference import Reference, relative_error

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kqview import Engine, Generation
    from kqview.types import Token
    from tests.engine.conftest import MakeEngine

    from .reference import Result
    from .stock import Run

Kind = Literal["logits", "scores", "probs"]
KINDS: tuple[Kind, ...] = ("logits", "scores", "probs")
_KEPT_BY = {"flash_attn", "exact_from", "kv_type", "operand_type"}


@lru_cache(maxsize=4)
def _forward(model: Path, ids: tuple[int, ...], **options: Any) -> Result:
    return Reference.load(model).forward(ids, angle_type="f32", **options)


def random_ids(n_tokens: int, seed: int = 0) -> list[int]:
    """*n_tokens* ids that are bytes."""
    return np.random.default_rng(seed).integers(0, 256, n_tokens).tolist()


def run(engine: Engine, prompt: Sequence[int], n_tokens: int, **options: Any) -> list[Token]:
    """Generate exactly *n_tokens*, sampled with a fixed seed so that they do not repeat."""
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7, **options}
    tokens = list(engine.generate(prompt, max_tokens=n_tokens, ignore_eos=True, **settings))
    assert len(tokens) == n_tokens
    return tokens


def in_turn(running: Sequence[Generation], n_tokens: int) -> list[list[Token]]:
    """*n_tokens* of each generation, one of each in turn, so that they share steps."""
    rounds = [[next(generation) for generation in running] for _ in range(n_tokens)]
    return [list(tokens) for tokens in zip(*rounds, strict=True)]


def sequence_of(prompt: Sequence[int], tokens: Sequence[Token]) -> list[int]:
    """Every id whose query has a row: the prompt and the tokens except the last one."""
    return [*prompt, *(token.id for token in tokens[:-1])]


def forward(model: Path, prompt: Sequence[int], tokens: Sequence[Token], **options: Any) -> Result:
    """The float64 reference of the sequence that *tokens* were generated in."""
    return forward_ids(model, sequence_of(prompt, tokens), **options)


def forward_ids(model: Path, ids: Sequence[int], **options: Any) -> Result:
    """The float64 reference of *ids*, with flash attention as where the layers are.

    The last few are kept: tests of one text, but of another kind or cache, share its arrays.
    """
    if options.get("flash_attn") and has_gpu():
        # Keys and values enter as float16 there too; the sums are no CPU's.
        options = {**options, "flash_attn": False, "exact_from": None, "kv_type": "f16"}
    # Options that are arrays or functions are those of a single test.
    compute = _forward if _KEPT_BY.issuperset(options) else _forward.__wrapped__
    return compute(model, tuple(ids), **options)


def reference_rows(result: Result, kind: Kind, i_query: int) -> NDArray[np.float64]:
    """Rows of one query, (n_layer, n_head, i_query + 1)."""
    full = {"logits": result.kq, "scores": result.scores, "probs": result.probs}[kind]
    return full[:, :, i_query, : i_query + 1]


def largest_error(
    tokens: Sequence[Token], result: Result, kind: Kind, prompt: Sequence[int]
) -> float:
    """Largest relative error of any row of any token against the reference."""
    errors: list[float] = []
    for index, token in enumerate(tokens):
        assert token.attention is not None
        want = reference_rows(result, kind, len(prompt) - 1 + index)
        errors.append(relative_error(np.asarray(token.attention), want))
    return max(errors)


def largest_stock_error(
    tokens: Sequence[Token], stock: Run, kind: Kind, layers: Sequence[int] | None = None
) -> float:
    """Largest relative error of any row of any token against the stock build's tensors."""
    of = slice(None) if layers is None else list(layers)
    assert len(stock.steps) == len(tokens)
    name = "kq" if kind == "logits" else kind
    return max(
        relative_error(np.asarray(token.attention)[of], getattr(step, name)[of])
        for token, step in zip(tokens, stock.steps, strict=True)
    )


def same_rows(a: Sequence[Token], b: Sequence[Token]) -> bool:
    """Are all rows of both equal, bit for bit?"""
    return len(a) == len(b) and all(
        np.array_equal(np.asarray(x.attention), np.asarray(y.attention))
        for x, y in zip(a, b, strict=True)
    )


def check_tokens(found: Sequence[Token], want: Sequence[Token], logprob: float = 1e-3) -> None:
    """Ids, logprobs within *logprob*, rows and logits, each of its own token."""
    assert [one.id for one in found] == [one.id for one in want]
    for one, other in zip(found, want, strict=True):
        assert one.index == other.index
        np.testing.assert_allclose(one.logprob, other.logprob, rtol=0, atol=logprob)
        assert one.column_ids == other.column_ids
        np.testing.assert_allclose(one.rows, other.rows, atol=1e-5)
        assert one.logits is not None
        assert other.logits is not None
        np.testing.assert_allclose(one.logits, other.logits, atol=1e-3)


# ---- devices

CLOSE = 5e-5  # the same product, summed in another order; 4e-5 with AVX2
FAKE = "a device for tests"  # tests/device/fake_device.cpp
# How far a GPU's values may be from what is exact, or from what it computes beside other tokens.
# Errors of rows are relative to their largest value; what was measured is of an H100. cuBLAS
# multiplies in TF32, unless NVIDIA_TF32_OVERRIDE is 0, and ggml-cuda's own kernels do for 4 to 16
# columns; flash attention rounds keys and values to float16. Which kernel computes depends on how
# many tokens a step has, so a prompt in one piece and the same prompt half of which was cached
# differ as well.
ON_GPU: dict[str, float] = {
    # Products of one column are float32 sums; the sines of the rotation are fast ones. Measured:
    # 2.4e-5.
    "first layer": 1e-4,
    # Keys that were turned to other positions, once more by fast sines. Measured: 2.2e-4.
    "shifted": 1e-3,
    # 3 layers, contexts on both sides of 768 tokens. Measured: 6.2e-3.
    "values": 1e-2,
    # Each layer multiplies the error of the one below it, and random weights have no outliers that
    # would hide it. Measured: 0.022.
    "rows": 5e-2,
    "states": 0.2,  # not relative. Measured: 0.058.
    # 8 bits of a key, and of a query where ggml-cuda rounds it too. Measured: 0.14.
    "quantised cache": 0.2,
    "logprobs": 0.1,
    "logits": 0.2,  # of up to 15 here
    # Vectors of a text pool many positions, whose errors cancel out.
    "vectors": 1e-2,
}
ON_DEVICE = ON_GPU["values"]


def has_device() -> bool:
    """Can engines have layers anywhere but on the CPU? Devices round in another way."""
    return any(device["type"] in ("GPU", "IGPU") for device in system_info()["devices"])


def has_gpu() -> bool:
    """Are there devices other than those of the tests, which compute as the CPU does?"""
    found = [device for device in system_info()["devices"] if device["type"] in ("GPU", "IGPU")]
    return any(device["description"] != FAKE for device in found)


def rounds_as_gpu() -> bool:
    """Is there a GPU, or a device of the tests that rounds products as one does?"""
    return has_gpu() or os.environ.get("KQVIEW_TEST_FAKE_DEVICE") == "rounding"


def near(limit: float, what: str = "rows") -> float:
    """*limit*, an error of the CPU, or that of `ON_GPU` where it is larger and a GPU computes."""
    return max(limit, ON_GPU[what]) if rounds_as_gpu() else limit


def both(make_engine: MakeEngine, model: Path, **options: Any) -> tuple[Engine, Engine]:
    """An engine on the CPU and one whose layers are all on devices."""
    # A device of the tests computes as llama.cpp does on the CPU.
    kernel = {"attention_kernel": "llama.cpp"}
    options = {"kv_type": "f32", "flash_attn": False, **kernel, **options}
    cpu = make_engine(model, **{**options, "n_gpu_layers": 0})
    return cpu, make_engine(model, **{"n_gpu_layers": -1, **options})


def check_equal(ours: Sequence[Token], theirs: Sequence[Token], limit: float = CLOSE) -> None:
    """The same ids and the same rows."""
    assert [token.id for token in ours] == [token.id for token in theirs]
    for a, b in zip(ours, theirs, strict=True):
        for name in ("attention", "attention_positions", "hidden"):
            x, y = getattr(a, name), getattr(b, name)
            if y is None:
                assert x is None
                continue
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            near = 2e-3 if x.dtype == np.float16 else limit
            np.testing.assert_allclose(
                x.astype(np.float64), y.astype(np.float64), rtol=near, atol=near, err_msg=name
            )
