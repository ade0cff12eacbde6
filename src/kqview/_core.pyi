"""Native core of kqview; use the classes of the kqview package."""

from collections.abc import Sequence
from typing import Any


def drain_log() -> list[tuple[int, str]]:
    """llama.cpp's log lines since the last call, as (logging level, text)."""

def stop_waking() -> None:
    """The interpreter exits: threads that wait do so for ever."""

def count_values(data: bytes, packs: bool) -> tuple[int, int]:
    """
    Values of JSON, or of MessagePack, and how many of them are members of objects.
    """

def build_info() -> dict[str, Any]:
    """Version, llama.cpp commit, backends, devices and NVIDIA's driver."""

class LoraAdapter:
    def __init__(self, path: str, scale: float) -> None: ...

class RpcEndpoint:
    def __init__(self, host: str, port: int) -> None: ...

class ModelOptions:
    """cpp/llama/model.h says more."""

    def __init__(self) -> None: ...

    @property
    def path(self) -> str: ...

    @path.setter
    def path(self, arg: str, /) -> None: ...

    @property
    def n_gpu_layers(self) -> int:
        """-1: all that fit."""

    @n_gpu_layers.setter
    def n_gpu_layers(self, arg: int, /) -> None: ...

    @property
    def lora(self) -> list[LoraAdapter]: ...

    @lora.setter
    def lora(self, arg: Sequence[LoraAdapter], /) -> None: ...

    @property
    def rpc_servers(self) -> list[RpcEndpoint]: ...

    @rpc_servers.setter
    def rpc_servers(self, arg: Sequence[RpcEndpoint], /) -> None: ...

    @property
    def rpc_timeout_s(self) -> float: ...

    @rpc_timeout_s.setter
    def rpc_timeout_s(self, arg: float, /) -> None: ...

    @property
    def vocabulary_only(self) -> bool: ...

    @vocabulary_only.setter
    def vocabulary_only(self, arg: bool, /) -> None: ...

class RpcState:
    @property
    def endpoint(self) -> str: ...

    @property
    def n_devices(self) -> int: ...

    @property
    def lost(self) -> str:
        """Why it is gone; empty while it is there."""

class ModelFacts:
    """Facts of a model as llama.cpp has them."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def has_vocab(self) -> bool: ...

    @property
    def n_layer(self) -> int: ...

    @property
    def n_head(self) -> int: ...

    @property
    def n_head_kv(self) -> int: ...

    @property
    def n_embd(self) -> int: ...

    @property
    def n_ctx_train(self) -> int: ...

    @property
    def n_swa(self) -> int:
        """Width of the sliding window, 0: none."""

    @property
    def n_params(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def file_type(self) -> str: ...

    @property
    def rope_freq_scale(self) -> float: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def eot_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...

    @property
    def sep_token_id(self) -> int | None: ...

    @property
    def adds_bos(self) -> bool: ...

    @property
    def adds_eos(self) -> bool: ...

    @property
    def adds_sep(self) -> bool: ...

    @property
    def can_generate(self) -> bool:
        """Token by token."""

    @property
    def chat_template(self) -> str | None: ...

    @property
    def rerank_template(self) -> str | None: ...

    @property
    def classifier_labels(self) -> list[str]: ...

def check_device_memory(model: ModelOptions, context: EngineOptions) -> None:
    """
    Raises OutOfMemory where a device cannot hold its part of a model and a context.
    """

def check_opening(model: ModelOptions, context: EngineOptions) -> None:
    """
    Raises what opening would raise, as far as that shows without the weights.
    """

class Model:
    @staticmethod
    def load(options: ModelOptions, progress: object | None = None) -> Model:
        """Loads the file; `progress(fraction)` is called meanwhile."""

    @property
    def facts(self) -> ModelFacts: ...

    def rpc_servers(self) -> list[RpcState]:
        """What is known of each RPC server."""

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
        """Takes the attributes of a kqview.Sampling by name."""

class RequestOptions:
    """cpp/sched/request.h says more."""

    def __init__(self) -> None: ...

    def set_capture(self, engine: Engine, capture: object) -> None:
        """
        Takes the attributes of a kqview.Capture by name; raises InvalidCapture.
        """

    @property
    def prompt(self) -> list[int]: ...

    @prompt.setter
    def prompt(self, arg: Sequence[int], /) -> None: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @sampling.setter
    def sampling(self, arg: SamplingParams, /) -> None: ...

    @property
    def constraint_library(self) -> str:
        """Path of llguidance's, for a json_schema or a regex."""

    @constraint_library.setter
    def constraint_library(self, arg: str, /) -> None: ...

    @property
    def max_tokens(self) -> int: ...

    @max_tokens.setter
    def max_tokens(self, arg: int, /) -> None: ...

    @property
    def stop_tokens(self) -> list[int]: ...

    @stop_tokens.setter
    def stop_tokens(self, arg: Sequence[int], /) -> None: ...

    @property
    def n_prompt_rows(self) -> int:
        """Of the prompt's last tokens, whose rows are captured too."""

    @n_prompt_rows.setter
    def n_prompt_rows(self, arg: int, /) -> None: ...

    @property
    def only_attends(self) -> bool:
        """No token is sampled."""

    @only_attends.setter
    def only_attends(self, arg: bool, /) -> None: ...

    @property
    def embeds(self) -> bool:
        """Neither, and the prompt's embedding is the result; needs only_attends."""

    @embeds.setter
    def embeds(self, arg: bool, /) -> None: ...

    @property
    def run_ahead(self) -> int: ...

    @run_ahead.setter
    def run_ahead(self, arg: int, /) -> None: ...

    @property
    def priority(self) -> int: ...

    @priority.setter
    def priority(self, arg: int, /) -> None: ...

    @property
    def n_reuse_min(self) -> int:
        """Shortest run of tokens that a shift keeps; 0: none."""

    @n_reuse_min.setter
    def n_reuse_min(self, arg: int, /) -> None: ...

    @property
    def n_discard(self) -> int:
        """
        Tokens behind the first n_keep that go when the slot is full; 0: it ends then.
        """

    @n_discard.setter
    def n_discard(self, arg: int, /) -> None: ...

    @property
    def n_keep(self) -> int: ...

    @n_keep.setter
    def n_keep(self, arg: int, /) -> None: ...

    @property
    def slot(self) -> int:
        """Where it must run; -1: anywhere."""

    @slot.setter
    def slot(self, arg: int, /) -> None: ...

