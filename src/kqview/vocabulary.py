"""Vocabulary: converts text to token ids and back; a base of Engine."""

from collections.abc import Iterable
from typing import Literal, SupportsIndex, overload

from kqview._core import Engine as CoreEngine
from kqview._core import Model as CoreModel
from kqview.arguments import checked_id, checked_ids, decode, encode, flag
from kqview.errors import UnsupportedModel
from kqview.offsets import Offsets, offsets_of
from kqview.option_names import names_options
from kqview.types import Tokenized


class Vocabulary:
    """Engine methods that convert text to ids and back; any thread, also during generation."""

    _core: CoreEngine
    _model: CoreModel

    def _open_vocabulary(self) -> None:
        self._has_vocab: bool = self._model.has_vocab
        self._token_bytes: dict[int, bytes] = {}
        self._special_ids: frozenset[int] | None = None  # once they are asked for

    @overload
    def tokenize(
        self,
        text: str | bytes,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        offsets: Literal[False] = False,
    ) -> list[int]: ...

    @overload
    def tokenize(
        self,
        text: str | bytes,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        offsets: Literal[True],
    ) -> Tokenized: ...

    @names_options("tokenize")
    def tokenize(
        self,
        text: str | bytes,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        offsets: bool = False,
    ) -> list[int] | Tokenized:
        """Convert *text* to token ids; any thread, even during generation.

        The ids are those that `generate` makes of a str prompt. Time and memory are proportional to
        the length of *text*, whatever it contains.

        Args:
            text: Any text of at most 16 MiB as UTF-8, as str or as these bytes.
            add_special: Add the ids that the model expects around a text, such as BOS. Pass False
                for a piece of a text, such as a word to look for among ids.
            parse_special: Convert the text of a special token to its id; False treats it as
                ordinary text.
            offsets: Return a Tokenized: the ids, and for each the characters that it stands for.

        Raises:
            RequestError: *text* is too long, or has surrogates, which UTF-8 cannot express; or its
                bytes are not UTF-8.
            UnsupportedModel: The model file has no vocabulary, or one that llama.cpp cannot use. Or
                *offsets* is true, and the vocabulary changes the text in a way that cannot be
                followed.
        """
        self._core.check_open()
        text = decode("text", text) if isinstance(text, bytes) else text
        ids = self._text_ids("text", text, add_special, parse_special)
        if not flag("offsets", offsets):
            return ids
        plain = self._text_ids("text", text, False, parse_special) if add_special else ids
        n_added = len(ids) - len(plain)
        n_before = next((n for n in range(n_added + 1) if ids[n : n + len(plain)] == plain), 0)
        end = len(text)
        spans = self._offsets(text, ids[n_before : n_before + len(plain)])
        return Tokenized(
            ids, [(0, 0)] * n_before + spans + [(end, end)] * (len(ids) - n_before - len(spans))
        )

    def _text_ids(
        self, name: str, text: str, add_special: object, parse_special: object
    ) -> list[int]:
        """The ids of *text*, the argument *name*."""
        data = encode(name, text)
        flags = flag("add_special", add_special), flag("parse_special", parse_special)
        return self._model.tokenize(data, *flags)

    def _offsets(self, text: str, ids: list[int]) -> Offsets:
        spans = offsets_of(text, [self._bytes_of(i) for i in ids])
        if spans is None:
            raise UnsupportedModel(
                "this model's vocabulary rewrites the text, so its tokens have no offsets in it; "
                "leave offsets out, or compare token_text(id) with the text"
            )
        return spans

    @names_options("detokenize")
    def detokenize(self, ids: Iterable[SupportsIndex], *, skip_special_tokens: bool = False) -> str:
        """Convert *ids* to text, including special tokens; bytes that are not UTF-8 become U+FFFD.

        If *ids* are split between characters, the texts of the parts join to the text of the whole,
        as in ``generation.text``. The leading space that SentencePiece vocabularies add when they
        tokenize is kept: for those, ``detokenize(tokenize("a"))`` is ``" a"``.

        Args:
            ids: Ids of tokens.
            skip_special_tokens: Leave out the tokens that a text gives only with *parse_special*,
                such as ``<|im_end|>``, as Hugging Face's tokenizers do.

        Raises:
            InvalidToken: An id is not in the vocabulary.
            UnsupportedModel: The model file has no vocabulary.
        """
        self._core.check_open()
        given = checked_ids("ids", ids)
        if flag("skip_special_tokens", skip_special_tokens):
            if self._special_ids is None:
                self._special_ids = frozenset(self._model.control_tokens())
            given = [one for one in given if one not in self._special_ids]
        return self._model.detokenize(given).decode("utf-8", "replace")

    def token_bytes(self, id: SupportsIndex) -> bytes:
        """Bytes of one token; a character may span several tokens.

        Raises:
            InvalidToken: *id* is not in the vocabulary.
            UnsupportedModel: The model file has no vocabulary.
        """
        self._core.check_open()
        return self._model.token_bytes(checked_id("id", id))

    def token_text(self, id: SupportsIndex) -> str:
        """`token_bytes` as text; bytes that are not UTF-8 on their own become U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def _bytes_of(self, token_id: int) -> bytes:
        # Cached: after the first time, an id costs only a dictionary look-up.
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._model.token_bytes(token_id) if self._has_vocab else b""
            self._token_bytes[token_id] = known
        return known
