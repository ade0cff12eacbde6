"""Errors: status and code of each failure over the network, one table looked up along the MRO.

Dialects turn an `Answer` into their own body with their ``error_body``. A client never sees a stack
trace: whatever has no row in the table is "internal", and only the log says more.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from kqview import errors

_MOST_MESSAGE: Final = 1000  # characters
_CALL: Final = re.compile(r"^[a-z_.]+: ")  # the call that the core names before its message


class ServerError(errors.KqviewError):
    """Base of the errors that only a server has.

    Attributes:
        retry_after_s: When to try again, if it is known better than from the table.
    """

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unauthorized(ServerError):
    """The key is missing or unknown."""


class Forbidden(ServerError):
    """The key, or the page's origin, does not allow this."""


class NotFound(ServerError):
    """There is nothing at this path, or no such thing."""


class UnknownModel(NotFound):
    """The configuration has no model of this name."""


class MethodNotAllowed(ServerError):
    """The path exists, but not this method of it."""


class TooLarge(ServerError):
    """The body or message is larger than the limit."""


class UnsupportedMedia(ServerError):
    """The body is compressed, or of a media type that the operation does not read."""


class Unprocessable(ServerError):
    """The body is JSON, but a field is missing, of a wrong type, or has an impossible value.

    Attributes:
        parameter: The field, None if no single one is known.
    """

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class RateLimited(ServerError):
    """This client sends too many requests."""


class NoModel(ServerError):
    """No model is loaded."""


class ModelChanged(ServerError):
    """The model was switched while the request ran."""


class TimedOut(ServerError):
    """The request took longer than the server allows."""


class SlowBody(TimedOut):
    """The client took too long to send its request."""


class NotSupported(ServerError):
    """The model, or the way the server was started, does not allow this operation."""


class StorageFull(ServerError):
    """There is no room for more saved slots, or traces."""


class StorageFailed(ServerError):
    """What is stored, saved slots or traces, cannot be read or written."""


class ShuttingDown(ServerError):
    """The server is about to end."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A failure in neutral terms, for a dialect to tell.

    Attributes:
        status: HTTP status.
        code: One of the codes of the table, such as "INVALID_TOKEN".
        message: What was wrong, what the limit is and what to do.
        retry_after_s: When to try again, None if that does not help.
        figures: Numbers that belong to it, such as ``context_length``.
        parameter: The client's field that is wrong, None if no single one is known.
        n_prompt_tokens: Of a prompt that is too long.
        n_ctx: The most tokens that it may have.
    """

    status: int
    code: str
    message: str
    retry_after_s: int | None = None
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])
    parameter: str | None = None
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    status: int
    code: str
    retry_after_s: int | None = None


STATUS: Final[Mapping[type[Exception], _Row]] = MappingProxyType(
    {
        errors.RequestError: _Row(400, "INVALID_REQUEST"),
        errors.InvalidToken: _Row(400, "INVALID_TOKEN"),
        errors.PromptTooLong: _Row(400, "CONTEXT_TOO_LONG"),
        errors.UnknownSlot: _Row(404, "INVALID_REQUEST"),
        errors.ModelError: _Row(500, "NO_MODEL"),
        errors.UnsupportedModel: _Row(400, "INVALID_REQUEST"),
        errors.ModFileError: _Row(503, "INTERNAL", 10),
        errors.ModFailed: _Row(500, "INTERNAL"),
        errors.CapacityError: _Row(503, "BUSY", 1),
        errors.PoolExhausted: _Row(503, "OOM", 1),
        errors.OutOfMemory: _Row(503, "OOM", 10),
        errors.StateError: _Row(400, "INVALID_REQUEST"),
        errors.StateMismatch: _Row(409, "INVALID_REQUEST"),
        errors.ClosedError: _Row(503, "NO_MODEL", 5),
        errors.BusyError: _Row(409, "BUSY"),
        errors.DecodeError: _Row(500, "INTERNAL"),
        errors.InternalError: _Row(500, "INTERNAL"),
        Unauthorized: _Row(401, "UNAUTHORIZED"),
        Forbidden: _Row(403, "UNAUTHORIZED"),
        NotFound: _Row(404, "INVALID_REQUEST"),
        UnknownModel: _Row(404, "NO_MODEL"),
        MethodNotAllowed: _Row(405, "INVALID_REQUEST"),
        TooLarge: _Row(413, "INVALID_REQUEST"),
        UnsupportedMedia: _Row(415, "INVALID_REQUEST"),
        Unprocessable: _Row(422, "INVALID_REQUEST"),
        RateLimited: _Row(429, "BUSY", 1),
        NoModel: _Row(503, "NO_MODEL", 5),
        ModelChanged: _Row(503, "MODEL_CHANGED", 1),
        TimedOut: _Row(504, "TIMEOUT"),
        SlowBody: _Row(408, "TIMEOUT"),
        NotSupported: _Row(501, "INVALID_REQUEST"),
        StorageFull: _Row(507, "OOM"),
        StorageFailed: _Row(500, "INTERNAL"),
        ShuttingDown: _Row(503, "BUSY", 5),
    }
)
"""Status and code of each class of error; a subclass without a row has those of its base."""


def too_late(limit_s: float) -> TimedOut:
    """What ends a request that takes too long."""
    return TimedOut(f"the request took more than {limit_s:g} s, the limit of request_timeout_s")


def shutting_down() -> ShuttingDown:
    """What ends and refuses requests when the server ends."""
    return ShuttingDown("the server is shutting down; try again later")


def model_changed() -> ModelChanged:
    """What ends the requests of a model that leaves."""
    return ModelChanged("the model was switched; send the request again")


def renamed(error: errors.RequestError, names: Mapping[str, str]) -> errors.RequestError:
    """*error* in the client's words: *names* instead of the core's parameters, and no functions."""
    message = _CALL.sub("", str(error))
    parameter = error.parameter or re.split(r"\W", message, maxsplit=1)[0]
    name = names.get(parameter, parameter)
    message = re.sub(rf"\b{re.escape(parameter)}\b", name, message, count=1) if name else message
    known = name if error.parameter or parameter in names else None
    if message == str(error) and known == error.parameter:
        return error
    if isinstance(error, errors.PromptTooLong):
        sizes = {"n_tokens": error.n_tokens, "n_max": error.n_max}
        return errors.PromptTooLong(message, parameter=known, **sizes)
    return type(error)(message, parameter=known)


def answer_of(error: BaseException, **figures: Any) -> Answer:
    """What to tell the client about *error*; only messages of kqview's own errors reach it."""
    for kind in type(error).__mro__:
        row = STATUS.get(kind)
        if row is not None:
            retry_after_s = getattr(error, "retry_after_s", None) or row.retry_after_s
            message = str(error)
            if len(message) > _MOST_MESSAGE:  # it quotes a value that the client sent
                message = f"{message[:_MOST_MESSAGE]} ..."
            return Answer(
                row.status, row.code, message, retry_after_s, figures,
                parameter=getattr(error, "parameter", None),
                n_prompt_tokens=getattr(error, "n_tokens", None),
                n_ctx=getattr(error, "n_max", None),
            )  # fmt: skip
    return Answer(500, "INTERNAL", "the server failed; its log says more", None, figures)
