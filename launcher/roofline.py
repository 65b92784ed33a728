"""Roofline model: lower bounds for the time of a decode step and of a prefill, from an accelerator's memory bandwidth, FLOP/s and
links.

Seconds of a step, per rank, as all ranks do the same at the same time. Pure; knows no server and no machine. Not included: kernel
launches, sampling, the host. How much of the bound penstock reaches is known for one H200 (docs/performance.md).
"""

from dataclasses import dataclass
from math import prod

from ..shard.models.shape import Shape

FORMULA = """\
decode      max(weights / bandwidth, 2 x parameters x streams / FLOP/s) + streams x keys and values / bandwidth + exchange
            + where attention is linear 2 x streams x what a sequence remembers / bandwidth
prefill     max(weights / bandwidth, (2 x parameters x tokens + 4 x layers x heads x head size x pairs) / FLOP/s) + exchange
            where latents are expanded, instead of head size: half of a key's and a value's together
            where attention is linear, instead of pairs: 6 x tokens x numbers of a memory, of state spaces 4
exchange    (2 x layers + 1) all-reduces of tokens x hidden, (layers + 1) where MLPs stand beside attention + the logits, to rank 0
            + where norms go over all heads, or gates are closed by how large others are, of each such layer one more, of
            tokens x 8 bytes, or, where norms go over the heads of a group of state spaces, of tokens x groups x 4 bytes
all-reduce  of S bytes over n nodes of g ranks: latency + 2 (g-1)/g x S / link + network-latency + 2 (n-1)/n x S/g / network
Of tokens that an index chooses, their latents, and what the index has of all.
All of a rank. Weights: without the embedding table, of which rows are read, and without experts that nobody chooses; parameters:
of experts those that a token chooses; keys and values: of a context; pairs: of tokens that see each other. Nothing that starts
a kernel, samples or plans is in it: these are bounds; how near to them penstock comes was measured on one H200 alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One accelerator: bytes, bytes a second, dense FLOP/s in 16-bit formats. Links: bytes a second in one direction; latencies in
    seconds."""

    memory: float
    bandwidth: float
    flops: float
    link: float  # to accelerators of the same node
    network: float  # to those of other nodes
    latency: float  # of an all-reduce of few bytes within a node
    network_latency: float  # of an all-reduce of few bytes between nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks of a replica, which share a model by tensor parallelism."""

    shape: Shape
    ranks: int
    nodes: int
    item: int  # bytes of an element of the compute dtype
    dtype: str = "bfloat16"  # the compute dtype
    token_bytes: int  # KV cache of a token on a rank

    @property
    def head(self) -> int:
        """Elements of a rank's slice of the output matrix (LM head)."""
        return self.shape.vocabulary_slice(self.ranks) * self.shape.hidden

    @property
    def logit(self) -> int:
        """Bytes of a logit as ranks compute it, and of an element of the output matrix."""
        return 4 if self.shape.precise_logits and not self.shape.tied else self.item

    def read(self, tokens: int) -> int:
        """Bytes of weights that a step of so many tokens reads."""
        wide = self.head * (self.logit - self.item)
        return self.parameters(tokens) * self.item + wide - self.shape.saved(self.ranks, self.item, "cuda", self.dtype, tokens)

    def parameters(self, tokens: int = 1) -> int:
        """Parameters that a step of so many tokens reads, or that one token is multiplied with. Of an embedding table, only rows
        are read."""
        return self.shape.parameters(self.ranks, tokens=tokens) - (0 if self.shape.tied else self.head)


def decode(group: Group, on: Accelerator, streams: int, context: int) -> float:
    """Seconds of a decode step with so many sequences, all with a context of that length."""
    weights = max(group.read(streams) / on.bandwidth, 2 * group.parameters() * streams / on.flops)
    # recurrent states are read and written
    each = context_bytes(group, context) + 2 * group.shape.state_bytes(group.ranks, group.item)
    return weights + streams * each / on.bandwidth + exchange(group, on, streams, streams)


def prefill(group: Group, on: Accelerator, tokens: int) -> float:
    """Seconds of a prefill of so many tokens, while nothing else runs."""
    shape, index, blocks, kept = group.shape, group.shape.index, group.shape.blocks, group.shape.recurrent
    pairs = _pairs_of_chunks if shape.chunked else _pairs
    windows = ((shape.windows[layer], shape.chosen(layer), layer) for layer in shape.attending)
    seen = ((_entries(shape, layer, tokens) or pairs(tokens, window or chosen), window) for window, chosen, layer in windows)
    attention = 2 * sum(keys * shape.query_heads(window) * _features(shape, window) for keys, window in seen) / group.ranks
    attention += 2 * sum(_choosing(shape, layer, tokens) for layer in shape.attending)
    if index and tokens > index.most:  # an indexer is replicated on every rank
        attention += 2 * len(shape.indexing) * _pairs(tokens, 0) * index.heads * index.read
    if blocks and tokens > blocks.most:
        attention += 2 * len(blocks.layers) * _pairs(tokens, 0) * blocks.own(group.ranks) * blocks.read
    if kept:
        attention += kept.rule * len(kept.layers) * tokens * prod(kept.memory(group.ranks))
    products = 2 * ((group.parameters() - group.head) * tokens + group.head)
    weights = group.read(tokens) / on.bandwidth
    return max(weights, (products + attention) / on.flops) + exchange(group, on, tokens, 1)


