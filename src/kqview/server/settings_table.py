"""Tables of settings: frozen dataclasses of which each field says all there is to know about it.

From them come the keys of a configuration file, the variables of the environment, the options of
the command line and what is printed about each. A value is checked in one way, wherever it is from.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import NoneType
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kqview.errors import RequestError, shown

Count = Annotated[int, Meta(ge=1)]
Size = Annotated[int, Meta(ge=0)]
CountOrMinusOne = Annotated[int, Meta(ge=-1)]
NotNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Name = Annotated[str, Meta(min_length=1)]
Names = tuple[Name, ...]

Place = Literal["file", "folder", "new", "text"]
"""What a path names: an existing file, folder or text file, or one that the server makes."""

_SWITCH: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """What a table says of one field.

    Attributes:
        name: Its name, which is its key in a configuration file.
        type: What it takes, range included.
        default: Its value where none is given.
        help: What it means.
        flag: Its flag of the command line.
        place: What its path names; None if it is not a path.
        restart: Whether a change needs a restart of the server.
        is_text: Whether a configuration file may name a file that has the text.
        is_secret: Whether it is never shown.
        separator: Pattern of what stands between the texts of a list.
        check: Returns a text, or each text of a list, as it is kept, or raises ValueError with what
            to write instead.
    """

    name: str
    type: Any
    default: Any
    help: str
    flag: str
    place: Place | None
    restart: bool
    is_text: bool
    is_secret: bool
    separator: str
    check: Callable[[str], str] | None

    @property
    def kind(self) -> Any:
        """The type without None and range; ``tuple`` for lists."""
        found = self.type
        while NoneType in get_args(found) or get_origin(found) is Annotated:
            found = next(one for one in get_args(found) if one is not NoneType)
        return tuple if get_origin(found) is tuple else found

    def checked(self, value: object, name: str = "") -> Any:
        """*value* in the form that the field has.

        Args:
            value: What was given.
            name: What the message calls it, if not by the name of the field.

        Raises:
            RequestError: It is of the wrong type or out of range.
        """
        name = name or self.name
        try:
            found = msgspec.convert(value, self.type)
        except msgspec.ValidationError as error:
            raise self._wrong(name, value, str(error)) from None
        if self.check is None or found is None:
            return found
        texts: list[str] = []
        for text in found if self.kind is tuple else (found,):
            try:
                texts.append(self.check(text))
            except RequestError:
                raise
            except ValueError as error:
                raise self._wrong(name, text, str(error)) from None
        return tuple(texts) if self.kind is tuple else texts[0]

    def _wrong(self, name: str, value: Any, reason: str) -> RequestError:
        reason, _, at = reason.replace("`", "").replace(" | null", "").partition(" - at $")
        if at.strip("[]").isdecimal():  # an element of a list
            name, value = name + at, list(value)[int(at.strip("[]"))]
        if get_origin(self.kind) is Literal:
            reason = f"choose from {', '.join(get_args(self.kind))}"
        if self.kind is bool:
            reason = "write true or false"
        text = "***" if self.is_secret else shown(value)
        return RequestError(f"{name} is {text}; {reason[:1].lower()}{reason[1:]}")

    def parts(self, text: str) -> list[str]:
        """The texts of a list that *text* is, without spaces around them."""
        return [part.strip() for part in re.split(self.separator, text) if part.strip()]

    def read(self, text: str) -> Any:
        """What a variable of the environment means by *text*; not checked yet."""
        if self.kind is tuple:
            return tuple(self.parts(text))
        if self.kind is bool:
            return _SWITCH.get(text.lower(), text)
        try:
            return self.kind(text) if self.kind in (int, float) else text
        except ValueError:
            return text


def setting(
    default: Any,
    text: str = "",
    *,
    flag: str | None = None,
    place: Place | None = None,
    restart: bool = False,
    is_text: bool = False,
    is_secret: bool = False,
    separator: str = ",",
    check: Callable[[str], str] | None = None,
) -> Any:
    """A field of a table, with what `SettingRow` has; a secret may always be in a file."""
    metadata = {
        "help": text, "flag": flag, "place": place, "restart": restart,
        "is_text": is_text or is_secret, "is_secret": is_secret,
        "separator": separator, "check": check,
    }  # fmt: skip
    if isinstance(default, dict):
        return field(default_factory=dict[str, Any], metadata=metadata)
    return field(default=default, metadata=metadata, repr=not is_secret)


@cache
def rows_of(table: Any) -> Mapping[str, SettingRow]:
    """The fields of *table* that `setting` made by name, in their order."""
    types = get_type_hints(table, include_extras=True)
    found: dict[str, SettingRow] = {}
    for spec in dataclasses.fields(table):
        if not spec.metadata:
            continue
        about: dict[str, Any] = dict(spec.metadata)
        about["flag"] = about["flag"] or "--" + spec.name.replace("_", "-")
        about["default"] = None if spec.default is dataclasses.MISSING else spec.default
        found[spec.name] = SettingRow(name=spec.name, type=types[spec.name], **about)
    return found
