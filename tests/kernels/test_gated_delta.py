"""Linear attention by the gated delta rule equals transformers', however sequences are cut, by torch and by Triton's kernels."""

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

pytestmark = pytest.mark.usefixtures("poisoned")


@dataclass(frozen=True)
class Layer(recurrent.Rule):
    """Sizes, and what belongs to a layer."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: Tensor
    rates: Tensor
    offsets: Tensor  # as many as there are fades
    strongest: float  # of strengths
    bound: float  # of fades; 0: they have none

    @property
    def memory(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_size, self.value_size

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        return TOLERANCES[self.taps.dtype]

    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        """Mixed, strengths and fades."""
        sizes = self.value_heads, len(self.offsets)
        mixed, more = recurrent.wide(self.taps, tokens, sum(sizes))
        return mixed, *more.split(sizes, 1)

    def run(self, inputs: tuple[Tensor, ...], spans: Spans, states: RecurrentStates) -> Tensor:
        mixed, strengths, fades = inputs
        return gated_delta(mixed, strengths, fades, self.taps, self.rates, self.offsets, spans, states, self.strongest, self.bound)

    def expected(self, inputs: tuple[Tensor, ...], window: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed, strengths, fades = (each.float() for each in inputs)
        seen = torch.cat((window.float(), mixed))
        features = oracle.causal_conv1d_fn(seen.t()[None], self.taps.float(), activation="silu")[0, :, len(window) :].t()
        parts = (
            features.to(self.taps.dtype)
            .float()
            .tensor_split((self.key_heads * self.key_size, 2 * self.key_heads * self.key_size), 1)
        )
        sizes = self.key_size, self.key_size, self.value_size
        query, key, value = (part.reshape(1, len(mixed), -1, size) for part, size in zip(parts, sizes, strict=True))
        # Not every version of theirs repeats what several heads of values share.
        query, key = (part.repeat_interleave(self.value_heads // self.key_heads, 2) for part in (query, key))
        far = (fades + self.offsets).view(len(mixed), self.value_heads, -1)
        decay = self.rates[:, None] * functional.softplus(far)
        if self.bound:
            decay = self.bound * torch.sigmoid(-self.rates[:, None] * far)
        # The other ways of theirs add up whole fading in 32 bits.
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
        return found[0], seen[len(mixed) :], memory[0]


FADES = [(False, 0.0), (True, 0.0), (True, -5.0)]  # of all features of a key together, of each, as Kimi's; and GLM 5 Next's


def layer_of(
    chance: random.Random, dtype: torch.dtype, most: int = 64, heads: int = 4, each: bool = False, bound: float = 0.0
) -> Layer:
    """each: feature of a key fades by itself, as Kimi's do, which have as many heads of values as of keys."""
    key_heads = chance.randint(1, heads)
    value_heads = key_heads * (1 if each else chance.randint(1, heads))
    key_size, value_size = chance.randint(8, most), chance.randint(8, most)
    taps = torch.randn(2 * key_heads * key_size + value_heads * value_size, chance.randint(2, 5)).to(DEVICE, dtype)
    rates, offsets = -16 * torch.rand(value_heads) ** 4, torch.randn(value_heads * (key_size if each else 1))
    strongest = 1.0 if each else chance.choice([1.0, 2.0])  # OLMo Hybrid's
    return Layer(key_heads, value_heads, key_size, value_size, taps, rates.to(DEVICE), offsets.to(DEVICE), strongest, bound)


@pytest.mark.parametrize(("each", "bound"), FADES)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_it_is_transformers(dtype: torch.dtype, each: bool, bound: float, chance: random.Random) -> None:
    for _ in range(4):
        recurrent.check(
            layer_of(chance, dtype, each=each, bound=bound), recurrent.random_lengths(chance), chance, chance.randint(0, 3)
        )


@pytest.mark.filterwarnings("ignore:overflow")  # an exponential that is infinite is meant, where a bound is near
@pytest.mark.parametrize(("each", "bound"), FADES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_is_transformers_by_triton(dtype: torch.dtype, each: bool, bound: float, chance: random.Random) -> None:
    """The interpreter cuts bfloat16 off instead of rounding."""
    pytest.importorskip("triton")
    dispatch.force("triton")
    recurrent.check(layer_of(chance, dtype, 40, 2, each, bound), [1, chance.randint(2, 7), chance.randint(1, 3)], chance, 2)


@pytest.mark.parametrize(("each", "bound"), FADES)
def test_cutting_a_sequence_changes_nothing(each: bool, bound: float, chance: random.Random) -> None:
    """Nor do its neighbours, and tokens that let all fade: chunks add up how much."""
    layer = layer_of(chance, torch.float32, each=each, bound=bound)
    inputs = layer.inputs(230)
    inputs[2][::9] = 2000.0
    recurrent.check_cuts(layer, inputs, chance)


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_padding_has_a_slot_of_its_own(route: str, chance: random.Random) -> None:
    dispatch.force(route)
    recurrent.check_padding(layer_of(chance, torch.float32, 20, 2))


@pytest.mark.parametrize(
    ("dtype", "route"), [*((dtype, "reference") for dtype in TOLERANCES), (torch.float32, "triton"), (torch.float16, "triton")]
)
@pytest.mark.parametrize("kind", [oracle.Qwen3_5RMSNormGated, kimi.KimiLinearRMSNormGated])
def test_gated_norm(kind: type, dtype: torch.dtype, route: str, chance: random.Random) -> None:
    dispatch.force(route)
    size, heads, sigmoid = chance.randint(8, 70), chance.randint(1, 5), kind is kimi.KimiLinearRMSNormGated
    norm = kind(size, eps=1e-3).to(DEVICE, dtype)
    torch.nn.init.normal_(norm.weight)
    whole = torch.full((3, 2 * heads * size + 5), torch.nan).to(DEVICE, dtype)
    whole[:, 5:] = 2 * torch.randn(3, 2 * heads * size)
    x, gates = whole[:, 5:].view(3, 2 * heads, size).split(heads, 1)
    with torch.no_grad():
        wanted = norm(x, gates)
        found = [gated_norm(*each, norm.weight, 1e-3, sigmoid=sigmoid) for each in ((x, gates), (x[:, 0], gates[:, 0]))]
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found[0], wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1], wanted[:, 0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("way", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_forget_drafts(way: str, dtype: torch.dtype, chance: random.Random) -> None:
    dispatch.force(way)
    usual = (1, 2, 5, 5, 5, 5, 70) if way == "reference" else (1, 2, 5)  # in the interpreter 70 tokens take a minute
    lengths = [chance.choice(usual) for _ in range(6 if way == "reference" else 4)]
    recurrent.check_speculation(layer_of(chance, dtype, most=24), lengths, 3, chance, 10 * TOLERANCES[dtype])
