"""Checkpoints of few bits, packed place by place as their formats say, and the same weights in float32.

Independent of what reads them: no line is shared with `shard/models/codes.py`.
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from penstock.tests.shard import tiny

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each four bits of a word, the lowest first
PROJECTIONS = (
    "proj.weight",
    ".w1.weight",
    ".w2.weight",
    ".w3.weight",
    ".wk.weight",
    ".wq_b.weight",
    ".in_proj_qkvz.weight",
    ".in_proj_qkv.weight",
    ".in_proj_z.weight",
    ".per_layer_input_gate.weight",
    ".per_layer_projection.weight",
    ".per_layer_model_projection.weight",
    "shared_mlp.input_linear.weight",
    "shared_mlp.output_linear.weight",
)  # the ends of the names of what is packed


@dataclass
class Rounded:
    """A weight [out, in] in groups of inputs: (codes - zeros) * scales."""

    codes: Tensor  # [out, in] int64
    scales: Tensor  # [out, groups] float32 that float16 holds exactly
    zeros: Tensor  # [out, groups] int64

    def plain(self) -> Tensor:
        codes = self.codes.view(*self.scales.shape, -1)
        return ((codes - self.zeros[:, :, None]) * self.scales[:, :, None]).flatten(1)


def rounded(weight: Tensor, bits: int, size: int, centered: bool) -> Rounded:
    """To the nearest; size: inputs of a group, 0 all. centered: zeros are all in the middle."""
    groups = weight.view(len(weight), -1, size or weight.shape[1])
    least, greatest = groups.amin(2).clamp(max=-1e-3), groups.amax(2).clamp(min=1e-3)
    top = 2**bits - 1
    if centered:
        scales = (torch.maximum(-least, greatest) / (top // 2)).half().float()
        zeros = torch.full_like(scales, 2 ** (bits - 1)).long()
    else:
        scales = ((greatest - least) / (top - 1)).half().float()
        zeros = (-least / scales).round().long().clamp(1, top)
    codes = (groups / scales[:, :, None]).round().long() + zeros[:, :, None]
    return Rounded(codes.clamp(0, top).flatten(1), scales, zeros)


def words(numbers: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Some numbers of each row, [n, m], in words of 32 bits: [n, m / numbers in a word]. order: see AWQ_ORDER."""
    each = 32 // bits
    found = np.zeros((len(numbers), -(-numbers.shape[1] // each)), np.uint32)
    for place, column in enumerate(numbers.t().numpy().astype(np.uint32)):
        within = order.index(place % each) if order else place % each
        found[:, place // each] |= column << np.uint32(bits * within)
    return torch.from_numpy(found.view(np.int32))


@dataclass
class Format:
    """How checkpoints are packed, and what their config.json says."""

    pack: Callable[["Format", Tensor], tuple[dict[str, Tensor], Tensor]]  # a weight: tensors by the ends of their names; and plain
    config: dict[str, Any]
    bits: int = 4
    size: int = 0
    centered: bool = False
    more: dict[str, Any] = field(default_factory=dict)


def in_order(how: Format, weight: Tensor) -> tuple[Rounded, Tensor]:
    """What shares a scale is side by side, or in some order, the same for all with so many inputs. And the group of each input."""
    inputs = weight.shape[1]
    order = torch.arange(inputs)
    if how.more.get("ordered"):
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    found = rounded(weight[:, order], how.bits, how.size, how.centered)
    groups = torch.empty(inputs, dtype=torch.int32)
    groups[order] = torch.arange(inputs, dtype=torch.int32) // (how.size or inputs)
    codes = torch.empty_like(found.codes)
    codes[:, order] = found.codes
    return Rounded(codes, found.scales, found.zeros), groups


def plain_of(found: Rounded, groups: Tensor) -> Tensor:
    return torch.stack(
        [
            (codes - zeros[groups]) * scales[groups]
            for codes, zeros, scales in zip(found.codes, found.zeros, found.scales, strict=True)
        ]
    )


def gptq(how: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    found, groups = in_order(how, weight)
    less = 0 if how.config.get("checkpoint_format") == "gptq_v2" else 1
    return {
        "qweight": words(found.codes, how.bits).t().contiguous(),
        "qzeros": words(found.zeros.t() - less, how.bits),
        "scales": found.scales.t().half().contiguous(),
        "g_idx": groups,
    }, plain_of(found, groups)


def awq(how: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    found = rounded(weight, 4, how.size, how.centered)
    tensors = {"qweight": words(found.codes.t(), 4, AWQ_ORDER), "scales": found.scales.t().half().contiguous()}
    if not how.centered:
        tensors["qzeros"] = words(found.zeros.t(), 4, AWQ_ORDER)
    return tensors, found.plain()


def packed(how: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    found, groups = in_order(how, weight)
    tensors = {
        "weight_packed": words(found.codes, how.bits),
        "weight_scale": found.scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not how.centered:
        tensors["weight_zero_point"] = words(found.zeros.t(), how.bits).t().contiguous()
    if how.more.get("ordered"):
        tensors["weight_g_idx"] = groups
    return tensors, plain_of(found, groups)


def zeros_in_bytes(how: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """As older versions write them: signed."""
    tensors, plain = packed(how, weight)
    tensors["weight_zero_point"] = (rounded(weight, how.bits, how.size, centered=False).zeros - 2 ** (how.bits - 1)).to(torch.int8)
    return tensors, plain


def one_for_all(how: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """One scale and one zero, which is a signed byte whatever codes are."""
    found = rounded(weight.reshape(1, -1), how.bits, 0, how.centered)
    tensors = {"weight_scale": found.scales.view(1).half()}
    if not how.centered:
        tensors["weight_zero_point"] = (found.zeros - 2 ** (how.bits - 1)).view(1).to(torch.int8)
    codes = found.codes.view(weight.shape)
    if how.more["packed"]:
        tensors |= {"weight_packed": words(codes, how.bits), "weight_shape": torch.tensor(weight.shape)}
    else:
        tensors["weight"] = (codes - 128).to(torch.int8)
    return tensors, found.plain().view(weight.shape)


def bytes_of(how: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    found = rounded(weight, 8, how.size, how.centered)
    tensors = {"weight": (found.codes - 128).to(torch.int8), "weight_scale": found.scales.bfloat16()}
    found.scales = tensors["weight_scale"].float()
    if not how.centered:
        tensors["weight_zero_point"] = (found.zeros - 128).to(torch.int8)
    return tensors, found.plain()


def floats(how: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """In blocks of `more["block"]`, where all of a dimension is 0; the last of them may be cut off."""
    outputs, inputs = weight.shape
    high, wide = (given or whole for given, whole in zip(how.more["block"], weight.shape, strict=True))
    scales = torch.empty(math.ceil(outputs / high), math.ceil(inputs / wide))
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    plain = torch.empty(weight.shape)
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            place = slice(row * high, (row + 1) * high), slice(column * wide, (column + 1) * wide)
            scales[row, column] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
            plain[place] = codes[place].float() * scales[row, column]
    scale = scales.view(how.more["shape"]) if "shape" in how.more else scales
    return {"weight": codes, how.more["name"]: scale, "input_scale": torch.tensor(0.5)}, plain


SIZES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of floats of 4 bits


def halves(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest floats of 4 bits, two in a byte, the first in its lower half; and as numbers, float64."""
    places = (numbers.abs().unsqueeze(2) - SIZES).abs().argmin(2)
    codes, found = torch.where(numbers < 0, places + 8, places), torch.where(numbers < 0, -SIZES[places], SIZES[places])
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), found.double()


def nvfp4(how: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Each block has a float of 8 bits, and the matrix a number that is multiplied by, or divided by where it is a `divisor`. What
    has no whole blocks is left out, as those who write such checkpoints leave it out."""
    if weight.shape[1] % 16:
        return {"weight": weight}, weight
    factor = weight.abs().max() / (448 * 6)
    scales = (weight.view(len(weight), -1, 16).abs().amax(2).double() / 6 / factor.double()).to(torch.float8_e4m3fn)
    wide = scales.double().repeat_interleave(16, 1)
    codes, numbers = halves(weight / (wide * factor.double()))
    if not how.more["divisor"]:
        tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": factor, "input_scale": torch.tensor(0.5)}
        return tensors, (numbers * wide * factor.double()).float()
    divisor = 1 / factor.view(1)
    tensors = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": divisor, "input_global_scale": torch.ones(1)}
    return tensors, (numbers * wide / divisor.double()).float()


def mxfp4(how: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Each block has an exponent of 2; likewise."""
    if weight.shape[1] % 32:
        return {"weight": weight}, weight
    exponents = weight.view(len(weight), -1, 32).abs().amax(2).double().log2().floor() - 2
    wide = 2 ** exponents.repeat_interleave(32, 1)
    codes, numbers = halves(weight / wide)
    return {"weight_packed": codes, "weight_scale": (exponents + 127).to(torch.uint8)}, (numbers * wide).float()


def compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


INTEGERS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 4, "symmetric": True}
TENSOR = {"num_bits": 4, "type": "int", "strategy": "tensor", "symmetric": False}
BYTES = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
TINY = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True, "dynamic": False}
FORMATS = {
    "gptq": Format(gptq, {"quant_method": "gptq", "bits": 4, "group_size": 4, "desc_act": False}, size=4),
    "gptq-ordered": Format(
        gptq, {"quant_method": "gptq", "bits": 4, "group_size": 4, "desc_act": True}, size=4, more={"ordered": True}
    ),
    "gptq-symmetric": Format(
        gptq, {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq"}, centered=True
    ),
    "gptq-v2": Format(gptq, {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"}, bits=8),
    "awq": Format(awq, {"quant_method": "awq", "bits": 4, "group_size": 4, "version": "gemm", "zero_point": True}, size=4),
    "awq-symmetric": Format(
        awq, {"quant_method": "awq", "bits": 4, "group_size": 4, "version": "GEMM", "zero_point": False}, size=4, centered=True
    ),
    "packed": Format(packed, compressed("pack-quantized", INTEGERS), size=4, centered=True),
    "packed-zeros": Format(packed, compressed("pack-quantized", INTEGERS | {"symmetric": False}), size=4),
    "packed-ordered": Format(
        packed, compressed("pack-quantized", INTEGERS | {"actorder": "group"}), size=4, centered=True, more={"ordered": True}
    ),
    "packed-8": Format(packed, compressed("pack-quantized", BYTES | {"group_size": None}), bits=8, size=0, centered=True),
    "packed-bytes": Format(zeros_in_bytes, compressed("pack-quantized", INTEGERS | {"symmetric": False}), size=4),
    "packed-tensor": Format(one_for_all, compressed("pack-quantized", TENSOR), more={"packed": True}),
    "packed-tensor-symmetric": Format(
        one_for_all, compressed("pack-quantized", TENSOR | {"num_bits": 8}), bits=8, centered=True, more={"packed": True}
    ),
    "int8-tensor": Format(one_for_all, compressed("int-quantized", TENSOR | {"num_bits": 8}), bits=8, more={"packed": False}),
    "int8": Format(bytes_of, compressed("int-quantized", BYTES), centered=True),
    "int8-zeros": Format(bytes_of, compressed("int-quantized", BYTES | {"symmetric": False})),
    "float8": Format(floats, compressed("float-quantized", FLOATS), more={"name": "weight_scale", "block": (1, 0)}),
    "float8-tensor": Format(
        floats,
        compressed("float-quantized", FLOATS | {"strategy": "tensor"}),
        more={"name": "weight_scale", "block": (0, 0), "shape": (1,)},
    ),
    "float8-blocks": Format(
        floats,
        compressed("float-quantized", FLOATS | {"strategy": "block", "block_structure": [32, 16]}),
        more={"name": "weight_scale", "block": (32, 16)},
    ),
    "fp8": Format(
        floats, {"quant_method": "fp8", "activation_scheme": "static"}, more={"name": "weight_scale", "block": (0, 0), "shape": ()}
    ),
    "fp8-blocks": Format(
        floats,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]},
        more={"name": "weight_scale_inv", "block": (16, 16)},
    ),
    "modelopt": Format(
        floats, {"quant_method": "modelopt", "quant_algo": "FP8"}, more={"name": "weight_scale", "block": (0, 0), "shape": ()}
    ),
    "modelopt-nvfp4": Format(nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, more={"divisor": False}),
    "nvfp4": Format(nvfp4, compressed("nvfp4-pack-quantized", TINY), more={"divisor": True}),
    "mxfp4": Format(mxfp4, compressed("mxfp4-pack-quantized", TINY | {"strategy": "group", "group_size": 32})),
    "fbgemm": Format(floats, {"quant_method": "fbgemm_fp8"}, more={"name": "weight_scale", "block": (1, 0)}),
}


def mixed(name: str, ways: dict[str, Format], target: Path) -> tuple[Path, Path]:
    """The same with matrices in several ways, by what is in their names: the first that fits. As config.json of today says it."""
    hows = list(ways.values())
    layers = {f"model.layers.0.{part}": how.config for part, how in ways.items()}
    config: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    if hows[0].config["quant_method"] == "compressed-tensors":
        groups = [{**how.config["config_groups"]["group_0"], "format": how.config["format"]} for how in hows]
        config = compressed("mixed-precision", {}) | {"config_groups": {f"group_{i}": group for i, group in enumerate(groups)}}
    return _checkpoints(name, lambda key: next(how for part, how in ways.items() if part in key), config, target)


def checkpoints(name: str, form: str, target: Path) -> tuple[Path, Path]:
    """A tiny model with its matrices packed, and the same in float32."""
    return _checkpoints(name, lambda key: FORMATS[form], FORMATS[form].config, target)


def _checkpoints(name: str, way: Callable[[str], Format], config: dict[str, Any], target: Path) -> tuple[Path, Path]:
    few, plain = (Path(shutil.copytree(tiny.folder(name), target / kind)) for kind in ("packed", "plain"))
    stored = safetensors.torch.load_file(plain / "model.safetensors")
    kept: dict[str, Tensor] = {}
    for key, weight in list(stored.items()):
        if not key.endswith(PROJECTIONS) or key.endswith("weights_proj.weight") or "visual." in key:
            kept[key] = weight
            continue
        how = way(key)
        parts, stored[key] = how.pack(how, weight)
        kept |= {f"{key.removesuffix('weight')}{end}": part.contiguous() for end, part in parts.items()}
    safetensors.torch.save_file(stored, plain / "model.safetensors", metadata={"format": "pt"})
    safetensors.torch.save_file(kept, few / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((few / "config.json").read_text()) | {"quantization_config": config}
    (few / "config.json").write_text(json.dumps(whole))
    return few, plain
