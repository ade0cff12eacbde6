"""Ids of a chat with a tokenizer that makes special tokens even where it is told not to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("jinja2")

from kqview.conversation import Conversation
from kqview.submission import Submission
from kqview.vocabulary import Vocabulary
from tests.unit.test_types import MODEL

if TYPE_CHECKING:
    from kqview import _core

SOURCE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"


class MergingModel:
    """Ids of characters, but "<s>" is one token in any text, as if merges had led to it."""

    CONTROL = ("<s>", "</s>")

    def control_tokens(self) -> list[int]:
        return [0, 1]

    def token_bytes(self, id: int) -> bytes:
        return self.CONTROL[id].encode()

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        assert not add_special
        pattern = "(</?s>)" if parse_special else "(<s>)"
        return [
            id_
            for piece in re.split(pattern, text.decode())
            for id_ in ([self.CONTROL.index(piece)] if piece in self.CONTROL else map(ord, piece))
        ]


class OpenCore:
    def check_open(self) -> None:
        pass


def conversation() -> Conversation:
    core, model = cast("_core.Engine", OpenCore()), cast("_core.Model", MergingModel())
    words = Vocabulary(core, model)
    nothing: Any = None
    submission = Submission(
        core, model, MODEL, words, lora=nothing, run_ahead=0, drafts=False, partial_layers=(),
        fingerprint=str, on_end=lambda: None,
    )  # fmt: skip
    return Conversation(submission, template_options={}, trusts_template=True)


@pytest.mark.parametrize("content", ["<s>", "a<s><s>b</s>", "<<s>>", "<s>" * 20_000, "</s>"])
def test_tokens_that_merges_lead_to_are_cut(content: str):
    ids = conversation().apply_template(
        [{"role": "user", "content": content}], {"chat_template": SOURCE}
    )
    assert ids == [0, *map(ord, content), 1]
