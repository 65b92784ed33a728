"""The Triton kernels of `paged_attention`: flash attention over a page table (`attend`), as in PagedAttention (Kwon et al. 2023,
arXiv:2309.06180), and the merge of split-KV partials (`merge`), as in flash decoding. They take pointers and ints, no plan;
`paged_attention` describes these.

A program of `attend` is one item and one key head. All query heads of that key head are packed into its tile, so keys and values
are read once. It goes through its keys in tiles, most of which need no mask, with the usual online softmax (running maximum and
sum; Dao et al. 2022, arXiv:2205.14135), in units of log 2:

    best, total, sums = -inf, 0, 0                          of each row: a query token and one of the key head's query heads
    for each tile of keys:
        logits = scale / log(2) * query @ keys.T            soft cap; -inf where masked
        higher = max(best, the largest of logits)
        part = 2^(logits - higher)
        total = total * 2^(best - higher) + sum of part
        sums = sums * 2^(best - higher) + part @ values
        best = higher
    output = sums / total                                   or, of a row with several items, a partial: its weight is
                                                            best + log2(total), the log-sum-exp of its logits

A program of `merge` is one query token and some heads: output = sum of partials * 2^weight / sum of 2^weight, likewise online.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .dependent_launch import let_next_begin, prefetch_lines, wait_for_earlier


class Layer(NamedTuple):
    """What is known of a layer when a kernel is compiled, all of it constant."""

    kv_heads: int
    size: int  # features of a value, and of a key without its rotary part
    padded: int  # `size` rounded up to a power of two; `turned_padded` likewise
    turned: int  # rotary features that all heads' keys share: behind the latent (MLA), or behind all values of a slot; 0: none
    turned_padded: int
    width: int  # elements between slots of the cache
    apart: int  # elements between a slot's keys and values; 0: latents, where keys double as values
    page: int  # tokens per page
    windowed: bool  # has a sliding window
    capped: bool  # has a logit soft cap
    trees: bool  # items may be of draft trees
    widen: bool  # operands of products are widened to float32 (Triton's interpreter)


class Visibility(NamedTuple):
    """What decides which keys the rows of a tile see."""

    limit: tl.tensor  # [ROWS]: the last key that each row sees, by causality
    position: tl.tensor  # [ROWS]: position in the sequence
    token: tl.tensor  # [ROWS]: query token; -1: none (padding)
    positions: tl.tensor  # pointer to the positions of all of the step's tokens
    masks: tl.tensor  # pointer to the ancestor masks of all of the step's tokens
    context: tl.tensor  # number of keys before a tree's own
    tree: tl.tensor  # the tree's first token; less than 0: not a tree
    window: tl.tensor
    end: tl.tensor  # key after the item's last


class QueryTile(NamedTuple):
    """The queries of a tile: [ROWS, padded]."""

    query: tl.tensor
    turned: tl.tensor  # the rotary features behind those, if the layer has any


class KeyPointers(NamedTuple):
    """Pointers to a head's key in slot 0 of the cache, and to the features that all heads' keys share."""

    keys: tl.tensor
    turned: tl.tensor  # unused if a layer has none


class Accumulator(NamedTuple):
    """The running state of the online softmax over the keys so far."""

    sums: tl.tensor  # [ROWS, padded]: weighted sums of values, not yet normalized
    best: tl.tensor  # [ROWS]: the highest logit so far
    total: tl.tensor  # [ROWS]: sum of exponentials relative to that one


@triton.jit
def dot(left: tl.tensor, right: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    """The matrix product, accumulated in float32; float32 operands are not rounded to TF32."""
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def slots_of(
    pages: tl.tensor, begin: tl.tensor, end: tl.tensor, PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """Cache slots of keys `begin` to `begin + KEYS`, by the page table: [KEYS] int64. MASKED: those from `end` on count as of page
    0."""
    if PAGE % KEYS == 0:  # the tile lies in one page
        page = tl.load(pages + begin // PAGE).to(tl.int64)
        slots = page * PAGE + begin % PAGE + tl.arange(0, KEYS)
    else:
        key = (begin + tl.arange(0, KEYS)).to(tl.uint32)  # signed quotients take three more instructions
        if MASKED:
            page = tl.load(pages + key // PAGE, mask=key < end, other=0).to(tl.int64)
        else:
            page = tl.load(pages + key // PAGE).to(tl.int64)
        slots = page * PAGE + key % PAGE
    return slots


@triton.jit
def _rows(places: tl.tensor, shown: tl.tensor, within: tl.tensor, MASKED: tl.constexpr, WHOLE: tl.constexpr) -> tl.tensor:
    """Rows of the cache, one for each key: [KEYS, FEATURES]. MASKED: only keys that are `shown` are loaded; WHOLE: all features are
    `within`."""
    if MASKED:  # what no row sees must not even be loaded: it may be NaN, and 0 times that is NaN
        rows = tl.load(places, mask=shown[:, None] & within[None, :], other=0.0)
    elif WHOLE:
        rows = tl.load(places)
    else:
        rows = tl.load(places, mask=within[None, :], other=0.0)
    return rows


@triton.jit
def visible_keys(key: tl.tensor, visibility: Visibility, words: tl.tuple, WINDOWED: tl.constexpr, TREES: tl.constexpr) -> tl.tensor:
    """The attention mask of a tile, [ROWS, KEYS]. key: [KEYS]; words: four of [ROWS], the rows' ancestor masks."""
    inside = key < visibility.end
    visible = (key[None, :] <= visibility.limit[:, None]) & inside[None, :]
    key_position = key
    if TREES:
        node = key - visibility.context
        of_tree = (node >= tl.where(visibility.tree >= 0, 0, 1 << 30)) & inside
        low = tl.where((node < 32)[None, :], words[0][:, None], words[1][:, None])
        high = tl.where((node < 96)[None, :], words[2][:, None], words[3][:, None])
        sees = (tl.where((node < 64)[None, :], low, high) >> (node & 31)[None, :]) & 1
        visible = tl.where(of_tree[None, :], sees == 1, visible)
        if WINDOWED:
            key_position = tl.where(of_tree, tl.load(visibility.positions + visibility.tree + node, mask=of_tree, other=0), key)
    if WINDOWED:
        visible = visible & (visibility.position[:, None] - key_position[None, :] < visibility.window)
    return visible


