"""Writes quantized checkpoints in every supported format, packed as the formats' specifications say, and the dequantized weights in
float32 beside them.

Independent of the code that reads them: no line is shared with `shard/models/codes.py`.
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

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output each four bits of a 32-bit word belong to, the lowest bits first
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
)  # the ends of the names of tensors that are quantized


@dataclass
class GroupedCodes:
    """A weight [out, in] quantized in groups of inputs: (codes - zeros) * scales."""

    codes: Tensor  # [out, in] int64
    scales: Tensor  # [out, groups] float32, exact in float16
    zeros: Tensor  # [out, groups] int64

    def plain(self) -> Tensor:
        codes = self.codes.view(*self.scales.shape, -1)
        return ((codes - self.zeros[:, :, None]) * self.scales[:, :, None]).flatten(1)


def round_to_groups(weight: Tensor, bits: int, size: int, centered: bool) -> GroupedCodes:
    """Rounded to the nearest code. size: inputs of a group, 0 for all. centered: symmetric, all zero points are the middle code."""
    groups = weight.view(len(weight), -1, size or weight.shape[1])
    smallest, largest = groups.amin(2).clamp(max=-1e-3), groups.amax(2).clamp(min=1e-3)
    largest_code = 2**bits - 1
    if centered:
        scales = (torch.maximum(-smallest, largest) / (largest_code // 2)).half().float()
        zeros = torch.full_like(scales, 2 ** (bits - 1)).long()
    else:
        scales = ((largest - smallest) / (largest_code - 1)).half().float()
        zeros = (-smallest / scales).round().long().clamp(1, largest_code)
    codes = (groups / scales[:, :, None]).round().long() + zeros[:, :, None]
    return GroupedCodes(codes.clamp(0, largest_code).flatten(1), scales, zeros)


def pack_words(codes: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Codes [n, m] packed into 32-bit words: [n, m / codes in a word]. order: see AWQ_ORDER."""
    per_word = 32 // bits
    packed_words = np.zeros((len(codes), -(-codes.shape[1] // per_word)), np.uint32)
    for place, column in enumerate(codes.t().numpy().astype(np.uint32)):
        within = order.index(place % per_word) if order else place % per_word
        packed_words[:, place // per_word] |= column << np.uint32(bits * within)
    return torch.from_numpy(packed_words.view(np.int32))


@dataclass
class Format:
    """A quantization format: how a weight is packed, and the quantization_config of its config.json."""

    pack: Callable[
        ["Format", Tensor], tuple[dict[str, Tensor], Tensor]
    ]  # weight -> tensors by the ends of their names, and the dequantized weight
    config: dict[str, Any]
    bits: int = 4
    size: int = 0
    centered: bool = False
    more: dict[str, Any] = field(default_factory=dict)


def round_in_order(fmt: Format, weight: Tensor) -> tuple[GroupedCodes, Tensor]:
    """Rounded in groups of adjacent inputs or, with activation ordering, in a random order, which is the same for all weights with
    as many inputs; and the group of each input."""
    inputs = weight.shape[1]
    order = torch.arange(inputs)
    if fmt.more.get("ordered"):
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    found = round_to_groups(weight[:, order], fmt.bits, fmt.size, fmt.centered)
    groups = torch.empty(inputs, dtype=torch.int32)
    groups[order] = torch.arange(inputs, dtype=torch.int32) // (fmt.size or inputs)
    codes = torch.empty_like(found.codes)
    codes[:, order] = found.codes
    return GroupedCodes(codes, found.scales, found.zeros), groups


def dequantized_in_order(found: GroupedCodes, groups: Tensor) -> Tensor:
    return torch.stack(
        [
            (codes - zeros[groups]) * scales[groups]
            for codes, zeros, scales in zip(found.codes, found.zeros, found.scales, strict=True)
        ]
    )


def gptq(fmt: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    found, groups = round_in_order(fmt, weight)
    zero_offset = 0 if fmt.config.get("checkpoint_format") == "gptq_v2" else 1
    return {
        "qweight": pack_words(found.codes, fmt.bits).t().contiguous(),
        "qzeros": pack_words(found.zeros.t() - zero_offset, fmt.bits),
        "scales": found.scales.t().half().contiguous(),
        "g_idx": groups,
    }, dequantized_in_order(found, groups)


def awq(fmt: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    found = round_to_groups(weight, 4, fmt.size, fmt.centered)
    tensors = {"qweight": pack_words(found.codes.t(), 4, AWQ_ORDER), "scales": found.scales.t().half().contiguous()}
    if not fmt.centered:
        tensors["qzeros"] = pack_words(found.zeros.t(), 4, AWQ_ORDER)
    return tensors, found.plain()


def pack_quantized(fmt: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    found, groups = round_in_order(fmt, weight)
    tensors = {
        "weight_packed": pack_words(found.codes, fmt.bits),
        "weight_scale": found.scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not fmt.centered:
        tensors["weight_zero_point"] = pack_words(found.zeros.t(), fmt.bits).t().contiguous()
    if fmt.more.get("ordered"):
        tensors["weight_g_idx"] = groups
    return tensors, dequantized_in_order(found, groups)


def pack_quantized_with_int8_zeros(fmt: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """As older versions of compressed-tensors write zero points: signed bytes."""
    tensors, plain = pack_quantized(fmt, weight)
    tensors["weight_zero_point"] = (round_to_groups(weight, fmt.bits, fmt.size, centered=False).zeros - 2 ** (fmt.bits - 1)).to(
        torch.int8
    )
    return tensors, plain


def per_tensor(fmt: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """One scale and one zero point for the whole tensor; the zero point is a signed byte whatever the codes are."""
    found = round_to_groups(weight.reshape(1, -1), fmt.bits, 0, fmt.centered)
    tensors = {"weight_scale": found.scales.view(1).half()}
    if not fmt.centered:
        tensors["weight_zero_point"] = (found.zeros - 2 ** (fmt.bits - 1)).view(1).to(torch.int8)
    codes = found.codes.view(weight.shape)
    if fmt.more["packed"]:
        tensors |= {"weight_packed": pack_words(codes, fmt.bits), "weight_shape": torch.tensor(weight.shape)}
    else:
        tensors["weight"] = (codes - 128).to(torch.int8)
    return tensors, found.plain().view(weight.shape)


def int8(fmt: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    found = round_to_groups(weight, 8, fmt.size, fmt.centered)
    tensors = {"weight": (found.codes - 128).to(torch.int8), "weight_scale": found.scales.bfloat16()}
    found.scales = tensors["weight_scale"].float()
    if not fmt.centered:
        tensors["weight_zero_point"] = (found.zeros - 128).to(torch.int8)
    return tensors, found.plain()


def fp8(fmt: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """float8_e4m3fn in blocks of `more["block"]`, in which 0 means the whole dimension; the last blocks may be cut off."""
    outputs, inputs = weight.shape
    block_rows, block_columns = (given or whole for given, whole in zip(fmt.more["block"], weight.shape, strict=True))
    scales = torch.empty(math.ceil(outputs / block_rows), math.ceil(inputs / block_columns))
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    plain = torch.empty(weight.shape)
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            block = slice(row * block_rows, (row + 1) * block_rows), slice(column * block_columns, (column + 1) * block_columns)
            scales[row, column] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scales[row, column]).to(torch.float8_e4m3fn)
            plain[block] = codes[block].float() * scales[row, column]
    scale = scales.view(fmt.more["shape"]) if "shape" in fmt.more else scales
    return {"weight": codes, fmt.more["name"]: scale, "input_scale": torch.tensor(0.5)}, plain


FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # magnitudes of 4-bit floats (E2M1)


def fp4_codes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest 4-bit floats, two in a byte, the first in its lower half; and their values in float64."""
    indices = (numbers.abs().unsqueeze(2) - FP4_VALUES).abs().argmin(2)
    codes, found = (
        torch.where(numbers < 0, indices + 8, indices),
        torch.where(numbers < 0, -FP4_VALUES[indices], FP4_VALUES[indices]),
    )
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), found.double()


def nvfp4(fmt: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Each block of 16 inputs has an 8-bit float as its scale, and the matrix a global scale, by which values are multiplied, or
    divided where it is a `divisor`. Matrices without whole blocks stay unquantized, as in published checkpoints."""
    if weight.shape[1] % 16:
        return {"weight": weight}, weight
    global_scale = weight.abs().max() / (448 * 6)
    scales = (weight.view(len(weight), -1, 16).abs().amax(2).double() / 6 / global_scale.double()).to(torch.float8_e4m3fn)
    expanded_scales = scales.double().repeat_interleave(16, 1)
    codes, numbers = fp4_codes(weight / (expanded_scales * global_scale.double()))
    if not fmt.more["divisor"]:
        tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": global_scale, "input_scale": torch.tensor(0.5)}
        return tensors, (numbers * expanded_scales * global_scale.double()).float()
    divisor = 1 / global_scale.view(1)
    tensors = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": divisor, "input_global_scale": torch.ones(1)}
    return tensors, (numbers * expanded_scales / divisor.double()).float()


def mxfp4(fmt: Format, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Each block of 32 inputs has a power of 2 as its scale; matrices without whole blocks stay unquantized."""
    if weight.shape[1] % 32:
        return {"weight": weight}, weight
    exponents = weight.view(len(weight), -1, 32).abs().amax(2).double().log2().floor() - 2
    expanded_scales = 2 ** exponents.repeat_interleave(32, 1)
    codes, numbers = fp4_codes(weight / expanded_scales)
    return {"weight_packed": codes, "weight_scale": (exponents + 127).to(torch.uint8)}, (numbers * expanded_scales).float()


def compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


INT4_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 4, "symmetric": True}
INT4_PER_TENSOR = {"num_bits": 4, "type": "int", "strategy": "tensor", "symmetric": False}
INT8_CHANNELS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8_CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
FP4_BLOCKS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True, "dynamic": False}
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
    "packed": Format(pack_quantized, compressed("pack-quantized", INT4_GROUPS), size=4, centered=True),
    "packed-zeros": Format(pack_quantized, compressed("pack-quantized", INT4_GROUPS | {"symmetric": False}), size=4),
    "packed-ordered": Format(
        pack_quantized,
        compressed("pack-quantized", INT4_GROUPS | {"actorder": "group"}),
        size=4,
        centered=True,
        more={"ordered": True},
    ),
    "packed-8": Format(
        pack_quantized, compressed("pack-quantized", INT8_CHANNELS | {"group_size": None}), bits=8, size=0, centered=True
    ),
    "packed-bytes": Format(
        pack_quantized_with_int8_zeros, compressed("pack-quantized", INT4_GROUPS | {"symmetric": False}), size=4
    ),
    "packed-tensor": Format(per_tensor, compressed("pack-quantized", INT4_PER_TENSOR), more={"packed": True}),
    "packed-tensor-symmetric": Format(
        per_tensor, compressed("pack-quantized", INT4_PER_TENSOR | {"num_bits": 8}), bits=8, centered=True, more={"packed": True}
    ),
    "int8-tensor": Format(
        per_tensor, compressed("int-quantized", INT4_PER_TENSOR | {"num_bits": 8}), bits=8, more={"packed": False}
    ),
    "int8": Format(int8, compressed("int-quantized", INT8_CHANNELS), centered=True),
    "int8-zeros": Format(int8, compressed("int-quantized", INT8_CHANNELS | {"symmetric": False})),
    "float8": Format(fp8, compressed("float-quantized", FP8_CHANNELS), more={"name": "weight_scale", "block": (1, 0)}),
    "float8-tensor": Format(
        fp8,
        compressed("float-quantized", FP8_CHANNELS | {"strategy": "tensor"}),
        more={"name": "weight_scale", "block": (0, 0), "shape": (1,)},
    ),
    "float8-blocks": Format(
        fp8,
        compressed("float-quantized", FP8_CHANNELS | {"strategy": "block", "block_structure": [32, 16]}),
        more={"name": "weight_scale", "block": (32, 16)},
    ),
    "fp8": Format(
        fp8, {"quant_method": "fp8", "activation_scheme": "static"}, more={"name": "weight_scale", "block": (0, 0), "shape": ()}
    ),
    "fp8-blocks": Format(
        fp8,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]},
        more={"name": "weight_scale_inv", "block": (16, 16)},
    ),
    "modelopt": Format(
        fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}, more={"name": "weight_scale", "block": (0, 0), "shape": ()}
    ),
    "modelopt-nvfp4": Format(nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, more={"divisor": False}),
    "nvfp4": Format(nvfp4, compressed("nvfp4-pack-quantized", FP4_BLOCKS), more={"divisor": True}),
    "mxfp4": Format(mxfp4, compressed("mxfp4-pack-quantized", FP4_BLOCKS | {"strategy": "group", "group_size": 32})),
    "fbgemm": Format(fp8, {"quant_method": "fbgemm_fp8"}, more={"name": "weight_scale", "block": (1, 0)}),
}


def mixed_checkpoints(name: str, formats: dict[str, Format], target: Path) -> tuple[Path, Path]:
    """Likewise with matrices in several formats: each in the first one whose key is part of its name. config.json has today's
    fields."""
    all_formats = list(formats.values())
    layers = {f"model.layers.0.{part}": fmt.config for part, fmt in formats.items()}
    config: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    if all_formats[0].config["quant_method"] == "compressed-tensors":
        groups = [{**fmt.config["config_groups"]["group_0"], "format": fmt.config["format"]} for fmt in all_formats]
        config = compressed("mixed-precision", {}) | {"config_groups": {f"group_{i}": group for i, group in enumerate(groups)}}
    return _save_checkpoints(name, lambda key: next(fmt for part, fmt in formats.items() if part in key), config, target)


def checkpoints(name: str, form: str, target: Path) -> tuple[Path, Path]:
    """A tiny model's quantized checkpoint, and the same dequantized in float32."""
    return _save_checkpoints(name, lambda key: FORMATS[form], FORMATS[form].config, target)


def _save_checkpoints(name: str, format_of: Callable[[str], Format], config: dict[str, Any], target: Path) -> tuple[Path, Path]:
    quantized, plain = (Path(shutil.copytree(tiny.folder(name), target / kind)) for kind in ("packed", "plain"))
    plain_tensors = safetensors.torch.load_file(plain / "model.safetensors")
    quantized_tensors: dict[str, Tensor] = {}
    for key, weight in list(plain_tensors.items()):
        if not key.endswith(PROJECTIONS) or key.endswith("weights_proj.weight") or "visual." in key:
            quantized_tensors[key] = weight
            continue
        fmt = format_of(key)
        parts, plain_tensors[key] = fmt.pack(fmt, weight)
        quantized_tensors |= {f"{key.removesuffix('weight')}{suffix}": part.contiguous() for suffix, part in parts.items()}
    safetensors.torch.save_file(plain_tensors, plain / "model.safetensors", metadata={"format": "pt"})
    safetensors.torch.save_file(quantized_tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    config_json = json.loads((quantized / "config.json").read_text()) | {"quantization_config": config}
    (quantized / "config.json").write_text(json.dumps(config_json))
    return quantized, plain
