"""vendor/fetch.py: the pinned source arrives whole and verified, or one line says why not.

No network: archives of a few bytes are made on the spot, each with a lock file that fits it. pip
is a stand-in found first through PYTHONPATH, or the real one with an index-free configuration.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.pinned_sdist import FETCH, REQUIRED, ROOT, TREE, Pin, make_pin, write_sdist

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.full

METADATA = b"Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 0.3.36\n"
PYPROJECT = b'[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n'
BACKEND = b"""
import pathlib
def prepare_metadata_for_build_wheel(folder, settings=None):
    name = "llama_cpp_python-0.3.36.dist-info"
    (pathlib.Path(folder) / name).mkdir()
    (pathlib.Path(folder) / name / "METADATA").write_text(
        "Metadata-Version: 2.1\\nName: llama-cpp-python\\nVersion: 0.3.36\\n")
    return name
def build_wheel(folder, settings=None, metadata=None):
    raise RuntimeError("a download builds nothing")
"""


@pytest.fixture
def pin(tmp_path: Path) -> Pin:
    return make_pin(tmp_path)


@pytest.fixture
def fetch(pin: Pin, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module itself, for faults that only an injected function shows."""
    spec = importlib.util.spec_from_file_location("kqview_vendor_fetch", FETCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.setenv("KQVIEW_CACHE_DIR", str(pin.cache))
    monkeypatch.delenv("KQVIEW_LLAMA_CPP_DIR", raising=False)
    spec.loader.exec_module(module)
    return module


def test_fetch_prints_only_the_path_and_extracts_only_what_the_lock_wants(pin: Pin) -> None:
    files = {f"{ROOT}/{name}": content for name, content in TREE.items()}
    files |= {f"{ROOT}/src/run.sh": b"", f"{ROOT}/src/a.png": b"x", f"{ROOT}/docs/a": b"x"}
    pin.write(files, n=5)
    status, out, err = pin.run("--print-path")
    assert (status, out) == (0, f"{pin.tree}\n"), err
    found = {
        str(path.relative_to(pin.tree)): path.read_bytes()
        for path in pin.tree.rglob("*")
        if path.is_file() and path.name != ".kqview-complete"
    }
    assert found == {**TREE, "src/run.sh": b""}
    assert os.access(pin.tree / "src/run.sh", os.X_OK)
    assert pin.partials() == []


def test_second_fetch_does_not_call_pip(pin: Pin) -> None:
    assert pin.run()[0] == 0
    assert pin.run() == (0, f"{pin.tree}\n", "")
    assert len(pin.pip_calls()) == 1


def test_backend_unfit_for_the_archive_makes_pip_isolate(pin: Pin, tmp_path: Path) -> None:
    (tmp_path / "shim" / "scikit_build_core").mkdir()
    (tmp_path / "shim" / "scikit_build_core" / "__init__.py").touch()
    assert pin.run(fake_pip="metadata")[0] == 0
    assert ["--no-build-isolation" in call for call in pin.pip_calls()] == [True, False]


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")
@pytest.mark.parametrize("case", ["served", "tampered", "absent"])
def test_real_pip_without_an_index_serves_or_refuses(pin: Pin, tmp_path: Path, case: str) -> None:
    base = ROOT.split("/")[0]
    files = {f"{ROOT}/{name}": content for name, content in TREE.items()}
    files |= {f"{base}/PKG-INFO": METADATA, f"{base}/pyproject.toml": PYPROJECT}
    pin.write(files | {f"{base}/own.py": BACKEND})
    links = tmp_path / "links"
    links.mkdir()
    if case != "absent":
        served = pin.sdist.rename(links / pin.sdist.name)
        if case == "tampered":
            write_sdist(served, files | {f"{base}/own.py": BACKEND + b"#"})
    pin.env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links), "PIP_CONFIG_FILE": os.devnull}
    pin.env |= {"PIP_NO_CACHE_DIR": "1"}
    del pin.env["PYTHONPATH"]
    if case == "served":
        status, out, err = pin.run()
        assert (status, out) == (0, f"{pin.tree}\n"), err
        return
    message = pin.fails()
    if case == "tampered":
        got = hashlib.sha256(next(links.iterdir()).read_bytes()).hexdigest()
        assert f"llama-cpp-python 0.3.36 has sha256 {got}, expected" in message
    else:
        assert "No matching distribution found for llama-cpp-python==0.3.36" in message
        assert "--sdist" in message


