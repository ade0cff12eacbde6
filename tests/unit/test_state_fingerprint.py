"""Fingerprints of models: every byte of every file counts, and each file is read once."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from kqview import errors
from kqview.state import fingerprint
from kqview.state.fingerprint import ModelFiles

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def of(path: Path, adapters: Sequence[tuple[str, float]] = ()) -> str:
    return ModelFiles(str(path), adapters).fingerprint()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(fingerprint, "CHUNK_BYTES", 1000)
    return 1000


def age(path: Path) -> None:
    """Let nothing about *path* look as if it were still being written."""
    os.utime(path, ns=(10**18, 10**18))


def test_every_byte_counts(tmp_path: Path, small_chunks: int) -> None:
    path = tmp_path / "model"
    n = 3 * small_chunks + 1
    path.write_bytes(bytes(n))
    seen = {of(path)}
    places = (0, 1, 999, 1000, 1001, 1999, 2000, 2999, 3000)
    for at in places:
        data = bytearray(n)
        data[at] = 1
        path.write_bytes(data)
        seen.add(of(path))
    for n_other in (0, n - 1, n + 1):
        path.write_bytes(bytes(n_other))
        seen.add(of(path))
    assert len(seen) == 1 + len(places) + 3


def test_change_between_the_samples_of_version_1_is_found(tmp_path: Path) -> None:
    # Version 1 read 64 KiB at each of 64 places of these 20 MiB: nothing from 65,536 to 331,841.
    path = tmp_path / "model"
    data = bytearray(20 << 20)
    path.write_bytes(data)
    before = ModelFiles(str(path), [])
    whole, sampled = before.fingerprint(), before.sampled_fingerprint()
    data[70_000:330_000] = b"\1" * 260_000
    path.write_bytes(data)
    after = ModelFiles(str(path), [])
    assert after.sampled_fingerprint() == sampled
    assert after.fingerprint() != whole


def test_adapters_scales_and_their_order_count(tmp_path: Path) -> None:
    model, a, b = (tmp_path / name for name in "mab")
    for path in (model, a, b):
        path.write_bytes(path.name.encode())
    adapters: list[list[tuple[str, float]]] = [
        [],
        [(str(a), 1.0)],
        [(str(a), 0.5)],
        [(str(b), 1.0)],
        [(str(a), 1.0), (str(b), 1.0)],
        [(str(b), 1.0), (str(a), 1.0)],
    ]
    assert len({of(model, pairs) for pairs in adapters}) == len(adapters)


def test_every_part_of_a_split_model_counts(tmp_path: Path) -> None:
    parts = [tmp_path / f"x-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts:
        part.write_bytes(b"weights")
    seen = {of(parts[0])}
    for part in parts:
        part.write_bytes(b"WEIGHTS")
        seen.add(of(parts[0]))
    assert len(seen) == 4
    # What only looks like one is a file by itself.
    alone = tmp_path / "y-00001-of-00002.gguf"
    alone.write_bytes(b"weights")
    assert of(alone) not in seen


def test_unchanged_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_chunks: int
) -> None:
    path, link = tmp_path / "model", tmp_path / "link"
    path.write_bytes(bytes(5 * small_chunks))
    link.hardlink_to(path)
    monkeypatch.setattr(fingerprint, "_CLOCK_STEP_NS", -(10**18))  # as if it were written long ago
    n_read: list[int] = []
    real = os.pread
    monkeypatch.setattr(fingerprint.os, "pread", lambda *args: (n_read.append(1), real(*args))[1])
    threads = [threading.Thread(target=of, args=(p,)) for p in (path, link, path)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(n_read) == 5
    age(path)  # another time of change, so perhaps another content
    of(path)
    assert len(n_read) == 10


def test_file_that_was_just_written_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two changes within one step of the file system's clock would look like one file.
    path = tmp_path / "model"
    path.write_bytes(b"a")
    status = path.stat()
    first = of(path)
    path.write_bytes(b"b")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    monkeypatch.setattr(
        fingerprint.FileIdentity, "of", lambda _: fingerprint.FileIdentity(*[1] * 5)
    )
    assert of(path) != first


def test_file_replaced_since_it_was_opened_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"first")
    files = ModelFiles(str(path), [])
    (tmp_path / "other").write_bytes(b"other")
    os.replace(tmp_path / "other", path)
    with pytest.raises(errors.StateError, match="open the engine again"):
        files.fingerprint()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        files.fingerprint()


def test_new_link_or_rights_of_the_file_are_no_change(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"first")
    files = ModelFiles(str(path), [])
    expected = files.fingerprint()
    path.chmod(0o600)
    (tmp_path / "link").hardlink_to(path)
    assert files.fingerprint() == expected


def test_file_that_shrinks_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_chunks: int
) -> None:
    path = tmp_path / "model"
    path.write_bytes(bytes(4 * small_chunks))
    real = os.pread

    def cut_first(*args: int) -> bytes:
        os.truncate(path, 10)
        return real(*args)

    monkeypatch.setattr(fingerprint.os, "pread", cut_first)
    with pytest.raises(errors.StateError, match="try again"):
        of(path)


def test_relative_paths_are_those_of_the_moment_of_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").write_bytes(b"weights")
    (tmp_path / "lora").write_bytes(b"adapter")
    monkeypatch.chdir(tmp_path)
    files = ModelFiles("model", [("lora", 0.5)])
    monkeypatch.chdir("/")
    adapters = [(str(tmp_path / "lora"), 0.5)]
    assert files.fingerprint() == of(tmp_path / "model", adapters)
    assert len(files.sampled_fingerprint()) == 64