class EndEvent:
    """The request has ended."""

    @property
    def finish_reason(self) -> str: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def prefill_s(self) -> float: ...

    @property
    def decode_s(self) -> float: ...

class TokenEvent:
    """A token; its rows are views."""

    @property
    def id(self) -> int: ...

    @property
    def logprob(self) -> float | None: ...

    @property
    def top_logprobs(self) -> list[tuple[int, float]] | None:
        """None unless logprobs were asked for."""

    @property
    def attention(self) -> Any: ...

    @property
    def positions(self) -> Any: ...

    @property
    def hidden(self) -> Any: ...

    @property
    def n_discarded(self) -> int:
        """Tokens of the slot that had been discarded before this row."""

    @property
    def end(self) -> EndEvent | None:
        """With the last token, unless an error follows it."""

    @property
    def written_at(self) -> int:
        """For tests: where the CPU's kernel wrote the first row; 0 without one."""

class PromptEvent:
    """Rows of the prompt, or its embedding."""

    @property
    def start(self) -> int: ...

    @property
    def n_rows(self) -> int: ...

    @property
    def attention(self) -> Any: ...

    @property
    def positions(self) -> Any: ...

    @property
    def embedding(self) -> Any:
        """The caller's own."""

    @property
    def written_at(self) -> int:
        """As of a TokenEvent."""

class WaitEvent:
    """Nothing is there yet."""

    @property
    def holders(self) -> list[int]:
        """
        Ids of the generations that have every slot and wait for their consumers; empty unless that is news.
        """

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

    def next(self, wait_s: float | None = None, goes_on: bool = False) -> TokenEvent | PromptEvent | EndEvent | WaitEvent:
        """
        Takes the next event; blocks, without the GIL. Raises what ended the request. WaitEvent after wait_s, and, while the request is queued, when every slot waits for its consumer: once unless the holders change; `goes_on` then waits on.
        """

    def try_next(self, goes_on: bool = False) -> TokenEvent | PromptEvent | EndEvent | WaitEvent:
        """As next(), without blocking."""

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

    def count_copied(self, n_bytes: int) -> None:
        """Whoever copies attention out of a view says so here."""

    @property
    def end(self) -> EndEvent | None:
        """None while it runs. Events before it may not be taken yet."""

