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

from kqview.chat.json_text import JsonText
from kqview.chat.json_text import literal as json_literal
from kqview.chat.messages import parse_tool_calls
from kqview.chat.reasoning import CHANNEL, MESSAGE, THINK_TAGS, Marks
from kqview.types.json_schema import COMPACT, LINES, held

Tool = Mapping[str, Any]
Format = Literal[
    "hermes", "mistral", "mistral_named", "llama", "harmony", "xml", "deepseek", "deepseek_fenced"
]
Mark = Callable[[str], str]
"""Text of a mark in an answer -> how a grammar says it."""

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_MISTRAL: Final = "[TOOL_CALLS]"
_ARGS: Final = "[ARGS]"
_FUNCTION: Final = "<function="
_PARAMETER: Final = "<parameter="
# DeepSeek's marks, with its own vertical bars and spaces.
_CALLS_BEGIN: Final = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_CALLS_END: Final = "<\uff5ctool\u2581calls\u2581end\uff5c>"
_CALL_BEGIN: Final = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_CALL_END: Final = "<\uff5ctool\u2581call\u2581end\uff5c>"
_SEP: Final = "<\uff5ctool\u2581sep\uff5c>"
_PYTHON_TAG: Final = "<|python_tag|>"
_RESULTS: Final = ("tool", "function")
_CONSTRAIN: Final = "<|constrain|>"
_MOST_CALLS: Final = 32  # that a grammar allows in one answer


# What a template shows -> the format of its model; the first row that is shown as a whole.
_SHOWN: Final[Sequence[tuple[Sequence[str], Format]]] = (
    ((CHANNEL, MESSAGE), "harmony"),
    ((_MISTRAL, _ARGS), "mistral_named"),
    ((_MISTRAL,), "mistral"),
    ((_FUNCTION, _PARAMETER), "xml"),
    ((_CALL_BEGIN, "```json"), "deepseek_fenced"),
    ((_CALL_BEGIN,), "deepseek"),
    ((_OPEN,), "hermes"),
    ((_PYTHON_TAG,), "llama"),
    (('"parameters"', "ipython"), "llama"),
)


def format_of(template: str) -> Format:
    """The format of the model with this chat template; Hermes' if it shows none."""
    for marks, form in _SHOWN:
        if all(mark in template for mark in marks):
            return form
    return "hermes"


def is_harmony(template: str) -> bool:
    """Whether answers have the channels of Harmony."""
    return CHANNEL in template and MESSAGE in template


def knows_tools(template: str) -> bool:
    """Whether the template shows tools to the model."""
    return re.search(r"\btools\b", template) is not None


def tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, role: str = "system"
) -> list[dict[str, Any]]:
    """*messages* for a template that knows no tools: tools, calls and results are text.

    Calls are described in the form of Hermes, which `parse_tool_calls` reads.

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
        is_parallel: Whether there may be several calls.
        schema: JSON schema of an answer without calls, as text too; None if it has to be a call.
        reasoning: Whether it precedes the answer: "may", with its opening mark; "open", because the
            prompt ends with that mark.
        tag: The opening mark, one of `THINK_TAGS`.
    """

    calls: Sequence[Tool] = ()
    is_parallel: bool = True
    schema: Mapping[str, Any] | str | None = None
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
    if wanted.schema is not None:
        rules.append(f"answer: {_json(wanted.schema, COMPACT)}")
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


def said(control_tokens: Mapping[str, int], mark: str) -> str:
    """A mark as a grammar says it: control tokens by their id, because no text matches them."""
    id_ = control_tokens.get(mark)
    return literal(mark) if id_ is None else token(id_)


