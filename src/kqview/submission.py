"""Submission: checks a request, hands it to the engine thread, and returns its Generation.

For a JSON schema or a regular expression, the core runs llguidance in processes of its own, so that
no token waits for the GIL. Python only says how to start them.
"""

import asyncio
import contextlib
import importlib
import inspect
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args, get_type_hints

from kqview import _core
from kqview.arguments import (
    INT32_MAX,
    INT64_MAX,
    flag,
    invalid,
    parameter_of,
    seconds,
    whole_number,
)
from kqview.errors import (
    InvalidCapture,
    InvalidToken,
    KqviewError,
    PromptTooLong,
    RequestError,
    UnsupportedModel,
    shown,
)
from kqview.generation.steered import SteeredGeneration
from kqview.generation.stream import Generation, GenerationFacts
from kqview.generation.waiting import LoopWaker, Turns
from kqview.lora import EngineLora, LoraScales
from kqview.mods.calls import ModCaller
from kqview.mods.decorator import BoundMod, begin, check_mods
from kqview.mods.events import ForwardPass, current_conversation
from kqview.mods.steering import Forcing, LogitsProcessor, Steering, Stopping
from kqview.mods.tokenizer import ModTokenizer
from kqview.trace import Trace, TraceRecorder, TraceRequest
from kqview.trace.attention import top_columns
from kqview.trace.record import Object
from kqview.types import Capture, ModelInfo, Sampling
from kqview.types.capture import Kind
from kqview.types.closed_schema import held
from kqview.types.sampling import PlainSamplingOptions, SamplingOptions
from kqview.types.token import Context

Reuse = Literal["exact", "prefix", "shift"]
"""Which part of a slot's KV cache a prompt takes over, see `Engine.generate`."""


class PlainGenerateOptions(PlainSamplingOptions, total=False):
    """`GenerateOptions` without ``json_schema``, which says what `Generation.parsed` is."""

    max_tokens: int | None
    sampling: Sampling | None
    capture: Capture | Kind | None
    slot: int | None
    mods: Sequence[Any] | None
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None
    stopping: Stopping | None
    forcing: Forcing | None
    mod_time_limit_s: float | None
    mods_strict: bool
    trace: bool | Callable[[Trace], object] | None
    request_id: str | None
    priority: int | None
    reuse: Reuse | None
    reuse_min_tokens: int | None
    cache_prompt: bool | None
    deterministic: bool | None
    context_shift: bool | None
    n_keep: int | None
    n_discard: int | None
    lora: LoraScales | None
    add_special: bool | None
    parse_special: bool | None


class GenerateOptions(PlainGenerateOptions, SamplingOptions, total=False):
    """The options of `Engine.generate`, for callers that pass them on; None is "not given"."""


_owner: Final = ContextVar("kqview_owner", default="")


@contextlib.contextmanager
def owned_by(owner: str) -> Generator[None]:
    """Give requests made inside the context this owner; those of several owners take turns."""
    token = _owner.set(owner)
    try:
        yield
    finally:
        _owner.reset(token)


GENERATE_NAMES: Final = frozenset(get_type_hints(GenerateOptions))
"""The names of `GenerateOptions`."""


@dataclass(frozen=True, slots=True)
class SteeringOptions:
    """What steers a request, checked; see `Engine.generate`."""

    mods: Sequence[Any] = ()
    logits_processor: LogitsProcessor | None = None
    stopping: Stopping | None = None
    forcing: Forcing | None = None
    mod_time_limit_s: float | None = None
    mods_strict: bool = False
    has_trace: bool = False
    on_trace: Callable[[Trace], object] | None = None


