"""The text of a stream that does not show its stop sequences. Pure.

`HeldText` holds back what may become one, `ShownText` also counts what was shown.
"""

from bisect import bisect_left
from collections.abc import Sequence


class HeldText:
    """Text without what may still become a stop sequence."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Watch for *stops*; empty ones are ignored."""
        self._stops = sorted(stop for stop in stops if stop)
        self._n_most = max(map(len, self._stops), default=0)
        self._held = ""

    def feed(self, text: str) -> str:
        """Add *text*; returns what can no longer be part of a stop sequence."""
        if not self._stops:
            return text
        whole = self._held + text
        n_clear = self._first(whole)
        self._held = whole[n_clear:]
        return whole[:n_clear]

    def _first(self, whole: str) -> int:
        """Where the first stop sequence begins, or may begin."""
        found = [at for stop in self._stops if (at := whole.find(stop)) >= 0]
        end = min(found, default=len(whole))
        for at in range(max(0, len(whole) - self._n_most + 1), end):
            rest = whole[at:]
            # In this order, those that begin with a text follow it.
            i = bisect_left(self._stops, rest)
            if i < len(self._stops) and self._stops[i].startswith(rest):
                return at
        return end


class ShownText:
    """The text of a stream, and how much of it the client has."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Do not show *stops*."""
        self._stops = stops
        self._held = HeldText(stops)
        self.n_shown = 0
        """Characters that the client has."""

    def feed(self, text: str) -> str:
        """Add *text*; returns what to show."""
        text = self._held.feed(text)
        self.n_shown += len(text)
        return text

    def rest(self, whole: str) -> str:
        """What is left to show of the text, which is *whole* at its end."""
        return whole[self.n_shown :]

    def take_back(self, text: str) -> int:
        """Go on after *text*, all that is left; returns how many characters the client drops."""
        self._held = HeldText(self._stops)
        n_before, self.n_shown = self.n_shown, len(self._held.feed(text))
        return n_before - self.n_shown
