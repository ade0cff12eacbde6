"""``kqview chat``: a conversation with a model in the terminal, or line by line from a pipe."""

import importlib.util
from pathlib import Path

from kqview.chat import CHATML
from kqview.cli.chatting import Chat, load_messages
from kqview.cli.option_groups import argument, option, with_groups
from kqview.cli.options import CaptureChoice, EngineChoice, SamplingChoice, text_or_file
from kqview.cli.terminal import argument_text, read_stdin
from kqview.errors import KqviewError, RequestError, UnsupportedModel


@with_groups
def chat(
    *,
    source: EngineChoice,
    message: str | None = argument(
        None,
        "Message to answer, and end; - reads it from standard input. Without one, a conversation.",
        metavar="MESSAGE",
    ),
    system: str | None = option(None, "System message.", "--system", "-sys", metavar="TEXT|@FILE"),
    load: Path | None = option(
        None, "Go on with a conversation that /save wrote.", metavar="FILE.json"
    ),
    max_tokens: int | None = option(
        None,
        "Maximum number of tokens of an answer. [default: what the context holds]",
        "--max-tokens",
        "-n",
        min=1,
    ),
    chat_template: str | None = option(
        None, "Chat template (Jinja) instead of the model's; or chatml.", metavar="TEXT|@FILE"
    ),
    capture: CaptureChoice,
    sampling: SamplingChoice,
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
    options = sampling.sampling()
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
        talk = Chat(engine, options, max_tokens=max_tokens, capture=plan)
        talk.begin(messages, system=instructions)
        if question is not None:
            talk.ask(question)
        else:
            talk.run()
