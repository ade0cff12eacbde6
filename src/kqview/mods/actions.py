"""Actions: what a mod may return for an event, and which actions each event allows.

The constructors check the types and ranges of their values. `check_action` checks the rest: whether
the event allows the action, and whether the ids are in the vocabulary. All raise
InvalidActionError.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kqview import json_input
from kqview.arguments import checked_ids, to_number, whole_number
from kqview.edit import Edit, listed
from kqview.errors import InvalidActionError, InvalidEdit, shown
from kqview.mods.events import Added, Event, ForwardPass, Prefilled, Sampled
from kqview.trace.record import cleaned_text

_KINDS_OF_NUMBERS: Final = "fiu"  # numpy's letters for floats, signed and unsigned integers
_LOGITS: Final = "logits of AdjustedLogits"


def _ids(action: str, tokens: object) -> list[int]:
    return checked_ids(f"tokens of {action}", tokens, InvalidActionError)


@dataclass(frozen=True, slots=True, eq=False)
class Noop:
    """Change nothing; the same as returning None."""


@dataclass(slots=True, eq=False)
class AdjustedPrefill:
    """Replace the prompt before it is evaluated.

    Attributes:
        tokens: Ids of the new prompt; an empty list keeps the prompt.
        max_steps: Maximum number of tokens to generate; None or 0 keeps the request's.
    """

    tokens: list[int]
    max_steps: int | None = None

    def __post_init__(self) -> None:
        self.tokens = _ids("AdjustedPrefill", self.tokens)
        if self.max_steps is not None:
            self.max_steps = whole_number(
                "max_steps of AdjustedPrefill", self.max_steps, 0, error=InvalidActionError
            )


@dataclass(slots=True, eq=False)
class ForceTokens:
    """Add these tokens: at ForwardPass and Sampled in place of the sampled one, at Added after it.

    They are evaluated as one chunk, followed by one ForwardPass. Of several ForceTokens in one
    step, the first applies.

    Attributes:
        tokens: Ids to add; an empty list changes nothing.
    """

    tokens: list[int]

    def __post_init__(self) -> None:
        self.tokens = _ids("ForceTokens", self.tokens)


@dataclass(slots=True, eq=False)
class Backtrack:
    """Remove the last *n* generated tokens, and add others in their place.

    At ForwardPass and Sampled, *n* counts tokens added in earlier steps, and the sampled token is
    dropped too. At Added, *n* includes the tokens just added. The prompt is never removed.

    A request whose mods keep taking tokens back ends with finish reason "length" after
    ``16 * max_tokens + 256`` steps.

    Attributes:
        n: Number of tokens to remove; if it exceeds what was generated, everything is removed.
        tokens: Ids to add after that, as one chunk; without any, the logits at the new end are
            computed again.
    """

    n: int
    tokens: list[int] | None = None

    def __post_init__(self) -> None:
        self.n = whole_number("n of Backtrack", self.n, 0, error=InvalidActionError)
        if self.tokens is not None:
            self.tokens = _ids("Backtrack", self.tokens)


@dataclass(slots=True, eq=False)
class AdjustedLogits:
    """Sample this step from other logits. Later mods of the request see them.

    Attributes:
        logits: Numbers of shape ``(n_vocab,)`` or ``(1, n_vocab)``, -inf for tokens that must not
            follow; stored as contiguous float32 ``(n_vocab,)``, copied only if needed.
        token_temp: Temperature of this step, 0.0 to pick the largest logit; None for the
            request's.
    """

    logits: NDArray[np.float32]
    token_temp: float | None = None

    def __post_init__(self) -> None:
        self.logits = to_logits(self.logits, _LOGITS)
        if self.token_temp is not None:
            temperature = to_number(self.token_temp)
            if temperature is None or not 0 <= temperature < math.inf:
                raise InvalidActionError(
                    "token_temp of AdjustedLogits must be a number of at least 0 or None, "
                    f"got {shown(self.token_temp)}"
                )
            self.token_temp = temperature


def to_logits(given: object, what: str) -> NDArray[np.float32]:
    """Return *given* as float32 ``(n_vocab,)``; error messages call it *what*.

    Raises:
        InvalidActionError: It is not a row of numbers that a token can be sampled from.
    """
    try:
        row = np.asarray(given)
    except Exception as error:  # whatever the object's own conversion raises
        raise InvalidActionError(
            f"{what} must be an array of numbers, got {type(given).__name__}"
        ) from error
    if row.dtype.kind not in _KINDS_OF_NUMBERS:
        raise InvalidActionError(f"{what} must be real numbers, got an array of {row.dtype}")
    if row.ndim == 2 and row.shape[0] == 1:
        row = row[0]
    if row.ndim != 1 or row.size == 0:
        raise InvalidActionError(
            f"{what} must have the shape (n_vocab,) or (1, n_vocab), got {row.shape}"
        )
    with np.errstate(over="ignore"):
        row = np.ascontiguousarray(row, np.float32)
    largest = row.max()  # NaN if any value is
    if not largest < math.inf:
        got = "NaN" if math.isnan(largest) else "inf or a number above the range of float32"
        raise InvalidActionError(f"{what} must be finite or -inf, got {got}")
    if largest == -math.inf:
        raise InvalidActionError(f"{what} are -inf for every token; leave at least one to sample")
    return row


def check_size(logits: NDArray[np.float32], n_vocab: int, what: str) -> None:
    """Raise InvalidActionError unless *logits*, called *what* in messages, fit the vocabulary."""
    if logits.size != n_vocab:
        raise InvalidActionError(
            f"{what} have {logits.size} values, but the vocabulary has {n_vocab}"
        )


@dataclass(slots=True, eq=False)
class SetEdits:
    """Change the model for what is evaluated from the next step on, instead of the edits so far.

    At Prefilled, for the prompt as well. Positions count in the text at the time of the event.

    Attributes:
        edits: As ``edits`` of `kqview.Engine.generate`; an empty list ends all edits.
    """

    edits: list[Edit]

    def __post_init__(self) -> None:
        try:
            self.edits = listed(self.edits)
        except InvalidEdit as error:
            raise InvalidActionError(str(error)) from None


@dataclass(slots=True, eq=False)
class ForceOutput:
    """End the request with this text instead of what was generated.

    Attributes:
        tokens: Ids of the whole text, cut before the first end-of-text token.
    """

    tokens: list[int]

    def __post_init__(self) -> None:
        self.tokens = _ids("ForceOutput", self.tokens)


@dataclass(slots=True, eq=False)
class ToolCalls:
    """End the request with tool calls instead of what was generated.

    Attributes:
        tool_calls: Anything that JSON can express: one call, or a list of calls.
    """

    tool_calls: Any

    def __post_init__(self) -> None:
        try:
            json_input.check_value(self.tool_calls)
            json.dumps(self.tool_calls, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidActionError(
                f"tool_calls of ToolCalls must be a value that JSON can express: {error}"
            ) from None


@dataclass(slots=True, eq=False)
class EmitError:
    """End the request with an error: iterating raises EmittedError.

    Attributes:
        err_str: Message of the error.
    """

    err_str: str

    def __post_init__(self) -> None:
        if not isinstance(self.err_str, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidActionError(
                f"err_str of EmitError must be a str, got {shown(self.err_str)}"
            )
        self.err_str = cleaned_text(self.err_str)  # it may go to clients, as JSON


Action = (
    Noop
    | AdjustedPrefill
    | ForceTokens
    | Backtrack
    | AdjustedLogits
    | SetEdits
    | ForceOutput
    | ToolCalls
    | EmitError
)
Terminal = ForceOutput | ToolCalls | EmitError
"""Actions that end the request."""

_Action = TypeVar("_Action", bound=Action)

_EVERYWHERE: Final = frozenset({Noop, SetEdits, ForceOutput, ToolCalls, EmitError})
ALLOWED: Final[dict[type, frozenset[type]]] = {
    Prefilled: _EVERYWHERE | {AdjustedPrefill},
    ForwardPass: _EVERYWHERE | {ForceTokens, Backtrack, AdjustedLogits},
    Sampled: _EVERYWHERE | {ForceTokens, Backtrack},
    Added: _EVERYWHERE | {ForceTokens, Backtrack},
}
"""The actions that each event allows, by class. Subclasses of actions are not allowed."""
_ACTIONS: Final = frozenset[type]().union(*ALLOWED.values())


def check_kind(event: object, action: type) -> None:
    """Raise InvalidActionError unless *event* allows actions of the class *action*."""
    allowed = ALLOWED.get(type(event))
    if allowed is None:
        raise InvalidActionError(
            f"{type(event).__name__} is not an event; pass the one that the mod was called with"
        )
    if action not in allowed:
        names = ", ".join(sorted(one.__name__ for one in allowed))
        raise InvalidActionError(
            f"{action.__name__} is not allowed at {type(event).__name__}, which allows {names}"
        )


def check_action(event: Event, answer: object, n_vocab: int) -> Action:
    """Return what a mod returned for *event* as an action; None becomes Noop.

    Raises:
        InvalidActionError: It is not an action, or does not suit this event or vocabulary.
    """
    if answer is None:
        return Noop()
    if type(answer) not in _ACTIONS:
        raise InvalidActionError(
            f"a mod must return one action or None, got {shown(answer)}; build it with actions"
        )
    check_kind(event, type(answer))
    action: Action = answer  # pyright: ignore[reportAssignmentType]
    if isinstance(action, AdjustedLogits):
        check_size(action.logits, n_vocab, _LOGITS)
    elif not isinstance(action, Noop | SetEdits | ToolCalls | EmitError):
        largest = max(action.tokens or (), default=0)
        if largest >= n_vocab:
            raise InvalidActionError(
                f"{type(action).__name__} has the token {largest}, "
                f"but the vocabulary ends at {n_vocab - 1}"
            )
    return action


class ActionBuilder:
    """The ``actions`` argument of a mod: builds the actions that its event allows.

    Raises:
        InvalidActionError: (every method) The event does not allow the action, or a value is
            invalid.
    """

    __slots__ = ("_event",)

    def __init__(self, event: Event) -> None:
        self._event = event

    def _made(self, kind: type[_Action], *values: Any) -> _Action:
        check_kind(self._event, kind)
        return kind(*values)

    def noop(self) -> Noop:
        """Change nothing."""
        return Noop()

    def adjust_prefill(
        self, tokens: Iterable[int], *, max_steps: int | None = None
    ) -> AdjustedPrefill:
        """Replace the prompt with *tokens*, or keep it if they are empty; see `AdjustedPrefill`."""
        return self._made(AdjustedPrefill, tokens, max_steps)

    def force_tokens(self, tokens: Iterable[int]) -> ForceTokens:
        """Add *tokens* to the text; see `ForceTokens`."""
        return self._made(ForceTokens, tokens)

    def backtrack(self, steps: int, tokens: Iterable[int] | None = None) -> Backtrack:
        """Remove the last *steps* tokens, then add *tokens*; see `Backtrack`."""
        return self._made(Backtrack, steps, tokens)

    def adjust_logits(
        self, logits: ArrayLike | None = None, token_temp: float | None = None
    ) -> AdjustedLogits:
        """Sample from *logits*, or from the event's if None; see `AdjustedLogits`."""
        if logits is None and isinstance(self._event, ForwardPass):
            logits = self._event.logits
        return self._made(AdjustedLogits, logits, token_temp)

    def edit(self, edits: Sequence[Edit] | Edit) -> SetEdits:
        """Have *edits* in force from the next step on; see `SetEdits`."""
        return self._made(SetEdits, edits)

    def clear_edits(self) -> SetEdits:
        """End all edits from the next step on, those of the request too."""
        return self._made(SetEdits, [])

    def force_output(self, tokens: Iterable[int]) -> ForceOutput:
        """End the request with *tokens* as its whole text; see `ForceOutput`."""
        return self._made(ForceOutput, tokens)

    def tool_calls(self, payload: Any) -> ToolCalls:
        """End the request with tool calls; see `ToolCalls`."""
        return self._made(ToolCalls, payload)

    def emit_error(self, message: str) -> EmitError:
        """End the request with an error; see `EmitError`."""
        return self._made(EmitError, message)
