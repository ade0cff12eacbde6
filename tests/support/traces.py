"""A long trace as an engine posts it, with mods at work in it; the short ones are JSON files.

Traces are read back as their readers may do it.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from kqview.trace import Trace

FOLDER = Path(__file__).parents[1] / "ingest" / "traces"
SHORT = sorted(path.stem for path in FOLDER.glob("*.json"))

_WORDS = ["One", " day", ",", " Tom", " found", " a", " red", " ball", ".", " Then", " he", "\n"]


def read_trace(given: str | bytes | dict[str, Any]) -> Trace:
    """The trace in JSON, or in what `Trace.to_payload` returns."""
    msgspec: Any = pytest.importorskip("msgspec")
    return msgspec.convert(json.loads(given) if isinstance(given, str | bytes) else given, Trace)


def short_trace(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def long_trace(n_steps: int, *, request_id: str = "long", seed: int = 0) -> dict[str, Any]:
    """A token a step; every fourth step or so a mod forces tokens or takes some back."""
    random_ = random.Random(seed)
    made = _Maker()
    ids: list[int] = []
    prompt = [random_.randrange(len(_WORDS)) for _ in range(20)]
    made.event("Prefilled", 0, prompt_length=20, max_steps=n_steps, details=_texts(prompt))
    for step in range(1, n_steps + 1):
        n_columns = len(prompt) + len(ids)
        token = _forward(made, step, n_columns, random_)
        made.event("Sampled", step, sampled_token=token, token_text=_WORDS[token])
        what = random_.choice(("noop", "noop", "noop", "force", "backtrack", "raise"))
        tokens = [random_.randrange(len(_WORDS)) for _ in range(random_.randrange(1, 4))]
        if what == "force":
            made.call("lead", "ForceTokens", tokens=tokens)
            ids += made.added(step, tokens, forced=True)
            continue
        ids += made.added(step, [token])
        if what == "backtrack":
            n = random_.randrange(1, 5)
            made.call("fix", "Backtrack", tokens=tokens, backtrack_steps=n)
            del ids[max(0, len(ids) - n) :]
            ids += tokens
        elif what == "raise":
            made.call("fix", "Noop", error="ValueError: no")
    made.payload["request"] = {
        "request_id": request_id, "model": "demo", "final_token_ids": ids,
        "user_prompt": "".join(_WORDS[i] for i in prompt), "user_prompt_token_ids": prompt,
    }  # fmt: skip
    return made.payload


def cut(payload: dict[str, Any], n_events: int) -> dict[str, Any]:
    """The trace as it was after *n_events* events."""
    calls = [c for c in payload["mod_calls"] if c["event_sequence_order"] < n_events]
    return payload | {
        "events": payload["events"][:n_events],
        "mod_calls": calls,
        "actions": [a for a in payload["actions"] if a["mod_call_sequence"] < len(calls)],
    }


def _forward(made: _Maker, step: int, n_columns: int, random_: random.Random) -> int:
    token = random_.randrange(len(_WORDS))
    p = random_.uniform(0.1, 0.95)
    rest = [(token + 1 + i) % len(_WORDS) for i in range(4)]
    top = [(token, p), *((other, (1 - p) / 5) for other in rest)]
    seen = sorted(random_.sample(range(n_columns), 8))
    made.event(
        "ForwardPass", step, input_text=f"step {step}",
        top_tokens=[
            {"token": one, "token_str": _WORDS[one], "logprob": math.log(q), "prob": q}
            for one, q in top
        ],
        details={"entropy": random_.uniform(0, 3), "attention": {
            "positions": seen, "weights": [0.1] * 8, "rest": 0.2, "n_columns": n_columns,
        }},
    )  # fmt: skip
    return token


def _texts(ids: list[int]) -> dict[str, Any]:
    return {"tokens_as_text": [_WORDS[i] for i in ids]}


class _Maker:
    """The lists of a payload, which name each other's entries by index."""

    def __init__(self) -> None:
        self.payload: dict[str, Any] = {
            "events": [], "mod_calls": [], "mod_logs": [], "actions": []
        }  # fmt: skip

    def event(self, kind: str, step: int, **known: Any) -> None:
        events = self.payload["events"]
        events.append({"event_type": kind, "step": step, "sequence_order": len(events), **known})

    def added(self, step: int, ids: list[int], *, forced: bool = False) -> list[int]:
        self.event(
            "Added", step, added_tokens=ids, added_token_count=len(ids), forced=forced,
            details=_texts(ids),
        )  # fmt: skip
        return ids

    def call(
        self,
        mod: str,
        action: str,
        *,
        tokens: list[int] | None = None,
        error: str | None = None,
        **known: Any,
    ) -> None:
        """A call of *mod* for the last event, and its action."""
        event = self.payload["events"][-1]
        calls = self.payload["mod_calls"]
        calls.append({
            "event_sequence_order": event["sequence_order"], "mod_name": mod,
            "event_type": event["event_type"], "step": event["step"], "execution_time_ms": 0.25,
            "exception_occurred": error is not None, "exception_message": error,
        })  # fmt: skip
        if tokens is not None:
            known |= {"tokens": tokens, "token_count": len(tokens)}
        self.payload["actions"].append({
            "mod_call_sequence": len(calls) - 1, "action_type": action, "action_order": 0, **known
        })  # fmt: skip
