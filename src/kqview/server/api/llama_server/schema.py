"""Bodies of llama.cpp's server: typed requests and replies, field for field.

Unknown names are ignored.
"""

from typing import Annotated

import msgspec
from msgspec import Struct

# ---- text and ids

Texts = Annotated[list[int | str], msgspec.Meta(max_length=2**20)]


class TokenizeBody(Struct, kw_only=True):
    """Text to tokenize, or a list of ids and texts."""

    content: str | Texts | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class Piece(Struct):
    """A token and its text; its bytes where they are not UTF-8."""

    id: int
    piece: str | list[int]


class Tokenized(Struct):
    """Tokens of a text."""

    tokens: list[int | Piece]


class DetokenizeBody(Struct, kw_only=True):
    """Ids to turn into text."""

    tokens: list[int] | None = None


class Content(Struct):
    """A text."""

    content: str
