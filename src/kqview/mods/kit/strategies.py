"""Strategies: what an answer may look like, enforced token by token.

A strategy begins as a small immutable description (`ChoicesStrat` and its siblings), which
`into_strategy` compiles for one tokenizer. The compiled `Strategy` holds no state of a request:
`start` makes that, one object for each answer, and every other method takes it.

A token may be any piece of the text that is still possible, not only the one that the tokenizer
would choose. Where an answer is complete but could continue ("hi", where "hit" is another choice),
`can_end` is true and the end tokens are allowed too: the model decides.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Generic, Protocol, TypeVar, cast

import numpy as np

from kqview.arguments import invalid, whole_number
from kqview.errors import RequestError, shown
from kqview.mods.actions import Backtrack, ForceTokens
from kqview.mods.kit.token_table import NO_IDS, Ids, TokenTable, decoded
from kqview.mods.tokenizer import ModTokenizer

State = TypeVar("State")


class Strategy(ABC, Generic[State]):
    """A compiled strategy, immutable, any thread; *State* holds the progress of one answer."""

    has_end: bool = False
    """Whether the answer includes its own end, so that no completion needs to follow."""

    @abstractmethod
    def start(self, tokenizer: ModTokenizer) -> State:
        """Return the state of an answer that has not begun."""

    @abstractmethod
    def allowed_tokens(self, state: State, tokenizer: ModTokenizer) -> Ids:
        """Ids that may come next, shape ``(n,)``; empty allows all but `disallowed_tokens`.

        They include the end tokens where `can_end` is true.
        """

    def disallowed_tokens(self, state: State, tokenizer: ModTokenizer) -> Ids:
        """Ids that may not come next."""
        return NO_IDS

    @abstractmethod
    def step(
        self, state: State, token_id: int, tokenizer: ModTokenizer
    ) -> ForceTokens | Backtrack | None:
        """Advance *state* by an added token.

        Returns:
            None; or ForceTokens to write next, by which *state* has been advanced too; or, for a
            token that is not allowed here, a Backtrack that removes it, with *state* unchanged.
        """

    @abstractmethod
    def is_complete(self, state: State) -> bool:
        """Whether the answer is complete and cannot continue."""

    def can_end(self, state: State) -> bool:
        """Whether the answer is complete as it stands."""
        return self.is_complete(state)

    def forced_text(self, state: State) -> str:
        """Return the text that must come next if there is only one; else ""."""
        return ""

    def trim_answer(self, text: str) -> str:
        """Return the complete answer *text* without its delimiters."""
        return text


class StrategyDescription(Protocol):
    """A description of a strategy, such as `ChoicesStrat`."""

    def into_strategy(self, tokenizer: ModTokenizer) -> Strategy[Any]:
        """Compile it for *tokenizer*."""
        ...


@dataclass
class AnswerState:
    """The state of an answer: what is written of it."""

    written: bytes = b""
    is_ended: bool = False
    """Whether an end token has ended it where it could have continued."""


_State = TypeVar("_State", bound=AnswerState)


class TableStrategy(Strategy[_State]):
    """A strategy over a `TokenTable`; where an answer can end, an end token ends it."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table

    def start(self, tokenizer: ModTokenizer) -> _State:
        return cast("_State", AnswerState())

    def step(
        self, state: _State, token_id: int, tokenizer: ModTokenizer
    ) -> ForceTokens | Backtrack | None:
        if token_id in self._table.end_ids and self.can_end(state):
            state.is_ended = True
            return None
        piece = self._table.pieces[token_id]
        if not piece or not self._take(state, token_id, piece, tokenizer):
            return Backtrack(1)
        state.written += piece
        return None

    @abstractmethod
    def _take(self, state: _State, token_id: int, piece: bytes, tokenizer: ModTokenizer) -> bool:
        """Whether *piece*, the bytes of a token, may come next."""


def _ids(ids: Sequence[int]) -> Ids:
    return np.unique(np.asarray(ids, np.int64))


# ---- checks of descriptions


def _texts(name: str, values: object) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise invalid(name, "a list of at least one text", shown(cast("object", values)))
    texts: list[str] = []
    for value in cast("Sequence[object]", values):
        if not isinstance(value, str) or not value:
            raise invalid(f"an item of {name}", "a text that is not empty", shown(value))
        texts.append(value)
    return tuple(dict.fromkeys(texts))


def _check_member(name: str, kind: type[Enum], value: object) -> None:
    if not isinstance(value, kind):
        known = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise invalid(name, f"one of {known}", shown(value))


