"""SAELens reads hidden states of kqview: the recipe of the page, as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sae_lens", reason="needs sae-lens; python -m tests.clients --only sae-lens")

PAGE = Path(__file__).parents[2] / "src" / "kqview" / "viz" / "README.md"
RECIPES = re.findall(r"^```python not-run\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)


def test_features_are_those_of_the_hidden_states():
    (recipe,) = [one for one in RECIPES if "sae_lens" in one]
    names: dict[str, Any] = {}
    exec(compile(recipe, "sae_lens", "exec"), names)
    hidden, features = names["hidden"], names["features"]
    assert features.shape == (len(hidden), 512)
    sae = names["sae"]
    weights, bias = sae.W_enc.detach().numpy(), sae.b_enc.detach().numpy()
    centred = hidden - sae.b_dec.detach().numpy()
    want = np.maximum(centred @ weights + bias, 0)
    np.testing.assert_allclose(features.detach().numpy(), want, atol=1e-4)
