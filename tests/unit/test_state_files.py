"""State files without an engine: their blob, trailer and checks, and fingerprints of models."""

from __future__ import annotations

import json
import os
import stat
import struct
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kqview import errors
from kqview.state import (
    files,
    fingerprint,
    inspect,
    read_state,
    write_state,
)
from kqview.state.files import SlotMarks, StateFacts
from kqview.state.fingerprint import ModelFiles
from tests.support import ses1
from tests.support.sessions import BLOB, FACTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def test_file_is_the_blob_and_a_trailer_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "slot.ses1"
    n_bytes = write_state(path, BLOB, FACTS)
    data = path.read_bytes()
    assert len(data) == n_bytes
    assert data.startswith(BLOB)
    assert data.endswith(b"KQVIEW01")
    (n_text,) = struct.unpack("<I", data[-12:-8])
    text = json.loads(data[-12 - n_text : -12])
    assert (text["model"], text["kv_type"]) == ("model", "f16")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["slot.ses1"]
    assert read_state(path, FACTS) == read_state(path) == BLOB


def test_file_without_a_trailer_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "slot.ses1"
    assert write_state(path, BLOB) == len(BLOB)
    assert path.read_bytes() == read_state(path, FACTS) == BLOB


def test_any_changed_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "slot.ses1"
    write_state(path, BLOB, FACTS, SlotMarks(n_exact=12))
    data = path.read_bytes()
    for at in range(len(data) - 8):  # without the mark at the end it is a file without a trailer
        changed = bytearray(data)
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(errors.StateError):
            read_state(path, FACTS)


CHECKPOINTS = b"SCP1" + struct.pack("<IIQ", 1, 3, 5) + b"bytes"


def test_file_has_checkpoints_between_blob_and_json(tmp_path: Path) -> None:
    path = tmp_path / "slot.ses1"
    marks = SlotMarks(n_exact=3, checkpoints=CHECKPOINTS)
    n_bytes = write_state(path, BLOB, FACTS, marks)
    data = path.read_bytes()
    assert data.startswith(BLOB + CHECKPOINTS + b"{")
    assert files.read_marked(path, FACTS) == (BLOB, marks)
    assert (len(data), files.slot_bytes(path)) == (n_bytes, len(BLOB) + len(CHECKPOINTS))
    for at in range(len(data) - 8):
        changed = bytearray(data)
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(errors.StateError):
            read_state(path, FACTS)
    path.write_bytes(data[:-3])  # raw, without a trailer
    assert files.read_marked(path, FACTS)[1] == files.NO_MARKS


def test_files_that_were_altered_at_random_are_refused(tmp_path: Path) -> None:
    data = (
        BLOB + CHECKPOINTS + files.make_trailer(BLOB, FACTS, SlotMarks(3, checkpoints=CHECKPOINTS))
    )
    random = Random(1)
    for _ in range(20_000):
        changed = bytearray(data)
        at = random.randrange(len(data) - 8)  # the mark at the end stays
        match random.randrange(4):
            case 0:
                changed[at] ^= 1 << random.randrange(8)
            case 1:
                del changed[at]
            case 2:
                changed[at:at] = random.randbytes(random.randint(1, 9))
            case _:
                struct.pack_into("<I", changed, len(data) - 12, random.randrange(2**32))
        if changed == data:
            continue
        with pytest.raises(errors.StateFormatError):
            files.check_trailer(*files.split(bytes(changed)), FACTS)


@pytest.mark.parametrize("n_bytes", [-1, True, 1.5, "5", 2**64])
def test_size_of_checkpoints_that_is_none_is_refused(tmp_path: Path, n_bytes: object) -> None:
    content = {"version": 3, "model": "model", "kv_type": "f16", "checkpoint_bytes": n_bytes}
    path = tmp_path / "slot"
    path.write_bytes(BLOB + trailer_of({**content, "sha256": "0" * 64}))
    with pytest.raises(errors.StateFormatError, match=r"checksum|the trailer claims"):
        read_state(path)


@pytest.mark.parametrize(
    "data", [b"SCP", CHECKPOINTS[:-1], CHECKPOINTS + b"\0", b"X" + CHECKPOINTS[1:], CHECKPOINTS[:9]]
)
def test_checkpoints_without_their_structure_are_found_by_a_check(
    tmp_path: Path, data: bytes
) -> None:
    path = tmp_path / "slot"
    for given, is_sound in ((CHECKPOINTS, True), (data, False)):
        write_state(path, made().encode(), FACTS, SlotMarks(checkpoints=given))
        report = files.check_file(path)
        assert bool(report.problems) is not is_sound
        assert (report.trailer is not None) is is_sound


