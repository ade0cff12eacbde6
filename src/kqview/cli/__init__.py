"""The ``kqview`` command, one file a subcommand; needs the ``cli`` extra (typer and rich)."""
