"""Control vectors: directions of the residual stream, one a layer, and their GGUF files.

The file is that of repeng and of llama.cpp's ``--control-vector``: an F32 tensor
``direction.<layer>`` of ``n_embd`` values for each layer, counted from 1, because llama.cpp adds
nothing behind layer 0.
"""

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from kqview.arguments import choice
from kqview.durable import write_whole
from kqview.edit import Edit
from kqview.errors import RequestError
from kqview.types import Capture

if TYPE_CHECKING:
    from kqview.engine import Engine

Method = Literal["mean", "pca"]

_VERSION: Final = 3
_ALIGNMENT: Final = 32
_UINT32, _STRING, _F32 = 4, 8, 0  # GGUF's numbers of types


@dataclass(frozen=True, eq=False)
class ControlVector:
    """A direction for each of some layers, as `vector` finds them.

    Attributes:
        layers: The layers, ascending.
        directions: Float32 ``(n_layers, n_embd)``, read-only.
        architecture: Of the model that they were found in.
    """

    layers: tuple[int, ...]
    directions: NDArray[np.float32]
    architecture: str

    def edit(self, scale: float = 1.0) -> Edit:
        """The Edit that adds them, times *scale*, to each token."""
        return Edit.add(self.directions, self.layers, scale)

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write them as the GGUF file that repeng and llama.cpp read; return its size.

        Raises:
            RequestError: Layer 0 is among them, which the format does not have.
            OSError: The file cannot be written; an old file stays.
        """
        if 0 in self.layers:
            raise RequestError(
                "a file of directions has none for layer 0; find them with layers from 1 on",
                parameter="path",
            )
        data = _gguf(self.layers, self.directions, self.architecture)
        write_whole(path, data)
        return len(data)


def vector(
    engine: "Engine",
    positive: Sequence[str | Sequence[int]],
    negative: Sequence[str | Sequence[int]],
    layers: Iterable[int] | None = None,
    *,
    method: Method = "mean",
) -> ControlVector:
    """Find the direction from *negative* to *positive* in the hidden state of the last token.

    The prompts are evaluated in all slots. "mean" is the difference of the means (Zou et al.,
    Representation Engineering, arXiv 2310.01405); "pca" the first principal component of the
    differences of pairs, as repeng finds it, with the length and sign of that difference of means.

    Args:
        engine: The engine.
        positive: Prompts that have the property.
        negative: As many prompts without it; with "pca", each the counterpart of one of *positive*.
        layers: Layers, negative ones counted from the last; None for all but layer 0.
        method: How directions are found.

    Raises:
        RequestError: There are no prompts, or not as many of each.
        KqviewError: As of `Engine.attend`.
    """
    choice("method", method, Method)
    n = len(positive)
    if n == 0 or len(negative) != n:
        raise RequestError(
            f"positive has {n} prompts and negative {len(negative)}; pass as many of each, 1 at "
            "least",
            parameter="negative",
        )
    wanted = range(1, engine.model.n_layer) if layers is None else cast("Sequence[int]", layers)
    capture = Capture("probs", layers=[], hidden=wanted).counted(engine.model)
    found = engine.attend([*positive, *negative], capture, last=1)
    states = np.stack([np.asarray(one.hidden, np.float64)[:, -1] for one in found], 1)
    differences = states[:, :n] - states[:, n:]  # (layer, pair, n_embd)
    directions = differences.mean(1)
    if method == "pca":
        directions = np.stack([_principal(one) for one in differences])
    directions = directions.astype(np.float32)
    directions.flags.writeable = False
    hidden = cast("tuple[int, ...]", capture.hidden)
    return ControlVector(hidden, directions, engine.model.architecture)


def _principal(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    """The first component of differences and their opposites, scaled as their mean."""
    mean = differences.mean(0)
    direction: NDArray[np.float64] = np.linalg.svd(differences, full_matrices=False)[2][0]
    return direction * (direction @ mean)


def _gguf(layers: tuple[int, ...], directions: NDArray[np.float32], architecture: str) -> bytes:
    def text(value: str) -> bytes:
        data = value.encode()
        return struct.pack("<Q", len(data)) + data

    values: list[tuple[str, Any]] = [
        ("general.architecture", "controlvector"),
        ("controlvector.model_hint", architecture),
        ("controlvector.layer_count", len(layers)),
    ]
    head = b"GGUF" + struct.pack("<IQQ", _VERSION, len(layers), len(values))
    for key, value in values:
        head += text(key)
        if isinstance(value, str):
            head += struct.pack("<I", _STRING) + text(value)
        else:
            head += struct.pack("<II", _UINT32, value)
    n_embd = directions.shape[1]
    row_bytes = -(-4 * n_embd // _ALIGNMENT) * _ALIGNMENT
    for i, layer in enumerate(layers):
        head += text(f"direction.{layer}") + struct.pack("<IQIQ", 1, n_embd, _F32, i * row_bytes)
    head += bytes(-len(head) % _ALIGNMENT)
    return head + b"".join(row.tobytes().ljust(row_bytes, b"\0") for row in directions)
