"""gpt-oss: parameter counts against the paper, and MXFP4 experts against the format's definition."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.kernels import codes
from penstock.kernels.experts import Experts, route
from penstock.kernels.linear import Weight
from penstock.shard.models.decoder import Decoder
from penstock.shard.models.families import shape
from penstock.shard.models.holder import held
from penstock.shard.models.mlp import MixtureOfExperts
from penstock.shard.models.shape import Unsupported
from penstock.tests.shard import tiny
from penstock.tests.shard.test_quantized import build_decoder
from penstock.tests.shard.test_weights import WEIGHTS, LoadingRank, assert_refused, assert_same_weights, change_config, load_decoder

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}
GPT_OSS_20B: dict[str, Any] = {  # fields of the hub's config.json
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": MXFP4,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
GPT_OSS_120B = GPT_OSS_20B | {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}


@pytest.mark.parametrize(("config", "total", "active"), [(GPT_OSS_20B, 20.91, 3.61), (GPT_OSS_120B, 116.83, 5.13)])
def test_total_and_active_parameters_match_the_paper(config: dict[str, Any], total: float, active: float) -> None:
    """Its table 1 counts the output matrix as active, but not the embedding table."""
    found = shape(config)
    assert round(found.parameters() / 1e9, 2) == total
    table = found.vocabulary * found.hidden
    assert (found.parameters(tokens=1) - table) / 1e9 == pytest.approx(active, abs=0.01)
    assert found.windows[:3] == (128, 0, 128)


def test_fields_missing_in_config_json_have_the_120b_models_values() -> None:
    omitted = ("num_local_experts", "num_experts_per_tok", "layer_types", "rope_scaling", "rope_theta", "swiglu_limit", "head_dim")
    assert shape({name: value for name, value in GPT_OSS_120B.items() if name not in omitted}) == shape(GPT_OSS_120B)


def test_other_swiglu_alpha_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"swiglu_alpha 1\.5"):
        shape(GPT_OSS_20B | {"swiglu_alpha": 1.5})


# MXFP4 experts


def fp4_value(code: int) -> float:
    """By the format's definition (E2M1): a sign, two bits of an exponent with bias 1, and one bit of a fraction."""
    exponent, fraction = code >> 1 & 3, code & 1
    size = fraction / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + fraction / 2)
    return -size if code & 8 else size


def dequantized_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """[experts, outputs, inputs], computed value by value."""
    values = [fp4_value(byte >> shift & 15) for byte in blocks.flatten().tolist() for shift in (0, 4)]
    factors = [2.0 ** (scale - 127) for scale in scales.flatten().tolist() for _ in range(32)]
    return (torch.tensor(values) * torch.tensor(factors)).view(*blocks.shape[:2], -1)


@pytest.fixture(scope="module")
def checkpoint_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An MXFP4 checkpoint, and one with the dequantized weights."""
    original = tiny.folder("gpt-oss-blocks")
    quantized, plain = (Path(shutil.copytree(original, tmp_path_factory.mktemp("gpt-oss") / name)) for name in ("few", "plain"))
    stored = safetensors.torch.load_file(original / WEIGHTS)
    packed, dequantized = dict(stored), dict(stored)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = stored[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 127, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = dequantized_blocks(blocks, scales)
        assert values.equal(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2))
        dequantized[name] = values.transpose(1, 2).contiguous()
    safetensors.torch.save_file(packed, quantized / WEIGHTS, {"format": "pt"})
    safetensors.torch.save_file(dequantized, plain / WEIGHTS, {"format": "pt"})
    change_config(quantized, quantization_config=MXFP4)
    return quantized, plain


def test_mxfp4_experts_load_as_their_dequantized_weights(checkpoint_pair: tuple[Path, Path]) -> None:
    quantized, plain = checkpoint_pair
    assert_same_weights(load_decoder(quantized), load_decoder(plain))


def test_ranks_are_cut_between_mxfp4_blocks(checkpoint_pair: tuple[Path, Path]) -> None:
    """Of three blocks the first of two ranks has two. The sum of both ranks' outputs is that of one rank, and planned bytes
    match."""
    single_rank, ranks = (
        build_decoder(checkpoint_pair[1]),
        [build_decoder(checkpoint_pair[0], LoadingRank(rank)) for rank in range(2)],
    )
    x = torch.randn(7, single_rank.shape.hidden)
    routed = route(torch.randn(7, 5), 2, True)
    for index in range(len(single_rank.layers)):
        expected, *found = (experts_of(model, index)(x, *routed) for model in (single_rank, *ranks))
        torch.testing.assert_close(sum(found), expected, atol=1e-4, rtol=1e-4)
        assert all(part.abs().max() > 0.1 for part in found)
    assert [weight.shape for weight in held(ranks[1].layers[0].mlp)][1:][::5] == [(128, 64), (64, 64)]
    for model in ranks:
        assert model.shape.weight_bytes(2, 4, "cpu", "float32", False) == pytest.approx(model.weight_bytes, rel=0.001)


def experts_of(model: Decoder, layer: int) -> Experts:
    mlp = model.layers[layer].mlp
    assert isinstance(mlp, MixtureOfExperts)
    return mlp.experts


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_quantize_option_rounds_unquantized_experts(kind: str) -> None:
    """As in checkpoints of gpt-oss in bfloat16; the plan counts these experts as quantized."""
    folder = tiny.folder("gpt-oss-blocks")
    found, plain = build_decoder(folder, quantized=kind), build_decoder(folder)
    for found_weight, plain_weight in zip(experts_of(found, 0).weights, experts_of(plain, 0).weights, strict=True):
        assert isinstance(found_weight, Weight)
        assert isinstance(plain_weight, Weight)
        rows, zeros = torch.eye(found_weight.shape[1]), torch.zeros(1, found_weight.shape[1])
        stored, bias = plain_weight(rows) - plain_weight(zeros), found_weight(zeros)
        expected = codes.dequantized(codes.quantize(stored.t().contiguous(), kind), torch.float32).t()
        torch.testing.assert_close(found_weight(rows) - bias, expected, atol=1e-3, rtol=0.02)
        assert (expected - stored).abs().max() > 1e-4
        assert (found_weight(rows) - bias - stored).abs().max() > 1e-4


def test_mxfp4_blocks_of_the_wrong_shape_are_refused(checkpoint_pair: tuple[Path, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint_pair[0], tmp_path / "model"))
    stored = safetensors.torch.load_file(copy / WEIGHTS)
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    safetensors.torch.save_file(stored | {name: stored[name][:, :, :2].contiguous()}, copy / WEIGHTS, {"format": "pt"})
    assert_refused(copy, "layers.1.mlp.experts.down_proj has blocks [5, 64, 2, 16]", "is it the model's own")


def test_checkpoint_fixture_has_the_mxfp4_config(checkpoint_pair: tuple[Path, Path]) -> None:
    """Guards the fixture above."""
    assert json.loads((checkpoint_pair[0] / "config.json").read_text())["quantization_config"] == MXFP4
