"""What a request asks for, from its body, its model's passport and the configuration. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import msgspec

from kqview.chat.reasoning import THINK_TAGS, Split
from kqview.chat.turn import Reading
from kqview.engine import Engine
from kqview.errors import RequestError
from kqview.server.api.wire.attention import ATTENTION_NAMES, Attention, attention_of
from kqview.server.api.wire.chat import ChatRequest, prepare, prompt_of
from kqview.server.api.wire.citations import Sources, guards_of, with_documents
from kqview.server.api.wire.mods_field import mods_of
from kqview.server.apps.conversation_store import TurnMessage
from kqview.server.apps.mia4 import schema
from kqview.server.apps.mia4.passport import (
    MAX_TOKENS,
    REASONING_MAX_TOKENS,
    Known,
    Merged,
    merge,
    passport_of,
    text_of,
)
from kqview.server.apps.mia4.persona import PersonaText
from kqview.server.config import MARKER, Llm, ModelConfig, Passport
from kqview.server.errors import Unprocessable
from kqview.server.models.row_cache import PromptText
from kqview.server.models.run import AttentionWanted, GenerateRequest
from kqview.server.models.texts import pieces_of
from kqview.server.settings import Settings
from kqview.types.sampling import OPTIONS

Fit = Callable[[Callable[[Sequence[TurnMessage]], int], int], Sequence[TurnMessage]]
"""As `kqview.server.apps.conversations.ConversationTurn.fit`."""

_OVERRIDES: Final = "overrides"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """What a request asks for, ready to run.

    Attributes:
        request: For the service.
        ids: The whole prompt.
        reading: How the answer is read.
        merged: How tokens are chosen.
        preset: The preset of reasoning that was named.
        drops_reasoning: Whether reasoning is neither sent nor stored.
        identity: Hashes and versions of the model's passport, its system prompt and the persona, as
            `GenerationStarted` has them.
        sources: What the answer may cite; None without documents.
        prompt_text: The prompt, with the text of each id, if attention is wanted.
    """

    request: GenerateRequest
    ids: Sequence[int]
    reading: Reading
    merged: Merged
    preset: str | None
    drops_reasoning: bool
    identity: Mapping[str, Any]
    sources: Sources | None
    prompt_text: PromptText | None


def plan_of(
    body: schema.GenerateBody,
    *,
    request_id: str,
    engine: Engine,
    settings: Settings,
    llm: Llm,
    model: ModelConfig,
    max_context: int,
    persona: PersonaText | None = None,
    fit: Fit | None = None,
) -> TurnPlan:
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
        fit: `ConversationTurn.fit` of the conversation that it continues; without one, nothing
            precedes it.

    Raises:
        RequestError: Or one of its kinds, or Unprocessable: it cannot work.
    """
    custom = dict(body.overrides or {})
    attention = _attention(custom.pop("attention", None), settings)
    preset, of_preset = _preset(custom.pop("reasoning_preset", None), llm)
    try:
        merged = merge(
            passport_values(llm, model.passport),
            of_preset,
            custom,
            settings.sampling_defaults if settings.sampling else {},
        )
    except Unprocessable as error:
        name = f"{_OVERRIDES}.{error.parameter}"
        raise Unprocessable(f"{_OVERRIDES}.{error}", parameter=name) from None
    most = min(settings.max_tokens, merged.max_tokens or settings.max_tokens)
    merged = replace(merged, max_tokens=most, values=merged.values | {MAX_TOKENS: most})
    own = model.system_prompt and model.system_prompt.text
    texts = (own if body.system is None else body.system, persona and persona.text)
    system = "\n\n".join(text for text in texts if text)

    def chat_with(history: Sequence[TurnMessage]) -> ChatRequest:
        head = [{"role": "system", "content": system}] if system else []
        said = [{"role": one.role, "content": one.content} for one in history]
        messages = [*head, *said, {"role": "user", "content": body.prompt}]
        if not body.documents:
            return replace(chat, messages=messages)
        messages, documents = with_documents(messages, body.documents)
        return replace(chat, messages=messages, documents=documents)

    chat = ChatRequest(
        messages=(),
        sampling=replace(merged.sampling, stop=llm.stop),
        request_id=request_id,
        max_tokens=most,
        reasoning_budget=merged.reasoning_max_tokens,
        split=partial(split_for, llm, model.passport, f"{system}\n{body.prompt}"),
        attention=attention,
        guards=guards_of(body, engine, settings, cites=bool(body.documents)),
        names=_NAMES,
        continues=False,
        options={"mods": mods_of(body.mods)} if body.mods else {},
    )
    # A history that is too long leaves room for an answer.
    n_most = max_context - min(max_context // 4, most)
    history: Sequence[TurnMessage] = ()
    if fit is not None:
        history = fit(lambda history: len(prompt_of(engine, chat_with(history))[0]), n_most)
    work = prepare(engine, chat_with(history))
    ids = work.request.prompt
    assert not isinstance(ids, str)  # a chat's prompt is tokenized
    known = {
        "passport": passport_of(model.passport),
        "system_prompt": system_prompt_of(model) if body.system is None else None,
        "app_persona": persona and persona.known,
    }
    return TurnPlan(
        request=work.request,
        ids=ids,
        reading=work.reading,
        merged=merged,
        preset=preset,
        drops_reasoning=drops_reasoning(llm, model.passport),
        identity={
            f"{name}_{part}": getattr(one, part)
            for name, one in known.items()
            if one is not None
            for part in ("hash", "version")
        },
        sources=work.sources,
        prompt_text=(
            None
            if attention is None
            else PromptText(ids, (text for _, text in pieces_of(engine, ids)))
        ),
    )


_NAMES: Final = {
    **{name: f"{_OVERRIDES}.{name}" for name in OPTIONS},
    **{core: f"{_OVERRIDES}.{name}" for core, name in ATTENTION_NAMES.items()},
    "max_tokens": f"{_OVERRIDES}.max_output_tokens",
    "stop": "llm.stop",
    "messages": "prompt",
}


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


def _preset(name: object, llm: Llm) -> tuple[str | None, Mapping[str, Any]]:
    if name is None:
        return None, {}
    if not isinstance(name, str) or name not in llm.reasoning_presets:
        known = ", ".join(sorted(llm.reasoning_presets)) or "none"
        raise Unprocessable(
            f"overrides.reasoning_preset is {str(name)[:80]!r}, this server's presets are: {known}",
            parameter=f"{_OVERRIDES}.reasoning_preset",
        )
    return name, llm.reasoning_presets[name]


def system_prompt_of(model: ModelConfig) -> Known | None:
    """Identity of a model's system prompt, None without one."""
    prompt = model.system_prompt
    if prompt is None or prompt.text is None:
        return None
    return text_of(prompt.text, prompt.version)


# ---- how its answer is read


def split_for(
    llm: Llm, passport: Passport, prompt: str, source: str, end: str, found: Split
) -> Split:
    """How the answer marks its reasoning; bound to the first three it is a `ChooseSplit`.

    The first of these that applies:

    1. The channels of Harmony, or ``<think>`` and its like, if the model's chat template has them;
       unless the passport names a marker.
    2. Tags, with the marker as their fallback, if ``llm.prompt.harmony`` is enabled.
    3. The marker, if the configuration names one or the prompt contains the default one. An answer
       is then held until the marker comes, so no model is suspected of it that was not told to.
    4. ``<think>`` and its like, should the answer begin with them.

    Args:
        llm: What holds for all models.
        passport: The model's own.
        prompt: All text that the model is given.
        source: Its chat template.
        end: The end of the rendered prompt.
        found: The split that template and prompt suggest.
    """
    own = passport.postproc.reasoning.marker
    given = own or llm.postproc.reasoning.marker
    harmony = llm.prompt.harmony
    has_tags = found.opened is not None or any(
        mark in source for pair in THINK_TAGS.items() for mark in pair
    )
    if found.mode == "harmony" or (has_tags and own is None):
        return found
    marker = given or MARKER
    if harmony.enabled:
        opening = f"<{harmony.analysis_tag}>"
        return Split(
            mode="tags",
            opened=opening if end.rstrip().endswith(opening) else None,
            tags=(harmony.analysis_tag, harmony.final_tag),
            marker=marker,
        )
    if given is not None or marker in prompt:
        return Split(mode="marker", marker=marker)
    return found


def passport_values(llm: Llm, passport: Passport) -> Mapping[str, Any]:
    """The level "passport" of `merge`: sampling, and the limit of reasoning."""
    most = passport.postproc.reasoning.max_tokens
    if most is None:
        most = llm.postproc.reasoning.max_tokens
    return {REASONING_MAX_TOKENS: most, **passport.sampling}


def drops_reasoning(llm: Llm, passport: Passport) -> bool:
    """Whether reasoning is neither sent nor stored."""
    own = passport.postproc.reasoning.drop_from_history
    return llm.postproc.reasoning.drop_from_history is not False if own is None else own
