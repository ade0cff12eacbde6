"""What the API description says of a value besides its type, for annotations of fields."""

from functools import partial
from typing import Any, Final

import msgspec

DEFAULT: Final = "x-default"
"""Where a schema has what counts if a client sends none, and the type's own default is None."""
SHOWN: Final[dict[str, type[msgspec.Struct]]] = {}
"""Classes of `shown_as`, by name."""


def about(
    description: str | None = None, example: Any = msgspec.UNSET, *, default: Any = None
) -> msgspec.Meta:
    """What a field is, an example of its value, and what counts if a client sends none.

    Args:
        description: A sentence or two.
        example: It may be left out.
        default: Where the type's own default is None, what that stands for.
    """
    return msgspec.Meta(
        description=description,
        examples=None if example is msgspec.UNSET else [example],
        extra_json_schema=None if default is None else {DEFAULT: default},
    )


example: Final = partial(about, None)
"""As `about`, of a field that is described elsewhere."""


def shown_as(cls: type[msgspec.Struct]) -> msgspec.Meta:
    """Describes a value as *cls*, whose name no other class has; values are not made of it."""
    SHOWN[cls.__name__] = cls
    return msgspec.Meta(extra_json_schema={"$ref": f"#/components/schemas/{cls.__name__}"})
