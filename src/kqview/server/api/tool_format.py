"""How models write tool calls: tools in a prompt, the grammar of calls, and reading them. Pure.

The format follows from the model's chat template. A template that knows no tools gets them as a
system message in the format of Hermes, and earlier calls and results as text.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from kqview.chat import parse_tool_calls
from kqview.server.api.reasoning import CHANNEL, MESSAGE, THINK_TAGS, Marks

Tool = Mapping[str, Any]
Format = Literal["hermes", "mistral", "mistral_named", "llama", "harmony"]
Mark = Callable[[str], str]
"""Text of a mark in an answer -> how a grammar says it."""

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_MISTRAL: Final = "[TOOL_CALLS]"
_PYTHON_TAG: Final = "<|python_tag|>"
_RESULTS: Final = ("tool", "function")
_CONSTRAIN: Final = "<|constrain|>"
# The value of a call's arguments follows. A name with escapes is read with the whole call.
_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_SPACE: Final = {"whitespace_pattern": r" |\n[ \t]{0,20}"}  # as json_schema of `Sampling`
_MOST_CALLS: Final = 32  # that a grammar allows in one answer


def format_of(template: str) -> Format:
    """The format of the model with this chat template; Hermes' if it shows none."""
    if is_harmony(template):
        return "harmony"
    if _MISTRAL in template:
        return "mistral_named" if "[ARGS]" in template else "mistral"
    if _OPEN in template:
        return "hermes"
    if _PYTHON_TAG in template or ('"parameters"' in template and "ipython" in template):
        return "llama"
    return "hermes"


def is_harmony(template: str) -> bool:
    """Whether answers have the channels of Harmony."""
    return CHANNEL in template and MESSAGE in template


def knows_tools(template: str) -> bool:
    """Whether the template shows tools to the model."""
    return re.search(r"\btools\b", template) is not None


