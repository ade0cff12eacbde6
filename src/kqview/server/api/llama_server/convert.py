"""Bodies of llama.cpp's server as neutral requests, and results as its replies. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kqview.engine_options import MTP, PROMPT_LOOKUP
from kqview.errors import RequestError
from kqview.server.api.llama_server import schema
from kqview.server.api.wire.chat import ChatRequest, allowed_template
from kqview.server.api.wire.fields import LlamaFields, active_samplers, first
from kqview.server.models.texts import room_of
from kqview.server.settings import Settings
from kqview.types import Sampling
from kqview.types.sampling import OPTIONS

_SHOWN: Final = [
    name
    for name, row in OPTIONS.items()
    if row.is_plain and name not in ("top_logprobs", "min_tokens")  # it has no such
]
# llama.cpp's names for what guesses tokens; a file is a smaller model.
_DRAFTERS: Final = {None: "none", PROMPT_LOOKUP: "ngram-simple", MTP: "draft-mtp"}


# ---- a completion


def generation_settings(
    body: LlamaFields,
    sampling: Sampling,
    n_predict: int,
    *,
    drafter: str | None,
    is_short: bool = False,
    ends: Sequence[int] = (),
) -> dict[str, Any]:
    """How a completion is generated, under llama.cpp's names; what kqview lacks is off.

    Args:
        body: The request.
        sampling: What `sampling_of` made of it.
        n_predict: Most tokens.
        drafter: What guesses tokens, as `Engine.draft`.
        is_short: Leave out what may be long: texts and biases.
        ends: Ids that end a text, which ``ignore_eos`` bans.
    """
    settings: dict[str, Any] = {
        **{name: getattr(sampling, name) for name in _SHOWN},
        "seed": first(sampling.seed, 2**32 - 1),
        "top_n_sigma": sampling.top_n_sigma or -1.0,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": first(body.n_keep, 0),
        "n_discard": first(body.n_discard, 0),
        "stream": bool(body.stream),
        "n_probs": first(sampling.top_logprobs, 0),
        "samplers": active_samplers(body),
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "generation_prompt": "",
        "speculative.types": _DRAFTERS.get(drafter, "draft-simple"),
        "timings_per_token": bool(body.timings_per_token),
        "backend_sampling": False,
        "lora": [{"id": one.id, "scale": one.scale} for one in body.lora or ()],
    }
    if is_short:
        return settings
    banned = dict.fromkeys(ends if sampling.ignore_eos else (), -math.inf)
    biases = {**banned, **sampling.logit_bias}
    return {
        **settings,
        "dry_sequence_breakers": sampling.dry_sequence_breakers,
        "stop": sampling.stop,
        "logit_bias": [{"bias": bias, "token": id_} for id_, bias in biases.items()],
        "grammar": sampling.grammar or "",
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
    }


# ---- chats without an answer


def chat_of(body: schema.TemplateBody, settings: Settings) -> ChatRequest:
    """The chat whose prompt is wanted.

    Raises:
        RequestError: There are no messages, or a chat_template, which is off.
    """
    if body.messages is None:
        raise RequestError("messages is missing; send a list of them", parameter="messages")
    return ChatRequest(
        messages=body.messages,
        tools=body.tools or (),
        template_options=body.chat_template_kwargs or {},
        chat_template=allowed_template(body.chat_template, settings),
        adds_generation_prompt=body.add_generation_prompt is not False,
    )


# ---- infill

_FIM_WINDOW: Final = 2048  # tokens around the gap, as llama.cpp's server takes of a batch


def extra_texts(body: schema.InfillBody, fim: Mapping[str, int]) -> list[int | str]:
    """What precedes the code: ids, and texts without special tokens."""
    parts: list[int | str] = []
    if "repository" in fim:
        parts += [fim["repository"], "myproject\n"]
    for extra in body.input_extra or ():
        if "file" in fim:
            parts += [fim["file"], f"{extra.filename}\n"]
        else:
            parts.append("\n\n--- snippet ---\n\n")
        parts.append(extra.text)
    if "file" in fim:
        parts += [fim["file"], "filename\n"]
    return parts


def infill_ids(
    fim: Mapping[str, int],
    *,
    prefix: Sequence[int],
    suffix: Sequence[int],
    begun: Sequence[int],
    extra: Sequence[int],
    bos: Sequence[int],
    n_ctx: int,
    n_predict: int,
) -> list[int]:
    """The prompt that asks for what is between *prefix* and *suffix*; as much of them as fits.

    Args:
        fim: Ids that announce the parts, `ModelInfo.fim_token_ids`.
        prefix: Code before the gap; its end is kept.
        suffix: Code after the gap; its beginning is kept.
        begun: What the gap begins with.
        extra: Other code; its end is kept.
        bos: Ids at the beginning.
        n_ctx: Tokens that a slot holds.
        n_predict: Tokens that shall still fit, if they are at most half of *n_ctx*.
    """
    n_fixed = len(bos) + len(begun) + 3
    n_room = max(0, room_of(n_ctx, n_predict) - n_fixed)
    n_window = min(_FIM_WINDOW, n_room)
    n_suffix = min(len(suffix), max(n_window // 4, n_window - len(prefix)))
    n_prefix = min(len(prefix), n_window - n_suffix)
    n_extra = min(len(extra), n_room - n_prefix - n_suffix)
    return [
        *extra[len(extra) - n_extra :],
        *bos,
        fim["prefix"],
        *prefix[len(prefix) - n_prefix :],
        *begun,
        fim["suffix"],
        *suffix[:n_suffix],
        fim["middle"],
    ]
