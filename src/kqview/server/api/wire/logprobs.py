"""Logprobs as KoboldAI's and OpenAI's clients expect them. Pure."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import Struct

from kqview.server.models.run import TokenLogprobs
from kqview.server.web.described import about

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


class Logprobs(Struct, kw_only=True):
    """Logprobs of a generation as KoboldCpp sends them, in both of OpenAI's forms."""

    content: Annotated[
        list[TokenLogprob],
        about("Each token with those that could have been, as in chat completions."),
    ]
    tokens: Annotated[list[str], about("Text of each token.", [" a"])]
    token_logprobs: Annotated[list[float], about("Logprob of each.", [-0.6])]
    top_logprobs: Annotated[
        list[dict[str, float]],
        about(
            "The most probable tokens at each place by their texts.", [{" a": -0.6, " the": -1.5}]
        ),
    ]
    text_offset: Annotated[
        list[int], about("Character of the text at which each token begins.", [0])
    ]


def logprobs_of(
    tokens: Sequence[TokenLogprobs], bytes_of: Callable[[int], bytes]
) -> Logprobs | None:
    """Logprobs of a generation's tokens; None if none were asked for."""
    if not tokens:
        return None
    content = [token_logprob(one, bytes_of) for one in tokens]
    ends = accumulate((len(one.token) for one in content), initial=0)
    return Logprobs(
        content=content,
        tokens=[one.token for one in content],
        token_logprobs=[one.logprob for one in content],
        top_logprobs=[{top.token: top.logprob for top in one.top_logprobs} for one in content],
        text_offset=list(ends)[:-1],
    )


class LogprobsWriter:
    """`logprobs_of` while the tokens come; keeps the bytes of the reply, no objects."""

    def __init__(self, *, packs: bool) -> None:
        """Write JSON, or MessagePack if *packs*."""
        self._encode = msgspec.msgpack.encode if packs else msgspec.json.encode
        self._lists: dict[str, Any] = {name: [] for name in Logprobs.__struct_fields__}
        self._offset = 0

    def add(self, one: TokenLogprobs, bytes_of: Callable[[int], bytes]) -> int:
        """Write one token's logprobs; returns their size in bytes."""
        found = cast("Logprobs", logprobs_of([one], bytes_of))
        found.text_offset[0] = self._offset
        self._offset += len(found.tokens[0])
        n_bytes = 0
        for name, elements in self._lists.items():
            elements.append(msgspec.Raw(self._encode(getattr(found, name)[0])))
            n_bytes += len(elements[-1])
        return n_bytes

    def whole(self) -> Logprobs | None:
        """What `logprobs_of` returns; the elements are encoded."""
        return Logprobs(**self._lists) if self._lists["tokens"] else None


def token_logprob(one: TokenLogprobs, bytes_of: Callable[[int], bytes]) -> TokenLogprob:
    """Logprobs of one token with the texts; *bytes_of* gives the bytes of an id."""

    def shown(id_: int, logprob: float) -> TopLogprob:
        data = bytes_of(id_)
        return TopLogprob(data.decode("utf-8", "replace"), logprob, list(data))

    chosen = shown(one.token_id, one.logprob)
    tops = [shown(*pair) for pair in one.top]
    return TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top_logprobs=tops)
