"""Reference implementations of elementwise operations in plain torch: what each one means, and how it runs on a CPU. Knows tensors
only."""

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
    # Not functional.rms_norm: it takes three to ten times as long on a CPU (torch 2.13, 512 x 1024: 0.7 to 3 ms against 0.2). As
    # few operations as possible, since with few rows their number is what it costs.
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
    """The table of a rotary embedding: cosines and signed sines of some positions, so that `rotate` needs two multiplications.

    frequencies: [size / 2] float32, radians per position; positions: [tokens]; amplitude: scales both; result: [tokens, 2, 1, size]
    in `dtype`.
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


LANES = 64  # most numbers that torch processes in one vectorized iteration on a CPU


def lane_invariant(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of x [..., size], to the same last bits wherever a number stands: torch computes a tensor's tail, too
    short for a vector, one number at a time by other code, so it is padded."""
    lacking = -x.shape[-1] % LANES if x.device.type == "cpu" else 0
    return function(functional.pad(x, (0, lacking)))[..., : x.shape[-1]] if lacking else function(x)


def squared(x: Tensor) -> Tensor:
    """relu(x) squared, in place (So et al. 2021, arXiv:2109.08668)."""
    return x.relu_().square_()


GELU_SIGMOID_FACTOR = 1.702  # x * sigmoid(1.702 x) approximates gelu


STEEP, BEFORE, BEHIND = "steep", "before", "behind"  # what the clamp of gates means: see `Activation`


@dataclass(frozen=True, slots=True)
class Activation:
    """The activation of an MLP or expert between its two products: `gated` (SwiGLU, GeGLU and variants), or `squared` ReLU
    instead."""

    gelu: bool = False
    # Clamp of gates and of what they multiply; 0: none. Applied to the gate BEFORE silu, or BEHIND it; STEEP: gpt-oss's own gates
    # (OpenAI 2025, arXiv:2508.10925), clamped before.
    limit: float = 0.0
    form: str = STEEP
    squared: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Applies it to x: [tokens, 2 * size], gates first, or [tokens, size] without gates; result: [tokens, size]."""
        return squared(x) if self.squared else gated(x, self)

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time constants of kernels that support gates and `squared`."""
        return {"SQUARED": self.squared, **self.own}

    @property
    def own(self) -> dict[str, Any]:
        """Compile-time constants of kernels that support gates only."""
        return {"GELU": self.gelu, "LIMIT": self.limit, "STEEP": self.form == STEEP, "BEHIND": self.form == BEHIND}


PLAIN = Activation()


def gated(gate_up: Tensor, how: Activation = PLAIN) -> Tensor:
    """silu(gate) * up, SwiGLU (Shazeer 2020, arXiv:2002.05202), or with gelu, approximated by tanh, GeGLU. See `Activation` for
    clamps."""
    gate, up = gate_up.chunk(2, -1)
    if not how.limit:
        return (functional.gelu(gate, approximate="tanh") if how.gelu else functional.silu(gate)).mul_(up)
    up = up.clamp(-how.limit, how.limit)
    if how.form == BEHIND:
        return functional.silu(gate).clamp_(max=how.limit).mul_(up)
    gate = gate.clamp(max=how.limit)
    if how.form == BEFORE:
        return up.mul_(lane_invariant(functional.silu, gate))
    return gate * lane_invariant(torch.sigmoid, gate * GELU_SIGMOID_FACTOR) * (up + 1)


def xielu(x: Tensor, positive: float, negative: float, beta: float, epsilon: float) -> Tensor:
    """The xIELU activation (Huang and Schlag 2024, arXiv:2411.13010): slope `beta` at 0, plus a square above, weighted by
    `positive`, or an exponential below, weighted by `negative`. epsilon: a number just below 0, the largest argument of the
    exponential."""
    wide = x.float()
    above = wide.square().mul_(positive)
    below = wide.clamp(max=epsilon).expm1_().sub_(wide).mul_(negative)
    return torch.where(wide > 0, above, below, out=above).add_(wide, alpha=beta).to(x.dtype)


@dataclass(frozen=True, slots=True)
class HyperConnectionWeights:
    """Weights of one hyper-connection (`hyper_connections`), around one part of a layer: from them a token's read, write and mixing
    shares are computed, as products of all its residual streams, divided by their root mean square, through a sigmoid. All
    float32."""

    matrix: Tensor  # [count, count * hidden] for read shares; twice as many rows with write shares, which follow
    scale: Tensor  # [count], or twice as many: factors of the products
    base: Tensor  # [count], or twice as many: biases of the products
    magnitude: float  # factor of write shares
    epsilon: float  # added to all shares
    # mHC: rounds of Sinkhorn normalization of the matrix by which streams are mixed with each other. Its count**2 rows follow the
    # others, for each stream what the others get of it, and no epsilon is added to write shares. 0: streams are not mixed.
    rounds: int = 0
