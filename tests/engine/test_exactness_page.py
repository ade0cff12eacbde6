"""EXACTNESS.md says what is so: figures are measured again, words on llama.cpp looked up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.exactness import FIGURES

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "src" / "kqview" / "EXACTNESS.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| .* \| (?:probs|logits) \| (?P<figure>[0-9.e-]+) \| `(?P<name>[\w-]+)` \|$", re.M
)
FIGURE_OF = {row["name"]: float(row["figure"]) for row in ROW.finditer(PAGE)}
FACTOR = 3.0  # other processors sum in another order
ROUNDING = 1e-5
# Where the kernels of a prompt and of a token happen to agree there is no difference.
MAY_VANISH = {"parts-default"}

# Files of llama.cpp, what to look for, and whether it is there.
STATEMENTS: dict[str, list[tuple[str, str, bool]]] = {
    "windows": [
        ("src/models/llama.cpp", r"SLIDING_WINDOW|n_swa", False),
        ("src/models/mistral3.cpp", r"SLIDING_WINDOW|n_swa", False),
        ("src/models/phi3.cpp", r"SWA is currently disabled", True),
        ("src/models/phi3.cpp", r"swa_type\s*=\s*LLAMA_SWA_TYPE_NONE", True),
    ],
    "yarn": [
        ("ggml/src/ggml.c", r"floorf\(ggml_rope_yarn_corr_dim\(", True),
        ("ggml/src/ggml.c", r"ceilf\(ggml_rope_yarn_corr_dim\(", True),
        ("src/llama-arch.cpp", r"truncate", False),
    ],
    "flash attention": [
        ("ggml/src/ggml-cpu/ops.cpp", r"q_to_vec_dot\(pq, Q_q, DK\)", True),
        ("ggml/src/ggml-cpu/ops.cpp", r"ggml_vec_mad_f16\(DV, VKQ16,", True),
        ("src/llama-graph.cpp", r"k = ggml_cast\(ctx0, k, GGML_TYPE_F16\)", True),
    ],
    "experts": [
        ("src/llama-graph.cpp", r"ggml_argsort_top_k\(ctx0, selection_probs,", True),
    ],
}  # fmt: skip


def test_page_has_each_figure_once() -> None:
    assert [row["name"] for row in ROW.finditer(PAGE)] == list(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_figure_of_the_page_is_what_is_measured(name: str) -> None:
    stated, measured = FIGURE_OF[name], FIGURES[name]()
    assert measured <= max(FACTOR * stated, ROUNDING)
    if stated > ROUNDING and name not in MAY_VANISH:
        assert measured >= stated / FACTOR


def test_a_restored_slot_is_the_saved_one_bit_for_bit() -> None:
    assert FIGURE_OF["restored"] == 0
    assert FIGURES["restored"]() == 0


@pytest.mark.parametrize("topic", STATEMENTS)
def test_what_is_said_of_llama_cpp_stands_in_its_source(llama_cpp_dir: Path, topic: str) -> None:
    for file, pattern, is_there in STATEMENTS[topic]:
        source = (llama_cpp_dir / file).read_text(encoding="utf-8")
        assert bool(re.search(pattern, source)) is is_there, (file, pattern)


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
    assert len(named) >= 5
    assert [name for name in named if not (ROOT / name).is_file()] == []
