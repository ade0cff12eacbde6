"""Edits of layers on devices: the same float64 reference, by nodes that every backend has.

On the devices of this machine, if it has any, and on fake ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Edit, errors
from kqview.edit import HeadRecord, SetHead
from tests.engine.conftest import FAKE_DEVICE
from tests.engine.test_edits import (
    ALL,
    CASES,
    LIMITS,
    N_EMBD,
    N_HEAD,
    PLAIN,
    error_of,
    model,
)
from tests.support.reference import relative_error
from tests.support.rows import has_device, near, random_ids, run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.conftest import MakeEngine

__all__ = ["model"]

pytestmark = pytest.mark.usefixtures("backend")
OF_ALL_HEADS = [name for name in CASES if name not in ("bias of layers", "bias of heads")]


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("name", OF_ALL_HEADS)
def test_layers_on_a_device_are_edited_by_its_own_nodes(
    make_engine: MakeEngine, model: Path, name: str, flash_attn: bool
) -> None:
    engine = make_engine(model, n_gpu_layers=-1, kv_type="f32", flash_attn=flash_attn)
    limit, case = near(LIMITS["llama.cpp"] if flash_attn else 2e-5), CASES[name]
    for n_prompt in (20, 100):
        tokens = run(engine, random_ids(n_prompt), 5, capture=ALL, edits=case.edits)
        assert error_of(model, random_ids(n_prompt), tokens, case) <= limit
        assert error_of(model, random_ids(n_prompt), tokens, PLAIN) > 2 * limit


def test_slots_on_a_device_have_edits_of_their_own(make_engine: MakeEngine, model: Path) -> None:
    engine = make_engine(model, n_gpu_layers=-1, n_slots=2, kv_type="f32", flash_attn=False)
    wanted = [(random_ids(12, seed=1), CASES["several"]), (random_ids(15, seed=2), CASES["add"])]
    running = [
        engine.generate(
            prompt, slot=i, max_tokens=6, temperature=1.0, seed=i, ignore_eos=True, capture=ALL,
            edits=case.edits,
        )
        for i, (prompt, case) in enumerate(wanted)
    ]  # fmt: skip
    for one, (prompt, case) in zip(running, wanted, strict=True):
        assert error_of(model, prompt, list(one), case) <= near(2e-5)


@pytest.mark.parametrize("flash_attn", [False, True])
def test_what_heads_give_out_is_replaced_on_a_device(
    make_engine: MakeEngine, model: Path, flash_attn: bool
) -> None:
    values = np.ones((9, N_EMBD // N_HEAD), np.float32)
    edits = [SetHead(1, 2, values, range(2, 9)), Edit.scale_heads({(1, 2): 3.0, (0, 0): 0.0})]
    options: dict[str, Any] = {
        "kv_type": "f32", "flash_attn": flash_attn, "attention_kernel": "llama.cpp",
    }  # fmt: skip
    found, want, plain = (
        run(make_engine(model, n_gpu_layers=n, **options), random_ids(9), 3, capture=ALL, edits=one)
        for n, one in ((-1, edits), (0, edits), (0, None))
    )
    limit = near(1e-2 if flash_attn else 2e-5)
    for ours, theirs in zip(found, want, strict=True):
        error = relative_error(np.asarray(ours.hidden), np.asarray(theirs.hidden))
        assert error <= limit
    assert relative_error(np.asarray(plain[0].hidden), np.asarray(want[0].hidden)) > 2 * limit


def test_edits_of_a_device_that_need_the_host_are_refused_by_name(
    make_engine: MakeEngine, model: Path
) -> None:
    if not has_device():
        pytest.skip("there is no device")
    engine = make_engine(model, n_gpu_layers=-1)
    for edit, what in (
        (CASES["bias of layers"].edits, "scores"),
        (CASES["bias of heads"].edits, "scores"),
        (HeadRecord([1]), "kept heads"),
        (Edit.hook(print, layers=[1]), "the output by a hook"),
        (Edit.hook(print, at="mlp_out", layers=[1]), "mlp_out by a hook"),
    ):
        with pytest.raises(errors.UnsupportedModel, match=f"edits: {what} of layer"):
            engine.generate(random_ids(20), edits=edit)


def test_layers_of_the_host_are_edited_there_though_products_of_a_prompt_are_not(
    make_engine: MakeEngine, model: Path, backend: str
) -> None:
    if backend == "fake":
        FAKE_DEVICE.set(offload_tokens=32)
    try:
        engine = make_engine(model, n_gpu_layers=1, kv_type="f32", flash_attn=False)
        for name in ("add", "set", "heads", "several"):
            prompt = random_ids(100)
            tokens = run(engine, prompt, 3, capture=ALL, edits=CASES[name].edits)
            assert error_of(model, prompt, tokens, CASES[name]) <= near(2e-5)
    finally:
        if backend == "fake":
            FAKE_DEVICE.set()
