"""Text in and out: the tokenizer, and the text of generated tokens.

Grammars make a random model say what a test wants: with them the output, and how it falls into
tokens, is known.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import gguf
import pytest

from kqview import Engine, errors
from kqview.errors import RequestError
from kqview.offsets import offsets_of
from tests.support import tiny_gguf
from tests.support.engines import load_vocabulary
from tests.support.rows import random_ids
from tests.support.tiny_gguf import END_OF_TEXT, IM_END, IM_START

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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
    assert qwen2.tokenize(text, add_special=False) == ids
    assert qwen2.detokenize(ids) == text
    assert b"".join(qwen2.token_bytes(id_) for id_ in ids) == text.encode()


def test_special_tokens_are_parsed_only_when_asked_for(qwen2: Engine) -> None:
    text = "<|im_start|>hi<|im_end|>"
    parsed = qwen2.tokenize(text, add_special=False)
    assert parsed == [151644, 6023, 151645]
    plain = qwen2.tokenize(text, parse_special=False, add_special=False)
    assert not {151644, 151645} & set(plain)
    assert qwen2.detokenize(plain) == text
    assert qwen2.token_text(151645) == "<|im_end|>"


def test_text_survives_the_tokenizer(qwen2: Engine) -> None:
    for text in (MANY_BYTES, " leading and trailing ", "\n\n\t", "e\u0301", "a\0b", "\U0010ffff"):
        assert qwen2.detokenize(qwen2.tokenize(text, add_special=False)) == text


@pytest.mark.parametrize(
    "name", ["baichuan", "bert-bge", "deepseek-coder", "falcon", "gpt-2", "gpt-neox", "llama-spm",
             "mpt", "phi-3", "refact", "starcoder"]
)  # fmt: skip
def test_texts_of_ids_join_losslessly(name: str, llama_cpp_dir: Path) -> None:
    path = llama_cpp_dir / "models" / f"ggml-vocab-{name}.gguf"
    model = load_vocabulary(path)
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


def test_bytes_of_utf8_are_tokenized_as_their_text(demo: Engine) -> None:
    assert demo.tokenize("Zoë".encode()) == demo.tokenize("Zoë")
    assert demo.tokenize("Zoë".encode(), offsets=True).offsets[-1][1] == 3
    with pytest.raises(errors.RequestError, match="byte at index 2 that is not UTF-8"):
        demo.tokenize(b"Zo\xeb!")


def test_prompt_text_is_tokenized_with_the_options_given(engine: Engine) -> None:
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
def test_texts_of_tokens_join_to_the_output(engine: Engine, text: str) -> None:
    # A token is a byte here, so that every character of several bytes is in several tokens.
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
def test_bytes_that_are_no_text_become_replacement_characters(engine: Engine, byte: int) -> None:
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


@pytest.mark.parametrize("has_mod", [False, True])
def test_unfinished_character_before_an_end_that_comes_later_joins_the_last_token(
    make_engine: MakeEngine, tiny_llama: Path, has_mod: bool
) -> None:
    engine = make_engine(tiny_llama, run_ahead=0)  # the end is not known with the last token
    generation = engine.generate(
        PROMPT, temperature=0, stop_tokens=[99], trace=has_mod,
        logit_bias={0xF0: 100.0, 99: 90.0}, repeat_penalty=2.0,
    )  # fmt: skip
    tokens = list(generation)
    assert [token.id for token in tokens] == [0xF0]
    assert generation.finish_reason == "stop_token"
    assert "".join(token.text for token in tokens) == generation.text == "\N{REPLACEMENT CHARACTER}"


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


@pytest.mark.parametrize("is_steered", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["silver key"], ["a", " ", "o", " "]),
        ([" oh", "silver"], ["a", " o", " "]),
        (["silver keys"], ["a", " ", "o", " ", "silver key!"]),
        ([], [*"a o silver key!"]),
    ],
)
async def test_deltas_never_show_what_may_become_a_stop_sequence(
    make_engine: MakeEngine,
    tiny_llama: Path,
    stop: list[str],
    expected: list[str],
    is_async: bool,
    is_steered: bool,
) -> None:
    mods = [lambda event: None] if is_steered else []
    generation = say(make_engine(tiny_llama), "a o silver key!", stop=stop, mods=mods)
    found = [text async for text in generation.adeltas()] if is_async else [*generation.deltas()]
    assert "".join(found) == generation.text
    assert found == expected


def test_deltas_are_whole_characters(engine: Engine) -> None:
    assert list(say(engine, "Ω😀!").deltas()) == ["Ω", "😀", "!"]
    # The last token is in the middle of a character.
    assert list(say(engine, "Ω😀!", max_tokens=4).deltas()) == ["Ω", "�"]


async def test_deltas_go_on_where_others_have_stopped(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    generation = say(make_engine(tiny_llama), "one two three", stop=["th!"])
    first = next(generation.deltas())
    tokens = [next(generation).text for _ in range(2)]
    second = next(generation.deltas())
    third = await anext(generation.adeltas())
    assert (first, tokens, second, third) == ("o", ["n", "e"], "ne ", "tw")
    for _ in range(3):
        next(generation)
    assert (generation.take_delta(), generation.take_delta()) == ("o ", "")
    generation.cancel()
    assert [*generation.deltas()] == ["t"]  # it cannot become a stop sequence any more
    assert first + second + third + "o " + "t" == generation.text


def test_stop_sequence_inside_one_token_is_found(qwen2: Engine) -> None:
    generation = say(qwen2, "The capital", stop=["api"])
    assert "".join(token.text for token in generation).startswith("The capi")
    assert generation.text == "The c"


@pytest.mark.parametrize("eos", [IM_END, END_OF_TEXT])
def test_end_of_text_ends_the_generation_unless_it_is_ignored(engine: Engine, eos: int) -> None:
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


# ---- texts of any length: no stack overflow, time in proportion to length, the same ids

WHOLE = 1 << 40  # bytes below which a text is handed to llama.cpp as it is
# Signs that expressions tell apart, and a few words that they know.
SIGNS = [
    *"aabzTAZ  \n\r\t019'stremdlv.,!?-_/$+<>()[]{}|\"\\~`@#^&*=:;",
    *"éßÀñЖжअिा中文字가각ー々。、！…“”‘’५٣²¼Ⅷ\u3000\u00a0\u0085\u2028\u0301\u064b😀\u200d\ufeff",
    *"\x00\x0b\x0c\x1f€™ªµǅʰ",
    *("'s", "'LL", "'Re", "  ", "\n\n", "IMGIMGABZ", "<sentinel:12>", "123456", "    "),
]


def write_vocabulary(path: Path, pre: str) -> Path:
    """Write a file that is a vocabulary of bytes and no model, for that pre-tokenizer."""
    writer = gguf.GGUFWriter(None, "llama")
    tiny_gguf.add_bytes_vocab(writer, 320, None)
    writer.kv_data[0]["tokenizer.ggml.pre"].value = pre
    return tiny_gguf.finish(writer, path)


def pre_tokenizers(llama_cpp_dir: Path) -> list[str]:
    source = (llama_cpp_dir / "src" / "llama-vocab.cpp").read_text()
    return sorted(set(re.findall(r'tokenizer_pre == "([^"]+)"', source)))


def expressions(llama_cpp_dir: Path) -> list[list[str]]:
    """The lists of regular expressions that llama.cpp's pre-tokenizers cut texts by."""
    source = (llama_cpp_dir / "src" / "llama-vocab.cpp").read_text()
    escapes = {"r": "\r", "n": "\n"}
    found: list[list[str]] = []
    for block in re.findall(r"regex_exprs = \{\n(.*?)\n\s*\};", source, re.DOTALL):
        lines = re.findall(r'^\s*"((?:[^"\\]|\\.)*)"', block, re.MULTILINE)
        texts = [re.sub(r"\\(.)", lambda c: escapes.get(c[1], c[1]), line) for line in lines]
        if texts not in found:
            found.append(texts)
    return found


