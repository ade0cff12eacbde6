"""Text in and out: the tokenizer, and the text of generated tokens.

Grammars make a random model say what a test wants: with them the output, and how it falls into
tokens, is known.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine, _core
from tests.support import tiny_gguf
from tests.support.rows import random_ids
from tests.support.tiny_gguf import END_OF_TEXT, IM_END, IM_START

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kqview import Generation
    from tests.engine.conftest import MakeEngine

PROMPT = random_ids(12)
MANY_BYTES = "Hi 😀👍🏽 naïve 日本語 Ω"


@pytest.fixture(scope="module")
def qwen2(llama_cpp_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Random weights with the tokenizer of Qwen2."""
    path = tmp_path_factory.mktemp("model") / "vocab.gguf"
    tiny_gguf.write_preset(path, "tiny_qwen2_real_vocab", llama_cpp_dir=llama_cpp_dir, n_layer=1)
    with Engine(path, n_ctx=256, n_threads=1) as engine:
        yield engine


def say(engine: Engine, text: str, **options: Any) -> Generation:
    """A generation that can only produce *text*, and stop after it."""
    options = {"max_tokens": 200, "temperature": 0, **options}
    return engine.generate(
        PROMPT, grammar=f"root ::= {json.dumps(text, ensure_ascii=False)}", **options
    )


# ---- in


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, how are you?", [9707, 11, 1246, 525, 498, 30]),
        ("The capital of France is", [785, 6722, 315, 9625, 374]),
        ("", []),
        ("<|im_start|>user\n", [151644, 872, 198]),
    ],
)
def test_tokenizer_gives_the_known_ids_of_qwen2(qwen2: Engine, text: str, ids: list[int]) -> None:
    assert qwen2.tokenize(text) == ids
    assert qwen2.detokenize(ids) == text
    assert b"".join(qwen2.token_bytes(id_) for id_ in ids) == text.encode()


def test_special_tokens_are_parsed_only_when_asked_for(qwen2: Engine) -> None:
    text = "<|im_start|>hi<|im_end|>"
    parsed = qwen2.tokenize(text)
    assert parsed == [151644, 6023, 151645]
    plain = qwen2.tokenize(text, parse_special=False)
    assert not {151644, 151645} & set(plain)
    assert qwen2.detokenize(plain) == text
    assert qwen2.token_text(151645) == "<|im_end|>"


def test_text_survives_the_tokenizer(qwen2: Engine) -> None:
    for text in (MANY_BYTES, " leading and trailing ", "\n\n\t", "e\u0301", "a\0b", "\U0010ffff"):
        assert qwen2.detokenize(qwen2.tokenize(text)) == text


@pytest.mark.parametrize(
    "name", ["baichuan", "bert-bge", "deepseek-coder", "falcon", "gpt-2", "gpt-neox", "llama-spm",
             "mpt", "phi-3", "refact", "starcoder"]
)  # fmt: skip
def test_texts_of_ids_join_losslessly(name: str, llama_cpp_dir: Path) -> None:
    path = llama_cpp_dir / "models" / f"ggml-vocab-{name}.gguf"
    model = _core.Model.load(str(path), 0, False, None, vocabulary_only=True)
    written = "a , b ? it 's ' that ' I 'm . Anna !"
    ids = model.tokenize(written.encode(), False, True)
    text = model.detokenize(ids)
    if name != "bert-bge":  # which reads signs and capital letters as others
        assert text.decode().strip() == written
    assert text == b"".join(model.token_bytes(id_) for id_ in ids)
    for i in range(len(ids)):
        assert model.detokenize(ids[:i]) + model.detokenize(ids[i:]) == text


def test_text_of_a_generations_ids_is_its_text(
    llama_cpp_dir: Path, tmp_path: Path, make_engine: MakeEngine
) -> None:
    """SentencePiece: llama.cpp drops the first space, and those before punctuation where asked."""
    path = tiny_gguf.write_preset(
        tmp_path / "spm.gguf", "tiny_llama", llama_cpp_dir=llama_cpp_dir, vocab="llama-spm"
    )
    engine = make_engine(path, n_ctx=128)
    generation = engine.generate("Hello", max_tokens=20, seed=1, grammar='root ::= " a , b ?"')
    assert generation.read() == " a , b ?"
    assert engine.detokenize(generation.tokens) == " a , b ?"


