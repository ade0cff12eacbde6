"""Guessed tokens, ``Engine(draft="prompt-lookup")``: the same texts and rows in fewer steps.

Weights and cache are F32, without flash attention: tokens evaluated several in a step differ
in their last bits, and no two are so nearly tied that another one would win. Random weights hardly
repeat themselves; with a bias for three tokens a text consists of few others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Engine, errors, mod
from kqview.demo import MODEL_PATH
from tests.support import tiny_gguf
from tests.support.rows import check_tokens, random_ids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kqview import Generation
    from tests.engine.conftest import MakeEngine

EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False, "n_ctx": 512}
DRAFTS: dict[str, Any] = {**EXACT, "draft": "prompt-lookup", "run_ahead": 16}
GREEDY: dict[str, Any] = {
    "temperature": 0, "ignore_eos": True, "max_tokens": 150,
    "logit_bias": dict.fromkeys((97, 98, 99), 6.0),
}  # fmt: skip
PROMPT = random_ids(30) * 3
STORY = "Once upon a time there was a small dog. " * 4


def n_steps(engine: Engine) -> int:
    return engine.stats().n_decodes


def same(found: Generation, want: Generation) -> None:
    assert found.read() == want.read()
    assert found.tokens == want.tokens
    assert found.finish_reason == want.finish_reason


@pytest.fixture
def plain(make_engine: MakeEngine, tiny_llama: Path) -> Engine:
    return make_engine(tiny_llama, **EXACT)


@pytest.fixture
def drafting(make_engine: MakeEngine, tiny_llama: Path) -> Engine:
    return make_engine(tiny_llama, **DRAFTS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "top_k": 0, "seed": 7},
        {"temperature": 0.7, "seed": 3, "repeat_penalty": 1.2, "frequency_penalty": 0.2},
        {"stop": ["ab", "ba"]},
        {"max_tokens": 37},
        {"ignore_eos": False},
    ],
)
def test_text_is_the_one_without_guesses(
    plain: Engine, drafting: Engine, options: dict[str, Any]
) -> None:
    same(
        drafting.generate(PROMPT, **(GREEDY | options)),
        plain.generate(PROMPT, **(GREEDY | options)),
    )


def test_text_that_repeats_takes_fewer_steps(make_engine: MakeEngine) -> None:
    plain, drafting = make_engine(MODEL_PATH, **EXACT), make_engine(MODEL_PATH, **DRAFTS)
    options = GREEDY | {"logit_bias": None}
    plain.generate(STORY, **options).read()
    generation = drafting.generate(STORY, **options)
    generation.read()
    usage = generation.usage
    assert usage.completion_tokens == 150
    assert 0 < usage.accepted_tokens <= usage.draft_tokens
    assert n_steps(drafting) == n_steps(plain) - usage.accepted_tokens
    assert drafting.slots[0].tokens == plain.slots[0].tokens


def test_rows_logits_and_logprobs_are_those_of_each_token(plain: Engine, drafting: Engine) -> None:
    options = GREEDY | {
        "capture": Capture("probs", vocab_logits=True), "top_logprobs": 2, "max_tokens": 80,
    }  # fmt: skip
    want = list(plain.generate(PROMPT, **options))
    generation = drafting.generate(PROMPT, **options)
    check_tokens(list(generation), want)
    assert generation.usage.accepted_tokens > 0
    hidden = GREEDY | {"capture": Capture("logits", hidden=[0]), "max_tokens": 40}
    for one, other in zip(
        drafting.generate(PROMPT, **hidden), plain.generate(PROMPT, **hidden), strict=True
    ):
        assert one.id == other.id
        for ours, theirs in zip(one.hidden, other.hidden, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_kernel_that_attends_itself_gives_the_rows_of_each(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    options = GREEDY | {"capture": "probs", "max_tokens": 60}
    kernel: dict[str, Any] = {"kv_type": "f32", "flash_attn": True, "n_ctx": 512}
    want = list(make_engine(tiny_llama, **kernel).generate(PROMPT, **options))
    engine = make_engine(tiny_llama, draft="prompt-lookup", run_ahead=16, **kernel)
    generation = engine.generate(PROMPT, **options)
    for one, other in zip(generation, want, strict=True):
        assert one.id == other.id
        np.testing.assert_allclose(one.rows, other.rows, atol=1e-5)
    assert generation.usage.accepted_tokens > 0


def test_closed_generation_leaves_what_was_taken(plain: Engine, drafting: Engine) -> None:
    want = plain.generate(PROMPT, **GREEDY)
    want.read()
    with drafting.generate(PROMPT, **GREEDY) as generation:
        taken = [next(generation).id for _ in range(40)]
        n_prompt = generation.usage.prompt_tokens
    assert taken == want.tokens[:40]
    assert drafting.slots[0].tokens[n_prompt:] == taken[:-1]
    again = drafting.generate([*drafting.slots[0].tokens, taken[-1]], **GREEDY)
    again.read()
    assert again.tokens[:110] == want.tokens[40:]


def test_requests_that_do_not_speculate(drafting: Engine) -> None:
    @mod
    def watch(_event: Any, _actions: Any, _tokenizer: Any) -> None:
        """Look on."""

    for options in (
        {"speculate": False}, {"speculate": 0}, {"mods": [watch]}, {"deterministic": True},
        {"regex": "[a-c]*"},
    ):  # fmt: skip
        generation = drafting.generate(PROMPT, **(GREEDY | {"max_tokens": 30} | options))
        generation.read()
        assert generation.usage.draft_tokens == 0


def test_number_of_guesses_is_bounded(drafting: Engine) -> None:
    generation = drafting.generate(PROMPT, speculate=1, **GREEDY)
    generation.read()
    assert generation.usage.accepted_tokens > 0
    assert n_steps(drafting) >= 75


def test_several_texts_share_their_steps(
    make_engine: MakeEngine, plain: Engine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_slots=2, **DRAFTS)
    want = plain.generate(PROMPT, **GREEDY)
    want.read()
    generations = [engine.generate(PROMPT, slot=i, **GREEDY) for i in range(2)]
    for generation in generations:
        generation.read()
        assert generation.tokens == want.tokens


def test_wrong_options_are_named(
    make_engine: MakeEngine, tiny_llama: Path, plain: Engine, drafting: Engine
) -> None:
    for value in ("mtp", "draft.gguf", "lookup", 3, True):
        with pytest.raises(errors.RequestError, match="draft"):
            make_engine(tiny_llama, draft=value)
    for value in (-1, 63, 1.5, "yes"):
        with pytest.raises(errors.RequestError, match="speculate"):
            drafting.generate(PROMPT, speculate=value)  # type: ignore[arg-type]
    with pytest.raises(errors.RequestError, match="prompt-lookup"):
        plain.generate(PROMPT, speculate=True)
    assert plain.generate(PROMPT, speculate=False, max_tokens=2).read()


@pytest.mark.parametrize(
    ("write", "options"),
    [
        (tiny_gguf.write_jamba, {}),
        (tiny_gguf.write_mamba, {}),
        (tiny_gguf.write_gemma3n, {"swa_full": False, "n_ubatch": 16, "n_ctx": 1024}),
        (tiny_gguf.write_bert, {}),
    ],
)
def test_model_whose_cache_cannot_drop_single_tokens_is_refused(
    make_engine: MakeEngine, tmp_path: Path, write: Callable[[Path], Path], options: dict[str, Any]
) -> None:
    with pytest.raises(errors.UnsupportedModel, match="draft='prompt-lookup'"):
        make_engine(write(tmp_path / "model.gguf"), draft="prompt-lookup", **options)


def test_window_with_its_full_cache_speculates(make_engine: MakeEngine, tmp_path: Path) -> None:
    model = tiny_gguf.write_gemma4(tmp_path / "model.gguf")
    prompt = random_ids(30) * 3
    want = make_engine(model, **EXACT).generate(prompt, **GREEDY)
    found = make_engine(model, **DRAFTS).generate(prompt, **GREEDY)
    same(found, want)
