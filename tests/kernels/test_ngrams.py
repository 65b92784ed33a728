"""What layers are told of n-grams equals transformers', however sequences are cut, by torch and by Triton's kernels."""

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen4_exp import modeling_qwen4_exp as oracle

from penstock.kernels import dispatch
from penstock.kernels.ngram_hashes import NgramHashes
from penstock.kernels.ngrams import opened, rows_of, take
from penstock.kernels.spans import RecurrentStates, Spans
from penstock.shard.models.ngrams import NgramShape
from penstock.tests.kernels import recurrent
from penstock.tests.kernels.recurrent import DEVICE, TOLERANCES

pytestmark = pytest.mark.usefixtures("poisoned")
END = 3


def theirs(most: int, heads: int, layers: list[int], hidden: int = 16) -> Any:
    return transformers.Qwen4ExpTextConfig(
        vocab_size=50,
        hidden_size=hidden,
        num_hidden_layers=4,
        ple_layer_ids=layers,
        ple_embed_dim=(most - 1) * heads * 2,
        ngram_size=most,
        heads_per_ngram=heads,
        ngram_vocab_size_base=30,
        make_ngram_vocab_size_divisible_by=8,
        eos_token_id=END,
        hc_count=3,
        ple_conv_kernel_size=3,
        rms_norm_eps=1e-2,
    )


def ngram_shape(config: Any) -> NgramShape:
    return NgramShape(
        layers=tuple(one - 1 for one in config.ple_layer_ids),
        most=config.ngram_size,
        heads=config.heads_per_ngram,
        size=config.ple_embed_dim,
        base=config.ngram_vocab_size_base,
        unit=config.make_ngram_vocab_size_divisible_by,
        parts=1,
        vocabulary=config.vocab_size,
        seed=config.seed,
        end=END,
        width=config.ple_conv_kernel_size,
        streams=config.hc_count,
    )


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_rows_are_transformers(route: str, chance: random.Random) -> None:
    """Of sequences that are cut anywhere, with ends of texts among their tokens, and of padding behind them."""
    dispatch.force(route)
    for most, heads, layers in ((3, 2, [1, 3]), (2, 3, [2]), (4, 1, [1, 2])):
        config = theirs(most, heads, layers)
        own = ngram_shape(config)
        parts = [torch.tensor([of(layer) for layer in own.layers]).to(DEVICE) for of in (own.multipliers, own.sizes, own.offsets)]
        shape = len(layers), own.before, heads
        hashes = NgramHashes(parts[0], parts[1].view(shape), parts[2].view(shape), END)
        rows = [[chance.choice([END, chance.randrange(50)]) for _ in range(chance.randint(1, 12))] for _ in range(5)]
        cuts = [chance.randint(0, len(row) - 1) for row in rows]
        tails = [row[cut:] for row, cut in zip(rows, cuts, strict=True)]
        before = [([END] * own.before + row[:cut])[-own.before :] for row, cut in zip(rows, cuts, strict=True)]
        spans = recurrent.spans_of([*map(len, tails)], [*range(1, 6)], [0] * 5)
        tokens = torch.tensor([*(token for tail in tails for token in tail), 0, 0], device=DEVICE)
        found = rows_of(tokens, torch.tensor(before, device=DEVICE), spans, hashes)
        for place, layer in enumerate(own.layers):
            module = oracle.Qwen4ExpTextNGramEmbedding(config, own.size, layer, place)
            assert len(module.ngram_embedding.weight) == own.rows(layer)
            module.ngram_embedding = torch.nn.Embedding.from_pretrained(torch.arange(own.rows(layer)).double().unsqueeze(1))
            expected = [module(torch.tensor([row]), None)[0, cut:] for row, cut in zip(rows, cuts, strict=True)]
            assert 0 <= int(found[place].min()) <= int(found[place].max()) < own.rows(layer)
            assert found[place, :-2].cpu().equal(torch.cat(expected).long())


