"""Generates small stories, and the questions that can be asked about them.

A story is drawn as a `World` (who, where, what), then told by one of the plots. A plot returns the sentences and the facts, and
each fact is a question with the one right reply.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from .words import (
    ANIMALS,
    BOYS,
    COLOURS,
    COUNTED,
    FEELINGS,
    FEMALE_ANIMALS,
    GIRLS,
    HIDING_PLACES,
    JOBS,
    MALE_ANIMALS,
    PLACES,
    SEEN,
    SIZES,
    THINGS,
    TIMES,
    VEHICLES,
    WEATHER,
    Noun,
    Person,
    Place,
    animal,
    article,
    capital,
    child,
    pick,
    spell,
)


class Fact(NamedTuple):
    """A question about a story and its right reply."""

    question: str
    reply: str


class Story(NamedTuple):
    """What was told, sentence by sentence, and what can be asked about it."""

    sentences: tuple[str, ...]
    facts: tuple[Fact, ...]

    @property
    def text(self) -> str:
        """The story as one paragraph."""
        return " ".join(self.sentences)


@dataclass(frozen=True)
class World:
    """Everything a plot may need, consistent with itself."""

    hero: Person
    friend: Person
    place: Place
    thing: str
    colour: str
    counted: Noun
    count: int
    hidden: str
    weather: str
    time: str
    feeling: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes this world different from others, for the choice of held-out stories."""
        return (self.hero.name, self.place.name, self.thing)


Plot = Callable[[World, Random], Story]


def draw_child(random: Random) -> Person:
    """Any boy or girl."""
    return child(pick(random, pick(random, (GIRLS, BOYS)), 8))


def draw_animal(random: Random) -> Person:
    """Any animal with a name."""
    return animal(pick(random, pick(random, (MALE_ANIMALS, FEMALE_ANIMALS))), pick(random, ANIMALS, 8))


def draw_world(random: Random, hero: Person | None = None) -> World:
    """A world about `hero`, or about a child or an animal."""
    if hero is None:
        hero = draw_child(random) if random.random() < 0.7 else draw_animal(random)
    draw_friend = draw_child if hero.kind in ("boy", "girl") else draw_animal
    friend = draw_friend(random)
    while friend.name == hero.name or friend.kind == hero.kind not in ("boy", "girl"):
        friend = draw_friend(random)
    return World(
        hero=hero,
        friend=friend,
        place=pick(random, PLACES, 8),
        thing=pick(random, THINGS, 8),
        colour=pick(random, COLOURS, 8),
        counted=pick(random, COUNTED, 8),
        count=random.randint(2, 9),
        hidden=pick(random, HIDING_PLACES),
        weather=pick(random, WEATHER),
        time=pick(random, TIMES),
        feeling=pick(random, FEELINGS),
    )


def tell(world: World, random: Random) -> Story:
    """Tell a story of that world by one of the plots."""
    return pick(random, PLOTS)(world, random)


def _say(random: Random, *options: str) -> str:
    return pick(random, options, 1)


def _some(random: Random, share: float, *sentences: str) -> tuple[str, ...]:
    return sentences if random.random() < share else ()


def _friend(world: World) -> str:
    """How a friend is called at first: by name for a child, "a duck named Dot" for an animal."""
    friend = world.friend
    return friend.name if friend.kind in ("boy", "girl") else f"{article(friend.kind)} named {friend.name}"


def _opening(world: World, random: Random) -> tuple[str, ...]:
    hero = world.hero
    size = _say(random, *SIZES)
    first = _say(
        random,
        f"Once upon a time there was a {size} {hero.kind} named {hero.name}.",
        f"There once was a {size} {hero.kind} named {hero.name}.",
        f"This is a story about a {hero.kind} named {hero.name}.",
        f"{hero.name} was a {size} {hero.kind}.",
    )
    second = _say(
        random,
        f"It was a {world.weather} {world.time}.",
        f"One {world.time} it was very {world.weather} outside.",
    )
    return (first, second)


def _ending(world: World, random: Random) -> tuple[str, ...]:
    hero, friend = world.hero, world.friend
    last = _say(
        random,
        f"{hero.name} and {friend.name} were friends for ever.",
        "It was a day to remember.",
        f"That night {hero.name} slept well.",
        f"Then {hero.name} went home and told the story to everyone.",
        "And that is the end of the story.",
    )
    feeling = _say(random, f"{hero.name} felt {world.feeling}.", f"In the end {hero.name} felt very {world.feeling}.")
    return (feeling, last)