class _TokenTexts(dict[int, str]):
    """Texts of tokens for traces, each made when it is first asked for."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token: int) -> str:
        text = self[token] = self._token_bytes(token).decode("utf-8", "replace")
        return text


class Submission:
    """The requests of one engine; any thread."""

    def __init__(
        self,
        core: _core.Engine,
        model: _core.Model,
        info: ModelInfo,
        *,
        lora: EngineLora,
        run_ahead: int,
        has_all_columns: bool,
        token_bytes: Callable[[int], bytes],
        known_bytes: Mapping[int, bytes],
        fingerprint: Callable[[], str],
        tokenizer: ModTokenizer,
        on_end: Callable[[], None],
    ) -> None:
        self._core = core
        self._model = model
        self._info = info
        self._lora = lora
        self._run_ahead = run_ahead
        self._has_all_columns = has_all_columns
        self._token_bytes = token_bytes
        self._fingerprint = fingerprint
        self._known_bytes = known_bytes  # what token_bytes has returned
        self._token_texts = _TokenTexts(token_bytes)
        self._tokenizer = tokenizer
        self._on_end = on_end
        self._turns = Turns()
        self._wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = (
            weakref.WeakKeyDictionary()
        )

    def check_prompt(self, name: str, ids: list[int], *, embeds: bool = False) -> None:
        """Refuse a prompt that is empty, too long or has ids outside the vocabulary."""
        parameter = parameter_of(name)
        if not ids:
            raise RequestError(f"{name} has no tokens; pass at least 1", parameter=parameter)
        n_ctx, n_chunk = self._core.n_ctx, self._core.n_chunk
        if len(ids) > n_ctx:
            is_final = n_ctx == self._core.n_positions
            limit = (
                f"the model knows {n_ctx} positions; shorten it"
                if is_final
                else f"a slot holds {n_ctx}; raise n_ctx or shorten the prompt"
            )
            raise PromptTooLong(
                f"{name} has {len(ids)} tokens, {limit}",
                parameter=parameter,
                n_tokens=len(ids),
                n_max=n_ctx,
            )
        is_one_step = not self._core.has_cache or (embeds and not self._core.can_split_embedding)
        if is_one_step and len(ids) > n_chunk:
            what = "an embedding takes" if embeds else f"{self._info.architecture} models take"
            raise PromptTooLong(
                f"{name} has {len(ids)} tokens, {what} it in one step, which holds "
                f"{n_chunk}; raise n_ubatch and n_batch, or shorten the prompt",
                parameter=parameter,
                n_tokens=len(ids),
                n_max=n_chunk,
            )
        self._model.check_tokens(ids, name)

    def options(
        self,
        ids: list[int],
        *,
        request_id: str | None,
        priority: object,
        lora: object = None,
        capture: Capture | None = None,
        n_prompt_rows: int = 0,
    ) -> _core.RequestOptions:
        """The options common to all requests; *ids* have passed `check_prompt`.

        Raises:
            RequestError: An argument is invalid. May be InvalidCapture.
        """
        if request_id is not None and not isinstance(request_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise invalid("request_id", "a str or None", shown(request_id))
        options = _core.RequestOptions()
        options.prompt = ids
        options.lora = list(self._lora.scales_of("lora", lora))
        options.run_ahead = self._run_ahead
        options.owner = _owner.get()
        options.priority = whole_number("priority", priority, low=-(2**31))
        if capture:
            capture = capture.counted(self._info)
            capture.check_columns(has_all=self._has_all_columns)
            _check_indices(capture)
            try:
                options.set_capture(self._core, capture)
            except InvalidCapture as error:
                error.parameter = "capture"
                raise
            options.n_prompt_rows = n_prompt_rows
        return options

    def submit(
        self,
        name: str,
        options: _core.RequestOptions,
        *,
        prompt: list[int],
        request_id: str | None,
        capture: Capture | None = None,
        stop: Sequence[str] = (),
        schema: str | None = None,
    ) -> Generation:
        """Queue a request; raises the errors of the core.

        Args:
            name: Start of the ``request_id`` if the caller gives none.
            options: The request for the core.
            prompt: Ids of the prompt.
            request_id: The caller's name for the request.
            capture: The capture set in *options*.
            stop: Strings that end the generation.
            schema: JSON schema of the text.
        """
        handle = self._core.submit(options)
        return Generation(
            handle,
            **self._facts(
                request_id or f"{name}-{handle.id}", options, prompt, capture, stop, schema
            ),
        )

    def steer(
        self,
        name: str,
        options: _core.RequestOptions,
        steering: SteeringOptions,
        *,
        prompt: list[int],
        sampling: Sampling,
        request_id: str | None,
        capture: Capture | None = None,
        stop: Sequence[str] = (),
    ) -> SteeredGeneration:
        """Make a request that its mods steer, and that is queued at its first iteration.

        Args:
            name: As of `submit`, as are the following ones.
            options: The request for the core; its prompt and limit may still change.
            steering: What steers it.
            prompt: Ids of the prompt.
            sampling: Of the request.
            request_id: As of `submit`; if there is none, the request gets one of its own in the
                world, because traces are kept by it.
            capture: As of `submit`.
            stop: As of `submit`.
        """
        options.is_steered = True
        request_id = request_id or f"{name}-{uuid.uuid4().hex}"
        mods = begin(steering.mods, request_id, self._tokenizer)
        recorder = None
        if steering.has_trace:
            recorder = self._recorder(
                request_id, options, sampling.temperature, mods, steering.on_trace
            )
        constraints = (sampling.grammar, sampling.json_schema, sampling.regex)
        is_constrained = any(one is not None for one in constraints)

        def submit(ids: list[int], max_tokens: int) -> _core.Generation:
            options.prompt = ids
            options.max_tokens = max_tokens
            if options.n_prompt_rows:
                options.n_prompt_rows = len(ids)
            return self._core.submit(options)

        def make(
            *, ids: list[int], text: Callable[[], str], note: Callable[[], object]
        ) -> Steering:
            return Steering(
                request_id,
                mods,
                ModCaller(self._tokenizer, time_limit_s=steering.mod_time_limit_s, note=note),
                n_vocab=self._info.n_vocab,
                ids=ids,
                text=text,
                recorder=recorder,
                logits_processor=steering.logits_processor,
                stopping=steering.stopping,
                forcing=steering.forcing,
                check_prompt=lambda given: self.check_prompt("tokens of AdjustedPrefill", given),
                detokenize=self._text_of,
                is_end={self._info.eos_token_id, self._info.eot_token_id}.__contains__,
                attention=self._looker(resolved),
                picks_slowly=is_constrained,
                is_strict=steering.mods_strict,
            )

        resolved = capture.resolved(self._info) if capture else None
        return SteeredGeneration(
            make,
            prompt=prompt,
            max_tokens=min(
                options.max_tokens, INT32_MAX if options.n_discard else self._core.n_ctx
            ),
            dialogue=current_conversation(),
            submit=submit,
            context_of=partial(self._context, capture),
            **self._facts(request_id, options, prompt, capture, stop, schema_of(sampling)),
        )

    def _facts(
        self,
        request_id: str,
        options: _core.RequestOptions,
        prompt: list[int],
        capture: Capture | None,
        stop: Sequence[str],
        schema: str | None,
    ) -> GenerationFacts:
        return {
            "request_id": request_id,
            "context": self._context(capture, prompt),
            "model": self._info,
            "fingerprint": self._fingerprint,
            "n_keep": options.n_keep,
            "capture": capture.resolved(self._info) if capture else None,
            "stop": stop,
            "schema": schema,
            "token_bytes": self._token_bytes,
            "waker": self._waker,
            "on_end": self._on_end,
            "turns": self._turns,
        }

    def _context(self, capture: Capture | None, prompt: list[int]) -> Context:
        if capture is not None:
            for token_id in set(prompt) - self._known_bytes.keys():
                self._token_bytes(token_id)
        return Context(prompt, self._info.n_head, self._known_bytes)

    def _recorder(
        self,
        request_id: str,
        options: _core.RequestOptions,
        temperature: float,
        mods: Sequence[BoundMod],
        on_trace: Callable[[Trace], object] | None,
    ) -> TraceRecorder:
        names = [one.name for one in mods]
        request = TraceRequest(
            request_id=request_id,
            model=self._info.name or self._info.architecture,
            max_tokens=options.max_tokens,
            temperature=temperature,
            mod_text=", ".join(names) or None,
            active_mod_name=names[0] if names else None,
        )
        text_of = self._token_texts.__getitem__
        return TraceRecorder(request, text_of=text_of, on_finish=on_trace)

    def _text_of(self, ids: Iterable[int]) -> str:
        return b"".join(map(self._token_bytes, ids)).decode("utf-8", "replace")

    def _looker(self, capture: Capture | None) -> Callable[[ForwardPass], Object | None]:
        """Of the attention of a forward pass, what a trace keeps."""
        scale = self._info.attention_scale

        def look(event: ForwardPass) -> Object | None:
            if event.attention is None or capture is None:
                return None
            # The mean of means is that of all; no other reduction has weights of single columns.
            is_mean = capture.kind == "probs" and capture.reduce in ("mean", "mean_heads")
            if (capture.reduce is not None and not is_mean) or capture.spans is not None:
                return None
            return top_columns(
                event.attention,
                capture,
                positions=event.attention_positions,
                scale=scale,
                n_columns=event.n_tokens,
            )

        return look

    def running(self) -> dict[int, Generation]:
        """Generations that have not ended, by the core's id, in the order of their submission."""
        known: dict[int, Generation] = self._turns.generations()
        return {core_id: one for core_id, one in known.items() if one.finish_reason is None}

    def name_of(self, core_id: int) -> str | None:
        """The ``request_id`` of a generation by the core's id; None after it was dropped."""
        return self._turns.name_of(core_id)

    def _waker(self) -> LoopWaker:
        loop = asyncio.get_running_loop()
        waker = self._wakers.get(loop)
        if waker is None:
            waker = self._wakers[loop] = LoopWaker()
        return waker


