"""Reranking: documents by how well they answer a query, in the forms of Jina and of TEI."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.engine import Engine
from kqview.errors import RequestError
from kqview.server.errors import NotSupported, renamed
from kqview.server.models.service import Call
from kqview.server.web.described import about
from kqview.server.web.endpoint import HttpReply
from kqview.types import Classification

_RESULT_BYTES: Final = 256  # an object with two numbers, and its JSON

_ID_BYTES: Final = 40  # a character and its ids

Documents = Annotated[list[str], msgspec.Meta(max_length=2**16)]


class RerankBody(Struct, kw_only=True):
    """A query and documents."""

    query: Annotated[str | None, about("The query.", "Who teaches?")] = None
    documents: Annotated[
        Documents | None, about("The documents.", ["Anna is a teacher.", "It rains."])
    ] = None
    texts: Annotated[
        Documents | None,
        about(
            "The documents, in place of ``documents``; the reply then has TEI's form.",
            ["Anna is a teacher.", "It rains."],
        ),
    ] = None
    top_n: Annotated[int | None, about("So many of the best; all if not given.", 1)] = None
    return_text: Annotated[
        bool | None,
        about("With ``texts``: whether the reply repeats them; false if not given.", default=False),
    ] = None
    model: Annotated[
        str | None, about("Id of a configured model; the default model if not given.", "demo")
    ] = None


class JinaResult(Struct):
    """A document and its score."""

    index: Annotated[int, about("Of the document, from 0.", 0)]
    relevance_score: Annotated[
        float,
        about(
            "How well it answers the query; the larger, the better. Null where it is not a number.",
            3.5,
        ),
    ]


class TeiResult(Struct):
    """A text and its score."""

    index: Annotated[int, about("Of the text, from 0.", 0)]
    score: Annotated[
        float,
        about(
            "How well it answers the query; the larger, the better. Null where it is not a number.",
            3.5,
        ),
    ]
    text: Annotated[str | UnsetType, about("The text, if asked for.", "Anna is a teacher.")] = UNSET


class RerankUsage(Struct):
    """Tokens of all pairs."""

    prompt_tokens: Annotated[int, about("Tokens of all pairs.", 14)]
    total_tokens: Annotated[int, about("The same.", 14)]


class Reranked(Struct, kw_only=True):
    """Documents, the best first."""

    model: Annotated[str, about("The model, as the request names it.", "demo")]
    object: Annotated[str, about('Always "list".', "list")] = "list"
    usage: Annotated[RerankUsage, about("Tokens of the request.")]
    results: Annotated[list[JinaResult], about("Documents by falling score.")]


def documents_of(body: RerankBody) -> Sequence[str]:
    """The documents.

    Raises:
        RequestError: A field is missing, empty or out of range.
    """
    if body.query is None:
        raise RequestError("query is missing; send a text", parameter="query")
    if body.top_n is not None and body.top_n < 0:
        raise RequestError(f"top_n is {body.top_n}; send 0 or more", parameter="top_n")
    documents = body.texts if body.documents is None else body.documents
    if not documents:
        raise RequestError("documents is missing or empty; send texts", parameter="documents")
    return documents


def written(body: RerankBody, found: Sequence[Classification], *, n_tokens: int, model: str) -> Any:
    """The reply; a score that is not a number comes last, as null."""
    scores = [one.raw[0] for one in found]
    order = sorted(
        range(len(scores)), key=lambda i: math.inf if math.isnan(scores[i]) else -scores[i]
    )
    order = order[: body.top_n]
    if body.texts is not None:
        texts = body.texts if body.return_text else None
        return [TeiResult(i, scores[i], texts[i] if texts else UNSET) for i in order]
    return Reranked(
        model=model if body.model is None else body.model,
        usage=RerankUsage(n_tokens, n_tokens),
        results=[JinaResult(i, scores[i]) for i in order],
    )


async def rerank(call: Call, body: RerankBody) -> HttpReply:
    """Documents by how well they answer the query."""
    service = call.service
    if call.model.engine.pooling != "rank":
        raise NotSupported(
            f"{call.model.name} is not served as a reranker; serve one, with --pooling rank if "
            "its file does not say"
        )
    documents = documents_of(body)
    n_characters = sum(map(len, documents)) + len(documents) * len(body.query or "")
    call.hold.take(_ID_BYTES * n_characters + _RESULT_BYTES * len(documents))
    ids = await service.converted(
        n_characters, call.hold, _ids_of_pairs, call.model.engine, body.query, documents
    )
    async with service.working(call.model, call.caller) as engine:
        model = call.model.name
        try:
            found = await engine.aclassify(ids)
        except RequestError as error:
            raise renamed(error, {"texts": "documents"}) from None
    reply = written(body, found, n_tokens=sum(map(len, ids)), model=model)
    return HttpReply(msgspec.json.encode(reply))


def _ids_of_pairs(engine: Engine, query: str, documents: Sequence[str]) -> list[list[int]]:
    try:
        return [engine.pair_ids(query, document) for document in documents]
    except RequestError as error:
        raise renamed(error, {"texts": "documents"}) from None
