"""What llama.cpp's server says about itself: properties and slots. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview import __version__
from kqview.chat.tool_format import knows_tools
from kqview.server.api.llama_server.convert import generation_settings
from kqview.server.api.wire.llama_fields import LlamaFields
from kqview.server.models.run import GenerateRequest
from kqview.server.settings import Settings
from kqview.types import ModelInfo, Sampling, SlotStats, Usage

_NO_FIELDS: Final = LlamaFields()


class Defaults(Struct):
    """How a request is answered that says nothing.

    Attributes:
        params: Its fields, such as {"temperature": 0.8}.
        n_ctx: Tokens that a slot holds, such as 2048.
    """

    params: dict[str, Any]
    n_ctx: int


class Props(Struct, kw_only=True):
    """What is served, and how.

    Attributes:
        default_generation_settings: What requests take that say nothing.
        total_slots: Requests that run at the same time, such as 1.
        model_alias: Name of the model, such as "demo".
        model_ftype: How its tensors are stored, such as "F16".
        model_path: Its file, as the server was started with it, such as "model.gguf".
        modalities: What it reads besides text, such as {"vision": false}.
        media_marker: Always "".
        endpoint_slots: Whether there are the routes of slots.
        endpoint_props: Whether there is ``POST /props``.
        endpoint_metrics: Always true.
        ui: Always true.
        ui_settings: Always {}.
        chat_template: Its chat template, such as "{{ messages }}"; "" if it has none.
        chat_template_caps: What the template can do, such as {"supports_tools": true}.
        bos_token: Text of the token that begins a text, such as "<s>".
        eos_token: Text of the token that ends one, such as "</s>".
        build_info: Version of the server and of llama.cpp, such as "kqview-0.1.0-0123abcd".
        is_sleeping: Always false.
        cors_proxy_enabled: Always false.
    """

    default_generation_settings: Defaults
    total_slots: int
    model_alias: str
    model_ftype: str
    model_path: str
    modalities: dict[str, bool]
    media_marker: str = ""
    endpoint_slots: bool
    endpoint_props: bool
    endpoint_metrics: bool = True
    ui: bool = True
    ui_settings: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    chat_template: str
    chat_template_caps: dict[str, bool]
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool = False
    cors_proxy_enabled: bool = False


class Success(Struct):
    """It was done.

    Attributes:
        success: Always true; a failure is an error.
    """

    success: bool = True


class NextToken(Struct, kw_only=True):
    """How far a generation is.

    Attributes:
        has_next_token: Whether it goes on.
        has_new_line: Whether the text has a line end.
        n_remain: Most tokens that may follow, such as 100.
        n_decoded: Tokens so far, such as 28.
    """

    has_next_token: bool
    has_new_line: bool
    n_remain: int
    n_decoded: int


class SlotState(Struct, kw_only=True):
    """A slot; what its request is like only to those whose request it is.

    Attributes:
        id: Index of the slot, such as 0.
        n_ctx: Tokens that it holds, such as 2048.
        speculative: Always false.
        is_processing: Whether it generates.
        id_task: Name of the request, such as "chatcmpl-1".
        n_prompt_tokens: Tokens of its prompt, such as 12.
        n_prompt_tokens_processed: Those that were evaluated, such as 12.
        n_prompt_tokens_cache: Those that were in the cache, such as 0.
        params: How it generates, such as {"temperature": 0.8}.
        next_token: How far it is.
    """

    id: int
    n_ctx: int
    speculative: bool = False
    is_processing: bool
    id_task: str | UnsetType = UNSET
    n_prompt_tokens: int | UnsetType = UNSET
    n_prompt_tokens_processed: int | UnsetType = UNSET
    n_prompt_tokens_cache: int | UnsetType = UNSET
    params: dict[str, Any] | UnsetType = UNSET
    next_token: list[NextToken] | UnsetType = UNSET


def props_of(
    model: ModelInfo,
    system: Mapping[str, Any],
    settings: Settings,
    *,
    name: str,
    n_ctx: int,
    n_slots: int,
) -> Props:
    """Properties of a server.

    Args:
        model: Its model.
        system: `Engine.system_info`.
        settings: How it was started.
        name: Name of the model.
        n_ctx: Tokens that a slot holds.
        n_slots: How many slots it has.
    """
    template = model.chat_template or ""
    has_tools = knows_tools(template)
    sampling = Sampling(**settings.sampling_defaults)
    return Props(
        default_generation_settings=Defaults(
            generation_settings(
                _NO_FIELDS, sampling, settings.default_max_tokens or -1, is_short=True
            ),
            n_ctx,
        ),
        total_slots=n_slots,
        model_alias=name,
        model_ftype=model.file_type,
        model_path=settings.model or name,
        modalities={"vision": False, "video": False, "audio": False},
        endpoint_slots=settings.slot_endpoints,
        endpoint_props=settings.props,
        chat_template=template,
        chat_template_caps={
            "supports_string_content": True,
            "supports_typed_content": True,
            "supports_tools": has_tools,
            "supports_tool_calls": "tool_calls" in template,
            "supports_parallel_tool_calls": has_tools,
            "supports_system_role": True,
            "supports_preserve_reasoning": "reasoning_content" in template,
        },
        bos_token=model.special_tokens.get("bos", ""),
        eos_token=model.special_tokens.get("eos", ""),
        build_info=f"kqview-{__version__}-{str(system['llama_cpp_commit'])[:8]}",
    )


@dataclass(frozen=True, slots=True)
class OnSlot:
    """What runs on a slot: the request, what it cost so far, and its text."""

    request: GenerateRequest
    usage: Usage
    text: str


def slot_state(slot: SlotStats, n_ctx: int, running: OnSlot | None) -> SlotState:
    """A slot of *n_ctx* tokens, and what runs on it if the caller may know."""
    state = SlotState(id=slot.id, n_ctx=n_ctx, is_processing=slot.is_busy)
    if running is None:
        return state
    request, usage = running.request, running.usage
    state.id_task = request.request_id
    state.n_prompt_tokens = usage.prompt_tokens
    state.n_prompt_tokens_processed = usage.prompt_tokens - usage.cached_tokens
    state.n_prompt_tokens_cache = usage.cached_tokens
    state.params = generation_settings(
        _NO_FIELDS, request.sampling, request.max_tokens, is_short=True
    )
    state.next_token = [
        NextToken(
            has_next_token=slot.is_busy,
            has_new_line="\n" in running.text,
            n_remain=request.max_tokens - usage.completion_tokens,
            n_decoded=usage.completion_tokens,
        )
    ]
    return state
