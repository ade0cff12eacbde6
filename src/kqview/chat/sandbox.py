"""jinja2's sandbox with limits on time, depth and memory, for templates that come with a model.

Everything slow in a template passes through here. The head of each loop and macro, and every call,
filter and operator, checks the time; the length of a long value is checked before it is made. A
single step is therefore short, and checking between steps is enough. Rejected: a thread or process
per template, which costs more than rendering, and raising into another thread, which may hit later
code.
"""

import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.optimizer import optimize
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SOURCE_MAX: Final = 1 << 20
"""Maximum number of characters of a template."""
LENGTH_MAX: Final = 16 << 20
"""Maximum number of characters of a text, or items of a list, that a template may make."""
CPU_S_MAX: Final = 5.0
"""Maximum CPU time of a template, in seconds."""

_BITS_MAX: Final = 10_000  # of an integer
_ARGUMENT_MAX: Final = 1_000_000  # a number that gives a length or width
_SIZED: Final = frozenset(
    {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "to_bytes", "truncate"}
    | {"wordwrap", "zfill"}
)
_WIDE: Final = re.compile(r"\*|\d{6}")  # in a format: 100,000 columns or more


class Exhausted(SecurityError):
    """A template exceeds a limit."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template; safe to use from any thread.

    Args:
        extensions: As in jinja2.
        filters: Filters in addition to jinja2's own.
    """

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(
        self,
        extensions: Sequence[str | type[Extension]],
        filters: Mapping[str, Callable[..., Any]],
    ) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._running = threading.local()
        del self.globals["lipsum"]  # makes endless text
        own = {**self.filters, **filters}
        self.filters = {name: self._limited(name, call) for name, call in own.items()}
        self.concat = self._concat  # pyright: ignore[reportAttributeAccessIssue]

    def bounded(self, source: str) -> nodes.Template:
        """Parse a template, fold its constants, and add a check to each loop and macro.

        Raises:
            TemplateError: *source* does not parse or is too long.
            RecursionError: *source* is nested too deeply.
        """
        if len(source) > SOURCE_MAX:
            raise Exhausted(f"{len(source)} characters, the limit is {SOURCE_MAX}")
        with self.limits():
            tree = optimize(self.parse(source), self)
            # Only what runs counts, not the constants folded above.
            self.intercepted_binops = frozenset({"+", *Sandbox.intercepted_binops})
            return cast("nodes.Template", _Counting().visit(tree))

    @contextmanager
    def limits(self) -> Generator[None]:
        """Limit what this thread runs in the block to CPU_S_MAX seconds."""
        self._running.end = time.thread_time() + CPU_S_MAX
        try:
            yield
        finally:
            self._running.end = None

    def step(self) -> str:
        """Check the time; called at the head of each loop and macro, and by the other checks."""
        end = getattr(self._running, "end", None)
        if end is not None and time.thread_time() > end:
            raise Exhausted(f"it takes more than {CPU_S_MAX:g} s of CPU time")
        return ""

    def joined(self, *values: object) -> str:
        """The operator ``~``."""
        return self._concat(map(str, values))

    def call(  # pyright: ignore[reportIncompatibleMethodOverride]
        __self,
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        __self.step()
        # jinja2 wraps str.format.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        name = getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes | int | list | tuple):
            _check_call(name, cast("object", owner), (*args, *kwargs.values()))
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.step()
        match operator, left, right:
            case "+", Sized(), Sized():
                _check_length(len(left) + len(right))
            case "*", Sized(), int():
                _check_length(len(left) * right)
            case "*", int(), Sized():
                _check_length(left * len(right))
            case "*", int(), int():
                _check_bits(left.bit_length() + right.bit_length())
            case "**", int(), int():
                _check_bits(max(1, left.bit_length()) * abs(right))
            case "%", str() | bytes(), _:
                _check_format(left)
            case _:
                pass
        return super().call_binop(context, operator, left, right)

    def _concat(self, parts: Iterable[str]) -> str:
        n_total, kept = 0, list[str]()
        for part in parts:
            n_total += len(part)
            _check_length(n_total)
            kept.append(part)
        return "".join(kept)

    def _limited(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)  # keeps the attributes that jinja2 sets
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.step()
            given = args[1:] if hasattr(call, "jinja_pass_arg") else args
            if given:
                _check_call(name, given[0], (*given[1:], *kwargs.values()))
            return _checked(call(*args, **kwargs))

        return limited


class _Counting(NodeTransformer):
    """Adds a check to the head of each loop and macro, and replaces ``~`` by `Sandbox.joined`."""

    def _with_step(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("step", [], node.lineno), lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _with_step

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    method = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(method, arguments, [], None, None, lineno=line)


def _check_call(name: str, value: object, arguments: Sequence[object]) -> None:
    """Raise before a call makes a value that is too long."""
    n_value = len(value) if isinstance(value, Sized) else 1
    texts = [len(item) for item in arguments if isinstance(item, str)]
    for item in arguments:
        if name in _SIZED and isinstance(item, int) and abs(item) > _ARGUMENT_MAX:
            raise Exhausted(f"{name} gets {item}, the limit is {_ARGUMENT_MAX}")
    widest = max((item for item in arguments if isinstance(item, int)), default=0)
    match name:
        case "replace" if isinstance(value, str) and len(texts) > 1:
            old = next(item for item in arguments if isinstance(item, str))
            _check_length(n_value + value.count(old) * texts[1])
        case "join":
            if isinstance(value, str):  # the separator, as a method
                items = [len(item) for item in arguments if isinstance(item, Sized)]
                _check_length(n_value * sum(items))
            else:
                _check_length(n_value * (1 + sum(texts)))
        case "indent" if isinstance(value, str):
            _check_length(n_value + (value.count("\n") + 1) * max([4, widest, *texts]))
        case "expandtabs" | "wordwrap" | "translate":
            _check_length(n_value * max([8, widest, *texts]))
        case "tojson":
            if widest > 64:
                raise Exhausted(f"tojson gets an indent of {widest}, the limit is 64")
        case "format" | "format_map" if isinstance(value, str):
            _check_format(value)
        case _:
            pass


def _check_format(form: str | bytes) -> None:
    if _WIDE.search(form if isinstance(form, str) else form.decode("latin-1")):
        raise Exhausted("a format is wider than 99999 columns, the limit")


def _check_length(length: int) -> None:
    if length > LENGTH_MAX:
        raise Exhausted(f"it makes a text or list of length {length}, the limit is {LENGTH_MAX}")


def _check_bits(n_bits: int) -> None:
    if n_bits > _BITS_MAX:
        raise Exhausted(f"it makes a number of {n_bits} bits, the limit is {_BITS_MAX}")


def _checked(value: Any) -> Any:
    result: Any = value
    if isinstance(value, str | bytes | list | tuple):
        _check_length(len(cast("Sized", value)))
    return result
