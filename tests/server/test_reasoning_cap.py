"""Limits of reasoning: the mark that closes it is forced, and the answer goes on."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import example, given, settings, strategies as st

from kqview import Engine, Sampling
from kqview.chat.reasoning import Split, TokenCounter
from kqview.chat.turn import ChatAnswer, Reading
from kqview.mods import Added, Backtrack, mod
from kqview.server import Settings
from kqview.server.api.openai.schema import ChatBody
from kqview.server.api.wire.chat import ChatRequest, prepare, with_fields
from kqview.server.api.wire.reasoning_cap import (
    CapForcing,
    ReasoningCap,
    cap_of,
)
from kqview.stop_strings import TextStream
from tests.support import chat_templates as shapes, openai as api, tiny_gguf
from tests.support.mods import Words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kqview import Generation
    from tests.support.serving import Serve, Served

MARKER = "===FINAL==="
SPLITS = {
    "think": Split(),
    "think opened": Split(opened="<think>"),
    "tags": Split(mode="tags", marker=MARKER),
    "tags opened": Split(mode="tags", marker=MARKER, opened="<analysis>"),
    "marker": Split(mode="marker", marker=MARKER),
    "harmony": Split(mode="harmony"),
}
OPEN = {
    "think": "<think>",
    "think opened": "",
    "tags": "<analysis>",
    "tags opened": "",
    "marker": "",
    "harmony": "<|channel|>analysis<|message|>",
}
MARKS = (
    "<think>", "</think>", "<analysis>", "</analysis>", "<final>", "</final>", "<|channel|>",
    "<|message|>", "<|end|>", "<|start|>",
)  # fmt: skip
WORDS = Words("analysis", "final", "assistant", "tell", *MARKS)
TOKENS = st.lists(
    st.sampled_from((*MARKS, "analysis", "final", "===", "FINAL", "tell", " ", "x", "\u00e9", "<")),
    max_size=30,
)


def forcing_of(name: str, most: int) -> CapForcing:
    return CapForcing(
        ReasoningCap(SPLITS[name], most),
        lambda text: WORDS.tokenize(text, False),
        WORDS.pieces.__getitem__,
    )


def written(forcing: CapForcing, wanted: Sequence[int]) -> tuple[list[int], int]:
    """A text whose model wants to write *wanted*, and how many times something was forced."""
    ids, n_forced = list(forcing([], [])), 0
    n_forced += bool(ids)
    for id_ in wanted:
        more = forcing(list(ids), [id_])
        n_forced += bool(more)
        ids += [id_, *more]
    return ids, n_forced


def text_of(ids: Sequence[int]) -> str:
    return b"".join(WORDS.pieces[id_] for id_ in ids).decode()


def counted(split: Split, ids: Sequence[int]) -> TokenCounter:
    splitter, counter, stream = split.splitter(), TokenCounter(), TextStream()
    for id_ in ids:
        text = stream.feed(WORDS.pieces[id_])
        counter.add(text)
        counter.classify(splitter.feed(text))
    counter.classify(splitter.flush())
    counter.end()
    return counter


@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("name", SPLITS)
def test_reasoning_ends_at_its_limit_and_the_answer_goes_on(name: str, most: int):
    wanted = WORDS.tokenize(OPEN[name] + "tell" * 8, False)
    ids, n_forced = written(forcing_of(name, most), wanted)
    answer = Reading(SPLITS[name]).answer(text_of(ids))
    assert n_forced == 1
    assert (answer.reasoning, answer.content) == ("tell" * most, "tell" * (8 - most))


@pytest.mark.parametrize("name", SPLITS)
def test_text_below_the_limit_is_left_as_it_is(name: str):
    wanted = WORDS.tokenize(OPEN[name] + "tell" * 8, False)
    assert written(forcing_of(name, 9), wanted) == (wanted, 0)


@pytest.mark.parametrize("name", SPLITS)
@settings(max_examples=60, deadline=None)
@given(texts=TOKENS, most=st.integers(0, 6))
@example(texts=["<think>", "x", "<", "\u00e9"], most=2)
def test_no_text_has_more_reasoning_than_its_limit(name: str, texts: list[str], most: int):
    wanted = [id_ for text in [OPEN[name], *texts] for id_ in WORDS.tokenize(text, False)]
    ids, _ = written(forcing_of(name, most), wanted)
    # One more where the limit is inside of a character.
    assert counted(SPLITS[name], ids).n_reasoning <= most + 1 + text_of(ids).count("\u00e9")
    assert "\ufffd" not in text_of(ids)


def test_mark_that_the_model_has_begun_is_completed():
    wanted = WORDS.tokenize("tell===FIN", False)
    ids, _ = written(forcing_of("marker", 4), wanted[:4])
    assert text_of(ids) == "tell===FINAL==="


def test_character_is_whole_before_the_reasoning_ends():
    ids, _ = written(forcing_of("think opened", 2), WORDS.tokenize("x\U0001f642yz", False))
    assert text_of(ids) == "x\U0001f642</think>yz"


def test_bytes_that_never_become_a_character_do_not_hold_the_end_up():
    wanted = [1 + 0xF0] * 20  # ids of bytes follow that of the end
    ids, n_forced = written(forcing_of("think opened", 2), wanted)
    assert n_forced == 1
    assert 4 <= ids.index(WORDS.id("</think>")) <= 6


def test_mark_that_the_vocabulary_cannot_write_is_given_up():
    forcing = CapForcing(
        ReasoningCap(SPLITS["think opened"], 1), lambda text: [WORDS.id("x")],
        WORDS.pieces.__getitem__,
    )  # fmt: skip
    ids, n_forced = written(forcing, WORDS.tokenize("tell" * 9, False))
    assert n_forced == 3
    assert text_of(ids).count("tell") == 9


@settings(max_examples=60, deadline=None)
@given(texts=TOKENS, seed=st.integers(0, 100))
def test_tokens_that_mods_take_back_do_not_count(texts: list[str], seed: int):
    """Whatever was there before, what follows is as if only what is left had been."""
    chance = random.Random(seed)
    forcing, ids = forcing_of("think opened", 3), list[int]()
    ids += forcing([], [])
    for text in texts:
        kept = ids[: len(ids) - chance.choice((0, 0, 1, 4))] if ids else []
        added = WORDS.tokenize(text, False)
        fresh = forcing_of("think opened", 3)
        expected = fresh(kept, added) if kept else fresh([], added)
        assert list(forcing(list(kept), added)) == list(expected)
        ids = [*kept, *added, *expected]


# ---- when a request needs none


@pytest.mark.parametrize(
    ("most", "split", "max_tokens"),
    [(5, Split(mode="none"), 100), (100, Split(), 100)],
)
def test_limit_that_cannot_be_reached_costs_nothing(most: int, split: Split, max_tokens: int):
    assert cap_of(most, split, Sampling(), max_tokens=max_tokens, names={}) is None


@pytest.mark.parametrize(
    ("wanted", "default", "options", "expected"),
    [
        (None, -1, {}, None),
        (None, 5, {}, 5),
        (3, 5, {}, 3),
        (0, 5, {}, 0),
        (None, 5, {"grammar": "root ::= [a]"}, None),
        (3, 5, {"grammar": "root ::= [a]"}, 3),
    ],
)
def test_server_has_a_default_for_chats_without_a_grammar_of_their_own(
    wanted: int | None, default: int, options: dict[str, Any], expected: int | None
):
    body = ChatBody(messages=[], reasoning_budget_tokens=wanted, **options)
    engine = cast("Engine", SimpleNamespace(tokenize=str.split))
    server = Settings(reasoning_budget=default)
    chat = with_fields(ChatRequest(messages=[]), body, engine=engine, settings=server)
    assert chat.reasoning_budget == expected


# ---- with an engine


CONTROLS = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|return|>",
    "<|call|>",
    "<think>",
    "</think>",
)
HARMONY = "{{ tools if tools }}" + shapes.HARMONY
THINKING = "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Random weights, ids below 256 are bytes; marks are control tokens."""
    path = tmp_path_factory.mktemp("model") / "marks.gguf"
    tiny_gguf.write_model(path, specials=CONTROLS)
    with Engine(path, n_ctx=1024, n_threads=1) as engine:
        yield engine


