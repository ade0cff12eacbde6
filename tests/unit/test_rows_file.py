"""RowsFile: the file of a generation's rows is whole or not there, whatever happens on the way."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, durable
from kqview.cli.rows_file import RowsFile

if TYPE_CHECKING:
    from pathlib import Path

ENGINE: Any = SimpleNamespace(model=SimpleNamespace(attention_layers=(0, 1)))


def token(index: int) -> Any:
    rows = np.full((2, 4, 1000 + index), index, np.float32)
    return SimpleNamespace(id=index, text=f"t{index}", index=index, attention=rows)


def rows_file(path: Path) -> RowsFile:
    return RowsFile(path, ENGINE, Capture("probs"), [1, 2, 3])


def write_until(path: Path, n_tokens: int, error: BaseException | None = None) -> None:
    with rows_file(path) as file:
        for i in range(n_tokens):
            file.add(token(i))
        if error is not None:
            raise error


def ids_in(path: Path) -> list[int]:
    with np.load(path) as rows:
        assert all(rows[name] is not None for name in rows.files)
        return rows["ids"].tolist()


def test_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    write_until(path, 2)
    before = path.read_bytes()
    with rows_file(path) as file:
        for i in range(3):
            file.add(token(i))
            assert path.read_bytes() == before
    assert ids_in(path) == [0, 1, 2]
    assert os.listdir(tmp_path) == ["rows.npz"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BrokenPipeError(32, "x"), ValueError()])
def test_interruption_keeps_the_rows_before_it(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "rows.npz"
    write_until(path, 2)
    with pytest.raises(type(error)):
        write_until(path, 0, error)
    assert ids_in(path) == [0, 1]  # no row came: nothing worth the old file
    with pytest.raises(type(error)):
        write_until(path, 1, error)
    assert ids_in(path) == [0]
    assert os.listdir(tmp_path) == ["rows.npz"]


def test_disk_that_is_full_at_any_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.npz"
    write_until(path, 1)
    before = path.read_bytes()
    real = os.write
    n_left = 10**9

    def write(handle: int, data: Any) -> int:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise OSError(28, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr(durable.os, "write", write)
    n_left = n_writes = 0
    while True:
        with contextlib.suppress(OSError):
            write_until(path, 2)
            break
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["rows.npz"]
        n_writes += 1
        n_left = n_writes
    gc.collect()  # nothing that was given up writes or complains when it is collected
    assert n_writes > 3
    assert ids_in(path) == [0, 1]


def test_leftover_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".kqview-0123456789abcdef.part").write_bytes(b"x")
    write_until(tmp_path / "rows.npz", 1)
    assert os.listdir(tmp_path) == ["rows.npz"]


def test_rows_go_through_a_pipe() -> None:
    script = """
import sys
from pathlib import Path
from tests.unit.test_rows_file import write_until
write_until(Path("/dev/stdout"), 2)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    with np.load(io.BytesIO(done.stdout)) as rows:
        assert rows["ids"].tolist() == [0, 1]


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
from kqview.cli.main import app
app(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("arguments", "n_tokens"),
    [
        (["generate", "--demo", "Anna has", "--capture", "probs", "--save"], 8),
        (["demo", "--runs", "1", "--png"], 4),
    ],
    ids=["generate", "demo"],
)
def test_command_on_a_full_disk_says_so_and_leaves_the_old_file(
    tmp_path: Path, arguments: list[str], n_tokens: int
) -> None:
    path = tmp_path / "old.png"
    path.write_bytes(b"old")
    command = [sys.executable, "-c", LIMITED, *arguments, str(path), "-n", str(n_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"error: {path}: File too large; nothing was changed, make room for it"
    )
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["old.png"]
