"""Pages, the API description, and failures outside of any dialect."""

from typing import Annotated, Any, Final

import msgspec

from kqview.server.errors import Answer
from kqview.server.web import static_files
from kqview.server.web.described import about
from kqview.server.web.endpoint import AnyCall, Handler, HttpReply, Operation

_TAG: Final = "server"


class Failure(msgspec.Struct, kw_only=True):
    """What went wrong."""

    error: Annotated[
        str, about("What was wrong, what the limit is and what to do.", "a key is needed")
    ]
    error_code: Annotated[str, about("Kind of the failure for programs.", "UNAUTHORIZED")]


def error_body(answer: Answer) -> dict[str, Any]:
    """The body of a failure outside of any dialect."""
    return {"error": answer.message, "error_code": answer.code, **answer.figures}


def operations(description: dict[str, Any]) -> list[Operation]:
    """Rows of the route table; *description* is read on request, so it may be filled later."""

    async def openapi(call: AnyCall) -> HttpReply:
        return HttpReply(msgspec.json.encode(description), gzips=True)

    files = static_files.folder("kqview.server")

    def page(*name: str) -> Handler:
        return static_files.page(files.joinpath(*name))

    return [
        get("/", page("index.html"), "What is running, with links."),
        get("/chat", page("chat", "index.html"), "A chat with the models, for people."),
        get("/docs", page("docs.html"), "This API for people."),
        get("/openapi.json", openapi, "This API for programs."),
        *static_files.parts(files, error_body),
    ]


def get(path: str, handler: Any, summary: str, reply: Any = None, **more: Any) -> Operation:
    """A row for reading *path*, outside of any dialect."""
    more.setdefault("access", "open")
    more.setdefault("tag", _TAG)
    return Operation(
        method="GET", path=path, handler=handler, summary=summary,
        error_body=error_body, failure=Failure, reply=reply, **more,
    )  # fmt: skip
