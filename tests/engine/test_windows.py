"""kqview where the standard library has only what it has on Windows.

Names are missing here, no more: RELEASING.md says what has run where.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

from kqview import Engine

if TYPE_CHECKING:
    from pathlib import Path

# What is imported before keeps what it has taken: libraries know Windows by other names.
AS_ON_WINDOWS = """
    import asyncio, fcntl as unix_locks, importlib, jinja2, logging, multiprocessing, numpy, os
    import pkgutil, pyarrow.parquet, random, rich, signal, socket, sqlalchemy, ssl, subprocess, sys
    import tempfile, types, typer, uvicorn, uvloop, websockets

    def locking(handle, mode, n):
        assert (mode, n, os.lseek(handle, 0, os.SEEK_CUR)) == (2, 1, 1 << 40)
        try:
            unix_locks.flock(handle, unix_locks.LOCK_EX | unix_locks.LOCK_NB)
        except BlockingIOError as error:
            raise PermissionError(*error.args) from None

    def add_reader(*_):
        raise NotImplementedError

    sys.modules |= dict.fromkeys(["fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"])
    sys.modules["msvcrt"] = msvcrt = types.ModuleType("msvcrt")
    msvcrt.LK_NBLCK, msvcrt.locking = 2, locking
    missing = {
        os: "fork pread pwrite fchown fchmod chown getuid setsid killpg memfd_create sysconf "
        "sched_getaffinity O_DIRECTORY O_CLOEXEC O_NONBLOCK O_NOFOLLOW",
        signal: "SIGHUP SIGCHLD SIGPROF SIGUSR1 pthread_sigmask setitimer ITIMER_PROF",
        socket: "recv_fds send_fds",
    }
    for module, names in missing.items():
        for name in names.split():
            delattr(module, name)
    os.process_cpu_count = os.cpu_count  # since Python 3.13, which has it call sched_getaffinity
    asyncio.SelectorEventLoop.add_reader = asyncio.SelectorEventLoop.add_signal_handler = add_reader
"""
PROMPT = "Anna has a red ball. Anna has"


def run_as_on_windows(code: str, *arguments: object) -> str:
    program = textwrap.dedent(AS_ON_WINDOWS) + textwrap.dedent(code)
    command = [sys.executable, "-W", "error", "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def generated(n: int) -> str:
    with Engine.demo() as engine:
        return "".join(one.text for one in engine.generate(PROMPT, max_tokens=n, temperature=0))


def test_engine_captures_saves_and_waits_in_a_loop_without_readers(tmp_path: Path):
    code = """
    from kqview import Capture, Engine

    prompt, path = sys.argv[1:]

    async def generated(engine):
        tokens = engine.generate(prompt, max_tokens=8, temperature=0)
        return "".join([token.text async for token in tokens])

    with Engine.demo() as engine:
        stream = engine.generate(prompt, max_tokens=8, temperature=0, capture=Capture(layers=[1]))
        tokens = list(stream)
        assert all(abs(token.attention.sum(-1) - 1).max() < 1e-3 for token in tokens)
        slot = engine.slots[0]
        ids = slot.tokens
        for _ in range(2):  # the second one replaces the first
            slot.save_file(path)
        slot.clear()
        slot.restore_file(path)
        assert slot.tokens == ids
        text = "".join(token.text for token in tokens)
        assert asyncio.run(generated(engine)) == text
        print(text)
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
    """
    assert run_as_on_windows(code, PROMPT, tmp_path / "a.ses1") == generated(8) + "\n"


def test_command_line_generates_and_every_module_is_importable():
    code = """
    import kqview.__main__

    for one in pkgutil.walk_packages(kqview.__path__, "kqview."):
        if not one.name.startswith(("kqview.ray", "kqview.integrations")):
            importlib.import_module(one.name)
    sys.argv = ["kqview", "generate", "--demo", sys.argv[1], "-n", "8", "--temperature", "0"]
    kqview.__main__.main()
    """
    assert generated(8).strip() in run_as_on_windows(code, PROMPT)


def test_files_have_one_writer_and_a_template_a_process_of_its_own(tmp_path: Path):
    code = """
    from kqview import durable, system
    from kqview.chat import template
    from kqview.chat.rendering import ConfinedTemplate
    from kqview.confined import Confined
    from kqview.corpora.files import open_files
    from kqview.errors import CorpusError

    folder = sys.argv[1]
    one, other = open_files(folder + "/corpus"), open_files(folder + "/corpus")
    one.begin_writing()
    one.write("shards/a", b"whole")
    try:
        other.begin_writing()
        raise AssertionError
    except CorpusError:
        pass
    one.end_writing()
    other.begin_writing()
    durable.append_line(folder + "/lines", "first")
    durable.append_line(folder + "/lines", "second")
    assert open(folder + "/lines").read() == "first\\nsecond\\n"
    first = system.open_folder(folder)
    system.lock(first)
    try:
        system.lock(system.open_folder(folder))
        raise AssertionError
    except BlockingIOError:
        pass

    pool = Confined(template.__file__)
    confined = ConfinedTemplate(pool, "{{ messages[0].content }}!", {}, [])
    parts = confined.render([{"role": "user", "content": "Hello"}], options={})
    print("".join(part.text for part in parts))
    pool.close()
    """
    assert run_as_on_windows(code, tmp_path) == "Hello!\n"
