"""Floats of 4 and 8 bits, for tests of kernels that make numbers of them."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from penstock.kernels import small_floats

FOUR_BITS = [sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]


def eight_bits(shape: torch.Size, device: str) -> Tensor:
    """Random ones that are not negative, of every size there is, 0 included: float32."""
    return torch.randint(0, 127, shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


@triton.jit
def looked_up(codes: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """As `small_floats.fp4_pair`, which the interpreter can't execute."""
    low, high = small_floats.fp4_to_float16(codes & 15).to(tl.float32), small_floats.fp4_to_float16(codes >> 4).to(tl.float32)
    return (low * 16384.0).to(dtype), (high * 16384.0).to(dtype)
