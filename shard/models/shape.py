"""Everything that the decoder needs to know about a model. Knows no tensor and imports no torch: the launcher plans with it."""

from collections import Counter
from dataclasses import dataclass, replace
from math import gcd, prod

from .compression import Compressed
from .ngrams import Grams
from .remembering import Matrices, Remembering, changed
from .traits import (
    Alibi,
    Alternation,
    BlockIndex,
    Features,
    Growth,
    Hyper,
    Index,
    Inputs,
    Keys,
    Latent,
    Layout,
    Mixture,
    PoolIndex,
    Quantization,
    Rope,
    elements,
)


class Unsupported(ValueError):
    """The model can't be served; the message names what is missing and the remedy, in one line."""


KINDS = {"int4": 64, "int8": 0, "fp8": 0}  # of weights that are rounded when they are loaded: inputs that share a scale, 0: all
KEPT = 4  # sequences that run at once for each state that is kept for others to go on from
PLAIN = ("input_layernorm", "", "post_attention_layernorm", "")  # norms of most families


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Everything that the decoder needs to know about a model. Sizes are numbers of elements."""

    architecture: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int  # of keys; of latents as they are cached
    value_size: int = 0  # of values, if they are smaller; 0: they are not
    latent: Latent | None = None  # which keys and values are made of; the cache has one key head, of the latent and what turns
    hyper: Hyper | None = None  # None: there is one residual stream
    alternation: Alternation | None = None  # likewise
    laurel: int = 0  # features between two matrices of what is added beside attention; 0: there are none
    blocks: BlockIndex | PoolIndex | None = None  # None: all of what heads see is attended to
    intermediate: int
    norm_epsilon: float
    max_positions: int
    tied: bool  # the output matrix is the embedding table
    rope: Rope
    mixtures: tuple[Mixture | None, ...] = ()  # per layer: its experts instead of one MLP; (): there are none
    windows: tuple[int, ...]  # per layer: positions that a token may look back, itself included; 0: all
    chunked: bool = False  # windows don't slide: they begin at their multiples, so that a token sees its chunk of positions
    local_rope: Rope | None = None  # of the layers with a window, where it is another
    far: Keys | None = None  # of the layers without a window, where they are others
    # Layers that remember what they saw, instead of attending to it: the cache has none of their keys.
    remembering: Remembering | None = None
    attention_gates: bool = False  # of all that heads attend to, through a sigmoid
    softplus_gates: bool = False  # or through softplus
    head_gates: bool = False  # one of each head instead of one of each of its features
    gates_name: str = ""  # of their own matrix, without biases; "": in the checkpoint they are beside each head's queries
    unturned: frozenset[int] = frozenset()  # layers without a rotary embedding
    unturned_growth: Growth | None = None  # of their queries; None: none
    # Queries of each head are multiplied by the logarithm of their position times a number of the head's, plus another.
    sharpened: bool = False
    alibi: Alibi | None = None  # None: none
    learned: int | None = None  # positions have vectors, behind so many rows of their table that are for none; None: they have none
    inattentive: frozenset[int] = frozenset()  # layers that neither attend nor remember: an MLP alone, or experts
    without_mlp: frozenset[int] = frozenset()  # layers that have nothing else
    attention_scale: float  # of the products of queries and keys
    softcap: float = 0.0  # which those come near to at most; 0: none
    sinks: bool = False  # each head has a logit more, which no value belongs to
    sinks_name: str = "sinks"
    local_sinks: bool = False  # in layers with a window alone
    final_softcap: float = 0.0  # of the model's logits
    embedding_factor: float = 1.0  # what rows of the embedding table are multiplied by
    layer_factors: bool = False  # behind each layer the stream is multiplied by a number of the layer's
    # What products with some matrices that lead away from the stream, and their biases, are multiplied by, by their names in a
    # layer; of those that lead back, products alone.
    factors: tuple[tuple[str, float], ...] = ()
    residual_factor: float = 1.0  # and what attention and MLP come to, before it is added
    logit_divisor: float = 1.0  # what logits are divided by
    logit_bias: bool = False  # the output matrix has one
    precise_logits: bool = False  # an output matrix of its own is computed with in float32
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of every query and key head before rotary
    qk_norm_behind: bool = False  # or behind it
    turned_norm: bool = False  # or without gains, so that before and behind it are the same, in layers that have one
    joint_qk_norm: bool = False  # or one of all queries of a token together, and one of all its keys
    value_norm: bool = False  # of every value head, without gains
    qkv_limit: float = 0.0  # beyond which queries, keys and values don't go, before rotary; 0: none
    attention_name: str = "self_attn"
    # Norms of queries and keys, and the matrix behind all heads.
    attention_parts: tuple[str, str, str] = ("q_norm", "k_norm", "o_proj")
    norms: tuple[str, str, str, str] = PLAIN  # names of those before and behind attention, before and behind the MLP; "": none
    remembering_norms: tuple[str, str, str, str] | None = None  # the same of layers that remember; None: they have the same
    norm_gates: int = 0  # features that gates of norms before attention, and before experts, are made by; 0: norms have none
    experts_norm: str = ""  # behind experts, in those layers that have some, where there is none behind the MLP; "": none
    last_norm: str = "norm"  # behind all layers; "": none
    first_norm: str = ""  # and in front of them; "": none
    centered_norms: bool = False  # norms' gains are stored less 1
    layer_norms: bool = False  # norms take the mean away, instead of being RMS norms
    norm_bias: bool = False
    plain_norms: bool = False  # norms have neither gains nor biases
    parallel: bool = False  # the MLP goes by what attention goes by, behind the same norm if it has none of its own
    # Of MLPs and experts that have no gates, what features go through: "gelu", approximated by tanh, "exact_gelu", "relu", "relu2",
    # "xielu"; "": gates.
    ungated: str = ""
    layout: Layout | None = None  # of the checkpoint, if another than ours
    table: str = "embed_tokens"  # the embedding table's name
    mlp_name: str = "mlp"
    mlp_alias: str = ""  # another name, which some checkpoints have; "": it has none
    mlp_limits: tuple[float, ...] = ()  # of each layer's MLP, as `Mixture.limit`; (): none has one
    mlp_form: str = "steep"  # as `Mixture.form`
    mlp_closed: tuple[float, ...] = ()  # the part of each layer's gates that others close, of 1; (): of none
    mlp_parts: tuple[str, str, str, str] = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")  # the first: of two joined ones
    paired: tuple[str, ...] = ()  # what a checkpoint's layer has two of each, being two of ours; (): it is one
    aliases: tuple[tuple[str, str], ...] = ()  # what may stand in names of its tensors instead, ours first
    original: bool = False  # or they have all the names of DeepSeek V4's own code
    modules: tuple[tuple[str, str], ...] = ()  # what is in names of its matrices, and in transformers' names of their modules
    joined: tuple[str, ...] = ()  # names of tensors that are several in other checkpoints: "qkv_proj", "gate_up_proj"
    rotary_size: int = 0  # features of a head that rotary embeddings turn, its first; 0: all
    far_rotary_size: int = 0  # the same in layers without a window, if that is another number; 0: it is not
    rotary_reversed: bool = False  # they turn the other way round
    rotary_neighbours: bool = False  # of them the checkpoint has those side by side that turn together, not half of them apart
    gelu: bool = False  # of the MLP's gates, approximated by tanh, instead of silu
    quantization: Quantization | None = None
    features: Features | None = None  # of another model, for which this one guesses, and whose embedding table it takes
    keyless: int = 0  # the last layers, so many, have no keys: they see those of the last one before them with the same window
    wider: int = 1  # and their MLPs are so many times as wide
    widths: tuple[int, ...] = ()  # intermediate features of each layer's MLP, if they differ otherwise; (): they don't
    inputs: Inputs | None = None  # of each layer apart
    grams: Grams | None = None  # what some layers are told of n-grams
    sight_factor: float = 1.0  # what features of images are multiplied by
    whole_images: tuple[int, ...] = ()  # windows of layers in which each of an image's tokens sees all of the image

    def check_ranks(self, ranks: int) -> None:
        """Raises Unsupported unless the model can be divided into `ranks` equal slices."""
        if found := self._undivided(ranks):
            fitting = ", ".join(map(str, self.fitting))
            raise Unsupported(f"{found} can't be divided by {ranks} ranks: use --num-shard {fitting}")

    @property
    def fitting(self) -> list[int]:
        """The numbers of ranks that the model can be divided into."""
        return [ranks for ranks in range(1, self.heads + 1) if not self._undivided(ranks)]

    def check_cache(self, kind: str, offloads: bool = False) -> None:
        """Raises Unsupported if keys can't be cached in that number format. offloads: to the host's memory, too."""
        if self.remembering is not None and offloads:
            raise Unsupported(
                f"{self.remembering.name} remembers what is in no page, so pages are of no use alone: leave --kv-offload-gib out"
            )
        what = "ALiBi has" if self.alibi else "what is compressed has" if self.compressed else ""
        if what and kind != "auto":
            raise Unsupported(f"{what} more bits than keys of {kind}: leave --kv-cache-dtype out")

    def check_pages(self, size: int) -> None:
        """Raises Unsupported unless pages of so many tokens end where chunks of positions do."""
        pool = self.pool
        if pool and size % pool:
            raise Unsupported(
                f"pages of {size} tokens don't hold whole pools of {pool}, of which an index has a key: --page-size {pool}"
            )
        for whole, what in (
            (self.chunk, "positions of which some layers see no others"),
            (self.blocks.block if self.blocks else 0, "tokens of a block that an index chooses"),
        ):
            if whole % size:
                raise Unsupported(f"pages of {size} tokens don't divide the {whole} {what}: use --page-size {gcd(whole, 16)}")

    def _undivided(self, ranks: int) -> str:
        """What so many ranks can't have equal parts of; "": they can."""
        sizes, keys = (
            {"attention heads": self.heads, "attention heads of layers without a window": self.asking(0)},
            dict[str, int](),
        )
        if not self.latent:
            keys |= {"key/value heads": self.kv_heads, "key/value heads of layers without a window": self.keys(0).heads}
        if self.remembering:
            own, shared = self.remembering.divided
            sizes, keys = sizes | own, keys | shared
        for layer, mixture in self.mlps:
            if mixture:
                sizes["intermediate features of an expert"] = mixture.size
                sizes["intermediate features of the shared expert"] = mixture.shared
            else:
                sizes[f"intermediate features{f' of layer {layer}' if self.widths else ''}"] = self.width(layer)
        if self.inputs:
            sizes["features of what layers are told apart"] = self.inputs.size
        found = [f"{size} {name}" for name, size in sizes.items() if size % ranks]
        found += [named] if self.latent and (named := self.latent.undivided(self.heads, ranks)) else []
        found += [f"{heads} {name}" for name, heads in keys.items() if heads % ranks and ranks % heads]
        return found[0] if found else ""

    def within(self, longest: int) -> "Shape":
        """The same, for contexts of up to so many tokens; 0: all that it can. Of most models that is nothing that they go by."""
        most = min(longest or self.max_positions, self.max_positions)
        if self.chunk >= most:
            return replace(self, max_positions=most, windows=(0,) * self.layers, chunked=False)
        if self.rope.kind != "longrope" or not longest:
            return self
        return replace(self, max_positions=min(self.max_positions, longest))

    def quantized(self, asked: str) -> "Shape":
        """The same, as --quantize says: a method that its checkpoint must have, or a kind to which weights are rounded; "": as
        the checkpoint has them. Raises Unsupported if that has another."""
        own = self.quantization
        if not asked or (own is not None and asked in (own.method, own.kind)):
            return self
        if own is not None:
            raise Unsupported(
                f"--quantize {asked}, but the checkpoint is {own.method} with {own.kind} already: leave --quantize out"
            )
        if asked not in KINDS:
            raise Unsupported(
                f"--quantize {asked}, but the checkpoint is not quantized: name one that is, or take {', '.join(KINDS)}"
            )
        return replace(self, quantization=Quantization(method="", kind=asked, group=KINDS[asked]))

    @property
    def described(self) -> str:
        """Its name and parameters, for people."""
        each = f", {self.parameters(tokens=1) / 1e6:,.1f} M of them for a token" if any(self.mixtures) else ""
        return f"{self.architecture}, {self.parameters() / 1e6:,.1f} M parameters{each}"

    def vocabulary_slice(self, ranks: int) -> int:
        """Rows of the embedding table and of the output matrix per rank; the last rank's may be partly padding."""
        return -(-self.vocabulary // ranks)

    def keys(self, window: int) -> Keys:
        """Of the layers with this window."""
        return self.far if self.far and not window else Keys(heads=self.kv_heads, size=self.head_size, value_size=self.value_size)

    def asking(self, window: int) -> int:
        """Query heads of the layers with this window."""
        return self.keys(window).queries or self.heads

    def cached_size(self, window: int) -> int:
        """Features of a head of these layers, as it is cached."""
        return self.keys(window).size + (self.alibi.features if self.alibi else 0)

    def key_heads(self, ranks: int, window: int) -> int:
        """That layers with this window cache on one rank."""
        return self.keys(window).own(ranks) if self.latent is None else 1

    def slot(self, ranks: int, layer: int) -> tuple[int, int, int]:
        """What a layer caches of a token on one rank: keys and values, or one for both; heads; features."""
        window = self.windows[layer]
        if self.latent is None:
            return 2, self.key_heads(ranks, window), self.cached_size(window)
        latent = self.latent_of(layer)
        return 1, 1, self.head_size + self.index_size(layer) + (latent.kept if latent else 0)

    @property
    def expandable(self) -> Latent | None:
        """Latents of all layers, if long chunks may see what these are expanded to (`kernels.expanded`). None: there are none, or
        not everywhere the same; or layers attend in other ways, too: to some tokens alone, or to more than tokens."""
        found = {self.latent_of(layer) for layer in self.keyed}
        latent = found.pop() if len(found) == 1 else None
        special = self.most or self.compressed or self.sinks or self.softcap or self.whole_images or any(self.windows)
        return latent if latent is not None and latent.width == self.head_size and not special else None

    def latent_of(self, layer: int) -> Latent | None:
        """What this layer's keys and values are made of."""
        return self.latent and self.latent.at(layer, layer not in self.unturned)

    @property
    def compressed(self) -> Compressed | None:
        """The same of all, where they are DeepSeek V4's."""
        return self.latent if isinstance(self.latent, Compressed) else None

    @property
    def replayed(self) -> bool:
        """Steps may be recorded as graphs: how many entries tokens see, and end, is different in each."""
        return self.compressed is None

    @property
    def index(self) -> Index | None:
        """What chooses the tokens that each one attends to; None: it attends to all."""
        return self.latent.index if self.latent else None

    @property
    def indexing(self) -> list[int]:
        """The layers that have one."""
        return [layer for layer in self.attending if self.index and layer not in self.index.borrowing]

    def chosen(self, layer: int) -> int:
        """Tokens that a token attends to at most, by an index, in this layer; 0: all that it sees."""
        if self.blocks:
            return self.blocks.most if layer in self.blocks.layers else 0
        return self.index.most if self.index else 0

    @property
    def pool(self) -> int:
        """Tokens that are chosen together, by a key of their own; 0: none are."""
        found = self.index or self.blocks
        return found.pool if found else 0

    @property
    def placed(self) -> bool:
        """What tokens choose are blocks, pools or entries, of which keys are found by their positions: they must stand there."""
        return self.blocks is not None or self.compressed is not None or (self.index is not None and self.index.pool > 0)

    @property
    def most(self) -> int:
        """The same, of layers that have an index; 0: none has."""
        return max(map(self.chosen, range(self.layers)))

    @property
    def choosy(self) -> int:
        """Tokens of a context in which some are attended to, or become entries, in each way there is; 0: all are, in one."""
        entries = self.compressed.kinds if self.compressed else ()
        return max([self.most, *(rate * max(1, chosen) for rate, chosen in entries)])

    def index_size(self, layer: int) -> int:
        """Elements of a token's key of an index in this layer, as it is cached."""
        if self.blocks:
            return self.blocks.size if layer in self.blocks.layers else 0
        return self.index.cached if self.index and layer in self.indexing else 0

    def kv_elements(self, ranks: int) -> int:
        """Elements that one token takes in the cache of one rank, all layers."""
        beside = len(self.blocks.layers) * self.blocks.size if self.blocks else 0
        return sum(prod(self.slot(ranks, layer)) for layer in self.keyed) + beside

    @property
    def feature_elements(self) -> int:
        """Elements that are kept of a token beside that, of what another model made of it."""
        return self.hidden if self.features else 0

    @property
    def attention_inputs(self) -> int:
        """Features that queries, keys and values are made of."""
        return 2 * self.hidden if self.features and self.features.widened else self.hidden

    @property
    def attending(self) -> list[int]:
        """Layers whose tokens see keys."""
        others = self.inattentive | (self.remembering.layers if self.remembering and not self.remembering.along else frozenset())
        return [layer for layer in range(self.layers) if layer not in others]

    @property
    def mlps(self) -> list[tuple[int, Mixture | None]]:
        """The layers that have an MLP, or experts instead."""
        every = self.mixtures or (None,) * self.layers
        return [(layer, mixture) for layer, mixture in enumerate(every) if layer not in self.without_mlp]

    @property
    def sums(self) -> int:
        """What is added to the stream of a token, one after the other."""
        told = self.layers if self.inputs else 0
        return (1 if self.parallel else 2) * self.layers - len(self.inattentive) - len(self.without_mlp) + told

    def norm_names(self, layer: int) -> tuple[str, str, str, str]:
        """As `norms`, of this layer."""
        sparse = bool(self.mixtures and self.mixtures[layer])
        remembers = self.remembering_norms and self.remembering and layer in self.remembering.layers
        before, behind, mlp, last = (remembers and self.remembering_norms) or self.norms
        if self.norm_gates:  # norms are within what has gates, too
            before, mlp = f"{before}.norm", f"{mlp}.norm" if sparse else mlp
        return before, behind, mlp, last or (self.experts_norm if sparse else "")

    def gated_norms(self, layer: int) -> list[str]:
        """What this layer's norms with gates are named, before attention and before the MLP; "": it has none there."""
        sparse = bool(self.mixtures and self.mixtures[layer])
        return [self.norms[0], self.norms[2] if sparse else ""] if self.norm_gates else []

    @property
    def norm_count(self) -> int:
        """Norms of all layers, in front of them and behind."""
        found = bool(self.last_norm) + bool(self.first_norm)
        for layer in range(self.layers):
            before, behind, mlp, last = map(bool, self.norm_names(layer))
            found += (layer not in self.inattentive) * (before + behind) + (layer not in self.without_mlp) * (mlp + last)
        return found

    @property
    def weight_factor(self) -> float:
        """What matrices that lead back to the stream are multiplied by: a norm behind them would undo it, and has it itself."""
        return 1.0 if self.norms[1] else self.residual_factor

    @property
    def with_keys(self) -> int:
        """The first layers, so many, are not of those that have none."""
        return self.layers - self.keyless

    @property
    def keyed(self) -> list[int]:
        """Those of them that have keys of their own, which are cached."""
        return [layer for layer in self.attending if layer < self.with_keys]

    def source(self, layer: int) -> int:
        """The layer whose keys it sees."""
        return max(other for other in self.keyed if other <= layer and self.windows[other] == self.windows[layer])

    def joins(self, layer: int) -> bool:
        """What experts of the layer before it have made is added with what its MLP makes."""
        before = self.mixtures[layer - 1] if self.mixtures and layer else None
        return before is not None and before.later

    def width(self, layer: int) -> int:
        """Intermediate features of its MLP."""
        return self.widths[layer] if self.widths else self.intermediate * (self.wider if layer >= self.with_keys else 1)

    def state_bytes(self, ranks: int, item: int) -> int:
        """What layers remember of a sequence on one rank, however long that is; item: bytes of an element."""
        if self.remembering is None:
            return 0
        window = (self.remembering.width - 1) * self.remembering.channels(ranks) * item
        found = len(self.remembering.layers) * (4 * prod(self.remembering.memory(ranks)) + window)
        return found + (self.grams.remembered(self.hidden) * item if self.grams else 0)

    def kept_states(self, sequences: int, prefix_caching: bool) -> int:
        """How many such states are kept for others, where so many sequences run at once."""
        return -(-sequences // KEPT) if self.remembering and prefix_caching else 0

    def states_bytes(self, ranks: int, item: int, sequences: int, prefix_caching: bool) -> int:
        """What that is of all of them, with what is kept, and with one for padding."""
        return (1 + sequences + self.kept_states(sequences, prefix_caching)) * self.state_bytes(ranks, item)

    def sequences(self, asked: int, room: int, ranks: int, item: int, prefix_caching: bool) -> int:
        """How many may run at once of those that are asked for. What is remembered takes no more than half of so many bytes: the
        rest is for keys and values."""
        if not self.remembering:
            return asked
        fitting = room // 2 // self.state_bytes(ranks, item)
        return max(1, min(asked, fitting * KEPT // (KEPT + 1) - 1 if prefix_caching else fitting - 1))

    def turning_size(self, window: int) -> int:
        """Features of what turns in layers with this window: of whole heads, of which a part may not, or of what heads have apart
        for that."""
        return self.latent.turned if self.latent else self.cached_size(window)

    def turned(self, window: int) -> int:
        """Features of a head that turn in layers with this window."""
        own = self.far_rotary_size if not window else 0
        return own or self.rotary_size or self.turning_size(window)

    def order(self, window: int) -> tuple[int, ...]:
        """Where a checkpoint's heads have the features of ours, in which those that turn together are half a head apart, the first
        of them towards the second, and those that don't turn stand behind the others in each half; (): where ours have them."""
        size, turned = self.turning_size(window), self.turned(window)
        if turned == size and not self.rotary_neighbours and not self.rotary_reversed:
            return ()
        middle, apart = (size + turned) // 2, turned // 2
        first, second = (range(apart), range(apart, turned))
        if self.rotary_neighbours:
            first, second = (range(0, turned, 2), range(1, turned, 2))
        if self.rotary_reversed:
            first, second = second, first
        return (*first, *range(turned, middle), *second, *range(middle, size))

    @property
    def turns(self) -> bool:
        """Some layers have a rotary embedding."""
        return len(self.unturned) < self.layers

    @property
    def chunk(self) -> int:
        """Positions of which some layers see no others; 0: there are none."""
        return max(self.windows) if self.chunked else 0

    @property
    def turned_positions(self) -> int:
        """How many there are to layers with a rotary embedding: where none looks beyond a chunk, positions begin anew with each."""
        chunks = self.chunk and all(self.windows[layer] for layer in range(self.layers) if layer not in self.unturned)
        return min(self.max_positions, self.chunk) if chunks else self.max_positions

    @property
    def rotary_elements(self) -> int:
        """Elements of the cosines and sines of all positions, which every rank has; one row is for layers that don't turn. And of
        what queries grow by."""
        size, local = self.turning_size(0), self.turning_size(max(self.windows)) if self.local_rope else 0
        growth = self.max_positions * ((self.rope.growth > 0) + (self.unturned_growth is not None) + self.sharpened)
        return 2 * (self.turned_positions * (size * self.turns + local) + size * bool(self.unturned)) + growth

    def parameters(self, ranks: int = 1, tables: int | None = None, tokens: int | None = None) -> int:
        """Elements of all weights on one rank. `tables`: how often the vocabulary's table is held, if not as in the checkpoint;
        `tokens`: of experts those alone that so many tokens can be expected to choose."""
        found = sum(count * self._attention(ranks, *kind) for kind, count in self._alike.items()) + self._waves
        found += sum(self._asking(ranks, window) for window in self._keyless)
        if self.latent and self.index:
            found += len(self.indexing) * self.index.elements(self.latent.queries, self.hidden)
        if self.blocks:
            found += len(self.blocks.layers) * self.blocks.elements(ranks, self.hidden)
        if self.hyper:
            found += self.hyper.elements(self.hidden, self.layers)
        if self.alternation:
            found += self.alternation.elements(self.hidden, self.layers)
        if self.laurel:
            found += self.layers * (elements(self._laurels) + self.hidden)
        if self.norm_gates:
            found += 2 * self.norm_gates * self.hidden * (self.layers + sum(map(bool, self.mixtures)))
        if self.remembering:
            own = elements(self.remembering.matrices(ranks, self.hidden))
            found += len(self.remembering.layers) * (own + self.remembering.beside(ranks, self.hidden))
        for layer, mixture in self.mlps:
            found += self._sparse(mixture, ranks, tokens) if mixture else self._dense(ranks, self.width(layer))
        if self.inputs:
            found += self.inputs.elements(ranks, self.hidden, self.layers, tokens is None)
        if self.grams:
            found += self.grams.elements(ranks, self.hidden, tokens is None)
        if self.learned is not None and tokens is None:
            found += self.max_positions * self.hidden
        if not self.plain_norms:
            found += self.norm_count * self.hidden * (1 + self.norm_bias)
        held, rows = tables or (1 if self.tied else 2), self.vocabulary_slice(ranks)
        if self.features:
            held = int(self.features.table)
            found += self.features.elements(self.hidden)
        return found + held * rows * self.hidden + self.logit_bias * rows

    @property
    def _alike(self) -> Counter[tuple[int, Latent | None]]:
        """How many of the layers that have keys have each window, and latents."""
        return Counter((self.windows[layer], self.latent_of(layer)) for layer in self.keyed)

    @property
    def _laurels(self) -> Matrices:
        """The matrices of what is added beside attention."""
        return [(self.laurel, self.hidden, self.hidden), (self.hidden, self.laurel, self.laurel)]

    @property
    def _waves(self) -> int:
        """How many have a factor in the checkpoint."""
        return self.turned(0) // 2 if self.rope.learned else 0

    @property
    def _keyless(self) -> list[int]:
        """Windows of the layers that have none."""
        keyed = {*self.keyed}
        return [self.windows[layer] for layer in self.attending if layer not in keyed]

    def _dense(self, ranks: int, width: int) -> int:
        """Elements of an MLP of so many intermediate features."""
        features, inner = width // ranks, (2 - bool(self.ungated)) * width // ranks
        return self.hidden * (inner + features) + self.mlp_bias * (inner + self.hidden) + 2 * (self.ungated == "xielu")

    def _asking(self, ranks: int, window: int) -> int:
        """Elements of what a layer without keys attends by."""
        size = self.keys(window).size
        matrices = elements(self._questions(ranks, window))
        own = self.asking(window) // ranks * size
        return matrices + self.qkv_bias * own + self.output_bias * self.hidden + self.qk_norm * size

    def _questions(self, ranks: int, window: int) -> Matrices:
        """The matrices of such a layer."""
        asked = self.asking(window) * self.keys(window).size
        return [(asked // ranks, self.hidden, self.hidden), (self.hidden, asked, asked // ranks)]

    def _attention(self, ranks: int, window: int, latent: Latent | None) -> int:
        """Elements of what a layer with this window, and these latents, attends by."""
        heads, keys = self.asking(window) // ranks, self.keys(window)
        matrices = elements(self._projections(ranks, window, latent))
        norms = (2 * (self.qk_norm and not self.plain_norms) + self.joint_qk_norm * (heads + keys.own(ranks))) * keys.size
        of_heads = (self.sunk(window) + 2 * self.sharpened) * heads
        return matrices + self._beside(ranks, window, latent) + self.output_bias * self.hidden + norms + of_heads

    def sunk(self, window: int) -> bool:
        """Heads of layers with this window have sinks."""
        return self.sinks and (window > 0 or not self.local_sinks)

    def _projections(self, ranks: int, window: int, latent: Latent | None) -> Matrices:
        """The matrices before and behind attention, of a layer with this window, and these latents."""
        if latent is not None:
            return latent.matrices(self.heads, ranks, self.hidden, self._gates_columns(ranks, window))
        size, inputs = self.keys(window).own_values, self.attention_inputs
        asked = self.asking(window) * size
        return [(self._heads_columns(ranks, window), inputs, inputs), (self.hidden, asked, asked // ranks)]

    def _heads_columns(self, ranks: int, window: int) -> int:
        """Features of queries, keys and values of their own, and gates, of a rank's heads."""
        keys, gates = self.keys(window), self._gates_columns(ranks, window)
        asked, values = self.asking(window) // ranks * keys.size, keys.values * keys.own(ranks) * keys.own_values
        return asked + keys.own(ranks) * keys.size + values + gates

    def _gates_columns(self, ranks: int, window: int) -> int:
        """Of that, gates."""
        each = 1 if self.head_gates else self.latent.values if self.latent else self.keys(window).own_values
        return self.asking(window) // ranks * each if self.attention_gates else 0

    def _unbiased(self, ranks: int, window: int) -> int:
        """Of these, those that have no biases where the others have some: zeros stand for them."""
        return self._gates_columns(ranks, window) if self.gates_name else 0

    def _beside(self, ranks: int, window: int, latent: Latent | None) -> int:
        """Elements of what else such a layer has before attention: biases, and what leads from latents to heads."""
        if latent is not None:
            return latent.beside(self.heads, ranks, self.hidden, self.qkv_bias)
        return self.qkv_bias * (self._heads_columns(ranks, window) - self._unbiased(ranks, window))

    def weight_bytes(self, ranks: int, item: int, device: str, dtype: str, packed: bool) -> int:
        """What all weights take on one rank, with the rotary tables. packed: matrices are laid out anew, so that a table that is
        also the output matrix is held in both forms."""
        wide = sum(mixture.routing(self.hidden) for mixture in self.mixtures if mixture and mixture.wide)
        wide += sum(self.hidden + mixture.experts for mixture in self.mixtures if mixture and mixture.beside)
        wide += len(self.indexing) * self.index.wide(self.hidden) if self.index else 0
        each = (
            (self.sunk(window) + 2 * self.sharpened) * count * self.asking(window) for (window, _), count in self._alike.items()
        )
        wide += sum(each) // ranks + self._waves
        wide += sum(count * latent.floats(self.hidden) for (_, latent), count in self._alike.items() if latent)
        if self.centered_norms and not self.layer_norms:
            wide += self.norm_count * self.hidden
            wide += 2 * self.qk_norm * sum(self.keys(self.windows[layer]).size for layer in self.keyed)
            wide += 2 * len(self.blocks.layers) * self.blocks.size if self.blocks else 0
        wide += self.hyper.wide(self.hidden, self.layers) if self.hyper else 0
        wide += self.grams.wide(self.hidden) if self.grams else 0
        wide += self.layers * self.alternation.wide(self.hidden) if self.alternation else 0
        wide += self.precise_logits * (not self.tied) * self.vocabulary_slice(ranks) * self.hidden
        if self.remembering:
            wide += len(self.remembering.layers) * self.remembering.wide(ranks)
        made = self.rotary_elements + self.qk_norm_behind * len(self.attending) * self.head_size + self._made_norms
        made += self.qkv_bias * sum(count * self._unbiased(ranks, window) for (window, _), count in self._alike.items())
        if self.latent and not self.latent.queries:  # zeros beside the biases of latents
            made += self.qkv_bias * len(self.attending) * self.heads // ranks * (self.latent.plain + self.latent.turned)
        if self.grams:
            made += len(self.grams.layers) * self.grams.spread * self.grams.channels(self.hidden)
        if self.alibi:
            made += self.max_positions * self.heads // ranks * self.alibi.features
        made += self.turned_norm * 2 * (self.layers - len(self.unturned)) * self.head_size
        found = (self.parameters(ranks, 2 if packed else None) + made) * item + wide * (4 - item)
        found += sum(4 * self.vocabulary * mixture.chosen for mixture in self.mixtures if mixture and mixture.hashed)
        return found - self.saved(ranks, item, device, dtype)

    @property
    def _made_norms(self) -> int:
        """Elements of gains and biases of norms that no checkpoint has: those of plain norms, and layer norms' zeros."""
        each = self.plain_norms + (self.layer_norms and not self.norm_bias)
        heads = 2 * self.head_size * len(self.keyed) if self.plain_norms and self.qk_norm else 0
        return each * self.hidden * self.norm_count + heads

    def saved(self, ranks: int, item: int, device: str, dtype: str, tokens: int | None = None) -> int:
        """Bytes that the matrices of one rank take less for having few bits; tokens: as of `parameters`."""

        def less(how: Quantization | None, *matrices: tuple[int, int, int], whole: bool = False) -> float:
            """Of `Matrices`; whole: if one of them is unpacked, all are."""
            each = [how.saved(item, device, dtype, inputs, own) if how else 0.0 for _, inputs, own in matrices]
            if whole and not all(each):
                return 0.0
            return sum(outputs * own * saved for saved, (outputs, _, own) in zip(each, matrices, strict=True))

        def mlp(how: Quantization | None, size: int, own: int, hidden: int, whole: bool = False) -> float:
            return less(how, ((2 - bool(self.ungated)) * own, hidden, hidden), (hidden, size, own), whole=whole)

        how = self.quantization
        found = sum(count * less(how, *self._projections(ranks, *kind)) for kind, count in self._alike.items())
        found += sum(less(how, *self._questions(ranks, window)) for window in self._keyless)
        found += sum(count * less(how, *latent.choosing) for (_, latent), count in self._alike.items() if latent)
        if self.latent and self.index:
            found += len(self.indexing) * less(how, *self.index.matrices(self.latent.queries, self.hidden))
        if self.blocks:
            found += len(self.blocks.layers) * less(how, *self.blocks.matrices(ranks, self.hidden))
        if self.inputs:
            found += self.layers * less(how, *self.inputs.matrices(ranks, self.hidden))
        if self.remembering:
            found += len(self.remembering.layers) * less(how, *self.remembering.matrices(ranks, self.hidden))
        for layer, mixture in self.mlps:
            size = mixture.shared if mixture else self.width(layer)
            found += mlp(how, size, size // ranks, self.hidden)
            if mixture:
                sizes = mixture.size, mixture.part(ranks), mixture.latent or self.hidden
                found += mixture.read(tokens) * mlp(mixture.quantization or how, *sizes, device == "cuda")
                found += less(how, *mixture.narrow(self.hidden))
        return int(found)

    def adapted(self, ranks: int) -> int:
        """Elements on one rank of an adapter of rank 1 that changes all that adapters can."""
        found = 0
        for (window, latent), count in self._alike.items():
            # Queries, keys, values and gates side by side, or queries and latents.
            before, *others = self._projections(ranks, window, latent)
            beside = 2 + (not latent and self.keys(window).values) + bool(self.attention_gates and self.gates_name)
            found += count * ((1 if "qkv_proj" in self.joined else beside) * changed([before]) + changed(others))
        found += sum(changed(self._questions(ranks, window)) for window in self._keyless)
        if self.blocks and self.blocks.block:  # queries and keys side by side
            found += 2 * len(self.blocks.layers) * changed(self.blocks.matrices(ranks, self.hidden))
        if self.inputs:
            found += self.layers * changed(self.inputs.matrices(ranks, self.hidden))
        if self.laurel:
            found += self.layers * changed(self._laurels)
        if self.remembering:
            found += len(self.remembering.layers) * self.remembering.adapted(ranks, self.hidden, self.quantization is not None)
        for layer, mixture in self.mlps:
            own = (mixture.shared if mixture else self.width(layer)) // ranks
            if own:
                sides = 2 - bool(self.ungated)
                parts = 1 if self.mlp_parts[0] in self.joined else sides
                found += parts * changed([(sides * own, self.hidden, self.hidden)]) + self.hidden + own
            if mixture and mixture.shared and mixture.shared_gate:
                found += changed([(1, self.hidden, self.hidden)])
        return found

    def _sparse(self, mixture: Mixture, ranks: int, tokens: int | None) -> int:
        """Elements of a layer's experts, their router, and the shared one with its gate."""
        size = mixture.part(ranks)
        matrices = 3 - bool(self.ungated)
        each = matrices * size * (mixture.latent or self.hidden) + mixture.biased * (2 * size + self.hidden)
        routed = mixture.routing(self.hidden) + round(mixture.read(tokens) * each)
        routed += elements(mixture.narrow(self.hidden))
        gate = mixture.shared > 0 and mixture.shared_gate != ""
        routed += mixture.beside * (4 * self.hidden + mixture.experts)  # norms, the router's included, and factors of shares
        return routed + self.hidden * (matrices * mixture.shared // ranks + gate)
