"""How many tokens does a chat evaluate with checkpoints, without, and in llama-server with its own?

A hybrid model with random weights of 24 layers, every second one recurrent, and chats of 20 turns:
the last message of each turn edited once, a stop string in each answer, two users over one slot,
a slot that is saved to a file before each edit and restored in a new engine. llama-server (of the
same commit) has one slot, its own checkpoints, and no cache of other prompts in memory, except in
the last column. Then the memory of sliding windows without ``swa_full``, and what a branch costs.
Behind each count stands the least that any cache could need: each beginning of the texts, once.
Answers are greedy and may differ by rounding, and with stop strings in their lengths, so columns
compare by what they need beyond that. Counts of tokens and bytes are the same on every machine; the
seconds are one run each.

    python bench/checkpoints.py [--turns N] [--threads N] [--columns NAME ...]
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from models import NotHere, peer
from started import Started, free_port, is_healthy

from kqview import Engine
from kqview.engine import check_opening

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parent.parent
IM_END = 258  # of the model's vocabulary
N_CTX = 16384
N_MESSAGE = 120
N_ANSWER = 40
N_SYSTEM = 300
ANSWER_LIMIT_S = 600


class Chat(Protocol):
    """What answers, in one slot."""

    def answer(self, prompt: list[int], stop: Sequence[str] = ()) -> list[int]:
        """The tokens of an answer."""
        ...

    def reopen(self) -> None:
        """End it, and go on with what it has saved to a file."""
        ...

    @property
    def n_evaluated(self) -> int:
        """Tokens that went through the model."""
        ...


class Ours:
    """An engine with one slot."""

    def __init__(self, model: Path, n_threads: int, checkpoint_bytes: int | None = None) -> None:
        self._open = lambda: Engine(
            model, n_ctx=N_CTX, n_threads=n_threads, checkpoint_bytes=checkpoint_bytes
        )
        self._file = model.with_suffix(".ses1")
        self._engine = self._open()
        self._n_before = 0

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def answer(self, prompt: list[int], stop: Sequence[str] = ()) -> list[int]:
        generation = self._engine.generate(
            prompt, max_tokens=N_ANSWER, temperature=0.0, ignore_eos=True, stop=stop
        )
        generation.read()
        return generation.tokens

    def reopen(self) -> None:
        self._engine.slots[0].save_file(self._file)
        self._n_before = self.n_evaluated
        self._engine.close()
        self._engine = self._open()
        self._engine.slots[0].restore_file(self._file)

    @property
    def n_evaluated(self) -> int:
        stats = self._engine.stats()
        return self._n_before + stats.prefill_tokens + stats.decode_tokens


class Theirs(Started):
    """llama-server with one slot."""

    def __init__(self, model: Path, n_threads: int, cache_mib: int) -> None:
        self._port = free_port()
        self._folder = tempfile.TemporaryDirectory()
        self.n_evaluated = 0
        self._command = [
            str(peer("llama-server")), "--model", str(model), "--threads", str(n_threads),
            "--parallel", "1", "--ctx-size", str(N_CTX), "--cache-ram", str(cache_mib),
            "--override-kv", f"jamba.context_length=int:{N_CTX}",  # the most that it gives a slot
            "--slot-save-path", self._folder.name, "--host", "127.0.0.1", "--port", str(self._port),
        ]  # fmt: skip
        super().__init__(self._command)

    def is_ready(self) -> bool:
        """Whether it answers."""
        return is_healthy(self._port)

    def answer(self, prompt: list[int], stop: Sequence[str] = ()) -> list[int]:
        said = self._post(
            "/completion",
            {
                "prompt": prompt, "n_predict": N_ANSWER, "temperature": 0, "ignore_eos": True,
                "stop": list(stop), "cache_prompt": True, "return_tokens": True,
            },
        )  # fmt: skip
        # The last token is sampled, and evaluated with the next prompt.
        self.n_evaluated += said["timings"]["prompt_n"] + said["timings"]["predicted_n"] - 1
        return said["tokens"]

    def reopen(self) -> None:
        self._post("/slots/0?action=save", {"filename": "slot"})
        super().__exit__(None, None, None)
        super().__init__(self._command)
        self.__enter__()
        self._post("/slots/0?action=restore", {"filename": "slot"})

    def _post(self, path: str, body: dict[str, object]) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_LIMIT_S)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(f"{path}: {response.status} {data[:500]!r}")
            return json.loads(data)
        finally:
            connection.close()


class Counted:
    """A chat, and the least that it could evaluate."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._begun = set[int]()  # hashes of the beginnings of all texts

    def answer(self, prompt: list[int], stop: Sequence[str] = ()) -> list[int]:
        answer = self._chat.answer(prompt, stop)
        begun = 0
        for one in (*prompt, *answer[:-1]):  # the last token is only sampled
            begun = hash((begun, one))
            self._begun.add(begun)
        return answer

    def reopen(self) -> None:
        self._chat.reopen()

    @property
    def n_evaluated(self) -> int:
        return self._chat.n_evaluated

    @property
    def n_least(self) -> int:
        """Tokens that no cache could save."""
        return len(self._begun)


