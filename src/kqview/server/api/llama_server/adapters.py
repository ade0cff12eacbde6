"""LoRA adapters: which are loaded, and with which scales requests run that do not say."""

from collections.abc import Sequence
from typing import Annotated, Final

from msgspec import Struct

from kqview.errors import RequestError
from kqview.lora import LoraAdapter
from kqview.server.api.llama_server import properties, states
from kqview.server.api.wire.llama_fields import Failure, LoraScale, error_body
from kqview.server.errors import Forbidden, renamed
from kqview.server.models.service import Call
from kqview.server.web.described import about
from kqview.server.web.endpoint import OneOf, Operation, Upload

_TAG: Final = "llama-server"


class Adapter(Struct, kw_only=True):
    """A loaded adapter."""

    id: Annotated[int, about("Its index.", 0)]
    path: Annotated[str, about("Its file.", "adapter.gguf")]
    scale: Annotated[float, about("Its strength for requests that do not say.", 1.0)]
    task_name: Annotated[str, about('Always "".', "")] = ""
    prompt_prefix: Annotated[str, about('Always "".', "")] = ""


def adapters_of(loaded: Sequence[LoraAdapter]) -> list[Adapter]:
    """The reply to a request for all adapters."""
    return [Adapter(id=one.id, path=one.path, scale=one.scale) for one in loaded]


async def list_adapters(call: Call) -> list[Adapter]:
    """``GET /lora-adapters``."""
    return adapters_of(call.model.engine.lora)


async def set_scales(call: Call, upload: Upload) -> properties.Success:
    """``POST /lora-adapters``: scales for requests from here on; adapters left out get 0."""
    if call.service.settings.admin_keys and not call.caller.is_admin:
        raise Forbidden(
            "an admin key is needed to change the scales of everybody's requests; "
            'send "lora" with your own'
        )
    body = await upload.read()
    scales: list[LoraScale] = states.json_of(body, list[LoraScale])
    try:
        call.model.engine.set_lora_scales({one.id: one.scale for one in scales})
    except RequestError as error:
        raise renamed(error, {"scales": "id"}) from None
    return properties.Success()


OPERATIONS: Final[list[Operation]] = [
    Operation(
        method="GET", path="/lora-adapters", handler=list_adapters, model="named", tag=_TAG,
        error_body=error_body, failure=Failure,
        reply=list[Adapter], summary="LoRA adapters and their scales.",
    ),
    Operation(
        method="POST", path="/lora-adapters", handler=set_scales, model="named", tag=_TAG,
        error_body=error_body, failure=Failure, body=Upload,
        upload=OneOf((list[LoraScale],)), reply=properties.Success,
        summary="Scales of LoRA adapters for requests that do not say.",
    ),
]  # fmt: skip
