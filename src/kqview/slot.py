"""Slot: one sequence of an engine and what its KV cache holds."""

import os
from collections.abc import Callable
from typing import Final

from kqview import _core
from kqview.arguments import invalid, whole_number
from kqview.errors import RequestError, UnsupportedModel, shown
from kqview.state.files import (
    NO_MARKS,
    SlotMarks,
    StateFacts,
    check_trailer,
    read_marked,
    split,
    write_state,
)

_ALL: Final = 2**63 - 1


class Slot:
    """One of an engine's sequences.

    What changes or saves it is done between two steps of the engine; the calling thread waits for
    that, other threads go on.

    Attributes:
        id: Index in ``engine.slots``.
    """

    def __init__(
        self,
        core: _core.Engine,
        slot_id: int,
        eot_token_id: int | None,
        state_facts: Callable[[], StateFacts],
    ) -> None:
        self._core = core
        self._eot_token_id = eot_token_id
        self._state_facts = state_facts
        self.id = slot_id

    @property
    def tokens(self) -> list[int]:
        """Ids in the KV cache.

        After a generation: its prompt and what it generated without the last id, which was sampled
        but not decoded. A generation that was closed early leaves what was handed out.

        Raises:
            ClosedError: The engine is closed.
        """
        return self._core.slot_tokens(self.id)

    @property
    def n_tokens(self) -> int:
        """Number of ids in the KV cache."""
        return len(self.tokens)

    @property
    def n_exact(self) -> int:
        """How many of `tokens`, from the first one on, hold what a fresh evaluation computes.

        All of them, until positions are moved (`shift`, ``reuse="shift"``, ``context_shift``) or a
        blob of unknown origin is restored; none in a model whose queries see what follows them, as
        that may be other tokens the next time. ``reuse="exact"``, the default, and `Engine.attend`
        take these from the cache and evaluate the rest of their prompt again, also where they go on
        from `tokens`.
        """
        return self._core.slot_n_exact(self.id)

    @property
    def is_busy(self) -> bool:
        """Whether a generation works in this slot now."""
        return self._core.slot_is_busy(self.id)

    def messages(self) -> list[tuple[int, int]]:
        """The messages in `tokens` as (first, last) index, last included.

        A message ends with the model's end-of-turn id; what follows the last one is a message too.
        Empty for a model that has no such id.
        """
        ids, eot = self.tokens, self._eot_token_id
        if eot is None or not ids:
            return []
        ends = [i for i, token_id in enumerate(ids) if token_id == eot]
        if not ends or ends[-1] != len(ids) - 1:
            ends.append(len(ids) - 1)
        return list(zip([0, *(end + 1 for end in ends[:-1])], ends, strict=True))

    # ---- state

    def save(self) -> bytes:
        """Save ids and KV cache as a SES1 blob (`kqview.state.inspect` reads it).

        It restores into any slot of an engine with this model, ``kv_type`` and flash attention,
        whatever its ``n_slots``. It holds the prompt in clear. Written once, straight into the
        bytes object. What a blob cannot hold is `n_exact`: `save_marked` returns that too.

        Raises:
            BusyError: A generation works in this slot.
            UnsupportedModel: The cache cannot be saved whole: sliding windows, recurrent state, or
                no cache.
            OutOfMemory: There is no room for the blob.
            ClosedError: The engine is closed.
        """
        return self.save_marked()[0]

    def restore(self, blob: bytes, *, exact: bool = False) -> int:
        """Make the slot hold what *blob* holds; returns the bytes read.

        A blob that is refused changes nothing. A raw blob, without the trailer of a state file,
        says neither of which model nor with which LoRA adapters it was made, as long as the shapes
        fit, nor whether its slot had been shifted; `restore_file` checks that. So without *exact*
        the next generation evaluates its prompt again (`n_exact` is 0), unless it takes approximate
        cells too: ``reuse="shift"``. Who may restore may put any numbers into the cache: take blobs
        from those you trust.

        Args:
            blob: What `save` returned, or the bytes of a state file, whose trailer is checked and
                left out. Other buffers than bytes are copied first.
            exact: Your word that the blob was saved from this model and its adapters, and from a
                slot whose tokens were all exact (`n_exact`): the next generation whose prompt
                begins with `tokens` goes on from there. Where a trailer tells how many were, that
                counts.

        Raises:
            StateFormatError: It is no sound blob; the message names the field and its offset.
            StateMismatch: It is one of another model, ``kv_type`` or flash attention, or has more
                tokens than the slot.
            BusyError: A generation works in this slot.
            UnsupportedModel: As for `save`.
            ClosedError: The engine is closed.
        """
        if not isinstance(blob, bytes | bytearray | memoryview):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(
                f"blob must be the bytes of Slot.save, got {type(blob).__name__}", parameter="blob"
            )
        if not isinstance(exact, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise invalid("exact", "True or False", shown(exact))
        # Bytes cannot change while the engine thread reads what it has checked.
        data, trailer = split(bytes(blob))
        marks = check_trailer(data, trailer, self._state_facts()) if trailer else NO_MARKS
        if marks.n_exact is None and exact:
            marks = SlotMarks(n_exact=_ALL)
        return self.restore_marked(data, marks)

    def save_marked(self) -> tuple[bytes, SlotMarks]:
        """As `save`, and what is true of the slot and stands not in its blob, of the same moment.

        `restore_marked` takes both, and so does `kqview.state.write_state`.
        """
        saved = _core.save_slot(self._core, self.id)
        return saved.blob, SlotMarks(n_exact=saved.n_exact)

    def restore_marked(self, blob: bytes, marks: SlotMarks) -> int:
        """As `restore` for a blob without a trailer, of which *marks* are known."""
        n_exact = 0 if marks.n_exact is None else min(marks.n_exact, _ALL)
        _core.restore_slot(self._core, self.id, blob, n_exact)
        return len(blob)

    def save_file(self, path: str | os.PathLike[str]) -> int:
        """Save the slot to a file that `restore_file` checks; returns the file's size.

        The blob, and a trailer with a checksum, the fingerprint of the model and its adapters
        (their files are read once), ``kv_type`` and `n_exact`. The file appears whole, readable by
        its owner alone.

        Raises:
            StateError: A file of the model is no longer the one that the engine was opened from.
            OSError: The file cannot be written; what was there before still is.
            KqviewError: As for `save`.
        """
        blob, marks = self.save_marked()
        return write_state(path, blob, self._state_facts(), marks)

    def restore_file(self, path: str | os.PathLike[str]) -> int:
        """Make the slot hold what a file of `save_file` holds; returns the bytes of its blob.

        What `restore` cannot tell of a raw blob is checked here: every byte, the model and its
        adapters, how many tokens are exact. A file without a trailer is a raw blob.

        Raises:
            StateFormatError: Its bytes are not those that were written.
            StateMismatch: It is one of another model or other adapters, or as for `restore`.
            OSError: The file cannot be read.
            KqviewError: As for `restore`.
        """
        return self.restore_marked(*read_marked(path, self._state_facts()))

    def truncate(self, n: int) -> None:
        """Keep the first *n* tokens.

        A cache that cannot drop its tail (recurrent models) is emptied; `tokens` says what is left,
        and the next generation computes the rest again.

        Raises:
            RequestError: *n* is negative or more than `n_tokens`.
            BusyError: A generation works in this slot.
            ClosedError: The engine is closed.
        """
        n = whole_number("n", n, low=0)
        _core.truncate_slot(self._core, self.id, n)

    def shift(self, n_keep: int, n_discard: int) -> int:
        """Remove *n_discard* tokens behind the first *n_keep*; what follows closes up.

        Nothing is computed again: the tokens that stay keep the keys and values that were computed
        with the removed ones before them, rotated to their new positions. So they are approximate,
        and `n_exact` becomes *n_keep* at most: a generation that goes on from `tokens` evaluates
        them again unless it says ``reuse="shift"``. Columns of later rows are positions in the
        shortened `tokens`. Costs two copies of the slot's cache.

        Returns:
            The new `n_tokens`.

        Raises:
            RequestError: The range is not within `tokens`, or empty.
            UnsupportedModel: The cache's positions cannot be moved: recurrent state, sliding
                windows, learned positions or those of several dimensions, keys that the model
                changes after their rotation or that ``kv_type`` keeps as bf16, or no cache.
            BusyError: A generation works in this slot.
            ClosedError: The engine is closed.
        """
        n_keep = whole_number("n_keep", n_keep, low=0, high=2**63 - 1)
        n_discard = whole_number("n_discard", n_discard, low=1, high=2**63 - 1)
        if obstacle := self._core.shift_obstacle:
            raise UnsupportedModel(
                f"this model keeps {obstacle}; send the ids that are to be seen again"
            )
        _core.shift_slot(self._core, self.id, n_keep, n_discard)
        return self.n_tokens

    def clear(self) -> None:
        """Forget everything; the next generation starts from an empty cache.

        Raises:
            BusyError: A generation works in this slot.
            ClosedError: The engine is closed.
        """
        _core.clear_slot(self._core, self.id)

    def state_facts(self) -> StateFacts:
        """What `kqview.state` writes into the trailer of a file: model and KV settings.

        Reads all of the model's and the adapters' files the first time.

        Raises:
            StateError: One of them is no longer the file that the engine was opened from.
            OSError: One of them cannot be read.
        """
        return self._state_facts()

    def __repr__(self) -> str:
        return f"Slot(id={self.id})"
