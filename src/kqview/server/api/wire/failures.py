"""Failures in the form of llama.cpp's server and OpenAI. Pure."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

from msgspec import UNSET, Struct, UnsetType

from kqview.server.errors import Answer
from kqview.server.web.described import about

_TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        401: "authentication_error", 403: "permission_error", 404: "not_found_error",
        405: "not_found_error", 501: "not_supported_error", 503: "unavailable_error",
    }
)  # fmt: skip


class FailureFacts(Struct, kw_only=True):
    """What went wrong."""

    code: Annotated[int, about("Status.", 400)]
    message: Annotated[
        str, about("What was wrong, what the limit is and what to do.", "top_k is -5")
    ]
    type: Annotated[str, about("Kind of the failure for programs.", "invalid_request_error")]
    param: Annotated[
        str | None, about("The field that is wrong; null if no single one is known.", "top_k")
    ]
    n_prompt_tokens: Annotated[
        int | UnsetType, about("Tokens of a prompt that is too long.", 3000)
    ] = UNSET
    n_ctx: Annotated[int | UnsetType, about("The most that it may have.", 2048)] = UNSET


class FailureBody(Struct, kw_only=True):
    """A failure, also as the last event of a stream."""

    error: Annotated[FailureFacts, about("What went wrong.")]


def error_body(answer: Answer) -> FailureBody:
    """A failure in the form of llama.cpp's server and OpenAI."""
    kind = "server_error" if answer.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(answer.status, kind)
    if answer.code == "CONTEXT_TOO_LONG":
        kind = "exceed_context_size_error"
    facts = FailureFacts(
        code=answer.status, message=answer.message, type=kind, param=answer.parameter
    )
    if answer.n_prompt_tokens is not None and answer.n_ctx is not None:
        facts.n_prompt_tokens, facts.n_ctx = answer.n_prompt_tokens, answer.n_ctx
        # Clients know a prompt that is too long by these words.
        facts.message = (
            f"the request ({answer.n_prompt_tokens} tokens) exceeds the available context size "
            f"({answer.n_ctx} tokens): {answer.message}"
        )
    return FailureBody(error=facts)
