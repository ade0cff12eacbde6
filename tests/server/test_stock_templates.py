"""The prompts of llama.cpp's chat templates, beside those of the stock llama-server."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest

from kqview.server import Settings
from tests.support import stock, stock_templates
from tests.support.serving import serving

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("jinja2")

# The template has no place for the description of tools: stock leaves it out, and often the calls
# as well. Here the model reads both as text (`kqview.chat.tools_as_text`).
AS_TEXT = {
    "HuggingFaceTB-SmolLM3-3B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "fireworks-ai-llama-3-firefunction-v2",
    "google-gemma-2-2b-it",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
DIFFERENT = {
    *((template, chat) for template in AS_TEXT for chat in ("tools", "tool turn", "two calls")),
    # Stock leaves out the answer whose reasoning it was given.
    ("unsloth-mistral-Devstral-Small-2507", "thoughts"),
}
# These templates refuse more than one call in a message, for both servers.
REFUSED = {(f"meta-llama-Llama-3.{n}-Instruct", "two calls") for n in ("1-8B", "2-3B", "3-70B")}


def test_prompts_are_those_of_the_stock_server(tmp_path: Path):
    model = stock_templates.write_model(tmp_path / "model.gguf")
    stored = stock_templates.stored()
    templates = sorted((stock.source() / "models" / "templates").glob("*.jinja"))
    assert {template.stem for template in templates} == stored.keys()
    found: dict[str, set[tuple[str, str]]] = {"refused": set(), "different": set()}
    settings = Settings(model=str(model), n_ctx=256, request_chat_template=True)
    with serving(settings) as served, served.client() as client:
        for template, (name, chat) in product(templates, stock_templates.CHATS.items()):
            body = {**chat, "chat_template": template.read_text("utf-8")}
            reply = client.post("/apply-template", json=body)
            if reply.status_code != 200:
                found["refused"].add((template.stem, name))
                continue
            hashed = stock_templates.hash_of(reply.json()["prompt"], "<|endoftext|>")
            if hashed != stored[template.stem][name]:
                found["different"].add((template.stem, name))
    assert found == {"refused": REFUSED, "different": DIFFERENT}
    assert all(stored[template][name] == stock_templates.REFUSED for template, name in REFUSED)
