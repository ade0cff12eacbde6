"""Mods over HTTP: named in every API, taken back in streams, ended by their actions, traced."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from websockets.sync.client import connect

from kqview.chat.turn import AnswerReader, ChatAnswer, Reading
from kqview.mods import logs
from kqview.server import Settings
from kqview.server.api.wire.chat import taken_back
from kqview.server.api.wire.mods_field import calls_of
from kqview.server.models.run import Removal
from kqview.stop_strings import ShownText
from kqview.trace import final_ids, post
from tests.support.trace_receiver import receiving
from tests.support.traces import read_trace
from tests.support.waiting import hanging, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.serving import Serve, Served

FILES = {
    "rewrite": '''"""Writes its text over the last two of four tokens, once."""
from kqview.mods import Mod

class Rewrite(Mod):
    def __init__(self, text=" XY", back=2):
        self.text, self.back, self.n = text, back, 0
    def on_added(self, event, actions, tokenizer):
        self.n += len(event.added_tokens)
        if self.n == 4:
            self.n = 100
            return actions.backtrack(self.back, tokenizer.encode(self.text, False))
''',
    "lead": """
import kqview
@kqview.mod
def lead(event, actions, tokenizer):
    if type(event).__name__ == "ForwardPass" and event.step == 1:
        print("leading")
        return actions.force_tokens(tokenizer.encode(" Hm:", False))
""",
    "canned": """
from kqview.mods import Mod
class Canned(Mod):
    def on_added(self, event, actions, tokenizer):
        if event.step == 3:
            return actions.force_output(tokenizer.encode(" No.", False))
""",
    "call": """
from kqview.mods import Mod
class Call(Mod):
    def on_added(self, event, actions, tokenizer):
        if event.step == 3:
            call = {"name": "look", "arguments": {"at": "Anna"}}
            return actions.tool_calls({"id": "c1", "type": "function", "function": call})
""",
    "refuse": """
from kqview.mods import Mod
class Refuse(Mod):
    def __init__(self, step=0):
        self.step = step
    def __call__(self, event, actions, tokenizer):
        if event.step == self.step:
            return actions.emit_error("not today")
""",
    "slow": """
import kqview
from tests.support.waiting import hanging
@kqview.mod
def slow(event, actions, tokenizer):
    hanging.wait()
""",
    "fails": """
import kqview
@kqview.mod
def fails(event, actions, tokenizer):
    raise KeyError("inside")
""",
    "guard": """
from kqview.mods import Mod
class Guard(Mod):
    required = True
    def __init__(self, step=0):
        self.step = step
    def __call__(self, event, actions, tokenizer):
        if event.step == self.step:
            raise KeyError("inside")
""",
    "broken": "1/0",
    "leaves": """
from kqview.mods import Mod
class Leaves(Mod):
    def __init__(self, at="call"):
        self.at = at
        self.check("make")
    def check(self, at):
        if self.at == at:
            raise SystemExit(3)
    def __call__(self, event, actions, tokenizer):
        self.check("call")
    def on_end(self, end):
        self.check("end")
""",
    "leaves_async": """
import kqview
@kqview.mod
async def leaves_async(event, actions, tokenizer):
    raise SystemExit(3)
""",
    "says": """
from kqview.mods import Mod
class Says(Mod):
    def __init__(self, what):
        self.what = what
    def on_added(self, event, actions, tokenizer):
        half = chr(0xD800)
        if self.what == "deep":
            return actions.tool_calls("[" * 200_000)
        if self.what == "half":
            return actions.tool_calls({"id": half, "name": "f" + half, "arguments": half})
        return actions.emit_error("bad " + half)
""",
    "chat": """
import json
import kqview
from kqview.mods.kit import get_conversation, get_schemas
@kqview.mod
def chat(event, actions, tokenizer):
    if type(event).__name__ == "Prefilled":
        names = [one["name"] for one in get_schemas(event)]
        print(json.dumps([get_conversation(event), names]))
        first = get_conversation(event) or [{"content": "none"}]
        return actions.force_output(tokenizer.encode(str([first[-1]["content"], names]), False))
