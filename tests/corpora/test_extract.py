"""What `extract` writes is what the engine gives for each document alone."""

from __future__ import annotations

import csv
import itertools
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kqview
from kqview import Capture, Engine, extract, open_corpus
from kqview.corpora import Columns, estimate
from kqview.errors import CorpusError, InvalidCapture, RequestError, UnknownOption

if TYPE_CHECKING:
    from pathlib import Path

pa = pytest.importorskip("pyarrow")
TEXTS = ["Anna has a red ball.", "Tom has a dog. Tom is happy.", "One day, Tom found a red ball."]


def near(got: Any, expected: Any) -> bool:
    """Equal up to what steps that are shared round."""
    return got.shape == expected.shape and bool(np.allclose(got, expected, atol=2e-3))


# ---- fields


def test_rows_are_those_of_attend(engine: Engine, tmp_path: Path):
    corpus = extract(TEXTS, str(tmp_path / "c"), engine=engine, yes=True)
    assert corpus.ids == ["0", "1", "2"]
    for text, entry in zip(TEXTS, corpus, strict=True):
        assert near(entry.attention, engine.attend(text).array())
        assert entry.token_ids == engine.tokenize(text)
        assert entry.names == ["attention"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"last": 3}, lambda e, t: e.attend(t, last=3).array()),
        (
            {"capture": Capture(reduce="mean_heads")},
            lambda e, t: e.attend(t, Capture(reduce="mean_heads")).array(),
        ),
        (
            {"capture": Capture("qk", layers=[1], heads=[0, 3], dtype="float16")},
            lambda e, t: e.attend(
                t, Capture("qk", layers=[1], heads=[0, 3], dtype="float16")
            ).array(),
        ),
        (
            {"capture": Capture(spans=[(0, 2), (2, None)])},
            lambda e, t: e.attend(t, Capture(spans=[(0, 2), (2, None)])).array(),
        ),
    ],
)
def test_captures(engine: Engine, tmp_path: Path, options: Any, expected: Any):
    corpus = extract(TEXTS, str(tmp_path / "c"), engine=engine, yes=True, **options)
    for text, entry in zip(TEXTS, corpus, strict=True):
        whole = expected(engine, text)
        finite = np.isfinite(whole)
        assert np.array_equal(np.isfinite(entry.attention), finite)
        assert entry.attention.dtype == whole.dtype
        assert np.allclose(entry.attention[finite], whole[finite], atol=2e-2)


def test_top_values_have_positions(engine: Engine, tmp_path: Path):
    corpus = extract(TEXTS[:1], str(tmp_path / "c"), engine=engine, capture=Capture(top_k=4))
    values, positions = engine.attend(TEXTS[0], Capture(top_k=4)).top_k()
    assert near(corpus["0"].attention, values)
    assert corpus["0"].attention_positions.shape == positions.shape
    assert corpus["0"].attention_positions.dtype == np.int32


@pytest.mark.parametrize("pool", [None, "mean", "first", "last"])
def test_hidden_states(engine: Engine, tmp_path: Path, pool: str | None):
    capture = Capture(layers=(), hidden=[0, -1])
    corpus = extract(TEXTS, str(tmp_path / "c"), engine=engine, capture=capture, pool=pool)
    for text, entry in zip(TEXTS, corpus, strict=True):
        states = engine.attend(text, capture).hidden
        wanted = {None: states, "mean": states.mean(1), "first": states[:, 0]}
        assert np.allclose(entry.hidden, wanted.get(pool, states[:, -1]), atol=2e-2)


def test_rows_states_and_scores_of_a_text_take_one_evaluation(engine: Engine, tmp_path: Path):
    fields, capture = ["attention", "hidden", "scores"], Capture(reduce="mean", hidden=[-1])
    before = engine.stats().prefill_tokens
    options: dict[str, Any] = {"capture": capture, "fields": fields, "yes": True}
    corpus = extract(TEXTS, str(tmp_path / "c"), engine=engine, **options)
    n_evaluated = engine.stats().prefill_tokens - before
    assert n_evaluated <= sum(len(entry.token_ids) for entry in corpus)
    for text, entry in zip(TEXTS, corpus, strict=True):
        np.testing.assert_allclose(entry.logprobs, engine.score(text).logprobs, atol=2e-2)
        assert near(entry.attention, engine.attend(text, Capture(reduce="mean")).array())


