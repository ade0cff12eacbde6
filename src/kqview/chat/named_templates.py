"""Chat templates by the names that llama.cpp has for them, for files that bring none."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kqview.chat import CHATML


def _template(before: str, between: str, after: str, **roles: str) -> str:
    """Jinja of turns: *before*, the role (as *roles* call it), *between*, the text, *after*."""
    names = {role: roles.get(role, role) for role in ("system", "user", "assistant", "tool")}
    return (
        f"{{% set names = {names} %}}{{% for message in messages %}}{before}"
        "{{ names.get(message['role'], message['role']) }}"
        f"{between}{{{{ message['content'] | trim }}}}{after}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{before}{names['assistant']}{between}{{% endif %}}"
    )


TEMPLATES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "chatml": CHATML,
        "command-r": _template(
            "<|START_OF_TURN_TOKEN|><|", "_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
            system="SYSTEM", user="USER", assistant="CHATBOT",
        ),
        "falcon3": _template("<|", "|>\n", "\n"),
        "granite": _template("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\n"),
        "llama3": _template("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),
        "llama4": _template("<|header_start|>", "<|header_end|>\n\n", "<|eot|>"),
        "phi3": _template("<|", "|>\n", "<|end|>\n"),
        "phi4": _template("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        "zephyr": _template("<|", "|>\n", "<|endoftext|>\n"),
    }
)  # fmt: skip
"""Name -> Jinja; only formats in which every role's turn has the same shape."""
