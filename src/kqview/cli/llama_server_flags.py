"""Flags of llama.cpp's server, written as those of ``kqview serve``.

So that a command line works when the binary is swapped, with its environment: a variable of
llama.cpp's server, such as LLAMA_ARG_CTX_SIZE, counts where neither its flag nor our own variable
is given. Flags without a counterpart that change neither text nor interface are left out and named;
those of what kqview lacks are refused by name; unknown ones stay for ``kqview serve`` to refuse.
Pure, but for files of keys and templates.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

from kqview import json_input
from kqview.errors import RequestError
from kqview.server.settings import Settings
from kqview.server.settings_table import rows_of

Flag = tuple[str, str | None]
"""A flag and its value, None without one."""

_AUTO_SLOTS: Final = 4  # what llama.cpp's server opens if it may choose

# One value, taken as it is.
_RENAMED: Final[Mapping[str, str]] = {
    "-m": "--model",
    "-t": "--threads",
    "-to": "--idle-timeout-s",
    "--timeout": "--idle-timeout-s",
    "-ub": "--ubatch-size",
    "-rea": "--reasoning",
    "-fa": "--flash-attn",
    "-ctk": "--kv-type",
    "--cache-type-k": "--kv-type",
    "--ssl-key-file": "--ssl-keyfile",
    "--ssl-cert-file": "--ssl-certfile",
}
_VERBOSE: Final = ("-v", "--log-verbose")
_UNIFIED: Final = ("-kvu", "--kv-unified")
# Several values between commas, as llama-server has them; our own lists take them as well.
_LISTS: Final[Mapping[str, str]] = {
    **{row.flag: row.flag for row in rows_of(Settings).values() if row.kind is tuple},
    "-a": "--alias",
    "--cors-origins": "--cors-origin",
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
_OFF_BELOW_ZERO: Final = frozenset({"-s", "--seed", "--top-nsigma", "--top-n-sigma"})
_MOST_TOKENS: Final = ("-n", "--predict", "--n-predict")
_LAYERS: Final = ("-ngl", "--gpu-layers", "--n-gpu-layers", "--ngl")
_SLOTS: Final = ("-np", "--parallel")
_CONTEXT: Final = ("-c", "--ctx-size")
_V_TYPE: Final = ("-ctv", "--cache-type-v")
_KWARGS: Final = "--chat-template-kwargs"
_EFFORT: Final = "--reasoning-effort"
# What llama-server takes for words of its flags.
_REASONING: Final[Mapping[str, str]] = {
    **dict.fromkeys(("on", "enabled", "true", "1"), "on"),
    **dict.fromkeys(("off", "disabled", "false", "0"), "off"),
    "-1": "auto",
}
_PRESERVE: Final = {"--reasoning-preserve": "true", "--no-reasoning-preserve": "false"}
_IGNORED: Final = frozenset(
    {
        "--metrics", "--jinja", "--no-jinja", "-cb", "--cont-batching", "-nocb",
        "--no-cont-batching", "--mlock",
        "--mmap", "--no-mmap", "--warmup", "--no-warmup", "--perf", "--no-perf", "--webui",
        "--no-webui", "--ui", "--no-ui", "-no-kvu", "--no-kv-unified",
        "--swa-full", "--log-disable", "--log-prefix",
        "--no-log-prefix", "--log-timestamps", "--no-log-timestamps", "--offline", "--cache-prompt",
        "--no-cache-prompt", "--cache-idle-slots", "--no-cache-idle-slots",
        "--repack", "-nr", "--no-repack", "--op-offload", "--no-op-offload", "--embedding",
        "--embeddings", "-kvo", "--kv-offload", "-nkvo", "--no-kv-offload", "--no-mmproj",
        "--mmproj-auto", "--no-mmproj-auto", "--mmproj-offload", "--no-mmproj-offload",
        "--reuse-port", "--escape", "-e", "--no-escape", "--no-host", "--log-jsonl",
        "--no-log-jsonl", "--check-tensors", "-bs", "--backend-sampling", "--cors-credentials",
        "--no-cors-credentials",
        "--prefill-assistant", "--models-autoload", "--no-models-autoload", "--no-agent", "-no-ag",
        "--no-spec-draft-backend-sampling", "--no-ui-mcp-proxy", "--no-webui-mcp-proxy",
        "--no-skip-chat-parsing",
    }
)  # fmt: skip
_IGNORED_WITH_VALUE: Final = frozenset(
    {
        "-tb", "--threads-batch", "--threads-http", "-b", "--batch-size", "--prio", "--prio-batch",
        "--poll", "--poll-batch", "-lm", "--load-mode", "--numa", "--log-file", "--log-colors",
        "-lv", "--verbosity", "--log-verbosity", "-cram", "--cache-ram", "-ctxcp",
        "--ctx-checkpoints", "--swa-checkpoints", "--cache-reuse", "-fit", "--fit", "-fitt",
        "--fit-target", "-fitc", "--fit-ctx", "--path", "--sse-ping-interval", "-sps",
        "--slot-prompt-similarity", "-dt", "--defrag-thold", "-C", "--cpu-mask", "-Cr",
        "--cpu-range", "--cpu-strict", "-Cb", "--cpu-mask-batch", "-Crb", "--cpu-range-batch",
        "--cpu-strict-batch", "-lzm", "--lazy-mode", "-cms", "--checkpoint-min-step", "--tags",
        "--cors-methods", "--cors-headers", "--ui-config", "--webui-config", "--ui-config-file",
        "--webui-config-file", "--models-max", "--sleep-idle-seconds", "--log-prompts-dir",
        "-hft", "--hf-token", "--image-min-tokens", "--image-max-tokens",
        "--mtmd-batch-max-tokens", "--video-fps", "--video-timestamp-interval",
        "--video-ffmpeg-dir",
    }
)  # fmt: skip


# What kqview lacks, and what to do. A name that ends with "-" is the beginning of several.
_LACKING: Final[Mapping[str, Sequence[str]]] = {
    "images and sound": ("-mm", "--mmproj", "-mmu", "--mmproj-url", "-mmdev", "--mmproj-device",
        "--media-path", "--vision-"),
    "speculative decoding": ("-md", "--model-draft", "-hfd", "-hfrd", "--hf-repo-draft", "-td",
        "--threads-draft", "-tbd", "--threads-batch-draft", "-Cd", "-Crd", "-Cbd",
        "--cpu-mask-draft",
        "--cpu-range-draft", "--cpu-strict-draft", "--prio-draft", "--poll-draft",
        "--cpu-mask-batch-draft", "--cpu-strict-batch-draft", "--prio-batch-draft",
        "--poll-batch-draft", "-otd", "--override-tensor-draft", "-cmoed", "--cpu-moe-draft",
        "-ncmoed", "--n-cpu-moe-draft", "--draft", "--draft-", "-devd", "--device-draft", "-ngld",
        "--gpu-layers-draft", "--n-gpu-layers-draft", "-ctkd", "--cache-type-k-draft", "-ctvd",
        "--cache-type-v-draft", "-lcs", "--lookup-cache-static", "-lcd", "--lookup-cache-dynamic",
        "--spec-"),
    "placing single layers and tensors": ("-dev", "--device", "--list-devices", "-ot",
        "--override-tensor", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "-ncffn", "--n-cpu-ffn",
        "-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu", "--rpc"),
    "changing a model while it is loaded": ("--rope-", "--yarn-", "--override-kv",
        "--control-vector", "--control-vector-", "--lora-init-without-apply"),
    "downloading by these names; use --hf OWNER/REPO/FILE": ("-mu", "--model-url", "-dr",
        "--docker-repo", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-cl", "--cache-list",
        "--embd-gemma-default", "--fim-", "--gpt-oss-"),
    "this as a default of all requests; send it with each": ("--samplers", "--sampler-seq",
        "--sampling-seq", "--ignore-eos", "--dry-sequence-breaker", "-l", "--logit-bias",
        "--grammar", "--grammar-file", "-j", "--json-schema", "-jf", "--json-schema-file",
        "-r", "--reverse-prompt", "--embd-normalize", "--keep", "--no-prefill-assistant"),
    "this sampler": ("--adaptive-target", "--adaptive-decay"),
    "a message at the limit of thinking": ("--reasoning-budget-message",),
    "chats whose calls and reasoning nobody reads": ("--skip-chat-parsing",),
    "special tokens in texts": ("-sp", "--special"),
    "this form of infill": ("--spm-infill",),
    "a limit for one slot in a shared cache": ("--kv-unified-per-slot",),
    "a prefix of its paths; let a proxy remove it": ("--api-prefix",),
    "tools of its own": ("--tools", "--tools-runtime", "--mcp-servers-config", "--mcp-servers-json",
        "-ag", "--agent", "--ui-mcp-proxy", "--webui-mcp-proxy"),
    "presets": ("--models-preset",),
    "this of llama-server's own commands": ("--completion-bash",),
}  # fmt: skip

# Variable -> flags that win over it, the first of which it stands for; those with a value.
_VARIABLES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "LLAMA_ARG_MODEL": ("-m", "--model"),
        "LLAMA_ARG_THREADS": ("-t", "--threads"),
        "LLAMA_ARG_CTX_SIZE": (*_CONTEXT, "--ctx"),
        "LLAMA_ARG_N_PARALLEL": (*_SLOTS, "--slots"),
        "LLAMA_ARG_N_PREDICT": (*_MOST_TOKENS, "--default-max-tokens"),
        "LLAMA_ARG_UBATCH": ("-ub", "--ubatch-size"),
        "LLAMA_ARG_FLASH_ATTN": ("-fa", "--flash-attn"),
        "LLAMA_ARG_CACHE_TYPE_K": ("-ctk", "--cache-type-k", "--kv-type"),
        "LLAMA_ARG_CACHE_TYPE_V": _V_TYPE,
        "LLAMA_ARG_N_GPU_LAYERS": _LAYERS,
        "LLAMA_ARG_ALIAS": ("--alias", "-a"),
        "LLAMA_ARG_HOST": ("--host",),
        "LLAMA_ARG_PORT": ("--port",),
        "LLAMA_ARG_TIMEOUT": ("-to", "--timeout", "--idle-timeout-s"),
        "LLAMA_ARG_POOLING": ("--pooling",),
        "LLAMA_ARG_CORS_ORIGINS": ("--cors-origins", "--cors-origin"),
        "LLAMA_ARG_SSL_KEY_FILE": ("--ssl-key-file", "--ssl-keyfile"),
        "LLAMA_ARG_SSL_CERT_FILE": ("--ssl-cert-file", "--ssl-certfile"),
        "LLAMA_API_KEY": ("--api-key",),
        "LLAMA_ARG_API_KEY_FILE": ("--api-key-file",),
        "LLAMA_ARG_MODELS_DIR": ("--models-dir",),
        "LLAMA_ARG_CHAT_TEMPLATE": ("--chat-template",),
        "LLAMA_ARG_CHAT_TEMPLATE_FILE": ("--chat-template-file",),
        "LLAMA_ARG_CHAT_TEMPLATE_KWARGS": (_KWARGS, "--template-option"),
        "LLAMA_ARG_REASONING": ("--reasoning", "-rea"),
        "LLAMA_ARG_REASONING_EFFORT": (_EFFORT, "--template-option"),
        "LLAMA_ARG_THINK": ("--reasoning-format",),
        "LLAMA_ARG_THINK_BUDGET": ("--reasoning-budget",),
        "LLAMA_ARG_TEMPERATURE": ("--temp", "--temperature", "--sampling"),
        "LLAMA_ARG_TOP_K": ("--top-k", "--sampling"),
        "LLAMA_ARG_TOP_P": ("--top-p", "--sampling"),
        "LLAMA_ARG_MIN_P": ("--min-p", "--sampling"),
        "LLAMA_ARG_REPEAT_PENALTY": ("--repeat-penalty", "--sampling"),
        "LLAMA_ARG_PRESENCE_PENALTY": ("--presence-penalty", "--sampling"),
        "LLAMA_ARG_FREQUENCY_PENALTY": ("--frequency-penalty", "--sampling"),
    }
)
# Those that turn something on or off.
_SWITCHES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "LLAMA_ARG_CONTEXT_SHIFT": ("--context-shift", "--no-context-shift"),
        "LLAMA_ARG_ENDPOINT_SLOTS": ("--slot-endpoints", "--no-slots"),
        "LLAMA_ARG_ENDPOINT_PROPS": ("--props", "--no-props"),
        "LLAMA_ARG_RERANKING": ("--reranking", ""),
        "LLAMA_ARG_REASONING_PRESERVE": ("--reasoning-preserve", "--no-reasoning-preserve"),
    }
)
# Those of what kqview lacks: the beginnings of their names.
_LACKING_VARIABLES: Final = (
    "LLAMA_ARG_MMPROJ_URL", "LLAMA_ARG_MODEL_URL", "LLAMA_ARG_DOCKER_REPO", "LLAMA_ARG_HF_",
    "LLAMA_ARG_ROPE_", "LLAMA_ARG_YARN_", "LLAMA_ARG_RPC", "LLAMA_ARG_DEVICE", "LLAMA_ARG_SPEC_",
    "LLAMA_ARG_OVERRIDE_TENSOR", "LLAMA_ARG_CPU_MOE", "LLAMA_ARG_N_CPU_", "LLAMA_ARG_SPLIT_MODE",
    "LLAMA_ARG_TENSOR_SPLIT", "LLAMA_ARG_MAIN_GPU", "LLAMA_ARG_API_PREFIX", "LLAMA_ARG_TOOLS",
    "LLAMA_ARG_MCP_", "LLAMA_ARG_AGENT", "LLAMA_ARG_MODELS_PRESET", "LLAMA_ARG_DRAFT_",
    "LLAMA_ARG_THINK_BUDGET_MESSAGE", "LLAMA_ARG_KV_UNIFIED_PER_SLOT",
)  # fmt: skip
_PREFIX: Final = "LLAMA_ARG_"
_FALSE: Final = frozenset({"0", "off", "false", "disabled"})
_TRUE: Final = frozenset({"1", "on", "true", "enabled"})


def translated(
    words: Sequence[str],
    note: Callable[[str], object],
    environ: Mapping[str, str] = MappingProxyType({}),
    own: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """*words* with llama-server's flags written as ours; *note* is told which are left out.

    Args:
        words: The command line.
        note: Called with a line for the operator.
        environ: Such as ``os.environ``; its variables of llama-server count where their flags are
            not given.
        own: Our flags -> our variables for them, which win over those of llama-server.

    Raises:
        RequestError: A value cannot be used, a file cannot be read, or kqview lacks what a flag or
            variable asks for.
    """
    ignored: list[str] = []
    flags = list(_flags(words))
    given = {name for name, _ in flags}.union(
        flag for flag, name in own.items() if environ.get(name)
    )
    flags = [*_of_environ(environ, given, ignored), *flags]
    n_slots = next(
        (_number(name, value) for name, value in reversed(flags) if name in _SLOTS), None
    )
    kv_type = next(
        (value for name, value in reversed(flags) if name in ("-ctk", "--cache-type-k")), "f16"
    )
    # With one cache for all, each slot may hold all of it.
    n_parts = 1 if any(name in _UNIFIED for name, _ in flags) else n_slots
    found: list[str] = []
    for name, value in flags:
        if name in _IGNORED or name in _IGNORED_WITH_VALUE:
            ignored.append(name)
        elif name in _V_TYPE:
            if value != kv_type:
                raise RequestError(
                    f"{name} is {value} and keys are {kv_type}; use one type for both"
                )
        elif name not in _UNIFIED and (name != "--slots" or value is not None):
            found += _written(name, value, n_slots, n_parts)
    if ignored:
        names = " ".join(dict.fromkeys(ignored))
        note(f"flags of llama-server without effect here: {names}")
    return found


def _of_environ(environ: Mapping[str, str], given: set[str], ignored: list[str]) -> list[Flag]:
    """Flags that llama-server's variables stand for, but for those that are *given*."""
    found: list[Flag] = []
    for name, value in sorted(environ.items()):
        base = name.replace("LLAMA_ARG_NO_", _PREFIX)
        if name in _VARIABLES:
            if value and given.isdisjoint(_VARIABLES[name]):
                found.append((_VARIABLES[name][0], value))
        elif base in _SWITCHES:
            if given.isdisjoint(_SWITCHES[base]):
                flag = _SWITCHES[base][0 if base == name and _is_true(name, value) else 1]
                found += [(flag, None)] if flag else []
        elif name.startswith(_LACKING_VARIABLES) or name == "LLAMA_ARG_MMPROJ":
            raise RequestError(f"{name} is set, for what kqview serve lacks; unset it")
        elif name.startswith(_PREFIX):
            ignored.append(name)
    return found


