"""Random-weight GGUF models made on the spot, and files that are no model.

Owns: what a test model looks like. Weights depend only on (seed, tensor name), so two calls with
the same arguments give the same file and no two layers are equal. Attention scores spread over a
few units and each head has its own sharpness, so a swapped layer, head or column is visible in any
comparison. Gemma 3n, Gemma 4, BERT and T5 are here because llama.cpp's own generator of tiny models
(archs.py) leaves them out.
Never: loads a model or knows anything of kqview.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, TokenType, quants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Vocab = Literal["qwen2", "llama-spm", "phi-3", "none", "bytes"]
WeightType = Literal["F32", "F16", "Q8_0"]
# Specials of the "bytes" vocabulary, directly after the 256 bytes.
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """What `write_model` writes; every field is also a keyword of it.

    ``n_vocab`` None means: all of the copied vocabulary ("qwen2"), 320 ("bytes") or 256 ("none").
    ``tied`` None means: tied for a copied vocabulary, as the embedding is most of the file.
    ``score_spread`` is the rough standard deviation of scaled scores before biases.
    """

    arch: Literal["qwen2", "llama", "llama-embed"] = "qwen2"
    n_layer: int = 3
    n_head: int = 4
    n_head_kv: int = 2
    n_embd: int = 64
    n_ff: int = 128
    n_ctx_train: int = 2048
    vocab: Vocab = "bytes"
    n_vocab: int | None = None
    weight_type: WeightType = "F32"
    seed: int = 0
    tied: bool | None = None
    qkv_bias: bool | None = None
    score_spread: float = 2.0
    rope_base: float = 10000.0
    rms_eps: float = 1e-6
    name: str = ""  # llama.cpp knows some vocabularies by it
    causal: bool = True
    specials: tuple[str, ...] = ()  # of vocab "bytes": control tokens from id 260 on
    chat_template: str | None = field(default=CHATML, repr=False)


PRESETS: dict[str, Shape] = {
    "tiny_qwen2": Shape(),
    "tiny_llama": Shape(arch="llama", rms_eps=1e-5),
    "tiny_qwen2_real_vocab": Shape(vocab="qwen2", n_embd=32, n_ff=64, n_head=2, n_head_kv=1),
    # 24 layers x 16 heads (4 KV heads, head size 64): the shape that benchmarks use; about 320 MB.
    "bench_24x16": Shape(
        arch="llama", n_layer=24, n_head=16, n_head_kv=4, n_embd=1024, n_ff=2816, n_ctx_train=8192,
        vocab="bytes", n_vocab=32000, weight_type="Q8_0", tied=True, rms_eps=1e-5,
    ),
}  # fmt: skip


class Reader(gguf.GGUFReader):
    """GGUFReader over a plain array: on 151,000 tokens 3 s instead of the memmap's 10 s."""

    @property
    def data(self) -> np.ndarray:
        return self._plain

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._plain = np.asarray(mapped).view(np.ndarray)


def write_preset(
    path: Path, preset: str, *, llama_cpp_dir: Path | None = None, **changes: Any
) -> Path:
    """Write the preset of that name, with the fields in `changes` replaced; see `write_model`."""
    if preset not in PRESETS:
        raise ValueError(f"tiny_gguf.preset: got {preset!r}; choose one of {', '.join(PRESETS)}")
    return _write(path, replace(PRESETS[preset], **changes), llama_cpp_dir)


def write_model(path: Path, *, llama_cpp_dir: Path | None = None, **shape: Any) -> Path:
    """Write a Llama or Qwen2 model with random weights.

    Args:
        path: File to write; parent folders are made.
        llama_cpp_dir: llama.cpp source, whose vocabulary file ``vocab="qwen2"`` copies.
        shape: Fields of `Shape`.

    Returns:
        `path`.

    Raises:
        ValueError: A size does not divide, or the vocabulary is too small or missing.
    """
    return _write(path, Shape(**shape), llama_cpp_dir)


