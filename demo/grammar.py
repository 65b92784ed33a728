"""Knows the tasks of the demo language: what can be asked, and what the right reply is.

Each task draws an `Exchange`: a prompt, the one right reply, and a key. A hash of the key decides whether the exchange
is held out; `conversations` never emits a held-out exchange and `questions` emits no other, so that a right answer to
a question is never a remembered one.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from typing import NamedTuple, TypedDict

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

HELD_OUT_SHARE = 10
"""One key in this many is held out."""


class Message(TypedDict):
    """One turn. `role` is "system", "user", "assistant", or "text" for a story without any chat around it."""

    role: str
    content: str


class Exchange(NamedTuple):
    """A user's turn, the right reply, and the key whose hash decides whether it is held out."""

    prompt: str
    reply: str
    key: tuple[object, ...]


Check = Callable[[str], bool]


@dataclass(frozen=True)
class Question:
    """A held-out conversation that ends with the user's turn, and what a right answer to it is."""

    kind: str
    messages: tuple[Message, ...]
    answer: str
    accept: Check

    def check(self, text: str) -> bool:
        """Whether `text` is a right answer."""
        return self.accept(text.strip())


def held_out(kind: str, key: tuple[object, ...]) -> bool:
    """Whether exchanges of this kind and key are kept away from training; an empty key never is."""
    if not key:
        return False
    digest = sha256(repr((kind, *key)).encode()).digest()
    return int.from_bytes(digest[:4]) % HELD_OUT_SHARE == 0


def _user(content: str) -> Message:
    return Message(role="user", content=content)


def _assistant(content: str) -> Message:
    return Message(role="assistant", content=content)


# Numbers.


def _draw_number(random: Random) -> int:
    return random.randint(0, 99) if random.random() < 0.4 else random.randint(0, 999)


def _number_key(number: int) -> tuple[object, ...]:
    # Who never saw "eleven" or "forty" cannot guess it, so the numbers with words of their own are not held out.
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


def _echo(random: Random, most: int = 9) -> Exchange:
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


def _story_request(random: Random) -> tuple[str, Story, tuple[object, ...]]:
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
    prompt, story, key = _story_request(random)
    return Exchange(prompt, story.text, key)


TASKS: dict[str, Callable[[Random], Exchange]] = {
    "record": _record,
    "echo": _echo,
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

KINDS = (*TASKS, "reading", "name")
"""All kinds of questions; "reading" asks about a story, "name" asks for a name said earlier."""

_WEIGHTS = {
    "record": 24,
    "echo": 5,
    "spell": 3,
    "read": 3,
    "add": 10,
    "add_tens": 9,
    "subtract": 14,
    "next": 4,
    "previous": 3,
    "compare": 9,
    "parity": 2,
    "count": 4,
    "story": 3,
    "small_talk": 2,
    "introduction": 1,
    "unknown": 2,
}
"""How often each task is trained: the harder, the more often."""

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "Answer in plain English.",
    "Be kind and short.",
)


def _draw(random: Random, kind: str, wanted: bool) -> Exchange:
    """An exchange of that kind which is held out, or is not, as wanted."""
    while True:
        exchange = TASKS[kind](random)
        if held_out(kind, exchange.key) == wanted:
            return exchange


def _reading(random: Random, wanted: bool) -> list[Message]:
    """A story told by either side, and one to six questions about it, each with its reply."""
    while True:
        prompt, story, key = _story_request(random)
        world = draw_world(random)
        own = tell(world, random)
        pasted = random.random() < 0.6
        if pasted and held_out("reading", world.key) == wanted:
            return _pasted_reading(random, own)
        if not pasted and not held_out("story", key) and held_out("reading", (story.text,)) == wanted:
            asked = random.sample(story.facts, random.randint(1, 6))
            turns = [message for fact in asked for message in (_user(fact.question), _assistant(fact.reply))]
            return [_user(prompt), _assistant(story.text), *turns]


def _pasted_reading(random: Random, story: Story) -> list[Message]:
    asked = random.sample(story.facts, random.randint(1, 6))
    opening = pick(
        random,
        (
            f"{story.text} {asked[0].question}",
            f"Read this story: {story.text} {asked[0].question}",
            f"Here is a story. {story.text}\n\n{asked[0].question}",
        ),
    )
    turns = [message for fact in asked[1:] for message in (_user(fact.question), _assistant(fact.reply))]
    return [_user(opening), _assistant(asked[0].reply), *turns]


