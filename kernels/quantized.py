"""Weights of few bits: 4 or 8 for each number, and a scale for each group of an output's inputs. Knows tensors only.

What they mean is `unpacked`. They save memory, and the time that few rows take, which is the time to read the weights; products are
computed with rows as they are, whatever a checkpoint says of activations. On an accelerator `fused_quantized` multiplies with the
codes themselves. On a CPU torch does so for 4 bits beside bfloat16: measured 2026-11-23 on a Xeon with AVX-512 and bfloat16 units, one
thread, 1024 x 5632 in groups of 64, us for 1 / 4 / 16 / 64 rows, against the same weight in bfloat16:

    torch, 4 bits               378 / 798 / 2800 / 12000
    oneDNN, packed, bfloat16    986 / 1370 / 2660 / 9130
    torch, 8 bits               1105 / 1374 / 3579 / 13989

Everything else is unpacked once, when it is loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from .choose import triton_for
from .linear import Product, Weight

BITS = {"int4": 4, "int8": 8, "fp8": 8}
MIDDLES = {"int4": 8, "int8": 128}
LARGEST_FP8 = 448.0
GROUP = 64  # inputs that share a scale where weights of 4 bits are rounded here; those of 8 bits have one for each output
CPU_GROUPS = (256, 128, 64, 32)  # that torch knows; and there must be a multiple of so many outputs and inputs
CPU_OUTPUTS, CPU_INPUTS = 16, 32


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [out, in]."""

    kind: str  # of BITS
    codes: Tensor  # [out, in] uint8: integers, or the bits of float8_e4m3fn
    scales: Tensor  # [out, groups] float32: in / groups inputs in a row share one
    zeros: Tensor | None  # [out, groups] uint8: the integers that mean 0; None: all are MIDDLES', and of floats there are none

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def scaled(self, factor: float) -> "Codes":
        """Times a number."""
        return replace(self, scales=self.scales * factor)

    def refined(self, group: int) -> "Codes":
        """The same in groups of `group` inputs, which divides those that there are."""
        times = self.group // group
        zeros = self.zeros.repeat_interleave(times, 1) if self.zeros is not None else None
        return replace(self, scales=self.scales.repeat_interleave(times, 1), zeros=zeros) if times > 1 else self

    def part(self, dimension: int, start: int, stop: int) -> "Codes":
        """Those of some outputs (dimension 0) or inputs (1)."""
        found = self.refined(gcd(self.group, start, stop)) if dimension else self
        places = (start // found.group, stop // found.group) if dimension else (start, stop)

        def cut(tensor: Tensor, first: int, last: int) -> Tensor:
            return tensor.narrow(dimension, first, last - first).contiguous()

        zeros = cut(found.zeros, *places) if found.zeros is not None else None
        return Codes(found.kind, cut(found.codes, start, stop), cut(found.scales, *places), zeros)


def joined(parts: Sequence[Codes]) -> Codes:
    """Weights with the same inputs, side by side."""
    group = gcd(*(part.group for part in parts))
    same = [part.refined(group) for part in parts]
    zeros = None
    if any(part.zeros is not None for part in same):
        zeros = torch.cat([_zeros(part) for part in same])
    return Codes(same[0].kind, torch.cat([part.codes for part in same]), torch.cat([part.scales for part in same]), zeros)


def _zeros(codes: Codes) -> Tensor:
    given = codes.zeros
    return given if given is not None else torch.full_like(codes.scales, MIDDLES[codes.kind], dtype=torch.uint8)


def unpacked(codes: Codes, dtype: torch.dtype) -> Tensor:
    """[out, in]."""
    if codes.kind == "fp8":
        values = codes.codes.view(torch.float8_e4m3fn).float().unflatten(1, (-1, codes.group))
    else:
        values = codes.codes.unflatten(1, (-1, codes.group)).float() - _zeros(codes).unsqueeze(2)
    return values.mul_(codes.scales.unsqueeze(2)).flatten(1).to(dtype)


def quantize(weight: Tensor, kind: str) -> Codes:
    """The nearest to a weight [out, in]. 4 bits go from each group's least number to its greatest, 8 bits are even about 0."""
    group = gcd(GROUP, weight.shape[1]) if kind == "int4" else weight.shape[1]
    values = weight.float().unflatten(1, (-1, group))
    if kind == "int4":
        least, greatest = values.amin(2).clamp(max=0), values.amax(2).clamp(min=0)
        scales = _steps((greatest - least) / 15)
        zeros = (-least / scales).round()
        codes = (values / scales.unsqueeze(2)).round_().add_(zeros.unsqueeze(2)).clamp_(0, 15)
        return Codes(kind, codes.flatten(1).byte(), scales, zeros.byte())
    largest = values.abs().amax(2)
    if kind == "int8":
        scales = _steps(largest / 127)
        return Codes(kind, (values / scales.unsqueeze(2)).round_().add_(128).flatten(1).byte(), scales, None)
    scales = _steps(largest / LARGEST_FP8)
    return Codes(kind, (values / scales.unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn).view(torch.uint8), scales, None)


def _steps(scales: Tensor) -> Tensor:
    """Of groups that are all 0, any will do."""
    return scales.masked_fill(scales == 0, 1.0)


class Quantized(Weight):
    """A weight that is multiplied with as it is stored."""

    def __init__(self, shape: torch.Size, product: Product, kept: Sequence[Tensor | None]) -> None:
        """kept: what the product reads."""
        self.shape, self.product = shape, product
        self.bytes = sum(tensor.nbytes for tensor in kept if tensor is not None)
        self.compiled = self._plain = None


def lay_out(weight: Tensor | Codes, bias: Tensor | None, exact: bool, dtype: torch.dtype) -> Weight:
    """A weight ready for products with rows of `dtype`; exact: see `Weight`."""
    if isinstance(weight, Tensor):
        return Weight(weight, bias, exact)
    if triton_for(weight.codes):
        from .fused_quantized import by_triton as route
    else:
        route = _by_torch
    found = route(weight, bias, dtype)
    return Quantized(weight.codes.shape, *found) if found else Weight(unpacked(weight, dtype), bias, exact)


def _by_torch(codes: Codes, bias: Tensor | None, dtype: torch.dtype) -> tuple[Product, Sequence[Tensor | None]] | None:
    """torch's product, where it is quick. A row's result does not depend on the rows beside it, to the last bit."""
    outputs, inputs = codes.codes.shape
    group = next((size for size in CPU_GROUPS if codes.group % size == 0), 0)
    if codes.kind != "int4" or dtype != torch.bfloat16 or not group or outputs % CPU_OUTPUTS or inputs % CPU_INPUTS:
        return None
    fine = codes.refined(group)
    shifts = (MIDDLES["int4"] - _zeros(fine).float()) * fine.scales  # there a code less 8 is multiplied, and this added
    pairs = torch.stack((fine.scales.t(), shifts.t()), -1).to(dtype).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.codes.int(), 1)

    def product(x: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed, group, pairs)
        return found if bias is None else found.add_(bias)

    return product, (packed, pairs, bias)
