"""Parts of the server import one way; dialects know no other, and their data no transport."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

SERVER = Path(__file__).parents[2] / "src" / "kqview" / "server"
API = SERVER / "api"
DIALECTS = sorted(path.parent.name for path in API.glob("*/routes.py"))
# Each part may import those before it, dialects (api) all before them.
ORDER = (
    "supervisor", "worker", "errors", "settings", "config", "live", "budget", "security",
    "attention", "kept", "workers", "mod_runs", "models", "phrases", "truncation", "run",
    "events_bus", "cancelling", "slots", "served", "pool", "sessions", "conversation_store",
    "conversation_states", "conversations", "service", "lenient", "endpoint", "uvicorn_parts",
    "sockets", "static_files", "openapi", "pages", "access", "api", "config_file",
    "config_text", "app",
)  # fmt: skip
# What takes bytes from a network and gives them to it. A dialect's data is tested without.
TRANSPORT = (
    "starlette", "uvicorn", "asyncio",
    *(f"kqview.server.{part}" for part in ("uvicorn_parts", "security", "sockets")),
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


def used_of(modules: set[str], parents: tuple[str, ...]) -> list[str]:
    """Which of *parents* are among *modules*, or have one of them inside."""
    return [
        parent
        for parent in parents
        if any(module == parent or module.startswith(f"{parent}.") for module in modules)
    ]


@pytest.mark.parametrize("name", [path.stem for path in sorted(SERVER.glob("*.py"))])
def test_part_of_the_server_imports_only_parts_before_it(name: str):
    if name == "__init__":  # it names what is public
        return
    later = tuple(f"kqview.server.{part}" for part in ORDER[ORDER.index(name) + 1 :])
    assert used_of(imported(SERVER / f"{name}.py"), later) == []


@pytest.mark.parametrize(
    "path", sorted(API.rglob("*.py")), ids=lambda path: str(path.relative_to(API))
)
def test_file_of_a_dialect_knows_no_other_dialect_and_no_app(path: Path):
    own = path.relative_to(API).parts[0]
    others = tuple(f"kqview.server.api.{name}" for name in DIALECTS if name != own)
    later = tuple(f"kqview.server.{part}" for part in ORDER[ORDER.index("api") + 1 :])
    assert used_of(imported(path), (*others, *later)) == []


@pytest.mark.parametrize(
    "path",
    sorted(path for path in API.rglob("*.py") if path.stem != "routes"),
    ids=lambda path: str(path.relative_to(API)),
)
def test_data_of_a_dialect_knows_no_transport(path: Path):
    assert used_of(imported(path), TRANSPORT) == []


def test_only_one_file_knows_uvicorn():
    """What is private there can change with every version."""
    found = [path.name for path in SERVER.rglob("*.py") if used_of(imported(path), ("uvicorn",))]
    assert found == ["uvicorn_parts.py"]


def test_import_that_breaks_the_rule_is_found(tmp_path: Path):
    path = tmp_path / "convert.py"
    path.write_text(
        "from kqview.server.api import dream\nfrom kqview.server.sockets import Socket\n"
        "import starlette.requests\nimport asyncio\nfrom kqview.server.errors import Answer\n"
    )
    modules = imported(path)
    assert used_of(modules, ("kqview.server.api.dream",)) == ["kqview.server.api.dream"]
    assert used_of(modules, TRANSPORT) == ["starlette", "asyncio", "kqview.server.sockets"]
