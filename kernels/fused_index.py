"""The sparse attention indexer (DeepSeek-AI 2025, arXiv:2512.02556) in Triton: writing its keys beside the latents, and the scores
that its queries give them.

    cache[slots[token]] = rotate(layer_norm(keys[token]))
    scores[token, j] = sum over heads of weights[token, head] * max(0, query[token, head] * key j)      -inf where masked

A program of the scores takes one query token and the keys of one work item of attention (`work_list`), a tile at a time, with all
heads as the rows of a product. The references are `operations.rotate_and_write_index` and `indexed.scores`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import EARLY_TARGETS, EIGHT_BIT_TARGETS, GENERATIONS, Compilation
from .dependent_launch import begin_early, wait
from .fused_latents import WARPS, angles, constants_of, keep, turn
from .fused_rotary import clamped_for_cache, most_of, rotated
from .indexed import TokenSelection
from .layout import LayerKind
from .paged_attention import INTERPRET, TARGETS, Plan, tiles_of
from .paged_kernels import Visibility, ancestor_masks, dot, slots_of, visible_keys

STAGES = 3  # two tiles of keys are in flight while a third is computed on; AMD gets 2, having little shared memory


@triton.jit
def index_kernel(
    query: tl.tensor,  # [tokens, heads, SIZE], dense
    keys: tl.tensor,  # [tokens, SIZE], dense
    norm: tl.tensor,  # [2, SIZE]
    table: tl.tensor,  # [tokens, 2, 1, TURNED], dense
    slots: tl.tensor,  # [tokens]
    cache: tl.tensor,  # [slots, SIZE]
    heads: tl.tensor,
    cache_stride: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TURNED: tl.constexpr,
    HALF: tl.constexpr,  # half of the rotary features, rounded up to a power of two
    HEADS: tl.constexpr,
    MOST: tl.constexpr,  # the largest number of an 8-bit cache; 0: the cache has the dtype of the keys
    EARLY: tl.constexpr,
) -> None:
    """Layer norm, rotation and cache write of a token's index key, or rotation of HEADS of its index queries."""
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    half, within, cosine, sine = angles(table, token, TURNED, HALF)
    if tl.program_id(1) > 0:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        inside = (head < heads)[:, None] & within[None, :]
        place = query + (token * heads + head)[:, None] * SIZE + half[None, :]
        turn(place, inside, cosine[None, :], sine[None, :], TURNED)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            feature = tl.arange(0, PADDED)
            held = feature < SIZE
            own = keys + token * SIZE
            row = tl.load(own + feature, mask=held, other=0.0)
            wide = row.to(tl.float32)
            mean = tl.sum(wide, 0) / SIZE
            apart = tl.where(held, wide - mean, 0.0)
            scale = tl.rsqrt(tl.sum(apart * apart, 0) / SIZE + epsilon)
            still = _normal(own, norm, feature, held, mean, scale, SIZE)
            low = _normal(own, norm, half, within, mean, scale, SIZE)
            high = _normal(own, norm, half + TURNED // 2, within, mean, scale, SIZE)
            low, high = rotated(low, high, cosine, sine)
            kept = cache + slot * cache_stride
            tl.store(kept + feature, clamped_for_cache(still, MOST).to(cache.dtype.element_ty), mask=held & (feature >= TURNED))
            keep(kept, half, within, low, high, TURNED, MOST)


@triton.jit
def _normal(own, norm, feature, held, mean, scale, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The layer norm of some features, in the dtype of the keys."""
    row = tl.load(own + feature, mask=held, other=0.0)
    gain = tl.load(norm + feature, mask=held, other=0.0).to(tl.float32)
    bias = tl.load(norm + SIZE + feature, mask=held, other=0.0).to(tl.float32)
    return ((row.to(tl.float32) - mean) * scale * gain + bias).to(row.dtype)


def rotate_and_write_index(
    queries: Tensor, keys: Tensor, norm: Tensor, table: Tensor, slots: Tensor, cache: Tensor, epsilon: float
) -> None:
    """`operations.rotate_and_write_index`. All tensors dense but the cache, whose keys are."""
    tokens, heads, size = queries.shape
    assert queries.is_contiguous()
    assert keys.is_contiguous()
    assert norm.is_contiguous()
    assert table.is_contiguous()
    assert cache.stride(3) == 1
    if tokens:
        constants = constants_of(size, table.shape[-1], most_of(cache, queries.dtype))
        index_kernel[(tokens, 1 + triton.cdiv(heads, constants["HEADS"]))](
            queries,
            keys,
            norm,
            table,
            slots,
            cache,
            heads,
            cache.stride(0),
            epsilon,
            **constants,
            num_warps=WARPS,
            enable_fp_fusion=False,
            **begin_early(cache.device),
        )


@triton.jit(do_not_specialize=["first", "count", "length"])  # they differ in every step
def scores_kernel(
    scores: tl.tensor,  # [count, length / MEMBERS] float32
    query: tl.tensor,  # [tokens, HEADS, SIZE], dense
    weights: tl.tensor,  # [tokens, HEADS] float32, dense; unused with PLAIN
    cache: tl.tensor,  # [slots, SIZE]
    items: tl.tensor,
    listed: tl.tensor,
    positions: tl.tensor,
    masks: tl.tensor,
    pages: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    length: tl.tensor,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,  # elements per slot
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    MEMBERS: tl.constexpr,  # of so many tokens one has a key, the last of them (pools)
    TREES: tl.constexpr,
    PLAIN: tl.constexpr,  # one head, whose scores are plain dot products
    WIDEN: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Scores of one query token for the keys of one work item (`work_list`), if it is among the `count` tokens from `first` on."""
    wait(EARLY)
    item = items + tl.program_id(0) * 8
    if tl.program_id(1) >= tl.load(item + 1):
        return
    token = tl.load(listed + tl.load(item) + tl.program_id(1)).to(tl.int64)
    if (token < first) | (token >= first + count):
        return
    table = pages + tl.load(item + 2)
    end = tl.load(item + 4) // MEMBERS
    context = tl.load(item + 5)
    tree = tl.load(item + 6)
    one = tl.arange(0, 1)
    position = tl.load(positions + token + one)
    visibility = Visibility(position, position, token + one, positions, masks, context, tree, 0, end * MEMBERS)
    words = ancestor_masks(visibility, TREES)
    head = tl.arange(0, HEADS_PADDED)
    feature = tl.arange(0, PADDED)
    asked = query + (token * HEADS + head)[:, None] * SIZE + feature[None, :]
    asking = tl.load(asked, mask=(head < HEADS)[:, None] & (feature < SIZE)[None, :], other=0.0)
    weight = (head < HEADS).to(tl.float32)
    if not PLAIN:
        weight = tl.load(weights + token * HEADS + head, mask=head < HEADS, other=0.0)
    target = scores + (token - first) * (length // MEMBERS)
    for begin in tl.range(tl.load(item + 3) // MEMBERS, end, KEYS):
        key_at = begin + tl.arange(0, KEYS)
        place = key_at * MEMBERS + (MEMBERS - 1)
        if MEMBERS > 1:
            page = tl.load(table + place // PAGE, mask=key_at < end, other=0).to(tl.int64)
            slots = page * PAGE + place % PAGE
        else:
            slots = slots_of(table, begin, end, PAGE, KEYS, True)
        key = tl.load(
            cache + slots[:, None] * WIDTH + feature[None, :], mask=(key_at < end)[:, None] & (feature < SIZE)[None, :], other=0.0
        )
        found = dot(asking, tl.trans(key.to(asking.dtype)), WIDEN)
        if not PLAIN:
            found = tl.maximum(found, 0.0)
        # Loaded again for every tile, so that they need not be kept: ptxas would spill on Blackwell. With trees it makes no
        # difference.
        if not TREES and not PLAIN:
            weight = tl.load(weights + token * HEADS + head, mask=head < HEADS, other=0.0)
        score = tl.sum(found * weight[:, None], 0)
        visible = visible_keys(place, visibility, words, False, TREES)
        hidden = tl.max(visible.to(tl.int32), 0) == 0
        tl.store(target + key_at, tl.where(hidden, float("-inf"), score), mask=key_at < end)


def scores(asked: TokenSelection, cache: Tensor, plan: Plan, first: int, count: int, length: int) -> Tensor:
    """The indexer's scores of `count` tokens from `first` on, which see up to `length` keys: [count, length] float32, -inf where
    masked; for pools [count, length / members].

    cache: a layer's index keys, [slots, 1, 1, size], with any stride between slots.
    """
    return _scores(asked.queries, asked.weights, cache, plan, first, count, length, asked.members)


def products(queries: Tensor, cache: Tensor, plan: Plan, first: int, count: int, length: int) -> Tensor:
    """The same for a single head whose scores are plain dot products (blocks): queries [tokens, size]."""
    return _scores(queries.unsqueeze(1), None, cache, plan, first, count, length)


def _scores(
    queries: Tensor, weights: Tensor | None, cache: Tensor, plan: Plan, first: int, count: int, length: int, members: int = 1
) -> Tensor:
    _, heads, size = queries.shape
    result = torch.full((count, length // members), -torch.inf, dtype=torch.float32, device=cache.device)
    launch = plan.launches[0]
    for tile, items, trees in zip(launch.tiles, launch.items, launch.trees, strict=True):
        if len(items):
            scores_kernel[(len(items), tile.rows // launch.kind.ratio)](
                result,
                queries,
                weights if weights is not None else result,
                cache,
                items,
                plan.listed,
                plan.positions,
                plan.masks,
                plan.pages,
                first,
                count,
                length,
                **_score_constants(heads, size, cache.stride(0), plan.page_size, tile.keys, trees, weights is None, members),
                num_warps=WARPS,
                num_stages=2 if torch.version.hip is not None else STAGES,
                enable_fp_fusion=True,
                **begin_early(cache.device),
            )
    return result


def _score_constants(
    heads: int, size: int, width: int, page_size: int, keys: int, trees: bool, plain: bool, members: int
) -> dict[str, object]:
    return {
        "HEADS": heads,
        "HEADS_PADDED": max(16, triton.next_power_of_2(heads)),
        "SIZE": size,
        "PADDED": max(16, triton.next_power_of_2(size)),
        "WIDTH": width,
        "PAGE": page_size,
        "KEYS": keys,
        "MEMBERS": members,
        "TREES": trees,
        "PLAIN": plain,
        "WIDEN": INTERPRET,
    }


def compilations() -> list[Compilation]:
    """DeepSeek's and GLM's heads, beside latents of 512 + 64, and those of pools, or compressed entries, beside 512; and a single
    head, beside heads of 128."""
    found = []
    for dtype, most, early in (("bf16", 0.0, False), ("bf16", 448.0, False), ("fp32", 0.0, False), ("bf16", 0.0, True)):
        pointers = dict.fromkeys(("query", "keys", "norm", "table"), f"*{dtype}")
        pointers |= {"slots": "*i64", "cache": "*fp8e4nv" if most else f"*{dtype}"}
        numbers = {"heads": "i32", "cache_stride": "i32:16", "epsilon": "fp32"}
        constants: dict[str, object] = {**constants_of(128, 64, most), "EARLY": early}
        found.append(
            Compilation(
                kernel=index_kernel,
                name=f"index {dtype}{' fp8' * (most > 0)}{' early' * early}",
                types=pointers | numbers,
                constants=constants,
                warps=WARPS,
                early=early,
                hot=True,
                targets=EIGHT_BIT_TARGETS if most else EARLY_TARGETS if early else (),
            )
        )
    for generation in TARGETS:
        widths = sorted({tile.keys for tile in tiles_of(LayerKind(0, 1, 16, 576, latent=True), torch.bfloat16, generation)})
        found += [_scores_compilation(64, keys, generation) for keys in widths]
        found.append(_scores_compilation(32, widths[-1], generation, trees=True))
        found.append(_scores_compilation(64, widths[-1], generation, eight_bits=True))
        found += [_scores_compilation(heads, widths[-1], generation, members=members) for heads, members in ((32, 16), (64, 4))]
        widths = sorted({tile.keys for tile in tiles_of(LayerKind(0, 1, 16, 128), torch.bfloat16, generation)})
        found += [_scores_compilation(1, keys, generation) for keys in widths]
    return found


def _scores_compilation(
    heads: int, keys: int, generation: int, trees: bool = False, eight_bits: bool = False, members: int = 1
) -> Compilation:
    width = (704 if members == 1 else 768) if heads > 1 else 128
    constants = _score_constants(heads, 128, width, 64, keys, trees, heads == 1, members) | {"EARLY": False}
    signature = {
        "scores": "*fp32",
        "query": "*bf16",
        "weights": "*fp32",
        "cache": "*fp8e4nv" if eight_bits else "*bf16",
        **dict.fromkeys(("items", "listed", "positions", "masks", "pages"), "*i32"),
        **dict.fromkeys(("first", "count", "length"), "i32"),
    }
    marks = ["trees" * trees, "e4m3" * eight_bits, "pools" * (members > 1), GENERATIONS[generation]]
    return Compilation(
        kernel=scores_kernel,
        name=" ".join([f"scores {heads} heads {keys} keys", *filter(None, marks)]),
        types=signature,
        constants=constants,
        warps=WARPS,
        stages=STAGES if generation else 2,
        fuse=True,
        hot=True,
        targets=tuple(name for name in TARGETS[generation] if not (eight_bits and name == "sm_80")),
    )
