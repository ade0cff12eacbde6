"""Requests of the KoboldAI API as neutral ones, and what the engine knows as its replies. Pure."""

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec

from kqview.errors import RequestError
from kqview.server.api.attention_fields import (
    asks_for_logprobs,
    attention_of,
    first,
    max_tokens_of,
    prompt_of,
    sampling_of,
)
from kqview.server.api.kobold import schema
from kqview.server.errors import Answer
from kqview.server.run import GenerateRequest
from kqview.server.service import LastRun
from kqview.server.settings import AttentionValues, Settings
from kqview.types import EngineStats, ModelInfo

DEFAULT_VALUES: Final[AttentionValues] = "logits"
"""Values of rows where neither the request nor the server's settings say (seed 000)."""

_STOPS: Final = frozenset({"stop", "stop_token", "stop_sequence", "cancelled"})
_STOP_CODES: Final[Mapping[str, int]] = {
    "length": 0,
    "stop": 1,
    "stop_token": 2,
    "stop_sequence": 2,
}
_ERROR_TYPES: Final[Mapping[int, str]] = {
    401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "not_found",
    429: "service_unavailable", 503: "service_unavailable", 504: "service_unavailable",
}  # fmt: skip


# ---- requests


def with_query(body: schema.StreamBody, query: Mapping[str, str]) -> schema.StreamBody:
    """*body* with what the URL's query says of attention where *body* says nothing.

    Raises:
        RequestError: The query has a value that the field cannot have.
    """
    names = schema.QueryFields.__struct_fields__
    given = {name: query[name] for name in names if name in query}
    if not given:
        return body
    try:
        checked = msgspec.convert(given, schema.QueryFields)
    except msgspec.ValidationError as error:
        raise RequestError(f"request.query: {error}; correct the URL") from None
    missing = {name: getattr(checked, name) for name in given if getattr(body, name) is None}
    return msgspec.structs.replace(body, **missing)


def is_typed(body: schema.StreamBody) -> bool:
    """Whether the stream has typed events; else it is the one that KoboldAI's clients know."""
    return first(body.output_attentions, body.return_attention, body.request_id) is not None


def request_of(
    body: schema.StreamBody,
    settings: Settings,
    *,
    request_id: str,
    one_token: Callable[[str], int | None],
    asked: bool,
) -> GenerateRequest:
    """What *body* asks for.

    Args:
        body: The request.
        settings: For the server's defaults.
        request_id: Its name where it gives none.
        one_token: As in `sampling_of`.
        asked: Whether attention is sent where the request does not say.

    Raises:
        RequestError: Or one of its kinds: it cannot work.
    """
    if body.num_samples not in (None, 1):
        raise RequestError(
            f"request.num_samples: {body.num_samples}, a stream has 1; "
            "ask /api/v1/generate for several"
        )
    return GenerateRequest(
        prompt=prompt_of(body),
        max_tokens=max_tokens_of(body),
        sampling=sampling_of(body, one_token=one_token),
        request_id=body.request_id or request_id,
        attention=attention_of(body, settings, default=DEFAULT_VALUES, asked=asked),
        key=body.genkey or "",
        max_context=body.max_context_length,
        keeps_logprobs=asks_for_logprobs(body),
    )


def text_of(body: schema.TokenizeBody) -> str:
    """The text to tokenize.

    Raises:
        RequestError: There is none.
    """
    text = first(body.text, body.content)
    if text is None:
        raise RequestError("request.text: there is no text; send text")
    return text


def ids_of(body: schema.DetokenizeBody) -> list[int]:
    """The ids to turn into text.

    Raises:
        RequestError: There are none.
    """
    ids = first(body.token_ids, body.tokens)
    if ids is None:
        raise RequestError("request.token_ids: there are no ids; send token_ids")
    return ids


# ---- replies