def _features(shape: Shape, window: int) -> int:
    """Of a head's key and value, as a prompt's tokens are multiplied with them. To expand latents takes products of parameters."""
    latent = shape.expandable
    return latent.plain + latent.turned + latent.values if latent else 2 * shape.keys(window).size


def context_bytes(group: Group, context: int) -> float:
    """Bytes of KV cache that a token reads. Layers with a sliding window read the window; with an indexer, the selected tokens
    alone, and index keys of the whole context."""
    shape, seen = group.shape, 0.0
    for layer in shape.attending:
        if shape.compressed:
            latent = shape.compressed.at(layer, True)
            seen += latent.seen(context) * latent.size + latent.asked(context)
            continue
        keys, beside = _keys(shape, context, shape.windows[layer]), shape.index_size(layer)
        own = prod(shape.slot(group.ranks, layer)) - (beside if shape.latent else 0)
        index = shape.index or shape.blocks
        read = index.read if index and beside else beside
        seen += min(keys, shape.chosen(layer) or keys) * own + context * read
    return group.token_bytes / shape.kv_elements(group.ranks) * seen


def _entries(shape: Shape, layer: int, tokens: int) -> int:
    """The number of (query, key or compressed entry) pairs of a prompt in a layer of DeepSeek V4; 0: it is another model."""
    return shape.compressed.at(layer, True).pairs(tokens) if shape.compressed else 0


def _choosing(shape: Shape, layer: int, tokens: int) -> int:
    """Multiplications of index queries with compressed entries of a prompt in a DeepSeek V4 layer; the indexer is replicated on
    every rank."""
    if not shape.compressed:
        return 0
    latent = shape.compressed.at(layer, True)
    return latent.asked(tokens) * latent.index_heads * tokens // 2 if tokens // max(1, latent.rate) > latent.index_most else 0


def _keys(shape: Shape, context: int, window: int) -> float:
    """Keys that the last token of a context attends to; with chunked attention, beyond the first chunk, the average over a
    chunk."""
    if shape.chunked and 0 < window < context:
        return (window + 1) / 2
    return min(context, window or context)


def exchange(group: Group, on: Accelerator, tokens: int, rows: int) -> float:
    """Seconds of communication between ranks in a step of so many tokens, of which `rows` get logits."""
    shape, ranks = group.shape, (group.ranks // group.nodes, group.nodes)
    sums = shape.sums + 1
    sums += sum(mixture is not None and mixture.beside for mixture in shape.mixtures)
    found = sums * all_reduce(on, *ranks, tokens * shape.hidden * group.item) + gather(group, on, rows)
    if shape.ngrams:  # partial n-gram embeddings of each rank
        found += len(shape.ngrams.layers) * all_reduce(on, *ranks, tokens * shape.ngrams.size * group.item)
    if shape.joint_qk_norm:  # a sum of squares of a token's queries, and one of its keys, in float32
        found += shape.layers * all_reduce(on, *ranks, 8 * tokens)
    closing = sum(part > 0 for part in shape.mlp_closed)  # mean of a token's gates, and of their squares
    found += closing * all_reduce(on, *ranks, 8 * tokens)
    if shape.recurrent and (squares := shape.recurrent.squares(group.ranks)):
        found += len(shape.recurrent.layers) * all_reduce(on, *ranks, 4 * tokens * squares)
    return found


def all_reduce(on: Accelerator, ranks: int, nodes: int, size: float) -> float:
    """Seconds of a hierarchical all-reduce of `size` bytes over `nodes` with `ranks` each: within a node, then each rank's slice
    between nodes, and back."""
    inside = on.latency + 2 * (ranks - 1) / ranks * size / on.link if ranks > 1 else 0.0
    between = on.network_latency + 2 * (nodes - 1) / nodes * size / ranks / on.network if nodes > 1 else 0.0
    return inside + between


def gather(group: Group, on: Accelerator, rows: int) -> float:
    """Seconds to gather the ranks' slices of the logits on rank 0."""
    near = group.ranks // group.nodes
    part = rows * group.shape.vocabulary_slice(group.ranks) * group.logit
    inside = on.latency + (near - 1) * part / on.link if near > 1 else 0.0
    between = on.network_latency + (group.nodes - 1) * near * part / on.network if group.nodes > 1 else 0.0
    return inside + between


def _pairs(tokens: int, window: int) -> int:
    """The number of (query, key) pairs of a prompt in a causal attention layer; window 0: the whole context."""
    full = min(tokens, window or tokens)
    return full * (full + 1) // 2 + (tokens - full) * full


def _pairs_of_chunks(tokens: int, chunk: int) -> int:
    """The number of such pairs with chunked attention, where a token sees only its chunk; 0: all."""
    whole, rest = divmod(tokens, chunk or tokens + 1)
    return whole * _pairs(chunk, 0) + _pairs(rest, 0)
