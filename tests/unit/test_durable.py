"""Files written whole: rights, links, full disks, leftovers, lines."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from kqview import durable
from kqview.durable import WholeFile, append_line, move, remove_leftovers, write_whole

if TYPE_CHECKING:
    from pathlib import Path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask_022() -> object:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask_022")
def test_rights_are_those_of_the_old_file_or_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    write_whole(path, b"new")
    assert mode_of(path) == 0o644
    path.chmod(0o664)
    write_whole(path, b"newer")
    assert mode_of(path) == 0o664
    write_whole(path, b"mine", is_private=True)
    assert mode_of(path) == 0o600
    write_whole(tmp_path / "other", b"mine", is_private=True)
    assert mode_of(tmp_path / "other") == 0o600


def test_link_is_followed_and_stays_one(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target = tmp_path / "far" / "rows"
    target.write_bytes(b"old")
    for name, pointed_at in (("link", target), ("relative", "far/rows"), ("new", "far/none")):
        link = tmp_path / name
        link.symlink_to(pointed_at)
        write_whole(link, name.encode())
        assert link.is_symlink()
        assert link.read_bytes() == name.encode()
    assert sorted(os.listdir(tmp_path / "far")) == ["none", "rows"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match=r"symbolic links.*loop"):
        write_whole(tmp_path / "loop", b"x")


def test_other_names_of_the_old_file_keep_it(tmp_path: Path) -> None:
    path, other = tmp_path / "rows", tmp_path / "other"
    path.write_bytes(b"old")
    other.hardlink_to(path)
    write_whole(path, b"new")
    assert (path.read_bytes(), other.read_bytes()) == (b"new", b"old")


def test_file_that_may_not_be_written_to_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"old")
    path.chmod(0o444)
    if os.geteuid() == 0:  # who may write to it anyway
        monkeypatch.setattr(durable.os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="rows"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["rows"]


def test_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "none" / "rows", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / ("x" * 300), "name too long"),
    ):
        with pytest.raises(OSError, match=reason) as caught:
            write_whole(path, b"x")
        assert caught.value.filename == str(path)
        assert caught.value.filename2 is None
    assert os.listdir(tmp_path) == []


def test_device_and_pipe_are_written_to_directly(tmp_path: Path) -> None:
    write_whole(os.devnull, b"x" * 100_000)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_whole(pipe, b"through ", b"the pipe")
    reader.join(timeout=30)
    assert read == [b"through the pipe"]
    with pytest.raises(OSError, match=r"No space left.*nothing was changed.*/dev/full"):
        write_whole("/dev/full", b"x")


def test_nothing_is_written_after_a_file_was_discarded(tmp_path: Path) -> None:
    # What the stream still holds must not go into another file that has got its number.
    file = WholeFile(tmp_path / "rows")
    file.stream.write(b"secret")
    number = file._raw.fileno()
    file.discard()
    file.discard()
    with (tmp_path / "other").open("wb") as other:
        assert other.fileno() == number
        del file
    assert (tmp_path / "other").read_bytes() == b""
    assert os.listdir(tmp_path) == ["other"]


def test_exception_in_the_block_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"old")

    def write_and_stop() -> None:
        with WholeFile(path) as file:
            file.stream.write(b"new" * 100_000)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["rows"]


def test_file_size_limit_leaves_the_old_file(tmp_path: Path) -> None:
    # As a full disk, for who cannot make one: the kernel refuses to let the file grow.
    script = """
import resource, sys
from kqview.durable import append_line, write_whole
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for call in (lambda p: write_whole(p, b"x" * 200_000), lambda p: append_line(p, "x" * 200_000)):
    try:
        call(sys.argv[1])
    except OSError as error:
        print(error)
"""
    path = tmp_path / "rows"
    path.write_bytes(b"old\n")
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "File too large; nothing was changed" in line
        assert line.endswith(f"{str(path)!r}")
    assert path.read_bytes() == b"old\n"
    assert os.listdir(tmp_path) == ["rows"]


def test_leftovers_go_and_what_is_being_written_stays(tmp_path: Path) -> None:
    dead = [tmp_path / f".kqview-{i}.part" for i in range(3)]
    for path in dead:
        path.write_bytes(b"x")
    (tmp_path / ".kqview-link.part").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").write_bytes(b"x")
    with WholeFile(tmp_path / "rows") as file:
        file.stream.write(b"alive")
        assert remove_leftovers(tmp_path) == 3
    assert (tmp_path / "rows").read_bytes() == b"alive"
    assert sorted(os.listdir(tmp_path)) == [".kqview-link.part", "kept", "rows"]
    assert remove_leftovers(tmp_path / "none") == 0


def test_writer_that_was_taken_for_a_leftover_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Between making its file and locking it another process cleans up.
    real = durable._lock
    n_cleaned = 0

    def clean_first(handle: int) -> None:
        nonlocal n_cleaned
        if n_cleaned == 0:
            n_cleaned = remove_leftovers(tmp_path)
        real(handle)

    monkeypatch.setattr(durable, "_lock", clean_first)
    write_whole(tmp_path / "rows", b"alive")
    assert n_cleaned == 1
    assert (tmp_path / "rows").read_bytes() == b"alive"
    assert os.listdir(tmp_path) == ["rows"]


# ---- lines


def test_line_ends_the_one_that_a_dead_process_left(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_line(path, "a")
    append_line(path, "b")
    with path.open("ab") as file:
        file.write(b'{"cut')
    append_line(path, "c")
    assert path.read_text() == 'a\nb\n{"cut\nc\n'


def test_line_that_does_not_fit_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    append_line(path, "a")
    real = os.write

    def write_half(handle: int, data: memoryview) -> int:
        if len(data) < 5:
            raise OSError(28, "No space left on device")
        return real(handle, data[: len(data) // 2])

    monkeypatch.setattr(durable.os, "write", write_half)
    with pytest.raises(OSError, match="No space left"):
        append_line(path, "b" * 100)
    assert path.read_text() == "a\n"


def test_lines_of_many_writers_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [str(i) * 1000 for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda line: append_line(path, line), lines * 10))
    assert sorted(path.read_text().splitlines()) == sorted(lines * 10)


def test_file_is_moved_over_another_or_stays(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    target = tmp_path / "to" / "b"
    target.write_bytes(b"old")
    (tmp_path / "a").write_bytes(b"new")
    move(tmp_path / "a", target)
    assert target.read_bytes() == b"new"
    assert not (tmp_path / "a").exists()
    with pytest.raises(FileNotFoundError, match="missing"):
        move(tmp_path / "missing", target)
    assert target.read_bytes() == b"new"
