"""Program for `kqview.confined`: whether llguidance can compile a grammar at all.

It recurses, and the stack here is a fraction of that of a thread, so that what passes in this
process compiles in another one.
"""

import contextlib
import functools
from importlib import import_module
from typing import Any

_STACK_BYTES = 1 << 20
_STEPS = 3


@functools.cache
def _module() -> Any:
    with contextlib.suppress(ImportError):  # Windows, where no stack grows
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, hard))
    return import_module("llguidance")


def answer(grammar: str) -> str:
    """Why llguidance refuses *grammar*; empty if it does not."""
    matcher = _module().LLMatcher(_module().LLTokenizer("byte"), grammar, log_level=0)
    for _ in range(_STEPS):
        if matcher.is_error() or not (ids := matcher.compute_ff_tokens()):
            break
        matcher.consume_tokens(ids)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()