@triton.jit
def ancestor_masks(visibility: Visibility, LOADED: tl.constexpr) -> tl.tuple:
    """The ancestor masks that `visible_keys` takes, four words of [ROWS]. Not LOADED: placeholders that are never read."""
    words = visibility.token, visibility.token, visibility.token, visibility.token
    if LOADED:
        at, there = visibility.masks + visibility.token * 4, visibility.token >= 0
        words = (
            tl.load(at, mask=there, other=0),
            tl.load(at + 1, mask=there, other=0),
            tl.load(at + 2, mask=there, other=0),
            tl.load(at + 3, mask=there, other=0),
        )
    return words


@triton.jit
def _logits(asked: QueryTile, key: tl.tensor, turned_key: tl.tensor, factor: tl.tensor, LAYER: tl.constexpr) -> tl.tensor:
    """Attention logits, [ROWS, KEYS], in units of log 2 once multiplied by `unit` of `_through`. key: [KEYS, padded]."""
    logits = dot(asked.query, tl.trans(key.to(asked.query.dtype)), LAYER.widen)
    if LAYER.turned > 0:
        logits += dot(asked.turned, tl.trans(turned_key.to(asked.query.dtype)), LAYER.widen)
    if LAYER.capped:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), and factor holds 2 log2(e) / softcap. The multiplication by the cap comes later, as does
        # that by the factor without a cap: else loops would differ in which operations the compiler contracts, and so in the last
        # bit.
        logits = 1.0 - 2.0 / (tl.exp2(logits * factor) + 1.0)
    return logits


@triton.jit
def _beside(sink: tl.tensor, best: tl.tensor) -> tl.tensor:
    """What an attention sink adds to a sum of exponentials relative to `best`. Clamped: for a sink far above all logits 2^100 has
    the same effect as the exact number."""
    return tl.exp2(tl.minimum(sink * 1.4426950408889634 - best, 100.0))


