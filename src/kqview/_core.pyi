"""Native core of kqview; use the classes of the kqview package."""

from collections.abc import Sequence
from typing import Any, Final

import numpy
import numpy.typing

def drain_log() -> list[tuple[int, str]]:
    """Log lines of llama.cpp since the last call, as (logging level, text)."""

def stop_waking() -> None:
    """Call this when the interpreter exits: other threads then never return from a wait."""

class ValueCounts:
    n_values: Final[int]
    n_members: Final[int]
    """Of which members of objects."""
    depth: Final[int]
    """Most lists and objects around a value."""

def count_values(data: bytes, packs: bool) -> ValueCounts:
    """Count the values in JSON or MessagePack data before any object is made of them."""

def load_backend(path: str) -> None:
    """Register the devices of the backend in this library."""

def build_info() -> dict[str, Any]:
    """Version, llama.cpp commit, backends, devices and NVIDIA driver."""

class LoraAdapter:
    def __init__(self, path: str, scale: float) -> None: ...

class RpcEndpoint:
    def __init__(self, host: str, port: int) -> None: ...

class ModelOptions:
    """Options of `Model.load`; see cpp/llama/model.h."""

    def __init__(self) -> None: ...

    path: str
    n_gpu_layers: int
    """-1 offloads all layers."""
    lora: list[LoraAdapter]
    rpc_servers: list[RpcEndpoint]
    rpc_timeout_s: float
    vocabulary_only: bool
    predicts: bool
    """Whether to load the layers that predict later tokens."""

class RpcState:
    endpoint: Final[str]
    n_devices: Final[int]
    lost: Final[str]
    """Why the server was lost; empty while it is available."""

class DeviceNeed:
    """Memory that a model and its context need."""

    device: Final[str]
    free_bytes: Final[int]
    """0 for the host."""
    needed_bytes: Final[int]

def check_device_memory(model: ModelOptions, context: EngineOptions) -> None:
    """Raise OutOfMemory if a device has no room for its part of the model and context."""

def check_opening(model: ModelOptions, context: EngineOptions) -> list[DeviceNeed]:
    """
    Raise the errors of opening that can be found without reading the weights.

    Returns the memory needed on the host (first) and on each device.
    """

class Model:
    n_vocab: Final[int]
    has_vocab: Final[bool]
    n_layer: Final[int]
    n_head: Final[int]
    n_head_kv: Final[int]
    n_embd: Final[int]
    n_ctx_train: Final[int]
    n_swa: Final[int]
    """Width of the sliding window; 0 if there is none."""
    window_layers: Final[list[int]]
    """Layers that have one."""
    n_params: Final[int]
    size_bytes: Final[int]
    file_type: Final[str]
    rope_freq_scale: Final[float]
    bos_token_id: Final[int | None]
    eos_token_id: Final[int | None]
    eot_token_id: Final[int | None]
    pad_token_id: Final[int | None]
    sep_token_id: Final[int | None]
    fim_prefix_id: Final[int | None]
    """Before the text that precedes a gap; these ids are for filling it."""
    fim_suffix_id: Final[int | None]
    fim_middle_id: Final[int | None]
    fim_repository_id: Final[int | None]
    fim_file_id: Final[int | None]
    adds_bos: Final[bool]
    adds_eos: Final[bool]
    adds_sep: Final[bool]
    can_generate: Final[bool]
    """Whether the model generates token by token."""
    chat_template: Final[str | None]
    rerank_template: Final[str | None]
    classifier_labels: Final[list[str]]
    @staticmethod
    def load(options: ModelOptions, progress: object | None = None) -> Model:
        """Load a model, calling `progress(fraction)` meanwhile."""

    def rpc_servers(self) -> list[RpcState]:
        """State of each RPC server."""

    def metadata(self) -> dict[str, str]:
        """Key-value pairs of the file as text, without arrays."""

    def tokenize(
        self, text: bytes, add_special: bool, parse_special: bool, apart_bytes: int = 16384
    ) -> list[int]:
        """Ids of UTF-8 text; a text above `apart_bytes` is tokenized in pieces, to the same ids."""

    def detokenize(self, ids: Sequence[int]) -> bytes:
        """Text of ids, as UTF-8."""

    def token_bytes(self, id: int) -> bytes:
        """Bytes of one token; a character may span several tokens."""

    def control_tokens(self) -> list[int]:
        """Ids that text produces only with parse_special."""

    def check_tokens(self, ids: Sequence[int], who: str) -> None:
        """Raise InvalidToken if an id is outside the vocabulary."""

