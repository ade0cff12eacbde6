"""ReasoningCap: ends an answer's reasoning after a number of tokens, so that the answer begins.

It reads the tokens of a text as they are generated (`Engine.generate`'s ``forcing``) and, once they
have as many of reasoning, adds those of the mark that closes it. The answer thus has the mark like
one that the model wrote itself, whatever API reads it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kqview.chat.reasoning import Split, TokenCounter
from kqview.chat.turn import opened_by
from kqview.engine import Engine
from kqview.errors import RequestError
from kqview.server.settings import Settings
from kqview.stop_strings import TextStream
from kqview.types import Sampling

_MOST_WAITS: Final = 3  # tokens for the rest of a character, which has at most four bytes
_MOST_FAILURES: Final = 3  # of a closing mark that the vocabulary cannot write


@dataclass(frozen=True, slots=True)
class ReasoningCap:
    """How much reasoning there may be; called with an engine, the ``forcing`` of one text.

    Attributes:
        split: How the answer marks its reasoning.
        most: Most tokens of reasoning in all its parts, marks aside.
    """

    split: Split
    most: int

    def __call__(self, engine: Engine) -> "CapForcing":
        """For one text of *engine*."""

        def tokenize(text: str) -> list[int]:
            return engine.tokenize(text, add_special=False, parse_special=True)

        return CapForcing(self, tokenize, engine.token_bytes)


def default_budget(sampling: Sampling, settings: Settings) -> int | None:
    """The server's limit of reasoning; None for a request with a grammar of its own."""
    return settings.reasoning_budget if _grammar_of(sampling) is None else None


def _grammar_of(sampling: Sampling) -> str | None:
    """The option of *sampling* that decides what may follow, None without one."""
    names = ("grammar", "json_schema", "regex")
    return next((name for name in names if getattr(sampling, name) is not None), None)


def cap_of(
    most: int,
    split: Split,
    sampling: Sampling,
    *,
    max_tokens: int,
    names: Mapping[str, str],
) -> ReasoningCap | None:
    """A limit for the reasoning of a request, None if it cannot be reached.

    Args:
        most: Most tokens of reasoning.
        split: How the answer marks its reasoning.
        sampling: As the client wants it, without a grammar that knows of the reasoning.
        max_tokens: Most tokens of the answer and its reasoning.
        names: As in GenerateRequest.

    Raises:
        RequestError: The client's own grammar decides what follows.
    """
    if split.mode == "none" or most >= max_tokens:
        return None
    name = _grammar_of(sampling)
    if name is not None:
        raise _refused(
            f"cannot be combined with {names.get(name, name)}, which may not allow the mark that "
            "ends the reasoning; send one of them",
            names,
        )
    return ReasoningCap(split, most)


def cap_of_texts(
    most: int,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    max_tokens: int,
    names: Mapping[str, str],
) -> ReasoningCap | None:
    """The same for *prompts* that are continued as they are; reasoning is ``<think>`` and its like.

    Raises:
        RequestError: As `cap_of`, or only some of the prompts open reasoning.
    """
    opened = {opened_by(prompt) for prompt in prompts}
    if len(opened) > 1:
        raise _refused(
            "needs prompts that all end with the same opening mark of reasoning, or none that "
            "does; send them apart",
            names,
        )
    return cap_of(most, Split(opened=opened.pop()), sampling, max_tokens=max_tokens, names=names)


def _refused(why: str, names: Mapping[str, str]) -> RequestError:
    name = names.get("reasoning_budget", "reasoning_budget")
    return RequestError(f"{name} {why}", parameter=name)


class CapForcing:
    """Counts the reasoning of one text, and closes it; belongs to its consumer."""

    def __init__(
        self,
        cap: ReasoningCap,
        tokenize: Callable[[str], list[int]],
        token_bytes: Callable[[int], bytes],
    ) -> None:
        """*tokenize* reads marks as control tokens where the model has them."""
        self._cap = cap
        self._tokenize = tokenize
        self._bytes = token_bytes
        self._n_failures = 0
        self._begin()

    def _begin(self) -> None:
        self._splitter = self._cap.split.splitter()
        self._counter = TokenCounter()
        self._text = TextStream()
        self._n_read = 0
        self._n_waits = 0

    def __call__(self, kept: Sequence[int], added: Sequence[int]) -> Sequence[int]:
        """As `Engine.generate`'s ``forcing``."""
        if len(kept) != self._n_read:  # mods took tokens back
            self._begin()
            self._read(kept)
        self._read(added)
        closing = self._splitter.closing
        if closing is None or not self._is_due():
            return ()
        ids = self._tokenize(closing)
        self._read(ids)
        if self._splitter.closing is not None:
            self._n_failures += 1
        return ids

    def _read(self, ids: Sequence[int]) -> None:
        self._n_read += len(ids)
        for id_ in ids:
            text = self._text.feed(self._bytes(id_))
            self._counter.add(text)
            self._counter.classify(self._splitter.feed(text))

    def _is_due(self) -> bool:
        """Whether there is as much reasoning as there may be, and no character is cut."""
        n = self._counter.n_reasoning + self._counter.n_waiting
        if n < self._cap.most or self._n_failures >= _MOST_FAILURES:
            return False
        is_whole = not self._text.mark().decoder[0]
        if not is_whole and self._n_waits < _MOST_WAITS:
            self._n_waits += 1
            return False
        self._n_waits = 0
        return True
