"""Attention of a step in plain torch with shared prefixes: rows that begin with the same pages (beams, samples, a common prompt)
read those once.

Attention over the common keys and over a row's own keys is merged by log-sum-exp, as in Hydragen (Juravsky et al. 2024,
arXiv:2402.05099). Rows with few keys of their own need no merge: they are attended together over the keys of all, and a mask says
whose each is. Only decodes (rows of one query) share: others do enough with a key that they have read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import isnan

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from . import attention as plain
from .attention import AttentionOptions, Block, Row, View
from .layout import AttentionLayout
from .work_list import Run, shared_runs, width

# Limits of a bundle: rows attended together over all of their keys. Measured 2026-11-24 on a Xeon, one thread, 8/4 heads of 32:
# four rows with 256 keys in common and 48 more each take 0.29 ms as a bundle and 0.53 by runs; eight such groups 1.23 and 1.27, and
# with 16 more each 1.05 and 1.34.
TOGETHER = 16  # most query heads that read a key together: they cost hardly more than two
ALONE = 1 << 12  # most elements of keys, for each row, that not all have in common: more cost more than a merge
LONGEST = 1 << 12  # most keys: with more, a merge costs nothing by comparison, and masks are long


@dataclass(frozen=True, slots=True)
class Level:
    """One depth of the tree of shared prefixes: runs of common keys that continue those of the level before."""

    tokens: Tensor  # [queries] the step's tokens that read them: the blocks' queries, in their order
    blocks: list[Block]  # each of their rows is a run of pages


@dataclass(frozen=True, slots=True)
class Plan:
    """The attention plan of a step, for all layers."""

    bundles: list[Block]  # rows with few keys of their own, attended together over the keys of all; these rows stand first
    blocks: list[Block]  # the keys that each other row reads alone
    levels: list[Level]  # the keys that rows read together; each level continues the one before


def plan(rows: Sequence[Row], layout: AttentionLayout) -> tuple[list[int], Plan]:
    """The order in which `rows` have to stand in the step, and its plan."""
    # torch returns the log-sum-exps that a merge needs on CPUs only. With windows, rows see different parts of their common prefix.
    able = layout.device.type == "cpu" and not (layout.special or layout.windowed)
    bundles, levels = list[Run](), list[list[Run]]()
    depths, own = [0] * len(rows), dict(enumerate(rows))
    for run in shared_runs(rows, layout.page_size, 1) if able else ():
        if run.members[0] not in own:
            continue  # its members are in a bundle
        if len(run.members) * layout.ratio <= TOGETHER and _short(run, rows, layout):
            bundles.append(run)
            for i in run.members:
                del own[i]
            continue
        if depths[run.members[0]] == len(levels):
            levels.append([])
        levels[depths[run.members[0]]].append(run)
        for i in run.members:
            depths[i] += 1
            own[i] = Row(1, rows[i].context - run.end * layout.page_size, rows[i].pages[run.end :])
    bundled, together = _joint(bundles, rows, layout, whole=True)
    others = list(own)
    others = [others[k] for k in plain.order([*own.values()])]
    blocks = plain.blocks([own[i] for i in others], layout, len(bundled))
    order = bundled + others
    places = {row: token for token, row in enumerate(order)}  # rows of one query come first
    return order, Plan(together, blocks, [_level(level, rows, places, layout) for level in levels])


def _short(run: Run, rows: Sequence[Row], layout: AttentionLayout) -> bool:
    """Whether the members of a run have so few keys beyond it that they may as well be attended over the keys of all, as a
    bundle."""
    common, alone = run.end - run.begin, len(set(_beyond(run, rows, layout.page_size)))
    return alone * layout.page_size * layout.size <= ALONE * len(run.members) and (common + alone) * layout.page_size <= LONGEST


def _beyond(run: Run, rows: Sequence[Row], page_size: int) -> Iterator[int]:
    """The pages that follow the run in its members' page tables."""
    return chain.from_iterable(rows[i].pages[run.end : width(rows[i], page_size)] for i in run.members)


