"""Engine: one model, one context and one engine thread, behind the methods that callers use.

How a token is made: `generate` turns a prompt and options into a request. The engine thread assigns
it a slot, decodes it in batches while the tap writes attention rows into leased blocks, samples,
and puts the token into the request's mailbox. `Generation` takes it out as a Token whose attention
is a view of the block.
"""

import atexit
import contextlib
import logging
import os
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import (
    Any,
    Final,
    Literal,
    Self,
    TypedDict,
    Unpack,
    cast,
    get_type_hints,
    overload,
)

import numpy as np

from kqview import _core
from kqview.arguments import checked_ids, encode, invalid, seconds, to_index, whole_number
from kqview.conversation import Conversation
from kqview.demo import MODEL_PATH
from kqview.embedding import Embedding
from kqview.engine_options import (
    PINNED_BYTES,
    AttentionKernel,
    DeviceRows,
    EngineOptions,
    KvType,
    Lora,
    Pooling,
    context_options,
    lora_adapters,
    model_options,
    progress_callback,
)
from kqview.errors import (
    InvalidCapture,
    InvalidToken,
    RequestError,
    UnknownSlot,
    UnsupportedModel,
    shown,
)
from kqview.generation.prompt import PromptAttention
from kqview.generation.stream import Generation
from kqview.hub import check_is_path, fetch_model
from kqview.lora import EngineLora, LoraAdapter, LoraScales
from kqview.machine import capture_path, system_info
from kqview.many import Many
from kqview.mods.decorator import check_capture
from kqview.mods.steering import Forcing, LogitsProcessor, Stopping
from kqview.mods.tokenizer import ModTokenizer
from kqview.option_names import NamesMethods, names_options
from kqview.rpc import rpc_endpoints, rpc_timeout
from kqview.scoring import Scoring
from kqview.slot import Slot
from kqview.state.files import StateFacts
from kqview.state.fingerprint import ModelFiles
from kqview.submission import (
    GenerateOptions,
    PlainGenerateOptions,
    Reuse,
    Submission,
    sampling_of,
    schema_of,
    set_sampling,
    set_shift,
    steering_of,
    token_limit,
)
from kqview.text_batch import in_turn, ordered
from kqview.trace import Trace
from kqview.types import Capture, EngineHealth, EngineStats, ModelInfo
from kqview.types.capture import Kind
from kqview.types.html import table
from kqview.types.json_schema import Parsed, TypeOf
from kqview.types.sampling import OPTIONS, Sampling, SamplingOptions
from kqview.types.stats import read_fields
from kqview.types.text import Ids
from kqview.vocabulary import Vocabulary

CLOSE_TIMEOUT_S: Final = 30.0
"""Default ``timeout_s`` of `Engine.close`, in seconds."""

_log: Final = logging.getLogger("kqview.engine")
_ROLE: Final = re.compile(r"tokenizer\.ggml\.(\w+)_token_id")
_llama_log: Final = logging.getLogger("kqview.llama")
_SMALL_BYTES: Final = 4 * 2**20  # of weights, for which one thread is enough
_open_engines: weakref.WeakSet["Engine"] = weakref.WeakSet()


@atexit.register
def _close_engines() -> None:
    # The engine thread must end before the interpreter does; views may outlive it.
    _core.stop_waking()
    for engine in list(_open_engines):
        engine.close()


def _forward_log() -> None:
    """Pass what llama.cpp has logged since the last call to `logging`; any thread.

    An exception in a caller's handler is printed as `logging` prints it, not raised: the lines may
    belong to another engine.
    """
    for level, text in _core.drain_log():
        try:
            _llama_log.log(level, "%s", text)
        except Exception:  # raised by a handler, not by this function's caller
            if logging.raiseExceptions and sys.stderr is not None:
                with contextlib.suppress(Exception):
                    traceback.print_exc()


class AttendOptions(TypedDict, total=False):
    """Options of `Engine.attend`."""

    last: int | None
    request_id: str | None
    priority: int
    add_special: bool
    parse_special: bool


