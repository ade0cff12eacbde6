"""The chat page in Chromium, on a server with two models."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview.demo import MODEL_PATH
from kqview.server import Settings
from kqview.server.apps.mia4 import turn as mia4_turn
from kqview.server.apps.mia4.turn import StreamedTurn
from kqview.server.config import Config, Llm, ModelConfig, Persona, SystemPrompt, Ui
from kqview.server.models.model_entry import ModelEntry as ServedModel
from tests.support.browser import PHONE, sync_api, violations
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.serving import Served

pytestmark = [pytest.mark.full, pytest.mark.needs("chromium")]
expect = sync_api.expect

SYSTEM = "You tell stories."
HOSTILE = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>"
Frames = list[tuple[str, dict[str, Any]]]


def config_of(**more: Any) -> Config:
    given: dict[str, Any] = {
        "settings": Settings(n_slots=2, n_threads=1),
        "models": {
            "first": ModelConfig(path=str(MODEL_PATH), system_prompt=SystemPrompt(text=SYSTEM)),
            "second": ModelConfig(path=str(MODEL_PATH)),
        },
        "llm": Llm(reasoning_presets={"low": {"temperature": 0.1}, "high": {"temperature": 0.9}}),
    }
    return Config(**{**given, **more})


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(config_of()) as one:
        yield one


@contextlib.contextmanager
def serving_page(page: Any, config: Config | None = None) -> Iterator[Served]:
    """A server of one test, which the page leaves before it ends: it follows its events."""
    with serving(config or config_of()) as one:
        yield one
        page.goto("about:blank")


@pytest.fixture
def page(page: Any) -> Iterator[Any]:
    """A tab whose console stays empty but for refused requests: no script, style or address."""
    yield page
    assert [text for text in page.logged if "Failed to load resource" not in text] == []


def show(page: Any, served: Served, *, tokens: int = 12) -> None:
    """A new chat whose answers are short and always the same."""
    kept = json.dumps({"temperature": 0, "max_output_tokens": tokens})
    script = f"sessionStorage['kqview-chat-settings'] ??= {json.dumps(kept)}"
    page.add_init_script(f"if (location.protocol === 'http:') {script}")
    page.goto(f"{served.url}/chat")
    expect(page.locator("#top option")).to_have_count(2)


def ask(page: Any, text: str = "Tom found a red ball.") -> Any:
    """Send a message, and wait for the end of its answer."""
    n_before = page.locator(".usage:visible, .problem").count()
    begin(page, text)
    expect(page.locator(".usage:visible, .problem")).to_have_count(n_before + 1)
    return page.locator(".answer").last


def begin(page: Any, text: str = "Tom found a red ball.") -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")


def toggle(page: Any, name: str) -> Any:
    page.get_by_role("button", name=name, exact=True).click()
    panel = page.get_by_role("complementary", name=name)
    expect(panel).to_be_visible()
    return panel


def heats(page: Any, tokens: str) -> list[int]:
    return page.locator(tokens).evaluate_all(
        "nodes => nodes.map((n) => Number(/heat(\\d+)/.exec(n.className)?.[1] ?? 0))"
    )


def answered(page: Any, frames: Frames) -> None:
    """Let the next answer be *frames*, as no model here writes them."""
    named = [*frames, ("end", {"request_id": "r", "status": "ok", "stop_reason": "stop"})]
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in named)
    page.route(
        "**/generate",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
        times=1,
    )


# ---- a conversation


def test_conversation_by_keyboard_alone(page: Any, served: Served):
    show(page, served)
    message = page.get_by_role("textbox", name="Message")
    expect(message).to_be_focused()
    page.keyboard.type("Tom found")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("a red ball.")
    assert message.input_value() == "Tom found\na red ball."
    page.keyboard.press("Enter")
    expect(page.locator(".usage")).to_contain_text("12 tokens")
    expect(page.locator(".usage")).to_contain_text("cut at the most tokens")
    expect(message).to_be_focused()
    expect(message).to_have_value("")
    answer = page.locator(".answer > .text").inner_text()
    assert len(answer.split()) > 3
    expect(page.get_by_role("status").last).to_have_text(f"Answer: {answer}")
    page.keyboard.type("And then?")
    page.keyboard.press("Enter")
    expect(page.locator(".usage")).to_have_count(2)
    # The model reads both turns, so the server keeps them: a turn once its answer has been sent.
    served.wait_until(lambda: len(kept_messages(page, served)) == 4)
    said = [one["content"] for one in kept_messages(page, served)]
    assert said[0] == "Tom found\na red ball."
    assert said[1] == answer
    assert said[2] == "And then?"
    # From the message back to the top, and all of it can be seen to have the focus.
    names: list[str] = []
    for _ in range(30):
        page.keyboard.press("Shift+Tab")
        name, outline = page.evaluate("""() => {
            const { activeElement: one } = document;
            const label = one.getAttribute("aria-label") ?? one.textContent;
            return [label, getComputedStyle(one).outlineStyle];
        }""")
        if name == "Skip to the message":
            break
        names.append(name)
        assert outline != "none", name
    assert {"Conversation", "Settings", "Attention", "Model", "New chat"} <= set(names)
    page.keyboard.press("Enter")
    expect(message).to_be_focused()


def kept_messages(page: Any, served: Served) -> list[dict[str, Any]]:
    session = page.evaluate("decodeURIComponent(location.hash.slice(2))")
    with served.client() as client:
        return client.get(f"/chat/sessions/{session}").json()["messages"]


def test_model_preset_and_overrides_are_sent(page: Any, served: Served):
    show(page, served)
    page.get_by_role("combobox", name="Model").select_option("second")
    panel = toggle(page, "Settings")
    expect(panel.get_by_role("listitem")).to_have_count(2)
    expect(panel.get_by_role("listitem").get_by_role("button")).to_have_count(0)  # for admins only
    panel.get_by_label("Reasoning preset").select_option("low")
    panel.get_by_label("Top k").fill("7")
    with page.expect_request("**/generate") as sent:
        ask(page)
    body = sent.value.post_data_json
    assert body["model"] == "second"
    assert body["overrides"] == {
        "temperature": 0, "max_output_tokens": 12, "top_k": 7, "reasoning_preset": "low",
    }  # fmt: skip
    expect(page.locator("#top .note")).to_have_text("loaded")
    page.reload()  # what was chosen stays, and so does the conversation
    expect(page.locator(".answer")).to_have_count(1)
    expect(page.get_by_role("combobox", name="Model")).to_have_value("second")
    expect(toggle(page, "Settings").get_by_label("Top k")).to_have_value("7")
    panel.get_by_role("button", name="Use the defaults").click()
    with page.expect_request("**/generate") as sent:
        ask(page)
    assert sent.value.post_data_json["overrides"] == {}


def test_error_is_shown_with_its_code_and_tried_again(page: Any, served: Served):
    show(page, served)
    panel = toggle(page, "Settings")
    panel.get_by_label("Temperature").fill("-1")
    ask(page)
    problem = page.get_by_role("alert")
    expect(problem.locator("code")).to_have_text(re.compile("^[A-Z_]+$"))
    expect(problem).to_contain_text("overrides.temperature")
    panel.get_by_label("Temperature").fill("0")
    problem.get_by_role("button", name="Try again").click()
    expect(page.locator(".usage:visible")).to_have_count(1)
    expect(problem).to_have_count(0)
    assert page.locator(".user").count() == 1
    failed = {"code": "DECODE_FAILED", "error_type": "server_error", "message": "it failed"}
    answered(page, [("token", {"text": "Half", "seq": 0}), ("error", failed)])
    begin(page)
    expect(problem.locator("code")).to_have_text("DECODE_FAILED")
    expect(page.locator(".answer > .text").last).to_have_text("Half")  # what came stays


def test_reasoning_folds_out_and_streams_before_the_answer(page: Any, served: Served):
    show(page, served)
    usage = {"prompt_tokens": 3, "output_tokens": 4, "latency_ms": 9, "decode_tps": 1.0,
             "reasoning_tokens": 2, "reasoning_ratio": 0.5}  # fmt: skip
    thought = [{"text": one, "seq": i} for i, one in enumerate(["Who", " is it?"])]
    answered(
        page,
        [*(("analysis", one) for one in thought), ("token", {"text": "Tom."}), ("usage", usage)],
    )
    answer = ask(page)
    expect(answer.locator("> .text")).to_have_text("Tom.")
    thoughts = answer.locator(".reasoning .text")
    expect(thoughts).to_be_hidden()
    answer.get_by_text("Reasoning, 2 tokens").click()
    expect(thoughts).to_have_text("Who is it?")
    expect(answer.locator(".usage")).to_contain_text("50 % reasoning")
    answered(
        page,
        [("token", {"text": "Anna."}), ("reasoning", {"reasoning": "At once."}), ("usage", usage)],
    )
    answer = ask(page)
    answer.get_by_text("Reasoning, 2 tokens").click()
    expect(answer.locator(".reasoning .text")).to_have_text("At once.")


# ---- what can be done with a turn


def test_answer_is_regenerated_and_a_message_edited(page: Any, served: Served):
    show(page, served)
    ask(page, "Tom found a red ball.")
    ask(page, "And then?")
    served.wait_until(lambda: len(kept_messages(page, served)) == 4)
    answer = page.locator(".answer").last
    with page.expect_request("**/generate") as sent:
        answer.hover()
        answer.get_by_role("button", name="Regenerate").click()
    assert sent.value.post_data_json["replaces"] == 2
    assert sent.value.post_data_json["prompt"] == "And then?"
    expect(page.locator(".usage:visible")).to_have_count(2)
    served.wait_until(lambda: len(kept_messages(page, served)) == 4)
    first = page.locator(".user").first
    first.hover()
    first.get_by_role("button", name="Edit").click()
    message = page.get_by_role("textbox", name="Message")
    expect(message).to_have_value("Tom found a red ball.")
    page.keyboard.press("Escape")  # leaves it
    expect(message).to_have_value("")
    first.get_by_role("button", name="Edit").click()
    message.fill("Anna found a key.")
    page.keyboard.press("Enter")
    expect(page.locator(".user")).to_have_text(["Anna found a key."])
    expect(page.locator(".usage:visible")).to_have_count(1)
    served.wait_until(lambda: len(kept_messages(page, served)) == 2)
    kept = kept_messages(page, served)
    assert kept[0]["content"] == "Anna found a key."
    expect(page.locator("#sessions [aria-current]")).to_have_text("Anna found a key.")
    page.reload()
    expect(page.locator(".answer > .text")).to_have_text(kept[1]["content"])


def test_answer_is_copied_and_a_conversation_exported(page: Any, served: Served):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    show(page, served)
    answer = ask(page)
    text = answer.locator("> .text").inner_text()
    answer.hover()
    answer.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("status").last).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == text
    served.wait_until(lambda: len(kept_messages(page, served)) == 2)
    panel = toggle(page, "Settings")
    with page.expect_download() as got:
        panel.get_by_role("button", name="Export as Markdown").click()
    assert got.value.suggested_filename == "Tom-found-a-red-ball.md"
    lines = got.value.path().read_text("utf-8").splitlines()
    assert lines == [
        "# Tom found a red ball.", "", "## You", "", "Tom found a red ball.", "", "## Answer", "",
        *text.splitlines(),
    ]  # fmt: skip


def test_system_prompt_of_the_settings_is_the_models(page: Any, served: Served):
    show(page, served)
    toggle(page, "Settings").get_by_label("System prompt").fill("Be a pirate.")
    panel = toggle(page, "Attention")
    with page.expect_request("**/generate") as sent:
        ask(page)
    assert sent.value.post_data_json["system"] == "Be a pirate."
    prompt = panel.get_by_role("region", name="Prompt as the model saw it")
    shown = prompt.text_content().replace("↵\n", "\n")
    assert "system\nBe a pirate.<|im_end|>" in shown
    assert SYSTEM not in shown


def test_sentences_open_the_passage_of_their_source(page: Any, served: Served):
    show(page, served, tokens=40)
    panel = toggle(page, "Sources")
    text = panel.get_by_label("Text")
    texts = ["Anna 🎈 has a red ball. Her dog is old.", "Tom found a silver key."]
    for one in texts:
        text.fill(one)
        panel.get_by_role("button", name="Add").click()
    with page.expect_response("**/generate") as got:
        answer = ask(page)
    frames = [
        json.loads(line[6:]) for line in got.value.text().splitlines() if "cited_text" in line
    ]
    assert frames
    signs = answer.locator(".cite")
    expect(signs).to_have_text([str(1 + one["document_index"]) for one in frames])
    shown = answer.locator("> .text").evaluate(
        """node => [...node.querySelectorAll(".cite")].map((sign) => {
            const range = document.createRange();
            range.setStart(node, 0);
            range.setEndBefore(sign);
            const copy = range.cloneContents();
            copy.querySelectorAll(".cite").forEach((one) => one.remove());
            return [...copy.textContent.trimEnd()].length;
        })"""
    )
    assert shown == [one["end_index"] for one in frames]  # each behind its sentence
    for i, one in enumerate(frames):
        signs.nth(i).click()
        expect(panel.locator("mark")).to_have_text(one["cited_text"])
        shown = panel.get_by_role("region", name="Source")
        expect(shown).to_have_text(texts[one["document_index"]])
    panel.get_by_role("button", name="Remove").first.click()
    panel.get_by_role("button", name="Remove").click()
    with page.expect_request("**/generate") as sent:
        ask(page)
    assert "documents" not in sent.value.post_data_json


# ---- attention


def test_grid_of_heads_chooses_one(page: Any, served: Served):
    show(page, served)
    panel = toggle(page, "Attention")
    with page.expect_request("**/generate") as sent:
        ask(page)
    expect(panel.locator(".what .note")).to_have_text("mean of 12 tokens")
    name = sent.value.headers["x-request-id"]
    peaks = np.mean([row_of(served, name, n)[:, :, 1:].max(axis=-1) for n in range(12)], axis=0)
    cells = panel.locator(".heads span")
    expect(cells).to_have_count(peaks.size)
    want = [int(one) for one in np.floor(10 * np.sqrt(peaks.ravel()) + 0.5)]
    served.wait_until(lambda: heats(page, "#panel .heads span") == want)
    cells.nth(8 + 3).click()
    expect(page.get_by_role("combobox", name="Layer")).to_have_value("1")
    expect(page.get_by_role("combobox", name="Head")).to_have_value("3")
    expect(cells.nth(8 + 3)).to_have_class(re.compile("chosen"))


def test_marks_of_the_template_are_left_out(page: Any, served: Served):
    show(page, served)
    panel = toggle(page, "Attention")
    ask(page)
    expect(panel.locator(".what .note")).to_have_text("mean of 12 tokens")
    prompt = panel.locator(".prompt .token")
    marks = panel.locator(".prompt .special")
    served.wait_until(lambda: sum(heats(page, "#panel .prompt .special")) > 0)
    page.get_by_label("Leave out the template's marks").check()
    served.wait_until(lambda: sum(heats(page, "#panel .prompt .special")) == 0)
    assert marks.count() > 3
    shown = zip(prompt.all_text_contents(), heats(page, "#panel .prompt .token"), strict=True)
    hot = {text for text, heat in shown if heat}
    assert hot
    assert not hot & {"user", "system", "assistant", "↵\n"}


def test_prompt_is_coloured_by_what_the_answer_looked_at(page: Any, served: Served):
    show(page, served)
    panel = toggle(page, "Attention")
    with page.expect_request("**/generate") as sent:
        ask(page, "Tom found a red ball.")
    expect(panel.locator(".what .note")).to_have_text("mean of 12 tokens")
    prompt = panel.get_by_role("region", name="Prompt as the model saw it")
    shown = prompt.text_content().replace("↵\n", "\n")
    assert f"system\n{SYSTEM}<|im_end|>" in shown
    assert "user\nTom found a red ball.<|im_end|>" in shown
    name = sent.value.headers["x-request-id"]
    rows = [row_of(served, name, n) for n in range(12)]
    n_prompt = rows[0].shape[-1]
    assert prompt.locator(".token").count() == n_prompt
    expected = np.mean([row[:, :, :n_prompt].mean(axis=(0, 1)) for row in rows], axis=0)
    served.wait_until(lambda: heats(page, "#panel .token") == heat_of(expected))
    assert sum(heats(page, "#turns .token")) == 0
    page.get_by_label("Leave out the first token").uncheck()
    served.wait_until(lambda: heats(page, "#panel .token") == heat_of(expected, with_first=True))
    page.get_by_role("combobox", name="Layer").select_option("2")
    page.get_by_role("combobox", name="Head").select_option("5")
    one = np.mean([row[2, 5, :n_prompt] for row in rows], axis=0)
    served.wait_until(lambda: heats(page, "#panel .token") == heat_of(one, with_first=True))


def test_token_shows_what_it_looked_at(page: Any, served: Served):
    show(page, served)
    panel = toggle(page, "Attention")
    with page.expect_request("**/generate") as sent:
        answer = ask(page)
    what = panel.locator(".what")
    tokens = answer.locator(".token")
    tokens.nth(6).hover()
    expect(what).to_contain_text("token 7 of 12")
    row = row_of(served, sent.value.headers["x-request-id"], 6).mean(axis=(0, 1))
    expected = heat_of(row)
    both = "#panel .token, #turns .token"
    n_after = 12 - 6

    def seen() -> list[int]:
        return heats(page, "#panel .token") + heats(page, "#turns .token")

    served.wait_until(lambda: seen() == expected + [0] * n_after)
    assert page.locator(both).count() == len(row) + n_after
    top = json.loads(panel.locator(".bars li .name").first.inner_text())
    texts = [*panel.locator(".prompt .token").all_text_contents(), *tokens.all_text_contents()]
    hottest = [
        text.replace("↵\n", "\n") for text, heat in zip(texts, seen(), strict=False) if heat == 10
    ]
    assert top in hottest
    page.mouse.move(0, 0)
    expect(what).to_contain_text("What the whole answer looked at")
    tokens.nth(2).click()  # stays
    page.mouse.move(0, 0)
    expect(what).to_contain_text("token 3 of 12")
    slider = panel.get_by_label("Token of the answer")
    assert slider.input_value() == "3"
    # By keyboard: along the answer, and along the slider.
    answer.locator(".token[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(what).to_contain_text("token 3 of 12")
    page.keyboard.press("End")
    expect(what).to_contain_text("token 12 of 12")
    expect(slider).to_have_attribute("aria-valuetext", re.compile("^12 of 12"))
    slider.focus()
    page.keyboard.press("Home")
    expect(what).to_contain_text("What the whole answer looked at")


def row_of(served: Served, request_id: str, n: int) -> np.ndarray[Any, Any]:
    with served.client() as client:
        reply = client.get(f"/generate/{request_id}/attention/{n}")
    shape = [int(one) for one in reply.headers["x-attention-shape"].split(",")]
    return np.frombuffer(reply.content, "<f2").reshape(shape).astype(np.float64)


def heat_of(weights: np.ndarray[Any, Any], *, with_first: bool = False) -> list[int]:
    shown = weights.copy()
    shown[0] *= with_first
    return [int(one) for one in np.floor(10 * np.sqrt(shown / shown.max()) + 0.5)]


# ---- what goes on in the server


@contextlib.contextmanager
def held_at(phase: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A server that stays in *phase* of an answer until the event is set or it is cancelled."""
    opened = threading.Event()
    n_tokens = 3 if phase == "answer" else 0
    load, written = ServedModel.load, mia4_turn._written

    async def slow_load(self: ServedModel, progress: Callable[[float], object]) -> None:
        self.progress = 0.25
        progress(0.25)
        while not opened.is_set():  # noqa: ASYNC110 -- another thread sets it
            await asyncio.sleep(0.01)
        await load(self, progress)

    async def slowly_written(service: Any, n_bytes: int, write: Any, *args: Any) -> Any:
        turn = getattr(write, "__self__", None)
        if isinstance(turn, StreamedTurn) and args and args[0].token.index >= n_tokens:
            while not (opened.is_set() or turn.run.is_over):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return await written(service, n_bytes, write, *args)

    if phase == "loading":
        monkeypatch.setattr(ServedModel, "load", slow_load)
    else:
        monkeypatch.setattr(mia4_turn, "_written", slowly_written)
    try:
        yield opened
    finally:
        opened.set()


