"""Vocabulary: text to ids and back, for the model of an engine."""

from collections.abc import Iterable

from kqview._core import Engine as CoreEngine
from kqview._core import Model as CoreModel
from kqview._core import ModelFacts
from kqview.arguments import checked_ids, encode


class Vocabulary:
    """The part of Engine that turns text into ids and back; any thread, also while it generates."""

    _core: CoreEngine
    _model: CoreModel
    _model_facts: ModelFacts

    def _open_vocabulary(self) -> None:
        self._has_vocab: bool = self._model_facts.has_vocab
        self._token_bytes: dict[int, bytes] = {}

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Ids of *text*. Works in any thread, also while the engine generates.

        Takes time and memory in proportion to the length of *text*, whatever it is made of.

        Args:
            text: Any text of at most 16 MiB as UTF-8.
            add_special: Add the ids that the model wants around a text, such as BOS.
            parse_special: Read the text of special tokens as their ids, not as ordinary text.

        Raises:
            RequestError: *text* has surrogates, which UTF-8 cannot express, or is too long.
            UnsupportedModel: The model file has no vocabulary, or one that llama.cpp cannot use.
        """
        self._core.check_open()
        return self._model.tokenize(encode("text", text), add_special, parse_special)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Text of *ids*, special tokens included; bytes that are no UTF-8 become U+FFFD.

        Nothing is left out: texts of parts of *ids* that end between characters join to the text of
        all, as ``generation.text`` does. The space that SentencePiece's vocabularies put in front
        of a text they tokenize is there again: ``detokenize(tokenize("a"))`` is ``" a"`` for those.

        Raises:
            InvalidToken: An id is not in the vocabulary.
            UnsupportedModel: The model file has no vocabulary.
        """
        self._core.check_open()
        return self._model.detokenize(checked_ids("ids", ids)).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """Bytes of one token; a character may be spread over several tokens.

        Raises:
            InvalidToken: *id* is not in the vocabulary.
            UnsupportedModel: The model file has no vocabulary.
        """
        self._core.check_open()
        return self._model.token_bytes(checked_ids("id", [id])[0])

    def token_text(self, id: int) -> str:
        """`token_bytes` as text; bytes that are no UTF-8 by themselves become U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def _bytes_of(self, token_id: int) -> bytes:
        # Each id once: text of a token costs a dictionary look-up from then on.
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._model.token_bytes(token_id) if self._has_vocab else b""
            self._token_bytes[token_id] = known
        return known
