"""Fetches a model file from the Hugging Face hub; needs the ``hf`` extra."""

import importlib

from kqview.errors import ModelLoadError, RequestError


def fetch(name: str) -> str:
    """Return the local path of ``OWNER/REPO/FILE``, downloading it unless it is cached.

    Raises:
        RequestError: *name* has another form.
        ModelLoadError: huggingface_hub is missing, or the download failed.
    """
    owner, _, rest = name.partition("/")
    repo, _, file = rest.partition("/")
    if not (owner and repo and file):
        raise RequestError(
            f"hub.fetch: {name!r}, the form is OWNER/REPO/FILE; name the file in the repository"
        )
    try:
        huggingface_hub = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError as missing:
        raise ModelLoadError(
            "hub.fetch: huggingface_hub is not installed, --hf needs it; "
            'pip install "kqview[hf]", or download the file and pass its path'
        ) from missing
    try:
        return str(huggingface_hub.hf_hub_download(repo_id=f"{owner}/{repo}", filename=file))
    except Exception as error:  # its errors have no common base, and each means "not fetched"
        reason = next(iter(str(error).splitlines()), "")
        raise ModelLoadError(
            f"hub.fetch: {name} failed with {type(error).__name__}: {reason}, it is not in the "
            "local cache; check the name and the network, or pass the path of a local file"
        ) from error
