"""The OpenAPI description, made from the route table and from the types of its bodies and events.

What a field means stands once: in its annotation (`web.described.about`), or, if it is called as a
sampling option, in the table of these. Its example is in its annotation.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from kqview.server.errors import STATUS, Answer
from kqview.server.web.described import DEFAULT, SHOWN
from kqview.server.web.endpoint import UPLOADS, OneOf, Operation, Sample, Upload
from kqview.types.sampling import OPTIONS, SamplingOption

Schema = dict[str, Any]

_VERSION: Final = "3.1.0"
_REF: Final = "#/components/schemas/{name}"
_ERRORS: Final[Mapping[str, str]] = {
    "400": "The request is wrong; the message says what, and what the limit is.",
    "401": "A key is needed.",
    "403": "The key, the page's origin or the Host header does not allow it.",
    "404": "There is nothing of this name.",
    "408": "The body came too slowly.",
    "409": "What it needs is in use.",
    "413": "The body is too large.",
    "415": "The body is compressed, or of another media type.",
    "422": "The body is JSON of another form.",
    "429": "Too many requests; Retry-After says when to try again.",
    "500": "The server failed; its log says more.",
    "501": "The model, or the way the server was started, does not allow it.",
    "503": "Too many requests run, or no model is loaded; Retry-After says when to try again.",
    "504": "The request took too long.",
    "507": "There is no room for more.",
}


def describe(
    operations: Iterable[Operation],
    *,
    version: str,
    has_keys: bool,
    about: str = "Text generation with the attention of every token, layer and head.",
) -> dict[str, Any]:
    """The OpenAPI description of *operations*; WebSockets are listed in ``x-websockets``.

    Args:
        operations: The route table; rows without a tag, such as parts of pages, are left out.
        version: kqview's.
        has_keys: Whether a key is needed.
        about: What the server does.
    """
    operations = [one for one in operations if one.tag]
    types = _Types(kind for one in operations for kind in _types_of(one))
    failures: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    sockets: dict[str, Any] = {}
    for one in operations:
        if one.method == "WS":
            sockets[one.path] = {
                "summary": one.summary, "tag": one.tag, "messages": _samples(one, types),
            }  # fmt: skip
            continue
        for path in (one.path, *one.also):
            path = path.replace(":path}", "}")
            paths.setdefault(path, {})[one.method.lower()] = _operation(
                one, path, types, failures, has_keys=has_keys
            )
    description: dict[str, Any] = {
        "openapi": _VERSION,
        "info": {"title": "kqview", "version": version, "description": about},
        "paths": paths,
        "components": {"schemas": types.components, "responses": failures},
        "x-websockets": sockets,
    }
    if has_keys:
        description["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
    return description


def _types_of(one: Operation) -> Iterator[Any]:
    given: list[Any] = [one.body, one.upload, one.reply, one.failure]
    given += [sample.type for sample in one.samples]
    for kind in given:
        if isinstance(kind, OneOf):
            yield from kind.types
        elif kind is not None and kind is not Upload:
            yield kind


# ---- schemas


class _Types:
    """Schemas of types, and of every class that these refer to, with the meaning of each field."""

    def __init__(self, types: Iterable[Any]) -> None:
        given = [*{id(kind): kind for kind in types}.values()]
        shown: dict[str, Any] = {}  # what `shown_as` names
        while True:
            made = msgspec.json.schema_components([*given, *shown.values()], ref_template=_REF)
            # Classes of one name have their module's as well: it becomes that of their dialect.
            text = _MODULE.sub(rb"\1.", msgspec.json.encode(made))
            schemas, components = msgspec.json.decode(text)
            self.components: dict[str, Schema] = components
            missing = {*map(bytes.decode, _REFERENCE.findall(text))} - self.components.keys()
            if not missing:
                break
            shown |= {name: SHOWN[name] for name in missing}
        self._schemas = {id(kind): schema for kind, schema in zip(given, schemas, strict=False)}
        for schema in self.components.values():
            _describe(schema)

    def schema(self, kind: Any) -> Schema:
        """The schema of one of the types that were given, or of several of them."""
        if isinstance(kind, OneOf):
            return {"anyOf": [self.schema(one) for one in kind.types]}
        return self._schemas[id(kind)]

    def names(self, schema: Schema, name: str) -> list[str]:
        """Names of the events of a type, one of which is *name*: the others are in its ``type``."""
        kinds = self._resolved(schema)["properties"].get("type", {}).get("enum", [])
        return kinds if name in kinds else [name]

    def _resolved(self, schema: Schema) -> Schema:
        """*schema*, or the component that it refers to."""
        name = schema.get("$ref", "").rpartition("/")[2]
        return self.components[name] if name else schema

    def example(self, schema: Schema) -> Any:
        """A value that fits *schema*, made from the examples of its fields."""
        if "examples" in schema:
            return schema["examples"][0]
        schema = self._resolved(schema)
        for known in ("examples", "enum"):
            if schema.get(known):
                return schema[known][0]
        if "default" in schema:
            return schema["default"]
        if "anyOf" in schema:
            return self.example(schema["anyOf"][0])
        if "properties" in schema:
            properties: Mapping[str, Schema] = schema["properties"]
            # A body of which nothing is required has what it is about as its first field.
            first = [n for n, one in properties.items() if one.get("examples")][:1]
            needed = schema.get("required") or first
            return {n: self.example(one) for n, one in properties.items() if n in needed}
        match schema.get("type"):
            case "array":
                return [self.example(schema["items"])] if schema.get("items") else []
            case "boolean":
                return True
            case _:
                return None


_REFERENCE: Final = re.compile(rb'"#/components/schemas/([^"]+)"')
# The module of a class, where its name is a key or in a reference: api/openai/schema.py is openai.
_MODULE: Final = re.compile(
    rb'(?<=["/])kqview\.server\.(?:api\.wire|api|apps|web|models)\.([\w.]+?)(?:[._]schema)?\.'
    rb'(?=\w+")'
)
_EXAMPLE: Final = re.compile(r'such as (?=[\[{"\d-]|null\b)')


def _describe(schema: Schema) -> None:
    """Say in *schema*, that of a class, what each field is."""
    schema["description"] = _unwrapped(schema.get("description", ""))
    for name, one in schema.get("properties", {}).items():
        default = one.pop(DEFAULT, None)
        if default is not None and one.get("default") is None:
            one["default"] = default
        if "description" in one:
            continue
        if name in OPTIONS:
            _describe_option(one, OPTIONS[name])
        elif len(values := one.get("enum", ())) == 1:
            one["description"] = f'Always "{values[0]}".'


def _describe_option(field: Schema, option: SamplingOption) -> None:
    field["description"] = _unwrapped(option.doc)
    if option.example is not None:
        field.setdefault("examples", [option.example])
    if field.get("default") is None and option.default not in (None, (), {}):
        field["default"] = msgspec.json.decode(msgspec.json.encode(option.default))


def _unwrapped(text: str) -> str:
    return re.sub(r"\n *(?! *\n)", " ", text).strip()


# ---- operations


def _operation(
    one: Operation, path: str, types: _Types, failures: dict[str, Any], *, has_keys: bool
) -> dict[str, Any]:
    name = re.sub(r"[{}]", "", path.strip("/")).replace("/", "_").replace(".", "_") or "root"
    described: dict[str, Any] = {
        "operationId": f"{one.method.lower()}_{name}",
        "summary": one.summary,
        "tags": [one.tag],
        "responses": {str(one.status): _reply(one, types), **_errors(one, types, failures)},
    }
    parameters = [(part, "path") for part in re.findall(r"{(\w+)}", path)]
    parameters += [(part, "query") for part in one.parameters if f"{{{part}}}" not in path]
    if parameters:
        described["parameters"] = [
            _parameter(part, where, one.parameters.get(part, "")) for part, where in parameters
        ]
    if one.body is Upload and one.upload is None:
        described["requestBody"] = {"content": {kind: {"schema": {}} for kind in UPLOADS}}
    elif isinstance(one.upload, OneOf):
        schema = types.schema(one.upload)
        content: dict[str, Any] = {kind: {"schema": {}} for kind in UPLOADS}
        content["application/json"] = {"schema": schema, "example": types.example(schema)}
        described["requestBody"] = {"content": content}
    elif one.body is not None:
        schema = types.schema(one.upload or one.body)
        example = types.example(schema) if one.example is None else one.example
        content = {"schema": schema, "example": example}
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    if one.samples:
        described["x-events"] = _samples(one, types)
    if has_keys and one.access != "open":
        described["security"] = [{"bearer": []}, {"header": []}]
    return described


def _parameter(name: str, where: str, meaning: str) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": name, "in": where, "required": where == "path", "schema": {"type": "string"},
        "description": meaning,
    }  # fmt: skip
    if (found := _EXAMPLE.search(meaning)) is not None:
        described["example"] = str(json.JSONDecoder().raw_decode(meaning, found.end())[0])
    return described


def _reply(one: Operation, types: _Types) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if one.reply is not None:
        schema = types.schema(one.reply)
        content["application/json"] = {"schema": schema, "example": types.example(schema)}
    if one.streams:
        content["text/event-stream"] = _stream(one, types)
    described: dict[str, Any] = {"description": one.summary}
    if one.streams and one.reply is None:
        described["description"] = "Server-Sent Events, each with one JSON object as its data."
    return {**described, "content": content} if content else described


def _samples(one: Operation, types: _Types) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for sample in one.samples:
        shown: dict[str, Any] = {
            "from": sample.sender, "event": sample.event, "about": sample.about,
        }  # fmt: skip
        if isinstance(sample.body, str):
            shown["binary" if one.method == "WS" else "text"] = sample.body
        else:
            shown["data"] = _data(sample, types)
        if sample.type is not None:
            shown["schema"] = types.schema(sample.type)
        found.append(shown)
    return found


def _stream(one: Operation, types: _Types) -> dict[str, Any]:
    """What a stream is; the schema is that of one event: its name, and its data, which is JSON."""
    if not one.samples:
        return {"schema": {}}
    example = ""
    for sample in one.samples:
        data = _data(sample, types)
        text = data if isinstance(data, str) else msgspec.json.encode(data).decode()
        example += f"event: {sample.event}\ndata: {text}\n\n"
    string: Schema = {"type": "string"}
    schema: Schema = {
        "type": "object", "required": ["data"], "properties": {"event": string, "data": string},
    }  # fmt: skip
    kinds = {id(sample.type): sample for sample in one.samples if sample.type is not None}
    if kinds:
        texts = [sample.body for sample in one.samples if isinstance(sample.body, str)]
        schema["anyOf"] = [_event(sample, types) for sample in kinds.values()]
        schema["anyOf"] += [{"properties": {"data": {"enum": [text]}}} for text in texts]
    return {"schema": schema, "example": example}


def _data(sample: Sample, types: _Types) -> Any:
    """What a sample shows: the example of its type, with the values that it gives itself."""
    if isinstance(sample.body, str) or sample.type is None:
        return sample.body
    return {**types.example(types.schema(sample.type)), **sample.body}


def _event(sample: Sample, types: _Types) -> Schema:
    schema = types.schema(sample.type)
    data = {"contentMediaType": "application/json", "contentSchema": schema}
    return {"properties": {"event": {"enum": types.names(schema, sample.event)}, "data": data}}


def _errors(one: Operation, types: _Types, failures: dict[str, Any]) -> dict[str, Any]:
    """References to the replies to what goes wrong, which are added to *failures*."""
    left_out: set[str] = set() if one.body is not None else {"408", "413", "415"}
    if one.upload is None or isinstance(one.upload, OneOf):
        left_out.add("422")
    if one.body is None and not one.parameters:
        left_out.add("400")
    found: dict[str, Any] = {}
    for status, text in _ERRORS.items():
        if status not in left_out:
            example = msgspec.to_builtins(one.error_body(_ANSWERS[status]))
            schema = types.schema(one.failure)
            name = f"{schema['$ref'].rpartition('/')[2]}.{status}"
            content = {"schema": schema, "example": example}
            failures[name] = {"description": text, "content": {"application/json": content}}
            found[status] = {"$ref": f"#/components/responses/{name}"}
    return found


_CODES: Final = {row.status: row.code for row in reversed([*STATUS.values()])}
_ANSWERS: Final = {
    status: Answer(int(status), _CODES.get(int(status), "INVALID_REQUEST"), text)
    for status, text in _ERRORS.items()
}
