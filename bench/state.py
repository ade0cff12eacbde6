"""How fast are saving and restoring a slot of 100 MB, compared with copying as many bytes?

The slot holds a prompt that fills 100 MB of F16 cache. A pair is one save, or restore, and one copy
of the blob's bytes with memcpy: for a save into new memory (a bytes object, as save makes one), for
a restore into memory that is there already (as the cache is). A restore reads the blob twice: once
to check every number, once to copy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from console import attempt, main
from report import Timing
from runs import open_engine

from kqview.bench.sweep import prompt_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from console import ProgressLine
    from settings import Settings

    from kqview import Engine
    from kqview.bench.records import LeftOut

BLOB_BYTES = 100_000_000
QUICK_BLOB_BYTES = 1_000_000
# Name: (what, flash attention)
CASES = {
    "state-save-flash": ("Slot.save", True),
    "state-save-plain": ("Slot.save", False),
    "state-restore-flash": ("Slot.restore", True),
    "state-restore-plain": ("Slot.restore", False),
}
WEIGHTS = dict.fromkeys(CASES, 25.0)
# At least half of memcpy's bandwidth.
TARGET = 2.0


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases, one engine for each setting of flash attention."""
    for flash_attn in (True, False):
        names = [n for n in settings.chosen(CASES) if CASES[n][1] == flash_attn]
        if not names:
            continue
        n_bytes = QUICK_BLOB_BYTES if settings.is_quick else BLOB_BYTES
        # The size of the blob decides, not --context.
        n_tokens = tokens_of(settings, n_bytes)
        with open_engine(replace(settings, n_context=n_tokens), flash_attn=flash_attn) as engine:
            ids = prompt_ids(n_tokens, engine.model.n_vocab)
            engine.generate(ids, max_tokens=1, ignore_eos=True).read()
            for name in names:
                yield attempt(name, _measure, settings, line, engine, name)


def tokens_of(settings: Settings, n_bytes: int) -> int:
    """Tokens whose slot has about *n_bytes*."""
    with open_engine(replace(settings, n_context=64), flash_attn=True) as engine:
        slot = engine.slots[0]
        sizes: list[int] = []
        for n_tokens in (1, 2):
            list(engine.attend(prompt_ids(n_tokens, engine.model.n_vocab)))
            sizes.append(len(slot.save()))
    return n_bytes // (sizes[1] - sizes[0])


def _measure(settings: Settings, line: ProgressLine, engine: Engine, name: str) -> Timing:
    what, flash_attn = CASES[name]
    slot = engine.slots[0]
    blob = slot.save()
    source = np.frombuffer(blob, np.uint8)
    room = np.zeros_like(source)
    is_save = what == "Slot.save"
    copy: Callable[[], object] = source.tobytes if is_save else lambda: np.copyto(room, source)
    ours: Callable[[], object] = slot.save if is_save else lambda: slot.restore(blob)
    pairs = line.pairs(
        name, lambda: _ms(settings, copy), lambda: _ms(settings, ours), settings.n_pairs
    )
    return Timing(
        name=name,
        what=f"{what}, F16 cache; flash attention {'on' if flash_attn else 'off'}",
        baseline="memcpy into new memory" if is_save else "memcpy into memory that is there",
        work=f"a slot of {len(blob) / 1e6:.0f} MB",
        pairs=pairs,
        target=settings.target(TARGET),
        command=f"python bench/state.py --row {name} {settings.flags}",
    )


def _ms(settings: Settings, call: Callable[[], object]) -> float:
    start_s = settings.now_s()
    call()
    return (settings.now_s() - start_s) * 1e3


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
