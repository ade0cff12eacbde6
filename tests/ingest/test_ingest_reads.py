"""What is posted is read back, field for field, from both databases, and lists find it."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from msgspec import inspect

from kqview.ingest import schema
from kqview.ingest.payload import digest_of
from kqview.ingest.store import Reader, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from tests.support.receiving import Receiving

pytestmark = pytest.mark.full


def put(client: httpx.Client, request_id: str, **request: Any) -> None:
    body = {"request": {"request_id": request_id, **request}}
    assert client.post("/ingest", json=body).status_code == 201


def listed(client: httpx.Client, **query: Any) -> list[str]:
    """Ids of a list, newest first."""
    reply = client.get("/v1/traces", params=query)
    assert reply.status_code == 200, reply.text
    return [one["request_id"] for one in reply.json()["traces"]]


def test_sample_is_read_back_field_for_field(stored: Receiving, sample: dict[str, Any]) -> None:
    with stored.client() as client:
        posted = client.post("/ingest", json=sample)
        assert (posted.status_code, posted.content) == (201, b"")
        read = client.get("/v1/traces/req_abc123", headers={"X-API-Key": "user_789"})
    assert read.json() == sample


def test_summary_counts_what_the_sample_has(stored: Receiving, sample: dict[str, Any]) -> None:
    sample["request"]["inference_stats"] = {"finish_reason": "length"}
    with stored.client() as client:
        client.post("/ingest", json=sample)
        [summary] = client.get("/v1/traces").json()["traces"]
    for name, value in {
        "request_id": "req_abc123", "model": "gemini-2.0-flash", "finish_reason": "length",
        "n_events": 4, "n_steps": 1, "n_added_tokens": 1, "n_forced_tokens": 0, "n_mod_calls": 2,
        "n_mod_logs": 2, "n_actions": 1, "n_exceptions": 0, "mods": ["sample_mod"],
        "created_at": "2025-12-01T18:30:00Z", "duration_ms": 5000.0, "text": " there",
    }.items():  # fmt: skip
        assert summary[name] == value, name


def test_trace_of_the_same_id_replaces_all_but_the_time(
    stored: Receiving, sample: dict[str, Any]
) -> None:
    again = {
        "request": {"request_id": "req_abc123", "created_at": "2030-01-01T00:00:00Z"},
        "events": [{"event_type": "Sampled", "step": 7, "sequence_order": 5}],
    }
    with stored.client() as client:
        for body in (sample, sample, again):
            assert client.post("/v1/ingest", json=body).status_code == 201
        read = client.get("/v1/traces/req_abc123").json()
        values = client.get("/v1/values").json()
    assert read == {
        "request": {"request_id": "req_abc123", "created_at": "2025-12-01T18:30:00Z"},
        "events": again["events"], "mod_calls": [], "mod_logs": [], "actions": [],
    }  # fmt: skip
    assert values == {"models": [], "mods": [], "finish_reasons": []}
    assert stored.store.totals()[0] == 1


def test_trace_without_a_time_has_that_of_its_arrival(stored: Receiving) -> None:
    with stored.client() as client:
        put(client, "a")
        [summary] = client.get("/v1/traces").json()["traces"]
    assert summary["created_at"] == summary["stored_at"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("2025-12-01T20:30:00+02:00", "2025-12-01T18:30:00Z"),
        ("2025-12-01T18:30:00.25Z", "2025-12-01T18:30:00.250000Z"),
        (1764613800, "2025-12-01T18:30:00Z"),
        (1764613800.25, "2025-12-01T18:30:00.250000Z"),
        (-1, "1969-12-31T23:59:59Z"),
        ("0001-01-01T00:00:00Z", "0001-01-01T00:00:00Z"),
    ],
)
def test_times_are_shown_in_utc(received: Receiving, given: object, shown: str) -> None:
    with received.client() as client:
        put(client, "a", created_at=given)
        assert client.get("/v1/traces/a").json()["request"]["created_at"] == shown


def test_nul_is_removed_and_backslashes_stay(stored: Receiving) -> None:
    text = b'"a\\u0000b\\\\u0000c\\\\\\u0000d"'
    body = b'{"request": {"request_id": "a\\u0000", "mod_text": %b, "inference_stats": [%b]}}' % (
        text, text,
    )  # fmt: skip
    with stored.client() as client:
        posted = client.post("/ingest", content=body, headers={"content-type": "application/json"})
        assert posted.status_code == 201
        request = client.get("/v1/traces/a").json()["request"]
    assert request["mod_text"] == "ab\\u0000c\\d"
    assert request["inference_stats"] == ["ab\\u0000c\\d"]


def test_long_texts_and_any_json_are_kept(stored: Receiving) -> None:
    long = "é" * 300_000
    details = {"nested": [1.5, None, {"x": long}], "big": 10**30, "": True}
    event = {
        "event_type": "Sampled", "step": 1, "sequence_order": 0, "token_text": long,
        "details": details,
    }  # fmt: skip
    body = {"request": {"request_id": "a", "model": long}, "events": [event]}
    with stored.client() as client:
        assert client.post("/ingest", json=body).status_code == 201
        read = client.get("/v1/traces/a").json()
    assert read["events"] == [event]
    assert read["request"]["model"] == long


def test_events_come_in_the_order_of_their_numbers(stored: Receiving) -> None:
    events = [{"event_type": "Added", "step": i, "sequence_order": i} for i in (2, 0, 7)]
    with stored.client() as client:
        client.post("/ingest", json={"request": {"request_id": "a"}, "events": events})
        read = client.get("/v1/traces/a").json()["events"]
    assert [one["sequence_order"] for one in read] == [0, 2, 7]


@pytest.mark.parametrize("request_id", ["a/b", "a b?c#d", "käse", "a%2Fb", "ends/", "..."])
def test_any_id_finds_its_trace(received: Receiving, request_id: str) -> None:
    from urllib.parse import quote

    with received.client() as client:
        put(client, request_id)
        read = client.get(f"/v1/traces/{quote(request_id, safe='')}")
    assert read.status_code == 200, read.text
    assert read.json()["request"]["request_id"] == request_id


# ---- lists


@pytest.fixture
def three(stored: Receiving, sample: dict[str, Any]) -> Receiving:
    """The sample of 2025, a trace of 2026 that ended by length, and one of 2027."""
    with stored.client() as client:
        client.post("/ingest", json=sample)
        put(
            client, "b", created_at="2026-01-01T00:00:00Z", model="m",
            final_text="Once UPON 100% of_times", inference_stats={"finish_reason": "length"},
        )  # fmt: skip
        put(client, "c", created_at="2027-01-01T00:00:00Z", model="n", user_prompt="Größe")
    return stored


def test_lists_have_the_newest_first_and_only_what_is_asked_for(three: Receiving) -> None:
    asked: dict[str, tuple[dict[str, str], list[str]]] = {
        "everything": ({}, ["c", "b", "req_abc123"]),
        "model": ({"model": "m"}, ["b"]),
        "mod": ({"mod": "sample_mod"}, ["req_abc123"]),
        "no such mod": ({"mod": "sample"}, []),
        "finish": ({"finish_reason": "length"}, ["b"]),
        "since": ({"since": "2026-01-01T00:00:00Z"}, ["c", "b"]),
        "until": ({"until": "2026-01-01T00:00:00Z"}, ["req_abc123"]),
        "seconds": ({"since": "1767225600", "until": "1767225600.5"}, ["b"]),
        "text": ({"search": "upon 100%"}, ["b"]),
        "text with wildcards": ({"search": "of%times"}, []),
        "text with an umlaut": ({"search": "GRÖSSE"}, ["c"]),
        "text of tokens": ({"search": "There"}, ["req_abc123"]),
        "id": ({"search": "abc12"}, ["req_abc123"]),
        "two": ({"model": "m", "search": "Größe"}, []),
        "NUL": ({"model": "m\0"}, ["b"]),
        "empty": ({"model": "", "mod": "", "search": "", "since": ""}, ["c", "b", "req_abc123"]),
    }
    with three.client() as client:
        for name, (query, ids) in asked.items():
            assert listed(client, **query) == ids, name
        assert client.get("/v1/traces/b%00").status_code == 200
        assert client.get("/v1/values").json() == {
            "models": ["gemini-2.0-flash", "m", "n"],
            "mods": ["sample_mod"],
            "finish_reasons": ["length"],
        }


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "0"}, {"limit": "201"}, {"limit": "x"}, {"limit": "9" * 5000},
        {"cursor": "x"}, {"cursor": "1.999"},
        {"cursor": "99999999999999999999999.1"}, {"since": "yesterday"},
        {"until": "2026-01-01"}, {"since": "nan"}, {"since": "1e300"},
    ],
)  # fmt: skip
def test_wrong_condition_is_named(received: Receiving, query: dict[str, str]) -> None:
    with received.client() as client:
        reply = client.get("/v1/traces", params=query)
    if query == {"cursor": "1.999"}:  # before everything
        assert reply.json() == {"traces": [], "next_cursor": None}
        return
    assert reply.status_code == 400
    assert next(iter(query)) in reply.json()["error"]


def test_cursor_leads_through_all_traces_once_while_others_come(stored: Receiving) -> None:
    with stored.client() as client:
        for i in range(7):  # three of each time: the cursor has to tell them apart
            put(client, f"t{i}", created_at=1000 + i // 3)
        found: list[str] = []
        cursor = ""
        while True:
            page = client.get("/v1/traces", params={"limit": 2, "cursor": cursor}).json()
            found += [one["request_id"] for one in page["traces"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
            put(client, f"new{len(found)}", created_at=2000)
    assert found == ["t6", "t5", "t4", "t3", "t2", "t1", "t0"]


# ---- deleting


def test_deleted_trace_is_gone_with_all_of_its_parts(
    stored: Receiving, sample: dict[str, Any]
) -> None:
    import sqlalchemy as sa

    from kqview.ingest import tables

    with stored.client() as client:
        client.post("/ingest", json=sample)
        put(client, "other")
        reply = client.delete("/v1/traces/req_abc123")
        assert (reply.status_code, reply.content) == (204, b"")
        assert client.get("/v1/traces/req_abc123").status_code == 404
        assert client.delete("/v1/traces/req_abc123").status_code == 404
        assert listed(client) == ["other"]
    engine = sa.create_engine(stored.receiver.options.database)
    with engine.connect() as db:
        for table in tables.metadata.sorted_tables:
            n_rows = db.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            assert n_rows == (table.name in ("requests", "counter", "schema_version")), table.name
    engine.dispose()


# ---- any payload

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
I32 = st.integers(-(2**31), 2**31 - 1)
ANY = st.recursive(
    st.booleans() | I32 | FLOAT | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """JSON of a field of the schema, but null."""
    match kind:
        case inspect.UnionType(types=types):
            # A time is the text that a reply has, or else any type that is not None.
            times = [one for one in types if isinstance(one, inspect.DateTimeType)]
            return values((times or types)[0])
        case inspect.DateTimeType():
            return st.datetimes().map(lambda moment: f"{moment.isoformat()}Z")
        case inspect.StrType(min_length=least):
            return TEXT.filter(bool) if least else TEXT
        case inspect.ListType(item_type=item):
            return st.lists(values(item))
        case inspect.LiteralType(values=names):
            return st.sampled_from(names)
        case inspect.IntType():
            return I32
        case inspect.FloatType():
            return FLOAT
        case inspect.BoolType():
            return st.booleans()
    assert isinstance(kind, inspect.RawType), kind
    return ANY


def objects(struct: Any) -> st.SearchStrategy[dict[str, Any]]:
    """JSON of a part of a trace; a field that a reply always has is given."""
    kind = inspect.type_info(struct)
    assert isinstance(kind, inspect.StructType)
    given = {one.name: values(one.type) for one in kind.fields}
    may_lack = {one.name for one in kind.fields if one.default is None}
    if struct is schema.Request:
        may_lack.remove("created_at")
    return st.fixed_dictionaries(
        {name: one for name, one in given.items() if name not in may_lack},
        optional={name: given[name] for name in may_lack},
    )


REQUEST, EVENT, MOD_CALL, MOD_LOG, ACTION = map(
    objects, (schema.Request, schema.Event, schema.ModCall, schema.ModLog, schema.Action)
)


@st.composite
def payloads(draw: st.DrawFn) -> dict[str, Any]:
    """Traces that pass, their events in the order of their numbers."""
    orders = sorted(draw(st.sets(I32, max_size=3)))
    events = [{**draw(EVENT), "sequence_order": order} for order in orders]
    calls: list[dict[str, Any]] = []
    if orders:
        linked = st.sampled_from(orders)
        calls = [
            {**call, "event_sequence_order": draw(linked)}
            for call in draw(st.lists(MOD_CALL, max_size=3))
        ]

    def of_calls(part: st.SearchStrategy[dict[str, Any]]) -> list[dict[str, Any]]:
        if not calls:
            return []
        linked = st.integers(0, len(calls) - 1)
        return [
            {**one, "mod_call_sequence": draw(linked)} for one in draw(st.lists(part, max_size=2))
        ]

    return {
        "request": draw(REQUEST), "events": events, "mod_calls": calls,
        "mod_logs": of_calls(MOD_LOG), "actions": of_calls(ACTION),
    }  # fmt: skip


def same_times(value: Any) -> Any:
    """*value* with its times in one form: without a fraction where it is zero."""
    if isinstance(value, list):
        return [same_times(one) for one in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {
            name: _time(one) if name in ("created_at", "completed_at") else same_times(one)
            for name, one in cast("dict[str, Any]", value).items()
        }
    return value


def _time(text: str) -> str:
    return text.removesuffix("Z").removesuffix(".000000")


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    with contextlib.closing(Store(database)) as one:
        yield one


@given(payload=payloads())
@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_trace_is_read_back_as_it_was_posted(store: Store, payload: dict[str, Any]) -> None:
    request = payload["request"]
    key = request.get("user_api_key")
    store.put(json.dumps(payload).encode())
    reader = Reader(owner="" if key is None else digest_of(key), key=key)
    read = store.trace(request["request_id"], reader)
    assert read is not None
    assert store.delete(request["request_id"])  # else the next one of this id had its time
    wanted = {**payload, "request": {**request}}
    if key == "":
        wanted["request"]["user_api_key"] = f"sha256:{digest_of('')}"
    assert same_times(json.loads(read)) == same_times(wanted)