def _is_true(name: str, value: str) -> bool:
    if value.lower() not in _TRUE | _FALSE:
        raise RequestError(f"{name} is {value!r}; write true or false")
    return value.lower() in _TRUE


def _lacking(name: str) -> str | None:
    """What kqview lacks for this flag, None if nothing."""
    for what, names in _LACKING.items():
        for one in names:
            if name == one or (one.endswith("-") and name.startswith(one)):
                return what
    return None


def _written(name: str, value: str | None, n_slots: int | None, n_parts: int | None) -> list[str]:
    what = _lacking(name)
    if what is not None:
        raise RequestError(
            f"{name} is a flag of llama-server, and kqview serve lacks {what}; leave it out"
        )
    if name in ("--rerank", "--reranking"):
        return ["--pooling", "rank"]
    if name in _PRESERVE:
        return ["--template-option", f"preserve_reasoning={_PRESERVE[name]}"]
    if value is None:
        return ["--verbose" if name in _VERBOSE else name]
    if name in ("-rea", "--reasoning"):
        return ["--reasoning", _REASONING.get(value, value)]
    if name == _EFFORT:
        return [] if value == "default" else ["--template-option", f"reasoning_effort={value}"]
    if name == _KWARGS:
        items = _object_of(name, value).items()
        return [w for k, v in items for w in ("--template-option", f"{k}={json.dumps(v)}")]
    if name in _SLOTS:
        return ["--slots", str(_AUTO_SLOTS if n_slots == -1 else n_slots)]
    if name in _CONTEXT:
        # The context of all slots together, unless llama.cpp chooses how many there are.
        n_ctx = _number(name, value) // max(1, n_parts or 1)
        return ["--ctx", str(n_ctx)] if n_ctx else []
    if name in _LAYERS:
        return ["--ngl", "-1" if value in ("auto", "all") else value]
    if name in _SAMPLING:
        is_off = name in _OFF_BELOW_ZERO and value.startswith("-")
        return [] if is_off else ["--sampling", f"{_SAMPLING[name]}={value}"]
    if name in _MOST_TOKENS:
        return ["--default-max-tokens", value] if _number(name, value) > 0 else []
    if name == "--chat-template-file":
        return ["--chat-template", _text_of(name, value)]
    if name == "--api-key-file":
        return [word for key in _keys_in(value) for word in ("--api-key", key)]
    if name in _LISTS:
        return [word for one in value.split(",") if one for word in (_LISTS[name], one)]
    return [_RENAMED.get(name, name), value]


