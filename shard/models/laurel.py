"""LAuReL (Menghani, Kumar and Kumar 2024, arXiv:2411.07501), as in Gemma 3n: a low-rank branch beside attention adds its input, and
the norm of a low-rank projection of that. Every rank has it whole."""

from torch import Tensor

from ...kernels.operations import rms_norm
from .holder import Holder
from .loader import Loader
from .stream import Stream

NAMES = ("laurel.linear_left", "laurel.linear_right")


class LaurelBlock(Holder):
    """The LAuReL branch of a layer."""

    factor = 2**-0.5  # multiplies the stream once attention's output is added as well

    def __init__(self, load: Loader, size: int) -> None:
        """size: rank of the projection."""
        hidden, (left, right) = load.shape.hidden, NAMES
        self._epsilon = load.shape.norm_epsilon
        self.inward = load.fused(load.projection([left], [size], wholes=[size], unrounded=True))
        self.outward = load.fused(load.projection([right], [hidden], wholes=[hidden], inputs=size, unrounded=True))
        self.norm = load.gains("laurel.post_laurel_norm", hidden)

    def __call__(self, stream: Stream, before: Tensor | None) -> None:
        """Adds the branch to the stream, to which nothing was added since attention read it. before: gains of attention's norm."""
        x = stream.normalized(before)
        made = stream.product(stream.product(x, self.inward), self.outward)
        stream.add_whole(x + rms_norm(made, self.norm, self._epsilon))
