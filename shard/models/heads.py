"""Attention with heads of keys and values (MHA, GQA, MQA): projections, norms, rotary embedding, KV cache write, attention and
gates."""

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.indexed import BlockSelection, TokenSelection
from ...kernels.operations import rotate, rotate_and_write
from ...kernels.ragged import AttentionOptions, attention
from ...kernels.reference import lane_invariant
from ..cache import Cache
from ..parallel import Ranks
from ..step import Step
from .alibi import widened
from .loader import Loader
from .rotary import Places
from .stream import Stream
from .token_mixer import TokenMixer


class HeadAttention(TokenMixer):
    """The attention of a layer: query, key and value projections, and the output projection."""

    def __init__(self, load: Loader) -> None:
        super().__init__(load)
        shape, window, self.ranks = self.shape, self.window, load.ranks
        keys = shape.keys(window)
        self.size, self.value_size, self.key_heads = keys.size, keys.own_values, keys.own(load.ranks.size)
        heads, order = shape.query_heads(window), shape.order(window)
        self.shared = not keys.values  # values are the keys before norm and rotary embedding
        wholes = [keys.size, keys.size, keys.own_values][: 2 + keys.values]
        sizes = [count * size for count, size in zip((heads, keys.heads, keys.heads), wholes, strict=False)]
        own = shape.attention_name
        queries_name, keys_name, output = (f"{own}.{part}" for part in shape.attention_parts)
        names = [f"{own}.{name}_proj" for name in "qkv"][: 2 + keys.values]
        gates, attended = shape.gates, heads * keys.own_values
        gate = 1 if gates and gates.by_head else keys.own_values
        if gates and gates.name:
            names, sizes, wholes = [*names, f"{own}.{gates.name}"], [*sizes, heads * gate], [*wholes, gate]
        self.inward = load.heads(f"{own}.qkv_proj", names, sizes, shape.qkv_bias, wholes, order)
        self.query_norm, self.key_norm = (
            load.ordered(load.gains(name, keys.size), order) if shape.qk_norm else None for name in (queries_name, keys_name)
        )
        if shape.turned_norm and load.index not in shape.nope_layers:
            self.query_norm, self.key_norm = (
                torch.ones(keys.size, dtype=load.source.dtype, device=load.source.device) for _ in range(2)
            )
        joint = shape.joint_qk_norm
        self.queries_norm = load.ordered(load.part_of_gains(queries_name, sizes[0], keys.size), order) if joint else None
        self.keys_norm = load.ordered(load.part_of_gains(keys_name, sizes[1], keys.size), order) if joint else None
        self.sinks = load.each_head(f"{own}.{shape.sinks}", heads) if shape.has_sinks(window) else None
        self.scales = load.cache_scales(keys.heads)
        self.gains = self._moved() if shape.qk_norm_behind else None
        self.gates = heads * gate // load.ranks.size if gates else 0  # number of columns of `inward`, the last ones
        self.output = load.rows(output, attended, shape.output_bias)

    def _moved(self) -> Tensor | None:
        """The product of query and key norms' gains, for queries alone, where norms come after the rotary embedding. A rotation
        changes nothing that a norm computes except which feature has which gain, and a factor of the key may as well multiply the
        query. So keys are cached without gains, and the checkpoint's key scales, calibrated with gains, do not apply."""
        if self.query_norm is None or self.key_norm is None:
            return None
        found = self.query_norm * self.key_norm
        self.query_norm = self.key_norm = torch.ones_like(found)
        if self.scales is not None:
            self.scales[0] = 1
        return found

    def __call__(self, stream: Stream, norm: Tensor | None, step: Step, places: Places, cache: Cache) -> Tensor:
        """See `TokenMixer`: [tokens, this rank's heads * head size]."""
        return self.attend(stream.through(norm, self.inward), step, places, cache.layers[self.index])

    def attend(
        self, joint: Tensor, step: Step, places: Places, layer: Tensor, asked: TokenSelection | BlockSelection | None = None
    ) -> Tensor:
        """The same, given the product of the stream with `inward`. layer: of the cache; asked: the index queries by which tokens
        choose what they attend to."""
        shape, epsilon = self.shape, self.shape.norm_epsilon
        joint, gates = joint[:, : joint.shape[1] - self.gates], joint[:, joint.shape[1] - self.gates :]
        if self.queries_norm is not None and self.keys_norm is not None:
            normalize_parts(joint, (self.queries_norm, self.keys_norm), epsilon, self.ranks)
        if shape.qkv_limit:
            joint.clamp_(-shape.qkv_limit, shape.qkv_limit)
        if places.alibi_bias is not None:
            joint = widened(joint, places.alibi_bias, self.size)
        if self.value_size < self.size:
            joint = self._filled_up(joint)
        scales = self.scales if layer.dtype != joint.dtype else None
        norms, values = (self.query_norm, self.key_norm), (shape.value_norm, self.shared)
        query = rotate_and_write(joint, places.rotary, step.slots, layer, *norms, epsilon, scales, *values)
        if places.query_scale is not None:
            query.mul_(places.query_scale)
        if self.gains is not None:
            query.mul_(self.gains)
        how = AttentionOptions(self.window, shape.attention_scale, shape.softcap, scales, self.sinks, asked=asked)
        found = attention(query, layer, step.attention, how)
        found = found if places.alibi_bias is None and self.value_size == self.size else found[..., : self.value_size]
        if shape.gates is None:
            return found.flatten(1)
        opened = softplus(gates) if shape.gates.softplus else lane_invariant(torch.sigmoid, gates)
        return found.mul_(opened.view(*found.shape[:2], 1 if shape.gates.by_head else self.value_size)).flatten(1)

    def _filled_up(self, joint: Tensor) -> Tensor:
        """Queries, keys and values, with each value padded with zeros to the size of a key."""
        first = joint.shape[1] - self.key_heads * self.value_size
        values = joint[:, first:].view(len(joint), self.key_heads, self.value_size)
        return torch.cat((joint[:, :first], functional.pad(values, (0, self.size - self.value_size)).flatten(1)), 1)


