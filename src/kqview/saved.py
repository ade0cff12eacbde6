"""Saved: generations on disk, as safetensors files; `stack` joins the rows of tokens.

One file per generation, written whole or not at all. A folder of them can be added to while a run
goes on, and says which ids are done when the run is started again. A file holds numpy arrays and
JSON, so other programs read it without kqview:

    ids, prompt_ids     int32, (n_tokens,) and (n_prompt,)
    rows                (n_tokens, ..., n_columns), padded with 0; rows.N for layers that differ
    positions           int32, in the shape of rows; with top_k
    hidden              (n_tokens, n_hidden_layers, n_embd)
    logits              float32, (n_tokens, n_vocab)
    logprob             float64, (n_tokens, 1)
    top_logprobs        float64, (n_tokens, 2, k): ids, and their logprobs
    discarded           int32, (n_tokens, 2): start and stop of Token.discarded
    forced              bool, (n_tokens, 1)
    n_columns           int32, (n_tokens,): columns of each row without padding; -1 without a row
    n_hidden, ...       as n_columns, of each of the other arrays
    metadata["kqview"]  JSON: schema, id, texts, capture, model, finish_reason, usage, prompt_key

An array that no token has a value for is left out; `_COLUMNS` is the table of them.

The attention of a prompt is a file of its own, in which ids are the prompt's:

    attention           (n_layers, n_heads, n_rows, n_columns); attention_layer_NNN for layers that
                        differ; positions likewise; hidden (n_hidden_layers, n_rows, n_embd); with
                        the texts of ids, the layers, heads, start

.npz holds the same, with the JSON as the array ``kqview``. That of ``kqview generate --output`` has
an array for the rows of each token, ``attention_NNNNN`` and ``positions_NNNNN``.
"""

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, cast
from urllib.parse import quote, unquote

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from kqview import json_input
from kqview.arguments import encode, to_path
from kqview.durable import WholeFile
from kqview.errors import InvalidCapture, RequestError, StateFormatError, shown
from kqview.extras import needed
from kqview.types import Capture, Finished, PromptBlock, Token, Usage
from kqview.types.token import AnyAttention, Attention, Context, Positions, add_token

if TYPE_CHECKING:
    from kqview.generation.stream import Generation, PromptAttention

SCHEMA: Final = 2
_HEADER_BYTES_MAX: Final = 100_000_000  # as safetensors has it
SUFFIX: Final = ".safetensors"

_ZIP: Final = b"PK"  # how an .npz file begins
_NAME_BYTES: Final = 255  # longest name of a file on common file systems

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
    return padded([None if t.attention is None else t.rows for t in tokens], pad)


def padded(rows: Sequence[Array | None], pad: float = 0.0) -> Array:
    """As `stack`, of any arrays that differ in their last axis alone."""
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


@dataclass(frozen=True, slots=True)
class _Taken:
    """A generation of which only tokens are known."""

    prompt_ids: list[int]
    text: str
    usage: Usage
    finish_reason: None = None
    model: None = None


# ---- what is kept of each token


@dataclass(frozen=True, slots=True)
class _TokenColumn:
    """One value of a token, and the two arrays of a file that hold it for all tokens.

    The values have any number of axes, of which only the last one may differ from token to token.

    Attributes:
        attribute: The value in a Token.
        name: Array of the values, padded at the end of the last axis.
        widths: Array of the length of that axis for each token; -1 for a token without a value.
        to_array: Makes an array of a value that is neither that nor a tuple of arrays; None for no
            value.
        from_array: Makes the value of the array.
    """

    attribute: str
    name: str
    widths: str
    to_array: Callable[[Any], Any] = lambda value: value
    from_array: Callable[[Any], Any] = lambda array: array

    def written(self, tokens: Sequence[Token]) -> dict[str, Array]:
        """The arrays of a file; none if no token has a value."""
        given = [getattr(token, self.attribute) for token in tokens]
        values = [None if value is None else self.to_array(value) for value in given]
        first = next((value for value in values if value is not None), None)
        if first is None:
            return {}
        is_tuple = isinstance(first, tuple)
        firsts = [value[0] if is_tuple and value is not None else value for value in values]
        widths = np.array([-1 if one is None else one.shape[-1] for one in firsts], np.int32)
        if not is_tuple:
            return {self.name: padded(values), self.widths: widths}
        n_layers = len(cast("tuple[Array, ...]", first))
        layers = {
            f"{self.name}.{i}": padded([None if value is None else value[i] for value in values])
            for i in range(n_layers)
        }
        return {**layers, self.widths: widths}


