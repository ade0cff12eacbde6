"""Conversation: turns chat messages into a prompt with the model's template; a part of Engine."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict

from kqview.arguments import encode, flag
from kqview.chat import CHATML
from kqview.chat.formats import FORMATS, format_of
from kqview.chat.functions import ToolLike
from kqview.chat.parts import PromptPart, text_of_parts
from kqview.chat.rendering import ConfinedTemplate, template_helpers
from kqview.chat.tool_format import ReasoningStart, said
from kqview.chat.turn import (
    N_END,
    Choice,
    Message,
    ToolChoice,
    checked_messages,
    checked_options,
    checked_tools,
    choice_of,
    constrained,
    continued,
    opened_by,
    reading_of,
    reasoning_of,
    template_for,
)
from kqview.errors import CapacityError, KqviewError, RequestError, UnsupportedModel
from kqview.generation.stream import Generation
from kqview.mods.events import Dialogue, conversation_of
from kqview.option_names import unknown_option
from kqview.submission import GenerateOptions, Submission, arguments_of
from kqview.types import ChatPrompt
from kqview.types.json_schema import Parsed
from kqview.types.sampling import OPTIONS

if TYPE_CHECKING:
    from kqview.chat.template import ChatTemplate

_N_TEMPLATES_MAX: Final = 16
_N_BEFORE_HEADER: Final = 4


class ChatOptions(GenerateOptions[Parsed], total=False):
    """The options of `Engine.chat`, for callers that pass them on."""

    tools: Sequence[ToolLike] | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    template_options: Mapping[str, Any] | None


class TemplateOptions(TypedDict, total=False):
    """Options of `Engine.apply_chat_template` that its result does not depend on by its type."""

    tools: Sequence[ToolLike] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    template_options: Mapping[str, Any] | None


CHAT_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "tools": None, "tool_choice": None, "parallel_tool_calls": True,
        "continue_final_message": False, "chat_template": None, "template_options": None,
    }
)  # fmt: skip
"""The options of `Engine.chat` besides those of `Engine.generate`."""
TEMPLATE_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "tools": None, "add_generation_prompt": True, "continue_final_message": False,
        "tokenize": True, "spans": False, "chat_template": None, "template_options": None,
    }
)  # fmt: skip
"""The options of `Engine.apply_chat_template`."""


class Conversation:
    """The chats of an engine; any thread. Rendering has no side effects.

    Args:
        template_options: Variables of every chat, checked.
        trusts_template: Whether the model's template is rendered in this process.
    """

    def __init__(
        self,
        submission: Submission,
        *,
        template_options: Mapping[str, Any],
        trusts_template: bool,
    ) -> None:
        self._core = submission.core
        self._model = model = submission.model
        self._info = info = submission.info
        self._submission = submission
        self._template_options = template_options
        ids = model.control_tokens()
        self._control_ids = {model.token_bytes(i).decode("utf-8", "replace"): i for i in ids}
        self._control_id_set = frozenset(ids)
        self.control_tokens: Mapping[str, int] = MappingProxyType(self._control_ids)
        self._templates: dict[str, ChatTemplate | ConfinedTemplate] = {}
        self._trusted = {CHATML, info.chat_template if trusts_template else CHATML}
        self._helpers = template_helpers()
        self._headers: dict[str, list[int]] | None = None  # of each role's messages, once known

    def close(self) -> None:
        """End the processes that render templates."""
        self._helpers.close()

    def chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Generation[Any]:
        """See `Engine.chat`."""
        self._core.check_open()
        given = {name: options.get(name, default) for name, default in CHAT_DEFAULTS.items()}
        options = {name: value for name, value in options.items() if name not in CHAT_DEFAULTS}
        is_parallel = flag("parallel_tool_calls", given["parallel_tool_calls"])
        choice = choice_of(checked_tools(given["tools"]) or [], given["tool_choice"])
        source = self._source(given["chat_template"], choice.tools)
        given["tools"] = choice.tools or None
        chat = self._rendered(messages, source, given, adds_header=True)
        ids = self._begun(self._chat_ids(chat.parts))
        end = b"".join(map(self._model.token_bytes, ids[-N_END:])).decode("utf-8", "replace")
        opened = opened_by(end, chat.begun)
        schema, options = self._constrained(
            options, choice, source, reasoning_of(source, end, opened), is_parallel
        )
        with conversation_of(Dialogue(messages, choice.tools or None)):
            generation = self._submission.generate(ids, options, "chat")
        generation.read_reply_with(reading_of(source, opened, choice.tools).reply, schema)
        return generation

    def _constrained(
        self,
        options: Mapping[str, Any],
        choice: Choice,
        source: str,
        reasoning: ReasoningStart,
        is_parallel: bool,
    ) -> tuple[str | None, Mapping[str, Any]]:
        """The JSON schema of the answer, and *options* with what makes the answer follow it."""
        _, sampling = arguments_of("chat", options)
        schema: Any = sampling.json_schema
        form = format_of(source)
        # A model that may reason or not does not if its answer is JSON.
        is_plain = not FORMATS[form].answer and reasoning.how != "open"
        if choice.needs_call or (schema is not None and (choice.tools or not is_plain)):
            sampling = constrained(
                replace(sampling, json_schema=None),
                choice=choice,
                schema=schema,
                form=form,
                reasoning=reasoning,
                is_parallel=is_parallel,
                mark=partial(said, self._control_ids),
            )
        others = {name: value for name, value in options.items() if name not in OPTIONS}
        return schema, {**others, "sampling": sampling}

    def apply_template(
        self, messages: Any, options: Mapping[str, Any]
    ) -> list[int] | ChatPrompt | str:
        """See `Engine.apply_chat_template`."""
        given = dict(TEMPLATE_DEFAULTS)
        for name, value in options.items():
            if name not in TEMPLATE_DEFAULTS:
                raise unknown_option("apply_chat_template", name, TEMPLATE_DEFAULTS)
            given[name] = TEMPLATE_DEFAULTS[name] if value is None else value
        self._core.check_open()
        if given["spans"] and not given["tokenize"]:
            raise RequestError(
                "spans are ranges of ids, so they need tokenize=True; leave one of the two out",
                parameter="spans",
            )
        source = given["chat_template"]
        if not isinstance(source, str) or source not in self._templates:  # else it was checked
            source = self._source(source, given["tools"])
        if given["tools"] is not None:
            given["tools"] = checked_tools(given["tools"])
        chat = self._rendered(messages, source, given, adds_header=given["add_generation_prompt"])
        if not given["tokenize"]:
            return text_of_parts(chat.parts)
        rendered = self._chat_ids(chat.parts)
        ids = self._begun(rendered)
        if not given["spans"]:
            return ids
        text = text_of_parts(chat.parts)
        ends = chat.ends(text=text, ends_of_turn=self._ends_of_turn())
        starts = [start for start, _ in self._submission.vocabulary.offsets(text, rendered)]
        n_before = len(ids) - len(rendered)
        # A message that has no text of its own has no BOS either.
        places = [0, *(end and n_before + bisect_left(starts, end) for end in ends)]
        return ChatPrompt(ids, list(pairwise(places)))

    def _rendered(
        self,
        messages: Sequence[Message],
        source: str,
        given: Mapping[str, Any],
        *,
        adds_header: bool,
    ) -> "_Rendered":
        """Render a chat; raises as `apply_chat_template`, whose options are *given*."""
        continues = given["continue_final_message"]
        continues = continues is not False and flag("continue_final_message", continues)
        checked, tools, options = checked_messages(messages), given["tools"], self._template_options
        if given["template_options"] is not None:
            options = {**options, **checked_options(given["template_options"])}
        template = self._templates.get(source) or self.template_of(source)
        begun = continued(checked) if continues else None
        rest = checked if begun is None else checked[:-1]
        adds_header = adds_header or begun is not None
        parts = template.render(
            rest,
            tools=tools,
            add_generation_prompt=adds_header,
            options=options,
            shows_tools_for=self._info.name or self._info.architecture,
        )
        if begun:
            parts = [*parts, PromptPart(begun, False)]
        ends = partial(template.ends, checked, tools=tools, options=options)
        return _Rendered(parts, begun or "", ends)

    def _source(self, chat_template: str | None, tools: object) -> str:
        """The text of the template to use: *chat_template*, or the model's own."""
        source = chat_template
        if source is None:
            source = template_for(self._info, has_tools=bool(tools))
        if source is None:
            raise UnsupportedModel(
                f"{self._info.name or self._info.architecture} has no chat template; "
                "pass one as chat_template, or use generate"
            )
        encode("chat_template", source)
        return source

    def _ends_of_turn(self) -> list[str]:
        ids = {self._info.eot_token_id, self._info.eos_token_id}
        return [text for text, id_ in self._control_ids.items() if id_ in ids]

    def template_of(self, source: str) -> "ChatTemplate | ConfinedTemplate":
        """The template, compiled, or the one that was; in a helper process unless it is trusted.

        Raises:
            UnsupportedModel: It does not parse.
            KqviewError: jinja2 is not installed.
        """
        if (known := self._templates.get(source)) is not None:
            return known
        try:
            from kqview.chat.template import ChatTemplate
        except ModuleNotFoundError as missing:
            if (missing.name or "").partition(".")[0] not in ("jinja2", "markupsafe"):
                raise
            raise KqviewError(
                'chat templates need jinja2, which is not installed; run pip install "kqview[chat]"'
            ) from missing
        about = source, self._info.special_tokens, self._control_ids
        is_trusted = source in self._trusted
        template = ChatTemplate(*about) if is_trusted else ConfinedTemplate(self._helpers, *about)
        if len(self._templates) < _N_TEMPLATES_MAX:
            self._templates[source] = template
        return template

    # ---- roles of messages in a slot

    def role_of(self, ids: Sequence[int]) -> str | None:
        """The role whose header is at the beginning of a message, None if none is."""
        if self._headers is None:
            self._headers = self._learned_headers()
        best: tuple[int, int, str] | None = None
        for role, header in self._headers.items():
            n = len(header)
            # Before it there may be BOS and the line end behind the message before.
            for start in range(min(_N_BEFORE_HEADER, len(ids) - n) + 1):
                if list(ids[start : start + n]) == header:
                    best = min(best or (start, -n, role), (start, -n, role))
                    break
        return None if best is None else best[2]

    def _learned_headers(self) -> dict[str, list[int]]:
        if self._info.chat_template is None:
            return {}
        try:
            template = self.template_of(self._info.chat_template)
            found = template.headers(ends_of_turn=self._ends_of_turn())
        except CapacityError:
            raise
        except KqviewError:  # it does not parse, or jinja2 is not installed
            return {}
        headers: dict[str, list[int]] = {}
        for role, parts in found.items():
            header = self._chat_ids(parts)
            if header[:1] == [self._info.bos_token_id]:
                del header[0]
            if header and header not in headers.values():
                headers[role] = header
        return headers

    # ---- ids of parts

    def _begun(self, ids: list[int]) -> list[int]:
        """*ids* of a whole chat after those with which the model begins texts."""
        begin = list(self._info.begin_ids)
        return ids if ids[: len(begin)] == begin else begin + ids

    def _chat_ids(self, parts: Sequence[PromptPart]) -> list[int]:
        """Ids of the joined text; ordinary text that names a control token is tokenized apart."""
        ids: list[int] = []
        run: list[PromptPart] = []
        for part in parts:
            if not part.is_special and not self._control_id_set.isdisjoint(
                self._model.tokenize(encode("messages", part.text), False, True)
            ):
                ids += self._run_ids(run) + self._plain_ids(part.text)
                run = []
            else:
                run.append(part)
        return ids + self._run_ids(run)

    def _run_ids(self, run: Sequence[PromptPart]) -> list[int]:
        text = "".join([part.text for part in run])
        wanted = [self._control_ids[part.text] for part in run if part.is_special]
        ids = self._model.tokenize(encode("messages", text), False, True)
        if [i for i in ids if i in self._control_id_set] == wanted:
            return ids
        # A special token and adjacent text were read as a different token.
        return [
            id_
            for part in run
            for id_ in (
                [self._control_ids[part.text]] if part.is_special else self._plain_ids(part.text)
            )
        ]

    def _plain_ids(self, text: str) -> list[int]:
        """Ids of *text* without any control token.

        llama.cpp's merges can produce a control token even if it does not look for special tokens.
        The text is then split inside that token.
        """
        ids = self._model.tokenize(encode("messages", text), False, False)
        bad = next((i for i in ids if i in self._control_id_set), None)
        if bad is None:
            return ids
        name = next(name for name, id_ in self._control_ids.items() if id_ == bad)
        if name not in text or len(name) < 2:
            return [i for i in ids if i not in self._control_id_set]
        first, *rest = text.split(name)
        pieces = [first + name[0], *(name[1:] + piece + name[0] for piece in rest)]
        pieces[-1] = pieces[-1][:-1]
        return [i for piece in pieces for i in self._plain_ids(piece)]


class _Rendered(NamedTuple):
    """A rendered chat.

    Attributes:
        parts: Its text.
        begun: The text of the answer with which it ends, if it continues one.
        ends: `ChatTemplate.ends` of its messages, with the same tools and options.
    """

    parts: Sequence[PromptPart]
    begun: str
    ends: Callable[..., list[int]]