def _level(runs: Sequence[Run], rows: Sequence[Row], places: dict[int, int], layout: AttentionLayout) -> Level:
    members, blocks = _joint(runs, rows, layout, whole=False)
    return Level(torch.tensor([places[i] for i in members], device=layout.device), blocks)


def _joint(runs: Sequence[Run], rows: Sequence[Row], layout: AttentionLayout, whole: bool) -> tuple[list[int], list[Block]]:
    """The members of all runs, and blocks whose queries are these members and whose rows are the runs. whole: with the members' own
    pages, too (a bundle)."""
    page_size, joint = layout.page_size, []
    for run in runs:
        common = rows[run.members[0]].pages[run.begin : run.end]
        pages = [*common, *(dict.fromkeys(_beyond(run, rows, page_size)) if whole else ())]
        joint.append(Row(len(run.members), len(pages) * page_size - len(run.members), pages))
    order = plain.order(joint)
    members, blocks, following = list[int](), list[Block](), iter(order)
    for part in plain.split([joint[k] for k in order], layout.elements):
        slots, start, queries = plain.slots_of(part, page_size), len(members), part[0].queries
        visible = numpy.zeros((len(part), queries if whole else 1, slots.shape[1] // page_size, page_size), bool)
        for row, seen, k in zip(part, visible, following, strict=False):
            run = runs[k]
            seen[:, : run.end - run.begin] = True
            if whole:
                _see(seen, row.pages, run, rows)
            members += run.members
        view = plain.view_of(slots, visible.reshape(*visible.shape[:2], -1), layout.device)
        blocks.append(Block(start, len(part), queries, {0: view}))
    return members, blocks


def _see(seen: plain.Array, pages: Sequence[int], run: Run, rows: Sequence[Row]) -> None:
    """Unmasks for each member of the run its own pages. seen: [members, pages, page size]."""
    places, page_size = {page: place for place, page in enumerate(pages)}, seen.shape[2]
    for i, own in zip(run.members, seen, strict=True):
        alone = [places[page] for page in rows[i].pages[run.end : width(rows[i], page_size)]]
        own[alone] = True
        own[alone[-1], rows[i].context % page_size + 1 :] = False


def follow(plan: Plan, slots: Tensor) -> Plan | None:
    """The plan of the next decode step, one token more for each row of `plan` in the same order: it sees what the row's last query
    saw, and itself. None where there are windows. Meant for a few steps: common keys and blocks are not searched anew.

    slots: [rows] int64, of the new tokens. The order of keys doesn't matter, so new ones are appended, even behind padding.
    """
    if any(set(block.views) != {0} for block in plan.blocks):
        return None
    bundles, blocks, start = list[Block](), list[Block](), 0
    for block in plan.bundles:
        view, count = block.views[0], block.queries
        own = torch.full((count, count), -torch.inf, device=slots.device).fill_diagonal_(0).expand(block.rows, 1, -1, -1)
        hidden = view.mask if view.mask is not None else own.new_zeros(block.rows, 1, count, view.length)
        bundles.append(replace(block, views={0: _longer(block, slots, count, torch.cat((hidden, own), 3))}))
        start += block.rows * count
    for block in plan.blocks:
        mask = block.views[0].mask
        mask = functional.pad(mask[:, :, -1:], (0, 1)) if mask is not None and block.rows > 1 else None
        blocks.append(Block(start, block.rows, 1, {0: _longer(replace(block, start=start), slots, 1, mask)}))
        start += block.rows
    return Plan(bundles, blocks, plan.levels)


def _longer(block: Block, slots: Tensor, count: int, mask: Tensor | None) -> View:
    """The block's view with `count` of `slots` appended for each row."""
    view, own = block.views[0], slots[block.start : block.start + block.rows * count].view(block.rows, count)
    return View(view.length + count, torch.cat((view.slots.view(block.rows, -1), own), 1).flatten(), mask)


def attention(query: Tensor, cache: Tensor, plan: Plan, how: AttentionOptions) -> Tensor:
    """As `attention.attention`."""
    answer = _attention(query, cache, plan, how)
    if plan.bundles and isnan(answer[: _end(plan.bundles[-1])].sum()):
        # A number that is not finite reaches all rows of its bundle: its weight is 0 for the others, but 0 times NaN is NaN.
        blocks = [*chain.from_iterable(map(_apart, plan.bundles)), *plan.blocks]
        answer = _attention(query, cache, replace(plan, bundles=[], blocks=blocks), how)
    return answer


def _end(block: Block) -> int:
    """The token after a block's last."""
    return block.start + block.rows * block.queries


def _apart(bundle: Block) -> Iterator[Block]:
    """Each row of a bundle by itself, with the keys that it sees."""
    view = bundle.views[0]
    for token, slots in enumerate(view.slots.view(bundle.rows, -1).repeat_interleave(bundle.queries, 0)):
        row, query = divmod(token, bundle.queries)
        own = slots[view.mask[row, 0, query] == 0] if view.mask is not None else slots
        yield Block(bundle.start + token, 1, 1, {0: View(len(own), own, None)})


def _attention(query: Tensor, cache: Tensor, plan: Plan, how: AttentionOptions) -> Tensor:
    if not plan.levels:
        return plain.attention(query, cache, [*plan.bundles, *plan.blocks], how)
    assert not how.softcap
    assert how.sinks is None
    assert how.asked is None
    single = [block for block in plan.blocks if block.queries == 1]
    answer, weight = _find(query, cache, [*plan.bundles, *single], how.scale, how.scales)
    for level in plan.levels:
        _merge(answer, weight, level.tokens, *_find(query[level.tokens], cache, level.blocks, how.scale, how.scales))
    others = plan.blocks[len(single) :]
    return torch.cat((answer, plain.attention(query, cache, others, how))) if others else answer


Found = tuple[Tensor, Tensor]
"""Answers [tokens, heads, size], and the logarithms of what their softmaxes divided by, [tokens, heads] float32."""


def _find(query: Tensor, cache: Tensor, blocks: Sequence[Block], scale: float, scales: Tensor | None) -> Found:
    parts = [_attend(query, cache, block, scale, scales) for block in blocks]
    return (torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])) if len(parts) > 1 else parts[0]


