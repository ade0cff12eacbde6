"""Columns have names: ids of prompts, columns, layers and heads; offsets and spans of texts."""

from __future__ import annotations

import gc
import pickle
import sys
import types
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kqview
from kqview import Capture, Engine, Token, errors, mod
from kqview.mods import Prefilled, Sampled
from kqview.offsets import offsets_of
from tests.support import tiny_gguf
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.engine.conftest import MakeEngine

STORY = "Mirelda found a silver key near the old bridge. Then Mirel"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.demo(n_ctx=256, n_threads=1) as demo:
        yield demo


def columns_of(token: Token) -> int:
    return token.rows.shape[-1]


# ---- ids of columns


def test_text_has_the_same_ids_in_tokenize_and_generate(engine: Engine) -> None:
    ids = engine.tokenize(STORY)
    assert ids[0] == engine.model.bos_token_id
    generation = engine.generate(STORY, max_tokens=1, capture="probs")
    token = next(generation)
    assert generation.prompt_ids == token.column_ids == ids
    assert columns_of(token) == len(ids)
    assert engine.tokenize(STORY, add_special=False) == ids[1:]


def test_column_ids_are_the_prompt_and_then_what_was_generated(engine: Engine) -> None:
    generation = engine.generate(STORY, max_tokens=5, capture=Capture("probs", layers=[1]))
    tokens = list(generation)
    for token in tokens:
        assert token.column_ids == generation.prompt_ids + generation.tokens[: token.index]
        assert len(token.column_ids) == columns_of(token)
        assert "".join(token.column_texts) == engine.detokenize(token.column_ids)


def test_layers_and_heads_are_those_of_the_rows(engine: Engine) -> None:
    token = next(engine.generate(STORY, capture=Capture("probs", layers=[3, 1], heads=[5])))
    assert (token.layers, token.heads) == ((3, 1), (5,))
    token = next(engine.generate(STORY, capture="probs"))
    assert (token.layers, token.heads) == (engine.model.attention_layers, tuple(range(8)))
    token = next(engine.generate(STORY))
    assert (token.layers, token.heads) == ((), ())
    with pytest.raises(errors.InvalidCapture, match="capture="):
        _ = token.rows


def test_columns_after_a_context_shift_are_the_tokens_that_remain(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_ctx=64)
    generation = engine.generate(
        random_ids(40), max_tokens=60, temperature=0, ignore_eos=True, capture="probs",
        context_shift=True, n_keep=4,
    )  # fmt: skip
    tokens = list(generation)
    assert tokens[-1].discarded
    everything = generation.prompt_ids + generation.tokens
    for token in tokens:
        width = columns_of(token)
        places = token.source_indices(np.arange(width))
        assert token.column_ids == [everything[place] for place in places]


def test_columns_outlive_the_engine_and_a_pickle(tiny_llama: Path) -> None:
    engine = Engine.demo(n_ctx=128, n_threads=1)
    ids = engine.tokenize(STORY)
    expected = [engine.token_text(i) for i in ids]
    token = next(engine.generate(ids, capture="probs"))
    engine.close()
    del engine
    gc.collect()
    copy = pickle.loads(pickle.dumps(token))
    for one in (token, copy):
        assert (one.column_ids, one.column_texts) == (ids, expected)
        assert one.heads == tuple(range(8))
    assert len(pickle.dumps(token)) < token.rows.nbytes + 4000  # not the whole vocabulary


def test_columns_of_tokens_follow_what_mods_change(engine: Engine) -> None:
    added = engine.tokenize(" Once", add_special=False)

    @mod
    def rewrite(event: Any, actions: Any) -> Any:
        match event:
            case Prefilled():
                return actions.adjust_prefill([*event.prompt_ids, *added])
            case Sampled() if event.step == 3 and not done:
                done.append(event.step)
                return actions.backtrack(2, added)
            case _:
                return None

    done: list[int] = []
    ids = engine.tokenize(STORY)
    generation = engine.generate(ids, max_tokens=6, temperature=0, mods=[rewrite], capture="probs")
    seen: list[tuple[Token, list[int]]] = []
    kept: list[int] = []
    for token in generation:
        del kept[len(kept) - token.n_removed :]
        seen.append((token, generation.prompt_ids + kept))
        kept.append(token.id)
    assert done
    assert generation.prompt_ids == ids + added
    for token, before in seen:
        assert token.column_ids == before
        assert token.attention is None or columns_of(token) == len(before)


