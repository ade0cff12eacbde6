"""The names in llama.cpp's graph that the tap relies on are there.

They are no interface of llama.cpp: a new version may rename or fold them (`kqv_out-<il>`,
`kq_soft_max-<il>`), and then layers vanish from `attention_layers`. See vendor/README.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.rows import KINDS, Kind, random_ids, run

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import MakeEngine


@pytest.fixture(params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"tiny_{request.param}")


@pytest.mark.parametrize("flash_attn", [False, True, "auto"])
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_every_layer_is_found_with_its_heads_and_scale(
    make_engine: MakeEngine, model: Path, flash_attn: bool | str, kv_type: str
) -> None:
    found = make_engine(model, flash_attn=flash_attn, kv_type=kv_type).model
    assert found.attention_layers == (0, 1, 2)
    assert found.n_layer == 3
    assert (found.n_head, found.n_head_kv) == (4, 2)
    assert found.attention_scale == pytest.approx(16**-0.5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_capture_adds_one_node_a_layer(
    make_engine: MakeEngine, model: Path, kind: Kind, flash_attn: bool, n_tokens: int
) -> None:
    # One token: the prefill's graph. Three: the graph of a single token.
    engine = make_engine(model, flash_attn=flash_attn)
    run(engine, random_ids(9), n_tokens, capture=kind)
    assert engine.stats().graph_nodes_added == 3
