"""Entry point of the ``kqview`` command and of ``python -m kqview``."""

import sys
from importlib import import_module
from typing import Final

_CLI_EXTRA: Final = frozenset({"typer", "rich"})
_INTERRUPTED: Final = 130


def main() -> None:
    """Run the command line; without the ``cli`` extra, print one line and exit with status 1."""
    try:
        if sys.argv[1:2] == ["serve"]:
            from kqview.cli import hangups

            hangups.is_program = True
            hangups.hold()
            if _has_served():
                return
        import_module("rich")  # which the commands import as they are loaded
        from kqview.cli import terminal
        from kqview.cli.main import app
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in _CLI_EXTRA:
            raise
        print(
            f"error: the command line needs {package}, which is not installed; "
            'run pip install "kqview[cli]"',
            file=sys.stderr,
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    terminal.prepare_streams()
    app(prog_name="kqview")


def _has_served() -> bool:
    """Whether ``kqview serve`` has run, without typer; False if typer is needed."""
    from kqview.cli.exit_status import REPORTED, reported
    from kqview.cli.terminal import prepare_streams

    prepare_streams()
    try:
        from kqview.cli.starting import try_plainly

        has_served = try_plainly(sys.argv[2:])
        sys.stdout.flush()
        return has_served
    except REPORTED as error:
        sys.exit(reported(error, "serve"))


if __name__ == "__main__":
    main()
