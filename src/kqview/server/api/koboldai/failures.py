"""Failures as the KoboldAI API tells them: bodies of replies, and events in place of the end."""

from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType

from kqview.errors import InvalidToken, OutOfMemory, PoolExhausted, PromptTooLong
from kqview.server.api.koboldai.request import KoboldFields
from kqview.server.errors import Answer, TooLarge, answer_of
from kqview.server.models.model_entry import ModelEntry
from kqview.server.models.run import Run
from kqview.server.web.described import about

_MIB: Final = 2**20
_KINDS: Final = {
    401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "not_found",
    429: "service_unavailable", 503: "service_unavailable", 504: "service_unavailable",
}  # fmt: skip


class ReplyTooLarge(TooLarge):
    """A reply that is not streamed would be too large; ask for less, or use the WebSocket."""

    def __init__(self, message: str, **figures: int) -> None:
        """Args: ``reply_bytes``, ``limit_bytes``, ``prompt_tokens``."""
        super().__init__(message)
        self.figures = figures


class FailureDetail(Struct, kw_only=True):
    """A failure in KoboldCpp's words."""

    error: Annotated[
        str | UnsetType,
        about("Name of the status; absent in replies of ``/api/v1/generate``.", "Bad Request"),
    ] = UNSET
    msg: Annotated[str, about("What was wrong, what the limit is and what to do.", "top_p is 2")]
    type: Annotated[str, about("Kind of the failure.", "bad_input")]


class KoboldFailure(Struct, kw_only=True):
    """What went wrong, with the numbers that belong to it."""

    type: Annotated[
        Literal["error"] | UnsetType,
        about('In events, and in all of the dream dialect: always "error".'),
    ] = UNSET
    request_id: Annotated[
        str | UnsetType, about("In events: name of the request, if it is known.", "r1")
    ] = UNSET
    error: Annotated[
        str,
        about(
            "What was wrong, what the limit is and what to do.",
            "the model was switched; send the request again",
        ),
    ]
    error_code: Annotated[str, about("Kind of the failure for programs.", "MODEL_CHANGED")]
    detail: Annotated[
        FailureDetail | UnsetType,
        about("The same as KoboldCpp says it, where its clients may read it."),
    ] = UNSET
    context_length: Annotated[
        int | UnsetType,
        about(
            "Longest prompt in tokens, of a prompt that is too long and where memory was short.",
            2048,
        ),
    ] = UNSET
    prompt_tokens: Annotated[
        int | UnsetType, about("Tokens of the prompt, if they were counted.", 3000)
    ] = UNSET
    vocab_size: Annotated[
        int | UnsetType, about("Tokens of the vocabulary, of ids that are not in it.", 1024)
    ] = UNSET
    reply_bytes: Annotated[
        int | UnsetType, about("Bytes that the reply may have, if that is too much.", 300000000)
    ] = UNSET
    limit_bytes: Annotated[int | UnsetType, about("The most that it may have.", 268435456)] = UNSET
    attention_used_mb: Annotated[
        int | UnsetType, about("MiB of attention that is held, where memory was short.", 900)
    ] = UNSET
    attention_budget_mb: Annotated[int | UnsetType, about("The most that may be held.", 1024)] = (
        UNSET
    )
    vram_used_mb: Annotated[
        int | UnsetType, about("MiB that all GPUs have in use, where memory was short.", 9000)
    ] = UNSET
    vram_total_mb: Annotated[int | UnsetType, about("MiB that they have.", 24000)] = UNSET


class CountFailure(KoboldFailure, kw_only=True):
    """Why tokens were not counted."""

    value: Annotated[int, about("Always -1.", -1)] = -1


class TextFailure(KoboldFailure, kw_only=True):
    """Why ids were not turned into text."""

    result: Annotated[str, about('Always "".', "")] = ""
    success: Annotated[bool, about("Always false.")] = False


def error_body(answer: Answer, request_id: str | None = None) -> KoboldFailure:
    """A failure in the dream dialect; as an event it names the request if that is known."""
    return KoboldFailure(
        type="error",
        request_id=UNSET if request_id is None else request_id,
        error=answer.message,
        error_code=answer.code,
        **answer.figures,
    )


def generate_error_body(answer: Answer) -> KoboldFailure:
    """`error_body` where KoboldAI's clients read ``detail`` as well."""
    kind = "server_error" if answer.status >= 500 else "bad_input"
    if answer.retry_after_s is not None:
        kind = "service_unavailable"
    body = error_body(answer)
    body.detail = FailureDetail(msg=answer.message, type=kind)
    return body


def kobold_error_body(
    answer: Answer, run: Run | None = None, kind: type[KoboldFailure] = KoboldFailure
) -> KoboldFailure:
    """A failure as the forks tell it, and as KoboldCpp does; the event of *run* if it is given."""
    by_status = "server_error" if answer.status >= 500 else "bad_input"
    detail = FailureDetail(
        error=HTTPStatus(answer.status).phrase,
        msg=answer.message,
        type=_KINDS.get(answer.status, by_status),
    )
    named: Any = {} if run is None else {"type": "error", "request_id": run.label}
    return kind(
        error=answer.message, error_code=answer.code, detail=detail, **named, **answer.figures
    )


def answer_for(
    model: ModelEntry | None,
    error: BaseException,
    body: KoboldFields | None = None,
    *,
    n_prompt: int | None = None,
) -> Answer:
    """What to tell the client about *error*, with the numbers that belong to it.

    ``context_length`` is the longest prompt allowed, as in ``/api/v1/model/info`` unless the
    request said less.

    Args:
        error: What went wrong.
        model: Whose limits and memory they are; None if the request has none.
        body: The request, None if it could not be read.
        n_prompt: Tokens of its prompt; None counts its ``input_ids``, if there are any.
    """
    engine = None if model is None or model.is_closing else model.loaded
    if model is None or engine is None:
        return answer_of(error)
    figures: dict[str, int] = {}
    if isinstance(error, PromptTooLong | PoolExhausted | OutOfMemory):
        figures["context_length"] = model.max_context_of(engine)
        if body is not None:
            figures["context_length"] = min(
                figures["context_length"], body.max_context_length or figures["context_length"]
            )
            if n_prompt is None and body.input_ids is not None:
                n_prompt = len(body.input_ids)
        if n_prompt is not None:
            figures["prompt_tokens"] = n_prompt
        if isinstance(error, PromptTooLong):
            figures["context_length"] = error.n_max or figures["context_length"]
        else:
            pool = engine.stats().pool
            figures["attention_used_mb"] = pool.leased_bytes // _MIB
            figures["attention_budget_mb"] = pool.budget_bytes // _MIB
            devices = engine.system_info()["devices"]
            gpus = [device for device in devices if device["type"] in ("GPU", "IGPU")]
            if gpus:
                total = sum(device["memory_total_bytes"] for device in gpus)
                free = sum(device["memory_free_bytes"] for device in gpus)
                figures["vram_used_mb"] = (total - free) // _MIB
                figures["vram_total_mb"] = total // _MIB
    elif isinstance(error, InvalidToken):
        figures["vocab_size"] = engine.model.n_vocab
    elif isinstance(error, ReplyTooLarge):
        figures |= error.figures
    return answer_of(error, **figures)
