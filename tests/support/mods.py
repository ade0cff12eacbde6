"""A vocabulary and a model of a few lines for tests of mods, and `drive`, which runs a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kqview._core import EditPlan
from kqview.mods import ModTokenizer, mod
from kqview.mods.calls import ModCaller, at_once
from kqview.mods.decorator import begin
from kqview.mods.steering import Decision, Steering, Steps
from kqview.trace import TraceRecorder, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kqview.mods.events import Dialogue

END = "<end>"


class Words:
    """A vocabulary: the end of the text, all bytes, and *words*, of which the longest is taken."""

    bos_token_id: int | None = None
    eos_token_id: int | None = 0
    has_vocab = True

    def __init__(self, *words: str) -> None:
        self.pieces = [
            END.encode(),
            *(bytes([byte]) for byte in range(256)),
            *(word.encode() for word in words),
        ]
        self.n_vocab = len(self.pieces)
        self._ids = {piece: i for i, piece in enumerate(self.pieces)}

    def control_tokens(self) -> list[int]:
        return [0]

    def tokenize(self, text: str, add_special: bool) -> list[int]:
        rest = text.encode()
        ids: list[int] = []
        while rest:
            n = next(n for n in range(len(rest), 0, -1) if rest[:n] in self._ids)
            ids.append(self._ids[rest[:n]])
            rest = rest[n:]
        return ids

    def id(self, piece: str) -> int:
        return self._ids[piece.encode()]

    def tokenizer(self) -> ModTokenizer:
        return ModTokenizer(
            self,
            tokenize=self.tokenize,
            detokenize=lambda ids: b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace"),
            token_bytes=self.pieces.__getitem__,
        )


class Picked(NamedTuple):
    id: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None


@dataclass
class FakeForward:
    """A forward pass, as the core hands one out; id 0 ends the text, as do *stops*."""

    logits: NDArray[np.float32]
    n_tokens: int
    n_left: int
    n_removable: int
    stops: frozenset[int] = frozenset()
    attention: Any = None
    positions: Any = None
    hidden: Any = None
    picked_with: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])

    def pick(self, logits: Any = None, temperature: float | None = None) -> Picked:
        self.picked_with.append((logits, temperature))
        return Picked(int(np.argmax(self.logits if logits is None else logits)))

    def ends(self, id: int) -> str | None:
        return "stop" if id == 0 else "stop_token" if id in self.stops else None


def at(event_type: type, make: Callable[[Any], Any], step: int | None = None) -> Any:
    """A mod that answers to one kind of event, in one step or in all of them."""

    @mod(name=f"at {event_type.__name__}")
    def answer(event: Any) -> Any:
        is_wanted = type(event) is event_type and step in (None, event.step)
        return make(event) if is_wanted else None

    return answer


@dataclass
class Driven:
    """What mods made of a request.

    *forced* are the tokens of each Added that were forced; *mods* are the copies that worked;
    *logs* is what they printed and logged.
    """

    text: str
    ids: list[int]
    forced: list[list[int]]
    mods: list[Any]
    finish_reason: str | None
    tool_calls: Any
    logs: list[str]


def drive(
    *mods: Any,
    words: Words,
    model: Callable[[str], Sequence[str]],
    prompt: str = "",
    max_tokens: int = 200,
    request_id: str = "r",
    attention: Callable[[str, int], NDArray[np.float32] | None] = lambda text, n: None,
    dialogue: Dialogue | None = None,
    may_fail: bool = False,
) -> Driven:
    """Run one request, as an engine does that decodes greedily.

    Args:
        *mods: Its mods.
        words: The vocabulary.
        model: Names the tokens that it likes after a text, best first; all others are worse, in the
            order of their ids.
        prompt: Text before what is generated.
        max_tokens: Limit of tokens to generate.
        request_id: The request.
        attention: The row of the query, by the text and the number of tokens before the next one.
        dialogue: The chat that the prompt was made of.
        may_fail: Whether a mod may raise.
    """
    tokenizer = words.tokenizer()
    ids: list[int] = []
    recorder = TraceRecorder(TraceRequest(request_id=request_id), text_of=str)
    steering = Steering(
        request_id,
        begin(mods, request_id, tokenizer),
        ModCaller(tokenizer),
        n_vocab=words.n_vocab,
        ids=ids,
        text=lambda: tokenizer.decode(ids),
        recorder=recorder,
        check_prompt=lambda prompt: None,
        plan_edits=lambda edits, n_tokens: EditPlan(),
        detokenize=tokenizer.decode,
        is_end=lambda id: id == 0,
        attention=lambda event: None,
    )

    def take(steps: Steps) -> Decision:
        decision = at_once(steering.run(steps, is_async=False))
        assert decision is not None
        del ids[len(ids) - decision.n_removed :]
        ids.extend(decision.ids)
        return decision

    prompt_ids = words.tokenize(prompt, False)
    decision = take(steering.prefill(prompt_ids, max_tokens=max_tokens, dialogue=dialogue))
    while decision.end is None:
        text = tokenizer.decode([*prompt_ids, *ids])
        liked = [words.id(word) for word in model(text)]
        logits = np.linspace(-1, -2, words.n_vocab, dtype=np.float32)
        logits[liked] = np.linspace(2, 1, len(liked), dtype=np.float32)
        n_tokens = len(prompt_ids) + len(ids)
        n_left, row = max_tokens - len(ids), attention(text, n_tokens)
        forward: Any = FakeForward(logits, n_tokens, n_left, len(ids), attention=row)
        decision = take(steering.step(forward, lambda n_removed, added: None))
    steering.finish(decision.end)
    trace = recorder.trace
    failed = [call.exception_message for call in trace.mod_calls if call.exception_occurred]
    assert may_fail or not failed, failed
    return Driven(
        tokenizer.decode(ids),
        ids,
        [event.added_tokens or [] for event in trace.events if event.forced],
        [one.mod for one in steering.mods],
        decision.end,
        decision.tool_calls,
        [log.log_message for log in trace.mod_logs],
    )
