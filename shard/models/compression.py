"""The `Shape` of DeepSeek V4's attention (DeepSeek-AI 2026): a sliding window and compressed entries. Holds no tensor, like
`Shape`."""

from dataclasses import dataclass, replace

from .recurrent_shapes import Matrices
from .traits import Latent


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedLatent(Latent):
    """DeepSeek V4's attention: one key per token is key and value of all heads, with a rotary embedding of its last features. A
    token attends to a sliding window, and in most layers to entries, each of which stands for a number of tokens before it, those
    of the window included.

    An entry is a mean of its tokens' features, weighted by gates of each. In layers with overlap it also covers as many tokens
    before its own, and an index selects the entries to attend to, by smaller entries that are made alike. All inputs of an entry
    are cached in its tokens' slots, and the entry in the slot of its last token.
    """

    window: int  # sliding window, in positions, the token itself included
    groups: int  # groups of heads; each projects its attention output by itself to `rank` features
    rank: int  # features of each group before the common output projection
    index_heads: int  # query heads of the index that selects entries
    index_size: int  # features of an index head
    index_most: int  # entries that it selects
    rates: tuple[int, ...] = ()  # per layer: tokens of an entry (compression rate); 0: there are none
    overlapping: frozenset[int] = frozenset()  # layers whose entries overlap
    # The same for one layer, as `at` returns it.
    rate: int = 0
    indexed: bool = False  # entries overlap, and an index selects among them

    @property
    def width(self) -> int:
        """As of `Latent`: the rotary features are a part of the key."""
        return self.size

    @property
    def series(self) -> int:
        """Features of a token from which entries are computed: values and gates."""
        return 2 * self.size * ((self.rate > 0) + self.indexed) + self.indexing

    @property
    def indexing(self) -> int:
        """Of these, those of the index's entries."""
        return 4 * self.index_size * self.indexed

    @property
    def kept(self) -> int:
        """As of `Latent`, rounded up to whole keys: an entry is a row of the same tensor as keys."""
        return -(-self.series // self.size) * self.size

    @property
    def kinds(self) -> tuple[tuple[int, int], ...]:
        """For each kind of layers, tokens of an entry and the number of entries selected; 0: all are attended to."""
        each = {(rate, self.index_most * (layer in self.overlapping)) for layer, rate in enumerate(self.rates) if rate}
        return tuple(sorted(each))

    @property
    def choosing(self) -> Matrices:
        """The index's query projection."""
        return [(self.index_heads * self.index_size, self.queries, self.queries)] if self.indexed else []

    def at(self, layer: int, turns: bool) -> "CompressedLatent":
        """As of `Latent`."""
        indexed = layer in self.overlapping
        return replace(self, rate=self.rates[layer], indexed=indexed, rates=(), overlapping=frozenset())

    def undivided(self, heads: int, ranks: int) -> str:
        """As of `Latent`."""
        return f"{self.groups} groups of heads" if self.groups % ranks and ranks % self.groups else ""

    def matrices(self, heads: int, ranks: int, hidden: int, gates: int) -> Matrices:
        """As of `Latent`, without the projections from heads to groups, and those of entries: they are not quantized."""
        own, groups = heads // ranks * self.size, max(1, self.groups // ranks)  # groups of which the rank has heads
        return [
            (self.queries + self.size, hidden, hidden),
            (own, self.queries, self.queries),
            (hidden, self.groups * self.rank, groups * self.rank),
        ]

    def beside(self, heads: int, ranks: int, hidden: int, biased: bool) -> int:
        """As of `Latent`."""
        found = self.queries + self.size + heads // ranks * self.size * self.rank + self.series * hidden + self.floats(hidden)
        return found + self.size * (self.rate > 0) + self.index_size * self.indexed

    def floats(self, hidden: int) -> int:
        """As of `Latent`: the position biases of gates within an entry, and the head weights of the index."""
        return self.rate * self.series // 2 + self.index_heads * hidden * self.indexed

    def seen(self, context: int) -> int:
        """Keys and entries that the last token of a context attends to."""
        entries = context // self.rate if self.rate else 0
        return min(context, self.window) + (min(entries, self.index_most) if self.indexed else entries)

    def pairs(self, tokens: int) -> int:
        """Keys and entries that all tokens of a prompt attend to, about."""
        near = min(tokens, self.window)
        entries = self.seen(tokens) - near
        growing = entries * self.rate  # tokens that attend to all entries so far
        return near * (2 * tokens - near + 1) // 2 + entries * growing // 2 + entries * (tokens - growing)

    def asked(self, context: int) -> int:
        """Elements of index entries that the last token of a context reads."""
        return context // self.rate * self.index_size if self.indexed else 0
