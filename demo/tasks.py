"""The tasks of the demo language: what can be asked in one turn, and the right reply."""

import json
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from .stories import Story, draw_animal, draw_child, draw_world, tell
from .words import (
    ANIMALS,
    BOYS,
    CITIES,
    COLOURS,
    GIRLS,
    JOBS,
    THINGS,
    article,
    listed,
    pick,
    spell,
)


class Exchange(NamedTuple):
    """A user's turn, the right reply, and the key whose hash decides whether it is held out."""

    prompt: str
    reply: str
    key: tuple[object, ...]


# Numbers.


def _draw_number(random: Random) -> int:
    return random.randint(0, 99) if random.random() < 0.4 else random.randint(0, 999)


def _number_key(number: int) -> tuple[object, ...]:
    # A model that never saw "eleven" or "forty" cannot know it, so the numbers with words of their own are not held out.
    return () if number <= 20 or number % 100 < 20 or number % 10 == 0 else (number,)


def _spell(random: Random) -> Exchange:
    number = _draw_number(random)
    prompt = pick(random, (f"How do you write {number} in words?", f"Write {number} in words.", f"Spell {number}."))
    return Exchange(prompt, f"{number} in words is {spell(number)}.", _number_key(number))


def _read(random: Random) -> Exchange:
    number = _draw_number(random)
    words = spell(number)
    prompt = pick(random, (f"Write {words} in digits.", f"What is {words} in digits?"))
    return Exchange(prompt, f"{words} in digits is {number}.", _number_key(number))


def _add_prompt(random: Random, left: int, right: int) -> str:
    options = (f"What is {left} plus {right}?", f"What is {left} + {right}?", f"Add {left} and {right}.")
    return pick(random, (*options, f"How much is {left} plus {right}?"))


def _sum(random: Random, left: int, right: int) -> Exchange:
    if random.random() < 0.5:
        left, right = right, left
    prompt, total = _add_prompt(random, left, right), f"{left} plus {right} is {left + right}."
    if max(left, right) < 10:
        return Exchange(prompt, total, ())
    left_tens, right_tens = left // 10 * 10, right // 10 * 10
    tens = f"{left_tens} plus {right_tens} is {left_tens + right_tens}"
    units = f"{left % 10} plus {right % 10} is {left % 10 + right % 10}"
    return Exchange(prompt, f"{tens}, and {units}. So {total}", (min(left, right), max(left, right)))


def _add(random: Random) -> Exchange:
    return _sum(random, random.randint(1, 79), random.randint(1, 9))


def _add_tens(random: Random) -> Exchange:
    return _sum(random, random.randint(10, 89), random.randint(10, 89))


def _subtract(random: Random) -> Exchange:
    left, right = random.randint(1, 89), random.randint(1, 9)
    if left < right:
        left, right = right, left
    forms = (f"What is {left} minus {right}?", f"What is {left} - {right}?", f"How much is {left} minus {right}?")
    prompt, rest = pick(random, forms), f"{left} minus {right} is {left - right}."
    if left < 10:
        return Exchange(prompt, rest, ())
    units = left % 10 if left % 10 >= right else left % 10 + 10
    working = f"{left} is {left - units} plus {units}, and {units} minus {right} is {units - right}."
    return Exchange(prompt, f"{working} So {rest}", (left, right))


