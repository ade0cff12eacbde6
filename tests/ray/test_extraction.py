"""Corpora on a cluster of several nodes, each of which has processes of its own on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kqview
from kqview import Engine, open_corpus
from kqview.corpora import Columns
from kqview.corpora.files import open_files
from kqview.demo import MODEL_PATH
from kqview.errors import CorpusError, KqviewError, RequestError
from kqview.ray import extraction
from kqview.ray.extraction import Extractor
from tests.support.object_store import s3_bucket

if TYPE_CHECKING:
    from collections.abc import Iterator

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

pytestmark = [
    pytest.mark.full,
    # Ray's own: files and sockets that its processes leave to the end, and what it deprecates.
    pytest.mark.filterwarnings("ignore"),
]

N = 60
MODEL = str(MODEL_PATH)
RECORDS = [{"id": f"d{i}", "text": f"Anna has {i} red balls."} for i in range(N)]
OPTIONS: dict[str, Any] = {
    "model": MODEL, "engine": {"n_ctx": 256, "n_slots": 2}, "last": 1, "batch": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def bucket() -> Iterator[str | None]:
    """URL of a bucket of S3, which nodes know that begin after it; None without its packages."""
    with ExitStack() as stack:
        url = None
        with suppress(pytest.skip.Exception):
            url = stack.enter_context(s3_bucket())
        yield url


@pytest.fixture(scope="module")
def cluster(bucket: str | None) -> Iterator[Any]:
    """A head that only reads, and two nodes with a CPU each for actors."""
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        # Ray gives a node 30 s to begin, so what nobody asks here does not compete for them.
        made.add_node(num_cpus=1, include_dashboard=False, no_monitor=True)
        made.add_node(num_cpus=1)
        made.add_node(num_cpus=1)
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def dataset(records: Any = RECORDS) -> Any:
    return ray.data.from_items(records, override_num_blocks=6)


def check(corpus: Any) -> None:
    """Each document is there once, with the rows that an engine of this process gives it."""
    index = corpus.index.to_pydict()
    assert sorted(index["id"]) == sorted(one["id"] for one in RECORDS)
    assert set(index["status"]) == {"ok"}
    assert index["n"] == list(range(N))
    with Engine.demo(n_ctx=256, n_threads=1) as engine:
        for record in RECORDS[::7]:
            rows = engine.attend(record["text"], last=1).array()
            assert np.allclose(corpus[record["id"]].attention, rows, atol=2e-3)


def test_actors_write_the_same_corpus_as_one_engine(cluster: Any, tmp_path: Path):
    corpus = kqview.ray.extract(dataset(), str(tmp_path), actors=2, **OPTIONS)
    assert corpus is not None
    check(corpus)
    # Again, there is nothing left to do; other options are refused, and so is another writer.
    n_parts = len(list((tmp_path / "index").iterdir()))
    again = kqview.ray.extract(dataset(), str(tmp_path), actors=1, **OPTIONS)
    assert again is not None
    check(again)
    assert len(list((tmp_path / "index").iterdir())) == n_parts
    with pytest.raises(CorpusError, match="last"):
        kqview.ray.extract(dataset(), str(tmp_path), actors=1, **{**OPTIONS, "last": 2})
    with (
        Engine.demo(n_ctx=256, n_threads=1) as engine,
        pytest.raises(CorpusError, match="another plan"),
    ):
        kqview.extract(RECORDS, str(tmp_path), engine=engine, last=1)


def url_of(kind: str, bucket: str | None, folder: Path) -> str:
    """Where a corpus goes: a folder, the same folder as a URL, or an object store."""
    if kind == "s3" and bucket is None:
        pytest.skip("no s3fs or moto")
    name = folder.name  # one of each test
    return {"folder": str(folder), "local": f"local://{folder}", "s3": f"{bucket}/{name}"}[kind]


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_node_that_dies_in_the_middle_loses_no_document(
    cluster: Any, bucket: str | None, tmp_path: Path, kind: str
):
    from ray._private.state import actors  # the public list of them needs a dashboard

    killed: list[int] = []
    sink = url_of(kind, bucket, tmp_path)

    def kill(n_done: int) -> None:
        """Kill a node on which an actor is at work, but not that of this process."""
        works = {one["Address"]["NodeID"] for one in actors(actor_state_name="ALIVE").values()}
        own = ray.get_runtime_context().get_node_id()
        nodes = [one for one in cluster.worker_nodes if one.node_id in works - {own}]
        if nodes and not killed:
            killed.append(n_done)
            cluster.remove_node(nodes[0], allow_graceful=False)
            cluster.add_node(num_cpus=1)

    corpus = kqview.ray.extract(dataset(), sink, actors=2, progress=kill, **OPTIONS)
    assert corpus is not None
    assert killed[0] < N
    check(corpus)
    check(open_corpus(sink))
    named = set(corpus.index["shard"].to_pylist())
    assert {int(one.split(".")[0]) for one in open_files(sink).names("shards")} == named


def test_driver_that_dies_goes_on_where_it_was(cluster: Any, tmp_path: Path):
    def die(n_done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kqview.ray.extract(dataset(), str(tmp_path), actors=1, progress=die, **OPTIONS)
    n_done = len(open_corpus(str(tmp_path)))
    assert 0 < n_done < N
    left: list[int] = []
    corpus = kqview.ray.extract(dataset(), str(tmp_path), actors=1, progress=left.append, **OPTIONS)
    assert corpus is not None
    assert left[0] > n_done
    check(corpus)


def test_what_fails_and_what_is_twice_is_in_the_corpus(cluster: Any, tmp_path: Path):
    records = [*RECORDS[:4], {"id": "long", "text": "red ball " * 400}, *RECORDS[:2]]
    data = ray.data.from_items(records, override_num_blocks=1)
    corpus = kqview.ray.extract(data, str(tmp_path), actors=1, **{**OPTIONS, "batch": 4})
    assert corpus is not None
    assert corpus.index["status"].to_pylist().count("duplicate") == 2
    assert corpus["long"].status == "error"
    assert corpus["d1"].attention.shape[-2] == 1
    with pytest.raises(CorpusError, match="max_errors is 2"):
        kqview.ray.extract(data, str(tmp_path / "few"), actors=1, max_errors=2, **OPTIONS)


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_url_of_an_object_store(cluster: Any, bucket: str | None, tmp_path: Path, kind: str):
    url = url_of(kind, bucket, tmp_path)
    for actors in ((1, 2), 1):
        corpus = kqview.ray.extract(dataset(), url, actors=actors, **OPTIONS)
        assert corpus is not None
        check(corpus)
    check(open_corpus(url if kind == "s3" else str(tmp_path)))
    with pytest.raises(CorpusError, match="another plan"):
        kqview.ray.extract(dataset(), url, actors=1, **{**OPTIONS, "last": 3})


def mapped_kib(pid: int, path: Path) -> Counter[str]:
    """What Linux says of the pages of a file that a process has mapped, in KiB."""
    found: Counter[str] = Counter()
    is_of_file = False
    for line in Path(f"/proc/{pid}/smaps").read_text("utf-8").splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            is_of_file = line.endswith(f" {path}")
        elif is_of_file and values[-1] == "kB":
            found[name.rstrip(":")] += int(values[0])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted by Linux")
def test_actors_of_a_node_have_the_weights_in_memory_once(cluster: Any, tmp_path: Path):
    model = Path(shutil.copy(MODEL, tmp_path / "model.gguf"))  # that no other process maps
    (tmp_path / "shards").mkdir()
    arguments: dict[str, Any] = {
        "model": str(model), "engine": {"n_ctx": 256, "n_threads": 1, "n_gpu_layers": 0},
        "options": {"last": 1}, "columns": Columns(), "keep": (), "group": 1,
        "sink": str(tmp_path), "done": ray.put(frozenset[str]()),
    }  # fmt: skip

    class Actor:
        def __init__(self, arguments: dict[str, Any]) -> None:
            self.extractor = Extractor(**arguments)

        def extract(self, batch: Any) -> int:
            self.extractor(batch)
            return os.getpid()

    batch = ray.get(dataset(RECORDS[:4]).to_arrow_refs()[0])
    made = [ray.remote(Actor).options(num_cpus=1).remote(arguments) for _ in range(2)]
    pids = ray.get([one.extract.remote(batch) for one in made])
    found = [mapped_kib(pid, model) for pid in pids]
    for one in made:
        ray.kill(one)
    n_kib = model.stat().st_size / 1024
    assert all(one["Rss"] > 0.9 * n_kib for one in found)  # each has read all weights
    assert sum(one["Pss"] for one in found) < 1.1 * n_kib  # the same pages
    assert sum(one["Private_Clean"] + one["Private_Dirty"] for one in found) < 0.1 * n_kib


def test_actor_asks_for_the_memory_of_weights_that_are_packed_for_it():
    n_bytes = MODEL_PATH.stat().st_size
    engine = {"n_ctx": 256, "n_threads": 1}
    mapped, packed = (extraction._memory_bytes(MODEL, engine, n) for n in (0, n_bytes))
    assert packed - mapped >= n_bytes
    _, packed_bytes = extraction._facts(MODEL, engine, {"last": 1}, (), False)
    assert 0 <= packed_bytes < 2**26


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"last": None}, RequestError, "yes=True"),
        ({"fields": ["nothing"]}, RequestError, "nothing"),
        ({"batch": 0}, RequestError, "batch"),
        ({"engine": {"n_threads": 500}}, RequestError, "n_threads"),
        ({"model": "/nowhere.gguf"}, KqviewError, "nowhere"),
    ],
)
def test_bad_options(
    cluster: Any, tmp_path: Path, options: dict[str, Any], error: type[Exception], words: str
):
    with pytest.raises(error, match=words):
        kqview.ray.extract(dataset(), str(tmp_path), actors=1, **{**OPTIONS, **options})


def test_dataset_without_ids_is_refused(cluster: Any, tmp_path: Path):
    with pytest.raises(RequestError, match="no column 'id'"):
        kqview.ray.extract(dataset([{"text": "a"}]), str(tmp_path), **OPTIONS)
