"""Events: what a mod sees of its request: Prefilled, then ForwardPass, Sampled and Added per step.

Each has the ``request_id`` of its generation and a ``step``. Prefilled comes once, as step 0. Steps
count from 1; each is one forward pass. All mods of a request get the same event, except that a
ForwardPass has the logits as earlier mods have adjusted them. Arrays are read-only and stay valid
for as long as they are held.
"""

import contextlib
from collections.abc import Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kqview import _core
from kqview.arguments import whole_number
from kqview.types.token import Attention, Positions


@dataclass(frozen=True, slots=True, eq=False)
class Dialogue:
    """The messages of a chat, and the tools that it offers; None for no tools."""

    messages: Sequence[Any]
    tools: Sequence[Any] | None = None


current_dialogue: Final[ContextVar[Dialogue | None]] = ContextVar("kqview_dialogue", default=None)


@contextlib.contextmanager
def conversation_of(dialogue: Dialogue | None) -> Generator[None]:
    """Give requests made inside the context this chat, for ``context_info``; None for no chat."""
    token = current_dialogue.set(dialogue)
    try:
        yield
    finally:
        current_dialogue.reset(token)


@dataclass(frozen=True, slots=True, eq=False)
class ContextInfo:
    """The prompt of a request.

    Attributes:
        tokens: Ids of the prompt, int32 of shape ``(n_tokens,)``, read-only.
        messages: The conversation, if the request is a chat; otherwise None.
        tools: The tools that the chat offers; None without any.
    """

    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    messages: Sequence[Any] | None = None
    tools: Sequence[Any] | None = None

    @property
    def _prompt_len(self) -> int:
        # Mods of the public kit read the prompt as tokens[:_prompt_len].
        return len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """The prompt is known but not evaluated yet: a mod may still change it.

    Attributes:
        max_steps: Maximum number of tokens to generate.
        context_info: The prompt.
    """

    request_id: str
    step: int
    max_steps: int
    context_info: ContextInfo = field(default_factory=ContextInfo)

    @property
    def prompt_ids(self) -> list[int]:
        """Ids of the prompt."""
        return self.context_info.tokens.tolist()


@dataclass(frozen=True, slots=True, eq=False)
class ForwardPass:
    """The model has computed the logits of the next token.

    Attributes:
        logits: The model's raw logits, as adjusted by earlier mods, float32 of shape
            ``(n_vocab,)``.
        n_tokens: Number of tokens before the next one: prompt plus generated tokens.
        attention: The row of the query that computed the logits, as ``Token.attention``; None
            without capture.
        attention_positions: As ``Token.attention_positions``.
        hidden: As ``Token.hidden``.
    """

    request_id: str
    step: int
    logits: NDArray[np.float32]
    n_tokens: int = 0
    attention: Attention | None = None
    attention_positions: Positions | None = None
    hidden: NDArray[np.floating[Any]] | None = None

    def top_k_logprob(self, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the *k* largest log-probabilities and their ids, both of shape ``(1, k)``.

        Best first; of equal logits the lower id comes first. If the vocabulary is smaller than *k*,
        all of it is returned.

        Raises:
            RequestError: *k* is not a whole number of at least 1.
        """
        k = min(whole_number("k", k), self.logits.size)
        best, _ = _core.outlook(self.logits, k)
        n_masked = k - len(best)
        if n_masked:
            masked = np.flatnonzero(self.logits == -np.inf)[:n_masked].tolist()
            best += [(id_, -np.inf) for id_ in masked]
        ids, logprobs = zip(*best, strict=True)
        return np.array([logprobs], np.float32), np.array([ids], np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """A token was sampled; it is not part of the text yet.

    Attributes:
        sampled_token: Id of the token.
    """

    request_id: str
    step: int
    sampled_token: int


@dataclass(frozen=True, slots=True, eq=False)
class Added:
    """Tokens were added to the text.

    Attributes:
        added_tokens: Ids of the tokens: the sampled one, or those that a mod put in its place.
        forced: Whether a mod chose them.
    """

    request_id: str
    step: int
    added_tokens: list[int]
    forced: bool


Event = Prefilled | ForwardPass | Sampled | Added


@dataclass(frozen=True, slots=True, eq=False)
class RequestEnd:
    """How a request ended, for the end-of-request hook of a mod.

    Attributes:
        request_id: The ``request_id`` of the generation.
        finish_reason: The ``finish_reason`` of the generation.
        ids: Ids of the final text.
        error: What iterating raised, if finish_reason is "error".
    """

    request_id: str
    finish_reason: str
    ids: tuple[int, ...] = ()
    error: BaseException | None = None
