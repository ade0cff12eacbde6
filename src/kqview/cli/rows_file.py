"""RowsFile: writes captured attention to one .npz while it is generated.

Each row goes to disk as it comes; in memory stay the ids and texts. ``numpy.load`` reads the file,
also after an interruption.
"""

import zipfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kqview import Capture, Engine, Token


class RowsFile:
    """An open .npz file of one generation.

    Members: ``attention_00000`` and so on by token index, as in ``token.attention`` (with
    ``_layer_000`` appended where layers differ in heads); ``ids`` int32 and ``texts`` of the
    generated tokens; ``prompt_ids`` int32; ``layers`` int32, the model's layer of each index;
    ``kind``. A token without attention has no member.
    """

    def __init__(self, path: Path, engine: "Engine", capture: "Capture", prompt: list[int]) -> None:
        """Create *path*, replacing what is there.

        Raises:
            OSError: *path* cannot be written.
        """
        self._zip = zipfile.ZipFile(path, "w", zipfile.ZIP_STORED)
        self._count_copied = getattr(engine, "count_copied", None)
        self._ids: list[int] = []
        self._texts: list[str] = []
        layers = engine.model.attention_layers if capture.layers is None else capture.layers
        self._write("prompt_ids", np.array(prompt, dtype=np.int32))
        self._write("layers", np.array(layers, dtype=np.int32))
        self._write("kind", np.array(capture.kind))

    def add(self, token: "Token") -> None:
        """Write one token."""
        self._ids.append(token.id)
        self._texts.append(token.text)
        name = f"attention_{token.index:05d}"
        if isinstance(token.attention, tuple):
            for i, heads in enumerate(token.attention):
                self._write_view(f"{name}_layer_{i:03d}", heads)
        elif token.attention is not None:
            self._write_view(name, token.attention)

    def close(self) -> None:
        """Write the ids and texts and finish the file."""
        self._write("ids", np.array(self._ids, dtype=np.int32))
        self._write("texts", np.array(self._texts, dtype=np.str_))
        self._zip.close()

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish the file, after an error too."""
        self.close()

    def _write(self, name: str, array: NDArray[Any]) -> None:
        with self._zip.open(f"{name}.npy", "w") as member:
            npy_format.write_array(member, array, allow_pickle=False)

    def _write_view(self, name: str, array: NDArray[Any]) -> None:
        # numpy's writer copies through a buffer when the target is no plain file. A view of the
        # attention goes out as it lies in memory.
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
            if self._count_copied is not None:
                self._count_copied(array.nbytes)
        with self._zip.open(f"{name}.npy", "w", force_zip64=True) as member:
            header = npy_format.header_data_from_array_1_0(array)
            npy_format.write_array_header_1_0(member, header)
            if array.size:
                member.write(array.data.cast("B"))
