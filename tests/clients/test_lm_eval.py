"""The model of lm-evaluation-harness, beside a float64 reference, transformers and llama.cpp."""

# lm-eval has no types, and need not be installed.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Engine
from kqview.errors import RequestError
from tests.support import stock
from tests.support.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("lm_eval", reason="needs lm-eval")
from kqview.integrations.lm_eval import KqviewLM

TEXTS = ["the cat sat", "a dog ran", "x"]


def asked(*args: Any) -> SimpleNamespace:
    """A request of the harness."""
    return SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def lm(tiny_llama: Path) -> Iterator[KqviewLM]:
    with Engine(tiny_llama, n_ctx=32, n_slots=2, n_threads=1, kv_type="f32") as engine:
        yield KqviewLM(engine)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Reference:
    return Reference.load(tiny_llama)


def logprobs(reference: Reference, ids: list[int]) -> Any:
    """Natural log-probabilities of ids[1:], each after those before it."""
    logits = reference.forward(ids).logits[:-1]
    shifted = logits - logits.max(axis=1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))[
        np.arange(len(ids) - 1), ids[1:]
    ]


def test_loglikelihood_is_that_of_the_reference(lm: KqviewLM, reference: Reference):
    pairs = [("the cat", " sat"), ("", "a dog"), ("a ", "dog ran")]
    found = lm.loglikelihood([asked(*pair) for pair in pairs])
    for (context, continuation), (value, is_greedy) in zip(pairs, found, strict=True):
        ids = lm.tok_encode(context + continuation)
        n_context = len(lm.tok_encode(context.rstrip())) if context else 1
        if not context and ids[0] != lm.prefix_token_id:
            ids = [lm.prefix_token_id, *ids]
        assert value == pytest.approx(logprobs(reference, ids)[n_context - 1 :].sum(), abs=1e-3)
        assert isinstance(is_greedy, bool)


def test_context_that_is_too_long_loses_its_beginning(lm: KqviewLM, reference: Reference):
    context = list(range(40, 90))
    ((value, _),) = lm._loglikelihood_tokens([(("", ""), context, [91, 92])])
    want = logprobs(reference, [*context, 91, 92][-32:])[-2:].sum()
    assert value == pytest.approx(want, abs=1e-3)


def test_rolling_sums_windows_that_do_not_overlap(lm: KqviewLM, reference: Reference):
    text = "a dog ran away and came back when the cat sat on the mat"
    found = lm.loglikelihood_rolling([asked(text), asked("x y")])
    ids = lm.tok_encode(text, add_special_tokens=False)
    assert 31 < len(ids) < 62  # two windows, the second with as much context as fits
    first = logprobs(reference, [lm.prefix_token_id, *ids[:31]]).sum()
    second = logprobs(reference, ids[-32:])[-(len(ids) - 31) :].sum()
    assert found[0] == pytest.approx(first + second, abs=2e-3)
    short = [lm.prefix_token_id, *lm.tok_encode("x y", add_special_tokens=False)]
    assert found[1] == pytest.approx(logprobs(reference, short).sum(), abs=1e-3)


@pytest.mark.needs("transformers")
def test_log_probabilities_are_those_of_transformers(lm: KqviewLM, tiny_llama: Path):
    import torch

    from tests.support.hf_llama import hf_llama

    model = hf_llama(tiny_llama)
    pairs = [([1, 70, 80, 90], [100, 110]), ([1], [97, 98, 99, 32])]
    found = lm._loglikelihood_tokens([(("", ""), *pair) for pair in pairs])
    for (context, rest), (value, is_greedy) in zip(pairs, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *rest]])).logits[0, len(context) - 1 : -1]
        want = logits.log_softmax(-1)[range(len(rest)), rest]
        assert value == pytest.approx(float(want.sum()), abs=1e-3)
        assert is_greedy == (logits.argmax(-1).tolist() == rest)


@pytest.mark.needs("peers")
def test_perplexity_is_that_of_llama_cpp(lm: KqviewLM, tiny_llama: Path):
    text = "a dog ran and the cat sat"
    ids = lm.tok_encode(text, add_special_tokens=False)
    assert len(ids) < lm.max_length
    run = stock.read_rows(
        tiny_llama, [lm.prefix_token_id], n_predict=len(ids), forced_ids=ids, kv_type="f32"
    )
    logits = run.logits.astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    want = logprobs[np.arange(len(ids)), ids].sum()
    (found,) = lm.loglikelihood_rolling([asked(text)])
    assert np.exp(-found / len(ids)) == pytest.approx(np.exp(-want / len(ids)), rel=1e-4)


