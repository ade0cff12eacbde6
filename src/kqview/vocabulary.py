"""Vocabulary: converts text to token ids and back; a base of Engine."""

from collections.abc import Iterable

from kqview._core import Engine as CoreEngine
from kqview._core import Model as CoreModel
from kqview.arguments import checked_id, checked_ids, encode


class Vocabulary:
    """Engine methods that convert text to ids and back; any thread, also during generation."""

    _core: CoreEngine
    _model: CoreModel

    def _open_vocabulary(self) -> None:
        self._has_vocab: bool = self._model.has_vocab
        self._token_bytes: dict[int, bytes] = {}

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Convert *text* to token ids; any thread, even during generation.

        Time and memory are proportional to the length of *text*, whatever it contains.

        Args:
            text: Any text of at most 16 MiB as UTF-8.
            add_special: Add the ids that the model expects around a text, such as BOS.
            parse_special: Convert the text of a special token to its id; False treats it as
                ordinary text.

        Raises:
            RequestError: *text* is too long, or has surrogates, which UTF-8 cannot express.
            UnsupportedModel: The model file has no vocabulary, or one that llama.cpp cannot use.
        """
        self._core.check_open()
        return self._model.tokenize(encode("text", text), add_special, parse_special)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Convert *ids* to text, including special tokens; bytes that are not UTF-8 become U+FFFD.

        Nothing is omitted: if *ids* are split between characters, the texts of the parts join to
        the text of the whole, as in ``generation.text``. The leading space that SentencePiece
        vocabularies add when they tokenize is kept: for those, ``detokenize(tokenize("a"))`` is
        ``" a"``.

        Raises:
            InvalidToken: An id is not in the vocabulary.
            UnsupportedModel: The model file has no vocabulary.
        """
        self._core.check_open()
        return self._model.detokenize(checked_ids("ids", ids)).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """Bytes of one token; a character may span several tokens.

        Raises:
            InvalidToken: *id* is not in the vocabulary.
            UnsupportedModel: The model file has no vocabulary.
        """
        self._core.check_open()
        return self._model.token_bytes(checked_id("id", id))

    def token_text(self, id: int) -> str:
        """`token_bytes` as text; bytes that are not UTF-8 on their own become U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def _bytes_of(self, token_id: int) -> bytes:
        # Cached: after the first time, an id costs only a dictionary look-up.
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._model.token_bytes(token_id) if self._has_vocab else b""
            self._token_bytes[token_id] = known
        return known
