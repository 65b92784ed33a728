"""Ragged attention over a paged KV cache, in Triton: the accelerator's counterpart of `attention`.

`plan` derives all tensors of a step once, for all layers, from rows of ints (`work_list` says how they are cut into items). They
lie in one buffer, so that a step costs one copy to the device: into new memory, or into that which a captured CUDA graph reads.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
import triton
from torch import Tensor
from triton import knobs

from . import hopper_attention
from . import work_list as cutting
from .attention import Array, AttentionOptions, CapacityExceeded, Row
from .compilation import EARLY_TARGETS, GENERATIONS, Compilation
from .dependent_launch import begin_early
from .layout import LayerKind
from .paged_kernels import attend, merge
from .transfer import copy_into
from .work_list import Item, Tile, Work

# In Triton's interpreter a dot of bfloat16 gives wrong results, so operands are widened to float32 there.
INTERPRET = bool(knobs.runtime.interpret)
FIELDS = len(Item._fields)
# Partials that one program of `merge` loads at once, where they may be added up in any order. Measured on an H200, 2026-11-26, with
# 8, 16, 32: one row of 4,096 keys 17.4, 15.6, 14.6 us, 16 nodes on as many 21.0, 18.9, 18.2.
PIECES = 32
# Tile and shortest item of decode steps of so few rows that the smallest tile holds them, on Hopper, beside the tile's rows:
# programs are too few to hide each other's latency, so more keys are in flight in each, and it takes fewer of them. Measured on an
# H200, 2026-11-27, us with it and with (16, 128, 4, 4), items of 128 keys and more: rows x keys of 1 x 1,024 6.1, 7.8; 1 x 2,048
# 7.6, 9.3; 2 x 2,048 10.0, 12.3; 4 x 512 7.6, 9.4; 4 x 1,024 9.8, 12.9; 4 x 4,096 23.7, 24.7.
FEW_ROWS = {"keys": 64, "warps": 4, "stages": 7, "shortest": 64}
# Programs per processor (SM) from which the partly filled last wave no longer matters: four times as many as run at once.
WAVES = 12
# Rows that share a prefix: a tile should hold at least so many.
SHARING = 4
# 32-bit words of a tree node's ancestor mask.
WORDS = cutting.NODES // 32
# Sections of the buffer begin at multiples of this many ints: Triton compiles anew for pointers aligned to less than 16 bytes.
ALIGNED = 4


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of a plan's tensors, fixed when a CUDA graph is captured. Plans of equal capacity may take each other's place in the
    graph.

    Grids have one program per item (or merge entry) that there is room for, times the heads; programs without one exit at once.
    """

    tokens: int  # query tokens
    listed: int  # entries of `Plan.listed`: tokens, plus those of shared prefixes once more
    pages: int  # entries of all rows' page tables
    tiles: dict[int, tuple[Tile, ...]]  # per window: the tiles that items are cut for ...
    items: dict[int, tuple[int, ...]]  # ... and how many items of each
    entries: int  # tokens with partials, which `merge` has to combine
    pieces: int  # partials
    trees: bool  # whether rows may be draft trees


@dataclass(frozen=True, slots=True)
class Launch:
    """A plan's launches for one kind of layers: items for `attend`, and entries for `merge`."""

    kind: LayerKind
    tiles: tuple[Tile, ...]
    trees: tuple[bool, ...]  # per tile: whether its items may be of draft trees
    items: tuple[Tensor, ...]  # per tile [items, FIELDS] int32: fields of `Item`; queries = 0: nothing to do
    entries: Tensor  # [entries, 4] int32: token, its first piece, number of its pieces, unused; 0 pieces: nothing to do
    pieces: Tensor  # [pieces] int32: indices of partials


@dataclass(frozen=True, slots=True)
class Plan:
    """The attention plan of a step, for all layers."""

    buffer: Tensor  # int32, holds all tensors below
    # [tokens, WORDS] int32: bit i of word j says that a tree's node sees node 32 j + i; [0, WORDS] without trees
    masks: Tensor
    positions: Tensor  # [tokens] int32
    listed: Tensor  # [listed] int32: query tokens in the order in which items refer to them
    pages: Tensor  # [pages] int32: the rows' page tables, concatenated
    launches: dict[int, Launch]  # per window
    page_size: int
    pieces: int  # partials that one program of `merge` loads at once
    settled: bool  # no kernel of the step writes the page tables

    def chosen(self, pages: Tensor) -> "Plan":
        """The same plan over other page tables (int32): those that an indexer has chosen."""
        return replace(self, pages=pages, settled=False)


