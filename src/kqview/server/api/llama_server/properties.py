"""What llama.cpp's server says about itself: properties, slots, and its LoRA adapters."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview import __version__
from kqview.chat.tool_format import knows_tools
from kqview.engine import Engine
from kqview.errors import RequestError
from kqview.generation.stream import Generation
from kqview.server.api.llama_server.convert import generation_settings
from kqview.server.api.wire.fields import LlamaFields, LoraScale
from kqview.server.errors import NotSupported, renamed
from kqview.server.models.run import Run
from kqview.server.models.service import Call
from kqview.server.web.described import about
from kqview.server.web.endpoint import Upload
from kqview.types import Sampling, SlotStats

_NO_FIELDS: Final = LlamaFields()


class Defaults(Struct):
    """How a request is answered that says nothing."""

    params: Annotated[dict[str, Any], about("Its fields.", {"temperature": 0.8})]
    n_ctx: Annotated[int, about("Tokens that a slot holds.", 2048)]


class Props(Struct, kw_only=True):
    """What is served, and how."""

    default_generation_settings: Annotated[Defaults, about("What requests take that say nothing.")]
    total_slots: Annotated[int, about("Requests that run at the same time.", 1)]
    model_alias: Annotated[str, about("Name of the model.", "demo")]
    model_ftype: Annotated[str, about("How its tensors are stored.", "F16")]
    model_path: Annotated[str, about("Its file, as the server was started with it.", "model.gguf")]
    modalities: Annotated[dict[str, bool], about("What it reads besides text.", {"vision": False})]
    media_marker: Annotated[str, about('Always "".', "")] = ""
    endpoint_slots: Annotated[bool, about("Whether there are the routes of slots.")]
    endpoint_props: Annotated[bool, about("Whether there is ``POST /props``.")]
    endpoint_metrics: Annotated[bool, about("Always true.")] = True
    ui: Annotated[bool, about("Always true.")] = True
    ui_settings: Annotated[dict[str, Any], about("Always {}.", {})] = msgspec.field(
        default_factory=dict[str, Any]
    )
    chat_template: Annotated[str, about('Its chat template; "" if it has none.', "{{ messages }}")]
    chat_template_caps: Annotated[
        dict[str, bool], about("What the template can do.", {"supports_tools": True})
    ]
    bos_token: Annotated[str, about("Text of the token that begins a text.", "<s>")]
    eos_token: Annotated[str, about("Text of the token that ends one.", "</s>")]
    build_info: Annotated[
        str, about("Version of the server and of llama.cpp.", "kqview-0.1.0-0123abcd")
    ]
    is_sleeping: Annotated[bool, about("Always false.")] = False
    cors_proxy_enabled: Annotated[bool, about("Always false.")] = False


class Success(Struct):
    """It was done."""

    success: Annotated[bool, about("Always true; a failure is an error.")] = True


class NextToken(Struct, kw_only=True):
    """How far a generation is."""

    has_next_token: Annotated[bool, about("Whether it goes on.")]
    has_new_line: Annotated[bool, about("Whether the text has a line end.")]
    n_remain: Annotated[int, about("Most tokens that may follow.", 100)]
    n_decoded: Annotated[int, about("Tokens so far.", 28)]


class SlotState(Struct, kw_only=True):
    """A slot; what its request is like only to those whose request it is."""

    id: Annotated[int, about("Index of the slot.", 0)]
    n_ctx: Annotated[int, about("Tokens that it holds.", 2048)]
    speculative: Annotated[bool, about("Whether a drafter guesses tokens.", False)]
    is_processing: Annotated[bool, about("Whether it generates.")]
    id_task: Annotated[str | UnsetType, about("Name of the request.", "chatcmpl-1")] = UNSET
    n_prompt_tokens: Annotated[int | UnsetType, about("Tokens of its prompt.", 12)] = UNSET
    n_prompt_tokens_processed: Annotated[
        int | UnsetType, about("Those that were evaluated.", 12)
    ] = UNSET
    n_prompt_tokens_cache: Annotated[int | UnsetType, about("Those that were in the cache.", 0)] = (
        UNSET
    )
    params: Annotated[
        dict[str, Any] | UnsetType, about("How it generates.", {"temperature": 0.8})
    ] = UNSET
    next_token: Annotated[list[NextToken] | UnsetType, about("How far it is.")] = UNSET


async def props(call: Call) -> Props:
    """Properties of the server and its model."""
    engine, settings = call.model.engine, call.service.settings
    model = engine.model
    template = model.chat_template or ""
    has_tools = knows_tools(template)
    sampling = Sampling(**settings.sampling_defaults)
    return Props(
        default_generation_settings=Defaults(
            generation_settings(
                _NO_FIELDS,
                sampling,
                settings.default_max_tokens or -1,
                drafter=engine.draft,
                is_short=True,
            ),
            engine.n_ctx,
        ),
        total_slots=len(engine.slots),
        model_alias=call.model.name,
        model_ftype=model.file_type,
        model_path=settings.model or call.model.name,
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
        build_info=f"kqview-{__version__}-{str(engine.system_info()['llama_cpp_commit'])[:8]}",
    )


async def set_props(call: Call) -> Success:
    """Change properties: none can be changed, as in llama.cpp's server."""
    if not call.service.settings.props:
        raise NotSupported("POST /props is off; start the server with --props")
    return Success()


def slot_state(
    slot: SlotStats, engine: Engine, running: tuple[Run, Generation] | None
) -> SlotState:
    """A slot of *engine*, and what runs on it if the caller may know."""
    state = SlotState(
        id=slot.id,
        n_ctx=engine.n_ctx,
        speculative=engine.draft is not None,
        is_processing=slot.is_busy,
    )
    if running is None:
        return state
    request, generation = running[0].request, running[1]
    usage = generation.usage
    state.id_task = request.request_id
    state.n_prompt_tokens = usage.prompt_tokens
    state.n_prompt_tokens_processed = usage.prompt_tokens - usage.cached_tokens
    state.n_prompt_tokens_cache = usage.cached_tokens
    state.params = generation_settings(
        _NO_FIELDS, request.sampling, request.max_tokens, drafter=engine.draft, is_short=True
    )
    state.next_token = [
        NextToken(
            has_next_token=slot.is_busy,
            has_new_line="\n" in generation.text,
            n_remain=request.max_tokens - usage.completion_tokens,
            n_decoded=usage.completion_tokens,
        )
    ]
    return state


# ---- LoRA adapters


class LoraAdapterState(Struct, kw_only=True):
    """A loaded adapter."""

    id: Annotated[int, about("Its index.", 0)]
    path: Annotated[str, about("Its file.", "adapter.gguf")]
    scale: Annotated[float, about("Its strength for requests that do not say.", 1.0)]
    task_name: Annotated[str, about('Always "".', "")] = ""
    prompt_prefix: Annotated[str, about('Always "".', "")] = ""


async def list_adapters(call: Call) -> list[LoraAdapterState]:
    """LoRA adapters and their scales."""
    loaded = call.model.engine.lora
    return [LoraAdapterState(id=one.id, path=one.path, scale=one.scale) for one in loaded]


async def set_scales(call: Call, upload: Upload) -> Success:
    """Scales of LoRA adapters for requests that do not say; adapters left out get 0."""
    call.caller.check_admin_key(
        call.service.settings,
        'change the scales of everybody\'s requests; send "lora" with your own',
    )
    scales = await upload.json(list[LoraScale])
    try:
        call.model.engine.set_lora_scales({one.id: one.scale for one in scales})
    except RequestError as error:
        raise renamed(error, {"scales": "id"}) from None
    return Success()
