"""Reads a layer's experts as checkpoints have them: one by one, or all in one tensor. How each form lays them out is here and
nowhere else."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.experts import Biases
from ..weights import Source
from .loader import Loader
from .shape import Mixture, Unsupported

# What 4 bits mean (Rouhani et al. 2023, arXiv:2310.10537): a sign, two bits of an exponent, and one more.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP4_BLOCK = 32  # that share a scale
FP4_MIDDLE = 127  # of a scale's exponent


def experts(load: Loader, mixture: Mixture) -> tuple[Sequence[Tensor], Sequence[Tensor], Biases]:
    """Of each expert this rank's [2 * size, hidden], gates first, and [hidden, size]; and biases of all, where they have some."""
    if mixture.interleaved:
        return _interleaved(load, mixture)
    gate, up, down = ([f"{mixture.name}.experts.{i}.{name}" for i in range(mixture.experts)] for name in mixture.names)
    outwards: Sequence[Tensor] = [load.dense(load.outwards(pair, [mixture.size] * 2)) for pair in zip(gate, up, strict=True)]
    return outwards, [load.dense(load.inwards(name, mixture.size)) for name in down], None


def _interleaved(load: Loader, mixture: Mixture) -> tuple[Tensor, Tensor, Biases]:
    """gpt-oss's: gates and what they let through by turns."""
    name, source, hidden, count = f"{load.prefix}{mixture.name}.experts", load.source, load.shape.hidden, mixture.experts
    size = mixture.size // load.ranks.size
    start = load.ranks.rank * size
    gate_up = _stacked(source, f"{name}.gate_up_proj", (count, 2 * mixture.size, hidden), (1, 2 * start, 2 * (start + size)))
    down = _stacked(source, f"{name}.down_proj", (count, hidden, mixture.size), (2, start, start + size))
    first = source.tensor(f"{name}.gate_up_proj_bias", (count, 2 * mixture.size), (1, 2 * start, 2 * (start + size)))
    second = source.tensor(f"{name}.down_proj_bias", (count, hidden))
    if load.ranks.rank:  # the sum of all ranks has it once
        second = torch.zeros_like(second)
    return _gates_first(gate_up), down, (_gates_first(first), second)


def _gates_first(rows: Tensor) -> Tensor:
    """Of [experts, 2 * size, ...]."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), 1)


def _stacked(source: Source, name: str, shape: tuple[int, int, int], cut: tuple[int, int, int]) -> Tensor:
    """The part of [experts, outputs, inputs] that `cut` says, stored with its last two the other way round, or in 4 bits."""
    dimension, start, stop = cut
    if not source.has(f"{name}_blocks"):
        experts, outputs, inputs = shape
        return source.tensor(name, (experts, inputs, outputs), (3 - dimension, start, stop)).transpose(1, 2).contiguous()
    codes, scales = source.stored(f"{name}_blocks", ("U8",)), source.stored(f"{name}_scales", ("U8",))
    blocks = shape[2] // FP4_BLOCK
    if codes.shape != (*shape[:2], blocks, FP4_BLOCK // 2) or scales.shape != codes.shape[:3] or shape[2] % FP4_BLOCK:
        raise Unsupported(
            f"{name} has blocks {list(codes.shape)} and scales {list(scales.shape)}, config.json says {list(shape)}: they "
            "belong to different models"
        )
    found = torch.stack(
        [_unpacked(*one, source.dtype).narrow(dimension - 1, start, stop - start) for one in zip(codes, scales, strict=True)]
    )
    source.progress(found.numel())
    return found


def _unpacked(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs]. codes: [outputs, blocks, FP4_BLOCK / 2], the lower 4 bits first; scales: [outputs, blocks], exponents."""
    meant = torch.tensor(FP4, device=codes.device)
    values = torch.stack((meant[(codes & 15).int()], meant[(codes >> 4).int()]), 3).flatten(2)
    return torch.ldexp(values, scales.int().sub(FP4_MIDDLE).unsqueeze(2)).flatten(1).to(dtype)
