"""`gated_hyper_connections` in Triton, which is the reference. Before the products a program for each stream of a token:

    streams[i] = streams[i] + given[i] * more
    normal[i] = rms_norm(streams[i])

and behind them, where these have made `gates` and `giving` of `normal`, a program for BLOCK features of a token:

    seen = mean over streams of sigmoid(gates[i]) * normal[i]
    gives[i] = 2 * sigmoid(giving[i])
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import WARP, Compilation

BLOCK, WARPS = 512, 4  # features of a token that a program reads from all of its streams


@triton.jit
def spread_kernel(
    streams: tl.tensor,  # [tokens, COUNT, SIZE], dense
    more: tl.tensor,  # [tokens, SIZE], dense; unused without ADD
    given: tl.tensor,  # [tokens, COUNT] float32, dense; unused without ADD
    gains: tl.tensor,  # [COUNT, SIZE] float32, dense
    normal: tl.tensor,  # [tokens, COUNT, SIZE], dense
    epsilon: tl.tensor,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # no less than the number of threads: see `fused_hyper_connections`
    ADD: tl.constexpr,
) -> None:
    """Adds the last output to one stream of one token, and normalizes it."""
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    place = (token * COUNT + stream) * SIZE + column
    values = tl.load(streams + place, mask=inside, other=0.0)
    if ADD:
        added = tl.load(more + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        values = (values.to(tl.float32) + tl.load(given + token * COUNT + stream) * added).to(streams.dtype.element_ty)
        tl.store(streams + place, values, mask=inside)
    gain = tl.load(gains + stream * SIZE + column, mask=inside, other=0.0)
    tl.store(normal + place, normalized(values, gain, SIZE, epsilon), mask=inside)


@triton.jit
def normalized(values, gain, SIZE: tl.constexpr, epsilon):  # type: ignore[no-untyped-def]
    """RMS norm of a row, in its dtype; zeros beyond its end."""
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)
    return ((wide * scale).to(values.dtype).to(tl.float32) * gain).to(values.dtype)


@triton.jit
def gated_mean_kernel(
    normal: tl.tensor,  # [tokens, COUNT, SIZE], dense
    gates: tl.tensor,  # as `normal`
    giving: tl.tensor,  # [tokens, COUNT]; unused without GIVES
    seen: tl.tensor,  # [tokens, SIZE], dense
    gives: tl.tensor,  # [tokens, COUNT] float32, dense; unused without GIVES
    giving_stride: tl.tensor,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,  # COUNT, rounded up to a power of two
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GIVES: tl.constexpr,
) -> None:
    """The gated mean of some features of one token, and its write shares."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    sums = tl.zeros([BLOCK], tl.float32)
    for stream in tl.static_range(COUNT):
        place = (token * COUNT + stream) * SIZE + column
        gate = tl.load(gates + place, mask=inside, other=0.0).to(tl.float32)
        sums += tl.load(normal + place, mask=inside, other=0.0).to(tl.float32) / (1.0 + tl.exp(-gate))
    tl.store(seen + token * SIZE + column, (sums / COUNT).to(seen.dtype.element_ty), mask=inside)
    if GIVES:
        share = tl.arange(0, PADDED)
        there = share < tl.where(part == 0, COUNT, 0)  # by one program of the token
        logits = tl.load(giving + token * giving_stride + share, mask=there, other=0.0).to(tl.float32)
        tl.store(gives + token * COUNT + share, 2.0 / (1.0 + tl.exp(-logits)), mask=there)


def spread(streams: Tensor, more: Tensor | None, given: Tensor | None, gains: Tensor, epsilon: float) -> Tensor:
    """As `gated_hyper_connections.spread`."""
    tokens, count, size = streams.shape
    both = more is not None and given is not None
    assert all(x.is_contiguous() for x in (streams, more, given, gains) if x is not None)
    normal = torch.empty(tokens, count * size, dtype=streams.dtype, device=streams.device)
    if tokens:
        block, warps = tile(size)
        spread_kernel[(tokens, count)](
            streams,
            more if both else streams,
            given if both else gains,
            gains,
            normal,
            epsilon,
            COUNT=count,
            SIZE=size,
            BLOCK=block,
            ADD=both,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return normal


def tile(size: int) -> tuple[int, int]:
    """The block that holds a whole row, and its warps: 16 numbers a thread."""
    block = max(WARP, triton.next_power_of_2(size))
    assert block <= 32768, f"a norm over {size} elements does not fit into a program's registers"
    return block, min(16, max(1, block // 512))


def gathered(normal: Tensor, gates: Tensor, giving: Tensor | None, count: int) -> tuple[Tensor, Tensor | None]:
    """As `gated_hyper_connections.gathered`."""
    tokens, size = len(normal), normal.shape[1] // count
    assert normal.is_contiguous()
    assert gates.is_contiguous()
    assert giving is None or giving.stride(1) == 1
    seen = torch.empty(tokens, size, dtype=normal.dtype, device=normal.device)
    gives = torch.empty(tokens, count, dtype=torch.float32, device=normal.device) if giving is not None else None
    if tokens:
        gated_mean_kernel[(tokens, triton.cdiv(size, BLOCK))](
            normal,
            gates,
            giving if giving is not None else gates,
            seen,
            gives if gives is not None else seen,
            giving.stride(0) if giving is not None else 0,
            **_constants(count, size, giving is not None),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return seen, gives


def _constants(count: int, size: int, gives: bool) -> dict[str, object]:
    padded = max(2, triton.next_power_of_2(count))
    return {"COUNT": count, "PADDED": padded, "SIZE": size, "BLOCK": min(BLOCK, triton.next_power_of_2(size)), "GIVES": gives}


def compilations() -> list[Compilation]:
    """Qwen 4 Exp's four streams: the first part, others, and the output matrix."""
    found, (block, warps) = list[Compilation](), tile(2048)
    for dtype in ("bf16", "fp32"):
        pointers = dict.fromkeys(("streams", "more", "normal"), f"*{dtype}") | dict.fromkeys(("given", "gains"), "*fp32")
        for add in (False, True):
            constants: dict[str, object] = {"COUNT": 4, "SIZE": 2048, "BLOCK": block, "ADD": add}
            found.append(
                Compilation(
                    kernel=spread_kernel,
                    name=f"spread {dtype}{' add' * add}",
                    types=pointers | {"epsilon": "fp32"},
                    constants=constants,
                    warps=warps,
                    hot=True,
                )
            )
        for gives in (True, False):
            types = dict.fromkeys(("normal", "gates", "giving", "seen", "gives"), f"*{dtype}")
            types |= {"gives": "*fp32"} if gives else {}
            found.append(
                Compilation(
                    kernel=gated_mean_kernel,
                    name=f"gathering {dtype}{'' if gives else ' last'}",
                    types=types | {"giving_stride": "i32"},
                    constants=_constants(4, 2048, gives),
                    warps=WARPS,
                    hot=True,
                )
            )
    return found
