"""Parts of kept rows, models in Ollama's form, and vectors as a reply of OpenAI's API. Pure."""

import re
from typing import Final

import numpy as np
import pybase64
from numpy.typing import NDArray

from kqview.errors import RequestError
from kqview.server.api.openai import schema

_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


# ---- attention that is kept


def byte_range(header: str, n_bytes: int) -> tuple[int, int] | None:
    """Start and end of what a ``Range`` header asks for; None for everything.

    Other units and several ranges at once are everything, as RFC 9110 allows.

    Raises:
        IndexError: There is no such byte.
    """
    asked = _RANGE.fullmatch(header.strip())
    if asked is None or asked.group(1, 2) == ("", ""):
        return None
    first_, last = asked.group(1, 2)
    if not first_:  # the last bytes
        start, end = max(0, n_bytes - int(last)), n_bytes
    else:
        start, end = int(first_), min(int(last) + 1 if last else n_bytes, n_bytes)
        if last and int(last) < start:
            return None
    if start >= end:
        raise IndexError
    return start, end


# ---- models and embeddings


def in_ollamas_form(model: schema.Model) -> schema.Object:
    """What Ollama would say of *model*."""
    family, kind = (model.meta.architecture, model.meta.ftype) if model.meta else ("", "")
    return {
        "name": model.id, "model": model.id, "modified_at": "", "size": "", "digest": "",
        "type": "model", "description": "", "tags": [""], "capabilities": ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "", "format": "gguf", "family": family,
            "families": [family], "parameter_size": "", "quantization_level": kind,
        },
    }  # fmt: skip


def embeddings_of(
    vectors: NDArray[np.float32], *, n_tokens: int, model: str, body: schema.EmbeddingsBody
) -> schema.Embeddings:
    """The reply with *vectors*, ``(n_texts, n_embd)``, each of length 1.

    With ``dimensions`` the vectors are cut and scaled to length 1 again, as OpenAI does.

    Raises:
        RequestError: ``dimensions`` is out of range.
    """
    n = body.dimensions
    if n is not None:
        if not 1 <= n <= vectors.shape[-1]:
            raise RequestError(
                f"dimensions is {n}, this model's vectors have {vectors.shape[-1]}; ask for fewer",
                parameter="dimensions",
            )
        vectors = vectors[:, :n].copy()
        lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
        vectors /= np.where(lengths > 0, lengths, 1)
    rows = np.ascontiguousarray(vectors, "<f4")
    is_base64 = body.encoding_format == "base64"
    data = [
        schema.Embedding(
            index=i,
            embedding=pybase64.b64encode(row.tobytes()).decode() if is_base64 else row.tolist(),
        )
        for i, row in enumerate(rows)
    ]
    usage = schema.TextsUsage(n_tokens, n_tokens)
    return schema.Embeddings(model=model, data=data, usage=usage)
