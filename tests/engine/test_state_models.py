"""Which models' slots can be saved: whole and exactly, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kqview import errors
from tests.support import encoder_gguf, ses1, shared_kv_gguf, tiny_gguf
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kqview import Engine, Token

    from .conftest import MakeEngine

EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (tiny_gguf.write_mamba, "recurrent"),
        (shared_kv_gguf.write_gemma3n, "sliding windows"),
        (encoder_gguf.write_bert, "no KV cache"),
        (encoder_gguf.write_t5, "no KV cache"),
    ],
)
def test_cache_that_cannot_be_saved_whole_is_refused(
    make_engine: MakeEngine, tmp_path: Path, write: Callable[[Path], Path], reason: str
) -> None:
    engine = make_engine(write(tmp_path / "model.gguf"))
    slot = engine.slots[0]
    if reason != "no KV cache":
        engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True).read()
        assert slot.n_tokens == 6
    held = slot.tokens
    empty = ses1.Blob([], [], [], False).encode()
    for call in (slot.save, lambda: slot.restore(empty), lambda: slot.restore(b"SES1")):
        with pytest.raises(errors.UnsupportedModel, match=reason):
            call()
    assert slot.tokens == held


def test_recurrent_slot_that_is_truncated_is_empty(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(tiny_gguf.write_mamba(tmp_path / "mamba.gguf"))
    engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True).read()
    engine.slots[0].truncate(1)  # its state cannot forget the tail alone
    assert engine.slots[0].tokens == []


@pytest.mark.peers
@pytest.mark.slow
def test_every_architecture_is_saved_exactly_or_refused(
    make_engine: MakeEngine, architectures: dict[str, Path]
) -> None:
    kinds: dict[str, list[str]] = {"saved": [], "refused": []}
    for name, path in architectures.items():
        try:
            engine = make_engine(path, n_ctx=256, **EXACT)
        except errors.ModelError:
            continue
        ids = [i % engine.model.n_vocab for i in random_ids(12)]
        slot = engine.slots[0]
        try:
            list(engine.attend(ids))
            if slot.n_tokens == 0:
                list(engine.generate(ids, max_tokens=1, ignore_eos=True))
        except errors.KqviewError:
            pass  # not every one generates or has attention
        try:
            blob = slot.save()
        except errors.UnsupportedModel:
            kinds["refused"].append(name)
            with pytest.raises(errors.UnsupportedModel):
                slot.restore(b"SES1")
        else:
            if not slot.n_tokens:
                continue
            first = [t.top_logprobs for t in go_on_plain(engine, ids)]
            slot.clear()
            slot.restore(blob, exact=True)
            assert slot.save() == blob, name
            assert [t.top_logprobs for t in go_on_plain(engine, ids)] == first, name
            kinds["saved"].append(name)
        engine.close()
    assert len(kinds["saved"]) > 40
    assert {"refused", "saved"} == {kind for kind, names in kinds.items() if names}


def go_on_plain(engine: Engine, ids: list[int]) -> list[Token]:
    options: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0, "top_logprobs": 5}
    return list(engine.generate(ids, ignore_eos=True, **options))
