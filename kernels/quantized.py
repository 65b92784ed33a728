"""Matrix products with quantized weights (`codes`). Knows tensors only.

Their reference is the product with the `dequantized` weight. Quantization saves memory, and, with few rows, the time to
read the weights; activations are never quantized, whatever a checkpoint says of them. On an accelerator `fused_quantized`
multiplies with the codes themselves. On a CPU torch does so for 4 bits with bfloat16 rows. Measured 2026-11-23 on a Xeon with
AVX-512 and bfloat16 units, one thread, 1024 x 5632 in blocks of 64, us for 1 / 4 / 16 / 64 rows:

    torch, 4 bits               378 / 798 / 2800 / 12000
    oneDNN, packed, bfloat16    986 / 1370 / 2660 / 9130
    torch, 8 bits               1105 / 1374 / 3579 / 13989

Everything else is dequantized once, when it is loaded.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from .codes import MIDDLES, QuantizedWeight, dequantized, zeros_of
from .dispatch import triton_for
from .linear import Invariance, Product, Weight

CPU_BLOCKS = (256, 128, 64, 32)  # block sizes that torch supports; outputs and inputs must be multiples of the next two
CPU_OUTPUTS, CPU_INPUTS = 16, 32
Found = tuple[Product, Sequence[Tensor | None]]  # a product, and the tensors it reads


class Quantized(Weight):
    """A weight whose products read its quantized form."""

    def __init__(self, shape: torch.Size, product: Product, kept: Sequence[Tensor | None]) -> None:
        """kept: the tensors that the product reads."""
        self.shape, self.product = shape, product
        self.bytes = sum(tensor.nbytes for tensor in kept if tensor is not None)
        self.compiled = self._plain = None
        self.shared = False
        self.lora = None


def lay_out(weight: Tensor | QuantizedWeight, bias: Tensor | None, exact: Invariance, dtype: torch.dtype) -> Weight:
    """A weight, quantized or not, ready for products with rows of `dtype`; exact: see `Weight`."""
    if isinstance(weight, Tensor):
        return Weight(weight, bias, exact)
    even = replace(weight, order=None)
    if triton_for(weight.codes):
        from .fused_quantized import by_triton

        found = by_triton(even, bias, dtype, exact is Invariance.INVARIANT)
    else:
        found = _by_torch(even, bias, dtype)
    if found is None:
        return Weight(dequantized(weight, dtype), bias, exact)
    if weight.order is not None:
        found = _in_order(weight, *found)
    return Quantized(torch.Size((len(weight.codes), weight.inputs)), *found)


def _in_order(codes: QuantizedWeight, product: Product, kept: Sequence[Tensor | None]) -> Found:
    """The product with rows whose inputs are in their original order, made of the one with rows in the order of the codes (GPTQ's
    act-order)."""
    assert codes.order is not None
    lacking = int(len(codes.order) > codes.inputs)  # columns that belong to no input are multiplied with a zero
    places = torch.where(codes.order < 0, codes.inputs, codes.order)
    return lambda x: product((functional.pad(x, (0, 1)) if lacking else x).index_select(1, places)), [*kept, places]


def _by_torch(codes: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Found | None:
    """torch's product on a CPU, where it is fast; else None. A row's result does not depend on the rows beside it, to the last
    bit."""
    if codes.codes.device.type != "cpu":
        return None
    outputs, inputs = codes.codes.shape
    block = next((size for size in CPU_BLOCKS if codes.block % size == 0), 0)
    if codes.kind != "int4" or dtype != torch.bfloat16 or not block or outputs % CPU_OUTPUTS or inputs % CPU_INPUTS:
        return None
    fine = codes.refined(block)
    shifts = (MIDDLES["int4"] - zeros_of(fine).float()) * fine.scales  # torch multiplies with code - 8, and adds this
    pairs = torch.stack((fine.scales.t(), shifts.t()), -1).to(dtype).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.codes.int(), 1)

    def product(x: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed, block, pairs)
        return found if bias is None else found.add_(bias)

    return product, (packed, pairs, bias)
