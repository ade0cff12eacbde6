"""The pages say what is so: examples print what they show, links lead to something."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.support.pages import ROOT, has_examples, pages, run_page

if TYPE_CHECKING:
    from pathlib import Path

PAGES = {str(page.relative_to(ROOT)): page for page in pages()}
CODE = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"\]\((?P<target>[^()\s:#]*)(?:#(?P<anchor>[^()\s]+))?\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.M)


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return CODE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = [re.sub(r"\]\([^)]*\)", "", title).lower() for title in HEADING.findall(prose(page))]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in titles}


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.needs("node")] if "```js\n" in text else [])
        for name, page in PAGES.items()
        if has_examples(page) and (text := page.read_text(encoding="utf-8"))
    ],
)
def test_examples_of_a_page_print_what_it_shows(name: str) -> None:
    for module in (
        "typer",
        "starlette",
        "jinja2",
        "llguidance",
        "pydantic",
        "websockets",
        "sqlalchemy",
        "openai",
        "anthropic",
        "matplotlib",
    ):
        pytest.importorskip(module)
    wrong = [
        f"{name}:{outcome.line}\n{outcome.code}\nprinted:\n{outcome.printed}"
        for outcome in run_page(PAGES[name])
        if not outcome.is_as_shown
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", PAGES)
def test_links_of_a_page_lead_to_a_file_and_a_heading(name: str) -> None:
    page = PAGES[name]
    broken: list[str] = []
    for link in LINK.finditer(prose(page)):
        target = (page.parent / link["target"]) if link["target"] else page
        if not target.exists() or (
            link["anchor"] and target.suffix == ".md" and link["anchor"] not in anchors(target)
        ):
            broken.append(link[0])
    assert broken == []


@pytest.mark.parametrize("name", PAGES)
def test_paths_that_a_page_names_exist(name: str) -> None:
    own = re.findall(r"`((?:src/kqview|cpp|tests|bench|vendor)/[\w./-]+)`", prose(PAGES[name]))
    assert [path for path in own if not any(ROOT.glob(f"{path.rstrip('/')}*"))] == []


@pytest.mark.parametrize("name", PAGES)
def test_page_names_only_commands_and_scripts_that_exist(name: str) -> None:
    pytest.importorskip("typer")
    from typer.main import get_command

    from kqview.cli.main import app

    text = PAGES[name].read_text(encoding="utf-8")
    commands = set(getattr(get_command(app), "commands", {}))
    typed = [*CODE.findall(text), *re.findall(r"`kqview [^`]*`", prose(PAGES[name]))]
    named = set(
        re.findall(r"(?:^|\$ |bin/|`)kqview ([a-z]+(?:-[a-z]+)*)\b", "\n".join(typed), re.M)
    )
    scripts = set(re.findall(r"\bpython3? ((?:bench|tests|vendor)/[\w/]+\.py)", text))
    modules = set(re.findall(r"\bpython3? -m (tests(?:\.\w+)+)", text))
    assert named - commands == set()
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
    parts = [ROOT / module.replace(".", "/") for module in modules]
    assert [m for m in parts if not m.with_suffix(".py").is_file() and not m.is_dir()] == []
