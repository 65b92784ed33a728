"""Reading a checkpoint's files, and planning ranks, number format, memory and pages for a machine; bytes are computed by hand."""

import json
import re
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.launcher import checkpoint, plan
from penstock.launcher.checkpoint import Checkpoint
from penstock.launcher.errors import UsageError
from penstock.launcher.gpus import Gpus
from penstock.launcher.hub import HubWeights
from penstock.launcher.machine import Machine
from penstock.launcher.options import Options
from penstock.shard import graph_sizes

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}
MACHINE = Machine(cores=4, memory=8 << 20, fast_bfloat16=False)
GPUS = replace(MACHINE, gpus=Gpus((4 << 30, 3 << 30)))


def safetensors(path: Path, tensors: dict[str, tuple[str, int]], cut: int = 0) -> None:
    """Writes a file of zeros, `cut` bytes too short. tensors: name -> (dtype, bytes)."""
    header, position = {}, 0
    for name, (dtype, size) in tensors.items():
        numbers = size // checkpoint.ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": [numbers], "data_offsets": [position, position + size]}
        position += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * (position - cut))


def write_config_and_tokenizer(path: Path, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    (path / "tokenizer.json").write_text("{}")
    return path


def complete_checkpoint(path: Path, **config: Any) -> Checkpoint:
    safetensors(write_config_and_tokenizer(path, **config) / "model.safetensors", {"a": ("BF16", 1000), "b": ("F32", 4)})
    return checkpoint.read(path, "auto")


def test_checkpoint_of_a_single_file(tmp_path: Path) -> None:
    model = complete_checkpoint(tmp_path)
    assert (model.dtype, model.bytes, model.files) == ("bfloat16", 1004, 1)


def test_checkpoint_of_files_listed_in_an_index(tmp_path: Path) -> None:
    safetensors(write_config_and_tokenizer(tmp_path) / "one.safetensors", {"a": ("F16", 10)})
    safetensors(tmp_path / "two.safetensors", {"b": ("F16", 20)})
    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    model = checkpoint.read(tmp_path, "auto")
    assert (model.dtype, model.bytes, model.files) == ("float16", 30, 2)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(UsageError, match=r"lacks two.safetensors, which its index names: complete the download"):
        checkpoint.read(tmp_path, "auto")


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = checkpoint.read(tmp_path, "dummy")
    assert (model.dtype, model.bytes, model.files) == ("bfloat16", 0, 0)


def test_plan_works_without_downloading_weights(tmp_path: Path) -> None:
    """Their size is in the index; without one the hub is asked; if it can't say, it is estimated from config.json."""
    replies = [HubWeights(Counter(F16=10, F32=4), 1), HubWeights(Counter(), 0)]
    write_config_and_tokenizer(tmp_path)
    checkpoints = [checkpoint.read(tmp_path, "auto", lambda reply=reply: reply) for reply in replies]  # type: ignore[misc]
    assert [(model.dtype, model.bytes, model.files, model.here) for model in checkpoints] == [
        ("float16", 14, 1, False),
        ("bfloat16", 0, 0, False),
    ]
    index = {"metadata": {"total_size": 3 << 20}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / checkpoint.INDEX).write_text(json.dumps(index))
    checkpoints.append(checkpoint.read(tmp_path, "auto", lambda: pytest.fail("there is an index")))
    tables = [plan.table(plan.divide(Options(), model, MACHINE), "owner/name") for model in checkpoints]
    assert "weights       float16, 14 B in 1 file; not downloaded\n" in tables[0]
    assert "weights       bfloat16, about 169.6 KiB, estimated from config.json; not downloaded\n" in tables[1]
    assert "weights       bfloat16, 3.0 MiB in 2 files; not downloaded\n" in tables[2]
    for name, tensor, size in (("one", "a", 10), ("two", "b", 20)):
        safetensors(tmp_path / f"{name}.safetensors", {tensor: ("F16", size)})
    assert checkpoint.read(tmp_path, "auto", lambda: pytest.fail("all is there")).bytes == 30


@pytest.mark.parametrize("total", ["NaN", "Infinity", "1e300", "-5", '"5"'])
def test_invalid_total_size_of_an_index_is_ignored(tmp_path: Path, total: str) -> None:
    (write_config_and_tokenizer(tmp_path) / checkpoint.INDEX).write_text(
        f'{{"metadata": {{"total_size": {total}}}, "weight_map": {{"a": "one.safetensors"}}}}'
    )
    model = checkpoint.read(tmp_path, "auto", lambda: pytest.fail("there is an index"))
    assert (model.bytes, model.files) == (0, 0)


def test_incomplete_or_broken_folders_are_refused(tmp_path: Path) -> None:
    def error_message() -> str:
        with pytest.raises(UsageError) as caught:
            checkpoint.read(tmp_path, "auto")
        return str(caught.value)

    assert "has no config.json" in error_message()
    (tmp_path / "config.json").write_text("{")
    assert "config.json can't be read" in error_message()
    (tmp_path / "config.json").write_text("[]")
    assert "holds no JSON object" in error_message()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "lacks tokenizer.json: save its tokenizer" in error_message()
    (tmp_path / "tekken.json").touch()
    assert "tekken.json, and lacks tokenizer.json: take a copy" in error_message()
    write_config_and_tokenizer(tmp_path)
    assert "has no weights" in error_message()
    (tmp_path / "pytorch_model.bin").touch()
    assert "only as pytorch_model.bin, a pickle" in error_message()
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"123")
    assert "is no safetensors file, or is cut short" in error_message()
    weights.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert "is no safetensors file, or is cut short" in error_message()
    weights.write_bytes(struct.pack("<Q", 2) + b"{:")
    assert "has a broken header" in error_message()
    weights.write_bytes(struct.pack("<Q", 8) + b'{"a": 1}')
    assert "has a broken header" in error_message()
    safetensors(weights, {"a": ("F32", 40)}, cut=1)
    assert "is cut short, a lies beyond its end" in error_message()
    safetensors(weights, {"a": ("I8", 40)})
    assert "are I8: only F32, BF16, F16 can be loaded" in error_message()
    weights.unlink()
    (tmp_path / checkpoint.INDEX).write_text("{}")
    assert "has no weight_map" in error_message()


