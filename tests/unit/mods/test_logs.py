"""What a mod prints and logs is captured for its call; other threads and tasks print as always."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from kqview.mods import logs
from kqview.mods.logs import Captured
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

Lines = list[tuple[str, str]]


@pytest.fixture(autouse=True)
def _no_mod_of_another_test_runs() -> None:
    """One that hangs keeps the streams redirected until it ends."""
    wait_until(lambda: not logs._n_calls)


def collector() -> tuple[Lines, Callable[[str, str], None]]:
    lines: Lines = []
    return lines, lambda text, level: lines.append((text, level))


def test_printed_lines_are_captured_and_not_printed(capsys: pytest.CaptureFixture[str]):
    lines, log = collector()
    with Captured(log):
        print("one", end="")
        print(" line\ntwo")
        sys.stdout.writelines(["thr", "ee"])
    print("after")
    assert lines == [("one line", "INFO"), ("two", "INFO"), ("three", "INFO")]
    assert capsys.readouterr().out == "after\n"


def test_long_lines_are_cut_into_pieces():
    text = "".join(map(str, range(40_000)))
    lines, log = collector()
    with Captured(log):
        sys.stdout.write(text)
        print("!")
    pieces = [line for line, _ in lines]
    assert "".join(pieces) == text + "!"
    assert len(pieces) == len(text) // 65_536 + 1
    assert all(len(piece) == 65_536 for piece in pieces[:-1])


def test_stream_is_the_one_of_before_when_no_mod_runs():
    before = sys.stdout
    with Captured(collector()[1]):
        assert sys.stdout is not before
        assert sys.stdout.encoding == before.encoding
    assert sys.stdout is before


def test_threads_print_beside_each_other(capsys: pytest.CaptureFixture[str]):
    both = threading.Barrier(3)
    found: dict[str, Lines] = {}

    def work(name: str) -> None:
        found[name], log = collector()
        with Captured(log):
            both.wait()
            for i in range(50):
                print(name, i)
            both.wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    both.wait()
    print("not a mod")
    both.wait()
    for thread in threads:
        thread.join()
    for name in ("a", "b"):
        assert found[name] == [(f"{name} {i}", "INFO") for i in range(50)]
    assert capsys.readouterr().out == "not a mod\n"


async def test_tasks_print_beside_each_other(capsys: pytest.CaptureFixture[str]):
    found: dict[str, Lines] = {}
    release = asyncio.Event()

    async def work(name: str) -> None:
        found[name], log = collector()
        with Captured(log):
            print(name)
            await release.wait()
            print(name)

    tasks = [asyncio.create_task(work(name)) for name in ("a", "b")]
    await asyncio.sleep(0)
    print("not a mod")
    release.set()
    await asyncio.gather(*tasks)
    assert found == {name: [(name, "INFO")] * 2 for name in ("a", "b")}
    assert capsys.readouterr().out == "not a mod\n"


def test_stream_that_another_thread_has_redirected_stays_redirected():
    before, mine = sys.stdout, io.StringIO()
    lines, log = collector()
    with contextlib.ExitStack() as stack:
        with Captured(log):
            stack.enter_context(contextlib.redirect_stdout(mine))
        assert sys.stdout is mine
        with Captured(log):
            print("in a mod")
        print("outside")
    print("into what the redirection has restored", end="", file=io.StringIO())
    assert mine.getvalue() == "outside\n"
    assert lines == [("in a mod", "INFO")]
    with Captured(log):
        pass
    assert sys.stdout is before


def test_output_behind_the_call_goes_where_it_would_without_mods(
    capsys: pytest.CaptureFixture[str],
):
    lines, log = collector()
    late: list[Callable[[], None]] = []
    with Captured(log):
        stream = sys.stdout
        late.append(lambda: print("late", file=stream))
    late[0]()
    assert lines == []
    assert capsys.readouterr().out == "late\n"


def test_records_are_captured_with_their_levels_and_handled_as_usual(
    caplog: pytest.LogCaptureFixture,
):
    logger = logging.getLogger("tests.mods")
    lines, log = collector()
    with caplog.at_level(logging.DEBUG, logger="tests.mods"):
        with Captured(log):
            logger.debug("%s of %s", 1, 4)
            logger.info("two")
            logger.warning("three")
            try:
                raise ValueError("bad day")
            except ValueError:
                logger.exception("four")
        logger.error("not of a mod")
    assert lines[:3] == [("1 of 4", "DEBUG"), ("two", "INFO"), ("three", "WARNING")]
    text, level = lines[3]
    assert level == "ERROR"
    assert text.startswith("four\nTraceback")
    assert text.endswith("ValueError: bad day")
    assert len(lines) == 4
    # Threads that other tests have left behind may log as well.
    handled = [one.levelname for one in caplog.records if one.name == logger.name]
    assert handled == ["DEBUG", "INFO", "WARNING", "ERROR", "ERROR"]


def test_record_whose_arguments_do_not_fit_is_captured_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    lines, log = collector()
    with Captured(log):
        logging.getLogger("tests.mods").error("%d of them", "no number")
    assert lines == [("%d of them", "ERROR")]
