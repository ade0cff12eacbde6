"""Token in the forms of other libraries: Hugging Face, TransformerLens, DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kqview import Capture, Token, errors

ROWS = np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5)
ROWS.flags.writeable = False


def token(capture: Capture | None, attention: Any = ROWS, **fields: Any) -> Token:
    return Token(1, "a", 0, attention=attention, capture=capture, **fields)


def test_hf_form_is_a_view_a_layer():
    layers = token(Capture("probs", layers=(4, 7))).to_hf()
    assert [layer.shape for layer in layers] == [(1, 3, 1, 5)] * 2
    for i, layer in enumerate(layers):
        np.testing.assert_array_equal(layer[0, :, 0], ROWS[i])
        assert np.shares_memory(layer, ROWS)


def test_hf_form_of_layers_that_differ_in_heads():
    layers = token(Capture("probs", layers=(0, 1)), (ROWS[0], ROWS[1, :2])).to_hf()
    assert [layer.shape for layer in layers] == [(1, 3, 1, 5), (1, 2, 1, 5)]


@pytest.mark.parametrize(
    ("kind", "name"), [("probs", "hook_pattern"), ("scores", "hook_attn_scores")]
)
def test_names_are_those_of_transformer_lens(kind: Any, name: str):
    named = token(Capture(kind, layers=(4, 7))).named()
    assert list(named) == [f"blocks.4.attn.{name}", f"blocks.7.attn.{name}"]
    np.testing.assert_array_equal(named[f"blocks.7.attn.{name}"][0, :, 0], ROWS[1])


def test_raw_products_have_no_name():
    with pytest.raises(errors.InvalidCapture, match="no name for kind 'logits'"):
        token(Capture("logits", layers=(4, 7))).named()


def test_hidden_states_have_a_name():
    states = np.ones((1, 8), np.float32)
    named = token(Capture(layers=(), hidden=(3,)), None, hidden=states).named()
    assert list(named) == ["blocks.3.hook_resid_post"]
    assert named["blocks.3.hook_resid_post"].shape == (1, 1, 8)


@pytest.mark.parametrize("capture", [Capture(reduce="mean_heads"), Capture(top_k=2)])
@pytest.mark.parametrize("form", ["to_hf", "named"])
def test_reduced_rows_are_refused(capture: Capture, form: str):
    with pytest.raises(errors.InvalidCapture, match="rows of single heads"):
        getattr(token(capture), form)()


@pytest.mark.parametrize("form", ["to_hf", "named"])
def test_without_capture_there_is_nothing(form: str):
    with pytest.raises(errors.InvalidCapture, match="pass capture="):
        getattr(token(None, None), form)()


def test_dlpack_shares_memory():
    shared = np.from_dlpack(ROWS)
    assert shared.__array_interface__["data"][0] == ROWS.__array_interface__["data"][0]


def test_torch_shares_memory():
    torch = pytest.importorskip("torch")
    tensor = torch.from_dlpack(ROWS)
    assert tensor.data_ptr() == ROWS.__array_interface__["data"][0]
    assert tuple(tensor.shape) == ROWS.shape
