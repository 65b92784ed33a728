"""Rotary position embedding (RoPE: Su et al. 2021, arXiv:2104.09864): the frequency of each pair of features, as scaled by
config.json, and tables of cosines and sines."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.indexed import TokenSelection
from ...kernels.reference import rotary_table
from .traits import Rope, TemperatureTuning

PART = 1 << 16  # positions whose cosines and sines are computed at once, in float32


@dataclass(frozen=True, slots=True)
class PoolRotary:
    """Cosines and sines for an index that chooses pools of tokens, whose heads may have another size than attention's."""

    own: Tensor  # of the tokens' positions
    first: Tensor  # of the first position of the pool that each token would complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What a layer needs of the positions of a step's tokens."""

    rotary: Tensor  # cosines and sines
    query_scale: Tensor | None  # what queries are multiplied by (temperature tuning)
    alibi_bias: Tensor | None  # ALiBi biases to append to keys: see `alibi.alibi_biases`
    logarithms: Tensor | None  # logarithms of the positions, for scalable softmax: see `sharpening`
    # The last indexer's choice of tokens to attend to; a list that all layers share.
    choosing: list[TokenSelection | None]
    pools: PoolRotary | None  # None: no index of heads with keys of their own
    rows: Tensor | None  # rows of the layer's n-gram tables, [tokens, heads]: see `ngram_layers`
    every: Tensor | None  # cosines and sines of all positions, where others than the tokens' own are needed


def cosines_and_sines(
    rope: Rope,
    size: int,
    positions: int,
    dtype: torch.dtype,
    device: torch.device,
    turned: int = 0,
    factors: Tensor | None = None,
) -> Tensor:
    """Cosines and sines of the positions from 0 on: [positions, 2, 1, size], see `rotary_table`. turned: features of a head that
    rotate; 0: all; factors: of frequencies, [turned / 2] float32; None: there are none."""
    turning = frequencies(rope, turned or size, positions).to(device)
    turning = turning if factors is None else turning * factors
    parts = [torch.arange(first, min(first + PART, positions), device=device) for first in range(0, positions, PART)]
    return torch.cat([_widened(rotary_table(turning, part, dtype, rope.amplitude), size) for part in parts])


def query_scales(tuning: TemperatureTuning | None, positions: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """What queries are multiplied by at each position, [positions, 1, 1]; None: by 1."""
    if tuning is None:
        return None
    times = torch.arange(tuning.first, tuning.first + positions, device=device) // tuning.positions
    return (1 + tuning.strength * (1 + times.float()).log()).to(dtype).view(-1, 1, 1)


def log_positions(positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Logarithms of the positions counted from 1, [positions, 1]."""
    return torch.arange(1, positions + 1, device=device).float().log().to(dtype).unsqueeze(1)


def _widened(table: Tensor, size: int) -> Tensor:
    """A table for larger heads, [..., size], where unrotated features follow each half of the rotated ones."""
    positions, _, _, turned = table.shape
    if turned == size:
        return table
    rows = torch.cat((table.new_ones(1, 1, 1), table.new_zeros(1, 1, 1)))  # cosine and sine
    still = rows.expand(positions, 2, 1, (size - turned) // 2)
    low, high = table.chunk(2, -1)
    return torch.cat((low, still, high, still), -1)


def resized(table: Tensor, turned: int, size: int) -> Tensor:
    """The table for heads of another size, of which as many features rotate."""
    if size == table.shape[-1]:
        return table
    return _widened(torch.cat([half[..., : turned // 2] for half in table.chunk(2, -1)], -1), size)


def frequencies(rope: Rope, size: int, positions: int = 0) -> Tensor:
    """Radians per position of every pair of features: [size / 2] float32. positions: number of positions served."""
    waves = rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if rope.kind == "longrope":  # Ding et al. 2024, arXiv:2402.13753
        return 1.0 / (torch.tensor(rope.long if positions > rope.original_positions else rope.short) * waves)
    plain = 1.0 / waves
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "default":
        return plain
    if rope.kind == "proportional":
        return plain / rope.factor * (torch.arange(size // 2) < int(rope.part * size // 2))
    kept = _yarn(rope, size) if rope.kind == "yarn" else _llama3(rope, plain)
    return plain * kept + plain / rope.factor * (1 - kept)


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """How much of each frequency stays as it is, by its rotations over the original positions: [size / 2] from 0 to 1."""
    turns = rope.original_positions * plain / (2 * math.pi)
    return ((turns - rope.few_turns) / (rope.many_turns - rope.few_turns)).clamp(0, 1)


def _yarn(rope: Rope, size: int) -> Tensor:
    """The same, by the index of its pair of features (Peng et al. 2023, arXiv:2309.00071)."""

    def place(turns: float) -> float:
        return size * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = place(rope.many_turns), place(rope.few_turns)
    if rope.whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 * (high == low)
    return 1 - ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
