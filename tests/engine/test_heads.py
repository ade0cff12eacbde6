"""Measures of heads against numpy versions of the papers' formulas, from whole maps."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Edit, Engine, heads
from kqview.errors import PromptTooLong, RequestError
from kqview.heads import HeadFile, Task, calibrate, made_examples, measures
from kqview.heads.calibration import Case, choose
from tests.support import tiny_gguf
from tests.support.rows import near

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.engine.conftest import MakeEngine

DOCUMENTS = ["Anna has a red ball.", "Tom found a silver key.", "The bird sang all day."]
QUERY = "Who found a key?"
TOLERANCE = 2e-4  # float16 cache; prompts evaluated in steps of other sizes


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.demo(n_threads=1, n_slots=2, n_ctx=512, kv_type="f32") as engine:
        yield engine


def whole_maps(engine: Engine, ids: list[int]) -> Any:
    """All attention of a prompt, ``(n_pairs, n_tokens, n_tokens)`` float64."""
    maps = engine.attend(ids, "probs").array()
    assert not isinstance(maps, tuple)
    return maps.reshape(-1, len(ids), len(ids)).astype(np.float64)


def text_of(engine: Engine, ids: list[int], span: tuple[int, int]) -> str:
    return engine.detokenize(ids[slice(*span)]).strip()


def test_parts_of_a_prompt_are_found_in_their_order(engine: Engine):
    prompt = measures.chat_prompt(engine, "one two one two", ["one", "two", "one"])
    assert [text_of(engine, prompt.ids, span) for span in prompt.spans] == ["one", "two", "one"]
    assert prompt.spans[0] < prompt.spans[1] < prompt.spans[2]
    with pytest.raises(RequestError, match="is not in the prompt"):
        measures.chat_prompt(engine, "one two", ["two", "one"])


def test_a_model_without_template_gets_plain_text(make_engine: MakeEngine, tmp_path: Path):
    plain = make_engine(
        tiny_gguf.write_preset(tmp_path / "plain.gguf", "tiny_llama", chat_template=None)
    )
    prompt = measures.chat_prompt(plain, "b c", ["a", "c"], system="a")
    assert plain.detokenize(prompt.ids).strip() == "a\n\nb c"
    assert [text_of(plain, prompt.ids, span) for span in prompt.spans] == ["a", "c"]


def test_short_documents_are_found_where_they_stand(engine: Engine):
    documents = ["1", "user", "paragraphs", "2", "[2] 2"]
    prompt = measures._query_prompt(engine, "1", documents)  # pyright: ignore[reportPrivateUsage]
    assert [text_of(engine, prompt.ids, span) for span in prompt.spans] == [*documents, "1"]
    stops = [stop for _, stop in prompt.spans]
    for i, stop in enumerate(stops[:-1]):  # behind its number
        assert engine.detokenize(prompt.ids[:stop]).endswith(f"[{i + 1}] {documents[i]}")


def test_rerank_is_the_attention_of_the_query_less_that_of_no_query(engine: Engine):
    found = measures.rerank(engine, QUERY, DOCUMENTS)
    both: list[Any] = []
    for query in (QUERY, "N/A"):
        listed = "\n\n".join(f"[{i + 1}] {one}" for i, one in enumerate(DOCUMENTS))
        prompt = measures.chat_prompt(
            engine,
            f"Here are some paragraphs:\n\n{listed}\n\nPlease find information that is relevant to "
            f"the following query in the paragraphs above.\n\nQuery: {query}",
            [*DOCUMENTS, "Query:", query],
        )
        maps = whole_maps(engine, prompt.ids)
        *documents, _, asked = prompt.spans
        both.append([maps[:, slice(*asked), slice(*one)].sum(2).mean(1) for one in documents])
    assert found.values.shape == (3, 32)
    assert found.values == pytest.approx(np.array(both[0]) - np.array(both[1]), abs=TOLERANCE)
    assert found.pairs[:2] == ((0, 0), (0, 1))
    assert found.pairs[-1] == (3, 7)


def test_documents_longer_than_the_context_are_spread_and_cut(
    caplog: pytest.LogCaptureFixture,
):
    with Engine.demo(n_threads=1, n_ctx=192) as small:
        long = " ".join(DOCUMENTS * 20)
        found = measures.rerank(small, QUERY, [*DOCUMENTS, long])
        assert found.values.shape == (4, 32)
        assert np.isfinite(found.values).all()
        assert "4 documents, 1 of them cut, are ranked in" in caplog.text
        with pytest.raises(PromptTooLong, match="query leaves"):
            measures.rerank(small, " ".join(DOCUMENTS * 9), DOCUMENTS)


def test_injection_is_the_attention_of_the_last_token_to_the_instruction(engine: Engine):
    found = measures.injection(engine, "Tell a story.", "Anna has a ball.")
    prompt = measures.instruction_prompt(engine, "Tell a story.", "Anna has a ball.")
    assert text_of(engine, prompt.ids, prompt.spans[0]) == "Tell a story."
    want = whole_maps(engine, prompt.ids)[:, -1, slice(*prompt.spans[0])].sum(1)
    assert found.values[0] == pytest.approx(want, abs=TOLERANCE)


def test_needle_is_found_by_heads_whose_maximum_is_the_copied_token(engine: Engine):
    context = "The secret number of Anna is 48213. Tom has a ball."
    found = measures.needle(engine, context, "What is the number?", "48213")
    prompt = measures.chat_prompt(engine, f"{context}\n\nWhat is the number?", ["48213"])
    start, stop = prompt.spans[0]
    ids = [*prompt.ids, *prompt.ids[start:stop]]
    best = whole_maps(engine, ids).argmax(2)  # (n_pairs, n_tokens)
    at = len(prompt.ids) - 1
    want = best[:, at : at + stop - start] == np.arange(start, stop)
    assert (found.values == want.T).mean() > 0.98  # ties of rounded maxima
    assert 0 < found.values.mean() < 0.5
    with pytest.raises(RequestError, match="not in context"):
        measures.needle(engine, context, "What?", "99999")


def test_grounding_is_the_lookback_ratio_of_each_sentence(engine: Engine):
    answer = "Tom found a key. It was old!"
    given = measures.answered(engine, DOCUMENTS, QUERY, answer)
    assert [one.text for one in given.sentences] == ["Tom found a key.", "It was old!"]
    found = measures.grounding(engine, given)
    maps = whole_maps(engine, given.ids)
    n_prompt = len(given.prompt.ids)
    ratios: list[Any] = []
    places = [i for span in given.prompt.spans for i in range(*span)]
    for t in range(len(given.answer)):
        row = maps[:, n_prompt + t - 1]
        back = row[:, places].mean(1)
        new = row[:, n_prompt : n_prompt + t].mean(1) if t else np.zeros(len(row))
        ratios.append(back / (back + new))
    want = [np.mean(ratios[one.start : one.stop], axis=0) for one in given.sentences]
    assert found.values == pytest.approx(np.array(want), abs=near(2e-3))


def test_cite_is_the_attention_of_each_sentence_to_each_source(engine: Engine):
    given = measures.answered(engine, DOCUMENTS, QUERY, "Tom found a key. A bird sang.")
    found = measures.cite(engine, given)
    maps, at = whole_maps(engine, given.ids), len(given.prompt.ids) - 1
    for sentence, one in zip(given.sentences, found, strict=True):
        rows = maps[:, at + sentence.start : at + sentence.stop]
        want = [rows[:, :, slice(*span)].sum(2).mean(1) for span in given.prompt.spans]
        assert one.values == pytest.approx(np.array(want), abs=near(TOLERANCE))


def test_ablation_hides_sources_from_all_that_follows(engine: Engine):
    kept = np.array([[1.0, 1, 1], [0, 1, 0], [0, 0, 0], [1, 1, 0]])
    answer = "Tom found a key. A bird sang."
    found = measures.ablate(engine, DOCUMENTS, QUERY, answer, kept)
    given = measures.answered(engine, DOCUMENTS, QUERY, answer)
    plain = engine.score(given.ids, last=len(given.answer)).logprobs[-len(given.answer) :]
    (first, second) = given.sentences
    want = [plain[one.start : one.stop].sum() for one in (first, second)]
    assert found.logprobs[0] == pytest.approx(want, abs=0.02)
    # What a hidden source says makes no difference; what one that is seen says does.
    others = [one.replace("red", "blue").replace("bird", "girl") for one in DOCUMENTS]
    again = measures.ablate(engine, others, QUERY, answer, kept)
    assert again.logprobs[1:3] == pytest.approx(found.logprobs[1:3], abs=0.02)
    for i in (0, 3):
        assert abs(again.logprobs[i] - found.logprobs[i]).max() > 0.05


def test_the_first_token_of_an_answer_has_looked_back_only():
    back, new = np.array([[0.6, 0.3, 0.0]]), np.array([[0.0, 0.3, 0.0]])
    ratios = measures.lookback_ratios(back, new, n_source=4, n_new=np.arange(3.0))
    assert ratios.shape == (1, 3)
    assert ratios[0] == pytest.approx([1.0, 0.075 / (0.075 + 0.3), 1.0])


def test_ids_of_an_answer_lose_the_end_of_the_text(engine: Engine):
    ids = engine.tokenize("A bird sang.", add_special=False)
    ended = [*ids, engine.model.eos_token_id or 0]
    assert measures.answered(engine, DOCUMENTS, QUERY, ended).answer == ids
    with pytest.raises(RequestError, match="answer must be a text that is not empty"):
        measures.answered(engine, DOCUMENTS, QUERY, " ")


# ---- calibration of the demo model


def test_calibrated_heads_of_the_demo_model_find_needles(engine: Engine, tmp_path: Path):
    seen: list[int] = []
    found = calibrate(
        engine, "needle", made_examples("needle", 16), source="made",
        progress=lambda n, total: seen.append(n),
    )  # fmt: skip
    assert seen == list(range(1, 17))
    chosen, everything = found.figures.values()
    assert chosen.value > everything.value
    assert found.data["n"] == 16
    assert found.model.fingerprint == engine.fingerprint()
    found.save(tmp_path / "needle.json")
    HeadFile.load(tmp_path / "needle.json").check_model(engine.model, engine.fingerprint())


def labelled(engine: Engine, task: str, one: Any) -> Case:
    """An example with what its task measures of it, and what it is."""
    match task:
        case "rerank":
            found = measures.rerank(engine, one["query"], one["documents"])
            labels = [float(i in one["relevant"]) for i in range(len(one["documents"]))]
        case "injection":
            found = measures.injection(engine, one["instruction"], one["data"])
            labels = [float(one["is_injected"])]
        case _:
            given = measures.answered(engine, [one["source"]], one["question"], one["answer"])
            found = measures.grounding(engine, given)
            labels = [float(one["is_grounded"])] * len(given.sentences)
    return Case(found.values, np.array(labels))


TASK_WEIGHTS: dict[Task, tuple[float, float, str]] = {
    "rerank": (1.0, 0.0, "identity"), "injection": (-1.0, 1.0, "identity"),
    "grounding": (np.nan, np.nan, "logistic"),
}  # fmt: skip


@pytest.mark.parametrize("task", TASK_WEIGHTS)
def test_heads_are_chosen_by_the_measures_and_kinds_of_the_examples(engine: Engine, task: Task):
    examples = made_examples(task, 12)
    found = calibrate(engine, task, examples)
    pairs = [(layer, head) for layer in range(4) for head in range(8)]
    want = choose(task, [labelled(engine, task, one) for one in examples], pairs)
    assert [(one.layer, one.head) for one in found.heads] == [
        (one.layer, one.head) for one in want["heads"]
    ]
    weights = [one.weight for one in found.heads]
    assert weights == pytest.approx([one.weight for one in want["heads"]], rel=near(1e-2))
    total, bias, link = TASK_WEIGHTS[task]
    assert found.link == link
    if link == "identity":
        assert (sum(weights), found.bias) == (pytest.approx(total), bias)
    assert found.figures == want["figures"]
    assert found.thresholds == pytest.approx(want["thresholds"], abs=near(1e-3))


def test_weights_of_at2_are_the_regression_of_what_hiding_the_source_does(engine: Engine):
    source, question = "Tom found a silver key.", "What did Tom find?"
    answer = "Tom found a silver key."
    examples = [{"sources": [source], "question": question, "answer": answer}] * 12
    found = calibrate(engine, "cite", examples)
    # By hand. With one source, each head predicts its attention where the source is seen, and 0
    # where it is hidden: x = a z of each ablation, and the target is y = d z, z centred. The heads
    # that look at it are alike once standardised, so the ridge regression of 16 ablations gives
    # each w = 16 d / (16 H + 1) / a.
    given = measures.answered(engine, [source], question, answer)
    ((start, stop),) = given.prompt.spans
    hidden = Edit.block((stop, None), (start, stop))
    n = len(given.answer)
    seen, unseen = (
        engine.score(given.ids, last=n, edits=edits).logprobs[-n:].astype(np.float64).sum()
        for edits in ([], [hidden])
    )
    assert seen - unseen > 1  # the answer is copied
    at = len(given.prompt.ids) - 1
    looked = whole_maps(engine, given.ids)[:, at : at + n, start:stop].sum(2).mean(1)
    weights = found.weights([(layer, head) for layer in range(4) for head in range(8)])
    looks = (looked > 1e-5) & (weights != 0)
    want = 16 * (seen - unseen) / (16 * looks.sum() + 1) / looked[looks]
    assert looks.sum() > 8
    assert weights[looks] == pytest.approx(want, rel=near(2e-2))
    assert next(iter(found.figures.values())).value > 0.9  # equal ablations differ by rounding


def test_too_few_examples_are_refused(engine: Engine):
    with pytest.raises(RequestError, match="has 3, at least 12"):
        calibrate(engine, "needle", made_examples("needle", 3))


def test_flags_that_do_not_fit_the_sentences_are_refused(engine: Engine):
    wrong = [{**one, "is_grounded": [True, False]} for one in made_examples("grounding", 12)]
    with pytest.raises(RequestError, match="2 flags, but the answer has 1 sentences"):
        calibrate(engine, "grounding", wrong)


@pytest.mark.full
def test_calibrate_command_writes_a_file_and_prints_its_figures(tmp_path: Path):
    examples = tmp_path / "needles.jsonl"
    examples.write_text("".join(json.dumps(one) + "\n" for one in made_examples("needle", 12)))
    target = tmp_path / "heads.json"
    words = ["needle", "--demo", str(examples), "-o", str(target), "-c", "512"]
    done = subprocess.run(
        [sys.executable, "-m", "kqview", "calibrate", *words],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "half of the heads find: 0." in done.stdout
    found = HeadFile.load(target)
    assert (found.task, found.data["source"]) == ("needle", "needles.jsonl")
    assert f"{len(found.heads)} heads written to {target}" in done.stderr
    assert heads.TASKS.keys() >= {found.task}
