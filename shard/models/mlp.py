"""The MLP of a layer: dense variants, and mixtures of experts."""

import math
from collections.abc import Callable
from functools import partial
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.experts import lay_out, route
from ...kernels.operations import gated
from ...kernels.reference import Activation, lane_invariant, squared, xielu
from .experts import as_stored, experts
from .holder import Holder
from .loader import Loader
from .stream import Stream
from .traits import Mixture

# Activations of ungated MLPs. GELU: Hendrycks and Gimpel 2016, arXiv:1606.08415.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": partial(functional.gelu, approximate="tanh"),
    "exact_gelu": functional.gelu,
    "relu": functional.relu,
    "relu2": squared,
}


class Mlp(Holder):
    """A gated MLP (SwiGLU or GeGLU)."""

    def __init__(self, load: Loader, size: int) -> None:
        """size: intermediate features."""
        bias = load.shape.mlp_bias
        both, gate, up, down = (f"{load.shape.mlp_name}.{part}" for part in load.shape.mlp_parts)
        self.gate_up = load.columns(both, [gate, up], [size] * 2, bias)
        self.down = load.rows(down, size, bias)

    def __call__(self, stream: Stream, before: Tensor | None, behind: Tensor | None) -> None:
        """Adds its output to the stream. before, behind: gains of the norms before and after it, if there are any."""
        stream.add(self.inner(stream, before), self.down, behind)

    def part(self, stream: Stream, before: Tensor | None) -> Tensor:
        """This rank's part of its output, before the all-reduce."""
        return stream.product(self.inner(stream, before), self.down)

    def inner(self, stream: Stream, before: Tensor | None) -> Tensor:
        """The input of the projection `down`."""
        return stream.through(before, self.gate_up, gates=True)


class ClampedMlp(Mlp):
    """A gated MLP whose gate and up projections are clamped."""

    def __init__(self, load: Loader, size: int, limit: float) -> None:
        super().__init__(load, size)
        self.gates = Activation(load.shape.gelu, limit, load.shape.mlp_form)

    def inner(self, stream: Stream, before: Tensor | None) -> Tensor:
        """See `Mlp`."""
        return gated(stream.through(before, self.gate_up), self.gates)


