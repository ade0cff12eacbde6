"""Work in child processes: each limit ends its own call with a typed error, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kqview.confined import Confined, Stopped
from kqview.errors import ClosedError, InternalError, PromptTooLong, QueueFull

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = """
import os, sys, time
from kqview.errors import PromptTooLong

def answer(request):
    match request:
        case ["echo", value]:
            return value
        case ["pid"]:
            return os.getpid()
        case ["sleep", seconds]:
            time.sleep(seconds)
            return os.getpid()
        case ["spin"]:
            a = b = []
            for _ in range(40):
                a, b = [a, a], [b, b]
            return a == b  # one call of C that takes hours and needs the GIL
        case ["take", n]:
            return len(bytearray(n))
        case ["keep", n]:
            sys.kept = bytearray(n)
        case ["make", n]:
            return "a" * n
        case ["refuse"]:
            raise PromptTooLong("too long", parameter="prompt", n_tokens=7, n_max=3)
        case ["fail"]:
            raise LookupError("nothing there")
        case ["exit"]:
            os._exit(7)
        case ["write", path]:
            with open(path, "w") as file:
                file.write("a")
        case ["about"]:
            return [dict(os.environ), sorted(m for m in sys.modules if m.startswith("kqview"))]
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def opened(program: Path) -> Iterator[Callable[..., Confined]]:
    pools: list[Confined] = []

    def open_(**options: Any) -> Confined:
        pools.append(Confined(program, **options))
        return pools[-1]

    yield open_
    for pool in pools:
        pool.close()


def has_ended(pid: int) -> bool:
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_values_come_back_as_they_were(opened: Callable[..., Confined]):
    pool = opened(n_processes=1)
    value = {"a": [1, -0.5, None, True, "\ud800 \U0001f600 \x00"], "b": {"": 2**80}}
    assert pool.call(["echo", value]) == value
    assert pool.call(["pid"]) == pool.call(["pid"]) != os.getpid()