@triton.jit
def _through(
    running: Accumulator,
    asked: QueryTile,
    held: KeyPointers,
    pages: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    lowest: tl.tensor,
    factor: tl.tensor,
    softcap: tl.tensor,
    visibility: Visibility,
    LAYER: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
) -> Accumulator:
    """Continues the online softmax over keys `first` to `last`. lowest: keys before it are masked for all rows. Not MASKED: whole
    tiles that all rows see."""
    sums, best, total = running
    feature = tl.arange(0, LAYER.padded)
    within = feature < LAYER.size
    turned = tl.arange(0, LAYER.turned_padded)
    words = ancestor_masks(visibility, MASKED and LAYER.trees)
    unit = softcap * 1.4426950408889634 if LAYER.capped else factor
    for begin in tl.range(first, last, KEYS, num_stages=STAGES):
        slots = slots_of(pages, begin, visibility.end, LAYER.page, KEYS, MASKED)
        place = slots[:, None] * LAYER.width + feature[None, :]
        key_at = begin + tl.arange(0, KEYS)
        shown = (key_at < visibility.end) & (key_at >= lowest)
        key = _rows(held.keys + place, shown, within, MASKED, LAYER.padded == LAYER.size)
        turned_key = key
        if LAYER.turned > 0:
            turned_place = held.turned + slots[:, None] * LAYER.width + turned[None, :]
            turned_key = _rows(turned_place, shown, turned < LAYER.turned, MASKED, LAYER.turned_padded == LAYER.turned)
        logits = _logits(asked, key, turned_key, factor, LAYER)
        if MASKED:
            visible = visible_keys(key_at, visibility, words, LAYER.windowed, LAYER.trees)
            logits = tl.where(visible, logits, float("-inf"))
        higher = tl.maximum(best, tl.max(logits, 1) * unit)
        base = higher
        if MASKED:  # a row that has seen nothing yet has -inf
            base = tl.where(higher == float("-inf"), 0.0, higher)
        part = tl.exp2(logits * unit - base[:, None])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(part, 1)
        best = higher
        sums = sums * fade[:, None]
        value = key
        if LAYER.apart > 0:
            value = _rows(held.keys + LAYER.apart + place, shown, within, MASKED, LAYER.padded == LAYER.size)
        value = value.to(asked.query.dtype)
        sums += dot(part.to(value.dtype), value, LAYER.widen)
    return Accumulator(sums, best, total)


@triton.jit
def _through_all(
    asked: QueryTile,
    held: KeyPointers,
    pages: tl.tensor,
    first: tl.tensor,
    factor: tl.tensor,
    softcap: tl.tensor,
    visibility: Visibility,
    LAYER: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    SINGLE: tl.constexpr,
) -> Accumulator:
    """Attention over all keys from `first` on, in up to three loops: the window's beginning (masked), the middle (unmasked), the
    diagonal (masked). SINGLE: one masked loop, which starts sooner, where memory is slower than masking."""
    running = Accumulator(
        tl.zeros([ROWS, LAYER.padded], tl.float32), tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    )
    nearest = tl.min(tl.where(visibility.token >= 0, visibility.position, 1 << 30), 0)
    # Keys before this one are masked for no row, except by the window.
    plain = tl.where(visibility.tree == -2, visibility.end, tl.minimum(visibility.end, nearest + 1))
    if LAYER.trees:
        plain = tl.where(visibility.tree >= 0, tl.minimum(visibility.end, visibility.context), plain)
    lowest = first
    if LAYER.windowed:
        lowest = tl.maximum(first, nearest - visibility.window + 1)
        first += (lowest - first) // KEYS * KEYS
    tail = first
    EDGE: tl.constexpr = KEYS if SINGLE or KEYS < 64 else 64  # masks take registers, and most of a large tile may be hidden
    if not SINGLE:
        middle = first
        if LAYER.windowed:
            # from here on the window hides nothing
            free = tl.minimum(tl.max(visibility.position, 0) - visibility.window + 1, visibility.end)
            middle = first + tl.cdiv(tl.maximum(free - first, 0), KEYS) * KEYS
            running = _through(
                running, asked, held, pages, first, middle, lowest, factor, softcap, visibility, LAYER, EDGE, 3, True
            )
        tail = middle + tl.maximum(plain - middle, 0) // KEYS * KEYS
        running = _through(
            running, asked, held, pages, middle, tail, lowest, factor, softcap, visibility, LAYER, KEYS, STAGES, False
        )
    STAGED: tl.constexpr = STAGES if SINGLE else 3
    return _through(  # type: ignore[no-any-return]
        running, asked, held, pages, tail, visibility.end, lowest, factor, softcap, visibility, LAYER, EDGE, STAGED, True
    )


