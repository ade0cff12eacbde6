"""What the kobold dialect says of generations: the last one, and those that run; and ends them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kqview.server import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.serving import Serve

TEXT = "Mirelda found a silver key near the old bridge."


# ---- the last generation


def test_perf_is_of_the_last_generation(serve: Serve):
    served = serve()
    with served.client() as client:
        before = client.get("/api/extra/perf").json()
        assert (before["total_gens"], before["stop_reason"], before["idle"]) == (0, -1, 1)
        body = {"prompt": TEXT, "max_length": 5, "sampler_seed": 42, "ban_eos_token": True}
        client.post("/api/extra/generate/stream", json=body)
        after = client.get("/api/extra/perf").json()
    n_prompt = len(served.engine.tokenize(TEXT))
    assert (after["last_input_count"], after["last_token_count"]) == (n_prompt, 5)
    assert (after["total_gens"], after["stop_reason"], after["last_seed"]) == (1, 0, 42)
    assert after["last_process"] > 0
    assert after["last_eval_speed"] > 0
    assert after["uptime"] >= after["idletime"] >= 0


def test_perf_knows_a_generation_that_a_stop_sequence_ended(serve: Serve):
    served = serve()
    with served.client() as client:
        client.post(
            "/api/extra/generate/stream",
            json={"prompt": TEXT, "max_length": 100, "temperature": 0, "stop_sequence": ["e"]},
        )
        perf = client.get("/api/extra/perf").json()
    assert perf["stop_reason"] == 2
    assert perf["last_process"] > 0


def test_last_logprobs_are_of_the_last_generation(serve: Serve):
    with serve().client() as client:
        assert client.get("/api/extra/last_logprobs").json() == {"logprobs": None}
        body = {"prompt": TEXT, "max_length": 4, "logprobs": 3, "temperature": 0, "genkey": "K1"}
        text = "".join(plain_texts(client, body))
        assert client.get("/api/extra/last_logprobs").json() == {"logprobs": None}
        reply = client.post("/api/extra/last_logprobs", json={"genkey": "K1"}).json()
        assert client.get("/api/extra/last_logprobs?genkey=K1").json() == reply
    logprobs = reply["logprobs"]
    assert "".join(logprobs["tokens"]) == text
    assert len(logprobs["content"]) == len(logprobs["token_logprobs"]) == 4
    for one in logprobs["content"]:  # greedy: the best of the three is the one that was taken
        assert len(one["top_logprobs"]) == 3
        assert one["top_logprobs"][0]["token"] == one["token"]
        assert one["logprob"] == pytest.approx(one["top_logprobs"][0]["logprob"])


def plain_texts(client: httpx.Client, body: dict[str, Any]) -> list[str]:
    reply = client.post("/api/extra/generate/stream", json=body)
    reply.raise_for_status()
    data = [line[6:] for line in reply.text.split("\n") if line.startswith("data: ")]
    return [httpx.Response(200, content=one).json()["token"] for one in data]


# ---- a generation that runs


@pytest.fixture
def held(serve: Serve) -> Iterator[Any]:
    """Starts generations that wait for their client, who does not read on; with the server."""
    served = serve(Settings(n_slots=3))
    stack: list[Any] = []

    def hold(**body: Any) -> Any:
        # Rows fill the socket's buffers long before the slot is full.
        client = served.client()
        body = {"prompt": TEXT, "max_length": 450, "ban_eos_token": True, **body}
        sending = client.build_request(
            "POST", "/api/extra/generate/stream", json={"output_attentions": True, **body}
        )
        reply = client.send(sending, stream=True)
        chunks = reply.iter_raw()
        next(chunks)
        stack.append((client, reply))
        return chunks

    yield served, hold
    for client, reply in stack:
        reply.close()
        client.close()


def test_abort_ends_the_generation_of_its_key(held: Any):
    served, hold = held
    first, second = hold(genkey="K1"), hold(genkey="K2")
    with served.client() as client:
        abort = "/api/extra/abort"
        wrong = client.post(abort, json={"genkey": "K3"}).json()
        assert wrong == {"success": "false", "done": "false"}
        keyless = client.post(abort).json()
        assert keyless == {"success": "false", "done": "true"}
        assert len(served.service.runs) == 2
        right = client.post(abort, json={"genkey": "K1"}).json()
        assert right == {"success": "true", "done": "true"}
    body = b"".join(first)
    done = body[body.rindex(b'{"type":"done"') :]
    assert b'"finish_reason":"stop"' in done
    assert b'"reason":"cancelled"' in done
    served.wait_until(lambda: [r.request.key for r in served.runs] == ["K2"])
    del second


def test_abort_without_a_key_ends_the_only_generation_without_one(held: Any):
    served, hold = held
    chunks = hold()
    with served.client() as client:
        reply = client.post("/api/extra/abort", content=b"").json()
        assert reply == {"success": "true", "done": "true"}
    b"".join(chunks)
    served.wait_idle()


def test_abort_without_a_key_spares_several(held: Any):
    served, hold = held
    both = hold(), hold(request_id="named")
    with served.client() as client:
        reply = client.post("/api/extra/abort", json={}).json()
        assert reply == {"success": "false", "done": "false"}
        assert len(served.service.runs) == 2
        reply = client.post("/api/extra/abort", json={"request_id": "named"}).json()
        assert reply == {"success": "true", "done": "true"}
    assert b'"type":"done"' in b"".join(both[1])
    served.wait_until(lambda: "named" not in [r.request_id for r in served.runs])
    assert len(served.service.runs) == 1


def test_check_shows_the_text_so_far(held: Any):
    served, hold = held
    chunks = hold(genkey="K1")
    with served.client() as client:
        path = "/api/extra/generate/check"
        served.wait_until(lambda: client.post(path, json={"genkey": "K1"}).json()["results"][0])
        text = client.post(path, json={"genkey": "K1"}).json()["results"][0]["text"]
        assert text
        assert client.get(f"{path}?genkey=K1").json()["results"][0]["text"].startswith(text)
        assert client.get(path).json() == {"results": [{"text": ""}]}
    del chunks