""",
}
PROMPT = "Anna is a"
N = 8


@dataclass(frozen=True)
class Reply:
    """A reply, or what a client has of a stream at its end."""

    text: str
    reason: str | None
    n_removed: int = 0
    calls: list[Any] = field(default_factory=list[Any])


@pytest.fixture(scope="module")
def mods_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mods")
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def steered(mods_dir: Path) -> Iterator[Served]:
    from tests.support.serving import serving

    settings = Settings(n_slots=2, mods_dir=str(mods_dir), mod_time_limit_s=30.0)
    with serving(settings) as served:
        yield served


# ---- what the APIs have in common


def sse(response: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@dataclass(frozen=True)
class Api:
    """Path, body and how its replies are read."""

    path: str
    body: Callable[[], dict[str, Any]]
    whole: Callable[[Any], Reply]
    # An event -> (removed, text, reason, calls)
    event: Callable[[Any], tuple[Any, str, str | None, list[Any]]]
    streams: dict[str, Any] = field(default_factory=lambda: {"stream": True})
    stream_path: str | None = None


def chat() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Who is Anna?"}], "max_tokens": N}


def text_body() -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": N}


def completion_event(chunk: Any) -> tuple[Any, str, str | None, list[Any]]:
    [one] = chunk["choices"]
    return one.get("removed"), one["text"], one["finish_reason"], one.get("tool_calls", [])


def chat_event(chunk: Any) -> tuple[Any, str, str | None, list[Any]]:
    [one] = chunk["choices"]
    delta = one["delta"]
    calls = delta.get("tool_calls", [])
    return one.get("removed"), delta.get("content") or "", one["finish_reason"], calls


def message_event(event: Any) -> tuple[Any, str, str | None, list[Any]]:
    removed = event if event["type"] == "removed" else None
    delta = event.get("delta", {})
    block = event.get("content_block", {})
    calls = [block] if block.get("type") == "tool_use" else []
    return removed, delta.get("text", ""), delta.get("stop_reason"), calls


def response_event(event: Any) -> tuple[Any, str, str | None, list[Any]]:
    removed = event if event["type"] == "response.removed" else None
    text = event["delta"] if event["type"] == "response.output_text.delta" else ""
    item = event.get("item", {}) if event["type"] == "response.output_item.done" else {}
    calls = [item] if item.get("type") == "function_call" else []
    return removed, text, event.get("response", {}).get("status"), calls


def llama_event(event: Any) -> tuple[Any, str, str | None, list[Any]]:
    return (
        event.get("removed"), event["content"], event.get("stop_type"),
        event.get("tool_calls", []),
    )  # fmt: skip


def typed_event(event: Any) -> tuple[Any, str, str | None, list[Any]]:
    removed = event if event["type"] == "removed" else None
    token = event.get("token")
    text = token["text"] if isinstance(token, dict) else event.get("text", "")
    return removed, text, event.get("finish_reason"), event.get("tool_calls", [])


def plain_event(event: Any) -> tuple[Any, str, str | None, list[Any]]:
    return (
        event.get("removed"), event["token"], event["finish_reason"], event.get("tool_calls", []),
    )  # fmt: skip


def of_messages(reply: Any) -> Reply:
    text = "".join(one["text"] for one in reply["content"] if one["type"] == "text")
    calls = [one for one in reply["content"] if one["type"] == "tool_use"]
    return Reply(text, reply["stop_reason"], calls=calls)


def of_responses(reply: Any) -> Reply:
    parts = [one["content"] for one in reply["output"] if one["type"] == "message"]
    calls = [one for one in reply["output"] if one["type"] == "function_call"]
    text = "".join(part["text"] for content in parts for part in content)
    return Reply(text, reply["status"], calls=calls)


def of_choice(reply: Any) -> Reply:
    [one] = reply["choices"]
    if "message" not in one:
        return Reply(one["text"], one["finish_reason"], calls=one.get("tool_calls", []))
    message = one["message"]
    calls = message.get("tool_calls", [])
    return Reply(message["content"] or "", one["finish_reason"], calls=calls)


def kobold() -> dict[str, Any]:
    return {"prompt": PROMPT, "max_length": N}


def of_results(reply: Any) -> Reply:
    [one] = reply["results"]
    return Reply(one["text"], one["finish_reason"])


APIS = {
    "completions": Api("/v1/completions", text_body, of_choice, completion_event),
    "chat": Api("/v1/chat/completions", chat, of_choice, chat_event),
    "responses": Api(
        "/v1/responses",
        lambda: {"input": "Who is Anna?", "max_output_tokens": N},
        of_responses,
        response_event,
    ),
    "messages": Api("/v1/messages", chat, of_messages, message_event),
    "llama_server": Api(
        "/completion",
        lambda: {"prompt": PROMPT, "n_predict": N},
        lambda reply: Reply(
            reply["content"], reply["stop_type"], calls=reply.get("tool_calls", [])
        ),
        llama_event,
    ),
    "kobold typed": Api(
        "/api/v1/generate", kobold, of_results, typed_event,
        {"output_attentions": False}, "/api/extra/generate/stream",
    ),
    "kobold plain": Api(
        "/api/v1/generate", kobold, of_results, plain_event, {}, "/api/extra/generate/stream"
    ),
}  # fmt: skip


def asked(served: Served, api: Api, mods: Any, **more: Any) -> httpx.Response:
    with served.client() as client:
        body = {**api.body(), "temperature": 0, "mods": mods, **more}
        return client.post(api.path, json=body)


def streamed(served: Served, api: Api, mods: Any, **more: Any) -> tuple[Reply, list[Any]]:
    body = {**api.body(), "temperature": 0, "mods": mods, **api.streams, **more}
    with (
        served.client() as client,
        client.stream("POST", api.stream_path or api.path, json=body) as response,
    ):
        assert response.status_code == 200, response.read()
        events = sse(response)
    return applied(api.event, events), events


def applied(read: Callable[[Any], tuple[Any, str, str | None, list[Any]]], events: Any) -> Reply:
    """What a client has that drops what it is told to."""
    text, reason, n_removed, calls = "", None, 0, list[Any]()
    for event in events:
        removed, piece, why, some = read(event)
        if removed is not None:
            n_removed += removed["tokens"]
            assert 0 <= removed["characters"] <= len(text)
            text = text[: len(text) - removed["characters"]]
        text += piece
        reason = why or reason
        calls += some
    return Reply(text, reason, n_removed, calls)


# ---- every API


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_text_that_a_mod_wrote_over_is_gone_from_reply_and_stream(steered: Served, api: Api):
    plain = api.whole(asked(steered, api, []).json())
    whole = api.whole(asked(steered, api, ["rewrite"]).json())
    assert " XY" in whole.text
    assert whole.text.partition(" XY")[0] == plain.text[: whole.text.index(" XY")]
    assert plain.text not in whole.text
    stream, _ = streamed(steered, api, ["rewrite"])
    assert stream.n_removed == 1  # the other one was never handed out
    assert stream.text == whole.text


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_options_reach_the_mod_and_mods_keep_their_order(steered: Served, api: Api):
    mods = ["lead", {"name": "rewrite", "text": " Zed", "back": 1}]
    whole = api.whole(asked(steered, api, mods).json())
    assert whole.text.lstrip().startswith("Hm:")
    assert " Zed" in whole.text


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_forced_output_replaces_what_was_streamed(steered: Served, api: Api):
    whole = api.whole(asked(steered, api, ["canned"]).json())
    assert whole.text == " No."
    stream, _ = streamed(steered, api, ["canned"])
    assert stream.text == whole.text
    assert stream.n_removed >= 2


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_tool_calls_of_a_mod_are_those_of_the_api(steered: Served, api: Api):
    whole = api.whole(asked(steered, api, ["call"]).json())
    assert whole.text == ""
    stream, _ = streamed(steered, api, ["call"])
    assert stream.text == ""
    reasons = {
        "chat": "tool_calls", "completions": "tool_calls", "messages": "tool_use",
        "responses": "completed", "llama_server": "eos",
    }  # fmt: skip
    name = next(name for name, one in APIS.items() if one is api)
    replies = [stream] if name.startswith("kobold") else [stream, whole]
    for reply in replies:
        assert reply.reason == reasons.get(name, "stop")
        assert [(one.get("function") or one)["name"] for one in reply.calls] == ["look"]
    if name in ("chat", "completions"):
        [call] = whole.calls
        assert call == {
            "id": "c1", "type": "function",
            "function": {"name": "look", "arguments": '{"at": "Anna"}'},
        }  # fmt: skip


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
@pytest.mark.parametrize(
    ("name", "status", "said"),
    [("refuse", 400, "not today"), ("guard", 500, "mod Guard failed at")],
)
def test_error_of_a_mod_is_a_status_before_the_first_token_and_an_event_after_it(
    steered: Served, api: Api, name: str, status: int, said: str
):
    for path, more in ((api.path, {}), (api.stream_path or api.path, api.streams)):
        with steered.client() as client:
            body = {**api.body(), "temperature": 0, "mods": [name], **more}
            response = client.post(path, json=body)
        assert response.status_code == status
        assert said in response.text
        assert "inside" not in response.text  # only the log has what a mod raised
    late = [{"name": name, "step": 3}]
    assert asked(steered, api, late).status_code == status
    body = {**api.body(), "temperature": 0, "mods": late, **api.streams}
    lines: list[str] = []
    with steered.client() as client, contextlib.suppress(httpx.RemoteProtocolError):
        # The stream is cut after the error: a clean end would look like success.
        with client.stream("POST", api.stream_path or api.path, json=body) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                lines.append(line)
    assert said in "".join(lines)
    assert "inside" not in "".join(lines)
    steered.wait_idle()


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
@pytest.mark.parametrize(
    ("mods", "status", "said"),
    [
        (["nothing"], 400, "rewrite"),
        (["../rewrite"], 400, "rewrite"),
        ([{"name": "rewrite", "speed": 1}], 400, "speed"),
        ([{"text": "a"}], 400, "mods[0].name"),
        (["lead"] * 9, 400, "the limit is 8"),
        (["broken"], 503, "broken"),
        ("lead", 400, "mods"),
    ],
)
def test_mods_that_cannot_be_used_are_refused_before_anything_is_sent(
    steered: Served, api: Api, mods: Any, status: int, said: str
):
    response = asked(steered, api, mods)
    assert (response.status_code, said in response.text) == (status, True), response.text
    body = {**api.body(), "temperature": 0, "mods": mods, **api.streams}
    with steered.client() as client:
        response = client.post(api.stream_path or api.path, json=body)
    assert (response.status_code, said in response.text) == (status, True), response.text


# ---- what a stream takes back


def removal(text: str, n_tokens: int = 1) -> Removal:
    return Removal(0, n_tokens, 0, 0, [text])


def test_client_drops_what_may_become_a_stop_sequence_and_gets_it_again():
    shown = ShownText(("abc",))
    assert [shown.feed(one) for one in ("xab", "!", "yz")] == ["x", "ab!", "yz"]
    assert shown.take_back("xab") == 5
    assert shown.n_shown == 1
    assert shown.feed("c!") == ""
    assert shown.rest("x") == ""


def test_reasoning_content_and_calls_are_taken_back_apart():
    reading = Reading(calls="hermes")
    call = '<tool_call>{"name": "look", "arguments": {"at": "Anna"}}</tool_call>'
    reader = AnswerReader(reading)
    whole = "<think>Hmm.</think>It is noon." + call
    answer = ChatAnswer()
    answer.add(reader.feed(whole))
    assert (answer.reasoning, answer.content, len(answer.calls)) == ("Hmm.", "It is noon.", 1)
    reader, lost, _ = taken_back(reader, removal("<think>Hmm.</think>It is", 9))
    assert lost == {"tokens": 9, "characters": len(" noon."), "tool_calls": 1}
    reader, lost, _ = taken_back(reader, removal("<think>Hm", 4))
    assert lost == {
        "tokens": 4, "characters": len("It is"), "reasoning_characters": len("m.")
    }  # fmt: skip
    rest = ChatAnswer()
    rest.add(reader.finish("<think>Hm</think>No."))
    assert (rest.reasoning, rest.content) == ("", "No.")


def test_tokens_of_each_part_are_counted_again_after_a_removal():
    reader = AnswerReader(Reading())
    for text in ("<think>", "One", " two", "</think>", "Three", " four"):
        reader.feed(text)
    assert (reader.tokens.n_reasoning, reader.tokens.n_final) == (2, 2)
    left = ["<think>", "One"]
    reader, _, _ = taken_back(reader, Removal(0, 4, 0, 2, left))
    reader.feed(" no")
    reader.finish("<think>One no")
    assert (reader.tokens.n_reasoning, reader.tokens.n_final, reader.tokens.n_marks) == (2, 0, 1)


@pytest.mark.parametrize(
    ("payload", "calls"),
    [
        ({"name": "a", "arguments": {"x": 1}}, [("a", '{"x": 1}')]),
        ({"id": "i", "type": "function", "function": {"name": "a"}}, [("a", "{}")]),
        ([{"name": "a", "arguments": "{}"}, {"name": "b"}], [("a", "{}"), ("b", "{}")]),
        ('{"name": "a"}', [("a", "{}")]),
        ("no JSON", [("", "no JSON")]),
        ([], []),
        (None, [("", "null")]),
    ],
)
def test_payloads_of_tool_calls_are_read_in_every_form(payload: Any, calls: Any):
    found = calls_of(payload)
    assert [(one.function.name, one.function.arguments) for one in found] == calls
    assert len({one.id for one in found}) == len(calls)


# ---- what single APIs add


@pytest.mark.parametrize("path", ["/api/v1/generate/stream", "/api/extra/generate/stream/ws"])
def test_websocket_hears_what_was_taken_back(steered: Served, path: str):
    body: dict[str, Any] = {
        "type": "generate", "prompt": PROMPT, "max_new_tokens": N, "max_length": N,
        "temperature": 0, "mods": ["rewrite"], "output_attentions": False, "num_samples": 1,
    }  # fmt: skip
    events: list[Any] = []
    with connect(steered.ws_url + path, max_size=None) as socket:
        socket.send(json.dumps(body))
        while not events or events[-1]["type"] not in ("done", "error"):
            frame = socket.recv(timeout=60)
            if isinstance(frame, str):
                events.append(json.loads(frame))
    reply = applied(typed_event, events)
    whole = APIS["kobold typed"]
    assert reply.text == whole.whole(asked(steered, whole, ["rewrite"]).json()).text
    assert reply.n_removed == 1
    [done] = [one for one in events if one["type"] == "done"]
    assert done["total_tokens"] == sum(one["type"] == "token" for one in events) - 1


@pytest.mark.parametrize("streams", [False, True])
def test_attention_and_logprobs_are_those_of_the_final_text(steered: Served, streams: bool):
    more: dict[str, Any] = {"logprobs": 1, "attention": {"reduce": "mean_heads"}}
    api = APIS["completions"]
    whole = asked(steered, api, ["rewrite"], **more).json()["choices"][0]
    kept = {**more, "attention": {"reduce": "mean_heads", "delivery": "id"}}
    with steered.client() as client:
        if streams:
            _, events = streamed(steered, api, ["rewrite"], **kept)
            name = events[0]["id"]
        else:
            name = asked(steered, api, ["rewrite"], **kept).json()["id"]
        rows = client.get(f"/v1/attention/{name}").json()["choices"][0]["rows"]
    entries = whole["attention"]
    # The first forced token has no row: its query was not the last one of a step.
    assert [row["n"] for row in rows] == [one["n"] for one in entries]
    assert [row["token_id"] for row in rows] == [one["token_id"] for one in entries]
    assert all(row["shape"][-1] == one["shape"][-1] for row, one in zip(rows, entries, strict=True))
    texts = whole["logprobs"]["tokens"]
    assert " XY" not in "".join(texts)  # forced tokens were not sampled, and have no logprobs
    assert "".join(texts[:2]) == whole["text"].partition(" XY")[0]
    offsets = whole["logprobs"]["text_offset"]
    assert [whole["text"][at : at + len(one)] for at, one in zip(offsets, texts, strict=True)] == (
        texts
    )


def test_stop_sequence_that_was_half_sent_is_taken_back(steered: Served):
    api = APIS["completions"]
    whole = api.whole(asked(steered, api, ["rewrite"], stop=[" XY"]).json())
    stream, _ = streamed(steered, api, ["rewrite"], stop=[" XY"])
    assert stream.text == whole.text
    assert "XY" not in stream.text


def test_samples_of_a_request_have_mods_of_their_own(steered: Served):
    reply = asked(steered, APIS["completions"], ["rewrite"], n=2).json()
    assert ["XY" in one["text"] for one in reply["choices"]] == [True, True]


def test_model_that_is_named_with_a_mod_has_it(steered: Served):
    with steered.client() as client:
        body = {**text_body(), "temperature": 0, "model": "kqview/demo/lead"}
        reply = client.post("/v1/completions", json=body).json()
        assert reply["choices"][0]["text"].startswith(" Hm:")
        unknown = client.post("/v1/completions", json={**body, "model": "a/b/c"})
        assert unknown.status_code == 400
        plain = client.post("/v1/completions", json={**body, "model": "a/lead"}).json()
    assert "Hm:" not in plain["choices"][0]["text"]


def test_alias_with_slashes_has_no_mod(serve: Serve, mods_dir: Path):
    alias = "kqview/demo/lead"
    served = serve(Settings(mods_dir=str(mods_dir), aliases=("demo", alias)))
    with served.client() as client:
        body = {**text_body(), "temperature": 0, "model": alias}
        reply = client.post("/v1/completions", json=body).json()
    assert "Hm:" not in reply["choices"][0]["text"]


def test_mods_are_listed_with_what_is_wrong_with_them(steered: Served):
    with steered.client() as client:
        reply = client.get("/v1/mods").json()
    found = {one["id"]: one for one in reply["data"]}
    assert found.keys() == FILES.keys()
    assert found["rewrite"]["summary"] == "Writes its text over the last two of four tokens, once."
    assert found["rewrite"]["error"] is None
    assert "ZeroDivisionError" in found["broken"]["error"]


def test_server_without_mods_refuses_them_and_lists_none(demo: Served):
    response = asked(demo, APIS["chat"], ["lead"])
    assert response.status_code == 400
    assert "--mods-dir" in response.text
    with demo.client() as client:
        assert client.get("/v1/mods").json()["data"] == []
        # There, a model may be called anything.
        body = {**text_body(), "model": "kqview/demo/lead"}
        assert client.post("/v1/completions", json=body).status_code == 200


def test_mod_that_hangs_costs_its_time_limit_and_holds_up_nobody(serve: Serve, mods_dir: Path):
    served = serve(Settings(n_slots=2, mods_dir=str(mods_dir), mod_time_limit_s=0.2))
    plain = asked(served, APIS["completions"], []).json()["choices"][0]["text"]
    hanging.clear()
    try:
        slow = asked(served, APIS["completions"], ["slow"])
        assert slow.json()["choices"][0]["text"] == plain
        served.wait_idle()
    finally:
        hanging.set()
    wait_until(lambda: not logs._n_calls)


def test_mod_that_raises_changes_nothing(steered: Served, caplog: pytest.LogCaptureFixture):
    plain = asked(steered, APIS["chat"], []).json()["choices"][0]["message"]
    assert asked(steered, APIS["chat"], ["fails"]).json()["choices"][0]["message"] == plain
    records = [one for one in caplog.records if one.name == "kqview.mods"]
    assert [one.levelname for one in records] == ["WARNING"]  # of as many failures as events
    assert "mod fails failed at Prefilled of step 0: KeyError: 'inside'" in caplog.text
    assert "Traceback" in caplog.text


def test_strict_server_ends_requests_whose_mods_fail(serve: Serve, mods_dir: Path):
    served = serve(Settings(mods_dir=str(mods_dir), mods_strict=True))
    for api in (APIS["chat"], APIS["kobold plain"]):
        failed = asked(served, api, ["fails"])
        assert (failed.status_code, "mod fails failed at" in failed.text) == (500, True)
        assert asked(served, api, ["lead"]).status_code == 200
    served.wait_idle()


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
@pytest.mark.parametrize("what", ["deep", "half"])
def test_calls_that_no_reply_can_hold_are_sent_as_they_can_be(steered: Served, api: Api, what: str):
    mods = [{"name": "says", "what": what}]
    assert asked(steered, api, mods).status_code == 200
    stream, _ = streamed(steered, api, mods)
    assert len(stream.calls) == 1


def test_error_of_a_mod_may_have_any_text(steered: Served):
    response = asked(steered, APIS["chat"], [{"name": "says", "what": "error"}])
    assert (response.status_code, response.json()["error"]["message"]) == (400, "bad \ufffd")


def test_mod_that_exits_ends_neither_its_request_nor_the_server(steered: Served):
    api = APIS["completions"]
    plain = asked(steered, api, []).json()["choices"][0]["text"]
    for mod in ({"name": "leaves"}, {"name": "leaves", "at": "end"}, "leaves_async"):
        assert asked(steered, api, [mod]).json()["choices"][0]["text"] == plain
    unmade = asked(steered, api, [{"name": "leaves", "at": "make"}])
    assert (unmade.status_code, "SystemExit" in unmade.text) == (503, True)


TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("name", "tools"),
    [
        ("chat", [{"type": "function", "function": TOOL}]),
        ("responses", [{"type": "function", **TOOL}]),
        ("messages", [{"name": "look", "input_schema": {"type": "object"}}]),
    ],
)
def test_mods_of_a_chat_see_its_messages_and_tools(steered: Served, name: str, tools: Any):
    api = APIS[name]
    assert api.whole(asked(steered, api, ["chat"]).json()).text == "['Who is Anna?', []]"
    reply = api.whole(asked(steered, api, ["chat"], tools=tools).json())
    assert reply.text == "['Who is Anna?', ['look']]"
    n = {"n": 2} if name == "chat" else {}
    choices = asked(steered, api, ["chat"], **n).json().get("choices", [])
    assert {one["message"]["content"] for one in choices} <= {"['Who is Anna?', []]"}


def test_mods_of_a_text_see_no_chat_of_another_request(steered: Served):
    asked(steered, APIS["chat"], ["chat"])
    reply = APIS["completions"].whole(asked(steered, APIS["completions"], ["chat"]).json())
    assert reply.text == "['none', []]"


# ---- traces


def test_traces_of_every_end_are_posted(serve: Serve, mods_dir: Path, tmp_path: Path):
    with receiving() as receiver:
        served = serve(
            Settings(
                mods_dir=str(mods_dir), trace_url=receiver.url, trace_key="k",
                trace_spool=str(tmp_path / "spool"), api_keys=("secret",),
            )
        )  # fmt: skip
        api = APIS["completions"]
        with served.client(headers={"authorization": "Bearer secret"}) as client:

            def ask(mods: Any, **more: Any) -> Any:
                body = {**api.body(), "temperature": 0, "mods": mods, **more}
                return client.post(api.path, json=body)

            ids = [ask(["rewrite"]).json()["id"]]
            texts = [ask(["canned"]).json()["choices"][0]["text"]]
            assert ask(["refuse"]).status_code == 400
            ask(["call"])
            assert ask(["lead"], stream=True).status_code == 200
            ask(["fails"])
            ask([])  # not traced
            receiver.wait(lambda: len(receiver.posts) >= 6)
            served.wait_until(lambda: "kqview_traces_sent_total 6" in client.get("/metrics").text)
    traces = [read_trace(one) for one in receiver.payloads]
    assert len(traces) == 6
    assert receiver.posts[0][1]["authorization"] == "Bearer k"
    reasons = [(one.request.inference_stats or {})["finish_reason"] for one in traces]
    assert reasons == ["length", "stop", "error", "tool_calls", "length", "length"]
    first = traces[0].request
    assert first.request_id.startswith(ids[0])
    assert first.model == served.service.pool.default.name
    assert first.active_mod_name == "Rewrite"
    assert "secret" not in str(receiver.payloads)
    assert first.user_api_key == f"sha256:{hashlib.sha256(b'secret').hexdigest()}"
    assert traces[1].request.final_text == texts[0] == " No."
    assert [one.log_message for one in traces[4].mod_logs] == ["leading"]
    assert all(one.exception_occurred for one in traces[5].mod_calls)
    for one in traces:
        assert final_ids(one) == one.request.final_token_ids
        assert one.request.completed_at is not None


def test_traces_of_two_keys_differ_in_their_ids_however_long_these_are(serve: Serve):
    with receiving() as receiver:
        served = serve(Settings(trace_url=receiver.url, trace="all", api_keys=("one", "two")))
        for key in ("one", "two"):
            with served.client(headers={"authorization": f"Bearer {key}"}) as client:
                body = {**kobold(), "request_id": "x" * 400}
                assert client.post("/api/v1/generate", json=body).status_code == 200
        receiver.wait(lambda: len(receiver.posts) >= 2)
    ids = {read_trace(one).request.request_id for one in receiver.payloads}
    assert len(ids) == 2


def test_every_request_is_traced_if_the_operator_wants_it(serve: Serve):
    with receiving() as receiver:
        served = serve(Settings(trace_url=receiver.url, trace="all"))
        reply = asked(served, APIS["chat"], None).json()
        receiver.wait(lambda: len(receiver.posts) >= 1)
    [trace] = map(read_trace, receiver.payloads)
    assert trace.request.request_id == reply["id"]
    assert trace.request.final_text == reply["choices"][0]["message"]["content"]
    assert final_ids(trace) == trace.request.final_token_ids
    assert trace.mod_calls == []


def test_receiver_that_is_gone_holds_up_no_request(serve: Serve, mods_dir: Path):
    with receiving() as receiver:
        receiver.may_answer.clear()
        served = serve(Settings(mods_dir=str(mods_dir), trace_url=receiver.url))
        for _ in range(3):
            assert asked(served, APIS["completions"], ["lead"]).status_code == 200
        receiver.wait(lambda: len(receiver.posts) == 1)


def test_client_hears_of_an_end_once_the_spool_has_its_trace(
    serve: Serve, mods_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write = post.durable.write_whole

    def write_late(*args: Any, **options: Any) -> Any:
        time.sleep(0.3)  # longer than a reply takes that does not wait
        return write(*args, **options)

    monkeypatch.setattr(post.durable, "write_whole", write_late)
    spool = tmp_path / "spool"
    with receiving() as receiver:
        receiver.may_answer.clear()  # what is sent stays in the spool until it is answered
        served = serve(
            Settings(
                mods_dir=str(mods_dir), trace_url=receiver.url, trace_spool=str(spool),
                trace="all",
            )
        )  # fmt: skip
        n_ended = 0

        def check_stored() -> None:
            nonlocal n_ended
            n_ended += 1
            assert len(list(spool.glob("*.json"))) == n_ended

        with served.client() as client:
            api = APIS["completions"]
            for more, status in (
                ({}, 200),
                ({"stream": True}, 200),
                ({"mods": ["canned"]}, 200),
                ({"mods": ["refuse"]}, 400),
                ({"mods": ["call"], "stream": True}, 200),
            ):
                assert client.post(api.path, json={**api.body(), **more}).status_code == status
                check_stored()
            reply = client.post(api.path, json={**api.body(), "n": 3})
            n_ended += 2
            assert reply.status_code == 200
            check_stored()
            with client.stream("POST", api.path, json={**api.body(), "stream": True}) as reply:
                for line in reply.iter_lines():
                    if line == "data: [DONE]":  # before the connection says so
                        check_stored()
            assert line == ""
        receiver.may_answer.set()
