"""Splits an answer into its reasoning, its visible content and the calls in its channels. Pure.

Models mark their reasoning in the text: ``<think>`` blocks, the channels of Harmony (gpt-oss), tags
such as ``<analysis>`` and ``<final>``, or a line before the answer proper; `Split` says which. A
splitter reads the text as it comes and returns what is certain; it holds back only what may still
become a mark, so however the text is cut, the pieces of a kind join to the same text. Marks are
pieces too: all pieces together join to the whole text.

White space next to a mark belongs to the mark, except in Harmony's channels.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

from kqview.chat.formats import CHANNEL, MESSAGE, format_of
from kqview.stop_strings import HeldText

Kind = Literal["reasoning", "content", "call", "mark"]


class Piece(NamedTuple):
    """Text of one kind; *name* is the function of a "call", whose text is its arguments.

    A "call" begins with an empty text, so that each call is seen even without arguments. A "mark"
    is what no client sees: marks, headers of channels, and white space around them.
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

    @property
    def closing(self) -> str | None:
        """Text that ends the reasoning here and begins the answer; None outside of reasoning.

        It goes on from a mark that the answer has begun to write.
        """
        ...


class NoReasoning:
    """All of it is content."""

    @property
    def closing(self) -> str | None:
        """See `Splitter`."""
        return None

    def feed(self, text: str) -> list[Piece]:
        """See `Splitter`."""
        return _pieces("content", text)

    def flush(self) -> list[Piece]:
        """See `Splitter`."""
        return []


class _Text:
    """The text between marks, without the white space next to them.

    Attributes:
        kind: Kind of the text.
    """

    def __init__(self) -> None:
        self.kind: Kind = "content"
        self._is_after_mark = False
        self._is_before_mark = False
        self._spaces: list[str] = []  # may be next to a mark

    def begin(self, kind: Kind, mark: str = "", *, is_before_mark: bool) -> list[Piece]:
        """After *mark*, the text is of this *kind*; *is_before_mark*: another one may follow."""
        space, self._spaces = "".join(self._spaces), []
        self.kind, self._is_after_mark, self._is_before_mark = kind, True, is_before_mark
        return _pieces("mark", space + mark)

    def add(self, text: str) -> list[Piece]:
        """Add *text*; returns what is certain."""
        space = ""
        if self._is_after_mark:
            words = text.lstrip()
            space, text = text[: len(text) - len(words)], words
            self._is_after_mark = not text
        words = text.rstrip() if self._is_before_mark else text
        after = text[len(words) :]
        if words:
            words, self._spaces = "".join([*self._spaces, words]), []
        self._spaces += [after] if after else []
        return _pieces("mark", space) + _pieces(self.kind, words)

    def end(self) -> list[Piece]:
        """No further mark comes."""
        space = "".join(self._spaces)
        return _pieces("mark" if self.kind == "reasoning" else self.kind, space)


THINK_TAGS: Final[Mapping[str, str]] = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<think:opensource>": "</think:opensource>",
    "<mm:think>": "</mm:think>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<|channel>thought": "<channel|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
    "<|think|>": "<|end|>",
    "Here are my reasoning steps:": "[BEGIN FINAL RESPONSE]",  # at the end of a prompt only
}
"""Marks around reasoning at the beginning of an answer: how it opens, and how it closes."""

