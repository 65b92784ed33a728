"""Ragged attention over a paged KV cache, in plain torch: the CPU route, and the reference for the Triton kernel
(`paged_attention`). Knows tensors and ints, no sequence and no page pool.

A row is a span of q query tokens on top of a context of n tokens. Its keys and values, the q new ones included, lie in `slots` of a
cache tensor. Query i sees the context and, of the new tokens, its own ancestors and itself: for a chain all before it (causal), for
a tree those on its path. In a row that is `whole`, in layers of a kind that is `joined`, all queries see all (bidirectional).

Rows are put into blocks of equal q and similar length; a block is one gather and one call of torch's fused attention, so nothing
here runs once per row. Blocks are small enough for the gathered copy to stay in the processor's cache.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from .indexed import BlockSelection, TokenSelection
from .layout import AttentionLayout, LayerKind

# Elements of padding that a block may add to its rows: copying them costs about as much as another block. Measured 2026-11-22 on a
# shared EPYC, 12 rows of 64 to 160 tokens with 256 elements each, four layers: 3.1 ms in three blocks, 2.1 in one.
PADDING = 1 << 18
# Height of a query tile. torch's causal attention computes the whole square: tiles whose keys end at their last query save nearly
# half of it, and 64 is the height of its own inner tile. Measured 2026-11-21, 512 tokens, 16/8 heads of 64, one thread: 23 to 28 ms
# as one call, 13 to 18 ms in tiles.
TILE = 64
# Elements of keys and values that a block gathers at once: 4 MB of floats. Measured 2026-11-22 on a shared EPYC with 1 MB of L2 and
# 32 MB of L3, of which other tenants take their part: 32 rows of 256 to 300 tokens, 4 layers with 256 elements and 12 with 1,024,
# take 11.7 and 134 ms with half as many, 12.3 and 124 with this many, 17.3 and 123 with twice as many.
BLOCK_ELEMENTS = 1 << 20

Array: TypeAlias = "numpy.ndarray[Any, Any]"


class CapacityExceeded(ValueError):
    """Raised when a step has more of something (tokens, rows, items, ...) than the plan that a captured CUDA graph reads has room
    for."""


@dataclass(slots=True)  # made many times a step: frozen ones take three times as long to make
class Row:
    """A span of one sequence in a step, as ints: `queries` new tokens on top of `context` tokens that are already in the KV cache.
    `pages` is the sequence's page table, in order, for both."""

    queries: int
    context: int
    pages: Sequence[int]
    parents: Sequence[int] | None = None  # per query: index of its parent among the queries, -1 for the root; None: a chain
    # How many of its first pages are final. Other full ones are filled in on the device later (beams); None: all are final.
    settled: int | None = None
    # A chain whose queries also see the later ones (bidirectional), in layers that are `joined`: the tokens of an image.
    whole: bool = False


@dataclass(slots=True)  # made many times a step: frozen ones take three times as long to make
class AttentionOptions:
    """How one layer attends over a step's plan: its window, logit scale and soft cap, cache scales, sinks and sparse selection."""

    window: int  # sliding window in tokens, by which the plan knows the layer's kind; 0: full attention
    scale: float  # logits are multiplied by it
    softcap: float = 0.0  # logits become softcap * tanh(logit / softcap); 0: no cap
    scales: Tensor | None = None  # [2, kv_heads] float32: factors that dequantize cached keys and values
    sinks: Tensor | None = None  # [heads] float32: an attention sink, one more logit in each head's softmax, without a value
    latent: int = 0  # MLA: the first so many features of the one cached key are the value; 0: keys and values are separate
    turned: int = 0  # the last so many features of keys are the same for all heads, and stored once, behind all values of a slot
    # For sparse attention: what the indexer's choice of tokens, pools or blocks is made from. When single tokens are chosen, the
    # indexer's keys stand behind the latents in the cache.
    asked: TokenSelection | BlockSelection | None = None


