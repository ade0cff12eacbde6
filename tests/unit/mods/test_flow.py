"""Flow: where answers lead, and what of it is in the text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview.errors import RequestError
from kqview.mods import ActionBuilder, ForwardPass, Prefilled, mod
from kqview.mods.kit import (
    ChoicesStrat,
    EraseMode,
    FlowDefinition,
    FlowEngine,
    FlowQuestion,
    FlowState,
    route_message,
    route_noop,
    route_output,
    route_question,
    route_summary,
    route_tool,
)
from tests.support.mods import END, Driven, Words, drive as drive_words

if TYPE_CHECKING:
    from collections.abc import Sequence

WORDS = Words("yes", "no", "red", "blue", " ok?", " color?", " one", " two")


def story(text: str) -> Sequence[str]:
    """Answers yes, and blue; else counts."""
    last = {"?": ["yes", "blue"], "e": [" two"], "o": [END]}
    return last.get(text[-1:], [" one"])


def drive(given: Any, **options: Any) -> Driven:
    return drive_words(given, words=WORDS, model=story, **options)


def ok(**options: Any) -> FlowQuestion:
    return FlowQuestion("ok", " ok?", ChoicesStrat(["yes", "no"]), **options)


def color(**options: Any) -> FlowQuestion:
    return FlowQuestion("color", " color?", ChoicesStrat(["red", "blue"]), **options)


def make_color(state: FlowState) -> FlowQuestion:
    return color()


def run(engine: FlowEngine, **options: Any) -> tuple[str, dict[str, str]]:
    done = drive(engine.as_mod(), **options)
    return done.text, done.mods[0].state.answers


def test_answers_lead_from_question_to_question_to_a_summary():
    first, second = ok(erase_mode=EraseMode.ALL), color()
    first.on("Yes", route_question(second)).on("no", route_message("bye"))
    second.then(route_summary())
    flow = FlowDefinition("f", first, lambda state: f"{state.answers}")
    text, answers = run(FlowEngine(entry_question=first, flows={"f": flow}))
    assert answers == {"ok": "yes", "color": "blue"}
    assert text == " color?blue\n{'ok': 'yes', 'color': 'blue'}"


def test_question_without_a_route_lets_the_model_write_on():
    assert run(FlowEngine(ok(completion_text=None))) == (" ok?yes one two", {"ok": "yes"})


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("bye", " ok?yes\nbye"),
        (route_message(lambda state: f"bye {state.answers['ok']}"), " ok?yes\nbye yes"),
        (route_output("only this"), "only this"),
        (route_noop(), " ok?yes\n one two"),
        (make_color, " ok?yes\n color?blue\n one two"),
        (FlowDefinition("g", color()), " ok?yes\n color?blue\n one two"),
    ],
)
@pytest.mark.parametrize("how", ["on", "then", "otherwise", "branch"])
def test_target_is_reached(how: str, target: Any, text: str):
    question = ok()
    if how == "on":
        question.on("YES ", target).then("not this")
    elif how == "branch":
        question.on("no", "not this").branch(lambda state: target)
    else:
        getattr(question.on("no", "not this"), how)(target)
    assert run(FlowEngine(question))[0] == text


def test_tool_route_ends_with_calls_of_the_answers():
    def call(actions: ActionBuilder, state: FlowState, tokenizer: Any) -> Any:
        return actions.tool_calls({"name": "paint", "arguments": state.answers})

    done = drive(FlowEngine(color().then(route_tool(call))).as_mod())
    assert done.finish_reason == "tool_calls"
    assert done.tool_calls == {"name": "paint", "arguments": {"color": "blue"}}


def test_known_answer_is_not_asked():
    second = color().with_auto_answer(lambda state: None)
    first = ok().with_auto_answer(lambda state: "no").on("no", second)
    text, answers = run(FlowEngine(first))
    assert (text, answers) == (" color?blue\n one two", {"ok": "no", "color": "blue"})


def test_assign_sees_the_state_and_the_answer():
    seen: list[tuple[str, str]] = []
    question = ok().assign(lambda state, answer: seen.append((state.request_id, answer)))
    run(FlowEngine(question), request_id="r7")
    assert seen == [("r7", "yes")]


def test_summary_is_that_of_the_flow_that_was_entered():
    inner = FlowDefinition("g", color(erase_mode=EraseMode.ALL), lambda state: "inner")
    inner.root.then(route_summary())
    outer = FlowDefinition("f", ok(erase_mode=EraseMode.ALL).then(inner), lambda state: "outer")
    assert run(FlowEngine(outer.root, [inner, outer]))[0] == "inner"


def test_routes_that_form_a_cycle_without_a_question_are_refused():
    first = ok().with_auto_answer(lambda state: "no")
    first.then(first)
    flow = FlowEngine(first).as_mod()
    flow.begin("r", WORDS.tokenizer())
    event = ForwardPass("r", 1, np.zeros(WORDS.n_vocab, np.float32))
    with pytest.raises(RequestError, match="cycle"):
        flow(event, ActionBuilder(event), WORDS.tokenizer())


def test_flow_in_a_function_mod_begins_anew_and_frees_each_request():
    engine = FlowEngine(ok(erase_mode=EraseMode.ALL))
    states: list[FlowState | None] = []

    @mod(on_end=engine.end)
    def flow(event: Any, actions: Any, tokenizer: Any) -> Any:
        answer = engine.handle_event(event, actions, tokenizer)
        states.append(engine.state(event.request_id))
        return answer

    for _ in range(2):
        assert drive(flow).text == " one two"
        assert engine.state("r") is None
    begun = [state for state in states if state is not None]
    assert begun[0] is not begun[-1]
    assert begun[-1].answers == {"ok": "yes"}


def test_second_prefilled_begins_the_flow_again():
    engine = FlowEngine(ok())
    tokenizer = WORDS.tokenizer()
    for request_id in ("a", "b", "a"):
        event = Prefilled(request_id, 0, 8)
        engine.handle_event(event, ActionBuilder(event), tokenizer)
    assert engine.state("a") is not engine.state("b")


@pytest.mark.parametrize(
    "make",
    [
        lambda: FlowQuestion("", " ok?", ChoicesStrat(["a"])),
        lambda: FlowEngine("ok"),  # pyright: ignore[reportArgumentType]
        lambda: ok().on("yes", 3),
    ],
)
def test_malformed_flow_is_refused(make: Any):
    with pytest.raises(RequestError):
        make()
