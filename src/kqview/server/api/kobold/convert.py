"""KoboldAI requests as neutral ones, and results as its replies and events. Pure.

Three streams: typed SSE events, KoboldAI's plain ones, and WebSocket frames. Their renderers keep
nothing but the text of a plain stream that may still turn out to be a stop sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec

from kqview.errors import RequestError
from kqview.server.api.kobold import schema
from kqview.server.api.wire.attention_protocol import (
    Object,
    RowFacts,
    asks_for_logprobs,
    attention_frame,
    attention_object,
    attention_of,
    check_ids_fit,
    details_of,
    event_pieces,
    first,
    left_out,
    max_tokens_of,
    names_of,
    phrases_of,
    prompt_of,
    sampling_for,
    start_event,
)
from kqview.server.api.wire.mods_field import mods_of, removed, tool_calls_of
from kqview.server.api.wire.rows import Dense, Encoder, Shaped, shaped
from kqview.server.errors import Answer
from kqview.server.models.request import GenerateRequest
from kqview.server.models.run import LastRun, Removal, Run, Step
from kqview.server.settings import AttentionValues, Settings
from kqview.server.web.endpoint import NEXT_EVENT
from kqview.stop_strings import ShownText
from kqview.types import EngineStats, ModelInfo, PromptBlock, Token
from kqview.types.token import Attention

DEFAULT_VALUES: Final[AttentionValues] = "logits"
"""Values of rows if neither the request nor the settings say, as Halo Weave expects."""

_STOPS: Final = frozenset({"stop", "stop_token", "stop_sequence", "cancelled", "tool_calls"})
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
    """*body*, with what the URL's query says about attention if *body* does not.

    Raises:
        RequestError: A value in the query is not one of the field.
    """
    names = schema.QueryFields.__struct_fields__
    given = {name: query[name] for name in names if name in query}
    if not given:
        return body
    try:
        checked = msgspec.convert(given, schema.QueryFields)
    except msgspec.ValidationError as error:
        raise RequestError(f"the URL's query cannot be read: {error}; correct it") from None
    missing = {name: getattr(checked, name) for name in given if getattr(body, name) is None}
    return msgspec.structs.replace(body, **missing)


def is_typed(body: schema.StreamBody) -> bool:
    """Whether the stream has typed events; if not, it is the one that KoboldAI's clients know."""
    asked = first(body.output_attentions, body.return_attention, body.request_id)
    return asked is not None or bool(body.start_event)


def request_of(
    body: schema.StreamBody,
    settings: Settings,
    *,
    request_id: str,
    max_context: int,
    control_token: Callable[[str], int | None],
    seed: int,
    asked: bool,
) -> GenerateRequest:
    """What *body* asks for.

    Args:
        body: The request.
        settings: For the server's defaults.
        request_id: Its name if it gives none.
        max_context: Longest prompt in tokens.
        control_token: As in `sampling_for`, like *seed*.
        seed: Of a request that gives none.
        asked: Whether attention is sent if the request does not say.

    Raises:
        RequestError: Or one of its kinds: it cannot work.
    """
    if body.num_samples not in (None, 1):
        raise RequestError(
            f"num_samples is {body.num_samples}, a stream has 1; ask /api/v1/generate for several"
        )
    prompt = prompt_of(body)
    if not isinstance(prompt, str):
        check_ids_fit(prompt, body, max_context)
    return GenerateRequest(
        prompt=prompt,
        truncates=True,
        memory=body.memory or "",
        max_tokens=max_tokens_of(body),
        sampling=sampling_for(body, control_token=control_token, seed=seed),
        banned_phrases=phrases_of(body, control_token=control_token),
        request_id=body.request_id or request_id,
        shares_name=True,
        attention=attention_of(body, settings, default=DEFAULT_VALUES, asked=asked),
        key=body.genkey or "",
        max_context=body.max_context_length,
        keeps_logprobs=asks_for_logprobs(body),
        names=names_of(body),
        mods=mods_of(body.mods),
    )


def text_of(body: schema.TokenizeBody) -> str:
    """The text to tokenize.

    Raises:
        RequestError: There is none.
    """
    text = first(body.text, body.content)
    if text is None:
        raise RequestError("text is missing; send text or content")
    return text


def ids_of(body: schema.DetokenizeBody) -> list[int]:
    """The ids to turn into text.

    Raises:
        RequestError: There are none.
    """
    ids = first(body.token_ids, body.tokens)
    if ids is None:
        raise RequestError("token_ids is missing; send token_ids or tokens")
    return ids


# ---- replies


