"""Scoring: log-probabilities of given texts; a part of Engine.

Each text becomes a request that evaluates its prompt and samples nothing. The engine thread turns
the logits of each step into scores before the next one, so only one step's logits are in memory at
a time, however long the text is.
"""

from collections.abc import Sequence
from typing import cast

from kqview import _core
from kqview.arguments import whole_number
from kqview.edit import Edit
from kqview.errors import RequestError
from kqview.generation.stream import Generation
from kqview.lora import LoraScales
from kqview.submission import Submission, be_alone
from kqview.text_batch import Batch, TextOptions, in_turn, items_of
from kqview.types import Score


class ScoreOptions(TextOptions, total=False):
    """Options of `Engine.score`."""

    last: int | Sequence[int] | None
    top_logprobs: int | None
    lora: LoraScales | None
    edits: Sequence[Edit] | Edit | None
    deterministic: bool


class Scoring:
    """`Engine.score`; any thread."""

    def __init__(self, core: _core.Engine, submission: Submission) -> None:
        self._core = core
        self._submission = submission

    def score(
        self,
        texts: object,
        *,
        last: int | Sequence[int] | None = None,
        top_logprobs: int | None = None,
        priority: int = 0,
        lora: LoraScales | None = None,
        edits: Sequence[Edit] | Edit | None = None,
        deterministic: bool = False,
        add_special: bool = True,
        parse_special: bool = True,
    ) -> Batch[Score | list[Score]]:
        """As of Engine."""
        self._core.check_open()
        n_top = self._submission.checked_top(top_logprobs)
        is_one, items = items_of(texts)
        names = ["texts"] if is_one else [f"texts[{i}]" for i in range(len(items))]
        ids = [
            self._submission.prompt_ids(item, add_special, parse_special, name)
            for name, item in zip(names, items, strict=True)
        ]
        n_last = _counts("last", last, ids)

        def submit(i: int) -> Generation:
            request = self._submission.request(ids[i], priority=priority, lora=lora, edits=edits)
            request.only_attends = True
            be_alone(request, deterministic)
            request.n_scores = n_last[i]
            request.n_top_scores = n_top or 0
            return self._submission.submit("score", request, ids[i])

        scores = [Score.empty(one, has_top=n_top is not None) for one in ids]
        return Batch(
            in_turn(ids, self._core.n_slots, submit),
            lambda i, block: scores[i].set(block.start, block.scores),
            lambda: scores[0] if is_one else scores,
        )


def _counts(name: str, given: object, ids: list[list[int]]) -> list[int]:
    """How many tokens of each text to score, at most all but the first."""
    most = [len(one) - 1 for one in ids]
    if given is None:
        return most
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return [min(whole_number(name, given), n) for n in most]
    counts = list(cast("Sequence[object]", given))
    if len(counts) != len(ids):
        raise RequestError(
            f"{name} has {len(counts)} numbers, but there are {len(ids)} texts; pass one for each",
            parameter=name,
        )
    return [
        min(whole_number(f"{name}[{i}]", count), n)
        for i, (count, n) in enumerate(zip(counts, most, strict=True))
    ]
