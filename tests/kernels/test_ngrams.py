"""N-gram embeddings (Qwen 4 Exp), by the reference and by Triton's kernels, compared with transformers: rows of tables by hashes,
the dilated convolution, chunked sequences, padding and draft tokens."""

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

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
END = 3


def transformers_config(max_ngram: int, heads: int, layers: list[int], hidden: int = 16) -> Any:
    return transformers.Qwen4ExpTextConfig(
        vocab_size=50,
        hidden_size=hidden,
        num_hidden_layers=4,
        ple_layer_ids=layers,
        ple_embed_dim=(max_ngram - 1) * heads * 2,
        ngram_size=max_ngram,
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
def test_table_rows_match_transformers(route: str, rng: random.Random) -> None:
    """For chunked sequences with end-of-text tokens, and with padding after them."""
    dispatch.force(route)
    for max_ngram, heads, layers in ((3, 2, [1, 3]), (2, 3, [2]), (4, 1, [1, 2])):
        config = transformers_config(max_ngram, heads, layers)
        ngrams = ngram_shape(config)
        parts = [
            torch.tensor([method(layer) for layer in ngrams.layers]).to(DEVICE)
            for method in (ngrams.multipliers, ngrams.sizes, ngrams.offsets)
        ]
        shape = len(layers), ngrams.before, heads
        hashes = NgramHashes(parts[0], parts[1].view(shape), parts[2].view(shape), END)
        rows = [[rng.choice([END, rng.randrange(50)]) for _ in range(rng.randint(1, 12))] for _ in range(5)]
        cuts = [rng.randint(0, len(row) - 1) for row in rows]
        chunks = [row[cut:] for row, cut in zip(rows, cuts, strict=True)]
        before = [([END] * ngrams.before + row[:cut])[-ngrams.before :] for row, cut in zip(rows, cuts, strict=True)]
        spans = recurrent.make_spans([*map(len, chunks)], [*range(1, 6)], [0] * 5)
        tokens = torch.tensor([*(token for chunk in chunks for token in chunk), 0, 0], device=DEVICE)
        found = rows_of(tokens, torch.tensor(before, device=DEVICE), spans, hashes)
        for index, layer in enumerate(ngrams.layers):
            module = oracle.Qwen4ExpTextNGramEmbedding(config, ngrams.size, layer, index)
            assert len(module.ngram_embedding.weight) == ngrams.rows(layer)
            module.ngram_embedding = torch.nn.Embedding.from_pretrained(torch.arange(ngrams.rows(layer)).double().unsqueeze(1))
            expected = [module(torch.tensor([row]), None)[0, cut:] for row, cut in zip(rows, cuts, strict=True)]
            assert 0 <= int(found[index].min()) <= int(found[index].max()) < ngrams.rows(layer)
            assert found[index, :-2].cpu().equal(torch.cat(expected).long())


@dataclass(frozen=True)
class Layer(recurrent.Rule):
    """The dilated convolution, and the embeddings that are added beside it."""

    taps: Tensor
    dilation: int

    @property
    def memory(self) -> tuple[int, int, int]:
        return 0, 0, 0

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        return 4 * TOLERANCES[self.taps.dtype]

    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        """Normalized inputs of the convolution, gated embeddings, and residual streams."""
        return tuple(torch.randn(tokens, len(self.taps)).to(self.taps) for _ in range(3))

    def run(self, inputs: tuple[Tensor, ...], spans: Spans, states: RecurrentStates) -> Tensor:
        normalized, embeddings, streams = inputs
        found, total = streams.unsqueeze(1).clone(), int(spans.starts[-1])
        take(found, embeddings, normalized, self.taps, self.dilation, spans, states)
        assert found[total:, 0].equal(streams[total:])
        return torch.cat((found[:total, 0], torch.zeros_like(streams[total:])))  # which is not read

    def expected(self, inputs: tuple[Tensor, ...], window: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normalized, embeddings, streams = (part.float() for part in inputs)
        padded = torch.cat((window.float(), normalized))
        taps = self.taps[:, :: self.dilation].float().unsqueeze(1)
        found = functional.conv1d(padded.t()[None], taps, groups=len(taps), dilation=self.dilation)[0].t()
        return streams + embeddings + functional.silu(found), padded[len(normalized) :], memory


def random_layer(rng: random.Random, dtype: torch.dtype) -> Layer:
    channels, dilation, width = rng.choice((1, 7, rng.randint(8, 150))), rng.randint(2, 4), rng.randint(2, 4)
    taps = torch.zeros(channels, (width - 1) * dilation + 1)
    taps[:, ::dilation] = torch.randn(channels, width)
    return Layer(taps.to(DEVICE, dtype), dilation)


@pytest.mark.parametrize(("route", "dtype"), [*(("reference", each) for each in TOLERANCES), ("triton", torch.float32)])
def test_dilated_convolution_matches_torch(route: str, dtype: torch.dtype, rng: random.Random) -> None:
    dispatch.force(route)
    recurrent.check_against_oracle(random_layer(rng, dtype), [1, rng.randint(2, 7), 40, rng.randint(1, 3)], rng, rng.randint(0, 3))


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_states_survive_chunking_and_padding_and_drop_rejected_drafts(route: str, rng: random.Random) -> None:
    dispatch.force(route)
    layer = random_layer(rng, torch.float32)
    recurrent.check_drafts(layer, [rng.choice((1, 2, 5, 5, 40)) for _ in range(3)], 2, rng, 2e-5)
    recurrent.check_padding(layer)
    recurrent.check_chunking(layer, layer.inputs(230), rng)


@pytest.mark.parametrize(("route", "dtype"), [*(("reference", each) for each in TOLERANCES), ("triton", torch.float32)])
def test_whole_ngram_layer_matches_transformers(route: str, dtype: torch.dtype, rng: random.Random) -> None:
    """In one chunk."""
    config = transformers_config(3, 2, [2], hidden=rng.choice([8, 33]))
    ngrams, hidden, tokens = ngram_shape(config), config.hidden_size, 9
    module = oracle.Qwen4ExpTextPLELayer(config, 1, 0)
    for values in module.parameters():
        values.data.normal_(std=0.5).copy_(values.data.to(dtype))
    ids = torch.tensor([[rng.randrange(50) for _ in range(tokens)]])
    streams = torch.randn(tokens, 3, hidden).to(dtype)
    with torch.inference_mode():
        embeddings = module.ple_embedding(ids, None)[0].to(dtype)
        expected = streams.flatten(1).float() + module(streams.flatten(1).float()[None], ids, None)[0]
    dispatch.force(route)
    weight = torch.cat((module.key_proj.weight, module.value_proj.weight)).detach().to(dtype)
    gains = torch.stack([getattr(module, f"norm_{part}").weight.detach() + 1 for part in ("key", "query", "conv")])
    to_device = partial(Tensor.to, device=DEVICE)
    result = to_device(streams)
    joint = to_device(functional.linear(embeddings, weight))
    taken, normalized = opened(joint, result, to_device(gains.view(3, 3, hidden)), 1e-2)
    taps = torch.zeros(3 * hidden, ngrams.reach + 1, dtype=dtype)
    taps[:, :: ngrams.most] = module.conv1d.weight.detach().squeeze(1).to(dtype)
    states = RecurrentStates(
        torch.zeros(2, ngrams.reach, 3 * hidden, dtype=dtype, device=DEVICE), torch.zeros(2, 0, 0, 0, device=DEVICE)
    )
    take(result, taken, normalized, to_device(taps), ngrams.most, recurrent.make_spans([tokens], [1], [1]), states)
    tolerance = 10 * TOLERANCES[dtype]
    torch.testing.assert_close(result.float().flatten(1).cpu(), expected, rtol=tolerance, atol=tolerance)


def test_ahead_of_time_signatures_match_the_kernels_parameters() -> None:
    pytest.importorskip("triton")
    from penstock.kernels import fused_ngrams

    for compilation in fused_ngrams.compilations():
        assert list(compilation.signature) == [name for name in compilation.kernel.arg_names if name not in compilation.constants]
