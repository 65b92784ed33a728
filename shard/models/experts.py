"""Reads a layer's experts as checkpoints have them: one by one, or all in one tensor. How each form lays them out is here and
nowhere else."""

from collections.abc import Iterator

import torch

from ...kernels.codes import FP4_BLOCK, Codes, quantize
from ...kernels.experts import Biases, Weights
from ..weights import Source
from .loader import Loader
from .shape import Mixture, Quantization, Unsupported

FP4_MIDDLE = 127  # of the exponents of scales


def experts(load: Loader, mixture: Mixture) -> tuple[Weights, Weights, Biases]:
    """Of each expert this rank's [2 * size, hidden], gates first, and [hidden, size]; and biases of all, where they have some."""
    if mixture.interleaved:
        return _interleaved(load, mixture)
    gate, up, down = ([f"{mixture.name}.experts.{i}.{name}" for i in range(mixture.experts)] for name in mixture.names)
    outwards = [load.outwards(pair, [mixture.size] * 2) for pair in zip(gate, up, strict=True)]
    return outwards, [load.inwards(name, mixture.size) for name in down], None


def _interleaved(load: Loader, mixture: Mixture) -> tuple[Weights, Weights, Biases]:
    """gpt-oss's: gates and what they let through by turns."""
    name, source, hidden, count = f"{load.prefix}{mixture.name}.experts", load.source, load.shape.hidden, mixture.experts
    size = mixture.part(load.ranks.size)
    start = load.ranks.rank * size
    rows, columns = (2 * start, 2 * (start + size)), (start, start + size)
    how = mixture.quantization or load.shape.quantization
    gate_ups = _stacked(source, f"{name}.gate_up_proj", (count, 2 * mixture.size, hidden), (0, *rows), how)
    downs = _stacked(source, f"{name}.down_proj", (count, hidden, mixture.size), (1, *columns), how)
    first = source.tensor(f"{name}.gate_up_proj_bias", (count, 2 * mixture.size), (1, *rows))
    second = source.tensor(f"{name}.down_proj_bias", (count, hidden))
    if load.ranks.rank:  # the sum of all ranks has it once
        second = torch.zeros_like(second)
    gates_first = torch.arange(2 * size, device=source.device).view(-1, 2).t().flatten()
    return [weight[gates_first] for weight in gate_ups], downs, (first[:, gates_first], second)


def _stacked(
    source: Source, name: str, shape: tuple[int, int, int], cut: tuple[int, int, int], how: Quantization | None
) -> Weights:
    """Of each expert's [outputs, inputs] the part that `cut` says. They are stored the other way round, or in 4 bits."""
    dimension, start, stop = cut
    experts, outputs, inputs = shape
    if source.has(f"{name}_blocks"):
        return [one.part(*cut) for one in _codes(source, name, shape)]
    found = source.tensor(name, (experts, inputs, outputs), (2 - dimension, start, stop)).transpose(1, 2).contiguous()
    made_up = not source.has(name)  # where nobody knows what there is
    return [quantize(one, how.kind) for one in found] if how and (how.at_load or made_up) else [*found]


def _codes(source: Source, name: str, shape: tuple[int, int, int]) -> Iterator[Codes]:
    """MXFP4's, of each expert: two in a byte, the lower 4 bits first, and of each block's scale the exponent."""
    codes, scales = source.stored(f"{name}_blocks", ("U8",)), source.stored(f"{name}_scales", ("U8",))
    blocks = shape[2] // FP4_BLOCK
    if codes.shape != (*shape[:2], blocks, FP4_BLOCK // 2) or scales.shape != codes.shape[:3] or shape[2] % FP4_BLOCK:
        raise Unsupported(
            f"{name} has blocks {list(codes.shape)} and scales {list(scales.shape)}, config.json says {list(shape)}: they "
            "belong to different models"
        )
    for held, exponents in zip(codes.flatten(2), scales, strict=True):
        source.progress(2 * held.numel())
        pairs = torch.stack((held & 15, held >> 4), 2)
        yield Codes("fp4", pairs.flatten(1), torch.exp2(exponents.float() - FP4_MIDDLE), None)
