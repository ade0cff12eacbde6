"""What a notebook shows of generations and of a prompt's attention; displaying takes nothing."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Engine, Token, errors, mod
from kqview.generation import display
from kqview.mods import Added
from kqview.viz import coloured, to_html
from tests.unit.test_coloured import Still, data_of, planes_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT = "Anna has a red ball. Then Anna"
STEP = 1 / 255


@pytest.fixture(autouse=True)
def _waits_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(display, "PEEK_S", 60.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.demo(n_ctx=128, n_threads=1) as made:
        yield made


def html_of(shown: Any) -> str:
    return shown._repr_html_()


def text_of(shown: Any) -> str:
    """What is to be read where no script runs."""
    return Still.of(html_of(shown)).text


def test_finished_generation_shows_the_rows_of_the_tokens_that_are_held(engine: Engine) -> None:
    generation = engine.generate(PROMPT, max_tokens=5, temperature=0, capture="probs")
    tokens = list(generation)
    data = data_of(html_of(generation))
    assert "".join(data["texts"]) == "<|endoftext|>" + PROMPT + generation.text
    n = data["nPrompt"]
    assert n == len(generation.prompt_ids)
    assert data["at"] == data["nColumns"] == [n + i for i in range(5)]
    assert data["layers"] == [[layer, list(range(8))] for layer in range(4)]
    for token, planes in zip(tokens, planes_of(data), strict=True):
        np.testing.assert_allclose(
            np.sqrt(planes[2]), np.sqrt(token.rows[0, 0]), atol=STEP / 2 + 1e-6
        )
    assert "5 tokens, finish reason length" in text_of(generation)


def test_display_holds_no_attention(engine: Engine) -> None:
    generation = engine.generate(PROMPT, max_tokens=5, temperature=0, capture="probs")
    last = [*generation][-1]
    gc.collect()
    assert data_of(html_of(generation))["at"] == [len(generation.prompt_ids) + 4]
    assert "1 of 5 rows are shown" in text_of(generation)
    assert last.index == 4
    del last
    gc.collect()
    assert engine.stats().pool.n_leased == 0
    text = text_of(generation)
    assert "0 of 5 rows are shown" in text
    assert generation.text in text


def test_display_of_a_running_generation_takes_no_token_and_waits_for_none() -> None:
    with Engine.demo(n_ctx=128, n_threads=1) as one:
        options: Any = {"max_tokens": 6, "ignore_eos": True, "capture": "probs"}
        generation = one.generate(PROMPT, **options)
        assert "0 tokens, not finished" in text_of(generation)
        waiting = one.generate(PROMPT, **options)
        assert "0 tokens, not finished" in text_of(waiting)  # its slot is taken
        tokens = [next(generation), next(generation)]
        shown = text_of(generation)
        assert "2 tokens, not finished" in shown
        assert "Displaying takes none" in shown
        assert len(data_of(html_of(generation))["at"]) == 2
        tokens += generation
        assert [token.index for token in tokens] == list(range(6))
        assert len(list(waiting)) == 6


def test_generation_without_attention_shows_its_text(engine: Engine) -> None:
    generation = engine.generate(PROMPT, max_tokens=3, temperature=0)
    generation.read()
    assert "<script" not in html_of(generation)
    text = text_of(generation)
    assert generation.text in text
    assert 'pass capture="probs"' in text


@pytest.mark.parametrize(
    ("capture", "reason"),
    [("qk", 'values of kind "qk"'), (Capture(spans=[(0, 4)]), "spans left the rows")],
)
def test_rows_that_are_no_shares_are_not_shown(engine: Engine, capture: Any, reason: str) -> None:
    generation = engine.generate(PROMPT, max_tokens=3, temperature=0, capture=capture)
    tokens = list(generation)
    text = text_of(generation)
    assert f"No attention is shown: {reason}" in text
    assert generation.text in text
    with pytest.raises(errors.InvalidCapture):
        coloured(tokens)
    prompt = engine.attend(PROMPT, capture)
    rows = prompt.array()
    assert f"No attention is shown: {reason}" in text_of(prompt)
    assert rows is not None


@pytest.mark.parametrize(
    "capture",
    [
        Capture(layers=[1, 3], heads=[5]),
        Capture(dtype="float16"),
        Capture(reduce="mean_heads"),
        Capture(reduce="max"),
        Capture(top_k=4),
        Capture(reduce="mean_heads", top_k=4),
    ],
)
def test_every_form_of_rows_is_shown(engine: Engine, capture: Capture) -> None:
    generation = engine.generate(PROMPT, max_tokens=2, temperature=0, capture=capture)
    tokens = list(generation)
    shares = planes_of(data_of(html_of(generation)))
    assert [row.shape[1] for row in shares] == [len(token.column_ids) for token in tokens]
    prompt = engine.attend(PROMPT, capture)
    data = data_of(html_of(prompt))
    assert data["at"] == list(range(len(generation.prompt_ids)))
    # The last query of the prompt has produced the first token.
    last = planes_of(data)[-1]
    np.testing.assert_allclose(last, shares[0], atol=2 * STEP)
    assert prompt.array() is not None


def test_tokens_that_a_mod_took_back_are_not_shown(engine: Engine) -> None:
    @mod
    def takes_two_back(event: Any, actions: Any) -> Any:
        if isinstance(event, Added) and event.step == 3:
            return actions.backtrack(2)
        return None

    options: Any = {"max_tokens": 5, "temperature": 0, "capture": "probs"}
    generation = engine.generate(PROMPT, mods=[takes_two_back], **options)
    tokens = list(generation)  # also those that were taken back
    assert len(tokens) > len(generation.tokens)
    data = data_of(html_of(generation))
    n = len(generation.prompt_ids)
    assert "".join(data["texts"][n:]) == generation.text
    kept: dict[int, Token] = {token.index: token for token in tokens}
    rows = [kept[i] for i in range(len(generation.tokens)) if kept[i].attention is not None]
    assert data["at"] == [n + token.index for token in rows]
    for token, planes in zip(rows, planes_of(data), strict=True):
        np.testing.assert_allclose(planes[2], token.rows[0, 0], atol=STEP)
    begun = engine.generate(PROMPT, mods=[takes_two_back], **options)
    first = next(begun)
    assert data_of(html_of(coloured(begun)))["at"] == data["at"]
    assert first.index == 0


# ---- the attention of a prompt


def test_display_of_a_prompt_shows_its_rows_and_leaves_them_to_be_taken(engine: Engine) -> None:
    prompt = engine.attend(PROMPT)
    data = data_of(html_of(prompt))
    n = len(prompt.column_ids)
    assert data["at"] == list(range(n))
    assert data["nColumns"] == [i + 1 for i in range(n)]
    array = prompt.array()
    assert isinstance(array, np.ndarray)
    assert array.shape == (4, 8, n, n)
    for i, planes in enumerate(planes_of(data)):
        np.testing.assert_allclose(
            np.sqrt(planes[2]), np.sqrt(array[0, 0, i, : i + 1]), atol=STEP / 2 + 1e-6
        )
    assert data_of(html_of(prompt)) == data  # the array is still held
    del array
    gc.collect()
    assert "No rows are here" in text_of(prompt)
    assert PROMPT in text_of(prompt)


def test_rows_of_several_blocks_are_shown_as_far_as_they_are_held() -> None:
    with Engine.demo(n_ctx=128, n_threads=1, n_ubatch=16, n_batch=16) as one:
        prompt = one.attend("Anna has a red ball. " * 5)
        n = len(prompt.column_ids)
        assert "16 of" in text_of(prompt)
        assert data_of(html_of(prompt))["at"] == list(range(16))
        blocks = list(prompt)
        assert sum(block.n_rows for block in blocks) == n
        assert data_of(html_of(prompt))["at"] == list(range(n))
        del blocks[1:]
        gc.collect()
        assert data_of(html_of(prompt))["at"] == list(range(16))
        joined = one.attend("Anna has a red ball. " * 5)
        array = joined.array()
        assert data_of(html_of(joined))["at"] == list(range(n))
        assert array is not None


def test_display_waits_for_no_rows_after_some_were_taken(engine: Engine) -> None:
    prompt = engine.attend(PROMPT)
    next(prompt)
    gc.collect()
    assert "they left memory after they were taken" in text_of(prompt)
    assert next(prompt, None) is None


def test_error_of_a_prompt_is_raised_to_who_takes_its_rows() -> None:
    with Engine.demo(n_ctx=128, n_threads=1, attention_budget_bytes=1) as one:
        prompt = one.attend(PROMPT)
        assert "No rows are here" in text_of(prompt)
        with pytest.raises(errors.PoolExhausted):
            prompt.array()


def test_display_of_a_prompt_beside_its_task_takes_nothing(engine: Engine) -> None:
    async def take() -> int:
        prompt = engine.attend(PROMPT)
        return sum([block.n_rows async for block in prompt if "script" in html_of(prompt)])

    assert asyncio.run(take()) == len(engine.tokenize(PROMPT))


# ---- kqview.viz


def test_pages_take_what_carries_attention(engine: Engine, tmp_path: Path) -> None:
    options: Any = {"max_tokens": 4, "temperature": 0, "capture": "probs"}
    tokens: list[Token] = list(engine.generate(PROMPT, **options))
    expected = data_of(html_of(coloured(tokens, title="T")))
    running = engine.generate(PROMPT, **options)
    first = next(running)
    assert data_of(html_of(coloured(running, title="T"))) == expected
    assert (running.finish_reason, first.index) == ("length", 0)
    (finished,) = engine.map([PROMPT], **options)
    assert data_of(html_of(coloured(finished, title="T"))) == expected
    path = to_html(tmp_path / "x.html", engine.attend(PROMPT))
    assert data_of(path.read_text("utf-8"))["nPrompt"] is None
    prompt = engine.attend(PROMPT)
    rows = prompt.array()
    assert coloured(prompt) is not None
    del rows
    gc.collect()
    with pytest.raises(errors.InvalidCapture, match="taken already"):
        coloured(prompt)


def test_page_of_a_saved_generation_is_that_of_its_tokens(engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    import kqview

    generation = engine.generate(PROMPT, max_tokens=4, temperature=0, capture="probs")
    tokens = list(generation)
    saved = kqview.load(kqview.save(tmp_path / "x.safetensors", generation, tokens))
    expected = data_of(html_of(coloured(tokens, title="T")))
    assert data_of(html_of(coloured(saved, title="T"))) == expected


def test_texts_given_for_a_generation_are_those_of_all_its_tokens(engine: Engine) -> None:
    generation = engine.generate(PROMPT, max_tokens=2, temperature=0, capture="probs")
    tokens = list(generation)
    n = len(generation.prompt_ids) + 2
    assert data_of(html_of(coloured(generation, ["x"] * n)))["texts"] == ["x"] * n
    with pytest.raises(errors.RequestError, match=f"3 texts, but there are {n} tokens"):
        coloured(generation, ["x"] * 3)
    assert len(tokens) == 2
