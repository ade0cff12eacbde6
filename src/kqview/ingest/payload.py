"""Payload: checks a posted trace part by part and makes rows of it; pure, no database.

A trace may have 75 MiB. Its bytes are split once, without decoding; then the parts are decoded,
checked and written one by one, so that only a slice of them exists as objects at a time.
"""

import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Final, cast

import msgspec
from msgspec import Raw

from kqview._core import count_values
from kqview.errors import RequestError
from kqview.ingest.schema import TIMES, Action, Event, ModCall, ModLog, Payload, Request
from kqview.json_input import DEPTH_MAX, TooDeep
from kqview.server.errors import Unprocessable
from kqview.server.web.access import key_digest

TableRow = dict[str, Any]

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_MOST_MICROSECONDS: Final = (datetime.max.replace(tzinfo=UTC) - EPOCH) // _MICROSECOND
_LEAST_MICROSECONDS: Final = (datetime.min.replace(tzinfo=UTC) - EPOCH) // _MICROSECOND
# An escaped NUL, behind an even number of backslashes. PostgreSQL has no NUL in a text.
_NUL: Final = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
MOST_TEXT: Final = 64 * 1024
"""Characters of a trace that the search looks at."""
_MOST_SHOWN: Final = 200  # characters of its text in a list

_ADDING: Final = frozenset({"Backtrack", "ForceTokens"})  # at an Added event


class Posted:
    """One posted trace. Parts are read once, in the order of the methods here.

    Attributes:
        request: The request.
        counts: What the summary says of the parts that were read, by the names of its fields.
        mods: Names of the mods, in the order of their first calls; the values are None.
    """

    def __init__(self, body: bytes) -> None:
        """Split *body*.

        Raises:
            RequestError: It is not JSON.
            Unprocessable: A section is missing or of a wrong type.
        """
        self.counts = Counter[str]()
        self.mods: dict[str, None] = {}
        if b"\\u0000" in body:
            body = _NUL.sub(rb"\1", body)
        if (depth := count_values(body, packs=False).depth) > DEPTH_MAX:
            raise RequestError(f"the JSON of the body cannot be read: {TooDeep(depth)}")
        self._parts = _decoded(Payload, body, "$")
        self.request = _decoded(Request, self._parts.request, "$.request")
        self._texts: list[str] = []  # of sampled tokens, as many as the search looks at
        self._n_text = 0
        self._orders: set[int] = set()
        self._added: set[int] = set()  # orders of Added events, then sequences of their calls

    def request_row(self) -> TableRow:
        """The row of the request, without what is counted.

        Raises:
            Unprocessable: A time is out of range.
        """
        row = _row(self.request, "$.request")
        key = row.pop("user_api_key")
        row["user_key_sha256"] = None if key is None else digest_of(key)
        return row

    def event_rows(self) -> Iterator[TableRow]:
        """Rows of the events.

        Raises:
            RequestError: A ``sequence_order`` occurs twice, or as the constructor.
        """
        counts = self.counts
        for place, event in _each(Event, "events", self._parts.events):
            order = event.sequence_order
            if order in self._orders:
                raise RequestError(
                    f"{place}.sequence_order is {order}, like that of an earlier event; number the "
                    "events 0, 1, 2, ..."
                )
            self._orders.add(order)
            counts["n_events"] += 1
            counts["n_steps"] = max(counts["n_steps"], event.step)
            if event.event_type == "Added":
                n_added = len(event.added_tokens or ()) or (event.added_token_count or 0)
                counts["n_added_tokens"] += n_added
                counts["n_forced_tokens"] += n_added if event.forced else 0
                self._added.add(order)
            if event.token_text and self._n_text < MOST_TEXT:
                self._texts.append(event.token_text)
                self._n_text += len(event.token_text)
            yield _row(event, place)

    def mod_call_rows(self) -> Iterator[TableRow]:
        """Rows of the calls of mods; raises RequestError for one of an unknown event."""
        counts = self.counts
        added, self._added = self._added, set()
        for place, call in _each(ModCall, "mod_calls", self._parts.mod_calls):
            if call.event_sequence_order not in self._orders:
                raise RequestError(
                    f"{place}.event_sequence_order is {call.event_sequence_order}, and no event "
                    "has this sequence_order"
                )
            self.mods[call.mod_name] = None
            counts["n_exceptions"] += call.exception_occurred
            if call.event_sequence_order in added:
                self._added.add(counts["n_mod_calls"])
            yield {**_row(call, place), "sequence": counts["n_mod_calls"]}
            counts["n_mod_calls"] += 1

    def mod_log_rows(self) -> Iterator[TableRow]:
        """Rows of what the mods logged; raises RequestError for a log of an unknown call."""
        for place, log in _each(ModLog, "mod_logs", self._parts.mod_logs):
            self._check_call(place, log.mod_call_sequence)
            yield {**_row(log, place), "sequence": self.counts["n_mod_logs"]}
            self.counts["n_mod_logs"] += 1

    def action_rows(self) -> Iterator[TableRow]:
        """Rows of what the mods did; raises RequestError for an action of an unknown call."""
        parts = _each(Action, "actions", self._parts.actions)
        for i, (place, action) in enumerate(parts):
            self._check_call(place, action.mod_call_sequence)
            yield {**_row(action, place), "sequence": i}
            self.counts["n_actions"] += action.action_type != "Noop"
            # What an action itself adds; of the others an Added event tells (timeline.js).
            is_own = action.mod_call_sequence in self._added and action.action_type in _ADDING
            if not is_own and action.action_type != "ForceOutput":
                continue
            details: Any = msgspec.json.decode(action.details) if action.details else None
            if not (isinstance(details, dict) and cast("Any", details).get("is_applied") is False):
                self.counts["n_added_tokens"] += len(action.tokens or ())
                self.counts["n_forced_tokens"] += len(action.tokens or ())

    def summary_row(self) -> TableRow:
        """What lists show and search, once all parts are read."""
        request = self.request
        text = request.final_text
        if text is None and self._texts:
            text = "".join(self._texts)
        searched = [
            request.request_id, request.model, request.mod_text, request.active_mod_name,
            *self.mods, request.user_prompt, text,
        ]  # fmt: skip
        return {
            **self.counts,
            "finish_reason": _finish_reason(request.inference_stats),
            "mods": msgspec.json.encode(list(self.mods)).decode(),
            "text": text and text[:_MOST_SHOWN],
            "search_text": "\n".join(filter(None, searched))[:MOST_TEXT].casefold(),
        }

    def _check_call(self, place: str, sequence: int) -> None:
        n_calls = self.counts["n_mod_calls"]
        if not 0 <= sequence < n_calls:
            raise RequestError(
                f"{place}.mod_call_sequence is {sequence}, and the trace has {n_calls} mod_calls; "
                "use an index into them, from 0"
            )


