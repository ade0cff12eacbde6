"""Conversation: turns messages into a prompt by the model's own template, for an engine."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack, overload

from kqview._core import Engine as CoreEngine
from kqview._core import Model as CoreModel
from kqview.arguments import encode
from kqview.chat.messages import Message, checked_messages, checked_options, checked_tools
from kqview.errors import KqviewError, UnsupportedModel
from kqview.generation.stream import Generation
from kqview.submission import GenerateOptions
from kqview.types import ModelInfo

if TYPE_CHECKING:
    from kqview.chat.template import ChatTemplate, Part

_N_TEMPLATES_MAX: Final = 16


class Conversation:
    """Chat; any thread. Rendering is pure, the rest is `Engine.generate`."""

    _core: CoreEngine
    _model: CoreModel
    _info: ModelInfo

    def _open_conversation(self) -> None:
        ids = self._model.control_tokens()
        self._control_ids = {self._model.token_bytes(i).decode("utf-8", "replace"): i for i in ids}
        self._control_id_set = frozenset(ids)
        self._templates: dict[str, ChatTemplate] = {}

    @abstractmethod
    def generate(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Generation:
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
            tools: As in `apply_chat_template`. Read the calls out of the answer with
                `kqview.chat.parse_tool_calls`.
            chat_template: As in `apply_chat_template`.
            template_options: As in `apply_chat_template`.
            **options: Those of `generate`.

        Raises:
            RequestError: Or one of its kinds: an argument cannot work, or the template refuses the
                messages.
            UnsupportedModel: The model has no chat template.
            KqviewError: jinja2 is not installed. What `generate` raises may come too.
        """
        ids = self.apply_chat_template(
            messages,
            tools=tools,
            chat_template=chat_template,
            template_options=template_options,
        )
        return self.generate(ids, **options)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: Literal[True] = True,
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
        tokenize: Literal[False],
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
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int] | str:
        """The prompt that the model's template makes of *messages*.

        Special tokens come from the template alone. What messages, tools and options hold is
        ordinary text, whatever it looks like: "<|im_end|>" in a content ends no message. Tokens
        that the model file itself calls user-defined are matched in any text.

        Args:
            messages: Mappings with ``role`` and ``content`` (text, or a list of text parts).
            tools: Functions that the model may call, as JSON schemas.
            add_generation_prompt: End with the head of the assistant's message.
            tokenize: Return ids; False returns the text, in which special tokens and contents
                look alike, so that it is good for reading only.
            chat_template: A template in place of the model's own.
            template_options: Further variables of the template, such as ``enable_thinking``.

        Raises:
            RequestError: A message is not well-formed, the template refuses it, or takes more than
                5 s or makes more than 16 Mi characters of it.
            UnsupportedModel: The model has no chat template, or one that does not parse, is nested
                too deeply, or goes over these limits with any message.
            KqviewError: jinja2 is not installed.
        """
        self._core.check_open()
        checked = checked_messages(messages)
        checked_tool_list = checked_tools(tools)
        source = self._info.chat_template if chat_template is None else chat_template
        if source is None:
            raise UnsupportedModel(
                f"chat: {self._info.name or self._info.architecture} has no chat template; "
                "pass one as chat_template, or use generate"
            )
        encode("chat_template", source)
        parts = self._template(source).render(
            checked,
            tools=checked_tool_list,
            add_generation_prompt=add_generation_prompt,
            options=checked_options(template_options),
        )
        return self._chat_ids(parts) if tokenize else "".join(part.text for part in parts)

    def _template(self, source: str) -> "ChatTemplate":
        """The compiled template; compiling takes milliseconds, and few are in use."""
        if (known := self._templates.get(source)) is not None:
            return known
        try:
            from kqview.chat.template import ChatTemplate
        except ModuleNotFoundError as missing:
            if (missing.name or "").partition(".")[0] not in ("jinja2", "markupsafe"):
                raise
            raise KqviewError(
                'chat: jinja2 is not installed, templates need it; run pip install "kqview[chat]"'
            ) from missing
        template = ChatTemplate(source, self._info.special_tokens, self._control_ids)
        if len(self._templates) < _N_TEMPLATES_MAX:
            self._templates[source] = template
        return template

    # ---- ids of parts

    def _chat_ids(self, parts: "Sequence[Part]") -> list[int]:
        """Ids as if the text were tokenized at once, where it names no token that it may not."""
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
        # A special token and the text beside it read as another one.
        return [
            id_
            for part in run
            for id_ in (
                [self._control_ids[part.text]] if part.is_special else self._plain_ids(part.text)
            )
        ]

    def _plain_ids(self, text: str) -> list[int]:
        """Ids of *text* without any control token.

        llama.cpp's merges can end in one even where it does not look for special tokens; then the
        text is cut inside of it.
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
