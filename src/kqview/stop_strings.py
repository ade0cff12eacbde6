"""Stop strings, and all other texts to find in one that comes in pieces: the one matcher.

`StopStrings` says where one stands in a text, and where one may begin. What may become one is held
back: by `TextStream`, which makes text of the tokens of a generation and finds the stop string that
ends it; by `HeldText`, for the marks of reasoning and of tool calls; by `ShownText`, for what a
server sends.

Pure. An object belongs to one text, and to one thread at a time; StopStrings to any number.
"""

import codecs
from bisect import bisect_right
from collections.abc import Iterable
from typing import Final, NamedTuple, Self


class StopStrings:
    """Texts to find, and where one may begin."""

    __slots__ = ("_longest_first", "_sorted", "n_most")

    def __init__(self, texts: Iterable[str]) -> None:
        """Watch for *texts*; empty ones are ignored."""
        self._sorted = sorted({text for text in texts if text})
        self._longest_first = sorted(self._sorted, key=len, reverse=True)
        self.n_most = len(self._longest_first[0]) if self._sorted else 0
        """Characters of the longest one."""

    def find(self, text: str) -> tuple[int, str] | None:
        """Where the first one in *text* begins, and which it is: of two at a place the longer."""
        found = [(at, one) for one in self._longest_first if (at := text.find(one)) >= 0]
        return min(found, key=lambda match: match[0]) if found else None

    def n_clear(self, text: str, end: int | None = None) -> int:
        """How many characters of *text*, at most *end*, come before what may become one of them."""
        if end is None:
            end = len(text)
        for at in range(max(0, len(text) - self.n_most + 1), end):
            if self.is_begun_by(text[at:]):
                return at
        return end

    def is_begun_by(self, text: str) -> bool:
        """Whether one of them begins with *text* and goes on."""
        i = bisect_right(self._sorted, text)  # those that begin with a text follow it
        return i < len(self._sorted) and self._sorted[i].startswith(text)


_NONE: Final = StopStrings(())


class Mark(NamedTuple):
    """A place in the text of a `TextStream`, to which it can be reset."""

    n_characters: int
    decoder: tuple[bytes, int]
    tail: str


class TextStream:
    """Incremental UTF-8 decoder that looks for stop strings.

    A token may end inside a character, and a stop string may span tokens. Invalid bytes become
    U+FFFD exactly as in ``bytes.decode("utf-8", "replace")``, however they are split.

    Finished text is never read again: a call costs its own bytes plus a tail as long as the longest
    stop string.
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
        self._stops = (
            _NONE if not stop else stop if isinstance(stop, StopStrings) else StopStrings(stop)
        )
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


class HeldText:
    """Text up to the first of some marks; holds back what may be the beginning of one.

    Attributes:
        held: What may still become a mark.
    """

    __slots__ = ("_marks", "held")

    def __init__(self, marks: Iterable[str] | StopStrings) -> None:
        """Watch for *marks*; empty ones are ignored."""
        self._marks = marks if isinstance(marks, StopStrings) else StopStrings(marks)
        self.held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add *text*.

        Returns:
            The text that is certainly before every mark, and the mark that follows it, None if none
            does so far. What comes after the mark is held; feed "" to go on.
        """
        marks = self._marks
        if not marks.n_most:
            return text, None
        whole = self.held + text
        start, mark = marks.find(whole) or (len(whole), None)
        n_clear = marks.n_clear(whole, start)
        if n_clear < start or mark is None or marks.is_begun_by(whole[start:]):
            self.held = whole[n_clear:]
            return whole[:n_clear], None
        self.held = whole[start + len(mark) :]
        return whole[:start], mark

    def take(self) -> str:
        """What is held; nothing is then."""
        held, self.held = self.held, ""
        return held


class ShownText:
    """The text of a stream without stop strings, and how much of it the client has."""

    def __init__(self, stops: Iterable[str]) -> None:
        """Do not show *stops*, nor what follows one."""
        self._stops = StopStrings(stops)
        self._held = HeldText(self._stops)
        self._is_stopped = False
        self.n_shown = 0
        """Characters that the client has."""

    def feed(self, text: str) -> str:
        """Add *text*; returns what to show."""
        if self._is_stopped:
            return ""
        text, stop = self._held.feed(text)
        self._is_stopped = stop is not None
        self.n_shown += len(text)
        return text

    def rest(self, whole: str) -> str:
        """What is left to show of the text, which is *whole* at its end."""
        return whole[self.n_shown :]

    def take_back(self, text: str) -> int:
        """Go on after *text*, all that is left; returns how many characters the client drops."""
        n_before = self.n_shown
        self._held, self._is_stopped, self.n_shown = HeldText(self._stops), False, 0
        self.feed(text)
        return n_before - self.n_shown
