"""Hostile answers: what a model may write where a tool call is expected, in every format.

Whole calls with broken arguments, and pieces of calls in any order, come in one piece and cut
anywhere. Reading one raises nothing and gives the same either way. All texts have UTF-8. The
arguments of a call that has an end are JSON that the strictest client reads.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from typing import TYPE_CHECKING

import msgspec

from kqview.chat import tool_format
from kqview.chat.formats import FORMATS
from kqview.chat.reasoning import Split
from kqview.chat.turn import AnswerReader, ChatAnswer, Reading, reading_of
from tests.attack.summary import Summary, main

if TYPE_CHECKING:
    from collections.abc import Sequence

BEGIN, END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
ONE, ONE_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEP = "<\uff5ctool\u2581sep\uff5c>"
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def calls_in(form: str) -> tuple[str, ...]:
    """Calls with the arguments %s, which are one value in formats that write them one by one."""
    syntax = FORMATS[form]
    arguments = syntax.argument.replace("$value", f"{''.join(syntax.quotes[:1])}%s") or "%s"
    text = f"{syntax.begin}{syntax.call.replace('$arguments', arguments)}{syntax.end}"
    for name, word in (("name", "f"), ("key", "a"), ("index", "0"), ("id", "abcdefgh1")):
        text = text.replace(f"${name}", word)
    texts = [text.replace("$text", word).replace("$type", word) for word in ("true", "string")]
    if syntax.is_object:
        texts.append(f'{syntax.marks[0] if syntax.marks else ""}{{"arguments": %s, "name": "f"}}')
    return (*texts, text.replace("\n", ""), "<tool_call>\n<function=f>\n<parameter=b>%s")


CALLS: dict[str, Sequence[str]] = {form: calls_in(form) for form in FORMATS}
WORDS = (
    "NaN", "-Infinity", "1e999", "-1e-999", "007", "0x1F", "1_000", "9" * 400, "9" * 5000, "True",
    "None", "undefined", "two words", "''", "'a'", '""', r'"\ud800"', r'["\ud800"]', r'"\udc00"',
    r'"\ud83d\ude00"', r'"\ud83d\n"', r'"\x41"', r'"\u12"', '"a\nb"', '"\0"', '"\x7f"', "1", "-0",
    "1.", ".5", "1e5", "{}", "[]", "null", '{"b": 1,}', "[1,,2]", "[" * 900 + "]" * 900,
    '{"a":' * 90 + "1" + "}" * 90, "[" * 9000 + "]" * 9000, '"\U0001f600"', "\u2028", "\ufffe", "é",
    "{'a': 1}", "{a: 1}", '{"a" 1}', '{1: 2}', '{"a": 1} {', "}", "]", '"', "\\", "",
)  # fmt: skip
MARKS = itertools.chain(*((*one.marks, *one.closes) for one in FORMATS.values()))
PIECES = (
    *MARKS, "<tool_call>", "</tool_call>", "<function=f>", "</function>",
    "<parameter=a>", "</parameter>", "<function=", "<parameter=", ">", "[TOOL_CALLS]", "[ARGS]",
    "[CALL_ID]", BEGIN, END, ONE, ONE_END, SEP, "<|channel|>", "<|message|>", "<|call|>", "<|end|>",
    "<|start|>", "commentary to=functions.f ", "final", "<|python_tag|>", "<think>", "</think>",
    "```json\n", "\n```", '{"name": "f", "arguments": {', '"name": "\\ud800"', "{", "}", "[", "]",
    '"', ":", ",", "\\", "\n", " ",
)  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"b": {"type": "string"}}}}},
]  # fmt: skip
READINGS = {
    form: Reading(
        Split(mode="harmony" if form == "harmony" else "think", may_call=True),
        form,
        texts=tool_format.text_parameters(TOOLS),
    )
    for form in FORMATS
}


def refuse(word: str) -> None:
    """Called for a number that JSON does not have."""
    raise ValueError(f"{word} is no JSON")


def is_open(arguments: str) -> bool:
    """Whether a string or bracket of *arguments* has no end: the answer ended before it."""
    signs = STRING.sub("", arguments)
    is_inside = signs.count("{") + signs.count("[") > signs.count("}") + signs.count("]")
    return not arguments or is_inside or '"' in signs


def read(form: str, pieces: Sequence[str]) -> list[object]:
    """Reasoning, content and calls of an answer that came in *pieces*."""
    reader = AnswerReader(READINGS[form])
    answer = ChatAnswer()
    for piece in pieces:
        answer.add(reader.feed(piece))
    answer.add(reader.finish("".join(pieces)))
    calls = [(call.name, call.arguments) for call in answer.calls]
    return [answer.reasoning, answer.content, *calls]


def arguments_of(form: str, rng: random.Random) -> str:
    """Arguments that are broken in a few places."""
    if FORMATS[form].argument:
        return rng.choice(WORDS)
    items = [f'"{key}": {rng.choice(WORDS)}' for key in "abc"[: rng.randrange(4)]]
    text = "{" + ", ".join(items) + "}"
    for _ in range(rng.choice((0, 0, 1, 3))):
        at = rng.randrange(1, len(text))
        text = text[:at] + rng.choice(PIECES[-8:]) + text[at + rng.randrange(2) :]
    return text + "]" * (text.count("{") + text.count("["))  # whatever was broken


def once(rng: random.Random, summary: Summary) -> None:
    """One answer, in one piece and cut."""
    form = rng.choice(list(FORMATS))
    if rng.random() < 0.6:
        text = rng.choice(CALLS[form]) % arguments_of(form, rng)
    else:
        text = "".join(rng.choice((*PIECES, *WORDS)) for _ in range(rng.randrange(1, 14)))
        if rng.random() < 0.5:
            text = rng.choice(CALLS[form]) % text
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(9)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    try:
        found = read(form, [text])
        if read(form, pieces) != found:
            summary.fail(f"{form}: {pieces!r} reads otherwise than in one piece")
        msgspec.json.encode(found)
        reading_of("".join(FORMATS[form].shown[0]), None, TOOLS).reply(text).to_message()
        for _, arguments in found[2:]:
            if is_open(arguments):
                summary.count(f"{form}, call without an end")
                continue
            summary.count(f"{form}, call")
            json.loads(arguments, parse_constant=refuse)
            msgspec.json.decode(arguments)
        if not found[2:]:
            summary.count("no call")
    except Exception as error:
        summary.fail(f"{form}: {text[:300]!r}: {type(error).__name__}: {error}")


def run(seconds: float, seed: int) -> Summary:
    """Read for *seconds*."""
    summary = Summary("answers", seed)
    rng = random.Random(seed)
    ends_s = time.monotonic() + seconds
    n_read = 0
    while time.monotonic() < ends_s or n_read < 1000:
        once(rng, summary)
        n_read += 1
    summary.figures["answers"] = n_read
    return summary


if __name__ == "__main__":
    raise SystemExit(main(run))
