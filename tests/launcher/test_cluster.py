"""`penstock plan --cluster`: what fits on other machines, and the roofline model, against sums by hand and published figures."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.launcher import cluster, plan, roofline
from penstock.launcher.checkpoint import Checkpoint
from penstock.launcher.cluster import Layout
from penstock.launcher.errors import UsageError
from penstock.launcher.options import Options
from penstock.launcher.roofline import Accelerator, Group
from penstock.shard.models.families import shape

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "max_position_embeddings": 131072}
LLAMA_8B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA_70B = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4"},
}
MEASURED_H200 = "H200 bandwidth=4.3TB/s flops=790T"  # bandwidth and FLOP/s that copies and matrix products reached on an H200
MANY_REQUESTS = Options(max_concurrent_requests=512)


def checkpoint_of(config: dict[str, Any]) -> Checkpoint:
    return Checkpoint(folder=Path("model"), config=config, dtype="bfloat16", bytes=0, files=0, random=True)


def layouts_by_ranks(text: str, config: dict[str, Any], options: Options = MANY_REQUESTS) -> dict[int, Layout]:
    return {each.plan.ranks: each for each in cluster.layouts(options, checkpoint_of(config), cluster.parse(text))}


def table(text: str, config: dict[str, Any], options: Options = MANY_REQUESTS) -> str:
    return cluster.table(options, checkpoint_of(config), "name", cluster.parse(text))


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "kind"),
    [
        ("2 x 8 x H200", 2, 8, "H200"),
        ("1x4xA100-80GB", 1, 4, "A100-80GB"),
        ("8 x h100", 1, 8, "H100"),
        ("L4", 1, 1, "L4"),
        ("3 x 1 x mine memory=48GB bandwidth=864GB/s flops=181T", 3, 1, "mine"),
    ],
)
def test_cluster_descriptions_are_parsed(text: str, nodes: int, gpus: int, kind: str) -> None:
    found = cluster.parse(text)
    assert (found.nodes, found.gpus, found.kind) == (nodes, gpus, kind)


def test_given_figures_override_the_table_of_accelerators() -> None:
    text = "2 x H200 memory=80GiB bandwidth=4.3TB/s flops=790TFLOP/s link=64GB/s network=400Gb/s latency=20us network-latency=0.1ms"
    expected = Accelerator(
        memory=80 << 30,
        bandwidth=4.3e12,
        flops=790e12,
        link=64e9,
        network=50e9,  # bytes
        latency=20e-6,
        network_latency=1e-4,
    )
    for name in cluster.KEYS:
        assert getattr(cluster.parse(text).accelerator, name) == pytest.approx(getattr(expected, name)), name
    assert cluster.parse("H200").accelerator.link == 450e9  # in one direction


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("two H200", "nodes x GPUs of each x kind is needed, such as"),
        ("2 x 8", "nodes x GPUs of each x kind is needed"),
        ("0 x 8 x H200", "0 nodes of 8 GPUs are none"),
        ("H201", "no kind H201; say what it has, such as memory=48GB bandwidth=864GB/s flops=181T, or take one of B200, H200"),
        ("mine memory=48GB flops=1T", "say what it has, such as bandwidth=864GB/s, or"),
        ("H200 speed=1T", "no speed; memory, bandwidth, flops, link, network, latency, network-latency can be said"),
        ("H200 memory=48", "memory=48 is no number with its unit, such as 48GB"),
        ("H200 latency=1", "latency=1 is no number with its unit, such as 20us"),
        ("H200 flops=0T", "flops=0T is no number"),
        (f"{'9' * 5000} x H200", "nodes x GPUs of each x kind is needed"),
        (f"H200 memory={'9' * 400}GB", "GB is no number with its unit, such as 48GB"),
    ],
)
def test_invalid_cluster_description_is_refused(text: str, error: str) -> None:
    with pytest.raises(UsageError) as mistake:
        cluster.parse(text)
    assert f"--cluster {text}" in str(mistake.value)
    assert error in str(mistake.value)


@pytest.mark.parametrize(("streams", "milliseconds", "speed"), [(1, 3.52, 284), (32, 4.49, 7130), (256, 12.9, 19900)])
def test_decode_time_of_an_8b_model(streams: int, milliseconds: float, speed: float) -> None:
    """Expected figures are computed independently, for an H200 as measured: weights 15.0 GB, 128 KiB per token, context 1,024."""
    layout = layouts_by_ranks(MEASURED_H200, LLAMA_8B)[1]
    seconds = roofline.decode(layout.group, cluster.parse(MEASURED_H200).accelerator, streams, 1024)
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.005)
    assert streams / seconds == pytest.approx(speed, rel=0.005)


def test_prefill_time_of_an_8b_model() -> None:
    """As above: 512 tokens take 9.0 ms of matrix products, 9.1 ms in all."""
    layout = layouts_by_ranks(MEASURED_H200, LLAMA_8B)[1]
    assert roofline.prefill(layout.group, cluster.parse(MEASURED_H200).accelerator, 512) * 1e3 == pytest.approx(9.1, rel=0.005)


def test_decode_time_of_a_70b_model_over_8_ranks() -> None:
    layer = 8192 * (64 + 2 * 8) * 128 + 64 * 128 * 8192 + 3 * 8192 * 28672  # matrices
    read = 80 * (layer // 8 + 2 * 8192) + 8192 + 128256 // 8 * 8192  # with norms, and an eighth of the LM head
    layout = layouts_by_ranks("2 x 8 x H200", LLAMA_70B)[8]
    rotary = 131072 * 2 * 128  # cosines and sines of all positions
    assert layout.plan.weight_bytes == 2 * (read + 128256 // 8 * 8192 + rotary)  # and an eighth of the embedding table
    assert layout.plan.token_bytes == 2 * 80 * 128 * 2  # keys and values of one head
    weights = 2 * read / 4.8e12
    keys = 1024 * 40960 / 4.8e12
    reduced = 12e-6 + 2 * 7 / 8 * 8192 * 2 / 450e9
    gathered = 12e-6 + 7 * 128256 // 8 * 2 / 450e9
    expected = weights + keys + 161 * reduced + gathered
    assert roofline.decode(layout.group, cluster.parse("H200").accelerator, 1, 1024) == pytest.approx(expected, rel=1e-6)
    assert expected == pytest.approx(5.58e-3, rel=1e-3)


def test_quantized_weights_take_less_time_to_read() -> None:
    """Of 8 billion parameters, 6.98 are in the layers' matrices: 2 bytes become half a byte, and 5 bytes for each group of 64."""
    unquantized, quantized = (layouts_by_ranks(MEASURED_H200, LLAMA_8B, Options(quantize=quantize))[1] for quantize in ("", "int4"))
    saved_bytes = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) * (2 - 0.5 - 5 / 64)
    assert unquantized.plan.weight_bytes - quantized.plan.weight_bytes == saved_bytes
    accelerator = cluster.parse(MEASURED_H200).accelerator
    for seconds_of in (
        lambda group: roofline.decode(group, accelerator, 1, 1024),
        lambda group: roofline.prefill(group, accelerator, 1),
    ):
        assert seconds_of(unquantized.group) - seconds_of(quantized.group) == pytest.approx(
            saved_bytes / accelerator.bandwidth, rel=1e-3
        )


