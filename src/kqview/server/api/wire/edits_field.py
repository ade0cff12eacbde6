"""The field ``edits`` of the APIs: what a request changes in the model. Pure.

Each entry has a ``type``, the name of a method of `kqview.Edit`, and that method's arguments.
Factors of heads are ``[layer, head, factor]``; control vectors are named files of the server's
folder. There are no hooks: nothing of a request is run.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kqview.edit import Edit
from kqview.errors import InvalidEdit, ModelLoadError, RequestError, shown
from kqview.server.settings import Settings

Object = dict[str, Any]
EditsField = Annotated[list[Object], msgspec.Meta(max_length=256)]


def edits_of(field: Sequence[Object], settings: Settings) -> tuple[Edit, ...]:
    """The edits of a request, in their order.

    Raises:
        RequestError: The server allows no edits. May be InvalidEdit: an entry is none.
    """
    if not settings.edits:
        raise RequestError(
            "edits are off on this server; start it with --edits, or leave them out",
            parameter="edits",
        )
    return tuple(_edit(f"edits[{i}]", one, settings) for i, one in enumerate(field))


def _edit(name: str, given: Object, settings: Settings) -> Edit:
    arguments = dict(given)
    kind = arguments.pop("type", None)
    make = _KINDS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise _invalid(f"{name}.type is {shown(kind)}; send one of {', '.join(_KINDS)}")
    try:
        return make(arguments, settings)
    except TypeError as error:  # of the call: an argument is missing, or has another name
        raise _invalid(f"{name}: {str(error).partition('() ')[2] or error}") from None
    except InvalidEdit as error:
        raise _invalid(f"{name}: {error}") from None


def _scaled_heads(given: Object, settings: Settings) -> Edit:
    try:
        factors = msgspec.convert(given, _HeadFactors).factors
    except msgspec.ValidationError:
        raise _invalid(
            "scale_heads has factors, a list of [layer, head, factor], and nothing else"
        ) from None
    return Edit.scale_heads({(layer, head): factor for layer, head, factor in factors})


class _HeadFactors(msgspec.Struct, forbid_unknown_fields=True):
    factors: list[tuple[int, int, float]]


def _control_vector(given: Object, settings: Settings) -> Edit:
    name: Any = given.pop("name", None)
    folder = settings.control_vectors_dir
    if folder is None:
        raise _invalid("the server has no control vectors; start it with --control-vectors-dir")
    names = sorted(one.name for one in os.scandir(folder) if one.name.endswith(".gguf"))
    if name not in names:
        raise _invalid(f"name is {shown(name)}; control vectors are {', '.join(names) or 'none'}")
    try:
        return Edit.control_vector(Path(folder) / name, **given)
    except ModelLoadError:  # its text has the folder's path
        raise _invalid(f"{name} cannot be read as a control vector") from None


def _invalid(message: str) -> InvalidEdit:
    return InvalidEdit(message, parameter="edits")


_KINDS: Final[Mapping[str, Callable[[Object, Settings], Edit]]] = {
    "add": lambda given, _: Edit.add(**given),
    "set": lambda given, _: Edit.set(**given),
    "control_vector": _control_vector,
    "scale_heads": _scaled_heads,
    "attention_bias": lambda given, _: Edit.attention_bias(**given),
    "block": lambda given, _: Edit.block(**given),
}
