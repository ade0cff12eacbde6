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
from functools import cached_property, lru_cache
from typing import Final, Literal, NamedTuple

from kqview.chat.formats import CHANNEL, MESSAGE, format_of
from kqview.stop_strings import HeldText, StopStrings

Kind = Literal["reasoning", "content", "call", "mark"]


class Piece(NamedTuple):
    """Text of one kind; *name* is the function of a "call", whose text is its arguments.

    A "call" begins with an empty text, so that each call is seen even without arguments. A "mark"
    is what no client sees: marks, headers of channels, and white space around them.
    """

    kind: Kind
    text: str
    name: str = ""


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


@dataclass(frozen=True)
class _Phase:
    """The text between two marks.

    Attributes:
        kind: Of the text, without the white space behind the mark before it.
        turns: A mark that ends it -> the name of the phase behind that mark; "" is no mark.
        is_trimmed: Whether white space before a mark, or at the end, belongs to the mark.
        closings: Texts that end the reasoning here and begin the answer; "" is none.
    """

    kind: Kind
    turns: Mapping[str, str]
    is_trimmed: bool = False
    closings: Sequence[str] = ()

    @cached_property
    def marks(self) -> StopStrings:
        """The marks of `turns`."""
        return StopStrings(self.turns)


_Phases = Mapping[str, _Phase]
# Marks with which an answer may begin -> the phase behind them. One that begins with a letter is
# text in an answer, and a closing one says that there is no reasoning.
_STARTS: Final[Mapping[str, str]] = {
    mark: phase
    for tag, close in THINK_TAGS.items()
    for mark, phase in ((tag, tag), (close, "content"))
    if not mark[0].isalpha()
}


@lru_cache(maxsize=64)
def _thinking(frames: tuple[str, ...]) -> _Phases:
    """Reasoning between two marks at the beginning, as in ``<think>...</think>``.

    An answer that does not begin with a mark is content, unchanged, but for *frames* around it.
    """
    opened = {
        tag: _Phase("reasoning", {close: "content"}, is_trimmed=True, closings=[close])
        for tag, close in THINK_TAGS.items()
    }
    return {"content": _Phase("content", dict.fromkeys(frames, "content")), **opened}


@lru_cache(maxsize=64)
def _tagged(analysis: str, final: str, marker: str) -> _Phases:
    """Tags, as in ``<analysis>...</analysis><final>...</final>``, or a marker instead of them.

    What is in the first tag is reasoning, and comes as it is written. What precedes the first mark
    is reasoning too: it is held until that mark comes, and is content if none does. Reasoning ends
    at its closing tag, at the opening tag of the answer, and at the marker; behind the marker, all
    is content. The answer ends at its closing tag; text outside of both tags is content.
    """
    open_, close = f"<{analysis}>", f"</{analysis}>"
    answer, end = f"<{final}>", f"</{final}>"
    ends = {close: "between", answer: "final", marker: "rest"}
    return {
        "begun": _Phase("reasoning", {open_: open_, **ends}, is_trimmed=True),
        open_: _Phase(
            "reasoning", ends, is_trimmed=True, closings=[close + answer, answer, marker]
        ),
        "between": _Phase("content", {open_: open_, answer: "final"}, is_trimmed=True),
        "final": _Phase("content", {end: "between"}, is_trimmed=True),
        "rest": _Phase("content", {}),
    }


@lru_cache(maxsize=64)
def _marked(marker: str) -> _Phases:
    """Reasoning up to a marker, such as ``===FINAL===``, which holds it; without, it is content."""
    begun = _Phase("reasoning", {marker: "rest"}, is_trimmed=True, closings=[marker])
    return {"begun": begun, "rest": _Phase("content", {})}


