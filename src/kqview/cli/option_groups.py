"""How commands say their options; groups of options that commands share are dataclasses.

A command takes a group as a keyword-only parameter annotated with its class. `with_groups` shows
typer an option for each field instead and builds the group when the command runs.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo

_R = TypeVar("_R")


def option(default: object, text: str, names: str = "", **more: Any) -> Any:
    """An option of a command.

    Args:
        default: Its value where it is not given.
        text: Its help.
        names: Its names, separated by spaces; without any, that of the parameter.
        **more: What typer.Option takes; *panel* is its ``rich_help_panel``.
    """
    panel = more.pop("panel", None)
    return typer.Option(default, *names.split(), help=text, rich_help_panel=panel, **more)


def argument(default: object, text: str, **more: Any) -> Any:
    """A word of the command line, as `option`; ``...`` as *default* if it may not be left out."""
    return typer.Argument(default, help=text, **more)


def parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    """A parameter of a command, whose *default* is an option."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


class OptionGroup:
    """Base of the groups: dataclasses whose fields are options.

    Attributes:
        panel: Where the help shows them.
    """

    panel: ClassVar[str | None] = None

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """The options, as parameters of a command."""
        hints = get_type_hints(cls, include_extras=True)
        own = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        for one in own:
            if isinstance(one.default, OptionInfo) and one.default.rich_help_panel is None:
                one.default.rich_help_panel = cls.panel
        return [parameter(one.name, one.default, hints[one.name]) for one in own]


def with_groups(command: Callable[..., _R]) -> Callable[..., _R]:
    """*command* with the options of its groups in place of them."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type[OptionGroup], list[str]]] = {}
    for one in inspect.signature(command).parameters.values():
        kind = hints[one.name]
        if isinstance(kind, type) and issubclass(kind, OptionGroup):
            own = kind.parameters()
            groups[one.name] = kind, [each.name for each in own]
            parameters += own
        else:
            parameters.append(parameter(one.name, one.default, kind))

    @functools.wraps(command)
    def run(**given: Any) -> _R:
        built = {
            name: kind(**{field: given.pop(field) for field in fields})
            for name, (kind, fields) in groups.items()
        }
        return command(**given, **built)

    run.__annotations__ = {}  # typer prefers them to those of the signature
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return run