def with_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, role: str = "system"
) -> list[dict[str, Any]]:
    """*messages* for a template that knows no tools: tools, calls and results are text.

    Args:
        messages: Of the chat.
        tools: To describe in a message of *role*: the first one, if it has that role.
        role: "system", or "user" for a template without system messages.
    """
    shown: list[dict[str, Any]] = []
    for message in messages:
        made = _as_text(message)
        is_result = message.get("role") in _RESULTS
        if is_result and shown and shown[-1].get("role") == made["role"]:
            # Some templates want the roles to take turns.
            shown[-1] = {**shown[-1], "content": f"{shown[-1]['content']}\n{made['content']}"}
        else:
            shown.append(made)
    if not tools:
        return shown
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        "You may call these functions to answer. Each line describes one as JSON:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, write its name and arguments as JSON, like this:\n"
        f'{_OPEN}\n{{"name": "NAME", "arguments": {{...}}}}\n{_CLOSE}'
    )
    first = shown[0] if shown else {}
    if first.get("role") != role:
        return [{"role": role, "content": text}, *shown]
    content = text_of(first.get("content"))
    joined = f"{content}\n\n{text}" if role == "system" else f"{text}\n\n{content}"
    return [{**first, "content": joined}, *shown[1:]]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role in _RESULTS:
        content = f"<tool_response>\n{text_of(message.get('content'))}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = objects_of(message.get("tool_calls"))
    if role != "assistant" or not calls:
        return dict(message)
    texts = [text_of(message.get("content"))]
    for call in calls:
        function = object_of(call.get("function", call))
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function.get("name"), ensure_ascii=False)
        texts.append(f'{_OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{_CLOSE}')
    return {"role": "assistant", "content": "\n".join(text for text in texts if text)}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What an answer has to be.

    Attributes:
        calls: Functions that may be called.
        needs_call: Whether one has to be.
        is_parallel: Whether there may be several calls.
        schema: JSON schema of an answer without calls; None for any text.
        reasoning: Whether it precedes the answer: "may", with its opening mark; "open", because the
            prompt ends with that mark.
        tag: The opening mark, one of `THINK_TAGS`.
    """

    calls: Sequence[Tool] = ()
    needs_call: bool = False
    is_parallel: bool = True
    schema: Mapping[str, Any] | None = None
    reasoning: Literal["no", "may", "open"] = "no"
    tag: str = "<think>"


def grammar(wanted: Wanted, form: Format, mark: Mark) -> str:
    """A grammar for `Sampling.grammar`, in llguidance's language.

    Args:
        wanted: What the answer has to be; a call or a schema.
        form: How calls are written.
        mark: How a grammar says the text of a mark, see `literal`.
    """
    rules: list[str] = []
    choices: list[str] = []
    if wanted.calls:
        choices.append(_calls(wanted, form, mark, rules))
    if wanted.schema is not None and not wanted.needs_call:
        rules.append(f"answer: {_json(wanted.schema)}")
        final = f'{mark(CHANNEL)} "final" {mark(MESSAGE)} ' if form == "harmony" else ""
        choices.append(f"{final}answer")
    body = " | ".join(choices)
    start = f"{_reasoning(wanted, form, mark, rules)}({body})"
    return "\n".join(["%llguidance {}", f"start: {start}", *rules]) + "\n"


def literal(text: str) -> str:
    """*text* as a grammar says it."""
    return json.dumps(text, ensure_ascii=False)


def token(id: int) -> str:
    """A token as a grammar says it."""
    return f"<[{id}]>"


def _json(schema: Mapping[str, Any]) -> str:
    text = json.dumps({"x-guidance": _SPACE, **schema}, ensure_ascii=False)
    return f"%json {text}"


def _until(name: str, end: str, mark: Mark, rules: list[str]) -> str:
    """Any text up to a mark."""
    said = mark(end)
    if said != literal(end):
        rules.append(f"{name}: /(?s:.*)/ {said}")
    else:
        rules.append(f"{name}[suffix={said}]: /(?s:.*)/")
    return name


def _reasoning(wanted: Wanted, form: Format, mark: Mark, rules: list[str]) -> str:
    if form == "harmony":
        rest = _until("reasoning", "<|end|>", mark, rules)
        opened = f'{mark(CHANNEL)} "analysis" {mark(MESSAGE)}'
        return f'({opened} {rest} {mark("<|start|>")} "assistant")? '
    if wanted.reasoning == "no":
        return ""
    rest = _until("reasoning", THINK_TAGS[wanted.tag], mark, rules)
    rules.append(r"SPACE: /[ \n]{1,4}/")
    if wanted.reasoning == "open":
        return f"{rest} SPACE? "
    return f"({mark(wanted.tag)} {rest} SPACE?)? "


def _calls(wanted: Wanted, form: Format, mark: Mark, rules: list[str]) -> str:
    for i, tool in enumerate(wanted.calls):
        function = object_of(tool["function"])
        schema = object_of(function.get("parameters"))
        rules.append(f"arguments_{i}: {_json({'type': 'object', **schema})}")
        rules.append(f"call_{i}: {_call(function['name'], f'arguments_{i}', form, mark)}")
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(wanted.calls))))
    most = _MOST_CALLS - 1
    if form == "mistral":
        more = f' (", " call){{0,{most}}}' if wanted.is_parallel else ""
        return f'{mark(_MISTRAL)} "[" call{more} "]"'
    if not wanted.is_parallel or form == "harmony":  # whose turn ends with a call
        return "call"
    between = {"hermes": '"\\n"', "llama": '"; "', "mistral_named": ""}[form]
    return f"call ({between} call){{0,{most}}}"


def _call(name: str, arguments: str, form: Format, mark: Mark) -> str:
    if form == "harmony":
        json_mark = f"{mark(_CONSTRAIN)} {literal('json')}"
        to = literal(f"commentary to=functions.{name} ")
        return f"{mark(CHANNEL)} {to} {json_mark} {mark(MESSAGE)} {arguments}"
    if form == "mistral_named":
        return f"{mark(_MISTRAL)} {literal(name)} {mark('[ARGS]')} {arguments}"
    key = "parameters" if form == "llama" else "arguments"
    head = literal(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')
    if form == "hermes":
        line = literal("\n")
        head = literal(f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')
        return f'{mark(_OPEN)} {head} {arguments} "}}" {line} {mark(_CLOSE)}'
    return f'{head} {arguments} "}}"'


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
    """Takes calls out of an answer's content while it comes; what is no call stays text."""

    def __init__(self, form: Format) -> None:
        """Read calls of this format."""
        self._form = form
        self._n_calls = 0
        self._state: Literal["text", "head", "value", "tail", "held"] = "text"
        self._marks = Marks([_OPEN] if form == "hermes" else [_MISTRAL])
        self._buffer = ""
        self._value = _JsonEnd()
        self._has_begun = False  # whether a word of the answer came, for Llama's

    def begin(self, name: str) -> CallDelta:
        """A call whose function is known; `arguments` follow."""
        self._n_calls += 1
        # Mistral's templates take ids of nine letters and digits only.
        id_ = uuid.uuid4().hex[:9] if "mistral" in self._form else f"call_{uuid.uuid4().hex[:24]}"
        return CallDelta(self._n_calls - 1, "", id_, name)

    def arguments(self, text: str) -> CallDelta:
        """Further arguments of the call that began last."""
        return CallDelta(self._n_calls - 1, text)

    def feed(self, text: str) -> list[str | CallDelta]:
        """Add content; returns text and calls in their order."""
        if self._form == "hermes":
            return self._hermes(text)
        if self._form == "harmony":  # calls have channels of their own
            return [text] if text else []
        return self._whole(text)

    def _whole(self, text: str) -> list[str | CallDelta]:
        """Calls that are read when the answer is complete."""
        if self._state == "held":
            self._buffer += text
            return []
        if self._form == "llama":
            self._buffer += text
            begun = self._buffer.lstrip()
            if not self._has_begun and (
                begun.startswith(("{", _PYTHON_TAG)) or _PYTHON_TAG.startswith(begun)
            ):
                return []
            self._has_begun = True
            text, self._buffer = self._buffer, ""
            return [text] if text else []
        before, mark = self._marks.feed(text)
        if mark is not None:
            self._state = "held"
            self._buffer = mark + self._marks.take()
        return [before] if before else []

    def _hermes(self, text: str) -> list[str | CallDelta]:
        found: list[str | CallDelta] = []
        while True:
            if self._state == "text":
                before, mark = self._marks.feed(text)
                found += [before] if before else []
                if mark is None:
                    return found
                self._state, self._buffer = "head", ""
                text = self._marks.take()
            elif self._state == "head":
                self._buffer += text
                head = _HEAD.match(self._buffer)
                if head is not None:
                    found.append(self.begin(head[1]))
                    self._state, self._value = "value", _JsonEnd()
                    text = self._buffer[head.end() :]
                elif (at := self._buffer.find(_CLOSE)) >= 0:  # not written as usual
                    found += self._parsed(f"{_OPEN}{self._buffer[:at]}{_CLOSE}", "hermes")
                    text = self._leave(self._buffer[at + len(_CLOSE) :])
                else:
                    return found
            elif self._state == "value":
                n = self._value.feed(text)
                if text[:n]:
                    found.append(self.arguments(text[:n]))
                if not self._value.is_over:
                    return found
                text, self._state, self._buffer = text[n:], "tail", ""
            else:  # the brace of the call, and its closing mark
                self._buffer += text
                at = self._buffer.find(_CLOSE)
                if at < 0:
                    return found
                text = self._leave(self._buffer[at + len(_CLOSE) :])

    def _leave(self, rest: str) -> str:
        self._state, self._buffer = "text", ""
        return rest

    def _parsed(self, text: str, family: Any) -> list[str | CallDelta]:
        reply = parse_tool_calls(text, family)
        # A lone surrogate in a name has no UTF-8.
        if not reply.tool_calls or not all(_is_utf8(call.name) for call in reply.tool_calls):
            return [text]
        found: list[str | CallDelta] = [reply.content] if reply.content.strip() else []
        for call in reply.tool_calls:
            begun = self.begin(call.name)
            id_ = call.id if call.id and _is_utf8(call.id) else begun.id
            found.append(CallDelta(begun.index, "", id_, call.name))
            arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
            if not _is_utf8(arguments):  # then as escapes
                arguments = json.dumps(dict(call.arguments))
            found.append(self.arguments(arguments))
        return found

    def flush(self) -> list[str | CallDelta]:
        """What is clear only when the answer is complete."""
        text = self._marks.take()
        buffer, self._buffer = self._buffer, ""
        if self._form == "hermes":
            if self._state == "head":  # the answer ended before the closing mark
                return self._parsed(_OPEN + buffer, "hermes")
            return [text] if text else []
        if buffer:
            return self._parsed(buffer, "llama" if self._form == "llama" else "mistral")
        return [text] if text else []


def _is_utf8(text: str) -> bool:
    """Whether *text* has UTF-8, which JSON's escapes of lone surrogates do not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _JsonEnd:
    """Finds the end of an object or list in JSON that comes in pieces."""

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int:
        """How many characters of *text* belong to the value."""
        for i, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_over = True
                    return i + 1
        return len(text)
