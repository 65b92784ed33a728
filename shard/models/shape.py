"""The architecture of a model, as read from config.json: all that the decoder needs to know, with parameter counts and memory sizes
derived from it. Holds no tensor and imports no torch: the launcher plans with it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, prod

from .compression import CompressedLatent
from .ngrams import NgramShape
from .recurrent_shapes import Matrices, RecurrentShape, lora_elements
from .traits import (
    Alibi,
    AltUpShape,
    DraftFeatures,
    Gates,
    HeadIndex,
    HyperConnections,
    Index,
    Keys,
    Latent,
    Layout,
    Mixture,
    PerLayerShape,
    Quantization,
    Rope,
    TemperatureTuning,
    elements,
)


class Unsupported(ValueError):
    """The model can't be served; the message names what is missing and the remedy, in one line."""


KINDS = {"int4": 64, "int8": 0, "fp8": 0}  # formats to which weights are quantized at load: inputs that share a scale, 0: all
KEPT = 4  # running sequences for each recurrent state that is kept for prefixes
PLAIN = ("input_layernorm", "", "post_attention_layernorm", "")  # norms of most families: before attention and before the MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's architecture. Sizes are numbers of elements."""

    architecture: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int  # of keys; with MLA of latents as they are cached
    value_size: int = 0  # of values, if smaller than keys; 0: the same
    # MLA: latents that keys and values are made of. The cache then has one key head, of the latent and the rotary key.
    latent: Latent | None = None
    hyper: HyperConnections | None = None  # hyper-connections: several residual streams; None: there is one
    altup: AltUpShape | None = None  # AltUp: several residual streams, of which layers compute one; None: there is one
    laurel: int = 0  # LAuReL: rank of the low-rank branch that is added beside attention; 0: there is none
    # An index that chooses blocks or pools of tokens for heads of keys; None: all visible tokens are attended to.
    blocks: HeadIndex | None = None
    intermediate: int
    norm_epsilon: float
    max_positions: int
    tied: bool  # the LM head is the embedding table
    rope: Rope
    mixtures: tuple[Mixture | None, ...]  # per layer: its experts instead of one MLP; None: an MLP
    windows: tuple[int, ...]  # per layer: sliding window, in positions, the token itself included; 0: full attention
    chunked: bool = False  # windows don't slide: they begin at their multiples, so that a token sees its chunk of positions
    local_rope: Rope | None = None  # of the layers with a window, if it differs
    global_keys: Keys | None = None  # key heads of the layers without a window, if they differ
    # Layers with recurrent state (linear attention, state spaces, short convolutions) in place of attention, without a KV cache, or
    # beside it.
    recurrent: RecurrentShape | None = None
    gates: Gates | None = None  # of attention's output; None: it has none
    nope_layers: frozenset[int] = frozenset()  # layers without a rotary embedding (NoPE)
    nope_query_scale: TemperatureTuning | None = None  # scales queries by position in those layers; None: nothing does
    # Scalable softmax: queries of each head are multiplied by the logarithm of their position times a scale of the head's, plus a
    # bias.
    scalable_softmax: bool = False
    alibi: Alibi | None = None  # linear biases of attention; None: none
    # Learned position embeddings: how many rows of their table come before position 0; None: there are none.
    learned: int | None = None
    without_attention: frozenset[int] = frozenset()  # layers without attention or recurrent state: an MLP alone, or experts
    without_mlp: frozenset[int] = frozenset()  # layers without MLP or experts
    attention_scale: float  # multiplies the products of queries and keys
    softcap: float = 0.0  # soft cap of attention scores; 0: none
    sinks: str = ""  # attention sinks: each head has one more logit, without a value; the name of their tensor; "": none
    local_sinks: bool = False  # only layers with a window have sinks
    final_softcap: float = 0.0  # soft cap of the model's logits; 0: none
    embedding_factor: float = 1.0  # multiplies token embeddings
    layer_factors: bool = False  # after each layer the stream is multiplied by a scalar of the layer's
    # Factors of some projections, by their names in a layer: of those that lead out of the residual stream they multiply product
    # and bias, of those that lead back products alone.
    factors: tuple[tuple[str, float], ...] = ()
    residual_factor: float = 1.0  # multiplies what attention and MLP add to the stream
    logit_divisor: float = 1.0  # logits are divided by it
    logit_bias: bool = False  # the LM head has a bias
    precise_logits: bool = False  # an untied LM head is computed in float32
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of every query and key head, before the rotary embedding
    qk_norm_behind: bool = False  # RMS norm of every query and key head, after the rotary embedding
    turned_norm: bool = False  # such norms without gains, so that the order does not matter, in layers with a rotary embedding
    joint_qk_norm: bool = False  # one RMS norm over all queries of a token, and one over all its keys
    value_norm: bool = False  # RMS norm of every value head, without gains
    qkv_limit: float = 0.0  # queries, keys and values are clipped to it, before the rotary embedding; 0: they are not
    attention_name: str = "self_attn"
    # Names of the query norm, the key norm and the output projection.
    attention_parts: tuple[str, str, str] = ("q_norm", "k_norm", "o_proj")
    norms: tuple[str, str, str, str] = PLAIN  # names of the norms before and after attention, before and after the MLP; "": none
    recurrent_norms: tuple[str, str, str, str] | None = None  # `norms` of layers with recurrent state; None: as in other layers
    norm_gates: int = 0  # rank of the low-rank gates of norms before attention and before experts; 0: norms have none
    experts_norm: str = ""  # norm after experts, in those layers that have some, where there is none after the MLP; "": none
    last_norm: str = "norm"  # norm after all layers; "": none
    first_norm: str = ""  # norm of embeddings, before all layers; "": none
    centered_norms: bool = False  # gains of norms are stored minus 1
    layer_norms: bool = False  # norms subtract the mean, instead of being RMS norms
    norm_bias: bool = False
    plain_norms: bool = False  # norms have neither gains nor biases
    # Parallel attention and MLP: both read the same input, after the same norm if the MLP has none of its own.
    parallel: bool = False
    # The activation of MLPs and experts without gates: "gelu" (tanh approximation), "exact_gelu", "relu", "relu2", "xielu"; "":
    # they are gated.
    ungated: str = ""
    layout: Layout | None = None  # names and layout of the checkpoint's tensors, if they differ from ours
    table: str = "embed_tokens"  # the embedding table's name
    mlp_name: str = "mlp"
    mlp_limits: tuple[float, ...] = ()  # limit of each layer's MLP gates, as `Mixture.limit`; (): none has one
    mlp_form: str = "steep"  # as `Mixture.form`
    mlp_closed: tuple[float, ...] = ()  # activation sparsity: the fraction of each layer's MLP gates that is zeroed; (): none
    # Projections; the first name: gate and up fused.
    mlp_parts: tuple[str, str, str, str] = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
    paired: tuple[str, ...] = ()  # modules of which a layer of the checkpoint has two, being two of ours; (): it is one
    aliases: tuple[tuple[str, str], ...] = ()  # parts of tensor names, and what may stand there instead, ours first
    original: bool = False  # tensors may have all the names of DeepSeek V4's own code
    modules: tuple[tuple[str, str], ...] = ()  # parts of its matrices' names, and of transformers' module names
    joined: tuple[str, ...] = ()  # fused tensors, where other checkpoints have several: "qkv_proj", "gate_up_proj"
    rotary_size: int = 0  # partial rotary embedding: the first features of a head that are rotated; 0: all
    rotary_reversed: bool = False  # the rotation is in the opposite direction
    # Interleaved rotary embedding: the checkpoint has features that rotate together next to each other, not half of them apart.
    rotary_neighbours: bool = False
    gelu: bool = False  # gates of the MLP go through GELU (tanh approximation) instead of SiLU
    quantization: Quantization | None = None
    # Of a draft model: the target's features that it reads; it takes the target's embedding table, too.
    features: DraftFeatures | None = None
    kv_shared_layers: int = 0  # so many last layers share keys and values of the last one before them with the same window
    widths: tuple[int, ...] = ()  # intermediate features of each layer's MLP, if they differ; (): they don't
    inputs: PerLayerShape | None = None  # per-layer embeddings: inputs of each layer
    ngrams: NgramShape | None = None  # n-gram embeddings, which some layers add
    image_factor: float = 1.0  # multiplies image features
    whole_images: tuple[int, ...] = ()  # windows of layers in which an image's tokens attend to all of the image (bidirectionally)

    def check_ranks(self, ranks: int) -> None:
        """Raises Unsupported unless the model can be sharded over `ranks` equal ranks."""
        if found := self._undivided(ranks):
            fitting = ", ".join(map(str, self.fitting))
            raise Unsupported(f"{found} can't be divided by {ranks} ranks: use --num-shard {fitting}")

    @property
    def fitting(self) -> list[int]:
        """The numbers of ranks that the model can be sharded over."""
        return [ranks for ranks in range(1, self.heads + 1) if not self._undivided(ranks)]

    def check_cache(self, kind: str, offloads: bool = False) -> None:
        """Raises Unsupported if keys can't be cached in that number format. offloads: the KV cache is offloaded to host memory,
        too."""
        if self.recurrent is not None and offloads:
            raise Unsupported(
                f"{self.recurrent.name} remembers what is in no page, so pages are of no use alone: leave --kv-offload-gib out"
            )
        what = "ALiBi has" if self.alibi else "what is compressed has" if self.compressed else ""
        if what and kind != "auto":
            raise Unsupported(f"{what} more bits than keys of {kind}: leave --kv-cache-dtype out")

    def check_pages(self, size: int) -> None:
        """Raises Unsupported unless pages of `size` tokens fit pools, chunks of positions and blocks."""
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
        """What can't be divided equally among so many ranks; "": all can."""
        sizes, keys = (
            {"attention heads": self.heads, "attention heads of layers without a window": self.query_heads(0)},
            dict[str, int](),
        )
        if not self.latent:
            keys |= {"key/value heads": self.kv_heads, "key/value heads of layers without a window": self.keys(0).heads}
        if self.recurrent:
            own, shared = self.recurrent.divided
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
        """The shape for contexts of up to so many tokens; 0: the model's limit. For most models nothing changes."""
        most = min(longest or self.max_positions, self.max_positions)
        if self.chunk >= most:
            return replace(self, max_positions=most, windows=(0,) * self.layers, chunked=False)
        if self.rope.kind != "longrope" or not longest:
            return self
        return replace(self, max_positions=min(self.max_positions, longest))

    def quantized(self, asked: str) -> "Shape":
        """The shape with --quantize applied: a method that the checkpoint must have, or a format to which weights are quantized at
        load; "": as the checkpoint has them. Raises Unsupported if the checkpoint has another."""
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
        """Architecture and parameter counts, for people."""
        each = f", {self.parameters(tokens=1) / 1e6:,.1f} M of them for a token" if any(self.mixtures) else ""
        return f"{self.architecture}, {self.parameters() / 1e6:,.1f} M parameters{each}"

    def vocabulary_slice(self, ranks: int) -> int:
        """Rows of the embedding table and of the LM head per rank; the last rank's may be partly padding."""
        return -(-self.vocabulary // ranks)

    def keys(self, window: int) -> Keys:
        """The key heads of layers with this window."""
        if self.global_keys and not window:
            return self.global_keys
        return Keys(heads=self.kv_heads, size=self.head_size, value_size=self.value_size)

    def query_heads(self, window: int) -> int:
        """Query heads of layers with this window."""
        return self.keys(window).queries or self.heads

    def cached_size(self, window: int) -> int:
        """Features of a key head of such layers as cached."""
        return self.keys(window).size + (self.alibi.features if self.alibi else 0)

    def key_heads(self, ranks: int, window: int) -> int:
        """Key heads that layers with this window cache on one rank."""
        return self.keys(window).own(ranks) if self.latent is None else 1

    def slot(self, ranks: int, layer: int) -> tuple[int, int, int]:
        """What a layer caches of a token on one rank: (2 for keys and values, or 1 for both; heads; features)."""
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
        """The layer's MLA latents; None: it has heads of keys and values."""
        return self.latent and self.latent.at(layer, layer not in self.nope_layers)

    @property
    def compressed(self) -> CompressedLatent | None:
        """The latents of all layers, where they are DeepSeek V4's."""
        return self.latent if isinstance(self.latent, CompressedLatent) else None

    @property
    def replayed(self) -> bool:
        """Whether steps may be captured as CUDA graphs. DeepSeek V4's may not: the numbers of entries that are seen, and that end,
        differ in each."""
        return self.compressed is None

    @property
    def index(self) -> Index | None:
        """The index that chooses the tokens to attend to (DeepSeek sparse attention); None: all are attended to."""
        return self.latent.index if self.latent else None

    @property
    def indexing(self) -> list[int]:
        """Layers with an index of their own."""
        return [layer for layer in self.attending if self.index and layer not in self.index.borrowing]

    def chosen(self, layer: int) -> int:
        """The most tokens that a token attends to by an index in this layer; 0: all that it sees."""
        if self.blocks:
            return self.blocks.most if layer in self.blocks.layers else 0
        return self.index.most if self.index else 0

    @property
    def pool(self) -> int:
        """Tokens that are chosen together, as a pool with a key of its own; 0: there are no pools."""
        found = self.index or self.blocks
        return found.pool if found else 0

    @property
    def placed(self) -> bool:
        """Whether blocks, pools or entries are chosen, whose keys are found by position: tokens must be in the slots of their
        positions."""
        return self.blocks is not None or self.compressed is not None or (self.index is not None and self.index.pool > 0)

    @property
    def most(self) -> int:
        """The most tokens that an index of any layer chooses; 0: there is none."""
        return max(map(self.chosen, range(self.layers)))

    @property
    def sparse_beyond(self) -> int:
        """The context length beyond which all sparse attention paths are in use (tokens are chosen, entries are made); 0: there is
        one path."""
        entries = self.compressed.kinds if self.compressed else ()
        return max([self.most, *(rate * max(1, chosen) for rate, chosen in entries)])

    def index_size(self, layer: int) -> int:
        """Elements of a token's index key in this layer, as cached."""
        if self.blocks:
            return self.blocks.size if layer in self.blocks.layers else 0
        return self.index.cached if self.index and layer in self.indexing else 0

    def kv_elements(self, ranks: int) -> int:
        """Elements of the KV cache per token on one rank, all layers."""
        beside = len(self.blocks.layers) * self.blocks.size if self.blocks else 0
        return sum(prod(self.slot(ranks, layer)) for layer in self.keyed) + beside

    @property
    def feature_elements(self) -> int:
        """Elements of target features cached per token beside that, for a draft model."""
        return self.hidden if self.features else 0

    @property
    def attention_inputs(self) -> int:
        """Input features of the query, key and value projections."""
        return 2 * self.hidden if self.features and self.features.widened else self.hidden

    @property
    def attending(self) -> list[int]:
        """Layers with attention."""
        others = self.without_attention | (self.recurrent.layers if self.recurrent and not self.recurrent.along else frozenset())
        return [layer for layer in range(self.layers) if layer not in others]

    @property
    def mlps(self) -> list[tuple[int, Mixture | None]]:
        """Layers with an MLP, or experts instead."""
        return [(layer, mixture) for layer, mixture in enumerate(self.mixtures) if layer not in self.without_mlp]

    @property
    def sums(self) -> int:
        """Additions to a token's residual stream, one after the other; with several ranks each is an all-reduce."""
        told = self.layers if self.inputs else 0
        return (1 if self.parallel else 2) * self.layers - len(self.without_attention) - len(self.without_mlp) + told

    def norm_names(self, layer: int) -> tuple[str, str, str, str]:
        """As `norms`, for this layer; "": none, also where the layer has no attention, or no MLP."""
        sparse = self.mixtures[layer] is not None
        remembers = self.recurrent_norms and self.recurrent and layer in self.recurrent.layers
        before, behind, mlp, last = (remembers and self.recurrent_norms) or self.norms
        if self.norm_gates:  # norms are submodules of what has gates, too
            before, mlp = f"{before}.norm", f"{mlp}.norm" if sparse else mlp
        around_attention = (before, behind) if layer not in self.without_attention else ("", "")
        around_mlp = (mlp, last or (self.experts_norm if sparse else "")) if layer not in self.without_mlp else ("", "")
        return *around_attention, *around_mlp

    def gated_norms(self, layer: int) -> list[str]:
        """Names of this layer's gated norms, before attention and before the MLP; "": the norm there has no gate."""
        return [self.norms[0], self.norms[2] if self.mixtures[layer] else ""] if self.norm_gates else []

    @property
    def norm_count(self) -> int:
        """The number of all norms, before, in and after the layers."""
        names = self.first_norm, self.last_norm, *(name for layer in range(self.layers) for name in self.norm_names(layer))
        return sum(map(bool, names))

    @property
    def weight_factor(self) -> float:
        """The factor of projections back to the stream; 1 where a norm follows, which would undo it and is scaled instead."""
        return 1.0 if self.norms[1] else self.residual_factor

    @property
    def with_keys(self) -> int:
        """The number of layers before those that share keys and values."""
        return self.layers - self.kv_shared_layers

    @property
    def keyed(self) -> list[int]:
        """Layers with keys of their own, which are cached."""
        return [layer for layer in self.attending if layer < self.with_keys]

    def source(self, layer: int) -> int:
        """The layer whose keys and values this one attends to."""
        return max(other for other in self.keyed if other <= layer and self.windows[other] == self.windows[layer])

    def joins(self, layer: int) -> bool:
        """Whether the output of the previous layer's experts is added with this layer's MLP (shortcut experts)."""
        before = self.mixtures[layer - 1] if layer else None
        return before is not None and before.later

    def width(self, layer: int) -> int:
        """Intermediate features of the layer's MLP."""
        return self.widths[layer] if self.widths else self.intermediate

    def state_bytes(self, ranks: int, item: int) -> int:
        """Bytes of a sequence's recurrent state on one rank, whatever its length; item: bytes of an element."""
        if self.recurrent is None:
            return 0
        window = (self.recurrent.width - 1) * self.recurrent.channels(ranks) * item
        found = len(self.recurrent.layers) * (4 * prod(self.recurrent.memory(ranks)) + window)
        return found + (self.ngrams.remembered(self.hidden) * item if self.ngrams else 0)

    def kept_states(self, sequences: int, prefix_caching: bool) -> int:
        """Recurrent states kept for the prefix cache, where so many sequences run at once."""
        return -(-sequences // KEPT) if self.recurrent and prefix_caching else 0

    def states_bytes(self, ranks: int, item: int, sequences: int, prefix_caching: bool) -> int:
        """Bytes of all recurrent states: of running sequences, kept ones, and one for padding."""
        return (1 + sequences + self.kept_states(sequences, prefix_caching)) * self.state_bytes(ranks, item)

    def sequences(self, asked: int, room: int, ranks: int, item: int, prefix_caching: bool) -> int:
        """The number of sequences that may run at once, at most `asked`. Recurrent states take at most half of `room` bytes: the
        rest is for keys and values."""
        if not self.recurrent:
            return asked
        fitting = room // 2 // self.state_bytes(ranks, item)
        return max(1, min(asked, fitting * KEPT // (KEPT + 1) - 1 if prefix_caching else fitting - 1))

    def turning_size(self, window: int) -> int:
        """Features of a head's rotary part in layers with this window: the whole head, of which only a part may rotate, or MLA's
        separate rotary key."""
        return self.latent.turned if self.latent else self.cached_size(window)

    def turned(self, window: int) -> int:
        """Features of a head that rotate in layers with this window."""
        return self.keys(window).turned or self.rotary_size or self.turning_size(window)

    def order(self, window: int, size: int = 0) -> tuple[int, ...]:
        """For each feature of our heads, its index in the checkpoint's heads. In ours, features that rotate together are half a
        head apart, the first rotating towards the second, and unrotated ones come last in each half; (): the order is the same.
        size: of the heads of an index, which may have another than attention's; 0: as these."""
        size, turned = size or self.turning_size(window), self.turned(window)
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
        """Whether some layers have a rotary embedding."""
        return len(self.nope_layers) < self.layers

    @property
    def chunk(self) -> int:
        """Size of chunks of positions, outside which some layers see nothing; 0: there are none."""
        return max(self.windows) if self.chunked else 0

    @property
    def turned_positions(self) -> int:
        """Positions of the rotary table: where no rotary layer looks beyond a chunk, positions restart with each."""
        chunks = self.chunk and all(self.windows[layer] for layer in range(self.layers) if layer not in self.nope_layers)
        return min(self.max_positions, self.chunk) if chunks else self.max_positions

    @property
    def rotary_elements(self) -> int:
        """Elements of the rotary tables, which every rank has whole, with one row for layers without a rotary embedding; and of the
        query scales."""
        size, local = self.turning_size(0), self.turning_size(max(self.windows)) if self.local_rope else 0
        scales = (self.rope.query_scale is not None) + (self.nope_query_scale is not None) + self.scalable_softmax
        tables = self.turned_positions * (size * self.turns + local) + size * bool(self.nope_layers)
        return 2 * tables + self.max_positions * scales

    def parameters(self, ranks: int = 1, tables: int | None = None, tokens: int | None = None) -> int:
        """Parameters on one rank. `tables`: copies of the vocabulary's table, if not as in the checkpoint; `tokens`: counts only
        the experts that so many tokens are expected to choose."""
        found = sum(count * elements(matrices) for count, matrices in self._matrices(ranks))
        found += sum(count * self._attention(ranks, *kind) for kind, count in self._alike.items()) + self._waves
        found += sum(self._asking(ranks, window) for window in self._keyless)
        found += len(self.indexing) * self.index.beside(self.hidden) if self.index else 0
        found += len(self.blocks.layers) * self.blocks.beside if self.blocks else 0
        if self.hyper:
            found += self.hyper.elements(self.hidden, self.layers)
        if self.altup:
            found += self.altup.elements(self.hidden, self.layers)
        if self.laurel:
            found += self.layers * (elements(self._laurel_matrices) + self.hidden)
        if self.norm_gates:
            found += 2 * self.norm_gates * self.hidden * (self.layers + sum(map(bool, self.mixtures)))
        if self.recurrent:
            found += len(self.recurrent.layers) * self.recurrent.beside(ranks, self.hidden)
        for layer, mixture in self.mlps:
            found += self._sparse(mixture, ranks, tokens) if mixture else self._dense(ranks, self.width(layer))
        if self.inputs:
            found += self.inputs.beside(ranks, self.hidden, self.layers, tokens is None)
        if self.ngrams:
            found += self.ngrams.elements(ranks, self.hidden, tokens is None)
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
        """The number of layers of each kind (window, latents) among those with keys of their own."""
        return Counter((self.windows[layer], self.latent_of(layer)) for layer in self.keyed)

    @property
    def _laurel_matrices(self) -> Matrices:
        """Matrices of the LAuReL branch."""
        return [(self.laurel, self.hidden, self.hidden), (self.hidden, self.laurel, self.laurel)]

    @property
    def _waves(self) -> int:
        """The number of learned frequency factors."""
        return self.turned(0) // 2 if self.rope.learned else 0

    @property
    def _keyless(self) -> list[int]:
        """Windows of the layers that share keys and values."""
        keyed = {*self.keyed}
        return [self.windows[layer] for layer in self.attending if layer not in keyed]

    def _matrices(self, ranks: int) -> Iterator[tuple[int, Matrices]]:
        """All matrices on a rank that `quantization` concerns, but those of routed experts; with the number of layers that have
        them."""
        for (window, latent), count in self._alike.items():
            yield count, self._projections(ranks, window, latent)
            yield count, latent.choosing if latent else []
        for window in self._keyless:
            yield 1, self._questions(ranks, window)
        if self.latent and self.index:
            yield len(self.indexing), self.index.matrices(self.latent.queries, self.hidden)
        if self.blocks:
            yield len(self.blocks.layers), self.blocks.matrices(ranks, self.hidden)
        if self.inputs:
            yield self.layers, self.inputs.matrices(ranks, self.hidden)
        if self.recurrent:
            yield len(self.recurrent.layers), self.recurrent.matrices(ranks, self.hidden)
        for layer, mixture in self.mlps:
            size = mixture.shared if mixture else self.width(layer)
            yield 1, self._feed_forward(size, size // ranks, self.hidden)
            yield 1, mixture.narrow(self.hidden) if mixture else []

    def _feed_forward(self, size: int, own: int, hidden: int) -> Matrices:
        """Matrices of an MLP or an expert; own: of its intermediate features those that a rank has."""
        return [((2 - bool(self.ungated)) * own, hidden, hidden), (hidden, size, own)]

    def _dense(self, ranks: int, width: int) -> int:
        """Parameters of an MLP besides its matrices."""
        return self.mlp_bias * ((2 - bool(self.ungated)) * width // ranks + self.hidden) + 2 * (self.ungated == "xielu")

    def _asking(self, ranks: int, window: int) -> int:
        """Parameters of attention besides its matrices, in a layer without keys of its own."""
        size = self.keys(window).size
        own = self.query_heads(window) // ranks * size
        return self.qkv_bias * own + self.output_bias * self.hidden + self.qk_norm * size

    def _questions(self, ranks: int, window: int) -> Matrices:
        """Matrices of attention in such a layer."""
        asked = self.query_heads(window) * self.keys(window).size
        return [(asked // ranks, self.hidden, self.hidden), (self.hidden, asked, asked // ranks)]

    def _attention(self, ranks: int, window: int, latent: Latent | None) -> int:
        """Parameters of attention besides its matrices, in a layer with this window and these latents: biases, norms, what heads
        have, and MLA's projections from latents to heads."""
        heads, keys = self.query_heads(window) // ranks, self.keys(window)
        biases = self.qkv_bias * (self._heads_columns(ranks, window) - self._unbiased(ranks, window))
        before = latent.beside(self.heads, ranks, self.hidden, self.qkv_bias) if latent else biases
        norms = (2 * (self.qk_norm and not self.plain_norms) + self.joint_qk_norm * (heads + keys.own(ranks))) * keys.size
        return before + self.output_bias * self.hidden + norms + self._of_heads(ranks, window)

    def _of_heads(self, ranks: int, window: int) -> int:
        """Of these, numbers for each head: sinks and scalable softmax."""
        return (self.has_sinks(window) + 2 * self.scalable_softmax) * self.query_heads(window) // ranks

    def has_sinks(self, window: int) -> bool:
        """Whether heads of layers with this window have attention sinks."""
        return self.sinks != "" and (window > 0 or not self.local_sinks)

    def _projections(self, ranks: int, window: int, latent: Latent | None) -> Matrices:
        """Matrices before and after attention, in a layer with this window and these latents."""
        if latent is not None:
            return latent.matrices(self.heads, ranks, self.hidden, self._gates_columns(ranks, window))
        size, inputs = self.keys(window).own_values, self.attention_inputs
        asked = self.query_heads(window) * size
        return [(self._heads_columns(ranks, window), inputs, inputs), (self.hidden, asked, asked // ranks)]

    def _heads_columns(self, ranks: int, window: int) -> int:
        """Output columns of the query, key and value projections, and of gates, on one rank."""
        keys, gates = self.keys(window), self._gates_columns(ranks, window)
        asked, values = self.query_heads(window) // ranks * keys.size, keys.values * keys.own(ranks) * keys.own_values
        return asked + keys.own(ranks) * keys.size + values + gates

    def _gates_columns(self, ranks: int, window: int) -> int:
        """Of these, the columns of gates."""
        if self.gates is None:
            return 0
        each = 1 if self.gates.by_head else self.latent.values if self.latent else self.keys(window).own_values
        return self.query_heads(window) // ranks * each

    def _unbiased(self, ranks: int, window: int) -> int:
        """Of these, columns without biases where others have some, for which zeros are held."""
        return self._gates_columns(ranks, window) if self.gates and self.gates.name else 0

    def weight_bytes(self, ranks: int, item: int, device: str, dtype: str, packed: bool) -> int:
        """Bytes of all weights on one rank, with the rotary tables. packed: matrices are repacked, so that a tied table is held in
        both forms."""
        wide = sum(mixture.floats(self.hidden) for mixture in self.mixtures if mixture) + self._waves
        wide += len(self.indexing) * self.index.floats(self.hidden) if self.index else 0
        made = self.rotary_elements + self.qk_norm_behind * len(self.attending) * self.head_size + self._made_norms
        for (window, latent), count in self._alike.items():
            wide += count * (self._of_heads(ranks, window) + (latent.floats(self.hidden) if latent else 0))
            made += count * self.qkv_bias * self._unbiased(ranks, window)
        if self.centered_norms and not self.layer_norms:
            wide += self.norm_count * self.hidden
            wide += 2 * self.qk_norm * sum(self.keys(self.windows[layer]).size for layer in self.keyed)
            wide += 2 * len(self.blocks.layers) * self.blocks.size if self.blocks else 0
        wide += self.hyper.floats(self.hidden, self.layers) if self.hyper else 0
        wide += self.ngrams.floats(self.hidden) if self.ngrams else 0
        wide += self.layers * self.altup.floats(self.hidden) if self.altup else 0
        wide += self.precise_logits * (not self.tied) * self.vocabulary_slice(ranks) * self.hidden
        if self.recurrent:
            wide += len(self.recurrent.layers) * self.recurrent.floats(ranks)
        if self.latent and not self.latent.queries:  # zeros beside the biases of latents
            made += self.qkv_bias * len(self.attending) * self.heads // ranks * (self.latent.plain + self.latent.turned)
        if self.ngrams:
            made += len(self.ngrams.layers) * self.ngrams.spread * self.ngrams.channels(self.hidden)
        if self.alibi:
            made += self.max_positions * self.heads // ranks * self.alibi.features
        made += self.turned_norm * 2 * (self.layers - len(self.nope_layers)) * self.head_size
        found = (self.parameters(ranks, 2 if packed else None) + made) * item + wide * (4 - item)
        found += sum(4 * self.vocabulary * mixture.chosen for mixture in self.mixtures if mixture and mixture.hashed)
        return found - self.saved(ranks, item, device, dtype)

    @property
    def _made_norms(self) -> int:
        """Elements of norm gains and biases that no checkpoint has: of plain norms, and zeros of layer norms."""
        each = self.plain_norms + (self.layer_norms and not self.norm_bias)
        heads = 2 * self.head_size * len(self.keyed) if self.plain_norms and self.qk_norm else 0
        return each * self.hidden * self.norm_count + heads

    def saved(self, ranks: int, item: int, device: str, dtype: str, tokens: int | None = None) -> int:
        """Bytes that quantization saves on one rank; tokens: as of `parameters`."""

        def less(how: Quantization | None, matrices: Matrices, whole: bool = False) -> float:
            """whole: if one of the matrices is unpacked, all are."""
            each = [how.saved(item, device, dtype, inputs, own) if how else 0.0 for _, inputs, own in matrices]
            if whole and not all(each):
                return 0.0
            return sum(outputs * own * saved for saved, (outputs, _, own) in zip(each, matrices, strict=True))

        found = sum(count * less(self.quantization, matrices) for count, matrices in self._matrices(ranks))
        for _, mixture in self.mlps:
            if mixture:
                experts = self._feed_forward(mixture.size, mixture.part(ranks), mixture.latent or self.hidden)
                found += mixture.read(tokens) * less(mixture.quantization or self.quantization, experts, device == "cuda")
        return int(found)

    def adapted(self, ranks: int) -> int:
        """Parameters on one rank of a LoRA adapter of rank 1 that changes all that adapters can."""
        found = 0
        for (window, latent), count in self._alike.items():
            # Queries, keys, values and gates side by side, or queries and latents.
            before, *others = self._projections(ranks, window, latent)
            beside = 2 + (not latent and self.keys(window).values) + bool(self.gates and self.gates.name)
            found += count * ((1 if "qkv_proj" in self.joined else beside) * lora_elements([before]) + lora_elements(others))
        found += sum(lora_elements(self._questions(ranks, window)) for window in self._keyless)
        if self.blocks and self.blocks.block:  # queries and keys side by side
            found += 2 * len(self.blocks.layers) * lora_elements(self.blocks.matrices(ranks, self.hidden))
        if self.inputs:
            found += self.layers * lora_elements(self.inputs.matrices(ranks, self.hidden))
        if self.laurel:
            found += self.layers * lora_elements(self._laurel_matrices)
        if self.recurrent:
            found += len(self.recurrent.layers) * self.recurrent.adapted(ranks, self.hidden, self.quantization is not None)
        for layer, mixture in self.mlps:
            if size := mixture.shared if mixture else self.width(layer):
                first, back = self._feed_forward(size, size // ranks, self.hidden)
                parts = 1 if self.mlp_parts[0] in self.joined else 2 - bool(self.ungated)
                found += parts * lora_elements([first]) + lora_elements([back])
            if mixture and mixture.shared and mixture.shared_gate:
                found += lora_elements([(1, self.hidden, self.hidden)])
        return found

    def _sparse(self, mixture: Mixture, ranks: int, tokens: int | None) -> int:
        """Parameters of a layer's routed experts, their router, and the shared expert's gate."""
        own = mixture.part(ranks)
        each = elements(self._feed_forward(mixture.size, own, mixture.latent or self.hidden))
        routed = mixture.routing(self.hidden) + round(mixture.read(tokens) * (each + mixture.biased * (2 * own + self.hidden)))
        gate = mixture.shared > 0 and mixture.shared_gate != ""
        # Norms, the router's included, and factors of the experts' weights.
        return routed + mixture.beside * (4 * self.hidden + mixture.experts) + gate * self.hidden
