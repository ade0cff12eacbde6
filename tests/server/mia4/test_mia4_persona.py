"""Persona: its front matter, and that it changes with its file and stays when that is broken."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

import pytest

from kqview.server.apps.mia4.passport import hash_of
from kqview.server.apps.mia4.persona import MOST_BYTES, PersonaFile, parse

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("source", "text", "version"),
    [
        ("You teach.\n", "You teach.", 1),
        ("version: 7\nYou teach.", "You teach.", 7),
        ("Version : 7\r\n\r\nYou teach.\r\nBe kind.\r\n", "You teach.\nBe kind.", 7),
        ("---\ntags: [a]\nversion: '12'  # third try\n---\n\nYou teach.", "You teach.", 12),
        ("\ufeff---\ntags: [a]\n--- \nYou teach.", "You teach.", 1),
        ("---\nYou teach.\n", "---\nYou teach.", 1),
        ("---\nnested:\n  version: 4\n---\nA", "A", 1),
        ("A\nversion: 3", "A\nversion: 3", 1),
        ("version: 3 and more", "version: 3 and more", 1),
        ("", "", 1),
        ("---\nversion: 2\n---", "", 2),
    ],
)
def test_version_is_in_the_front_matter_or_the_first_line(source: str, text: str, version: int):
    persona = parse(source)
    assert (persona.text, persona.known.version) == (text, version)
    assert persona.known.hash == hash_of(text)


def watched(path: Path) -> PersonaFile:
    return PersonaFile(str(path), check_s=0)


def test_persona_follows_its_file(tmp_path: Path):
    path = tmp_path / "persona.md"
    path.write_text("version: 1\nYou teach.")
    persona = watched(path)
    assert persona.current is None
    first = persona.refresh()
    assert first is not None
    assert first.text == "You teach."
    path.write_text("version: 2\nYou play.")  # as long as before, perhaps in the same tick
    second = persona.refresh()
    assert second is persona.current
    assert second is not None
    assert (second.text, second.known.version) == ("You play.", 2)
    assert first.text == "You teach."
    (tmp_path / "new.md").write_text("version: 3\nYou rest.")
    os.replace(tmp_path / "new.md", path)
    third = persona.refresh()
    assert third is not None
    assert third.known.version == 3


def test_file_that_has_not_changed_is_not_read_again(tmp_path: Path):
    path = tmp_path / "persona.md"
    path.write_text("You teach.")
    os.utime(path, (1_000_000, 1_000_000))
    persona = watched(path)
    first = persona.refresh()
    assert persona.refresh() is first


def test_file_is_looked_at_only_when_that_is_due(tmp_path: Path):
    path = tmp_path / "persona.md"
    path.write_text("You teach.")
    persona = PersonaFile(str(path), check_s=3600)
    assert persona.is_due
    first = persona.refresh()
    path.write_text("You play.")
    assert not persona.is_due
    assert persona.refresh() is first


def _vanish(path: Path) -> None:
    path.unlink()


def _grow(path: Path) -> None:
    path.write_bytes(b"x" * (MOST_BYTES + 1))


def _garble(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def _become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _become_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("spoil", [_vanish, _grow, _garble, _become_a_folder, _become_a_pipe])
def test_broken_file_leaves_the_last_text_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: object
):
    path = tmp_path / "persona.md"
    path.write_text("You teach.")
    persona = watched(path)
    first = persona.refresh()
    assert callable(spoil)
    spoil(path)
    with caplog.at_level(logging.WARNING, logger="kqview.server"):
        assert persona.refresh() is first
        assert persona.refresh() is first
    assert len(caplog.records) == 1
    assert "the last one stays in use" in caplog.text
    path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    path.write_text("You play.")
    mended = persona.refresh()
    assert mended is not None
    assert mended.text == "You play."
    caplog.clear()
    spoil(path)
    persona.refresh()
    assert len(caplog.records) == 1


def test_readers_see_whole_texts_while_the_file_is_replaced(tmp_path: Path):
    path, new = tmp_path / "persona.md", tmp_path / "new.md"
    texts = {character * 5000 for character in "abc"}
    path.write_text("a" * 5000)
    persona = watched(path)
    persona.refresh()
    seen: set[str] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            found = persona.refresh()
            assert found is not None
            seen.add(found.text)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for i in range(60):
            new.write_text("abc"[i % 3] * 5000)
            os.replace(new, path)
            persona.refresh()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert seen <= texts
    assert persona.current is not None
    assert persona.current.text == "c" * 5000
