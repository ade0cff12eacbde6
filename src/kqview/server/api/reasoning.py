"""Splits an answer into its reasoning, its visible content and the calls in its channels. Pure.

Models mark their reasoning in the text: ``<think>`` blocks, the channels of Harmony (gpt-oss), tags
such as ``<analysis>`` and ``<final>``, or a line before the answer proper. A splitter reads the
text as it comes and returns what is certain; it holds back only what may still become a mark, so
however the text is cut, the pieces of a kind join to the same text.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, Protocol

Kind = Literal["reasoning", "content", "call"]


class Piece(NamedTuple):
    """Text of one kind; *name* is the function of a "call", whose text is its arguments.

    A "call" begins with an empty text, so that each call is seen even without arguments.
    """

    kind: Kind
    text: str
    name: str = ""


class Splitter(Protocol):
    """Takes an answer apart; `flush` ends it."""

    def feed(self, text: str) -> list[Piece]:
        """Add *text*; returns what is certain."""
        ...

    def flush(self) -> list[Piece]:
        """What was held back."""
        ...


class Marks:
    """Text up to the first of some marks; holds back what may be the beginning of one."""

    def __init__(self, marks: Iterable[str]) -> None:
        """Look for *marks*; empty ones are ignored."""
        self._marks = tuple(mark for mark in marks if mark)
        self._n_most = max(map(len, self._marks), default=0)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add *text*.

        Returns:
            The text that is certainly before every mark, and the mark that follows it, None if none
            does so far. What comes after the mark is held; feed "" to go on.
        """
        whole = self._held + text
        found = [(at, mark) for mark in self._marks if (at := whole.find(mark)) >= 0]
        at, mark = min(
            found, default=(len(whole), None), key=lambda one: (one[0], -len(one[1] or ""))
        )
        for start in range(max(0, len(whole) - self._n_most + 1), at):
            if any(one.startswith(whole[start:]) for one in self._marks):
                at, mark = start, None
                break
        else:
            # A longer mark may begin with this one.
            rest = whole[at:]
            if mark is not None and any(
                len(one) > len(rest) and one.startswith(rest) for one in self._marks
            ):
                mark = None
        self._held = whole[at + len(mark or "") :]
        return whole[:at], mark

    def take(self) -> str:
        """What is held; nothing is then."""
        held, self._held = self._held, ""
        return held


class NoReasoning:
    """All of it is content."""

    def feed(self, text: str) -> list[Piece]:
        """See `Splitter`."""
        return _pieces("content", text)

    def flush(self) -> list[Piece]:
        """See `Splitter`."""
        return []


THINK_TAGS: Final[Mapping[str, str]] = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
"""Marks around reasoning at the beginning of an answer: how it opens, and how it closes."""


class ThinkSplitter:
    """Reasoning between two marks at the beginning of the answer, as in ``<think>...</think>``.

    White space around the reasoning is dropped. An answer that does not begin with an opening mark
    is content, unchanged.
    """

    def __init__(
        self, tags: Mapping[str, str] = THINK_TAGS, *, opened_by: str | None = None
    ) -> None:
        """Split at *tags*; *opened_by* is the opening mark with which the prompt ends, if any."""
        self._tags = tags
        self._start = ""
        self._state: Literal["start", "reasoning", "after", "content"] = "start"
        self._marks = Marks(())
        self._space = ""  # inside of reasoning, after its last word so far
        self._has_words = False
        if opened_by is not None:
            self._open(opened_by)

    def _open(self, mark: str) -> None:
        self._state = "reasoning"
        self._marks = Marks([self._tags[mark]])

    def feed(self, text: str) -> list[Piece]:
        """See `Splitter`."""
        if self._state == "start":
            self._start += text
            begun = self._start.lstrip()
            mark = next((tag for tag in self._tags if begun.startswith(tag)), None)
            if mark is not None:
                self._open(mark)
                text, self._start = begun[len(mark) :], ""
            elif any(tag.startswith(begun) for tag in self._tags):
                return []
            else:
                self._state = "content"
                text, self._start = self._start, ""
        pieces: list[Piece] = []
        if self._state == "reasoning":
            before, mark = self._marks.feed(text)
            pieces += self._reasoning(before)
            if mark is None:
                return pieces
            self._state, text = "after", self._marks.take()
        if self._state == "after":
            text = text.lstrip()
            if not text:
                return pieces
            self._state = "content"
        return pieces + _pieces("content", text)

    def _reasoning(self, text: str) -> list[Piece]:
        text = self._space + text
        words = text.rstrip()
        self._space = text[len(words) :]
        if not self._has_words:
            words = words.lstrip()
            self._has_words = bool(words)
            if not words:
                self._space = ""
        return _pieces("reasoning", words)

    def flush(self) -> list[Piece]:
        """See `Splitter`."""
        if self._state == "start":
            start, self._start = self._start, ""
            return _pieces("content", start)
        if self._state == "reasoning":
            return self._reasoning(self._marks.take())
        return []


