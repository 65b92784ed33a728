"""What a model may have that others have not, each by itself: parts of a `Shape`. Knows no tensor, as that."""

from dataclasses import dataclass, replace
from math import gcd
from typing import ClassVar

from .remembering import Matrices

LEAST_GROUP = 32  # products with few bits are of groups that are a multiple of it; all else is unpacked
MOST_ON_CPU = 256  # inputs that share a scale there


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding. `kind` "default" uses nothing but theta."""

    theta: float = 10000.0
    kind: str = "default"  # "default", "linear", "llama3", "yarn", "longrope", "proportional"
    factor: float = 1.0
    original_positions: int = 8192  # that the model was first trained on: llama3's, yarn's and longrope's
    # Turns over these positions: waves with more stay as they are, with less they are stretched, and those between interpolated.
    many_turns: float = 4.0
    few_turns: float = 1.0
    whole: bool = True  # yarn's: these bounds are rounded to whole pairs of features
    amplitude: float = 1.0  # of all cosines and sines
    growth: float = 0.0  # of queries, by the logarithm of how many times over they are behind the original positions
    short: tuple[float, ...] = ()  # longrope's: how far each wave is stretched if no more than the original positions are served,
    long: tuple[float, ...] = ()  # and if more are
    axes: tuple[int, ...] = ()  # of each pair of features: which of an image's positions turns it; (): images' tokens have one
    part: float = 1.0  # proportional's: of all pairs of features these turn, the first, and those behind them stand still
    learned: bool = False  # waves have factors, of which the checkpoint has the logarithms

    @property
    def reach(self) -> int:
        """Positions that it is made for, where it says so: yarn is added to a config.json whose number of positions stays."""
        return int(self.original_positions * self.factor) if self.kind == "yarn" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureTuning:
    """What queries are multiplied by, lest attention blur among many keys: 1 + strength * log(1 + times), of as many times as
    `positions` fit into a token's place, itself included."""

    strength: float
    positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alibi:
    """Linear biases (Press et al. 2022, arXiv:2108.12409) in the place of a rotary embedding: products of queries and keys get
    more, the nearer the key is. Of the distance the query's part is the same for all that it sees, which a softmax doesn't
    notice, so it is the key's position that counts."""

    slopes: tuple[float, ...]  # of heads: this times the position is added to products, before they are scaled
    rounded: bool = False  # slopes, positions and what they come to are rounded to bfloat16, whatever is computed with

    # Of a key as it is cached, which hold it: so many that heads of 16 bits begin at multiples of 16 bytes.
    features: ClassVar[int] = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Of the layers' matrices: fewer bits than what is computed with. Tables are none of it."""

    method: str  # "gptq", "awq", "compressed-tensors", "fp8", "modelopt", "mxfp4"; "": weights are rounded when they are loaded
    kind: str  # "int4", "int8", "fp8", "fp4", "nvfp4"
    group: int = 0  # inputs that share a scale; 0: all
    block: int = 0  # outputs that do; 0: none
    shifted: bool = False  # integers that mean 0 are stored less 1
    others: tuple["Quantization", ...] = ()  # ways in which some matrices are instead, with no more bits

    @property
    def at_load(self) -> bool:
        """The checkpoint is none that has few bits."""
        return not self.method

    def kept(self, device: str, dtype: str) -> bool:
        """Whether weights stay as they are stored: what has no products for them unpacks them when they are loaded."""
        return dtype != "float32" and (device == "cuda" or (self.kind == "int4" and dtype == "bfloat16"))

    def saved(self, item: int, device: str, dtype: str, inputs: int, own: int) -> float:
        """Bytes that a weight takes less than its `item`, with its part of a scale and of the integer that means 0; own: of as many
        inputs those that a rank has. Where ranks cut within a group, or the last one is cut off, scales are repeated."""
        shared = gcd(self.group, inputs, own)
        alike = gcd(inputs, own) if self.kind == "nvfp4" else shared  # products are of whole blocks, however many
        if not self.kept(device, dtype) or alike % LEAST_GROUP:
            return 0.0
        least = 1 if self.kind in ("int8", "fp8") else 0.5
        if device == "cpu":
            return item - least - 4 / gcd(shared, MOST_ON_CPU)
        scale = 1 if self.kind in ("fp4", "nvfp4") else 4 if self.kind == "fp8" else 5
        factor = 4 / own if own and self.kind == "nvfp4" else 0
        return item - least - (scale / shared if self.group else 0) - factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of a layer, and what their tensors are named."""

    experts: int
    idle: int = 0  # more behind these, which give back what they see
    chosen: int  # by each token
    size: int  # intermediate features of each
    latent: int = 0  # features that they see and make, between two matrices that every rank has whole; 0: the stream's
    normalized: bool  # the shares of those chosen add up to 1
    shared: int = 0  # intermediate features of one more, that all tokens go through
    shared_name: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"  # which lets tokens through it; "": all as they are
    shared_factor: float = 1.0  # of what it comes to
    sigmoid: bool = False  # each expert's score is by itself, instead of a softmax
    rooted: bool = False  # likewise, and is the root of a softplus
    hashed: bool = False  # a table says which experts a token goes through, by its number
    correction: str = ""  # the tensor that is added to scores for choosing by; behind a dot, of the layer itself; "": none
    groups: int = 1  # of experts, of which a token chooses first
    groups_chosen: int = 1
    best: int = 2  # of a group's experts by which it is chosen
    factor: float = 1.0  # of all shares of those chosen
    uncorrected: bool = False  # that tensor may be missing
    zeroed: bool = False  # those of groups that a token has not chosen count as 0, and not as none
    by_logits: bool = False  # it is what scores are made of that is corrected, and by which they are chosen
    near: float = 0.0  # each share is by a softmax over those whose scores differ by no more than this part; 0: over all
    least: float = 1e-20  # is added to the sum that shares are divided by
    quantization: Quantization | None = None  # of the experts alone
    biased: bool = False  # experts and their router have biases
    limit: float = 0.0  # beyond which gates and what they let through don't go; 0: none
    form: str = "steep"  # what a limit means: see `kernels.reference.Gates`
    shared_limit: float = 0.0  # of the one that all tokens go through
    precise: bool = False  # the router computes in float32 although its scores are a softmax's
    stacked: tuple[str, ...] = ()  # names of the two tensors that have all experts', gates first; (): as checkpoints have them
    interleaved: bool = False  # all experts are in one tensor, in which gates and what they let through stand by turns
    inputs_first: bool = False  # all experts are in one tensor, of each [inputs, outputs]
    by_kind: bool = False  # three tensors have those of all experts: gates, what they let through, and what leads back, turned
    entering: bool = False  # shares multiply what experts see, instead of what they make
    later: bool = False  # what they make is added with what the next layer's MLP makes; the one for all tokens is this layer's
    beside: bool = False  # the one that all tokens go through is the layer's MLP, and norms of their own are before and behind both
    name: str = "mlp"  # of what all of it is in; "": of the layer itself
    router: str = "gate"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def named(self, part: str) -> str:
        """Of what is in it."""
        return f"{self.name}.{part}".removeprefix(".") if not part.startswith(".") else part[1:]

    @property
    def routed(self) -> int:
        """Experts that the router chooses from."""
        return self.experts + self.idle

    @property
    def wide(self) -> bool:
        """The router computes in float32."""
        return self.precise or self.sigmoid or self.rooted or bool(self.correction)

    def narrow(self, hidden: int) -> Matrices:
        """To a latent and back."""
        return [(self.latent, hidden, hidden), (hidden, self.latent, self.latent)] if self.latent else []

    def routing(self, hidden: int) -> int:
        """Elements of the router, and of what corrects its scores."""
        return self.routed * (hidden + self.biased + bool(self.correction))

    def part(self, ranks: int) -> int:
        """Intermediate features of each on a rank. Blocks of experts in one tensor that alone are stored in a few bits are not
        divided: the last ranks have fewer of them, and zeros for what they lack."""
        whole = self.quantization.group if self.quantization and self.interleaved else 1
        return -(-self.size // (whole * ranks)) * whole

    def read(self, tokens: int | None) -> float:
        """How many of them so many tokens can be expected to choose; None: all."""
        return self.experts * (1 - (1 - self.chosen / self.routed) ** tokens if tokens is not None else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Heads that choose what a token attends to (DeepSeek-AI 2025, arXiv:2512.02556). Every rank has all of them."""

    heads: int
    size: int  # of a head, and of the key that is cached of each token
    most: int  # tokens that a token attends to
    neighbours: bool = False  # in the checkpoint, features that turn together are neighbours
    borrowing: frozenset[int] = frozenset()  # layers without one, which attend to what the last one before them has chosen
    turned_last: bool = False  # in the checkpoint, features that turn stand behind the others
    epsilon: float = 1e-6  # of the layer norm of keys
    streaming: bool = False  # queries are made of what keys are made of, behind a layer norm, instead of latents
    sharpened: bool = False  # queries, as `Shape.sharpened`
    pool: int = 0  # tokens that are chosen together, by a mean of their keys, which gates weigh (GLM 5 Next); 0: each by itself

    @property
    def cached(self) -> int:
        """Elements of a token: its key, and its gates."""
        return self.size * (2 if self.pool else 1)

    @property
    def read(self) -> float:
        """Elements of it that tokens choose by."""
        return self.size / max(1, self.pool)

    def matrices(self, queries: int, hidden: int) -> Matrices:
        """Of queries, which are made of latents of so many features if of any, and of keys."""
        inputs = hidden if self.streaming else queries
        return [(self.heads * self.size, inputs, inputs), (self.size, hidden, hidden)]

    def wide(self, hidden: int) -> int:
        """Elements that are held in float32: of what weighs heads, of what queries grow by, and of what is added to gates."""
        return self.heads * (hidden + 2 * self.sharpened) + self.pool * self.size

    def elements(self, queries: int, hidden: int) -> int:
        """Of all of it: these, norms of keys and of what queries are made of, gates, and what is `wide`."""
        norms, gates = 2 * (self.size + self.streaming * hidden), bool(self.pool) * self.size * hidden
        return elements(self.matrices(queries, hidden)) + norms + gates + self.wide(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnections:
    """Several residual streams, of which each part of a layer sees a mixture (Zhu et al. 2024, arXiv:2409.19606)."""

    count: int
    magnitude: float  # of the shares that streams get of what is added
    epsilon: float  # is added to all shares
    rounds: int = 0  # in which they become mixtures of each other, too: see `kernels.reference.Shares`; 0: they don't
    averaged: bool = False  # the output matrix sees their mean

    @property
    def kinds(self) -> list[int]:
        """Shares of each kind: of what is seen, of what is given, and of each other."""
        return [self.count, self.count, *([self.count**2] if self.rounds else [])]

    def elements(self, hidden: int, layers: int) -> int:
        """What mixes them: of two parts of each layer, which give, too, and of the output matrix."""
        each, count = self.count * hidden + 1, sum(self.kinds)
        last = 0 if self.averaged else self.count * each + 1
        return 2 * layers * (count * each + len(self.kinds)) + last

    def wide(self, hidden: int, layers: int) -> int:
        """Of these, those that are held in float32."""
        return self.elements(hidden, layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedHyperConnections(HyperConnections):
    """The same where each feature of each stream has a gate, which few features of all streams open (Qwen 4 Exp). What is seen is
    the mean of what they let through of the streams' norms."""

    magnitude: float = 2.0
    epsilon: float = 0.0
    rank: int  # features between the two matrices that make gates

    def elements(self, hidden: int, layers: int) -> int:
        """As that of `HyperConnections`."""
        all_streams = self.count * hidden
        return (2 * layers + 1) * 2 * self.rank * all_streams + 2 * layers * self.count * all_streams + self.wide(hidden, layers)

    def wide(self, hidden: int, layers: int) -> int:
        """Gains of norms."""
        return (2 * layers + 1) * self.count * hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpShape:
    """Several residual streams, of which layers compute one (AltUp: Baykal et al. 2023, arXiv:2301.13310)."""

    count: int
    active: int = 0  # the one that is computed
    scaled: bool = True  # what layers are told apart goes by that one times gains of the layer's

    def wide(self, hidden: int) -> int:
        """Elements of a layer that are held in float32: what shares of all streams, and of what corrects them, are made by."""
        return self.count * (hidden + self.count * (1 + self.count))

    def elements(self, hidden: int, layers: int) -> int:
        """Of all layers, and of what makes several streams of one, and one of several."""
        return layers * (self.wide(hidden) + 2 * hidden) + 2 * (self.count - 1) * hidden**2


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndex:
    """Heads that choose blocks of tokens instead, one for each key head (MiniMax M3), and a key for all that every rank has."""

    layers: frozenset[int]  # which have one; in others a token attends to all before it
    heads: int
    size: int
    most: int  # tokens that a token attends to, of whole blocks
    block: int  # tokens
    local: int  # of the last blocks that a token sees so many are always chosen
    pool: ClassVar[int] = 0  # see `PoolIndex`

    @property
    def read(self) -> float:
        """Elements of a token that others choose by."""
        return self.size

    def own(self, ranks: int) -> int:
        """Heads on a rank: see `Keys.own`."""
        return max(1, self.heads // ranks)

    def matrices(self, ranks: int, hidden: int) -> Matrices:
        """Of queries and keys."""
        return [((self.own(ranks) + 1) * self.size, hidden, hidden)]

    def elements(self, ranks: int, hidden: int) -> int:
        """Of all of it: these, and norms of both."""
        return elements(self.matrices(ranks, hidden)) + 2 * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolIndex:
    """Heads that choose pools of tokens for all heads of keys alike, by means of their keys (Qwen 4 Exp): see `kernels.means`.
    Every rank has all of it."""

    layers: frozenset[int]
    heads: int
    size: int  # of a head, and of the key that is cached of each token
    most: int  # tokens that a token attends to, beside the pool that isn't full
    pool: int  # tokens
    block: ClassVar[int] = 0  # see `BlockIndex`

    @property
    def read(self) -> float:
        """As that of `BlockIndex`."""
        return self.size / self.pool

    def own(self, ranks: int) -> int:
        """As that of `BlockIndex`."""
        return self.heads

    def matrices(self, ranks: int, hidden: int) -> Matrices:
        """As that of `BlockIndex`."""
        return [((self.heads + 1) * self.size, hidden, hidden)]

    def elements(self, ranks: int, hidden: int) -> int:
        """As that of `BlockIndex`."""
        return elements(self.matrices(ranks, hidden)) + 2 * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """What all heads' keys and values are made of, instead of heads of their own (DeepSeek-AI 2024, arXiv:2405.04434). Features."""

    size: int  # of a token's latent
    turned: int  # of its key that turn, the same for all heads
    plain: int  # of each head's queries and keys that don't
    values: int  # of each head
    queries: int = 0  # that queries are made of; 0: of the residual stream
    epsilon: float = 1e-6  # of norms of both, whatever other norms have
    index: Index | None = None  # None: each token attends to all before it
    gated: bool = False  # what makes queries makes gates of what heads find, too, of their latents behind the norm and before it
    apart: bool = True  # what turns stands beside the latent in layers without a rotary embedding, too; or it is plain there

    @property
    def width(self) -> int:
        """Features of a token that a layer makes, before zeros fill them up to those of other layers."""
        return self.size + self.turned

    def asking(self, heads: int) -> tuple[int, int, int]:
        """The matrix by which queries of so many heads are made of their latents."""
        inputs = (1 + self.gated) * self.queries
        return heads * (self.plain + self.turned + self.gated * self.values), inputs, inputs

    def of(self, turns: bool) -> "Latent":
        """As layers have it that have a rotary embedding, or those that have none."""
        return self if turns or self.apart else replace(self, plain=self.plain + self.turned, turned=0)

    def at(self, layer: int, turns: bool) -> "Latent":
        """The same, as that layer has it."""
        return self.of(turns)

    @property
    def kept(self) -> int:
        """Features that are cached of a token behind its latent, besides an index's key."""
        return 0

    @property
    def choosing(self) -> Matrices:
        """Of what chooses, where that is no `Index`."""
        return []

    def undivided(self, heads: int, ranks: int) -> str:
        """What so many ranks can't have equal parts of; "": they can."""
        return ""

    def matrices(self, heads: int, ranks: int, hidden: int, gates: int) -> Matrices:
        """Before and behind attention, on a rank, with so many columns of gates."""
        own = heads // ranks
        asked, back = own * (self.plain + self.turned), (hidden, heads * self.values, own * self.values)
        beside = self.width + gates
        if not self.queries:
            return [(asked + beside, hidden, hidden), back]
        return [(self.queries + beside, hidden, hidden), self.asking(own), back]

    def beside(self, heads: int, ranks: int, hidden: int, biased: bool) -> int:
        """Elements of what else there is on a rank: norms and biases, and what leads from latents to heads."""
        found = heads // ranks * (self.plain + self.values) * self.size + self.size + self.queries
        return found + biased * (self.queries + self.width)

    def floats(self, hidden: int) -> int:
        """Of that, elements that are held in float32."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFeatures:
    """What a draft model that is made for one other model goes by, beside tokens: what that made of the token before each."""

    layers: tuple[int, ...]  # of that model: what enters these, side by side; (): what its last norm gives
    widened: bool  # attention sees a token and what was made of the one before it side by side; else a matrix makes one of both
    normalized: bool = False  # what attention sees of the latter is also what the stream begins with, instead of what its norm sees
    behind: bool = False  # for what the model would make of a draft stands what the last norm gives, instead of what it sees
    table: bool = True  # it has an output matrix of its own
    names: tuple[tuple[str, str], ...] = ()  # what names of a decoder's tensors begin with, and those of the checkpoint instead

    def elements(self, hidden: int) -> int:
        """Of the matrix that makes one of several, and of norms before it."""
        return len(self.layers) * hidden**2 + hidden if self.widened else 2 * hidden**2 + 2 * hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The key heads of a layer, and how many query heads they are for."""

    heads: int
    size: int  # of a head
    values: bool = True  # have a matrix of their own; without, they are what keys are before these are normalized and turned
    value_size: int = 0  # of a value, if smaller than a key; zeros fill it up where it is cached; 0: the same
    queries: int = 0  # query heads, if others than in other layers; 0: they are not

    @property
    def own_values(self) -> int:
        """Features of a value before it is cached."""
        return self.value_size or self.size

    def own(self, ranks: int) -> int:
        """How many a rank has. Of fewer heads than ranks, several ranks in a row have the same one."""
        return max(1, self.heads // ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """What each layer is told of a token apart."""

    size: int  # features for each layer
    vocabulary: int  # rows of the table that they come from; of tokens beyond it the first
    padding: int = 0  # the row for images' tokens

    def matrices(self, ranks: int, hidden: int) -> Matrices:
        """What gates them, and what leads back to the stream."""
        own = self.size // ranks
        return [(own, hidden, hidden), (hidden, self.size, own)]

    def elements(self, ranks: int, hidden: int, layers: int, table: bool) -> int:
        """Of all that makes and takes them, on a rank; table: with that."""
        taking = elements(self.matrices(ranks, hidden))
        return layers * (self.size * hidden + taking + hidden + table * self.vocabulary * self.size // ranks) + self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How tensors are named, and lie, in checkpoints of older families. Ours are those of Llama's."""

    roots: tuple[str, ...]  # what names begin with: the first by which there is an embedding table
    layers: str
    names: tuple[tuple[str, str], ...]  # of modules, ours and theirs: within a layer, and beside the layers
    joint: bool = False  # queries, keys and values are in one tensor
    grouped: bool = False  # in which they stand by key heads: its queries, a key, a value
    turned: bool = False  # matrices of layers are [inputs, outputs]


def elements(matrices: Matrices) -> int:
    """On a rank."""
    return sum(outputs * own for outputs, _, own in matrices)
