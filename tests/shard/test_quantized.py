"""Checkpoints of few bits mean the numbers that they were packed from, in every format, on every rank."""

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
from penstock.tests.shard.test_oracle import prompt
from penstock.tests.shard.test_weights import WEIGHTS, Alone, change, decoder, refuses, same

WHOLE = Ranks(0, 1, tiny.CPU)


def made(folder: Path, rank: Ranks = WHOLE, dtype: torch.dtype = torch.float32, quantized: str = "") -> Decoder:
    model = shape(beside(json.loads((folder / "config.json").read_text()), folder)).quantized(quantized)
    return Decoder(model, Weights(folder, dtype, tiny.CPU, lambda read: None), rank, tiny.CPU)


@pytest.mark.parametrize("form", packing.FORMATS)
def test_every_format_is_the_same_model_in_float32(form: str, tmp_path: Path) -> None:
    """On one rank, and each half of two; of biases, too."""
    few, plain = packing.checkpoints("qwen2", form, tmp_path)
    tolerance = 1e-6 if form == "nvfp4" else 0.0  # where one number is divided by, and has a reciprocal here
    same(decoder(few), decoder(plain), tolerance)
    for rank in range(2):
        same(made(few, Alone(rank)), made(plain, Alone(rank)), tolerance)


def coarse(form: str, size: int) -> packing.Format:
    """A format with other groups."""
    weights = packing.INTEGERS | {"group_size": size}
    return replace(packing.FORMATS[form], size=size, config=packing.compressed("pack-quantized", weights))


# By what is in their names: also of those that are read as one.
MIXTURES: list[dict[str, packing.Format]] = [
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
] + [{"mlp": coarse("packed", 8), "": packing.FORMATS["packed"]}]


