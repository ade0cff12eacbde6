"""Kinds of attention that few models have, with their layers on a device: rows are the CPU's, or
are refused in words, whichever way they are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kqview import Capture
from kqview.errors import UnsupportedModel
from tests.support.rows import KINDS, Kind, both, check_equal, random_ids, run

if TYPE_CHECKING:
    from pathlib import Path

    from kqview.engine_options import DeviceRows
    from tests.engine.conftest import MakeEngine

pytestmark = pytest.mark.peers
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


@pytest.mark.parametrize("device_rows", ["in graph", "beside"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_the_cpu_or_refused(
    make_engine: MakeEngine, architectures: dict[str, Path], name: str, device_rows: DeviceRows
) -> None:
    cpu, gpu = both(
        make_engine, architectures[name], flash_attn=True, device_rows=device_rows, n_ctx=256
    )
    prompt = random_ids(N_PROMPT)
    n_vocab = cpu.model.n_vocab
    prompt = [one % n_vocab for one in prompt]

    def compare(kind: Kind) -> None:
        want = run(cpu, prompt, N_TOKENS, capture=Capture(kind))
        check_equal(run(gpu, prompt, N_TOKENS, capture=Capture(kind)), want, 1e-3)

    for kind in KINDS:
        refusal = MODELS[name][kind == "probs"]
        if refusal:
            with pytest.raises(UnsupportedModel, match=refusal):
                compare(kind)
        else:
            compare(kind)
