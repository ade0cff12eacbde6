"""The compute threads of the process: shared by its engines, gone with the last one.

Threads are counted by their name, in processes of their own, where no other test has an engine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kqview import Engine, _core
from kqview.machine import default_threads
from tests.support.processes import FORK, output_of
from tests.support.tiny_gguf import write_model

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="threads are read from /proc, which Linux has"
)

START = """
import os, signal, sys, threading, time
from pathlib import Path
from kqview import Engine
MODEL = sys.argv[1]
PROMPT = list(range(65, 80))
def open_engine(**options):
    return Engine(MODEL, n_ctx=512, n_threads=3, **options)
def ids(engine, n=20):
    return [t.id for t in engine.generate(PROMPT, max_tokens=n, temperature=0, ignore_eos=True)]
def n_compute_threads():
    n = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            n += (task / "comm").read_text().strip() == "kqview-compute"
        except (FileNotFoundError, ProcessLookupError):
            pass  # it ended meanwhile
    return n
"""


def run(script: str, model: Path) -> str:
    return output_of(
        subprocess.Popen(
            [sys.executable, "-c", START + script, str(model)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )


def test_engines_that_take_turns_share_their_threads(tiny_llama: Path):
    script = """
engines = [open_engine() for _ in range(3)]
assert len({tuple(ids(engine)) for engine in engines}) == 1
print(n_compute_threads())
"""
    assert run(script, tiny_llama) == "2"  # the third of a team is the engine's own


def test_engines_that_compute_at_the_same_time_compute_what_each_does_alone(tiny_llama: Path):
    script = """
engines = [open_engine() for _ in range(3)]
want = ids(engines[0], 200)
got = {}
together = threading.Barrier(3)
def work(i):
    together.wait()
    got[i] = ids(engines[i], 200)
threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
for one in threads: one.start()
for one in threads: one.join()
assert [got[i] for i in range(3)] == [want] * 3
print(2 <= n_compute_threads() <= 6)
"""
    assert run(script, tiny_llama) == "True"


def test_threads_end_with_the_last_engine(tiny_llama: Path):
    script = """
kept = open_engine()
for _ in range(20):
    with open_engine() as engine:
        ids(engine, 2)
assert n_compute_threads() == 2
kept.close()
until = time.monotonic() + 60
while n_compute_threads() and time.monotonic() < until:
    time.sleep(0.01)  # the kernel lists a thread for a moment after it was joined
print(n_compute_threads())
"""
    assert run(script, tiny_llama) == "0"


def test_forked_child_has_threads_of_its_own(tiny_llama: Path):
    script = """
engine = open_engine()
want = ids(engine)
def check():
    assert n_compute_threads() == 0
    with open_engine() as own:
        assert ids(own) == want
        assert n_compute_threads() == 2
assert in_child(check) == 0
assert ids(engine) == want
print("parent")
"""
    assert run(FORK + script, tiny_llama) == "parent"


@pytest.mark.parametrize(("n_embd", "is_small"), [(64, True), (512, False)])
def test_small_models_have_one_thread_by_default(tmp_path: Path, n_embd: int, is_small: bool):
    model = write_model(tmp_path / "model.gguf", n_embd=n_embd, n_ff=2 * n_embd)
    with Engine(model, n_ctx=64) as engine, Engine(model, n_ctx=64, n_threads=2) as other:
        assert (engine.model.size_bytes < 4 * 2**20) == is_small
        assert engine.n_threads == (1 if is_small else default_threads())
        assert engine.system_info()["n_threads"] == engine.n_threads
        assert other.n_threads == 2


@pytest.mark.needs("binutils")
def test_extension_calls_no_other_openmp():
    # A directive that kqview's pool does not answer would be computed by libgomp, outside of its
    # teams.
    readelf = shutil.which("readelf")
    assert readelf is not None
    command = [readelf, "--dyn-syms", "--dynamic", "--wide", _core.__file__]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Py_IncRef" in text or "PyErr_" in text  # it lists what is needed from outside
    assert [line for line in text.splitlines() if "GOMP_" in line or " omp_" in line] == []
