"""HeadFile: heads of a model with weights, as a small JSON file that others may read and write.

The format is described in kqview/guards/README.md. Two foreign formats are read as well: the
configurations of vLLM-Hook (``params.important_heads``) and the head files of AlignAtt4LLM
(``token_alignment_heads``). Knows models by their facts, nothing of how they are run.
"""

import json
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import Any, Final, Literal, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray

from kqview import json_input
from kqview.arguments import invalid, to_index, to_number, to_path
from kqview.durable import write_whole
from kqview.errors import HeadFileError, RequestError, shown
from kqview.types import ModelInfo

FORMAT: Final = "kqview-heads"
SCHEMA: Final = 1

Link = Literal["identity", "logistic"]
Pair = tuple[int, int]
Floats = NDArray[np.float64]

# What every quantisation of a model has in common, and what tells it from others.
_SAME: Final = ("architecture", "n_layer", "n_head", "n_head_kv", "n_embd", "n_vocab", "name")


# Heads that find what is asked for rank, cite and align as well: they attend to a place.
_ALSO: Final = {"rerank": ("needle",), "cite": ("needle",), "align": ("needle",)}


class HeadFileWarning(UserWarning):
    """A head file was calibrated with other weights of the same model, or says less than it could.

    Another quantisation has nearly the same heads; the thresholds may be off.
    """