def test_pages_and_concurrent_sequences_of_a_layout() -> None:
    layout = layouts_by_ranks("1 x 2 x A100-80GB", LLAMA_8B, Options(max_concurrent_requests=512, cuda_graphs="0"))[2]
    free = int((81920 << 20) * 0.9) - layout.plan.weight_bytes
    assert layout.plan.graphs == 0
    assert layout.plan.pages == free // (2 * 32 * 4 * 128 * 2 * 16)
    assert layout.room(1) == 512  # the most that may run at once
    coarse = layouts_by_ranks("A100-80GB", LLAMA_8B, Options(max_concurrent_requests=4096, page_size=1024))[1]
    assert coarse.room(1025) == coarse.plan.pages // 2 < coarse.plan.capacity // 1025  # a sequence takes whole pages


def test_draft_model_takes_its_share_of_memory() -> None:
    draft = checkpoint_of(LLAMA_8B | {"num_hidden_layers": 4})
    options = Options(cuda_graphs="0", max_concurrent_requests=512)
    [without_draft], [with_draft] = (
        cluster.layouts(options, checkpoint_of(LLAMA_8B), cluster.parse("H200"), each) for each in (None, draft)
    )
    free = without_draft.plan.memory - without_draft.plan.weight_bytes
    assert without_draft.plan.pages == free // (16 * 131072)
    draft_shape = shape(draft.config)
    draft_bytes = 2 * (draft_shape.parameters() + draft_shape.rotary_elements)
    assert with_draft.plan.pages == (free - draft_bytes) // (16 * 131072 * 9 // 8)  # an eighth of the layers
    text = cluster.table(options, checkpoint_of(LLAMA_8B), "name", cluster.parse("H200"), draft)
    assert "graphs     draft  keys/values" in text
    assert "a draft model is on rank 0 alone" in text


