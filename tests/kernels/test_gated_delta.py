"""Linear attention by the gated delta rule, by the reference and by Triton's kernels, compared with transformers (Qwen 3.5, Kimi
Linear): whole and chunked sequences, padding and draft tokens; and the gated norm after it."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_5 import modeling_qwen3_5 as oracle

from penstock.kernels import dispatch
from penstock.kernels.gated_delta import gated_delta, gated_norm
from penstock.kernels.spans import RecurrentStates, Spans
from penstock.tests.kernels import recurrent
from penstock.tests.kernels.recurrent import DEVICE, TOLERANCES

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@dataclass(frozen=True)
class Layer(recurrent.Rule):
    """Sizes and weights of a layer."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: Tensor
    rates: Tensor
    offsets: Tensor  # one for each decay
    strongest: float  # largest value of beta, the strength of an update
    bound: float  # lower bound of log decays; 0: none

    @property
    def memory(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_size, self.value_size

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        return TOLERANCES[self.taps.dtype]

    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        """The convolution's inputs, strengths (beta) and decays, before their activations."""
        sizes = self.value_heads, len(self.offsets)
        mixed, more = recurrent.poisoned_views(self.taps, tokens, sum(sizes))
        return mixed, *more.split(sizes, 1)

    def run(self, inputs: tuple[Tensor, ...], spans: Spans, states: RecurrentStates) -> Tensor:
        mixed, strengths, fades = inputs
        return gated_delta(mixed, strengths, fades, self.taps, self.rates, self.offsets, spans, states, self.strongest, self.bound)

    def expected(self, inputs: tuple[Tensor, ...], window: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed, strengths, fades = (part.float() for part in inputs)
        padded = torch.cat((window.float(), mixed))
        features = oracle.causal_conv1d_fn(padded.t()[None], self.taps.float(), activation="silu")[0, :, len(window) :].t()
        parts = (
            features.to(self.taps.dtype)
            .float()
            .tensor_split((self.key_heads * self.key_size, 2 * self.key_heads * self.key_size), 1)
        )
        sizes = self.key_size, self.key_size, self.value_size
        query, key, value = (part.reshape(1, len(mixed), -1, size) for part, size in zip(parts, sizes, strict=True))
        # Not every version of transformers repeats the queries and keys that several value heads share.
        query, key = (part.repeat_interleave(self.value_heads // self.key_heads, 2) for part in (query, key))
        shifted = (fades + self.offsets).view(len(mixed), self.value_heads, -1)
        decay = self.rates[:, None] * functional.softplus(shifted)
        if self.bound:
            decay = self.bound * torch.sigmoid(-self.rates[:, None] * shifted)
        # transformers' chunked implementations add up the decays of a chunk in 32 bits.
        if decay.shape[2] == 1:
            decay, rule = decay.squeeze(2), oracle.torch_recurrent_gated_delta_rule
        else:
            rule = kimi.recurrent_kimi_delta_attention
        found, memory = rule(
            query,
            key,
            value,
            decay[None],
            self.strongest * strengths.sigmoid()[None],
            initial_state=memory[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return found[0], padded[len(mixed) :], memory[0]


DECAYS = [
    (False, 0.0),
    (True, 0.0),
    (True, -5.0),
]  # one decay for all features of a key; one for each, as in Kimi Linear; and with a bound, as in GLM 5 Next


def random_layer(
    rng: random.Random,
    dtype: torch.dtype,
    max_size: int = 64,
    max_heads: int = 4,
    decay_per_feature: bool = False,
    bound: float = 0.0,
) -> Layer:
    """decay_per_feature: each feature of a key decays separately, as in Kimi Linear, which has as many value heads as key heads."""
    key_heads = rng.randint(1, max_heads)
    value_heads = key_heads * (1 if decay_per_feature else rng.randint(1, max_heads))
    key_size, value_size = rng.randint(8, max_size), rng.randint(8, max_size)
    taps = torch.randn(2 * key_heads * key_size + value_heads * value_size, rng.randint(2, 5)).to(DEVICE, dtype)
    rates, offsets = -16 * torch.rand(value_heads) ** 4, torch.randn(value_heads * (key_size if decay_per_feature else 1))
    strongest = 1.0 if decay_per_feature else rng.choice([1.0, 2.0])  # 2: OLMo Hybrid
    return Layer(key_heads, value_heads, key_size, value_size, taps, rates.to(DEVICE), offsets.to(DEVICE), strongest, bound)


@pytest.mark.parametrize(("decay_per_feature", "bound"), DECAYS)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_reference_matches_transformers(dtype: torch.dtype, decay_per_feature: bool, bound: float, rng: random.Random) -> None:
    for _ in range(4):
        recurrent.check_against_oracle(
            random_layer(rng, dtype, decay_per_feature=decay_per_feature, bound=bound),
            recurrent.random_span_lengths(rng),
            rng,
            rng.randint(0, 3),
        )


@pytest.mark.filterwarnings("ignore:overflow")  # with a bound, exponentials overflow to infinity as intended
@pytest.mark.parametrize(("decay_per_feature", "bound"), DECAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_matches_transformers(dtype: torch.dtype, decay_per_feature: bool, bound: float, rng: random.Random) -> None:
    """Not in bfloat16: the interpreter truncates where it should round."""
    pytest.importorskip("triton")
    dispatch.force("triton")
    recurrent.check_against_oracle(
        random_layer(rng, dtype, 40, 2, decay_per_feature, bound), [1, rng.randint(2, 7), rng.randint(1, 3)], rng, 2
    )


@pytest.mark.parametrize(("decay_per_feature", "bound"), DECAYS)
def test_chunked_and_whole_sequences_have_equal_outputs_and_states(
    decay_per_feature: bool, bound: float, rng: random.Random
) -> None:
    """Also with neighbours, and with tokens that decay a state to zero: chunks add up decays."""
    layer = random_layer(rng, torch.float32, decay_per_feature=decay_per_feature, bound=bound)
    inputs = layer.inputs(230)
    inputs[2][::9] = 2000.0
    recurrent.check_chunking(layer, inputs, rng)


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_padding_with_nan_state_in_slot_0_affects_no_other_state(route: str, rng: random.Random) -> None:
    dispatch.force(route)
    recurrent.check_padding(random_layer(rng, torch.float32, 20, 2))


@pytest.mark.parametrize(
    ("dtype", "route"), [*((dtype, "reference") for dtype in TOLERANCES), (torch.float32, "triton"), (torch.float16, "triton")]
)
@pytest.mark.parametrize("kind", [oracle.Qwen3_5RMSNormGated, kimi.KimiLinearRMSNormGated])
def test_gated_norm_matches_transformers(kind: type, dtype: torch.dtype, route: str, rng: random.Random) -> None:
    dispatch.force(route)
    size, heads, sigmoid = rng.randint(8, 70), rng.randint(1, 5), kind is kimi.KimiLinearRMSNormGated
    norm = kind(size, eps=1e-3).to(DEVICE, dtype)
    torch.nn.init.normal_(norm.weight)
    parent = torch.full((3, 2 * heads * size + 5), torch.nan).to(DEVICE, dtype)
    parent[:, 5:] = 2 * torch.randn(3, 2 * heads * size)
    x, gates = parent[:, 5:].view(3, 2 * heads, size).split(heads, 1)
    with torch.no_grad():
        expected = norm(x, gates)
        found = [gated_norm(*each, norm.weight, 1e-3, sigmoid=sigmoid) for each in ((x, gates), (x[:, 0], gates[:, 0]))]
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found[0], expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1], expected[:, 0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_include_accepted_draft_tokens_only(route: str, dtype: torch.dtype, rng: random.Random) -> None:
    dispatch.force(route)
    choices = (1, 2, 5, 5, 5, 5, 70) if route == "reference" else (1, 2, 5)  # in the interpreter 70 tokens take a minute
    lengths = [rng.choice(choices) for _ in range(6 if route == "reference" else 4)]
    recurrent.check_drafts(random_layer(rng, dtype, max_size=24), lengths, 3, rng, 10 * TOLERANCES[dtype])
