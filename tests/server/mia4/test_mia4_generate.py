"""``POST /generate``: the frames of its stream, and what is said before a stream begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support import mia4

if TYPE_CHECKING:
    from tests.support.serving import Served


def test_stream_has_tokens_then_usage_then_one_end(demo: Served):
    frames = mia4.generate(demo)
    names = [name for name, _ in frames]
    assert names == ["token"] * (len(frames) - 2) + ["usage", "end"]
    tokens = mia4.named(frames, "token")
    assert [one["seq"] for one in tokens] == list(range(len(tokens)))
    ids = {one["request_id"] for _, one in frames}
    assert len(ids) == 1


def test_usage_is_exact(demo: Served):
    [usage] = mia4.named(mia4.generate(demo), "usage")
    messages = [{"role": "user", "content": mia4.QUESTION["prompt"]}]
    assert usage["prompt_tokens"] == len(demo.engine.apply_chat_template(messages))
    assert usage["output_tokens"] == 6
    assert usage["decode_tps"] == usage["output_tokens"] / (usage["latency_ms"] / 1000)
