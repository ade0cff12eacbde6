"""Citations over HTTP: each sentence's passage in every dialect, streamed and whole."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from kqview import Capture, Engine, guards
from kqview.errors import RequestError
from kqview.heads import Head, HeadFile, ModelKey, measures
from kqview.server import Settings
from kqview.server.api.anthropic import convert, schema
from kqview.server.api.wire.citations import Citing, Document, Passage, Sources
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.serving import Served

pytestmark = pytest.mark.filterwarnings("ignore::kqview.heads.HeadFileWarning")

TEXTS = ["Anna has a red ball.", "Tom found a silver key. It was old.", "The bird sang all day."]
QUESTION = "Tell what Tom found."

HEADS = {"params": {"important_heads": [[1, 1], [1, 3]]}}
OPTIONS: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "citation_heads": HEADS}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Settings(n_slots=2, n_threads=1)) as one:
        yield one


def events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of each event of a stream."""
    with served.client() as client:
        sent = client.post(path, json={**body, "stream": True})
    assert sent.status_code == 200, sent.text
    lines = [line.removeprefix("data: ") for line in sent.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def whole(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with served.client() as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def sentences(text: str) -> list[str]:
    return [text[start:stop] for start, stop in measures.sentences_of(text)]


# ---- Anthropic


def block(text: str, **more: Any) -> dict[str, Any]:
    source = {"type": "text", "media_type": "text/plain", "data": text}
    return {"type": "document", "source": source, "citations": {"enabled": True}, **more}


def message_body(*documents: dict[str, Any], **more: Any) -> dict[str, Any]:
    content = [*documents, {"type": "text", "text": QUESTION}]
    return {
        "model": "demo", "max_tokens": 48, "messages": [{"role": "user", "content": content}],
        **OPTIONS, **more,
    }  # fmt: skip


ANTHROPIC = message_body(*map(block, TEXTS))


def test_each_sentence_is_a_block_with_the_passage_that_it_is_from(served: Served):
    blocks = whole(served, "/v1/messages", ANTHROPIC)["content"]
    text = "".join(one["text"] for one in blocks)
    assert [one["text"].strip() for one in blocks] == sentences(text)
    assert len(blocks) > 1
    for one in blocks:
        (citation,) = one["citations"]
        document: str = TEXTS[int(citation["document_index"])]
        span = slice(citation["start_char_index"], citation["end_char_index"])
        assert citation["type"] == "char_location"
        assert citation["cited_text"] == document[span]
        assert citation["cited_text"] in sentences(document)


def test_citations_are_those_of_guards_cite(served: Served):
    blocks = whole(served, "/v1/messages", ANTHROPIC)["content"]
    passages = [one for text in TEXTS for one in sentences(text)]
    engine = served.engine
    heads = HeadFile(
        task="cite", model=ModelKey.of(engine.model, engine.fingerprint()),
        heads=(Head(1, 1, 0.5), Head(1, 3, 0.5)),
    )  # fmt: skip
    # The prompt of the request, with passages as sources.
    shown = [one["source"]["data"] + "\n\n" for one in ANTHROPIC["messages"][0]["content"][:-1]]
    ids = engine.apply_chat_template([{"role": "user", "content": "\n".join([*shown, QUESTION])}])
    prompt = measures.Prompt(ids, measures.find_parts(engine, ids, passages))
    text = "".join(one["text"] for one in blocks)
    answer = engine.tokenize(text, add_special=False, parse_special=False)
    places = measures.find_parts(engine, answer, sentences(text))
    given = measures.Answered(
        prompt, answer,
        [measures.Sentence(s, *at) for s, at in zip(sentences(text), places, strict=True)],
    )  # fmt: skip
    for one, found in zip(blocks, measures.cite(engine, given, (1,)), strict=True):
        want = heads.score(found.values, found.pairs)
        (citation,) = one["citations"]
        assert citation["cited_text"] == passages[int(want.argmax())]
        assert citation["score"] == pytest.approx(want.max(), abs=0.02)


def test_stream_sends_each_citation_at_the_end_of_its_block(served: Served):
    blocks = whole(served, "/v1/messages", ANTHROPIC)["content"]
    built: list[dict[str, Any]] = []
    is_open = False
    for event in events(served, "/v1/messages", ANTHROPIC):
        match event["type"]:
            case "content_block_start":
                assert not is_open
                is_open = True
                built.append({"type": "text", "text": "", "citations": []})
                assert event["index"] == len(built) - 1
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                assert not built[-1]["citations"]
                built[-1]["text"] += event["delta"]["text"]
            case "content_block_delta":
                assert event["delta"]["type"] == "citations_delta"
                built[-1]["citations"].append(event["delta"]["citation"])
            case "content_block_stop":
                is_open = False
            case _:
                pass
    for one, other in zip(built, blocks, strict=True):
        for citation in (*one["citations"], *other["citations"]):
            citation["score"] = round(citation["score"], 3)
    assert built == blocks


def test_blocks_titles_and_documents_that_cannot_be_cited():
    parts = [{"type": "text", "text": one} for one in ("Anna has a ball.", "Tom has a key.")]
    source = {"type": "content", "content": parts}
    given = [
        {**block(TEXTS[0]), "citations": None},
        block("", title="People", context="Of a book.", source=source),
    ]
    body = msgspec.convert(message_body(*given), schema.MessagesBody)
    (document,) = convert.documents_of(body)
    assert (document.index, document.title) == (1, "People")
    assert document.text == "Anna has a ball.\nTom has a key."
    assert [document.text[a:b] for a, b in document.blocks] == [one["text"] for one in parts]
    shown = [one["text"] for one in convert.messages_of(body)[0]["content"]]
    assert shown == [
        f"{TEXTS[0]}\n\n", f"People\nOf a book.\n{document.text}\n\n", QUESTION,
    ]  # fmt: skip


def test_blocks_are_cited_by_their_places(served: Served):
    parts = [{"type": "text", "text": one} for one in TEXTS]
    given = block("", source={"type": "content", "content": parts})
    (first, *_) = whole(served, "/v1/messages", message_body(given))["content"]
    (citation,) = first["citations"]
    assert citation["type"] == "content_block_location"
    place = citation["start_block_index"]
    assert citation["end_block_index"] == place + 1
    assert citation["cited_text"] == TEXTS[place]


def test_message_without_documents_has_no_citations(served: Served):
    body = message_body()
    (one,) = whole(served, "/v1/messages", body)["content"]
    assert "citations" not in one


# ---- OpenAI

ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48, **OPTIONS,
    "documents": [{"text": one, "title": f"T{i}"} for i, one in enumerate(TEXTS)],
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "input": QUESTION, "max_output_tokens": 48, **OPTIONS, "documents": ASKED["documents"],
}  # fmt: skip


def check(text: str, citations: list[dict[str, Any]]) -> None:
    assert [text[one["start_index"] : one["end_index"]] for one in citations] == sentences(text)
    assert len(citations) > 1
    for one in citations:
        i = int(one["document_index"])
        assert (one["title"], one["url"]) == (f"T{i}", f"document:{i}")
        passage: str = TEXTS[i][one["start_char_index"] : one["end_char_index"]]
        assert one["cited_text"] == passage != ""


def rounded(citations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "score": round(one["score"], 3)} for one in citations]


