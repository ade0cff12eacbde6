"""What the tests of the dream dialect share: its goldens, the seed's model, a client, decoding."""

from __future__ import annotations

import base64
import json
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args, get_origin
from unittest.mock import patch

import msgspec
import numpy as np
from websockets.sync.client import connect

from kqview.server.api.koboldai import request
from kqview.server.api.koboldai.request import (
    Generate,
    KoboldFields,
    KoboldGenerateBody,
    KoboldPlan,
    plan_of,
)
from kqview.server.settings import Settings
from kqview.types import Capture, ModelInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kqview import Engine, Token
    from kqview.server.models.run import AttentionWanted

GOLDENS = Path(__file__).parents[1] / "server" / "dream" / "goldens"
PROMPT = "Mirelda found a silver key near the old bridge. Then Mirel"
WITHIN_S = 60.0

# The model of the seed's examples.
QWEN = ModelInfo(
    name="Qwen/Qwen2.5-7B-Instruct", architecture="qwen2", n_vocab=151936, n_layer=28, n_head=28,
    n_head_kv=4, n_embd=3584, n_ctx_train=32768, attention_layers=tuple(range(28)),
    attention_scale=128**-0.5, bos_token_id=151643, eos_token_id=151645, eot_token_id=151645,
    pad_token_id=151643,
    special_tokens={"bos": "<|endoftext|>", "eos": "<|im_end|>", "padding": "<|endoftext|>"},
    rope_freq_base=1e6, rope_freq_scale=1.0, chat_template="{% for message in messages %}...",
    n_params=7_615_616_512, size_bytes=2**33, file_type="Q8_0", classifier_labels=(),
    metadata={"qwen2.rope.freq_base": "1000000.000000"},
)  # fmt: skip
SEED = 12345  # of requests that give none
QWEN_IDS = {"<|im_start|>": 151644, "<|im_end|>": 151645}


def golden(name: str) -> Any:
    """An example of the seed."""
    return json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))


def entry_of(model: ModelInfo = QWEN, max_context: int | None = None) -> Any:
    """As much of a `ModelEntry` as requests and facts are read with."""

    def tokenize(text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        return [QWEN_IDS[text]] if parse_special and text in QWEN_IDS else [1, 2]

    n_ctx = model.n_ctx_train if max_context is None else max_context
    return types.SimpleNamespace(
        engine=types.SimpleNamespace(model=model, tokenize=tokenize), name=model.name,
        max_context=n_ctx, max_context_of=lambda engine: n_ctx,
    )  # fmt: skip


def plan_from(
    fields: dict[str, Any],
    *,
    kind: type[KoboldFields] | None = None,
    model: ModelInfo = QWEN,
    settings: Settings | None = None,
    **options: Any,
) -> KoboldPlan:
    """The plan of a body, of a WebSocket's message where it has a type."""
    kind = kind or (Generate if "type" in fields else KoboldGenerateBody)
    body = msgspec.convert(fields, kind, strict=False)
    entry = entry_of(model, options.pop("max_context", None))
    with patch.object(request.secrets, "randbelow", lambda n: SEED):
        return plan_of(body, entry, settings or Settings(), request_id="made-up", **options)


def shown_of(plan: KoboldPlan) -> AttentionWanted | None:
    """The attention that its client sees."""
    return plan.rows and plan.rows.wanted


def decoded(attention: dict[str, Any]) -> np.ndarray:
    """The array of an attention object; its ``data`` may be base64, bytes or a list."""
    data = attention["data"]
    if isinstance(data, list):
        return np.array(data, np.float32)
    raw = base64.b64decode(data, validate=True) if isinstance(data, str) else data
    return np.frombuffer(raw, attention["dtype"]).reshape(attention["shape"])


def reference(
    engine: Engine, ids: Sequence[int], n_tokens: int, capture: Capture | None, **options: Any
) -> list[Token]:
    """What the engine itself says, greedily; slots are empty before and after, as a server's are.

    An empty slot makes two runs of one prompt equal to the last bit.
    """
    clear(engine)
    options = {"temperature": 0.0, "ignore_eos": True, **options}
    tokens = list(engine.generate(ids, max_tokens=n_tokens, capture=capture, **options))
    clear(engine)
    return tokens


def clear(engine: Engine) -> None:
    """Empty every slot."""
    for slot in engine.slots:
        slot.clear()


def wrong_value(kind: Any) -> Any:
    """A JSON value that a field of *kind* does not take."""
    kinds = get_args(kind) if get_origin(kind) in (types.UnionType, None) else (kind,)
    takes_objects = any(get_origin(one) is dict for one in kinds)
    return [[[]]] if takes_objects else {"no": "such value"}


class DreamSocket:
    """A client of the WebSocket; a context manager."""

    def __init__(self, ws_url: str, *, packs: bool = False, **options: Any) -> None:
        self._packs = packs
        # Newer versions connect on entry.
        self.socket = connect(
            f"{ws_url}/api/v1/generate/stream", max_size=None, compression=None,
            subprotocols=["msgpack"] if packs else None, **options,
        ).__enter__()  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, type_: str = "generate", **fields: Any) -> None:
        """Send a message; generations are greedy and do not end by themselves."""
        if type_ == "generate":
            fields = {"temperature": 0, "ban_eos_token": True, **fields}
        message = {"type": type_, **fields}
        self.socket.send(msgspec.msgpack.encode(message) if self._packs else json.dumps(message))

    def event(self) -> dict[str, Any]:
        """The next event; values that come in a frame of their own are its attention's data."""
        raw = self.socket.recv(timeout=WITHIN_S)
        assert isinstance(raw, bytes) == self._packs
        event = msgspec.msgpack.decode(raw) if self._packs else json.loads(raw)
        attention = event.get("attention", {})
        if attention.get("encoding") == "binary" and not self._packs:
            attention["data"] = self.socket.recv(timeout=WITHIN_S)
            assert isinstance(attention["data"], bytes)
        return event

    def until(self, kind: str) -> list[dict[str, Any]]:
        """Events up to the first one of *kind*, which is the last one returned."""
        events = [self.event()]
        while events[-1]["type"] != kind:
            assert events[-1]["type"] not in ("done", "error"), events[-1]
            events.append(self.event())
        return events

    def generate(self, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Run one generation; its token events, and its done event."""
        self.send(**fields)
        events = self.until("done")
        return [one for one in events if one["type"] == "token"], events[-1]
