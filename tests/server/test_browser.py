"""A real browser on a page of another origin: the documents' JavaScript, CORS, and a drawn row."""

from __future__ import annotations

import http.server
import itertools
import json
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine
from kqview.server import Settings
from tests.support.browser import WITHIN_MS
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.serving import Served

pytestmark = pytest.mark.needs("chromium")

README = Path(__file__).parents[2] / "src/kqview/server/KOBOLDAI.md"
PAGES = Path(__file__).with_name("pages")


class _Page(http.server.BaseHTTPRequestHandler):
    """Serves the pages beside this file, with the address of the API where they say API."""

    api = ""

    def do_GET(self) -> None:
        path = PAGES / self.path.lstrip("/")
        if path.parent != PAGES or not path.is_file():
            self.send_error(404)
            return
        text = path.read_text(encoding="utf-8").replace("API_HOST", self.api)
        data = text.replace("README_JS", readme_example(self.api)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def readme_example(host: str) -> str:
    found = re.search(r"```js\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found[1].replace("127.0.0.1:5001", host)


@pytest.fixture(scope="module")
def served(qwen_model: Path) -> Iterator[Served]:
    """A model with the vocabulary of the document's, so that its ids mean the same."""
    with (
        Engine(qwen_model, n_threads=1, n_ctx=512) as engine,
        serving(Settings(attention_values="probs"), engine) as one,
    ):
        yield one


@pytest.fixture(scope="module")
def origin(served: Served) -> Iterator[str]:
    """Another origin: other port, and other name of the same machine."""
    handler = type("Handler", (_Page,), {"api": served.url.removeprefix("http://")})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://localhost:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def result(page: Any, address: str) -> Any:
    """What the page sets as ``result`` when it is done."""
    page.goto(address)
    page.wait_for_function("window.result !== undefined", timeout=WITHIN_MS)
    return page.evaluate("window.result")


def test_documents_websocket_example_draws_its_rows(page: Any, served: Served, origin: str):
    found = result(page, f"{origin}/socket.html")
    shapes = [line.rsplit(": ", 1)[1] for line in page.logged if "Attention shape" in line]
    n_layer, n_head = served.engine.model.n_layer, served.engine.model.n_head
    assert [json.loads(shape) for shape in shapes] == [
        [n_layer, n_head, 5 + i] for i in range(found["total_tokens"])
    ]
    assert found["total_tokens"] > 1
    assert page.logged[-1].startswith("Connection closed")
    # A token of n columns is n squares of 4 by 4 pixels, none of them empty: every weight is > 0.
    assert found["n_drawn"] == 16 * sum(5 + i for i in range(found["total_tokens"]))
    assert found["model"]["num_layers"] == n_layer


def test_stream_of_events_is_read_as_halo_weave_does(page: Any, served: Served, origin: str):
    found = result(page, f"{origin}/events.html")
    assert found["error"] is None
    assert found["done"]["total_tokens"] == len(found["tokens"])
    assert found["done"]["request_id"] == "browser-1"
    assert [token["n"] for token in found["tokens"]] == [
        3 * 2 * (found["n_prompt"] + i) for i in range(len(found["tokens"]))
    ]
    assert all(abs(token["sum"] - 6) < 1e-2 for token in found["tokens"])
    assert found["refused"] == {"status": 400, "error_code": "INVALID_TOKEN"}


def test_example_of_the_readme_logs_its_shapes(page: Any, served: Served, origin: str):
    n_tokens = int(re.findall(r"max_length: (\d+)", readme_example(""))[0])
    page.goto(f"{origin}/readme.html")
    served.wait_until(lambda: served.service._n_runs_of.total())
    page.wait_for_function(f"window.n_logged >= {n_tokens}", timeout=WITHIN_MS)
    shapes = [json.loads(line.rsplit(" ", 1)[1]) for line in page.logged if line.endswith("]")]
    assert len(shapes) == n_tokens > 1
    assert [b[2] - a[2] for a, b in itertools.pairwise(shapes)] == [1] * (n_tokens - 1)


def test_page_of_another_site_can_neither_read_nor_run_anything(
    page: Any, served: Served, origin: str
):
    before = served.service._n_runs_of.total()
    elsewhere = origin.replace("localhost", "page.example")
    found = result(page, f"{elsewhere}/foreign.html")
    # Its socket is told why before it is closed; what it sends blindly is refused unseen.
    assert (found["get"], found["json"], found["plain"]) == ("refused",) * 3
    assert (found["blind"], found["socket"]) == ("opaque", "error")
    assert served.service._n_runs_of.total() == before
    found = result(page, f"{origin}/foreign.html")  # the same from this machine
    assert found == {"get": 200, "json": 200, "plain": 200, "blind": "opaque", "socket": "token"}
    assert served.service._n_runs_of.total() > before


def test_name_that_somebody_points_at_this_machine_reads_nothing(page: Any, served: Served):
    reply = page.goto(served.url.replace("127.0.0.1", "rebound.example"))
    assert reply.status == 403
    script = "async () => { const r = await fetch('/api/v1/model'); return [r.status, r.type]; }"
    assert page.evaluate(script) == [403, "basic"]  # of its own origin, to the browser


def test_page_of_the_server_is_not_shown_inside_that_of_another(
    page: Any, served: Served, origin: str
):
    page.goto(f"{served.url}/chat")
    assert page.get_by_role("textbox").count()
    result(page, f"{origin}/frame.html")
    [shown] = page.main_frame.child_frames
    assert shown.url.startswith("chrome-error:")
    assert shown.get_by_role("textbox").count() == 0
    assert any("frame-ancestors 'none'" in line for line in page.logged)