def test_weights_memory_and_pages_match_sums_by_hand(tmp_path: Path) -> None:
    """By hand: 2 layers; per token 2 (keys, values) * 2 layers * 2 heads * 16 features = 128 elements."""
    model = complete_checkpoint(tmp_path)
    planned = plan.divide(Options(page_size=4), model, MACHINE)
    attention = 64 * (4 + 2 + 2) * 16 + 64 * 64
    parameters = 2 * (attention + 3 * 64 * 128 + 2 * 64) + 2 * 100 * 64 + 64
    parameters += 256 * 2 * 16  # cosines and sines of all positions
    assert planned.weight_bytes == 4 * parameters
    assert planned.token_bytes == 4 * 128
    assert planned.memory == int(0.9 * (8 << 20))
    assert planned.pages == (planned.memory - 4 * parameters) // (4 * 4 * 128)
    assert planned.capacity == 4 * planned.pages
    assert (planned.device, planned.ranks, planned.dtype) == ("cpu", 1, "float32")


def test_tied_embeddings_are_counted_twice_on_a_cpu_that_repacks_matrices(tmp_path: Path) -> None:
    tied, untied = (complete_checkpoint(tmp_path, tie_word_embeddings=tied) for tied in (True, False))
    bfloat16 = Options(dtype="bfloat16")
    fast_bfloat16, packing_bfloat16 = replace(MACHINE, fast_bfloat16=True), replace(MACHINE, packs_bfloat16=True)
    for options, machine in ((Options(), MACHINE), (bfloat16, fast_bfloat16), (bfloat16, packing_bfloat16)):
        assert plan.divide(options, tied, machine).weight_bytes == plan.divide(options, untied, machine).weight_bytes
    for options in (Options(dtype="bfloat16"), Options(device="cuda", dtype="float32")):
        saved_bytes = plan.divide(options, untied, GPUS).weight_bytes - plan.divide(options, tied, GPUS).weight_bytes
        assert saved_bytes == 100 * 64 * plan.ITEM_BYTES[options.dtype]


MATRICES = 2 * (64 * (4 + 2 + 2) * 16 + 64 * 64 + 3 * 64 * 128)  # elements of the weight matrices of both layers