@dataclass(frozen=True, slots=True)
class Head:
    """An attention head and what its measure is multiplied by.

    Attributes:
        layer: Layer of the model, from 0.
        head: Query head of that layer, from 0.
        weight: Factor of the head's measure in the score.
    """

    layer: int
    head: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value with its 95 % confidence interval, a bootstrap over examples.

    Attributes:
        value: The value, on examples that took no part in the choice of heads.
        low: Lower end of the interval.
        high: Upper end of the interval.
        n: Number of examples.
    """

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class ModelKey:
    """What a head file knows of its model; None where it does not say.

    Attributes:
        fingerprint: Of every byte of the model's files, as `Engine.fingerprint`.
        file_type: Quantisation, such as "Q4_1".
    """

    fingerprint: str | None = None
    architecture: str | None = None
    n_layer: int | None = None
    n_head: int | None = None
    n_head_kv: int | None = None
    n_embd: int | None = None
    n_vocab: int | None = None
    name: str | None = None
    file_type: str | None = None

    @classmethod
    def of(cls, model: ModelInfo, fingerprint: str) -> Self:
        """The key of *model*."""
        facts = {name: getattr(model, name) for name in (*_SAME, "file_type")}
        return cls(fingerprint, **facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFile:
    """Heads that do a task in one model, and how their measures become a score.

    A score is ``bias + sum(weight * measure)`` over the heads, with ``link="logistic"`` the
    logistic function of that. What the measure is depends on the task, see the page of
    `kqview.guards`.

    Attributes:
        task: "needle", "rerank", "injection", "grounding", "cite", or the name of a foreign one.
        model: The model that the heads belong to.
        heads: The heads, by layer and head.
        bias: Added to the weighted sum.
        link: "identity" or "logistic".
        thresholds: Scores at which something counts, by name: "injected", "grounded".
        data: "sha256" of the examples, "n" their number, "source" where they are from; of a foreign
            file, "model" is what it calls its model.
        figures: What was measured on examples kept apart, by name.

    Raises:
        HeadFileError: The heads are none, are there twice, or a number is not finite.
    """

    task: str
    model: ModelKey
    heads: tuple[Head, ...]
    bias: float = 0.0
    link: Link = "identity"
    thresholds: Mapping[str, float] = field(default_factory=dict[str, float])
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    figures: Mapping[str, Figure] = field(default_factory=dict[str, Figure])

    def __post_init__(self) -> None:
        pairs = [(one.layer, one.head) for one in self.heads]
        if not pairs or len(set(pairs)) < len(pairs):
            raise HeadFileError("heads must be a list of heads, each there once")
        numbers = [*(one.weight for one in self.heads), self.bias, *self.thresholds.values()]
        if not all(map(math.isfinite, numbers)):
            raise HeadFileError("weights, bias and thresholds must be finite numbers")

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the heads, ascending: the ones to capture."""
        return tuple(sorted({one.layer for one in self.heads}))

    # ---- application

    def check_model(self, model: ModelInfo, fingerprint: str) -> None:
        """Refuse a model that the heads are not of.

        Another file of the same model, such as another quantisation, gives a HeadFileWarning.

        Args:
            model: Facts of the model.
            fingerprint: As `Engine.fingerprint`.

        Raises:
            HeadFileError: The model is another one, or lacks one of the heads.
        """
        if differ := self._differences(model):
            raise HeadFileError(
                f"the head file is of another model: it has {'; '.join(differ)}; calibrate this "
                "model with kqview calibrate"
            )
        if text := self.doubt(model, fingerprint):
            _warn(text)

    def doubt(self, model: ModelInfo, fingerprint: str) -> str | None:
        """What `check_model` warns of; None if the file was calibrated with these weights."""
        if self.model.fingerprint is None:
            said = self.model.name or self.data.get("model")
            if said and not _is_alike(str(said), model.name):
                return f"the head file is of {shown(said)}, this model is {shown(model.name)}"
            of = shown(said) if said else "its model"
            return f"the head file does not say which weights of {of} it is of"
        if self.model.fingerprint != fingerprint:
            return (
                "the head file was calibrated with another file of this model "
                f"({self.model.file_type}, here {model.file_type}); its thresholds may be off"
            )
        return None

    def fits(self, task: str, model: ModelInfo) -> bool:
        """Whether the heads do *task*, and are of *model* as far as the file says."""
        return self.task in (task, *_ALSO.get(task, ())) and not self._differences(model)

    def _differences(self, model: ModelInfo) -> list[str]:
        differ = [
            f"{name} {shown(theirs)}, here {shown(getattr(model, name))}"
            for name in _SAME
            if (theirs := getattr(self.model, name)) not in (None, getattr(model, name))
        ]
        lacks = (
            f"a head {one.head} in layer {one.layer}, which is not here"
            for one in self.heads
            if one.layer not in model.attention_layers or one.head >= model.n_head
        )
        return differ or [*islice(lacks, 1)]

    def score(self, measures: Floats, pairs: Sequence[Pair]) -> Floats:
        """Scores of measures of heads.

        Args:
            measures: Shape ``(..., n_pairs)``, one measure for each of *pairs*.
            pairs: Layer and head of the last axis; others than those of the file are ignored.

        Returns:
            Scores, float64 of shape ``(...)``.
        """
        return self.score_of_sums(measures @ self.weights(pairs))

    def score_of_sums(self, sums: Floats) -> Floats:
        """Scores of measures that were multiplied by `weights` and added up."""
        raw = self.bias + sums
        return np.asarray(logistic(raw) if self.link == "logistic" else raw)

    def weights(self, pairs: Sequence[Pair]) -> Floats:
        """Weight of each of *pairs*, 0.0 for others; HeadFileError if a head is missing."""
        weights = np.zeros(len(pairs))
        places = {pair: i for i, pair in enumerate(pairs)}
        for one in self.heads:
            if (one.layer, one.head) not in places:  # where layers differ in heads
                raise HeadFileError(f"the model has no head {one.head} in layer {one.layer}")
            weights[places[one.layer, one.head]] = one.weight
        return weights

    # ---- the file

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole or not at all, about 100 bytes for each head.

        Raises:
            RequestError: *path* is no path.
            OSError: It cannot be written.
        """
        content = {"format": FORMAT, "schema": SCHEMA, **asdict(self)}
        text = json.dumps(content, indent=1, allow_nan=False)
        write_whole(to_path("path", path), text.encode() + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, task: str | None = None) -> "HeadFile":
        """Read a head file: kqview's own, vLLM-Hook's or AlignAtt4LLM's.

        Args:
            path: The file.
            task: The task of a configuration of vLLM-Hook, which does not name it; None for
                that of its folder. AlignAtt4LLM's files are always for "align".

        Raises:
            HeadFileError: It is no such file, or of a later schema; the message has the field.
            OSError: It cannot be read.
        """
        place = to_path("path", path)
        try:
            content: Any = json_input.loads(place.read_bytes())
        except ValueError as error:
            raise HeadFileError(f"{place} is no JSON: {error}") from None
        by_folder = {"attention_tracker": "injection", "core_reranker": "rerank"}
        folder = place.parent.name
        try:
            return cls.of(content, task=task or by_folder.get(folder, folder))
        except HeadFileError as error:
            raise HeadFileError(f"{place}: {error}") from None

    @classmethod
    def of(cls, content: object, *, task: str = "align") -> "HeadFile":
        """As `load`, from the decoded JSON.

        Args:
            content: What the file has.
            task: The task of a configuration of vLLM-Hook, which does not name it.

        Raises:
            HeadFileError: As of `load`.
        """
        if not isinstance(content, dict):
            raise HeadFileError("there is no object of JSON; a head file is one")
        known = cast("dict[str, Any]", content)
        try:
            if known.get("format") == FORMAT:
                return _own(known)
            if "token_alignment_heads" in known:
                return _of_alignatt(known)
            if "important_heads" in (known.get("params") or {}):
                return _of_vllm_hook(known, task)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise HeadFileError(f"it is malformed: {error!r}") from None
        raise HeadFileError(
            f"it is no head file: it has neither format {FORMAT!r}, nor token_alignment_heads "
            "(AlignAtt4LLM), nor params.important_heads (vLLM-Hook)"
        )


def logistic(values: Floats) -> Floats:
    """1 / (1 + exp(-values)), without overflow."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * values)))