def _check_indices(capture: Capture) -> None:
    """Refuse what the core has no number for, by its value; the core knows the model's."""
    for name in ("layers", "heads", "hidden"):
        for index in getattr(capture, name) or ():
            if index > INT32_MAX:
                raise InvalidCapture(
                    f"{name} has {shown(index)}, which no model has; leave it out",
                    parameter="capture",
                )


# ---- options of a generation


def token_limit(value: object) -> int:
    """*value* as ``max_tokens``, at least 1; None and numbers beyond every slot mean the slot."""
    if value is None:
        return INT32_MAX
    return min(whole_number("max_tokens", value, high=INT64_MAX), INT32_MAX)


def steering_of(
    mods: object,
    logits_processor: object,
    stopping: object,
    forcing: object,
    mod_time_limit_s: object,
    mods_strict: object,
    trace: object,
) -> SteeringOptions | None:
    """What steers a request; None if nothing does.

    Raises:
        RequestError: An argument is invalid.
    """
    # A request without mods passes no file of theirs.
    checked = () if isinstance(mods, tuple) and not mods else check_mods(cast("object", mods))
    if not callable(logits_processor) and isinstance(logits_processor, list | tuple):
        logits_processor = _in_turn(cast("Sequence[object]", logits_processor))
    callables = {"logits_processor": logits_processor, "stopping": stopping, "forcing": forcing}
    for name, value in callables.items():
        if value is not None:
            _check_function(name, value)
    on_trace: Any = trace if callable(trace) else None
    if on_trace is None and not isinstance(trace, bool | None):
        raise invalid("trace", "True, False, a function or None", shown(trace))
    limit_s = None
    if mod_time_limit_s is not None:
        limit_s = seconds("mod_time_limit_s", mod_time_limit_s, high=threading.TIMEOUT_MAX)
    is_strict = flag("mods_strict", mods_strict)
    has_trace = bool(checked) if trace is None else trace is not False
    if not checked and not has_trace and all(one is None for one in callables.values()):
        return None
    given: Any = callables
    return SteeringOptions(
        mods=checked,
        mod_time_limit_s=limit_s,
        mods_strict=is_strict,
        has_trace=has_trace,
        on_trace=on_trace,
        **given,
    )