def test_layouts_have_replicas_of_whole_nodes_or_whole_fractions_of_one() -> None:
    config = LLAMA_8B | {"num_attention_heads": 48, "num_key_value_heads": 24, "head_dim": 128, "intermediate_size": 12288}
    layouts_found = layouts_by_ranks("5 x 8 x H200", config)
    nodes_and_replicas = {ranks: (layout.nodes, layout.replicas) for ranks, layout in layouts_found.items()}
    # Not 12, which would take a node and a half; with 3 two GPUs of each node are idle, with 16 a node is.
    assert nodes_and_replicas == {1: (1, 40), 2: (1, 20), 3: (1, 10), 4: (1, 10), 6: (1, 5), 8: (1, 5), 24: (3, 1)}
    assert "  3      1        10         10" in table("5 x 8 x H200", config)


def test_layouts_with_too_little_memory_are_left_out_or_refused() -> None:
    assert set(layouts_by_ranks("8 x H200", LLAMA_70B)) == {2, 4, 8}
    assert "too little memory with ranks: 1\n" in table("8 x H200", LLAMA_70B)
    with pytest.raises(
        UsageError, match=r"^over 4 ranks: weights take 32.9 GiB and one page .* per rank, but 19.9 GiB may be used"
    ):
        layouts_by_ranks("4 x L4", LLAMA_70B)


def test_num_shard_limits_the_layouts_and_must_divide_nodes() -> None:
    assert set(layouts_by_ranks("2 x 8 x H200", LLAMA_70B, replace(MANY_REQUESTS, num_shard=4))) == {4}
    with pytest.raises(UsageError, match="can't be divided by 3 ranks"):
        layouts_by_ranks("2 x 8 x H200", LLAMA_70B, replace(MANY_REQUESTS, num_shard=3))
    with pytest.raises(UsageError, match="--num-shard 8 does not divide nodes of 3 GPUs evenly: 1, 2 do"):
        layouts_by_ranks("3 x 3 x H200", LLAMA_70B, replace(MANY_REQUESTS, num_shard=8))
    with pytest.raises(UsageError, match="--cluster is for accelerators and 16-bit numbers"):
        layouts_by_ranks("H200", LLAMA_8B, Options(dtype="float32"))


def test_all_reduce_time_within_and_between_nodes() -> None:
    parsed = cluster.parse(
        "2 x 4 x mine memory=1G bandwidth=1T flops=1T link=100GB/s network=10GB/s latency=10us network-latency=50us"
    )
    accelerator = parsed.accelerator
    assert roofline.all_reduce(accelerator, 1, 1, 1e6) == 0
    assert roofline.all_reduce(accelerator, 4, 1, 1e6) == pytest.approx(10e-6 + 1.5e6 / 100e9)
    assert roofline.all_reduce(accelerator, 4, 2, 1e6) == pytest.approx(10e-6 + 1.5e6 / 100e9 + 50e-6 + 0.25e6 / 10e9)
    assert roofline.all_reduce(accelerator, 1, 2, 1e6) == pytest.approx(50e-6 + 1e6 / 10e9)


