"""The folder of models: GGUF files that an administrator may load."""

from pathlib import Path
from typing import Final

from kqview.server.errors import Forbidden, NotFound

_SUFFIX: Final = ".gguf"


def model_file(folder: str | None, name: str) -> Path:
    """The file of the model *name*, which an administrator may load.

    Args:
        folder: The setting ``models_dir``.
        name: As `model_names` lists it; a path in the folder and no other.

    Raises:
        Forbidden: There is no folder, or *name* leads out of it, be it through a link.
        NotFound: There is no such file.
    """
    if folder is None:
        raise Forbidden("the server has no models_dir (--models-dir); start it with one")
    try:
        root = Path(folder).resolve()
        path = (root / name).resolve()
        is_inside, is_model = path.is_relative_to(root), _is_model(root / name)
    except (OSError, ValueError):  # a name that no file can have
        raise NotFound(f"model {name[:80]!r} is not the name of a file") from None
    if not is_inside:
        raise Forbidden(f"model {name!r} is outside models_dir; name a file in it")
    if not is_model:
        raise NotFound(f"model {name!r} is not a GGUF file of models_dir; see /api/v1/models")
    return path


def model_names(folder: str | None) -> list[str]:
    """Sorted names of the GGUF files in *folder* and below, without links that lead out of it."""
    if folder is None:
        return []
    root = Path(folder).resolve()
    found = (path for path in root.rglob(f"*{_SUFFIX}") if path.resolve().is_relative_to(root))
    return sorted(str(path.relative_to(root)) for path in found if _is_model(path))


def name_in(folder: str | None, path: str | None) -> str | None:
    """What `model_names` calls the file *path*; None if it is not one of them."""
    if folder is None or path is None:
        return None
    root, file = Path(folder).resolve(), Path(path).resolve()
    return str(file.relative_to(root)) if file.is_relative_to(root) and _is_model(file) else None


def _is_model(path: Path) -> bool:
    return path.suffix == _SUFFIX and path.is_file()