def _check_text(name: str, value: object, *, may_be_empty: bool = False) -> None:
    if not isinstance(value, str) or not (value or may_be_empty):
        what = "a text, which may be empty" if may_be_empty else "a text that is not empty"
        raise invalid(name, what, shown(value))


# ---- one of several texts


@dataclass(frozen=True)
class ChoicesStrat:
    """The answer is one of *choices*.

    One choice may be the beginning of another; both can be reached.

    Attributes:
        choices: The texts to choose from, none of them empty.

    Raises:
        RequestError: There are none, or one is empty or not a str.
    """

    choices: Sequence[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", _texts("choices", self.choices))

    def into_strategy(self, tokenizer: ModTokenizer) -> "ChoicesStrategy":
        """Compile it for *tokenizer*."""
        return ChoicesStrategy(self.choices, TokenTable.of(tokenizer))


class ChoicesStrategy(TableStrategy[AnswerState]):
    """See `ChoicesStrat`."""

    def __init__(self, choices: Sequence[str], table: TokenTable) -> None:
        super().__init__(table)
        self._choices = [choice.encode() for choice in choices]

    def allowed_tokens(self, state: AnswerState, tokenizer: ModTokenizer) -> Ids:
        ids = [i for rest in self._rests(state) for i in self._table.beginnings(rest)]
        return _ids(ids + self._table.end_ids if self.can_end(state) else ids)

    def is_complete(self, state: AnswerState) -> bool:
        return state.is_ended or (self.can_end(state) and not self._rests(state))

    def can_end(self, state: AnswerState) -> bool:
        return state.written in self._choices

    def forced_text(self, state: AnswerState) -> str:
        rests = self._rests(state)
        return "" if len(rests) != 1 or self.can_end(state) else decoded(rests[0])

    def _take(
        self, state: AnswerState, token_id: int, piece: bytes, tokenizer: ModTokenizer
    ) -> bool:
        return any(rest.startswith(piece) for rest in self._rests(state))

    def _rests(self, state: AnswerState) -> list[bytes]:
        """What may still follow, of each choice."""
        if state.is_ended:
            return []
        written, n = state.written, len(state.written)
        return [one[n:] for one in self._choices if len(one) > n and one.startswith(written)]


# ---- free text up to an end


class UntilEndType(Enum):
    """What ends the answer of an `UntilStrat`."""

    TAG = "tag"
    """The whole text of ``end``."""
    ANYCHAR = "anychar"
    """Any one character of ``end``."""


@dataclass(frozen=True)
class UntilStrat:
    """The answer is free text up to and including an end; the model cannot stop before it.

    `Strategy.trim_answer` removes *start* and the end.

    Attributes:
        start: Text with which the answer begins; may be "".
        end_type: How to read *end*.
        end: The closing tag, or the characters of which any one ends the answer.

    Raises:
        RequestError: A field has the wrong type, or *end* is empty.
    """

    start: str
    end_type: UntilEndType
    end: str

    def __post_init__(self) -> None:
        _check_text("start", self.start, may_be_empty=True)
        _check_member("end_type", UntilEndType, self.end_type)
        _check_text("end", self.end)

    def into_strategy(self, tokenizer: ModTokenizer) -> "UntilStrategy":
        """Compile it for *tokenizer*."""
        ends = [self.end] if self.end_type is UntilEndType.TAG else sorted(set(self.end))
        return UntilStrategy(self.start, ends, TokenTable.of(tokenizer))


class UntilStrategy(TableStrategy[AnswerState]):
    """See `UntilStrat`."""

    def __init__(self, start: str, ends: Sequence[str], table: TokenTable) -> None:
        super().__init__(table)
        self._start = start.encode()
        self._ends = [end.encode() for end in ends]
        # Tokens that go on after an end that they contain.
        overshoot = [i for i, piece in enumerate(table.pieces) if self._overshoots(piece)]
        self._never = _ids([*table.control_ids, *overshoot])

    def allowed_tokens(self, state: AnswerState, tokenizer: ModTokenizer) -> Ids:
        rest = self._start[len(state.written) :]
        return _ids(self._table.beginnings(rest)) if rest else NO_IDS

    def disallowed_tokens(self, state: AnswerState, tokenizer: ModTokenizer) -> Ids:
        body = self._body(state)
        # Tokens that complete an end begun before them, and go on.
        crossing = [
            i
            for end in self._ends
            for n in range(1, len(end))
            if body.endswith(end[:n])
            for i in self._table.longer_than(end[n:])
        ]
        return _ids([*self._never, *crossing]) if crossing else self._never

    def is_complete(self, state: AnswerState) -> bool:
        return self._body(state).endswith(tuple(self._ends))

    def forced_text(self, state: AnswerState) -> str:
        return "" if state.written else self._start.decode()

    def trim_answer(self, text: str) -> str:
        inner = text.removeprefix(self._start.decode())
        ends = (end.decode() for end in self._ends)
        return next((inner.removesuffix(end) for end in ends if inner.endswith(end)), inner)

    def _take(
        self, state: AnswerState, token_id: int, piece: bytes, tokenizer: ModTokenizer
    ) -> bool:
        if rest := self._start[len(state.written) :]:
            return rest.startswith(piece)
        tail = self._body(state)[-max(map(len, self._ends)) :]
        return not self._overshoots(tail + piece, len(tail))

    def _body(self, state: AnswerState) -> bytes:
        """What is written after the start."""
        return state.written[len(self._start) :]

    def _overshoots(self, text: bytes, n_before: int = 0) -> bool:
        """Whether *text* goes on after an end in it that ends after its first *n_before* bytes."""
        return any(
            0 <= text.find(end, max(0, n_before - len(end) + 1)) < len(text) - len(end)
            for end in self._ends
        )


# ---- characters of one kind


class CharsMode(Enum):
    """The characters that a `CharsStrat` allows."""

    ALPHA = "alpha"
    """Letters."""
    ALPHANUMERIC = "alphanumeric"
    """Letters and digits."""
    NUMERIC = "numeric"
    """The digits 0 to 9."""
    STRING = "string"
    """Any printable character, the space included."""
    JS_FLOAT = "js_float"
    """A decimal number that JavaScript reads, such as -1.5e3."""


@dataclass(frozen=True)
class CharsStrat:
    """The answer is made of characters of one kind.

    Tokens that hold only a part of a character are left out.

    Attributes:
        mode: The kind.
        stop: Maximum number of characters; or a text that ends the answer and is not part of it; or
            None: the answer ends where the model would write a character of another kind.
        min: Minimum number of characters.

    Raises:
        RequestError: A field has the wrong type, or *min* exceeds *stop*.
    """

    mode: CharsMode
    stop: int | str | None = None
    min: int = 1

    def __post_init__(self) -> None:
        _check_member("mode", CharsMode, self.mode)
        object.__setattr__(self, "min", whole_number("min", self.min, low=0))
        if isinstance(self.stop, str):
            if not self.stop:
                raise invalid("stop", "a number of characters, or a text that is not empty", "''")
        elif self.stop is not None:
            object.__setattr__(self, "stop", whole_number("stop", self.stop))
            if self.min > self.stop:
                raise RequestError(
                    f"min is {self.min}, but stop allows only {self.stop} characters; lower min",
                    parameter="min",
                )

    def into_strategy(self, tokenizer: ModTokenizer) -> "CharsStrategy":
        """Compile it for *tokenizer*."""
        return CharsStrategy(self, TokenTable.of(tokenizer))


# A number, and whatever may become one.
_FLOAT: Final = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.A)
_FLOAT_BEGINS: Final = re.compile(r"-?(?:\.?|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d*)?)", re.A)
_KINDS: Final[dict[CharsMode, Callable[[str], bool]]] = {
    CharsMode.ALPHA: str.isalpha,
    CharsMode.ALPHANUMERIC: str.isalnum,
    CharsMode.NUMERIC: frozenset("0123456789").__contains__,
    CharsMode.STRING: str.isprintable,
    CharsMode.JS_FLOAT: frozenset("0123456789.eE+-").__contains__,
}


