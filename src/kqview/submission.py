"""Submission: checks a request, hands it to the engine thread, and returns its Generation.

`Submission.generate` is the way of a request from the arguments of `Engine.generate` to the core.
For a JSON schema or a regular expression, the core runs llguidance in processes of its own, so that
no token waits for the GIL. Python only says how to start them.
"""

import asyncio
import contextlib
import sys
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, cast

import numpy as np

from kqview import _core
from kqview.arguments import (
    INT32_MAX,
    INT64_MAX,
    checked_ids,
    choice,
    flag,
    invalid,
    parameter_of,
    to_index,
    whole_number,
)
from kqview.edit import Edit, EditTarget, listed, plan_of
from kqview.errors import (
    InvalidCapture,
    InvalidEdit,
    InvalidToken,
    KqviewError,
    PromptTooLong,
    QueueFull,
    RequestError,
    UnknownSlot,
    UnsupportedModel,
    shown,
)
from kqview.extras import needed
from kqview.generation.source import Consumers, LoopWaker, PlainSource, Transcript
from kqview.generation.steered import SteeredSource, SteeringOptions, traced_attention
from kqview.generation.stream import Generation, PromptAttention
from kqview.lora import EngineLora, LoraScales
from kqview.mods.calls import ModCaller
from kqview.mods.decorator import begin, check_capture
from kqview.mods.events import current_dialogue
from kqview.mods.steering import Forcing, LogitsProcessor, Steering, Stopping
from kqview.mods.tokenizer import ModTokenizer
from kqview.option_names import unknown_option
from kqview.trace import Trace, TraceRecorder, TraceRequest
from kqview.types import Capture, ModelInfo, Sampling, Score
from kqview.types.capture import Kind
from kqview.types.closed_schema import held
from kqview.types.json_schema import Parsed
from kqview.types.sampling import OPTIONS, SamplingOptions
from kqview.types.text import Ids
from kqview.types.token import Context
from kqview.vocabulary import Vocabulary

Reuse = Literal["exact", "prefix", "shift"]
"""Which part of a slot's KV cache a prompt takes over, see `Engine.generate`."""


class GenerateOptions(SamplingOptions[Parsed], total=False):
    """The options of `Engine.generate`, for callers that pass them on; None is "not given"."""

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
    speculate: bool | int | None
    prediction: str | Ids | None
    reuse: Reuse | None
    reuse_min_tokens: int | None
    cache_prompt: bool | None
    deterministic: bool | None
    context_shift: bool | None
    n_keep: int | None
    n_discard: int | None
    lora: LoraScales | None
    edits: Sequence[Edit] | Edit | None
    add_special: bool | None
    parse_special: bool | None


GENERATE_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **dict.fromkeys(name for name in GenerateOptions.__annotations__ if name not in OPTIONS),
        "max_tokens": 256, "mods": (), "mods_strict": False, "priority": 0, "reuse": "exact",
        "reuse_min_tokens": 16, "cache_prompt": True, "deterministic": False,
        "context_shift": False, "n_keep": 0, "add_special": True, "parse_special": True,
        **dict.fromkeys(OPTIONS),
    }
)  # fmt: skip
"""The options of `Engine.generate`; those of Sampling are None, "not given"."""

_STEERING: Final = (
    "mods", "logits_processor", "stopping", "forcing", "mod_time_limit_s", "mods_strict", "trace",
)  # fmt: skip

_REUSE: Final = (
    "reuse", "reuse_min_tokens", "cache_prompt", "deterministic", "context_shift", "n_keep",
    "n_discard",
)  # fmt: skip

MOST_TOP: Final = 1000  # logprobs of a score
RUN_AHEAD: Final = 8
"""Tokens that are computed before they are requested, if the caller does not say."""
N_DRAFT: Final = 16
"""Tokens that ``speculate=True`` guesses at once, at most."""
N_DRAFT_MAX: Final = 62
"""As ``speculate`` may ask for: with the token before them they are a step of our kernel."""

_N_AHEAD: Final = 32  # prompts submitted before the first result is taken: fewer than the queue
_EXIT_S: Final = 30.0  # for the engine thread to end at exit
_owner: Final = ContextVar("kqview_owner", default="")


