"""Bodies of OpenAI's API as neutral requests, and facts as its replies. Pure."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast

import numpy as np
import pybase64
from msgspec import UNSET
from numpy.typing import NDArray

from kqview.chat.tool_format import object_of, objects_of
from kqview.chat.turn import Reading
from kqview.engine import Engine
from kqview.errors import RequestError
from kqview.server.api.openai import schema
from kqview.server.api.wire.attention_field import ATTENTION_NAMES, attention_of, keeps
from kqview.server.api.wire.chat_work import WHOLE_CONTEXT, ChatRequest, TokenCounts, prepare
from kqview.server.api.wire.fields import MOST_LOGPROBS
from kqview.server.api.wire.llama_fields import (
    first,
    max_tokens_of,
    n_samples_of,
    names_of,
    options_of,
    reasoning_budget_of,
    sampling_of,
)
from kqview.server.api.wire.reasoning_cap import budget_of, cap_of_texts
from kqview.server.errors import renamed
from kqview.server.models.request import GenerateRequest
from kqview.server.models.row_cache import Rows
from kqview.server.settings import Settings
from kqview.types import ModelInfo

Prompt = str | list[int]
ToolChoice = Literal["auto", "none", "required"]

_MOST_SHOWN: Final = 80  # characters of a value that a message quotes
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request, and what its reply shows of it.

    Attributes:
        request: For the service.
        model: Name of the model in the reply.
        reading: How answers of a chat are read; None for completions.
        keeps: Whether attention is kept for ``GET /v1/attention/{id}/{n}`` instead of sent.
        is_prefill: Whether only the prompt is evaluated: the one token that comes is not shown.
        has_usage: Whether a stream ends with the usage.
        has_timings: Whether each chunk of a stream has timings.
        has_progress: Whether a stream begins with the progress of the prompt.
        shown_prompt: Text of the prompt for ``__verbose``; None without.
        echoes: Text of each prompt, which precedes the generated one; () without ``echo``.
        echo_logprobs: Number of most probable tokens to show with those of the prompt; None if it
            is not shown, or without logprobs.
    """

    request: GenerateRequest
    model: str
    reading: Reading | None
    keeps: bool
    is_prefill: bool
    has_usage: bool
    has_timings: bool
    has_progress: bool
    shown_prompt: str | None = None
    echoes: Sequence[str] = ()
    echo_logprobs: int | None = None

    def echo(self, sample: int) -> str:
        """What precedes the text of a sample."""
        return self.echoes[sample // self.request.n_samples] if self.echoes else ""


def _plan(
    body: schema.GenerateFields,
    request: GenerateRequest,
    *,
    model: str,
    reading: Reading | None = None,
    echoes: Sequence[str] = (),
    echo_logprobs: int | None = None,
    shown_prompt: str | None = None,
) -> Plan:
    return Plan(
        request=request,
        model=body.model or model,
        reading=reading,
        keeps=keeps(body.attention),
        is_prefill=max_tokens_of(body) == 0,
        has_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        has_timings=bool(body.timings_per_token),
        has_progress=bool(body.return_progress),
        shown_prompt=shown_prompt,
        echoes=echoes,
        echo_logprobs=echo_logprobs,
    )


def _limit(body: schema.GenerateFields) -> int:
    n = max_tokens_of(body)
    return WHOLE_CONTEXT if n is None else max(n, 1)


# ---- chat completions


def chat_plan(
    body: schema.ChatBody, *, request_id: str, engine: Engine, settings: Settings, model: str
) -> Plan:
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
    chat = chat_of(body, request_id=request_id, tokenize=_plain(engine), settings=settings)
    work = prepare(engine, chat)
    is_verbose = first(body.verbose, settings.verbose)
    shown = engine.detokenize(cast("list[int]", work.request.prompt)) if is_verbose else None
    return _plan(body, work.request, model=model, reading=work.reading, shown_prompt=shown)


def chat_of(
    body: schema.ChatBody,
    *,
    request_id: str,
    tokenize: Callable[[str], Sequence[int]],
    settings: Settings,
) -> ChatRequest:
    """The neutral chat in *body*; *tokenize* as in `sampling_of`, raises as `chat_plan`."""
    continues = _continues(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise RequestError(
            "add_generation_prompt and continue_final_message are both true, but an answer either "
            "begins or goes on; send one of them",
            parameter="continue_final_message",
        )
    tool_choice, tool_name, allowed = _tool_choice(body.tool_choice)
    wanted_format = _response_schema(body.response_format)
    json_schema = first(wanted_format, body.json_schema)
    schema_name = "json_schema" if wanted_format is None else "response_format"
    sampling = sampling_of(body, tokenize=tokenize, top_logprobs=_chat_logprobs(body))
    # `prepare` decides how the answer is held to its schema.
    sampling = replace(sampling, json_schema=None)
    return ChatRequest(
        messages=body.messages,
        sampling=sampling,
        request_id=request_id,
        max_tokens=_limit(body),
        tools=body.tools or (),
        tool_choice=tool_choice,
        tool_name=tool_name,
        allowed_tools=allowed,
        parallel_calls=body.parallel_tool_calls is not False and tool_name is None,
        schema={"type": "object"} if json_schema == {} else json_schema,
        reasoning=body.reasoning_format or settings.reasoning_format,
        reasoning_budget=budget_of(reasoning_budget_of(body), sampling, settings),
        template_options=_template_options(body),
        adds_generation_prompt=body.add_generation_prompt is not False,
        continues=continues,
        n_samples=n_samples_of(body),
        attention=attention_of(body.attention, settings),
        names={**names_of(body), **_NAMES, "json_schema": schema_name},
        options=options_of(body, settings),
    )


def _plain(engine: Engine) -> Callable[[str], Sequence[int]]:
    return lambda text: engine.tokenize(text, add_special=False, parse_special=False)


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
            f"tool_choice is {_shown(choice)}; send auto, none, required, or "
            '{"type": "function", "function": {"name": ...}}',
            parameter="tool_choice",
        )
    return "required", name, None


def _allowed_tools(given: dict[str, Any]) -> tuple[ToolChoice, None, list[str]]:
    mode = given.get("mode")
    names = [object_of(tool.get("function")).get("name") for tool in objects_of(given.get("tools"))]
    if mode not in ("auto", "required") or not names or not all(type(n) is str for n in names):
        raise RequestError(
            f"tool_choice.allowed_tools is {_shown(given)}; send "
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
            f"response_format.type is {_shown(kind)}; send text, json_object or json_schema",
            parameter="response_format",
        )
    holder = response_format if kind == "json_object" else response_format.get("json_schema")
    given = object_of(holder).get("schema", {})
    if not isinstance(given, dict):
        raise RequestError(
            f"the schema of response_format is {_shown(given)}; send a JSON schema, an object",
            parameter="response_format",
        )
    schema = cast("dict[str, Any]", given)
    return schema or {"type": "object"} if kind == "json_object" else schema


def _chat_logprobs(body: schema.ChatBody) -> int | None:
    """How many of the most probable tokens to report, None for no logprobs."""
    n = body.top_logprobs
    if not body.logprobs:
        if n:
            raise RequestError(
                f"top_logprobs is {n}, but logprobs is not true; send both",
                parameter="top_logprobs",
            )
        return None
    return _n_logprobs("top_logprobs", first(n, 0))


def _n_logprobs(name: str, n: int) -> int:
    if not 0 <= n <= MOST_LOGPROBS:
        raise RequestError(f"{name} is {n}, allowed are 0 to {MOST_LOGPROBS}", parameter=name)
    return n


def _template_options(body: schema.ChatBody) -> dict[str, Any]:
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort == "none":
        options.setdefault("enable_thinking", False)
    elif body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    return options


def _continues(value: bool | str | None) -> bool | None:
    return None if value is None else value not in (False, "", "none", "false")


# ---- completions


def completion_plan(
    body: schema.CompletionBody, *, request_id: str, engine: Engine, settings: Settings, model: str
) -> Plan:
    """What a completion asks for; any thread. Arguments and errors as in `chat_plan`."""
    if body.suffix:
        raise RequestError(
            f"suffix is {_shown(body.suffix)}, but text is only generated at the end; leave it out",
            parameter="suffix",
        )
    n_samples = n_samples_of(body)
    if body.best_of is not None and body.best_of != n_samples:
        raise RequestError(
            f"best_of is {body.best_of} and n is {n_samples}; this server returns every text that "
            "it generates, so leave best_of out",
            parameter="best_of",
        )
    n_logprobs = _text_logprobs(body)
    prompts = prompts_of("prompt", body.prompt)
    sampling = sampling_of(body, tokenize=_plain(engine), top_logprobs=n_logprobs)
    budget = reasoning_budget_of(body)
    names = {**names_of(body), **_NAMES}
    ends = [] if budget is None else [_text_of(prompt, engine) for prompt in prompts]
    request = GenerateRequest(
        prompt=prompts[0],
        more_prompts=prompts[1:],
        max_tokens=_limit(body),
        sampling=sampling,
        request_id=request_id,
        attention=attention_of(body.attention, settings),
        n_samples=n_samples,
        names=names,
        forcing=cap_of_texts(budget, ends, sampling, max_tokens=_limit(body), names=names),
        **options_of(body, settings),
    )
    echoes = [_text_of(prompt, engine) for prompt in prompts] if body.echo else []
    n_shown = n_logprobs if body.echo else None
    return _plan(body, request, model=model, echoes=echoes, echo_logprobs=n_shown)


def _text_of(prompt: Prompt, engine: Engine) -> str:
    try:
        return prompt if isinstance(prompt, str) else engine.detokenize(prompt)
    except RequestError as error:
        raise renamed(error, {"ids": "prompt"}) from None


def _text_logprobs(body: schema.CompletionBody) -> int | None:
    if body.logprobs is None or body.logprobs is False:
        return None
    return _n_logprobs("logprobs", int(body.logprobs))


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


_NAMES: Final = {"prompt": "prompt", **ATTENTION_NAMES}


# ---- attention that is kept


def kept_attention(name: str, rows: Rows) -> schema.KeptAttention:
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


def status_of(state: str, progress: float) -> schema.ModelStatus:
    """Whether a model is loaded, in the words of llama.cpp's router."""
    return schema.ModelStatus(
        value="unloaded" if state == "failed" else state,
        failed=True if state == "failed" else UNSET,
        progress=progress if state == "loading" else UNSET,
    )


def model_of(
    info: ModelInfo | None,
    *,
    name: str,
    aliases: Sequence[str],
    n_ctx: int,
    status: schema.ModelStatus,
    created: int,
) -> schema.Model:
    """A model; *info* is None if it is not loaded."""
    meta = None
    if info is not None:
        meta = schema.ModelMeta(
            n_vocab=info.n_vocab,
            n_ctx=n_ctx,
            n_ctx_train=info.n_ctx_train,
            n_embd=info.n_embd,
            n_params=info.n_params,
            size=info.size_bytes,
            ftype=info.file_type,
            architecture=info.architecture,
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


def usage_of(counts: TokenCounts, *, is_prefill: bool) -> schema.Usage:
    """Tokens of a request; the one token of a request for none does not count."""
    completion = 0 if is_prefill else counts.completion
    return schema.Usage(
        prompt_tokens=counts.prompt,
        completion_tokens=completion,
        total_tokens=counts.prompt + completion,
        prompt_tokens_details=schema.PromptDetails(counts.cached),
    )


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
