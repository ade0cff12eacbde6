"""Many: generations of many prompts, in order, of `Engine.map`.

One thread per slot takes the tokens of one generation, so every slot stays busy while results come
in the order of their prompts. Prompts are taken from their iterable, in the caller's thread, only a
few ahead of the results.
"""

import hashlib
import json
import sys
import time
from collections import Counter, deque
from collections.abc import (
    Callable,
    Container,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
from typing import Any, Final, Literal, Protocol, cast, runtime_checkable

from kqview.arguments import choice, invalid
from kqview.chat.turn import Message
from kqview.errors import ClosedError, KqviewError, shown
from kqview.generation.stream import Generation
from kqview.submission import GenerateOptions
from kqview.types import Finished, ModelInfo, Token, Usage
from kqview.types.json_schema import Parsed
from kqview.types.text import Ids
from kqview.types.token import add_token

Prompt = str | Ids | Sequence[Message]
OnError = Literal["raise", "return"]

_N_AHEAD: Final = 2  # prompts in work and results kept, per slot
_PROGRESS_S: Final = 0.2


@runtime_checkable
class StoredResults(Protocol):
    """Results of `map` that are stored; `kqview.SavedFolder` is one."""

    def prompt_keys(self) -> Mapping[str, str | None]:
        """`prompt_key` of each result by its id; None where it is not known."""
        ...


class MapOptions(GenerateOptions[Parsed], total=False):
    """The options of `Engine.map`."""

    progress: bool | Callable[[int, int | None], object] | None
    skip: Container[str] | StoredResults | None
    on_error: OnError | None


class MapsEngine(Protocol):
    """What `mapped` needs of an engine."""

    model: Final[ModelInfo]
    slots: Final[tuple[object, ...]]

    def generate(self, prompt: Any, **options: Any) -> Generation: ...
    def chat(self, messages: Any, **options: Any) -> Generation: ...


def mapped(
    engine: MapsEngine,
    prompts: Iterable[Prompt] | Mapping[str, Prompt],
    *,
    progress: bool | Callable[[int, int | None], object] | None = False,
    skip: Container[str] | StoredResults | None = (),
    on_error: object = "raise",
    **options: Any,
) -> Generator[Finished[Any], None, None]:
    """See `Engine.map`."""
    choice("on_error", on_error, OnError)
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid(
            "prompts", "several prompts, as a list or a mapping (generate takes one)",
            shown(prompts),
        )  # fmt: skip
    n_total = len(prompts) if isinstance(prompts, Sized) else None
    report = reporter(
        progress, n_total, "prompts",
        lambda n_done, n_new, n_tokens, s: f"{n_tokens} tokens, {n_tokens / s:.1f} tokens/s",
    )  # fmt: skip
    ids = cast("Container[str]", () if skip is None else skip)
    if isinstance(skip, StoredResults) and not isinstance(prompts, Mapping):
        wanted = _unsaved(prompts, skip.prompt_keys())
    else:
        given: Iterable[tuple[object, Prompt]] = (
            cast("Mapping[str, Prompt]", prompts).items()
            if isinstance(prompts, Mapping)
            else enumerate(prompts)
        )
        wanted = ((str(key), prompt) for key, prompt in given if str(key) not in ids)
    return _results(engine, wanted, report, on_error == "return", options)


def _results(
    engine: MapsEngine,
    prompts: Iterator[tuple[str, Prompt]],
    report: Callable[[int, int], object],
    returns_errors: bool,
    options: Mapping[str, Any],
) -> Generator[Finished, None, None]:
    n_slots = len(engine.slots)
    running: set[Generation] = set()
    pending: deque[Future[Finished]] = deque()
    n_done = n_tokens = 0
    is_over = False

    def work(name: str, prompt: Prompt) -> Finished:
        try:
            return taken(name, prompt)
        except Exception as error:
            error.add_note(f"engine.map: with the prompt whose index or key is {name!r}")
            raise

    def taken(name: str, prompt: Prompt) -> Finished:
        try:
            is_sequence = isinstance(prompt, Sequence) and not isinstance(prompt, str)
            is_chat = is_sequence and len(prompt) > 0 and isinstance(prompt[0], Mapping)
            begin = engine.chat if is_chat else engine.generate
            generation = begin(prompt, **{**options, "request_id": name})
        except KqviewError as error:
            if not returns_errors or isinstance(error, ClosedError):
                raise
            return Finished(
                name, [], [], "", "error", Usage(), engine.model, error,
                prompt_key=prompt_key(prompt),
            )  # fmt: skip
        running.add(generation)
        try:
            if is_over:
                generation.cancel()
            return _taken(name, prompt, generation, returns_errors=returns_errors)
        finally:
            generation.close()  # waits for its slot, which is free once `map` has ended
            running.discard(generation)

    pool = ThreadPoolExecutor(n_slots, "kqview-map")
    try:
        first = islice(prompts, _N_AHEAD * n_slots)
        pending.extend(pool.submit(work, *one) for one in first)
        while pending:
            result = pending.popleft().result()
            n_done, n_tokens = n_done + 1, n_tokens + len(result.tokens)
            report(n_done, n_tokens)
            yield result
            del result  # its attention is the caller's alone while the next one is awaited
            pending.extend(pool.submit(work, *one) for one in islice(prompts, 1))
    finally:
        is_over = True
        for future in pending:
            future.cancel()
        for generation in list(running):
            generation.cancel()
        pool.shutdown()


def prompt_key(prompt: Prompt) -> str:
    """The digest by which a prompt is found again, whatever its number is."""

    def plain(value: Any) -> object:
        return value.tolist() if hasattr(value, "tolist") else shown(value)

    try:
        text = json.dumps(prompt, sort_keys=True, default=plain)
    except (TypeError, ValueError, RecursionError):  # no prompt at all, as `generate` will say
        text = shown(prompt)
    return hashlib.sha256(text.encode()).hexdigest()


def _unsaved(
    prompts: Iterable[Prompt], saved: Mapping[str, str | None]
) -> Iterator[tuple[str, Prompt]]:
    """The prompts without a result, with ids that are free; *saved* has the key of each result.

    A prompt that is there twice needs two results. A result without a key, which `map` did not
    make, counts for the prompt whose number it has.
    """
    n_saved = Counter(saved.values())
    free = (str(n) for n in count() if str(n) not in saved)
    for i, prompt in enumerate(prompts):
        key = prompt_key(prompt)
        if n_saved[key]:
            n_saved[key] -= 1
        elif str(i) not in saved or saved[str(i)] is not None:
            yield next(free), prompt


def _taken(name: str, prompt: Prompt, generation: Generation, *, returns_errors: bool) -> Finished:
    error: KqviewError | None = None
    tokens: list[Token] = []
    try:
        for token in generation:
            add_token(tokens, token)
        del tokens[len(tokens) - generation.n_removed :]
    except ClosedError:
        raise
    except KqviewError as failure:
        if not returns_errors:
            raise
        error = failure
    return Finished(
        name,
        generation.prompt_ids,
        tokens,
        generation.text,
        generation.finish_reason,
        generation.usage,
        generation.model,
        error,
        generation.fingerprint,
        generation.reply,
        generation.schema,
        prompt_key(prompt),
    )


def reporter(
    progress: bool | Callable[[int, int | None], object] | None,
    n_total: int | None,
    what: str,
    line: Callable[[int, int, int, float], str],
) -> Callable[[int, int], object]:
    """A function that tells how far a run is, from the number of *what* done and another number.

    Args:
        progress: True prints a line to stderr; a function gets the number done and *n_total*.
        n_total: How many there are, None if unknown.
        what: What is counted, for the line.
        line: The rest of the line, from the number done, that of this run, the other number, and
            the seconds since the run began.
    """
    if callable(progress):
        return lambda n_done, other: progress(n_done, n_total)
    if not progress:
        return lambda n_done, other: None
    begun, shown_at, n_before = time.monotonic(), 0.0, -1
    of = "" if n_total is None else f"/{n_total}"

    def show(n_done: int, other: int) -> None:
        nonlocal shown_at, n_before
        now = time.monotonic()
        if n_before < 0:  # what an earlier run has done is no work of this one
            n_before = n_done - 1
        is_last = n_done == n_total
        if is_last or now - shown_at > _PROGRESS_S:
            shown_at = now
            rest = line(n_done, n_done - n_before, other, max(now - begun, 1e-9))
            end = "\n" if is_last else ""
            print(f"\r{n_done}{of} {what}, {rest}", end=end, file=sys.stderr, flush=True)

    return show
