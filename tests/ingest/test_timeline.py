"""timeline.js, which the trace page is built on: what was added, taken back, and looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kqview.ingest
from kqview.ingest.payload import Posted
from kqview.trace import final_ids
from tests.support.browser import open_tab
from tests.support.traces import SHORT, cut, long_trace, read_trace, short_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.full, pytest.mark.needs("chromium")]

SOURCE = (Path(kqview.ingest.__path__[0]) / "static" / "timeline.js").read_text(encoding="utf-8")
IMPORT = (
    "const { timelineOf } = await import(`data:text/javascript,${encodeURIComponent(source)}`);"
)
READ = f"""async ([source, payload]) => {{
    {IMPORT}
    const {{ tokens, erasures, finalIds, prompt, hasAttention }} = timelineOf(JSON.parse(payload));
    return {{
        finalIds, hasAttention,
        prompt: prompt.map(({{ text, received }}) => ({{ text, received }})),
        erasures: erasures.map(({{ at, n, before }}) => ({{ at, n, before }})),
        tokens: tokens.map((token) => ({{
            ...token, died: token.died === Infinity ? null : token.died, forward: null,
            attention: token.attention?.map((one) => [one.token.text, one.weight]),
        }})),
    }};
}}"""
# The ids after each event.
READ_IDS = f"""async ([source, payload]) => {{
    {IMPORT}
    const {{ events, tokens }} = timelineOf(JSON.parse(payload));
    const isLive = (one, at) => one.born <= at && at < one.died && one.isOutput;
    return events.map((_, at) => tokens.filter((one) => isLive(one, at)).map((one) => one.id));
}}"""


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Any]:
    """One tab for all: nothing here changes it."""
    with open_tab(browser) as tab:
        yield tab


def timeline(page: Any, payload: dict[str, Any]) -> Any:
    return page.evaluate(READ, [SOURCE, json.dumps(payload)])


def shown(found: Any) -> list[str]:
    """Tokens by their texts: "+" forced, "-" taken back, "." no output."""
    return [
        "+" * token["isForced"]
        + "-" * (token["died"] is not None)
        + "." * (not token["isOutput"])
        + token["text"].strip()
        for token in found["tokens"]
    ]


@pytest.mark.parametrize("name", SHORT)
def test_ids_are_those_of_the_request_and_of_the_replay(page: Any, name: str):
    payload = short_trace(name)
    wanted = payload["request"]["final_token_ids"]
    assert timeline(page, payload)["finalIds"] == wanted
    assert final_ids(read_trace(payload)) == wanted


def test_ids_after_every_event_of_long_traces_are_those_of_the_replay(page: Any):
    for seed in range(3):
        payload = long_trace(100, seed=seed)
        found = page.evaluate(READ_IDS, [SOURCE, json.dumps(payload)])
        assert found[-1] == payload["request"]["final_token_ids"]
        for n_events in range(1, len(found) + 1, 7):
            trace = read_trace(cut(payload, n_events))
            assert found[n_events - 1] == final_ids(trace)


def test_backtracks_tokens_come_once_whatever_event_it_answers(page: Any):
    found = timeline(page, short_trace("backtrack_with_tokens"))
    assert shown(found) == [
        "a", "-red", "-ball", "+big", "+ball", ".", "-no", "+wait", "+-,", "+.", "Then"
    ]  # fmt: skip
    # Its mark stands behind the tokens that it took back, before those that came instead.
    assert [(one["n"], one["before"]) for one in found["erasures"]] == [(2, 3), (1, 7), (1, 9)]
    assert {token["mod"] for token in found["tokens"] if token["isForced"]} == {"fix"}


def test_backtrack_takes_no_more_than_there_is(page: Any):
    found = timeline(page, short_trace("backtrack_without_tokens"))
    assert [one["n"] for one in found["erasures"]] == [2, 2, 3]
    assert shown(found)[-2:] == ["a", "cat"]


def test_action_without_effect_adds_nothing(page: Any):
    found = timeline(page, short_trace("force_tokens"))
    assert "+no" not in shown(found)
    assert [(t["text"], t["mod"]) for t in found["tokens"] if t["isForced"]][:3] == [
        (" wait", "lead"), (",", "lead"), (" blue", "late")
    ]  # fmt: skip
    assert shown(found)[-2:] == ["+.</s>", "+.no"]


@pytest.mark.parametrize(
    ("name", "kept"),
    [("force_output", ["+Sorry", "+,", "+no", "+."]), ("emit_error", []), ("tool_calls", [])],
)
def test_action_that_ends_a_request_takes_all_back(page: Any, name: str, kept: list[str]):
    found = timeline(page, short_trace(name))
    assert [text for text in shown(found) if "-" not in text] == kept
    assert len(found["erasures"]) == 1


def test_token_has_the_odds_of_its_own_forward_pass(page: Any):
    tokens = timeline(page, short_trace("plain"))["tokens"]
    assert [(t["probability"], t["rank"]) for t in tokens[2:5]] == [(0.33, 2), (0.99, 1), (0.31, 2)]
    assert all(t["entropy"] > 0 for t in tokens)
    assert "probability" not in tokens[7]  # not among the top tokens of the trace
    tokens = timeline(page, short_trace("backtrack_with_tokens"))["tokens"]
    # After a Backtrack the step's forward pass was of another text; of a chunk it says nothing.
    assert [i for i, t in enumerate(tokens) if "entropy" in t] == [0, 1, 2, 5, 6, 10]


def test_entropy_comes_from_the_top_tokens_where_the_trace_does_not_tell(page: Any):
    payload = short_trace("plain")
    forward = payload["events"][1]
    del forward["details"]
    forward["top_tokens"] = [{"token": 15, "logprob": -0.6931472}, {"token": 16, "prob": 0.25}]
    [token, *_] = timeline(page, payload)["tokens"]
    assert token["probability"] == pytest.approx(0.5)
    assert token["entropy"] == pytest.approx(1.0397208)  # 1/2, 1/4 and 1/4 for all others, in nats


def test_attention_names_the_token_that_stood_there(page: Any):
    found = timeline(page, short_trace("backtrack_with_tokens"))
    assert found["hasAttention"]
    # The last token looked at the one before it: that of the third Backtrack, not what it replaced.
    assert found["tokens"][-1]["attention"][0] == [".", 0.41]
    replaced = found["tokens"][2]
    assert (replaced["text"], replaced["position"], replaced["died"]) == (" ball", 7, 11)
    total = sum(token["received"] for token in found["tokens"] + found["prompt"])
    told = sum(weight for token in found["tokens"] for _, weight in token.get("attention") or [])
    assert total == pytest.approx(told)
    assert not timeline(page, short_trace("force_tokens"))["hasAttention"]


def test_trace_of_the_seeds_example_is_read(page: Any):
    payload = {
        "request": {"request_id": "req_abc123"},
        "events": [
            {"event_type": "Added", "step": 1, "sequence_order": 2, "added_tokens": [1234]},
            {"event_type": "Prefilled", "step": 0, "sequence_order": 0, "prompt_length": 150},
            {"event_type": "Sampled", "step": 1, "sequence_order": 1, "sampled_token": 1234,
             "token_text": " there", "details": None},
        ],
        "actions": [],
    }  # fmt: skip
    found = timeline(page, payload)
    assert (found["finalIds"], found["tokens"][0]["text"]) == ([1234], " there")
    assert found["tokens"][0]["position"] == 150


@pytest.mark.parametrize("name", [*SHORT, "long"])
def test_list_counts_the_tokens_that_the_page_shows(page: Any, name: str) -> None:
    payload = long_trace(100, seed=4) if name == "long" else short_trace(name)
    posted = Posted(json.dumps(payload).encode())
    for read in (posted.event_rows, posted.mod_call_rows, posted.mod_log_rows, posted.action_rows):
        assert list(read()) is not None
    tokens = timeline(page, payload)["tokens"]
    row = posted.summary_row()
    assert row["n_added_tokens"] == len(tokens)
    assert row["n_forced_tokens"] == sum(token["isForced"] for token in tokens)
