"""Edits as JSON objects, as servers and commands read them.

Each has a ``type``, the name of a method of `kqview.Edit`, and that method's arguments. Factors of
heads are ``[layer, head, factor]``; control vectors are named files of a folder. There are no
hooks: nothing of an object is run.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from kqview.edit import Edit
from kqview.errors import InvalidEdit, ModelLoadError, shown

Object = dict[str, Any]


def edits_of(objects: object, vectors: str | os.PathLike[str] | None = None) -> list[Edit]:
    """The edits that *objects* describe, in their order.

    Args:
        objects: A list of them.
        vectors: Folder of the control vectors that they may name; None for none.

    Raises:
        InvalidEdit: One is none; the message says which.
    """
    if not isinstance(objects, Sequence) or isinstance(objects, str | bytes):
        raise _invalid(f"edits must be a list of objects, got {shown(objects)}")
    given = cast("Sequence[object]", objects)
    return [_edit(f"edits[{i}]", one, vectors) for i, one in enumerate(given)]


def _edit(name: str, given: object, vectors: str | os.PathLike[str] | None) -> Edit:
    arguments = dict(cast("Object", given)) if isinstance(given, dict) else {}
    kind = arguments.pop("type", None)
    make = _KINDS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise _invalid(f"{name}.type is {shown(kind)}; send one of {', '.join(_KINDS)}")
    try:
        return make(arguments, vectors)
    except TypeError as error:  # of the call: an argument is missing, or has another name
        raise _invalid(f"{name}: {str(error).partition('() ')[2] or error}") from None
    except InvalidEdit as error:
        raise _invalid(f"{name}: {error}") from None


def _scaled_heads(given: Object, vectors: object) -> Edit:
    entries: Any = given.pop("factors", None)
    try:
        found: list[tuple[Any, Any]] = [((layer, head), factor) for layer, head, factor in entries]
        factors = dict(found)
    except (TypeError, ValueError):  # no list of three each; a layer that is a list
        factors = {}
    if given or not factors:
        raise _invalid("scale_heads has factors, a list of [layer, head, factor], and nothing else")
    if len(factors) != len(entries):
        raise _invalid("scale_heads names a head twice")
    return Edit.scale_heads(factors)


def _control_vector(given: Object, vectors: str | os.PathLike[str] | None) -> Edit:
    name: Any = given.pop("name", None)
    if vectors is None:
        raise _invalid("there is no folder of control vectors (--control-vectors-dir)")
    names = sorted(one.name for one in os.scandir(vectors) if one.name.endswith(".gguf"))
    if name not in names:
        raise _invalid(f"name is {shown(name)}; control vectors are {', '.join(names) or 'none'}")
    try:
        return Edit.control_vector(Path(vectors) / name, **given)
    except ModelLoadError:  # its text has the folder's path
        raise _invalid(f"{name} cannot be read as a control vector") from None


def _invalid(message: str) -> InvalidEdit:
    return InvalidEdit(message, parameter="edits")


_KINDS: Final[Mapping[str, Callable[[Object, Any], Edit]]] = {
    "add": lambda given, _: Edit.add(**given),
    "set": lambda given, _: Edit.set(**given),
    "control_vector": _control_vector,
    "scale_heads": _scaled_heads,
    "attention_bias": lambda given, _: Edit.attention_bias(**given),
    "block": lambda given, _: Edit.block(**given),
}
