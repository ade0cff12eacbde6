"""Kinds of attention that few models have, with their layers on a device: rows are the CPU's, or
are refused in words, whichever way they are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kqview import Capture
from kqview.errors import UnsupportedModel
from tests.support.rows import KINDS, Kind, both, check_equal, random_ids, run

if TYPE_CHECKING:
    from pathlib import Path

    from kqview import Engine
    from kqview.engine_options import DeviceRows
    from tests.engine.conftest import MakeEngine

N_PROMPT, N_TOKENS = 20, 6
ALIBI, SPARSE = "has ALiBi, only probs can be captured", "sparse attention of layer"
# Of llama.cpp's own tiny models, and what refuses logits or scores of theirs, and probs.
MODELS = {
    "mpt-dense": (ALIBI, ""),
    "bloom-dense": (ALIBI, ""),
    "gpt2-dense": ("", ""),  # q, k and v from one product
    "falcon-dense": ("", ""),
    "gpt-oss-moe": ("", ""),  # sinks, windows
    "gemma2-dense": ("", ""),  # softcap, windows
    "deepseek2-moe": ("", ""),  # latent keys
    "qwen3next-moe": ("", ""),  # recurrent layers
    "deepseek32-moe": (SPARSE, SPARSE),  # a mask of the graph
    "glm-dsa-moe": (SPARSE, SPARSE),
    "minimax-m3-moe": (SPARSE, SPARSE),  # gathered keys
}


# Rows of these are computed beside a step, with so many nodes a layer in its graph that save q.
NODES_BESIDE = {"gpt2-dense": 1, "falcon-dense": 0, "deepseek2-moe": 0, "qwen3next-moe": 0}


def prompt_of(engine: Engine) -> list[int]:
    return [one % engine.model.n_vocab for one in random_ids(N_PROMPT)]


@pytest.mark.parametrize("kind", KINDS)
def test_latent_attention_without_flash_attention(
    make_engine: MakeEngine, architectures: dict[str, Path], kind: Kind
) -> None:
    # The product of one query has strides that some of ggml's operations abort on.
    engines = both(make_engine, architectures["deepseek2-moe"], n_ctx=256)
    prompt = prompt_of(engines[0])
    theirs, ours = (run(e, prompt, N_TOKENS, capture=kind) for e in engines)
    check_equal(ours, theirs)


@pytest.mark.parametrize("device_rows", ["in graph", "beside"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_the_cpu_or_refused(
    make_engine: MakeEngine,
    architectures: dict[str, Path],
    device: Any,
    name: str,
    device_rows: DeviceRows,
) -> None:
    cpu, gpu = both(
        make_engine, architectures[name], flash_attn=True, device_rows=device_rows, n_ctx=256
    )
    prompt = prompt_of(cpu)

    def compare(kind: Kind) -> None:
        want = run(cpu, prompt, N_TOKENS, capture=Capture(kind))
        n_before = device.counts()["n_graphs_beside"]
        check_equal(run(gpu, prompt, N_TOKENS, capture=Capture(kind)), want, 1e-3)
        is_beside = device.counts()["n_graphs_beside"] > n_before
        assert is_beside == (device_rows == "beside" and name in NODES_BESIDE)
        n_nodes = gpu.stats().graph_nodes_added
        if is_beside:
            assert n_nodes == NODES_BESIDE[name] * gpu.model.n_layer
        else:
            assert n_nodes > 0

    for kind in KINDS:
        refusal = MODELS[name][kind == "probs"]
        if refusal:
            with pytest.raises(UnsupportedModel, match=refusal):
                compare(kind)
        else:
            compare(kind)
