"""Grammars, schemas and expressions that are small to send and large to follow.

The model to try them with has tokens of many spaces: one token then runs a grammar over many
characters inside a single call.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.support import tiny_gguf

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
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


_STEPS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "properties": lambda ref: {"type": "object", "properties": {"a": ref}, "required": ["a"]},
    "plain": lambda ref: ref,
    "items": lambda ref: {"type": "array", "items": ref},
    "allOf": lambda ref: {"allOf": [ref]},
    "anyOf": lambda ref: {"anyOf": [ref, {"type": "null"}]},
    "oneOf": lambda ref: {"oneOf": [ref]},
    "prefixItems": lambda ref: {"type": "array", "prefixItems": [ref]},
    "additionalProperties": lambda ref: {"type": "object", "additionalProperties": ref},
}
STEPS = tuple(_STEPS)
"""How a definition of `chained_schema` may refer to the next."""


def chained_schema(n: int, step: str) -> dict[str, Any]:
    """A schema of *n* definitions, each referring to the next; a compiler follows them all."""
    definitions = {f"d{i}": _STEPS[step]({"$ref": f"#/$defs/d{i + 1}"}) for i in range(n)}
    return {"$defs": {**definitions, f"d{n}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def chained_lark(n: int, name: str) -> str:
    """A grammar for llguidance of *n* rules ("r") or terminals ("T"), each of the next."""
    links = "".join(f"{name}{i}: {name}{i + 1}\n" for i in range(n))
    return f'%llguidance {{}}\nstart: {name}0\n{links}{name}{n}: "x"\n'


def inlined_lark(schema: dict[str, Any]) -> str:
    """A grammar for llguidance that is *schema*."""
    return f"%llguidance {{}}\nstart: %json {json.dumps(schema)}\n"


def joined_schema(pattern: str, n: int) -> dict[str, Any]:
    """Few bytes: a text that matches *pattern*, with each number to *n* for its ``#``."""
    return {
        "allOf": [{"type": "string", "pattern": pattern.replace("#", str(i))} for i in range(1, n)]
    }


def joined_lark(pattern: str, n: int) -> str:
    """The same in llguidance's language, by ``&``."""
    parts = " & ".join(f"/{pattern.replace('#', str(i))}/" for i in range(1, n))
    return f"%llguidance {{}}\nstart: T\nT: {parts}\n"


LATE = "q(x.*a.{#})?"
"""Joined, it compiles at once; what may follow a q takes any time and memory to find out."""


def random_constraint(rng: random.Random) -> dict[str, Any]:
    """A constraint of llguidance that recurses, or that joins patterns, of any size."""
    n = int(10 ** rng.uniform(1, 3.8))
    pattern = rng.choice((LATE, ".*a.{#}", "a.{#}b", "[a-#]*x.{#,900}", "(a|b.{#})*c"))
    joined = joined_schema if rng.random() < 0.5 else joined_lark
    one: Any = rng.choice(
        (
            lambda: chained_schema(n, rng.choice(STEPS)),
            lambda: chained_lark(n * 9, rng.choice("rT")),
            lambda: inlined_lark(chained_schema(n, rng.choice(STEPS))),
            lambda: joined(pattern, rng.choice((3, 9, 15, 30, 300))),
        )
    )()
    return {"grammar" if isinstance(one, str) else "json_schema": one}


CONSTRAINTS: dict[str, dict[str, Any]] = {
    **{f"chain of {step}": {"json_schema": chained_schema(5000, step)} for step in STEPS},
    "chain of rules": {"grammar": chained_lark(4000, "r")},
    "chain of terminals": {"grammar": chained_lark(4000, "T")},
    "deeper than any stack": {"grammar": chained_lark(60_000, "r")},
    "chain inside a rule": {"grammar": inlined_lark(chained_schema(1000, "properties"))},
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
# Each takes seconds of CPU time, its limit, or the memory that it may have.
COSTLY: dict[str, dict[str, Any]] = {
    "joined patterns": {"json_schema": joined_schema("a.{#}b", 31)},
    "joined terminals": {"grammar": joined_lark(".*a.{#}", 301)},
    "joined late": {"json_schema": joined_schema(f"^{LATE}$", 29)},
}
assert all(len(json.dumps(one)) < 1 << 20 for one in (CONSTRAINTS | COSTLY).values())
