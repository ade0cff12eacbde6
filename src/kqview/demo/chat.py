"""The chat-shaped share of the demo model's training text, and the chat template it follows.

Owns the ChatML template that the model file carries and the question-and-answer documents written
in it. It never reads a file and needs nothing beyond the standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kqview.demo.text import Story
from kqview.demo.words import ADJECTIVES, NOUNS, PEOPLE, made_up_name, with_article

if TYPE_CHECKING:
    from random import Random

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
