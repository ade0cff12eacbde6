"""Fields of requests: options that dialects call by the same names, and how each names the others.

Pure. A field that is absent or null is not given.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Struct

from kqview.errors import InvalidSampling, RequestError
from kqview.server.errors import renamed
from kqview.types import Sampling
from kqview.types.capture import MOST_SPANS
from kqview.types.sampling import OPTIONS

MOST_LOGPROBS: Final = 1000
"""Most logprobs a token: their texts are looked up on the event loop."""

# Lists are searched for every token, or checked on the event loop: long ones hold others up.
Stops = Annotated[list[Annotated[str, msgspec.Meta(max_length=1000)]], msgspec.Meta(max_length=256)]
Indices = Annotated[list[int], msgspec.Meta(max_length=4096)]
Spans = Annotated[list[tuple[int, int | None]], msgspec.Meta(max_length=MOST_SPANS)]
Weights = Annotated[list[float], msgspec.Meta(max_length=4096)]


class SamplingFields(Struct, kw_only=True):
    """Options of `Sampling` that KoboldAI's and llama.cpp's clients call as it does."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Stops | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    grammar: str | None = None


class FieldTable:
    """Which fields of a dialect give a parameter of the core; the first one that is given wins."""

    def __init__(
        self,
        body: type[Struct],
        sampling: Mapping[str, tuple[str, ...]],
        others: Mapping[str, tuple[str, ...]],
    ) -> None:
        """Know the fields of *body*.

        Args:
            body: Fields with the name of an option of `Sampling` give that option.
            sampling: Other options of `Sampling`, with the fields for each.
            others: Further parameters, with the fields for each.
        """
        own = {name: (name,) for name in OPTIONS if name in body.__struct_fields__}
        self.sampling: Final = {**own, **sampling}
        self.fields: Final = {**self.sampling, **others}
        # What one field alone gives is looked up without a choice.
        self._own = {option: of[0] for option, of in self.sampling.items() if len(of) == 1}
        self._chosen = {option: of for option, of in self.sampling.items() if len(of) > 1}
        self._names = {parameter: of[0] for parameter, of in self.fields.items()}
        self._several = {name: of for name, of in self.fields.items() if len(of) > 1}

    def name(self, body: Struct, parameter: str) -> str:
        """The field of *body* that gives *parameter*; the first one if none does."""
        return _given(body, self.fields[parameter])

    def value(self, body: Struct, parameter: str) -> Any:
        """What *body* gives for *parameter*, None for nothing."""
        return getattr(body, _given(body, self.fields[parameter]))

    def names(self, body: Struct) -> dict[str, str]:
        """Parameter -> the field that the client gave it by, for `GenerateRequest`."""
        return self._names | {name: _given(body, of) for name, of in self._several.items()}

    def options(self, body: Struct) -> dict[str, Any]:
        """Option of `Sampling` -> what *body* gives for it, None for nothing."""
        found: dict[str, Any] = {option: getattr(body, name) for option, name in self._own.items()}
        for option, of in self._chosen.items():
            found[option] = getattr(body, _given(body, of))
        return found

    def n_logprobs(self, body: Struct, *, if_true: int) -> int | None:
        """How many top logprobs are wanted, None for none; ``true`` is *if_true*.

        Raises:
            RequestError: It is above `MOST_LOGPROBS`.
        """
        n: bool | int | None = self.value(body, "top_logprobs")
        if n is None or n is False:
            return None
        if n > MOST_LOGPROBS:
            name = self.name(body, "top_logprobs")
            raise RequestError(f"{name} is {n}, the limit is {MOST_LOGPROBS}; ask for fewer")
        return if_true if n is True else n

    def sampling_of(self, body: Struct, options: Mapping[str, Any]) -> Sampling:
        """*options* without those that are None.

        Raises:
            InvalidSampling: A value is out of its range; the message names the client's field.
        """
        try:
            return Sampling(**{name: one for name, one in options.items() if one is not None})
        except InvalidSampling as error:
            names = {option: _given(body, names) for option, names in self.sampling.items()}
            raise renamed(error, names) from None


def first(*values: Any) -> Any:
    """The first value that is not None, None if all are."""
    for value in values:
        if value is not None:
            return value
    return None


def tuple_of(values: list[Any] | None) -> tuple[Any, ...] | None:
    """*values* as a tuple, None if there are none."""
    return None if values is None else tuple(values)


def _given(body: Struct, names: tuple[str, ...]) -> str:
    for name in names:
        if getattr(body, name) is not None:
            return name
    return names[0]
