"""Guards of a chat while its answer comes: which passage of the documents each sentence is from,
whether the documents say it, and whether the chat's data contain orders. Pure.

As `kqview.guards.cite`, `grounding` and `injection_score`, but of the request itself: passages,
which are sentences of the documents, and the system message are spans of the prompt, and of each
token nothing but its sums over them is captured. A sentence is from the passage that its tokens
looked at most.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeVar, cast

import numpy as np
from msgspec import UNSET, Struct, UnsetType

from kqview.chat.parts import objects_of
from kqview.engine import Engine
from kqview.errors import HeadFileError, RequestError
from kqview.heads.file import Floats, HeadFile, checked_layers, even_heads
from kqview.heads.measures import (
    find_parts,
    find_pieces,
    joined,
    lookback_ratios,
    pairs_of,
    sentences_of,
)
from kqview.server.settings import Settings
from kqview.server.web.described import about
from kqview.server.web.endpoint import warned
from kqview.types import Capture, Token
from kqview.types.capture import MOST_SPANS, Span

if TYPE_CHECKING:
    from kqview.types.token import Attention

HeadsField = Annotated[
    dict[str, Any] | None,
    about(
        "With documents to cite: a head file for that, as kqview calibrate writes it. If not "
        "given, the server's counts, or else all heads alike.",
        {"params": {"important_heads": [[1, 1], [1, 3]]}},
    ),
]
InjectionField = Annotated[
    bool | dict[str, Any] | None,
    about(
        "Whether the reply says, before its text, if the data distract the model from its system "
        "message; experimental. True, or a head file for that, as kqview calibrate injection "
        "writes it; with true the server's counts, or else all heads alike.",
        default=False,
    ),
]
GroundingField = Annotated[
    bool | dict[str, Any] | None,
    about(
        "With documents to cite: whether each citation says if the documents say its sentence; "
        "experimental. True, or a head file for that, as kqview calibrate grounding writes it; "
        "with true the server's counts, or else all heads alike.",
        default=False,
    ),
]
_THRESHOLD: Final = about("Score from which it counts; null where no head file says.", 0.5)


class Injection(Struct):
    """Whether the data of a request contain orders."""

    score: Annotated[
        float,
        about("Higher is more suspicious: 1 less the attention that the system message gets.", 0.9),
    ]
    threshold: Annotated[float | None, _THRESHOLD]
    is_injected: Annotated[
        bool | None, about("Whether the score reaches the threshold; null without one.", True)
    ]


InjectionFound = Annotated[
    Injection | UnsetType,
    about("Whether the data contain orders, with ``injection``; there before the text."),
]


class Grounding(Struct):
    """Whether the documents say a sentence."""

    score: Annotated[
        float,
        about(
            "With a head file the probability that they do, otherwise the share of attention to "
            "them, beside that to the answer so far.",
            0.7,
        ),
    ]
    threshold: Annotated[float | None, _THRESHOLD]
    is_grounded: Annotated[
        bool | None, about("Whether the score reaches the threshold; null without one.", True)
    ]


GroundingFound = Annotated[
    Grounding | UnsetType, about("Whether the documents say the sentence, with ``grounding``.")
]


class DocumentField(Struct, kw_only=True):
    """A document that an answer may be from."""

    text: Annotated[str, about("Its text.", "Anna is a teacher.")]
    title: Annotated[str, about("Its title, which the model reads as well.", "People")] = ""
    url: Annotated[
        str, about('Its address, for the citations; "document:0" if not given.', "about:blank")
    ] = ""


DocumentsField = Annotated[
    list[DocumentField] | None,
    about(
        "Texts that the last message of the user is about; the model reads them before it. The "
        "answer then has annotations that name the passage which each sentence is from."
    ),
]


@dataclass(frozen=True, slots=True)
class Document:
    """A document of a request.

    Attributes:
        text: As it is in the prompt, but for white space around it.
        title: Its title, or "".
        url: Its address, or "".
        index: Among all documents of the request.
        blocks: Characters of each block, where the client sent it in blocks; else its sentences are
            what is cited.
    """

    text: str
    title: str = ""
    url: str = ""
    index: int = 0
    blocks: Sequence[tuple[int, int]] = ()


def shown_document(text: str, *before: str | None) -> str:
    """The part of a prompt that shows a document, *before* which stand its title and the like."""
    return "\n".join([*filter(None, before), text]) + "\n\n"


def heads_of(
    given: Mapping[str, Any] | None,
    engine: Engine,
    settings: Settings,
    *,
    task: str = "cite",
    name: str = "citation_heads",
) -> HeadFile | None:
    """The head file in a request's field *name*; without it, the server's first that fits.

    Raises:
        RequestError: It is none.
    """
    if given is None:
        files = map(HeadFile.load, settings.heads)
        return next((one for one in files if one.fits(task, engine.model)), None)
    try:
        return HeadFile.of(given, task=task)
    except HeadFileError as error:
        raise RequestError(f"{name}: {error}", parameter=name) from None


_FIELDS: Final = {"cite": "citation_heads", "grounding": "grounding", "injection": "injection"}

Guards = Mapping[str, HeadFile | None]
"""Heads of each guard that is asked for, by its task; None for all heads alike."""


def guards_of(body: Any, engine: Engine, settings: Settings, *, cites: bool) -> Guards:
    """The guards that *body* asks for with its fields of these names.

    Args:
        body: The request.
        engine: The engine that will answer.
        settings: For the server's head files.
        cites: Whether it has documents to cite.

    Raises:
        RequestError: A field is no head file.
    """
    given = {task: getattr(body, name, None) for task, name in _FIELDS.items()}
    given["cite"] = cites and (True if given["cite"] is None else given["cite"])
    return {
        task: heads_of(
            None if value is True else value, engine, settings, task=task, name=_FIELDS[task]
        )
        for task, value in given.items()
        if value is not None and value is not False
    }


def instruction_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Texts of the system messages."""
    found: list[str] = []
    for one in messages:
        if one.get("role") in ("system", "developer"):
            content: object = one.get("content")
            texts = [content, *(part.get("text") for part in objects_of(content))]
            found += [text.strip() for text in texts if isinstance(text, str) and text.strip()]
    return found


