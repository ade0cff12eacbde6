"""What the command line says of a model, a text or a file that cannot be used, before any work."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

import kqview
from kqview.cli.main import app
from kqview.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder; no command opens an engine."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr(kqview.Engine, "__init__", refuse)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str, stdin: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, list(words), input=stdin)


def error_of(*words: str, status: int, stdin: str | bytes | None = None) -> str:
    """The one line of stderr."""
    result = run(*words, stdin=stdin)
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr[len("error: ") : -1]


# ---- models


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tiny-lama.gguf", "did you mean tiny-llama.gguf?"),
        ("tiny-llama", "did you mean tiny-llama.gguf?"),
        ("sub/tiny-lama-q8.gguf", "did you mean sub/tiny-llama-q8.gguf?"),
        ("Anna has a ball", "the GGUF files in its folder are other.gguf, tiny-llama.gguf"),
        ("nowhere/x.gguf", "there is no folder nowhere either"),
        ("owner/repo", "if it is on the Hugging Face Hub, type --hf owner/repo/FILE"),
        ("owner/repo/q8/x.gguf", "type --hf owner/repo/q8/x.gguf"),
        ("https://huggingface.co/a/b/resolve/main/c.gguf?download=true", "type --hf a/b/c.gguf"),
        ("hf.co/a/b", "type --hf a/b/FILE"),
    ],
)
def test_missing_model_is_said_with_what_to_type(folder: Path, name: str, hint: str):
    for file in ("tiny-llama.gguf", "other.gguf", "sub/tiny-llama-q8.gguf"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(b"GGUF")
    message = error_of("generate", name, "hi", status=3)
    assert message == f"there is no file {name}; {message.partition('; ')[2]}"
    assert hint in message


def test_missing_model_where_there_is_none_leads_to_the_demo():
    assert "--demo" in error_of("info", "x.gguf", status=3)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (b"PK\x03\x04zip", "a zip or PyTorch file"),
        (b"tjgg\x03", "old GGML format"),
        (b"hello", "convert_hf_to_gguf.py"),
    ],
)
def test_file_that_is_no_gguf_is_said_to_be_what_it_is(folder: Path, content: bytes, what: str):
    (folder / "model.bin").write_bytes(content)
    message = error_of("chat", "-m", "model.bin", status=3)
    assert message.startswith("model.bin is not a GGUF file but ")
    assert what in message


def test_folder_is_said_to_be_one_and_its_files_are_listed(folder: Path):
    (folder / "models").mkdir()
    assert "models is a folder; it has no GGUF file" in error_of("score", "models", "x", status=3)
    (folder / "models" / "config.json").touch()
    assert "convert_hf_to_gguf.py" in error_of("score", "models", "x", status=3)
    for name in "abcde":
        (folder / "models" / f"{name}.gguf").touch()
    assert error_of("score", "models", "x", status=3).endswith(
        "models/a.gguf, models/b.gguf, models/c.gguf and 2 more"
    )


def test_pipe_is_no_model_and_is_not_waited_for(folder: Path):
    os.mkfifo(folder / "pipe")
    assert "pipe is not a regular file" in error_of("attend", "pipe", "x", status=3)


def test_engine_says_how_to_open_a_repository(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    with pytest.raises(ModelLoadError, match=r"Engine\.from_hub\('owner/repo', 'x\.gguf'\)"):
        kqview.Engine("owner/repo/x.gguf")


@pytest.mark.parametrize("command", ["generate", "attend", "embed", "score", "tokenize", "chat"])
def test_no_model_is_said_with_the_ways_to_name_one(command: str):
    message = error_of(command, status=2)
    for way in ("MODEL", "-m FILE", "--hf", "--demo"):
        assert way in message


def test_nothing_is_downloaded_for_a_command_that_cannot_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # downloading would say so
    hub = ("--hf", "owner/repo/x.gguf")
    assert "the text is missing" in error_of("generate", *hub, status=2, stdin="")
    assert "OWNER/REPO/FILE" in error_of("info", "--hf", "x.gguf", status=2)
    message = error_of("info", "--hub", "owner/repo/x.gguf", status=3)
    assert 'huggingface_hub, which is not installed; run pip install "kqview[hf]"' in message


def test_two_models_are_refused():
    assert "name one model" in error_of("generate", "--demo", "-m", "x.gguf", "hi", status=2)
    assert "name one model" in error_of("info", "x.gguf", "--demo", status=2)


# ---- texts


@pytest.mark.parametrize("command", ["generate", "attend", "embed", "score", "tokenize"])
def test_text_that_is_missing_empty_or_not_utf8_is_said(command: str, folder: Path):
    assert "the text is missing" in error_of(command, "--demo", status=2, stdin="")
    assert "the text is missing" in error_of(command, "--demo", "-", status=2, stdin="")
    message = error_of(command, "--demo", "-", status=2, stdin=b"Zo\xeb")
    assert "standard input is not text in UTF-8: byte 0xeb at 2" in message
    (folder / "latin.txt").write_bytes(b"Zo\xeb")
    assert "latin.txt is not text" in error_of(command, "--demo", "-f", "latin.txt", status=2)
    assert "none.txt" in error_of(command, "--demo", "-f", "none.txt", status=1)


def test_two_texts_for_one_are_refused():
    assert "put one text in quotes" in error_of("generate", "--demo", "a", "b", status=2)
    assert "give one text" in error_of("attend", "--demo", "a", "-p", "b", status=2)
    assert "put one message in quotes" in error_of("chat", "--demo", "a", "b", status=2)


# ---- files


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "--demo", "x", "--output", "rows.png"),
        ("generate", "--demo", "x", "--output", "rows"),
        ("attend", "--demo", "x", "-o", "rows.txt"),
        ("embed", "--demo", "x", "-o", "rows.csv"),
        ("demo", "-o", "x.npz"),
        ("bench", "--demo", "--plot", "x.gif"),
    ],
)
def test_wrong_suffix_is_refused_with_those_that_work(words: tuple[str, ...]):
    message = error_of(*words, status=2)
    assert repr(words[-1]) in message
    assert "end it in ." in message


def test_place_that_cannot_be_written_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    generate = ("generate", "--demo", "x", "--output")
    assert "there is no folder none" in error_of(*generate, "none/x.npz", status=2)
    (folder / "x.npz").mkdir()
    assert "a folder" in error_of(*generate, "x.npz", status=2)
    monkeypatch.setattr(os, "access", lambda *_: False)  # the superuser may write everywhere
    assert "where you may not write" in error_of(*generate, "y.npz", status=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--json-schema", "{"), "--json-schema is not JSON"),
        (("--json-schema", "@none.json"), "none.json"),
        (("--regex", "a", "--grammar", "b"), "--grammar and --regex cannot be combined"),
        (("--temp", "-1"), "--temperature must be a number of at least 0"),
        (("--layers", "1-x"), "--layers is '1-x'"),
        (("--layers", "0,3-1"), "--layers is '0,3-1'"),
        (("--layers", "1,1"), "--layers has repeated indices"),
        (("--top-p", "1.5"), "--top-p"),
        (("--top-values", "1", "--spans", "0:1"), "--top-values and --spans are two ways"),
        (("--spans", "3-4"), "--spans is '3-4'"),
        (("--spans", "4:3"), "spans"),
        (("--spans", "0:3", "--capture", "qk"), "spans are sums of probabilities"),
        (("--spans", "0:3", "-o", "x.html"), "shows whole rows; leave --spans out"),
        (("--capture", "qk", "-o", "x.html"), "use --capture probs or scores"),
    ],
)
def test_wrong_option_of_generating_is_one_line(words: tuple[str, ...], message: str):
    result = run("generate", "--demo", "x", *words)
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [("info", "--metadata"), ("unknown",), ("generate", "--demo", "x", "--capture", "weights")],
)
def test_wrong_usage_is_told_with_status_2(words: tuple[str, ...]):
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr
