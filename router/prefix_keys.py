"""By what prompts are found to begin alike, without comparing them: keys of their beginnings. Pure; knows token ids.

Beginnings end at page boundaries, at each one at first, then in strides that grow with the length, so that a prompt of n tokens has
O(log n) of them. Each key includes the one before: who has one has all shorter ones.
"""

from array import array

FINE = 8  # beginnings until strides grow
LONGEST = 1 << 24  # tokens: longer prompts are looked at up to there


class PrefixKeys:
    """Of prompts, as keys; equal ones only mean something where `unit`, `growth` and `sampled` are the same."""

    def __init__(self, unit: int, growth: int, sampled: bool = False) -> None:
        """unit: tokens of a page; a stride is the `growth`th part of the length so far. sampled: of a long stride a few tokens are
        looked at instead of all."""
        self._sampled = sampled
        self._cuts: list[tuple[int, slice]] = []
        place = 0
        while place < LONGEST:
            units = max(1, place // (unit * growth)) if place >= unit * FINE else 1
            end = place + unit * units
            self._cuts.append((end, slice(place, end, 2 * units if sampled and units > 1 else 1)))
            place = end

    def of(self, prompt: tuple[int, ...], key: str) -> list[tuple[int, int]]:
        """(length, key) of each, the shortest first. The last token is never one's end: it is computed in any case. key: prompts
        with different ones share nothing."""
        length, chain = len(prompt), hash(key)
        tokens = prompt if self._sampled else array("I", prompt)
        found = []
        for end, part in self._cuts:
            if end >= length:
                break
            looked_at = tokens[part]
            # Of bytes nobody outside knows the hash, which has a secret; of numbers anybody could make two that are alike.
            chain = hash((chain, looked_at.tobytes() if isinstance(looked_at, array) else looked_at))
            found.append((end, chain))
        return found
