"""Measures: a number for each attention head, from sums over spans of a prompt.

The steps that calibration and guards share: texts become a prompt whose parts are known by their
positions, spans of it are summed while the graph runs, and the sums become one measure for each
head; of "needle", the position of the maximum takes the place of sums. No row is kept whole.
Prompts are the model's own chats, or plain text where it has no template.

Sources of the measures, which `kqview.guards` names again where it applies them:

- needle: Wu et al.: Retrieval Head Mechanistically Explains Long-Context Factuality, 2404.15574
- rerank: Chen et al.: Attention in Large Language Models Yields Efficient Zero-Shot Re-Rankers,
  2410.02642
- injection: Hung et al.: Attention Tracker, 2411.00348
- grounding: Chuang et al.: Lookback Lens, 2407.07071
- cite: Cohen-Wang et al.: Learning to Attribute with Attention (AT2), 2504.13752
"""

import logging
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from kqview.arguments import checked_ids, invalid
from kqview.edit import Edit
from kqview.engine import Engine
from kqview.errors import PromptTooLong, RequestError, shown
from kqview.heads.file import Floats, Pair
from kqview.types import Capture
from kqview.types.capture import MOST_SPANS
from kqview.types.text import Ids

CONTENT_FREE: Final = "N/A"
"""The query of ICR's calibration, which asks for nothing."""

_SENTENCE: Final = re.compile(r"\S.*?(?:[.!?]+(?=\s|$)|(?=\n)|$)", re.DOTALL)
_PIECE_TOKENS: Final = 12  # of what surrounds a document in the prompt: its number and blank lines
_log: Final = logging.getLogger("kqview.guards")

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids of a prompt, and where its parts are.

    Attributes:
        ids: Ids of the prompt.
        spans: Positions ``(start, stop)`` of each part that was asked for.
    """

    ids: list[int]
    spans: list[Span]

    @property
    def n_marked(self) -> int:
        """Tokens of all parts together."""
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True, slots=True)
class Measures:
    """Measures of heads.

    Attributes:
        values: float64, ``(n_items, n_pairs)``: a row for each thing that is measured.
        pairs: Layer and head of each column.
    """

    values: Floats
    pairs: tuple[Pair, ...]


# ---- texts to a prompt with spans


def checked_text(name: str, text: object) -> str:
    """*text* without white space around it, which templates remove.

    Raises:
        RequestError: It is no text, or nothing but white space.
    """
    if not isinstance(text, str) or not text.strip():
        raise invalid(name, "a text that is not empty", shown(text))
    return text.strip()


def checked_texts(name: str, texts: object) -> list[str]:
    """Each of *texts* by `checked_text`.

    Raises:
        RequestError: There is none, or one is empty.
    """
    if not isinstance(texts, Sequence) or isinstance(texts, str | bytes) or not texts:
        raise invalid(name, "a list of texts that is not empty", shown(cast("object", texts)))
    given = cast("Sequence[object]", texts)
    return [checked_text(f"{name}[{i}]", one) for i, one in enumerate(given)]


def chat_prompt(engine: Engine, user: str, parts: Iterable[str], *, system: str = "") -> Prompt:
    """The prompt of a chat with one question, and the positions of *parts* of its texts.

    Args:
        engine: The engine, with whose template the chat is rendered.
        user: The user's message.
        parts: Texts inside of *system* and *user*, in their order.
        system: The system message; "" for none.

    Raises:
        RequestError: The template rejects the messages, or changes a part.
    """
    if engine.model.chat_template:
        messages = [{"role": "system", "content": system}] if system else []
        ids = engine.apply_chat_template([*messages, {"role": "user", "content": user}])
    else:
        text = f"{system}\n\n{user}\n\n" if system else f"{user}\n\n"
        ids = engine.tokenize(text, parse_special=False)
    return Prompt(ids, find_parts(engine, ids, parts))


def find_parts(engine: Engine, ids: Sequence[int], parts: Iterable[str]) -> list[Span]:
    """Positions of the tokens of *ids* that contain each of *parts*, which follow each other.

    Raises:
        RequestError: One is not there.
    """
    return [
        one for (one,) in find_pieces(engine, ids, ((text, [(0, len(text))]) for text in parts))
    ]


def find_pieces(
    engine: Engine, ids: Sequence[int], parts: Iterable[tuple[str, Sequence[Span]]]
) -> list[list[Span]]:
    """As `find_parts`, but of pieces of each part: ascending ranges of its characters.

    Raises:
        RequestError: A part is not there.
    """
    pieces = [engine.token_bytes(one) for one in ids]
    ends = np.cumsum([len(piece) for piece in pieces])
    data, at = b"".join(pieces), 0
    found: list[list[Span]] = []
    for part, ranges in parts:
        at = data.find(part.encode(), at)
        if at < 0:
            raise RequestError(
                f"{shown(part)} is not in the prompt: the chat template or the vocabulary changes "
                "it; normalise the text, or use another template"
            )
        spans: list[Span] = []
        n_before = 0  # characters that `at` is behind of
        for start, stop in ranges:
            begin = at + len(part[n_before:start].encode())
            at, n_before = begin + len(part[start:stop].encode()), stop
            first = int(np.searchsorted(ends, begin, side="right"))
            spans.append((first, int(np.searchsorted(ends, at)) + 1))
        found.append(spans)
    return found


def sentences_of(text: str) -> list[Span]:
    """The characters of each sentence of *text*: up to a mark of its end, or to the line's."""
    return [one.span() for one in _SENTENCE.finditer(text)]