@pytest.mark.parametrize(
    ("quantize", "dtype", "bits", "description"),
    [
        ("int4", "bfloat16", 4 + 32 / 64, "; rounded to int4"),  # a scale and an offset for each group of 64, both bfloat16
        ("int8", "bfloat16", 16, "; rounded to int8, unpacked to bfloat16 when loaded"),
        ("int4", "float32", 32, "; rounded to int4, unpacked to float32 when loaded; --dtype bfloat16 would keep them"),
    ],
)
def test_bytes_of_weights_quantized_at_load_time(quantize: str, dtype: str, bits: float, description: str, tmp_path: Path) -> None:
    """Only where there is a kernel for them; otherwise they are unpacked. Embeddings and norms are not quantized."""
    model = complete_checkpoint(tmp_path)
    unquantized, quantized = (plan.divide(Options(dtype=dtype, quantize=method), model, MACHINE) for method in ("", quantize))
    assert unquantized.weight_bytes - quantized.weight_bytes == int(MATRICES * (8 * plan.ITEM_BYTES[dtype] - bits) / 8)
    [line] = [line for line in plan.table(quantized, "x").splitlines() if line.startswith("weights")]
    assert line.endswith(description)
    fp8 = plan.divide(Options(dtype="bfloat16", quantize="fp8", device="cuda", num_shard=2, cuda_graphs="0"), model, GPUS)
    bfloat16 = plan.divide(Options(dtype="bfloat16", device="cuda", num_shard=2, cuda_graphs="0"), model, GPUS)
    assert bfloat16.weight_bytes - fp8.weight_bytes == MATRICES // 2


def test_quantized_checkpoint_is_described_and_its_size_estimated(tmp_path: Path) -> None:
    method = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    safetensors(
        write_config_and_tokenizer(tmp_path, quantization_config=method) / "model.safetensors",
        {"a": ("BF16", 1000), "b": ("I32", 4000)},
    )
    model = checkpoint.read(tmp_path, "auto")
    planned = plan.divide(Options(device="cuda"), model, GPUS)
    assert planned.dtype == "bfloat16"
    assert "weights       bfloat16, 4.9 KiB in 1 file; int4 by gptq\n" in plan.table(planned, "x")
    with pytest.raises(UsageError, match=r"--quantize awq, but the checkpoint is gptq with int4 already: leave --quantize out"):
        plan.divide(Options(quantize="awq"), model, MACHINE)
    missing = replace(model, files=0, here=False)
    unquantized, quantized = (
        plan.table(replace(planned, checkpoint=missing, shape=form), "x") for form in (unquantized_shape(planned), planned.shape)
    )
    assert estimated_kib(unquantized) > 1.5 * estimated_kib(quantized)


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"all": {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}},
}


