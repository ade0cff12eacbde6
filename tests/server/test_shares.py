"""Keys share slots and queue: what one key asks for, read or not, keeps no other key out."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import pytest

from kqview.server import Settings
from tests.attack.greedy import CONNECTIONS, FLAGS, GREEDY, OTHER, Other, observe, turn_s
from tests.attack.summary import Summary
from tests.attack.target import target
from tests.server.clients import json_request, raw_connection, read_until
from tests.support.serving import serving

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from tests.attack.target import Target
    from tests.support.serving import Served

STREAM = "/api/extra/generate/stream"
ROWS = {"prompt": "Tom has", "max_length": 4000, "bypass_eos": True, "output_attentions": True}
# A request with this mod does not end before the gate is open.
GATE = threading.Event()
WAITS = """
import kqview
from tests.server.test_shares import GATE
@kqview.mod
def waits(event, actions, tokenizer):
    GATE.wait()
"""
SHORT = {"prompt": "Anna is a", "max_length": 2}
TIMES_ALONE = 2.0
N_REQUESTS = 100
# Other work of the machine makes times longer, never shorter.
N_TRIES = 4
NOISE_S = 0.05
REFUSAL_S = 0.005  # the work of refusing a request, which many connections ask for in one moment


@contextlib.contextmanager
def unread(served: Served, n: int) -> Iterator[list[socket.socket]]:
    """Streams of the greedy key that nobody reads; each is admitted or refused before the next."""
    with contextlib.ExitStack() as stack:
        socks: list[socket.socket] = []
        for _ in range(n):
            socks.append(stack.enter_context(raw_connection(served, receive_bytes=2048)))
            socks[-1].sendall(json_request(STREAM, ROWS, x_api_key=GREEDY))
        yield socks


def post(served: Served, key: str) -> httpx.Response:
    with served.client(headers={"x-api-key": key}) as client:
        return client.post("/api/v1/generate", json=SHORT)


def test_forty_streams_that_nobody_reads_refuse_no_request_of_another_key():
    with serving(Settings(n_slots=2, n_ctx=2048, api_keys=(GREEDY, OTHER))) as served:
        with unread(served, 40):
            served.wait_until(lambda: len(served.runs) >= 34)
            assert [post(served, OTHER).status_code for _ in range(20)] == [200] * 20
        served.wait_idle()


def test_key_with_less_than_its_share_is_let_in_and_the_other_told_its_share(tmp_path: Path):
    (tmp_path / "waits.py").write_text(WAITS)
    settings = Settings(
        n_slots=1, n_ctx=512, max_queued=3, api_keys=(GREEDY, OTHER), mods_dir=str(tmp_path),
        mod_time_limit_s=600,
    )  # fmt: skip
    GATE.clear()
    with serving(settings) as served, contextlib.ExitStack() as stack:
        stack.callback(GATE.set)

        def begin(key: str) -> None:
            n = len(served.runs)
            sock = stack.enter_context(raw_connection(served))
            body = {**SHORT, "mods": ["waits"]}
            sock.sendall(json_request(STREAM, body, x_api_key=key))
            served.wait_until(lambda: len(served.runs) == n + 1)

        for _ in range(4):  # a key alone may have all places
            begin(GREEDY)
        for _ in range(2):
            begin(OTHER)
        for key, n_own in ((GREEDY, 4), (OTHER, 2)):
            refused = post(served, key)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            told = (
                f"{n_own} of your requests run or wait, your share of 4 (slots + max_queued) is 2"
            )
            assert told in refused.text


def test_parked_streams_leave_the_queue_and_are_bounded_by_max_running():
    settings = Settings(
        n_slots=1, n_ctx=2048, max_queued=1, max_running=3, api_keys=(GREEDY, OTHER)
    )
    with serving(settings) as served:
        with contextlib.ExitStack() as stack:

            def is_begun() -> bool:
                sock = stack.enter_context(raw_connection(served, receive_bytes=2048))
                sock.sendall(json_request(STREAM, ROWS, x_api_key=GREEDY))
                return read_until(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")

            for n in range(1, 4):
                # Refused until those before it wait for their clients and one has left its slot.
                served.wait_until(is_begun)
                assert len(served.runs) == n
            served.wait_until(lambda: "share of 3 (max_running)" in post(served, GREEDY).text)
            assert post(served, OTHER).status_code == 200
        served.wait_idle()


@pytest.fixture(scope="module", params=[1, 2], ids=["1 slot", "2 slots"])
def running(request: pytest.FixtureRequest) -> Iterator[tuple[Target, int]]:
    summary = Summary("shares", 1)
    with target(summary, "--slots", str(request.param), *FLAGS) as one:
        yield one, request.param
    assert not summary.wrong


@pytest.mark.full
@pytest.mark.parametrize("reads", [True, False], ids=["read", "not read"])
@pytest.mark.parametrize("n", CONNECTIONS)
def test_greedy_key_makes_another_wait_for_a_turn_at_most(
    running: tuple[Target, int], n: int, reads: bool
):
    one, n_slots = running
    figures: list[str] = []
    for _ in range(N_TRIES):
        # Of several slots one is given up at once.
        waits_s = turn_s(one) if n_slots == 1 else 0.0
        waits_s += REFUSAL_S * max(0, n - n_slots - Settings().max_queued)
        alone = Other().ask(one, N_REQUESTS)
        _, other = observe(one, ("completions",), n, reads=reads, n_requests=N_REQUESTS)
        assert other.refused == []
        figures.append(f"{alone.p99_s:.3f} s alone, {other.p99_s:.3f} s, waits {waits_s:.3f} s")
        if other.p99_s <= TIMES_ALONE * alone.p99_s + waits_s + NOISE_S:
            return
    pytest.fail(f"p99 of a key: {'; '.join(figures)}")
