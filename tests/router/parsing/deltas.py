"""Generated text as it arrives, and what readers find in it."""

import random
import re
from collections.abc import Sequence
from typing import Any

from penstock.router.parsing import Arguments, Call, Part, Reasoning, Text, reader

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}, "any": {}},
    },
    "now": {"type": "object", "properties": {}},
}


PARIS = '{"city": "Paris", "days": 3}'


def parts_of(deltas: Sequence[str], reasoning: str | None, tools: str | None, **options: Any) -> list[Part]:
    """All parts that a reader finds, adjacent ones joined and call ids removed."""
    read = reader(reasoning, tools, **options)
    found: list[Part] = []
    for part in [part for delta in deltas for part in read.push(delta)] + read.end():
        last = found[-1] if found else None
        match last, part:
            case (Text(), Text()):
                found[-1] = Text(last.text + part.text)
            case (Reasoning(), Reasoning()):
                found[-1] = Reasoning(last.text + part.text)
            case (Arguments(), Arguments()) if last.index == part.index:
                found[-1] = Arguments(part.index, last.text + part.text)
            case (_, Call()):
                assert re.fullmatch(r"call_[0-9a-f]{24}|[A-Za-z0-9]{9}|functions\.\w+:\d+|[a-z0-9]{10}", part.id)
                found.append(Call(part.index, "", part.name))
            case _:
                found.append(part)
    return found


def calls(*found: tuple[str, str], first: int = 0) -> list[Part]:
    return [part for index, (name, text) in enumerate(found, first) for part in (Call(index, "", name), Arguments(index, text))]


def random_deltas(text: str, rng: random.Random) -> list[str]:
    """Splits a text at random places, as tokens do; some deltas are empty."""
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 2 + len(text) // rng.choice([1, 4, 20]))))
    return [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)]
