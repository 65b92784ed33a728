"""MLA with latents expanded to the heads' own keys and values for long rows, beside rows that attend to latents, by the reference
and by Triton's kernels, compared with a softmax in float64."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.kernels import dispatch, expanded, expanded_attention, ragged
from penstock.kernels.attention import AttentionOptions, Row
from penstock.kernels.layout import AttentionLayout, Expansion, kind

from .test_paged_attention import (
    DEVICE,
    TOLERANCE,
    random_cache,
    random_paged_rows,
    slots_of_row,
    token_ranges,
    unused_slot_value,
    visibility_mask,
)

MIN_QUERIES = 9
SHAPES = [(1, 0), (12, 3), (1, 40), (3, 2), (130, 33), (9, 0), (8, 90), (70, 0), (1, 19), (20, 140)]
# The rotary features have a product of their own, or one with the rest; values are shorter than keys, or longer.
EXPANSIONS = {
    "deepseek": Expansion(heads=4, latent=48, plain=16, turned=8, values=16),
    "glm": Expansion(heads=6, latent=40, plain=24, turned=8, values=32),
    "odd sizes": Expansion(heads=2, latent=30, plain=12, turned=8, values=20),
    "short values": Expansion(heads=3, latent=24, plain=9, turned=4, values=5),
    "no rotary": Expansion(heads=2, latent=24, plain=16, turned=0, values=16),
}


@pytest.fixture(autouse=True)
def expand_whenever_possible(poisoned_float_outputs: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(expanded, "MIN_QUERIES", MIN_QUERIES)
    monkeypatch.setattr(expanded, "MIN_QUERIES_TRITON", MIN_QUERIES)
    monkeypatch.setattr(expanded, "MARGIN", -1e9)
    yield
    dispatch.force("")


class AttentionCase:
    """Rows over a cache of random latents, in the order of a plan of one of the routes. Slots that no row uses are NaN where Triton
    reads."""

    def __init__(
        self,
        rows: list[Row],
        page_size: int,
        expansion: Expansion,
        route: str,
        dtype: torch.dtype = torch.float32,
        cached: torch.dtype | None = None,
    ) -> None:
        dispatch.force(route)
        torch.manual_seed(len(rows))
        self.page_size, self.expansion = page_size, expansion
        kinds = (kind(0, expansion.heads, 1, expansion.latent + expansion.turned, True),)
        layout = AttentionLayout(page_size, kinds, dtype, DEVICE, latent=expansion.latent, expansion=expansion)
        order, self.plan = ragged.plan(rows, layout)
        self.rows = [rows[i] for i in order]
        cache = random_cache(rows, page_size, (1, 1, expansion.latent + expansion.turned), unused_slot_value(route))
        self.cache = cache.to(cached or dtype).to(DEVICE)
        self.query, self.to_keys, self.to_values = (
            (torch.randn(*size) * factor).to(dtype).to(DEVICE)
            for size, factor in (
                ((sum(row.queries for row in rows), expansion.heads, expansion.plain + expansion.turned), 1.0),
                ((expansion.heads, expansion.plain, expansion.latent), expansion.latent**-0.5),
                ((expansion.heads, expansion.latent, expansion.values), expansion.latent**-0.5),
            )
        )

    def attend(self) -> Tensor:
        """By latents, and by expanded keys and values."""
        options, expansion = AttentionOptions(0, 0.3, latent=self.expansion.latent), self.expansion
        first, others = len(self.query), self.plan
        parts = []
        if isinstance(self.plan, expanded.Plan):
            first, others = self.plan.first, self.plan.others
            parts = [ragged.attention_to_expanded(self.query[first:], self.cache, self.plan, options, self.to_keys, self.to_values)]
        if first:
            query = self.query[:first]
            absorbed = torch.einsum("thp,hpl->thl", query[..., : expansion.plain], self.to_keys)
            latent_query = torch.cat((absorbed, query[..., expansion.plain :]), 2)
            attended = ragged.attention(latent_query, self.cache, others, options)
            parts.insert(0, torch.einsum("thl,hlv->thv", attended, self.to_values))
        return torch.cat(parts)

    def check(self) -> None:
        expected = [self._exact(row, tokens) for row, tokens in token_ranges(self.rows)]
        tolerance = TOLERANCE[self.query.dtype] * (
            1 if self.query.dtype == torch.float32 else 4
        )  # expanded keys are rounded once more
        torch.testing.assert_close(self.attend().double().cpu(), torch.cat(expected), rtol=tolerance, atol=tolerance)

    def _exact(self, row: Row, tokens: slice) -> Tensor:
        cached = self.cache[slots_of_row(row, self.page_size)].double().cpu().flatten(1)
        latents, rotary = cached[:, : self.expansion.latent], cached[:, self.expansion.latent :]
        keys = torch.einsum("kl,hpl->hkp", latents, self.to_keys.double().cpu())
        keys = torch.cat((keys, rotary.expand(self.expansion.heads, -1, -1)), 2)
        logits = torch.einsum("qhp,hkp->qhk", self.query[tokens].double().cpu(), keys) * 0.3
        weights = logits.masked_fill(~visibility_mask(row).unsqueeze(1), -torch.inf).softmax(-1)
        return torch.einsum("qhk,kl,hlv->qhv", weights, latents, self.to_values.double().cpu())


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize(
    ("page_size", "name"), [(1, "deepseek"), (16, "glm"), (64, "odd sizes"), (3, "short values"), (16, "no rotary")]
)
def test_mixed_rows_match_exact_attention_and_only_long_chains_are_expanded(page_size: int, name: str, route: str) -> None:
    """Decodes, trees and prompt chunks."""
    rows = random_paged_rows(SHAPES, page_size, random.Random(page_size), trees=0.3, sharing=0.3)
    case = AttentionCase(rows, page_size, EXPANSIONS[name], route)
    assert isinstance(case.plan, expanded.Plan)
    assert case.plan.first == sum(row.queries for row in rows if row.queries < MIN_QUERIES or row.parents is not None)
    case.check()


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_rows_and_heads_are_expanded_in_parts_within_the_scratch_limit(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rows with all heads, single rows, and a row so long that only some of its heads fit at once."""
    for module in (expanded, expanded_attention):
        monkeypatch.setattr(module, "SCRATCH", 4 * 32 * 4 * 400)
    case = AttentionCase(
        random_paged_rows([(30, 90), (40, 0), (20, 700), (9, 60)], 16, random.Random(1)), 16, EXPANSIONS["deepseek"], route
    )
    assert isinstance(case.plan, expanded.Plan)
    assert sorted(part.heads for part in case.plan.parts) == ([2, 4, 4] if route == "triton" else [1, 4, 4, 4])
    case.check()


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_fp8_latents_without_scales_match_exact_attention(route: str) -> None:
    rows = random_paged_rows(SHAPES[:6], 16, random.Random(5))
    AttentionCase(rows, 16, EXPANSIONS["deepseek"], route, torch.float16, torch.float8_e4m3fn).check()


