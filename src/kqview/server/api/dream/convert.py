"""Dream bodies as neutral requests, and facts of the model as bodies. Pure: nothing here waits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from kqview.errors import InvalidToken, OutOfMemory, PoolExhausted, PromptTooLong, RequestError
from kqview.server.api.dream import schema
from kqview.server.api.dream.pruning import SentenceScores, check_sentences, watched
from kqview.server.api.wire.attention_protocol import (
    RowFacts,
    asks_for_logprobs,
    attention_of,
    check_ids_fit,
    first,
    ignored_of,
    max_tokens_of,
    names_of,
    phrases_of,
    prompt_of,
    sampling_for,
)
from kqview.server.api.wire.mods_field import mods_of
from kqview.server.errors import Answer, TooLarge
from kqview.server.models.request import AttentionWanted, GenerateRequest
from kqview.server.settings import AttentionValues, Settings
from kqview.types import ModelInfo, PoolStats

VALUES: Final[AttentionValues] = "probs"
"""What rows hold if neither request nor settings say."""

_MIB: Final = 2**20


class ReplyTooLarge(TooLarge):
    """A reply that is not streamed would be too large; ask for less, or use the WebSocket."""

    def __init__(self, message: str, **figures: int) -> None:
        """Args: ``reply_bytes``, ``limit_bytes``, ``prompt_tokens``."""
        super().__init__(message)
        self.figures = figures


# ---- a request for text


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request, and what its client sees of it.

    Attributes:
        request: For the service; its attention is what is captured.
        facts: What the rows to send are, None for none.
        ignored: Names of fields without effect, which the reply tells.
        has_start: Whether a stream begins with an event that tells of the request.
        encoding: As asked for; None leaves short rows as lists of numbers.
        scores: Of the sentences to watch, None for none.
    """

    request: GenerateRequest
    facts: RowFacts | None
    encoding: schema.Encoding | None
    scores: SentenceScores | None
    ignored: Sequence[str] = ()
    has_start: bool = False

    @property
    def shown(self) -> AttentionWanted | None:
        """Attention to send, None for none."""
        return None if self.facts is None else self.facts.wanted


def plan_of(
    body: schema.DreamFields,
    *,
    request_id: str,
    model: ModelInfo,
    max_context: int,
    settings: Settings,
    control_token: Callable[[str], int | None],
    seed: int,
    unknown: Sequence[str] = (),
    always_logprob: bool = False,
) -> Plan:
    """What *body* asks for; ids and positions are checked against *model*.

    Args:
        body: The request.
        request_id: Its name if it gives none.
        model: The model that will answer.
        max_context: Longest prompt in tokens.
        settings: For the server's defaults.
        control_token: As in `sampling_for`, like *seed*.
        seed: Of a request that gives none.
        unknown: Names in the request that this dialect does not have.
        always_logprob: Whether tokens carry their logprob without being asked.

    Raises:
        PromptTooLong: ``input_ids`` is longer than *max_context*, or than the model's own.
        InvalidToken: An id is not in the vocabulary; the message names field and index.
        RequestError: Or one of its kinds: a value is out of its range.
    """
    prompt = prompt_of(body)
    n_prompt = None if isinstance(prompt, str) else len(prompt)
    if not isinstance(prompt, str):
        check_ids_fit(prompt, body, max_context, model.n_ctx_train)
    for name in ("input_ids", "stop_tokens", "banned_tokens", "banned_strings"):
        _check_ids(name, getattr(body, name) or (), model.n_vocab)
    sampling = sampling_for(body, control_token=control_token, seed=seed)
    if always_logprob and sampling.top_logprobs is None:
        sampling = replace(sampling, top_logprobs=0)
    shown = attention_of(body, settings, default=VALUES, asked=False)
    captured, scores = shown, None
    if body.sentences is not None:
        check_sentences(body.sentences, body.prune_below, n_prompt)
        captured = watched(shown)
        scores = SentenceScores(body.sentences, n_prompt or 1, body.prune_below)
    request = GenerateRequest(
        prompt=prompt,
        truncates=True,
        memory=body.memory or "",
        max_tokens=max_tokens_of(body),
        sampling=sampling,
        banned_phrases=phrases_of(body, control_token=control_token),
        request_id=body.request_id or request_id,
        shares_name=True,
        attention=captured,
        n_samples=first(body.num_samples, 1),
        key=body.genkey or "",
        max_context=body.max_context_length,
        keeps_logprobs=asks_for_logprobs(body),
        names=names_of(body),
        mods=mods_of(body.mods),
    )
    return Plan(
        request=request,
        facts=None if shown is None else RowFacts.of(shown, model),
        encoding=body.encoding,
        scores=scores,
        ignored=ignored_of(body, unknown, shown, of_attention=("encoding",)),
        has_start=bool(body.start_event),
    )


def _check_ids(name: str, ids: Sequence[int | str], n_vocab: int) -> None:
    for i, id_ in enumerate(ids):
        if isinstance(id_, int) and not 0 <= id_ < n_vocab:
            raise InvalidToken(
                f"{name}[{i}]: token ID {id_} not in vocabulary (vocab_size={n_vocab}); "
                "take ids from /api/v1/tokenize"
            )


def context_limit(body: schema.DreamFields, max_context: int) -> int:
    """Longest prompt in tokens: the server's *max_context*, or less if the client says so."""
    return min(max_context, body.max_context_length or max_context)


def asks_for_tokens(body: schema.GenerateBody) -> bool:
    """Whether the reply of a POST has this dialect's own fields."""
    return first(body.return_attention, body.output_attentions) is not None


