"""How models write tool calls: the grammar of calls, and reading them. Pure.

The format follows from the model's chat template. A template that knows no tools gets them as a
system message in the format of Hermes, and earlier calls and results as text.
"""

import contextlib
import json
import re
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

from kqview import json_input
from kqview.chat.formats import (
    CHANNEL,
    FORMATS,
    HEAD_MAX,
    MESSAGE,
    SEPARATORS,
    Format,
    Syntax,
    pieces,
)
from kqview.chat.json_text import (
    DEPTH_MAX,
    JsonText,
    Notation,
    decoded,
    literal as json_literal,
    quoted,
)
from kqview.chat.parts import object_of
from kqview.chat.reasoning import THINK_TAGS
from kqview.errors import RequestError
from kqview.stop_strings import HeldText
from kqview.types.closed_schema import COMPACT, LINES, held
from kqview.types.reply import Reply, ToolCall

Tool = Mapping[str, Any]
Mark = Callable[[str], str]
"""Text of an answer, with marks in it -> how a grammar says it."""

CALL_OPEN: Final = "<tool_call>"
CALL_CLOSE: Final = "</tool_call>"
# How messages with reasoning begin and end, where messages have headers.
_THOUGHTS: Final[Mapping[Format, tuple[str, str]]] = {
    "harmony": (f"{CHANNEL}analysis{MESSAGE}", "<|end|>"),
    "muse": (f" to=self{MESSAGE}", "<|eom|>"),
}
_DOLLAR: Final = "\0"  # in a name, while the other signs of a pattern are replaced
_MOST_CALLS: Final = 32  # that a grammar allows in one answer
_SEPARATED: Final = re.compile(f"[{re.escape(SEPARATORS)}]*")
_ID: Final = re.compile(r'"id"\s*:\s*"([\w.:-]+)"')
_AT_ONCE: Final = 4096  # characters that are read in one go, so that the work is linear


@lru_cache(maxsize=64)
def knows_tools(template: str) -> bool:
    """Whether the template shows tools to the model."""
    return re.search(r"\btools\b", template) is not None


# ---- grammars