def test_scores_of_a_pair_are_those_of_its_continuation(engine: Engine, tmp_path: Path):
    pairs = [("Anna has a red", " ball."), ("Tom has", " a dog.")]
    corpus = extract(pairs, str(tmp_path / "c"), engine=engine, fields=["scores"], top_logprobs=2)
    for (prompt, more), entry in zip(pairs, corpus, strict=True):
        n = len(engine.tokenize(more, add_special=False))
        ids = engine.tokenize(prompt) + engine.tokenize(more, add_special=False)
        score = engine.score(ids, last=n)
        assert np.allclose(entry.logprobs, score.logprobs, atol=5e-3, equal_nan=True)
        assert (entry.ranks >= 0).sum() == n
        assert entry.top_ids.shape == (len(ids), 2)
        assert (entry.top_ids[-n:] >= 0).all()
        assert np.isnan(entry.top_logprobs[:-n]).all()


def test_embeddings(tmp_path: Path):
    with Engine.demo(n_ctx=128, pooling="mean", n_threads=1) as engine:
        corpus = extract(TEXTS, str(tmp_path / "c"), engine=engine, fields=["embedding"])
        for text, entry in zip(TEXTS, corpus, strict=True):
            assert np.allclose(entry.embedding, engine.embed(text), atol=1e-3)


def test_texts_with_the_rows_of_their_tokens(engine: Engine, tmp_path: Path):
    prompts = ["Anna has", "One day, Tom"]
    corpus = extract(
        prompts, str(tmp_path / "c"), engine=engine, fields=["text"],
        generate={"max_tokens": 5, "temperature": 0, "capture": Capture(reduce="mean")},
    )  # fmt: skip
    for text, entry in zip(prompts, corpus, strict=True):
        generation = engine.generate(
            text, max_tokens=5, temperature=0, capture=Capture(reduce="mean")
        )
        tokens = list(generation)
        assert entry.text == generation.text
        assert len(tokens) == 5
        assert entry.generated_ids.tolist() == generation.tokens
        assert near(entry.generated_attention, kqview.stack(tokens))


def test_chats_and_ids(engine: Engine, tmp_path: Path):
    messages = [{"role": "user", "content": "Who is Anna?"}]
    corpus = extract([messages, [5, 6, 7]], str(tmp_path / "c"), engine=engine, fields=["scores"])
    assert corpus["0"].token_ids == engine.apply_chat_template(messages)
    assert corpus["1"].token_ids == [5, 6, 7]


# ---- spans


def test_spans_by_column_and_by_expression(engine: Engine, tmp_path: Path):
    text = "Anna has a red ball. Tom has a dog."
    record = {"id": "a", "text": text, "parts": {"anna": [0, 20], "tom": [20, len(text)]}}
    rows = extract([record], str(tmp_path / "a"), engine=engine, spans="parts")["a"]
    patterns = {"anna": r"Anna[^.]*\.", "tom": r" Tom.*"}
    same = extract([record], str(tmp_path / "b"), engine=engine, spans=patterns)["a"]
    ids, offsets = engine.tokenize(text, offsets=True)
    n = sum(1 for start, stop in offsets if start < stop and start < 20)
    n_before = len(ids) - sum(1 for start, stop in offsets if start < stop)
    assert rows.spans == same.spans
    assert rows.spans == [
        ("anna", n_before, n_before + n), ("tom", n_before + n, len(ids)),
    ]  # fmt: skip
    whole = engine.attend(text).array()
    sums = [whole[..., start:stop].sum(-1) for _, start, stop in rows.spans]
    assert near(rows.attention, np.stack(sums, -1))
    assert np.array_equal(rows.attention, same.attention) or near(same.attention, rows.attention)


