"""A token's rows: reduced to what a request asked for, and written as bytes."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview.errors import InvalidCapture
from kqview.server.api.wire.attention import DATA_HERE, RowWriter, dense, event_pieces, joined_text
from kqview.server.models.run import AttentionWanted

if TYPE_CHECKING:
    from kqview import Engine

RNG = np.random.default_rng(5)
N_LAYERS, N_HEADS, N_CONTEXT = 3, 4, 17


def softmaxed(*shape: int) -> np.ndarray[Any, Any]:
    values = np.exp(RNG.normal(size=shape))
    return (values / values.sum(axis=-1, keepdims=True)).astype(np.float32)


FULL = softmaxed(N_LAYERS, N_HEADS, N_CONTEXT)
UNEVEN = tuple(softmaxed(n, N_CONTEXT) for n in (4, 2, 1))


def last_row(engine: Engine, wanted: AttentionWanted) -> Any:
    """Rows of the third token as the engine captures them for *wanted*."""
    capture = wanted.capture(engine.model)
    options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    return list(engine.generate("Tom has a", max_tokens=3, capture=capture, **options))[
        -1
    ].attention


def written(wanted: AttentionWanted, rows: Any) -> Any:
    """The attention object of *rows*."""
    writer = RowWriter(wanted, None, N_LAYERS, N_HEADS, has_sinks=False)
    return writer.write(rows, lambda n_bytes: None)[0]


def test_per_layer_is_the_view_itself():
    values, heads_by_layer = dense(AttentionWanted(), FULL)
    assert values is FULL
    assert heads_by_layer is None


def test_per_layer_of_layers_that_differ_in_heads_is_one_behind_the_other():
    values, heads_by_layer = dense(AttentionWanted(), UNEVEN)
    assert heads_by_layer == (4, 2, 1)
    np.testing.assert_array_equal(values, np.concatenate(UNEVEN)[None])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["logits", "scores", "probs"])
def test_aggregates_of_the_engine_are_those_of_its_full_rows(engine: Engine, kind: Any, dtype: Any):
    full = np.asarray(last_row(engine, AttentionWanted(kind)), np.float64)
    weights = np.float64([1, 0, 2, 5])
    expected = {
        "mean": full.mean(axis=(0, 1)),
        "max": full.max(axis=(0, 1)),
        "last_layer": full[-1].mean(axis=0),
        "weighted_layers": np.tensordot(weights / 8, full.mean(axis=1), axes=1),
    }
    for aggregation, values in expected.items():
        wanted = AttentionWanted(
            kind, "aggregated", aggregation=aggregation, dtype=dtype, layer_weights=(1, 0, 2, 5)
        )  # type: ignore[arg-type]
        out, _ = dense(wanted, last_row(engine, wanted))
        assert out.dtype == dtype
        assert out.flags.c_contiguous
        tolerance = 1e-5 if dtype == "float32" else 2e-3
        np.testing.assert_allclose(out, values, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", ["per_layer", "aggregated"])
def test_spans_are_sums_of_the_values_sent_without_them(engine: Engine, form: Any):
    spans = ((0, 2), (1, None))
    wanted = AttentionWanted(format=form)
    whole, _ = dense(wanted, last_row(engine, wanted))
    wanted = AttentionWanted(format=form, spans=spans)
    out, _ = dense(wanted, last_row(engine, wanted))
    values = whole.astype(np.float64)
    sums = np.stack([values[..., slice(*span)].sum(-1) for span in spans], -1)
    np.testing.assert_allclose(out, sums, rtol=1e-5)


@pytest.mark.parametrize("form", ["sparse", "viz"])
def test_spans_of_a_format_that_needs_whole_rows_are_refused(engine: Engine, form: Any):
    with pytest.raises(InvalidCapture, match=f"as {form}") as caught:
        AttentionWanted(format=form, spans=((0, 2),)).capture(engine.model)
    assert caught.value.parameter == "spans"


def test_late_layers_weigh_more_where_nothing_is_said(engine: Engine):
    full = np.asarray(last_row(engine, AttentionWanted()), np.float64)
    wanted = AttentionWanted(format="aggregated", aggregation="weighted_layers")
    out, _ = dense(wanted, last_row(engine, wanted))
    expected = np.tensordot(np.float64([1, 2, 3, 4]) / 10, full.mean(axis=1), axes=1)
    np.testing.assert_allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize("weights", [(1.0,), (0, 0, 0, 0), (1, 1, 1, float("nan")), (-1, 0, 0, 0)])
def test_weights_that_do_not_fit_are_refused(engine: Engine, weights: tuple[float, ...]):
    wanted = AttentionWanted(
        format="aggregated", aggregation="weighted_layers", layer_weights=weights
    )
    with pytest.raises(InvalidCapture, match="layer_weights"):
        wanted.capture(engine.model)


@pytest.mark.parametrize("top_k", [1, 5, N_CONTEXT, 1000])
def test_sparse_has_the_largest_positions_in_order(top_k: int):
    by_layer = FULL.mean(axis=1)
    out = written(AttentionWanted(format="sparse", top_k=top_k), by_layer)
    mean = by_layer.mean(axis=0)
    expected = sorted(range(N_CONTEXT), key=lambda i: (-mean[i], i))[:top_k]
    assert [one["position"] for one in out.data] == expected
    weights = [one["layers"] for one in out.data]
    np.testing.assert_array_equal(np.float32(weights), by_layer[:, expected].T)
    assert (out.context_length, out.top_k) == (N_CONTEXT, len(expected))


def test_sparse_of_the_engine_is_that_of_its_full_rows(engine: Engine):
    full = np.asarray(last_row(engine, AttentionWanted()), np.float64)
    wanted = AttentionWanted(format="sparse", top_k=3)
    out = written(wanted, last_row(engine, wanted))
    expected = np.argsort(-full.mean(axis=(0, 1)), kind="stable")[:3]
    assert [one["position"] for one in out.data] == expected.tolist()
    weights = [one["layers"] for one in out.data]
    np.testing.assert_allclose(weights, full.mean(axis=1)[:, expected].T, atol=1e-6)


@pytest.mark.parametrize("rows", [FULL, UNEVEN], ids=["even", "uneven"])
def test_figures_for_a_display(rows: Any):
    out = written(AttentionWanted(format="viz"), rows)
    layers = [np.asarray(layer, np.float64) for layer in rows]
    np.testing.assert_allclose(out.mean_by_layer, [layer.mean() for layer in layers], rtol=1e-5)
    np.testing.assert_allclose(out.max_by_layer, [layer.max() for layer in layers], rtol=1e-6)
    mean = np.mean([layer.mean(axis=0) for layer in layers], axis=0)
    mean /= mean.sum()
    assert out.entropy == pytest.approx(-(mean * np.log(mean)).sum(), rel=1e-5)


def test_entropy_of_values_that_are_no_probabilities_is_that_of_their_softmax():
    logits = (RNG.normal(size=(N_LAYERS, N_HEADS, N_CONTEXT)) * 100).astype(np.float32)
    out = written(AttentionWanted("logits", "viz"), logits)
    mean = logits.astype(np.float64).mean(axis=(0, 1))
    p = np.exp(mean - mean.max())
    p /= p.sum()
    assert out.entropy == pytest.approx(-(p * np.log(p)).sum(), rel=1e-4)


def test_rows_of_a_prompt_have_no_sparse_or_display_format(engine: Engine):
    for name in ("sparse", "viz"):
        with pytest.raises(InvalidCapture, match=name):
            AttentionWanted(format=name, prompt=True).capture(engine.model)


# ---- Rows as bytes: exactly the values, copied once, and counted


ROWS = [
    np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    np.arange(24, dtype=np.float16).reshape(2, 3, 4),
    np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::3],  # not contiguous
    np.zeros((2, 0), np.float32),
    np.float32([np.nan, np.inf, -0.0, 1e-45]),
]


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: f"{rows.dtype}{list(rows.shape)}")
def test_bytes_are_the_values_and_each_copy_is_counted(rows: np.ndarray[Any, Any]):
    rows.flags.writeable = False
    counted: list[int] = []
    expected = rows.astype(rows.dtype.newbyteorder("<")).tobytes(order="C")
    writer = RowWriter(AttentionWanted(dtype=rows.dtype.name), None, 0, 0, has_sinks=False)
    _, raw = writer.write(rows, counted.append, data="binary")
    _, text = writer.write(rows, counted.append)
    assert raw == expected
    assert base64.b64decode(text or b"", validate=True) == expected
    assert counted == [rows.nbytes] * 2


@pytest.mark.parametrize("text", ["", "plain", '"\\\u0000\n', "é🙂", '"\u0000"'])
def test_pieces_of_json_are_the_json(text: str):
    data = base64.b64encode(bytes(range(256)))
    pieces = event_pieces({"text": text, "data": DATA_HERE, "after": [text, 1]}, data)
    expected = {"text": text, "data": data.decode(), "after": [text, 1]}
    assert json.loads(b"".join(pieces)) == expected
    assert json.loads(joined_text(pieces)) == expected
    assert pieces[1] is data
