"""Unknown options: the error says what the option is called here."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Capture, Engine, Sampling, errors

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.demo(n_ctx=128, n_threads=1) as demo:
        yield demo


@pytest.mark.parametrize(
    ("option", "here"),
    [
        ("max_new_tokens", "here it is max_tokens"),  # transformers
        ("repetition_penalty", "here it is repeat_penalty"),
        ("output_attentions", 'here it is capture="probs"'),
        ("do_sample", "temperature=0"),
        ("max_completion_tokens", "here it is max_tokens"),  # OpenAI
        ("response_format", "here it is json_schema"),
        ("n", "engine.map"),
        ("stop_token_ids", "here it is stop_tokens"),  # vLLM
        ("guided_regex", "here it is regex"),
        ("response_model", "here it is json_schema"),  # instructor
        ("output_type", "here it is json_schema"),  # outlines
        ("format", "here it is json_schema"),  # ollama
        ("mirostat_mode", "here it is mirostat"),  # llama-cpp-python
        ("temperatures", "here it is temperature"),  # nearest match
        ("Top_K", "here it is top_k"),
        ("samplers", "the order of samplers is fixed"),
        ("begin_suppress_tokens", "here it is begin_suppress"),
        # Words that only look like an option, and what is not offered.
        ("draft_model", "belongs to the engine"),
        ("negative_prompt", "is not offered"),
        ("user", "request_id names a request"),
        ("steering", "here it is mods"),
        ("penalty_alpha", "does not search"),
        ("assistant_model", "belongs to the engine"),
        ("images", "models read text only"),
        ("n_ctx", "it is an option of Engine"),
    ],
)
def test_option_of_another_library_is_named(engine: Engine, option: str, here: str):
    given: Any = {option: 1}
    messages = [{"role": "user", "content": "a"}]
    for call in (lambda: engine.generate("a", **given), lambda: engine.chat(messages, **given)):
        with pytest.raises(errors.UnknownOption, match=f"no option {option}; ") as caught:
            call()
        assert here in str(caught.value)
        assert caught.value.parameter == option


@pytest.mark.parametrize(
    ("option", "here"),
    [
        ("functions", "here it is tools"),
        ("function_call", "here it is tool_choice"),
        ("tool_choise", "here it is tool_choice"),
        ("chat_template_kwargs", "here it is template_options"),
        ("enable_thinking", "here it is template_options="),
        ("prefill", "here it is continue_final_message=True"),
    ],
)
def test_option_of_a_chat_is_named(engine: Engine, option: str, here: str):
    given: Any = {option: 1}
    with pytest.raises(errors.UnknownOption, match=f"chat has no option {option}; {here}"):
        engine.chat([{"role": "user", "content": "a"}], **given)


def test_option_of_a_chat_is_no_option_of_generate(engine: Engine):
    for option in ("tools", "tool_choice", "continue_final_message"):
        given: Any = {option: 1}
        with pytest.raises(
            errors.UnknownOption, match=rf"here it is engine\.chat\(messages, .*{option}"
        ):
            engine.generate("a", **given)
    tensors: Any = {"return_tensors": "pt"}
    with pytest.raises(errors.UnknownOption, match="ids are a list"):
        engine.apply_chat_template([{"role": "user", "content": "a"}], **tensors)


def test_unknown_option_is_a_type_error_and_a_request_error(engine: Engine):
    unknown: Any = {"max_new_tokens": 1}
    with pytest.raises(TypeError):
        engine.generate("a", **unknown)
    with pytest.raises(errors.RequestError):
        engine.generate("a", sampling=Sampling(), **unknown)


def of(option: str) -> Any:
    return {option: 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Engine("x.gguf", **of("ctx_size")), "Engine has no option ctx_size; .* n_ctx"),
        (lambda: Engine.demo(n_ctxx=1), "Engine has no option n_ctxx; here it is n_ctx"),
        (lambda: Capture("probs", **of("layer")), "Capture has no option layer; .* layers"),
        (lambda: Sampling(**of("temp")), "Sampling has no option temp; here it is temperature"),
        # A name of another library that this function does not have either.
        (lambda: Capture("probs", **of("temp")), "Capture has no option temp; it has dtype, "),
        (lambda: Capture("probs", **of("seed")), "Capture has no option seed; .* of Sampling"),
    ],
)
def test_constructors_name_their_options(call: Any, message: str):
    with pytest.raises(errors.UnknownOption, match=message):
        call()


def test_every_suggestion_is_an_option_that_exists(engine: Engine):
    """A renamed option must not leave a suggestion of its old name behind."""
    from kqview.option_names import (
        _ELSEWHERE,  # pyright: ignore[reportPrivateUsage]
        _INSTEAD,  # pyright: ignore[reportPrivateUsage]
    )
    from kqview.types.sampling import OPTIONS

    known = {*OPTIONS}
    for function in (Engine.__init__, Engine.generate, Capture):
        known |= inspect.signature(function).parameters.keys()
    of_chats = inspect.signature(Engine.chat).parameters.keys()
    assert {here for here in _ELSEWHERE.values() if here.isidentifier()} <= known | of_chats
    assert not _ELSEWHERE.keys() & (known - {"stop_sequence"})
    assert _INSTEAD.keys() & (known | of_chats | _ELSEWHERE.keys()) <= {"dtype"}  # of Capture


@pytest.mark.parametrize("prompts", [["a", "b"], [[1, 2], [3]], ("a",)])
def test_list_of_prompts_is_told_to_use_map(engine: Engine, prompts: Any):
    with pytest.raises(errors.RequestError, match=rf"{len(prompts)} prompts.* one prompt; use"):
        engine.generate(prompts)


def test_messages_are_told_to_use_chat(engine: Engine):
    messages: Any = [{"role": "user", "content": "Hi"}]
    with pytest.raises(errors.RequestError, match=r"use engine\.chat"):
        engine.generate(messages)


def test_fields_of_a_class_are_listed_and_the_first_argument_of_a_function_is_not(engine: Engine):
    given: Any = {"prmpt": True}
    with pytest.raises(
        errors.UnknownOption, match="Capture has no option prmpt; here it is prompt"
    ):
        Capture(**given)
    given = {"zzz": 1}
    with pytest.raises(errors.UnknownOption, match=r"it has add_special, offsets, parse_special$"):
        engine.tokenize("a", **given)
    given = {"prmpt": "a"}
    with pytest.raises(errors.UnknownOption, match="generate has no option prmpt; here it is prom"):
        engine.generate(**given)


async def test_coroutines_name_an_unknown_option(engine: Engine):
    for call in (engine.ascore, engine.aembed, engine.aclassify):
        assert inspect.iscoroutinefunction(call)
        given: Any = {"prioritys": 1}
        with pytest.raises(errors.UnknownOption, match=rf"{call.__name__} .* it is priority"):
            await call("a", **given)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("create_chat_completion", r"engine\.chat\("),  # llama-cpp-python
        ("create_embedding", r"engine\.embed\("),
        ("n_vocab", r"engine\.model\.n_vocab"),
        ("save_state", r"slots\[0\]\.save"),
        ("forward", r"engine\.attend"),  # transformers
    ],
)
def test_method_of_another_library_is_named(engine: Engine, name: str, here: str):
    with pytest.raises(errors.UnknownAttribute, match=f"Engine has no {name}; .*{here}") as caught:
        getattr(engine, name)
    assert isinstance(caught.value, AttributeError)
    assert caught.value.parameter == name
    assert not hasattr(engine, name)


def test_result_of_another_library_is_named(engine: Engine):
    generation = engine.generate("a", max_tokens=1)
    with pytest.raises(errors.UnknownAttribute, match=r"Generation has no choices; .*reply"):
        generation.choices  # noqa: B018  # pyright: ignore
    generation.close()


def test_other_unknown_attribute_is_a_plain_error(engine: Engine):
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'nope'") as error:
        engine.nope  # noqa: B018  # pyright: ignore
    assert not isinstance(error.value, errors.KqviewError)
    assert (error.value.name, error.value.obj) == ("nope", engine)  # for "Did you mean"
