"""A run that ends goes on where it was: nothing is lost, nothing is there twice."""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Engine, extract, open_corpus
from kqview.corpora.writer import Writer
from kqview.errors import CorpusError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEXTS = [f"Anna has {n} red balls." for n in range(40)]
NAMES = ("Anna", "Ben", "Mirelda", "Tom")
SMALL = 3000  # bytes of a shard: about three of these documents
# A program that writes the corpus, and kills itself at its nth look at *where*.
PROGRAM = """
import os, signal, sys
from kqview import Engine, durable, extract
from kqview.corpora import writer
sink, where, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
def killing(function, is_before):
    def call(*args, **options):
        global n
        if is_before: n -= 1
        if n < 0: os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **options)
        if not is_before: n -= 1
        if n < 0: os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call
if where == "rename": os.replace = killing(os.replace, True)
if where == "renamed": os.replace = killing(os.replace, False)
if where == "sync": os.fsync = killing(os.fsync, True)
if where == "added": writer.Writer.add = killing(writer.Writer.add, False)
texts = [f"Anna has {n} red balls." for n in range(40)]
with Engine.demo(n_slots=2, n_ctx=256, n_threads=1) as engine:
    extract(texts, sink, engine=engine, last=1, shard_bytes=3000, deterministic=True)
print("done")
"""


def run(sink: Path, where: str, n: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(sink), where, str(n)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Path:
    """The corpus of a run that nothing ended."""
    folder = tmp_path_factory.mktemp("whole") / "c"
    extract(TEXTS, str(folder), engine=engine, last=1, shard_bytes=SMALL, deterministic=True)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("where", ["rename", "renamed", "sync", "added"])
def test_killed_at_any_point_it_becomes_the_same_corpus(whole: Path, tmp_path: Path, where: str):
    mixed = random.Random(where)
    sink = tmp_path / "c"
    n_kills = n_before = 0
    while True:
        done = run(sink, where, mixed.randrange(4, 30))
        n_documents = len(open_corpus(str(sink))) if list(sink.glob("index/*.parquet")) else 0
        assert n_documents >= n_before
        n_before = n_documents
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        n_kills += 1
    assert n_kills >= 1
    assert contents(sink) == contents(whole)


def test_it_goes_on_where_it_was_stopped(engine: Engine, tmp_path: Path):
    seen: list[int] = []

    class Stopped(Exception):
        pass

    def stop(n: int, total: int | None) -> None:
        seen.append(n)
        if len(seen) == 10:
            raise Stopped

    options: Any = {"engine": engine, "last": 1, "shard_bytes": SMALL}
    with pytest.raises(Stopped):
        extract(TEXTS, str(tmp_path), progress=stop, **options)
    n_done = len(open_corpus(str(tmp_path)))
    assert 0 < n_done <= 10
    rest: list[int] = []
    corpus = extract(TEXTS, str(tmp_path), progress=lambda n, total: rest.append(n), **options)
    assert rest == list(range(n_done + 1, len(TEXTS) + 1))
    assert corpus.ids == [str(n) for n in range(len(TEXTS))]
    assert len(corpus.index) == len(TEXTS)


def test_interrupted_it_keeps_what_is_done(engine: Engine, tmp_path: Path):
    def interrupt(n: int, total: int | None) -> None:
        if n == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract(TEXTS, str(tmp_path), engine=engine, last=1, progress=interrupt)
    assert open_corpus(str(tmp_path)).ids == [str(n) for n in range(5)]
    assert not [one for one in engine.generations if one.finish_reason is None]


def test_a_source_may_grow_but_not_change(engine: Engine, tmp_path: Path):
    options: Any = {"engine": engine, "last": 1}
    extract(TEXTS[:5], str(tmp_path), **options)
    assert len(extract(iter(TEXTS[:9]), str(tmp_path), **options)) == 9
    before = contents(tmp_path)
    for other in ([*TEXTS[:3], "x", *TEXTS[4:]], TEXTS[:8], TEXTS[1:], []):
        with pytest.raises(CorpusError, match="9 documents of another source"):
            extract(other, str(tmp_path), **options)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"last": 2}, "last 1, not 2"),
        ({"last": 1, "fields": ["scores"]}, "another plan: fields"),
        ({"last": 1, "capture": "scores"}, "plan: kind 'probs', not 'scores'"),
        ({"last": 1, "keep": ["label"]}, "keep"),
    ],
)
def test_other_options_are_refused(engine: Engine, tmp_path: Path, options: Any, words: str):
    extract(TEXTS[:2], str(tmp_path), engine=engine, last=1)
    with pytest.raises(CorpusError, match=words):
        extract(TEXTS[:2], str(tmp_path), engine=engine, **options)


def test_another_model_is_refused(engine: Engine, tmp_path: Path):
    extract(TEXTS[:2], str(tmp_path), engine=engine, last=1)
    path = tmp_path / "corpus.json"
    facts = json.loads(path.read_text())
    facts["model"]["fingerprint"] = "0" * 64
    path.write_text(json.dumps(facts))
    with pytest.raises(CorpusError, match="another model: fingerprint"):
        extract(TEXTS[:2], str(tmp_path), engine=engine, last=1)