def check_opening(
    model: str | os.PathLike[str],
    *,
    n_ctx: int | None = None,
    n_slots: int = 1,
    n_threads: int | None = None,
    n_gpu_layers: int = -1,
    n_ubatch: int = 512,
    flash_attn: Literal["auto"] | bool = "auto",
    attention_kernel: AttentionKernel = "auto",
    kv_type: str = "f16",
    pooling: Pooling | None = None,
) -> "list[_core.DeviceNeed]":
    """Raise the errors that opening an Engine would raise, as far as possible without the weights.

    Reads only the file's header and vocabulary; takes next to no memory.

    Returns:
        Memory that the engine will need on the host (first) and on each device, without LoRA
        adapters and attention rows.

    Raises:
        ModelLoadError: The file is missing or is not a model that llama.cpp supports.
        OutOfMemory: The context does not fit into memory, or a device has no room for its layers.
        RequestError: An option is out of range.
    """
    options = context_options(
        n_ctx=n_ctx, n_slots=n_slots, n_threads=n_threads, n_ubatch=n_ubatch,
        flash_attn=flash_attn, attention_kernel=attention_kernel, kv_type=kv_type, pooling=pooling,
    )  # fmt: skip
    try:
        return _core.check_opening(model_options(model, n_gpu_layers), options)
    finally:
        _forward_log()


def _fitting_n_ctx(model: _core.Model, options: _core.EngineOptions) -> int:
    """The context of a slot if the caller names none; says in the log why it is that."""
    fit = _core.fit_context(model, options)
    if not fit.limited_by:
        _log.info("n_ctx is %d, the context that the model was trained with", fit.n_ctx)
    else:
        slots = f" x {options.n_slots} slots" if options.n_slots > 1 else ""
        _log.warning(
            "n_ctx is %d tokens%s of the %d that the model was trained with: on the %s the next "
            "larger one needs %s of %s; set n_ctx to choose another",
            fit.n_ctx, slots, fit.n_ctx_train, fit.limited_by, _mib(fit.needed_bytes),
            _mib(fit.allowed_bytes),
        )  # fmt: skip
    return fit.n_ctx


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"


def _opened(cls: type["Engine"], model: str, options: EngineOptions) -> "Engine":
    return cls(model, **options)


def _has_prompts(prompt: object) -> bool:
    """Whether it is a list of prompts: texts, or lists of ids."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return isinstance(prompt[0], str | list | tuple | np.ndarray)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _check_one(prompt: object) -> None:
    """Refuse what is no prompt; several prompts, or the messages of a chat, by their own names."""
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        allowed = "a text as str, or a sequence of token ids"
        raise invalid("prompt", allowed, type(prompt).__name__, InvalidToken)
    if not isinstance(prompt, list | tuple) or not prompt:
        return
    given = cast("Sequence[object]", prompt)
    first = given[0]
    if isinstance(first, Mapping):
        raise RequestError(
            f"prompt is a list of {len(given)} messages; use engine.chat(messages)",
            parameter="prompt",
        )
    if _has_prompts(given):
        raise InvalidToken(
            f"prompt is a list of {len(given)} prompts, but this takes one prompt; use "
            "engine.map(prompts)",
            parameter="prompt",
        )


def _model_info(model: _core.Model, engine: _core.Engine) -> ModelInfo:
    metadata = model.metadata()
    architecture = metadata.get("general.architecture", "")
    layers = engine.attention_layers
    return read_fields(
        ModelInfo,
        model,
        name=metadata.get("general.name", ""),
        architecture=architecture,
        n_head=max((layer.n_head for layer in layers), default=model.n_head),
        n_head_kv=max((layer.n_head_kv for layer in layers), default=model.n_head_kv),
        attention_layers=tuple(layer.layer for layer in layers),
        attention_scale=layers[0].scale if layers else 0.0,
        has_attention_sinks=any(layer.has_sinks for layer in layers),
        special_tokens=_special_tokens(model, metadata) if model.has_vocab else {},
        # llama.cpp's default for files without this key
        rope_freq_base=float(metadata.get(f"{architecture}.rope.freq_base", 10000.0)),
        classifier_labels=tuple(model.classifier_labels),
        metadata=metadata,
        fim_token_ids=_fim_token_ids(model),
    )


def _fim_token_ids(model: _core.Model) -> dict[str, int]:
    if not model.has_vocab:
        return {}
    ids = {
        "prefix": model.fim_prefix_id,
        "suffix": model.fim_suffix_id,
        "middle": model.fim_middle_id,
        "repository": model.fim_repository_id,
        "file": model.fim_file_id,
    }
    found = {name: id_ for name, id_ in ids.items() if id_ is not None}
    return found if {"prefix", "suffix", "middle"} <= found.keys() else {}


def _special_tokens(model: _core.Model, metadata: Mapping[str, str]) -> dict[str, str]:
    """Text of each special token, by the role that the file's metadata gives it."""
    found: dict[str, str] = {}
    n_vocab = model.n_vocab
    for key, value in metadata.items():
        role = _ROLE.fullmatch(key)
        if role and value.isdigit() and int(value) < n_vocab:
            found[role[1]] = model.token_bytes(int(value)).decode("utf-8", "replace")
    return found


