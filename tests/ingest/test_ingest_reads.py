"""What is posted is read back, field for field, and lists find it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.receiving import Receiving


def test_sample_is_read_back_field_for_field(received: Receiving, sample: dict[str, Any]) -> None:
    with received.client() as client:
        posted = client.post("/ingest", json=sample)
        assert (posted.status_code, posted.content) == (201, b"")
        read = client.get("/v1/traces/req_abc123", headers={"X-API-Key": "user_789"})
    assert read.json() == sample
