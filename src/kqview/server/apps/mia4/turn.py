"""Turn: one request from its admission to its end, as frames for the client and events for the bus.

Pure: whoever streams it takes its steps from the run, sends the frames and closes it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kqview.server.api.wire.attention_field import AttentionWriter
from kqview.server.apps.mia4 import frames
from kqview.server.apps.mia4.convert import Plan
from kqview.server.apps.mia4.frames import Writer
from kqview.server.errors import Answer
from kqview.server.models.events_bus import (
    GenerationCompleted,
    GenerationStarted,
    ReasoningPresetApplied,
)
from kqview.server.models.run import Removal, Run, Step

Store = Callable[[str], Awaitable[None]]

_TOKEN_BYTES: Final = 128  # of a token's text in a list


@dataclass(frozen=True, slots=True)
class Named:
    """What a request belongs to."""

    request_id: str
    model_id: str
    session_id: str | None


class Turn:
    """A request that was admitted."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        named: Named,
        attention: AttentionWriter | None,
        publish: Callable[[msgspec.Struct], None],
        store: Store | None,
        n_left_out: int = 0,
        hidden: set[int] | None = None,
    ) -> None:
        """Begin to write *run*, which is what *plan* asks for, and publish so.

        Args:
            run: The run.
            plan: What was asked for.
            named: Names in frames and events.
            attention: Keeps the rows, None without any.
            publish: Passes an event to whoever may see it.
            store: Appends an answer to its conversation, None without one.
            n_left_out: How many messages of the conversation are not in the prompt.
            hidden: As of `Writer`.
        """
        self.run = run
        self._plan = plan
        self._named = named
        self._attention = attention
        self._publish = publish
        self.store = store
        self._n_left_out = n_left_out
        self._is_finished = False
        self._writer = Writer(
            named.request_id,
            named.model_id,
            plan.reading,
            drops_reasoning=plan.drops_reasoning,
            has_attention=attention is not None,
            hidden=hidden,
        )
        self._publish_start()

    def _publish_start(self) -> None:
        plan, named = self._plan, self._named
        if plan.preset is not None:
            self._publish(
                ReasoningPresetApplied(
                    request_id=named.request_id,
                    model_id=named.model_id,
                    preset=plan.preset,
                    reasoning_max_tokens=plan.merged.reasoning_max_tokens,
                )
            )
        known: dict[str, Any] = {}
        for name, one in (("system_prompt", plan.system_prompt), ("app_persona", plan.persona)):
            if one is not None:
                known |= {f"{name}_hash": one.hash, f"{name}_version": one.version}
        self._publish(
            GenerationStarted(
                request_id=named.request_id,
                session_id=named.session_id,
                model_id=named.model_id,
                prompt_tokens=len(plan.ids),
                sampling=plan.merged.as_object(),
                sampling_origin=plan.merged.origin,
                passport_hash=plan.passport.hash,
                passport_version=plan.passport.version,
                **known,
            )
        )

    @property
    def answer(self) -> str:
        """The answer so far, without reasoning."""
        return self._writer.answer

    def n_bytes_of(self, step: Step | None = None) -> int:
        """About what is to be written at once: *step*, and tokens that wait for a mark."""
        n_tokens, n_bytes = self._writer.tokens.n_waiting, 0
        if step is not None:
            n_bytes = step.n_bytes
            n_tokens += 0 if step.removal is None else len(step.removal.texts)
        return n_bytes + _TOKEN_BYTES * n_tokens

    def token(self, step: Step) -> list[bytes]:
        """Frames of the next token; any thread, because its row may be large."""
        self.run.hold.take(_TOKEN_BYTES)
        sent = [] if step.removal is None else self._take_back(step.removal)
        sent += self._writer.token(step.token)
        if self._attention is not None:  # only then, so that `hidden` knows the token
            self._attention.token(self.run, step)
        return sent

    def _take_back(self, removal: Removal) -> list[bytes]:
        if self._attention is not None:
            self._attention.removed(self.run, removal)
        self._writer, sent = self._writer.take_back(removal)
        return sent

    def finish(self) -> list[bytes]:
        """Frames of what was held back, once no token comes any more; none if they were given."""
        if self._is_finished:
            return []
        self._is_finished = True
        sent = [one for removal in self.run.last_removals() for one in self._take_back(removal)]
        return sent + self._writer.finish(self.run.generations[0].text)

    def end(self, failure: Answer | None) -> list[bytes]:
        """The last frames, once the run is over; publishes the end. Call it once.

        Args:
            failure: What went wrong, None if nothing did.
        """
        named, run, writer = self._named, self.run, self._writer
        reason = "error" if failure is not None else frames.stop_reason_of(run.finish_reason)
        figures = frames.figures_of(run.usage, run.elapsed_s, writer.tokens)
        if self._n_left_out:
            figures["messages_left_out"] = self._n_left_out
        self._publish(
            GenerationCompleted(
                request_id=named.request_id,
                session_id=named.session_id,
                model_id=named.model_id,
                status="ok" if failure is None else "error",
                stop_reason=reason,
                code=None if failure is None else failure.code,
                result_summary={"sampling": self._plan.merged.as_object(), **figures},
                reasoning_buffer_latency_ms=writer.buffer_latency_ms,
            )
        )
        if failure is None:
            what = frames.usage(named.request_id, named.model_id, figures)
        else:
            what = writer.error(failure)
        return [what, frames.end(named.request_id, reason)]
