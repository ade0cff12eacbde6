"""What the pure parts of the dialect need to know of the service: model, limits, memory.

From the event loop; nothing here waits.
"""

from collections.abc import Callable
from functools import cache

from kqview.engine import Engine
from kqview.errors import KqviewError
from kqview.server.api.attention_fields import MOST_TOKEN_TEXT
from kqview.server.api.dream import schema
from kqview.server.api.dream.convert import (
    Plan,
    context_limit,
    figures_of,
    memory_figures,
    model_info_of,
    plan_of,
)
from kqview.server.errors import Answer, answer_of
from kqview.server.service import Service


def plan_for(
    service: Service, body: schema.DreamFields, request_id: str, *, always_logprob: bool = False
) -> Plan:
    """`plan_of` for the model that serves now.

    Raises:
        NoModel: There is none.
        RequestError: Or one of its kinds, as `plan_of`.
    """
    engine = service.engine
    return plan_of(
        body,
        request_id=request_id,
        model=engine.model,
        max_context=service.max_context,
        settings=service.settings,
        one_token=one_token_of(engine),
        always_logprob=always_logprob,
    )


def model_info(service: Service, engine: Engine, name: str) -> schema.ModelInfoReply:
    """What ``GET /api/v1/model/info`` says where *engine* serves and is called *name*."""
    return model_info_of(
        engine.model,
        name=name,
        max_context=service.max_context_of(engine),
        one_token=one_token_of(engine),
    )


def one_token_of(engine: Engine) -> Callable[[str], int | None]:
    """Gives the id of a text that is one token of *engine*'s vocabulary, else None."""

    def one_token(text: str) -> int | None:
        if len(text) > MOST_TOKEN_TEXT:
            return None
        try:
            ids = engine.tokenize(text)
        except KqviewError:  # a model without a vocabulary
            return None
        return ids[0] if len(ids) == 1 else None

    return one_token


def token_bytes_of(service: Service) -> Callable[[int], bytes]:
    """Gives the bytes of an id of the model that serves now; none once it was closed. Any thread.

    Raises:
        NoModel: There is no model.
    """
    engine = service.engine

    @cache  # of a vocabulary's size at most
    def token_bytes(id_: int) -> bytes:
        try:
            return engine.token_bytes(id_)
        except KqviewError:
            return b""

    return token_bytes


def answer_for(
    service: Service,
    error: BaseException,
    body: schema.DreamFields | None = None,
    *,
    n_prompt: int | None = None,
) -> Answer:
    """What to tell the client about *error*, with the figures of the model that serves now.

    Args:
        service: Whose limits and memory they are.
        error: What went wrong.
        body: The request, None where it could not be read.
        n_prompt: Tokens of its prompt; None counts its ``input_ids``, if there are any.
    """
    try:
        engine, max_context = service.engine, service.max_context
    except KqviewError:
        return answer_of(error)
    if body is not None:
        max_context = context_limit(body, max_context)
        if n_prompt is None and body.input_ids is not None:
            n_prompt = len(body.input_ids)

    def memory() -> dict[str, int]:
        return memory_figures(engine.stats().pool, engine.system_info()["devices"])

    figures = figures_of(
        error,
        max_context=max_context,
        n_vocab=engine.model.n_vocab,
        n_prompt=n_prompt,
        memory=memory,
    )
    return answer_of(error, **figures)
