"""``kqview chat``: a conversation with a model in the terminal, or line by line from a pipe.

Reads lines, streams answers, obeys commands.
"""

import contextlib
import importlib.util
import json
import signal
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import typer
from rich.console import Console

from kqview import json_input
from kqview.chat import CHATML
from kqview.chat.turn import checked_messages
from kqview.cli.option_groups import argument, option, with_groups
from kqview.cli.options import (
    CaptureChoice,
    EditsChoice,
    EngineChoice,
    SamplingChoice,
    text_or_file,
)
from kqview.cli.terminal import argument_text, decoded, read_stdin, read_text, show_delta, shown
from kqview.durable import write_whole
from kqview.errors import KqviewError, PromptTooLong, RequestError, UnsupportedModel
from kqview.saved import save
from kqview.types import Capture, Sampling, Token
from kqview.types.sampling import OPTIONS
from kqview.viz.terminal import label

if TYPE_CHECKING:
    from types import FrameType

    from kqview import Edit, Engine, Generation

_PROMPT: Final = "> "
_MORE: Final = ". "
_N_TOP: Final = 5
_BAR_CELLS: Final = 20

_HELP: Final = """\
/help                  this list
/attention             what the last answer attended to
/retry                 answer the last message again
/undo                  take back the last message and its answer
/clear                 forget the conversation, but for the system message
/system [TEXT]         show or set the system message
/history               show the conversation
/set [NAME VALUE]      show or set a sampling option, such as temperature 0.5
/save FILE             save the conversation (.json), or the last answer and what was
                       captured (.safetensors); /save! replaces a file
/load FILE             go on with a saved conversation (.json)
/quit                  leave, as does Ctrl-D
Ctrl-C stops an answer. A backslash at the end of a line continues it on the next one.
A message that begins with a slash: type two."""


_COMMANDS: Final[Mapping[str, str]] = {
    "help": "_help", "attention": "_attention", "retry": "_retry", "undo": "_undo",
    "clear": "_clear", "system": "_system", "history": "_history", "set": "_set", "save": "_save",
    "save!": "_replace", "load": "_load", "quit": "_leave", "exit": "_leave", "bye": "_leave",
}  # fmt: skip
"""Commands of a conversation, and the methods of `Chat` that obey them."""


def load_messages(path: Path) -> list[dict[str, Any]]:
    """The messages in a file that `/save` wrote, or in any JSON list of messages."""
    try:
        content: Any = json_input.loads(read_text(path))
        with contextlib.suppress(TypeError):  # a list of messages
            content = content["messages"]
        return checked_messages(content)
    except (ValueError, KeyError) as error:
        raise RequestError(f"{path} is not a conversation: {error}") from None


class _Leave(Exception):
    """The user wants to leave."""


class Chat:
    """A conversation on one engine."""

    def __init__(
        self,
        engine: "Engine",
        sampling: Sampling,
        *,
        max_tokens: int | None,
        capture: Capture | None,
        edits: "list[Edit] | None",
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._capture = capture
        self._edits = edits
        self._messages: list[dict[str, Any]] = []
        self._last: tuple[Generation, list[Token], list[dict[str, Any]]] | None = None
        self._is_terminal = sys.stdin.isatty()
        self._is_running = False
        self._notes = Console(stderr=True)

    def begin(self, messages: Sequence[Mapping[str, Any]], *, system: str | None) -> None:
        """Start with *messages*, and *system* as the system message if there is one."""
        self._messages = [dict(message) for message in messages]
        self._last = None
        if system is not None:
            self._set_system(system)

    # ---- reading

    def run(self) -> None:
        """Read and answer until the end of the input."""
        self._is_running = True
        if self._is_terminal:
            self._edit_lines()
            name = self._engine.model.name or self._engine.model.architecture
            self._note(f"{name}; /help lists the commands, Ctrl-D ends")
        while True:
            try:
                line = self._read()
                if line.strip():
                    self._obey(line)
            except _Leave:
                return
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                typer.echo()
                self._note("Ctrl-D or /quit ends the chat")
            except BrokenPipeError:
                raise
            except (KqviewError, OSError) as error:
                if not self._is_terminal:
                    raise
                self._note(f"error: {error}")

    def _read(self) -> str:
        """The next message or command.

        Raises:
            _Leave: The input has ended.
        """
        lines = [self._read_line(_PROMPT)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._read_line(_MORE))
        return "\n".join(lines)

    def _read_line(self, prompt: str) -> str:
        if self._is_terminal and sys.stdout.isatty():
            try:
                return input(prompt)
            except EOFError:
                typer.echo()
                raise _Leave from None
            except UnicodeDecodeError:
                raise RequestError("that line is not text in the terminal's encoding") from None
        if self._is_terminal:
            typer.echo(prompt, nl=False, err=True)
        data = sys.stdin.buffer.readline()
        if not data:
            raise _Leave
        return decoded(data, "the line", sys.stdin.encoding or "utf-8").rstrip("\r\n")

    def _edit_lines(self) -> None:
        """Line editing, earlier lines and completion of commands, where Python has readline."""
        try:
            import readline
        except ModuleNotFoundError:
            return
        names = sorted(f"/{name}" for name in _COMMANDS)

        def complete(text: str, i: int) -> str | None:
            return next(iter([name for name in names if name.startswith(text)][i:]), None)

        readline.set_completer(complete)
        readline.set_completer_delims(" ")
        readline.parse_and_bind("tab: complete")

    def _obey(self, line: str) -> None:
        if not line.startswith("/") or line.startswith("//"):
            self.ask(line.removeprefix("/"))
            return
        name, _, rest = line[1:].partition(" ")
        command = _COMMANDS.get(name)
        if command is None:
            raise RequestError(f"there is no command /{name}; /help lists them")
        getattr(self, command)(rest.strip())

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)

    # ---- answering

    def ask(self, text: str) -> None:
        """Add *text* as a message and stream the answer; without one, the message goes again.

        Raises:
            KqviewError: The prompt does not fit, or generating failed.
        """
        self._messages.append({"role": "user", "content": text})
        try:
            self._answer()
        except BaseException:
            if self._messages[-1]["role"] == "user":
                del self._messages[-1]
            raise

    def _answer(self) -> None:
        self._last = None
        n_ctx = self._engine.n_ctx
        try:
            generation = self._engine.chat(
                self._messages,
                max_tokens=n_ctx if self._max_tokens is None else self._max_tokens,
                sampling=self._sampling,
                capture=self._capture,
                edits=self._edits,
            )
        except PromptTooLong as error:
            raise PromptTooLong(
                f"the conversation has {error.n_tokens} tokens, more than the context of {n_ctx}; "
                "/undo or /clear shortens it, --ctx allows more"
            ) from error
        tokens: list[Token] = []
        goes_on = self._is_terminal and self._is_running
        with _interrupting(generation, is_wanted=goes_on), generation:
            for token in generation:
                show_delta(generation)
                tokens.append(token)
            show_delta(generation)
        typer.echo()
        self._last = generation, tokens, [*self._messages]
        self._messages.append({"role": "assistant", "content": generation.text})
        if generation.finish_reason == "cancelled":
            self._note("(stopped)")
        elif generation.finish_reason == "length":
            limit = f"--max-tokens {self._max_tokens}"
            if self._max_tokens is None or len(tokens) < self._max_tokens:
                limit = f"the end of the context, {n_ctx} tokens"
            self._note(f"(stopped at {limit})")

    # ---- commands

    def _help(self, _rest: str) -> None:
        typer.echo(_HELP)

    def _leave(self, _rest: str) -> None:
        raise _Leave

    def _retry(self, _rest: str) -> None:
        kept = list(self._messages)
        while self._messages and self._messages[-1]["role"] == "assistant":
            del self._messages[-1]
        if not self._messages or self._messages[-1]["role"] != "user":
            self._messages = kept
            raise RequestError("there is no message to answer again")
        try:
            self._answer()
        except BaseException:
            self._messages = kept
            raise

    def _undo(self, _rest: str) -> None:
        users = [i for i, one in enumerate(self._messages) if one["role"] == "user"]
        if not users:
            raise RequestError("there is nothing to take back")
        del self._messages[users[-1] :]
        self._last = None
        self._note(f"taken back; {self._count()}")

    def _clear(self, _rest: str) -> None:
        self._messages = [one for one in self._messages[:1] if one["role"] == "system"]
        self._last = None
        self._note(f"cleared; {self._count()}")

    def _system(self, rest: str) -> None:
        if rest:
            self._set_system(rest)
            return
        first = self._messages[0] if self._messages else {"role": ""}
        typer.echo(first["content"] if first["role"] == "system" else "no system message")

    def _set_system(self, text: str) -> None:
        if self._messages and self._messages[0]["role"] == "system":
            del self._messages[0]
        self._messages.insert(0, {"role": "system", "content": text})

    def _history(self, _rest: str) -> None:
        for message in self._messages:
            typer.echo(f"{message['role']}: {shown(str(message.get('content', '')), sys.stdout)}")
        if not self._messages:
            typer.echo("no messages")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name:
            for one in _SETTABLE:
                typer.echo(f"{one:<20} {getattr(self._sampling, one)}")
            return
        name = name.replace("-", "_")
        if name not in _SETTABLE:
            raise RequestError(f"there is no option {name}; /set lists them")
        try:
            given = json_input.loads(value.lower() if value.lower() in ("true", "false") else value)
        except ValueError:
            raise RequestError(f"{name} is {value!r}; write a number, true or false") from None
        self._sampling = replace(self._sampling, **{name: given})

    def _save(self, rest: str, *, replaces: bool = False) -> None:
        path = Path(rest).expanduser()
        if not rest or path.suffix.lower() not in (".json", ".safetensors"):
            raise RequestError("type /save FILE.json, or /save FILE.safetensors")
        if path.exists() and not replaces:
            raise RequestError(f"{path} exists; /save! {path} replaces it")
        if path.suffix.lower() == ".safetensors":
            if self._last is None:
                raise RequestError("there is no answer to save")
            save(path, *self._last[:2])
            self._note(f"the last answer is in {path}")
            return
        content = {"model": self._engine.model.name, "messages": self._messages}
        write_whole(path, json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n")
        self._note(f"{self._count()} in {path}")

    def _replace(self, rest: str) -> None:
        self._save(rest, replaces=True)

    def _load(self, rest: str) -> None:
        if not rest:
            raise RequestError("type /load FILE.json")
        self.begin(load_messages(Path(rest).expanduser()), system=None)
        self._note(f"{self._count()} loaded; /history shows them")

    def _count(self) -> str:
        n = len(self._messages)
        return f"{n} message{'' if n == 1 else 's'}"

    # ---- attention

    def _attention(self, _rest: str) -> None:
        """Print what the last answer attended to, by message and by token.

        Its tokens are evaluated once more, as a prompt: answers cost nothing more unless asked.
        """
        if self._last is None or not self._last[1]:
            raise RequestError("there is no answer yet")
        generation, tokens, messages = self._last
        prompt = self._engine.apply_chat_template(messages, spans=True)
        ids = [*generation.prompt_ids, *generation.tokens]
        n_answer, n_prompt = len(tokens), len(generation.prompt_ids)
        # The query that chose a token is the one before it.
        found = self._engine.attend(
            ids[:-1], Capture("probs", reduce="mean"), last=n_answer, edits=self._edits
        )
        texts = found.column_texts
        mass = np.asarray(found.array()).mean(axis=0, dtype=np.float64)
        total = mass.sum() or 1.0
        typer.echo(f"The answer's {n_answer} tokens attended to (mean of all layers and heads):")
        self._bar("the first token", mass[0] / total)
        for i, (start, stop) in enumerate(prompt.spans):
            message = messages[i]
            words = label(str(message.get("content", "")))
            share = mass[max(start, 1) : stop].sum() / total
            self._bar(f"{i + 1} {message['role']}", share, words)
        n_before = prompt.spans[-1][1]
        self._bar("the header of the answer", mass[n_before:n_prompt].sum() / total)
        self._bar("the answer itself", mass[n_prompt:].sum() / total)
        typer.echo("Most of it before the answer, without the first token:")
        best: list[int] = np.argsort(-mass[1:n_prompt], kind="stable")[:_N_TOP].tolist()
        for i in best:
            self._bar(f'"{label(texts[i + 1])}" at {i + 1}', mass[i + 1] / total)

    def _bar(self, name: str, share: float, words: str = "") -> None:
        bar = "#" * round(share * _BAR_CELLS)
        line = f"{share:>6.1%} {bar:<{_BAR_CELLS}} {name}"
        width = self._notes.width
        typer.echo(label(f"{line}: {words}" if words else line)[:width].rstrip())


_SETTABLE: Final = tuple(
    row.name for row in OPTIONS.values() if row.is_plain and row.name != "top_logprobs"
)


@contextlib.contextmanager
def _interrupting(generation: "Generation", *, is_wanted: bool) -> Generator[None]:
    """Ctrl-C ends *generation* instead of the program; a second one ends that as well."""
    if not is_wanted:
        yield
        return

    def stop(_number: int, _frame: "FrameType | None") -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        generation.cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@with_groups
def chat(
    *,
    source: EngineChoice,
    message: str | None = argument(
        None,
        "Message to answer, and end; - reads it from standard input. Without one, a conversation.",
        metavar="MESSAGE",
    ),
    system: str | None = option(None, "System message.", "--system -sys", metavar="TEXT|@FILE"),
    load: Path | None = option(
        None, "Go on with a conversation that /save wrote.", metavar="FILE.json"
    ),
    max_tokens: int | None = option(
        None,
        "Maximum number of tokens of an answer. [default: what the context holds]",
        "--max-tokens -n",
        min=1,
    ),
    chat_template: str | None = option(
        None, "Chat template (Jinja) instead of the model's; or chatml.", metavar="TEXT|@FILE"
    ),
    capture: CaptureChoice,
    sampling: SamplingChoice,
    edits: EditsChoice,
) -> None:
    """Chat with a model.

    Answers stream as they are generated. Ctrl-C stops the answer, Ctrl-D or /quit ends the chat.
    The arrow keys bring back earlier lines, and a backslash at the end of a line continues it on
    the next one. /help lists the commands: to take back or repeat an answer, save and load the
    conversation, and see what the last answer attended to.

    Standard input may be a pipe: each line is then a message or a command.

    Examples:

    - `kqview chat --demo`
    - `kqview chat -m model.gguf --system "Answer in one sentence." --temperature 0.6`
    - `kqview chat -m model.gguf "What is a quaver?"`
    - `printf 'Who are you?\\n/attention\\n' | kqview chat --demo`
    """
    plan = capture.plan() if capture.is_asked else None
    options, changes = sampling.sampling(), edits.read()
    instructions = text_or_file(system)
    messages = load_messages(load) if load is not None else []
    template = CHATML if chat_template == "chatml" else text_or_file(chat_template)
    model, words = source.resolve(message)
    if len(words) > 1:
        raise RequestError(
            f"{words[0]!r} and {words[1]!r} are two messages; put one message in quotes, and name "
            "one model"
        )
    question = argument_text(words[0]) if words else None
    if question == "-":
        question = read_stdin().removesuffix("\n")
    if importlib.util.find_spec("jinja2") is None:
        raise KqviewError(
            'kqview chat needs jinja2, which is not installed; run pip install "kqview[chat]"'
        )
    with source.open(model, chat_template=template) as engine:
        if engine.model.chat_template is None:
            raise UnsupportedModel(
                f"{engine.model.name or 'this model'} has no chat template; pass --chat-template "
                "chatml or @FILE, or use kqview generate"
            )
        talk = Chat(engine, options, max_tokens=max_tokens, capture=plan, edits=changes)
        talk.begin(messages, system=instructions)
        if question is not None:
            talk.ask(question)
        else:
            talk.run()
