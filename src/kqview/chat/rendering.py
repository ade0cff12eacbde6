"""Rendering: chat templates that came with a file or a request, in helper processes with limits.

`kqview.chat.template` is the program that these run. A call takes about 0.2 ms more than rendering
in process.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kqview.chat.parts import PromptPart
from kqview.confined import Confined, Stopped
from kqview.errors import KqviewError, RequestError, UnsupportedModel

CPU_S_MAX: Final = 5.0
"""Maximum CPU time for all that a call renders, in seconds."""
MEMORY_MAX: Final = 512 << 20
"""Maximum memory that a template may take, in bytes; where the system can limit it, on Linux."""
WALL_S_MAX: Final = 30.0
"""Maximum time of a call on the clock, in seconds."""


def template_helpers() -> Confined:
    """Helper processes for templates; none starts before the first call."""
    return Confined(
        Path(__file__).with_name("template.py"),
        memory_bytes=MEMORY_MAX,
        cpu_s=CPU_S_MAX,
        wall_s=WALL_S_MAX,
    )


class ConfinedTemplate:
    """A `ChatTemplate` that one of `template_helpers` runs; safe to use from any thread.

    Raises:
        UnsupportedModel: The template does not parse, is too long, or exceeds a limit with any
            message.
    """

    def __init__(
        self,
        helpers: Confined,
        source: str,
        special_tokens: Mapping[str, str],
        control_texts: Iterable[str],
    ) -> None:
        self._helpers = helpers
        self._definition = json.dumps([source, dict(special_tokens), list(control_texts)])
        try:
            helpers.call([self._definition, None, None])
        except Stopped as stopped:
            raise UnsupportedModel(
                f"the chat template was stopped: {stopped}; pass another as chat_template"
            ) from stopped

    def render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> list[PromptPart]:
        """As `ChatTemplate.render`.

        Raises:
            RequestError: As there, or the template exceeds a limit.
            CapacityError: There is no process for it.
        """
        return [PromptPart(*part) for part in self._call("render", messages=messages, **arguments)]

    def ends(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> list[int]:
        """As `ChatTemplate.ends`; raises as `render`."""
        return self._call("ends", messages=messages, **arguments)

    def headers(self, *, ends_of_turn: Sequence[str]) -> dict[str, list[PromptPart]]:
        """As `ChatTemplate.headers`; raises as `render`."""
        found: dict[str, list[Any]] = self._call("headers", ends_of_turn=ends_of_turn)
        return {role: [PromptPart(*part) for part in parts] for role, parts in found.items()}

    def _call(self, method: str, **arguments: Any) -> Any:
        try:
            return self._helpers.call([self._definition, method, arguments])
        except Stopped as stopped:
            raise RequestError(
                f"the chat template was stopped: {stopped}; "
                "pass another chat_template or shorter messages"
            ) from stopped
        except KqviewError:
            raise
        except ValueError as error:  # a whole number that is too long for JSON
            raise RequestError(f"the chat template cannot be rendered: {error}") from error
