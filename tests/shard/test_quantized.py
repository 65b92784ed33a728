"""Quantized checkpoints in every format: on every rank the weights are those that `packing` dequantized; planned bytes of weights
against the loaded ones; unsupported or malformed configs and tensors are refused. And `--quantize`."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from penstock.kernels.codes import QuantizedWeight, dequantized, quantize
from penstock.kernels.linear import Invariance
from penstock.kernels.quantized import Quantized, lay_out
from penstock.shard.engine import Engine
from penstock.shard.models.codes import matrix
from penstock.shard.models.decoder import Decoder
from penstock.shard.models.families import shape
from penstock.shard.models.quantization import beside, quantization
from penstock.shard.models.shape import Unsupported
from penstock.shard.models.traits import Quantization
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import sequences
from penstock.shard.step import Span
from penstock.shard.weights import Weights
from penstock.tests.shard import configurations, packing, tiny
from penstock.tests.shard.test_against_transformers import prompt
from penstock.tests.shard.test_weights import WEIGHTS, LoadingRank, assert_refused, assert_same_weights, change_config, load_decoder

SINGLE_RANK = Ranks(0, 1, tiny.CPU)


def build_decoder(folder: Path, rank: Ranks = SINGLE_RANK, dtype: torch.dtype = torch.float32, quantized: str = "") -> Decoder:
    model = shape(beside(json.loads((folder / "config.json").read_text()), folder)).quantized(quantized)
    return Decoder(model, Weights(folder, dtype, tiny.CPU, lambda read: None), rank, tiny.CPU)


@pytest.mark.parametrize("form", packing.FORMATS)
def test_every_format_loads_as_its_dequantized_float32_weights(form: str, tmp_path: Path) -> None:
    """On one rank, and on each of two; biases included."""
    quantized, plain = packing.checkpoints("qwen2", form, tmp_path)
    tolerance = 1e-6 if form == "nvfp4" else 0.0  # whose global scale is a divisor: here it is multiplied by its reciprocal
    assert_same_weights(load_decoder(quantized), load_decoder(plain), tolerance)
    for rank in range(2):
        assert_same_weights(build_decoder(quantized, LoadingRank(rank)), build_decoder(plain, LoadingRank(rank)), tolerance)


def packed_in_groups_of(form: str, size: int) -> packing.Format:
    """The format with another group size."""
    weights = packing.INT4_GROUPS | {"group_size": size}
    return replace(packing.FORMATS[form], size=size, config=packing.compressed("pack-quantized", weights))


# The format of a matrix by a part of its name; some matrices that are fused when they are loaded have different formats.
MIXED_FORMATS: list[dict[str, packing.Format]] = [
    {part: packing.FORMATS[form] for part, form in parts.items()}
    for parts in (
        {"mlp": "modelopt-nvfp4", "q_proj": "modelopt-nvfp4", "": "modelopt"},
        {"mlp": "packed", "": "float8"},
        {"down_proj": "float8-blocks", "": "nvfp4"},
        {"v_proj": "int8", "": "float8"},
        {"mlp": "packed-8", "k_proj": "packed", "up_proj": "packed", "": "float8-tensor"},
        {"mlp": "nvfp4", "": "packed-zeros"},
        {"mlp": "packed-8", "": "float8-blocks"},
        {"mlp": "int8", "": "packed"},
    )
] + [{"mlp": packed_in_groups_of("packed", 8), "": packing.FORMATS["packed"]}]


def test_group_size_of_a_matrix_is_inferred_if_config_groups_have_several() -> None:
    """Also if the last group is incomplete, so that the number of groups fits several sizes."""
    for inputs, size in ((960, 128), (192, 128), (448, 128), (960, 64), (256, 64)):
        weight = torch.randn(16, 1024)
        fmt = replace(packing.FORMATS["packed"], size=size)
        parts, plain = fmt.pack(fmt, weight)
        kept_part = {"weight_packed": (..., slice(inputs // 8)), "weight_scale": (..., slice(-(-inputs // size)))}
        parts = {name: part[kept_part[name]] if name in kept_part else part for name, part in parts.items()}
        groups = {f"g{other_size}": {"weights": packing.INT4_GROUPS | {"group_size": other_size}} for other_size in (64, 128)}
        assert dequantized_matrix("packed", parts, (16, inputs), config_groups=groups).equal(plain[:, :inputs])


@pytest.mark.parametrize("name", ["qwen2", "mixtral-wide"])
@pytest.mark.parametrize("number", range(len(MIXED_FORMATS)))
def test_mixed_precision_checkpoints_load_as_their_dequantized_weights(number: int, name: str, tmp_path: Path) -> None:
    quantized, plain = packing.mixed_checkpoints(name, MIXED_FORMATS[number], tmp_path)
    for rank in (SINGLE_RANK, LoadingRank(1)):
        assert_same_weights(build_decoder(quantized, rank), build_decoder(plain, rank), 1e-6)
    mixed = shape(beside(json.loads((quantized / "config.json").read_text()), quantized)).quantization
    assert mixed is not None
    assert all(
        mixed.saved(2, "cuda", "bfloat16", 4096, 4096) <= fmt.saved(2, "cuda", "bfloat16", 4096, 4096) for fmt in mixed.others
    )


# With joint matrices in the checkpoint, interleaved rotary features, residual multipliers, and additional norms.
FAMILIES_WITH_SPECIAL_LAYOUTS = ["phi3", "glm4", "granite", "gemma2", "olmo2", "mixtral", "deepseek-v3", "deepseek-v32"]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *itertools.product(FAMILIES_WITH_SPECIAL_LAYOUTS, ["gptq", "packed-zeros", "float8"]),
        *itertools.product(FAMILIES_WITH_SPECIAL_LAYOUTS, ["gptq-ordered"]),
        *itertools.product(["granite", "mixtral", "phi3", "qwen3-moe", "words-wide"], ["modelopt-nvfp4"]),
        *itertools.product(["granite", "mixtral-wide"], ["mxfp4"]),
        ("deepseek-v3", "nvfp4"),
        ("mixtral-wide", "nvfp4"),
        ("qwen3-moe", "float8"),
        ("qwen2-moe", "packed-zeros"),
        ("ax-k2", "fp8-blocks"),
        ("ax-k2-groups", "packed-zeros"),
        ("falcon-h1", "packed-zeros"),
        ("gemma3n", "fp8-blocks"),
        ("gemma3n-plain", "packed-zeros"),
        ("gemma4-e", "fp8-blocks"),
        ("gemma4-e", "packed-zeros"),
        ("granite-4-h", "packed-zeros"),
        ("granite-4-h-moe", "fp8-blocks"),
        ("glm-5-borrowing", "fp8-blocks"),
        ("glm-5-next", "fp8-blocks"),
        ("glm-5-pools", "packed-zeros"),
        ("deepseek-v4", "fp8-blocks"),
        ("deepseek-v4-entries", "packed-zeros"),
        ("hyperclova", "packed-zeros"),
        ("kimi-linear", "fp8-blocks"),
        ("kimi-linear", "packed-zeros"),
        ("laguna", "fp8-blocks"),
        ("minimax-m3", "fp8-blocks"),
        ("hy-4", "fp8-blocks"),
        ("lfm3", "packed-zeros"),
        *(("longcat", "fp8-blocks"), ("longcat-busy", "packed-zeros")),
        ("mimo", "fp8-blocks"),
        ("mistral-large4-plain", "fp8-blocks"),
        ("lfm2-moe", "fp8-blocks"),
        ("llama4", "packed-zeros"),
        ("nemotron-h-moe", "packed-zeros"),
        ("olmo-hybrid", "fp8-blocks"),
        ("olmo-hybrid-still", "packed-zeros"),
        ("qwen3-next", "fp8-blocks"),
        ("qwen3.5", "packed-zeros"),
        ("qwen4-exp", "fp8-blocks"),
    ],
)
def test_quantized_checkpoints_of_every_family_load_as_their_dequantized_weights(name: str, form: str, tmp_path: Path) -> None:
    quantized, plain = packing.checkpoints(name, form, tmp_path)
    tolerance = (
        1e-6 if name.startswith(("falcon", "granite", "longcat", "mimo")) or form == "nvfp4" else 0.0
    )  # whose multipliers are folded into the scales
    assert_same_weights(load_decoder(quantized), load_decoder(plain), tolerance)
    assert_same_weights(build_decoder(quantized, LoadingRank(1)), build_decoder(plain, LoadingRank(1)), tolerance)


class InMemoryWeights(Weights):
    """Tensors from memory instead of from files."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        self.dtype, self.device, self.progress, self._held = torch.float32, tiny.CPU, lambda read: None, held

    def has(self, name: str, shape: tuple[int, ...] | None = None) -> bool:
        return name in self._held

    def stored(self, name: str, kinds: tuple[str, ...]) -> Tensor:
        return self._held[name]


