"""Bodies of OpenAI's API as neutral requests, and facts as its replies. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, cast

import numpy as np
import pybase64
from msgspec import UNSET
from numpy.typing import NDArray

from kqview.chat.tool_format import object_of, objects_of
from kqview.chat.turn import Reading
from kqview.engine import Engine
from kqview.errors import RequestError, shown
from kqview.server.api.openai import schema
from kqview.server.api.wire.attention import ATTENTION_NAMES, attention_of
from kqview.server.api.wire.chat import WHOLE_CONTEXT, ChatRequest, prepare, with_fields
from kqview.server.api.wire.fields import (
    MOST_LOGPROBS,
    first,
    max_tokens_of,
    n_samples_of,
    names_of,
    options_of,
    reasoning_budget_of,
    sampling_of,
)
from kqview.server.api.wire.reasoning_cap import cap_of_texts
from kqview.server.errors import renamed
from kqview.server.models.row_cache import CachedRows
from kqview.server.models.run import GenerateRequest
from kqview.server.settings import Settings
from kqview.types import ModelInfo

Prompt = str | list[int]
ToolChoice = Literal["auto", "none", "required"]

_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionPlan:
    """A request, and what its reply shows of it.

    Attributes:
        body: As it was sent.
        request: For the service.
        model: Name of the model in the reply.
        is_prefill: Whether only the prompt is evaluated: the one token that comes is not shown.
        reading: How answers of a chat are read; None for completions.
        shown_prompt: Text of the prompt for ``__verbose``; None without.
        echoes: Text of each prompt, which precedes the generated one; () without ``echo``.
        echo_logprobs: Number of most probable tokens to show with those of the prompt; None if it
            is not shown, or without logprobs.
    """

    body: schema.GenerateFields
    request: GenerateRequest
    model: str
    is_prefill: bool
    reading: Reading | None = None
    shown_prompt: str | None = None
    echoes: Sequence[str] = ()
    echo_logprobs: int | None = None

    def echo(self, sample: int) -> str:
        """What precedes the text of a sample."""
        return self.echoes[sample // self.request.n_samples] if self.echoes else ""


# ---- chat completions


def chat_plan(
    body: schema.ChatBody, *, request_id: str, engine: Engine, settings: Settings, model: str
) -> CompletionPlan:
    """What a chat completion asks for; any thread, because a template may take seconds.

    Args:
        body: The request.
        request_id: Name of the reply.
        engine: The engine that will answer.
        settings: For the server's defaults.
        model: Name of the model if the request gives none.

    Raises:
        RequestError: Or one of its kinds: it cannot work.
    """
    chat = chat_of(body, request_id=request_id, engine=engine, settings=settings)
    is_prefill = chat.max_tokens == 0
    work = prepare(engine, replace(chat, max_tokens=1) if is_prefill else chat)
    prompt = None
    if first(body.verbose, settings.verbose):
        prompt = engine.detokenize(cast("list[int]", work.request.prompt))
    return CompletionPlan(
        body=body, request=work.request, model=body.model or model,
        is_prefill=is_prefill, reading=work.reading, shown_prompt=prompt,
    )  # fmt: skip


def chat_of(
    body: schema.ChatBody, *, request_id: str, engine: Engine, settings: Settings
) -> ChatRequest:
    """The neutral chat in *body*; as `chat_plan`."""
    continues = body.continue_final_message
    if continues is not None:
        continues = continues not in (False, "", "none", "false")
    if continues and body.add_generation_prompt:
        raise RequestError(
            "add_generation_prompt and continue_final_message are both true, but an answer either "
            "begins or goes on; send one of them",
            parameter="continue_final_message",
        )
    if not body.logprobs and body.top_logprobs:
        raise RequestError(
            f"top_logprobs is {body.top_logprobs}, but logprobs is not true; send both",
            parameter="top_logprobs",
        )
    n_logprobs = first(body.top_logprobs, 0) if body.logprobs else None
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort == "none":
        options.setdefault("enable_thinking", False)
    elif body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    tool_choice, tool_name, allowed = _tool_choice(body.tool_choice)
    chat = ChatRequest(
        messages=body.messages,
        request_id=request_id,
        tools=body.tools or (),
        tool_choice=tool_choice,
        tool_name=tool_name,
        allowed_tools=allowed,
        parallel_calls=body.parallel_tool_calls is not False and tool_name is None,
        schema=_response_schema(body.response_format),
        reasoning=body.reasoning_format or settings.reasoning_format,
        template_options=options,
        adds_generation_prompt=body.add_generation_prompt is not False,
        continues=continues,
        n_samples=n_samples_of(body),
    )
    return with_fields(
        chat, body, body.attention, engine=engine, settings=settings,
        names={"prompt": "prompt", "json_schema": "response_format"},
        top_logprobs=_n_logprobs("top_logprobs", n_logprobs),
    )  # fmt: skip


def _n_logprobs(name: str, n: int | None) -> int | None:
    if n is not None and not 0 <= n <= MOST_LOGPROBS:
        raise RequestError(f"{name} is {n}, allowed are 0 to {MOST_LOGPROBS}", parameter=name)
    return n


def _tool_choice(
    choice: str | dict[str, Any] | None,
) -> tuple[ToolChoice, str | None, list[str] | None]:
    """The choice, the function that it names, and the only ones that it allows."""
    if choice is None:
        return "auto", None, None
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        return choice, None, None
    given = object_of(choice)
    if given.get("type") == "allowed_tools":
        return _allowed_tools(object_of(given.get("allowed_tools")))
    name = object_of(given.get("function")).get("name")
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice is {shown(choice)}; send auto, none, required, or "
            '{"type": "function", "function": {"name": ...}}',
            parameter="tool_choice",
        )
    return "required", name, None


def _allowed_tools(given: dict[str, Any]) -> tuple[ToolChoice, None, list[str]]:
    mode = given.get("mode")
    names = [object_of(tool.get("function")).get("name") for tool in objects_of(given.get("tools"))]
    if mode not in ("auto", "required") or not names or not all(type(n) is str for n in names):
        raise RequestError(
            f"tool_choice.allowed_tools is {shown(given)}; send "
            '{"mode": "auto" or "required", "tools": [{"type": "function", "function": '
            '{"name": ...}}, ...]}',
            parameter="tool_choice",
        )
    return mode, None, cast("list[str]", names)


def _response_schema(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """The JSON schema that the answer has to follow, None for text."""
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind in (None, "text"):
        return None
    if kind not in ("json_object", "json_schema"):
        raise RequestError(
            f"response_format.type is {shown(kind)}; send text, json_object or json_schema",
            parameter="response_format",
        )
    holder = response_format if kind == "json_object" else response_format.get("json_schema")
    given = object_of(holder).get("schema", {})
    if not isinstance(given, dict):
        raise RequestError(
            f"the schema of response_format is {shown(given)}; send a JSON schema, an object",
            parameter="response_format",
        )
    schema = cast("dict[str, Any]", given)
    return schema or {"type": "object"} if kind == "json_object" else schema


# ---- completions


def completion_plan(
    body: schema.CompletionBody, *, request_id: str, engine: Engine, settings: Settings, model: str
) -> CompletionPlan:
    """What a completion asks for; any thread. Arguments and errors as in `chat_plan`."""
    if body.suffix:
        raise RequestError(
            f"suffix is {shown(body.suffix)}, but text is only generated at the end; leave it out",
            parameter="suffix",
        )
    n_samples = n_samples_of(body)
    if body.best_of is not None and body.best_of != n_samples:
        raise RequestError(
            f"best_of is {body.best_of} and n is {n_samples}; this server returns every text that "
            "it generates, so leave best_of out",
            parameter="best_of",
        )
    n_logprobs = None
    if body.logprobs is not None and body.logprobs is not False:
        n_logprobs = _n_logprobs("logprobs", int(body.logprobs))
    prompts = prompts_of("prompt", body.prompt)
    tokenize = partial(engine.tokenize, add_special=False, parse_special=False)
    sampling = sampling_of(body, tokenize=tokenize, top_logprobs=n_logprobs)
    n, budget = max_tokens_of(body), reasoning_budget_of(body)
    max_tokens = WHOLE_CONTEXT if n is None else max(n, 1)
    names = {**names_of(body), **ATTENTION_NAMES, "prompt": "prompt"}
    texts: list[str] = []
    if body.echo or budget is not None:
        try:
            texts = [p if isinstance(p, str) else engine.detokenize(p) for p in prompts]
        except RequestError as error:
            raise renamed(error, {"ids": "prompt"}) from None
    forcing = None
    if budget is not None:
        forcing = cap_of_texts(budget, texts, sampling, max_tokens=max_tokens, names=names)
    request = GenerateRequest(
        prompt=prompts[0],
        more_prompts=prompts[1:],
        max_tokens=max_tokens,
        sampling=sampling,
        request_id=request_id,
        attention=attention_of(body.attention, settings),
        n_samples=n_samples,
        names=names,
        forcing=forcing,
        **options_of(body, settings),
    )
    return CompletionPlan(
        body=body, request=request, model=body.model or model, is_prefill=n == 0,
        echoes=texts if body.echo else (), echo_logprobs=n_logprobs if body.echo else None,
    )  # fmt: skip


def prompts_of(name: str, value: object) -> list[Prompt]:
    """The texts or ids in *value*: one of them, or a list.

    Raises:
        RequestError: It is neither; the message calls it *name*.
    """
    if isinstance(value, str):
        return [value]
    items = cast("list[object]", value) if isinstance(value, list) else []
    if _are_ids(items):
        return [cast("list[int]", items)]
    prompts = [
        cast("Prompt", one)
        for one in items
        if isinstance(one, str) or (isinstance(one, list) and _are_ids(cast("list[object]", one)))
    ]
    if not prompts or len(prompts) < len(items):
        raise RequestError(
            f"{name} is neither a text nor a list of ids, nor a list of these; correct it",
            parameter=name,
        )
    return prompts


def _are_ids(items: Sequence[object]) -> bool:
    return bool(items) and all(type(one) is int for one in items)


# ---- attention that is kept


def kept_attention(name: str, rows: CachedRows) -> schema.KeptAttention:
    """The list of rows that are kept of a reply."""
    choices = [
        schema.KeptChoice(
            index=i,
            n_left_out=rows.n_left_out[i],
            rows=[
                schema.KeptRow(n=n, token_id=row.token_id, text=row.text, shape=row.shape)
                for n, row in rows.shown(i)
            ],
        )
        for i in range(len(rows.choices))
    ]
    wanted = rows.wanted
    return schema.KeptAttention(
        id=name, values=wanted.kind, format=wanted.format, dtype=wanted.dtype, layers=rows.layers,
        choices=choices,
    )  # fmt: skip


def byte_range(header: str, n_bytes: int) -> tuple[int, int] | None:
    """Start and end of what a ``Range`` header asks for; None for everything.

    Other units and several ranges at once are everything, as RFC 9110 allows.

    Raises:
        IndexError: There is no such byte.
    """
    asked = _RANGE.fullmatch(header.strip())
    if asked is None or asked.group(1, 2) == ("", ""):
        return None
    first_, last = asked.group(1, 2)
    if not first_:  # the last bytes
        start, end = max(0, n_bytes - int(last)), n_bytes
    else:
        start, end = int(first_), min(int(last) + 1 if last else n_bytes, n_bytes)
        if last and int(last) < start:
            return None
    if start >= end:
        raise IndexError
    return start, end


# ---- models and embeddings


def model_of(
    info: ModelInfo | None,
    *,
    name: str,
    aliases: Sequence[str],
    n_ctx: int,
    state: str,
    progress: float,
    created: int,
) -> schema.Model:
    """A model; *info* is None if it is not loaded, *state* in the words of llama.cpp's router."""
    meta = None
    if info is not None:
        meta = schema.ModelMeta(
            n_vocab=info.n_vocab, n_ctx=n_ctx, n_ctx_train=info.n_ctx_train, n_embd=info.n_embd,
            n_params=info.n_params, size=info.size_bytes, ftype=info.file_type,
            architecture=info.architecture,
        )  # fmt: skip
    status = schema.ModelStatus(
        value="unloaded" if state == "failed" else state,
        failed=True if state == "failed" else UNSET,
        progress=progress if state == "loading" else UNSET,
    )
    return schema.Model(
        id=name, created=created, aliases=list(aliases), tags=[], meta=meta, status=status
    )


