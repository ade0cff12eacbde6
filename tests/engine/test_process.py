"""The process around an engine: exit, fork, signals, imports, other copies of llama.cpp's symbols.

Each test runs a script in a process of its own, because what it shows can only be seen from
outside: its exit status, what it printed, and that it ended at all.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import kqview
from tests.support.processes import FORK, output_of, wait_until_asleep

SOURCE = Path(kqview.__file__).parents[1]
ROOT = Path(__file__).parents[2]
STRICT = ["-X", "dev", "-W", "error"]
START = """
import atexit, builtins, gc, os, signal, sys, threading, time
import numpy as np
from kqview import Engine, errors
MODEL = sys.argv[1]
PROMPT = list(range(65, 80))
GREEDY = dict(temperature=0, ignore_eos=True)
def open_engine(**options):
    return Engine(MODEL, **{"n_ctx": 512, "n_threads": 1, **options})
def generate(**options):
    return open_engine().generate(PROMPT, **options)
"""


def start(
    script: str, *args: object, flags: list[str] = STRICT, before: str = ""
) -> subprocess.Popen[str]:
    """Run *before*, which sees no kqview yet, and then *script*."""
    return subprocess.Popen(
        [sys.executable, *flags, "-c", before + START + textwrap.dedent(script), *map(str, args)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}", "PYTHONUNBUFFERED": "1"},
    )


def run(script: str, *args: object, flags: list[str] = STRICT) -> str:
    return output_of(start(script, *args, flags=flags))


# ---- exit


ALIVE_AT_EXIT = {
    "engine": "engine = open_engine()",
    "views": "views = list(generate(max_tokens=5, capture='probs'))",
    "never iterated": "generation = generate(max_tokens=100_000, **GREEDY)",
    "running with a view": "generation = generate(capture='probs'); token = next(generation)",
    "queued": "engine = open_engine(); g = engine.generate(PROMPT); h = engine.generate(PROMPT)",
    "closed engine": "engine = open_engine(); engine.close()",
    "engine in a cycle": "engine = open_engine(); ring = [engine]; ring.append(ring); del engine",
    "generation in a cycle": "g = generate(); next(g); ring = [g]; ring.append(ring); del g",
    "view in a module table": "sys.modules['x'] = next(generate(capture='probs')).attention",
    "generation in builtins": "builtins.keep = generate(); next(builtins.keep)",
    "closed by an exit handler": "g = generate(); next(g); atexit.register(g.close)",
    "held by the interpreter": "g = generate(); next(g); os.register_at_fork(before=g.close)",
}


@pytest.mark.full
@pytest.mark.parametrize("script", ALIVE_AT_EXIT.values(), ids=ALIVE_AT_EXIT)
def test_interpreter_exits_cleanly_with_what_is_still_alive(tiny_llama: Path, script: str) -> None:
    run(f"{script}\nprint('end')", tiny_llama)


def test_interpreter_exits_while_daemon_threads_wait_and_iterate(tiny_llama: Path) -> None:
    script = """
        engine = open_engine()
        holder = engine.generate(PROMPT, max_tokens=100, **GREEDY)
        next(holder)
        other = open_engine()
        def loop():
            while True:
                for token in other.generate(PROMPT, max_tokens=100, capture="probs", **GREEDY):
                    pass
        for _ in range(3):
            waiting = engine.generate(PROMPT)
            threading.Thread(target=lambda g=waiting: next(g), daemon=True).start()
        threading.Thread(target=loop, daemon=True).start()
        threading.excepthook = lambda args: None  # the closed engine's error
        while not other.stats().n_tokens:
            time.sleep(0)
    """
    for _ in range(2):
        run(script, tiny_llama)


def test_exit_handler_of_an_earlier_import_can_still_generate(tiny_llama: Path) -> None:
    before = """
import atexit
@atexit.register
def late():
    try:
        list(old)
    except errors.ClosedError:
        print(len(list(generate(max_tokens=5, **GREEDY))))
