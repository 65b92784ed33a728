"""What keys and values of DeepSeek V4's layers are (DeepSeek-AI 2026): a part of a `Shape`. Knows no tensor, as that."""

from dataclasses import dataclass, replace

from .remembering import Matrices
from .traits import Latent


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed(Latent):
    """One key of a token is all heads' key and value, of which the last features turn. A token sees those of a window, and in most
    layers entries, each of which stands for so many tokens before it, the window's included.

    An entry is a mean of its tokens' features, as gates of each weigh them. In layers where it overlaps it is also one of others
    of those tokens that stand before its own, and an index chooses the entries that are seen, by smaller ones that are made
    alike. All that an entry is made of stands in its tokens' slots, and the entry in that of the last of them.
    """

    window: int  # positions that a token may look back, itself included
    groups: int  # of heads, what each of which finds becomes so many features by itself:
    rank: int
    index_heads: int
    index_size: int  # of one
    index_most: int  # entries that it chooses
    rates: tuple[int, ...] = ()  # per layer: tokens of an entry; 0: there are none
    overlapping: frozenset[int] = frozenset()  # layers
    # The same of one layer, which `at` gives.
    rate: int = 0
    indexed: bool = False  # entries overlap, and an index chooses of them

    @property
    def width(self) -> int:
        """As of `Latent`: what turns is a part of the key."""
        return self.size

    @property
    def series(self) -> int:
        """Features of a token that become entries: what is weighed, and gates."""
        return 2 * self.size * ((self.rate > 0) + self.indexed) + self.indexing

    @property
    def indexing(self) -> int:
        """Of these, the index's."""
        return 4 * self.index_size * self.indexed

    @property
    def kept(self) -> int:
        """As of `Latent`. An entry is a row of the same tensor as keys, so that a slot holds whole rows."""
        return -(-self.series // self.size) * self.size

    @property
    def kinds(self) -> tuple[tuple[int, int], ...]:
        """Tokens of an entry in each kind of layers, and how many of them are chosen; 0: all are seen."""
        each = {(rate, self.index_most * (layer in self.overlapping)) for layer, rate in enumerate(self.rates) if rate}
        return tuple(sorted(each))

    @property
    def choosing(self) -> Matrices:
        """The matrix that an index's queries are made by."""
        return [(self.index_heads * self.index_size, self.queries, self.queries)] if self.indexed else []

    def at(self, layer: int, turns: bool) -> "Compressed":
        """As of `Latent`."""
        indexed = layer in self.overlapping
        return replace(self, rate=self.rates[layer], indexed=indexed, rates=(), overlapping=frozenset())

    def own_groups(self, ranks: int) -> int:
        """That a rank has heads of."""
        return max(1, self.groups // ranks)

    def undivided(self, heads: int, ranks: int) -> str:
        """As of `Latent`."""
        return f"{self.groups} groups of heads" if self.groups % ranks and ranks % self.groups else ""

    def matrices(self, heads: int, ranks: int, hidden: int, gates: int) -> Matrices:
        """As of `Latent`. What leads from heads to groups is none of them, nor what entries are made by: they have all bits."""
        own, back = heads // ranks * self.size, self.own_groups(ranks) * self.rank
        return [
            (self.queries + self.size, hidden, hidden),
            (own, self.queries, self.queries),
            (hidden, self.groups * self.rank, back),
        ]

    def beside(self, heads: int, ranks: int, hidden: int, biased: bool) -> int:
        """As of `Latent`."""
        found = self.queries + self.size + heads // ranks * self.size * self.rank + self.series * hidden + self.floats(hidden)
        norms = self.size * (self.rate > 0) + self.index_size * self.indexed
        return found + norms + sum(outputs * inputs for outputs, inputs, _ in self.choosing)

    def floats(self, hidden: int) -> int:
        """As of `Latent`: what is added to gates by a token's place among those of its entry, and what weighs an index's heads."""
        return self.rate * self.series // 2 + self.index_heads * hidden * self.indexed

    def seen(self, context: int) -> int:
        """Keys and entries that the last token of a context sees."""
        entries = context // self.rate if self.rate else 0
        return min(context, self.window) + (min(entries, self.index_most) if self.indexed else entries)

    def pairs(self, tokens: int) -> int:
        """How many all tokens of a prompt do, about."""
        near = min(tokens, self.window)
        entries = self.seen(tokens) - near
        growing = entries * self.rate  # tokens, of which each sees as many entries as there are
        return near * (2 * tokens - near + 1) // 2 + entries * growing // 2 + entries * (tokens - growing)

    def asked(self, context: int) -> int:
        """Numbers of an index that the last token of a context reads."""
        return context // self.rate * self.index_size if self.indexed else 0
