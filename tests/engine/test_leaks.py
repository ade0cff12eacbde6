"""nanobind's own leak check at exit, with everything that a program made dropped before."""

import os
import subprocess
import sys

PROGRAM = """
import asyncio, gc
from kqview import Engine

async def a_few(engine):
    return [token async for token in engine.generate("Anna", max_tokens=4, capture="logits")]

with Engine.demo(n_threads=1, n_ctx=128) as engine:
    tokens = list(engine.generate("Anna", max_tokens=8, capture="probs"))
    tokens += asyncio.run(a_few(engine))
    engine.generate("Anna", max_tokens=100, capture="scores").close()
    view = tokens[3].attention[0, 1:]
    del tokens
    assert engine.stats().pool.n_leased == 1
    del view
    assert engine.stats().pool.n_leased == 0
del engine
gc.collect()
if KEEP:
    kept = Engine.demo(n_threads=1, n_ctx=128)
    import ctypes
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept._core))
"""


def run(*, keep: bool) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("KEEP", str(keep))],
        env=os.environ | {"KQVIEW_LEAK_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_program_that_drops_everything_leaks_nothing():
    done = run(keep=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_leak_check_sees_what_is_kept_to_the_end():
    done = run(keep=True)
    assert done.returncode == 0
    assert "leaked" in done.stderr