class SparseActivationMlp(Mlp):
    """A gated MLP with activation sparsity (Gemma 3n): a gate is cut at a quantile of the normal distribution with the mean and
    deviation of the token's gates, so that only what exceeds it is left, and most gates are zero."""

    def __init__(self, load: Loader, size: int, closed: float) -> None:
        """closed: the quantile, the fraction of gates that are zero."""
        super().__init__(load, size)
        self.gates = Activation(load.shape.gelu)
        self._ranks = load.ranks
        # The quantile in standard deviations, rounded to the weights' type, as in training.
        self._beyond = torch.tensor(NormalDist().inv_cdf(closed), dtype=load.source.dtype).item()

    def inner(self, stream: Stream, before: Tensor | None) -> Tensor:
        """See `Mlp`."""
        joint = stream.through(before, self.gate_up)
        gates = joint[:, : joint.shape[1] // 2]
        mean, deviation = self._spread(gates.float())
        gates.sub_(mean + self._beyond * deviation).relu_()
        return gated(joint, self.gates)

    def _spread(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the gates of all ranks, [tokens, 1] each."""
        mean = gates.mean(1, keepdim=True)
        # Not torch.var_mean: it takes nine times as long on a CPU (torch 2.13, 256 x 16384).
        deviation = torch.linalg.vector_norm(gates - mean, dim=1, keepdim=True) * gates.shape[1] ** -0.5
        if self._ranks.size == 1:
            return mean, deviation
        whole, square = self._ranks.all_reduce(torch.stack((mean, deviation.square() + mean.square()))) / self._ranks.size
        return whole, (square - whole.square()).clamp_(min=0).sqrt_()


class UngatedMlp(Mlp):
    """An MLP without gates."""

    def __init__(self, load: Loader, size: int) -> None:
        bias = load.shape.mlp_bias
        up, down = (f"{load.shape.mlp_name}.{part}" for part in load.shape.mlp_parts[2:])
        self.gate_up = load.columns("", [up], [size], bias)
        self.down = load.rows(down, size, bias)
        self.activation = ACTIVATIONS.get(load.shape.ungated) or _xielu(load)

    def inner(self, stream: Stream, before: Tensor | None) -> Tensor:
        """See `Mlp`."""
        return lane_invariant(self.activation, stream.through(before, self.gate_up))


def _xielu(load: Loader) -> Callable[[Tensor], Tensor]:
    """xIELU with the layer's parameters: two of them are positive, and stored before softplus."""
    name = f"{load.shape.mlp_name}.act_fn"
    stored = [load.source.scale(f"{load.prefix}{name}.{part}", 1) for part in ("beta", "eps")]
    beta, epsilon = (usual if one is None else one.item() for one, usual in zip(stored, (0.5, -1e-6), strict=True))
    positive, negative = (math.log1p(math.exp(load.number(f"{name}.alpha_{side}"))) for side in "pn")
    return partial(xielu, positive=positive, negative=beta + negative, beta=beta, epsilon=epsilon)


class MixtureOfExperts(Holder):
    """A mixture of experts: the MLPs that a token's router chooses, and a shared expert if there is one. Every rank has a part of
    each."""

    def __init__(self, load: Loader, mixture: Mixture) -> None:
        self.mixture = mixture = as_stored(load, mixture)
        self.router = load.whole(mixture.named(mixture.router), mixture.routed, mixture.biased, mixture.wide)
        correction = mixture.named(mixture.correction)
        there = mixture.correction and not (mixture.uncorrected and not load.source.has(load.prefix + correction))
        self.correction = load.each(correction, mixture.routed) if there else None
        gate_ups, downs, biases = experts(load, mixture)
        gates = Activation(load.shape.gelu, mixture.limit, mixture.form, squared=bool(load.shape.ungated))
        self.experts = lay_out(gate_ups, downs, load.source.dtype, biases, gates, load.exact)
        self.shared = SharedExpert(load, mixture) if mixture.shared else None

    def __call__(self, stream: Stream, before: Tensor | None, behind: Tensor | None) -> None:
        """See `Mlp`."""
        stream.add_part(self.part(stream, before), behind)

    def part(self, stream: Stream, before: Tensor | None) -> Tensor:
        """See `Mlp`."""
        x = stream.normalized(before)
        made = self.made(x)
        return made if self.shared is None else made.add_(self.shared(x, stream), alpha=self.mixture.shared_factor)

    def made(self, x: Tensor) -> Tensor:
        """This rank's part of the routed experts' output."""
        return self.experts(x, *self.route(x))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of each token's experts."""
        mixture = self.mixture
        return route(
            self.router(x.float() if mixture.wide else x),
            mixture.chosen,
            mixture.normalized,
            sigmoid=mixture.scores == "sigmoid",
            correction=self.correction,
            sets=(mixture.groups, mixture.groups_chosen, mixture.best),
            factor=mixture.factor,
            near=mixture.near,
            least=mixture.least,
            by_logits=mixture.by_logits,
            zeroed=mixture.zeroed,
            rooted=mixture.scores == "sqrtsoftplus",
        )


class LatentExperts(MixtureOfExperts):
    """Nemotron 3 Super's experts, which read and write a low-dimensional latent of the stream."""

    def __init__(self, load: Loader, mixture: Mixture) -> None:
        super().__init__(load, mixture)
        names, hidden = (mixture.named(f"fc{i}_latent_proj") for i in (1, 2)), load.shape.hidden
        sizes = (mixture.latent, hidden), (hidden, mixture.latent)
        self.into, self.back = (
            load.laid_out(load.matrix(name, *size, whole=True)) for name, size in zip(names, sizes, strict=True)
        )

    def made(self, x: Tensor) -> Tensor:
        """See `MixtureOfExperts`. The projection back is linear, so ranks apply it to their parts of the sum."""
        return self.back(self.experts(self.into(x), *self.route(x)))


class InputScaledExperts(MixtureOfExperts):
    """Llama 4's experts, whose input is multiplied by their weights. They are chosen by logits, since large logits differ where
    their sigmoids don't."""

    def made(self, x: Tensor) -> Tensor:
        """See `MixtureOfExperts`."""
        logits, count = self.router(x.float()), self.mixture.chosen
        _, chosen = route(logits, count, normalized=False)
        shares = lane_invariant(torch.sigmoid, logits.gather(1, chosen)).to(x.dtype)
        seen = (x.unsqueeze(1) * shares.unsqueeze(2)).flatten(0, 1)  # [tokens * count, hidden]
        chosen = chosen.view(-1, 1)
        return self.experts(seen, torch.ones_like(chosen, dtype=torch.float32), chosen).view(-1, count, x.shape[1]).sum(1)


class ParallelExperts(MixtureOfExperts):
    """Gemma 4's experts, beside the MLP that all tokens go through (here the shared expert); both have norms of their own. The
    router reads the stream itself, and each expert has a factor of its weights."""

    def __init__(self, load: Loader, mixture: Mixture) -> None:
        super().__init__(load, mixture)
        hidden = load.shape.hidden
        self.routing = load.source.tensor(f"{load.prefix}router.scale", (hidden,)).float() * hidden**-0.5
        self.factors = load.each("router.per_expert_scale", mixture.experts)
        self.before = load.gains("pre_feedforward_layernorm_2", hidden)
        self.behind = load.gains("post_feedforward_layernorm_1", hidden), load.gains("post_feedforward_layernorm_2", hidden)

    def __call__(self, stream: Stream, before: Tensor | None, behind: Tensor | None) -> None:
        """See `Mlp`."""
        assert self.shared is not None
        dense = self.shared(stream.normalized(before), stream)
        shares, chosen = self.route(stream.normalized(self.routing))
        made = self.experts(stream.normalized(self.before), shares * self.factors[chosen], chosen)
        stream.add_each((dense, made), self.behind, behind)


class SharedExpert(Holder):
    """The shared expert, for all tokens."""

    def __init__(self, load: Loader, mixture: Mixture) -> None:
        name, self.ungated = mixture.named(mixture.shared_name), bool(load.shape.ungated)
        self.gates = Activation(load.shape.gelu, mixture.shared_limit, mixture.form)
        both, gate, up, down = (f"{name}.{part}" for part in load.shape.mlp_parts)
        gates = mixture.named(mixture.shared_gate)
        gated_by = mixture.shared_gate != ""
        self.gate = load.fused(load.projection([gates], [1], wholes=[1], unrounded=True)) if gated_by else None
        inward = [up] if self.ungated else [gate, up]
        self.gate_up = load.columns(both, inward, [mixture.shared] * len(inward), bias=False)
        self.down = load.rows(down, mixture.shared, bias=False)

    def __call__(self, x: Tensor, stream: Stream) -> Tensor:
        """This rank's part of its output for x, the stream's tokens, with its gate applied."""
        inner = stream.product(x, self.gate_up)
        made = stream.product(squared(inner) if self.ungated else gated(inner, self.gates), self.down)
        return made if self.gate is None else made.mul_(lane_invariant(torch.sigmoid, stream.product(x, self.gate)))