_unwanted: ContextVar[_core.StopFlag | None] = ContextVar("unwanted", default=None)


@contextlib.contextmanager
def owned_by(owner: str, unwanted: _core.StopFlag | None = None) -> Generator[None]:
    """Give requests made inside the context this owner; those of several owners take turns.

    Once *unwanted* is set, those that are still being compiled raise InvalidSampling.
    """
    tokens = _owner.set(owner), _unwanted.set(unwanted)
    try:
        yield
    finally:
        _owner.reset(tokens[0])
        _unwanted.reset(tokens[1])


@dataclass(eq=False, repr=False)
class Submission:
    """The requests of one engine; any thread.

    Attributes:
        lora: The adapters of the engine.
        run_ahead: Number of tokens computed before they are requested.
        drafts: Whether something guesses tokens.
        partial_layers: Layers whose cells are in any order.
        fingerprint: That of the engine.
        on_end: Called when a generation has ended.
    """

    core: _core.Engine
    model: _core.Model
    info: ModelInfo
    vocabulary: Vocabulary
    _: KW_ONLY
    lora: EngineLora
    run_ahead: int
    drafts: bool
    partial_layers: Sequence[int]
    fingerprint: Callable[[], str]
    on_end: Callable[[], None]

    def __post_init__(self) -> None:
        self._consumers = Consumers()
        self._wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = (
            weakref.WeakKeyDictionary()
        )

    def close(self) -> None:
        """End the engine thread, if it was not; its generations raise ClosedError."""
        self.core.close(_EXIT_S)

    # ---- one request

    def generate(
        self, prompt: object, options: Mapping[str, Any], who: str = "generate"
    ) -> Generation:
        """The request of `Engine.generate`, from its arguments to its Generation; *who* is called.

        Raises:
            RequestError: As of `Engine.generate`, as are other errors.
        """
        given, sampling = arguments_of(who, options)
        self.core.check_open()
        if not (self.model.can_generate and self.core.has_cache):
            raise UnsupportedModel(
                f"{self.info.architecture} models do not generate token by token"
            )
        steers = {name: given[name] for name in _STEERING}
        # A request without mods passes no file of theirs.
        steering = None
        if not all(
            one is GENERATE_DEFAULTS[name] or (name == "trace" and one is False)
            for name, one in steers.items()
        ):
            steering = SteeringOptions.of(steers)
        ids = self.prompt_ids(prompt, given["add_special"], given["parse_special"])
        capture = given["capture"]
        if capture is not None and not isinstance(capture, Capture):
            capture = Capture.of(capture)
        if steering is not None:
            check_capture(steering.mods, capture)
        shifts = given["context_shift"]
        moves = given["reuse"] == "shift" or (shifts is not False and flag("context_shift", shifts))
        request = self.request(
            ids,
            request_id=given["request_id"],
            priority=given["priority"],
            lora=given["lora"],
            edits=given["edits"],
            moves=moves,
            capture=capture,
            n_prompt_rows=len(ids) if capture and capture.prompt else 0,
        )
        request.max_tokens = INT32_MAX  # as many as the slot holds
        if given["max_tokens"] is not None:
            n = whole_number("max_tokens", given["max_tokens"], high=INT64_MAX)
            request.max_tokens = min(n, INT32_MAX)
        if given["slot"] is not None:
            slot = to_index(given["slot"])
            if slot is None or not 0 <= slot < self.core.n_slots:
                raise UnknownSlot(
                    f"slot must be one of 0..{self.core.n_slots - 1}, got {shown(given['slot'])}",
                    parameter="slot",
                )
            request.slot = slot
        if self.drafts or given["speculate"] is not None or given["prediction"] is not None:
            self._set_draft(request, given["speculate"], given["prediction"])
        set_sampling(request, sampling, self.info.n_vocab)
        if any(given[name] is not GENERATE_DEFAULTS[name] for name in _REUSE):  # the core's own
            self._set_reuse(request, given, len(ids))
        if steering is not None:
            edits = listed(given["edits"])
            return self._steer(
                request, steering, ids, sampling, given["request_id"], capture, edits, moves=moves
            )
        return self.submit(
            "generate",
            request,
            ids,
            given["request_id"],
            capture,
            sampling.stop,
            sampling.json_schema,
        )

    def prompt_ids(
        self,
        prompt: Any,
        add_special: object,
        parse_special: object,
        name: str = "prompt",
        *,
        embeds: bool = False,
    ) -> list[int]:
        """The ids of the argument *name*, a text or ids; refuses what no slot takes."""
        if isinstance(prompt, str):
            ids = self.vocabulary.ids_of(name, prompt, add_special, parse_special)
        else:
            ids: list[int] = prompt
            if not (type(ids) is list and ids and type(ids[0]) is int) and name[0] == "p":
                check_is_prompt(prompt)
            ids = checked_ids(name, prompt)
        self.check_prompt(name, ids, embeds=embeds)
        return ids

    def check_prompt(self, name: str, ids: list[int], *, embeds: bool = False) -> None:
        """Refuse a prompt that is empty, too long or has ids outside the vocabulary."""
        if not ids:
            raise RequestError(
                f"{name} has no tokens; pass at least 1", parameter=parameter_of(name)
            )
        n_ctx, n_chunk = self.core.n_ctx, self.core.n_chunk
        if len(ids) > n_ctx:
            is_final = n_ctx == self.core.n_positions
            limit = (
                f"the model knows {n_ctx} positions; shorten it"
                if is_final
                else f"a slot holds {n_ctx}; raise n_ctx or shorten the prompt"
            )
            raise PromptTooLong(
                f"{name} has {len(ids)} tokens, {limit}",
                parameter=parameter_of(name),
                n_tokens=len(ids),
                n_max=n_ctx,
            )
        is_one_step = not self.core.has_cache or (embeds and not self.core.can_split_embedding)
        if is_one_step and len(ids) > n_chunk:
            what = "an embedding takes" if embeds else f"{self.info.architecture} models take"
            raise PromptTooLong(
                f"{name} has {len(ids)} tokens, {what} it in one step, which holds "
                f"{n_chunk}; raise n_ubatch and n_batch, or shorten the prompt",
                parameter=parameter_of(name),
                n_tokens=len(ids),
                n_max=n_chunk,
            )
        self.model.check_tokens(ids, name)

    def request(
        self,
        ids: list[int],
        *,
        request_id: object = None,
        priority: object,
        lora: object = None,
        edits: object = None,
        moves: bool = False,
        capture: Capture | None = None,
        n_prompt_rows: int = 0,
    ) -> _core.RequestOptions:
        """What is common to all requests; *ids* have passed `check_prompt`.

        *moves*: tokens of its slot may move up, to other positions.

        Raises:
            RequestError: An argument is invalid. May be InvalidCapture or InvalidEdit.
        """
        if request_id is not None and not isinstance(request_id, str):
            raise invalid("request_id", "a str or None", shown(request_id))
        request = _core.RequestOptions()
        request.prompt = ids
        scales = self.lora.scales if lora is None else self.lora.scales_of("lora", lora)
        request.lora = list(scales)
        request.run_ahead = self.run_ahead
        if edits is not None and (found := listed(edits)):
            request.set_edits(self.core, self._plan_of(found, len(ids), moves=moves))
        request.owner = _owner.get()
        request.priority = whole_number("priority", priority, low=-(2**31))
        if capture:
            capture = capture.counted(self.info)
            capture.check_columns(
                [
                    one.layer
                    for one in self.core.attention_layers
                    if one.on_device and one.layer in self.partial_layers
                ]
            )
            try:
                request.set_capture(self.core, capture)
            except InvalidCapture as error:
                error.parameter = "capture"
                raise
            request.n_prompt_rows = n_prompt_rows
        return request

    def _plan_of(self, edits: list[Edit], n_tokens: int, *, moves: bool) -> _core.EditPlan:
        """The plan of *edits* for a text of *n_tokens*; *moves* as of `request`."""
        placed = [i for i, one in enumerate(edits) if one.has_places]
        if moves and placed:
            raise InvalidEdit(
                f"edits[{placed[0]}] names positions, which context_shift and reuse='shift' move; "
                "leave one of them out",
                parameter="edits",
            )
        target = EditTarget(
            n_layer=self.info.n_layer,
            n_embd=self.info.n_embd,
            n_heads={one.layer: one.n_head for one in self.core.attention_layers},
            n_prompt=n_tokens,
            partial_layers=self.partial_layers,
        )
        return plan_of(edits, target)

    def _set_draft(
        self, request: _core.RequestOptions, speculate: object, prediction: object
    ) -> None:
        """How many tokens of a request are guessed at once, at most, and how it may go on."""
        if speculate is None or isinstance(speculate, bool | np.bool_):
            n = N_DRAFT if speculate is None or speculate else 0
        else:
            n = whole_number("speculate", speculate, low=0, high=N_DRAFT_MAX)
        if n > 0 and not self.drafts and prediction is None:
            raise RequestError(
                "speculate needs something that guesses tokens, and the engine was opened without; "
                'open it with Engine(draft="prompt-lookup"), or give a prediction',
                parameter="speculate",
            )
        if isinstance(prediction, str):
            ids = self.vocabulary.ids_of("prediction", prediction, False, False)
        else:
            ids = [] if prediction is None else checked_ids("prediction", prediction)
        self.model.check_tokens(ids, "prediction")
        request.n_draft_max, request.prediction = n, ids[: self.core.n_ctx]

    def _set_reuse(
        self, request: _core.RequestOptions, given: Mapping[str, Any], n_prompt: int
    ) -> None:
        """Fill in the options that reuse and move cached tokens."""
        core, reuse = self.core, choice("reuse", given["reuse"], Reuse)
        cache_prompt = flag("cache_prompt", given["cache_prompt"])
        deterministic = flag("deterministic", given["deterministic"])
        context_shift = flag("context_shift", given["context_shift"])
        n_run_min = whole_number("reuse_min_tokens", given["reuse_min_tokens"])
        wanted = "reuse='shift'" if reuse == "shift" else "context_shift" if context_shift else None
        if wanted and core.shift_obstacle:
            raise UnsupportedModel(
                f"{wanted} moves positions, but this model keeps {core.shift_obstacle}; leave it "
                "out and send the ids to keep as the prompt"
            )
        if deterministic and reuse != "exact":
            raise RequestError(
                f"deterministic evaluates the whole prompt, and reuse is {reuse!r}; leave one of "
                "them out",
                parameter="deterministic",
            )
        request.cache_prompt = cache_prompt and not deterministic
        request.is_alone = deterministic
        # No run is as long as the largest number: nothing is moved.
        request.n_reuse_min = {"exact": 0, "prefix": INT32_MAX, "shift": n_run_min}[reuse]
        n_keep = whole_number("n_keep", given["n_keep"], low=-1, high=INT64_MAX)
        n_discard = given["n_discard"]
        if n_discard is not None:
            n_discard = whole_number("n_discard", n_discard, high=INT64_MAX)
        if not context_shift:
            if n_keep != 0 or n_discard is not None:
                raise RequestError(
                    f"n_keep={n_keep} and n_discard={n_discard} have no effect without "
                    "context_shift; pass context_shift=True with them",
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
                f"n_keep={n_keep} and n_discard={n_discard} exceed the {core.n_ctx} tokens of a "
                "slot; keep or discard less, or raise n_ctx",
                parameter="n_discard",
            )
        request.n_keep, request.n_discard = n_keep, n_discard

    def submit(
        self,
        name: str,
        request: _core.RequestOptions,
        prompt: list[int],
        request_id: str | None = None,
        capture: Capture | None = None,
        stop: Sequence[str] = (),
        schema: object = None,
    ) -> Generation:
        """Queue *request*; raises the errors of the core.

        *name* begins the ``request_id`` if the caller gives none; *capture* is that of *request*.
        """
        handle = self.core.submit(request)
        request_id = request_id or f"{name}-{handle.id}"
        source = self._source(handle, request_id, request, prompt, capture, stop)
        return Generation(
            source,
            request_id=request_id,
            model=self.info,
            fingerprint=self.fingerprint,
            schema=cast("str | None", schema),  # as Sampling stores it
        )

    def _source(
        self,
        handle: _core.Generation | None,
        request_id: str,
        request: _core.RequestOptions,
        prompt: list[int],
        capture: Capture | None,
        stop: Sequence[str],
    ) -> PlainSource:
        token_bytes = self.vocabulary.bytes
        if capture is not None:  # its columns have texts
            for token_id in set(prompt) - token_bytes.keys():
                token_bytes[token_id]
            capture = capture.resolved(self.info)
        context = Context(list(prompt), len(prompt), self.info.n_head, token_bytes)
        transcript = Transcript(context, capture, stop, token_bytes, request.n_keep, self.on_end)
        return PlainSource(request_id, handle, transcript, self._consumers, self._waker)

    def checked_top(self, top_logprobs: object) -> int | None:
        """The option of a request that scores texts.

        Raises:
            RequestError: It is no number, or too large.
            UnsupportedModel: The model cannot score texts.
        """
        if not (self.model.can_generate and self.core.has_cache):
            raise UnsupportedModel(
                f"{self.info.architecture} models do not predict the next token, so they "
                "cannot score texts; use a causal language model"
            )
        if top_logprobs is None:
            return None
        return whole_number("top_logprobs", top_logprobs, low=0, high=MOST_TOP)

    def attend(
        self,
        prompt: Any,
        capture: Capture | Kind,
        *,
        last: object = None,
        score: object = False,
        top_logprobs: object = None,
        request_id: str | None = None,
        priority: object = 0,
        deterministic: object = False,
        edits: object = None,
        add_special: object = True,
        parse_special: object = True,
    ) -> PromptAttention | list[PromptAttention]:
        """See `Engine.attend`."""
        self.core.check_open()
        is_one = not has_prompts(prompt)
        prompts = {"prompt": prompt}
        if not is_one:
            prompts = {f"prompt[{i}]": one for i, one in enumerate(prompt)}
        texts = [
            self.prompt_ids(one, add_special, parse_special, name) for name, one in prompts.items()
        ]
        n_last = None if last is None else whole_number("last", last)
        wanted = Capture.of(capture)
        if wanted is None:
            raise InvalidCapture(
                "capture is None, but attend has nothing else to return; pass a kind such as "
                "'probs', or a Capture",
                parameter="capture",
            )
        wanted = wanted.for_prompt()
        first = [0 if n_last is None else max(0, len(ids) - n_last) for ids in texts]
        is_scored = flag("score", score)
        if not is_scored and top_logprobs is not None:
            raise RequestError(
                "top_logprobs come with scores; pass score=True as well", parameter="top_logprobs"
            )
        n_top = self.checked_top(top_logprobs) if is_scored else None

        def submit(i: int) -> Generation:
            request = self.request(
                texts[i],
                request_id=request_id,
                priority=priority,
                edits=edits,
                capture=wanted,
                n_prompt_rows=len(texts[i]) - first[i],
            )
            request.only_attends = True
            be_alone(request, deterministic)
            if is_scored:
                request.n_scores = min(len(texts[i]) - first[i], len(texts[i]) - 1)
                request.n_top_scores = n_top or 0
            name = request_id if is_one or request_id is None else f"{request_id}-{i}"
            return self.submit("attend", request, texts[i], name, wanted)

        def attention_of(i: int, generation: Generation) -> PromptAttention:
            found = Score.empty(texts[i], has_top=n_top is not None) if is_scored else None
            if not is_one:
                generation.take_blocks(found)
            budget_bytes = self.core.stats().pool.budget_bytes
            return generation.blocks(first=first[i], budget_bytes=budget_bytes, score=found)

        if is_one:
            return attention_of(0, submit(0))
        with contextlib.closing(in_turn(texts, self.core.n_slots, submit)) as requests:
            found = {i: attention_of(i, generation) for i, generation in requests}
        return [found[i] for i in range(len(found))]

    # ---- requests that mods or callables steer

    def _steer(
        self,
        request: _core.RequestOptions,
        steering: SteeringOptions,
        prompt: list[int],
        sampling: Sampling,
        request_id: str | None,
        capture: Capture | None,
        given_edits: list[Edit],
        *,
        moves: bool,
    ) -> Generation:
        """Make a request that is queued at its first iteration.

        Without a name it gets one of its own in the world, because traces are kept by it.
        """
        request.is_steered = True
        request_id = request_id or f"generate-{uuid.uuid4().hex}"
        mods = begin(steering.mods, request_id, self._tokenizer)
        recorder = None
        if steering.has_trace:
            names = [one.name for one in mods]
            about = TraceRequest(
                request_id=request_id,
                model=self.info.name or self.info.architecture,
                max_tokens=request.max_tokens,
                temperature=sampling.temperature,
                mod_text=", ".join(names) or None,
                active_mod_name=names[0] if names else None,
            )
            text_of = self.vocabulary.token_text
            recorder = TraceRecorder(about, text_of=text_of, on_finish=steering.on_trace)
            if request.edits:
                recorder.edited(0, [(one.hash, one.first) for one in request.edits])
        constraints = (sampling.grammar, sampling.json_schema, sampling.regex)
        plain = self._source(None, request_id, request, prompt, capture, sampling.stop)
        text = plain.transcript.text

        plan_edits = partial(self._plan_of, moves=moves)

        def submit(
            ids: list[int], max_tokens: int, edits: _core.EditPlan | None
        ) -> _core.Generation:
            request.prompt = ids
            request.max_tokens = max_tokens
            if len(ids) != len(prompt):  # what counts from the end of the prompt does so anew
                if edits is None and any(one.has_places for one in given_edits):
                    edits = plan_edits(given_edits, len(ids))
                if request.n_keep == len(prompt):
                    request.n_keep = plain.transcript.n_keep = len(ids)
                    request.n_discard = min(request.n_discard, self.core.n_ctx - len(ids))
            if edits is not None:
                request.set_edits(self.core, edits)
            if request.n_prompt_rows:
                request.n_prompt_rows = len(ids)
            return self.core.submit(request)

        def context_of(ids: list[int]) -> Context:
            return self._source(None, "", request, ids, capture, ()).transcript.context

        limit_s, note = steering.mod_time_limit_s, plain.consumer.note_here
        made = Steering(
            request_id,
            mods,
            ModCaller(self._tokenizer, time_limit_s=limit_s, note=note),
            n_vocab=self.info.n_vocab,
            ids=plain.transcript.ids,
            text=lambda: text.text_before_stop,
            recorder=recorder,
            logits_processor=steering.logits_processor,
            stopping=steering.stopping,
            forcing=steering.forcing,
            check_prompt=lambda given: self.check_prompt("tokens of AdjustedPrefill", given),
            plan_edits=plan_edits,
            detokenize=self.vocabulary.text_of,
            is_end={self.info.eos_token_id, self.info.eot_token_id}.__contains__,
            attention=partial(
                traced_attention, plain.transcript.capture, self.info.attention_scale
            ),
            picks_slowly=any(one is not None for one in constraints),
            is_strict=steering.mods_strict,
        )
        most = min(request.max_tokens, INT32_MAX if request.n_discard else self.core.n_ctx)
        dialogue = current_dialogue.get()
        prefill = partial(made.prefill, prompt, max_tokens=most, dialogue=dialogue)
        source = SteeredSource(plain, made, prefill=prefill, submit=submit, context_of=context_of)
        return Generation(
            source,
            request_id=request_id,
            model=self.info,
            fingerprint=self.fingerprint,
            schema=cast("str | None", sampling.json_schema),
        )

    @cached_property
    def _tokenizer(self) -> ModTokenizer:
        words = self.vocabulary
        return ModTokenizer(
            self.model,
            tokenize=lambda text, add: cast("list[int]", words.tokenize(text, add)),
            detokenize=words.detokenize,
            token_bytes=words.bytes.__getitem__,
        )

    # ---- all requests

    def running(self) -> dict[int, Generation]:
        """Generations that have not ended, by the core's id, in the order of their submission."""
        known: dict[int, Generation] = self._consumers.generations()
        return {core_id: one for core_id, one in known.items() if one.finish_reason is None}

    def name_of(self, core_id: int) -> str | None:
        """The ``request_id`` of a generation by the core's id; None after it was dropped."""
        return self._consumers.name_of(core_id)

    def _waker(self) -> LoopWaker:
        loop = asyncio.get_running_loop()
        waker = self._wakers.get(loop)
        if waker is None:
            waker = self._wakers[loop] = LoopWaker()
        return waker


