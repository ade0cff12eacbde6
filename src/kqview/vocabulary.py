"""Vocabulary: converts text to token ids and back; a part of Engine."""

from collections.abc import Iterable
from functools import cache

from kqview import _core
from kqview.arguments import checked_ids, decode, encode, flag
from kqview.errors import UnsupportedModel
from kqview.offsets import Offsets, offsets_of
from kqview.types import Tokenized


class _Bytes(dict[int, bytes]):
    """Bytes of each token that was asked for: from the second time on, a look-up."""

    def __init__(self, model: _core.Model) -> None:
        super().__init__()
        self._model = model

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._model.token_bytes(token_id) if self._model.has_vocab else b""
        return found


class Vocabulary:
    """The tokens of one model; any thread, also during generation."""

    def __init__(self, core: _core.Engine, model: _core.Model) -> None:
        self._core = core
        self._model = model
        self.bytes = token_bytes = _Bytes(model)

        @cache
        def token_text(token_id: int) -> str:
            return token_bytes[token_id].decode("utf-8", "replace")

        self.token_text = token_text
        """The text of a token, for traces: made when it is first asked for."""
        self._special_ids: frozenset[int] | None = None  # once they are asked for

    def tokenize(
        self,
        text: str | bytes,
        add_special: object = True,
        parse_special: object = True,
        offsets: object = False,
    ) -> list[int] | Tokenized:
        """See `Engine.tokenize`."""
        self._core.check_open()
        text = decode("text", text) if isinstance(text, bytes) else text
        ids = self.ids_of("text", text, add_special, parse_special)
        if not flag("offsets", offsets):
            return ids
        plain = self.ids_of("text", text, False, parse_special) if add_special else ids
        n_added = len(ids) - len(plain)
        n_before = next((n for n in range(n_added + 1) if ids[n : n + len(plain)] == plain), 0)
        end = len(text)
        spans = self.offsets(text, ids[n_before : n_before + len(plain)])
        return Tokenized(
            ids, [(0, 0)] * n_before + spans + [(end, end)] * (len(ids) - n_before - len(spans))
        )

    def ids_of(self, name: str, text: str, add_special: object, parse_special: object) -> list[int]:
        """The ids of *text*, the argument *name*."""
        data = encode(name, text)
        flags = flag("add_special", add_special), flag("parse_special", parse_special)
        return self._model.tokenize(data, *flags)

    def offsets(self, text: str, ids: list[int]) -> Offsets:
        """The characters of *text* that each of its *ids* stands for."""
        spans = offsets_of(text, [self.bytes[i] for i in ids])
        if spans is None:
            raise UnsupportedModel(
                "this model's vocabulary rewrites the text, so its tokens have no offsets in it; "
                "leave offsets out, or compare token_text(id) with the text"
            )
        return spans

    def detokenize(self, ids: object, skip_special_tokens: object = False) -> str:
        """See `Engine.detokenize`."""
        self._core.check_open()
        given = checked_ids("ids", ids)
        if flag("skip_special_tokens", skip_special_tokens):
            if self._special_ids is None:
                self._special_ids = frozenset(self._model.control_tokens())
            given = [one for one in given if one not in self._special_ids]
        return self._model.detokenize(given).decode("utf-8", "replace")

    def text_of(self, ids: Iterable[int]) -> str:
        """The text of *ids*, which are of this vocabulary."""
        return b"".join(map(self.bytes.__getitem__, ids)).decode("utf-8", "replace")
