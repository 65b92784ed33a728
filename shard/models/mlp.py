"""What each layer does to every token by itself: one MLP, or a few of many."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.experts import lay_out, route
from ...kernels.linear import Weight
from ...kernels.operations import gated
from ...kernels.reference import Gates, by_lanes, squared, xielu
from .experts import as_stored, experts
from .loader import Loader
from .stream import Stream
from .traits import Mixture

# Of MLPs without gates. GELU: Hendrycks and Gimpel 2016, arXiv:1606.08415.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": partial(functional.gelu, approximate="tanh"),
    "exact_gelu": functional.gelu,
    "relu": functional.relu,
    "relu2": squared,
}


class Mlp:
    """One MLP for all tokens."""

    def __init__(self, load: Loader, size: int) -> None:
        """size: of its features."""
        bias, name, alias = load.shape.mlp_bias, load.shape.mlp_name, load.shape.mlp_alias
        if alias and load.there(f"{alias}.{load.shape.mlp_parts[3]}"):
            name = alias
        both, gate, up, down = (f"{name}.{part}" for part in load.shape.mlp_parts)
        self.gate_up = load.columns(both, [gate, up], [size] * 2, bias)
        self.down = load.rows(down, size, bias)

    def __call__(self, stream: Stream, before: Tensor | None, behind: Tensor | None) -> None:
        """Adds to the stream what it makes of it. before, behind: gains of norms, where there are any."""
        stream.add(self.inner(stream, before), self.down, behind)

    def part(self, stream: Stream, before: Tensor | None) -> Tensor:
        """This rank's part of that, which nobody else has."""
        return stream.product(self.inner(stream, before), self.down)

    def inner(self, stream: Stream, before: Tensor | None) -> Tensor:
        """What `down` is to be multiplied with."""
        return stream.through(before, self.gate_up, gates=True)

    def weights(self) -> Iterator[Weight | Tensor]:
        """All of this rank's."""
        yield from (self.gate_up, self.down)


class ClampedMlp(Mlp):
    """One whose gates, and what they let through, have a limit."""

    def __init__(self, load: Loader, size: int, limit: float) -> None:
        super().__init__(load, size)
        self.gates = Gates(load.shape.gelu, limit, load.shape.mlp_form)

    def inner(self, stream: Stream, before: Tensor | None) -> Tensor:
        """As that of `Mlp`."""
        return gated(stream.through(before, self.gate_up), self.gates)