def chat(**options: Any) -> ChatRequest:
    pytest.importorskip("jinja2")
    given: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Who?"}],
        # Letters alone: a random model would write anything, and end by chance.
        "sampling": Sampling(temperature=0, logit_bias={ord("a") + i: 50.0 for i in range(26)}),
        "request_id": "r",
        "max_tokens": 40,
    }
    return ChatRequest(**given | options)


def generated(engine: Engine, request: ChatRequest, **options: Any) -> Generation:
    asked = prepare(engine, request).request
    assert not isinstance(asked.prompt, str)
    forcing = asked.forcing and asked.forcing(engine)
    generation = engine.generate(
        list(asked.prompt), sampling=asked.sampling, max_tokens=asked.max_tokens, forcing=forcing,
        **options,
    )  # fmt: skip
    generation.read()
    return generation


@pytest.mark.parametrize("most", [0, 7])
def test_control_token_closes_the_reasoning(engine: Engine, most: int):
    request = chat(chat_template=THINKING, reasoning_budget=most)
    generation = generated(engine, request)
    end = engine.control_tokens["</think>"]
    assert generation.tokens.index(end) == most
    assert generation.tokens.count(end) == 1
    assert len(generation.tokens) == 40
    # The answer is what the model says after that text.
    prompt = prepare(engine, request).request.prompt
    assert not isinstance(prompt, str)
    again = engine.generate(
        [*prompt, *generation.tokens[: most + 1]], sampling=request.sampling,
        max_tokens=39 - most,
    )  # fmt: skip
    again.read()
    assert again.tokens == generation.tokens[most + 1 :]