class CharsStrategy(TableStrategy[AnswerState]):
    """See `CharsStrat`; *without* are characters that are left out of the kind."""

    def __init__(self, given: CharsStrat, table: TokenTable, without: str = "") -> None:
        super().__init__(table)
        self._is_of_kind = _KINDS[given.mode]
        self._is_float = given.mode is CharsMode.JS_FLOAT
        self._stop = given.stop if isinstance(given.stop, str) else ""
        self._n_max = given.stop if isinstance(given.stop, int) else None
        self._n_min = given.min
        self._without = without
        free: list[int] = []  # fit anywhere in an answer
        checked: list[int] = []  # fit or not, by what is written
        for i, text in enumerate(table.texts):
            if text and all(
                (self._is_of_kind(c) and c not in without) or c in self._stop for c in text
            ):
                is_free = not self._is_float and not any(c in self._stop for c in text)
                (free if is_free else checked).append(i)
        self._free: Ids = np.array(free, np.int64)
        self._free_lengths = np.array([len(table.texts[i] or "") for i in free], np.int64)
        self._checked = checked

    def allowed_tokens(self, state: AnswerState, tokenizer: ModTokenizer) -> Ids:
        written = state.written.decode()
        free = self._free if self._is_body(written) else NO_IDS
        if self._n_max is not None and free.size:
            free = free[self._free_lengths <= self._n_max - len(written)]
        texts = self._table.texts
        checked = [i for i in self._checked if self._is_possible(written + (texts[i] or ""))]
        ends = self._table.end_ids if self.can_end(state) else []
        return np.concatenate([free, np.array([*checked, *ends], np.int64)])

    def is_complete(self, state: AnswerState) -> bool:
        text = state.written.decode()
        return (
            text.endswith(self._stop) if self._stop else state.is_ended or len(text) == self._n_max
        )

    def can_end(self, state: AnswerState) -> bool:
        is_whole = not self._stop and self._is_whole(state.written.decode())
        return is_whole or self.is_complete(state)

    def trim_answer(self, text: str) -> str:
        return text.removesuffix(self._stop)

    def _take(
        self, state: AnswerState, token_id: int, piece: bytes, tokenizer: ModTokenizer
    ) -> bool:
        text = self._table.texts[token_id]
        return text is not None and self._is_possible(state.written.decode() + text)

    def _is_body(self, text: str) -> bool:
        """Whether *text* is a beginning of an answer, the stop aside."""
        if self._is_float:
            return _FLOAT_BEGINS.fullmatch(text) is not None
        return all(self._is_of_kind(c) and c not in self._without for c in text)

    def _is_whole(self, text: str) -> bool:
        """Whether *text* is an answer, the stop aside."""
        is_body = _FLOAT.fullmatch(text) is not None if self._is_float else self._is_body(text)
        return is_body and len(text) >= self._n_min

    def _is_possible(self, text: str) -> bool:
        """Whether an answer can begin with *text*, the stop included."""
        if self._stop:
            at = text.find(self._stop)
            if at >= 0:
                return at + len(self._stop) == len(text) and self._is_whole(text[:at])
            return self._is_body(text) or any(
                text.endswith(self._stop[:n]) and self._is_whole(text[:-n])
                for n in range(1, len(self._stop))
            )
        if self._n_max is not None and len(text) >= self._n_max:
            return len(text) == self._n_max and self._is_whole(text)
        return self._is_body(text)


