"""Finished: a generation that has ended, with its tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kqview.errors import KqviewError
from kqview.types.json_schema import parsed
from kqview.types.model import ModelInfo
from kqview.types.reply import Reply
from kqview.types.stats import FinishReason, Usage
from kqview.types.token import Token


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
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
    fingerprint: Callable[[], str] = field(default=str, repr=False)
    reply: Reply = field(default=Reply(""), repr=False)
    schema: str | None = field(default=None, repr=False)
    prompt_key: str | None = field(default=None, repr=False)

    @property
    def parsed(self) -> Any:
        """The value that ``json_schema`` describes; see `Generation.parsed`."""
        return parsed(self.schema, self.reply.content, self.finish_reason)
