"""The server that the clients talk to, and what they ask it for."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

from kqview.server import Settings
from tests.support import tiny_gguf
from tests.support.serving import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Packages that python -m tests.clients installs.
PACKAGES = ("instructor", "langchain_openai", "litellm", "llama_index")
collect_ignore = [
    f"test_{name.removesuffix('_openai')}.py"
    for name in PACKAGES
    if importlib.util.find_spec(name) is None
]

KEY = "a-key-of-the-tests"
QUESTION = "Who is Anna?"
ZONES = ["UTC", "CET"]
CLOCK: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"type": "string", "enum": ZONES}},
    "required": ["zone"],
    "additionalProperties": False,
}
"""Parameters of a tool that the demo model, forced to call it, fills in a few tokens."""


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with random weights whose ids below 256 are the bytes."""
    return tiny_gguf.write_preset(tmp_path_factory.mktemp("model") / "llama.gguf", "tiny_llama")


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """A server of the demo model with a key, so that each client shows how it sends one."""
    with serving(Settings(n_slots=2, api_keys=(KEY,))) as one:
        yield one


@pytest.fixture(scope="session")
def base_url(served: Served) -> str:
    """Where clients of OpenAI's API find the server."""
    return f"{served.url}/v1"