def tiles_of(kind: LayerKind, dtype: torch.dtype, generation: int = 9, invariant: bool = False) -> tuple[Tile, ...]:
    """Tiles for one query, for a few (a chain or tree of drafts to be verified), for many. generation: from `device_class`;
    invariant: the tile for a few alone, so that a token's output doesn't depend on how many are computed with it.

    Chosen so that nothing spills, and that two tiles of keys are in flight while a third is computed on. Since the page number is
    loaded before the keys, that takes five stages of Triton's pipeline. Before Hopper the operands of a product lie in registers,
    so tiles are smaller. AMD's processors have 64 KiB of shared memory, and many waves to hide latency. Measured on Hopper alone.
    """
    if invariant:
        return (tiles_of(kind, dtype, generation)[1],)
    size, least = kind.size, max(16, triton.next_power_of_2(kind.ratio))
    few, many = max(64, least), max(128 if size <= 128 else 64, least)
    if size > 256:
        return (_tiles_of_latents if kind.latent else _tiles_of_large_heads)(least, dtype, generation)
    if dtype == torch.float32:
        # float32 products are computed in registers. 16 keys are the minimum of a dot; few enough never to spill but in one place.
        keys = 32 if generation == 8 and size <= 64 else 16
        height = 32 if generation == 8 and size > 128 else 64
        return Tile(least, 16, 8, 2), Tile(max(32, least), 16, 8, 2), Tile(max(height, least), keys, 8, 2)
    if kind.turned:
        return (_tile_of_expanded(generation),) * 3
    if generation == 0:
        return Tile(least, 32, 4, 2), Tile(few, 32, 4, 2), Tile(many, 32, 8 if size <= 128 else 4, 2)
    if generation == 8:
        one = Tile(least, 64 if size <= 128 else 32, 4, 5)
        return one, Tile(few, 32, 4 if size <= 128 else 8, 4), Tile(many, 64, 8, 5) if size <= 64 else Tile(many, 32, 8, 4)
    if size > 128:
        return Tile(least, 32, 4, 5), Tile(few, 32, 8, 4), Tile(many, 64, 8, 3)
    # One query of 128 features: (16, 64) takes 260 us where (16, 128) takes 252, and 11.2 for 10.9 (H200, 2026-11-26). Many rows:
    # with 128 keys at once the accumulator is rescaled half as often, in 590 instructions instead of 2 x 378. At 64 features two
    # programs of 64 keys fit side by side, and while one computes exponentials the other multiplies.
    return Tile(least, 128, 4, 4), Tile(few, 64, 4, 5), Tile(many, 64, 8, 5) if size <= 64 else Tile(many, 128, 8, 4)


def decode_tiles(kind: LayerKind, dtype: torch.dtype, generation: int, tokens: int, eight_bits: bool = False) -> tuple[Tile, ...]:
    """Tiles of decode-only steps, in which every row has one query. Rows that share a prefix are packed into one tile: the more it
    holds, the fewer times the prefix is read.

    On Hopper one tile does for both, since a launch of a tile without items takes 6 to 7 us: the smallest for as few tokens as it
    holds, with FEW_ROWS, else that of 64 rows, whose products the tensor cores read from shared memory. Measured on an H200,
    2026-11-26, us with (16, 128) and (64, 64): 256 rows of 1,024 keys 252 and 267, but with a second launch for shared prefixes
    beside the former a step of an 8 B model took 16.2 ms instead of 15.5 (2026-11-27); 64 of 4,096 288 and 251 (8-bit cache, 64
    keys at once, 279 and 323).
    """
    tiles = tiles_of(kind, dtype, generation)
    last = cutting.tile_of(tiles, tokens * kind.ratio)
    if generation != 9 or kind.size > 128 or dtype == torch.float32:
        return tiles[: last + 1]
    if not last and not eight_bits:
        return (replace(tiles[0], **FEW_ROWS),)
    shared = min(last, max(1, cutting.tile_of(tiles, SHARING * kind.ratio)))
    return tiles[: shared + 1] if eight_bits or shared > 1 else (tiles[shared],)


