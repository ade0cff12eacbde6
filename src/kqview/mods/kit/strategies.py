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
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, cast

import numpy as np

from kqview.arguments import invalid, whole_number
from kqview.errors import RequestError, shown
from kqview.mods.actions import Backtrack, ForceTokens
from kqview.mods.kit.token_table import NO_IDS, Ids, TokenTable

if TYPE_CHECKING:
    from kqview.mods.tokenizer import ModTokenizer

State = TypeVar("State")


class Strategy(ABC, Generic[State]):
    """A compiled strategy, immutable, any thread; *State* holds the progress of one answer."""

    has_end: bool = False
    """Whether the answer includes its own end, so that no completion needs to follow."""

    @abstractmethod
    def start(self, tokenizer: "ModTokenizer") -> State:
        """Return the state of an answer that has not begun."""

    @abstractmethod
    def allowed_tokens(self, state: State, tokenizer: "ModTokenizer") -> Ids:
        """Ids that may come next, shape ``(n,)``; empty allows all but `disallowed_tokens`.

        They include the end tokens where `can_end` is true.
        """

    def disallowed_tokens(self, state: State, tokenizer: "ModTokenizer") -> Ids:
        """Ids that may not come next."""
        return NO_IDS

    @abstractmethod
    def step(
        self, state: State, token_id: int, tokenizer: "ModTokenizer"
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

    def into_strategy(self, tokenizer: "ModTokenizer") -> Strategy[Any]:
        """Compile it for *tokenizer*."""
        ...


_TAKE_BACK: Final = Backtrack(1)


def _ids(ids: Sequence[int]) -> Ids:
    return np.unique(np.asarray(ids, np.int64))


# ---- one of several texts


@dataclass(frozen=True)
class ChoicesStrat:
    """The answer is one of *choices*.

    One choice may be the beginning of another; both can be reached.

    Attributes:
        choices: The texts to choose from, none of them empty.
    """

    choices: Sequence[str]

    def __post_init__(self) -> None:
        """Check the choices.

        Raises:
            RequestError: There are none, or one is empty or not a str.
        """
        object.__setattr__(self, "choices", _texts("choices", self.choices))

    def into_strategy(self, tokenizer: "ModTokenizer") -> "ChoicesStrategy":
        """Compile it for *tokenizer*."""
        return ChoicesStrategy(self.choices, TokenTable.of(tokenizer))


def _texts(name: str, values: object) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise invalid(name, "a list of at least one text", shown(cast("object", values)))
    texts: list[str] = []
    for value in cast("Sequence[object]", values):
        if not isinstance(value, str) or not value:
            raise invalid(f"an item of {name}", "a text that is not empty", shown(value))
        texts.append(value)
    return tuple(dict.fromkeys(texts))


@dataclass
class ChoicesState:
    """What is written of a choice."""

    written: bytes = b""
    is_ended: bool = False


class ChoicesStrategy(Strategy[ChoicesState]):
    """See `ChoicesStrat`."""

    def __init__(self, choices: Sequence[str], table: TokenTable) -> None:
        self._choices = [choice.encode() for choice in choices]
        self._table = table

    def start(self, tokenizer: "ModTokenizer") -> ChoicesState:
        """See Strategy."""
        return ChoicesState()

    def allowed_tokens(self, state: ChoicesState, tokenizer: "ModTokenizer") -> Ids:
        """See Strategy."""
        ids = [i for rest in self._rests(state) for i in self._table.beginnings(rest)]
        return _ids(ids + self._table.end_ids if self.can_end(state) else ids)

    def step(
        self, state: ChoicesState, token_id: int, tokenizer: "ModTokenizer"
    ) -> ForceTokens | Backtrack | None:
        """See Strategy."""
        if token_id in self._table.end_ids and self.can_end(state):
            state.is_ended = True
            return None
        piece = self._table.pieces[token_id]
        if not piece or not any(rest.startswith(piece) for rest in self._rests(state)):
            return _TAKE_BACK
        state.written += piece
        return None

    def is_complete(self, state: ChoicesState) -> bool:
        """See Strategy."""
        return state.is_ended or (self.can_end(state) and not self._rests(state))

    def can_end(self, state: ChoicesState) -> bool:
        """See Strategy."""
        return state.written in self._choices

    def forced_text(self, state: ChoicesState) -> str:
        """See Strategy."""
        rests = self._rests(state)
        if len(rests) != 1 or self.can_end(state):
            return ""
        try:
            return rests[0].decode()
        except UnicodeDecodeError:  # what is written ends inside a character
            return ""

    def _rests(self, state: ChoicesState) -> list[bytes]:
        """What may still follow, of each choice."""
        if state.is_ended:
            return []
        n = len(state.written)
        return [
            choice[n:]
            for choice in self._choices
            if len(choice) > n and choice.startswith(state.written)
        ]


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
    """

    start: str
    end_type: UntilEndType
    end: str

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            RequestError: A field has the wrong type, or *end* is empty.
        """
        if not isinstance(self.start, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise invalid("start", "a text, which may be empty", shown(self.start))
        object.__setattr__(self, "end_type", _member("end_type", UntilEndType, self.end_type))
        if not isinstance(self.end, str) or not self.end:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise invalid("end", "a text that is not empty", shown(self.end))

    def into_strategy(self, tokenizer: "ModTokenizer") -> "UntilStrategy":
        """Compile it for *tokenizer*."""
        ends = [self.end] if self.end_type is UntilEndType.TAG else sorted(set(self.end))
        return UntilStrategy(self.start, ends, TokenTable.of(tokenizer))


_Member = TypeVar("_Member", bound=Enum)


def _member(name: str, kind: type[_Member], value: object) -> _Member:
    if not isinstance(value, kind):
        known = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise invalid(name, f"one of {known}", shown(value))
    return value


@dataclass
class UntilState:
    """What is written of an answer with an end."""

    written: bytes = b""


class UntilStrategy(Strategy[UntilState]):
    """See `UntilStrat`."""

    def __init__(self, start: str, ends: Sequence[str], table: TokenTable) -> None:
        self._start = start
        self._ends = [end.encode() for end in ends]
        self._table = table
        # Tokens that go on after an end that they contain.
        overshoot = [i for i, piece in enumerate(table.pieces) if self._overshoots(piece)]
        self._never = _ids([*table.control_ids, *overshoot])

    def start(self, tokenizer: "ModTokenizer") -> UntilState:
        """See Strategy."""
        return UntilState()

    def allowed_tokens(self, state: UntilState, tokenizer: "ModTokenizer") -> Ids:
        """See Strategy."""
        rest = self._start.encode()[len(state.written) :]
        return _ids(self._table.beginnings(rest)) if rest else NO_IDS

    def disallowed_tokens(self, state: UntilState, tokenizer: "ModTokenizer") -> Ids:
        """See Strategy."""
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

    def step(
        self, state: UntilState, token_id: int, tokenizer: "ModTokenizer"
    ) -> ForceTokens | Backtrack | None:
        """See Strategy."""
        piece = self._table.pieces[token_id]
        start = self._start.encode()
        rest = start[len(state.written) :]
        is_possible = rest.startswith(piece) if rest else not self._overshoots_after(state, piece)
        if not piece or not is_possible:
            return _TAKE_BACK
        state.written += piece
        return None

    def is_complete(self, state: UntilState) -> bool:
        """See Strategy."""
        return any(self._body(state).endswith(end) for end in self._ends)

    def forced_text(self, state: UntilState) -> str:
        """See Strategy."""
        return self._start if not state.written else ""

    def trim_answer(self, text: str) -> str:
        """See Strategy."""
        inner = text.removeprefix(self._start)
        return next(
            (inner[: -len(end)] for end in map(bytes.decode, self._ends) if inner.endswith(end)),
            inner,
        )

    def _body(self, state: UntilState) -> bytes:
        """What is written after the start."""
        return state.written[len(self._start.encode()) :]

    def _overshoots(self, text: bytes, n_before: int = 0) -> bool:
        """Whether *text* goes on after an end in it that ends after its first *n_before* bytes."""
        return any(
            0 <= text.find(end, max(0, n_before - len(end) + 1)) < len(text) - len(end)
            for end in self._ends
        )

    def _overshoots_after(self, state: UntilState, piece: bytes) -> bool:
        tail = self._body(state)[-max(map(len, self._ends)) :]
        return self._overshoots(tail + piece, len(tail))


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
    """

    mode: CharsMode
    stop: int | str | None = None
    min: int = 1

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            RequestError: A field has the wrong type, or *min* exceeds *stop*.
        """
        _member("mode", CharsMode, self.mode)
        object.__setattr__(self, "min", whole_number("min", self.min, low=0))
        if self.stop is None:
            return
        if isinstance(self.stop, str):
            if not self.stop:
                raise invalid("stop", "a number of characters, or a text that is not empty", "''")
            return
        object.__setattr__(self, "stop", whole_number("stop", self.stop))
        if self.min > self.stop:
            raise RequestError(
                f"min is {self.min}, but stop allows only {self.stop} characters; lower min",
                parameter="min",
            )

    def into_strategy(self, tokenizer: "ModTokenizer") -> "CharsStrategy":
        """Compile it for *tokenizer*."""
        return CharsStrategy(self.mode, self.stop, self.min, TokenTable.of(tokenizer))


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


@dataclass
class CharsState:
    """What is written of an answer of characters, with the stop as far as it is begun."""

    written: str = ""
    is_ended: bool = False


class CharsStrategy(Strategy[CharsState]):
    """See `CharsStrat`; *without* are characters that are left out of the kind."""

    def __init__(
        self,
        mode: CharsMode,
        stop: int | str | None,
        n_min: int,
        table: TokenTable,
        without: str = "",
    ) -> None:
        self._is_of_kind = _KINDS[mode]
        self._is_float = mode is CharsMode.JS_FLOAT
        self._stop = stop if isinstance(stop, str) else ""
        self._n_max = stop if isinstance(stop, int) else None
        self._n_min = n_min
        self._table = table
        self._without = without
        free: list[int] = []  # fit anywhere in an answer
        checked: list[int] = []  # fit or not, by what is written
        for i, text in enumerate(table.texts):
            if not text or not all(map(self._may_contain, text)):
                continue
            is_free = not self._is_float and not any(c in self._stop for c in text)
            (free if is_free else checked).append(i)
        self._free: Ids = np.array(free, np.int64)
        self._free_lengths = np.array([len(table.texts[i] or "") for i in free], np.int64)
        self._checked = checked

    def start(self, tokenizer: "ModTokenizer") -> CharsState:
        """See Strategy."""
        return CharsState()

    def allowed_tokens(self, state: CharsState, tokenizer: "ModTokenizer") -> Ids:
        """See Strategy."""
        written = state.written
        free = self._free if self._is_body(written) else NO_IDS
        if self._n_max is not None and free.size:
            free = free[self._free_lengths <= self._n_max - len(written)]
        texts = self._table.texts
        checked = [i for i in self._checked if self._is_possible(written + (texts[i] or ""))]
        ends = self._table.end_ids if self.can_end(state) else []
        return np.concatenate([free, np.array([*checked, *ends], np.int64)])

    def step(
        self, state: CharsState, token_id: int, tokenizer: "ModTokenizer"
    ) -> ForceTokens | Backtrack | None:
        """See Strategy."""
        if token_id in self._table.end_ids and self.can_end(state):
            state.is_ended = True
            return None
        text = self._table.texts[token_id]
        if not text or not self._is_possible(state.written + text):
            return _TAKE_BACK
        state.written += text
        return None

    def is_complete(self, state: CharsState) -> bool:
        """See Strategy."""
        if self._stop:
            return state.written.endswith(self._stop)
        return state.is_ended or len(state.written) == self._n_max

    def can_end(self, state: CharsState) -> bool:
        """See Strategy."""
        return self.is_complete(state) or (not self._stop and self._is_whole(state.written))

    def trim_answer(self, text: str) -> str:
        """See Strategy."""
        return text.removesuffix(self._stop) if self._stop else text

    def _may_contain(self, character: str) -> bool:
        is_of_kind = self._is_of_kind(character) and character not in self._without
        return is_of_kind or character in self._stop

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
        """Check the fields.

        Raises:
            RequestError: A field has the wrong type, *min* exceeds *max*, or nothing separates two
                elements.
        """
        if not hasattr(self.elements, "into_strategy"):
            object.__setattr__(self, "elements", _texts("elements", self.elements))
        for name in ("open", "close", "wrap", "sep", "end_with"):
            if not isinstance(getattr(self, name), str):
                raise invalid(name, "a text, which may be empty", shown(getattr(self, name)))
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

    def into_strategy(self, tokenizer: "ModTokenizer") -> "ListStrategy":
        """Compile it for *tokenizer*."""
        table = TokenTable.of(tokenizer)
        elements = self.elements
        if isinstance(elements, CharsStrat) and not isinstance(elements.stop, str):
            # What ends an element is not part of it.
            ends = "".join(text[:1] for text in (self.wrap or self.sep, self._closing))
            element: Strategy[Any] = CharsStrategy(
                elements.mode, elements.stop, elements.min, table, without=ends
            )
        elif isinstance(elements, Sequence):
            element = ChoicesStrategy(elements, table)
        else:
            element = elements.into_strategy(tokenizer)
        return ListStrategy(self, element, table)

    @property
    def _closing(self) -> str:
        return self.wrap + self.close + self.end_with


@dataclass(frozen=True)
class _Literal:
    """A fixed text in a list, and what follows it."""

    rest: bytes
    n_done: int
    is_last: bool


@dataclass(frozen=True)
class _Element:
    """An element that is being written."""

    state: Any
    n_done: int


@dataclass
class ListState:
    """Where in the list the answer may be: every reading of what is written."""

    places: "list[_Literal | _Element]"
    is_ended: bool = False


class ListStrategy(Strategy[ListState]):
    """See `ListStrat`."""

    def __init__(self, given: ListStrat, element: Strategy[Any], table: TokenTable) -> None:
        self._given = given
        self._element = element
        self._table = table
        self.has_end = bool(given.end_with)

    def start(self, tokenizer: "ModTokenizer") -> ListState:
        """See Strategy."""
        given = self._given
        places: list[_Literal | _Element] = [
            _Literal((given.open + given.wrap).encode(), 0, is_last=False)
        ]
        if given.min == 0:
            empty = given.open + given.close + given.end_with
            places.append(_Literal(empty.encode(), 0, is_last=True))
        return ListState(self._with_following(places, tokenizer))

    def allowed_tokens(self, state: ListState, tokenizer: "ModTokenizer") -> Ids:
        """See Strategy."""
        ids = [self._allowed_at(place, tokenizer) for place in state.places]
        ends = self._table.end_ids if self.can_end(state) else []
        return np.unique(np.concatenate([*ids, np.array(ends, np.int64)]))

    def step(
        self, state: ListState, token_id: int, tokenizer: "ModTokenizer"
    ) -> ForceTokens | Backtrack | None:
        """See Strategy."""
        if token_id in self._table.end_ids and self.can_end(state):
            state.is_ended = True
            return None
        piece = self._table.pieces[token_id]
        after: list[_Literal | _Element] = []
        for place in state.places if piece else ():
            if isinstance(place, _Literal):
                if place.rest.startswith(piece):
                    after.append(replace(place, rest=place.rest[len(piece) :]))
                continue
            sub = copy(place.state)
            if self._element.step(sub, token_id, tokenizer) is None:
                after.append(_Element(sub, place.n_done))
        if not after:
            return _TAKE_BACK
        state.places = self._with_following(after, tokenizer)
        return None

    def is_complete(self, state: ListState) -> bool:
        """See Strategy."""
        return state.is_ended or all(map(_is_end, state.places))

    def can_end(self, state: ListState) -> bool:
        """See Strategy."""
        return state.is_ended or any(map(_is_end, state.places))

    def forced_text(self, state: ListState) -> str:
        """See Strategy."""
        if len(state.places) != 1:
            return ""
        place = state.places[0]
        if isinstance(place, _Element):
            return self._element.forced_text(place.state)
        try:
            return place.rest.decode()
        except UnicodeDecodeError:  # what is written ends inside a character
            return ""

    def trim_answer(self, text: str) -> str:
        """See Strategy."""
        return text.removesuffix(self._given.end_with)

    def _with_following(
        self, places: list[_Literal | _Element], tokenizer: "ModTokenizer"
    ) -> list[_Literal | _Element]:
        """*places*, with those that may follow without another token, less those that are over."""
        found: list[_Literal | _Element] = []
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

    def _after_element(self, n_done: int) -> list[_Literal]:
        given = self._given
        following: list[_Literal] = []
        if given.max is None or n_done < given.max:
            text = given.wrap + given.sep + given.wrap
            following.append(_Literal(text.encode(), n_done, is_last=False))
        if n_done >= given.min:
            text = given.wrap + given.close + given.end_with
            following.append(_Literal(text.encode(), n_done, is_last=True))
        return following

    def _allowed_at(self, place: _Literal | _Element, tokenizer: "ModTokenizer") -> Ids:
        if isinstance(place, _Literal):
            return np.array(self._table.beginnings(place.rest), np.int64)
        ids = self._element.allowed_tokens(place.state, tokenizer)
        if not ids.size:
            ids = np.arange(self._table.n_vocab)
        ids = np.setdiff1d(ids, self._element.disallowed_tokens(place.state, tokenizer))
        return np.setdiff1d(ids, self._table.control_ids)  # an element cannot end the text


def _is_end(place: _Literal | _Element) -> bool:
    return isinstance(place, _Literal) and place.is_last and not place.rest
