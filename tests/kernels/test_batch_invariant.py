"""The reference's batch-invariant attention: equal to the usual reference attention up to rounding, and bit-identical however a row
is chunked and whatever other rows are in the step."""

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
    """Options of an attention layer."""

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
        kind = LayerKind(self.window, self.kv_heads, self.heads // self.kv_heads, self.size, self.latent, self.joined, self.chunked)
        return AttentionLayout(PAGE, (kind,), self.dtype, CPU)


CASES = {
    "plain": Case(),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float16": Case(size=80, dtype=torch.float16),
    "one head": Case(kv_heads=4, size=64),
    "many heads": Case(heads=24, kv_heads=1, size=16),
    "window": Case(window=70),
    "softcap": Case(softcap=5.0),
    "sinks": Case(sinks=True, window=600),
    "softcap, sinks and bfloat16": Case(softcap=3.0, sinks=True, dtype=torch.bfloat16),
    "MLA latents": Case(kv_heads=1, size=72, latent=True, dtype=torch.bfloat16),
    "fp8 cache": Case(stored=torch.float8_e4m3fn),
    "chunked attention": Case(window=64, chunked=True),
    "long attention chunks": Case(window=640, chunked=True, softcap=3.0),
}


class LongSequence:
    """A long sequence over a paged cache, and other rows beside it."""

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
        """Attention of the rows' queries, in the given order."""
        case = self.case
        order, plan = batch_invariant.plan(rows, case.layout)
        parts = query.split([row.queries for row in rows])
        options = AttentionOptions(case.window, case.size**-0.5, case.softcap, self.scales, self.sinks)
        answers = batch_invariant.attention(torch.cat([parts[i] for i in order]), self.cache, plan, options)
        found = dict(zip(order, answers.split([rows[i].queries for i in order]), strict=True))
        return torch.cat([found[i] for i in range(len(rows))])

    def attend_in_chunks(self, sizes: Callable[[], int], beside: int, last: int) -> Tensor:
        """The sequence's queries up to `last`, computed in chunks; beside: number of other rows in each step."""
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
def test_results_match_the_usual_reference_attention(case: Case) -> None:
    sequence = LongSequence(case, 700)
    chunk = case.window if case.chunked else 700
    rows = [
        sequence.row(start, min(start + chunk, 700)) for start in range(0, 700, chunk)
    ]  # rows within attention chunks, the last of which is short
    parts = attention.blocks(rows, case.layout)
    plan = sorted(parts, key=lambda block: block.start)
    options = AttentionOptions(case.window, case.size**-0.5, case.softcap, sequence.scales, sequence.sinks)
    expected = attention.attention(sequence.query, sequence.cache, plan, options).float()
    found = sequence.attend([sequence.row(0, 700)], sequence.query)
    assert found.dtype == case.dtype
    torch.testing.assert_close(found.float(), expected, rtol=0, atol={4: 2e-6, 2: 2e-2}[case.dtype.itemsize])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_prompt_chunks_and_other_rows_change_no_bit(case: Case) -> None:
    sequence = LongSequence(case, 1100)
    whole = sequence.attend([sequence.row(0, 1100)], sequence.query)
    rng = random.Random(7)
    assert sequence.attend_in_chunks(lambda: 1, 0, 40).equal(whole[:40])
    assert sequence.attend_in_chunks(lambda: rng.choice([1, 2, 7, 50, 300]), 5, 1100).equal(whole)
    for end in (512, 513, 1024, 1100):  # alone, around the ends of blocks
        assert sequence.attend([sequence.row(end - 1, end)], sequence.query[end - 1 : end]).equal(whole[end - 1 : end])


@pytest.mark.parametrize("case", [Case(joined=True), Case(joined=True, window=70, softcap=5.0), Case(window=70)])
def test_bidirectional_rows_match_the_usual_attention_and_stay_bit_identical(case: Case) -> None:
    """Other rows change no bit, nor does it if the row's beginning was computed before."""
    sequence = LongSequence(case, 700)
    rows = [sequence.row(0, 30), sequence.row(30, 600, whole=True), sequence.row(600, 700)]
    plan = attention.blocks(in_attention_order(rows), case.layout)
    parts = [sequence.query[row.context : row.context + row.queries] for row in in_attention_order(rows)]
    options = AttentionOptions(case.window, case.size**-0.5, case.softcap)
    found = sequence.attend(rows, sequence.query)
    expected = attention.attention(torch.cat(parts), sequence.cache, plan, options)
    answers = torch.cat([found[row.context : row.context + row.queries] for row in in_attention_order(rows)])
    torch.testing.assert_close(answers, expected, rtol=0, atol=2e-6)
    causal = sequence.attend([sequence.row(0, 700)], sequence.query)
    assert found[30:600].equal(causal[30:600]) is not case.joined
    for start in (31, 100, 513, 599):
        beside = [sequence.query[:1]] * 5
        partial = sequence.attend(
            [*sequence.others, sequence.row(start, 600, whole=True)], torch.cat([*beside, sequence.query[start:600]])
        )
        assert partial[5:].equal(found[start:600])


def in_attention_order(rows: Sequence[Row]) -> list[Row]:
    return [rows[i] for i in attention.order(rows)]


def test_check_detects_smaller_key_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would sum over several of them at once."""
    monkeypatch.setattr(batch_invariant, "KEYS", 16)
    with pytest.raises(AssertionError):
        test_prompt_chunks_and_other_rows_change_no_bit(CASES["plain"])


def test_check_detects_tiles_as_high_as_the_number_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = batch_invariant._tiles
    monkeypatch.setattr(batch_invariant, "_tiles", lambda *given: tiles(*given[:-1], given[1].shape[1]))
    with pytest.raises(AssertionError):
        test_prompt_chunks_and_other_rows_change_no_bit(CASES["one head"])


def test_single_token_rows_with_as_many_keys_share_blocks_up_to_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of several tokens has a block of its own."""
    rows = [Row(1, context, range(100)) for context in (5, 600, 511, 30, 512)] + [Row(40, 60, range(100))]
    layout = Case(heads=2, kv_heads=1).layout
    order, plan = batch_invariant.plan(rows, layout)
    assert order == [0, 2, 3, 1, 4, 5]
    shapes = [(block.rows, block.queries, len(block.slots) // block.rows) for block in plan.blocks]
    assert shapes == [(3, 1, 512), (2, 1, 1024), (1, 40, 512)]
    monkeypatch.setattr(batch_invariant, "BLOCK_ELEMENTS", 2 * 512 * 64)
    assert [block.rows for block in batch_invariant.plan(rows, layout)[1].blocks] == [2, 1, 1, 1, 1]
