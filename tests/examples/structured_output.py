"""Answers with a shape: a pydantic model, one of a few words, a pattern; they are values again."""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, Field, TypeAdapter

from kqview import Engine

Name = Annotated[str, Field(pattern="^[A-Z][a-z]{2,6}$")]


class Pet(BaseModel):
    kind: Literal["cat", "dog", "owl"]
    name: Name


class Person(BaseModel):
    name: Name
    age: Annotated[int, Field(ge=1, le=120)]
    pets: Annotated[list[Pet], Field(max_length=2)]


with Engine.demo(n_ctx=512) as engine:
    generation = engine.generate("Anna has a cat.", json_schema=Person, seed=1)
    print(generation.read())
    person: Person = generation.parsed
    print(f"{person.name}, {person.age}:", [pet.kind for pet in person.pets])

    either: TypeAdapter[Literal["yes", "no"]] = TypeAdapter(Literal["yes", "no"])
    answer = engine.generate("Is it raining?", json_schema=either, temperature=0)
    answer.read()
    print(answer.parsed)

    clock = re.compile("(0[1-9]|1[0-2]):[0-5][0-9] (am|pm)", re.IGNORECASE)
    print(engine.generate("It is", regex=clock, seed=1).read())
