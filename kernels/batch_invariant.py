"""Batch-invariant attention in plain torch: a token's output depends, to the last bit, only on what it sees, not on what else is in
the step, nor on how many of its neighbours are computed at once. Knows tensors and ints, no sequence and no page pool.

The order in which torch adds numbers up depends on the shapes that it is given. Here these are always the same: tiles of equally
many queries, padded where there are fewer, on whole blocks of keys that begin at multiples of the block, with masks that hide the
rest. The other half of this are matrix products whose rows don't depend on each other (`linear.Invariance.INVARIANT`). The idea is
batch invariance (He et al. 2025, Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference").
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from .attention import BLOCK_ELEMENTS, TILE, AttentionOptions, Row, gather, packed_heads, slots_of, unpacked_heads
from .layout import AttentionLayout, LayerKind

# Block of keys of torch's CPU attention: it goes through so many at once, if there are as many.
KEYS = 512
# Query heads of a key head in a tile: these cost hardly more than a few.
HEADS = 16


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that read equally many keys, ready for all layers. Their query tokens are `start` to `start + rows * queries` of the
    step."""

    start: int
    rows: int
    queries: int  # more than a tile's only if it is a single row
    context: int  # the longest context
    slots: Tensor  # [rows * keys], whole blocks of keys
    positions: Tensor  # [rows, queries]
    # [rows, queries]: the last keys that queries see, where some row is `whole` (bidirectional); None: their own positions
    last: Tensor | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The attention plan of a step, for all layers."""

    blocks: list[Block]
    tile: int  # queries of a tile
    kinds: dict[int, LayerKind]  # kinds of layers, by their windows


def plan(rows: Sequence[Row], layout: AttentionLayout) -> tuple[list[int], Plan]:
    """The order in which `rows` have to stand in the step, and its plan.

    Raises ValueError for trees: the keys that a node sees are not contiguous, as they will be once it is accepted, so sums are made
    in another order.
    """
    if any(row.parents is not None and list(row.parents) != list(range(-1, row.queries - 1)) for row in rows):
        raise ValueError("the nodes of a tree are not computed as a chain's tokens are, to the last bit")
    tile, device = max(1, HEADS // layout.ratio), layout.device
    order = sorted(range(len(rows)), key=lambda i: (rows[i].queries, _keys(rows[i])))
    blocks, start = list[Block](), 0
    for part in _alike([rows[i] for i in order], tile, layout.elements):
        queries = part[0].queries
        slots = slots_of(part, layout.page_size)
        slots = numpy.pad(slots, ((0, 0), (0, _keys(part[0]) - slots.shape[1])))  # of page 0, masked for all
        positions = torch.tensor([row.context for row in part], device=device).unsqueeze(1) + torch.arange(queries, device=device)
        last = None
        if any(row.whole for row in part):
            whole = torch.tensor([row.whole for row in part], device=device).unsqueeze(1)
            last = torch.where(whole, positions[:, -1:], positions)
        context = max(row.context for row in part)
        blocks.append(Block(start, len(part), queries, context, torch.from_numpy(slots.reshape(-1)).to(device), positions, last))
        start += len(part) * queries
    return order, Plan(blocks, tile, {kind.window: kind for kind in layout.kinds})


def _keys(row: Row) -> int:
    return _whole(row.context + row.queries)


def _whole(keys: int) -> int:
    """A number of keys rounded up to whole blocks."""
    return -(-keys // KEYS) * KEYS


def _alike(rows: Sequence[Row], tile: int, elements: int) -> Iterator[Sequence[Row]]:
    """Groups of neighbouring rows, each of which fits into one block."""
    for (queries, keys), found in groupby(rows, key=lambda row: (row.queries, _keys(row))):
        part = list(found)
        most = max(1, BLOCK_ELEMENTS // (keys * elements)) if queries <= tile else 1
        yield from (part[first : first + most] for first in range(0, len(part), most))


def attention(query: Tensor, cache: Tensor, plan: Plan, how: AttentionOptions) -> Tensor:
    """As `attention.attention`, without sparse selection."""
    attended: Callable[..., Tensor] = partial(functional.scaled_dot_product_attention, scale=how.scale)
    kind, heads, kv_heads = plan.kinds[how.window], query.shape[1], cache.shape[2]
    if how.softcap or how.sinks is not None:
        own = how.sinks.view(kv_heads, -1).repeat(1, plan.tile).unsqueeze(2) if how.sinks is not None else None
        attended = partial(_attend_by_blocks, scale=how.scale, softcap=how.softcap, sinks=own)
    answers = []
    for block in plan.blocks:
        keys, values = gather(cache, block.slots, block.rows, query.dtype, how.scales)
        asking = query[block.start : block.start + block.rows * block.queries].view(block.rows, block.queries, heads, -1)
        many = TILE // plan.tile * plan.tile  # queries of a long row that are attended at once
        last = block.last if block.last is not None and kind.joined else block.positions
        for first in range(0, block.queries, many):
            part, positions, ends = (x[:, first : first + many] for x in (asking, block.positions, last))
            seen = slice(_whole(block.context + (first + many if last is block.positions else block.queries)))
            firsts = _first_keys(positions, kind)
            found = _tiles(attended, part, keys[:, :, seen], values[:, :, seen], firsts, ends, plan.tile)
            answers.append(found.flatten(0, 1))
    return answers[0] if len(answers) == 1 else torch.cat(answers)


def _first_keys(positions: Tensor, kind: LayerKind) -> Tensor:
    """The first keys that queries at these positions see."""
    if not kind.window:
        return torch.zeros_like(positions)
    return positions // kind.window * kind.window if kind.chunked else positions - kind.window + 1


def _tiles(
    attended: Callable[..., Tensor],
    asking: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    last: Tensor,
    tile: int,
) -> Tensor:
    """Attention of tiles of `tile` queries. asking: [rows, queries, heads, size]; keys, values: [rows, kv_heads, keys, size];
    first, last: keys that queries see, [rows, queries]. The result has the shape of asking."""
    rows, queries, heads, size = asking.shape
    lacking = -queries % tile
    asking = functional.pad(asking, (0, 0, 0, 0, 0, lacking)).reshape(-1, heads, size)
    # Padding queries see the first key: a softmax needs at least one.
    first, last = (functional.pad(x, (0, lacking)).view(-1, tile, 1) for x in (first, last))
    count, kv_heads = len(first), keys.shape[1]
    key = torch.arange(keys.shape[2], device=keys.device)
    visible = (key >= first) & (key <= last)
    mask = torch.zeros(visible.shape, dtype=asking.dtype, device=keys.device).masked_fill_(~visible, -torch.inf)
    mask = mask.repeat_interleave(heads // kv_heads, 1).unsqueeze(1)  # [tiles, 1, queries * ratio, keys]
    spread = [x.expand(count, -1, -1, -1) for x in (keys, values)]
    found = unpacked_heads(attended(packed_heads(asking, count, kv_heads), *spread, mask), tile)
    return found.view(rows, -1, heads, size)[:, :queries]


def _attend_by_blocks(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """`scaled_dot_product_attention` with a soft cap and attention sinks, [heads, queries or 1, 1], by the same blocks of keys,
    with an online softmax (Dao et al. 2022, arXiv:2205.14135)."""
    query = query.float()
    best = torch.full((*query.shape[:3], 1), -torch.inf, device=query.device)
    total, sums = torch.zeros_like(best), torch.zeros_like(query)
    for part in (slice(first, first + KEYS) for first in range(0, keys.shape[2], KEYS)):
        logits = query @ keys[:, :, part].float().transpose(2, 3)
        logits = logits.mul_(scale / softcap).tanh_().mul_(softcap) if softcap else logits.mul_(scale)
        logits += mask[..., part]
        higher = torch.maximum(best, logits.amax(3, keepdim=True))
        base = higher.masked_fill(higher == -torch.inf, 0)  # for rows that have seen nothing yet
        weights, fade = logits.sub_(base).exp_(), (best - base).exp_()
        total, sums, best = (
            total.mul_(fade).add_(weights.sum(3, keepdim=True)),
            sums * fade + weights @ values[:, :, part].float(),
            higher,
        )
    if sinks is not None:
        total += (sinks - best).exp()
    return (sums / total).to(mask.dtype)