class ContextFit:
    """The context of a slot if none is asked for."""

    n_ctx: Final[int]
    n_ctx_train: Final[int]
    limited_by: Final[str]
    """Where a larger context has no room; empty if none is larger."""
    needed_bytes: Final[int]
    """Of the next larger context, there."""
    allowed_bytes: Final[int]

def fit_context(model: Model, context: EngineOptions) -> ContextFit:
    """Return the context to open with if `n_ctx` is 0."""

class EditKey:
    def __init__(self, hash: str, first: int) -> None: ...

    hash: Final[str]
    first: Final[int]
    """Position of the first token that it acts on."""

class EditedCells:
    """Cells of a slot, up to the next run."""

    def __init__(self, start: int, keys: Sequence[EditKey]) -> None: ...

    start: Final[int]
    keys: Final[list[EditKey]]

class HookCall:
    """Activations that a hook is asked about."""

    layer: Final[int]
    rows: Final[object]
    """Float32 (n_tokens, n_embd), writable."""

class HookChannel:
    """Calls of a hook, for the thread that runs it."""

    def next(self) -> HookCall | None:
        """Wait for the next call; None when there will be none."""

    def answer(self, rows: object | None) -> None:
        """Values in place of the call's, one after the other; None leaves them."""

    def fail(self, why: str) -> None:
        """End the request."""

class HeadRecord:
    """What heads gave out as a request ran."""

    def n_heads(self, layer: int) -> int: ...
    def head(self, layer: int, head: int) -> numpy.typing.NDArray[numpy.float32]:
        """A copy of the values of one head, (n_tokens, n_values)."""

class EditPlan:
    """All edits of a request; see cpp/tap/edits.h."""

    def __init__(self) -> None: ...

    keys: Final[list[EditKey]]
    def add_key(self, key: EditKey) -> None: ...
    def edit_outputs(
        self, layers: Sequence[int], values: object, positions: Sequence[int], replaces: bool
    ) -> None:
        """One vector for all tokens, or one for each position, one after the other."""

    def scale_head(self, layer: int, head: int, factor: float) -> None: ...
    def hook(self, layers: Sequence[int], at: str, limit_s: float) -> HookChannel:
        """Ask a function about what layers have there."""

    def set_head(self, layer: int, head: int, values: object, positions: Sequence[int]) -> None:
        """Values for each position, one after the other."""

    def record_heads(self, layers: Sequence[int]) -> HeadRecord:
        """Keep what the heads of these layers give out."""

    def bias_scores(
        self,
        queries: tuple[int, int],
        keys: Sequence[tuple[int, int]],
        bias: float,
        layers: Sequence[int],
        heads: Sequence[int],
    ) -> None:
        """Ranges are (start, stop), a stop of -1 has no end; no layers or heads: all."""

def read_control_vector(path: str) -> dict[int, numpy.typing.NDArray[numpy.float32]]:
    """Directions of a GGUF control vector by layer, each of shape (1, n_values)."""

class SamplingParams:
    def __init__(self, sampling: object) -> None:
        """Read the attributes of a kqview.Sampling by name."""

class StopFlag:
    """Ends a computation of another thread early."""

    def __init__(self) -> None: ...
    def set(self) -> None:
        """Nobody wants its result any more."""

    def is_set(self) -> bool: ...

class RequestOptions:
    """Options of `Engine.submit`; see cpp/sched/request.h."""

    def __init__(self) -> None: ...
    def set_capture(self, engine: Engine, capture: object) -> None:
        """Read the attributes of a kqview.Capture by name; raises InvalidCapture."""

    def set_edits(self, engine: Engine, plan: EditPlan) -> None:
        """Carry out these edits; raises UnsupportedModel for layers that cannot be edited."""

    edits: Final[list[EditKey]]
    prompt: list[int]
    sampling: SamplingParams
    constraint_command: list[str]
    """Runs constraint_child.py, for a JSON schema or regular expression."""
    unwanted: StopFlag
    """Set by another thread when nobody wants the request that is being submitted."""
    max_tokens: int
    stop_tokens: list[int]
    n_prompt_rows: int
    """Number of tokens at the end of the prompt whose rows are captured as well."""
    only_attends: bool
    """Whether to evaluate the prompt without sampling a token."""
    embeds: bool
    """Whether the result is the prompt's embedding; needs only_attends."""
    n_scores: int
    """Number of last prompt tokens to score, fewer than there are; needs only_attends."""
    n_top_scores: int
    """Number of best tokens that come with each score."""
    is_steered: bool
    """Whether the consumer gets a ForwardEvent for each forward pass, and answers it."""
    run_ahead: int
    n_draft_max: int
    prediction: list[int]
    """Ids that the text may consist of; guesses are made of them too."""
    priority: int
    owner: str
    """Requests of equal priority take turns by owner."""
    cache_prompt: bool
    """Whether tokens of the prompt may come from a cache."""
    is_alone: bool
    """Whether it shares no step with other requests."""
    n_reuse_min: int
    """Shortest run of tokens that a shift reuses; 0 turns shifts off."""
    n_discard: int
    """Tokens to discard after the first n_keep when the slot is full; 0 ends the request."""
    n_keep: int
    lora: list[float]
    """A scale for each adapter of the model; none: those it was loaded with."""
    slot: int
    """Slot to run in; -1 for any."""

