"""Mods by name from a folder: what is a mod, what is refused, when a file is loaded again."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from kqview.errors import ModFileError, RequestError
from kqview.mods import FunctionMod, Mod
from kqview.mods.folder import ModFolder

if TYPE_CHECKING:
    from pathlib import Path

FUNCTION = '''"""Does nothing.

Really.
"""
import kqview

@kqview.mod
def quiet(event, actions, tokenizer):
    return None
'''
CLASS = """
from kqview.mods import Mod

class Ban(Mod):
    def __init__(self, word="no"):
        if not word:
            raise ValueError("word is empty")
        self.word = word
"""


def folder(path: Path, **files: str) -> ModFolder:
    for name, text in files.items():
        (path / f"{name}.py").write_text(text)
    return ModFolder(path)


def test_function_and_class_are_mods_of_their_file(tmp_path: Path):
    mods = folder(tmp_path, quiet=FUNCTION, ban=CLASS)
    assert isinstance(mods.get("quiet"), FunctionMod)
    made: Any = mods.get("ban", {"word": "never"})
    assert isinstance(made, Mod)
    assert made.word == "never"
    assert mods.get("ban") is not mods.get("ban")
    infos = mods.list()
    assert [(one.name, one.summary, one.error) for one in infos] == [
        ("ban", "", None),
        ("quiet", "Does nothing.", None),
    ]


def test_make_makes_the_mod_of_the_options(tmp_path: Path):
    text = CLASS + "def make(**options):\n    return Ban(**options)\n"
    made: Any = folder(tmp_path, any=text).get("any", {"word": "a"})
    assert made.word == "a"


def test_of_several_mods_the_one_with_the_files_name_is_taken(tmp_path: Path):
    text = FUNCTION + "@kqview.mod\ndef other(event):\n    return None\n"
    mods = folder(tmp_path, other=text, third=text)
    assert mods.get("other").name == "other"
    with pytest.raises(ModFileError, match="third"):
        mods.get("third")


def test_imported_mods_are_not_those_of_the_file(tmp_path: Path):
    text = "from kqview.mods import Mod\n" + FUNCTION
    assert folder(tmp_path, a=text).get("a").name == "quiet"


@pytest.mark.parametrize(
    "name",
    ["", "..", "../quiet", "/etc/passwd", "quiet.py", ".hidden", "quiet\n", "a" * 100, "nothing"],
)
def test_name_that_is_no_mod_is_refused_and_those_that_are_are_named(tmp_path: Path, name: str):
    mods = folder(tmp_path, quiet=FUNCTION)
    (tmp_path / ".hidden.py").write_text("1/0")
    with pytest.raises(RequestError, match="quiet") as caught:
        mods.get(name)
    assert caught.value.parameter == "mods"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("quiet", {"word": "a"}, "takes no options"),
        ("ban", {"other": "a"}, "other"),
        ("ban", {"word": ""}, "word is empty"),
    ],
)
def test_options_that_a_mod_does_not_take_are_refused(
    tmp_path: Path, name: str, options: dict[str, Any], said: str
):
    mods = folder(tmp_path, quiet=FUNCTION, ban=CLASS)
    with pytest.raises(RequestError, match=said) as caught:
        mods.get(name, options)
    assert caught.value.parameter == "mods"


@pytest.mark.parametrize(
    "text",
    [
        "1/0",
        "def",
        "import sys\nsys.exit(3)",
        "x = 1",
        "import nothing_of_this_name",
        "def make():\n    return 5",
        "def make():\n    raise KeyError(1)",
    ],
)
def test_broken_file_is_an_error_of_the_server_and_named_in_the_log(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
):
    mods = folder(tmp_path, broken=text, quiet=FUNCTION)
    with caplog.at_level(logging.ERROR, "kqview.mods"), pytest.raises(ModFileError, match="broken"):
        mods.get("broken")
    assert "broken" in caplog.text
    assert mods.get("quiet").name == "quiet"


def test_file_is_loaded_once_and_again_when_it_changed(tmp_path: Path):
    count = "import kqview.errors as e\ne.n_loads = getattr(e, 'n_loads', 0) + 1\n"
    import kqview.errors

    mods = folder(tmp_path, quiet=count + FUNCTION)
    try:
        first = mods.get("quiet")
        assert mods.get("quiet") is first
        path = tmp_path / "quiet.py"
        path.write_text("1/0")
        with pytest.raises(ModFileError):
            mods.get("quiet")
        path.write_text(count + FUNCTION)
        os.utime(path, ns=(time.time_ns(), time.time_ns() + 1))
        assert mods.get("quiet") is not first
        assert kqview.errors.n_loads == 2  # pyright: ignore
        path.unlink()
        with pytest.raises(RequestError, match="no mods"):
            mods.get("quiet")
    finally:
        del kqview.errors.n_loads  # pyright: ignore


def test_folder_that_is_missing_is_refused(tmp_path: Path):
    with pytest.raises(RequestError, match="not a folder"):
        ModFolder(tmp_path / "none")