def _flags(words: Sequence[str]) -> Iterator[Flag]:
    """Flags and their values, None for those without; what is none of llama-server's, too."""
    rest = list(words)
    with_value = {
        *_RENAMED, *_LISTS, *_LAYERS, *_SLOTS, *_CONTEXT, *_V_TYPE, *_IGNORED_WITH_VALUE,
        *_SAMPLING, *_MOST_TOKENS, _KWARGS, _EFFORT, "--reasoning", "--api-key-file",
        "--chat-template", "--chat-template-file",
    }  # fmt: skip
    while rest:
        name = rest.pop(0)
        name, equals, value = name.partition("=") if name.startswith("--") else (name, "", "")
        if name.startswith("--"):  # llama-server takes either
            name = name.replace("_", "-")
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


def _object_of(name: str, text: str) -> dict[str, Any]:
    try:
        found = json_input.loads(text)
    except ValueError as error:
        raise RequestError(f"{name} is {text!r}, which is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestError(f"{name} is {text!r}; write a JSON object")
    return cast("dict[str, Any]", found)


def _text_of(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{name} {path} cannot be read: {error}") from None


def _keys_in(path: str) -> list[str]:
    lines = _text_of("--api-key-file", path).splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise RequestError(f"--api-key-file {path} has no keys; write one a line")
    return keys
