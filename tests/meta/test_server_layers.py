"""Parts of the server import one way; dialects know no other, and their data no transport."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.meta.test_layers import imported

pytestmark = pytest.mark.full

SERVER = Path(__file__).parents[2] / "src" / "kqview" / "server"
API = SERVER / "api"
DIALECTS = sorted(path.parent.name for path in API.glob("*/routes.py"))
# Files import their own layer and those before it: settings and errors, HTTP without a model,
# models without a protocol, what protocols share, the protocols, what is built on these.
LAYERS = (
    ("errors", "settings_table", "settings", "config", "live_config"),
    ("web",),
    ("models",),
    ("api.wire",),
    tuple(f"api.{name}" for name in DIALECTS),
    ("apps", "app", "config_file", "config_text"),
)
# What takes bytes from a network and gives them to it. A dialect's data is tested without.
TRANSPORT = (
    "starlette", "uvicorn", "asyncio",
    *(f"kqview.server.web.{part}" for part in ("uvicorn_parts", "access", "sockets")),
)  # fmt: skip


def modules_of(path: Path) -> set[str]:
    """Modules that a file imports, names that it takes from them included."""
    return {name for module, taken in imported(path) for name in (module, f"{module}.{taken}")}


def used_of(modules: set[str], parents: tuple[str, ...]) -> list[str]:
    """Which of *parents* are among *modules*, or have one of them inside."""
    return [
        parent
        for parent in parents
        if any(module == parent or module.startswith(f"{parent}.") for module in modules)
    ]


def layer_of(path: Path) -> int:
    """Index of the layer that a file belongs to."""
    name = ".".join(path.relative_to(SERVER).with_suffix("").parts)
    found = [
        i
        for i, layer in enumerate(LAYERS)
        if any(name == part or name.startswith(f"{part}.") for part in layer)
    ]
    assert found, f"{name} is in no layer"
    return found[0]


FILES = [
    path
    for path in sorted(SERVER.rglob("*.py"))
    if path.relative_to(SERVER).as_posix() not in ("__init__.py", "api/__init__.py")
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SERVER)))
def test_file_of_the_server_imports_only_its_layer_and_those_before(path: Path):
    i = layer_of(path)
    later = [part for layer in LAYERS[i + 1 :] for part in layer]
    own = ".".join(path.relative_to(SERVER).parts[:2])
    later += [other for other in LAYERS[i] if own in LAYERS[4] and other != own]
    assert used_of(modules_of(path), tuple(f"kqview.server.{part}" for part in later)) == []


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if layer_of(path) in (3, 4) and path.stem not in ("routes", "stream")],
    ids=lambda path: str(path.relative_to(SERVER)),
)
def test_data_of_a_dialect_knows_no_transport(path: Path):
    assert used_of(modules_of(path), TRANSPORT) == []


def test_receiver_of_traces_uses_http_and_what_is_below_it():
    above = tuple(f"kqview.server.{part}" for layer in LAYERS[2:] for part in layer)
    used = set[str]().union(*(modules_of(path) for path in (SERVER.parent / "ingest").glob("*.py")))
    assert used_of(used, ("kqview.server.web",))
    assert used_of(used, above) == []


def test_only_one_file_knows_uvicorn():
    """What is private there can change with every version."""
    found = [path.name for path in SERVER.rglob("*.py") if used_of(modules_of(path), ("uvicorn",))]
    assert found == ["uvicorn_parts.py"]
