"""Matrix products with weights that are laid out once, at load time, for the machine that they run on. Knows tensors only."""

import torch
from torch import Tensor
from torch.nn import functional

# oneDNN chooses its blocked layout by the number of rows it is told to expect. Measured 2026-11-21 on an EPYC (AVX2, one
# thread, 1024 x 5632, GFLOP/s at 1 / 8 / 32 / 512 rows): told 1: 8.3 / 24 / 42 / 64; told 4 to 64: 8 / 34 / 57 / 71, which
# beats torch's default (MKL: 8 / 19 / 40 / 69) everywhere, so one layout serves decode and prefill.
EXPECTED_ROWS = 32


class Weight:
    """A weight [out, in] ready for `x @ weight.T + bias`; `bytes` is what it takes in memory."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self.bias = bias
        self.packed = _packable(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]; result [rows, out]."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return functional.linear(x, self.weight, self.bias)


def _packable(weight: Tensor) -> bool:
    """Whether oneDNN's packed product is there and as fast as torch's own for this weight."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
