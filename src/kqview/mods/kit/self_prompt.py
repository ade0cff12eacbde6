"""SelfPrompt: the model answers a question that a mod writes into its text.

`SelfPrompt` describes the question. `Asking` asks it once, in one request: it forces the prompt,
masks the logits while the model answers, and afterwards erases what should not stay. Question and
answer are tokens of the request and count against its ``max_tokens``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from kqview.arguments import checked_ids, invalid
from kqview.errors import shown
from kqview.mods.actions import Action, ActionBuilder, Backtrack
from kqview.mods.decorator import Mod
from kqview.mods.events import Added, Event, ForwardPass, Prefilled, RequestEnd
from kqview.mods.kit.strategies import ChoicesStrat, Strategy, StrategyDescription
from kqview.mods.kit.token_table import TokenTable
from kqview.mods.tokenizer import ModTokenizer

_N_TAKEN_BACK_MAX: Final = 3
Text = str | Sequence[int] | Mapping[str, Any]
"""A text, its ids, ``{"text": ...}`` or ``{"tokens": ...}``."""


class EraseMode(Enum):
    """What is removed from the text once a question is answered."""

    NONE = "none"
    """Nothing: question, answer and completion stay."""
    PROMPT = "prompt"
    """The question; the answer stays."""
    ALL = "all"
    """Question and answer: the text continues as if the question had not been asked."""


def tokenize(text: str, tokenizer: ModTokenizer) -> list[int]:
    """Ids of *text* in the middle of a text, without special tokens around it."""
    return tokenizer.encode(text, add_special_tokens=False)


class SelfPrompt:
    """A question to the model in the middle of its text.

    Apart from its askings, which it stores by ``request_id``, it is immutable. In a function mod,
    return what `handle_event` (or the method for one event) returns, and pass
    ``on_end=question.end`` to `mod`, which frees the asking. `self_prompt_mod` does all that.
    Requests that run at the same time must not share a ``request_id``.

    Args:
        prompt: The question, as text, ids, ``{"text": ...}`` or ``{"tokens": ...}``.
        strategy: What the answer may look like.
        completion: Text after the answer, in the forms of *prompt*; left out with EraseMode.PROMPT
            and ALL, and after a list with its own end.
        erase: What is removed after the answer.
        argmax_sampling: Whether each token of the answer is the most probable one; False samples
            at the request's temperature.

    Raises:
        RequestError: An argument is malformed.
    """

    def __init__(
        self,
        prompt: Text,
        strategy: StrategyDescription,
        completion: Text | None = None,
        erase: EraseMode = EraseMode.NONE,
        *,
        argmax_sampling: bool = True,
    ) -> None:
        if not hasattr(strategy, "into_strategy"):
            wanted = "a strategy such as ChoicesStrat(['yes', 'no'])"
            raise invalid("strategy", wanted, shown(strategy))
        if not isinstance(erase, EraseMode):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise invalid("erase", "a member of EraseMode", shown(erase))
        self._prompt = _text("prompt", prompt)
        self._completion = _text("completion", "" if completion is None else completion)
        self.strategy: Final = strategy
        self.erase: Final = erase
        self.argmax_sampling: Final = argmax_sampling
        self._askings: dict[str, Asking] = {}
        # The strategy, compiled: that may look at every token of the vocabulary.
        self._strategies: WeakKeyDictionary[ModTokenizer, Strategy[Any]] = WeakKeyDictionary()

    def ask(self, tokenizer: ModTokenizer, strategy: StrategyDescription | None = None) -> "Asking":
        """Return a new asking, with *strategy* in place of the question's own if given."""
        known = self._strategies.get(tokenizer) if strategy is None else None
        compiled = known or (strategy or self.strategy).into_strategy(tokenizer)
        if strategy is None:
            self._strategies[tokenizer] = compiled
        return Asking(
            prompt=_ids(self._prompt, tokenizer),
            completion=_ids(self._completion, tokenizer),
            strategy=compiled,
            erase=self.erase,
            argmax_sampling=self.argmax_sampling,
            tokenizer=tokenizer,
        )

    # ---- for function mods

    def handle_event(
        self, event: Event, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """Handle any event: Prefilled, or the first one seen, begins to ask in its request."""
        if isinstance(event, Prefilled) or event.request_id not in self._askings:
            self._askings[event.request_id] = self.ask(tokenizer)
        return self._askings[event.request_id].handle_event(event, actions)

    # For mods that tell events apart.
    handle_prefilled = handle_forward_pass = handle_added = handle_event

    def refresh_responses(
        self, responses: Sequence[str], request_id: str, tokenizer: ModTokenizer
    ) -> None:
        """Ask again in one request, with these choices for the answer."""
        self._askings[request_id] = self.ask(tokenizer, ChoicesStrat(responses))

    def is_complete(self, request_id: str) -> bool:
        """Whether the question is answered in this request."""
        asking = self._askings.get(request_id)
        return asking is not None and asking.is_complete

    def answer_tokens(self, request_id: str) -> list[int]:
        """Ids of the answer so far; empty for an unknown request."""
        asking = self._askings.get(request_id)
        return [] if asking is None else list(asking.answer_ids)

    def answer(self, request_id: str) -> str:
        """The answer so far, without the delimiters of its strategy."""
        asking = self._askings.get(request_id)
        return "" if asking is None else asking.answer

    def end(self, end: RequestEnd) -> None:
        """Free the state of a request; pass this as ``on_end`` to `mod`."""
        self._askings.pop(end.request_id, None)


class _AskingPhase(Enum):
    PROMPT = auto()
    ANSWER = auto()
    COMPLETION = auto()
    DONE = auto()


@dataclass
class Asking:
    """One asking of a question, for one request; `SelfPrompt.ask` makes it.

    Attributes:
        prompt: Ids of the question.
        completion: Ids after the answer.
        strategy: What the answer may look like, compiled.
        erase: As of SelfPrompt, like *argmax_sampling*.
        tokenizer: The request's tokenizer.
    """

    prompt: list[int]
    completion: list[int]
    strategy: Strategy[Any]
    erase: EraseMode
    argmax_sampling: bool
    tokenizer: ModTokenizer

    def __post_init__(self) -> None:
        self.answer_ids: list[int] = []
        self._phase = _AskingPhase.PROMPT if self.prompt else _AskingPhase.ANSWER
        self._state = self.strategy.start(self.tokenizer)
        self._n_taken_back = 0
        self._due: list[int] = []  # what the strategy asked to be written next
        self._end_ids = TokenTable.of(self.tokenizer).end_ids

    @property
    def is_complete(self) -> bool:
        """Whether the question is finished, completion included.

        The answer is then complete, unless other mods of the request wrote tokens that the strategy
        refuses more than three times.
        """
        return self._phase is _AskingPhase.DONE

    @property
    def answer(self) -> str:
        """Text of the answer so far, without the delimiters of its strategy."""
        return self.strategy.trim_answer(self.tokenizer.decode(self.answer_ids))

    @property
    def _forced(self) -> list[int]:
        """What is to be written next, whatever the model would; empty while it answers."""
        match self._phase:
            case _AskingPhase.PROMPT:
                return self.prompt
            case _AskingPhase.COMPLETION:
                return self.completion
            case _:
                return self._due

    def handle_event(self, event: Event, actions: ActionBuilder) -> Action | None:
        """Handle any event."""
        if isinstance(event, ForwardPass):
            return self.on_forward_pass(event, actions)
        return self.on_added(event, actions) if isinstance(event, Added) else None

    def on_forward_pass(self, event: ForwardPass, actions: ActionBuilder) -> Action | None:
        """Force the question, then mask the logits until the answer is complete."""
        if self._phase is _AskingPhase.DONE:
            return None
        if forced := self._forced:
            return actions.force_tokens(forced)
        strategy, state = self.strategy, self._state
        if text := strategy.forced_text(state):
            return actions.force_tokens(tokenize(text, self.tokenizer))
        allowed = np.asarray(strategy.allowed_tokens(state, self.tokenizer), np.int64)
        # The end of an answer is not the end of the text.
        allowed = allowed[~np.isin(allowed, self._end_ids)]
        if strategy.can_end(state) and int(event.logits.argmax()) not in allowed:
            action = self._finish(actions, [])
            return action or self.on_forward_pass(event, actions)
        banned = np.asarray(strategy.disallowed_tokens(state, self.tokenizer), np.int64)
        if not allowed.size and not banned.size:
            return None
        row = np.full_like(event.logits, -np.inf) if allowed.size else event.logits.copy()
        row[allowed] = event.logits[allowed]
        row[banned] = -np.inf
        return actions.adjust_logits(row, 0.0 if self.argmax_sampling else None)

    def on_added(self, event: Added, actions: ActionBuilder) -> Action | None:
        """Advance by the tokens that were added.

        If they are not those that were forced, another mod wrote them, and the next step tries
        again.
        """
        is_ours = event.forced and event.added_tokens == self._forced
        if self._phase is not _AskingPhase.ANSWER:
            if is_ours:
                is_prompt = self._phase is _AskingPhase.PROMPT
                self._phase = _AskingPhase.ANSWER if is_prompt else _AskingPhase.DONE
            return None
        if self._due and is_ours:
            self.answer_ids += self._due
            self._due = []
            return self._finish(actions, []) if self.strategy.is_complete(self._state) else None
        for i, token_id in enumerate(event.added_tokens):
            behind = event.added_tokens[i + 1 :]
            asked_for = self.strategy.step(self._state, token_id, self.tokenizer)
            self.answer_ids.append(token_id)
            if isinstance(asked_for, Backtrack):
                self._n_taken_back += 1
                if self._n_taken_back > _N_TAKEN_BACK_MAX:
                    self._phase = _AskingPhase.DONE
                    return None
                tokens = asked_for.tokens or []
                self.answer_ids[len(self.answer_ids) - asked_for.n :] = tokens
                return actions.backtrack(asked_for.n + len(behind), tokens or None)
            if asked_for is not None:
                self._due = asked_for.tokens
                return None
            if self.strategy.is_complete(self._state):
                return self._finish(actions, behind)
        return None

    def _finish(self, actions: ActionBuilder, behind: list[int]) -> Action | None:
        """End the answer; *behind* are tokens that another mod added after it."""
        self._phase = _AskingPhase.DONE
        if self.erase is EraseMode.NONE:
            if self.completion and not self.strategy.has_end:
                # With the next logits: a step that has forced tokens forces no others.
                self._phase = _AskingPhase.COMPLETION
            return None
        kept = [] if self.erase is EraseMode.ALL else self.answer_ids
        n_written = len(self.prompt) + len(self.answer_ids) + len(behind)
        return actions.backtrack(n_written, [*kept, *behind] or None)


def _text(name: str, given: Text) -> str | list[int]:
    if isinstance(given, Mapping):
        if len(given) == 1 and ("text" in given or "tokens" in given):
            return _text(f"{name}['{next(iter(given))}']", next(iter(given.values())))
        raise invalid(name, 'text, ids, {"text": ...} or {"tokens": ...}', shown(given))
    return given if isinstance(given, str) else checked_ids(name, given)


def _ids(text: str | list[int], tokenizer: ModTokenizer) -> list[int]:
    return tokenize(text, tokenizer) if isinstance(text, str) else list(text)


class SelfPromptMod(Mod):
    """A mod that asks one question at the start of the text; see `self_prompt_mod`.

    ``generation.mods`` has the copy that a request works with; read `answer` there.
    """

    def __init__(self, question: SelfPrompt, name: str) -> None:
        self._question = question
        self.name = name

    @property
    def is_complete(self) -> bool:
        """Whether the question is answered."""
        return self._asking.is_complete

    @property
    def answer(self) -> str:
        """The answer so far, without the delimiters of its strategy."""
        return self._asking.answer

    def begin(self, request_id: str, tokenizer: ModTokenizer) -> None:
        self._asking = self._question.ask(tokenizer)

    def __call__(
        self, event: Event, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        return self._asking.handle_event(event, actions)


def self_prompt_mod(
    prompt: Text,
    strategy: StrategyDescription,
    completion: Text | None = None,
    erase: EraseMode = EraseMode.NONE,
    *,
    argmax_sampling: bool = True,
    name: str = "self_prompt",
) -> SelfPromptMod:
    """Return a mod that asks a question before the model writes anything else.

    The arguments are those of SelfPrompt, and the *name* of the mod in the trace.

    Raises:
        RequestError: An argument is malformed.
    """
    question = SelfPrompt(prompt, strategy, completion, erase, argmax_sampling=argmax_sampling)
    return SelfPromptMod(question, name)
