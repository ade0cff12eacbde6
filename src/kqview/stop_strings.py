"""Stop strings, and all other texts to find in one that comes in pieces: the one matcher.

`StopStrings` says where one stands in a text, and where one may begin. What may become one is held
back: by `generation.text.TextStream`, which finds the stop string that ends a generation; by
`HeldText`, for the marks of reasoning and of tool calls; by `ShownText`, for what a server sends.

Pure. An object belongs to one text, and to one thread at a time; StopStrings to any number.
"""

from bisect import bisect_right
from collections.abc import Iterable


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
