"""Every exception that kqview raises, grouped by cause.

    KqviewError
    +-- RequestError (ValueError)      the caller's arguments
    |   +-- PromptTooLong
    |   +-- InvalidToken
    |   +-- UnknownSlot
    |   +-- InvalidCapture
    |   +-- InvalidEdit
    |   +-- InvalidSampling
    |   +-- UnknownOption (TypeError)
    |   +-- UnknownAttribute (AttributeError)
    |   +-- InvalidActionError
    |   +-- InvalidMod (TypeError)
    |   +-- EmittedError
    +-- ModelError                     the model file
    |   +-- ModelLoadError
    |   +-- UnsupportedModel
    +-- ModFileError                   a file in the folder of mods
    +-- ModFailed                      a mod that its request needs
    +-- CapacityError                  the limits of this process: retry later or raise a limit
    |   +-- PoolExhausted
    |   +-- QueueFull
    |   +-- OutOfMemory (MemoryError)
    +-- StateError                     a saved session
    |   +-- StateFormatError
    |   +-- StateMismatch
    +-- HeadFileError                  a file of attention heads
    +-- ClosedError                    the lifetime of the engine
    +-- BusyError                      two users of one slot
    +-- DecodeError                    llama.cpp could not evaluate a batch
    +-- InternalError                  a bug in kqview

A message says what was wrong, what the limit is and what to do, and names the caller's parameter.
Cancelling is a finish reason, never an error. This file imports nothing from kqview; the C++ core
looks up its classes in ``BY_CODE``.
"""

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


class KqviewError(Exception):
    """Base class of all errors of kqview.

    Catch it to tell kqview's failures from those of your own code. An argument of the wrong type,
    such as a number instead of a string, may still raise TypeError.
    """