def test_a_task_made_on_the_spot_is_evaluated(lm: KqviewLM, tmp_path: Path):
    import lm_eval
    from lm_eval.api.task import ConfigurableTask

    docs = [
        {"text": f"the {one}", "choices": [" sat", " ran", " x"], "label": i % 3}
        for i, one in enumerate(("cat", "dog", "mat", "ball"))
    ]
    file = tmp_path / "docs.jsonl"
    file.write_text("".join(f"{json.dumps(one)}\n" for one in docs))
    task = ConfigurableTask(
        config={
            "task": "made",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": str(file), "cache_dir": str(tmp_path / "cache")},
            "test_split": "train",
            "output_type": "multiple_choice",
            "doc_to_text": "text",
            "doc_to_choice": "choices",
            "doc_to_target": "label",
            "target_delimiter": "",
        }
    )
    results = lm_eval.simple_evaluate(model=lm, tasks=[task], bootstrap_iters=0)
    best = [
        int(np.argmax([lm.loglikelihood([asked(one["text"], c)])[0][0] for c in one["choices"]]))
        for one in docs
    ]
    want = np.mean([i == one["label"] for i, one in zip(best, docs, strict=True)])
    assert results["results"]["made"]["acc,none"] == pytest.approx(want)


def test_answers_are_greedy_and_end_at_until(lm: KqviewLM):
    options = {"until": ["e"], "max_gen_toks": 8, "do_sample": False}
    requests = [asked(text, options) for text in TEXTS] + [asked("x", {"max_gen_toks": 3})]
    found = lm.generate_until(requests)
    for text, answer in zip(TEXTS, found, strict=False):
        want = lm.engine.generate(text, max_tokens=8, temperature=0, stop="e").read()
        assert answer == want
    long = "a dog ran away and came back"
    (answer,) = lm.generate_until([asked(long, options)])
    kept = lm.tok_encode(long)[-24:]  # 8 of 32 tokens are for the answer
    assert answer == lm.engine.generate(kept, max_tokens=8, temperature=0, stop="e").read()
    assert found[3] == lm.engine.generate("x", max_tokens=3, temperature=0).read()
    with pytest.raises(RequestError, match="num_beams"):
        lm.generate_until([asked("x", {"num_beams": 4})])


def test_answers_of_several_slots_share_their_steps():
    texts = ["Anna has", "Tom found", "The bird", "It rains"]
    with Engine.demo(n_threads=1, n_slots=4, n_ctx=256) as engine:
        KqviewLM(engine).generate_until([asked(one, {"max_gen_toks": 48}) for one in texts * 2])
        stats = engine.stats()
    assert stats.n_tokens > 200
    assert stats.n_decodes < 0.75 * stats.n_tokens


def test_results_are_put_into_the_harness_cache(lm: KqviewLM):
    seen: list[str] = []
    lm.cache_hook = SimpleNamespace(add_partial=lambda kind, *_: seen.append(kind))
    lm.loglikelihood([asked("a", " b")])
    lm.loglikelihood_rolling([asked("a b")])
    lm.generate_until([asked("a", {"max_gen_toks": 1})])
    assert seen == ["loglikelihood", "loglikelihood_rolling", "generate_until"]


def test_command_of_the_harness_runs_with_the_model(tiny_llama: Path, tmp_path: Path):
    docs = [{"text": f"the {one}", "label": i % 2} for i, one in enumerate(("cat", "dog", "mat"))]
    (tmp_path / "docs.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in docs))
    task = {
        "task": "made",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(tmp_path / "docs.jsonl")},
        "test_split": "train",
        "output_type": "multiple_choice",
        "doc_to_text": "text",
        "doc_to_choice": [" sat", " ran"],
        "doc_to_target": "label",
    }
    (tmp_path / "made.yaml").write_text(json.dumps(task))  # JSON is YAML
    done = subprocess.run(
        [
            sys.executable, "-m", "kqview.integrations.lm_eval", "run", "--model", "kqview",
            "--model_args", f"model={tiny_llama},n_ctx=32,n_slots=2,n_threads=1",
            "--tasks", "made", "--include_path", str(tmp_path),
        ],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    row = next(line for line in done.stdout.splitlines() if line.startswith("|made"))
    assert "|acc" in row


def test_harness_finds_the_model_by_its_name(tiny_llama: Path):
    from lm_eval.api.registry import get_model

    made = get_model("kqview").create_from_arg_string(
        f"model={tiny_llama},n_ctx=32,n_threads=1", {"batch_size": 4, "device": None}
    )
    with made.engine:
        assert made.max_length == 32
        assert len(made.loglikelihood([asked("a", " b")])) == 1
