"""Flags of llama.cpp's server, written as those of ``kqview serve``.

So that a command line works when the binary is swapped, with its environment: a variable of
llama.cpp's server, such as LLAMA_ARG_CTX_SIZE, counts where neither its flag nor our own variable
is given. Flags without a counterpart that change neither text nor interface are left out and named;
those of what kqview lacks are refused by name; unknown ones stay for ``kqview serve`` to refuse.
Pure, but for files of keys and templates.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

from kqview import json_input
from kqview.errors import RequestError
from kqview.server.settings import Settings
from kqview.server.settings_table import rows_of
from kqview.types.sampling import OPTIONS

_AUTO_SLOTS: Final = 4  # what llama.cpp's server opens if it may choose
_PREFIX: Final = "LLAMA_ARG_"
_ON: Final = frozenset({"1", "on", "true", "enabled"})
_OFF: Final = frozenset({"0", "off", "false", "disabled"})


# ---- the values of our flags that a value of theirs becomes


def _as_it_is(_name: str, text: str) -> list[str]:
    return [text]


def _each(_name: str, text: str) -> list[str]:
    return [one for one in text.split(",") if one]


def _not_negative(_name: str, text: str) -> list[str]:
    return [] if text.startswith("-") else [text]


def _reasoning(_name: str, text: str) -> list[str]:
    words = {**dict.fromkeys(_ON, "on"), **dict.fromkeys(_OFF, "off"), "-1": "auto"}
    return [words.get(text, text)]


def _kwargs(name: str, text: str) -> list[str]:
    try:
        found = json_input.loads(text)
    except ValueError as error:
        raise RequestError(f"{name} is {text!r}, which is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestError(f"{name} is {text!r}; write a JSON object")
    items = cast("dict[str, Any]", found).items()
    return [f"{key}={json.dumps(value)}" for key, value in items]


def _text_in(name: str, path: str) -> list[str]:
    try:
        return [Path(path).read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{name} {path} cannot be read: {error}") from None


def _keys_in(name: str, path: str) -> list[str]:
    lines = _text_in(name, path)[0].splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise RequestError(f"{name} {path} has no keys; write one a line")
    return keys


def _drafters(name: str, text: str) -> list[str]:
    """What guesses tokens; of llama-server's ways a smaller model is named by a flag of its own."""
    kinds = [one for one in text.split(",") if one not in ("none", "draft-simple")]
    for kind in kinds:
        if kind != "draft-mtp" and not kind.startswith("ngram-"):
            raise RequestError(
                f"{name} is {text!r}, and kqview serve lacks {kind!r}; name a smaller model "
                "(--model-draft), or use draft-mtp or ngram-simple"
            )
    if "draft-mtp" in kinds:
        return ["mtp"]
    return ["prompt-lookup"] if kinds else []


