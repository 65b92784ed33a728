"""What a part of a layer sees of a token's residual streams, and what each of them gets of what the part comes to:
hyper-connections (Zhu et al. 2024, arXiv:2409.19606). Knows tensors only.

On a CPU by torch; on an accelerator one launch for each part of a layer (`fused_mixing`).
"""

import torch
from torch import Tensor

from .choose import triton_for
from .reference import Shares


def mix(streams: Tensor, more: Tensor | None, given: Tensor | None, shares: Shares, epsilon: float) -> tuple[Tensor, Tensor | None]:
    """What the next part sees, [tokens, hidden], and gives, [tokens, count] float32, if it gives anything.

    streams: [tokens, count, hidden], to which more [tokens, hidden], what the last part came to, is added first, in place, by the
    shares that it gives, [tokens, count] float32; without either nothing is. epsilon: of the root mean square. All dense.
    """
    if triton_for(streams):
        from .fused_mixing import mix as fused

        return fused(streams, more, given, shares, epsilon)
    tokens, count, _ = streams.shape
    wide = streams.float()
    if more is not None and given is not None:
        streams.copy_(wide + given.unsqueeze(2) * more.float().unsqueeze(1))
        wide = streams.float()
    flat = wide.view(tokens, -1)
    products = flat @ shares.matrix.t() * (flat.square().mean(1, keepdim=True) + epsilon).rsqrt()
    found = torch.sigmoid(products * shares.scale + shares.base)
    seen, gives = found[:, :count] + shares.epsilon, found[:, count:]
    mixed = (seen.unsqueeze(2) * wide).sum(1).to(streams.dtype)
    return mixed, gives * shares.magnitude + shares.epsilon if gives.shape[1] else None
