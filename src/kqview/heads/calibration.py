"""Calibration: which heads of a model do a task, chosen and judged on examples kept apart.

Examples are split in three. On the first part each head is judged alone; on the second, the number
of the best heads is chosen by the task's criterion; the figures are of the third, which neither
saw. Nothing is random but the split and the bootstrap, whose seed is fixed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import numpy as np

from kqview.arguments import choice
from kqview.engine import Engine
from kqview.errors import RequestError
from kqview.heads import measures
from kqview.heads.examples import Example, Task, checked_examples, digest
from kqview.heads.file import (
    Figure,
    Floats,
    Head,
    HeadFile,
    Link,
    ModelKey,
    Pair,
    even_weights,
    logistic,
)
from kqview.heads.measures import Measures
from kqview.many import reporter

MIN_EXAMPLES: Final = 12
_SHARES: Final = (0.4, 0.3)  # of the first two parts
_NUMBERS: Final = (1, 2, 4, 8, 16, 32, 64)  # of heads that are tried, and all
_N_BOOTSTRAP: Final = 1000
_RIDGE: Final = 1.0  # per example, in units of a standardised measure
_N_NEWTON: Final = 50
_N_ABLATIONS: Final = 16


@dataclass(frozen=True, slots=True)
class Case:
    """An example, measured.

    Attributes:
        values: ``(n_items, n_pairs)`` float64.
        labels: ``(n_items,)`` float64: what each item is, 1 or 0; with "cite" a log-probability.
    """

    values: Floats
    labels: Floats


Scored = Sequence[tuple[Floats, Floats]]  # scores and labels of each case


@dataclass(frozen=True, slots=True)
class _Method:
    """How a task is calibrated."""

    measure: Callable[[Engine, Example], tuple[Measures, Floats]]
    rank: Callable[[Sequence[Case]], Floats]
    fit: Callable[[Sequence[Case], Sequence[Pair]], tuple[tuple[Head, ...], float, Link]]
    criterion: str
    judge: Callable[[Scored], float]
    threshold: str | None = None


def calibrate(
    engine: Engine,
    task: Task,
    examples: Iterable[Example],
    *,
    source: str = "",
    progress: bool | Callable[[int, int | None], object] | None = False,
) -> HeadFile:
    """Choose the heads of a model that do *task*, and weigh them.

    Each example costs one or two prompts ("cite": up to 16 more, with some of the sources hidden),
    with as many examples at a time as the engine has slots. Sums over spans are captured, of
    "needle" the position of each row's maximum; no row is whole.

    Args:
        engine: An engine whose model generates text.
        task: "needle", "rerank", "injection", "grounding" or "cite".
        examples: At least 12 mappings with the fields in ``heads.TASKS[task]``. Of flags, both
            values must be in each part; one of each in four examples is enough.
        source: Where they are from, for the file.
        progress: As of `Engine.map`.

    Returns:
        A head file with the figures of the chosen heads, and of all heads together beside them.

    Raises:
        RequestError: An example is malformed, there are too few, or none of one kind. Also what
            `Engine.attend` raises for its prompt, PromptTooLong among them.
        UnsupportedModel: The model does not generate text.
    """
    method = _METHODS[choice("task", task, Task)]
    given = checked_examples(task, examples)
    if len(given) < MIN_EXAMPLES:
        raise RequestError(
            f"examples has {len(given)}, at least {MIN_EXAMPLES} are needed to choose heads on "
            "some and judge them on others",
            parameter="examples",
        )
    data = {"sha256": digest(given), "n": len(given), "source": source}
    report = reporter(progress, len(given), "examples", lambda n, new, _, s: f"{new / s:.1f}/s")
    cases: list[Case] = []
    pairs: tuple[Pair, ...] = ()
    with ThreadPoolExecutor(len(engine.slots), "kqview-calibrate") as pool:
        for measured, labels in pool.map(partial(method.measure, engine), given):
            pairs = measured.pairs
            cases.append(Case(measured.values, labels))
            report(len(cases), 0)
    found = choose(task, cases, pairs)
    return HeadFile(
        task=task,
        model=ModelKey.of(engine.model, engine.fingerprint()),
        data=data,
        **found,
    )


def choose(task: Task, cases: Sequence[Case], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Heads, weights, thresholds and figures of measured examples; no model is needed.

    Args:
        task: The task.
        cases: The examples, measured.
        pairs: Layer and head of each column of the measures.

    Returns:
        The fields of a HeadFile that it decides.

    Raises:
        RequestError: The examples are all of one kind.
    """
    method = _METHODS[task]
    first, second, third = _split(cases)
    kinds = np.unique(np.concatenate([case.labels for case in cases]))
    if method.threshold is not None and len(kinds) < 2:
        raise RequestError(
            f"all examples of {task!r} are of one kind; both are needed to tell them apart",
            parameter="examples",
        )
    order = np.argsort(-method.rank(first), kind="stable")
    best: tuple[float, int] = (-np.inf, 0)
    for n in sorted({min(n, len(pairs)) for n in (*_NUMBERS, len(pairs))}):
        value = method.judge(_scored(method, first, second, pairs, order[:n]))
        if value >= best[0]:  # of equal ones the most heads, whose mean is the steadiest
            best = value, n
    chosen = order[: best[1]]
    seen = [*first, *second]
    heads, bias, link = _fitted(method, seen, pairs, chosen)
    file = HeadFile(task=task, model=ModelKey(), heads=heads, bias=bias, link=link)
    scored = [(file.score(one.values, pairs), one.labels) for one in third]
    everything = _scored(method, seen, third, pairs, order)
    figures = {
        method.criterion: _figure(method.judge, scored),
        f"{method.criterion} of all heads": _figure(method.judge, everything),
    }
    thresholds: dict[str, float] = {}
    if method.threshold is not None:
        known = [(file.score(one.values, pairs), one.labels) for one in seen]
        thresholds[method.threshold] = _best_threshold(*_pooled(known))
    return {
        "heads": heads, "bias": bias, "link": link, "thresholds": thresholds, "figures": figures,
    }  # fmt: skip


