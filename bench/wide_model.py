"""A random model with the shape of a 7B model, written in seconds: Q8_0 blocks cut from one pool.

28 layers, 28 heads on 4 KV heads, head size 128, width 3584, 18944 in the feed-forward part, 152064
ids: Qwen2.5-7B's. Speed does not depend on weights, so their bytes repeat where a tensor is longer
than the pool; each tensor begins elsewhere in it, so no two layers are equal. Standard deviations
are those of tests/support/tiny_gguf.py, which keep attention away from uniform and from one-hot.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from tests.support.tiny_gguf import add_bytes_vocab

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

_POOL_BYTES = 64 * 2**20
_BLOCK = np.dtype([("scale", "<f2"), ("values", "i1", 32)])  # Q8_0: weight = scale * value
_STD_OF_VALUES = (255**2 - 1) ** 0.5 / 12**0.5  # of uniform integers -127..127


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2 model; the width is ``n_head * head_size``."""

    n_layer: int
    n_head: int
    n_head_kv: int
    head_size: int
    n_ff: int
    n_vocab: int

    @property
    def n_embd(self) -> int:
        return self.n_head * self.head_size


WIDE = Shape(n_layer=28, n_head=28, n_head_kv=4, head_size=128, n_ff=18944, n_vocab=152064)
QUICK = Shape(n_layer=2, n_head=7, n_head_kv=1, head_size=128, n_ff=1792, n_vocab=2048)


def write(path: Path, shape: Shape) -> None:
    """Write the model; the largest tensor is in memory, never all of them."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name(f"random qwen2 {shape.n_layer}x{shape.n_head}, width {shape.n_embd}")
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_vocab_size(shape.n_vocab)
    add_bytes_vocab(writer, shape.n_vocab, None)
    tensors = list(_tensors(shape))
    q8_0 = GGMLQuantizationType.Q8_0
    for name, size, _ in tensors:
        if len(size) == 1:
            writer.add_tensor_info(name, size, np.dtype(np.float32), 4 * size[0])
        else:
            row_bytes = size[1] // 32 * _BLOCK.itemsize
            in_bytes = (size[0], row_bytes)
            writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), size[0] * row_bytes, q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pool = np.random.default_rng(0).integers(-127, 128, _POOL_BYTES, dtype=np.int8)
    pool = pool.reshape(-1, 32)
    for name, size, std in tensors:
        writer.write_tensor_data(_vector(name, size[0], std) if len(size) == 1 else
                                 _matrix(pool, name, size, std))  # fmt: skip
    writer.close()


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield (name, size, standard deviation), slowest dimension first; norms are about 1."""
    width, n_kv = shape.n_embd, shape.head_size * shape.n_head_kv
    yield "token_embd.weight", (shape.n_vocab, width), 0.5
    yield "output_norm.weight", (width,), 0.1
    yield "output.weight", (shape.n_vocab, width), 3 / width**0.5
    for il in range(shape.n_layer):
        b = f"blk.{il}."
        yield b + "attn_norm.weight", (width,), 0.1
        yield b + "attn_q.weight", (width, width), (2 / width) ** 0.5
        yield b + "attn_k.weight", (n_kv, width), (2 / width) ** 0.5
        yield b + "attn_v.weight", (n_kv, width), width**-0.5
        yield b + "attn_q.bias", (width,), 0.5
        yield b + "attn_k.bias", (n_kv,), 0.5
        yield b + "attn_v.bias", (n_kv,), 0.2
        yield b + "attn_output.weight", (width, width), width**-0.5
        yield b + "ffn_norm.weight", (width,), 0.1
        yield b + "ffn_gate.weight", (shape.n_ff, width), width**-0.5
        yield b + "ffn_up.weight", (shape.n_ff, width), width**-0.5
        yield b + "ffn_down.weight", (width, shape.n_ff), 2 / shape.n_ff**0.5


def _vector(name: str, size: int, std: float) -> NDArray[np.float32]:
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(size, np.float32)
    return values * np.float32(std) + np.float32(name.endswith("norm.weight"))


def _matrix(
    pool: NDArray[np.int8], name: str, size: tuple[int, ...], std: float
) -> NDArray[np.uint8]:
    n_blocks = size[0] * size[1] // 32
    blocks = np.empty(n_blocks, _BLOCK)
    blocks["scale"] = std / _STD_OF_VALUES
    begin = zlib.crc32(name.encode()) % len(pool)
    done = 0
    while done < n_blocks:
        part = pool[begin : begin + n_blocks - done]
        blocks["values"][done : done + len(part)] = part
        done, begin = done + len(part), 0
    return blocks.view(np.uint8).reshape(size[0], -1)
