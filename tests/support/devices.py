"""Two engines of one model, on the CPU and on the devices there are, and whether they agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kqview import system_info

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kqview import Engine
    from kqview.types import Token
    from tests.engine.conftest import MakeEngine

CLOSE = 2e-5  # the same product, summed in another order


def has_device() -> bool:
    """Can engines have layers anywhere but on the CPU? Devices round in another way."""
    return any(device["type"] in ("GPU", "IGPU") for device in system_info()["devices"])


def both(make_engine: MakeEngine, model: Path, **options: Any) -> tuple[Engine, Engine]:
    """An engine on the CPU and one whose layers are all on devices."""
    options = {"kv_type": "f32", "flash_attn": False, **options}
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
