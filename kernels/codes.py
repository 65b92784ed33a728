"""Weights of few bits: 4 or 8 for each number, and a scale for each block of the inputs of an output. Knows tensors only.

What they mean is `unpacked`; how products with them are computed stands in `quantized`.

Scales of floats of 4 bits have few bits themselves, so that a byte holds each: they are powers of 2 ("fp4", which is MXFP4), or
numbers of float8_e4m3fn ("nvfp4"). What those are to be multiplied by stays apart, a number of 32 bits for each output: products
of both would be rounded, and four bytes each. In checkpoints a whole matrix has one; those that are joined bring their own.

Where GPTQ has rounded inputs in the order of their activations, those that share a scale are not beside each other. Here they are,
and rows are put into that order before they are multiplied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

BITS = {"int4": 4, "int8": 8, "fp8": 8, "fp4": 4, "nvfp4": 4}
MIDDLES = {"int4": 8, "int8": 128}
LARGEST_FP8 = 448.0
# Floats of 4 bits (Rouhani et al. 2023, arXiv:2310.10537): a sign, two bits of an exponent, and one more.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP4_BLOCKS = {"fp4": 32, "nvfp4": 16}  # inputs that share a scale
PIECE = 32  # inputs of blocks in which there may be some of none, at most
BLOCK = 64  # inputs that share a scale where weights of 4 bits are rounded here; those of 8 bits have one for each output


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [out, in]."""

    kind: str  # of BITS
    codes: Tensor  # [out, in] uint8: integers, the bits of float8_e4m3fn, or places in FP4
    scales: Tensor  # [out, blocks] float32: in / blocks inputs in a row share one; beside FP4 of few bits
    zeros: Tensor | None = None  # [out, blocks] uint8: the integers that mean 0; None: all are MIDDLES'; floats have none
    factors: Tensor | None = None  # [out] float32: what scales are to be multiplied by, beside FP4 alone; None: by 1
    order: Tensor | None = None  # [in or more] int32: which input each column is for, -1 for none; None: they are as inputs are

    @property
    def inputs(self) -> int:
        """Those that there are."""
        return self.codes.shape[1] if self.order is None else int((self.order >= 0).sum())

    @property
    def block(self) -> int:
        """Inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def __getitem__(self, outputs: Tensor) -> "Codes":
        """Those of some outputs."""
        zeros, factors = (held[outputs] if held is not None else None for held in (self.zeros, self.factors))
        return Codes(self.kind, self.codes[outputs], self.scales[outputs], zeros, factors, self.order)

    def scaled(self, factor: float) -> "Codes":
        """Times a number."""
        if self.kind in FP4_BLOCKS:
            return replace(self, factors=factors_of(self) * factor)
        return replace(self, scales=self.scales * factor)

    def refined(self, block: int) -> "Codes":
        """The same in blocks of `block` inputs, which divides those that there are."""
        times = self.block // block
        zeros = self.zeros.repeat_interleave(times, 1) if self.zeros is not None else None
        return replace(self, scales=self.scales.repeat_interleave(times, 1), zeros=zeros) if times > 1 else self

    def part(self, dimension: int, start: int, stop: int) -> "Codes":
        """Those of some outputs (dimension 0) or inputs (1), with zeros beyond their end."""
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
        return Codes(found.kind, cut(found.codes, start, stop), cut(found.scales, *places), zeros, factors, found.order)

    def _among(self, start: int, stop: int) -> "Codes":
        """Those of some inputs, where they have an order. Of each block there are some, and with them columns of no input, so that
        there are whole blocks, smaller ones."""
        assert self.order is not None
        size = gcd(self.block, PIECE)
        own = ((self.order >= start) & (self.order < stop)).view(-1, self.block)
        pieces = -(-own.sum(1) // size)  # of each block
        firsts = (pieces.cumsum(0) - pieces) * size
        columns = self.order.new_full((int(pieces.sum()) * size,), -1, dtype=torch.int64)
        columns[(firsts.unsqueeze(1) + own.cumsum(1) - 1)[own]] = own.flatten().nonzero().squeeze(1)
        order = torch.where(columns < 0, -1, self.order[columns] - start).int()
        blocks = torch.arange(len(pieces), device=pieces.device).repeat_interleave(pieces)
        zeros = self.zeros[:, blocks] if self.zeros is not None else None
        return Codes(self.kind, self.codes[:, columns], self.scales[:, blocks], zeros, self.factors, order)


def alike(parts: Sequence[Codes]) -> bool:
    """Whether they can be joined: they are of one kind, and their inputs are in one order."""
    first, *others = (part.order for part in parts)
    return len({part.kind for part in parts}) == 1 and all(
        first is other or (first is not None and other is not None and first.equal(other)) for other in others
    )


def joined(parts: Sequence[Codes]) -> Codes:
    """Weights with the same inputs in the same order, side by side."""
    block = gcd(*(part.block for part in parts))
    same = [part.refined(block) for part in parts]
    zeros = factors = None
    if any(part.zeros is not None for part in same):
        zeros = torch.cat([zeros_of(part) for part in same])
    if any(part.factors is not None for part in same):
        factors = torch.cat([factors_of(part) for part in same])
    codes, scales = (torch.cat(each) for each in ([part.codes for part in same], [part.scales for part in same]))
    return Codes(same[0].kind, codes, scales, zeros, factors, same[0].order)


def zeros_of(codes: Codes) -> Tensor:
    """[out, blocks] uint8: the integers that mean 0."""
    given = codes.zeros
    return given if given is not None else torch.full_like(codes.scales, MIDDLES[codes.kind], dtype=torch.uint8)


def factors_of(codes: Codes) -> Tensor:
    """[out] float32: what scales are to be multiplied by."""
    return codes.factors if codes.factors is not None else torch.ones_like(codes.scales[:, 0])


def unpacked(codes: Codes, dtype: torch.dtype) -> Tensor:
    """[out, in]."""
    if codes.kind == "fp8":
        values = _in_blocks(codes.codes.view(torch.float8_e4m3fn).float(), codes.block)
    elif codes.kind in FP4_BLOCKS:
        values = _in_blocks(torch.tensor(FP4, device=codes.codes.device)[codes.codes.int()], codes.block)
    else:
        values = _in_blocks(codes.codes, codes.block).float() - zeros_of(codes).unsqueeze(2)
    values = values * codes.scales.unsqueeze(2)
    if codes.factors is not None:  # what they multiply is exact
        values = values * codes.factors[:, None, None]
    found = values.flatten(1).to(dtype)
    if codes.order is None:
        return found
    there = codes.order >= 0
    inputs = found.new_empty(len(found), codes.inputs)
    inputs[:, codes.order[there].long()] = found[:, there]
    return inputs


def quantize(weight: Tensor, kind: str) -> Codes:
    """The nearest to a weight [out, in]. Integers of 4 bits go from each block's least number to its greatest, others are even
    about 0."""
    block = gcd({"int4": BLOCK, **FP4_BLOCKS}.get(kind, 0), weight.shape[1])
    values = _in_blocks(weight.float(), block)
    if kind == "int4":
        least, greatest = values.amin(2).clamp(max=0), values.amax(2).clamp(min=0)
        scales = _steps((greatest - least) / 15)
        zeros = (-least / scales).round()
        codes = (values / scales.unsqueeze(2)).round() + zeros.unsqueeze(2)
        return Codes(kind, codes.clamp(0, 15).flatten(1).byte(), scales, zeros.byte())
    largest = values.abs().amax(2)
    if kind == "fp4":
        scales = _steps(torch.exp2((largest / FP4[7]).log2().ceil()))
        return Codes(kind, _nearest_fp4(values / scales.unsqueeze(2)), scales)
    if kind == "nvfp4":  # of a whole matrix one factor, by which its largest number has the largest scale
        factors = _steps(largest.amax() / (FP4[7] * LARGEST_FP8)).expand(len(weight)).contiguous()
        scales = _steps((largest / FP4[7] / factors[:, None]).to(torch.float8_e4m3fn).float())
        return Codes(kind, _nearest_fp4(values / (scales * factors[:, None]).unsqueeze(2)), scales, None, factors)
    if kind == "int8":
        scales = _steps(largest / 127)
        return Codes(kind, (values / scales.unsqueeze(2)).round().add(128).flatten(1).byte(), scales)
    scales = _steps(largest / LARGEST_FP8)
    return Codes(kind, (values / scales.unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn).view(torch.uint8), scales)


def _nearest_fp4(values: Tensor) -> Tensor:
    """Of numbers in blocks [out, blocks, block] the places in FP4 of the nearest: [out, in]."""
    sizes = torch.tensor(FP4[:8], device=values.device)
    nearest = torch.bucketize(values.abs(), (sizes[1:] + sizes[:-1]) / 2)
    return (nearest + 8 * (values < 0)).flatten(1).byte()


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """[out, blocks, block]."""
    return values.view(len(values), -1, block)


def _steps(scales: Tensor) -> Tensor:
    """Of blocks that are all 0, any will do."""
    return scales.masked_fill(scales == 0, 1.0)