_COLUMNS: Final = (
    _TokenColumn("attention", "rows", "n_columns"),
    _TokenColumn("attention_positions", "positions", "n_columns"),
    _TokenColumn("hidden", "hidden", "n_hidden"),
    _TokenColumn("logits", "logits", "n_logits"),
    _TokenColumn(
        "logprob", "logprob", "n_logprob", lambda value: np.array([value]), np.ndarray.item
    ),
    _TokenColumn(
        "top_logprobs", "top_logprobs", "n_top_logprobs",
        lambda top: np.array(top, np.float64).reshape(-1, 2).T,
        lambda array: [(int(i), logprob) for i, logprob in array.T.tolist()],
    ),
    _TokenColumn(
        "discarded", "discarded", "n_discarded",
        lambda gone: np.array([gone.start, gone.stop], np.int32) if gone else None,
        lambda array: range(*array.tolist()),
    ),
    _TokenColumn(
        "forced", "forced", "n_forced",
        lambda forced: np.array([True]) if forced else None,
        np.ndarray.item,
    ),
)  # fmt: skip


class _TokenValues(NamedTuple):
    """The values of a column for all tokens.

    Attributes:
        arrays: ``(n_tokens, ..., width)``, padded; or a tuple of such arrays.
        widths: int32 ``(n_tokens,)``: the last axis of each value; -1 for a token without one.
    """

    arrays: Array | tuple[Array, ...]
    widths: NDArray[np.int32]

    def of(self, i: int) -> Any:
        """The value of token *i*; None if it has none."""
        n = int(self.widths[i])
        if n < 0:
            return None
        if isinstance(self.arrays, tuple):
            return tuple(array[i, ..., :n] for array in self.arrays)
        return self.arrays[i, ..., :n]


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
        model: Name and ``architecture`` of the model, and the ``fingerprint`` of its files, but of
            files that a command wrote; empty of tokens and of the attention of a prompt.
        error: What ended the generation early, as text; None if nothing did.
        prompt_attention: All rows of the prompt as one block, if that is what was saved; otherwise
            None.
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
    model: Mapping[str, str]
    error: str | None
    _values: Mapping[str, _TokenValues] = field(repr=False)
    _column_texts: Mapping[int, str] = field(repr=False)
    prompt_attention: PromptBlock | None = None

    @property
    def rows(self) -> AnyAttention:
        """Attention, padded with 0; None without any.

        ``(n_tokens, n_layers, n_heads, n_columns)`` or as the capture reduced it; a tuple with one
        such array per layer if these differ in heads.
        """
        return self._arrays("rows")

    @property
    def n_columns(self) -> NDArray[np.int32]:
        """Columns of each token's row without the padding, int32 ``(n_tokens,)``; -1 without."""
        rows = self._values.get("rows")
        return np.full(len(self.ids), -1, np.int32) if rows is None else rows.widths

    @property
    def positions(self) -> Array | tuple[Array, ...] | None:
        """With ``top_k``: positions of the values, int32 in the shape of `rows`; otherwise None."""
        return self._arrays("positions")

    @property
    def hidden(self) -> Array | None:
        """With ``hidden``: ``(n_tokens, n_hidden_layers, n_embd)``; otherwise None.

        0 for tokens without, whose ``hidden`` in `tokens` is None.
        """
        return self._arrays("hidden")

    @property
    def logits(self) -> NDArray[np.float32] | None:
        """With ``vocab_logits``: float32 ``(n_tokens, n_vocab)``; otherwise None.

        0 for tokens without, whose ``logits`` in `tokens` are None.
        """
        return self._arrays("logits")

    def _arrays(self, name: str) -> Any:
        values = self._values.get(name)
        return None if values is None else values.arrays

    @property
    def kind(self) -> str | None:
        """Kind of the rows; None without capture."""
        return self.capture.kind if self.capture is not None else None

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layers, in the order of rows."""
        return tuple(self.capture.layers or ()) if self.capture is not None else ()

    def tokens(self) -> list[Token]:
        """The tokens as `generate` handed them out; their arrays are views of those here.

        ``n_removed`` is 0: tokens that mods took back are not among them.
        """
        texts = {i: text.encode() for i, text in self._column_texts.items()}
        context = Context(
            list(self.prompt_ids), len(self.prompt_ids), max(self.heads, default=-1) + 1, texts
        )
        context.ids += self.ids
        made: list[Token] = []
        for i, token_id in enumerate(self.ids):
            token = Token(token_id, self.texts[i], i, capture=self.capture)
            token._context = context  # pyright: ignore[reportPrivateUsage]
            token._n_before = context.n_prompt + i  # pyright: ignore[reportPrivateUsage]
            for column in _COLUMNS:
                values = self._values.get(column.name)
                value = None if values is None else values.of(i)
                if value is not None:
                    setattr(token, column.attribute, column.from_array(value))
            made.append(token)
        return made


# ---- writing


def save(
    path: str | os.PathLike[str],
    generation: "Generation | Finished | PromptAttention | Sequence[Token]",
    tokens: Sequence[Token] | None = None,
) -> Path:
    """Save a generation with all arrays and logprobs of its tokens; needs safetensors.

    Not saved of a generation: the rows of the prompt (``prompt_attention``, which you may save by
    itself), the trace, and the parts of a chat's reply, which are made from the text.

    Args:
        path: A file ending in ".safetensors", which is replaced; or a folder, made if it is
            missing, to which a file named after the generation's id is added. The attention of a
            prompt goes to a file ending in ".safetensors" or ".npz".
        generation: A Generation, whose tokens are taken, or a result of `Engine.map`; or only
            tokens of one. Or the result of `Engine.attend`, whose blocks are taken. All of its
            attention is in memory at once.
        tokens: Tokens of *generation* that you have taken yourself.

    Returns:
        The file. It appears complete or not at all, even if the machine stops midway.

    Raises:
        RequestError: Tokens of the generation were taken already and are not in *tokens*, or
            *tokens* has those of another one. *path* ends in another suffix, or is a folder and
            the generation's id is no name of a file. No token is taken then.
        KqviewError: safetensors is not installed. Also what iterating the generation raises.
        OSError: The file cannot be written; an old file stays.
    """
    from kqview.generation.stream import PromptAttention

    if isinstance(generation, PromptAttention):
        target = _file(path, (SUFFIX, ".npz"), "attention of a prompt")
        capture = generation.capture
        rows = positions = None
        if capture.top_k is not None and capture.layers:
            rows, positions = generation.top_k()
        elif capture.layers:
            rows = generation.array()
        return save_prompt(target, generation, rows, positions)
    safetensors = require_safetensors("save")
    if isinstance(generation, Sequence):
        target = _file(path, (SUFFIX,), "a list of tokens")
        content = _content("", *_taken(generation), None)
    elif isinstance(generation, Finished):
        target = _target(path, generation.id)
        error = None if generation.error is None else str(generation.error)
        content = _content(generation.id, generation.tokens, generation, error)
    elif not hasattr(generation, "request_id"):
        raise _no_generation(generation)
    else:
        name = generation.request_id
        target = _target(path, name)
        content = _content(name, _tokens_of(generation, tokens), generation, None)
    arrays, metadata = content
    target.parent.mkdir(parents=True, exist_ok=True)
    data = safetensors.save(arrays, {"kqview": json.dumps(metadata)})
    with WholeFile(target) as file:
        file.stream.write(data)
    return target


def save_prompt(
    path: Path, of: "PromptAttention", rows: Attention | None, positions: Positions | None
) -> Path:
    """Write the *rows* that were taken of a prompt, as `save` does; see `write_arrays`."""
    arrays: dict[str, Array] = {}
    capture = of.capture
    hidden = of.hidden if len(capture.hidden) > 0 else None
    for name, values in (("attention", rows), ("positions", positions), ("hidden", hidden)):
        if isinstance(values, tuple):
            arrays |= {f"{name}_layer_{i:03d}": one for i, one in enumerate(values)}
        elif values is not None:
            arrays[name] = values
    # Blocks that were taken before are not among the rows.
    start = len(of.column_ids) - next(iter(arrays.values())).shape[-2]
    facts = {"ids": of.column_ids, "layers": of.layers, "heads": of.heads, "start": start}
    arrays |= {name: np.array(value, np.int32) for name, value in facts.items()}
    texts = of.column_texts
    column_texts = dict(zip(of.column_ids, texts, strict=True))
    taken = _Taken(of.column_ids, "", Usage())
    metadata = {
        **_facts("", [], taken, None, capture, of.heads, column_texts), "start": start
    }  # fmt: skip
    named = {"texts": texts, "kind": capture.kind, "kqview": json.dumps(metadata)}
    write_arrays(path, "attention", arrays, named)
    return path


def _file(path: str | os.PathLike[str], suffixes: tuple[str, ...], what: str) -> Path:
    """The file for *what*, which has no id to be named by in a folder."""
    target = to_path("path", path)
    if target.suffix not in suffixes or target.is_dir():
        raise RequestError(
            f"path is {str(path)!r}, but {what} needs a file of your own name; end it in "
            f"{' or '.join(suffixes)}",
            parameter="path",
        )
    return target


def _no_generation(value: object) -> RequestError:
    return RequestError(
        f"generation is {shown(value)}; pass a Generation, a result of map or attend, or a list of "
        "tokens",
        parameter="generation",
    )


def _taken(tokens: Sequence[object]) -> tuple[list[Token], _Taken]:
    """*tokens* but those that mods took back, and what they know of their generation."""
    taken: list[Token] = []
    for token in tokens:
        if not isinstance(token, Token):
            raise _no_generation(tokens)
        add_token(taken, token)
    if not taken:
        raise _no_generation(tokens)
    first = taken[0]
    if any(token.index != first.index + i for i, token in enumerate(taken)):
        raise RequestError(
            "generation is a list with tokens left out; pass tokens that follow each other",
            parameter="generation",
        )
    prompt_ids = first.ids_before  # columns of later rows are counted from it
    text = "".join(token.text for token in taken)
    usage = Usage(prompt_tokens=len(prompt_ids), completion_tokens=len(taken))
    return taken, _Taken(prompt_ids, text, usage)


def _target(path: str | os.PathLike[str], name: str) -> Path:
    """The file for the generation *name*."""
    target = to_path("path", path)
    if target.suffix == SUFFIX and not target.is_dir():
        return target
    # A folder may be called "run.2", and one that exists may be called anything.
    if target.suffix[1:2].isalpha() and not target.is_dir():
        raise RequestError(
            f"path ends in {target.suffix}, but a generation is saved as {SUFFIX}; use that "
            "suffix, or make the folder first if it is one",
            parameter="path",
        )
    return target / file_name(name)


def _tokens_of(generation: "Generation", taken: Sequence[Token] | None) -> list[Token]:
    tokens = [*(taken or ())]
    ids = generation.tokens
    if [token.id for token in tokens] != ids:
        # Those that mods took back may be among them.
        tokens: list[Token] = []
        for token in taken or ():
            add_token(tokens, token)
        if generation.finish_reason is not None:
            del tokens[len(tokens) - generation.n_removed :]
    is_other = bool(tokens) and tokens[0].column_ids != generation.prompt_ids
    if is_other or [token.id for token in tokens] != ids:
        raise RequestError(
            f"{len(ids)} tokens of {generation.request_id} were taken already; pass them as tokens"
            if taken is None
            else f"tokens has {len(tokens)} tokens that are not the {len(ids)} taken of "
            f"{generation.request_id}; pass those",
            parameter="tokens",
        )
    for token in generation:
        add_token(tokens, token)
    del tokens[len(generation.tokens) :]  # taken back at the end
    return tokens


def file_name(name: str) -> str:
    """Name of the file of a generation in a folder; `unquote` reads it back.

    Raises:
        RequestError: *name* has surrogates, or is too long.
    """
    encode("the id", name)
    quoted = quote(name, safe=" ").replace(".", "%2E") + SUFFIX
    if len(quoted) > _NAME_BYTES:
        raise RequestError(
            f"the id {shown(name)} makes a file name of {len(quoted)} bytes, but at most "
            f"{_NAME_BYTES} are possible; save to a file of your own name that ends in {SUFFIX}, "
            "or use shorter ids",
            parameter="path",
        )
    return quoted


def _content(
    name: str,
    tokens: Sequence[Token],
    generation: "Generation | Finished | _Taken",
    error: str | None,
) -> tuple[dict[str, Array], dict[str, Any]]:
    prompt_ids = generation.prompt_ids
    arrays: dict[str, Array] = {
        "ids": np.array([token.id for token in tokens], np.int32),
        "prompt_ids": np.array(prompt_ids, np.int32),
    }
    for column in _COLUMNS:
        arrays |= column.written(tokens)
    capture = next((token.capture for token in tokens if token.capture is not None), None)
    last = tokens[-1] if tokens else None
    texts = dict(zip(last.column_ids, last.column_texts, strict=True)) if last else {}
    heads = last.heads if last else ()
    shown = [token.text for token in tokens]
    return arrays, _facts(name, shown, generation, error, capture, heads, texts)


def _facts(
    name: str,
    texts: Sequence[str],
    generation: "Generation | Finished | _Taken",
    error: str | None,
    capture: Capture | None,
    heads: Sequence[int],
    column_texts: Mapping[int, str],
    *,
    has_fingerprint: bool = True,
) -> dict[str, Any]:
    model, named = generation.model, dict[str, str]()
    if model is not None and not isinstance(generation, _Taken):
        named = {"name": model.name, "architecture": model.architecture}
        if has_fingerprint:
            named["fingerprint"] = generation.fingerprint()
    return {
        "schema": SCHEMA,
        "id": name,
        "prompt_key": getattr(generation, "prompt_key", None),
        "texts": texts,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "usage": asdict(generation.usage),
        "error": error,
        "capture": None if capture is None else asdict(capture),
        "heads": heads,
        "model": named,
        "column_texts": column_texts,
    }


def streamed_metadata(
    texts: Sequence[str],
    generation: "Generation",
    capture: Capture,
    column_texts: Mapping[int, str],
) -> str:
    """The JSON of a file into which the rows of *generation* went one by one."""
    name = generation.request_id
    heads = tuple(range(generation.model.n_head) if capture.heads is None else capture.heads)
    # Without a fingerprint, for which a command would read the whole model.
    return json.dumps(
        _facts(
            name, texts, generation, None, capture, heads, column_texts, has_fingerprint=False
        )
    )  # fmt: skip


def write_arrays(
    path: Path,
    main: str,
    arrays: Mapping[str, Array],
    texts: Mapping[str, str | Sequence[str]],
) -> None:
    """Write arrays as .npz or .safetensors, or the one of them named *main* as .npy.

    Args:
        path: The file; what has none of these suffixes, such as ``/dev/stdout``, gets .npz.
        main: Name of the array that an .npy file holds.
        arrays: Arrays by name.
        texts: Strings by name: string arrays in .npz, JSON in the metadata of .safetensors, where
            ``kqview`` is JSON already.

    Raises:
        KqviewError: safetensors is needed, but not installed.
        OSError: The file cannot be written; an old file stays.
    """
    suffix = path.suffix.lower()
    with WholeFile(path) as file:
        if suffix == ".npy":
            npy_format.write_array(file.stream, arrays[main], allow_pickle=False)
        elif suffix == ".safetensors":
            metadata = {
                name: text if name == "kqview" else json.dumps(text, ensure_ascii=False)
                for name, text in texts.items()
            }
            whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
            file.stream.write(require_safetensors(suffix).save(whole, metadata))
        else:
            strings = {name: np.array(text, np.str_) for name, text in texts.items()}
            members: dict[str, Any] = {**arrays, **strings}
            np.savez(file.stream, **members)


def require_safetensors(name: str) -> Any:
    """Import safetensors.numpy for the function or file *name*.

    Raises:
        KqviewError: safetensors is not installed.
    """
    return needed("safetensors.numpy", f"{name} needs", 'run pip install "kqview[save]"')


# ---- reading


def load(path: str | os.PathLike[str]) -> Saved:
    """Read a file that `save` wrote, or `kqview generate` or `attend` with ``--output``.

    For a folder of them use SavedFolder.

    Raises:
        StateFormatError: It is not such a file, or one of a later version.
        RequestError: *path* is a folder.
        OSError: The file cannot be read.
        KqviewError: It is .safetensors, and safetensors is not installed.
    """
    file = to_path("path", path)
    if file.is_dir():
        raise RequestError(f"{file} is a folder; use kqview.SavedFolder(path)", parameter="path")
    data = file.read_bytes()
    library = None if data.startswith(_ZIP) else require_safetensors("load")
    try:
        arrays: dict[str, Array]
        if library is None:
            with np.load(io.BytesIO(data)) as members:
                arrays = {name: members[name] for name in members.files}
            metadata = json_input.loads(str(arrays["kqview"]))
        else:
            arrays = library.load(data)
            metadata = _metadata(io.BytesIO(data))
        if metadata["schema"] != SCHEMA:
            raise StateFormatError(
                f"{file} has schema {metadata['schema']}, this version reads {SCHEMA}; "
                "save it again, or update kqview"
            )
        return _saved(arrays, metadata)
    except StateFormatError:
        raise
    except Exception as error:  # safetensors raises classes of its own for damaged files
        raise StateFormatError(
            f"{file} is not a generation that kqview.save wrote: {error}"
        ) from error


def _metadata(file: BinaryIO) -> dict[str, Any]:
    """What `save` says of the arrays of *file*, which is read no further than that."""
    n_header = int.from_bytes(file.read(8), "little")
    if n_header > _HEADER_BYTES_MAX:
        raise ValueError(f"its header would have {n_header} bytes")
    header = json_input.loads(file.read(n_header))
    return json_input.loads(header["__metadata__"]["kqview"])


def _saved(arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> Saved:
    capture = metadata["capture"]
    is_prompt = "start" in metadata
    prompt_ids = arrays["ids" if is_prompt else "prompt_ids"].tolist()
    ids: list[int] = [] if is_prompt else arrays["ids"].tolist()
    if "attention_00000" in arrays:
        arrays = _joined(arrays, len(ids))
    if capture is not None:
        known = {one.name for one in fields(Capture)}
        capture = Capture(**{name: value for name, value in capture.items() if name in known})
    return Saved(
        prompt_ids=prompt_ids,
        ids=ids,
        usage=Usage(**metadata["usage"]),
        capture=capture,
        heads=tuple(metadata["heads"]),
        **{name: metadata[name] for name in _AS_WRITTEN},
        _values={
            column.name: _TokenValues(values, arrays[column.widths])
            for column in _COLUMNS
            if not is_prompt and (values := _array(arrays, column.name)) is not None
        },
        _column_texts={int(key): text for key, text in metadata["column_texts"].items()},
        prompt_attention=_block(arrays, metadata["start"]) if is_prompt else None,
    )


_AS_WRITTEN: Final = ("id", "texts", "text", "finish_reason", "model", "error")


def _block(arrays: Mapping[str, Array], start: int) -> PromptBlock:
    rows, hidden = _array(arrays, "attention"), arrays.get("hidden")
    first = rows[0] if isinstance(rows, tuple) else hidden if rows is None else rows
    if first is None:
        raise KeyError("attention")
    return PromptBlock(start, first.shape[-2], rows, _array(arrays, "positions"), hidden)


def _array(arrays: Mapping[str, Array], name: str) -> Array | tuple[Array, ...] | None:
    """The array, or those of layers that differ; None if there is neither."""
    if name in arrays:
        return arrays[name]
    for form in (f"{name}.{{}}", f"{name}_layer_{{:03d}}"):
        layers = takewhile(arrays.__contains__, map(form.format, count()))
        if found := tuple(arrays[one] for one in layers):
            return found
    return None


def _joined(arrays: Mapping[str, Array], n_tokens: int) -> dict[str, Array]:
    """The arrays of rows that were written one by one, as `save` writes them."""
    tokens = [
        Token(
            0, "", i, attention=_array(arrays, f"attention_{i:05d}"),
            attention_positions=_array(arrays, f"positions_{i:05d}"),
        )
        for i in range(n_tokens)
    ]  # fmt: skip
    found = dict(arrays)
    for column in _COLUMNS:
        found |= column.written(tokens)
    return found


class SavedFolder(Mapping[str, Saved]):
    """The generations in a folder by id; each is read when it is asked for.

    Pass it as ``skip`` to `Engine.map` to go on with a run that was interrupted: prompts are found
    by their content, or by their ids if they have any.

    Args:
        path: A folder to which `save` adds; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = to_path("path", path)

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

    def prompt_keys(self) -> dict[str, str | None]:
        """Digest of the prompt of each generation by its id, as `Engine.map` compares it.

        None for those that `map` did not make. Reads the head of each file.

        Raises:
            StateFormatError: A file is not one that `save` wrote.
            OSError: A file cannot be read.
        """
        found: dict[str, str | None] = {}
        for id in self:
            path = self.path / file_name(id)
            try:
                with path.open("rb") as file:
                    found[id] = _metadata(file).get("prompt_key")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise StateFormatError(
                    f"{path} is not a generation that kqview.save wrote: {error!r}"
                ) from error
        return found
