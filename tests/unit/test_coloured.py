"""Tokens coloured by attention: what a page has of the rows, what it leaves out, and its text."""

from __future__ import annotations

import base64
import json
import os
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Token
from kqview.coloured.encode import LEAST_KEPT, N_TEXTS_MAX
from kqview.coloured.html import CELL_BYTES, coloured_html
from kqview.coloured.rows import QueryRow, Rows, rows_of_array, rows_of_tokens
from kqview.errors import InvalidCapture, RequestError
from kqview.types.token import Context
from kqview.viz import coloured, to_html

if TYPE_CHECKING:
    from pathlib import Path

# A share is stored as the root of itself in 8 bits.
STEP = 1 / 255


def data_of(html: str) -> dict[str, Any]:
    """What the script of a page reads."""
    found = re.search(r'<script type="application/json">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])


def planes_of(data: dict[str, Any]) -> list[np.ndarray]:
    """The shares of each row of a page, ``(n_planes, n_columns)``."""
    values = np.frombuffer(base64.b64decode(data["values"]), np.uint8)
    positions = np.frombuffer(base64.b64decode(data["positions"]), "<u2")
    n_planes = 1 + sum(1 + len(heads) for _, heads in data["layers"])
    rows: list[np.ndarray] = []
    start = 0
    for n_columns in data["nColumns"]:
        n = data["nKept"] or n_columns
        shares = (values[start : start + n_planes * n].reshape(n_planes, n) / 255.0) ** 2
        if data["nKept"]:
            places = positions[start : start + n_planes * n].reshape(n_planes, n)
            whole = np.zeros((n_planes, n_columns))
            for plane in range(n_planes):
                np.add.at(whole[plane], places[plane], shares[plane])
            shares = whole
        rows.append(shares)
        start += n_planes * n
    assert start == len(values)
    return rows


def probs(*shape: int) -> np.ndarray:
    values = np.random.default_rng(7).random(shape, np.float32) ** 8
    return values / values.sum(axis=-1, keepdims=True)


def tokens(n: int, n_prompt: int = 6, **capture: Any) -> list[Token]:
    """Tokens of 2 layers and 3 heads."""
    made: list[Token] = []
    for i in range(n):
        token = Token(id=i, text=f" t{i}", index=i, attention=probs(2, 3, n_prompt + i))
        if capture:
            token.capture = Capture(**capture)
        made.append(token)
    return made


def test_page_has_the_shares_of_every_head_and_their_means():
    made = tokens(4)
    data = data_of(coloured_html(rows_of_tokens(made), title="T"))
    assert data["layers"] == [[0, [0, 1, 2]], [1, [0, 1, 2]]]
    assert data["at"] == data["nColumns"] == [6, 7, 8, 9]
    assert data["notes"] == []
    for token, planes in zip(made, planes_of(data), strict=True):
        rows = token.rows
        expected = [rows.mean((0, 1))]
        for layer in rows:
            expected += [layer.mean(0), *layer]
        assert np.abs(np.sqrt(planes) - np.sqrt(np.array(expected))).max() <= STEP / 2 + 1e-6


def test_layers_and_heads_are_named_as_in_the_model():
    made = tokens(2, kind="probs", layers=(5, 9), heads=(0, 2, 7))
    data = data_of(coloured_html(rows_of_tokens(made), title="T"))
    assert data["layers"] == [[5, [0, 2, 7]], [9, [0, 2, 7]]]


def test_reduced_rows_have_layers_without_heads():
    made = tokens(2, kind="probs", layers=(5, 9), reduce="max_heads")
    for token in made:
        token.attention = token.rows.max(axis=1)
    data = data_of(coloured_html(rows_of_tokens(made), title="T"))
    assert data["layers"] == [[5, []], [9, []]]
    assert data["notes"] == ["A layer shows the largest share among its heads."]
    np.testing.assert_allclose(planes_of(data)[0][1], made[0].rows[0], atol=STEP)


def test_largest_values_are_shown_in_their_columns():
    token = Token(0, "x", 0, attention=np.array([[[0.5, 0.25]]], np.float32))
    token.attention_positions = np.array([[[4, 1]]], np.int32)
    token.capture = Capture("probs", top_k=2)
    (planes,) = planes_of(data_of(coloured_html(rows_of_tokens([token]), title="T")))
    np.testing.assert_allclose(planes[0], [0, 0.25, 0, 0, 0.5], atol=STEP)


def test_columns_that_a_shift_discarded_are_empty():
    token = Token(0, "x", 0, attention=np.full((1, 1, 4), 0.25, np.float32))
    token.discarded = range(1, 3)
    (planes,) = planes_of(data_of(coloured_html(rows_of_tokens([token]), title="T")))
    np.testing.assert_allclose(planes[0], [0.25, 0, 0, 0.25, 0.25, 0.25], atol=STEP)


def test_scores_go_through_a_softmax_and_products_are_refused():
    scores = np.array([[0.0, np.log(3.0), -np.inf, -np.inf], [0.0, 0.0, 0.0, -np.inf]])
    data = data_of(coloured(scores, kind="scores", causal=False).html)
    np.testing.assert_allclose(planes_of(data)[0][0], [0.25, 0.75, 0, 0], atol=STEP)
    assert "softmax" in data["notes"][0]
    with pytest.raises(InvalidCapture, match='"qk" are not shares'):
        coloured(scores, kind="qk")


def test_query_of_an_array_sees_itself_and_what_is_before_it():
    data = data_of(coloured(probs(2, 3, 3, 5)).html)
    assert (data["at"], data["nColumns"]) == ([2, 3, 4], [3, 4, 5])
    both_ways = data_of(coloured(probs(2, 3, 3, 5), causal=False).html)
    assert both_ways["nColumns"] == [5, 5, 5]


# ---- what is left out


def wide(n_rows: int, n_layers: int, n_heads: int, n_columns: int) -> Rows:
    """Rows that share their memory, so that they may be many."""
    layer = probs(n_heads, n_columns)
    rows = [QueryRow([layer] * n_layers, n_columns) for _ in range(n_rows)]
    texts = [f" {i}" for i in range(n_columns)]
    return Rows(texts, [n_columns - n_rows + i for i in range(n_rows)], rows)


def test_four_thousand_tokens_with_all_heads_stay_small_and_keep_the_largest_shares():
    rows = wide(12, 24, 16, 4096)
    html = coloured_html(rows, title="T")
    data = data_of(html)
    assert len(data["values"]) + len(data["positions"]) <= CELL_BYTES
    assert len(html) < CELL_BYTES + (1 << 20)
    n = data["nKept"]
    assert n >= LEAST_KEPT
    assert data["notes"] == [
        f"Of each row, the {n} largest shares are kept; the others count as 0."
    ]
    assert [len(heads) for _, heads in data["layers"]] == [16] * 24
    head = rows.rows[0].layers[0][3]
    plane = planes_of(data)[0][2 + 3]
    assert set(np.flatnonzero(plane)) == set(np.argsort(-head)[:n])
    np.testing.assert_allclose(np.sqrt(plane[plane > 0].max()), np.sqrt(head.max()), atol=STEP)


@pytest.mark.parametrize(
    ("max_bytes", "n_planes", "notes"),
    [
        (120_000, 1 + 24 * 17, ["Of each row"]),
        (60_000, 1 + 24, ["Single heads", "Of each row"]),
        (2_000, 1, ["Layers and heads", "Of each row"]),
        (1_024, 1, ["rows are left out", "Layers and heads", "Of each row"]),
    ],
)
def test_less_room_leaves_more_out_and_says_so(max_bytes: int, n_planes: int, notes: list[str]):
    n_rows = 8 if max_bytes > 100_000 else 40
    html = coloured_html(wide(n_rows, 24, 16, 512), title="T", max_bytes=max_bytes)
    data = data_of(html)
    assert len(data["values"]) + len(data["positions"]) <= max_bytes + 8  # padding of base64
    assert 1 + sum(1 + len(heads) for _, heads in data["layers"]) == n_planes
    assert len(data["notes"]) == len(notes)
    for note, expected in zip(data["notes"], notes, strict=True):
        assert expected in note
        assert note in Still.of(html).text
    assert planes_of(data)[-1].max() > 0


def test_context_longer_than_a_page_keeps_its_end():
    n = N_TEXTS_MAX + 100
    data = data_of(coloured_html(wide(2, 1, 1, n), title="T"))
    assert data["notes"][0] == "The first 100 tokens are left out."
    assert len(data["texts"]) == N_TEXTS_MAX
    assert data["texts"][0] == " 100"
    assert data["nColumns"] == [N_TEXTS_MAX] * 2
    assert data["at"] == [N_TEXTS_MAX - 2, N_TEXTS_MAX - 1]
    assert data["hasFirst"] is False


def test_rows_of_tokens_that_are_left_out_leave_the_text():
    rows = wide(2, 1, 1, N_TEXTS_MAX + 100)
    rows.at = [0, 1]
    assert "The first 100 tokens are left out." in coloured_html(rows, title="T")


# ---- text


class Still(HTMLParser):
    """What JupyterLab leaves of a page that is not trusted: no script, no attribute but styles."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.coloured: list[str] = []
        self._inside: list[str] = []

    @classmethod
    def of(cls, html: str) -> Still:
        made = cls()
        made.feed(html)
        made.close()
        return made

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside.append(tag)
        style = dict(attrs).get("style") or ""
        if tag == "span" and "background-color:rgba(255,140,0," in style:
            self.coloured.append("")
            assert re.search(r"border-bottom:[1-4]px solid #\w{6}", style)

    def handle_endtag(self, tag: str) -> None:
        assert self._inside.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self._inside:
            return
        self.text += data
        if self._inside[-1] == "span":
            self.coloured[-1] += data


def test_without_script_there_is_a_picture_with_the_largest_shares_in_words():
    values = np.zeros((1, 1, 1, 4), np.float32)
    values[..., :] = [0.6, 0.3, 0.0, 0.1]
    still = Still.of(coloured(values, ["<s>", " red", " a", " ball"]).html)
    assert still.coloured == [" red", " ball"]  # not the first, which makes others pale
    assert "“red” 30 %, “ball” 10 %" in still.text
    assert "does not run its script" in still.text


def test_text_of_the_model_is_text_wherever_it_is():
    bad = [
        "</script><script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "&lt;",
        "\u202e",
        "\n",
    ]
    html = coloured(probs(1, 1, 5, 5), bad, title="<b>T</b>").html
    assert html.count("<script") == 2
    assert "<img" not in html
    assert "<b>T" not in html
    still = Still.of(html)
    assert "</script><script>alert(1)</script>" in still.text
    assert "&lt;" in still.text
    assert "\u202e" not in html
    assert data_of(html)["texts"][3:] == [r"\u202e", "↵\n"]


def test_page_loads_nothing(tmp_path: Path):
    html = to_html(tmp_path / "x.html", tokens(3)).read_text("utf-8")
    assert re.findall(r"https?:|\bsrc=|\burl\(|@import|\bfetch\(", html) == []
    assert "default-src 'none'" in html


def test_character_of_several_tokens_is_the_text_of_the_last():
    pieces = {i: bytes([byte]) for i, byte in enumerate("😀".encode())}
    assert Context([], 0, 1, pieces).texts_of([0, 1, 2, 3]) == ["", "", "", "😀"]
    assert Context([], 0, 1, pieces).texts_of([0, 1]) == ["", "\ufffd"]
    assert Context([], 0, 1, pieces).texts_of([9]) == ["#9"]


# ---- files and errors


def test_file_is_a_page_with_the_same_content(tmp_path: Path):
    path = to_html(tmp_path / "x.html", tokens(3), title="A & B")
    html = path.read_text("utf-8")
    assert coloured(tokens(3), title="").html in html
    assert html.startswith("<!doctype html>")
    assert "<title>A &amp; B</title>" in html
    assert "<h1>A &amp; B</h1>" in html


def test_file_stays_when_there_is_nothing_to_draw(tmp_path: Path):
    path = tmp_path / "x.html"
    path.write_text("old")
    with pytest.raises(RequestError, match="no rows"):
        to_html(path, [])
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.html"]


@pytest.mark.parametrize("name", ["x", "x.png", "x.html.gz"])
def test_other_suffixes_are_refused(tmp_path: Path, name: str):
    with pytest.raises(RequestError, match=r"ends in \.html") as caught:
        to_html(tmp_path / name, tokens(3))
    assert caught.value.parameter == "path"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("attention", "texts", "parameter", "message"),
    [
        ([], None, "attention", "no rows"),
        ([1, 2], None, "attention", "1 in it; pass a list of tokens"),
        ("text", None, "attention", "pass a list of tokens"),
        (3.0, None, "attention", "pass tokens, a generation"),
        (np.ones(3), None, "attention", r"shape \(3,\)"),
        (np.ones((4, 3)), None, "attention", "4 queries .* 3 tokens"),
        (np.full((2, 3), 1.5), None, "attention", "values from 0 to 1.5"),
        (np.full((2, 3), np.nan), None, "attention", "values from nan"),
        (np.ones((2, 3)), ["a"], "tokens", "tokens has 1 .* 3 columns"),
        (tokens(2), ["a"] * 5, "tokens", "tokens has 5 .* 7 columns"),
        (tokens(2), ["a"] * 9, "tokens", "tokens has 9 .* 7 columns"),
        ([*tokens(1), Token(0, "x", 0, attention=probs(1, 1, 4))], None, "attention", "captures"),
    ],
)
def test_what_cannot_be_coloured_is_refused(
    attention: Any, texts: Any, parameter: str, message: str
):
    with pytest.raises(RequestError, match=message) as caught:
        coloured(attention, texts)
    assert caught.value.parameter == parameter


def test_sums_over_spans_are_refused():
    token = Token(0, "x", 0, attention=np.ones((1, 1, 1)), capture=Capture(spans=[(0, 2)]))
    with pytest.raises(InvalidCapture, match="capture without spans"):
        coloured([token])


def test_rows_hold_views_of_an_array():
    array = probs(2, 3, 4, 7)
    for row in rows_of_array(array).rows:
        assert all(np.shares_memory(layer, array) for layer in row.whole("probs"))
