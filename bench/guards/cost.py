"""What does each guard add to the request that it guards, at 1,024 and 4,096 tokens of context?

Time by the clock and CPU time of the whole process, with one compute thread, so that the thread of
the consumer has its own core: what a mod does beside a step takes CPU time alone.
Medians of runs with and without the guard, in turn, and of the ratios the interval that
holds the true median in 95 of 100 cases (bootstrap); head files of 4 heads in 4 layers
unless the row says "all heads". Generations with a mod record a trace unless ``trace=False`` is
given, as here but for the row that says so. "after an answer": `cite` and `grounding` are asked
when the slot still holds the prompt, so only the answer is evaluated again. `rerank` is beside one
evaluation of its own prompt, by ``attend`` with the same capture, so that 1.0 is one prompt;
`best_grounded` is beside as many plain generations at once, each in a branch of the prompt's slot.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from kqview import Engine, Sampling, guards, heads

if TYPE_CHECKING:
    from collections.abc import Callable

N_TOKENS = 64  # generated
N_BRANCHES = 3


def times_s(call: Callable[[], object]) -> tuple[float, float]:
    """By the clock, and of the CPU."""
    begun = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begun[0], time.process_time() - begun[1]


def ratio(pairs: list[tuple[float, float]]) -> str:
    """The median of new to old times, and its interval."""
    ratios = [new / old for old, new in pairs]
    drawn = np.random.default_rng(0).choice(ratios, (4000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return f"{median(ratios):.3f} ({low:.3f} to {high:.3f})"


def compare_if(
    only: str,
    name: str,
    n_context: int,
    n: int,
    without: Callable[[], object],
    guarded: Callable[[], object],
) -> None:
    """Print a row of the table, if *only* is in its name."""
    if only not in name:
        return
    timed = [(times_s(without), times_s(guarded)) for _ in range(n)]
    clock, cpu = ([(old[i], new[i]) for old, new in timed] for i in range(2))
    old, new = (median(times) for times in zip(*clock, strict=True))
    print(
        f"| {name} | {n_context:,} | {1000 * old:,.1f} | {1000 * (new - old):+,.1f} | "
        f"{ratio(clock)} | {ratio(cpu)} |",
        flush=True,
    )


def few_heads(engine: Engine, task: str) -> heads.HeadFile:
    """Four heads in four layers in the middle of the model, as far as it has them."""
    model = engine.model
    layers = sorted({part * model.n_layer // 30 for part in (8, 12, 16, 20)})
    return heads.HeadFile(
        task=task,
        model=heads.ModelKey.of(model, engine.fingerprint()),
        heads=tuple(heads.Head(layer, model.n_head // 2, 1 / len(layers)) for layer in layers),
    )


def texts_of(engine: Engine, n_context: int) -> list[str]:
    """Sentences that fill a prompt of about so many tokens."""
    found: list[str] = []
    n_left, seed = n_context - 150, 0
    while n_left > 0:
        for text in heads.made_examples("cite", 1, seed=seed)[0]["sources"]:
            found.append(text)
            n_left -= len(engine.tokenize(text, add_special=False)) + 5
        seed += 1
    return found


def measure(engine: Engine, n_context: int, n: int, only: str) -> None:
    compare = partial(compare_if, only)
    texts = texts_of(engine, n_context)
    question = "Who makes bread and cakes?"
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    prompt = guards.instruction_prompt(engine, "Summarise the text.", " ".join(texts))
    head_file = partial(few_heads, engine)

    stop = guards.StopOnInjection(engine, prompt, head_file("injection"), threshold=2.0)

    def first_token(**more: Any) -> None:
        engine.generate(prompt.ids, max_tokens=1, cache_prompt=False, **options, **more).read()

    compare(
        "StopOnInjection, first token", n_context, n, first_token,
        lambda: first_token(mods=[stop], capture=stop.capture, trace=False),
    )  # fmt: skip

    asked = guards.source_prompt(engine, texts[:500], question)
    calibrated = head_file("grounding")
    of_few = guards.TakeBackUngrounded(engine, asked, calibrated, threshold=0.0)
    of_all = guards.TakeBackUngrounded(engine, asked, threshold=0.0)

    def answer(**more: Any) -> str:
        return engine.generate(asked.ids, max_tokens=N_TOKENS, **options, **more).read()

    text = answer()  # the slot has the prompt from here on
    ways = {
        "4 heads": (of_few, False),
        "all heads": (of_all, False),
        "with a trace": (of_few, True),
    }
    for name, (mod, trace) in ways.items():
        compare(
            f"TakeBackUngrounded, {N_TOKENS} tokens, {name}", n_context, 8 * n, answer,
            lambda mod=mod, trace=trace: answer(mods=[mod], capture=mod.capture, trace=trace),
        )  # fmt: skip
    source = asked.spans[0][0], asked.spans[-1][1]
    align = guards.AlignAttByHeads(engine, source, head_file("align"))

    def aligned() -> None:
        found = answer(mods=[align], capture=align.capture, trace=False)
        assert found == text, "it stopped before the end, and fewer tokens cost less"

    compare(f"AlignAttByHeads, {N_TOKENS} tokens, 4 heads", n_context, 8 * n, answer, aligned)
    sources = texts[:500]
    compare(
        f"grounding after an answer of {N_TOKENS} tokens", n_context, n, answer,
        lambda: (answer(), guards.grounding(engine, sources, question, text, calibrated)),
    )  # fmt: skip
    compare(
        f"cite after an answer of {N_TOKENS} tokens", n_context, n, answer,
        lambda: (answer(), guards.cite(engine, sources, question, text, head_file("cite"))),
    )  # fmt: skip

    def fresh(call: Callable[[], object]) -> None:
        engine.slots[0].clear()
        call()

    def ranked() -> list[float]:
        return guards.rerank(engine, question, sources, head_file("rerank"))

    with patch.object(engine, "attend", wraps=engine.attend) as attend:
        ranked()
    arguments: Any = attend.call_args_list[0]  # the second one asks nothing

    def its_prompt() -> None:
        engine.attend(*arguments.args, **arguments.kwargs).array()

    compare(
        f"rerank of {len(sources)} documents, against its prompt", n_context, n,
        lambda: fresh(its_prompt),
        lambda: fresh(ranked),
    )  # fmt: skip


def measure_branches(engine: Engine, n_context: int, n: int, only: str) -> None:
    """`best_grounded`, with an engine of several slots."""
    n_branches = len(engine.slots)
    asked = guards.source_prompt(engine, texts_of(engine, n_context)[:500], "Who makes bread?")
    file = few_heads(engine, "grounding")
    sampling = Sampling(temperature=0)  # all branches are alike: no sentence makes another longer

    def grounded() -> None:
        found = guards.best_grounded(
            engine, asked, file, n=n_branches, max_tokens=N_TOKENS, sampling=sampling
        )
        n_tokens.append([*found][-1].stop)

    def plain() -> None:
        first = engine.generate(asked.ids, max_tokens=1, trace=False)
        first.read()
        assert first.slot is not None
        slots = [first.slot, *(one.id for one in engine.branch(first.slot, n_branches - 1))]
        options: dict[str, Any] = {"sampling": sampling, "max_tokens": n_tokens[-1]}
        running = [engine.generate(asked.ids, slot=slot, trace=False, **options) for slot in slots]
        while running:  # a token of each in turn, as `best_grounded` takes them
            running = [one for one in running if next(one, None) is not None]

    n_tokens: list[int] = []
    grounded()  # says how many tokens it generates; the prompt stays in the slots from here on
    compare_if(
        only, f"best_grounded of {n_branches}, {n_tokens[-1]} tokens", n_context, n, plain, grounded
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--n", type=int, default=5, help="pairs; eight times as many of short ones")
    parser.add_argument("--only", default="", help="only rows with this word")
    given = parser.parse_args()
    print(
        "| guard | context | without, ms | added, ms | ratio | of CPU time |\n" + 6 * "|---" + "|"
    )
    with Engine.demo("smollm2", n_ctx=8192, n_threads=1) as engine:
        for n_context in given.contexts:
            measure(engine, n_context, given.n, given.only)
    if given.only in "best_grounded":
        with Engine.demo("smollm2", n_ctx=8192, n_threads=1, n_slots=N_BRANCHES) as several:
            for n_context in given.contexts:
                measure_branches(several, n_context, given.n, given.only)


if __name__ == "__main__":
    main()
