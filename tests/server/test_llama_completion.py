"""Completions in the API of llama.cpp's server: fields, replies, streams and refusals."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from kqview.server import Settings
from kqview.server.api.llama_server.events import CompletionEvents
from tests.support.serving import serving

if TYPE_CHECKING:
    import httpx

    from tests.support.serving import Served

PROMPT = "Anna is a"
GREEDY = {"prompt": PROMPT, "temperature": 0}


def complete(client: httpx.Client, **fields: Any) -> Any:
    reply = client.post("/completion", json={**GREEDY, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """Events of a stream; every line of it is ``data: {...}`` or empty."""
    body = {**GREEDY, "stream": True, **fields}
    with client.stream("POST", "/completion", json=body) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    assert all(line.startswith("data: {") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# ---- one reply


def test_reply_has_every_field_of_llama_cpp(demo: Served, client: httpx.Client):
    reply = complete(client, n_predict=4, seed=7)
    expected = demo.engine.generate(PROMPT, max_tokens=4, temperature=0).read()
    settings, timings = reply.pop("generation_settings"), reply.pop("timings")
    n_prompt = len(demo.engine.tokenize(PROMPT))
    assert 0 <= reply.pop("id_slot") < 2
    assert reply == {
        "index": 0,
        "content": expected,
        "tokens": [],
        "stop": True,
        "model": "kqview demo",
        "tokens_predicted": 4,
        "tokens_evaluated": n_prompt,
        "prompt": f"<|endoftext|>{PROMPT}",
        "has_new_line": False,
        "truncated": False,
        "stop_type": "limit",
        "stopping_word": "",
        "tokens_cached": n_prompt + 3,
    }
    assert settings["n_predict"] == 4
    assert settings["seed"] == 7
    assert settings["temperature"] == 0
    assert settings["samplers"][0] == "penalties"
    assert timings["predicted_n"] == 4
    assert timings["prompt_n"] + timings["cache_n"] == n_prompt


def test_ids_come_only_if_asked_for(demo: Served, client: httpx.Client):
    ids = complete(client, n_predict=4, return_tokens=True)["tokens"]
    assert demo.engine.detokenize(ids) == complete(client, n_predict=4)["content"]


def test_prompt_in_every_form_is_the_same_prompt(demo: Served, client: httpx.Client):
    ids = demo.engine.tokenize(PROMPT)
    expected = complete(client, n_predict=5)["content"]
    for prompt in (ids, {"prompt_string": PROMPT}, [ids[0], PROMPT], [*ids[:2], *ids[2:]]):
        assert complete(client, prompt=prompt, n_predict=5)["content"] == expected


def test_list_of_prompts_gives_a_list_of_replies_in_order(client: httpx.Client):
    prompts = [PROMPT, [5, "x"], {"prompt_string": "The"}, "Ben"]
    replies = complete(client, prompt=prompts, n_predict=3)
    assert [one["index"] for one in replies] == [0, 1, 2, 3]
    alone = [complete(client, prompt=[prompt], n_predict=3) for prompt in prompts]
    assert [one["content"] for one in replies] == [one["content"] for one in alone]
    assert [one["prompt"] for one in replies] == [one["prompt"] for one in alone]


def test_samples_of_each_prompt_follow_one_another(client: httpx.Client):
    replies = complete(client, prompt=[PROMPT, "The"], n=2, n_predict=2)
    assert [one["index"] for one in replies] == [0, 1, 2, 3]
    assert replies[0]["prompt"] == replies[1]["prompt"] != replies[2]["prompt"]


def test_end_of_text_counts_as_a_predicted_token(client: httpx.Client):
    ended = complete(client, grammar='root ::= "abc"', return_tokens=True)
    assert (ended["content"], ended["stop_type"]) == ("abc", "eos")
    assert ended["tokens_predicted"] == ended["timings"]["predicted_n"] == len(ended["tokens"]) + 1
    cut = complete(client, grammar='root ::= "abc"', n_predict=1, return_tokens=True)
    assert cut["tokens_predicted"] == len(cut["tokens"]) == 1


def test_prompt_is_only_evaluated_if_nothing_is_to_be_predicted(demo: Served, client: httpx.Client):
    prompt = "A prompt that no other test has"
    reply = complete(client, prompt=prompt, n_predict=0, id_slot=1)
    assert (reply["content"], reply["tokens_predicted"]) == ("", 0)
    hidden = complete(client, prompt=prompt, n_predict=1)["content"]
    reply = complete(client, prompt=prompt, n_predict=0, id_slot=1, stop=[hidden])
    assert (reply["stop_type"], reply["stopping_word"]) == ("limit", "")
    assert demo.engine.slots[1].tokens == demo.engine.tokenize(prompt)
    again = complete(client, prompt=prompt, n_predict=1, id_slot=1)
    assert again["timings"]["prompt_n"] == 1


def test_without_cache_prompt_the_whole_prompt_is_evaluated(demo: Served, client: httpx.Client):
    n_prompt = len(demo.engine.tokenize(PROMPT))
    for options, n_cached in (({}, n_prompt - 1), ({"cache_prompt": False}, 0)):
        complete(client, n_predict=2, id_slot=0)
        timings = complete(client, n_predict=2, id_slot=0, **options)["timings"]
        assert (timings["cache_n"], timings["prompt_n"]) == (n_cached, n_prompt - n_cached)
    # Its samples share one evaluation.
    replies = complete(client, n_predict=2, n=2, cache_prompt=False)
    assert replies[0]["timings"]["cache_n"] == 0


def test_stop_word_is_named_and_not_shown(client: httpx.Client):
    whole = complete(client, n_predict=40)["content"]
    word = whole[len(whole) // 2 :][:5]
    reply = complete(client, n_predict=40, stop=["", word])
    assert reply["content"] == whole[: whole.index(word)]
    assert (reply["stop_type"], reply["stopping_word"]) == ("word", word)
    reply = complete(client, n_predict=40, n_probs=1, stop=[whole[:3]])
    assert (reply["content"], reply["completion_probabilities"]) == ("", [])


def test_full_slot_truncates():
    with serving(Settings(n_ctx=32)) as served, served.client() as client:
        reply = complete(client, n_predict=-1, ignore_eos=True)
    assert reply["truncated"]
    assert reply["stop_type"] == "limit"
    assert reply["tokens_cached"] == 32


def test_new_line_is_noticed_and_may_end_the_text(client: httpx.Client):
    lines = {"grammar": 'root ::= ("a\\n")+', "n_predict": 400, "ignore_eos": True}
    reply = complete(client, **lines)
    assert reply["has_new_line"]
    assert reply["tokens_predicted"] == 400
    late = complete(client, **lines, t_max_predict_ms=1)
    assert late["stop_type"] == "limit"
    assert late["tokens_predicted"] < 400
    assert late["content"].endswith("\n")


def test_only_named_fields_are_returned(client: httpx.Client):
    paths = ["content", "generation_settings/n_predict", "timings/none", "none"]
    reply = complete(client, n_predict=2, response_fields=paths)
    assert reply.keys() == {"content", "generation_settings/n_predict"}
    assert reply["generation_settings/n_predict"] == 2


def test_probabilities_of_each_token(demo: Served, client: httpx.Client):
    reply = complete(client, n_predict=3, n_probs=2, return_tokens=True)
    tokens = list(demo.engine.generate(PROMPT, max_tokens=3, temperature=0, top_logprobs=2))
    probabilities = reply["completion_probabilities"]
    assert [one["id"] for one in probabilities] == reply["tokens"] == [one.id for one in tokens]
    for one, token in zip(probabilities, tokens, strict=True):
        assert bytes(one["bytes"]) == demo.engine.token_bytes(token.id)
        assert one["logprob"] == pytest.approx(token.logprob, abs=1e-3)
        assert [top["id"] for top in one["top_logprobs"]] == [
            id_ for id_, _ in token.top_logprobs or ()
        ]
        assert one["top_logprobs"][0]["token"] == one["token"]


def test_probabilities_end_before_the_stop_word(client: httpx.Client):
    whole = complete(client, n_predict=20, n_probs=1)
    texts = [one["token"] for one in whole["completion_probabilities"]]
    assert "".join(texts) == whole["content"]
    word = texts[9].strip() or texts[10]
    reply = complete(client, n_predict=20, n_probs=1, stop=[word])
    shown = "".join(one["token"] for one in reply["completion_probabilities"])
    assert shown.startswith(reply["content"])
    assert len(reply["completion_probabilities"]) < reply["tokens_predicted"] + 1


def test_bias_in_every_form_bans_a_token(demo: Served, client: httpx.Client):
    first = complete(client, n_predict=1, return_tokens=True)["tokens"][0]
    text = demo.engine.token_text(first)
    assert demo.engine.tokenize(text, parse_special=False, add_special=False) == [first]
    ways: list[Any] = [[[first, False]], [[first, -100]], {str(first): -100}, {str(first): False},
                       [[text, False]], {text: False}]  # fmt: skip
    for bias in ways:
        reply = complete(client, n_predict=1, return_tokens=True, logit_bias=bias)
        assert reply["tokens"][0] != first, bias


def test_sampler_that_is_left_out_is_off(client: httpx.Client):
    """temperature 0 is greedy; without its sampler the text is random again."""
    fields = {"n_predict": 30, "samplers": ["top_k"], "top_k": 1}
    reply = complete(client, **fields)
    assert reply["generation_settings"]["samplers"] == ["top_k"]
    assert reply["generation_settings"]["temperature"] == 1
    assert reply["content"] == complete(client, n_predict=30)["content"]
    assert complete(client, n_predict=1, samplers="kt")["generation_settings"]["samplers"] == [
        "top_k",
        "temperature",
    ]


def test_samplers_have_all_their_names(client: httpx.Client):
    for names in (
        ["topk", "top-n-sigma", "typ", "temp"],
        ["top-k", "topnsigma", "typ_p", "t-e_mp"],
    ):
        used = complete(client, n_predict=1, samplers=names)["generation_settings"]["samplers"]
        assert used == ["top_n_sigma", "top_k", "typ_p", "temperature"]
    letters = complete(client, n_predict=1, samplers="edskypmxt")["generation_settings"]
    assert letters["samplers"] == complete(client, n_predict=1)["generation_settings"]["samplers"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_probabilities_after_the_samplers(demo: Served, client: httpx.Client, is_streamed: bool):
    fields: dict[str, Any] = {
        "temperature": 0.9, "top_k": 6, "top_n_sigma": 9.0, "min_keep": 2, "dynatemp_range": 0.3,
        "dynatemp_exponent": 2.0, "seed": 5,
    }  # fmt: skip
    body = {**fields, "n_predict": 4, "n_probs": 10, "post_sampling_probs": True}
    if is_streamed:
        *tokens, reply = stream(client, **body)
        found = [one["completion_probabilities"][0] for one in tokens]
    else:
        reply = complete(client, **body)
        found = reply["completion_probabilities"]
    used = reply["generation_settings"]
    assert {name: used[name] for name in fields} == {**fields}
    assert used["post_sampling_probs"] is True
    expected = list(
        demo.engine.generate(
            PROMPT, max_tokens=4, top_logprobs=10, post_sampling_probs=True, **fields
        )
    )
    for one, token in zip(found, expected, strict=True):
        assert one.keys() == {"id", "token", "bytes", "prob", "top_probs"}
        assert (one["id"], one["prob"]) == (token.id, math.exp(token.logprob or 0))
        assert token.top_logprobs is not None
        assert [(top["id"], top["prob"]) for top in one["top_probs"]] == [
            (id_, math.exp(logprob)) for id_, logprob in token.top_logprobs
        ]
        assert len(one["top_probs"]) <= 6
    assert max(len(one["top_probs"]) for one in found) > 1


def test_operator_decides_what_a_request_leaves_open():
    settings = Settings(sampling=("temperature=0", "seed=42", "top_k=5"), max_tokens=7)
    with serving(settings) as served, served.client() as client:
        reply = client.post("/completion", json={"prompt": PROMPT, "top_k": 9}).json()
        chat = {"messages": [{"role": "user", "content": PROMPT}]}
        texts = {
            client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"][
                "content"
            ]
            for _ in range(2)
        }
        greedy = served.engine.generate(PROMPT, max_tokens=7, temperature=0).read()
    used = reply["generation_settings"]
    assert (used["temperature"], used["seed"], used["top_k"]) == (0, 42, 9)
    assert (reply["tokens_predicted"], reply["content"]) == (7, greedy)
    assert len(texts) == 1


def test_schema_and_grammar_hold(client: httpx.Client):
    pytest.importorskip("llguidance")
    schema: dict[str, Any] = {
        "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
        "additionalProperties": False,
    }  # fmt: skip
    reply = complete(client, n_predict=60, json_schema=schema)
    assert set(json.loads(reply["content"])) == {"a"}
    del schema["additionalProperties"]  # false unless it is said, as in llama.cpp's server
    reply = complete(client, n_predict=60, json_schema=schema, temperature=1.5, seed=1)
    assert reply["content"] in ('{"a":true}', '{"a":false}')
    both = complete(client, n_predict=60, json_schema=schema, grammar='root ::= "y"')
    assert both["content"] == "y"


def test_json_is_closed_before_its_limit_cuts_it_off(client: httpx.Client):
    pytest.importorskip("llguidance")
    schema = {"type": "array", "items": {"type": "string", "minLength": 8}, "minItems": 1}
    body: dict[str, Any] = {"json_schema": schema, "n_predict": 14, "temperature": 0}
    assert complete(client, **body)["stop_type"] == "limit"
    closed = complete(client, **body, finish_on_length="close")
    assert closed["stop_type"] == "eos"
    assert len(json.loads(closed["content"])[0]) >= 8


def test_requests_of_several_clients_do_not_mix(client: httpx.Client, demo: Served):
    prompts = [f"{name} is a" for name in ("Anna", "Ben", "Carl", "Dora", "Eva", "Finn")]
    expected = [complete(client, prompt=one, n_predict=20)["content"] for one in prompts]

    def ask(prompt: str) -> str:
        with demo.client() as own:
            return complete(own, prompt=prompt, n_predict=20)["content"]

    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(ask, prompts)) == expected


# ---- a stream


def test_stream_brings_each_token_and_ends_with_the_figures(client: httpx.Client):
    *tokens, end = stream(client, n_predict=8)
    whole = complete(client, n_predict=8, return_tokens=True)
    assert "".join(one["content"] for one in tokens) == whole["content"]
    assert [id_ for one in tokens for id_ in one["tokens"]] == whole["tokens"]
    assert [one["tokens_predicted"] for one in tokens] == list(range(1, 9))
    assert not any(one["stop"] for one in tokens)
    assert end["stop"]
    assert (end["content"], end["tokens"]) == ("", [])
    assert end["stop_type"] == "limit"
    assert end["timings"]["predicted_n"] == 8
    assert "timings" not in tokens[0]


def test_stream_shows_neither_a_stop_word_nor_its_beginning(client: httpx.Client):
    whole = complete(client, n_predict=40)["content"]
    word = whole[20:30]
    *tokens, end = stream(client, n_predict=40, stop=[word])
    assert "".join(one["content"] for one in tokens) == whole[: whole.index(word)]
    assert end["stopping_word"] == word


def test_text_that_only_began_like_a_stop_word_is_sent_in_the_end(client: httpx.Client):
    whole = complete(client, n_predict=12)["content"]
    *tokens, _ = stream(client, n_predict=12, stop=[whole[-3:] + "\x00"])
    assert "".join(one["content"] for one in tokens) == whole


def test_stream_of_several_prompts_says_which_text_a_token_is_of(client: httpx.Client):
    prompts = [PROMPT, "The", "Ben"]
    events = stream(client, prompt=prompts, n_predict=6)
    whole = complete(client, prompt=prompts, n_predict=6)
    for i, reply in enumerate(whole):
        mine = [one for one in events if one["index"] == i]
        assert "".join(one["content"] for one in mine) == reply["content"]
        assert [one["stop"] for one in mine] == [False] * (len(mine) - 1) + [True]


def test_stream_with_timings_probabilities_and_progress(client: httpx.Client):
    begun, evaluated, *tokens, end = stream(
        client, n_predict=3, n_probs=1, timings_per_token=True, return_progress=True
    )
    assert [one["timings"]["predicted_n"] for one in tokens] == [1, 2, 3]
    assert all(len(one["completion_probabilities"]) == 1 for one in tokens)
    assert "completion_probabilities" not in end
    progress = [one["prompt_progress"] for one in (begun, evaluated)]
    assert progress[0]["processed"] == progress[0]["cache"] == progress[1]["cache"]
    assert progress[1]["processed"] == progress[1]["total"] == tokens[0]["tokens_evaluated"]
    assert begun["timings"]["prompt_ms"] == 0 < evaluated["timings"]["prompt_ms"]
    assert not any("prompt_progress" in one for one in tokens)


def test_rates_are_those_of_steps(client: httpx.Client):
    one, many = (complete(client, n_predict=n, ignore_eos=True)["timings"] for n in (1, 8))
    assert one["predicted_per_second"] == one["predicted_per_token_ms"] == 0
    assert many["predicted_per_token_ms"] == pytest.approx(many["predicted_ms"] / 7)


def test_guesses_are_counted_in_timings(steady_demo: Served):
    with steady_demo.client() as client:
        options: dict[str, Any] = {"n_predict": 40, "ignore_eos": True}
        plain = complete(client, **options)
        assert "draft_n" not in plain["timings"]
        again = complete(client, prediction=plain["content"], **options)
        assert again["content"] == plain["content"]
        timings = again["timings"]
        assert 20 < timings["draft_n_accepted"] <= timings["draft_n"]
        few = complete(client, prediction=plain["content"], **{"speculative.n_max": 2}, **options)
        assert few["content"] == plain["content"]
        none = complete(client, prediction=plain["content"], **{"speculative.n_max": 0}, **options)
        assert "draft_n" not in none["timings"]


def test_ignored_ends_are_shown_as_biases(demo: Served, client: httpx.Client):
    model = demo.engine.model
    settings = complete(client, n_predict=1, ignore_eos=True)["generation_settings"]
    assert settings["logit_bias"] == [
        {"bias": None, "token": id_} for id_ in (model.eos_token_id, model.eot_token_id)
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_end_that_repeats_much_is_written_beside_the_event_loop(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
):
    threads: list[str] = []
    end = CompletionEvents._end

    def seen(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return end(*args, **options)

    monkeypatch.setattr(CompletionEvents, "_end", seen)
    for bias in ({}, {str(i): 0.123456789012 for i in range(500)}):
        fields = {"n_predict": 1, "logit_bias": bias, "stop": ["x" * 1000] * 256}
        body = {**GREEDY, "stream": is_streamed, **(fields if bias else {"n_predict": 1})}
        assert client.post("/completion", json=body).status_code == 200
    assert not threads[0].startswith("kqview-")
    assert threads[1].startswith("kqview-")


# ---- refusals


REFUSED: list[tuple[dict[str, Any], int, str, tuple[str, ...]]] = [
        ({"prompt": None}, 400, "invalid_request_error", ("prompt", "missing")),
        ({"prompt": []}, 400, "invalid_request_error", ("prompt", "empty")),
        ({"prompt": [[]]}, 400, "invalid_request_error", ("prompt", "no tokens")),
        ({"prompt": [True]}, 400, "invalid_request_error", ("prompt", "bool")),
        ({"prompt": 5}, 400, "invalid_request_error", ("prompt", "int")),
        ({"prompt": [1, None]}, 400, "invalid_request_error", ("prompt",)),
        ({"prompt": [10**6]}, 400, "invalid_request_error", (str(10**6),)),
        ({"prompt": ["a"] * 99}, 400, "invalid_request_error", ("prompt", "99")),
        ({"prompt": [7] * 9999}, 400, "exceed_context_size_error", ("9999",)),
        (
            {"prompt": {"prompt_string": "a", "multimodal_data": ["eA=="]}},
            501, "not_supported_error", ("multimodal_data",),
        ),
        ({"id_slot": 7}, 404, "not_found_error", ("id_slot", "7")),
        ({"id_slot": -2}, 404, "not_found_error", ("id_slot", "-2")),
        ({"n_predict": -2}, 400, "invalid_request_error", ("n_predict", "-2")),
        ({"n": 99}, 400, "invalid_request_error", ("n is 99", "16")),
        ({"temperature": "hot"}, 400, "invalid_request_error", ("temperature",)),
        ({"repeat_penalty": -1}, 400, "invalid_request_error", ("repeat_penalty", "-1")),
        ({"n_probs": 100_000}, 400, "invalid_request_error", ("n_probs", "100000")),
        ({"grammar": "root ::= ("}, 400, "invalid_request_error", ("grammar",)),
        ({"logit_bias": [[1]]}, 400, "invalid_request_error", ("logit_bias",)),
        ({"logit_bias": [[1, True]]}, 400, "invalid_request_error", ("logit_bias", "true")),
        ({"logit_bias": {"10000000": 1}}, 400, "invalid_request_error", ("10000000",)),
        ({"logit_bias": {"1" * 5000: 1}}, 400, "invalid_request_error", ("logit_bias", "1111")),
        ({"response_fields": ["x" * 1001]}, 400, "invalid_request_error", ("response_fields",)),
        ({"dry_sequence_breakers": []}, 400, "invalid_request_error", ("dry_sequence_breakers",)),
        ({"adaptive_target": 0.5}, 501, "not_supported_error", ("adaptive_target",)),
        ({"n_indent": 3}, 501, "not_supported_error", ("n_indent",)),
    ]  # fmt: skip


@pytest.mark.parametrize(("fields", "status", "kind", "facts"), REFUSED)
def test_request_that_cannot_work_is_refused_with_llama_cpps_type(
    client: httpx.Client, fields: dict[str, Any], status: int, kind: str, facts: tuple[str, ...]
):
    reply = client.post("/completion", json={**GREEDY, "n_predict": 2, **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (status, status, kind)
    for fact in facts:
        assert fact in error["message"]


def test_prompt_that_is_too_long_is_answered_with_both_sizes(client: httpx.Client, demo: Served):
    error = client.post("/completion", json={"prompt": [7] * 9999}).json()["error"]
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (9999, demo.engine.n_ctx)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": -1}, {"top_p": 2}, {"top_p": 0}, {"min_p": -1}, {"temperature": -1},
        {"typical_p": 2}, {"xtc_probability": 9}, {"xtc_threshold": -1}, {"mirostat": 9},
        {"dry_base": 0.5}, {"seed": -1}, {"seed": 2**32 - 1}, {"stop": None}, {"stop": ""},
        {"grammar": ""}, {"logit_bias": []}, {"logit_bias": {}}, {"samplers": ["unknown"]},
        {"min_keep": 0}, {"top_n_sigma": -1}, {"dynatemp_range": -1}, {"adaptive_target": -1},
        {"cache_prompt": False}, {"backend_sampling": True}, {"unknown": [1]}, {"n_probs": 0},
        {"logprobs": 1}, {"max_tokens": 1}, {"max_completion_tokens": 1}, {"n_indent": 0},
    ],
)  # fmt: skip
def test_values_that_llama_cpp_takes_are_taken(client: httpx.Client, fields: dict[str, Any]):
    reply = client.post("/completion", json={"prompt": PROMPT, "n_predict": 1, **fields})
    assert reply.status_code == 200, reply.text