def test_of_several_sizes_of_groups_the_right_one_is_taken() -> None:
    """Also where the last one is cut off, so that others would fit as well."""
    for inputs, size in ((960, 128), (192, 128), (448, 128), (960, 64), (256, 64)):
        weight = torch.randn(16, 1024)
        how = replace(packing.FORMATS["packed"], size=size)
        parts, plain = how.pack(how, weight)
        cut = {"weight_packed": (..., slice(inputs // 8)), "weight_scale": (..., slice(-(-inputs // size)))}
        parts = {name: part[cut[name]] if name in cut else part for name, part in parts.items()}
        groups = {f"g{other}": {"weights": packing.INTEGERS | {"group_size": other}} for other in (64, 128)}
        assert read("packed", parts, (16, inputs), config_groups=groups).equal(plain[:, :inputs])


@pytest.mark.parametrize("name", ["qwen2", "mixtral-wide"])
@pytest.mark.parametrize("number", range(len(MIXTURES)))
def test_matrices_may_be_stored_in_different_ways(number: int, name: str, tmp_path: Path) -> None:
    few, plain = packing.mixed(name, MIXTURES[number], tmp_path)
    for rank in (WHOLE, Alone(1)):
        same(made(few, rank), made(plain, rank), 1e-6)
    how = shape(beside(json.loads((few / "config.json").read_text()), few)).quantization
    assert how is not None
    assert all(how.saved(2, "cuda", "bfloat16", 4096, 4096) <= one.saved(2, "cuda", "bfloat16", 4096, 4096) for one in how.others)


# With matrices that are stored as one, rotary features in another order, factors of what is added, and norms of their own.
NAMES = ["phi3", "glm4", "granite", "gemma2", "olmo2", "mixtral", "deepseek-v3", "deepseek-v32"]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *itertools.product(NAMES, ["gptq", "packed-zeros", "float8"]),
        *itertools.product(NAMES, ["gptq-ordered"]),
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
def test_every_family_is_the_same_model(name: str, form: str, tmp_path: Path) -> None:
    few, plain = packing.checkpoints(name, form, tmp_path)
    tolerance = (
        1e-6 if name.startswith(("falcon", "granite", "longcat", "mimo")) or form == "nvfp4" else 0.0
    )  # whose factors go to the scales
    same(decoder(few), decoder(plain), tolerance)
    same(made(few, Alone(1)), made(plain, Alone(1)), tolerance)


class Held(Weights):
    """A few tensors and no file."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        self.dtype, self.device, self.progress, self._held = torch.float32, tiny.CPU, lambda read: None, held

    def has(self, name: str, shape: tuple[int, ...] | None = None) -> bool:
        return name in self._held

    def stored(self, name: str, kinds: tuple[str, ...]) -> Tensor:
        return self._held[name]


def read(form: str, parts: dict[str, Tensor], size: tuple[int, int], **fields: Any) -> Tensor:
    how = quantization({"quantization_config": packing.FORMATS[form].config | fields})
    found = matrix(Held({f"m.{name}": part for name, part in parts.items()}), "m", size, how, None)
    assert isinstance(found, QuantizedWeight)
    return dequantized(found, torch.float32)


@pytest.mark.parametrize("form", ["gptq", "awq", "packed-zeros"])
def test_the_last_group_may_be_cut_off(form: str) -> None:
    """96 inputs in groups of 64 are 64 and 32 of them, not twice 48."""
    weight = torch.randn(16, 128)
    how = replace(packing.FORMATS[form], size=64)
    parts, plain = how.pack(how, weight)
    each = {"qweight": (slice(96 // 8), ...), "g_idx": slice(96), "weight_packed": (..., slice(96 // 8))}
    if form == "awq":
        each["qweight"] = (slice(96), ...)
    parts = {name: part[each[name]] if name in each else part for name, part in parts.items()}
    fields: dict[str, Any] = {"group_size": 64}
    if form == "packed-zeros":
        fields = packing.compressed("pack-quantized", packing.INTEGERS | {"group_size": 64})
    assert read(form, parts, (16, 96), **fields).equal(plain[:, :96])


@pytest.mark.parametrize(
    ("size", "block"),
    [
        ((64, 48), (16, 16)),
        ((160, 288), (128, 128)),  # DeepSeek's, cut off: neither 80 nor 96
        ((16, 320), (1, 128)),  # of each output
        ((320, 16), (128, 0)),  # 0: all
        ((7, 64), (2, 32)),  # nothing but 2 makes four of 7
    ],
)
def test_blocks_that_config_json_does_not_say(size: tuple[int, int], block: tuple[int, int]) -> None:
    how = replace(packing.FORMATS["fp8-blocks"], more={"name": "weight_scale_inv", "block": block})
    parts, plain = how.pack(how, torch.randn(size))
    assert read("fp8-blocks", parts, size, weight_block_size=None).equal(plain)


@pytest.mark.parametrize("size", [(96, 64), (64, 96), (88, 64)])
def test_blocks_that_nobody_knows(size: tuple[int, int]) -> None:
    """96 may be 64 and 32, or twice 48; 88 in six may be blocks of 15 to 17."""
    block = (16 if size[0] == 88 else 64, 64)
    how = replace(packing.FORMATS["fp8-blocks"], more={"name": "weight_scale_inv", "block": block})
    parts, plain = how.pack(how, torch.randn(size))
    with pytest.raises(Unsupported, match=r"^m has \d scales for \d\d numbers.* says no weight_block_size .* add it to quantiz"):
        read("fp8-blocks", parts, size, weight_block_size=None)
    assert read("fp8-blocks", parts, size, weight_block_size=list(block)).equal(plain)


@pytest.mark.parametrize("block", [None, [32, 16], [16, 32], [8, 16]])
def test_scales_that_are_not_of_these_blocks(block: list[int] | None) -> None:
    """Seven for ten outputs nothing makes, and what config.json says counts."""
    parts = {"weight": torch.zeros(64, 64).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(4, 4)}
    if block is None:
        parts = {"weight": torch.zeros(10, 64).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(7, 4)}
    with pytest.raises(Unsupported, match=r"^m has \d scales for \d\d numbers, .*: they belong to different models"):
        read("fp8-blocks", parts, tuple(parts["weight"].shape), weight_block_size=block)


def test_bytes_in_groups_of_which_the_last_is_cut_off() -> None:
    how = replace(packing.FORMATS["int8-zeros"], size=64)
    parts, plain = how.pack(how, torch.randn(16, 128))
    parts["weight"] = parts["weight"][:, :96].contiguous()
    fields = packing.compressed("int-quantized", packing.BYTES | {"strategy": "group", "group_size": 64, "symmetric": False})
    assert read("int8-zeros", parts, (16, 96), **fields).equal(plain[:, :96])


def test_zeros_of_gptq_that_are_0() -> None:
    """The ones are taken from whole words, so that a 0 borrows from what stands beside it."""
    for bits, ones in ((4, 0x11111111), (8, 0x01010101)):
        kept = packing.rounded(torch.randn(16, 64), bits, 32, centered=False)
        kept.zeros[::3] = 0
        qzeros = packing.words(kept.zeros.t(), bits) - ones
        parts = {"qweight": packing.words(kept.codes, bits).t(), "qzeros": qzeros, "scales": kept.scales.t().half()}
        found = read("gptq-v2", parts, (16, 64), bits=bits, group_size=32, checkpoint_format="gptq")
        assert found.equal(kept.plain())


def engine_of(model: Decoder, pages: int = 64) -> Engine:
    engine = Engine(model, tiny.CPU, 16, True)
    engine.resize(pages)
    return engine


@torch.inference_mode()
def logits(model: Decoder, tokens: tuple[int, ...]) -> Tensor:
    engine = engine_of(model)
    [sequence], _ = sequences(tokens, 1)
    engine.pool.extend(sequence.pages, len(tokens))
    found = model.logits(engine.forward([Span(sequence, 0, tokens, wanted=len(tokens))]))
    assert found is not None
    return found


@pytest.mark.parametrize("form", ["gptq", "gptq-ordered", "awq", "packed", "packed-ordered", "fp8-blocks", "modelopt-nvfp4"])
def test_logits_are_transformers(form: str, tmp_path: Path) -> None:
    """Of transformers' model with the same numbers."""
    few, plain = packing.checkpoints("llama", form, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    tokens = prompt(1, 40)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits(decoder(few), tokens), expected, rtol=0, atol=1e-4)


OLD_AWQ = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}


@pytest.mark.parametrize("apart", [True, False])
def test_names_that_awq_had_first(apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file of their own, or in config.json."""
    monkeypatch.setattr(packing.FORMATS["awq"], "size", 32)
    few, plain = packing.checkpoints("words-wide", "awq", tmp_path)
    old = OLD_AWQ | {"q_group_size": 32}
    change(few, quantization_config=None if apart else old | {"quant_method": "awq"})
    if apart:
        (few / "quant_config.json").write_text(json.dumps(old))
    found = decoder(few)
    same(found, decoder(plain))
    assert found.shape.quantization == Quantization(method="awq", kind="int4", group=32)


def test_the_newer_names_count_more() -> None:
    both = {"quant_method": "awq", "bits": 4, "group_size": 64, "w_bit": 3, "q_group_size": 32}
    assert quantization({"quantization_config": both}) == Quantization(method="awq", kind="int4", group=64)


@pytest.mark.parametrize(("fields", "words"), [({"w_bit": 3}, "of 3 bits are"), ({"version": "GEMV"}, "version 'gemv'")])
def test_what_is_not_supported_by_awqs_first_names(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    few, _ = packing.checkpoints("llama", "awq", tmp_path)
    change(few, quantization_config=None)
    (few / "quant_config.json").write_text(json.dumps(OLD_AWQ | fields))
    refuses(few, words, "use the model's unquantized weights")


# NVIDIA's ModelOpt, which says what it does in a file of its own

MODELOPT = "hf_quant_config.json"


def modelopt(target: Path, name: str = "qwen2", form: str = "modelopt", **fields: Any) -> tuple[Path, Path]:
    few, plain = packing.checkpoints(name, form, target)
    change(few, quantization_config=None)
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]} | fields
    (few / MODELOPT).write_text(json.dumps({"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": inner}))
    return few, plain


def test_a_file_beside_config_json(tmp_path: Path) -> None:
    few, plain = modelopt(tmp_path)
    same(decoder(few), decoder(plain))
    assert len(few_bits(decoder(few, quantize="fp8"))) == 0  # a CPU unpacks them
    refuses(few, "--quantize int4, but the checkpoint is modelopt with fp8 already", quantize="int4")


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"])
def test_nvfp4_in_a_file_beside_config_json(algorithm: str, tmp_path: Path) -> None:
    few, plain = modelopt(tmp_path, "words-wide", "modelopt-nvfp4", quant_algo=algorithm, group_size=16)
    kinds = [tensor.dtype for tensor in safetensors.torch.load_file(few / WEIGHTS).values()]
    assert kinds.count(torch.uint8) == kinds.count(torch.float8_e4m3fn) == 2 * 7  # all of both layers
    found = decoder(few)
    same(found, decoder(plain))
    assert found.shape.quantization == Quantization(method="modelopt", kind="nvfp4", group=16)


def test_an_output_matrix_of_4_bits(tmp_path: Path) -> None:
    """Of which the shape alone would speak of another model."""
    few, _ = packing.checkpoints("words-wide", "modelopt-nvfp4", tmp_path)
    spoil(few, "lm_head.weight", lambda found: packing.halves(found)[0])
    refuses(few, "tensor lm_head.weight is stored as U8", "no matrix of a layer, of which alone few bits are read")


def test_another_name_of_modelopts_method(tmp_path: Path) -> None:
    few, plain = packing.checkpoints("qwen2", "modelopt-nvfp4", tmp_path)
    broken(few, quant_method="modelopt_fp4")
    same(decoder(few), decoder(plain))


def test_a_producer_in_place_of_a_method(tmp_path: Path) -> None:
    """As ModelOpt 0.31 has written it."""
    few, plain = packing.checkpoints("qwen2", "modelopt", tmp_path)
    change(few, quantization_config={"producer": {"name": "modelopt", "version": "0.31.0"}, "quant_algo": "FP8"})
    same(decoder(few), decoder(plain))
    change(few, quantization_config={"producer": {"name": "another"}, "quant_algo": "FP8"})
    refuses(few, "quant_method null", "use the model's unquantized weights")


@pytest.mark.parametrize("names", [("quantization",), ("quantization", "quantization_config")])
def test_checkpoints_of_mlx(names: tuple[str, ...]) -> None:
    """Which name no method, and the older ones have a field of their own alone."""
    text = configurations.SMALL | {"model_type": "qwen3"}
    few = {name: {"group_size": 64, "bits": 4, "mode": "affine", "model.layers.0.mlp.gate": {"bits": 8}} for name in names}
    seeing = {"architectures": ["InternVLForConditionalGeneration"], "text_config": text}
    for said in (text | {"architectures": ["Qwen3ForCausalLM"]}, seeing):
        shape(said)
        with pytest.raises(Unsupported, match="checkpoints of MLX are not supported: use the model's unquantized weights"):
            shape(said | few)


def test_modules_that_are_left_out(tmp_path: Path) -> None:
    """One of three that we have side by side, and one by itself."""
    few, plain = modelopt(tmp_path, exclude_modules=["lm_head", "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj*"])
    stored, numbers = (safetensors.torch.load_file(folder / WEIGHTS) for folder in (few, plain))
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        stored[f"{name}.weight"] = numbers[f"{name}.weight"]
        del stored[f"{name}.weight_scale"], stored[f"{name}.input_scale"]
    safetensors.torch.save_file(stored, few / WEIGHTS)
    same(decoder(few), decoder(plain))
    for rank in range(2):
        same(made(few, Alone(rank)), made(plain, Alone(rank)))


def test_scales_of_keys_and_values_by_modelopts_names(tmp_path: Path) -> None:
    """Also where nothing else has few bits."""
    few, plain = modelopt(tmp_path, quant_algo=None, kv_cache_quant_algo="FP8")
    stored = safetensors.torch.load_file(plain / WEIGHTS)
    for layer in range(2):
        for name, scale in (("k", 0.5), ("v", 0.25)):
            stored[f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale"] = torch.tensor(scale + layer)
    safetensors.torch.save_file(stored, few / WEIGHTS)
    found = decoder(few)
    assert found.shape.quantization is None
    scales = [layer.attention.scales for layer in found.layers]
    assert all(own is not None and own.equal(torch.tensor([[0.5 + i], [0.25 + i]]).expand(2, 4)) for i, own in enumerate(scales))


@pytest.mark.parametrize("layers", [None, [], {}, {"a": "FP8"}, {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A8_AWQ"}}])
def test_mixtures_of_modelopt_that_are_none(layers: Any, tmp_path: Path) -> None:
    few, _ = modelopt(tmp_path, quant_algo="MIXED_PRECISION", quantized_layers=layers)
    words = "quant_algo 'W4A8_AWQ' is not supported" if layers and "b" in layers else "MIXED_PRECISION has quantized_layers"
    refuses(few, words, "use the model's unquantized weights")


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "W4A8_AWQ", "MXFP8", "FP8_PB_WO"])
def test_other_algorithms_of_modelopt(algorithm: str, tmp_path: Path) -> None:
    few, _ = modelopt(tmp_path, quant_algo=algorithm)
    words = f"ModelOpt's quant_algo '{algorithm}' is not supported, FP8, NVFP4, W4A16_NVFP4, W4A8_NVFP4_FP8 and MIXED_PRECISION of"
    refuses(few, words, "use the model's unquantized weights")


@pytest.mark.parametrize(
    ("text", "words"), [("{", "can't be read"), ("[1]", "holds [1], an object"), ("[" * 9999, "download it again")]
)
def test_a_file_that_is_broken(text: str, words: str, tmp_path: Path) -> None:
    few, _ = modelopt(tmp_path)
    (few / MODELOPT).write_text(text)
    refuses(few, MODELOPT, words)


# Rounded when they are loaded


class Rounded(Weights):
    """A checkpoint whose matrices, or a rank's parts of them, are the nearest of few bits."""

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__(folder, torch.float32, tiny.CPU, lambda read: None)
        self._kind = kind

    def tensor(
        self, name: str, shape: tuple[int, ...], cut: tuple[int, int, int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        found = super().tensor(name, shape, cut, dtype)
        return dequantized(quantize(found, self._kind), torch.float32) if name.endswith(packing.PROJECTIONS) else found


@pytest.mark.parametrize("rank", [WHOLE, Alone(1)])
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_quantize_rounds_the_layers_matrices(kind: str, rank: Ranks) -> None:
    """And nothing else: not tables, biases and norms."""
    folder = tiny.folder("qwen2")
    found, plain = made(folder, rank, quantized=kind), made(folder, rank)
    same(found, Decoder(plain.shape, Rounded(folder, kind), rank, tiny.CPU))
    with pytest.raises(AssertionError):
        same(found, plain)


# Kept as they are stored


def few_bits(model: Decoder) -> list[str]:
    """The weights of a layer that are kept in few bits."""
    layer = model.layers[0]
    named = {**vars(layer), **vars(layer.attention), **vars(layer.mlp)}
    return [name for name, value in named.items() if isinstance(value, Quantized)]


@pytest.mark.parametrize("form", ["gptq", "gptq-ordered", "packed-ordered"])
def test_orders_may_differ_between_matrices_that_are_read_as_one(form: str, tmp_path: Path) -> None:
    """Which GPTQ's never do, since they see the same inputs."""
    few, plain = packing.checkpoints("llama", form, tmp_path)
    end = "weight_g_idx" if form.startswith("packed") else "g_idx"
    name = "model.layers.0.self_attn.k_proj"
    spoil(few, f"{name}.{end}", lambda groups: groups.flip(0))
    stored = safetensors.torch.load_file(few / WEIGHTS)
    parts = {part.removeprefix(f"{name}."): tensor for part, tensor in stored.items() if part.startswith(f"{name}.")}
    wanted = read(form, parts, tuple(safetensors.torch.load_file(plain / WEIGHTS)[f"{name}.weight"].shape))
    spoil(plain, f"{name}.weight", lambda weight: wanted)
    same(decoder(few), decoder(plain))
    same(made(few, Alone(1)), made(plain, Alone(1)))


def test_parts_of_inputs_in_an_order() -> None:
    """Any part of them, in blocks of any size; in the products that are made of them, too."""
    for bits, size, inputs in ((4, 32, 256), (4, 128, 512), (8, 64, 192), (4, 4, 48), (4, 96, 480)):
        how = replace(packing.FORMATS["gptq-ordered"], bits=bits, size=size)
        weight = torch.randn(64, inputs)
        parts, plain = how.pack(how, weight)
        given = {"quantization_config": how.config | {"bits": bits, "group_size": size}}
        source = Held({f"m.{name}": part for name, part in parts.items()})
        for ranks in (1, 2, 3, 4):
            for rank in range(ranks):
                start, stop = rank * inputs // ranks, (rank + 1) * inputs // ranks
                found = matrix(source, "m", (64, inputs), quantization(given), (1, start, stop))
                assert isinstance(found, QuantizedWeight)
                assert found.inputs == stop - start
                assert dequantized(found, torch.float32).equal(plain[:, start:stop])
                x = torch.randn(5, stop - start, dtype=torch.bfloat16)
                laid = lay_out(found, None, Invariance.USUAL, torch.bfloat16)
                assert isinstance(laid, Quantized) is (bits == 4 and size >= 32)
                assert laid.shape == (64, stop - start)
                expected = x.double() @ plain[:, start:stop].double().t()
                torch.testing.assert_close(laid(x).double(), expected, rtol=0, atol=0.03 * inputs**0.5)


@pytest.mark.parametrize("form", ["gptq", "gptq-ordered", "awq", "packed-zeros"])
def test_4_bits_are_kept_beside_bfloat16(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's product of them, on one rank and on two; close to the same numbers in float32."""
    monkeypatch.setattr(packing.FORMATS[form], "size", 32)
    few, plain = packing.checkpoints("words-wide", form, tmp_path)
    model, exact = decoder(few, dtype="bfloat16"), decoder(plain)
    assert len(few_bits(model)) == 4
    assert len(few_bits(made(few, Alone(1), torch.bfloat16))) == 4
    tokens = prompt(2, 50, 2048)
    found, expected = logits(model, tokens), logits(exact, tokens)
    rounded = logits(decoder(plain, dtype="bfloat16"), tokens)
    assert (found - expected).norm() < 1.5 * (rounded - expected).norm()


# Bytes


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
def test_the_plan_knows_the_bytes(name: str, quantize: str, dtype: str) -> None:
    model = decoder(tiny.folder(name), dtype=dtype, quantize=quantize)
    planned = model.shape.weight_bytes(1, 2 if dtype == "bfloat16" else 4, "cpu", dtype, not model.head.shared)
    assert planned == pytest.approx(model.weight_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("name", "form", "size"),
    [
        ("words-wide", "gptq", 64),  # of 192 inputs each rank has one group and a half
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
def test_the_plan_knows_what_ranks_hold(name: str, form: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they cut within a group, whose scales both have. Groups that are too short for products are unpacked."""
    folder = tiny.folder(name)
    if form:
        monkeypatch.setattr(packing.FORMATS[form], "size", size)
        folder, _ = packing.checkpoints(name, form, tmp_path)
        broken(folder, **told(form, size))
    for rank in (WHOLE, Alone(1)):
        model = made(folder, rank, torch.bfloat16, "" if form else "int4")
        packed = not model.head.shared
        planned = model.shape.weight_bytes(rank.size, 2, "cpu", "bfloat16", packed)
        assert planned == pytest.approx(model.weight_bytes, rel=0.003)


def told(form: str, size: int) -> dict[str, Any]:
    """Fields that say how large groups are."""
    if form.startswith("packed"):
        return packing.compressed("pack-quantized", packing.INTEGERS | {"group_size": size})
    return {"group_size": size or -1}


def test_parts_with_too_few_blocks_for_products() -> None:
    """Of 160 inputs in blocks of 16 each of two ranks has five of these, each of five has two."""
    how = Quantization(method="modelopt", kind="nvfp4", group=16)
    assert [how.saved(2, "cuda", "bfloat16", 160, 160 // ranks) > 0 for ranks in (1, 2, 5)] == [True, False, True]
    assert how.saved(2, "cuda", "bfloat16", 4096, 4096) == 2 - 4.5 / 8 - 4 / 4096


# What is wrong, and what helps


def broken(folder: Path, **changes: Any) -> None:
    """Fields of quantization_config; None takes one away."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"] | changes
    change(folder, quantization_config={name: value for name, value in config.items() if value is not None})


def told_tiny(form: str, **changes: Any) -> dict[str, Any]:
    """The same of floats of 4 bits."""
    return packing.compressed(f"{form}-pack-quantized", packing.TINY | changes)


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
        ("nvfp4", told_tiny("nvfp4", group_size=32), ["nvfp4-pack-quantized with group_size 32", "with 16 it is"]),
        ("nvfp4", told_tiny("nvfp4", num_bits=8), ["format 'nvfp4-pack-quantized'", "type 'float' and 8 bits"]),
        ("nvfp4", told_tiny("nvfp4", type="int"), ["format 'nvfp4-pack-quantized'", "type 'int'"]),
        ("nvfp4", {"format": "pack-quantized"}, ["format 'pack-quantized'", "type 'float' and 4 bits"]),
        ("mxfp4", told_tiny("mxfp4", group_size=True), ["mxfp4-pack-quantized with group_size true", "with 32 it is"]),
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
def test_what_is_not_supported(form: str, fields: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    few, _ = packing.checkpoints("llama", form, tmp_path)
    broken(few, **fields)
    refuses(few, *words, "use the model's unquantized weights")


def test_a_config_that_is_no_object(tmp_path: Path) -> None:
    few, _ = packing.checkpoints("llama", "gptq", tmp_path)
    change(few, quantization_config="gptq")
    refuses(few, "quantization_config 'gptq'", "an object is needed")


@pytest.mark.parametrize(("form", "end"), [("gptq", "qweight"), ("packed", "weight_packed")])
def test_a_config_that_does_not_speak_of_few_bits(form: str, end: str, tmp_path: Path) -> None:
    """As those have that keep it in a file of its own."""
    few, _ = packing.checkpoints("llama", form, tmp_path)
    change(few, quantization_config=None)
    refuses(few, f"q_proj.{end} instead of model.layers.0.self_attn.q_proj.weight", "quantization_config")


def spoil(folder: Path, name: str, work: Callable[[Tensor], Tensor | None]) -> None:
    stored = safetensors.torch.load_file(folder / WEIGHTS)
    changed = work(stored.pop(name))
    safetensors.torch.save_file(stored | ({name: changed.contiguous()} if changed is not None else {}), folder / WEIGHTS)


LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("form", "end", "work", "words"),
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
def test_tensors_that_do_not_fit(
    form: str, end: str, work: Callable[[Tensor], Tensor | None], words: list[str], tmp_path: Path
) -> None:
    few, _ = packing.checkpoints("llama", form, tmp_path)
    spoil(few, f"{LAYER}.{end}", work)
    refuses(few, LAYER, *words)


@pytest.mark.parametrize(
    ("form", "end", "work", "words"),
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
def test_floats_of_4_bits_that_do_not_fit(
    form: str, end: str, work: Callable[[Tensor], Tensor | None], words: list[str], tmp_path: Path
) -> None:
    few, _ = packing.checkpoints("words-wide", form, tmp_path)
    spoil(few, f"{LAYER}.{end}", work)
    refuses(few, LAYER, *words)


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda part: part.new_empty(0),
    "empty rows": lambda part: part.new_empty(64, 0),
    "stacked": lambda part: part.reshape(1, 1, -1),
    "in a row": lambda part: torch.cat([part.flatten()] * 3),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("form", packing.FORMATS)
def test_shapes_that_nobody_would_write(form: str, odd: str) -> None:
    """In each part, one line says that it is wrong."""
    how = packing.FORMATS[form]
    parts, _ = how.pack(how, torch.randn(64, 96))
    for name in parts.keys() - {"weight_shape", "input_scale", "input_global_scale"}:
        with pytest.raises(Unsupported, match=r"^[^\n]*\bm\b[^\n]*$"):
            read(form, parts | {name: ODD[odd](parts[name])}, (64, 96))


def test_zeros_that_mean_nothing_in_a_shape_that_nobody_would_write() -> None:
    how = packing.FORMATS["packed-tensor"]
    parts, _ = how.pack(how, torch.randn(64, 48))
    with pytest.raises(Unsupported, match=r"^m has .* zeros \[3, 1\].*: they belong to different models"):
        read("packed-tensor", parts | {"weight_zero_point": torch.zeros(3, dtype=torch.int8)}, (64, 48))


def test_more_groups_than_inputs() -> None:
    parts, _ = packing.gptq(packing.FORMATS["gptq"], torch.randn(64, 48))
    with pytest.raises(Unsupported, match=r"^m has .*: they belong to different models"):
        read("gptq", {name: part for name, part in parts.items() if name != "g_idx"} | {"scales": torch.ones(64, 64)}, (64, 48))
    with pytest.raises(Unsupported, match=r"^m has "):
        read("gptq", parts | {"scales": torch.ones(64, 64)}, (64, 48))


def test_one_row_of_scales_for_blocks_of_outputs() -> None:
    parts = {"weight": torch.zeros(64, 48).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 3)}
    with pytest.raises(Unsupported, match=r"^m has 1 scales for 64 numbers, in blocks of 16: they belong to different models"):
        read("fp8-blocks", parts, (64, 48))
    assert read("fp8-blocks", parts, (64, 48), weight_block_size=[128, 16]).equal(torch.zeros(64, 48))


@pytest.mark.parametrize(
    ("form", "asked", "words"),
    [
        ("gptq", "awq", ["--quantize awq, but the checkpoint is gptq with int4 already", "leave --quantize out"]),
        ("gptq", "fp8", ["--quantize fp8, but the checkpoint is gptq"]),
        ("", "gptq", ["--quantize gptq, but the checkpoint is not quantized", "int4, int8, fp8"]),
    ],
)
def test_a_method_that_is_not_the_checkpoints(form: str, asked: str, words: list[str], tmp_path: Path) -> None:
    folder = packing.checkpoints("llama", form, tmp_path)[0] if form else tiny.folder("llama")
    refuses(folder, *words, quantize=asked)


@pytest.mark.parametrize("asked", ["gptq", "int4", ""])
def test_a_method_that_is(asked: str, tmp_path: Path) -> None:
    few, plain = packing.checkpoints("llama", "gptq", tmp_path)
    same(decoder(few, quantize=asked), decoder(plain))


def test_a_config_as_it_is_written_today(tmp_path: Path) -> None:
    """With fields that say nothing of what is stored."""
    few, plain = packing.checkpoints("llama", "packed", tmp_path)
    more = {"transform_config": {}, "sparsity_config": {}, "kv_cache_scheme": None, "quantization_status": "compressed"}
    broken(few, **more)
    same(decoder(few), decoder(plain))
    broken(few, sparsity_config={"format": "dense", "sparsity_structure": "unstructured"})
    same(decoder(few), decoder(plain))


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
def test_the_plan_knows_each_byte(name: str, dtype: str) -> None:
    """Routers with scores of their own are held in float32; norms without gains or biases as if they had some, and so
    are queries without biases beside latents that have them."""
    model = decoder(tiny.folder(name), dtype=dtype)
    planned = model.shape.weight_bytes(1, 2 if dtype == "bfloat16" else 4, "cpu", dtype, not model.head.shared)
    assert planned == model.weight_bytes
