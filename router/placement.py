"""Cache-aware load balancing: which replica takes a request. Pure: knows token ids, names and integers; no clock, no IO, and
nothing of what a replica is.
    join, leave      replicas come and go: one that has left, or died, has an empty cache
    place -> Placed  a request goes to one of them; its prompt counts as cached there from now on
    assign           a request goes to a certain one
    release          it has ended, or moved away

What each replica has cached is estimated from what it was sent, in an index of prompt prefixes; the shards are not asked.

    load      A replica may take a request while that leaves it at most TOLERANCE above the mean, in tokens of outstanding requests.
              There is always one: the least loaded. So no prefix, however popular, makes one replica a bottleneck; it spreads.
    session   Among those, the one where the session's last request went: its conversation is there, answers included. Sessions may
              go a little further above the mean (LOYALTY): to leave costs them the whole conversation.
    prefix    Else the one that has most of the prompt cached; of several the least loaded. Cached tokens don't count as load.
    otherwise The least loaded; where loads are equal, the one that was given least so far.

The index maps the hash of a prompt's prefix (`prefix_keys`) to the replicas that have seen it, as bits. Two generations bound the
memory: what is used moves to the young one, and when that is full the old one is dropped. A hash collision between prefixes that
differ only in tokens that are not sampled costs a cache hit, never an answer.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from .prefix_keys import PrefixKeys

TOLERANCE = 1.1  # times the mean load that a replica may have
LOYALTY = 1.5  # the same for a session's previous replica
UNIT = 16  # tokens: prefixes end at no finer places, however small pages are
GROWTH = 4  # a stride is a quarter of the length so far
BEGINNINGS = 1 << 17  # prefixes per generation: some 15 MB
SESSIONS = 1 << 16  # sessions per generation

_burden = attrgetter("load", "given", "bit")  # of a place: unique


@dataclass(frozen=True, slots=True)
class Placed:
    """The replica chosen for a request, and why."""

    name: str
    reason: str  # "session", "prefix" or "load"
    hit: int  # tokens of the prompt that are probably cached there


@dataclass(slots=True)
class _Place:
    """A replica that takes requests, with its load."""

    name: str
    bit: int
    load: int = 0  # tokens of outstanding requests
    given: int = 0  # tokens in total


class Generations:
    """Bit masks by key. Each bit is kept for at least `size` keys after it was last added, and for twice as many at most."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: int) -> int:
        """The bits of a key."""
        return self._young.get(key, 0) | self._old.get(key, 0)

    def add(self, key: int, bit: int) -> None:
        """Adds a bit to a key."""
        self._young[key] = self._young.get(key, 0) | bit
        if len(self._young) >= self._size:
            self._young, self._old = {}, self._young

    def put(self, key: int, bit: int) -> None:
        """Sets a key to this bit alone."""
        self._old.pop(key, None)
        self._young[key] = 0
        self.add(key, bit)

    def clear(self, bit: int) -> None:
        """Removes a bit from all keys."""
        for generation in (self._young, self._old):
            for key in [key for key, bits in generation.items() if bits & bit]:
                generation[key] &= ~bit
                if not generation[key]:
                    del generation[key]


