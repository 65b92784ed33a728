"""Scalable softmax (Nakanishi 2025, arXiv:2501.19399), in Mistral Large 4's attention and index: queries grow with the logarithm of
their position, by a scale and bias of each head, so that attention stays as sharp among more keys."""

from torch import Tensor

from .holder import Holder
from .loader import Loader
from .rotary import Places


class ScalableSoftmax(Holder):
    """The scales and biases of a layer's heads."""

    def __init__(self, load: Loader, name: str, heads: int, whole: bool = False) -> None:
        """name: prefix of its tensors; whole: every rank has all heads."""
        read = load.each if whole else load.each_head
        self.scales, self.biases = (read(f"{name}.{part}", heads) for part in ("scale", "bias"))

    def __call__(self, query: Tensor, places: Places) -> Tensor:
        """Scales queries [tokens, heads, size] in place."""
        assert places.logarithms is not None
        scales, biases = self.scales.to(query.dtype), self.biases.to(query.dtype)
        return query.mul_((places.logarithms * scales + biases).unsqueeze(2))
