"""Program for `kqview.confined`: whether llguidance can compile a grammar at all.

It recurses, and the stack here is a fraction of that of other threads, so that what passes in this
process compiles in another one.
"""

import contextlib
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

_STACK_BYTES = 1 << 20
_STEPS = 3


@functools.cache
def _limits_stack() -> bool:
    """Whether this process may, and does; macOS keeps the stack of a Python as large as it is."""
    with contextlib.suppress(ImportError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, hard))
        return True
    threading.stack_size(_STACK_BYTES)
    return False


def answer(grammar: str) -> str:
    """Why llguidance refuses *grammar*; empty if it does not."""
    if _limits_stack():
        return _refusal(grammar)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_refusal, grammar).result()


def _refusal(grammar: str) -> str:
    llguidance: Any = import_module("llguidance")
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    for _ in range(_STEPS):
        if matcher.is_error() or not (ids := matcher.compute_ff_tokens()):
            break
        matcher.consume_tokens(ids)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()
