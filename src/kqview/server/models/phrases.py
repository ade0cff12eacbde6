"""Phrases that a generation must not have, whatever tokens they are made of.

As in KoboldCpp: when a phrase is complete, the generation goes back to the token in which it
begins, and another one is chosen there (`PhraseBan`). `Held` keeps tokens from the client for as
long as they may become a phrase, so that nothing that was sent is taken back. Letters of ASCII
match in either case; only generated text is searched.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, TypeVar

import numpy as np

from kqview.generation.stream import Generation
from kqview.mods.actions import Action, ActionBuilder
from kqview.mods.decorator import Mod
from kqview.mods.events import Added, ForwardPass
from kqview.mods.tokenizer import ModTokenizer
from kqview.stop_strings import StopStrings

_Item = TypeVar("_Item")


class Phrases:
    """Texts to find in the bytes of others."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Find *texts*; empty ones are left out."""
        self._strings = StopStrings(_lower(text.encode("utf-8", "replace")) for text in texts)
        self.n_most: Final = self._strings.n_most
        """Bytes of the longest one, 0 without any."""

    def find(self, data: bytes) -> int | None:
        """Where the first phrase in *data* begins, None if there is none."""
        found = self._strings.find(_lower(data))
        return None if found is None else found[0]

    def n_clear(self, data: bytes) -> int:
        """How many bytes of *data* precede what may become a phrase."""
        return self._strings.n_clear(_lower(data))


def _lower(data: bytes) -> str:
    """*data* in lower case, each byte as one character."""
    return data.lower().decode("latin-1")


class PhraseBan(Mod):
    """Takes phrases back as soon as they are complete; a mod of one generation.

    `watch` has to be called before its first token.
    """

    required = True

    def __init__(self, phrases: Phrases, token_bytes: Callable[[int], bytes]) -> None:
        """Ban *phrases*; *token_bytes* gives the bytes of an id."""
        self._phrases = phrases
        self._bytes = token_bytes
        self._generation: Callable[[], Generation | None] = lambda: None

    def begin(self, request_id: str, tokenizer: ModTokenizer) -> None:
        """Set up the state of a request."""
        self._clear: list[int] = []  # ids without a phrase
        self._banned: dict[int, set[int]] = {}  # ids by the place where they are not chosen

    def watch(self, generation: Generation) -> None:
        """Read the ids of *generation*, whose mod this is: other mods may change them."""
        self._generation = weakref.ref(generation)

    def _ids_now(self) -> list[int]:
        generation = self._generation()
        return [] if generation is None else generation.tokens

    def on_forward_pass(
        self, event: ForwardPass, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """Keep banned ids from being chosen here."""
        ids = self._ids_now()
        n_back = self._n_back(ids)  # what other mods have added was not told
        if n_back:
            return actions.backtrack(n_back)
        self._clear = ids
        # What follows another text than before may be chosen again.
        self._banned = {place: some for place, some in self._banned.items() if place <= len(ids)}
        banned = self._banned.get(len(ids))
        if banned is None:
            return None
        logits = np.array(event.logits)
        logits[list(banned)] = -np.inf
        return actions.adjust_logits(logits)

    def on_added(
        self, event: Added, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """Take back a phrase that is complete."""
        n_back = self._n_back([*self._ids_now(), *event.added_tokens])
        return actions.backtrack(n_back) if n_back else None

    def _n_back(self, ids: Sequence[int]) -> int:
        """How many of the last *ids* to take back, 0 for none."""
        n_clear = len(self._clear)
        if ids[:n_clear] != self._clear:
            n_clear = 0
        first, n_before = n_clear, 0
        while first and n_before < self._phrases.n_most - 1:
            first -= 1
            n_before += len(self._bytes(ids[first]))
        parts = [self._bytes(id_) for id_ in ids[first:]]
        at = self._phrases.find(b"".join(parts))
        if at is None:
            return 0
        place, n_bytes = first, 0
        for part in parts:
            n_bytes += len(part)
            if n_bytes > at:
                break
            place += 1
        self._ban(place, ids[place])
        # A model that cannot go back chooses another end.
        self._ban(len(ids) - 1, ids[-1])
        return len(ids) - place

    def _ban(self, place: int, id_: int) -> None:
        self._banned.setdefault(place, set()).add(id_)


class Held(Generic[_Item]):
    """Items of one text in their order, kept until their bytes cannot become a phrase."""

    def __init__(self, phrases: Phrases) -> None:
        """Keep what may become one of *phrases*."""
        self._phrases = phrases
        self._items: deque[tuple[_Item, bytes]] = deque()

    def __iter__(self) -> Iterator[_Item]:
        return (item for item, _ in self._items)

    def drop(self, n: int) -> list[_Item]:
        """Drop the last *n* items, or all that are kept; returns them."""
        return [self._items.pop()[0] for _ in range(min(n, len(self._items)))]

    def add(self, item: _Item, data: bytes) -> list[_Item]:
        """Keep *item*, whose text is *data*; returns those that are clear now, oldest first."""
        self._items.append((item, data))
        n_clear = self._phrases.n_clear(b"".join(data for _, data in self._items))
        clear: list[_Item] = []
        while self._items and (n_clear := n_clear - len(self._items[0][1])) >= 0:
            clear.append(self._items.popleft()[0])
        return clear

    def rest(self) -> list[_Item]:
        """All that are kept: the text has ended."""
        return [self._items.popleft()[0] for _ in range(len(self._items))]
