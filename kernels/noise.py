"""Stateless random numbers for sampling: Gumbel noise as a pure function of (seed, choice, output position, token id), by a
counter-based generator.

There is no generator state, so nothing that happens to a batch can change the noise. The generator is Philox4x32-10 (Salmon et al.
2011, "Parallel random numbers: as easy as 1, 2, 3"): key = the seed's two halves, counter = (token id // 4, position, choice,
STREAM), and the token takes word id % 4 of the result. Triton computes the same bits, where `dispatch.triton_for` says so.
"""

import torch
from torch import Tensor

from . import logarithm
from .dispatch import triton_for

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
# Last counter word: which use of the seed this is, so that further uses (another kind of draw) stay independent.
STREAM = 0
# Counters that are processed at once: their 256 kB, and the intermediates of ten rounds, stay in a processor's cache.
BLOCK = 1 << 15


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10. All tensors are int64 that hold unsigned 32-bit values, and are broadcast together, as are the four
    results."""
    key_0, key_1 = key
    word_0, word_1, word_2, word_3 = counter
    for _ in range(ROUNDS):
        # The product wraps around in 64 bits, which keeps both halves right.
        product_0, product_1 = word_0 * MULTIPLIERS[0], word_2 * MULTIPLIERS[1]
        word_0 = ((product_1 >> 32).bitwise_and_(MASK) ^ word_1).bitwise_xor_(key_0)
        word_2 = ((product_0 >> 32).bitwise_and_(MASK) ^ word_3).bitwise_xor_(key_1)
        word_1, word_3 = product_1.bitwise_and_(MASK), product_0.bitwise_and_(MASK)
        key_0, key_1 = key_0 + WEYL[0] & MASK, key_1 + WEYL[1] & MASK
    return word_0, word_1, word_2, word_3


def gumbel(seeds: Tensor, choices: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise for some tokens of every row.

    seeds (the 64 bits of an unsigned number), choices, positions: [rows] int64; ids: [rows, n] int64; result [rows, n] float32.
    """
    if triton_for(seeds):  # torch's words take some 400 launches
        from .fused_noise import gumbel as fused

        return fused(seeds, choices, positions, ids)
    words = torch.stack(philox(*_keyed(seeds, choices, positions, ids >> 2)), -1)
    return logarithm.gumbel(words.gather(-1, (ids & 3).unsqueeze(-1)).squeeze(-1))


def gumbel_all(seeds: Tensor, choices: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """`gumbel` for the ids 0 to vocabulary - 1, at a quarter of the cost: [rows, vocabulary] float32."""
    if triton_for(seeds):
        from .fused_noise import gumbel_all as fused_all

        return fused_all(seeds, choices, positions, vocabulary)
    quads = torch.arange(-(-vocabulary // 4), device=seeds.device).unsqueeze(0)
    result = torch.empty(len(seeds), quads.shape[1], 4, device=seeds.device)
    rows = max(1, BLOCK // quads.shape[1])
    for first in range(0, len(seeds), rows):
        part = slice(first, first + rows)
        words = philox(*_keyed(seeds[part], choices[part], positions[part], quads))
        for lane, word in enumerate(words):
            result[part, :, lane] = logarithm.gumbel(word)
    return result.view(len(seeds), -1)[:, :vocabulary]


def _keyed(
    seeds: Tensor, choices: Tensor, positions: Tensor, quads: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    seeds, choices, positions = seeds.unsqueeze(1), choices.unsqueeze(1), positions.unsqueeze(1)
    key = (seeds & MASK, seeds >> 32 & MASK)
    return key, (quads, positions, choices, torch.full_like(choices, STREAM))
