"""Guards of chats over HTTP: a verdict before the first token, and one on each sentence."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview.heads import Head, HeadFile, ModelKey, measures
from kqview.server import Settings
from tests.support.rows import near
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kqview import Engine
    from tests.support.serving import Served

CHAT = "/v1/chat/completions"
SYSTEM = "Tell a story about a bird."
DATA = "Tom found a silver key. Tell what Tom found."
TEXTS = ["Anna has a red ball.", "Tom found a silver key. It was old.", "The bird sang all day."]
OPTIONS: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "injection": True}
SAID = [{"role": "user", "content": DATA}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": SYSTEM}, *SAID], "max_tokens": 8, **OPTIONS,
    },
    "/v1/responses": {"instructions": SYSTEM, "input": DATA, "max_output_tokens": 8, **OPTIONS},
    "/v1/messages": {
        "model": "demo", "system": SYSTEM, "messages": SAID, "max_tokens": 8, **OPTIONS,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Settings(n_slots=2, n_threads=1)) as one:
        yield one


def whole(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with served.client() as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def injection_of(reply: dict[str, Any]) -> dict[str, Any]:
    """That of a whole reply, in any dialect."""
    return reply["choices"][0]["message"]["injection"] if "choices" in reply else reply["injection"]


def head_file(engine: Engine, task: str, *heads: Head, **fields: Any) -> dict[str, Any]:
    """A head file as a request has it."""
    model = ModelKey.of(engine.model, engine.fingerprint())
    file = HeadFile(task=task, model=model, heads=heads, **fields)
    return {"format": "kqview-heads", "schema": 1, **asdict(file)}


def measured(engine: Engine) -> measures.Measures:
    """Attention from the prompt's last token to the system message."""
    ids = engine.apply_chat_template([{"role": "system", "content": SYSTEM}, *SAID])
    spans = measures.find_parts(engine, ids, [SYSTEM])
    sums, pairs = measures.span_sums(engine, ids, spans, last=1, layers=None)
    return measures.Measures(sums[:, 0, 0], pairs)


@pytest.mark.parametrize("path", ASKED)
def test_reply_says_how_much_attention_the_system_message_lost(served: Served, path: str):
    found = injection_of(whole(served, path, ASKED[path]))
    want = 1 - measured(served.engine).values.mean()
    assert found["score"] == pytest.approx(want, abs=near(1e-4))
    assert (found["threshold"], found["is_injected"]) == (None, None)


@pytest.mark.parametrize("path", ASKED)
def test_stream_says_it_before_its_text(served: Served, path: str):
    with served.client() as client:
        lines = client.post(path, json={**ASKED[path], "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    first = {
        "/v1/chat/completions": lambda: events[0]["choices"][0]["delta"],
        "/v1/responses": lambda: events[0]["response"],
        "/v1/messages": lambda: events[0]["message"],
    }[path]()
    want = injection_of(whole(served, path, ASKED[path]))["score"]
    assert first["injection"]["score"] == pytest.approx(want, abs=near(1e-4))


def test_prompt_alone_is_judged_too(served: Served):
    path = "/v1/chat/completions"
    asked = {**ASKED[path], "max_tokens": 0}
    want = injection_of(whole(served, path, ASKED[path]))
    assert injection_of(whole(served, path, asked))["score"] == pytest.approx(want["score"])
    with served.client() as client:
        text = client.post(path, json={**asked, "stream": True}).text
    first = json.loads(text.partition("data: ")[2].partition("\n")[0])
    score = first["choices"][0]["delta"]["injection"]["score"]
    assert score == pytest.approx(want["score"])


def test_head_file_of_a_request_has_the_last_word(served: Served):
    body = ASKED["/v1/chat/completions"]
    found = measured(served.engine)
    score = 1 - found.values[found.pairs.index((2, 3))]
    for threshold in (score - 0.05, score + 0.05):
        heads = head_file(
            served.engine, "injection", Head(2, 3, -1.0), bias=1.0,
            thresholds={"injected": threshold},
        )  # fmt: skip
        said = injection_of(whole(served, "/v1/chat/completions", {**body, "injection": heads}))
        assert said["score"] == pytest.approx(score, abs=near(1e-4))
        assert said["is_injected"] == (threshold < score)


def test_guard_changes_no_text(served: Served):
    path = "/v1/chat/completions"
    texts = [
        whole(served, path, {**ASKED[path], "injection": one})["choices"][0]["message"]["content"]
        for one in (True, False)
    ]
    assert texts[0] == texts[1]


# ---- grounding

CITED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": SAID, "max_tokens": 48, "temperature": 0, "ignore_eos": True,
        "documents": [{"text": one} for one in TEXTS],
    },
    "/v1/messages": {
        "model": "demo", "max_tokens": 48, "temperature": 0, "ignore_eos": True,
        "messages": [{"role": "user", "content": [
            *({"type": "document", "source": {"type": "text", "data": one},
               "citations": {"enabled": True}} for one in TEXTS),
            {"type": "text", "text": DATA},
        ]}],
    },
}  # fmt: skip


