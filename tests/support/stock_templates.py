"""What the stock llama-server makes of llama.cpp's chat templates, kept as hashes.

Owns: the chats, the normal form of a prompt, and the file of hashes beside this one. As a program,
``python -m tests.support.stock_templates``, it asks the stock server, which
``python bench/peers/build.py llama-server`` builds, and writes the file. With a folder as its
argument it also writes the prompts themselves there, to be read.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from datetime import datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

from tests.support import stock, tiny_gguf

STORED = Path(__file__).with_suffix(".json")
REFUSED = "refused"
_DATES = ("%Y-%m-%d", "%d %b %Y", "%b %d %Y", "%B %d, %Y", "%d %B %Y", "%d.%m.%Y")

_SYSTEM = {"role": "system", "content": "You know the weather."}
_USER = {"role": "user", "content": "What is the weather in Oslo?"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a <city> & its lakes",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name"}},
            "required": ["city"],
        },
    },
}
_CALL = {
    "id": "call00001",  # Mistral's templates want nine letters and digits
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
}
_OTHER_CALL = {
    **_CALL,
    "id": "call00002",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [_SYSTEM, _USER]},
    "turns": {
        "messages": [
            _SYSTEM,
            _USER,
            {"role": "assistant", "content": "It snows."},
            {"role": "user", "content": "And in Rome?"},
        ]
    },
    "tools": {"messages": [_USER], "tools": [_TOOL]},
    "tool turn": {
        "messages": [
            _USER,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": "-3 degrees"},
        ],
        "tools": [_TOOL],
    },
    "two calls": {
        "messages": [
            _SYSTEM,
            _USER,
            {"role": "assistant", "content": "I look.", "tool_calls": [_CALL, _OTHER_CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": "-3 degrees"},
            {"role": "tool", "tool_call_id": "call00002", "content": "9 degrees"},
            {"role": "assistant", "content": "Rome is warmer."},
            {"role": "user", "content": "Thanks."},
        ],
        "tools": [_TOOL],
    },
    "thoughts": {
        "messages": [
            _USER,
            {"role": "assistant", "reasoning_content": "It is winter.", "content": "It snows."},
            {"role": "user", "content": "And in Rome?"},
        ],
    },
    "no thoughts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Who are you?"}]}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
}


def hash_of(prompt: str | None, bos: str) -> str:
    """*prompt* as it is kept: without its beginning-of-text token and today's date."""
    if prompt is None:
        return REFUSED
    prompt = prompt.removeprefix(bos)
    now = datetime.now()
    for day, form in product((now, now - timedelta(days=1)), _DATES):  # midnight may have passed
        prompt = prompt.replace(day.strftime(form), "<today>")
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


def write_model(path: Path) -> Path:
    """The model of both servers."""
    return tiny_gguf.write_preset(path, "tiny_qwen2")


def stored() -> dict[str, dict[str, str]]:
    """Template -> chat -> hash."""
    return json.loads(STORED.read_text())


def _prompts(model: Path, template: Path) -> dict[str, str | None]:
    """The prompts of the stock server, None where it refuses."""
    with stock.server(model, "--chat-template-file", template) as ask:
        return {
            name: found and found["prompt"]
            for name, body in CHATS.items()
            for found in [ask("POST", "/apply-template", body)]
        }


def main(templates: Path, shown: Path | None) -> None:
    """Ask the stock server for each of *templates*, and write the file."""
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model.gguf")
        for template in sorted(templates.glob("*.jinja")):
            prompts = _prompts(model, template)
            found[template.stem] = {
                name: hash_of(prompt, "<|endoftext|>") for name, prompt in prompts.items()
            }
            print(template.stem, [name for name in prompts if prompts[name] is None], flush=True)
            if shown is not None:
                for name, prompt in prompts.items():
                    (shown / f"{template.stem}.{name}").write_text(prompt or REFUSED)
    lines = (f"{json.dumps(name)}: {json.dumps(hashes)}" for name, hashes in found.items())
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(stock.source() / "models" / "templates", Path(sys.argv[1]) if sys.argv[1:] else None)
