"""A model's chat template: jinja2 in a sandbox, with special tokens that contents cannot forge.

The contents that a template is filled with cannot make special tokens. In the parsed template, the
text of each special token is replaced by an unguessable placeholder (private-use characters with
128 random bits). After rendering, placeholders are special tokens and everything else is ordinary
text. Contents pass through untouched, so a template may cut, trim, compare and search them; a
damaged placeholder is read as text, never as a token. A template that assembles a token from pieces
while it runs is detected by a second run, see `ChatTemplate.render`.

A template is a program. jinja2's sandbox keeps it from Python's objects, but nothing in Python can
interrupt one long comparison in C, so `kqview.chat.rendering` runs this file in processes with
limits, as a program of `kqview.confined`. In process it serves templates that the operator chose.

Two alternatives were rejected. Marks around contents break templates that test the start or end of
a content. A str subclass that remembers its origin loses it in jinja2's filters, and then fails
open.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import takewhile
from typing import Any, Final, NamedTuple, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.optimizer import optimize
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kqview import json_input
from kqview.chat.parts import ROLES, PromptPart, between, text_of, text_of_parts
from kqview.errors import OutOfMemory, RequestError, UnsupportedModel

SOURCE_MAX: Final = 1 << 20
"""Maximum number of characters of a template."""
LENGTH_MAX: Final = 16 << 20
"""Maximum number of characters that a template may produce."""

_N_KEPT: Final = 16  # compiled templates
_N_SHOWN: Final = 1000  # characters of what a template says of itself
_NONCE_PLANE: Final = 0x100000  # the two planes of private use beyond the first
_INDEX_PLANE: Final = 0xF0000
# Names of special tokens in GGUF that differ from those of transformers.
_VARIABLES: Final = {"padding": "pad", "unknown": "unk"}


class ChatTemplate:
    """A compiled template; safe to use from any thread.

    Args:
        source: Text of the template, in the dialect of transformers.
        special_tokens: Texts of ``bos``, ``eos`` and others, which templates use as variables.
        control_texts: Texts of all control tokens, which contents must not produce.

    Raises:
        UnsupportedModel: The template does not parse, or is too long.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        control_texts: Iterable[str],
    ) -> None:
        self._marks = _Marks(control_texts)
        self._variables = {
            f"{_VARIABLES.get(name, name)}_token": self._marks.mark(text)
            for name, text in special_tokens.items()
        }
        if len(source) > SOURCE_MAX:
            raise UnsupportedModel(
                f"the chat template has {len(source)} characters, the limit is {SOURCE_MAX}; "
                "pass another as chat_template"
            )
        self._has_lists = ".append(" in source
        environment = _environment(has_lists=self._has_lists)
        try:
            tree = cast("nodes.Template", optimize(environment.parse(source), environment))
            for node in tree.find_all((nodes.TemplateData, nodes.Const)):
                if isinstance(node, nodes.TemplateData):
                    node.data = self._marks.mark(node.data)
                else:
                    node.value = _with_texts(node.value, self._marks.mark, self._marks.mark)
            code = environment.compile(tree)
        except (RecursionError, MemoryError):  # the latter also from Python's own parser
            raise UnsupportedModel(
                "the chat template is nested too deeply or too large; pass another as chat_template"
            ) from None
        except (TemplateError, SyntaxError, ValueError) as error:
            raise UnsupportedModel(
                f"the chat template does not parse: {error}; pass another as chat_template"
            ) from error
        self._template = jinja2.Template.from_code(
            environment, code, environment.make_globals(_GLOBALS)
        )
        self._knows_developer = "developer" in source
        self._calls_it_thinking = ".thinking" in source and "reasoning_content" not in source
        self._has_blocks_of_thinking = "['thinking']" in source
        self._embeds_results = "['tool_responses']" in source and "tool_call_id" not in source
        # Apertus deliberates only if it is asked to.
        self._thinks = "<|inner_prefix|>" not in source
        self._takes_text = self._takes_parts = self._takes_system = True
        takes_text = self._shows({"role": "user", "content": _PROBE})
        self._takes_parts = self._shows({"role": "user", "content": _PROBE_PARTS})
        self._takes_text = takes_text
        messages = {"role": "system", "content": _PROBE}, {"role": "user", "content": "."}
        can_show = takes_text or self._takes_parts
        self._takes_system = self._shows(*messages) or not can_show

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
        shows_tools_for: str | None = None,
    ) -> list[PromptPart]:
        """Render the chat as pieces whose joined texts are what the model reads.

        A template may assemble a special token from pieces, as in ``'<|' + role + '|>'``. If the
        ordinary text contains the text of one, the template runs again on contents in which the
        first and last characters of such tokens are replaced: tokens that still appear are its own.

        Messages are fitted to what the template supports:

        - A list of text parts is joined with newlines for a template that does not support parts;
          text becomes a part for a template that supports only parts.
        - Arguments of tool calls are objects, or JSON text for a template that fails on objects.
        - A message with tool calls has content, "" if it came without.
        - A system message that the template refuses or leaves out begins the user's next one.
        - The developer is the system for a template that does not know the role.
        - ``reasoning_content`` is also ``thinking`` for a template that knows it by that name only.
          It is a part of the content for a template that has parts for it.
        - Results of tools go into the message with the calls for a template that has them there.

        Raises:
            RequestError: The template rejects the messages or fails on them, or renders the same
                without *tools* although it is to show them for the model *shows_tools_for*.
        """
        chat = _Chat(messages, tools, add_generation_prompt, options or {})
        parts = self._parts(chat)
        if shows_tools_for is not None and tools:
            try:
                bare = self._parts(chat._replace(tools=None))
            except RequestError:  # it insists on tools
                return parts
            if text_of_parts(bare) == text_of_parts(parts):
                raise RequestError(
                    f"the chat template of {shows_tools_for} ignores tools, so the model would not "
                    "know them; pass a chat_template that shows them, or put them into the "
                    "messages with kqview.chat.tools_as_text",
                    parameter="tools",
                )
        return parts

    def ends(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        text: str,
        ends_of_turn: Sequence[str],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Index in *text* at which each message ends, ascending.

        The first k messages rendered alone are usually the beginning of the whole: that is where
        the k-th ends. Some templates write a message differently if it is the last one (Qwen3 keeps
        its reasoning), or not at all (Gemma writes a system message into the next one). There,
        another content shows where the next message's content begins; the message before it ends
        after the last end of a turn up to there.

        Args:
            messages: Of the chat.
            text: The whole chat, as `render` makes it with these arguments.
            ends_of_turn: Texts of the special tokens that end a message.
            tools: As in `render`.
            options: As in `render`.
        """

        def rendered(messages: Sequence[Mapping[str, Any]], *, is_open: bool) -> str | None:
            try:
                return text_of_parts(self._parts(_Chat(messages, tools, is_open, options or {})))
            except RequestError:  # many templates insist on certain roles
                return None

        ends: list[int] = []
        for n in range(1, len(messages) + 1):
            begun = ends[-1] if ends else 0
            part = rendered(messages[:n], is_open=False)
            if part is not None and len(part) >= begun and text.startswith(part):
                ends.append(len(part))
            elif n == len(messages):
                ends.append(len(text))
            else:
                changed = [*messages[:n], {**messages[n], "content": _OTHER}, *messages[n + 1 :]]
                other = rendered(changed, is_open=True)
                ends.append(begun if other is None else _end_of(text, other, begun, ends_of_turn))
        return ends

    def headers(self, *, ends_of_turn: Sequence[str]) -> dict[str, list[PromptPart]]:
        """What precedes the content in a message of each role, without white space around it.

        Roles that the template refuses, or writes nothing before, are left out.
        """
        headers: dict[str, list[PromptPart]] = {}
        for role, chat in _PROBES.items():
            # A template may want the user's words after the system's.
            for messages in (chat, [*chat, _USER]):
                try:
                    parts = self.render(messages, add_generation_prompt=False)
                except RequestError:
                    continue
                text = text_of_parts(parts)
                ends = self.ends(messages, text=text, ends_of_turn=ends_of_turn)
                n = len(chat) - 1
                start = ends[n - 1] if n else 0
                stop = text.find(_SAID, start)
                if stop >= 0 and (header := between(parts, start, stop)):
                    headers[role] = header
                    break
        return headers

    def _parts(self, chat: "_Chat") -> list[PromptPart]:
        text, wanted = self._tried(chat)
        parts = self._marks.split(text)
        if not (names := self._marks.found_in(parts)):
            return parts
        disguise = _Disguise(names, text)
        try:
            hidden = self._render(
                wanted._replace(
                    messages=[disguise.message(message) for message in wanted.messages],
                    tools=disguise.of(wanted.tools),
                    options=disguise.of(wanted.options),
                )
            )
        except RequestError:
            return parts  # no token can be attributed to the template
        named = self._marks.split(hidden)
        lifted = disguise.lift(named)
        if text_of_parts(lifted) == text_of_parts(parts):
            return lifted
        if self._marks.found_in(named):
            raise RequestError(
                "the chat template assembles special tokens from pieces, so the messages must not "
                f"contain the characters {disguise.signs}; remove them"
            )
        return parts

    def _render(self, chat: "_Chat") -> str:
        variables = {
            **_defaults(chat.options, chat.tools or ()),
            "enable_thinking": self._thinks,
            **self._variables,
            **chat.options,
            "messages": chat.messages,
            "tools": chat.tools,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        if self._has_lists:
            variables = _given(variables)
        try:
            text = self._template.render(variables)
        except MemoryError as error:
            raise OutOfMemory("the chat template takes too much memory") from error
        except _Refusal as error:
            raise RequestError(f"the chat template rejects these messages: {error}") from error
        except Exception as error:  # a template is a program: it can fail in any way
            raise RequestError(
                f"the chat template fails on these messages with {type(error).__name__}: "
                f"{str(error)[:_N_SHOWN]}; change them or pass another chat_template"
            ) from error
        if len(text) > LENGTH_MAX:
            raise RequestError(
                f"the chat template makes {len(text)} characters, the limit is {LENGTH_MAX}; "
                "pass another chat_template or shorter messages"
            )
        return text

    def _tried(self, chat: "_Chat") -> tuple[str, "_Chat"]:
        """The text, and the form of *chat* of which the template makes it without failing."""
        first: RequestError | None = None
        fitted, tools = self._fitted(chat.messages), chat.tools
        has_calls = any(message.get("tool_calls") for message in fitted)
        # Some loop over the tools without asking whether there are any.
        offered: list[Sequence[Mapping[str, Any]] | None] = [None, []] if tools is None else [tools]
        for as_text in (False, True)[: 1 + has_calls]:
            messages = [*map(_with_json_arguments, fitted)] if as_text else fitted
            for shown in offered:
                wanted = chat._replace(messages=messages, tools=shown)
                try:
                    return self._render(wanted), wanted
                except RequestError as error:
                    first = first or error
        assert first is not None
        raise first

    def _shows(self, *messages: Mapping[str, Any]) -> bool:
        """Whether the template shows the probe in the first of *messages* as text."""
        try:
            text, _ = self._tried(_Chat(messages, None, True, {}))
        except RequestError:
            return False
        return _PROBE in text and not any(key in text for key in ("'text'", '"text"'))

    def _fitted(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """*messages* as the template supports them; see `render`."""
        fitted: list[Mapping[str, Any]] = []
        for message in messages:
            if message.get("role") == "developer" and not self._knows_developer:
                message = {**message, "role": "system"}
            if self._calls_it_thinking and message.get("reasoning_content"):
                message = {**message, "thinking": message["reasoning_content"]}
                if message.get("tool_calls"):  # the template of gpt-oss takes no content beside it
                    message["content"] = ""
            fitted.append(message)
        if self._embeds_results:
            fitted = _with_results(fitted)
        if not self._takes_system and fitted and fitted[0].get("role") == "system":
            system, *rest = fitted
            words = [text_of(system.get("content"))]
            if rest and rest[0].get("role") == "user":
                words.append(text_of(rest.pop(0).get("content")))
            fitted = [{"role": "user", "content": "\n".join(words)}, *rest]
        shown: list[Mapping[str, Any]] = []
        for message in fitted:
            given, thoughts = message.get("content"), message.get("reasoning_content")
            content: object = given
            if thoughts and self._has_blocks_of_thinking:
                text = text_of(given)
                blocks = [{"type": "thinking", "thinking": thoughts}]
                content = [*blocks, *([{"type": "text", "text": text}] if text else [])]
            elif given is None:
                content = ""
            elif isinstance(given, list) and self._takes_text and not self._takes_parts:
                content = text_of(cast("object", given))
            elif isinstance(given, str) and self._takes_parts and not self._takes_text:
                content = [{"type": "text", "text": given}]
            shown.append(message if content is given else {**message, "content": content})
        return shown


class _Chat(NamedTuple):
    """What a template is filled with."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    options: Mapping[str, Any]


def _end_of(text: str, other: str, begun: int, ends_of_turn: Sequence[str]) -> int:
    """Where a message ends that has *begun* there; *other* is *text* with another next message."""
    pairs = zip(text[begun:], other[begun:], strict=False)
    content = begun + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    end = begun
    for mark in ends_of_turn:
        place = text.rfind(mark, begun, content)
        end = end if place < 0 else max(end, place + len(mark))
    while begun < end < content and text[end].isspace():
        end += 1
    return end


_OTHER: Final = "\u241fother\u241f"
_SAID: Final = "\u241fsaid\u241f"
_CALL: Final[Mapping[str, Any]] = {
    "type": "function",
    "id": "abcdefghi",
    "function": {"name": "f", "arguments": {}},
}
_USER: Final = {"role": "user", "content": _SAID}
_ANSWER: Final = {"role": "assistant", "content": _SAID}
# Role -> a chat whose last message has it, and is not the first one if that has more before it.
# Of roles that begin alike, the first one counts.
_PROBES: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "user": (_USER, _ANSWER, _USER),
    "assistant": (_USER, _ANSWER),
    "system": ({"role": "system", "content": _SAID},),
    "tool": (
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": _SAID, "tool_call_id": "abcdefghi", "name": "f"},
    ),
}
_PROBE: Final = "Hello there"
_PROBE_PARTS: Final = [{"type": "text", "text": _PROBE}]


