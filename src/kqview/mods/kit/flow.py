"""Flow: questions whose answers decide what is asked next.

A `FlowQuestion` says what is asked and where each answer leads. A `FlowEngine` runs a flow in each
of its requests: it asks with `Asking`, stores answers in the request's `FlowState`, and follows the
routes. A route leads to another question, to a `FlowDefinition`, or to something that
ends the flow: a message, a summary, an output, tool calls, or nothing more.

Questions may be shared by any number of flows and requests: they hold no state of a request.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from kqview.arguments import invalid
from kqview.errors import RequestError, shown
from kqview.mods.actions import Action, ActionBuilder
from kqview.mods.decorator import Mod
from kqview.mods.events import Event, ForwardPass, Prefilled, RequestEnd
from kqview.mods.kit.self_prompt import Asking, EraseMode, SelfPrompt, Text, tokenize
from kqview.mods.kit.strategies import StrategyDescription
from kqview.mods.tokenizer import ModTokenizer

_N_ROUTES_MAX: Final = 1000  # without a token between them: the routes form a cycle


@dataclass
class FlowState:
    """What a flow knows in one request.

    Attributes:
        request_id: The request.
        answers: The answer to each question so far, by its name, in the order of asking.
        data: Free for the caller's functions; empty at first.
    """

    request_id: str
    answers: dict[str, str] = field(default_factory=dict[str, str])
    data: dict[str, Any] = field(default_factory=dict[str, Any])


ToolCallback = Callable[[ActionBuilder, FlowState, ModTokenizer], Action | None]
FlowText = str | Callable[[FlowState], str]
"""A text, or a function of the state that returns one."""


@dataclass(frozen=True)
class Route:
    """Where a flow continues; made by the ``route_`` functions.

    Attributes:
        follow: Begins a question, or returns the action that ends the flow; None for no action.
    """

    follow: "Callable[[FlowRun, ActionBuilder], Action | None]"


def route_question(question: "FlowQuestion") -> Route:
    """Ask *question* next."""
    return Route(lambda run, actions: run.enter(question))


def route_message(text: FlowText) -> Route:
    """Write *text*, and end the text with it."""
    return Route(lambda run, actions: run.say(text, actions))


def route_summary() -> Route:
    """Write the summary of the current flow, and end the text with it."""
    return Route(lambda run, actions: run.summarize(actions))


def route_output(text: FlowText) -> Route:
    """End the request with *text* in place of everything that was written."""
    return Route(lambda run, actions: actions.force_output(run.ids_of(text)))


def route_tool(callback: ToolCallback) -> Route:
    """End the flow with the action that ``callback(actions, state, tokenizer)`` returns.

    Usually that is ``actions.tool_calls(...)``.
    """
    return Route(lambda run, actions: callback(actions, run.state, run.tokenizer))


def route_noop() -> Route:
    """End the flow; the model continues the text."""
    return Route(lambda run, actions: None)


class FlowQuestion:
    """A question, and where its answers lead.

    The methods that set routes return the question, so that they can be chained. A target is a
    question, a flow, a text (a message), a route, or a function of the state that returns one.

    Args:
        name: Key of the answer in `FlowState.answers`.
        prompt: The question, in the forms of SelfPrompt.
        strategy: What the answer may look like.
        completion_text: Text after the answer.
        erase_mode: What is removed after the answer.

    Raises:
        RequestError: An argument is malformed.
    """

    def __init__(
        self,
        name: str,
        prompt: Text,
        strategy: StrategyDescription,
        completion_text: str | None = "\n",
        erase_mode: EraseMode = EraseMode.NONE,
    ) -> None:
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise invalid("name", "a text that is not empty", shown(name))
        self.name: Final = name
        self.self_prompt: Final = SelfPrompt(prompt, strategy, completion_text, erase_mode)
        self._transitions: dict[str, Any] = {}
        self._default: Any = None
        self._branch: Callable[[FlowState], Any] | None = None
        self._assign: Callable[[FlowState, str], object] | None = None
        self._auto_answer: Callable[[FlowState], str | None] | None = None

    def on(self, answer: str, target: Any) -> Self:
        """Go to *target* after this answer, ignoring case and surrounding whitespace."""
        self._transitions[_key(answer)] = _checked(target)
        return self

    def then(self, target: Any) -> Self:
        """Go to *target* after any answer without a route of its own."""
        self._default = _checked(target)
        return self

    def otherwise(self, target: Any) -> Self:
        """The same as `then`; reads better after `on`."""
        return self.then(target)

    def assign(self, function: Callable[[FlowState, str], object]) -> Self:
        """Call ``function(state, answer)`` when the question is answered."""
        self._assign = function
        return self

    def branch(self, function: Callable[[FlowState], Any]) -> Self:
        """Call ``function(state)`` for the target where `on` and `then` set none.

        If it returns None, the flow ends.
        """
        self._branch = function
        return self

    def with_auto_answer(self, function: Callable[[FlowState], str | None]) -> Self:
        """Use the answer that ``function(state)`` returns; if it returns None, ask the model."""
        self._auto_answer = function
        return self

    def known_answer(self, state: FlowState) -> str | None:
        """Return the answer of the auto-answer function, if there is one."""
        return None if self._auto_answer is None else self._auto_answer(state)

    def resolve(self, state: FlowState, answer: str) -> Route:
        """Record *answer* and return where it leads."""
        state.answers[self.name] = answer
        if self._assign is not None:
            self._assign(state, answer)
        target = self._transitions.get(_key(answer), self._default)
        if target is None and self._branch is not None:
            target = self._branch(state)
        return route_of(target, state)

    def __repr__(self) -> str:
        return f"FlowQuestion({self.name!r})"


def _key(answer: str) -> str:
    return answer.strip().lower()


@dataclass(frozen=True)
class FlowDefinition:
    """A named flow.

    Attributes:
        name: Key in the ``flows`` of a FlowEngine.
        root: Its first question.
        summary: Returns the text of `route_summary` within this flow.
    """

    name: str
    root: FlowQuestion
    summary: Callable[[FlowState], str] | None = None


_TARGETS: Final = (FlowQuestion, FlowDefinition, Route, str)


def _checked(target: object) -> Any:
    if not isinstance(target, _TARGETS) and not callable(target):
        raise invalid("target", "a question, a flow, a text, a route or a function", shown(target))
    return target


def route_of(target: object, state: FlowState) -> Route:
    """Return *target* as a route; calls functions, and takes None for `route_noop`.

    Raises:
        RequestError: A function did not return a target.
    """
    for _ in range(_N_ROUTES_MAX):
        match target:
            case None:
                return route_noop()
            case Route():
                return target
            case FlowQuestion():
                return route_question(target)
            case FlowDefinition():
                return _route_flow(target)
            case str():
                return route_message(target)
            case _ if callable(target):
                target = target(state)
            case _:
                raise invalid("target", "a question, a flow, a text or a route", shown(target))
    raise RequestError("target functions keep returning functions; return a route")


def _route_flow(flow: FlowDefinition) -> Route:
    return Route(lambda run, actions: run.enter(flow.root, flow))


class FlowEngine:
    """Runs flows in the requests of a mod.

    In a function mod, return what `handle_event` returns, and pass ``on_end=engine.end`` to `mod`,
    which frees the state of a request; or use `as_mod`, which does both. Requests that run at the
    same time must not share a ``request_id`` in a function mod.

    Args:
        entry_question: The first question of every request.
        flows: The flows, by name or as a list. The current flow is at first the one whose root is
            the entry question; if there is none, the first of all.

    Raises:
        RequestError: An argument has the wrong type.
    """

    def __init__(
        self,
        entry_question: FlowQuestion,
        flows: Mapping[str, FlowDefinition] | Sequence[FlowDefinition] = (),
    ) -> None:
        if not isinstance(entry_question, FlowQuestion):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise invalid("entry_question", "a FlowQuestion", shown(entry_question))
        self.entry_question: Final = entry_question
        given = list(flows.values()) if isinstance(flows, Mapping) else list(flows)
        begins_here = (flow for flow in given if flow.root is entry_question)
        self.entry_flow: Final = next(begins_here, given[0] if given else None)
        self._runs: dict[str, FlowRun] = {}

    def handle_event(
        self, event: Event, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """Handle any event of a request; Prefilled begins its flow."""
        run = self._runs.get(event.request_id)
        if run is None or isinstance(event, Prefilled):
            run = self._runs[event.request_id] = FlowRun(self, event.request_id, tokenizer)
        return run.handle_event(event, actions)

    def state(self, request_id: str) -> FlowState | None:
        """State of the flow in a request; None for an unknown request."""
        run = self._runs.get(request_id)
        return None if run is None else run.state

    def end(self, end: RequestEnd) -> None:
        """Free the state of a request; pass this as ``on_end`` to `mod`."""
        self._runs.pop(end.request_id, None)

    def as_mod(self, name: str = "flow") -> "FlowMod":
        """Return this flow as a mod."""
        return FlowMod(self, name)


class FlowRun:
    """A flow in one request."""

    def __init__(self, engine: FlowEngine, request_id: str, tokenizer: ModTokenizer) -> None:
        self.state: Final = FlowState(request_id)
        self.tokenizer: Final = tokenizer
        self._flow = engine.entry_flow
        # To follow at the next logits.
        self._route: Route | None = route_question(engine.entry_question)
        self._question: FlowQuestion | None = None
        self._asking: Asking | None = None

    def handle_event(self, event: Event, actions: ActionBuilder) -> Action | None:
        """Ask, follow the answer, and take its route."""
        if not isinstance(event, ForwardPass):
            action = None if self._asking is None else self._asking.handle_event(event, actions)
            self._note_answer()
            return action
        for _ in range(_N_ROUTES_MAX):
            action = None
            if self._asking is not None:
                action = self._asking.on_forward_pass(event, actions)
                if not self._note_answer():
                    return action
            elif self._route is not None:
                route, self._route = self._route, None
                action = route.follow(self, actions)
            else:
                return None
            if action is not None:
                return action
        raise RequestError("the routes of this flow form a cycle without a question; break it")

    def _note_answer(self) -> bool:
        """Once the answer is complete, find where it leads; returns whether it is."""
        asking, question = self._asking, self._question
        if asking is None or question is None or not asking.is_complete:
            return False
        self._asking = self._question = None
        self._route = question.resolve(self.state, asking.answer)
        return True

    # ---- for routes

    def enter(self, question: FlowQuestion, flow: FlowDefinition | None = None) -> None:
        """Begin *question*, the root of *flow* if one is given, or note its answer if known."""
        self._flow = flow or self._flow
        known = question.known_answer(self.state)
        if known is not None:
            self._route = question.resolve(self.state, known)
            return
        self._question = question
        self._asking = question.self_prompt.ask(self.tokenizer)

    def say(self, text: FlowText, actions: ActionBuilder) -> Action:
        """Write *text* and end the text with it."""
        ids = self.ids_of(text)
        end = self.tokenizer.eos_token_id
        if end is None:  # nothing that could be forced ends the text
            return actions.force_output(ids)
        return actions.force_tokens([*ids, end])

    def summarize(self, actions: ActionBuilder) -> Action:
        """Write the summary of the current flow and end the text with it."""
        if self._flow is None or self._flow.summary is None:
            raise RequestError("route_summary needs a FlowDefinition with a summary")
        return self.say(self._flow.summary, actions)

    def ids_of(self, text: FlowText) -> list[int]:
        """Ids of *text*."""
        return tokenize(text if isinstance(text, str) else text(self.state), self.tokenizer)


class FlowMod(Mod):
    """A flow as a mod; ``generation.mods`` has the copy that a request works with."""

    def __init__(self, engine: FlowEngine, name: str) -> None:
        self._engine = engine
        self.name = name

    @property
    def state(self) -> FlowState:
        """State of the flow in the request."""
        return self._run.state

    def begin(self, request_id: str, tokenizer: ModTokenizer) -> None:
        self._run = FlowRun(self._engine, request_id, tokenizer)

    def __call__(
        self, event: Event, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """Handle any event."""
        return self._run.handle_event(event, actions)
