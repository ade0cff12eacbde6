"""Models that pool: embeddings, reranking (in the forms of Jina and of TEI), classification."""

import contextlib
import math
import uuid
from collections.abc import AsyncGenerator, Generator, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType
from numpy.typing import NDArray

from kqview.engine import Engine
from kqview.errors import HeadFileError, RequestError
from kqview.guards import rerank as rerank_by_attention
from kqview.server.api.wire.citations import heads_of
from kqview.server.api.wire.fields import ModelField
from kqview.server.api.wire.prompts import TEXTS, TextsUsage, ids_of_each, pooling_of, prompts_of
from kqview.server.errors import NotSupported, renamed
from kqview.server.models.service import Call
from kqview.server.models.texts import ID_BYTES
from kqview.server.web.described import about
from kqview.server.web.endpoint import HttpReply, json_in_slices, warned
from kqview.types import Classification

Vectors = NDArray[np.float32]
ModelName = Annotated[str, about("The model, as the request names it.", "demo")]
Score = Annotated[
    float,
    about(
        "How well it answers the query; the larger, the better. Null where it is not a number.", 3.5
    ),
]
AlwaysList = Annotated[str, about('Always "list".', "list")]

_NUMBER_BYTES: Final = 64  # a float in a list, and its text
_RESULT_BYTES: Final = 256  # an object with a label or an index and a number, and its JSON
_SHORT_MAX: Final = 32760  # to which llama.cpp scales the largest number of 16 bits
_EUCLID: Final = 2


def best_first(scores: Sequence[float]) -> list[int]:
    """Places of *scores* by falling value; NaN last, equal ones in their order."""
    keys = [math.inf if math.isnan(one) else -one for one in scores]
    return sorted(range(len(scores)), key=keys.__getitem__)


@contextlib.contextmanager
def _naming(field: str) -> Generator[None]:
    """Errors about texts name the request's *field*."""
    try:
        yield
    except RequestError as error:
        raise renamed(error, {"texts": field}) from None


@contextlib.asynccontextmanager
async def _engine(call: Call, field: str) -> AsyncGenerator[Engine]:
    """The engine, for work on the texts of *field*."""
    async with call.service.working(call.model, call.caller) as engine:
        with _naming(field):
            yield engine


# ---- embeddings


class EmbeddingBody(Struct, kw_only=True):
    """Texts to embed, in any form of a prompt."""

    input: Annotated[str | dict[str, Any] | list[Any] | None, TEXTS] = None
    content: Annotated[
        str | dict[str, Any] | list[Any] | None,
        about("Another name for ``input``.", "Anna is a teacher."),
    ] = None
    model: ModelField = None
    embd_normalize: Annotated[
        Annotated[int, msgspec.Meta(ge=-1, le=64)] | None,
        about(
            "Norm that vectors are divided by: 2 if not given, which is the Euclidean one; 1 "
            "for taxicab, others for p-norms; -1 leaves them; 0 scales the largest number to 16 "
            "bits.",
            default=2,
        ),
    ] = None


class Embedded(Struct):
    """Vectors of a text: one, or with pooling "none" one for each token."""

    index: Annotated[int, about("Of the text, from 0.", 0)]
    embedding: Annotated[list[list[float]], about("Vectors of the text.", [[0.6, -0.8]])]


def normalized(vectors: Vectors, kind: int) -> Vectors:
    """*vectors* as ``embd_normalize`` says.

    Args:
        vectors: One a row, ``(n, n_embd)``.
        kind: -1 leaves them; 0 makes the largest number that of 16 bits; others divide by the norm
            of this order: 1 for taxicab, 2 for Euclid.
    """
    if kind < 0:
        return vectors
    values = vectors.astype(np.float64)
    if kind == 0:
        length = np.abs(values).max(axis=-1, keepdims=True) / _SHORT_MAX
    else:
        length = np.linalg.norm(values, ord=kind, axis=-1, keepdims=True)
    return (values / np.where(length > 0, length, 1)).astype(np.float32)


def vectors_as_json(found: Sequence[Vectors], kind: int, *, per_token: bool) -> bytes:
    """JSON of the vectors of each text; those of single tokens are not normalized."""
    kind = -1 if per_token else kind
    texts = [
        Embedded(i, normalized(np.atleast_2d(vectors), kind).tolist())
        for i, vectors in enumerate(found)
    ]
    return b"[" + b",".join(map(msgspec.json.encode, texts)) + b"]"


async def embed(call: Call, body: EmbeddingBody) -> HttpReply:
    """A vector for each text, or one for each of its tokens."""
    service = call.service
    per_token = pooling_of(call) == "none"
    name = "content" if body.input is None else "input"
    given = getattr(body, name)
    if given is None:
        raise RequestError("there is neither input nor content; send one", parameter="input")
    ids = await ids_of_each(call, partial(prompts_of, name, given))
    n_vectors = sum(map(len, ids)) if per_token else len(ids)
    n_bytes = _NUMBER_BYTES * call.model.engine.model.n_embd * n_vectors
    call.hold.take(n_bytes)
    async with _engine(call, "input") as engine:
        found = await engine.aembed(ids, normalize=False)
    kind = _EUCLID if body.embd_normalize is None else body.embd_normalize
    vectors: Sequence[Vectors] = list(found)
    return HttpReply(
        await service.converted(
            n_bytes, call.hold, vectors_as_json, vectors, kind, per_token=per_token
        )
    )


# ---- reranking

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
        bool | None, about("With ``texts``: whether the reply repeats them.", default=False)
    ] = None
    method: Annotated[
        Literal["head", "attention"] | None,
        about(
            'With "attention", a model that generates text ranks by where its attention goes; '
            "experimental without a head file. By the model's classifier head if not given.",
            default="head",
        ),
    ] = None
    heads: Annotated[
        dict[str, Any] | None,
        about(
            'With "attention": the head file, as kqview calibrate rerank writes it. If not given, '
            "the server's counts, or else all heads alike.",
            {"params": {"important_heads": [[1, 1], [1, 3]]}},
        ),
    ] = None
    permutations: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=64)] | None,
        about(
            'With "attention": orders of the documents over which scores are averaged, each at the '
            "cost of one.",
            default=1,
        ),
    ] = None
    model: ModelField = None


class JinaResult(Struct):
    """A document and its score."""

    index: Annotated[int, about("Of the document, from 0.", 0)]
    relevance_score: Score


class TeiResult(Struct):
    """A text and its score."""

    index: Annotated[int, about("Of the text, from 0.", 0)]
    score: Score
    text: Annotated[str | UnsetType, about("The text, if asked for.", "Anna is a teacher.")] = UNSET


class Reranked(Struct, kw_only=True):
    """Documents, the best first."""

    model: ModelName
    object: AlwaysList = "list"
    usage: Annotated[TextsUsage, about("Tokens of the request.")]
    results: Annotated[list[JinaResult], about("Documents by falling score.")]


def ranked(body: RerankBody, scores: Sequence[float], *, n_tokens: int, model: str) -> Any:
    """The reply; a score that is not a number comes last, as null."""
    order = best_first(scores)[: body.top_n]
    if body.texts is not None:
        texts = body.texts if body.return_text else None
        return [TeiResult(i, scores[i], texts[i] if texts else UNSET) for i in order]
    return Reranked(
        model=model if body.model is None else body.model,
        usage=TextsUsage(n_tokens, n_tokens),
        results=[JinaResult(i, scores[i]) for i in order],
    )


async def rerank(call: Call, body: RerankBody) -> HttpReply:
    """Documents by how well they answer the query."""
    by_attention = body.method == "attention"
    if not by_attention and call.model.engine.pooling != "rank":
        raise NotSupported(
            f"{call.model.name} is not served as a reranker; serve one, with --pooling rank if "
            'its file does not say, or send "method": "attention" for a model that generates text'
        )
    if body.query is None:
        raise RequestError("query is missing; send a text", parameter="query")
    if body.top_n is not None and body.top_n < 0:
        raise RequestError(f"top_n is {body.top_n}; send 0 or more", parameter="top_n")
    documents = body.texts if body.documents is None else body.documents
    if not documents:
        raise RequestError("documents is missing or empty; send texts", parameter="documents")
    n_characters = sum(map(len, documents)) + len(documents) * len(body.query)
    call.hold.take(ID_BYTES * n_characters + _RESULT_BYTES * len(documents))
    rank = _scores_by_attention if by_attention else _scores_of_head
    scores, n_tokens, warning = await rank(call, body, body.query, documents, n_characters)
    reply = ranked(body, scores, n_tokens=n_tokens, model=call.model.name)
    return HttpReply(msgspec.json.encode(reply), headers=warned(warning))


