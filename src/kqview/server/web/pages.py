"""Pages with their files, the API description, and failures outside of any dialect.

Files of pages are public; what they show may need a key. A folder ``static`` becomes routes by the
names in it: ``static/style.css`` is ``/static/style.css`` and ``static/chat/page.js`` is
``/static/chat/page.js``. A page at another path is made with `page`.

Pages load nothing from elsewhere and have no script or style of their own in the HTML: the policy
that `kqview.server.web.middleware` sends with every reply forbids both.
"""

import asyncio
from collections.abc import Callable, Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated, Any, Final

import msgspec

from kqview.server.errors import Answer
from kqview.server.web.described import about
from kqview.server.web.endpoint import AnyCall, Handler, HttpReply, Operation, Operations

_MEDIA_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}


class Failure(msgspec.Struct, kw_only=True):
    """What went wrong."""

    error: Annotated[
        str, about("What was wrong, what the limit is and what to do.", "a key is needed")
    ]
    error_code: Annotated[str, about("Kind of the failure for programs.", "UNAUTHORIZED")]


def error_body(answer: Answer) -> dict[str, Any]:
    """The body of a failure outside of any dialect."""
    return {"error": answer.message, "error_code": answer.code, **answer.figures}


def operations(description: Callable[[], bytes]) -> list[Operation]:
    """Rows of the route table; *description* takes up to 0.3 s and runs on a thread."""

    async def openapi(call: AnyCall) -> HttpReply:
        return HttpReply(await asyncio.to_thread(description), gzips=True)

    files, table = folder("kqview.server"), public_table()
    table.get("/", summary="What is running, with links.")(page(files / "index.html"))
    chat = page(files / "chat" / "index.html")
    table.get("/chat", summary="A chat with the models, for people.")(chat)
    table.get("/docs", summary="This API for people.")(page(files / "docs.html"))
    table.get("/openapi.json", summary="This API for programs.")(openapi)
    return [*table, *parts(files, error_body)]


def public_table() -> Operations:
    """An empty route table of operations outside of any dialect, which anyone may call."""
    return Operations(tag="server", access="open", error_body=error_body, failure=Failure)


def folder(package: str) -> Traversable:
    """The folder ``static`` of *package*."""
    return resources.files(package).joinpath("static")


def parts(
    within: Traversable, error_body: Callable[[Answer], Any], path: str = "/static"
) -> Iterator[Operation]:
    """Rows for the scripts and styles of *within* and of the folders in it, under *path*."""
    for file in within.iterdir():
        if file.is_dir():
            yield from parts(file, error_body, f"{path}/{file.name}")
        elif _kind(file) in ("css", "js"):
            yield Operation(
                method="GET", path=f"{path}/{file.name}", handler=page(file), access="open",
                tag="", summary="Part of a page.", error_body=error_body,
            )  # fmt: skip


def page(file: Traversable) -> Handler:
    """A handler that serves *file*, as it is at that time."""

    async def serve(call: AnyCall) -> HttpReply:
        media_type = _MEDIA_TYPES[_kind(file)]
        headers = {"cache-control": "no-cache"}
        return HttpReply(file.read_bytes(), media_type, gzips=True, headers=headers)

    return serve


def _kind(file: Traversable) -> str:
    return file.name.rpartition(".")[2]
