"""Counters and times: Usage of a generation; EngineStats, SlotStats, PoolStats, EngineHealth."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, Self, TypeVar

_Numbers = TypeVar("_Numbers")


def read_fields(cls: type[_Numbers], source: object, **others: object) -> _Numbers:
    """A *cls* with the fields in *others*, and the rest read from attributes of *source*."""
    names = [field.name for field in fields(cls) if field.name not in others]  # pyright: ignore[reportArgumentType]
    return cls(**{name: getattr(source, name) for name in names}, **others)


FinishReason = Literal[
    "stop", "length", "stop_token", "stop_sequence", "tool_calls", "cancelled", "error"
]  # fmt: skip
SlotState = Literal["idle", "prefill", "decode", "sampling", "steered", "paused", "starved"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What one generation cost.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Prompt tokens that were already in a KV cache, including those kept by a
            shift; the others were evaluated.
        completion_tokens: Tokens generated.
        draft_tokens: Tokens that were guessed (``Engine(draft=...)``), at the end of a generation.
        accepted_tokens: Those of them that the model then chose itself.
        prefill_s: Seconds from the start of evaluating the prompt to the first token.
        decode_s: Seconds from the first token to the last.
        queue_s: Seconds that it waited for a slot.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    queue_s: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Decoding rate; the first token counts as prefill. 0.0 with fewer than two tokens."""
        n_decoded = self.completion_tokens - 1
        return n_decoded / self.decode_s if n_decoded > 0 and self.decode_s > 0 else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Rate of evaluating the prompt tokens that were not cached; 0.0 if all were."""
        n_evaluated = self.prompt_tokens - self.cached_tokens
        return n_evaluated / self.prefill_s if n_evaluated > 0 and self.prefill_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """What the engine thread is doing at one moment.

    Attributes:
        phase: "waiting" while idle; "ordering", "admitting", "filling", "decoding" or "sampling"
            while it works; "closing", then "ended".
        quiet_s: Seconds since the last sign of life. Signs are the start of a phase, each token
            and, on a CPU, each operation of the model's graph; so neither a long prompt nor a slow
            machine makes it large. A step on a GPU or an RPC server is a single sign.
        n_steps: Steps started since the engine was opened.
        is_lost: Whether `Engine.close` abandoned the thread because it hung.
    """

    phase: str
    quiet_s: float
    n_steps: int
    is_lost: bool

    def stall(self, timeout_s: float) -> str | None:
        """What is wrong with the engine thread; None if nothing is.

        Args:
            timeout_s: Maximum time in seconds without a sign of life while there is work to do.
        """
        if self.is_lost:
            return "the engine thread hung and was abandoned"
        if self.phase in ("waiting", "ended") or self.quiet_s <= timeout_s:
            return None
        return (
            f"the engine thread gave no sign of life for {self.quiet_s:.1f} s in the phase "
            f"{self.phase!r} of step {self.n_steps}, the limit is {timeout_s:g} s"
        )


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The memory that holds attention views.

    Attributes:
        budget_bytes: Maximum that the pool may allocate.
        allocated_bytes: Bytes allocated at the moment, leased or waiting for reuse.
        leased_bytes: Bytes held by live views at the moment.
        n_leased: Blocks held by live views at the moment.
        n_blocks: Blocks allocated at the moment.
        pinned_bytes: Part of allocated_bytes that is page-locked.
        plain_fallbacks: Blocks that should have been page-locked but are plain memory.
        n_allocations: Blocks allocated since the start.
        n_reused: Leases served by a block that was used before.
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
    """What one slot was doing at the moment of the reading.

    Attributes:
        id: Index in ``engine.slots``.
        state: "idle"; "prefill", evaluating a prompt; "decode", generating; "sampling", choosing
            the next token under a grammar or schema; "paused", waiting for its consumer to catch
            up; "steered", waiting for a mod or callable of its request; "starved", waiting for
            attention memory for its next row.
        n_tokens: Ids in its KV cache.
        request_id: The generation that uses the slot. None for an idle slot, and for a generation
            that was dropped and is about to end.
    """

    id: int = 0
    state: SlotState = "idle"
    n_tokens: int = 0
    request_id: str | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a generation uses this slot."""
        return self.state != "idle"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine was opened, and its state at the moment of the reading.

    Counters and seconds only grow; `since` computes the difference between two readings. A step
    evaluates either a part of one prompt or the next token of several slots. `prefill_s` and
    `decode_s` are the seconds spent in each kind of step, so tokens divided by seconds is the speed
    while the engine worked, regardless of idle time between requests.

    Attributes:
        uptime_s: Seconds since the engine was opened.
        n_requests: Generations that were given a slot.
        n_finished: Generations that ended on their own.
        n_cancelled: Generations that their consumer ended or dropped, including by a stop string.
        n_failed: Generations that ended with an error.
        n_refused: Calls that raised QueueFull.
        n_tokens: Tokens generated.
        n_decodes: Calls of llama.cpp's decode.
        prefill_tokens: Prompt tokens evaluated, without cached ones.
        prefill_s: Seconds in steps that evaluated prompts, including sampling of the first tokens.
        decode_tokens: Tokens evaluated to generate the next one: one per slot and step, and guesses
            that came true.
        decode_s: Seconds in these steps, including sampling.
        n_drafts: Times that a step had guesses of a text.
        draft_tokens: Tokens that were guessed (``Engine(draft=...)``).
        accepted_tokens: Those of them that the model then chose itself.
        draft_ties: Tokens that were evaluated once more without guesses, because their step's
            rounding might have chosen between two equally likely ones.
        graph_builds: Compute graphs built.
        graph_reuses: Decodes that ran on an existing graph.
        graph_nodes_added: Nodes that capture added to the newest graph; 0 without capture.
        attended_layers: Layers whose attention kqview computes, see ``attention_kernel`` of Engine.
        n_queued: Generations waiting for their first slot at the moment.
        n_parked: Generations parked at the moment: another one got their slot, because their
            consumer was behind, and they go on in any slot once it has caught up.
        n_parkings: Times that a generation was parked.
        attention_bytes: Bytes of attention handed out.
        copied_bytes: Bytes of attention copied by kqview's Python code.
        dropped_rows: Tokens that came without attention because of ``on_full="drop"``.
        captured_steps: Steps that handed out attention. Excludes steps of a prompt that left their
            rows on a device and sampled nothing, because the end of their compute is unknown.
        step_to_view_s: Seconds of these steps from when the engine knew that the compute had ended
            until the last row was handed out. Includes sampling and, for rows on a device, the
            copy, during which the next step is started.
        device_copies: Copies of attention from a device to the host; rows at equal distances are
            copied together and count as one.
        device_copy_bytes: Bytes moved by these copies.
        device_copy_s: Seconds from when the engine knew that the rows of a step could leave the
            device until it knew that they had arrived, counted for each device. An upper bound for
            the time of the copies, because the engine checks only when it needs the rows, after
            starting the next step.
        device_kernel_rows: Rows of devices that kqview's own kernel has computed, not ggml's nodes.
        device_row_bytes: Memory that devices hold at the moment for rows on their way to the host.
        slots: State of each slot at the moment.
        pool: State of the attention memory at the moment.
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
    n_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    draft_ties: int = 0
    graph_builds: int = 0
    graph_reuses: int = 0
    graph_nodes_added: int = 0
    attended_layers: int = 0
    n_queued: int = 0
    n_parked: int = 0
    n_parkings: int = 0
    attention_bytes: int = 0
    copied_bytes: int = 0
    dropped_rows: int = 0
    captured_steps: int = 0
    step_to_view_s: float = 0.0
    device_copies: int = 0
    device_copy_bytes: int = 0
    device_copy_s: float = 0.0
    device_kernel_rows: int = 0
    device_row_bytes: int = 0
    slots: tuple[SlotStats, ...] = ()
    pool: PoolStats = PoolStats()

    @classmethod
    def of(cls, now: Any, name_of: Callable[[int], str | None]) -> Self:
        """Build from the core's counters; *name_of* maps a core id to its ``request_id``."""
        slots = tuple(
            SlotStats(i, slot.state, slot.n_tokens, name_of(slot.generation))
            for i, slot in enumerate(now.slots)
        )
        return read_fields(cls, now, slots=slots, pool=read_fields(PoolStats, now.pool))

    @property
    def tokens_per_s(self) -> float:
        """Generation speed of all slots together while the engine generated; 0.0 before that."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt evaluation speed while the engine evaluated prompts; 0.0 before that."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def busy_s(self) -> float:
        """Seconds that the engine worked; divide by `uptime_s` for the load."""
        return self.prefill_s + self.decode_s

    @property
    def step_to_view_mean_s(self) -> float:
        """Mean seconds from the end of a step's compute to its views; 0.0 before any."""
        return self.step_to_view_s / self.captured_steps if self.captured_steps > 0 else 0.0

    @property
    def device_copy_bytes_per_s(self) -> float:
        """Lower bound of the rate of copies from devices; 0.0 before any."""
        return self.device_copy_bytes / self.device_copy_s if self.device_copy_s > 0 else 0.0

    def since(self, earlier: "EngineStats") -> Self:
        """The change since the reading *earlier*.

        Counters and seconds become differences, so rates are those of the interval. Values of the
        moment (`n_queued`, `n_parked`, `graph_nodes_added`, `attended_layers`, `device_row_bytes`,
        `slots`, `pool`) are those of this reading.
        """
        grown: dict[str, Any] = {
            field.name: getattr(self, field.name) - getattr(earlier, field.name)
            for field in fields(self)
            if field.name not in _OF_THE_MOMENT
        }
        return replace(self, **grown)


_OF_THE_MOMENT: Final = frozenset(
    {
        *("n_queued", "n_parked", "graph_nodes_added", "attended_layers", "device_row_bytes"),
        *("slots", "pool"),
    }
)
