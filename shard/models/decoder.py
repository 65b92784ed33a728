"""The transformer decoder, one for all model families, configured by a `Shape`. Knows no sequence, page or request.

It runs a `Step`: any mix of prompt chunks, decodes, draft chains and trees. Weights are sharded by tensor parallelism as in
Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): heads and intermediate features by columns, the projections after them by rows,
embedding table and LM head by vocabulary.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ...kernels.adapters import RowAdapters, choose
from ...kernels.indexed import TokenSelection
from ...kernels.linear import SAMPLES, Invariance, Weight, compile_products
from ..cache import Cache
from ..parallel import Ranks
from ..step import ImageTokens, Step
from ..weights import Source
from .alibi import alibi_biases
from .altup import AltUp, AltUpStream, Ends
from .compressed_latents import CompressedAttention
from .compression import CompressedLatent
from .deepseek_v4_names import DeepseekV4Names
from .gated_hyper_stream import GatedHyperStream, stream_mixer
from .gated_latents import GatedLatentAttention
from .gated_norms import GatedStream, NormGate
from .hash_routing import HashRoutedExperts
from .heads import HeadAttention, SharedKeyAttention
from .holder import Holder, held
from .hyper_stream import HyperStream
from .indexed_heads import SparseHeadAttention
from .kimi_linear_attention import KimiDeltaAttention
from .latents import LatentAttention
from .laurel import LaurelBlock
from .layer_inputs import PerLayerEmbedding, PerLayerInput
from .linear_attention import GatedDelta
from .loader import Loader
from .lora import LoraAdapters
from .mlp import (
    ClampedMlp,
    InputScaledExperts,
    LatentExperts,
    MixtureOfExperts,
    Mlp,
    ParallelExperts,
    SparseActivationMlp,
    UngatedMlp,
)
from .ngram_layers import NgramHasher, NgramLayer
from .olmo_linear_attention import OlmoGatedDelta
from .recurrent_shapes import KimiDeltaShape, LinearAttentionShape, RecurrentShape, ShortConvolutionShape, StateSpaceShape
from .renamed import EitherSource, LegacySource, PairedSource
from .rotary import Places, PoolRotary, cosines_and_sines, log_positions, query_scales, resized
from .shape import Shape, Unsupported
from .short_convolutions import ShortConvolutions
from .shortcuts import ShortcutExperts, ShortcutMlp, ShortcutStream
from .state_spaces import Mamba2
from .stream import Stream, of_rows
from .taps import Taps
from .token_mixer import TokenMixer
from .traits import GatedHyperConnections, HeadIndex, Rope
from .vision import Vision

OUTPUTS = ("lm_head.weight", "language_model.lm_head.weight")
# Prefixes of tensor names: in checkpoints of text alone, in multimodal ones, and in Nemotron's.
ROOTS = ("model.", "language_model.model.", "model.language_model.", "model.text_model.", "backbone.")


class Layer(Holder):
    """A decoder layer: attention and MLP, each with pre-norm, post-norm or both, added to the residual stream."""

    def __init__(self, load: Loader) -> None:
        self.index, self.shape = index, shape = load.index, load.shape
        self.ranks = load.ranks
        self.window = shape.windows[index]
        self.input_norm, self.attention_norm, self.mlp_norm, self.last_norm = (
            load.gains(name, shape.hidden) if name else None for name in shape.norm_names(index)
        )
        if shape.residual_factor != shape.weight_factor:
            self.attention_norm, self.last_norm = (
                gains * shape.residual_factor if gains is not None else None for gains in (self.attention_norm, self.last_norm)
            )
        # Hyper-connections: how attention, and the MLP, see the several residual streams.
        self.mixings = [stream_mixer(load, part, shape.hyper) for part in ("attn", "ffn")] if shape.hyper else []
        self.norm_gates = [NormGate(load, name, shape.norm_gates) if name else None for name in shape.gated_norms(index)]
        self.altup = AltUp(load, shape.altup) if shape.altup else None
        self.laurel = LaurelBlock(load, shape.laurel) if shape.laurel else None
        self.readers = tuple(self._readers(load))  # attention, linear attention, or both side by side, after the same norm
        self.factor = load.number("layer_scalar") if shape.layer_factors else 1.0
        self.per_layer = PerLayerInput(load, shape.inputs) if shape.inputs else None
        self.ngrams = NgramLayer(load, shape.ngrams) if shape.ngrams and index in shape.ngrams.layers else None
        self.mlp = self._mlp(load) if index not in shape.without_mlp else None

    def _readers(self, load: Loader) -> Iterator[TokenMixer]:
        kept = self.shape.recurrent
        if self.index in self.shape.attending:
            yield self._attention(load)
        if kept and self.index in kept.layers:
            yield _remembered(load, kept)

    def _attention(self, load: Loader) -> TokenMixer:
        shape, latent = self.shape, self.shape.latent_of(self.index)
        if self.index >= shape.with_keys:
            return SharedKeyAttention(load)
        if isinstance(latent, CompressedLatent):
            return CompressedAttention(load)
        if latent:
            return (GatedLatentAttention if latent.gated else LatentAttention)(load)
        return (SparseHeadAttention if shape.blocks and self.index in shape.blocks.layers else HeadAttention)(load)

    def _mlp(self, load: Loader) -> Mlp | MixtureOfExperts:
        mixture = self.shape.mixtures[self.index]
        if mixture:
            kinds = (
                (mixture.beside, ParallelExperts),
                (mixture.latent, LatentExperts),
                (mixture.entering, InputScaledExperts),
                (mixture.later, ShortcutExperts),
                (mixture.hashed, HashRoutedExperts),
            )
            return next((kind for asked, kind in kinds if asked), MixtureOfExperts)(load, mixture)
        if self.shape.joins(self.index):
            return ShortcutMlp(load, self.shape.width(self.index))
        if self.shape.mlp_limits and (limit := self.shape.mlp_limits[self.index]):
            return ClampedMlp(load, self.shape.width(self.index), limit)
        if self.shape.mlp_closed and (closed := self.shape.mlp_closed[self.index]):
            return SparseActivationMlp(load, self.shape.width(self.index), closed)
        return (UngatedMlp if self.shape.ungated else Mlp)(load, self.shape.width(self.index))

    @property
    def attention(self) -> TokenMixer | None:
        """Its attention, or what it has in its place."""
        return self.readers[0] if self.readers else None

    def attend(self, stream: Stream, step: Step, places: Places, cache: Cache) -> Sequence[Tensor]:
        """The outputs of the token mixers for `transform`, [tokens, features] each. Writes keys and values to the cache, or updates
        recurrent states."""
        if self.ngrams is not None:
            assert isinstance(stream, GatedHyperStream)
            assert places.rows is not None
            self.ngrams(stream, places.rows, step, cache.ngrams[self.index])
        self._turn(stream, 0)
        return [reader(stream, self.input_norm, step, places, cache) for reader in self.readers]

    def _turn(self, stream: Stream, part: int) -> None:
        if self.mixings:
            assert isinstance(stream, HyperStream)
            stream.turn(self.mixings[part])
        if self.norm_gates:
            assert isinstance(stream, GatedStream)
            stream.turn(self.norm_gates[part])
        if self.altup and part == 0:
            assert isinstance(stream, AltUpStream)
            stream.predict(self.altup)

    def project(self, stream: Stream) -> None:
        """Runs only the projections before attention, to compile them."""
        self._turn(stream, 0)
        for reader in self.readers:
            x = stream.through(self.input_norm, reader.inward)
            if isinstance(reader, LatentAttention) and reader.indexer is not None:  # it computes queries for long contexts alone
                reader.indexer.query(x.new_zeros(len(x), reader.indexer.inputs))

    def nothing(self, like: Tensor, rows: int) -> Sequence[Tensor]:
        """Zeros in place of the token mixers' outputs of so many tokens."""
        return [like.new_zeros(rows, reader.output.shape[1]) for reader in self.readers]

    def transform(self, attended: Sequence[Tensor], stream: Stream, per_layer: Tensor | None) -> None:
        """Adds to the stream the attention outputs, then the MLP's output, then the per-layer input; at last multiplies the
        stream by the layer's factor."""
        if self.laurel is not None:
            self.laurel(stream, self.input_norm)
        found = [(own, reader.output) for own, reader in zip(attended, self.readers, strict=True)]
        beside = self.mlp if self.shape.parallel else None
        if len(found) == 1 and beside is None:
            stream.add(*found[0], self.attention_norm)
        elif found:
            parts = [stream.product(*each) for each in found]
            if beside is not None:
                parts.append(beside.part(stream, self.input_norm if self.mlp_norm is None else self.mlp_norm))
            stream.add_part(parts[0].add_(parts[1]))
        if self.laurel is not None:
            stream.scale(self.laurel.factor)
        if self.mlp is not None and beside is None:
            self._turn(stream, 1)
            self.mlp(stream, self.mlp_norm, self.last_norm)
        if self.altup:
            assert isinstance(stream, AltUpStream)
            stream.correct(self.altup)
        if self.per_layer is not None and per_layer is not None:
            self.per_layer(stream, per_layer)
        if self.factor != 1:
            stream.scale(self.factor)


