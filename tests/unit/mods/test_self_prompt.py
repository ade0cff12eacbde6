"""SelfPrompt: what stays of a question in the text, and what the model may answer."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from kqview.errors import RequestError
from kqview.mods import Added, ForceTokens, ForwardPass, mod
from kqview.mods.kit import (
    CharsMode,
    CharsStrat,
    ChoicesStrat,
    EraseMode,
    ListStrat,
    SelfPrompt,
    UntilEndType,
    UntilStrat,
    self_prompt_mod,
)
from kqview.mods.kit.strategies import AnswerState, ChoicesStrategy
from kqview.mods.kit.token_table import TokenTable
from tests.support.mods import END, Driven, Words, drive as drive_words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kqview.mods import ModTokenizer

WORDS = Words("yes", "no", " ok?", " one", " two", ".", "hi", "hit")


def drive(given: Any, model: Callable[[str], Sequence[str]], **options: Any) -> Driven:
    return drive_words(given, words=WORDS, model=model, **options)


def story(text: str) -> Sequence[str]:
    """Counts " one two", then ends; likes to answer "yes", then "no"."""
    if text.endswith(" ok?"):
        return ["yes", "no"]
    if text.endswith(" two"):
        return [END]
    return [" two"] if text.endswith(" one") else [" one"]


def test_strategy_of_a_question_is_compiled_once_for_a_tokenizer():
    class Counted(ChoicesStrat):
        n_compiled = 0

        def into_strategy(self, tokenizer: ModTokenizer) -> ChoicesStrategy:
            type(self).n_compiled += 1
            return super().into_strategy(tokenizer)

    question = SelfPrompt(" ok?", Counted(["yes", "no"]))
    first, second = WORDS.tokenizer(), WORDS.tokenizer()
    for tokenizer in (first, first, second):
        question.ask(tokenizer)
    assert Counted.n_compiled == 2
    gone = weakref.ref(first)
    del first, tokenizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("erase", "text"),
    [
        (EraseMode.NONE, " ok?yes. one two"),
        (EraseMode.PROMPT, "yes one two"),
        (EraseMode.ALL, " one two"),
    ],
)
@pytest.mark.parametrize("form", [" ok?", {"text": " ok?"}, {"tokens": [WORDS.id(" ok?")]}])
def test_erase_mode_decides_what_stays(erase: EraseMode, text: str, form: Any):
    asks = self_prompt_mod(form, ChoicesStrat(["yes", "no"]), ".", erase)
    done = drive(asks, story, prompt="Once")
    assert done.text == text
    assert (done.mods[0].is_complete, done.mods[0].answer) == (True, "yes")


def test_answer_is_the_best_of_the_allowed_ones():
    asks = self_prompt_mod(" ok?", ChoicesStrat(["no", "never"]), erase=EraseMode.ALL)
    done = drive(asks, story)
    assert done.mods[0].answer == "no"


@pytest.mark.parametrize(
    ("likes", "answer"), [(["hi", "t"], "hit"), (["hit"], "hit"), (["hi", " one"], "hi")]
)
def test_longer_choice_with_a_shorter_one_as_its_beginning_is_reached(
    likes: list[str], answer: str
):
    def model(text: str) -> Sequence[str]:
        if text.endswith(" ok?"):
            return likes[:1]
        if text.endswith("hi"):
            return likes[1:]
        return [END]

    asks = self_prompt_mod(" ok?", ChoicesStrat(["hi", "hit"]))
    done = drive(asks, model)
    assert done.mods[0].answer == answer
    assert done.text.startswith(f" ok?{answer}")


def test_only_answer_left_is_forced_as_one_chunk():
    asks = self_prompt_mod(" ok?", ChoicesStrat(["yes or no", "maybe so"]))
    done = drive(asks, lambda text: ["m"] if text.endswith("?") else [END])
    assert done.mods[0].answer == "maybe so"
    assert done.forced == [WORDS.tokenize(" ok?", False), WORDS.tokenize("aybe so", False)]


def test_completion_follows_an_answer_whose_end_was_forced():
    asks = self_prompt_mod(" ok?", ChoicesStrat(["yes or no", "maybe so"]), ".")
    done = drive(asks, lambda text: ["m"] if text.endswith("?") else [END])
    assert done.text == " ok?maybe so."
    assert done.mods[0].is_complete


class Dictated(ChoicesStrategy):
    """Writes " two" itself after each answer."""

    def step(self, state: AnswerState, token_id: int, tokenizer: ModTokenizer) -> Any:
        asked_for = super().step(state, token_id, tokenizer)
        return asked_for or ForceTokens([WORDS.id(" two")])


class DictatedStrat(ChoicesStrat):
    def into_strategy(self, tokenizer: ModTokenizer) -> Dictated:
        return Dictated(self.choices, TokenTable.of(tokenizer))


@pytest.mark.parametrize(
    ("erase", "text"), [(EraseMode.NONE, " ok?yes two."), (EraseMode.PROMPT, "yes two")]
)
def test_tokens_that_a_strategy_asks_for_are_part_of_the_answer(erase: EraseMode, text: str):
    done = drive(self_prompt_mod(" ok?", DictatedStrat(["yes", "no"]), ".", erase), story)
    assert done.mods[0].answer == "yes two"
    assert done.text.startswith(text)


def test_list_without_wrap_and_close_ends_where_the_model_goes_on():
    likes = {"?": "yes", "s": ",", " ": "no", "o": "."}
    asks = self_prompt_mod(" ok?", ListStrat(["yes", "no"]))
    done = drive(asks, lambda text: [likes.get(text[-1:], END)])
    assert done.mods[0].is_complete
    assert done.mods[0].answer == "yes, no"
    assert done.text == " ok?yes, no."


def test_list_without_close_completes_at_its_largest_number():
    asks = self_prompt_mod(" ok?", ListStrat(["yes"], wrap='"', min=2, max=2))
    done = drive(asks, lambda text: [END])
    assert done.mods[0].answer == '"yes", "yes"'


def test_end_of_the_text_is_no_answer():
    asks = self_prompt_mod(" ok?", UntilStrat("", UntilEndType.ANYCHAR, "!"), erase=EraseMode.ALL)
    done = drive(asks, lambda text: [END, "a", "!"] if "?" in text else [END], max_tokens=9)
    # The end is masked, so that the second best token is taken for as long as there is room.
    assert done.finish_reason == "length"
    assert done.mods[0].answer.startswith("aaa")


def test_completion_is_left_out_after_a_list_with_its_own_end():
    asks = self_prompt_mod(" ok?", ListStrat(["yes"], max=1, end_with=";"), completion="\n")
    done = drive(asks, story)
    assert done.text.startswith(" ok?yes; one")


def test_answer_of_characters_ends_where_the_model_leaves_them():
    asks = self_prompt_mod(" ok?", CharsStrat(CharsMode.NUMERIC))
    likes = {"?": "4", "4": "2"}
    done = drive(asks, lambda text: [likes.get(text[-1:], END)])
    assert (done.mods[0].answer, done.text) == ("42", " ok?42")


def test_question_that_another_mod_kept_out_is_asked_in_the_next_step():
    asks = self_prompt_mod(" ok?", ChoicesStrat(["yes", "no"]), ".", EraseMode.NONE)

    @mod
    def first(event: Any, actions: Any, tokenizer: Any) -> Any:
        answer = asks(event, actions, tokenizer)
        if isinstance(event, ForwardPass) and event.step == 1:
            return actions.force_tokens([WORDS.id(" one")])  # the question's tokens are refused
        return answer

    asks.begin("r", WORDS.tokenizer())
    assert drive(first, story).text.startswith(" one ok?yes. one")


@pytest.mark.parametrize(("limit", "text"), [(3, " ok?yes. one two"), (4, " ok? two")])
def test_tokens_of_another_mod_within_an_answer_are_taken_back_three_times(limit: int, text: str):
    n_forced = 0
    asks = self_prompt_mod(" ok?", ChoicesStrat(["yes", "no"]), ".", EraseMode.NONE)

    @mod
    def disturbed(event: Any, actions: Any, tokenizer: Any) -> Any:
        nonlocal n_forced
        answer = asks(event, actions, tokenizer)
        if isinstance(event, ForwardPass) and event.step > 1 and n_forced < limit:
            n_forced += 1
            return actions.force_tokens([WORDS.id(" two")])
        return answer

    asks.begin("r", WORDS.tokenizer())
    assert drive(disturbed, story).text == text
    assert asks.is_complete


def test_handlers_in_a_function_mod_ask_and_free_their_state():
    question = SelfPrompt(" ok?", ChoicesStrat(["yes", "no"]), erase=EraseMode.ALL)
    seen: list[tuple[bool, str, list[int]]] = []

    @mod(on_end=question.end)
    def asks(event: Any, actions: Any, tokenizer: Any) -> Any:
        if isinstance(event, ForwardPass):
            return question.handle_forward_pass(event, actions, tokenizer)
        if isinstance(event, Added):
            answer = question.handle_added(event, actions, tokenizer)
            r = event.request_id
            seen.append((question.is_complete(r), question.answer(r), question.answer_tokens(r)))
            return answer
        return None

    assert drive(asks, story, request_id="a").text == " one two"
    assert seen[1] == (True, "yes", [WORDS.id("yes")])
    assert question.answer_tokens("a") == []
    assert question.is_complete("a") is False


def test_state_of_a_request_is_freed_at_its_end():
    question = SelfPrompt(" ok?", UntilStrat("", UntilEndType.ANYCHAR, "."))
    kept: list[weakref.ref[Any]] = []

    @mod(on_end=question.end)
    def asks(event: Any, actions: Any, tokenizer: Any) -> Any:
        answer = question.handle_event(event, actions, tokenizer)
        kept.append(weakref.ref(question._askings[event.request_id]))  # pyright: ignore[reportPrivateUsage]
        return answer

    drive(asks, lambda text: ["."] if text[-1:] == "?" else [END])
    gc.collect()
    assert kept
    assert all(one() is None for one in kept)


def test_requests_share_nothing():
    question = SelfPrompt(" ok?", UntilStrat("", UntilEndType.ANYCHAR, "."))
    tokenizer = WORDS.tokenizer()
    one, other = question.ask(tokenizer), question.ask(tokenizer)
    for asking in (one, other):
        asking.on_added(Added("r", 1, asking.prompt, True), None)  # pyright: ignore[reportArgumentType]
    one.on_added(Added("r", 2, [WORDS.id("hi")], False), None)  # pyright: ignore[reportArgumentType]
    assert (one.answer, other.answer) == ("hi", "")


def test_responses_can_be_changed_for_one_request():
    question = SelfPrompt(" ok?", ChoicesStrat(["yes", "no"]))

    @mod(on_end=question.end)
    def asks(event: Any, actions: Any, tokenizer: Any) -> Any:
        answer = question.handle_event(event, actions, tokenizer)
        if event.step == 0:
            question.refresh_responses(["hi"], event.request_id, tokenizer)
        return answer

    assert drive(asks, story).text.startswith(" ok?hi")


@pytest.mark.parametrize(
    "arguments",
    [
        (3, ChoicesStrat(["a"])),
        ({"txt": "a"}, ChoicesStrat(["a"])),
        ("a", ["yes", "no"]),
        ("a", ChoicesStrat(["a"]), None, "all"),
    ],
)
def test_malformed_question_is_refused(arguments: Any):
    with pytest.raises(RequestError):
        SelfPrompt(*arguments)
