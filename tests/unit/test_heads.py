"""Head files, examples, and the choice of heads: what needs no model."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview.errors import HeadFileError, RequestError
from kqview.heads import (
    TASKS,
    Figure,
    Head,
    HeadFile,
    HeadFileWarning,
    ModelKey,
    Task,
    made_examples,
    read_examples,
)
from kqview.heads.calibration import Case, auroc, choose, ndcg, spearman
from kqview.heads.examples import digest
from kqview.heads.file import checked_numbers
from kqview.types import ModelInfo

if TYPE_CHECKING:
    from pathlib import Path

MODEL = ModelInfo(
    name="toy", architecture="llama", n_vocab=8, n_layer=3, n_head=2, n_head_kv=1, n_embd=8,
    n_ctx_train=512, attention_layers=(0, 2), attention_scale=0.5, bos_token_id=0,
    eos_token_id=None, eot_token_id=None, pad_token_id=None, special_tokens={},
    rope_freq_base=1e4, rope_freq_scale=1.0, chat_template=None, n_params=1234, size_bytes=4936,
    file_type="F32", classifier_labels=(), metadata={},
)  # fmt: skip
PAIRS = [(0, 0), (0, 1), (2, 0), (2, 1)]
FILE = HeadFile(
    task="injection",
    model=ModelKey.of(MODEL, "f" * 64),
    heads=(Head(0, 1, -0.75), Head(2, 0, -0.25)),
    bias=1.0,
    thresholds={"injected": 0.5},
    data={"sha256": "0" * 64, "n": 20, "source": "made"},
    figures={"AUROC": Figure(0.9, 0.8, 1.0, 6)},
)


def test_head_file_is_the_same_after_saving_and_loading(tmp_path: Path):
    FILE.save(tmp_path / "heads.json")
    assert HeadFile.load(tmp_path / "heads.json") == FILE


def test_head_file_is_json_that_others_can_read(tmp_path: Path):
    FILE.save(tmp_path / "heads.json")
    content = json.loads((tmp_path / "heads.json").read_text())
    assert (content["format"], content["schema"]) == ("kqview-heads", 1)
    assert content["heads"][0] == {"layer": 0, "head": 1, "weight": -0.75}
    assert content["model"]["file_type"] == "F32"


def test_score_is_the_bias_and_the_weighted_sum():
    measures = np.array([[9.0, 0.4, 0.8, 9.0], [9.0, 0.0, 0.0, 9.0]])
    assert FILE.score(measures, PAIRS) == pytest.approx([1 - 0.3 - 0.2, 1.0])
    logistic = replace(FILE, link="logistic")
    assert logistic.score(measures, PAIRS) == pytest.approx([1 / (1 + np.exp(-0.5)), 0.7310586])


@pytest.mark.parametrize(
    "change", [{"n_layer": 4}, {"architecture": "qwen2"}, {"name": "other"}, {"n_vocab": 9}]
)
def test_another_model_is_refused_by_what_differs(change: dict[str, Any]):
    with pytest.raises(HeadFileError, match=next(iter(change))):
        FILE.check_model(replace(MODEL, **change), "f" * 64)


def test_the_same_file_is_taken_silently_and_another_quantisation_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FILE.check_model(MODEL, "f" * 64)
    with pytest.warns(HeadFileWarning, match="F32, here Q4_1"):
        FILE.check_model(replace(MODEL, file_type="Q4_1"), "e" * 64)


def test_a_head_that_the_model_lacks_is_refused():
    foreign = replace(FILE, model=ModelKey(), heads=(Head(1, 0),))  # layer 1 has no attention
    with pytest.raises(HeadFileError, match="head 0 in layer 1"):
        foreign.check_model(MODEL, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema is 2"),
        ({"format": "other"}, "no head file"),
        ({"heads": []}, "list of heads"),
        ({"heads": [{"layer": 0, "head": 0, "weight": 1.0}] * 2}, "each there once"),
        ({"heads": [{"layer": -1, "head": 0, "weight": 1.0}]}, "layer is -1"),
        ({"heads": [{"layer": 0, "head": 0, "weight": "1"}]}, "must be a number"),
        ({"heads": [{"layer": 0, "head": 0}]}, "weight"),
        ({"link": "cubic"}, "link is 'cubic'"),
        ({"bias": None}, "must be a number"),
    ],
)
def test_malformed_file_is_refused(tmp_path: Path, change: dict[str, Any], message: str):
    FILE.save(tmp_path / "heads.json")
    content = json.loads((tmp_path / "heads.json").read_text())
    (tmp_path / "heads.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(HeadFileError, match=message):
        HeadFile.load(tmp_path / "heads.json")


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_what_is_no_object_of_json_is_refused(tmp_path: Path, text: str):
    (tmp_path / "heads.json").write_text(text)
    with pytest.raises(HeadFileError, match="JSON"):
        HeadFile.load(tmp_path / "heads.json")


def test_heads_of_alignatt_are_weighed_by_their_scores(tmp_path: Path):
    content = {
        "model": "owner/toy", "direction": "en-de", "num_layers": 3, "num_heads": 2,
        "token_alignment_heads": [
            {"layer": 0, "head": 1, "ts": 0.6}, {"layer": 2, "head": 0, "ts": 0.2},
        ],
    }  # fmt: skip
    (tmp_path / "heads.json").write_text(json.dumps(content))
    file = HeadFile.load(tmp_path / "heads.json")
    assert file.task == "align"
    assert [one.weight for one in file.heads] == pytest.approx([0.75, 0.25])
    assert file.model == ModelKey(n_layer=3, n_head=2)
    with pytest.raises(HeadFileError, match="n_layer 3, here 4"):
        file.check_model(replace(MODEL, n_layer=4), "")
    with pytest.warns(HeadFileWarning, match="which weights"):
        file.check_model(MODEL, "")


def test_uncalibrated_file_of_alignatt_warns(tmp_path: Path):
    content = {"calibrated": False, "token_alignment_heads": [{"layer": 0, "head": 1, "ts": 0.0}]}
    (tmp_path / "heads.json").write_text(json.dumps(content))
    with pytest.warns(HeadFileWarning, match="not calibrated"):
        assert HeadFile.load(tmp_path / "heads.json").heads == (Head(0, 1, 1.0),)


@pytest.mark.parametrize(
    ("folder", "task", "weight", "bias"),
    [("attention_tracker", "injection", -0.5, 1.0), ("core_reranker", "rerank", 0.5, 0.0)],
)
def test_heads_of_vllm_hook_count_alike(
    tmp_path: Path, folder: str, task: str, weight: float, bias: float
):
    path = tmp_path / folder / "toy.json"
    path.parent.mkdir()
    content = {"model_info": {"model_id": "x"}, "params": {"important_heads": [[2, 1], [0, 0]]}}
    path.write_text(json.dumps(content))
    file = HeadFile.load(path)
    assert (file.task, file.bias) == (task, bias)
    assert file.heads == (Head(0, 0, weight), Head(2, 1, weight))
    assert HeadFile.load(path, task="cite").task == "cite"


def test_placeholder_of_vllm_hook_warns():
    info = {"model_id": "x", "note": "Temporary. Heads are copied from another model."}
    with pytest.warns(HeadFileWarning, match="itself that its heads are copied"):
        HeadFile.of({"model_info": info, "params": {"important_heads": [[0, 0]]}}, task="rerank")


@pytest.mark.parametrize(
    ("said", "name", "message"),
    [
        ("owner/Toy-2.5-7B-Instruct", "Toy 2.5 7B Instruct", "which weights of 'owner/Toy-2.5-7B"),
        ("owner/toy-2b.w4a16", "Toy 2b", "which weights of 'owner/toy-2b"),
        ("owner/toy", None, "which weights of 'owner/toy'"),
        ("owner/toy-8b", "Toy 2b", "is of 'owner/toy-8b', this model is 'Toy 2b'"),
        (None, "Toy 2b", "which weights of its model it"),
    ],
)
def test_foreign_file_names_its_model(said: str | None, name: str | None, message: str):
    hook = {"model_info": {"model_id": said}, "params": {"important_heads": [[0, 0]]}}
    alignatt = {"model": said, "token_alignment_heads": [{"layer": 0, "head": 0}]}
    for content in (hook, alignatt):
        with pytest.warns(HeadFileWarning, match=message):
            HeadFile.of(content, task="rerank").check_model(replace(MODEL, name=name), "f" * 64)


def test_file_written_by_hand_needs_four_fields(tmp_path: Path):
    content: dict[str, Any] = {
        "format": "kqview-heads", "schema": 1, "task": "rerank",
        "heads": [{"layer": 2, "head": 1, "weight": 1.0}],
    }  # fmt: skip
    (tmp_path / "heads.json").write_text(json.dumps(content))
    file = HeadFile.load(tmp_path / "heads.json")
    assert file == HeadFile(task="rerank", model=ModelKey(), heads=(Head(2, 1, 1.0),))
    with pytest.warns(HeadFileWarning, match="which weights of its model"):
        file.check_model(MODEL, "f" * 64)
    for name in content:
        with pytest.raises(HeadFileError):
            HeadFile.of({key: one for key, one in content.items() if key != name})


# ---- examples


def test_digest_is_that_of_lines_of_sorted_json():
    made = made_examples("rerank", 12)
    lines = [json.dumps(one, sort_keys=True) for one in made]
    assert digest(made) == hashlib.sha256("\n".join(lines).encode("ascii")).hexdigest()
    accented = [{"query": "\u00e9"}]
    assert digest(accented) == hashlib.sha256(b'{"query": "\\u00e9"}').hexdigest()


def test_line_of_a_file_of_examples_ends_at_a_line_feed_alone(tmp_path: Path):
    example = {"query": "a", "documents": ["b\u2028c\x85", "d"], "relevant": [0]}
    path = tmp_path / "examples.jsonl"
    path.write_text(json.dumps(example, ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    assert read_examples("rerank", path) == [example]


@pytest.mark.parametrize("task", TASKS)
def test_made_examples_are_repeatable_and_survive_a_file(tmp_path: Path, task: Task):
    made = made_examples(task, 6, seed=3)
    assert made == made_examples(task, 6, seed=3) != made_examples(task, 6, seed=4)
    path = tmp_path / "examples.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in made))
    assert read_examples(task, path) == made


def test_made_queries_share_no_word_with_their_documents():
    for one in made_examples("rerank", 40):
        words = {word for document in one["documents"] for word in document.lower().split()}
        asked = set(one["query"].lower().rstrip("?").split()) - {"and", "a", "in", "on", "with"}
        assert not asked & {word.strip(".,") for word in words}


def test_made_benign_texts_are_as_long_as_attacks():
    made = made_examples("injection", 200)
    lengths = {
        kind: np.mean([len(one["data"].split()) for one in made if one["is_injected"] is kind])
        for kind in (True, False)
    }
    assert abs(lengths[True] - lengths[False]) < 2


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        ("needle", "{", "line 1 of .* no JSON"),
        ("needle", "[]", r"examples\[0\] is \[\]"),
        ("needle", '{"context": "x", "question": " ", "answer": "x"}', "as question"),
        ("rerank", '{"query": "x", "documents": [], "relevant": [0]}', "as documents"),
        ("rerank", '{"query": "x", "documents": ["a"], "relevant": [1]}', "document 1 of 1"),
        ("rerank", '{"query": "x", "documents": ["a"], "relevant": [true]}', "as relevant"),
        ("injection", '{"instruction": "x", "data": "y", "is_injected": 1}', "as is_injected"),
    ],
)
def test_malformed_example_is_refused(tmp_path: Path, task: Task, line: str, message: str):
    (tmp_path / "examples.jsonl").write_text(line)
    with pytest.raises(RequestError, match=message):
        read_examples(task, tmp_path / "examples.jsonl")


# ---- the choice of heads


def test_auroc_counts_pairs_and_halves_ties():
    labels = np.array([1.0, 1, 0, 0])
    assert auroc(np.array([3.0, 2, 1, 0]), labels) == 1
    assert auroc(np.array([1.0, 1, 1, 1]), labels) == 0.5
    assert auroc(np.array([3.0, 0, 1, 2]), labels) == 0.5


def test_ndcg_discounts_by_the_logarithm_of_the_place():
    assert ndcg(np.array([0.1, 0.9, 0.5]), np.array([0.0, 1, 0])) == 1
    assert ndcg(np.array([0.1, 0.9, 0.5]), np.array([1.0, 0, 0])) == pytest.approx(1 / 2)
    both = ndcg(np.array([0.9, 0.1, 0.5]), np.array([1.0, 1, 0]))
    assert both == pytest.approx((1 + 1 / np.log2(4)) / (1 + 1 / np.log2(3)))


def test_spearman_is_of_ranks_with_means_for_ties():
    assert spearman(np.array([1.0, 2, 30]), np.array([0.0, 5, 6])) == pytest.approx(1)
    assert spearman(np.array([1.0, 2, 2, 3]), np.array([1.0, 2, 3, 4])) == pytest.approx(0.9486833)
    assert spearman(np.ones(3), np.arange(3.0)) == 0


def noisy_cases(n: int, *, is_flipped: bool = False) -> list[Case]:
    """Of four heads the third tells the kinds apart; the others are noise."""
    rng = np.random.default_rng(1)
    cases: list[Case] = []
    for i in range(n):
        values = rng.normal(size=(1, 4))
        label = float(i % 2)
        values[0, 2] += 6 * (1 - label if is_flipped else label)
        cases.append(Case(values, np.array([label])))
    return cases


def test_chosen_head_is_the_one_that_tells_and_its_figure_is_of_examples_kept_apart():
    found = choose("grounding", noisy_cases(60), PAIRS)
    weights = {(one.layer, one.head): one.weight for one in found["heads"]}
    assert max(weights, key=lambda pair: abs(weights[pair])) == (2, 0)
    assert weights[2, 0] > 0
    figure = found["figures"]["AUROC"]
    assert figure.n == 18
    assert figure.value > 0.95
    assert figure.low <= figure.value <= figure.high


def test_injection_is_less_attention_to_the_instruction():
    found = choose("injection", noisy_cases(60, is_flipped=True), PAIRS)
    assert found["heads"] == (Head(2, 0, -1.0),)
    file = HeadFile(task="injection", model=ModelKey(), **found)
    low, high = file.score(np.array([[0, 0, 0.0, 0], [0, 0, 6.0, 0]]), PAIRS)
    assert high < file.thresholds["injected"] < low


def test_rerank_takes_the_head_for_which_the_relevant_document_stands_out():
    rng = np.random.default_rng(4)
    cases: list[Case] = []
    for i in range(30):
        labels = np.eye(5)[i % 5]
        values = rng.normal(size=(5, 4))
        values[:, 1] = 0.001 * labels  # by little, but always: the scale of a head does not count
        values[:, 3] += labels
        cases.append(Case(values, labels))
    found = choose("rerank", cases, PAIRS)
    assert found["heads"] == (Head(0, 1, 1.0),)
    assert found["figures"]["nDCG@10"] == Figure(1.0, 1.0, 1.0, 9)


def test_noise_has_an_interval_that_contains_a_coin():
    rng = np.random.default_rng(2)
    cases = [Case(rng.normal(size=(1, 4)), np.array([float(i % 2)])) for i in range(80)]
    figure = choose("grounding", cases, PAIRS)["figures"]["AUROC"]
    assert figure.low < 0.5 < figure.high


def test_regression_of_ablations_finds_the_head_that_predicts_them():
    rng = np.random.default_rng(3)
    cases: list[Case] = []
    for _ in range(30):
        values = rng.normal(size=(8, 4))
        cases.append(Case(values, 2.0 * values[:, 1] + 0.01 * rng.normal(size=8)))
    found = choose("cite", cases, PAIRS)
    weights = {(one.layer, one.head): one.weight for one in found["heads"]}
    assert weights[0, 1] == pytest.approx(2, abs=0.4)
    assert next(iter(found["figures"].values())).value > 0.95


def test_examples_of_one_kind_are_refused():
    cases = [Case(one.values, np.ones(1)) for one in noisy_cases(20)]
    with pytest.raises(RequestError, match="of one kind"):
        choose("injection", cases, PAIRS)


@pytest.mark.parametrize(("count", "numbers"), [("2", (0, 1)), ("[1, 2, 2]", None)])
def test_all_heads_are_captured_where_a_layer_may_lack_some(
    count: str, numbers: tuple[int, ...] | None
):
    model = replace(MODEL, metadata={"llama.attention.head_count": count})
    assert checked_numbers(FILE, model) == numbers
    assert checked_numbers(None, model) is None
