"""Files of models: those of the Hub, and why a path is none of a model."""

import difflib
import os
import stat
from collections.abc import Iterable
from typing import Final

from kqview.errors import ModelLoadError, RequestError
from kqview.hub import fetch_model, repo_of

_MAGIC: Final = b"GGUF"
_SHOWN: Final = 3

# How files that people take for models begin.
_OTHERS: Final = (
    (b"version https://git-lfs", "a Git LFS pointer: run git lfs pull to get the model itself"),
    (b"<!doctype", "a web page: download the file itself, or use --hf OWNER/REPO/FILE"),
    (b"<html", "a web page: download the file itself, or use --hf OWNER/REPO/FILE"),
    (b"pk\x03\x04", "a zip or PyTorch file"),
    (b"tjgg", "in llama.cpp's old GGML format"),
    (b"lmgg", "in llama.cpp's old GGML format"),
)
_CONVERT: Final = "; llama.cpp's convert_hf_to_gguf.py makes a GGUF file of a Hugging Face model"


def fetch(name: str) -> str:
    """Return the local path of ``OWNER/REPO/FILE``; download it unless it is cached."""
    return fetch_model(*repo_and_file(name))


def repo_and_file(name: str) -> tuple[str, str]:
    """The two parts of ``OWNER/REPO/FILE``."""
    owner, _, rest = name.partition("/")
    repo, _, file = rest.partition("/")
    if not (owner and repo and file):
        raise RequestError(
            f"--hf is {name!r}; write OWNER/REPO/FILE, with the file's path in the repository"
        )
    return f"{owner}/{repo}", file


def check_model_file(path: str) -> None:
    """Raise if *path* cannot be a model, with what to type instead.

    Raises:
        ModelLoadError: There is no such file, it is a folder, or it is no GGUF file.
    """
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise ModelLoadError(f"{path} is a folder; {_of_folder(path)}")
        if not stat.S_ISREG(status.st_mode):
            raise ModelLoadError(f"{path} is not a regular file; name a GGUF file")
        with open(path, "rb") as file:
            head = file.read(64)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelLoadError(f"there is no file {path}; {_instead_of(path)}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelLoadError(f"{path} cannot be read: {reason}") from None
    if not head.startswith(_MAGIC):
        raise ModelLoadError(f"{path} is not a GGUF file but {_kind(path, head)}")


def _kind(path: str, head: bytes) -> str:
    if not head:
        return "empty; download it again"
    start = head.lower()
    for begin, what in _OTHERS:
        if start.startswith(begin):
            return what
    if path.endswith((".safetensors", ".bin", ".pt", ".pth")):
        return f"weights of another format{_CONVERT}"
    return f"something else{_CONVERT}"


def _of_folder(folder: str) -> str:
    names = _gguf_names(folder)
    if names:
        return f"name a GGUF file in it: {_listed(os.path.join(folder, name) for name in names)}"
    if os.path.exists(os.path.join(folder, "config.json")):
        return f"it has no GGUF file{_CONVERT}"
    return "it has no GGUF file; name one, or use --demo, the bundled model"


def _instead_of(path: str) -> str:
    """What may have been meant by *path*, which does not exist."""
    repo = repo_of(path)
    if repo is not None:
        return f"if it is on the Hugging Face Hub, type --hf {repo}"
    folder, name = os.path.split(path)
    names = _gguf_names(folder or ".")
    close = difflib.get_close_matches(name, names, n=1)
    if not close:
        stems = {one.lower().removesuffix(".gguf"): one for one in names}
        close = [stems[one] for one in difflib.get_close_matches(name.lower(), stems, n=1)]
    if close:
        return f"did you mean {os.path.join(folder, close[0])}?"
    if folder and not os.path.isdir(folder):
        return f"there is no folder {folder} either"
    if names:
        found = _listed(os.path.join(folder, one) for one in names)
        return f"the GGUF files in its folder are {found}"
    return "name a GGUF file, or use --demo, the bundled model"


def _gguf_names(folder: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.lower().endswith(".gguf"))
    except OSError:
        return []


def _listed(paths: Iterable[str]) -> str:
    found = list(paths)
    n_more = len(found) - _SHOWN
    return ", ".join(found[:_SHOWN]) + (f" and {n_more} more" if n_more > 0 else "")