def tokenized(pieces: Sequence[tuple[int, str]], *, with_pieces: bool) -> schema.Tokenized:
    """The reply to a request to tokenize, from ids with the text that each completes."""
    tokens = [
        schema.TokenText(id_, piece) if with_pieces else schema.TokenText(id_)
        for id_, piece in pieces
    ]
    return schema.Tokenized(tokens, [id_ for id_, _ in pieces], len(pieces))


def model_of(info: ModelInfo, *, name: str, max_context: int) -> schema.Model:
    """The model as clients want it; -1 stands for a token that it does not have."""
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
    """A model's name with the prefix by which clients recognise the API."""
    return f"koboldcpp/{name}"


def finish_reason(reason: str) -> str:
    """ "stop" or "length": this protocol knows no other good end."""
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


def _shaped(facts: RowFacts | None, rows: Attention | None) -> Shaped | None:
    return None if facts is None or rows is None else shaped(facts.wanted, rows)


class TypedEvents:
    """``type`` "token", "done", "error", and "prompt_attention" for its rows; base64 in JSON.

    Every id is an event; its text is "" inside a character of several ids. Stop sequences are
    included. If the model ends its text inside a character, "done" has the resulting U+FFFD as
    ``text``.
    """

    def __init__(
        self,
        facts: RowFacts | None,
        text_of: Callable[[int], str],
        ignored: Sequence[str] = (),
        *,
        has_start: bool = False,
    ) -> None:
        """Write rows as *facts* say.

        Args:
            facts: Of the rows, None for none.
            text_of: The text of an id, for logprobs.
            ignored: Names of fields without effect, which the reply tells.
            has_start: Whether an event "start" precedes the others.
        """
        self._facts = facts
        self._text_of = text_of
        self._ignored = ignored
        self._n_shown = 0
        self._has_start = has_start

    def prompt(self, run: Run, block: PromptBlock) -> list[bytes]:
        """Rows of the prompt's tokens from ``start`` on: an axis of rows before the columns."""
        return self._event(run, _prompt(block), _shaped(self._facts, block.rows))

    def token(self, run: Run, step: Step) -> list[bytes]:
        """One id with its row."""
        token = step.token
        self._n_shown += len(token.text)
        event = {"type": "token", "token": self._token(token)}
        return self._event(run, event, _shaped(self._facts, token.attention))

    def _token(self, token: Token) -> Object:
        fields: Object = {"token_id": token.id, "text": token.text}
        if token.logprob is not None:
            fields["logprob"] = token.logprob
            fields["top_logprobs"] = [
                {"token_id": id_, "text": self._text_of(id_), "logprob": logprob}
                for id_, logprob in token.top_logprobs or ()
            ]
        return fields

    def _event(self, run: Run, event: Object, rows: Shaped | None) -> list[bytes]:
        event["request_id"] = run.label
        if rows is None or self._facts is None:
            return [*self._start(run), *event_pieces({**event, "attention": None}, None)]
        attention, data = attention_object(rows, Encoder(run.count_copied), facts=self._facts)
        return [*self._start(run), *event_pieces({**event, "attention": attention}, data)]

    def _start(self, run: Run) -> list[bytes]:
        """The event that precedes the first one, if it is wanted and this is that."""
        if not self._has_start:
            return []
        self._has_start = False
        return [*event_pieces(start_event(run, self._facts, self._ignored), None), NEXT_EVENT]

    def removed(self, run: Run, removal: Removal) -> list[bytes]:
        """What a client is to drop: so many of the last ids and characters."""
        self._n_shown -= removal.n_characters
        return event_pieces({**_removed(removal), "request_id": run.label}, None)

    def done(self, run: Run) -> list[bytes]:
        """The end; the model may be used again when it is sent."""
        named = {"request_id": run.label}
        event = _done(run, self._n_shown, self._ignored, named)
        return [*self._start(run), *event_pieces(event, None)]

    def error(self, run: Run | None, answer: Answer) -> list[bytes]:
        """What went wrong."""
        return _error(run, answer)


