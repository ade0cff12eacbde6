"""Mods that see attention: what they do with rows that are made up for the purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview.errors import InvalidCapture, RequestError
from kqview.mods import ActionBuilder, ContextInfo, EmitError, ForwardPass, Prefilled, mod
from kqview.mods.attention import (
    AlignAtt,
    LookbackGuard,
    ReRead,
    find_text,
    head_rows,
    lookback_ratio,
)
from tests.support.mods import END, Words, drive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

WORDS = Words("a", "b", "c", "d", "x", "y", "z")
SOURCE = "abcd"


def looks_at(*columns: int, n: int, heads: int = 2) -> NDArray[np.float32]:
    """Rows of shape ``(1, heads, n)`` that spread over *columns*."""
    rows = np.zeros((1, heads, n), np.float32)
    rows[..., list(columns)] = 1 / len(columns)
    return rows


# ---- rows


def test_rows_of_every_shape_are_those_of_single_heads():
    full = np.random.default_rng(1).random((3, 2, 5), np.float32)
    flat = full.reshape(6, 5)
    assert np.array_equal(head_rows(full, 5), flat)
    assert np.array_equal(head_rows(tuple(full), 5), flat)
    assert np.array_equal(head_rows(full, 5, layers=[2], heads=[1, 0]), full[2, [1, 0]])
    assert np.array_equal(head_rows(full.mean(axis=1), 5), full.mean(axis=1))
    assert np.array_equal(head_rows(full.mean(axis=(0, 1)), 5), full.mean(axis=(0, 1))[None])
    assert head_rows(full.astype(np.float16), 5).dtype == np.float32


@pytest.mark.parametrize("axes", [(), (1,), (0, 1)])
def test_rows_of_top_k_are_zero_elsewhere(axes: tuple[int, ...]):
    full = np.random.default_rng(1).random((3, 2, 5), np.float32).mean(axis=axes)
    positions = np.argsort(-full, axis=-1)[..., :2].astype(np.int32)
    values = np.take_along_axis(full, positions.astype(np.int64), axis=-1)
    expected = np.zeros_like(full)
    np.put_along_axis(expected, positions.astype(np.int64), values, axis=-1)
    assert np.array_equal(head_rows(values, 5, positions=positions), expected.reshape(-1, 5))


@pytest.mark.parametrize("chosen", [{"layers": [3]}, {"heads": [2]}])
def test_layer_or_head_that_is_not_captured_is_refused(chosen: Any):
    with pytest.raises(InvalidCapture, match="in the capture"):
        head_rows(np.zeros((3, 2, 5), np.float32), 5, **chosen)


@pytest.mark.parametrize("made", [AlignAtt((0, 4)), LookbackGuard((0, 4), 0.5), ReRead((0, 4), 1)])
def test_request_without_attention_ends_with_an_error_that_says_so(made: Any):
    made.begin("r", WORDS.tokenizer())
    event = ForwardPass("r", 1, np.zeros(WORDS.n_vocab, np.float32), 4)
    action = made(event, ActionBuilder(event), WORDS.tokenizer())
    assert isinstance(action, EmitError)
    assert "capture='probs'" in action.err_str


# ---- AlignAtt


def spell(text: str) -> Sequence[str]:
    """Copies the source: after "abcd", writes "abcd" again."""
    return [SOURCE[len(text) - 4]] if len(text) < 8 else [END]


def copies(text: str, n: int) -> NDArray[np.float32]:
    return looks_at(n - 4, n=n)


@pytest.mark.parametrize(("frontier", "text"), [(1, "abc"), (2, "ab"), (4, "")])
def test_text_stops_before_a_token_that_looks_at_the_frontier(frontier: int, text: str):
    aligned = AlignAtt((0, 4), frontier)
    done = drive(aligned, words=WORDS, model=spell, prompt=SOURCE, attention=copies)
    assert (done.text, done.finish_reason, done.mods[0].is_stopped) == (text, "stop", True)
    assert done.mods[0].alignment == list(range(len(text) + 1))


def test_attention_outside_the_source_does_not_stop():
    aligned = AlignAtt((0, 2), 1)
    done = drive(
        aligned,
        words=WORDS,
        model=spell,
        prompt=SOURCE,
        attention=lambda text, n: looks_at(0, n - 1, n=n),
    )
    assert (done.text, done.mods[0].is_stopped) == ("abcd", False)


def test_chosen_heads_decide_alone():
    def rows(text: str, n: int) -> NDArray[np.float32]:
        return np.stack([looks_at(0, n=n)[0, 0], looks_at(3, n=n)[0, 0]])[None]

    for head, text in ((0, "abcd"), (1, "")):
        aligned = AlignAtt((0, 4), heads=[head])
        assert drive(aligned, words=WORDS, model=spell, prompt=SOURCE, attention=rows).text == text


# ---- LookbackGuard


def test_ratio_is_that_of_means_over_tokens():
    rows = np.array([[0.3, 0.3, 0.1, 0.3], [0.0, 0.0, 0.5, 0.5]], np.float32)
    assert lookback_ratio(rows, (0, 2), 3) == pytest.approx((0.3 / 0.6 + 0) / 2)
    assert lookback_ratio(rows, (0, 2), 4) == 1.0


def likes_x(text: str) -> Sequence[str]:
    """Likes "x", which is not in the source, better than "a", which is."""
    return ["x", "a", "b"] if len(text) < 8 else [END]


@pytest.mark.parametrize(
    ("floor", "penalty", "text"), [(0.5, 4.0, "xaaa"), (0.5, 0.1, "xxxx"), (0.0, 4.0, "xxxx")]
)
def test_damped_logits_prefer_the_source(floor: float, penalty: float, text: str):
    guard = LookbackGuard((0, 4), floor, penalty=penalty)
    done = drive(
        guard,
        words=WORDS,
        model=likes_x,
        prompt=SOURCE,
        attention=lambda text, n: looks_at(n - 1, n=n),
    )
    assert done.text == text
    assert done.mods[0].ratios[:3] == [1.0, 0.0, 0.0]
    assert done.mods[0].n_damped == (0 if floor == 0 else 4)


def away_after_x(text: str, n: int) -> NDArray[np.float32]:
    return looks_at(n - 1 if "x" in text else 0, n=n)


def test_window_that_looks_away_is_written_another_way():
    guard = LookbackGuard((0, 4), 0.6, "resample", window=2)
    done = drive(guard, words=WORDS, model=likes_x, prompt=SOURCE, attention=away_after_x)
    # "xx" is taken back, and "ax" looks back enough. Behind it nothing does: "xx" and "ax" are
    # taken back, and the third attempt stays.
    assert done.text == "axbx"
    assert done.mods[0].n_taken_back == 6


def test_place_is_tried_as_often_as_asked_for_and_then_stays():
    guard = LookbackGuard((0, 4), 0.9, "resample", window=2, retries=2)
    done = drive(
        guard,
        words=WORDS,
        model=likes_x,
        prompt=SOURCE,
        attention=lambda text, n: looks_at(n - 1, n=n),
    )
    # The first windows began with x, then a; both were refused, the third stays.
    assert done.text[:1] == "b"
    assert (done.mods[0].n_taken_back, len(done.text)) == (2 * 2 * 2, 4)


# ---- ReRead


def fades(text: str, n: int) -> NDArray[np.float32]:
    """Looks at the last four tokens."""
    return looks_at(*range(max(0, n - 4), n), n=n)


def likes_z(text: str) -> Sequence[str]:
    return ["z"]


def test_instruction_is_written_again_when_attention_has_left_it():
    again = ReRead((0, 2), 0.3, after="", window=2, gap=3, most=2)
    done = drive(again, words=WORDS, model=likes_z, prompt=SOURCE, attention=fades, max_tokens=14)
    # Shares of "ab" are 0.5, 0.25, 0: the mean of the last two is below 0.3 in the third pass.
    assert done.mods[0].shares[:3] == [0.5, 0.25, 0.0]
    assert done.text == "zzabzzzzabzzzz"
    assert done.mods[0].reminded_at == [6, 12]


def test_reminder_of_other_words_counts_as_the_instruction():
    again = ReRead((0, 2), 0.9, reminder="xyz", after="", window=1, gap=1, most=1)
    done = drive(again, words=WORDS, model=likes_z, prompt=SOURCE, attention=fades, max_tokens=6)
    assert done.mods[0].reminded_at == [4]
    assert done.mods[0].shares[1] == pytest.approx(0.75)


def test_reminder_that_another_mod_kept_out_comes_later():
    again = ReRead((0, 2), 0.9, after="", window=1, gap=1, most=1)

    @mod
    def first(event: Any, actions: Any, tokenizer: Any) -> Any:
        answer = again(event, actions, tokenizer)
        if isinstance(event, ForwardPass) and event.step == 1:
            return actions.force_tokens([WORDS.id("y")])
        return answer

    again.begin("r", WORDS.tokenizer())
    done = drive(first, words=WORDS, model=likes_z, prompt=SOURCE, attention=fades, max_tokens=5)
    assert (done.text, again.reminded_at) == ("yabzz", [5])


@pytest.mark.parametrize(
    "make",
    [
        lambda: AlignAtt((3, 3)),
        lambda: AlignAtt(""),
        lambda: AlignAtt(4),  # pyright: ignore[reportArgumentType]
        lambda: AlignAtt((0, 3), 0),
        lambda: LookbackGuard((0, 3), 1.5),
        lambda: LookbackGuard((0, 3), 0.5, "stop"),  # pyright: ignore[reportArgumentType]
        lambda: ReRead((0, 3), 0.5, reminder=""),
        lambda: ReRead((0, 3), -1),
    ],
)
def test_argument_out_of_range_is_refused(make: Any):
    with pytest.raises(RequestError):
        make()


# ---- places


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("ab", (0, 2)),
        ("cd", (2, 4)),
        ("x y", (4, 6)),
        ("d x", (3, 5)),
        (" y", (5, 6)),
        ("no", None),
    ],
)
def test_text_is_found_in_the_tokens_that_hold_it(text: str, span: tuple[int, int] | None):
    words = Words("d", " x", " y")
    ids = words.tokenize("abcd x y", False)
    found = find_text(ids, text, words.pieces.__getitem__)
    assert found == span


def test_source_is_named_by_its_text():
    aligned = AlignAtt("cd", 1)
    done = drive(aligned, words=WORDS, model=spell, prompt=SOURCE, attention=copies)
    assert (done.text, done.mods[0].alignment) == ("abc", [2, 2, 2, 3])


@pytest.mark.parametrize("place", ["not this", (2, 9)])
def test_place_that_is_not_in_the_prompt_ends_the_request_with_an_error(place: Any):
    done = drive(AlignAtt(place), words=WORDS, model=spell, prompt=SOURCE, attention=copies)
    assert (done.text, done.finish_reason) == ("", "error")


def test_reminder_waits_for_the_end_of_a_sentence():
    def model(text: str) -> Sequence[str]:
        return ["."] if text.endswith("zz") else ["z"]

    again = ReRead("ab", 0.9, window=1, gap=100)
    done = drive(again, words=WORDS, model=model, prompt=SOURCE, attention=fades, max_tokens=6)
    assert done.text == "zz.abz"


def test_reminder_leaves_special_tokens_out():
    again = ReRead((0, 3), 0.9, after="", window=1, most=1)
    again.begin("r", WORDS.tokenizer())
    ids = [0, WORDS.id("a"), WORDS.id("b")]
    info = ContextInfo(np.array(ids, np.int32))
    event: Any = Prefilled("r", 0, 8, info)
    again(event, ActionBuilder(event), WORDS.tokenizer())
    logits = np.zeros(WORDS.n_vocab, np.float32)
    event = ForwardPass("r", 1, logits, 4, looks_at(3, n=4))
    action: Any = again(event, ActionBuilder(event), WORDS.tokenizer())
    assert action.tokens == ids[1:]
