"""Files that commands write: checked before any work, then written whole or not at all."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kqview.cli.option_groups import option
from kqview.errors import RequestError
from kqview.saved import require_safetensors
from kqview.types import Capture
from kqview.types.capture import RAW_KINDS

PICTURES: Final = (".png", ".svg", ".pdf")
ARRAYS: Final = (".npz", ".npy", ".safetensors")
PAGE: Final = ".html"


def output_to(text: str) -> Any:
    """The option that names the file to write."""
    return option(None, text, "--output -o", metavar="FILE")


def check_output(option: str, path: Path | None, suffixes: Sequence[str]) -> None:
    """Refuse what cannot be written at the end, before the model is loaded.

    Args:
        option: Name of the option, for the message.
        path: Its value; None is fine.
        suffixes: What the name may end in.

    Raises:
        RequestError: The suffix is not one of these, or there is no such folder, or it is not
            writable.
        KqviewError: The format needs a package that is not installed.
    """
    if path is None or (path.exists() and not path.is_file() and not path.is_dir()):
        return  # a device such as /dev/stdout
    shown = f"{option} is {str(path)!r}"
    if path.is_dir():
        raise RequestError(f"{shown}, a folder; name a file in it")
    suffix = path.suffix.lower()
    if suffix not in suffixes:
        raise RequestError(f"{shown}; end it in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise RequestError(f"{shown}, but there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise RequestError(f"{shown}, where you may not write")
    if suffix in PICTURES:
        from kqview.viz.figures import require_matplotlib

        require_matplotlib(f"a {suffix} file")
    if suffix == ".safetensors":
        require_safetensors(f"a {suffix} file")


def check_drawn(path: Path | None, capture: Capture | None) -> None:
    """Refuse rows that the picture or page *path* cannot show."""
    if path is None or capture is None or path.suffix.lower() not in (*PICTURES, PAGE):
        return
    if capture.spans is not None:
        raise RequestError(f"--output is {str(path)!r}, which shows whole rows; leave --spans out")
    if path.suffix.lower() == PAGE and capture.kind in RAW_KINDS:
        raise RequestError(
            f"--output is {str(path)!r}, which shows probabilities; use --capture probs or scores"
        )
