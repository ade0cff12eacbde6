"""Counters and times: Usage of one generation, EngineStats and PoolStats of one engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """What one generation cost.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Those of them that were already in a KV cache, those kept by a shift
            included; the others were evaluated.
        completion_tokens: Tokens that were generated.
        prefill_s: Seconds from the start of the prompt's evaluation to the first token.
        decode_s: Seconds from the first token to the last.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Rate of decoding; the first token counts as prefill. 0.0 below two tokens."""
        n_decoded = self.completion_tokens - 1
        return n_decoded / self.decode_s if n_decoded > 0 and self.decode_s > 0 else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Rate of evaluating the prompt tokens that were not cached; 0.0 where none was."""
        n_evaluated = self.prompt_tokens - self.cached_tokens
        return n_evaluated / self.prefill_s if n_evaluated > 0 and self.prefill_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The memory that attention views lie in.

    Attributes:
        budget_bytes: Most that the pool may allocate.
        allocated_bytes: Allocated now, leased or waiting for reuse.
        leased_bytes: Held by live views now.
        n_leased: Blocks held by live views now.
        n_blocks: Blocks allocated now.
        pinned_bytes: Part of allocated_bytes that is page-locked.
        plain_fallbacks: Blocks that were to be page-locked and became plain memory.
        n_allocations: Blocks allocated since the start.
        n_reused: Leases that were served by a block used before.
        peak_leased_bytes: Largest leased_bytes since the start.
    """

    budget_bytes: int = 0
    allocated_bytes: int = 0
    leased_bytes: int = 0
    n_leased: int = 0
    n_blocks: int = 0
    pinned_bytes: int = 0
    plain_fallbacks: int = 0
    n_allocations: int = 0
    n_reused: int = 0
    peak_leased_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of one engine since its start; subtract two readings for an interval.

    Attributes:
        n_requests: Generations admitted.
        n_tokens: Tokens generated.
        n_decodes: Calls of llama.cpp's decode.
        prefill_tokens: Prompt tokens evaluated, cached ones not counted.
        graph_builds: Compute graphs built.
        graph_reuses: Decodes that ran on a graph built before.
        graph_nodes_added: Nodes that capture added to the newest graph; 0 without capture.
        n_queued: Generations that wait for a slot.
        attention_bytes: Bytes of attention handed out.
        copied_bytes: Bytes of attention that Python code of kqview copied.
        dropped_rows: Tokens that came without attention because of ``on_full="drop"``.
        pool: State of the attention memory at the moment of the reading.
    """

    n_requests: int = 0
    n_tokens: int = 0
    n_decodes: int = 0
    prefill_tokens: int = 0
    graph_builds: int = 0
    graph_reuses: int = 0
    graph_nodes_added: int = 0
    n_queued: int = 0
    attention_bytes: int = 0
    copied_bytes: int = 0
    dropped_rows: int = 0
    pool: PoolStats = PoolStats()
