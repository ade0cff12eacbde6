"""Halo Weave's client, ported, against a real server: what its users do works, step by step."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kqview.server import Settings
from kqview.server.errors import TimedOut
from kqview.server.models.run import Run
from tests.support import halo_weave
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from kqview.server.models.run import Step
    from tests.support.serving import Serve, Served

TURN = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """As its users start it: kqview serve --demo --attention-values probs."""
    with serving(Settings(attention_values="probs")) as one:
        yield one


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client(headers={"origin": "http://localhost:8080"}) as client:
        yield client


def test_turn_is_tokenized_generated_and_scored(served: Served, client: httpx.Client):
    tokens = halo_weave.tokenize(client, TURN)
    assert "".join(token["text"] for token in tokens) == TURN
    ids = [token["token_id"] for token in tokens]
    heard = halo_weave.generate_stream(client, ids, max_new_tokens=40)
    assert heard.error is None
    assert heard.n_dropped == 0
    assert heard.done is not None
    assert heard.done["total_tokens"] == len(heard.tokens)
    assert served.engine.detokenize(heard.ids) == heard.text
    for i, (_, _, rows) in enumerate(heard.tokens):
        assert rows is not None
        assert rows.shape == (4, 8, len(ids) + i)
        np.testing.assert_allclose(rows.sum(axis=-1), 1, atol=1e-4)
        # Its tokens, and the one just added: below or at 0 nothing would be scored.
        assert halo_weave.threshold(rows, len(ids) + i + 1) > 0


def test_next_turn_begins_as_soon_as_done_is_heard(served: Served, client: httpx.Client):
    ids = [token["token_id"] for token in halo_weave.tokenize(client, TURN)]
    for turn in range(3):
        heard = halo_weave.generate_stream(client, ids, max_new_tokens=8, request_id="same")
        assert heard.error is None, turn
        ids += heard.ids
        ids += [one["token_id"] for one in halo_weave.tokenize(client, "<|im_end|>\n")]


def test_stream_without_attention_still_brings_tokens(client: httpx.Client):
    ids = [token["token_id"] for token in halo_weave.tokenize(client, TURN)]
    heard = halo_weave.generate_stream(client, ids, max_new_tokens=8, return_attention=False)
    assert len(heard.tokens) == 8 or heard.done["finish_reason"] == "stop"
    assert all(rows is None for _, _, rows in heard.tokens)
    assert heard.text


def test_aggregated_rows_are_one_row_to_it(serve: Serve):
    served = serve(Settings(attention_values="probs", attention_format="aggregated"))
    with served.client() as client:
        heard = halo_weave.generate_stream(client, served.engine.tokenize(TURN, add_special=False))
    assert heard.n_dropped == 0
    assert {rows.shape[:2] for _, _, rows in heard.tokens if rows is not None} == {(1, 1)}


def test_prompt_that_is_too_long_reaches_its_error_callback(client: httpx.Client):
    heard = halo_weave.generate_stream(client, [5] * 600)
    assert heard.error == "Generation failed: Bad Request"
    assert heard.tokens == []


def test_failure_in_the_middle_is_not_taken_for_the_end(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    served = serve(Settings(attention_values="probs"))
    ids = served.engine.tokenize(TURN, add_special=False)
    next_step = Run.__anext__

    async def next_or_end(run: Run) -> Step:
        if run.n_tokens == 3:
            run.end(TimedOut("run.end: it took too long"))
        return await next_step(run)

    monkeypatch.setattr(Run, "__anext__", next_or_end)
    with served.client() as client:
        heard = halo_weave.generate_stream(
            client, ids, max_new_tokens=50, ban_eos_token=True, sampler_seed=3
        )
    assert len(heard.tokens) == 3
    assert heard.done is None
    assert heard.error is not None


def test_four_pages_at_a_time_are_all_served(serve: Serve):
    served = serve(Settings(n_slots=2, attention_values="probs"))
    ids = served.engine.tokenize(TURN, add_special=False)
    heard: list[halo_weave.Heard] = []

    def page(i: int) -> None:
        with served.client() as client:
            heard.append(
                halo_weave.generate_stream(client, ids, max_new_tokens=20, request_id=f"page-{i}")
            )

    threads = [threading.Thread(target=page, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.error for one in heard] == [None] * 4
    assert all(one.tokens and one.n_dropped == 0 for one in heard)


# ---- the port itself


def test_port_loses_what_the_page_loses():
    chunks = [
        b': comment\nevent: message\ndata: {"type":"token","token":{"token_id":1,"text":"\xc3',
        b'\xa9"}}\r\n\ndata:{"type":"token","token":{"token_id":2,"text":"b"}}\n',
        b'data: {"type":"token","token":{"token_id":3}}\ndata: {"type":"error"}\n',
        b'data: {"type":"done"}',
    ]
    heard = halo_weave.hear(chunks)
    assert [(id_, text) for id_, text, _ in heard.tokens] == [(1, "é")]
    assert heard.n_dropped == 1
    assert heard.done == {"finish_reason": "complete"}