class Engine(Vocabulary, Conversation, Embedding, Scoring, Many, NamesMethods):
    """A GGUF model loaded in this process, ready to generate.

    Safe to use from any thread. Call `close`, or use the engine as a context manager, to free its
    memory. Generations and views outlive the engine: a view keeps its bytes for as long as it is
    held.

    Args:
        model: Path of a GGUF file; "~" at its start is the home folder.
        n_ctx: Maximum number of tokens in a slot, prompt and generated tokens together. None uses
            the context that the model was trained with if that needs at most half of the memory
            that the weights leave free, and nine tenths on devices. Otherwise it uses the largest
            power of two below it that fits, at least 4096, and the log says so. The trained context
            is also the maximum for a model with learned positions.
        n_slots: Number of sequences held, and generated in one batch, at a time.
        n_batch: Maximum number of prompt tokens decoded in one step.
        n_ubatch: Like n_batch; the smaller of the two applies.
        n_threads: Number of compute threads; None uses as many as this process can keep busy, and
            one for a model with less than 4 MiB of weights: a second one would save it at most
            0.1 ms a token, and cost several times that on a busy machine.
        n_gpu_layers: Number of layers on GPUs and RPC servers, if there are any; -1 for all, which
            must then fit.
        flash_attn: Flash attention on or off, or "auto" to let llama.cpp choose, which turns it on
            on a CPU. Capture works with all three.
        attention_kernel: What computes attention on the CPU where flash attention is on and a step
            has at most 63 tokens of a slot, as in decoding: "llama.cpp", or "kqview", whose kernel
            reads the cache once for all heads, sums in float32, and gets rows of attention on the
            way. Its output is more exact than llama.cpp's and not bit-equal to it. "auto" means
            "kqview".
        device_rows: Where rows of layers on devices are computed while text is generated: "in
            graph", before the step's next layer, or "beside", where possible: the step only saves
            its queries, and the rows are computed while the next step runs. The values are the
            same. "auto" means "in graph". Devices that do one thing after the other, such as those
            of RPC servers, compute them in the graph either way; a warning is logged.
        kv_type: Type of the KV cache: "f16", "f32", "bf16", "q8_0" or another type of llama.cpp.
        swa_full: Keep the full cache of layers with a sliding window, so that every column exists.
        pooling: How `embed` turns a text into one vector: "mean", "cls" (the first token), "last",
            "none" (one vector per token), or "rank" for `classify`. None uses what the model's file
            specifies.
        chat_template: Jinja chat template to use instead of the one in the model's file. It is
            trusted: it is rendered in this process, without limits on its time and memory.
        template_options: Extra variables for the template in every chat, such as
            ``{"enable_thinking": False}``; those of a call win.
        lora: LoRA adapters for the model: a GGUF file, a (file, scale) pair, or a list of these.
        rpc_servers: Other machines that hold and compute layers, each the ``"host:port"`` of a
            llama.cpp ggml-rpc-server. Layers are spread over them and this machine's GPUs by free
            memory.
        rpc_timeout_s: Maximum time in seconds that a server may take for one answer, including one
            that takes a whole step.
        attention_budget_bytes: Maximum memory of all attention views together; None for a quarter
            of the machine's memory.
        pinned_bytes: Maximum page-locked part of that memory, where layers are on devices: copies
            from a GPU into other memory are slower and hold the engine up. A warning is logged once
            where more is needed, or where the system locks no more; 0 locks none.
        run_ahead: Number of tokens computed before they are requested; 0 computes each on demand.
        progress: Called with the loaded fraction, 0 to 1; True prints it.

    Raises:
        ModelLoadError: A file or an RPC server is missing or cannot be used.
        OutOfMemory: The context does not fit into memory, or a device has no room for its layers;
            the message says what to lower.
        RequestError: An option is out of range.
        UnsupportedModel: The chat template does not parse.
    """

    @names_options("Engine")
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
        attention_kernel: AttentionKernel = "auto",
        device_rows: DeviceRows = "auto",
        kv_type: KvType = "f16",
        swa_full: bool = True,
        pooling: Pooling | None = None,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        lora: Lora | Sequence[Lora] | None = None,
        rpc_servers: str | Sequence[str] | None = None,
        rpc_timeout_s: float = 300.0,
        attention_budget_bytes: int | None = None,
        pinned_bytes: int = PINNED_BYTES,
        run_ahead: int = 8,
        progress: Callable[[float], object] | bool | None = None,
    ) -> None:
        given = dict(locals())  # nothing else is known here yet
        self._arguments: dict[str, Any] = {
            name: given[name] for name in get_type_hints(EngineOptions) if name != "progress"
        }
        options = context_options(
            n_ctx=n_ctx,
            n_slots=n_slots,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            flash_attn=flash_attn,
            attention_kernel=attention_kernel,
            device_rows=device_rows,
            kv_type=kv_type,
            swa_full=swa_full,
            pooling=pooling,
            attention_budget_bytes=attention_budget_bytes,
            pinned_bytes=pinned_bytes,
        )
        if chat_template is not None:
            encode("chat_template", chat_template)
        self._take_template_options(template_options)
        source = model_options(model, n_gpu_layers)
        check_is_path(source.path)
        adapters = lora_adapters(lora)
        self._lora = EngineLora(adapters)
        servers = [_core.RpcEndpoint(*server) for server in rpc_endpoints(rpc_servers)]
        source.rpc_timeout_s = rpc_timeout(rpc_timeout_s)
        run_ahead = whole_number("run_ahead", run_ahead, low=0)
        show = progress_callback(progress)
        self._n_gpu_layers = source.n_gpu_layers
        self._path = os.path.abspath(source.path)
        self._files = ModelFiles(source.path, adapters)
        try:
            if not servers:  # RPC servers manage their own memory
                _core.check_device_memory(source, options)
            source.lora = [_core.LoraAdapter(*adapter) for adapter in adapters]
            source.rpc_servers = servers
            self._model = _core.Model.load(source, show)
            if n_threads is None and self._model.size_bytes < _SMALL_BYTES:
                options.n_threads = 1
                _log.info("n_threads is 1, because the model is small")
            if options.n_ctx == 0:
                options.n_ctx = _fitting_n_ctx(self._model, options)
            self._core = _core.Engine.open(self._model, options)
        finally:
            _forward_log()
        self._n_threads = options.n_threads
        self._info = _model_info(self._model, self._core)
        if chat_template is not None:
            self._info = replace(self._info, chat_template=chat_template)
        self._open_vocabulary()
        self._open_conversation(
            trusts_template=chat_template is not None or self._path == os.path.abspath(MODEL_PATH)
        )
        self._can_generate = self._model.can_generate and self._core.has_cache
        self._submission = Submission(
            self._core,
            self._model,
            self._info,
            lora=self._lora,
            run_ahead=run_ahead,
            # Without the full cache, columns of layers with a window are not positions.
            has_all_columns=swa_full or self._model.n_swa == 0,
            token_bytes=self._bytes_of,
            known_bytes=self._token_bytes,
            fingerprint=self._files.fingerprint,
            tokenizer=ModTokenizer(
                self._model,
                tokenize=lambda text, add: self.tokenize(text, add_special=add),
                detokenize=self.detokenize,
                token_bytes=self._bytes_of,
            ),
            on_end=_forward_log,
        )
        self._kv_type = kv_type
        self._facts: StateFacts | None = None
        eot = self._info.eot_token_id
        self._slots = tuple(
            Slot(
                self._core,
                i,
                eot,
                self._state_facts,
                self._lora,
                self._submission.running,
                self._role_of,
            )
            for i in range(self._core.n_slots)
        )
        _open_engines.add(self)
        if chat_template is not None:
            self._take_template(chat_template)

    def _take_template(self, source: str) -> None:
        try:
            self._template(source)
        except BaseException:
            self.close()
            raise

    @classmethod
    def demo(cls, **options: Unpack[EngineOptions]) -> Self:
        """Open the bundled demo model; takes the same options as Engine."""
        return cls(MODEL_PATH, **options)

    @classmethod
    def from_hub(
        cls, repo: str, file: str, *, revision: str | None = None, **options: Unpack[EngineOptions]
    ) -> Self:
        """Open a model of the Hugging Face Hub; needs huggingface_hub.

        Args:
            repo: Repository, such as "owner/name".
            file: Path of a GGUF file in it. The file is downloaded once and then read from the
                cache of huggingface_hub; the first part of a split model brings the others.
            revision: Branch, tag or commit; None for the default branch.
            **options: The options of Engine.

        Raises:
            RequestError: *repo* or *file* is malformed. Also what Engine raises.
            ModelLoadError: huggingface_hub is not installed, or the download failed. Also what
                Engine raises.
        """
        return cls(fetch_model(repo, file, revision=revision), **options)

    # ---- facts

    @property
    def model(self) -> ModelInfo:
        """Facts about the model."""
        return self._info

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots, each of which holds one sequence."""
        return self._slots

    @property
    def n_ctx(self) -> int:
        """Maximum number of tokens in a slot."""
        return self._core.n_ctx

    @property
    def n_threads(self) -> int:
        """Number of threads that compute a step, the engine's own among them."""
        return self._n_threads

    @property
    def attention_kernel(self) -> Literal["kqview", "llama.cpp"]:
        """What computes the attention of decoded tokens on the CPU.

        "llama.cpp" also where flash attention is off, and for layers on devices.
        """
        return "kqview" if self._core.stats().attended_layers else "llama.cpp"

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights, KV cache and compute buffers, on the host and on devices.

        As llama.cpp allocated them when the engine was opened; without LoRA adapters and attention
        rows. Weights that are mapped from their file count whole.
        """
        return self._core.memory_bytes

    @property
    def lora(self) -> tuple[LoraAdapter, ...]:
        """The LoRA adapters and their default scales, which `set_lora_scales` changes."""
        return self._lora.adapters

    def set_lora_scales(self, scales: LoraScales) -> None:
        """Change the default scales of the LoRA adapters, for requests from here on.

        Running and queued requests keep theirs. What a slot holds is reused only by requests with
        the scales that computed it.

        Args:
            scales: As ``lora`` of `generate`.

        Raises:
            RequestError: An adapter is not loaded, or a scale is out of range.
        """
        self._lora.scales = self._lora.scales_of("scales", scales)

    def stats(self) -> EngineStats:
        """Read counters, slots, queue and memory; works after `close`, not in a forked child.

        `EngineStats.since` computes the difference between two readings.
        """
        _forward_log()
        return EngineStats.of(self._core.stats(), self._submission.name_of)

    @property
    def generations(self) -> tuple[Generation, ...]:
        """The generations of this engine that have not ended, the oldest first.

        They run, wait for a slot or for their consumer. Those behind `attend` are among them, but
        neither embeddings and scores nor a generation with mods before its first iteration.
        """
        return tuple(self._submission.running().values())

    def cancel_all(self) -> int:
        """Cancel all `generations`, whoever iterates them; return how many there were.

        As `Generation.cancel`: it does not wait, the tokens that were not taken are dropped, and
        iterating ends with the finish reason "cancelled". Any thread.
        """
        running = self.generations
        for generation in running:
            generation.cancel()
        return len(running)

    def health(self) -> EngineHealth:
        """What the engine thread is doing at this moment, for a watchdog.

        Takes no lock that the engine thread holds, so it answers even if that thread hangs. Works
        after `close`.
        """
        return read_fields(EngineHealth, self._core.health())

    def system_info(self) -> dict[str, Any]:
        """`kqview.system_info`, plus how this engine hands out attention and its RPC servers.

        Additional keys: capture, the slowest path by which attention of a layer reaches a view, as
        in ``devices``; zero_copy, whether that is "zero-copy"; n_threads, the threads that compute
        a step; and rpc_servers, a dict for each: endpoint, n_devices, and lost, which says why the
        server was lost and is None while it is available.
        """
        info = system_info()
        capture = capture_path(info["devices"], self._n_gpu_layers)
        servers = [
            {"endpoint": one.endpoint, "n_devices": one.n_devices, "lost": one.lost or None}
            for one in self._model.rpc_servers()
        ]
        return {
            **info, "capture": capture, "zero_copy": capture == "zero-copy",
            "n_threads": self._n_threads, "rpc_servers": servers,
        }  # fmt: skip

    def _state_facts(self) -> StateFacts:
        if self._facts is None:
            self._facts = StateFacts(self._files.fingerprint(), self._kv_type)
        return self._facts

    # ---- generation

    @overload
    def generate(
        self,
        prompt: str | Ids,
        *,
        json_schema: TypeOf[Parsed],
        **options: Unpack[PlainGenerateOptions],
    ) -> Generation[Parsed]: ...

    @overload
    def generate(self, prompt: str | Ids, **options: Unpack[GenerateOptions]) -> Generation: ...

    @names_options("generate", also=OPTIONS)
    def generate(
        self,
        prompt: str | Ids,
        *,
        max_tokens: int | None = 256,
        sampling: Sampling | None = None,
        capture: Capture | Kind | None = None,
        slot: int | None = None,
        mods: Sequence[Any] | None = (),
        logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None = None,
        stopping: Stopping | None = None,
        forcing: Forcing | None = None,
        mod_time_limit_s: float | None = None,
        mods_strict: bool = False,
        trace: bool | Callable[[Trace], object] | None = None,
        request_id: str | None = None,
        priority: int | None = 0,
        reuse: Reuse | None = "exact",
        reuse_min_tokens: int | None = 16,
        cache_prompt: bool | None = True,
        deterministic: bool | None = False,
        context_shift: bool | None = False,
        n_keep: int | None = 0,
        n_discard: int | None = None,
        lora: LoraScales | None = None,
        add_special: bool | None = True,
        parse_special: bool | None = True,
        **options: Unpack[SamplingOptions],
    ) -> Generation[Any]:
        """Start generating at once; the engine computes up to ``run_ahead`` tokens ahead.

        An option that is None has its default, but for *max_tokens*.

        Args:
            prompt: Text, tokenized with *add_special* and *parse_special*; or token ids, used
                unchanged.
            max_tokens: Maximum number of tokens to generate; None for as many as the slot holds.
            sampling: All sampling options in one object.
            capture: The attention to hand out: a Capture, or its kind as a string.
            slot: Index of the slot to use; None for the one that shares the most tokens with the
                prompt.
            mods: Mods to call, in this order, with each event of the request; see `kqview.mods`. A
                request with mods, callables or a trace is queued when it is first iterated; the
                last three errors below are then raised there.
            logits_processor: Called in each step, after the mods, with the ids of prompt and text
                and a copy of the logits, float32 ``(n_vocab,)``. It changes that array in place or
                returns another of the same shape. Its exceptions are raised by iterating. A list is
                called in its order.
            stopping: Called in each step with the ids of prompt and text; a true result ends the
                generation with finish reason "stop". Its exceptions are raised by iterating.
            forcing: Called before the first token with two empty sequences, and in each step with
                the generated ids that stay and those that the step adds. The ids that it returns
                follow them, before the first token in its place. Its exceptions are raised by
                iterating.
            mod_time_limit_s: Time limit of each call of a mod, in seconds. Sync mods then run on a
                thread of the request. A call that takes longer has failed; it is abandoned, and its
                mod is not called again until it returns. None sets no limit and runs mods on the
                consumer's own thread.
            mods_strict: Whether a mod that fails ends the request with ModFailed, as it does for
                mods with ``required = True``. Otherwise the failure is a warning and in
                `Generation.mod_errors`, and the text goes on without what the mod does.
            trace: Whether to record `Generation.trace`; None records it if there are mods. A
                function, such as `kqview.trace.Poster.post`, also gets it when the request ends.
            request_id: Name for logs; generated if omitted.
            priority: Requests that wait for a slot are served by priority, highest first, then in
                order of arrival.
            reuse: "exact" reuses only the part of the KV cache that equals a fresh evaluation
                (`Slot.n_exact`). "prefix" reuses all leading tokens that the slot shares with the
                prompt, also those that were shifted, or restored from a blob of unknown origin.
                "shift" also reuses the cache of text after tokens that were removed from the
                prompt. Both are approximate: such a cache was computed while other tokens were
                visible.
            reuse_min_tokens: With "shift": minimum number of consecutive equal tokens to reuse;
                shorter runs count as coincidence.
            cache_prompt: False evaluates every token of the prompt, regardless of *reuse*.
            deterministic: Give the same answer, to the last bit, to the same ids, seed and options,
                whatever ran before and whatever else runs. Nothing of the prompt comes from a
                cache, and no step is shared with another request, so other requests wait longer.
                Without it, what shares a step changes roundings; see EXACTNESS.md.
            context_shift: When the slot is full, discard old tokens and continue instead of ending
                with finish reason "length". As approximate as "shift". Columns then refer to the
                tokens that remain, see ``token.discarded``.
            n_keep: Number of tokens at the start that are never discarded; -1 for the whole prompt.
            n_discard: Number of tokens to discard after them; None for half of the rest.
            lora: Scale of each LoRA adapter for this request, by its id (index in `lora`), path or
                file name; adapters not named are left out. None for the default scales. Slots whose
                scales differ do not share a step but take turns of a few steps, and each change of
                scales makes llama.cpp build its graphs again.
            add_special: As in `tokenize`.
            parse_special: As in `tokenize`.
            **options: The fields of Sampling as keyword arguments, instead of *sampling*.

        Returns:
            A sync and async iterator of Token. A generation without a slot waits until another one
            ends, is closed, or is held because nobody takes its tokens: that one is parked, and
            resumes when its tokens are taken. If one that cannot be parked (see the README) keeps
            the slot, iterating raises BusyError after 10 s in which its consumer has taken nothing,
            at once if that is the waiting thread or task itself.

        Raises:
            RequestError: An argument is invalid. May be a subclass: PromptTooLong, InvalidToken,
                InvalidCapture, InvalidSampling or UnknownSlot.
            UnsupportedModel: The model has no decoder, has no vocabulary for a str prompt, or its
                positions cannot be moved (see `Slot.shift`).
            QueueFull: Too many requests wait for a slot.
            ClosedError: The engine is closed.
        """
        self._core.check_open()
        if not self._can_generate:
            raise UnsupportedModel(
                f"{self._info.architecture} models do not generate token by token"
            )
        steering = steering_of(
            mods, logits_processor, stopping, forcing, mod_time_limit_s, mods_strict, trace
        )
        sampling = sampling_of(sampling, options)
        slot_id = -1 if slot is None else to_index(slot)
        if slot_id is None or (slot is not None and slot_id not in range(len(self._slots))):
            raise UnknownSlot(
                f"slot must be one of 0..{len(self._slots) - 1}, got {shown(slot)}",
                parameter="slot",
            )
        ids = self._prompt_ids(prompt, add_special, parse_special)
        capture = Capture.of(capture)
        if steering is not None:
            check_capture(steering.mods, capture)
        wanted = self._submission.options(
            ids,
            request_id=request_id,
            priority=priority,
            lora=lora,
            capture=capture,
            n_prompt_rows=len(ids) if capture and capture.prompt else 0,
        )
        wanted.max_tokens = token_limit(max_tokens)
        wanted.slot = slot_id
        set_sampling(wanted, sampling, self._info.n_vocab)
        set_shift(
            wanted,
            self._core,
            n_prompt=len(ids),
            reuse=reuse,
            reuse_min_tokens=reuse_min_tokens,
            cache_prompt=cache_prompt,
            deterministic=deterministic,
            context_shift=context_shift,
            n_keep=n_keep,
            n_discard=n_discard,
        )
        if steering is not None:
            return self._submission.steer(
                "generate",
                wanted,
                steering,
                prompt=ids,
                sampling=sampling,
                request_id=request_id,
                capture=capture,
                stop=sampling.stop,
            )
        return self._submission.submit(
            "generate",
            wanted,
            prompt=ids,
            request_id=request_id,
            capture=capture,
            stop=sampling.stop,
            schema=schema_of(sampling),
        )

    # A str is also a sequence of str; the first overload that fits applies.
    @overload
    def attend(  # pyright: ignore[reportOverlappingOverload]
        self,
        prompt: str | Ids,
        capture: Capture | Kind = "probs",
        **options: Unpack[AttendOptions],
    ) -> PromptAttention: ...

    @overload
    def attend(
        self,
        prompt: Sequence[str | Ids],
        capture: Capture | Kind = "probs",
        **options: Unpack[AttendOptions],
    ) -> list[PromptAttention]: ...

    @names_options("attend")
    def attend(
        self,
        prompt: str | Ids | Sequence[str | Ids],
        capture: Capture | Kind = "probs",
        *,
        last: int | None = None,
        request_id: str | None = None,
        priority: int = 0,
        add_special: bool = True,
        parse_special: bool = True,
    ) -> PromptAttention | list[PromptAttention]:
        """Evaluate a prompt and return its own attention rows and hidden states, in blocks.

        Samples no token. Prompt tokens that the slot already holds are decoded again if their rows
        are wanted.

        Args:
            prompt: As in `generate`. Or a list of prompts: waits until all of them are evaluated,
                several ahead in all slots; their arrays together take ``attention_budget_bytes`` at
                most.
            capture: The attention to hand out: a Capture, or its kind as a string.
            last: Number of positions, counted from the end, whose rows to return; None for all.
            request_id: As in `generate`.
            priority: As in `generate`.
            add_special: As in `tokenize`.
            parse_special: As in `tokenize`.

        Returns:
            A sync and async iterator of PromptBlock. ``.array()`` returns all rows as one array of
            shape ``(n_layers, n_heads, n_rows, n_prompt)``, and with ``Capture(hidden=...)``
            ``.hidden`` the hidden states, ``(n_hidden_layers, n_rows, n_embd)``. For a list of
            prompts, a list in their order.

        Raises:
            RequestError: An argument is invalid. May be a subclass: PromptTooLong, InvalidToken or
                InvalidCapture.
            UnsupportedModel: A str prompt needs a vocabulary, which the model does not have.
            PoolExhausted: With a list: its arrays need more than ``attention_budget_bytes``.
            QueueFull: Too many requests wait for a slot.
            ClosedError: The engine is closed.
        """
        self._core.check_open()
        is_one = not _has_prompts(prompt)
        texts = [
            self._prompt_ids(cast("str | Ids", one), add_special, parse_special, name)
            for one, name in (
                [(prompt, "prompt")]
                if is_one
                else [(one, f"prompt[{i}]") for i, one in enumerate(prompt)]
            )
        ]
        n_last = None if last is None else whole_number("last", last)
        wanted_capture = Capture.of(capture)
        if wanted_capture is None:
            raise InvalidCapture(
                "capture is None, but attend has nothing else to return; pass a kind such as "
                "'probs', or a Capture",
                parameter="capture",
            )
        wanted_capture = wanted_capture.for_prompt()

        def first_of(ids: list[int]) -> int:
            return 0 if n_last is None else max(0, len(ids) - n_last)

        def submit(i: int) -> Generation:
            wanted = self._submission.options(
                texts[i],
                request_id=request_id,
                priority=priority,
                capture=wanted_capture,
                n_prompt_rows=len(texts[i]) - first_of(texts[i]),
            )
            wanted.only_attends = True
            name = request_id if is_one or request_id is None else f"{request_id}-{i}"
            return self._submission.submit(
                "attend", wanted, prompt=texts[i], request_id=name, capture=wanted_capture
            )

        def attention_of(i: int, generation: Generation) -> PromptAttention:
            return generation.blocks(
                first=first_of(texts[i]), budget_bytes=self._core.stats().pool.budget_bytes
            )

        if is_one:
            return attention_of(0, submit(0))
        found: dict[int, PromptAttention] = {}
        with contextlib.closing(in_turn(texts, len(self._slots), submit)) as requests:
            for i, generation in requests:
                generation.take_blocks()
                found[i] = attention_of(i, generation)
        return ordered(found)

    def _prompt_ids(
        self, prompt: str | Ids, add_special: object, parse_special: object, name: str = "prompt"
    ) -> list[int]:
        if isinstance(prompt, str):
            ids = self._text_ids(name, prompt, add_special, parse_special)
        else:
            _check_one(prompt)
            ids = checked_ids(name, prompt)
        self._submission.check_prompt(name, ids)
        return ids

    # ---- closing

    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the engine thread and free the model and the context; idempotent, any thread.

        Running generations raise ClosedError. On a CPU the current step is aborted, so a long
        prompt does not delay closing. Views stay valid. RPC servers become free for other
        processes, unless another engine of this process uses them.

        Args:
            timeout_s: Maximum time to wait for the engine thread, in seconds. A thread that hangs
                for longer, for example in a driver, is abandoned: its generations raise
                ClosedError, its memory is not freed, and ``health().is_lost`` is true until a later
                `close` finds that the thread has ended.
        """
        self._core.close(seconds("timeout_s", timeout_s))
        if self._core.health().is_lost:
            _log.error(
                "the engine thread did not end within %g s; it was abandoned and keeps its memory",
                timeout_s,
            )
        _open_engines.discard(self)
        self._helpers.close()
        _forward_log()

    def __reduce__(self) -> Any:
        """An engine pickles as its arguments: unpickling opens the model again.

        Nothing that a slot holds goes with it, nor does ``progress``.
        """
        return _opened, (type(self), self._path, self._arguments)

    def __copy__(self) -> Self:
        """Refused: a copy would load the model again.

        Raises:
            RequestError: Always.
        """
        raise RequestError(
            "an engine cannot be copied, which would load its model a second time; share the "
            "engine, which any thread may use, or open another Engine"
        )

    def __deepcopy__(self, memo: object) -> Self:
        """See `__copy__`."""
        return self.__copy__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        """Model, context and slots as a table, for a notebook."""
        slots = self.stats().slots
        states = ", ".join(f"{slot.id}: {slot.state}, {slot.n_tokens} tokens" for slot in slots)
        context = "closed" if self._core.is_closed else f"{self.n_ctx} tokens per slot"
        rows = {**self._info.summary(), "context": context, "slots": states}
        return table(f"Engine: {self._info.name or self._info.architecture}", rows)

    def __repr__(self) -> str:
        state = "closed" if self._core.is_closed else f"n_ctx={self.n_ctx}"
        return f"Engine({self._info.name or self._info.architecture!r}, {state})"