# ---- a list


@dataclass(frozen=True)
class ListStrat:
    """The answer is a list, such as ``["cat", "dog"]``.

    Without *close* and *wrap*, the model ends the list by writing what cannot continue it.

    Attributes:
        elements: The texts to choose elements from, or a description of what an element is.
        open: Text before the list.
        close: Text after the list.
        wrap: Text before and after each element, such as a quotation mark.
        sep: Text between elements.
        min: The smallest number of elements.
        max: The largest number of elements; None for no limit.
        end_with: Text after everything, which is not a part of the answer.

    Raises:
        RequestError: A field has the wrong type, *min* exceeds *max*, or nothing separates two
            elements.
    """

    elements: "Sequence[str] | StrategyDescription"
    open: str = ""
    close: str = ""
    wrap: str = ""
    sep: str = ", "
    min: int = 1
    max: int | None = None
    end_with: str = ""

    def __post_init__(self) -> None:
        if not hasattr(self.elements, "into_strategy"):
            object.__setattr__(self, "elements", _texts("elements", self.elements))
        for name in ("open", "close", "wrap", "sep", "end_with"):
            _check_text(name, getattr(self, name), may_be_empty=True)
        object.__setattr__(self, "min", whole_number("min", self.min, low=0))
        if self.max is not None:
            object.__setattr__(self, "max", whole_number("max", self.max))
            if self.min > self.max:
                raise RequestError(
                    f"min is {self.min}, but max is {self.max}; lower min", parameter="min"
                )
        if not self.sep and not self.wrap and self.max != 1:
            raise RequestError(
                "sep and wrap are both empty, so nothing separates two elements; pass one of them",
                parameter="sep",
            )

    def into_strategy(self, tokenizer: ModTokenizer) -> "ListStrategy":
        """Compile it for *tokenizer*."""
        table = TokenTable.of(tokenizer)
        elements = self.elements
        if isinstance(elements, CharsStrat) and not isinstance(elements.stop, str):
            # What ends an element is not part of it.
            closing = self.wrap + self.close + self.end_with
            without = "".join(text[:1] for text in (self.wrap or self.sep, closing))
            element: Strategy[Any] = CharsStrategy(elements, table, without)
        elif isinstance(elements, Sequence):
            element = ChoicesStrategy(elements, table)
        else:
            element = elements.into_strategy(tokenizer)
        return ListStrategy(self, element, table)


