"""Every exception that kqview raises, grouped by who must act.

    KqviewError
    +-- RequestError (ValueError)      the caller's arguments
    |   +-- PromptTooLong
    |   +-- InvalidToken
    |   +-- UnknownSlot
    |   +-- InvalidCapture
    |   +-- InvalidSampling
    +-- ModelError                     the model file
    |   +-- ModelLoadError
    |   +-- UnsupportedModel
    +-- CapacityError                  the limits of this process: retry later or raise a limit
    |   +-- PoolExhausted
    |   +-- QueueFull
    |   +-- OutOfMemory (MemoryError)
    +-- StateError                     a saved session
    |   +-- StateFormatError
    |   +-- StateMismatch
    +-- ClosedError                    the lifetime of the engine
    +-- BusyError                      two users of one slot
    +-- DecodeError                    llama.cpp could not evaluate a batch
    +-- InternalError                  a bug of kqview

A message says what was wrong, what the limit is and what to do, in the names of the caller's
parameters. Cancelling is a finish reason, never an error. This file imports nothing of kqview; the
C++ core looks its classes up in ``BY_CODE``.
"""

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = [
    "BY_CODE",
    "BusyError",
    "CapacityError",
    "ClosedError",
    "DecodeError",
    "InternalError",
    "InvalidCapture",
    "InvalidSampling",
    "InvalidToken",
    "KqviewError",
    "ModelError",
    "ModelLoadError",
    "OutOfMemory",
    "PoolExhausted",
    "PromptTooLong",
    "QueueFull",
    "RequestError",
    "StateError",
    "StateFormatError",
    "StateMismatch",
    "UnknownSlot",
    "UnsupportedModel",
]


class KqviewError(Exception):
    """Base of every error of kqview.

    Catch it to separate kqview's failures from those of your own code. A wrong type of argument,
    such as a number where a string belongs, may still raise TypeError.
    """


class RequestError(KqviewError, ValueError):
    """The arguments of a call are wrong; the caller changes them.

    Sending the same request again fails again. Not raised for what would fit at another moment:
    that is a CapacityError.

    Attributes:
        parameter: Name of the parameter that is wrong, None where no single one is known.
    """

    def __init__(self, message: str = "", *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class PromptTooLong(RequestError):
    """The prompt has more tokens than one slot holds; shorten it or raise ``n_ctx``.

    Not raised when a generation fills its slot on the way: it ends with finish reason "length".
    """


class InvalidToken(RequestError):
    """A token id lies outside the vocabulary; take ids from ``tokenize`` of the same model.

    Not raised for special tokens: every id from 0 to ``n_vocab - 1`` may be fed.
    """


class UnknownSlot(RequestError):
    """A slot number is not one of this engine; use one of ``engine.slots`` or raise ``n_slots``.

    Not raised for a slot in use: that is BusyError.
    """


class InvalidCapture(RequestError):
    """A capture asks for what this model or version cannot give; change the Capture.

    Examples are a layer without attention, a head out of range, an unknown kind. Not raised for
    lack of memory: that is PoolExhausted.
    """


class InvalidSampling(RequestError):
    """A sampling option is out of range or contradicts another; change that option.

    A grammar or JSON schema that does not parse is one too, and one that takes too much time or
    memory to follow, which shows while the text is generated. Not raised for legal values that make
    poor text.
    """


class ModelError(KqviewError):
    """The model file is the problem; use another file or another version of kqview."""


class ModelLoadError(ModelError):
    """The file is missing, unreadable or not a sound GGUF; check the path or fetch it again.

    The message ends with the last lines that llama.cpp logged. Raised too for an RPC server that
    cannot be used, with its name. Not raised when memory runs out: that is OutOfMemory.
    """


class UnsupportedModel(ModelError):
    """The file is sound, but this model, backend or build cannot do what was asked.

    Choose another model or device, or a plan that needs less. Not raised for single layers without
    attention in a hybrid model: ``model.attention_layers`` leaves them out.
    """


class CapacityError(KqviewError):
    """A limit of this process is reached; retry later, release something, or raise the limit.

    The request itself is sound.
    """


class PoolExhausted(CapacityError):
    """Attention views that are still held use up the budget; drop views or copy what you keep.

    ``attention_budget_bytes`` raises the limit and ``Capture(on_full=...)`` chooses another
    policy. Tokens handed out before stay valid. Not raised with ``on_full="drop"``, nor with
    ``on_full="wait"`` before ``wait_s`` has passed.
    """


class QueueFull(CapacityError):
    """Too many requests wait for a slot; the client retries later.

    Not raised for requests that already run.
    """


class OutOfMemory(CapacityError, MemoryError):
    """The host or the device has too little memory; lower ``n_ctx``, ``n_slots`` or layers on it.

    Not raised for the budget of attention views: that is PoolExhausted.
    """


class StateError(KqviewError):
    """A saved session cannot be restored; save it again, or restore it where it fits.

    The slot keeps what it held before.
    """


class StateFormatError(StateError):
    """The bytes are no valid saved session: cut short, altered or of an unknown version.

    Not raised for sound bytes of another model: that is StateMismatch.
    """


class StateMismatch(StateError):
    """A sound saved session belongs to another model, cache type or a larger context.

    Open the engine as it was when the session was saved. Not raised for another number of slots.
    """


class ClosedError(KqviewError):
    """The engine or generation is closed, or this process is a fork of its owner; open a new one.

    Not raised for views of attention: they outlive the engine. Closing twice is no error.
    """


class BusyError(KqviewError):
    """A slot or engine is in use by another generation; wait for that one or cancel it.

    Not raised by ``generate`` without ``slot=``: it takes a free slot or queues.
    """


class DecodeError(KqviewError):
    """llama.cpp failed to evaluate a batch; retry, and report it if it comes back.

    The requests of that batch end; the engine goes on with others. When an RPC server is gone every
    later request raises this too, naming it: start it again and open a new Engine. Not raised for a
    full context, which ends a generation with finish reason "length".
    """


class InternalError(KqviewError):
    """kqview broke one of its own rules; report it with the message.

    Nothing a caller passes should reach it.
    """


BY_CODE: Final[Mapping[str, type[KqviewError]]] = MappingProxyType(
    {
        "request": RequestError,
        "prompt_too_long": PromptTooLong,
        "invalid_token": InvalidToken,
        "unknown_slot": UnknownSlot,
        "invalid_capture": InvalidCapture,
        "invalid_sampling": InvalidSampling,
        "model_load": ModelLoadError,
        "unsupported_model": UnsupportedModel,
        "pool_exhausted": PoolExhausted,
        "queue_full": QueueFull,
        "out_of_memory": OutOfMemory,
        "state_format": StateFormatError,
        "state_mismatch": StateMismatch,
        "closed": ClosedError,
        "busy": BusyError,
        "decode": DecodeError,
        "internal": InternalError,
    }
)
"""Class for each ``errc`` of the C++ core, by the name that the enum gives it."""

_MOST_BITS: Final = 256
_MOST_CHARACTERS: Final = 120
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _MOST_CHARACTERS


def shown(value: object) -> str:
    """*value* as a message shows it: its repr, shortened, whatever a caller passed."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a whole number of {value.bit_length()} bits"
    try:
        return _repr.repr(value)
    except Exception:  # a repr is the caller's code, and huge numbers inside a list have none
        return f"an object of type {type(value).__name__}"
