"""Viewers of attention draw kqview's rows: the recipes of the page on notebooks, as they stand."""

from __future__ import annotations

import ast
import base64
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kqview import Engine

PAGE = Path(__file__).parents[2] / "src" / "kqview" / "viz" / "README.md"
RECIPES = re.findall(r"^```python not-run\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
TEXT = "Anna has a red ball. Tom has a blue kite."


def needs(package: str) -> pytest.MarkDecorator:
    """Skips a test where *package* is not installed."""
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"{package} is not installed; python -m tests.clients --only bertviz",
    )


@pytest.fixture(scope="module")
def _notebook(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A shell, without which what displays itself prints."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))


def shown(package: str) -> str:
    """The HTML that the recipe of *package* displays, as the last line of a cell too."""
    from IPython.utils.capture import capture_output

    (recipe,) = [one for one in RECIPES if f"import {package}" in one or f"from {package}" in one]
    *body, last = ast.parse(recipe).body
    assert isinstance(last, ast.Expr)
    names: dict[str, Any] = {}
    with capture_output() as captured:
        exec(compile(ast.Module(body, []), package, "exec"), names)
        value = eval(compile(ast.Expression(last.value), package, "eval"), names)
    html = [one.data.get("text/html", "") for one in captured.outputs]
    if value is not None:
        html.append(getattr(value, "local_src", None) or value._repr_html_())
    return "".join(html) + "".join(
        one.data.get("application/javascript", "") for one in captured.outputs
    )


@pytest.fixture(scope="module")
def expected() -> tuple[np.ndarray[Any, Any], list[str]]:
    with Engine.demo() as engine:
        attention = engine.attend(TEXT)
        rows = attention.array()
        assert isinstance(rows, np.ndarray)
        return rows.copy(), attention.column_texts


def numbers_after(html: str, key: str) -> np.ndarray[Any, Any]:
    """The JSON array behind *key*."""
    start = html.index("[", html.index(key))
    return np.array(json.JSONDecoder().raw_decode(html, start)[0])


@needs("bertviz")
@pytest.mark.usefixtures("_notebook")
def test_bertviz_gets_the_rows_of_each_layer(expected: tuple[Any, list[str]]) -> None:
    html = shown("bertviz")
    rows, texts = expected
    np.testing.assert_allclose(numbers_after(html, '"attn": '), rows[[1, 2]], atol=1e-3)
    assert json.dumps(texts[-3:])[1:-1] in html


@needs("circuitsvis")
@pytest.mark.usefixtures("_notebook")
def test_circuitsvis_gets_the_heads_of_a_layer(expected: tuple[Any, list[str]]) -> None:
    html = shown("circuitsvis")
    rows, texts = expected
    np.testing.assert_allclose(numbers_after(html, '"attention": '), rows[1], atol=1e-3)
    assert json.dumps(texts[-3:])[1:-1] in html


@needs("inspectus")
@pytest.mark.usefixtures("_notebook")
def test_inspectus_gets_the_last_rows(expected: tuple[Any, list[str]]) -> None:
    html = shown("inspectus")
    rows, texts = expected
    data = json.JSONDecoder().raw_decode(html, html.index('{"attention"'))[0]
    assert [one["info"] for one in data["attention"][:2]] == [
        {"layer": 0, "head": 0}, {"layer": 0, "head": 1},
    ]  # fmt: skip
    assert len(data["attention"]) == rows.shape[0] * rows.shape[1]
    for one, head in zip(data["attention"], rows.reshape(-1, *rows.shape[2:]), strict=True):
        values = np.frombuffer(base64.b64decode(one["values"]), np.float32)
        np.testing.assert_allclose(values.reshape(8, -1), head[-8:], atol=1e-6)
    assert {len(data["src_tokens"]), len(data["tgt_tokens"])} == {8, len(texts)}