def group(config: dict[str, Any], ranks: int = 1) -> Group:
    model_shape = shape(config)
    return Group(shape=model_shape, ranks=ranks, nodes=1, item=2, token_bytes=model_shape.kv_elements(ranks) * 2)


def test_number_of_all_reduces_depends_on_the_model_family() -> None:
    """Command R adds up attention and MLP in one all-reduce; MiniMax M2 has one more per layer, of the squares of all heads."""
    accelerator = cluster.parse("4 x mine memory=1G bandwidth=1T flops=1T link=100GB/s latency=10us").accelerator
    llama, command, minimax = (
        group(LLAMA_8B | {"architectures": [f"{name}ForCausalLM"]}, 4) for name in ("Llama", "Cohere", "MiniMaxM2")
    )
    layers, all_reduce_hidden, all_reduce_squares = (
        llama.shape.layers,
        *(roofline.all_reduce(accelerator, 4, 1, 7 * size) for size in (2 * llama.shape.hidden, 8)),
    )
    expected = roofline.exchange(llama, accelerator, 7, 1)
    assert expected == pytest.approx((2 * layers + 1) * all_reduce_hidden + roofline.gather(llama, accelerator, 1))
    assert roofline.exchange(command, accelerator, 7, 1) == pytest.approx(expected - layers * all_reduce_hidden)
    assert roofline.exchange(minimax, accelerator, 7, 1) == pytest.approx(expected + layers * all_reduce_squares)
    assert all_reduce_squares > 10e-6


def test_sliding_window_layers_read_only_the_window() -> None:
    windowed = LLAMA_8B | {"architectures": ["MistralForCausalLM"], "sliding_window": 100}
    assert roofline.context_bytes(group(windowed), 1000) * 10 == roofline.context_bytes(group(LLAMA_8B), 1000)
    accelerator = cluster.parse("H200").accelerator
    assert roofline.prefill(group(windowed), accelerator, 32768) < roofline.prefill(group(LLAMA_8B), accelerator, 32768)


def test_chunked_attention_layers_read_only_a_chunk() -> None:
    """(query, key) pairs are counted by hand; decode reads the average over a chunk."""
    llama4 = {"architectures": ["Llama4ForCausalLM"], "attention_chunk_size": 100, "moe_layers": [], "intermediate_size_mlp": 64}
    chunked_group, full_group = group(LLAMA_8B | llama4), group(LLAMA_8B | llama4 | {"attention_chunk_size": None})
    assert roofline.context_bytes(chunked_group, 100) == roofline.context_bytes(full_group, 100)
    layer_is_chunked = [window > 0 for window in chunked_group.shape.windows]
    share = sum(50.5 if is_chunked else 1000 for is_chunked in layer_is_chunked) / len(layer_is_chunked)
    assert roofline.context_bytes(chunked_group, 1000) == pytest.approx(roofline.context_bytes(full_group, 1000) * share / 1000)
    assert roofline._pairs_of_chunks(1234, 100) == sum(1 + position % 100 for position in range(1234))
    assert roofline._pairs_of_chunks(1234, 0) == roofline._pairs(1234, 0)
    accelerator = cluster.parse("H200").accelerator
    assert roofline.prefill(chunked_group, accelerator, 65_536) < roofline.prefill(full_group, accelerator, 65_536)


def test_sparse_attention_reads_the_selected_tokens_and_all_index_keys() -> None:
    """DeepSeek V3.2 reads 576 elements of each of 2,048 selected tokens, and an index key of 128 elements of every token."""
    config = LLAMA_8B | {"architectures": ["DeepseekV32ForCausalLM"], "num_hidden_layers": 5}
    deepseek = group(config)
    assert roofline.context_bytes(deepseek, 2000) == 2 * 5 * 2000 * 704
    assert roofline.context_bytes(deepseek, 100_000) == 2 * 5 * (2048 * 576 + 100_000 * 128)
    accelerator = cluster.parse("mine memory=1G bandwidth=999999T flops=1T link=1G latency=1us").accelerator
    selected_pairs, all_pairs = 2048 * 2049 // 2 + 2048 * (4096 - 2048), 4096 * 4097 // 2
    attention = 4 * 5 * selected_pairs * 32 * 576 + 2 * 5 * all_pairs * 64 * 128
    matrix_products = 2 * ((deepseek.parameters() - deepseek.head) * 4096 + deepseek.head)
    assert roofline.prefill(deepseek, accelerator, 4096) == pytest.approx(
        (attention + matrix_products) / accelerator.flops, rel=1e-3
    )


