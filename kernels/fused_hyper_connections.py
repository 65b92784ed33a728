"""`hyper_connections.mix` in Triton, which is the reference: a program for each token, which goes through its streams twice.

streams[i] = streams[i] + given[i] * more
shares = sigmoid(scale * (matrix @ streams / rms(streams)) + base)      of all streams as one row
mixed = sum over streams of (shares[i] + epsilon) * streams[i]
gives[i] = magnitude * shares[COUNT + i] + epsilon                      how the next output is added to stream i
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import WARP, Compilation
from .reference import HyperConnectionWeights

BLOCK = 512  # features at once: with so many the matrix has a tile of 16 rows, 16 numbers a thread
WARPS = 4
# Least features at once. Streams are changed in place, and in a block with fewer features than threads several threads hold the
# same one, which each reads by itself, perhaps after another has written it.
FEWEST = WARP * WARPS


@triton.jit
def mixing_kernel(
    streams: tl.tensor,  # [tokens, COUNT, SIZE], dense
    more: tl.tensor,  # [tokens, SIZE], dense; unused without ADD
    given: tl.tensor,  # [tokens, COUNT] float32, dense; unused without ADD
    matrix: tl.tensor,  # [KINDS * COUNT, COUNT * SIZE] float32, dense
    scale: tl.tensor,  # [KINDS * COUNT] float32
    base: tl.tensor,  # as `scale`
    mixed: tl.tensor,  # [tokens, SIZE], dense
    gives: tl.tensor,  # [tokens, COUNT] float32, dense; unused where KINDS is 1
    magnitude: tl.tensor,
    share_epsilon: tl.tensor,
    epsilon: tl.tensor,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    KINDS: tl.constexpr,  # 2: write shares, too
    SHARES: tl.constexpr,  # KINDS * COUNT, rounded up to a power of two
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """Adds the last output to one token's streams, and computes the next input and its write shares."""
    token = tl.program_id(0).to(tl.int64)
    own = streams + token * COUNT * SIZE
    share = tl.arange(0, SHARES)
    there = share < KINDS * COUNT
    products = tl.zeros([SHARES], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, SIZE, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < SIZE
        if ADD:
            added = tl.load(more + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        for stream in tl.static_range(COUNT):
            place = own + stream * SIZE + column
            values = tl.load(place, mask=inside, other=0.0)
            if ADD:
                part = tl.load(given + token * COUNT + stream)
                values = (values.to(tl.float32) + part * added).to(streams.dtype.element_ty)
                tl.store(place, values, mask=inside)
            wide = values.to(tl.float32)
            squares += wide * wide
            tile = matrix + share[:, None] * (COUNT * SIZE) + stream * SIZE + column[None, :]
            weights = tl.load(tile, mask=there[:, None] & inside[None, :], other=0.0)
            products += tl.sum(weights * wide[None, :], 1)
    tl.debug_barrier()  # what was stored is read again, perhaps by other threads
    normal = products * tl.rsqrt(tl.sum(squares, 0) / (COUNT * SIZE) + epsilon)
    factors, offsets = tl.load(scale + share, mask=there, other=0.0), tl.load(base + share, mask=there, other=0.0)
    found = 1.0 / (1.0 + tl.exp(-(normal * factors + offsets)))
    if KINDS > 1:
        giving = there & (share >= COUNT)
        tl.store(gives + token * COUNT + share - COUNT, found * magnitude + share_epsilon, mask=giving)
    for first in range(0, SIZE, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < SIZE
        sums = tl.zeros([BLOCK], tl.float32)
        for stream in tl.static_range(COUNT):
            seen = tl.sum(tl.where(share == stream, found, 0.0), 0) + share_epsilon
            sums += seen * tl.load(own + stream * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(mixed + token * SIZE + column, sums.to(mixed.dtype.element_ty), mask=inside)


def mix(
    streams: Tensor, more: Tensor | None, given: Tensor | None, shares: HyperConnectionWeights, epsilon: float
) -> tuple[Tensor, Tensor | None]:
    """As `hyper_connections.mix`, without mixing of streams."""
    tokens, count, size = streams.shape
    both = more is not None and given is not None
    assert all(x.is_contiguous() for x in (streams, more, given, shares.matrix) if x is not None)
    mixed = torch.empty(tokens, size, dtype=streams.dtype, device=streams.device)
    gives = torch.empty(tokens, count, dtype=torch.float32, device=streams.device) if len(shares.scale) > count else None
    if tokens:
        mixing_kernel[(tokens,)](
            streams,
            more if both else streams,
            given if both else shares.scale,
            shares.matrix,
            shares.scale,
            shares.base,
            mixed,
            gives if gives is not None else shares.scale,
            shares.magnitude,
            shares.epsilon,
            epsilon,
            **_constants(count, size, len(shares.scale) // count, both),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return mixed, gives


def _constants(count: int, size: int, kinds: int, add: bool) -> dict[str, object]:
    return {
        "COUNT": count,
        "SIZE": size,
        "KINDS": kinds,
        "SHARES": max(2, triton.next_power_of_2(kinds * count)),
        "BLOCK": min(BLOCK, max(FEWEST, triton.next_power_of_2(size))),
        "ADD": add,
    }


def compilation(kernel: triton.JITFunction, name: str, dtype: str, constants: dict[str, object]) -> Compilation:
    """The compilation of this kernel, or of that of `fused_manifold_connections`, which takes the same tensors."""
    pointers = dict.fromkeys(("streams", "more", "mixed"), f"*{dtype}")
    pointers |= dict.fromkeys(("given", "matrix", "scale", "base", "gives"), "*fp32")
    numbers = dict.fromkeys(("magnitude", "share_epsilon", "epsilon"), "fp32")
    return Compilation(kernel=kernel, name=name, types=pointers | numbers, constants=constants, warps=WARPS, hot=True)


def compilations() -> list[Compilation]:
    """Hy 4's four streams: the first part, others, and the output matrix."""
    cases = (("bf16", 2, False), ("bf16", 2, True), ("bf16", 1, True), ("fp16", 2, True), ("fp32", 2, True))
    return [
        compilation(mixing_kernel, f"mixing {dtype}{' last' * (kinds == 1)}{' add' * add}", dtype, _constants(4, 2816, kinds, add))
        for dtype, kinds, add in cases
    ]