def _number(name: str, text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError:
        raise RequestError(f"{name} is {text!r}; write a whole number") from None


# ---- the flags


@dataclass(frozen=True, slots=True)
class _Flag:
    """A flag of llama-server that has a value.

    Attributes:
        names: Its names.
        ours: Our flag for it, "" for none, and what stands before an "=" in the values of ours.
        variable: What follows "LLAMA_" in their variable for it, which counts where neither is
            given; "" if there is none.
        values: Makes the values of ours, of which each one repeats the flag.
    """

    names: str
    ours: str
    variable: str = ""
    values: Callable[[str, str], list[str]] = _as_it_is

    def written(self, name: str, text: str) -> list[str]:
        """Our flag with what *text* is for it, as often as that takes."""
        flag, _, key = self.ours.partition(" ")
        values = self.values(name, text) if flag else []
        return [word for one in values for word in (flag, f"{key}={one}" if key else one)]


# What the value of another flag decides as well.
_CONTEXT: Final = ("-c", "--ctx-size")
_SLOTS: Final = ("-np", "--parallel", "--slots")
_UNIFIED: Final = {
    **dict.fromkeys(("-kvu", "--kv-unified"), True),
    **dict.fromkeys(("-no-kvu", "--no-kv-unified"), False),
}
_K_TYPE: Final = ("-ctk", "--cache-type-k")
_V_TYPE: Final = ("-ctv", "--cache-type-v")

# Options of sampling that have another name there as well.
_SAMPLING_NAMES: Final = {
    "temperature": "--temp", "typical_p": "--typical", "top_n_sigma": "--top-nsigma",
    "dynatemp_exponent": "--dynatemp-exp", "mirostat_eta": "--mirostat-lr",
    "mirostat_tau": "--mirostat-ent", "seed": "-s",
}  # fmt: skip
_UNSET_BELOW_0: Final = frozenset({"top_n_sigma", "seed"})

_FLAGS: Final = (
    # Our own lists take several values between commas, as llama-server's do.
    *(
        _Flag(one.flag, one.flag, "", lambda _, text, row=one: row.parts(text))
        for one in rows_of(Settings).values()
        if one.kind is tuple
    ),
    _Flag("-m --model", "--model", "ARG_MODEL"),
    _Flag("-t --threads", "--threads", "ARG_THREADS"),
    _Flag("-c --ctx-size", "--ctx", "ARG_CTX_SIZE"),
    _Flag(
        "-np --parallel", "--slots", "ARG_N_PARALLEL",
        lambda name, text: [str(_AUTO_SLOTS) if _number(name, text) == -1 else text],
    ),
    _Flag(
        "-n --predict --n-predict", "--default-max-tokens", "ARG_N_PREDICT",
        lambda name, text: [text] if _number(name, text) > 0 else [],
    ),
    _Flag("-ub --ubatch-size", "--ubatch-size", "ARG_UBATCH"),
    _Flag("-fa --flash-attn", "--flash-attn", "ARG_FLASH_ATTN"),
    _Flag("-ctk --cache-type-k", "--kv-type", "ARG_CACHE_TYPE_K"),
    _Flag("-ctv --cache-type-v", "", "ARG_CACHE_TYPE_V"),
    _Flag(
        "-ngl --gpu-layers --n-gpu-layers --ngl", "--ngl", "ARG_N_GPU_LAYERS",
        lambda _, text: ["-1" if text in ("auto", "all") else text],
    ),
    _Flag("--alias -a", "--alias", "ARG_ALIAS", _each),
    _Flag("--host", "--host", "ARG_HOST"),
    _Flag("--port", "--port", "ARG_PORT"),
    _Flag("-to --timeout", "--idle-timeout-s", "ARG_TIMEOUT"),
    _Flag("--pooling", "--pooling", "ARG_POOLING"),
    _Flag("--cors-origins", "--cors-origin", "ARG_CORS_ORIGINS", _each),
    _Flag("--ssl-key-file", "--ssl-keyfile", "ARG_SSL_KEY_FILE"),
    _Flag("--ssl-cert-file", "--ssl-certfile", "ARG_SSL_CERT_FILE"),
    _Flag("--api-key", "--api-key", "API_KEY", _each),
    _Flag("--api-key-file", "--api-key", "ARG_API_KEY_FILE", _keys_in),
    _Flag("--models-dir", "--models-dir", "ARG_MODELS_DIR"),
    _Flag("--lora-scaled", "--lora", "", _each),
    _Flag("--chat-template", "--chat-template", "ARG_CHAT_TEMPLATE"),
    _Flag("--chat-template-file", "--chat-template", "ARG_CHAT_TEMPLATE_FILE", _text_in),
    _Flag("--chat-template-kwargs", "--template-option", "ARG_CHAT_TEMPLATE_KWARGS", _kwargs),
    _Flag("--reasoning -rea", "--reasoning", "ARG_REASONING", _reasoning),
    _Flag(
        "--reasoning-effort", "--template-option reasoning_effort", "ARG_REASONING_EFFORT",
        lambda _, text: [] if text == "default" else [text],
    ),
    _Flag("--reasoning-format", "--reasoning-format", "ARG_THINK"),
    _Flag("--reasoning-budget", "--reasoning-budget", "ARG_THINK_BUDGET"),
    # Tokens are guessed by one drafter, which the last flag names; the text is the same without it.
    _Flag("-md --model-draft --spec-draft-model", "--drafter", "ARG_SPEC_DRAFT_MODEL"),
    _Flag("--spec-type", "--drafter", "ARG_SPEC_TYPE", _drafters),
    # How tokens are chosen if a request does not say.
    *(
        _Flag(
            f"--{name.replace('_', '-')} {_SAMPLING_NAMES.get(name, '')}", f"--sampling {name}",
            f"ARG_{name.upper()}", _not_negative if name in _UNSET_BELOW_0 else _as_it_is,
        )
        for name, option in OPTIONS.items()
        if option.low is not None
    ),
)  # fmt: skip
_BY_NAME: Final = {name: one for one in _FLAGS for name in one.names.split()}
_BY_VARIABLE: Final = {f"LLAMA_{one.variable}": one for one in _FLAGS if one.variable}

# Flags without a value.
_ALONE: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("--rerank", "--reranking"), ("--pooling", "rank")),
    **dict.fromkeys(("-v", "--log-verbose"), ("--verbose",)),
    "--spec-default": ("--drafter", "prompt-lookup"),
    "--reasoning-preserve": ("--template-option", "preserve_reasoning=true"),
    "--no-reasoning-preserve": ("--template-option", "preserve_reasoning=false"),
    **dict.fromkeys(_UNIFIED, ()),
}
_IGNORED: Final = frozenset(
    {
        *(
            f"--{no}{name}"
            for no in ("", "no-")
            for name in (
                "jinja", "cont-batching", "mmap", "warmup", "perf", "webui", "ui", "log-prefix",
                "log-timestamps", "cache-prompt", "cache-idle-slots", "repack", "op-offload",
                "kv-offload", "mmproj-auto", "mmproj-offload", "escape", "log-jsonl",
                "cors-credentials", "models-autoload", "spec-draft-backend-sampling",
            )
        ),
        "--metrics", "-cb", "-nocb", "--mlock", "--swa-full",
        "--log-disable", "--offline", "-nr", "--embedding", "--embeddings", "-kvo", "-nkvo",
        "--no-mmproj", "--reuse-port", "-e", "--no-host", "--check-tensors", "-bs",
        "--backend-sampling", "--prefill-assistant", "--no-agent", "-no-ag", "--no-ui-mcp-proxy",
        "--no-webui-mcp-proxy", "--no-skip-chat-parsing",
    }
)  # fmt: skip
# Patterns of names, and so are those of what kqview lacks.
_IGNORED_WITH_VALUE: Final = (
    "-tb", "--threads-batch", "--threads-http", "-b", "--batch-size", "--prio", "--prio-batch",
    "--poll", "--poll-batch", "-lm", "--load-mode", "--numa", "--log-file", "--log-colors",
    "-lv", "--verbosity", "--log-verbosity", "-cram", "--cache-ram", "-ctxcp",
    "--ctx-checkpoints", "--swa-checkpoints", "--cache-reuse", "-fit", "--fit", "-fit[tc]",
    "--fit-target", "--fit-ctx", "--path", "--sse-ping-interval", "-sps", "-dt", "-C", "-C[rb]",
    "--slot-prompt-similarity", "--defrag-thold", "-Crb", "--cpu-*", "-lzm", "--lazy-mode", "-cms",
    "--checkpoint-min-step", "--tags", "--cors-methods", "--cors-headers", "--*ui-config*",
    "--models-max", "--sleep-idle-seconds", "--log-prompts-dir", "-hft", "--hf-token",
    "--image-m??-tokens", "--mtmd-batch-max-tokens", "--video-*",
    # How fast tokens are guessed, and how many: a request says the latter (speculative.n_max).
    "-td", "-tbd", "-Cd", "-Crd", "-Cbd", "-ngld", "-ctkd", "-ctvd", "--draft", "--draft-*",
    "--*-draft", "--spec-draft-*", "--spec-ngram-*",
)  # fmt: skip


