"""Slot: one sequence of an engine and the contents of its KV cache."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

from kqview import _core
from kqview.arguments import flag, invalid, to_pair, to_path, whole_number
from kqview.errors import RequestError, StateMismatch, UnsupportedModel, shown
from kqview.lora import EngineLora
from kqview.state.files import (
    NO_MARKS,
    EditedRun,
    SlotMarks,
    StateFacts,
    check_trailer,
    read_marked,
    split,
    write_state,
)
from kqview.types import SlotMessage

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kqview.generation.stream import Generation

_ALL: Final = 2**63 - 1


class Slot:
    """One of an engine's sequences.

    Methods that change or save a slot run between two steps of the engine. The calling thread
    waits, other threads continue. These methods and `edits` raise BusyError while a generation is
    using the slot. Once the engine is closed, every method and property raises ClosedError.

    Attributes:
        id: Index in ``engine.slots``.
    """

    def __init__(
        self,
        core: _core.Engine,
        slot_id: int,
        eot_token_id: int | None,
        state_facts: Callable[[], StateFacts],
        lora: EngineLora,
        running: "Callable[[], Mapping[int, Generation]]",
        role_of: Callable[[Sequence[int]], str | None],
    ) -> None:
        self._core = core
        self._eot_token_id = eot_token_id
        self._state_facts = state_facts
        self._lora = lora
        self._running = running
        self._role_of = role_of
        self.id = slot_id

    @property
    def tokens(self) -> list[int]:
        """Ids in the KV cache.

        After a generation: its prompt and the generated tokens except the last one, which was
        sampled but not decoded. A generation that was closed early leaves the tokens handed out.
        """
        return self._core.slot_tokens(self.id)

    @property
    def n_tokens(self) -> int:
        """Number of ids in the KV cache."""
        return len(self.tokens)

    @property
    def n_exact(self) -> int:
        """Number of `tokens`, from the start, whose cache equals that of a fresh evaluation.

        This is all of them until positions are moved (`shift`, ``reuse="shift"``,
        ``context_shift``) or a blob of unknown origin is restored. It is 0 for a model whose
        queries see later tokens, because those may differ next time. ``reuse="exact"``, the
        default, and `Engine.attend` reuse only these tokens and evaluate the rest of the prompt
        again, even if the prompt continues `tokens`.
        """
        return self._now().n_exact

    @property
    def checkpoints(self) -> list[int]:
        """Numbers of tokens that the slot can go back to without evaluating them again; ascending.

        Only caches that cannot drop all of their newest tokens have any: those with recurrent state
        or compressed keys, and those of sliding windows with ``swa_full=False``. A checkpoint is a
        copy of that part of the cache. They are taken where a prompt ends, at the
        ends of its last two messages, every ``checkpoint_every`` tokens of it, where a request
        finds the slot, and every 8 tokens of a generation with mods (not for windows, which can
        drop as much). `truncate`, a prompt that
        parts from `tokens`, a mod's `Backtrack`, a generation that is closed early or was parked,
        and copies for other slots go back to the last one before, and what follows it is evaluated
        again. Beyond ``checkpoint_bytes`` those go first that save the fewest tokens and have not
        been used for longest.
        """
        return self._core.slot_checkpoints(self.id)

    @property
    def edits(self) -> tuple[EditedRun, ...]:
        """The edits that `tokens` were computed with, by hash; empty if there were none.

        Runs of cells: the first cell of each, and the (hash, first position) of each edit in force
        there. Their values are not kept.
        """
        return _runs_of(_core.slot_edits(self._core, self.id))

    @property
    def is_busy(self) -> bool:
        """Whether a generation is using this slot."""
        return self._now().generation != 0

    def cancel(self) -> bool:
        """Cancel the generation that uses this slot, whoever iterates it; False if there is none.

        As `Generation.cancel`: it does not wait. A parked generation uses no slot;
        `Engine.generations` has it. Any thread.
        """
        generation = self._running().get(self._now().generation)
        if generation is not None:
            generation.cancel()
        return generation is not None

    def _now(self) -> _core.SlotStats:
        self._core.check_open()
        return self._core.stats().slots[self.id]

    def messages(self) -> list[SlotMessage]:
        """The messages in `tokens` as (first, last) indices, both inclusive, with their roles.

        A message ends with the model's end-of-turn id; tokens after the last such id also form a
        message. Empty if the model has no such id. The first call renders the model's chat template
        to learn how it begins messages; without jinja2 or a template, no message has a role.
        """
        ids, eot = self.tokens, self._eot_token_id
        if eot is None or not ids:
            return []
        ends = [i for i, token_id in enumerate(ids) if token_id == eot]
        if not ends or ends[-1] != len(ids) - 1:
            ends.append(len(ids) - 1)
        starts = [0, *(end + 1 for end in ends[:-1])]
        return [
            SlotMessage(first, last, self._role_of(ids[first : last + 1]))
            for first, last in zip(starts, ends, strict=True)
        ]

    def __reduce__(self) -> Any:
        """Refused: a slot is part of its engine.

        Raises:
            RequestError: Always.
        """
        raise RequestError(
            f"slot {self.id} cannot be copied or pickled; keep its contents with save() or "
            "save_file(), and restore them into a slot of another engine"
        )

    # ---- state

    def save(self) -> bytes:
        """Save ids and KV cache as a SES1 blob (`kqview.state.inspect` reads it).

        The blob can be restored into any slot of an engine with the same model, ``kv_type`` and
        flash attention, whatever its ``n_slots``. It contains the prompt in clear text. The data is
        written once, directly into the bytes object. A blob does not record `n_exact`:
        `save_marked` returns that as well.

        Raises:
            UnsupportedModel: The cache cannot be saved completely: the model has none, or is of
                deepseek4.
            OutOfMemory: There is not enough memory for the blob.
        """
        return self.save_marked(checkpoints=False)[0]

    def restore(self, blob: "Buffer", *, exact: bool = False) -> int:
        """Replace the contents of the slot with those of *blob*; return the number of bytes read.

        A blob that is refused changes nothing. A raw blob, without the trailer of a state file,
        does not record its model and LoRA adapters (only the shapes have to fit), edits, or whether
        its slot had been shifted; `restore_file` checks these. Without *exact*, the next generation
        therefore evaluates its prompt again (`n_exact` is 0), unless it accepts approximate cache
        entries with ``reuse="prefix"``. A blob can put any values into the cache, so restore only
        blobs from sources you trust.

        Args:
            blob: What `save` returned, or the contents of a state file, whose trailer is checked
                and removed. Buffers other than bytes, such as an mmap or an array, are copied.
            exact: Your assurance that the blob was saved from this model with the same adapters,
                and from a slot whose tokens were all exact (`n_exact`) and computed without
                `edits`: the next generation whose prompt begins with `tokens` then continues from
                there. If a trailer records how many were exact, that number applies instead.

        Raises:
            StateFormatError: It is not a valid blob; the message names the field and its offset.
            StateMismatch: The blob belongs to another model, ``kv_type`` or flash attention
                setting, or has more tokens than the slot can hold.
            UnsupportedModel: As for `save`.
        """
        exact = flag("exact", exact)
        # A copy as bytes cannot change between the check and the read of the engine thread.
        data, trailer = split(_bytes_of(blob))
        marks = check_trailer(data, trailer, self._state_facts()) if trailer else NO_MARKS
        if marks.n_exact is None and exact:
            marks = replace(marks, n_exact=_ALL)
        if not trailer:
            marks = replace(marks, lora=self._lora.scales)
        return self.restore_marked(data, marks)

    def save_marked(self, *, checkpoints: bool = True) -> tuple[bytes, SlotMarks]:
        """Like `save`, but also return facts about the slot that the blob does not record.

        All are from the same moment. `restore_marked` and `kqview.state.write_state` accept them.

        Args:
            checkpoints: Copy the slot's `checkpoints` as well.
        """
        saved = _core.save_slot(self._core, self.id, checkpoints)
        return saved.blob, SlotMarks(
            saved.n_exact, tuple(saved.lora), _runs_of(saved.edits), saved.checkpoints
        )

    def restore_marked(self, blob: bytes, marks: SlotMarks) -> int:
        """Like `restore`, for a blob without a trailer whose *marks* are known.

        Of its checkpoints as many are kept as ``checkpoint_bytes`` allows.
        """
        n_exact = 0 if marks.n_exact is None else min(marks.n_exact, _ALL)
        lora = self._lora.opened if marks.lora is None else marks.lora
        if len(lora) != len(self._lora.opened):
            raise StateMismatch(
                f"the slot was saved with {len(lora)} LoRA adapters, this engine has "
                f"{len(self._lora.opened)}; open it with the adapters it was saved with"
            )
        edits = [
            _core.EditedCells(start, [_core.EditKey(*key) for key in keys])
            for start, keys in marks.edits
        ]
        _core.restore_slot(self._core, self.id, blob, n_exact, lora, edits, marks.checkpoints)
        return len(blob)

    def save_file(self, path: str | os.PathLike[str], *, checkpoints: bool = True) -> int:
        """Save the slot to a file that `restore_file` checks; return the file's size.

        The file holds the blob and a trailer with a checksum, the fingerprint of the model and its
        adapters (their files are read once), ``kv_type``, `n_exact` and the slot's `checkpoints`.
        It appears atomically, and only its owner can read it.

        Args:
            path: The file.
            checkpoints: Keep them. Without them the file is smaller by up to
                ``checkpoint_bytes``, and what is restored from it can go back to its end alone.

        Raises:
            StateError: A file of the model changed after the engine was opened.
            OSError: The file cannot be written; an old file stays.
            KqviewError: As for `save`.
        """
        target = to_path("path", path)
        blob, marks = self.save_marked(checkpoints=flag("checkpoints", checkpoints))
        return write_state(target, blob, self._state_facts(), marks)

    def restore_file(self, path: str | os.PathLike[str]) -> int:
        """Restore a file that `save_file` wrote; return the size of its blob.

        Checks what `restore` cannot check for a raw blob: every byte, the model and its adapters,
        and how many tokens are exact. A file without a trailer is treated as a raw blob.

        Raises:
            StateFormatError: The file was altered.
            StateMismatch: The file belongs to another model or other adapters, or as for `restore`.
            OSError: The file cannot be read.
            KqviewError: As for `restore`.
        """
        return self.restore_marked(*read_marked(to_path("path", path), self._state_facts()))

    def truncate(self, n: int) -> None:
        """Keep the first *n* tokens.

        A cache that cannot drop that tail (recurrent models, ``swa_full=False``) goes back to the
        last of `checkpoints` before it, or is cleared if there is none. `tokens` then shows what is
        left, and the next generation computes the rest again.

        Raises:
            RequestError: *n* is negative or greater than `n_tokens`.
        """
        n = whole_number("n", n, low=0)
        _core.truncate_slot(self._core, self.id, n)

    def shift(self, n_keep: int, n_discard: int) -> int:
        """Remove *n_discard* tokens after the first *n_keep*; later tokens move up.

        Nothing is recomputed: the later tokens keep keys and values that were computed while the
        removed tokens were visible, rotated to their new positions. They are therefore approximate,
        and `n_exact` becomes at most *n_keep*: a generation that continues from `tokens` evaluates
        them again unless it passes ``reuse="prefix"``. Afterwards, columns refer to positions in
        the remaining tokens. Costs two copies of the slot's cache.

        Returns:
            The new `n_tokens`.

        Raises:
            RequestError: The range is empty or not within `tokens`.
            UnsupportedModel: Positions in the cache cannot be moved: recurrent state, sliding
                windows, learned or multi-dimensional positions, keys that the model changes after
                rotation, keys that ``kv_type`` stores as bf16, or no cache.
        """
        n_keep = whole_number("n_keep", n_keep, low=0, high=2**63 - 1)
        n_discard = whole_number("n_discard", n_discard, low=1, high=2**63 - 1)
        if obstacle := self._core.shift_obstacle:
            raise UnsupportedModel(
                f"the slot cannot be shifted, because this model keeps {obstacle}; "
                "send the ids to keep as a new prompt"
            )
        if n_keep + n_discard > self.n_tokens:
            raise RequestError(
                f"n_keep is {n_keep} and n_discard {n_discard}, but the slot has {self.n_tokens} "
                "tokens; discard at most those that follow the kept ones",
                parameter="n_discard",
            )
        _core.remove_from_slot(self._core, self.id, [(n_keep, n_keep + n_discard)])
        return self.n_tokens

    def remove(self, ranges: Iterable[tuple[int, int] | range]) -> int:
        """Remove ranges of tokens in one move, such as turns of a chat; later tokens move up.

        As approximate as `shift`, which removes one range: `n_exact` becomes at most the start of
        the first range. Costs two copies of the slot's cache, however many ranges there are. One
        range at the end of `tokens` is a `truncate`, for every model.

        Args:
            ranges: (start, stop) indices into `tokens`, in any order; they may overlap. The spans
                of `Engine.apply_chat_template` are such ranges.

        Returns:
            The new `n_tokens`.

        Raises:
            RequestError: A range is empty or not within `tokens`; nothing was removed.
            UnsupportedModel: As for `shift`.
        """
        gone = _merged(ranges)
        is_tail = len(gone) == 1 and gone[0][1] == self.n_tokens
        if (obstacle := self._core.shift_obstacle) and not is_tail:
            raise UnsupportedModel(
                f"ranges cannot be removed, because this model keeps {obstacle}; "
                "send the ids to keep as a new prompt"
            )
        _core.remove_from_slot(self._core, self.id, gone)
        return self.n_tokens

    def clear(self) -> None:
        """Remove all tokens; the next generation starts with an empty cache."""
        _core.clear_slot(self._core, self.id)

    def state_facts(self) -> StateFacts:
        """Model and KV settings, which `kqview.state` writes into the trailer of a file.

        The first call reads all files of the model and the adapters.

        Raises:
            StateError: A file changed after the engine was opened.
            OSError: A file cannot be read.
        """
        return self._state_facts()

    def __repr__(self) -> str:
        return f"Slot(id={self.id})"


def _merged(ranges: object) -> list[tuple[int, int]]:
    """*ranges* in ascending order, with those joined that touch or overlap."""
    if isinstance(ranges, str | bytes) or not isinstance(ranges, Iterable):
        raise invalid("ranges", "(start, stop) pairs such as [(0, 4)]", shown(ranges))
    checked: list[tuple[int, int]] = []
    for i, given in enumerate(cast("Iterable[Any]", ranges)):
        pair = to_pair(given)
        if pair is None:
            raise invalid(f"ranges[{i}]", "a (start, stop) pair", shown(cast("object", given)))
        start = whole_number(f"the start of ranges[{i}]", pair[0], low=0)
        checked.append((start, whole_number(f"the stop of ranges[{i}]", pair[1], low=start + 1)))
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(checked):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def _bytes_of(blob: "Buffer") -> bytes:
    """*blob* as bytes; a copy, unless it is bytes already."""
    if isinstance(blob, bytes):
        return blob
    try:
        return bytes(memoryview(cast("bytes", blob)))
    except (TypeError, BufferError):
        raise invalid("blob", "the bytes of Slot.save", type(blob).__name__) from None


def _runs_of(cells: "list[_core.EditedCells]") -> tuple[EditedRun, ...]:
    return tuple((run.start, tuple((key.hash, key.first) for key in run.keys)) for run in cells)
