"""ModTokenizer: the tokenizer that mods get, with the method names of Hugging Face's."""

from collections.abc import Callable, Iterable
from functools import cached_property

from kqview import _core
from kqview.arguments import checked_ids


class ModTokenizer:
    """Converts text to ids and back, like a Hugging Face tokenizer; any thread.

    The engine makes one for all its requests.
    """

    def __init__(
        self,
        model: _core.Model,
        *,
        tokenize: Callable[[str, bool], list[int]],
        detokenize: Callable[[list[int]], str],
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self._model = model
        self._tokenize = tokenize
        self._detokenize = detokenize
        self._token_bytes = token_bytes

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of *text*; *add_special_tokens* adds those that the model expects.

        Raises:
            RequestError: *text* is too long, or contains surrogates, which UTF-8 cannot encode.
        """
        return self._tokenize(text, add_special_tokens)

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of one id or several; bytes that are not UTF-8 become U+FFFD.

        Raises:
            InvalidToken: An id is not in the vocabulary.
        """
        given = [ids] if isinstance(ids, int) else checked_ids("ids", ids)
        if skip_special_tokens:
            given = [one for one in given if one not in self._special]
        return self._detokenize(given)

    def token_bytes(self, id: int) -> bytes:
        """Bytes of one token; a character may span several tokens."""
        return self._token_bytes(id)

    def get_vocab(self) -> dict[str, int]:
        """Map the text of each token to its id; do not change it.

        Bytes that are not UTF-8 are written ``\\xNN``. If tokens share a text, ``<id>`` is
        appended to all but the first.
        """
        return self._vocab

    def __len__(self) -> int:
        """Size of the vocabulary."""
        return self._model.n_vocab

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        return self._model.n_vocab

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a text; None if the model has none."""
        return self._model.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """Id that ends a text; None if the model has none."""
        return self._model.eos_token_id

    @property
    def all_special_ids(self) -> list[int]:
        """Ids that ``decode(..., skip_special_tokens=True)`` leaves out."""
        return sorted(self._special)

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self._model.control_tokens()) if self._model.has_vocab else frozenset()

    @cached_property
    def _vocab(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for id_ in range(self._model.n_vocab):
            text = self._token_bytes(id_).decode("utf-8", "backslashreplace")
            while text in found:
                text += f"<{id_}>"
            found[text] = id_
        return found
