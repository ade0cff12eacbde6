"""How models write tool calls: the grammar of calls, and reading them. Pure.

The format follows from the model's chat template. A template that knows no tools gets them as a
system message in the format of Hermes, and earlier calls and results as text.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, Protocol, cast

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
from kqview.chat.json_text import DEPTH_MAX, JsonText, Notation, decoded, quoted
from kqview.chat.json_text import literal as json_literal
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


def text_of(content: object) -> str:
    """Text of a message's content, whose parts are joined by line ends."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in objects_of(content))


def object_of(value: object) -> dict[str, Any]:
    """*value* if it is a JSON object, else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def objects_of(value: object) -> list[dict[str, Any]]:
    """The objects of *value* if it is a list, else none."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", item) for item in items if isinstance(item, dict)]


# ---- grammars


class Reasoning(NamedTuple):
    """How reasoning may precede an answer.

    Attributes:
        how: "may", with its opening mark; "open", because the prompt ends with that mark.
        tag: The opening mark, one of `THINK_TAGS`.
    """

    how: Literal["no", "may", "open"] = "no"
    tag: str = "<think>"


_NO_REASONING: Final = Reasoning()


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
    reasoning: Reasoning = _NO_REASONING


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


class _Arguments(Protocol):
    """Makes JSON of a call's arguments while they come."""

    is_over: bool

    def feed(self, text: str) -> tuple[str, int]:
        """Add *text*: JSON to go on with, and how many characters belong to the arguments."""
        ...


