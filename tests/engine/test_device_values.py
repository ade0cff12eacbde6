"""Attention of layers on the devices of this build equals that of the same layers on the host.

On a machine without a device both are the host's, and then equal to the last bit: the test runs
everywhere, so that it does not meet a device for the first time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Engine
from tests.support.devices import has_device

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.usefixtures("backend")
N_PROMPT, N_TOKENS = 40, 8
# Another order of sums on both sides, and with flash attention keys of float16.
TOLERANCE = 2e-3


def relative_errors(got: NDArray[Any], expected: NDArray[Any]) -> NDArray[Any]:
    """max|got - expected| / max|expected| of each row; what no query sees must agree exactly."""
    seen = np.isfinite(expected)
    assert (np.isfinite(got) == seen).all()
    got, expected = np.where(seen, got, 0), np.where(seen, expected, 0)
    largest = np.abs(expected).max(axis=-1)
    return np.abs(got - expected).max(axis=-1) / np.maximum(largest, 1e-30)


@pytest.fixture(params=["flash", "plain"])
def engines(request: pytest.FixtureRequest, tiny_qwen2: Path) -> Iterator[tuple[Engine, Engine]]:
    """One engine with all layers on devices, one with none."""
    options: dict[str, Any] = {
        "n_ctx": 256, "n_threads": 1, "flash_attn": request.param == "flash"
    }  # fmt: skip
    with (
        Engine(tiny_qwen2, n_gpu_layers=-1, **options) as device,
        Engine(tiny_qwen2, n_gpu_layers=0, **options) as host,
    ):
        yield device, host


@pytest.fixture
def prompt() -> list[int]:
    return np.random.default_rng(3).integers(0, 256, N_PROMPT).tolist()


@pytest.mark.parametrize("kind", ["logits", "scores", "probs"])
def test_rows_of_a_prompt_on_a_device_are_those_of_the_host(
    engines: tuple[Engine, Engine], prompt: list[int], kind: str
) -> None:
    device, host = (engine.attend(prompt, kind).array() for engine in engines)
    assert device.shape == host.shape
    assert relative_errors(device, host).max() <= (TOLERANCE if has_device() else 0)


@pytest.mark.parametrize(
    "capture",
    [
        Capture("logits"),
        Capture("scores"),
        Capture("probs"),
        Capture("logits", dtype="float16"),
        Capture("logits", layers=(2, 0), heads=(3,)),
        Capture("probs", reduce="mean_heads"),
        Capture("probs", reduce="max"),
        Capture("scores", reduce="max"),
        Capture("logits", reduce="mean"),
        Capture("scores", reduce="max_heads", dtype="float16"),
        Capture("logits", heads=(3, 0), reduce="mean_heads"),
        Capture("logits", heads=(3, 0), reduce="max_heads"),
    ],
    ids=lambda capture: f"{capture.kind}-{capture.dtype}-{capture.reduce}-{capture.heads}",
)
def test_rows_of_generated_tokens_on_a_device_are_those_of_the_host(
    engines: tuple[Engine, Engine], prompt: list[int], capture: Capture
) -> None:
    runs = [
        list(engine.generate(prompt, max_tokens=N_TOKENS, temperature=0, capture=capture))
        for engine in engines
    ]
    tolerance = TOLERANCE if has_device() else 0
    n_compared = 0
    for device, host in zip(*runs, strict=True):
        assert device.attention is not None
        assert host.attention is not None
        assert device.attention.shape == host.attention.shape
        got, expected = (np.asarray(t.attention, np.float64) for t in (device, host))
        rounding = 2e-3 if capture.dtype == "float16" and has_device() else 0
        assert relative_errors(got, expected).max() <= tolerance + rounding
        n_compared += 1
        if device.id != host.id:  # logits were nearly equal: from here on the texts differ
            break
    assert n_compared >= 2