@dataclass(frozen=True)
class _Literal:
    """A place in a fixed text: what is left of it, and what follows it."""

    rest: bytes
    n_done: int
    is_last: bool


@dataclass(frozen=True)
class _Element:
    """A place in an element, by the state of its strategy."""

    state: Any
    n_done: int


_Place = _Literal | _Element


@dataclass
class ListAnswer(AnswerState):
    """Where in the list the answer may be: every reading of what is written."""

    places: list[_Place] = field(default_factory=list[_Place])


class ListStrategy(TableStrategy[ListAnswer]):
    """See `ListStrat`."""

    def __init__(self, given: ListStrat, element: Strategy[Any], table: TokenTable) -> None:
        super().__init__(table)
        self._given = given
        self._element = element
        self.has_end = bool(given.end_with)

    def start(self, tokenizer: ModTokenizer) -> ListAnswer:
        given = self._given
        places: list[_Place] = [_Literal((given.open + given.wrap).encode(), 0, is_last=False)]
        if given.min == 0:
            empty = given.open + given.close + given.end_with
            places.append(_Literal(empty.encode(), 0, is_last=True))
        return ListAnswer(places=self._with_following(places, tokenizer))

    def allowed_tokens(self, state: ListAnswer, tokenizer: ModTokenizer) -> Ids:
        ids = [self._allowed_at(place, tokenizer) for place in state.places]
        ends = self._table.end_ids if self.can_end(state) else []
        return np.unique(np.concatenate([*ids, np.array(ends, np.int64)]))

    def is_complete(self, state: ListAnswer) -> bool:
        return state.is_ended or all(map(_is_end, state.places))

    def can_end(self, state: ListAnswer) -> bool:
        return state.is_ended or any(map(_is_end, state.places))

    def forced_text(self, state: ListAnswer) -> str:
        if len(state.places) != 1:
            return ""
        [place] = state.places
        if isinstance(place, _Element):
            return self._element.forced_text(place.state)
        return decoded(place.rest)

    def trim_answer(self, text: str) -> str:
        return text.removesuffix(self._given.end_with)

    def _take(
        self, state: ListAnswer, token_id: int, piece: bytes, tokenizer: ModTokenizer
    ) -> bool:
        after: list[_Place] = []
        for place in state.places:
            if isinstance(place, _Literal):
                if place.rest.startswith(piece):
                    after.append(replace(place, rest=place.rest[len(piece) :]))
                continue
            sub = copy(place.state)
            if self._element.step(sub, token_id, tokenizer) is None:
                after.append(_Element(sub, place.n_done))
        if after:
            state.places = self._with_following(after, tokenizer)
        return bool(after)

    def _with_following(self, places: list[_Place], tokenizer: ModTokenizer) -> list[_Place]:
        """*places*, with those that may follow without another token, less those that are over."""
        found: list[_Place] = []
        waiting = [*places]
        while waiting:
            place = waiting.pop()
            if isinstance(place, _Literal):
                if place.rest or place.is_last:
                    found.append(place)
                else:
                    waiting.append(_Element(self._element.start(tokenizer), place.n_done))
                continue
            if self._element.can_end(place.state):
                waiting += self._after_element(place.n_done + 1)
            if not self._element.is_complete(place.state):
                found.append(place)
        return found

    def _after_element(self, n_done: int) -> list[_Place]:
        given = self._given
        following: list[_Place] = []
        if given.max is None or n_done < given.max:
            text = given.wrap + given.sep + given.wrap
            following.append(_Literal(text.encode(), n_done, is_last=False))
        if n_done >= given.min:
            text = given.wrap + given.close + given.end_with
            following.append(_Literal(text.encode(), n_done, is_last=True))
        return following

    def _allowed_at(self, place: _Place, tokenizer: ModTokenizer) -> Ids:
        if isinstance(place, _Literal):
            return np.array(self._table.beginnings(place.rest), np.int64)
        ids = self._element.allowed_tokens(place.state, tokenizer)
        if not ids.size:
            ids = np.arange(self._table.n_vocab)
        ids = np.setdiff1d(ids, self._element.disallowed_tokens(place.state, tokenizer))
        return np.setdiff1d(ids, self._table.control_ids)  # an element cannot end the text


def _is_end(place: _Place) -> bool:
    return isinstance(place, _Literal) and place.is_last and not place.rest