def _json(schema: Mapping[str, Any] | str, space: Mapping[str, Any] = LINES) -> str:
    """A value that *schema* describes. Models write arguments with white space or without."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return f"%json {held(text, space)}"


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
        # A function of which none are given has no parameters, as in OpenAI's API.
        given = function.get("parameters")
        schema = object_of({"properties": {}} if given is None else given)
        if form == "xml":
            rules.append(f"call_{i}: {_xml_call(i, function['name'], schema, mark, rules)}")
            continue
        rules.append(f"arguments_{i}: {_json({'type': 'object', **schema})}")
        rules.append(f"call_{i}: {_call(function['name'], f'arguments_{i}', form, mark)}")
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(wanted.calls))))
    most = _MOST_CALLS - 1
    if form == "mistral":
        more = f' (", " call){{0,{most}}}' if wanted.is_parallel else ""
        return f'{mark(_MISTRAL)} "[" call{more} "]"'
    if not wanted.is_parallel or form == "harmony":  # whose turn ends with a call
        is_framed = "deepseek" in form
        return f"{mark(_CALLS_BEGIN)} call {mark(_CALLS_END)}" if is_framed else "call"
    between = {"hermes": '"\\n"', "xml": '"\\n"', "llama": '"; "'}.get(form, "")
    calls = f"call ({between} call){{0,{most}}}"
    return f"{mark(_CALLS_BEGIN)} {calls} {mark(_CALLS_END)}" if "deepseek" in form else calls


def _call(name: str, arguments: str, form: Format, mark: Mark) -> str:
    if form == "harmony":
        json_mark = f"{mark(_CONSTRAIN)} {literal('json')}"
        to = literal(f"commentary to=functions.{name} ")
        return f"{mark(CHANNEL)} {to} {json_mark} {mark(MESSAGE)} {arguments}"
    if form == "mistral_named":
        return f"{mark(_MISTRAL)} {literal(name)} {mark(_ARGS)} {arguments}"
    if form == "deepseek":
        return f"{mark(_CALL_BEGIN)} {literal(name)} {mark(_SEP)} {arguments} {mark(_CALL_END)}"
    if form == "deepseek_fenced":
        head = literal(f"{name}\n```json\n")
        end = literal("\n```")
        return (
            f'{mark(_CALL_BEGIN)} "function" {mark(_SEP)} {head} {arguments} {end} '
            f"{mark(_CALL_END)}"
        )
    key = "parameters" if form == "llama" else "arguments"
    head = literal(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')
    if form == "hermes":
        line = literal("\n")
        head = literal(f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')
        return f'{mark(_OPEN)} {head} {arguments} "}}" {line} {mark(_CLOSE)}'
    return f'{head} {arguments} "}}"'


def _xml_call(i: int, name: str, schema: Mapping[str, Any], mark: Mark, rules: list[str]) -> str:
    """A call whose arguments are elements, in the order of the schema."""
    required = schema.get("required")
    needed = cast("list[object]", required) if isinstance(required, list) else []
    head = literal(f"\n{_FUNCTION}{name}>\n")
    parts = [f"{mark(_OPEN)} {head}"]
    for j, (key, given) in enumerate(object_of(schema.get("properties")).items()):
        kind, rule = object_of(given), f"value_{i}_{j}"
        end = literal("\n</parameter>\n")
        if not _is_text(kind):
            rules.append(f"{rule}: {_json(kind)} {end}")
        elif isinstance(kind.get("enum"), list):
            choices = " | ".join(literal(str(one)) for one in kind["enum"])
            rules.append(f"{rule}: ({choices}) {end}")
        else:
            rules.append(f"{rule}[suffix={end}]: /(?s:.*)/")
        begun = literal(f"{_PARAMETER}{key}>\n")
        element = f"{begun} {rule}"
        parts.append(element if key in needed else f"({element})?")
    return " ".join([*parts, literal("</function>\n"), mark(_CLOSE)])


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


@dataclass(frozen=True, slots=True)
class _Syntax:
    """How a call is written whose name precedes its arguments.

    Attributes:
        marks: Each begins a call.
        head: What is between mark and arguments; its groups are names of the function.
        close: What ends the call; "" if its arguments do.
        silent: Marks around all calls, which are no text.
        family: As `parse_tool_calls` takes it, for calls that are not written as usual; None if it
            knows none.
    """

    marks: Sequence[str]
    head: re.Pattern[str]
    close: str = ""
    silent: Sequence[str] = ()
    family: Literal["hermes", "mistral"] | None = None


# The value of a call's arguments follows. A name with escapes is read with the whole call.
_HERMES: Final = _Syntax(
    (_OPEN,),
    re.compile(
        r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,'
        r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
    ),
    _CLOSE,
    family="hermes",
)
_DEEPSEEK: Final = _Syntax(
    (_CALL_BEGIN,),
    re.compile(rf"\s*(?:function{_SEP}([^\s<`]+)\s*```json\s*|([^\s<]+){_SEP}\s*)(?=\{{)"),
    _CALL_END,
    silent=(_CALLS_BEGIN, _CALLS_END),
)
_NAMED: Final = _Syntax(
    (_MISTRAL,),
    re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]\s*(?=\{)"),
    family="mistral",
)
# An answer's calls are known by their marks, so a reader may look for those of several syntaxes: a
# model whose template has no place for tools was told of Hermes' form.
_SYNTAXES: Final[Mapping[Format, Sequence[_Syntax]]] = {
    "hermes": (_HERMES,),
    "mistral": (_NAMED,),
    "mistral_named": (_NAMED,),
    "deepseek": (_DEEPSEEK, _HERMES),
    "deepseek_fenced": (_DEEPSEEK, _HERMES),
}


class CallReader:
    """Takes calls out of an answer's content while it comes; what is no call stays text."""

    def __init__(self, form: Format, texts: Mapping[str, frozenset[str]] | None = None) -> None:
        """Read calls of this format; *texts* as from `text_parameters`."""
        self._form = form
        self._n_calls = 0
        self._state: Literal["text", "head", "value", "tail", "held"] = "text"
        self._syntaxes = {
            mark: syntax for syntax in _SYNTAXES.get(form, ()) for mark in syntax.marks
        }
        self._silent = {mark for syntax in self._syntaxes.values() for mark in syntax.silent}
        self._marks = Marks([*self._syntaxes, *self._silent])
        self._mark = ""  # of the call that is read
        self._buffer = ""
        self._value = JsonText()
        self._has_begun = False  # whether a word of the answer came, for Llama's
        self._elements = _XmlCalls(self, texts or {}) if form == "xml" else None

    def begin(self, name: str) -> CallDelta:
        """A call whose function is known; `arguments` follow."""
        self._n_calls += 1
        # Mistral's templates take ids of nine letters and digits only.
        id_ = uuid.uuid4().hex[:9] if "mistral" in self._form else f"call_{uuid.uuid4().hex[:24]}"
        return CallDelta(self._n_calls - 1, "", id_, name)

    def arguments(self, text: str) -> CallDelta:
        """Further arguments of the call that began last."""
        return CallDelta(self._n_calls - 1, text)

    def channel(self, text: str, name: str) -> list[str | CallDelta]:
        """Add text of a call in a channel of its own; the first one of each call is empty."""
        if not text:
            found = [*self.end_channel(), self.begin(name)]
            self._state, self._value = "value", JsonText()
            return found
        valid, _ = self._value.feed(text)
        return [self.arguments(valid)] if valid else []

    def end_channel(self) -> list[str | CallDelta]:
        """End a call in a channel, if there is one."""
        if self._form != "harmony" or self._state != "value":
            return []
        self._state = "text"
        rest = self._value.end()
        return [self.arguments(rest)] if rest else []

    def feed(self, text: str) -> list[str | CallDelta]:
        """Add content; returns text and calls in their order."""
        if self._elements is not None:
            return self._elements.feed(text)
        if self._form == "llama":
            return self._llama(text)
        if self._form == "harmony":  # calls have channels of their own
            return [text] if text else []
        return self._marked(text)

    def _llama(self, text: str) -> list[str | CallDelta]:
        """Calls without marks around them are read when the answer is complete."""
        self._buffer += text
        if self._state == "held":
            return []
        begun = self._buffer.lstrip()
        if not self._has_begun and (
            begun.startswith(("{", _PYTHON_TAG)) or _PYTHON_TAG.startswith(begun)
        ):
            return []
        self._has_begun = True
        text, self._buffer = self._buffer, ""
        return [text] if text else []

    def _marked(self, text: str) -> list[str | CallDelta]:
        found: list[str | CallDelta] = []
        while True:
            if self._state == "held":  # until the answer is complete
                self._buffer += text
                return found
            if self._state == "text":
                before, mark = self._marks.feed(text)
                found += [before] if before else []
                if mark is None:
                    return found
                text = self._marks.take()
                if mark not in self._silent:
                    self._state, self._buffer, self._mark = "head", "", mark
                continue
            syntax = self._syntaxes[self._mark]
            if self._state == "head":
                self._buffer += text
                head = syntax.head.match(self._buffer)
                if head is not None:
                    found.append(self.begin(head[head.lastindex or 1]))
                    self._state, self._value = "value", JsonText()
                    text = self._buffer[head.end() :]
                elif self._mark == _MISTRAL and self._buffer.lstrip().startswith(("[", "{")):
                    self._state, self._buffer, text = "held", self._mark + self._buffer, ""
                elif syntax.close and (at := self._buffer.find(syntax.close)) >= 0:
                    end = at + len(syntax.close)  # not written as usual
                    found += self._parsed(self._mark + self._buffer[:end], syntax)
                    text = self._leave(self._buffer[end:])
                else:
                    return found
            elif self._state == "value":
                valid, n = self._value.feed(text)
                if valid:
                    found.append(self.arguments(valid))
                if not self._value.is_over:
                    return found
                text, self._state, self._buffer = text[n:], "tail", ""
            else:  # the brace of the call, and its closing mark
                self._buffer += text
                at = self._buffer.find(syntax.close)
                if at < 0:
                    return found
                text = self._leave(self._buffer[at + len(syntax.close) :])

    def _leave(self, rest: str) -> str:
        self._state, self._buffer = "text", ""
        return rest

    def _parsed(self, text: str, syntax: _Syntax | None) -> list[str | CallDelta]:
        family = "llama" if syntax is None else syntax.family
        if family is None:
            return [text]
        reply = parse_tool_calls(text, family)
        # A lone surrogate in a name has no UTF-8.
        if not reply.tool_calls or not all(_is_utf8(call.name) for call in reply.tool_calls):
            return [text]
        found: list[str | CallDelta] = [reply.content] if reply.content.strip() else []
        for call in reply.tool_calls:
            begun = self.begin(call.name)
            id_ = call.id if call.id and _is_utf8(call.id) else begun.id
            found.append(CallDelta(begun.index, "", id_, call.name))
            written = json.dumps(dict(call.arguments), ensure_ascii=False)
            found.append(self.arguments(JsonText().feed(written)[0]))
        return found

    def flush(self) -> list[str | CallDelta]:
        """What is clear only when the answer is complete."""
        if self._elements is not None:
            return self._elements.flush()
        if self._form == "harmony":
            return self.end_channel()
        text = self._marks.take()
        buffer, self._buffer = self._buffer, ""
        if self._form == "llama":
            return self._parsed(buffer, None) if buffer else []
        if self._state == "held":
            return self._parsed(buffer, self._syntaxes[self._mark])
        if self._state == "head":  # the answer ended before the closing mark
            return self._parsed(self._mark + buffer, self._syntaxes[self._mark])
        return [text] if text else []


