"""The tap: names in llama.cpp's graph that it relies on, and the whole range of its row kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from kqview import Capture
from tests.support import tiny_gguf
from tests.support.rows import KINDS, Kind, forward, largest_error, near, random_ids, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engine.conftest import MakeEngine


# ---- names in llama.cpp's graph
#
# They are no interface of llama.cpp: a new version may rename or fold them (`kqv_out-<il>`,
# `kq_soft_max-<il>`), and then layers vanish from `attention_layers`. See vendor/README.md.


@pytest.fixture(params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"tiny_{request.param}")


@pytest.mark.parametrize("flash_attn", [False, True, "auto"])
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_every_layer_is_found_with_its_heads_and_scale(
    make_engine: MakeEngine, model: Path, flash_attn: bool | str, kv_type: str
) -> None:
    found = make_engine(model, flash_attn=flash_attn, kv_type=kv_type).model
    assert found.attention_layers == (0, 1, 2)
    assert found.n_layer == 3
    assert (found.n_head, found.n_head_kv) == (4, 2)
    assert found.attention_scale == pytest.approx(16**-0.5)


@pytest.mark.needs("host layers")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_capture_adds_one_node_a_layer(
    make_engine: MakeEngine, model: Path, kind: Kind, flash_attn: bool, n_tokens: int
) -> None:
    # One token: the prefill's graph. Three: the graph of a single token.
    engine = make_engine(model, flash_attn=flash_attn, attention_kernel="llama.cpp")
    run(engine, random_ids(9), n_tokens, capture=kind)
    assert engine.stats().graph_nodes_added == 3


# ---- the row kernel: head sizes, heads per KV head, column counts, cache types
#
# With flash attention on the rows come from our kernel; of a model with one layer they depend on
# nothing that flash attention rounds, so they are held to the tight tolerance. A text that grows
# from one token to past 256 has every column count in it, those around vector and padding edges
# included.


def write_one_layer(path: Path, n_head: int, n_head_kv: int, head_size: int) -> Path:
    return tiny_gguf.write_model(
        path, arch="llama", n_layer=1, n_head=n_head, n_head_kv=n_head_kv,
        n_embd=n_head * head_size, n_ff=32, rms_eps=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "head_size"),
    [
        (1, 1, 8), (3, 1, 10), (4, 4, 16), (5, 1, 64), (6, 2, 20), (8, 1, 32), (7, 7, 2),
        (12, 4, 96), (4, 2, 128), (9, 1, 34),
    ],
)  # fmt: skip
def test_rows_equal_reference_for_every_head_shape(
    make_engine: MakeEngine,
    tmp_path: Path,
    n_head: int,
    n_head_kv: int,
    head_size: int,
    record_property: Callable[[str, object], None],
) -> None:
    model = write_one_layer(tmp_path / "one.gguf", n_head, n_head_kv, head_size)
    engine = make_engine(model, kv_type="f32", flash_attn=True)
    for kind in KINDS:
        tokens = run(engine, [65], 270, capture=kind)
        error = largest_error(tokens, forward(model, [65], tokens), kind, [65])
        record_property(f"largest_error_{kind}", error)
        assert error <= near(1e-5, "values")


@pytest.mark.parametrize(
    ("kv_type", "limit"),
    [("f16", 2e-3), ("bf16", 1e-2), ("q8_0", 2e-2), ("q5_1", 0.2), ("q4_0", 0.35)],
)
def test_rows_of_rounded_caches_are_near_the_reference(
    make_engine: MakeEngine,
    tmp_path: Path,
    kv_type: str,
    limit: float,
    record_property: Callable[[str, object], None],
) -> None:
    model = write_one_layer(tmp_path / "one.gguf", 6, 2, 64)
    engine = make_engine(model, kv_type=kv_type, flash_attn=True)
    prompt = random_ids(5)
    tokens = run(engine, prompt, 100, capture="logits")
    known: Literal["f16", "f32"] = "f16" if kv_type == "f16" else "f32"
    error = largest_error(tokens, forward(model, prompt, tokens, kv_type=known), "logits", prompt)
    record_property("largest_error", error)
    assert error <= near(limit, "values")


@pytest.mark.parametrize("n_threads", [2, 3])
@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_do_not_depend_on_the_number_of_threads(
    make_engine: MakeEngine, tmp_path: Path, n_threads: int, flash_attn: bool, dtype: str
) -> None:
    # 5 heads on 1 KV head: shares of the threads cut through the runs of 4 heads.
    model = write_one_layer(tmp_path / "one.gguf", 5, 1, 32)
    capture = Capture("probs", dtype=dtype)  # pyright: ignore[reportArgumentType]
    one, more = (
        run(
            make_engine(model, kv_type="f32", flash_attn=flash_attn, n_threads=n),
            random_ids(30), 4, capture=capture,
        )
        for n in (1, n_threads)
    )  # fmt: skip
    for a, b in zip(one, more, strict=True):
        np.testing.assert_allclose(
            np.asarray(a.attention, np.float32),
            np.asarray(b.attention, np.float32),
            rtol=1e-3 if dtype == "float16" else 3e-5,
            atol=1e-6,
        )


# ---- float16: values beyond its range become its largest ones, and -inf is masked, nothing else

LARGEST = 65504.0
CAPTURES: list[dict[str, Any]] = [
    {},
    {"layers": [1], "heads": [2, 0]},
    {"reduce": "mean_heads"},
    {"reduce": "max_heads"},
    {"reduce": "mean"},
    {"top_k": 5},
    {"reduce": "max_heads", "top_k": 3},
]


@pytest.fixture(scope="module")
def large_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Products of K and Q far beyond float16, both ways."""
    path = tmp_path_factory.mktemp("model") / "large.gguf"
    return tiny_gguf.write_preset(path, "tiny_llama", score_spread=4e5)


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("kind", ["logits", "scores"])
@pytest.mark.parametrize("options", CAPTURES, ids=str)
def test_rows_beyond_float16_saturate_and_masked_columns_stay_so(
    make_engine: MakeEngine, large_llama: Path, kind: Any, flash_attn: bool, options: dict[str, Any]
) -> None:
    engine = make_engine(large_llama, flash_attn=flash_attn, kv_type="f32")
    prompt = random_ids(30)
    rows = {
        dtype: np.asarray(engine.attend(prompt, Capture(kind, dtype=dtype, **options)).array())
        for dtype in ("float32", "float16")
    }
    whole, half = rows["float32"], rows["float16"]
    assert half.dtype == np.float16
    masked = np.isneginf(whole)
    assert np.isfinite(whole[~masked]).all()
    assert np.abs(whole[~masked]).max() > 2 * LARGEST
    np.testing.assert_array_equal(np.isneginf(half), masked)
    want = np.clip(whole, -LARGEST, LARGEST, where=~masked, out=whole.copy())
    np.testing.assert_allclose(half, want, rtol=2e-3, atol=1e-2)
    (token,) = engine.generate(prompt, max_tokens=1, capture=Capture(kind, dtype="float16"))
    assert np.isfinite(np.asarray(token.attention)).all()


def test_server_saturates_what_it_averages_itself() -> None:
    pytest.importorskip("starlette")
    from kqview.server.api.wire.attention import dense
    from kqview.server.models.run import AttentionWanted

    wanted = AttentionWanted("logits", "aggregated", aggregation="weighted_layers", dtype="float16")
    rows = np.array([[1e5, -1e6, -np.inf, 3.0]] * 2, np.float32)
    values, _ = dense(wanted, rows)
    np.testing.assert_array_equal(values, np.array([LARGEST, -LARGEST, -np.inf, 3.0], np.float16))
