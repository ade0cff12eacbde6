"""Requests: hands prompts to the engine thread and knows the generations that came of them."""

import asyncio
import weakref
from collections.abc import Callable

from kqview import _core
from kqview.capture_plan import to_plan, to_policy
from kqview.constraints import llguidance_library
from kqview.errors import PromptTooLong, RequestError, shown
from kqview.generation.astream import LoopWaker
from kqview.generation.stream import Generation
from kqview.generation.turns import Turns
from kqview.request_options import NO_SHIFT, ShiftOptions, checked_ids, to_core, whole_number
from kqview.types import Capture, ModelInfo, Sampling


class Requests:
    """The requests of one engine; any thread."""

    def __init__(
        self,
        core: _core.Engine,
        model: _core.Model,
        info: ModelInfo,
        *,
        run_ahead: int,
        has_all_columns: bool,
        token_bytes: Callable[[int], bytes],
        on_end: Callable[[], None],
    ) -> None:
        self._core = core
        self._model = model
        self._info = info
        self._run_ahead = run_ahead
        self._has_all_columns = has_all_columns
        self._token_bytes = token_bytes
        self._on_end = on_end
        self._turns = Turns()
        self._wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = (
            weakref.WeakKeyDictionary()
        )

    def check_prompt(self, who: str, ids: list[int], *, embeds: bool = False) -> None:
        """Refuse a prompt that is empty, too long or has ids that the vocabulary has not."""
        if not ids:
            raise RequestError(f"{who}: the prompt has no tokens, at least 1 is needed")
        n_ctx, n_chunk = self._core.n_ctx, self._core.n_chunk
        if len(ids) > n_ctx:
            is_final = n_ctx == self._core.n_positions
            raise PromptTooLong(
                f"{who}: the prompt has {len(ids)} tokens, "
                + (
                    f"the model knows {n_ctx} positions; shorten it"
                    if is_final
                    else f"a slot holds {n_ctx}; raise n_ctx or shorten the prompt"
                )
            )
        is_one_step = not self._core.has_cache or (embeds and not self._core.can_split_embedding)
        if is_one_step and len(ids) > n_chunk:
            what = "an embedding takes" if embeds else f"{self._info.architecture} models take"
            raise PromptTooLong(
                f"{who}: the prompt has {len(ids)} tokens, {what} it in one step, which holds "
                f"{n_chunk}; raise n_ubatch and n_batch, or shorten the prompt"
            )
        self._model.check_tokens(ids, who)

    def submit(
        self,
        who: str,
        ids: list[int],
        sampling: Sampling,
        capture: Capture | None,
        *,
        max_tokens: int,
        shift: ShiftOptions = NO_SHIFT,
        n_prompt_rows: int = 0,
        only_attends: bool = False,
        embeds: bool = False,
        slot: int | None = None,
        request_id: str | None,
        priority: int,
    ) -> Generation:
        """Queue a request whose arguments are well-formed; raises what the core refuses."""
        if request_id is not None and not isinstance(request_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(f"{who}: request_id is {shown(request_id)}, a str is needed")
        handle = self._core.submit(
            prompt=ids,
            sampling=to_core(sampling),
            max_tokens=max_tokens,
            stop_tokens=checked_ids(who, sampling.stop_tokens),
            capture=to_plan(self._core, capture, self._has_all_columns) if capture else None,
            on_full=to_policy(capture),
            wait_s=capture.wait_s if capture else 0.0,
            run_ahead=self._run_ahead,
            priority=whole_number(who, "priority", priority, low=-(2**31)),
            n_prompt_rows=n_prompt_rows,
            only_attends=only_attends,
            embeds=embeds,
            slot=-1 if slot is None else slot,
            constraint_library=llguidance_library(sampling),
            **shift,
        )
        return Generation(
            handle,
            request_id=request_id or f"{who}-{handle.id}",
            n_prompt=len(ids),
            n_keep=shift["n_keep"],
            capture=capture.resolved(self._info) if capture else None,
            stop=tuple(sampling.stop),
            token_bytes=self._token_bytes,
            waker=self._waker,
            on_end=self._on_end,
            turns=self._turns,
            count_copied=self._core.count_copied,
        )

    def name_of(self, core_id: int) -> str | None:
        """The ``request_id`` of a generation by the core's id; None once nobody holds it."""
        return self._turns.name_of(core_id)

    def _waker(self) -> LoopWaker:
        loop = asyncio.get_running_loop()
        waker = self._wakers.get(loop)
        if waker is None:
            waker = self._wakers[loop] = LoopWaker()
        return waker
