"""Guards: what they return, what they refuse, and mods that act on them, on the demo model."""

from __future__ import annotations

import asyncio
import random
import threading
import warnings
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Engine, Sampling, guards, mod
from kqview.errors import (
    EmittedError,
    HeadFileError,
    InvalidCapture,
    KqviewError,
    ModFailed,
    PromptTooLong,
    RequestError,
)
from kqview.heads import (
    Head,
    HeadFile,
    HeadFileWarning,
    ModelKey,
    made_examples,
    measures,
)
from kqview.heads.calibration import ndcg
from kqview.mods import Added
from kqview.mods.attention import LookbackGuard
from tests.support import tiny_gguf
from tests.support.rows import near

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kqview.mods import ActionBuilder, Backtrack, ModTokenizer
    from kqview.mods.events import Event

LONG = "a bird " * 600
DOCUMENTS = ["Anna has a red ball.", "Tom found a silver key.", "The bird sang all day."]
QUERY = "Who found a key?"
ORDER = "Tell a story about a bird."


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.demo(n_threads=1, n_slots=2, n_ctx=512, kv_type="f32") as engine:
        yield engine


def head_file(engine: Engine, task: str, *heads: Head, **fields: Any) -> HeadFile:
    model = ModelKey.of(engine.model, engine.fingerprint())
    return HeadFile(task=task, model=model, heads=heads, **fields)


# ---- scores


def test_rerank_is_the_mean_over_heads_of_the_measure(engine: Engine):
    found = guards.rerank(engine, QUERY, DOCUMENTS)
    want = measures.rerank(engine, QUERY, DOCUMENTS).values.mean(axis=1)
    assert found == pytest.approx(want, abs=near(1e-5))
    assert all(isinstance(one, float) for one in found)


def test_rerank_with_a_head_file_weighs_its_heads(engine: Engine):
    heads = head_file(engine, "needle", Head(1, 1, 0.25), Head(3, 0, 0.75))
    whole = measures.rerank(engine, QUERY, DOCUMENTS)
    at = [whole.pairs.index(pair) for pair in ((1, 1), (3, 0))]
    want = whole.values[:, at] @ [0.25, 0.75]
    assert guards.rerank(engine, QUERY, DOCUMENTS, heads) == pytest.approx(want, abs=near(1e-5))


def test_rerank_averages_over_orders_of_the_documents(engine: Engine):
    order = [*range(len(DOCUMENTS))]
    random.Random(1).shuffle(order)
    assert order != sorted(order)
    shuffled = guards.rerank(engine, QUERY, [DOCUMENTS[i] for i in order])
    want = np.array(guards.rerank(engine, QUERY, DOCUMENTS))
    want[order] += shuffled
    found = guards.rerank(engine, QUERY, DOCUMENTS, permutations=2)
    assert found == pytest.approx(want / 2, abs=near(1e-4))
    with pytest.raises(RequestError, match="permutations must be a whole number from 1"):
        guards.rerank(engine, QUERY, DOCUMENTS, permutations=0)


def test_injection_score_falls_as_the_instruction_gets_attention(engine: Engine):
    measures.injection(engine, ORDER, DOCUMENTS[0])
    # All of these evaluate the last token alone, so that they round alike.
    measured = measures.injection(engine, ORDER, DOCUMENTS[0]).values[0]
    found = guards.injection_score(engine, ORDER, DOCUMENTS[0])
    assert found.score == float(found) == pytest.approx(1 - measured.mean(), abs=near(1e-5))
    assert (found.threshold, found.is_injected) == (None, None)
    heads = head_file(engine, "injection", Head(2, 3, -1.0), bias=1.0, thresholds={"injected": 0.5})
    found = guards.injection_score(engine, ORDER, DOCUMENTS[0], heads)
    assert found.score == pytest.approx(1 - measured[2 * 8 + 3], abs=near(1e-5))
    assert found.is_injected == (found.score >= 0.5)


