"""``kqview state``: what it says of files that are whole, altered, raw, or of another model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kqview.cli.main import app
from kqview.state import write_state
from kqview.state.fingerprint import ModelFiles
from kqview.state.trailer import SlotMarks, StateFacts
from tests.support import ses1

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ROWS = [ses1.Rows(np.ones((5, 16), np.float16))]
BLOB = ses1.Blob([1, 2, 3, 4, 5], ROWS * 3, ROWS * 3, False, list(range(5))).encode()


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["state", *map(str, arguments)])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights" * 1000)
    return path


def saved(path: Path, model: Path, adapters: Sequence[tuple[str, float]] = ()) -> Path:
    files = ModelFiles(str(model), adapters)
    facts = StateFacts(files.fingerprint(), "f16", files.sampled_fingerprint())
    write_state(path, BLOB, facts, SlotMarks(n_exact=4))
    return path


def test_whole_file_is_said_to_be_one(tmp_path: Path, model: Path) -> None:
    path = saved(tmp_path / "a.ses1", model)
    result = run("check", path)
    n_bytes = path.stat().st_size
    assert result.stdout == f"{path}: whole, 5 tokens, {n_bytes:,} bytes, checksum right\n"
    assert result.exit_code == 0
    result = run("check", path, "--model", model)
    assert result.stdout.endswith("checksum right, of this model\n")
    assert result.exit_code == 0


def test_each_byte_that_is_altered_or_missing_is_found(tmp_path: Path, model: Path) -> None:
    path = saved(tmp_path / "a.ses1", model)
    data = path.read_bytes()
    bad: list[Path] = []
    for at in range(0, len(data), 7):
        for kind, content in (
            ("changed", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]),
            ("cut", data[:at]),
        ):
            bad.append(tmp_path / f"{kind}-{at}")
            bad[-1].write_bytes(content)
    result = run("check", path, *bad)
    assert result.exit_code == 1
    good, *lines = result.stdout.splitlines()
    assert "whole" in good
    for name, line in zip(bad, lines, strict=True):
        assert line.startswith(f"{name}: NOT GOOD: ")


def test_file_of_another_model_or_other_adapters_is_named(tmp_path: Path, model: Path) -> None:
    other, adapter = tmp_path / "other.gguf", tmp_path / "lora=x.gguf"
    other.write_bytes(b"WEIGHTS" * 1000)
    adapter.write_bytes(b"lora")
    plain = saved(tmp_path / "plain.ses1", model)
    adapted = saved(tmp_path / "adapted.ses1", model, [(str(adapter), 0.5)])
    half, whole = ["--lora", f"{adapter}=0.5"], ["--lora", adapter]
    for path, options, is_of_model in (
        (plain, ["--model", model], True),
        (plain, ["--model", other], False),
        (plain, ["--model", model, *half], False),
        (adapted, ["--model", model], False),
        (adapted, ["--model", model, *half], True),
        (adapted, ["--model", model, *whole], False),
    ):
        result = run("check", path, *options)
        assert result.exit_code == (0 if is_of_model else 1)
        assert ("are not those it was saved with" in result.stdout) is not is_of_model
        assert json.loads(run("check", path, *options, "--json").stdout)[0]["is_of_model"] == (
            is_of_model
        )


def test_raw_blob_is_whole_but_not_known_to_be_of_a_model(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(BLOB)
    result = run("check", path)
    assert result.exit_code == 0
    assert result.stdout.endswith("no checksum, a raw blob\n")
    result = run("check", path, "--model", model)
    assert result.exit_code == 1
    assert "nothing says of which model" in result.stdout


def test_every_file_gets_its_line_and_one_that_is_bad_the_status(
    tmp_path: Path, model: Path
) -> None:
    good = saved(tmp_path / "good.ses1", model)
    (tmp_path / "text").write_text("no blob")
    files = [good, tmp_path / "none", tmp_path, tmp_path / "text"]
    result = run("check", *files)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert [line.startswith(f"{file}: ") for file, line in zip(files, lines, strict=True)]
    assert ["NOT GOOD" in line for line in lines] == [False, True, True, True]
    assert "No such file" in lines[1]
    assert run("check", good, "--model", tmp_path / "none").exit_code == 1
    assert run("check", good, "--lora", good).exit_code == 2
    assert run("check").exit_code == 2


def test_inspect_shows_what_is_in_a_file(tmp_path: Path, model: Path) -> None:
    path = saved(tmp_path / "a.ses1", model)
    (shown,) = json.loads(run("inspect", path, "--json").stdout)
    expected = {
        **{"n_tokens": 5, "tokens": [1, 2, 3, 4, 5], "n_layer": 3, "kv_type": "f16"},
        **{"flash_attn": True, "n_exact": 4, "trailer_version": 2, "problems": []},
        **{"n_bytes": path.stat().st_size, "model": ModelFiles(str(model), []).fingerprint()},
    }
    assert expected.items() <= shown.items()
    text = run("inspect", path).stdout
    for part in ("3 layers of f16", "flash attention", "trailer of version 2", expected["model"]):
        assert part in text
    path.write_bytes(BLOB[:-1])
    result = run("inspect", path)
    assert result.exit_code == 1
    assert "problem" in result.stdout


def test_structure_that_claims_billions_of_layers_is_refused_at_once(tmp_path: Path) -> None:
    changed = bytearray(BLOB)
    at = ses1.offsets(BLOB)["n_layer"]
    changed[at : at + 4] = b"\xff" * 4
    path = tmp_path / "many"
    path.write_bytes(changed)
    assert run("check", path).exit_code == 1