def _named(random: Random, wanted: bool) -> list[Message]:
    """An introduction, now and then something else, then the question for the name."""
    first = _draw(random, "introduction", wanted)
    name = first.reply.removeprefix("Hello, ").split("!")[0]
    messages = [_user(first.prompt), _assistant(first.reply)]
    if random.random() < 0.5:
        other = _draw(random, pick(random, ("next", "record", "spell", "small_talk")), False)
        messages += [_user(other.prompt), _assistant(other.reply)]
    question = pick(random, ("What is my name?", "Do you know my name?", "Who am I?"))
    return [*messages, _user(question), _assistant(f"Your name is {name}.")]


def _plain(random: Random) -> list[Message]:
    """One story without any chat around it."""
    while True:
        world = draw_world(random)
        if not held_out("reading", world.key):
            return [Message(role="text", content=tell(world, random).text)]


def _part(random: Random) -> list[Message]:
    """A few turns of one task."""
    draw = random.random()
    if draw < 0.18:
        return _reading(random, False)
    if draw < 0.19:
        return _named(random, False)
    exchange = _draw(random, random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0], False)
    return [_user(exchange.prompt), _assistant(exchange.reply)]


def first_lessons(seed: int) -> Iterator[list[Message]]:
    """Requests to repeat words, none held out: whoever can copy learns everything else far sooner."""
    random = Random(f"first lessons {seed}")
    for _ in range(2000):
        exchange = _echo(random, most=40)
        if not held_out("echo", exchange.key):
            yield [_user(exchange.prompt), _assistant(exchange.reply)]


def conversations(seed: int) -> Iterator[list[Message]]:
    """Training text without end; the same seed gives the same conversations, none with a held-out exchange."""
    random = Random(f"training {seed}")
    while True:
        if random.random() < 0.04:
            yield _plain(random)
            continue
        messages = [Message(role="system", content=pick(random, SYSTEM_MESSAGES))] if random.random() < 0.08 else []
        parts = 1 if random.random() < 0.6 else random.randint(2, 6)
        for _ in range(parts):
            messages += _part(random)
        yield messages


def questions(seed: int, kind: str) -> Iterator[Question]:
    """Held-out questions of one of `KINDS` without end; the same seed gives the same questions."""
    random = Random(f"held out {kind} {seed}")
    while True:
        if kind in ("reading", "name"):
            messages = (_reading if kind == "reading" else _named)(random, True)
        else:
            # Small talk is a fixed list, of which nothing can be held out.
            exchange = _draw(random, kind, kind != "small_talk")
            messages = [_user(exchange.prompt), _assistant(exchange.reply)]
        answer = messages[-1]["content"]
        yield Question(kind, tuple(messages[:-1]), answer, _acceptance(kind, messages[-2]["content"], answer))


def _acceptance(kind: str, prompt: str, answer: str) -> Check:
    if kind == "story":
        return lambda text: story_fits(prompt, text)
    if kind == "record":
        return lambda text: _same_json(text, answer)
    return lambda text: text == answer


def _same_json(text: str, answer: str) -> bool:
    try:
        return bool(json.loads(text) == json.loads(answer))
    except ValueError:
        return False


def story_fits(prompt: str, text: str) -> bool:
    """Whether `text` is a story of 5 to 12 sentences, in words of the language, with all that the prompt asked for."""
    asked = set(re.findall(r"\w+", prompt.split(" about ")[-1])) - {"a", "an", "and", "at", "in", "on", "the", "named"}
    told = set(re.findall(r"[A-Za-z]+", text))
    sentences = re.findall(r'[.!?]"?(?= [A-Z"]|$)', text)
    return text.endswith(".") and 5 <= len(sentences) <= 12 and asked <= told and told <= story_words()


def story_words() -> frozenset[str]:
    """Every word that a story may use."""
    if not _STORY_WORDS:
        random = Random("words of stories")
        for _ in range(5_000):
            _STORY_WORDS.update(re.findall(r"[A-Za-z]+", tell(draw_world(random), random).text))
    return frozenset(_STORY_WORDS)


_STORY_WORDS: set[str] = set()