@dataclass(frozen=True)
class Layer(recurrent.Rule):
    """The convolution, and what is taken beside it."""

    taps: Tensor
    apart: int

    @property
    def memory(self) -> tuple[int, int, int]:
        return 0, 0, 0

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        return 4 * TOLERANCES[self.taps.dtype]

    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        """Norms, what is taken, and streams."""
        return tuple(torch.randn(tokens, len(self.taps)).to(self.taps) for _ in range(3))

    def run(self, inputs: tuple[Tensor, ...], spans: Spans, states: RecurrentStates) -> Tensor:
        normal, taken, streams = inputs
        found, total = streams.unsqueeze(1).clone(), int(spans.starts[-1])
        take(found, taken, normal, self.taps, self.apart, spans, states)
        assert found[total:, 0].equal(streams[total:])
        return torch.cat((found[:total, 0], torch.zeros_like(streams[total:])))  # which nobody looks at

    def expected(self, inputs: tuple[Tensor, ...], window: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normal, taken, streams = (each.float() for each in inputs)
        seen = torch.cat((window.float(), normal))
        taps = self.taps[:, :: self.apart].float().unsqueeze(1)
        found = functional.conv1d(seen.t()[None], taps, groups=len(taps), dilation=self.apart)[0].t()
        return streams + taken + functional.silu(found), seen[len(normal) :], memory


def layer_of(chance: random.Random, dtype: torch.dtype) -> Layer:
    channels, apart, width = chance.choice((1, 7, chance.randint(8, 150))), chance.randint(2, 4), chance.randint(2, 4)
    taps = torch.zeros(channels, (width - 1) * apart + 1)
    taps[:, ::apart] = torch.randn(channels, width)
    return Layer(taps.to(DEVICE, dtype), apart)


@pytest.mark.parametrize(("route", "dtype"), [*(("reference", each) for each in TOLERANCES), ("triton", torch.float32)])
def test_a_convolution_with_gaps(route: str, dtype: torch.dtype, chance: random.Random) -> None:
    dispatch.force(route)
    recurrent.check(layer_of(chance, dtype), [1, chance.randint(2, 7), 40, chance.randint(1, 3)], chance, chance.randint(0, 3))


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_states_go_on_and_forget_drafts(route: str, chance: random.Random) -> None:
    dispatch.force(route)
    layer = layer_of(chance, torch.float32)
    recurrent.check_speculation(layer, [chance.choice((1, 2, 5, 5, 40)) for _ in range(3)], 2, chance, 2e-5)
    recurrent.check_padding(layer)
    recurrent.check_cuts(layer, layer.inputs(230), chance)


@pytest.mark.parametrize(("route", "dtype"), [*(("reference", each) for each in TOLERANCES), ("triton", torch.float32)])
def test_what_streams_take_is_transformers(route: str, dtype: torch.dtype, chance: random.Random) -> None:
    """Of all that a layer is told, without cuts."""
    config = theirs(3, 2, [2], hidden=chance.choice([8, 33]))
    own, hidden, tokens = ngram_shape(config), config.hidden_size, 9
    module = oracle.Qwen4ExpTextPLELayer(config, 1, 0)
    for values in module.parameters():
        values.data.normal_(std=0.5).copy_(values.data.to(dtype))
    ids = torch.tensor([[chance.randrange(50) for _ in range(tokens)]])
    streams = torch.randn(tokens, 3, hidden).to(dtype)
    with torch.inference_mode():
        told = module.ple_embedding(ids, None)[0].to(dtype)
        expected = streams.flatten(1).float() + module(streams.flatten(1).float()[None], ids, None)[0]
    dispatch.force(route)
    weight = torch.cat((module.key_proj.weight, module.value_proj.weight)).detach().to(dtype)
    gains = torch.stack([getattr(module, f"norm_{part}").weight.detach() + 1 for part in ("key", "query", "conv")])
    place = partial(Tensor.to, device=DEVICE)
    held = place(streams)
    joint = place(functional.linear(told, weight))
    taken, normal = opened(joint, held, place(gains.view(3, 3, hidden)), 1e-2)
    taps = torch.zeros(3 * hidden, own.reach + 1, dtype=dtype)
    taps[:, :: own.most] = module.conv1d.weight.detach().squeeze(1).to(dtype)
    states = RecurrentStates(
        torch.zeros(2, own.reach, 3 * hidden, dtype=dtype, device=DEVICE), torch.zeros(2, 0, 0, 0, device=DEVICE)
    )
    take(held, taken, normal, place(taps), own.most, recurrent.spans_of([tokens], [1], [1]), states)
    tolerance = 10 * TOLERANCES[dtype]
    torch.testing.assert_close(held.float().flatten(1).cpu(), expected, rtol=tolerance, atol=tolerance)


def test_it_is_compiled_as_it_is_launched() -> None:
    pytest.importorskip("triton")
    from penstock.kernels import fused_ngrams

    for one in fused_ngrams.compilations():
        assert list(one.signature) == [name for name in one.kernel.arg_names if name not in one.constants]
