"""Parameters of the hash functions that map n-grams to embedding table rows, for `ngrams`."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class NgramHashes:
    """The hash parameters of all layers with n-gram embeddings. All int64."""

    multipliers: Tensor  # [layers, most]: factor of a token, of the one before it and so on
    sizes: Tensor  # [layers, n-gram lengths, heads]: number of rows of each head's table
    offsets: Tensor  # as `sizes`: where that table begins in the layer's
    end: int  # the end-of-text token
