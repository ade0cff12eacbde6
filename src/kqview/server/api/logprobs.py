"""Logprobs of a generation as KoboldCpp sends them; both attention protocols have them. Pure."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

import msgspec
from msgspec import Struct

from kqview.server.run import TokenLogprobs
from kqview.server.wire import with_lists

LOGPROB_BYTES: Final = 2048
"""About what the JSON of a token's logprobs takes where there are as many as a run keeps."""


class TopLogprob(Struct):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, kw_only=True):
    """A token that was chosen, beside those that could have been."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Logprobs(Struct, kw_only=True):
    """Logprobs of a generation, in both of OpenAI's forms."""

    content: list[TokenLogprob]
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def logprobs_of(
    tokens: Sequence[TokenLogprobs], bytes_of: Callable[[int], bytes]
) -> Logprobs | None:
    """Logprobs of a generation's tokens; None where none were asked for."""
    if not tokens:
        return None
    content = [_logprob(one, bytes_of) for one in tokens]
    ends = accumulate((len(one.token) for one in content), initial=0)
    return Logprobs(
        content=content,
        tokens=[one.token for one in content],
        token_logprobs=[one.logprob for one in content],
        top_logprobs=[{top.token: top.logprob for top in one.top_logprobs} for one in content],
        text_offset=list(ends)[:-1],
    )


class LogprobsWriter:
    """`logprobs_of` while the tokens come: what is kept are the bytes of the reply, no objects."""

    def __init__(self, *, packs: bool) -> None:
        """Write JSON, or MessagePack where it *packs*."""
        self._packs = packs
        self._encode = msgspec.msgpack.encode if packs else msgspec.json.encode
        self._lists: dict[str, list[bytes]] = {name: [] for name in Logprobs.__struct_fields__}
        self._offset = 0

    def add(self, one: TokenLogprobs, bytes_of: Callable[[int], bytes]) -> int:
        """Write one token's; how many bytes that are."""
        content = _logprob(one, bytes_of)
        values = {
            "content": content,
            "tokens": content.token,
            "token_logprobs": one.logprob,
            "top_logprobs": {top.token: top.logprob for top in content.top_logprobs},
            "text_offset": self._offset,
        }
        self._offset += len(content.token)
        n_bytes = 0
        for name, value in values.items():
            encoded = self._encode(value)
            self._lists[name].append(encoded)
            n_bytes += len(encoded)
        return n_bytes

    def whole(self) -> msgspec.Raw | None:
        """What `logprobs_of` would give, encoded."""
        if not self._lists["tokens"]:
            return None
        return msgspec.Raw(with_lists({}, [*self._lists.items()], packs=self._packs))


def _logprob(one: TokenLogprobs, bytes_of: Callable[[int], bytes]) -> TokenLogprob:
    def written(id_: int) -> tuple[str, list[int]]:
        data = bytes_of(id_)
        return data.decode("utf-8", "replace"), list(data)

    def top(id_: int, logprob: float) -> TopLogprob:
        text, data = written(id_)
        return TopLogprob(text, logprob, data)

    text, data = written(one.token_id)
    return TokenLogprob(
        token=text, logprob=one.logprob, bytes=data, top_logprobs=[top(*pair) for pair in one.top]
    )
