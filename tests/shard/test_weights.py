"""Loading checkpoints: single files, shards and dummy weights give the same model, a rank reads only its slices, and invalid or
unsupported checkpoints and configs are refused in one line with a remedy."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from penstock.kernels.linear import Weight
from penstock.shard.config import ShardConfig
from penstock.shard.loading import load
from penstock.shard.models.decoder import Decoder
from penstock.shard.models.families import shape
from penstock.shard.models.holder import held
from penstock.shard.models.shape import Unsupported
from penstock.shard.parallel import Ranks
from penstock.shard.weights import INDEX, DummyWeights, Weights
from penstock.tests.shard import configurations, tiny

WEIGHTS = "model.safetensors"


def load_decoder(folder: Path, **settings: Any) -> Decoder:
    return load(ShardConfig(folder=str(folder), model="m", **settings), lambda stage: None).decoder


def plain_weights(model: Decoder) -> dict[str, Tensor]:
    """Every weight of a decoder, in a plain layout whatever layout it has for its kernels."""
    weights: dict[str, Tensor] = {}
    parts = [("", vars(model)), *((f"{layer.index}.", vars(layer)) for layer in model.layers)]
    parts += [(f"{layer.index}.{i}.", vars(attention)) for layer in model.layers for i, attention in enumerate(layer.readers)]
    mlps = [(f"{layer.index}.mlp.", dict(enumerate(held(layer.mlp)))) for layer in model.layers if layer.mlp]
    for prefix, part in (*parts, *mlps):
        for name, value in part.items():
            if isinstance(value, Weight):  # in whatever layout: its outputs for unit vectors, and for 0 (the bias)
                rows = torch.cat((torch.eye(value.shape[1]), torch.zeros(1, value.shape[1])))
                weights[f"{prefix}{name}"] = value(rows.to(model.embedding.dtype))
            elif isinstance(value, Tensor):
                weights[f"{prefix}{name}"] = value
        if f"{prefix}gating" in weights:  # a separate part of a matrix that other layouts hold as one
            weights[f"{prefix}inward"] = torch.cat((weights[f"{prefix}inward"], weights.pop(f"{prefix}gating")), 1)
    return weights


def assert_same_weights(first: Decoder, second: Decoder, tolerance: float = 0.0) -> None:
    weights, other_weights = plain_weights(first), plain_weights(second)
    assert weights.keys() == other_weights.keys()
    for name in weights:
        torch.testing.assert_close(weights[name], other_weights[name], rtol=0, atol=tolerance, msg=name)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of a checkpoint, for tests that change it."""
    return Path(shutil.copytree(tiny.folder("qwen2"), tmp_path / "model"))


@pytest.fixture
def sharded_checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    tiny.reference("qwen2").save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def test_sharded_checkpoint_loads_as_the_single_file_one(sharded_checkpoint: Path) -> None:
    assert_same_weights(load_decoder(sharded_checkpoint), tiny.decoder("qwen2"))


