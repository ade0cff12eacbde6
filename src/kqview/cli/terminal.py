"""Standard streams: read as text whatever they are, and written whatever they can show."""

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from kqview.errors import RequestError

if TYPE_CHECKING:
    from kqview import Generation

# Control characters except tab, newline and carriage return.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def prepare_streams() -> None:
    """Make standard streams usable where they are closed or cannot show every character.

    A closed stream becomes the null device; a character that the terminal's encoding lacks is
    written as an escape.
    """
    for number, mode in enumerate("rww"):
        try:
            os.fstat(number)
        except OSError:  # else the next file to be opened would be the standard stream
            os.open(os.devnull, os.O_RDWR)
        name = ("stdin", "stdout", "stderr")[number]
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore


def discard_stdout() -> None:
    """Send what is written to stdout from here on, and what its buffer holds, nowhere.

    The interpreter flushes stdout once more at exit and would report what went wrong again.
    """
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # stdout is not a file: nothing to flush
        return


def read_stdin() -> str:
    """All of standard input."""
    encoding = sys.stdin.encoding or "utf-8"
    return decoded(sys.stdin.buffer.read(), "standard input", encoding)


def read_text(path: Path) -> str:
    """The content of *path*."""
    return decoded(path.read_bytes(), str(path))


def decoded(data: bytes, name: str, encoding: str = "utf-8") -> str:
    """*data* as text, without a byte order mark."""
    if encoding.lower().replace("_", "-") in ("ascii", "ansi-x3.4-1968"):
        encoding = "utf-8"
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not text in {encoding.upper()}: byte 0x{data[error.start]:02x} at "
            f"{error.start}; convert it, for example with iconv -f LATIN1 -t UTF-8"
        ) from None


def argument_text(word: str) -> str:
    """A text of the command line, which is UTF-8 in a terminal whose locale is another as well."""
    if not any("\udc80" <= c <= "\udcff" for c in word):
        return word
    return decoded(os.fsencode(word), "the text")


def shown(text: str, stream: TextIO) -> str:
    """*text* for *stream*: on a terminal, control characters of a model become escapes."""
    if not stream.isatty():
        return text
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def show_delta(generation: "Generation") -> None:
    """Write the text of *generation* that is safe to show and was not written yet to stdout."""
    import typer  # kqview serve goes without it

    typer.echo(shown(generation.take_delta(), sys.stdout), nl=False)
