"""Flags of llama.cpp's server, written as those of ``kqview serve``. Pure, but for key files.

So that a command line works when the binary is swapped. Flags without a counterpart that change
neither text nor interface are left out and named; others stay, and ``kqview serve`` refuses them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from kqview.errors import RequestError

_AUTO_SLOTS: Final = 4  # what llama.cpp's server opens if it may choose

# One value, taken as it is.
_RENAMED: Final[Mapping[str, str]] = {
    "-m": "--model",
    "-t": "--threads",
    "-to": "--idle-timeout-s",
    "--timeout": "--idle-timeout-s",
    "-ub": "--ubatch-size",
    "-fa": "--flash-attn",
    "-ctk": "--kv-type",
    "--cache-type-k": "--kv-type",
    "--ssl-key-file": "--ssl-keyfile",
    "--ssl-cert-file": "--ssl-certfile",
}
# Several values between commas; ours are repeated.
_LISTS: Final[Mapping[str, str]] = {
    "-a": "--alias",
    "--alias": "--alias",
    "--api-key": "--api-key",
    "--cors-origins": "--cors-origin",
    "--lora": "--lora",
    "--lora-scaled": "--lora",
}
# How tokens are chosen if a request does not say.
_SAMPLING: Final[Mapping[str, str]] = {
    "--temp": "temperature", "--temperature": "temperature", "--top-k": "top_k",
    "--top-nsigma": "top_n_sigma", "--top-n-sigma": "top_n_sigma",
    "--dynatemp-range": "dynatemp_range", "--dynatemp-exp": "dynatemp_exponent",
    "--top-p": "top_p", "--min-p": "min_p", "--typical": "typical_p", "--typical-p": "typical_p",
    "--xtc-probability": "xtc_probability", "--xtc-threshold": "xtc_threshold",
    "--repeat-last-n": "repeat_last_n", "--repeat-penalty": "repeat_penalty",
    "--presence-penalty": "presence_penalty", "--frequency-penalty": "frequency_penalty",
    "--dry-multiplier": "dry_multiplier", "--dry-base": "dry_base",
    "--dry-allowed-length": "dry_allowed_length", "--dry-penalty-last-n": "dry_penalty_last_n",
    "--mirostat": "mirostat", "--mirostat-lr": "mirostat_eta", "--mirostat-ent": "mirostat_tau",
    "-s": "seed", "--seed": "seed",
}  # fmt: skip
_MOST_TOKENS: Final = ("-n", "--predict", "--n-predict")
_LAYERS: Final = ("-ngl", "--gpu-layers", "--n-gpu-layers", "--ngl")
_SLOTS: Final = ("-np", "--parallel")
_CONTEXT: Final = ("-c", "--ctx-size")
_V_TYPE: Final = ("-ctv", "--cache-type-v")
_IGNORED: Final = frozenset(
    {
        "--metrics", "--jinja", "-cb", "--cont-batching", "-nocb", "--no-cont-batching", "--mlock",
        "--mmap", "--no-mmap", "--warmup", "--no-warmup", "--perf", "--no-perf", "--webui",
        "--no-webui", "--ui", "--no-ui", "-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified",
        "--swa-full", "--log-disable", "-v", "--verbose", "--log-verbose", "--log-prefix",
        "--no-log-prefix", "--log-timestamps", "--no-log-timestamps", "--offline", "--cache-prompt",
        "--no-cache-prompt", "--cache-idle-slots", "--no-cache-idle-slots", "--no-context-shift",
        "--repack", "-nr", "--no-repack", "--op-offload", "--no-op-offload", "--embedding",
        "--embeddings", "-kvo", "--kv-offload", "--no-mmproj", "--reuse-port", "--escape", "-e",
    }
)  # fmt: skip
_IGNORED_WITH_VALUE: Final = frozenset(
    {
        "-tb", "--threads-batch", "--threads-http", "-b", "--batch-size", "--prio", "--prio-batch",
        "--poll", "--poll-batch", "-lm", "--load-mode", "--numa", "--log-file", "--log-colors",
        "-lv", "--verbosity", "--log-verbosity", "-cram", "--cache-ram", "-ctxcp",
        "--ctx-checkpoints", "--swa-checkpoints", "--cache-reuse", "-fit", "--fit", "-fitt",
        "--fit-target", "-fitc", "--fit-ctx", "--path", "--sse-ping-interval", "-sps",
        "--slot-prompt-similarity", "--reasoning-format", "-dt", "--defrag-thold",
    }
)  # fmt: skip


def translated(words: Sequence[str], note: Callable[[str], object]) -> list[str]:
    """*words* with llama-server's flags written as ours; *note* is told which are left out.

    Raises:
        RequestError: A value cannot be used, or a file of keys cannot be read.
    """
    flags = list(_flags(words))
    n_slots = next(
        (_number(name, value) for name, value in reversed(flags) if name in _SLOTS), None
    )
    found: list[str] = []
    ignored: list[str] = []
    kv_type = next((value for name, value in flags if name in ("-ctk", "--cache-type-k")), "f16")
    for name, value in flags:
        if name in _IGNORED or name in _IGNORED_WITH_VALUE:
            ignored.append(name)
        elif name in _V_TYPE:
            if value != kv_type:
                raise RequestError(
                    f"{name} is {value} and keys are {kv_type}; use one type for both"
                )
        elif name != "--slots" or value is not None:
            found += _written(name, value, n_slots)
    if ignored:
        note(f"flags of llama-server without effect here: {' '.join(dict.fromkeys(ignored))}")
    return found


def _written(name: str, value: str | None, n_slots: int | None) -> list[str]:
    if name in ("--rerank", "--reranking"):
        return ["--pooling", "rank"]
    if value is None:
        return [name]
    if name in _SLOTS:
        return ["--slots", str(_AUTO_SLOTS if n_slots == -1 else n_slots)]
    if name in _CONTEXT:
        # The context of all slots together, unless llama.cpp chooses how many there are.
        n_ctx = _number(name, value) // max(1, n_slots or 1)
        return ["--ctx", str(n_ctx)] if n_ctx else []
    if name in _LAYERS:
        return ["--ngl", "-1" if value in ("auto", "all") else value]
    if name in _SAMPLING:
        return (
            []
            if name in ("-s", "--seed") and value == "-1"
            else ["--sampling", f"{_SAMPLING[name]}={value}"]
        )
    if name in _MOST_TOKENS:
        return ["--max-tokens", value] if _number(name, value) > 0 else []
    if name == "--api-key-file":
        return [word for key in _keys_in(value) for word in ("--api-key", key)]
    if name in _LISTS:
        return [word for one in value.split(",") if one for word in (_LISTS[name], one)]
    return [_RENAMED.get(name, name), value]


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Flags and their values, None for those without; what is none of llama-server's, too."""
    rest = list(words)
    with_value = {
        *_RENAMED, *_LISTS, *_LAYERS, *_SLOTS, *_CONTEXT, *_V_TYPE, *_IGNORED_WITH_VALUE,
        *_SAMPLING, *_MOST_TOKENS, "--api-key-file",
    }  # fmt: skip
    while rest:
        name = rest.pop(0)
        name, equals, value = name.partition("=") if name.startswith("--") else (name, "", "")
        if equals:
            yield name, value
        elif name == "--slots":  # theirs has no value
            yield name, rest.pop(0) if rest and rest[0].lstrip("-").isdecimal() else None
        elif name in ("-fa", "--flash-attn"):  # a flag without a value in older versions
            yield "-fa", rest.pop(0) if rest and rest[0] in ("on", "off", "auto") else "on"
        elif name in with_value and rest:
            yield name, rest.pop(0)
        else:
            yield name, None


def _number(name: str, value: str | None) -> int:
    try:
        return int(value or "")
    except ValueError:
        raise RequestError(f"{name} is {value!r}; write a whole number") from None


def _keys_in(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--api-key-file {path} cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise RequestError(f"--api-key-file {path} has no keys; write one a line")
    return keys
