"""The attention kernel of `hopper_attention`, in Gluon: warp-specialized flash attention over a page table. Takes pointers and
ints, no plan.

A program's warps do different work, as in FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608). One of them, the producer,
requests keys and values, which TMA (the unit that copies boxes of tensors) puts into shared memory. Two consumers of four warps
have half of an item's rows each. They multiply in turn (ping-pong scheduling), and while one computes exponentials the other has
the tensor cores; each also multiplies the exponentials of a tile of keys with its values behind the logits of the next one. Tiles
are walked from the last one, which alone may be partial, to the first.

A program has several items and key heads. All three walk through the same ones, and number their tiles from the first item to the
last: tile `count` lies in stage count % STAGES of a ring. What they wait for are phases of barriers (PTX ISA, "mbarrier"), of which
there is a next one each time that a barrier has had its arrivals. Who waits for parity p waits while phases of that parity last;
that of the phase before the first one is over from the beginning.

- `full` of a stage: its bytes are there. The producer arrives once with their number, and TMA with the bytes. Consumers wait for
  phase count // STAGES.
- `empty` of a stage: both consumers have arrived, having multiplied with what is there. The producer waits for the phase before.
- `turns[which]`: the other consumer has begun to multiply. Consumer 0 waits for its phase `count` until the other one is behind
  tile count - 1 (the first time nobody is waited for), consumer 1 until the other one is behind tile `count`.

An item without queries has no tiles, so nobody waits for anything, and nothing is counted. All behind it are such items.

On a CPU it is run by `tests/kernels/gluon.py`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

# Names in Triton 3.6, and in later versions: a barrier among warps that do the same work, and a TMA load of a box.
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


class Shape(NamedTuple):
    """What is constant when the kernel is compiled."""

    kv_heads: int
    ratio: int  # query heads of a key head
    size: int  # features of a key, and of a value
    apart: int  # elements between a slot's keys and its values
    page: int  # tokens per page
    rows: int  # rows of a consumer
    keys: int  # keys of a tile
    stages: int  # stages of a ring
    trees: bool  # items may be of draft trees


class Step(NamedTuple):
    """The work of a launch: pointers to a plan's tensors, and how items are distributed over programs."""

    items: gl.tensor
    listed: gl.tensor
    positions: gl.tensor
    masks: gl.tensor
    pages: gl.tensor
    places: gl.tensor  # number of items times key heads
    rounds: gl.tensor  # most of these per program


class Ring(NamedTuple):
    """A ring buffer of key or value tiles in shared memory, with its barriers."""

    tiles: gl.shared_memory_descriptor  # [STAGES, KEYS, SIZE]
    full: gl.shared_memory_descriptor  # barriers: [STAGES, 1], the stage holds data
    empty: gl.shared_memory_descriptor  # barriers: [STAGES, 1], the stage may be overwritten


class Tensors(NamedTuple):
    """What consumers read and write, besides the cache: fields as in `paged_kernels.attend`."""

    output: gl.tensor
    partials: gl.tensor
    weights: gl.tensor
    query: gl.tensor
    stride: gl.tensor  # elements between query tokens
    unit: gl.tensor  # factor of logits, in units of log 2


class Item(NamedTuple):
    """An item as in `work_list`, with a key head."""

    head: gl.tensor
    start: gl.tensor
    queries: gl.tensor
    pages: gl.tensor  # pointer to its page table
    first: gl.tensor
    end: gl.tensor
    context: gl.tensor
    tree: gl.tensor
    partial: gl.tensor
    tiles: gl.tensor  # number of tiles of keys; 0: nothing to do


class Rows(NamedTuple):
    """The query rows of a consumer, in the layout of its matrix products."""

    row: gl.tensor
    asked: gl.tensor  # which of the item's queries
    token: gl.tensor
    valid: gl.tensor
    limit: gl.tensor  # the last key that the row may see