class ReasoningStart(NamedTuple):
    """How reasoning may precede an answer.

    Attributes:
        how: "may", with its opening mark; "open", because the prompt ends with that mark.
        tag: The opening mark, one of `THINK_TAGS`.
    """

    how: Literal["no", "may", "open"] = "no"
    tag: str = "<think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What an answer has to be.

    Attributes:
        calls: Functions that may be called.
        is_parallel: Whether there may be several calls.
        schema: JSON schema of an answer without calls, as text too; None if it has to be a call.
        reasoning: Whether it precedes the answer.
    """

    calls: Sequence[Tool] = ()
    is_parallel: bool = True
    schema: Mapping[str, Any] | str | None = None
    reasoning: ReasoningStart = field(default_factory=ReasoningStart)


def grammar(wanted: Wanted, form: Format, mark: Mark) -> str:
    """A grammar for `Sampling.grammar`, in llguidance's language.

    Args:
        wanted: What the answer has to be; a call or a schema.
        form: How calls are written.
        mark: How a grammar says the text of a mark, see `literal`.
    """
    return _Grammar(wanted, form, mark).text()


def literal(text: str) -> str:
    """*text* as a grammar says it."""
    return json.dumps(text, ensure_ascii=False)


def said(control_tokens: Mapping[str, int], text: str) -> str:
    """*text* as a grammar says it: control tokens by their id, because no text matches them."""
    found = sorted((name for name in control_tokens if name in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]
    return " ".join(
        f"<[{control_tokens[part]}]>" if i % 2 else literal(part)
        for i, part in enumerate(parts)
        if part
    )


class _Grammar:
    """The rules of a grammar while they are written."""

    def __init__(self, wanted: Wanted, form: Format, mark: Mark) -> None:
        self._wanted, self._form, self._mark = wanted, form, mark
        self._syntax = FORMATS[form]
        self._rules = [r"SPACE: /[ \n]{1,4}/", r"LINES: /\n{1,2}/"]

    def text(self) -> str:
        """The whole grammar."""
        wanted = self._wanted
        choices: list[str] = []
        if wanted.calls:
            space = "" if self._form in _THOUGHTS or wanted.reasoning.how != "no" else "SPACE? "
            choices.append(space + self._calls())
        if wanted.schema is not None:
            self._rules.append(f"answer: {_json(wanted.schema, COMPACT)}")
            choices.append(self._joined(self._syntax.answer, "answer"))
        start = f"{self._reasoning()}({' | '.join(choices)})"
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"

    def _joined(self, before: str, rule: str, after: str = "") -> str:
        """*rule* between the texts of two marks, which may be empty."""
        parts = [before and self._mark(before), rule, after and self._mark(after)]
        return " ".join(filter(None, parts))

    def _until(self, name: str, end: str) -> str:
        """Any text up to a mark."""
        said = self._mark(end)
        if said != literal(end):
            self._rules.append(f"{name}: /(?s:.*)/ {said}")
        else:
            self._rules.append(f"{name}[suffix={said}]: /(?s:.*)/")
        return name

    def _reasoning(self) -> str:
        (how, tag), mark = self._wanted.reasoning, self._mark
        if self._form in _THOUGHTS:
            opened, end = _THOUGHTS[self._form]
            rest = self._until("reasoning", end)
            return f"({mark(opened)} {rest} {mark('<|start|>assistant')})? "
        if how == "no":
            return ""
        rest = f"{self._until('reasoning', THINK_TAGS[tag])} SPACE?"
        return f"{rest} " if how == "open" else f"({mark(tag)} {rest})? "

    def _calls(self) -> str:
        syntax = self._syntax
        for i, tool in enumerate(self._wanted.calls):
            function = object_of(tool["function"])
            # A function of which none are given has no parameters, as in OpenAI's API.
            given = function.get("parameters")
            schema = object_of({"properties": {}} if given is None else given)
            self._rules.append(f"call_{i}: {self._call(i, function['name'], schema)}")
        named = range(len(self._wanted.calls))
        self._rules.append("call: " + " | ".join(f"call_{i}" for i in named))
        if self._form == "gemma":
            self._rules += _NOTATION
            self._until("text_end", syntax.quotes[0])
            self._rules.append(f"text: {self._mark(syntax.quotes[0])} text_end")
        calls, end = "call", syntax.end
        if self._wanted.is_parallel and self._form != "harmony":  # whose turn ends with a call
            between = self._mark(syntax.between) if syntax.between.strip() else "SPACE?"
            calls += f" ({between} call){{0,{_MOST_CALLS - 1}}}"
        if end and not syntax.between.strip():
            # White space is one word of the grammar, whatever follows it.
            calls, end = f"{calls} SPACE?", end.lstrip()
        return self._joined(syntax.begin, calls, end)

    def _call(self, i: int, name: str, schema: Mapping[str, Any]) -> str:
        syntax = self._syntax
        shown = json.dumps(name, ensure_ascii=False)[1:-1] if syntax.is_object else name
        parts: list[str] = []
        # A name and what is around it are one word: a grammar reads the longest that may come.
        pattern = syntax.call.replace("$name", shown.replace("$", _DOLLAR))
        for j, piece in enumerate(pieces(pattern)):
            if j % 2 == 0:
                text = piece.replace(_DOLLAR, "$")
                parts.append(self._lines(text) if syntax.argument else text and self._mark(text))
            elif piece != "arguments":
                parts.append("/[0-9]{1,3}/" if piece == "index" else "/[a-zA-Z0-9]{9}/")
            elif syntax.argument:
                parts.append(self._arguments(i, schema))
            else:
                self._rules.append(f"arguments_{i}: {_json({'type': 'object', **schema})}")
                parts.append(f"arguments_{i}")
        return " ".join(filter(None, parts))

    def _lines(self, text: str) -> str:
        """*text*, whose line ends a model may leave out."""
        words = filter(None, re.split(r"(\n+)", text))
        return " ".join("LINES?" if word[0] == "\n" else self._mark(word) for word in words)

    def _arguments(self, i: int, schema: Mapping[str, Any]) -> str:
        """Arguments one by one, in the order of the schema."""
        required = schema.get("required")
        needed = cast("list[object]", required) if isinstance(required, list) else []
        comma = self._syntax.comma and self._mark(self._syntax.comma)
        # From the last argument to the first: what may be left, behind none or some.
        first = more = ""
        for j, (key, given) in reversed([*enumerate(object_of(schema.get("properties")).items())]):
            value = self._argument(f"value_{i}_{j}", key, object_of(given))
            is_needed = key in needed
            self._rules += [
                f"first_{i}_{j}: {value} {more}" + ("" if is_needed else f" | {first}"),
                f"more_{i}_{j}: {comma} {value} {more}" + ("" if is_needed else f" | {more}"),
            ]
            first, more = f"first_{i}_{j}", f"more_{i}_{j}"
        return first

    def _argument(self, rule: str, key: str, kind: Mapping[str, Any]) -> str:
        syntax, is_text = self._syntax, _is_text(kind)
        type_ = "string" if is_text else str(kind.get("type", "object"))
        shown = {
            "key": key,
            "text": "true" if is_text else "false",
            "value": "\0",
            "type": "number" if type_ == "integer" else type_,
        }
        parts = pieces(syntax.argument)
        whole = "".join(shown[part] if j % 2 else part for j, part in enumerate(parts))
        before, _, after = whole.partition("\0")
        end = after.rstrip("\n")
        if syntax.quotes:
            quote = syntax.quotes[0] if is_text else ""
            before, end = before + quote, quote
        stem = before.rstrip("\n")
        begun = self._joined("", self._lines(stem), before[len(stem) :])
        choices = kind.get("enum")
        if is_text and isinstance(choices, list):
            said = " | ".join(literal(str(one)) for one in cast("list[object]", choices))
            self._rules.append(f"{rule}: ({said}) {self._mark(end)}")
        elif is_text and end == "'":
            self._rules.append(rf"""{rule}: /([^'\\\x00-\x1f]|\\['"\\nrt])*'/""")
        elif is_text:
            self._until(rule, end)
        else:
            value = _json(kind)
            if kind.get("type") == "boolean":  # templates write it as Python, too
                value = "/true|false|True|False/"
            elif self._form == "gemma" and kind.get("type") not in ("integer", "number"):
                value = "notation"
            self._rules.append(f"{rule}: {self._joined('', value, end)}")
        return f"{begun} {rule}" + (" LINES?" if after.endswith("\n") else "")


# Rules of any value in Gemma's notation.
_NOTATION: Final = (
    "notation: object | list | text | /-?[0-9]{1,16}(\\.[0-9]{1,16})?|true|false|null/",
    'object: "{" (pair ("," pair)*)? "}"',
    'pair: /[^\\x00-\\x1f:{}\\[\\],<"]{1,64}/ ":" notation',
    'list: "[" (notation ("," notation)*)? "]"',
)


def _json(schema: Mapping[str, Any] | str, space: Mapping[str, Any] = LINES) -> str:
    """A value that *schema* describes. Models write arguments with white space or without."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return f"%json {held(text, space)}"


def text_parameters(tools: Sequence[Tool]) -> Mapping[str, frozenset[str]]:
    """Names of each function's parameters that are text, whatever a model writes for them."""
    found: dict[str, frozenset[str]] = {}
    for tool in tools:
        function = object_of(tool.get("function"))
        properties = object_of(object_of(function.get("parameters")).get("properties"))
        names = (key for key, given in properties.items() if _is_text(object_of(given)))
        found[str(function.get("name"))] = frozenset(names)
    return found


def _is_text(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    if kind is None and isinstance(schema.get("enum"), list):
        return all(isinstance(one, str) for one in schema["enum"])
    return kind == "string"


# ---- reading calls


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call.

    Attributes:
        index: Of the call in the answer.
        arguments: Further text of its arguments, JSON as the model writes it.
        id: With the first piece: a name for the call.
        name: With the first piece: its function.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class CallReader:
    """Takes calls out of an answer's content while it comes; what is no call stays text.

    An answer's calls are known by their marks, so several formats can be read at once. The work is
    linear in the length of the answer.
    """

    def __init__(self, form: Format, texts: Mapping[str, frozenset[str]] | None = None) -> None:
        """Read calls of this format; *texts* as from `text_parameters`."""
        self._form = form
        self._texts = texts or {}
        self._n_calls = 0
        self._opens: dict[str, list[Syntax]] = {}
        self._closes: set[str] = set()
        for syntax in (FORMATS[form], *(FORMATS[name] for name in FORMATS[form].reads)):
            for mark in syntax.marks:
                self._opens.setdefault(mark, []).append(syntax)
            self._closes.update(syntax.closes)
        self._held: list[str] = []  # white space that waits for other text
        self._is_after = False  # whether only white space came since the last call
        self._found: list[str | CallDelta] = []  # since what was returned last
        self._channel: JsonText | None = None  # arguments of a call in a channel of its own
        self._answer = self._read_answer()
        next(self._answer)
        self.written_ids: dict[int, str] = {}
        """Index of a call -> the id that the model wrote."""

    def begin(self, name: str, id_: str | None = None) -> CallDelta:
        """A call whose function is known; `arguments` follow."""
        self._n_calls += 1
        # Mistral's templates take ids of nine letters and digits only.
        size, first = (9, "") if "mistral" in self._form else (24, "call_")
        return CallDelta(self._n_calls - 1, "", id_ or first + uuid.uuid4().hex[:size], name)

    def arguments(self, text: str) -> CallDelta:
        """Further arguments of the call that began last."""
        return CallDelta(self._n_calls - 1, text)

    def channel(self, text: str, name: str) -> list[str | CallDelta]:
        """Add text of a call in a channel of its own; the first one of each call is empty."""
        if not text:
            found = [*self.end_channel(), self.begin(name)]
            self._channel = JsonText()
            return found
        valid, _ = cast("JsonText", self._channel).feed(text)
        return [self.arguments(valid)] if valid else []

    def end_channel(self) -> list[str | CallDelta]:
        """End a call in a channel, if there is one."""
        if self._channel is None:
            return []
        rest, self._channel = self._channel.end(), None
        return [self.arguments(rest)] if rest else []

    def feed(self, text: str) -> list[str | CallDelta]:
        """Add content; returns text and calls in their order."""
        if self._form == "harmony":  # calls have channels of their own
            return [text] if text else []
        for start in range(0, len(text), _AT_ONCE):
            self._answer.send(text[start : start + _AT_ONCE])
        found, self._found = self._found, []
        return found

    def flush(self) -> list[str | CallDelta]:
        """What is clear only when the answer is complete."""
        if self._form == "harmony":
            return self.end_channel()
        with contextlib.suppress(StopIteration):
            self._answer.send(None)
        return self._found

    # Parts of an answer, each a function that waits for more of it with ``yield``: for None at its
    # end. They return the text that they did not take, and None at the end.

    def _read_answer(self) -> "_Reading[None]":
        syntax, begun = FORMATS[self._form], ""
        while not begun:  # white space before the answer
            text = yield
            if text is None:
                self._found += filter(None, ["".join(self._held)])
                return
            begun = text.lstrip()
            self._held.append(text[: len(text) - len(begun)])
        text = begun
        if (syntax.answer and syntax.is_list) or (syntax.bare and begun.startswith(syntax.bare)):
            text = yield from self._read_calls("", [syntax], begun)
        while text is not None:
            mark, text = yield from self._read_text(text)
            if mark is not None and text is not None:
                text = yield from self._read_calls(mark, self._opens[mark], text)

    def _read_text(self, text: str) -> "_Reading[tuple[str | None, str | None]]":
        """Text up to a mark that opens calls, which is returned too."""
        marks = HeldText([*self._opens, *self._closes])
        while True:
            before, mark = marks.feed(text)
            if mark is not None and mark not in self._opens:
                before += "" if self._is_after and not before.strip() else mark
            self._write(before)
            if mark in self._opens:
                return mark, marks.take()
            more = marks.take() if mark is not None else (yield)
            if more is None:
                self._write(marks.take())
                if not self._is_after:
                    self._found += filter(None, ["".join(self._held)])
                return None, None
            text = more

    def _write(self, text: str) -> None:
        """Text of the answer; white space before it, or behind a call, waits for other text."""
        if text.strip():
            self._is_after = False
        elif self._held or self._is_after:
            self._held.append(text)
            return
        text, self._held = "".join([*self._held, text]), []
        if text:
            self._found.append(text)

    def _read_calls(self, mark: str, syntaxes: list[Syntax], text: str) -> "_Reading[str | None]":
        """Calls behind the mark that opens them: one, or all of a list."""
        space, self._held = "".join(self._held), []
        marks = HeldText([close for syntax in syntaxes for close in syntax.closes])
        answer = mark + syntaxes[0].answer if syntaxes[0].answer and syntaxes[0].is_list else ""
        head, n_calls = mark, 0
        held: list[str] = [mark]  # all of what may be a call
        while True:
            held.append(text)
            found = None
            if len(head) < HEAD_MAX:
                head = (head + text)[:HEAD_MAX]
                matches = ((one, one.head.match(head)) for one in syntaxes)
                found = next(((one, match) for one, match in matches if match is not None), None)
            if found is not None:
                syntax, match = found
                name, rest = match["name"].strip(), "".join(held)[match.end() :]
                self._found.append(self.begin(name))
                if id_ := match.groupdict().get("id"):
                    self.written_ids[self._n_calls - 1] = id_
                left, goes_on = yield from self._read_call(syntax, name, rest)
                if not goes_on or left is None:
                    self._is_after = True
                    return left
                head, held, text, syntaxes, n_calls = "", [], left, [syntax], n_calls + 1
                continue
            if n_calls:
                rest = "".join(held).lstrip(" \t\r\n,;]")
                closes = syntaxes[0].closes
                close = next((close for close in closes if rest.startswith(close)), "")
                may_be = not rest or any(close.startswith(rest) for close in closes)
                may_begin = rest.startswith(syntaxes[0].lead) and len(rest) < HEAD_MAX
                if close or not (may_be or may_begin):
                    self._is_after = True
                    return rest[len(close) :]
                head, held = rest, [rest]
            elif answer and head.startswith(answer) and head != answer:
                self._is_after = False
                return "".join(held)[len(answer) :]
            elif not (answer and answer.startswith(head)):
                _, close = marks.feed(text)
                if close is not None:
                    rest, whole = marks.take(), "".join(held)
                    self._write_other(mark, syntaxes, space, whole[: len(whole) - len(rest)])
                    return rest
            more = yield
            if more is None and n_calls:
                self._is_after = True
                self._write("".join(held).lstrip(SEPARATORS))
            elif more is None:
                self._write_other(mark, syntaxes, space, "".join(held))
            if more is None:
                return None
            text = more

    def _read_call(
        self, syntax: Syntax, name: str, text: str
    ) -> "_Reading[tuple[str | None, bool]]":
        """A call from its arguments to its end, and whether another of its list may follow."""
        value: JsonText | _Elements = JsonText()
        if syntax.quotes:
            value = Notation(syntax.quotes, is_open=True)
        elif syntax.argument:
            value = _Elements(syntax, self._texts.get(name, frozenset()))
        while True:
            valid, n = value.feed(text)
            if valid:
                self._found.append(self.arguments(valid))
            if value.is_over:
                break
            if (more := (yield)) is None:
                if isinstance(value, _Elements) and (rest := value.flush()):
                    self._found.append(self.arguments(rest))
                return None, False
            text = more
        text = text[n:]
        if syntax.quotes and syntax.is_list:
            return text, True
        if (syntax.argument and not syntax.quotes) or not (syntax.closes or syntax.is_object):
            return text, False
        is_open = syntax.is_object and (syntax.is_list or not syntax.closes)
        marks, tail = HeldText([*syntax.closes, "}" if is_open else ""]), ""
        while True:
            before, mark = marks.feed(text)
            tail = (tail + before)[:HEAD_MAX]
            if mark is not None:
                break
            if (more := (yield)) is None:
                return None, False
            text = more
        if (id_ := _ID.search(tail)) is not None:
            self.written_ids[self._n_calls - 1] = id_[1]
        return marks.take(), mark == "}" and syntax.is_list

    def _write_other(self, mark: str, syntaxes: list[Syntax], space: str, whole: str) -> None:
        """*whole*, from its mark to its end, is not written as usual, or is no call."""
        calls: list[tuple[str, str, str | None]] = []
        if any(one.is_object for one in syntaxes):
            ends = tuple(close for syntax in syntaxes for close in syntax.closes)
            calls = _calls_of(whole[len(mark) :], ends)
        for name, arguments, id_ in calls:
            self._found += self.begin(name, id_), self.arguments(arguments)
            if id_ is not None:
                self.written_ids[self._n_calls - 1] = id_
        self._is_after = bool(calls)
        if not calls:
            self._held = [space]
            self._write(whole)


_Result = TypeVar("_Result")
_Reading = Generator[None, str | None, _Result]


def _calls_of(body: str, ends: tuple[str, ...]) -> list[tuple[str, str, str | None]]:
    """Calls that are JSON objects, in whatever order their keys are; none if it is not all."""
    at, calls = 0, list[tuple[str, str, str | None]]()
    try:
        json_input.check_depth(body)
        while True:
            at = cast("re.Match[str]", _SEPARATED.match(body, at)).end()
            if at == len(body) or (ends and body.startswith(ends, at)):
                return calls
            value, at = decoded(body, at)
            if (call := _call_of(value)) is None:
                return []
            calls.append(call)
    except ValueError:
        return []


def parse_tool_calls(text: str, family: Format | None = None) -> Reply:
    """Split *text*, such as ``Generation.text``, into content and tool calls.

    What does not parse stays text: the answer of a model is never an error. In arguments, a number
    that JSON does not have, such as NaN or 1e999, is the string that the model wrote, and half of a
    surrogate pair is U+FFFD. A call that was cut off is left out.

    Args:
        text: The whole answer.
        family: The format of the calls, a key of `FORMATS`: "hermes" (Qwen 2.5 and 3, Hermes),
            "mistral", "llama" (the whole answer is calls), "glm", "kimi_k2" and others. None tries
            the first three in this order. Name it if an answer may look like a call without being
            one.

    Raises:
        RequestError: *family* is unknown.
    """
    if family is not None and family not in FORMATS:
        raise RequestError(f"family is {family!r}; choose from {', '.join(FORMATS)}")
    for form in ("hermes", "mistral", "llama") if family is None else (family,):
        reader, content, calls = CallReader(form), list[str](), list[tuple[str, list[str]]]()
        for one in [*reader.feed(text), *reader.flush()]:
            if isinstance(one, str):
                content.append(one)
                continue
            if one.name is not None:
                calls.append((one.name, []))
            calls[-1][1].append(one.arguments)
        found: list[ToolCall] = []
        for i, (name, written) in enumerate(calls):
            try:
                arguments = object_of(json_input.loads("".join(written)))
            except ValueError:
                continue
            found.append(ToolCall(name, arguments, reader.written_ids.get(i)))
        rest = "".join(content).strip()
        if found and not (form == "llama" and rest):
            return Reply(rest, tuple(found))
    return Reply(text)


class _Elements:
    """Reads arguments that are elements, such as ``<parameter=KEY>VALUE</parameter>``.

    They become JSON while they come. What is text by the function's schema, or by what the element
    says, stays so; other values are JSON if they can be read as such.
    """

    def __init__(self, syntax: Syntax, texts: frozenset[str]) -> None:
        self.is_over = False
        self._made: list[str] = []
        self._rest = ""  # behind the last element
        self._text_marks: HeldText | None = None  # of a text that is read
        self._elements = self._read(syntax, texts)
        next(self._elements)

    def feed(self, text: str) -> tuple[str, int]:
        """As `JsonText.feed`."""
        with contextlib.suppress(StopIteration):
            self._elements.send(text)
        made, self._made = "".join(self._made), []
        return made, len(text) - len(self._rest)

    def flush(self) -> str:
        """The rest of a text that was cut off."""
        return "" if self._text_marks is None else quoted(self._text_marks.take())[1:-1]

    def _read(self, syntax: Syntax, texts: frozenset[str]) -> Generator[None, str]:
        """Read all elements; ``yield`` waits for more text."""
        opening, (begin, end), n = syntax.argument.partition("$")[0], syntax.wrap, 0
        first = "\n" if syntax.has_lines else begin
        text = yield
        while True:
            marks = HeldText([opening, *syntax.closes])
            while (mark := marks.feed(text)[1]) is None:
                text = yield
            text = marks.take()
            if mark != opening:
                self._made.append("}" if n else "{}")
                self._rest, self.is_over = text, True
                return
            whole = opening + text
            while (begun := syntax.begins_value.match(whole[:HEAD_MAX])) is None:
                if len(whole) >= HEAD_MAX:
                    break
                whole += yield
            if begun is None:
                text = whole[len(opening) :]
                continue
            said, text = begun.groupdict(), whole[begun.end() :]
            key, kind = said["key"].strip(), said.get("text") or said.get("type")
            is_text = key in texts if kind is None else kind in ("true", "string")
            quote = '"' if is_text else ""
            self._made.append(f"{', ' if n else '{'}{quoted(key)}: {quote}")
            n += 1
            # What is before the value, and no part of it.
            while first.startswith(text) and text != first:
                text += yield
            close = syntax.ends_value.replace("$key", key)
            close = end + close if begin and text.startswith(begin) else close
            marks = HeldText([close, "\n" + close] if syntax.has_lines else [close])
            self._text_marks = marks if is_text else None
            value, text = list[str](), text.removeprefix(first)
            while True:
                before, mark = marks.feed(text)
                if is_text:
                    self._made.append(quoted(before)[1:-1])
                else:
                    value.append(before)
                if mark is not None:
                    break
                text = yield
            self._text_marks = None
            if is_text:
                self._made.append('"')
            else:
                written, sign = "".join(value), syntax.nests
                is_nested = sign and f"{sign}<" in written
                self._made.append(_nested(written, sign) if is_nested else json_literal(written))
            text = marks.take()


def _nested(text: str, sign: str) -> str:
    """JSON of elements inside of each other: lists have items, objects have other elements."""
    first, *rest = text.split(f"{sign}<")
    root = _Node("", [first])
    path = [root]
    for element in rest:
        tag, _, words = element.partition(">")
        if tag.startswith("/"):
            path = path[:-1] or path
        elif len(path) < DEPTH_MAX:
            path.append(_Node(tag, [words]))
            path[-2].inner.append(path[-1])
        else:
            path[-1].text.append(words)
    return root.to_json()


@dataclass(slots=True)
class _Node:
    """An element with its text, and those inside of it."""

    tag: str
    text: list[str]
    inner: "list[_Node]" = field(default_factory=list["_Node"])

    def to_json(self) -> str:
        if not self.inner:
            return json_literal("".join(self.text))
        values = [one.to_json() for one in self.inner]
        if all(one.tag == "item" for one in self.inner):
            return f"[{', '.join(values)}]"
        pairs = zip(self.inner, values, strict=True)
        return f"{{{', '.join(f'{quoted(one.tag)}: {value}' for one, value in pairs)}}}"


def _call_of(value: object) -> tuple[str, str, str | None] | None:
    """Name, arguments as JSON, and id of a call that is a JSON object; None if it is none."""
    fields = object_of(value)
    fields = object_of(fields.get("function")) or fields
    name = fields.get("name", fields.get("tool_name"))
    arguments = fields.get("arguments", fields.get("parameters"))
    id_ = fields.get("id")
    if isinstance(arguments, str):  # some models write JSON text inside JSON
        try:
            json_input.check_depth(arguments)
            arguments, _ = decoded(arguments.strip())
        except ValueError:
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    written, _ = JsonText().feed(json.dumps(arguments, ensure_ascii=False))
    return name, written, id_ if isinstance(id_, str) and id_ else None