@dataclass(frozen=True, slots=True)
class View:
    """What the rows of a block see through one window: slots from the first key that its first query may see to its last query's
    own."""

    length: int  # keys of the longest row
    slots: Tensor  # [rows * length], where those keys are in the cache
    mask: Tensor | None  # [rows, 1, queries, length], 0 or -inf, added to logits; None: nothing is masked
    # A single chain of more queries than TILE: the mask is [1, 1, TILE, length], that of the last TILE queries, and serves every
    # tile.
    tiled: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one shape in one call of attention, ready for every layer. Their query tokens are `start` to `start + rows * queries`
    of the step."""

    start: int
    rows: int
    queries: int
    views: dict[int, View]  # per window


def order(rows: Sequence[Row]) -> list[int]:
    """The order in which rows have to stand in a step, so that rows of equal shape are neighbours for `blocks`."""
    return sorted(range(len(rows)), key=lambda i: (rows[i].queries, rows[i].context))


def blocks(rows: Sequence[Row], layout: AttentionLayout, start: int = 0) -> list[Block]:
    """Blocks of `rows`, which stand in `order`. start: their first token in the step."""
    result = []
    for part in split(rows, layout.elements):
        block = _block(part, start, layout)
        result.append(block)
        start += block.rows * block.queries
    return result


def split(rows: Sequence[Row], elements: int) -> Iterator[Sequence[Row]]:
    """Groups of neighbouring rows, each of which fits into one block without too much padding."""
    first = total = 0  # of the block: its first row, and the tokens of its rows
    for i, row in enumerate(rows):
        length = row.queries + row.context
        if i > first:
            padded = (i + 1 - first) * length
            # Padding costs its copy, and for each query about a quarter as much again.
            padding = (padded - total - length) * elements * (3 + row.queries) // 4
            alike = row.queries == rows[first].queries <= TILE
            if not alike or padded * elements > BLOCK_ELEMENTS or padding > PADDING:
                yield rows[first:i]
                first, total = i, 0
        total += length
    if rows:
        yield rows[first:]


def _block(rows: Sequence[Row], start: int, layout: AttentionLayout) -> Block:
    slots = slots_of(rows, layout.page_size)
    causal = [replace(row, whole=False) for row in rows] if any(row.whole for row in rows) else rows
    views = {kind.window: _view(rows if kind.joined else causal, slots, kind, layout.device) for kind in layout.kinds}
    return Block(start, len(rows), rows[0].queries, views)


def slots_of(rows: Sequence[Row], page_size: int) -> Array:
    """Slots of every row's keys and values: [rows, length of the longest]; arbitrary slots beyond a row's end."""
    length = max(row.queries + row.context for row in rows)
    width = -(-length // page_size)
    # A row's table may be longer than its length (pages taken ahead) or, in a block of mixed lengths, shorter.
    tables = numpy.array([[*row.pages[:width], *(0,) * (width - len(row.pages))] for row in rows])
    return (tables[:, :, None] * page_size + numpy.arange(page_size)).reshape(len(rows), -1)[:, :length]


def _view(rows: Sequence[Row], slots: Array, kind: LayerKind, device: torch.device) -> View:
    """The view of rows through the window of `kind`. slots: from `slots_of`. Keys before the window are not gathered: the context
    is simply taken to be shorter."""
    tiled = rows[0].queries > TILE and rows[0].parents is None and not rows[0].whole
    window = kind.window
    if window:
        unseen = [row.context // window * window if kind.chunked else max(0, row.context - window + 1) for row in rows]
        rows = [
            Row(row.queries, row.context - skip, (), row.parents, whole=row.whole) for row, skip in zip(rows, unseen, strict=True)
        ]
        length = rows[0].queries + max(row.context for row in rows)
        places = numpy.array(unseen)[:, None] + numpy.arange(length)
        slots = numpy.take_along_axis(slots, numpy.minimum(places, slots.shape[1] - 1), 1)
    length = slots.shape[1]
    # Counted from its end, every tile of a chain looks the same, so the mask of the last one serves all.
    visible = _visible([Row(TILE, length - TILE, ())] if tiled else rows, length, window)
    return view_of(slots, visible, device, tiled)


def view_of(slots: Array, visible: Array, device: torch.device, tiled: bool = False) -> View:
    """A view made of slots [rows, length] and `visible` [rows, queries, length], True where a query sees a key."""
    mask = None
    if not visible.all():
        hidden = numpy.where(visible, numpy.float32(0), numpy.float32(-numpy.inf))
        mask = torch.from_numpy(hidden).unsqueeze(1).to(device)
    return View(slots.shape[1], torch.from_numpy(slots.reshape(-1)).to(device), mask, tiled)


def _visible(rows: Sequence[Row], length: int, window: int) -> Array:
    """The attention mask, True where a query sees a key: [rows, queries, length]."""
    queries, keys = rows[0].queries, numpy.arange(length)
    if all(row.parents is None for row in rows):
        contexts = numpy.array([row.context for row in rows])
        positions = contexts[:, None, None] + numpy.arange(queries)[:, None]  # of queries, [rows, queries, 1]
        last = positions
        if any(row.whole for row in rows):
            whole = numpy.array([row.whole for row in rows])[:, None, None]
            last = numpy.where(whole, positions[:, -1:], positions)
        visible = keys <= last
        return visible & (positions - keys < window) if window else visible
    result = numpy.zeros((len(rows), queries, length), bool)
    for i, row in enumerate(rows):  # trees one by one: their masks have nothing in common
        ancestors, depths = ancestry(row.parents if row.parents is not None else range(-1, queries - 1))
        result[i, :, : row.context] = True
        result[i, :, row.context : row.context + queries] = ancestors if not row.whole else True
        if window:
            places = row.context + numpy.array(depths)
            result[i] &= places[:, None] - numpy.concatenate((keys[: row.context], places, keys[row.context + queries :])) < window
    return result


def ancestry(parents: Sequence[int]) -> tuple[list[list[bool]], list[int]]:
    """For a tree given by `parents` (each before its children): which nodes each node sees (ancestors and itself), and depths."""
    sees: list[list[bool]] = []
    for i, parent in enumerate(parents):
        row = list(sees[parent]) if parent >= 0 else [False] * len(parents)
        row[i] = True
        sees.append(row)
    return sees, depths(parents)


def depths(parents: Iterable[int]) -> list[int]:
    """Depth of each node of such a tree; 0 for those without a parent."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def attention(query: Tensor, cache: Tensor, plan: Sequence[Block], how: AttentionOptions) -> Tensor:
    """Softmax attention of every row of `plan`: [tokens, heads, size].

    query: [tokens, heads, size]; cache: [slots, 2, kv_heads, size], keys first, in the query's dtype or an 8-bit one; for MLA
    [slots, 1, 1, size], where keys double as values.
    """
    attended: Callable[..., Tensor] = functional.scaled_dot_product_attention if not query.is_cuda else _attend_aligned
    if how.softcap > 0 or how.sinks is not None:
        attended = partial(attention_with_sinks, softcap=how.softcap)
    outputs = [_attend(partial(attended, scale=how.scale), query, cache, block, how) for block in plan]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def gather(cache: Tensor, slots: Tensor, rows: int, dtype: torch.dtype, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values, each [rows, kv_heads, length, size] in `dtype`, gathered from `slots`, equally many for each row. For MLA
    both are the same."""
    found = _gather(cache, slots, dtype, scales).view(rows, -1, *cache.shape[1:])
    return found[:, :, 0].transpose(1, 2), found[:, :, -1].transpose(1, 2)


def _gather(cache: Tensor, slots: Tensor, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    flat = cache.view(len(cache), -1)
    if cache.dtype == dtype:
        return _select(flat, slots)
    # torch cannot index 8-bit floats, so they are gathered as bytes.
    stored = _select(flat.view(torch.uint8), slots).view(cache.dtype)
    return stored.to(dtype) if scales is None else (stored.view(-1, *cache.shape[1:]).float() * scales[..., None]).to(dtype)


def _select(rows: Tensor, indices: Tensor) -> Tensor:
    """`rows[indices]`. On one thread numpy is quicker than torch's index_select. Measured 2026-11-22 on a shared EPYC: 2,048 rows
    of 256 floats 0.09 ms against 0.14, of 1,024 floats 0.67 against 0.73."""
    if rows.device.type != "cpu" or torch.get_num_threads() > 1:
        return rows.index_select(0, indices)
    return torch.from_numpy(rows.view(torch.uint8).numpy().take(indices.numpy(), 0)).view(rows.dtype)  # numpy knows no bfloat16


def _attend(attended: Callable[..., Tensor], query: Tensor, cache: Tensor, block: Block, how: AttentionOptions) -> Tensor:
    """Attention of one block. attended: torch's `scaled_dot_product_attention` or a function with the same arguments, its scale
    bound."""
    heads, size = query.shape[1:]
    kv_heads = cache.shape[2]
    count, queries, view, sinks = block.rows, block.queries, block.views[how.window], how.sinks
    keys, values = gather(cache, view.slots, count, query.dtype, how.scales)
    own = query[block.start : block.start + count * queries]
    mask = view.mask if view.mask is None else view.mask.to(query.dtype)
    choose: Callable[[int, int, Tensor | None], Tensor | None] = _keep_mask
    if how.asked is not None:
        held = how.asked.keys
        beside = keys[:, 0, :, size:] if held is None else gather(held, view.slots, count, query.dtype, None)[0][:, 0]
        choose = partial(how.asked.masked, beside)
    if cache.shape[3] > size:  # the indexer's keys stand behind the latents
        keys = values = keys[..., :size]
    if not view.tiled:
        mask = choose(block.start, queries, mask)
    ratio = heads // kv_heads
    if queries == 1 or queries * ratio <= TILE:
        if queries > 1 and mask is not None:
            mask = mask.repeat_interleave(ratio, 2)
        tile = packed_heads(own, count, kv_heads)
        if sinks is not None:
            attended = partial(attended, sinks=sinks.view(kv_heads, ratio).repeat(1, queries).unsqueeze(2))
        return unpacked_heads(attended(tile, keys, values, mask), queries)
    if sinks is not None:
        attended = partial(attended, sinks=sinks.view(heads, 1, 1))
    spread = own.reshape(count, queries, heads, size).transpose(1, 2)
    grouped = ratio > 1
    if mask is not None and mask.shape[1] > 1:
        mask = mask.repeat_interleave(ratio, 1)
    if view.tiled and mask is not None:
        whole = keys.contiguous()
        seen = whole, whole if values is keys else values.contiguous(), mask
        answer = _attend_tiles(partial(attended, enable_gqa=grouped), spread, *seen, choose, block.start)
    else:
        answer = attended(spread, keys, values, mask, enable_gqa=grouped)
    return answer.transpose(1, 2).reshape(count * queries, heads, size)


def _keep_mask(start: int, queries: int, hidden: Tensor | None) -> Tensor | None:
    """Chooses nothing, for layers without an indexer: returns the mask as it is."""
    return hidden


def packed_heads(query: Tensor, rows: int, kv_heads: int) -> Tensor:
    """Packs all queries and query heads of a key head into one tile (as grouped-query attention kernels do), so that keys and
    values are read once: [rows, kv_heads, queries * heads / kv_heads, size]. query: [rows * queries, heads, size].

    Measured 2026-11-22 on an EPYC with AVX-512: 16 rows of 5 queries on 300 keys, 8/4 heads of 32, 0.94 ms by heads and 0.63 by
    tiles; one row of 64 queries on 500 keys, 16/8 heads of 64, 2.2 and 2.3.
    """
    heads, size = query.shape[1:]
    return query.view(rows, -1, kv_heads, heads // kv_heads, size).transpose(1, 2).reshape(rows, kv_heads, -1, size)


def unpacked_heads(answer: Tensor, queries: int) -> Tensor:
    """Undoes `packed_heads` for the attention's output: [rows * queries, heads, size]."""
    rows, kv_heads, _, size = answer.shape
    return answer.view(rows, kv_heads, queries, -1, size).transpose(1, 2).reshape(rows * queries, -1, size)


def _attend_aligned(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, **how: Any) -> Tensor:
    """torch's own attention on CUDA, on aligned copies: its kernels refuse rows that don't begin at multiples of 16 bytes, as those
    of a fused product of queries and an odd number of gates."""
    query, keys, values = (x.clone(memory_format=torch.contiguous_format) for x in (query, keys, values))
    mask = mask.clone(memory_format=torch.contiguous_format) if mask is not None else None
    return functional.scaled_dot_product_attention(query, keys, values, mask, **how)


def attention_with_sinks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` with what torch's lacks: a logit soft cap (Gemma Team 2024, arXiv:2408.00118), and attention
    sinks (Xiao et al. 2023, arXiv:2309.17453) as gpt-oss learns them, [heads, queries or 1, 1]."""
    if enable_gqa:
        keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (keys, values))
    logits = query.float() @ keys.float().transpose(2, 3)
    logits = logits.mul_(scale / softcap).tanh_().mul_(softcap) if softcap else logits.mul_(scale)
    if mask is not None:
        logits.add_(mask)
    if sinks is not None:
        logits = torch.cat((logits, sinks.expand(*logits.shape[:3], 1)), 3)
    return (logits.softmax(-1)[..., : keys.shape[2]] @ values.float()).to(query.dtype)


def _attend_tiles(
    attended: Callable[..., Tensor],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    choose: Callable[[int, int, Tensor | None], Tensor | None],
    first: int,
) -> Tensor:
    """Attention of one long chain, tile by tile, each over the keys up to its last query.

    query: [1, heads, queries, size], the last of `keys` and `values` [1, kv_heads, length, size]; mask: that of a `tiled` view;
    choose: applies an indexer's selection to a mask; first: the block's first token in the step.
    """
    queries, length = query.shape[2], keys.shape[2]
    answers = []
    for start in range(0, queries, TILE):
        end = min(start + TILE, queries)
        seen = length - queries + end
        hidden = choose(first + start, end - start, mask[:, :, start - end :, length - seen :])
        if hidden is not None and hidden.shape[1] > 1:
            hidden = hidden.repeat_interleave(query.shape[1] // hidden.shape[1], 1)
        answers.append(attended(query[:, :, start:end], keys[:, :, :seen], values[:, :, :seen], hidden))
    return torch.cat(answers, 2)
