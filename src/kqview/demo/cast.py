"""The people and things of one story, and their state: who is where, who holds what.

Needs nothing beyond the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass

from kqview.demo.words import with_article


@dataclass(eq=False)
class Person:
    """Someone in a story: who they are and where they are now."""

    name: str
    role: str
    is_woman: bool
    spot: str = ""
    introduced: bool = False

    @property
    def pronoun(self) -> str:
        """Return "She" or "He"."""
        return "She" if self.is_woman else "He"

    @property
    def their(self) -> str:
        """Return "her" or "his"."""
        return "her" if self.is_woman else "his"


@dataclass(eq=False)
class Thing:
    """An object of a story and who holds it now (None: nobody has found it yet)."""

    name: str
    holder: Person | None = None
    is_known: bool = False

    @property
    def found(self) -> str:
        """Return its name with "a" or "an" at the first find, with "the" later."""
        return f"the {self.name}" if self.is_known else with_article(self.name)
