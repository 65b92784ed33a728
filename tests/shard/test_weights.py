"""Checkpoints: every layout loads to the same model, a rank reads only its slices, and whatever is wrong is named in one line."""

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
from penstock.shard.models.shape import Unsupported
from penstock.shard.parallel import Ranks
from penstock.shard.weights import INDEX, DummyWeights, Weights
from penstock.tests.shard import configurations, tiny

WEIGHTS = "model.safetensors"


def decoder(folder: Path, **settings: Any) -> Decoder:
    return load(ShardConfig(folder=str(folder), model="m", **settings), lambda stage: None).decoder


def tensors(model: Decoder) -> dict[str, Tensor]:
    """Every weight, in its plain layout."""
    found: dict[str, Tensor] = {}
    parts = [("", vars(model)), *((f"{layer.index}.", vars(layer)) for layer in model.layers)]
    parts += [(f"{layer.index}.{i}.", vars(one)) for layer in model.layers for i, one in enumerate(layer.readers)]
    mlps = [(f"{layer.index}.mlp.", dict(enumerate(layer.mlp.weights()))) for layer in model.layers if layer.mlp]
    for prefix, part in (*parts, *mlps):
        for name, value in part.items():
            if isinstance(value, Weight):  # whatever its layout: what it makes of unit vectors
                rows = torch.cat((torch.eye(value.shape[1]), torch.zeros(1, value.shape[1])))
                found[f"{prefix}{name}"] = value(rows.to(model.embedding.dtype))
            elif isinstance(value, Tensor):
                found[f"{prefix}{name}"] = value
        if f"{prefix}gating" in found:  # which is a part of it elsewhere
            found[f"{prefix}inward"] = torch.cat((found[f"{prefix}inward"], found.pop(f"{prefix}gating")), 1)
    return found


def same(first: Decoder, second: Decoder, tolerance: float = 0.0) -> None:
    one, other = tensors(first), tensors(second)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=tolerance, msg=name)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkpoint to be spoiled."""
    return Path(shutil.copytree(tiny.folder("qwen2"), tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    target = tmp_path / "sharded"
    tiny.reference("qwen2").save_pretrained(target, max_shard_size="60KB")
    assert len(list(target.glob("*.safetensors"))) > 3
    return target


def test_a_sharded_checkpoint_is_the_same_model(sharded: Path) -> None:
    same(decoder(sharded), tiny.decoder("qwen2"))


def test_a_bfloat16_checkpoint_is_the_same_model_in_float32(tmp_path: Path) -> None:
    """Computed in float32 whatever it is stored in; equal to transformers' own upcast."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.folder("qwen2"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    model.float().save_pretrained(tmp_path / "full")
    half = decoder(tmp_path / "half")
    assert half.embedding.dtype == torch.float32
    same(half, decoder(tmp_path / "full"))
    assert decoder(tmp_path / "half", dtype="bfloat16").embedding.dtype == torch.bfloat16


@pytest.mark.parametrize(("most", "dtype"), [(10**6, torch.float32), (0, torch.bfloat16)])
def test_a_small_draft_model_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch, most: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr("penstock.shard.loading.SMALL_DRAFT", most)
    folder = str(tiny.folder("llama"))
    config = ShardConfig(folder=folder, model="m", dtype="bfloat16", speculate=f"draft={folder},tokens=2")
    engine = load(config, lambda stage: None)
    assert engine.speculator.drafter is not None
    assert engine.decoder.embedding.dtype == torch.bfloat16
    assert engine.speculator.drafter.decoder.embedding.dtype == dtype


def test_a_tied_model_has_no_second_table() -> None:
    model = tiny.decoder("llama-tied")
    torch.testing.assert_close(tensors(model)["head"][:-1].t(), model.embedding, rtol=0, atol=0)
    assert "lm_head.weight" not in safetensors.torch.load_file(tiny.folder("llama-tied") / WEIGHTS)


# Slices