class SparseActivationMlp(Mlp):
    """One most of whose gates are closed: all but what would be the highest part of them, were they a normal distribution of their
    mean and deviation, and these by as much less as that begins at. Gemma 3n's."""

    def __init__(self, load: Loader, size: int, closed: float) -> None:
        """closed: the part of them that is, of 1."""
        super().__init__(load, size)
        self.gates = Gates(load.shape.gelu)
        self._ranks = load.ranks
        # Deviations beyond the mean, in the type of the weights, as they were trained.
        self._beyond = torch.tensor(NormalDist().inv_cdf(closed), dtype=load.source.dtype).item()

    def inner(self, stream: Stream, before: Tensor | None) -> Tensor:
        """As that of `Mlp`."""
        joint = stream.through(before, self.gate_up)
        gates = joint[:, : joint.shape[1] // 2]
        mean, deviation = self._spread(gates.float())
        gates.sub_(mean + self._beyond * deviation).relu_()
        return gated(joint, self.gates)

    def _spread(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of those of all ranks, [tokens, 1] each."""
        mean = gates.mean(1, keepdim=True)
        # Not torch.var_mean: it takes nine times as long on a CPU (torch 2.13, 256 x 16384).
        deviation = torch.linalg.vector_norm(gates - mean, dim=1, keepdim=True) * gates.shape[1] ** -0.5
        if self._ranks.size == 1:
            return mean, deviation
        whole, square = self._ranks.add(torch.stack((mean, deviation.square() + mean.square()))) / self._ranks.size
        return whole, (square - whole.square()).clamp_(min=0).sqrt_()


class UngatedMlp(Mlp):
    """One whose features are let through by themselves."""

    def __init__(self, load: Loader, size: int) -> None:
        bias = load.shape.mlp_bias
        up, down = (f"{load.shape.mlp_name}.{part}" for part in load.shape.mlp_parts[2:])
        self.gate_up = load.columns("", [up], [size], bias)
        self.down = load.rows(down, size, bias)
        self.activation = ACTIVATIONS.get(load.shape.ungated) or _xielu(load)

    def inner(self, stream: Stream, before: Tensor | None) -> Tensor:
        """As that of `Mlp`."""
        return by_lanes(self.activation, stream.through(before, self.gate_up))


def _xielu(load: Loader) -> Callable[[Tensor], Tensor]:
    """With the layer's own numbers, of which two are above 0, and what they come from is stored."""
    name = f"{load.shape.mlp_name}.act_fn"
    stored = [load.source.scale(f"{load.prefix}{name}.{part}", 1) for part in ("beta", "eps")]
    beta, epsilon = (usual if one is None else one.item() for one, usual in zip(stored, (0.5, -1e-6), strict=True))
    positive, negative = (math.log1p(math.exp(load.number(f"{name}.alpha_{side}"))) for side in "pn")
    return partial(xielu, positive=positive, negative=beta + negative, beta=beta, epsilon=epsilon)


class MixtureOfExperts:
    """Of many MLPs those that a token's router chooses, and one for all where there is one. Every rank has a part of each."""

    def __init__(self, load: Loader, mixture: Mixture) -> None:
        self.mixture = mixture = as_stored(load, mixture)
        self.router = load.whole(mixture.named(mixture.router), mixture.routed, mixture.biased, mixture.wide)
        correction = mixture.named(mixture.correction)
        there = mixture.correction and not (mixture.uncorrected and not load.source.has(load.prefix + correction))
        self.correction = load.each(correction, mixture.routed) if there else None
        gate_ups, downs, biases = experts(load, mixture)
        gates = Gates(load.shape.gelu, mixture.limit, mixture.form, squared=bool(load.shape.ungated))
        self.experts = lay_out(gate_ups, downs, load.source.dtype, biases, gates, load.exact)
        self.shared = SharedExpert(load, mixture) if mixture.shared else None

    def __call__(self, stream: Stream, before: Tensor | None, behind: Tensor | None) -> None:
        """As that of `Mlp`."""
        stream.add_part(self.part(stream, before), behind)

    def part(self, stream: Stream, before: Tensor | None) -> Tensor:
        """As that of `Mlp`."""
        x = stream.normalized(before)
        made = self.made(x)
        return made if self.shared is None else made.add_(self.shared(x, stream), alpha=self.mixture.shared_factor)

    def made(self, x: Tensor) -> Tensor:
        """This rank's part of what the chosen ones make of x."""
        return self.experts(x, *self.route(x))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares and numbers of the experts of each token."""
        mixture = self.mixture
        return route(
            self.router(x.float() if mixture.wide else x),
            mixture.chosen,
            mixture.normalized,
            sigmoid=mixture.sigmoid,
            correction=self.correction,
            sets=(mixture.groups, mixture.groups_chosen, mixture.best),
            factor=mixture.factor,
            near=mixture.near,
            least=mixture.least,
            by_logits=mixture.by_logits,
            zeroed=mixture.zeroed,
            rooted=mixture.rooted,
        )

    def weights(self) -> Iterator[Weight | Tensor]:
        """All of this rank's."""
        yield from (self.router, *self.experts.weights)
        if self.correction is not None:
            yield self.correction
        if self.shared is not None:
            yield from self.shared.weights()


class LatentExperts(MixtureOfExperts):
    """Nemotron 3 Super's: what the chosen ones see is a latent of the stream, and so is what they make."""

    def __init__(self, load: Loader, mixture: Mixture) -> None:
        super().__init__(load, mixture)
        names, hidden = (mixture.named(f"fc{i}_latent_proj") for i in (1, 2)), load.shape.hidden
        sizes = (mixture.latent, hidden), (hidden, mixture.latent)
        self.into, self.back = (
            load.laid_out(load.matrix(name, *size, whole=True), None) for name, size in zip(names, sizes, strict=True)
        )

    def made(self, x: Tensor) -> Tensor:
        """As that of `MixtureOfExperts`. What leads back is linear: parts of a sum may go through it."""
        return self.back(self.experts(self.into(x), *self.route(x)))

    def weights(self) -> Iterator[Weight | Tensor]:
        """All of this rank's."""
        yield from (*super().weights(), self.into, self.back)


class InputScaledExperts(MixtureOfExperts):
    """Llama 4's: what the chosen ones see is multiplied by their shares. By logits they are chosen, of which high ones differ where
    their scores don't."""

    def made(self, x: Tensor) -> Tensor:
        """As that of `MixtureOfExperts`."""
        logits, count = self.router(x.float()), self.mixture.chosen
        _, chosen = route(logits, count, normalized=False)
        shares = by_lanes(torch.sigmoid, logits.gather(1, chosen)).to(x.dtype)
        seen = (x.unsqueeze(1) * shares.unsqueeze(2)).flatten(0, 1)  # [tokens * count, hidden]
        chosen = chosen.view(-1, 1)
        return self.experts(seen, torch.ones_like(chosen, dtype=torch.float32), chosen).view(-1, count, x.shape[1]).sum(1)


class ParallelExperts(MixtureOfExperts):
    """Gemma 4's: what all tokens go through is an MLP with norms of its own, and so have those that a router chooses. It looks at
    the stream itself, and each expert has a factor of its shares."""

    def __init__(self, load: Loader, mixture: Mixture) -> None:
        super().__init__(load, mixture)
        hidden = load.shape.hidden
        self.routing = load.source.tensor(f"{load.prefix}router.scale", (hidden,)).float() * hidden**-0.5
        self.factors = load.each("router.per_expert_scale", mixture.experts)
        self.before = load.gains("pre_feedforward_layernorm_2", hidden)
        self.behind = load.gains("post_feedforward_layernorm_1", hidden), load.gains("post_feedforward_layernorm_2", hidden)

    def __call__(self, stream: Stream, before: Tensor | None, behind: Tensor | None) -> None:
        """As that of `Mlp`."""
        assert self.shared is not None
        dense = self.shared(stream.normalized(before), stream)
        shares, chosen = self.route(stream.normalized(self.routing))
        made = self.experts(stream.normalized(self.before), shares * self.factors[chosen], chosen)
        stream.add_each((dense, made), self.behind, behind)

    def weights(self) -> Iterator[Weight | Tensor]:
        """All of this rank's."""
        yield from (*super().weights(), self.routing, self.factors, self.before, *self.behind)


class SharedExpert:
    """The expert that all tokens go through."""

    def __init__(self, load: Loader, mixture: Mixture) -> None:
        name, self.ungated = mixture.named(mixture.shared_name), bool(load.shape.ungated)
        self.gates = Gates(load.shape.gelu, mixture.shared_limit, mixture.form)
        both, gate, up, down = (f"{name}.{part}" for part in load.shape.mlp_parts)
        gates = mixture.named(mixture.shared_gate)
        self.gate = load.whole(gates, 1, change=load.changed([gates], [1], wholes=(1,))) if mixture.shared_gate else None
        inward = [up] if self.ungated else [gate, up]
        self.gate_up = load.columns(both, inward, [mixture.shared] * len(inward), bias=False)
        self.down = load.rows(down, mixture.shared, bias=False)

    def __call__(self, x: Tensor, stream: Stream) -> Tensor:
        """This rank's part of what it makes of x, the stream's tokens, by its gate."""
        inner = stream.product(x, self.gate_up)
        made = stream.product(squared(inner) if self.ungated else gated(inner, self.gates), self.down)
        return made if self.gate is None else made.mul_(by_lanes(torch.sigmoid, stream.product(x, self.gate)))

    def weights(self) -> Iterator[Weight]:
        """All of this rank's."""
        yield from (self.gate_up, self.down)
        if self.gate is not None:
            yield self.gate
