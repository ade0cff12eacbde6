"""Engine: one model, one context, one engine thread, and what a caller does with them.

The way of a token: `generate` turns a prompt and options into a request; the engine thread gives it
a slot, decodes it in batches while the tap writes attention rows into leased blocks, samples, and
puts the token into the request's mailbox; `Generation` takes it out as a Token whose attention is a
view of the block.
"""

import atexit
import contextlib
import logging
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self, Unpack

from kqview import _core
from kqview.capture_plan import prompt_capture
from kqview.conversation import Conversation
from kqview.demo import MODEL_PATH
from kqview.embedding import Embedding
from kqview.engine_stats import engine_stats
from kqview.errors import RequestError, UnknownSlot, UnsupportedModel
from kqview.generation.prompt import PromptAttention
from kqview.generation.stream import Generation
from kqview.machine import default_threads, engine_info, physical_memory_bytes
from kqview.model_info import model_info
from kqview.request_options import (
    byte_count,
    checked_ids,
    lora_adapters,
    model_path,
    progress_callback,
    sampling_of,
    shift_options,
    to_core_options,
    token_limit,
    whole_number,
)
from kqview.requests import Requests
from kqview.rpc import rpc_endpoints, rpc_timeout, server_states
from kqview.slot import Slot
from kqview.state.files import StateFacts
from kqview.state.fingerprint import ModelFiles
from kqview.types import Capture, EngineHealth, EngineStats, ModelInfo, Sampling
from kqview.types.sampling import SamplingOptions
from kqview.vocabulary import Vocabulary

Lora = str | os.PathLike[str] | tuple[str | os.PathLike[str], float]

CLOSE_TIMEOUT_S: Final = 30.0
"""How long `Engine.close` waits where it is not told."""

_log: Final = logging.getLogger("kqview.engine")
_llama_log: Final = logging.getLogger("kqview.llama")
_open_engines: weakref.WeakSet["Engine"] = weakref.WeakSet()


@atexit.register
def _close_engines() -> None:
    # The engine thread must be gone before the interpreter is; views may live on.
    _core.stop_waking()
    for engine in list(_open_engines):
        engine.close()


def _forward_log() -> None:
    """Hand what llama.cpp has logged since the last call to `logging`; any thread.

    An exception of a caller's handler is printed as `logging` prints it, not raised: the lines may
    be those of another engine.
    """
    for level, text in _core.drain_log():
        try:
            _llama_log.log(level, "%s", text)
        except Exception:  # of a handler, not of the caller of this function
            if logging.raiseExceptions and sys.stderr is not None:
                with contextlib.suppress(Exception):
                    traceback.print_exc()


def check_opening(
    model: str | os.PathLike[str],
    *,
    n_ctx: int | None = None,
    n_slots: int = 1,
    n_threads: int | None = None,
    n_gpu_layers: int = -1,
    kv_type: str = "f16",
) -> None:
    """Raise what opening an Engine would raise, as far as that shows without the weights.

    Costs the file's header and vocabulary; takes next to no memory.

    Raises:
        ModelLoadError: The file is missing or none that llama.cpp knows.
        OutOfMemory: There is no room for the context, or on a device for its layers.
        RequestError: An option is out of its range.
    """
    options = to_core_options(
        n_ctx=n_ctx,
        n_slots=n_slots,
        n_batch=2048,
        n_ubatch=512,
        n_threads=default_threads() if n_threads is None else n_threads,
        flash_attn="auto",
        kv_type=kv_type,
        swa_full=True,
        pooling=None,
    )
    n_gpu_layers = whole_number("Engine", "n_gpu_layers", n_gpu_layers, low=-1)
    try:
        _core.check_opening(model_path(model), n_gpu_layers, options, physical_memory_bytes())
    finally:
        _forward_log()