def test_answer_is_stopped_while_its_model_loads(page: Any, monkeypatch: pytest.MonkeyPatch):
    with serving_page(page) as fresh:
        show(page, fresh)
        expect(page.locator("#top .note")).to_have_text("loads when it is first used")
        with held_at("loading", monkeypatch) as go_on:
            begin(page)
            expect(page.locator(".state:visible")).to_have_text("Loading first")
            expect(page.locator(".state:visible progress")).to_have_attribute("value", "0.25")
            expect(page.locator("#top .note")).to_have_text("loading, 25 %")
            page.get_by_role("button", name="Stop").click()
            expect(page.get_by_role("button", name="Send")).to_be_visible()
            begin(page)
            expect(page.locator(".state:visible")).to_have_text("Loading first")
            go_on.set()
            expect(page.locator(".usage").last).to_contain_text("12 tokens")
        expect(page.locator("#top .note")).to_have_text("loaded")
        expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.parametrize(
    ("phase", "how"), [("prefill", "Escape"), ("answer", "Escape"), ("answer", "button")]
)
def test_answer_is_stopped_before_and_after_its_first_token(
    page: Any, served: Served, monkeypatch: pytest.MonkeyPatch, phase: str, how: str
):
    show(page, served)
    with held_at(phase, monkeypatch):
        begin(page)
        if phase == "prefill":
            served.wait_run()
        else:
            expect(page.locator(".answer > .text")).not_to_be_empty()
        if how == "Escape":
            page.keyboard.press("Escape")
        else:
            page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)
    served.wait_idle()
    if phase == "answer":
        expect(page.locator(".usage")).to_contain_text("stopped")
    ask(page)  # and all goes on
    expect(page.get_by_role("alert")).to_have_count(0)


