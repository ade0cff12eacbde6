"""Bodies of llama.cpp's server as neutral requests, and results as its replies. Pure."""

from collections.abc import Callable, Sequence

from kqview.server.api.llama_server import schema


def tokenized(
    ids: Sequence[int], bytes_of: Callable[[int], bytes], *, with_pieces: bool
) -> schema.Tokenized:
    """The reply to a request to tokenize."""
    if not with_pieces:
        return schema.Tokenized(list(ids))
    return schema.Tokenized([schema.Piece(id_, _piece(bytes_of(id_))) for id_ in ids])


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
