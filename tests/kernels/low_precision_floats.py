"""FP8 and FP4 numbers for tests of kernels with 8-bit and 4-bit floats."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from penstock.kernels import small_floats

FP4_VALUES = [sign * magnitude for sign in (1.0, -1.0) for magnitude in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]


def random_fp8(shape: torch.Size, device: str) -> Tensor:
    """Random FP8 (e4m3fn) numbers that are not negative, from all magnitudes including 0, as float32."""
    return torch.randint(0, 127, shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


@triton.jit
def interpreted_fp4_pair(codes: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Replaces `small_floats.fp4_pair`, whose inline PTX the interpreter cannot execute."""
    low, high = small_floats.fp4_to_float16(codes & 15).to(tl.float32), small_floats.fp4_to_float16(codes >> 4).to(tl.float32)
    return (low * 16384.0).to(dtype), (high * 16384.0).to(dtype)
