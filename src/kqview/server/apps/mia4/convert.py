"""MIA4 requests as requests for the service, and what the server says about its models. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import msgspec

from kqview.chat.turn import Reading
from kqview.engine import Engine
from kqview.errors import RequestError
from kqview.server import config
from kqview.server.api.wire.attention_field import ATTENTION_NAMES, Attention, attention_of
from kqview.server.api.wire.chat import ChatRequest, prepare, prompt_of
from kqview.server.api.wire.mods_field import mods_of
from kqview.server.apps.conversation_store import Message, SessionInfo
from kqview.server.apps.mia4 import passport, persona, schema
from kqview.server.apps.mia4.answer import drops_reasoning, passport_values, split_for
from kqview.server.apps.mia4.passport import Known
from kqview.server.apps.mia4.sampling import MAX_TOKENS, Merged, merge
from kqview.server.errors import Answer, Unprocessable
from kqview.server.models.request import AttentionWanted, GenerateRequest
from kqview.server.models.row_cache import CachedRows, PromptText
from kqview.server.settings import Settings
from kqview.stop_strings import TextStream
from kqview.types.sampling import OPTIONS

Object = dict[str, Any]
Fit = Callable[[Callable[[Sequence[Message]], int], int], Sequence[Message]]
"""As `kqview.server.apps.conversations.Turn.fit`."""

_OVERRIDES: Final = "overrides"
_ERROR_TYPES: Final[Mapping[int, str]] = {
    401: "unauthorized", 403: "forbidden", 404: "not_found", 408: "timeout", 409: "conflict",
    413: "too_large", 429: "rate_limited", 501: "not_supported", 503: "unavailable",
    504: "timeout", 507: "out_of_space",
}  # fmt: skip


def error_type_of(answer: Answer) -> str:
    """What kind of failure it is."""
    if (answer.status, answer.code) == (404, "NO_MODEL"):
        return "model_not_found"
    by_status = "server_error" if answer.status >= 500 else "invalid_request"
    return _ERROR_TYPES.get(answer.status, by_status)


def error_body(answer: Answer) -> Object:
    """A failure before a stream began."""
    body: Object = {
        "code": answer.code, "error_type": error_type_of(answer), "message": answer.message,
    }  # fmt: skip
    if answer.parameter is not None:
        body["field"] = answer.parameter
    if answer.n_prompt_tokens is not None:
        body |= {"prompt_tokens": answer.n_prompt_tokens, "context_length": answer.n_ctx}
    return {**body, **answer.figures}


# ---- what a request asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a request asks for, ready to run.

    Attributes:
        request: For the service.
        ids: The whole prompt.
        reading: How the answer is read.
        merged: How tokens are chosen.
        preset: The preset of reasoning that was named.
        drops_reasoning: Whether reasoning is neither sent nor stored.
        passport: Identity of the model's passport.
        system_prompt: The same of its system prompt.
        persona: The same of the persona.
        prompt_text: The prompt, with the text of each id, if attention is wanted.
    """

    request: GenerateRequest
    ids: Sequence[int]
    reading: Reading
    merged: Merged
    preset: str | None
    drops_reasoning: bool
    passport: Known
    system_prompt: Known | None
    persona: Known | None
    prompt_text: PromptText | None


