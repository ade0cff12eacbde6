"""Text and ids in the API of llama.cpp's server."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

    from tests.support.serving import Served

TEXT = "Anna is a painter."


def test_text_goes_to_ids_and_back(demo: Served, client: httpx.Client):
    ids = client.post("/tokenize", json={"content": TEXT}).json()
    assert ids == {"tokens": demo.engine.tokenize(TEXT, add_special=False)}
    assert client.post("/detokenize", json=ids).json() == {"content": TEXT}


def test_special_tokens_are_added_and_parsed_on_request(demo: Served, client: httpx.Client):
    text = f"<|im_start|>{TEXT}"
    for add_special in (False, True):
        for parse_special in (False, True):
            options = {"add_special": add_special, "parse_special": parse_special}
            reply = client.post("/tokenize", json={"content": text, **options}).json()
            assert reply == {"tokens": demo.engine.tokenize(text, **options)}
    assert client.post("/tokenize", json={"content": text}).json() == {
        "tokens": demo.engine.tokenize(text, add_special=False, parse_special=True)
    }


def test_pieces_are_text_or_else_bytes(demo: Served, client: httpx.Client):
    text = "Anna \N{GRINNING FACE}"
    reply = client.post("/tokenize", json={"content": text, "with_pieces": True}).json()
    assert [one["id"] for one in reply["tokens"]] == demo.engine.tokenize(text, add_special=False)
    pieces = [one["piece"] for one in reply["tokens"]]
    assert any(isinstance(piece, list) for piece in pieces)
    joined = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces)
    assert joined.decode() == text


def test_ids_and_texts_may_be_mixed(demo: Served, client: httpx.Client):
    tokenize = partial(demo.engine.tokenize, add_special=False)
    reply = client.post("/tokenize", json={"content": [5, "Anna", 7, " is"]}).json()
    assert reply == {"tokens": [5, *tokenize("Anna"), 7, *tokenize(" is")]}


def test_without_content_there_are_no_ids(client: httpx.Client):
    assert client.post("/tokenize", json={}).json() == {"tokens": []}
    assert client.post("/detokenize", json={}).json() == {"content": ""}


def test_id_outside_the_vocabulary_is_refused_in_llama_cpps_form(client: httpx.Client):
    reply = client.post("/detokenize", json={"tokens": [10**6]})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == 400
    assert error["type"] == "invalid_request_error"
    assert str(10**6) in error["message"]
    assert error["message"].startswith("tokens ")
