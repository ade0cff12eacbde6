"""Kept: attention rows that clients fetch by the id of their reply, for a while.

What is kept is bounded in bytes, and counted in the server's `Budget` under a name of its own, so
it takes nothing from the share of a client. Where there is no room, the owner who keeps most loses
its oldest reply; rows that still do not fit are left out, and the generation goes on.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from kqview.errors import CapacityError
from kqview.server.attention import AttentionWanted
from kqview.server.budget import Budget
from kqview.server.errors import RateLimited, TooLarge

_CLIENT: Final = "kept attention"
_ROW_BYTES: Final = 400  # of a row's objects, besides its values
_SHARE: Final = 4  # of the budget, at most the 4th part


@dataclass(frozen=True, slots=True)
class Row:
    """The row of one token; *data* in C order, little-endian, of *shape*."""

    token_id: int
    text: str
    shape: tuple[int, ...]
    data: bytes
    media_type: str = "application/octet-stream"

    @property
    def n_bytes(self) -> int:
        """What it takes."""
        return len(self.data) + len(self.text) + _ROW_BYTES


@dataclass(slots=True)
class _Replies:
    """Of one owner, oldest first."""

    by_name: OrderedDict[str, "Rows"] = field(default_factory=OrderedDict[str, "Rows"])
    n_bytes: int = 0


@dataclass(slots=True)
class Rows:
    """Rows of one reply.

    Attributes:
        wanted: What was asked for.
        layers: Layers of the rows.
        choices: Rows of each choice, by the index of the token.
        n_left_out: Of each choice, rows for which there was no room.
    """

    wanted: AttentionWanted
    layers: tuple[int, ...]
    choices: list[dict[int, Row]]
    n_left_out: list[int] = field(default_factory=list[int])
    n_bytes: int = 0


class Kept:
    """All rows that are kept; any thread."""

    def __init__(self, budget: Budget, most_bytes: int) -> None:
        """Keep up to *most_bytes*, counted in *budget*; 0 keeps nothing."""
        self.most_bytes = min(most_bytes, budget.total_bytes // _SHARE)
        self._hold = budget.hold(_CLIENT)
        self._lock = threading.Lock()
        self._by_owner: dict[str, _Replies] = {}

    @property
    def n_bytes(self) -> int:
        """Bytes kept."""
        return self._hold.n_bytes

    def open(
        self,
        owner: str,
        name: str,
        wanted: AttentionWanted,
        layers: tuple[int, ...],
        *,
        n_choices: int,
    ) -> None:
        """Begin to keep rows of the reply *name*, a new one, of *owner*."""
        rows = Rows(wanted, layers, [{} for _ in range(n_choices)], [0] * n_choices)
        with self._lock:
            if self._take(owner, name, n_choices * _ROW_BYTES, rows):
                replies = self._by_owner.setdefault(owner, _Replies())
                replies.by_name[name] = rows
                replies.n_bytes += rows.n_bytes

    def add(self, owner: str, name: str, choice: int, n: int, row: Row) -> None:
        """Keep the row of token *n*, if there is room."""
        with self._lock:
            replies = self._by_owner.get(owner, _Replies())
            rows = replies.by_name.get(name)
            if rows is None:  # it had to go already
                return
            if self._take(owner, name, row.n_bytes, rows):
                replies.n_bytes += row.n_bytes
                rows.choices[choice][n] = row
            else:
                rows.n_left_out[choice] += 1

    def take_back(self, owner: str, name: str, choice: int, n_left: int) -> None:
        """Forget the rows of tokens from *n_left* on: mods have taken them back."""
        with self._lock:
            replies = self._by_owner.get(owner, _Replies())
            rows = replies.by_name.get(name)
            if rows is None:
                return
            for n in [n for n in rows.choices[choice] if n >= n_left]:
                n_bytes = rows.choices[choice].pop(n).n_bytes
                rows.n_bytes -= n_bytes
                replies.n_bytes -= n_bytes
                self._hold.put(n_bytes)

    def find(self, owner: str, name: str) -> Rows | None:
        """Rows of a reply of *owner*; None if there are none, or no longer."""
        with self._lock:
            return self._by_owner.get(owner, _Replies()).by_name.get(name)

    def _take(self, owner: str, name: str, n_bytes: int, rows: Rows) -> bool:
        """Count *n_bytes* for a reply; others may go for them."""
        while True:
            if self._hold.n_bytes + n_bytes <= self.most_bytes:
                try:
                    self._hold.take(n_bytes)
                    rows.n_bytes += n_bytes
                    return True
                except (CapacityError, RateLimited, TooLarge):
                    pass  # others need the memory
            if not self._drop_one(owner, name):
                return False

    def _drop_one(self, owner: str, name: str) -> bool:
        """Drop the oldest reply, but that one, of the owner who keeps most; False without any."""
        sizes = {
            one: replies.n_bytes
            for one, replies in self._by_owner.items()
            if one != owner or len(replies.by_name) > (name in replies.by_name)
        }
        if not sizes:
            return False
        most = max(sizes, key=lambda one: sizes[one])
        replies = self._by_owner[most]
        oldest = next(one for one in replies.by_name if (most, one) != (owner, name))
        n_bytes = replies.by_name.pop(oldest).n_bytes
        replies.n_bytes -= n_bytes
        self._hold.put(n_bytes)
        if not replies.by_name:
            del self._by_owner[most]
        return True
