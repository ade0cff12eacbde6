"""Native core of kqview; use the classes of the kqview package."""

from collections.abc import Mapping, Sequence
import enum
import types
from typing import Any


def drain_log() -> list[tuple[int, str]]:
    """llama.cpp's log lines since the last call, as (logging level, text)."""

def count_values(data: bytes, packs: bool) -> tuple[int, int]:
    """
    Values of JSON, or of MessagePack, and how many of them are members of objects.
    """

def build_info() -> dict[str, Any]:
    """Version, llama.cpp commit, backends, devices and NVIDIA's driver."""

def check_device_memory(path: str, n_gpu_layers: int, options: Mapping[str, object]) -> None:
    """
    Raises OutOfMemory where a device cannot hold its part of a model and a context.
    """

def check_opening(path: str, n_gpu_layers: int, options: Mapping[str, object], host_memory_bytes: int) -> None:
    """
    Raises what opening would raise, as far as that shows without the weights.
    """

class Model:
    @staticmethod
    def load(path: str, n_gpu_layers: int, progress: object | None, lora: Sequence[tuple[str, float]] = [], rpc_servers: Sequence[tuple[str, int]] = [], rpc_timeout_s: float = 300.0, vocabulary_only: bool = False) -> Model:
        """
        Loads a GGUF file and LoRA adapters (path, scale), layers on RPC servers (host, port) too; `progress(fraction)` is called meanwhile.
        """

    def info(self) -> dict[str, Any]:
        """Facts of the model as llama.cpp has them; ids of -1 mean none."""

    def rpc_servers(self) -> list[tuple[str, int, str]]:
        """
        (endpoint, number of devices, why it is lost or "") of each RPC server.
        """

    def metadata(self) -> dict[str, str]:
        """The GGUF's key-value pairs as text; no arrays."""

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool, apart_bytes: int = 16384) -> list[int]:
        """Ids of UTF-8 text; they do not depend on `apart_bytes`."""

    def detokenize(self, ids: Sequence[int]) -> bytes:
        """UTF-8 text of ids."""

    def token_bytes(self, id: int) -> bytes:
        """Bytes of one token; a character may be spread over several."""

    def control_tokens(self) -> list[int]:
        """Ids that text becomes only with parse_special."""

    def check_tokens(self, ids: Sequence[int], who: str) -> None:
        """Raises InvalidToken for ids outside the vocabulary."""

class SamplingParams:
    def __init__(self, sampling: object) -> None:
        """The attributes of a kqview.Sampling, by the names of the core."""

class RowKind(enum.Enum):
    logits = 0

    scores = 1

    probs = 2

class RowType(enum.Enum):
    float32 = 0

    float16 = 1

class RowReduction(enum.Enum):
    none = 0

    mean_heads = 1

    max_heads = 2

    mean = 3

    max = 4

class FullPolicy(enum.Enum):
    raise_ = 0

    wait = 1

    drop = 2

class CapturePlan:
    @property
    def n_rows(self) -> int:
        """Rows of one token that are handed out."""

    def bytes(self, n_columns: int, n_queries: int = 1) -> int:
        """Bytes of the rows of a run of queries."""

def stop_waking() -> None:
    """The interpreter exits: threads that wait do so for ever."""

class WakeHandle:
    def __init__(self) -> None: ...

    def fileno(self) -> int:
        """Descriptor that becomes readable when a wait is over."""

    def drain(self) -> None:
        """Takes the signal back; then look at who was woken."""

class Generation:
    @property
    def id(self) -> int: ...

    @property
    def slot(self) -> int:
        """Slot index, -1 while the request is queued."""

    @property
    def written_at(self) -> int:
        """
        Address that the kernel of the last taken token wrote first; 0 without capture.
        """

    def next(self, wait_s: float | None = None, goes_on: bool = False) -> tuple[int, float | None, list[tuple[int, float]] | None, Any, bool, int] | tuple[int, int, Any] | list[int] | types.EllipsisType | None:
        """
        Next item, blocking: (id, logprob, top, rows, is_last, n_discarded) of a token or (start, n_rows, rows) of the prompt, rows being (attention, positions, hidden) or the embedding as (None, None, values); None at the end. While the request is queued and every slot waits for its consumer: the ids of the requests in them, once unless they change; `goes_on` then waits on. `...` after wait_s.
        """

    def try_next(self, goes_on: bool = False) -> tuple[int, float | None, list[tuple[int, float]] | None, Any, bool, int] | tuple[int, int, Any] | list[int] | types.EllipsisType | None:
        """As next(), but `...` when nothing is there yet."""

    def arm(self, waiter: WakeHandle) -> bool:
        """Asks to be woken at the next item; True when one is there already."""

    def arm_settled(self, waiter: WakeHandle) -> bool:
        """
        Asks to be woken when a cancellation was carried out; True when it was.
        """

    def disarm(self, waiter: WakeHandle) -> None: ...

    def cancel(self) -> None:
        """Asks the engine to stop at the next step; returns at once."""

    def wait_settled(self) -> None:
        """Blocks until a cancellation is carried out."""

    @property
    def end(self) -> tuple[str, int, int, int, float, float] | None:
        """
        (finish reason, prompt, cached and completion tokens, prefill_s, decode_s) once it is known.
        """

    def peek_end(self) -> None:
        """Makes `end` known after a cancellation, which takes no further items."""