def _seconds(who: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise RequestError(f"{who}: {name} is {value!r}, seconds from 0 on are needed; change it")
    return float(value)


class Engine(Vocabulary, Conversation, Embedding):
    """A GGUF model in this process, ready to generate.

    Use from any thread; `close` it, or use it as a context manager, to free its memory. Generations
    and views outlive it: views keep their bytes for as long as they are held.

    Args:
        model: Path of a GGUF file.
        n_ctx: Tokens that a slot can hold, prompt and generated ones; None for what the model was
            trained with, which is also the most where its positions were learned.
        n_slots: Sequences held, and generated in one batch, at a time.
        n_batch: Most prompt tokens decoded in one step.
        n_ubatch: As n_batch; the smaller one counts.
        n_threads: Compute threads; None for what this process may use of the machine.
        n_gpu_layers: Layers on GPUs and RPC servers, if there are any; -1: all, which have to fit.
        flash_attn: Flash attention on, off, or "auto" for llama.cpp's choice. Capture works with
            all of them.
        kv_type: Type of the KV cache: "f16", "f32", "bf16", "q8_0" and others of llama.cpp.
        swa_full: Keep the whole cache of layers with a sliding window, so that every column exists.
        pooling: How `embed` makes one vector of a text: "mean", "cls" (the first token's), "last",
            "none" (a vector a token), or "rank" for `classify`; None for what the model's file
            says.
        lora: LoRA adapters for the model: a GGUF file, a (file, scale) pair, or a list of these.
        rpc_servers: Other machines that hold and compute layers, ``"host:port"`` of a llama.cpp
            ggml-rpc-server each; spread over them and this machine's GPUs by free memory.
        rpc_timeout_s: Seconds that a server may take over one answer, a whole step included.
        attention_budget_bytes: Most memory that attention views may hold together; None for a
            quarter of the machine's memory.
        run_ahead: Tokens computed before they are asked for. 0 computes each one on demand.
        progress: Called with the loaded fraction, 0..1; True prints it.

    Raises:
        ModelLoadError: A file or an RPC server is missing or cannot be used.
        OutOfMemory: There is no room for the context, or on a device for its layers; the message
            says what to lower.
        RequestError: An option is out of its range.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        n_ctx: int | None = None,
        n_slots: int = 1,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_gpu_layers: int = -1,
        flash_attn: Literal["auto"] | bool = "auto",
        kv_type: str = "f16",
        swa_full: bool = True,
        pooling: Literal["none", "mean", "cls", "last", "rank"] | None = None,
        lora: Lora | Sequence[Lora] | None = None,
        rpc_servers: str | Sequence[str] | None = None,
        rpc_timeout_s: float = 300.0,
        attention_budget_bytes: int | None = None,
        run_ahead: int = 8,
        progress: Callable[[float], object] | bool | None = None,
        _poison: bool = False,
        _aborted_decodes: Sequence[int] = (),
    ) -> None:
        path = model_path(model)
        adapters = lora_adapters(lora)
        servers = rpc_endpoints(rpc_servers), rpc_timeout(rpc_timeout_s)
        options = to_core_options(
            n_ctx=n_ctx,
            n_slots=n_slots,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_threads=default_threads() if n_threads is None else n_threads,
            flash_attn=flash_attn,
            kv_type=kv_type,
            swa_full=swa_full,
            pooling=pooling,
        )
        run_ahead = whole_number("Engine", "run_ahead", run_ahead, low=0)
        memory_bytes = physical_memory_bytes()
        budget = memory_bytes // 4 if attention_budget_bytes is None else attention_budget_bytes
        budget_bytes = byte_count("Engine", "attention_budget_bytes", budget)
        n_gpu_layers = whole_number("Engine", "n_gpu_layers", n_gpu_layers, low=-1)
        show = progress_callback(progress)
        self._n_gpu_layers = n_gpu_layers
        self._files = ModelFiles(path, adapters)
        try:
            if not rpc_servers:  # their memory is theirs to plan
                _core.check_device_memory(path, n_gpu_layers, options)
            self._model = _core.Model.load(path, n_gpu_layers, show, adapters, *servers)
            self._core = _core.Engine.open(
                self._model,
                **options,
                attention_budget_bytes=budget_bytes,
                host_memory_bytes=memory_bytes,
                poison=_poison,
                aborted_decodes=list(_aborted_decodes),
            )
        finally:
            _forward_log()
        self._info = model_info(self._model, self._core)
        self._open_vocabulary()
        self._open_conversation()
        raw = self._model.info()
        self._can_generate: bool = raw["can_generate"] and self._core.has_cache
        self._requests = Requests(
            self._core,
            self._model,
            self._info,
            run_ahead=run_ahead,
            # Without the whole cache the columns of window layers are no positions.
            has_all_columns=swa_full or raw["n_swa"] == 0,
            token_bytes=self._bytes_of,
            on_end=_forward_log,
        )
        self._kv_type = options["kv_type"]
        self._facts: StateFacts | None = None
        eot = self._info.eot_token_id
        self._slots = tuple(
            Slot(self._core, i, eot, self._state_facts) for i in range(self._core.n_slots)
        )
        _open_engines.add(self)

    @classmethod
    def demo(cls, **options: Any) -> Self:
        """An engine with the small model that the package ships; takes the options of Engine."""
        return cls(MODEL_PATH, **options)

    # ---- what it is

    @property
    def model(self) -> ModelInfo:
        """Facts about the model."""
        return self._info

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The engine's sequences."""
        return self._slots

    @property
    def n_ctx(self) -> int:
        """Tokens that a slot can hold."""
        return self._core.n_ctx

    def stats(self) -> EngineStats:
        """Counters, slots, queue and memory; `EngineStats.since` compares. Works after `close`."""
        _forward_log()
        return engine_stats(self._core.stats(), self._requests.name_of)

    def health(self) -> EngineHealth:
        """What the engine thread does at this moment; for a watchdog.

        Takes no lock that the engine thread holds, so it answers while that hangs. Works after
        `close`.
        """
        return EngineHealth(**self._core.health())

    def system_info(self) -> dict[str, Any]:
        """`kqview.system_info`, how rows of this engine reach a view, and its RPC servers.

        Further keys: capture and zero_copy (see `kqview.machine.engine_info`), rpc_servers
        (endpoint, n_devices, and lost: why it is gone, None while it is there).
        """
        return {**engine_info(self._n_gpu_layers), "rpc_servers": server_states(self._model)}

    def _state_facts(self) -> StateFacts:
        if self._facts is None:
            self._facts = StateFacts(
                self._files.fingerprint(), self._kv_type, self._files.sampled_fingerprint()
            )
        return self._facts

    # ---- generation

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        capture: Capture | str | None = None,
        slot: int | None = None,
        mods: Sequence[Any] = (),
        request_id: str | None = None,
        priority: int = 0,
        reuse: Literal["exact", "shift"] = "exact",
        reuse_min_tokens: int = 16,
        context_shift: bool = False,
        n_keep: int = 0,
        n_discard: int | None = None,
        add_special: bool = True,
        parse_special: bool = True,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """Start generating; the engine begins at once and runs ahead of the caller a little.

        Args:
            prompt: Text, tokenized with *add_special* and *parse_special*; or ids, taken as they
                are.
            max_tokens: Most tokens to generate.
            sampling: All sampling options in one object.
            capture: What attention to hand out: a Capture, or a kind as short form.
            slot: Index of the slot to use; None for the one that shares most with the prompt.
            mods: Reserved.
            request_id: A name for logs; made up when left out.
            priority: Requests that wait for a slot go by priority, largest first, then by arrival.
            reuse: "shift" also keeps the KV cache of what follows tokens that are no longer in the
                prompt. Approximate: it was computed while those tokens were seen. "exact" keeps
                what a fresh evaluation would compute (`Slot.n_exact`).
            reuse_min_tokens: With "shift": shorter runs of equal tokens are coincidences.
            context_shift: In a full slot discard old tokens and go on, in place of ending with
                "length"; as approximate as "shift". Columns are then those of what is left:
                ``token.discarded``.
            n_keep: Tokens at the start that are never discarded; -1 for the whole prompt.
            n_discard: Tokens to discard behind them, None for half of the rest.
            add_special: As in `tokenize`.
            parse_special: As in `tokenize`.
            **options: The fields of Sampling one by one, in place of *sampling*.

        Returns:
            An iterator, sync and async, of Token. A generation without a slot waits until another
            one is over or closed. Where only the waiting thread could see to that, because it took
            the others' last tokens itself, iterating raises BusyError.

        Raises:
            RequestError: Or one of its kinds (PromptTooLong, InvalidToken, InvalidCapture,
                InvalidSampling, UnknownSlot): an argument cannot work.
            UnsupportedModel: The model has no decoder, a str prompt needs a vocabulary, or its
                positions cannot be moved (see `Slot.shift`).
            QueueFull: Too many requests wait.
            ClosedError: The engine is closed.
        """
        self._core.check_open()
        if not self._can_generate:
            raise UnsupportedModel(
                f"generate: {self._info.architecture} models do not generate token by token"
            )
        sampling = sampling_of("generate", sampling, options, mods)
        if slot is not None and slot not in range(len(self._slots)):
            raise UnknownSlot(f"generate: slot {slot}, the engine has 0..{len(self._slots) - 1}")
        ids = self._prompt_ids("generate", prompt, add_special, parse_special)
        capture = Capture.of(capture)
        return self._requests.submit(
            "generate",
            ids,
            sampling,
            capture,
            max_tokens=token_limit("generate", max_tokens),
            shift=shift_options(
                self._core, len(ids), reuse, reuse_min_tokens, context_shift, n_keep, n_discard
            ),
            n_prompt_rows=len(ids) if capture and capture.prompt else 0,
            slot=slot,
            request_id=request_id,
            priority=priority,
        )

    def attend(
        self,
        prompt: str | Sequence[int],
        capture: Capture | str = "probs",
        *,
        last: int | None = None,
        request_id: str | None = None,
        priority: int = 0,
        add_special: bool = True,
        parse_special: bool = True,
    ) -> PromptAttention:
        """Attention of the prompt itself: the rows of every position, in blocks.

        No token is sampled and no logits are computed. What the slot holds of the prompt already
        is decoded again where its rows are wanted.

        Args:
            prompt: As in `generate`.
            capture: What to hand out: a Capture, or a kind as short form.
            last: Only the rows of the last so many positions; None for all.
            request_id: As in `generate`.
            priority: As in `generate`.
            add_special: As in `tokenize`.
            parse_special: As in `tokenize`.

        Returns:
            An iterator, sync and async, of PromptBlock; ``.array()`` is the whole, of shape
            ``(n_layers, n_heads, n_rows, n_prompt)``.

        Raises:
            RequestError: Or PromptTooLong, InvalidToken, InvalidCapture: an argument cannot work.
            UnsupportedModel: A str prompt needs a vocabulary.
            QueueFull: Too many requests wait.
            ClosedError: The engine is closed.
        """
        self._core.check_open()
        ids = self._prompt_ids("attend", prompt, add_special, parse_special)
        n_rows = len(ids) if last is None else whole_number("attend", "last", last)
        n_rows = min(n_rows, len(ids))
        generation = self._requests.submit(
            "attend",
            ids,
            Sampling(),
            prompt_capture(capture),
            max_tokens=1,
            n_prompt_rows=n_rows,
            only_attends=True,
            request_id=request_id,
            priority=priority,
        )
        budget_bytes = self._core.stats()["pool"]["budget_bytes"]
        return PromptAttention(generation, len(ids) - n_rows, len(ids), budget_bytes)

    def _prompt_ids(
        self, who: str, prompt: str | Sequence[int], add_special: bool, parse_special: bool
    ) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenize(prompt, add_special=add_special, parse_special=parse_special)
        else:
            ids = checked_ids(who, prompt)
        self._requests.check_prompt(who, ids)
        return ids

    def count_copied(self, n_bytes: int) -> None:
        """Tell `stats` that *n_bytes* of attention were copied out of views."""
        self._core.count_copied(n_bytes)

    # ---- closing

    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the engine thread and free model and context; idempotent, any thread.

        Running generations raise ClosedError. On a CPU a step breaks off in the middle, so that a
        long prompt does not delay this. Views stay valid. RPC servers are free for other processes
        then, unless another engine of this one uses them.

        Args:
            timeout_s: Longest wait for the engine thread. One that hangs for longer, in a driver
                say, is given up: its generations raise ClosedError, its thread and memory stay, and
                ``health().is_lost`` is true, until a later `close` finds that it did end.
        """
        self._core.close(_seconds("close", "timeout_s", timeout_s))
        if self._core.health()["is_lost"]:
            _log.error(
                "engine.close: the engine thread hangs for more than %g s; it was given up, its "
                "memory stays",
                timeout_s,
            )
        _open_engines.discard(self)
        _forward_log()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._core.is_closed else f"n_ctx={self.n_ctx}"
        return f"Engine({self._info.name or self._info.architecture!r}, {state})"
