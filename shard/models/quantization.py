"""Reads from config.json, or a file beside it, how weights are quantized. Holds no tensor and imports no torch, so that the
launcher can plan with it.

Which matrices are quantized is seen in the checkpoint, by the tensors that it has: lists of exceptions are not read.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from .fields import AGAIN, Config, shown
from .shape import Unsupported
from .traits import Quantization

REMEDY = "use the model's unquantized weights, and --quantize if they are too large"
KINDS = {4: "int4", 8: "int8"}
# Names of methods: those of --quantize, and those in config.json.
FP8 = ("fp8", "fbgemm_fp8")
PACKED, PLAIN = ("pack-quantized",), ("float-quantized", "int-quantized", "naive-quantized")
FP4 = {"nvfp4-pack-quantized": ("nvfp4", 16), "mxfp4-pack-quantized": ("fp4", 32)}  # kinds, and inputs that share a scale
MODELOPT = ("modelopt", "modelopt_fp4")
# Those with NVFP4 differ only in the quantization of activations.
ALGORITHMS = {"FP8": ("fp8", 0)} | dict.fromkeys(("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"), ("nvfp4", 16))
MIXED = "MIXED_PRECISION"
MLX_FIELDS = ("bits", "group_size", "mode")
MANY = 1 << 14  # inputs of a matrix by which formats are compared
# Files beside config.json that have the quantization where it has none, and the method that they imply.
FILES = {"hf_quant_config.json": "modelopt", "quant_config.json": "awq"}
OLD_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}  # of AWQ's fields


def beside(config: Config, folder: Path) -> Config:
    """The config with the quantization_config of a separate file. Raises Unsupported if that is broken."""
    if config.get("quantization_config"):
        return config
    for name, method in FILES.items():
        if (folder / name).is_file():
            return config | {"quantization_config": {"quant_method": method} | _object(folder / name)}
    return config


def _object(path: Path) -> Config:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Unsupported(f"{path} can't be read ({error}): download it again") from None
    if not isinstance(found, dict):
        raise Unsupported(f"{path} holds {shown(found)}, an object is needed: {AGAIN}")
    return found


def quantization(config: Config) -> Quantization | None:
    """The quantization that `quantization_config` describes; None: there is none. Raises Unsupported for formats that are not
    supported."""
    found = config.get("quantization_config")
    if any(_of_mlx(config.get(name)) for name in ("quantization_config", "quantization")):
        raise Unsupported(f"quantized checkpoints of MLX are not supported: {REMEDY}")
    if not found:
        return None
    if not isinstance(found, dict):
        raise Unsupported(f"config.json says quantization_config {shown(found)}, an object is needed: {REMEDY}")
    method = found.get("quant_method", _made_by(found))
    if method == "gptq":
        return _gptq(found)
    if method == "awq":
        return _awq(found)
    if method in FP8:
        block, group = _block(found, "weight_block_size")
        return Quantization(method="fp8", kind="fp8", block=block, group=group)
    if method == "compressed-tensors":
        return _compressed(found)
    if method in MODELOPT:
        return _modelopt(found)
    raise Unsupported(f"quantized checkpoints of quant_method {shown(method)} are not supported: {REMEDY}")


def _of_mlx(found: Any) -> bool:
    """Whether it describes a checkpoint of MLX, which names no method, and may name modules."""
    return isinstance(found, dict) and "bits" in found and all(name in MLX_FIELDS or "." in name for name in found)


def _made_by(found: Config) -> str | None:
    """The method of a tool that names itself instead, as ModelOpt does up to 0.31."""
    producer = found.get("producer")
    return "modelopt" if isinstance(producer, dict) and producer.get("name") == "modelopt" else None


def _gptq(found: Config) -> Quantization:
    """GPTQ (Frantar et al. 2022, arXiv:2210.17323)."""
    form = found.get("checkpoint_format") or ("marlin" if found.get("is_marlin_format") else "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise Unsupported(f"quantized checkpoints of checkpoint_format {shown(form)} are not supported: {REMEDY}")
    # The first format has zero points minus 1.
    return Quantization(method="gptq", kind=_kind(found), group=_group(found.get("group_size")), shifted=form == "gptq")


def _awq(found: Config) -> Quantization:
    """AWQ (Lin et al. 2023, arXiv:2306.00978)."""
    found = {new: found[old] for old, new in OLD_NAMES.items() if old in found} | found
    version = str(found.get("version") or "gemm").lower()
    if version != "gemm":
        raise Unsupported(f"quantized checkpoints of AWQ's version {shown(version)} are not supported, gemm is: {REMEDY}")
    if _kind(found) != "int4":
        raise Unsupported(f"AWQ of {found['bits']} bits is not supported: {REMEDY}")
    return Quantization(method="awq", kind="int4", group=_group(found.get("group_size")))


def _compressed(found: Config) -> Quantization:
    """compressed-tensors, whose groups of matrices may have different formats."""
    groups = found.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    weights = [scheme.get("weights") if isinstance(scheme, dict) else None for scheme in schemes]
    if not weights or not all(isinstance(one, dict) for one in weights):
        raise Unsupported(f"compressed-tensors whose config_groups have not all weights are not supported: {REMEDY}")
    sparse = found.get("sparsity_config") or {}
    if found.get("transform_config") or not isinstance(sparse, dict) or sparse.get("format", "dense") != "dense":
        raise Unsupported(f"compressed-tensors with a transform_config, or a sparsity_config, are not supported: {REMEDY}")
    return _several([_scheme(scheme.get("format") or found.get("format"), scheme["weights"]) for scheme in schemes])


def _scheme(form: Any, weights: Config) -> Quantization:
    """The format of one of its groups."""
    numbers, bits = weights.get("type", "int"), weights.get("num_bits")
    if form in PACKED and numbers == "int":
        return Quantization(method="compressed-tensors", kind=_kind(weights, "num_bits"), group=_group(weights.get("group_size")))
    if form in PLAIN and bits == 8 and numbers in ("int", "float"):
        kind = "fp8" if numbers == "float" else "int8"
        block, group = _block(weights, "block_structure")
        return Quantization(method="compressed-tensors", kind=kind, block=block, group=group or _group(weights.get("group_size")))
    if form in FP4 and bits == 4 and numbers == "float" and weights.get("symmetric", True):
        kind, size = FP4[form]
        return Quantization(method="compressed-tensors", kind=kind, group=_only(size, weights.get("group_size"), form))
    what = f"of format {shown(form)} with numbers of type {shown(numbers)} and {shown(bits)} bits"
    raise Unsupported(f"compressed-tensors {what} are not supported: {REMEDY}")


def _several(found: list[Quantization]) -> Quantization:
    """Several formats, of which each matrix has one: the one with the most bits first, so that nobody plans with too few, then the
    others."""
    first, *others = sorted(dict.fromkeys(found), key=lambda one: one.saved(2, "cuda", "bfloat16", MANY, MANY))
    return replace(first, others=tuple(others))


def _modelopt(found: Config) -> Quantization | None:
    """NVIDIA's ModelOpt; in its own file the fields are one level down. It may quantize keys and values alone."""
    inner = found.get("quantization", found)
    if not isinstance(inner, dict):
        raise Unsupported(f"ModelOpt's quantization is {shown(inner)}, an object is needed: {REMEDY}")
    algorithm = inner.get("quant_algo")
    if algorithm == MIXED:
        layers = inner.get("quantized_layers")
        if not isinstance(layers, dict) or not layers or not all(isinstance(layer, dict) for layer in layers.values()):
            raise Unsupported(f"ModelOpt's {MIXED} has quantized_layers {shown(layers)}, an object of objects is needed: {REMEDY}")
        return _several([_algorithm(layer) for layer in layers.values()])
    if algorithm is None and inner.get("kv_cache_quant_algo"):
        return None
    return _algorithm(inner)


