"""What does it cost to choose among 100 replicas, and what does it save? Simulated: caches that forget, requests that take time.

    python benchmarks/placement.py                  half a minute
    python benchmarks/placement.py --only documents one of the workloads
    python benchmarks/placement.py --replicas 8

Each replica keeps the pages of what it computed last, as many as fit, and a request lasts as long as its uncached tokens and its
answer take. Compared are the router's own `placement`, with session keys and without, a replica at random, and the least loaded
one. Goal: at most 100 us of CPU per request, in the median.
"""

import argparse
import gc
import heapq
import random
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.bench.flags import at_least, checked, count
from penstock.router.placement import Placed, Placement

PAGE = 16
PAGES = 20_000  # of a replica: 320,000 tokens, as an 8 B model has in 40 GB
PROMPT_SPEED, DECODE_SPEED = 20_000.0, 40.0  # tokens a second, of a prompt alone and of one answer among many
LOAD = 12  # requests in flight on each replica, on average
GOAL = 100.0  # us

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """A request of the trace."""

    prompt: Prompt
    answer: int
    session: str


class Trace:
    """An endless trace: `share` of the requests continue a conversation, the others begin one."""

    def __init__(self, prefixes: int, length: int, share: float, seed: int, replicas: int) -> None:
        self._dice = random.Random(seed)
        self._prefixes = [self._text(length) for _ in range(prefixes)]
        # Some prefixes are far more popular than others.
        self._weights = [1 / (place + 1) ** 0.7 for place in range(prefixes)]
        self._share = share
        self._open: list[tuple[str, Prompt]] = []
        self._most = 60 * replicas
        self._count = 0

    def next(self) -> Asked:
        """The next request."""
        dice = self._dice
        if self._open and dice.random() < self._share:
            place = dice.randrange(len(self._open))
            session, history = self._open[place]
        else:
            self._count += 1
            session, history = str(self._count), dice.choices(self._prefixes, self._weights)[0]
            place = len(self._open) if len(self._open) < self._most else dice.randrange(len(self._open))
            self._open[place : place + 1] = [(session, history)]
        prompt = history + self._text(dice.randint(20, 200))
        answer = dice.randint(50, 400)
        longer = prompt + self._text(answer)
        if len(longer) > 8000:
            del self._open[place]
        else:
            self._open[place] = session, longer
        return Asked(prompt, answer, session)

    def _text(self, tokens: int) -> Prompt:
        return tuple(self._dice.choices(range(100_000), k=tokens))


class Cache:
    """A replica's simulated LRU page cache."""

    def __init__(self) -> None:
        self._pages: OrderedDict[int, None] = OrderedDict()

    def use(self, prompt: Prompt) -> int:
        """Cached tokens of the prompt. All of it is cached from now on."""
        chain, found, lost = 0, 0, False
        for place in range(0, len(prompt) - PAGE, PAGE):
            chain = hash((chain, prompt[place : place + PAGE]))
            lost = lost or chain not in self._pages
            found += 0 if lost else PAGE
            self._pages[chain] = None
            self._pages.move_to_end(chain)
        while len(self._pages) > PAGES:
            self._pages.popitem(last=False)
        return found


@dataclass
class Found:
    """Results of a trace."""

    tokens: int = 0
    hits: int = 0  # tokens
    found: int = 0  # requests that found at least half of their prompt
    most: float = 0.0  # sum of the largest loads, relative to the mean
    costs: list[float] = field(default_factory=list)  # us of CPU


Choose = Callable[[Placement, Asked, int, random.Random], Placed | None]


def ours(placement: Placement, asked: Asked, work: int, dice: random.Random) -> Placed | None:
    """By prefix and load."""
    return placement.place(asked.prompt, work)


def sticky(placement: Placement, asked: Asked, work: int, dice: random.Random) -> Placed | None:
    """By session, too."""
    return placement.place(asked.prompt, work, session=asked.session)


def least(placement: Placement, asked: Asked, work: int, dice: random.Random) -> Placed | None:
    """The least loaded: placement without a prompt."""
    return placement.place((), work)


def anyone(placement: Placement, asked: Asked, work: int, dice: random.Random) -> Placed | None:
    """At random."""
    name = dice.choice(placement.names)
    return placement.place((), work, fits=lambda other: other == name)


POLICIES: dict[str, Choose] = {"random": anyone, "least loaded": least, "prefix": ours, "prefix and session": sticky}
WORKLOADS = {
    "chats": ("conversations over 200 system prompts of 1,000 tokens", 200, 1000, 0.75),
    "documents": ("questions about 4,000 documents of 4,000 tokens", 4000, 4000, 0.3),
}


def run(choose: Choose, trace: Trace, replicas: int, requests: int) -> Found:
    """One policy, one trace. Requests before all replicas are busy do not count."""
    placement, caches, dice = Placement(PAGE), [Cache() for _ in range(replicas)], random.Random(2)
    for number in range(replicas):
        placement.join(str(number))
    found, loads = Found(), [0] * replicas
    live: list[tuple[float, int, int]] = []  # when each ends
    now, warm = 0.0, LOAD * replicas
    for number in range(requests + warm):
        asked = trace.next()
        while live and (len(live) >= warm or live[0][0] <= now):
            now, replica, work = heapq.heappop(live)
            placement.release(str(replica), work)
            loads[replica] -= work
        work = len(asked.prompt) + asked.answer
        max(asked.prompt)  # brings the tokens into the CPU's cache, as validation does right before
        began = time.process_time()
        placed = choose(placement, asked, work, dice)
        cost = time.process_time() - began
        assert placed is not None
        replica = int(placed.name)
        loads[replica] += work
        hit = caches[replica].use(asked.prompt)
        seconds = (len(asked.prompt) - hit) / PROMPT_SPEED + asked.answer / DECODE_SPEED
        heapq.heappush(live, (now + seconds, replica, work))
        if number >= warm:
            found.costs.append(cost * 1e6)
            found.tokens += len(asked.prompt)
            found.hits += hit
            found.found += hit >= len(asked.prompt) / 2
            found.most += max(loads) * replicas / sum(loads)
    return found


def main() -> int:
    """See the module. Exit code 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=checked(count), default=100)
    parser.add_argument("--requests", type=checked(at_least(2)), default=6000)
    parser.add_argument("--only", choices=list(WORKLOADS))
    options = parser.parse_args()
    gc.disable()  # the simulated caches hold millions of pages, which no router has to scan
    dearest = 0.0
    for name, (what, prefixes, length, share) in WORKLOADS.items():
        if options.only not in (None, name):
            continue
        print(f"\n{name}: {what}; {options.requests} requests to {options.replicas} replicas")
        print(f"{'':20}{'tokens cached':>14}{'requests hit':>14}{'largest load':>14}{'us: median':>12}{'p99':>8}")
        for policy, choose in POLICIES.items():
            found = run(choose, Trace(prefixes, length, share, 1, options.replicas), options.replicas, options.requests)
            told = ""
            if choose in (ours, sticky):
                ranks = statistics.quantiles(found.costs, n=100)
                dearest = max(dearest, ranks[49])
                told = f"{ranks[49]:12.1f}{ranks[98]:8.1f}"
            print(
                f"{policy:20}{found.hits / found.tokens:14.1%}{found.found / options.requests:14.1%}"
                f"{found.most / options.requests:13.2f}x{told}",
                flush=True,
            )
    print(f"\ngoal <= {GOAL:g} us of CPU per request: {dearest:.1f} us {'met' if dearest <= GOAL else 'MISSED'}")
    return int(dearest > GOAL)


if __name__ == "__main__":
    sys.exit(main())