def test_layers_that_differ_in_heads_have_no_single_array(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(tiny_gguf.write_gemma4(tmp_path / "gemma4.gguf"))
    token = next(engine.generate([1, 2, 3, 4], capture="probs"))
    assert isinstance(token.attention, tuple)
    with pytest.raises(errors.InvalidCapture, match="tuple"):
        _ = token.rows
    assert token.column_ids == [1, 2, 3, 4]
    assert token.heads == (0, 1, 2, 3)


def test_attention_of_a_prompt_has_the_same_names(engine: Engine) -> None:
    rows = engine.attend(STORY, Capture("probs", layers=[2], heads=[1, 0]))
    assert rows.column_ids == engine.tokenize(STORY)
    assert "".join(rows.column_texts) == engine.detokenize(rows.column_ids)
    assert (rows.layers, rows.heads) == ((2,), (1, 0))
    rows.close()


def test_layers_may_be_counted_from_the_end(engine: Engine) -> None:
    ids = engine.tokenize(STORY)
    capture = Capture("probs", layers=[-1, 0], hidden="all")
    token = next(engine.generate(ids, capture=capture))
    assert token.layers == (3, 0)
    assert token.hidden is not None
    assert token.hidden.shape == (4, engine.model.n_embd)
    same = next(engine.generate(ids, capture=Capture("probs", layers=[3, 0], hidden=range(4))))
    np.testing.assert_allclose(token.rows, same.rows, atol=1e-3)
    np.testing.assert_allclose(token.hidden, same.hidden, atol=1e-2)  # pyright: ignore
    assert capture.bytes_per_token(engine.model, 9) == same.capture.bytes_per_token(  # pyright: ignore
        engine.model, 9
    )
    array: Any = np.array([1, 2])
    assert Capture(hidden=array).hidden == (1, 2)
    for wrong in (Capture(layers=[-5]), Capture(hidden=[-5]), Capture(layers=[3, -1])):
        with pytest.raises(errors.InvalidCapture, match=r"layers|hidden"):
            engine.generate(ids, capture=wrong)


def test_attention_of_a_prompt_has_the_forms_of_other_libraries(engine: Engine) -> None:
    capture = Capture("probs", layers=[-1, 0])
    n = len(engine.tokenize(STORY))
    whole = engine.attend(STORY, capture).array()
    layers = engine.attend(STORY, capture).to_hf()
    assert [layer.shape for layer in layers] == [(1, 8, n, n)] * 2
    np.testing.assert_allclose(layers[1][0], whole[1], atol=1e-3)
    named = engine.attend(STORY, capture, last=2).named()
    assert {name: rows.shape for name, rows in named.items()} == {
        f"blocks.{i}.attn.hook_pattern": (1, 8, 2, n) for i in (3, 0)
    }
    with pytest.raises(errors.InvalidCapture, match="probabilities"):
        engine.attend(STORY, "scores").to_hf()
    with pytest.raises(errors.RequestError, match="framework"):
        engine.attend(STORY).to_hf("tf")  # pyright: ignore


def test_torch_gets_a_copy(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    module: Any = types.ModuleType("torch")

    def from_numpy(array: Any) -> Any:
        made.append(array)
        return array

    module.from_numpy = from_numpy
    monkeypatch.setitem(sys.modules, "torch", module)
    token = next(engine.generate(STORY, capture=Capture("probs", hidden=[1])))
    assert len(token.to_hf("pt")) == len(made) == 4
    assert len(token.named("pt")) == 5
    for array in made:
        assert array.flags.writeable
        assert not np.shares_memory(array, token.rows)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(errors.KqviewError, match="torch"):
        token.to_hf("pt")


def test_heat_map_labels_itself(engine: Engine) -> None:
    pytest.importorskip("matplotlib")
    tokens = list(engine.generate("Anna is a", max_tokens=3, temperature=0, capture="probs"))
    figure = kqview.viz.heatmap(tokens, layer=1, head=0)
    columns = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert columns == [text.strip() for text in tokens[-1].column_texts]
    prompt = kqview.viz.heatmap(engine.attend("Anna is a"), layer=1, head=0)
    shown = [text.get_text() for text in prompt.axes[0].get_xticklabels()]
    assert shown == columns[: len(shown)]
    assert "Anna"[0] in "".join(shown)


def test_engine_and_model_show_themselves_in_a_notebook() -> None:
    with Engine.demo(n_ctx=64, n_slots=2, n_threads=1) as engine:
        engine.generate([1, 2, 3], max_tokens=1, slot=1).read()
        shown = engine._repr_html_()  # pyright: ignore[reportPrivateUsage]
        assert "64 tokens per slot" in shown
        assert "0: idle, 0 tokens, 1: idle, 3 tokens" in shown
    assert "<td style='text-align:left'>closed</td>" in engine._repr_html_()  # pyright: ignore
    model = replace(engine.model, name="<script>", architecture="a&b")
    html = model._repr_html_()  # pyright: ignore[reportPrivateUsage]
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "a&amp;b" in html


# ---- offsets


@pytest.mark.parametrize(
    "text",
    ["Tom found a red ball.", "Hi 😀 naïve 日本語 Ω", "", "  spaces \n\n", "<|im_start|>user\nHi"],
)
def test_offsets_are_the_characters_of_each_token(engine: Engine, text: str) -> None:
    ids, offsets = engine.tokenize(text, offsets=True)
    assert ids == engine.tokenize(text)
    assert offsets[0] == (0, 0)  # BOS
    assert len(offsets) == len(ids)
    for id_, (start, stop) in zip(ids[1:], offsets[1:], strict=True):
        piece = engine.token_bytes(id_)
        assert piece in text[start:stop].encode()
        assert stop - start == 1 or piece == text[start:stop].encode()
    covered = {i for start, stop in offsets for i in range(start, stop)}
    assert covered == set(range(len(text)))


@pytest.mark.parametrize(
    ("text", "pieces", "expected"),
    [
        ("a b", [b" a", b" b"], [(0, 1), (1, 3)]),  # SentencePiece's first space
        ("a", [b" ", b"a"], [(0, 0), (0, 1)]),
        ("<e>\n x", [b"<e>", b"x"], [(0, 3), (5, 6)]),  # white space that a vocabulary drops
        ("Ünder ONE", [b" under", b" o", b"ne"], [(0, 5), (6, 7), (7, 9)]),
        ("zyx Is", [b"[UNK]", b" is"], [(0, 3), (4, 6)]),
        ("é", [b"\xc3", b"\xa9"], [(0, 1), (0, 1)]),
        ("ab", [b"a"], None),
        ("a", [b"a", b"b"], None),
    ],
)
def test_offsets_follow_what_vocabularies_do(
    text: str, pieces: list[bytes], expected: list[tuple[int, int]] | None
) -> None:
    assert offsets_of(text, pieces) == expected


# ---- spans of messages

CHAT = [
    {"role": "system", "content": "Be brief. é"},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A demo."},
    {"role": "user", "content": "Really?\n"},
]


def contents(engine: Engine, messages: Any, **options: Any) -> list[str]:
    ids, spans = engine.apply_chat_template(messages, spans=True, **options)
    assert ids == engine.apply_chat_template(messages, **options)
    assert [start for start, _ in spans[1:]] == [stop for _, stop in spans[:-1]]
    assert spans[0][0] == 0
    return [engine.detokenize(ids[start:stop]) for start, stop in spans]


def test_spans_are_the_messages_with_their_marks(engine: Engine) -> None:
    pytest.importorskip("jinja2")
    found = contents(engine, CHAT)
    assert found[0].startswith("<|endoftext|>")
    for text, message in zip(found, CHAT, strict=True):
        assert text.removeprefix("<|endoftext|>").startswith(f"<|im_start|>{message['role']}\n")
        assert message["content"] in text
        assert text.endswith("<|im_end|>\n")
    ids, spans = engine.apply_chat_template(CHAT, spans=True)
    assert engine.detokenize(ids[spans[-1][1] :]) == "<|im_start|>assistant\n"


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}(hm){% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = (
    "{% if messages[0].role == 'system' and messages | length == 1 %}"
    "{{ raise_exception('no user') }}{% endif %}{% for m in messages %}{% if m.role != 'system' %}"
    "<|im_start|>{{ m.role }}\n{% if loop.index0 == 1 %}{{ messages[0].content }}\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)


def test_spans_of_a_template_that_writes_the_last_message_differently(engine: Engine) -> None:
    pytest.importorskip("jinja2")
    assert contents(engine, CHAT, chat_template=THINKS) == contents(engine, CHAT)


def test_message_that_is_merged_into_the_next_has_an_empty_span(engine: Engine) -> None:
    pytest.importorskip("jinja2")
    found = contents(engine, CHAT, chat_template=MERGES)
    assert found[0] == ""
    assert CHAT[0]["content"] in found[1]
    assert CHAT[1]["content"] in found[1]
    assert found[2:] == contents(engine, CHAT)[2:]


def test_spans_need_ids(engine: Engine) -> None:
    with pytest.raises(errors.RequestError, match="tokenize=True"):
        engine.apply_chat_template(CHAT, tokenize=False, spans=True)  # pyright: ignore
