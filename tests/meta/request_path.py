"""The way of a request through the package: ``python tests/meta/request_path.py [NAME] [--list]``.

Profiles one warm request of each dialect through ASGI, in every thread, and prints how many files,
functions and calls of kqview it passes; ``--list`` names the files in the order of their first
call. Comprehensions and generator expressions are no functions. The demo model generates four
tokens, always the same ones, with attention where the dialect has it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import kqview
from kqview import Engine
from kqview.server import create_app

if TYPE_CHECKING:
    from types import CodeType, FrameType

PACKAGE: Final = Path(kqview.__file__).parent
CHAT: Final = {
    "messages": [{"role": "user", "content": "Anna has a dog."}],
    "max_tokens": 4,
    "seed": 1,
}
PROBS: Final = {"attention": {"kind": "probs"}}
TEXT: Final = {"prompt": "Anna has", "max_length": 4, "temperature": 0}
REQUESTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "openai": ("/v1/chat/completions", {**CHAT, **PROBS}),
    "anthropic": ("/v1/messages", {"model": "demo", **CHAT}),
    "llama-server": ("/completion", {**TEXT, "n_predict": 4, **PROBS}),
    "kobold": ("/api/extra/generate/stream", {**TEXT, "output_attentions": True}),
    "dream": ("/api/v1/generate", {**TEXT, "output_attentions": True}),
    "mia4": ("/generate", {"prompt": "Who is Anna?", "overrides": {"max_output_tokens": 4}}),
}


class Passed:
    """What has been called of the package, in every thread that begins after it."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.is_on = False
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    @property
    def functions(self) -> list[CodeType]:
        """In the order of their first call."""
        return [one for one in self.calls if one.co_name == "<lambda>" or one.co_name[0] != "<"]

    @property
    def files(self) -> list[str]:
        """Paths below the package, in the order of their first call."""
        names = (str(Path(one.co_filename).relative_to(PACKAGE)) for one in self.functions)
        return list(dict.fromkeys(names))

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if self.is_on and event == "call":  # a generator that goes on costs as much as a call
            code = frame.f_code
            if code.co_filename.startswith(str(PACKAGE)):
                self.calls[code] += 1


async def post(app: Any, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Status and body of the reply of *app*."""
    content = json.dumps(body).encode()
    messages = [{"type": "http.request", "body": content, "more_body": False}]
    is_over = asyncio.Event()
    status, parts = 0, list[bytes]()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await is_over.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))
        if message["type"] == "http.response.body" and not message.get("more_body"):
            is_over.set()

    headers = {"host": "127.0.0.1", "content-type": "application/json"}
    headers["content-length"] = str(len(content))
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "",
        "query_string": b"", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    await app(scope, receive, send)
    return status, b"".join(parts)


async def measure(name: str) -> Passed:
    """What a request of this dialect calls, after two like it."""
    passed = Passed()
    engine = Engine.demo(n_ctx=512)
    app = create_app(engine)
    for passed.is_on in (False, False, True):
        status, reply = await post(app, *REQUESTS[name])
        assert status == 200, (name, status, reply[:500])
        await asyncio.sleep(0.1)  # what comes behind a reply
    passed.is_on = False
    engine.close()
    return passed


def main() -> None:
    """Print a line a dialect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=" ".join(REQUESTS))
    parser.add_argument("--list", action="store_true", help="name the files")
    given = parser.parse_args()
    for name in given.names or REQUESTS:
        passed = asyncio.run(measure(name))
        n_calls = sum(passed.calls.values())
        print(
            f"{name:14}{len(passed.files):4} files{len(passed.functions):6} functions"
            f"{n_calls:7} calls"
        )
        if given.list:
            print(*(f"    {file}" for file in passed.files), sep="\n")


if __name__ == "__main__":
    main()