class SharedKeyAttention(TokenMixer):
    """Attention of a layer without keys of its own: its queries attend to another layer's keys and values (cross-layer KV sharing:
    Brandon et al. 2024, arXiv:2405.12981)."""

    def __init__(self, load: Loader) -> None:
        super().__init__(load)
        shape, window, size = self.shape, self.window, self.shape.keys(self.window).size
        norm, _, output = (f"{shape.attention_name}.{part}" for part in shape.attention_parts)
        self.inward = load.heads(
            "", [f"{shape.attention_name}.q_proj"], [shape.query_heads(window) * size], shape.qkv_bias, [size], shape.order(window)
        )
        self.query_norm = load.gains(norm, size) if shape.qk_norm else None
        self.output = load.rows(output, shape.query_heads(window) * size, shape.output_bias)
        self.scales = load.layer(shape.source(self.index)).cache_scales(shape.keys(window).heads)  # of the other layer

    def __call__(self, stream: Stream, norm: Tensor | None, step: Step, places: Places, cache: Cache) -> Tensor:
        """See `HeadAttention`. Nothing is written to the cache, which has the other layer's keys and values for this one."""
        shape, layer = self.shape, cache.layers[self.index]
        query = rotate(stream.through(norm, self.inward), places.rotary, self.query_norm, shape.norm_epsilon)
        scales = self.scales if layer.dtype != query.dtype else None
        return attention(
            query, layer, step.attention, AttentionOptions(self.window, shape.attention_scale, shape.softcap, scales)
        ).flatten(1)


def softplus(gates: Tensor) -> Tensor:
    """Softplus in float32."""
    return lane_invariant(functional.softplus, gates.float()).to(gates.dtype)


def normalize_parts(joint: Tensor, gains: tuple[Tensor, Tensor], epsilon: float, ranks: Ranks) -> None:
    """RMS norms of the first columns of `joint`, in place: one over the queries and one over the keys of all ranks together, of
    which this rank has as many columns as gains. Keys that several ranks hold are counted as often as they are summed."""
    queries, keys = map(len, gains)
    parts = joint[:, :queries], joint[:, queries : queries + keys]
    squares = ranks.all_reduce(torch.stack([part.float().square().sum(1, keepdim=True) for part in parts]))
    for part, own, total in zip(parts, gains, squares, strict=True):
        scale = (total / (len(own) * ranks.size) + epsilon).rsqrt()
        part.copy_(part.float().mul_(scale).mul_(own))
