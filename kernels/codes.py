"""Quantized weights: 4 or 8 bits for each number, and a scale for each block of inputs of an output. Knows tensors only.

Their meaning is `dequantized`; `quantized` says how products with them are computed.

Scales of 4-bit floats are themselves low-bit, so that a byte holds each: they are powers of 2 ("fp4", which is MXFP4), or
float8_e4m3fn ("nvfp4"). The factor of those is kept apart, 32 bits for each output: products of both would be rounded, and take
four bytes each. In checkpoints a whole matrix has one factor; fused matrices bring one each.

Where GPTQ has quantized inputs in the order of their activations (act-order), those that share a scale are not adjacent. Here
columns are sorted so that they are, and rows are put into that order before they are multiplied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

BITS = {"int4": 4, "int8": 8, "fp8": 8, "fp4": 4, "nvfp4": 4}
MIDDLES = {"int4": 8, "int8": 128}  # zero points of integers that have none of their own
LARGEST_FP8 = 448.0  # the largest float8_e4m3fn
# 4-bit floats, E2M1 (Rouhani et al. 2023, arXiv:2310.10537): a sign bit, two exponent bits, and one mantissa bit.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP4_BLOCKS = {"fp4": 32, "nvfp4": 16}  # inputs that share a scale
PIECE = 32  # most inputs of a block where some of its columns may belong to no input
BLOCK = 64  # inputs per scale where weights are quantized to 4 bits here; with 8 bits there is one scale for each output


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight [out, in]: codes, scales, and what else its format has."""

    kind: str  # a key of BITS
    codes: Tensor  # [out, in] uint8: integers, the bits of float8_e4m3fn, or indices into FP4
    scales: Tensor  # [out, blocks] float32: in / blocks inputs in a row share one; for FP4 kinds low-bit values
    zeros: Tensor | None = None  # [out, blocks] uint8: zero points; None: all are MIDDLES'; floats have none
    factors: Tensor | None = None  # [out] float32: factors of scales, for FP4 kinds only; None: 1
    order: Tensor | None = None  # [in or more] int32: which input each column is for, -1 for none; None: original order

    @property
    def inputs(self) -> int:
        """Number of the weight's inputs."""
        return self.codes.shape[1] if self.order is None else int((self.order >= 0).sum())

    @property
    def block(self) -> int:
        """Number of inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def __getitem__(self, outputs: Tensor) -> "QuantizedWeight":
        """The rows of some outputs."""
        zeros, factors = (held[outputs] if held is not None else None for held in (self.zeros, self.factors))
        return QuantizedWeight(self.kind, self.codes[outputs], self.scales[outputs], zeros, factors, self.order)

    def scaled(self, factor: float) -> "QuantizedWeight":
        """The weight times a number."""
        if self.kind in FP4_BLOCKS:
            return replace(self, factors=factors_of(self) * factor)
        return replace(self, scales=self.scales * factor)

    def refined(self, block: int) -> "QuantizedWeight":
        """The same weight with scales for blocks of `block` inputs, which divides the present block."""
        times = self.block // block
        zeros = self.zeros.repeat_interleave(times, 1) if self.zeros is not None else None
        return replace(self, scales=self.scales.repeat_interleave(times, 1), zeros=zeros) if times > 1 else self

    def part(self, dimension: int, start: int, stop: int) -> "QuantizedWeight":
        """A slice of outputs (dimension 0) or inputs (1), with zeros beyond the end."""
        if dimension and self.order is not None:
            return self._among(start, stop)
        found = self.refined(gcd(self.block, start, stop)) if dimension else self
        places = (start // found.block, stop // found.block) if dimension else (start, stop)

        def cut(tensor: Tensor, first: int, last: int) -> Tensor:
            held = tensor[:, first:last] if dimension else tensor[first:last]
            lacking = last - first - held.shape[dimension]
            return pad(held, (0, lacking) if dimension else (0, 0, 0, lacking)).contiguous()

        zeros, factors = cut(found.zeros, *places) if found.zeros is not None else None, found.factors
        if factors is not None and not dimension:
            factors = pad(factors[start:stop], (0, max(0, stop - len(factors))))
        return QuantizedWeight(found.kind, cut(found.codes, start, stop), cut(found.scales, *places), zeros, factors, found.order)

    def _among(self, start: int, stop: int) -> "QuantizedWeight":
        """A slice of inputs, where these are reordered. It takes some columns of each block, padded with columns of no input, so
        that there are whole, smaller blocks."""
        assert self.order is not None
        size = gcd(self.block, PIECE)
        own = ((self.order >= start) & (self.order < stop)).view(-1, self.block)
        pieces = -(-own.sum(1) // size)  # pieces of each block
        firsts = (pieces.cumsum(0) - pieces) * size
        columns = self.order.new_full((int(pieces.sum()) * size,), -1, dtype=torch.int64)
        columns[(firsts.unsqueeze(1) + own.cumsum(1) - 1)[own]] = own.flatten().nonzero().squeeze(1)
        order = torch.where(columns < 0, -1, self.order[columns] - start).int()
        blocks = torch.arange(len(pieces), device=pieces.device).repeat_interleave(pieces)
        zeros = self.zeros[:, blocks] if self.zeros is not None else None
        return QuantizedWeight(self.kind, self.codes[:, columns], self.scales[:, blocks], zeros, self.factors, order)


def alike(parts: Sequence[QuantizedWeight]) -> bool:
    """Whether weights can be joined: they are of one kind, and their inputs are in one order."""
    first, *others = (part.order for part in parts)
    return len({part.kind for part in parts}) == 1 and all(
        first is other or (first is not None and other is not None and first.equal(other)) for other in others
    )


def joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights with the same inputs in the same order, concatenated along outputs."""
    block = gcd(*(part.block for part in parts))
    same = [part.refined(block) for part in parts]
    zeros = factors = None
    if any(part.zeros is not None for part in same):
        zeros = torch.cat([zeros_of(part) for part in same])
    if any(part.factors is not None for part in same):
        factors = torch.cat([factors_of(part) for part in same])
    codes, scales = (torch.cat(each) for each in ([part.codes for part in same], [part.scales for part in same]))
    return QuantizedWeight(same[0].kind, codes, scales, zeros, factors, same[0].order)


