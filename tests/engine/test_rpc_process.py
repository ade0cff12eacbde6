"""The process around an engine with RPC servers: fork, exit and signals while a server hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kqview
from tests.support import stock
from tests.support.forking import FORK
from tests.support.rpc_server import RpcServer, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.peers

SOURCE = Path(kqview.__file__).parents[1]
LIMIT_S = 60
START = """
import gc, os, signal, sys, threading, time
from kqview import Engine, errors
MODEL, ENDPOINT = sys.argv[1:3]
SERVER = int(sys.argv[3])
PROMPT = list(range(65, 80))
def open_engine(**options):
    return Engine(MODEL, **{"n_ctx": 512, "n_threads": 1, "rpc_servers": [ENDPOINT], **options})
def ids_of(engine, n=20):
    return [t.id for t in engine.generate(PROMPT, max_tokens=n, temperature=0, ignore_eos=True)]
"""


@pytest.fixture
def server() -> Iterator[RpcServer]:
    try:
        stock.find_binary("ggml-rpc-server")
    except stock.PeersMissing as missing:
        pytest.skip(str(missing))
    with serving() as one:
        yield one


def start(script: str, model: Path, server: RpcServer) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-c", START + FORK + textwrap.dedent(script)),
            *(str(model), server.endpoint, str(server.process.pid)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"},
    )


def output_of(process: subprocess.Popen[str]) -> str:
    """What it printed; it must end by itself with status 0 and without a word on stderr."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"it hung; stdout {out!r}, stderr {err!r}")
    assert (process.returncode, err) == (0, ""), out
    return out.strip()


def test_forked_child_neither_hangs_nor_disturbs_its_parents_server(
    tiny_llama: Path, server: RpcServer
) -> None:
    script = """
        engine, closed = open_engine(), open_engine()
        want = ids_of(engine)
        closed.close()
        generation = engine.generate(PROMPT, max_tokens=300, temperature=0, ignore_eos=True)
        next(generation)
        def check():
            global engine, closed, generation
            try:
                engine.generate(PROMPT)
            except errors.ClosedError as error:
                assert "forked" in str(error)
            engine.close()
            generation.close()
            engine = closed = generation = None
            gc.collect()  # frees what lies on the server, in the parent alone
            assert len(ids_of(open_engine(rpc_servers=None))) == 20
        for _ in range(3):
            assert in_child(check) == 0
        assert len(list(generation)) == 299
        assert ids_of(engine) == want
        print("parent")
    """
    assert output_of(start(script, tiny_llama, server)) == "parent"


def test_forked_child_leaves_through_the_interpreter(tiny_llama: Path, server: RpcServer) -> None:
    script = """
        engine = open_engine()
        ids_of(engine)
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
        else:
            assert os.waitpid(pid, 0)[1] == 0
            print(len(ids_of(engine)))
    """
    assert output_of(start(script, tiny_llama, server)) == "20"


@pytest.mark.parametrize(
    "body",
    [
        "pass",
        "os.kill(SERVER, signal.SIGKILL)",
        "os.kill(SERVER, signal.SIGSTOP); engine.generate(PROMPT); time.sleep(0.2)",
        "engine.close()",
    ],
    ids=["idle", "killed", "hung", "closed"],
)
def test_interpreter_exits_with_an_engine_on_a_server(
    tiny_llama: Path, server: RpcServer, body: str
) -> None:
    script = f"engine = open_engine()\nids_of(engine)\n{body}\nprint('end')"
    began = time.monotonic()
    assert output_of(start(script, tiny_llama, server)) == "end"
    assert time.monotonic() - began < 30


def test_interrupt_ends_a_wait_for_a_server_that_hangs(tiny_llama: Path, server: RpcServer) -> None:
    script = """
        engine = open_engine()
        ids_of(engine)
        os.kill(SERVER, signal.SIGSTOP)
        try:
            print("go")
            ids_of(engine)
        except KeyboardInterrupt:
            print("interrupted")
    """
    process = start(script, tiny_llama, server)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "go"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert output_of(process) == "interrupted"
    assert time.monotonic() - began < 20
