"""The vocabulary of the demo language: names, animals, places, things, and their English inflections.

Every list is ordered: earlier words are drawn more often (see `pick`), so that a model of the language has a clear favourite
wherever the choice is free.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")


class Person(NamedTuple):
    """Somebody a story can be about; `he`, `him`, `his` are the pronouns that fit."""

    name: str
    kind: str
    he: str
    him: str
    his: str


class Place(NamedTuple):
    """A place and the preposition that says one is there: "in the forest"."""

    name: str
    preposition: str

    @property
    def there(self) -> str:
        """The place with its preposition, as in "at the river"."""
        return f"{self.preposition} the {self.name}"


class Noun(NamedTuple):
    """A thing that can be counted."""

    one: str
    many: str


def listed(words: str) -> tuple[str, ...]:
    """The words of a text, one by one."""
    return tuple(words.split())


GIRLS = listed(
    "Anna Mia Lucy Emma Sara Nora Ella Rosa Lily Clara Ida Maya Jane Kate Eva Zoe Ruth Alma Olga Vera Alice Maria "
    "Sophie Laura Julia Helen Amy Grace"
)
BOYS = listed(
    "Tom Ben Max Leo Sam Jack Finn Paul Otto Hugo Adam Noah Karl Luke Omar Ivan Oscar Peter Felix Theo Bob John "
    "David Daniel Simon George Ali Mark"
)
FEMALE_ANIMALS = listed("Dot Molly Poppy Daisy Hazel")
MALE_ANIMALS = listed("Rusty Pip Bruno Toby Fred")
ANIMALS = listed(
    "fox bear rabbit mouse owl frog hedgehog duck cat dog goat pony squirrel turtle badger pig dragon wolf lion robot "
    "elephant monkey penguin tiger crow snail otter giant"
)
THINGS = listed(
    "kite boat hat ball lamp cup key box drum bell book scarf spoon basket ring coin flute umbrella pencil clock "
    "candle mirror map blanket letter whistle rope bucket jar guitar teapot doll crown ladder balloon pillow "
    "bottle button watch chair"
)
COLOURS = listed("red blue green yellow white black brown orange purple pink grey golden")
FEELINGS = listed("happy proud glad calm brave tired cheerful thankful")
WEATHER = listed("sunny windy cold warm foggy rainy snowy cloudy")
TIMES = ("morning", "afternoon", "evening")
SIZES = ("little", "small", "young", "clever")
CITIES = listed(
    "Oslo Rome Paris London Berlin Madrid Lisbon Vienna Prague Dublin Athens Cairo Lima Tokyo Delhi Boston Toronto "
    "Zurich Bern Riga Helsinki Warsaw Milan Geneva Hamburg Lyon Porto Seoul Quito Havana Munich Sydney Chicago "
    "Moscow Naples Kyoto Bristol Oxford Vilnius Budapest"
)
JOBS = listed("baker farmer doctor teacher painter sailor singer pilot nurse gardener driver cook")
PLACES = (
    Place("river", "at"),
    Place("forest", "in"),
    Place("beach", "on"),
    Place("park", "in"),
    Place("lake", "at"),
    Place("market", "at"),
    Place("garden", "in"),
    Place("hill", "on"),
    Place("farm", "on"),
    Place("library", "in"),
    Place("mill", "at"),
    Place("harbour", "in"),
    Place("meadow", "in"),
    Place("school", "at"),
    Place("castle", "in"),
    Place("bridge", "on"),
)
HIDING_PLACES = (
    "under an old tree",
    "behind a big stone",
    "in the tall grass",
    "next to a wall",
    "under a wooden bench",
    "behind a door",
    "between two bushes",
    "on a low branch",
)
COUNTED = (
    Noun("shell", "shells"),
    Noun("apple", "apples"),
    Noun("stone", "stones"),
    Noun("nut", "nuts"),
    Noun("flower", "flowers"),
    Noun("egg", "eggs"),
    Noun("pear", "pears"),
    Noun("berry", "berries"),
    Noun("leaf", "leaves"),
    Noun("feather", "feathers"),
    Noun("bead", "beads"),
    Noun("acorn", "acorns"),
)
SEEN = (
    Noun("duck", "ducks"),
    Noun("rabbit", "rabbits"),
    Noun("goat", "goats"),
    Noun("frog", "frogs"),
    Noun("swan", "swans"),
    Noun("lamb", "lambs"),
    Noun("cow", "cows"),
    Noun("horse", "horses"),
    Noun("pigeon", "pigeons"),
    Noun("puppy", "puppies"),
    Noun("kitten", "kittens"),
    Noun("chick", "chicks"),
)
VEHICLES = ("train", "bus", "bicycle", "ship", "cart", "car")

_UNITS = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = listed("twenty thirty forty fifty sixty seventy eighty ninety")


def pick(random: Random, options: Sequence[Item], steepness: float = 4.0) -> Item:
    """Draw one option; the i-th has weight 1 / (i + steepness), so a small steepness prefers the first ones."""
    return random.choices(options, [1 / (index + steepness) for index in range(len(options))])[0]


def child(name: str) -> Person:
    """The boy or girl of that name."""
    return Person(name, "girl", "she", "her", "her") if name in GIRLS else Person(name, "boy", "he", "him", "his")


def animal(name: str, kind: str) -> Person:
    """The animal of that name and kind."""
    if name in FEMALE_ANIMALS:
        return Person(name, kind, "she", "her", "her")
    return Person(name, kind, "he", "him", "his")


def article(word: str) -> str:
    """The word with "a" or "an" before it."""
    if word[0] in "aeio" or word.startswith("um"):
        return f"an {word}"
    return f"a {word}"


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def spell(number: int) -> str:
    """A number from 0 to 999 in words, the British way: 312 is "three hundred and twelve"."""
    if number >= 100:
        hundreds, rest = divmod(number, 100)
        return f"{_UNITS[hundreds]} hundred" + (f" and {spell(rest)}" if rest else "")
    if number < 20:
        return _UNITS[number]
    tens, unit = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_UNITS[unit]}" if unit else "")