def dequantized_matrix(form: str, parts: dict[str, Tensor], matrix_shape: tuple[int, int], **fields: Any) -> Tensor:
    quantization_shape = quantization({"quantization_config": packing.FORMATS[form].config | fields})
    found = matrix(
        InMemoryWeights({f"m.{name}": part for name, part in parts.items()}), "m", matrix_shape, quantization_shape, None
    )
    assert isinstance(found, QuantizedWeight)
    return dequantized(found, torch.float32)


@pytest.mark.parametrize("form", ["gptq", "awq", "packed-zeros"])
def test_last_group_of_inputs_may_be_incomplete(form: str) -> None:
    """96 inputs in groups of 64 are groups of 64 and 32, not twice 48."""
    weight = torch.randn(16, 128)
    fmt = replace(packing.FORMATS[form], size=64)
    parts, plain = fmt.pack(fmt, weight)
    kept_part = {"qweight": (slice(96 // 8), ...), "g_idx": slice(96), "weight_packed": (..., slice(96 // 8))}
    if form == "awq":
        kept_part["qweight"] = (slice(96), ...)
    parts = {name: part[kept_part[name]] if name in kept_part else part for name, part in parts.items()}
    fields: dict[str, Any] = {"group_size": 64}
    if form == "packed-zeros":
        fields = packing.compressed("pack-quantized", packing.INT4_GROUPS | {"group_size": 64})
    assert dequantized_matrix(form, parts, (16, 96), **fields).equal(plain[:, :96])


@pytest.mark.parametrize(
    ("size", "block"),
    [
        ((64, 48), (16, 16)),
        ((160, 288), (128, 128)),  # DeepSeek's, of which the last are incomplete: not blocks of 80 and 96
        ((16, 320), (1, 128)),  # a row of blocks for each output
        ((320, 16), (128, 0)),  # 0: all inputs
        ((7, 64), (2, 32)),  # only blocks of 2 give four for 7 outputs
    ],
)
def test_fp8_block_size_missing_in_config_json_is_inferred(size: tuple[int, int], block: tuple[int, int]) -> None:
    fmt = replace(packing.FORMATS["fp8-blocks"], more={"name": "weight_scale_inv", "block": block})
    parts, plain = fmt.pack(fmt, torch.randn(size))
    assert dequantized_matrix("fp8-blocks", parts, size, weight_block_size=None).equal(plain)


@pytest.mark.parametrize("size", [(96, 64), (64, 96), (88, 64)])
def test_ambiguous_fp8_block_size_is_refused(size: tuple[int, int]) -> None:
    """96 in two blocks may be 64 and 32, or twice 48; 88 in six may be blocks of 15 to 17."""
    block = (16 if size[0] == 88 else 64, 64)
    fmt = replace(packing.FORMATS["fp8-blocks"], more={"name": "weight_scale_inv", "block": block})
    parts, plain = fmt.pack(fmt, torch.randn(size))
    with pytest.raises(Unsupported, match=r"^m has \d scales for \d\d numbers.* says no weight_block_size .* add it to quantiz"):
        dequantized_matrix("fp8-blocks", parts, size, weight_block_size=None)
    assert dequantized_matrix("fp8-blocks", parts, size, weight_block_size=list(block)).equal(plain)


@pytest.mark.parametrize("block", [None, [32, 16], [16, 32], [8, 16]])
def test_fp8_scales_that_do_not_fit_the_block_size_are_refused(block: list[int] | None) -> None:
    """No block size gives seven scales for ten outputs; and a size in config.json is not overridden."""
    parts = {"weight": torch.zeros(64, 64).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(4, 4)}
    if block is None:
        parts = {"weight": torch.zeros(10, 64).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(7, 4)}
    with pytest.raises(Unsupported, match=r"^m has \d scales for \d\d numbers, .*: is it the model's own"):
        dequantized_matrix("fp8-blocks", parts, tuple(parts["weight"].shape), weight_block_size=block)


def test_last_group_of_int8_inputs_may_be_incomplete() -> None:
    fmt = replace(packing.FORMATS["int8-zeros"], size=64)
    parts, plain = fmt.pack(fmt, torch.randn(16, 128))
    parts["weight"] = parts["weight"][:, :96].contiguous()
    fields = packing.compressed(
        "int-quantized", packing.INT8_CHANNELS | {"strategy": "group", "group_size": 64, "symmetric": False}
    )
    assert dequantized_matrix("int8-zeros", parts, (16, 96), **fields).equal(plain[:, :96])


def test_gptq_zero_points_of_0_are_read() -> None:
    """GPTQ subtracts 1 from whole words of packed zero points, so that a 0 borrows from its neighbour."""
    for bits, ones in ((4, 0x11111111), (8, 0x01010101)):
        codes = packing.round_to_groups(torch.randn(16, 64), bits, 32, centered=False)
        codes.zeros[::3] = 0
        qzeros = packing.pack_words(codes.zeros.t(), bits) - ones
        parts = {"qweight": packing.pack_words(codes.codes, bits).t(), "qzeros": qzeros, "scales": codes.scales.t().half()}
        found = dequantized_matrix("gptq-v2", parts, (16, 64), bits=bits, group_size=32, checkpoint_format="gptq")
        assert found.equal(codes.plain())


def engine_of(model: Decoder, pages: int = 64) -> Engine:
    engine = Engine(model, tiny.CPU, 16, True)
    engine.resize(pages)
    return engine


@torch.inference_mode()
def logits(model: Decoder, tokens: tuple[int, ...]) -> Tensor:
    engine = engine_of(model)
    [sequence], _ = sequences(tokens, 1)
    engine.pool.extend(sequence.pages, len(tokens))
    result = model.logits(engine.forward([Span(sequence, 0, tokens, wanted=len(tokens))]))
    assert result is not None
    return result


@pytest.mark.parametrize("form", ["gptq", "gptq-ordered", "awq", "packed", "packed-ordered", "fp8-blocks", "modelopt-nvfp4"])
def test_logits_of_quantized_checkpoints_equal_transformers(form: str, tmp_path: Path) -> None:
    """Of transformers' model with the dequantized weights."""
    quantized, plain = packing.checkpoints("llama", form, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    tokens = prompt(1, 40)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits(load_decoder(quantized), tokens), expected, rtol=0, atol=1e-4)


AUTOAWQ_FIELDS = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}


@pytest.mark.parametrize("separate_file", [True, False])
def test_autoawqs_older_field_names_are_read(separate_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In quant_config.json or in config.json."""
    monkeypatch.setattr(packing.FORMATS["awq"], "size", 32)
    quantized, plain = packing.checkpoints("words-wide", "awq", tmp_path)
    autoawq = AUTOAWQ_FIELDS | {"q_group_size": 32}
    change_config(quantized, quantization_config=None if separate_file else autoawq | {"quant_method": "awq"})
    if separate_file:
        (quantized / "quant_config.json").write_text(json.dumps(autoawq))
    found = load_decoder(quantized)
    assert_same_weights(found, load_decoder(plain))
    assert found.shape.quantization == Quantization(method="awq", kind="int4", group=32)


def test_newer_awq_field_names_override_the_older_ones() -> None:
    both = {"quant_method": "awq", "bits": 4, "group_size": 64, "w_bit": 3, "q_group_size": 32}
    assert quantization({"quantization_config": both}) == Quantization(method="awq", kind="int4", group=64)


@pytest.mark.parametrize(("fields", "words"), [({"w_bit": 3}, "of 3 bits are"), ({"version": "GEMV"}, "version 'gemv'")])
def test_unsupported_awq_settings_by_older_field_names_are_refused(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    quantized, _ = packing.checkpoints("llama", "awq", tmp_path)
    change_config(quantized, quantization_config=None)
    (quantized / "quant_config.json").write_text(json.dumps(AUTOAWQ_FIELDS | fields))
    assert_refused(quantized, words, "use the model's unquantized weights")


# NVIDIA's ModelOpt, whose settings are in a file of their own

MODELOPT_FILE = "hf_quant_config.json"


def modelopt_checkpoint(target: Path, name: str = "qwen2", form: str = "modelopt", **fields: Any) -> tuple[Path, Path]:
    quantized, plain = packing.checkpoints(name, form, target)
    change_config(quantized, quantization_config=None)
    quantization_config = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]} | fields
    (quantized / MODELOPT_FILE).write_text(
        json.dumps({"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": quantization_config})
    )
    return quantized, plain


def test_modelopt_fp8_settings_are_read_from_hf_quant_config_json(tmp_path: Path) -> None:
    quantized, plain = modelopt_checkpoint(tmp_path)
    assert_same_weights(load_decoder(quantized), load_decoder(plain))
    assert len(quantized_weights(load_decoder(quantized, quantize="fp8"))) == 0  # a CPU dequantizes them
    assert_refused(quantized, "--quantize int4, but the checkpoint is modelopt with fp8 already", quantize="int4")


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"])
def test_modelopt_nvfp4_settings_are_read_from_hf_quant_config_json(algorithm: str, tmp_path: Path) -> None:
    quantized, plain = modelopt_checkpoint(tmp_path, "words-wide", "modelopt-nvfp4", quant_algo=algorithm, group_size=16)
    dtypes = [tensor.dtype for tensor in safetensors.torch.load_file(quantized / WEIGHTS).values()]
    assert dtypes.count(torch.uint8) == dtypes.count(torch.float8_e4m3fn) == 2 * 7  # all matrices of both layers
    found = load_decoder(quantized)
    assert_same_weights(found, load_decoder(plain))
    assert found.shape.quantization == Quantization(method="modelopt", kind="nvfp4", group=16)


def test_quantized_output_matrix_is_refused(tmp_path: Path) -> None:
    """By its shape alone it would look like a tensor of another model."""
    quantized, _ = packing.checkpoints("words-wide", "modelopt-nvfp4", tmp_path)
    change_tensor(quantized, "lm_head.weight", lambda found: packing.fp4_codes(found)[0])
    assert_refused(quantized, "tensor lm_head.weight is stored as U8", "no matrix of a layer, of which alone few bits are read")


def test_quant_method_modelopt_fp4_is_read_like_modelopt(tmp_path: Path) -> None:
    quantized, plain = packing.checkpoints("qwen2", "modelopt-nvfp4", tmp_path)
    change_quantization_config(quantized, quant_method="modelopt_fp4")
    assert_same_weights(load_decoder(quantized), load_decoder(plain))


def test_producer_in_place_of_quant_method_is_read(tmp_path: Path) -> None:
    """As ModelOpt 0.31 has written it."""
    quantized, plain = packing.checkpoints("qwen2", "modelopt", tmp_path)
    change_config(quantized, quantization_config={"producer": {"name": "modelopt", "version": "0.31.0"}, "quant_algo": "FP8"})
    assert_same_weights(load_decoder(quantized), load_decoder(plain))
    change_config(quantized, quantization_config={"producer": {"name": "another"}, "quant_algo": "FP8"})
    assert_refused(quantized, "quant_method null", "use the model's unquantized weights")


@pytest.mark.parametrize("names", [("quantization",), ("quantization", "quantization_config")])
def test_mlx_checkpoints_are_refused(names: tuple[str, ...]) -> None:
    """They name no method, and the older ones have a field of their own only."""
    text = configurations.SMALL | {"model_type": "qwen3"}
    quantization = {name: {"group_size": 64, "bits": 4, "mode": "affine", "model.layers.0.mlp.gate": {"bits": 8}} for name in names}
    multimodal = {"architectures": ["InternVLForConditionalGeneration"], "text_config": text}
    for config in (text | {"architectures": ["Qwen3ForCausalLM"]}, multimodal):
        shape(config)
        with pytest.raises(Unsupported, match="checkpoints of MLX are not supported: use the model's unquantized weights"):
            shape(config | quantization)


def test_modules_excluded_from_quantization_are_read_unquantized(tmp_path: Path) -> None:
    """One of three matrices that are fused, and a single one."""
    quantized, plain = modelopt_checkpoint(
        tmp_path, exclude_modules=["lm_head", "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj*"]
    )
    stored, dequantized_tensors = (safetensors.torch.load_file(folder / WEIGHTS) for folder in (quantized, plain))
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        stored[f"{name}.weight"] = dequantized_tensors[f"{name}.weight"]
        del stored[f"{name}.weight_scale"], stored[f"{name}.input_scale"]
    safetensors.torch.save_file(stored, quantized / WEIGHTS)
    assert_same_weights(load_decoder(quantized), load_decoder(plain))
    for rank in range(2):
        assert_same_weights(build_decoder(quantized, LoadingRank(rank)), build_decoder(plain, LoadingRank(rank)))


def test_kv_cache_scales_with_modelopts_tensor_names_are_read(tmp_path: Path) -> None:
    """Also if weights are not quantized."""
    quantized, plain = modelopt_checkpoint(tmp_path, quant_algo=None, kv_cache_quant_algo="FP8")
    stored = safetensors.torch.load_file(plain / WEIGHTS)
    for layer in range(2):
        for name, scale in (("k", 0.5), ("v", 0.25)):
            stored[f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale"] = torch.tensor(scale + layer)
    safetensors.torch.save_file(stored, quantized / WEIGHTS)
    found = load_decoder(quantized)
    assert found.shape.quantization is None
    scales = [layer.attention.scales for layer in found.layers]
    assert all(
        layer_scales is not None and layer_scales.equal(torch.tensor([[0.5 + i], [0.25 + i]]).expand(2, 4))
        for i, layer_scales in enumerate(scales)
    )


@pytest.mark.parametrize("layers", [None, [], {}, {"a": "FP8"}, {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A8_AWQ"}}])
def test_invalid_or_unsupported_modelopt_mixed_precision_is_refused(layers: Any, tmp_path: Path) -> None:
    quantized, _ = modelopt_checkpoint(tmp_path, quant_algo="MIXED_PRECISION", quantized_layers=layers)
    words = "quant_algo 'W4A8_AWQ' is not supported" if layers and "b" in layers else "MIXED_PRECISION has quantized_layers"
    assert_refused(quantized, words, "use the model's unquantized weights")


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "W4A8_AWQ", "MXFP8", "FP8_PB_WO"])
def test_unsupported_modelopt_algorithms_are_refused(algorithm: str, tmp_path: Path) -> None:
    quantized, _ = modelopt_checkpoint(tmp_path, quant_algo=algorithm)
    words = f"ModelOpt's quant_algo '{algorithm}' is not supported, FP8, NVFP4, W4A16_NVFP4, W4A8_NVFP4_FP8 and MIXED_PRECISION of"
    assert_refused(quantized, words, "use the model's unquantized weights")


@pytest.mark.parametrize(
    ("text", "words"), [("{", "can't be read"), ("[1]", "holds [1], an object"), ("[" * 9999, "download it again")]
)
def test_invalid_hf_quant_config_json_is_refused(text: str, words: str, tmp_path: Path) -> None:
    quantized, _ = modelopt_checkpoint(tmp_path)
    (quantized / MODELOPT_FILE).write_text(text)
    assert_refused(quantized, MODELOPT_FILE, words)


# `--quantize`: quantized when they are loaded


class RoundedWeights(Weights):
    """A checkpoint whose matrices, or a rank's parts of them, are quantized and dequantized again."""

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__(folder, torch.float32, tiny.CPU, lambda read: None)
        self._kind = kind

    def tensor(
        self, name: str, shape: tuple[int, ...], cut: tuple[int, int, int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        found = super().tensor(name, shape, cut, dtype)
        return dequantized(quantize(found, self._kind), torch.float32) if name.endswith(packing.PROJECTIONS) else found


@pytest.mark.parametrize("rank", [SINGLE_RANK, LoadingRank(1)])
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_quantize_option_rounds_matrices_of_layers_and_nothing_else(kind: str, rank: Ranks) -> None:
    """Embeddings, biases and norms are not rounded."""
    folder = tiny.folder("qwen2")
    found, plain = build_decoder(folder, rank, quantized=kind), build_decoder(folder, rank)
    assert_same_weights(found, Decoder(plain.shape, RoundedWeights(folder, kind), rank, tiny.CPU))
    with pytest.raises(AssertionError):
        assert_same_weights(found, plain)


# Weights that stay quantized in memory


def quantized_weights(model: Decoder) -> list[str]:
    """The names of the first layer's weights that are quantized in memory."""
    layer = model.layers[0]
    named = {**vars(layer), **vars(layer.attention), **vars(layer.mlp)}
    return [name for name, value in named.items() if isinstance(value, Quantized)]


@pytest.mark.parametrize("form", ["gptq", "gptq-ordered", "packed-ordered"])
def test_fused_matrices_may_have_different_activation_orders(form: str, tmp_path: Path) -> None:
    """GPTQ's never differ, since these matrices have the same inputs."""
    quantized, plain = packing.checkpoints("llama", form, tmp_path)
    suffix = "weight_g_idx" if form.startswith("packed") else "g_idx"
    name = "model.layers.0.self_attn.k_proj"
    change_tensor(quantized, f"{name}.{suffix}", lambda groups: groups.flip(0))
    stored = safetensors.torch.load_file(quantized / WEIGHTS)
    parts = {part.removeprefix(f"{name}."): tensor for part, tensor in stored.items() if part.startswith(f"{name}.")}
    dequantized_weight = dequantized_matrix(
        form, parts, tuple(safetensors.torch.load_file(plain / WEIGHTS)[f"{name}.weight"].shape)
    )
    change_tensor(plain, f"{name}.weight", lambda weight: dequantized_weight)
    assert_same_weights(load_decoder(quantized), load_decoder(plain))
    assert_same_weights(build_decoder(quantized, LoadingRank(1)), build_decoder(plain, LoadingRank(1)))


def test_matrices_with_activation_order_can_be_cut_between_any_inputs() -> None:
    """Dequantized parts and matrix products, for any number of ranks and groups of any size."""
    for bits, size, inputs in ((4, 32, 256), (4, 128, 512), (8, 64, 192), (4, 4, 48), (4, 96, 480)):
        fmt = replace(packing.FORMATS["gptq-ordered"], bits=bits, size=size)
        weight = torch.randn(64, inputs)
        parts, plain = fmt.pack(fmt, weight)
        config_json = {"quantization_config": fmt.config | {"bits": bits, "group_size": size}}
        source = InMemoryWeights({f"m.{name}": part for name, part in parts.items()})
        for ranks in (1, 2, 3, 4):
            for rank in range(ranks):
                start, stop = rank * inputs // ranks, (rank + 1) * inputs // ranks
                found = matrix(source, "m", (64, inputs), quantization(config_json), (1, start, stop))
                assert isinstance(found, QuantizedWeight)
                assert found.inputs == stop - start
                assert dequantized(found, torch.float32).equal(plain[:, start:stop])
                x = torch.randn(5, stop - start, dtype=torch.bfloat16)
                laid_out = lay_out(found, None, Invariance.USUAL, torch.bfloat16)
                assert isinstance(laid_out, Quantized) is (bits == 4 and size >= 32)
                assert laid_out.shape == (64, stop - start)
                expected = x.double() @ plain[:, start:stop].double().t()
                torch.testing.assert_close(laid_out(x).double(), expected, rtol=0, atol=0.03 * inputs**0.5)


@pytest.mark.parametrize("form", ["gptq", "gptq-ordered", "awq", "packed-zeros"])
def test_4_bit_weights_stay_quantized_in_a_bfloat16_model(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's int4 product, on one rank and on two; logits are close to those of the dequantized weights in float32."""
    monkeypatch.setattr(packing.FORMATS[form], "size", 32)
    quantized, plain = packing.checkpoints("words-wide", form, tmp_path)
    model, exact = load_decoder(quantized, dtype="bfloat16"), load_decoder(plain)
    assert len(quantized_weights(model)) == 4
    assert len(quantized_weights(build_decoder(quantized, LoadingRank(1), torch.bfloat16))) == 4
    tokens = prompt(2, 50, 2048)
    found, expected = logits(model, tokens), logits(exact, tokens)
    rounded = logits(load_decoder(plain, dtype="bfloat16"), tokens)
    assert (found - expected).norm() < 1.5 * (rounded - expected).norm()


# Planned bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        *itertools.product(["words-wide", "mixtral-wide"], ["", "int4", "int8"]),
        ("llama-tied", ""),
        ("gpt-oss-blocks", "int4"),
        *itertools.product(["deepseek-v2", "deepseek-v2-sets"], ["", "int8"]),
        *(("gemma3n-wide", "int4"), ("gemma4-e-wide", "int4")),
        ("granite-4-h-wide", "int4"),
        ("lfm2-wide", "int4"),
        *itertools.product(["llama4-wide"], ["", "int4"]),
        ("qwen3.5-wide", "int4"),
    ],
)
def test_planned_weight_bytes_are_within_2_percent_of_the_loaded_bytes(name: str, quantize: str, dtype: str) -> None:
    model = load_decoder(tiny.folder(name), dtype=dtype, quantize=quantize)
    planned = model.shape.weight_bytes(1, 2 if dtype == "bfloat16" else 4, "cpu", dtype, not model.head.shared)
    assert planned == pytest.approx(model.weight_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("name", "form", "size"),
    [
        ("words-wide", "gptq", 64),  # each rank has one group and a half of 192 inputs
        ("words-wide", "awq", 32),
        ("words-wide", "gptq-symmetric", 0),
        ("words-wide", "", 0),
        *(("gemma3n-wide", "", 0), ("gemma4-e-wide", "", 0)),
        ("llama4-wide", "", 0),
        ("mixtral-wide", "packed-zeros", 64),
        ("mixtral-wide", "", 0),
        ("llama", "gptq", 4),
        ("granite-4-h-wide", "", 0),
        ("granite-4-h-wide", "packed-zeros", 64),
        ("qwen3.5-wide", "", 0),
        ("qwen3.5-wide", "packed-zeros", 64),
    ],
)
def test_planned_weight_bytes_per_rank_match_the_loaded_bytes(
    name: str, form: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if ranks are cut within a group, so that both hold its scales. Matrices whose groups are too short for kernels are
    dequantized."""
    folder = tiny.folder(name)
    if form:
        monkeypatch.setattr(packing.FORMATS[form], "size", size)
        folder, _ = packing.checkpoints(name, form, tmp_path)
        change_quantization_config(folder, **group_size_fields(form, size))
    for rank in (SINGLE_RANK, LoadingRank(1)):
        model = build_decoder(folder, rank, torch.bfloat16, "" if form else "int4")
        head_is_packed = not model.head.shared
        planned = model.shape.weight_bytes(rank.size, 2, "cpu", "bfloat16", head_is_packed)
        assert planned == pytest.approx(model.weight_bytes, rel=0.003)


def group_size_fields(form: str, size: int) -> dict[str, Any]:
    """Fields of quantization_config with the group size."""
    if form.startswith("packed"):
        return packing.compressed("pack-quantized", packing.INT4_GROUPS | {"group_size": size})
    return {"group_size": size or -1}


def test_nvfp4_parts_with_an_odd_number_of_blocks_are_dequantized() -> None:
    """Of 160 inputs in blocks of 16 each of two ranks has five blocks, each of five ranks has two."""
    nvfp4 = Quantization(method="modelopt", kind="nvfp4", group=16)
    assert [nvfp4.saved(2, "cuda", "bfloat16", 160, 160 // ranks) > 0 for ranks in (1, 2, 5)] == [True, False, True]
    assert nvfp4.saved(2, "cuda", "bfloat16", 4096, 4096) == 2 - 4.5 / 8 - 4 / 4096


# Refusals, with a remedy


def change_quantization_config(folder: Path, **changes: Any) -> None:
    """Changes fields of quantization_config; None removes one."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"] | changes
    change_config(folder, quantization_config={name: value for name, value in config.items() if value is not None})


def fp4_fields(form: str, **changes: Any) -> dict[str, Any]:
    """Fields of quantization_config of a format of 4-bit floats."""
    return packing.compressed(f"{form}-pack-quantized", packing.FP4_BLOCKS | changes)


@pytest.mark.parametrize(
    ("form", "fields", "words"),
    [
        ("gptq", {"bits": 3}, ["of 3 bits are not supported, those of 4 and 8 are"]),
        ("gptq", {"bits": None}, ["of null bits"]),
        ("gptq", {"bits": [4]}, ["of [4] bits"]),
        ("gptq", {"group_size": "many"}, ["group_size 'many'", "positive integer"]),
        ("gptq", {"checkpoint_format": "marlin"}, ["checkpoint_format 'marlin'"]),
        ("gptq", {"is_marlin_format": True}, ["checkpoint_format 'marlin'"]),
        ("gptq", {"quant_method": "bitsandbytes"}, ["quant_method 'bitsandbytes'"]),
        ("gptq", {"quant_method": None}, ["quant_method null"]),
        ("modelopt", {"quant_algo": "NVFP4_AWQ"}, ["ModelOpt's quant_algo 'NVFP4_AWQ'", "FP8, NVFP4, W4A16_NVFP4"]),
        ("modelopt", {"quant_algo": ["NVFP4"]}, ["ModelOpt's quant_algo ['NVFP4']"]),
        ("modelopt-nvfp4", {"group_size": 32}, ["NVFP4 with group_size 32", "with 16 it is"]),
        ("nvfp4", fp4_fields("nvfp4", group_size=32), ["nvfp4-pack-quantized with group_size 32", "with 16 it is"]),
        ("nvfp4", fp4_fields("nvfp4", num_bits=8), ["format 'nvfp4-pack-quantized'", "type 'float' and 8 bits"]),
        ("nvfp4", fp4_fields("nvfp4", type="int"), ["format 'nvfp4-pack-quantized'", "type 'int'"]),
        ("nvfp4", {"format": "pack-quantized"}, ["format 'pack-quantized'", "type 'float' and 4 bits"]),
        ("mxfp4", fp4_fields("mxfp4", group_size=True), ["mxfp4-pack-quantized with group_size true", "with 32 it is"]),
        ("modelopt", {"quant_algo": None}, ["quant_algo null"]),
        ("modelopt", {"quantization": ["FP8"]}, ["quantization is ['FP8']"]),
        ("awq", {"version": "gemv"}, ["version 'gemv'", "gemm is"]),
        ("awq", {"bits": 8}, ["AWQ of 8 bits"]),
        ("packed", {"format": "marlin-24"}, ["format 'marlin-24'", "type 'int'"]),
        ("packed", {"config_groups": None}, ["config_groups"]),
        ("packed", {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, ["transform_config"]),
        ("packed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparsity_config"]),
        ("packed", {"sparsity_config": 7}, ["sparsity_config"]),
        ("packed", {"config_groups": {"a": 7}}, ["config_groups"]),
        ("int8", {"config_groups": {"a": {"weights": {"num_bits": 8, "type": "complex"}}}}, ["type 'complex'"]),
        ("fp8-blocks", {"weight_block_size": 128}, ["weight_block_size 128"]),
        ("fp8-blocks", {"weight_block_size": [128]}, ["weight_block_size [128]"]),
        ("float8-blocks", {"config_groups": {"a": {"weights": {"num_bits": 8, "type": "float", "block_structure": 7}}}}, ["7"]),
    ],
)
def test_unsupported_quantization_config_is_refused(form: str, fields: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    quantized, _ = packing.checkpoints("llama", form, tmp_path)
    change_quantization_config(quantized, **fields)
    assert_refused(quantized, *words, "use the model's unquantized weights")


def test_quantization_config_that_is_not_an_object_is_refused(tmp_path: Path) -> None:
    quantized, _ = packing.checkpoints("llama", "gptq", tmp_path)
    change_config(quantized, quantization_config="gptq")
    assert_refused(quantized, "quantization_config 'gptq'", "an object is needed")


@pytest.mark.parametrize(("form", "suffix"), [("gptq", "qweight"), ("packed", "weight_packed")])
def test_quantized_tensors_without_quantization_config_are_refused(form: str, suffix: str, tmp_path: Path) -> None:
    """As in checkpoints that have it in a file of its own."""
    quantized, _ = packing.checkpoints("llama", form, tmp_path)
    change_config(quantized, quantization_config=None)
    assert_refused(quantized, f"q_proj.{suffix} instead of model.layers.0.self_attn.q_proj.weight", "quantization_config")


def change_tensor(folder: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> None:
    stored = safetensors.torch.load_file(folder / WEIGHTS)
    changed = change(stored.pop(name))
    safetensors.torch.save_file(stored | ({name: changed.contiguous()} if changed is not None else {}), folder / WEIGHTS)


DOWN_PROJ = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("form", "suffix", "change", "words"),
    [
        ("gptq", "g_idx", lambda found: found // 2, ["has 88 inputs in groups of 4, g_idx others"]),
        ("gptq-ordered", "g_idx", lambda found: found + 1, ["has 88 inputs in groups of 4, g_idx others"]),
        ("gptq-ordered", "g_idx", lambda found: found[1:], ["has 88 inputs in groups of 4, g_idx others"]),
        ("gptq", "qweight", lambda found: found[1:], ["has codes [64, 80]", "config.json says [64, 88]"]),
        ("gptq", "qweight", lambda found: found.float(), ["qweight is stored as F32", "it is I32"]),
        ("gptq", "qzeros", lambda found: None, ["no tensor", "qzeros"]),
        ("gptq", "scales", lambda found: found[1:], ["scales [64, 21]", "config.json says [64, 88]"]),
        ("gptq", "qzeros", lambda found: found[:, 1:], ["zeros"]),
        ("packed-zeros", "weight_zero_point", lambda found: found[:, 1:], ["zeros [64, 21]", "config.json says [64, 88]"]),
        ("packed-zeros", "weight_zero_point", lambda found: found[0, :1], ["weight_zero_point is [1] of I32", "words of outputs"]),
        ("packed-bytes", "weight_zero_point", lambda found: found[1:], ["zeros [63, 22]", "config.json says [64, 88]"]),
        ("int8-tensor", "weight_zero_point", lambda found: found.int(), ["weight_zero_point is stored as I32", "it is I8"]),
        ("awq", "scales", lambda found: found[:, 1:], ["scales [63, 22]", "config.json says [64, 88]"]),
        ("fp8", "weight", lambda found: found.float(), ["weight is stored as F32", "it is F8_E4M3"]),
        ("fp8-blocks", "weight_scale_inv", lambda found: found[1:], ["scales"]),
    ],
)
def test_tensors_of_the_wrong_shape_or_dtype_are_refused(
    form: str, suffix: str, change: Callable[[Tensor], Tensor | None], words: list[str], tmp_path: Path
) -> None:
    quantized, _ = packing.checkpoints("llama", form, tmp_path)
    change_tensor(quantized, f"{DOWN_PROJ}.{suffix}", change)
    assert_refused(quantized, DOWN_PROJ, *words)


@pytest.mark.parametrize(
    ("form", "suffix", "change", "words"),
    [
        ("nvfp4", "weight_packed", lambda found: found[1:], ["has codes [63, 192]", "config.json says [64, 192]"]),
        ("nvfp4", "weight_packed", lambda found: found.int(), ["weight_packed is stored as I32", "it is U8"]),
        ("nvfp4", "weight_packed", lambda found: None, ["no tensor", "weight_packed"]),
        ("nvfp4", "weight_scale", lambda found: found[:, ::2], ["scales [64, 6]", "16 inputs share one"]),
        ("nvfp4", "weight_scale", lambda found: found[1:], ["scales [63, 12]", "config.json says [64, 192]"]),
        ("nvfp4", "weight_scale", lambda found: found.view(torch.uint8), ["weight_scale is stored as U8", "it is F8_E4M3"]),
        ("nvfp4", "weight_global_scale", lambda found: None, ["no tensor", "weight_global_scale"]),
        ("nvfp4", "weight_global_scale", lambda found: found * 0, ["weight_global_scale is [0.0], one number is needed"]),
        ("nvfp4", "weight_global_scale", lambda found: found.expand(64), ["weight_global_scale is [", "..., one number"]),
        ("modelopt-nvfp4", "weight", lambda found: found.view(torch.int8), ["weight is stored as I8", "it is U8"]),
        ("modelopt-nvfp4", "weight", lambda found: found[:, 1:], ["has codes [64, 190], scales [64, 12]", "16 inputs share one"]),
        ("modelopt-nvfp4", "weight_scale_2", lambda found: None, ["no tensor", "weight_scale_2"]),
        ("modelopt-nvfp4", "weight_scale_2", lambda found: found / 0, ["weight_scale_2 is [inf], one number is needed"]),
        ("modelopt-nvfp4", "weight_scale_2", lambda found: found.half(), ["weight_scale_2 is stored as F16", "it is F32"]),
        ("mxfp4", "weight_scale", lambda found: found[:, 1:], ["scales [64, 5]", "32 inputs share one"]),
    ],
)
def test_4_bit_float_tensors_of_the_wrong_shape_or_dtype_are_refused(
    form: str, suffix: str, change: Callable[[Tensor], Tensor | None], words: list[str], tmp_path: Path
) -> None:
    quantized, _ = packing.checkpoints("words-wide", form, tmp_path)
    change_tensor(quantized, f"{DOWN_PROJ}.{suffix}", change)
    assert_refused(quantized, DOWN_PROJ, *words)


MALFORMED_SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda part: part.new_empty(0),
    "empty rows": lambda part: part.new_empty(64, 0),
    "stacked": lambda part: part.reshape(1, 1, -1),
    "in a row": lambda part: torch.cat([part.flatten()] * 3),
}


@pytest.mark.parametrize("malformed", MALFORMED_SHAPES)
@pytest.mark.parametrize("form", packing.FORMATS)
def test_malformed_tensor_shapes_are_refused_in_one_line(form: str, malformed: str) -> None:
    """For each tensor of the format."""
    fmt = packing.FORMATS[form]
    parts, _ = fmt.pack(fmt, torch.randn(64, 96))
    for name in parts.keys() - {"weight_shape", "input_scale", "input_global_scale"}:
        with pytest.raises(Unsupported, match=r"^[^\n]*\bm\b[^\n]*$"):
            dequantized_matrix(form, parts | {name: MALFORMED_SHAPES[malformed](parts[name])}, (64, 96))


def test_zero_points_of_the_wrong_shape_in_a_symmetric_format_are_refused() -> None:
    fmt = packing.FORMATS["packed-tensor"]
    parts, _ = fmt.pack(fmt, torch.randn(64, 48))
    with pytest.raises(Unsupported, match=r"^m has .* zeros \[3, 1\].*: is it the model's own"):
        dequantized_matrix("packed-tensor", parts | {"weight_zero_point": torch.zeros(3, dtype=torch.int8)}, (64, 48))


def test_more_groups_than_inputs_are_refused() -> None:
    parts, _ = packing.gptq(packing.FORMATS["gptq"], torch.randn(64, 48))
    with pytest.raises(Unsupported, match=r"^m has .*: is it the model's own"):
        dequantized_matrix(
            "gptq", {name: part for name, part in parts.items() if name != "g_idx"} | {"scales": torch.ones(64, 64)}, (64, 48)
        )
    with pytest.raises(Unsupported, match=r"^m has "):
        dequantized_matrix("gptq", parts | {"scales": torch.ones(64, 64)}, (64, 48))


def test_one_row_of_scales_for_several_blocks_of_outputs_is_refused() -> None:
    parts = {"weight": torch.zeros(64, 48).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 3)}
    with pytest.raises(Unsupported, match=r"^m has 1 scales for 64 numbers, in blocks of 16: is it the model's own"):
        dequantized_matrix("fp8-blocks", parts, (64, 48))
    assert dequantized_matrix("fp8-blocks", parts, (64, 48), weight_block_size=[128, 16]).equal(torch.zeros(64, 48))


@pytest.mark.parametrize(
    ("form", "quantize_option", "words"),
    [
        ("gptq", "awq", ["--quantize awq, but the checkpoint is gptq with int4 already", "leave --quantize out"]),
        ("gptq", "fp8", ["--quantize fp8, but the checkpoint is gptq"]),
        ("", "gptq", ["--quantize gptq, but the checkpoint is not quantized", "int4, int8, fp8"]),
    ],
)
def test_quantize_option_that_differs_from_the_checkpoint_is_refused(
    form: str, quantize_option: str, words: list[str], tmp_path: Path
) -> None:
    folder = packing.checkpoints("llama", form, tmp_path)[0] if form else tiny.folder("llama")
    assert_refused(folder, *words, quantize=quantize_option)


@pytest.mark.parametrize("quantize_option", ["gptq", "int4", ""])
def test_quantize_option_that_matches_the_checkpoint_changes_nothing(quantize_option: str, tmp_path: Path) -> None:
    quantized, plain = packing.checkpoints("llama", "gptq", tmp_path)
    assert_same_weights(load_decoder(quantized, quantize=quantize_option), load_decoder(plain))


def test_config_fields_that_do_not_describe_weights_are_ignored(tmp_path: Path) -> None:
    """As today's tools write them."""
    quantized, plain = packing.checkpoints("llama", "packed", tmp_path)
    empty_fields = {"transform_config": {}, "sparsity_config": {}, "kv_cache_scheme": None, "quantization_status": "compressed"}
    change_quantization_config(quantized, **empty_fields)
    assert_same_weights(load_decoder(quantized), load_decoder(plain))
    change_quantization_config(quantized, sparsity_config={"format": "dense", "sparsity_structure": "unstructured"})
    assert_same_weights(load_decoder(quantized), load_decoder(plain))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "ernie-moe",
        "glm4-moe",
        "minimax-m2",
        "deepseek-v2",
        "deepseek-v3",
        "deepseek-v32",
        "stablelm",
        "gemma",
        "cohere2-moe",
        "deepseek-v3-biases",
        "gpt-oss",
        "nanochat",
        "olmo",
        *("ax-k1", "flint", "glm-5-borrowing", "granite-swa", "laguna", "minicpm3", "mimo", "minimax-m3", "hy-4"),
        *("mistral-large4", "mistral-large4-plain", "ax-k2", "ax-k2-groups", "gemma3n", "gemma3n-plain"),
        *("longcat", "longcat-busy", "glm-5-pools", "deepseek-v4", "deepseek-v4-entries"),
        *configurations.HYBRIDS,
    ],
)
def test_planned_weight_bytes_of_unquantized_models_are_exact(name: str, dtype: str) -> None:
    """Though routers with a score correction are held in float32, and missing gains and biases of norms, and missing biases of
    queries beside latents with biases, are held as ones and zeros."""
    model = load_decoder(tiny.folder(name), dtype=dtype)
    planned = model.shape.weight_bytes(1, 2 if dtype == "bfloat16" else 4, "cpu", dtype, not model.head.shared)
    assert planned == model.weight_bytes