def trims_stop(body: schema.GenerateBody) -> bool:
    """Whether the text ends before the stop sequence; with attention only if asked."""
    asks = bool(first(body.output_attentions, body.return_attention))
    return first(body.trim_stop, not asks)


def kobold_reason(reason: str) -> str:
    """A finish reason in one of the two words that KoboldAI's clients know."""
    return "length" if reason == "length" else "stop"


# ---- errors


def error_body(answer: Answer) -> dict[str, Any]:
    """The body of a failure, and its event on a WebSocket."""
    known = {"type": "error", "error": answer.message, "error_code": answer.code}
    return {**known, **answer.figures}


def shared_error_body(answer: Answer) -> dict[str, Any]:
    """`error_body` for routes that KoboldAI's clients call too: they read ``detail``."""
    kind = "server_error" if answer.status >= 500 else "bad_input"
    if answer.retry_after_s is not None:
        kind = "service_unavailable"
    return {**error_body(answer), "detail": {"msg": answer.message, "type": kind}}


def figures_of(
    error: BaseException,
    *,
    max_context: int,
    n_vocab: int,
    n_prompt: int | None,
    memory: Callable[[], Mapping[str, int]],
) -> dict[str, int]:
    """Numbers that belong to *error*.

    ``context_length`` is the longest prompt allowed, as in ``/api/v1/model/info`` unless the
    request said less.

    Args:
        error: What went wrong.
        max_context: Longest prompt in tokens.
        n_vocab: Size of the vocabulary.
        n_prompt: Tokens of the request's prompt, None if they were not counted.
        memory: Returns `memory_figures`; called only if memory was short.
    """
    counted = {} if n_prompt is None else {"prompt_tokens": n_prompt}
    if isinstance(error, PromptTooLong):
        return {"context_length": error.n_max or max_context, **counted}
    if isinstance(error, PoolExhausted | OutOfMemory):
        return {"context_length": max_context, **counted, **memory()}
    if isinstance(error, InvalidToken):
        return {"vocab_size": n_vocab}
    if isinstance(error, ReplyTooLarge):
        return error.figures
    return {}


def memory_figures(pool: PoolStats, devices: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Memory in MiB: of attention rows, and of all GPUs together if there are any.

    Args:
        pool: From the engine's stats.
        devices: From ``engine.system_info()``.
    """
    figures = {
        "attention_used_mb": pool.leased_bytes // _MIB,
        "attention_budget_mb": pool.budget_bytes // _MIB,
    }
    gpus = [device for device in devices if device["type"] in ("GPU", "IGPU")]
    if gpus:
        total = sum(device["memory_total_bytes"] for device in gpus)
        free = sum(device["memory_free_bytes"] for device in gpus)
        figures |= {"vram_used_mb": (total - free) // _MIB, "vram_total_mb": total // _MIB}
    return figures


# ---- the model

_INFO: Final[Mapping[str, Callable[[ModelInfo], Any]]] = MappingProxyType(
    {
        "architecture": lambda m: m.architecture or None,
        "vocab_size": lambda m: m.n_vocab,
        "num_layers": lambda m: m.n_layer,
        "num_attention_heads": lambda m: m.n_head,
        "num_key_value_heads": lambda m: m.n_head_kv,
        "hidden_size": lambda m: m.n_embd,
        "max_position_embeddings": lambda m: m.n_ctx_train,
        # llama.cpp has a default if the file is silent; this is what the file says.
        "rope_theta": lambda m: _number(m.metadata.get(f"{m.architecture}.rope.freq_base")),
        "bos_token_id": lambda m: m.bos_token_id,
        "eos_token_id": lambda m: m.eos_token_id,
        "chat_template": lambda m: m.chat_template,
        "torch_dtype": lambda m: None,  # a GGUF has no such thing: each tensor has its own type
        "attention_layers": lambda m: list(m.attention_layers),
    }
)
"""Field of ``/api/v1/model/info`` -> its source; `model_info_of` adds the others."""

_SPECIAL: Final = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
_MARKERS: Final = {"im_start_id": "<|im_start|>", "im_end_id": "<|im_end|>"}


def model_info_of(
    model: ModelInfo, *, name: str, max_context: int, control_token: Callable[[str], int | None]
) -> schema.ModelInfoReply:
    """HttpReply of ``GET /api/v1/model/info``.

    Args:
        model: The facts.
        name: What the server calls it.
        max_context: Longest prompt in tokens.
        control_token: The id of a text that is one token of the vocabulary, else None.
    """
    special: dict[str, str | int | None] = {
        key: model.special_tokens.get(role) for key, role in _SPECIAL.items()
    }
    for key, text in _MARKERS.items():
        found = control_token(text)
        if found is not None:
            special[key] = found
    return schema.ModelInfoReply(
        model_name=name,
        context_length=max_context,
        special_tokens=special,
        **{key: source(model) for key, source in _INFO.items()},
    )


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def load_options(body: schema.LoadBody) -> dict[str, int | None]:
    """Options of the engine to open.

    Raises:
        RequestError: ``model`` is empty, or a number is out of its range.
    """
    if not body.model:
        raise RequestError("model is empty; take a name from /api/v1/models")
    options = {"n_ctx": body.n_ctx, "n_slots": body.n_slots, "n_gpu_layers": body.n_gpu_layers}
    for name, value in options.items():
        least = -1 if name == "n_gpu_layers" else 1
        if value is not None and not least <= value < 2**31:
            raise RequestError(f"{name} is {value}, the least is {least}")
    return options