class EndEvent:
    """The end of a request."""

    finish_reason: Final[str]
    prompt_tokens: Final[int]
    cached_tokens: Final[int]
    draft_tokens: Final[int]
    accepted_tokens: Final[int]
    queue_s: Final[float]
    prefill_s: Final[float]
    decode_s: Final[float]

class TokenEvent:
    """A generated token; its rows are views."""

    attention: Final[Any]
    positions: Final[Any]
    hidden: Final[Any]
    written_at: Final[int]
    """For tests: the address to which the CPU wrote the first row; 0 without one."""
    id: Final[int]
    logprob: Final[float | None]
    top_logprobs: Final[list[tuple[int, float]] | None]
    """None unless logprobs were requested, like logprob."""
    logits: Final[Any]
    n_discarded: Final[int]
    """Number of tokens discarded from the slot before this row."""
    end: Final[EndEvent | None]
    """The end, if this is the last token and no error follows."""

class PickedToken:
    """A choice of a request's own sampler."""

    id: Final[int]
    logprob: Final[float | None]
    top_logprobs: Final[list[tuple[int, float]] | None]
    """None unless logprobs were requested, like logprob."""

class ForwardEvent:
    """A forward pass of a steered request, which waits for `answer`."""

    attention: Final[Any]
    positions: Final[Any]
    hidden: Final[Any]
    written_at: Final[int]
    """For tests: the address to which the CPU wrote the first row; 0 without one."""
    logits: Final[Any]
    """Read-only float32 view of shape (n_vocab,), valid for as long as it is held."""
    n_discarded: Final[int]
    """As in TokenEvent."""
    n_tokens: Final[int]
    """Number of tokens in the slot, all of them evaluated."""
    n_removable: Final[int]
    """Number of generated ids that can be taken back: all, unless some were discarded."""
    n_left: Final[int]
    """Number of ids that the generation may still get, by max_tokens and its slot."""
    def pick(self, logits: Any = None, temperature: float | None = None) -> PickedToken:
        """
        Choose a token as the request would, once, from these or other logits; without the GIL.

        A temperature is for this choice alone, 0 is greedy. Nothing is changed by it.
        """

    def ends(self, id: int) -> str | None:
        """The finish reason, if this id ends the text instead of becoming part of it."""

    def answer(
        self,
        n_removed: int = 0,
        ids: Sequence[int] = [],
        end: str | None = None,
        edits: EditPlan | None = None,
    ) -> None:
        """
        Decide what follows, once; returns at once. `edits` are in force from then on.

        Takes back the last n_removed generated ids, then appends `ids` as one chunk. Without ids,
        the last token is evaluated again. With `end` the text ends there; it also ends before the
        first of `ids` that `ends`, and when nothing is left. Raises without effect: RequestError,
        InvalidToken, InvalidSampling for an id that the grammar does not allow; ClosedError once
        the generation has ended, whose next event says how.
        """

def outlook(logits: Any, n_top: int) -> tuple[list[tuple[int, float]], float]:
    """
    What raw logits say of the next token: the best ids with their logprobs, and the entropy
    of all in nats. Best first, of equal ones the lower id; ids of logit -inf are left out.
    One pass over the row, without the GIL.
    """

class TokenScore:
    """How the model judged a token of the prompt."""

    logprob: Final[float]
    rank: Final[int]
    """Number of tokens that the model preferred."""
    top_logprobs: Final[list[tuple[int, float]]]

class PromptEvent:
    """Rows of the prompt, scores of its tokens, or its embedding."""

    attention: Final[Any]
    positions: Final[Any]
    hidden: Final[Any]
    written_at: Final[int]
    """For tests: the address to which the CPU wrote the first row; 0 without one."""
    start: Final[int]
    n_rows: Final[int]
    embedding: Final[Any]
    """An array that belongs to the caller; None without embeds."""
    scores: Final[list[TokenScore]]
    """Of the tokens start .. start + n_rows; empty without n_scores."""