def _common_facts(world: World) -> tuple[Fact, ...]:
    hero = world.hero
    return (
        Fact("Who is the story about?", f"The story is about {hero.name}."),
        Fact(f"Where did {hero.name} go?", f"{hero.name} went to the {world.place.name}."),
        Fact(f"How did {hero.name} feel in the end?", f"{hero.name} felt {world.feeling}."),
        Fact("What was the weather like?", f"It was {world.weather}."),
        Fact("What time of day was it?", f"It was {world.time}."),
        Fact(f"What is {hero.name}?", f"{hero.name} is {article(hero.kind)}."),
        Fact(f"Who is the friend of {hero.name}?", f"The friend of {hero.name} is {world.friend.name}."),
    )


def _thing_facts(world: World, verb: str, past: str) -> tuple[Fact, ...]:
    hero, thing = world.hero, f"{world.colour} {world.thing}"
    return (
        Fact(f"What did {hero.name} {verb}?", f"{hero.name} {past} {article(thing)}."),
        Fact(f"What colour was the {world.thing}?", f"The {world.thing} was {world.colour}."),
    )


def _find(world: World, random: Random) -> Story:
    hero, friend, place = world.hero, world.friend, world.place
    thing = f"{world.colour} {world.thing}"
    sentences = (
        *_opening(world, random),
        f"{hero.name} went to the {place.name} with {hero.his} friend, {_friend(world)}.",
        *_some(random, 0.4, _say(random, "On the way they sang a song.", "They talked and laughed all the way.")),
        _say(
            random,
            f"{capital(place.there)}, {hero.name} found {article(thing)} {world.hidden}.",
            f"There {hero.name} found {article(thing)} {world.hidden}.",
        ),
        *_some(random, 0.6, f'"Look at this {world.thing}!" said {hero.name}.'),
        _say(
            random,
            f"{friend.name} liked the {world.thing} very much.",
            f'"How nice it is!" said {friend.name}.',
            f"{friend.name} had never seen such a fine {world.thing}.",
        ),
        _say(
            random,
            f"So {hero.name} gave the {world.thing} to {hero.his} friend.",
            f"They took the {world.thing} home together.",
        ),
        *_ending(world, random),
    )
    facts = (
        *_common_facts(world),
        *_thing_facts(world, "find", "found"),
        Fact(f"Where was the {world.thing}?", f"The {world.thing} was {world.hidden}."),
    )
    return Story(sentences, facts)


def _lose(world: World, random: Random) -> Story:
    hero, friend = world.hero, world.friend
    thing = f"{world.colour} {world.thing}"
    sentences = (
        *_opening(world, random),
        f"{hero.name} had {article(thing)} and took it everywhere.",
        f"{capital(hero.he)} went to the {world.place.name} and lost the {world.thing} there.",
        _say(random, f"{hero.name} looked and looked, but it was gone.", f"{capital(hero.he)} began to cry."),
        f"Then {hero.his} friend, {_friend(world)}, came to help.",
        *_some(random, 0.5, f'"Do not be sad," said {friend.name}. "We will look for it together."'),
        f"{friend.name} found the {world.thing} {world.hidden}.",
        *_some(random, 0.5, f'"Thank you!" said {hero.name}.'),
        *_ending(world, random),
    )
    facts = (
        *_common_facts(world),
        *_thing_facts(world, "lose", "lost"),
        Fact(f"Who found the {world.thing}?", f"{friend.name} found the {world.thing}."),
        Fact(f"Where was the {world.thing}?", f"The {world.thing} was {world.hidden}."),
    )
    return Story(sentences, facts)


def _gather(world: World, random: Random) -> Story:
    hero, friend, many = world.hero, world.friend, world.counted.many
    count = spell(world.count)
    thing = f"{world.colour} {world.thing}"
    sentences = (
        *_opening(world, random),
        f"{hero.name} wanted to make a present for {hero.his} friend, {_friend(world)}.",
        f"So {hero.he} went to the {world.place.name} and took {article(thing)} with {hero.him}.",
        f"There {hero.name} picked up {count} {many}.",
        *_some(random, 0.4, _say(random, "It was hard work.", "A bird sat in a tree and watched.")),
        f"{capital(hero.he)} put the {many} and the {world.thing} on a table.",
        f'"These are for you," said {hero.name}.',
        _say(random, f"{friend.name} smiled and said thank you.", f"{friend.name} jumped for joy."),
        *_ending(world, random),
    )
    facts = (
        *_common_facts(world),
        *_thing_facts(world, "take", "took"),
        Fact(f"How many {many} did {hero.name} pick up?", f"{hero.name} picked up {count} {many}."),
        Fact(f"What did {hero.name} pick up?", f"{hero.name} picked up {count} {many}."),
    )
    return Story(sentences, facts)


