"""A GGUF file as plain lists that anything may be done to: read, changed, written as told.

Nothing is checked when it is written: offsets, counts and lengths are what the lists say, or what
`Written` asks for instead.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B",
          U64: "Q", I64: "q", F64: "d"}  # fmt: skip
_LIMITS = {U8: 2**8, I8: 2**8, U16: 2**16, I16: 2**16, U32: 2**32, I32: 2**32, BOOL: 256,
           U64: 2**64, I64: 2**64}  # fmt: skip
# ggml's types: (values of a block, its bytes).
BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 36), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36), 41: (128, 18), 42: (64, 18),
}  # fmt: skip


@dataclass
class Value:
    """One key and value; ``value`` is a list where ``kind`` is ARRAY, of elements of ``of``."""

    key: str
    kind: int
    value: Any
    of: int = 0


@dataclass
class Tensor:
    """One tensor; ``shape`` fastest dimension first, as the file has it."""

    name: str
    shape: list[int]
    kind: int
    data: bytes

    def n_bytes(self) -> int:
        """Size by shape and type; 0 for types that there are not."""
        n_values, n_bytes = BLOCKS.get(self.kind, (1, 0))
        count = 1
        for n in self.shape:
            count *= n
        return count // n_values * n_bytes


@dataclass
class Gguf:
    """All of a file. ``shifts`` are added to the offsets of tensors, by index."""

    values: list[Value]
    tensors: list[Tensor]
    version: int = 3
    n_values: int | None = None
    n_tensors: int | None = None
    alignment: int = 32
    shifts: dict[int, int] = field(default_factory=dict[int, int])

    def find(self, key: str) -> Value | None:
        """Return the value of *key*, or None."""
        return next((value for value in self.values if value.key == key), None)

    def arch(self) -> str:
        """Name of the architecture."""
        found = self.find("general.architecture")
        return str(found.value) if found else ""


def read(data: bytes) -> Gguf:
    """Read a sound file."""
    at = 4

    def take(code: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from("<" + code, data, at)
        at += struct.calcsize(code)
        return value

    def text() -> str:
        nonlocal at
        n = take("Q")
        at += n
        return data[at - n : at].decode("utf-8", "surrogateescape")

    def one(kind: int) -> Any:
        return text() if kind == STRING else take(_CODES[kind])

    version, n_tensors, n_values = take("I"), take("Q"), take("Q")
    file = Gguf([], [], version)
    for _ in range(n_values):
        key, kind = text(), take("I")
        if kind == ARRAY:
            of, n = take("I"), take("Q")
            if of == STRING:
                items: list[Any] = [text() for _ in range(n)]
            else:
                items = list(struct.unpack_from(f"<{n}{_CODES[of]}", data, at))
                at += n * struct.calcsize(_CODES[of])
            file.values.append(Value(key, kind, items, of))
        else:
            file.values.append(Value(key, kind, one(kind)))
    infos = [
        (text(), [take("Q") for _ in range(take("I"))], take("I"), take("Q"))
        for _ in range(n_tensors)
    ]
    found = file.find("general.alignment")
    file.alignment = int(found.value) if found else 32
    start = -(-at // file.alignment) * file.alignment
    for name, shape, kind, offset in infos:
        tensor = Tensor(name, shape, kind, b"")
        tensor.data = data[start + offset : start + offset + tensor.n_bytes()]
        file.tensors.append(tensor)
    return file


def write(file: Gguf) -> bytes:
    """Return the file's bytes; numbers are cut to what their type holds."""
    out = bytearray(b"GGUF" + struct.pack("<I", file.version % 2**32))
    n_tensors = len(file.tensors) if file.n_tensors is None else file.n_tensors
    n_values = len(file.values) if file.n_values is None else file.n_values
    out += struct.pack("<QQ", n_tensors % 2**64, n_values % 2**64)
    for value in file.values:
        out += _text(value.key) + struct.pack("<I", value.kind % 2**32)
        if value.kind == ARRAY:
            out += struct.pack("<IQ", value.of % 2**32, len(value.value))
            if value.of == STRING:
                out += b"".join(map(_text, value.value))
            else:
                out += b"".join(_one(value.of, item) for item in value.value)
        else:
            out += _one(value.kind, value.value)
    offset = 0
    step = max(1, file.alignment)
    for i, tensor in enumerate(file.tensors):
        out += _text(tensor.name) + struct.pack("<I", len(tensor.shape))
        out += struct.pack(f"<{len(tensor.shape)}Q", *(n % 2**64 for n in tensor.shape))
        shifted = (offset + file.shifts.get(i, 0)) % 2**64
        out += struct.pack("<IQ", tensor.kind % 2**32, shifted)
        offset += -(-len(tensor.data) // step) * step
    out += bytes(-len(out) % step)
    for tensor in file.tensors:
        out += tensor.data + bytes(-len(tensor.data) % step)
    return bytes(out)


def _text(text: Any) -> bytes:
    data = str(text).encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _one(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    code = _CODES.get(kind)
    if code is None:
        return b"\0" * 8
    number = 0.0 if isinstance(value, (str, list)) else value
    if kind in (F32, F64):
        try:
            return struct.pack("<" + code, float(number))
        except OverflowError:
            return struct.pack("<" + code, float("inf"))
    if isinstance(number, float):
        number = int(number) if number == number and abs(number) < 2**70 else 0
    limit = _LIMITS[kind]
    number = int(number) % limit
    if code.islower() and number >= limit // 2:
        number -= limit
    return struct.pack("<" + code, number)
