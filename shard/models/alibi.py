"""ALiBi, linear biases of attention (Press et al. 2022, arXiv:2108.12409): see `Alibi`. A key is cached together with the bias of
its position, as extra features for which queries hold ones. So neither kernels nor chunked prefill, prefix sharing and speculation
need to know of it."""

import torch
from torch import Tensor
from torch.nn import functional

from .shape import Shape, Unsupported


def alibi_biases(shape: Shape, rank: int, ranks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The biases that positions add to products with keys of this rank's heads, split into addends: [positions, heads,
    Alibi.features]. Raises Unsupported for biases beyond the range of `dtype`."""
    assert shape.alibi is not None
    own, positions = shape.heads // ranks, torch.arange(shape.max_positions, device=device).unsqueeze(1)
    slopes = torch.tensor(shape.alibi.slopes[rank * own : (rank + 1) * own], device=device)
    added = (slopes.bfloat16() * positions).float() if shape.alibi.rounded else slopes * positions
    count, most = shape.alibi.features, torch.finfo(dtype).max
    if float(added.max()) > count * most:
        raise Unsupported(f"{shape.max_positions} positions with ALiBi are too many for float16: use --dtype bfloat16")
    return _parts(added, count, dtype)


def _parts(whole: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Splits numbers into addends whose sum in float32 is exact to the last bit: [..., count]. Three hold all bits, the others what
    exceeds the largest float16."""
    most, parts = torch.finfo(dtype).max, []
    for _ in range(count):
        parts.append(whole.clamp(max=most).to(dtype))
        whole = whole - parts[-1].float()
    return torch.stack(parts, -1)


def widened(joint: Tensor, alibi_bias: Tensor, size: int) -> Tensor:
    """joint: a step's queries, keys and values, as many heads of each, concatenated, [tokens, heads of all * size]; alibi_bias:
    rows of `alibi_biases`. Returns the same with the biases appended to keys, ones to queries, and zeros to values."""
    heads, more = alibi_bias.shape[1:]
    every = functional.pad(joint.view(len(joint), 3 * heads, size), (0, more))
    every[:, :heads, size:] = 1
    every[:, heads : 2 * heads, size:] = alibi_bias
    return every.flatten(1)