# ---- spans to sums, a row for each head


def span_sums(
    engine: Engine,
    ids: Sequence[int],
    spans: Sequence[Span | tuple[int, None]],
    *,
    last: int,
    layers: Sequence[int] | None,
    request_id: str | None = None,
) -> tuple[Floats, tuple[Pair, ...]]:
    """Attention of the last tokens of a prompt, summed over *spans* while the graph runs.

    Args:
        engine: The engine.
        ids: Ids of the prompt.
        spans: Ranges of positions.
        last: Number of queries, counted from the end of *ids*.
        layers: Layers to capture; None for all that have attention.
        request_id: As of `Engine.attend`.

    Returns:
        Sums, float64 ``(n_pairs, last, n_spans)``, and the layer and head of the first axis.
    """
    attention = engine.attend(
        ids, Capture(layers=layers, spans=spans), last=last, request_id=request_id
    )
    rows = attention.array()
    return joined(list(rows)).astype(np.float64), pairs_of(attention.layers, list(rows))


def joined(rows: Sequence[Any]) -> Any:
    """The rows of all layers, with one axis for their heads."""
    return np.concatenate(rows) if len(rows) > 1 else rows[0]


def pairs_of(
    layers: Sequence[int], rows: Sequence[Any], numbers: Sequence[int] | None = None
) -> tuple[Pair, ...]:
    """Layer and head of that axis; *numbers* are the captured heads of each layer, None for all."""
    return tuple(
        (layer, head)
        for layer, row in zip(layers, rows, strict=True)
        for head in numbers or range(len(row))
    )


# ---- the measure of each task


def needle(engine: Engine, context: str, question: str, answer: str) -> Measures:
    """Whether each head looks most at the very token that the answer copies next.

    The retrieval score of 2404.15574 is the mean over the answer's tokens. The answer is given to
    the model (teacher forcing) instead of generated.

    Returns:
        1.0 or 0.0 for each token of the answer and each head.

    Raises:
        RequestError: *answer* is not in *context*.
    """
    before, found, _ = context.partition(answer)
    if not found:
        raise RequestError(
            f"answer is {shown(answer)}, which is not in context; a needle is copied word for word",
            parameter="answer",
        )
    # A template may have the answer in a system message of its own.
    prompt = chat_prompt(engine, f"{context}\n\n{question}", [before.strip(), answer])
    start, stop = prompt.spans[1]
    ids = [*prompt.ids, *prompt.ids[start : stop - 1]]  # the last one is predicted only
    attention = engine.attend(ids, Capture(top_k=1), last=stop - start)
    _, places = attention.top_k()
    looked_at = joined(list(places))[..., 0]  # (n_pairs, n_tokens)
    return Measures(
        (looked_at == np.arange(start, stop)).T.astype(np.float64),
        pairs_of(attention.layers, list(places)),
    )


