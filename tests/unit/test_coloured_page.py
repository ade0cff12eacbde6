"""Tokens coloured by attention in a browser: pointer, keys, choices, dark pages, no script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview.coloured.html import document
from kqview.viz import coloured, to_html
from tests.support.browser import PHONE, sync_api, violations

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.full, pytest.mark.needs("chromium")]
expect = sync_api.expect

TEXTS = ["<s>", " Anna", " has", " a", " red", " ball"]
TITLE = "What the tokens looked at"


def shares() -> np.ndarray:
    """2 layers, 2 heads, 3 queries: head 1 of layer 1 looks at what is named below, others at 0."""
    values = np.zeros((2, 2, 3, 6), np.float32)
    values[..., 0] = 1.0
    for query, column in enumerate((1, 2, 4)):
        values[1, 1, query, 0] = 0.25
        values[1, 1, query, column] = 0.75
    return values


@pytest.fixture
def html() -> str:
    return coloured(shares(), TEXTS, title=TITLE).html


@pytest.fixture
def shown(page: Any, html: str) -> Any:
    page.set_content(document(html, "Attention"))
    return page


def chosen(page: Any) -> None:
    """Choose the head that looks at something."""
    page.get_by_label("Layer").select_option(label="1")
    page.get_by_label("Head").select_option(label="1")


def heat(page: Any, text: str) -> str:
    return page.locator(".token").nth(TEXTS.index(text)).get_attribute("class")


def listed(page: Any) -> list[str]:
    """The tokens that were looked at most, between their neighbours."""
    return [" ".join(text.split()) for text in page.locator("li").all_inner_texts()]


def test_head_of_a_layer_shows_what_all_tokens_looked_at(shown: Any) -> None:
    expect(shown.get_by_label("Head")).to_be_disabled()
    chosen(shown)
    expect(shown.get_by_role("status")).to_have_text(
        "All 3 tokens together looked most at “Anna”, 25 %"
    )
    assert listed(shown) == [
        "<s> “Anna” has 25 %", "<s> Anna “has” a 25 %", "has a “red” ball 25 %",
    ]  # fmt: skip
    assert [heat(shown, text) for text in TEXTS] == [
        "token", "token heat10", "token heat10", "token", "token heat10", "token",
    ]  # fmt: skip
    shown.get_by_label("Head").select_option(label="0")
    expect(shown.get_by_role("status")).to_have_text(
        "All 3 tokens together looked at nothing else."
    )


def test_first_token_is_left_out_until_asked_for(shown: Any) -> None:
    chosen(shown)
    assert heat(shown, "<s>") == "token"
    shown.get_by_label("Leave out the first token").uncheck()
    assert heat(shown, "<s>") == "token heat10"


def test_pointer_shows_what_a_token_looked_at_and_a_click_holds_it(shown: Any) -> None:
    chosen(shown)
    status = shown.get_by_role("status")
    ball = shown.get_by_role("button", name="ball")
    ball.hover()
    expect(status).to_have_text("“ball” (3 of 3) looked most at “red”, 75 %")
    shown.get_by_label("Layer").hover()
    expect(status).to_contain_text("All 3 tokens")
    ball.click()
    shown.get_by_label("Layer").hover()
    expect(status).to_contain_text("“ball”")
    expect(ball).to_have_attribute("aria-pressed", "true")
    ball.click()
    shown.get_by_label("Layer").hover()
    expect(status).to_contain_text("All 3 tokens")


def test_keys_move_between_tokens_and_hold_one(shown: Any) -> None:
    chosen(shown)
    status = shown.get_by_role("status")
    shown.get_by_label("Leave out the first token").focus()
    shown.keyboard.press("Tab")
    expect(status).to_contain_text("“a” (1 of 3) looked most at “Anna”")
    shown.keyboard.press("ArrowRight")
    expect(status).to_contain_text("“red” (2 of 3) looked most at “has”")
    shown.keyboard.press("End")
    expect(status).to_contain_text("“ball” (3 of 3)")
    shown.keyboard.press("ArrowRight")  # there is none
    expect(status).to_contain_text("“ball” (3 of 3)")
    shown.keyboard.press("Enter")
    shown.keyboard.press("Home")
    expect(status).to_contain_text("“a” (1 of 3)")
    shown.keyboard.press("Shift+Tab")
    expect(status).to_contain_text("“ball” (3 of 3)")
    shown.keyboard.press("Tab")
    shown.keyboard.press("Escape")
    shown.keyboard.press("Shift+Tab")
    expect(status).to_contain_text("All 3 tokens")


def test_axe_finds_nothing_light_or_dark(shown: Any) -> None:
    chosen(shown)
    shown.get_by_role("button", name="ball").click()
    assert violations(shown) == []


def test_text_is_legible_on_the_hottest_colour_of_either_scheme(shown: Any) -> None:
    for scheme in ("light", "dark"):
        shown.emulate_media(color_scheme=scheme)
        assert contrast(shown) >= 4.5, scheme


def contrast(page: Any) -> float:
    """Contrast of text with the hottest colour on the page's own."""
    return page.evaluate(
        """() => {
            const host = document.querySelector('.kqview-attention');
            const probe = document.createElement('span');
            probe.className = 'token heat10';
            host.shadowRoot.append(probe);
            const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
            const page = numbers(getComputedStyle(document.documentElement).backgroundColor);
            const text = numbers(getComputedStyle(probe).color);
            const [r, g, b, part = 1] = numbers(getComputedStyle(probe).backgroundColor);
            probe.remove();
            const mixed = [r, g, b].map((c, i) => c * part + page[i] * (1 - part));
            const light = (colour) => colour.slice(0, 3)
                .map((c) => c / 255)
                .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
                .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
            const [low, high] = [light(text), light(mixed)].sort((a, b) => a - b);
            return (high + 0.05) / (low + 0.05);
        }"""
    )