def test_spans_of_messages(engine: Engine, tmp_path: Path):
    messages = [
        {"role": "user", "content": "Who is Anna?"}, {"role": "assistant", "content": "A girl."},
        {"role": "user", "content": "And Tom?"},
    ]  # fmt: skip
    entry = extract([messages], str(tmp_path / "c"), engine=engine, spans="messages")["0"]
    ids, spans = engine.apply_chat_template(messages, spans=True)
    assert [one[1:] for one in entry.spans] == spans
    whole = engine.attend(ids).array()
    assert near(entry.attention, np.stack([whole[..., a:b].sum(-1) for a, b in spans], -1))


@pytest.mark.parametrize(
    ("record", "spans", "words"),
    [
        ({"text": "Anna"}, {"tom": "Tom"}, "has no tom"),
        ({"text": "Anna", "at": [[9, 12]]}, "at", "holds no token"),
        ({"text": "Anna", "at": ["x"]}, "at", "characters of the text"),
        ({"text": "Anna"}, "at", "no spans"),
        ({"ids": [5, 6]}, "at", "ranges of a text"),
        ({"text": "Anna"}, "messages", "no chat"),
    ],
)
def test_documents_without_their_spans_fail(
    engine: Engine, tmp_path: Path, record: Any, spans: Any, words: str
):
    entry = extract([record], str(tmp_path / "c"), engine=engine, spans=spans)["0"]
    assert entry.status == "error"
    assert words in (entry.error or "")
    with pytest.raises(AttributeError, match="no attention"):
        _ = entry.attention


# ---- sources


def written(folder: Path, kind: str) -> Path:
    """The texts with ids as a file of this *kind*."""
    records = [{"id": f"d{i}", "text": text, "label": i % 2} for i, text in enumerate(TEXTS)]
    path = folder / f"source.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
    elif kind.lower() in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            table = csv.DictWriter(
                file, ["id", "text", "label"], delimiter="," if kind == "csv" else "\t"
            )
            table.writeheader()
            table.writerows(records)
    elif kind == "parquet":
        import pyarrow.parquet as parquet

        parquet.write_table(pa.Table.from_pylist(records), path)
    else:
        path.mkdir()
        for one in records:
            (path / f"{one['id']}.txt").write_text(one["text"])
    return path


def test_largest_values_of_generated_tokens_have_positions(engine: Engine, tmp_path: Path):
    options: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "capture": Capture(top_k=2)}
    corpus = extract(
        ["Anna has"], str(tmp_path / "c"), engine=engine, fields=["text"], generate=options
    )
    want = [token.attention_positions for token in engine.generate("Anna has", **options)]
    assert np.array_equal(corpus["0"].generated_attention_positions, np.stack(want))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "TSV", "parquet", "folder"])
def test_files(engine: Engine, tmp_path: Path, kind: str):
    source = written(tmp_path, kind)
    keep = () if kind == "folder" else ("label",)
    corpus = extract(str(source), str(tmp_path / "c"), engine=engine, fields=["scores"], keep=keep)
    end = ".txt" if kind == "folder" else ""
    assert corpus.ids == [f"d{i}{end}" for i in range(3)]
    assert [one.token_ids for one in corpus] == [engine.tokenize(text) for text in TEXTS]
    if keep:
        assert [int(one.columns["label"]) for one in corpus] == [0, 1, 0]