def rerank(
    engine: Engine,
    query: str,
    documents: Sequence[str],
    layers: Sequence[int] | None = None,
    request_id: str | None = None,
) -> Measures:
    """Attention from the query to each document, less what a query without content gives it.

    The in-context re-ranking of 2410.02642: the mean over the query's tokens of the sum over the
    document's. The documents come first in the prompt, so they are evaluated once for both queries.
    The paper also leaves out single tokens of a document whose calibrated value is an outlier,
    which needs whole rows; this does not.

    Documents that do not fit in one prompt are spread over several, and one that does not fit
    alone is cut into pieces, of which the best counts; the log ("kqview.guards") says so.

    Returns:
        A row for each document.

    Raises:
        PromptTooLong: The query leaves no room for documents.
    """
    prompts = _prompts_of(engine, query, documents)
    values, pairs = np.empty(0), ()
    for group in prompts:
        pieces = [piece for _, piece in group]
        asked, pairs = _attention_to(engine, query, pieces, layers, request_id)
        idle, _ = _attention_to(engine, CONTENT_FREE, pieces, layers, request_id)
        if not values.size:
            values = np.full((len(documents), len(pairs)), -np.inf)
        for (i, _), row in zip(group, asked - idle, strict=True):
            values[i] = np.maximum(values[i], row)
    return Measures(values, pairs)


def _query_prompt(engine: Engine, query: str, documents: Sequence[str]) -> Prompt:
    """The prompt of a query; its spans are those of the documents, and of the query."""
    intro = "Here are some paragraphs:"
    request = (
        "Please find information that is relevant to the following query in the paragraphs above."
    )
    labels = [f"[{i + 1}]" for i in range(len(documents))]
    listed = [f"{label} {one}" for label, one in zip(labels, documents, strict=True)]
    user = "\n\n".join([intro, *listed, request, f"Query: {query}"])
    # What is short may be anywhere, so whatever stands before it is found too.
    named = [one for pair in zip(labels, documents, strict=True) for one in pair]
    found = chat_prompt(engine, user, [intro, *named, request, "Query:", query])
    return Prompt(found.ids, [*found.spans[2:-3:2], found.spans[-1]])


def _attention_to(
    engine: Engine,
    query: str,
    documents: Sequence[str],
    layers: Sequence[int] | None,
    request_id: str | None,
) -> tuple[Floats, tuple[Pair, ...]]:
    """Mean over the query's tokens of the sum over each document, ``(n_documents, n_pairs)``."""
    prompt = _query_prompt(engine, query, documents)
    start, stop = prompt.spans[-1]
    n_query = stop - start
    sums, pairs = span_sums(
        engine, prompt.ids[:stop], prompt.spans[:-1], last=n_query, layers=layers,
        request_id=request_id,
    )  # fmt: skip
    return sums.mean(axis=1).T, pairs


