"""How the command line starts: entry point, version, help, and fetching a model from the hub."""

import subprocess
import sys
import types

import pytest
from typer.testing import CliRunner

from kqview import errors
from kqview.cli import hub
from kqview.cli.main import app


def test_hub_fetch_splits_owner_repository_and_file(monkeypatch: pytest.MonkeyPatch):
    calls: list[dict[str, str]] = []
    module = types.ModuleType("huggingface_hub")
    module.hf_hub_download = lambda **options: calls.append(options) or "/cache/file"  # pyright: ignore
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    assert hub.fetch("me/models/q8/m.gguf") == "/cache/file"
    assert calls == [{"repo_id": "me/models", "filename": "q8/m.gguf"}]


def test_hub_fetch_failure_says_what_and_what_to_do(monkeypatch: pytest.MonkeyPatch):
    def fail(**options: str) -> str:
        raise ConnectionError("no route\nsecond line")

    module = types.ModuleType("huggingface_hub")
    module.hf_hub_download = fail  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    with pytest.raises(errors.ModelLoadError, match=r"ConnectionError: no route, .*local file$"):
        hub.fetch("me/models/m.gguf")


def test_hub_fetch_without_its_extra_gives_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(errors.ModelLoadError, match=r'pip install "kqview\[hf\]"'):
        hub.fetch("me/models/m.gguf")


def test_version_is_printed():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("kqview")


@pytest.mark.parametrize(
    "command",
    ["bench", "demo", "generate", "info", "serve", "tokenize", "state check", "state inspect"],
)
def test_help_has_an_example(command: str):
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert f"• kqview {command}" in result.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_entry_point_without_the_cli_extra_is_one_line(missing: str):
    code = f"import sys; sys.modules[{missing!r}] = None; import kqview.__main__ as m; m.main()"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 1
    assert result.stderr == (
        f"error: the command line needs {missing}, which is not installed; "
        'pip install "kqview[cli]"\n'
    )
