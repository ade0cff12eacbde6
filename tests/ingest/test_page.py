"""The trace page in Chromium, on a receiver with the traces of this folder."""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine, Mod
from kqview.ingest import IngestSettings
from kqview.ingest.settings import web_settings
from kqview.trace import final_ids
from tests.support.browser import PHONE, sync_api, violations
from tests.support.receiving import Receiving, receiving, sqlite_url
from tests.support.traces import SHORT, cut, long_trace, read_trace, short_trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kqview.mods import Added

pytestmark = [pytest.mark.full, pytest.mark.needs("chromium")]

expect = sync_api.expect
LONG = {"middle": 250, "long": 3500}  # steps; half as many tokens again
N_TRACES = len(SHORT) + len(LONG)
LIVE = "#panel .sequence [aria-label='Generated tokens'] .token:not(.future, .erased, .dropped)"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiving]:
    """A receiver with every short trace and a long one, for tests that add none."""
    path = tmp_path_factory.mktemp("traces") / "traces.db"
    with receiving(IngestSettings(database=sqlite_url(path))) as one:
        post(one, *map(short_trace, SHORT))
        post(one, *(long_trace(n, request_id=name) for name, n in LONG.items()))
        yield one


def post(to: Receiving, *payloads: dict[str, Any]) -> None:
    with to.client() as client:
        for payload in payloads:
            assert client.post("/ingest", json=payload).status_code == 201


@pytest.fixture
def page(page: Any) -> Iterator[Any]:
    """A tab whose console stays empty: no refused style, script or address."""
    yield page
    assert [text for text in page.logged if "Failed to load resource" not in text] == []


def show(page: Any, served: Receiving, name: str, tab: str = "tokens") -> None:
    page.goto(f"{served.url}/#/trace/{name}/{tab}")
    expect(page.locator("#panel > *")).to_be_visible()


# ---- tokens


def test_tokens_are_marked_as_forced_or_taken_back(page: Any, served: Receiving):
    show(page, served, "backtrack_with_tokens")
    generated = page.locator("[aria-label='Generated tokens']")
    assert generated.inner_text() == (
        " a red ballbacktrack 2 big ball. nobacktrack 1 wait,backtrack 1. Then"
    )
    assert page.locator(".sequence .forced").all_inner_texts() == [
        " big", " ball", " wait", ",", "."
    ]  # fmt: skip
    assert page.locator(".sequence .erased").all_inner_texts() == [" red", " ball", " no", ","]


@pytest.mark.parametrize("name", ["backtrack_with_tokens", "force_tokens", "force_output"])
def test_scrubber_shows_the_tokens_after_each_event(page: Any, served: Receiving, name: str):
    payload = short_trace(name)
    texts: dict[int, str] = {}
    for one in (*payload["events"], *payload["actions"]):
        ids = one.get("added_tokens") or one.get("tokens") or []
        words = one.get("tokens_as_text") or one.get("details", {}).get("tokens_as_text", [])
        texts |= dict(zip(ids, words, strict=True)) if ids else {}
    show(page, served, name)
    n_events = len(payload["events"])
    for n in [*range(n_events, 0, -1), *range(2, n_events + 1)]:
        page.locator("[type=range]").fill(str(n - 1))
        ids = final_ids(read_trace(cut(payload, n)))
        assert page.locator(LIVE).all_inner_texts() == [texts[one] for one in ids]


def test_playback_runs_to_the_end(page: Any, served: Receiving):
    show(page, served, "middle")
    page.get_by_label("Speed").select_option("5 events/s")
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.locator("[type=range]").fill("748")
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    where = page.locator(".player output")
    expect(where).to_have_text("Added of step 250, event 751 of 751")
    page.get_by_role("button", name="One event back").click()
    expect(where).to_have_text("Sampled of step 250, event 750 of 751")