_Reads = Callable[["CallReader", str, "list[str | CallDelta]"], str | None]


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
        self._read: _Reads = CallReader._start
        self._held: list[str] = []  # white space at the start, or all of what may be a call
        self._is_after = False  # whether only white space came since the last call
        self._marks = HeldText([*self._opens, *self._closes])
        self._syntaxes: list[Syntax] = []  # of the call that is read
        self._mark = self._head = ""
        self._n_in_list = 0
        self._value: _Arguments = JsonText()
        self._tail = ""  # of a call, behind its arguments
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
            self._read, self._value = CallReader._arguments, JsonText()
            return found
        valid, _ = self._value.feed(text)
        return [self.arguments(valid)] if valid else []

    def end_channel(self) -> list[str | CallDelta]:
        """End a call in a channel, if there is one."""
        if self._form != "harmony" or self._read is not CallReader._arguments:
            return []
        self._read = CallReader._text
        rest = cast("JsonText", self._value).end()
        return [self.arguments(rest)] if rest else []

    def feed(self, text: str) -> list[str | CallDelta]:
        """Add content; returns text and calls in their order."""
        if self._form == "harmony":  # calls have channels of their own
            return [text] if text else []
        found: list[str | CallDelta] = []
        for start in range(0, len(text), _AT_ONCE):
            rest: str | None = text[start : start + _AT_ONCE]
            while rest is not None:
                rest = self._read(self, rest, found)
        return found

    # What is read, each a value of `_read`. They return what is left for the next one, None if
    # nothing is.

    def _start(self, text: str, _found: "list[str | CallDelta]") -> str | None:
        """White space before the answer."""
        self._held.append(text)
        begun = text.lstrip()
        if not begun:
            return None
        syntax = FORMATS[self._form]
        self._read = CallReader._text
        self._held[-1] = text[: len(text) - len(begun)]
        if (syntax.answer and syntax.is_list) or (syntax.bare and begun.startswith(syntax.bare)):
            self._open("", [syntax])
        return begun

    def _text(self, text: str, found: list[str | CallDelta]) -> str | None:
        """Text up to a mark."""
        before, mark = self._marks.feed(text)
        if mark is not None and mark not in self._opens:
            before += "" if self._is_after and not before.strip() else mark
        self._write(before, found)
        if mark is None:
            return None
        rest = self._marks.take()
        if mark in self._opens:
            self._open(mark, self._opens[mark])
        return rest

    def _write(self, text: str, found: list[str | CallDelta]) -> None:
        """Text of the answer; white space before it, or behind a call, waits for other text."""
        if text.strip():
            self._is_after = False
        elif self._held or self._is_after:
            self._held.append(text)
            return
        text, self._held = "".join([*self._held, text]), []
        if text:
            found.append(text)

    def _open(self, mark: str, syntaxes: list[Syntax]) -> None:
        self._read, self._n_in_list = CallReader._find_head, 0
        self._mark, self._head, self._syntaxes = mark, mark, syntaxes
        self._space, self._held = "".join(self._held), [mark]
        self._marks = HeldText([close for syntax in syntaxes for close in syntax.closes])

    def _leave(self, *, is_after: bool) -> None:
        self._read, self._is_after, self._held = CallReader._text, is_after, []
        self._marks = HeldText([*self._opens, *self._closes])

    def _find_head(self, text: str, found: list[str | CallDelta]) -> str | None:
        """A call up to its arguments."""
        self._held.append(text)
        if len(self._head) < HEAD_MAX:
            self._head = (self._head + text)[:HEAD_MAX]
            for syntax in self._syntaxes:
                if (head := syntax.head.match(self._head)) is not None:
                    rest = "".join(self._held)[head.end() :]
                    self._begin(syntax, head["name"].strip(), found)
                    if id_ := head.groupdict().get("id"):
                        self.written_ids[self._n_calls - 1] = id_
                    return rest
        if self._n_in_list:
            return self._between(found)
        answer = self._syntaxes[0].answer if self._syntaxes[0].is_list else ""
        if answer and (self._mark + answer).startswith(self._head):
            return None
        if answer and self._head.startswith(self._mark + answer):
            rest = "".join(self._held)[len(self._mark + answer) :]
            self._leave(is_after=False)
            return rest
        _, mark = self._marks.feed(text)
        if mark is None:
            return None
        rest = self._marks.take()
        whole = "".join(self._held)
        self._no_head(whole[: len(whole) - len(rest)], found)
        return rest

    def _between(self, found: list[str | CallDelta]) -> str | None:
        """Behind a call of a list, where no other has begun so far."""
        syntax = self._syntaxes[0]
        rest = "".join(self._held).lstrip(" \t\r\n,;]")
        close = next((close for close in syntax.closes if rest.startswith(close)), None)
        if close is not None:
            self._leave(is_after=True)
            return rest[len(close) :]
        may_be = not rest or any(close.startswith(rest) for close in syntax.closes)
        if may_be or (rest.startswith(syntax.lead) and len(rest) < HEAD_MAX):
            self._held = [rest]
            self._head = rest
            return None
        self._leave(is_after=True)
        return rest

    def _begin(self, syntax: Syntax, name: str, found: list[str | CallDelta]) -> None:
        self._syntaxes, self._read, self._held = [syntax], CallReader._arguments, []
        found.append(self.begin(name))
        if syntax.quotes:
            self._value = Notation(syntax.quotes, is_open=True)
        elif syntax.argument:
            self._value = _Elements(syntax, self._texts.get(name, frozenset()))
        else:
            self._value = JsonText()

    def _arguments(self, text: str, found: list[str | CallDelta]) -> str | None:
        valid, n = self._value.feed(text)
        if valid:
            found.append(self.arguments(valid))
        if not self._value.is_over:
            return None
        [syntax] = self._syntaxes
        self._marks = HeldText([*syntax.closes, "}" if syntax.is_object and syntax.is_list else ""])
        if syntax.quotes and syntax.is_list:
            self._go_on()
        elif (syntax.argument and not syntax.quotes) or not (syntax.closes or syntax.is_object):
            self._leave(is_after=True)
        else:
            self._read = CallReader._end_call
            if not syntax.closes:
                self._marks = HeldText(["}"])
        return text[n:]

    def _end_call(self, text: str, _found: list[str | CallDelta]) -> str | None:
        """What ends a call, behind its arguments."""
        before, mark = self._marks.feed(text)
        self._tail = (self._tail + before)[:HEAD_MAX]
        if mark is None:
            return None
        rest = self._marks.take()
        if (id_ := _ID.search(self._tail)) is not None:
            self.written_ids[self._n_calls - 1] = id_[1]
        self._tail = ""
        if mark == "}" and self._syntaxes[0].is_list:
            self._go_on()
        else:
            self._leave(is_after=True)
        return rest

    def _go_on(self) -> None:
        """Another call of the same list may follow."""
        self._read, self._head, self._held = CallReader._find_head, "", []
        self._n_in_list += 1

    def _no_head(self, whole: str, found: list[str | CallDelta]) -> None:
        """*whole*, from its mark to its end, is not written as usual."""
        space = self._space
        calls = [] if not any(one.is_object for one in self._syntaxes) else self._parsed(whole)
        self._leave(is_after=bool(calls))
        if calls:
            found += calls
        else:
            self._held = [space]
            self._write(whole, found)

    def _parsed(self, whole: str) -> list[CallDelta]:
        """Calls that are JSON objects, in whatever order their keys are; none if it is not all."""
        body, at, calls = whole[len(self._mark) :], 0, list[tuple[str, str, str | None]]()
        ends = tuple(close for syntax in self._syntaxes for close in syntax.closes)
        try:
            json_input.check_depth(body)
            while True:
                at = cast("re.Match[str]", _SEPARATED.match(body, at)).end()
                if at == len(body) or (ends and body.startswith(ends, at)):
                    break
                value, at = decoded(body, at)
                if (call := _call_of(value)) is None:
                    return []
                calls.append(call)
        except ValueError:
            return []
        deltas: list[CallDelta] = []
        for name, arguments, id_ in calls:
            deltas += [self.begin(name, id_), self.arguments(arguments)]
            if id_ is not None:
                self.written_ids[self._n_calls - 1] = id_
        return deltas

    def flush(self) -> list[str | CallDelta]:
        """What is clear only when the answer is complete."""
        found: list[str | CallDelta] = []
        if self._form == "harmony":
            return self.end_channel()
        if self._read is CallReader._find_head and self._n_in_list:
            rest = "".join(self._held).lstrip(SEPARATORS)
            self._leave(is_after=True)
            self._write(rest, found)
        elif self._read is CallReader._find_head:
            self._no_head("".join(self._held), found)
        elif self._read is CallReader._text:
            self._write(self._marks.take(), found)
        elif isinstance(self._value, _Elements) and (rest := self._value.flush()):
            found.append(self.arguments(rest))
        if (
            self._read in (CallReader._start, CallReader._text)
            and self._held
            and not self._is_after
        ):
            found.append("".join(self._held))
        return found


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
        self._syntax = syntax
        self._texts = texts
        self._open = syntax.argument.partition("$")[0]
        self._read: Callable[[_Elements, str, list[str]], str | None] = _Elements._between
        self._marks = HeldText([self._open, *syntax.closes])
        self._held = ""  # an element up to its value
        self._value: list[str] = []
        self._is_text = self._is_wrapped = False
        self._key = ""
        self._n = 0

    def feed(self, text: str) -> tuple[str, int]:
        """As `JsonText.feed`."""
        made: list[str] = []
        rest: str | None = text
        left = ""
        while rest is not None and not self.is_over:
            left = rest
            rest = self._read(self, rest, made)
            left = rest or ""
        return "".join(made), len(text) - len(left)

    def _between(self, text: str, made: list[str]) -> str | None:
        _, mark = self._marks.feed(text)
        if mark is None:
            return None
        if mark == self._open:
            self._read, self._held = _Elements._find_key, mark
        else:
            self.is_over = True
            made.append("}" if self._n else "{}")
        return self._marks.take()

    def _find_key(self, text: str, made: list[str]) -> str | None:
        whole = self._held + text
        self._held = whole[:HEAD_MAX]
        begun = self._syntax.begins_value.match(self._held)
        if begun is None:
            if len(self._held) < HEAD_MAX:
                return None
            self._read, self._marks = (
                _Elements._between,
                HeldText([self._open, *self._syntax.closes]),
            )
            return whole[len(self._open) :]
        said = begun.groupdict()
        self._key = said["key"].strip()
        kind = said.get("text") or said.get("type")
        self._is_text = self._key in self._texts if kind is None else kind in ("true", "string")
        quote = '"' if self._is_text else ""
        made.append(f"{', ' if self._n else '{'}{quoted(self._key)}: {quote}")
        self._n += 1
        self._read, self._value, self._held = _Elements._begin_value, [], ""
        return whole[begun.end() :]

    def _begin_value(self, text: str, _made: list[str]) -> str | None:
        """Pass what is before the value, and no part of it."""
        self._held += text
        begin, end = self._syntax.wrap
        first = "\n" if self._syntax.has_lines else begin
        if first.startswith(self._held) and self._held != first:
            return None
        self._is_wrapped = bool(begin) and self._held.startswith(begin)
        close = self._syntax.ends_value.replace("$key", self._key)
        close = end + close if self._is_wrapped else close
        self._marks = HeldText([close, "\n" + close] if self._syntax.has_lines else [close])
        self._read = _Elements._read_value
        held, self._held = self._held, ""
        return held.removeprefix(first)

    def _read_value(self, text: str, made: list[str]) -> str | None:
        before, mark = self._marks.feed(text)
        if self._is_text:
            made.append(quoted(before)[1:-1])
        else:
            self._value.append(before)
        if mark is None:
            return None
        if self._is_text:
            made.append('"')
        else:
            value = "".join(self._value)
            sign = self._syntax.nests
            is_nested = sign and f"{sign}<" in value
            made.append(_nested(value, sign) if is_nested else json_literal(value))
        rest = self._marks.take()
        self._read, self._marks = _Elements._between, HeldText([self._open, *self._syntax.closes])
        return rest

    def flush(self) -> str:
        """The rest of a text that was cut off."""
        rest = self._marks.take() if self._read is _Elements._read_value and self._is_text else ""
        return quoted(rest)[1:-1]


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
