"""A dialect of the server is one folder: it knows no other dialect, and its data no transport."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SERVER = Path(__file__).parents[2] / "src" / "kqview" / "server"
API = SERVER / "api"
DIALECTS = sorted(path.name for path in API.iterdir() if (path / "routes.py").exists())
# What takes bytes from a network and gives them to it. `schema` and `convert` are tested without.
TRANSPORT = (
    "starlette", "uvicorn", "asyncio", "kqview.server.app", "kqview.server.access",
    "kqview.server.connection", "kqview.server.endpoint", "kqview.server.listening",
    "kqview.server.security", "kqview.server.sockets", "kqview.server.streaming",
)  # fmt: skip
# Parts of the server, each of which may import only those before it; dialects come between the
# last two, and may import all before `app`.
ORDER = (
    "supervisor", "watchdog", "errors", "settings", "tls", "peers", "budget", "body", "workers",
    "attention", "wire", "models", "caller", "run", "service", "security", "connection",
    "streaming", "endpoint", "sockets", "metrics", "access", "worker", "openapi", "pages", "api",
    "app", "listening",
)  # fmt: skip


def imported(path: Path) -> set[str]:
    """Modules that a file imports, names that it takes from them included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are written in full"
            found.add(str(node.module))
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_under(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


def used_of(modules: set[str], parents: tuple[str, ...]) -> list[str]:
    """Which of *parents* are among *modules*."""
    return [parent for parent in parents if any(is_under(module, parent) for module in modules)]


def of_dialects(pattern: str) -> list[Path]:
    return sorted(path for name in DIALECTS for path in (API / name).glob(pattern))


@pytest.mark.parametrize("path", of_dialects("*.py"), ids=lambda path: str(path.relative_to(API)))
def test_dialect_imports_no_other_dialect(path: Path):
    own = path.relative_to(API).parts[0]
    others = tuple(f"kqview.server.api.{name}" for name in DIALECTS if name != own)
    assert used_of(imported(path), others) == []


PURE = [*of_dialects("schema.py"), *of_dialects("convert.py"), *sorted(API.glob("*.py"))]


@pytest.mark.parametrize("path", PURE, ids=lambda path: str(path.relative_to(API)))
def test_types_and_conversions_know_no_transport(path: Path):
    assert used_of(imported(path), TRANSPORT) == []


@pytest.mark.parametrize("path", sorted(API.glob("*.py")), ids=lambda path: path.name)
def test_what_dialects_share_imports_none_of_them(path: Path):
    dialects = tuple(f"kqview.server.api.{name}" for name in DIALECTS)
    assert used_of(imported(path), dialects) == []


@pytest.mark.parametrize("name", [name for name in ORDER if (SERVER / f"{name}.py").exists()])
def test_part_of_the_server_imports_only_parts_before_it(name: str):
    path = SERVER / f"{name}.py"
    later = tuple(f"kqview.server.{part}" for part in ORDER[ORDER.index(name) + 1 :])
    assert used_of(imported(path), later) == []


def test_every_part_of_the_server_is_in_the_order():
    parts = {path.stem for path in SERVER.glob("*.py")} - {"__init__"}
    assert parts - set(ORDER) == set()


def test_dialects_have_the_files_that_make_one():
    assert {"kobold", "dream"} <= set(DIALECTS)
    for name in DIALECTS:
        names = {path.stem for path in (API / name).glob("*.py")}
        assert {"__init__", "schema", "convert", "routes"} <= names, name


def test_import_that_breaks_the_rule_is_found(tmp_path: Path):
    path = tmp_path / "convert.py"
    path.write_text(
        "from kqview.server.api import dream\nfrom kqview.server.endpoint import Call\n"
        "import starlette.requests\nimport asyncio\nfrom kqview.server.errors import Answer\n"
    )
    modules = imported(path)
    assert used_of(modules, ("kqview.server.api.dream",)) == ["kqview.server.api.dream"]
    assert used_of(modules, TRANSPORT) == ["starlette", "asyncio", "kqview.server.endpoint"]
