"""Rows of the kobold dialect's SSE stream are the engine's, in every format that there is."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture
from kqview.server import Settings
from tests.support.kobold import PATH, TEXT, rows, stream, typed

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from tests.support.serving import Serve, Served


@pytest.fixture(scope="module")
def client(demo: Served) -> Iterator[httpx.Client]:
    with demo.client() as client:
        yield client


def fresh(demo: Served, **options: Any) -> list[Any]:
    """The engine's own tokens, its slots empty as for the stream that is compared."""
    for slot in demo.engine.slots:
        slot.clear()
    tokens = list(demo.engine.generate(TEXT, max_tokens=4, temperature=0, **options))
    for slot in demo.engine.slots:
        slot.clear()
    return tokens


@pytest.mark.parametrize("values", [None, "logits", "scores", "probs"])
def test_rows_are_the_engines_bit_for_bit(demo: Served, client: httpx.Client, values: str | None):
    own = fresh(demo, capture=values or "logits")
    tokens, _ = typed(
        client, prompt=TEXT, max_length=4, output_attentions=True, attention_values=values
    )
    n_prompt = len(demo.engine.tokenize(TEXT, add_special=True))
    for i, (event, token) in enumerate(zip(tokens, own, strict=True)):
        attention = event["attention"]
        assert attention["format"] == "per_layer"
        assert attention["shape"] == [4, 8, n_prompt + i]
        assert attention["context_length"] == n_prompt + i
        assert attention["dtype"] == "float32"
        assert rows(event).tobytes() == token.attention.tobytes()


def test_rows_in_float16_are_the_engines(demo: Served, client: httpx.Client):
    own = fresh(demo, capture=Capture("probs", dtype="float16"))
    tokens, _ = typed(
        client, prompt=TEXT, max_length=4, output_attentions=True, attention_values="probs",
        dtype="float16",
    )  # fmt: skip
    for event, token in zip(tokens, own, strict=True):
        assert event["attention"]["dtype"] == "float16"
        assert rows(event).tobytes() == token.attention.tobytes()


@pytest.mark.parametrize(("mode", "reduce"), [(None, "mean"), ("mean", "mean"), ("max", "max")])
def test_aggregated_rows_are_the_engines(
    demo: Served, client: httpx.Client, mode: str | None, reduce: Any
):
    own = fresh(demo, capture=Capture("probs", reduce=reduce))
    tokens, _ = typed(
        client, prompt=TEXT, max_length=4, output_attentions=True, attention_values="probs",
        attention_format="aggregated", aggregation_mode=mode,
    )  # fmt: skip
    for event, token in zip(tokens, own, strict=True):
        attention = event["attention"]
        assert (attention["format"], attention["dtype"]) == ("aggregated", "float32")
        assert attention["shape"] == [attention["context_length"]]
        assert rows(event).tobytes() == token.attention.tobytes()


def test_aggregated_last_layer_and_weights_are_computed_from_all_rows(
    demo: Served, client: httpx.Client
):
    own = fresh(demo, capture="probs")
    asked = {"prompt": TEXT, "max_length": 4, "output_attentions": True}
    asked |= {"attention_values": "probs", "attention_format": "aggregated"}
    last, _ = typed(client, **asked, aggregation_mode="last_layer")
    weights = [1.0, 0.0, 2.0, 1.0]
    fresh(demo)
    some, _ = typed(client, **asked, aggregation_mode="weighted_layers", layer_weights=weights)
    for token, one, other in zip(own, last, some, strict=True):
        heads = token.attention.astype(np.float64).mean(axis=1)
        np.testing.assert_allclose(rows(one), heads[-1], atol=1e-6)
        np.testing.assert_allclose(rows(other), np.average(heads, 0, weights), atol=1e-6)


