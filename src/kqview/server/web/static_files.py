"""Files of pages, as rows of a route table. They are public; what they show may need a key.

A folder ``static`` becomes routes by the names in it: ``static/style.css`` is ``/static/style.css``
and ``static/chat/page.js`` is ``/static/chat/page.js``. A page at another path is made with `page`.

Pages load nothing from elsewhere and have no script or style of their own in the HTML: the policy
that `kqview.server.web.middleware` sends with every reply forbids both.
"""

from collections.abc import Callable, Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Final

from kqview.server.errors import Answer
from kqview.server.web.endpoint import AnyCall, Handler, HttpReply, Operation

_MEDIA_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}


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
