"""Texts of any length and form: no stack overflows, time in proportion to length, the same ids."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import gguf
import pytest

from kqview import Engine, _core
from kqview.errors import RequestError
from tests.support import tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WHOLE = 1 << 40  # bytes below which a text is handed to llama.cpp as it is

# Signs that expressions tell apart, and a few words that they know.
SIGNS = [
    *"aabzTAZ  \n\r\t019'stremdlv.,!?-_/$+<>()[]{}|\"\\~`@#^&*=:;",
    *"éßÀñЖжअिा中文字가각ー々。、！…“”‘’५٣²¼Ⅷ\u3000\u00a0\u0085\u2028\u0301\u064b😀\u200d\ufeff",
    *"\x00\x0b\x0c\x1f€™ªµǅʰ",
    *("'s", "'LL", "'Re", "  ", "\n\n", "IMGIMGABZ", "<sentinel:12>", "123456", "    "),
]


@pytest.fixture(scope="module")
def demo_engine() -> Iterator[Engine]:
    with Engine.demo(n_ctx=256, n_threads=1) as engine:
        yield engine


def load_vocabulary(path: Path) -> _core.Model:
    return _core.Model.load(str(path), 0, False, None, vocabulary_only=True)


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
        from kqview import _core
        done = []
        def tokenize_all():
            for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
                model = _core.Model.load(str(path), 0, False, None, vocabulary_only=True)
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


def test_words_are_those_of_std_regex(llama_cpp_dir: Path):
    words = sys.modules.get("kqview._words")
    if words is None:
        pytest.skip("only developer builds have a second copy of llama.cpp's unicode.cpp")
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


def test_megabytes_of_ordinary_text_are_tokenized(demo_engine: Engine):
    text = "Anna gave the red ball to Tom. Tom put it into the box, and went home.\n" * 43_000
    assert len(text) > 3_000_000
    ids = demo_engine.tokenize(text)
    assert demo_engine.detokenize(ids) == text


def test_a_text_over_the_limit_is_refused(demo_engine: Engine):
    with pytest.raises(RequestError, match=r"16777217 bytes, the limit is 16777216"):
        demo_engine.tokenize("a" * ((16 << 20) + 1))
    with pytest.raises(RequestError, match="16777217 bytes"):
        demo_engine.generate("a" * ((16 << 20) + 1))


def test_an_expression_that_takes_too_long_is_refused():
    words = sys.modules.get("kqview._words")
    if words is None:
        pytest.skip("only developer builds have a second copy of llama.cpp's unicode.cpp")
    assert words.split("aaab", ["(?:a|aa)*b"]) == ["aaab"]
    with pytest.raises(RequestError, match="longest words"):
        words.split("a" * 1_000, ["(?:a|aa)*b"])


def test_a_vocabulary_that_llama_cpp_aborts_at_is_a_typed_error(tmp_path: Path):
    """A space where it knows none; in a process of its own, which it ended before.

    Refused when it is opened, or where it is tokenized.
    """
    path = write_vocabulary(tmp_path / "v.gguf", "whitespace")
    program = (
        "import sys; from kqview import _core, errors\n"
        "try:\n"
        "    model = _core.Model.load(sys.argv[1], 0, False, None, vocabulary_only=True)\n"
        "    model.tokenize(b'a  b', True, True)\n"
        "except errors.ModelError:\n"
        "    print('typed')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout) == (0, "typed\n"), run.stderr[-1000:]
