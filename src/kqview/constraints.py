"""Finds llguidance, which constrains outputs to a JSON schema or a regular expression.

Its Python package carries a shared library with a C interface; the engine thread calls that, so
that no token waits for the GIL. Python only says where the library is.
"""

import importlib

from kqview.errors import KqviewError
from kqview.types import Sampling


def llguidance_library(sampling: Sampling) -> str:
    """Path of llguidance's library, "" for *sampling* without json_schema and regex.

    Raises:
        KqviewError: It is not installed, or of another major version.
    """
    if sampling.json_schema is None and sampling.regex is None:
        return ""
    try:
        package = importlib.import_module("llguidance")
        library = importlib.import_module("llguidance._lib")
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "llguidance":
            raise
        raise KqviewError(
            "generate: llguidance is not installed, json_schema and regex need it; "
            'run pip install "kqview[constraints]"'
        ) from missing
    if str(package.__version__).partition(".")[0] != "1":
        # Another major version may lay its structures out in another way.
        raise KqviewError(
            f"generate: llguidance {package.__version__} is installed, version 1 is needed; "
            'run pip install "kqview[constraints]"'
        )
    return str(library.__file__)
