"""TextStream: turns token bytes into text as soon as it is complete, and finds stop strings.

Belongs to one generation, and to one thread at a time. It never reads finished text again: a call
costs its own bytes plus a tail as long as the longest stop string.
"""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from kqview.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the text of a `TextStream`, to which it can be reset."""

    n_characters: int
    decoder: tuple[bytes, int]
    tail: str


class TextStream:
    """Incremental UTF-8 decoder that looks for stop strings.

    A token may end inside a character, and a stop string may span tokens. Invalid bytes become
    U+FFFD exactly as in ``bytes.decode("utf-8", "replace")``, however they are split.
    """

    __slots__ = (
        "_decoder", "_n_characters", "_n_shown", "_parts", "_stop_start", "_stops", "_tail",
        "stop_match",
    )  # fmt: skip

    stop_match: str | None
    """The stop string that was found, None until then. Once set, it does not change."""

    def __init__(self, stop: Iterable[str] | StopStrings = ()) -> None:
        """Start without text.

        Args:
            stop: Strings to look for.
        """
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts: list[str] = []
        self._n_characters = 0
        self._n_shown = 0
        self._stops = stop if isinstance(stop, StopStrings) else StopStrings(stop)
        self._tail = ""
        self._stop_start: int | None = None
        self.stop_match = None

    def feed(self, data: bytes, *, is_last: bool = False) -> str:
        """Add the bytes of one token and return the text that they complete, "" if none.

        The text is not cut at a stop string. *is_last*: as `flush`.
        """
        text = self._decoder.decode(data, is_last)
        if text:
            if self._stops.n_most and self.stop_match is None:
                self._search(text)
            self._parts.append(text)
            self._n_characters += len(text)
        return text

    def flush(self) -> str:
        """Return the replacement for an unfinished character at the end; more bytes may follow."""
        return self.feed(b"", is_last=True)

    @property
    def has_stops(self) -> bool:
        """Whether there are stop strings to look for."""
        return self._stops.n_most > 0

    def mark(self) -> Mark:
        """The end of the text so far."""
        return Mark(self._n_characters, self._decoder.getstate(), self._tail)

    def reset(self, mark: Mark) -> None:
        """Remove what came after *mark*; a stop string must not have been found before it."""
        self._parts = [self.text[: mark.n_characters]]
        self._n_characters = mark.n_characters
        self._n_shown = min(self._n_shown, mark.n_characters)
        self._decoder.setstate(mark.decoder)
        self._tail = mark.tail
        self._stop_start = self.stop_match = None

    def branch(self, mark: Mark) -> Self:
        """A stream that goes on from *mark* and has none of the text before it."""
        other = type(self)(self._stops)
        other._decoder.setstate(mark.decoder)
        other._tail = mark.tail
        return other

    @property
    def text(self) -> str:
        """All text so far, including the stop string."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def text_before_stop(self) -> str:
        """The text before the stop string; all text if none was found."""
        return self.text if self._stop_start is None else self.text[: self._stop_start]

    def take_delta(self, *, is_over: bool) -> str:
        """The text since the last call that is no part of a stop string, and cannot become one.

        Once *is_over*, what was held back is safe too. After `reset`, text that was taken and
        removed is not taken back: what follows comes next.
        """
        n_safe = self._stop_start
        if n_safe is None:
            n_held = 0 if is_over else len(self._tail) - self._stops.n_clear(self._tail)
            n_safe = self._n_characters - n_held
        if n_safe <= self._n_shown:
            return ""
        parts: list[str] = []
        start = self._n_characters
        for part in reversed(self._parts):
            if start <= self._n_shown:
                break
            parts.append(part)
            start -= len(part)
        delta = "".join(reversed(parts))[self._n_shown - start : n_safe - start]
        self._n_shown = n_safe
        return delta

    def _search(self, text: str) -> None:
        # The tail is one character shorter than the longest stop string, so every match in here is
        # new: it was incomplete before.
        window = self._tail + text
        if (found := self._stops.find(window)) is not None:
            start, self.stop_match = found
            self._stop_start = self._n_characters - len(self._tail) + start
        else:
            self._tail = window[max(0, len(window) - self._stops.n_most + 1) :]