def test_chosen_layers_and_heads_are_named(demo: Served, client: httpx.Client):
    own = fresh(demo, capture=Capture("probs", layers=(3, 1), heads=(5,)))
    tokens, _ = typed(
        client, prompt=TEXT, max_length=4, output_attentions=True, attention_values="probs",
        attention_layers=[3, 1], attention_heads=[5],
    )  # fmt: skip
    assert tokens[0]["attention"]["layers"] == [3, 1]
    assert [rows(event).tobytes() for event in tokens] == [t.attention.tobytes() for t in own]


def test_sparse_rows_are_the_largest_means(demo: Served, client: httpx.Client):
    own = fresh(demo, capture="probs")
    tokens, _ = typed(
        client, prompt=TEXT, max_length=4, output_attentions=True, attention_values="probs",
        attention_format="sparse", sparse_top_k=3,
    )  # fmt: skip
    for event, token in zip(tokens, own, strict=True):
        heads = token.attention.mean(axis=1)
        assert event["attention"]["top_k"] == 3
        best = np.sort(heads.mean(axis=0))[::-1][:3]
        found = event["attention"]["data"]
        np.testing.assert_allclose([np.mean(one["layers"]) for one in found], best, atol=1e-6)
        for one in found:
            np.testing.assert_allclose(one["layers"], heads[:, one["position"]], atol=1e-6)


def test_viz_figures_are_those_of_the_rows(demo: Served, client: httpx.Client):
    own = fresh(demo, capture="probs")
    tokens, _ = typed(
        client, prompt=TEXT, max_length=4, output_attentions=True, attention_values="probs",
        attention_format="viz",
    )  # fmt: skip
    for event, token in zip(tokens, own, strict=True):
        viz, values = event["attention"], token.attention.astype(np.float64)
        np.testing.assert_allclose(viz["mean_by_layer"], values.mean(axis=(1, 2)), rtol=1e-5)
        np.testing.assert_allclose(viz["max_by_layer"], values.max(axis=(1, 2)), rtol=1e-6)
        mean = values.mean(axis=(0, 1))
        mean = mean[mean > 0] / mean.sum()
        assert viz["entropy"] == pytest.approx(-(mean * np.log(mean)).sum(), rel=1e-4)


def test_rows_of_the_prompt_come_first(demo: Served, client: httpx.Client):
    for slot in demo.engine.slots:
        slot.clear()
    own = demo.engine.attend(TEXT, "probs").array()
    for slot in demo.engine.slots:
        slot.clear()
    events = stream(
        client, prompt=TEXT, max_length=2, output_attentions=True, attention_values="probs",
        prompt_attention=True,
    )  # fmt: skip
    kinds = [event["type"] for event in events]
    blocks = list(itertools.takewhile(lambda event: event["type"] == "prompt_attention", events))
    assert kinds == ["prompt_attention"] * len(blocks) + ["token", "token", "done"]
    assert blocks[0]["start"] == 0
    joined = np.concatenate([rows(block) for block in blocks], axis=2)
    np.testing.assert_array_equal(joined, own)


def test_first_rows_are_not_equal_between_layers_or_tokens(client: httpx.Client):
    tokens, _ = typed(
        client, prompt=TEXT, max_length=3, output_attentions=True, attention_values="probs"
    )
    first, second = rows(tokens[0]), rows(tokens[1])
    np.testing.assert_allclose(first.sum(axis=-1), 1, atol=1e-4)
    assert len({layer.tobytes() for layer in first}) == 4
    assert not np.allclose(first, second[:, :, :-1])


def test_values_and_format_of_the_settings_are_the_default(serve: Serve):
    served = serve(Settings(attention_values="probs", attention_format="aggregated"))
    with served.client() as client:
        tokens, _ = typed(client, prompt=TEXT, max_length=2, output_attentions=True)
        assert tokens[0]["attention"]["format"] == "aggregated"
        np.testing.assert_allclose(rows(tokens[0]).sum(), 1, atol=1e-4)
        query = f"{PATH}?attention_format=per_layer"
        body = {"prompt": TEXT, "max_length": 1, "output_attentions": True}
        assert '"per_layer"' in client.post(query, json=body).text
