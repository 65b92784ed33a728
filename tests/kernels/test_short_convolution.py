"""Gated short convolutions (LFM2), by the reference and by Triton's kernels, compared with transformers: whole and chunked
sequences, padding and draft tokens."""

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

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@dataclass(frozen=True)
class Layer(recurrent.Rule):
    """Taps and biases of a layer; it has no recurrent state."""

    taps: Tensor
    biases: Tensor | None

    @property
    def memory(self) -> tuple[int, int, int]:
        return 0, 0, 0

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        return 2 * TOLERANCES[self.taps.dtype]

    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        """The convolution's inputs, and gates."""
        return recurrent.poisoned_views(self.taps, tokens, len(self.taps))

    def run(self, inputs: tuple[Tensor, ...], spans: Spans, states: RecurrentStates) -> Tensor:
        return short_convolution(*inputs, self.taps, self.biases, spans, states)

    def expected(self, inputs: tuple[Tensor, ...], window: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed, gates = (part.float() for part in inputs)
        padded = torch.cat((window.float(), mixed))
        biases = self.biases.float() if self.biases is not None else None
        found = oracle.causal_conv1d_fn(padded.t()[None], self.taps.float(), biases)[0, :, len(window) :].t()
        return found * gates, padded[len(mixed) :], memory


def random_layer(rng: random.Random, dtype: torch.dtype, max_channels: int = 300) -> Layer:
    channels = rng.choice((1, 7, rng.randint(8, max_channels)))
    taps, biases = (torch.randn(channels, *more).to(DEVICE, dtype) for more in ((rng.randint(2, 5),), ()))
    return Layer(taps, rng.choice((biases, None)))


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_reference_matches_transformers(dtype: torch.dtype, rng: random.Random) -> None:
    for _ in range(4):
        recurrent.check_against_oracle(random_layer(rng, dtype), recurrent.random_span_lengths(rng), rng, rng.randint(0, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_matches_transformers(dtype: torch.dtype, rng: random.Random) -> None:
    """Not in bfloat16: the interpreter truncates where it should round."""
    pytest.importorskip("triton")
    dispatch.force("triton")
    recurrent.check_against_oracle(random_layer(rng, dtype), [1, rng.randint(2, 7), 40, rng.randint(1, 3)], rng, rng.randint(0, 3))


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_chunked_and_whole_sequences_have_equal_outputs_and_states(route: str, rng: random.Random) -> None:
    dispatch.force(route)
    layer = random_layer(rng, torch.float32)
    recurrent.check_chunking(layer, layer.inputs(230), rng)


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_padding_with_nan_state_in_slot_0_affects_no_other_state(route: str, rng: random.Random) -> None:
    dispatch.force(route)
    recurrent.check_padding(random_layer(rng, torch.float32))


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_include_accepted_draft_tokens_only(route: str, dtype: torch.dtype, rng: random.Random) -> None:
    dispatch.force(route)
    lengths = [rng.choice((1, 2, 5, 5, 5, 70)) for _ in range(4)] + [9]
    recurrent.check_drafts(random_layer(rng, dtype), lengths, 2, rng, 2 * TOLERANCES[dtype])