@triton.jit
def _queries(source: tl.tensor, valid: tl.tensor, LAYER: tl.constexpr) -> QueryTile:
    """Loads the queries of a tile. source: pointers to the beginning of each row's query, [ROWS, 1]."""
    feature = tl.arange(0, LAYER.padded)
    query = tl.load(source + feature[None, :], mask=valid[:, None] & (feature < LAYER.size)[None, :], other=0.0)
    turned_query = query
    if LAYER.turned > 0:
        turned = tl.arange(0, LAYER.turned_padded)
        held = valid[:, None] & (turned < LAYER.turned)[None, :]
        turned_query = tl.load(source + LAYER.size + turned[None, :], mask=held, other=0.0)
    return QueryTile(query, turned_query)


@triton.jit
def _fetch(
    keys: tl.tensor,
    pages: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    LAYER: tl.constexpr,
    KEYS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Prefetches the first tile of keys, and of values, into L2, where other kernels' writes arrive, too. keys: pointer to the
    head's key in slot 0."""
    LINE: tl.constexpr = 1024 // keys.dtype.element_ty.primitive_bitwidth  # elements of a cache line
    LINES: tl.constexpr = LAYER.padded // LINE if LAYER.padded > LINE else 1
    slots = slots_of(pages, first, end, LAYER.page, KEYS, True)
    line = keys + slots[:, None] * LAYER.width + tl.minimum(tl.arange(0, LINES) * LINE, LAYER.size - 1)[None, :]
    prefetch_lines(line, EARLY)
    if LAYER.apart > 0:
        prefetch_lines(line + LAYER.apart, EARLY)


@triton.jit
def attend(
    output: tl.tensor,
    partials: tl.tensor,
    weights: tl.tensor,
    query: tl.tensor,
    cache: tl.tensor,
    items: tl.tensor,
    listed: tl.tensor,
    positions: tl.tensor,
    masks: tl.tensor,
    pages: tl.tensor,
    scales: tl.tensor,
    sinks: tl.tensor,
    query_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    KV_HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TURNED: tl.constexpr,
    TURNED_PADDED: tl.constexpr,
    TURNED_AT: tl.constexpr,  # offset of the shared rotary features in a slot
    WIDTH: tl.constexpr,
    APART: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    TREES: tl.constexpr,
    SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    SINGLE: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
    SETTLED: tl.constexpr,  # no kernel of the step writes the page tables
    EARLY: tl.constexpr,
) -> None:
    """Flash attention of one item and one key head. Key heads of an item are neighbouring programs, as their keys are neighbours in
    memory. For the constants see `Layer`: for MLA, KV_HEADS are groups of query heads, all with the same keys.

    One that begins early reads the plan, and prefetches its first keys, before it waits."""
    let_next_begin(EARLY)
    head = tl.program_id(0) % KV_HEADS
    item = items + (tl.program_id(0) // KV_HEADS) * 8
    queries = tl.load(item + 1)
    if queries == 0:
        wait_for_earlier(EARLY)
        return
    start = tl.load(item)
    table = pages + tl.load(item + 2)
    first = tl.load(item + 3)
    end = tl.load(item + 4)
    context = tl.load(item + 5)
    tree = tl.load(item + 6)
    partial = tl.load(item + 7)

    LAYER: tl.constexpr = Layer(KV_HEADS, SIZE, PADDED, TURNED, TURNED_PADDED, WIDTH, APART, PAGE, WINDOWED, CAPPED, TREES, WIDEN)
    row = tl.arange(0, ROWS)
    asked = row // RATIO
    valid = asked < queries
    token = tl.load(listed + start + asked, mask=valid, other=-1)
    position = tl.load(positions + token, mask=valid, other=-1)
    own = cache
    if APART > 0:
        own += head * SIZE
    if EARLY and SETTLED:
        _fetch(own, table, first, end, LAYER, KEYS, EARLY)
    wait_for_earlier(EARLY)
    query_head = head * RATIO + row % RATIO
    source = query + token.to(tl.int64)[:, None] * query_stride + (query_head * (SIZE + TURNED))[:, None]
    asking = _queries(source, valid, LAYER)

    factor = scale
    if SCALED:
        factor *= tl.load(scales + head)
    if CAPPED:
        factor = factor * 2.0 / softcap
    factor *= 1.4426950408889634
    limit = tl.where(tree == -2, end - 1, position)  # in a whole row (bidirectional) each query sees all keys
    visibility = Visibility(limit, position, token, positions, masks, context, tree, window, end)
    held = KeyPointers(own, cache + TURNED_AT)
    sums, best, total = _through_all(asking, held, table, first, factor, softcap, visibility, LAYER, ROWS, KEYS, STAGES, SINGLE)

    if SINKS:  # with partials, `merge` adds it once
        sink = _beside(tl.load(sinks + query_head, mask=valid, other=0.0), best)
        total += tl.where(partial < 0, sink, 0.0)
    answer = sums / tl.where(total > 0, total, 1.0)[:, None]
    if SCALED:
        answer *= tl.load(scales + KV_HEADS + head)
    feature = tl.arange(0, PADDED)
    held = valid[:, None] & (feature < SIZE)[None, :]
    if partial < 0:
        # Loaded again, in other words so that the compiler doesn't keep it: registers are scarce in the loops.
        token = tl.load(listed + start + asked, mask=valid, other=0, cache_modifier=".ca")
        target = (token.to(tl.int64) * (KV_HEADS * RATIO) + query_head)[:, None] * SIZE + feature[None, :]
        tl.store(output + target, answer.to(output.dtype.element_ty), mask=held)
    else:
        at = (partial + asked).to(tl.int64) * (KV_HEADS * RATIO) + query_head
        tl.store(partials + at[:, None] * SIZE + feature[None, :], answer, mask=held)
        tl.store(weights + at, best + tl.log2(tl.where(total > 0, total, 1.0)), mask=valid)  # -inf: it saw no key


@triton.jit
def merge(
    output: tl.tensor,
    partials: tl.tensor,
    weights: tl.tensor,
    entries: tl.tensor,
    pieces: tl.tensor,
    sinks: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PIECES: tl.constexpr,
    TOGETHER: tl.constexpr,
    SINKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Merges the partials of one token and TOGETHER of its heads, each weighted by its log-sum-exp."""
    let_next_begin(EARLY)
    GROUPS: tl.constexpr = (HEADS + TOGETHER - 1) // TOGETHER
    entry = entries + (tl.program_id(0) // GROUPS) * 4
    head = tl.program_id(0) % GROUPS * TOGETHER + tl.arange(0, TOGETHER)
    count = tl.load(entry + 2)
    if count == 0:
        wait_for_earlier(EARLY)
        return
    token = tl.load(entry).to(tl.int64)
    own = pieces + tl.load(entry + 1)
    wait_for_earlier(EARLY)
    feature = tl.arange(0, PADDED)
    within = (feature < SIZE)[None, :] & (head < HEADS)[:, None]
    sums = tl.zeros([TOGETHER, PADDED], tl.float32)
    best = tl.full([TOGETHER], float("-inf"), tl.float32)
    total = tl.zeros([TOGETHER], tl.float32)
    for first in tl.range(0, count, PIECES):
        piece = first + tl.arange(0, PIECES)
        there = (piece < count)[:, None] & (head < HEADS)[None, :]
        at = tl.load(own + piece, mask=piece < count, other=0).to(tl.int64)[:, None] * HEADS + head[None, :]
        weight = tl.load(weights + at, mask=there, other=float("-inf"))
        higher = tl.maximum(best, tl.max(weight, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        part = tl.exp2(weight - base[None, :])
        fade = tl.exp2(best - base)
        held = there[:, :, None] & (feature < SIZE)[None, None, :]
        partial = tl.load(partials + at[:, :, None] * SIZE + feature[None, None, :], mask=held, other=0.0)
        sums = sums * fade[:, None] + tl.sum(partial * part[:, :, None], 0)
        total = total * fade + tl.sum(part, 0)
        best = higher
    if SINKS:
        total += _beside(tl.load(sinks + head, mask=head < HEADS, other=0.0), best)
    total = tl.where(head < HEADS, total, 1.0)
    target = output + (token * HEADS + head)[:, None] * SIZE + feature[None, :]
    tl.store(target, (sums / total[:, None]).to(output.dtype.element_ty), mask=within)
