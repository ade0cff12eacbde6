"""Backends for GPUs in packages of their own, such as kqview-vulkan: found, and loaded once.

Such a package is a folder with one library. What has no driver or device here is left out with its
reason, and models run on what is there without it.
"""

import functools
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kqview import _core, errors
from kqview.system import LIBRARY_SUFFIX

# Of two devices that are the same GPU, models use that of the first package.
_PACKAGES: Final = ("kqview_cuda13", "kqview_vulkan")
_logger: Final = logging.getLogger("kqview")


@functools.cache
def load() -> dict[str, str | None]:
    """Load those that are installed: by the package's name why it is not used, None where it is.

    Raises:
        UnsupportedModel: One was built for another kqview or llama.cpp.
    """
    problems: dict[str, str | None] = {}
    for package in _PACKAGES:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        problems[package] = None
        try:
            _core.load_backend(str(Path(spec.origin).with_name(f"backend{LIBRARY_SUFFIX}")))
        except errors.ModelLoadError as error:
            problems[package] = str(error)
            _logger.warning("%s is not used: %s", package, error)
    return problems
