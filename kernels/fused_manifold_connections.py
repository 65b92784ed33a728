"""`hyper_connections.mix` in Triton, where streams are mixed with each other (mHC): a program for each token, which goes through
its streams twice. That function is the reference.

    streams[i] = sum over j of given's cross[j, i] * streams[j] + given's gives[i] * more
    logits = scale * (matrix @ streams / rms(streams)) + base               of all streams as one row; three parts
    mixed = sum over streams of (sigmoid(first part)[i] + epsilon) * streams[i]         without shares: the mean of streams
    gives = magnitude * sigmoid(second part)
    cross = third part, [COUNT, COUNT], made nearly doubly stochastic by ROUNDS rounds of Sinkhorn and Knopp
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import Compilation
from .fused_hyper_connections import FEWEST, WARPS, compilation
from .reference import HyperConnectionWeights

BLOCK = 128  # features at once: with so many the matrix of four streams has a tile of 32 rows, 32 numbers a thread


@triton.jit
def manifold_kernel(
    streams: tl.tensor,  # [tokens, COUNT, SIZE], dense
    more: tl.tensor,  # [tokens, SIZE], dense; unused without ADD
    given: tl.tensor,  # [tokens, COUNT + COUNT**2] float32, dense; unused without ADD
    matrix: tl.tensor,  # [(2 + COUNT) * COUNT, COUNT * SIZE] float32, dense; with LAST, [COUNT, COUNT * SIZE]
    scale: tl.tensor,  # [(2 + COUNT) * COUNT] float32, or [COUNT]
    base: tl.tensor,  # as `scale`
    mixed: tl.tensor,  # [tokens, SIZE], dense
    gives: tl.tensor,  # as `given`, but another tensor
    magnitude: tl.tensor,
    share_epsilon: tl.tensor,
    epsilon: tl.tensor,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,  # COUNT, rounded up to a power of two
    SIZE: tl.constexpr,
    SHARES: tl.constexpr,  # (2 + COUNT) * COUNT, rounded up to a power of two
    ROUNDS: tl.constexpr,
    MEAN: tl.constexpr,  # the mean of streams is the input, and there are no write shares
    LAST: tl.constexpr,  # there are no write shares
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """Mixes one token's streams, adds the last output, and computes the next input and its shares."""
    token = tl.program_id(0).to(tl.int64)
    own, width = streams + token * COUNT * SIZE, COUNT + COUNT * COUNT
    share, stream = tl.arange(0, SHARES), tl.arange(0, PADDED)
    there, known = share < (COUNT if LAST else (2 + COUNT) * COUNT), stream < COUNT
    products, squares = tl.zeros([SHARES], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, SIZE, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < SIZE
        places = own + stream[:, None] * SIZE + column[None, :]
        values = tl.load(places, mask=known[:, None] & inside[None, :], other=0.0)
        if ADD:
            tl.debug_barrier()  # all threads have read before any writes
            before = values.to(tl.float32)
            added = tl.load(more + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        for target in tl.static_range(COUNT):
            if ADD:
                parts = tl.load(given + token * width + COUNT + stream * COUNT + target, mask=known, other=0.0)
                sums = tl.sum(parts[:, None] * before, 0) + tl.load(given + token * width + target) * added
                row = sums.to(streams.dtype.element_ty)
                tl.store(own + target * SIZE + column, row, mask=inside)
            else:
                row = tl.sum(tl.where(stream[:, None] == target, values.to(tl.float32), 0.0), 0)
            if not MEAN:
                wide = row.to(tl.float32)
                squares += wide * wide
                tile = matrix + share[:, None] * (COUNT * SIZE) + target * SIZE + column[None, :]
                weights = tl.load(tile, mask=there[:, None] & inside[None, :], other=0.0)
                products += tl.sum(weights * wide[None, :], 1)
    tl.debug_barrier()  # what was stored is read again, perhaps by other threads
    seen = known.to(tl.float32) / COUNT
    if not MEAN:
        normal = products * tl.rsqrt(tl.sum(squares, 0) / (COUNT * SIZE) + epsilon)
        factors, offsets = tl.load(scale + share, mask=there, other=0.0), tl.load(base + share, mask=there, other=0.0)
        logits = normal * factors + offsets
        found = 1.0 / (1.0 + tl.exp(-logits))
        seen = tl.sum(tl.where(share[None, :] == stream[:, None], found[None, :], 0.0), 1) + share_epsilon
    if not MEAN and not LAST:
        out = gives + token * width + share - COUNT
        # Mixing logits are stored as they are, to be loaded again as a matrix.
        tl.store(out, tl.where(share < 2 * COUNT, found * magnitude, logits), mask=there & (share >= COUNT))
        tl.debug_barrier()
        cells = gives + token * width + COUNT + stream[:, None] * COUNT + stream[None, :]
        both = known[:, None] & known[None, :]
        cross = _balanced(tl.load(cells, mask=both, other=float("-inf")), both, share_epsilon, ROUNDS)
        tl.debug_barrier()  # all threads have read before any writes
        tl.store(cells, cross, mask=both)
    for first in range(0, SIZE, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < SIZE
        places = own + stream[:, None] * SIZE + column[None, :]
        values = tl.load(places, mask=known[:, None] & inside[None, :], other=0.0).to(tl.float32)
        sums = tl.sum(seen[:, None] * values, 0)
        tl.store(mixed + token * SIZE + column, sums.to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def _balanced(logits, both, epsilon, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`hyper_connections.sinkhorn` of one matrix, padded with 0."""
    most = tl.max(logits, 1)[:, None]
    found = tl.where(both, tl.exp(logits - tl.where(most == float("-inf"), 0.0, most)), 0.0)
    found = found / tl.maximum(tl.sum(found, 1), 1e-30)[:, None] + tl.where(both, epsilon, 0.0)
    found = found / (tl.sum(found, 0) + epsilon)[None, :]
    for _ in range(ROUNDS - 1):
        found = found / (tl.sum(found, 1) + epsilon)[:, None]
        found = found / (tl.sum(found, 0) + epsilon)[None, :]
    return found


def mix(
    streams: Tensor, more: Tensor | None, given: Tensor | None, shares: HyperConnectionWeights | None, epsilon: float
) -> tuple[Tensor, Tensor | None]:
    """As `hyper_connections.mix`, with mixing of streams."""
    tokens, count, size = streams.shape
    both = more is not None and given is not None
    assert all(x.is_contiguous() for x in (streams, more, given, shares.matrix if shares else None) if x is not None)
    mixed = torch.empty(tokens, size, dtype=streams.dtype, device=streams.device)
    rounds = shares.rounds if shares else 0
    gives = torch.empty(tokens, count + count**2, dtype=torch.float32, device=streams.device) if rounds else None
    if tokens:
        manifold_kernel[(tokens,)](
            streams,
            more if both else streams,
            given if both else mixed,
            shares.matrix if shares else mixed,
            shares.scale if shares else mixed,
            shares.base if shares else mixed,
            mixed,
            gives if gives is not None else mixed,
            shares.magnitude if shares else 0.0,
            shares.epsilon if shares else 0.0,
            epsilon,
            **_constants(count, size, rounds, both, shares is not None),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return mixed, gives


def _constants(count: int, size: int, rounds: int, add: bool, shared: bool) -> dict[str, object]:
    """rounds: 0: there are no write shares; shared: whether there are read shares, else the input is the mean."""
    last = shared and not rounds
    return {
        "COUNT": count,
        "PADDED": max(2, triton.next_power_of_2(count)),
        "SIZE": size,
        "SHARES": triton.next_power_of_2(count if last else (2 + count) * count),
        "ROUNDS": rounds,
        "MEAN": not shared,
        "LAST": last,
        "BLOCK": min(BLOCK, max(FEWEST, triton.next_power_of_2(size))),
        "ADD": add,
    }


def compilations() -> list[Compilation]:
    """Four streams of GLM 5 Next, and of DeepSeek V4: the first part, others, and the output matrix."""
    cases = (
        *(("bf16", 20, False, True), ("bf16", 20, True, True), ("fp32", 20, True, True)),
        *(("bf16", 0, True, False), ("bf16", 0, True, True)),
    )
    return [
        compilation(
            manifold_kernel,
            f"crossing {dtype}{' mean' * (not shared)}{' last' * (shared and not rounds)}{' add' * add}",
            dtype,
            _constants(4, 4096, rounds, add, shared),
        )
        for dtype, rounds, add, shared in cases
    ]
