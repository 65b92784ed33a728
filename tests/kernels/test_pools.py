"""Attention to pools of tokens that an index has chosen equals a softmax in float64 over those, and keys of pools the means that
they are, by torch and by Triton's kernels."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from penstock.kernels import dispatch, fused_pools, indexed, indexed_attention, ragged
from penstock.kernels.attention import AttentionOptions, Row
from penstock.kernels.indexed import PoolSelection
from penstock.kernels.layout import AttentionLayout, LayerKind
from penstock.kernels.pools import write_pools

from .test_paged_attention import DEVICE, TOLERANCE, random_paged_rows, slots_of_row

LATENT, HEADS, SIZE = 32, 16, 24  # HEADS, SIZE: of the index
SHAPES = [(1, 0), (1, 40), (1, 300), (3, 2), (5, 70), (70, 33), (20, 10), (1, 19), (1, 47), (2, 63)]


@pytest.fixture(autouse=True)
def _clean(poisoned_float_outputs: None) -> Iterator[None]:
    yield
    dispatch.force("")


def check(rows: list[Row], page_size: int, pool: int, most: int, route: str, dtype: torch.dtype = torch.float32) -> None:
    """What Triton reads holds no numbers in slots of no row."""
    dispatch.force(route)
    torch.manual_seed(most)
    kinds = (LayerKind(0, 1, 4, LATENT, True),)
    layout = AttentionLayout(page_size, kinds, dtype, torch.device(DEVICE), latent=LATENT, most=most, members=pool)
    order, plan = ragged.plan(rows, layout)
    rows = [rows[i] for i in order]
    used = sorted({slot for row in rows for slot in slots_of_row(row, page_size)})
    slots, held = (max(page for row in rows for page in row.pages) + 1) * page_size, (1, 1, LATENT + 2 * SIZE)
    cache = torch.full((slots, *held), torch.nan if route == "triton" else 100.0)
    cache[used] = torch.randn(len(used), *held)
    cache = cache.to(dtype).to(DEVICE)
    tokens = sum(row.queries for row in rows)
    query = torch.randn(tokens, 4, LATENT).to(dtype).to(DEVICE)
    asked = PoolSelection(
        torch.randn(tokens, HEADS, SIZE).to(DEVICE, dtype), torch.randn(tokens, HEADS).to(DEVICE), most, members=pool
    )
    narrow = any(row.context + row.queries > most for row in rows)
    assert isinstance(plan, indexed_attention.Plan) == (route == "triton" and narrow)
    found = ragged.attention(query, cache, plan, AttentionOptions(0, 0.3, latent=LATENT, asked=asked if narrow else None))
    expected, start = [], 0
    for row in rows:
        cached = cache[slots_of_row(row, page_size)].double().cpu().flatten(1)
        for place in range(row.context, row.context + row.queries):
            own = slice(start, start + 1)
            seen = _seen(asked, own, cached[:, LATENT : LATENT + SIZE], place)
            logits = query[own][0].double().cpu() @ cached[seen, :LATENT].t() * 0.3
            expected.append(logits.softmax(-1) @ cached[seen, :LATENT])
            start += 1
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double().cpu(), torch.stack(expected), rtol=tolerance, atol=tolerance)


def _seen(asked: PoolSelection, own: slice, keys: Tensor, place: int) -> list[int]:
    """By the token at a place: of the best pools, and of the last one."""
    whole, pool = (place + 1) // asked.members, asked.members
    products = asked.queries[own][0].double().cpu() @ keys[pool - 1 : whole * pool : pool].t()
    scores = (products.relu() * asked.weights[own][0].double().cpu()[:, None]).sum(0)
    best = sorted(range(whole), key=lambda each: -float(scores[each]))[: asked.most // pool]
    return [*(each * pool + i for each in sorted(best) for i in range(pool)), *range(whole * pool, place + 1)]


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize(
    ("page_size", "pool", "most"), [(16, 16, 32), (16, 4, 24), (64, 16, 48), (3, 3, 27), (12, 6, 6), (8, 2, 300)]
)
def test_a_mixture(page_size: int, pool: int, most: int, route: str) -> None:
    """Of decodes and chains, some of which see more than they may attend to."""
    check(random_paged_rows(SHAPES, page_size, random.Random(most), sharing=0.3), page_size, pool, most, route)


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_large_pages(route: str) -> None:
    """Which hold whole tiles of pools: where long rows are cut these begin within a page."""
    check(random_paged_rows([(1, 900), (2, 700), (1, 400)], 256, random.Random(7)), 256, 16, 64, route)


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_a_long_chunk(route: str) -> None:
    """Of which a CPU looks at 64 tokens at a time."""
    check(random_paged_rows([(150, 30), (1, 90)], 16, random.Random(5)), 16, 8, 48, route)


def test_tokens_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not all scores have room at once."""
    monkeypatch.setattr(indexed_attention, "SCORES", 1000)
    check(random_paged_rows(SHAPES, 16, random.Random(3)), 16, 8, 32, "triton")