async def _scores_of_head(
    call: Call, body: RerankBody, query: str, documents: Sequence[str], n_characters: int
) -> tuple[list[float], int, None]:
    """Scores, number of tokens and warning, by the model's classifier head."""
    pair_ids = call.model.engine.pair_ids
    with _naming("documents"):
        ids = await call.service.converted(
            n_characters, call.hold, lambda: [pair_ids(query, one) for one in documents]
        )
    async with _engine(call, "documents") as engine:
        found = await engine.aclassify(ids)
    return [one.raw[0] for one in found], sum(map(len, ids)), None


async def _scores_by_attention(
    call: Call, body: RerankBody, query: str, documents: Sequence[str], n_characters: int
) -> tuple[list[float], int, str | None]:
    """The same by attention, in a thread, whose prompts end with the request."""
    name = f"rerank-{uuid.uuid4().hex}"
    heads = heads_of(
        body.heads, call.model.engine, call.service.settings, task="rerank", name="heads"
    )

    def work(engine: Engine) -> tuple[list[float], int, str | None]:
        n_tokens = sum(len(engine.tokenize(one)) for one in (query, *documents))
        try:
            found = rerank_by_attention(
                engine, query, documents, heads,
                permutations=body.permutations or 1, request_id=name,
            )  # fmt: skip
        except HeadFileError as error:
            raise RequestError(str(error), parameter="heads") from None
        return found, n_tokens, heads and heads.doubt(engine.model, engine.fingerprint())

    async with _engine(call, "documents") as engine:
        return await call.service.prompting(engine, name, work, engine)


# ---- classification


class ClassifyBody(Struct, kw_only=True):
    """A text to classify, or a list of them."""

    inputs: Annotated[str | list[str], about("A text, or a list of them.", "I like it.")]
    model: ModelField = None


class Prediction(Struct):
    """A label, and the classifier's raw value for it."""

    label: Annotated[str, about("Its name.", "positive")]
    score: Annotated[float, about("The raw value; null where it is not a number.", 2.5)]


class Classified(Struct, kw_only=True):
    """Labels by falling score: one list for a text, a list of lists for a list of texts."""

    model: ModelName
    object: AlwaysList = "list"
    usage: Annotated[TextsUsage, about("Tokens of the request.")]
    predictions: Annotated[
        list[Prediction | list[Prediction]],
        about(
            "Labels by falling score; a list of them for each text where a list was sent.",
            [{"label": "positive", "score": 2.5}],
        ),
    ]


def predictions_of(result: Classification) -> list[Prediction]:
    """Every label with its raw value, the largest first; NaN last, equal ones as in the model."""
    labels, raw = [*result.scores], result.raw
    return [Prediction(labels[i], raw[i]) for i in best_first(raw)]


async def classify(call: Call, body: ClassifyBody) -> HttpReply:
    """Scores of the labels of each text. Texts cannot contain special tokens."""
    service = call.service
    engine = call.model.engine
    if engine.pooling != "rank" or engine.n_classes < 2:
        raise NotSupported(
            f"{call.model.name} is not a classifier with two or more labels; serve one that is, "
            "such as a file that kqview convert-classifier wrote"
        )
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not texts:
        raise RequestError("inputs is empty; send at least one text", parameter="inputs")
    n_bytes = _RESULT_BYTES * engine.n_classes * len(texts)
    call.hold.take(n_bytes)
    ids = await call.model.texts.ids_of_each(texts, hold=call.hold)
    n_tokens = sum(map(len, ids))
    async with _engine(call, "inputs") as engine:
        model = call.model.name
        is_one = isinstance(body.inputs, str)
        results = [await engine.aclassify(ids[0])] if is_one else await engine.aclassify(ids)

    def written() -> bytes:
        predictions = [predictions_of(one) for one in results]
        reply = Classified(
            model=model if body.model is None else body.model,
            usage=TextsUsage(n_tokens, n_tokens),
            predictions=[*predictions[0]] if isinstance(body.inputs, str) else [*predictions],
        )
        return json_in_slices(reply)

    return HttpReply(await service.converted(n_bytes, call.hold, written))