def test_child_has_no_environment_and_no_native_core(
    opened: Callable[..., Confined], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    environment, modules = opened().call(["about"])
    assert "SECRET_TOKEN" not in environment
    assert modules == ["kqview", "kqview.chat", "kqview.errors"]


@pytest.mark.parametrize(
    ("request_", "options", "reason", "words"),
    [
        (["spin"], {"cpu_s": 0.2}, "time", "0.2 s of CPU time"),
        (["sleep", 60], {"wall_s": 0.3}, "time", "0.3 s"),
        pytest.param(
            ["take", 1 << 30],
            {"memory_bytes": 64 << 20},
            "memory",
            "64 MiB",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux limits memory"),
        ),
        (["make", 2000], {"length_max": 1000}, "length", "1000 bytes"),
        (["exit"], {}, "died", "status 7"),
    ],
    ids=["CPU time", "clock", "memory", "length", "death"],
)
def test_broken_limit_ends_only_its_call(
    opened: Callable[..., Confined],
    request_: list[Any],
    options: dict[str, Any],
    reason: str,
    words: str,
):
    pool = opened(**options)
    with ThreadPoolExecutor(1) as other:
        beside = other.submit(lambda: [pool.call(["echo", i]) for i in range(50)])
        with pytest.raises(Stopped, match=words) as caught:
            pool.call(request_)
        assert beside.result() == list(range(50))
    assert caught.value.reason == reason
    assert pool.call(["echo", "next"]) == "next"


def test_errors_keep_their_class_and_numbers(opened: Callable[..., Confined]):
    pool = opened()
    with pytest.raises(PromptTooLong, match="too long") as caught:
        pool.call(["refuse"])
    assert (caught.value.parameter, caught.value.n_tokens, caught.value.n_max) == ("prompt", 7, 3)
    with pytest.raises(InternalError, match="LookupError: nothing there"):
        pool.call(["fail"])


def test_child_writes_no_file(opened: Callable[..., Confined], tmp_path: Path):
    with pytest.raises(InternalError, match="File too large"):
        opened().call(["write", str(tmp_path / "out")])


def test_calls_wait_in_order_and_not_for_ever(opened: Callable[..., Confined]):
    pool = opened(n_processes=1, n_waiting=3, queue_s=20)
    pool.call(["pid"])
    ended: list[int] = []

    def call(i: int) -> None:
        pool.call(["sleep", 0 if i else 1.5])
        ended.append(i)

    threads = [threading.Thread(target=call, args=[i]) for i in range(4)]
    for i, thread in enumerate(threads):
        thread.start()
        while pool._free or len(pool._waiting) < i:
            time.sleep(0.001)
    with pytest.raises(QueueFull, match="3 calls"):
        pool.call(["pid"])
    for thread in threads:
        thread.join()
    assert ended == [0, 1, 2, 3]
    brief = opened(n_processes=1, queue_s=0.1)
    with ThreadPoolExecutor(1) as other:
        long = other.submit(brief.call, ["sleep", 1])
        time.sleep(0.3)
        with pytest.raises(QueueFull, match=r"0\.1 s"):
            brief.call(["pid"])
        long.result()
    assert brief.call(["echo", 1]) == 1


def test_closed_pool_leaves_nothing_behind(opened: Callable[..., Confined]):
    n_before = len(os.listdir("/dev/fd"))
    pool = opened(n_processes=2)
    with ThreadPoolExecutor(2) as threads:
        pids = set(threads.map(lambda _: pool.call(["sleep", 0.2]), range(2)))
        call = threads.submit(pool.call, ["sleep", 60])
        time.sleep(0.2)
        pool.close()
        with pytest.raises(ClosedError):
            call.result()
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert len(os.listdir("/dev/fd")) == n_before
    with pytest.raises(ClosedError):
        pool.call(["pid"])


def test_pool_without_references_ends_its_children(program: Path):
    pid = Confined(program).call(["pid"])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_children_of_a_killed_owner_end(program: Path, is_busy: bool):
    code = (
        "import json, sys, threading\n"
        "from kqview.confined import Confined\n"
        f"pool = Confined({str(program)!r}, n_processes=1, cpu_s=1)\n"
        "print(pool.call(['pid']), flush=True)\n"
        f"pool.call(['spin']) if {is_busy} else threading.Event().wait()"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pid = json.loads(owner.stdout.readline())
    time.sleep(0.2)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert has_ended(pid)


def test_signals_meant_for_the_owner_do_not_end_a_child(opened: Callable[..., Confined]):
    pool = opened()
    pid = pool.call(["pid"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert pool.call(["pid"]) == pid


def test_program_that_does_not_load_is_said(tmp_path: Path):
    path = tmp_path / "program.py"
    path.write_text("import a_module_that_is_not_there")
    with pytest.raises(InternalError, match="a_module_that_is_not_there"):
        Confined(path).call(1)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux limits memory")
def test_child_that_keeps_much_memory_is_replaced(opened: Callable[..., Confined]):
    pool = opened(n_processes=1, memory_bytes=64 << 20)
    pid = pool.call(["pid"])
    assert pool.call(["take", 48 << 20]) == 48 << 20
    assert pool.call(["pid"]) == pid
    pool.call(["keep", 48 << 20])
    assert pool.call(["take", 48 << 20]) == 48 << 20


def test_idle_process_that_was_killed_costs_no_call(opened: Callable[..., Confined]):
    pool = opened(n_processes=1)
    pid = pool.call(["pid"])
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert pool.call(["pid"]) not in (pid, os.getpid())


def test_limit_on_cpu_time_holds_where_the_owner_ignores_its_signal(program: Path):
    script = (
        "import signal, sys; signal.signal(signal.SIGPROF, signal.SIG_IGN)\n"
        "from kqview.confined import Confined, Stopped\n"
        "try: Confined(sys.argv[1], cpu_s=0.5, wall_s=30).call(['spin'])\n"
        "except Stopped as stopped: print(stopped)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, program], capture_output=True, text=True, timeout=60
    )
    assert "of CPU time" in done.stdout, done