def reasoned(engine: Engine, request: ChatRequest) -> ChatAnswer:
    """The answer to a chat in Harmony whose model begins to reason."""
    work = prepare(engine, request)
    assert work.request.forcing is not None
    forcing = work.request.forcing(engine)
    head = engine.tokenize("<|channel|>analysis<|message|>", add_special=False)

    def begun(kept: Sequence[int], added: Sequence[int]) -> Sequence[int]:
        return head if not kept and not added else forcing(kept, added)

    assert not isinstance(work.request.prompt, str)
    generation = engine.generate(
        list(work.request.prompt), sampling=work.request.sampling, max_tokens=200, forcing=begun
    )
    return work.reading.answer(generation.read())


LETTER = {ord("x"): 200.0}


def test_channel_of_reasoning_is_closed_and_that_of_the_answer_opened(engine: Engine):
    sampling = Sampling(temperature=0, logit_bias=LETTER)
    answer = reasoned(engine, chat(chat_template=HARMONY, reasoning_budget=5, sampling=sampling))
    assert answer.reasoning == "xxxxx"
    assert set(answer.content) == {"x"}


def test_call_that_is_required_follows_the_reasoning(engine: Engine):
    pytest.importorskip("llguidance")
    tool = {"type": "function", "function": {"name": "stop", "parameters": {"maxProperties": 0}}}
    answer = reasoned(
        engine,
        chat(
            chat_template=HARMONY, reasoning_budget=5, tools=[tool], tool_choice="required",
            parallel_calls=False, sampling=Sampling(temperature=0, logit_bias=LETTER),
        ),
    )  # fmt: skip
    assert answer.reasoning == "xxxxx"
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("stop", {})]


def test_limit_counts_what_is_left_after_mods(engine: Engine):
    @mod
    def back(event: Any) -> Any:
        if isinstance(event, Added) and event.step == 4:
            return Backtrack(3)
        return None

    request = chat(chat_template=THINKING, reasoning_budget=6)
    generation = generated(engine, request, mods=[back])
    assert generation.tokens.index(engine.control_tokens["</think>"]) == 6


def test_answer_by_a_schema_has_its_reasoning_limited_too(engine: Engine):
    pytest.importorskip("llguidance")
    request = chat(
        chat_template=THINKING, reasoning_budget=6, schema={"const": [1]}, max_tokens=200,
        sampling=Sampling(temperature=1, seed=3),
    )  # fmt: skip
    work = prepare(engine, request)
    answer = work.reading.answer(generated(engine, request).text)
    assert len(answer.reasoning.encode()) <= 6 * 4
    assert json.loads(answer.content) == [1]


def test_answer_by_a_schema_without_reasoning_is_not_steered(engine: Engine):
    request = chat(
        chat_template="{{ messages[0].content }}", reasoning_budget=6, schema={"const": [1]}
    )
    assert prepare(engine, request).request.forcing is None


# ---- over HTTP


TURNS = [
    {"role": "user", "content": "Who is Anna?"},
    {"role": "assistant", "content": "<think>"},
]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": TURNS}),
    "responses": ("/v1/responses", {"input": TURNS}),
    "messages": ("/v1/messages", {"messages": TURNS}),
    "completions": ("/v1/completions", {"prompt": "Anna is<think>"}),
    "llama_server": ("/completion", {"prompt": "Anna is<think>"}),
}