def with_documents(
    messages: Sequence[Mapping[str, Any]], documents: Sequence[DocumentField]
) -> tuple[list[Mapping[str, Any]], list[Document]]:
    """Messages whose last one of the user begins with *documents*, if any, and these.

    Raises:
        RequestError: A document is empty, or no message is the user's.
    """
    if not documents:
        return [*messages], []
    found = [
        Document(one.text, one.title, one.url or f"document:{i}", i)
        for i, one in enumerate(documents)
    ]
    places = [i for i, one in enumerate(messages) if one.get("role") == "user"]
    if not places or not all(one.text.strip() for one in found):
        what = "has an empty text" if places else "is given, but no message is the user's"
        raise RequestError(f"documents {what}; send texts and a question", parameter="documents")
    shown = [{"type": "text", "text": shown_document(one.text, one.title)} for one in found]
    last: Any = messages[places[-1]]
    content: Any = last.get("content") or ""
    is_list = isinstance(content, list)
    rest = cast("list[Any]", content) if is_list else [{"type": "text", "text": content}]
    changed = [*messages]
    changed[places[-1]] = {**last, "content": [*shown, *rest]}
    return changed, found


class UrlFacts(Struct, kw_only=True):
    """A sentence of the answer, and the passage that it is from."""

    start_index: Annotated[int, about("First character of the sentence in the answer.", 0)]
    end_index: Annotated[int, about("The character behind its last one.", 18)]
    title: Annotated[str, about("Title of the document.", "People")]
    url: Annotated[str, about("Its address.", "document:0")]
    document_index: Annotated[int, about("Its place among the documents, from 0.", 0)]
    start_char_index: Annotated[int, about("First character of the passage in it.", 0)]
    end_char_index: Annotated[int, about("The character behind its last one.", 18)]
    cited_text: Annotated[str, about("The passage.", "Anna is a teacher.")]
    score: Annotated[
        float, about("Attention that it got, the mean over the sentence's tokens.", 0.4)
    ]
    grounding: GroundingFound = UNSET


class Annotation(Struct, kw_only=True):
    """A citation in an answer of chat completions."""

    type: Literal["url_citation"] = "url_citation"
    url_citation: Annotated[UrlFacts, about("The sentence, and where it is from.")]


class UrlCitation(UrlFacts, kw_only=True, tag_field="type", tag="url_citation"):
    """A sentence of the answer, and the passage that it is from."""


class Passage(NamedTuple):
    """A passage of a document.

    Attributes:
        document: The document.
        start: Its first character.
        stop: The character behind its last one.
        block: Place of its first block, in a document of blocks.
        n_blocks: How many there are.
    """

    document: Document
    start: int
    stop: int
    block: int
    n_blocks: int

    @property
    def text(self) -> str:
        """What is cited."""
        return self.document.text[self.start : self.stop]