def message(seed: int, n: int = N_MESSAGE) -> list[int]:
    """Ids of a message with its end, as a chat template would end it, and the next one's header."""
    return [*np.random.default_rng(seed).integers(97, 123, n).tolist(), IM_END, 10]


def extended(chat: Chat, prompt: list[int], stop: Sequence[str] = ()) -> list[int]:
    """The text with its answer, whose end the next prompt has."""
    return [*prompt, *chat.answer(prompt, stop), IM_END, 10]


def edited(chat: Chat, n_turns: int) -> None:
    """Each message is sent, then sent again in another version."""
    text = message(0, N_SYSTEM)
    for turn in range(n_turns):
        extended(chat, text + message(1000 + turn))
        text = extended(chat, text + message(2000 + turn))


def stopped(chat: Chat, n_turns: int) -> None:
    """Each answer ends with a stop string, behind which the chat goes on."""
    text = message(0, N_SYSTEM)
    for turn in range(n_turns):
        text = extended(chat, text + message(1000 + turn), stop=["e", "n"])


def shared(chat: Chat, n_turns: int) -> None:
    """Two users take turns in one slot; their chats have the system prompt in common."""
    texts = [message(0, N_SYSTEM)] * 2
    for turn in range(n_turns):
        for user in range(2):
            texts[user] = extended(chat, texts[user] + message(1000 * (user + 1) + turn))


def restored(chat: Chat, n_turns: int) -> None:
    """As edited; between the two versions the process ends, and the slot comes out of a file."""
    text = message(0, N_SYSTEM)
    for turn in range(n_turns):
        extended(chat, text + message(1000 + turn))
        chat.reopen()
        text = extended(chat, text + message(2000 + turn))


CASES: dict[str, Callable[[Chat, int], None]] = {
    "last message edited": edited,
    "a stop string each turn": stopped,
    "two users, one slot": shared,
    "edited after a restart": restored,
}


COLUMNS: dict[str, Callable[[Path, int], Ours | Theirs]] = {
    "without": lambda model, n_threads: Ours(model, n_threads, 0),
    "with": Ours,
    "llama-server": lambda model, n_threads: Theirs(model, n_threads, 0),
    "and its prompt cache": lambda model, n_threads: Theirs(model, n_threads, 8192),
}


