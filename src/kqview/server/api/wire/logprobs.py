"""Logprobs as KoboldAI's and OpenAI's clients expect them. Pure."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, Final

from msgspec import UNSET, Struct, UnsetType

from kqview.server.models.run import TokenLogprobs
from kqview.server.web.described import about
from kqview.stop_strings import TextStream
from kqview.types import Token

LOGPROB_BYTES: Final = 2048
"""About the size of the JSON of a token's logprobs, with as many as a run keeps."""


class TopLogprob(Struct):
    """A token that could have been chosen."""

    token: Annotated[str, about("Its text; U+FFFD for bytes that are not UTF-8.", " the")]
    logprob: Annotated[float, about("Its logprob before bias, grammar and samplers.", -1.5)]
    bytes: Annotated[list[int], about("Its bytes.", [32, 116, 104, 101])]


class TokenLogprob(TopLogprob, kw_only=True):
    """A token that was chosen, and those that could have been."""

    top_logprobs: Annotated[
        list[TopLogprob], about("The most probable tokens at its place, the most probable first.")
    ]


class TextLogprobs(Struct, kw_only=True):
    """Logprobs in OpenAI's older form, and in that of chat completions.

    Of a prompt that is echoed there is only the older form, with nulls for its first token."""

    content: Annotated[
        list[TokenLogprob] | UnsetType,
        about("Each token with those that could have been, as in chat completions."),
    ] = UNSET
    tokens: Annotated[list[str], about("Text of each token.", [" a"])]
    token_logprobs: Annotated[
        list[float | None], about("Logprob of each before bias, grammar and samplers.", [-0.6])
    ]
    top_logprobs: Annotated[
        list[dict[str, float] | None],
        about(
            "The most probable tokens at each place by their texts.", [{" a": -0.6, " the": -1.5}]
        ),
    ]
    text_offset: Annotated[
        list[int], about("Character of the text at which each token begins.", [0])
    ]


def logprobs_of(
    tokens: Sequence[TokenLogprobs], bytes_of: Callable[[int], bytes], offset: int = 0
) -> TextLogprobs:
    """Logprobs of *tokens*, of which the first begins at character *offset*."""
    content = [token_logprob(one, bytes_of) for one in tokens]
    stream = TextStream()
    lengths = (len(stream.feed(bytes_of(one.token_id))) for one in tokens)
    return TextLogprobs(
        content=content,
        tokens=[one.token for one in content],
        token_logprobs=[one.logprob for one in content],
        top_logprobs=[{top.token: top.logprob for top in one.top_logprobs} for one in content],
        text_offset=list(accumulate(lengths, initial=offset))[:-1],
    )


def token_logprob(one: TokenLogprobs, bytes_of: Callable[[int], bytes]) -> TokenLogprob:
    """Logprobs of one token with the texts; *bytes_of* gives the bytes of an id."""

    def shown(id_: int, logprob: float) -> tuple[str, float, list[int]]:
        data = bytes_of(id_)
        return data.decode("utf-8", "replace"), logprob, list(data)

    tops = [TopLogprob(*shown(*pair)) for pair in one.top]
    return TokenLogprob(*shown(one.token_id, one.logprob), top_logprobs=tops)


def of_token(token: Token) -> TokenLogprobs | None:
    """The logprobs that *token* has; None if none were asked for."""
    if token.logprob is None:
        return None
    return TokenLogprobs(token.id, token.logprob, tuple(token.top_logprobs or ()))