def test_prompt_text_is_tokenized_with_the_options_given(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    options: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
    text = "ab<|im_start|>"
    list(engine.generate(text, **options))
    assert engine.slots[0].tokens == [97, 98, IM_START]
    list(engine.generate(text, parse_special=False, **options))
    assert engine.slots[0].tokens == list(text.encode())
    special = {"bos": "<|endoftext|>", "eos": "<|im_end|>", "padding": "<|endoftext|>"}
    assert engine.model.special_tokens.items() >= special.items()


# ---- out


@pytest.mark.parametrize("text", [MANY_BYTES, "😀", "plain"])
def test_texts_of_tokens_join_to_the_output(
    make_engine: MakeEngine, tiny_llama: Path, text: str
) -> None:
    # A token is a byte here, so that every character of several bytes is in several tokens.
    engine = make_engine(tiny_llama)
    generation = say(engine, text)
    tokens = list(generation)
    assert bytes(token.id for token in tokens) == text.encode()
    assert "".join(token.text for token in tokens) == text == generation.text
    assert [token.text for token in tokens if token.text] == list(text)
    assert generation.finish_reason == "stop"


def test_texts_of_a_real_vocabulary_join_to_the_output(qwen2: Engine) -> None:
    generation = say(qwen2, MANY_BYTES)
    tokens = list(generation)
    assert generation.text == MANY_BYTES
    assert "".join(token.text for token in tokens) == MANY_BYTES
    assert b"".join(qwen2.token_bytes(token.id) for token in tokens) == MANY_BYTES.encode()


@pytest.mark.parametrize("byte", [0xF0, 0x80, 0xC3, 0xFF, 0x00])
def test_bytes_that_are_no_text_become_replacement_characters(
    make_engine: MakeEngine, tiny_llama: Path, byte: int
) -> None:
    engine = make_engine(tiny_llama)
    banned = [id_ for id_ in range(engine.model.n_vocab) if id_ != byte]
    generation = engine.generate(PROMPT, max_tokens=5, temperature=0, banned_tokens=banned)
    tokens = list(generation)
    assert [token.id for token in tokens] == [byte] * 5
    want = bytes([byte] * 5).decode("utf-8", "replace")
    assert "".join(token.text for token in tokens) == want == generation.text


def test_unfinished_character_at_the_end_is_flushed_into_the_last_token(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    generation = say(make_engine(tiny_llama), "a😀", max_tokens=3)
    assert [token.text for token in generation] == ["a", "", "\N{REPLACEMENT CHARACTER}"]
    assert generation.finish_reason == "length"
    assert generation.text == "a\N{REPLACEMENT CHARACTER}"


# ---- stopping


@pytest.mark.parametrize(
    ("stop", "match", "before", "joined"),
    [
        ("o t", "o t", "one tw", "one two t"),
        (["zzz", "thr"], "thr", "one two ", "one two thr"),
        (["two", "one two"], "one two", "", "one two"),
        (["wo", "two"], "two", "one ", "one two"),
        (["e😀"], "e😀", "one two thre", "one two three😀"),
        ("😀", "😀", "one two three", "one two three😀"),
        (["never"], None, "one two three😀!", "one two three😀!"),
        ([], None, "one two three😀!", "one two three😀!"),
    ],
)
def test_stop_sequence_ends_the_text_before_it(
    make_engine: MakeEngine,
    tiny_llama: Path,
    stop: str | list[str],
    match: str | None,
    before: str,
    joined: str,
) -> None:
    generation = say(make_engine(tiny_llama), "one two three😀!", stop=stop)
    tokens = list(generation)
    assert generation.stop_match == match
    assert generation.text == before
    assert "".join(token.text for token in tokens) == joined
    assert generation.finish_reason == ("stop_sequence" if match else "stop")
    assert generation.usage.completion_tokens == len(tokens) == len(joined.encode())


def test_stop_sequence_inside_one_token_is_found(qwen2: Engine) -> None:
    generation = say(qwen2, "The capital", stop=["api"])
    assert "".join(token.text for token in generation).startswith("The capi")
    assert generation.text == "The c"


def test_stop_token_ends_the_generation_and_is_not_handed_out(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    generation = say(engine, "one two", stop_tokens=[ord("w"), 300])
    assert generation.read() == "one t"
    assert generation.finish_reason == "stop_token"
    # The stop token of another request has no part in it.
    assert say(engine, "one two").read() == "one two"


@pytest.mark.parametrize("eos", [IM_END, END_OF_TEXT])
def test_end_of_text_ends_the_generation_unless_it_is_ignored(
    make_engine: MakeEngine, tiny_llama: Path, eos: int
) -> None:
    engine = make_engine(tiny_llama)
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "logit_bias": {eos: 1e6}}
    generation = engine.generate(PROMPT, **options)
    assert list(generation) == []
    assert generation.finish_reason == "stop"
    assert generation.text == ""
    assert generation.usage.completion_tokens == 0
    assert engine.slots[0].tokens == PROMPT
    ignoring = engine.generate(PROMPT, ignore_eos=True, **options)
    assert eos not in [token.id for token in ignoring]
    assert ignoring.finish_reason == "length"
