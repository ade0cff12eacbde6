"""Flow: questions whose answers decide what is asked next.

A `FlowQuestion` says what is asked and where each answer leads. A `FlowEngine` runs a flow in each
of its requests: it asks with `Asking`, stores answers in the request's `FlowState`, and follows the
routes. A route leads to another question, to a `FlowDefinition`, or to something that
ends the flow: a message, a summary, an output, tool calls, or nothing more.

Questions may be shared by any number of flows and requests: they hold no state of a request.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from kqview.arguments import invalid
from kqview.errors import RequestError, shown
from kqview.mods.actions import Action
from kqview.mods.decorator import Mod
from kqview.mods.events import Added, Event, ForwardPass, Prefilled, RequestEnd
from kqview.mods.kit.self_prompt import Asking, EraseMode, SelfPrompt, Text, tokenize
from kqview.mods.kit.strategies import StrategyDescription

if TYPE_CHECKING:
    from kqview.mods.actions import ActionBuilder
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


@dataclass(frozen=True)
class Route:
    """Where a flow continues; made by the ``route_`` functions."""


@dataclass(frozen=True)
class _Ask(Route):
    question: "FlowQuestion"


@dataclass(frozen=True)
class _Enter(Route):
    flow: "FlowDefinition"


@dataclass(frozen=True)
class _Say(Route):
    text: "str | Callable[[FlowState], str]"


@dataclass(frozen=True)
class _Summarize(Route):
    pass


@dataclass(frozen=True)
class _Output(Route):
    text: "str | Callable[[FlowState], str]"


ToolCallback = Callable[["ActionBuilder", FlowState, "ModTokenizer"], Action | None]


@dataclass(frozen=True)
class _Tool(Route):
    callback: ToolCallback


@dataclass(frozen=True)
class _Leave(Route):
    pass


Target = "FlowQuestion | FlowDefinition | Route | str | Callable[[FlowState], Any]"
"""A question, a flow, a text (a message), a route, or a function of the state that returns one."""


def route_question(question: "FlowQuestion") -> Route:
    """Ask *question* next."""
    return _Ask(question)


def route_message(text: str | Callable[[FlowState], str]) -> Route:
    """Write *text*, and end the text with it."""
    return _Say(text)


def route_summary() -> Route:
    """Write the summary of the current flow, and end the text with it."""
    return _Summarize()


def route_output(text: str | Callable[[FlowState], str]) -> Route:
    """End the request with *text* in place of everything that was written."""
    return _Output(text)


def route_tool(callback: ToolCallback) -> Route:
    """End the flow with the action that ``callback(actions, state, tokenizer)`` returns.

    Usually that is ``actions.tool_calls(...)``.
    """
    return _Tool(callback)


def route_noop() -> Route:
    """End the flow; the model continues the text."""
    return _Leave()


class FlowQuestion:
    """A question, and where its answers lead.

    The methods that set routes return the question, so that they can be chained.

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
                return _Leave()
            case Route():
                return target
            case FlowQuestion():
                return _Ask(target)
            case FlowDefinition():
                return _Enter(target)
            case str():
                return _Say(target)
            case _ if callable(target):
                target = target(state)
            case _:
                raise invalid("target", "a question, a flow, a text or a route", shown(target))
    raise RequestError("target functions keep returning functions; return a route")


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
        self, event: Event, actions: "ActionBuilder", tokenizer: "ModTokenizer"
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

    def __init__(self, engine: FlowEngine, request_id: str, tokenizer: "ModTokenizer") -> None:
        self.state: Final = FlowState(request_id)
        self._tokenizer = tokenizer
        self._flow = engine.entry_flow
        self._route: Route | None = _Ask(engine.entry_question)  # to follow at the next logits
        self._question: FlowQuestion | None = None
        self._asking: Asking | None = None

    def handle_event(self, event: Event, actions: "ActionBuilder") -> Action | None:
        """Ask, follow the answer, and take its route."""
        match event:
            case ForwardPass():
                return self._on_forward_pass(event, actions)
            case Added() if self._asking is not None:
                action = self._asking.on_added(event, actions)
                self._note_answer()
                return action
            case _:
                return None

    @property
    def _is_asking(self) -> bool:
        return self._asking is not None

    def _on_forward_pass(self, event: ForwardPass, actions: "ActionBuilder") -> Action | None:
        for _ in range(_N_ROUTES_MAX):
            if self._asking is not None:
                action = self._asking.on_forward_pass(event, actions)
                self._note_answer()
                if action is not None or self._is_asking:
                    return action
            route, self._route = self._route, None
            if route is None:
                return None
            if not isinstance(route, _Ask | _Enter):
                return self._leave(route, actions)
            self._enter(route)
        raise RequestError("the routes of this flow form a cycle without a question; break it")

    def _enter(self, route: _Ask | _Enter) -> None:
        """Begin the question of *route*, or note its answer if that is known."""
        question = route.question if isinstance(route, _Ask) else route.flow.root
        if isinstance(route, _Enter):
            self._flow = route.flow
        known = question.known_answer(self.state)
        if known is not None:
            self._route = question.resolve(self.state, known)
            return
        self._question = question
        self._asking = question.self_prompt.ask(self._tokenizer)

    def _note_answer(self) -> None:
        """Once the answer is complete, find where it leads."""
        asking, question = self._asking, self._question
        if asking is not None and question is not None and asking.is_complete:
            self._asking = self._question = None
            self._route = question.resolve(self.state, asking.answer)

    def _leave(self, route: Route, actions: "ActionBuilder") -> Action | None:
        match route:
            case _Say(text):
                return self._say(text, actions)
            case _Summarize():
                if self._flow is None or self._flow.summary is None:
                    raise RequestError("route_summary needs a FlowDefinition with a summary")
                return self._say(self._flow.summary, actions)
            case _Output(text):
                return actions.force_output(tokenize(self._text_of(text), self._tokenizer))
            case _Tool(callback):
                return callback(actions, self.state, self._tokenizer)
            case _:
                return None

    def _say(self, text: str | Callable[[FlowState], str], actions: "ActionBuilder") -> Action:
        ids = tokenize(self._text_of(text), self._tokenizer)
        end = self._tokenizer.eos_token_id
        if end is None:  # nothing that could be forced ends the text
            return actions.force_output(ids)
        return actions.force_tokens([*ids, end])

    def _text_of(self, text: str | Callable[[FlowState], str]) -> str:
        return text if isinstance(text, str) else text(self.state)


class FlowMod(Mod):
    """A flow as a mod; ``generation.mods`` has the copy that a request works with."""

    def __init__(self, engine: FlowEngine, name: str) -> None:
        self._engine = engine
        self._name = name

    @property
    def name(self) -> str:
        """Name of the mod in the trace."""
        return self._name

    @property
    def state(self) -> FlowState:
        """State of the flow in the request."""
        return self._run.state

    def begin(self, request_id: str, tokenizer: "ModTokenizer") -> None:
        """See Mod."""
        self._run = FlowRun(self._engine, request_id, tokenizer)

    def __call__(
        self, event: Event, actions: "ActionBuilder", tokenizer: "ModTokenizer"
    ) -> Action | None:
        """Handle any event."""
        return self._run.handle_event(event, actions)
