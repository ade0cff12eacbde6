"""Settings: everything that an operator decides about the server, in one place.

A setting has three names: the field here, which is also its key in a configuration file, the flag
of ``kqview serve`` (``--api-key`` for ``api_keys``) and the environment variable
``KQVIEW_API_KEYS``; lists are separated by commas there. A flag wins over the environment, the
environment over the file, the file over the default (`kqview.server.config_file` merges them).
"""

import ipaddress
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from kqview import json_input
from kqview.chat.named_templates import TEMPLATES
from kqview.errors import HeadFileError, RequestError
from kqview.heads.file import HeadFile
from kqview.server.settings_table import (
    Count,
    CountOrMinusOne,
    Name,
    Names,
    NotNegative,
    Size,
    rows_of,
    setting,
)
from kqview.types.sampling import OPTIONS

AttentionValues = Literal["logits", "scores", "probs"]
DefaultFormat = Literal["per_layer", "aggregated"]
FlashAttn = Literal["auto", "on", "off"]
AttentionKernel = Literal["auto", "kqview", "llama.cpp"]
Pooling = Literal["none", "mean", "cls", "last", "rank"]
Reasoning = Literal["auto", "on", "off"]
ReasoningFormat = Literal["auto", "none", "deepseek", "deepseek-legacy"]
TracedRequests = Literal["mods", "all"]
EditRights = Literal["off", "admin", "all"]
Duration = Annotated[float, Meta(ge=0.001, le=sys.float_info.max)]
Port = Annotated[int, Meta(ge=0, le=65535)]