class Decoder:
    """The model: token ids to hidden states, hidden states to logits."""

    LAYER = Layer

    def __init__(
        self,
        shape: Shape,
        source: Source,
        ranks: Ranks,
        device: torch.device,
        exact: Invariance = Invariance.USUAL,
        adapters: LoraAdapters | None = None,
    ) -> None:
        """exact: see `Weight`; adapters: LoRA adapters that tokens may use."""
        self.shape = shape
        self.ranks = ranks
        self.invariant = exact is Invariance.INVARIANT
        self.adapters = adapters or LoraAdapters()
        self.kept: Taps | None = None  # set for a draft model that reads this model's features
        source = LegacySource(source, shape, shape.layout) if shape.layout else source
        source = PairedSource(source, shape.paired) if shape.paired else source
        source = EitherSource(source, shape.aliases) if shape.aliases else source
        source = DeepseekV4Names(source) if shape.original else source
        load = Loader(source, shape, ranks, self._root(source), exact, self.adapters if self.adapters.names else None)
        self.embedding = self._table(load)
        self.layers = [self.LAYER(load.layer(index)) for index in range(shape.layers)]
        self.positions = load.positions() if shape.learned is not None else None
        self.inputs = PerLayerEmbedding(load, shape.inputs) if shape.inputs else None
        self.adapters.check()
        self.first_norm = load.gains(shape.first_norm, shape.hidden) if shape.first_norm else None
        self.ngrams = NgramHasher(shape.ngrams, device) if shape.ngrams else None
        self.norm = load.gains(shape.last_norm, shape.hidden) if shape.last_norm else None
        last = shape.hyper if shape.hyper and not shape.hyper.averaged else None
        self.mixing = stream_mixer(load, "head", last, gives=False) if last else None
        self.ends = Ends(load, shape.altup) if shape.altup else None
        self.head = self._output(load)
        size, dtype = shape.turning_size(0), self.embedding.dtype
        of = partial(cosines_and_sines, positions=shape.turned_positions, dtype=dtype, device=device, turned=shape.turned(0))
        still = partial(of, Rope(), size, positions=1)  # the table at position 0 rotates nothing
        # Logarithms of learned frequency factors.
        self.waves = load.wide("rotary_emb.alpha", shape.turned(0) // 2) if shape.rope.learned else None
        factors = self.waves.exp() if self.waves is not None else None
        self.rotary = of(shape.rope, size, factors=factors) if shape.turns else still()
        self.query_scale, self.nope_query_scale = (
            query_scales(tuning, shape.max_positions, dtype, device) for tuning in (shape.rope.query_scale, shape.nope_query_scale)
        )
        self.logarithms = log_positions(shape.max_positions, dtype, device) if shape.scalable_softmax else None
        near = max(shape.windows)
        self.local_rotary = of(shape.local_rope, shape.turning_size(near), turned=shape.turned(near)) if shape.local_rope else None
        self.alibi_table = alibi_biases(shape, ranks.rank, ranks.size, dtype, device) if shape.alibi else None
        self.identity_rotary = still() if shape.nope_layers and shape.turns else None
        self.vision: Vision | None = None  # the image encoder, if images are enabled
        self._axes = _axes_of(shape, size, device) if shape.rope.axes else None
        # Rounded to the weights' type, as in training.
        self._factor = torch.tensor(shape.embedding_factor, dtype=self.embedding.dtype).item()

    def __call__(self, step: Step, cache: Cache) -> Tensor:
        """Computes the step's tokens, writes their keys and values, and returns the wanted rows' hidden states: [rows, hidden]."""
        looks = [(shown.tokens, self._seen(shown)) for shown in step.shown]
        stream = self._begin(step, cache)
        for tokens, features in looks:
            stream.replace(tokens, features[:, 0])
        per_layer = self._per_layer_inputs(step, stream, [tokens for tokens, _ in looks])
        places, seen, kept = self._places(step), list[Tensor](), self.kept
        for layer in self.layers:
            if step.last is not None and layer.index == self.shape.with_keys:
                # All keys and values are written: from here on only the rows whose logits are wanted are computed.
                if not len(step.rows):
                    return self.embedding.new_empty(0, self.shape.hidden)
                stream.select(step.last.tokens)
                per_layer = per_layer.index_select(1, step.last.tokens) if per_layer is not None else None
                step = step.narrowed()
                places = self._places(step)
            if kept and layer.index in kept.layers:
                seen.append(stream.normalized(None).clone())
            attended = layer.attend(stream, step, places[layer.index], cache)
            if layer is self.layers[-1] and not (kept and kept.last):
                # Its keys and values are written: from here on only the rows whose logits are wanted, once the features are kept.
                if kept:
                    kept.keep(torch.cat(seen, 1), step, cache)
                stream.select(step.rows)
                if not len(step.rows):
                    return self.embedding.new_empty(0, self.shape.hidden)
                attended = [of_rows(own, step.rows) for own in attended]
                per_layer = per_layer.index_select(1, step.rows) if per_layer is not None else None
            layer.transform(attended, stream, per_layer[layer.index] if per_layer is not None else None)
            for tokens, features in looks:
                if layer.index + 1 < features.shape[1]:
                    stream.put(tokens, features[:, layer.index + 1])
        found = self._outcome(stream)
        if kept and kept.last:
            kept.keep(found, step, cache)
            return found.index_select(0, step.rows)
        return found

    def _begin(self, step: Step, cache: Cache) -> Stream:
        chosen = choose(step.adapters, len(self.adapters.names)) if step.adapters is not None else None
        rows = self.embed(step.tokens)
        if self.positions is not None:
            rows.add_(self.positions.index_select(0, step.positions))
        return self._stream(rows, chosen, step.tokens)

    def _outcome(self, stream: Stream) -> Tensor:
        if isinstance(stream, HyperStream):
            stream.turn(self.mixing)
        if self.ends is not None:
            assert isinstance(stream, AltUpStream)
            stream.join()
        return stream.normalized(self.norm)

    def _seen(self, shown: ImageTokens) -> Tensor:
        """Image features for an image's tokens, [tokens, levels, hidden]: see `Vision`."""
        assert self.vision is not None
        found = self.vision.look(shown.picture).index_select(0, shown.features)
        return found if self.shape.image_factor == 1 else found.mul_(self.shape.image_factor)

    def _per_layer_inputs(self, step: Step, stream: Stream, shown: Sequence[Tensor]) -> Tensor | None:
        """Per-layer inputs of the step's tokens: [layers, tokens, features]. shown: which tokens are image tokens."""
        if self.inputs is None:
            return None
        return self.inputs(step.tokens, stream.normalized(None), torch.cat([*shown]) if shown else None)

    def _places(self, step: Step) -> list[Places]:
        """What each layer needs of the positions of the step's tokens."""
        alibi_bias, logarithms = (
            table.index_select(0, step.positions) if table is not None else None for table in (self.alibi_table, self.logarithms)
        )
        choosing, pools = list[TokenSelection | None](), self._pools(step)
        rows = self.ngrams(step) if self.ngrams is not None else {}
        return [
            Places(
                rotary=rotary,
                query_scale=query_scale,
                alibi_bias=alibi_bias,
                logarithms=logarithms,
                choosing=choosing,
                pools=pools,
                rows=rows.get(layer),
                every=self.rotary if self.shape.compressed else None,
            )
            for layer, (rotary, query_scale) in enumerate(zip(self._turnings(step), self._growths(step), strict=True))
        ]

    def _pools(self, step: Step) -> PoolRotary | None:
        """Cosines and sines for an index with keys of its own beside attention's; None if there is no such index."""
        index = self.shape.blocks
        if index is None or not index.pool:
            return None
        own = self._resized(index, step.positions, step.turned)
        if index.pool == 1:
            return PoolRotary(own, own)
        if step.firsts is None:
            return PoolRotary(own, self._resized(index, (step.positions - (index.pool - 1)).clamp_(min=0), None))
        return PoolRotary(own, self._resized(index, step.firsts[0], step.firsts[1:]))

    def _resized(self, index: HeadIndex, positions: Tensor, others: Tensor | None) -> Tensor:
        """As `_turned`, for the heads of an index."""
        return resized(self._turned(positions, others), self.shape.turned(0), index.size)

    def _turnings(self, step: Step) -> list[Tensor]:
        """Cosines and sines of the step's tokens, for each layer."""
        positions = step.positions if self.shape.turns else torch.zeros_like(step.positions)
        if self.shape.turned_positions < self.shape.max_positions:
            positions = positions % self.shape.turned_positions
        rotary = self._turned(positions, step.turned)
        local = self.local_rotary.index_select(0, step.positions) if self.local_rotary is not None else rotary
        still = self.identity_rotary.expand_as(rotary).contiguous() if self.identity_rotary is not None else rotary
        return [still if layer.index in self.shape.nope_layers else local if layer.window else rotary for layer in self.layers]

    def _turned(self, positions: Tensor, others: Tensor | None) -> Tensor:
        """Cosines and sines at these positions. others: two more positions of each token, where image tokens have three (mrope)."""
        rotary = self.rotary.index_select(0, positions)
        if others is not None and self._axes is not None:
            for axis, other in enumerate(others, 1):
                rotary = torch.where(self._axes == axis, self.rotary.index_select(0, other), rotary)
        return rotary

    def _growths(self, step: Step) -> list[Tensor | None]:
        """What queries are multiplied by, by their position, for each layer (temperature tuning); None: by 1."""
        turned, still = (
            table.index_select(0, step.positions) if table is not None else None
            for table in (self.query_scale, self.nope_query_scale)
        )
        return [still if still is not None and layer.index in self.shape.nope_layers else turned for layer in self.layers]

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embeddings: [tokens, hidden]."""
        rows = self.ranks.look_up(self.embedding, tokens)
        rows = rows if self._factor == 1 else rows.mul_(self._factor)
        return rows if self.first_norm is None else self._stream(rows).normalized(self.first_norm)

    def _stream(self, sums: Tensor, chosen: RowAdapters | None = None, tokens: Tensor | None = None) -> Stream:
        shape = self.shape
        if shape.hyper:
            several = GatedHyperStream if isinstance(shape.hyper, GatedHyperConnections) else HyperStream
            return several(sums, self.ranks, shape.norm_epsilon, shape.hyper.count, chosen, tokens)
        if self.ends is not None:
            return AltUpStream(sums, self.ranks, shape.norm_epsilon, shape.gelu, self.ends, chosen)
        kind = ShortcutStream if shape.paired else GatedStream if shape.norm_gates else Stream
        return kind(sums, self.ranks, shape.norm_epsilon, shape.gelu, chosen)

    def _root(self, source: Source) -> str:
        return tensor_prefix(source, self.shape)

    def _table(self, load: Loader) -> Tensor:
        """The embedding table."""
        return load.table(f"{load.prefix}{self.shape.table}.weight")

    def _output(self, load: Loader) -> Weight:
        """The LM head. Raises Unsupported if it is tied to the embedding table, and the checkpoint has a different one all the
        same."""
        name = next(filter(load.source.has, OUTPUTS), OUTPUTS[0])
        bias = load.table_bias(name) if self.shape.logit_bias else None
        if not self.shape.tied:
            return Weight(load.table(name, self.shape.precise_logits), bias, load.exact)
        if load.source.has(name) and not load.table(name).equal(self.embedding):
            raise Unsupported(
                f"config.json says tie_word_embeddings, and there is a {name} that differs from "
                f"{table_name(load.source, self.shape)}: say false there if it is the model's own, or leave the tensor out"
            )
        return Weight(self.embedding, bias, load.exact)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Logits of hidden states [rows, hidden]: on rank 0 [rows, vocabulary] in float32, elsewhere None."""
        joined = self.ranks.gather(self._part_of_logits(hidden))
        return None if joined is None else self.scaled(joined)

    def _part_of_logits(self, hidden: Tensor) -> Tensor:
        """This rank's columns of the logits, before they are scaled; in float32 if no other rank gets them."""
        return self.head(self.precise(hidden), wide=self.ranks.size == 1)

    def precise(self, hidden: Tensor) -> Tensor:
        """The hidden states in the type in which the LM head is computed."""
        return hidden.float() if self.shape.precise_logits and not self.shape.tied else hidden

    def scaled(self, joined: Tensor) -> Tensor:
        """Logits from products with the whole LM head: [rows, vocabulary or more] to [rows, vocabulary], scaled and soft-capped."""
        logits, cap, divisor = joined[:, : self.shape.vocabulary].float(), self.shape.final_softcap, self.shape.logit_divisor
        if divisor != 1:
            logits.div_(divisor)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def compile(self, rows: int) -> None:
        """Compiles what steps of up to so many tokens need, where products are compiled on first use."""
        weights = [weight for weight in self._weights() if isinstance(weight, Weight)]
        compile_products(weights, rows)
        changed = [(weight.shape, weight.lora) for weight in weights if weight.lora]
        # One for each combination of shapes: the others share its kernels.
        alike = {(shape, *(each.shape for each in lora.weights)): (shape, lora) for shape, lora in changed}
        for shape, lora in alike.values():
            for count in (1, rows):
                x, out = (self.embedding.new_zeros(count, size) for size in reversed(shape))
                lora.add(x, out, choose(torch.zeros(count, dtype=torch.int64, device=x.device), len(self.adapters.names)))
        few = self.embedding.new_zeros(1, self.shape.hidden)
        if any(weight.streams(few) for weight in weights):
            for count in SAMPLES:
                self._compile_few(count)

    def _compile_few(self, rows: int) -> None:
        """Runs all but attention for so few rows, in one layer of each kind, and the LM head. Layers run in their order, on one
        stream: what one leaves there the next may need (`shortcuts`)."""
        firsts, stream = dict[object, Layer](), self._blank(rows)
        for layer in self.layers:
            firsts.setdefault((type(layer.attention), type(layer.mlp)), layer)
        for layer in firsts.values():
            layer.project(stream)
            per_layer = self.embedding.new_zeros(rows, layer.per_layer.output.shape[1]) if layer.per_layer else None
            layer.transform(layer.nothing(self.embedding, rows), stream, per_layer)
        self._part_of_logits(stream.normalized(self.norm))

    def _blank(self, rows: int) -> Stream:
        """A stream of so many rows of zeros."""
        tokens = torch.zeros(rows, dtype=torch.int64, device=self.embedding.device)
        return self._stream(self.embedding.new_zeros(rows, self.shape.hidden), tokens=tokens)

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights."""
        twice = self.embedding.nbytes if self.shape.tied and self.head.shared else 0
        found = sum(weight.bytes if isinstance(weight, Weight) else weight.nbytes for weight in self._weights()) - twice
        return found + (self.vision.bytes if self.vision else 0)

    def _weights(self) -> Iterator[Weight | Tensor]:
        for value in vars(self).values():
            yield from held(value)


def _remembered(load: Loader, kept: RecurrentShape) -> TokenMixer:
    if isinstance(kept, ShortConvolutionShape):
        return ShortConvolutions(load, kept)
    if isinstance(kept, KimiDeltaShape):
        return KimiDeltaAttention(load, kept)
    if isinstance(kept, StateSpaceShape):
        return Mamba2(load, kept)
    assert isinstance(kept, LinearAttentionShape)
    return (OlmoGatedDelta if kept.apart else GatedDelta)(load, kept)


def _axes_of(shape: Shape, size: int, device: torch.device) -> Tensor:
    """Which of an image token's positions rotates each feature of a head: [size]. See `rotary.cosines_and_sines`."""
    half = torch.tensor([*shape.rope.axes, *[0] * (size // 2 - len(shape.rope.axes))], device=device)
    return half.repeat(2)


def tensor_prefix(source: Source, shape: Shape) -> str:
    """The prefix of its tensor names."""
    return next((root for root in ROOTS if source.has(f"{root}{shape.table}.weight")), ROOTS[0])


def table_name(source: Source, shape: Shape) -> str:
    """The name of its embedding table."""
    return f"{tensor_prefix(source, shape)}{shape.table}.weight"


def lm_head_name(source: Source, shape: Shape) -> str:
    """The name of its LM head, which may be the embedding table."""
    return table_name(source, shape) if shape.tied else next(filter(source.has, OUTPUTS), OUTPUTS[0])
