"""Embeddings: bodies, handler, and what normalizing means to llama.cpp's server."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kqview.errors import RequestError
from kqview.server.api.wire.prompts import Parts, ids_of_each, prompts_of
from kqview.server.errors import NotSupported, renamed
from kqview.server.models.service import Call
from kqview.server.web.described import about
from kqview.server.web.endpoint import HttpReply

Vectors = NDArray[np.float32]

_NUMBER_BYTES: Final = 64  # a float in a list, and its text
_SHORT_MAX: Final = 32760  # to which llama.cpp scales the largest number of 16 bits
_EUCLID: Final = 2


class EmbeddingBody(Struct, kw_only=True):
    """Texts to embed, in any form of a prompt."""

    input: Annotated[
        str | dict[str, Any] | list[Any] | None,
        about(
            'A text, ids, {"content": [{"type": "text", "text": "Anna"}]}, or a list of these.',
            "Anna is a teacher.",
        ),
    ] = None
    content: Annotated[
        str | dict[str, Any] | list[Any] | None,
        about("Another name for ``input``.", "Anna is a teacher."),
    ] = None
    model: Annotated[
        str | None, about("Id of a configured model; the default model if not given.", "demo")
    ] = None
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


def texts_of(body: EmbeddingBody) -> list[Parts]:
    """What to embed.

    Raises:
        RequestError: There is nothing.
    """
    name = "content" if body.input is None else "input"
    given = getattr(body, name)
    if given is None:
        raise RequestError("there is neither input nor content; send one", parameter="input")
    return prompts_of(name, given)


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


def written(found: Sequence[Vectors], kind: int, *, per_token: bool) -> bytes:
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
    pooling = call.model.engine.pooling
    if pooling is None or pooling == "rank":
        raise NotSupported(
            f"{call.model.name} gives no embeddings as it is served; serve an embedding model, "
            "or start the server with --pooling mean"
        )
    ids = await ids_of_each(call, partial(texts_of, body))
    per_token = pooling == "none"
    n_vectors = sum(map(len, ids)) if per_token else len(ids)
    n_bytes = _NUMBER_BYTES * call.model.engine.model.n_embd * n_vectors
    call.hold.take(n_bytes)
    async with service.working(call.model, call.caller) as engine:
        try:
            found = await engine.aembed(ids, normalize=False)
        except RequestError as error:
            raise renamed(error, {"texts": "input"}) from None
    kind = _EUCLID if body.embd_normalize is None else body.embd_normalize
    vectors: Sequence[Vectors] = list(found)
    return HttpReply(
        await service.converted(n_bytes, call.hold, written, vectors, kind, per_token=per_token)
    )
