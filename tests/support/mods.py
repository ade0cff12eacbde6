"""A vocabulary and a model of a few lines for tests of mods, and a driver that follows the rules.

The driver applies what one mod answers as an engine does, so that a test can say what the text is
afterwards. It decodes greedily.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kqview.mods import (
    ActionBuilder,
    Added,
    AdjustedLogits,
    Backtrack,
    ContextInfo,
    ForceOutput,
    ForceTokens,
    ForwardPass,
    ModTokenizer,
    Noop,
    Prefilled,
    RequestEnd,
    Sampled,
    ToolCalls,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

END = "<end>"


class Words:
    """A vocabulary: the end of the text, all bytes, and *words*, of which the longest is taken."""

    bos_token_id: int | None = None
    eos_token_id: int | None = 0
    has_vocab = True

    def __init__(self, *words: str) -> None:
        self.pieces = [
            END.encode(),
            *(bytes([byte]) for byte in range(256)),
            *(word.encode() for word in words),
        ]
        self.n_vocab = len(self.pieces)
        self._ids = {piece: i for i, piece in enumerate(self.pieces)}

    def control_tokens(self) -> list[int]:
        return [0]

    def tokenize(self, text: str, add_special: bool) -> list[int]:
        rest = text.encode()
        ids: list[int] = []
        while rest:
            n = next(n for n in range(len(rest), 0, -1) if rest[:n] in self._ids)
            ids.append(self._ids[rest[:n]])
            rest = rest[n:]
        return ids

    def id(self, piece: str) -> int:
        return self._ids[piece.encode()]

    def tokenizer(self) -> ModTokenizer:
        return ModTokenizer(
            self,
            tokenize=self.tokenize,
            detokenize=lambda ids: b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace"),
            token_bytes=self.pieces.__getitem__,
        )


@dataclass
class Driven:
    """What a mod made of a request."""

    text: str
    ids: list[int]
    events: list[Any] = field(default_factory=list[Any])
    finish_reason: str = "stop"
    tool_calls: Any = None


def drive(
    mod: Any,
    words: Words,
    model: Callable[[str], Sequence[str]],
    *,
    prompt: str = "",
    max_tokens: int = 200,
    request_id: str = "r",
    attention: Callable[[str, int], NDArray[np.float32] | None] = lambda text, n: None,
    messages: Sequence[Any] | None = None,
) -> Driven:
    """Run one request with one mod.

    *model* names the tokens that it likes after a text, best first; all others are worse, in the
    order of their ids. *attention* is the row for the text and the number of tokens before it.
    """
    tokenizer = words.tokenizer()
    prompt_ids = words.tokenize(prompt, False)
    done = Driven("", [])
    if hasattr(mod, "begin"):
        mod.begin(request_id, tokenizer)

    def ask(event: Any) -> Any:
        done.events.append(event)
        return mod(event, ActionBuilder(event), tokenizer) or Noop()

    def finish(reason: str, tool_calls: Any = None) -> Driven:
        if getattr(mod, "on_end", None) is not None:
            mod.on_end(RequestEnd(request_id, reason, tuple(done.ids)))
        done.finish_reason, done.tool_calls = reason, tool_calls
        done.text = tokenizer.decode(done.ids, skip_special_tokens=True)
        return done

    info = ContextInfo(np.array(prompt_ids, np.int32), messages)
    first = ask(Prefilled(request_id, 0, max_tokens, info))
    if isinstance(first, ForceOutput):
        done.ids = first.tokens
        return finish("stop")
    for step in range(1, 1000):
        text = tokenizer.decode([*prompt_ids, *done.ids])
        liked = [words.id(word) for word in model(text)]
        logits = np.linspace(-1, -2, words.n_vocab, dtype=np.float32)
        logits[liked] = np.linspace(2, 1, len(liked), dtype=np.float32)
        n_tokens = len(prompt_ids) + len(done.ids)
        row = attention(text, n_tokens)
        sampled: int | None = None
        forced: list[int] | None = None
        removed = False
        for kind in ("forward", "sampled", "added"):
            if kind == "forward":
                event: Any = ForwardPass(request_id, step, logits, n_tokens, row)
            elif kind == "sampled":
                assert sampled is not None
                event = Sampled(request_id, step, sampled)
            else:
                assert sampled is not None
                new = [sampled] if forced is None else forced
                done.ids += new
                event = Added(request_id, step, new, forced is not None)
            action = ask(event)
            if kind == "forward":
                adjusted = action.logits if isinstance(action, AdjustedLogits) else logits
                sampled = int(adjusted.argmax())
            match action:
                case ForceOutput():
                    done.ids = action.tokens
                    return finish("stop")
                case ToolCalls():
                    done.ids = []
                    return finish("tool_calls", action.tool_calls)
                case ForceTokens() if kind == "added":
                    done.ids += action.tokens
                case ForceTokens() if forced is None:
                    forced = action.tokens
                case Backtrack():
                    done.ids = done.ids[: max(0, len(done.ids) - action.n)]
                    removed = True
                    if action.tokens and kind != "added":
                        forced = action.tokens
                    elif action.tokens:
                        done.ids += action.tokens
                case _:
                    pass
            if removed and (forced is None or kind == "added"):
                break
        if 0 in done.ids:
            del done.ids[done.ids.index(0) + 1 :]
            return finish("stop")
        if len(done.ids) >= max_tokens:
            del done.ids[max_tokens:]
            return finish("length")
    raise AssertionError("the request does not end")