def models_of(models: Sequence[schema.Model]) -> schema.Models:
    """The list of *models*, in the forms of OpenAI and Ollama."""
    return schema.Models(data=[*models], models=list(map(_in_ollamas_form, models)))


def _in_ollamas_form(model: schema.Model) -> schema.Object:
    family, kind = (model.meta.architecture, model.meta.ftype) if model.meta else ("", "")
    return {
        "name": model.id, "model": model.id, "modified_at": "", "size": "", "digest": "",
        "type": "model", "description": "", "tags": [""], "capabilities": ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "", "format": "gguf", "family": family,
            "families": [family], "parameter_size": "", "quantization_level": kind,
        },
    }  # fmt: skip


def embeddings_of(
    vectors: NDArray[np.float32], *, n_tokens: int, model: str, body: schema.EmbeddingsBody
) -> schema.Embeddings:
    """The reply with *vectors*, ``(n_texts, n_embd)``, each of length 1.

    With ``dimensions`` the vectors are cut and scaled to length 1 again, as OpenAI does.

    Raises:
        RequestError: ``dimensions`` is out of range.
    """
    n = body.dimensions
    if n is not None:
        if not 1 <= n <= vectors.shape[-1]:
            raise RequestError(
                f"dimensions is {n}, this model's vectors have {vectors.shape[-1]}; ask for fewer",
                parameter="dimensions",
            )
        vectors = vectors[:, :n].copy()
        lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
        vectors /= np.where(lengths > 0, lengths, 1)
    rows = np.ascontiguousarray(vectors, "<f4")
    is_base64 = body.encoding_format == "base64"
    data = [
        schema.Embedding(
            index=i,
            embedding=pybase64.b64encode(row.tobytes()).decode() if is_base64 else row.tolist(),
        )
        for i, row in enumerate(rows)
    ]
    usage = schema.EmbeddingUsage(n_tokens, n_tokens)
    return schema.Embeddings(model=model, data=data, usage=usage)
