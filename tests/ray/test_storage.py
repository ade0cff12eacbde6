"""A corpus in an object store: in memory, and behind the protocol of S3 where moto serves it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview.corpora.writer import PartRow, packed, shard_name
from kqview.errors import CorpusError

if TYPE_CHECKING:
    from collections.abc import Iterator

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

from kqview.ray.storage import open_storage, write_shard  # noqa: E402

# What servers and clients of S3 deprecate, and leave to the end.
pytestmark = pytest.mark.filterwarnings("ignore")
ABOUT: dict[str, Any] = {"model": {"name": "m"}, "plan": {"fields": ["hidden"], "compress": True}}


@pytest.fixture(params=["memory", "s3"])
def sink(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a corpus that is not there yet."""
    if request.param == "memory":
        yield f"memory://corpora/{os.urandom(4).hex()}"
        return
    client = pytest.importorskip("s3fs").S3FileSystem
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = f"corpora-{os.urandom(4).hex()}"
    client.clear_instance_cache()  # of another server
    client().mkdir(bucket)
    try:
        yield f"s3://{bucket}/stories"
    finally:
        server.stop()


def piece(first: int, shard: int) -> tuple[bytes, Any]:
    """A shard of three documents, and the rows of its index."""
    rows = [PartRow(n=i, id=f"d{i}", ids=[i, i + 1]) for i in range(first, first + 3)]
    arrays = [{"hidden": np.full((2, 4), row.n, np.float32)} for row in rows]
    return packed(rows, arrays, shard, compress=True)


def test_pieces_are_found_again_and_others_removed(sink: str):
    for first, shard in ((0, 71), (3, 5)):
        with open_storage(sink, ABOUT) as storage:
            assert (storage.n_done, storage.ids()) == (first, {f"d{i}" for i in range(first)})
            data, table = piece(first, shard)
            write_shard(sink, shard_name(shard, compress=True), data)
            write_shard(sink, shard_name(shard + 1, compress=True), b"of a node that died")
            storage.add_piece(table, 3)
    with open_storage(sink, ABOUT) as storage:
        storage.remove_unnamed()
        assert storage.n_done == 6
    files, root = fsspec.core.url_to_fs(sink)
    files.invalidate_cache()
    assert sorted(name.rsplit("/", 1)[1] for name in files.ls(f"{root}/shards", detail=False)) == [
        "00005.safetensors.zst",
        "00071.safetensors.zst",
    ]
    assert files.cat_file(f"{root}/shards/00005.safetensors.zst") == piece(3, 5)[0]


def test_another_plan_is_refused(sink: str):
    with open_storage(sink, ABOUT):
        pass
    other = {**ABOUT, "plan": {**ABOUT["plan"], "fields": ["scores"]}}
    with pytest.raises(CorpusError, match="another plan"), open_storage(sink, other):
        pass
