"""json_schema, regex and grammar: what a model says follows them and ends, hostile ones too."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine
from kqview.errors import DecodeError, InvalidSampling, KqviewError
from tests.support import tiny_gguf
from tests.support.hostile_grammars import (
    AMBIGUOUS,
    CONSTRAINTS,
    COSTLY,
    GRAMMARS,
    LATE,
    joined_lark,
    write_spaced_model,
)
from tests.support.processes import command_of, processes_below, rss_bytes
from tests.support.rows import random_ids
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.conftest import MakeEngine

pytest.importorskip("llguidance")
PROMPT = random_ids(12)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("model") / "llama.gguf"
    with Engine(tiny_gguf.write_preset(path, "tiny_llama"), n_ctx=512, n_threads=1) as engine:
        yield engine


def is_person(value: Any) -> bool:
    return (
        list(value) == ["name", "age", "tags"]
        and re.fullmatch(r"[A-Z][a-z]{1,6}", value["name"]) is not None
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a", "b"}
    )


MODELS = ("demo", "random_model")
SAMPLERS: list[dict[str, Any]] = [{}, {"top_k": 0, "top_p": 1, "min_p": 0}, {"mirostat": 2}]
PATTERNS = (
    r"[0-9]{4}-[01][0-9]", r"(yes|no|maybe)!?", r"é{1,9}x{2,3}", r"\p{Lu}[^a-z\n]{3}"
)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", SAMPLERS)
def test_output_follows_the_schema(
    seed: int, model: str, options: dict[str, Any], request: pytest.FixtureRequest
):
    engine: Engine = request.getfixturevalue(model)
    generation = engine.generate(
        PROMPT, json_schema=PERSON, temperature=1, seed=seed, max_tokens=450, **options
    )
    text = generation.read()
    assert is_person(json.loads(text)), text
    assert generation.finish_reason == "stop"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_output_matches_the_regex_and_stops(
    seed: int, model: str, pattern: str, request: pytest.FixtureRequest
):
    engine: Engine = request.getfixturevalue(model)
    generation = engine.generate(PROMPT, regex=pattern, temperature=1, seed=seed, max_tokens=200)
    text = generation.read()
    assert re.fullmatch(pattern.replace(r"\p{Lu}", "[^\\W\\d_a-z]"), text), text
    assert generation.finish_reason == "stop"


# An empty object fits both.
ONE_OF: dict[str, Any] = {
    "oneOf": [{"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab"]
}
LARK = """%llguidance {}
start: ("\\n" call){1,3} END
call: "<call>" %json {"type": "integer", "minimum": 10, "maximum": 99}
END: /end!?/
"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", ["demo", "random_model"])
def test_output_follows_a_grammar_of_llguidance(
    model: str, seed: int, request: pytest.FixtureRequest
):
    engine: Engine = request.getfixturevalue(model)
    generation = engine.generate(PROMPT, grammar=LARK, temperature=1, seed=seed, max_tokens=900)
    text = generation.read()
    assert re.fullmatch(r"(\n<call>[0-9]{2}){1,3}end!?", text), text
    assert generation.finish_reason == "stop"


def test_grammar_of_llguidance_may_name_special_tokens(random_model: Engine):
    start = tiny_gguf.IM_START
    lark = f'%llguidance {{}}\nstart: "a" <[{start}]> "b"'
    generation = random_model.generate(PROMPT, grammar=lark, temperature=1)
    generation.read()
    assert generation.tokens[:3] == [ord("a"), start, ord("b")]
    assert generation.finish_reason == "stop"


def test_output_that_was_cut_is_the_start_of_a_match(random_model: Engine):
    generation = random_model.generate(PROMPT, regex="(ab)*", temperature=1, max_tokens=5)
    text = generation.read()
    assert re.fullmatch("(ab)*a?", text)
    assert (generation.finish_reason == "length") == (len(text) == 5)


