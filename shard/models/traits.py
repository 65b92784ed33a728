"""Optional parts of a `Shape`, each of which some model families have: rotary embedding, MLA, sparse attention indexes, mixture of
experts, quantization and so on. Holds no tensor, like `Shape`."""

from dataclasses import dataclass, replace
from math import gcd
from typing import ClassVar

from .recurrent_shapes import Matrices

LEAST_GROUP = 32  # quantized matrix products take groups that are a multiple of it; all else is unpacked
MOST_ON_CPU = 256  # the most inputs that share a scale in products on a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureTuning:
    """Attention temperature tuning: queries are multiplied by 1 + strength * log(1 + times), lest attention blur among many keys,
    where `times` is how often `positions` fit into a token's position, counted from `first`."""

    strength: float
    positions: int
    first: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding (RoPE). `kind` "default" uses nothing but theta."""

    theta: float = 10000.0
    kind: str = "default"  # "default", "linear", "llama3", "yarn", "longrope", "proportional"
    factor: float = 1.0
    original_positions: int = 8192  # context length of the original training: llama3's, yarn's and longrope's
    # Rotations over the original positions: frequencies with more stay as they are, with less they are stretched, and those between
    # interpolated.
    many_turns: float = 4.0
    few_turns: float = 1.0
    whole: bool = True  # yarn's: these bounds are rounded to whole pairs of features ("truncate")
    amplitude: float = 1.0  # multiplies all cosines and sines
    query_scale: TemperatureTuning | None = None  # scales queries by position (llama_4_scaling_beta); None: nothing does
    # Longrope's stretching factors of the frequencies, where at most the original positions are served.
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()  # where more are served
    # For mrope: for each pair of features, which of an image token's positions rotates it; (): image tokens have one position.
    axes: tuple[int, ...] = ()
    part: float = 1.0  # proportional's: the fraction of pairs of features that rotate, the first ones
    learned: bool = False  # frequencies have learned factors, of which the checkpoint has the logarithms

    @property
    def reach(self) -> int:
        """Positions that it extends to, where it says so: yarn is added to a config.json whose number of positions stays."""
        return int(self.original_positions * self.factor) if self.kind == "yarn" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """Gates that attention's output is multiplied by."""

    name: str = ""  # of their matrix, which has no biases; "": in the checkpoint they are beside each head's queries
    by_head: bool = False  # one gate for each head instead of one for each of its features
    softplus: bool = False  # they go through softplus instead of a sigmoid


