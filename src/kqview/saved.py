"""Saved: generations on disk, as safetensors files; `stack` joins the rows of tokens.

One file per generation, written whole or not at all. A folder of them can be added to while a run
goes on, and says which ids are done when the run is started again. A file holds numpy arrays and
JSON, so other programs read it without kqview:

    ids, prompt_ids     int32, (n_tokens,) and (n_prompt,)
    rows                (n_tokens, ..., n_columns), padded with 0; rows.N for layers that differ
    positions           int32, in the shape of rows; with top_k
    hidden              float32, (n_tokens, n_hidden_layers, n_embd)
    n_columns           int32, (n_tokens,): columns of each row without padding; -1 without a row
    metadata["kqview"]  JSON: schema, id, texts, capture, model, finish_reason, usage
"""

import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from kqview.errors import InvalidCapture, KqviewError, RequestError, StateFormatError
from kqview.state.durable import WholeFile
from kqview.types import Capture, Finished, ModelInfo, Token, Usage
from kqview.types.token import Context, add_token

SCHEMA: Final = 1
SUFFIX: Final = ".safetensors"

Array = NDArray[Any]


def stack(tokens: Sequence[Token], pad: float = 0.0) -> Array:
    """Join the attention of *tokens* into one array.

    Rows grow with the context; shorter ones are padded at their end. A copy, in memory of its own.

    Args:
        tokens: Tokens of one generation, at least one with attention.
        pad: Value of columns that a row does not have, and of the rows of tokens without attention.

    Returns:
        ``(n_tokens, ...)`` with the axes of `Token.rows`, its last one as long as the longest row;
        dtype as captured.

    Raises:
        InvalidCapture: No token has attention, or layers differ in heads.
        RequestError: The tokens are of different captures.
    """
    return _padded([None if t.attention is None else t.rows for t in tokens], pad)


def _padded(rows: Sequence[Array | None], pad: float = 0.0) -> Array:
    present = [row for row in rows if row is not None]
    if not present:
        raise InvalidCapture("no token has attention; pass capture= to generate")
    first = present[0]
    for row in present:
        if (row.shape[:-1], row.dtype) != (first.shape[:-1], first.dtype):
            raise RequestError(
                f"the tokens have rows of {first.dtype} {first.shape} and {row.dtype} {row.shape}; "
                "use tokens of one generation",
                parameter="tokens",
            )
    n_columns = max(row.shape[-1] for row in present)
    whole = np.full((len(rows), *first.shape[:-1], n_columns), pad, first.dtype)
    for i, row in enumerate(rows):
        if row is not None:
            whole[i, ..., : row.shape[-1]] = row
    return whole


class Running(Protocol):
    """A Generation: iterating takes its tokens."""

    def __iter__(self) -> Iterator[Token]: ...
    def fingerprint(self) -> str: ...
    @property
    def request_id(self) -> str: ...
    @property
    def prompt_ids(self) -> list[int]: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> Any: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def model(self) -> ModelInfo: ...


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A generation as `load` returns it. Its arrays belong to the caller.

    Attributes:
        id: Id of the generation.
        prompt_ids: Ids of the prompt.
        ids: Ids that were generated.
        texts: Text of each of them; they join to the exact output.
        text: The output, up to the stop sequence if one was found.
        finish_reason: As `Generation.finish_reason`.
        usage: Token counts and seconds.
        capture: What was captured, with its layers; None without capture.
        heads: Heads of each layer, in the order of rows.
        rows: Attention, ``(n_tokens, n_layers, n_heads, n_columns)`` or as the capture reduced it,
            padded with 0; a tuple with one such array per layer if these differ in heads. None
            without attention.
        n_columns: Columns of each token's row without the padding, ``(n_tokens,)``; -1 without.
        positions: With ``top_k``: positions of the values. Otherwise None.
        hidden: With ``hidden``: ``(n_tokens, n_hidden_layers, n_embd)``. Otherwise None.
        model: Name and ``architecture`` of the model, and the ``fingerprint`` of its files.
        error: What ended the generation early, as text; None if nothing did.
    """

    id: str
    prompt_ids: list[int]
    ids: list[int]
    texts: list[str]
    text: str
    finish_reason: str | None
    usage: Usage
    capture: Capture | None
    heads: tuple[int, ...]
    rows: Array | tuple[Array, ...] | None
    n_columns: NDArray[np.int32]
    positions: Array | tuple[Array, ...] | None
    hidden: NDArray[np.float32] | None
    model: Mapping[str, str]
    error: str | None
    _column_texts: Mapping[int, str] = field(default_factory=dict[int, str], repr=False)

    @property
    def kind(self) -> str | None:
        """Kind of the rows; None without capture."""
        return self.capture.kind if self.capture is not None else None

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layers, in the order of rows."""
        return tuple(self.capture.layers or ()) if self.capture is not None else ()

    def tokens(self) -> list[Token]:
        """The tokens as `generate` handed them out; their arrays are views of `rows`."""
        texts = {i: text.encode() for i, text in self._column_texts.items()}
        context = Context(self.prompt_ids, max(self.heads, default=-1) + 1, texts)
        context.ids += self.ids
        made: list[Token] = []
        for i, token_id in enumerate(self.ids):
            token = Token(token_id, self.texts[i], i, capture=self.capture)
            token._context = context  # pyright: ignore[reportPrivateUsage]
            token._n_before = context.n_prompt + i  # pyright: ignore[reportPrivateUsage]
            n = int(self.n_columns[i])
            if n >= 0:
                token.attention = _row_of(self.rows, i, n)
                token.attention_positions = _row_of(self.positions, i, n)
            token.hidden = None if self.hidden is None else self.hidden[i]
            made.append(token)
        return made


def _row_of(arrays: Any, i: int, n: int) -> Any:
    if isinstance(arrays, tuple):
        return tuple(_row_of(layer, i, n) for layer in arrays)  # pyright: ignore[reportUnknownVariableType]
    return None if arrays is None else arrays[i, ..., :n]


# ---- writing


def save(
    path: str | os.PathLike[str],
    generation: Running | Finished,
    tokens: Sequence[Token] | None = None,
) -> Path:
    """Save a generation with its attention; needs safetensors.

    Args:
        path: A file ending in ".safetensors", which is replaced; or a folder, made if it is
            missing, to which a file named after the generation's id is added.
        generation: A Generation, whose tokens are taken, or a result of `Engine.map`. All of its
            attention is in memory at once.
        tokens: Tokens of *generation* that you have taken yourself.

    Returns:
        The file. It appears complete or not at all, even if the machine stops midway.

    Raises:
        RequestError: Tokens of the generation were taken already and are not in *tokens*.
        KqviewError: safetensors is not installed. Also what iterating the generation raises.
        OSError: The file cannot be written; an old file stays.
    """
    safetensors = require_safetensors("save")
    error = None
    if isinstance(generation, Finished):
        name, tokens = generation.id, generation.tokens
        error = None if generation.error is None else str(generation.error)
    else:
        name, tokens = generation.request_id, _tokens_of(generation, tokens)
    arrays, metadata = _content(name, tokens, generation, error)
    target = Path(path)
    if target.suffix != SUFFIX:
        target.mkdir(parents=True, exist_ok=True)
        target = target / file_name(name)
    data = safetensors.save(arrays, {"kqview": json.dumps(metadata, ensure_ascii=False)})
    with WholeFile(target) as file:
        file.stream.write(data)
    return target


def _tokens_of(generation: Running, taken: Sequence[Token] | None) -> list[Token]:
    tokens = list(taken or ())
    if taken is None or generation.finish_reason is None:
        if [token.id for token in tokens] != generation.tokens:
            raise RequestError(
                f"{len(generation.tokens)} tokens of {generation.request_id} were taken already; "
                "pass them as tokens",
                parameter="tokens",
            )
        for token in generation:
            add_token(tokens, token)
    return tokens


def file_name(name: str) -> str:
    """Name of the file of a generation in a folder; `unquote` reads it back."""
    return quote(name, safe=" ").replace(".", "%2E") + SUFFIX


def _content(
    name: str, tokens: Sequence[Token], generation: Running | Finished, error: str | None
) -> tuple[dict[str, Array], dict[str, Any]]:
    prompt_ids = generation.prompt_ids
    arrays: dict[str, Array] = {
        "ids": np.array([token.id for token in tokens], np.int32),
        "prompt_ids": np.array(prompt_ids, np.int32),
        "n_columns": np.array([_width(token) for token in tokens], np.int32),
    }
    _add(arrays, "rows", [token.attention for token in tokens])
    _add(arrays, "positions", [token.attention_positions for token in tokens])
    if tokens and tokens[0].hidden is not None:
        arrays["hidden"] = np.stack([np.asarray(token.hidden) for token in tokens])
    capture = next((token.capture for token in tokens if token.capture is not None), None)
    last = tokens[-1] if tokens else None
    texts = dict(zip(last.column_ids, last.column_texts, strict=True)) if last else {}
    return arrays, {
        "schema": SCHEMA,
        "id": name,
        "texts": [token.text for token in tokens],
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "usage": asdict(generation.usage),
        "error": error,
        "capture": None if capture is None else asdict(capture),
        "heads": last.heads if last else (),
        "column_texts": texts,
        "model": {
            "name": generation.model.name,
            "architecture": generation.model.architecture,
            "fingerprint": generation.fingerprint(),
        },
    }


