"""Kernels that begin before the one before them has ended (programmatic dependent launch: CUDA C++ Programming Guide).

Between two kernels of a graph a device stands still for a microsecond or two: the last programs of one end, those of the next are
launched, and ask memory for the first time. A kernel that is launched early has its programs in place by then, and may ask for what
nobody writes: weights. So every kernel that takes part calls `wait` first of all, in all its programs: before it, nothing may be
read that another kernel writes, and nothing may be written. That the one before is over then means that those before it are, too,
since it has waited itself.

Not measured yet, and so off: `enabled` turns it on, on CUDA devices from Hopper on (`benchmarks/gpu_model.py` does).
"""

from functools import cache

import torch
import triton
import triton.language as tl

enabled = False


@triton.jit
def wait(EARLY: tl.constexpr) -> None:
    """Until all kernels before are over; the next one may begin."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(place: tl.tensor, EARLY: tl.constexpr) -> None:
    """Asks for the cache lines that hold what `place` points to. It must be what no kernel writes: nothing is waited for."""
    if EARLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place.to(tl.uint64)], dtype=tl.int32, is_pure=False, pack=1
        )


def on(device: torch.device) -> bool:
    """Whether kernels on `device` begin early. What launches say (`launch_pdl`) and the constant EARLY go together."""
    return enabled and device.type == "cuda" and _able(device)


@cache
def _able(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def options(early: bool) -> dict[str, bool]:
    """Of a launch."""
    return {"launch_pdl": True} if early else {}
