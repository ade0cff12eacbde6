"""Hostile model and LoRA files: each kind that ends the process in llama.cpp is refused before.

Files are opened in a process of their own (`models.Worker`), and used: tokenized with, attended and
generated two tokens with. What ended that process before cpp/gguf is in FATAL, by what was wrong.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

import gguf
import pytest

from kqview import Engine, errors
from kqview.errors import ModelLoadError
from tests.attack import gguf_file, models
from tests.attack.gguf_file import ARRAY, F32, I32, STRING, U16, U32, Gguf, Value
from tests.support import tiny_gguf
from tests.support.engines import load_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, models.Source]:
    folder = tmp_path_factory.mktemp("sources")
    return {source.name: source for source in models.make_sources(folder)}


@pytest.fixture(scope="module")
def worker() -> Iterator[models.Worker]:
    opened = models.Worker()
    yield opened
    opened.close()


# ---- changes


def put(key: str, kind: int, value: object, of: int = 0) -> Callable[[Gguf], None]:
    def change(file: Gguf) -> None:
        file.values = [old for old in file.values if old.key != key]
        file.values.append(Value(key, kind, value, of))

    return change


def retype(name: str, kind: int) -> Callable[[Gguf], None]:
    def change(file: Gguf) -> None:
        tensor = next(t for t in file.tensors if t.name == name)
        assert tensor.shape[0] % gguf_file.BLOCKS[kind][0] == 0
        tensor.kind = kind
        tensor.data = (b"\1\2" * tensor.n_bytes())[: tensor.n_bytes()]

    return change


def widen(name: str, n: int, kind: int) -> Callable[[Gguf], None]:
    """Rows of *n* values of a type whose blocks are longer than those of the model."""

    def change(file: Gguf) -> None:
        for value in file.values:
            if value.key == "llama.feed_forward_length":
                value.value = n
        for tensor in file.tensors:
            if "ffn_down" in tensor.name:
                tensor.shape[0] = n
            elif "ffn_up" in tensor.name or "ffn_gate" in tensor.name:
                tensor.shape[1] = n
            tensor.data = tensor.data.ljust(tensor.n_bytes(), b"\0")[: tensor.n_bytes()]
        retype(name, kind)(file)

    return change


def as_architecture(arch: str, **values: int) -> Callable[[Gguf], None]:
    def change(file: Gguf) -> None:
        old = file.arch()
        for value in file.values:
            if value.key == "general.architecture":
                value.value = arch
            value.key = value.key.replace(f"{old}.", f"{arch}.")
        for name, number in values.items():
            put(f"{arch}.{name.replace('__', '.')}", U32, number)(file)
        put(f"{arch}.attention.layer_norm_epsilon", F32, 1e-5)(file)

    return change


def token(i: int, text: str) -> Callable[[Gguf], None]:
    def change(file: Gguf) -> None:
        value = file.find("tokenizer.ggml.tokens")
        assert value
        value.value[i] = text

    return change


def without_tensor(name: str) -> Callable[[Gguf], None]:
    def change(file: Gguf) -> None:
        file.tensors = [tensor for tensor in file.tensors if tensor.name != name]

    return change


def without(key: str) -> Callable[[Gguf], None]:
    def change(file: Gguf) -> None:
        file.values = [value for value in file.values if value.key != key]

    return change


def both(*changes: Callable[[Gguf], None]) -> Callable[[Gguf], None]:
    def change(file: Gguf) -> None:
        for one in changes:
            one(file)

    return change


EPS = "llama.attention.layer_norm_rms_epsilon"
WEIGHT = "blk.0.attn_q.weight"
# What ended the process before: the file it is done to, the change, the error, words of it.
FATAL: dict[str, tuple[str, Callable[[Gguf], None], str, tuple[str, ...]]] = {
    "weight of I8": ("llama", retype(WEIGHT, 24), "ModelLoadError", (WEIGHT, "I8")),
    "weight of I16": ("llama", retype(WEIGHT, 25), "ModelLoadError", (WEIGHT, "I16")),
    "weight of I32": ("llama", retype(WEIGHT, 26), "ModelLoadError", (WEIGHT, "I32")),
    "weight of I64": ("llama", retype(WEIGHT, 27), "ModelLoadError", (WEIGHT, "I64")),
    "weight of F64": ("llama", retype(WEIGHT, 28), "ModelLoadError", (WEIGHT, "F64")),
    "weight of Q8_1": ("llama", retype(WEIGHT, 9), "ModelLoadError", (WEIGHT, "Q8_1")),
    "weight of Q8_K": (
        "llama",
        widen("blk.0.ffn_down.weight", 256, 15),
        "ModelLoadError",
        ("blk.0.ffn_down.weight", "Q8_K"),
    ),
    "norm of F16": (
        "llama",
        retype("output_norm.weight", 1),
        "ModelLoadError",
        ("output_norm.weight", "F16", "F32"),
    ),
    "bias of Q8_0": (
        "qwen2",
        retype("blk.0.attn_q.bias", 8),
        "ModelLoadError",
        ("blk.0.attn_q.bias", "Q8_0", "F32"),
    ),
    "convolution of F16": (
        "mamba",
        retype("blk.0.ssm_conv1d.weight", 1),
        "ModelLoadError",
        ("blk.0.ssm_conv1d.weight", "F16", "F32"),
    ),
    "epsilon no number": ("llama", put(EPS, F32, float("nan")), "ModelLoadError", (EPS, "nan")),
    "epsilon negative": ("llama", put(EPS, F32, -1e-6), "ModelLoadError", (EPS, "0 or more")),
    "head size of 0 in a recurrent model": (
        "llama",
        as_architecture(
            "rwkv6qwen2", wkv__head_size=0, time_mix_extra_dim=4, time_decay_extra_dim=4
        ),
        "ModelLoadError",
        ("rwkv6qwen2.wkv.head_size is 0",),
    ),
    "no heads where an architecture divides by them": (
        "mamba",
        as_architecture("olmo2", attention__head_count=0),
        "ModelLoadError",
        ("olmo2.attention.head_count is 0",),
    ),
    "full attention every 0 layers": (
        "llama",
        as_architecture(
            "qwen3next",
            full_attention_interval=0,
            ssm__conv_kernel=4,
            ssm__inner_size=64,
            ssm__state_size=16,
            ssm__time_step_rank=4,
            ssm__group_count=2,
            expert_feed_forward_length=64,
        ),
        "ModelLoadError",
        ("qwen3next.full_attention_interval is 0",),
    ),
    "rope sections of no size": (
        "qwen2",
        both(
            as_architecture("qwen2vl"),
            put("qwen2vl.rope.dimension_sections", ARRAY, [0, 0, 0, 0], I32),
        ),
        "ModelLoadError",
        ("qwen2vl.rope.dimension_sections", "0 values"),
    ),
    "rope sections beyond a head": (
        "qwen2",
        both(
            as_architecture("qwen2vl"),
            put("qwen2vl.rope.dimension_sections", ARRAY, [16, 1, 0, 0], I32),
        ),
        "ModelLoadError",
        ("qwen2vl.rope.dimension_sections", "17 values", "16"),
    ),
    "T5 without relative positions": (
        "t5",
        without_tensor("dec.blk.0.attn_rel_b.weight"),
        "ModelLoadError",
        ("dec.blk.0.attn_rel_b.weight", "missing"),
    ),
    "tokenizer for other files": (
        "llama",
        put("tokenizer.ggml.pre", STRING, "whitespace"),
        "ModelLoadError",
        ("tokenizer.ggml.pre",),
    ),
    "no token to hash into": (
        "llama",
        both(
            put("tokenizer.ggml.model", STRING, "test"),
            put("tokenizer.ggml.tokens", ARRAY, [], STRING),
        ),
        "ModelLoadError",
        ("tokenizer.ggml.tokens is empty",),
    ),
    "token of a megabyte in a trie": (
        "rwkv",
        token(300, "y" * (1 << 20)),
        "ModelLoadError",
        ("token 300", "1048576", "1024"),
    ),
    "no BOS where texts begin with it": (
        "ugm",
        both(without("tokenizer.ggml.bos_token_id"), put("tokenizer.ggml.add_bos_token", 7, 1)),
        "UnsupportedModel",
        ("bos_token_id",),
    ),
    "LoRA of I32": (
        "lora",
        retype("blk.0.attn_q.weight.lora_b", 26),
        "ModelLoadError",
        ("blk.0.attn_q.weight.lora_b", "I32"),
    ),
}
# What llama.cpp refused itself, or an error without a type, in our words now.
REFUSED: dict[str, tuple[str, Callable[[Gguf], None], str, tuple[str, ...]]] = {
    "rope dimensions of none": (
        "qwen2",
        put("qwen2.rope.dimension_count", U32, 0),
        "ModelLoadError",
        ("qwen2.rope.dimension_count is 0", "2..16"),
    ),
    "rope dimensions beyond a head": (
        "qwen2",
        put("qwen2.rope.dimension_count", U32, 18),
        "ModelLoadError",
        ("qwen2.rope.dimension_count is 18", "16"),
    ),
    "rope dimensions odd": (
        "qwen2",
        put("qwen2.rope.dimension_count", U32, 15),
        "ModelLoadError",
        ("qwen2.rope.dimension_count is 15", "even"),
    ),
    "no heads": (
        "llama",
        put("llama.attention.head_count", U32, 0),
        "ModelLoadError",
        ("llama.attention.head_count is 0",),
    ),
    "KV heads that do not divide": (
        "llama",
        put("llama.attention.head_count_kv", U32, 3),
        "ModelLoadError",
        ("llama.attention.head_count_kv is 3", "4 heads"),
    ),
    "no byte tokens": (
        "spm",
        both(token(3 + 0xF0, "nothing"), without("tokenizer.ggml.token_type")),
        "UnsupportedModel",
        ("byte 240",),
    ),
    "scores of another number": (
        "spm",
        put("tokenizer.ggml.scores", ARRAY, [0.0] * 7, F32),
        "ModelLoadError",
        ("tokenizer.ggml.scores has 7", "320"),
    ),
    "token types of another type": (
        "spm",
        put("tokenizer.ggml.token_type", ARRAY, [1.0] * 320, F32),
        "ModelLoadError",
        ("tokenizer.ggml.token_type", "i32"),
    ),
    "layers beyond the limit": (
        "llama",
        put("llama.block_count", U32, 2**31),
        "ModelLoadError",
        ("llama.block_count is 2147483648", "512"),
    ),
    "heads of another number of layers": (
        "llama",
        put("llama.attention.head_count", ARRAY, [4] * 3, I32),
        "ModelLoadError",
        ("llama.attention.head_count has 3", "2 layers"),
    ),
    "vocabulary of billions of empty tokens": (
        "llama",
        both(put("tokenizer.ggml.model", STRING, "none"), put("llama.vocab_size", U32, 2**32 - 1)),
        "ModelLoadError",
        ("llama.vocab_size is 4294967295",),
    ),
}


@pytest.mark.parametrize("what", [*FATAL, *REFUSED])
def test_hostile_file_is_refused_and_the_process_goes_on(
    sources: dict[str, models.Source], worker: models.Worker, tmp_path: Path, what: str
) -> None:
    name, change, expected, words = (FATAL | REFUSED)[what]
    source = sources[name]
    file = gguf_file.read(source.path.read_bytes())
    change(file)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_file.write(file))
    outcome, why = worker.open(path, source.base)
    assert outcome == expected, why
    for word in (str(path), *words):
        assert word in why


def test_sound_files_that_are_changed_here_work(
    sources: dict[str, models.Source], worker: models.Worker
) -> None:
    for source in sources.values():
        assert worker.open(source.path, source.base) == ("works", "")


def test_files_changed_at_random_work_or_are_refused_with_a_type() -> None:
    summary = models.run(30.0, 7, n_cases=150)
    assert summary.wrong == []
    assert summary.counts["works"] >= 20
    assert summary.counts["ModelLoadError"] >= 50


# ---- the reader


@pytest.mark.parametrize("kind", gguf.GGML_QUANT_SIZES, ids=lambda kind: kind.name)
def test_sizes_of_types_are_those_of_the_gguf_package(
    sources: dict[str, models.Source], tmp_path: Path, kind: gguf.GGMLQuantizationType
) -> None:
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    if kind == gguf.GGMLQuantizationType.Q8_1:
        n_bytes = 36  # in ggml; the package has not followed its scales from F32 to F16
    file = gguf_file.read(sources["llama"].path.read_bytes())
    file.values = [value for value in file.values if value.key != "general.alignment"]
    put("general.alignment", U32, 1)(file)
    file.alignment = 1
    file.tensors = [gguf_file.Tensor("d2t", [3 * n_values, 2], int(kind), bytes(6 * n_bytes))]
    path = tmp_path / "model.gguf"
    data = gguf_file.write(file)
    path.write_bytes(data)
    with pytest.raises(errors.ModelLoadError, match=r"not found|wrong shape|missing"):
        Engine(path)
    path.write_bytes(data[:-1])
    with pytest.raises(errors.ModelLoadError, match="'d2t' ends at byte"):
        Engine(path)


def test_type_that_ggml_removed_is_unknown(
    sources: dict[str, models.Source], tmp_path: Path
) -> None:
    file = gguf_file.read(sources["llama"].path.read_bytes())
    file.tensors[0].kind = 31
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_file.write(file))
    with pytest.raises(errors.ModelLoadError, match="type 31"):
        Engine(path)


def test_vocabularies_of_llama_cpp_pass_the_checks(llama_cpp_dir: Path) -> None:
    paths = sorted((llama_cpp_dir / "models").glob("ggml-vocab-*.gguf"))
    assert len(paths) >= 12
    for path in paths:  # without tensors: llama.cpp's own words for that, behind our checks
        with pytest.raises(errors.ModelLoadError, match=r"tensor 'token_embd\.weight' not found"):
            Engine(path)


def test_file_that_cannot_be_read_is_no_model(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, words in ((tmp_path, "is a directory"), (pipe, "not a regular file")):
        with pytest.raises(errors.ModelLoadError, match=words):
            Engine(path)


# ---- several files


def write_parts(folder: Path, source: Path, n_parts: int = 2) -> list[Path]:
    whole = gguf_file.read(source.read_bytes())
    paths: list[Path] = []
    for i in range(n_parts):
        part = Gguf([], whole.tensors[i::n_parts])
        if i == 0:
            part.values = list(whole.values)
        put("split.no", U16, i)(part)
        put("split.count", U16, n_parts)(part)
        put("split.tensors.count", I32, len(whole.tensors))(part)
        paths.append(folder / f"model-{i + 1:05d}-of-{n_parts:05d}.gguf")
        paths[-1].write_bytes(gguf_file.write(part))
    return paths


def test_model_in_parts_works(
    sources: dict[str, models.Source], worker: models.Worker, tmp_path: Path
) -> None:
    first, *_ = write_parts(tmp_path, sources["llama"].path, 3)
    assert worker.open(first) == ("works", "")


@pytest.mark.parametrize("i", [0, 1])
def test_each_part_of_a_model_is_checked(
    sources: dict[str, models.Source], worker: models.Worker, tmp_path: Path, i: int
) -> None:
    paths = write_parts(tmp_path, sources["llama"].path)
    part = gguf_file.read(paths[i].read_bytes())
    name = next(t.name for t in part.tensors if t.name.endswith("ffn_down.weight"))
    retype(name, 26)(part)
    paths[i].write_bytes(gguf_file.write(part))
    outcome, why = worker.open(paths[0])
    assert outcome == "ModelLoadError"
    assert str(paths[i]) in why
    assert name in why


def test_part_that_is_missing_wrong_or_not_the_first_is_named(
    sources: dict[str, models.Source], tmp_path: Path
) -> None:
    paths = write_parts(tmp_path, sources["llama"].path)
    with pytest.raises(errors.ModelLoadError, match="part 2 of 2; give the path of the first"):
        Engine(paths[1])
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(errors.ModelLoadError, match=r"00002-of-00002.*split\.no is 0, 1 is needed"):
        Engine(paths[0])
    paths[1].unlink()
    with pytest.raises(errors.ModelLoadError, match=r"00002-of-00002.*No such file"):
        Engine(paths[0])
    other = tmp_path / "other.gguf"
    paths[0].rename(other)
    with pytest.raises(errors.ModelLoadError, match="first of 2 parts"):
        Engine(other)


# ---- bytes that are no UTF-8, and log handlers that raise


def with_bytes(path: Path, *changes: tuple[bytes, bytes]) -> Path:
    """Replace bytes of a file by as many others."""
    data = path.read_bytes()
    for old, new in changes:
        assert data.count(old) >= 1
        assert len(old) == len(new)
        data = data.replace(old, new)
    path.write_bytes(data)
    return path


@pytest.fixture
def odd_model(tmp_path: Path) -> Path:
    path = tiny_gguf.write_preset(
        tmp_path / "odd.gguf", "tiny_llama", name="NAMENAME", chat_template="TEMPLATE"
    )
    return with_bytes(path, (b"NAMENAME", b"NA\xff\xfeNAME"), (b"TEMPLATE", b"TEMPL\xc3TE"))


def test_bytes_of_a_file_that_are_no_utf8_are_replaced(odd_model: Path):
    with Engine(odd_model, n_ctx=64, n_threads=1) as engine:
        assert engine.model.name == "NA\ufffd\ufffdNAME"
        assert engine.model.metadata["general.name"] == engine.model.name
        assert engine.model.chat_template == "TEMPL\ufffdTE"


def test_a_log_line_that_is_no_utf8_reaches_no_other_engine(
    odd_model: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.DEBUG, "kqview.llama"), Engine.demo(n_ctx=64) as engine:
        load_vocabulary(odd_model)  # logs the name, and nobody drains it
        assert engine.generate("Anna", max_tokens=2).read()
    assert any("NA\ufffd\ufffdNAME" in record.getMessage() for record in caplog.records)


def test_a_message_about_a_file_that_is_no_utf8_is_still_the_error(tmp_path: Path):
    path = tiny_gguf.write_preset(tmp_path / "odd.gguf", "tiny_llama")
    with_bytes(path, (b"llama.block_count", b"llama.bl\xe4ck_count"))
    with pytest.raises(ModelLoadError):
        Engine(path, n_ctx=64)


def test_what_a_log_handler_raises_reaches_no_caller(capsys: pytest.CaptureFixture[str]):
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError(f"broken handler: {record.levelname}")

    logger = logging.getLogger("kqview.llama")
    handler, level = Broken(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with Engine.demo(n_ctx=64) as engine:
            assert engine.generate("Anna", max_tokens=2).read()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert "broken handler" in capsys.readouterr().err


def test_metadata_takes_time_in_proportion_to_its_keys(tmp_path: Path):
    def seconds(n_keys: int) -> float:
        writer = gguf.GGUFWriter(None, "llama")
        for i in range(n_keys):
            writer.add_uint32(f"test.key_{i}", i)
        tiny_gguf.add_bytes_vocab(writer, 320, None)
        path = tiny_gguf.finish(writer, tmp_path / f"{n_keys}.gguf")
        model = load_vocabulary(path)
        start = time.thread_time()
        metadata = model.metadata()
        taken = time.thread_time() - start
        assert metadata[f"test.key_{n_keys - 1}"] == str(n_keys - 1)
        return taken

    seconds(100)
    assert seconds(16_000) < 12 * seconds(4_000)  # 4 where it is linear, 16 and more where not
