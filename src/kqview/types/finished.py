"""Finished: a generation that has ended, with its tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic

from kqview.errors import KqviewError
from kqview.types.json_schema import Parsed, parsed
from kqview.types.model import ModelInfo
from kqview.types.reply import Reply
from kqview.types.stats import FinishReason, Usage
from kqview.types.token import Token

_N_SHOWN: Final = 60
"""Most characters of the text in a repr."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Finished(Generic[Parsed]):
    """One result of `Engine.map`; `kqview.save` stores it.

    Holding it keeps the attention of its tokens in memory.

    Attributes:
        id: Key of the prompt in a mapping, or its number in another iterable, as text.
        prompt_ids: Ids of the prompt.
        tokens: The generated tokens.
        text: The generated text, up to the stop sequence if one was found.
        finish_reason: As `Generation.finish_reason`.
        usage: Token counts and seconds.
        model: Facts about the model.
        error: With ``on_error="return"``: what ended the generation early; otherwise None.
        fingerprint: Computes the fingerprint of the model's files; reads them once per process.
        reply: As `Generation.reply`.
        schema: Text of the ``json_schema``, None without one.
        prompt_key: Digest of the prompt as it was given, by which `Engine.map` finds it again.
    """

    id: str
    prompt_ids: list[int]
    tokens: list[Token]
    text: str
    finish_reason: FinishReason | None
    usage: Usage
    model: ModelInfo
    error: KqviewError | None = None
    fingerprint: Callable[[], str] = str
    reply: Reply = field(default=Reply(""))
    schema: str | None = None
    prompt_key: str | None = None

    @property
    def parsed(self) -> Parsed:
        """The value that ``json_schema`` describes; see `Generation.parsed`."""
        return parsed(self.schema, self.reply.content, self.finish_reason)

    def __repr__(self) -> str:
        """One line, for a list of results in a notebook; the attributes have the rest."""
        text = self.text if len(self.text) <= _N_SHOWN else f"{self.text[:_N_SHOWN]}..."
        error = "" if self.error is None else f", error={self.error!r}"
        return (
            f"Finished(id={self.id!r}, text={text!r}, n_tokens={len(self.tokens)}, "
            f"finish_reason={self.finish_reason!r}{error})"
        )
