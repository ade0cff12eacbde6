"""The context of a slot when none is asked for, where a device holds the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kqview import Engine
from kqview.engine import check_opening
from tests.support.tiny_gguf import write_model

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

MIB = 2**20


def test_default_context_fits_on_the_devices(
    tmp_path: Path, device: Any, caplog: pytest.LogCaptureFixture
):
    model = write_model(tmp_path / "long.gguf", n_ctx_train=2**20)
    device.set(memory_bytes=device.counts()["used_bytes"] + 200 * MIB)
    # The last layer and the output: on one device, as both take from the same memory.
    estimated = check_opening(model, n_gpu_layers=2)
    with Engine(model, n_threads=1, n_gpu_layers=2) as engine:
        n_ctx = engine.n_ctx
        assert len(list(engine.generate(list(range(65, 80)), max_tokens=3))) == 3
    assert 4096 < n_ctx < 2**20
    needs = check_opening(model, n_ctx=n_ctx, n_gpu_layers=2)
    assert [one.needed_bytes for one in needs] == [one.needed_bytes for one in estimated]
    (said,) = (r.getMessage() for r in caplog.records if r.name == "kqview.engine")
    assert "on the FAKE" in said