class Placement:
    """The replicas of one router, by name."""

    def __init__(self, page_size: int = UNIT, *, prefixes: int = BEGINNINGS, sessions: int = SESSIONS) -> None:
        self._prefix_keys = PrefixKeys(page_size * -(-UNIT // page_size), GROWTH, sampled=True)
        self._places: dict[str, _Place] = {}
        self._by_bit: dict[int, _Place] = {}
        self._order: list[_Place] = []  # by load, the least first: most choices are made near its beginning
        self._total = 0  # load of all
        self._index = Generations(prefixes)
        self._sessions = Generations(sessions)

    @property
    def names(self) -> list[str]:
        """Names of the replicas that take requests."""
        return [*self._places]

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def remembered(self) -> int:
        """Size of the index: prefixes and sessions."""
        return len(self._index) + len(self._sessions)

    def load(self, name: str) -> int:
        """Tokens of its outstanding requests."""
        return self._places[name].load

    def join(self, name: str, load: int = 0) -> None:
        """A replica takes requests from now on, with an empty cache. load: of requests that it has nevertheless."""
        bit = next(1 << number for number in range(len(self._by_bit) + 1) if 1 << number not in self._by_bit)
        # Starting at 0 it would be behind for ever, and get all requests that have no other preference.
        given = min((place.given for place in self._order), default=0)
        place = self._places[name] = self._by_bit[bit] = _Place(name, bit, load, given)
        self._total += load
        insort(self._order, place, key=_burden)

    def leave(self, name: str) -> None:
        """It takes no more requests, and its cache is gone. Nothing happens if it isn't here."""
        place = self._places.pop(name, None)
        if place is None:
            return
        del self._by_bit[place.bit], self._order[self._rank(place)]
        self._total -= place.load
        self._index.clear(place.bit)
        self._sessions.clear(place.bit)

    def place(
        self,
        prompt: tuple[int, ...],
        work: int,
        *,
        key: str = "",
        session: str = "",
        fits: Callable[[str], bool] = lambda name: True,
    ) -> Placed | None:
        """Chooses a replica for a request. work: tokens that it counts for; key: requests with equal keys share cached prefixes;
        fits: whether a chosen replica can take it, else another is chosen. None: no replica can take it."""
        keys = self._prefix_keys.of(prompt, key)
        sticky = hash((key, session)) if session else None
        refused = 0
        while len(self._order) > refused.bit_count():
            chosen, reason, hit = self._choose(refused, keys, work, sticky)
            if fits(chosen.name):
                self._take(chosen, keys, work, sticky)
                return Placed(chosen.name, reason, hit)
            refused |= chosen.bit
        return None

    def assign(self, name: str, work: int) -> None:
        """A request goes there that was not placed. Nothing happens if the replica isn't here."""
        place = self._places.get(name)
        if place is not None:
            self._change(place, work)

    def release(self, name: str, work: int) -> None:
        """A request that was placed or assigned there has gone. Nothing happens if the replica isn't here."""
        place = self._places.get(name)
        if place is not None:
            self._change(place, -work)

    def _rank(self, place: _Place) -> int:
        return bisect_left(self._order, _burden(place), key=_burden)

    def _change(self, place: _Place, work: int) -> None:
        del self._order[self._rank(place)]
        place.load += work
        place.given += max(work, 0)
        self._total += work
        insort(self._order, place, key=_burden)

    def _take(self, chosen: _Place, keys: list[tuple[int, int]], work: int, sticky: int | None) -> None:
        self._change(chosen, work)
        for _, key in keys:
            self._index.add(key, chosen.bit)
        if sticky is not None:
            self._sessions.put(sticky, chosen.bit)

    def _choose(self, refused: int, keys: list[tuple[int, int]], work: int, sticky: int | None) -> tuple[_Place, str, int]:
        """refused: replicas that can't take it, as bits; at least one can."""
        least = next(place for place in self._order if not place.bit & refused)
        mean = (self._total + work) / len(self._order)
        held = self._held(keys)
        bit = self._sessions.get(sticky) & ~refused if sticky is not None else 0
        if bit:
            loyal = self._by_bit[bit]
            if loyal.load + work <= max(LOYALTY * mean, least.load + 2 * work):
                return loyal, "session", next((length for length, bits in held if bits & bit), 0)
        bound = max(TOLERANCE * mean, least.load + work)
        for length, bits in held:
            holder = self._least(bits & ~refused, bound - work + length)
            if holder is not None:
                return holder, "prefix", length
        return least, "load", 0

    def _least(self, bits: int, most: float) -> _Place | None:
        """Of these the least loaded, if its load is no more than `most`."""
        if bits in self._by_bit:  # a single one
            return self._by_bit[bits] if self._by_bit[bits].load <= most else None
        if bits:
            for place in self._order:
                if place.load > most:
                    break
                if place.bit & bits:
                    return place
        return None

    def _held(self, keys: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Which replicas hold how many tokens of the prompt's prefix, as bits: the longest first, each replica in all that it
        holds."""
        held: list[tuple[int, int]] = []
        bits = -1
        for length, key in keys:
            bits &= self._index.get(key)
            if not bits:
                break
            if held and held[-1][1] == bits:
                held.pop()
            held.append((length, bits))
        held.reverse()
        return held
