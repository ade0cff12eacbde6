"""Grammars, schemas and expressions that are small to send and large to follow.

The model to try them with has tokens of many spaces: one token then runs a grammar over many
characters inside a single call.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.support import tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path

SPACES = tuple(" " * n for n in (2, 3, 4, 8, 16, 24, 32, 64))


def write_spaced_model(path: Path) -> Path:
    """A tiny model whose ids below 256 are bytes, and some above are runs of spaces."""
    return tiny_gguf.write_model(path, n_embd=32, n_ff=64, n_head=2, n_head_kv=1, specials=SPACES)


AMBIGUOUS = 'root ::= s\ns ::= " "s"x"|" "s"y"|" "'
"""45 bytes of which n spaces can be read in 2**n ways."""


def _chain(n: int, rule: str, last: str) -> str:
    return "root ::= a0\n" + "".join(f"a{i} ::= {rule.format(i + 1)}\n" for i in range(n)) + last


def _all_to_all(n: int, begin: str) -> str:
    refs = " | ".join(f"{begin}r{i}" for i in range(n))
    return "root ::= r0\n" + "".join(f'r{i} ::= {refs} | "z"\n' for i in range(n))


GRAMMARS = {
    "45 bytes": AMBIGUOUS,
    "catalan": 'root ::= s\ns ::= " " s s | " "',
    "catalan, empty": 'root ::= s\ns ::= " " s s | ""',
    "palindromes": 'root ::= s\ns ::= " " s " " | "x" s "x" | ""',
    "spaces in any cut": 'root ::= (" " | "  " | "   " | "     " | "        ")*',
    "two counts": "root ::= [ a-z]{0,2000} [ a-z]{0,2000}",
    "counts of counts": "root ::= ((.{0,40}){0,40})",
    "anything, twenty times": "root ::= " + ".* " * 20,
    "options in a loop": 'root ::= (" "? " "? " "? "x"? "y"?)*',
    "loops in loops": 'root ::= ((((" "*)*)*)*)*',
    "doubling chain of nothing": _chain(40, "a{0} a{0}", 'a40 ::= " " | ""'),
    "doubling chain of spaces": _chain(40, 'a{0} " " a{0} | " "', 'a40 ::= " "'),
    "long chain": _chain(20_000, "a{0}", 'a20000 ::= " "'),
    "long chain of spaces": _chain(20_000, '" " a{0}', 'a20000 ::= " "'),
    "all to all, in front": _all_to_all(120, ""),
    "all to all, behind": _all_to_all(120, '" " '),
    "all inside all": 'root ::= r0\n'
    + "".join(
        f"r{i} ::= " + " | ".join(f'" " r{j} "{i}"' for j in range(60)) + ' | "z"\n'
        for i in range(60)
    ),
    "many alternates": "root ::= " + " | ".join(f'"{" " * 30}{i}"' for i in range(5000)),
    "many ranges": "root ::= [" + "".join(f"\\u{i:04x}" for i in range(0x20, 0x9000, 2)) + "]*",
    "many negated ranges": "root ::= [^" + "".join(chr(i) for i in range(0x100, 0x9000, 2)) + "]*",
    "long literal": 'root ::= "' + " " * 900_000 + '"',
    "deep parentheses": "root ::= " + "(" * 199 + '" "' + ")" * 199,
    "too deep parentheses": "root ::= " + "(" * 5000 + '" "' + ")" * 5000,
    "too many repetitions": 'root ::= (" "{1000}){1000}',
    "as many as allowed": 'root ::= ((" "? "x"?){40}){25}',
    "left recursion": 'root ::= root " " | " "',
    "hidden left recursion": 'root ::= a root " " | " "\na ::= b\nb ::= c\nc ::= "x" | ""',
    "circle in front": 'root ::= a | " "\na ::= b | " "\nb ::= a | "x" root',
    "never ends": 'root ::= " " root',
    "any token": "root ::= !<[1]>*",
    "any token or text": 'root ::= (!<[1]> | " " | .)*',
    "tokens, counted": "root ::= (<[32]> | <[260]>){0,1000} !<[5]>{0,900}",
    "expression": 'root ::= e\ne ::= t " " e | t "  " e | t\nt ::= "(" e ")" | " "* | "x"',
    "a million elements": "root ::= " + " ".join(["((((a b c d){0,9}){0,9}){0,9})"] * 20)
    + "\n" + "".join(f'{c} ::= " "? "{c}"?\n' for c in "abcd"),
    "nothing": "root ::= ",
    "zero byte of a text": 'root ::= "\\x00"*',
}  # fmt: skip


def _nested(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(n):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "counts of counts": {"regex": "(a{1000}){1000}"},
    "subsets": {"regex": "(.*a){60}b"},
    "long window": {"regex": "(.*a.{500})*"},
    "million": {"regex": "a{1000000}"},
    "any of any": {"regex": "(x+x+)+y"},
    "unicode in loops": {"regex": r"(\p{L}{0,300}\p{N}{0,300}){0,300}"},
    "many words": {"regex": "|".join(f"{i * 7919:x}.*" for i in range(20_000))},
    "not": {"json_schema": {"type": "string", "pattern": "^(.{0,3000}a){9}$"}},
    "deep": {"json_schema": _nested(60)},
    "wide": {
        "json_schema": {
            "type": "object",
            "properties": {f"k{i}": {"type": "string", "maxLength": i} for i in range(1000)},
        }
    },
    "any of objects": {
        "json_schema": {
            "anyOf": [
                {"type": "object", "properties": {f"k{j}": {} for j in range(i, i + 30)}}
                for i in range(60)
            ]
        }
    },
    "all of": {
        "json_schema": {"allOf": [{"properties": {f"k{i}": _nested(4)}} for i in range(150)]}
    },
    "large enum": {"json_schema": {"enum": [f"value {i}" for i in range(30_000)]}},
    "large minimum": {"json_schema": {"type": "array", "minItems": 100_000}},
    "refers to itself": {
        "json_schema": {
            "$defs": {"n": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/n"}}, {}]}},
            "$ref": "#/$defs/n",
        }
    },
}
assert all(len(json.dumps(one)) < 1 << 20 for one in CONSTRAINTS.values())
