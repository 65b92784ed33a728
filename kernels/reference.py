"""Elementwise operations in plain torch: what each one means, and how it runs on a CPU. Knows tensors only."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32 (Zhang and Sennrich 2019, arXiv:1910.07467).

    x: [..., size]; weight: [size], same dtype; the result has x's dtype.
    """
    # Not functional.rms_norm: it takes three to ten times as long on a CPU (torch 2.13, 512 x 1024: 0.7 to 3 ms against 0.2). Few
    # operations, since for few rows these are what it costs.
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(_constant(epsilon, x.device), length, length, value=1 / x.shape[-1]).rsqrt_()
    if x.dtype == torch.float32:
        return (x * weight).mul_(scale)
    return wide.mul_(scale).to(x.dtype).mul_(weight)


@cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)


def rotary_table(frequencies: Tensor, positions: Tensor, dtype: torch.dtype, amplitude: float = 1.0) -> Tensor:
    """Cosines and signed sines of some positions, so that `rotate` needs two multiplications.

    frequencies: [size / 2] float32, radians per position; positions: [tokens]; result: [tokens, 2, 1, size] in `dtype`.
    """
    angles = torch.outer(positions.float(), frequencies)
    cosine, sine = angles.cos() * amplitude, angles.sin() * amplitude
    return torch.stack((torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)), 1).unsqueeze(2).to(dtype)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves paired as Hugging Face's checkpoints have them.

    x: [tokens, heads, size], overwritten; table: of `rotary_table`, x's dtype. Returns x.
    """
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)
    return x.mul_(table[:, 0]).addcmul_(swapped, table[:, 1])


LANES = 64  # numbers that torch computes at once at most, on a CPU


def by_lanes(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of x [..., size], to the same last bits wherever a number stands: of what is left at a tensor's end,
    too little to be computed at once, torch computes each by itself, by other code."""
    lacking = -x.shape[-1] % LANES if x.device.type == "cpu" else 0
    return function(functional.pad(x, (0, lacking)))[..., : x.shape[-1]] if lacking else function(x)


def squared(x: Tensor) -> Tensor:
    """relu(x), squared, of x that becomes it (So et al. 2021, arXiv:2109.08668)."""
    return x.relu_().square_()


STEEPNESS = 1.702  # of the sigmoid that comes near to gelu's


STEEP, BEFORE, BEHIND = "steep", "before", "behind"  # what a limit of gates means: see `Gates`


@dataclass(frozen=True, slots=True)
class Gates:
    """What becomes of what leads into MLPs and experts: `gated`, or `squared` instead."""

    gelu: bool = False
    # Beyond it neither gates nor what they let through go; 0: there is none. BEFORE silu, or BEHIND it; STEEP: gpt-oss's own gates
    # (OpenAI 2025, arXiv:2508.10925), before.
    limit: float = 0.0
    form: str = STEEP
    squared: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, 2 * size], gates first, or without gates [tokens, size]; [tokens, size]."""
        return squared(x) if self.squared else gated(x, self)

    @property
    def constants(self) -> dict[str, Any]:
        """Of kernels that have both."""
        return {"SQUARED": self.squared, **self.own}

    @property
    def own(self) -> dict[str, Any]:
        """Of those that have gates alone."""
        return {"GELU": self.gelu, "LIMIT": self.limit, "STEEP": self.form == STEEP, "BEHIND": self.form == BEHIND}


PLAIN = Gates()


def gated(gate_up: Tensor, how: Gates = PLAIN) -> Tensor:
    """silu(gate) * up, SwiGLU (Shazeer 2020, arXiv:2002.05202), or with gelu, approximated by tanh, GeGLU. See `Gates`."""
    gate, up = gate_up.chunk(2, -1)
    if not how.limit:
        return (functional.gelu(gate, approximate="tanh") if how.gelu else functional.silu(gate)).mul_(up)
    up = up.clamp(-how.limit, how.limit)
    if how.form == BEHIND:
        return functional.silu(gate).clamp_(max=how.limit).mul_(up)
    gate = gate.clamp(max=how.limit)
    if how.form == BEFORE:
        return up.mul_(by_lanes(functional.silu, gate))
    return gate * by_lanes(torch.sigmoid, gate * STEEPNESS) * (up + 1)


def xielu(x: Tensor, positive: float, negative: float, beta: float, epsilon: float) -> Tensor:
    """A slope of `beta` at 0, from which a square leads away above, by `positive`, and an exponential below, by `negative` (Huang
    and Schlag 2024, arXiv:2411.13010). epsilon: close to 0, below: nothing nearer to it is taken for the exponential."""
    wide = x.float()
    above = wide.square().mul_(positive)
    below = wide.clamp(max=epsilon).expm1_().sub_(wide).mul_(negative)
    return torch.where(wide > 0, above, below, out=above).add_(wide, alpha=beta).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Shares:
    """How those of residual streams in a part of a layer are made (`hyper_connections`): as products of all streams, over their
    root mean square, through a sigmoid. All float32."""

    matrix: Tensor  # [count, count * hidden]: of what is seen; or twice as many: of what is given, too, behind it
    scale: Tensor  # [count], or twice as many
    base: Tensor  # likewise
    magnitude: float  # of what is given
    epsilon: float  # is added to all
    # How often those are divided by their sums, of which each stream becomes a mixture of all: there are count**2 more, behind the
    # others, of each stream what the others get of it, and nothing is added to what is given. 0: streams stay as they are.
    rounds: int = 0