def chats(model: Path, n_turns: int, n_threads: int, columns: list[str]) -> None:
    """The table of the cases: tokens evaluated, seconds."""
    print(f"| chat of {n_turns} turns |", *(f"{name}: tokens, s |" for name in columns))
    print("| --- |", *("--- |" for _ in columns))
    for case, run in CASES.items():
        print(f"| {case} |", end="", flush=True)
        for name in columns:
            with COLUMNS[name](model, n_threads) as opened:
                chat, begun = Counted(opened), time.monotonic()
                run(chat, n_turns)
                n = f"{chat.n_evaluated:,} of {chat.n_least:,}"
                print(f" {n}, {time.monotonic() - begun:.1f} |", end="", flush=True)
        print()


N_WINDOW_CTX = 32768
N_LONG = 8192


def windows(folder: Path, n_threads: int) -> None:
    """What `swa_full=False` saves a model with the cache of Gemma 3 1B, and what it costs."""
    from tests.support.tiny_gguf import write_gemma3

    model = write_gemma3(folder / "windows.gguf")
    text = np.random.default_rng(1).integers(97, 123, N_LONG).tolist()
    print(f"\n| windows of 512, {N_WINDOW_CTX:,} tokens | MB in all | checkpoint, MB | saved, MB |",
          f"of {N_LONG:,} tokens evaluated: end edited | middle edited |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- |")
    for swa_full in (True, False):
        (need, *_) = check_opening(
            model, n_ctx=N_WINDOW_CTX, swa_full=swa_full, n_threads=n_threads
        )
        evaluated: list[int] = []
        with Engine(model, n_ctx=N_WINDOW_CTX, swa_full=swa_full, n_threads=n_threads) as engine:
            slot = engine.slots[0]
            engine.generate(text, max_tokens=1, temperature=0.0, ignore_eos=True).read()
            blob, marks = slot.save_marked()
            each = len(marks.checkpoints) / max(1, len(slot.checkpoints))
            for at in (N_LONG - 200, N_LONG // 2):
                changed = [*text[:at], *reversed(text[at:])]
                generation = engine.generate(changed, max_tokens=1, temperature=0.0)
                generation.read()
                evaluated.append(N_LONG - generation.usage.cached_tokens)
        print(f"| swa_full={swa_full} | {need.needed_bytes / 1e6:,.0f} | {each / 1e6:,.0f} |",
              f"{len(blob) / 1e6:,.0f} |", *(f"{n:,} |" for n in evaluated))  # fmt: skip


def branches(model: Path, n_threads: int) -> None:
    """What three branches and a token of each take, beside evaluating the text."""
    text = np.random.default_rng(1).integers(97, 123, N_LONG).tolist()
    with Engine(model, n_ctx=N_CTX, n_slots=4, n_threads=n_threads) as engine:

        def ms(work: Callable[[], object]) -> float:
            begun = time.monotonic()
            work()
            return (time.monotonic() - begun) * 1e3

        def token(slot: int) -> None:
            ids = [*text, 97]
            engine.generate(ids, max_tokens=1, slot=slot, temperature=0.0, ignore_eos=True).read()

        def branch() -> None:
            for slot in engine.branch(0, 3):
                token(slot.id)

        rows = {
            "evaluated": ms(lambda: token(0)),
            "a further token": ms(lambda: token(0)),
            "3 branches, a token of each": ms(branch),
            "the same again": ms(branch),
        }
        n_mb = len(engine.slots[0].save()) / 1e6
    print(f"\n| {N_LONG:,} tokens, {n_mb:,.0f} MB | ms |\n| --- | --- |")
    for name, value in rows.items():
        print(f"| {name} | {value:,.0f} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=[*COLUMNS])
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.support.tiny_gguf import write_jamba

    try:
        peer("llama-server")
    except NotHere as error:
        given.columns = [name for name in given.columns if name in ("without", "with")]
        print(f"without llama-server: {error}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        model = write_jamba(Path(folder) / "hybrid.gguf", n_layer=24, n_embd=256)
        chats(model, given.turns, given.threads, given.columns)
        windows(Path(folder), given.threads)
        branches(model, given.threads)


if __name__ == "__main__":
    main()