class Counting(Weights):
    """Notes the full shape of what is asked for, and what is handed out."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, torch.float32, tiny.CPU, self.count)
        self.read = 0
        self.given: dict[str, tuple[torch.Size, tuple[int, ...]]] = {}

    def count(self, read: int) -> None:
        self.read += read

    def tensor(
        self, name: str, shape: tuple[int, ...], cut: tuple[int, int, int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        result = super().tensor(name, shape, cut, dtype)
        self.given[name] = (result.shape, shape)
        return result


class Alone(Ranks):
    """A rank that only loads."""

    def __init__(self, rank: int, size: int = 2) -> None:
        self.rank = rank
        self.size = size


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_only_its_slices(rank: int) -> None:
    folder = tiny.folder("llama-biases")
    source = Counting(folder)
    model = shape(json.loads((folder / "config.json").read_text()))
    built = Decoder(model, source, Alone(rank), tiny.CPU)
    for name, (given, full) in source.given.items():
        whole = "norm" in name or re.search(r"(o|down)_proj\.bias", name)
        wanted = torch.Size(full).numel() / (1 if whole else 2)
        assert given.numel() == pytest.approx(wanted, abs=64), name  # half a row: 131 rows of a table, 66 and 65
    biases_of_sums = 0 if rank == 0 else 2 * model.layers * model.hidden
    assert source.read == model.parameters(2) - biases_of_sums
    assert built.weight_bytes == 4 * (source.read + model.rotary_elements)


class Interleaved(Weights):
    """A checkpoint in which features of queries and keys that turn together stand side by side."""

    size = 0  # of a head

    def tensor(
        self, name: str, full: tuple[int, ...], part: tuple[int, int, int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        found = super().tensor(name, full, part, dtype)
        if not re.search(r"self_attn\.[qk]_", name):
            return found
        return torch.stack(found.view(-1, self.size, *full[1:]).chunk(2, 1), 2).view_as(found)


@pytest.mark.parametrize("name", ["qwen3", "olmo2"])
def test_features_of_heads_are_put_in_order(name: str) -> None:
    """Of weights, biases and gains alike."""
    folder = tiny.folder(name)
    model = replace(shape(json.loads((folder / "config.json").read_text())), rotary_neighbours=True)
    source = Interleaved(folder, torch.float32, tiny.CPU, lambda read: None)
    source.size = model.head_size
    found, expected = (
        own.layers[0].attention for own in (Decoder(model, source, Ranks(0, 1, tiny.CPU), tiny.CPU), tiny.decoder(name))
    )
    x = torch.randn(3, 64)
    torch.testing.assert_close(found.inward(x), expected.inward(x))
    for own, other in zip(vars(found).values(), vars(expected).values(), strict=True):
        assert not isinstance(own, Tensor) or own.equal(other)


def test_the_slices_of_two_ranks_are_the_whole() -> None:
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


def test_dummy_weights_of_two_ranks_fit_together(tmp_path: Path) -> None:
    dummy = DummyWeights(torch.float32, tiny.CPU, lambda read: None)
    full = dummy.tensor("a.weight", (7, 6))
    torch.testing.assert_close(full, DummyWeights(torch.float32, tiny.CPU, lambda read: None).tensor("a.weight", (7, 6)))
    assert not full.equal(dummy.tensor("b.weight", (7, 6)))
    rows = torch.cat([dummy.tensor("a.weight", (7, 6), (0, start, start + 4)) for start in (0, 4)])
    assert rows[:7].equal(full)
    assert not rows[7:].any()
    columns = torch.cat([dummy.tensor("a.weight", (7, 6), (1, start, start + 3)) for start in (0, 3)], 1)
    assert columns.equal(full)
    shutil.copy(tiny.folder("llama") / "config.json", tmp_path)  # a config alone is enough
    assert decoder(tmp_path, load_format="dummy").shape == tiny.decoder("llama").shape


# What is wrong, and what helps


def refuses(folder: Path, *words: str, **settings: Any) -> None:
    with pytest.raises(Unsupported) as error:
        decoder(folder, **settings)
    line = str(error.value)
    assert "\n" not in line
    for word in words:
        assert word in line


def change(folder: Path, **fields: Any) -> None:
    """Fields of config.json; None takes one away."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def test_a_missing_tensor(copy: Path) -> None:
    stored = safetensors.torch.load_file(copy / WEIGHTS)
    del stored["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(stored, copy / WEIGHTS)
    refuses(copy, "has no tensor model.layers.1.mlp.up_proj.weight", "is the download complete")


def test_a_tensor_that_the_index_puts_elsewhere(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    other = index["weight_map"]["model.norm.weight"]
    name = "model.embed_tokens.weight"
    assert index["weight_map"][name] != other
    index["weight_map"][name] = other
    (sharded / INDEX).write_text(json.dumps(index))
    refuses(sharded, name, other, "download it again")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wrong_shape(copy: Path, ranks: int) -> None:
    change(copy, intermediate_size=90)
    model = shape(json.loads((copy / "config.json").read_text()))
    source = Weights(copy, torch.float32, tiny.CPU, lambda read: None)
    with pytest.raises(Unsupported, match=r"mlp.gate_proj.weight is \[88, 64\], config.json says \[90, 64\]: they belong to"):
        Decoder(model, source, Alone(0) if ranks == 2 else Ranks(0, 1, tiny.CPU), tiny.CPU)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bool])