def test_token_tells_what_it_is_and_what_it_looked_at(page: Any, served: Receiving):
    show(page, served, "plain")
    page.locator(".sequence .token", has_text="ball").hover()
    about = page.get_by_role("complementary", name="About the token")
    for text in ("Step 3", "Id 17", "Probability 0.330", "Rank 2"):
        name, value = text.split()
        row = about.locator("dl > div", has=page.locator("dt", has_text=name))
        expect(row.locator("dd")).to_contain_text(value)
    looked_at = about.locator("h3:text('Looked at') + ol li .name")
    assert looked_at.all_inner_texts() == ['" red"', '"One"', '" Tom"']
    assert sorted(page.locator(".seen").all_inner_texts()) == [" Tom", " red", "One"]
    page.mouse.move(0, 0)
    expect(page.locator(".seen")).to_have_count(0)


def test_colours_follow_the_chosen_figure(page: Any, served: Receiving):
    show(page, served, "plain")
    colours = """nodes => nodes.map(
        (node) => Number(/heat(\\d+)/.exec(node.className)?.[1] ?? 0))"""
    tokens = page.locator("[aria-label='Generated tokens'] .token")
    by_probability = tokens.evaluate_all(colours)
    assert by_probability == [1, 4, 7, 0, 7, 3, 2, 10, 1]  # ten times what is left of 1
    # " saw" is not among the top tokens of the trace.
    page.get_by_label("Colour by").select_option("Attention received")
    by_attention = page.locator(".sequence .token").evaluate_all(colours)
    assert by_attention[0] == 10  # every token looks at the first
    show(page, served, "force_tokens")
    expect(page.locator("option[value=attention]")).to_be_disabled()
    expect(page.locator(".about")).to_contain_text("This trace has no attention")


def test_everything_of_a_trace_works_by_keyboard(page: Any, served: Receiving):
    show(page, served, "backtrack_with_tokens")
    page.get_by_role("listbox").focus()
    for key in ("Home", *["ArrowRight"] * 8):
        page.keyboard.press(key)
    expect(page.locator("[aria-selected=true].mark")).to_have_text("backtrack 2")
    expect(page.locator(".about")).to_contain_text("2 tokens taken back by fix")
    page.keyboard.press("ArrowUp")
    expect(page.locator(".prompt [aria-selected=true]")).to_have_count(1)
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    expect(page.get_by_role("tab", name="Steps")).to_have_attribute("aria-selected", "true")
    expect(page.locator("[data-step='8'][open] > summary")).to_be_focused()
    page.get_by_role("tab", name="Steps").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Metrics")).to_be_focused()
    expect(page.locator("#panel figure").first).to_be_visible()


def test_generation_with_mods_is_shown_as_it_went(page: Any, received: Receiving):
    class Rewrite(Mod):
        def begin(self, request_id: str, tokenizer: Any) -> None:
            self.n = 0

        def on_added(self, event: Added, actions: Any, tokenizer: Any) -> Any:
            self.n += 1
            if self.n == 4:
                return actions.backtrack(2, tokens=ids_of(" a big dog"))
            return actions.force_tokens(ids_of(" Then")) if self.n == 8 else None

    with Engine.demo(n_threads=1) as engine:
        ids_of = functools.partial(engine.tokenize, add_special=False)
        made = engine.generate(
            "One day, Tom", max_tokens=24, temperature=0, mods=[Rewrite], capture="probs"
        )
        for _ in made:
            pass
    trace = made.trace
    assert trace is not None
    with received.client() as client:
        headers = {"content-type": "application/json"}
        assert client.post("/ingest", content=trace.to_json(), headers=headers).status_code == 201
    show(page, received, trace.request.request_id)
    shown = "".join(page.locator(LIVE).all_inner_texts())
    assert shown.replace("↵\n", "\n") == trace.request.final_text
    assert "".join(page.locator(".sequence .forced").all_inner_texts()) == " a big dog Then"
    assert page.locator(".mark").all_inner_texts() == ["backtrack 2"]
    page.locator(LIVE).last.hover()
    expect(page.locator(".about h3:text('Looked at') + ol li")).to_have_count(12)
    assert page.locator(".prompt .token.seen").count() > 0


# ---- steps, metrics, JSON


