"""Command lines of llama-server as those of ``kqview serve``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from kqview.cli.llama_server_flags import translated
from kqview.cli.main import app
from kqview.errors import RequestError
from kqview.server.supervisor import ENVIRONMENT

if TYPE_CHECKING:
    from pathlib import Path


def of(line: str) -> tuple[str, str]:
    """The command line that *line* becomes, and what is noted."""
    notes: list[str] = []
    return " ".join(translated(line.split(), notes.append)), " ".join(notes)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("-m a.gguf -c 4096 -np 4", "--model a.gguf --ctx 1024 --slots 4"),
        ("-m a.gguf -c 4096", "--model a.gguf --ctx 4096"),
        ("-c 0 -np -1", "--slots 4"),
        ("--ctx-size=4096 --parallel=2", "--ctx 2048 --slots 2"),
        ("-ngl 99 -t 8", "--ngl 99 --threads 8"),
        ("-ngl all", "--ngl -1"),
        ("--n-gpu-layers auto", "--ngl -1"),
        ("-a one,two --host 0.0.0.0", "--alias one --alias two --host 0.0.0.0"),
        ("--api-key a,b --api-key c", "--api-key a --api-key b --api-key c"),
        ("-fa on -ctk q8_0 -ctv q8_0", "--flash-attn on --kv-type q8_0"),
        ("-fa --port 8080", "--flash-attn on --port 8080"),
        ("--flash-attn auto", "--flash-attn auto"),
        ("--lora a.gguf,b.gguf", "--lora a.gguf --lora b.gguf"),
        ("--lora-scaled a.gguf:0.5", "--lora a.gguf:0.5"),
        ("--reranking --no-slots", "--pooling rank --no-slots"),
        ("--slots --port 0", "--port 0"),
        ("--slots 3 --port 0", "--slots 3 --port 0"),
        (
            "--slot-save-path d --props --context-shift",
            "--slot-save-path d --props --context-shift",
        ),
        ("--ssl-key-file k --ssl-cert-file c", "--ssl-keyfile k --ssl-certfile c"),
        ("-ub 1024 -to 60", "--ubatch-size 1024 --idle-timeout-s 60"),
        ("--temp 0.6 --top-k 20", "--sampling temperature=0.6 --sampling top_k=20"),
        ("-s 42 --seed -1 -n 64 -n -1", "--sampling seed=42 --max-tokens 64"),
        # our own stay as they are
        ("--demo --slots 4 --ctx 512 --ngl 3", "--demo --slots 4 --ctx 512 --ngl 3"),
        ("--max-tokens 5 --allowed-hosts a", "--max-tokens 5 --allowed-hosts a"),
    ],
)
def test_flags_are_written_as_ours(theirs: str, ours: str):
    assert of(theirs) == (ours, "")


def test_flags_that_change_nothing_here_are_left_out_and_named():
    ours, note = of("--metrics --jinja -cb --mlock -tb 4 --cache-ram 0 --embedding -m a.gguf")
    assert ours == "--model a.gguf"
    for name in ("--metrics", "--jinja", "-cb", "--mlock", "-tb", "--cache-ram", "--embedding"):
        assert name in note.split()


def test_worker_does_not_repeat_what_its_supervisor_said():
    line = ["serve", "--metrics", "--no-such-flag"]
    assert "effect here: --metrics" in CliRunner().invoke(app, line).output
    worker = CliRunner().invoke(app, line, env={ENVIRONMENT: "3"})
    assert "--no-such-flag" in worker.output
    assert "--metrics" not in worker.output


def test_unknown_flags_stay_for_the_command_to_refuse():
    assert of("--adaptive-target 2 --mmproj a.gguf")[0] == "--adaptive-target 2 --mmproj a.gguf"


def test_keys_are_read_from_a_file(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("# mine\none\n\n two \n")
    assert of(f"--api-key-file {path}")[0] == "--api-key one --api-key two"


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("-np many", "many"),
        ("-c big", "big"),
        ("-ctk q8_0 -ctv f16", "q8_0"),
        ("-ctv q8_0", "f16"),
        ("--api-key-file /does/not/exist", "/does/not/exist"),
        ("--api-key-file /dev/null", "no keys"),
    ],
)
def test_value_that_cannot_be_used_is_named(line: str, fact: str):
    with pytest.raises(RequestError, match=fact):
        of(line)
