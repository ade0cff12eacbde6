"""What a chat of any API asks for besides its messages, from the fields that these share. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from kqview.engine import Engine
from kqview.server.api.wire.attention_field import ATTENTION_NAMES, Attention, attention_of
from kqview.server.api.wire.chat_work import ChatRequest
from kqview.server.api.wire.llama_fields import (
    LlamaFields,
    first,
    max_tokens_of,
    names_of,
    options_of,
    reasoning_budget_of,
    sampling_of,
)
from kqview.server.api.wire.reasoning_cap import budget_of
from kqview.server.settings import Settings


def with_fields(
    chat: ChatRequest,
    body: LlamaFields,
    attention: Attention | bool | None,
    *,
    engine: Engine,
    settings: Settings,
    names: Mapping[str, str],
    top_logprobs: int | None = None,
    stop: Sequence[str] | None = None,
) -> ChatRequest:
    """*chat*, which is the prompt, with what the other fields of *body* ask for.

    Args:
        chat: The prompt.
        body: The request.
        attention: Its field of that name.
        engine: The engine that will answer.
        settings: For the server's defaults.
        names: Parameter of the core -> the client's own name, where it has one of its own.
        top_logprobs: As of `Sampling`, if the API has a field of its own for it.
        stop: The same.

    Raises:
        RequestError: Or one of its kinds: it cannot work.
    """
    tokenize = partial(engine.tokenize, add_special=False, parse_special=False)
    sampling = sampling_of(body, tokenize=tokenize, top_logprobs=top_logprobs, stop=stop)
    budget = first(reasoning_budget_of(body), chat.reasoning_budget)
    return replace(
        chat,
        sampling=sampling,
        max_tokens=max_tokens_of(body),
        reasoning=settings.reasoning_format,
        reasoning_budget=budget_of(budget, sampling, settings),
        attention=attention_of(attention, settings),
        names={**chat.names, **names_of(body), **ATTENTION_NAMES, **names},
        options=options_of(body, settings),
    )