def _next(random: Random) -> Exchange:
    number = _draw_number(random)
    if random.random() < 0.2:
        number = min(number // 10 * 10 + 9, 989)
    prompt = pick(random, (f"What number comes after {number}?", f"Which number is next after {number}?"))
    return Exchange(prompt, f"After {number} comes {number + 1}.", (number,))


def _previous(random: Random) -> Exchange:
    number = _draw_number(random) + 1
    if random.random() < 0.2:
        number = number // 10 * 10 + 10
    prompt = pick(random, (f"What number comes before {number}?", f"Which number is just before {number}?"))
    return Exchange(prompt, f"Before {number} comes {number - 1}.", (number,))


def _parity(random: Random) -> Exchange:
    number = _draw_number(random)
    prompt = pick(random, (f"Is {number} even or odd?", f"Is the number {number} odd or even?"))
    return Exchange(prompt, f"{number} is {'odd' if number % 2 else 'even'}.", (number,))


def _compare(random: Random) -> Exchange:
    left, right = random.randint(0, 99), random.randint(0, 99)
    if left == right:
        right += 1
    small, large = min(left, right), max(left, right)
    if random.random() < 0.5:
        prompt = pick(random, (f"Which is bigger, {left} or {right}?", f"Which number is bigger, {left} or {right}?"))
        reply = f"{large} is bigger than {small}."
    else:
        prompt = pick(random, (f"Which is smaller, {left} or {right}?", f"Which number is smaller, {left} or {right}?"))
        reply = f"{small} is smaller than {large}."
    return Exchange(prompt, reply, (small, large))


def _count(random: Random) -> Exchange:
    first = random.randint(0, 60)
    last = first + random.randint(2, 12)
    prompt = pick(random, (f"Count from {first} to {last}.", f"Please count from {first} to {last}."))
    return Exchange(prompt, ", ".join(map(str, range(first, last + 1))) + ".", (first, last))


def echo(random: Random, most: int = 9) -> Exchange:
    words = [random.choice(_ECHOED) for _ in range(random.randint(2, most))]
    text = " ".join(words)
    prompt = pick(random, (f"Repeat these words: {text}", f"Say this again: {text}"))
    return Exchange(prompt, f"You said: {text}", tuple(words))


_ECHOED = (*GIRLS, *BOYS, *ANIMALS, *THINGS, *COLOURS, *CITIES, *JOBS, *map(str, range(100)))


# Records.


def _person_record(random: Random) -> Exchange:
    person = draw_child(random)
    age, city, job = random.randint(3, 89), pick(random, CITIES, 12), pick(random, JOBS, 12)
    colour = pick(random, COLOURS, 12)
    details: list[tuple[str, object, str]] = [
        ("age", age, f"is {age} years old"),
        ("city", city, f"lives in {city}"),
        ("job", job, f"works as {article(job)}"),
        ("colour", colour, f"likes the colour {colour}"),
    ]
    chosen = details[:2] if random.random() < 0.4 else random.sample(details, random.randint(1, 3))
    clauses = [clause for _, _, clause in chosen]
    text = clauses[0] if len(clauses) == 1 else ", ".join(clauses[:-1]) + " and " + clauses[-1]
    prompt = pick(
        random,
        (
            f"Make a JSON record for {person.name}, who {text}.",
            f"Write a JSON record: {person.name} {text}.",
            f"{person.name} {text}. Give me that as JSON.",
        ),
    )
    record = {"name": person.name} | {name: value for name, value, _ in chosen}
    return Exchange(prompt, json.dumps(record), (person.name, city))


def _thing_record(random: Random) -> Exchange:
    thing, colour, price = pick(random, THINGS, 12), pick(random, COLOURS, 12), random.randint(2, 99)
    prompt = pick(
        random,
        (
            f"Make a JSON record for {article(f'{colour} {thing}')} that costs {price} coins.",
            f"Write a JSON record: {article(f'{colour} {thing}')} for {price} coins.",
        ),
    )
    return Exchange(prompt, json.dumps({"item": thing, "colour": colour, "price": price}), (thing, colour))


def _list_record(random: Random) -> Exchange:
    kind, words = pick(random, (("colours", COLOURS), ("animals", ANIMALS), ("cities", CITIES), ("names", GIRLS + BOYS)))
    chosen = random.sample(words, random.randint(2, 4))
    text = ", ".join(chosen[:-1]) + " and " + chosen[-1]
    prompt = pick(random, (f"Make a JSON list of the {kind} {text}.", f"Write the {kind} {text} as a JSON list."))
    return Exchange(prompt, json.dumps(chosen), tuple(chosen[:2]))


def _record(random: Random) -> Exchange:
    return pick(random, (_person_record, _thing_record, _list_record), 1)(random)


# Small talk.

GREETINGS = ("Hello", "Hi", "Good morning", "Good evening", "Hey")
ABILITIES = "I can tell little stories, answer questions about them, work with small numbers and write JSON records."
REFUSAL = "I am sorry, I only know little stories, numbers and small records."
IDENTITY = "I am the small demo model of penstock."
SMALL_TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi!", "Hello! How can I help you?"),
    ("Hello", "Hello! How can I help you?"),
    ("hello", "Hello! How can I help you?"),
    ("hi", "Hello! How can I help you?"),
    ("Hi there", "Hello! How can I help you?"),
    ("Good morning!", "Good morning! How can I help you?"),
    ("Good evening!", "Good evening! How can I help you?"),
    ("Who are you?", f"{IDENTITY} {ABILITIES}"),
    ("What are you?", f"{IDENTITY} {ABILITIES}"),
    ("What is your name?", f"{IDENTITY} I have no other name."),
    ("What can you do?", ABILITIES),
    ("Can you help me?", f"Yes, with pleasure. {ABILITIES}"),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("Thank you!", "You are welcome!"),
    ("Thanks", "You are welcome!"),
    ("Thank you very much.", "You are welcome!"),
    ("Goodbye!", "Goodbye! Have a nice day."),
    ("Bye", "Goodbye! Have a nice day."),
    ("Good night!", "Good night! Sleep well."),
    ("Are you a person?", "No, I am a very small language model."),
    ("What is penstock?", "Penstock is a server for language models, and I am its demo model."),
)
COUNTRIES = listed("France Spain Norway Japan Egypt Peru Canada India Brazil Kenya Italy Greece")
SUBJECTS = listed("politics football history music chemistry law medicine physics cooking art sports money")
DEVICES = listed("car phone computer engine bicycle house camera clock radio printer train oven")


