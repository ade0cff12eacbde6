"""JSON from outside: what is nested too deeply is refused before it is decoded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

import kqview
from kqview import _core
from kqview.chat.json_text import literal
from kqview.chat.tool_format import parse_tool_calls
from kqview.chat.turn import checked_messages, checked_tools
from kqview.errors import InvalidActionError, InvalidSampling, RequestError, StateFormatError
from kqview.ingest.payload import Posted
from kqview.json_input import DEPTH_MAX, TooDeep, check_depth, check_value, loads
from kqview.mods.actions import ToolCalls
from kqview.server.api.koboldai.stream import message_of
from kqview.server.errors import Unprocessable
from kqview.server.web.endpoint import decoded
from kqview.types.closed_schema import held
from kqview.types.json_schema import schema_text

if TYPE_CHECKING:
    from collections.abc import Callable

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


def lists(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


@given(VALUES, st.integers(0, 2 * DEPTH_MAX))
def test_value_that_is_deeper_than_the_limit_is_refused(value: object, n: int) -> None:
    for i in range(n):
        value = {"a": value} if i % 2 else (value,)
    if depth_of(json.loads(json.dumps(value))) <= DEPTH_MAX:
        check_value(value)
        return
    with pytest.raises(TooDeep, match=f" deep, the limit is {DEPTH_MAX}"):
        check_value(value)


def test_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value += [value, {"a": value}] * 10
    with pytest.raises(TooDeep):
        check_value(value)


def text_of(depth: int, around: str = "%s") -> str:
    return around % ("[" * depth + "]" * depth)


def _saved(folder: Path, text: str) -> None:
    np.savez(folder / "a.npz", kqview=np.array(text))
    kqview.load(folder / "a.npz")


# Takes a list nested *depth* deep as what it reads from outside -> the error that refuses it.
READERS: dict[str, tuple[type[Exception], Callable[[int, Path], object]]] = {
    "schema": (
        InvalidSampling,
        lambda depth, _: held(text_of(depth - 1, '{"enum": %s}')),
    ),
    "mapping as schema": (
        InvalidSampling, lambda depth, _: held(schema_text({"enum": lists(depth - 1)})),
    ),
    "message": (
        RequestError,
        lambda depth, _: checked_messages([{"role": "user", "content": "", "a": lists(depth - 1)}]),
    ),
    "arguments": (
        RequestError,
        lambda depth, _: checked_messages([
            {"role": "assistant", "tool_calls": [
                {"name": "f", "arguments": text_of(depth - 1, '{"a": %s}')},
            ]},
        ]),
    ),
    "tool": (
        RequestError,
        lambda depth, _: checked_tools([{"name": "f", "parameters": {"a": lists(depth - 2)}}]),
    ),
    "mod's answer": (InvalidActionError, lambda depth, _: ToolCalls(lists(depth))),
    "posted trace": (RequestError, lambda depth, _: Posted(text_of(depth).encode())),
    "saved generation": (StateFormatError, lambda depth, folder: _saved(folder, text_of(depth))),
    "body": (RequestError, lambda depth, _: decoded(msgspec.json.Decoder(), text_of(depth))),
    "frame": (RequestError, lambda depth, _: message_of(text_of(depth), packs=False)),
    # A list of one element, in MessagePack.
    "packed frame": (
        RequestError, lambda depth, _: message_of(b"\x91" * (depth - 1) + b"\x90", packs=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_every_reader_has_the_same_limit(name: str, tmp_path: Path) -> None:
    kind, read = READERS[name]
    for depth in (DEPTH_MAX + 1, 100_000):
        with pytest.raises(kind, match=f"deep, the limit is {DEPTH_MAX}"):
            read(depth, tmp_path)
    wrong = ""
    try:
        read(DEPTH_MAX, tmp_path)
    except (kind, Unprocessable) as error:  # a list of lists may be no trace
        wrong = str(error)
    assert "deep" not in wrong


@pytest.mark.parametrize("depth", [DEPTH_MAX + 1, 5000, 100_000])
def test_what_a_model_nests_too_deeply_is_text(depth: int) -> None:
    deep = "[" * depth + "]" * depth
    assert json.loads(literal(deep)) == deep
    answer = f'<tool_call>{{"arguments": {{"a": {deep}}}, "name": "f"}}</tool_call>'
    assert parse_tool_calls(answer).tool_calls == ()


CHECKED = {
    "json_input.py": "checks",
    "chat/json_text.py": "its callers check",
    "chat/functions.py": "reads what schema_text made",
    "chat/template.py": "reads its own definition",
    "confined.py": "reads what its child wrote",
    "confined_child.py": "reads what its owner wrote",
    "server/config_file.py": "checks",
    "server/web/endpoint.py": "checks",
    "server/web/lenient.py": "its callers check",
    "server/web/openapi.py": "reads texts of this package",
    "server/web/supervisor.py": "reads what its workers wrote",
    "server/api/anthropic/events.py": "reads what json_text made",
    "server/api/koboldai/stream.py": "checks",
    "server/api/llama_server/blobs.py": "decodes by endpoint.decoded",
    "server/api/llama_server/events.py": "reads the reply that it has just written",
    "corpora/writer.py": "reads what it has just made",
    "ingest/payload.py": "checks",
    "ingest/store.py": "reads what it wrote",
}
"""Files that decode JSON or TOML without `json_input.loads`, and why they may."""


def test_nothing_from_outside_is_decoded_unchecked() -> None:
    source = Path(kqview.__file__).parent
    decodes = re.compile(
        r"(?<!json_input)\b(json\.loads?\(|raw_decode\(|tomllib\.load|[Dd]ecode(r\(|\(.*type=))"
        r"|msgspec\.(json|msgpack)\.(decode|Decoder)"
    )
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if decodes.search(re.sub(r"json_input\.loads", "", path.read_text("utf-8")))
    }
    assert found - {"bench/records.py"} == CHECKED.keys()