# What kqview lacks, and what to do.
_LACKING: Final[Mapping[str, Sequence[str]]] = {
    "images and sound": ("-mm", "--mmproj", "-mmu", "--mmproj-url", "-mmdev", "--mmproj-device",
        "--media-path", "--vision-*"),
    "files of what was looked up": ("-lcs", "--lookup-cache-static", "-lcd",
        "--lookup-cache-dynamic"),
    "guesses that are accepted by chance": ("--spec-synth-*",),
    "placing single layers and tensors": ("-dev", "--device", "--list-devices", "-ot",
        "--override-tensor", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "-ncffn", "--n-cpu-ffn",
        "-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu", "--rpc", "-devd",
        "--device-draft", "--spec-draft-device", "-otd", "--override-tensor-draft",
        "--spec-draft-override-tensor", "-cmoed", "-ncmoed", "--*cpu-moe-draft",
        "--spec-draft-*cpu-moe", "--spec-draft-ncmoe"),
    "changing a model while it is loaded": ("--rope-*", "--yarn-*", "--override-kv",
        "--control-vector", "--control-vector-*", "--lora-init-without-apply"),
    "downloading by these names; use --hf OWNER/REPO/FILE": ("-mu", "--model-url", "-dr",
        "--docker-repo", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-cl", "--cache-list",
        "--embd-gemma-default", "--fim-*", "--gpt-oss-*", "-hfd", "-hfrd", "--hf-repo-draft",
        "--spec-draft-hf"),
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

# Variables that turn something on or off, and the flags for that.
_SWITCHES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "LLAMA_ARG_CONTEXT_SHIFT": ("--context-shift", "--no-context-shift"),
        "LLAMA_ARG_ENDPOINT_SLOTS": ("--slot-endpoints", "--no-slots"),
        "LLAMA_ARG_ENDPOINT_PROPS": ("--props", "--no-props"),
        "LLAMA_ARG_RERANKING": ("--reranking", ""),
        "LLAMA_ARG_KV_UNIFIED": ("--kv-unified", "--no-kv-unified"),
        "LLAMA_ARG_REASONING_PRESERVE": ("--reasoning-preserve", "--no-reasoning-preserve"),
    }
)
# Those of what kqview lacks: the beginnings of their names.
_LACKING_VARIABLES: Final = (
    "LLAMA_ARG_MMPROJ_URL", "LLAMA_ARG_MODEL_URL", "LLAMA_ARG_DOCKER_REPO", "LLAMA_ARG_HF_",
    "LLAMA_ARG_ROPE_", "LLAMA_ARG_YARN_", "LLAMA_ARG_RPC", "LLAMA_ARG_DEVICE",
    "LLAMA_ARG_OVERRIDE_TENSOR", "LLAMA_ARG_CPU_MOE", "LLAMA_ARG_N_CPU_", "LLAMA_ARG_SPLIT_MODE",
    "LLAMA_ARG_TENSOR_SPLIT", "LLAMA_ARG_MAIN_GPU", "LLAMA_ARG_API_PREFIX", "LLAMA_ARG_TOOLS",
    "LLAMA_ARG_MCP_", "LLAMA_ARG_AGENT", "LLAMA_ARG_MODELS_PRESET",
    "LLAMA_ARG_SPEC_DRAFT_HF_", "LLAMA_ARG_SPEC_DRAFT_CPU_", "LLAMA_ARG_SPEC_DRAFT_N_CPU_",
    "LLAMA_ARG_SPEC_SYNTH_",
    "LLAMA_ARG_THINK_BUDGET_MESSAGE", "LLAMA_ARG_KV_UNIFIED_PER_SLOT",
)  # fmt: skip


