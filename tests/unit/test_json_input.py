"""JSON from outside: what is nested too deeply is refused before it is decoded."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kqview import _core
from kqview.json_input import DEPTH_MAX, TooDeep, check_depth, loads

VALUES = st.recursive(
    st.text('[{"\\\\,:}]a', max_size=5) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[{"a'), inner, max_size=3),
)


def depth_of(value: object) -> int:
    inner = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    )
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


@given(VALUES)
def test_native_count_has_the_depth_of_the_value(value: object) -> None:
    msgspec = pytest.importorskip("msgspec")
    assert _core.count_values(json.dumps(value).encode(), False).depth == depth_of(value)
    assert _core.count_values(msgspec.msgpack.encode(value), True).depth == depth_of(value)


@given(VALUES, st.integers(0, 2 * DEPTH_MAX))
def test_text_that_is_deeper_than_the_limit_is_refused(value: object, n: int) -> None:
    for _ in range(n):
        value = [value]
    text = json.dumps(value)
    if depth_of(value) <= DEPTH_MAX:
        assert loads(text) == loads(text.encode("utf-16")) == value
        return
    with pytest.raises(TooDeep, match=f"{depth_of(value)} deep, the limit is {DEPTH_MAX}"):
        loads(text)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, "[" * 129])
def test_depth_needs_no_valid_json(text: str) -> None:
    with pytest.raises(TooDeep):
        check_depth(text)


@pytest.mark.parametrize("text", ["[]" * 5000, "[[]," * 20 + '"' + "[" * 5000, "]" * 500 + "[1]"])
def test_brackets_that_are_not_nested_pass(text: str) -> None:
    check_depth(text)
