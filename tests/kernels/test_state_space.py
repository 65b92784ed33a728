"""Linear attention by state spaces equals transformers' Mamba-2, however sequences are cut, by torch and by Triton's kernels."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as oracle
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from penstock.kernels import dispatch
from penstock.kernels.gated_delta import gated_norm
from penstock.kernels.spans import RecurrentStates, Spans
from penstock.kernels.state_space import state_space
from penstock.tests.kernels import recurrent
from penstock.tests.kernels.recurrent import DEVICE, TOLERANCES

LIMITS, UNLIMITED = (0.05, 3.0), (0.0, torch.inf)  # of steps
pytestmark = pytest.mark.usefixtures("poisoned")


@dataclass(frozen=True)
class Layer(recurrent.Rule):
    """Sizes, and what belongs to a layer."""

    groups: int
    heads: int
    key_size: int
    value_size: int
    taps: Tensor
    biases: Tensor
    rates: Tensor
    offsets: Tensor
    skips: Tensor
    limits: tuple[float, float]

    @property
    def memory(self) -> tuple[int, int, int]:
        return self.heads, self.key_size, self.value_size

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        return 2 * TOLERANCES[self.taps.dtype]

    def size(self, found: Tensor, more: float = 0.0) -> float:
        """Steps may be large."""
        return found.abs().max().item() + more

    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        """Mixed and steps."""
        return recurrent.wide(self.taps, tokens, self.heads)

    def run(self, inputs: tuple[Tensor, ...], spans: Spans, states: RecurrentStates) -> Tensor:
        mixed, steps = inputs
        own = self.taps, self.biases, self.rates, self.offsets, self.skips, self.limits
        return state_space(mixed, steps, *own, spans, states)

    def expected(self, inputs: tuple[Tensor, ...], window: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Token by token."""
        mixed, steps = (each.float() for each in inputs)
        seen = torch.cat((window.float(), mixed))
        features = oracle.causal_conv1d_fn(seen.t()[None], self.taps.float(), self.biases.float(), activation="silu")
        rounded = features[0, :, len(window) :].t().to(self.taps.dtype).float()
        keys = self.groups * self.key_size
        queries, keys, values = rounded.split((keys, keys, self.heads * self.value_size), 1)
        # Theirs limits steps in chunks alone: given as they are to be.
        far = functional.softplus(steps + self.offsets).clamp(*self.limits)
        state, found = memory.transpose(1, 2)[None].clone(), []
        wide = (-1, self.value_size)
        for query, key, value, step in zip(queries, keys, values, far, strict=True):
            found.append(
                oracle.mamba2_selective_state_update(
                    state,
                    value.view(1, self.heads, self.value_size),
                    step[None, :, None].expand(1, *wide),
                    self.rates[:, None, None].expand(*wide, self.key_size),
                    key.view(1, self.groups, self.key_size),
                    query.view(1, self.groups, self.key_size),
                    self.skips[:, None].expand(*wide),
                )[0]
            )
        return torch.stack(found), seen[len(mixed) :], state[0].transpose(1, 2)


def layer_of(chance: random.Random, dtype: torch.dtype, most: int = 64, most_heads: int = 4) -> Layer:
    groups = chance.randint(1, most_heads)
    heads = groups * chance.randint(1, most_heads)
    key_size, value_size = chance.randint(8, most), chance.randint(8, most)
    channels = 2 * groups * key_size + heads * value_size
    taps, biases = (torch.randn(channels, *more).to(DEVICE, dtype) for more in ((chance.randint(2, 5),), ()))
    rates, offsets, skips = -4 * torch.rand(heads) ** 4, torch.randn(heads) - 2, torch.randn(heads)
    each = (part.to(DEVICE) for part in (rates, offsets, skips))
    return Layer(groups, heads, key_size, value_size, taps, biases, *each, chance.choice((LIMITS, UNLIMITED)))


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_it_is_transformers(dtype: torch.dtype, chance: random.Random) -> None:
    for _ in range(4):
        recurrent.check(layer_of(chance, dtype), recurrent.random_lengths(chance), chance, chance.randint(0, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_is_transformers_by_triton(dtype: torch.dtype, chance: random.Random) -> None:
    """The interpreter cuts bfloat16 off instead of rounding."""
    pytest.importorskip("triton")
    dispatch.force("triton")
    recurrent.check(layer_of(chance, dtype, 40, 2), [1, chance.randint(2, 7), chance.randint(1, 3)], chance, 2)


def test_it_is_transformers_chunks(chance: random.Random) -> None:
    """Which limit steps by themselves."""
    layer = layer_of(chance, torch.float32)
    mixed, steps = layer.inputs(150)
    result = layer.run((mixed, steps), recurrent.spans_of([150], [1], [1]), layer.states(2))
    features = oracle.causal_conv1d_fn(mixed.t()[None], layer.taps, layer.biases, activation="silu")[0].t()
    keys = layer.groups * layer.key_size
    parts = features.split((keys, keys, layer.heads * layer.value_size), 1)
    counts = layer.groups, layer.groups, layer.heads
    queries, keys, values = (part.reshape(1, 150, count, -1) for part, count in zip(parts, counts, strict=True))
    rule = {"dt_bias": layer.offsets, "dt_softplus": True, "dt_limit": layer.limits, "D": layer.skips}
    found = oracle.mamba2_chunk_scan(values, steps[None], layer.rates, keys, queries, 32, **rule)[0]
    torch.testing.assert_close(result, found, rtol=1e-4, atol=1e-4 * found.abs().max().item())


def test_cutting_a_sequence_changes_nothing(chance: random.Random) -> None:
    """Nor do its neighbours, and tokens that let all fade: chunks add up how much."""
    layer = layer_of(chance, torch.float32)
    inputs = layer.inputs(230)
    inputs[1][::9] = 200.0
    recurrent.check_cuts(layer, inputs, chance)


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_padding_has_a_slot_of_its_own(route: str, chance: random.Random) -> None:
    dispatch.force(route)
    recurrent.check_padding(layer_of(chance, torch.float32, 20, 2))


@pytest.mark.parametrize("way", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_forget_drafts(way: str, dtype: torch.dtype, chance: random.Random) -> None:
    dispatch.force(way)
    usual = (1, 2, 5, 5, 5, 70) if way == "reference" else (1, 2, 5)
    lengths = [chance.choice(usual) for _ in range(4)]
    recurrent.check_speculation(layer_of(chance, dtype, most=20), lengths, 2, chance, 2 * TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("dtype", "route"), [*((dtype, "reference") for dtype in TOLERANCES), (torch.float32, "triton"), (torch.float16, "triton")]
)
@pytest.mark.parametrize("groups", [1, 3])
def test_gated_norm(groups: int, dtype: torch.dtype, route: str, chance: random.Random) -> None:
    """Gates go before it, and each group has a part of the gains."""
    dispatch.force(route)
    size = chance.choice((1, 7, chance.randint(8, 70), 3000))
    norm = Zamba2RMSNormGated(groups * size, size, eps=1e-3).to(DEVICE, dtype)
    torch.nn.init.normal_(norm.weight)
    whole = torch.full((3, 2 * groups * size + 5), torch.nan).to(DEVICE, dtype)
    whole[:, 5:] = 2 * torch.randn(3, 2 * groups * size)
    x, gates = whole[:, 5:].chunk(2, 1)
    with torch.no_grad():
        wanted = norm(x, gates)
        found = gated_norm(x.unflatten(1, (groups, -1)), gates.unflatten(1, (groups, -1)), norm.weight.view(groups, -1), 1e-3, True)
    torch.testing.assert_close(found.flatten(1), wanted, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
