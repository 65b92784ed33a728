"""Checkpoints with all experts in one fused tensor, as transformers 5 saves them without save_original_format."""

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from penstock.shard.models.decoder import Decoder
from penstock.shard.models.families import shape
from penstock.shard.parallel import Ranks
from penstock.shard.weights import Weights
from penstock.tests.shard import packing, tiny
from penstock.tests.shard.test_against_transformers import prompt
from penstock.tests.shard.test_quantized import logits
from penstock.tests.shard.test_weights import WEIGHTS, LoadingRank, assert_refused, assert_same_weights, load_decoder

SaveModel = Callable[[str], Path]
# Every family whose experts are separate in the original format, or fused under other names. Their names for experts, and for the
# router's bias, differ.
NAMES = [
    "mixtral",
    "qwen3-moe",
    "qwen2-moe",
    "olmoe",
    "glm4-moe",
    "dots1",
    "ernie-moe",
    "minimax-m2",
    "exaone-moe",
    "granite-4-h-moe",
    "hy-4",
    "ax-k2",
    "lfm2-moe",
    "longcat",
    "nemotron-h-moe",
]
TENSOR = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def saved_fused(tmp_path_factory: pytest.TempPathFactory) -> SaveModel:
    @functools.cache
    def save(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        tiny.reference(name).save_pretrained(folder, save_original_format=False)
        return folder

    return save


def decoder_of_rank(folder: Path, rank: Ranks, quantize: str = "") -> Decoder:
    model = shape(json.loads((folder / "config.json").read_text())).quantized(quantize)
    return Decoder(model, Weights(folder, torch.float32, tiny.CPU, lambda read: None), rank, tiny.CPU)


@pytest.mark.parametrize("name", NAMES)
def test_fused_experts_equal_transformers_and_the_original_format(name: str, saved_fused: SaveModel) -> None:
    """Logits on one rank equal transformers'; on each of two ranks all weights equal those of the original format."""
    assert any(
        key.endswith((".experts.gate_up_proj", ".experts.up_proj"))
        for key in safetensors.torch.load_file(saved_fused(name) / WEIGHTS)
    )
    tokens = prompt(3, 40)
    model = load_decoder(saved_fused(name))
    torch.testing.assert_close(logits(model, tokens), tiny.expected_logits(name, tokens), rtol=0, atol=1e-4)
    assert_same_weights(model, tiny.decoder(name))
    for rank in range(2):
        assert_same_weights(
            decoder_of_rank(saved_fused(name), LoadingRank(rank)), decoder_of_rank(tiny.folder(name), LoadingRank(rank))
        )


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_fused_experts_are_quantized_like_separate_ones(kind: str, saved_fused: SaveModel) -> None:
    assert_same_weights(load_decoder(saved_fused("mixtral"), quantize=kind), load_decoder(tiny.folder("mixtral"), quantize=kind))
    assert_same_weights(
        decoder_of_rank(saved_fused("mixtral"), LoadingRank(1), kind), decoder_of_rank(tiny.folder("mixtral"), LoadingRank(1), kind)
    )


def changed_checkpoint(folder: Path, target: Path, **changes: Tensor) -> Path:
    """A copy of the checkpoint with changed or further tensors."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    stored = safetensors.torch.load_file(target / WEIGHTS)
    safetensors.torch.save_file(stored | changes, target / WEIGHTS)
    return target


def test_fused_tensor_with_another_number_of_experts_is_refused(saved_fused: SaveModel, tmp_path: Path) -> None:
    folder = changed_checkpoint(saved_fused("qwen3-moe"), tmp_path, **{TENSOR: torch.zeros(8, 40, 64)})
    assert_refused(folder, f"tensor {TENSOR} is [8, 40, 64], config.json says [9, 40, 64]")


@pytest.mark.parametrize("end", ["_scale_inv", "_scale", "_blocks", "_weight_scale"])
def test_fused_experts_with_unsupported_scales_are_refused(end: str, saved_fused: SaveModel, tmp_path: Path) -> None:
    folder = changed_checkpoint(saved_fused("qwen3-moe"), tmp_path, **{f"{TENSOR}{end}": torch.ones(9, 1, 1)})
    assert_refused(folder, f"{TENSOR}{end} says that experts", "in one tensor", "save_original_format=True")


def fp8_checkpoints(target: Path, block: tuple[int, int], block_in_config: list[int] | None) -> tuple[Path, Path]:
    """Mistral Small 4 with fp8 experts, and the same weights in float32."""
    quantized, plain = (Path(shutil.copytree(tiny.folder("mistral4"), target / kind)) for kind in ("few", "plain"))
    stored = safetensors.torch.load_file(plain / WEIGHTS)
    format = replace(packing.FORMATS["fp8-blocks"], more={"name": "scale", "block": block})
    packed: dict[str, Tensor] = {}
    for name in [name for name in stored if ".mlp.experts." in name]:
        found = [packing.fp8(format, one) for one in stored[name]]
        packed[name] = torch.stack([parts["weight"] for parts, _ in found])
        packed[f"{name}_scale_inv"] = torch.stack([parts["scale"] for parts, _ in found])
        packed[f"{name}_activation_scale"] = torch.ones(len(found))
        stored[name] = torch.stack([one for _, one in found])
    safetensors.torch.save_file(stored | packed, quantized / WEIGHTS)
    safetensors.torch.save_file(stored, plain / WEIGHTS)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": block_in_config}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, plain


@pytest.mark.parametrize(("block", "block_in_config"), [((0, 0), None), ((16, 16), [16, 16])])
def test_fused_fp8_experts_equal_their_float32_values(
    block: tuple[int, int], block_in_config: list[int] | None, tmp_path: Path
) -> None:
    """With one scale for each expert, as in Mistral's own checkpoint, or with scales of blocks."""
    quantized, plain = fp8_checkpoints(tmp_path, block, block_in_config)
    assert_same_weights(load_decoder(quantized), load_decoder(plain))
    for rank in range(2):
        assert_same_weights(decoder_of_rank(quantized, LoadingRank(rank)), decoder_of_rank(plain, LoadingRank(rank)))


def test_fused_fp8_experts_with_mismatched_scales_are_refused(tmp_path: Path) -> None:
    quantized, _ = fp8_checkpoints(tmp_path, (0, 0), None)
    name = "model.layers.1.mlp.experts.down_proj_scale_inv"
    assert_refused(
        changed_checkpoint(quantized, tmp_path / "fewer", **{name: torch.ones(7, 1, 1)}), "scales [7, 1, 1]", "different models"
    )
    assert_refused(changed_checkpoint(quantized, tmp_path / "more", **{name: torch.ones(8, 1, 13)}), "13 scales for 24 numbers")
