"""Rows that kernels of a device compute beside the step: the simulated device's, in double.

What a step tells them, where rows go and in which form, and when ggml's nodes compute rows instead.
The kernels of a real GPU are checked against float64 by bench/row_check.sh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Edit
from kqview.errors import DecodeError
from tests.support.rows import KINDS, Kind, both, check_equal, in_turn, random_ids, run

from .test_device_architectures import MODELS, prompt_of

if TYPE_CHECKING:
    from pathlib import Path

    from kqview import Engine
    from kqview.types import Token
    from tests.engine.conftest import MakeEngine

N_PROMPT, N_TOKENS = 20, 8
# Masks of the graph, keys that stand for several tokens.
LEFT_TO_NODES = {"deepseek32-moe", "glm-dsa-moe", "minimax-m3-moe"}
FORMS = [
    Capture("logits"),
    Capture("scores", dtype="float16"),
    Capture("probs", heads=[3, 0], layers=[2, 0]),
    Capture("probs", top_k=5),
    Capture("probs", reduce="mean_heads", top_k=3, dtype="float16"),
    Capture("scores", reduce="max_heads"),
    Capture("probs", reduce="mean"),
    Capture("probs", reduce="mean_heads", spans=[(0, 4), (2, None), (600, None)]),
]


@pytest.fixture(autouse=True)
def with_kernels(device: Any) -> None:
    device.set(has_row_kernels=True)


def kernel_rows(engine: Engine) -> int:
    return engine.stats().device_kernel_rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(set(MODELS) - LEFT_TO_NODES))
def test_models_with_windows_caps_sinks_and_biases(
    make_engine: MakeEngine, architectures: dict[str, Path], name: str, kind: Kind
) -> None:
    engines = both(make_engine, architectures[name], n_ctx=256, flash_attn=True)
    theirs, ours = (run(e, prompt_of(e), 40, capture=kind) for e in engines)
    check_equal(ours, theirs, 2e-3)
    n_rows = np.asarray(ours[0].attention).shape[:-1]
    assert kernel_rows(engines[1]) == 40 * np.prod(n_rows)


def test_requests_of_each_form_share_steps(make_engine: MakeEngine, tiny_llama: Path) -> None:
    def generate(engine: Engine) -> list[list[Token]]:
        running = [
            engine.generate(
                random_ids(N_PROMPT + 40 * slot, seed=slot), slot=slot, max_tokens=N_TOKENS,
                temperature=0.0, ignore_eos=True, capture=capture,
            )
            for slot, capture in enumerate(FORMS)
        ]  # fmt: skip
        return in_turn(running, N_TOKENS)

    cpu = make_engine(tiny_llama, n_slots=len(FORMS), flash_attn=True)
    # "mean" is one row over all layers: they must be on one device.
    gpu = make_engine(
        tiny_llama, n_slots=len(FORMS), flash_attn=True, n_gpu_layers=-1, device_rows="auto"
    )
    # Prompts are evaluated in other steps, by flash attention that sums V in float16: near values
    # of the k largest change places.
    for theirs, ours in zip(generate(cpu), generate(gpu), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a.rows, b.rows, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("capture", FORMS, ids=str)
def test_each_form(make_engine: MakeEngine, tiny_llama: Path, capture: Capture) -> None:
    engines = both(make_engine, tiny_llama, flash_attn=True)
    theirs, ours = (run(e, random_ids(N_PROMPT), N_TOKENS, capture=capture) for e in engines)
    check_equal(ours, theirs, 2e-3)
    # On two devices, a row over the layers of both is finished by the host.
    assert (kernel_rows(engines[1]) > 0) == (capture.reduce not in ("mean", "max"))


@pytest.mark.parametrize("pinned_bytes", [0, 1 << 30])
def test_small_rows_are_copied_where_the_block_cannot_be_written_to(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, pinned_bytes: int
) -> None:
    device.set(has_row_kernels=True, pinned_bytes=pinned_bytes)
    engines = both(make_engine, tiny_llama, flash_attn=True)
    capture = Capture("probs", top_k=4)
    theirs, ours = (run(e, random_ids(N_PROMPT), N_TOKENS, capture=capture) for e in engines)
    check_equal(ours, theirs)
    assert (engines[1].stats().device_copies > 0) == (pinned_bytes == 0)


def test_more_values_than_a_kernel_keeps_are_left_to_nodes(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1, flash_attn=True, n_ctx=256)
    prompt = random_ids(N_PROMPT)
    run(engine, prompt, 2, capture=Capture("probs", top_k=1025))
    assert kernel_rows(engine) == 0
    run(engine, prompt, 2, capture=Capture("probs", top_k=1024))
    assert kernel_rows(engine) > 0


def test_a_kernel_that_does_not_agree_with_nodes_is_not_used_and_named(
    make_engine: MakeEngine,
    tiny_llama: Path,
    device: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    device.set(has_row_kernels=True, row_kernels_off=0.5)
    engines = both(make_engine, tiny_llama, flash_attn=True)
    theirs, ours = (run(e, random_ids(N_PROMPT), N_TOKENS, capture="logits") for e in engines)
    check_equal(ours, theirs)
    assert kernel_rows(engines[1]) == 0
    lines = [line for line in caplog.messages if "not by kqview's kernel" in line]
    assert len(lines) == 2  # devices
    assert "they differ by" in lines[0]


def test_the_environment_forces_nodes(
    make_engine: MakeEngine, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KQVIEW_DEVICE_ROWS", "ggml")
    engine = make_engine(tiny_llama, n_gpu_layers=-1, flash_attn=True, device_rows="beside")
    run(engine, random_ids(N_PROMPT), N_TOKENS, capture="logits")
    assert kernel_rows(engine) == 0


def test_a_failed_copy_ends_its_request_alone(
    make_engine: MakeEngine, tiny_llama: Path, device: Any
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1, flash_attn=True)
    prompt = random_ids(N_PROMPT)
    want = run(engine, prompt, N_TOKENS, capture="logits")
    device.set(has_row_kernels=True, fail_copy_in=3)
    with pytest.raises(DecodeError, match="this copy fails"):
        run(engine, prompt, N_TOKENS, capture="logits")
    device.set(has_row_kernels=True)
    check_equal(run(engine, prompt, N_TOKENS, capture="logits"), want)


@pytest.mark.parametrize("device_rows", ["auto", "in graph", "beside"])
def test_rows_are_beside_the_step_unless_they_are_to_be_in_its_graph(
    make_engine: MakeEngine, tiny_llama: Path, device_rows: Any
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1, flash_attn=True, device_rows=device_rows)
    run(engine, random_ids(N_PROMPT), N_TOKENS, capture="logits")
    assert (kernel_rows(engine) > 0) == (device_rows != "in graph")


def test_without_a_kernel_auto_is_beside_on_cuda_alone(
    make_engine: MakeEngine, tiny_llama: Path, device: Any
) -> None:
    for is_cuda in (True, False):
        device.set(poses_as_cuda=is_cuda)
        engine = make_engine(tiny_llama, n_gpu_layers=-1, flash_attn=True)
        before = device.counts()["n_graphs_beside"]
        run(engine, random_ids(N_PROMPT), N_TOKENS, capture="logits")
        assert (device.counts()["n_graphs_beside"] > before) == is_cuda
        assert kernel_rows(engine) == 0


def test_biases_of_an_edit_are_in_the_rows(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engines = both(make_engine, tiny_llama, flash_attn=True)
    edits = [Edit.attention_bias([(2, 6)], 1.5)]
    theirs, ours = (
        run(e, random_ids(N_PROMPT), N_TOKENS, capture="probs", edits=edits) for e in engines
    )
    check_equal(ours, theirs, 1e-3)
    plain = run(engines[1], random_ids(N_PROMPT), N_TOKENS, capture="probs")
    assert np.abs(np.asarray(plain[1].rows) - np.asarray(ours[1].rows)).max() > 1e-3