def test_tokens_come_while_python_holds_the_gil(random_model: Engine):
    interval_s = sys.getswitchinterval()
    n_before = random_model.stats().n_tokens
    sys.setswitchinterval(100)  # from here on nobody else gets it
    try:
        generation = random_model.generate(PROMPT, regex="[a-z]{50}", temperature=1)
        end_s = time.monotonic() + 1
        while time.monotonic() < end_s and random_model.stats().n_tokens < n_before + 4:
            pass
        n_tokens = random_model.stats().n_tokens - n_before
    finally:
        sys.setswitchinterval(interval_s)
    generation.close()
    assert n_tokens >= 4


def test_greedy_output_is_the_best_allowed_one(random_model: Engine):
    # One choice: each token is the more probable of two digits, by the logits without constraint.
    free = next(random_model.generate(PROMPT, temperature=0, top_logprobs=320))
    assert free.top_logprobs is not None
    logprobs = dict(free.top_logprobs)
    best = max((ord(digit) for digit in "37"), key=lambda id_: logprobs[id_])
    generation = random_model.generate(PROMPT, regex="[37]", temperature=0, top_logprobs=3)
    token = next(generation)
    assert token.id == best
    assert token.logprob is not None
    assert math.isclose(token.logprob, logprobs[best], abs_tol=1e-4)
    assert token.top_logprobs is not None
    assert [id_ for id_, _ in token.top_logprobs] == [id_ for id_, _ in free.top_logprobs[:3]]
    generation.close()


def test_sampled_share_follows_the_model(random_model: Engine):
    free = next(random_model.generate(PROMPT, temperature=0, top_logprobs=320))
    assert free.top_logprobs is not None
    p = {id_: math.exp(logprob) for id_, logprob in free.top_logprobs}
    share = p[ord("3")] / (p[ord("3")] + p[ord("7")])
    options: dict[str, Any] = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
    n = 400
    texts = [
        random_model.generate(PROMPT, regex="[37]", seed=seed, **options).read()
        for seed in range(n)
    ]
    sigma = math.sqrt(share * (1 - share) / n)
    assert set(texts) <= {"3", "7"}
    assert abs(texts.count("3") / n - share) < 4 * sigma + 1 / n


def test_banned_tokens_are_kept_out_of_the_output(random_model: Engine):
    banned = [ord(digit) for digit in "02468"]
    for seed in range(5):
        text = random_model.generate(
            PROMPT, regex="[0-9]{6}", temperature=1, seed=seed, banned_tokens=banned
        ).read()
        assert re.fullmatch("[13579]{6}", text)


def test_ban_of_all_that_is_allowed_is_told(random_model: Engine):
    generation = random_model.generate(PROMPT, regex="a", banned_tokens=[ord("a")])
    with pytest.raises(DecodeError, match="no token is left"):
        generation.read()
    assert random_model.generate(PROMPT, regex="b").read() == "b"


def test_special_tokens_are_no_text(random_model: Engine):
    # Any character is allowed, which special tokens' texts consist of.
    generation = random_model.generate(
        PROMPT, regex=r"(?s).{40}", temperature=1, seed=1, logit_bias={tiny_gguf.IM_START: 100.0}
    )
    assert tiny_gguf.IM_START not in [token.id for token in generation]
    assert len(generation.text) == 40


