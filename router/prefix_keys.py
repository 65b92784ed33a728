"""Hash keys of prompt prefixes, by which prompts with common beginnings are found without comparing them. Pure; knows token ids.

Prefixes end at page boundaries, at each one at first, then in strides that grow with the length, so that a prompt of n tokens has
O(log n) of them. Each key includes the one before: who has one has all shorter ones.
"""

from array import array

FINE = 8  # prefixes until strides grow
LONGEST = 1 << 24  # tokens: longer prompts are hashed up to here


class PrefixKeys:
    """Computes prefix keys of prompts; keys are comparable only where `unit`, `growth` and `sampled` are equal."""

    def __init__(self, unit: int, growth: int, sampled: bool = False) -> None:
        """unit: tokens per page; growth: a stride is the `growth`th part of the length so far; sampled: hash only some tokens of a
        long stride."""
        self._sampled = sampled
        self._cuts: list[tuple[int, slice]] = []
        place = 0
        while place < LONGEST:
            units = max(1, place // (unit * growth)) if place >= unit * FINE else 1
            end = place + unit * units
            self._cuts.append((end, slice(place, end, 2 * units if sampled and units > 1 else 1)))
            place = end

    def of(self, prompt: tuple[int, ...], key: str) -> list[tuple[int, int]]:
        """(length, key) of each prefix, the shortest first. The last token never ends one: it is computed in any case. key: prompts
        with different ones share nothing."""
        length, chain = len(prompt), hash(key)
        tokens = prompt if self._sampled else array("I", prompt)
        found = []
        for end, part in self._cuts:
            if end >= length:
                break
            looked_at = tokens[part]
            # The hash of bytes is salted with a secret; with numbers, anybody could construct collisions.
            chain = hash((chain, looked_at.tobytes() if isinstance(looked_at, array) else looked_at))
            found.append((end, chain))
        return found