def test_phone_needs_no_scrolling_to_the_side(shown: Any) -> None:
    shown.set_viewport_size(PHONE)
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_long_text_scrolls_and_keys_reach_it(page: Any) -> None:
    values = np.full((1, 2, 900), 1 / 900, np.float32)
    texts = [f" token{i}" for i in range(900)]
    page.set_content(document(coloured(values, texts, title="").html, TITLE))
    box = page.get_by_role("group", name="Text")
    expect(box).to_have_attribute("tabindex", "")
    assert box.evaluate("box => box.clientHeight < 500 && box.scrollHeight > 1000")
    assert violations(page) == []


@pytest.mark.parametrize("place", ["replaced", "appended"])
def test_outputs_of_a_notebook_come_alive_one_by_one(page: Any, html: str, place: str) -> None:
    # HTML is set, then each script is made again: in its place as in JupyterLab, or at the end and
    # for a moment as in VS Code. Their styles do not reach the view.
    page.set_content("<style>p, span, li { color: red !important; display: none }</style><body>")
    for _ in range(2):
        page.evaluate(
            """([html, place]) => {
                const output = document.createElement('div');
                output.innerHTML = html;
                document.body.append(output);
                for (const script of output.querySelectorAll('script')) {
                    const again = document.createElement('script');
                    for (const one of script.attributes) again.setAttribute(one.name, one.value);
                    again.textContent = script.textContent;
                    if (place === 'replaced') script.replaceWith(again);
                    else output.appendChild(again).remove();
                }
            }""",
            [html, place],
        )
    assert page.locator(".kqview-attention").count() == 2
    for output in page.locator(".kqview-attention").all():
        output.get_by_label("Layer").select_option(label="1")
        expect(output.get_by_role("status")).to_be_visible()
        expect(output.get_by_role("status")).to_contain_text("“Anna”, 12 %")
    # Keys that act in here must not act on the cells of JupyterLab.
    assert page.locator("[data-lm-suppress-shortcuts=true]").count() == 2


def test_file_opens_without_network_and_its_policy_lets_its_script_run(
    page: Any, tmp_path: Path
) -> None:
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    path = to_html(tmp_path / "x.html", shares(), TEXTS, title=TITLE)
    page.goto(path.as_uri())
    expect(page.get_by_role("status")).to_be_visible()
    expect(page).to_have_title(TITLE)
    assert requested == [path.as_uri()]
    assert page.logged == []


def test_without_script_the_picture_is_still(browser: Any, tmp_path: Path) -> None:
    path = to_html(tmp_path / "x.html", shares(), TEXTS, title=TITLE)
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(path.as_uri())
        expect(page.get_by_text("“Anna” 6.2 %")).to_be_visible()
        expect(page.get_by_text("does not run its script")).to_be_visible()


def test_wide_rows_are_read_as_they_were_written(page: Any) -> None:
    values = np.zeros((1, 2, 300), np.float32)
    values[0, 1, [0, 7, 299]] = [0.5, 0.1, 0.4]
    texts = [f" t{i}" for i in range(300)]
    html = coloured(values, texts, title=TITLE, max_bytes=1024).html
    page.set_content(document(html, TITLE))
    expect(page.locator(".note", has_text="largest shares are kept")).to_be_visible()
    page.get_by_label("Layer").select_option(label="0")
    page.get_by_label("Head").select_option(label="1")
    assert listed(page) == ["t297 t298 “t299” 40 %", "t5 t6 “t7” t8 10 %"]
