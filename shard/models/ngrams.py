"""Hash functions and table sizes of n-gram embeddings (Qwen 4 Exp). Holds no tensor, like `shape`."""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
PRIME = 10_007  # distance of the seeds of two layers
WITNESSES = (2, 3, 5, 7, 11, 13, 17)  # bases of the Miller-Rabin test, which suffice below 3.4e14 (Jaeschke 1993)


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramShape:
    """The n-gram embeddings of some layers: of pairs, triples and so on, each by several hashes (heads).

    An n-gram is a token and those before it, back to the last token that ends a text, which stands for all before that. Each token
    id is multiplied by one of the layer's multipliers; the exclusive or of the products modulo a head's prime number is a row of
    its table. All tables of a layer are concatenated. Every rank has a part of their rows, and all else.
    """

    layers: tuple[int, ...]  # ascending
    most: int  # tokens of the longest n-gram
    heads: int  # hashes of each length of n-grams
    size: int  # embedding features of all heads of a token together
    base: int  # lower bound of the heads' table sizes, which are the next primes that no head before has
    unit: int  # the rows of a layer's tables are padded to a multiple of it
    parts: int  # number of tensors that the tables are split into in a checkpoint
    vocabulary: int
    seed: int
    end: int  # the token that ends a text, and stands for what is before its beginning
    width: int  # taps of the convolution, `most` positions apart, the present one included
    streams: int  # residual streams
    image: int = 0  # the token id that stands for image tokens

    @property
    def before(self) -> int:
        """Previous tokens that an n-gram may have."""
        return self.most - 1

    @property
    def count(self) -> int:
        """Heads of a layer, for all lengths."""
        return self.before * self.heads

    @property
    def reach(self) -> int:
        """Tokens that the convolution looks back."""
        return (self.width - 1) * self.most

    def sizes(self, layer: int) -> tuple[int, ...]:
        """Rows of each head's table."""
        place = self.layers.index(layer)
        return primes(self.base, len(self.layers) * self.count)[place * self.count : (place + 1) * self.count]

    def offsets(self, layer: int) -> tuple[int, ...]:
        """The first row of each head's table in the concatenation."""
        return tuple(accumulate(self.sizes(layer)[:-1], initial=0))

    def rows(self, layer: int) -> int:
        """Rows of all tables of a layer."""
        return -(-sum(self.sizes(layer)) // self.unit) * self.unit

    def slice(self, layer: int, ranks: int) -> int:
        """Rows on a rank; the last rank's may be partly padding."""
        return -(-self.rows(layer) // ranks)

    def multipliers(self, layer: int) -> tuple[int, ...]:
        """The multipliers of a token's id, of the one before it, and so on."""
        half = max(1, ((1 << 63) - 1) // self.vocabulary // 2)
        seed = self.seed + PRIME * self.layers.index(layer)
        return tuple(2 * (_mixed(seed + GAMMA * (place + 1)) % half) + 1 for place in range(self.most))

    def channels(self, hidden: int) -> int:
        """Channels of the convolution, of all streams."""
        return self.streams * hidden

    def remembered(self, hidden: int) -> int:
        """Elements of recurrent state of all layers per sequence: the last inputs of the convolution."""
        return len(self.layers) * self.reach * self.channels(hidden)

    def table(self, ranks: int) -> int:
        """Elements of a rank's tables."""
        return sum(self.slice(layer, ranks) for layer in self.layers) * self.size // self.count

    def floats(self, hidden: int) -> int:
        """Elements held in float32: gains of norms."""
        return len(self.layers) * 3 * self.channels(hidden)

    def elements(self, ranks: int, hidden: int, tables: bool) -> int:
        """Parameters on a rank: projections to keys and values, norms, the convolution; with tables or without."""
        each = (self.streams + 1) * hidden * self.size + self.width * self.channels(hidden)
        return len(self.layers) * each + self.floats(hidden) + tables * self.table(ranks)

    @property
    def spread(self) -> int:
        """Zeros held between the convolution's taps, for each channel."""
        return self.reach + 1 - self.width


@cache
def primes(base: int, count: int) -> tuple[int, ...]:
    """The next `count` primes from `base` on."""
    found = list[int]()
    value = base
    while len(found) < count:
        if _is_prime(value):
            found.append(value)
        value += 1
    return tuple(found)


def _is_prime(value: int) -> bool:
    """Miller-Rabin test of a number below 3.4e14 (Miller 1976, Rabin 1980)."""
    if value < 2 or any(value % small == 0 for small in WITNESSES):
        return value in WITNESSES
    twos = ((value - 1) & -(value - 1)).bit_length() - 1
    for witness in WITNESSES:
        power = pow(witness, (value - 1) >> twos, value)
        if power in (1, value - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % value
            if power == value - 1:
                break
        else:
            return False
    return True


def _mixed(value: int) -> int:
    """A step of splitmix64 (Steele, Lea and Flood 2014)."""
    value = (value + GAMMA) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
