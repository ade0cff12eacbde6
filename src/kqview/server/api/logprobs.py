"""Logprobs of a generation as KoboldCpp sends them; both attention protocols have them. Pure."""

from collections.abc import Callable, Sequence
from itertools import accumulate

from msgspec import Struct

from kqview.server.run import TokenLogprobs


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
