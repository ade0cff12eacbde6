"""Conversation: turns chat messages into a prompt with the model's template; a base of Engine."""

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack, overload

from kqview._core import Engine as CoreEngine
from kqview._core import Model as CoreModel
from kqview.arguments import encode
from kqview.chat.messages import Message, checked_messages, checked_options, checked_tools
from kqview.chat.spans import message_ends
from kqview.errors import KqviewError, RequestError, UnsupportedModel
from kqview.generation.stream import Generation
from kqview.mods.events import Dialogue, conversation_of
from kqview.offsets import Offsets
from kqview.submission import GenerateOptions
from kqview.types import ChatPrompt, ModelInfo
from kqview.types.text import Ids

if TYPE_CHECKING:
    from kqview.chat.template import ChatTemplate, Part

_N_TEMPLATES_MAX: Final = 16


class Conversation:
    """The chat methods of Engine; any thread. Rendering has no side effects."""

    _core: CoreEngine
    _model: CoreModel
    _info: ModelInfo

    def _open_conversation(self) -> None:
        ids = self._model.control_tokens()
        self._control_ids = {self._model.token_bytes(i).decode("utf-8", "replace"): i for i in ids}
        self._control_id_set = frozenset(ids)
        self._templates: dict[str, ChatTemplate] = {}

    @abstractmethod
    def _offsets(self, text: str, ids: list[int]) -> Offsets:
        """See Vocabulary."""

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Text and id of each control token: in a prompt of `chat`, only the template makes one."""
        return MappingProxyType(self._control_ids)

    @abstractmethod
    def generate(self, prompt: str | Ids, **options: Unpack[GenerateOptions]) -> Generation:
        """See Engine."""

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Generate the assistant's next message.

        Args:
            messages: As in `apply_chat_template`.
            tools: As in `apply_chat_template`. `kqview.chat.parse_tool_calls` extracts the calls
                from the answer.
            chat_template: As in `apply_chat_template`.
            template_options: As in `apply_chat_template`.
            **options: The options of `generate`.

        Raises:
            RequestError: An argument is invalid (may be a subclass), or the template rejects the
                messages.
            UnsupportedModel: The model has no chat template.
            KqviewError: jinja2 is not installed. Also any error of `generate`.
        """
        ids = self.apply_chat_template(
            messages,
            tools=tools,
            chat_template=chat_template,
            template_options=template_options,
        )
        with conversation_of(Dialogue(messages, tools)):
            return self.generate(ids, **options)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: Literal[True] = True,
        spans: Literal[False] = False,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: Literal[True] = True,
        spans: Literal[True],
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> ChatPrompt: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: Literal[False],
        spans: Literal[False] = False,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        spans: bool = False,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int] | ChatPrompt | str:
        """Render *messages* as a prompt with the model's chat template.

        Only the template can produce special tokens. The contents of messages, tools and options
        are ordinary text: "<|im_end|>" in a content does not end the message. The exception is
        tokens that the model file marks as user-defined: they are matched in any text.

        Args:
            messages: Mappings with ``role`` and ``content`` (text, or a list of text parts).
            tools: Functions that the model may call, as JSON schemas.
            add_generation_prompt: End the prompt with the header of the assistant's message.
            tokenize: Return ids. False returns text, for reading only, because special tokens and
                contents look alike in it.
            spans: Return a ChatPrompt: the ids, and for each message the range of its ids. Renders
                the template once more for each message.
            chat_template: Template to use instead of the model's own.
            template_options: Extra variables for the template, such as ``enable_thinking``.

        Raises:
            RequestError: A message is malformed, or the template rejects it, takes more than 5 s of
                CPU time, or produces more than 16 Mi characters.
            UnsupportedModel: The model has no chat template, or the template does not parse, is
                nested too deeply, or exceeds these limits with any message.
            KqviewError: jinja2 is not installed.
        """
        self._core.check_open()
        if spans and not tokenize:
            raise RequestError(
                "spans are ranges of ids, so they need tokenize=True; leave one of the two out",
                parameter="spans",
            )
        checked = checked_messages(messages)
        checked_tool_list = checked_tools(tools)
        source = self._info.chat_template if chat_template is None else chat_template
        if source is None:
            raise UnsupportedModel(
                f"{self._info.name or self._info.architecture} has no chat template; "
                "pass one as chat_template, or use generate"
            )
        encode("chat_template", source)
        template = self._template(source)
        render = partial(
            template.render, tools=checked_tool_list, options=checked_options(template_options)
        )
        parts = render(checked, add_generation_prompt=add_generation_prompt)
        if not tokenize:
            return _text_of(parts)
        ids = self._chat_ids(parts)
        if not spans:
            return ids
        text = _text_of(parts)
        ends = message_ends(text, checked, render, ends_of_turn=self._ends_of_turn())
        starts = [start for start, _ in self._offsets(text, ids)]
        places = [0, *(bisect_left(starts, end) for end in ends)]
        return ChatPrompt(ids, list(pairwise(places)))

    def _ends_of_turn(self) -> list[str]:
        ids = {self._info.eot_token_id, self._info.eos_token_id}
        return [text for text, id_ in self._control_ids.items() if id_ in ids]

    def _template(self, source: str) -> "ChatTemplate":
        """The compiled template. Compiling takes milliseconds, and few templates are in use."""
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
        template = ChatTemplate(source, self._info.special_tokens, self._control_ids)
        if len(self._templates) < _N_TEMPLATES_MAX:
            self._templates[source] = template
        return template

    # ---- ids of parts

    def _chat_ids(self, parts: "Sequence[Part]") -> list[int]:
        """Ids of the joined text; ordinary text that names a control token is tokenized apart."""
        ids: list[int] = []
        run: list[Part] = []
        for part in parts:
            if not part.is_special and self._names_control(part.text):
                ids += self._run_ids(run) + self._plain_ids(part.text)
                run = []
            else:
                run.append(part)
        return ids + self._run_ids(run)

    def _run_ids(self, run: "Sequence[Part]") -> list[int]:
        text = "".join(part.text for part in run)
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

    def _names_control(self, text: str) -> bool:
        ids = self._model.tokenize(encode("messages", text), False, True)
        return not self._control_id_set.isdisjoint(ids)


def _text_of(parts: "Iterable[Part]") -> str:
    return "".join(part.text for part in parts)