@dataclass(frozen=True, slots=True, kw_only=True)
class Alibi:
    """ALiBi: linear biases (Press et al. 2022, arXiv:2108.12409) in place of a rotary embedding: products of queries and keys get a
    bias that decreases with distance. The query position's part is the same for all keys, which softmax cancels, so that only the
    key's position is added."""

    slopes: tuple[float, ...]  # per head: this times the position is added to products, before they are scaled
    rounded: bool = False  # slopes, positions and biases are rounded to bfloat16, whatever the type of computation

    # Features of a cached key that hold its bias: so many that heads of 16 bits begin at multiples of 16 bytes.
    features: ClassVar[int] = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Quantization of the layers' matrices; embedding table and LM head are not quantized."""

    method: str  # "gptq", "awq", "compressed-tensors", "fp8", "modelopt", "mxfp4"; "": weights are quantized at load
    kind: str  # "int4", "int8", "fp8", "fp4", "nvfp4"
    group: int = 0  # inputs that share a scale; 0: all
    block: int = 0  # outputs that share a scale; 0: none do
    shifted: bool = False  # zero points are stored minus 1
    others: tuple["Quantization", ...] = ()  # formats of some other matrices, with no more bits

    @property
    def at_load(self) -> bool:
        """Whether weights are quantized at load, from an unquantized checkpoint."""
        return not self.method

    def kept(self, device: str, dtype: str) -> bool:
        """Whether weights stay quantized in memory: where there are no products for them, they are unpacked at load."""
        return dtype != "float32" and (device == "cuda" or (self.kind == "int4" and dtype == "bfloat16"))

    def saved(self, item: int, device: str, dtype: str, inputs: int, own: int) -> float:
        """Bytes that a weight takes less than `item`, with its part of a scale and a zero point; own: of so many `inputs` those
        that a rank has. Where ranks cut within a group, or the last group is partial, scales are repeated."""
        shared = gcd(self.group, inputs, own)
        alike = gcd(inputs, own) if self.kind == "nvfp4" else shared  # products take whole blocks, however many
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
    """The mixture of experts of a layer: routing, sizes, and the names of its tensors."""

    experts: int
    idle: int = 0  # identity experts numbered after these, which return their input
    chosen: int  # experts of each token (top-k)
    size: int  # intermediate features of each expert
    # Features of the latent that experts read and write, between two matrices that every rank has whole; 0: the stream's.
    latent: int = 0
    normalized: bool  # the weights of a token's experts are normalized to add up to 1
    shared: int = 0  # intermediate features of a shared expert, for all tokens; 0: there is none
    shared_name: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"  # gate of the shared expert's output; "": none
    shared_factor: float = 1.0  # multiplies the shared expert's output
    # What router scores are of logits: "softmax", "sigmoid", or "sqrtsoftplus", the square root of softplus.
    scores: str = "softmax"
    hashed: bool = False  # hash routing: a table says which experts a token goes through, by its id
    # Tensor of the correction bias, added to scores for choosing experts alone; behind a dot, of the layer itself; "": none.
    correction: str = ""
    groups: int = 1  # groups of experts: a token first chooses groups (group-limited top-k)
    groups_chosen: int = 1
    best: int = 2  # the number of a group's best experts whose scores rate the group
    factor: float = 1.0  # multiplies the weights of the chosen experts
    uncorrected: bool = False  # the correction bias may be missing
    zeroed: bool = False  # scores of groups that are not chosen count as 0, not as minus infinity
    by_logits: bool = False  # the correction bias is added to router logits, which experts are chosen by, not to scores
    # Phi MoE's sparse mixer: each weight is by a softmax over experts whose scores differ relatively by no more than this; 0: over
    # all.
    near: float = 0.0
    least: float = 1e-20  # added to the sum by which weights are normalized
    quantization: Quantization | None = None  # of the experts, if not the layer's
    biased: bool = False  # experts and router have biases
    limit: float = 0.0  # gates and up projections are clamped to it; 0: they are not
    form: str = "steep"  # how the limit is applied: see `kernels.reference.Activation`
    shared_limit: float = 0.0  # of the shared expert
    precise: bool = False  # the router is computed in float32 although its scores are a softmax
    stacked: tuple[str, ...] = ()  # names of the two tensors that hold all experts, gates first; (): as checkpoints have them
    interleaved: bool = False  # gpt-oss: all experts are in one tensor, in which gate and up rows alternate
    inputs_first: bool = False  # all experts are in one tensor, [inputs, outputs] for each
    by_kind: bool = False  # DBRX: three tensors hold all experts' gate, up and transposed down projections
    entering: bool = False  # weights multiply what experts read, instead of their output
    later: bool = False  # shortcut experts: their output is added with the next layer's MLP; the shared expert is this layer's MLP
    # Gemma 4: the shared expert is the layer's MLP, and both it and the experts have norms of their own, before and after.
    beside: bool = False
    name: str = "mlp"  # module that holds all of it; "": the layer itself
    router: str = "gate"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def named(self, part: str) -> str:
        """The name of a tensor or module within it."""
        return f"{self.name}.{part}".removeprefix(".") if not part.startswith(".") else part[1:]

    @property
    def routed(self) -> int:
        """Experts that the router chooses from, identity experts included."""
        return self.experts + self.idle

    @property
    def wide(self) -> bool:
        """Whether the router is computed in float32."""
        return self.precise or self.scores != "softmax" or self.correction != ""

    def narrow(self, hidden: int) -> Matrices:
        """The matrices to the experts' latent and back."""
        return [(self.latent, hidden, hidden), (hidden, self.latent, self.latent)] if self.latent else []

    def routing(self, hidden: int) -> int:
        """Parameters of the router and the correction bias."""
        return self.routed * (hidden + self.biased + bool(self.correction))

    def floats(self, hidden: int) -> int:
        """Parameters held in float32: the router, if it is `wide`, its norm, and factors of the experts' weights."""
        return self.wide * self.routing(hidden) + self.beside * (hidden + self.experts)

    def part(self, ranks: int) -> int:
        """Intermediate features of each expert on a rank. Quantization blocks of experts in one tensor are not split: the last
        ranks have fewer features, and zeros for the rest."""
        whole = self.quantization.group if self.quantization and self.interleaved else 1
        return -(-self.size // (whole * ranks)) * whole

    def read(self, tokens: int | None) -> float:
        """The number of experts that so many tokens are expected to choose; None: all."""
        return self.experts * (1 - (1 - self.chosen / self.routed) ** tokens if tokens is not None else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The indexer of sparse attention (DeepSeek-AI 2025, arXiv:2512.02556): heads that choose the tokens that each token attends
    to. Every rank has all of them."""

    heads: int
    size: int  # of a head, and of the key that is cached per token
    most: int  # tokens that a token attends to (top-k)
    neighbours: bool = False  # the checkpoint has interleaved rotary features: those that rotate together are neighbours
    borrowing: frozenset[int] = frozenset()  # layers without an indexer, which reuse what the last one before them chose
    turned_last: bool = False  # the checkpoint has rotary features after the others
    epsilon: float = 1e-6  # of the keys' layer norm
    streaming: bool = False  # queries are projected from the residual stream, after a layer norm, instead of from query latents
    scalable_softmax: bool = False  # scalable softmax of its queries, as `Shape.scalable_softmax`
    # Tokens of a pool, which is chosen as a whole by a gated mean of their keys (GLM 5 Next); 0: tokens are chosen singly.
    pool: int = 0

    @property
    def cached(self) -> int:
        """Cached elements per token: its key, and with pools its gates."""
        return self.size * (2 if self.pool else 1)

    @property
    def read(self) -> float:
        """Elements per token that are read to choose."""
        return self.size / max(1, self.pool)

    def matrices(self, queries: int, hidden: int) -> Matrices:
        """The query projection, from latents of so many features if from any, and the key projection."""
        inputs = hidden if self.streaming else queries
        return [(self.heads * self.size, inputs, inputs), (self.size, hidden, hidden)]

    def floats(self, hidden: int) -> int:
        """Elements held in float32: the head weights' projection, scalable softmax, and the biases of gates."""
        return self.heads * (hidden + 2 * self.scalable_softmax) + self.pool * self.size

    def beside(self, hidden: int) -> int:
        """Other parameters: norms of keys and of the queries' input, gates, and what is in `floats`."""
        return 2 * (self.size + self.streaming * hidden) + bool(self.pool) * self.size * hidden + self.floats(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnections:
    """Hyper-connections: several residual streams, of which attention and MLP each read a mixture (Zhu et al. 2024,
    arXiv:2409.19606)."""

    count: int
    magnitude: float  # of the weights by which outputs are added to the streams
    epsilon: float  # added to all weights
    # Sinkhorn iterations for the weights by which streams are mixed with each other (mHC), see
    # `kernels.reference.HyperConnectionWeights`; 0: they are not mixed.
    rounds: int = 0
    averaged: bool = False  # the LM head reads the mean of all streams

    @property
    def kinds(self) -> list[int]:
        """Numbers of weights of each kind: to read, to write, and of streams among each other."""
        return [self.count, self.count, *([self.count**2] if self.rounds else [])]

    def elements(self, hidden: int, layers: int) -> int:
        """Parameters: in each layer for attention and MLP, which read and write, and for the LM head, which reads."""
        each, count = self.count * hidden + 1, sum(self.kinds)
        last = 0 if self.averaged else self.count * each + 1
        return 2 * layers * (count * each + len(self.kinds)) + last

    def floats(self, hidden: int, layers: int) -> int:
        """Of these, elements held in float32."""
        return self.elements(hidden, layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedHyperConnections(HyperConnections):
    """Hyper-connections with elementwise gates (Qwen 4 Exp): a low-rank projection of all streams gates each feature of each
    stream, and what is read is the mean of the gated norms of the streams."""

    magnitude: float = 2.0
    epsilon: float = 0.0
    rank: int  # rank of the gates' projection

    def elements(self, hidden: int, layers: int) -> int:
        """As that of `HyperConnections`."""
        all_streams = self.count * hidden
        return (2 * layers + 1) * 2 * self.rank * all_streams + 2 * layers * self.count * all_streams + self.floats(hidden, layers)

    def floats(self, hidden: int, layers: int) -> int:
        """Elements held in float32: gains of norms."""
        return (2 * layers + 1) * self.count * hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpShape:
    """AltUp: several residual streams, of which layers compute one (Baykal et al. 2023, arXiv:2301.13310)."""

    count: int
    active: int = 0  # index of the stream that is computed
    scaled: bool = True  # per-layer inputs are gated by that stream times gains of the layer

    def floats(self, hidden: int) -> int:
        """Elements per layer held in float32: router, prediction and correction coefficients."""
        return self.count * (hidden + self.count * (1 + self.count))

    def elements(self, hidden: int, layers: int) -> int:
        """Parameters of all layers, and of the projections from one stream to several and back."""
        return layers * (self.floats(hidden) + 2 * hidden) + 2 * (self.count - 1) * hidden**2


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadIndex:
    """The index of sparse attention for heads of keys and values. It chooses blocks of tokens, by one query head for each key head
    (MiniMax M3); or pools of tokens for all key heads alike, by means of the tokens' keys (Qwen 4 Exp): see `kernels.means`. All
    its heads share one key, which every rank has."""

    layers: frozenset[int]  # layers with an index; in others all visible tokens are attended to
    heads: int
    size: int  # of a head, and of the key that is cached per token
    most: int  # tokens that a token attends to, in whole blocks, or besides the incomplete pool
    block: int = 0  # tokens of a block; 0: it chooses pools
    local: int = 0  # so many of the last blocks that a token sees are always chosen
    pool: int = 0  # tokens of a pool; 0: it chooses blocks

    @property
    def read(self) -> float:
        """Elements per token that are read to choose."""
        return self.size / max(1, self.pool)

    def own(self, ranks: int) -> int:
        """Query heads on a rank: of blocks see `Keys.own`, of pools all."""
        return max(1, self.heads // ranks) if self.block else self.heads

    def matrices(self, ranks: int, hidden: int) -> Matrices:
        """The projection of queries and keys."""
        return [((self.own(ranks) + 1) * self.size, hidden, hidden)]

    @property
    def beside(self) -> int:
        """Other parameters: norms of both."""
        return 2 * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (MLA): keys and values of all heads are projections of one latent per token (DeepSeek-AI 2024,
    arXiv:2405.04434). Sizes are numbers of features."""

    size: int  # of a token's latent (kv_lora_rank)
    turned: int  # of the rotary key, which all heads share
    plain: int  # of each head's queries and keys without rotary embedding
    values: int  # of each head's values
    queries: int = 0  # of the query latent (q_lora_rank); 0: queries are projected from the residual stream
    epsilon: float = 1e-6  # of the latents' norms, whatever other norms have
    index: Index | None = None  # sparse attention; None: all visible tokens are attended to
    # The query projection has gates of the attention output, too, computed from the query latent before and after its norm.
    gated: bool = False
    # In layers without a rotary embedding the rotary key stays separate from the latent; else it becomes a part of the plain keys.
    apart: bool = True

    @property
    def width(self) -> int:
        """Features of a token that a layer computes, before zeros pad them to those of other layers."""
        return self.size + self.turned

    def query_matrix(self, heads: int) -> tuple[int, int, int]:
        """The matrix from query latents to the queries of so many heads."""
        inputs = (1 + self.gated) * self.queries
        return heads * (self.plain + self.turned + self.gated * self.values), inputs, inputs

    def at(self, layer: int, turns: bool) -> "Latent":
        """The latents of that layer; turns: it has a rotary embedding."""
        return self if turns or self.apart else replace(self, plain=self.plain + self.turned, turned=0)

    @property
    def kept(self) -> int:
        """Features cached per token after its latent, besides an index's key."""
        return 0

    @property
    def choosing(self) -> Matrices:
        """The query matrices of an index that is no `Index`."""
        return []

    def undivided(self, heads: int, ranks: int) -> str:
        """What can't be divided equally among so many ranks; "": all can."""
        return ""

    def matrices(self, heads: int, ranks: int, hidden: int, gates: int) -> Matrices:
        """The matrices before and after attention on a rank, with so many columns of gates."""
        own = heads // ranks
        asked, back = own * (self.plain + self.turned), (hidden, heads * self.values, own * self.values)
        beside = self.width + gates
        if not self.queries:
            return [(asked + beside, hidden, hidden), back]
        return [(self.queries + beside, hidden, hidden), self.query_matrix(own), back]

    def beside(self, heads: int, ranks: int, hidden: int, biased: bool) -> int:
        """Other parameters on a rank: norms and biases, and the projections from latents to heads."""
        found = heads // ranks * (self.plain + self.values) * self.size + self.size + self.queries
        return found + biased * (self.queries + self.width)

    def floats(self, hidden: int) -> int:
        """Of these, elements held in float32."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFeatures:
    """What a draft head made for one target model reads, besides tokens: the target's features of the token before each (EAGLE-3,
    MTP)."""

    layers: tuple[int, ...]  # target layers whose inputs are read, concatenated; (): the output of the last norm
    widened: bool  # attention reads embedding and features concatenated; else a matrix projects both to one
    # The residual stream begins with the normalized features that attention reads, instead of those before the norm.
    normalized: bool = False
    # The head's own output replaces the target's features of a draft: after the last norm, instead of before it.
    behind: bool = False
    table: bool = True  # it has an LM head of its own
    names: tuple[tuple[str, str], ...] = ()  # prefixes of a decoder's tensor names, and what the checkpoint has instead

    def elements(self, hidden: int) -> int:
        """Parameters of the projection of features, and of the norms before it."""
        return len(self.layers) * hidden**2 + hidden if self.widened else 2 * hidden**2 + 2 * hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The key and value heads of a layer, and its number of query heads."""

    heads: int
    size: int  # of a head
    values: bool = True  # values have a projection of their own; else they are the keys before norm and rotary embedding
    value_size: int = 0  # of a value, if smaller than a key: it is padded with zeros in the cache; 0: the same
    queries: int = 0  # query heads, if the layer has other than `Shape.heads`; 0: it has not
    turned: int = 0  # features of a head that rotate, if others than `Shape.rotary_size`; 0: no others

    @property
    def own_values(self) -> int:
        """Features of a value before padding."""
        return self.value_size or self.size

    def own(self, ranks: int) -> int:
        """Key heads of a rank. Of fewer heads than ranks, several ranks in a row have the same one."""
        return max(1, self.heads // ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerShape:
    """Per-layer embeddings (Gemma 3n and 4): an input of each token for each layer."""

    size: int  # features for each layer
    vocabulary: int  # rows of their table; tokens beyond it take row 0
    padding: int = 0  # the row for image tokens

    def matrices(self, ranks: int, hidden: int) -> Matrices:
        """The gate's projection, and the projection back to the stream."""
        own = self.size // ranks
        return [(own, hidden, hidden), (hidden, self.size, own)]

    def beside(self, ranks: int, hidden: int, layers: int, table: bool) -> int:
        """Other parameters on a rank, of all layers; table: with the embedding table."""
        return layers * (self.size * hidden + hidden + table * self.vocabulary * self.size // ranks) + self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names and layout of tensors in checkpoints of older families. Ours are those of Llama's."""

    roots: tuple[str, ...]  # prefixes of names: the first by which there is an embedding table
    layers: str  # the module that holds the layers
    names: tuple[tuple[str, str], ...]  # of modules, ours and theirs: within a layer, and beside the layers
    joint: bool = False  # queries, keys and values are in one tensor
    grouped: bool = False  # in which rows are grouped by key head: its queries, a key, a value
    transposed: bool = False  # matrices of layers are [inputs, outputs]


def elements(matrices: Matrices) -> int:
    """Elements of these matrices on a rank."""
    return sum(outputs * own for outputs, _, own in matrices)
