"""The file of ``kqview generate --output rows.npz``: rows go into it as they arrive."""

import contextlib
import zipfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from kqview.saved import streamed_metadata
from kqview.state.durable import WholeFile, remove_leftovers

if TYPE_CHECKING:
    from kqview import Capture, Engine, Generation, Token
    from kqview.types.token import Attention, Positions


class RowsFile:
    """An .npz file to which the captured rows of one generation are written as they arrive.

    Members: ``attention_00000`` and so on by token index, each as in ``token.attention`` (with
    ``_layer_000`` appended where layers differ in heads); ``positions_00000`` likewise with
    ``top_k``; ``ids`` int32 and ``texts`` of the generated tokens; ``prompt_ids`` int32; ``layers``
    int32, the model layer of each index; ``spans`` int32, -1 for an open end; ``kind`` and
    ``reduce``. A token without attention has no member. ``kqview`` is what `kqview.load` reads.

    Memory holds only ids and texts. The file appears under its name when it is closed; after an
    interruption it holds the rows so far. If the disk fills up, or an error comes before the first
    token, an old file of that name stays.
    """

    def __init__(
        self, path: Path, engine: "Engine", capture: "Capture", generation: "Generation"
    ) -> None:
        """Start the file that is going to be *path*.

        Raises:
            OSError: *path* cannot be written.
        """
        remove_leftovers(path.parent)
        self._file = WholeFile(path)
        self._zip = zipfile.ZipFile(self._file.stream, "w", zipfile.ZIP_STORED)
        self._is_discarded = False
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._engine, self._generation = engine, generation
        self._capture = capture = capture.resolved(engine.model)
        self._write("prompt_ids", np.array(generation.prompt_ids, dtype=np.int32))
        self._write("layers", np.array(capture.layers, dtype=np.int32))
        self._write("kind", np.array(capture.kind))
        if capture.reduce is not None:
            self._write("reduce", np.array(capture.reduce))
        if capture.spans is not None:
            spans = [(start, -1 if stop is None else stop) for start, stop in capture.spans]
            self._write("spans", np.array(spans, dtype=np.int32))

    def add(self, token: "Token") -> None:
        """Write the rows of one token."""
        self._ids.append(token.id)
        self._texts.append(token.text)
        self._write_views(f"attention_{token.index:05d}", token.attention)
        self._write_views(f"positions_{token.index:05d}", token.attention_positions)

    def _write_views(self, name: str, views: "Attention | Positions | None") -> None:
        if isinstance(views, tuple):
            for i, heads in enumerate(views):
                self._write_view(f"{name}_layer_{i:03d}", heads)
        elif views is not None:
            self._write_view(name, views)

    def close(self) -> None:
        """Write the ids and texts, then give the file its name.

        Raises:
            OSError: The file cannot be written; an old file stays.
        """
        self._write("ids", np.array(self._ids, dtype=np.int32))
        self._write("texts", np.array(self._texts, dtype=np.str_))
        known = {*self._generation.prompt_ids, *self._ids}
        column_texts = {one: self._engine.token_text(one) for one in known}
        about = streamed_metadata(self._texts, self._generation, self._capture, column_texts)
        self._write("kqview", np.array(about))
        with self._discarding():
            self._zip.close()
            self._file.commit()

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        """Close the file, after an error as well if it holds any row."""
        if self._is_discarded:
            return
        if error_type is not None and not self._ids:
            self._discard()
        else:
            self.close()

    @contextlib.contextmanager
    def _discarding(self) -> Generator[None]:
        """Discard the file if writing fails."""
        try:
            yield
        except OSError:
            self._discard()
            raise

    def _discard(self) -> None:
        self._is_discarded = True
        self._zip.fp = None  # else the garbage collector would finish it
        self._file.discard()

    def _write(self, name: str, array: NDArray[Any]) -> None:
        with self._discarding(), self._zip.open(f"{name}.npy", "w") as member:
            npy_format.write_array(member, array, allow_pickle=False)

    def _write_view(self, name: str, array: NDArray[Any]) -> None:
        # numpy's writer copies through a buffer when the target is no plain file. A view of the
        # attention goes out as it lies in memory.
        array = np.ascontiguousarray(array)  # as it is, unless somebody else made it
        with self._discarding(), self._zip.open(f"{name}.npy", "w", force_zip64=True) as member:
            header = npy_format.header_data_from_array_1_0(array)
            npy_format.write_array_header_1_0(member, header)
            if array.size:
                member.write(array.data.cast("B"))
