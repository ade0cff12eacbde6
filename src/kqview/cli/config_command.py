"""``kqview config``: checks, shows and prints configuration files of ``kqview serve``."""

import json
import os
from pathlib import Path
from typing import Any, Final

import typer

from kqview.cli.option_groups import argument, option
from kqview.cli.server_options import CONFIG, VARIABLES, ServerCommand, with_settings
from kqview.cli.server_words import reader_of
from kqview.server.settings import Settings
from kqview.server.settings_table import rows_of

_HAS_ERRORS: Final = 1

app = typer.Typer(help="Check, show and print configuration files of kqview serve.")

JSON: Any = option(False, "Print a JSON list of the values.", "--json")


@app.command()
def check(
    file: Path = argument(..., "Configuration file.", metavar="FILE"),
) -> None:
    """Find all errors of a configuration file, each with its key.

    Checks it as kqview serve would, under the environment of this command, and also that files and
    folders exist, that models have readable headers, and that certificates can be used. Exit code
    0: no errors; 1: errors, printed on stdout.
    """
    from kqview.server.config_file import WrongConfig, load

    try:
        loaded = load(file, environ=os.environ)
        problems = loaded.problems_of_files()
    except WrongConfig as wrong:
        problems = wrong.problems
    for problem in problems:
        typer.echo(str(problem))
    if problems:
        raise typer.Exit(_HAS_ERRORS)
    typer.echo(f"{file}: no errors")


@app.command()
def init() -> None:
    """Print a configuration file with all keys, their help and their defaults.

    Example: `kqview config init > kqview.toml`
    """
    from kqview.server.config_text import all_keys

    typer.echo(all_keys(), nl=False)


@app.command(cls=ServerCommand)
@with_settings(rows_of(Settings).values())
def show(
    *,
    context: typer.Context,
    as_json: bool = JSON,
    config: str | None = CONFIG,
    **given: Any,
) -> None:
    """Print the values that kqview serve would use with these options, each with its origin.

    An origin is the default, the file, a variable of the environment, or a flag. Keys are
    masked.

    Examples:

    - `kqview config show --config kqview.toml`
    - `kqview config show --config kqview.toml --port 8080 --json`
    """
    read = reader_of(config, given, context.meta[VARIABLES])
    from kqview.server.config_text import effective, effective_values

    loaded = read()
    if as_json:
        typer.echo(json.dumps(effective_values(loaded), indent=1))
    else:
        typer.echo(effective(loaded), nl=False)
