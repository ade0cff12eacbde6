"""Importing kqview again, or where it cannot be, harms nobody. In processes of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def run(program: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


def test_import_after_a_purge_of_sys_modules_shares_the_core():
    run("""
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
    run(f"""
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        import sys
        def use():
            import kqview
            with kqview.Engine.demo(n_ctx=64, n_threads=1) as engine:
                assert engine.generate("Anna", max_tokens=3, seed=1).read()
        if not {is_first}:
            use()
        sub = interpreters.create()
        source = (
            f"import sys; sys.path[:] = {{sys.path!r}}\\n"
            "try:\\n"
            "    import kqview\\n"
            "    raise SystemExit('imported')\\n"
            "except ImportError as error:\\n"
            "    assert 'main interpreter' in str(error), error\\n"
        )
        failure = interpreters.run_string(sub, source)
        assert failure is None, failure
        interpreters.destroy(sub)
        use()
        print("done")
    """)