def tokenized(pieces: Sequence[tuple[int, str]], *, with_pieces: bool) -> schema.Tokenized:
    """The reply to a request to tokenize, of ids with the text that each completes."""
    tokens = [
        schema.TokenText(id_, piece) if with_pieces else schema.TokenText(id_)
        for id_, piece in pieces
    ]
    return schema.Tokenized(tokens, [id_ for id_, _ in pieces], len(pieces))


def model_of(info: ModelInfo, *, name: str, max_context: int) -> schema.Model:
    """The model as clients want to know it; -1 stands for a token that it has not."""
    is_whole = info.attention_layers == tuple(range(info.n_layer))
    return schema.Model(
        result=shown_name(name),
        model_name=shown_name(name),
        vocab_size=info.n_vocab,
        num_layers=info.n_layer,
        num_attention_heads=info.n_head,
        num_key_value_heads=info.n_head_kv,
        embedding_size=info.n_embd,
        max_context_length=max_context,
        max_trained_context=info.n_ctx_train,
        bos_token_id=first(info.bos_token_id, -1),
        eos_token_id=first(info.eos_token_id, -1),
        eot_token_id=first(info.eot_token_id, -1),
        rope_freq_base=info.rope_freq_base,
        rope_freq_scale=info.rope_freq_scale,
        attention_layers=msgspec.UNSET if is_whole else info.attention_layers,
    )


def shown_name(name: str) -> str:
    """A model's name with the prefix by which clients know whose API this is."""
    return f"koboldcpp/{name}"


def finish_reason(reason: str) -> str:
    """ "stop" or "length": this protocol knows no other way to end well."""
    return "stop" if reason in _STOPS else "length"


def error_body(answer: Answer) -> dict[str, Any]:
    """A failure as the forks tell it, and as KoboldCpp does (``detail``)."""
    phrase = HTTPStatus(answer.status).phrase
    by_status = "server_error" if answer.status >= 500 else "bad_input"
    kind = _ERROR_TYPES.get(answer.status, by_status)
    return {
        "error": answer.message,
        "error_code": answer.code,
        "detail": {"error": phrase, "msg": answer.message, "type": kind},
        **answer.figures,
    }


def token_count_error(answer: Answer) -> dict[str, Any]:
    """A failure to count tokens."""
    return {"value": -1, **error_body(answer)}


def extra_detokenize_error(answer: Answer) -> dict[str, Any]:
    """A failure to turn ids into text."""
    return {"result": "", "success": False, **error_body(answer)}


def aborted(*, n_ended: int, is_known: bool) -> schema.Aborted:
    """The reply to an abort that ended *n_ended* generations; *is_known*: it was clear which."""
    return schema.Aborted(
        success="true" if n_ended else "false", done="true" if is_known else "false"
    )


def perf_of(
    last: LastRun,
    stats: EngineStats,
    *,
    n_runs: int,
    n_running: int,
    started_s: float,
    now_s: float,
) -> schema.Perf:
    """Figures of the last generation and of the server; times as ``time.monotonic`` gives them."""
    usage = last.usage
    n_evaluated = usage.prompt_tokens - usage.cached_tokens
    since_s = started_s if last.ended_s is None else last.ended_s
    return schema.Perf(
        last_process=1000 * _ratio(usage.prefill_s, n_evaluated),
        last_eval=1000 * _ratio(usage.decode_s, usage.completion_tokens - 1),
        last_token_count=usage.completion_tokens,
        last_input_count=usage.prompt_tokens,
        last_process_time=usage.prefill_s,
        last_eval_time=usage.decode_s,
        last_process_speed=usage.prefill_tokens_per_s,
        last_eval_speed=usage.tokens_per_s,
        last_seed=-1 if last.seed is None else last.seed,
        total_gens=n_runs,
        stop_reason=_STOP_CODES.get(last.finish_reason, -1),
        queue=stats.n_queued,
        idle=0 if n_running else 1,
        uptime=now_s - started_s,
        idletime=0.0 if n_running else now_s - since_s,
    )


def _ratio(total: float, n: int) -> float:
    return total / n if n > 0 else 0.0