def test_chat_completion_has_annotations(served: Served):
    for choice in whole(served, "/v1/chat/completions", {**ASKED, "n": 2})["choices"]:
        message = choice["message"]
        check(message["content"], [one["url_citation"] for one in message["annotations"]])


def test_streamed_annotations_follow_their_sentences(served: Served):
    message = whole(served, "/v1/chat/completions", ASKED)["choices"][0]["message"]
    text = ""
    seen: list[dict[str, Any]] = []
    for chunk in events(served, "/v1/chat/completions", ASKED):
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            for one in choice["delta"].get("annotations", ()):
                seen.append(one["url_citation"])
                assert len(text) == one["url_citation"]["end_index"]
    assert text == message["content"]
    assert rounded(seen) == rounded([one["url_citation"] for one in message["annotations"]])


def test_response_has_annotations_in_its_text_and_its_stream(served: Served):
    (item,) = whole(served, "/v1/responses", RESPONSES)["output"]
    (part,) = item["content"]
    check(part["text"], part["annotations"])
    sent = events(served, "/v1/responses", RESPONSES)
    added = [one for one in sent if one["type"] == "response.output_text.annotation.added"]
    assert [one["annotation_index"] for one in added] == [*range(len(added))]
    assert rounded([one["annotation"] for one in added]) == rounded(part["annotations"])
    assert sent[-1]["response"]["output"][0]["content"][0]["annotations"] == [
        one["annotation"] for one in added
    ]