def _wrapped(value: Any, n: int) -> Any:
    for _ in range(n):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"regex": "ab(c"},
            r"regex is refused by llguidance.*\n    ab\(c\n      \^\nerror: unclosed",
        ),
        ({"json_schema": ONE_OF}, "json_schema has a oneOf.*write anyOf.*coerce_one_of"),
        ({"regex": "(" * 100_000}, r"regex is refused(?s:.{,4000})\^$"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"[^\s\S]"}, "matches no output"),
        ({"regex": "a\0b"}, "zero byte"),
        ({"regex": "a" * 2_000_000}, "2000000 bytes"),
        ({"regex": "(" + "é" * 1000}, "regex is refused"),
        ({"regex": "(a" + "é" * 1000}, "regex is refused"),
        ({"regex": 7}, "regex must be .*7"),
        ({"json_schema": "nope"}, "json_schema is refused"),
        ({"json_schema": {"type": "foo"}}, "Invalid type: foo"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"json_schema": {"enum": []}}, "Unsatisfiable"),
        ({"json_schema": {"$ref": "http://example.com/x"}}, "json_schema is refused"),
        ({"json_schema": '{"items":' * 5000 + "{}" + "}" * 5000}, "5001 deep, the limit is 128"),
        ({"json_schema": _wrapped({}, 500)}, "501 deep, the limit is 128"),
        ({"json_schema": {"a": object()}}, "cannot be written as JSON"),
        ({"json_schema": {"const": math.nan}}, "cannot be written as JSON"),
        ({"json_schema": 7}, "json_schema must be .*7"),
        ({"json_schema": {}, "regex": "a"}, "json_schema and regex .*one of them"),
        ({"grammar": 'root ::= "a"', "regex": "a"}, "grammar and regex .*one of them"),
        ({"grammar": "%llguidance {}\nstart: nothing"}, "grammar is refused"),
        ({"grammar": "%llguidance {}\nstart: <[99999]>"}, "grammar is refused"),
    ],
)
def test_constraint_that_cannot_work_is_refused_before_anything_runs(
    random_model: Engine, options: dict[str, Any], words: str
):
    n_requests = random_model.stats().n_requests
    with pytest.raises(InvalidSampling, match=words):
        random_model.generate(PROMPT, **options)
    assert random_model.stats().n_requests == n_requests


@pytest.mark.parametrize("pattern", ["(a{1000}){1000}", "(.*a){60}b", "a{1000000}", "(x+x+)+y"])
def test_costly_regex_runs_or_ends_with_an_error(random_model: Engine, pattern: str):
    try:
        generation = random_model.generate(PROMPT, regex=pattern, max_tokens=20, temperature=1)
        generation.read()
    except (InvalidSampling, DecodeError):
        pass
    assert random_model.generate(PROMPT, regex="b").read() == "b"


