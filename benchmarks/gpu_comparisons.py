"""What checks of kernels have in common: tolerances, errors as shares of them, random inputs, outputs filled with NaN."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from penstock.benchmarks.gpu_measure import Bench

Check = Callable[[Bench, random.Random], float]

TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
# Tolerances of attention: outputs are means of numbers around 1.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Tolerances of elementwise operations, whose steps are rounded to the type one after the other.
ROUNDINGS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SUMS = 2e-4  # tolerance of sums in float32: tensor cores truncate part of each 16 inputs


def error(found: Tensor, expected: Tensor, tolerance: float) -> float:
    """The largest error, as a share of the tolerance; infinite where there is NaN."""
    if found.shape != expected.shape:
        raise ValueError(f"{tuple(found.shape)} where {tuple(expected.shape)} is expected")
    if not found.numel():
        return 0.0
    found, expected = found.double().to(expected.device), expected.double()
    share = (found - expected).abs() / (tolerance + tolerance * expected.abs())
    return float(share.nan_to_num(nan=torch.inf).max())


def relative_error(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """For sums of many products, whose errors are in proportion to the largest."""
    largest = expected.abs().max()
    return error(found / largest, expected / largest, ROUNDINGS[dtype])


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills uninitialized allocations with NaN."""
    honest = torch.empty

    def empty(*arguments: Any, **options: Any) -> Tensor:
        result: Tensor = honest(*arguments, **options)
        return result.fill_(torch.nan) if result.is_floating_point() and result.element_size() > 1 else result

    torch.empty = empty
    try:
        yield
    finally:
        torch.empty = honest


def random_values(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normally distributed, with a standard deviation of 2."""
    return (torch.randn(*shape, device=device) * 2).to(dtype)


def exact_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm in float64."""
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.double()
