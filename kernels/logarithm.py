"""Logarithms made of operations that IEEE 754 rounds exactly, so that every device and library gives the same bits.

The method is that of fdlibm's logf (Sun Microsystems 1993, "Freely distributable libm", e_logf.c): x = 2^k (1 + f), s = f / (2 +
f), log(1 + f) = f - f^2 / 2 + s (f^2 / 2 + R(s^2)); its error is below one unit in the last place. `fused_noise.py` has the same
steps in Triton: whoever changes one must change the other. No multiplication may be contracted with an addition.
"""

import torch
from torch import Tensor

LOG_2_HIGH = 6.9313812256e-01  # 0x3f317180: with few bits, so that its product with an exponent is exact
LOG_2_LOW = 9.0580006145e-06  # 0x3717f7d1
SERIES = (0.66666662693, 0.40000972152, 0.28498786688, 0.24279078841)
# sqrt(1/2) as bits. Subtracted from a number's bits, it leaves an exponent for which 1 + f is in [sqrt(1/2), sqrt(2)).
ROOT = 0x3F3504F3
ONE = 0x3F800000


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float32 numbers."""
    bits = x.view(torch.int32) + (ONE - ROOT)
    exponent = (bits >> 23).sub_(127).float()
    f = bits.bitwise_and_(0x007FFFFF).add_(ROOT).view(torch.float32).sub_(1.0)
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    r = (w * SERIES[2]).add_(SERIES[0]).mul_(z).add_((w * SERIES[3]).add_(SERIES[1]).mul_(w))
    half = (f * 0.5).mul_(f)
    # s * (half + r) + exponent * LOG_2_LOW - half + f + exponent * LOG_2_HIGH, from left to right
    return r.add_(half).mul_(s).add_(exponent * LOG_2_LOW).sub_(half).add_(f).add_(exponent.mul_(LOG_2_HIGH))


def log_complement(u: Tensor) -> Tensor:
    """log(1 - u) for float32 numbers in (0, 1), accurate to the last places also where u is small: what rounding takes from 1 - u
    is added back as the first term of the series."""
    y = 1.0 - u
    return log(y).add_((1.0 - y).sub_(u).div_(y))


def gumbel(words: Tensor) -> Tensor:
    """Gumbel noise from random 32-bit words (in int64): -log(-log(1 - u)), u = (word + 1/2) / 2^32."""
    # u is finest near 0, where -log(1 - u) is small and the noise large: the tail that decides rare draws is resolved to 2^-33.
    # Near 1 float32 would round up to 1, whose noise is -inf: hence the clamp.
    uniform = words.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return log(log_complement(uniform).neg_()).neg_()