def test_short_types() -> None:
    for route in ("reference", "triton"):
        check(random_paged_rows([(1, 100), (3, 40), (1, 5)], 16, random.Random(2)), 16, 4, 24, route, torch.bfloat16)


def test_layers_without_an_index_see_the_same() -> None:
    """What was chosen is asked for once, and the pool that isn't full is none of it."""
    asked = PoolSelection(torch.randn(2, HEADS, SIZE), torch.randn(2, HEADS), 4, members=2)
    hidden = torch.tensor([[0.0] * 8 + [-torch.inf], [0.0] * 9]).view(1, 1, 2, 9)
    found = indexed.masked_by_pools(asked, torch.randn(1, 9, 2 * SIZE), 0, 2, hidden)
    again = indexed.masked_by_pools(asked, torch.empty(1, 9, 0), 0, 2, hidden)
    assert found is not None
    assert again is not None
    assert found.equal(again)
    assert [row.isfinite().sum().item() for row in found[0, 0]] == [4, 5]
    assert found[0, 0, 1, 8] == 0


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize(("dtype", "cached"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.float8_e4m3fn)])
@pytest.mark.parametrize(("pool", "size"), [(4, 24), (3, 7), (16, 128)])
def test_keys_of_pools(pool: int, size: int, dtype: torch.dtype, cached: torch.dtype | None, route: str) -> None:
    """However a sequence is cut: its last token's is a pool's. Tokens of padding are written nowhere, of a slot nothing else is."""
    if cached and route == "triton":
        pytest.skip("its interpreter rounds to 8 bits wrongly where that carries")
    torch.manual_seed(pool)
    dispatch.force(route)
    rng, length = random.Random(size), 3 * pool + 1
    # Numbers that 8 bits hold.
    keys, gates = ((torch.randn(2 * length, size) * 2).round().to(dtype) for _ in "kg")
    places = torch.randn(pool, size)
    pages = [[2, 5, 1, 3], [4, 8, 6, 7]]
    slots = torch.tensor([[own[i // pool] * pool + i % pool for i in range(length)] for own in pages])
    cache = torch.zeros(9 * pool, 1, 1, 5 + 2 * size).to(cached or dtype).to(DEVICE)
    begin = [0, 0]
    while min(begin) < length:  # some of both sequences, and one of padding
        ends = [min(length, start + rng.randint(0, 2 * pool)) for start in begin]
        rows = [*(i for start, end in zip(begin[:1], ends[:1], strict=True) for i in range(start, end)), 0]
        rows += [length + i for i in range(begin[1], ends[1])]
        where = torch.tensor([*slots[0, begin[0] : ends[0]].tolist(), -1, *slots[1, begin[1] : ends[1]].tolist()])
        write_pools(*(x.to(DEVICE) for x in (keys[rows], gates[rows], places, where)), cache[..., 5:])
        begin = ends
    held = cache.float().flatten(1).cpu()
    expected = torch.zeros_like(held)
    for sequence in range(2):
        own, opening = (x[sequence * length : (sequence + 1) * length].double() for x in (keys, gates))
        expected[slots[sequence], 5:] = torch.cat((own, opening), 1).float()
        for end in range(pool - 1, length, pool):
            members = slice(end - pool + 1, end + 1)
            weights = (opening[members] + places).softmax(0)
            expected[slots[sequence, end], 5 : 5 + size] = (weights * own[members]).sum(0).float()
    tolerance = 0.07 if cached else TOLERANCE[dtype]
    torch.testing.assert_close(held, expected, rtol=tolerance, atol=tolerance)
    assert not functional.relu(held[:, :5]).any()


def test_it_is_compiled_as_it_is_launched() -> None:
    for one in fused_pools.compilations():
        assert list(one.signature) == [name for name in one.kernel.arg_names if name not in one.constants]