def lean_tile(kind: LayerKind, dtype: torch.dtype, generation: int, tokens: int, processors: int, eight_bits: bool = False) -> Tile:
    """The tile of decode steps in which rows share no prefix and none is cut: the smallest where programs are so many that all
    three that a processor runs at once stay busy until the end (256 rows of 1,024 keys, H200, 2026-11-27: 247 us, with the tile of
    64 rows 263)."""
    many = tokens * kind.kv_heads >= WAVES * processors
    return tiles_of(kind, dtype, generation)[0] if many else decode_tiles(kind, dtype, generation, tokens, eight_bits)[0]


def _tiles_of_latents(least: int, dtype: torch.dtype, generation: int) -> tuple[Tile, Tile, Tile]:
    """MLA latents: the accumulator of a query row takes as many registers as two heads of 256 features, so tiles have few rows."""
    if dtype == torch.float32 or generation == 0:
        tile = Tile(least, 16, 4 if generation == 0 else 8, 2)
        return tile, tile, tile
    if generation == 8:
        few = Tile(max(32, least), 16, 8, 5)
        return Tile(least, 16, 4, 5), few, few
    return Tile(least, 64, 4, 5), Tile(max(32, least), 64, 8, 5), Tile(max(64, least), 16, 8, 5)


def _tile_of_expanded(generation: int) -> Tile:
    """Expanded MLA: rows are long, and each head has its own keys of 128 features, with 64 shared rotary ones in a product of their
    own. With 64 keys at once two tiles are in flight in 168 KiB; 128 would leave room for one. Not measured."""
    return {0: Tile(128, 32, 8, 2), 8: Tile(128, 32, 8, 5)}.get(generation, Tile(128, 64, 8, 5))


def _tiles_of_large_heads(least: int, dtype: torch.dtype, generation: int) -> tuple[Tile, Tile, Tile]:
    """Heads of 512 features: the accumulator takes as many registers as that of latents, and values as much shared memory as
    keys."""
    if dtype == torch.float32:
        tile = Tile(least, 16, 4, 1) if generation == 0 else Tile(least, 16, 8, 2)
        return tile, tile, tile
    few = Tile(max(32, least), 32 if generation == 9 else 16, 8, 2 if generation == 0 else 4)
    if generation == 9:
        return Tile(least, 32, 8, 4), few, Tile(max(64, least), 16, 8, 5)
    return Tile(least, 16, 4, 5 if generation == 8 else 2), few, few


def narrowed(tile: Tile, size: int, needed: bool) -> Tile:
    """The tile with fewer keys where `needed` (8-bit cache, or windows): tiles of 128 keys, or of 64 latents, leave no registers to
    widen 8-bit keys, nor for the loop over the window's first keys."""
    most, warps = (64, tile.warps) if size <= 256 else (32, 8)
    return replace(tile, keys=most, warps=warps, stages=5) if needed and tile.keys > most else tile


def device_class(device: torch.device) -> int:
    """Device class that tiles are tuned for: 8 for about 99 KiB of shared memory (Ampere, Ada, and workstation Blackwell), 9 for
    Hopper and data-centre Blackwell, 0 for AMD. A CPU, where only the interpreter runs, counts as 9."""
    if torch.version.hip is not None:
        return 0
    return 9 if device.type != "cuda" or 9 <= torch.cuda.get_device_capability(device)[0] < 12 else 8


