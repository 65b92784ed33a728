"""KV pages that are evicted from the prefix cache come back from the host's memory unchanged: random operations against a
dictionary that forgets nothing. That no answer changes is checked by test_preemption.py and test_prefix_cache.py."""

import random
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Listing

import pytest
import torch

from penstock.shard import host_pages, prefix
from penstock.shard.host_pages import HostPages, page_bytes
from penstock.shard.offload import Offload
from penstock.shard.prefix import Node, PrefixCache
from penstock.shard.sequence import Sequence
from penstock.tests.shard.audited_engine import AuditedEngine
from penstock.tests.shard.audited_engine import audited_engine as audited_engine  # a fixture
from penstock.tests.shard.driver import UNLIMITED, Traffic, drive
from penstock.tests.shard.test_flight import drive_overlapped, pages_of_largest, random_groups_with_beams
from penstock.tests.shard.test_prefix import PAGES, SIZE, RandomOperations

AMPLE = 3000  # more host copies than there are different pages


class RandomOffloadOperations(RandomOperations):
    """The same with host copies of pages, each of which records the content of its slots. Every page that was computed and not
    withdrawn is known."""

    def __init__(self, seed: int, copies: int, prefixes: type[PrefixCache] = PrefixCache) -> None:
        super().__init__(seed, prefixes=lambda pool: prefixes(pool, copies=copies, renew=self.apply_moves))  # type: ignore[arg-type]
        self.ample = copies == AMPLE
        self.copies: dict[int, list[object]] = {}
        self.saved = self.loaded = 0

    def apply_moves(self) -> None:
        taken, (saves, loads) = self.pool.taken(), self.prefixes.offload.moves()
        for page, place in saves:
            self.copies[place] = self.slots[page]
        for page in taken:
            self.slots[page] = [None] * SIZE
        for place, page in loads:
            self.slots[page] = list(self.copies[place])
        assert len({page for _, page in loads}) == len(loads)
        self.saved, self.loaded = self.saved + len(saves), self.loaded + len(loads)

    def take_pages(self, holder: Sequence, tokens: int) -> None:
        self.pool.extend(holder.pages, tokens)

    def begin_step(self) -> None:
        self.apply_moves()

    def adopt(self, holder: Sequence) -> None:
        limit = self.chance.choice([len(holder.tokens), len(holder.tokens) - 1])
        pages = holder.computed // SIZE
        if self.attached(holder):
            while (pages + 1) * SIZE <= limit and self.name(holder, (pages + 1) * SIZE) in self.known:
                pages += 1
        most = max(0, pages * SIZE - holder.computed)
        first = holder.node.depth if holder.node else 0
        names = {self.name(holder, page * SIZE) for page in range(first + 1, pages + 1)}
        path = [node.page for node in self.nodes() if self.name_of(node) in names]
        enough = path.count(0) + sum(page in self.pool._cached for page in path) <= self.pool.free
        gained = self.prefixes.adopt(holder, limit)
        assert gained <= most
        assert gained == most or not self.ample or not enough, "fewer tokens are found than there are pages for"
        self.found += gained

    def notify(self, holder: Sequence, tell: object) -> None:
        tell(holder)  # type: ignore[operator]
        if self.attached(holder):
            for page in range(holder.node.depth if holder.node else 0):
                self.known[self.name(holder, (page + 1) * SIZE)] = 0

    def check(self) -> None:
        self.apply_moves()
        pool, prefixes = self.pool, self.prefixes
        held = Counter(page for holder in self.holders for page in holder.pages)
        assert {page: count for page, count in enumerate(pool._references) if count} == held
        assert sorted([*pool._unused, *pool._cached, *held]) == list(range(1, PAGES + 1))
        nodes = self.nodes()
        assert {node.page for node in nodes if node.page} == set(prefixes._nodes)
        assert {node.copy: node for node in nodes if node.copy} == prefixes.offload.held
        assert len(prefixes.offload.held) + len(prefixes.offload._unused) <= AMPLE
        for node in nodes:
            assert node.attached
            assert node.page or node.copy, "a node has neither a page nor a copy"
            assert node.parent is not None
            assert not node.page or node.parent.page or not node.parent.depth, "a page without its predecessor"
            name = self.name_of(node)
            for where, place in ((self.slots, node.page), (self.copies, node.copy)):
                assert not place or where[place] == [(name[0], name[1][: len(name[1]) - SIZE + i + 1]) for i in range(SIZE)]
        for holder in self.holders:
            for place in range(holder.computed):
                assert self.slots[holder.pages[place // SIZE]][place % SIZE] == self.name(holder, place + 1)

    def nodes(self) -> list[Node]:
        found, below = list[Node](), list(self.prefixes._roots.values())
        while below:
            node = below.pop()
            below += node.children.values()
            found += [node] if node.depth else []
        return found

    @staticmethod
    def name_of(node: Node) -> tuple[str, tuple[int, ...]]:
        tokens = list[int]()
        while node.parent is not None:
            tokens[:0] = memoryview(node.key).cast("I").tolist()
            node = node.parent
        return node.key.decode(), tuple(tokens)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("copies", [AMPLE, 12, 3, 1])
def test_evicted_pages_are_found_and_restored_under_random_operations(seed: int, copies: int) -> None:
    operations = RandomOffloadOperations(seed, copies)
    operations.run(1500)
    assert min(operations.saved, operations.loaded) > (10 if copies > 3 else 0)
    assert operations.withdrawn > 3


# Planted faults


class ReusedTooEarly(Offload[Node]):
    """Gives a place to another copy before its content was loaded."""

    def load(self, nodes: Listing[Node], take: Callable[[int], Listing[int]]) -> list[int]:
        def hastily(count: int) -> Listing[int]:
            self._loading = set()
            return take(count)

        return super().load(nodes, hastily)


class NotRenewed(Offload[Node]):
    """Saving a page again doesn't renew its copy's place in the eviction order."""

    def save(self, node: Node) -> bool:
        return node.copy > 0 or super().save(node)


class NewestFirst(Offload[Node]):
    """Evicts the newest copy rather than the oldest."""

    def _take(self) -> int:
        self.held = dict(reversed(self.held.items()))
        place = super()._take()
        self.held = dict(reversed(self.held.items()))
        return place


class MissingSave(Offload[Node]):
    """Leaves out a copy to the host."""

    def moves(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        saves, loads = super().moves()
        return saves[:-1], loads


class MissingLoads(Offload[Node]):
    """Copies nothing back."""

    def moves(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        return super().moves()[0], []


class NotDropped(Offload[Node]):
    """Keeps the copies of withdrawn pages."""

    def drop(self, node: Node) -> None:
        node.copy = 0


@pytest.mark.parametrize("offload", [ReusedTooEarly, NotRenewed, NewestFirst, MissingSave, MissingLoads, NotDropped])
def test_check_catches_faults_of_offload(offload: type[Offload[Node]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "Offload", offload)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        deque((RandomOffloadOperations(seed, 4).run(1500) for seed in range(20)), maxlen=0)


# Engines


@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_are_the_same_with_offloaded_pages(audited_engine: type[AuditedEngine], ahead: bool) -> None:
    """Beams among other groups, with pauses, in small pools; every slot that a token attends to is checked."""
    assert sum(loaded_pages(audited_engine, seed, ahead) for seed in range(24)) > 500


def loaded_pages(audited_engine: type[AuditedEngine], seed: int, ahead: bool) -> int:
    """Runs random traffic; the number of pages that were loaded from the host."""
    chance, groups = random.Random(seed), random_groups_with_beams(seed)
    size, copies = chance.choice([1, 2, 3, 4]), chance.choice([1, 9, 40, AMPLE])
    expected = drive(audited_engine(5000, size, prefix_caching=False), random_groups_with_beams(seed), Traffic(), seed)
    engine = audited_engine(pages_of_largest(groups, size) + chance.randint(2, 14), size, ahead=ahead, copies=copies)
    traffic = Traffic(chance.choice([1, 3, 8, UNLIMITED]), pause=0.05, pauses=seed % 3, join=0.1)
    results = drive_overlapped(engine, groups, traffic, seed)[0] if ahead else drive(engine, groups, traffic, seed)
    assert (results.failed, results.tokens) == ({}, expected.tokens)
    assert engine.pool.free == engine.pool.pages
    loaded: int = engine.host.loaded
    return loaded


@pytest.mark.parametrize("offload", [ReusedTooEarly, MissingSave, MissingLoads])
def test_check_of_tokens_catches_faults_of_offload(
    audited_engine: type[AuditedEngine], offload: type[Offload[Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "Offload", offload)
    with pytest.raises((AssertionError, KeyError)):
        deque((loaded_pages(audited_engine, seed, ahead=True) for seed in range(24)), maxlen=0)


# Memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("widths", [(8,), (8, 3), (5, 6, 7)])
def test_host_copies_restore_pages_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, widths: tuple[int, ...]
) -> None:
    """With several tensors of different layers and widths, in several pieces of memory, a few pages at once."""
    chance = random.Random(len(widths))
    parts = [torch.randint(0, 100, (2 + width % 2, 9, 3, width)).to(dtype) for width in widths]
    before = [part.float().clone() for part in parts]
    monkeypatch.setattr(host_pages, "PIECE", 2 * page_bytes(parts))
    monkeypatch.setattr(host_pages, "GATHERED", 2 * page_bytes(parts) + 1)
    host = HostPages([part.view(torch.uint8) if dtype.itemsize == 1 else part for part in parts], 7)
    places, pages = chance.sample(range(1, 8), 5), chance.sample(range(9), 5)
    host.save([*zip(pages, places, strict=True)])
    for part in parts:
        part.view(torch.uint8).zero_()
    targets = chance.sample(range(9), 5)
    host.load([*zip(places, targets, strict=True)])
    for part, was in zip(parts, before, strict=True):
        wanted = torch.zeros_like(was)
        wanted[:, targets] = was[:, pages]
        assert torch.equal(part.float(), wanted)
