"""The program and its surroundings: terminals, pipes, signals, full disks, closed streams.

Each test starts the program, because only a process of its own has such streams.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

pytest.importorskip("typer")

from kqview import Engine

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = [sys.executable, "-m", "kqview"]
DEMO = ["--demo", "--threads", "1", "--temp", "0"]
# More text than a pipe or a terminal holds: it cannot have ended while nobody reads.
ENDLESS = ["--ignore-eos", "-n", "32000", "--ctx", "32768"]
WITHIN_S = 50.0


@pytest.fixture(scope="module")
def beginning() -> bytes:
    """How the demo model goes on after "Anna"."""
    with Engine.demo(n_ctx=64, n_threads=1) as engine:
        return engine.generate("Anna", max_tokens=6, temperature=0).read().encode()


def run(
    *words: str, before: str = "", stdin: bytes = b"", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run the program in a shell, *before* which something may be set up."""
    script = f'{before} exec "$@"'
    return subprocess.run(
        ["bash", "-c", script, "bash", *PROGRAM, *words],
        input=stdin, capture_output=True, timeout=WITHIN_S, check=False,
        env={**os.environ, "COLUMNS": "80", **(env or {})},
    )  # fmt: skip


# Makes the terminal send the signals of its keys; a new session has no terminal at first.
_CONTROLLED = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """The program in a terminal of 24 lines of 80 characters."""

    def __init__(self, *words: str) -> None:
        import fcntl
        import pty
        import struct
        import termios

        self._handle, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CONTROLLED, *PROGRAM, *words],
            stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            # In a dumb terminal the line editor writes what it is given and nothing else.
            env={**os.environ, "TERM": "dumb", "INPUTRC": os.devnull},
        )  # fmt: skip
        os.close(inner)
        self._seen = b""

    def until(self, pattern: bytes) -> bytes:
        """Everything up to the first match of *pattern*, from what was returned last."""
        while (found := re.search(pattern, self._seen)) is None:
            data = self._read()
            assert data, f"it ended without {pattern!r}: {self._seen!r}"
            self._seen += data
        part, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return part

    def rest(self) -> bytes:
        """What is left when the program has ended."""
        while data := self._read():
            self._seen += data
        return self._seen

    def _read(self) -> bytes:
        ready, _, _ = select.select([self._handle], [], [], WITHIN_S)
        assert ready, f"nothing more within {WITHIN_S} s of {self._seen!r}"
        try:
            return os.read(self._handle, 1 << 16)
        except OSError:  # the program has closed its side
            return b""

    def type(self, text: bytes) -> None:
        """Type *text* on the keyboard."""
        os.write(self._handle, text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._handle)


def test_chat_in_a_terminal_edits_lines_stops_answers_and_ends_with_the_keyboard(tmp_path: Path):
    path = tmp_path / "talk.json"
    with Terminal("chat", *DEMO, *ENDLESS) as terminal:
        assert b"/help lists the commands" in terminal.until(rb"\n> ")
        terminal.type(b"Tell me a story\n")
        terminal.until(rb"Tell me a story\s+\w+ ")  # the first word of the answer
        terminal.type(b"\x03")  # Ctrl-C
        terminal.until(rb"\(stopped\)\s+> ")
        # The line editor notices it with the next key at the latest.
        terminal.type(b"\x03\n")
        terminal.until(rb"Ctrl-D or /quit ends the chat\s+> ")
        terminal.type(b"/nope\n")
        terminal.until(rb"error: there is no command /nope.*\n> ")
        terminal.type(b"/save " + bytes(path) + b"\n")
        terminal.until(rb"2 messages in .*\n> ")
        terminal.type(b"/historx\x7fy\n")  # Backspace
        terminal.until(rb"user: Tell me a story\s")
        terminal.until(rb"\n> ")
        terminal.type(b"\x04")  # Ctrl-D
        assert b"Traceback" not in terminal.rest()
        assert terminal.process.wait(WITHIN_S) == 0
    assert path.read_text().count('"role"') == 2


def test_interrupt_ends_a_generation_and_keeps_its_rows(tmp_path: Path, beginning: bytes):
    path = tmp_path / "rows.npz"
    words = ("generate", "Anna", *DEMO, *ENDLESS, "--reduce", "mean", "-o", str(path))
    with Terminal(*words) as terminal:
        terminal.until(re.escape(beginning))
        terminal.type(b"\x03")
        left = terminal.rest()
        assert terminal.process.wait(WITHIN_S) == 130
    assert b"Traceback" not in left
    with np.load(path) as rows:
        assert rows["attention_00000"].shape == rows["prompt_ids"].shape


def test_interrupted_conversation_of_a_pipe_ends():
    process = subprocess.Popen(
        [*PROGRAM, "chat", *DEMO, *ENDLESS],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Tell me a story\n")
    process.stdin.flush()
    assert process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    _, problems = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130
    assert b"Traceback" not in problems


def test_reader_that_leaves_ends_the_program_quietly():
    process: Any = subprocess.Popen(
        [*PROGRAM, "generate", "Anna", *DEMO, *ENDLESS],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.read(1)
    process.stdout.close()
    problems = process.stderr.read()
    process.stderr.close()
    assert (process.wait(WITHIN_S), problems) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("words", [("-h",), ("tokenize", "--demo", "Anna")])
def test_full_disk_behind_stdout_is_one_line(words: tuple[str, ...]):
    done = run(*words, before="exec >/dev/full;")
    assert (done.returncode, done.stderr) == (1, b"error: No space left on device\n")


def test_closed_streams_are_no_problem(tmp_path: Path):
    path = tmp_path / "rows.npz"
    words = ("generate", "Anna", *DEMO, "-n", "2", "-o", str(path))
    done = run(*words, before="exec <&- >&- 2>&-;")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert path.exists()


def test_locale_without_utf8_shows_escapes_and_takes_texts():
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run("tokenize", "--demo", "--json", "Zo\u00eb", env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b'"\\\\xc3", "\\\\xab"' in done.stdout
    env |= {"PYTHONIOENCODING": "ascii"}
    done = run("attend", "--demo", "-", stdin="Zo\u00eb".encode(), env=env)
    assert done.returncode == 0
    assert b"\\ufffd" in done.stdout
    done.stdout.decode("ascii")