def test_chat_without_documents_has_no_annotations(served: Served):
    body = {name: value for name, value in ASKED.items() if name != "documents"}
    assert "annotations" not in whole(served, "/v1/chat/completions", body)["choices"][0]["message"]


# ---- what is refused

BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "a picture": (
        "/v1/messages", message_body(block("", source={"type": "base64", "data": "x"})), "base64"
    ),
    "an empty document": ("/v1/messages", message_body(block(" \n")), "has an empty text"),
    "attention as well": (
        "/v1/messages", {**ANTHROPIC, "attention": True}, "attention and citations"
    ),
    "heads of another model": (
        "/v1/messages",
        message_body(block("x"), citation_heads={"params": {"important_heads": [[99, 0]]}}),
        "another model",
    ),
    "no head file": ("/v1/chat/completions", {**ASKED, "citation_heads": {}}, "no head file"),
    "an empty text": ("/v1/chat/completions", {**ASKED, "documents": [{"text": ""}]}, "empty text"),
    "no question": (
        "/v1/chat/completions", {**ASKED, "messages": [{"role": "system", "content": "x"}]},
        "no message is the user",
    ),
    "too many": ("/v1/responses", {**RESPONSES, "documents": [{"text": "a"}] * 513}, "at most 512"),
    "too long": (
        "/v1/chat/completions", {**ASKED, "documents": [{"text": "a bird " * 4000}]}, "the limit is"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_documents_are_refused_with_the_reason(served: Served, what: str):
    path, body, reason = BAD[what]
    with served.client() as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert reason in reply.text


# ---- heads of the server, and what the client is told of heads

NO_HEADS: dict[str, Any] = {**ASKED, "citation_heads": None}
WITH_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", ASKED),
    "chat, streamed": ("/v1/chat/completions", {**ASKED, "stream": True}),
    "responses": ("/v1/responses", RESPONSES),
    "messages, streamed": ("/v1/messages", {**ANTHROPIC, "stream": True}),
    "mia4": (
        "/generate", {"prompt": QUESTION, "documents": ASKED["documents"], "citation_heads": HEADS,
         "overrides": {"max_tokens": 8}}
    ),
    "rerank": (
        "/rerank", {"query": QUESTION, "documents": TEXTS, "method": "attention", "heads": HEADS}
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WITH_HEADS)
def test_client_is_warned_of_heads_that_may_be_of_other_weights(served: Served, what: str):
    path, body = WITH_HEADS[what]
    with served.client() as client:
        reply = client.post(path, json=body)
        without = {**body, "citation_heads": None, "heads": None}
        silent = client.post(path, json={k: v for k, v in without.items() if k in body})
    assert (reply.status_code, silent.status_code) == (200, 200), reply.text
    assert re.fullmatch(r'299 kqview ".*which weights.*"', reply.headers["warning"])
    assert "warning" not in silent.headers


def test_server_heads_count_where_a_request_has_none(served: Served, tmp_path: Path):
    model = ModelKey.of(served.engine.model, served.engine.fingerprint())
    heads = Head(1, 1, 0.5), Head(1, 3, 0.5)
    files = {
        "other": HeadFile(task="needle", model=replace(model, n_layer=99), heads=heads),
        "injection": HeadFile(task="injection", model=model, heads=heads),
        "needle": HeadFile(task="needle", model=model, heads=heads),
    }
    for name, file in files.items():
        file.save(tmp_path / f"{name}.json")
    paths = tuple(str(tmp_path / f"{name}.json") for name in files)
    rank = {"query": QUESTION, "documents": TEXTS, "method": "attention"}
    with serving(Settings(heads=paths), engine=served.engine) as other, other.client() as client:
        sent = client.post("/v1/chat/completions", json=NO_HEADS)
        ranked = client.post("/rerank", json=rank).json()["results"]
    assert "warning" not in sent.headers
    own = whole(served, "/v1/chat/completions", ASKED)["choices"][0]["message"]["annotations"]
    found = sent.json()["choices"][0]["message"]["annotations"]
    assert rounded([one["url_citation"] for one in found]) == rounded(
        [one["url_citation"] for one in own]
    )
    want = guards.rerank(served.engine, QUESTION, TEXTS, files["needle"])
    scores = {one["index"]: one["relevance_score"] for one in ranked}
    assert [scores[i] for i in range(len(TEXTS))] == pytest.approx(want, abs=1e-4)


def test_server_with_a_file_of_no_heads_does_not_start(tmp_path: Path):
    (tmp_path / "heads.json").write_text("{}")
    with pytest.raises(RequestError, match="no head file"):
        Settings(heads=(str(tmp_path / "heads.json"),))
    with pytest.raises(RequestError, match="no_such"):
        Settings(heads=(str(tmp_path / "no_such.json"),))


# ---- passages and sentences


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.demo(n_threads=1, n_ctx=2048) as one:
        yield one


def test_many_sentences_share_a_passage(engine: Engine):
    texts = ["A cat ran. " * 400, "\n B dog sat. " * 200]
    ids = engine.tokenize("".join(texts))
    sources = Sources.of(
        engine, ids, [Document(one, index=i) for i, one in enumerate(texts)], {"cite": None}
    )
    assert 256 < len(sources.passages) <= 512
    assert {one.text.count(".") for one in sources.passages} == {2}
    spans = sources.capture.spans
    assert spans is not None
    for passage, (start, stop) in zip(sources.passages, spans, strict=True):
        assert passage.text.strip() in engine.detokenize(ids[start:stop])


class Piece:
    """A token whose attention goes to one passage of two."""

    index = 0

    def __init__(self, i: int) -> None:
        self.attention = np.zeros((1, 1, 2), np.float32)
        self.attention[0, 0, i] = 1


def test_sentences_of_an_answer_are_cited_when_the_next_one_begins():
    document = Document("One. Two.")
    two = [Passage(document, 0, 4, 0, 1), Passage(document, 5, 9, 1, 1)]
    sources = Sources(two, Capture(spans=[(0, 1), (1, 2)]), (0,), {"cite": None})
    citing = Citing(sources)
    seen: list[tuple[str, str | None]] = []
    n = 0
    for text, i in (("It", 0), (" is.", 0), (" ", 1), ("No", 1), (". 3", 1), (".5 x", 1)):
        n += len(text)
        citing.add(Piece(i), n)  # type: ignore[arg-type]
        seen += [(one, c and c.passage.text) for one, c in citing.feed(text)]
    assert seen == [
        ("It", None), (" is.", None), (" ", None), ("", "One."), ("No", None), (".", "Two."),
        (" 3", None), (".5 x", None),
    ]  # fmt: skip
    last = citing.finish()
    assert last is not None
    assert (last.start, last.stop, last.passage.text) == (11, 16, "Two.")
    assert citing.finish() is None
