"""Mods as functions and as classes: `@mod`, `Mod`, and `begin`, which prepares them for a request.

A mod is called as ``(event, actions, tokenizer)``. A function that takes fewer positional arguments
gets the first ones; its signature is read once, so that a TypeError from its own code is not
mistaken for a wrong number of arguments.
"""

import contextlib
import copy
import difflib
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, cast, overload

from kqview.arguments import flag, invalid
from kqview.errors import InvalidMod, shown
from kqview.mods.actions import Action, ActionBuilder
from kqview.mods.events import Added, Event, ForwardPass, Prefilled, RequestEnd, Sampled
from kqview.mods.failures import ModFailure, ModFailures, ModWarning, describe, traceback_of
from kqview.mods.tokenizer import ModTokenizer
from kqview.types.capture import Capture

Answer = Action | None
ModFunction = Callable[..., "Answer | Awaitable[Answer]"]
EndHook = Callable[[RequestEnd], object]

_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_N_ARGUMENTS: Final = 3


class Mod:
    """Base class of mods that keep state for each request.

    Override the methods for the events that matter; each returns an action or None, and may be
    ``async``. Pass an instance (or the class, if it needs no arguments) to ``generate``. Each
    request works with a shallow copy of it, on which `begin` is called first: set options in
    ``__init__`` and the state of a request in `begin`. `Generation.mods` has the copies.

    One request calls its copy from one thread at a time.

    Attributes:
        required: Whether a call that fails ends the request with ModFailed. False lets the text go
            on without what the mod does, which is wrong for a safety filter.

    Raises:
        InvalidMod: A subclass has another name that begins with ``on_``, which no event calls.
    """

    required: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _check_hooks(cls.__name__, cls)

    @functools.cached_property
    def name(self) -> str:
        """Name of the mod in the trace, that of its class unless it is set."""
        return type(self).__name__

    @classmethod
    def check_capture(cls, capture: Capture | None) -> None:
        """Refuse a *capture* that the mod cannot work with; `generate` calls it with its own.

        Raises:
            InvalidCapture: The mod needs another one.
        """

    def begin(self, request_id: str, tokenizer: ModTokenizer) -> None:
        """Set up the state of a request; called before its first event."""

    def on_prefilled(
        self, event: Prefilled, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> "Answer | Awaitable[Answer]":
        """Handle the prompt."""

    def on_forward_pass(
        self, event: ForwardPass, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> "Answer | Awaitable[Answer]":
        """Handle the logits of the next token."""

    def on_sampled(
        self, event: Sampled, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> "Answer | Awaitable[Answer]":
        """Handle a sampled token."""

    def on_added(
        self, event: Added, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> "Answer | Awaitable[Answer]":
        """Handle added tokens."""

    def on_end(self, end: RequestEnd) -> None:
        """Clean up after the request; called once, however it ends.

        What it raises ends nothing, even if the mod is required: the request has its result
        already, and the end hooks of other mods are still due.
        """

    def __call__(
        self, event: Event, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> "Answer | Awaitable[Answer]":
        """Call the method for *event*."""
        return getattr(self, _HOOK_OF[type(event)])(event, actions, tokenizer)


class FunctionMod:
    """A function as a mod, made by `@mod`; called like the function itself.

    Attributes:
        name: Name of the mod in the trace.
        function: The decorated function.
        on_end: Called once when a request ends, however it does; None for nothing.
        required: As of `Mod`.
    """

    def __init__(
        self, function: ModFunction, name: str, on_end: EndHook | None, *, required: bool = False
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = name
        self.on_end = on_end
        self.required = required

    def __call__(self, *arguments: Any) -> "Answer | Awaitable[Answer]":
        return self.function(*arguments)

    def __repr__(self) -> str:
        return f"mod({self.name!r})"


@overload
def mod(function: ModFunction, /) -> FunctionMod: ...
@overload
def mod(
    *, name: str | None = None, on_end: EndHook | None = None, required: bool = False
) -> Callable[[ModFunction], FunctionMod]: ...
def mod(
    function: ModFunction | None = None,
    /,
    *,
    name: str | None = None,
    on_end: EndHook | None = None,
    required: bool = False,
) -> FunctionMod | Callable[[ModFunction], FunctionMod]:
    """Make a mod from a function ``(event, actions, tokenizer)`` that returns an action or None.

    The function may be ``async``; then the generation must be iterated with ``async for``. All
    requests that have the mod call it, possibly at the same time: store state under
    ``event.request_id`` and free it in *on_end*, or derive from `Mod`.

    Args:
        function: The function.
        name: Name of the mod in the trace; None for the function's name.
        on_end: Called with a `RequestEnd` once for each request, however it ends.
        required: As of `Mod`.

    Raises:
        RequestError: An argument is not callable, or the function cannot take an event.
    """
    is_required = flag("required", required)

    def wrap(function: ModFunction) -> FunctionMod:
        n_arguments_of(function)
        if on_end is not None and not callable(on_end):
            raise invalid("on_end", "a function or None", shown(on_end))
        return FunctionMod(function, name or _name_of(function), on_end, required=is_required)

    return wrap if function is None else wrap(function)


class BoundMod:
    """A mod in one request: how to call it, what it is called, and its end hook."""

    __slots__ = (
        "call", "failures", "given", "handled", "is_async", "is_required", "mod", "n_arguments",
        "name", "on_end",
    )  # fmt: skip

    def __init__(self, mod: Any, given: Any, failures: ModFailures) -> None:
        self.mod = mod
        self.given = given  # the caller's own object, of which *mod* may be a copy
        self.failures = failures
        is_named = isinstance(mod, Mod | FunctionMod)
        self.name = mod.name if is_named else _name_of(mod)
        self.on_end: EndHook | None = getattr(mod, "on_end", None)
        self.call = mod.function if isinstance(mod, FunctionMod) else mod
        self.n_arguments = n_arguments_of(mod)
        self.is_required = bool(getattr(mod, "required", False))  # its failure ends the request
        # The events for which it does something: all, unless it has the hooks of `Mod` itself.
        self.handled = frozenset[type](_HOOK_OF)
        is_async = inspect.iscoroutinefunction
        if isinstance(mod, Mod) and type(mod).__call__ is Mod.__call__:
            hooks = {kind: getattr(mod, hook) for kind, hook in _HOOK_OF.items()}
            self.handled = frozenset(
                kind
                for kind, hook in hooks.items()
                if getattr(hook, "__func__", None) is not getattr(Mod, _HOOK_OF[kind])
            )
            self.is_async = any(map(is_async, hooks.values()))
        else:
            self.is_async = is_async(self.call) or is_async(getattr(self.call, "__call__", None))  # noqa: B004

    def end(self, end: RequestEnd) -> None:
        """Call the end hook, if there is one; see `Mod.on_end` for its exceptions."""
        if self.on_end is None:
            return
        try:
            self.on_end(end)
        except Exception as error:
            failure = ModFailure(
                self.name, "RequestEnd", None, describe(error), traceback_of(error)
            )
            with contextlib.suppress(ModWarning):
                self.failures.add(self.given, failure, error)


def begin(mods: Sequence[Any], request_id: str, tokenizer: ModTokenizer) -> list[BoundMod]:
    """Prepare *mods* for a request; copies those that have state.

    Exceptions of a `Mod.begin` reach the caller, after the end hooks of the mods before it.
    """
    bound: list[BoundMod] = []
    failures = ModFailures(request_id)
    try:
        for given in mods:
            one = given
            if _is_mod_class(given) or isinstance(given, Mod):
                one = given() if isinstance(given, type) else copy.copy(given)
                one.begin(request_id, tokenizer)
            bound.append(BoundMod(one, given, failures))
    except BaseException as error:
        for ready in bound:
            ready.end(RequestEnd(request_id, "error", error=error))
        raise
    return bound


def check_mods(mods: object) -> Sequence[Any]:
    """*mods* as a sequence of mods.

    Raises:
        RequestError: It is not a sequence, or an item is not a mod. May be InvalidMod.
    """
    if not isinstance(mods, Sequence) or isinstance(mods, str | bytes):
        raise invalid("mods", "a sequence of mods", shown(mods))
    given = cast("Sequence[object]", mods)
    for i, one in enumerate(given):
        if _is_mod_class(one) or isinstance(one, Mod):
            _check_hooks(f"mods[{i}]", one)
            continue
        if isinstance(one, type):
            raise invalid(f"mods[{i}]", "a mod; call the class", shown(cast("object", one)))
        n_arguments_of(one, f"mods[{i}]")
    return given


def check_capture(mods: Sequence[Any], capture: Capture | None) -> None:
    """Refuse a *capture* that one of *mods* cannot work with.

    Raises:
        InvalidCapture: As `Mod.check_capture`.
    """
    for one in mods:
        if _is_mod_class(one) or isinstance(one, Mod):
            one.check_capture(capture)


def _is_mod_class(given: object) -> bool:
    return isinstance(given, type) and issubclass(given, Mod)


_HOOK: Final = "on_"
_HOOKS: Final = tuple(name for name in vars(Mod) if name.startswith(_HOOK))
_HOOK_OF: Final = {
    Prefilled: "on_prefilled", ForwardPass: "on_forward_pass", Sampled: "on_sampled",
    Added: "on_added",
}  # fmt: skip


def _check_hooks(name: str, mod: object) -> None:
    """Refuse names of *mod*, a class or an instance, that look like a hook and are none."""
    for attribute in dir(mod):
        if not attribute.startswith(_HOOK) or attribute in _HOOKS:
            continue
        words = [hook.removeprefix(_HOOK) for hook in _HOOKS]
        meant = difflib.get_close_matches(attribute.removeprefix(_HOOK), words, n=1)
        advice = f"call it {_HOOK}{meant[0]}" if meant else "give it a name without on_"
        raise InvalidMod(
            f"{name} has {attribute}, which no event calls; {advice}; the hooks of mods are "
            f"{', '.join(_HOOKS)}",
            parameter=None if isinstance(mod, type) else "mods",
        )


def n_arguments_of(function: object, parameter: str = "mod") -> int:
    """How many of event, actions and tokenizer *function* takes.

    Raises:
        RequestError: It is not callable, takes no argument, or requires more than three.
    """
    if isinstance(function, FunctionMod):
        function = function.function
    if not callable(function):
        raise invalid(parameter, "a function (event, actions, tokenizer)", shown(function))
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return _N_ARGUMENTS
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return _N_ARGUMENTS
    taken = [one for one in parameters if one.kind in _POSITIONAL]
    needed = [
        one for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD
    ]
    if not taken or len(needed) > len(taken[:_N_ARGUMENTS]):
        raise invalid(
            parameter,
            "a function (event, actions, tokenizer)",
            f"{_name_of(function)}{inspect.signature(function)}",
        )
    return min(len(taken), _N_ARGUMENTS)


def _name_of(function: Any) -> str:
    if isinstance(function, functools.partial):
        return _name_of(function.func)
    return str(getattr(function, "__name__", None) or type(function).__name__)