def test_cite_names_the_source_with_the_most_attention(engine: Engine):
    answer = "Tom found a silver key. The bird sang."
    found = guards.cite(engine, DOCUMENTS, QUERY, answer)
    assert [one.text for one in found] == ["Tom found a silver key.", "The bird sang."]
    given = measures.answered(engine, DOCUMENTS, QUERY, answer)
    for citation, one in zip(found, measures.cite(engine, given), strict=True):
        assert citation.scores == pytest.approx(one.values.mean(axis=1), abs=near(1e-5))
        assert citation.source == int(np.argmax(citation.scores))
    copying = head_file(engine, "cite", Head(1, 1))
    assert [one.source for one in guards.cite(engine, DOCUMENTS, QUERY, answer, copying)] == [1, 2]


def test_grounding_has_a_score_and_a_verdict_for_each_sentence(engine: Engine):
    answer = "Tom found a silver key. Nobody knows more."
    given = measures.answered(engine, DOCUMENTS, QUERY, answer)
    measured = measures.grounding(engine, given).values
    found = guards.grounding(engine, DOCUMENTS, QUERY, answer)
    assert [one.score for one in found] == pytest.approx(measured.mean(axis=1), abs=near(1e-5))
    assert found[0].is_grounded is None
    heads = head_file(
        engine, "grounding", Head(1, 1, 8.0), bias=-4.0, link="logistic",
        thresholds={"grounded": 0.5},
    )  # fmt: skip
    found = guards.grounding(engine, DOCUMENTS, QUERY, answer, heads)
    want = 1 / (1 + np.exp(4 - 8 * measured[:, 9]))
    assert [one.score for one in found] == pytest.approx(want, abs=1e-4)
    assert [one.is_grounded for one in found] == [score >= 0.5 for score in want]
    assert engine.detokenize(given.answer[found[1].start : found[1].stop]).strip() == found[1].text


# ---- what is refused

