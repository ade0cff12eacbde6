"""What a state file says about itself and whether it is true, without an engine."""

import os
from dataclasses import dataclass

from kqview.errors import StateFormatError
from kqview.state.files import read_parts
from kqview.state.fingerprint import ModelFiles
from kqview.state.ses1 import SavedState, inspect
from kqview.state.trailer import Trailer, read_trailer


@dataclass(frozen=True, slots=True)
class StateReport:
    """What `check_file` found.

    Attributes:
        path: The file.
        problems: Why it should not be restored; empty where nothing was found.
        n_bytes: Size of the file; None where it cannot be read.
        state: What the blob says about itself; None where it is no sound one.
        trailer: What the trailer says; None without one, or where its checksum is wrong.
        has_trailer: Whether there is one. A raw blob has no checksum: values that were altered
            cannot be told, nor of which model they are.
        is_of_model: Whether the slot was one of the model asked about; None where none was, or
            where the trailer does not say.
    """

    path: str
    problems: tuple[str, ...]
    n_bytes: int | None = None
    state: SavedState | None = None
    trailer: Trailer | None = None
    has_trailer: bool = False
    is_of_model: bool | None = None


def check_file(path: str | os.PathLike[str], model: ModelFiles | None = None) -> StateReport:
    """Check one file: its structure, its checksum, and whether it is of *model* where given.

    Raises:
        OSError: A file of *model* cannot be read. What is wrong with *path* is in the report.
    """
    name = os.fspath(path)
    try:
        blob, trailer_text = read_parts(path)
    except OSError as error:
        return StateReport(name, (error.strerror or str(error),))
    except StateFormatError as error:
        return StateReport(name, (str(error),))
    problems: list[str] = []
    state = trailer = is_of_model = None
    try:
        state = inspect(blob)
    except StateFormatError as error:
        problems.append(str(error))
    if trailer_text:
        try:
            trailer = read_trailer(blob, trailer_text)
        except StateFormatError as error:
            problems.append(str(error))
    if model is not None:
        is_of_model = trailer and trailer.model == _fingerprint(model, trailer)
        if is_of_model is False:
            problems.append("the model or its LoRA adapters are not those it was saved with")
        elif not trailer_text:
            problems.append("it has no trailer, so nothing says of which model it is")
    n_bytes = len(blob) + len(trailer_text)
    return StateReport(
        name, tuple(problems), n_bytes, state, trailer, bool(trailer_text), is_of_model
    )


def _fingerprint(model: ModelFiles, trailer: Trailer) -> str:
    return model.sampled_fingerprint() if trailer.version == 1 else model.fingerprint()