def _prompts_of(
    engine: Engine, query: str, documents: Sequence[str]
) -> list[list[tuple[int, str]]]:
    """Number and text of each document, or of its pieces, by the prompts that hold them."""
    longest = max(query, CONTENT_FREE, key=len)
    room = engine.n_ctx - len(_query_prompt(engine, longest, []).ids)
    if room <= 2 * _PIECE_TOKENS:
        raise PromptTooLong(
            f"the query leaves {max(room, 0)} of {engine.n_ctx} tokens for documents; shorten it "
            "or raise n_ctx",
            parameter="query",
        )
    prompts: list[list[tuple[int, str]]] = [[]]
    n_used, n_cut = 0, 0
    for i, document in enumerate(documents):
        ids = engine.tokenize(document, add_special=False, parse_special=False)
        most = room - _PIECE_TOKENS
        pieces = [document]
        if len(ids) > most:
            n_cut += 1
            parts = [engine.detokenize(ids[at : at + most]) for at in range(0, len(ids), most)]
            pieces = [part.strip("\ufffd \n\t") for part in parts]
        for piece in filter(None, pieces):
            size = min(len(ids), most) + _PIECE_TOKENS
            if prompts[-1] and (n_used + size > room or len(prompts[-1]) == MOST_SPANS):
                prompts.append([])
                n_used = 0
            prompts[-1].append((i, piece))
            n_used += size
    if len(prompts) > 1:
        _log.warning(
            "%d documents, %d of them cut, are ranked in %d prompts of %d tokens; scores of "
            "different prompts compare only roughly",
            len(documents), n_cut, len(prompts), engine.n_ctx,
        )  # fmt: skip
    return prompts


def instruction_prompt(engine: Engine, instruction: str, data: str) -> Prompt:
    """The prompt of an instruction, as system message, and data; its span is the instruction."""
    return chat_prompt(engine, f"Text: {data}", [instruction], system=instruction)


def injection(
    engine: Engine, instruction: str, data: str, layers: Sequence[int] | None = None
) -> Measures:
    """Attention that the instruction gets from the last token of the prompt.

    The focus of 2411.00348: it falls when data contain an instruction that the model follows.

    Returns:
        One row.
    """
    prompt = instruction_prompt(engine, instruction, data)
    sums, pairs = span_sums(engine, prompt.ids, prompt.spans, last=1, layers=layers)
    return Measures(sums[:, 0, :].T, pairs)


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence of an answer.

    Attributes:
        text: The sentence.
        start: Its first token in the answer.
        stop: The token behind its last one.
    """

    text: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A question about sources with its answer.

    Attributes:
        prompt: The prompt before the answer; its spans are the sources.
        answer: Ids of the answer.
        sentences: The sentences of the answer.
    """

    prompt: Prompt
    answer: list[int]
    sentences: list[Sentence]

    @property
    def ids(self) -> list[int]:
        """Prompt and answer."""
        return [*self.prompt.ids, *self.answer]


def answered(engine: Engine, sources: Sequence[str], question: str, answer: str | Ids) -> Answered:
    """Put sources, question and answer together.

    Args:
        engine: The engine.
        sources: Texts, each without white space around it.
        question: What is asked about them.
        answer: Text or ids; ids that end a text are left out.

    Raises:
        RequestError: The answer is empty.
    """
    prompt = source_prompt(engine, sources, question)
    if isinstance(answer, str):
        ids = engine.tokenize(answer, add_special=False, parse_special=False)
    else:
        ids = checked_ids("answer", answer)
    ends = {engine.model.eos_token_id, engine.model.eot_token_id}
    while ids and ids[-1] in ends:
        ids.pop()
    text = engine.detokenize(ids)
    texts = [text[start:stop] for start, stop in sentences_of(text)]
    if not texts:
        raise invalid("answer", "a text that is not empty", shown(text))
    places = find_parts(engine, ids, texts)
    sentences = [Sentence(one, *place) for one, place in zip(texts, places, strict=True)]
    return Answered(prompt, ids, sentences)


def source_prompt(engine: Engine, sources: Sequence[str], question: str) -> Prompt:
    """The prompt of a question about sources; its spans are the sources."""
    listed = "\n\n".join(sources)
    return chat_prompt(engine, f"{listed}\n\n{question}" if listed else question, sources)


def answer_sums(
    engine: Engine, given: Answered, layers: Sequence[int] | None
) -> tuple[Floats, tuple[Pair, ...]]:
    """What each token of the answer looked at when it was predicted.

    Returns:
        Sums over each source and, last, over the answer before the token:
        ``(n_pairs, n_answer, n_sources + 1)``, and the layer and head of the first axis.
    """
    spans = [*given.prompt.spans, (len(given.prompt.ids), None)]
    return span_sums(engine, given.ids[:-1], spans, last=len(given.answer), layers=layers)