def test_python_without_pip_is_told_to_get_it(pin: Pin) -> None:
    del pin.env["PYTHONPATH"]
    done = subprocess.run(
        [sys.executable, "-S", str(FETCH), "--lock", str(pin.lock)],
        env=pin.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    message = pin.only_error(done.stderr)
    assert "needs pip" in message
    assert "ensurepip" in message


def test_pip_failure_shows_pips_error_line(pin: Pin) -> None:
    message = pin.fails(fake_pip="offline")
    assert "llama-cpp-python 0.3.36: ERROR: No matching distribution" in message
    assert "KQVIEW_LLAMA_CPP_DIR" in message


def test_pip_that_brings_nothing_is_an_error(pin: Pin) -> None:
    assert "0 archives after the download, expected 1" in pin.fails(fake_pip="empty")


@pytest.mark.parametrize("args", [(), ("--sdist",)])
def test_wrong_archive_is_refused_with_both_hashes(pin: Pin, args: tuple[str, ...]) -> None:
    expected = hashlib.sha256(pin.sdist.read_bytes()).hexdigest()
    pin.sdist.write_bytes(b"another")
    message = pin.fails(*args, *([str(pin.sdist)] if args else []))
    assert hashlib.sha256(b"another").hexdigest() in message
    assert f"expected {expected}" in message


def test_sdist_option_fetches_without_pip(pin: Pin) -> None:
    assert pin.run("--sdist", str(pin.sdist))[:2] == (0, f"{pin.tree}\n")
    assert pin.pip_calls() == []


def test_absent_sdist_file_is_an_error(pin: Pin, tmp_path: Path) -> None:
    assert "No such file" in pin.fails("--sdist", str(tmp_path / "none.tar.gz"))


def test_archive_that_is_no_tar_is_an_error(pin: Pin) -> None:
    right = hashlib.sha256(pin.sdist.read_bytes()).hexdigest()
    pin.sdist.write_bytes(b"not a tar")
    text = pin.lock.read_text().replace(right, hashlib.sha256(b"not a tar").hexdigest())
    pin.lock.write_text(text)
    assert "is damaged" in pin.fails()


def test_little_free_space_is_refused_before_the_download(
    pin: Pin, fetch: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch, "free_bytes", lambda path: 5000 + 4 * 4096 - 1)
    assert fetch.main(["--lock", str(pin.lock)]) == 1
    message = pin.only_error(capsys.readouterr().err)
    assert f"{pin.cache} has " in message
    assert "KQVIEW_CACHE_DIR" in message
    monkeypatch.setattr(fetch, "free_bytes", lambda path: 5000 + 4 * 4096)
    monkeypatch.setattr(fetch, "download", lambda lock, work: pin.sdist)
    assert fetch.main(["--lock", str(pin.lock)]) == 0


@pytest.mark.parametrize(
    ("code", "said"),
    [(errno.ENOSPC, "disk full"), (errno.EROFS, "is not writable"), (errno.EIO, "5] boom")],
)
def test_write_error_while_extracting_is_one_line(
    pin: Pin,
    fetch: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    said: str,
) -> None:
    def refuse(source: object, sink: object) -> None:
        raise OSError(code, "5] boom")

    monkeypatch.setattr(fetch.shutil, "copyfileobj", refuse)
    assert fetch.main(["--lock", str(pin.lock), "--sdist", str(pin.sdist)]) == 1
    message = pin.only_error(capsys.readouterr().err)
    assert said in message
    assert "KQVIEW_CACHE_DIR" in message


def test_disk_filled_by_pip_is_reported_as_disk_full(pin: Pin) -> None:
    assert f"disk full at {pin.cache}" in pin.fails(fake_pip="full")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_cache_is_an_error(pin: Pin) -> None:
    pin.cache.mkdir(mode=0o500)
    assert "is not writable" in pin.fails()


def test_cache_below_a_file_is_an_error(pin: Pin) -> None:
    pin.cache.write_text("")
    assert "KQVIEW_CACHE_DIR" in pin.fails()


def test_complete_entry_is_used_without_taking_the_lock(pin: Pin) -> None:
    # What a read-only cache of the machine, filled by its administrator, looks like.
    assert pin.run()[0] == 0
    (pin.cache / "fetch.lock").unlink()
    assert pin.run()[:2] == (0, f"{pin.tree}\n")
    assert not (pin.cache / "fetch.lock").exists()


def test_archive_without_llama_cpp_is_an_unknown_layout(pin: Pin) -> None:
    pin.write({"llama_cpp_python-0.3.36/README.md": b""})
    assert f"unknown layout: {pin.sdist.name} has no {ROOT}/CMakeLists.txt" in pin.fails()


def test_archive_with_other_files_than_the_lock_is_an_unknown_layout(pin: Pin) -> None:
    pin.write({f"{ROOT}/{name}": content for name, content in TREE.items()}, n=5)
    assert "4 files of 28 bytes, the lock says 5 of 28" in pin.fails()


@pytest.mark.parametrize(
    "name",
    ["../evil", "/tmp/kqview-evil", f"{ROOT}/src/../../../../../evil", "C:\\evil", "a\\..\\b"],
)
def test_archive_with_a_climbing_path_is_refused(pin: Pin, tmp_path: Path, name: str) -> None:
    pin.write({name: b"evil", **{f"{ROOT}/{path}": data for path, data in TREE.items()}})
    assert "points outside the archive" in pin.fails()
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_link_in_the_archive_is_not_created(pin: Pin, tmp_path: Path, kind: bytes) -> None:
    link = tarfile.TarInfo(f"{ROOT}/src")
    link.type, link.linkname = kind, str(tmp_path)
    inner = tarfile.TarInfo(f"{ROOT}/src/link")
    inner.type, inner.linkname = kind, "/etc/passwd"
    pin.write({f"{ROOT}/{name}": content for name, content in TREE.items()}, link, inner)
    assert pin.run()[0] == 0
    assert (pin.tree / "src").is_dir()
    assert not (pin.tree / "src").is_symlink()
    assert [path.name for path in (pin.tree / "src").iterdir()] == ["llama.cpp"]
    assert not (tmp_path / "llama.cpp").exists()


def test_two_builds_at_once_download_once(pin: Pin) -> None:
    both = [pin.start(fake_pip="slow") for _ in range(2)]
    results = [process.communicate(timeout=150) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [out for out, _ in results] == [f"{pin.tree}\n"] * 2
    assert len(pin.pip_calls()) == 1
    assert sum("another build is fetching" in err for _, err in results) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_fetch_leaves_nothing_usable_and_the_next_one_cleans_up(
    pin: Pin, how: signal.Signals
) -> None:
    process = pin.start(fake_pip="hang")
    deadline_s = time.monotonic() + 150
    while not list(pin.cache.glob("partial-*/download/half.tar.gz")):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    os.killpg(process.pid, how)
    _, err = process.communicate(timeout=150)
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    assert "Traceback" not in err
    assert bool(pin.partials()) == (how != signal.SIGINT)
    assert pin.run("--where") == (1, f"{pin.tree}\n", "")
    assert pin.run()[:2] == (0, f"{pin.tree}\n")
    assert pin.partials() == []


@pytest.mark.parametrize("lost", [".kqview-complete", "include/llama.h"])
def test_damaged_entry_is_made_again(pin: Pin, lost: str) -> None:
    assert pin.run()[0] == 0
    (pin.tree / lost).unlink()
    assert pin.run()[0] == 0
    assert (pin.tree / lost).exists()
    assert len(pin.pip_calls()) == 2


def test_where_is_zero_only_for_a_complete_entry(pin: Pin) -> None:
    assert pin.run("--where") == (1, f"{pin.tree}\n", "")
    assert pin.run()[0] == 0
    assert pin.run("--where") == (0, f"{pin.tree}\n", "")


def test_lock_hash_is_the_one_in_the_folder_name(pin: Pin) -> None:
    assert pin.run("--lock-hash") == (0, f"{pin.tree.name.rsplit('-')[-1]}\n", "")


def test_lock_without_an_entry_is_an_error(pin: Pin) -> None:
    pin.lock.write_text('package = "llama-cpp-python"\n')
    assert str(pin.lock) in pin.fails()


@pytest.mark.parametrize("by", ["option", "environment"])
def test_own_checkout_is_used_as_it_is(pin: Pin, tmp_path: Path, by: str) -> None:
    checkout = tmp_path / "fork"
    args = ["--source-dir", str(checkout)] if by == "option" else []
    pin.env |= {} if args else {"KQVIEW_LLAMA_CPP_DIR": str(checkout)}
    assert "has no CMakeLists.txt" in pin.fails(*args)
    for name in REQUIRED:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    assert pin.run(*args) == (0, f"{checkout}\n", "")
    assert not pin.cache.exists()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"KQVIEW_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/kqview"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/kqview"),
        ({}, "/home/someone/.cache/kqview"),
    ],
)
def test_cache_root_follows_the_environment(
    fetch: ModuleType, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert fetch.cache_root(env) == Path(expected)


def test_lock_of_this_repository_wants_what_the_build_and_the_tests_read(fetch: ModuleType) -> None:
    lock = fetch.read_lock(fetch.LOCK_FILE)
    assert (len(lock.commit), len(lock.sha256)) == (40, 64)
    for name in (*lock.required, "src/llama-ext.h", "models/ggml-vocab-qwen2.gguf", "LICENSE"):
        assert lock.wants(name), name
    assert not lock.wants("docs/build.md")
