"""The walk through the server names the files that a request passes, and no more may come."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytestmark = pytest.mark.full

PATHS = Path(__file__).with_name("request_path.py")
WALK = Path(__file__).parents[2] / "src" / "kqview" / "server" / "WALK.md"
# Named in the walk, and not passed by this request.
BESIDE = ("app.py", "uvicorn_parts.py", "models/stream.py")
# What a chat may pass, so that a hop more is seen. Functions differ by a few between two runs:
# a token that waits for the event loop passes some that one which does not wait leaves out.
MOST_FILES = 24
MOST_FUNCTIONS = 180


@pytest.fixture(scope="module")
def passed() -> list[str]:
    """What the profile of a chat with attention prints."""
    command = [sys.executable, str(PATHS), "openai", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()


def test_walk_names_the_files_that_a_chat_passes(passed: list[str]):
    listed = [line.strip() for line in passed[1:]]
    text = WALK.read_text(encoding="utf-8")
    named = [one for one in re.findall(r"`([\w/]+\.py)`", text) if one not in BESIDE]
    assert sorted(named) == sorted(listed)


def test_a_chat_passes_no_more_files_and_functions_than_it_did(passed: list[str]):
    n_files, n_functions = map(int, re.findall(r"(\d+) (?:files|functions)", passed[0]))
    assert n_files <= MOST_FILES
    assert n_functions <= MOST_FUNCTIONS