class MarkSplitter:
    """Text whose kind changes at marks, by a table of phases."""

    def __init__(
        self, phases: _Phases, phase: str, *, starts: Mapping[str, str] | None = None
    ) -> None:
        """Begin in this *phase*: "begun" holds its text until a mark follows.

        Args:
            phases: What there is, by name.
            phase: The first one.
            starts: Marks with which the answer may begin -> the phase behind them.
        """
        self._phases = phases
        self._phase = phases[phase]
        self._held = HeldText(self._phase.marks)
        self._starts = starts
        self._start = ""  # what may become one of *starts*
        self._begun: list[str] | None = [] if phase == "begun" else None
        self._is_after_mark = phase not in ("begun", "content")
        self._spaces: list[str] = []  # may be next to a mark, or before a start

    @property
    def closing(self) -> str | None:
        """Text that ends the reasoning here and begins the answer; None outside of reasoning.

        It goes on from a mark that the answer has begun to write.
        """
        closings = [one for one in self._phase.closings if one]
        return _rest(closings, self._held) if closings else None

    def feed(self, text: str) -> list[Piece]:
        """Add *text*; returns what is certain."""
        pieces: list[Piece] = []
        if self._starts is not None:
            text = self._started(self._starts, self._start + text, pieces)
        while True:
            before, mark = self._held.feed(text)
            if self._begun is not None:
                self._begun.append(before)
            elif before:
                self._add(before, pieces)
            if mark is None:
                return pieces
            if self._begun is not None:
                begun, self._begun, self._is_after_mark = "".join(self._begun), None, True
                self._add(begun, pieces)
            text = self._held.take()
            self._turn(self._phase.turns[mark], mark, pieces)

    def _started(self, starts: Mapping[str, str], text: str, pieces: list[Piece]) -> str:
        """The answer begins with *text*; returns what is behind its first mark, if there is one."""
        begun = text.lstrip()
        self._spaces.append(text[: len(text) - len(begun)])
        mark = next((mark for mark in starts if begun.startswith(mark)), None)
        if mark is None and any(one.startswith(begun) for one in starts):
            self._start = begun
            return ""
        self._starts, self._start = None, ""
        if mark is not None:
            self._turn(starts[mark], mark, pieces)
            return begun[len(mark) :]
        spaces, self._spaces = self._spaces, []
        return "".join([*spaces, begun])

    def _turn(self, phase: str, mark: str, pieces: list[Piece]) -> None:
        """Go on with *phase*, behind *mark*."""
        pieces.append(Piece("mark", "".join([*self._spaces, mark])))
        self._phase = self._phases[phase]
        self._held = HeldText(self._phase.marks)
        self._spaces, self._is_after_mark = [], True

    def _add(self, text: str, pieces: list[Piece]) -> None:
        """Add the *text* between two marks, without the white space next to them."""
        if self._is_after_mark:
            words = text.lstrip()
            if space := text[: len(text) - len(words)]:
                pieces.append(Piece("mark", space))
            text, self._is_after_mark = words, not words
        if self._phase.is_trimmed:
            words = text.rstrip()
            if not words:
                self._spaces.append(text)
                return
            spaces, self._spaces = self._spaces, [text[len(words) :]]
            text = "".join([*spaces, words])
        if text:
            pieces.append(Piece(self._phase.kind, text))

    def flush(self) -> list[Piece]:
        """What was held back, at the end of the answer."""
        pieces: list[Piece] = []
        rest = self._start or self._held.take()
        if self._begun is not None or self._starts is not None:
            if text := "".join([*self._spaces, *(self._begun or ()), rest]):
                pieces.append(Piece("content", text))
            return pieces
        if rest:
            self._add(rest, pieces)
        if space := "".join(self._spaces):
            kind = self._phase.kind
            pieces.append(Piece("mark" if kind == "reasoning" else kind, space))
        return pieces


_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|eom|>", "<|eot|>")
_HEADERS: Final = ("assistant", "to=")  # how a header may begin before its channel
_BEGUN_MAX: Final = max(map(len, _HEADERS))


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
        end = "<|eom|>" if has_recipients else "<|end|>"
        self._closing = f"{end}<|start|>assistant" + ("" if may_call else answer)

    @property
    def closing(self) -> str | None:
        """As in `MarkSplitter`."""
        is_reasoning = not self._is_header and self._kind == "reasoning"
        return _rest([self._closing], self._marks) if is_reasoning else None

    def feed(self, text: str) -> list[Piece]:
        """As in `MarkSplitter`."""
        pieces: list[Piece] = []
        while True:
            before, mark = self._marks.feed(text)
            pieces += self._text(before)
            if mark is None:
                return pieces
            text = ""
            if mark == CHANNEL:
                pieces += [] if self._is_header else self._end_header()
                self._is_header = self._has_channel = True
                self._header.append(CHANNEL)
            elif mark == MESSAGE and self._is_header:
                pieces += self._begin_message()
            elif mark == MESSAGE:
                pieces += self._text(mark)
            else:
                pieces += [*self._end_header(), Piece("mark", mark)]
                self._is_header = True

    def _end_header(self) -> list[Piece]:
        """What became of the header: content if the answer has had no channel."""
        header, self._header, self._begun = "".join(self._header), [], ""
        return [Piece("mark" if self._has_channel else "content", header)] if header else []

    def _begin_message(self) -> list[Piece]:
        header, self._header, self._begun = "".join(self._header), [], ""
        self._is_header = False
        self._has_channel = True
        recipient = header.partition("to=")[2].partition(" ")[0].partition("<|")[0].strip()
        self._name = recipient.removeprefix("functions.")
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
        """As in `MarkSplitter`."""
        return self._text(self._marks.take()) + self._end_header()


def _rest(closings: Sequence[str], marks: HeldText) -> str:
    """The first of *closings* that goes on from what is held; without one, the first as a whole."""
    held = marks.held
    return next((one[len(held) :] for one in closings if one.startswith(held)), closings[0])


# ---- which of them


@dataclass(frozen=True, kw_only=True)
class Split:
    """How an answer marks its reasoning.

    Attributes:
        mode: Its form; "none" if all of it is content, "think" for ``<think>`` and its like.
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

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """An answer in which none of these stands is content, as it is."""
        if self.mode == "harmony" or self.opened is not None:
            return ("",)
        phases, _, starts = self._table
        return (*(mark for one in phases.values() for mark in one.turns if mark), *(starts or ()))

    def splitter(self) -> "MarkSplitter | HarmonySplitter":
        """A splitter for one answer."""
        if self.mode == "harmony":
            return HarmonySplitter(may_call=self.may_call, has_recipients=self.has_recipients)
        phases, first, starts = self._table
        return MarkSplitter(phases, first, starts=starts)

    @property
    def _table(self) -> tuple[_Phases, str, Mapping[str, str] | None]:
        """The phases, the first of them, and with which marks an answer may begin."""
        match self.mode:
            case "think" if self.opened is not None:
                return _thinking(self.frames), self.opened, None
            case "think":
                return _thinking(self.frames), "content", _STARTS
            case "tags":
                phases, opened = _tagged(*self.tags, self.marker), self.opened or ""
                return phases, opened if opened in phases else "begun", None
            case "marker":
                return _marked(self.marker), "begun", None
            case _:
                return {"content": _Phase("content", {})}, "content", None


@lru_cache(maxsize=64)  # few templates are in use
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
