"""Mods that see attention: they act on what the model attends to while it generates.

Each needs ``capture="probs"``, or a Capture of kind "probs", which may choose layers or heads or
use ``reduce`` or ``top_k``; `generate` refuses others. A row that ``on_full="drop"`` dropped ends
the request with an error that says so. They take columns for positions, so they do not work with
``context_shift``.

- `AlignAtt` stops when the model reaches the end of a source that is still growing.
  Papi, Turchi, Negri: AlignAtt, Interspeech 2023, https://arxiv.org/abs/2305.11408
- `LookbackGuard` holds the model to its source.
  Chuang et al.: Lookback Lens, EMNLP 2024, https://arxiv.org/abs/2407.07071
- `ReRead` repeats an instruction once attention to it has faded.
  Li et al.: Measuring and Controlling Instruction (In)Stability, COLM 2024,
  https://arxiv.org/abs/2402.10962

`kqview.mods.pruning` removes what the model does not attend to.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from kqview.arguments import choice, invalid, to_number, whole_number
from kqview.errors import InvalidCapture, RequestError, shown
from kqview.mods.actions import Action, ActionBuilder
from kqview.mods.decorator import Mod
from kqview.mods.events import Added, ForwardPass, Prefilled
from kqview.mods.tokenizer import ModTokenizer
from kqview.types.capture import Capture
from kqview.types.token import Attention, Positions

_FAR: Final = np.float32(1000)  # logits; no temperature that gives a text makes it likely

Row = NDArray[np.float32]
Then = Literal["damp", "resample"]
Span = tuple[int, int]
"""Positions ``start .. stop - 1`` of the prompt."""
Place = Span | str
"""A part of the prompt: its positions, or its text, which stands for the first occurrence."""


def head_rows(
    attention: Attention | None,
    n_context: int,
    *,
    positions: Positions | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Row:
    """Return captured attention as one row per layer and head, float32 ``(n_rows, n_context)``.

    Args:
        attention: As in a ForwardPass or a Token, in any of its shapes.
        n_context: Number of columns: the tokens before the next one.
        positions: Positions from the same event, for captures with ``top_k``; other columns become
            0.
        layers: Indices of captured layers; None for all.
        heads: Indices of captured heads; None for all.

    Raises:
        InvalidCapture: There is no attention, it is sums over spans, or *layers* or *heads* are not
            in it.
    """
    if attention is None:
        raise InvalidCapture("there is no attention; pass capture='probs' to generate")
    values, places = list(attention), None if positions is None else list(positions)
    if isinstance(attention, np.ndarray) and attention.ndim == 1:  # of all layers and heads
        values, places = [attention], None if positions is None else [np.asarray(positions)]
    try:
        chosen = range(len(values)) if layers is None else layers
        rows = [_full(values[i], None if places is None else places[i], n_context) for i in chosen]
        return np.concatenate(rows if heads is None else [row[list(heads)] for row in rows])
    except IndexError:
        raise InvalidCapture(
            f"layers={layers} and heads={heads} are not all in the capture; both are indices into "
            "the captured ones"
        ) from None


def check_shares(who: str, capture: Capture | None) -> None:
    """Refuse a *capture* whose rows are not shares of attention, one for each column.

    Raises:
        InvalidCapture: There is none, it is of another kind, or has spans or no layers.
    """
    if capture is None or capture.layers == ():
        got = "there is none"
    elif capture.kind != "probs":
        got = f"the capture is of kind {capture.kind!r}"
    elif capture.spans is not None:
        got = "the capture has spans, which are sums"
    else:
        return
    raise InvalidCapture(
        f"{who} needs the share of attention that each token gets, but {got}; pass "
        "capture='probs', or a Capture of that kind",
        parameter="capture",
    )


def _full(values: NDArray[Any], positions: NDArray[np.int32] | None, n_context: int) -> Row:
    """*values* of one layer as full rows."""
    values = np.atleast_2d(values).astype(np.float32)
    if positions is None:
        if values.shape[-1] != n_context:
            raise InvalidCapture(
                f"a row has {values.shape[-1]} values for {n_context} tokens; capture without spans"
            )
        return values
    rows = np.zeros((len(values), n_context), np.float32)
    np.put_along_axis(rows, np.atleast_2d(positions).astype(np.int64), values, axis=1)
    return rows


def _place(name: str, given: object) -> Place:
    if isinstance(given, str) and given:
        return given
    places = tuple(cast("Sequence[object]", given)) if isinstance(given, Sequence) else ()
    if len(places) != 2:
        raise invalid(
            name,
            "a text, or two positions (start, stop) in the prompt",
            shown(cast("object", given)),
        )
    start = whole_number(f"start of {name}", places[0], low=0)
    stop = whole_number(f"stop of {name}", places[1])
    if start >= stop:
        raise RequestError(f"{name} is {start, stop}, which is empty", parameter=name)
    return start, stop


def find_text(ids: Sequence[int], text: str, token_bytes: Callable[[int], bytes]) -> Span | None:
    """Positions of the tokens of *ids* that contain the first occurrence of *text*, or None.

    Args:
        ids: Ids of a prompt.
        text: Text to find.
        token_bytes: Bytes of an id, such as `Engine.token_bytes`.
    """
    pieces = [token_bytes(id_) for id_ in ids]
    ends = np.cumsum([len(piece) for piece in pieces])
    found = b"".join(pieces).find(text.encode())
    if found < 0:
        return None
    first = np.searchsorted(ends, found, side="right")
    return int(first), int(np.searchsorted(ends, found + len(text.encode()))) + 1


def _floor(given: object) -> float:
    value = to_number(given)
    if value is None or not 0 <= value <= 1:
        raise invalid("floor", "a number from 0 to 1", shown(given))
    return value


class _AttentionMod(Mod):
    """A mod that reads the rows of every forward pass, of some layers and heads.

    It tracks the generated tokens. Other mods may remove or add tokens without its seeing that; the
    number of tokens in each ForwardPass tells how many there are.
    """

    def __init__(
        self, place: Place, layers: Sequence[int] | None, heads: Sequence[int] | None
    ) -> None:
        self._place = place
        self._layers = layers
        self._heads = heads

    @classmethod
    def check_capture(cls, capture: Capture | None) -> None:
        check_shares(cls.__name__, capture)

    def begin(self, request_id: str, tokenizer: ModTokenizer) -> None:
        self._n_prompt = 0
        self._ids: list[int | None] = []  # None for those added by other mods
        self._prompt: list[int] = []
        self._span: Span = (0, 1)

    def on_prefilled(
        self, event: Prefilled, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """Note the prompt, and find the part that matters."""
        self._prompt = event.prompt_ids
        place = self._place
        if isinstance(place, str):
            place = find_text(self._prompt, place, tokenizer.token_bytes)
        if place is None or place[1] > len(self._prompt):
            return actions.emit_error(
                f"{self.name}: {shown(self._place)} is not in the prompt, which has "
                f"{len(self._prompt)} tokens; name a part of it"
            )
        self._span = place
        return None

    def on_forward_pass(
        self, event: ForwardPass, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """Read the rows and act on them."""
        if event.step == 1:
            self._n_prompt = event.n_tokens
        n_generated = event.n_tokens - self._n_prompt
        self._ids = [*self._ids[:n_generated], *[None] * (n_generated - len(self._ids))]
        try:
            rows = head_rows(
                event.attention,
                event.n_tokens,
                positions=event.attention_positions,
                layers=self._layers,
                heads=self._heads,
            )
        except InvalidCapture as error:
            return actions.emit_error(f"{self.name}: {error}")
        return self.handle_rows(rows, event, actions, tokenizer)

    def on_added(
        self, event: Added, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """Track the tokens."""
        self._ids += event.added_tokens
        return None

    def handle_rows(
        self, rows: Row, event: ForwardPass, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """Handle the rows of a forward pass, shape ``(n_rows, n_context)``."""
        raise NotImplementedError


class AlignAtt(_AttentionMod):
    """Stops before a token that attends to the end of the source.

    For a source that is still arriving, as in simultaneous translation: what to write next depends
    on what has not arrived yet. Call `generate` again with a longer source and the text
    so far.

    Args:
        source: The source, as text or as positions in the prompt.
        frontier: Number of positions at the end of the source that a token must not attend to most.
        layers: Indices of captured layers whose rows are averaged; None for all.
        heads: Indices of captured heads whose rows are averaged; None for all.

    Raises:
        RequestError: An argument is out of range.
    """

    def __init__(
        self,
        source: Place,
        frontier: int = 1,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> None:
        super().__init__(_place("source", source), layers, heads)
        self._frontier = whole_number("frontier", frontier)

    def begin(self, request_id: str, tokenizer: ModTokenizer) -> None:
        """See Mod.

        Raises:
            RequestError: The model has no id that ends a text.
        """
        super().begin(request_id, tokenizer)
        if tokenizer.eos_token_id is None:
            raise RequestError("AlignAtt ends the text, but this model has no end-of-text id")
        self._end_id: int = tokenizer.eos_token_id
        self.alignment: list[int] = []
        """Position in the source that each token attended to most, the last one included."""
        self.is_stopped = False
        """Whether the frontier was reached."""

    def handle_rows(
        self, rows: Row, event: ForwardPass, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        start, stop = self._span
        place = start + int(rows[:, start:stop].mean(axis=0).argmax())
        self.alignment.append(place)
        if place < stop - self._frontier:
            return None
        self.is_stopped = True
        return actions.force_tokens([self._end_id])


def lookback_ratio(rows: Row, source: Span, n_prompt: int) -> float:
    """How much *rows* attend to the source rather than to generated text, from 0.0 to 1.0.

    The mean weight of a source token, divided by the sum of that and the mean weight of a generated
    token; averaged over the rows, as in Lookback Lens. 1.0 before anything was generated.

    Args:
        rows: Attention of shape ``(n_rows, n_context)``, kind "probs".
        source: Positions of the source.
        n_prompt: Position of the first generated token.
    """
    if rows.shape[1] <= n_prompt:
        return 1.0
    looked_back = rows[:, slice(*source)].mean(axis=1)
    looked_at_new = rows[:, n_prompt:].mean(axis=1)
    both = looked_back + looked_at_new
    return float(np.divide(looked_back, both, out=np.ones_like(both), where=both > 0).mean())


def put_last(logits: Row, ids: Sequence[int]) -> Row:
    """A copy of *logits* in which *ids* come behind all others; not -inf, because a grammar or a
    schema may allow nothing else.
    """
    least = logits.min(where=np.isfinite(logits), initial=0.0) - _FAR
    changed = logits.copy()
    changed[ids] = np.minimum(logits[ids], least)
    return changed


class LookbackGuard(_AttentionMod):
    """Acts when the model stops attending to its source while it generates.

    With "damp", tokens that are not in the source become less likely in each step whose
    `lookback_ratio` is below the floor; special tokens, such as the end of the text, are spared.
    With "resample", a window of tokens whose mean ratio is below the floor is taken back and
    sampled again: each attempt at a place begins with a different token, if a constraint allows
    one.

    Args:
        source: The source: its text or positions in the prompt.
        floor: The smallest `lookback_ratio` that is accepted, from 0 to 1.
        then: What to do below the floor.
        penalty: With "damp": amount subtracted from the logits, in nats.
        window: With "resample": number of tokens judged together.
        retries: With "resample": number of further attempts at one place; then the text stays.
        layers: Indices of captured layers; None for all.
        heads: Indices of captured heads; None for all.

    Raises:
        RequestError: An argument is out of range.
    """

    def __init__(
        self,
        source: Place,
        floor: float,
        then: Then = "damp",
        *,
        penalty: float = 4.0,
        window: int = 8,
        retries: int = 2,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> None:
        super().__init__(_place("source", source), layers, heads)
        self._floor = _floor(floor)
        self._then = choice("then", then, Then)
        self._penalty = np.float32(penalty)
        self._window = whole_number("window", window)
        self._retries = whole_number("retries", retries, low=0)

    def begin(self, request_id: str, tokenizer: ModTokenizer) -> None:
        super().begin(request_id, tokenizer)
        self.ratios: list[float] = []
        """`lookback_ratio` of each generated token that remains."""
        self.n_damped = 0
        """Number of steps whose logits were changed."""
        self.n_taken_back = 0
        """Number of tokens taken back."""
        self._banned: dict[int, list[int]] = {}  # first ids of windows taken back, by place
        self._n_kept = 0  # tokens that are never taken back

    def handle_rows(
        self, rows: Row, event: ForwardPass, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        n_generated = len(self._ids)
        ratio = lookback_ratio(rows, self._span, self._n_prompt)
        # Tokens added by other mods are not judged.
        self.ratios = [*self.ratios[:n_generated], *[1.0] * (n_generated - len(self.ratios)), ratio]
        if self._then == "resample":
            banned = self._banned.get(n_generated)
            if not banned:
                return None
            return actions.adjust_logits(put_last(event.logits, banned))
        if ratio >= self._floor:
            return None
        self.n_damped += 1
        logits = event.logits - self._penalty
        spared = [*self._prompt[slice(*self._span)], *tokenizer.all_special_ids]
        logits[spared] = event.logits[spared]
        return actions.adjust_logits(logits)

    def on_added(
        self, event: Added, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """Judge the window once it is full."""
        super().on_added(event, actions, tokenizer)
        n_generated = len(self._ids)
        if self._then == "damp" or event.forced or n_generated - self._n_kept < self._window:
            return None
        place = n_generated - self._window
        first = self._ids[place]
        banned = self._banned.setdefault(place, [])
        is_good = float(np.mean(self.ratios[place:n_generated])) >= self._floor
        if is_good or first is None or len(banned) >= self._retries:
            self._n_kept = n_generated
            return None
        banned.append(first)
        self.n_taken_back += self._window
        del self._ids[place:]
        return actions.backtrack(self._window)


class ReRead(_AttentionMod):
    """Repeats an instruction once the model stops attending to it.

    Args:
        instruction: The instruction, as text or as positions in the prompt.
        floor: The smallest accepted share of attention, from 0 to 1, that the instruction and its
            reminders get together, averaged over the heads and over *window* tokens.
        reminder: Text to write; None for the instruction itself without its special tokens.
        after: Characters after which a reminder may come; "" for anywhere.
        window: Number of tokens over which the share is averaged.
        gap: Minimum number of tokens between reminders.
        most: Maximum number of reminders.
        layers: Indices of captured layers; None for all.
        heads: Indices of captured heads; None for all.

    Raises:
        RequestError: An argument is out of range.
    """

    def __init__(
        self,
        instruction: Place,
        floor: float,
        *,
        reminder: str | None = None,
        after: str = ".!?\n",
        window: int = 8,
        gap: int = 32,
        most: int = 4,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> None:
        super().__init__(_place("instruction", instruction), layers, heads)
        self._floor = _floor(floor)
        if reminder is not None and (not isinstance(reminder, str) or not reminder):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise invalid("reminder", "a text that is not empty, or None", shown(reminder))
        self._reminder = reminder
        self._after = after
        self._window = whole_number("window", window)
        self._gap = whole_number("gap", gap)
        self._most = whole_number("most", most)

    def begin(self, request_id: str, tokenizer: ModTokenizer) -> None:
        super().begin(request_id, tokenizer)
        self.shares: list[float] = []
        """Share of attention that the instruction got in each step."""
        self.reminded_at: list[int] = []
        """Positions of the reminders."""
        self._copies: list[Span] = []
        self._latest: deque[float] = deque(maxlen=self._window)
        self._due: list[int] = []  # ids that the last action forces

    def handle_rows(
        self, rows: Row, event: ForwardPass, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        row = rows.mean(axis=0)
        share = float(sum(row[start:stop].sum() for start, stop in [self._span, *self._copies]))
        self.shares.append(share)
        self._latest.append(share)
        self._due = []
        since = event.n_tokens - (self._copies[-1][1] if self._copies else self._n_prompt)
        if (self._copies and since < self._gap) or len(self._copies) >= self._most:
            return None
        if len(self._latest) < self._window or float(np.mean(self._latest)) >= self._floor:
            return None
        last = self._ids[-1] if self._ids else None
        is_at_end = last is not None and tokenizer.decode(last)[-1:] in tuple(self._after)
        if self._after and not is_at_end:  # a reminder would come within a sentence
            return None
        if self._reminder is None:
            special = tokenizer.all_special_ids  # which may end the text
            self._due = [id_ for id_ in self._prompt[slice(*self._span)] if id_ not in special]
        else:
            self._due = tokenizer.encode(self._reminder, add_special_tokens=False)
        self._at = event.n_tokens
        return actions.force_tokens(self._due)

    def on_added(
        self, event: Added, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """Note the reminder, unless another mod wrote in its place."""
        super().on_added(event, actions, tokenizer)
        if self._due and event.forced and event.added_tokens == self._due:
            self.reminded_at.append(self._at)
            self._copies.append((self._at, self._at + len(self._due)))
            self._latest.clear()
        self._due = []
        return None
