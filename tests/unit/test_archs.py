"""The check of many models survives a model that ends its process, and says which one it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import archs

WORKER = """\
#!{python}
import json, os, sys
from pathlib import Path
for path in sys.argv[5:]:
    name = Path(path).stem
    if name == "bad":
        print("GGML_ASSERT(false) failed", file=sys.stderr, flush=True)
        os.abort()
    print("not a report")
    errors = {{"probs on": {{"0": 0.5, "3": 0.25}}}}
    print(json.dumps({{"name": name, "errors": errors}}), flush=True)
"""


def test_model_that_ends_its_process_is_named_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "worker"
    worker.write_text(WORKER.format(python=sys.executable))
    worker.chmod(0o755)
    monkeypatch.setattr(archs.sys, "executable", str(worker))
    names = ["one", "bad", "two", "three"]
    checks = archs.Checks([Path(name) for name in names], n_workers=1)
    assert list(checks) == sorted(names)
    assert checks["three"].failure == checks["one"].failure == ""
    assert checks["two"].errors == {"probs on": {0: 0.5, 3: 0.25}}
    assert checks["two"].largest(flash_attn=True) == 0.5
    assert checks["two"].largest(flash_attn=True, first_layer=True) == 0.5
    assert checks["two"].largest(flash_attn=False) == 0
    assert "GGML_ASSERT(false) failed" in checks["bad"].failure
    assert "-6" in checks["bad"].failure
    with pytest.raises(KeyError):
        checks["none"]
    checks.close()
