"""Keys of pools that are means, and attention of heads with keys of their own to pools that these choose, by torch and by Triton's
kernels."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.kernels import dispatch, fused_means, indexed_attention, ragged, reference
from penstock.kernels.attention import AttentionOptions, Row
from penstock.kernels.indexed import PoolSelection
from penstock.kernels.layout import AttentionLayout, LayerKind
from penstock.kernels.means import write_means

from .test_paged_attention import DEVICE, TOLERANCE, random_paged_rows, slots_of_row
from .test_pools import SIZE, _seen

HEADS, KEYS, FEATURES = 6, 2, 16  # query heads, key heads and their features
CHOOSERS = 16  # heads of the index
SHAPES = [(1, 0), (1, 40), (3, 2), (5, 70), (20, 10), (1, 19)]


@pytest.fixture(autouse=True)
def _clean(poisoned_float_outputs: None) -> Iterator[None]:
    yield
    dispatch.force("")


def check(rows: list[Row], page_size: int, pool: int, most: int, route: str, dtype: torch.dtype = torch.float32) -> None:
    """What Triton reads holds no numbers in slots of no row."""
    dispatch.force(route)
    torch.manual_seed(most)
    layout = AttentionLayout(
        page_size, (LayerKind(0, KEYS, HEADS // KEYS, FEATURES),), dtype, torch.device(DEVICE), most=most, members=pool
    )
    order, plan = ragged.plan(rows, layout)
    rows = [rows[i] for i in order]
    used = sorted({slot for row in rows for slot in slots_of_row(row, page_size)})
    slots, tokens = (max(page for row in rows for page in row.pages) + 1) * page_size, sum(row.queries for row in rows)

    def cached(*shape: int) -> Tensor:
        whole = torch.full((slots, *shape), torch.nan if route == "triton" else 100.0)
        whole[used] = torch.randn(len(used), *shape)
        return whole.to(DEVICE, dtype)

    cache, keys = cached(2, KEYS, FEATURES), cached(1, 1, SIZE)
    query, asking = (torch.randn(tokens, *shape).to(DEVICE, dtype) for shape in ((HEADS, FEATURES), (CHOOSERS, SIZE)))
    asked = PoolSelection(asking, torch.rand(tokens, CHOOSERS).to(DEVICE), most, members=pool, keys=keys)
    narrow = any(row.context + row.queries > most for row in rows)
    assert isinstance(plan, indexed_attention.Plan) == (route == "triton" and narrow)
    found = ragged.attention(query, cache, plan, AttentionOptions(0, 0.3, asked=asked if narrow else None))
    expected, start = [], 0
    for row in rows:
        own, held = (x[slots_of_row(row, page_size)].double().cpu() for x in (cache, keys.flatten(1)))
        for place in range(row.context, row.context + row.queries):
            at = _seen(asked, slice(start, start + 1), held, place)
            asking = query[start].double().cpu().view(KEYS, -1, FEATURES)
            weights = (asking @ own[at, 0].permute(1, 2, 0) * 0.3).softmax(-1)
            expected.append((weights @ own[at, 1].transpose(0, 1)).flatten(0, 1))
            start += 1
    torch.testing.assert_close(found.double().cpu(), torch.stack(expected), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize(("page_size", "pool", "most"), [(16, 4, 24), (3, 3, 27), (8, 1, 10)])
def test_a_mixture(page_size: int, pool: int, most: int, route: str) -> None:
    """Of decodes and chains, some of which see more than they may attend to."""
    check(random_paged_rows(SHAPES, page_size, random.Random(most), sharing=0.3), page_size, pool, most, route)


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_short_types_by_parts(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not all scores have room at once; of the longest a CPU looks at 64 tokens at a time."""
    monkeypatch.setattr(indexed_attention, "SCORES", 1000)
    check(random_paged_rows([(1, 100), (70, 40), (1, 5)], 16, random.Random(2)), 16, 4, 24, route, torch.bfloat16)


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize(("dtype", "cached"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.float8_e4m3fn)])
@pytest.mark.parametrize(("pool", "size"), [(4, 24), (3, 6), (1, 8)])
def test_keys_of_pools(pool: int, size: int, dtype: torch.dtype, cached: torch.dtype | None, route: str) -> None:
    """However a sequence is cut: its last token's is a pool's. Tokens of padding are written nowhere."""
    if cached and route == "triton":
        pytest.skip("its interpreter rounds to 8 bits wrongly where that carries")
    torch.manual_seed(pool)
    dispatch.force(route)
    rng, length = random.Random(size), 3 * pool + 1
    keys, gains = (torch.randn(2 * length, size + 3) * 2).round().to(dtype), torch.rand(size) + 0.5  # which 8 bits hold
    table = reference.rotary_table(torch.rand(size // 2), torch.arange(2 * length), dtype)
    pages = [[2, 5, 1, 3], [4, 8, 6, 7]]
    slots = torch.tensor([[own[i // pool] * pool + i % pool for i in range(length)] for own in pages])
    cache, begin = torch.zeros(9 * pool, 1, 1, size).to(cached or dtype).to(DEVICE), [0, 0]
    while min(begin) < length:  # some of both sequences, and one of padding
        ends = [min(length, start + rng.randint(0, 2 * pool)) for start in begin]
        rows = [*range(begin[0], ends[0]), 0, *(length + i for i in range(begin[1], ends[1]))]
        where = torch.tensor([*slots[0, begin[0] : ends[0]].tolist(), -1, *slots[1, begin[1] : ends[1]].tolist()])
        given = (x.to(DEVICE) for x in (keys[rows][:, 2 : size + 2], gains, table[rows], where))
        write_means(*given, cache, pool, 1e-2)
        begin = ends
    expected = torch.zeros(len(cache), size, dtype=torch.double)
    for sequence in range(2):
        own = keys[sequence * length : (sequence + 1) * length, 2 : size + 2].double()
        expected[slots[sequence]] = own
        for end in range(pool - 1, length, pool):
            mean = own[end - pool + 1 : end + 1].mean(0)
            normal = mean * (mean.square().mean() + 1e-2).rsqrt() * gains
            turned = reference.rotate(normal.view(1, 1, size), table[sequence * length + end].double().unsqueeze(0))
            expected[slots[sequence, end]] = turned.flatten()
    tolerance = 0.07 if cached else 2 * TOLERANCE[dtype]
    torch.testing.assert_close(cache.double().flatten(1).cpu(), expected, rtol=tolerance, atol=tolerance)


def test_it_is_compiled_as_it_is_launched() -> None:
    for one in fused_means.compilations():
        assert list(one.signature) == [name for name in one.kernel.arg_names if name not in one.constants]
