"""Citations: which passage of the request's documents each sentence of an answer is from. Pure.

As `kqview.guards.cite`, but while the answer comes: passages, which are sentences of the documents,
are spans of the prompt, and of each token nothing but its sums over them is captured. A sentence
is from the passage that its tokens looked at most.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeVar, cast

import numpy as np
from msgspec import Struct

from kqview.engine import Engine
from kqview.errors import HeadFileError, RequestError
from kqview.heads.file import Floats, HeadFile, checked_layers, even_heads
from kqview.heads.measures import find_pieces, joined, pairs_of, sentences_of
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


def _passages(documents: Sequence[Document]) -> Iterator[Passage]:
    """At most as many as there can be spans, of several sentences if need be."""
    parts = [(one, one.blocks or sentences_of(one.text)) for one in documents]
    size = 1
    while sum(-(-len(ranges) // size) for _, ranges in parts) > MOST_SPANS:
        size += 1
    for document, ranges in parts:
        for i in range(0, len(ranges), size):
            some = ranges[i : i + size]
            yield Passage(document, some[0][0], some[-1][1], i, len(some))


@dataclass(frozen=True, slots=True)
class Sources:
    """What the answers to one request may cite.

    Attributes:
        passages: The passages.
        capture: Sums over them, of the layers of *heads*.
        layers: These layers.
        heads: A head file; None for all heads alike.
        headers: Those of a reply that warn of *heads*.
    """

    passages: Sequence[Passage]
    capture: Capture
    layers: Sequence[int]
    heads: HeadFile | None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(
        cls,
        engine: Engine,
        ids: Sequence[int],
        documents: Sequence[Document],
        heads: HeadFile | None,
    ) -> "Sources":
        """Find *documents*, which follow each other, in a prompt.

        Raises:
            RequestError: There are too many, the prompt shows one in another way, or *heads* are of
                another model.
        """
        if len(documents) > MOST_SPANS:
            raise RequestError(
                f"there are {len(documents)} documents, at most {MOST_SPANS} can be cited",
                parameter="documents",
            )
        try:
            layers = checked_layers(heads, "cite", engine) or engine.model.attention_layers
        except HeadFileError as error:
            raise RequestError(f"citation_heads: {error}", parameter="citation_heads") from None
        passages = [*_passages(documents)]
        parts: list[tuple[str, list[tuple[int, int]]]] = []
        for document in documents:
            n = len(document.text) - len(document.text.lstrip())  # templates remove them
            ranges = [(p.start - n, p.stop - n) for p in passages if p.document is document]
            parts.append((document.text.strip(), ranges))
        spans: list[Span] = [span for found in find_pieces(engine, ids, parts) for span in found]
        capture = Capture(layers=layers, spans=spans, on_full="wait")
        warning = heads and heads.doubt(engine.model, engine.fingerprint())
        return cls(passages, capture, layers, heads, warned(warning))


FactsT = TypeVar("FactsT", bound=UrlFacts)


class Cited(NamedTuple):
    """A sentence of an answer, and where it is from.

    Attributes:
        start: Its first character in the part of the answer.
        stop: The character behind its last one.
        passage: What its tokens looked at most.
        score: How much, as `kqview.guards.Citation`.
    """

    start: int
    stop: int
    passage: Passage
    score: float

    def facts(self, kind: type[FactsT], **more: Any) -> FactsT:
        """It in OpenAI's words, with further fields of *kind*."""
        passage, document = self.passage, self.passage.document
        return kind(
            start_index=self.start, end_index=self.stop, title=document.title, url=document.url,
            document_index=document.index, start_char_index=passage.start,
            end_char_index=passage.stop, cited_text=passage.text, score=self.score,
            **more,
        )  # fmt: skip


_SCORE_BYTES: Final = 8


class Citing:
    """The citations of one answer while its text comes.

    For each token `add`, then `feed` with what is new of the content; `finish` where a part of the
    answer ends. A sentence has ended when the next one begins.
    """

    def __init__(self, sources: Sources) -> None:
        """Begin an answer."""
        self._sources = sources
        self._weights: Floats | None = None
        self._scores: list[Floats] = []  # of each token, for each passage
        self._ends: list[int] = []  # characters of the content after each token
        self._restart()

    def _restart(self) -> None:
        self._n = 0  # characters of the content before the open text
        self._part = 0  # of these, before the open part
        self._open = ""  # what came since the last end of a sentence

    @property
    def bytes_per_token(self) -> int:
        """What the scores of a token take."""
        return _SCORE_BYTES * len(self._sources.passages)

    def add(self, token: Token, n_content: int) -> None:
        """Add a token, with which the content has *n_content* characters."""
        rows: Attention | None = token.attention
        scores = np.zeros(len(self._sources.passages))
        if rows is not None:
            if self._weights is None:
                pairs = pairs_of(self._sources.layers, list(rows))
                heads = self._sources.heads or even_heads("cite", pairs)
                self._weights = heads.weights(pairs)
            scores = self._weights @ joined(list(rows))
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

    def _cited(self, start: int, stop: int) -> Cited:
        start, stop = self._n + start, self._n + stop
        ends = np.array(self._ends)
        first = min(int(np.searchsorted(ends, start, side="right")), len(ends) - 1)
        last = min(int(np.searchsorted(ends, stop)), len(ends) - 1)
        scores = np.mean(self._scores[first : last + 1], axis=0)
        best = int(np.argmax(scores))
        passage = self._sources.passages[best]
        return Cited(start - self._part, stop - self._part, passage, float(scores[best]))
