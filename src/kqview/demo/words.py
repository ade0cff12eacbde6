"""The words of the demo model's stories: made-up names, people, places, things.

Owns the word lists and the two ways to make a name up: from the pieces that training sees, and
from pieces that it never sees (for the tests of induction). Needs nothing beyond the standard
library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

# fmt: off
# Pieces of names that training sees.
STARTS: tuple[str, ...] = (
    "b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "br", "dr", "fl",
    "gl", "gr", "st", "th", "sh", "tr",
)
VOWELS: tuple[str, ...] = ("a", "e", "i", "o", "u")
MIDDLES: tuple[str, ...] = (
    "b", "d", "l", "m", "n", "r", "s", "t", "v", "rd", "rl", "lm", "nd", "sk",
)
ENDS: tuple[str, ...] = (
    "a", "o", "in", "en", "ar", "el", "is", "or", "ia", "an", "on", "el", "une", "isa", "ora",
    "etta",
)
# Pieces of names that it never sees: no start starts a seen name, no end ends one.
UNSEEN_STARTS: tuple[str, ...] = (
    "z", "j", "y", "w", "x", "zh", "vr", "kw", "gw", "vl", "sn", "kr", "pl", "sk",
)
UNSEEN_MIDDLES: tuple[str, ...] = ("z", "zz", "p", "k", "pp", "ck", "x", "gg", "ft", "lk")
UNSEEN_ENDS: tuple[str, ...] = ("ub", "ox", "eek", "ap", "iff", "ozz", "ym", "up", "eg", "oosh")
# The people, places and things of the stories.
PEOPLE: tuple[str, ...] = (
    "Anna", "Tom", "Maria", "Ben", "Lena", "Sam", "Clara", "Jack", "Nina", "Paul", "Emma",
    "Leo", "Rosa", "Max", "Ida", "Otto", "Eva", "Hugo", "Mia", "Finn", "Alice", "Bob", "John",
    "Mary", "Lily", "David", "Sarah", "Peter", "Lucy", "Mark",
)
ROLES: tuple[str, ...] = (
    "baker", "farmer", "fisher", "teacher", "miller", "painter", "gardener", "doctor", "sailor",
    "tailor", "hunter", "singer", "potter", "carpenter", "shepherd", "clockmaker",
)
TOWN_KINDS: tuple[str, ...] = ("village", "town", "valley", "city")
SPOTS: tuple[str, ...] = (
    "mill", "market", "old bridge", "river", "harbor", "school", "tower", "garden", "forest",
    "well", "bakery", "hill", "library", "barn", "lake", "church",
)
ADJECTIVES: tuple[str, ...] = (
    "silver", "golden", "small", "red", "blue", "green", "old", "wooden", "round", "broken",
    "shiny", "heavy", "strange", "little",
)
NOUNS: tuple[str, ...] = (
    "key", "ring", "book", "lamp", "cup", "map", "bell", "box", "coin", "letter", "clock",
    "flute", "stone", "hat", "knife", "mirror", "boat", "doll",
)
ANIMALS: tuple[str, ...] = ("dog", "cat", "horse", "goat", "bird", "fox")
FOODS: tuple[str, ...] = ("bread", "soup", "apples", "cheese", "honey cake", "fish")
WEATHERS: tuple[str, ...] = (
    "It was raining.", "The sun was warm.", "It began to snow.", "The wind was cold.",
)
TIMES: tuple[str, ...] = (
    "One morning", "One day", "One evening", "Early one morning", "One summer day",
    "One winter day",
)
NEXT: tuple[str, ...] = (
    "Then", "After that", "Soon", "Later", "The next day", "In the evening", "A little later",
)
# fmt: on


def made_up_name(rng: Random, *, unseen: bool = False) -> str:
    """Return a made-up name, capitalised, of two or three syllables.

    Args:
        rng: Source of randomness.
        unseen: Build it from pieces that training never uses, so that it was never seen.
    """
    if unseen:
        starts, middles, ends = UNSEEN_STARTS, UNSEEN_MIDDLES, UNSEEN_ENDS
    else:
        starts, middles, ends = STARTS, MIDDLES, ENDS
    parts = [rng.choice(starts)]
    for _ in range(rng.choice((1, 1, 1, 2))):
        parts += [rng.choice(VOWELS), rng.choice(middles)]
    return "".join([*parts, rng.choice(ends)]).capitalize()


def with_article(noun: str) -> str:
    """Return *noun* with "a" or "an" before it."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun
