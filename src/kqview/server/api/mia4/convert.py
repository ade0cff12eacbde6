"""MIA4 requests as requests for the service, and what the server says about its models. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import msgspec

from kqview.engine import Engine
from kqview.server import config
from kqview.server.api.attention_field import ATTENTION_NAMES, Attention, attention_of
from kqview.server.api.chat_work import ChatRequest, Reading, prepare
from kqview.server.api.mia4 import passport, persona, schema
from kqview.server.api.mia4.passport import Known
from kqview.server.api.mia4.sampling import Merged, merge
from kqview.server.api.reasoning import HarmonySplitter, Splitter, TagSplitter, ThinkSplitter
from kqview.server.attention import AttentionWanted
from kqview.server.errors import Answer, Unprocessable
from kqview.server.kept import Rows
from kqview.server.run import GenerateRequest
from kqview.server.settings import Settings
from kqview.types.sampling import OPTIONS

Object = dict[str, Any]

_OVERRIDES: Final = "overrides"
_ERROR_TYPES: Final[Mapping[int, str]] = {
    401: "unauthorized", 403: "forbidden", 404: "not_found", 408: "timeout", 409: "conflict",
    413: "too_large", 429: "rate_limited", 501: "not_supported", 503: "unavailable",
    504: "timeout", 507: "out_of_space",
}  # fmt: skip


def error_type_of(answer: Answer) -> str:
    """What kind of failure it is."""
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
        splitter: Makes what takes the answer apart.
        merged: How tokens are chosen.
        preset: The preset of reasoning that was named.
        drops_reasoning: Whether reasoning is neither sent nor stored.
        passport: Identity of the model's passport.
        system_prompt: The same of its system prompt.
        persona: The same of the persona.
    """

    request: GenerateRequest
    splitter: Callable[[], Splitter]
    merged: Merged
    preset: str | None
    drops_reasoning: bool
    passport: Known
    system_prompt: Known | None
    persona: Known | None


def plan_of(
    body: schema.GenerateBody,
    *,
    request_id: str,
    engine: Engine,
    settings: Settings,
    llm: config.Llm,
    model: config.Model,
    persona: persona.Text | None = None,
    history: Sequence[Mapping[str, Any]] = (),
) -> Plan:
    """What *body* asks for; any thread, because a template may take seconds.

    Args:
        body: The request.
        request_id: Its name.
        engine: The engine that will answer.
        settings: For the server's defaults and limits.
        llm: What is configured for all models.
        model: What is configured for this one.
        persona: Text after the system prompt.
        history: Messages of the conversation so far.

    Raises:
        RequestError: Or one of its kinds, or Unprocessable: it cannot work.
    """
    custom = dict(body.overrides or {})
    attention = _attention(custom.pop("attention", None), settings)
    preset, of_preset = _preset(custom.pop("reasoning_preset", None), llm)
    merged = _merged(model.passport.sampling, of_preset, custom, settings)
    system = system_text_of(model)
    chat = ChatRequest(
        messages=_messages([system, persona and persona.text], history, body.prompt),
        sampling=replace(merged.sampling, stop=llm.stop),
        request_id=request_id,
        max_tokens=merged.max_tokens,
        attention=attention,
        names=_NAMES,
        continues=False,
    )
    work = prepare(engine, chat)
    reasoning = model.passport.postproc.reasoning
    drops = reasoning.drop_from_history
    if drops is None:
        drops = llm.postproc.reasoning.drop_from_history
    return Plan(
        request=work.request,
        splitter=partial(_splitter, work.reading, llm),
        merged=merged,
        preset=preset,
        drops_reasoning=drops is not False,
        passport=passport.passport_of(model.passport),
        system_prompt=system_prompt_of(model),
        persona=None if persona is None else persona.known,
    )


def _splitter(reading: Reading, llm: config.Llm) -> Splitter:
    tags = llm.prompt.harmony
    if reading.splits == "harmony":
        return HarmonySplitter()
    if tags.enabled:
        return TagSplitter({tags.analysis_tag: "reasoning", tags.final_tag: "content"})
    return ThinkSplitter(opened_by=reading.opened)


_NAMES: Final = {
    **{name: f"{_OVERRIDES}.{name}" for name in OPTIONS},
    **{core: f"{_OVERRIDES}.{name}" for core, name in ATTENTION_NAMES.items()},
    "max_tokens": f"{_OVERRIDES}.max_output_tokens",
    "stop": "llm.stop",
    "messages": "prompt",
}


def _messages(
    texts: Sequence[str | None], history: Sequence[Mapping[str, Any]], prompt: str
) -> list[Mapping[str, Any]]:
    system = "\n\n".join(text for text in texts if text)
    first = [{"role": "system", "content": system}] if system else []
    return [*first, *history, {"role": "user", "content": prompt}]


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
    return attention_of(msgspec.structs.replace(given, delivery="id"), settings)


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


def kept_attention(request_id: str, rows: Rows) -> schema.KeptAttention:
    """The list of rows that are kept of a request."""
    [choice], [n_left_out] = rows.choices, rows.n_left_out
    wanted = rows.wanted
    return schema.KeptAttention(
        request_id=request_id, values=wanted.kind, format=wanted.format, dtype=wanted.dtype,
        layers=rows.layers, n_left_out=n_left_out,
        rows=[
            schema.KeptRow(n, row.token_id, row.text, row.shape) for n, row in list(choice.items())
        ],
    )  # fmt: skip