def in_turn(
    texts: Sequence[Sequence[int]], n_slots: int, submit: Callable[[int], Generation]
) -> Generator[tuple[int, Generation], None, None]:
    """Yield the index and the request of each text; take its result before the next one.

    Short texts come first, because some models share a step only among texts of one length. Some
    are submitted ahead; closing the generator cancels those that were not yielded. *submit* begins
    the request of the text with an index.
    """
    pending: deque[tuple[int, Generation]] = deque()
    n_ahead = max(_N_AHEAD, 2 * n_slots)
    try:
        for i in sorted(range(len(texts)), key=lambda i: len(texts[i])):
            if len(pending) >= n_ahead:
                yield pending.popleft()
            while True:
                try:
                    pending.append((i, submit(i)))
                    break
                except QueueFull:
                    if not pending:
                        raise
                yield pending.popleft()
        while pending:
            yield pending.popleft()
    finally:
        for _, one in pending:
            one.cancel()


def be_alone(request: _core.RequestOptions, deterministic: object) -> None:
    """Evaluate all of a prompt, in steps of its own, if *deterministic*."""
    request.is_alone = flag("deterministic", deterministic)
    request.cache_prompt = not request.is_alone


def has_prompts(prompt: object) -> bool:
    """Whether it is a list of prompts: texts, or lists of ids."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return isinstance(prompt[0], str | list | tuple | np.ndarray)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def check_is_prompt(prompt: object) -> None:
    """Refuse what is no prompt; several prompts, or the messages of a chat, by their own names."""
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        allowed = "a text as str, or a sequence of token ids"
        raise invalid("prompt", allowed, type(prompt).__name__, InvalidToken)
    if not isinstance(prompt, list | tuple) or not prompt:
        return
    given = cast("Sequence[object]", prompt)
    if isinstance(given[0], Mapping):
        raise RequestError(
            f"prompt is a list of {len(given)} messages; use engine.chat(messages)",
            parameter="prompt",
        )
    if has_prompts(given):
        raise InvalidToken(
            f"prompt is a list of {len(given)} prompts, but this takes one prompt; use "
            "engine.map(prompts)",
            parameter="prompt",
        )


def arguments_of(who: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], Sampling]:
    """*options* of `Engine.generate` by what they are about, all of them; not yet checked.

    None stands for a default, but for ``max_tokens``.

    Raises:
        RequestError: There is no such option; *sampling* is given as well as its fields, or has the
            wrong type.
    """
    given, fields = dict(GENERATE_DEFAULTS), dict[str, Any]()
    for name, value in options.items():
        if name not in GENERATE_DEFAULTS:
            raise unknown_option(who, name, (*GENERATE_DEFAULTS, "prompt"), unlisted=["prompt"])
        if value is not None or name == "max_tokens":
            (fields if name in OPTIONS else given)[name] = value
    sampling = given["sampling"]
    if sampling is None:
        return given, Sampling(**fields)
    if not isinstance(sampling, Sampling):
        raise invalid("sampling", "a Sampling or None", type(sampling).__name__)
    if fields:
        raise RequestError(
            f"sampling and {', '.join(fields)} are both given; put all options into Sampling",
            parameter="sampling",
        )
    return given, sampling


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
    package, library = (
        needed(name, "json_schema, regex and %llguidance need", _INSTALL)
        for name in ("llguidance", "llguidance._lib")
    )
    if str(package.__version__).partition(".")[0] != "1":
        # Another major version may have different struct layouts.
        raise KqviewError(
            f"llguidance {package.__version__} is installed, but version 1 is required; {_INSTALL}"
        )
    return [sys.executable, "-I", "-S", "-B", _CONSTRAINT_CHILD, str(library.__file__)]


_INSTALL: Final = 'run pip install "kqview[constraints]"'
_CONSTRAINT_CHILD: Final = str(Path(__file__).with_name("constraint_child.py"))


LARK_MARK: Final = "%llguidance"
"""Beginning of a grammar in llguidance's own language."""
