"""Queries that grow with the logarithm of their position, each head's by numbers of its own, so that attention stays as sharp among
more keys (Nakanishi 2025, Scalable-Softmax, arXiv:2501.19399): Mistral Large 4's, of attention and of its index."""

from torch import Tensor

from .loader import Loader
from .rotary import Places


class Sharpening:
    """Of some heads."""

    def __init__(self, load: Loader, name: str, heads: int, whole: bool = False) -> None:
        """name: of what has its tensors; whole: every rank has all heads."""
        read = load.each if whole else load.each_head
        self.scales, self.biases = (read(f"{name}.{part}", heads) for part in ("scale", "bias"))

    def __call__(self, query: Tensor, places: Places) -> Tensor:
        """The same, multiplied in place: [tokens, heads, size]."""
        assert places.logarithms is not None
        scales, biases = self.scales.to(query.dtype), self.biases.to(query.dtype)
        return query.mul_((places.logarithms * scales + biases).unsqueeze(2))