def plan(
    rows: Sequence[Row],
    page_size: int,
    kinds: Sequence[LayerKind],
    device: torch.device,
    *,
    dtype: torch.dtype,
    processors: int | None = None,
    fixed: int = 0,
    share: bool = True,
    capacity: Capacity | None = None,
    eight_bits: bool = False,
    into: Plan | None = None,
    after: torch.cuda.Event | None = None,
) -> Plan:
    """The plan of a step of `rows`, whose query tokens stand one row after the other.

    kinds: of the model's layers; dtype: of the queries; processors: the device's SMs; fixed: keys of an item (a multiple of 128)
    whatever else is running, so that a token's output is bit for bit independent of its neighbours and of which of them are
    computed before (batch invariance); with it rows do not share prefixes, nor do they without `share`; capacity: sizes fixed by a
    CUDA graph, without it tensors are as long as this step needs; eight_bits: the cache is quantized to 8 bits; into: a plan of the
    same capacity and model, whose tensors take this one's contents, for the replay of a CUDA graph: asynchronously, after what is
    queued on the device, or was before the event `after`. Raises ValueError if `fixed` is no multiple of 128, or if sizes of `into`
    differ, CapacityExceeded if `capacity` is too small.
    """
    if fixed % cutting.ALIGNMENT:
        raise ValueError(f"items of {fixed} keys: not a multiple of {cutting.ALIGNMENT}")
    generation = device_class(device)
    processors = processors if processors is not None else processors_of(device)
    if capacity is not None:
        tiles = {kind: capacity.tiles[kind.window] for kind in kinds}
    elif not fixed and all(row.queries == 1 for row in rows):
        tiles = {kind: decode_tiles(kind, dtype, generation, len(rows), eight_bits) for kind in kinds}
    else:
        tiles = {kind: tiles_of(kind, dtype, generation, fixed > 0) for kind in kinds}
    most = min((own[-1].rows - 1) // kind.ratio for kind, own in tiles.items())
    if capacity is not None and not capacity.entries:  # a lean graph, whose tile may not hold two rows: sharing ones are not for it
        most = max(most, 1)
    table = cutting.table(rows, page_size, most if share and not fixed else 0)
    return _plan(table, tiles, device, processors, fixed, capacity, into, after)


def plan_single_tokens(
    seen: Array, apart: int, kind: LayerKind, device: torch.device, dtype: torch.dtype, page_size: int = 1
) -> Plan:
    """The plan of rows of one token each, which see so many keys. Page tables, of `apart` entries each, are given later
    (`Plan.chosen`)."""
    tiles = {kind: tiles_of(kind, dtype, device_class(device))[:1]}
    return _plan(cutting.single_token_table(seen, apart, page_size), tiles, device, processors_of(device))


def _plan(
    table: cutting.Table,
    tiles: Mapping[LayerKind, tuple[Tile, ...]],
    device: torch.device,
    processors: int,
    fixed: int = 0,
    capacity: Capacity | None = None,
    into: Plan | None = None,
    after: torch.cuda.Event | None = None,
) -> Plan:
    trees = {kind: _trees(table, own, kind.ratio, capacity) for kind, own in tiles.items()}
    some = any(map(any, trees.values()))
    writer = _Writer()
    masks = writer.add(_masks(table, some), _room(capacity, "tokens") if capacity is None or capacity.trees else 0)
    positions = writer.add(table.positions, _room(capacity, "tokens"))
    listed = writer.add(table.tokens, _room(capacity, "listed"))
    places = {}
    for kind, own in tiles.items():
        parts = cutting.segments(table, kind, own)
        limit = fixed or cutting.longest(parts, kind.kv_heads, processors, own)
        places[kind] = _launch(writer, kind.window, cutting.work(table, parts, own, limit, bool(fixed)), capacity)
    pages = writer.add(_pages(table), _room(capacity, "pages"))  # the last, for `_Writer.overwrite`
    if into is not None:
        writer.overwrite(into.buffer, after)
        return into
    buffer = writer.buffer(device)
    return Plan(
        buffer=buffer,
        masks=masks.of(buffer),
        positions=positions.of(buffer),
        listed=listed.of(buffer),
        pages=pages.of(buffer),
        launches={
            kind.window: Launch(
                kind, tiles[kind], trees[kind], tuple(place.of(buffer) for place in items), entries.of(buffer), pieces.of(buffer)
            )
            for kind, (items, entries, pieces) in places.items()
        },
        page_size=table.page_size,
        pieces=1 if fixed else PIECES,  # one at a time, since windows put empty partials before those of some queries
        settled=True,
    )


def _trees(table: cutting.Table, tiles: Sequence[Tile], ratio: int, capacity: Capacity | None) -> tuple[bool, ...]:
    """Per tile: whether its items may be of draft trees."""
    taken = {cutting.tile_of(tiles, table.rows[i].queries * ratio) for i in table.trees}
    if capacity is None:
        return tuple(tile in taken for tile in range(len(tiles)))
    if taken and not capacity.trees:
        raise CapacityExceeded("a plan without room for trees was given one")
    return (capacity.trees,) * len(tiles)


def processors_of(device: torch.device) -> int:
    """Number of streaming multiprocessors, or compute units; a CPU, where only the interpreter runs, counts as 8."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@dataclass(slots=True)  # many per step: frozen ones take three times as long to make
class _Place:
    """Where an array lies in a plan's buffer."""

    start: int
    shape: tuple[int, ...]

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + math.prod(self.shape)].view(self.shape)