class PlainEvents:
    """``{"token": text, "finish_reason": null}``, and the reason in an event of its own at the end.

    Text that may begin a stop sequence is held back until that is clear, because the stop sequence
    itself is not shown. The last event also says what the server left out of the request.
    """

    def __init__(self, stops: Sequence[str], ignored: Sequence[str] = (), *, trims: bool) -> None:
        """Hold back *stops* if *trims*; otherwise they are shown. The end tells of *ignored*."""
        self._shown = ShownText(stops if trims else ())
        self._ignored = ignored
        self._trims = trims

    def prompt(self, run: Run, block: PromptBlock) -> list[bytes]:
        """Nothing."""
        return []

    def token(self, run: Run, step: Step) -> list[bytes]:
        """The text that is clear now; nothing if there is none."""
        text = self._shown.feed(step.token.text)
        return event_pieces(_plain(text, None), None) if text else []

    def removed(self, run: Run, removal: Removal) -> list[bytes]:
        """What a client is to drop, beside an empty text."""
        lost = removed(removal, self._shown.take_back(removal.text))
        return event_pieces({**_plain("", None), "removed": lost}, None)

    def done(self, run: Run) -> list[bytes]:
        """What was held back, then the reason."""
        reason = _plain("", finish_reason(run.finish_reason)) | left_out(run, self._ignored)
        last = msgspec.json.encode(reason | tool_calls_of(run.generations[0]))
        rest = self._shown.rest(run.generations[0].text if self._trims else run.text)
        return [msgspec.json.encode(_plain(rest, None)), NEXT_EVENT, last] if rest else [last]

    def error(self, run: Run | None, answer: Answer) -> list[bytes]:
        """What went wrong."""
        return _error(run, answer)


class SocketFrames:
    """For each id a text frame and a binary frame with its row; the binary one is never left out.

    Rows are float32 of shape ``(num_layers, num_attention_heads, n_context)``, as the seed's client
    expects. If the request or the model makes them anything else, the text frame describes them in
    ``attention``; formats that are not arrays are there completely.
    """

    def __init__(
        self, facts: RowFacts | None, ignored: Sequence[str] = (), *, has_start: bool = False
    ) -> None:
        """Write rows as *facts* say; the others are as in `TypedEvents`."""
        self._facts = facts
        self._ignored = ignored
        self._n_shown = 0
        self._has_start = has_start
        self._is_usual = (
            facts is not None
            and facts.wanted.format == "per_layer"
            and facts.wanted.dtype == "float32"
            and facts.wanted.heads is None
            and facts.wanted.spans is None
            and facts.layers is None
        )

    def prompt(self, run: Run, block: PromptBlock) -> list[bytes | str]:
        """Rows of the prompt's tokens from ``start`` on: an axis of rows before the columns."""
        return self._frames(run, _prompt(block), _shaped(self._facts, block.rows))

    def token(self, run: Run, step: Step) -> list[bytes | str]:
        """One id with its row."""
        token = step.token
        self._n_shown += len(token.text)
        event = {"type": "token", "token_id": token.id, "text": token.text}
        rows = _shaped(self._facts, token.attention)
        if self._is_usual and isinstance(rows, Dense) and rows.heads_by_layer is None:
            return [*self._start(run), _text(event), Encoder(run.count_copied).raw(rows.values)]
        return self._frames(run, event, rows)

    def _frames(self, run: Run, event: Object, rows: Shaped | None) -> list[bytes | str]:
        data = b""
        if rows is not None and self._facts is not None:
            attention, data = attention_frame(rows, Encoder(run.count_copied), facts=self._facts)
            event = {**event, "attention": attention}
        return [*self._start(run), _text(event), data]

    def _start(self, run: Run) -> list[str]:
        """As in `TypedEvents`; no binary frame follows it."""
        if not self._has_start:
            return []
        self._has_start = False
        return [_text(start_event(run, self._facts, self._ignored))]

    def removed(self, run: Run, removal: Removal) -> list[bytes | str]:
        """What a client is to drop: so many of the last ids and characters; no binary frame."""
        self._n_shown -= removal.n_characters
        return [_text(_removed(removal))]

    def done(self, run: Run) -> list[bytes | str]:
        """The end; the socket is closed after it."""
        return [*self._start(run), _text(_done(run, self._n_shown, self._ignored, {}))]

    def error(self, run: Run | None, answer: Answer) -> list[bytes | str]:
        """What went wrong; the socket is closed after it."""
        return [b"".join(_error(run, answer)).decode()]


def _plain(text: str, reason: str | None) -> Object:
    return {"token": text, "finish_reason": reason}


def _prompt(block: PromptBlock) -> Object:
    return {"type": "prompt_attention", "start": block.start, "rows": block.n_rows}


def _removed(removal: Removal) -> Object:
    return {"type": "removed", **removed(removal)}


def _done(run: Run, n_shown: int, ignored: Sequence[str], named: Object) -> Object:
    reason = finish_reason(run.finish_reason)
    event: Object = {"type": "done", "finish_reason": reason, "total_tokens": run.n_tokens, **named}
    event |= {"reason": run.finish_reason, **details_of(run, ignored)}
    event |= tool_calls_of(run.generations[0])
    rest = run.text[n_shown:]
    return {**event, "text": rest} if rest else event


def _error(run: Run | None, answer: Answer) -> list[bytes]:
    named = {} if run is None else {"request_id": run.label}
    return event_pieces({"type": "error", **named, **error_body(answer)}, None)


def _text(event: Any) -> str:
    return msgspec.json.encode(event).decode()
