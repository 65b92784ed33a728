"""Attention whose answers don't depend by a bit on what else is in the step: equal to the usual one up to rounding, and to itself
exactly, however a row is cut and whoever is beside it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from penstock.kernels import attention, batch_invariant
from penstock.kernels.attention import AttentionOptions, Row
from penstock.kernels.layout import AttentionLayout, LayerKind

CPU = torch.device("cpu")
PAGE = 16


@dataclass(frozen=True)
class Case:
    """What attention may be asked beside plain ones."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 32
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    latent: bool = False
    dtype: torch.dtype = torch.float32
    joined: bool = False
    chunked: bool = False
    stored: torch.dtype | None = None

    @property
    def layout(self) -> AttentionLayout:
        own = LayerKind(self.window, self.kv_heads, self.heads // self.kv_heads, self.size, self.latent, self.joined, self.chunked)
        return AttentionLayout(PAGE, (own,), self.dtype, CPU)


CASES = {
    "plain": Case(),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float16": Case(size=80, dtype=torch.float16),
    "one head": Case(kv_heads=4, size=64),
    "many heads": Case(heads=24, kv_heads=1, size=16),
    "window": Case(window=70),
    "softcap": Case(softcap=5.0),
    "sinks": Case(sinks=True, window=600),
    "everything": Case(softcap=3.0, sinks=True, dtype=torch.bfloat16),
    "latents": Case(kv_heads=1, size=72, latent=True, dtype=torch.bfloat16),
    "8 bits": Case(stored=torch.float8_e4m3fn),
    "chunks": Case(window=64, chunked=True),
    "long chunks": Case(window=640, chunked=True, softcap=3.0),
}


class World:
    """A long row, and others beside it."""

    def __init__(self, case: Case, length: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.case, self.length = case, length
        pages = list(range(1, 3 * length // PAGE + 20))
        random.Random(seed).shuffle(pages)
        width = -(-length // PAGE)
        self.pages, others = pages[:width], pages[width:]
        self.others = [Row(1, context, others) for context in (0, 100, 511, 512, length)]
        slot = (1, 1, case.size) if case.latent else (2, case.kv_heads, case.size)
        cache = torch.randn((max(pages) + 1) * PAGE, *slot) / (1 if case.stored is None else 4)
        self.cache = cache.to(case.stored or case.dtype)
        self.scales = torch.rand(2, case.kv_heads) + 0.5 if case.stored else None
        self.sinks = torch.randn(case.heads) if case.sinks else None
        self.query = torch.randn(length, case.heads, case.size).to(case.dtype)

    def row(self, start: int, end: int, whole: bool = False) -> Row:
        return Row(end - start, start, self.pages, whole=whole)

    def attend(self, rows: Sequence[Row], query: Tensor) -> Tensor:
        """Of each row's queries, in the order that they are given."""
        case = self.case
        order, plan = batch_invariant.plan(rows, case.layout)
        parts = query.split([row.queries for row in rows])
        how = AttentionOptions(case.window, case.size**-0.5, case.softcap, self.scales, self.sinks)
        answers = batch_invariant.attention(torch.cat([parts[i] for i in order]), self.cache, plan, how)
        found = dict(zip(order, answers.split([rows[i].queries for i in order]), strict=True))
        return torch.cat([found[i] for i in range(len(rows))])

    def cut(self, sizes: Callable[[], int], beside: int, last: int) -> Tensor:
        """The same in chunks, up to `last`; beside: others in each step."""
        found, start = [], 0
        while start < last:
            end = min(start + sizes(), last)
            others = [self.query[:1]] * beside
            found.append(
                self.attend([*self.others[:beside], self.row(start, end)], torch.cat([*others, self.query[start:end]]))[beside:]
            )
            start = end
        return torch.cat(found)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_it_is_attention(case: Case) -> None:
    world = World(case, 700)
    chunk = case.window if case.chunked else 700
    rows = [
        world.row(start, min(start + chunk, 700)) for start in range(0, 700, chunk)
    ]  # within chunks, of which the last is short
    parts = attention.blocks(rows, case.layout)
    plan = sorted(parts, key=lambda block: block.start)
    how = AttentionOptions(case.window, case.size**-0.5, case.softcap, world.scales, world.sinks)
    expected = attention.attention(world.query, world.cache, plan, how).float()
    found = world.attend([world.row(0, 700)], world.query)
    assert found.dtype == case.dtype
    torch.testing.assert_close(found.float(), expected, rtol=0, atol={4: 2e-6, 2: 2e-2}[case.dtype.itemsize])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_chunks_and_neighbours_change_no_bit(case: Case) -> None:
    world = World(case, 1100)
    whole = world.attend([world.row(0, 1100)], world.query)
    rng = random.Random(7)
    assert world.cut(lambda: 1, 0, 40).equal(whole[:40])
    assert world.cut(lambda: rng.choice([1, 2, 7, 50, 300]), 5, 1100).equal(whole)
    for end in (512, 513, 1024, 1100):  # alone, at the ends of blocks
        assert world.attend([world.row(end - 1, end)], world.query[end - 1 : end]).equal(whole[end - 1 : end])


@pytest.mark.parametrize("case", [Case(joined=True), Case(joined=True, window=70, softcap=5.0), Case(window=70)])
def test_whole_rows(case: Case) -> None:
    """They see what they should, and no bit changes with neighbours, nor if their beginning was computed before."""
    world = World(case, 700)
    rows = [world.row(0, 30), world.row(30, 600, whole=True), world.row(600, 700)]
    plan = attention.blocks(attention_order(rows), case.layout)
    parts = [world.query[row.context : row.context + row.queries] for row in attention_order(rows)]
    how = AttentionOptions(case.window, case.size**-0.5, case.softcap)
    found = world.attend(rows, world.query)
    expected = attention.attention(torch.cat(parts), world.cache, plan, how)
    answers = torch.cat([found[row.context : row.context + row.queries] for row in attention_order(rows)])
    torch.testing.assert_close(answers, expected, rtol=0, atol=2e-6)
    plain = world.attend([world.row(0, 700)], world.query)
    assert found[30:600].equal(plain[30:600]) is not case.joined
    for start in (31, 100, 513, 599):
        beside = [world.query[:1]] * 5
        own = world.attend([*world.others, world.row(start, 600, whole=True)], torch.cat([*beside, world.query[start:600]]))
        assert own[5:].equal(found[start:600])


def attention_order(rows: Sequence[Row]) -> list[Row]:
    return [rows[i] for i in attention.order(rows)]


def test_blocks_of_other_keys_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which torch would go through together with others."""
    monkeypatch.setattr(batch_invariant, "KEYS", 16)
    with pytest.raises(AssertionError):
        test_chunks_and_neighbours_change_no_bit(CASES["plain"])


def test_tiles_as_high_as_there_are_queries_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = batch_invariant._tiles
    monkeypatch.setattr(batch_invariant, "_tiles", lambda *given: tiles(*given[:-1], given[1].shape[1]))
    with pytest.raises(AssertionError):
        test_chunks_and_neighbours_change_no_bit(CASES["one head"])


def test_rows_share_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one token that read as many keys, as far as a block's memory goes; a long row has its own."""
    rows = [Row(1, context, range(100)) for context in (5, 600, 511, 30, 512)] + [Row(40, 60, range(100))]
    layout = Case(heads=2, kv_heads=1).layout
    order, plan = batch_invariant.plan(rows, layout)
    assert order == [0, 2, 3, 1, 4, 5]
    shapes = [(block.rows, block.queries, len(block.slots) // block.rows) for block in plan.blocks]
    assert shapes == [(3, 1, 512), (2, 1, 1024), (1, 40, 512)]
    monkeypatch.setattr(batch_invariant, "BLOCK_ELEMENTS", 2 * 512 * 64)
    assert [block.rows for block in batch_invariant.plan(rows, layout)[1].blocks] == [2, 1, 1, 1, 1]
