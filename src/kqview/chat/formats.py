"""Formats: how models write tool calls, as a table. Pure.

A row says what an answer with calls looks like; the grammar of a required call and the reader of an
answer both follow from it, so that a new model is a row, not a branch. Facts are those of the
models' own chat templates, and of the parsers in llama.cpp's ``common/``.

llama.cpp's own parser was weighed against this table and not taken. It would link 2.4 MB of code
to a core of 7.6 MB: its PEG parser with 17 hand-written formats, a JSON library and a second
template engine. That engine renders the template of a model file in the process of the caller, with
no limit on time or memory, where kqview renders in confined helpers. It reads the whole answer
again after each token: arguments of 500, 1,000, 2,000 and 4,000 tokens took 3, 8, 23 and 71 ms. It
throws on a whole answer whose call names an unknown function, has its keys in another order or has
NaN among its arguments, and the answer is lost; here it is read, or stays text. And its interface
is internal to llama.cpp: each new pin may change it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from kqview.chat.json_text import PYTHON

Format = str
"""Name of a format, a key of `FORMATS`."""

CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
HEAD_MAX: Final = 1000
"""Characters within which the name of a call, or of an argument, has to come."""

# DeepSeek's marks, with its own vertical bars and spaces.
_BEGIN, _END, _CALL, _CALL_END, _SEP = (
    f"<\uff5ctool\u2581{words}\uff5c>"
    for words in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)
_DSML: Final = "\uff5cDSML\uff5c"
_HY: Final = ":opensource"  # what Hunyuan adds to its marks
_NS: Final = "]<]minimax[>["
_OBJECT: Final = '{"name": "$name", "arguments": $arguments}'
# Of a reader: what may separate calls, and patterns of what ``$`` stands for.
SEPARATORS: Final = " \t\r\n,;[]"
_ANY: Final = {
    "name": r"""(?P<name>[^\x00-\x1f"'\\<>\[\](){}|`=\uff5c]{1,256}?)""",
    "key": r"""(?P<key>[^\n"<>]{1,256}?)""",
    "id": r"(?P<id>[\w.:-]{0,64})",
    "index": r"[0-9]{0,9}",
    "type": r"(?P<type>[a-z]{0,9})",
    "text": r"(?P<text>[a-z]{0,9})",
}
_PIECES: Final = re.compile(r"\$(name|arguments|key|value|id|index|type|text)")


@dataclass(frozen=True)
class Syntax:
    r"""A format: a row of `FORMATS`.

    In the patterns, ``$name`` is the function, ``$arguments`` its arguments, ``$id`` an id of nine
    letters and digits, ``$index`` a number; ``$key`` and ``$value`` are an argument, ``$type`` the
    name of its type in JSON, ``$text`` whether it is text, as ``true`` or ``false``.

    Attributes:
        shown: What templates show; all of one of these.
        marks: Each opens a call, or what precedes the calls.
        call: A call.
        closes: What may follow a call's arguments and ends it, or ends all calls.
        begin: What precedes the calls.
        between: What is between two of them.
        end: What follows them.
        argument: An argument; "" if the arguments are a JSON object.
        comma: What is between two arguments.
        quotes: What may be around an argument that is text, the first of which templates write.
        wrap: What may be around a value, and is no part of it.
        nests: What is before each element, if a value may be elements too.
        bare: How an answer may begin that is a call without a mark before it.
        answer: What precedes an answer that is no call; if a call has no mark, the prompt has it.
        reads: Other formats that a model may write as well.
    """

    shown: Sequence[Sequence[str]]
    marks: Sequence[str] = ()
    call: str = _OBJECT
    closes: Sequence[str] = ()
    begin: str = ""
    between: str = ""
    end: str = ""
    argument: str = ""
    comma: str = ""
    quotes: Sequence[str] = ()
    wrap: tuple[str, str] = ("", "")
    nests: str = ""
    bare: str = ""
    answer: str = ""
    reads: Sequence[Format] = ()

    @cached_property
    def is_object(self) -> bool:
        """Whether a call is a JSON object."""
        return '"$name' in self.call and "$arguments" in self.call and not self.argument

    @cached_property
    def is_list(self) -> bool:
        """Whether a call has no mark of its own."""
        return not any(mark in self.call for mark in self.marks)

    @cached_property
    def lead(self) -> str:
        """The first character of a call; "" if that is its name."""
        return self.call.partition("$")[0].strip()[:1]

    @cached_property
    def head(self) -> re.Pattern[str]:
        """A call up to its arguments, with the mark that opens it."""
        before, _, after = self.call.partition("$arguments")
        outer = [re.escape(mark) for mark in self.marks if mark not in before]
        # A call may begin with the last of its marks.
        places = [at for mark in self.marks if (at := before.find(mark)) >= 0] or [0]
        first, own = min(places), max(places)
        pattern = rf"\s*+(?:{'|'.join(outer)})?" if outer else ""
        pattern += f"[{re.escape(SEPARATORS)}]*+" if self.is_list else r"\s*+"
        if own > first:
            pattern += f"(?:{_lenient(before[first:own], self.is_object)})?"
        pattern += _lenient(before[own:], self.is_object)
        if not self.argument:
            pattern += r"(?=\{)"
        elif not self.quotes:  # an argument, or the end of a call without any
            ends = [self.argument.partition("$")[0], after.strip().partition("\n")[0]]
            pattern += f"(?={'|'.join(map(re.escape, ends))})"
        return re.compile(re.sub('"(arguments|parameters)"', '"(?:arguments|parameters)"', pattern))

    @cached_property
    def begins_value(self) -> re.Pattern[str]:
        """An argument up to its value, without a line end before that."""
        return re.compile(_lenient(self.argument.partition("$value")[0].rstrip("\n"), False))

    @cached_property
    def ends_value(self) -> str:
        """What follows a value."""
        return self.argument.partition("$value")[2].strip()

    @cached_property
    def has_lines(self) -> bool:
        """Whether the value of an argument is on lines of its own."""
        return "\n$value\n" in self.argument


def pieces(pattern: str) -> list[str]:
    """*pattern* as its texts at even places, and names of what is between them at odd ones."""
    return _PIECES.split(pattern)


def _lenient(pattern: str, is_json: bool) -> str:
    """*pattern* as a regular expression, with any white space where it, or JSON, has some."""
    made: list[str] = []
    for i, piece in enumerate(pieces(pattern)):
        if i % 2:
            made.append(_ANY[piece])
            continue
        text = re.sub(r"([{}:,])", r" \1 ", piece) if is_json else piece
        made.append(r"\s*+".join(re.escape(word) for word in re.split(r"\s+", text)))
    return "".join(made)


_INVOKE: Final = '<invoke name="$name">\n$arguments</invoke>'

# The first row that a template shows is its format. In a row: what is shown, marks that open, a
# call, what closes, and the rest by name.
# fmt: off
FORMATS: Final[Mapping[Format, Syntax]] = {
    # gpt-oss: calls have channels of their own, which `reasoning.HarmonySplitter` reads
    "harmony": Syntax(
        [[CHANNEL, MESSAGE]],
        call=f"{CHANNEL}commentary to=functions.$name <|constrain|>json{MESSAGE}$arguments",
        answer=f"{CHANNEL}final{MESSAGE}",
    ),
    # Mistral Small 3.2; Ministral, Devstral; Mistral Nemo
    "mistral_id": Syntax(
        [["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]], ["[TOOL_CALLS]"],
        "[TOOL_CALLS]$name[CALL_ID]$id[ARGS]$arguments", reads=["mistral_named", "mistral"],
    ),
    "mistral_named": Syntax(
        [["[TOOL_CALLS]", "[ARGS]"]], ["[TOOL_CALLS]"],
        "[TOOL_CALLS]$name[ARGS]$arguments", reads=["mistral_id", "mistral"],
    ),
    "mistral": Syntax(
        [["[TOOL_CALLS]"]], ["[TOOL_CALLS]"],
        begin="[TOOL_CALLS][", between=", ", end="]", reads=["mistral_named", "mistral_id"],
    ),
    # Nemotron 3, Qwen3-Coder, Qwen 3.5, StepFun
    "xml": Syntax(
        [["<tool_call>", "<function=", "<parameter="]], ["<tool_call>", "<function="],
        "<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
        ["</function>", "</tool_call>"],
        argument="<parameter=$key>\n$value\n</parameter>\n",
    ),
    "seed": Syntax(
        [["<seed:tool_call>", "<function="]], ["<seed:tool_call>", "<function="],
        "<seed:tool_call>\n<function=$name>\n$arguments</function>\n</seed:tool_call>",
        ["</function>", "</seed:tool_call>"],
        argument="<parameter=$key>$value</parameter>\n",
    ),
    "functionary": Syntax(
        [["<function=", "</function>"]], ["<function="],
        "<function=$name>$arguments</function>", ["</function>"],
    ),
    "functionary_v3.2": Syntax(
        [[">>>all", ">>>${recipient}"]], [">>>"], "$name\n$arguments",
        between=">>>", answer="all\n",
    ),
    "kimi_k2": Syntax(
        [["<|tool_calls_section_begin|>"]], ["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
        "<|tool_call_begin|>functions.$name:$index<|tool_call_argument_begin|>$arguments"
        "<|tool_call_end|>",
        ["<|tool_call_end|>", "<|tool_calls_section_end|>"],
        begin="<|tool_calls_section_begin|>", end="<|tool_calls_section_end|>",
    ),
    "kimi_k3": Syntax(
        [["<|open|>", "<|close|>", "<|end_of_msg|>"]], ["<|open|>tools<|sep|>", "<|open|>call "],
        '<|open|>call tool="$name" index="$index"<|sep|>$arguments<|close|>call<|sep|>',
        ["<|close|>call<|sep|>", "<|close|>tools<|sep|>"],
        begin="<|open|>tools<|sep|>", end="<|close|>tools<|sep|>",
        argument='<|open|>argument key="$key" type="$type"<|sep|>$value<|close|>argument<|sep|>',
    ),
    "minimax_m1": Syntax(
        [["<tool_calls>\\n"]], ["<tool_calls>"], _OBJECT, ["</tool_calls>"],
        begin="<tool_calls>\n", between="\n", end="\n</tool_calls>",
    ),
    "minimax_m2": Syntax(
        [["<minimax:tool_call>"]], ["<minimax:tool_call>", "<invoke "],
        _INVOKE, ["</invoke>", "</minimax:tool_call>"],
        begin="<minimax:tool_call>\n", between="\n", end="\n</minimax:tool_call>",
        argument='<parameter name="$key">$value</parameter>\n',
    ),
    "minimax_m3": Syntax(
        [["]<]minimax[>["]], [f"{_NS}<tool_call>", f"{_NS}<invoke "],
        f'{_NS}<invoke name="$name">$arguments{_NS}</invoke>',
        [f"{_NS}</invoke>", f"{_NS}</tool_call>"],
        begin=f"{_NS}<tool_call>\n", between="\n", end=f"\n{_NS}</tool_call>",
        argument=f"{_NS}<$key>$value{_NS}</$key>", nests=_NS,
    ),
    **{  # V3.2 and V4
        f"deepseek_{name}": Syntax(
            [[_DSML, f"dsml_token + '{name}"]], [f"<{_DSML}{name}>", f"<{_DSML}invoke "],
            _INVOKE.replace("<invoke", f"<{_DSML}invoke").replace("</", f"</{_DSML}"),
            [f"</{_DSML}invoke>", f"</{_DSML}{name}>"],
            begin=f"<{_DSML}{name}>\n", between="\n", end=f"\n</{_DSML}{name}>",
            argument=f'<{_DSML}parameter name="$key" string="$text">$value</{_DSML}parameter>\n',
        )
        for name in ("function_calls", "tool_calls")
    },
    **{  # R1; V3.1
        name: Syntax(
            [shown], [_BEGIN, _CALL], f"{call}{_CALL_END}", [_CALL_END, _END],
            begin=_BEGIN, end=_END, reads=[other, "hermes"],
        )
        for name, other, shown, call in (
            ("deepseek_fenced", "deepseek", [_CALL, "```json"],
             f"{_CALL}function{_SEP}$name\n```json\n$arguments\n```"),
            ("deepseek", "deepseek_fenced", [_CALL], f"{_CALL}$name{_SEP}$arguments"),
        )
    },
    "hunyuan": Syntax(
        [["<tool_call{}>", "<arg_key{}>", _HY]], [f"<tool_calls{_HY}>", f"<tool_call{_HY}>"],
        f"<tool_call{_HY}>$name<tool_sep{_HY}>\n$arguments</tool_call{_HY}>",
        [f"</tool_call{_HY}>", f"</tool_calls{_HY}>"],
        begin=f"<tool_calls{_HY}>\n", between="\n", end=f"\n</tool_calls{_HY}>",
        argument=f"<arg_key{_HY}>$key</arg_key{_HY}>\n<arg_value{_HY}>$value</arg_value{_HY}>\n",
    ),
    "muse": Syntax(  # the headers of its messages are no content
        [["<atem:function_calls>"]], ["<atem:function_calls>", "<atem:invoke "],
        f" to=$name{MESSAGE}<atem:function_calls>\n"
        '<atem:invoke name="$name">\n$arguments</atem:invoke>\n</atem:function_calls>',
        ["</atem:invoke>", "</atem:function_calls>"], between="<|eom|><|start|>assistant",
        argument='<atem:parameter name="$key">$value</atem:parameter>\n',
        answer=f" to=user{MESSAGE}",
    ),
    # GLM 4, Laguna, Ling, Spark
    "glm": Syntax(
        [["<tool_call>", "<arg_key>"]], ["<tool_call>"],
        "<tool_call>$name\n$arguments</tool_call>", ["</tool_call>"],
        argument="<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n",
    ),
    "minicpm": Syntax(
        [['<function name="', '<param name="']], ["<function name="],
        '<function name="$name">$arguments</function>', ["</function>"],
        argument='<param name="$key">$value</param>', wrap=("<![CDATA[", "]]>"),
    ),
    "gemma": Syntax(
        [["<|tool_call>call:"]], ["<|tool_call>"],
        "<|tool_call>call:$name{$arguments}<tool_call|>", ["<tool_call|>"],
        argument="$key:$value", comma=",", quotes=['<|"|>', '"'],
    ),
    "lfm2": Syntax(
        [["<|tool_list_start|>"], ["List of tools: ["], ["<|tool_call_start|>"]],
        ["<|tool_call_start|>"], "$name($arguments)", ["<|tool_call_end|>"],
        begin="<|tool_call_start|>[", between=", ", end="]<|tool_call_end|>",
        argument="$key=$value", comma=", ", quotes=PYTHON,
    ),
    "solar": Syntax(
        [["<|tool_call:begin|>"]], ["<|tool_calls|>", "<|tool_call:begin|>"],
        "<|tool_call:begin|>$id<|tool_call:name|>$name<|tool_call:args|>$arguments"
        "<|tool_call:end|>",
        ["<|tool_call:end|>", "<|calls|>"], begin="<|tool_calls|>",
    ),
    "apertus": Syntax(
        [["<|tools_prefix|>"]], ["<|tools_prefix|>"], '{"$name": $arguments}', ["<|tools_suffix|>"],
        begin="<|tools_prefix|>[", between=", ", end="]<|tools_suffix|>",
    ),
    # Command-R7B, Command A
    "cohere": Syntax(
        [["<|START_ACTION|>"]], ["<|START_ACTION|>"],
        '{"tool_call_id": "$index", "tool_name": "$name", "parameters": $arguments}',
        ["<|END_ACTION|>"],
        begin="<|START_ACTION|>[\n    ", between=",\n    ", end="\n]<|END_ACTION|>",
    ),
    "command_r_plus": Syntax(
        [["Action:", "```json", "tool_name"]], ["Action:\n```json"],
        '    {\n        "tool_name": "$name",\n        "parameters": $arguments\n    }', ["```"],
        begin="Action:\n```json\n[\n", between=",\n", end="\n]```",
    ),
    **{
        name: Syntax(
            [[shown]], [begin], _OBJECT, [close] if close else [],
            begin=begin if begin.endswith("[") else f"{begin}[", between=", ", end=f"]{close}",
        )
        for name, shown, begin, close in (
            ("apriel", "<tool_calls>[", "<tool_calls>", "</tool_calls>"),
            ("nemotron", "<TOOLCALL>", "<TOOLCALL>", "</TOOLCALL>"),
            ("phi4", "<|/tool_call|>", "<|tool_call|>", "<|/tool_call|>"),
            ("granite", "<|tool_call|>", "<|tool_call|>", ""),
            ("firefunction", "functools[", "functools[", ""),
        )
    },
    "gigachat_v3.1": Syntax(
        [["<|role_sep|>", "<|function_call|>"]], ["<|function_call|>"],
        f"<|function_call|>{_OBJECT}",
    ),
    "gigachat": Syntax(
        [["<|role_sep|>", "<|message_sep|>"]],
        ["<|message_sep|>\n\nfunction call<|role_sep|>", "function call<|role_sep|>"],
        begin="<|message_sep|>\n\nfunction call<|role_sep|>\n",
    ),
    # Qwen 2.5 and 3, Hermes, Granite 4, and every model whose template shows no format
    "hermes": Syntax(
        [["<tool_call>"]], ["<tool_call>"], f"<tool_call>\n{_OBJECT}\n</tool_call>",
        ["</tool_call>"], between="\n",
    ),
    "llama": Syntax(
        [["<|python_tag|>"], ['"parameters"', "ipython"]], ["<|python_tag|>"],
        '{"name": "$name", "parameters": $arguments}', between="; ", bare="{",
    ),
}
# fmt: on


@lru_cache(maxsize=64)  # few templates are in use
def format_of(template: str) -> Format:
    """The format of the model with this chat template; Hermes' if it shows none."""
    for name, syntax in FORMATS.items():
        if any(all(mark in template for mark in marks) for marks in syntax.shown):
            return name
    return "hermes"
