"""What rows of tables n-grams of tokens stand for, as `ngrams` wants to know it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Hashes:
    """Of all layers that are told of n-grams. All int64."""

    multipliers: Tensor  # [layers, most]: of a token, of the one before it and so on
    sizes: Tensor  # [layers, lengths of n-grams, heads]: rows of each head's table
    offsets: Tensor  # likewise: where it begins in the layer's
    end: int  # the token that ends a text