BAD: dict[str, tuple[Callable[[Engine], object], type[KqviewError], str]] = {
    "no documents": (lambda e: guards.rerank(e, QUERY, []), RequestError, "documents must be"),
    "one text for documents": (
        lambda e: guards.rerank(e, QUERY, "text"), RequestError, "documents must be"
    ),
    "empty document": (
        lambda e: guards.rerank(e, QUERY, ["a", " \n"]), RequestError, r"documents\[1\] must be"
    ),
    "empty query": (lambda e: guards.rerank(e, "", ["a"]), RequestError, "query must be"),
    "empty instruction": (
        lambda e: guards.injection_score(e, " ", "x"), RequestError, "instruction must be"
    ),
    "long data": (
        lambda e: guards.injection_score(e, ORDER, LONG), PromptTooLong, "a slot holds 512"
    ),
    "no sources": (lambda e: guards.cite(e, [], QUERY, "x"), RequestError, "sources must be"),
    "long sources": (
        lambda e: guards.cite(e, [LONG], QUERY, "x"), PromptTooLong, "a slot holds 512"
    ),
    "many sources": (
        lambda e: guards.cite(e, ["a"] * 600, QUERY, "x"), KqviewError, "512"
    ),
    "empty answer": (
        lambda e: guards.grounding(e, DOCUMENTS, QUERY, ""), RequestError, "answer must be"
    ),
    "no head file": (
        lambda e: guards.rerank(e, QUERY, DOCUMENTS, "heads.json"),  # type: ignore[arg-type]
        RequestError, "heads must be a HeadFile",
    ),
    "heads of another task": (
        lambda e: guards.rerank(e, QUERY, DOCUMENTS, head_file(e, "injection", Head(0, 0))),
        RequestError, "'injection', here 'rerank'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_a_typed_error(engine: Engine, what: str):
    call, error, message = BAD[what]
    with pytest.raises(error, match=message):
        call(engine)


def test_heads_of_another_model_are_refused_and_of_another_quantisation_warn(engine: Engine):
    good = head_file(engine, "rerank", Head(0, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guards.rerank(engine, QUERY, DOCUMENTS, good)
    other = replace(good, model=replace(good.model, n_embd=576))
    with pytest.raises(HeadFileError, match="n_embd 576, here 128"):
        guards.rerank(engine, QUERY, DOCUMENTS, other)
    quantised = replace(good, model=replace(good.model, fingerprint="0" * 64, file_type="Q4_1"))
    with pytest.warns(HeadFileWarning, match="Q4_1"):
        guards.rerank(engine, QUERY, DOCUMENTS, quantised)


# ---- mods


def test_injection_mod_judges_the_prompt_as_the_function_does(engine: Engine):
    prompt = guards.instruction_prompt(engine, ORDER, DOCUMENTS[0])
    want = guards.injection_score(engine, ORDER, DOCUMENTS[0]).score
    lax = guards.StopOnInjection(engine, prompt, threshold=want + 0.05)
    generation = engine.generate(prompt.ids, mods=[lax], capture=lax.capture, max_tokens=4)
    generation.read()
    assert generation.mods[0].result.score == pytest.approx(want, abs=1e-3)
    assert generation.finish_reason != "error"
    strict = guards.StopOnInjection(engine, prompt, threshold=want - 0.05)
    generation = engine.generate(prompt.ids, mods=[strict], capture=strict.capture, max_tokens=4)
    with pytest.raises(EmittedError, match=r"data contain orders: score 0\.\d+"):
        generation.read()
    assert generation.text == ""


def test_injection_mod_answers_in_the_models_place(engine: Engine):
    prompt = guards.instruction_prompt(engine, ORDER, DOCUMENTS[0])
    guard = guards.StopOnInjection(engine, prompt, threshold=0.0, message="I will not.")
    generation = engine.generate(prompt.ids, mods=[guard], capture=guard.capture)
    assert generation.read().strip() == "I will not."


def asking(engine: Engine, ask: Any) -> Any:
    """A generation whose prompt is suspect, and whose mod asks *ask*."""
    prompt = guards.instruction_prompt(engine, ORDER, DOCUMENTS[0])
    guard = guards.StopOnInjection(engine, prompt, threshold=0.0, message="No.", ask=ask)
    return engine.generate(
        prompt.ids, mods=[guard], capture=guard.capture, max_tokens=4, temperature=0
    )


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("goes_on", [True, False])
def test_injection_mod_asks_before_the_first_token(engine: Engine, goes_on: bool, is_async: bool):
    asked: list[tuple[str, guards.InjectionScore]] = []

    def ask(score: guards.InjectionScore) -> bool:
        asked.append((generation.text, score))
        return goes_on

    async def ask_later(score: guards.InjectionScore) -> bool:
        await asyncio.sleep(0)
        return ask(score)

    generation = asking(engine, ask_later if is_async else ask)
    found = asyncio.run(generation.aread()) if is_async else generation.read()
    plain = engine.generate(generation.prompt_ids, max_tokens=4, temperature=0).read()
    assert found.strip() == (plain.strip() if goes_on else "No.")
    assert asked == [("", generation.mods[0].result)]
    assert (generation.mods[0].answer, generation.mods[0].result.is_injected) == (goes_on, True)


def test_injection_mod_asks_of_suspect_prompts_only(engine: Engine):
    prompt = guards.instruction_prompt(engine, ORDER, DOCUMENTS[0])
    guard = guards.StopOnInjection(
        engine, prompt, threshold=2.0, ask=lambda score: pytest.fail(str(score))
    )
    generation = engine.generate(prompt.ids, mods=[guard], capture=guard.capture, max_tokens=2)
    generation.read()
    assert generation.mods[0].answer is None


def test_others_go_on_while_the_injection_mod_asks():
    with Engine.demo(n_threads=1, n_slots=1, n_ctx=512) as only:
        answers: list[str] = []

        def another_request(score: guards.InjectionScore) -> bool:
            # It would hang if asking held up the engine, or kept its only slot.
            one = threading.Thread(
                target=lambda: answers.append(only.generate("Anna", max_tokens=8).read())
            )
            one.start()
            one.join(30)
            return len(answers) == 1

        prompt = guards.instruction_prompt(only, ORDER, DOCUMENTS[0])
        plain = only.generate(prompt.ids, max_tokens=4, temperature=0).read()
        assert asking(only, another_request).read() == plain
        assert answers


def test_injection_mod_that_nobody_answers_ends_with_the_time_limit(engine: Engine):
    prompt = guards.instruction_prompt(engine, ORDER, DOCUMENTS[0])
    answered = threading.Event()
    guard = guards.StopOnInjection(
        engine, prompt, threshold=0.0, ask=lambda score: answered.wait(30)
    )
    with pytest.raises(ModFailed, match="StopOnInjection"):
        engine.generate(
            prompt.ids, mods=[guard], capture=guard.capture, mod_time_limit_s=0.2
        ).read()
    answered.set()


def test_injection_mod_whose_question_fails_ends_the_request(engine: Engine):
    for ask in (lambda score: "yes", lambda score: 1 / 0):  # type: ignore[reportUnknownLambdaType]
        generation = asking(engine, ask)
        with pytest.raises(ModFailed, match="StopOnInjection failed at ForwardPass"):
            generation.read()
        assert generation.text == ""

    async def wait(score: guards.InjectionScore) -> bool:
        return True

    with pytest.raises(RequestError, match="iterate it with async for"):
        asking(engine, wait).read()


def test_guards_capture_sums_and_the_rows_of_heads_that_count(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    seen: list[Capture] = []
    attend: Any = engine.attend

    def noted(ids: Any, capture: Any, **options: Any) -> Any:
        seen.append(capture)
        return attend(ids, capture, **options)

    monkeypatch.setattr(engine, "attend", noted)
    heads = head_file(engine, "needle", Head(3, 5))
    answer = "Tom found a key."
    guards.rerank(engine, QUERY, DOCUMENTS, heads)
    guards.cite(engine, DOCUMENTS, QUERY, answer, heads)
    guards.grounding(engine, DOCUMENTS, QUERY, answer, replace(heads, task="grounding"))
    guards.injection_score(engine, ORDER, DOCUMENTS[0], replace(heads, task="injection"))
    prompt = story(engine)
    seen += [
        guards.StopOnInjection(
            engine, prompt, replace(heads, task="injection"), threshold=1
        ).capture,
        guards.TakeBackUngrounded(
            engine, prompt, replace(heads, task="grounding"), threshold=1
        ).capture,
    ]
    assert len(seen) == 7
    assert all(one.spans and one.layers == (3,) for one in seen)
    assert [one.heads for one in seen[-2:]] == [(5,), (5,)]  # what is between tokens
    align = guards.AlignAttByHeads(engine, "silver key", heads).capture
    assert (align.layers, align.heads, align.spans) == ((3,), (5,), None)


def test_documents_are_evaluated_once_for_both_queries():
    documents = [f"{one} Number {i}." for i, one in enumerate(DOCUMENTS * 4)]
    with Engine.demo(n_threads=1, n_slots=1, n_ctx=512) as fresh:
        guards.rerank(fresh, QUERY, documents)
        n_evaluated = fresh.stats().prefill_tokens
        both: list[list[int]] = []
        for query in (QUERY, measures.CONTENT_FREE):
            listed = "\n\n".join(f"[{i + 1}] {one}" for i, one in enumerate(documents))
            prompt = measures.chat_prompt(
                fresh,
                f"Here are some paragraphs:\n\n{listed}\n\nPlease find information that is "
                f"relevant to the following query in the paragraphs above.\n\nQuery: {query}",
                [*documents, "Query:", query],
            )
            both.append(prompt.ids[: prompt.spans[-1][1]])
    first, second = both
    pairs = zip(first, second, strict=False)
    n_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert n_evaluated == len(first) + len(second) - n_same
    assert n_evaluated < len(first) + 8


def test_mods_refuse_other_captures_prompts_and_spans(engine: Engine):
    prompt = guards.instruction_prompt(engine, ORDER, DOCUMENTS[0])
    guard = guards.StopOnInjection(engine, prompt, threshold=2.0)
    with pytest.raises(InvalidCapture, match=r"capture=guard\.capture"):
        engine.generate(prompt.ids, mods=[guard], capture="probs")
    generation = engine.generate([*prompt.ids, 5], mods=[guard], capture=guard.capture)
    with pytest.raises(EmittedError, match="not the one that the mod was made for"):
        generation.read()
    other = Capture(spans=[(0, 1), (1, 2)])
    with pytest.raises(KqviewError, match="StopOnInjection"):
        engine.generate(prompt.ids, mods=[guard], capture=other).read()
    for spans in ([], [(3, len(prompt.ids) + 1)], [(4, 4)]):
        with pytest.raises(RequestError, match="prompt has"):
            guards.StopOnInjection(engine, guards.Prompt(prompt.ids, spans), threshold=1.0)
    with pytest.raises(RequestError, match="threshold must be"):
        guards.StopOnInjection(engine, prompt)


def story(engine: Engine) -> guards.Prompt:
    """A prompt that the model continues with sentences."""
    text = "Mirelda found a silver key near the old bridge. Then Mirelda"
    ids = engine.tokenize(text)
    return guards.Prompt(ids, measures.find_parts(engine, ids, ["silver key near the old bridge"]))


def test_grounded_text_is_left_alone(engine: Engine):
    prompt = story(engine)
    guard = guards.TakeBackUngrounded(engine, prompt, threshold=0.0)
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "capture": guard.capture}
    generation = engine.generate(prompt.ids, mods=[guard], **options)
    assert generation.read() == engine.generate(prompt.ids, **options).read()
    assert generation.mods[0].n_taken_back == 0
    assert len(generation.mods[0].scores) > 1


@pytest.mark.parametrize("of_file", [(), (Head(1, 3, 2.0), Head(2, 0), Head(2, 6, -1.0))])
def test_scores_of_the_mod_are_the_lookback_ratios_of_its_sentences(
    engine: Engine, of_file: tuple[Head, ...]
):
    prompt = story(engine)
    heads = head_file(engine, "grounding", *of_file) if of_file else None
    guard = guards.TakeBackUngrounded(engine, prompt, heads, threshold=-1.0)
    assert guard.capture.heads == ((0, 3, 6) if of_file else None)
    generation = engine.generate(
        prompt.ids, mods=[guard], capture=guard.capture, max_tokens=40, temperature=0
    )
    ids = [token.id for token in generation]
    given = measures.Answered(
        prompt, ids,
        [measures.Sentence(".", 0, 1 + [engine.token_text(one) for one in ids].index("."))],
    )  # fmt: skip
    found = measures.grounding(engine, given)
    want = found.values.mean() if heads is None else heads.score(found.values[0], found.pairs)
    assert generation.mods[0].scores[0] == pytest.approx(want, abs=5e-3)


def test_ungrounded_sentence_is_taken_back_and_the_best_attempt_stays(engine: Engine):
    prompt = story(engine)
    plain = engine.generate(prompt.ids, max_tokens=40, temperature=0).read()
    guard = guards.TakeBackUngrounded(engine, prompt, threshold=1.0, retries=2)  # none is
    generation = engine.generate(
        prompt.ids, mods=[guard], capture=guard.capture, max_tokens=80, temperature=0
    )
    text = generation.read()
    seen = generation.mods[0]
    assert seen.n_taken_back > 0
    assert seen.scores
    first = len(engine.tokenize(text.split(".")[0] + ".", add_special=False))
    given = measures.Answered(prompt, list(generation.tokens), [measures.Sentence(".", 0, first)])
    best = measures.grounding(engine, given).values.mean()
    assert seen.scores[0] == pytest.approx(best, abs=2e-2)
    kept = guards.TakeBackUngrounded(engine, prompt, threshold=1.0, retries=0)
    again = engine.generate(
        prompt.ids, mods=[kept], capture=kept.capture, max_tokens=40, temperature=0
    )
    assert again.read() == plain
    assert seen.scores[0] >= again.mods[0].scores[0] - 1e-3


def test_sentences_behind_one_that_stays_are_judged_by_their_own_tokens(engine: Engine):
    prompt = story(engine)
    guard = guards.TakeBackUngrounded(engine, prompt, threshold=1.0, retries=1)
    generation = engine.generate(
        prompt.ids, mods=[guard], capture=guard.capture, max_tokens=80, temperature=0
    )
    generation.read()
    ids = generation.tokens
    ends = [i + 1 for i, one in enumerate(ids) if engine.token_text(one).endswith(".")]
    sentences = [
        measures.Sentence(".", start, stop) for start, stop in zip([0, *ends], ends, strict=False)
    ]
    want = measures.grounding(engine, measures.Answered(prompt, ids, sentences)).values.mean(axis=1)
    assert len(want) > 2
    assert generation.mods[0].scores == pytest.approx(want, abs=2e-2)
    assert generation.mod_errors == ()


def test_mod_judges_the_right_tokens_behind_what_another_mod_took_back(engine: Engine):
    prompt = story(engine)
    guard = guards.TakeBackUngrounded(engine, prompt, threshold=0.0)

    @mod
    def other(event: Event, actions: ActionBuilder, tokenizer: ModTokenizer) -> Backtrack | None:
        return actions.backtrack(2) if isinstance(event, Added) and event.step == 4 else None

    generation = engine.generate(
        prompt.ids, mods=[guard, other], capture=guard.capture, max_tokens=60, temperature=0
    )
    generation.read()
    ids = generation.tokens
    ends = [i + 1 for i, one in enumerate(ids) if engine.token_text(one).endswith(".")]
    assert ends[0] > 4
    sentences = [measures.Sentence(".", start, stop) for start, stop in pairwise(ends)]
    want = measures.grounding(engine, measures.Answered(prompt, ids, sentences)).values.mean(axis=1)
    assert len(want) > 1
    # What is left of the first sentence is judged as one of its own.
    assert generation.mods[0].scores[1:] == pytest.approx(want, abs=2e-2)


def test_best_of_several_branches_stays_sentence_by_sentence(engine: Engine):
    prompt = story(engine)
    before = engine.stats().prefill_tokens
    chosen: dict[int, list[guards.GroundedSentence]] = {}
    for n in (1, 2):
        sampling = Sampling(temperature=1.0, seed=5)
        found = guards.best_grounded(engine, prompt, n=n, max_tokens=40, sampling=sampling)
        chosen[n] = [*found]
    # The prompt is evaluated once, then one token for each branch.
    n_sentences = sum(n * len(some) for n, some in chosen.items())
    assert engine.stats().prefill_tokens - before <= len(prompt.ids) + n_sentences + 3
    assert chosen[2][0].score >= chosen[1][0].score - 1e-2  # the first of the two is the same
    for some in chosen.values():
        ids = engine.tokenize("".join(one.text for one in some), add_special=False)
        assert [one.start for one in some] == [0, *(one.stop for one in some[:-1])]
        assert len(ids) == some[-1].stop <= 40
        given = measures.Answered(prompt, ids, list(some))
        want = measures.grounding(engine, given).values.mean(axis=1)
        assert [one.score for one in some] == pytest.approx(want, abs=2e-2)
        assert all(one.text.endswith((".", "!", "?", "\n")) for one in some[:-1])


def test_best_of_more_branches_than_slots_is_refused(engine: Engine):
    with pytest.raises(RequestError, match="n must be a whole number from 1 to 2"):
        guards.best_grounded(engine, story(engine), n=3)
    with pytest.raises(RequestError, match="max_tokens"):
        guards.best_grounded(engine, story(engine), n=1, max_tokens=0)


def test_best_of_several_needs_sources(engine: Engine):
    prompt = story(engine)
    for spans in ((), ((0, len(prompt.ids) + 1),)):
        with pytest.raises(RequestError, match="span"):
            guards.best_grounded(engine, replace(prompt, spans=spans), n=1)


def test_best_of_several_ends_with_the_context():
    sampling = Sampling(temperature=1.0, seed=2**32 - 2, ignore_eos=True)
    with Engine.demo(n_ctx=256, n_slots=2) as small:
        prompt = story(small)
        some = list(guards.best_grounded(small, prompt, n=2, max_tokens=10_000, sampling=sampling))
        assert small.n_ctx <= len(prompt.ids) + some[-1].stop <= small.n_ctx + 1


def test_align_att_follows_the_weighted_heads_of_a_file(engine: Engine):
    text = "Mirelda found a silver key near the old bridge. Then Mirelda"
    ids = engine.tokenize(text)
    heads = head_file(engine, "align", Head(1, 0, 0.2), Head(1, 1, 0.5), Head(3, 2, 0.3))
    guard = guards.AlignAttByHeads(engine, "Mirelda found a silver key", heads)
    generation = engine.generate(
        ids, mods=[guard], capture=guard.capture, max_tokens=8, temperature=0
    )
    generation.read()
    seen = generation.mods[0]
    (start, stop), *_ = measures.find_parts(engine, ids, ["Mirelda found a silver key"])
    whole = [*ids, *generation.tokens][: len(ids) + len(seen.alignment) - 1]
    maps = engine.attend(whole, "probs").array()
    assert not isinstance(maps, tuple)
    mean = 0.2 * maps[1, 0] + 0.5 * maps[1, 1] + 0.3 * maps[3, 2]
    want = start + mean[len(ids) - 1 :, start:stop].argmax(axis=1)
    assert seen.alignment == want.tolist()
    wide = engine.generate(ids, mods=[guard], capture="probs", max_tokens=8)
    with pytest.raises(EmittedError, match=r"the 32 heads .* capture=guard\.capture"):
        wide.read()


def test_align_att_takes_heads_of_layers_that_differ_in_them(tmp_path: Path):
    ids = list(range(30))
    with Engine(tiny_gguf.write_gemma4(tmp_path / "model.gguf"), n_ctx=64) as gemma:
        heads = head_file(gemma, "align", Head(0, 3, 1.0), Head(1, 0, 0.5))
        guard = guards.AlignAttByHeads(gemma, (2, 20), heads)
        generation = gemma.generate(
            ids, mods=[guard], capture=guard.capture, max_tokens=1, ignore_eos=True
        )
        generation.read()
        maps = gemma.attend(ids, Capture("probs", layers=[0, 1])).array()
        mean = maps[0][3, -1] + 0.5 * maps[1][0, -1]
        assert generation.mods[0].alignment == [2 + int(mean[2:20].argmax())]


@pytest.mark.parametrize("of", ["sentences", "windows"])
def test_further_attempts_stay_within_what_a_constraint_allows(engine: Engine, of: str):
    prompt = story(engine)
    guard: Any = guards.TakeBackUngrounded(engine, prompt, threshold=1.0)  # none is
    capture: Any = guard.capture
    if of == "windows":
        guard, capture = LookbackGuard((0, 4), 1.0, "resample", window=3), "probs"
    generation = engine.generate(
        prompt.ids, mods=[guard], capture=capture, max_tokens=40, temperature=0,
        regex=r"7\+7=14\.",  # begins with one token only
    )  # fmt: skip
    assert generation.read() == "7+7=14."
    assert generation.mods[0].n_taken_back > 0


@pytest.mark.needs("smollm2")
@pytest.mark.full
def test_heads_of_a_real_model_rank_where_no_word_is_shared():
    with Engine.demo("smollm2", n_ctx=1024) as real:
        heads = head_file(real, "rerank", Head(8, 7, 0.3), Head(9, 0, 0.3), Head(9, 2, 0.3))
        found: dict[bool, list[float]] = {True: [], False: []}
        for example in made_examples("rerank", 6, seed=77):
            for is_chosen, values in found.items():
                scores = guards.rerank(
                    real, example["query"], example["documents"], heads if is_chosen else None
                )
                values.append(ndcg(np.array(scores), np.eye(8)[example["relevant"][0]]))
        assert np.mean(found[True]) > 0.8 > np.mean(found[False])  # 0.49 by chance
