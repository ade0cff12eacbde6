"""``kqview bench`` on the demo model: rows, files, what is left out, and wrong usage."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from kqview.bench.pairs import Pairs
from kqview.cli.main import app

if TYPE_CHECKING:
    from pathlib import Path

QUICK = ("--demo", "--quick", "--threads", "1", "--pairs", "2", "--tokens", "6")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "120"})


def test_bench_measures_prints_and_saves_every_row(tmp_path: Path):
    pytest.importorskip("matplotlib")
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "rows.png"
    result = run(*QUICK, "--json", str(rows), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "flash attention on" in result.stdout
    assert "flash attention off" in result.stdout
    records = [json.loads(line) for line in rows.read_text().splitlines()]
    names = {record["row"] for record in records}
    assert len(names) == len(records) == 2 * 2 * 9
    assert {"context-64-flash-off", "context-128-plain-10-heads", "context-64-flash-top-8"} <= names
    for record in records:
        pairs = Pairs(**record["pairs"])
        assert len(pairs.ratios) == 2
        assert record["median_ratio"] == pairs.median_ratio > 0
        assert len(record["llama_cpp_commit"]) == 40
        assert record["model"] == "kqview demo"
        assert record["flags"] == "--threads 1 --pairs 2 --tokens 6"
    (logits,) = [record for record in records if record["row"] == "context-128-flash-logits"]
    assert logits["bytes_per_token"] == 4 * 8 * 128 * 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_bench_leaves_contexts_out_that_the_model_was_not_trained_for():
    options = ("--contexts", "32,9999", "--captures", "probs", "--flash-attn", "on")
    result = run(*QUICK, *options)
    assert result.exit_code == 0, result.output
    assert "skipped: context 9,999: the model was trained with 512 tokens" in result.stdout
    assert "flash attention off" not in result.stdout
    assert "logits" not in result.stdout


def test_bench_of_no_context_says_why_and_fails():
    result = run(*QUICK, "--contexts", "9999")
    assert result.exit_code == 1
    assert "the model was trained with 512 tokens" in result.stdout


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--captures", "logits,weights"), "'weights'"),
        (("--contexts", "many"), "0,3 or 8-11"),
        (("--contexts", "0"), "minimum is 1"),
        (("--plot", "x.txt"), ".png"),
        (("--plot", "no-such-folder/x.png"), "no-such-folder"),
        (("--tokens", "5"), "6"),
        (("model.gguf",), "name one model"),
    ],
)
def test_bench_refuses_wrong_usage_before_it_measures(options: tuple[str, ...], word: str):
    result = run("--demo", *options)
    assert result.exit_code == 2
    assert word in result.stderr
    assert result.stdout == ""


def test_bench_of_a_missing_model_exits_as_other_commands_do():
    result = run("no-such-model.gguf", "--quick")
    assert result.exit_code == 3
    assert result.stderr.startswith("error: ")


def test_bench_plot_without_matplotlib_fails_before_it_measures(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run(*QUICK, "--plot", "x.png")
    assert result.exit_code == 1
    assert 'pip install "kqview[viz]"' in result.stderr
    assert result.stdout == ""


def test_demo_writes_its_heat_map_as_a_picture(tmp_path: Path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "demo.png"
    options = ("demo", "-n", "6", "--runs", "1", "--threads", "1", "--png", str(picture))
    result = CliRunner().invoke(app, list(options))
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