def test_tied_embeddings_are_read_as_the_lm_head() -> None:
    assert group(LLAMA_8B | {"tie_word_embeddings": True}).parameters() == group(LLAMA_8B).parameters()


def test_moe_reads_the_experts_that_the_batch_is_routed_to() -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters in all, 3.3 billion of them per token."""
    sizes = {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
    }
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}
    qwen3_moe = group(LLAMA_8B | sizes | experts | {"architectures": ["Qwen3MoeForCausalLM"]})
    assert qwen3_moe.shape.parameters() == pytest.approx(30.53e9, rel=0.001)
    assert qwen3_moe.shape.parameters(tokens=1) == pytest.approx(3.35e9, rel=0.01)
    assert qwen3_moe.shape.described == "Qwen3MoeForCausalLM, 30,532.1 M parameters, 3,353.0 M of them for a token"
    assert qwen3_moe.parameters(4000) == qwen3_moe.shape.parameters() - qwen3_moe.head
    assert qwen3_moe.parameters() < qwen3_moe.parameters(2) < 2 * qwen3_moe.parameters()
    accelerator = cluster.parse("H200").accelerator
    seconds = [roofline.decode(qwen3_moe, accelerator, streams, 1) for streams in (1, 16, 256)]
    assert seconds[0] * 4 < seconds[1] < seconds[2]
    assert seconds[2] == pytest.approx(qwen3_moe.parameters(256) * qwen3_moe.item / accelerator.bandwidth, rel=0.1)


@pytest.mark.parametrize(("experts", "layers", "expected"), [(32, 24, 12.8), (128, 36, 60.8)])
def test_bytes_of_mxfp4_experts(experts: int, layers: int, expected: float) -> None:
    """gpt-oss: the GiB of its model card. A token reads the experts that it is routed to; ranks hold whole blocks of 32."""
    config = GPT_OSS | {"num_local_experts": experts, "num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    one, four = (layouts_by_ranks("4 x H200", config)[ranks] for ranks in (1, 4))
    assert one.plan.weight_bytes / 2**30 == pytest.approx(expected, rel=0.01)
    routed_bytes = layers * 4 * 3 * 2880 * 2880 * (0.5 + 1 / 32)
    other_parameters = one.group.parameters() - layers * 4 * 3 * 2880 * 2880
    assert one.group.read(1) == pytest.approx(routed_bytes + 2 * other_parameters, rel=1e-4)
    expert_bytes_per_column = layers * experts * 3 * 2880 * (0.5 + 1 / 32)
    assert one.group.read(10**6) - four.group.read(10**6) > expert_bytes_per_column * (2880 - 23 * 32)
    assert "fp4 by mxfp4" in plan.table(one.plan, "x")


def test_most_streams_within_a_latency_target() -> None:
    layout, parsed = layouts_by_ranks("H200", LLAMA_8B)[1], cluster.parse("H200")
    streams, seconds = cluster.served(layout, parsed, 1024, 0.010)
    assert 1 < streams < 512
    assert seconds <= 0.010 < roofline.decode(layout.group, parsed.accelerator, streams + 1, 1024)
    assert cluster.served(layout, parsed, 1024, 1e-4) == (0, 0.0)
    assert cluster.served(layout, parsed, 1024, 0.0)[0] == 512


def test_table_marks_the_best_layouts() -> None:
    text = table("2 x 8 x H200", LLAMA_70B)
    assert "2 x 8 x H200: 140.4 GiB, 4.80 TB/s, 989 TFLOP/s" in text
    assert "best for latency     --num-shard 8, 2 replicas: 5.58 ms" in text
    assert "best for throughput  --num-shard 2, 8 replicas:" in text
    [first] = [line for line in text.splitlines() if line.split()[:2] == ["1", "16.47"]][:1]
    assert first.split() == ["1", "16.47", "9.21", "*5.58", "8.68"]
    assert roofline.FORMULA in text
    assert max(map(len, text.splitlines())) <= 140
    assert "*" not in table("H200", LLAMA_8B).partition("how\n")[0]  # a single layout has no best one
    assert "no room for a sequence of 1,024 tokens" in table(
        "mine memory=18GB bandwidth=1T flops=1T", LLAMA_8B, Options(cuda_graphs="0")
    )


def test_cluster_flag_is_accepted_by_plan_and_refused_by_serve() -> None:
    command = [sys.executable, "-m", "penstock.launcher"]
    answer = subprocess.run([*command, "serve", "--cluster", "H200"], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert answer.stderr == "penstock: error: --cluster H200 is for penstock plan: serve runs on this machine\n"
    answer = subprocess.run([*command, "plan", "--cluster", "2 x H200"], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0
    assert "cluster       1 x 2 x H200" in answer.stdout


def test_recurrent_states_are_read_and_written_whatever_the_context_length() -> None:
    """Qwen3-Next: 36 of 48 layers have states, 32 heads of 128 x 128 in float32, and 3 tokens of 8,192 channels in 16 bits."""
    qwen3_next = group(LLAMA_8B | {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 48, "num_key_value_heads": 2})
    accelerator = cluster.parse("H200").accelerator
    assert roofline.context_bytes(qwen3_next, 1000) == 12 * 1000 * 2 * 2 * 256 * 2
    state_bytes = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    bytes_moved = qwen3_next.read(8) + 8 * (12 * 1000 * 2048 + 2 * state_bytes)
    assert roofline.decode(qwen3_next, accelerator, 8, 1000) == pytest.approx(bytes_moved / accelerator.bandwidth, rel=1e-6)
    tokens = 16384
    pairs = 12 * tokens * (tokens + 1) // 2 * 32 * 256
    matrix_products = 2 * ((qwen3_next.parameters() - qwen3_next.head) * tokens + qwen3_next.head)
    expected = matrix_products + 4 * pairs + 36 * 6 * tokens * 32 * 128 * 128
    assert roofline.prefill(qwen3_next, accelerator, tokens) == pytest.approx(expected / accelerator.flops, rel=1e-6)


def test_norm_groups_spread_over_ranks_take_an_all_reduce_per_layer() -> None:
    """Only if a norm group's heads are on several ranks. Prefill of state spaces takes 4 FLOPs per token and state element."""
    hybrid = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_hidden_layers": 10,
        "layer_types": ["mamba"] * 9 + ["attention"],
    }
    accelerator = cluster.parse("2 x H200").accelerator
    one_norm_group, two_norm_groups = (group(LLAMA_8B | hybrid | {"mamba_n_groups": groups}, ranks=2) for groups in (1, 2))
    exchange_seconds = [roofline.exchange(found, accelerator, 1000, 1) for found in (one_norm_group, two_norm_groups)]
    assert exchange_seconds[0] - exchange_seconds[1] == pytest.approx(9 * roofline.all_reduce(accelerator, 2, 1, 4000), rel=1e-6)
    tokens = 1 << 20
    matrix_products = 2 * ((one_norm_group.parameters() - one_norm_group.head) * tokens + one_norm_group.head)
    pairs = tokens * (tokens + 1) // 2 * one_norm_group.shape.heads // 2 * one_norm_group.shape.head_size
    expected = (
        matrix_products
        + 4 * pairs
        + 9 * 4 * tokens * one_norm_group.shape.recurrent.value_heads // 2 * 256 * one_norm_group.shape.recurrent.value_size
    ) / accelerator.flops
    assert roofline.prefill(one_norm_group, accelerator, tokens) == pytest.approx(
        expected + roofline.exchange(one_norm_group, accelerator, tokens, 1), rel=1e-6
    )
