"""What the API description says of a value besides its type, for annotations of fields."""

from typing import Any

import msgspec


def about(description: str, example: Any = msgspec.UNSET, *, default: Any = None) -> msgspec.Meta:
    """What a field is, an example of its value, and what counts if a client sends none.

    Args:
        description: A sentence or two.
        example: It may be left out.
        default: Where the type's own default is None, what that stands for.
    """
    return msgspec.Meta(
        description=description,
        examples=None if example is msgspec.UNSET else [example],
        extra=None if default is None else {"default": default},
    )


def example(value: Any = msgspec.UNSET, *, default: Any = None) -> msgspec.Meta:
    """An example of a field's value, and what counts if a client sends none.

    Args:
        value: The example; it may be left out.
        default: Where the type's own default is None, what that stands for.
    """
    return msgspec.Meta(
        examples=None if value is msgspec.UNSET else [value],
        extra=None if default is None else {"default": default},
    )


def shown_as(cls: type[msgspec.Struct]) -> msgspec.Meta:
    """Describes a value as *cls*, whose name no other class has; values are not made of it."""
    reference = {"$ref": f"#/components/schemas/{cls.__name__}"}
    return msgspec.Meta(extra_json_schema=reference, extra={"shown_as": cls})
