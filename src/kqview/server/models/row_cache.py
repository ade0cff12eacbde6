"""RowCache: attention rows that clients fetch by the id of their reply, for a while.

What is kept is bounded in bytes, and counted in the server's `Budget` under a name of its own, so
it takes nothing from the share of a client. Where there is no room, the owner who keeps most loses
its oldest reply; rows that still do not fit are left out, and the generation goes on.
"""

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

from kqview.errors import CapacityError
from kqview.server.errors import RateLimited, TooLarge
from kqview.server.models.run import AttentionWanted
from kqview.server.web.budget import Budget

_CLIENT: Final = "kept attention"
_ROW_BYTES: Final = 400  # of a row's objects, besides its values
_SHARE: Final = 4  # of the budget, at most the 4th part


@dataclass(frozen=True, slots=True)
class CachedRow:
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


class PromptText:
    """The tokens of a prompt, each with the text that it completes."""

    def __init__(self, ids: Sequence[int], texts: Iterable[str]) -> None:
        """Keep *ids* with *texts* in little more than their bytes."""
        self._ids = array("i", ids)
        pieces = list(texts)
        self._text = "".join(pieces)
        self._ends = array("q", accumulate(map(len, pieces)))

    @property
    def ids(self) -> list[int]:
        """The ids."""
        return self._ids.tolist()

    @property
    def texts(self) -> list[str]:
        """The text of each; those of a character's first ids are ""."""
        return [self._text[i:j] for i, j in pairwise((0, *self._ends))]

    @property
    def n_bytes(self) -> int:
        """What it takes."""
        return sum(map(sys.getsizeof, (self._ids, self._text, self._ends)))


@dataclass(slots=True)
class _Replies:
    """The replies of one owner, oldest first."""

    by_name: OrderedDict[str, "CachedRows"] = field(default_factory=OrderedDict[str, "CachedRows"])
    n_bytes: int = 0


@dataclass(slots=True)
class CachedRows:
    """Rows of one reply.

    Attributes:
        wanted: What was asked for.
        layers: Layers of the rows.
        choices: Rows of each choice, by the index of the token.
        n_left_out: Of each choice, rows for which there was no room.
        prompt: The prompt, None if nobody asks for it by the reply's name.
        hidden: Tokens whose rows are not given, because the client is not to know them; whoever
            opened the reply may change it.
    """

    wanted: AttentionWanted
    layers: tuple[int, ...]
    choices: list[dict[int, CachedRow]]
    n_left_out: list[int] = field(default_factory=list[int])
    prompt: PromptText | None = None
    hidden: Set[int] = frozenset()
    n_bytes: int = 0

    def row(self, choice: int, n: int) -> CachedRow | None:
        """The row of token *n* of a choice, if it is kept and the client may know the token."""
        return None if n in self.hidden else self.choices[choice].get(n)

    def shown(self, choice: int) -> list[tuple[int, CachedRow]]:
        """The rows of a choice whose tokens the client may know, by the token's index."""
        rows = list(self.choices[choice].items())  # at once: others are being added
        return [(n, row) for n, row in rows if n not in self.hidden]


class RowCache:
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
        prompt: PromptText | None = None,
        hidden: Set[int] = frozenset(),
    ) -> None:
        """Begin to keep rows of the reply *name* of *owner*; those of an older one are dropped."""
        choices: list[dict[int, CachedRow]] = [{} for _ in range(n_choices)]
        rows = CachedRows(wanted, layers, choices, [0] * n_choices, prompt, hidden)
        n_bytes = n_choices * _ROW_BYTES + (0 if prompt is None else prompt.n_bytes)
        with self._lock:
            self._drop(owner, name)
            if self._take(owner, name, n_bytes, rows):
                replies = self._by_owner.setdefault(owner, _Replies())
                replies.by_name[name] = rows
                replies.n_bytes += rows.n_bytes

    def add(self, owner: str, name: str, choice: int, n: int, row: CachedRow) -> None:
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
                self._hold.take(-n_bytes)

    def find(self, owner: str, name: str) -> CachedRows | None:
        """Rows of a reply of *owner*; None if there are none, or no longer."""
        with self._lock:
            return self._by_owner.get(owner, _Replies()).by_name.get(name)

    def _take(self, owner: str, name: str, n_bytes: int, rows: CachedRows) -> bool:
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
        self._drop(most, next(one for one in replies.by_name if (most, one) != (owner, name)))
        return True

    def _drop(self, owner: str, name: str) -> None:
        replies = self._by_owner.get(owner)
        if replies is None or (rows := replies.by_name.pop(name, None)) is None:
            return
        replies.n_bytes -= rows.n_bytes
        self._hold.take(-rows.n_bytes)
        if not replies.by_name:
            del self._by_owner[owner]