def _passages(documents: Sequence[Document], most: int) -> Iterator[Passage]:
    """At most *most* of them, of several sentences if need be."""
    parts = [(one, one.blocks or sentences_of(one.text)) for one in documents]
    size = 1
    while sum(-(-len(ranges) // size) for _, ranges in parts) > most:
        size += 1
    for document, ranges in parts:
        for i in range(0, len(ranges), size):
            some = ranges[i : i + size]
            yield Passage(document, some[0][0], some[-1][1], i, len(some))


@dataclass(frozen=True, slots=True)
class Sources:
    """What the answers to one request are judged by.

    Attributes:
        passages: The passages that they may cite.
        capture: Sums over them, over the system message, and over the answer so far, if a guard
            reads them; of the layers of the guards' heads.
        layers: These layers.
        guards: What is asked for.
        n_marked: Tokens of all passages together.
        headers: Those of a reply that warn of a head file.
    """

    passages: Sequence[Passage]
    capture: Capture
    layers: Sequence[int]
    guards: Guards
    n_marked: int = 0
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(
        cls,
        engine: Engine,
        ids: Sequence[int],
        documents: Sequence[Document],
        guards: Guards,
        instruction: Sequence[str] = (),
    ) -> "Sources":
        """Find *documents* and the texts of *instruction*, which follow each other, in a prompt.

        Raises:
            RequestError: There are too many, the prompt shows one in another way, heads are of
                another model, or a guard has nothing to judge by.
        """
        for task, given, what in (
            ("grounding", documents, "documents"), ("injection", instruction, "a system message"),
        ):  # fmt: skip
            if task in guards and not given:
                raise RequestError(
                    f"{task} is asked for, but there is nothing to judge by; send {what}",
                    parameter=task,
                )
        judged = find_parts(engine, ids, instruction) if "injection" in guards else []
        most = max(0, MOST_SPANS - len(judged) - ("grounding" in guards))
        if len(documents) > most or not most:
            raise RequestError(
                f"there are {len(documents)} documents, at most {most} can be cited"
                + (f" beside {len(judged)} texts of the system message" if judged else ""),
                parameter="documents",
            )
        layers: set[int] = set()
        for task, heads in guards.items():
            try:
                layers |= {*(checked_layers(heads, task, engine) or engine.model.attention_layers)}
            except HeadFileError as error:
                name = _FIELDS[task]
                raise RequestError(f"{name}: {error}", parameter=name) from None
        passages = [*_passages(documents, most)]
        parts: list[tuple[str, list[tuple[int, int]]]] = []
        for document in documents:
            n = len(document.text) - len(document.text.lstrip())  # templates remove them
            ranges = [(p.start - n, p.stop - n) for p in passages if p.document is document]
            parts.append((document.text.strip(), ranges))
        marked = [*chain.from_iterable(find_pieces(engine, ids, parts))]
        spans: list[Span] = [*marked, *judged]
        if "grounding" in guards:
            spans.append((len(ids), None))
        at = sorted(layers)
        capture = Capture(layers=at, spans=spans, on_full="wait")
        doubts = (one and one.doubt(engine.model, engine.fingerprint()) for one in guards.values())
        n_marked = sum(stop - start for start, stop in marked)
        return cls(
            passages, capture, at, guards, n_marked, warned(next(filter(None, doubts), None))
        )


FactsT = TypeVar("FactsT", bound=UrlFacts)


class Cited(NamedTuple):
    """A sentence of an answer, and where it is from.

    Attributes:
        start: Its first character in the part of the answer.
        stop: The character behind its last one.
        passage: What its tokens looked at most.
        score: How much, as `kqview.guards.Citation`.
        grounding: Whether the documents say it, if asked for.
    """

    start: int
    stop: int
    passage: Passage
    score: float
    grounding: Grounding | UnsetType = UNSET

    def facts(self, kind: type[FactsT], **more: Any) -> FactsT:
        """It in OpenAI's words, with further fields of *kind*."""
        passage, document = self.passage, self.passage.document
        return kind(
            start_index=self.start, end_index=self.stop, title=document.title, url=document.url,
            document_index=document.index, start_char_index=passage.start,
            end_char_index=passage.stop, cited_text=passage.text, score=self.score,
            grounding=self.grounding, **more,
        )  # fmt: skip


_SCORE_BYTES: Final = 8


class Citing:
    """What the guards say of one answer while its text comes.

    For each token `add`, then `feed` with what is new of the content; `finish` where a part of the
    answer ends. A sentence has ended when the next one begins.
    """

    def __init__(self, sources: Sources) -> None:
        """Begin an answer."""
        self.injection: Injection | UnsetType = UNSET
        """Known once the first token was seen by `judge` or `add`, if asked for."""
        self._sources = sources
        self._heads: dict[str, tuple[HeadFile, Floats]] = {}  # with the weight of each row
        # Of each token, for each passage, and last what grounding adds up.
        self._scores: list[Floats] = []
        self._ends: list[int] = []  # characters of the content after each token
        self._restart()

    def _restart(self) -> None:
        self._n = 0  # characters of the content before the open text
        self._part = 0  # of these, before the open part
        self._open = ""  # what came since the last end of a sentence

    @property
    def bytes_per_token(self) -> int:
        """What the scores of a token take."""
        return _SCORE_BYTES * (len(self._sources.passages) + 1)

    def _sums(self, token: Token) -> Floats | None:
        """Its sums over the spans, ``(n_pairs, n_spans)``; None of one that was not predicted."""
        rows: Attention | None = token.attention
        if rows is None:
            return None
        if not self._heads:
            pairs = pairs_of(self._sources.layers, list(rows))
            for task, file in self._sources.guards.items():
                heads = file or even_heads(task, pairs)
                self._heads[task] = heads, heads.weights(pairs)
        return joined(list(rows))

    def judge(self, token: Token) -> None:
        """See the first token, whose row is that of the prompt; another one says nothing."""
        if token.index or "injection" not in self._sources.guards:
            return
        if (sums := self._sums(token)) is not None:
            grounding = "grounding" in self._sources.guards
            spans = slice(len(self._sources.passages), sums.shape[1] - grounding)
            heads, weights = self._heads["injection"]
            looked = weights @ sums[:, spans].sum(axis=1)
            self.injection = Injection(*_verdict(heads, looked, "injected"))

    def add(self, token: Token, n_content: int) -> None:
        """Add a token, with which the content has *n_content* characters."""
        self.judge(token)
        n_passages, place = len(self._sources.passages), len(self._scores)
        scores = np.zeros(n_passages + 1)
        scores[-1] = np.nan
        if n_passages and (sums := self._sums(token)) is not None:
            scores[:-1] = self._heads["cite"][1] @ sums[:, :n_passages]
            if "grounding" in self._heads:
                back, new = sums[:, :n_passages].sum(axis=1), sums[:, -1]
                ratios = lookback_ratios(back, new, self._sources.n_marked, place)
                scores[-1] = self._heads["grounding"][1] @ ratios
        self._scores.append(scores)
        self._ends.append(n_content)

    def take_back(self, n_left: int) -> None:
        """Only *n_left* tokens are left, whose content is fed again."""
        del self._scores[n_left:], self._ends[n_left:]
        self._restart()

    def feed(self, text: str) -> Iterator[tuple[str, Cited | None]]:
        """*text* in pieces, each with the sentence that ends behind it, if one does."""
        n_given = len(self._open)  # of the open text, which were pieces before
        self._open += text
        while len(found := sentences_of(self._open)) > 1:
            start, stop = found[0]
            yield self._open[n_given:stop], self._cited(start, stop)
            self._n += stop
            self._open, n_given = self._open[stop:], max(0, n_given - stop)
        if rest := self._open[n_given:]:
            yield rest, None

    def finish(self) -> Cited | None:
        """The sentence that ends with the open part of the answer."""
        found = sentences_of(self._open)
        cited = self._cited(*found[0]) if found and self._ends else None
        self._n += len(self._open)
        self._part, self._open = self._n, ""
        return cited

    def _cited(self, start: int, stop: int) -> Cited | None:
        if not self._sources.passages:
            return None
        start, stop = self._n + start, self._n + stop
        ends = np.array(self._ends)
        first = min(int(np.searchsorted(ends, start, side="right")), len(ends) - 1)
        last = min(int(np.searchsorted(ends, stop)), len(ends) - 1)
        found = np.array(self._scores[first : last + 1])
        scores = found[:, :-1].mean(axis=0)
        best = int(np.argmax(scores))
        return Cited(
            start - self._part, stop - self._part, self._sources.passages[best],
            float(scores[best]), self._grounding(found[:, -1]),
        )  # fmt: skip

    def _grounding(self, sums: Floats) -> Grounding | UnsetType:
        """The verdict on a sentence, from what its tokens add up to; NaN of those without a row."""
        seen = sums[~np.isnan(sums)]
        if not seen.size:
            return UNSET
        return Grounding(*_verdict(self._heads["grounding"][0], seen.mean(), "grounded"))


def _verdict(heads: HeadFile, sums: Any, name: str) -> tuple[float, float | None, bool | None]:
    """Score, threshold and whether the one reaches the other."""
    score, threshold = float(heads.score_of_sums(sums)), heads.thresholds.get(name)
    return score, threshold, None if threshold is None else score >= threshold
