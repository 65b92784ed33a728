"""Training data of the demo language: conversations to train on, and held-out questions for evaluation.

A hash of an exchange's key decides whether it is held out; `conversations` never emits a held-out exchange and `questions` emits no
other, so that a right answer to a question is never a memorized one.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from random import Random
from typing import TypedDict

from .stories import Story, draw_world, tell
from .tasks import TASKS, Exchange, echo, story_request
from .words import pick

HELD_OUT_SHARE = 10
"""One key in this many is held out."""


class Message(TypedDict):
    """One turn. `role` is "system", "user", "assistant", or "text" for a story without any chat around it."""

    role: str
    content: str


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
        prompt, story, key = story_request(random)
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
        exchange = echo(random, most=40)
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


@cache
def story_words() -> frozenset[str]:
    """Every word that a story may use."""
    random = Random("words of stories")
    stories = (tell(draw_world(random), random).text for _ in range(5_000))
    return frozenset(word for text in stories for word in re.findall(r"[A-Za-z]+", text))