def plan_of(
    body: schema.GenerateBody,
    *,
    request_id: str,
    engine: Engine,
    settings: Settings,
    llm: config.Llm,
    model: config.Model,
    max_context: int,
    persona: persona.Text | None = None,
    fit: Fit = lambda count, n_most: (),
) -> Plan:
    """What *body* asks for; any thread, because a template may take seconds.

    Args:
        body: The request.
        request_id: Its name.
        engine: The engine that will answer.
        settings: For the server's defaults and limits.
        llm: What is configured for all models.
        model: What is configured for this one.
        max_context: Longest prompt in tokens.
        persona: Text after the system prompt.
        fit: `Turn.fit` of the conversation that it continues; without one nothing precedes it.

    Raises:
        RequestError: Or one of its kinds, or Unprocessable: it cannot work.
    """
    custom = dict(body.overrides or {})
    attention = _attention(custom.pop("attention", None), settings)
    preset, of_preset = _preset(custom.pop("reasoning_preset", None), llm)
    merged = _merged(passport_values(llm, model.passport), of_preset, custom, settings)
    most = min(settings.max_tokens, merged.max_tokens or settings.max_tokens)
    merged = replace(merged, max_tokens=most, values=merged.values | {MAX_TOKENS: most})
    system = _joined([system_text_of(model), persona and persona.text])

    def chat_with(history: Sequence[Message]) -> ChatRequest:
        return replace(chat, messages=_messages(system, history, body.prompt))

    chat = ChatRequest(
        messages=(),
        sampling=replace(merged.sampling, stop=llm.stop),
        request_id=request_id,
        max_tokens=most,
        reasoning_budget=merged.reasoning_max_tokens,
        split=partial(split_for, llm, model.passport, f"{system}\n{body.prompt}"),
        attention=attention,
        names=_NAMES,
        continues=False,
        options={"mods": mods_of(body.mods)} if body.mods else {},
    )
    # A history that is too long leaves room for an answer.
    n_most = max_context - min(max_context // 4, most)
    history = fit(lambda history: len(prompt_of(engine, chat_with(history))[0]), n_most)
    work = prepare(engine, chat_with(history))
    ids = work.request.prompt
    assert not isinstance(ids, str)  # a chat's prompt is tokenized
    return Plan(
        request=work.request,
        ids=ids,
        reading=work.reading,
        merged=merged,
        preset=preset,
        drops_reasoning=drops_reasoning(llm, model.passport),
        passport=passport.passport_of(model.passport),
        system_prompt=system_prompt_of(model),
        persona=None if persona is None else persona.known,
        prompt_text=None if attention is None else _prompt_text(engine, ids),
    )


_NAMES: Final = {
    **{name: f"{_OVERRIDES}.{name}" for name in OPTIONS},
    **{core: f"{_OVERRIDES}.{name}" for core, name in ATTENTION_NAMES.items()},
    "max_tokens": f"{_OVERRIDES}.max_output_tokens",
    "stop": "llm.stop",
    "messages": "prompt",
}


def _joined(texts: Sequence[str | None]) -> str:
    return "\n\n".join(text for text in texts if text)


def _messages(system: str, history: Sequence[Message], prompt: str) -> list[Mapping[str, Any]]:
    first = [{"role": "system", "content": system}] if system else []
    said = [{"role": one.role, "content": one.content} for one in history]
    return [*first, *said, {"role": "user", "content": prompt}]


def _prompt_text(engine: Engine, ids: Sequence[int]) -> PromptText:
    stream = TextStream()
    texts = [stream.feed(engine.token_bytes(id_)) for id_ in ids]
    texts[-1] += stream.flush()
    return PromptText(ids, texts)


def _attention(value: object, settings: Settings) -> AttentionWanted | None:
    """Attention to keep for ``GET /generate/{request_id}/attention/{seq}``."""
    name = f"{_OVERRIDES}.attention"
    try:
        given = msgspec.convert(value, Attention | bool | None)
    except msgspec.ValidationError as error:
        raise Unprocessable(f"{name} cannot be read: {error}; correct it", parameter=name) from None
    if given is None or given is False:
        return None
    given = Attention() if given is True else given
    try:
        return attention_of(msgspec.structs.replace(given, delivery="id"), settings)
    except RequestError as error:
        raise Unprocessable(
            f"{name} cannot be used: {error}", parameter=f"{_OVERRIDES}.{error.parameter}"
        ) from None


def _preset(name: object, llm: config.Llm) -> tuple[str | None, Mapping[str, Any]]:
    if name is None:
        return None, {}
    if not isinstance(name, str) or name not in llm.reasoning_presets:
        known = ", ".join(sorted(llm.reasoning_presets)) or "none"
        raise Unprocessable(
            f"overrides.reasoning_preset is {str(name)[:80]!r}, this server's presets are: {known}",
            parameter=f"{_OVERRIDES}.reasoning_preset",
        )
    return name, llm.reasoning_presets[name]


def _merged(
    of_passport: Mapping[str, Any],
    of_preset: Mapping[str, Any],
    custom: Mapping[str, Any],
    settings: Settings,
) -> Merged:
    try:
        return merge(of_passport, of_preset, custom, settings.sampling_defaults)
    except Unprocessable as error:
        raise Unprocessable(
            f"{_OVERRIDES}.{error}", parameter=f"{_OVERRIDES}.{error.parameter}"
        ) from None


# ---- what is known of a model


def system_text_of(model: config.Model) -> str | None:
    """The text of a model's system prompt, None without one."""
    return None if model.system_prompt is None else model.system_prompt.text


def system_prompt_of(model: config.Model) -> Known | None:
    """Identity of a model's system prompt, None without one."""
    text = system_text_of(model)
    if text is None or model.system_prompt is None:
        return None
    return passport.text_of(text, model.system_prompt.version)


def card_of(
    id_: str, model: config.Model, *, context_length: int | None, state: Mapping[str, Any]
) -> Object:
    """A model in the list of ``GET /models``."""
    prompt = system_prompt_of(model)
    return {
        "id": id_,
        "role": model.role,
        "capabilities": list(model.capabilities),
        "context_length": context_length,
        "flags": msgspec.to_builtins(model.flags),
        "passport": msgspec.to_builtins(passport.passport_of(model.passport)),
        **({} if prompt is None else {"system_prompt": msgspec.to_builtins(prompt)}),
        **state,
    }


# ---- attention that is kept


def kept_attention(request_id: str, rows: CachedRows) -> schema.KeptAttention:
    """The list of rows that are kept of a request."""
    [n_left_out] = rows.n_left_out
    wanted = rows.wanted
    return schema.KeptAttention(
        request_id=request_id, values=wanted.kind, format=wanted.format, dtype=wanted.dtype,
        layers=rows.layers, n_left_out=n_left_out,
        rows=[
            schema.KeptRow(n, row.token_id, row.text, row.shape) for n, row in rows.shown(0)
        ],
    )  # fmt: skip


def kept_prompt(request_id: str, prompt: PromptText) -> schema.Prompt:
    """The prompt of a request."""
    return schema.Prompt(request_id, prompt.ids, prompt.texts)


# ---- conversations


def sessions_of(found: Sequence[SessionInfo]) -> schema.Sessions:
    """The list of conversations."""
    return schema.Sessions([schema.Session(**_session_fields(one)) for one in found])


def whole_session_of(info: SessionInfo, messages: Sequence[Message]) -> schema.WholeSession:
    """A conversation with its messages."""
    said = [schema.SessionMessage(one.role, one.content) for one in messages]
    return schema.WholeSession(**_session_fields(info), messages=said)


def _session_fields(info: SessionInfo) -> Object:
    return {
        "session_id": info.id, "title": info.title, "model": info.model,
        "n_messages": info.n_messages, "created_s": info.created_s, "used_s": info.used_s,
    }  # fmt: skip