class WaitEvent:
    """There is no event yet."""

    holders: Final[list[int]]
    """
    Ids of the generations that hold every slot and wait for their consumers; empty if unchanged.
    """

class WakeHandle:
    def __init__(self) -> None: ...
    def fileno(self) -> int:
        """Descriptor that becomes readable when a generation has something; -1 on Windows."""

    def wait(self) -> bool:
        """Block until a generation has something; False after a moment without."""

    def drain(self) -> None:
        """Clear the signal; check every waiting generation afterwards."""

class Generation:
    id: Final[int]
    slot: Final[int]
    """Slot index; -1 while the request is queued."""
    is_parked: Final[bool]
    """True if it has no slot, and tokens that were not taken."""
    n_cached: Final[int]
    """Prompt tokens that came from a cache; final before the first event."""
    def next(
        self, wait_s: float | None = None, goes_on: bool = False
    ) -> TokenEvent | PromptEvent | ForwardEvent | EndEvent | WaitEvent:
        """
        Take the next event; blocks, without the GIL. Raises the error that ended the request.

        Returns a WaitEvent after wait_s, and while the request is queued if every slot waits
        for its consumer. With `goes_on`, the latter only if the holders have changed.
        """

    def try_next(
        self, goes_on: bool = False
    ) -> TokenEvent | PromptEvent | ForwardEvent | EndEvent | WaitEvent:
        """Like next(), without blocking."""

    def arm(self, waiter: WakeHandle) -> bool:
        """Request a signal at the next event; True if there is one already."""

    def arm_settled(self, waiter: WakeHandle) -> bool:
        """Request a signal when a cancellation has been carried out; True if it has."""

    def disarm(self, waiter: WakeHandle) -> None: ...
    def cancel(self) -> None:
        """Ask the engine to stop at the next step; returns at once."""

    def wait_settled(self) -> None:
        """Wait until a cancellation has been carried out."""

    def count_copied(self, n_bytes: int) -> None:
        """Add to the number of bytes copied out of views."""

    end: Final[EndEvent | None]
    """None while the request runs; earlier events may not have been taken yet."""

class EngineOptions:
    """Options of `Engine.open`; see cpp/sched/engine.h."""

    def __init__(self) -> None: ...

    n_ctx: int
    """0 uses the number that the model was trained with; see `fit_context`."""
    n_slots: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    flash_attn: bool | None
    """None lets llama.cpp decide."""
    attends: bool
    rows_beside: bool | None
    """None: where that is cheaper."""
    kv_type: str
    swa_full: bool
    guesses: bool
    """Whether texts may be guessed on: recurrent state is kept for it."""
    predicts: bool
    """For `check_opening`: a context of the layers that predict later tokens."""
    pooling: str
    """Empty uses what the model's file specifies."""
    host_memory_bytes: int
    free_memory_bytes: int
    """On the host, before the weights are loaded; 0 if unknown."""
    attention_budget_bytes: int
    pinned_bytes: int
    max_gap_ms: float
    """0: twice a text's own step."""
    checkpoint_bytes: int | None
    """None: 16 checkpoints a slot."""
    checkpoint_every: int
    draft: Model
    """A model that guesses how texts go on; the engine's own one: its layers for that."""
    aborted_decodes: list[int]
    """For tests: decodes, counted from 1, that are aborted."""
    poisons_blocks: bool
    """For tests: whether to overwrite the blocks of released views."""

class PoolStats:
    budget_bytes: Final[int]
    allocated_bytes: Final[int]
    leased_bytes: Final[int]
    peak_leased_bytes: Final[int]
    pinned_bytes: Final[int]
    n_leased: Final[int]
    n_blocks: Final[int]
    n_allocations: Final[int]
    n_reused: Final[int]
    plain_fallbacks: Final[int]

class SlotStats:
    state: Final[str]
    n_tokens: Final[int]
    n_exact: Final[int]
    """Number of leading ids whose cache equals that of a fresh evaluation."""
    generation: Final[int]
    """Id of the generation that uses the slot; 0 if none does."""

