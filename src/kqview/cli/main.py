"""All commands of ``kqview``, and how their errors become one line on stderr and an exit status.

Exit statuses: 0 success, 1 error, 2 wrong usage or request, 3 a model cannot be loaded, 4 a limit
of this machine, 130 interrupted, 141 the reader of a pipe has gone.
"""

import errno
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from kqview import __version__
from kqview.cli.attend_command import attend
from kqview.cli.bench_command import bench
from kqview.cli.chat_command import chat
from kqview.cli.config_command import app as config
from kqview.cli.convert_command import convert_classifier
from kqview.cli.demo_command import demo
from kqview.cli.embed_command import embed
from kqview.cli.generate_command import generate
from kqview.cli.info_command import info, tokenize
from kqview.cli.ingest_command import ingest
from kqview.cli.options import own_name
from kqview.cli.score_command import score
from kqview.cli.serve_command import serve
from kqview.cli.server_options import ServerCommand
from kqview.cli.state_command import app as state
from kqview.cli.terminal import discard_stdout
from kqview.errors import CapacityError, KqviewError, ModelError, RequestError

_EXIT_CODES: Final[Mapping[type, int]] = {
    RequestError: 2,
    ModelError: 3,
    CapacityError: 4,
    KqviewError: 1,
}
_INTERRUPTED: Final = 130
_BROKEN_PIPE: Final = 141
# What flushing stdout may raise, at exit once more.
_UNWRITTEN: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class ErrorReportingGroup(TyperGroup):
    """Turns an exception of a command into one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except KqviewError as error:
            _print_error(error)
            raise typer.Exit(_exit_code(error)) from error
        except KeyboardInterrupt as interrupt:
            typer.echo(err=True)
            raise typer.Exit(_INTERRUPTED) from interrupt
        except BrokenPipeError as broken:
            discard_stdout()
            raise typer.Exit(_BROKEN_PIPE) from broken
        except OSError as error:
            _print_error(error)
            if error.errno in _UNWRITTEN:
                discard_stdout()
            raise typer.Exit(1) from error
        except MemoryError as error:
            _print_error(MemoryError("this machine has too little memory for that"))
            raise typer.Exit(_EXIT_CODES[CapacityError]) from error
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
            sys.exit(_BROKEN_PIPE)
        except OSError as error:
            _print_error(error)
            discard_stdout()
            sys.exit(1)


app = typer.Typer(
    cls=ErrorReportingGroup,
    help="Run a GGUF model and see the attention of every token, layer and head.",
    epilog="Start with: kqview demo. Exit status: 0 success, 1 error, 2 wrong usage, 3 the model "
    "cannot be loaded, 4 too little memory, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": own_name,
    },
)


def _print_version(wanted: bool) -> None:
    if wanted:
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


_TEXT, _ABOUT, _SERVE = "Text and its attention", "Models and measurements", "Servers"
for _command in (demo, generate, chat, attend, embed, score):
    app.command(rich_help_panel=_TEXT)(_command)
for _command in (info, tokenize, bench, convert_classifier):
    app.command(rich_help_panel=_ABOUT)(_command)
app.add_typer(state, name="state", rich_help_panel=_ABOUT)
app.command(cls=ServerCommand, rich_help_panel=_SERVE)(serve)
app.add_typer(config, name="config", rich_help_panel=_SERVE)
app.command(rich_help_panel=_SERVE)(ingest)


def _exit_code(error: KqviewError) -> int:
    return next(_EXIT_CODES[kind] for kind in type(error).__mro__ if kind in _EXIT_CODES)


def _print_error(error: Exception) -> None:
    text = str(error)
    if isinstance(error, OSError) and error.strerror is not None and error.filename2 is None:
        place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        text = f"{place}{error.strerror}"
    lines = [line.strip() for line in text.splitlines()]
    typer.echo(f"error: {' | '.join(line for line in lines if line)}", err=True)
