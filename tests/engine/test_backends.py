"""Backends in packages of their own: which are found, and what is said of those that do not fit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kqview import Engine, _core, backends, errors, system_info

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BACKEND = """
static void *start(void *log, void *abort) {{ return 0; }}
const struct {{ const char *version, *commit; void *(*start)(void *, void *); }}
    kqview_backend = {{"{version}", "{commit}", start}};
"""
NONE = "int other = 1;"
BUILD = _core.build_info()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an installed kqview-vulkan, which has no library yet; no other is installed."""
    folder = tmp_path / "kqview_vulkan"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(backends, "_PACKAGES", ("kqview_vulkan",))
    backends.load.cache_clear()
    yield folder
    backends.load.cache_clear()


def compiled(folder: Path, text: str, *options: str) -> None:
    """Put a library of this C into the package."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (folder / "source.c").write_text(text, "utf-8")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", folder / "backend.so", folder / "source.c", *options],
        check=True,
    )


def problem() -> str:
    """Why the package is not used."""
    text = system_info()["backend_packages"]["kqview_vulkan"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(
    ("version", "commit"), [("0.0.1", BUILD["llama_cpp_commit"]), (BUILD["kqview_version"], "1111")]
)
def test_one_for_another_commit_is_refused_by_name(
    package: Path, version: str, commit: str
) -> None:
    compiled(package, BACKEND.format(version=version, commit=commit))
    with pytest.raises(errors.UnsupportedModel) as caught:
        Engine.demo()
    here = f"kqview {BUILD['kqview_version']} with llama.cpp {BUILD['llama_cpp_commit']}"
    assert str(caught.value) == (
        f"{package}/backend.so is for kqview {version} with llama.cpp {commit}, "
        f"and this is {here}; install its package in this version, or uninstall it"
    )
    with pytest.raises(errors.UnsupportedModel, match="uninstall it"):
        system_info()


def test_without_a_device_models_run_on_the_cpu(
    package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version, commit = BUILD["kqview_version"], BUILD["llama_cpp_commit"]
    compiled(package, BACKEND.format(version=version, commit=commit))
    with Engine.demo() as engine:
        assert len(list(engine.generate("a", max_tokens=1, ignore_eos=True))) == 1
    assert "kqview_vulkan is not used" in caplog.text
    assert problem() == f"{package}/backend.so finds no device"


def test_without_a_library_of_the_driver_models_run_on_the_cpu(
    package: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = tmp_path / "libdriver.so.1"
    compiled(package, NONE, "-Wl,-soname,libdriver.so.1")
    (package / "backend.so").rename(driver)
    compiled(package, NONE, "-Wl,--no-as-needed", str(driver))
    driver.unlink()
    with Engine.demo() as engine:
        assert len(list(engine.generate("a", max_tokens=1, ignore_eos=True))) == 1
    assert "kqview_vulkan is not used: libdriver.so.1" in caplog.text
    assert problem().startswith("libdriver.so.1")


def test_a_file_that_is_no_library_says_so(package: Path) -> None:
    (package / "backend.so").write_text("no library\n" * 100, "utf-8")
    assert f"{package}/backend.so" in problem()


def test_a_library_of_something_else_is_none(package: Path) -> None:
    compiled(package, NONE)
    assert problem() == f"{package}/backend.so is no backend of kqview"


def test_the_library_is_named_as_the_system_names_them(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "LIBRARY_SUFFIX", ".dll")
    assert f"{package}/backend.dll" in problem()
