"""The one primitive: ragged rows over paged keys and values, by whichever attention the process uses.

Torch's (`attention.py`, `shared_prefixes.py`) defines what is meant and serves CPUs; Triton's (`paged_attention.py`) serves
accelerators.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from . import shared_prefixes, steady
from .attention import Full, How, Row
from .choose import triton_on
from .layout import Kind, Layout
from .work import ITEMS_PER_PROCESSOR, tile_of

__all__ = ["Full", "How", "Plan", "Row", "attention", "capacity", "narrows", "plan"]

if TYPE_CHECKING:
    from . import paged_attention as paged


FIXED = 512  # keys of an item on Triton's route, where what else is running may not decide how many it has

Plan: TypeAlias = "shared_prefixes.Plan | steady.Plan | paged.Plan"


def by_triton(layout: Layout) -> bool:
    """Whose attention it is. A plan for Triton's is complete when the device has what it wants to know of it."""
    return triton_on(layout.device)


def plan(rows: Sequence[Row], layout: Layout, capacity: "paged.Capacity | None" = None) -> tuple[Sequence[int], Plan]:
    """The order in which rows have to stand in a step, and their attention then. capacity: what a graph has room for. Raises Full
    if that is too little."""
    if not by_triton(layout):
        return steady.plan(rows, layout) if layout.steady else shared_prefixes.plan(rows, layout)
    from . import paged_attention as paged

    narrow = layout.most > 0 and any(row.context + row.queries > layout.most for row in rows)
    if narrow and capacity is not None:  # said before anything is planned: such a step is planned without a graph next
        raise Full(f"graphs are for steps whose tokens see no more than the {layout.most} that they may attend to")
    attended = paged.plan(
        rows,
        layout.page_size,
        layout.kinds,
        layout.device,
        dtype=layout.dtype,
        fixed=FIXED if layout.steady else 0,
        capacity=capacity,
    )
    if narrow:
        from . import indexed_attention

        attended = indexed_attention.plan(attended, rows, layout)
    return range(len(rows)), attended


def capacity(layout: Layout, tokens: int, rows: int, total: int, pages: int, mixed: bool, trees: bool = False) -> "paged.Capacity":
    """Room for the steps that usually come: so many tokens and rows, in sequences of up to `total` tokens in a pool of `pages`.

    mixed: rows may have any number of queries, else each has one; trees: which may be trees.
    """
    from . import paged_attention as paged

    count = rows if mixed else tokens
    rooms = {kind.window: _room(layout, kind, tokens, count, total, pages, mixed) for kind in layout.kinds}
    return paged.Capacity(
        tokens=tokens,
        listed=3 * tokens,
        pages=min(count * -(-total // layout.page_size), 2 * pages + count),
        items={window: items for window, (items, _) in rooms.items()},
        entries=tokens,
        pieces=max(pieces for _, pieces in rooms.values()),
        trees=trees,
    )


def _room(
    layout: Layout, kind: Kind, tokens: int, count: int, total: int, pages: int, mixed: bool
) -> tuple[tuple[int, int, int], int]:
    """For items of each tile, and partials, in layers of one kind; count: rows."""
    from . import paged_attention as paged

    tiles = paged.tiles_of(kind, layout.dtype, paged.generation_of(layout.device), layout.steady)
    # Rows are cut into so many items more, all together, for each processor to have some; prefixes are shared by two rows or more.
    cuts = -(-paged.processors_of(layout.device) * ITEMS_PER_PROCESSOR // kind.kv_heads) + 1
    shared = -(-tokens * kind.ratio // tiles[-1].rows) + count // 8
    if layout.steady:
        cuts, shared = min(count * -(-total // FIXED), pages * layout.page_size // FIXED + count), 0
    many = -(-tokens * kind.ratio // tiles[-1].rows) + count if mixed else 0
    items = count + cuts + shared, (count if mixed else 0) + cuts + shared, many + cuts + shared
    # A tile that no segment of so few queries takes would be launched in vain, in every layer of every step.
    most = tokens if mixed or not layout.steady else 1  # queries of a row, or of all that share a prefix
    taken = {tile_of(tiles, queries * kind.ratio) for queries in range(1, most + 1)}
    first, second, third = (room if tile in taken else 0 for tile, room in enumerate(items))
    return (first, second, third), 3 * tokens + cuts * max(tile.rows for tile in tiles) // kind.ratio


def narrows(plan: Plan, most: int) -> bool:
    """Some token sees more than the `most` that it may attend to."""
    if isinstance(plan, shared_prefixes.Plan):
        return any(block.views[0].length > most for block in plan.blocks)
    from . import indexed_attention

    return isinstance(plan, indexed_attention.Plan)


def attention(query: Tensor, cache: Tensor, plan: Plan, how: How) -> Tensor:
    """Softmax attention of every row of `plan`: [tokens, heads, size]; of latents [tokens, heads, latent].

    query: [tokens, heads, size]; cache: a layer [slots, 2, kv_heads, size], keys first, in the query's dtype or float8_e4m3fn; of
    latents [slots, 1, 1, size]. Tokens choose what they attend to where a plan `narrows` that.
    """
    if isinstance(plan, shared_prefixes.Plan):
        found = shared_prefixes.attention(query, cache, plan, how)
        return found[..., : how.latent] if how.latent else found
    if isinstance(plan, steady.Plan):
        found = steady.attention(query, cache, plan, how)
        return found[..., : how.latent] if how.latent else found
    from . import indexed_attention
    from . import paged_attention as paged

    if isinstance(plan, indexed_attention.Plan) and how.asked is not None:
        return indexed_attention.attention(query, cache, plan, how)
    return paged.attention(query, cache, plan, how)