class _Writer:
    """Lays out the arrays of a plan in one buffer."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Array]] = []
        self._length = 0

    def add(self, array: Array, room: int | None) -> _Place:
        """Appends an array. room: rows to reserve, zeroed beyond those of `array`. Raises CapacityExceeded if there are more."""
        if room is not None and room < len(array):
            raise CapacityExceeded(f"a plan with room for {room} was given {len(array)}")
        place = _Place(self._length, (len(array) if room is None else room, *array.shape[1:]))
        self._parts.append((place.start, array))
        self._length += -(-math.prod(place.shape) // ALIGNED) * ALIGNED
        return place

    def buffer(self, device: torch.device) -> Tensor:
        """All arrays in one int32 tensor on the device, copied asynchronously from pinned memory on CUDA."""
        return self._written(max(self._length, 1), device).to(device, non_blocking=True)

    def overwrite(self, buffer: Tensor, after: torch.cuda.Event | None) -> None:
        """Copies all arrays into a buffer of the same sizes, but for the room behind the last one (`copy_into`). Raises ValueError
        if sizes differ."""
        if buffer.shape[0] != max(self._length, 1):  # `len` of a tensor is a call into torch's Python
            raise ValueError(f"a plan of {self._length} ints can't take the place of one of {len(buffer)}")
        start, last = self._parts[-1]
        length = start + last.size
        copy_into(self._written(length, buffer.device), buffer[:length], after)

    def _written(self, length: int, device: torch.device) -> Tensor:
        result = torch.zeros(length, dtype=torch.int32, pin_memory=device.type == "cuda")
        view = result.numpy()
        for start, numbers in self._parts:
            view[start : start + numbers.size] = numbers.reshape(-1)
        return result


def _room(capacity: Capacity | None, what: str) -> int | None:
    room: int | None = getattr(capacity, what, None)
    return room


def _pages(table: cutting.Table) -> Array:
    used = [
        row.pages if len(row.pages) == width else row.pages[:width]
        for row, width in zip(table.rows, table.widths.tolist(), strict=True)
    ]
    # Arrays, as the engine's are, are concatenated as bytes: with 256 rows of 4,000 tokens in 0.01 ms instead of 8.
    return numpy.frombuffer(b"".join([own if isinstance(own, array) else array("i", own) for own in used]), numpy.int32)


def _masks(table: cutting.Table, trees: bool) -> Array:
    words = numpy.zeros((len(table.positions) if trees else 0, WORDS // 2), numpy.uint64)
    for i in table.trees:
        words[table.starts[i] : table.starts[i] + table.queries[i]] = cutting.masks(table.rows[i])
    return words.view(numpy.int32)


def _launch(writer: _Writer, window: int, work: Work, capacity: Capacity | None) -> tuple[tuple[_Place, ...], _Place, _Place]:
    rooms = capacity.items[window] if capacity else (None,) * len(work.items)
    items = tuple(writer.add(kind, room) for kind, room in zip(work.items, rooms, strict=True))
    entries = numpy.zeros((len(work.entries), 4), numpy.int32)
    entries[:, :3] = work.entries
    return items, writer.add(entries, _room(capacity, "entries")), writer.add(work.pieces, _room(capacity, "pieces"))


def attention(query: Tensor, cache: Tensor, plan: Plan, how: AttentionOptions) -> Tensor:
    """Softmax attention of every row of `plan`: [tokens, heads, size], contiguous; for MLA [tokens, heads, latent].

    query: [tokens, heads, size], with any stride between tokens; cache: [slots, 2, kv_heads, size], keys first, in the query's
    dtype or float8_e4m3fn, all or some of a slot's heads; for MLA [slots, 1, 1, size or more]. Where the heads' keys share their
    last `how.turned` features, `cache` is a view without these: they are stored once, behind a slot's values. No sparse selection
    here: see `indexed_attention`. Raises ValueError where heads are not contiguous.
    """
    tokens, heads, size = query.shape
    latent, sinks = how.latent, how.sinks
    turned = size - latent if latent else how.turned
    values = size - turned
    if query.stride(1) != size or query.stride(2) != 1 or cache.stride()[2:] != (cache.shape[3], 1):
        raise ValueError("a token's heads, and a slot's keys, or its values, must lie side by side")
    launch = plan.launches[how.window]
    kind = launch.kind
    window = 0 if kind.chunked else how.window  # then items begin where the chunk does
    output = torch.empty((tokens, heads, values), dtype=query.dtype, device=query.device)
    pieces = len(launch.pieces)
    partials = torch.empty((pieces, heads, values), dtype=torch.float32, device=query.device)
    weights = torch.empty((pieces, heads), dtype=torch.float32, device=query.device)
    of_scales, of_sinks = (given if given is not None else weights for given in (how.scales, sinks))  # weights: not read
    for tile, items, trees in zip(launch.tiles, launch.items, launch.trees, strict=True):
        if not len(items):
            continue
        held = output, partials, weights, query, cache, items, plan.listed, plan.positions, plan.masks, plan.pages
        if hopper_attention.able(query, cache, kind, tile, plan.page_size, how):
            hopper_attention.attend(*held, kind, plan.page_size, how.scale, trees, processors_of(query.device))
            continue
        tile = narrowed(tile, size, cache.dtype != query.dtype or window > 0)
        width, apart = cache.stride(0), 0 if latent else cache.stride(1)
        layer = kind.kv_heads, kind.ratio, values, turned, width, apart, plan.page_size, tile, window, how.softcap
        attend[(len(items) * kind.kv_heads,)](
            *held,
            of_scales,
            of_sinks,
            query.stride(0),
            how.scale,
            how.softcap,
            window,
            **_constants(*layer, trees, how.scales is not None, sinks is not None, plan.settled),
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=True,
            **begin_early(query.device),
        )
    if len(launch.entries):
        constants = _merge_constants(heads, values, sinks is not None, plan.pieces, len(launch.entries))
        merge[(len(launch.entries) * triton.cdiv(heads, constants["TOGETHER"]),)](
            output,
            partials,
            weights,
            launch.entries,
            launch.pieces,
            of_sinks,
            **constants,
            num_warps=MERGE_WARPS,
            enable_fp_fusion=True,
            **begin_early(query.device),
        )
    return output


MERGE_WARPS = 2
MANY_ENTRIES = 64  # tokens with partials from which a program merges several heads
MERGED = 4096  # numbers of partials that a program loads at once, 64 per thread


def _constants(
    kv_heads: int,
    ratio: int,
    size: int,
    turned: int,
    width: int,
    apart: int,
    page_size: int,
    tile: Tile,
    window: int,
    softcap: float,
    trees: bool,
    scaled: bool,
    sinks: bool,
    settled: bool,
) -> dict[str, object]:
    return {
        "KV_HEADS": kv_heads,
        "RATIO": ratio,
        "SIZE": size,
        "PADDED": max(16, triton.next_power_of_2(size)),  # 16 is the minimum of a dot on tensor cores
        "TURNED": turned,
        "TURNED_PADDED": max(16, triton.next_power_of_2(turned)),
        "TURNED_AT": 2 * apart if apart else size,
        "WIDTH": width,
        "APART": apart,
        "PAGE": page_size,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "WINDOWED": window > 0,
        "CAPPED": softcap > 0,
        "TREES": trees,
        "SCALED": scaled,
        "SINKS": sinks,
        "SINGLE": tile.rows <= 32 and not trees,
        "STAGES": tile.stages,
        "WIDEN": INTERPRET,
        "SETTLED": settled,
    }


def _merge_constants(heads: int, size: int, sinks: bool, pieces: int, entries: int) -> dict[str, Any]:
    padded = triton.next_power_of_2(size)
    # With many tokens most may have nothing to merge, so several heads per program start fewer programs in vain. Not where partials
    # come one at a time (batch invariance): with several heads the compiler contracts other multiplications, which changes bits.
    together = 4 if entries >= MANY_ENTRIES and pieces > 1 and padded <= 128 else 1
    room = MERGED if together == 1 and size == padded else MERGED // 2  # with more, some of it spills
    pieces = min(pieces, max(1, room // (together * padded)))
    return {"HEADS": heads, "SIZE": size, "PADDED": padded, "PIECES": pieces, "TOGETHER": together, "SINKS": sinks}


# The compile targets that each device class stands for.
TARGETS = {8: ("sm_80", "sm_120"), 9: ("sm_90", "sm_100"), 0: ("gfx942",)}


def compilations() -> list[Compilation]:
    """Every tile at every head size that models use, then special cases of some models: for `make kernels`."""
    result = []
    for generation in TARGETS:
        for kind in range(3):
            result += [
                *(_compilation(kind, size, generation, hot=True) for size in (64, 80, 96, 128, 256)),
                _compilation(kind, 136, generation, ratio=1, hot=True),  # with ALiBi, where no heads share a key
                _compilation(kind, 128, generation, page_size=64, hot=True),
                _compilation(kind, 128, generation, trees=True, hot=True),
                _compilation(kind, 128, generation, window=4096, hot=True),
                _compilation(kind, 64, generation, ratio=8, window=128, sinks=True, hot=True),
                _compilation(kind, 192, generation, ratio=8, window=128, sinks=True, hot=True),
                _compilation(kind, 256, generation, window=4096, softcap=50.0, hot=True),
                *(_compilation(kind, size, generation, dtype=torch.float32, hot=True) for size in (64, 128, 256)),
            ]
            result.append(_compilation(kind, 128, generation, eight_bits=True, page_size=64, hot=True))
            if generation:  # AMD's begin none early
                result.append(_compilation(kind, 128, generation, early=True, hot=True))
                result.append(_compilation(kind, 128, generation, page_size=1, early=True, settled=False, hot=True))
            if kind == 0 and generation == 9:
                few = [_compilation(kind, size, generation, few_rows=True, hot=True) for size in (64, 80, 96, 128)]
                few += [_compilation(kind, 64, generation, ratio=8, window=128, sinks=True, few_rows=True, hot=True)]
                result += [*few, _compilation(kind, 128, generation, few_rows=True, early=True, hot=True)]
        result += [
            *(_compilation(kind, 512, generation, turned=64, ratio=16, page_size=64, hot=True) for kind in range(3)),
            _compilation(1, 512, generation, turned=64, ratio=16, trees=True, hot=True),
            _compilation(0, 512, generation, turned=64, ratio=16, beside=128, page_size=1, hot=True),
            *(_compilation(kind, 512, generation, ratio=16, beside=256, hot=True) for kind in range(3)),
            _compilation(0, 512, generation, turned=64, ratio=16, eight_bits=True, hot=True),
            *(_compilation(kind, 512, generation, turned=64, ratio=16, page_size=64, sinks=True, hot=True) for kind in range(3)),
            *(_compilation(kind, 512, generation, alone=True, ratio=16, window=128, sinks=True, hot=True) for kind in range(3)),
            _compilation(0, 512, generation, alone=True, ratio=16, page_size=1, sinks=True, hot=True),
            _compilation(2, 256, generation, turned=64, ratio=8, dtype=torch.float32, hot=True),
            *(_compilation(2, size, generation, common=64, ratio=1, page_size=128, hot=True) for size in (64, 128)),
            _compilation(2, 256, generation, ratio=1, page_size=128, hot=True),  # expanded MLA whose keys have no separate features
            _compilation(2, 128, generation, common=64, ratio=1, page_size=128, dtype=torch.float32, hot=True),
            *(_compilation(kind, 512, generation, ratio=8, hot=True) for kind in range(3)),
            _compilation(1, 136, generation, ratio=1, trees=True, hot=True),
            _compilation(1, 512, generation, ratio=8, trees=True, page_size=64, hot=True),
            _compilation(0, 512, generation, ratio=8, dtype=torch.float32, hot=True),
            _compilation(0, 64, generation, ratio=1, page_size=1),
            _compilation(0, 8, generation, hot=True),  # models made for tests have such heads
            _compilation(0, 128, generation, ratio=7, page_size=256, hot=True),
            _compilation(2, 128, generation, dtype=torch.float16, hot=True),
            _compilation(1, 256, generation, trees=True, window=4096, softcap=50.0, hot=True),
        ]
    merges = [_merge_compilation(size, entries=entries) for size in (64, 96, 128, 192, 256, 512) for entries in (1, MANY_ENTRIES)]
    return [*result, *merges, _merge_compilation(128, early=True), _merge_compilation(64, sinks=True)]


def _merge_compilation(size: int, *, entries: int = 1, early: bool = False, sinks: bool = False) -> Compilation:
    constants = _merge_constants(32, size, sinks, PIECES, entries) | {"EARLY": early}
    signature = {"output": "*bf16", "partials": "*fp32", "weights": "*fp32", "entries": "*i32", "pieces": "*i32", "sinks": "*fp32"}
    return Compilation(
        kernel=merge,
        name=f"merge {size}{' of many' * (entries > 1)}{' early' * early}{' sinks' * sinks}",
        types=signature,
        constants=constants,
        warps=MERGE_WARPS,
        fuse=True,
        early=early,
        hot=True,
        targets=EARLY_TARGETS if early else (),
    )


def _compilation(
    kind: int,
    size: int,
    generation: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 16,
    ratio: int = 4,
    turned: int = 0,
    beside: int = 0,
    alone: bool = False,  # keys double as values, and nothing else is in a slot
    common: int = 0,  # features that all heads' keys share (expanded MLA)
    window: int = 0,
    softcap: float = 0.0,
    trees: bool = False,
    eight_bits: bool = False,
    sinks: bool = False,
    early: bool = False,
    few_rows: bool = False,
    settled: bool = True,
    hot: bool = False,
) -> Compilation:
    latent = turned > 0 or beside > 0 or alone
    layers = LayerKind(window, 8, ratio, size + turned + common, latent, turned=common)
    tile = replace(tiles_of(layers, dtype, generation)[kind], **(FEW_ROWS if few_rows else {}))
    tile = narrowed(tile, layers.size, eight_bits or window > 0)
    width = size + turned + beside if latent else 16 * size + common
    apart = 0 if latent else 8 * size
    constants = _constants(
        8, ratio, size, turned + common, width, apart, page_size, tile, window, softcap, trees, eight_bits, sinks, settled
    )
    constants["EARLY"] = early
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    signature = {
        "output": f"*{short}",
        "partials": "*fp32",
        "weights": "*fp32",
        "query": f"*{short}",
        "cache": "*fp8e4nv" if eight_bits else f"*{short}",
        **dict.fromkeys(("items", "listed", "positions", "masks", "pages"), "*i32"),
        "scales": "*fp32",
        "sinks": "*fp32",
        "query_stride": "i32:16",
        "scale": "fp32",
        "softcap": "fp32",
        "window": "i32",
    }
    marks = [
        f"latent + {turned}" * latent,
        f"beside {beside}" * (beside > 0),
        f"common {common}" * (common > 0),
        f"window {window}" * (window > 0),
        "softcap" * (softcap > 0),
        "trees" * trees,
        "e4m3" * eight_bits,
        "sinks" * sinks,
        "early" * early,
        "few rows" * few_rows,
        "chosen" * (not settled),
        GENERATIONS[generation],
    ]
    name = " ".join([f"attend {('one', 'few', 'many')[kind]} {size} {short} ratio {ratio} page {page_size}", *filter(None, marks)])
    return Compilation(
        kernel=attend,
        name=name,
        types=signature,
        constants=constants,
        warps=tile.warps,
        stages=tile.stages,
        fuse=True,
        early=early,
        hot=hot,
        # e4m3 needs Ada, and early beginnings Hopper.
        targets=tuple(name for name in TARGETS[generation] if not ((eight_bits or early) and name == "sm_80")),
    )
