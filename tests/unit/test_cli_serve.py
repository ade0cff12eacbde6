"""What ``kqview serve`` refuses before it opens anything, and how options reach the settings."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("typer")
pytest.importorskip("starlette")

from typer.testing import CliRunner, Result

from kqview.cli import serving
from kqview.cli.main import app

if TYPE_CHECKING:
    from kqview.server.app import App
    from kqview.server.settings import Settings


def invoke(*words: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["serve", *words], env=env)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Settings with which the command would serve; it does not."""
    seen: list[Settings] = []

    def run(app: App, settings: Settings, listener: socket.socket, supervised: object) -> None:
        seen.append(settings)
        assert supervised is None

    monkeypatch.setattr(serving, "run", run)
    return seen


@pytest.mark.parametrize("words", [(), ("--demo", "--model", "m.gguf")])
def test_not_exactly_one_model_is_wrong_usage(words: tuple[str, ...]):
    result = invoke(*words)
    assert result.exit_code == 2
    assert "name one model" in result.output


def test_public_address_without_a_key_is_refused():
    result = invoke("--demo", "--host", "0.0.0.0", "--port", "0")
    assert result.exit_code == 2
    assert re.search(r"0\.0\.0\.0 can be reached .*--api-key", result.output)


@pytest.mark.parametrize("words", [("--api-key", "k"), ("--public",)])
def test_public_address_is_allowed_with_a_key_or_by_order(
    words: tuple[str, ...], served: list[Settings]
):
    assert invoke("--demo", "--host", "0.0.0.0", "--port", "0", *words).exit_code == 0
    assert served[0].host == "0.0.0.0"


def test_taken_port_is_said_before_the_model_is_opened():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = invoke("--model", "missing.gguf", "--port", str(port))
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in result.output


def test_missing_model_is_one_line_and_the_exit_code_of_models():
    result = invoke("--model", "missing.gguf", "--port", "0")
    assert result.exit_code == 3
    assert "missing.gguf" in result.output
    assert "Traceback" not in result.output


def test_flags_win_over_the_environment(served: list[Settings]):
    env = {"KQVIEW_SHUTDOWN_GRACE_S": "2.5", "KQVIEW_MAX_TOKENS": "7", "KQVIEW_API_KEYS": "a, b"}
    result = invoke("--demo", "--port", "0", "--max-tokens", "9", "--slots", "2", env=env)
    assert result.exit_code == 0, result.output
    (settings,) = served
    assert settings.max_tokens == 9
    assert settings.shutdown_grace_s == 2.5
    assert settings.api_keys == ("a", "b")
    assert settings.n_slots == 2


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"KQVIEW_PORT": "x"}, "port is 'x', a number is needed"),
        ({"KQVIEW_DEMO": "maybe"}, "demo is 'maybe', true or false is needed"),
        ({"KQVIEW_MAX_TOKENS": "0"}, "max_tokens is 0, the least is 1"),
        ({"KQVIEW_ATTENTION_VALUES": "raw"}, "known are logits, scores, probs"),
    ],
)
def test_wrong_value_of_the_environment_is_named(
    env: dict[str, str], message: str, served: list[Settings]
):
    result = invoke(env={"KQVIEW_MODEL": "m.gguf", **env})
    assert not served
    assert result.exit_code == 2
    assert message in result.output