def test_bfloat16_checkpoint_is_loaded_in_float32_like_transformers_upcast(tmp_path: Path) -> None:
    """The default on CPUs is float32, whatever format is stored."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.folder("qwen2"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    model.float().save_pretrained(tmp_path / "full")
    loaded = load_decoder(tmp_path / "half")
    assert loaded.embedding.dtype == torch.float32
    assert_same_weights(loaded, load_decoder(tmp_path / "full"))
    assert load_decoder(tmp_path / "half", dtype="bfloat16").embedding.dtype == torch.bfloat16


@pytest.mark.parametrize(("small_draft", "dtype"), [(10**6, torch.float32), (0, torch.bfloat16)])
def test_only_draft_models_below_the_size_limit_are_computed_in_float32(
    monkeypatch: pytest.MonkeyPatch, small_draft: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("penstock.shard.loading.SMALL_DRAFT", small_draft)
    folder = str(tiny.folder("llama"))
    config = ShardConfig(folder=folder, model="m", dtype="bfloat16", speculate=f"draft={folder},tokens=2")
    engine = load(config, lambda stage: None)
    assert engine.speculator.drafter is not None
    assert engine.decoder.embedding.dtype == torch.bfloat16
    assert engine.speculator.drafter.decoder.embedding.dtype == dtype


def test_tied_model_uses_the_embedding_table_as_its_output_matrix() -> None:
    model = tiny.decoder("llama-tied")
    torch.testing.assert_close(plain_weights(model)["head"][:-1].t(), model.embedding, rtol=0, atol=0)
    assert "lm_head.weight" not in safetensors.torch.load_file(tiny.folder("llama-tied") / WEIGHTS)


# Slices of ranks


class CountingWeights(Weights):
    """Records the full shape of each tensor that is read, the shape that is returned, and how many elements are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, torch.float32, tiny.CPU, self.count)
        self.read = 0
        self.returned: dict[str, tuple[torch.Size, tuple[int, ...]]] = {}

    def count(self, read: int) -> None:
        self.read += read

    def tensor(
        self, name: str, shape: tuple[int, ...], cut: tuple[int, int, int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        result = super().tensor(name, shape, cut, dtype)
        self.returned[name] = (result.shape, shape)
        return result


class LoadingRank(Ranks):
    """A rank without a process group, which can load weights but not compute."""

    def __init__(self, rank: int, size: int = 2) -> None:
        self.rank = rank
        self.size = size


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_reads_only_its_slices(rank: int) -> None:
    folder = tiny.folder("llama-biases")
    source = CountingWeights(folder)
    model = shape(json.loads((folder / "config.json").read_text()))
    built = Decoder(model, source, LoadingRank(rank), tiny.CPU)
    for name, (returned, full) in source.returned.items():
        replicated = "norm" in name or re.search(r"(o|down)_proj\.bias", name)
        expected_size = torch.Size(full).numel() / (1 if replicated else 2)
        assert returned.numel() == pytest.approx(expected_size, abs=64), name  # half a row: 131 rows of a table, 66 and 65
    biases_of_sums = 0 if rank == 0 else 2 * model.layers * model.hidden
    assert source.read == model.parameters(2) - biases_of_sums
    assert built.weight_bytes == 4 * (source.read + model.rotary_elements)


class InterleavedWeights(Weights):
    """A checkpoint in which the two rotary features of a pair are adjacent in queries and keys."""

    size = 0  # of a head

    def tensor(
        self, name: str, full: tuple[int, ...], part: tuple[int, int, int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        found = super().tensor(name, full, part, dtype)
        if not re.search(r"self_attn\.[qk]_", name):
            return found
        return torch.stack(found.view(-1, self.size, *full[1:]).chunk(2, 1), 2).view_as(found)


@pytest.mark.parametrize("name", ["qwen3", "olmo2"])
def test_interleaved_rotary_features_are_reordered(name: str) -> None:
    """In weights, biases and gains of norms."""
    folder = tiny.folder(name)
    model = replace(shape(json.loads((folder / "config.json").read_text())), rotary_neighbours=True)
    source = InterleavedWeights(folder, torch.float32, tiny.CPU, lambda read: None)
    source.size = model.head_size
    found, expected = (
        model_attention.layers[0].attention
        for model_attention in (Decoder(model, source, Ranks(0, 1, tiny.CPU), tiny.CPU), tiny.decoder(name))
    )
    x = torch.randn(3, 64)
    torch.testing.assert_close(found.inward(x), expected.inward(x))
    for model_attention, other in zip(vars(found).values(), vars(expected).values(), strict=True):
        assert not isinstance(model_attention, Tensor) or model_attention.equal(other)


def test_slices_of_two_ranks_join_to_the_whole_tensor_with_zero_padding() -> None:
    folder = tiny.folder("qwen3")
    source = Weights(folder, torch.float32, tiny.CPU, lambda read: None)
    stored = safetensors.torch.load_file(folder / WEIGHTS)
    for name, dimension in (("model.embed_tokens.weight", 0), ("model.layers.1.mlp.down_proj.weight", 1)):
        full = tuple(stored[name].shape)
        middle = -(-full[dimension] // 2)
        parts = [source.tensor(name, full, (dimension, start, start + middle)) for start in (0, middle)]
        joined = torch.cat(parts, dimension)
        torch.testing.assert_close(joined.narrow(dimension, 0, full[dimension]), stored[name], rtol=0, atol=0)
        assert not joined.narrow(dimension, full[dimension], joined.shape[dimension] - full[dimension]).any()


def test_dummy_weights_of_two_ranks_join_to_the_whole_tensor(tmp_path: Path) -> None:
    dummy = DummyWeights(torch.float32, tiny.CPU, lambda read: None)
    full = dummy.tensor("a.weight", (7, 6))
    torch.testing.assert_close(full, DummyWeights(torch.float32, tiny.CPU, lambda read: None).tensor("a.weight", (7, 6)))
    assert not full.equal(dummy.tensor("b.weight", (7, 6)))
    rows = torch.cat([dummy.tensor("a.weight", (7, 6), (0, start, start + 4)) for start in (0, 4)])
    assert rows[:7].equal(full)
    assert not rows[7:].any()
    columns = torch.cat([dummy.tensor("a.weight", (7, 6), (1, start, start + 3)) for start in (0, 3)], 1)
    assert columns.equal(full)
    shutil.copy(tiny.folder("llama") / "config.json", tmp_path)  # config.json is enough
    assert load_decoder(tmp_path, load_format="dummy").shape == tiny.decoder("llama").shape


# Refusals, with a remedy


def assert_refused(folder: Path, *words: str, **settings: Any) -> None:
    with pytest.raises(Unsupported) as error:
        load_decoder(folder, **settings)
    line = str(error.value)
    assert "\n" not in line
    for word in words:
        assert word in line


def change_config(folder: Path, **fields: Any) -> None:
    """Changes fields of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def test_missing_tensor_is_refused(checkpoint: Path) -> None:
    stored = safetensors.torch.load_file(checkpoint / WEIGHTS)
    del stored["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(stored, checkpoint / WEIGHTS)
    assert_refused(checkpoint, "has no tensor model.layers.1.mlp.up_proj.weight", "is the download complete")


def test_tensor_that_the_index_assigns_to_the_wrong_file_is_refused(sharded_checkpoint: Path) -> None:
    index = json.loads((sharded_checkpoint / INDEX).read_text())
    wrong_file = index["weight_map"]["model.norm.weight"]
    name = "model.embed_tokens.weight"
    assert index["weight_map"][name] != wrong_file
    index["weight_map"][name] = wrong_file
    (sharded_checkpoint / INDEX).write_text(json.dumps(index))
    assert_refused(sharded_checkpoint, name, wrong_file, "download it again")


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensor_of_the_wrong_shape_is_refused(checkpoint: Path, ranks: int) -> None:
    change_config(checkpoint, intermediate_size=90)
    model = shape(json.loads((checkpoint / "config.json").read_text()))
    source = Weights(checkpoint, torch.float32, tiny.CPU, lambda read: None)
    words = r"mlp.gate_proj.weight is \[88, 64\], config.json says \[90, 64\]: is it the model's own\? Download it again"
    with pytest.raises(Unsupported, match=words):
        Decoder(model, source, LoadingRank(0) if ranks == 2 else Ranks(0, 1, tiny.CPU), tiny.CPU)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bool])
def test_8_bit_tensors_without_quantization_config_are_refused(checkpoint: Path, dtype: torch.dtype) -> None:
    """Without their scales the numbers are meaningless."""
    stored = safetensors.torch.load_file(checkpoint / WEIGHTS)
    stored["model.layers.1.mlp.up_proj.weight"] = stored["model.layers.1.mlp.up_proj.weight"].to(dtype)
    safetensors.torch.save_file(stored, checkpoint / WEIGHTS)
    assert_refused(
        checkpoint, "model.layers.1.mlp.up_proj.weight is stored as", "by config.json it is not quantized", "Download it again"
    )


@pytest.mark.parametrize("name", ["model_ema.safetensors", "training_state.safetensors", "zz.safetensors"])
def test_other_safetensors_files_beside_the_models_own_are_ignored(checkpoint: Path, name: str) -> None:
    expected = load_decoder(checkpoint).embedding.clone()
    zeros = {key: torch.zeros_like(tensor) for key, tensor in safetensors.torch.load_file(checkpoint / WEIGHTS).items()}
    safetensors.torch.save_file(zeros, checkpoint / name) if name[0] != "z" else (checkpoint / name).write_bytes(b"no weights")
    assert load_decoder(checkpoint).embedding.equal(expected)


def test_single_file_takes_precedence_over_an_index(checkpoint: Path) -> None:
    """As in transformers: someone who merged shards may have left the index behind."""
    expected = load_decoder(checkpoint).embedding.clone()
    zeros = {key: torch.zeros_like(tensor) for key, tensor in safetensors.torch.load_file(checkpoint / WEIGHTS).items()}
    safetensors.torch.save_file(zeros, checkpoint / "model-00001-of-00001.safetensors")
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(zeros, "model-00001-of-00001.safetensors")}))
    assert load_decoder(checkpoint).embedding.equal(expected)
    (checkpoint / WEIGHTS).unlink()
    assert not load_decoder(checkpoint).embedding.any()


@pytest.mark.parametrize("ranks", [1, 2])
def test_output_matrix_that_differs_from_tied_embeddings_is_refused(tmp_path: Path, ranks: int) -> None:
    """Where a checkpoint has both and they differ, transformers does not tie them; penstock asks which is meant."""
    folder = Path(shutil.copytree(tiny.folder("llama"), tmp_path / "model"))
    stored = safetensors.torch.load_file(folder / WEIGHTS)
    change_config(folder, tie_word_embeddings=True)
    for extra in (0.0, 0.01):
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"] + extra
        safetensors.torch.save_file(stored, folder / WEIGHTS)
        source = Weights(folder, torch.float32, tiny.CPU, lambda read: None)
        model = shape(json.loads((folder / "config.json").read_text()))
        rank = LoadingRank(0) if ranks == 2 else Ranks(0, 1, tiny.CPU)
        if not extra:
            Decoder(model, source, rank, tiny.CPU)
            continue
        with pytest.raises(Unsupported, match=r"there is a lm_head.weight that differs from model.embed_tokens.weight: say false"):
            Decoder(model, source, rank, tiny.CPU)


def test_missing_file_of_a_sharded_checkpoint_is_refused(sharded_checkpoint: Path) -> None:
    missing = min(sharded_checkpoint.glob("*.safetensors"))
    missing.unlink()
    assert_refused(sharded_checkpoint, missing.name, INDEX, "complete the download")


def test_folder_without_safetensors_files_is_refused(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).rename(checkpoint / "pytorch_model.bin")
    assert_refused(checkpoint, "no safetensors files", "convert the checkpoint")


def test_folder_without_config_json_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    assert_refused(checkpoint, "has no config.json", "is it a model's folder?")


@pytest.mark.parametrize("length", [0, 5, 5000])
def test_truncated_weights_file_is_refused(checkpoint: Path, length: int) -> None:
    content = (checkpoint / WEIGHTS).read_bytes()
    (checkpoint / WEIGHTS).write_bytes(content[:length])
    assert_refused(checkpoint, WEIGHTS, "can't be read", "download it again")


def test_corrupt_file_of_a_sharded_checkpoint_is_refused(sharded_checkpoint: Path) -> None:
    corrupt = max(sharded_checkpoint.glob("*.safetensors"))
    corrupt.write_bytes(b"no tensors here, at least not that anyone could read")
    assert_refused(sharded_checkpoint, corrupt.name, "can't be read", "download it again")


@pytest.mark.parametrize("file", ["config.json", INDEX])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b"[]", b"7", b'{"\xe9": 1}', b"[" * 200_000], ids=lambda content: repr(content)[:9]
)
def test_invalid_json_of_config_or_index_is_refused(sharded_checkpoint: Path, file: str, content: bytes) -> None:
    (sharded_checkpoint / file).write_bytes(content)
    assert_refused(
        sharded_checkpoint,
        *(("names no architectures",) if (file, content) == ("config.json", b"{}") else (file, "download it again")),
    )


def test_config_json_that_is_a_folder_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").mkdir()
    assert_refused(checkpoint, "config.json can't be read (Is a directory)", "is it a model's folder")


@pytest.mark.parametrize(("content", "message"), [([], "holds []"), ("no", "holds 'no'"), (None, "holds None")])
def test_config_json_that_is_not_an_object_is_refused(checkpoint: Path, content: Any, message: str) -> None:
    (checkpoint / "config.json").write_text(json.dumps(content))
    assert_refused(checkpoint, "config.json", message, "an object is needed: download it again")


@pytest.mark.parametrize("file", ["a" * 300, "x\0", "\ud83d", ""])
def test_index_entry_that_no_file_can_have_as_its_name_is_refused(sharded_checkpoint: Path, file: str) -> None:
    index = json.loads((sharded_checkpoint / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = file
    (sharded_checkpoint / INDEX).write_text(json.dumps(index))
    assert_refused(sharded_checkpoint, f"lacks {file}", "complete the download")


@pytest.mark.parametrize(("kind", "length"), [("F6_E2M3", 3), ("F4", 2), ("F64", 32)])
def test_scale_of_fewer_bits_than_a_byte_is_refused(tmp_path: Path, kind: str, length: int) -> None:
    header = json.dumps({"k_scale": {"dtype": kind, "shape": [4], "data_offsets": [0, length]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(length))
    source = Weights(tmp_path, torch.float32, tiny.CPU, lambda read: None)
    if length < 4:
        with pytest.raises(Unsupported, match=f"k_scale is stored as {kind}, a number of 8 bits or more"):
            source.scale("k_scale", 4)
    else:
        assert torch.zeros(4).equal(source.scale("k_scale", 4))


@pytest.mark.parametrize("file", [7, None, ["a"], {}, True])
def test_index_entry_that_is_not_a_file_name_is_refused(sharded_checkpoint: Path, file: Any) -> None:
    index = json.loads((sharded_checkpoint / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = file
    (sharded_checkpoint / INDEX).write_text(json.dumps(index))
    assert_refused(sharded_checkpoint, INDEX, f"model.norm.weight is in {file!r}, a file's name is needed", "download it again")


def test_scale_that_the_index_assigns_to_the_wrong_file_is_refused(sharded_checkpoint: Path) -> None:
    index = json.loads((sharded_checkpoint / INDEX).read_text())
    name = "model.layers.0.self_attn.k_scale"
    index["weight_map"][name] = wrong_file = index["weight_map"]["model.norm.weight"]
    (sharded_checkpoint / INDEX).write_text(json.dumps(index))
    source = Weights(sharded_checkpoint, torch.float32, tiny.CPU, lambda read: None)
    with pytest.raises(Unsupported, match=rf"{wrong_file} has no tensor {name} \(.*\): download it again"):
        source.scale(name, 4)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"architectures": ["T5ForConditionalGeneration"]},
            ["T5ForConditionalGeneration is not supported", "LlamaForCausalLM, LlavaForConditionalGeneration"],
        ),
        ({"architectures": None}, ["names no architectures"]),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}},
            ["rotary scaling 'longrope' is not supported", "llama3 and yarn"],
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            ["has both rope_parameters", "and rope_scaling", "differ: leave one of them"],
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters for 'full_attention' by itself"]),
        ({"layer_types": ["full_attention", "chunked_attention"]}, ["layer_types chunked_attention are not supported"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["'sliding_attention' for layer 1", "window is none"]),
        ({"model_type": "llama"}, ["model_type 'llama'", "Qwen2ForCausalLM, which is 'qwen2'"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["quant_method 'hqq' are not supported", "unquantized weights"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu' is not supported", "silu"]),
        ({"num_hidden_layers": None}, ["Qwen2ForCausalLM lacks 'num_hidden_layers'", "complete?"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["lacks 'factor'", "complete?"]),
    ],
)
def test_unsupported_or_incomplete_config_is_refused(checkpoint: Path, fields: dict[str, Any], words: list[str]) -> None:
    change_config(checkpoint, **fields)
    assert_refused(checkpoint, *words)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (3, ["8 attention heads can't be divided by 3 ranks", "--num-shard 1, 2, 4, 8"]),
        (16, ["8 attention heads can't be divided by 16 ranks", "--num-shard 1, 2, 4, 8"]),
    ],
)
def test_ranks_that_do_not_divide_the_attention_heads_are_refused(ranks: int, words: list[str]) -> None:
    assert_refused(tiny.folder("llama"), *words, ranks=ranks)


def test_cuda_without_a_device_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert_refused(tiny.folder("llama"), "torch sees no CUDA device", "--device cpu", device="cuda")


# Configs of older versions of transformers


def test_rope_fields_of_older_configs_are_read() -> None:
    plain = json.loads((tiny.folder("llama") / "config.json").read_text())
    theta = {key: value for key, value in plain.items() if key != "rope_parameters"} | {"rope_theta": 500.0}
    assert shape(theta).rope.theta == 500.0
    assert shape(theta | {"rope_scaling": None}) == shape(theta)
    linear = shape(theta | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert linear.rope == tiny.decoder("llama-linear").shape.rope
    llama3 = {key: value for key, value in configurations.LLAMA3.items() if key != "rope_theta"}
    assert shape(theta | {"rope_theta": 10000.0, "rope_scaling": llama3}).rope == tiny.decoder("llama-3.1").shape.rope


def test_rope_scaling_that_contradicts_rope_parameters_is_refused() -> None:
    """rope_scaling was added to a config that a newer transformers had saved: it is unknown which of the two is meant."""
    config = json.loads((tiny.folder("llama-linear") / "config.json").read_text())
    assert shape(config | {"rope_scaling": config["rope_parameters"]}) == shape(config)
    for other in ({"rope_type": "linear", "factor": 8.0}, {"rope_type": "yarn", "factor": 4.0}, ["x"]):
        with pytest.raises(Unsupported):
            shape(config | {"rope_scaling": other})


def test_layer_types_that_contradict_the_sliding_windows_are_refused() -> None:
    """transformers' Mistral has a sliding window in all layers whatever layer_types says; its Qwen raises an error."""
    config = json.loads((tiny.folder("mistral") / "config.json").read_text())
    layer_types = ["sliding_attention", "full_attention"]
    assert shape(config | {"layer_types": layer_types[:1] * 2}).windows == (configurations.WINDOW,) * 2
    with pytest.raises(Unsupported, match=f"'full_attention' for layer 1, .*window is {configurations.WINDOW}"):
        shape(config | {"layer_types": layer_types})
    config = json.loads((tiny.folder("qwen2-window") / "config.json").read_text())
    with pytest.raises(Unsupported, match=r"'sliding_attention' for layer 1, .*window is none"):
        shape(config | {"use_sliding_window": False})


def test_sliding_window_defaults_are_those_of_transformers() -> None:
    config = json.loads((tiny.folder("qwen2-window") / "config.json").read_text())
    del config["layer_types"], config["sliding_window"]
    assert shape(config | {"max_window_layers": 1}).windows == (0, 4096)
    del config["max_window_layers"]
    assert shape(config).windows == (0, 0)  # from layer 28 on
    with pytest.raises(Unsupported, match="max_window_layers null"):
        shape(config | {"max_window_layers": None})


def test_sliding_windows_without_layer_types_follow_max_window_layers() -> None:
    """Without `layer_types`, the first max_window_layers layers have full attention."""
    config = json.loads((tiny.folder("qwen2-window") / "config.json").read_text())
    del config["layer_types"]
    assert shape(config).windows == tiny.decoder("qwen2-window").shape.windows == (0, configurations.WINDOW)
    assert shape(config | {"use_sliding_window": False}).windows == (0, 0)
    assert tiny.decoder("mistral").shape.windows == (configurations.WINDOW,) * 2
