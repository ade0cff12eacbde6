"""``GET /generate/{request_id}/prompt``: the columns of attention rows have texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kqview.server import Settings
from tests.support import mia4

if TYPE_CHECKING:
    from tests.support.serving import Serve, Served


def test_texts_together_are_the_prompt_that_the_model_saw(demo: Served):
    said = "Änna? 日本 🙂"
    overrides = {**mia4.GREEDY, "attention": True}
    frames = mia4.generate(demo, prompt=said, request_id="prompt-1", overrides=overrides)
    with demo.client() as client:
        prompt = client.get("/generate/prompt-1/prompt").json()
        second = client.get("/generate/prompt-1/attention/1")
    ids = demo.engine.apply_chat_template([{"role": "user", "content": said}])
    assert prompt["ids"] == ids
    assert "".join(prompt["texts"]) == b"".join(map(demo.engine.token_bytes, ids)).decode()
    assert said in "".join(prompt["texts"])
    assert len(prompt["texts"]) == len(ids) == mia4.named(frames, "usage")[0]["prompt_tokens"]
    assert int(second.headers["x-attention-shape"].split(",")[-1]) == len(ids) + 1


def test_prompt_is_kept_for_its_owner_and_with_attention_only(serve: Serve):
    served = serve(Settings(n_slots=1, api_keys=("a", "b")))
    mia4.generate(served, key="a", request_id="plain")
    overrides = {**mia4.GREEDY, "attention": True}
    mia4.generate(served, key="a", request_id="seen", overrides=overrides)
    with served.client() as client:
        for key, name, status in (("a", "seen", 200), ("b", "seen", 404), ("a", "plain", 404)):
            reply = client.get(f"/generate/{name}/prompt", headers=mia4.headers(key))
            assert reply.status_code == status
    assert reply.json()["error_type"] == "not_found"