class EngineOptions:
    """cpp/sched/engine.h says more."""

    def __init__(self) -> None: ...

    @property
    def n_ctx(self) -> int:
        """0: what the model was trained with."""

    @n_ctx.setter
    def n_ctx(self, arg: int, /) -> None: ...

    @property
    def n_slots(self) -> int: ...

    @n_slots.setter
    def n_slots(self, arg: int, /) -> None: ...

    @property
    def n_batch(self) -> int: ...

    @n_batch.setter
    def n_batch(self, arg: int, /) -> None: ...

    @property
    def n_ubatch(self) -> int: ...

    @n_ubatch.setter
    def n_ubatch(self, arg: int, /) -> None: ...

    @property
    def n_threads(self) -> int: ...

    @n_threads.setter
    def n_threads(self, arg: int, /) -> None: ...

    @property
    def flash_attn(self) -> bool | None:
        """None: llama.cpp decides."""

    @flash_attn.setter
    def flash_attn(self, arg: bool | None, /) -> None: ...

    @property
    def kv_type(self) -> str: ...

    @kv_type.setter
    def kv_type(self, arg: str, /) -> None: ...

    @property
    def swa_full(self) -> bool: ...

    @swa_full.setter
    def swa_full(self, arg: bool, /) -> None: ...

    @property
    def pooling(self) -> str:
        """"": what the model's file says."""

    @pooling.setter
    def pooling(self, arg: str, /) -> None: ...

    @property
    def host_memory_bytes(self) -> int: ...

    @host_memory_bytes.setter
    def host_memory_bytes(self, arg: int, /) -> None: ...

    @property
    def attention_budget_bytes(self) -> int: ...

    @attention_budget_bytes.setter
    def attention_budget_bytes(self, arg: int, /) -> None: ...

    @property
    def aborted_decodes(self) -> list[int]:
        """For tests: decodes, counted from 1, that llama.cpp is made to abort."""

    @aborted_decodes.setter
    def aborted_decodes(self, arg: Sequence[int], /) -> None: ...

    @property
    def poisons_blocks(self) -> bool:
        """For tests: blocks of views that were given back are overwritten."""

    @poisons_blocks.setter
    def poisons_blocks(self, arg: bool, /) -> None: ...

class PoolStats:
    @property
    def budget_bytes(self) -> int: ...

    @property
    def allocated_bytes(self) -> int: ...

    @property
    def leased_bytes(self) -> int: ...

    @property
    def peak_leased_bytes(self) -> int: ...

    @property
    def pinned_bytes(self) -> int: ...

    @property
    def n_leased(self) -> int: ...

    @property
    def n_blocks(self) -> int: ...

    @property
    def n_allocations(self) -> int: ...

    @property
    def n_reused(self) -> int: ...

    @property
    def plain_fallbacks(self) -> int: ...

class SlotStats:
    @property
    def state(self) -> str: ...

    @property
    def n_tokens(self) -> int: ...

    @property
    def generation(self) -> int:
        """Id of the one that works in it, 0: none."""

class EngineStats:
    @property
    def uptime_s(self) -> float: ...

    @property
    def n_requests(self) -> int: ...

    @property
    def n_finished(self) -> int: ...

    @property
    def n_cancelled(self) -> int: ...

    @property
    def n_failed(self) -> int: ...

    @property
    def n_refused(self) -> int: ...

    @property
    def n_tokens(self) -> int: ...

    @property
    def n_decodes(self) -> int: ...

    @property
    def prefill_tokens(self) -> int: ...

    @property
    def prefill_s(self) -> float: ...

    @property
    def decode_tokens(self) -> int: ...

    @property
    def decode_s(self) -> float: ...

    @property
    def graph_builds(self) -> int: ...

    @property
    def graph_reuses(self) -> int: ...

    @property
    def graph_nodes_added(self) -> int: ...

    @property
    def n_queued(self) -> int: ...

    @property
    def attention_bytes(self) -> int: ...

    @property
    def copied_bytes(self) -> int: ...

    @property
    def dropped_rows(self) -> int: ...

    @property
    def captured_steps(self) -> int: ...

    @property
    def step_to_view_s(self) -> float: ...

    @property
    def device_copies(self) -> int: ...

    @property
    def device_copy_bytes(self) -> int: ...

    @property
    def device_copy_s(self) -> float: ...

    @property
    def slots(self) -> list[SlotStats]: ...

    @property
    def pool(self) -> PoolStats: ...

class EngineHealth:
    @property
    def phase(self) -> str: ...

    @property
    def quiet_s(self) -> float: ...

    @property
    def n_steps(self) -> int: ...

    @property
    def is_lost(self) -> bool: ...

class AttentionLayer:
    @property
    def layer(self) -> int: ...

    @property
    def n_head(self) -> int: ...

    @property
    def n_head_kv(self) -> int: ...

    @property
    def scale(self) -> float: ...

class Engine:
    @staticmethod
    def open(model: Model, options: EngineOptions) -> Engine:
        """Creates the context and starts the engine thread."""

    @property
    def n_ctx(self) -> int: ...

    @property
    def n_chunk(self) -> int:
        """Most prompt tokens of one step."""

    @property
    def n_slots(self) -> int: ...

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """The layers with attention, ascending."""

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
        """Values of the model's classifier head; 0: it has none."""

    @property
    def n_positions(self) -> int:
        """Positions that the model learned; 0: it has no such limit."""

    @property
    def shift_obstacle(self) -> str:
        """What keeps the cache's positions from being moved; empty: nothing."""

    def submit(self, options: RequestOptions) -> Generation:
        """Queues a request."""

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

    def health(self) -> EngineHealth:
        """What the engine thread does; takes no lock."""

    def stats(self) -> EngineStats:
        """Counters since the engine was opened."""

    def await_copies(self, wanted: bool) -> None:
        """
        For benchmarks: whether a step ends only when its rows have left their devices.
        """

    def pool_contains(self, address: int) -> bool:
        """For tests: does the address lie in a block of the pool?"""

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
