"""The prompts of llama.cpp's chat templates, beside those of the stock llama-server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kqview import Engine
from kqview.errors import KqviewError
from kqview.server import Settings
from kqview.server.api.chat_work import prompt_of
from kqview.server.api.llama_server import convert, schema
from tests.support import stock, stock_templates

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
# The templates themselves refuse more than one call in a message; the stock server passes it on.
REFUSED = {(f"meta-llama-Llama-3.{n}-Instruct", "two calls") for n in ("1-8B", "2-3B", "3-70B")}


def test_prompts_are_those_of_the_stock_server(tmp_path: Path):
    settings = Settings(request_chat_template=True)
    stored = stock_templates.stored()
    found: dict[str, set[tuple[str, str]]] = {"refused": set(), "different": set()}
    templates = sorted((stock.source() / "models" / "templates").glob("*.jinja"))
    assert {template.stem for template in templates} == stored.keys()
    with Engine(stock_templates.write_model(tmp_path / "model.gguf"), n_ctx=256) as engine:
        for template in templates:
            for name, chat in stock_templates.CHATS.items():
                body = schema.TemplateBody(**chat, chat_template=template.read_text("utf-8"))
                try:
                    ids, _ = prompt_of(engine, convert.chat_of(body, settings, request_id="r"))
                except KqviewError:
                    found["refused"].add((template.stem, name))
                    continue
                hashed = stock_templates.hash_of(engine.detokenize(ids), "<|endoftext|>")
                if hashed != stored[template.stem][name]:
                    found["different"].add((template.stem, name))
    assert found == {"refused": REFUSED, "different": DIFFERENT}
    assert all(stored[template][name] == stock_templates.REFUSED for template, name in REFUSED)
