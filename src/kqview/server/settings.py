"""Settings: everything that an operator decides about the server, in one place.

A setting has three names: the field here, which is also its key in a configuration file, the flag
of ``kqview serve`` (``--api-key`` for ``api_keys``) and the environment variable
``KQVIEW_API_KEYS``; lists are separated by commas there. A flag wins over the environment, the
environment over the file, the file over the default (`kqview.server.config_file` merges them).
"""

import dataclasses
import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Final, Literal, Self, get_args, get_origin, get_type_hints

from kqview import json_input
from kqview.chat.named_templates import TEMPLATES
from kqview.errors import RequestError, shown
from kqview.types.sampling import OPTIONS

AttentionValues = Literal["logits", "scores", "probs"]
DefaultFormat = Literal["per_layer", "aggregated"]
FlashAttn = Literal["auto", "on", "off"]
AttentionKernel = Literal["auto", "kqview", "llama.cpp"]
Pooling = Literal["none", "mean", "cls", "last", "rank"]
Reasoning = Literal["auto", "on", "off"]
ReasoningFormat = Literal["auto", "none", "deepseek", "deepseek-legacy"]

TracedRequests = Literal["mods", "all"]

PREFIX: Final = "KQVIEW_"
# Labels of a name; the first may stand for any.
_HOST: Final = re.compile(r"(?:\*\.)?[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_NUMERIC: Final = ", ".join(one.name for one in OPTIONS.values() if one.low is not None)


Place = Literal["file", "folder", "new"]
"""What a path names: an existing file or folder, or one that the server makes."""


def _setting(
    default: Any,
    text: str,
    *,
    low: float = 1,
    flag: str | None = None,
    place: Place | None = None,
    restart: bool = False,
    is_text: bool = False,
    is_secret: bool = False,
) -> Any:
    """A field of Settings.

    Args:
        default: Its value where none is given.
        text: Its help.
        low: The smallest number allowed.
        flag: Its flag, if that differs from its name.
        place: What its path names; None if it is not a path.
        restart: Whether a change needs a restart of the server.
        is_text: Whether a configuration file may name a file that has the text.
        is_secret: Whether it is never shown; implies *is_text*.
    """
    metadata = {
        "help": text, "low": low, "flag": flag, "place": place, "restart": restart,
        "is_text": is_text or is_secret, "is_secret": is_secret,
    }  # fmt: skip
    return field(default=default, metadata=metadata, repr=not is_secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the server allows and how it answers; checked when it is built.

    The metadata of each field has its meaning, which ``kqview serve --help`` shows. Times are in
    seconds, sizes in bytes; 0 turns a limit off if its text says so. Options of a model take effect
    when it is next loaded.
    """

    # ---- what is served
    model: str | None = _setting(None, "GGUF file to serve", place="file", restart=True)
    demo: bool = _setting(False, "serve the bundled demo model", restart=True)
    hf: str | None = _setting(
        None,
        "model on the Hugging Face Hub that kqview serve downloads and serves: OWNER/REPO/FILE",
        restart=True,
    )
    aliases: tuple[str, ...] = _setting(
        (),
        "names that clients see instead of the model's own; the first one is its id",
        flag="--alias",
        restart=True,
    )
    models_dir: str | None = _setting(
        None,
        "folder whose GGUF files /api/v1/model/load may open; without it, none",
        place="folder",
    )
    n_slots: int = _setting(
        1, "requests generated at a time, each with its own context", flag="--slots"
    )
    n_ctx: int | None = _setting(
        None, "context of a slot in tokens; without it, the model's own or what fits", flag="--ctx"
    )
    n_threads: int | None = _setting(
        None, "compute threads; without it, what the machine grants", flag="--threads"
    )
    n_gpu_layers: int = _setting(-1, "layers on the GPU; -1 for all", low=-1, flag="--ngl")
    kv_type: str = _setting("f16", "type of the KV cache")
    flash_attn: FlashAttn = _setting("auto", "flash attention: auto, on or off")
    attention_kernel: AttentionKernel = _setting(
        "auto",
        "what computes attention on the CPU in steps of at most 63 tokens of a slot: kqview, which "
        "auto means, or llama.cpp",
    )
    ubatch_size: int = _setting(512, "most tokens of a prompt, and of an embedding, in one step")
    lora: tuple[str, ...] = _setting(
        (),
        "LoRA adapters of the model: GGUF files, each with :SCALE after its name if not 1",
        place="file",
    )
    chat_template: str | None = _setting(
        None,
        "chat template to use instead of the model's: Jinja, or a name such as chatml; "
        "--chat-template-file FILE reads it from a file",
        is_text=True,
    )
    template_options: tuple[str, ...] = _setting(
        (),
        "variables of the chat template where a request gives none: NAME=VALUE, a value of JSON or "
        "else text, such as reasoning_effort=low; --chat-template-kwargs takes an object of them",
        flag="--template-option",
    )
    reasoning: Reasoning = _setting(
        "auto",
        "whether a model that can reason or not does so in chats, if a request does not say: on, "
        "off, or auto for what its template is made for",
    )
    request_chat_template: bool = _setting(
        False,
        "let requests bring a chat_template of their own, which is rendered with limits on its "
        "time and memory",
    )
    pooling: Pooling | None = _setting(
        None,
        "how a text becomes a vector, for models whose file does not say: none (a vector for each "
        "token), mean, cls, last, or rank for classifiers",
    )
    attention_budget_bytes: int | None = _setting(
        None, "memory for attention rows; without it, a quarter of the machine's", low=0
    )
    pinned_bytes: int = _setting(
        2**30, "page-locked part of that, where a GPU has layers; 0 for none", low=0
    )

    models_budget_bytes: int | None = _setting(
        None,
        "memory for all models of a configuration together, on the host and on devices; the least "
        "recently used one makes room for another; without it, the machine's and its devices' less "
        "what requests and attention rows may take",
    )
    model_wait_s: float = _setting(
        30.0, "longest wait for the memory of models that other requests use", low=0
    )

    # ---- saved slots
    slot_endpoints: bool = _setting(
        True, "serve /slots and /sessions, which show, save and restore slots"
    )
    slot_save_path: str | None = _setting(
        None,
        "folder for files of saved slots and sessions; without it, none are written or read",
        place="folder",
        restart=True,
    )
    slot_wait_s: float = _setting(10.0, "longest wait for a busy slot to save or change", low=0)
    max_state_bytes: int = _setting(2**32, "largest saved slot that a client may send")
    max_sessions: int = _setting(64, "most sessions in memory", low=0, restart=True)
    max_session_bytes: int = _setting(
        2**30, "most bytes of all sessions in memory", low=0, restart=True
    )
    max_saved_bytes: int = _setting(2**36, "most bytes of all files in --slot-save-path", low=0)

    # ---- how it answers
    attention_values: AttentionValues | None = _setting(
        None,
        "values of rows: logits, scores or probs; without it, logits for KoboldAI's API and probs "
        "for the others",
    )
    attention_format: DefaultFormat = _setting(
        "per_layer", "shape of rows if a request does not say: per_layer or aggregated"
    )

    context_shift: bool = _setting(
        False,
        "drop old tokens when a slot is full and go on, in llama-server's, OpenAI's and "
        "Anthropic's APIs",
    )
    sampling: tuple[str, ...] = _setting(
        (),
        "how tokens are chosen if a request to llama-server's, OpenAI's or Anthropic's API does "
        f"not say: NAME=VALUE, such as temperature=0.6; names are {_NUMERIC}",
    )
    reasoning_format: ReasoningFormat = _setting(
        "auto",
        "where reasoning goes if a request does not say: none leaves it in the content, the others "
        "put it into reasoning_content",
    )
    default_max_tokens: int | None = _setting(
        None,
        "most tokens of a request to llama-server's, OpenAI's or Anthropic's API that does not "
        "say; without it, as many as fit",
    )
    reasoning_budget: int = _setting(
        -1,
        "most tokens of reasoning in a chat of llama-server's, OpenAI's or Anthropic's API if a "
        "request does not say; 0 for none, -1 for any number",
        low=-1,
    )

    # ---- mods and traces
    mods_dir: str | None = _setting(
        None, "folder of the mods that requests may name; without it, none", place="folder"
    )
    max_mods: int = _setting(8, "maximum number of mods in one request")
    mod_time_limit_s: float = _setting(
        5.0, "time limit of each call of a mod; a call that takes longer has no effect", low=0.001
    )
    mods_strict: bool = _setting(
        False, "end a request whose mod fails with an error, instead of going on without the mod"
    )
    trace_url: str | None = _setting(
        None,
        "URL to post traces to, such as http://127.0.0.1:6767/ingest; without it, none are posted",
        restart=True,
    )
    trace: TracedRequests = _setting(
        "mods", "which requests to trace: mods (those with mods) or all"
    )
    trace_spool: str | None = _setting(
        None,
        "folder for traces that are not sent yet; without it, a crash loses them",
        place="new",
        restart=True,
    )
    trace_key: str | None = _setting(
        None, "API key for the trace receiver", is_secret=True, restart=True
    )

    props: bool = _setting(False, "answer POST /props, which changes nothing")
    verbose: bool = _setting(
        False, "show the prompt that a chat became in each reply, as __verbose, not only if asked"
    )

    # ---- where and for whom
    host: str = _setting("127.0.0.1", "address to listen on", restart=True)
    port: int = _setting(5001, "port to listen on; 0 for a free one", low=0, restart=True)
    ssl_certfile: str | None = _setting(
        None, "certificate chain in PEM; turns on HTTPS, and HTTP off", place="file", restart=True
    )
    ssl_keyfile: str | None = _setting(
        None,
        "private key of the certificate in PEM, if it is in another file",
        place="file",
        restart=True,
    )
    public: bool = _setting(False, "allow an address that others can reach without an API key")
    api_keys: tuple[str, ...] = _setting(
        (),
        "keys that may use the API; without any, the API is open",
        is_secret=True,
        flag="--api-key",
    )
    admin_keys: tuple[str, ...] = _setting(
        (),
        "keys that may also switch the model and see what other keys do; without any, nobody may",
        is_secret=True,
        flag="--admin-key",
    )
    query_key: bool = _setting(False, "accept ?api_key= on WebSockets; it may end up in logs")
    cors_origins: tuple[str, ...] = _setting(
        ("loopback",),
        "origins of pages that may call the API; loopback for pages of this machine, * for any",
        flag="--cors-origin",
    )
    allowed_hosts: tuple[str, ...] = _setting(
        (),
        "names by which clients may call the server, besides addresses, localhost and --host; "
        "*.example.org for its subdomains, * for any",
    )
    trusted_proxies: tuple[str, ...] = _setting(
        (),
        "addresses or networks of proxies whose X-Forwarded-For counts; without any, none does",
        flag="--trusted-proxy",
    )

    # ---- limits
    max_body_bytes: int = _setting(32 * 2**20, "largest request body")
    max_message_bytes: int = _setting(32 * 2**20, "largest WebSocket message", restart=True)
    max_reply_bytes: int = _setting(2**30, "largest reply that is not streamed, attention included")
    memory_budget_bytes: int | None = _setting(
        None,
        "memory for all running requests: bodies, messages, replies; one client may hold as much "
        "as stays free; without it, a quarter of the machine's",
        restart=True,
    )
    kept_attention_bytes: int = _setting(
        256 * 2**20,
        "memory for attention rows that clients fetch by id; 0 keeps none, and it is at most a "
        "quarter of memory_budget_bytes",
        low=0,
        restart=True,
    )
    max_tokens: int = _setting(8192, "most tokens that a request may generate")
    max_context: int | None = _setting(None, "longest prompt in tokens; without it, a slot's size")
    max_samples: int = _setting(16, "most samples of one request")
    max_running: int = _setting(
        64, "most requests at a time, waiting ones included; more for keys below their share"
    )
    max_queued: int = _setting(
        32, "most requests that wait for a slot; more for keys below their share", low=0
    )
    max_connections: int = _setting(1024, "most connections at a time", restart=True)
    max_connections_per_client: int = _setting(
        128, "most connections of one address, trusted proxies excepted"
    )
    rate_limit: float = _setting(0.0, "requests per minute for each client; 0 for no limit", low=0)
    request_timeout_s: float = _setting(
        3600.0, "longest request, waiting included; 0 for no limit", low=0
    )
    idle_timeout_s: float = _setting(
        120.0, "idle clients are disconnected after this time", low=0.001, restart=True
    )
    shutdown_grace_s: float = _setting(
        5.0, "time that running requests have to end at SIGTERM", low=0, restart=True
    )
    stall_timeout_s: float = _setting(
        60.0,
        "silence of the engine after which /health answers 503; after twice that, the process "
        "ends; 0 for no limit",
        low=0,
        restart=True,
    )
    supervise: bool = _setting(True, "restart the server when it crashes or hangs", restart=True)
    access_log: bool = _setting(True, "one JSON line per request on the log kqview.access")

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            RequestError: A setting is of the wrong type or out of its range, or the address can
                be reached by others and there is no key.
        """
        for name in _FIELDS:
            object.__setattr__(self, name, self.checked(name, getattr(self, name)))

    @staticmethod
    def checked(name: str, value: Any) -> Any:
        """*value* in the form that the field *name* has.

        Raises:
            RequestError: It is of the wrong type or out of range.
        """
        value = _checked(_FIELDS[name], value)
        if name == "port" and value > 65535:
            raise _wrong(name, value, "use a port from 0 to 65535")
        if name == "chat_template" and value not in (None, *TEMPLATES) and "{" not in value:
            known = ", ".join(TEMPLATES)
            raise _wrong(
                name, value, f"write Jinja or {known}, or name a file with --chat-template-file"
            )
        return value

    @staticmethod
    def read(name: str, text: str) -> Any:
        """The value of the field *name* that an environment variable has as *text*.

        Raises:
            RequestError: It cannot be read.
        """
        return _read(name, text)

    def check_bind(self) -> None:
        """Refuse to be reached by others without a key.

        Raises:
            RequestError: The address is no loopback address, there is no key and ``public`` is off.
        """
        if self.public or self.api_keys or is_loopback(self.host):
            return
        raise RequestError(
            f"{self.host} can be reached from other machines and there is no API "
            "key; set api_keys (--api-key), listen on 127.0.0.1, or say public (--public)"
        )

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The values of ``sampling`` by name."""
        pairs = (one.partition("=") for one in self.sampling)
        return {name: _number(name, value) for name, _, value in pairs}

    @property
    def template_variables(self) -> dict[str, Any]:
        """The values of ``template_options`` by name, and what ``reasoning`` says."""
        found = {} if self.reasoning == "auto" else {"enable_thinking": self.reasoning == "on"}
        return found | dict(map(_template_option, self.template_options))

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **given: Any) -> Self:
        """Settings of the environment; *given* ones, where not None, win.

        Args:
            environ: Such as ``os.environ``; names beginning with ``KQVIEW_`` that are no setting
                are left alone.
            **given: Settings by field name.

        Raises:
            RequestError: A value cannot be read, or as the constructor.
        """
        values = {name: value for name, value in given.items() if value is not None}
        for name, text in texts_of(environ).items():
            if name not in values:
                values[name] = _read(name, text)
        return cls(**values)


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return _FIELDS[name].metadata["flag"] or "--" + name.replace("_", "-")


def texts_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings that *environ* gives, as they are written there."""
    found = {name: environ.get(PREFIX + name.upper()) for name in _FIELDS}
    # An empty variable is how some tools leave one out; for a list it is an empty list.
    return {
        name: text
        for name, text in found.items()
        if text is not None and (text or _KINDS[name] is tuple)
    }


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach *host*."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _checked(spec: "dataclasses.Field[Any]", value: Any) -> Any:
    name, kind = spec.name, _KINDS[spec.name]
    if value is None and spec.default is None:
        return None
    if kind in (int, float):
        return _checked_number(spec, kind, value)
    if kind is tuple:
        return _checked_list(name, value)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise _wrong(name, value, f"choose from {', '.join(get_args(kind))}")
        return value
    if not isinstance(value, kind):
        raise _wrong(name, value, f"pass a {kind.__name__}")
    return value


def _checked_number(spec: "dataclasses.Field[Any]", kind: Any, value: Any) -> float:
    kinds = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not -math.inf < value < math.inf:
        raise _wrong(spec.name, value, "pass a number" if kind is float else "pass an int")
    if value < spec.metadata["low"]:
        raise _wrong(spec.name, value, f"the minimum is {spec.metadata['low']:g}")
    return value


def _checked_list(name: str, value: Any) -> tuple[str, ...]:
    is_list = type(value) in (list, tuple, set, frozenset)  # pyright: ignore[reportUnknownArgumentType]
    texts: tuple[Any, ...] = tuple(value) if is_list else (None,)
    if not all(isinstance(text, str) and text for text in texts):
        raise _wrong(name, value, "pass a list of non-empty texts")
    if name in _CHECKS:
        return tuple(map(_CHECKS[name], texts))
    # Keys travel in a header, whose ends are trimmed and which holds nothing else as it is.
    if not all(text.isascii() and text.isprintable() and " " not in text for text in texts):
        raise _wrong(name, value, "use printable ASCII without spaces")
    return texts


def _checked_origin(text: str) -> str:
    """An origin as browsers send it: ``scheme://host[:port]`` in lower case."""
    if text in ("*", "null", "loopback", "localhost"):  # the last is llama-server's word
        return "loopback" if text == "localhost" else text
    origin = text.lower().rstrip("/")
    scheme, _, host = origin.partition("://")
    if not scheme or not host or set(host) & set("/?#@ "):
        raise _wrong("cors_origins", text, "write scheme://host:port, such as https://a.org")
    return origin


def _checked_host(text: str) -> str:
    """A name as the Host header has it, in lower case and without its port."""
    name = text.lower().removesuffix(".")
    if text != "*" and not _HOST.fullmatch(name):
        raise _wrong("allowed_hosts", text, "write a name without a port, such as a.example.org")
    return name


def _checked_proxy(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        raise _wrong(
            "trusted_proxies", text, "write an address or a network, such as 10.0.0.0/8"
        ) from None


def _checked_sampling(text: str) -> str:
    """``NAME=VALUE`` of a numeric option of `Sampling`."""
    name, _, value = text.partition("=")
    option = OPTIONS.get(name)
    if option is None or option.low is None:
        raise _wrong("sampling", text, f"write NAME=VALUE with one of {_NUMERIC}")
    option.checked(_number(name, value))
    return text


def _checked_template_option(text: str) -> str:
    """``NAME=VALUE``."""
    name, equals, _ = text.partition("=")
    if not name.isidentifier() or not equals:
        raise _wrong("template_options", text, "write NAME=VALUE, such as reasoning_effort=low")
    return text


def _template_option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json_input.loads(value)
    except ValueError:
        return name, value


def _number(name: str, text: str) -> float:
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        raise _wrong("sampling", f"{name}={text}", "write a number after the =") from None


_CHECKS: Final[Mapping[str, Callable[[str], str]]] = {
    "cors_origins": _checked_origin,
    "allowed_hosts": _checked_host,
    "trusted_proxies": _checked_proxy,
    "lora": str,
    "sampling": _checked_sampling,
    "template_options": _checked_template_option,
}


def _read(name: str, text: str) -> Any:
    """The value of an environment variable."""
    kind = _KINDS[name]
    if kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise _wrong(name, text, "write true or false")
        return text.lower() in _TRUE
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise _wrong(name, text, "write a number") from None
    return text


def _wrong(name: str, value: object, limit: str) -> RequestError:
    is_secret = _FIELDS[name].metadata["is_secret"]
    return RequestError(f"{name} is {'***' if is_secret else shown(value)}; {limit}")


def _kind(annotation: Any) -> Any:
    """A field's type without None; ``tuple`` for lists of texts."""
    if NoneType in get_args(annotation):
        [annotation] = [one for one in get_args(annotation) if one is not NoneType]
    return tuple if get_origin(annotation) is tuple else annotation


_FIELDS: Final = {spec.name: spec for spec in dataclasses.fields(Settings)}
_KINDS: Final = {name: _kind(hint) for name, hint in get_type_hints(Settings).items()}