def _with_results(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """*messages* with an answer, its calls and their results in one, as Gemma 4 has had them."""
    made: list[Mapping[str, Any]] = []
    for message in messages:
        last = made[-1] if made else {}
        if message.get("role") == "tool" and last.get("tool_calls"):
            ids = [call.get("id") for call in last["tool_calls"]]
            known = last.get("tool_responses", [])
            id_ = message.get("tool_call_id")
            call = last["tool_calls"][ids.index(id_) if id_ in ids else len(known) % len(ids)]
            response: Any = text_of(message.get("content"))
            with suppress(ValueError):
                response = json_input.loads(response)
            result = {
                "name": call.get("function", call)["name"],
                "response": response,
            }
            made[-1] = {**last, "tool_responses": [*known, result], "content": ""}
        elif (
            message.get("role") == "assistant"
            and "tool_responses" in last
            and not (last["content"] or message.get("tool_calls"))
        ):
            made[-1] = {**last, "content": message.get("content")}
        else:
            made.append(message)
    return made


def _with_json_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls: list[Any] = []
    for call in message["tool_calls"]:
        function = {**call.get("function", call)}
        function["arguments"] = _to_json(function.get("arguments"))
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _with_texts(value: Any, change: Callable[[str], str], change_key: Callable[[str], str]) -> Any:
    """*value*, of any type, with its texts changed, and those that are keys."""

    def changed(one: Any) -> Any:
        match one:
            case str():
                return change(one)
            case list() | tuple():
                made = [changed(item) for item in cast("Iterable[Any]", one)]
                return made if isinstance(one, list) else tuple(made)
            case dict():
                items = cast("dict[Any, Any]", one).items()
                return {change_key(k) if isinstance(k, str) else k: changed(v) for k, v in items}
            case _:
                return one

    return changed(value)


class _Disguise:
    """Replaces the first and last characters of some special tokens in contents."""

    def __init__(self, names: Sequence[str], text: str) -> None:
        taken = set(text)
        plane = map(chr, range(_NONCE_PLANE, _NONCE_PLANE + 0xFFFE))
        self._free = (char for char in plane if char not in taken)
        self._names = names
        self._chars: dict[str, str] = {}
        signs = sorted({sign for name in names for sign in (name[0], name[-1])})
        self.signs = " ".join(signs)
        self._signs = str.maketrans("".join(signs), self._hide("".join(signs)))

    def message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        # A known role may be the middle of a special token, an unknown one must not.
        role = message["role"]
        return {**self.of(message), "role": role if role in ROLES else self._hide(role)}

    def of(self, value: Any) -> Any:
        """A value of any type, whose keys may be names that the template reads."""

        def hide(text: str) -> str:
            return text.translate(self._signs)

        return _with_texts(value, hide, lambda key: key if key.isidentifier() else hide(key))

    def lift(self, parts: Iterable[PromptPart]) -> list[PromptPart]:
        """*parts* with the tokens they contain, and with the original characters restored."""
        named = re.compile(f"({'|'.join(map(re.escape, self._names))})")
        back = str.maketrans({hidden: sign for sign, hidden in self._chars.items()})
        lifted: list[PromptPart] = []
        for part in parts:
            pieces = [part.text] if part.is_special else named.split(part.text)
            for i, piece in enumerate(pieces):
                text, is_special = piece.translate(back), part.is_special or i % 2 == 1
                if not is_special and lifted and not lifted[-1].is_special:
                    lifted[-1] = PromptPart(lifted[-1].text + text, False)
                elif text:
                    lifted.append(PromptPart(text, is_special))
        return lifted

    def _hide(self, text: str) -> str:
        for char in text:
            if char not in self._chars:
                self._chars[char] = next(self._free, "\ufffd")  # all taken: indistinguishable
        return "".join(self._chars[char] for char in text)


class _Marks:
    """Placeholders for special tokens, in the constants of a template and in its output."""

    def __init__(self, control_texts: Iterable[str]) -> None:
        # Longest first, like llama.cpp's tokenizer.
        texts = sorted({text for text in control_texts if text}, key=len, reverse=True)
        self._control_texts = dict.fromkeys(texts)
        nonce = "".join(chr(_NONCE_PLANE + secrets.randbelow(0xFFFE)) for _ in range(8))
        self._nonce = nonce
        self._marked = re.compile(f"{nonce}([{chr(_INDEX_PLANE)}-{chr(_INDEX_PLANE + 0xFFFD)}])")
        self._indices: dict[str, int] = {}  # of the texts that are marked

    def mark(self, text: str) -> str:
        """A constant of the template with its special tokens replaced."""
        found = [re.escape(control) for control in self._control_texts if control in text]
        if not found:
            return text
        # Ordinary text at even places, special tokens at odd ones.
        pieces = re.split(f"({'|'.join(found)})", text)
        return "".join(self._of(piece) if i % 2 else piece for i, piece in enumerate(pieces))

    def split(self, rendered: str) -> list[PromptPart]:
        """Special tokens and the ordinary text between them; no text is empty, no two adjacent."""
        # Texts stand at even places, placeholders' indices at odd ones.
        parts: list[PromptPart] = []
        texts = list(self._indices)
        for i, piece in enumerate(self._marked.split(rendered)):
            if i % 2:
                parts.append(PromptPart(texts[ord(piece) - _INDEX_PLANE], True))
            elif piece:
                parts.append(PromptPart(piece, False))
        return parts

    def found_in(self, parts: Iterable[PromptPart]) -> list[str]:
        """Special tokens whose text occurs in ordinary text, longest first."""
        plain = [part.text for part in parts if not part.is_special]
        return [name for name in self._control_texts if any(name in text for text in plain)]

    def _of(self, text: str) -> str:
        index = self._indices.setdefault(text, len(self._indices))
        return self._nonce + chr(_INDEX_PLANE + index)


class _Refusal(TemplateError):
    """A template called raise_exception()."""


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _GivenList(list[Any]):
    """A list that is not the template's own."""


def _given(value: Any) -> Any:
    match value:
        case list():
            return _GivenList(map(_given, cast("list[Any]", value)))
        case dict():
            return {key: _given(item) for key, item in cast("dict[str, Any]", value).items()}
        case _:
            return value


class _Environment(ImmutableSandboxedEnvironment):
    """Nothing may be changed but a template's own lists: that of Kimi K2 has a queue."""

    has_lists = False
    """Whether it has any; the lists of a chat are then `_GivenList`s."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether the template may read this attribute."""
        is_own = self.has_lists and attr in ("append", "pop") and type(obj) is list
        return is_own or super().is_safe_attribute(obj, attr, value)


def _environment(*, has_lists: bool) -> _Environment:
    """The dialect of transformers' apply_chat_template."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.has_lists = has_lists
    environment.filters["tojson"] = _to_json
    environment.filters["safe"] = str  # jinja2's own would escape what is added to it, for HTML
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes <, > and & for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: object) -> list[Any]:
    """What a filter such as ``map`` yields; anything else is no JSON."""
    if isinstance(value, Iterator):
        return list(cast("Iterator[Any]", value))
    raise TypeError(f"{type(value).__name__} is not JSON")


def _defaults(options: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Variables as llama.cpp's server sets them, where a chat does not."""
    functions = [tool.get("function", tool) for tool in tools]
    now = datetime.now()
    found: dict[str, Any] = {
        "documents": None,
        "bos_token": "",
        "eos_token": "",
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y"),
        # What firefunction reads, whose tools the stock server leaves out.
        "functions": _to_json(functions, indent=4) if functions else "",
    }
    keeps = options.get("preserve_reasoning", True)
    if isinstance(keeps, bool):  # the names that templates have for it
        found["preserve_thinking"] = keeps
        for name in ("clear_thinking", "truncate_history_thinking", "drop_thinking"):
            found[name] = not keeps
    if "reasoning_effort" in options:
        found["reasoning_strength"] = options["reasoning_effort"]
    return found


def _refuse(message: object = "") -> NoReturn:
    raise _Refusal(str(message)[:_N_SHOWN])


_GLOBALS: Final[dict[str, Callable[[str], Any]]] = {
    "raise_exception": _refuse,
    "strftime_now": lambda form: datetime.now().strftime(form),
}


# ---- the program of a helper process

_kept: dict[str, ChatTemplate] = {}


def answer(request: Any) -> Any:
    """What a method returns of the template with this definition: its arguments as JSON."""
    definition, method, arguments = request
    if (template := _kept.get(definition)) is None:
        template = ChatTemplate(*json.loads(definition))
        if len(_kept) >= _N_KEPT:
            del _kept[next(iter(_kept))]
        _kept[definition] = template
    return None if method is None else getattr(template, method)(**arguments)