def _split(cases: Sequence[Case]) -> tuple[list[Case], list[Case], list[Case]]:
    """Three parts with equal shares of each kind of example, chosen by a fixed seed."""
    rng = np.random.default_rng(0)
    parts: tuple[list[Case], list[Case], list[Case]] = ([], [], [])
    kinds: dict[bool, list[Case]] = {True: [], False: []}
    for case in cases:
        kinds[float(case.labels.mean()) >= 0.5].append(case)
    for kind in kinds.values():
        order = rng.permutation(len(kind))
        ends = np.round(np.cumsum(_SHARES) * len(kind)).astype(int)
        for part, places in zip(parts, np.split(order, ends), strict=True):
            part += [kind[i] for i in places]
    return parts


def _fitted(
    method: _Method, cases: Sequence[Case], pairs: Sequence[Pair], chosen: Any
) -> tuple[tuple[Head, ...], float, Link]:
    columns = sorted(cast("list[int]", chosen.tolist()), key=lambda i: pairs[i])
    narrowed = [Case(one.values[:, columns], one.labels) for one in cases]
    return method.fit(narrowed, [pairs[i] for i in columns])


def _scored(
    method: _Method,
    fitted_on: Sequence[Case],
    cases: Sequence[Case],
    pairs: Sequence[Pair],
    chosen: Any,
) -> Scored:
    heads, bias, link = _fitted(method, fitted_on, pairs, chosen)
    file = HeadFile(task="", model=ModelKey(), heads=heads, bias=bias, link=link)
    return [(file.score(one.values, pairs), one.labels) for one in cases]


def _figure(judge: Callable[[Scored], float], scored: Scored) -> Figure:
    rng = np.random.default_rng(0)
    n = len(scored)
    drawn = [judge([scored[int(i)] for i in rng.integers(0, n, n)]) for _ in range(_N_BOOTSTRAP)]
    known = [one for one in drawn if np.isfinite(one)]
    low, high = np.quantile(known, (0.025, 0.975)) if known else (np.nan, np.nan)
    return Figure(round(judge(scored), 4), round(float(low), 4), round(float(high), 4), n)


# ---- how good scores are


def _pooled(scored: Scored) -> tuple[Floats, Floats]:
    scores, labels = zip(*scored, strict=True)
    return np.concatenate(scores), np.concatenate(labels)


def auroc(scores: Floats, labels: Floats) -> float:
    """Probability that an item of kind 1 has a higher score than one of kind 0; ties count half."""
    high, low = scores[labels > 0.5], scores[labels < 0.5]
    if not high.size or not low.size:
        return np.nan
    more = high[:, None] > low[None, :]
    return float((more + 0.5 * (high[:, None] == low[None, :])).mean())