def test_model_without_vocabulary_is_refused(make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine(tiny_gguf.write_model(tmp_path / "none.gguf", vocab="none"))
    with pytest.raises(InvalidSampling, match="token that ends the text"):
        engine.generate([1, 2, 3], regex="a")


def test_constraints_of_several_threads_share_a_vocabulary(demo: Engine):
    texts: list[str] = []

    def run(seed: int) -> None:
        texts.append(demo.generate(PROMPT, regex="[a-z]{5}", seed=seed).read())

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 6
    assert all(re.fullmatch("[a-z]{5}", text) for text in texts)


def test_slots_in_one_batch_follow_their_own_constraints(make_engine: MakeEngine, tiny_llama: Path):
    engine = make_engine(tiny_llama, n_slots=4)
    patterns = ["[0-9]{20}", "[a-f]{20}", "(xy){10}", "[A-Z]{20}"]
    generations = [
        engine.generate(random_ids(9, seed=i), regex=pattern, temperature=1)
        for i, pattern in enumerate(patterns)
    ]
    for pattern, generation in zip(patterns, generations, strict=True):
        assert re.fullmatch(pattern, generation.read())


def test_cancelled_and_dropped_constraints_leave_the_engine_working(demo: Engine):
    for i in range(20):
        generation = demo.generate(PROMPT, json_schema=PERSON, temperature=1, seed=i)
        next(generation)
        if i % 2:
            generation.cancel()
        del generation
    assert demo.generate(PROMPT, regex="ok").read() == "ok"


@pytest.mark.full
def test_real_vocabulary_follows_the_schema(
    make_engine: MakeEngine, llama_cpp_dir: Path, tmp_path: Path
):
    path = tmp_path / "model.gguf"
    tiny_gguf.write_preset(path, "tiny_qwen2_real_vocab", llama_cpp_dir=llama_cpp_dir, n_layer=1)
    engine = make_engine(path)
    for seed in range(3):
        generation = engine.generate(
            PROMPT, json_schema=PERSON, temperature=1, seed=seed, max_tokens=200
        )
        assert is_person(json.loads(generation.read()))
        assert generation.finish_reason == "stop"


def test_other_major_version_of_llguidance_is_refused(
    demo: Engine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llguidance.__version__", "2.0.0")
    with pytest.raises(KqviewError, match=r"llguidance 2\.0\.0 is installed.* version 1"):
        demo.generate(PROMPT, regex="a")


def test_missing_llguidance_is_told_with_what_to_install(
    demo: Engine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.delitem(sys.modules, "llguidance._lib", raising=False)
    with pytest.raises(KqviewError, match=r"pip install \"kqview\[constraints\]\""):
        demo.generate(PROMPT, regex="a")


# ---- hostile constraints: each ends with InvalidSampling or within its limits, and others go on

PLAIN = random_ids(9, seed=5)
N_PLAIN = 60
HUNG_S = 60.0
"""Long beyond every limit: only what never ends reaches it."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_spaced_model(tmp_path_factory.mktemp("model") / "spaced.gguf")
    with Engine(path, n_ctx=512, n_slots=2, n_threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[int]:
    return [token.id for token in engine.generate(PLAIN, temperature=0, max_tokens=N_PLAIN)]


def outcome_of(engine: Engine, options: dict[str, Any]) -> str:
    """Generate; "refused", "stop" or "length"."""
    try:
        generation = engine.generate(
            PROMPT, temperature=1, top_k=0, seed=1, max_tokens=12, **options
        )
        for _ in generation:
            pass
    except InvalidSampling:
        return "refused"
    return str(generation.finish_reason)


def check_beside_plain(engine: Engine, expected: list[int], options: dict[str, Any]) -> str:
    """Run a hostile request and plain ones side by side; the outcome of the former."""
    outcomes: list[str] = []
    hostile = threading.Thread(
        target=lambda: outcomes.append(outcome_of(engine, options)), daemon=True
    )
    hostile.start()
    while True:
        plain = engine.generate(PLAIN, temperature=0, max_tokens=N_PLAIN)
        assert [token.id for token in plain] == expected
        if not hostile.is_alive():
            break
        hostile.join(0.02)
    hostile.join(HUNG_S)
    assert outcomes, "the hostile request has not ended, or raised what it should not"
    return outcomes[0]


def test_ambiguous_grammar_of_45_bytes_is_followed(engine: Engine, expected: list[int]) -> None:
    assert check_beside_plain(engine, expected, {"grammar": AMBIGUOUS}) == "length"


@pytest.mark.parametrize("name", GRAMMARS)
def test_hostile_grammar_leaves_the_others_alone(
    engine: Engine, expected: list[int], name: str
) -> None:
    outcome = check_beside_plain(engine, expected, {"grammar": GRAMMARS[name]})
    assert outcome in ("refused", "stop", "length")


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_hostile_constraint_leaves_the_others_alone(
    engine: Engine, expected: list[int], name: str
) -> None:
    pytest.importorskip("llguidance")
    outcome = check_beside_plain(engine, expected, CONSTRAINTS[name])
    assert outcome in ("refused", "stop", "length")


@pytest.mark.parametrize("name", ["all inside all", "a million elements"])
def test_others_get_tokens_while_one_token_of_a_grammar_is_sought(
    engine: Engine, name: str
) -> None:
    """By the order of events: how many tokens come between two of the hostile request."""
    options: dict[str, Any] = {"temperature": 1, "top_k": 0, "seed": 1, "max_tokens": 4, "slot": 0}
    n_most = n_between = n_tokens = 0
    with (
        engine.generate(PROMPT, grammar=GRAMMARS[name], **options),
        engine.generate(PLAIN, ignore_eos=True, max_tokens=400, slot=1) as plain,
    ):
        for _ in plain:
            hostile = engine.stats().slots[0]
            is_sought = hostile.state == "sampling" and hostile.n_tokens == n_tokens
            n_between = n_between + 1 if is_sought else 0
            n_most = max(n_most, n_between)
            n_tokens = hostile.n_tokens
    assert n_most >= 20


def test_grammar_that_is_cancelled_while_it_is_matched_frees_its_slot(engine: Engine) -> None:
    for _ in range(5):
        generation = engine.generate(PROMPT, grammar=GRAMMARS["all inside all"], temperature=1)
        generation.cancel()
    texts = [engine.generate(PROMPT, grammar='root ::= "yes"', slot=i).read() for i in range(2)]
    assert texts == ["yes", "yes"]


# ---- the processes that llguidance runs in

MEMORY_BYTES = 450 << 20
"""Of one constraint's process and the one that it was forked from, with a margin."""
Q_THEN_X = {ord("q"): 60.0, ord("x"): 50.0}


def helpers() -> list[int]:
    """Processes of llguidance below this one: the first of each engine, and its constraints'."""
    return [one for one in processes_below(os.getpid()) if "constraint_child" in command_of(one)]


@pytest.mark.full
@pytest.mark.parametrize("name", COSTLY)
def test_costly_constraint_has_a_limit_on_its_memory(
    engine: Engine, expected: list[int], name: str
) -> None:
    engine.generate(PROMPT, regex="a").read()
    before, peak, is_done = rss_bytes(os.getpid()), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not is_done.wait(0.02):
            peak = max(peak, rss_bytes(os.getpid()))

    sampler = threading.Thread(target=sample)
    sampler.start()
    options = {**COSTLY[name], "logit_bias": Q_THEN_X}
    assert check_beside_plain(engine, expected, options) == "refused"
    is_done.set()
    sampler.join()
    assert peak - before < MEMORY_BYTES


def test_grammar_that_compiles_and_then_never_ends_is_stopped(engine: Engine) -> None:
    generation = engine.generate(
        PROMPT, grammar=joined_lark(LATE, 29), temperature=1, top_k=0, logit_bias=Q_THEN_X
    )
    with pytest.raises(InvalidSampling, match=r"grammar .*(CPU time|memory), the limit"):
        generation.read()
    assert engine.generate(PROMPT, regex="b").read() == "b"


def test_request_that_ends_takes_its_process_along(engine: Engine) -> None:
    engine.generate(PROMPT, regex="a").read()
    wait_until(lambda: len(helpers()) == n_first())
    generation = engine.generate(PROMPT, regex="a{500}", max_tokens=500)
    next(generation)
    assert len(helpers()) == n_first() + 1
    generation.cancel()
    del generation
    wait_until(lambda: len(helpers()) == n_first())


def n_first() -> int:
    """How many of `helpers` are the first of their engine: those that this process has started."""
    return sum(command_of(one) != "" and parent_of(one) == os.getpid() for one in helpers())


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_helper_that_was_killed_fails_its_requests_and_is_replaced(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    known = set(helpers())
    engine = make_engine(tiny_llama, run_ahead=1)
    generation = engine.generate(PROMPT, regex="a{500}", max_tokens=500)
    next(generation)
    for pid in set(helpers()) - known:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(InvalidSampling, match="regex"):
        generation.read()
    assert engine.generate(PROMPT, regex="b").read() == "b"
    engine.close()
    wait_until(lambda: set(helpers()) <= known)


def test_helpers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys; from kqview import Engine\n"
        "generation = Engine.demo(run_ahead=1).generate('a', regex='a{500}', max_tokens=500)\n"
        "next(generation); print('runs', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"runs\n"
        below = [one for one in processes_below(process.pid) if one != process.pid]
        assert len(below) == 2
        process.kill()
    wait_until(lambda: not any("constraint_child" in command_of(one) for one in below))