def test_a_second_writer_is_refused(engine: Engine, tmp_path: Path):
    is_begun, may_end = threading.Event(), threading.Event()

    def slowly() -> Iterator[str]:
        yield TEXTS[0]
        is_begun.set()
        assert may_end.wait(60)
        yield TEXTS[1]

    first = threading.Thread(target=lambda: extract(slowly(), str(tmp_path), engine=engine, last=1))
    first.start()
    try:
        assert is_begun.wait(60)
        with pytest.raises(CorpusError, match="another process writes"):
            extract(TEXTS[:2], str(tmp_path), engine=engine, last=1)
    finally:
        may_end.set()
        first.join()
    assert len(extract(TEXTS[:2], str(tmp_path), engine=engine, last=1)) == 2


def test_a_full_disk_leaves_what_was_written(engine: Engine, tmp_path: Path):
    options: Any = {"engine": engine, "last": 1, "shard_bytes": SMALL}
    extract(TEXTS[:6], str(tmp_path), **options)
    n_done = len(open_corpus(str(tmp_path)))
    before = contents(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(OSError, match="nothing was changed, free some space"):
            extract(TEXTS, str(tmp_path), **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert contents(tmp_path) == before
    assert len(open_corpus(str(tmp_path))) == n_done
    assert len(extract(TEXTS, str(tmp_path), **options)) == len(TEXTS)


def test_what_a_dead_process_left_is_removed(engine: Engine, tmp_path: Path):
    options: Any = {"engine": engine, "last": 1, "shard_bytes": SMALL}
    extract(TEXTS[:6], str(tmp_path), **options)
    shards = tmp_path / "shards"
    for name in ("00099", "other"):
        (shards / f"{name}.safetensors").write_bytes(b"half a shard")
    (shards / ".kqview-0123456789abcdef.part").write_bytes(b"half a file")
    assert len(extract(TEXTS[:8], str(tmp_path), **options)) == 8
    assert {one.stem for one in shards.iterdir()} == {
        one.stem for one in (tmp_path / "index").iterdir()
    }


def test_memory_does_not_grow_with_the_source(engine: Engine, tmp_path: Path, monkeypatch: Any):
    most = 0
    add = Writer.add

    def counted(self: Writer, *args: Any, **options: Any) -> None:
        nonlocal most
        add(self, *args, **options)
        held: Any = self._arrays  # pyright: ignore[reportPrivateUsage]
        most = max(most, sum(array.nbytes for one in held for array in one.values()))

    monkeypatch.setattr(Writer, "add", counted)
    n_read = 0

    def source() -> Iterator[str]:
        nonlocal n_read
        for n in range(500):
            n_read = n
            yield f"Anna has {n} balls."

    ahead: list[int] = []
    extract(
        source(), str(tmp_path), engine=engine, last=1, shard_bytes=SMALL,
        progress=lambda n, total: ahead.append(n_read - n),
    )  # fmt: skip
    assert most < 2 * SMALL
    assert max(ahead) <= 2 * len(engine.slots)
    assert engine.stats().pool.leased_bytes == 0


def test_a_shared_prefix_is_evaluated_once_a_slot(engine: Engine, tmp_path: Path):
    prefix = "Anna has a red ball and Tom has a dog that likes to run. " * 6
    source = [f"{prefix}{n} times." for n in range(20)]
    before = engine.stats()
    extract(source, str(tmp_path), engine=engine, last=2)
    n_evaluated = engine.stats().prefill_tokens - before.prefill_tokens
    n_prefix = len(engine.tokenize(prefix))
    n_all = sum(len(engine.tokenize(text)) for text in source)
    assert n_evaluated <= n_all - 17 * (n_prefix - 2)
    rows = open_corpus(str(tmp_path))["7"].attention
    assert np.allclose(rows, engine.attend(source[7], last=2).array(), atol=2e-3)


def test_a_group_is_evaluated_by_its_beginnings_and_written_in_its_order(
    engine: Engine, tmp_path: Path
):
    prefixes = [f"{name} has a red ball and a dog that likes to run. " * 6 for name in NAMES]
    source = {f"{n}-{i}": (one, f"{n} times.") for n in range(8) for i, one in enumerate(prefixes)}
    spent: dict[int, int] = {}
    for group in (1, 12, 100):
        before = engine.stats()
        corpus = extract(
            source, str(tmp_path / str(group)), engine=engine, fields=["scores"], group=group
        )
        spent[group] = engine.stats().prefill_tokens - before.prefill_tokens
        assert corpus.ids == list(source)
        assert all(
            entry.token_ids == engine.tokenize(prompt) + engine.tokenize(more, add_special=False)
            for entry, (prompt, more) in zip(corpus, source.values(), strict=True)
        )
    # With two slots and four prefixes in turn, hardly anything is in a cache unless sorted.
    n_all = sum(len(entry.token_ids) for entry in corpus)
    assert spent[1] > 0.8 * n_all
    assert spent[12] < 0.8 * n_all
    assert spent[100] < 0.4 * n_all


def test_a_run_in_groups_goes_on_where_it_was_stopped(engine: Engine, tmp_path: Path):
    def interrupt(n: int, total: int | None) -> None:
        if n == 10:
            raise KeyboardInterrupt

    options: Any = {"engine": engine, "last": 1, "group": 7}
    with pytest.raises(KeyboardInterrupt):
        extract(TEXTS, str(tmp_path), progress=interrupt, **options)
    assert open_corpus(str(tmp_path)).ids == [str(n) for n in range(10)]
    assert extract(TEXTS, str(tmp_path), **options).ids == [str(n) for n in range(len(TEXTS))]