def lookback_ratios(back: Floats, new: Floats, n_source: int, n_new: Floats | int) -> Floats:
    """The lookback ratio of 2407.07071.

    The mean attention to a token of the sources, divided by the sum of that and the mean attention
    to a token of the answer so far. 1.0 for the first token, before which nothing was answered.

    Args:
        back: Attention to all sources together, for each head and token of an answer.
        new: Attention to the answer so far, of the same shape.
        n_source: Tokens of all sources together.
        n_new: Tokens of the answer so far, one number or one for each token.

    Returns:
        Ratios of the shape of *back*, from 0 to 1.
    """
    mean = back / n_source
    both = mean + new / np.maximum(n_new, 1)
    ratios = np.divide(mean, both, out=np.ones_like(both), where=both > 0)
    return np.where(np.equal(n_new, 0), 1.0, ratios)


def grounding(engine: Engine, given: Answered, layers: Sequence[int] | None = None) -> Measures:
    """The mean lookback ratio of each sentence, a row for each."""
    sums, pairs = answer_sums(engine, given, layers)
    ratios = lookback_ratios(
        sums[..., :-1].sum(axis=-1), sums[..., -1], given.prompt.n_marked,
        np.arange(sums.shape[1], dtype=np.float64),
    )  # fmt: skip
    rows = [ratios[:, one.start : one.stop].mean(axis=1) for one in given.sentences]
    return Measures(np.stack(rows), pairs)


def cite(engine: Engine, given: Answered, layers: Sequence[int] | None = None) -> list[Measures]:
    """Attention of each sentence to each source: measures with a row for each source.

    The features of AT2 (2504.13752): the mean over the sentence's tokens of the sum over the
    source's.
    """
    sums, pairs = answer_sums(engine, given, layers)
    return [
        Measures(sums[:, one.start : one.stop, :-1].mean(axis=1).T, pairs)
        for one in given.sentences
    ]


@dataclass(frozen=True, slots=True)
class Ablations:
    """How likely sentences are when sources are hidden.

    Attributes:
        kept: ``(n_ablations, n_sources)`` float64: 1 for a source that could be seen.
        logprobs: ``(n_ablations, n_sentences)`` float64: natural, summed over each sentence.
    """

    kept: Floats
    logprobs: Floats


def ablate(
    engine: Engine, sources: Sequence[str], question: str, answer: str | Ids, kept: Floats
) -> Ablations:
    """Score an answer with some of its sources hidden from all that follows them.

    The attention masks of AT2 (`Edit.block`): positions stay, and of each set of sources only what
    is behind the first hidden one is evaluated again. As many sets at a time as there are slots.

    Args:
        engine: The engine; with sliding windows, one with ``swa_full=True``.
        sources: Texts.
        question: What is asked about them.
        answer: Its answer.
        kept: ``(n_ablations, n_sources)``, 0 for what to hide, up to 256 in a row.

    Raises:
        InvalidEdit: The model's attention cannot be edited, or too much is hidden.
    """
    given = answered(engine, sources, question, answer)
    n_answer = len(given.answer)

    def scored(row: Floats) -> Floats:
        hidden = [
            Edit.block((stop, None), (start, stop))
            for (start, stop), is_kept in zip(given.prompt.spans, row, strict=True)
            if not is_kept
        ]
        score = engine.score(given.ids, last=n_answer, edits=hidden)
        return score.logprobs[-n_answer:].astype(np.float64)

    with ThreadPoolExecutor(len(engine.slots), "kqview-ablate") as pool:
        logprobs = np.stack([*pool.map(scored, kept)])
    sums = [logprobs[:, one.start : one.stop].sum(axis=1) for one in given.sentences]
    return Ablations(np.asarray(kept, np.float64), np.stack(sums, axis=1))
