"""Strategies by regular expression and by JSON schema, computed by llguidance.

llguidance is optional: ``pip install 'kqview[constraints]'``. It recurses, and its limits bound
neither memory nor time, so a grammar is first tried in a helper process: what it crashes there, or
costs more than it may, is refused. What a grammar costs after its first tokens has no other bound
than llguidance's own.
"""

import functools
import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from kqview.confined import Confined, Stopped
from kqview.constraint_child import Numbers, shortened
from kqview.errors import InvalidSampling
from kqview.extras import needed
from kqview.mods.kit.strategies import AnswerState, TableStrategy
from kqview.mods.kit.token_table import Ids, TokenTable
from kqview.mods.tokenizer import ModTokenizer
from kqview.types.closed_schema import held


@dataclass(frozen=True)
class RegexStrat:
    """The answer matches a regular expression as a whole, in the syntax of Rust's regex crate.

    Attributes:
        pattern: The expression.
    """

    pattern: str

    def into_strategy(self, tokenizer: ModTokenizer) -> "GrammarStrategy":
        """Compile it for *tokenizer*.

        Raises:
            InvalidSampling: The pattern does not parse, or costs too much.
            KqviewError: llguidance is not installed.
        """
        grammar = _llguidance().LLMatcher.grammar_from_regex(self.pattern)
        return GrammarStrategy("pattern", grammar, tokenizer)


@dataclass(frozen=True)
class JsonSchemaStrat:
    """The answer is JSON that a schema describes, written without optional whitespace.

    An object that lists its properties has no others, unless its schema says
    ``additionalProperties: true``.

    Attributes:
        schema: The JSON schema, as a mapping or as JSON text. Its key ``x-guidance`` sets
            llguidance's own options, such as ``{"whitespace_flexible": true}``.
    """

    schema: Mapping[str, Any] | str

    def into_strategy(self, tokenizer: ModTokenizer) -> "GrammarStrategy":
        """Compile it for *tokenizer*.

        Raises:
            InvalidSampling: The schema is not JSON, uses what llguidance does not support, or costs
                too much.
            KqviewError: llguidance is not installed.
        """
        text = self.schema if isinstance(self.schema, str) else json.dumps(self.schema)
        matcher = _llguidance().LLMatcher
        try:
            grammar = matcher.grammar_from_json_schema(held(text))
        except ValueError as error:
            raise InvalidSampling(f"schema is not JSON: {error}", parameter="schema") from None
        return GrammarStrategy("schema", grammar, tokenizer)


@dataclass
class GrammarState(AnswerState):
    """Progress of an answer in a grammar; owns llguidance's matcher."""

    matcher: Any = None

    def __copy__(self) -> "GrammarState":
        return GrammarState(self.written, self.is_ended, self.matcher.deep_copy())


class GrammarStrategy(TableStrategy[GrammarState]):
    """An answer that a grammar of llguidance describes."""

    def __init__(self, name: str, grammar: str, tokenizer: ModTokenizer) -> None:
        super().__init__(TokenTable.of(tokenizer))
        self._vocabulary = _vocabulary_of(tokenizer)
        self._grammar = grammar
        self._name = name
        self._numbers = Numbers(self._table.pieces) if name == "schema" else None
        self._first = self._new_matcher()

    def start(self, tokenizer: ModTokenizer) -> GrammarState:
        return GrammarState(matcher=self._first.deep_copy())

    def allowed_tokens(self, state: GrammarState, tokenizer: ModTokenizer) -> Ids:
        mask: bytes = state.matcher.compute_bitmask()
        if self._numbers:
            mask = self._numbers.held(mask, state.written[-Numbers.TAIL_BYTES :])
        flags = np.unpackbits(
            np.frombuffer(mask, np.uint8), count=self._table.n_vocab, bitorder="little"
        )
        flags[self._table.control_ids] = 0
        if self.can_end(state):
            flags[self._table.end_ids] = 1
        return np.flatnonzero(flags)

    def _take(
        self, state: GrammarState, token_id: int, piece: bytes, tokenizer: ModTokenizer
    ) -> bool:
        # Checked first: a wrong token would leave the matcher unusable.
        if not state.matcher.validate_tokens([token_id]):
            return False
        state.matcher.consume_token(token_id)
        return True

    def is_complete(self, state: GrammarState) -> bool:
        return state.is_ended or state.matcher.is_stopped()

    def can_end(self, state: GrammarState) -> bool:
        return self.is_complete(state) or state.matcher.is_accepting()

    def forced_text(self, state: GrammarState) -> str:
        if self.can_end(state):
            return ""
        # Up to the last complete character.
        return cast("bytes", state.matcher.compute_ff_bytes()).decode("utf-8", "ignore")

    def _new_matcher(self) -> Any:
        try:
            reason = _trial(self._grammar)
        except Stopped as stopped:
            limit = "it makes llguidance crash" if stopped.reason == "died" else stopped
            raise InvalidSampling(
                f"{self._name} is too large or nested too deeply: {limit}; simplify it",
                parameter=self._name,
            ) from None
        matcher: Any = None
        if not reason:
            matcher = _llguidance().LLMatcher(self._vocabulary, self._grammar, log_level=0)
            reason = matcher.get_error()
        if reason:
            if reason.startswith("panic"):
                reason = "it fails"
            raise InvalidSampling(
                f"{self._name} is refused by llguidance; correct it: {shortened(reason)}",
                parameter=self._name,
            )
        return matcher


@functools.cache
def _helpers() -> Confined:
    return Confined(
        Path(__file__).with_name("constraint_trial.py"), memory_bytes=_MEMORY_MAX, cpu_s=_CPU_S_MAX
    )


@functools.lru_cache(maxsize=64)
def _trial(grammar: str) -> str:
    """Why llguidance refuses *grammar*; empty if it does not."""
    return cast("str", _helpers().call(grammar))


_MEMORY_MAX: Final = 256 << 20
_CPU_S_MAX: Final = 5.0


def _llguidance() -> Any:
    who = "RegexStrat and JsonSchemaStrat need"
    return needed("llguidance", who, 'run pip install "kqview[constraints]"')


class _ConstraintTokens:
    """A vocabulary as llguidance's Python package reads one."""

    def __init__(self, tokenizer: ModTokenizer) -> None:
        table = TokenTable.of(tokenizer)
        control = tokenizer.all_special_ids
        self._tokenizer = weakref.ref(tokenizer)  # which keeps what is made of this alive
        self.tokens = [piece or tokenizer.token_bytes(i) for i, piece in enumerate(table.pieces)]
        self.special_token_ids = control
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = table.end_ids[0] if table.end_ids else control[0] if control else 0

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        tokenizer = self._tokenizer()
        return [] if tokenizer is None else tokenizer.encode(text, add_special_tokens=False)


# A cache alone, as in `token_table`.
_vocabularies: weakref.WeakKeyDictionary[ModTokenizer, Any] = weakref.WeakKeyDictionary()


def _vocabulary_of(tokenizer: ModTokenizer) -> Any:
    known = _vocabularies.get(tokenizer)
    if known is None:
        module = _llguidance()
        wrapper = import_module("llguidance._tokenizer").TokenizerWrapper
        known = module.LLTokenizer(wrapper(_ConstraintTokens(tokenizer)))
        _vocabularies[tokenizer] = known
    return known