"""
    script = "old = generate(max_tokens=100, **GREEDY); builtins.other = generate()"
    assert output_of(start(script, tiny_llama, before=before)) == "5"


def test_ordinary_use_is_clean_under_development_mode(tiny_llama: Path) -> None:
    script = """
        import asyncio
        nine = dict(max_tokens=9, **GREEDY)
        async def main(engine):
            async with engine.generate(PROMPT, capture="probs", **nine) as generation:
                return [token.attention async for token in generation]
        with open_engine() as engine:
            engine.tokenize("text")
            views = [t.attention for t in engine.generate(PROMPT, capture="logits", **nine)]
            views += asyncio.run(main(engine))
            engine.generate(PROMPT).close()
            engine.stats(), engine.system_info()
        try:
            engine.generate(PROMPT)
        except errors.ClosedError:
            print(len(views))
    """
    assert run(script, tiny_llama) == "18"


# ---- fork


def test_forked_child_has_a_closed_engine_and_readable_views(tiny_llama: Path) -> None:
    script = """
        import asyncio
        engine = open_engine()
        want = [t.id for t in engine.generate(PROMPT, max_tokens=60, **GREEDY)]
        generation = engine.generate(PROMPT, max_tokens=60, capture="probs", **GREEDY)
        tokens = [next(generation) for _ in range(3)]
        rows = [np.array(token.attention) for token in tokens]

        def raises_closed(call):
            try:
                call()
            except errors.ClosedError as error:
                assert "forked" in str(error), error
            else:
                raise AssertionError("no ClosedError")

        def check():
            global generation
            for call in (
                lambda: engine.generate(PROMPT),
                lambda: engine.tokenize("a"),
                lambda: engine.detokenize([1]),
                lambda: engine.token_bytes(1),
                lambda: engine.slots[0].tokens,
                lambda: engine.slots[0].is_busy,
                lambda: engine.stats(),
                lambda: next(generation),
            ):
                raises_closed(call)
            assert "closed" in repr(engine)
            assert list(generation) == []
            generation.usage, generation.text, generation.slot, engine.model.n_vocab
            generation.cancel(), generation.close(), asyncio.run(generation.aclose())
            for token, row in zip(tokens, rows):
                np.testing.assert_array_equal(token.attention, row)
            engine.close()
            tokens.clear()
            generation = None
            gc.collect()
            with open_engine() as own:  # one of the child's own works
                assert [t.id for t in own.generate(PROMPT, max_tokens=60, **GREEDY)] == want

        for _ in range(5):
            result = in_child(check)
            assert result == 0, result
        assert [t.id for t in tokens] + [t.id for t in generation] == want
        print(len(rows))
    """
    assert run(FORK + textwrap.dedent(script), tiny_llama) == "3"


def test_forks_while_the_engine_works_neither_hang_nor_disturb(tiny_llama: Path) -> None:
    script = """
        engine = open_engine()
        want = [t.id for t in engine.generate(PROMPT, max_tokens=100, **GREEDY)]
        def check():
            global generation, view
            view = None
            try:
                next(generation)
            except errors.ClosedError:
                pass
            generation.close()
            generation = None
            engine.close()
        got = []
        for _ in range(4):
            generation = engine.generate(PROMPT, max_tokens=100, capture="probs", **GREEDY)
            for token in generation:
                view = token.attention
                got.append(token.id)
                if token.index % 10 == 0:
                    assert in_child(check) == 0
        assert got == want * 4
        print(len(got))
    """
    assert run(FORK + textwrap.dedent(script), tiny_llama, flags=[]) == "400"


def test_forked_child_exits_cleanly_through_the_interpreter(tiny_llama: Path) -> None:
    script = """
        engine = open_engine()
        generation = engine.generate(PROMPT, max_tokens=100, capture="probs", **GREEDY)
        tokens = [next(generation) for _ in range(3)]
        pid = fork()
        if pid == 0:
            signal.alarm(20)
        else:
            assert os.waitpid(pid, 0)[1] == 0
            assert len(list(generation)) == 97
            print("parent")
    """
    assert run(FORK + textwrap.dedent(script), tiny_llama) == "parent"


def test_fork_beside_an_engine_warns_from_python_3_12(tiny_llama: Path) -> None:
    script = """
        import warnings
        engine = open_engine()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pid = os.fork()
            if pid == 0:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        print([one.category.__name__ for one in caught])
    """
    warned = ["DeprecationWarning"] if sys.version_info >= (3, 12) else []
    assert run(script, tiny_llama) == str(warned)


# ---- signals


def interrupt(process: subprocess.Popen[str], after: str) -> float:
    """Send SIGINT once it printed *after*; seconds until it ended."""
    assert process.stdout is not None
    assert process.stdout.readline().strip() == after
    wait_until_asleep(process)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert output_of(process).endswith("interrupted")
    return time.monotonic() - began


INTERRUPTED = """
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    "body",
    [
        # loading: each report of progress is slow
        "open_engine(progress=lambda f: (f > 0 or print('go')) and None or time.sleep(0.05))",
        # a wait for a slot that another thread holds
        """
    engine = open_engine()
    holder = engine.generate(PROMPT, **GREEDY)
    thread = threading.Thread(target=lambda: next(holder))
    thread.start(), thread.join()
    waiting = engine.generate(PROMPT)
    print('go')
    next(waiting)""",
        # generating, one after the other
        """
    engine = open_engine()
    print('go')
    while True:
        engine.generate(PROMPT, max_tokens=300, **GREEDY).read()""",
        # a long prompt, in one wait
        """
    engine = open_engine(n_ctx=200_000, n_ubatch=16)
    generation = engine.generate(PROMPT * 13_000, max_tokens=1)
    print('go')
    next(generation)""",
    ],
    ids=["loading", "waiting", "generating", "prefill"],
)
def test_interrupt_ends_the_call_promptly(tiny_llama: Path, body: str) -> None:
    process = start(f"try:\n    {body.lstrip()}{INTERRUPTED}", tiny_llama)
    assert interrupt(process, "go") < 15