def test_page_goes_on_after_a_restart_of_the_server(page: Any):
    settings = Settings(n_slots=1, n_threads=1, shutdown_grace_s=1)
    away = page.get_by_text("The server does not answer. Trying again …")
    with serving(config_of(settings=settings)) as first:
        show(page, first)
        ask(page)
    expect(away).to_be_visible()
    ask(page)
    expect(page.get_by_role("alert").locator("code")).to_have_text("OFFLINE")
    with serving(config_of(), port=int(first.url.rpartition(":")[2])):
        expect(away).to_be_hidden()
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".usage:visible")).to_have_count(2)
        page.goto("about:blank")


def test_tab_that_nobody_sees_holds_no_connection(page: Any, served: Served):
    show(page, served)
    ask(page)
    bus = served.service.bus
    served.wait_until(lambda: len(bus.subscriptions) == 1)
    see = """hidden => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(see, True)
    served.wait_until(lambda: len(bus.subscriptions) == 0)
    with page.expect_request("**/chat/sessions"):  # what it missed
        page.evaluate(see, False)
    served.wait_until(lambda: len(bus.subscriptions) == 1)


# ---- conversations


def test_conversations_are_listed_opened_and_deleted(page: Any):
    with serving_page(page) as one:
        show(page, one)
        listed = page.get_by_role("navigation", name="Conversations")
        expect(listed).to_contain_text("Conversations that you begin are listed here.")
        ask(page, "About Tom.")
        tom = page.locator(".answer > .text").inner_text()
        page.get_by_role("button", name="New chat").click()
        expect(page.get_by_role("heading", name="What shall the model write?")).to_be_visible()
        ask(page, "About Anna.")
        links = listed.get_by_role("listitem").get_by_role("link")
        expect(links).to_have_text(["About Anna.", "About Tom."])
        expect(links.first).to_have_attribute("aria-current", "page")
        links.nth(1).click()
        expect(page.locator(".user")).to_have_text("About Tom.")
        expect(page.locator(".answer > .text")).to_have_text(tom)
        assert page.title() == "About Tom. – kqview"
        page.get_by_role("button", name="Delete About Tom.").click()
        page.get_by_role("button", name="Keep it").click()
        expect(links).to_have_count(2)
        page.get_by_role("button", name="Delete About Tom.").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(links).to_have_text(["About Anna."])
        expect(page.get_by_role("heading", name="What shall the model write?")).to_be_visible()
        page.go_back()
        expect(page.get_by_role("alert")).to_contain_text("there is no session")
        page.evaluate("location.hash = '#/%'")  # broken
        expect(page.get_by_role("heading", name="What shall the model write?")).to_be_visible()


def test_admins_load_pin_and_unload_models(page: Any):
    settings = Settings(n_slots=1, n_threads=1, admin_keys=("boss",))
    with serving_page(page, config_of(settings=settings, ui=Ui(mode="admin"))) as one:
        show(page, one)
        panel = toggle(page, "Settings")
        state = panel.get_by_role("listitem").filter(has_text="second").locator(".note")
        expect(state).to_have_text("loads when it is first used")
        panel.get_by_role("button", name="Load second").click()
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("API key")
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        key.fill("boss")
        key.press("Enter")
        expect(alert).to_have_count(0)
        panel.get_by_role("button", name="Pin second").click()
        expect(state).to_have_text("loaded, pinned")
        panel.get_by_role("button", name="Unpin second").click()
        expect(state).to_have_text("loaded")
        panel.get_by_role("button", name="Unload second").click()
        expect(state).to_have_text("loads when it is first used")


def test_page_asks_for_a_key_and_keeps_it_for_the_tab(page: Any):
    settings = Settings(n_slots=1, n_threads=1, api_keys=("sesame",))
    with serving_page(page, config_of(settings=settings)) as one:
        page.goto(f"{one.url}/chat")
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        key.fill("wrong")
        key.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("unknown")
        key.fill("sesame")
        key.press("Enter")
        expect(page.get_by_role("heading", name="What shall the model write?")).to_be_visible()
        ask(page)
        expect(page.get_by_role("alert")).to_have_count(0)
        assert page.evaluate("Object.values(localStorage).join()") == ""
        page.reload()
        expect(page.locator(".answer")).to_have_count(1)


# ---- all of it


def test_what_models_and_users_write_is_never_markup(page: Any, tmp_path: Path):
    persona = tmp_path / "persona.txt"
    persona.write_text(HOSTILE)
    models = {
        HOSTILE[:40]: ModelConfig(path=str(MODEL_PATH)),
        "second": ModelConfig(path=str(MODEL_PATH)),
    }
    hostile = config_of(models=models, persona=Persona(file=str(persona)))
    with serving_page(page, hostile) as one:
        show(page, one)
        toggle(page, "Attention")
        ask(page, HOSTILE)
        expect(page.locator("#panel .prompt")).to_contain_text("<script>")
        toggle(page, "Settings")
        failed = {"code": HOSTILE, "message": HOSTILE}
        text = f"{HOSTILE} **{HOSTILE}** `{HOSTILE}`\n# {HOSTILE}\n```{HOSTILE}\n{HOSTILE}\n```\n"
        frames = [("analysis", {"text": text}), ("token", {"text": text}), ("error", failed)]
        answered(page, frames)
        begin(page, HOSTILE)
        expect(page.get_by_role("alert")).to_contain_text(HOSTILE)
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        page.get_by_role("button", name=f"Delete {HOSTILE[:20]}").first.click()
        expect(page.get_by_role("dialog")).to_contain_text("<img")
        assert page.locator("body img, body script:not([src])").count() == 0
        assert page.evaluate("window.pwned") is None


def test_text_of_a_model_is_set_as_it_means(page: Any, served: Served):
    show(page, served)
    pieces = ["# Sm", "all heading\n\nSome **bo", "ld** and `co", "de`; 2 ** 3 ** 4.\n\n`", "`",
              "`py", "thon\nif a < b:\n    pass\n``", "`\nAfter ``` it\n- one"]  # fmt: skip
    answered(page, [("token", {"text": one}) for one in pieces])
    begin(page)
    text = page.locator(".answer > .text")
    expect(text).to_contain_text("- one")
    expect(text.locator(".heading")).to_have_text("Small heading", use_inner_text=True)
    expect(text.locator("strong")).to_have_text("bold")
    expect(text.locator(".block code")).to_have_text("code")
    expect(text.get_by_role("group", name="Code: python")).to_have_text("if a < b:\n    pass\n")
    assert text.inner_text().endswith("After ``` it\n- one")
    assert "2 ** 3 ** 4." in text.inner_text()


def test_long_answer_is_laid_out_a_few_times_only(page: Any, served: Served):
    show(page, served)
    token = {"text": " word", "attention": "/generate/none/attention/0"}
    end = {"text": ".\n\n"}
    n = 8000
    answered(page, [("token", end if i % 80 == 79 else token) for i in range(n)])
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def metric(name: str) -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(one["value"] for one in metrics if one["name"] == name)

    before = metric("LayoutCount")
    begin(page)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(".answer .block")).to_have_count(n // 80)
    assert metric("LayoutCount") - before < n / 20


def test_page_is_accessible_and_fits_a_phone(page: Any, served: Served):
    page.set_viewport_size(PHONE)
    show(page, served)
    for state in ("empty", "answer", "attention", "settings", "menu"):
        if state == "answer":
            answered(
                page,
                [("analysis", {"text": "Hm."}), ("token", {"text": f"```\n{'x' * 200}\n```\n"})],
            )
            begin(page, "w" * 100)
            page.locator(".reasoning summary").click()
            expect(page.get_by_role("button", name="Send")).to_be_visible()
        elif state == "attention":
            toggle(page, "Attention")
            ask(page)
            expect(page.locator("#panel .bars li").first).to_be_visible()
        elif state == "settings":
            toggle(page, "Settings")
        elif state == "menu":
            page.get_by_role("button", name="Close Settings").click()
            page.get_by_role("button", name="Conversations").click()
            expect(page.get_by_role("navigation", name="Conversations")).to_be_visible()
        assert violations(page) == [], state
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], state
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Conversations")).to_be_focused()
