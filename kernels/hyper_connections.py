"""Hyper-connections (Zhu et al. 2024, arXiv:2409.19606): a token has several residual streams; each part of a layer (attention,
MLP) reads a weighted sum of them, and its output is added to each stream with a weight. Knows tensors only.

Streams may also be mixed with each other, by a matrix that is nearly doubly stochastic: a softmax is divided by its row sums and
column sums in turn (Sinkhorn and Knopp 1967; Xie et al. 2025, mHC, arXiv:2512.24880).

On a CPU by torch; on an accelerator one launch for each part of a layer (`fused_hyper_connections`, `fused_manifold_connections`).
"""

import math

import torch
from torch import Tensor

from .dispatch import triton_for
from .reference import HyperConnectionWeights


def mix(
    streams: Tensor, more: Tensor | None, given: Tensor | None, shares: HyperConnectionWeights | None, epsilon: float
) -> tuple[Tensor, Tensor | None]:
    """The input of the next part of a layer, [tokens, hidden], and the shares with which its output is to be written, [tokens,
    count] float32, if there are any.

    streams: [tokens, count, hidden], to which `more` [tokens, hidden], the output of the last part, is added first, in place, with
    its write shares `given`, [tokens, count] float32; nothing is added without either. With mHC, `given` and the result include the
    shares of the mixing matrix, [tokens, count + count**2], which is applied before anything is added. shares: None: the input is
    the mean of all streams. epsilon: of the root mean square. All dense.
    """
    if triton_for(streams):
        if shares is None or shares.rounds or (given is not None and given.shape[1] > streams.shape[1]):
            from .fused_manifold_connections import mix as crossed

            return crossed(streams, more, given, shares, epsilon)
        from .fused_hyper_connections import mix as fused

        return fused(streams, more, given, shares, epsilon)
    tokens, count, _ = streams.shape
    wide = streams.float()
    if more is not None and given is not None:
        before = wide if given.shape[1] == count else _crossed(wide, given[:, count:])
        streams.copy_(before + given[:, :count].unsqueeze(2) * more.float().unsqueeze(1))
        wide = streams.float()
    if shares is None:
        return wide.mean(1).to(streams.dtype), None
    flat = wide.view(tokens, -1)
    products = flat @ shares.matrix.t() * (flat.square().mean(1, keepdim=True) + epsilon).rsqrt()
    logits = products * shares.scale + shares.base
    found = torch.sigmoid(logits[:, : 2 * count])
    seen, gives = found[:, :count] + shares.epsilon, found[:, count:] * shares.magnitude
    mixed = (seen.unsqueeze(2) * wide).sum(1).to(streams.dtype)
    if shares.rounds:
        return mixed, torch.cat((gives, sinkhorn(logits[:, 2 * count :], shares)), 1)
    return mixed, gives + shares.epsilon if gives.shape[1] else None


def _crossed(wide: Tensor, given: Tensor) -> Tensor:
    """Streams mixed with each other. given: [tokens, count**2], for each stream what the others get of it."""
    count = wide.shape[1]
    found = torch.zeros_like(wide)
    for stream, own in enumerate(given.view(-1, count, count).unbind(1)):
        found.addcmul_(own.unsqueeze(2), wide[:, stream, None])
    return found


def sinkhorn(logits: Tensor, shares: HyperConnectionWeights) -> Tensor:
    """Sinkhorn normalization of the mixing logits [tokens, count**2]: what each stream gives sums to nearly 1, what each gets to
    1."""
    count = math.isqrt(logits.shape[1])
    found = torch.softmax(logits.view(-1, count, count), 2) + shares.epsilon
    for turn in range(2 * max(1, shares.rounds) - 1):
        found = found / (found.sum(2 if turn % 2 else 1, keepdim=True) + shares.epsilon)
    return found.flatten(1)
