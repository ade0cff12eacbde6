"""Caller: who makes a request, and what of others' work is theirs to see.

What a request makes (a run, its text and logprobs, the figures of the last one; sessions, slots and
states of dialects that have them) has an ``owner``: that of the `Caller` whose key was sent. A
server without keys knows one owner, so everybody there sees everything.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls.

    Attributes:
        name: For logs and the rate limit: the address, or a short digest of the key.
        is_admin: Whether an admin key was sent.
        owner: Of what this caller makes: a digest of the whole key, "" for anyone without one.
    """

    name: str
    is_admin: bool = False
    owner: str = ""

    def may_see(self, owner: str) -> bool:
        """Whether what *owner* made is this caller's to see and to end."""
        return self.is_admin or self.owner == owner


ANYONE: Final = Caller("anyone")
"""Without a key. On a server with keys nothing belongs to it."""