@gluon.jit
def _place(turn: gl.tensor) -> gl.tensor:
    """Index of this program's next item and head. Items are sorted by length, so every other round is taken in reverse order: then
    all programs have about as much to do."""
    own = gl.program_id(0)
    own = gl.where(turn % 2 == 1, gl.num_programs(0) - 1 - own, own)
    return turn * gl.num_programs(0) + own


@gluon.jit
def _item(step: Step, place: gl.tensor, SHAPE: gl.constexpr) -> Item:
    item = step.items + (place // SHAPE.kv_heads) * 8
    start, queries = gl.load(item), gl.load(item + 1)
    first, end = gl.load(item + 3), gl.load(item + 4)
    tiles = gl.where(queries > 0, (end - first + SHAPE.keys - 1) // SHAPE.keys, 0)
    pages = step.pages + gl.load(item + 2)
    context, tree, partial = gl.load(item + 5), gl.load(item + 6), gl.load(item + 7)
    return Item(place % SHAPE.kv_heads, start, queries, pages, first, end, context, tree, partial, tiles)


@gluon.jit
def _next(turn: gl.tensor, item: Item, step: Step) -> gl.tensor:
    """The next round, or the end after an empty item: items are sorted by length, so all that follow are padding of a graph,
    too."""
    return gl.where(item.tiles == 0, step.rounds, turn)


# The producer


@gluon.jit
def _copy(
    ring: Ring,
    stage: gl.tensor,
    descriptor: tma.tensor_descriptor,
    pages: gl.tensor,
    begin: gl.tensor,
    end: gl.tensor,
    column: gl.tensor,
    SHAPE: gl.constexpr,
) -> None:
    """Loads a tile into a stage of the ring, page by page; beyond the last page that one again."""
    full = ring.full.index(stage)
    mbarrier.expect(full, SHAPE.keys * SHAPE.size * 2)
    for i in gl.static_range(SHAPE.keys // SHAPE.page):
        page = gl.load(pages + gl.minimum(begin // SHAPE.page + i, (end - 1) // SHAPE.page))
        target = ring.tiles.index(stage).slice(i * SHAPE.page, SHAPE.page, 0)
        load_box(descriptor, [page * SHAPE.page, column], full, target)


@gluon.jit
def _produce(keys: Ring, values: Ring, descriptor: tma.tensor_descriptor, step: Step, SHAPE: gl.constexpr) -> None:
    base, turn = 0, 0
    while turn < step.rounds:
        place = _place(turn)
        turn += 1
        if place < step.places:
            item = _item(step, place, SHAPE)
            turn = _next(turn, item, step)
            column = item.head * SHAPE.size
            for i in range(item.tiles):
                count = base + i
                begin = item.first + (item.tiles - 1 - i) * SHAPE.keys
                stage = count % SHAPE.stages
                phase = ((count // SHAPE.stages) & 1) ^ 1
                mbarrier.wait(keys.empty.index(stage), phase)
                _copy(keys, stage, descriptor, item.pages, begin, item.end, column, SHAPE)
                mbarrier.wait(values.empty.index(stage), phase)
                _copy(values, stage, descriptor, item.pages, begin, item.end, column + SHAPE.apart, SHAPE)
            base += item.tiles


# A consumer


@gluon.jit
def _load(
    memory: gl.shared_memory_descriptor, tensors: Tensors, item: Item, step: Step, WHICH: gl.constexpr, SHAPE: gl.constexpr
) -> None:
    """Loads a consumer's queries into shared memory, [rows, size]; rows without a query are zeros."""
    IN: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = WHICH * SHAPE.rows + gl.arange(0, SHAPE.rows, gl.SliceLayout(1, IN))
    asked = row // SHAPE.ratio
    valid = asked < item.queries
    token = gl.load(step.listed + item.start + asked, mask=valid, other=0)
    head = item.head * SHAPE.ratio + row % SHAPE.ratio
    feature = gl.arange(0, SHAPE.size, gl.SliceLayout(0, IN))
    source = tensors.query + gl.expand_dims(token.to(gl.int64) * tensors.stride + head * SHAPE.size, 1) + gl.expand_dims(feature, 0)
    memory.store(gl.load(source, mask=gl.expand_dims(valid, 1), other=0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def _clear(values: Ring, stage: gl.tensor, real: gl.tensor, SHAPE: gl.constexpr) -> None:
    """Zeroes values of the partial last tile behind its `real` ones, since they may be NaN and 0 times that is NaN. Both consumers
    do this, in the same way."""
    IN: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    held = gl.arange(0, SHAPE.keys, gl.SliceLayout(1, IN)) < real
    found = values.tiles.index(stage).load(IN)
    values.tiles.index(stage).store(gl.where(gl.expand_dims(held, 1), found, gl.zeros_like(found)))
    fence_async_shared()
    barrier()


@gluon.jit
def _rows(item: Item, step: Step, WHICH: gl.constexpr, SHAPE: gl.constexpr, MMA: gl.constexpr) -> Rows:
    row = WHICH * SHAPE.rows + gl.arange(0, SHAPE.rows, gl.SliceLayout(1, MMA))
    asked = row // SHAPE.ratio
    valid = asked < item.queries
    token = gl.load(step.listed + item.start + asked, mask=valid, other=0)
    position = gl.load(step.positions + token, mask=valid, other=-1)
    return Rows(row, asked, token, valid, gl.where(item.tree == -1, position, item.end - 1))


@gluon.jit
def _plain_tiles(item: Item, step: Step, SHAPE: gl.constexpr) -> gl.tensor:
    """Number of tiles, from the first on, that need no mask."""
    nearest = gl.load(step.positions + gl.load(step.listed + item.start))  # positions of a row ascend
    plain = gl.where(item.tree == -2, item.end, gl.minimum(item.end, nearest + 1))
    plain = gl.where(item.tree >= 0, gl.minimum(item.end, item.context), plain)
    return gl.maximum(plain - item.first, 0) // SHAPE.keys


@gluon.jit
def _held(own: gl.tensor) -> gl.tensor:
    """The identity, on sums of exponentials, which have to be computed before the program goes on.

    Else ptxas moves exponentials behind the wait for the product that they are meant to overlap with. It moves none behind a store
    to memory that others see, and this one is never done: no sum is below -1, which ptxas can't know. `@p trap` in its place is a
    branch: ptxas then waits for each product before it begins the next one (that of Triton 3.6, 2026-11-26: 16 waits in a loop
    where there were 2, and 848 bytes spilled).
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $1, 0fBF800000; "
        "@p st.volatile.shared.b32 [a], $1; mov.b32 $0, $1; }",
        "=r,r",
        [own],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _word(which: gl.tensor, rows: Rows, masks: gl.tensor) -> gl.tensor:
    """32 bits of each row's ancestor mask: [rows]. Keys before the first word are seen by all, those behind the last word by
    none."""
    inside = (which >= 0) & (which < 4)
    found = gl.load(masks + rows.token * 4 + which, mask=rows.valid & inside, other=0)
    return gl.where(which < 0, -1, found)


@gluon.jit
def _seen(begin: gl.tensor, rows: Rows, item: Item, masks: gl.tensor) -> gl.tensor:
    """Which of the 32 keys from `begin` on each row sees, with tree nodes by their masks: [rows, 1], a bit for each key."""
    count = gl.minimum(gl.maximum(gl.minimum(rows.limit + 1, item.end) - begin, 0), 32)
    node = begin - item.context
    low = _word(node >> 5, rows, masks).to(gl.int64) & 0xFFFFFFFF
    high = _word((node >> 5) + 1, rows, masks).to(gl.int64) << 32
    nodes = gl.where(item.tree < 0, -1, (high | low) >> (node & 31))
    return gl.expand_dims((nodes & (0xFFFFFFFF >> (32 - count).to(gl.int64))).to(gl.int32), 1)


@gluon.jit
def _visible(begin: gl.tensor, rows: Rows, item: Item, masks: gl.tensor, SHAPE: gl.constexpr, MMA: gl.constexpr) -> gl.tensor:
    """As `paged_kernels.visible_keys`: the mask of a tile, [rows, keys]."""
    column = gl.expand_dims(gl.arange(0, SHAPE.keys, gl.SliceLayout(0, MMA)), 0)
    if SHAPE.trees:
        gl.static_assert(SHAPE.keys == 128)
        low = gl.where(column < 32, _seen(begin, rows, item, masks), _seen(begin + 32, rows, item, masks))
        high = gl.where(column < 96, _seen(begin + 64, rows, item, masks), _seen(begin + 96, rows, item, masks))
        visible = ((gl.where(column < 64, low, high) >> (column & 31)) & 1) == 1
    else:
        visible = begin + column <= gl.expand_dims(gl.minimum(rows.limit, item.end - 1), 1)
    return visible


@gluon.jit
def _weigh(
    logits: gl.tensor,
    best: gl.tensor,
    total: gl.tensor,
    rows: Rows,
    item: Item,
    masks: gl.tensor,
    begin: gl.tensor,
    unit: gl.tensor,
    MASKED: gl.constexpr,
    SHAPE: gl.constexpr,
    MMA: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Online softmax step: exponentials of a tile's logits, the factor by which the accumulator has to be rescaled, and the new
    maximum and sum. unit: factor of logits, in units of log 2."""
    if MASKED:
        logits = gl.where(_visible(begin, rows, item, masks, SHAPE, MMA), logits, float("-inf"))
    higher = gl.maximum(best, gl.max(logits, 1) * unit)
    base = higher
    if MASKED:  # for a row that has seen nothing yet
        base = gl.where(higher == float("-inf"), 0.0, higher)
    part = gl.exp2(logits * unit - gl.expand_dims(base, 1))
    fade = gl.exp2(best - base)
    own = gl.sum(part, 1)
    if not MASKED:
        own = _held(own)
    total = total * fade + own
    return part, fade, higher, total


@gluon.jit
def _consume_tile(
    sums: gl.tensor,
    part: gl.tensor,
    best: gl.tensor,
    total: gl.tensor,
    rows: Rows,
    item: Item,
    masks: gl.tensor,
    begin: gl.tensor,
    count: gl.tensor,
    unit: gl.tensor,
    memory: gl.shared_memory_descriptor,
    keys: Ring,
    values: Ring,
    turns: gl.shared_memory_descriptor,
    WHICH: gl.constexpr,
    SHAPE: gl.constexpr,
    MMA: gl.constexpr,
    MASKED: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Computes the logits of tile `count` while multiplying `part`, the exponentials of the tile before, with its values."""
    stage = count % SHAPE.stages
    phase = (count // SHAPE.stages) & 1
    before = (count - 1) % SHAPE.stages
    before_phase = ((count - 1) // SHAPE.stages) & 1
    mbarrier.wait(keys.full.index(stage), phase)
    mbarrier.wait(turns.index(WHICH), count & 1)
    zeros = gl.zeros([SHAPE.rows, SHAPE.keys], gl.float32, MMA)
    logits = warpgroup_mma(memory, keys.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(values.full.index(before), before_phase)
    # Converted only here: now that runs beside the product of logits, whose start it would else delay.
    packed = gl.convert_layout(part.to(values.tiles.dtype), gl.DotOperandLayout(0, MMA, 2))
    sums = warpgroup_mma(packed, values.tiles.index(before), sums, is_async=True)
    mbarrier.arrive(turns.index(1 - WHICH))
    logits = warpgroup_mma_wait(1, deps=[logits])
    mbarrier.arrive(keys.empty.index(stage))
    part, fade, best, total = _weigh(logits, best, total, rows, item, masks, begin, unit, MASKED, SHAPE, MMA)
    sums, packed = warpgroup_mma_wait(0, deps=[sums, packed])
    mbarrier.arrive(values.empty.index(before))
    sums = sums * gl.expand_dims(fade, 1)
    return sums, part, best, total


@gluon.jit
def _answer(
    tensors: Tensors,
    sums: gl.tensor,
    best: gl.tensor,
    total: gl.tensor,
    rows: Rows,
    item: Item,
    step: Step,
    SHAPE: gl.constexpr,
    MMA: gl.constexpr,
) -> None:
    answer = sums * gl.expand_dims(1.0 / gl.where(total > 0, total, 1.0), 1)
    feature = gl.expand_dims(gl.arange(0, SHAPE.size, gl.SliceLayout(0, MMA)), 0)
    held = gl.expand_dims(rows.valid, 1)
    heads = SHAPE.kv_heads * SHAPE.ratio
    head = item.head * SHAPE.ratio + rows.row % SHAPE.ratio
    if item.partial < 0:
        token = gl.load(step.listed + item.start + rows.asked, mask=rows.valid, other=0)
        target = (token.to(gl.int64) * heads + head) * SHAPE.size
        gl.store(tensors.output + gl.expand_dims(target, 1) + feature, answer.to(tensors.output.dtype.element_ty), mask=held)
    else:
        at = (item.partial + rows.asked).to(gl.int64) * heads + head
        gl.store(tensors.partials + gl.expand_dims(at * SHAPE.size, 1) + feature, answer, mask=held)
        gl.store(tensors.weights + at, best + gl.log2(gl.where(total > 0, total, 1.0)), mask=rows.valid)


@gluon.jit
def _consume_item(
    item: Item,
    tensors: Tensors,
    memory: gl.shared_memory_descriptor,
    keys: Ring,
    values: Ring,
    turns: gl.shared_memory_descriptor,
    step: Step,
    base: gl.tensor,
    WHICH: gl.constexpr,
    SHAPE: gl.constexpr,
) -> None:
    """Attention of one item by one consumer. base: number of tiles of all items before."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.keys, 16])
    gl.static_assert(SHAPE.keys == SHAPE.size)  # else the accumulator would need a layout of its own
    _load(memory, tensors, item, step, WHICH, SHAPE)
    rows = _rows(item, step, WHICH, SHAPE, MMA)
    masked = gl.maximum(item.tiles - _plain_tiles(item, step, SHAPE), 1)
    best = gl.full([SHAPE.rows], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    total = gl.full([SHAPE.rows], 0.0, gl.float32, gl.SliceLayout(1, MMA))
    sums = gl.zeros([SHAPE.rows, SHAPE.size], gl.float32, MMA)
    zeros = gl.zeros([SHAPE.rows, SHAPE.keys], gl.float32, MMA)

    begin = item.first + (item.tiles - 1) * SHAPE.keys
    stage = base % SHAPE.stages
    phase = (base // SHAPE.stages) & 1
    mbarrier.wait(keys.full.index(stage), phase)
    if item.end - begin < SHAPE.keys:
        mbarrier.wait(values.full.index(stage), phase)
        _clear(values, stage, item.end - begin, SHAPE)
    mbarrier.wait(turns.index(WHICH), base & 1)
    logits = warpgroup_mma(memory, keys.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - WHICH))
    logits = warpgroup_mma_wait(0, deps=[logits])
    mbarrier.arrive(keys.empty.index(stage))
    part, _, best, total = _weigh(logits, best, total, rows, item, step.masks, begin, tensors.unit, True, SHAPE, MMA)

    for i in range(1, masked):
        begin = item.first + (item.tiles - 1 - i) * SHAPE.keys
        sums, part, best, total = _consume_tile(
            sums, part, best, total, rows, item, step.masks, begin, base + i, tensors.unit, memory, keys, values, turns,
            WHICH, SHAPE, MMA, True,
        )  # fmt: skip
    for i in range(masked, item.tiles):
        sums, part, best, total = _consume_tile(
            sums, part, best, total, rows, item, step.masks, item.first, base + i, tensors.unit, memory, keys, values, turns,
            WHICH, SHAPE, MMA, False,
        )  # fmt: skip

    last = base + item.tiles - 1
    stage = last % SHAPE.stages
    mbarrier.wait(values.full.index(stage), (last // SHAPE.stages) & 1)
    packed = gl.convert_layout(part.to(values.tiles.dtype), gl.DotOperandLayout(0, MMA, 2))
    sums = warpgroup_mma(packed, values.tiles.index(stage), sums, is_async=True)
    sums, packed = warpgroup_mma_wait(0, deps=[sums, packed])
    mbarrier.arrive(values.empty.index(stage))
    _answer(tensors, sums, best, total, rows, item, step, SHAPE, MMA)


@gluon.jit
def _consume(
    tensors: Tensors,
    asked: gl.shared_memory_descriptor,
    keys: Ring,
    values: Ring,
    turns: gl.shared_memory_descriptor,
    step: Step,
    WHICH: gl.constexpr,
    SHAPE: gl.constexpr,
) -> None:
    base, turn = 0, 0
    while turn < step.rounds:
        place = _place(turn)
        turn += 1
        if place < step.places:
            item = _item(step, place, SHAPE)
            turn = _next(turn, item, step)
            if item.tiles > 0:
                _consume_item(item, tensors, asked.index(WHICH), keys, values, turns, step, base, WHICH, SHAPE)
            base += item.tiles


@gluon.jit
def _ring(dtype: gl.constexpr, SHAPE: gl.constexpr) -> Ring:
    """A new ring with all stages empty: see above on the phase before the first one."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = gl.allocate_shared_memory(dtype, [SHAPE.stages, SHAPE.keys, SHAPE.size], TILE)
    full = gl.allocate_shared_memory(gl.int64, [SHAPE.stages, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [SHAPE.stages, 1], BARRIER)
    for i in gl.static_range(SHAPE.stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return Ring(tiles, full, empty)


@gluon.jit(do_not_specialize=["places", "rounds"])
def attend_many(
    output: gl.tensor,
    partials: gl.tensor,
    weights: gl.tensor,
    query: gl.tensor,
    descriptor: tma.tensor_descriptor,
    items: gl.tensor,
    listed: gl.tensor,
    positions: gl.tensor,
    masks: gl.tensor,
    pages: gl.tensor,
    query_stride: gl.tensor,
    scale: gl.tensor,
    places: gl.tensor,
    rounds: gl.tensor,
    KV_HEADS: gl.constexpr,
    RATIO: gl.constexpr,
    SIZE: gl.constexpr,
    APART: gl.constexpr,
    PAGE: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    TREES: gl.constexpr,
    REGISTERS: gl.constexpr,
    FEW: gl.constexpr,
) -> None:
    """Warp-specialized attention over items and key heads: `places` in all, at most `rounds` per program. descriptor: TMA's, of the
    cache, [slots, features], in boxes of a page and a head. For constants see `Shape`; REGISTERS, FEW: registers of a thread of the
    second consumer, and of the producer."""
    SHAPE: gl.constexpr = Shape(KV_HEADS, RATIO, SIZE, APART, PAGE, ROWS, KEYS, STAGES, TREES)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    asked = gl.allocate_shared_memory(query.dtype.element_ty, [2, ROWS, SIZE], TILE)
    keys = _ring(query.dtype.element_ty, SHAPE)
    values = _ring(query.dtype.element_ty, SHAPE)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    barrier()
    mbarrier.arrive(turns.index(0))
    tensors = Tensors(output, partials, weights, query, query_stride, scale * 1.4426950408889634)
    step = Step(items, listed, positions, masks, pages, places, rounds)
    gl.warp_specialize(
        [
            (_consume, (tensors, asked, keys, values, turns, step, 0, SHAPE)),
            (_consume, (tensors, asked, keys, values, turns, step, 1, SHAPE)),
            (_produce, (keys, values, descriptor, step, SHAPE)),
        ],
        [4, 1],
        [REGISTERS, FEW],
    )
