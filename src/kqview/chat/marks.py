"""Marks in a text that comes in pieces. Pure."""

import re
from collections.abc import Iterable


class Marks:
    """Text up to the first of some marks; holds back what may be the beginning of one."""

    def __init__(self, marks: Iterable[str]) -> None:
        """Look for *marks*; empty ones are ignored."""
        # The longest first, which a search prefers where several begin.
        self._marks: list[str] = sorted({mark for mark in marks if mark}, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, self._marks)) or "(?!)")
        self._held: str = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add *text*.

        Returns:
            The text that is certainly before every mark, and the mark that follows it, None if none
            does so far. What comes after the mark is held; feed "" to go on.
        """
        whole = self._held + text
        found = self._found.search(whole)
        end = len(whole) if found is None else found.start()
        n_most = len(self._marks[0]) if self._marks else 0
        for start in range(max(0, len(whole) - n_most + 1), end + (found is not None)):
            rest = whole[start:]
            # A mark that is not complete, or a longer one than what was found.
            if any(len(one) > len(rest) and one.startswith(rest) for one in self._marks):
                self._held = rest
                return whole[:start], None
        if found is None:
            self._held = ""
            return whole, None
        self._held = whole[found.end() :]
        return whole[:end], found[0]

    @property
    def held(self) -> str:
        """What may still become a mark."""
        return self._held

    def take(self) -> str:
        """What is held; nothing is then."""
        held, self._held = self._held, ""
        return held