class Engine:
    @staticmethod
    def open(model: Model, n_ctx: int, n_slots: int, n_batch: int, n_ubatch: int, n_threads: int, flash_attn: bool | None, kv_type: str, swa_full: bool, pooling: str, attention_budget_bytes: int, host_memory_bytes: int, poison: bool, aborted_decodes: Sequence[int]) -> Engine:
        """Creates the context and starts the engine thread."""

    @property
    def n_ctx(self) -> int: ...

    @property
    def n_chunk(self) -> int:
        """Most prompt tokens of one step."""

    @property
    def n_slots(self) -> int: ...

    @property
    def attention_layers(self) -> list[tuple[int, int, int, float]]:
        """(layer, heads, KV heads, scale) of each layer with attention."""

    @property
    def hidden_layers(self) -> list[int]:
        """Layers whose output can be captured."""

    @property
    def has_cache(self) -> bool:
        """False for encoders and diffusion models: a prompt is one step."""

    @property
    def pooling(self) -> str:
        """How a text becomes an embedding; empty where the context gives none."""

    @property
    def can_split_embedding(self) -> bool:
        """False: a text that is embedded has to be one step."""

    @property
    def n_classes(self) -> int:
        """Values of the model's classifier head; 0 = it has none."""

    @property
    def n_positions(self) -> int:
        """Positions that the model learned; 0 = it has no such limit."""

    @property
    def shift_obstacle(self) -> str:
        """
        What keeps the cache's positions from being moved, empty when nothing does.
        """

    def plan(self, kind: RowKind, type: RowType, layers: Sequence[int] | None, heads: Sequence[int] | None, reduce: RowReduction = RowReduction.none, top_k: int = 0, hidden: Sequence[int] = []) -> CapturePlan:
        """Resolves what to capture; raises InvalidCapture."""

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, max_tokens: int, stop_tokens: Sequence[int], capture: CapturePlan | None, on_full: FullPolicy, wait_s: float, run_ahead: int, priority: int, n_prompt_rows: int = 0, only_attends: bool = False, embeds: bool = False, slot: int = -1, constraint_library: str = '', n_reuse_min: int = 0, n_keep: int = 0, n_discard: int = 0) -> Generation:
        """
        Queues a request. `n_prompt_rows`: of the prompt's last tokens, captured too; `only_attends`: no token is sampled; `embeds`: neither, its embedding is the result; `slot`: where it must run, -1 = anywhere; `constraint_library`: path of llguidance's; `n_reuse_min`: least run of tokens that is kept by a shift, 0 = none; `n_discard`: tokens behind the first `n_keep` that go when the slot is full, 0 = the request ends.
        """

    def close(self, limit_s: float) -> None:
        """
        Ends every request, and the engine thread, unless it hangs for longer than this.
        """

    def check_open(self) -> None: ...

    @property
    def is_closed(self) -> bool: ...

    def slot_tokens(self, slot: int) -> list[int]:
        """Ids in a slot's cache."""

    def slot_n_exact(self, slot: int) -> int:
        """How many of them a fresh evaluation would compute alike."""

    def slot_is_busy(self, slot: int) -> bool: ...

    def health(self) -> dict[str, Any]:
        """What the engine thread does; takes no lock."""

    def stats(self) -> dict[str, Any]:
        """Counters since the engine was opened."""

    def await_copies(self, wanted: bool) -> None:
        """
        For benchmarks: whether a step ends only when its rows have left their devices.
        """

    def pool_contains(self, address: int) -> bool:
        """Does the address lie in a block of the pool?"""

    def count_copied(self, n_bytes: int) -> None:
        """Whoever copies attention out of a view says so here."""

class SavedSlot:
    @property
    def blob(self) -> bytes: ...

    @property
    def n_exact(self) -> int: ...

def save_slot(engine: Engine, slot: int) -> SavedSlot:
    """The slot as a SES1 blob, and how many of its tokens are exact."""

def restore_slot(engine: Engine, slot: int, blob: bytes, n_exact: int) -> None:
    """
    Makes the slot hold what the blob holds; a refused blob changes nothing.
    """

def truncate_slot(engine: Engine, slot: int, n_keep: int) -> None:
    """Keeps the first tokens, or none where the cache cannot drop its tail."""

def shift_slot(engine: Engine, slot: int, n_keep: int, n_discard: int) -> None:
    """Removes tokens from the middle; the rest closes up."""

def clear_slot(engine: Engine, slot: int) -> None: ...