def test_steps_show_what_mods_did(page: Any, served: Receiving):
    show(page, served, "raising_mod", "steps")
    step = page.locator("[data-step='1']")
    expect(step).to_have_attribute("open", "")  # mods were at work in it
    failed = step.locator(".call.failed").first
    expect(failed).to_contain_text("12.5 ms")
    expect(failed).to_contain_text("ValueError: <img src=x")
    failed.get_by_text("Traceback", exact=True).click()
    expect(failed.locator("pre")).to_contain_text('File "mods/noisy.py", line 7')
    assert failed.locator(".logs li").all_text_contents()[0] == "DEBUGabout to fail"
    expect(page.locator("[data-step='2']")).not_to_have_attribute("open", "")
    expect(page.locator("[data-step='4'] .action")).to_contain_text("takes back 1 token")


def test_steps_are_filtered_and_come_in_pages(page: Any, served: Receiving):
    show(page, served, "raising_mod", "steps")
    steps = page.locator(".step .number")
    page.get_by_label("Show").select_option("With exceptions")
    expect(steps).to_have_text(["0", "1"])
    page.get_by_label("Show").select_option("All steps")
    page.get_by_label("Action").select_option("Backtrack")
    expect(steps).to_have_text(["4"])
    page.get_by_label("Action").select_option("Any")
    page.get_by_label("Search").fill("LINE TWO")
    expect(steps).to_have_text(["1"])
    show(page, served, "middle", "steps/120")
    expect(page.locator("[data-step='120'] > summary")).to_be_focused()
    expect(page.locator(".step")).to_have_count(100)
    page.get_by_role("button", name="Later").click()
    expect(steps.first).to_have_text("200")


def test_metrics_count_tokens_actions_and_time(page: Any, served: Receiving):
    show(page, served, "force_tokens", "metrics")
    bars = page.locator(".bars li")
    assert bars.all_inner_texts() == [
        "Sampled\n3", "Forced\n7", "Kept\n10", "Taken back\n0", "ForceTokens\n6"
    ]  # fmt: skip
    assert page.locator("tbody tr").all_inner_texts() == [  # in the order of their first calls
        "lead\t4\t0.80 ms\t0.20 ms\t0.30 ms\t0.30 ms\t0",
        "late\t3\t0.80 ms\t0.30 ms\t0.40 ms\t0.40 ms\t0",
    ]
    chart = page.get_by_role("img", name="Probability of each sampled token")
    assert chart.get_attribute("aria-label").endswith(
        "mean 0.620, lowest 0.620, highest 0.620, 3 tokens"
    )


def test_json_is_kept_as_it_was_posted(page: Any, served: Receiving):
    show(page, served, "force_output", "raw")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == "force_output.json"
    kept = json.loads(download.value.path().read_text(encoding="utf-8"))
    posted = short_trace("force_output")
    assert kept["events"] == posted["events"]
    assert kept["request"]["final_token_ids"] == posted["request"]["final_token_ids"]


# ---- the list


def test_list_finds_traces(page: Any, served: Receiving):
    page.goto(served.url)
    rows = page.locator(".traces li")
    expect(rows).to_have_count(N_TRACES)
    page.get_by_role("combobox", name=re.compile("^Mod(?!el)")).select_option("undo")
    expect(rows).to_have_count(1)
    rows.first.get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("backtrack_without_tokens")
    page.go_back()
    page.get_by_label("Search").fill("no such text")
    expect(page.get_by_text("No trace matches.")).to_be_visible()
    expect(rows).to_have_count(0)


def test_list_shows_what_arrives_and_comes_in_pages(page: Any, received: Receiving):
    page.goto(received.url)
    expect(page.get_by_text("No traces yet.")).to_be_visible()
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    post(received, *({"request": {"request_id": f"trace {i}/60"}} for i in range(60)))
    rows = page.locator(".traces li")
    newest = page.get_by_role("link", name="trace 59/60")
    expect(newest).to_be_visible()
    page.reload()
    expect(rows).to_have_count(50)
    page.get_by_role("button", name="Older traces").click()
    expect(rows).to_have_count(60)
    newest.click()  # an id may hold what a path may not
    expect(page.get_by_role("heading", level=1)).to_have_text("trace 59/60")


