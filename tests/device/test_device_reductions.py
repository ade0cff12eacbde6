"""Reductions on a device: the host's values, and only what is left of the rows leaves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture
from tests.support import shared_kv_gguf
from tests.support.devices import both, check_equal
from tests.support.rows import Kind, random_ids, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kqview import Engine
    from tests.engine.conftest import MakeEngine

N_PROMPT, N_TOKENS = 20, 6
N_DEVICES = 2
HEADS = [3, 0, 1]
N_COLUMNS = sum(N_PROMPT + i for i in range(N_TOKENS))
# What is captured, and the bytes of a column that leave devices with 3 layers in all of 4 heads: a
# row a layer, or one of each device where layers are joined, which the host then adds up.
REDUCED = {
    "mean_heads": (Capture("logits", reduce="mean_heads"), 3 * 4),
    "max_heads": (Capture("scores", reduce="max_heads"), 3 * 4),
    "max_heads of probs": (Capture("probs", reduce="max_heads"), 3 * 4),
    "max_heads float16": (Capture("logits", reduce="max_heads", dtype="float16"), 3 * 2),
    "mean of heads": (Capture("scores", heads=HEADS, reduce="mean_heads"), 3 * 4),
    "max of heads": (Capture("logits", heads=HEADS, reduce="max_heads"), 3 * 4),
    "max of one head": (Capture("probs", heads=[2], reduce="max_heads"), 3 * 4),
    "max of layers": (Capture("logits", layers=[2, 0], reduce="max_heads"), 2 * 4),
    "mean": (Capture("logits", reduce="mean"), N_DEVICES * 4),
    "max": (Capture("scores", reduce="max"), N_DEVICES * 4),
    "mean of all probs": (Capture("probs", reduce="mean"), N_DEVICES * 4),
    "max float16": (Capture("probs", reduce="max", dtype="float16"), N_DEVICES * 4),
    "max of heads of a layer": (Capture("probs", layers=[1], heads=HEADS, reduce="max"), 4),
    "top_k of mean_heads": (Capture("probs", reduce="mean_heads", top_k=3), 3 * 4),
    "top_k of mean": (Capture("logits", reduce="mean", top_k=3), N_DEVICES * 4),
}


def copied(engine: Engine, capture: Capture) -> int:
    """Bytes that left devices for the rows of ``N_TOKENS`` tokens behind the prompt."""
    before = engine.stats()
    run(engine, random_ids(N_PROMPT), N_TOKENS, capture=capture)
    return engine.stats().since(before).device_copy_bytes


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("name", REDUCED)
def test_reduced_rows_are_the_hosts_and_no_others_leave_the_device(
    make_engine: MakeEngine, tiny_llama: Path, name: str, flash_attn: bool
) -> None:
    capture, column_bytes = REDUCED[name]
    engines = both(make_engine, tiny_llama, flash_attn=flash_attn)
    theirs, ours = (run(e, random_ids(N_PROMPT), N_TOKENS, capture=capture) for e in engines)
    check_equal(ours, theirs)
    assert copied(engines[1], capture) == column_bytes * N_COLUMNS


@pytest.mark.parametrize("refused_op", ["POOL_2D", "GET_ROWS"])
@pytest.mark.parametrize("name", ["mean of heads", "max_heads float16", "max", "top_k of mean"])
def test_a_device_that_cannot_reduce_leaves_it_to_the_host(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, name: str, refused_op: str
) -> None:
    capture, _ = REDUCED[name]
    device.set(refused_op=refused_op)
    engines = both(make_engine, tiny_llama)
    theirs, ours = (run(e, random_ids(N_PROMPT), N_TOKENS, capture=capture) for e in engines)
    check_equal(ours, theirs)
    n_heads = 4 if capture.heads is None else len(capture.heads)
    assert copied(engines[1], capture) == 3 * n_heads * 4 * N_COLUMNS


@pytest.mark.parametrize("n_gpu_layers", [1, 2, 3])
@pytest.mark.parametrize("name", ["max of heads", "mean", "max", "top_k of mean"])
def test_devices_and_the_cpu_reduce_together(
    make_engine: MakeEngine, tiny_llama: Path, name: str, n_gpu_layers: int
) -> None:
    capture, _ = REDUCED[name]
    engines = both(make_engine, tiny_llama, n_gpu_layers=n_gpu_layers)
    theirs, ours = (run(e, random_ids(N_PROMPT), N_TOKENS, capture=capture) for e in engines)
    check_equal(ours, theirs)


@pytest.mark.parametrize("name", ["max_heads", "mean of heads", "mean", "max", "max float16"])
@pytest.mark.parametrize("n_ubatch", [16, 512])
def test_reduced_rows_of_a_prompt(
    make_engine: MakeEngine, tiny_llama: Path, name: str, n_ubatch: int
) -> None:
    capture, _ = REDUCED[name]
    engines = both(make_engine, tiny_llama, n_ubatch=n_ubatch)
    prompt = random_ids(70)
    for last in (None, 5):
        theirs, ours = (np.asarray(e.attend(prompt, capture, last=last).array()) for e in engines)
        near = 2e-3 if ours.dtype == np.float16 else 2e-5
        np.testing.assert_allclose(ours, theirs, rtol=near, atol=near)


def test_slots_with_reductions_of_their_own_in_one_batch(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    captures = [
        Capture("logits", heads=[1, 2], reduce="mean_heads"),
        Capture("logits", heads=[0], reduce="mean_heads"),
        Capture("scores", reduce="max"),
        Capture("logits"),
    ]

    def generate(engine: Engine) -> list[list[Any]]:
        running = [
            engine.generate(
                random_ids(N_PROMPT, seed=i), slot=i, max_tokens=N_TOKENS, temperature=0.0,
                ignore_eos=True, capture=capture,
            )
            for i, capture in enumerate(captures)
        ]  # fmt: skip
        steps = [[next(generation) for generation in running] for _ in range(N_TOKENS)]
        return [list(tokens) for tokens in zip(*steps, strict=True)]

    cpu, gpu = both(make_engine, tiny_llama, n_slots=len(captures))
    for theirs, ours in zip(generate(cpu), generate(gpu), strict=True):
        check_equal(ours, theirs)


def test_lists_of_heads_may_change_with_every_request(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    cpu, gpu = both(make_engine, tiny_llama)
    for i in range(12):
        heads = [[0], [1, 3], [2, 0, 1], None][i % 4]
        capture = Capture("probs", heads=heads, reduce=("mean_heads", "max", "mean")[i % 3])
        theirs, ours = (run(e, random_ids(N_PROMPT), 2, capture=capture) for e in (cpu, gpu))
        check_equal(ours, theirs)


@pytest.mark.parametrize("write", [shared_kv_gguf.write_gemma3n, shared_kv_gguf.write_gemma4])
@pytest.mark.parametrize("kind", ["logits", "scores", "probs"])
def test_joined_layers_of_other_masks_and_numbers_of_heads(
    make_engine: MakeEngine, tmp_path: Path, kind: Kind, write: Callable[[Path], Path]
) -> None:
    engines = both(make_engine, write(tmp_path / "model.gguf"))
    for reduce in ("mean", "max"):
        capture = Capture(kind, reduce=reduce)
        theirs, ours = (run(e, random_ids(60), 4, capture=capture) for e in engines)
        check_equal(ours, theirs)