# What a template shows -> marks around what is not reasoning, and no part of it.
_FRAMES: Final[Mapping[str, Sequence[str]]] = {
    "<|START_RESPONSE|>": ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "<|START_TEXT|>": ("<|START_TEXT|>", "<|END_TEXT|>"),
    "<response></response>": ("<response>", "</response>"),
    "[BEGIN FINAL RESPONSE]": ("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
    "<|end_of_msg|>": tuple(
        f"<|{mark}|>{what}<|sep|>"
        for mark, what in (("open", "response"), ("close", "response"), ("close", "message"))
    ),
    "<|begin|>assistant": ("<|begin|>assistant", "<|content|>"),
}


class ThinkSplitter:
    """Reasoning between two marks at the beginning of the answer, as in ``<think>...</think>``.

    An answer that does not begin with a mark is content, unchanged. One that begins with a closing
    mark has no reasoning.
    """

    def __init__(
        self,
        tags: Mapping[str, str] = THINK_TAGS,
        *,
        opened_by: str | None = None,
        frames: Sequence[str] = (),
    ) -> None:
        """Split at marks.

        Args:
            tags: Around reasoning. One that begins with a letter is text in an answer.
            opened_by: The opening mark with which the prompt ends, if any.
            frames: Marks around the content.
        """
        self._tags = tags
        self._starts = [tag for tag in (*tags, *tags.values()) if not tag[0].isalpha()]
        self._frames = frames
        self._start: str | None = ""  # what may become an opening mark; None behind it
        self._spaces: list[str] = []  # before it
        self._text = _Text()
        self._close = ""
        self._marks = HeldText(frames)
        if opened_by is not None:
            self._open(opened_by, "")

    def _open(self, tag: str, mark: str) -> list[Piece]:
        self._start = None
        self._close = self._tags[tag]
        self._marks = HeldText([self._close])
        return self._text.begin("reasoning", mark, is_before_mark=True)

    def _content(self, _tag: str, mark: str) -> list[Piece]:
        self._marks = HeldText(self._frames)
        return self._text.begin("content", mark, is_before_mark=False)

    @property
    def closing(self) -> str | None:
        """See `Splitter`."""
        return _rest([self._close], self._marks) if self._text.kind == "reasoning" else None

    def feed(self, text: str) -> list[Piece]:
        """See `Splitter`."""
        pieces: list[Piece] = []
        if self._start is not None:
            text = self._start + text
            begun = text.lstrip()
            self._spaces.append(text[: len(text) - len(begun)])
            tag = next((tag for tag in self._starts if begun.startswith(tag)), None)
            if tag is None and any(tag.startswith(begun) for tag in self._starts):
                self._start = begun
                return []
            self._start = None
            space, text = "".join(self._spaces), begun
            if tag is None:
                text = space + text
            else:
                begin = self._open if tag in self._tags else self._content
                pieces += begin(tag, space + tag)
                text = text[len(tag) :]
        while True:
            before, mark = self._marks.feed(text)
            pieces += self._text.add(before)
            if mark is None:
                return pieces
            text = self._marks.take()
            pieces += self._content(mark, mark)

    def flush(self) -> list[Piece]:
        """See `Splitter`."""
        if self._start is not None:
            return _pieces("content", "".join(self._spaces) + self._start)
        return self._text.add(self._marks.take()) + self._text.end()


class TagSplitter:
    """Tags, as in ``<analysis>...</analysis><final>...</final>``, or a marker instead of them.

    What is in the first tag is reasoning, and comes as it is written. What precedes the first mark
    is reasoning too: it is held until that mark comes, and is content if none does. Reasoning ends
    at its closing tag, at the opening tag of the answer, and at the marker; behind the marker, all
    is content. The answer ends at its closing tag; text outside of both tags is content.
    """

    def __init__(
        self,
        analysis: str = "analysis",
        final: str = "final",
        marker: str = "",
        *,
        is_open: bool = False,
    ) -> None:
        """Split at these.

        Args:
            analysis: Name of the tag of the reasoning, without brackets.
            final: Of the tag of the answer.
            marker: The marker, "" for none.
            is_open: Whether the prompt ends with the opening tag of the reasoning.
        """
        self._open, self._close = f"<{analysis}>", f"</{analysis}>"
        self._final, self._end, self._marker = f"<{final}>", f"</{final}>", marker
        self._begun: list[str] | None = None if is_open else []  # before the first mark
        self._text = _Text()
        self._marks = HeldText([self._open, self._close, self._final, marker])
        if is_open:
            self._turn(self._open, "")

    @property
    def closing(self) -> str | None:
        """See `Splitter`; None before the first mark, which may never come."""
        if self._text.kind != "reasoning":
            return None
        return _rest([self._close + self._final, self._final, self._marker], self._marks)

    def feed(self, text: str) -> list[Piece]:
        """See `Splitter`."""
        pieces: list[Piece] = []
        while True:
            before, mark = self._marks.feed(text)
            if self._begun is None:
                pieces += self._text.add(before)
            else:
                self._begun.append(before)
            if mark is None:
                return pieces
            if self._begun is not None:
                begun, self._begun = "".join(self._begun), None
                pieces += self._text.begin("reasoning", is_before_mark=True)
                pieces += self._text.add(begun)
            text = self._marks.take()
            pieces += self._turn(mark, mark)

    def _turn(self, mark: str, text: str) -> list[Piece]:
        """Go on after *mark*, of which *text* is in the answer."""
        kind: Kind = "reasoning" if mark == self._open else "content"
        if mark == self._open:
            self._marks = HeldText([self._close, self._final, self._marker])
        elif mark == self._marker:
            self._marks = HeldText([])
        elif mark == self._final:
            self._marks = HeldText([self._end])
        else:
            self._marks = HeldText([self._open, self._final])
        return self._text.begin(kind, text, is_before_mark=mark != self._marker)

    def flush(self) -> list[Piece]:
        """See `Splitter`."""
        rest = self._marks.take()
        if self._begun is not None:
            begun, self._begun = "".join(self._begun), None
            return _pieces("content", begun + rest)
        return self._text.add(rest) + self._text.end()


class MarkerSplitter:
    """Reasoning up to a marker, such as ``===FINAL===``, and content after it.

    All is held until the marker comes; without one, all is content.
    """

    def __init__(self, marker: str) -> None:
        """*marker*: at least one character."""
        self._marker = marker
        self._marks = HeldText([marker])
        self._text = _Text()
        self._begun: list[str] | None = []

    @property
    def closing(self) -> str | None:
        """See `Splitter`."""
        return None if self._begun is None else _rest([self._marker], self._marks)

    def feed(self, text: str) -> list[Piece]:
        """See `Splitter`."""
        if self._begun is None:
            return self._text.add(text)
        before, mark = self._marks.feed(text)
        self._begun.append(before)
        if mark is None:
            return []
        begun, self._begun = "".join(self._begun), None
        return [
            *self._text.begin("reasoning", is_before_mark=True),
            *self._text.add(begun),
            *self._text.begin("content", mark, is_before_mark=False),
            *self._text.add(self._marks.take()),
        ]

    def flush(self) -> list[Piece]:
        """See `Splitter`."""
        if self._begun is None:
            return self._text.end()
        begun, self._begun = "".join(self._begun), None
        return _pieces("content", begun + self._marks.take())


_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|eom|>", "<|eot|>")
_FUNCTIONS: Final = "functions."
_HEADERS: Final = ("assistant", "to=")  # how a header may begin before its channel
_BEGUN_MAX: Final = max(map(len, _HEADERS))
_NEXT_MESSAGE: Final = "<|end|><|start|>assistant"


class HarmonySplitter:
    """Channels of gpt-oss: "analysis" is reasoning, a message to a function is a call.

    Messages are ``<|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>``; the header may have a
    recipient, ``to=functions.NAME``. The prompt ends with ``<|start|>assistant``. An answer without
    any channel is content.
    """

    def __init__(self, *, may_call: bool = False, has_recipients: bool = False) -> None:
        """Split at headers.

        Args:
            may_call: `closing` leaves it open whether a call or the answer follows.
            has_recipients: Headers have recipients instead of channels: "self" for reasoning, and
                the name of a function for content with its call.
        """
        self._has_recipients = has_recipients
        self._header: list[str] = []
        self._begun = ""  # the first characters of the header, without white space
        self._is_header = True
        self._has_channel = False
        self._kind: Kind = "content"
        self._name = ""
        self._marks = HeldText([MESSAGE, CHANNEL, *_ENDS])
        answer = f" to=user{MESSAGE}" if has_recipients else f"{CHANNEL}final{MESSAGE}"
        end = "<|eom|><|start|>assistant" if has_recipients else _NEXT_MESSAGE
        self._closing = end + ("" if may_call else answer)

    @property
    def closing(self) -> str | None:
        """See `Splitter`."""
        is_reasoning = not self._is_header and self._kind == "reasoning"
        return _rest([self._closing], self._marks) if is_reasoning else None

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
                pieces += [] if self._is_header else self._begin_header("")
                self._has_channel = True
                self._header.append(CHANNEL)
            elif mark == MESSAGE and self._is_header:
                pieces += self._begin_message()
            elif mark == MESSAGE:
                pieces += self._text(mark)
            else:
                pieces += self._begin_header(mark)

    def _begin_header(self, mark: str) -> list[Piece]:
        pieces = self._end_header()
        self._is_header = True
        return pieces + _pieces("mark", mark)

    def _end_header(self) -> list[Piece]:
        """What became of the header: content if the answer has had no channel."""
        header, self._header, self._begun = "".join(self._header), [], ""
        return _pieces("mark" if self._has_channel else "content", header)

    def _begin_message(self) -> list[Piece]:
        header, self._header, self._begun = "".join(self._header), [], ""
        self._is_header = False
        self._has_channel = True
        recipient = header.partition("to=")[2].partition(" ")[0].partition("<|")[0].strip()
        self._name = recipient.removeprefix(_FUNCTIONS)
        channel = header.partition(CHANNEL)[2].split(maxsplit=1)
        pieces = [Piece("mark", header + MESSAGE)]
        if self._has_recipients:
            self._kind, self._name = "reasoning" if self._name == "self" else "content", ""
            return pieces
        if self._name:
            self._kind = "call"
            return [*pieces, Piece("call", "", self._name)]
        self._kind = "reasoning" if channel and channel[0] == "analysis" else "content"
        return pieces

    def _text(self, text: str) -> list[Piece]:
        if not self._is_header:
            return [Piece(self._kind, text, self._name)] if text else []
        self._header.append(text)
        begun = self._begun = (self._begun + text).lstrip()[:_BEGUN_MAX]
        if self._has_channel or any(
            begun.startswith(one) or one.startswith(begun) for one in _HEADERS
        ):
            return []
        self._is_header = False
        return self._end_header()

    def flush(self) -> list[Piece]:
        """See `Splitter`."""
        return self._text(self._marks.take()) + self._end_header()


def _pieces(kind: Kind, text: str) -> list[Piece]:
    return [Piece(kind, text)] if text else []


def _rest(closings: Sequence[str], marks: HeldText) -> str:
    """The first of *closings* that goes on from what is held; without one, the first as a whole."""
    held = marks.held
    return next((one[len(held) :] for one in closings if one.startswith(held)), closings[0])


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


# ---- which of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How an answer marks its reasoning.

    Attributes:
        mode: Its form; "none" if all of it is content.
        opened: The mark with which the prompt has opened reasoning, None if it has not.
        tags: With "tags": names of the tags of reasoning and answer.
        marker: With "tags" and "marker": the marker; "" for none beside tags.
        may_call: With "harmony": whether there are functions to call.
        frames: With "think": marks around the content.
        has_recipients: With "harmony": as in `HarmonySplitter`.
    """

    mode: Literal["none", "think", "harmony", "tags", "marker"] = "think"
    opened: str | None = None
    tags: tuple[str, str] = ("analysis", "final")
    marker: str = ""
    may_call: bool = False
    frames: tuple[str, ...] = ()
    has_recipients: bool = False

    def splitter(self) -> Splitter:
        """A splitter for one answer."""
        match self.mode:
            case "none":
                return NoReasoning()
            case "think":
                return ThinkSplitter(opened_by=self.opened, frames=self.frames)
            case "harmony":
                return HarmonySplitter(may_call=self.may_call, has_recipients=self.has_recipients)
            case "tags":
                is_open = self.opened == f"<{self.tags[0]}>"
                return TagSplitter(*self.tags, self.marker, is_open=is_open)
            case "marker":
                return MarkerSplitter(self.marker)


def split_of(template: str, opened: str | None, *, may_call: bool) -> Split:
    """How the model with this chat template marks its reasoning; the rest as in `Split`."""
    form = format_of(template)
    frames = (mark for shown in _FRAMES if shown in template for mark in _FRAMES[shown])
    return Split(
        mode="harmony" if form in ("harmony", "muse") else "think",
        opened=opened,
        may_call=may_call,
        frames=tuple(frames),
        has_recipients=form == "muse",
    )


THINKING: Final = Split()
"""``<think>`` and its like, should an answer begin with them."""


# ---- tokens


class TokenCounter:
    """Counts an answer's tokens by the kind of their text.

    A token counts as the first of its characters that is no mark, or else as a mark; one without
    text, such as the first half of a character, as the next one with text.

    Attributes:
        n_reasoning: Tokens of reasoning.
        n_final: Tokens of content and calls.
        n_marks: Tokens of marks.
    """

    def __init__(self) -> None:
        self.n_reasoning = self.n_final = self.n_marks = 0
        self._waiting: deque[tuple[int, int]] = deque()  # tokens, and characters of their text
        self._n_silent = 0  # tokens without text, before the next one with text
        self._n_waiting = 0
        self._kind: Kind = "mark"  # of the first token that waits, so far
        self._n_classified = 0  # characters of that token

    @property
    def n_waiting(self) -> int:
        """Tokens whose kind is not known."""
        return self._n_waiting + self._n_silent

    def add(self, text: str) -> None:
        """A token with this text follows."""
        if not text:
            self._n_silent += 1
            return
        self._waiting.append((1 + self._n_silent, len(text)))
        self._n_waiting += 1 + self._n_silent
        self._n_silent = 0

    def classify(self, pieces: Iterable[Piece]) -> None:
        """The kinds of the text that follows."""
        for piece in pieces:
            n_left = len(piece.text)
            while n_left and self._waiting:
                n_tokens, n_characters = self._waiting[0]
                n = min(n_left, n_characters - self._n_classified)
                n_left -= n
                self._n_classified += n
                if self._kind == "mark":
                    self._kind = piece.kind
                if self._n_classified == n_characters:
                    self._waiting.popleft()
                    self._n_waiting -= n_tokens
                    self._count(n_tokens)

    def _count(self, n_tokens: int) -> None:
        match self._kind:
            case "reasoning":
                self.n_reasoning += n_tokens
            case "mark":
                self.n_marks += n_tokens
            case _:
                self.n_final += n_tokens
        self._kind, self._n_classified = "mark", 0

    def end(self) -> None:
        """The answer has ended: what still waits, such as a stop sequence, counts as marks."""
        while self._waiting:
            self._count(self._waiting.popleft()[0])
        self.n_marks += self._n_silent
        self._n_waiting = self._n_silent = 0
