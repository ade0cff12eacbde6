"""All commands of ``kqview``; their errors become one line on stderr and an exit status."""

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from kqview.cli.exit_status import BROKEN_PIPE, REPORTED, print_error, reported
from kqview.cli.terminal import discard_stdout

_NAME: Final = "kqview.command"  # in the context: the command that runs
_MARKUP: Final = "markdown"

_ALIASES: Final[Mapping[str, str]] = {
    "ctx-size": "ctx",
    "gpu-layers": "ngl",
    "n-gpu-layers": "ngl",
    "predict": "max-tokens",
    "n-predict": "max-tokens",
    "max-new-tokens": "max-tokens",
    "temp": "temperature",
    "repetition-penalty": "repeat-penalty",
    "logprobs": "top-logprobs",
    "system-prompt": "system",
    "hub": "hf",
    "kind": "capture",
    "save": "output",
    "png": "output",
}
"""Names of options that llama.cpp, transformers and earlier commands have -> ours."""


def _own_name(name: str) -> str:
    """*name* of an option as the commands here call it."""
    return _ALIASES.get(name, name)


_PANELS: Final = ("Text and its attention", "Models and measurements", "Servers")
_TEXT, _ABOUT, _SERVE = _PANELS
_COMMANDS: Final[Mapping[str, tuple[str, str, str]]] = {
    "demo": (
        _TEXT, "demo_command",
        "Generate with the bundled demo model and draw what each new token attends to.",
    ),
    "generate": (
        _TEXT, "generate_command",
        "Continue a text; with --capture or --output, capture its attention.",
    ),
    "chat": (_TEXT, "chat_command", "Chat with a model."),
    "attend": (
        _TEXT, "attend_command",
        "Show what each token of a text attends to, without generating.",
    ),
    "embed": (
        _TEXT, "embed_command", "Compute the embedding of texts: a line of numbers for each.",
    ),
    "score": (
        _TEXT, "score_command",
        "Show how probable each token of a text is, and the perplexity of the text.",
    ),
    "extract": (
        _TEXT, "extract_command",
        "Write the attention, hidden states, scores or texts of many documents to a folder.",
    ),
    "calibrate": (
        _ABOUT, "calibrate_command",
        "Find the attention heads of a model that do a task, and write them to a head file.",
    ),
    "info": (
        _ABOUT, "info_command",
        "Show this build and its devices; or the shape, vocabulary and capture size of a model.",
    ),
    "tokenize": (
        _ABOUT, "info_command", "Show the tokens of a text, one per line: id and text.",
    ),
    "bench": (
        _ABOUT, "bench_command", "Measure what capturing attention costs on this machine.",
    ),
    "convert-classifier": (
        _ABOUT, "convert_command",
        "Convert a BertForSequenceClassification of Hugging Face to GGUF, with its whole head.",
    ),
    "state": (_ABOUT, "state_command", "Check and show state files of saved slots."),
    "serve": (
        _SERVE, "serve_command",
        "Serve text with the attention of every token over HTTP and WebSockets.",
    ),
    "ingest": (
        _SERVE, "ingest_command",
        "Receive traces of generations with mods, store them, and show them on a page.",
    ),
    "config": (
        _SERVE, "config_command", "Check, show and print configuration files of kqview serve.",
    ),
}  # fmt: skip
"""Panel of the help, module and first line of each command, in the order of the help."""


def _loaded(name: str) -> Any:
    """The command of this name. Loads its module: the help alone needs none of them."""
    module = import_module(f"kqview.cli.{_COMMANDS[name][1]}")
    command = getattr(module, name.replace("-", "_"), None)
    made = typer.Typer(rich_markup_mode=_MARKUP, add_completion=False)
    if command is None:
        made.add_typer(module.app, name=name)
        return cast("Any", get_group(made)).commands[name]
    made.command(name, cls=getattr(module, "COMMAND_CLASS", TyperCommand))(command)
    return get_command(made)


class ErrorReportingGroup(TyperGroup):
    """Turns an exception of a command into one line on stderr and an exit code."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {
            name: TyperCommand(name, callback=None, help=help_, rich_help_panel=panel)
            for name, (panel, _, help_) in _COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Load the command that *args* begin with."""
        name, command, rest = super().resolve_command(ctx, args)
        ctx.meta[_NAME] = name
        return name, command and _loaded(cast("str", name)), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except REPORTED as error:
            raise typer.Exit(reported(error, ctx.meta.get(_NAME))) from error
        return result

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the program; help and usage errors, which come before `invoke`, are written here."""
        try:
            return super().main(*args, **options)
        except SystemExit as ended:
            # rich and typer end the program themselves, with status 1, where a reader has gone.
            if not isinstance(ended.__context__, BrokenPipeError):
                raise
            discard_stdout()
            sys.exit(BROKEN_PIPE)
        except OSError as error:
            print_error(error)
            discard_stdout()
            sys.exit(1)


app = typer.Typer(
    cls=ErrorReportingGroup,
    help="Run a GGUF model and see the attention of every token, layer and head.",
    epilog="Start with: kqview demo. Exit status: 0 success, 1 error, 2 wrong usage, 3 the model "
    "cannot be loaded, 4 too little memory, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=_MARKUP,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": _own_name,
    },
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from kqview import __version__

        typer.echo(f"kqview {__version__}")
        raise typer.Exit


@app.callback()
def global_options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options before the subcommand."""