def test_names_of_columns_and_data_sets(engine: Engine, tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    records = [{"key": "a", "body": TEXTS[0]}, {"key": "b", "body": TEXTS[1]}]
    data = datasets.Dataset.from_list(records)
    data.save_to_disk(str(tmp_path / "saved"))
    columns = Columns(id="key", text="body")
    for name, source in (("a", data), ("b", str(tmp_path / "saved"))):
        sink = str(tmp_path / name)
        corpus = extract(source, sink, engine=engine, fields=["scores"], columns=columns)
        assert corpus.ids == ["a", "b"]


def test_a_file_is_no_corpus(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="is no corpus"):
        open_corpus(tmp_path / "file")


def test_what_fails_is_in_the_corpus(engine: Engine, tmp_path: Path):
    source = tmp_path / "source.jsonl"
    lines = [
        json.dumps({"id": "good", "text": TEXTS[0]}), "{broken", json.dumps({"id": "empty"}),
        json.dumps({"id": "long", "text": "Anna " * 400}), json.dumps({"id": "good", "text": "x"}),
        json.dumps({"id": "odd", "text": 5}), "[" * 1000, json.dumps({"id": "last", "text": "Tom"}),
    ]  # fmt: skip
    source.write_text("\n".join(lines))
    corpus = extract(str(source), str(tmp_path / "c"), engine=engine, fields=["scores"])
    failed = {one.id: one.error or "" for one in corpus if one.status == "error"}
    assert list(failed) == ["1", "empty", "long", "odd", "6"]
    for name, words in {
        "1": "line 2 is not JSON", "empty": "neither of the columns", "long": "the limit is 256",
        "odd": "the document is 5", "6": "nested 1000 deep",
    }.items():  # fmt: skip
        assert words in failed[name]
    assert corpus["good"].token_ids == engine.tokenize(TEXTS[0])
    assert corpus["last"].status == "ok"
    assert corpus.index["status"].to_pylist().count("duplicate") == 1


def test_most_errors(engine: Engine, tmp_path: Path):
    source = [TEXTS[0], [10**6], [10**6], [10**6], TEXTS[1]]
    sink = str(tmp_path / "c")
    with pytest.raises(CorpusError, match="2 documents failed, max_errors is 1"):
        extract(source, sink, engine=engine, fields=["scores"], max_errors=1)
    assert len(open_corpus(sink)) == 3
    assert len(extract(source, sink, engine=engine, fields=["scores"])) == 5


# ---- long documents


def test_windows(engine: Engine, tmp_path: Path):
    ids = engine.tokenize("Anna has a red ball. " * 8)
    options: Any = {"too_long": "window", "max_length": 40, "stride": 30}
    corpus = extract([ids], str(tmp_path / "c"), engine=engine, last=1, **options)
    windows = corpus["0"].windows
    assert [one.start for one in windows] == list(range(0, len(ids) - 10, 30))
    assert all(one.token_ids == ids[one.start : one.start + 40] for one in windows)
    assert windows[-1].token_ids[-1] == ids[-1]
    assert near(windows[1].attention, engine.attend(ids[30:70], last=1).array())
    assert len(corpus) == 1


def test_windows_of_a_pair_score_its_continuation_alone(engine: Engine, tmp_path: Path):
    pair = ("Anna has a red ball. " * 9, " and Tom has a dog." * 8)
    n_more = len(engine.tokenize(pair[1], add_special=False))
    n_prompt = len(engine.tokenize(pair[0]))
    corpus = extract(
        [pair], str(tmp_path / "c"), engine=engine, fields=["scores"], too_long="window",
        max_length=40, stride=30,
    )  # fmt: skip
    windows = corpus["0"].windows
    assert [one.window for one in windows] == list(range(len(windows)))
    assert windows[0].start > 0
    assert windows[0].start <= n_prompt < windows[0].start + 40
    found: set[int] = set()
    for one in windows:
        scored = one.start + np.flatnonzero(one.ranks >= 0)
        assert scored.min() >= n_prompt
        found |= set(scored.tolist())
    assert found == set(range(n_prompt, n_prompt + n_more))


def test_what_is_cut_off(engine: Engine, tmp_path: Path):
    text = "Anna has a red ball. " * 8
    corpus = extract(
        {"text": text, "pair": (text, " The end.")}, str(tmp_path / "c"), engine=engine,
        fields=["scores"], too_long="truncate", max_length=20,
    )  # fmt: skip
    assert corpus["text"].token_ids == engine.tokenize(text)[:20]
    end = engine.tokenize(" The end.", add_special=False)
    assert corpus["pair"].token_ids[-len(end) :] == end
    assert len(corpus["pair"].token_ids) == 20


# ---- the size of it


@pytest.mark.parametrize(
    "options",
    [
        {}, {"last": 2}, {"capture": Capture(reduce="mean_heads")},
        {"capture": Capture(top_k=4)}, {"capture": Capture(dtype="float16")},
        {"capture": Capture(layers=(), hidden="all")}, {"fields": ["scores"], "top_logprobs": 5},
        {"capture": Capture(hidden=[0]), "pool": "mean"},
    ],
)  # fmt: skip
def test_estimate_is_right(engine: Engine, tmp_path: Path, options: Any):
    source = [text * n for text in TEXTS for n in range(1, 8)]
    found = estimate(source, engine=engine, **options)
    extract(source, str(tmp_path / "c"), engine=engine, yes=True, **options)
    files = [*(tmp_path / "c").glob("shards/*"), *(tmp_path / "c").glob("index/*")]
    assert found.n_documents == 21
    assert found.n_tokens == sum(len(engine.tokenize(text)) for text in source)
    # The index has a fixed part of its own, which counts for nothing where bytes matter.
    on_disk = sum(file.stat().st_size for file in files) - 6000
    assert on_disk == pytest.approx(found.n_bytes, rel=0.05, abs=8000)


def test_whole_maps_need_a_yes(engine: Engine, tmp_path: Path):
    sink = tmp_path / "c"
    with pytest.raises(RequestError, match=r"whole maps of 3 documents .* take about .* KiB"):
        extract(TEXTS, str(sink), engine=engine)
    with pytest.raises(RequestError, match="read only once"):
        extract(iter(TEXTS), str(sink), engine=engine)
    assert not sink.exists()


# ---- options


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"fields": []}, RequestError, "fields is empty"),
        ({"fields": ["rows"]}, RequestError, "fields"),
        ({"dtypes": None}, UnknownOption, "dtypes"),
        ({"capture": None, "fields": ["attention"]}, RequestError, "whole maps"),
        ({"capture": Capture(layers=[99])}, InvalidCapture, "layers"),
        ({"spans": {"a": "("}}, RequestError, "no regular expression"),
        ({"spans": "x", "fields": ["scores"]}, RequestError, "need the field attention"),
        ({"too_long": "cut"}, RequestError, "too_long"),
        ({"stride": 0}, RequestError, "stride"),
        ({"max_length": 0}, RequestError, "max_length"),
        ({"generate": {"max_tokens": 4}}, RequestError, "text is not among"),
        ({"fields": ["text"], "generate": {"max_tokens": 256}}, RequestError, "no room"),
        ({"fields": "text"}, RequestError, "fields must be a list"),
        ({"fields": ["text"], "generate": {"tokens": 4}}, UnknownOption, "tokens"),
        ({"fields": ["text"], "generate": {"top_p": 2}}, RequestError, "top_p"),
        ({"last": 1, "top_logprobs": 2}, RequestError, "come with scores"),
        ({"fields": ["scores"], "top_logprobs": 1001}, RequestError, "0 to 1000, got 1001"),
        ({"pool": "sum"}, RequestError, "pool"),
        ({"last": 0}, RequestError, "last"),
        ({"shard_bytes": 0, "last": 1}, RequestError, "shard_bytes"),
    ],
)
def test_bad_options(
    engine: Engine, tmp_path: Path, options: Any, error: type[Exception], words: str
):
    sink = tmp_path / "c"
    with pytest.raises(error, match=words):
        extract(TEXTS, str(sink), engine=engine, **options)
    assert not sink.exists()


