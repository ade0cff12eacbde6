"""Hub: model files from the Hugging Face Hub."""

import os
import re
from typing import Final

from kqview.arguments import invalid
from kqview.errors import ModelLoadError, shown
from kqview.extras import needed

_FIRST_PART: Final = re.compile(r"(?P<stem>.*)-00001-of-(?P<n>\d{5})\.gguf", re.DOTALL)
# An id, "owner/name" and maybe a file, with or without the site's address in front.
_ADDRESS: Final = re.compile(
    r"(?P<host>https?://huggingface\.co/|https?://hf\.co/|huggingface\.co/|hf\.co/|hf://|hf:)?"
    r"(?P<owner>\w[\w.-]*)/(?P<name>\w[\w.-]*)"
    r"(?:/(?:(?:resolve|blob)/[^/]+/)?(?P<file>[^?]+?))?/?(?:\?.*)?"
)


def fetch_model(repo: str, file: str, *, revision: str | None = None) -> str:
    """Return the local path of *file* in *repo*; download it unless it is cached.

    The other parts of a split model come with its first one.

    Raises:
        RequestError: *repo* is not "owner/name", or *file* is no path.
        ModelLoadError: huggingface_hub is not installed, or the download failed.
    """
    if not isinstance(repo, str) or repo.count("/") != 1 or not all(repo.split("/")):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid("repo", 'a repository such as "owner/name"', shown(repo))
    if not isinstance(file, str) or not file:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid("file", "the path of a GGUF file in the repository", shown(file))
    remedy = 'run pip install "kqview[hf]", or download the file and pass its path'
    hub = needed("huggingface_hub", "models from the Hub need", remedy, ModelLoadError)
    options = {} if revision is None else {"revision": revision}
    parts = [file]
    if first := _FIRST_PART.fullmatch(file):
        stem, n = first["stem"], first["n"]
        parts = [f"{stem}-{i:05d}-of-{n}.gguf" for i in range(1, int(n) + 1)]
    try:
        paths = [hub.hf_hub_download(repo_id=repo, filename=one, **options) for one in parts]
        return str(paths[0])
    except Exception as error:  # its errors have no common base; each means the file is not here
        reason = next(iter(str(error).splitlines()), "")
        raise ModelLoadError(
            f"{repo}/{file} failed with {type(error).__name__}: {reason}; the file is not in the "
            "local cache either: check the name and the network, or pass the path of a local file"
        ) from error


def repo_of(path: str) -> str | None:
    """``OWNER/REPO/FILE`` if *path* names a model of the Hub, by its address or its id.

    FILE stands for itself where *path* has no file. None for what reads like a path here.
    """
    found = _ADDRESS.fullmatch(path)
    if found is None:
        return None
    owner, name, file = found["owner"], found["name"], found["file"]
    if found["host"] is None and (name.endswith(".gguf") or os.path.isdir(owner)):
        return None
    return f"{owner}/{name}/{file or 'FILE'}"


def check_is_path(path: str) -> None:
    """Refuse the id of a repository where a path is expected.

    Raises:
        ModelLoadError: There is no such file, and *path* names a model of the Hub.
    """
    name = None if os.path.exists(path) else repo_of(path)
    if name is not None:
        owner, repo, file = name.split("/", 2)
        raise ModelLoadError(
            f"there is no file {path}; if it is on the Hugging Face Hub, use "
            f"Engine.from_hub({f'{owner}/{repo}'!r}, {file!r})"
        )