def _check_function(name: str, value: object) -> None:
    if not callable(value):
        raise invalid(name, "a function or None", shown(value))
    if inspect.iscoroutinefunction(value):
        raise invalid(name, "a function that is not async, or None", shown(value))


def _in_turn(processors: Sequence[object]) -> LogitsProcessor | None:
    """One function that calls *processors*, each with the logits that the one before it left."""
    for i, one in enumerate(processors):
        _check_function(f"logits_processor[{i}]", one)

    def processed(ids: list[int], logits: Any) -> Any:
        for one in cast("Sequence[LogitsProcessor]", processors):
            returned = one(ids, logits)
            logits = logits if returned is None else returned
        return logits

    return processed if processors else None


def sampling_of(sampling: object, options: Mapping[str, Any]) -> Sampling:
    """The given Sampling, or one made from fields passed as keywords.

    Raises:
        RequestError: Both were given, or *sampling* has the wrong type.
    """
    options = {name: value for name, value in options.items() if value is not None}
    if sampling is None:
        return Sampling(**options)
    if not isinstance(sampling, Sampling):
        raise invalid("sampling", "a Sampling or None", type(sampling).__name__)
    if options:
        raise RequestError(
            f"sampling and {', '.join(options)} are both given; put all options into Sampling",
            parameter="sampling",
        )
    return sampling


def schema_of(sampling: Sampling) -> str | None:
    """Text of the JSON schema that the text follows, None without one."""
    return cast("str | None", sampling.json_schema)  # as Sampling stores it


def set_sampling(options: _core.RequestOptions, sampling: Sampling, n_vocab: int) -> None:
    """Fill in how tokens are chosen and which ones end the generation.

    Raises:
        InvalidToken: A stopping, banned or biased token is not one of the *n_vocab*.
        InvalidSampling: Closing the objects of a JSON schema takes too much work.
        KqviewError: llguidance is needed, but not installed or of another major version.
    """
    is_lark = sampling.grammar is not None and sampling.grammar.startswith(LARK_MARK)
    if is_lark or sampling.json_schema is not None or sampling.regex is not None:
        options.constraint_command = _constraint_command()
        options.unwanted = _unwanted.get() or options.unwanted
    if isinstance(sampling.json_schema, str):
        sampling = replace(sampling, json_schema=held(sampling.json_schema))
    options.sampling = _core.SamplingParams(sampling)
    options.stop_tokens = list(sampling.stop_tokens)
    for name, ids in (
        ("an item of stop_tokens", options.stop_tokens),
        ("an item of banned_tokens", sampling.banned_tokens),
        ("an item of begin_suppress", sampling.begin_suppress),
        ("a key of logit_bias", sampling.logit_bias),
    ):
        largest = max(ids, default=0)
        if largest >= n_vocab:
            allowed = f"a token id from 0 to {n_vocab - 1}"
            raise invalid(name, allowed, str(largest), InvalidToken)