def ndcg(scores: Floats, labels: Floats, most: int = 10) -> float:
    """nDCG of the *most* best items; ties are in the order of the items."""
    gains = 1 / np.log2(np.arange(2, 2 + len(labels)))
    gains[most:] = 0
    order = np.argsort(-scores, kind="stable")
    return float((labels[order] * gains).sum() / (np.sort(labels)[::-1] * gains).sum())


def spearman(left: Floats, right: Floats) -> float:
    """Rank correlation; 0.0 where one side is constant."""
    first, second = _ranks(left), _ranks(right)
    if min(first.std(), second.std()) == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Floats) -> Floats:
    """Ranks, the mean for ties."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _best_threshold(scores: Floats, labels: Floats) -> float:
    """Where true less false positives, as rates, are the most; between two scores."""
    order = np.unique(scores)
    cuts = (order[1:] + order[:-1]) / 2 if len(order) > 1 else order
    gains = [
        (scores[labels > 0.5] >= cut).mean() - (scores[labels < 0.5] >= cut).mean() for cut in cuts
    ]
    return float(cuts[int(np.argmax(gains))])


# ---- how heads are judged alone and weighed together


def _distance(cases: Sequence[Case]) -> Floats:
    """How far the measures of the two kinds are apart, in standard deviations, for each head.

    Attention Tracker (2411.00348) takes every head whose means differ by more than k times the sum
    of both deviations instead; here this only orders them, and held-out examples say how many.
    """
    values = np.concatenate([one.values for one in cases])
    labels = np.concatenate([one.labels for one in cases])
    high, low = values[labels > 0.5], values[labels < 0.5]
    spread = np.sqrt((high.var(axis=0) + low.var(axis=0)) / 2)
    return np.nan_to_num((high.mean(axis=0) - low.mean(axis=0)) / np.maximum(spread, 1e-12))


def _contrast(cases: Sequence[Case]) -> Floats:
    """How far relevant documents stand out among those of their query, for each head.

    In standard deviations of the query's documents. CoRe heads (2510.02219) have the largest
    softmax, with a temperature, of the relevant document's attention instead; here the scale of a
    head does not count.
    """
    found: list[Floats] = []
    for one in cases:
        is_good = one.labels > 0.5
        spread = np.maximum(one.values.std(axis=0), 1e-12)
        found.append((one.values[is_good].mean(axis=0) - one.values.mean(axis=0)) / spread)
    return np.mean(found, axis=0)


def _effect(cases: Sequence[Case]) -> Floats:
    """Correlation of each head's own prediction with what leaving sources out did."""
    found: list[Floats] = []
    for one in cases:
        values = one.values - one.values.mean(axis=0)
        labels = one.labels - one.labels.mean()
        length = np.linalg.norm(values, axis=0) * np.linalg.norm(labels)
        found.append(labels @ values / np.maximum(length, 1e-12))
    return np.mean(found, axis=0)


def _even(task: str) -> Any:
    def fit(cases: Sequence[Case], pairs: Sequence[Pair]) -> tuple[tuple[Head, ...], float, Link]:
        return *even_weights(task, pairs), "identity"

    return fit


def _logistic(cases: Sequence[Case], pairs: Sequence[Pair]) -> tuple[tuple[Head, ...], float, Link]:
    """Logistic regression with a ridge, by Newton's method on standardised measures."""
    values = np.concatenate([one.values for one in cases])
    labels = np.concatenate([one.labels for one in cases])
    mean, spread = values.mean(axis=0), np.maximum(values.std(axis=0), 1e-6)
    design = np.column_stack([(values - mean) / spread, np.ones(len(values))])
    ridge = np.diag([_RIDGE] * values.shape[1] + [1e-9])
    weights: Floats = np.zeros(len(pairs) + 1)
    for _ in range(_N_NEWTON):
        chance = logistic(design @ weights)
        gradient = design.T @ (chance - labels) + ridge @ weights
        step = _solved((design.T * (chance * (1 - chance))) @ design + ridge, gradient)
        weights -= step
        if np.abs(step).max() < 1e-9:
            break
    slopes = weights[:-1] / spread
    heads = tuple(Head(*pair, float(one)) for pair, one in zip(pairs, slopes, strict=True))
    return heads, float(weights[-1] - slopes @ mean), "logistic"


def _solved(matrix: Floats, right: Floats) -> Floats:
    return np.asarray(np.linalg.solve(matrix, right), np.float64)


