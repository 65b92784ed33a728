"""Linear attention by state spaces (Mamba-2), by the reference and by Triton's kernels, compared with transformers: whole and
chunked sequences, padding and draft tokens; and the gated norm after it."""

import random
from dataclasses import dataclass, replace

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

LIMITS, UNLIMITED = (0.05, 3.0), (0.0, torch.inf)  # of step sizes (dt)
pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@dataclass(frozen=True)
class Layer(recurrent.Rule):
    """Sizes and weights of a layer."""

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
        """Step sizes (dt) may be large, and so may the outputs."""
        return found.abs().max().item() + more

    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        """The convolution's inputs, and step sizes (dt) before the softplus."""
        return recurrent.poisoned_views(self.taps, tokens, self.heads)

    def run(self, inputs: tuple[Tensor, ...], spans: Spans, states: RecurrentStates) -> Tensor:
        mixed, steps = inputs
        parameters = self.taps, self.biases, self.rates, self.offsets, self.skips, self.limits
        return state_space(mixed, steps, *parameters, spans, states)

    def expected(self, inputs: tuple[Tensor, ...], window: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """By transformers' update of a state with one token."""
        mixed, steps = (part.float() for part in inputs)
        padded = torch.cat((window.float(), mixed))
        features = oracle.causal_conv1d_fn(padded.t()[None], self.taps.float(), self.biases.float(), activation="silu")
        rounded = features[0, :, len(window) :].t().to(self.taps.dtype).float()
        keys = self.groups * self.key_size
        queries, keys, values = rounded.split((keys, keys, self.heads * self.value_size), 1)
        # transformers' update does not clamp step sizes, only its chunked scan does: they are clamped here.
        clamped_steps = functional.softplus(steps + self.offsets).clamp(*self.limits)
        state, found = memory.transpose(1, 2)[None].clone(), []
        expanded = (-1, self.value_size)
        for query, key, value, step in zip(queries, keys, values, clamped_steps, strict=True):
            found.append(
                oracle.mamba2_selective_state_update(
                    state,
                    value.view(1, self.heads, self.value_size),
                    step[None, :, None].expand(1, *expanded),
                    self.rates[:, None, None].expand(*expanded, self.key_size),
                    key.view(1, self.groups, self.key_size),
                    query.view(1, self.groups, self.key_size),
                    self.skips[:, None].expand(*expanded),
                )[0]
            )
        return torch.stack(found), padded[len(mixed) :], state[0].transpose(1, 2)


def random_layer(rng: random.Random, dtype: torch.dtype, max_size: int = 64, max_heads: int = 4) -> Layer:
    groups = rng.randint(1, max_heads)
    heads = groups * rng.randint(1, max_heads)
    key_size, value_size = rng.randint(8, max_size), rng.randint(8, max_size)
    channels = 2 * groups * key_size + heads * value_size
    taps, biases = (torch.randn(channels, *more).to(DEVICE, dtype) for more in ((rng.randint(2, 5),), ()))
    rates, offsets, skips = -4 * torch.rand(heads) ** 4, torch.randn(heads) - 2, torch.randn(heads)
    parameters = (part.to(DEVICE) for part in (rates, offsets, skips))
    return Layer(groups, heads, key_size, value_size, taps, biases, *parameters, rng.choice((LIMITS, UNLIMITED)))


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_reference_matches_transformers(dtype: torch.dtype, rng: random.Random) -> None:
    for _ in range(4):
        recurrent.check_against_oracle(random_layer(rng, dtype), recurrent.random_span_lengths(rng), rng, rng.randint(0, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_matches_transformers(dtype: torch.dtype, rng: random.Random) -> None:
    """Not in bfloat16: the interpreter truncates where it should round."""
    pytest.importorskip("triton")
    dispatch.force("triton")
    recurrent.check_against_oracle(random_layer(rng, dtype, 40, 2), [1, rng.randint(2, 7), rng.randint(1, 3)], rng, 2)


def test_reference_matches_transformers_chunked_scan(rng: random.Random) -> None:
    """Which, unlike its update with one token, clamps step sizes itself."""
    layer = random_layer(rng, torch.float32)
    mixed, steps = layer.inputs(150)
    result = layer.run((mixed, steps), recurrent.make_spans([150], [1], [1]), layer.states(2))
    features = oracle.causal_conv1d_fn(mixed.t()[None], layer.taps, layer.biases, activation="silu")[0].t()
    keys = layer.groups * layer.key_size
    parts = features.split((keys, keys, layer.heads * layer.value_size), 1)
    counts = layer.groups, layer.groups, layer.heads
    queries, keys, values = (part.reshape(1, 150, count, -1) for part, count in zip(parts, counts, strict=True))
    rule = {"dt_bias": layer.offsets, "dt_softplus": True, "dt_limit": layer.limits, "D": layer.skips}
    found = oracle.mamba2_chunk_scan(values, steps[None], layer.rates, keys, queries, 32, **rule)[0]
    torch.testing.assert_close(result, found, rtol=1e-4, atol=1e-4 * found.abs().max().item())


def test_chunked_and_whole_sequences_have_equal_outputs_and_states(rng: random.Random) -> None:
    """Also with neighbours, and with tokens that decay a state to zero: chunks add up decays."""
    layer = random_layer(rng, torch.float32)
    inputs = layer.inputs(230)
    inputs[1][::9] = 200.0
    recurrent.check_chunking(layer, inputs, rng)


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_padding_with_nan_state_in_slot_0_affects_no_other_state(route: str, rng: random.Random) -> None:
    dispatch.force(route)
    recurrent.check_padding(random_layer(rng, torch.float32, 20, 2))


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_include_accepted_draft_tokens_only(route: str, dtype: torch.dtype, rng: random.Random) -> None:
    dispatch.force(route)
    choices = (1, 2, 5, 5, 5, 70) if route == "reference" else (1, 2, 5)
    lengths = [rng.choice(choices) for _ in range(4)]
    recurrent.check_drafts(random_layer(rng, dtype, max_size=20), lengths, 2, rng, 2 * TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("dtype", "route"), [*((dtype, "reference") for dtype in TOLERANCES), (torch.float32, "triton"), (torch.float16, "triton")]
)
@pytest.mark.parametrize("groups", [1, 3])
def test_grouped_gated_norm_matches_transformers(groups: int, dtype: torch.dtype, route: str, rng: random.Random) -> None:
    """Gates are applied before the norm, and each group has its part of the gains."""
    dispatch.force(route)
    size = rng.choice((1, 7, rng.randint(8, 70), 3000))
    norm = Zamba2RMSNormGated(groups * size, size, eps=1e-3).to(DEVICE, dtype)
    torch.nn.init.normal_(norm.weight)
    parent = torch.full((3, 2 * groups * size + 5), torch.nan).to(DEVICE, dtype)
    parent[:, 5:] = 2 * torch.randn(3, 2 * groups * size)
    x, gates = parent[:, 5:].chunk(2, 1)
    with torch.no_grad():
        expected = norm(x, gates)
        found = gated_norm(x.unflatten(1, (groups, -1)), gates.unflatten(1, (groups, -1)), norm.weight.view(groups, -1), 1e-3, True)
    torch.testing.assert_close(found.flatten(1), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("tokens", [3, 70])
def test_small_steps_are_accurate(tokens: int, rng: random.Random) -> None:
    """Token by token and chunk by chunk: all that the state holds comes from steps of a millionth and less."""
    pytest.importorskip("triton")
    layer = replace(random_layer(rng, torch.float32, 16, 1), limits=UNLIMITED)
    mixed, _ = layer.inputs(tokens)
    steps, spans = torch.full((tokens, layer.heads), -14.0, device=DEVICE) - layer.offsets, recurrent.make_spans([tokens], [1], [1])
    found = {}
    for kernels in ("triton", "reference"):
        dispatch.force(kernels)
        states = layer.states(2)
        layer.run((mixed, steps), spans, states)
        found[kernels] = states.memories[1]
    torch.testing.assert_close(found["triton"], found["reference"], rtol=0, atol=1e-3 * found["reference"].abs().max().item())