def _algorithm(found: Config) -> Quantization:
    """The format of all matrices, or of one."""
    algorithm = found.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise Unsupported(
            f"ModelOpt's quant_algo {shown(algorithm)} is not supported, {', '.join(ALGORITHMS)} and {MIXED} of these are: {REMEDY}"
        )
    kind, size = ALGORITHMS[algorithm]
    return Quantization(method="modelopt", kind=kind, group=_only(size, found.get("group_size"), algorithm) if size else 0)


def _kind(found: Config, name: str = "bits") -> str:
    bits = found.get(name)
    if not isinstance(bits, int) or bits not in KINDS:
        raise Unsupported(f"quantized weights of {shown(bits)} bits are not supported, those of 4 and 8 are: {REMEDY}")
    return KINDS[bits]


def _block(found: Config, name: str) -> tuple[int, int]:
    """Outputs and inputs that share a scale; 0: not given."""
    sizes = found.get(name) or (0, 0)
    if not isinstance(sizes, list | tuple) or len(sizes) != 2:
        raise Unsupported(f"config.json says {name} {shown(sizes)} in quantization_config, two numbers are needed: {REMEDY}")
    return _size(sizes[0], name), _size(sizes[1], name)


def _only(size: int, told: Any, form: str) -> int:
    """The group size, where the format allows only one."""
    if told not in (None, size) or isinstance(told, bool):
        raise Unsupported(f"{form} with group_size {shown(told)} is not supported, with {size} it is: {REMEDY}")
    return size


def _group(size: Any) -> int:
    return 0 if size in (None, -1) else _size(size, "group_size")


def _size(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise Unsupported(f"config.json says {name} {shown(value)} in quantization_config, a positive integer is needed: {REMEDY}")
    return value