class _Stats(msgspec.Struct):
    finish_reason: str | None = None


def _finish_reason(stats: Raw | None) -> str | None:
    """Why generation ended, if *stats*, JSON of any shape, says so."""
    try:
        return msgspec.json.decode(stats or b"{}", type=_Stats).finish_reason
    except msgspec.DecodeError:
        return None


def digest_of(key: str) -> str:
    """The digest that stands for ``user_api_key``, which a stored trace may be posted with too."""
    known = _DIGEST.fullmatch(key)
    # As the bytes of a header are read: clients send UTF-8 there.
    return known[1] if known else key_digest(key.encode().decode("latin-1"))


def _each(kind: Any, name: str, parts: list[Raw]) -> Iterator[tuple[str, Any]]:
    for i, part in enumerate(parts):
        place = f"{name}[{i}]"
        yield place, _decoded(kind, part, f"$.{place}")


_decoder_of: Final = cache(msgspec.json.Decoder)


def _decoded(kind: Any, raw: bytes | Raw, place: str) -> Any:
    try:
        return _decoder_of(kind).decode(raw)
    except msgspec.ValidationError as error:
        message = str(error)
        at = message.rpartition(" - at `$")
        where = f"{at[0]} - at `{place}{at[2]}" if at[1] else f"{message} - at `{place}`"
        raise Unprocessable(f"the trace cannot be read: {where}; correct it") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}; correct it") from None


def _row(one: msgspec.Struct, place: str) -> TableRow:
    row: TableRow = {}
    for name in one.__struct_fields__:
        value: Any = getattr(one, name)
        if value is not None and name in TIMES:
            value = microseconds(value, f"{place}.{name}")
        elif isinstance(value, Raw):
            try:
                text = bytes(value).decode()
            except UnicodeDecodeError as error:
                raise RequestError(f"the body is not JSON: {error}; correct it") from None
            value = None if text == "null" else text
        elif isinstance(value, list):
            value = msgspec.json.encode(value).decode()
        row[name] = value
    return row


def microseconds(value: datetime | float, name: str) -> int:
    """Microseconds since 1970 of a `Time` called *name*.

    Raises:
        Unprocessable: It is before the year 1 or after 9999.
    """
    if isinstance(value, datetime):
        return (value - EPOCH) // _MICROSECOND
    # Compared first: an int may have thousands of digits, a float none to round.
    if not _LEAST_MICROSECONDS <= value * 10**6 <= _MOST_MICROSECONDS:
        raise Unprocessable(f"{name} is out of range; use a time of the years 1 to 9999")
    return round(value * 10**6)


def moment(micros: int | None) -> datetime | None:
    """The time of that many *micros* seconds since 1970."""
    return None if micros is None else EPOCH + timedelta(microseconds=micros)
