"""What only the device knows of a step's inputs: tokens and page tables that are filled in, and the pages of continued beams. Both
implementations, against plain lists."""

import random
from collections.abc import Iterator

import numpy
import pytest
import torch

pytest.importorskip("triton")

from penstock.kernels import dispatch, fused_lookahead, lookahead

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, LAYERS, WIDTH, POOL = 4, 3, 6, 60


@pytest.fixture(params=["reference", "triton"], autouse=True)
def each_implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fused_lookahead, "PAGES", 2)
    monkeypatch.setattr(fused_lookahead, "BLOCK_SIZE", 16)
    dispatch.force(request.param)
    yield
    dispatch.force("")


class Lookahead:
    """Two groups of beams with tables of different lengths, the first of them in the middle of a page, and plain sequences between
    them; all sampled in another order."""

    def __init__(self, chance: random.Random) -> None:
        self.fresh = iter(chance.sample(range(1, POOL), POOL - 1))
        self.sources = chance.sample(range(7), 7)
        self.picked = [chance.choice([-1, *range(100)]) for _ in range(7)]
        self.entries: list[tuple[int, ...]] = []
        self.tables: list[int] = []
        self.tokens, self.pages = [50] * 9, [0] * 40
        self.copies: list[tuple[int, int, int]] = []
        self.parents = [chance.randrange(2) for _ in range(7)]
        place = self.group(3, 5, chance.randrange(1, SIZE), 0)
        self.entries.append((self.sources[3], 3, 0, 0, 0, -1, 0, 0))
        place = self.group(2, chance.randrange(2), 0, place, 4)
        self.entries.append((self.sources[6], 8, 0, 0, 0, -1, 0, 0))
        for (source, token, *_), number in zip(self.entries, range(7), strict=True):
            assert source == self.sources[number]
            self.tokens[token] = max(self.picked[source], 0)

    def group(self, heirs: int, count: int, filled: int, place: int, token: int = 0) -> int:
        first = len(self.tables)
        beams = [[next(self.fresh) for _ in range(count + 1)] for _ in range(2)]
        self.tables += [page for beam in beams for page in beam]
        for i in range(heirs):
            source, target = self.sources[token + i], next(self.fresh)
            self.entries.append((source, token + i, place, first, count, target, filled, 0))
            *full, last = beams[self.parents[source]]
            self.pages[place : place + count] = full
            self.copies.append((last, target, filled))
            place += count + 2
        return place


def test_tokens_and_page_tables_are_filled_in(rng: random.Random) -> None:
    case = Lookahead(rng)
    tokens = torch.full((9,), 50, device=DEVICE)
    pages = torch.zeros(40, dtype=torch.int32, device=DEVICE)
    wanted = lookahead.unknown(tokens.device, case.entries, case.tables)
    assert wanted.beams
    picked, parents = (torch.tensor(given, device=DEVICE) for given in (case.picked, case.parents))
    lookahead.fill(tokens, pages, wanted, picked, parents)
    assert tokens.tolist() == case.tokens
    assert pages.tolist() == case.pages


def test_tokens_alone_are_filled_in_where_no_entry_continues_a_beam() -> None:
    tokens = torch.tensor([7, 8, 9], device=DEVICE)
    wanted = lookahead.unknown(tokens.device, [(2, 0, 0, 0, 0, -1, 0, 0), (0, 2, 0, 0, 0, -1, 0, 0)], [])
    assert not wanted.beams
    lookahead.fill(tokens, None, wanted, torch.tensor([-1, 4, 3], device=DEVICE), None)
    assert tokens.tolist() == [3, 8, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_last_pages_are_inherited_and_their_rest_is_zeroed(dtype: torch.dtype, rng: random.Random) -> None:
    """Whatever was in the targets, NaN included, is gone; all other pages stay."""
    case = Lookahead(rng)
    cache = torch.randint(1, 100, (LAYERS, POOL, SIZE, WIDTH), device=DEVICE).to(dtype)
    for _, target, _ in case.copies:
        cache[:, target] = torch.nan if dtype.is_floating_point else 255
    expected = cache.clone()
    for source, target, filled in case.copies:
        expected[:, target] = 0
        expected[:, target, :filled] = cache[:, source, :filled]
    wanted = lookahead.unknown(cache.device, case.entries, case.tables)
    lookahead.inherit(cache, wanted, torch.tensor(case.parents, device=DEVICE))
    assert cache.equal(expected)


def test_tokens_alone_are_entries_that_continue_no_beam() -> None:
    pairs = [(3, 1), (0, 4), (1, 2)]
    found = lookahead.unknown_tokens(torch.device(DEVICE), *numpy.array(pairs).T)
    expected = lookahead.unknown(torch.device(DEVICE), [(*pair, 0, 0, 0, -1, 0, 0) for pair in pairs], [])
    assert found.entries.equal(expected.entries)
    assert found.tables.equal(expected.tables)
    assert (found.beams, found.entries.dtype, found.tables.dtype) == (False, torch.int32, torch.int32)
