"""Regular expressions of Python, as the option ``regex`` takes them: in the syntax of Rust's crate.

A compiled pattern is translated from the tree that Python's own parser makes of it, so that it
means what it means in Python, flags included. What no automaton can follow while text is generated
is refused by its name.
"""

import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final, NoReturn

from kqview.errors import InvalidSampling

# Private to Python, but the same in every version from 3.11 on; nothing public has the tree.
_parser: Any = import_module("re._parser")
_constants: Any = import_module("re._constants")

_WORD: Final = r"\p{L}\p{N}_"  # str.isalnum
_SPACE: Final = r"\s\x{1c}-\x{1f}"  # str.isspace
# Class of a category's characters, without its brackets: in Unicode, in ASCII.
_CATEGORIES: Final = {
    "CATEGORY_DIGIT": (r"\d", "0-9"),
    "CATEGORY_WORD": (_WORD, "0-9A-Z_a-z"),
    "CATEGORY_SPACE": (_SPACE, r" \t\n\r\f\x{b}"),
}
_KINDS: Final = re.ASCII | re.UNICODE
_REFUSED: Final = {
    "ASSERT": "a look-ahead or look-behind, (?=...) or (?<=...)",
    "ASSERT_NOT": "a negative look-ahead or look-behind, (?!...) or (?<!...)",
    "GROUPREF": r"a backreference, such as \1",
    "GROUPREF_EXISTS": "a conditional group, (?(1)...)",
    "ATOMIC_GROUP": "an atomic group, (?>...)",
    "POSSESSIVE_REPEAT": "a possessive quantifier, such as a++",
    "AT_BOUNDARY": r"a word boundary, \b",
    "AT_NON_BOUNDARY": r"a word boundary, \B",
}


def regex_text(pattern: re.Pattern[str]) -> str:
    r"""*pattern* in the syntax of Rust's regex crate, for matching a text as a whole.

    Raises:
        InvalidSampling: It is a pattern of bytes, or has what cannot be followed while text is
            generated: look-arounds, backreferences, word boundaries, anchors of lines.
    """
    if not isinstance(pattern.pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        _refuse("is a pattern of bytes; compile a str")
    flags = pattern.flags
    try:
        tree = _parser.parse(pattern.pattern, flags & ~re.DEBUG)
        return _flagged(_sequence(tree, flags), flags & re.IGNORECASE, 0)
    except RecursionError:
        _refuse("is nested too deeply; flatten it")


def _refuse(what: str) -> NoReturn:
    raise InvalidSampling(f"regex {what}", parameter="regex")


def _flagged(text: str, ignores_case: int, outer: int) -> str:
    """*text* as a group, with the flag for case if it differs from the one around it."""
    if bool(ignores_case) == bool(outer):
        return text
    return f"(?i:{text})" if ignores_case else f"(?-i:{text})"


def _sequence(items: Iterable[tuple[Any, Any]], flags: int) -> str:
    return "".join(_item(str(op), value, flags) for op, value in items)


def _item(op: str, value: Any, flags: int) -> str:
    match op:
        case "LITERAL":
            return _character(value)
        case "NOT_LITERAL":
            return f"[^{_character(value)}]"
        case "ANY":
            return "(?s:.)" if flags & re.DOTALL else r"[^\n]"
        case "IN":
            return _class(value, flags)
        case "BRANCH":
            return f"(?:{'|'.join(_sequence(one, flags) for one in value[1])})"
        case "SUBPATTERN":
            _, added, removed, body = value
            if added & _KINDS:
                flags &= ~_KINDS  # (?a:...) and (?u:...) replace each other
            inner = (flags | added) & ~removed
            text = f"(?:{_sequence(body, inner)})"
            return _flagged(text, inner & re.IGNORECASE, flags & re.IGNORECASE)
        case "MAX_REPEAT" | "MIN_REPEAT":  # how much is taken first does not change what matches
            low, high, body = value
            most = "" if high is _constants.MAXREPEAT else high
            return f"(?:{_sequence(body, flags)}){{{low},{most}}}"
        case "AT" if str(value) not in _REFUSED:
            name = str(value)
            if flags & re.MULTILINE and name in ("AT_BEGINNING", "AT_END"):
                _refuse(
                    "has ^ or $ with re.MULTILINE, which cannot be followed while text is "
                    r"generated; write line ends as \n, without the flag"
                )
            return r"\A" if name.startswith("AT_BEGINNING") else r"\z"
        case _:
            name = str(value) if op == "AT" else op
            _refuse(
                f"has {_REFUSED.get(name, name)}, which cannot be followed while text is "
                "generated; write it without, or use grammar"
            )


def _class(items: Iterable[tuple[Any, Any]], flags: int) -> str:
    parts: list[str] = []
    for op, value in items:
        match str(op):
            case "NEGATE":
                parts.append("^")
            case "RANGE":
                parts.append(f"{_character(value[0])}-{_character(value[1])}")
            case "CATEGORY":
                name = str(value).replace("_NOT_", "_")
                characters = _CATEGORIES[name][bool(flags & re.ASCII)]
                parts.append(characters if name == str(value) else f"[^{characters}]")
            case _:
                parts.append(_character(value))
    return f"[{''.join(parts)}]"


def _character(code: int) -> str:
    """A character as itself, in or out of a class."""
    text = chr(code)
    return text if text.isascii() and text.isalnum() else f"\\x{{{code:x}}}"