PREFIX: Final = "KQVIEW_"
DEMO_CONTEXT: Final = 2048
"""``n_ctx`` of the demo model: prompts of clients are longer than its trained context."""
# Labels of a name; the first may stand for any.
_HOST: Final = re.compile(r"(?:\*\.)?[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
# Not commas within the JSON of a NAME=VALUE.
_NEXT_VALUE: Final = r',(?=\s*\w+=)(?=(?:[^"]|"(?:[^"\\]|\\.)*")*$)'
_NUMERIC: Final = ", ".join(one.name for one in OPTIONS.values() if one.low is not None)


# ---- checks of single texts


def _word(text: str) -> str:
    # Keys travel in a header, whose ends are trimmed and which holds nothing else as it is.
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise ValueError("use printable ASCII without spaces")
    return text


def _template(text: str) -> str:
    if text not in TEMPLATES and "{" not in text:
        known = ", ".join(TEMPLATES)
        raise ValueError(f"write Jinja or {known}, or name a file with --chat-template-file")
    return text


def _origin(text: str) -> str:
    """An origin as browsers send it: ``scheme://host[:port]`` in lower case."""
    if text in ("*", "null", "loopback", "localhost"):  # the last is llama-server's word
        return "loopback" if text == "localhost" else text
    origin = text.lower().rstrip("/")
    scheme, _, host = origin.partition("://")
    if not scheme or not host or set(host) & set("/?#@ "):
        raise ValueError("write scheme://host:port, such as https://a.org")
    return origin


def _host(text: str) -> str:
    """A name as the Host header has it, in lower case and without its port."""
    name = text.lower().removesuffix(".")
    if text != "*" and not _HOST.fullmatch(name):
        raise ValueError("write a name without a port, such as a.example.org")
    return name


def _proxy(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        raise ValueError("write an address or a network, such as 10.0.0.0/8") from None


def _sampling(text: str) -> str:
    name, _, value = text.partition("=")
    option = OPTIONS.get(name)
    if option is None or option.low is None:
        raise ValueError(f"write NAME=VALUE with one of {_NUMERIC}")
    option.checked(_number(value))
    return text


def _number(text: str) -> float:
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        raise ValueError("write a number after the =") from None


def _template_option(text: str) -> str:
    name, equals, _ = text.partition("=")
    if not name.isidentifier() or not equals:
        raise ValueError("write NAME=VALUE, such as reasoning_effort=low")
    return text


def _head_file(text: str) -> str:
    try:
        HeadFile.load(text)
    except (HeadFileError, OSError) as error:
        raise ValueError(f"name a head file: {error}") from None
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the server allows and how it answers; checked when it is built.

    The table has the meaning of each field, which ``kqview serve --help`` shows. Times are in
    seconds, sizes in bytes; 0 turns a limit off if its text says so. Options of a model take effect
    when it is next loaded.
    """

    # ---- what is served
    model: str | None = setting(None, "GGUF file to serve", place="file", restart=True)
    demo: bool = setting(False, "serve the bundled demo model", restart=True)
    hf: str | None = setting(
        None,
        "model on the Hugging Face Hub that kqview serve downloads and serves: OWNER/REPO/FILE",
        restart=True,
    )
    aliases: Names = setting(
        (),
        "names that clients see instead of the model's own; the first one is its id",
        flag="--alias",
        restart=True,
        check=_word,
    )
    models_dir: str | None = setting(
        None,
        "folder whose GGUF files /api/v1/model/load may open; without it, none",
        place="folder",
    )
    n_slots: Count = setting(
        1, "requests generated at a time, each with its own context", flag="--slots"
    )
    n_ctx: Count | None = setting(
        None, "context of a slot in tokens; without it, the model's own or what fits", flag="--ctx"
    )
    n_threads: Count | None = setting(
        None, "compute threads; without it, what the machine grants", flag="--threads"
    )
    n_gpu_layers: CountOrMinusOne = setting(-1, "layers on the GPU; -1 for all", flag="--ngl")
    kv_type: str = setting("f16", "type of the KV cache")
    flash_attn: FlashAttn = setting("auto", "flash attention: auto, on or off")
    attention_kernel: AttentionKernel = setting(
        "auto",
        "what computes attention on the CPU: kqview, which auto means, or llama.cpp",
    )
    ubatch_size: Count = setting(512, "most tokens of a prompt, and of an embedding, in one step")
    lora: Names = setting(
        (),
        "LoRA adapters of the model: GGUF files, each with :SCALE after its name if not 1",
        place="file",
    )
    chat_template: str | None = setting(
        None,
        "chat template to use instead of the model's: Jinja, or a name such as chatml; "
        "--chat-template-file FILE reads it from a file",
        is_text=True,
        check=_template,
    )
    template_options: Names = setting(
        (),
        "variables of the chat template where a request gives none: NAME=VALUE, a value of JSON or "
        "else text, such as reasoning_effort=low; --chat-template-kwargs takes an object of them",
        flag="--template-option",
        separator=_NEXT_VALUE,
        check=_template_option,
    )
    reasoning: Reasoning = setting(
        "auto",
        "whether a model that can reason or not does so in chats, if a request does not say: on, "
        "off, or auto for what its template is made for",
    )
    request_chat_template: bool = setting(
        False,
        "let requests bring a chat_template of their own, which is rendered with limits on its "
        "time and memory",
    )
    pooling: Pooling | None = setting(
        None,
        "how a text becomes a vector, for models whose file does not say: none (a vector for each "
        "token), mean, cls, last, or rank for classifiers",
    )
    attention_budget_bytes: Size | None = setting(
        None, "memory for attention rows; without it, a quarter of the machine's"
    )
    pinned_bytes: Size = setting(
        2**30, "page-locked part of that, where a GPU has layers; 0 for none"
    )
    checkpoint_bytes: Size | None = setting(
        None,
        "memory for checkpoints of recurrent and hybrid models, whose slots go back to them; 0 for "
        "none; without it, 16 for each slot, an eighth of the machine's at most",
    )

    draft: Name | None = setting(
        None,
        "what guesses how texts go on, so that several tokens are evaluated in a step: "
        "prompt-lookup, from the text so far, mtp, layers of the model itself that predict later "
        "tokens, or a GGUF file, a smaller model; without it, "
        "requests with a prediction alone are guessed on",
        flag="--drafter",
    )

    models_budget_bytes: Count | None = setting(
        None,
        "memory for all models of a configuration together, on the host and on devices; the least "
        "recently used one makes room for another; without it, the machine's and its devices' less "
        "what requests and attention rows may take",
    )
    model_wait_s: NotNegative = setting(
        30.0, "longest wait for the memory of models that other requests use"
    )

    # ---- saved slots
    slot_endpoints: bool = setting(
        True, "serve /slots and /sessions, which show, save and restore slots"
    )
    slot_save_path: str | None = setting(
        None,
        "folder for files of saved slots and sessions; without it, none are written or read",
        place="folder",
        restart=True,
    )
    slot_wait_s: NotNegative = setting(10.0, "longest wait for a busy slot to save or change")
    max_state_bytes: Count = setting(2**32, "largest saved slot that a client may send")
    max_sessions: Size = setting(64, "most sessions in memory", restart=True)
    max_session_bytes: Size = setting(2**30, "most bytes of all sessions in memory", restart=True)
    max_saved_bytes: Size = setting(2**36, "most bytes of all files in --slot-save-path")

    # ---- how it answers
    attention_values: AttentionValues | None = setting(
        None,
        "values of rows: logits, scores or probs; without it, logits for KoboldAI's API and probs "
        "for the others",
    )
    attention_format: DefaultFormat = setting(
        "per_layer", "shape of rows if a request does not say: per_layer or aggregated"
    )

    context_shift: bool = setting(
        False,
        "drop old tokens when a slot is full and go on, in llama-server's, OpenAI's and "
        "Anthropic's APIs",
    )
    sampling: Names = setting(
        (),
        "how tokens are chosen if a request to llama-server's, OpenAI's or Anthropic's API does "
        f"not say: NAME=VALUE, such as temperature=0.6; names are {_NUMERIC}",
        check=_sampling,
    )
    reasoning_format: ReasoningFormat = setting(
        "auto",
        "where reasoning goes if a request does not say: none leaves it in the content, the others "
        "put it into reasoning_content",
    )
    default_max_tokens: Count | None = setting(
        None,
        "most tokens of a request to llama-server's, OpenAI's or Anthropic's API that does not "
        "say; without it, as many as fit",
    )
    reasoning_budget: CountOrMinusOne = setting(
        -1,
        "most tokens of reasoning in a chat of llama-server's, OpenAI's or Anthropic's API if a "
        "request does not say; 0 for none, -1 for any number",
    )

    heads: Names = setting(
        (),
        "head files of kqview calibrate, for citations and re-ranking by attention if a request "
        "brings none: of these, the first for the task and the model; without one, all heads count "
        "alike",
        place="file",
        check=_head_file,
    )

    # ---- mods and traces
    mods_dir: str | None = setting(
        None, "folder of the mods that requests may name; without it, none", place="folder"
    )
    edits: EditRights = setting(
        "off",
        "whose requests may change activations and attention, with the field edits: off (nobody's),"
        " admin (those with an admin key) or all",
    )
    control_vectors_dir: str | None = setting(
        None, "folder of the control vectors that edits may name; without it, none", place="folder"
    )
    max_mods: Count = setting(8, "maximum number of mods in one request")
    mod_time_limit_s: Duration = setting(
        5.0, "time limit of each call of a mod; a call that takes longer has no effect"
    )
    mods_strict: bool = setting(
        False, "end a request whose mod fails with an error, instead of going on without the mod"
    )
    trace_url: str | None = setting(
        None,
        "URL to post traces to, such as http://127.0.0.1:6767/ingest; without it, none are posted",
        restart=True,
    )
    trace: TracedRequests = setting(
        "mods", "which requests to trace: mods (those with mods) or all"
    )
    trace_spool: str | None = setting(
        None,
        "folder for traces that are not sent yet; without it, a crash loses them",
        place="new",
        restart=True,
    )
    trace_key: str | None = setting(
        None, "API key for the trace receiver", is_secret=True, restart=True
    )

    props: bool = setting(False, "answer POST /props, which changes nothing")
    verbose: bool = setting(
        False, "show the prompt that a chat became in each reply, as __verbose, not only if asked"
    )

    # ---- where and for whom
    host: str = setting("127.0.0.1", "address to listen on", restart=True)
    port: Port = setting(5001, "port to listen on; 0 for a free one", restart=True)
    ssl_certfile: str | None = setting(
        None, "certificate chain in PEM; turns on HTTPS, and HTTP off", place="file", restart=True
    )
    ssl_keyfile: str | None = setting(
        None,
        "private key of the certificate in PEM, if it is in another file",
        place="file",
        restart=True,
    )
    public: bool = setting(False, "allow an address that others can reach without an API key")
    api_keys: Names = setting(
        (),
        "keys that may use the API; without any, the API is open",
        is_secret=True,
        flag="--api-key",
        check=_word,
    )
    admin_keys: Names = setting(
        (),
        "keys that may also switch the model and see what other keys do; without any, nobody may",
        is_secret=True,
        flag="--admin-key",
        check=_word,
    )
    query_key: bool = setting(False, "accept ?api_key= on WebSockets; it may end up in logs")
    cors_origins: Names = setting(
        ("loopback",),
        "origins of pages that may call the API; loopback for pages of this machine, * for any",
        flag="--cors-origin",
        check=_origin,
    )
    allowed_hosts: Names = setting(
        (),
        "names by which clients may call the server, besides addresses, localhost and --host; "
        "*.example.org for its subdomains, * for any",
        check=_host,
    )
    trusted_proxies: Names = setting(
        (),
        "addresses or networks of proxies whose X-Forwarded-For counts; without any, none does",
        flag="--trusted-proxy",
        check=_proxy,
    )

    # ---- limits
    max_body_bytes: Count = setting(32 * 2**20, "largest request body")
    max_message_bytes: Count = setting(32 * 2**20, "largest WebSocket message", restart=True)
    max_reply_bytes: Count = setting(
        2**30, "largest reply that is not streamed, attention included"
    )
    memory_budget_bytes: Count | None = setting(
        None,
        "memory for all running requests: bodies, messages, replies; one client may hold as much "
        "as stays free; without it, a quarter of the machine's",
        restart=True,
    )
    kept_attention_bytes: Size = setting(
        256 * 2**20,
        "memory for attention rows that clients fetch by id; 0 keeps none, and it is at most a "
        "quarter of memory_budget_bytes",
        restart=True,
    )
    max_tokens: Count = setting(8192, "most tokens that a request may generate")
    max_context: Count | None = setting(None, "longest prompt in tokens; without it, a slot's size")
    max_samples: Count = setting(16, "most samples of one request")
    max_running: Count = setting(
        64, "most requests at a time, waiting ones included; more for keys below their share"
    )
    max_queued: Size = setting(
        32, "most requests that wait for a slot; more for keys below their share"
    )
    max_connections: Count = setting(1024, "most connections at a time", restart=True)
    max_connections_per_client: Count = setting(
        128, "most connections of one address, trusted proxies excepted"
    )
    rate_limit: NotNegative = setting(0.0, "requests per minute for each client; 0 for no limit")
    request_timeout_s: NotNegative = setting(
        3600.0, "longest request, waiting included; 0 for no limit"
    )
    idle_timeout_s: Duration = setting(
        120.0, "idle clients are disconnected after this time", restart=True
    )
    shutdown_grace_s: NotNegative = setting(
        5.0, "time that running requests have to end at SIGTERM", restart=True
    )
    stall_timeout_s: NotNegative = setting(
        60.0,
        "silence of the engine after which /health answers 503; after twice that, the process "
        "ends; 0 for no limit",
        restart=True,
    )
    supervise: bool = setting(True, "restart the server when it crashes or hangs", restart=True)
    access_log: bool = setting(True, "one JSON line per request on the log kqview.access")

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            RequestError: A setting is of the wrong type or out of its range.
        """
        for name, row in rows_of(Settings).items():
            object.__setattr__(self, name, row.checked(getattr(self, name)))

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
        return {name: _number(value) for name, _, value in pairs}

    @property
    def template_variables(self) -> dict[str, Any]:
        """The values of ``template_options`` by name, and what ``reasoning`` says."""
        found: dict[str, Any] = {}
        if self.reasoning != "auto":
            found["enable_thinking"] = self.reasoning == "on"
        for name, _, value in (one.partition("=") for one in self.template_options):
            try:
                found[name] = json_input.loads(value)
            except ValueError:
                found[name] = value
        return found


def values_in(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings that *environ*, such as ``os.environ``, gives; not checked yet.

    Names that begin with ``KQVIEW_`` and are no setting are left alone.
    """
    found: dict[str, Any] = {}
    for name, row in rows_of(Settings).items():
        text = environ.get(PREFIX + name.upper())
        # An empty variable is how some tools leave one out; for a list it is an empty list.
        if text or (text is not None and row.kind is tuple):
            found[name] = row.read(text)
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach *host*."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