def test_page_says_what_failed_and_tries_again(page: Any, served: Receiving):
    page.route("**/v1/traces*", lambda route: route.abort())
    page.goto(served.url)
    expect(page.get_by_role("alert")).to_contain_text("The receiver does not answer.")
    page.unroute("**/v1/traces*")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".traces li")).to_have_count(N_TRACES)
    page.goto(f"{served.url}/#/trace/none")
    expect(page.get_by_role("alert")).to_contain_text("there is no trace 'none'")


def test_page_asks_for_a_key_where_one_is_needed(page: Any, tmp_path: Path):
    web = web_settings(admin_keys=("the-key",))
    with receiving(IngestSettings(database=sqlite_url(tmp_path / "t.db"), web=web)) as one:
        page.goto(one.url)
        page.get_by_label("API key").fill("the-key")
        page.get_by_role("button", name="Read traces").click()
        expect(page.get_by_text("No traces yet.")).to_be_visible()
        expect(page.get_by_text("Live", exact=True)).to_be_visible()


# ---- all of it


def test_texts_of_a_trace_are_never_markup(page: Any, served: Receiving):
    page.goto(served.url)
    expect(page.locator(".traces")).to_contain_text("demo <i>model</i>")
    for tab in ("tokens", "steps", "metrics", "raw"):
        show(page, served, "raising_mod", tab)
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        if tab == "tokens":
            page.locator(".sequence .token").first.hover()
        expect(page.locator("main")).to_contain_text("<script>window.pwned=1</script>")
        assert page.locator("main").locator("img, script, i").count() == 0
    assert page.evaluate("window.pwned") is None


def test_page_is_accessible_and_fits_a_phone(page: Any, served: Receiving):
    page.set_viewport_size(PHONE)
    page.goto(served.url)
    expect(page.locator(".traces li")).to_have_count(N_TRACES)
    for name, tab in (
        (None, None), ("backtrack_with_tokens", "tokens"), ("raising_mod", "steps"),
        ("plain", "metrics"), ("plain", "raw"),
    ):  # fmt: skip
        if name is not None:
            show(page, served, name, tab or "")
        if tab == "tokens":
            page.locator(".sequence .token").last.click()
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], tab


def test_moving_through_a_long_trace_lays_out_once_a_move(page: Any, served: Receiving):
    show(page, served, "long")
    assert page.locator("[aria-label='Generated tokens'] .token").count() > 5000
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def n_layouts() -> int:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(one["value"] for one in metrics if one["name"] == "LayoutCount")

    before = n_layouts()
    n_moves = page.evaluate("""() => {
        const range = document.querySelector("[type=range]");
        const tokens = document.querySelectorAll(".sequence .token");
        const laidOut = () => document.body.offsetHeight;
        for (let i = 0; i < 100; i++) {
            range.value = 5000 + i;
            range.dispatchEvent(new Event("input"));
            laidOut();
            tokens[i].dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
            laidOut();
        }
        return 200;
    }""")
    assert n_layouts() - before <= 2 * n_moves


def test_strange_details_break_nothing(page: Any, received: Receiving):
    payload = short_trace("backtrack_with_tokens") | {"request": {"request_id": "strange"}}
    strange: list[Any] = ["text", 7, [None, {}], {"positions": "no", "weights": {}}, True]
    names = ("tokens", "tokens_as_text", "attention", "entropy", "n_kept", "tool_calls")
    for i, one in enumerate(payload["events"] + payload["actions"]):
        value = strange[i % len(strange)]
        one["details"] = value if i % 2 else dict.fromkeys(names, value)
        if one.get("event_type") == "ForwardPass":
            one["top_tokens"] = value
        if one.get("action_type") == "Backtrack":
            del one["tokens"], one["tokens_as_text"]
    payload["events"][0]["prompt_length"] = 2**31 - 1  # no prompt that a page could list
    post(received, payload)
    for tab in ("tokens", "steps", "metrics", "raw"):
        show(page, received, "strange", tab)
        if tab == "tokens":
            page.locator(".sequence .token").first.hover()
