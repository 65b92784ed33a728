"""Draft heads made for one target model, which read tokens and the target's features of the token before each.

EAGLE-3 (Li et al. 2025, arXiv:2503.01840) has a layer and an LM head of its own. Multi-token prediction (MTP) layers (DeepSeek-AI
2024, arXiv:2412.19437) come with the model. Both start from the features of the previous token, which the target's `Taps` have
written to its cache. When they draft several tokens, the head's own output for a draft stands in for the target's features, which
don't exist yet.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.linear import Invariance, Weight
from ...kernels.operations import rms_norm
from ..cache import Cache
from ..parallel import Ranks
from ..step import Step
from ..weights import Source
from .decoder import OUTPUTS, ROOTS, Decoder, Layer, lm_head_name, table_name, tensor_prefix
from .loader import Loader
from .renamed import PrefixedSource
from .rotary import Places
from .shape import Shape, Unsupported
from .stream import Stream
from .taps import Taps

INTEGERS = ("I64", "I32")


class Paired(Stream):
    """A residual stream that begins with the features of the previous tokens, beside the normalized embeddings."""

    def __init__(self, sums: Tensor, both: Tensor, ranks: Ranks, epsilon: float) -> None:
        """both: [tokens, 2 * hidden], embeddings and features, each normalized."""
        super().__init__(sums, ranks, epsilon)
        self.both = both


class Eagle3Layer(Layer):
    """A layer whose attention reads embedding and features concatenated."""

    def __init__(self, load: Loader) -> None:
        super().__init__(load)
        self.feature_norm = load.gains("hidden_norm", self.shape.hidden)

    def attend(self, stream: Stream, step: Step, places: Places, cache: Cache) -> Sequence[Tensor]:
        """See Layer."""
        assert self.attention is not None
        return [self.attention(self._seen(stream), None, step, places, cache)]

    def project(self, stream: Stream) -> None:
        """See Layer."""
        assert self.attention is not None
        self._seen(stream).through(None, self.attention.inward)

    def _seen(self, stream: Stream) -> Stream:
        assert isinstance(stream, Paired)
        return Stream(stream.both, self.ranks, self.shape.norm_epsilon)


class DraftHead(Decoder, ABC):
    """A draft head. Its output for a token stands in for the token's features, so `logits` applies the last norm where that is not
    part of the output. It uses the target's embedding table and LM head where it has none of its own. `taps`: what the target is to
    keep for it."""

    taps: Taps

    def __init__(self, shape: Shape, source: Source, target: Decoder, whole: Source) -> None:
        """source: its own weights, by a decoder's names; whole: the target's checkpoint, since with several ranks each has only a
        part of the tables."""
        assert shape.features is not None
        self.features = shape.features
        self.known: Tensor | None = None  # target ids of the tokens that it can draft, [tokens]; None: all, by the same ids
        self._target = target
        self._whole = whole
        # Drafts may round in any way.
        super().__init__(shape, source, Ranks(0, 1, source.device), source.device, exact=Invariance.GUESS)

    def _root(self, source: Source) -> str:
        return ROOTS[0]

    def _table(self, load: Loader) -> Tensor:
        name, size = f"{load.prefix}{self.shape.table}.weight", (self._target.shape.vocabulary, self.shape.hidden)
        shared = self._target.embedding if self._target.ranks.size == 1 else None
        if load.source.has(name):
            found = load.source.tensor(name, size)
            return shared if shared is not None and found.equal(shared) else found
        return shared if shared is not None else self._whole.tensor(table_name(self._whole, self._target.shape), size)

    def _begin(self, step: Step, cache: Cache) -> Stream:
        assert cache.features is not None
        return self._joined(self.embed(step.tokens), cache.features.index_select(0, step.slots.clamp(min=0)))

    @abstractmethod
    def _joined(self, embedded: Tensor, features: Tensor) -> Stream:
        """Combines embeddings and the features of the previous tokens, [tokens, hidden] each, to a residual stream."""

    def _blank(self, rows: int) -> Stream:
        states = self.embedding.new_zeros(rows, self.shape.hidden)
        return self._joined(states, states.clone())

    def _outcome(self, stream: Stream) -> Tensor:
        return stream.normalized(self.norm if self.features.behind else None)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Logits over the target's vocabulary, [rows, vocabulary]; -inf for tokens that it can't draft."""
        hidden = hidden if self.features.behind else self._stream(hidden).normalized(self.norm)
        found = super().logits(hidden)
        if found is None or self.known is None:
            return found
        whole = found.new_full((len(found), self._target.shape.vocabulary), -torch.inf)
        return whole.index_copy_(1, self.known, found)