def test_quantized_tensors_without_a_word_in_the_config(copy: Path, dtype: torch.dtype) -> None:
    """Their scales are elsewhere: without these they are nonsense."""
    stored = safetensors.torch.load_file(copy / WEIGHTS)
    stored["model.layers.1.mlp.up_proj.weight"] = stored["model.layers.1.mlp.up_proj.weight"].to(dtype)
    safetensors.torch.save_file(stored, copy / WEIGHTS)
    refuses(copy, "model.layers.1.mlp.up_proj.weight is stored as", "by config.json it is not quantized", "Download it again")


@pytest.mark.parametrize("name", ["model_ema.safetensors", "training_state.safetensors", "zz.safetensors"])
def test_only_the_models_own_file_is_read(copy: Path, name: str) -> None:
    expected = decoder(copy).embedding.clone()
    other = {key: torch.zeros_like(tensor) for key, tensor in safetensors.torch.load_file(copy / WEIGHTS).items()}
    safetensors.torch.save_file(other, copy / name) if name[0] != "z" else (copy / name).write_bytes(b"no weights")
    assert decoder(copy).embedding.equal(expected)


def test_a_single_file_counts_more_than_an_index(copy: Path) -> None:
    """As in transformers: whoever merges parts may leave their index."""
    expected = decoder(copy).embedding.clone()
    zeros = {key: torch.zeros_like(tensor) for key, tensor in safetensors.torch.load_file(copy / WEIGHTS).items()}
    safetensors.torch.save_file(zeros, copy / "model-00001-of-00001.safetensors")
    (copy / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(zeros, "model-00001-of-00001.safetensors")}))
    assert decoder(copy).embedding.equal(expected)
    (copy / WEIGHTS).unlink()
    assert not decoder(copy).embedding.any()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_output_matrix_beside_tied_embeddings(tmp_path: Path, ranks: int) -> None:
    """transformers does not tie where both are there and differ: who says otherwise is asked which is meant."""
    folder = Path(shutil.copytree(tiny.folder("llama"), tmp_path / "model"))
    stored = safetensors.torch.load_file(folder / WEIGHTS)
    change(folder, tie_word_embeddings=True)
    for extra in (0.0, 0.01):
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"] + extra
        safetensors.torch.save_file(stored, folder / WEIGHTS)
        source = Weights(folder, torch.float32, tiny.CPU, lambda read: None)
        model = shape(json.loads((folder / "config.json").read_text()))
        own = Alone(0) if ranks == 2 else Ranks(0, 1, tiny.CPU)
        if not extra:
            Decoder(model, source, own, tiny.CPU)
            continue
        with pytest.raises(Unsupported, match=r"there is a lm_head.weight that differs from model.embed_tokens.weight: say false"):
            Decoder(model, source, own, tiny.CPU)


def test_a_missing_file(sharded: Path) -> None:
    gone = min(sharded.glob("*.safetensors"))
    gone.unlink()
    refuses(sharded, gone.name, INDEX, "complete the download")


def test_no_file_at_all(copy: Path) -> None:
    (copy / WEIGHTS).rename(copy / "pytorch_model.bin")
    refuses(copy, "no safetensors files", "convert the checkpoint")


def test_no_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    refuses(copy, "has no config.json", "is it a model's folder?")


@pytest.mark.parametrize("length", [0, 5, 5000])
def test_a_corrupt_file(copy: Path, length: int) -> None:
    content = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(content[:length])
    refuses(copy, WEIGHTS, "can't be read", "download it again")


def test_a_corrupt_file_of_several(sharded: Path) -> None:
    spoilt = max(sharded.glob("*.safetensors"))
    spoilt.write_bytes(b"no tensors here, at least not that anyone could read")
    refuses(sharded, spoilt.name, "can't be read", "download it again")


@pytest.mark.parametrize("file", ["config.json", INDEX])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b"[]", b"7", b'{"\xe9": 1}', b"[" * 200_000], ids=lambda content: repr(content)[:9]
)
def test_json_of_an_interrupted_download(sharded: Path, file: str, content: bytes) -> None:
    (sharded / file).write_bytes(content)
    refuses(sharded, *(("names no architectures",) if (file, content) == ("config.json", b"{}") else (file, "download it again")))


def test_a_config_that_is_no_file(copy: Path) -> None:
    (copy / "config.json").unlink()
    (copy / "config.json").mkdir()
    refuses(copy, "config.json can't be read (Is a directory)", "is it a model's folder")