def write_lora(
    path: Path, preset: str, *, rank: int = 4, alpha: float = 4.0, merged: Path, scale: float = 1.0
) -> Path:
    """Write a random LoRA adapter of Q and K for a preset, and the model that it makes to `merged`.

    The adapter adds ``scale * alpha / rank * b @ a`` to a weight (Hu et al., 2021).
    """
    shape = PRESETS[preset]
    writer = gguf.GGUFWriter(None, shape.arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    rand = tensor_source(shape.seed + 1)
    added: dict[str, np.ndarray] = {}
    for name, weight in _tensors(shape, 0):
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            n_out, n_in = weight.shape
            a = rand(name + ".lora_a", (rank, n_in), 1 / n_in**0.5)
            b = rand(name + ".lora_b", (n_out, rank), 1 / rank**0.5)
            writer.add_tensor(name + ".lora_a", a)
            writer.add_tensor(name + ".lora_b", b)
            added[name] = np.float32(scale * alpha / rank) * (b @ a)
    _write(merged, shape, None, added)
    return finish(writer, path)


def _copied(model: Path) -> tuple[Reader, gguf.GGUFWriter]:
    """A model that was read, and a writer that has its fields."""
    reader = Reader(model)
    fields = {key: entry for key, entry in reader.fields.items() if not key.startswith("GGUF.")}
    writer = gguf.GGUFWriter(None, fields.pop("general.architecture").contents())
    for key, entry in fields.items():
        sub_type = entry.types[-1] if entry.types[0] == GGUFValueType.ARRAY else None
        if sub_type is not None and not len(entry.contents()):
            continue  # which the writer refuses
        writer.add_key_value(key, entry.contents(), entry.types[0], sub_type)
    return reader, writer


def write_copy(path: Path, model: Path, weight_type: WeightType) -> Path:
    """Write *model* again with its matrices in another type; norms stay as they are."""
    reader, writer = _copied(model)
    for tensor in reader.tensors:
        data = quants.dequantize(tensor.data, tensor.tensor_type)
        _add_tensor(writer, tensor.name, data, weight_type)
    return finish(writer, path)


def write_deeper(path: Path, model: Path, n_more: int) -> Path:
    """Write *model* with so many further layers, which add nothing to the residual stream."""
    reader, writer = _copied(model)
    arch = reader.fields["general.architecture"].contents()
    n_layer = reader.fields[f"{arch}.block_count"].contents()
    del writer.kv_data[0][f"{arch}.block_count"]
    writer.add_uint32(f"{arch}.block_count", n_layer + n_more)
    for tensor in reader.tensors:
        data = quants.dequantize(tensor.data, tensor.tensor_type)
        _add_tensor(writer, tensor.name, data, "F16")
        if not tensor.name.startswith("blk.0."):
            continue
        adds = tensor.name.endswith(("attn_output.weight", "ffn_down.weight"))
        for i in range(n_layer, n_layer + n_more):
            name = tensor.name.replace("blk.0.", f"blk.{i}.")
            _add_tensor(writer, name, 0 * data if adds else data, "F16")
    return finish(writer, path)


_D_STATE, _D_CONV, _DT_RANK = 16, 4, 4  # of a Mamba layer


def write_mamba(
    path: Path, *, n_layer: int = 2, n_embd: int = 64, n_vocab: int = 320, seed: int = 0
) -> Path:
    """Write a tiny Mamba model: recurrent layers only, so there is no attention to capture."""
    writer = gguf.GGUFWriter(None, "mamba")
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    add, rand = _begin_mamba(writer, n_layer, n_embd, n_vocab, seed)
    for il in range(n_layer):
        _add_mamba_layer(add, rand, f"blk.{il}.", n_embd)
    return finish(writer, path)


def write_jamba(
    path: Path, *, n_layer: int = 4, n_embd: int = 64, n_vocab: int = 320, seed: int = 0
) -> Path:
    """Write a tiny hybrid model: every second layer is a Mamba layer, the others attend."""
    n_head, n_head_kv, n_ff = 4, 2, 96
    writer = gguf.GGUFWriter(None, "jamba")
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv([n_head_kv * (il % 2) for il in range(n_layer)])
    add, rand = _begin_mamba(writer, n_layer, n_embd, n_vocab, seed)

    def matrix(name: str, n_out: int, n_in: int) -> None:
        add(name, rand(name, (n_out, n_in), n_in**-0.5))

    def norm(name: str, n: int) -> None:
        add(name, 1 + rand(name, (n,), 0.1))

    for il in range(n_layer):
        b = f"blk.{il}."
        if il % 2:
            n_embd_kv = n_embd // n_head * n_head_kv
            norm(b + "attn_norm.weight", n_embd)
            matrix(b + "attn_q.weight", n_embd, n_embd)
            matrix(b + "attn_k.weight", n_embd_kv, n_embd)
            matrix(b + "attn_v.weight", n_embd_kv, n_embd)
            matrix(b + "attn_output.weight", n_embd, n_embd)
        else:
            _add_mamba_layer(add, rand, b, n_embd)
            norm(b + "ssm_dt_norm.weight", _DT_RANK)
            norm(b + "ssm_b_norm.weight", _D_STATE)
            norm(b + "ssm_c_norm.weight", _D_STATE)
        norm(b + "ffn_norm.weight", n_embd)
        matrix(b + "ffn_gate.weight", n_ff, n_embd)
        matrix(b + "ffn_up.weight", n_ff, n_embd)
        matrix(b + "ffn_down.weight", n_embd, n_ff)
    return finish(writer, path)


def _begin_mamba(
    writer: gguf.GGUFWriter, n_layer: int, n_embd: int, n_vocab: int, seed: int
) -> tuple[Callable[[str, np.ndarray], None], Callable[[str, tuple[int, ...], float], np.ndarray]]:
    """Add what models with Mamba layers have in common; return what adds and what makes tensors."""
    writer.add_context_length(2048)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_ssm_conv_kernel(_D_CONV)
    writer.add_ssm_inner_size(2 * n_embd)
    writer.add_ssm_state_size(_D_STATE)
    writer.add_ssm_time_step_rank(_DT_RANK)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    add_bytes_vocab(writer, n_vocab, CHATML)
    rand = tensor_source(seed)

    def add(name: str, data: np.ndarray) -> None:
        writer.add_tensor(name, np.ascontiguousarray(data, dtype=np.float32))

    add("token_embd.weight", rand("token_embd.weight", (n_vocab, n_embd), 0.5))
    add("output_norm.weight", 1 + rand("output_norm.weight", (n_embd,), 0.1))
    add("output.weight", rand("output.weight", (n_vocab, n_embd), 3.0 / n_embd**0.5))
    return add, rand


def _add_mamba_layer(
    add: Callable[[str, np.ndarray], None],
    rand: Callable[[str, tuple[int, ...], float], np.ndarray],
    b: str,
    n_embd: int,
) -> None:
    d_inner = 2 * n_embd
    add(b + "attn_norm.weight", 1 + rand(b + "attn_norm.weight", (n_embd,), 0.1))
    add(b + "ssm_in.weight", rand(b + "ssm_in.weight", (2 * d_inner, n_embd), n_embd**-0.5))
    add(b + "ssm_conv1d.weight", rand(b + "ssm_conv1d.weight", (d_inner, _D_CONV), 0.5))
    add(b + "ssm_conv1d.bias", rand(b + "ssm_conv1d.bias", (d_inner,), 0.1))
    add(
        b + "ssm_x.weight",
        rand(b + "ssm_x.weight", (_DT_RANK + 2 * _D_STATE, d_inner), d_inner**-0.5),
    )
    add(b + "ssm_dt.weight", rand(b + "ssm_dt.weight", (d_inner, _DT_RANK), _DT_RANK**-0.5))
    add(b + "ssm_dt.bias", rand(b + "ssm_dt.bias", (d_inner,), 0.1))
    # A is negative, else the state grows without bound.
    a = -np.arange(1, _D_STATE + 1, dtype=np.float32)
    add(b + "ssm_a", np.broadcast_to(a, (d_inner, _D_STATE)))
    add(b + "ssm_d", 1 + rand(b + "ssm_d", (d_inner,), 0.1))
    add(b + "ssm_out.weight", rand(b + "ssm_out.weight", (n_embd, d_inner), d_inner**-0.5))


def write_truncated(path: Path, model: Path, *, keep: float = 0.5) -> Path:
    """Write the first `keep` (a fraction) of a good model's bytes."""
    data = model.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    return path


def write_not_gguf(path: Path) -> Path:
    """Write 4 KiB that do not begin with the GGUF magic."""
    path.write_bytes(b"this is not a model\n" * 205)
    return path


def write_empty(path: Path) -> Path:
    """Write a file of no bytes."""
    path.write_bytes(b"")
    return path


def _write(
    path: Path,
    shape: Shape,
    llama_cpp_dir: Path | None,
    added: Mapping[str, np.ndarray] | None = None,
) -> Path:
    if shape.n_embd % shape.n_head or shape.n_head % shape.n_head_kv:
        raise ValueError(
            f"tiny_gguf.write: n_embd {shape.n_embd}, n_head {shape.n_head}, "
            f"n_head_kv {shape.n_head_kv}; each must divide the one before it"
        )
    if shape.weight_type == "Q8_0" and (shape.n_embd % 32 or shape.n_ff % 32):
        raise ValueError(
            f"tiny_gguf.write: n_embd {shape.n_embd}, n_ff {shape.n_ff}; Q8_0 needs multiples of 32"
        )
    head_size = shape.n_embd // shape.n_head
    writer = gguf.GGUFWriter(None, shape.arch)
    writer.add_name(shape.name or f"random {shape.arch} {shape.n_layer}x{shape.n_head}")
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(head_size)
    if not shape.causal:
        writer.add_causal_attention(False)
    writer.add_file_type(
        {"F32": gguf.LlamaFileType.ALL_F32, "F16": gguf.LlamaFileType.MOSTLY_F16,
         "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}[shape.weight_type]
    )  # fmt: skip
    n_vocab = _add_vocab(writer, shape, llama_cpp_dir)
    writer.add_vocab_size(n_vocab)
    for name, data in _tensors(shape, n_vocab):
        _add_tensor(writer, name, data + (added or {}).get(name, 0), shape.weight_type)
    return finish(writer, path)


def _tensors(shape: Shape, n_vocab: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, float32 array), slowest dimension first as numpy has it."""
    n_embd, head_size = shape.n_embd, shape.n_embd // shape.n_head
    n_kv = head_size * shape.n_head_kv
    tied = shape.vocab not in ("bytes", "none") if shape.tied is None else shape.tied
    bias = shape.arch == "qwen2" if shape.qkv_bias is None else shape.qkv_bias
    rand = tensor_source(shape.seed)

    # Layer outputs (about 1 each) outweigh it, else tied models only repeat the last token.
    yield "token_embd.weight", rand("token_embd.weight", (n_vocab, n_embd), 0.5)
    yield "output_norm.weight", 1 + rand("output_norm.weight", (n_embd,), 0.1)
    if not tied:
        yield "output.weight", rand("output.weight", (n_vocab, n_embd), 3.0 / n_embd**0.5)
    for il in range(shape.n_layer):
        b = f"blk.{il}."

        def matrix(
            name: str, n_out: int, n_in: int, std: float = 1.0, b: str = b
        ) -> tuple[str, np.ndarray]:
            return b + name, rand(b + name, (n_out, n_in), std / n_in**0.5)

        yield b + "attn_norm.weight", 1 + rand(b + "attn_norm.weight", (n_embd,), 0.1)
        # q.k / sqrt(head_size) has the standard deviation std_q * std_k.
        qk = shape.score_spread**0.5
        sharpness = np.exp(rand(b + "sharpness", (shape.n_head,), 0.3))
        name, wq = matrix("attn_q.weight", n_embd, n_embd, qk)
        yield name, wq * np.repeat(sharpness, head_size)[:, None]
        yield matrix("attn_k.weight", n_kv, n_embd, qk)
        yield matrix("attn_v.weight", n_kv, n_embd)
        if bias:
            yield b + "attn_q.bias", rand(b + "attn_q.bias", (n_embd,), 0.5)
            yield b + "attn_k.bias", rand(b + "attn_k.bias", (n_kv,), 0.5)
            yield b + "attn_v.bias", rand(b + "attn_v.bias", (n_kv,), 0.2)
        yield matrix("attn_output.weight", n_embd, n_embd)
        yield b + "ffn_norm.weight", 1 + rand(b + "ffn_norm.weight", (n_embd,), 0.1)
        yield matrix("ffn_gate.weight", shape.n_ff, n_embd)
        yield matrix("ffn_up.weight", shape.n_ff, n_embd)
        yield matrix("ffn_down.weight", n_embd, shape.n_ff, 2.0)


def tensor_source(seed: int) -> Callable[[str, tuple[int, ...], float], np.ndarray]:
    def rand(name: str, shape: tuple[int, ...], std: float) -> np.ndarray:
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

    return rand


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, data: np.ndarray, weight_type: WeightType
) -> None:
    # llama.cpp keeps vectors (norms, biases) in F32 whatever the file's type.
    if data.ndim == 1 or weight_type == "F32":
        writer.add_tensor(name, np.ascontiguousarray(data, dtype=np.float32))
    elif weight_type == "F16":
        writer.add_tensor(name, data.astype(np.float16))
    else:
        q8_0 = GGMLQuantizationType.Q8_0
        writer.add_tensor(name, quants.quantize(data, q8_0), raw_dtype=q8_0)


def _add_vocab(writer: gguf.GGUFWriter, shape: Shape, llama_cpp_dir: Path | None) -> int:
    """Add the tokenizer's keys; return the number of ids."""
    if shape.vocab == "none":
        writer.add_tokenizer_model("none")
        return shape.n_vocab or 256
    if shape.vocab == "bytes":
        n_vocab = shape.n_vocab or 320
        add_bytes_vocab(writer, n_vocab, shape.chat_template, shape.specials)
        return n_vocab
    if llama_cpp_dir is None:
        raise ValueError(
            f"tiny_gguf.vocab: {shape.vocab!r} copies a vocabulary file; pass llama_cpp_dir"
        )
    keys = _read_vocab(Path(llama_cpp_dir) / "models" / f"ggml-vocab-{shape.vocab}.gguf")
    n_file = len(next(value for key, value, *_ in keys if key == "tokenizer.ggml.tokens"))
    n_vocab = shape.n_vocab or n_file
    if n_vocab != n_file:
        raise ValueError(
            f"tiny_gguf.vocab: n_vocab {n_vocab}, {shape.vocab} has {n_file}; leave n_vocab out"
        )
    for key, value, value_type, sub_type in keys:
        if key != "tokenizer.chat_template" or shape.chat_template is None:
            writer.add_key_value(key, value, value_type, sub_type)
    if shape.chat_template is not None:
        writer.add_chat_template(shape.chat_template)
    return n_vocab


@lru_cache(maxsize=2)
def _read_vocab(path: Path) -> list[tuple[str, Any, GGUFValueType, GGUFValueType | None]]:
    if not path.is_file():
        raise ValueError(
            f"tiny_gguf.vocab: no file {path.name} in {path.parent}; pass llama.cpp's source folder"
        )
    found: list[tuple[str, Any, GGUFValueType, GGUFValueType | None]] = []
    for key, entry in Reader(path).fields.items():
        if key.startswith("tokenizer."):
            sub_type = entry.types[-1] if entry.types[0] == GGUFValueType.ARRAY else None
            found.append((key, entry.contents(), entry.types[0], sub_type))
    return found


def add_bytes_vocab(
    writer: gguf.GGUFWriter,
    n_vocab: int,
    chat_template: str | None,
    specials: tuple[str, ...] = (),
) -> None:
    """Id = byte value for 0..255, then specials, then fillers " w<id>" that only sampling makes."""
    n_min = 256 + len(_SPECIALS) + 1 + len(specials)
    if n_vocab < n_min:
        raise ValueError(
            f"tiny_gguf.vocab: n_vocab {n_vocab}, 'bytes' has at least {n_min}; raise n_vocab"
        )
    # llama.cpp refuses a gpt2 tokenizer without merges: one, of bytes that UTF-8 never has.
    letters = _byte_letters()
    merged = letters[0xFE] + letters[0xFF]
    fillers = [f"{letters[0x20]}w{i}" for i in range(n_min, n_vocab)]
    types = [TokenType.NORMAL] * 256 + [TokenType.CONTROL] * len(_SPECIALS)
    types += [TokenType.NORMAL, *[TokenType.CONTROL] * len(specials)]
    types += [TokenType.NORMAL] * (n_vocab - len(types))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*letters, *_SPECIALS, merged, *specials, *fillers])
    writer.add_token_types(types)
    writer.add_token_merges([f"{letters[0xFE]} {letters[0xFF]}"])
    writer.add_bos_token_id(END_OF_TEXT)
    writer.add_eos_token_id(IM_END)
    writer.add_pad_token_id(END_OF_TEXT)
    writer.add_add_bos_token(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def _byte_letters() -> list[str]:
    """The printable letter that GPT-2's tokenizer writes for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(hidden)) for b in range(256)]


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- Gemma 3n and Gemma 4: layers that read an earlier layer's KV cache

N_VOCAB = 320
GEMMA_WINDOW = 16


class Weights:
    """Adds tensors by shape, slowest dimension first: matrices are (n_out, n_in)."""

    def __init__(self, writer: gguf.GGUFWriter) -> None:
        self._writer = writer
        self._rand = tensor_source(0)

    def norm(self, name: str, n: int, size: float = 1.0) -> None:
        data = size * (1 + self._rand(name, (n,), 0.1))
        self._writer.add_tensor(name, np.ascontiguousarray(data, dtype=np.float32))

    def matrix(self, name: str, *shape: int) -> None:
        self._writer.add_tensor(name, self._rand(name, shape, shape[-1] ** -0.5))


def write_predicting(
    path: Path, *, n_layer: int = 2, n_predicting: int = 1, noise: float = 0.0,
    weight_type: WeightType = "F32", n_embd: int = N_VOCAB, n_ff: int = 128, arch: str = "hy_v3",
) -> Path:  # fmt: skip
    """HY V3, or Step 3.5, with layers that predict from the state of the token before the last.

    A token is followed by ``successor_of(token)``: embeddings are one-hot, the output matrix
    permutes them. Such a layer applies the permutation to the state, so its guess is right if, and
    only if, it gets the state of the token before the last one. Of several, each turns the state
    by some values, and reads it as the one before has turned it. *noise* is how much the model's
    own layers add, which makes other tokens follow.
    """
    head_size = 64
    n_head = n_embd // head_size
    writer = gguf.GGUFWriter(None, arch)
    writer.add_context_length(8192)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer + n_predicting)
    writer.add_uint32(f"{arch}.nextn_predict_layers", n_predicting)
    if arch == "step35":
        writer.add_sliding_window(32)
        writer.add_sliding_window_pattern([i % 2 == 1 for i in range(n_layer + n_predicting)])
    writer.add_feed_forward_length(n_ff)
    writer.add_expert_feed_forward_length(0)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    add_bytes_vocab(writer, N_VOCAB, CHATML)
    rand = tensor_source(0)

    def add(name: str, data: np.ndarray) -> None:
        _add_tensor(writer, name, data.astype(np.float32), weight_type)

    def matrix(name: str, n_out: int, n_in: int, size: float = 1.0) -> None:
        add(name, rand(name, (n_out, n_in), size * n_in**-0.5))

    follows = np.zeros((N_VOCAB, n_embd))
    follows[[successor_of(one) for one in range(N_VOCAB)], np.arange(N_VOCAB)] = 1
    add("token_embd.weight", np.eye(N_VOCAB, n_embd))
    add("output.weight", follows)
    add("output_norm.weight", np.ones(n_embd))
    for il in range(n_layer + n_predicting):
        b, adds = f"blk.{il}.", noise if il < n_layer else 0.0
        for name in ("attn_norm", "ffn_norm"):
            add(b + name + ".weight", np.ones(n_embd))
        for name in ("attn_q", "attn_k", "attn_v"):
            matrix(b + name + ".weight", n_embd, n_embd)
        for name in ("attn_q_norm", "attn_k_norm"):
            add(b + name + ".weight", np.ones(head_size))
        matrix(b + "attn_output.weight", n_embd, n_embd, adds)
        matrix(b + "ffn_gate.weight", n_ff, n_embd)
        matrix(b + "ffn_up.weight", n_ff, n_embd)
        matrix(b + "ffn_down.weight", n_embd, n_ff, adds)
        if il < n_layer:
            continue
        turns = [7 * i if n_predicting > 1 else 0 for i in (il - n_layer, il - n_layer + 1)]
        of_state = np.zeros((n_embd, n_embd))
        of_state[:N_VOCAB, :N_VOCAB] = np.roll(follows[:, :N_VOCAB], turns[::-1], (0, 1))
        add(b + "nextn.eh_proj.weight", np.hstack([np.zeros((n_embd, n_embd)), of_state]))
        if n_predicting > 1:
            head = np.zeros((N_VOCAB, n_embd))
            head[:, :N_VOCAB] = np.roll(follows[:, :N_VOCAB], turns[1], 1)
            add(b + "nextn.shared_head_head.weight", head)
        for name in ("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"):
            add(b + name + ".weight", np.ones(n_embd))
    return finish(writer, path)


def write_with_predictor(
    path: Path, model: Path, *, n_predicting: int = 1, for_images: bool = True
) -> Path:
    """Write one of llama.cpp's tiny models with layers that predict, random but for their kind.

    They attend as the last layer that does, and have the experts of the last layer with experts.
    MiMo's have Q, K and V in one matrix. Without *for_images*, positions have one axis.
    """
    reader, writer = _copied(model)
    arch = reader.fields["general.architecture"].contents()
    n_layer = reader.fields[f"{arch}.block_count"].contents()
    n_embd = reader.fields[f"{arch}.embedding_length"].contents()
    data = {one.name: quants.dequantize(one.data, one.tensor_type) for one in reader.tensors}
    recurrent = {name.split(".")[1] for name in data if ".ssm_" in name}
    attending = max(
        int(name.split(".")[1]) for name in data
        if ".attn_output." in name and name.split(".")[1] not in recurrent
    )  # fmt: skip
    with_experts = [int(name.split(".")[1]) for name in data if ".ffn_gate_inp." in name]
    keys = writer.kv_data[0]
    for key, one in keys.items():
        if key.startswith(arch) and isinstance(one.value, list) and len(one.value) == n_layer:
            one.value = [*one.value, *[one.value[attending]] * n_predicting]
    keys[f"{arch}.block_count"].value = n_layer + n_predicting
    keys[f"{arch}.nextn_predict_layers"].value = n_predicting
    if not for_images:
        del keys[f"{arch}.rope.dimension_sections"]
    own = {}
    for il, is_ffn in ((attending, False), (max(with_experts, default=attending), True)):
        own |= {
            name.removeprefix(f"blk.{il}."): one for name, one in data.items()
            if name.startswith(f"blk.{il}.") and not name.endswith("scale")
            and not (".bias" in name and ".attn_" in name)
            and is_ffn == any(kind in name for kind in (".ffn_", ".exp_probs"))
        }  # fmt: skip
    if arch == "mimo2":
        joined = [own.pop(f"attn_{one}.weight") for one in "qkv"]
        own["attn_qkv.weight"] = np.concatenate(joined)
    rand = tensor_source(5)
    last = "layer_output_norm" if arch == "bailingmoe3" else "nextn.shared_head_norm"
    for il in range(n_layer, n_layer + n_predicting):
        b = f"blk.{il}."
        data |= {b + name: one for name, one in own.items()}
        name = b + "nextn.eh_proj.weight"
        data[name] = rand(name, (n_embd, 2 * n_embd), (2 * n_embd) ** -0.5)
        for name in (b + "nextn.enorm", b + "nextn.hnorm", b + last):
            data[name + ".weight"] = 1 + rand(name, (n_embd,), 0.1)
    for name, one in data.items():
        _add_tensor(writer, name, one, "F32")
    return finish(writer, path)


def successor_of(token: int) -> int:
    """Of a byte, the one that follows it in `write_predicting`'s model; the others repeat."""
    return (token * 5 + 17) % 256 if token < 256 else token


def _gemma_writer(
    arch: str, n_embd: int, n_ff: int, n_layer: int, window: int = GEMMA_WINDOW
) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(None, arch)
    writer.add_context_length(2048)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(window)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(N_VOCAB)
    add_bytes_vocab(writer, N_VOCAB, None)
    return writer


def _gemma_weights(writer: gguf.GGUFWriter, n_embd: int, n_head: int, head_size: int) -> Weights:
    """Heads on one KV head, and the weights that all layers share."""
    writer.add_head_count(n_head)
    writer.add_head_count_kv(1)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    add = Weights(writer)
    add.matrix("token_embd.weight", N_VOCAB, n_embd)
    add.norm("output_norm.weight", n_embd)
    return add


def write_gemma3(path: Path, *, n_layer: int = 26, window: int = 512, head_size: int = 256) -> Path:
    """The cache of Gemma 3 1B, with narrow weights: every sixth layer sees all tokens."""
    n_head, n_embd, n_ff = 4, 64, 96
    writer = _gemma_writer("gemma3", n_embd, n_ff, n_layer, window)
    add = _gemma_weights(writer, n_embd, n_head, head_size)
    for il in range(n_layer):
        _add_attention(add, f"blk.{il}.", n_embd, n_head, 1, head_size)
        _add_feed_forward(add, f"blk.{il}.", n_embd, n_ff)
    return finish(writer, path)


def write_gemma3n(path: Path) -> Path:
    """22 layers (llama.cpp fixes that the cache of 20 is shared by the rest), 2 heads on 1 KV head.

    Every fifth layer sees all tokens, the others a window of 16.
    """
    n_layer, n_head, n_embd, n_ff = 22, 2, 64, 96
    n_altup, n_embd_altup, laurel_rank = 4, 256, 64  # fixed in llama.cpp
    head_size = n_embd // n_head
    writer = _gemma_writer("gemma3n", n_embd, n_ff, n_layer)
    add = _gemma_weights(writer, n_embd, n_head, head_size)
    add.matrix("altup_proj.weight", n_altup - 1, n_embd, n_embd)
    add.matrix("altup_unembd_proj.weight", n_altup - 1, n_embd, n_embd)
    add.matrix("per_layer_token_embd.weight", N_VOCAB, n_embd_altup * n_layer)
    add.matrix("per_layer_model_proj.weight", n_embd_altup * n_layer, n_embd)
    add.norm("per_layer_proj_norm.weight", n_embd_altup)
    for il in range(n_layer):
        b = f"blk.{il}."
        _add_attention(add, b, n_embd, n_head, 1, head_size)
        _add_feed_forward(add, b, n_embd, n_ff)
        add.matrix(b + "inp_gate.weight", n_embd_altup, n_embd)
        add.matrix(b + "proj.weight", n_embd, n_embd_altup)
        add.norm(b + "post_norm.weight", n_embd)
        add.matrix(b + "altup_correct_coef.weight", n_altup, n_altup)
        add.norm(b + "altup_correct_scale.weight", n_embd)
        add.matrix(b + "altup_predict_coef.weight", n_altup * n_altup, n_altup)
        add.matrix(b + "altup_router.weight", n_altup, n_embd)
        add.norm(b + "altup_router_norm.weight", n_embd)
        add.matrix(b + "laurel_l.weight", laurel_rank, n_embd)
        add.matrix(b + "laurel_r.weight", n_embd, laurel_rank)
        add.norm(b + "laurel_post_norm.weight", n_embd)
    return finish(writer, path)


def write_gemma4(path: Path) -> Path:
    """6 layers, the last 2 without a cache of their own.

    Layers 1, 3 and 5 see all tokens with 2 heads of size 64, the others a window of 16 with 4
    heads of size 32. Layers 4 and 5 read the caches of the last layers of their kind.
    """
    n_layer, n_embd, n_ff, n_shared = 6, 64, 96, 2
    is_window = [il % 2 == 0 for il in range(n_layer)]
    n_heads = [4 if window else 2 for window in is_window]
    writer = _gemma_writer("gemma4", n_embd, n_ff, n_layer)
    writer.add_head_count(n_heads)
    writer.add_head_count_kv([1] * n_layer)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_uint32("gemma4.attention.key_length_swa", 32)
    writer.add_uint32("gemma4.attention.value_length_swa", 32)
    writer.add_uint32("gemma4.rope.dimension_count", 64)
    writer.add_uint32("gemma4.rope.dimension_count_swa", 32)
    writer.add_float32("gemma4.rope.freq_base_swa", 10000.0)
    writer.add_uint32("gemma4.attention.shared_kv_layers", n_shared)
    writer.add_array("gemma4.attention.sliding_window_pattern", is_window)
    writer.add_uint32("gemma4.embedding_length_per_layer_input", 0)
    add = Weights(writer)
    add.matrix("token_embd.weight", N_VOCAB, n_embd)
    add.norm("output_norm.weight", n_embd)
    add.norm("rope_freqs.weight", 32)
    for il in range(n_layer):
        b = f"blk.{il}."
        head_size = 32 if is_window[il] else 64
        _add_attention(add, b, n_embd, n_heads[il], 1, head_size, has_kv=il < n_layer - n_shared)
        _add_feed_forward(add, b, n_embd, n_ff)
    return finish(writer, path)


def _add_attention(
    add: Weights, b: str, n_embd: int, n_head: int, n_head_kv: int, head_size: int,
    *, has_kv: bool = True,
) -> None:  # fmt: skip
    add.norm(b + "attn_norm.weight", n_embd)
    add.matrix(b + "attn_q.weight", n_head * head_size, n_embd)
    add.norm(b + "attn_q_norm.weight", head_size, 0.5)
    if has_kv:
        add.matrix(b + "attn_k.weight", n_head_kv * head_size, n_embd)
        add.matrix(b + "attn_v.weight", n_head_kv * head_size, n_embd)
        add.norm(b + "attn_k_norm.weight", head_size, 0.5)
    add.matrix(b + "attn_output.weight", n_embd, n_head * head_size)
    # Small: what llama.cpp rounds in sums of V hardly moves the layers above.
    add.norm(b + "post_attention_norm.weight", n_embd, 0.02)


def _add_feed_forward(add: Weights, b: str, n_embd: int, n_ff: int) -> None:
    add.norm(b + "ffn_norm.weight", n_embd)
    add.matrix(b + "ffn_gate.weight", n_ff, n_embd)
    add.matrix(b + "ffn_up.weight", n_ff, n_embd)
    add.matrix(b + "ffn_down.weight", n_embd, n_ff)
    add.norm(b + "post_ffw_norm.weight", n_embd)


# ---- encoders: BERT, and T5, which has a decoder as well

BERT_SEP = 262
ENCODER_LAYERS, ENCODER_HEADS, ENCODER_EMBD, ENCODER_FF = 3, 4, 64, 96


def _encoder_writer(arch: str, n_positions: int = 512) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(None, arch)
    writer.add_context_length(n_positions)
    writer.add_embedding_length(ENCODER_EMBD)
    writer.add_block_count(ENCODER_LAYERS)
    writer.add_feed_forward_length(ENCODER_FF)
    writer.add_head_count(ENCODER_HEADS)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    return writer


def _add_word_vocab(writer: gguf.GGUFWriter, words: Sequence[str]) -> int:
    """BERT's WordPiece: *words*, letters and what may follow one; its size."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    letters = [chr(c) for c in range(0x21, 0x7F)]
    whole = dict.fromkeys([*letters, *words])
    tokens = [*specials, *(f"\u2581{one}" for one in whole), *letters]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 4 + [TokenType.NORMAL] * (len(tokens) - 4))
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    return len(tokens)


def write_bert(
    path: Path,
    *,
    pooling: gguf.PoolingType | None = None,
    n_classes: int = 0,
    labels: Sequence[str] = (),
    n_positions: int = 512,
    adds: Sequence[str] = (),
    rerank_template: str | None = None,
    words: Sequence[str] = (),
) -> Path:
    """3 layers of 4 heads; learned positions, attention to both sides.

    Args:
        path: File to write.
        pooling: What the file says of it; None says nothing.
        n_classes: Values of a classifier head; 0 leaves it out.
        labels: Names of the classes; llama.cpp takes one class where there are none.
        n_positions: Positions that have a vector.
        adds: Which of "bos", "eos" and "sep" the vocabulary puts around a text.
        rerank_template: The file's text for a query and a document.
        words: Tokens of a vocabulary like BERT's own; without any, tokens are bytes.
    """
    writer = _encoder_writer("bert", n_positions)
    if words:
        n_vocab = _add_word_vocab(writer, words)
    else:
        n_vocab = N_VOCAB
        add_bytes_vocab(writer, n_vocab, None)
        writer.add_sep_token_id(BERT_SEP)
    writer.add_vocab_size(n_vocab)
    writer.add_token_type_count(1)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    if labels:
        writer.add_classifier_output_labels(labels)
    for name in adds:
        writer.add_bool(f"tokenizer.ggml.add_{name}_token", True)
    if rerank_template is not None:
        writer.add_string("tokenizer.chat_template.rerank", rerank_template)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    add = Weights(writer)
    add.matrix("token_embd.weight", n_vocab, ENCODER_EMBD)
    add.matrix("position_embd.weight", n_positions, ENCODER_EMBD)
    if n_classes:
        add.matrix("cls.weight", ENCODER_EMBD, ENCODER_EMBD)
        add.norm("cls.bias", ENCODER_EMBD, 0.1)
        add.matrix("cls.output.weight", n_classes, ENCODER_EMBD)
        add.norm("cls.output.bias", n_classes, 0.1)
    add.norm("token_embd_norm.weight", ENCODER_EMBD)
    add.norm("token_embd_norm.bias", ENCODER_EMBD, 0.1)
    for il in range(ENCODER_LAYERS):
        b = f"blk.{il}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add.matrix(f"{b}{name}.weight", ENCODER_EMBD, ENCODER_EMBD)
            add.norm(f"{b}{name}.bias", ENCODER_EMBD, 0.1)
        for name in ("attn_output_norm", "layer_output_norm"):
            add.norm(f"{b}{name}.weight", ENCODER_EMBD)
            add.norm(f"{b}{name}.bias", ENCODER_EMBD, 0.1)
        add.matrix(b + "ffn_up.weight", ENCODER_FF, ENCODER_EMBD)
        add.matrix(b + "ffn_down.weight", ENCODER_EMBD, ENCODER_FF)
    return finish(writer, path)


def write_t5(path: Path) -> Path:
    """3 encoder and 3 decoder layers of 4 heads; relative positions are a bias of the scores."""
    writer = _encoder_writer("t5")
    writer.add_vocab_size(N_VOCAB)
    add_bytes_vocab(writer, N_VOCAB, None)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_key_length(ENCODER_EMBD // ENCODER_HEADS)
    writer.add_value_length(ENCODER_EMBD // ENCODER_HEADS)
    writer.add_relative_attn_buckets_count(8)
    writer.add_decoder_start_token_id(0)
    add = Weights(writer)
    add.matrix("token_embd.weight", N_VOCAB, ENCODER_EMBD)
    add.matrix("output.weight", N_VOCAB, ENCODER_EMBD)
    for part, blocks in (("enc", ("attn",)), ("dec", ("attn", "cross_attn"))):
        add.norm(f"{part}.output_norm.weight", ENCODER_EMBD)
        for il in range(ENCODER_LAYERS):
            b = f"{part}.blk.{il}."
            for block in blocks:
                add.norm(f"{b}{block}_norm.weight", ENCODER_EMBD)
                for name in ("q", "k", "v", "o"):
                    add.matrix(f"{b}{block}_{name}.weight", ENCODER_EMBD, ENCODER_EMBD)
            if il == 0:
                add.matrix(b + "attn_rel_b.weight", 8, ENCODER_HEADS)
            add.norm(b + "ffn_norm.weight", ENCODER_EMBD)
            add.matrix(b + "ffn_gate.weight", ENCODER_FF, ENCODER_EMBD)
            add.matrix(b + "ffn_up.weight", ENCODER_FF, ENCODER_EMBD)
            add.matrix(b + "ffn_down.weight", ENCODER_EMBD, ENCODER_FF)
    return finish(writer, path)
