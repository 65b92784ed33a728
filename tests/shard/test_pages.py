"""The pool never gives a page to two holders, never loses one, and takes all or nothing."""

import random
from collections import Counter

import pytest

from penstock.shard.pages import PADDING, OutOfPages, PagePool

PAGES = 7
SIZE = 3


def walk(pool: PagePool, seed: int, steps: int = 400) -> None:
    """Random operations, each compared with a model: the list of every holder's pages."""
    chance = random.Random(seed)
    holders: list[list[int]] = []
    for _ in range(steps):
        verb = chance.choice(["take", "extend", "share", "release"])
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
            pool.release(holders.pop(chance.randrange(len(holders))))
        held = Counter(page for pages in holders for page in pages)
        assert PADDING not in held
        assert set(held) <= set(range(1, PAGES + 1))
        assert pool.free == PAGES - len(held)
    for pages in holders:
        pool.release(pages)
    assert pool.free == PAGES
    assert sorted(pool.take(PAGES)) == list(range(1, PAGES + 1))


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


@pytest.mark.parametrize("faulty", [Forgetful, Greedy])
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
