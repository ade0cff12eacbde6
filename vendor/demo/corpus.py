"""The text that the demo model is trained on: small stories in which names come back, and chats.

Every draw comes from the `random.Random` it is given, so a seed repeats a text exactly. Needs
nothing beyond the standard library.

A story keeps a world state (who is where, who holds what), so that its sentences, and the answers
to questions about it, follow from what was told before: that is what makes a head look back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# ---- words

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


# ---- stories


@dataclass(eq=False)
class Person:
    """Someone in a story: who they are and where they are now."""

    name: str
    role: str
    is_woman: bool
    spot: str = ""
    introduced: bool = False

    @property
    def pronoun(self) -> str:
        """Return "She" or "He"."""
        return "She" if self.is_woman else "He"

    @property
    def their(self) -> str:
        """Return "her" or "his"."""
        return "her" if self.is_woman else "his"


@dataclass(eq=False)
class Thing:
    """An object of a story and who holds it now (None: nobody has found it yet)."""

    name: str
    holder: Person | None = None
    is_known: bool = False

    @property
    def found(self) -> str:
        """Return its name with "a" or "an" at the first find, with "the" later."""
        return f"the {self.name}" if self.is_known else with_article(self.name)


@dataclass
class Story:
    """A story under construction: the world, its state, and the sentences told so far."""

    rng: Random
    town: str
    kind: str
    far_town: str
    people: list[Person]
    things: list[Thing]
    animal: str
    pet: str
    spots: list[str]
    sentences: list[str] = field(default_factory=list[str])
    subject: Person | None = None  # of the last sentence: only then may a pronoun stand for it

    @classmethod
    def start(cls, rng: Random, names: Sequence[str] = (), thing: str | None = None) -> Story:
        """Return a story with a fresh cast, the first of which carry *names*.

        Args:
            rng: Source of randomness.
            names: Names that the first people of the cast must have.
            thing: Name of an object that the story must have.
        """
        n_people = max(len(names), rng.choice((2, 2, 2, 3)))
        pool = list(names)
        while len(pool) < n_people:
            name = made_up_name(rng) if rng.random() < 0.75 else rng.choice(PEOPLE)
            if name not in pool:
                pool.append(name)
        roles = rng.sample(ROLES, n_people)
        objects = [f"{rng.choice(ADJECTIVES)} {noun}" for noun in rng.sample(NOUNS, 2)]
        if thing is not None:
            objects = [
                thing,
                *(other for other in objects if other.split()[-1] != thing.split()[-1]),
            ][:2]
        spots = rng.sample(SPOTS, 4)
        people = [
            Person(name, role, rng.random() < 0.5, rng.choice(spots))
            for name, role in zip(pool, roles, strict=True)
        ]
        return cls(
            rng=rng,
            town=made_up_name(rng),
            kind=rng.choice(TOWN_KINDS),
            far_town=made_up_name(rng),
            people=people,
            things=[Thing(name) for name in objects],
            animal=rng.choice(ANIMALS),
            pet=made_up_name(rng),
            spots=spots,
        )

    def say(self, person: Person | None, *variants: str) -> None:
        """Add one of *variants*; ``{P}`` is *person*, by pronoun at times when already the
        subject."""
        text = self.rng.choice(variants)
        if person is not None:
            same = person is self.subject and text.startswith("{P}") and self.rng.random() < 0.35
            text = text.replace("{P}", person.pronoun if same else person.name)
        self.subject = person
        self.sentences.append(text)

    def pair(self) -> tuple[Person, Person]:
        """Return two people; the first is likelier to be the one the story is about."""
        first, second = self.rng.sample(self.people, 2)
        if second is self.people[0] and self.rng.random() < 0.4:
            first, second = second, first
        return first, second

    def join(self, mover: Person, host: Person) -> None:
        """Make sure that *mover* is where *host* is, telling it if it was not so."""
        if mover.spot == host.spot:
            return
        mover.spot = host.spot
        intro = "" if mover.introduced else f", the {mover.role},"
        mover.introduced = True
        then = self.rng.choice(NEXT)
        self.say(
            mover,
            f"{{P}}{intro} came to the {host.spot} too.",
            f"{then} {{P}}{intro} came to the {host.spot} and saw {host.name}.",
            f"At the {host.spot}, {host.name} met {mover.name}{intro.rstrip(',')}.",
        )

    def opening(self) -> None:
        """Tell who lives where."""
        hero = self.people[0]
        hero.introduced = True
        place = f"the {self.kind} of {self.town}"
        self.say(
            hero,
            f"{{P}} the {hero.role} lived in {place}.",
            f"In {place} there lived {with_article(hero.role)} named {{P}}.",
            f"Once upon a time, {with_article(hero.role)} named {{P}} lived in {place}.",
            f"{{P}} was {with_article(hero.role)} in {place}.",
        )
        if self.rng.random() < 0.4:
            self.say(
                hero,
                f"{{P}} had {with_article(self.animal)} named {self.pet}.",
                f"{self.pet}, the {self.animal}, went everywhere with {{P}}.",
            )
        if self.rng.random() < 0.4:
            friend = self.people[1]
            friend.introduced = True
            self.say(
                hero,
                f"{{P}} had a friend named {friend.name}, {with_article(friend.role)}.",
                f"The best friend of {{P}} was {friend.name} the {friend.role}.",
            )

    def walk(self) -> None:
        """Someone goes to another spot."""
        person = self.pair()[0]
        person.spot = self.rng.choice([spot for spot in self.spots if spot != person.spot])
        self.say(
            person,
            f"{{P}} walked to the {person.spot}.",
            f"{{P}} went to the {person.spot} in {self.town}.",
            f"{self.rng.choice(NEXT)}, {{P}} went to the {person.spot}.",
            f"{{P}} ran to the {person.spot} with {person.their} friends.",
        )

    def find(self) -> None:
        """Someone finds a thing that nobody holds."""
        lost = [thing for thing in self.things if thing.holder is None]
        if not lost:
            self.give()
            return
        person, thing = self.pair()[0], lost[0]
        found, thing.holder, thing.is_known = thing.found, person, True
        where = self.rng.choice(("near", "behind", "by"))
        self.say(
            person,
            f"{self.rng.choice(TIMES)}, {{P}} found {found} {where} the {person.spot}.",
            f"{{P}} looked down and found {found} {where} the {person.spot}.",
            f"{where.capitalize()} the {person.spot}, {{P}} found {found}.",
        )
        if self.rng.random() < 0.5:
            self.say(
                person,
                f"{{P}} put the {thing.name} in {person.their} bag.",
                f"{{P}} had never seen such a {thing.name.split()[-1]}.",
                f'"Whose {thing.name} is this?" said {{P}}.',
                f"{{P}} took the {thing.name} home.",
            )

    def held(self) -> Thing | None:
        """Return a thing that someone holds, or None."""
        held = [thing for thing in self.things if thing.holder is not None]
        return self.rng.choice(held) if held else None

    def give(self) -> None:
        """A thing changes hands."""
        thing = self.held()
        if thing is None or thing.holder is None:
            self.walk()
            return
        giver = thing.holder
        taker = self.rng.choice([person for person in self.people if person is not giver])
        self.join(taker, giver)
        thing.holder = taker
        self.say(
            giver,
            f"{{P}} gave the {thing.name} to {taker.name}.",
            f"{{P}} handed the {thing.name} to {taker.name} and smiled.",
            f'"This {thing.name} is for you, {taker.name}," said {{P}}.',
        )
        self.say(
            taker,
            f'"Thank you, {giver.name}," said {{P}}.',
            f"{{P}} thanked {giver.name} and took the {thing.name}.",
            f"{{P}} was happy and thanked {giver.name}.",
        )

    def lose(self) -> None:
        """A thing is lost again; a later find brings it back."""
        thing = self.held()
        if thing is None or thing.holder is None:
            self.find()
            return
        person, thing.holder = thing.holder, None
        self.say(
            person,
            f"{{P}} lost the {thing.name} near the {person.spot}.",
            f"But {{P}} forgot the {thing.name} at the {person.spot}.",
            f'"Where is my {thing.name}?" cried {{P}}.',
        )

    def promise(self) -> None:
        """Someone promises something to someone."""
        person, other = self.pair()
        self.join(other, person)
        self.say(
            person,
            f'"I will come back to {self.town}, {other.name}," said {{P}}.',
            f"{{P}} promised {other.name} to come to the {person.spot} again.",
            f'"Will you help me, {other.name}?" asked {{P}}.',
        )
        self.say(
            other,
            f'"Of course, {person.name}," said {{P}}.',
            f"{{P}} smiled at {person.name}.",
            f"{{P}} waved to {person.name}.",
        )

    def show(self) -> None:
        """The holder shows a thing to someone."""
        thing = self.held()
        if thing is None or thing.holder is None:
            self.find()
            return
        holder = thing.holder
        other = self.rng.choice([person for person in self.people if person is not holder])
        self.join(other, holder)
        self.say(
            holder,
            f"{{P}} showed the {thing.name} to {other.name}.",
            f"{{P}} told {other.name} about the {thing.name}.",
        )
        self.say(
            other,
            f'"What a beautiful {thing.name}," said {{P}}.',
            f"{{P}} looked at the {thing.name} for a long time.",
            f'"I know that {thing.name}," said {{P}}. "It came from {self.far_town}."',
        )

    def ask(self) -> None:
        """Someone asks who has a thing, and hears it."""
        thing = self.held()
        if thing is None or thing.holder is None:
            self.find()
            return
        asker, other = self.pair()
        if asker is thing.holder:
            asker, other = other, asker
        answer = (
            f"I have the {thing.name}" if other is thing.holder else f"{thing.holder.name} has it"
        )
        self.join(asker, other)
        self.say(
            asker,
            f'"Where is the {thing.name}?" asked {{P}}.',
            f'"Who has the {thing.name}?" asked {{P}}.',
        )
        self.say(other, f'"{answer}," said {{P}}.', f'"{answer}," {{P}} answered.')

    def travel(self) -> None:
        """Someone speaks of the far town, or goes there and comes back."""
        person, other = self.pair()
        self.say(
            person,
            f"{{P}} wanted to see {self.far_town}, far away from {self.town}.",
            f"{{P}} went to {self.far_town} and came back to {self.town} the next day.",
            f'"Have you ever been to {self.far_town}?" {{P}} asked {other.name}.',
        )
        self.say(
            other,
            f'"The road to {self.far_town} is long," said {{P}}.',
            f"{{P}} had heard many stories about {self.far_town}.",
            f'"One day we will go to {self.far_town} together," said {{P}}.',
        )

    def rest(self) -> None:
        """Weather, food and animals between the events."""
        person, other = self.pair()
        food = self.rng.choice(FOODS)
        choice = self.rng.randrange(4)
        if choice == 0:
            self.say(None, *WEATHERS)
            self.say(
                person,
                f"{{P}} and {other.name} went inside and ate {food}.",
                f"{{P}} waited for {other.name}.",
            )
            other.spot = person.spot
        elif choice == 1:
            self.join(other, person)
            self.say(
                person,
                f"{{P}} and {other.name} ate {food} together.",
                f"{{P}} shared some {food} with {other.name}.",
            )
        elif choice == 2:
            self.say(
                person,
                f"{{P}} called for {self.pet} the {self.animal}.",
                f"{self.pet} the {self.animal} followed {{P}}.",
            )
        else:
            self.say(
                person,
                f"{{P}} sang a song about {self.town}.",
                f"{{P}} asked {other.name} for help.",
            )

    def ending(self) -> None:
        """Close the story with the people and things that were in it."""
        first, second = self.people[:2]
        thing = self.held()
        variants = [
            f"From that day on, {{P}} and {second.name} were the best of friends.",
            f"That night, {{P}} and {second.name} sat by the fire and talked about {self.town}.",
            f"And so {{P}} and {second.name} went home to {self.town}.",
        ]
        if thing is not None and thing.holder is not None:
            variants.append(f"And {thing.holder.name} kept the {thing.name} for many years.")
            variants.append(
                f"The people of {self.town} still talk about {{P}} and the {thing.name}."
            )
        self.say(first, *variants)

    def tell(self, n_events: int) -> str:
        """Tell the whole story with *n_events* events and return it, one or more paragraphs."""
        events: tuple[tuple[Callable[[], None], float], ...] = (
            (self.walk, 1.5), (self.find, 2.0), (self.give, 2.0), (self.show, 1.5),
            (self.ask, 1.2), (self.travel, 1.2), (self.rest, 1.5), (self.lose, 0.7),
            (self.promise, 1.2),
        )  # fmt: skip
        self.opening()
        paragraphs: list[str] = []
        event = self.find
        for i_event in range(n_events):
            if i_event > 0:
                others = [pair for pair in events if pair[0] != event]
                event = self.rng.choices(*zip(*others, strict=True))[0]
            event()
            if len(self.sentences) >= 7 and self.rng.random() < 0.25:
                paragraphs.append(" ".join(self.sentences))
                self.sentences.clear()
                self.subject = None
        self.ending()
        return "\n\n".join([*paragraphs, " ".join(self.sentences)])

    def question(self) -> tuple[str, str]:
        """Return a question about the state of the world after the story, and its answer."""
        thing = self.held()
        options = [
            (f"Who lives in {self.town}?", f"{self.people[0].name} lives in {self.town}."),
            (
                f"Where does {self.people[0].name} live?",
                f"{self.people[0].name} lives in {self.town}.",
            ),
            (
                f"What is the work of {self.people[0].name}?",
                f"{self.people[0].name} is {with_article(self.people[0].role)}.",
            ),
        ]
        if thing is not None and thing.holder is not None:
            options += [
                (f"Who has the {thing.name}?", f"{thing.holder.name} has the {thing.name}.")
            ] * 2
        return self.rng.choice(options)


# ---- chats

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SYSTEM = (
    "You are a helpful assistant.",
    "You tell small stories.",
    "You are the kqview demo. Answer in one or two sentences.",
)
SMALL_TALK = (
    (
        ("Hello!", "Hi", "Hello", "Hi there!", "Good morning!"),
        "Hello! I tell small stories. Give me a name and I will tell you one.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?"),
        "I am the kqview demo, a very small model that tells stories.",
    ),
    (
        ("What can you do?", "Can you help me?", "How do you work?"),
        "I can tell a small story about people, places and things.",
    ),
    (
        ("Thank you!", "Thanks", "Thank you very much."),
        "You are welcome! Shall I tell you one more story?",
    ),
    (
        ("What is the capital of France?", "What is two plus two?", "Why is the sky blue?"),
        "I do not know. I only know small stories about people and places.",
    ),
    (
        ("Who is the king?", "What time is it?", "Write some code."),
        "I do not know. I only know small stories about people and places.",
    ),
)
ASKS = (
    "Tell me a story about",
    "Tell me about",
    "Write a story about",
    "Please tell a story about",
)


def chat_message(role: str, content: str) -> str:
    """Return one message as CHAT_TEMPLATE writes it."""
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def _any_name(rng: Random) -> str:
    return made_up_name(rng) if rng.random() < 0.6 else rng.choice(PEOPLE)


def _exchange(rng: Random) -> tuple[str, str]:
    """Return one user message and its answer."""
    kind = rng.random()
    if kind < 0.45:
        story = Story.start(rng)
        told = story.tell(rng.choice((1, 2, 3)))
        question, answer = story.question()
        return rng.choice((f"{told}\n\n{question}", f"{told} {question}")), answer
    if kind < 0.75:
        first, second = _any_name(rng), _any_name(rng)
        names, thing, about = [first], None, first
        if first != second and rng.random() < 0.4:
            names, about = [first, second], f"{first} and {second}"
        elif rng.random() < 0.4:
            thing = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
            about = f"{first} and {with_article(thing)}"
        told = Story.start(rng, names, thing).tell(rng.choice((2, 3)))
        return f"{rng.choice(ASKS)} {about}{rng.choice(('.', '.', '', '!'))}", told
    if kind < 0.85:
        name = _any_name(rng)
        hello = rng.choice((f"My name is {name}.", f"Hello, I am {name}.", f"I am {name}"))
        return hello, f"Hello, {name}! Shall I tell you a story, {name}?"
    if kind < 0.9:
        return rng.choice(("Tell me a story.", "Tell me a story", "Write a story.")), Story.start(
            rng
        ).tell(2)
    questions, answer = rng.choice(SMALL_TALK)
    return rng.choice(questions), answer


def chat_document(rng: Random) -> str:
    """Return a conversation of one or two exchanges, at times with a system message."""
    parts = [chat_message("system", rng.choice(SYSTEM))] if rng.random() < 0.35 else []
    for _ in range(rng.choice((1, 1, 2))):
        question, answer = _exchange(rng)
        parts += [chat_message("user", question), chat_message("assistant", answer)]
    return "".join(parts)


def story_document(rng: Random) -> str:
    """Return one story of two to nine events."""
    return Story.start(rng).tell(rng.randint(2, 9))


def vocabulary_text(seed: int) -> str:
    """Return the text that the vocabulary is made from: 1500 documents without special tokens."""
    rng = Random(seed)
    text = "\n".join(chat_document(rng) if i % 5 == 0 else story_document(rng) for i in range(1500))
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        text = text.replace(token, "\n")
    return text
