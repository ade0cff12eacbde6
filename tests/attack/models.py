"""Hostile model and LoRA files: sound ones changed at random, opened and run for two tokens.

What may come of one is a model that works, or a typed error that says why not. A process that ends,
one that does not come back, and an error of any other type are wrong. Files are opened by worker
processes, many each; a file that ends one is named, and a new worker goes on.

    python -m tests.attack.models --minutes 10 [--seed N] [--models FOLDER]

``--models`` takes a folder of more sound files to change, such as llama.cpp's own tiny models
(tests/support/archs.py). A case repeats by its number: ``--case SOURCE:NUMBER``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.attack import gguf_file
from tests.attack.gguf_file import ARRAY, BLOCKS, BOOL, F32, I32, STRING, U32, Gguf, Tensor, Value
from tests.attack.summary import Summary
from tests.support import tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "src" / "kqview" / "demo" / "model.gguf"
CASE_LIMIT_S = 60
MEMORY_LIMIT = 6 << 30
UNCHANGED = -1
MOST_BYTES = 1 << 20  # of an array, a string or a tensor that a change makes
TEXTS = ("Hello, world!", "a b\n\tc  \u00e9\U0001f600<|im_start|>x", "\u0001\u2581 1234 <s>")

NUMBERS = (
    0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 255, 256, 257, 511,
    512, 513, 1000, 1024, 4096, 65535, 65536, 1 << 20, 2**31 - 1, 2**31, 2**32 - 1, 2**63,
    2**64 - 1, -1, -2,
)  # fmt: skip
FLOATS = (
    0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 1e30, 3e38, float("inf"), -float("inf"), float("nan"),
    -1e-6,
)  # fmt: skip
STRINGS = (
    "", "a", "\0", "x" * 1000, "\udcff\udcfe", "{{ messages }}", "llama", "gpt2", "bert", "t5",
    "rwkv", "plamo2", "none", "linear", "yarn", "longrope", "qwen2", "mamba", "default", "gpt-4o",
    "phi-3", "%s%n%d", "gemma4", "hybriddna", "whitespace", "<0x0A>", "\u2581", "adapter", "lora",
)  # fmt: skip
# Of "<architecture>.<name>": what some model of llama.cpp reads, added to files that lack it.
INTEGER_NAMES = (
    "vocab_size", "embedding_length_out", "leading_dense_block_count", "expert_count",
    "expert_used_count", "expert_shared_count", "expert_group_count", "expert_group_used_count",
    "expert_gating_func", "expert_feed_forward_length", "moe_every_n_layers",
    "interleave_moe_layer_step", "nextn_predict_layers", "n_deepstack_layers", "pooling_type",
    "decoder_start_token_id", "full_attention_interval", "num_loops", "attention.key_length",
    "attention.value_length", "attention.key_length_mla", "attention.value_length_mla",
    "attention.q_lora_rank", "attention.kv_lora_rank", "attention.sliding_window",
    "attention.sliding_window_pattern", "attention.key_length_swa", "attention.value_length_swa",
    "attention.shared_kv_layers", "attention.group_norm_groups", "attention.indexer.head_count",
    "attention.indexer.key_length", "attention.indexer.top_k", "attention.head_count_kv",
    "attention.temperature_length", "rope.dimension_count", "rope.dimension_count_swa",
    "rope.scaling.original_context_length", "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size",
    "ssm.time_step_rank", "ssm.group_count", "wkv.head_size", "shortconv.l_cache",
    "token_shift_count", "rescale_every_n_layers", "embedding_length_per_layer_input",
)  # fmt: skip
FLOAT_NAMES = (
    "logit_scale", "attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping",
    "residual_scale", "embedding_scale", "attention.max_alibi_bias", "attention.clamp_kqv",
    "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.scale",
    "attention.group_norm_epsilon", "rope.freq_base", "rope.freq_base_swa", "rope.scaling.factor",
    "rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "expert_weights_scale", "attention.output_scale", "attention.temperature_scale",
)  # fmt: skip
OTHER_KEYS = (
    Value("general.alignment", U32, 64),
    Value("split.count", 2, 1),
    Value("split.count", 2, 3),
    Value("tokenizer.ggml.add_bos_token", BOOL, 1),
    Value("tokenizer.ggml.add_eos_token", BOOL, 1),
    Value("tokenizer.ggml.bos_token_id", U32, 1),
    Value("tokenizer.ggml.suppress_tokens", ARRAY, [-1, 5, 2**31 - 1], I32),
    Value("tokenizer.ggml.precompiled_charsmap", ARRAY, [255] * 40, 0),
    Value("tokenizer.ggml.token_type_count", U32, 2**31),
)

# ---- sound files


@dataclass
class Source:
    """One sound file to change; ``base`` is the model that a LoRA adapter is for."""

    name: str
    path: Path
    base: Path | None = None


def make_sources(folder: Path, more: Sequence[Path] = ()) -> list[Source]:
    """Write small sound files of many kinds into *folder*."""
    llama = tiny_gguf.write_preset(folder / "llama.gguf", "tiny_llama", n_layer=2)
    sources = [
        Source("demo", DEMO),
        Source("llama", llama),
        Source("qwen2", tiny_gguf.write_preset(folder / "qwen2.gguf", "tiny_qwen2", n_layer=2)),
        Source(
            "q8_0",
            tiny_gguf.write_preset(
                folder / "q8_0.gguf", "tiny_llama", n_layer=2, weight_type="Q8_0"
            ),
        ),
        Source("mamba", tiny_gguf.write_mamba(folder / "mamba.gguf")),
        Source("bert", tiny_gguf.write_bert(folder / "bert.gguf", n_positions=64)),
        Source("t5", tiny_gguf.write_t5(folder / "t5.gguf")),
    ]
    for kind in ("spm", "wpm", "ugm", "rwkv", "plamo2"):
        file = gguf_file.read(llama.read_bytes())
        put_vocabulary(file, kind)
        path = folder / f"{kind}.gguf"
        path.write_bytes(gguf_file.write(file))
        sources.append(Source(kind, path))
    lora = tiny_gguf.write_lora(folder / "lora.gguf", "tiny_llama", merged=folder / "merged.gguf")
    whole = tiny_gguf.write_preset(folder / "lora-base.gguf", "tiny_llama")
    sources.append(Source("lora", lora, whole))
    return sources + [Source(path.stem, path) for path in more]


def put_vocabulary(file: Gguf, kind: str) -> None:
    """Give a model of 320 ids a small vocabulary of another kind."""
    file.values = [value for value in file.values if not value.key.startswith("tokenizer.")]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["\u2581", "a", "b", "\u2581a", "ab", "\u2581the", "world", "hello", "\u00e9"]
    control = {"spm": ["<unk>", "<s>", "</s>"], "ugm": ["<pad>", "</s>", "<unk>"],
               "plamo2": ["<unk>", "<s>", "</s>", "<pad>"], "wpm": ["[UNK]", "[CLS]", "[SEP]"],
               "rwkv": ["<s>"]}[kind]  # fmt: skip
    types = [3] * len(control)
    types[0] = 2 if control[0] in ("<unk>", "[UNK]") else 3
    if kind == "rwkv":
        tokens = control + [f"\\x{byte:02x}" for byte in range(256)] + words
        types += [1] * (256 + len(words))
    elif kind == "wpm":
        letters = [chr(code) for code in range(33, 127)]
        tokens = control + letters + [f"\u2581{letter}" for letter in letters] + words[4:]
        types += [1] * (len(tokens) - len(types))
    else:
        tokens = control + byte_tokens + words
        types += [6] * 256 + [1] * len(words)
    tokens += [f"w{i}" for i in range(320 - len(tokens))]
    types += [1] * (320 - len(types))
    model = {"spm": "llama", "wpm": "bert", "ugm": "t5"}.get(kind, kind)
    ids = {"spm": (1, 2, 0), "ugm": (0, 1, 2), "plamo2": (1, 2, 0), "wpm": (1, 2, 0),
           "rwkv": (0, 0, 0)}[kind]  # fmt: skip
    file.values += [
        Value("tokenizer.ggml.model", STRING, model),
        Value("tokenizer.ggml.tokens", ARRAY, tokens, STRING),
        Value("tokenizer.ggml.scores", ARRAY, [-float(i) for i in range(320)], F32),
        Value("tokenizer.ggml.token_type", ARRAY, types, I32),
    ]
    for name, token_id in zip(("bos", "eos", "unknown"), ids, strict=True):
        file.values.append(Value(f"tokenizer.ggml.{name}_token_id", U32, token_id))
    if kind == "wpm":
        file.values.append(Value("tokenizer.ggml.seperator_token_id", U32, 2))
        file.values.append(Value("tokenizer.ggml.cls_token_id", U32, 1))


# ---- changes


def change_file(file: Gguf, rng: random.Random) -> tuple[bytes, str]:
    """Change *file* one to three times; return its bytes and what was done."""
    done = [rng.choice(CHANGES)(file, rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    data = gguf_file.write(file)
    if rng.random() < 0.15:
        data, what = change_bytes(data, rng)
        done.append(what)
    return data, "; ".join(done)


def change_bytes(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Change bytes of the header, or cut the file."""
    changed = bytearray(data)
    end = min(len(data), 20_000)
    if rng.random() < 0.3:
        n = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(end)
        return bytes(changed[:n]), f"cut to {n} bytes"
    at = rng.randrange(end - 8)
    size = rng.choice((1, 1, 4, 8))
    value = (
        rng.choice(NUMBERS) % (1 << 8 * size) if rng.random() < 0.7 else rng.getrandbits(8 * size)
    )
    changed[at : at + size] = value.to_bytes(size, "little")
    return bytes(changed), f"{size} bytes at {at} = {value}"


def _pick(file: Gguf, rng: random.Random) -> Value:
    if not file.values:
        file.values.append(Value("general.name", STRING, ""))
    arch = file.arch() + "."
    tokenizer = [v for v in file.values if v.key.startswith("tokenizer.")]
    own = [v for v in file.values if v.key.startswith(arch)]
    return rng.choice(rng.choice([group for group in (tokenizer, own, own, file.values) if group]))


def _number(kind: int, rng: random.Random, old: Any = 0) -> Any:
    if kind == STRING:
        return rng.choice(STRINGS)
    if kind in (F32, gguf_file.F64):
        return rng.choice(FLOATS)
    if rng.random() < 0.4 and isinstance(old, int):
        return old + rng.choice((-2, -1, 1, 2, 3, old, -old // 2, 10))
    return rng.choice(NUMBERS)


def change_value(file: Gguf, rng: random.Random) -> str:
    value = _pick(file, rng)
    if value.kind == ARRAY:
        return _change_array(value, rng)
    value.value = _number(value.kind, rng, value.value)
    return f"{value.key} = {str(value.value)[:40]!r}"


def _change_array(value: Value, rng: random.Random) -> str:
    items: list[Any] = list(value.value)
    what = rng.choice(("cut", "extend", "item", "item", "item", "items", "double", "type", "swap"))
    if what == "cut" or not items:
        items = items[: rng.randrange(len(items) + 1)] if rng.random() < 0.7 else []
    elif what == "extend":
        items += [_number(value.of, rng) for _ in range(rng.choice((1, 5, 600)))]
    elif what == "item":
        i = rng.randrange(len(items))
        items[i] = _number(value.of, rng, items[i])
        if value.of == STRING and rng.random() < 0.2:
            items[i] = "y" * rng.choice((1, 100, 70_000, MOST_BYTES))
        what = f"item {i} = {str(items[i])[:40]!r}"
    elif what == "items":
        new = _number(value.of, rng)
        items = [new if rng.random() < 0.5 else item for item in items]
        what = f"items = {str(new)[:40]!r}"
    elif what == "double":
        i, j = rng.randrange(len(items)), rng.randrange(len(items))
        items[i] = items[j]
    elif what == "swap":
        rng.shuffle(items)
    else:
        value.of = rng.randrange(14)
        if value.of == STRING:
            items = [str(item) for item in items]
        what = f"element type {value.of}"
    value.value = items
    return f"{value.key}: {what}"


def change_type(file: Gguf, rng: random.Random) -> str:
    value = _pick(file, rng)
    old: Any = value.value
    value.kind = rng.choice((*range(13), 13, 200))
    if value.kind == ARRAY:
        value.of = rng.randrange(14)
        value.value = old if isinstance(old, list) else [old] * 3
        if value.of == STRING:
            value.value = [str(item) for item in value.value]
    elif value.kind == STRING:
        value.value = str(value.value)[:1000]
    elif isinstance(value.value, (list, str)):
        value.value = 1
    return f"{value.key} has type {value.kind}/{value.of}"


def remove_value(file: Gguf, rng: random.Random) -> str:
    value = _pick(file, rng)
    file.values.remove(value)
    return f"no {value.key}"


def double_value(file: Gguf, rng: random.Random) -> str:
    value = _pick(file, rng)
    file.values.insert(rng.randrange(len(file.values)), Value(**vars(value)))
    return f"{value.key} twice"


def add_value(file: Gguf, rng: random.Random) -> str:
    arch = file.arch()
    if rng.random() < 0.15:
        value = Value(**vars(rng.choice(OTHER_KEYS)))
    elif rng.random() < 0.6:
        value = Value(f"{arch}.{rng.choice(INTEGER_NAMES)}", U32, rng.choice(NUMBERS))
    else:
        value = Value(f"{arch}.{rng.choice(FLOAT_NAMES)}", F32, rng.choice(FLOATS))
    if rng.random() < 0.1:
        value = Value(value.key, ARRAY, [value.value] * rng.choice((1, 2, 3, 600)), value.kind)
        value.of = value.of if value.of != ARRAY else U32
        if isinstance(value.value[0], list):
            value.value = [1]
    file.values = [old for old in file.values if old.key != value.key]
    file.values.append(value)
    return f"{value.key} = {str(value.value)[:40]}"


def change_architecture(file: Gguf, rng: random.Random) -> str:
    """Say that it is a model of another kind, whose keys are there as well."""
    old, new = file.arch(), rng.choice(ARCHITECTURES)
    for value in list(file.values):
        if value.key.startswith(old + "."):
            file.values.append(replace(value, key=new + value.key[len(old) :]))
        elif value.key == "general.architecture":
            value.value = new
    return f"architecture {new}"


def _resize(tensor: Tensor) -> None:
    n = tensor.n_bytes()
    if 0 <= n <= MOST_BYTES:
        times = n // max(1, len(tensor.data)) + 1
        tensor.data = (tensor.data * times)[:n].ljust(n, b"\1")


def change_tensor_type(file: Gguf, rng: random.Random) -> str:
    if not file.tensors:
        return "nothing"
    kinds = (*BLOCKS, 4, 5, 31, 36, 43, 1000)
    kind = rng.choice(kinds)
    chosen = [rng.choice(file.tensors)]
    if rng.random() < 0.2:  # all of the same role
        role = chosen[0].name.split(".")[-2:]
        chosen = [tensor for tensor in file.tensors if tensor.name.split(".")[-2:] == role]
    for tensor in chosen:
        tensor.kind = kind
        if rng.random() < 0.9:
            _resize(tensor)
    return f"{chosen[0].name} (of {len(chosen)}) has type {kind}"


def change_shape(file: Gguf, rng: random.Random) -> str:
    if not file.tensors:
        return "nothing"
    tensor = rng.choice(file.tensors)
    what = rng.choice(("one", "swap", "more", "less"))
    if what == "one" and tensor.shape:
        i = rng.randrange(len(tensor.shape))
        tensor.shape[i] = _number(U32, rng, tensor.shape[i])
    elif what == "swap":
        tensor.shape.reverse()
    elif what == "more":
        tensor.shape += [rng.choice(NUMBERS) for _ in range(rng.choice((1, 1, 4)))]
    else:
        tensor.shape = tensor.shape[1:]
    if rng.random() < 0.9:
        _resize(tensor)
    return f"{tensor.name} has shape {tensor.shape}"


def remove_tensor(file: Gguf, rng: random.Random) -> str:
    if not file.tensors:
        return "nothing"
    tensor = rng.choice(file.tensors)
    file.tensors.remove(tensor)
    return f"no tensor {tensor.name}"


def double_tensor(file: Gguf, rng: random.Random) -> str:
    if not file.tensors:
        return "nothing"
    tensor = rng.choice(file.tensors)
    name = tensor.name
    if rng.random() < 0.7:
        others = ["x" * 63, "x" * 64, "", "rope_freqs.weight", "output.weight", name + ".scale"]
        others += [name.replace(".weight", ".bias"), *(other.name for other in file.tensors)]
        name = rng.choice(others)
    file.tensors.append(Tensor(name, list(tensor.shape), tensor.kind, tensor.data))
    return f"{tensor.name} again as {name!r}"


def rename_tensor(file: Gguf, rng: random.Random) -> str:
    if not file.tensors:
        return "nothing"
    tensor = rng.choice(file.tensors)
    old, tensor.name = tensor.name, rng.choice([t.name for t in file.tensors]) + rng.choice("ab")
    return f"{old} is {tensor.name}"


def change_data(file: Gguf, rng: random.Random) -> str:
    if not file.tensors:
        return "nothing"
    tensor = rng.choice(file.tensors)
    pattern = rng.choice(
        (
            b"\xff",
            b"\0",
            struct.pack("<f", float("inf")),
            struct.pack("<f", 3e38),
            rng.randbytes(64),
        )
    )
    tensor.data = (pattern * (len(tensor.data) // len(pattern) + 1))[: len(tensor.data)]
    return f"data of {tensor.name} is {pattern[:4].hex()}"


def change_layout(file: Gguf, rng: random.Random) -> str:
    what = rng.choice(("version", "n_values", "n_tensors", "alignment", "shift"))
    if what == "shift":
        if not file.tensors:
            return "nothing"
        i, by = rng.randrange(len(file.tensors)), rng.choice((1, 32, -32, 64, 2**32, 2**63, -1))
        file.shifts[i] = by
        return f"offset of {file.tensors[i].name} {by:+d}"
    if what == "alignment":
        number = rng.choice((0, 1, 2, 4, 8, 16, 31, 33, 64, 128, 4096, 2**31, 2**32 - 1))
        file.values = [value for value in file.values if value.key != "general.alignment"]
        file.values.append(Value("general.alignment", rng.choice((U32, U32, U32, I32)), number))
        if number and number <= 4096:
            file.alignment = number
        return f"alignment {number}"
    if what == "version":
        file.version = rng.choice((0, 1, 2, 3, 4, 0x03000000, 2**32 - 1))
        return f"version {file.version}"
    number = rng.choice(NUMBERS)
    setattr(file, what, number)
    return f"{what} {number}"


CHANGES: tuple[Callable[[Gguf, random.Random], str], ...] = (
    *(change_value,) * 8, *(add_value,) * 4, *(change_type,) * 2, *(remove_value,) * 2,
    *(change_tensor_type,) * 3, *(change_shape,) * 2, remove_tensor, double_tensor, rename_tensor,
    change_data, change_layout, double_value, change_architecture,
)  # fmt: skip
ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "gemma3", "phi3", "mamba", "rwkv6", "rwkv7", "bert", "t5", "falcon",
    "gpt2", "deepseek2", "qwen3next", "jamba", "lfm2", "minicpm3", "command-r", "stablelm", "bloom",
    "mpt", "gptneox", "nomic-bert", "gemma3n", "gemma4", "wavtokenizer-dec", "clip", "granite", "",
    "arwkv7", "rwkv6qwen2", "chameleon", "bitnet", "t5encoder", "llama4", "olmo2", "nemotron",
    "plm", "apertus", "modern-bert", "eurobert", "step35", "dflash", "eagle3", "none",
)  # fmt: skip


def make_case(source: Source, number: int) -> tuple[bytes, str]:
    """Return the bytes of case *number* of *source*, and what was changed."""
    data = source.path.read_bytes()
    if number == UNCHANGED:
        return data, "unchanged"
    return change_file(gguf_file.read(data), random.Random(f"{source.name}:{number}"))


# ---- the worker


def use_file(path: Path, base: Path | None) -> None:
    """Open a model file and use all that reads it."""
    from kqview import Capture, Engine, errors

    # A LoRA adapter is used with its base model.
    lora = None if base is None else path
    with Engine(base or path, n_ctx=64, n_threads=1, lora=lora, n_gpu_layers=0) as engine:
        model = engine.model
        ids: list[int] = []
        for text in TEXTS:
            with contextlib.suppress(errors.UnsupportedModel):
                ids = engine.tokenize(text)
                engine.detokenize(ids)
        prompt = ids[:8] or [0, 0]
        if model.attention_layers:
            with contextlib.suppress(errors.InvalidCapture, errors.UnsupportedModel):
                engine.attend(prompt, capture="probs")
        capture = Capture("probs") if model.attention_layers else None
        with contextlib.suppress(errors.UnsupportedModel):  # encoders do not generate
            for _ in engine.generate(prompt, max_tokens=2, capture=capture, ignore_eos=True):
                pass


def serve() -> None:
    """Take files from stdin, a line of JSON each; say what came of each."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from kqview import errors

    for line in sys.stdin:
        path, base = json.loads(line)
        try:
            use_file(Path(path), Path(base) if base else None)
            reply = ("works", "")
        except errors.KqviewError as error:
            reply = (type(error).__name__, str(error))
        except MemoryError:
            reply = ("MemoryError", "")
        except BaseException as error:
            reply = ("untyped", f"{type(error).__name__}: {error}")
        print(json.dumps(reply), flush=True)


# ---- the parent


class Worker:
    """A process that opens files until one of them ends it; then the next file gets a new one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def open(self, path: Path, base: Path | None = None) -> tuple[str, str]:
        """Use a file, a LoRA adapter together with its *base*; return what came of it and why.

        That is "works", the name of a typed error, "untyped", "hangs", or the signal that ended
        the process.
        """
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps((str(path), base and str(base))) + "\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(CASE_LIMIT_S):
                self._process.kill()
        if line := self._process.stdout.readline():
            outcome, why = json.loads(line)
            return outcome, why
        return self.close()

    def close(self) -> tuple[str, str]:
        """End the process; return how it ended and the last that it said."""
        if self._process is None:
            return "", ""
        process, self._process = self._process, None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        status = process.wait()
        process.stdout.close()
        self._said.seek(0)
        said = " | ".join(self._said.read().strip().splitlines()[-4:])
        self._said.close()
        if status == -signal.SIGKILL:
            return "hangs", said
        return (signal.Signals(-status).name if status < 0 else f"exit {status}"), said

    def _start(self) -> None:
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attack.models", "--worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )


TYPED = ("works", "ModelLoadError", "UnsupportedModel", "OutOfMemory", "DecodeError")


def run(
    seconds: float,
    seed: int,
    *,
    more: Sequence[Path] = (),
    names: Sequence[str] = (),
    n_cases: int | None = None,
    is_verbose: bool = False,
) -> Summary:
    """Open each source as it is, then changed files for *seconds*, or *n_cases* files.

    Args:
        seconds: How long.
        seed: Number of the first case; cases count up from it.
        more: Further sound files to change.
        names: The sources to use; all when empty.
        n_cases: Stop after as many.
        is_verbose: Print what is wrong when it comes, all of it.
    """
    summary = Summary("models", seed)
    with tempfile.TemporaryDirectory(prefix="kqview-models-") as name:
        folder = Path(name)
        sources = [s for s in make_sources(folder, more) if not names or s.name in names]
        path = folder / "case.gguf"
        worker = Worker()
        n_done, end = 0, time.monotonic() + seconds
        while time.monotonic() < end and n_done != n_cases:
            n_done += 1
            is_sound = n_done <= len(sources)
            source = sources[(n_done - 1) % len(sources)]
            number = UNCHANGED if is_sound else seed * 1_000_000 + n_done
            data, what = make_case(source, number)
            path.write_bytes(data)
            outcome, why = worker.open(path, source.base)
            summary.count(outcome)
            if outcome not in (("works",) if is_sound else TYPED):
                found = f"{source.name}:{number} {outcome}: {what} ({why[:300]})"
                summary.fail(found)
                if is_verbose:
                    print(found, flush=True)
        worker.close()
    return summary


def main(argv: list[str]) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", type=Path, help="a folder of more sound files")
    parser.add_argument("--only", nargs="*", default=(), help="names of sources")
    parser.add_argument("--cases", type=int, help="stop after as many")
    parser.add_argument("--case", help="write one case to this folder's case.gguf: SOURCE:NUMBER")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.worker:
        serve()
        return 0
    more = sorted(given.models.glob("*.gguf")) if given.models else ()
    if given.case:
        name, number = given.case.split(":")
        with tempfile.TemporaryDirectory() as folder:
            source = next(s for s in make_sources(Path(folder), more) if s.name == name)
            data, what = make_case(source, int(number))
        Path("case.gguf").write_bytes(data)
        print(what)
        return 0
    summary = run(
        given.minutes * 60,
        given.seed,
        more=more,
        names=given.only,
        n_cases=given.cases,
        is_verbose=True,
    )
    print(summary)
    return 1 if summary.n_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