def _trade(world: World, random: Random) -> Story:
    hero, friend, many = world.hero, world.friend, world.counted.many
    count = spell(world.count)
    thing = f"{world.colour} {world.thing}"
    sentences = (
        *_opening(world, random),
        f"{hero.name} went to the {world.place.name} with a sack of {count} {many}.",
        f"There {hero.he} met {hero.his} friend, {_friend(world)}.",
        f"{friend.name} was hungry, and all {friend.he} had was {article(thing)}."
        if world.counted.one in ("apple", "nut", "egg", "pear", "berry")
        else f"{friend.name} had no {many}, only {article(thing)}.",
        f'"Give me your {many}, and you get the {world.thing}," said {friend.name}.',
        _say(random, f'"I will do that," said {hero.name}.', f"{hero.name} thought about it and said yes."),
        f"So {hero.name} got the {world.thing}.",
        *_ending(world, random),
    )
    facts = (
        *_common_facts(world),
        *_thing_facts(world, "get", "got"),
        Fact(f"How many {many} did {hero.name} have?", f"{hero.name} had {count} {many}."),
        Fact(f"Who did {hero.name} meet?", f"{hero.name} met {friend.name}."),
    )
    return Story(sentences, facts)


def _travel(world: World, random: Random) -> Story:
    hero, friend, place = world.hero, world.friend, world.place
    thing = f"{world.colour} {world.thing}"
    vehicle, seen, count = pick(random, VEHICLES), pick(random, SEEN), spell(world.count)
    sentences = (
        *_opening(world, random),
        f"{hero.name} and {hero.his} friend, {_friend(world)}, wanted to see the {place.name}.",
        f"{hero.name} packed {article(thing)} and some bread.",
        f"They went there by {vehicle}.",
        _say(random, f"{capital(place.there)} they saw {count} {seen.many}.", f"There they saw {count} {seen.many}."),
        *_some(random, 0.5, f'"Look at the {seen.many}!" said {friend.name}.'),
        _say(
            random,
            f"They gave the bread to the {seen.many}.",
            f"The {seen.many} were not afraid of them.",
            f"One of the {seen.many} sat down on the {world.thing}.",
        ),
        *_some(random, 0.5, f"On the way back {friend.name} carried the {world.thing}."),
        *_ending(world, random),
    )
    facts = (
        *_common_facts(world),
        *_thing_facts(world, "pack", "packed"),
        Fact(f"How many {seen.many} did they see?", f"They saw {count} {seen.many}."),
        Fact("How did they travel?", f"They went by {vehicle}."),
    )
    return Story(sentences, facts)


def _rescue(world: World, random: Random) -> Story:
    hero = world.hero
    thing = f"{world.colour} {world.thing}"
    seen = pick(random, SEEN).one
    sentences = (
        *_opening(world, random),
        f"{hero.name} took a walk and went to the {world.place.name}.",
        f"There {hero.he} heard a small voice {world.hidden}.",
        f"It was {article(seen)} that could not find its mother.",
        *_some(random, 0.5, f'"Do not cry," said {hero.name}.'),
        f"{hero.name} ran to get {hero.his} friend, {_friend(world)}.",
        _say(random, "Together they found the mother at last.", "They looked everywhere and found the mother."),
        f"To say thank you, she gave {hero.name} {article(thing)}.",
        *_ending(world, random),
    )
    facts = (
        *_common_facts(world),
        *_thing_facts(world, "get", "got"),
        Fact("Who could not find its mother?", f"The {seen} could not find its mother."),
        Fact(f"Where was the {seen}?", f"The {seen} was {world.hidden}."),
    )
    return Story(sentences, facts)


def _buy(world: World, random: Random) -> Story:
    hero, friend, thing = world.hero, world.friend, world.thing
    seller, price, coins = pick(random, JOBS), spell(world.count), spell(world.count + random.randint(1, 9))
    sentences = (
        *_opening(world, random),
        f"{hero.name} had saved {coins} coins.",
        f"{capital(hero.he)} went to the {world.place.name} to buy a present for {hero.his} friend, {_friend(world)}.",
        f"There {article(seller)} had {article(f'{world.colour} {thing}')} for sale.",
        f"It cost only {price} coins, so {hero.name} bought it.",
        *_some(random, 0.5, f'"This {thing} is for you," said {hero.name}.'),
        _say(
            random,
            f"{friend.name} was very pleased.",
            f"{friend.name} smiled and said thank you.",
            f'"I will always keep it," said {friend.name}.',
        ),
        *_ending(world, random),
    )
    facts = (
        *_common_facts(world),
        *_thing_facts(world, "buy", "bought"),
        Fact(f"How many coins did {hero.name} have?", f"{hero.name} had {coins} coins."),
        Fact(f"How much did the {thing} cost?", f"The {thing} cost {price} coins."),
        Fact(f"Who sold the {thing}?", f"The {seller} sold the {thing}."),
    )
    return Story(sentences, facts)


PLOTS: Sequence[Plot] = (_find, _lose, _gather, _trade, _travel, _rescue, _buy)