@pytest.mark.parametrize("source", ["nowhere.jsonl", 5, b"Anna", "folder", "notes.md"])
def test_bad_sources(engine: Engine, tmp_path: Path, source: Any):
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.md").write_text("Anna")
    given = str(tmp_path / source) if isinstance(source, str) else source
    with pytest.raises(RequestError, match="source"):
        extract(given, str(tmp_path / "c"), engine=engine, last=1)


@pytest.mark.parametrize(
    ("document", "options", "words"),
    [
        ({"text": "Anna", "at": 5}, {"spans": "at"}, "column at is 5"),
        ({"text": "Anna", "at": [5]}, {"spans": "at"}, "span 0 is 5"),
        ({"text": "Anna", "at": np.arange(2)}, {"spans": "at"}, "span 0 is"),
        (("Anna", ""), {"last": 1}, "continuation is empty"),
        (b"Anna", {"last": 1}, "send a text"),
        (np.int64(5), {"last": 1}, "send a text"),
        (np.array(5), {"last": 1}, "send a text"),
    ],
)
def test_a_malformed_document_fails_alone(
    engine: Engine, tmp_path: Path, document: Any, options: Any, words: str
):
    good = {"text": "Tom has a dog.", "at": [[0, 3]]}
    corpus = extract([document, good], str(tmp_path / "c"), engine=engine, **options)
    found = list(corpus)
    assert [one.status for one in found] == ["error", "ok"]
    assert words in (found[0].error or "")