class TagSplitter:
    """Text inside of tags, as in ``<analysis>...</analysis><final>...</final>``.

    Text outside of the tags is content.
    """

    def __init__(self, tags: Mapping[str, Kind]) -> None:
        """*tags*: name of each tag, without its brackets, and the kind of its text."""
        self._kinds: dict[str, Kind] = {f"<{name}>": kind for name, kind in tags.items()}
        self._closes = {f"<{name}>": f"</{name}>" for name in tags}
        self._kind: Kind = "content"
        self._marks = Marks(self._kinds)

    def feed(self, text: str) -> list[Piece]:
        """See `Splitter`."""
        pieces: list[Piece] = []
        while True:
            before, mark = self._marks.feed(text)
            pieces += _pieces(self._kind, before)
            if mark is None:
                return pieces
            text = self._marks.take()
            if mark in self._kinds:
                self._kind = self._kinds[mark]
                self._marks = Marks([self._closes[mark]])
            else:
                self._kind = "content"
                self._marks = Marks(self._kinds)

    def flush(self) -> list[Piece]:
        """See `Splitter`."""
        return _pieces(self._kind, self._marks.take())


class MarkerSplitter:
    """Reasoning up to a marker, such as ``===FINAL===``, and content after it."""

    def __init__(self, marker: str) -> None:
        """*marker*: at least one character."""
        self._marks = Marks([marker])
        self._kind: Kind = "reasoning"

    @property
    def has_answer(self) -> bool:
        """Whether the marker came."""
        return self._kind == "content"

    def feed(self, text: str) -> list[Piece]:
        """See `Splitter`."""
        if self._kind == "content":
            return _pieces("content", text)
        before, mark = self._marks.feed(text)
        pieces = _pieces("reasoning", before)
        if mark is None:
            return pieces
        self._kind = "content"
        return pieces + _pieces("content", self._marks.take())

    def flush(self) -> list[Piece]:
        """See `Splitter`."""
        return _pieces(self._kind, self._marks.take())


CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_FUNCTIONS: Final = "functions."
_HEADERS: Final = ("assistant", "to=")  # how a header may begin before its channel


class HarmonySplitter:
    """Channels of gpt-oss: "analysis" is reasoning, a message to a function is a call.

    Messages are ``<|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>``; the header may have a
    recipient, ``to=functions.NAME``. The prompt ends with ``<|start|>assistant``. An answer without
    any channel is content.
    """

    def __init__(self) -> None:
        self._header = ""
        self._is_header = True
        self._has_channel = False
        self._kind: Kind = "content"
        self._name = ""
        self._marks = Marks([MESSAGE, CHANNEL, *_ENDS])

    def feed(self, text: str) -> list[Piece]:
        """See `Splitter`."""
        pieces: list[Piece] = []
        while True:
            before, mark = self._marks.feed(text)
            pieces += self._text(before)
            if mark is None:
                return pieces
            text = ""
            if mark == CHANNEL:
                self._has_channel = True
                pieces += [] if self._is_header else self._begin_header()
                self._header += CHANNEL
            elif mark == MESSAGE and self._is_header:
                pieces += self._begin_message()
            elif mark == MESSAGE:
                pieces += self._text(mark)
            else:
                pieces += self._begin_header()

    def _begin_header(self) -> list[Piece]:
        pieces = self._unmarked()
        self._is_header, self._header = True, ""
        return pieces

    def _begin_message(self) -> list[Piece]:
        header, self._header = self._header, ""
        self._is_header = False
        self._has_channel = True
        recipient = header.partition("to=")[2].partition(" ")[0].partition("<|")[0].strip()
        self._name = recipient.removeprefix(_FUNCTIONS)
        channel = header.partition(CHANNEL)[2].split(maxsplit=1)
        if self._name:
            self._kind = "call"
            return [Piece("call", "", self._name)]
        self._kind = "reasoning" if channel and channel[0] == "analysis" else "content"
        return []

    def _text(self, text: str) -> list[Piece]:
        if not self._is_header:
            return [Piece(self._kind, text, self._name)] if text else []
        self._header += text
        begun = self._header.lstrip()
        if self._has_channel or any(
            begun.startswith(one) or one.startswith(begun) for one in _HEADERS
        ):
            return []
        self._is_header = False
        return self._unmarked()

    def _unmarked(self) -> list[Piece]:
        """An answer that began without a header."""
        if self._has_channel:
            return []
        header, self._header = self._header, ""
        return _pieces("content", header)

    def flush(self) -> list[Piece]:
        """See `Splitter`."""
        return self._text(self._marks.take()) + self._unmarked()


def _pieces(kind: Kind, text: str) -> list[Piece]:
    return [Piece(kind, text)] if text else []


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """*pieces* with adjacent ones of one kind joined; each call stays one piece."""
    whole: list[Piece] = []
    for piece in pieces:
        begins_call = piece.kind == "call" and not piece.text
        if whole and whole[-1].kind == piece.kind and not begins_call:
            whole[-1] = Piece(piece.kind, whole[-1].text + piece.text, piece.name)
        else:
            whole.append(piece)
    return whole


def opened_by(prompt_end: str, tags: Sequence[str] = tuple(THINK_TAGS)) -> str | None:
    """The opening mark with which a prompt ends, white space aside; None if there is none."""
    end = prompt_end.rstrip()
    return next((tag for tag in tags if end.endswith(tag)), None)
