"""Random LoRA adapters as peft saves them, and tiny models into which they are merged."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from penstock.tests.shard import tiny

MATRICES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj"),
    *("out_proj", "input_linear", "output_linear", "w1", "w2", "w3"),
    *("in_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    *("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "b_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "shared_expert_gate"),
    *("linear_left", "linear_right", "per_layer_input_gate", "per_layer_projection", "kv_proj", "o_b_proj"),
)
WEIGHTS = "adapter_model.safetensors"


def adapter(model: Path, folder: Path, seed: int, rank: int = 4, **config: Any) -> Path:
    """An adapter that changes most matrices of a model."""
    folder.mkdir(parents=True)
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    stored = weights_of(model)
    found = {}
    for key, weight in stored.items():
        excluded = any(part in key for part in ("experts", "vision_tower", "visual.", "compressor"))
        if key.split(".")[-2] in MATRICES and weight.dim() == 2 and not excluded and chance.random() < 0.8:
            place = f"base_model.model.{key.removesuffix('.weight')}"
            outputs, inputs = weight.shape
            found[f"{place}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.6
            found[f"{place}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.3
    safetensors.torch.save_file(found, folder / WEIGHTS)
    config_fields = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "target_modules": list(MATRICES),
    } | config
    (folder / "adapter_config.json").write_text(json.dumps(config_fields))
    return folder


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, from one file or several."""
    files = [safetensors.torch.load_file(path) for path in model.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


def merged(model: Path, adapter: Path, target: Path, factor: float = 2.0) -> Path:
    """The model with the adapter merged into its weights. factor: the scale of the adapter's products, computed by hand."""
    target.mkdir()
    for path in model.glob("*.json"):
        shutil.copy(path, target)
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    stored = weights_of(model)
    changes = safetensors.torch.load_file(adapter / WEIGHTS)
    for key in changes:
        if ".lora_A." in key:
            name = key.removeprefix("base_model.model.").replace("lora_A.", "")
            stored[name] += factor * changes[key.replace("lora_A", "lora_B")] @ changes[key]
    safetensors.torch.save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    return target


def adapters_for(name: str, folder: Path, count: int = 2) -> tuple[tuple[tuple[str, str], ...], dict[str, Path]]:
    """Adapters of different ranks for a tiny model, as in a shard's settings, and the merged models by name; "" is the original."""
    model = tiny.folder(name)
    folders = {str(i): adapter(model, folder / f"adapter-{i}", i + 1, rank=3 + 4 * i) for i in range(count)}
    models = {key: merged(model, place, folder / f"merged-{key}") for key, place in folders.items()}
    return tuple((key, str(place)) for key, place in folders.items()), {"": model} | models
