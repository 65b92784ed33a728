"""The prefix cache (a trie of pages) finds exactly the pages that were computed and are still there: random operations against a
dictionary. Planted faults show that the checks find them."""

import random
from array import array
from collections import Counter
from typing import Any

import pytest

from penstock.shard.pages import OutOfPages, PagePool
from penstock.shard.prefix import Holder, Node, PrefixCache
from penstock.shard.sequence import Sequence

PAGES = 14
SIZE = 2
LONGEST = 11
KEYS = ("", "tenant")


class RandomOperations:
    """Random operations on sequences of few different tokens, so that they share prefixes often. Every slot of the pages records
    what was computed there."""

    def __init__(self, seed: int, pool: type[PagePool] = PagePool, prefixes: type[PrefixCache] = PrefixCache) -> None:
        self.chance = random.Random(seed)
        self.pool = pool(PAGES, SIZE)
        self.prefixes = prefixes(self.pool)
        self.holders: list[Sequence] = []
        self.slots: dict[int, list[object]] = {}  # the content of a page's slots: the cache key and the tokens up to there
        self.known: dict[tuple[str, tuple[int, ...]], int] = {}  # the oracle: pages by cache key and tokens up to their end
        self.found = self.swapped = self.evicted = self.withdrawn = 0

    def run(self, turns: int) -> None:
        for _ in range(turns):
            verb = self.chance.choice([self.arrive, self.step, self.step, self.step, self.leave, self.leave, self.withdraw])
            if verb != self.arrive or len(self.holders) < 6:
                verb()
            self.check()
        while self.holders:
            self.leave()
            self.check()
        assert self.pool.free == PAGES
        self.prefixes.clear()
        assert (self.pool.free, self.pool.cached) == (PAGES, 0)
        assert not self.prefixes._roots
        assert not self.prefixes._nodes
        assert sorted(self.pool.take(PAGES)) == list(range(1, PAGES + 1))

    def arrive(self) -> None:
        tokens = [self.chance.choice([0, 0, 0, 1]) for _ in range(self.chance.randint(1, LONGEST))]
        self.holders.append(Sequence(array("I", tokens), len(tokens), cache_key=self.chance.choice(KEYS)))

    def step(self) -> None:
        """Computes tokens of several sequences; later ones may use pages that earlier ones have only announced."""
        planned: list[tuple[Sequence, int]] = []
        for holder in self.chance.sample(self.holders, min(3, len(self.holders))):
            if self.chance.random() < 0.6:
                self.adopt(holder)
            start = holder.computed
            count = self.chance.randint(0, len(holder.tokens) - start)
            try:
                self.take_pages(holder, start + count)
            except OutOfPages:
                continue
            holder.computed += count
            planned.append((holder, start))
            self.notify(holder, self.prefixes.announce)
        self.begin_step()
        for holder, start in planned:
            for place in range(start, holder.computed):
                self.slots[holder.pages[place // SIZE]][place % SIZE] = self.name(holder, place + 1)
        for holder, _ in planned:
            self.notify(holder, self.prefixes.publish)

    def begin_step(self) -> None:
        """Called when a step begins."""

    def take_pages(self, holder: Sequence, tokens: int) -> None:
        before = len(holder.pages)
        self.pool.extend(holder.pages, tokens)
        for page in holder.pages[before:]:
            self.slots[page] = [None] * SIZE
            gone = [name for name, known in self.known.items() if known == page]
            self.evicted += len(gone)
            for name in gone:
                del self.known[name]

    def adopt(self, holder: Sequence) -> None:
        limit = self.chance.choice([len(holder.tokens), len(holder.tokens) - 1])
        before, computed = list(holder.pages), holder.computed
        reach = computed
        expected = before
        if self.attached(holder):
            pages = before[: computed // SIZE]
            while (page := self.known.get(self.name(holder, (len(pages) + 1) * SIZE))) and (len(pages) + 1) * SIZE <= limit:
                pages.append(page)
            if len(pages) * SIZE > computed:
                reach, expected = len(pages) * SIZE, pages
        gained = self.prefixes.adopt(holder, limit)
        assert (gained, holder.computed, list(holder.pages)) == (reach - computed, reach, expected)
        self.found += gained

    def notify(self, holder: Sequence, tell: object) -> None:
        before = list(holder.pages)
        tell(holder)  # type: ignore[operator]
        if self.attached(holder):
            for page in range(holder.node.depth if holder.node else 0):
                self.known.setdefault(self.name(holder, (page + 1) * SIZE), holder.pages[page])
        self.swapped += before != list(holder.pages)

    def leave(self) -> None:
        if self.holders:
            holder = self.holders.pop(self.chance.randrange(len(self.holders)))
            self.pool.release(holder.pages)

    def withdraw(self) -> None:
        if not self.holders or self.chance.random() < 0.8:
            return
        holder = self.chance.choice(self.holders)
        if holder.node and holder.node.attached:
            self.withdrawn += 1
            key, first = self.name(holder, SIZE)
            self.known = {name: page for name, page in self.known.items() if (name[0], name[1][:SIZE]) != (key, first)}
        self.prefixes.withdraw(holder)
        self.holders.remove(holder)
        self.pool.release(holder.pages)

    @staticmethod
    def name(holder: Sequence, length: int) -> tuple[str, tuple[int, ...]]:
        return holder.cache_key, tuple(holder.tokens[:length])

    @staticmethod
    def attached(holder: Sequence) -> bool:
        return holder.node is None or holder.node.attached

    def check(self) -> None:
        pool, nodes = self.pool, self.prefixes._nodes
        held = Counter(page for holder in self.holders for page in holder.pages)
        assert {page: count for page, count in enumerate(pool._references) if count} == held
        assert pool.free + len(held) == PAGES
        assert sorted([*pool._unused, *pool._cached, *held]) == list(range(1, PAGES + 1))
        assert set(self.known.values()) == set(nodes)
        assert all(page in nodes for page in pool._cached)
        if pool._cached:
            assert not nodes[next(iter(pool._cached))].children, "the next page to be evicted has children"
        for page, node in nodes.items():
            assert node.parent is not None
            assert held[node.parent.page] >= held[page] or not node.parent.depth, "a page is held without its predecessor"
        for holder in self.holders:
            for place in range(holder.computed):
                assert self.slots[holder.pages[place // SIZE]][place % SIZE] == self.name(holder, place + 1)
            if holder.node and holder.node.attached:
                assert holder.node.depth == holder.computed // SIZE
                assert self.path(holder.node) == list(holder.pages[: holder.node.depth])

    @staticmethod
    def path(node: Node) -> list[int]:
        pages: list[int] = []
        while node.parent:
            pages.insert(0, node.page)
            node = node.parent
        return pages


@pytest.mark.parametrize("seed", range(12))
def test_prefix_cache_agrees_with_a_dictionary_under_random_operations(seed: int) -> None:
    operations = RandomOperations(seed)
    operations.run(1500)
    assert min(operations.found // SIZE, operations.swapped, operations.evicted) > 10
    assert operations.withdrawn > 3


# Planted faults


class ParentsFirst(PagePool):
    """Releases pages first to last."""

    def release(self, pages: object) -> None:
        super().release(list(reversed(pages)))  # type: ignore[call-overload]


class LastReleasedFirst(PagePool):
    """Evicts the page that was released last first."""

    def _evict(self) -> int:
        self._cached.move_to_end(list(self._cached)[-1], last=False)
        return super()._evict()


class EvictsShared(PagePool):
    """Pages that are shared out of the cache can still be evicted."""

    def share(self, pages: object) -> None:
        cached = self._cached.copy()
        super().share(pages)  # type: ignore[arg-type]
        self._cached = cached


class KeepsEvicted(PrefixCache):
    """Still finds pages that were evicted and taken for other content."""

    def _evicted(self, page: int) -> None:
        self._nodes.pop(page)


class AllowsDuplicates(PrefixCache):
    """Allows two pages with the same content, of which one has children that the other's holders have."""

    def publish(self, holder: Holder) -> None:
        self.announce(holder)
        while holder.node and holder.computed >= (holder.node.depth + 1) * SIZE:
            key = holder.tokens[holder.node.depth * SIZE :][:SIZE].tobytes()
            holder.node = holder.node.children[key]


class IgnoresWithdraw(PrefixCache):
    """Still finds pages that were withdrawn."""

    def withdraw(self, holder: Holder) -> None:
        pass


class IgnoresCacheKeys(PrefixCache):
    """Ignores cache keys."""

    def _root(self, key: bytes) -> Node:
        return super()._root(b"")


class IgnoresLimit(PrefixCache):
    """Finds more tokens than the limit."""

    def adopt(self, holder: Holder, limit: int) -> int:
        return super().adopt(holder, limit + SIZE)


FAULTY_POOLS = [ParentsFirst, LastReleasedFirst, EvictsShared]
FAULTY_CACHES = [KeepsEvicted, AllowsDuplicates, IgnoresWithdraw, IgnoresCacheKeys, IgnoresLimit]


@pytest.mark.parametrize("pool", FAULTY_POOLS)
def test_check_catches_faults_of_the_page_pool(pool: type[PagePool]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        RandomOperations(0, pool=pool).run(1500)


@pytest.mark.parametrize("prefixes", FAULTY_CACHES)
def test_check_catches_faults_of_the_prefix_cache(prefixes: type[PrefixCache]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        RandomOperations(0, prefixes=prefixes).run(1500)


def test_unused_cache_keys_leave_no_roots() -> None:
    pool = PagePool(2, SIZE)
    prefixes = PrefixCache(pool)
    for number in range(9):
        one = Sequence(array("I", [1, 2, 3, 4]), 4, cache_key=str(number))
        pool.extend(one.pages, 4)
        one.computed = 4
        prefixes.publish(one)
        pool.release(one.pages)
    assert list(prefixes._roots) == [b"8"]
    assert (pool.free, pool.cached) == (2, 2)


def test_states_are_kept_only_behind_pages_that_can_be_found() -> None:
    pool = PagePool(PAGES, SIZE)
    prefixes = PrefixCache(pool, 2)

    def computed(*tokens: int, state: int) -> Sequence:
        one = Sequence(array("I", tokens), len(tokens), state=state)
        pool.extend(one.pages, len(tokens))
        one.computed = len(tokens)
        prefixes.publish(one)
        return one

    prefixes.remember(computed(1, 2, 3, state=1))
    assert not prefixes.states, "the state covers more than the page"
    whole = computed(4, 5, 6, 7, state=2)
    prefixes.remember(whole)
    assert list(prefixes.states) == [2]
    prefixes.withdraw(whole)
    assert not prefixes.states, "its slot is given to others"
    prefixes.remember(whole)
    assert not prefixes.states, "it could not be found"


@pytest.mark.parametrize(("states", "found"), [(None, 4), (0, 0)])
def test_no_prefix_is_found_if_states_are_needed_and_none_is_kept(states: int | None, found: int) -> None:
    pool = PagePool(PAGES, SIZE)
    prefixes = PrefixCache(pool, states)
    first, second = (Sequence(array("I", [1, 2, 3, 4]), 4) for _ in range(2))
    pool.extend(first.pages, 4)
    first.computed = 4
    prefixes.publish(first)
    assert prefixes.adopt(second, 4) == found


class CountingArray(array):  # type: ignore[type-arg]
    """Tokens that count how many were read."""

    read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        CountingArray.read += len(found) if isinstance(place, slice) else 1
        return found


def test_prompt_that_waits_is_not_rescanned_in_each_step() -> None:
    """Only its cached tokens are read, and one page more."""
    pool = PagePool(9, SIZE)
    prefixes = PrefixCache(pool)
    known = Sequence(array("I", range(2 * SIZE)), 2 * SIZE, computed=2 * SIZE, pages=pool.take(2))
    prefixes.publish(known)
    other = Sequence(CountingArray("I", [*range(2 * SIZE), *range(99, 9999)]), 9000)
    assert prefixes.known(other, 9000) == prefixes.adopt(other, 9000) == 2 * SIZE
    assert not prefixes.adopt(other, 9000)
    assert CountingArray.read == (3 + 3 + 1) * SIZE