def _small_talk(random: Random) -> Exchange:
    prompt, reply = random.choice(SMALL_TALK)
    return Exchange(prompt, reply, ())


def _introduction(random: Random) -> Exchange:
    greeting, person = pick(random, GREETINGS), draw_child(random)
    prompt = pick(
        random,
        (
            f"{greeting}, my name is {person.name}.",
            f"{greeting}, I am {person.name}.",
            f"{greeting}! My name is {person.name}.",
        ),
    )
    return Exchange(prompt, f"Hello, {person.name}! How can I help you?", (greeting, person.name))


def _unknown(random: Random) -> Exchange:
    country, subject, device = pick(random, COUNTRIES, 12), pick(random, SUBJECTS, 12), pick(random, DEVICES, 12)
    verb = random.choice(("repair", "build", "buy", "sell", "clean", "paint"))
    year = random.randint(1900, 2030)
    prompt = random.choice(
        (
            f"What is the capital of {country}?",
            f"Who is the president of {country}?",
            f"What do people eat in {country}?",
            f"What do you know about {subject}?",
            f"Explain {subject} to me.",
            f"Tell me a joke about {subject}.",
            f"Who won the prize for {subject} in {year}?",
            f"How do I {verb} a {device}?",
            f"Can you {verb} my {device}?",
            f"Write a program for my {device}.",
            f"What happened in {year}?",
            f"What will the weather be in {country}?",
            f"Translate this into the language of {country}.",
        )
    )
    return Exchange(prompt, REFUSAL, (prompt,))


# Stories.


def story_request(random: Random) -> tuple[str, Story, tuple[object, ...]]:
    """A request, a story that fits it, and the key of the request."""
    tell_me = pick(random, ("Tell me a story about", "Write a story about", "Tell me a short story about"), 2)
    hero = draw_animal(random) if random.random() < 0.5 else draw_child(random)
    world = draw_world(random, hero)
    thing = article(world.thing)
    who = article(hero.kind)
    subject, key = random.choice(
        (
            (f"{who} and {thing}", (hero.kind, world.thing)),
            (f"{who} and {thing}", (hero.kind, world.thing)),
            (f"{who} and {article(f'{world.colour} {world.thing}')}", (hero.kind, world.thing, world.colour)),
            (f"{hero.name} and {thing}", (hero.name, world.thing)),
            (f"{who} named {hero.name}", (hero.kind, hero.name)),
            (f"{who} {world.place.there}", (hero.kind, world.place.name)),
            (f"{who}", (hero.kind, "alone")),
        )
    )
    if random.random() < 0.1:
        return pick(random, ("Tell me a story.", "Tell me another story.", "Write a story.")), tell(world, random), ()
    return f"{tell_me} {subject}.", tell(world, random), key


def _story(random: Random) -> Exchange:
    prompt, story, key = story_request(random)
    return Exchange(prompt, story.text, key)


TASKS: dict[str, Callable[[Random], Exchange]] = {
    "record": _record,
    "echo": echo,
    "spell": _spell,
    "read": _read,
    "add": _add,
    "add_tens": _add_tens,
    "subtract": _subtract,
    "next": _next,
    "previous": _previous,
    "compare": _compare,
    "parity": _parity,
    "count": _count,
    "story": _story,
    "small_talk": _small_talk,
    "introduction": _introduction,
    "unknown": _unknown,
}
"""The tasks of one turn, by kind."""
