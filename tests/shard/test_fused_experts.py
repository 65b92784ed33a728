"""Experts that are all in one tensor, as transformers 5 saves them where it isn't asked for the original format."""

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

Saved = Callable[[str], Path]
# Every family whose experts are apart in the original format, or together under other names. Their names for them, and for what is
# added to scores, differ.
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
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    @functools.cache
    def save(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        tiny.reference(name).save_pretrained(folder, save_original_format=False)
        return folder

    return save


def part(folder: Path, rank: Ranks, quantize: str = "") -> Decoder:
    model = shape(json.loads((folder / "config.json").read_text())).quantized(quantize)
    return Decoder(model, Weights(folder, torch.float32, tiny.CPU, lambda read: None), rank, tiny.CPU)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_transformers(name: str, saved: Saved) -> None:
    """By its logits on one rank; and on each of two ranks all weights are those of the original format."""
    assert any(
        key.endswith((".experts.gate_up_proj", ".experts.up_proj")) for key in safetensors.torch.load_file(saved(name) / WEIGHTS)
    )
    tokens = prompt(3, 40)
    model = load_decoder(saved(name))
    torch.testing.assert_close(logits(model, tokens), tiny.expected_logits(name, tokens), rtol=0, atol=1e-4)
    assert_same_weights(model, tiny.decoder(name))
    for rank in range(2):
        assert_same_weights(part(saved(name), LoadingRank(rank)), part(tiny.folder(name), LoadingRank(rank)))


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_they_are_rounded_as_others_are(kind: str, saved: Saved) -> None:
    assert_same_weights(load_decoder(saved("mixtral"), quantize=kind), load_decoder(tiny.folder("mixtral"), quantize=kind))
    assert_same_weights(part(saved("mixtral"), LoadingRank(1), kind), part(tiny.folder("mixtral"), LoadingRank(1), kind))


def spoiled(folder: Path, target: Path, **changes: Tensor) -> Path:
    """The same with other tensors, or more."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    stored = safetensors.torch.load_file(target / WEIGHTS)
    safetensors.torch.save_file(stored | changes, target / WEIGHTS)
    return target


def test_another_number_of_experts(saved: Saved, tmp_path: Path) -> None:
    folder = spoiled(saved("qwen3-moe"), tmp_path, **{TENSOR: torch.zeros(8, 40, 64)})
    assert_refused(folder, f"tensor {TENSOR} is [8, 40, 64], config.json says [9, 40, 64]")


@pytest.mark.parametrize("end", ["_scale_inv", "_scale", "_blocks", "_weight_scale"])
def test_experts_of_few_bits(end: str, saved: Saved, tmp_path: Path) -> None:
    folder = spoiled(saved("qwen3-moe"), tmp_path, **{f"{TENSOR}{end}": torch.ones(9, 1, 1)})
    assert_refused(folder, f"{TENSOR}{end} says that experts", "in one tensor", "save_original_format=True")


def few_bits(target: Path, block: tuple[int, int], told: list[int] | None) -> tuple[Path, Path]:
    """Mistral Small 4 with experts of fp8, and the same in float32."""
    few, plain = (Path(shutil.copytree(tiny.folder("mistral4"), target / kind)) for kind in ("few", "plain"))
    stored = safetensors.torch.load_file(plain / WEIGHTS)
    how = replace(packing.FORMATS["fp8-blocks"], more={"name": "scale", "block": block})
    packed: dict[str, Tensor] = {}
    for name in [name for name in stored if ".mlp.experts." in name]:
        found = [packing.fp8(how, one) for one in stored[name]]
        packed[name] = torch.stack([parts["weight"] for parts, _ in found])
        packed[f"{name}_scale_inv"] = torch.stack([parts["scale"] for parts, _ in found])
        packed[f"{name}_activation_scale"] = torch.ones(len(found))
        stored[name] = torch.stack([one for _, one in found])
    safetensors.torch.save_file(stored | packed, few / WEIGHTS)
    safetensors.torch.save_file(stored, plain / WEIGHTS)
    config = json.loads((few / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": told}
    (few / "config.json").write_text(json.dumps(config))
    return few, plain


@pytest.mark.parametrize(("block", "told"), [((0, 0), None), ((16, 16), [16, 16])])
def test_floats_of_eight_bits(block: tuple[int, int], told: list[int] | None, tmp_path: Path) -> None:
    """As Mistral's own folder has them, of each expert one scale; or in blocks."""
    few, plain = few_bits(tmp_path, block, told)
    assert_same_weights(load_decoder(few), load_decoder(plain))
    for rank in range(2):
        assert_same_weights(part(few, LoadingRank(rank)), part(plain, LoadingRank(rank)))


def test_floats_of_another_model(tmp_path: Path) -> None:
    few, _ = few_bits(tmp_path, (0, 0), None)
    name = "model.layers.1.mlp.experts.down_proj_scale_inv"
    assert_refused(spoiled(few, tmp_path / "fewer", **{name: torch.ones(7, 1, 1)}), "scales [7, 1, 1]", "different models")
    assert_refused(spoiled(few, tmp_path / "more", **{name: torch.ones(8, 1, 13)}), "13 scales for 24 numbers")
