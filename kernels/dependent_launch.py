"""Programmatic dependent launch (PDL; CUDA C++ Programming Guide): kernels that begin before the one before them has ended.

Between two kernels of a CUDA graph a device stands still for a microsecond or two: the last programs of one end, those of the next
are launched, and request memory for the first time. A kernel that is launched early has its programs in place by then. All programs
of every kernel that takes part `wait_for_earlier`: before, nothing may be written, and nothing may be read that a kernel writes
which may still run. That the one before is over then means that those before it are, too, since it has waited itself.

On CUDA devices from Hopper on; `enabled` turns it off. Attention takes part, its merge, and rotary before it: measured on an H200,
2026-11-26, steps of an 8 B model with 32 and 256 rows of 1,024 tokens took 5.79 and 15.5 ms, 5.95 and 15.5 without, at 0.880 and
0.858 of the rate that their bytes and operations allow. Attention reads its plan and prefetches its first keys before it waits: one
row of 512 keys takes 6.7 us instead of 7.6, 16 of 2,048 40.0 instead of 41.2 (2026-11-27). The kernels of sampling take part, too,
but for `weigh` and the narrowing: 256 rows greedily in 41 us instead of 43, with filters and penalties in 100 instead of 103.

Matrix products of few rows, norms and activations take no part: each time it took longer. One row, where products let the next
kernel begin when they began themselves: 4.42 ms, 4.17 without (2026-11-26); with prefetches of weights until they may begin 4.77,
4.12 without; where they let it begin when their sums were complete 4.21, 4.13 without, with 32 rows 5.89 and 5.69, with 256 16.1
and 15.8 (2026-11-27). It was no use, either, for products to end with a request to L2 for the next one's weight (3.97 to 4.44 ms,
3.98 without), nor for the last program of a row's attention to merge its partials instead of `merge` (one row of 512 keys 10.1 us,
7.6 with `merge`).
"""

from functools import cache

import torch
import triton
import triton.language as tl

enabled = True


@triton.jit
def let_next_begin(EARLY: tl.constexpr) -> None:
    """Lets the next kernel begin, once all programs of this one have come here, or ended."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(EARLY: tl.constexpr) -> None:
    """Waits until all kernels before are over. Every program does, also one with nothing to do."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait(EARLY: tl.constexpr) -> None:
    """Lets the next kernel begin, then waits until all kernels before are over."""
    let_next_begin(EARLY)
    wait_for_earlier(EARLY)


@triton.jit
def prefetch_lines(line: tl.tensor, EARLY: tl.constexpr) -> None:
    """Prefetches cache lines into L2. line: pointers to them."""
    if EARLY:
        code: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(code, "=r,l", [line.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


def begin_early(device: torch.device) -> dict[str, bool]:
    """How a kernel is launched that may begin early: the constant EARLY, and the option that goes with it."""
    begins = on(device)
    return {"EARLY": begins, **options(begins)}


def on(device: torch.device) -> bool:
    """Whether kernels on `device` begin early."""
    return enabled and device.type == "cuda" and _able(device)


@cache
def _able(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def options(early: bool) -> dict[str, bool]:
    """Launch options of a kernel that begins early."""
    return {"launch_pdl": True} if early else {}