class EngineStats:
    uptime_s: Final[float]
    n_requests: Final[int]
    n_finished: Final[int]
    n_cancelled: Final[int]
    n_failed: Final[int]
    n_refused: Final[int]
    n_tokens: Final[int]
    n_decodes: Final[int]
    prefill_tokens: Final[int]
    prefill_s: Final[float]
    decode_tokens: Final[int]
    decode_s: Final[float]
    graph_builds: Final[int]
    attended_layers: Final[int]
    graph_reuses: Final[int]
    graph_nodes_added: Final[int]
    n_queued: Final[int]
    n_parked: Final[int]
    n_parkings: Final[int]
    attention_bytes: Final[int]
    copied_bytes: Final[int]
    n_drafts: Final[int]
    draft_tokens: Final[int]
    accepted_tokens: Final[int]
    draft_ties: Final[int]
    dropped_rows: Final[int]
    captured_steps: Final[int]
    step_to_view_s: Final[float]
    device_copies: Final[int]
    device_copy_bytes: Final[int]
    device_kernel_rows: Final[int]
    device_row_bytes: Final[int]
    device_copy_s: Final[float]
    slots: Final[list[SlotStats]]
    pool: Final[PoolStats]

class EngineHealth:
    phase: Final[str]
    quiet_s: Final[float]
    n_steps: Final[int]
    is_lost: Final[bool]

class AttentionLayer:
    layer: Final[int]
    n_head: Final[int]
    n_head_kv: Final[int]
    scale: Final[float]
    has_sinks: Final[bool]
    on_device: Final[bool]

class Engine:
    @staticmethod
    def open(model: Model, options: EngineOptions) -> Engine:
        """Create the context and start the engine thread."""

    n_ctx: Final[int]
    n_chunk: Final[int]
    """Maximum number of prompt tokens in one step."""
    n_slots: Final[int]
    attention_layers: Final[list[AttentionLayer]]
    """The layers with attention, in ascending order."""
    has_cache: Final[bool]
    """False for encoders and diffusion models, which evaluate a prompt in one step."""
    pooling: Final[str]
    """How a text becomes an embedding; empty if the context provides none."""
    memory_bytes: Final[int]
    """Bytes of weights, KV cache and compute buffers, on the host and on devices."""
    can_split_embedding: Final[bool]
    """Whether a text to embed may take several steps."""
    n_classes: Final[int]
    """Number of values of the classifier head; 0 if there is none."""
    n_positions: Final[int]
    """Number of positions that the model has learned; 0 if it has no such limit."""
    shift_obstacle: Final[str]
    """Why positions in the cache cannot be moved; empty if they can."""
    can_take_back: Final[bool]
    """Whether a slot can drop the tokens of its last step."""
    def submit(self, options: RequestOptions) -> Generation:
        """Queue a request."""

    def close(self, limit_s: float) -> None:
        """End all requests and the engine thread, unless it hangs for longer than limit_s."""

    def check_open(self) -> None: ...

    is_closed: Final[bool]
    def slot_tokens(self, slot: int) -> list[int]:
        """Ids in a slot's cache."""

    def slot_checkpoints(self, slot: int) -> list[int]:
        """Numbers of tokens that a slot can go back to; ascending."""

    def health(self) -> EngineHealth:
        """What the engine thread is doing; takes no lock."""

    def stats(self) -> EngineStats:
        """Counters since the engine was opened."""

    def await_copies(self, wanted: bool) -> None:
        """For benchmarks: whether a step ends only after its rows have left their devices."""

    def pool_contains(self, address: int) -> bool:
        """For tests: whether the address lies in a block of the pool."""

class SavedSlot:
    blob: Final[bytes]
    checkpoints: Final[bytes]
    """As a state file has them."""
    n_exact: Final[int]
    lora: Final[list[float]]
    """Scales of the adapters that it was computed with."""
    edits: Final[list[EditedCells]]
    """Edits that it was computed with."""

def save_slot(engine: Engine, slot: int, checkpoints: bool) -> SavedSlot:
    """Save a slot as a SES1 blob, with its number of exact tokens."""

def restore_slot(
    engine: Engine,
    slot: int,
    blob: bytes,
    n_exact: int,
    lora: Sequence[float],
    edits: Sequence[EditedCells],
    checkpoints: bytes,
) -> None:
    """Replace the contents of a slot; a blob that is refused changes nothing."""

def slot_edits(engine: Engine, slot: int) -> list[EditedCells]:
    """Edits that the cells of an idle slot were computed with."""

def truncate_slot(engine: Engine, slot: int, n_keep: int) -> None:
    """Keep the first n_keep tokens, or those of the last checkpoint before."""

def remove_from_slot(engine: Engine, slot: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Remove (start, stop) ranges, which are ascending and disjoint, in one move."""

def branch_slot(engine: Engine, slot: int, n: int) -> list[int]:
    """Copy what an idle slot holds to n other idle ones; returns them."""

def clear_slot(engine: Engine, slot: int) -> None: ...