@pytest.mark.parametrize("facts", [StateFacts("other", "f16"), StateFacts("model", "f32")])
def test_file_of_another_model_or_type_is_a_mismatch(tmp_path: Path, facts: StateFacts) -> None:
    write_state(tmp_path / "slot", BLOB, FACTS)
    with pytest.raises(errors.StateMismatch, match=r"another model|kv_type='f16'"):
        read_state(tmp_path / "slot", facts)


def trailer_of(content: dict[str, object]) -> bytes:
    text = json.dumps(content, separators=(",", ":")).encode()
    return text + struct.pack("<I", len(text)) + b"KQVIEW01"


@pytest.mark.parametrize("n_exact", [-1, True, 1.5, "1"])
def test_mark_that_is_no_count_is_refused(tmp_path: Path, n_exact: object) -> None:
    path = tmp_path / "slot"
    write_state(path, BLOB, FACTS, SlotMarks(n_exact=n_exact))  # type: ignore[arg-type]
    with pytest.raises(errors.StateFormatError, match="n_exact"):
        read_state(path)


@pytest.mark.parametrize(
    "content", [[], 1, None, {"version": 2, "x": []}, {"version": 2, "x": {}}, {"version": 1}, {}]
)
def test_trailer_of_another_kind_is_refused(tmp_path: Path, content: object) -> None:
    path = tmp_path / "slot"
    path.write_bytes(BLOB + trailer_of(content))  # type: ignore[arg-type]
    with pytest.raises(errors.StateFormatError, match="trailer"):
        read_state(path)


