"""Supervision: a worker that crashes or hangs is replaced on its port, and clients are told."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx
import pytest

from kqview import Engine
from kqview.server.web import supervisor
from kqview.server.web.worker import STALLED
from kqview.state import SessionStore
from tests.support.serve_process import WITHIN_S, started, until

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]


def status_of(url: str) -> int:
    try:
        return httpx.get(url + "/health", timeout=30).status_code
    except httpx.HTTPError:
        return 0


def test_crashed_worker_is_replaced_on_the_same_port_and_its_requests_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = SessionStore(tmp_path)
    with Engine.demo(n_threads=1) as engine:
        engine.generate("Tom has", max_tokens=4).read()
        saved = engine.slots[0].tokens
        store.save("kept", engine.slots[0])
        store.flush()
    files = sorted(tmp_path.rglob("*"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    serve = [sys.executable, "-m", "kqview", "serve", "--demo", "--port", "0", "--threads", "1"]
    with started([*serve, "--ctx", "8192", "--shutdown-grace-s", "2"]) as parent:
        url = re.search(r"http://\S+", parent.wait_for("serves"))[0].rstrip(")")  # pyright: ignore[reportOptionalSubscript]
        url = url.split(" ")[0]
        (worker,) = parent.workers()
        # Small: neither the core nor numpy.
        maps = Path(f"/proc/{parent.process.pid}/maps").read_text()
        assert "numpy" not in maps
        assert "_core" not in maps
        # Its client reads no more of the rows than the first ones, so that it stays in flight.
        body = {"prompt": "Tom has", "max_length": 8000, "ban_eos_token": True,
                "output_attentions": True}  # fmt: skip
        with httpx.stream(
            "POST", url + "/api/extra/generate/stream", json=body,
            headers={"x-request-id": "the-poison"}, timeout=30,
        ) as stream:  # fmt: skip
            rows = stream.iter_raw()
            next(rows)  # kept: an iterator that is dropped closes the connection
            os.kill(worker, signal.SIGSEGV)
            assert until(lambda: parent.workers() != [worker])
            refused = httpx.get(url + "/health", timeout=30)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        line = parent.wait_for("ended by SIGSEGV")
        assert "the-poison" in line
        parent.wait_for("serves", 2)
        assert status_of(url) == 200
        assert parent.workers() not in ([], [worker])
        parent.process.send_signal(signal.SIGTERM)
        assert parent.process.wait(WITHIN_S) == 0
        assert status_of(url) == 0
    # Sessions on disk are there again, and nothing was left beside them.
    assert sorted(tmp_path.rglob("*")) == files
    with Engine.demo(n_threads=1) as engine:
        store.restore("kept", engine.slots[0])
        assert engine.slots[0].tokens == saved


APP = """
import os, socket, sys, time
from kqview import EngineHealth
from kqview.cli.serving import run
from kqview.server import Settings, create_app
from kqview.server.web.worker import Supervised

supervised = Supervised.from_env(os.environ)
settings = Settings(demo=True, n_threads=1, stall_timeout_s=1.5, shutdown_grace_s=2)
app = create_app(settings)
serve = type(app).__call__

async def faulty(app, scope, receive, send):
    if scope.get("path") == "/engine-hangs":
        begin_s = time.monotonic() - 1.6
        app.service.pool.default.engine.health = lambda: EngineHealth(
            "decoding", quiet_s=time.monotonic() - begin_s, n_steps=9, is_lost=False
        )
    if scope.get("path") == "/loop-hangs":
        time.sleep(600)
    await serve(app, scope, receive, send)

type(app).__call__ = faulty
run(app, settings, supervised.listener, supervised)
"""


def test_worker_whose_engine_or_event_loop_hangs_is_replaced(tmp_path: Path):
    script = tmp_path / "app.py"
    script.write_text(APP)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        fd = listener.fileno()
        command = [sys.executable, supervisor.__file__, str(fd), "2", "60", "0", "0"]
        with started([*command, sys.executable, str(script)], pass_fds=[fd]) as parent:
            parent.wait_for("serves")
            assert status_of(url + "/engine-hangs?") == 404
            told = httpx.get(url + "/health", timeout=30)
            assert (told.status_code, told.json()["status"]) == (503, "stalled")
            assert "no sign of life" in told.json()["reason"]
            parent.wait_for(f"with status {STALLED}")
            assert "no sign of life" in parent.wait_for("kqview watchdog:")
            parent.wait_for("serves", 2)
            assert status_of(url) == 200
            with pytest.raises(httpx.HTTPError):
                httpx.get(url + "/loop-hangs", timeout=WITHIN_S)
            parent.wait_for("event loop")
            parent.wait_for("serves", 3)
            assert status_of(url) == 200


TOY = """
import os, socket, sys, time
listener, control, notes = map(int, os.environ["KQVIEW_WORKER"].split(","))
control = socket.socket(fileno=control)
control.send(b"r")
print("up", flush=True)
while True:
    control.send(b"a")
    time.sleep(0.1)
"""


def test_worker_that_gives_no_sign_of_life_at_all_is_killed_and_replaced():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd = listener.fileno()
        command = [sys.executable, "-I", "-S", supervisor.__file__, str(fd), "1", "2", "0", "0"]
        with started([*command, sys.executable, "-c", TOY], pass_fds=[fd]) as parent:
            parent.wait_for("up")
            os.kill(parent.workers()[0], signal.SIGSTOP)
            parent.wait_for("gave no sign of life")
            parent.wait_for("up", 2)
            # A worker of a supervisor that is asked to end is killed where it does not.
            (worker,) = parent.workers()
            os.kill(worker, signal.SIGSTOP)
            parent.process.terminate()
            assert parent.process.wait(WITHIN_S) == 128 + signal.SIGKILL


def test_server_that_cannot_start_is_not_started_again(tmp_path: Path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    serve = [sys.executable, "-m", "kqview", "serve", "--port", "0", "--model", str(broken)]
    done = subprocess.run(serve, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode != 0
    assert done.stderr.count("error:") == 1
    assert "supervisor" not in done.stderr


def test_what_holds_the_gil_is_ended_without_it():
    script = """
        import re
        from kqview.server.web.worker import Watchdog
        Watchdog(0.4, trouble=lambda: None).start()
        import time; time.sleep(0.3)
        print("begins", flush=True)
        re.match("(a+)+$", "a" * 60 + "b")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "begins\n")
    assert "__init__.py" in done.stderr  # the stack of what held it


STOPPED_WHILE_IT_FORKS = """
import os, signal, socket, sys
from kqview.server.web.supervisor import Supervisor

fork = os.fork

def forks_late():
    os.kill(os.getpid(), signal.SIGTERM)
    return fork()

os.fork = forks_late
worker = [sys.executable, "-c", "import time; time.sleep(60)"]
with socket.create_server(("127.0.0.1", 0)) as listener:
    Supervisor(listener, worker, grace_s=40, stall_s=0).run()
"""


def test_signal_that_comes_while_a_worker_is_started_ends_it():
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_WHILE_IT_FORKS], capture_output=True, timeout=WITHIN_S
    )
    assert done.returncode == 0, done.stderr


def test_worker_imports_nothing_from_the_current_folder(tmp_path: Path):
    (tmp_path / "typer.py").write_text("raise SystemExit('the current folder was imported')")
    script = Path(sys.executable).with_name("kqview")
    if not script.exists():
        pytest.skip("the command is not installed beside this Python")
    command = [str(script), "serve", "--demo", "--port", "0", "--threads", "1"]
    with started(command, cwd=tmp_path) as parent:
        parent.wait_for("serves")
