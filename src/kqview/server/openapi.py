"""The OpenAPI description, made from the route table; nothing in it is written twice."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from kqview.server.endpoint import Operation

_VERSION: Final = "3.1.0"
_ERRORS: Final[Mapping[str, str]] = {
    "400": "The request is wrong; the message says what and what the limit is.",
    "401": "A key is needed.",
    "403": "The key, the page's origin or the server's name in the request does not allow it.",
    "404": "There is no such thing.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "429": "Too many requests; Retry-After says when to try again.",
    "500": "The server failed; its log says more.",
    "503": "Too many requests run, or no model is loaded; Retry-After says when to try again.",
    "504": "It took too long.",
}


def describe(operations: Iterable[Operation], *, version: str, has_keys: bool) -> dict[str, Any]:
    """The description of *operations*; WebSockets are listed in ``x-websockets``.

    Args:
        operations: The route table; what has no tag, such as parts of pages, is left out.
        version: Of kqview.
        has_keys: Whether a key is needed.
    """
    operations = [one for one in operations if one.tag]
    types = [kind for one in operations for kind in (one.body, one.reply) if kind is not None]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    by_type = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    sockets: dict[str, Any] = {}
    for one in operations:
        if one.method == "WS":
            sockets[one.path] = {"summary": one.summary, "tag": one.tag}
            continue
        for path in (one.path, *one.also):
            paths.setdefault(path, {})[one.method.lower()] = _operation(
                one, path, by_type, has_keys=has_keys
            )
    description: dict[str, Any] = {
        "openapi": _VERSION,
        "info": {
            "title": "kqview",
            "version": version,
            "description": "Text generation with the attention of every token, layer and head.",
        },
        "paths": paths,
        "components": {"schemas": components},
        "x-websockets": sockets,
    }
    if has_keys:
        description["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
    return description


def _operation(
    one: Operation, path: str, by_type: Mapping[int, Any], *, has_keys: bool
) -> dict[str, Any]:
    name = path.strip("/").replace("/", "_").replace(".", "_") or "root"
    described: dict[str, Any] = {
        "operationId": f"{one.method.lower()}_{name}",
        "summary": one.summary,
        "tags": [one.tag],
        "responses": {"200": _reply(one, by_type), **_errors(one)},
    }
    if one.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": by_type[id(one.body)]}},
        }
    if has_keys and one.access != "open":
        described["security"] = [{"bearer": []}, {"header": []}]
    return described


def _reply(one: Operation, by_type: Mapping[int, Any]) -> dict[str, Any]:
    if one.streams:
        text = "Server-Sent Events, each with one JSON object as its data."
        return {"description": text, "content": {"text/event-stream": {"schema": {}}}}
    if one.reply is None:
        return {"description": one.summary}
    content = {"application/json": {"schema": by_type[id(one.reply)]}}
    return {"description": one.summary, "content": content}


def _errors(one: Operation) -> dict[str, Any]:
    left_out: set[str] = set() if one.body is not None else {"400", "408", "413"}
    return {
        status: {"description": text, "content": {"application/json": {"schema": {}}}}
        for status, text in _ERRORS.items()
        if status not in left_out
    }
