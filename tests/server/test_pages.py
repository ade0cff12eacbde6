"""The server's own pages in a real browser: they say what runs and draw a generation."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kqview.server import Settings
from tests.support import pages
from tests.support.browser import PHONE, sync_api, violations

if TYPE_CHECKING:
    from tests.support.serving import Serve, Served

pytestmark = [pytest.mark.full, pytest.mark.needs("chromium")]
expect = sync_api.expect


@pytest.fixture
def generated(page: Any, demo: Served) -> Any:
    """The start page after a generation."""
    generate(page, demo)
    return page


def generate(page: Any, served: Served, prompt: str | None = None) -> None:
    page.goto(served.url)
    expect(page.locator("#facts")).to_be_visible()
    if prompt is not None:
        page.get_by_label("Prompt").fill(prompt)
    page.get_by_label("Tokens").fill("24")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#code")).to_be_visible()


def heats(page: Any, tokens: str = ".token") -> list[int]:
    return page.locator(tokens).evaluate_all(
        "nodes => nodes.map((n) => Number(/heat(\\d+)/.exec(n.className)?.[1] ?? 0))"
    )


def test_start_page_says_what_runs_and_colours_what_it_generates(generated: Any, demo: Served):
    page = generated
    expect(page.locator("#status")).to_have_text("Running: kqview demo")
    expect(page.locator("#facts")).to_contain_text("4 × 8")
    expect(page.get_by_label("API key")).to_be_hidden()
    prompt = page.get_by_label("Prompt").input_value()
    ids = demo.engine.tokenize(prompt, add_special=True)
    given = page.locator(".token.given").all_inner_texts()
    assert len(given) == len(ids)
    assert "".join(given[1:]) == prompt  # after the one that begins each text
    found = heats(page)
    assert found[0] == 0  # left out, however much it got
    assert max(found) == 10
    assert found[-1] == 0  # nothing came after it that could look at it
    page.get_by_label("Leave out the first token").uncheck()
    expect(page.locator(".token").first).to_have_class(re.compile("heat10"))
    assert page.logged == []


def test_token_of_the_start_page_tells_what_it_looked_at(generated: Any):
    page = generated
    page.locator(".token:not(.given)").nth(5).hover()
    expect(page.locator(".what")).to_contain_text("token 6 of 24")
    n_given = page.locator(".token.given").count()
    found = heats(page)
    assert sum(found[n_given + 5 :]) == 0  # what came after it was not there
    assert max(found[: n_given + 5]) == 10
    top = page.locator(".bars li .name").first.inner_text()
    texts = page.locator(".token").all_text_contents()
    hottest = [
        text.replace("↵\n", "\n") for text, heat in zip(texts, found, strict=True) if heat == 10
    ]
    assert json.loads(top) in hottest
    page.mouse.move(0, 0)
    expect(page.locator(".what")).to_contain_text("What all tokens looked at")
    page.get_by_label("Generated token").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".what")).to_contain_text("token 1 of 24")
    page.locator(".token[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".what")).to_contain_text("token 2 of 24")


def test_layer_and_head_are_chosen_in_the_grid_or_by_name(generated: Any, demo: Served):
    page = generated
    before = heats(page)
    grid = page.get_by_role("img", name="4 layers from top to bottom, 8 heads from left to right")
    layer, head = (page.get_by_role("combobox", name=name) for name in ("Layer", "Head"))
    box = grid.bounding_box()
    grid.click(position={"x": box["width"] * 2.5 / 8, "y": box["height"] * 3.5 / 4})
    expect(layer).to_have_value("3")
    expect(head).to_have_value("2")
    expect(page.locator("#code pre")).to_contain_text('"attention_layers":[3]')
    demo.wait_until(lambda: heats(page) != before)
    layer.select_option("Mean of all")
    head.select_option("Mean of all")
    expect(page.locator("#code pre")).not_to_contain_text("attention_layers")
    demo.wait_until(lambda: heats(page) == before)


def test_programs_of_the_start_page_run(page: Any, demo: Served):
    generate(page, demo, 'Anna\'s "cat" $HOME \\ é\nThen')
    code = page.locator("#code pre")
    shell = code.inner_text()
    assert shell.startswith("curl -N ")
    if shutil.which("curl") is not None:
        assert run(["bash", "-c", shell]).count('"type":"token"') == 24
    page.get_by_role("button", name="Python").click()
    lines = run([sys.executable, "-c", code.inner_text()]).splitlines()
    assert len(lines) == 24
    n_prompt = page.locator(".token.given").count()
    assert lines[0].endswith(f" (4, 8, {n_prompt})")
    if (node := pages.node()) is not None:
        page.get_by_role("button", name="JavaScript").click()
        source = code.inner_text()
        assert run([node, "--input-type=module", "-e", source]).count(f"[ 4, 8, {n_prompt} ]") == 1


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_start_page_asks_for_a_key_where_one_is_needed(page: Any, serve: Serve):
    served = serve(Settings(demo=True, api_keys=("sesame",), n_threads=1))
    page.goto(served.url)
    page.get_by_label("API key").fill("sesame")
    page.get_by_label("API key").press("Tab")
    expect(page.locator("#facts")).to_be_visible()
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#code pre")).to_contain_text('-H "X-Api-Key: $KQVIEW_KEY"')


def test_start_page_says_what_was_refused(page: Any, demo: Served):
    page.goto(demo.url)
    page.get_by_label("Prompt").fill("word " * 3000)
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".what.bad")).to_contain_text("512")


def test_pages_are_accessible_and_fit_a_phone(page: Any, demo: Served):
    page.set_viewport_size(PHONE)
    generate(page, demo)
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def opened(page: Any, served: Served, name: str) -> Any:
    """A route of the docs page, open."""
    page.goto(f"{served.url}/docs#{name}")
    page.reload()  # the address alone may be that of the page already
    box = page.locator(f"details[id='{name}']")
    expect(box).to_have_attribute("open", "")
    return box


def test_docs_page_tells_what_every_field_is(page: Any, demo: Served):
    box = opened(page, demo, "POST /v1/messages")
    field = box.locator(".fields > div", has=page.get_by_text("top_k", exact=True)).first
    expect(field).to_contain_text("Keep the k most probable tokens")
    expect(field).to_contain_text("default 40, such as 20")
    inner = box.locator("details.inner", has_text="Fields of Attention").first
    inner.locator("summary").click()
    expect(inner.locator(".fields > div").first).to_contain_text("What rows hold")
    failures = box.locator("details.inner", has_text="Failures")
    failures.locator("summary").first.click()
    expect(failures).to_contain_text("The request is wrong")
    box = opened(page, demo, "POST /slots/{id_slot}")
    expect(box).to_contain_text("Index of the slot, such as 0.")
    assert page.logged == []


def test_docs_page_draws_messages_in_their_order(page: Any, demo: Served):
    described = page.request.get(f"{demo.url}/openapi.json").json()
    sockets = described["x-websockets"]
    assert len(sockets) == 2
    for path, socket in sockets.items():
        box = opened(page, demo, f"WS {path}")
        drawn = box.locator(".sequence > ol > li")
        expect(drawn).to_contain_text([one["about"] for one in socket["messages"]])
        for i, one in enumerate(socket["messages"]):
            row = drawn.nth(i)
            expect(row).to_have_class(re.compile(rf"\b{one['from']}\b"))
            expect(row).to_contain_text("binary frame" if "binary" in one else "text frame")
        row = drawn.nth(0)
        row.locator("summary").first.click()
        expect(row.locator("pre")).to_contain_text('"prompt": "Anna is a"')
        expect(row.locator(".fields > div").first).to_be_visible()
    box = opened(page, demo, "POST /v1/chat/completions")
    events = described["paths"]["/v1/chat/completions"]["post"]["x-events"]
    expect(box.locator(".sequence > ol > li")).to_contain_text(
        ["The request", *(one["about"] for one in events)]
    )
    assert page.logged == []


def test_docs_page_finds_routes(page: Any, demo: Served):
    page.goto(f"{demo.url}/docs")
    page.get_by_label("Find a route").fill("GET /v1/attention")
    expect(page.locator("#n-found")).to_have_text("2 found")
    expect(page.locator("details.route:visible")).to_have_count(2)
    expect(page.locator("section:visible")).to_have_count(1)
    page.get_by_label("Find a route").fill("")
    expect(page.get_by_role("heading", name="mia4")).to_be_visible()


def test_docs_page_works_by_keyboard_is_accessible_and_fits_a_phone(page: Any, demo: Served):
    page.set_viewport_size(PHONE)
    box = opened(page, demo, "POST /generate")
    box.locator(".sequence summary").first.focus()
    page.keyboard.press("Enter")
    expect(box.locator(".sequence pre")).to_be_visible()
    page.keyboard.press("Tab")  # its example, which may have to be scrolled
    page.keyboard.press("Tab")  # the next message
    page.keyboard.press("Enter")
    expect(box.locator(".sequence li").nth(1).locator("pre")).to_be_visible()
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.logged == []