@pytest.mark.parametrize(("content", "said"), [([], "holds []"), ("no", "holds 'no'"), (None, "holds None")])
def test_a_config_that_is_no_object(copy: Path, content: Any, said: str) -> None:
    (copy / "config.json").write_text(json.dumps(content))
    refuses(copy, "config.json", said, "an object is needed: download it again")


@pytest.mark.parametrize("file", [7, None, ["a"], {}, True])
def test_an_index_that_names_no_file(sharded: Path, file: Any) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = file
    (sharded / INDEX).write_text(json.dumps(index))
    refuses(sharded, INDEX, f"model.norm.weight is in {file!r}, a file's name is needed", "download it again")


def test_a_scale_that_the_index_puts_elsewhere(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    name = "model.layers.0.self_attn.k_scale"
    index["weight_map"][name] = other = index["weight_map"]["model.norm.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    source = Weights(sharded, torch.float32, tiny.CPU, lambda read: None)
    with pytest.raises(Unsupported, match=rf"{other} has no tensor {name} \(.*\): download it again"):
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
def test_what_the_decoder_does_not_have(copy: Path, fields: dict[str, Any], words: list[str]) -> None:
    change(copy, **fields)
    refuses(copy, *words)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (3, ["8 attention heads can't be divided by 3 ranks", "--num-shard 1, 2, 4, 8"]),
        (16, ["8 attention heads can't be divided by 16 ranks", "--num-shard 1, 2, 4, 8"]),
    ],
)
def test_heads_that_the_ranks_do_not_divide(ranks: int, words: list[str]) -> None:
    refuses(tiny.folder("llama"), *words, ranks=ranks)


def test_no_cuda_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    refuses(tiny.folder("llama"), "torch sees no CUDA device", "--device cpu", device="cuda")


# Configs of older transformers


def test_rotary_settings_of_older_configs() -> None:
    plain = json.loads((tiny.folder("llama") / "config.json").read_text())
    theta = {key: value for key, value in plain.items() if key != "rope_parameters"} | {"rope_theta": 500.0}
    assert shape(theta).rope.theta == 500.0
    assert shape(theta | {"rope_scaling": None}) == shape(theta)
    linear = shape(theta | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert linear.rope == tiny.decoder("llama-linear").shape.rope
    llama3 = {key: value for key, value in configurations.LLAMA3.items() if key != "rope_theta"}
    assert shape(theta | {"rope_theta": 10000.0, "rope_scaling": llama3}).rope == tiny.decoder("llama-3.1").shape.rope


def test_rotary_settings_that_stand_twice() -> None:
    """One of them was added to a config that newer transformers had saved: nobody can say which is meant."""
    config = json.loads((tiny.folder("llama-linear") / "config.json").read_text())
    assert shape(config | {"rope_scaling": config["rope_parameters"]}) == shape(config)
    for other in ({"rope_type": "linear", "factor": 8.0}, {"rope_type": "yarn", "factor": 4.0}, ["x"]):
        with pytest.raises(Unsupported):
            shape(config | {"rope_scaling": other})


def test_kinds_of_layers_that_contradict_the_windows() -> None:
    """transformers' Mistral slides in all layers, whatever they are called; its Qwen stops."""
    config = json.loads((tiny.folder("mistral") / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"]
    assert shape(config | {"layer_types": kinds[:1] * 2}).windows == (configurations.WINDOW,) * 2
    with pytest.raises(Unsupported, match=f"'full_attention' for layer 1, .*window is {configurations.WINDOW}"):
        shape(config | {"layer_types": kinds})
    config = json.loads((tiny.folder("qwen2-window") / "config.json").read_text())
    with pytest.raises(Unsupported, match=r"'sliding_attention' for layer 1, .*window is none"):
        shape(config | {"use_sliding_window": False})


def test_windows_have_transformers_defaults() -> None:
    config = json.loads((tiny.folder("qwen2-window") / "config.json").read_text())
    del config["layer_types"], config["sliding_window"]
    assert shape(config | {"max_window_layers": 1}).windows == (0, 4096)
    del config["max_window_layers"]
    assert shape(config).windows == (0, 0)  # from layer 28 on
    with pytest.raises(Unsupported, match="max_window_layers null"):
        shape(config | {"max_window_layers": None})


def test_windows_of_older_configs() -> None:
    """Without `layer_types`: by the layer's number."""
    config = json.loads((tiny.folder("qwen2-window") / "config.json").read_text())
    del config["layer_types"]
    assert shape(config).windows == tiny.decoder("qwen2-window").shape.windows == (0, configurations.WINDOW)
    assert shape(config | {"use_sliding_window": False}).windows == (0, 0)
    assert tiny.decoder("mistral").shape.windows == (configurations.WINDOW,) * 2