@pytest.mark.parametrize("name", EXPANSIONS)
def test_float16_matches_exact_attention(name: str) -> None:
    AttentionCase(random_paged_rows(SHAPES, 16, random.Random(6)), 16, EXPANSIONS[name], "triton", torch.float16).check()


def test_scratch_memory_is_not_zeroed_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is NaN before."""
    case = AttentionCase(random_paged_rows(SHAPES[:6], 16, random.Random(7)), 16, EXPANSIONS["glm"], "triton")
    zeroed: list[tuple[int, ...]] = []
    original, empty, zeros = expanded_attention.attend, Tensor.new_empty, Tensor.new_zeros

    def fill_with_nan(found: Tensor) -> Tensor:
        return found.fill_(torch.nan) if found.is_floating_point() else found

    def attend(query: Tensor, latents: Tensor, *rest: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "new_empty", lambda tensor, *size, **options: fill_with_nan(empty(tensor, *size, **options)))
            patch.setattr(Tensor, "new_zeros", lambda tensor, *size: zeroed.append(size) or zeros(tensor, *size))
            original(query, latents, *rest)

    monkeypatch.setattr(expanded_attention, "attend", attend)
    case.check()
    assert not zeroed


def test_expansion_is_chosen_where_it_saves_multiplications() -> None:
    """With a context, it saves more than it costs from 171 queries on in DeepSeek's models, and from 399 on in GLM 4.7 Flash.
    Without a context it costs nothing."""
    for expansion, break_even in ((Expansion(16, 512, 128, 64, 128), 171), (Expansion(20, 512, 192, 64, 256), 399)):
        for queries, context, expected in (
            (MIN_QUERIES - 1, 0, False),
            (MIN_QUERIES, 0, True),
            (break_even - 1, 10**6, False),
            (break_even, 10**6, True),
        ):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(expanded, "MARGIN", 1.0)
                assert expanded.worthwhile(Row(queries, context, ()), expansion, False) == expected
    expansion = EXPANSIONS["deepseek"]
    assert not expanded.worthwhile(Row(99, 0, (), parents=range(-1, 98)), expansion, False)
    assert not expanded.worthwhile(Row(99, 0, (), whole=True), expansion, False)


def test_rows_whose_pages_only_the_device_knows_are_not_expanded() -> None:
    """As in overlapped beam search, where the device updates page tables."""
    expansion = EXPANSIONS["deepseek"]
    layout = AttentionLayout(4, (kind(0, 4, 1, 56, True),), torch.float32, DEVICE, latent=48, expansion=expansion)
    long = Row(20, 0, range(5))
    assert expanded.rows_to_expand([Row(1, 8, range(3)), long], layout) == [1]
    assert expanded.rows_to_expand([Row(1, 8, range(3), settled=1), long], layout) == []