@pytest.mark.parametrize("method", [{"quant_method": "modelopt", "quant_algo": "NVFP4"}, COMPRESSED])
def test_bytes_of_nvfp4_weights(method: dict[str, Any], tmp_path: Path) -> None:
    """On an accelerator 4.5 bits each, and a scale for each output. Weights are unpacked on a CPU, and in float32."""
    unquantized, quantized = complete_checkpoint(tmp_path), complete_checkpoint(tmp_path, quantization_config=method)
    columns = (4 + 2 + 2) * 16 + 2 * 128, 64 + 64  # outputs of a layer's matrices: of those sharded by output, and of the others
    for device, dtype, saved_bytes in (
        ("cuda", "bfloat16", MATRICES * 11.5 / 8 - 2 * sum(columns) * 4),
        ("cpu", "bfloat16", 0),
        ("cuda", "float32", 0),
    ):
        options = Options(device=device, dtype=dtype)
        planned = plan.divide(options, quantized, GPUS)
        assert plan.divide(options, unquantized, GPUS).weight_bytes - planned.weight_bytes == int(saved_bytes)
        description = f"; nvfp4 by {method['quant_method']}" + ("" if saved_bytes else f", unpacked to {dtype} when loaded")
        [line] = [line for line in plan.table(planned, "x").splitlines() if line.startswith("weights")]
        assert description in line
    two = Options(device="cuda", dtype="bfloat16", num_shard=2)
    saved_bytes = plan.divide(two, unquantized, GPUS).weight_bytes - plan.divide(two, quantized, GPUS).weight_bytes
    assert saved_bytes == int(MATRICES / 2 * 11.5 / 8 - 2 * (columns[0] // 2 + columns[1]) * 4)


def test_weights_in_groups_of_16_are_unpacked(tmp_path: Path) -> None:
    """They are unpacked in every number format."""
    method = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    unquantized, quantized = complete_checkpoint(tmp_path), complete_checkpoint(tmp_path, quantization_config=method)
    for device, dtype in (("cpu", "bfloat16"), ("cpu", "float32"), ("cuda", "bfloat16")):
        options = Options(device=device, dtype=dtype)
        planned = plan.divide(options, quantized, GPUS)
        assert f"; int4 by gptq, unpacked to {dtype} when loaded\n" in plan.table(planned, "x")
        assert planned.weight_bytes == plan.divide(options, unquantized, GPUS).weight_bytes


def test_quantization_config_in_a_file_of_its_own(tmp_path: Path) -> None:
    """hf_quant_config.json, as NVIDIA's ModelOpt writes it."""
    tensors = {"a": ("BF16", 1000), "b": ("I8", 1000)}
    safetensors(write_config_and_tokenizer(tmp_path) / "model.safetensors", tensors)
    quantization_file = tmp_path / "hf_quant_config.json"
    quantization_file.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    planned = plan.divide(Options(device="cuda"), checkpoint.read(tmp_path, "auto"), GPUS)
    assert "; fp8 by modelopt\n" in plan.table(planned, "x")
    quantization_file.write_text("{")
    with pytest.raises(UsageError, match=r"hf_quant_config.json can't be read \(.*\): download it again"):
        checkpoint.read(tmp_path, "auto")


def unquantized_shape(planned: plan.Plan) -> Any:
    return replace(planned.shape, quantization=None)


def estimated_kib(table: str) -> float:
    match = re.search(r"about ([\d.]+) KiB, estimated", table)
    assert match
    return float(match[1])


def test_ranks_share_memory_and_kv_heads(tmp_path: Path) -> None:
    planned = plan.divide(Options(num_shard=2), complete_checkpoint(tmp_path), MACHINE)
    assert planned.token_bytes == 4 * 64
    assert planned.memory == int(0.9 * (4 << 20))


def test_threads_per_rank_follow_from_cores_and_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(cores: int = 4, **options: Any) -> int:
        return plan.divide(Options(**options), complete_checkpoint(tmp_path), replace(MACHINE, cores=cores)).threads

    # The model is too small for more than one thread per rank.
    assert [threads(), threads(num_shard=2), threads(num_shard=2, threads=3)] == [1, 1, 3]
    assert plan.divide(Options(device="cuda"), complete_checkpoint(tmp_path), GPUS).threads == GPUS.cores
    parameters_of_a_rank = [plan.shape(complete_checkpoint(tmp_path).config).parameters(count) for count in (1, 2)]
    monkeypatch.setattr(plan, "PER_THREAD", parameters_of_a_rank[0] // 4)
    assert [threads(), threads(cores=2), threads(cores=64)] == [4, 2, 4]
    monkeypatch.setattr(plan, "PER_THREAD", parameters_of_a_rank[1] // 4)
    assert [threads(num_shard=2), threads(num_shard=2, cores=1), threads(num_shard=2, cores=64)] == [2, 1, 4]


def test_table_names_the_number_of_replicas(tmp_path: Path) -> None:
    model = complete_checkpoint(tmp_path)
    replicas_line = "replicas      3 of these ranks; pages and capacity are each one's\n"
    assert replicas_line in plan.table(plan.divide(Options(replicas=3), model, MACHINE), "x")
    assert "\nreplicas" not in plan.table(plan.divide(Options(), model, MACHINE), "x")


def test_pages_are_limited_to_what_concurrent_sequences_can_fill(tmp_path: Path) -> None:
    """256 positions are 16 pages of 16."""
    model = complete_checkpoint(tmp_path)
    large_machine = replace(MACHINE, memory=1 << 40)
    assert plan.divide(Options(), model, large_machine).pages == 128 * 16
    assert plan.divide(Options(max_batch_size=3), model, large_machine).pages == 3 * 16
    explanation = (
        "all sequences that run at once fit, 128 (--max-batch-size) of 256 tokens (--max-total-tokens): more would only keep"
    )
    assert explanation in plan.table(plan.divide(Options(), model, large_machine), "x")
    assert "only keep prefixes" not in plan.table(plan.divide(Options(), model, MACHINE), "x")
    assert plan.divide(Options(max_batch_size=2, max_total_tokens=17), model, large_machine).pages == 2 * 2
    assert plan.divide(Options(max_concurrent_requests=2, max_best_of=3), model, large_machine).pages == 3 * 16


def test_number_of_pages_set_by_options(tmp_path: Path) -> None:
    assert plan.divide(Options(kv_pages=3), complete_checkpoint(tmp_path), MACHINE).capacity == 48
    assert plan.divide(Options(max_batch_total_tokens=50), complete_checkpoint(tmp_path), MACHINE).capacity == 48
    assert plan.divide(Options(max_batch_total_tokens=1), complete_checkpoint(tmp_path), MACHINE).capacity == 16


@pytest.mark.parametrize(
    ("stored", "device", "fast_bfloat16", "option", "expected"),
    [
        ("bfloat16", "cpu", False, "auto", "float32"),
        ("bfloat16", "cpu", True, "auto", "bfloat16"),
        ("float16", "cpu", True, "auto", "float32"),
        ("float32", "cpu", True, "auto", "float32"),
        ("float32", "cpu", False, "bfloat16", "bfloat16"),
        ("bfloat16", "cuda", False, "auto", "bfloat16"),
        ("float16", "cuda", False, "auto", "float16"),
        ("float32", "cuda", False, "auto", "bfloat16"),
        ("bfloat16", "cuda", False, "float32", "float32"),
    ],
)
def test_number_format_by_checkpoint_device_and_option(
    stored: str, device: str, fast_bfloat16: bool, option: str, expected: str, tmp_path: Path
) -> None:
    model = replace(complete_checkpoint(tmp_path), dtype=stored)
    assert plan.divide(Options(dtype=option, device=device), model, replace(GPUS, fast_bfloat16=fast_bfloat16)).dtype == expected


def test_gpus_are_used_and_sharded_as_options_say(tmp_path: Path) -> None:
    model = complete_checkpoint(tmp_path)
    assert plan.divide(Options(), model, MACHINE).device == "cpu"
    assert plan.divide(Options(), model, GPUS).device == "cuda"
    assert plan.divide(Options(device="cpu"), model, GPUS).device == "cpu"
    assert plan.divide(Options(), model, GPUS).ranks == 1
    both = plan.divide(Options(sharded=True), model, GPUS)
    assert both.ranks == 2
    assert both.memory == int(0.9 * (3 << 30))  # of the GPU with less memory
    assert both.graphs > 20
    assert both.token_bytes * both.page_size * both.pages + both.graphs * graph_sizes.GRAPH_BYTES + both.weight_bytes <= both.memory
    assert "graphs" in plan.table(both, "x")
    without = plan.divide(Options(cuda_graphs="0", kv_cache_dtype="fp8_e4m3fn", sharded=True), model, GPUS)
    assert without.graphs == 0
    assert without.token_bytes * 2 == both.token_bytes


@pytest.mark.parametrize("rows", [0, 1, 5, 8, 511, 512, 513, 4096])
def test_decodes_of_all_sizes_have_a_graph_each_as_far_as_there_are_any(rows: int) -> None:
    sizes = graph_sizes.decodes(None, rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1:] == [min(rows, 512)] * (rows > 0)


@pytest.mark.parametrize(
    ("options", "config", "machine", "message"),
    [
        (Options(num_shard=3), {}, MACHINE, "4 attention heads can't be divided by 3 ranks: use --num-shard 1, 2, 4"),
        (
            Options(),
            {"architectures": ["T5ForConditionalGeneration"]},
            MACHINE,
            "architecture T5ForConditionalGeneration is not supported",
        ),
        (
            Options(kv_cache_dtype="fp8_e4m3fn"),
            {"architectures": ["BloomForCausalLM"], "num_key_value_heads": 4},
            MACHINE,
            "ALiBi has more bits than keys of fp8_e4m3fn: leave --kv-cache-dtype out",
        ),
        (Options(), {"hidden_act": "gelu"}, MACHINE, "hidden_act 'gelu' is not supported"),
        (Options(max_total_tokens=257), {}, MACHINE, "--max-total-tokens 257 is more than the model's 256 positions"),
        (Options(max_input_tokens=256), {}, MACHINE, "--max-input-tokens 256 leaves no room for an answer within the model's 256"),
        (Options(device="cuda"), {}, MACHINE, "nvidia-smi shows no GPU here"),
        (Options(num_shard=4), {}, GPUS, "--num-shard 4, but there are 2 GPUs"),
        (Options(sharded=True), {}, MACHINE, "--sharded true needs at least 2 GPUs"),
        (
            Options(kv_pages=1000),
            {},
            MACHINE,
            "1000 pages 7.8 MiB per rank, but 7.2 MiB may be used (90% of 8.0 MiB): lower --kv-pages",
        ),
        (Options(max_batch_total_tokens=16000), {}, MACHINE, "1000 pages 7.8 MiB per rank"),
        (Options(max_batch_total_tokens=16000), {}, MACHINE, ": lower --max-batch-total-tokens"),
        (Options(), {}, replace(MACHINE, memory=300_000), "or halve the weights with --dtype bfloat16"),
        (Options(cuda_memory_fraction=0.0001), {}, MACHINE, "(0.01% of 8.0 MiB): raise --cuda-memory-fraction"),
        (Options(kv_pages=800, cuda_memory_fraction=0.5), {}, MACHINE, "(50% of 8.0 MiB): raise --cuda-memory-fraction"),
        (Options(dtype="bfloat16", num_shard=2), {}, replace(MACHINE, memory=150_000), "or take more ranks with --num-shard"),
        (Options(dtype="bfloat16", num_shard=4), {}, replace(MACHINE, memory=150_000), "or take a smaller model"),
        (
            Options(dtype="bfloat16"),
            {},
            replace(MACHINE, memory=150_000),
            "free memory, round the weights with --quantize int4, or",
        ),
        (
            Options(page_size=48),
            {"architectures": ["Llama4ForCausalLM"], "attention_chunk_size": 64},
            MACHINE,
            "pages of 48 tokens don't divide the 64 positions of which some layers see no others: use --page-size 16",
        ),
        (Options(quantize="gptq"), {}, MACHINE, "--quantize gptq, but the checkpoint is not quantized"),
        (Options(), {"quantization_config": {"quant_method": "exl2"}}, MACHINE, "quant_method 'exl2' are not supported"),
    ],
)
def test_impossible_plans_are_refused_in_one_line(
    options: Options, config: dict[str, Any], machine: Machine, message: str, tmp_path: Path
) -> None:
    model = complete_checkpoint(tmp_path, **config)
    with pytest.raises(UsageError) as caught:
        plan.divide(options, model, machine)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_kv_offload_is_planned_from_host_memory_and_refused_for_recurrent_states(tmp_path: Path) -> None:
    """The host memory for offloaded KV pages."""
    options = Options(kv_offload_gib=1.5, device="cuda", num_shard=2)
    planned = plan.divide(options, complete_checkpoint(tmp_path), GPUS)
    assert planned.offload_bytes == 3 << 28
    assert "  offloaded    768.0 MiB  of the host's memory" in plan.table(planned, "a name").splitlines()
    with pytest.raises(UsageError, match=r"--kv-offload-gib 1e\+06: of this machine's memory .* can be taken"):
        plan.make(Options(kv_offload_gib=1e6), complete_checkpoint(tmp_path))
    linear = complete_checkpoint(tmp_path, architectures=["Qwen3_5ForCausalLM"], num_hidden_layers=4, head_dim=32)
    with pytest.raises(UsageError, match="remembers what is in no page, so pages are of no use alone: leave --kv-offload-gib out"):
        plan.divide(Options(kv_offload_gib=1.0), linear, MACHINE)


def test_table_columns_are_aligned(tmp_path: Path) -> None:
    lines = plan.table(plan.divide(Options(threads=4), complete_checkpoint(tmp_path), MACHINE), "a name").splitlines()
    assert lines[0] == "model         a name"
    assert all(line[13:14] in ("", " ") for line in lines)
    assert "ranks         1, 4 threads each" in lines


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (1 << 50, "1024.0 TiB")]
)
def test_sizes_are_shown_in_binary_units(count: int, text: str) -> None:
    assert plan.size(count) == text


def test_recurrent_states_take_up_to_half_of_the_memory_beside_the_weights(tmp_path: Path) -> None:
    linear = {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4, "head_dim": 32}
    model = complete_checkpoint(tmp_path, **linear, max_position_embeddings=4096)
    planned = plan.divide(Options(max_batch_size=200), model, replace(MACHINE, memory=1 << 29))
    state = planned.shape.state_bytes(1, 4)
    assert planned.state_bytes == state * (1 + planned.sequences + -(-planned.sequences // 4))
    assert 1 < planned.sequences < 200
    left = planned.memory - planned.weight_bytes
    assert left / 2 - 3 * state < planned.state_bytes <= left / 2
    assert planned.pages * planned.page_size * planned.token_bytes <= left - planned.state_bytes
    assert f"of {planned.sequences} sequences at once (--max-batch-size)" in plan.table(planned, "m")
    assert plan.divide(Options(max_batch_size=9), model, replace(MACHINE, memory=1 << 29)).sequences == 9