def even_weights(task: str, pairs: Sequence[Pair]) -> tuple[tuple[Head, ...], float]:
    """(heads of equal weight, bias) of a *task* of which nothing is learnt.

    The score is the mean measure; of "injection", whose measure is the attention that the
    instruction still gets, it is 1 less that.
    """
    sign, bias = (-1.0, 1.0) if task == "injection" else (1.0, 0.0)
    return tuple(Head(*pair, sign / len(pairs)) for pair in sorted(pairs)), bias


def even_heads(task: str, pairs: Sequence[Pair]) -> HeadFile:
    """A file of no model with *pairs*, all alike."""
    heads, bias = even_weights(task, pairs)
    return HeadFile(task=task, model=ModelKey(), heads=heads, bias=bias)


def _is_alike(said: str, name: str | None) -> bool:
    """Whether two names may be of one model, however they are written; one may say more."""
    one, other = (
        re.sub(r"[^a-z0-9]", "", text.rpartition("/")[2].lower()) for text in (said, name or "")
    )
    return one in other or other in one


def _warn(text: str) -> None:
    warnings.warn(text, HeadFileWarning, stacklevel=4)


def _own(content: Mapping[str, Any]) -> HeadFile:
    if content["schema"] != SCHEMA:
        raise HeadFileError(
            f"schema is {shown(content['schema'])}, this version reads {SCHEMA}; update kqview"
        )
    link = content.get("link", "identity")
    if link not in ("identity", "logistic"):
        raise HeadFileError(f"link is {shown(link)}; identity and logistic are known")
    known = {one.name for one in fields(ModelKey)}
    return HeadFile(
        task=str(content["task"]),
        model=ModelKey(**{k: one for k, one in content.get("model", {}).items() if k in known}),
        heads=tuple(
            Head(_index("layer", one["layer"]), _index("head", one["head"]), _real(one["weight"]))
            for one in content["heads"]
        ),
        bias=_real(content.get("bias", 0.0)),
        link=link,
        thresholds={name: _real(one) for name, one in content.get("thresholds", {}).items()},
        data=dict(content.get("data", {})),
        figures={name: Figure(**one) for name, one in content.get("figures", {}).items()},
    )