def test_what_is_no_blob_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.StateFormatError, match="SES1"):
        write_state(tmp_path / "slot", b"GGSQ")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(errors.StateFormatError, match="regular file"):
        read_state(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such file"):
        read_state(tmp_path / "missing")


# ---- what a blob says of itself


def made(
    dtype: str = "<f2", *, is_transposed: bool = False, n_values: int = 2, n: int = 5
) -> ses1.Blob:
    rng = np.random.default_rng(0)

    def rows() -> ses1.Rows:
        return ses1.Rows(rng.normal(size=(n, 6)).astype(dtype))

    return ses1.Blob(
        tokens=list(range(7, 7 + n)),
        keys=[rows(), rows()],
        values=[rows() for _ in range(n_values)],
        is_transposed=is_transposed,
        positions=list(range(n)),
    )


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", ["<f2", "<f4"])
@pytest.mark.parametrize("n_values", [2, 0])
def test_blob_says_what_it_is(dtype: str, is_transposed: bool, n_values: int) -> None:
    blob = made(dtype, is_transposed=is_transposed, n_values=n_values).encode()
    state = inspect(blob)
    assert state.tokens == (7, 8, 9, 10, 11)
    assert (state.n_tokens, state.n_layer, state.n_stream) == (5, 2, 1)
    assert state.kv_type == {"<f2": "f16", "<f4": "f32"}[dtype]
    assert state.flash_attn is not is_transposed
    assert (state.n_bytes, state.kv_bytes) == (len(blob), len(blob) - 28)


def test_cells_with_extras_and_other_streams_are_found() -> None:
    blob = made()
    blob.n_stream, blob.i_stream = 4, 2
    encoded = blob.encode()
    assert inspect(encoded).n_stream == 4
    plain = made(n=3).encode()
    at = ses1.offsets(plain)["position"]
    cells = b"".join(struct.pack("<iIiiii", i, 1, i, i, 7 + i, 0) for i in range(3))
    assert inspect(plain[:at] + cells + plain[at + 36 :]).n_layer == 2


def test_empty_slot_has_no_layers() -> None:
    blob = ses1.Blob([], [], [], False).encode()
    state = inspect(blob)
    assert (state.tokens, state.n_layer, state.kv_type, state.flash_attn) == ((), 0, "", None)


def test_every_shorter_blob_is_refused() -> None:
    for blob in (made().encode(), made(is_transposed=True).encode()):
        # Between the layers of V it looks like one of a model that keeps fewer of them.
        first = ses1.offsets(blob)["v_type"]
        ends = {first, first + (len(blob) - first) // 2}
        for n in sorted(set(range(len(blob))) - ends):
            with pytest.raises(errors.StateFormatError, match=r"byte|SES1"):
                inspect(blob[:n])
        with pytest.raises(errors.StateFormatError, match=r"byte|SES1"):
            inspect(blob + b"\0")


@pytest.mark.parametrize(
    ("field", "form", "value"),
    [
        ("magic", "<I", 0),
        ("n_tokens", "<I", 2**32 - 1),
        ("kv_magic", "<I", 1),
        ("n_stream", "<I", 2**32 - 1),
        ("n_cells", "<I", 2**32 - 1),
        ("n_layer", "<I", 2**32 - 1),
        ("v_trans", "<I", 7),
        ("k_type", "<i", 5),
        ("k_row_bytes", "<Q", 0),
        ("k_row_bytes", "<Q", 2**64 - 1),
    ],
)
def test_field_out_of_range_is_refused(field: str, form: str, value: int) -> None:
    blob = made().encode()
    changed = bytearray(blob)
    struct.pack_into(form, changed, ses1.offsets(blob)[field], value)
    with pytest.raises(errors.StateFormatError):
        inspect(bytes(changed))


# ---- fingerprints of models


def of(path: Path, adapters: Sequence[tuple[str, float]] = ()) -> str:
    return ModelFiles(str(path), adapters).fingerprint()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(fingerprint, "CHUNK_BYTES", 1000)
    return 1000


def age(path: Path) -> None:
    """Let nothing about *path* look as if it were still being written."""
    os.utime(path, ns=(10**18, 10**18))


def test_every_byte_counts(tmp_path: Path, small_chunks: int) -> None:
    path = tmp_path / "model"
    n = 3 * small_chunks + 1
    path.write_bytes(bytes(n))
    seen = {of(path)}
    places = (0, 1, 999, 1000, 1001, 1999, 2000, 2999, 3000)
    for at in places:
        data = bytearray(n)
        data[at] = 1
        path.write_bytes(data)
        seen.add(of(path))
    for n_other in (0, n - 1, n + 1):
        path.write_bytes(bytes(n_other))
        seen.add(of(path))
    assert len(seen) == 1 + len(places) + 3


def test_adapters_scales_and_their_order_count(tmp_path: Path) -> None:
    model, a, b = (tmp_path / name for name in "mab")
    for path in (model, a, b):
        path.write_bytes(path.name.encode())
    adapters: list[list[tuple[str, float]]] = [
        [],
        [(str(a), 1.0)],
        [(str(a), 0.5)],
        [(str(b), 1.0)],
        [(str(a), 1.0), (str(b), 1.0)],
        [(str(b), 1.0), (str(a), 1.0)],
    ]
    assert len({of(model, pairs) for pairs in adapters}) == len(adapters)


def test_every_part_of_a_split_model_counts(tmp_path: Path) -> None:
    parts = [tmp_path / f"x-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts:
        part.write_bytes(b"weights")
    seen = {of(parts[0])}
    for part in parts:
        part.write_bytes(b"WEIGHTS")
        seen.add(of(parts[0]))
    assert len(seen) == 4
    # What only looks like one is a file by itself.
    alone = tmp_path / "y-00001-of-00002.gguf"
    alone.write_bytes(b"weights")
    assert of(alone) not in seen


def test_unchanged_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_chunks: int
) -> None:
    path, link = tmp_path / "model", tmp_path / "link"
    path.write_bytes(bytes(5 * small_chunks))
    link.hardlink_to(path)
    monkeypatch.setattr(fingerprint, "_CLOCK_STEP_NS", -(10**18))  # as if it were written long ago
    n_read: list[int] = []
    real = os.pread
    monkeypatch.setattr(fingerprint.os, "pread", lambda *args: (n_read.append(1), real(*args))[1])
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(of, (path, link, path)))
    assert len(n_read) == 5
    age(path)  # another time of change, so perhaps another content
    of(path)
    assert len(n_read) == 10


def test_file_that_was_just_written_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two changes within one step of the file system's clock would look like one file.
    path = tmp_path / "model"
    path.write_bytes(b"a")
    status = path.stat()
    first = of(path)
    path.write_bytes(b"b")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    monkeypatch.setattr(
        fingerprint.FileIdentity, "of", lambda _: fingerprint.FileIdentity(*[1] * 5)
    )
    assert of(path) != first


def test_file_replaced_since_it_was_opened_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"first")
    files = ModelFiles(str(path), [])
    (tmp_path / "other").write_bytes(b"other")
    os.replace(tmp_path / "other", path)
    with pytest.raises(errors.StateError, match="open the engine again"):
        files.fingerprint()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        files.fingerprint()


def test_new_link_or_rights_of_the_file_are_no_change(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"first")
    files = ModelFiles(str(path), [])
    expected = files.fingerprint()
    path.chmod(0o600)
    (tmp_path / "link").hardlink_to(path)
    assert files.fingerprint() == expected


def test_file_that_shrinks_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_chunks: int
) -> None:
    path = tmp_path / "model"
    path.write_bytes(bytes(4 * small_chunks))
    real = os.pread

    def cut_first(*args: int) -> bytes:
        os.truncate(path, 10)
        return real(*args)

    monkeypatch.setattr(fingerprint.os, "pread", cut_first)
    with pytest.raises(errors.StateError, match="try again"):
        of(path)


def test_relative_paths_are_those_of_the_moment_of_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").write_bytes(b"weights")
    (tmp_path / "lora").write_bytes(b"adapter")
    monkeypatch.chdir(tmp_path)
    files = ModelFiles("model", [("lora", 0.5)])
    monkeypatch.chdir("/")
    adapters = [(str(tmp_path / "lora"), 0.5)]
    assert files.fingerprint() == of(tmp_path / "model", adapters)