def zeros_of(codes: QuantizedWeight) -> Tensor:
    """Zero points: [out, blocks] uint8."""
    given = codes.zeros
    return given if given is not None else torch.full_like(codes.scales, MIDDLES[codes.kind], dtype=torch.uint8)


def factors_of(codes: QuantizedWeight) -> Tensor:
    """Factors of scales: [out] float32."""
    return codes.factors if codes.factors is not None else torch.ones_like(codes.scales[:, 0])


def dequantized(codes: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The dequantized weight: [out, in]."""
    if codes.kind == "fp8":
        values = _in_blocks(codes.codes.view(torch.float8_e4m3fn).float(), codes.block)
    elif codes.kind in FP4_BLOCKS:
        values = _in_blocks(torch.tensor(FP4, device=codes.codes.device)[codes.codes.int()], codes.block)
    else:
        values = _in_blocks(codes.codes, codes.block).float() - zeros_of(codes).unsqueeze(2)
    values = values * codes.scales.unsqueeze(2)
    if codes.factors is not None:  # the scaled values are exact before this
        values = values * codes.factors[:, None, None]
    found = values.flatten(1).to(dtype)
    if codes.order is None:
        return found
    there = codes.order >= 0
    inputs = found.new_empty(len(found), codes.inputs)
    inputs[:, codes.order[there].long()] = found[:, there]
    return inputs


def quantize(weight: Tensor, kind: str) -> QuantizedWeight:
    """Quantizes a weight [out, in] by rounding to nearest. 4-bit integers span each block's minimum to its maximum (asymmetric),
    other kinds are symmetric about 0."""
    block = gcd({"int4": BLOCK, **FP4_BLOCKS}.get(kind, 0), weight.shape[1])
    values = _in_blocks(weight.float(), block)
    if kind == "int4":
        least, greatest = values.amin(2).clamp(max=0), values.amax(2).clamp(min=0)
        scales = _steps((greatest - least) / 15)
        zeros = (-least / scales).round()
        codes = (values / scales.unsqueeze(2)).round() + zeros.unsqueeze(2)
        return QuantizedWeight(kind, codes.clamp(0, 15).flatten(1).byte(), scales, zeros.byte())
    largest = values.abs().amax(2)
    if kind == "fp4":
        scales = _steps(torch.exp2((largest / FP4[7]).log2().ceil()))
        return QuantizedWeight(kind, _nearest_fp4(values / scales.unsqueeze(2)), scales)
    if kind == "nvfp4":  # one factor for the whole matrix, with which its largest number has the largest scale
        factors = _steps(largest.amax() / (FP4[7] * LARGEST_FP8)).expand(len(weight)).contiguous()
        scales = _steps((largest / FP4[7] / factors[:, None]).to(torch.float8_e4m3fn).float())
        return QuantizedWeight(kind, _nearest_fp4(values / (scales * factors[:, None]).unsqueeze(2)), scales, None, factors)
    if kind == "int8":
        scales = _steps(largest / 127)
        return QuantizedWeight(kind, (values / scales.unsqueeze(2)).round().add(128).flatten(1).byte(), scales)
    scales = _steps(largest / LARGEST_FP8)
    return QuantizedWeight(kind, (values / scales.unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn).view(torch.uint8), scales)


def _nearest_fp4(values: Tensor) -> Tensor:
    """Indices into FP4 of the nearest numbers, for numbers in blocks [out, blocks, block]: [out, in]."""
    sizes = torch.tensor(FP4[:8], device=values.device)
    nearest = torch.bucketize(values.abs(), (sizes[1:] + sizes[:-1]) / 2)
    return (nearest + 8 * (values < 0)).flatten(1).byte()


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """Numbers [out, in] as [out, blocks, block]."""
    return values.view(len(values), -1, block)


def _steps(scales: Tensor) -> Tensor:
    """Scales without zeros: in blocks that are all 0, any scale will do."""
    return scales.masked_fill(scales == 0, 1.0)