def test_a_table_of_a_spreadsheet_may_begin_with_a_mark(engine: Engine, tmp_path: Path):
    (tmp_path / "a.csv").write_text("text,id\nAnna,x\n", encoding="utf-8-sig")
    corpus = extract(str(tmp_path / "a.csv"), str(tmp_path / "c"), engine=engine, last=1)
    assert corpus["x"].token_ids == engine.tokenize("Anna")


def test_a_source_without_documents_is_named(engine: Engine, tmp_path: Path):
    with pytest.raises(RequestError, match="its source has none"):
        extract([], str(tmp_path / "c"), engine=engine, last=1)


def test_progress(engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    calls: list[tuple[int, int | None]] = []
    extract(
        TEXTS, str(tmp_path / "a"), engine=engine, last=1,
        progress=lambda n, total: calls.append((n, total)),
    )  # fmt: skip
    assert calls == [(1, 3), (2, 3), (3, 3)]
    extract(TEXTS, str(tmp_path / "b"), engine=engine, last=1, progress=True)
    assert "3/3 documents" in capsys.readouterr().err


# ---- bytes


def test_the_same_corpus_twice_is_equal_in_every_byte(engine: Engine, tmp_path: Path):
    for name in ("a", "b"):
        extract(
            TEXTS * 5, str(tmp_path / name), engine=engine, deterministic=True, last=2,
            shard_bytes=4000,
        )  # fmt: skip
        engine.attend("something else that stays in a slot")
    files = sorted(one.relative_to(tmp_path / "a") for one in (tmp_path / "a").rglob("*.*"))
    assert len(files) > 6
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_others_read_it_without_kqview(engine: Engine, tmp_path: Path):
    pytest.importorskip("datasets")
    extract(TEXTS, str(tmp_path / "c"), engine=engine, last=1, capture=Capture(hidden=[0]))
    program = """
import sys, numpy, pyarrow.dataset, datasets
from safetensors.numpy import load_file
folder = sys.argv[1]
table = pyarrow.dataset.dataset(folder + "/index").to_table()
rows = datasets.load_dataset("parquet", data_files=folder + "/index/*.parquet", split="train")
assert table["id"].to_pylist() == rows["id"] == ["0", "1", "2"], table
tensors = load_file(folder + "/shards/00000.safetensors")
for i, row in enumerate(rows):
    for array in row["arrays"]:
        mapped = numpy.memmap(
            f"{folder}/shards/{row['shard']:05}.safetensors", array["dtype"], "r",
            array["offset"], tuple(array["shape"]),
        )
        assert numpy.array_equal(mapped, tensors[f"{i}.{array['name']}"])
assert "kqview" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "c")], capture_output=True, text=True,
        timeout=300, env={"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "PATH": ""}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# ---- reading


def test_arrays_are_views_of_the_file(engine: Engine, tmp_path: Path):
    corpus = extract(TEXTS, str(tmp_path / "c"), engine=engine, last=1)
    rows = corpus["1"].attention
    assert not rows.flags.owndata
    assert not rows.flags.writeable
    assert rows.base is not None
    with pytest.raises(KeyError, match="there is no document 'x'; the first ones are '0', '1'"):
        _ = corpus["x"]
    with pytest.raises(RequestError, match="no corpus"):
        open_corpus(str(tmp_path))


def test_filters_and_tensors(engine: Engine, tmp_path: Path):
    compute = pytest.importorskip("pyarrow.compute")
    corpus = extract(TEXTS, str(tmp_path / "c"), engine=engine, last=1)
    n = len(engine.tokenize(TEXTS[0]))
    longer = corpus.filter(compute.field("n_tokens") > n)
    assert longer.ids == [
        i for i, one in zip(corpus.ids, corpus, strict=True) if len(one.token_ids) > n
    ]
    torch = pytest.importorskip("torch")
    data = corpus.to_torch("attention", shuffle=True, seed=1)
    assert sorted(item["id"] for item in itertools.islice(data, len(data))) == corpus.ids
    assert torch.equal(data[0]["attention"], torch.tensor(corpus[data[0]["id"]].attention))


def test_compressed_corpus_is_the_same_and_smaller(engine: Engine, tmp_path: Path):
    options: dict[str, Any] = {"engine": engine, "yes": True, "deterministic": True}
    texts = [" ".join(TEXTS * (1 + i)) for i in range(5)]
    plain = extract(texts, str(tmp_path / "plain"), shard_bytes=20_000, **options)
    small = extract(texts, str(tmp_path / "small"), shard_bytes=20_000, compress=True, **options)
    for one, other in zip(plain, small, strict=True):
        np.testing.assert_array_equal(one.attention, other.attention)
        assert not other.attention.flags.writeable
    folders = [tmp_path / name / "shards" for name in ("plain", "small")]
    sizes = [sum(one.stat().st_size for one in folder.iterdir()) for folder in folders]
    assert sizes[1] < 0.6 * sizes[0]
    assert {one.suffix for one in folders[1].iterdir()} == {".zst"}
    assert len(list(folders[1].iterdir())) > 2  # more than are kept in memory
    # Without kqview: what is behind the compression is a file of safetensors.
    raw = pa.input_stream(str(folders[1] / "00000.safetensors.zst")).read()
    tensors = pytest.importorskip("safetensors.numpy").load(raw)
    np.testing.assert_array_equal(tensors["0.attention"], plain["0"].attention)
    with pytest.raises(CorpusError, match="another plan: compress True, not False"):
        extract(texts, str(tmp_path / "small"), **options)
    assert len(extract(texts, str(tmp_path / "small"), compress=True, **options)) == len(texts)


def test_damage_is_said(engine: Engine, tmp_path: Path):
    extract(TEXTS, str(tmp_path / "c"), engine=engine, last=1)
    shard = tmp_path / "c" / "shards" / "00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(CorpusError, match="shorter than its index says"):
        _ = open_corpus(str(tmp_path / "c"))["2"].attention
    shard.unlink()
    with pytest.raises(CorpusError, match="cannot be read"):
        _ = open_corpus(str(tmp_path / "c"))["2"].attention
    (tmp_path / "c" / "index" / "00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(CorpusError, match=r"00000\.parquet is damaged"):
        open_corpus(str(tmp_path / "c"))
    (tmp_path / "c" / "corpus.json").write_text("{")
    with pytest.raises(CorpusError, match="damaged"):
        open_corpus(str(tmp_path / "c"))


def test_columns_that_an_older_run_lacks_are_null(engine: Engine, tmp_path: Path):
    extract(TEXTS[:2], str(tmp_path / "c"), engine=engine, last=1)
    part = tmp_path / "c" / "index" / "00000.parquet"
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(part)
    parquet.write_table(table.drop_columns(["versions"]), part)
    whole = extract(TEXTS, str(tmp_path / "c"), engine=engine, last=1)
    versions = whole.index["versions"].to_pylist()
    assert versions[:2] == [None, None]
    assert None not in versions[2:]
