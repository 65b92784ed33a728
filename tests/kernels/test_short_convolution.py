"""Gated short convolutions equal transformers', however sequences are cut, by torch and by Triton's kernels."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers.models.lfm2 import modeling_lfm2 as oracle

from penstock.kernels import dispatch
from penstock.kernels.short_convolution import short_convolution
from penstock.kernels.spans import RecurrentStates, Spans
from penstock.tests.kernels import recurrent
from penstock.tests.kernels.recurrent import DEVICE, TOLERANCES

pytestmark = pytest.mark.usefixtures("poisoned")


@dataclass(frozen=True)
class Layer(recurrent.Rule):
    """What belongs to a layer."""

    taps: Tensor
    biases: Tensor | None

    @property
    def memory(self) -> tuple[int, int, int]:
        return 0, 0, 0

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        return 2 * TOLERANCES[self.taps.dtype]

    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        """What goes in, and gates."""
        return recurrent.wide(self.taps, tokens, len(self.taps))

    def run(self, inputs: tuple[Tensor, ...], spans: Spans, states: RecurrentStates) -> Tensor:
        return short_convolution(*inputs, self.taps, self.biases, spans, states)

    def expected(self, inputs: tuple[Tensor, ...], window: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed, gates = (each.float() for each in inputs)
        seen = torch.cat((window.float(), mixed))
        biases = self.biases.float() if self.biases is not None else None
        found = oracle.causal_conv1d_fn(seen.t()[None], self.taps.float(), biases)[0, :, len(window) :].t()
        return found * gates, seen[len(mixed) :], memory


def layer_of(chance: random.Random, dtype: torch.dtype, most: int = 300) -> Layer:
    channels = chance.choice((1, 7, chance.randint(8, most)))
    taps, biases = (torch.randn(channels, *more).to(DEVICE, dtype) for more in ((chance.randint(2, 5),), ()))
    return Layer(taps, chance.choice((biases, None)))


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_it_is_transformers(dtype: torch.dtype, chance: random.Random) -> None:
    for _ in range(4):
        recurrent.check(layer_of(chance, dtype), recurrent.random_lengths(chance), chance, chance.randint(0, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_is_transformers_by_triton(dtype: torch.dtype, chance: random.Random) -> None:
    """The interpreter cuts bfloat16 off instead of rounding."""
    pytest.importorskip("triton")
    dispatch.force("triton")
    recurrent.check(layer_of(chance, dtype), [1, chance.randint(2, 7), 40, chance.randint(1, 3)], chance, chance.randint(0, 3))


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_cutting_a_sequence_changes_nothing(route: str, chance: random.Random) -> None:
    dispatch.force(route)
    layer = layer_of(chance, torch.float32)
    recurrent.check_cuts(layer, layer.inputs(230), chance)


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_padding_has_a_slot_of_its_own(route: str, chance: random.Random) -> None:
    dispatch.force(route)
    recurrent.check_padding(layer_of(chance, torch.float32))


@pytest.mark.parametrize("way", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_forget_drafts(way: str, dtype: torch.dtype, chance: random.Random) -> None:
    dispatch.force(way)
    lengths = [chance.choice((1, 2, 5, 5, 5, 70)) for _ in range(4)] + [9]
    recurrent.check_speculation(layer_of(chance, dtype), lengths, 2, chance, 2 * TOLERANCES[dtype])
