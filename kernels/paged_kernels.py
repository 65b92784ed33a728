"""The programs of `paged_attention`, in Triton: pointers and ints, no plan. What they are given is described there.

A program of `attend` is one item and one key head. All query heads of that key head are packed in its tile, so keys and values
are read once. It goes through its keys in tiles, most of which nothing hides, and keeps the usual running maximum and sum (Dao et
al. 2022, arXiv:2205.14135), in units of log 2.
"""

import triton
import triton.language as tl

from .early import wait


@triton.jit
def dot(left: tl.tensor, right: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    """The product in float32; float32 operands are not rounded."""
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def slots_of(
    pages: tl.tensor, begin: tl.tensor, end: tl.tensor, PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """Slots of keys `begin` to `begin + KEYS`: [KEYS] int64. MASKED: those from `end` on are of page 0."""
    if PAGE % KEYS == 0:  # the tile lies in one page
        page = tl.load(pages + begin // PAGE).to(tl.int64)
        slots = page * PAGE + begin % PAGE + tl.arange(0, KEYS)
    else:
        key = (begin + tl.arange(0, KEYS)).to(tl.uint32)  # quotients of what has a sign take three more instructions
        if MASKED:
            page = tl.load(pages + key // PAGE, mask=key < end, other=0).to(tl.int64)
        else:
            page = tl.load(pages + key // PAGE).to(tl.int64)
        slots = page * PAGE + key % PAGE
    return slots


@triton.jit
def _rows(places: tl.tensor, shown: tl.tensor, within: tl.tensor, MASKED: tl.constexpr, WHOLE: tl.constexpr) -> tl.tensor:
    """Of the cache, one of each key: [KEYS, FEATURES]. MASKED: of keys that are `shown`; WHOLE: all features are `within`."""
    if MASKED:  # what is hidden from all must not even be loaded: it may be no number, and 0 times that is none
        rows = tl.load(places, mask=shown[:, None] & within[None, :], other=0.0)
    elif WHOLE:
        rows = tl.load(places)
    else:
        rows = tl.load(places, mask=within[None, :], other=0.0)
    return rows


@triton.jit
def visible_of(
    key: tl.tensor,
    limit: tl.tensor,
    position: tl.tensor,
    positions: tl.tensor,
    word_0: tl.tensor,
    word_1: tl.tensor,
    word_2: tl.tensor,
    word_3: tl.tensor,
    context: tl.tensor,
    tree: tl.tensor,
    window: tl.tensor,
    end: tl.tensor,
    WINDOWED: tl.constexpr,
    TREES: tl.constexpr,
) -> tl.tensor:
    """Which keys each row of a tile sees, in order up to its limit: [ROWS, KEYS]. key: [KEYS]; limit, position, words: [ROWS]."""
    inside = key < end
    visible = (key[None, :] <= limit[:, None]) & inside[None, :]
    key_position = key
    if TREES:
        node = key - context
        of_tree = (node >= tl.where(tree >= 0, 0, 1 << 30)) & inside
        low = tl.where((node < 32)[None, :], word_0[:, None], word_1[:, None])
        high = tl.where((node < 96)[None, :], word_2[:, None], word_3[:, None])
        sees = (tl.where((node < 64)[None, :], low, high) >> (node & 31)[None, :]) & 1
        visible = tl.where(of_tree[None, :], sees == 1, visible)
        if WINDOWED:
            key_position = tl.where(of_tree, tl.load(positions + tree + node, mask=of_tree, other=0), key)
    if WINDOWED:
        visible = visible & (position[:, None] - key_position[None, :] < window)
    return visible


@triton.jit
def _logits(
    query: tl.tensor,
    key: tl.tensor,
    turned_query: tl.tensor,
    turned_key: tl.tensor,
    factor: tl.tensor,
    softcap: tl.tensor,
    LATENT: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:
    """Times `unit` of `_through` they are in units of log 2. query: [ROWS, PADDED]; key: [KEYS, PADDED]."""
    logits = dot(query, tl.trans(key.to(query.dtype)), WIDEN)
    if LATENT:
        logits += dot(turned_query, tl.trans(turned_key.to(query.dtype)), WIDEN)
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), and factor holds 2 log2(e) / softcap.
        logits = softcap * 1.4426950408889634 * (1.0 - 2.0 / (tl.exp2(logits * factor) + 1.0))
    return logits


@triton.jit
def _beside(sink: tl.tensor, best: tl.tensor) -> tl.tensor:
    """What a sink adds to a sum of exponentials over `best`. Of one that is far above all logits 2^100 is as good as all."""
    return tl.exp2(tl.minimum(sink * 1.4426950408889634 - best, 100.0))


@triton.jit
def _through(
    sums: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    query: tl.tensor,
    turned_query: tl.tensor,
    cache: tl.tensor,
    pages: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    end: tl.tensor,
    lowest: tl.tensor,
    factor: tl.tensor,
    softcap: tl.tensor,
    limit: tl.tensor,
    position: tl.tensor,
    token: tl.tensor,
    positions: tl.tensor,
    masks: tl.tensor,
    context: tl.tensor,
    tree: tl.tensor,
    window: tl.tensor,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TURNED: tl.constexpr,
    TURNED_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    TREES: tl.constexpr,
    WIDEN: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Adds the keys from `first` to `last` to sums [ROWS, PADDED], best and total [ROWS]. Not MASKED: whole tiles, all seen.

    TURNED: of keys that are latents, and values, too, the features behind these; 0: values are by themselves; WIDTH: of a slot.
    """
    feature = tl.arange(0, PADDED)
    within = feature < SIZE
    turned = tl.arange(0, TURNED_PADDED)
    word_0 = token
    word_1 = token
    word_2 = token
    word_3 = token
    if MASKED and TREES:
        words = masks + token * 4
        word_0 = tl.load(words, mask=token >= 0, other=0)
        word_1 = tl.load(words + 1, mask=token >= 0, other=0)
        word_2 = tl.load(words + 2, mask=token >= 0, other=0)
        word_3 = tl.load(words + 3, mask=token >= 0, other=0)
    unit = 1.0 if CAPPED else factor
    for begin in tl.range(first, last, KEYS, num_stages=STAGES):
        slots = slots_of(pages, begin, end, PAGE, KEYS, MASKED)
        place = slots[:, None] * WIDTH + feature[None, :]
        key_at = begin + tl.arange(0, KEYS)
        shown = (key_at < end) & (key_at >= lowest)
        key = _rows(cache + place, shown, within, MASKED, PADDED == SIZE)
        turned_key = key
        if TURNED > 0:
            turned_place = cache + slots[:, None] * WIDTH + SIZE + turned[None, :]
            turned_key = _rows(turned_place, shown, turned < TURNED, MASKED, TURNED_PADDED == TURNED)
        logits = _logits(query, key, turned_query, turned_key, factor, softcap, TURNED > 0, CAPPED, WIDEN)
        if MASKED:
            visible = visible_of(
                key_at, limit, position, positions, word_0, word_1, word_2, word_3, context, tree, window, end, WINDOWED, TREES
            )
            logits = tl.where(visible, logits, float("-inf"))
        higher = tl.maximum(best, tl.max(logits, 1) * unit)
        base = higher
        if MASKED:  # a row that has seen nothing yet
            base = tl.where(higher == float("-inf"), 0.0, higher)
        part = tl.exp2(logits * unit - base[:, None])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(part, 1)
        best = higher
        sums = sums * fade[:, None]
        value = key
        if TURNED == 0:
            value = _rows(cache + KV_HEADS * SIZE + place, shown, within, MASKED, PADDED == SIZE)
        value = value.to(query.dtype)
        sums += dot(part.to(value.dtype), value, WIDEN)
    return sums, best, total


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
    WIDTH: tl.constexpr,
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
    EARLY: tl.constexpr,
) -> None:
    """One item and one key head. Key heads of an item are neighbours, since their keys are in memory.

    TURNED: features of keys behind those that are values, too. Then KV_HEADS are parts of the query heads, all with the same keys.
    """
    wait(EARLY)
    head = tl.program_id(0) % KV_HEADS
    item = items + (tl.program_id(0) // KV_HEADS) * 8
    queries = tl.load(item + 1)
    if queries == 0:
        return
    start = tl.load(item)
    table = pages + tl.load(item + 2)
    first = tl.load(item + 3)
    end = tl.load(item + 4)
    context = tl.load(item + 5)
    tree = tl.load(item + 6)
    partial = tl.load(item + 7)

    row = tl.arange(0, ROWS)
    asked = row // RATIO
    valid = asked < queries
    token = tl.load(listed + start + asked, mask=valid, other=-1)
    position = tl.load(positions + token, mask=valid, other=-1)
    query_head = head * RATIO + row % RATIO
    feature = tl.arange(0, PADDED)
    held = valid[:, None] & (feature < SIZE)[None, :]
    source = query + token.to(tl.int64)[:, None] * query_stride + (query_head * (SIZE + TURNED))[:, None]
    asking = tl.load(source + feature[None, :], mask=held, other=0.0)
    turned_asking = asking
    if TURNED > 0:
        turned = tl.arange(0, TURNED_PADDED)
        turned_asking = tl.load(source + SIZE + turned[None, :], mask=valid[:, None] & (turned < TURNED)[None, :], other=0.0)

    factor = scale
    if SCALED:
        factor *= tl.load(scales + head)
    if CAPPED:
        factor = factor * 2.0 / softcap
    factor *= 1.4426950408889634

    sums = tl.zeros([ROWS, PADDED], tl.float32)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    own = cache
    if TURNED == 0:
        own += head * SIZE

    nearest = tl.min(tl.where(valid, position, 1 << 30), 0)
    limit = tl.where(tree == -2, end - 1, position)  # of a whole row each query sees all keys
    plain = tl.where(tree == -2, end, tl.minimum(end, nearest + 1))  # before this key none is hidden, but by the window
    if TREES:
        plain = tl.where(tree >= 0, tl.minimum(end, context), plain)
    lowest = first
    if WINDOWED:
        lowest = tl.maximum(first, nearest - window + 1)
        first += (lowest - first) // KEYS * KEYS
    tail = first
    EDGE: tl.constexpr = KEYS if SINGLE or KEYS < 64 else 64  # masks take registers, and of a large tile most may be hidden
    if not SINGLE:  # what hides nothing need not be masked; where memory is slower than masking, one loop starts sooner
        middle = first
        if WINDOWED:
            free = tl.minimum(tl.max(position, 0) - window + 1, end)  # from here on the window hides nothing from anybody
            middle = first + tl.cdiv(tl.maximum(free - first, 0), KEYS) * KEYS
            sums, best, total = _through(
                sums, best, total, asking, turned_asking, own, table, first, middle, end, lowest, factor, softcap, limit, position,
                token, positions, masks, context, tree, window,
                KV_HEADS, SIZE, PADDED, TURNED, TURNED_PADDED, WIDTH, PAGE, EDGE, 3, WINDOWED, CAPPED, TREES, WIDEN, True,
            )  # fmt: skip
        tail = middle + tl.maximum(plain - middle, 0) // KEYS * KEYS
        sums, best, total = _through(
            sums, best, total, asking, turned_asking, own, table, middle, tail, end, lowest, factor, softcap, limit, position,
            token, positions, masks, context, tree, window,
            KV_HEADS, SIZE, PADDED, TURNED, TURNED_PADDED, WIDTH, PAGE, KEYS, STAGES, WINDOWED, CAPPED, TREES, WIDEN, False,
        )  # fmt: skip
    sums, best, total = _through(
        sums, best, total, asking, turned_asking, own, table, tail, end, end, lowest, factor, softcap, limit, position, token,
        positions, masks, context, tree, window,
        KV_HEADS, SIZE, PADDED, TURNED, TURNED_PADDED, WIDTH, PAGE, EDGE, STAGES if SINGLE else 3, WINDOWED, CAPPED, TREES, WIDEN,
        True,
    )  # fmt: skip

    if SINKS:  # of partials, `merge` adds it once
        sink = _beside(tl.load(sinks + query_head, mask=valid, other=0.0), best)
        total += tl.where(partial < 0, sink, 0.0)
    answer = sums / tl.where(total > 0, total, 1.0)[:, None]
    if SCALED:
        answer *= tl.load(scales + KV_HEADS + head)
    if partial < 0:
        # Loaded once more, in other words lest it be kept: in the loops registers are scarce.
        token = tl.load(listed + start + asked, mask=valid, other=0, cache_modifier=".ca")
        target = (token.to(tl.int64) * (KV_HEADS * RATIO) + query_head)[:, None] * SIZE + feature[None, :]
        tl.store(output + target, answer.to(output.dtype.element_ty), mask=held)
    else:
        at = (partial + asked).to(tl.int64) * (KV_HEADS * RATIO) + query_head
        tl.store(partials + at[:, None] * SIZE + feature[None, :], answer, mask=held)
        tl.store(weights + at, best + tl.log2(tl.where(total > 0, total, 1.0)), mask=valid)  # -inf: it saw nothing


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
    SINKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One token and one head: its partials, each weighed by the sum of exponentials that is behind it."""
    wait(EARLY)
    entry = entries + (tl.program_id(0) // HEADS) * 4
    head = tl.program_id(0) % HEADS
    count = tl.load(entry + 2)
    if count == 0:
        return
    token = tl.load(entry).to(tl.int64)
    own = pieces + tl.load(entry + 1)
    feature = tl.arange(0, PADDED)
    within = feature < SIZE
    sums = tl.zeros([PADDED], tl.float32)
    best = float("-inf")
    total = 0.0
    for first in tl.range(0, count, PIECES):
        piece = first + tl.arange(0, PIECES)
        there = piece < count
        at = tl.load(own + piece, mask=there, other=0).to(tl.int64) * HEADS + head
        weight = tl.load(weights + at, mask=there, other=float("-inf"))
        higher = tl.maximum(best, tl.max(weight, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        part = tl.exp2(weight - base)
        fade = tl.exp2(best - base)
        partial = tl.load(partials + at[:, None] * SIZE + feature[None, :], mask=there[:, None] & within[None, :], other=0.0)
        sums = sums * fade + tl.sum(partial * part[:, None], 0)
        total = total * fade + tl.sum(part, 0)
        best = higher
    if SINKS:
        total += _beside(tl.load(sinks + head), best)
    tl.store(output + (token * HEADS + head) * SIZE + feature, (sums / total).to(output.dtype.element_ty), mask=within)
