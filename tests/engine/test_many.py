"""Many prompts: `map`, `stack`, `save` and `load`; engines that pickle; empty lists."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kqview
from kqview import Capture, Engine, Finished, Sampling, Token, errors
from kqview.submission import GENERATE_DEFAULTS
from tests.support import tiny_gguf
from tests.support.rows import near, rounds_as_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.engine.conftest import MakeEngine

PROMPTS = ["Anna is a", "Tom found a red", "Mirelda", "They saw", "One day", "The bird"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.demo(n_ctx=128, n_slots=2, n_threads=1, pooling="mean") as demo:
        yield demo


# ---- map


def test_results_come_in_the_order_of_the_prompts(engine: Engine) -> None:
    results = list(engine.map(PROMPTS, capture="probs", **GREEDY))
    assert [result.id for result in results] == [str(i) for i in range(len(PROMPTS))]
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.prompt_ids == engine.tokenize(prompt)
        assert result.text == "".join(token.text for token in result.tokens)
        assert (result.finish_reason, result.usage.completion_tokens) == ("length", 5)
        assert [token.rows.shape[-1] for token in result.tokens] == [
            len(result.prompt_ids) + i for i in range(5)
        ]


def test_results_of_a_schema_are_values(engine: Engine) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
    for result in engine.map(PROMPTS[:3], json_schema=schema, temperature=0):
        assert result.parsed in ({"red": True}, {"red": False})
        assert result.reply.content == result.text
    [bare] = engine.map(PROMPTS[:1], **GREEDY)
    with pytest.raises(errors.RequestError, match="needs json_schema"):
        _ = bare.parsed


def test_prompts_are_taken_only_a_few_ahead(engine: Engine) -> None:
    taken: list[int] = []

    def endless() -> Iterator[str]:
        for i in range(10_000):
            taken.append(i)
            yield PROMPTS[i % len(PROMPTS)]

    results = engine.map(endless(), **GREEDY)
    for n in range(1, 8):
        next(results)
        assert len(taken) <= n + 2 * len(engine.slots)
    results.close()
    assert all(not slot.is_busy for slot in engine.slots)
    assert not [one for one in threading.enumerate() if one.name.startswith("kqview-map")]


def test_mapping_gives_ids_and_skip_leaves_them_out(engine: Engine) -> None:
    prompts = {"a": PROMPTS[0], "b": engine.tokenize(PROMPTS[1]), "c": np.array([5, 6])}
    messages = [{"role": "user", "content": "Who are you?"}]
    results = list(engine.map({**prompts, "d": messages}, skip={"b"}, **GREEDY))
    assert [result.id for result in results] == ["a", "c", "d"]
    assert results[1].prompt_ids == [5, 6]
    assert results[2].prompt_ids == engine.apply_chat_template(messages)


def test_error_of_a_prompt_ends_the_map_or_is_its_result(engine: Engine) -> None:
    prompts = [PROMPTS[0], "word " * 500, PROMPTS[1]]
    results = engine.map(prompts, **GREEDY)
    assert next(results).id == "0"
    with pytest.raises(errors.PromptTooLong):
        next(results)
    kept = list(engine.map(prompts, on_error="return", **GREEDY))
    assert [type(result.error) for result in kept] == [
        type(None), errors.PromptTooLong, type(None),
    ]  # fmt: skip
    assert (kept[1].finish_reason, kept[1].tokens) == ("error", [])


def test_progress_is_reported(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int | None]] = []
    list(engine.map(PROMPTS[:3], progress=lambda n, total: seen.append((n, total)), **GREEDY))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    list(engine.map(PROMPTS[:2], progress=True, **GREEDY))
    assert "2/2 prompts, 10 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompts", "options", "error"),
    [
        ("one", {}, errors.RequestError),
        (5, {}, errors.RequestError),
        (["a"], {"on_error": "skip"}, errors.RequestError),
        (["a"], {"max_new_tokens": 1}, errors.UnknownOption),
    ],
)
def test_map_refuses_what_it_cannot_do_at_once(
    engine: Engine, prompts: Any, options: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        engine.map(prompts, **options)


def test_map_takes_back_what_mods_take_back(engine: Engine) -> None:
    @kqview.mod
    def retry(event: Any, actions: Any) -> Any:
        if isinstance(event, kqview.mods.Added) and event.step == 3:
            return actions.backtrack(2, [5])
        return None

    [result] = engine.map(PROMPTS[:1], mods=[retry], **GREEDY)
    ids = [token.id for token in result.tokens]
    assert result.text == engine.detokenize(ids)


def resumed(engine: Engine, folder: Path, prompts: Any) -> dict[str, list[int]]:
    """What `map` makes of *prompts* with a folder of results, to which it is added."""
    made: dict[str, list[int]] = {}
    for result in engine.map(prompts, skip=kqview.SavedFolder(folder), **GREEDY):
        kqview.save(folder, result)
        made[result.id] = result.prompt_ids
    return made


def test_run_is_resumed_by_what_its_prompts_are(engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    ids = engine.tokenize("One day")
    chat = [{"role": "user", "content": "Who are you?"}]
    prompts: list[Any] = ["Anna is a", ids, chat, "They saw", "They saw"]
    first = resumed(engine, tmp_path, prompts[:3])
    assert list(first) == ["0", "1", "2"]
    # One more in front and one between; ids as an array, the messages with another order of keys.
    again: list[Any] = [
        "Mirelda", np.array(ids), "Anna is a", "Tom found", [dict(reversed(chat[0].items()))],
        "They saw", "They saw",
    ]  # fmt: skip
    made = resumed(engine, tmp_path, again)
    assert list(made) == ["3", "4", "5", "6"]
    texts = ["Mirelda", "Tom found", "They saw", "They saw"]
    assert list(made.values()) == [engine.tokenize(text) for text in texts]
    kept = kqview.SavedFolder(tmp_path)
    assert [kept[str(i)].prompt_ids for i in range(3)] == list(first.values())
    assert resumed(engine, tmp_path, [*again, "They saw"]) == {"7": engine.tokenize("They saw")}
    assert resumed(engine, tmp_path, iter(again)) == {}
    # Ids of one's own decide alone, and so do plain ids.
    assert list(resumed(engine, tmp_path, {"0": "The bird", "x": "Anna is a"})) == ["x"]
    assert [one.id for one in engine.map(["a", "b"], skip={"0"}, **GREEDY)] == ["1"]


def test_folder_without_keys_is_resumed_by_numbers(engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    path = kqview.save(tmp_path / "0.safetensors", next(engine.map(["Anna is a"], **GREEDY)))
    path.write_bytes(path.read_bytes().replace(b"prompt_key", b"prompt_ley"))
    assert list(resumed(engine, tmp_path, ["anything", "Tom found"])) == ["1"]


@pytest.mark.parametrize("name", sorted(GENERATE_DEFAULTS.keys() - {"max_tokens"}))
def test_option_that_is_none_is_not_set(engine: Engine, name: str) -> None:
    expected = engine.generate(PROMPTS[0], **GREEDY).read()
    given: Any = {**GREEDY, name: None}
    if name in GREEDY:
        given["logit_bias"] = {5: 100.0, engine.model.eos_token_id: -100.0}  # decides as well
        expected = engine.detokenize([5] * 5)
    assert engine.generate(PROMPTS[0], **given).read() == expected
    [result] = engine.map(PROMPTS[:1], skip=None, progress=None, on_error=None, **given)
    assert result.text == expected
    message = [{"role": "user", "content": "Who are you?"}]
    told = engine.chat(message, parallel_tool_calls=None, continue_final_message=None, **given)
    assert len(list(told)) == 5
    if name in Sampling.__dataclass_fields__:
        assert Sampling(**{name: None}) == Sampling()
        assert engine.generate([1], sampling=Sampling(temperature=0), **{name: None}, max_tokens=1)


# ---- stack, save and load


def results_of(engine: Engine, **capture: Any) -> list[Finished]:
    return list(engine.map(PROMPTS[:2], capture=Capture("probs", **capture), **GREEDY))


def test_stack_pads_rows_to_the_longest(engine: Engine) -> None:
    tokens = results_of(engine, layers=[1, 2])[0].tokens
    whole = kqview.stack(tokens, pad=-1)
    n = tokens[-1].rows.shape[-1]
    assert whole.shape == (5, 2, 8, n)
    for token, rows in zip(tokens, whole, strict=True):
        width = token.rows.shape[-1]
        np.testing.assert_array_equal(rows[..., :width], token.rows)
        assert (rows[..., width:] == -1).all()
    assert whole.flags.writeable


@pytest.mark.parametrize("as_mapping", [False, True])
def test_error_says_of_which_prompt_it_is(engine: Engine, as_mapping: bool) -> None:
    prompts: Any = ["a", [1] * 500, "b"]
    if as_mapping:
        prompts = dict(zip("xyz", prompts, strict=True))
    with pytest.raises(errors.PromptTooLong) as caught:
        list(engine.map(prompts, **GREEDY))
    assert caught.value.__notes__ == [
        f"engine.map: with the prompt whose index or key is {'y' if as_mapping else '1'!r}"
    ]


def test_stack_refuses_what_has_no_common_shape(engine: Engine) -> None:
    with pytest.raises(errors.InvalidCapture, match="capture="):
        kqview.stack(list(engine.generate(PROMPTS[0], **GREEDY)))
    one, other = (results_of(engine, layers=layers)[0].tokens for layers in ([1], [1, 2]))
    with pytest.raises(errors.RequestError, match="one generation"):
        kqview.stack([*one, *other])


@pytest.mark.parametrize(
    "capture",
    [
        {"layers": [2, 0], "heads": [3], "dtype": "float16"},
        {"top_k": 3},
        {"reduce": "mean", "hidden": [1]},
        {"spans": [(0, 2), (2, None)]},
        {"layers": [], "vocab_logits": True},
    ],
)
def test_saved_generation_loads_as_it_was(
    engine: Engine, tmp_path: Path, capture: dict[str, Any]
) -> None:
    pytest.importorskip("safetensors")
    [_, result] = engine.map(PROMPTS[:2], capture=Capture(**capture), top_logprobs=3, **GREEDY)
    path = kqview.save(tmp_path / "one.safetensors", result)
    saved = kqview.load(path)
    assert (saved.id, saved.text, saved.finish_reason) == ("1", result.text, "length")
    assert (saved.prompt_ids, saved.ids) == (
        result.prompt_ids, [token.id for token in result.tokens],
    )  # fmt: skip
    assert saved.capture == result.tokens[0].capture
    assert (saved.kind, saved.usage) == ("probs", result.usage)
    assert saved.model["fingerprint"] == engine.slots[0].state_facts().model
    for old, new in zip(result.tokens, saved.tokens(), strict=True):
        assert (old.id, old.text, old.index) == (new.id, new.text, new.index)
        assert (old.column_ids, old.column_texts) == (new.column_ids, new.column_texts)
        assert (old.layers, old.heads) == (new.layers, new.heads)
        assert (old.logprob, old.top_logprobs) == (new.logprob, new.top_logprobs)
        assert_same_arrays(old, new)


def assert_same_arrays(old: Token, new: Token) -> None:
    for name in ("attention", "attention_positions", "hidden", "logits"):
        a, b = getattr(old, name), getattr(new, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def without(tokens: list[Token], dropped: set[int]) -> list[Token]:
    """*tokens*, of which some are as on_full="drop" leaves them."""
    for i in dropped:
        tokens[i].attention = tokens[i].hidden = tokens[i].logits = None
    return tokens


@pytest.mark.parametrize("dropped", [{0}, {2, 3}, {0, 1, 2, 3, 4}])
def test_tokens_whose_arrays_were_dropped_are_saved_without_them(
    engine: Engine, tmp_path: Path, dropped: set[int]
) -> None:
    pytest.importorskip("safetensors")
    capture = Capture(hidden=[0, 1], vocab_logits=True, on_full="drop")
    generation = engine.generate(PROMPTS[0], capture=capture, top_logprobs=0, **GREEDY)
    tokens = without(list(generation), dropped)
    saved = kqview.load(kqview.save(tmp_path / "x.safetensors", generation, tokens))
    assert (saved.n_columns < 0).nonzero()[0].tolist() == sorted(dropped)
    for old, new in zip(tokens, saved.tokens(), strict=True):
        assert_same_arrays(old, new)
        assert (old.logprob, new.top_logprobs) == (new.logprob, [])
        assert new.logprob is not None


def test_forced_and_discarded_tokens_are_saved_as_such(engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    forced = engine.tokenize(" red", add_special=False)
    generation = engine.generate(
        PROMPTS[0],
        capture="probs",
        forcing=lambda kept, added: forced if not (kept or added) else [],
        **GREEDY,
    )
    saved = kqview.load(kqview.save(tmp_path / "x.safetensors", generation))
    assert [token.forced for token in saved.tokens()] == [True] * len(forced) + [False] * (
        5 - len(forced)
    )
    shifting = engine.generate(
        PROMPTS[0], max_tokens=130, ignore_eos=True, context_shift=True, capture="probs"
    )
    tokens = list(shifting)
    assert tokens[-1].discarded
    saved = kqview.load(kqview.save(tmp_path / "y.safetensors", shifting, tokens))
    for old, new in zip(tokens, saved.tokens(), strict=True):
        assert (old.discarded, old.column_ids) == (new.discarded, new.column_ids)


def test_generation_is_saved_after_the_rows_of_its_prompt(engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    capture = kqview.Capture("probs", prompt=True)
    generation = engine.generate(PROMPTS[0], capture=capture, **GREEDY)
    kqview.save(tmp_path / "prompt.safetensors", generation.prompt_attention)
    assert generation.tokens == []
    saved = kqview.load(kqview.save(tmp_path / "x.safetensors", generation))
    assert saved.ids == generation.tokens
    assert len(saved.ids) == 5


def test_part_of_a_list_of_tokens_keeps_its_columns(engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    tokens = list(engine.generate(PROMPTS[0], capture="probs", **GREEDY))
    saved = kqview.load(kqview.save(tmp_path / "x.safetensors", tokens[2:]))
    for old, new in zip(tokens[2:], saved.tokens(), strict=True):
        assert old.column_ids == new.column_ids
    with pytest.raises(errors.RequestError, match="tokens left out"):
        kqview.save(tmp_path / "y.safetensors", tokens[::2])


def test_layers_that_differ_in_heads_are_saved_each(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    pytest.importorskip("safetensors")
    engine = make_engine(tiny_gguf.write_gemma4(tmp_path / "gemma4.gguf"))
    generation = engine.generate([1, 2, 3, 4], capture="probs", **GREEDY)
    tokens = list(generation)
    saved = kqview.load(kqview.save(tmp_path / "x.safetensors", generation, tokens))
    for old, new in zip(tokens, saved.tokens(), strict=True):
        assert isinstance(old.attention, tuple)
        assert isinstance(new.attention, tuple)
        for a, b in zip(old.attention, new.attention, strict=True):
            np.testing.assert_array_equal(a, b)


def test_run_that_was_interrupted_goes_on_where_it_stopped(engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    prompts = dict(zip(["a/b", "..", "ü.1", "d"], PROMPTS, strict=False))
    done = kqview.SavedFolder(tmp_path / "run")
    assert list(done) == []
    for result in engine.map(prompts, skip=done, capture="probs", **GREEDY):
        kqview.save(done.path, result)
        if len(done) == 2:
            break
    assert set(done) == {"a/b", ".."}
    again = [result.id for result in engine.map(prompts, skip=done, **GREEDY)]
    assert again == ["ü.1", "d"]
    assert done["a/b"].rows is not None
    assert "d" not in done
    with pytest.raises(KeyError):
        _ = done["d"]
    assert {entry.parent for entry in done.path.iterdir()} == {done.path}


def test_generation_is_saved_with_the_tokens_that_were_taken(
    engine: Engine, tmp_path: Path
) -> None:
    pytest.importorskip("safetensors")
    generation = engine.generate(PROMPTS[0], capture="probs", **GREEDY)
    first = next(generation)
    with pytest.raises(errors.RequestError, match=r"1 tokens .* pass them as tokens"):
        kqview.save(tmp_path, generation)
    path = kqview.save(tmp_path, generation, [first])
    assert kqview.load(path).ids == generation.tokens
    assert kqview.SavedFolder(tmp_path)[generation.request_id].ids == generation.tokens


def test_tokens_of_another_generation_are_refused(engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    one, other = (engine.generate(prompt, capture="probs", **GREEDY) for prompt in PROMPTS[:2])
    tokens, others = list(one), list(other)
    for wrong in (others, tokens[:2], [*tokens, *tokens], []):
        with pytest.raises(errors.RequestError, match=f"5 taken of {one.request_id}"):
            kqview.save(tmp_path / "x.safetensors", one, wrong)
    bare = [engine.generate([i, 7], **GREEDY, logit_bias={9: 1e9}) for i in (5, 6)]
    same_ids = [list(generation) for generation in bare]
    assert bare[0].tokens == bare[1].tokens
    with pytest.raises(errors.RequestError, match="not the 5 taken"):
        kqview.save(tmp_path / "x.safetensors", bare[0], same_ids[1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "name", "expected"),
    [
        ("run.npz", "x", r"ends in \.npz"),
        ("run.safetensors.txt", "x", r"ends in \.txt"),
        ("run", "\ud800", "surrogate"),
        ("run", "ü" * 100, "file name of 612 bytes"),
        ("run\0", "x", "null byte"),
        ("", "x", "path is empty"),
    ],
)
def test_path_that_cannot_be_saved_to_is_refused_before_a_token_is_taken(
    engine: Engine, tmp_path: Path, path: str, name: str, expected: str
) -> None:
    pytest.importorskip("safetensors")
    generation = engine.generate(PROMPTS[0], request_id=name, **GREEDY)
    with pytest.raises(errors.RequestError, match=expected):
        kqview.save(path and f"{tmp_path}/{path}", generation)
    assert generation.tokens == []
    assert list(tmp_path.iterdir()) == []
    saved = kqview.save(tmp_path / "x.safetensors", generation)
    assert kqview.load(saved).ids == generation.tokens != []


@pytest.mark.parametrize("capture", [None, Capture("probs", layers=[1]), Capture(top_k=2)])
def test_tokens_alone_are_saved_and_read_back(
    engine: Engine, tmp_path: Path, capture: Capture | None
) -> None:
    pytest.importorskip("safetensors")
    tokens = list(engine.generate(PROMPTS[0], capture=capture, top_logprobs=2, **GREEDY))
    saved = kqview.load(kqview.save(tmp_path / "x.safetensors", tokens))
    assert saved.ids == [token.id for token in tokens]
    assert saved.text == "".join(token.text for token in tokens)
    assert saved.prompt_ids == engine.tokenize(PROMPTS[0])
    assert saved.capture == tokens[0].capture
    for token, read in zip(tokens, saved.tokens(), strict=True):
        assert (read.id, read.text, read.top_logprobs) == (token.id, token.text, token.top_logprobs)
        assert read.column_ids == token.column_ids
        if capture:
            assert np.array_equal(read.rows, token.rows)
    assert kqview.load(kqview.save(tmp_path / "y.safetensors", saved.tokens())).ids == saved.ids


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize(
    "capture",
    [
        Capture("scores", layers=[2, 0], heads=[3], dtype="float16"), Capture(top_k=3),
        Capture(reduce="mean"), Capture(spans=[(0, 2), (2, None)]),
    ],
)  # fmt: skip
def test_attention_of_a_prompt_is_saved_and_read_back(
    engine: Engine, tmp_path: Path, capture: Capture, suffix: str
) -> None:
    pytest.importorskip("safetensors")
    found = engine.attend(PROMPTS[1], capture, last=3)
    saved = kqview.load(kqview.save(tmp_path / f"x{suffix}", found))
    assert (saved.prompt_ids, saved.ids) == (found.column_ids, [])
    assert (saved.capture, saved.heads, saved.layers) == (found.capture, found.heads, found.layers)
    again = engine.attend(PROMPTS[1], capture, last=3)
    rows, positions = again.top_k() if capture.top_k else (again.array(), None)
    block = saved.prompt_attention
    assert block is not None
    assert (block.start, block.n_rows) == (found.start, 3)
    np.testing.assert_allclose(block.rows, rows, atol=near(0), rtol=near(0))
    assert (block.positions is None) == (positions is None)
    assert positions is None or rounds_as_gpu() or np.array_equal(block.positions, positions)


def test_what_is_no_generation_is_not_saved(engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    tokens = list(engine.generate("a", **GREEDY))
    for wrong in ([], [1, 2], "text", 5, None, [*tokens, None], tokens[0]):
        with pytest.raises(errors.RequestError, match="generation is"):
            kqview.save(tmp_path / "x.safetensors", wrong)  # pyright: ignore[reportArgumentType]
    for unnamed in (tokens, engine.attend("a b")):
        for path in (tmp_path, tmp_path / "x.txt"):
            with pytest.raises(errors.RequestError, match="a file of your own name"):
                kqview.save(path, unnamed)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_exists_may_have_any_name(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.npz").mkdir()
    for name in ("run.npz", "run.2"):
        path = kqview.save(f"~/{name}", engine.generate("a", request_id="one", **GREEDY))
        assert path == tmp_path / name / "one.safetensors"
        assert list(kqview.SavedFolder(f"~/{name}")) == ["one"]


def test_damaged_and_foreign_files_are_refused(engine: Engine, tmp_path: Path) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy")
    path = kqview.save(tmp_path / "x.safetensors", results_of(engine)[0])
    data = path.read_bytes()
    foreign = numpy_files.save({"ids": np.zeros(2)})
    huge = b"\xff" * 7 + b"\x7f" + data[8:]  # the length of its header
    for bad in (
        huge,
        b"",
        data[:50],
        data[:-9],
        foreign,
        data.replace(b'"schema\\"', b'"schemb\\"', 1),
    ):
        path.write_bytes(bad)
        with pytest.raises(errors.StateFormatError, match=r"x\.safetensors"):
            kqview.load(path)
    path.write_bytes(huge)
    with pytest.raises(errors.StateFormatError, match=r"x\.safetensors"):
        list(engine.map(["a"], skip=kqview.SavedFolder(tmp_path), **GREEDY))
    path.write_bytes(data.replace(b'schema\\": 2', b'schema\\": 9', 1))
    with pytest.raises(errors.StateFormatError, match="schema 9"):
        kqview.load(path)
    with pytest.raises(errors.RequestError, match="SavedFolder"):
        kqview.load(tmp_path)


def test_saving_without_safetensors_names_the_extra(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(errors.KqviewError, match=r"kqview\[save\]"):
        kqview.save(tmp_path / "x.safetensors", engine.generate("a", **GREEDY))


# ---- engines and awaiting


def test_engine_pickles_as_its_arguments(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_llama.parent)
    engine = Engine(tiny_llama.name, n_ctx=96, n_threads=1, run_ahead=2, progress=lambda _: None)
    monkeypatch.chdir("/")
    data = pickle.dumps(engine)
    engine.close()
    code = (
        "import pickle, sys; engine = pickle.loads(sys.stdin.buffer.read());"
        "print(engine.n_ctx, engine.generate([1, 2], max_tokens=3, ignore_eos=True).read() != '')"
    )
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert done.stdout == b"96 True\n"


async def test_aread_returns_the_text(engine: Engine) -> None:
    generations = [engine.generate(prompt, **GREEDY) for prompt in PROMPTS[:2]]
    texts = await asyncio.gather(*(one.aread() for one in generations))
    assert texts == [one.text for one in generations]
    assert texts == [engine.generate(prompt, **GREEDY).read() for prompt in PROMPTS[:2]]


async def test_no_texts_give_no_results(engine: Engine) -> None:
    assert engine.embed([]).shape == (await engine.aembed([])).shape == (0, engine.model.n_embd)  # pyright: ignore
    assert engine.score([]) == await engine.ascore([]) == []