def translated(
    words: Sequence[str],
    note: Callable[[str], object],
    environ: Mapping[str, str] = MappingProxyType({}),
    own: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[str], dict[str, str]]:
    """*words* with llama-server's flags written as ours; *note* is told which are left out.

    Args:
        words: The command line.
        note: Called with a line for the operator.
        environ: Such as ``os.environ``; its variables of llama-server count where their flags are
            not given.
        own: Our flags -> our variables for them, which win over those of llama-server.

    Returns:
        The command line, and for our flags in it that only variables of llama-server gave, which.

    Raises:
        RequestError: A value cannot be used, a file cannot be read, or kqview lacks what a flag or
            variable asks for.
    """
    ignored: list[str] = []
    typed = list(_flags(words))
    given = {name for name, _ in typed} | {one for one, name in own.items() if environ.get(name)}
    # Variables first, so that flags win.
    flags = [*_of_environ(environ, given, ignored), *((*one, "") for one in typed)]
    slots = [(name, value) for name, value, _ in flags if name in _SLOTS]
    slots = [one for one in slots if one != ("--slots", None)]
    n_slots = _number(*slots[-1]) if slots else 1
    if next((_UNIFIED[name] for name, _, _ in flags[::-1] if name in _UNIFIED), False):
        n_slots = 1  # with one cache for all, each slot may hold all of it
    keys = next((value for name, value, _ in flags[::-1] if name in _K_TYPE), "f16")
    found: list[str] = []
    variables: dict[str, str] = {}
    for name, value, variable in flags:
        for what, names in _LACKING.items():
            if _is_any(name, names):
                raise RequestError(
                    f"{name} is a flag of llama-server, and kqview serve lacks {what}; leave it out"
                )
        flag = _BY_NAME.get(name)
        if name in _IGNORED or (flag is None and _is_any(name, _IGNORED_WITH_VALUE)):
            ignored.append(name)
            continue
        if name in _V_TYPE and value != keys:
            raise RequestError(f"{name} is {value} and keys are {keys}; use one type for both")
        if name in _CONTEXT:
            # That of all slots together, unless llama.cpp chooses how many there are.
            n_ctx = _number(name, value) // max(1, n_slots)
            written = ["--ctx", str(n_ctx)] if n_ctx else []
        elif name in _ALONE or (name == "--slots" and value is None):
            written = [*_ALONE.get(name, ())]
        elif value is None:
            written = [name]
        else:
            written = [name, value] if flag is None else flag.written(name, value)
        found += written
        for word in written:
            variables.pop(word, None)
            if variable:
                variables[word] = variable
    if ignored:
        listed = " ".join(dict.fromkeys(ignored))
        note(f"flags of llama-server without effect here: {listed}")
    return found, variables