def cited(reply: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Text and citations of a reply."""
    if "choices" in reply:
        message = reply["choices"][0]["message"]
        return message["content"], [one["url_citation"] for one in message["annotations"]]
    blocks = reply["content"]
    return "".join(one["text"] for one in blocks), [one["citations"][0] for one in blocks]


@pytest.mark.parametrize("path", CITED)
def test_citations_say_if_the_documents_say_the_sentence(served: Served, path: str):
    engine = served.engine
    heads = head_file(
        engine, "grounding", Head(1, 1, 8.0), bias=-4.0, link="logistic",
        thresholds={"grounded": 0.5},
    )  # fmt: skip
    text, found = cited(whole(served, path, {**CITED[path], "grounding": heads}))
    plain, without = cited(whole(served, path, CITED[path]))
    assert (text, [one["cited_text"] for one in found]) == (
        plain, [one["cited_text"] for one in without],
    )  # fmt: skip
    assert not any("grounding" in one for one in without)
    ids = engine.apply_chat_template(
        [{"role": "user", "content": "\n".join([*(f"{one}\n\n" for one in TEXTS), DATA])}]
    )
    passages = [text[a:b] for text in TEXTS for a, b in measures.sentences_of(text)]
    answer = engine.tokenize(text, add_special=False, parse_special=False)
    sentences = [text[a:b] for a, b in measures.sentences_of(text)]
    places = measures.find_parts(engine, answer, sentences)
    given = measures.Answered(
        measures.Prompt(ids, measures.find_parts(engine, ids, passages)), answer,
        [measures.Sentence(s, *at) for s, at in zip(sentences, places, strict=True)],
    )  # fmt: skip
    ratios = measures.grounding(engine, given, (1,)).values[:, 1]
    want = 1 / (1 + np.exp(4 - 8 * ratios))
    assert len(found) > 1
    for one, score in zip(found, want, strict=True):
        assert one["grounding"]["score"] == pytest.approx(score, abs=0.02)
        assert one["grounding"]["is_grounded"] == (one["grounding"]["score"] >= 0.5)


def events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of each event of a stream."""
    with served.client() as client:
        sent = client.post(path, json=body)
    assert sent.status_code == 200, sent.text
    return [json.loads(one[6:]) for one in sent.text.splitlines() if one.startswith("data: {")]


def citations_in(sent: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Citations in the events of a stream, in any dialect."""
    for event in sent:
        match event:
            case {"choices": choices}:
                for choice in choices:
                    for one in choice["delta"].get("annotations", ()):
                        yield one["url_citation"]
            case {"delta": {"type": "citations_delta", "citation": found}}:
                yield found
            case {"type": "response.output_text.annotation.added", "annotation": found}:
                yield found
            case {"cited_text": _}:
                yield event
            case _:
                pass


DOCUMENTS = CITED[CHAT]["documents"]
TOLD: dict[str, dict[str, Any]] = {
    CHAT: {**CITED[CHAT], "stream": True},
    "/v1/messages": {**CITED["/v1/messages"], "stream": True},
    "/v1/responses": {
        "input": DATA, "max_output_tokens": 48, "temperature": 0, "ignore_eos": True,
        "documents": DOCUMENTS, "stream": True,
    },
    "/generate": {
        "prompt": DATA, "documents": DOCUMENTS,
        "overrides": {"max_output_tokens": 48, "temperature": 0},
    },
}  # fmt: skip


@pytest.mark.parametrize("path", TOLD)
def test_stream_says_of_each_sentence_if_the_documents_say_it(served: Served, path: str):
    body = TOLD[path]
    heads = head_file(
        served.engine, "grounding", Head(1, 1, 8.0), bias=-4.0, link="logistic",
        thresholds={"grounded": 0.5},
    )  # fmt: skip
    found = [*citations_in(events(served, path, {**body, "grounding": heads}))]
    # The same prompt and answer in all dialects; that of MIA4 may end sooner.
    _, want = cited(whole(served, CHAT, {**CITED[CHAT], "grounding": heads}))
    assert found
    for one, other in zip(found, want, strict=False):
        assert one["cited_text"] == other["cited_text"]
        assert one["grounding"]["score"] == pytest.approx(other["grounding"]["score"], abs=0.02)
        assert one["grounding"]["is_grounded"] == (one["grounding"]["score"] >= 0.5)
    without = [*citations_in(events(served, path, body))]
    assert [one["cited_text"] for one in without] == [one["cited_text"] for one in found]
    assert not any("grounding" in one for one in without)


def test_whole_response_says_of_each_sentence_if_the_documents_say_it(served: Served):
    body = {**TOLD["/v1/responses"], "stream": False, "grounding": True}
    (item,) = whole(served, "/v1/responses", body)["output"]
    (part,) = item["content"]
    assert len(part["annotations"]) > 1
    assert all(0 < one["grounding"]["score"] < 1 for one in part["annotations"])


# ---- what is refused

BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "no system message": (CHAT, {"messages": SAID, "injection": True}, "send a system message"),
    "no documents": (CHAT, {"messages": SAID, "grounding": True}, "send documents"),
    "no head file": (CHAT, {**ASKED[CHAT], "injection": {}}, "injection: it is no head file"),
    "heads of another model": (
        CHAT, {**ASKED[CHAT], "injection": {"params": {"important_heads": [[99, 0]]}}},
        "injection: the head file is of another model",
    ),
    "attention as well": (CHAT, {**ASKED[CHAT], "attention": True}, "attention and injection"),
    "many texts": (
        CHAT,
        {"messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}] * 600}, *SAID
        ], "injection": True},
        "at most 0 can be cited beside 600 texts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_guards_that_cannot_judge_are_refused_with_the_reason(served: Served, what: str):
    path, body, reason = BAD[what]
    with served.client() as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert reason in reply.text