def _attend(query: Tensor, cache: Tensor, block: Block, scale: float, scales: Tensor | None) -> Found:
    """Attention and log-sum-exps of a block whose mask is per query or the same for all."""
    view, heads = block.views[0], query.shape[1]
    keys, values = plain.gather(cache, view.slots, block.rows, query.dtype, scales)
    kv_heads = keys.shape[1]
    own = query[block.start : block.start + block.rows * block.queries]
    tile, mask = plain.packed_heads(own, block.rows, kv_heads), view.mask
    if mask is not None:
        mask = mask.to(query.dtype)
        mask = mask.repeat_interleave(heads // kv_heads, 2) if mask.shape[2] > 1 else mask
    # What `scaled_dot_product_attention` calls on a CPU; called directly for the log-sum-exps, which that doesn't pass on.
    answer, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(tile, keys, values, attn_mask=mask, scale=scale)
    weight = weight.view(block.rows, kv_heads, block.queries, -1).transpose(1, 2).reshape(-1, heads)
    return plain.unpacked_heads(answer, block.queries), weight.float()


def _merge(answer: Tensor, weight: Tensor, tokens: Tensor, other: Tensor, other_weight: Tensor) -> None:
    """Merges the attention of `tokens` over other keys into the outputs and log-sum-exps of all, in place."""
    own = weight[tokens]
    both = torch.logaddexp(own, other_weight)
    found = answer[tokens] * (own - both).exp().unsqueeze(2) + other * (other_weight - both).exp().unsqueeze(2)
    answer[tokens], weight[tokens] = found.to(answer.dtype), both