def _width(token: Token) -> int:
    rows = token.attention
    if rows is None:
        return -1
    return (rows[0] if isinstance(rows, tuple) else rows).shape[-1]


def _add(arrays: dict[str, Array], name: str, values: Sequence[Any]) -> None:
    present = [value for value in values if value is not None]
    if not present:
        return
    if isinstance(present[0], tuple):
        for i in range(len(present[0])):  # pyright: ignore[reportUnknownArgumentType]
            arrays[f"{name}.{i}"] = _padded([None if v is None else v[i] for v in values])
    else:
        arrays[name] = _padded(values)


def require_safetensors(name: str) -> Any:
    """Import safetensors.numpy for the function or file *name*.

    Raises:
        KqviewError: safetensors is not installed.
    """
    try:
        return importlib.import_module("safetensors.numpy")
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "safetensors":
            raise
        raise KqviewError(
            f'{name} needs safetensors, which is not installed; run pip install "kqview[save]"'
        ) from missing


# ---- reading


def load(path: str | os.PathLike[str]) -> Saved:
    """Read a file that `save` wrote; for a folder of them use SavedFolder.

    Raises:
        StateFormatError: It is not such a file, or one of a later version.
        RequestError: *path* is a folder.
        OSError: The file cannot be read.
        KqviewError: safetensors is not installed.
    """
    library = require_safetensors("load")
    if Path(path).is_dir():
        raise RequestError(
            f"{os.fspath(path)} is a folder; use kqview.SavedFolder(path)", parameter="path"
        )
    data = Path(path).read_bytes()
    try:
        arrays: dict[str, Array] = library.load(data)
        n_header = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + n_header])
        metadata = json.loads(header["__metadata__"]["kqview"])
        if metadata["schema"] > SCHEMA:
            raise StateFormatError(
                f"{os.fspath(path)} has schema {metadata['schema']}, this version reads up to "
                f"{SCHEMA}; update kqview"
            )
        return _saved(arrays, metadata)
    except StateFormatError:
        raise
    except Exception as error:  # safetensors raises classes of its own for damaged files
        raise StateFormatError(
            f"{os.fspath(path)} is not a generation that kqview.save wrote: {error}"
        ) from error


def _saved(arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> Saved:
    capture = metadata["capture"]
    if capture is not None:
        known = {one.name for one in fields(Capture)}
        capture = Capture(**{name: value for name, value in capture.items() if name in known})
    return Saved(
        id=metadata["id"],
        prompt_ids=arrays["prompt_ids"].tolist(),
        ids=arrays["ids"].tolist(),
        texts=metadata["texts"],
        text=metadata["text"],
        finish_reason=metadata["finish_reason"],
        usage=Usage(**metadata["usage"]),
        capture=capture,
        heads=tuple(metadata["heads"]),
        rows=_array(arrays, "rows"),
        n_columns=arrays["n_columns"],
        positions=_array(arrays, "positions"),
        hidden=arrays.get("hidden"),
        model=metadata["model"],
        error=metadata["error"],
        _column_texts={int(key): text for key, text in metadata["column_texts"].items()},
    )


def _array(arrays: Mapping[str, Array], name: str) -> Array | tuple[Array, ...] | None:
    if name in arrays:
        return arrays[name]
    n = sum(re.fullmatch(rf"{name}\.\d+", key) is not None for key in arrays)
    return tuple(arrays[f"{name}.{i}"] for i in range(n)) or None


class SavedFolder(Mapping[str, Saved]):
    """The generations in a folder by id; each is read when it is asked for.

    Pass it as ``skip`` to `Engine.map` to go on with a run that was interrupted.

    Args:
        path: A folder to which `save` adds; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __getitem__(self, id: str) -> Saved:
        try:
            return load(self.path / file_name(id))
        except FileNotFoundError:
            raise KeyError(id) from None

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and (self.path / file_name(id)).is_file()

    def __iter__(self) -> Iterator[str]:
        if self.path.is_dir():
            names = sorted(entry.name for entry in self.path.iterdir() if entry.suffix == SUFFIX)
            yield from (unquote(name.removesuffix(SUFFIX)) for name in names)

    def __len__(self) -> int:
        return sum(1 for _ in self)