def _linear(cases: Sequence[Case], pairs: Sequence[Pair]) -> tuple[tuple[Head, ...], float, Link]:
    """Ridge regression of the change of log-probabilities, each example centred on its own mean."""
    values = np.concatenate([one.values - one.values.mean(axis=0) for one in cases])
    labels = np.concatenate([one.labels - one.labels.mean() for one in cases])
    spread = np.maximum(values.std(axis=0), 1e-6)
    design = values / spread
    gram = design.T @ design + _RIDGE * len(cases) * np.eye(len(pairs))
    slopes: Floats = _solved(gram, design.T @ labels) / spread
    heads = tuple(Head(*pair, float(one)) for pair, one in zip(pairs, slopes, strict=True))
    return heads, 0.0, "identity"


# ---- the tasks


def _measured_needle(engine: Engine, example: Example) -> tuple[Measures, Floats]:
    context, question, answer = (
        measures.checked_text(name, example[name]) for name in ("context", "question", "answer")
    )
    found = measures.needle(engine, context, question, answer)
    return found, np.ones(len(found.values))


def _measured_ranking(engine: Engine, example: Example) -> tuple[Measures, Floats]:
    documents = measures.checked_texts("documents", example["documents"])
    labels = np.zeros(len(documents))
    labels[list(example["relevant"])] = 1
    query = measures.checked_text("query", example["query"])
    return measures.rerank(engine, query, documents), labels


def _measured_injection(engine: Engine, example: Example) -> tuple[Measures, Floats]:
    instruction, data = (
        measures.checked_text(name, example[name]) for name in ("instruction", "data")
    )
    found = measures.injection(engine, instruction, data)
    return found, np.array([float(example["is_injected"])])


def _measured_grounding(engine: Engine, example: Example) -> tuple[Measures, Floats]:
    source = measures.checked_text("source", example["source"])
    given = measures.answered(engine, [source], example["question"], example["answer"])
    flags: Any = example["is_grounded"]
    n = len(given.sentences)
    labels = [flags] * n if isinstance(flags, bool) else list(flags)
    if len(labels) != n:
        raise RequestError(
            f"is_grounded has {len(labels)} flags, but the answer has {n} sentences",
            parameter="examples",
        )
    return measures.grounding(engine, given), np.array(labels, np.float64)


def _measured_ablations(engine: Engine, example: Example) -> tuple[Measures, Floats]:
    """Each head's prediction for each set of sources: what it gave to those that were kept."""
    sources = measures.checked_texts("sources", example["sources"])
    question, answer = example["question"], example["answer"]
    rng = np.random.default_rng(len(sources))
    kept = (rng.random((_N_ABLATIONS, len(sources))) < 0.5).astype(np.float64)
    found = measures.ablate(engine, sources, question, answer, kept)
    given = measures.answered(engine, sources, question, answer)
    sentences = measures.cite(engine, given)
    values = [kept @ one.values for one in sentences]
    labels = found.logprobs - found.logprobs.mean(axis=0)
    return (
        Measures(np.concatenate([one - one.mean(axis=0) for one in values]), sentences[0].pairs),
        labels.T.ravel(),
    )


def _mean_of(judge: Callable[[Floats, Floats], float]) -> Callable[[Scored], float]:
    return lambda scored: float(np.mean([judge(*one) for one in scored]))


_METHODS: Final[Mapping[str, _Method]] = {
    "needle": _Method(
        _measured_needle,
        lambda cases: np.mean([one.values.mean(axis=0) for one in cases], axis=0),
        _even("needle"),
        "share of tokens that at least half of the heads find",
        _mean_of(lambda scores, _: float((scores >= 0.5).mean())),
    ),
    "rerank": _Method(
        _measured_ranking, _contrast, _even("rerank"), "nDCG@10", _mean_of(ndcg)
    ),
    "injection": _Method(
        _measured_injection, lambda cases: -_distance(cases), _even("injection"), "AUROC",
        lambda scored: auroc(*_pooled(scored)), "injected",
    ),
    "grounding": _Method(
        _measured_grounding, lambda cases: np.abs(_distance(cases)), _logistic, "AUROC",
        lambda scored: auroc(*_pooled(scored)), "grounded",
    ),
    "cite": _Method(
        _measured_ablations, _effect, _linear, "Spearman correlation with ablation",
        _mean_of(spearman),
    ),
}  # fmt: skip