@pytest.mark.full
def test_every_pre_tokenizer_takes_long_runs_on_a_small_stack(tmp_path: Path, llama_cpp_dir: Path):
    """In a process of its own: where this fails, it fails with SIGSEGV."""
    names = pre_tokenizers(llama_cpp_dir)
    assert len(names) >= 91
    names.remove("whitespace")  # cannot do with this vocabulary; the last test here
    for name in names:
        write_vocabulary(tmp_path / f"{name}.gguf", name)
    program = """
        import sys, threading
        from pathlib import Path
        from tests.support.engines import load_vocabulary
        done = []
        def tokenize_all():
            for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
                model = load_vocabulary(path)
                for unit in ("a", "A", "1", " ", "!", "é", "a "):
                    text = (unit * 30_000)[:30_000].encode()
                    ids = model.tokenize(text, False, True)
                    short = unit.encode() * 3
                    if model.detokenize(model.tokenize(short, False, True)) == short:
                        assert model.detokenize(ids) == text, path.stem
                done.append(path.name)
        threading.stack_size(512 * 1024)
        thread = threading.Thread(target=tokenize_all)
        thread.start()
        thread.join()
        print(len(done))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert (run.returncode, run.stdout.strip()) == (0, str(len(names))), run.stderr[-2000:]


@pytest.mark.needs("developer build")
def test_words_are_those_of_std_regex(llama_cpp_dir: Path):
    words: Any = sys.modules["kqview._words"]
    lists = expressions(llama_cpp_dir)
    assert len(lists) >= 31
    seed = random.randrange(1 << 32)
    choose = random.Random(seed)
    for expression in lists:
        for _ in range(15):
            signs = choose.sample(SIGNS, choose.randint(2, len(SIGNS)))
            text = "".join(choose.choices(signs, k=choose.randint(1, 200)))
            expected = words.stock_split(text, expression)
            assert words.split(text, expression) == expected, (seed, expression, text)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["baichuan", "bert-bge", "deepseek-coder", "falcon", "gpt-2", "gpt-neox", "llama-spm",
             "mpt", "phi-3", "qwen2", "refact", "starcoder"]
)  # fmt: skip
def test_ids_of_a_text_taken_apart_are_those_of_the_whole(name: str, llama_cpp_dir: Path):
    model = load_vocabulary(llama_cpp_dir / "models" / f"ggml-vocab-{name}.gguf")
    specials = [model.token_bytes(id_).decode("utf-8", "replace") for id_ in model.control_tokens()]
    examples = (llama_cpp_dir / "models" / "ggml-vocab-gpt-2.gguf.inp").read_text()
    parts = [*examples.split("\n__ggml_vocab_test__\n"), *specials * 2, *specials[:3] * 6]
    parts += [" ", "  ", "\n", "\t", " \n", "\x01"]
    seed = random.randrange(1 << 32)
    choose = random.Random(seed)
    for n_parts in [0, 1, 2, 3, 5, 8, 8, 8, 200, 400]:
        text = "".join(choose.choices(parts, k=n_parts)).encode()
        for add_special, parse_special in ((True, True), (False, True), (True, False)):
            whole = model.tokenize(text, add_special, parse_special, WHOLE)
            apart = model.tokenize(text, add_special, parse_special, 0)
            assert apart == whole, (seed, text)


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "unit"),
    [("llama-spm", "\n"), ("phi-3", "<|end|>"), ("gpt-2", "a"), ("falcon", "x>>TITLE<<")],
)
def test_time_is_in_proportion_to_length(name: str, unit: str, llama_cpp_dir: Path):
    model = load_vocabulary(llama_cpp_dir / "models" / f"ggml-vocab-{name}.gguf")

    def seconds(n_bytes: int) -> float:
        text = (unit * n_bytes)[:n_bytes].encode()
        return min(cpu_seconds(lambda: model.tokenize(text, False, True)) for _ in range(2))

    seconds(20_000)
    # Four times the text: 4 where it is linear, 16 where it is not.
    assert seconds(400_000) < 9 * seconds(100_000)


def test_offsets_take_time_in_proportion_to_length():
    def seconds(n: int) -> float:
        text, pieces = "ab cd " * n, [b"ab", b" cd", b" "] * n
        return min(cpu_seconds(lambda: offsets_of(text, pieces)) for _ in range(2))

    assert seconds(80_000) < 9 * seconds(20_000)


@pytest.mark.full
def test_megabytes_of_ordinary_text_are_tokenized(demo: Engine):
    text = "Anna gave the red ball to Tom. Tom put it into the box, and went home.\n" * 43_000
    assert len(text) > 3_000_000
    ids = demo.tokenize(text, add_special=False)
    assert demo.detokenize(ids) == text


def test_a_text_over_the_limit_is_refused(demo: Engine):
    with pytest.raises(RequestError, match=r"16777217 .*16777216"):
        demo.tokenize("a" * ((16 << 20) + 1))
    with pytest.raises(RequestError, match="16777217 bytes"):
        demo.generate("a" * ((16 << 20) + 1))


@pytest.mark.needs("developer build")
def test_an_expression_that_takes_too_long_is_refused():
    words: Any = sys.modules["kqview._words"]
    assert words.split("aaab", ["(?:a|aa)*b"]) == ["aaab"]
    with pytest.raises(RequestError, match="longest words"):
        words.split("a" * 1_000, ["(?:a|aa)*b"])


@pytest.mark.full
def test_a_vocabulary_that_llama_cpp_aborts_at_is_a_typed_error(tmp_path: Path):
    """A space where it knows none; in a process of its own, which it ended before.

    Refused when it is opened, or where it is tokenized.
    """
    path = write_vocabulary(tmp_path / "v.gguf", "whitespace")
    program = (
        "import sys; from kqview import errors; from tests.support.engines import load_vocabulary\n"
        "try:\n"
        "    model = load_vocabulary(sys.argv[1])\n"
        "    model.tokenize(b'a  b', True, True)\n"
        "except errors.ModelError:\n"
        "    print('typed')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout) == (0, "typed\n"), run.stderr[-1000:]


def test_special_tokens_are_left_out_if_asked() -> None:
    with Engine.demo(n_threads=1) as engine:
        ids = engine.tokenize("<|im_start|>user\nTom<|im_end|>", add_special=True)
        assert engine.detokenize(ids).count("<|im_") == 2
        for skipped in (
            engine.detokenize(ids, skip_special_tokens=True),
            engine.detokenize(iter(ids), skip_special_tokens=True),
        ):
            assert skipped == "user\nTom"
        assert engine.detokenize(ids, skip_special_tokens=None) == engine.detokenize(ids)  # pyright: ignore
        only = [engine.model.bos_token_id or 0, ids[0]]
        assert engine.detokenize(only, skip_special_tokens=True) == ""
        with pytest.raises(errors.RequestError, match="skip_special_tokens"):
            engine.detokenize(ids, skip_special_tokens="yes")  # pyright: ignore
        with pytest.raises(errors.InvalidToken):
            engine.detokenize([10**6], skip_special_tokens=True)
