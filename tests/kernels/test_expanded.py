"""Long rows that see heads' own keys and values, made of latents for them, find what a softmax in float64 over those finds, beside
rows that see latents; by torch and by Triton's kernels."""

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

FEWEST = 9
SHAPES = [(1, 0), (12, 3), (1, 40), (3, 2), (130, 33), (9, 0), (8, 90), (70, 0), (1, 19), (20, 140)]
# What turns is multiplied by itself, or with the rest; values are shorter than keys, or longer.
KINDS = {
    "deepseek": Expansion(heads=4, latent=48, plain=16, turned=8, values=16),
    "glm": Expansion(heads=6, latent=40, plain=24, turned=8, values=32),
    "odd": Expansion(heads=2, latent=30, plain=12, turned=8, values=20),
    "short": Expansion(heads=3, latent=24, plain=9, turned=4, values=5),
    "unturned": Expansion(heads=2, latent=24, plain=16, turned=0, values=16),
}


@pytest.fixture(autouse=True)
def _clean(poisoned_float_outputs: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(expanded, "MIN_QUERIES", FEWEST)
    monkeypatch.setattr(expanded, "MIN_QUERIES_TRITON", FEWEST)
    monkeypatch.setattr(expanded, "MARGIN", -1e9)
    yield
    dispatch.force("")


class AttentionCase:
    """Rows over a cache of random latents, in the order of a plan by one of the routes. What Triton reads holds no numbers in slots
    of no row."""

    def __init__(
        self,
        rows: list[Row],
        page_size: int,
        own: Expansion,
        route: str,
        dtype: torch.dtype = torch.float32,
        cached: torch.dtype | None = None,
    ) -> None:
        dispatch.force(route)
        torch.manual_seed(len(rows))
        self.page_size, self.own = page_size, own
        kinds = (kind(0, own.heads, 1, own.latent + own.turned, True),)
        layout = AttentionLayout(page_size, kinds, dtype, DEVICE, latent=own.latent, expansion=own)
        order, self.plan = ragged.plan(rows, layout)
        self.rows = [rows[i] for i in order]
        cache = random_cache(rows, page_size, (1, 1, own.latent + own.turned), unused_slot_value(route))
        self.cache = cache.to(cached or dtype).to(DEVICE)
        self.query, self.to_keys, self.to_values = (
            (torch.randn(*size) * factor).to(dtype).to(DEVICE)
            for size, factor in (
                ((sum(row.queries for row in rows), own.heads, own.plain + own.turned), 1.0),
                ((own.heads, own.plain, own.latent), own.latent**-0.5),
                ((own.heads, own.latent, own.values), own.latent**-0.5),
            )
        )

    def found(self) -> Tensor:
        """By latents, and by what they are expanded to."""
        how, own = AttentionOptions(0, 0.3, latent=self.own.latent), self.own
        first, others = len(self.query), self.plan
        parts = []
        if isinstance(self.plan, expanded.Plan):
            first, others = self.plan.first, self.plan.others
            parts = [ragged.attention_to_expanded(self.query[first:], self.cache, self.plan, how, self.to_keys, self.to_values)]
        if first:
            query = self.query[:first]
            absorbed = torch.einsum("thp,hpl->thl", query[..., : own.plain], self.to_keys)
            asked = torch.cat((absorbed, query[..., own.plain :]), 2)
            among = ragged.attention(asked, self.cache, others, how)
            parts.insert(0, torch.einsum("thl,hlv->thv", among, self.to_values))
        return torch.cat(parts)

    def check(self) -> None:
        expected = [self._exact(row, own) for row, own in token_ranges(self.rows)]
        tolerance = TOLERANCE[self.query.dtype] * (1 if self.query.dtype == torch.float32 else 4)  # keys are rounded once more
        torch.testing.assert_close(self.found().double().cpu(), torch.cat(expected), rtol=tolerance, atol=tolerance)

    def _exact(self, row: Row, own: slice) -> Tensor:
        cached = self.cache[slots_of_row(row, self.page_size)].double().cpu().flatten(1)
        latents, turned = cached[:, : self.own.latent], cached[:, self.own.latent :]
        keys = torch.einsum("kl,hpl->hkp", latents, self.to_keys.double().cpu())
        keys = torch.cat((keys, turned.expand(self.own.heads, -1, -1)), 2)
        logits = torch.einsum("qhp,hkp->qhk", self.query[own].double().cpu(), keys) * 0.3
        weights = logits.masked_fill(~visibility_mask(row).unsqueeze(1), -torch.inf).softmax(-1)
        return torch.einsum("qhk,kl,hlv->qhv", weights, latents, self.to_values.double().cpu())


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize(("page_size", "name"), [(1, "deepseek"), (16, "glm"), (64, "odd"), (3, "short"), (16, "unturned")])
def test_a_mixture(page_size: int, name: str, route: str) -> None:
    """Of decodes, trees and chunks, some long enough."""
    rows = random_paged_rows(SHAPES, page_size, random.Random(page_size), trees=0.3, sharing=0.3)
    case = AttentionCase(rows, page_size, KINDS[name], route)
    assert isinstance(case.plan, expanded.Plan)
    assert case.plan.first == sum(row.queries for row in rows if row.queries < FEWEST or row.parents is not None)
    case.check()


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_heads_and_rows_take_turns_where_there_is_little_room(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rows for all heads, one by one, and one so long that there is room for some of its heads at once."""
    for module in (expanded, expanded_attention):
        monkeypatch.setattr(module, "SCRATCH", 4 * 32 * 4 * 400)
    case = AttentionCase(
        random_paged_rows([(30, 90), (40, 0), (20, 700), (9, 60)], 16, random.Random(1)), 16, KINDS["deepseek"], route
    )
    assert isinstance(case.plan, expanded.Plan)
    assert sorted(part.heads for part in case.plan.parts) == ([2, 4, 4] if route == "triton" else [1, 4, 4, 4])
    case.check()


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_latents_of_8_bits(route: str) -> None:
    """Which are as they are: they have no scales."""
    rows = random_paged_rows(SHAPES[:6], 16, random.Random(5))
    AttentionCase(rows, 16, KINDS["deepseek"], route, torch.float16, torch.float8_e4m3fn).check()


@pytest.mark.parametrize("name", KINDS)
def test_16_bits(name: str) -> None:
    AttentionCase(random_paged_rows(SHAPES, 16, random.Random(6)), 16, KINDS[name], "triton", torch.float16).check()


def test_scratch_that_is_written_as_a_whole_is_not_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is there a number in it before."""
    case = AttentionCase(random_paged_rows(SHAPES[:6], 16, random.Random(7)), 16, KINDS["glm"], "triton")
    zeroed: list[tuple[int, ...]] = []
    honest, empty, zeros = expanded_attention.attend, Tensor.new_empty, Tensor.new_zeros

    def poisoned(found: Tensor) -> Tensor:
        return found.fill_(torch.nan) if found.is_floating_point() else found

    def attend(query: Tensor, latents: Tensor, *rest: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "new_empty", lambda tensor, *size, **how: poisoned(empty(tensor, *size, **how)))
            patch.setattr(Tensor, "new_zeros", lambda tensor, *size: zeroed.append(size) or zeros(tensor, *size))
            honest(query, latents, *rest)

    monkeypatch.setattr(expanded_attention, "attend", attend)
    case.check()
    assert not zeroed


def test_what_pays() -> None:
    """As many multiplications as are spent are saved from 171 queries on in DeepSeek's models, if there is a context, and from 399
    on in GLM 4.7 Flash. Without one, none are spent."""
    for own, most in ((Expansion(16, 512, 128, 64, 128), 171), (Expansion(20, 512, 192, 64, 256), 399)):
        for queries, context, said in ((FEWEST - 1, 0, False), (FEWEST, 0, True), (most - 1, 10**6, False), (most, 10**6, True)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(expanded, "MARGIN", 1.0)
                assert expanded.worthwhile(Row(queries, context, ()), own, False) == said
    own = KINDS["deepseek"]
    assert not expanded.worthwhile(Row(99, 0, (), parents=range(-1, 98)), own, False)
    assert not expanded.worthwhile(Row(99, 0, (), whole=True), own, False)


def test_what_only_the_device_knows_is_not_expanded() -> None:
    """Tables of beams that it parts, in the order that the host has said."""
    own = KINDS["deepseek"]
    layout = AttentionLayout(4, (kind(0, 4, 1, 56, True),), torch.float32, DEVICE, latent=48, expansion=own)
    long = Row(20, 0, range(5))
    assert expanded.rows_to_expand([Row(1, 8, range(3)), long], layout) == [1]
    assert expanded.rows_to_expand([Row(1, 8, range(3), settled=1), long], layout) == []