_XML_NAME: Final = re.compile(r"([^<>\n]+)>\n?")


class _XmlCalls:
    """Reads calls written as ``<function=NAME><parameter=KEY>VALUE</parameter></function>``.

    The arguments become JSON while they come. What is text by the function's schema stays so; other
    values are JSON if they can be read as such.
    """

    # What may come next in each state.
    _AHEAD: Final[Mapping[str, Sequence[str]]] = {
        "text": (_OPEN, "<seed:tool_call>", _FUNCTION),
        "opened": (_FUNCTION, _CLOSE, "</seed:tool_call>"),
        "call": (_PARAMETER, "</function>", _CLOSE, "</seed:tool_call>"),
        "value": ("\n</parameter>", "</parameter>"),
        "closing": (_CLOSE, "</seed:tool_call>", _OPEN, "<seed:tool_call>", _FUNCTION),
    }

    def __init__(self, calls: CallReader, texts: Mapping[str, frozenset[str]]) -> None:
        self._calls = calls
        self._texts = texts
        self._state: Literal["text", "opened", "call", "value", "closing"] = "text"
        self._marks = Marks(self._AHEAD["text"])
        self._named = ""  # the mark before a name that is being read
        self._name = ""
        self._buffer = ""
        self._function = ""
        self._is_text = False
        self._n_arguments = 0

    def feed(self, text: str) -> list[str | CallDelta]:
        """As `CallReader.feed`."""
        found: list[str | CallDelta] = []
        while True:
            if self._named:
                self._buffer += text
                name = _XML_NAME.match(self._buffer)
                # A line end behind the name belongs to the mark.
                if name is None or (name.end() == len(self._buffer) and name[0][-1] == ">"):
                    return found
                text, named = self._buffer[name.end() :], self._named
                self._buffer = self._named = ""
                found += self._begin(named, name[1])
                continue
            state = self._state
            before, mark = self._marks.feed(text)
            text = self._marks.take()
            found += self._between(before)
            if self._state != state:  # which looks for other marks
                text = (mark or "") + text
                continue
            if mark is None:
                self._marks.feed(text)  # it is still held back
                return found
            if mark in (_FUNCTION, _PARAMETER):
                self._named, self._buffer = mark, ""
            else:
                found += self._pass(mark)

    def _go(self, state: Literal["text", "opened", "call", "value", "closing"]) -> None:
        self._state, self._marks = state, Marks(self._AHEAD[state])

    def _between(self, text: str) -> list[str | CallDelta]:
        """Text before the next mark."""
        if not text:
            return []
        if self._state == "value":
            if not self._is_text:
                self._buffer += text
                return []
            return [self._calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1])]
        if self._state in ("opened", "closing"):
            self._buffer += text
            if self._state == "opened" or self._buffer.isspace():
                return []
            text, self._buffer = self._buffer, ""
            self._go("text")
        return [text] if self._state == "text" else []

    def _begin(self, mark: str, name: str) -> list[str | CallDelta]:
        if mark == _FUNCTION:
            self._function, self._n_arguments = name.strip(), 0
            self._go("call")
            return [self._calls.begin(self._function)]
        key = name.strip()
        self._is_text = key in self._texts.get(self._function, ())
        between = ", " if self._n_arguments else "{"
        self._n_arguments += 1
        self._buffer = ""
        self._go("value")
        shown = json.dumps(key, ensure_ascii=False)
        quote = '"' if self._is_text else ""
        return [self._calls.arguments(f"{between}{shown}: {quote}")]

    def _pass(self, mark: str) -> list[str | CallDelta]:
        """A mark without a name."""
        if self._state == "value":
            self._go("call")
            value, self._buffer = self._buffer, ""
            return [
                self._calls.arguments(
                    '"' if self._is_text else json_literal(value.removesuffix("\n"))
                )
            ]
        if self._state == "call":
            self._go("closing" if mark == "</function>" else "text")
            return [self._calls.arguments("}" if self._n_arguments else "{}")]
        if mark in (_OPEN, "<seed:tool_call>"):
            self._go("opened")
            self._buffer = mark
            return []
        # Nothing was called between the marks.
        kept: list[str | CallDelta] = [self._buffer + mark] if self._state == "opened" else []
        self._go("text")
        self._buffer = ""
        return kept

    def flush(self) -> list[str | CallDelta]:
        """As `CallReader.flush`; a call that is not complete stays so."""
        rest = self._marks.take()
        if self._named:
            return [self._named + self._buffer] if self._named == _FUNCTION else []
        if self._state in ("opened", "closing"):
            return [self._buffer + rest] if self._buffer + rest else []
        return self._between(rest)


def _is_utf8(text: str) -> bool:
    """Whether *text* has UTF-8, which JSON's escapes of lone surrogates do not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