def parts_of(name: str, reply: Any) -> tuple[str, str]:
    """Reasoning and content of a reply."""
    match name:
        case "chat":
            message = reply["choices"][0]["message"]
            return message["reasoning_content"], message["content"]
        case "responses":
            thought, said = (item["content"][0]["text"] for item in reply["output"])
            return thought, said
        case "messages":
            thought, said = reply["content"]
            return thought["thinking"], said["text"]
        case "completions":
            text = reply["choices"][0]["text"]
        case _:
            text = reply["content"]
    reasoning, _, content = text.partition("</think>")
    return reasoning.strip(), content.lstrip()


@pytest.mark.parametrize("name", BODIES)
def test_every_api_limits_the_reasoning(demo: Served, name: str):
    path, body = BODIES[name]
    fields: dict[str, Any] = {"reasoning_budget_tokens": 4}
    if name == "messages":
        fields = {"thinking": {"type": "enabled", "budget_tokens": 4}}
    limit = {"responses": "max_output_tokens"}.get(name, "max_tokens")
    body = {**body, limit: 16, "temperature": 0}
    with demo.client() as client:
        capped = client.post(path, json={**body, **fields})
        free = client.post(path, json=body)
    assert capped.status_code == free.status_code == 200, capped.text
    reasoning, content = parts_of(name, capped.json())
    assert reasoning
    assert content
    engine = demo.engine
    assert len(engine.tokenize(reasoning, add_special=False)) <= 5
    if name == "responses":
        usage = capped.json()["usage"]
        assert usage["output_tokens_details"]["reasoning_tokens"] == 4
        assert usage["output_tokens"] == 16
    # Without a limit the reasoning does not end here.
    assert "</think>" not in free.text


def test_stream_has_reasoning_then_content(demo: Served):
    fields: dict[str, Any] = {
        "messages": TURNS, "temperature": 0, "max_tokens": 16, "reasoning_budget_tokens": 4,
    }  # fmt: skip
    whole = api.chat(demo, **fields)["choices"][0]["message"]
    stream = api.chat_chunks(demo, **fields)
    for name in ("reasoning_content", "content"):
        assert api.joined(stream, name) == whole[name]


def test_default_of_the_server_counts_for_chats(serve: Serve):
    served = serve(Settings(reasoning_budget=4))
    for name in ("chat", "messages", "responses"):
        path, body = BODIES[name]
        limit = "max_output_tokens" if name == "responses" else "max_tokens"
        with served.client() as client:
            reply = client.post(path, json={**body, limit: 16, "temperature": 0})
        assert all(parts_of(name, reply.json())), reply.text


@pytest.mark.parametrize("n", [1, 2])
def test_samples_have_a_limit_each(demo: Served, n: int):
    path, body = BODIES["completions"]
    fields = {"max_tokens": 12, "n": n, "seed": 1, "temperature": 1, "reasoning_budget_tokens": 3}
    with demo.client() as client:
        reply = client.post(path, json={**body, **fields}).json()
    assert [choice["text"].count("</think>") for choice in reply["choices"]] == [1] * n


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("chat", {"reasoning_budget_tokens": -2}, "reasoning_budget_tokens is -2"),
        ("chat", {"reasoning_budget_tokens": 1.5}, "reasoning_budget_tokens"),
        ("chat", {"thinking_budget_tokens": 3, "grammar": 'root ::= "a"'},
         "thinking_budget_tokens cannot be combined with grammar"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": -1}}, "budget_tokens"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 3},
                      "grammar": 'root ::= "a"'},
         "thinking.budget_tokens cannot be combined with grammar"),
        ("completions", {"prompt": ["a<think>", "b"], "reasoning_budget_tokens": 3},
         "send them apart"),
        ("llama_server", {"prompt": ["a<think>", "b"], "thinking_budget_tokens": 3},
         "send them apart"),
    ],
)  # fmt: skip
def test_limit_that_cannot_work_is_refused_by_name(
    demo: Served, name: str, fields: dict[str, Any], said: str
):
    path, body = BODIES[name]
    with demo.client() as client:
        refused = client.post(path, json={**body, "max_tokens": 8, **fields})
    assert refused.status_code in (400, 422), refused.text
    assert said in refused.json()["error"]["message"]


def test_request_without_a_limit_is_not_steered(demo: Served):
    path, body = BODIES["chat"]
    steered: list[str] = []

    def note(run: Any) -> None:
        steered.append(type(run.generations[0]._source).__name__)

    with demo.noting_ends(note), demo.client() as client:
        for budget in (None, -1, 8, 2):
            wanted = {**body, "max_tokens": 8, "reasoning_budget_tokens": budget}
            assert client.post(path, json=wanted).status_code == 200
    assert steered == ["PlainSource"] * 3 + ["SteeredSource"]