class RequestError(KqviewError, ValueError):
    """An argument of a call is invalid; change it.

    The same call always fails again. What could succeed at another moment raises CapacityError
    instead.

    Attributes:
        parameter: Name of the invalid parameter; None if no single one is known.
    """

    def __init__(self, message: str = "", *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class PromptTooLong(RequestError):
    """The prompt has more tokens than a slot can hold; shorten it or raise ``n_ctx``.

    Not raised when a generation fills its slot: it ends with finish reason "length".

    Attributes:
        n_tokens: Number of tokens in the prompt; None if it is not known.
        n_max: Maximum number of tokens; None if it is not known.
    """

    def __init__(
        self,
        message: str = "",
        *,
        parameter: str | None = None,
        n_tokens: int | None = None,
        n_max: int | None = None,
    ) -> None:
        super().__init__(message, parameter=parameter)
        self.n_tokens = n_tokens
        self.n_max = n_max


class InvalidToken(RequestError):
    """A token id is outside the vocabulary; use ids from ``tokenize`` of the same model.

    Not raised for special tokens: every id from 0 to ``n_vocab - 1`` is allowed.
    """


class UnknownSlot(RequestError):
    """The engine has no slot with this index; use one of ``engine.slots`` or raise ``n_slots``.

    Not raised for a slot that is in use: that is BusyError.
    """


class InvalidCapture(RequestError):
    """A Capture asks for something that this model or version cannot provide; change the Capture.

    Examples are a layer without attention, a head out of range and an unknown kind. Not raised for
    lack of memory: that is PoolExhausted.
    """


class InvalidEdit(RequestError):
    """An Edit asks for something that this model or prompt does not have; change the Edit.

    Examples are a layer or head out of range, a position beyond the prompt, a vector of another
    size, and values that are not finite. Not raised where the model has the layer, but it cannot be
    edited here, as on a device: that is UnsupportedModel.
    """


class InvalidSampling(RequestError):
    """A sampling option is out of range or conflicts with another one; change that option.

    Also raised for a grammar or JSON schema that does not parse, and, while text is generated, for
    one that takes too much time or memory to follow. Not raised for valid values that produce poor
    text.
    """


class UnknownOption(RequestError, TypeError):
    """A call has no option of this name; the message says what it is called here.

    It knows the names of transformers, OpenAI, vLLM and llama-cpp-python. Not raised for a known
    option with an invalid value.
    """


class UnknownAttribute(RequestError, AttributeError):
    """A class has no attribute of this name; the message says what it is called here.

    It knows the names of llama-cpp-python, transformers and vLLM. Of any other name, a plain
    AttributeError is raised.
    """


class InvalidActionError(RequestError):
    """A mod built or returned an action that its event does not allow, or with invalid values.

    Raised inside the mod, by the methods of ``actions`` and the classes of `kqview.mods`. Iterating
    never raises it: returning an invalid action is a failure of the mod like any other.
    """


class InvalidMod(RequestError, TypeError):
    """A class of mods has a method ``on_...`` that no event calls; rename it.

    Raised where the class is defined, or where the mod is passed. Not raised by calls of a mod.
    """


class EmittedError(RequestError):
    """A mod refused the request with EmitError; the message is the mod's.

    Not raised when a mod fails: that counts as Noop, or is ModFailed.
    """


class ModelError(KqviewError):
    """The model file is the problem; use another file or another version of kqview."""


class ModelLoadError(ModelError):
    """The model file is missing, unreadable or damaged; check the path or download the file again.

    The message ends with the last lines that llama.cpp logged. Also raised for an RPC server that
    cannot be used; the message names it. Not raised when memory runs out: that is OutOfMemory.
    """


class UnsupportedModel(ModelError):
    """The file is sound, but this model, backend or build cannot do what was requested.

    Choose another model or device, or a call that needs less. Not raised for single layers without
    attention in a hybrid model: ``model.attention_layers`` omits them.
    """


class ModFileError(KqviewError):
    """A file in a folder of mods cannot be loaded, or does not make a mod; see the log."""


class ModFailed(KqviewError):
    """A mod that the request needs has failed; mend the mod, or let the request go on without it.

    Raised by iterating, with the mod's own exception as its cause if there is one. Not raised for
    other mods: without ``mods_strict=True`` and ``required = True`` a failed call counts as Noop.

    Attributes:
        mod: Name of the mod.
    """

    def __init__(self, message: str = "", *, mod: str = "") -> None:
        super().__init__(message)
        self.mod = mod


class CapacityError(KqviewError):
    """A limit of this process has been reached; retry later, release something, or raise the limit.

    The request itself is valid.
    """


class PoolExhausted(CapacityError):
    """Attention views still held use up the budget; drop views, or copy what you keep.

    ``attention_budget_bytes`` raises the limit, and ``Capture(on_full=...)`` chooses another
    policy. Tokens handed out before stay valid. Not raised with ``on_full="drop"``, nor with
    ``on_full="wait"`` before ``wait_s`` has passed.
    """


class QueueFull(CapacityError):
    """Too many requests wait for a slot; retry later.

    Not raised for requests that are already running.
    """


class OutOfMemory(CapacityError, MemoryError):
    """The host or a device has too little memory; lower ``n_ctx``, ``n_slots`` or ``n_gpu_layers``.

    Not raised for the budget of attention views: that is PoolExhausted.
    """


class StateError(KqviewError):
    """A saved session cannot be restored; save it again, or restore it where it fits.

    The slot keeps its previous contents.
    """


class StateFormatError(StateError):
    """The bytes are not a valid saved session: truncated, altered or of an unknown version.

    Not raised for valid bytes of another model: that is StateMismatch.
    """


class StateMismatch(StateError):
    """A valid saved session belongs to another model, another cache type or a larger context.

    Open the engine as it was when the session was saved. Not raised for another number of slots.
    """


class HeadFileError(KqviewError):
    """A head file cannot be used; calibrate the model, or choose another file.

    It is malformed, of a later version of the format, or of another model. Not raised for another
    quantisation of the model: that is a `kqview.heads.HeadFileWarning`.
    """


class CorpusError(KqviewError):
    """A folder of a corpus cannot be used as it is; the message says what to do.

    It belongs to another model, source or options, another process writes to it, it is damaged, or
    more documents failed than ``max_errors`` allows. What is in the folder stays.
    """


class ClosedError(KqviewError):
    """The engine or generation is closed, or this process is a fork of its owner; open a new one.

    Not raised for attention views: they outlive the engine. Closing twice is not an error.
    """


class BusyError(KqviewError):
    """Another generation uses the slot or engine; wait for it or cancel it.

    Not raised by ``generate`` without ``slot=``: it takes a free slot or waits in the queue.
    """


class DecodeError(KqviewError):
    """llama.cpp failed to evaluate a batch; retry, and report it if it happens again.

    The requests of that batch end; the engine continues with the others. If an RPC server was lost,
    every later request raises this error with the server's name: start the server again and open a
    new Engine. Not raised for a full context, which ends a generation with finish reason "length".
    """


class InternalError(KqviewError):
    """A bug in kqview: it broke one of its own rules. Report it with the message.

    No argument of a caller should lead to it.
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
"""Class for each ``errc`` of the C++ core, by its name in the enum."""

_MOST_BITS: Final = 256
_MOST_CHARACTERS: Final = 120
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _MOST_CHARACTERS


def shown(value: object) -> str:
    """*value* as a message shows it: its repr, shortened; works for any object."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a whole number of {value.bit_length()} bits"
    try:
        return _repr.repr(value)
    except Exception:  # a repr is the caller's code, and fails for a list with huge numbers
        return f"an object of type {type(value).__name__}"
