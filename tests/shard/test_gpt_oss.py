"""gpt-oss: its sizes, and its experts of 4 bits, which mean the numbers that the format's own words say."""

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
from penstock.shard.models.mlp import MixtureOfExperts
from penstock.shard.models.shape import Unsupported
from penstock.tests.shard import tiny
from penstock.tests.shard.test_quantized import build_decoder
from penstock.tests.shard.test_weights import WEIGHTS, LoadingRank, assert_refused, assert_same_weights, change_config, load_decoder

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}
SMALLER: dict[str, Any] = {  # as the hub has it
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
LARGER = SMALLER | {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": ["sliding_attention", "full_attention"] * 18}


@pytest.mark.parametrize(("config", "all_", "active"), [(SMALLER, 20.91, 3.61), (LARGER, 116.83, 5.13)])
def test_parameters_are_those_of_the_paper(config: dict[str, Any], all_: float, active: float) -> None:
    """Table 1 there, which counts the output matrix among the active ones, and not the embedding table."""
    found = shape(config)
    assert round(found.parameters() / 1e9, 2) == all_
    table = found.vocabulary * found.hidden
    assert (found.parameters(tokens=1) - table) / 1e9 == pytest.approx(active, abs=0.01)
    assert found.windows[:3] == (128, 0, 128)


def test_what_is_left_out_is_as_in_the_paper() -> None:
    left_out = ("num_local_experts", "num_experts_per_tok", "layer_types", "rope_scaling", "rope_theta", "swiglu_limit", "head_dim")
    assert shape({name: value for name, value in LARGER.items() if name not in left_out}) == shape(LARGER)


def test_another_steepness_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"swiglu_alpha 1\.5"):
        shape(SMALLER | {"swiglu_alpha": 1.5})


# Experts of 4 bits


def number(code: int) -> float:
    """By the format's definition: a sign, two bits of an exponent of bias 1, one bit of a fraction."""
    exponent, fraction = code >> 1 & 3, code & 1
    size = fraction / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + fraction / 2)
    return -size if code & 8 else size


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """[experts, outputs, inputs], a number at a time."""
    values = [number(byte >> shift & 15) for byte in blocks.flatten().tolist() for shift in (0, 4)]
    factors = [2.0 ** (scale - 127) for scale in scales.flatten().tolist() for _ in range(32)]
    return (torch.tensor(values) * torch.tensor(factors)).view(*blocks.shape[:2], -1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint of 4 bits, and one of the same numbers."""
    made_of = tiny.folder("gpt-oss-blocks")
    few, plain = (Path(shutil.copytree(made_of, tmp_path_factory.mktemp("gpt-oss") / name)) for name in ("few", "plain"))
    held = safetensors.torch.load_file(made_of / WEIGHTS)
    packed, numbers = dict(held), dict(held)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in held if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = held[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 127, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = unpacked(blocks, scales)
        assert values.equal(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2))
        numbers[name] = values.transpose(1, 2).contiguous()
    safetensors.torch.save_file(packed, few / WEIGHTS, {"format": "pt"})
    safetensors.torch.save_file(numbers, plain / WEIGHTS, {"format": "pt"})
    change_config(few, quantization_config=MXFP4)
    return few, plain


def test_experts_of_4_bits_are_their_numbers(pair: tuple[Path, Path]) -> None:
    few, plain = pair
    assert_same_weights(load_decoder(few), load_decoder(plain))


def test_ranks_have_whole_blocks(pair: tuple[Path, Path]) -> None:
    """Of three the first of two ranks has two. Together they make what one makes alone; and the plan knows what they hold."""
    whole, ranks = build_decoder(pair[1]), [build_decoder(pair[0], LoadingRank(rank)) for rank in range(2)]
    x = torch.randn(7, whole.shape.hidden)
    routed = route(torch.randn(7, 5), 2, True)
    for index in range(len(whole.layers)):
        expected, *found = (experts_of(model, index)(x, *routed) for model in (whole, *ranks))
        torch.testing.assert_close(sum(found), expected, atol=1e-4, rtol=1e-4)
        assert all(part.abs().max() > 0.1 for part in found)
    assert [weight.shape for weight in ranks[1].layers[0].mlp.weights()][1:][::5] == [(128, 64), (64, 64)]
    for model in ranks:
        assert model.shape.weight_bytes(2, 4, "cpu", "float32", False) == pytest.approx(model.weight_bytes, rel=0.001)


def experts_of(model: Decoder, layer: int) -> Experts:
    mlp = model.layers[layer].mlp
    assert isinstance(mlp, MixtureOfExperts)
    return mlp.experts


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_quantize_rounds_experts_that_are_stored_as_they_are(kind: str) -> None:
    """A checkpoint of gpt-oss in bfloat16, as there are; the plan counts them so."""
    folder = tiny.folder("gpt-oss-blocks")
    found, plain = build_decoder(folder, quantized=kind), build_decoder(folder)
    for one, other in zip(experts_of(found, 0).weights, experts_of(plain, 0).weights, strict=True):
        assert isinstance(one, Weight)
        assert isinstance(other, Weight)
        rows, none = torch.eye(one.shape[1]), torch.zeros(1, one.shape[1])
        stored, bias = other(rows) - other(none), one(none)
        expected = codes.dequantized(codes.quantize(stored.t().contiguous(), kind), torch.float32).t()
        torch.testing.assert_close(one(rows) - bias, expected, atol=1e-3, rtol=0.02)
        assert (expected - stored).abs().max() > 1e-4
        assert (one(rows) - bias - stored).abs().max() > 1e-4


def test_blocks_of_another_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(pair[0], tmp_path / "model"))
    held = safetensors.torch.load_file(copy / WEIGHTS)
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    safetensors.torch.save_file(held | {name: held[name][:, :, :2].contiguous()}, copy / WEIGHTS, {"format": "pt"})
    assert_refused(copy, "layers.1.mlp.experts.down_proj has blocks [5, 64, 2, 16]", "they belong to different models")


def test_the_config_of_a_folder_is_read(pair: tuple[Path, Path]) -> None:
    """The fixture's is what it says."""
    assert json.loads((pair[0] / "config.json").read_text())["quantization_config"] == MXFP4