class Eagle3(DraftHead):
    """EAGLE-3: one layer, whose attention reads embedding and features concatenated."""

    LAYER = Eagle3Layer

    def __init__(self, shape: Shape, source: Source, target: Decoder, whole: Source) -> None:
        layer = "layers.0." if source.has("layers.0.hidden_norm.weight") else "midlayer."  # speculators' name, else EAGLE's
        super().__init__(shape, PrefixedSource(source, [("model.layers.0.", layer), ("model.", "")]), target, whole)
        inputs = len(self.features.layers) * shape.hidden
        self.fuse = Weight(source.tensor("fc.weight", (shape.hidden, inputs)), exact=Invariance.GUESS)
        self.taps = Taps(self.features.layers, self.fuse)
        if source.has("d2t"):
            self.known = self._known(source)

    def _output(self, load: Loader) -> Weight:
        return Weight(load.table(OUTPUTS[0]), exact=load.exact)

    def _known(self, source: Source) -> Tensor:
        count, most = self.shape.vocabulary, self._target.shape.vocabulary
        further = source.stored("d2t", INTEGERS).long()
        found = further + torch.arange(count, device=source.device) if further.shape == (count,) else further[:0]
        if not len(found) or not bool(((found >= 0) & (found < most)).all()) or len(set(found.tolist())) < count:
            raise Unsupported(f"tensor d2t does not lead {count} tokens to as many of {most}: it belongs to another model")
        return found

    def _joined(self, embedded: Tensor, features: Tensor) -> Stream:
        layer, epsilon = self.layers[0], self.shape.norm_epsilon
        assert isinstance(layer, Eagle3Layer)
        assert layer.input_norm is not None
        found = rms_norm(features, layer.feature_norm, epsilon)
        both = torch.cat((rms_norm(embedded, layer.input_norm, epsilon), found), 1)
        return Paired(found if self.features.normalized else features, both, self.ranks, epsilon)


class MtpHead(DraftHead):
    """The target's own MTP layer: a layer of the target's kind, whose input is a projection of embedding and features."""

    def __init__(self, shape: Shape, target: Decoder, whole: Source, made_up: bool = False) -> None:
        """made_up: weights are random, without a checkpoint. Raises Unsupported if the checkpoint lacks the layer."""
        assert shape.features is not None
        root, layer = tensor_prefix(whole, target.shape), f"{ROOTS[0]}layers.0."
        source = PrefixedSource(
            whole, [(ours, theirs.format(root=root, layers=target.shape.layers)) for ours, theirs in shape.features.names]
        )
        if not made_up and not source.has(f"{layer}enorm.weight"):
            raise Unsupported(
                f"the checkpoint has no {source.name(f'{layer}enorm.weight')}: its layer for predicting several tokens was left "
                "out, as in many quantized copies; leave draft=mtp out, or take another copy"
            )
        super().__init__(shape, source, target, whole)
        load = Loader(source, shape, self.ranks, layer, Invariance.GUESS)
        self.token_norm = load.gains("enorm", shape.hidden)
        self.feature_norm = load.gains("hnorm", shape.hidden)
        self.taps = Taps(())
        self.join = load.laid_out(load.matrix("eh_proj", shape.hidden, 2 * shape.hidden, whole=True))

    def _output(self, load: Loader) -> Weight:
        """The layer's LM head; the target's where it has no other: checkpoints may repeat that."""
        size = self.shape.vocabulary, self.shape.hidden
        name = lm_head_name(self._whole, self._target.shape)
        found = load.source.tensor(OUTPUTS[0], size) if load.source.has(OUTPUTS[0]) else None
        if self._target.ranks.size == 1 and (found is None or found.equal(self._whole.tensor(name, size))):
            return self._target.head
        found = found if found is not None else self._whole.tensor(name, size)
        return Weight(self.embedding if found.equal(self.embedding) else found, exact=load.exact)

    def _joined(self, embedded: Tensor, features: Tensor) -> Stream:
        norms = (embedded, self.token_norm), (features, self.feature_norm)
        return self._stream(self.join(torch.cat([self._stream(x).normalized(gains) for x, gains in norms], 1)))