def _of_environ(
    environ: Mapping[str, str], given: set[str], ignored: list[str]
) -> Iterator[tuple[str, str | None, str]]:
    """Flags that llama-server's variables stand for, but for those that are *given*."""
    for variable, value in sorted(environ.items()):
        base = variable.replace("LLAMA_ARG_NO_", _PREFIX)
        if flag := _BY_VARIABLE.get(variable):
            # A file of keys adds to keys.
            names, ours = flag.names.split(), flag.ours.partition(" ")[0]
            winning = names if flag.values is _keys_in else [*names, ours]
            if value and given.isdisjoint(winning):
                yield names[0], value, variable
        elif base in _SWITCHES:
            if given.isdisjoint(_SWITCHES[base]):
                is_on = base == variable and _is_on(variable, value)
                if switch := _SWITCHES[base][0 if is_on else 1]:
                    yield switch, None, variable
        elif variable.startswith(_LACKING_VARIABLES) or variable == "LLAMA_ARG_MMPROJ":
            raise RequestError(f"{variable} is set, for what kqview serve lacks; unset it")
        elif variable.startswith(_PREFIX):
            ignored.append(variable)


def _is_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, one) for one in patterns)


def _is_on(name: str, value: str) -> bool:
    if value.lower() not in _ON | _OFF:
        raise RequestError(f"{name} is {value!r}; write true or false")
    return value.lower() in _ON


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Flags and their values, None for those without; what is none of llama-server's, too."""
    rest = list(words)
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
        elif (
            rest
            and name not in _IGNORED
            and (name in _BY_NAME or _is_any(name, _IGNORED_WITH_VALUE))
        ):
            yield name, rest.pop(0)
        else:
            yield name, None
