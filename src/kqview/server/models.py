"""The folder of models that an administrator may load from; names in it, never other paths."""

from pathlib import Path

from kqview.server.errors import Forbidden, NotFound

_SUFFIX = ".gguf"


def model_path(folder: str | None, name: str) -> Path:
    """The file that *name* stands for.

    Args:
        folder: ``models_dir`` of the settings.
        name: As `model_names` lists it.

    Raises:
        Forbidden: There is no folder, or *name* leads out of it, through a link too.
        NotFound: There is no such file.
    """
    if folder is None:
        raise Forbidden("models.path: there is no models_dir; start the server with one")
    try:
        root = Path(folder).resolve()
        path = (root / name).resolve()
        is_inside, is_model = path.is_relative_to(root), _is_model(root / name)
    except (OSError, ValueError):  # a name that no file can have
        raise NotFound(f"models.path: {name[:80]!r} is no name of a file") from None
    if not is_inside:
        raise Forbidden(f"models.path: {name!r} is outside of models_dir; name a file in it")
    if not is_model:
        raise NotFound(f"models.path: {name!r} is no GGUF file of models_dir")
    return path


def model_names(folder: str | None) -> list[str]:
    """Names of the GGUF files in *folder* and below, sorted; links out of it are left out."""
    if folder is None:
        return []
    root = Path(folder).resolve()
    found = (path for path in root.rglob(f"*{_SUFFIX}") if path.resolve().is_relative_to(root))
    return sorted(str(path.relative_to(root)) for path in found if _is_model(path))


def _is_model(path: Path) -> bool:
    return path.suffix == _SUFFIX and path.is_file()
