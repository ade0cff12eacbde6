"""Whether a text follows a grammar or a JSON schema, by llguidance alone: no model, no kqview."""

from __future__ import annotations

from functools import cache
from typing import Any


class ByteTokens:
    """A vocabulary of bytes, in the form that llguidance takes."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([i]) for i in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def vocabulary() -> Any:
    import llguidance
    from llguidance._tokenizer import TokenizerWrapper

    return llguidance.LLTokenizer(TokenizerWrapper(ByteTokens()))  # pyright: ignore[reportArgumentType]


def accepts(grammar: str, text: str) -> bool:
    """Whether *text* as a whole follows *grammar*, whose marks are plain text."""
    import llguidance

    matcher = llguidance.LLMatcher(vocabulary(), grammar)
    assert not matcher.get_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and (
        matcher.is_accepting()
    )


def schema_accepts(schema: str, text: str) -> bool:
    """Whether *text* as a whole follows a JSON schema."""
    import llguidance

    return accepts(llguidance.LLMatcher.grammar_from_json_schema(schema), text)


def regex_accepts(regex: str, text: str) -> bool:
    """Whether *text* as a whole follows a regular expression in the syntax of Rust."""
    import llguidance

    return accepts(llguidance.LLMatcher.grammar_from_regex(regex), text)
