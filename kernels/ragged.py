"""The attention entry point for all models: ragged rows (prefill chunks, decodes and draft trees mixed) over a paged KV cache, by
whichever implementation the process uses.

The torch implementation (`attention.py`, `shared_prefixes.py`) is the reference and serves CPUs; Triton's (`paged_attention.py`)
serves accelerators.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from . import batch_invariant, compressed, expanded, shared_prefixes
from .attention import AttentionOptions, CapacityExceeded, Row
from .dispatch import triton_on
from .entries import CompletedEntries
from .layout import AttentionLayout, LayerKind
from .work_list import ITEMS_PER_PROCESSOR, Tile, tile_of

__all__ = [
    "AttentionOptions",
    "CapacityExceeded",
    "Plan",
    "Row",
    "attention",
    "attention_to_expanded",
    "attention_with_entries",
    "capacity",
    "completed_entries",
    "needs_selection",
    "plan",
]

if TYPE_CHECKING:
    from . import paged_attention as paged


FIXED = 512  # keys per item on the Triton route in batch-invariant mode, where the split must not depend on the rest of the batch

Unexpanded: TypeAlias = "shared_prefixes.Plan | batch_invariant.Plan | paged.Plan"
Plan: TypeAlias = "Unexpanded | expanded.Plan"


def plan(
    rows: Sequence[Row],
    layout: AttentionLayout,
    capacity: "paged.Capacity | None" = None,
    into: "paged.Plan | None" = None,
    after: torch.cuda.Event | None = None,
) -> tuple[Sequence[int], Plan]:
    """The order in which rows have to stand in a step, and the attention plan of the rows in that order. capacity: sizes fixed at
    CUDA graph capture; into: the graph's plan, of that capacity, which takes the contents of this one, after the event `after` if
    there is one. Raises CapacityExceeded if sizes are too small, or if the step can't be a graph."""
    long = expanded.rows_to_expand(rows, layout) if capacity is None else []
    if not long:
        return _plan(rows, layout, capacity, into, after)
    others = sorted({*range(len(rows))}.difference(long))
    order, attended = _plan([rows[i] for i in others], layout) if others else ((), None)
    first = sum(rows[i].queries for i in others)
    expanding = expanded.plan
    if triton_on(layout.device):
        from .expanded_attention import plan as expanding
    parts = expanding([rows[i] for i in long], layout, first)
    return [*(others[k] for k in order), *long], expanded.Plan(first, attended, parts)


def _plan(
    rows: Sequence[Row],
    layout: AttentionLayout,
    capacity: "paged.Capacity | None" = None,
    into: "paged.Plan | None" = None,
    after: torch.cuda.Event | None = None,
) -> tuple[Sequence[int], "Unexpanded"]:
    if not triton_on(layout.device):
        planned = batch_invariant.plan if layout.invariant else compressed.plan if layout.entries else shared_prefixes.plan
        return planned(rows, layout)
    from . import paged_attention as paged

    if layout.entries and capacity is not None:
        raise CapacityExceeded("how many entries tokens see is different in each step")
    narrow = layout.most > 0 and any(row.context + row.queries > layout.most for row in rows)
    if narrow and capacity is not None:  # checked first, before anything is planned: such a step is then planned without a graph
        raise CapacityExceeded(f"graphs are for steps whose tokens see no more than the {layout.most} that they may attend to")
    attended = paged.plan(
        rows,
        layout.page_size,
        layout.kinds,
        layout.device,
        dtype=layout.dtype,
        fixed=FIXED if layout.invariant else 0,
        capacity=capacity,
        eight_bits=layout.eight_bits,
        into=into,
        after=after,
    )
    if narrow:
        from . import indexed_attention

        attended = indexed_attention.plan(attended, rows, layout)
    if layout.entries:
        from . import compressed_attention

        attended = compressed_attention.plan(attended, rows, layout)
    return range(len(rows)), attended


def capacity(
    layout: AttentionLayout, tokens: int, rows: int, total: int, pages: int, mixed: bool, trees: bool = False, lean: bool = False
) -> "paged.Capacity":
    """Plan sizes for a CUDA graph: enough for usual steps of so many tokens and rows, in sequences of up to `total` tokens and a
    pool of `pages`.

    mixed: rows may have any number of queries, else each has one (decode only); trees: some rows may be draft trees; lean: no row
    is cut, and none shares a prefix.
    """
    from . import paged_attention as paged

    count = rows if mixed else tokens
    if lean:
        rooms = {kind.window: _lean_room(layout, kind, tokens) for kind in layout.kinds}
    else:
        rooms = {kind.window: _room(layout, kind, tokens, count, total, pages, mixed) for kind in layout.kinds}
    return paged.Capacity(
        tokens=tokens,
        listed=tokens if lean else 3 * tokens,
        pages=min(count * -(-total // layout.page_size), 2 * pages + count),
        tiles={window: tiles for window, (tiles, _, _) in rooms.items()},
        items={window: items for window, (_, items, _) in rooms.items()},
        entries=0 if lean else tokens,
        pieces=max(pieces for _, _, pieces in rooms.values()),
        trees=trees,
    )


def _room(
    layout: AttentionLayout, kind: LayerKind, tokens: int, count: int, total: int, pages: int, mixed: bool
) -> tuple[tuple[Tile, ...], tuple[int, ...], int]:
    """For layers of one kind: the tiles, the number of items of each, and the number of partials to make room for. count: rows."""
    from . import paged_attention as paged

    generation, processors = paged.device_class(layout.device), paged.processors_of(layout.device)
    # For all processors to have work, rows are cut into at most this many additional items in all (`work_list.longest`); a shared
    # prefix has two rows or more.
    cuts = -(-processors * ITEMS_PER_PROCESSOR // kind.kv_heads) + 1
    if layout.invariant:
        tiles = paged.tiles_of(kind, layout.dtype, generation, invariant=True)
        cuts = min(count * -(-total // FIXED), pages * layout.page_size // FIXED + count)
        parts = -(-tokens * kind.ratio // tiles[0].rows) if mixed else 0
        return tiles, (parts + count + cuts,), 3 * tokens + cuts * tiles[0].rows // kind.ratio
    # A tile that no segment of so few queries takes would still cost an empty launch in every layer of every step.
    if mixed:
        tiles = paged.tiles_of(kind, layout.dtype, generation)
        tiles = tiles[: tile_of(tiles, tokens * kind.ratio) + 1]
    else:
        tiles = paged.decode_tiles(kind, layout.dtype, generation, tokens, layout.eight_bits)
    largest = max(tile.rows for tile in tiles)
    parts = -(-tokens * kind.ratio // largest)
    runs = [count // 2, *[count // 8] * (len(tiles) - 1)]  # runs of two rows are in the smallest tile
    items = [cuts + parts + shared + (count if mixed or place == 0 else 0) for place, shared in enumerate(runs)]
    if mixed:
        items[-1] += parts
    return tiles, tuple(items), 3 * tokens + cuts * largest // kind.ratio


def _lean_room(layout: AttentionLayout, kind: LayerKind, tokens: int) -> tuple[tuple[Tile, ...], tuple[int, ...], int]:
    """As `_room`, where each row is one item."""
    from . import paged_attention as paged

    generation, processors = paged.device_class(layout.device), paged.processors_of(layout.device)
    tile = paged.lean_tile(kind, layout.dtype, generation, tokens, processors, layout.eight_bits)
    return (tile,), (tokens,), 0


def needs_selection(plan: Plan, most: int) -> bool:
    """Whether some token of the step sees more than the `most` tokens that it may attend to, so that the indexer has to choose."""
    if isinstance(plan, shared_prefixes.Plan):
        return any(block.views[0].length > most for block in plan.blocks)
    from . import indexed_attention

    return isinstance(plan, indexed_attention.Plan)


def attention(query: Tensor, cache: Tensor, plan: Plan, how: AttentionOptions) -> Tensor:
    """Softmax attention of every row of `plan`: [tokens, heads, size]; for MLA [tokens, heads, latent].

    query: [tokens, heads, size]; cache: a layer [slots, 2, kv_heads, size], keys first, in the query's dtype or float8_e4m3fn; for
    MLA [slots, 1, 1, size]. Where the plan `needs_selection` it, each token attends only to those that the indexer chooses (sparse
    attention). With a plan that expands MLA latents, each of its parts has a call of its own: see `attention_to_expanded`.
    """
    assert not isinstance(plan, expanded.Plan)
    if isinstance(plan, shared_prefixes.Plan):
        found = shared_prefixes.attention(query, cache, plan, how)
        return found[..., : how.latent] if how.latent else found
    if isinstance(plan, batch_invariant.Plan):
        found = batch_invariant.attention(query, cache, plan, how)
        return found[..., : how.latent] if how.latent else found
    from . import indexed_attention
    from . import paged_attention as paged

    if isinstance(plan, indexed_attention.Plan) and how.asked is not None:
        return indexed_attention.attention(query, cache, plan, how)
    return paged.attention(query, cache, plan, how)


def attention_to_expanded(
    query: Tensor, cache: Tensor, plan: "expanded.Plan", how: AttentionOptions, to_keys: Tensor, to_values: Tensor
) -> Tensor:
    """Attention of the rows in MLA's expanded form: see `expanded.attention`."""
    attend = expanded.attend
    if plan.parts[0].plan is not None:
        from .expanded_attention import attend
    return expanded.attention(query, cache, plan, how, to_keys, to_values, attend)


def completed_entries(plan: Plan, rate: int, before: bool) -> CompletedEntries:
    """The compressed KV entries (DeepSeek V4) that a step's tokens complete. rate: tokens per entry; before: an entry is also made
    of the `rate` tokens before its own."""
    if not isinstance(plan, compressed.Plan):
        from . import compressed_attention

        assert isinstance(plan, compressed_attention.Plan)
    return plan.places.ends(plan.pages, rate, before)


def attention_with_entries(
    query: Tensor, cache: Tensor, plan: Plan, how: AttentionOptions, rate: int, asked: "compressed.EntrySelection | None"
) -> Tensor:
    """As `attention`, for DeepSeek V4: over a sliding window of keys and over compressed entries of `rate` tokens each. See
    `compressed`."""
    if isinstance(plan, compressed.Plan):
        return compressed.attention(query, cache, plan, how, rate, asked)
    from . import compressed_attention

    assert isinstance(plan, compressed_attention.Plan)
    return compressed_attention.attention(query, cache, plan, how, rate, asked)
