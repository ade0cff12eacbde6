"""RowsFile: writes captured attention to one .npz while it is generated.

Each row goes to disk as it comes; in memory stay the ids and texts. The file appears under its name
when it is closed, whole, also after an interruption: then with the rows that came before it.
"""

import contextlib
import zipfile
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from kqview.durable import WholeFile, remove_leftovers

if TYPE_CHECKING:
    from kqview import Capture, Engine, Token


class RowsFile:
    """An open .npz file of one generation.

    Members: ``attention_00000`` and so on by token index, as in ``token.attention`` (with
    ``_layer_000`` appended where layers differ in heads); ``ids`` int32 and ``texts`` of the
    generated tokens; ``prompt_ids`` int32; ``layers`` int32, the model's layer of each index;
    ``kind``. A token without attention has no member.

    Where the disk is full, or no token came before an error, the old file of that name stays.
    """

    def __init__(self, path: Path, engine: "Engine", capture: "Capture", prompt: list[int]) -> None:
        """Begin the file that will be *path*.

        Raises:
            OSError: *path* cannot be written.
        """
        remove_leftovers(path.parent)
        self._file = WholeFile(path)
        self._zip = zipfile.ZipFile(self._file.stream, "w", zipfile.ZIP_STORED)
        self._is_discarded = False
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
        """Write the ids and texts and give the file its name.

        Raises:
            OSError: It cannot be written; what was there before still is.
        """
        self._write("ids", np.array(self._ids, dtype=np.int32))
        self._write("texts", np.array(self._texts, dtype=np.str_))
        with self._discarding():
            self._zip.close()
            self._file.commit()

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish the file, after an error too where there is something to keep."""
        if self._is_discarded:
            return
        if error is not None and not self._ids:
            self._discard()
        else:
            self.close()

    @contextlib.contextmanager
    def _discarding(self) -> Generator[None]:
        """Give the file up where it cannot be written."""
        try:
            yield
        except OSError:
            self._discard()
            raise

    def _discard(self) -> None:
        self._is_discarded = True
        self._zip.fp = None  # or it would be finished when it is collected
        self._file.discard()

    def _write(self, name: str, array: NDArray[Any]) -> None:
        with self._discarding(), self._zip.open(f"{name}.npy", "w") as member:
            npy_format.write_array(member, array, allow_pickle=False)

    def _write_view(self, name: str, array: NDArray[Any]) -> None:
        # numpy's writer copies through a buffer when the target is no plain file. A view of the
        # attention goes out as it lies in memory.
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
            if self._count_copied is not None:
                self._count_copied(array.nbytes)
        with self._discarding(), self._zip.open(f"{name}.npy", "w", force_zip64=True) as member:
            header = npy_format.header_data_from_array_1_0(array)
            npy_format.write_array_header_1_0(member, header)
            if array.size:
                member.write(array.data.cast("B"))
