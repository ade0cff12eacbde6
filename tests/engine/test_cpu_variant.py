"""Which of its CPU variants a process computes with: the best that it may, or KQVIEW_CPU's.

A build for this machine has one, "native"; a wheel has one for each level of the processor, and
`.ci/wheels.py` runs these tests with one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import kqview
from tests.support.reference import relative_error
from tests.support.rows import KINDS, forward_ids, random_ids, reference_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

PACKAGE = Path(kqview.__file__).parents[1]
INFO = kqview.system_info()
VARIANTS: list[str] = INFO["cpu_variants"]
PROMPT = random_ids(20)
EXACT = 1e-5  # F32 weights and cache: src/kqview/EXACTNESS.md

PROGRAM = """
import sys
import numpy as np
import kqview
model, prompt, path = sys.argv[1], list(map(int, sys.argv[2].split())), sys.argv[3]
found = {}
for flash_attn in (False, True):
    with kqview.Engine(model, n_ctx=64, kv_type="f32", flash_attn=flash_attn) as engine:
        for kind in ("logits", "scores", "probs"):
            tokens = list(engine.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True,
                                          capture=kind, top_logprobs=3))
            found[f"{kind} {flash_attn} ids"] = [token.id for token in tokens]
            found[f"{kind} {flash_attn} logprobs"] = [token.logprob for token in tokens]
            for i, token in enumerate(tokens):
                found[f"{kind} {flash_attn} {i}"] = token.attention
np.savez(path, variant=kqview.system_info()["cpu_variant"], **found)
"""


def run_as(variant: str | None, program: str, *arguments: object) -> str:
    """What *program* prints in a process that is told to use *variant*."""
    env = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    env.pop("KQVIEW_CPU", None)
    if variant is not None:
        env["KQVIEW_CPU"] = variant
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=env, check=True, text=True, stdout=subprocess.PIPE, timeout=300,
    ).stdout.strip()  # fmt: skip


def answer_of(variant: str | None) -> str:
    """The variant that a process uses, or why it refuses."""
    program = (
        "import kqview\n"
        "try: print(kqview.system_info()['cpu_variant'])\n"
        "except kqview.errors.RequestError as error: print(error)"
    )
    return run_as(variant, program)


def usable() -> list[str]:
    return [name for name in VARIANTS if answer_of(name) == name]


def test_process_uses_the_best_variant_of_this_processor():
    assert answer_of(None) == answer_of("") == usable()[-1]


def test_each_variant_is_used_when_asked_for_or_refused_by_name():
    for name in VARIANTS:
        answer = answer_of(name)
        if answer == name:
            continue
        assert f'KQVIEW_CPU is "{name}", which this processor does not have' in answer
        assert all(other in answer for other in usable())


def test_unknown_variant_is_refused_with_those_of_the_build():
    answer = answer_of("sse9")
    assert 'KQVIEW_CPU is "sse9"' in answer
    assert ", ".join(VARIANTS) in answer


def test_info_command_names_the_variant():
    program = "from kqview.cli.main import app; app(['info', '--json'])"
    for name in usable():
        assert json.loads(run_as(name, program))["cpu_variant"] == name


def test_each_variant_computes_the_rows_of_the_reference(tiny_llama: Path, tmp_path: Path):
    seen: set[str] = set()
    for name in usable():
        path = tmp_path / f"{name}.npz"
        run_as(name, PROGRAM, tiny_llama, " ".join(map(str, PROMPT)), path)
        with np.load(path) as found:
            seen.add(str(found["variant"]))
            for kind in KINDS:
                for flash_attn in (False, True):
                    check(found, f"{kind} {flash_attn}", kind, tiny_llama)
    assert seen == set(usable())


def check(found: np.lib.npyio.NpzFile, name: str, kind: str, model: Path) -> None:
    """Compare the rows of one generation with the float64 transformer."""
    ids: list[int] = found[f"{name} ids"].tolist()
    result = forward_ids(model, [*PROMPT, *ids[:-1]])
    for i in range(len(ids)):
        row: NDArray[np.float32] = found[f"{name} {i}"]
        want = reference_rows(result, kind, len(PROMPT) - 1 + i)  # pyright: ignore[reportArgumentType]
        assert relative_error(row, want) <= EXACT, (name, i)
    assert np.all(np.isfinite(found[f"{name} logprobs"]))
