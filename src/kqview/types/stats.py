"""Counters and times: Usage of one generation; EngineStats, SlotStats, PoolStats, EngineHealth."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self, TypeVar

_Numbers = TypeVar("_Numbers")


def read_fields(cls: type[_Numbers], source: object, **others: object) -> _Numbers:
    """A *cls* whose fields are the attributes of *source* of the same names, but for *others*."""
    names = [field.name for field in fields(cls) if field.name not in others]  # pyright: ignore[reportArgumentType]
    return cls(**{name: getattr(source, name) for name in names}, **others)


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
class EngineHealth:
    """What an engine's thread does at one moment.

    Attributes:
        phase: "waiting" for something to do; "ordering", "admitting", "filling", "decoding",
            "sampling"; "closing", "ended".
        quiet_s: Seconds since its last sign of life: the begin of the phase, each token, and while
            a CPU computes each operation of the model's graph, so that neither a long prompt nor a
            slow machine makes it long. A step of a GPU or an RPC server is one sign.
        n_steps: Steps begun since the engine was opened.
        is_lost: `Engine.close` gave the thread up, because it hung.
    """

    phase: str
    quiet_s: float
    n_steps: int
    is_lost: bool

    def stall(self, timeout_s: float) -> str | None:
        """What is wrong with the thread, None where nothing is.

        Args:
            timeout_s: Longest time without a sign of life while there is something to do.
        """
        if self.is_lost:
            return "the engine thread hangs and was given up"
        if self.phase in ("waiting", "ended") or self.quiet_s <= timeout_s:
            return None
        return (
            f"the engine thread gave no sign of life for {self.quiet_s:.1f} s in the phase "
            f"{self.phase!r} of step {self.n_steps}, the limit is {timeout_s:g} s"
        )


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
class SlotStats:
    """What one slot does at the moment of the reading.

    Attributes:
        id: Index in ``engine.slots``.
        state: "idle"; "prefill", evaluating a prompt; "decode", generating; "sampling", its next
            token is being chosen under a grammar or schema; "paused", its consumer is behind;
            "starved", the attention memory has no room for its next row.
        n_tokens: Ids in its KV cache.
        request_id: Whose generation works in it. None for an idle slot, and for a generation that
            was dropped and is about to end.
    """

    id: int = 0
    state: str = "idle"
    n_tokens: int = 0
    request_id: str | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a generation works in this slot."""
        return self.state != "idle"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of one engine since it was opened, and what it does at the moment of the reading.

    Counters and seconds only grow; `since` makes an interval of two readings. Steps evaluate either
    a piece of one prompt or the next token of several slots: `prefill_s` and `decode_s` are the
    seconds that the engine spent in either kind, so tokens by seconds are the speed while it
    worked, whatever the time between requests.

    Attributes:
        uptime_s: Seconds since the engine was opened.
        n_requests: Generations admitted to a slot.
        n_finished: Those that ended by themselves.
        n_cancelled: Generations that their consumer ended, by a stop string too, or dropped.
        n_failed: Generations that ended with an error.
        n_refused: Calls that raised QueueFull.
        n_tokens: Tokens generated.
        n_decodes: Calls of llama.cpp's decode.
        prefill_tokens: Prompt tokens evaluated, cached ones not counted.
        prefill_s: Seconds in steps that evaluated prompts, sampling the first tokens included.
        decode_tokens: Tokens evaluated one a slot, to generate the next one.
        decode_s: Seconds in these steps, sampling included.
        graph_builds: Compute graphs built.
        graph_reuses: Decodes that ran on a graph built before.
        graph_nodes_added: Nodes that capture added to the newest graph; 0 without capture.
        n_queued: Generations that wait for a slot now.
        attention_bytes: Bytes of attention handed out.
        copied_bytes: Bytes of attention that Python code of kqview copied.
        dropped_rows: Tokens that came without attention because of ``on_full="drop"``.
        captured_steps: Steps that handed attention out; without those of a prompt that left it on a
            device and sampled nothing, whose end is not known.
        step_to_view_s: Seconds of these steps from when the engine knew that the compute had ended
            to when the last row was handed out: sampling, and for rows of a device the copy, during
            which the next step is started.
        device_copies: Copies of attention from a device to the host; rows that lie at one distance
            are one copy.
        device_copy_bytes: Bytes that these copies brought.
        device_copy_s: Seconds from when the engine knew that a step's rows could leave the device
            to when it knew that they had arrived, of several devices each its own. It looks when
            it needs the rows, after the next step was started: an upper bound of the copies' time.
        slots: What each slot does now.
        pool: State of the attention memory now.
    """

    uptime_s: float = 0.0
    n_requests: int = 0
    n_finished: int = 0
    n_cancelled: int = 0
    n_failed: int = 0
    n_refused: int = 0
    n_tokens: int = 0
    n_decodes: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    graph_builds: int = 0
    graph_reuses: int = 0
    graph_nodes_added: int = 0
    n_queued: int = 0
    attention_bytes: int = 0
    copied_bytes: int = 0
    dropped_rows: int = 0
    captured_steps: int = 0
    step_to_view_s: float = 0.0
    device_copies: int = 0
    device_copy_bytes: int = 0
    device_copy_s: float = 0.0
    slots: tuple[SlotStats, ...] = ()
    pool: PoolStats = PoolStats()

    @classmethod
    def of(cls, now: Any, name_of: Callable[[int], str | None]) -> Self:
        """The counters of the core; *name_of* gives the ``request_id`` of a core's id."""
        slots = tuple(
            SlotStats(i, slot.state, slot.n_tokens, name_of(slot.generation))
            for i, slot in enumerate(now.slots)
        )
        return read_fields(cls, now, slots=slots, pool=read_fields(PoolStats, now.pool))

    @property
    def tokens_per_s(self) -> float:
        """Speed of generating, all slots together, while the engine generated; 0.0 before."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Speed of evaluating prompts while the engine did that; 0.0 before."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def busy_s(self) -> float:
        """Seconds that the engine worked; by `uptime_s` it is the load."""
        return self.prefill_s + self.decode_s

    @property
    def step_to_view_mean_s(self) -> float:
        """Seconds from the end of a step's compute to its views, on average; 0.0 before any."""
        return self.step_to_view_s / self.captured_steps if self.captured_steps > 0 else 0.0

    @property
    def device_copy_bytes_per_s(self) -> float:
        """Rate of the copies from devices, at least; 0.0 before any."""
        return self.device_copy_bytes / self.device_copy_s if self.device_copy_s > 0 else 0.0

    def since(self, earlier: "EngineStats") -> Self:
        """What came about after the reading *earlier*.

        Counters and seconds become differences, so rates are those of the interval; what is of the
        moment (`n_queued`, `graph_nodes_added`, `slots`, `pool`) stays as it is here.
        """
        grown: dict[str, Any] = {
            field.name: getattr(self, field.name) - getattr(earlier, field.name)
            for field in fields(self)
            if field.name not in _OF_THE_MOMENT
        }
        return replace(self, **grown)


_OF_THE_MOMENT: Final = frozenset({"n_queued", "graph_nodes_added", "slots", "pool"})