def _constraint_command() -> list[str]:
    try:
        package = importlib.import_module("llguidance")
        library = importlib.import_module("llguidance._lib")
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "llguidance":
            raise
        raise KqviewError(
            "json_schema, regex and %llguidance need llguidance, which is not installed; "
            'run pip install "kqview[constraints]"'
        ) from missing
    if str(package.__version__).partition(".")[0] != "1":
        # Another major version may have different struct layouts.
        raise KqviewError(
            f"llguidance {package.__version__} is installed, but version 1 is required; "
            'run pip install "kqview[constraints]"'
        )
    return [sys.executable, "-I", "-S", "-B", _CONSTRAINT_CHILD, str(library.__file__)]


_CONSTRAINT_CHILD: Final = str(Path(__file__).with_name("constraint_child.py"))
_unwanted: ContextVar[_core.StopFlag | None] = ContextVar("unwanted", default=None)


@contextlib.contextmanager
def unless(unwanted: _core.StopFlag) -> Generator[None]:
    """End requests that are submitted inside the context once *unwanted* is set.

    They raise InvalidSampling then, if they were still being compiled.
    """
    token = _unwanted.set(unwanted)
    try:
        yield
    finally:
        _unwanted.reset(token)


LARK_MARK: Final = "%llguidance"
"""Beginning of a grammar in llguidance's own language."""


def set_shift(
    options: _core.RequestOptions,
    core: _core.Engine,
    *,
    n_prompt: int,
    reuse: object,
    reuse_min_tokens: object,
    cache_prompt: object,
    deterministic: object,
    context_shift: object,
    n_keep: object,
    n_discard: object,
) -> None:
    """Fill in the options of `Engine.generate` that reuse and move cached tokens.

    Raises:
        RequestError: An option has the wrong type or is out of range.
        UnsupportedModel: The model's positions cannot be moved.
    """
    if not isinstance(reuse, str) or reuse not in get_args(Reuse):
        raise invalid("reuse", "'exact', 'prefix' or 'shift'", shown(reuse))
    cache_prompt = flag("cache_prompt", cache_prompt)
    deterministic = flag("deterministic", deterministic)
    context_shift = flag("context_shift", context_shift)
    n_run_min = whole_number("reuse_min_tokens", reuse_min_tokens)
    wanted = "reuse='shift'" if reuse == "shift" else "context_shift" if context_shift else None
    if wanted and core.shift_obstacle:
        raise UnsupportedModel(
            f"{wanted} moves positions, but this model keeps {core.shift_obstacle}; leave it out "
            "and send the ids to keep as the prompt"
        )
    if deterministic and reuse != "exact":
        raise RequestError(
            f"deterministic evaluates the whole prompt, and reuse is {reuse!r}; leave one of them "
            "out",
            parameter="deterministic",
        )
    options.cache_prompt = cache_prompt and not deterministic
    options.is_alone = deterministic
    # No run is as long as the largest number: nothing is moved.
    options.n_reuse_min = {"exact": 0, "prefix": INT32_MAX, "shift": n_run_min}[reuse]
    n_keep = whole_number("n_keep", n_keep, low=-1, high=INT64_MAX)
    if n_discard is not None:
        n_discard = whole_number("n_discard", n_discard, high=INT64_MAX)
    if not context_shift:
        if n_keep != 0 or n_discard is not None:
            raise RequestError(
                f"n_keep={n_keep} and n_discard={n_discard} have no effect without context_shift; "
                "pass context_shift=True with them",
                parameter="context_shift",
            )
        return
    if n_keep > n_prompt:
        raise RequestError(
            f"n_keep is {n_keep}, but the prompt has {n_prompt} tokens; -1 keeps all of them",
            parameter="n_keep",
        )
    n_keep = n_prompt if n_keep < 0 else n_keep
    n_rest = core.n_ctx - n_keep
    if n_discard is None:
        n_discard = max(1, n_rest // 2)
    if n_discard > n_rest:
        raise RequestError(
            f"n_keep={n_keep} and n_discard={n_discard} exceed the {core.n_ctx} tokens of a slot; "
            "keep or discard less, or raise n_ctx",
            parameter="n_discard",
        )
    options.n_keep, options.n_discard = n_keep, n_discard