def _of_alignatt(content: Mapping[str, Any]) -> HeadFile:
    """Weights are the shares of ``ts``, or equal where all are 0."""
    given = [
        (_index("layer", one["layer"]), _index("head", one["head"]), _real(one.get("ts", 0)))
        for one in content["token_alignment_heads"]
    ]
    total = sum(ts for *_, ts in given)
    heads = tuple(
        Head(layer, head, ts / total if total > 0 else 1 / len(given)) for layer, head, ts in given
    )
    if content.get("calibrated") is False:
        _warn("the head file says of itself that it is not calibrated")
    shape = {"n_layer": content.get("num_layers"), "n_head": content.get("num_heads")}
    data = {
        "source": f"AlignAtt4LLM, {content.get('model')}, {content.get('direction')}",
        "model": content.get("model"),
    }
    return HeadFile(task="align", model=ModelKey(**shape), heads=heads, data=data)


def _of_vllm_hook(content: Mapping[str, Any], task: str) -> HeadFile:
    pairs = [
        (_index("layer", layer), _index("head", head))
        for layer, head in content["params"]["important_heads"]
    ]
    heads, bias = even_weights(task, pairs)
    info: Mapping[str, Any] = content.get("model_info") or {}
    if re.search("copied|placeholder", str(info.get("note"))):
        _warn("the head file says of itself that its heads are copied from another model's")
    data = {"source": f"vLLM-Hook, {info.get('model_id')}", "model": info.get("model_id")}
    return HeadFile(task=task, model=ModelKey(), heads=heads, bias=bias, data=data)


def _index(name: str, value: object) -> int:
    index = to_index(value)
    if index is None or index < 0:
        raise HeadFileError(f"{name} is {shown(value)}; it must be a whole number from 0")
    return index


def _real(value: object) -> float:
    number = to_number(value)
    if number is None:
        raise HeadFileError(f"{shown(value)} must be a number")
    return number


class Fingerprinted(Protocol):
    """What `checked_layers` needs of an engine."""

    model: Final[ModelInfo]

    def fingerprint(self) -> str: ...


def checked_layers(
    heads: HeadFile | None, task: str, engine: Fingerprinted
) -> tuple[int, ...] | None:
    """The layers to capture for *heads*; None for all.

    Raises:
        RequestError: They are for another *task*, or no HeadFile.
        HeadFileError: As `HeadFile.check_model`.
    """
    if heads is None:
        return None
    if not isinstance(heads, HeadFile):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid("heads", "a HeadFile, as HeadFile.load reads it, or None", shown(heads))
    if heads.task not in (task, *_ALSO.get(task, ())):
        raise RequestError(
            f"heads are for the task {heads.task!r}, here {task!r} is needed; calibrate that one",
            parameter="heads",
        )
    heads.check_model(engine.model, engine.fingerprint())
    return heads.layers


def checked_numbers(heads: HeadFile | None, model: ModelInfo) -> tuple[int, ...] | None:
    """The heads to capture in each layer of `checked_layers`; None for all.

    All as well where layers differ in heads: not each of them may have those of the others.
    """
    count = model.metadata.get(f"{model.architecture}.attention.head_count", "")
    if heads is None or not count.isdigit():
        return None
    return tuple(sorted({one.head for one in heads.heads}))


def weighed(heads: HeadFile | None, task: str, measures: Floats, pairs: Sequence[Pair]) -> Floats:
    """Scores of measures, as `HeadFile.score`; those of all heads alike without a file."""
    return (heads or even_heads(task, pairs)).score(measures, pairs)