def test_interrupted_wait_ends_its_generation_and_a_handler_that_returns_does_not(
    tiny_llama: Path,
) -> None:
    script = """
        from tests.support.engines import KEPT, REFUSED, keep_slot
        engine = open_engine(**KEPT)
        want = [t.id for t in engine.generate(PROMPT, max_tokens=20, **GREEDY)]
        held = []
        thread = threading.Thread(target=lambda: held.extend(keep_slot(engine, PROMPT)))
        thread.start(), thread.join()
        kept = []
        for _ in range(3):
            kept.append(engine.generate(PROMPT, max_tokens=20, **REFUSED, **GREEDY))
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                next(kept[-1])
            except KeyboardInterrupt:
                print("interrupted", kept[-1].finish_reason, end=" ")
        waiting = engine.generate(PROMPT, max_tokens=20, **REFUSED, **GREEDY)
        signal.signal(signal.SIGALRM, lambda *_: [one.close() for one in held])
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # a handler that returns: the wait goes on
        assert [t.id for t in waiting] == want
        print(waiting.finish_reason)
    """
    assert run(script, tiny_llama) == "interrupted cancelled " * 3 + "length"


# ---- other copies of llama.cpp


def test_extension_exports_nothing_but_its_entry() -> None:
    # An editable install keeps the module away from the package's Python files: ask the import.
    module = importlib.util.find_spec("kqview._core").origin
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", module], capture_output=True, text=True, check=True
    )
    assert [line.split()[-1] for line in listed.stdout.splitlines()] == ["PyInit__core"]


def test_symbols_of_another_llama_cpp_are_not_picked_up(tiny_llama: Path, tmp_path: Path) -> None:
    names = (
        "llama_decode",
        "llama_init_from_model",
        "llama_model_load_from_file",
        "llama_backend_init",
        "llama_log_set",
        "ggml_init",
        "ggml_backend_sched_alloc_graph",
        "ggml_backend_sched_graph_compute_async",
        "ggml_graph_compute",
        "ggml_backend_cpu_init",
        "gguf_init_from_file",
    )
    source = tmp_path / "other.c"
    source.write_text(
        "#include <stdlib.h>\n" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in names)
    )
    library = tmp_path / "libother.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    script = """
        engine = open_engine()
        tokens = list(engine.generate(PROMPT, max_tokens=5, capture="probs", **GREEDY))
        print(len(tokens), np.allclose(tokens[4].attention.sum(-1), 1, atol=1e-5))
    """
    before = f"import ctypes; ctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_GLOBAL)\n"
    assert output_of(start(script, tiny_llama, before=before)) == "5 True"
    # The stand-in is what a program would otherwise get.
    assert subprocess.run(
        [sys.executable, "-c", before + "ctypes.CDLL(None).llama_decode()"], check=False
    ).returncode in (-signal.SIGABRT, 128 + signal.SIGABRT)


# ---- importing kqview again, or where it cannot be


def run_bare(program: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


def test_import_after_a_purge_of_sys_modules_shares_the_core():
    run_bare("""
        import sys
        import kqview
        before = kqview.Engine.demo(n_ctx=64, n_threads=1)
        said = before.generate("Anna", max_tokens=3, seed=1).read()
        for _ in range(2):
            for name in [name for name in sys.modules if name.partition(".")[0] == "kqview"]:
                del sys.modules[name]
            import kqview
            with kqview.Engine.demo(n_ctx=64, n_threads=1) as after:
                assert after.generate("Anna", max_tokens=3, seed=1).read() == said
            try:
                kqview.Engine("/nowhere.gguf")
            except kqview.errors.ModelLoadError:
                pass
        assert before.generate("Anna", max_tokens=3, seed=1).read() == said
        print("done")
    """)


@pytest.mark.parametrize("is_first", [True, False], ids=["sub-first", "main-first"])
def test_import_in_a_subinterpreter_fails_and_harms_nobody(is_first: bool):
    run_bare(f"""
        import sys
        try:
            import _interpreters as interpreters
            # Python itself refuses in the first; the second may import modules that do not know it.
            configs = [("isolated",), ("legacy",)]
        except ImportError:
            import _xxsubinterpreters as interpreters
            configs = [()]
        def use():
            import kqview
            with kqview.Engine.demo(n_ctx=64, n_threads=1) as engine:
                assert engine.generate("Anna", max_tokens=3, seed=1).read()
        if not {is_first}:
            use()
        source = (
            f"import sys; sys.path[:] = {{sys.path!r}}\\n"
            "try:\\n"
            "    import kqview._core\\n"
            "    raise SystemExit('imported')\\n"
            "except ImportError as error:\\n"
            "    assert 'interpreter' in str(error), error\\n"
        )
        for config in configs:
            sub = interpreters.create(*config)
            failure = interpreters.run_string(sub, source)
            assert failure is None, failure
            interpreters.destroy(sub)
        use()
        print("done")
    """)


# ---- nanobind's own leak check at exit, with everything that a program made dropped before

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


def run_leak_check(*, keep: bool) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("KEEP", str(keep))],
        env=os.environ | {"KQVIEW_LEAK_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_program_that_drops_everything_leaks_nothing():
    done = run_leak_check(keep=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_leak_check_sees_what_is_kept_to_the_end():
    done = run_leak_check(keep=True)
    assert done.returncode == 0
    assert "leaked" in done.stderr
