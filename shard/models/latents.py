"""Multi-head latent attention (MLA): keys and values of all heads are projections of one cached latent per token (DeepSeek-AI 2024,
arXiv:2405.04434).

A head's keys (without rotary features) and its values are up-projections of the latent by two matrices of the head. In the absorbed
form the first is applied to the head's queries instead, and the second to the head's attention output, so that attention reads the
latents as they are cached: as keys and values of one head that all query heads share. Every rank caches all latents.

Where a step's plan says so (`kernels.expanded`), long chunks use the expanded form: latents are up-projected to heads' own keys and
values.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.expanded import Plan as Expanded
from ...kernels.linear import Invariance, Weight, by_onednn
from ...kernels.operations import rms_norm, rotate_and_write_latents
from ...kernels.ragged import AttentionOptions, Plan, attention, attention_to_expanded
from ...kernels.reference import lane_invariant
from ..cache import Cache
from ..step import Step
from .holder import Holder
from .indexer import Indexer
from .loader import Loader, Projection
from .pool_indexer import PoolIndexer
from .rotary import Places
from .sharpening import ScalableSoftmax
from .stream import Stream
from .token_mixer import TokenMixer

LATENTS = "self_attn.kv_a_proj_with_mqa"
# Multiplications per head from which `torch.bmm` calls MKL on a CPU; smaller products it computes itself, summing in another order.
# Only models smaller than any that is served have so few in more than one row.
SHORT = 400


class PerHeadWeight(Holder):
    """A batched matrix product with one weight per head: the up-projection of MLA latents to keys or to values."""

    def __init__(self, weights: Tensor, exact: Invariance) -> None:
        """weights: [heads, in, out]; exact: with batch invariance, weights that oneDNN multiplies on a CPU are kept apart by head,
        since in a batched product the order of sums depends on the number of rows."""
        apart = exact is Invariance.INVARIANT and weights.device.type == "cpu" and by_onednn(weights.dtype)
        self._apart = [Weight(own.t().contiguous(), exact=exact) for own in weights] if apart else []
        self._weights = weights if not apart else None

    @property
    def whole(self) -> Tensor:
        """The weights of all heads, [heads, in, out]; not available where heads are multiplied one at a time."""
        assert self._weights is not None
        return self._weights

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, heads, in]; the result: [tokens, heads, out]."""
        if self._weights is None:
            return torch.stack([weight(x[:, head].contiguous()) for head, weight in enumerate(self._apart)], 1)
        tokens, least = len(x), max(2, -(-SHORT // self._weights[0].numel()))
        if 0 < tokens < least and x.device.type == "cpu":  # a CPU would sum so few in another order
            x = torch.cat((x, x[-1:].expand(least - tokens, -1, -1)))
        return torch.bmm(x.transpose(0, 1), self._weights).transpose(0, 1)[:tokens]


class LatentAttention(TokenMixer):
    """The MLA attention of a layer."""

    def __init__(self, load: Loader) -> None:
        super().__init__(load)
        shape, latent = self.shape, self.shape.latent_of(self.index)
        assert latent is not None
        self.latent = latent
        asked = shape.heads * (latent.plain + latent.turned)
        width, queries, gates = latent.width, latent.queries, shape.heads * latent.values
        parts = [load.projection([LATENTS], [width], wholes=[width], order=self._order(width, latent.size))]
        if queries:
            parts.insert(0, load.projection(["self_attn.q_a_proj"], [queries], wholes=[queries]))
        else:
            order = self._order(asked // load.ranks.size, latent.plain)
            parts.insert(0, load.projection(["self_attn.q_proj"], [asked], order=order))
        if shape.gates:
            parts.insert(0, load.projection([f"self_attn.{shape.gates.name}"], [gates]))
        self.gates = gates // load.ranks.size if shape.gates else 0  # number of columns of `inward`, the first ones
        self.inward = load.fused(*parts, bias=self._bias(load, asked // load.ranks.size))
        self.query = load.fused(self._asking(load)) if queries else None
        self.query_norm = load.gains("self_attn.q_a_layernorm", queries) if queries else None
        self.latent_norm = load.gains("self_attn.kv_a_layernorm", latent.size)
        each = latent.plain + latent.values
        both = load.dense(load.matrix("self_attn.kv_b_proj", shape.heads * each, latent.size)).view(-1, each, latent.size)
        self.heads = len(both)
        self.to_keys = PerHeadWeight(both[:, : latent.plain].contiguous(), load.exact)  # [heads, plain, size]
        self.to_values = PerHeadWeight(both[:, latent.plain :].transpose(1, 2).contiguous(), load.exact)  # [heads, size, values]
        choosing = PoolIndexer if latent.index and latent.index.pool else Indexer
        self.indexer = choosing(load, latent, latent.index) if latent.index and load.index in shape.indexing else None
        self.sinks = load.each_head(f"self_attn.{shape.sinks}", shape.heads) if shape.has_sinks(self.window) else None
        self.sharpening = ScalableSoftmax(load, "self_attn.softmax_scaling", shape.heads) if shape.scalable_softmax else None
        self.output = load.rows("self_attn.o_proj", shape.heads * latent.values, shape.output_bias)

    def _asking(self, load: Loader) -> Projection:
        """The up-projection from query latents to queries."""
        inputs, outputs = self.latent.queries, load.shape.heads * (self.latent.plain + self.latent.turned)
        order = self._order(outputs // load.ranks.size, self.latent.plain)
        return load.projection(["self_attn.q_b_proj"], [outputs], order=order, inputs=inputs)

    def __call__(self, stream: Stream, norm: Tensor | None, step: Step, places: Places, cache: Cache) -> Tensor:
        """See `TokenMixer`: [tokens, this rank's heads * latent.values]."""
        latent, width, cached, layer = self.latent, self.latent.width, self.shape.head_size, cache.layers[self.index]
        x = stream.normalized(norm) if self.indexer else None
        joint = stream.through(norm, self.inward) if x is None else stream.product(x, self.inward)
        gates, asked, latents = joint[:, : self.gates], joint[:, self.gates : -width], joint[:, -width:]
        made = x
        if self.query is not None:
            gates, asked, made = self._made(stream, asked, gates)
        if self.indexer is not None and x is not None and made is not None:
            places.choosing[:] = [self.indexer(x, made, places, step, layer[..., cached:])]
        query = asked.view(len(asked), self.heads, latent.plain + latent.turned)
        if width < cached:  # zeros, where other layers have rotary features
            query, latents = (functional.pad(part, (0, cached - width)) for part in (query, latents))
        rotate_and_write_latents(query, latents, self.latent_norm, places.rotary, step.slots, layer[..., :cached], latent.epsilon)
        if self.sharpening is not None:
            self.sharpening(query, places)
        if places.query_scale is not None:
            query.mul_(places.query_scale)
        [chosen] = places.choosing or [None]  # by the layer's own indexer, or the last one before it
        how = AttentionOptions(self.window, self.shape.attention_scale, sinks=self.sinks, latent=latent.size, asked=chosen)
        found = self._attended(query, layer, step.attention, how).flatten(1)
        return found.mul_(lane_invariant(torch.sigmoid, gates)) if gates.shape[1] else found

    def _attended(self, query: Tensor, layer: Tensor, plan: Plan, how: AttentionOptions) -> Tensor:
        """The attention output, [tokens, heads, values], in the absorbed form, or the expanded one for rows that the plan says.
        query: [tokens, heads, plain + turned]."""
        if isinstance(plan, Expanded):
            expanded = attention_to_expanded(query[plan.first :], layer, plan, how, self.to_keys.whole, self.to_values.whole)
            if plan.others is None:
                return expanded
            return torch.cat((self._attended(query[: plan.first], layer, plan.others, how), expanded))
        plain = self.latent.plain
        query = torch.cat((self.to_keys(query[..., :plain]), query[..., plain:]), 2)
        return self.to_values(attention(query, layer, plan, how))

    def _made(self, stream: Stream, latents: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output gates, the queries, and the indexer's input. latents: query latents before their norm; gates: those computed
        by `inward`."""
        assert self.query is not None
        made = self._normalized(latents)
        return gates, stream.product(made, self.query), made

    def _normalized(self, latents: Tensor) -> Tensor:
        """The RMS norm of query latents."""
        assert self.query_norm is not None
        return rms_norm(latents, self.query_norm, self.latent.epsilon)

    def _order(self, count: int, plain: int) -> Tensor:
        """The checkpoint's index of each of `count` outputs: of each head the first `plain` ones, then rotary ones in our order:
        see `Shape.order`."""
        places = torch.arange(count).view(-1, plain + self.latent.turned)
        order = list(self.shape.order(self.window)) if self.latent.turned else []
        if order:
            places[:, plain:] = places[:, plain:][:, order]
        return places.flatten()

    def _bias(self, load: Loader, asked: int) -> Tensor | None:
        """The bias of `inward`, if the model has one. Queries have none where there are no query latents, nor have gates."""
        if not self.shape.qkv_bias:
            return None
        latents = load.source.tensor(f"{load.prefix}{LATENTS}.bias", (self.latent.width,))
        latents = latents[self._order(len(latents), self.latent.size)]
        gates = latents.new_zeros(self.gates)
        if not self.latent.queries:
            return torch.cat((gates, latents.new_zeros(asked), latents))
        return torch.cat((gates, load.source.tensor(f"{load.prefix}self_attn.q_a_proj.bias", (self.latent.queries,)), latents))
