"""TextStream: incremental decoding and stop strings, against Python's own decoder and find."""

import pytest
from hypothesis import example, given, strategies as st

from kqview.stop_strings import Mark, TextStream


@st.composite
def split_bytes(draw: st.DrawFn) -> list[bytes]:
    """Bytes that mix valid characters and rubbish, cut anywhere."""
    parts = draw(st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=4).map(_encode))))
    data = b"".join(parts)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "replace")


@given(split_bytes())
@example([b"\xf0\x9f", b"\x98", b"\x80"])
@example([b"\xe2\x82", b"A", b"\xac"])
@example([b"\xf0\x9f\x98"])
def test_text_of_any_split_equals_decoding_at_once(pieces: list[bytes]):
    stream = TextStream()
    output = "".join(stream.feed(piece) for piece in pieces) + stream.flush()
    assert output == b"".join(pieces).decode("utf-8", "replace")
    assert stream.text == output
    assert stream.text_before_stop == output


@given(
    st.lists(st.text("abc€", max_size=3)),
    st.lists(st.text("abc€", min_size=1, max_size=4), max_size=3),
)
def test_stop_is_found_exactly_when_find_finds_one(pieces: list[str], stops: list[str]):
    stream = TextStream(stops)
    text = ""
    for piece in pieces:
        stream.feed(piece.encode())
        text += piece
        starts = {stop: text.find(stop) for stop in stops if stop in text}
        if starts:
            first = min(starts.values())
            longest = max((s for s, start in starts.items() if start == first), key=len)
            assert stream.stop_match == longest
            assert stream.text_before_stop == text[:first]
            break
        assert stream.stop_match is None
        assert stream.text_before_stop == text


def test_feed_holds_back_an_unfinished_character_only():
    stream = TextStream()
    assert stream.feed(b"a\xe2") == "a"
    assert stream.feed(b"\x82") == ""
    assert stream.feed(b"\xacb") == "€b"


def test_flush_turns_an_unfinished_character_into_a_replacement():
    stream = TextStream(["\ufffd"])
    assert stream.feed(b"ok\xf0\x9f") == "ok"
    assert stream.flush() == "\ufffd"
    assert stream.stop_match == "\ufffd"
    assert stream.text_before_stop == "ok"


def test_stop_across_tokens_leaves_the_returned_text_whole():
    stream = TextStream(["STOP"])
    assert [stream.feed(piece) for piece in (b"go S", b"TO", b"P and on")] == [
        "go S",
        "TO",
        "P and on",
    ]
    assert stream.stop_match == "STOP"
    assert stream.text == "go STOP and on"
    assert stream.text_before_stop == "go "


def test_stop_match_stays_after_more_text():
    stream = TextStream(["b", "a"])
    stream.feed(b"xb")
    stream.feed(b"a")
    assert stream.stop_match == "b"
    assert stream.text_before_stop == "x"


@pytest.mark.parametrize("stops", [["ab", "abc"], ["abc", "ab"]])
def test_longest_of_two_stops_at_one_place_wins(stops: list[str]):
    stream = TextStream(stops)
    stream.feed(b"xabcd")
    assert stream.stop_match == "abc"


def test_text_looked_at_again_stays_bounded_by_the_longest_stop():
    stream = TextStream(["x" * 10])
    for _ in range(1000):
        stream.feed(b"some words ")
    assert len(stream._tail) == 9
    assert len(stream.text) == 11_000


def safe(stream: TextStream, stops: list[str], *, is_over: bool) -> int:
    """How many characters may be shown, found by trying every place."""
    whole, text = stream.text, stream.text_before_stop
    if is_over or stream.stop_match is not None:
        return len(text)
    places = (i for i in range(len(whole)) for stop in stops if stop.startswith(whole[i:]))
    return next(places, len(whole))


@given(
    st.data(),
    st.lists(st.text("abc€", min_size=1, max_size=4), max_size=3),
    st.text("abc€", max_size=20),
)
def test_deltas_are_all_of_the_text_that_is_safe_and_nothing_else(
    data: st.DataObject, stops: list[str], text: str
):
    stream, shown = TextStream(stops), ""
    encoded = text.encode()
    while encoded and stream.stop_match is None:
        n = data.draw(st.integers(1, 6))
        stream.feed(encoded[:n])
        encoded = encoded[n:]
        if data.draw(st.booleans()):  # not every token is followed by a delta
            shown += stream.take_delta(is_over=False)
            assert shown == stream.text[: safe(stream, stops, is_over=False)]
    stream.flush()
    assert shown + stream.take_delta(is_over=True) == stream.text_before_stop
    assert stream.take_delta(is_over=True) == ""


@given(
    st.data(),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=12),
)
def test_deltas_go_on_behind_what_was_shown_after_a_reset(
    data: st.DataObject, stops: list[str], pieces: list[str]
):
    stream, marks, n_shown = TextStream(stops), list[Mark](), 0
    for piece in pieces:
        marks.append(stream.mark())
        stream.feed(piece.encode())
        if stream.stop_match is not None:
            break
        if data.draw(st.booleans()):
            n_kept = data.draw(st.integers(0, len(marks) - 1))
            stream.reset(marks[n_kept])
            del marks[n_kept:]
            n_shown = min(n_shown, len(stream.text))
        n_safe = safe(stream, stops, is_over=False)
        assert stream.take_delta(is_over=False) == stream.text[n_shown:n_safe]
        n_shown = max(n_shown, n_safe)


def test_empty_stop_strings_are_ignored():
    stream = TextStream([""])
    stream.feed(b"abc")
    assert stream.stop_match is None


@given(st.data(), split_bytes(), st.lists(st.text("abc€", min_size=1, max_size=3), max_size=2))
def test_reset_stream_goes_on_as_if_the_rest_had_never_come(
    data: st.DataObject, pieces: list[bytes], stops: list[str]
):
    stream, fresh = TextStream(stops), TextStream(stops)
    kept: list[bytes] = []
    marks = [stream.mark()]
    for piece in pieces:
        stream.feed(piece)
        if stream.stop_match is not None:
            break
        kept.append(piece)
        marks.append(stream.mark())
    n_kept = data.draw(st.integers(0, len(kept)))
    stream.reset(marks[n_kept])
    rest = data.draw(split_bytes())
    branch = stream.branch(marks[n_kept])
    ahead = "".join(branch.feed(piece) for piece in rest)
    for piece in [*kept[:n_kept], *rest]:
        fresh.feed(piece)
    n_before = len(stream.text)
    texts = [stream.feed(piece) for piece in rest]
    assert stream.text == fresh.text
    assert stream.text_before_stop == fresh.text_before_stop
    assert stream.stop_match == fresh.stop_match == branch.stop_match
    assert stream.text[n_before:] == "".join(texts) == ahead
    assert stream.flush() == fresh.flush()
