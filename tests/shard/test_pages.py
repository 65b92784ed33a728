"""The pool never gives a page to two holders, never loses one, and takes all or nothing."""

import random
import time
from collections import Counter

import pytest

from penstock.shard.pages import PADDING, OutOfPages, PagePool

PAGES = 7
SIZE = 3


def walk(pool: PagePool, seed: int, steps: int = 400) -> None:
    """Random operations, each compared with a model: the list of every holder's pages, and the order in which kept ones were let
    go."""
    chance = random.Random(seed)
    holders: list[list[int]] = []
    kept: set[int] = set()
    cached: list[int] = []
    evicted: list[int] = []
    pool.evicted = evicted.append
    for _ in range(steps):
        verb = chance.choice(["take", "extend", "share", "release", "release", "release", "keep", "keep", "forget", "revive"])
        if verb == "take":
            free, count = pool.free, chance.randint(0, 3)
            try:
                holders.append(pool.take(count))
                assert len(holders[-1]) == count
            except OutOfPages:
                assert count > free == pool.free
        elif verb == "extend" and holders:
            pages, tokens, free = chance.choice(holders), chance.randint(0, 12), pool.free
            before = list(pages)
            wanted = max(0, -(-tokens // SIZE) - len(before))
            try:
                pool.extend(pages, tokens)
                assert pages[: len(before)] == before
                assert len(pages) == len(before) + wanted
            except OutOfPages:
                assert pages == before
                assert wanted > free == pool.free
        elif verb == "share" and holders:
            pages = list(chance.choice(holders))
            pool.share(pages)
            holders.append(pages)
        elif verb == "release" and holders:
            gone = holders.pop(chance.randrange(len(holders)))
            pool.release(gone)
            left = {page for pages in holders for page in pages}
            cached += [page for page in reversed(gone) if page in kept - left]
        elif verb == "keep" and any(holders):
            kept.add(page := chance.choice([page for pages in holders for page in pages]))
            pool.keep(page)
        elif verb == "forget" and kept:
            kept.remove(page := chance.choice(sorted(kept)))
            pool.forget(page)
            cached = [other for other in cached if other != page]
        elif verb == "revive" and cached:
            cached.remove(page := chance.choice(cached))
            pool.share([page])
            holders.append([page])
        assert evicted == cached[: len(evicted)]
        assert not evicted or not pool._unused, "a kept page is taken though there are others"
        cached, kept = cached[len(evicted) :], kept - set(evicted)
        evicted.clear()
        assert list(pool._cached) == cached
        held = Counter(page for pages in holders for page in pages)
        assert PADDING not in held
        assert set(held) <= set(range(1, PAGES + 1))
        assert pool.free == PAGES - len(held)
    for pages in holders:
        pool.release(pages)
    assert pool.free == PAGES
    pool.taken()
    assert sorted(pool.take(PAGES)) == list(range(1, PAGES + 1))
    assert (len(pool.taken()), pool.taken()) == (PAGES, [])


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_agree_with_a_model(seed: int) -> None:
    walk(PagePool(PAGES, SIZE), seed)


class Forgetful(PagePool):
    """Planted fault: what is shared is not counted."""

    def share(self, pages: object) -> None:
        pass


class Greedy(PagePool):
    """Planted fault: takes what it can before it refuses."""

    def take(self, count: int) -> list[int]:
        if count > self.free:
            super().take(self.free)
        return super().take(count)


class Hasty(PagePool):
    """Planted fault: takes cached pages while there are others."""

    def take(self, count: int) -> list[int]:
        unused, self._unused = self._unused, []
        taken = super().take(min(count, len(self._cached)))
        self._unused = unused
        return taken + super().take(count - len(taken))


@pytest.mark.parametrize("faulty", [Forgetful, Greedy, Hasty])
def test_the_check_finds_a_planted_fault(faulty: type[PagePool]) -> None:
    with pytest.raises(AssertionError):
        walk(faulty(PAGES, SIZE), seed=0)


def test_releasing_twice_and_sharing_what_is_free_are_faults() -> None:
    pool = PagePool(PAGES, SIZE)
    pages = pool.take(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)
    with pytest.raises(AssertionError, match="is free"):
        pool.share(pages)


def test_an_empty_pool_says_how_many_are_lacking() -> None:
    with pytest.raises(OutOfPages, match="8 pages are needed, 7 of 7 are free"):
        PagePool(PAGES, SIZE).take(8)


def test_taking_a_cached_page_costs_the_same_however_many_were_taken_before() -> None:
    pages, times = 60_000, dict[bool, float]()
    for kept in (False, True):
        pool = PagePool(pages, 16)
        for page in (taken := pool.take(pages)):
            if kept:
                pool.keep(page)
        pool.release(taken)
        began = time.process_time()
        pool.take(pages)
        times[kept] = time.process_time() - began
    assert times[True] < 12 * times[False] + 0.2
