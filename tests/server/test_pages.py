"""The server's own pages in a real browser: they say what runs and draw a generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kqview.server import Settings
from tests.support.browser import needs_browser

if TYPE_CHECKING:
    from tests.support.serving import Serve, Served

pytestmark = needs_browser


def test_start_page_says_what_runs_and_draws_what_it_generates(page: Any, demo: Served):
    page.goto(demo.url)
    page.wait_for_selector("#facts:not([hidden])")
    assert page.inner_text("#status") == "Running: kqview demo"
    assert "4 × 8" in page.inner_text("#facts")
    assert not page.is_visible("#key")
    page.click("button")
    page.wait_for_selector("button:not([disabled])")
    prompt = page.input_value("#prompt")
    assert len(page.inner_text("#text")) > len(prompt) + 10
    drawn = page.evaluate("""() => {
        const canvas = document.getElementById("rows");
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let inked = 0;
        for (let i = 3; i < data.length; i += 4) inked += data[i] > 0;
        return [canvas.width, canvas.height, inked];
    }""")
    width, height, inked = drawn
    # Row i has the columns before token i; probabilities above 0 are ink.
    n_prompt = width - height + 1
    assert n_prompt == len(demo.engine.tokenize(prompt))
    assert inked > 0.9 * sum(n_prompt + i for i in range(height))
    assert page.logged == []


def test_start_page_asks_for_a_key_where_one_is_needed(page: Any, serve: Serve):
    served = serve(Settings(demo=True, api_keys=("sesame",), n_threads=1))
    page.goto(served.url)
    page.wait_for_selector("#key", state="visible")
    page.fill("#key", "sesame")
    page.press("#key", "Tab")
    page.wait_for_selector("#facts:not([hidden])")
    page.click("button")
    page.wait_for_selector("#rows:not([hidden])")


def test_docs_page_lists_every_route_with_its_fields(page: Any, demo: Served):
    page.goto(f"{demo.url}/docs")
    page.wait_for_selector("details")
    shown = page.inner_text("#routes")
    for path in ("/api/extra/generate/stream", "/api/v1/generate", "/api/v1/generate/stream"):
        assert path in shown
    page.get_by_text("/api/v1/tokenize", exact=True).click()
    page.get_by_text("add_special_tokens").first.wait_for(state="visible")
    assert page.logged == []
