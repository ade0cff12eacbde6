"""Mods as functions and classes: names, arguments, state of a request, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from kqview.errors import InvalidMod, RequestError
from kqview.mods import (
    ActionBuilder,
    Added,
    ForwardPass,
    FunctionMod,
    Mod,
    Prefilled,
    RequestEnd,
    Sampled,
    mod,
)
from kqview.mods.decorator import begin, check_mods

EVENT = Sampled("r", 1, 3)
TOKENIZER: Any = object()


@mod
def three(event: Any, actions: Any, tokenizer: Any) -> None:
    """Doc of three."""


class Counting(Mod):
    def __init__(self, limit: int = 5) -> None:
        self.limit = limit

    def begin(self, request_id: str, tokenizer: Any) -> None:
        self.seen: list[str] = [request_id]

    def on_prefilled(self, event: Any, actions: Any, tokenizer: Any) -> None:
        self.seen.append("prefilled")

    def on_forward_pass(self, event: Any, actions: Any, tokenizer: Any) -> None:
        self.seen.append("forward_pass")

    def on_sampled(self, event: Any, actions: Any, tokenizer: Any) -> None:
        self.seen.append("sampled")

    def on_added(self, event: Any, actions: Any, tokenizer: Any) -> None:
        self.seen.append("added")


def test_decorated_function_keeps_its_name_and_text():
    assert isinstance(three, FunctionMod)
    assert (three.__name__, three.__doc__, three.name) == ("three", "Doc of three.", "three")


def test_decorator_takes_a_name_and_an_end_hook():
    ends: list[RequestEnd] = []

    @mod(name="other", on_end=ends.append)
    def made(event: Any) -> None: ...

    (bound,) = begin([made], "r", TOKENIZER)
    assert bound.name == "other"
    assert bound.on_end is not None
    bound.on_end(RequestEnd("r", "stop"))
    assert ends[0].request_id == "r"


@pytest.mark.parametrize(
    ("function", "n_arguments"),
    [
        (lambda event: None, 1),
        (lambda event, actions: None, 2),
        (lambda event, actions, tokenizer: None, 3),
        (lambda event, actions, tokenizer=None, more=0: None, 3),
        (lambda *arguments: None, 3),
        (lambda event, *, option=1: None, 1),
        (lambda event, **options: None, 1),
        (functools.partial(lambda option, event, actions: None, 5), 2),
        (three, 3),
        (mod(lambda event: None), 1),
    ],
)
def test_function_gets_as_many_arguments_as_it_takes(function: Any, n_arguments: int):
    assert begin([function], "r", TOKENIZER)[0].n_arguments == n_arguments


@pytest.mark.parametrize(
    "function",
    [lambda: None, lambda a, b, c, d: None, lambda event, *, needed: None, 5, "name", None],
)
def test_what_cannot_be_called_with_an_event_is_refused(function: Any):
    with pytest.raises(RequestError, match="event, actions, tokenizer"):
        mod(function) if function is not None else check_mods([function])
    with pytest.raises(RequestError, match=r"mods\[1\] must be") as caught:
        check_mods([three, function])
    assert caught.value.parameter == "mods"


@pytest.mark.parametrize("mods", [three, {three}, "three", None, 5])
def test_mods_that_are_no_sequence_are_refused(mods: Any):
    with pytest.raises(RequestError, match="mods must be a sequence of mods"):
        check_mods(mods)


def test_class_that_is_no_mod_is_refused():
    class Plain:
        def __call__(self, event: Any) -> None: ...

    with pytest.raises(RequestError, match=r"mods\[0\] must be a mod; call the class"):
        check_mods([Plain])
    assert check_mods([Plain(), Counting, Counting()])


def test_end_hook_that_is_no_function_is_refused():
    with pytest.raises(RequestError, match="on_end must be a function"):
        mod(on_end=5)(lambda event: None)  # type: ignore[arg-type]


def test_misspelt_hook_is_refused_where_the_class_is_defined():
    with pytest.raises(InvalidMod, match=r"on_forwardpass.*call it on_forward_pass"):

        class Guard(Mod):  # pyright: ignore[reportUnusedClass]
            def on_forwardpass(self, event: Any, actions: Any, tokenizer: Any) -> None: ...

    class Mixin:
        on_token = None

    with pytest.raises(TypeError, match=r"on_token.*without on_"):
        type("Mixed", (Mixin, Mod), {})


@pytest.mark.parametrize("is_of_the_class", [False, True])
def test_misspelt_hook_that_was_set_later_is_refused_where_the_mod_is_passed(is_of_the_class: bool):
    class Late(Mod): ...

    late: Any = Late()
    (type(late) if is_of_the_class else late).on_add = print
    with pytest.raises(InvalidMod, match=r"mods\[1\] has on_add, .*call it on_added") as caught:
        check_mods([three, late])
    assert caught.value.parameter == "mods"


def test_mods_before_one_that_cannot_begin_are_ended():
    class Fails(Mod):
        def begin(self, request_id: str, tokenizer: Any) -> None:
            raise LookupError(request_id)

    ends: list[RequestEnd] = []
    first, last = (mod(on_end=ends.append)(lambda event: None) for _ in range(2))
    with pytest.raises(LookupError) as raised:
        begin([first, Fails, last], "r", TOKENIZER)
    assert [(end.request_id, end.finish_reason, end.error) for end in ends] == [
        ("r", "error", raised.value)
    ]


def test_each_request_has_a_copy_of_a_class_mod():
    counting = Counting(limit=7)
    (one,), (two,) = begin([counting], "a", TOKENIZER), begin([counting], "b", TOKENIZER)
    one.call(EVENT, ActionBuilder(EVENT), TOKENIZER)
    assert (one.mod.seen, two.mod.seen) == (["a", "sampled"], ["b"])
    assert one.mod.limit == 7
    assert not hasattr(counting, "seen")


def test_class_itself_is_made_for_each_request():
    (bound,) = begin([Counting], "a", TOKENIZER)
    assert (bound.name, bound.mod.limit, bound.mod.seen) == ("Counting", 5, ["a"])


def test_class_mod_gets_each_event_in_its_own_method():
    (bound,) = begin([Counting], "a", TOKENIZER)
    row = np.zeros(3, np.float32)
    for event in (Prefilled("a", 0, 1), ForwardPass("a", 1, row), EVENT, Added("a", 1, [3], False)):
        bound.call(event, ActionBuilder(event), TOKENIZER)
    assert bound.mod.seen == ["a", "prefilled", "forward_pass", "sampled", "added"]


def test_async_mods_are_known_before_they_are_called():
    class Slow(Mod):
        async def on_added(self, event: Any, actions: Any, tokenizer: Any) -> None: ...  # type: ignore[override]

    class Callable:
        async def __call__(self, event: Any) -> None: ...

    async def function(event: Any) -> None: ...

    mods = [three, Counting, Slow, function, mod(function), Callable()]
    bound = begin(mods, "r", TOKENIZER)
    assert [one.is_async for one in bound] == [False, False, True, True, True, True]


def test_names_of_undecorated_mods():
    class Silent:
        def __call__(self, event: Any) -> None: ...

    def plain(event: Any) -> None: ...

    bound = begin([plain, functools.partial(plain), Silent()], "r", TOKENIZER)
    assert [one.name for one in bound] == ["plain", "plain", "Silent"]
