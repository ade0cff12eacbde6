"""Packages that only a part of kqview needs: imported when that part is used."""

from importlib import import_module
from typing import Any

from kqview.errors import KqviewError


def needed(module: str, who: str, remedy: str, error: type[KqviewError] = KqviewError) -> Any:
    """*module*, of a package that may not be installed.

    Args:
        module: Its name.
        who: How the message begins, such as "save needs".
        remedy: How it ends, such as "install it".
        error: Raised if the package is not installed. A package that it needs itself and lacks
            raises ModuleNotFoundError, as usual.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != package:
            raise
        raise error(f"{who} {package}, which is not installed; {remedy}") from missing
