"""Bad input: each kind ends in its typed error, the engine goes on and nothing is left behind."""

from __future__ import annotations

import copy
import os
import pickle
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kqview
from kqview import Capture, Engine, Sampling, _core, errors
from kqview.engine_options import SIZES_MAX, checked, context_options, model_options
from tests.support import tiny_gguf
from tests.support.processes import n_threads
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engine.conftest import MakeEngine

PROMPT = random_ids(12)


def n_open() -> tuple[int, int]:
    """Number of open descriptors and of threads of this process."""
    return len(os.listdir("/proc/self/fd")), n_threads()


def is_as_few(before: tuple[int, int]) -> bool:
    # A thread that ended may be counted for a moment longer, so there may also be fewer.
    return all(now <= then for now, then in zip(n_open(), before, strict=True))


@contextmanager
def leaving_nothing() -> Iterator[None]:
    before = n_open()
    yield
    deadline = time.monotonic() + 30
    while not is_as_few(before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_as_few(before), (n_open(), before)


def works(engine: Engine) -> bool:
    generation = engine.generate(PROMPT, max_tokens=3, temperature=0, ignore_eos=True)
    return len(list(generation)) == 3 and engine.stats().pool.n_leased == 0


# ---- paths


@pytest.mark.parametrize(
    ("path", "match"),
    [
        (None, "must be a path, got None"),
        (5, "must be a path, got 5"),
        ("", "is empty"),
        ("a\0b", "null byte"),
        ("\ud800", "surrogate"),
    ],
)
def test_what_is_no_path_is_refused(
    make_engine: MakeEngine, tiny_llama: Path, path: Any, match: str
) -> None:
    slot = make_engine(tiny_llama).slots[0]
    for call in (slot.save_file, slot.restore_file, kqview.load, kqview.SavedFolder):
        with pytest.raises(errors.RequestError, match=f"path .*{match}"):
            call(path)
    with pytest.raises(errors.RequestError, match=f"model .*{match}"):
        Engine(path)


def test_path_may_begin_at_the_home_folder(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model.gguf").symlink_to(tiny_llama)
    slot = make_engine("~/model.gguf").slots[0]
    slot.save_file("~/slot")
    assert (tmp_path / "slot").is_file()
    slot.restore_file("~/slot")


def test_folder_is_no_state_file(make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path) -> None:
    slot = make_engine(tiny_llama).slots[0]
    with (
        leaving_nothing(),
        pytest.raises(errors.StateFormatError, match=f"'{tmp_path}' is not a regular file"),
    ):
        slot.restore_file(tmp_path)


# ---- copies


def test_what_lives_in_an_engine_cannot_be_copied(engine: Engine) -> None:
    generation = engine.generate(PROMPT, request_id="one", max_tokens=1)
    for value, match in (
        (engine, "cannot be copied.*second time"),
        (engine.slots[0], r"slot 0 cannot be copied.*save\(\)"),
        (generation, r"generation one cannot be copied.*kqview\.save"),
    ):
        for copied in (copy.copy, copy.deepcopy):
            with pytest.raises(errors.RequestError, match=match):
                copied(value)
    for value in (engine.slots[0], generation):
        with pytest.raises(errors.RequestError, match="pickled"):
            pickle.dumps(value)
    generation.read()


# ---- model files


@pytest.mark.parametrize(
    ("write", "match"),
    [
        (lambda path: path, "No such file"),
        (tiny_gguf.write_empty, "empty"),
        (tiny_gguf.write_not_gguf, "not a GGUF file"),
        (lambda path: path.mkdir() or path, "directory"),
        (lambda path: path.write_bytes(b"GG") and path, "not a GGUF file"),
        (lambda path: path.write_bytes(b"GGUF") and path, "version at byte 4 needs 4 bytes"),
        (
            lambda path: path.write_bytes(b"GGUF\3\0\0\0" + b"\xff" * 64) and path,
            "number of tensors .* cut short",
        ),
    ],
    ids=["missing", "empty", "text", "directory", "two bytes", "magic alone", "absurd counts"],
)
def test_file_that_is_no_model_is_refused_with_reason(
    tmp_path: Path, write: Callable[[Path], Path], match: str
) -> None:
    path = tmp_path / "model.gguf"
    write(path)
    with leaving_nothing(), pytest.raises(errors.ModelLoadError, match=match) as raised:
        Engine(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("keep", [0.001, 0.01, 0.02, 0.05, 0.2, 0.5, 0.9, 0.999])
def test_truncated_model_is_refused(tiny_llama: Path, tmp_path: Path, keep: float) -> None:
    path = tiny_gguf.write_truncated(tmp_path / "cut.gguf", tiny_llama, keep=keep)
    with leaving_nothing(), pytest.raises(errors.ModelLoadError, match="cut short"):
        Engine(path)


def test_vocabulary_without_weights_is_refused(llama_cpp_dir: Path) -> None:
    with pytest.raises(errors.ModelLoadError):
        Engine(llama_cpp_dir / "models" / "ggml-vocab-qwen2.gguf")


@pytest.mark.parametrize("tail", ["\0", "\0.gguf", "\ud800"], ids=ascii)
def test_path_that_no_file_has_is_refused(tiny_llama: Path, tail: str) -> None:
    with pytest.raises(errors.RequestError):
        Engine(f"{tiny_llama}{tail}")


def test_path_may_be_bytes(tiny_llama: Path) -> None:
    with Engine(os.fsencode(tiny_llama), n_ctx=64, n_threads=1) as engine:  # pyright: ignore[reportArgumentType]
        assert works(engine)


def test_model_without_attention_generates_but_captures_nothing(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(tiny_gguf.write_mamba(tmp_path / "mamba.gguf"))
    assert engine.model.attention_layers == ()
    with pytest.raises(errors.InvalidCapture, match="attention"):
        engine.generate(PROMPT, capture="probs")
    assert works(engine)


def test_model_without_vocabulary_takes_ids_and_refuses_text(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(tiny_gguf.write_model(tmp_path / "ids.gguf", vocab="none"))
    tokens = list(engine.generate(PROMPT, max_tokens=4, temperature=0, capture="probs"))
    assert [token.text for token in tokens] == [""] * 4
    assert tokens[0].attention is not None
    del tokens
    calls: list[Callable[[], object]] = [
        lambda: engine.generate("text"),
        lambda: engine.tokenize("text"),
        lambda: engine.detokenize([1]),
        lambda: engine.token_bytes(1),
        lambda: engine.token_text(1),
    ]
    for call in calls:
        with pytest.raises(errors.UnsupportedModel, match="vocabulary"):
            call()
    assert works(engine)


# ---- options of an engine


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n_ctx", [0, -1, True, 2.5, "8", 2**31, 2**70]),
        ("n_slots", [0, -1, 2.0]),
        ("n_batch", [0, -1, 2**40]),
        ("n_ubatch", [0, -1, 2**40, "1"]),
        ("n_threads", [0, -1, 100_000, 2**40, 1.5]),
        ("n_gpu_layers", [-2, 2**40, "all"]),
        ("flash_attn", ["on", 1, np.ones(2)]),
        ("swa_full", ["on", 1]),
        ("kv_type", ["f17", "", 16]),
        ("run_ahead", [-1, 1.5, True, 2**40]),
        ("attention_budget_bytes", [0, -1, 1.5, 2**64]),
        ("pinned_bytes", [-1, 1.5, 2**64]),
        ("checkpoint_bytes", [-1, 1.5, 2**64]),
        ("checkpoint_every", [-1, 1.5, True, 2**40]),
        ("progress", [1, "yes"]),
    ],
)
def test_engine_option_out_of_range_is_refused(
    tiny_llama: Path, name: str, values: list[Any]
) -> None:
    with leaving_nothing():
        for value in values:
            with pytest.raises(errors.RequestError, match=name):
                Engine(tiny_llama, **{"n_ctx": 64, "n_threads": 1, name: value})


@pytest.mark.parametrize("name", SIZES_MAX)
def test_message_of_a_size_has_the_limits_of_the_core(tiny_llama: Path, name: str) -> None:
    most = SIZES_MAX[name]
    for wrong in (0, most + 1, 2**40, "many"):
        with pytest.raises(errors.RequestError, match=f"{name} must be .* from 1 to {most}, got"):
            Engine(tiny_llama, **{name: wrong})  # pyright: ignore[reportArgumentType]
    options = context_options(checked({"n_ctx": 64, "n_threads": 1}))
    setattr(options, name, most + 1)
    with pytest.raises(
        errors.RequestError, match=rf"{name} is {most + 1}, allowed are 1\.\.{most}"
    ):
        _core.check_opening(model_options(tiny_llama, 0), options)


@pytest.mark.parametrize("options", [{"n_batch": 1}, {"n_ubatch": 1}, {"n_ctx": 16}])
def test_smallest_sizes_work(
    make_engine: MakeEngine, tiny_llama: Path, options: dict[str, Any]
) -> None:
    assert works(make_engine(tiny_llama, **options))


@pytest.mark.needs("host layers")
@pytest.mark.parametrize("n_ctx", [2**28, 2**30])
def test_context_larger_than_memory_is_refused_and_not_tried(tiny_llama: Path, n_ctx: int) -> None:
    with leaving_nothing(), pytest.raises(errors.OutOfMemory, match="lower n_ctx"):
        Engine(tiny_llama, n_ctx=n_ctx, n_threads=1)


def test_quantised_cache_without_flash_attention_is_refused(tmp_path: Path) -> None:
    model = tiny_gguf.write_model(tmp_path / "wide.gguf", n_embd=64, n_head=2, n_head_kv=1)
    with leaving_nothing(), pytest.raises(errors.KqviewError, match="flash_attn"):
        Engine(model, kv_type="q8_0", flash_attn=False, n_ctx=64, n_threads=1)
    with Engine(model, kv_type="q8_0", flash_attn=True, n_ctx=64, n_threads=1) as engine:
        assert works(engine)


def test_progress_that_raises_ends_loading_with_its_exception(tiny_llama: Path) -> None:
    def refuse(fraction: float) -> None:
        raise LookupError(f"at {fraction}")

    with leaving_nothing():
        for _ in range(20):
            with pytest.raises(LookupError, match=r"at \d"):
                Engine(tiny_llama, progress=refuse)


def test_progress_goes_up_to_one(make_engine: MakeEngine, tiny_llama: Path) -> None:
    seen: list[float] = []
    make_engine(tiny_llama, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


# ---- prompts


@pytest.mark.parametrize(
    "ids",
    [[-1], [320], [2**31], [2**70], [-(2**40)], [True], [1.0], [None], ["1"], [np.float32(1)]],
    ids=str,
)
def test_id_outside_the_vocabulary_is_refused(engine: Engine, ids: list[Any]) -> None:
    assert engine.model.n_vocab == 320
    for call in (engine.generate, engine.detokenize, lambda ids: engine.token_bytes(ids[0])):
        with pytest.raises(errors.InvalidToken):
            call(ids)
    assert works(engine)


def test_ids_may_be_any_integers(engine: Engine) -> None:
    generation = engine.generate(np.array(PROMPT, dtype=np.int64), max_tokens=2, temperature=0)  # pyright: ignore[reportArgumentType]
    assert len(list(generation)) == 2
    assert engine.slots[0].tokens[: len(PROMPT)] == PROMPT


@pytest.mark.parametrize("prompt", [[], "", b"text", 5, None], ids=repr)
def test_prompt_that_is_no_tokens_is_refused(engine: Engine, prompt: Any) -> None:
    with pytest.raises(errors.RequestError):
        engine.generate(prompt)
    assert works(engine)


def test_token_of_an_option_outside_the_vocabulary_is_refused(engine: Engine) -> None:
    n_vocab = engine.model.n_vocab
    engine.generate(PROMPT, stop_tokens=[n_vocab - 1], max_tokens=1).read()
    for token in (n_vocab, 10**9):
        given: dict[str, Any] = {
            "stop_tokens": [2, token], "banned_tokens": [2, token], "logit_bias": {2: 1, token: 1},
        }  # fmt: skip
        for name, value in given.items():
            match = f"{name} must .* {n_vocab - 1}, got {token}"
            with pytest.raises(errors.InvalidToken, match=match) as caught:
                engine.generate(PROMPT, **{name: value})
            assert caught.value.parameter == name


def test_without_a_limit_of_tokens_the_slot_is_filled(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_ctx=64)
    generation = engine.generate(PROMPT, max_tokens=None, ignore_eos=True)
    generation.read()
    assert generation.finish_reason == "length"
    assert len(PROMPT) + len(generation.tokens) in (64, 65)


def test_async_function_is_no_callable_of_a_step(engine: Engine) -> None:
    async def hook(*_: object) -> list[int]:
        return []

    for name in ("logits_processor", "stopping", "forcing"):
        with pytest.raises(
            errors.RequestError, match=f"{name} must be a function that is not async"
        ):
            engine.generate(PROMPT, **{name: hook})  # pyright: ignore[reportArgumentType]


def test_prompt_may_fill_the_slot_but_not_exceed_it(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_ctx=100)  # padded to 256 inside
    with pytest.raises(errors.PromptTooLong, match=r"101 .*\b100\b"):
        engine.generate(random_ids(101))
    options: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    full = engine.generate(random_ids(100), capture="probs", **options)
    [token] = full  # nothing has to be decoded for it
    assert token.rows.shape[-1] == 100
    assert full.finish_reason == "length"
    assert engine.slots[0].tokens == random_ids(100)


@pytest.mark.parametrize("text", ["a\ud800b", "\udcff"])
def test_text_with_surrogates_is_refused(engine: Engine, text: str) -> None:
    for call in (engine.tokenize, engine.generate):
        with pytest.raises(errors.RequestError, match="surrogate"):
            call(text)
    with pytest.raises(errors.RequestError):
        engine.tokenize(bytearray(b"bytes"))  # pyright: ignore[reportCallIssue, reportArgumentType]


@pytest.mark.parametrize("wrong", [0, 1, "x", np.int64(1)])
def test_flag_that_is_no_boolean_is_refused(engine: Engine, wrong: Any) -> None:
    calls = (engine.tokenize, engine.generate, engine.score, engine.attend)
    for name in ("add_special", "parse_special"):
        for call in calls:
            with pytest.raises(
                errors.RequestError, match=f"{name} must be True or False"
            ) as caught:
                call("a", **{name: wrong})
            assert caught.value.parameter == name
    for name in ("cache_prompt", "deterministic", "context_shift"):
        with pytest.raises(errors.RequestError, match=f"{name} must be True or False"):
            engine.generate("a", **{name: wrong})


def test_flag_may_be_numpy_s(engine: Engine) -> None:
    yes: Any = np.True_
    no: Any = np.False_
    assert engine.tokenize("a", add_special=no, parse_special=yes) == engine.tokenize(
        "a", add_special=False
    )
    engine.generate("a", add_special=yes, cache_prompt=no, ignore_eos=yes, max_tokens=1).read()


def test_text_with_zero_bytes_is_kept(engine: Engine) -> None:
    ids = engine.tokenize("a\0b\0", add_special=False)
    assert ids == list(b"a\0b\0")
    assert engine.detokenize(ids) == "a\0b\0"


# ---- options of a generation


@pytest.mark.parametrize(
    "capture",
    [
        "attention",
        "",
        5,
        ["probs"],
        Capture("probs", layers=[3]),
        Capture("probs", heads=[4]),
        Capture("probs", layers=[0, 2**31 - 1]),
        Capture("probs", heads=[2**40]),
    ],
    ids=repr,
)
def test_capture_of_what_is_not_there_is_refused(engine: Engine, capture: Any) -> None:
    with pytest.raises(errors.InvalidCapture) as caught:
        engine.generate(PROMPT, capture=capture)
    assert caught.value.parameter in ("capture", "kind")
    assert works(engine)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"max_tokens": 0}, errors.RequestError),
        ({"max_tokens": -1}, errors.RequestError),
        ({"max_tokens": 2.5}, errors.RequestError),
        ({"max_tokens": True}, errors.RequestError),
        ({"slot": 1}, errors.UnknownSlot),
        ({"slot": -1}, errors.UnknownSlot),
        ({"priority": 2**40}, errors.RequestError),
        ({"priority": "high"}, errors.RequestError),
        ({"sampling": {"temperature": 0}}, errors.RequestError),
        ({"sampling": Sampling(), "seed": 1}, errors.RequestError),
    ],
    ids=str,
)
def test_option_of_generate_out_of_range_is_refused(
    engine: Engine, options: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        engine.generate(PROMPT, **options)
    assert works(engine)


# ---- after close


def test_every_call_on_a_closed_engine_raises_closed_error(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    finished = engine.generate(PROMPT, max_tokens=2, temperature=0, ignore_eos=True)
    assert len(list(finished)) == 2
    engine.close()
    engine.close()
    calls: list[Callable[[], object]] = [
        lambda: engine.generate(PROMPT),
        lambda: engine.tokenize("a"),
        lambda: engine.detokenize([1]),
        lambda: engine.token_bytes(1),
        lambda: engine.token_text(1),
        lambda: engine.slots[0].tokens,
        lambda: engine.slots[0].n_tokens,
        lambda: engine.slots[0].is_busy,
    ]
    for call in calls:
        with pytest.raises(errors.ClosedError, match="closed"):
            call()
    # What is known already stays readable.
    assert engine.model.n_vocab == 320
    assert engine.n_ctx == 512
    assert engine.stats().n_tokens == 2
    assert "closed" in repr(engine)
    assert finished.text is not None
    assert finished.usage.completion_tokens == 2
    finished.close()
    assert next(finished, None) is None
