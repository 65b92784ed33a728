"""Plans for machines elsewhere: what fits, and the roofline, against numbers from other hands."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.launcher import cluster, plan, roofline
from penstock.launcher.checkpoint import Checkpoint
from penstock.launcher.cluster import Layout
from penstock.launcher.mistake import Mistake
from penstock.launcher.options import Options
from penstock.launcher.roofline import Accelerator, Group
from penstock.shard.models.families import shape

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "max_position_embeddings": 131072}
SMALL = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LARGE = LLAMA | {
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
MEASURED = "H200 bandwidth=4.3TB/s flops=790T"  # what copies and products reached on one
MANY = Options(max_concurrent_requests=512)


def model(config: dict[str, Any]) -> Checkpoint:
    return Checkpoint(folder=Path("model"), config=config, dtype="bfloat16", bytes=0, files=0, random=True)


def layouts(text: str, config: dict[str, Any], options: Options = MANY) -> dict[int, Layout]:
    return {each.plan.ranks: each for each in cluster.layouts(options, model(config), cluster.parse(text))}


def table(text: str, config: dict[str, Any], options: Options = MANY) -> str:
    return cluster.table(options, model(config), "name", cluster.parse(text))


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
def test_descriptions(text: str, nodes: int, gpus: int, kind: str) -> None:
    found = cluster.parse(text)
    assert (found.nodes, found.gpus, found.kind) == (nodes, gpus, kind)


def test_what_the_operator_says_wins() -> None:
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
    assert cluster.parse("H200").accelerator.link == 450e9  # one direction


@pytest.mark.parametrize(
    ("text", "complaint"),
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
    ],
)
def test_a_wrong_description(text: str, complaint: str) -> None:
    with pytest.raises(Mistake) as mistake:
        cluster.parse(text)
    assert f"--cluster {text}" in str(mistake.value)
    assert complaint in str(mistake.value)


@pytest.mark.parametrize(("streams", "milliseconds", "speed"), [(1, 3.52, 284), (32, 4.49, 7130), (256, 12.9, 19900)])
def test_decoding_of_8_billion_parameters(streams: int, milliseconds: float, speed: float) -> None:
    """The figures for an H200 as it measures, worked out by somebody else: weights 15.0 GB, 128 KiB a token, context 1,024."""
    layout = layouts(MEASURED, SMALL)[1]
    seconds = roofline.decode(layout.group, cluster.parse(MEASURED).accelerator, streams, 1024)
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.005)
    assert streams / seconds == pytest.approx(speed, rel=0.005)


def test_a_prompt_of_8_billion_parameters() -> None:
    """Likewise: 512 tokens take 9.0 ms of products, 9.1 together."""
    layout = layouts(MEASURED, SMALL)[1]
    assert roofline.prefill(layout.group, cluster.parse(MEASURED).accelerator, 512) * 1e3 == pytest.approx(9.1, rel=0.005)


def test_70_billion_parameters_over_eight_ranks_by_hand() -> None:
    layer = 8192 * (64 + 2 * 8) * 128 + 64 * 128 * 8192 + 3 * 8192 * 28672  # matrices
    read = 80 * (layer // 8 + 2 * 8192) + 8192 + 128256 // 8 * 8192  # and norms, and an eighth of the output matrix
    layout = layouts("2 x 8 x H200", LARGE)[8]
    rotary = 131072 * 2 * 128  # cosines and sines of all positions
    assert layout.plan.weight_bytes == 2 * (read + 128256 // 8 * 8192 + rotary)  # and an eighth of the embedding table
    assert layout.plan.token_bytes == 2 * 80 * 128 * 2  # a head's keys and values
    weights = 2 * read / 4.8e12
    keys = 1024 * 40960 / 4.8e12
    reduced = 12e-6 + 2 * 7 / 8 * 8192 * 2 / 450e9
    gathered = 12e-6 + 7 * 128256 // 8 * 2 / 450e9
    expected = weights + keys + 161 * reduced + gathered
    assert roofline.decode(layout.group, cluster.parse("H200").accelerator, 1, 1024) == pytest.approx(expected, rel=1e-6)
    assert expected == pytest.approx(5.58e-3, rel=1e-3)


def test_weights_of_few_bits_are_read_sooner() -> None:
    """Of 8 billion parameters, 6.98 in matrices of layers, of which 2 bytes become half a one, and 5 for each 64."""
    usual, few = (layouts(MEASURED, SMALL, Options(quantize=quantize))[1] for quantize in ("", "int4"))
    saved = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) * (2 - 0.5 - 5 / 64)
    assert usual.plan.weight_bytes - few.plan.weight_bytes == saved
    accelerator = cluster.parse(MEASURED).accelerator
    for work in (lambda group: roofline.decode(group, accelerator, 1, 1024), lambda group: roofline.prefill(group, accelerator, 1)):
        assert work(usual.group) - work(few.group) == pytest.approx(saved / accelerator.bandwidth, rel=1e-3)


def test_memory_and_capacity_by_hand() -> None:
    layout = layouts("1 x 2 x A100-80GB", SMALL, Options(max_concurrent_requests=512, cuda_graphs="0"))[2]
    free = int((81920 << 20) * 0.9) - layout.plan.weight_bytes
    assert layout.plan.graphs == 0
    assert layout.plan.pages == free // (2 * 32 * 4 * 128 * 2 * 16)
    assert layout.room(1) == 512  # which may run at once
    coarse = layouts("A100-80GB", SMALL, Options(max_concurrent_requests=4096, page_size=1024))[1]
    assert coarse.room(1025) == coarse.plan.pages // 2 < coarse.plan.capacity // 1025  # whole pages


def test_a_draft_model_takes_its_share() -> None:
    draft = model(SMALL | {"num_hidden_layers": 4})
    asked = Options(cuda_graphs="0", max_concurrent_requests=512)
    [plain], [drafting] = (cluster.layouts(asked, model(SMALL), cluster.parse("H200"), each) for each in (None, draft))
    left = plain.plan.memory - plain.plan.weight_bytes
    assert plain.plan.pages == left // (16 * 131072)
    small = shape(draft.config)
    taken = 2 * (small.parameters() + small.rotary_elements)
    assert drafting.plan.pages == (left - taken) // (16 * 131072 * 9 // 8)  # an eighth of the layers
    text = cluster.table(asked, model(SMALL), "name", cluster.parse("H200"), draft)
    assert "graphs     draft  keys/values" in text
    assert "a draft model is on rank 0 alone" in text


def test_replicas_fill_nodes_or_nodes_fill_replicas() -> None:
    config = SMALL | {"num_attention_heads": 48, "num_key_value_heads": 24, "head_dim": 128, "intermediate_size": 12288}
    found = layouts("5 x 8 x H200", config)
    ways = {ranks: (layout.nodes, layout.replicas) for ranks, layout in found.items()}
    # Not 12, which would take a node and a half; with 3 two GPUs of each node are idle, with 16 a node is.
    assert ways == {1: (1, 40), 2: (1, 20), 3: (1, 10), 4: (1, 10), 6: (1, 5), 8: (1, 5), 24: (3, 1)}
    assert "  3      1        10         10" in table("5 x 8 x H200", config)


def test_too_few_ranks_for_the_memory() -> None:
    assert set(layouts("8 x H200", LARGE)) == {2, 4, 8}
    assert "too little memory with ranks: 1\n" in table("8 x H200", LARGE)
    with pytest.raises(Mistake, match=r"^over 4 ranks: weights take 32.9 GiB and one page .* per rank, but 20.0 GiB may be used"):
        layouts("4 x L4", LARGE)


def test_a_number_of_ranks_that_is_asked() -> None:
    assert set(layouts("2 x 8 x H200", LARGE, replace(MANY, num_shard=4))) == {4}
    with pytest.raises(Mistake, match="can't be divided by 3 ranks"):
        layouts("2 x 8 x H200", LARGE, replace(MANY, num_shard=3))
    with pytest.raises(Mistake, match="--num-shard 8 does not divide nodes of 3 GPUs evenly: 1, 2 do"):
        layouts("3 x 3 x H200", LARGE, replace(MANY, num_shard=8))
    with pytest.raises(Mistake, match="--cluster is for accelerators and 16-bit numbers"):
        layouts("H200", SMALL, Options(dtype="float32"))


def test_sums_between_ranks() -> None:
    on = cluster.parse("2 x 4 x mine memory=1G bandwidth=1T flops=1T link=100GB/s network=10GB/s latency=10us network-latency=50us")
    wires = on.accelerator
    assert roofline.all_reduce(wires, 1, 1, 1e6) == 0
    assert roofline.all_reduce(wires, 4, 1, 1e6) == pytest.approx(10e-6 + 1.5e6 / 100e9)
    assert roofline.all_reduce(wires, 4, 2, 1e6) == pytest.approx(10e-6 + 1.5e6 / 100e9 + 50e-6 + 0.25e6 / 10e9)
    assert roofline.all_reduce(wires, 1, 2, 1e6) == pytest.approx(50e-6 + 1e6 / 10e9)


def group(config: dict[str, Any], ranks: int = 1) -> Group:
    form = shape(config)
    return Group(shape=form, ranks=ranks, nodes=1, item=2, token_bytes=form.kv_elements(ranks) * 2)


def test_what_ranks_tell_each_other_goes_by_the_family() -> None:
    """Command R adds attention and MLP at once; MiniMax M2 squares of all heads besides."""
    on = cluster.parse("4 x mine memory=1G bandwidth=1T flops=1T link=100GB/s latency=10us").accelerator
    llama, command, minimax = (
        group(SMALL | {"architectures": [f"{name}ForCausalLM"]}, 4) for name in ("Llama", "Cohere", "MiniMaxM2")
    )
    layers, one, few = (llama.shape.layers, *(roofline.all_reduce(on, 4, 1, 7 * size) for size in (2 * llama.shape.hidden, 8)))
    expected = roofline.exchange(llama, on, 7, 1)
    assert expected == pytest.approx((2 * layers + 1) * one + roofline.gather(llama, on, 1))
    assert roofline.exchange(command, on, 7, 1) == pytest.approx(expected - layers * one)
    assert roofline.exchange(minimax, on, 7, 1) == pytest.approx(expected + layers * few)
    assert few > 10e-6


def test_layers_with_a_window_read_less() -> None:
    windowed = SMALL | {"architectures": ["MistralForCausalLM"], "sliding_window": 100}
    assert roofline.context_bytes(group(windowed), 1000) * 10 == roofline.context_bytes(group(SMALL), 1000)
    on = cluster.parse("H200").accelerator
    assert roofline.prefill(group(windowed), on, 32768) < roofline.prefill(group(SMALL), on, 32768)


def test_layers_that_see_chunks_read_a_chunk() -> None:
    """Pairs are counted by hand, and of many contexts what one reads on average."""
    llama4 = {"architectures": ["Llama4ForCausalLM"], "attention_chunk_size": 100, "moe_layers": [], "intermediate_size_mlp": 64}
    found, plain = group(SMALL | llama4), group(SMALL | llama4 | {"attention_chunk_size": None})
    assert roofline.context_bytes(found, 100) == roofline.context_bytes(plain, 100)
    layers = [window > 0 for window in found.shape.windows]
    share = sum(50.5 if chunked else 1000 for chunked in layers) / len(layers)
    assert roofline.context_bytes(found, 1000) == pytest.approx(roofline.context_bytes(plain, 1000) * share / 1000)
    assert roofline._pairs_of_chunks(1234, 100) == sum(1 + position % 100 for position in range(1234))
    assert roofline._pairs_of_chunks(1234, 0) == roofline._pairs(1234, 0)
    on = cluster.parse("H200").accelerator
    assert roofline.prefill(found, on, 65_536) < roofline.prefill(plain, on, 65_536)


def test_what_an_index_leaves_out_is_not_read() -> None:
    """Of DeepSeek V3.2's tokens 2,048 are read, 576 numbers of each, and 128 of every one."""
    every = SMALL | {"architectures": ["DeepseekV32ForCausalLM"], "num_hidden_layers": 5}
    found = group(every)
    assert roofline.context_bytes(found, 2000) == 2 * 5 * 2000 * 704
    assert roofline.context_bytes(found, 100_000) == 2 * 5 * (2048 * 576 + 100_000 * 128)
    on = cluster.parse("mine memory=1G bandwidth=999999T flops=1T link=1G latency=1us").accelerator
    seen, all_of_them = 2048 * 2049 // 2 + 2048 * (4096 - 2048), 4096 * 4097 // 2
    attention = 4 * 5 * seen * 32 * 576 + 2 * 5 * all_of_them * 64 * 128
    products = 2 * ((found.parameters() - found.head) * 4096 + found.head)
    assert roofline.prefill(found, on, 4096) == pytest.approx((attention + products) / on.flops, rel=1e-3)


def test_a_tied_table_is_read() -> None:
    assert group(SMALL | {"tie_word_embeddings": True}).parameters() == group(SMALL).parameters()


def test_experts_are_read_as_they_are_chosen() -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters in all, 3.3 of them for each token."""
    sizes = {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
    }
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}
    own = group(SMALL | sizes | experts | {"architectures": ["Qwen3MoeForCausalLM"]})
    assert own.shape.parameters() == pytest.approx(30.53e9, rel=0.001)
    assert own.shape.parameters(tokens=1) == pytest.approx(3.35e9, rel=0.01)
    assert own.shape.described == "Qwen3MoeForCausalLM, 30,532.1 M parameters, 3,353.0 M of them for a token"
    assert own.parameters(4000) == own.shape.parameters() - own.head
    assert own.parameters() < own.parameters(2) < 2 * own.parameters()
    on = cluster.parse("H200").accelerator
    seconds = [roofline.decode(own, on, streams, 1) for streams in (1, 16, 256)]
    assert seconds[0] * 4 < seconds[1] < seconds[2]
    assert seconds[2] == pytest.approx(own.parameters(256) * own.item / on.bandwidth, rel=0.1)


@pytest.mark.parametrize(("experts", "layers", "expected"), [(32, 24, 12.8), (128, 36, 60.8)])
def test_experts_of_4_bits(experts: int, layers: int, expected: float) -> None:
    """gpt-oss: GiB by its model card. A token reads of each layer those that it chose; ranks have whole blocks."""
    config = GPT_OSS | {"num_local_experts": experts, "num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    one, four = (layouts("4 x H200", config)[ranks] for ranks in (1, 4))
    assert one.plan.weight_bytes / 2**30 == pytest.approx(expected, rel=0.01)
    chosen = layers * 4 * 3 * 2880 * 2880 * (0.5 + 1 / 32)
    beside = one.group.parameters() - layers * 4 * 3 * 2880 * 2880
    assert one.group.read(1) == pytest.approx(chosen + 2 * beside, rel=1e-4)
    all_ = layers * experts * 3 * 2880 * (0.5 + 1 / 32)
    assert one.group.read(10**6) - four.group.read(10**6) > all_ * (2880 - 23 * 32)
    assert "fp4 by mxfp4" in plan.table(one.plan, "x")


def test_the_most_streams_within_a_target() -> None:
    layout, on = layouts("H200", SMALL)[1], cluster.parse("H200")
    streams, seconds = cluster.served(layout, on, 1024, 0.010)
    assert 1 < streams < 512
    assert seconds <= 0.010 < roofline.decode(layout.group, on.accelerator, streams + 1, 1024)
    assert cluster.served(layout, on, 1024, 1e-4) == (0, 0.0)
    assert cluster.served(layout, on, 1024, 0.0)[0] == 512


def test_the_table_marks_the_best() -> None:
    text = table("2 x 8 x H200", LARGE)
    assert "2 x 8 x H200: 140.4 GiB, 4.80 TB/s, 989 TFLOP/s" in text
    assert "best for latency     --num-shard 8, 2 replicas: 5.58 ms" in text
    assert "best for throughput  --num-shard 2, 8 replicas:" in text
    [first] = [line for line in text.splitlines() if line.split()[:2] == ["1", "16.47"]][:1]
    assert first.split() == ["1", "16.47", "9.21", "*5.58", "8.68"]
    assert roofline.FORMULA in text
    assert max(map(len, text.splitlines())) <= 140
    assert "*" not in table("H200", SMALL).partition("how\n")[0]  # nothing to choose from
    assert "no room for a sequence of 1,024 tokens" in table(
        "mine memory=18GB bandwidth=1T flops=1T", SMALL, Options(cuda_graphs="0")
    )


def test_only_a_plan_is_for_machines_elsewhere() -> None:
    command = [sys.executable, "-m", "penstock.launcher"]
    answer = subprocess.run([*command, "serve", "--cluster", "H200"], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert answer.stderr == "penstock: error: --cluster H200 is for penstock plan: serve runs on this machine\n"
    answer = subprocess.run([*command, "plan", "--cluster", "2 x H200"], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0
    assert "cluster       1 x 2 x H200" in answer.stdout


def test_memories_are_read_and_written_whatever_the_context() -> None:
    """Of Qwen3-Next 36 layers of 48 have them: 32 heads of 128 x 128 in float32, and 3 tokens of 8,192 channels in 16 bits."""
    found = group(SMALL | {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 48, "num_key_value_heads": 2})
    on = cluster.parse("H200").accelerator
    assert roofline.context_bytes(found, 1000) == 12 * 1000 * 2 * 2 * 256 * 2
    memories = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    decode = found.read(8) + 8 * (12 * 1000 * 2048 + 2 * memories)
    assert roofline.decode(found, on, 8, 1000) == pytest.approx(decode / on.bandwidth, rel=1e-6)
    tokens = 16384
    pairs = 12 * tokens * (tokens + 1) // 2 * 32 * 256
    products = 2 * ((found.parameters() - found.head) * tokens + found.head)
    expected = products + 4 * pairs + 36 * 6 * tokens * 32 * 128 * 128
    assert roofline.prefill(found, on, tokens) == pytest.approx(expected / on.flops, rel=1e-6)


def test_ranks_tell_each_other_squares_of_a_group() -> None:
    """Where none has all of its heads; a state space's memory is asked once."""
    kinds = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_hidden_layers": 10,
        "layer_types": ["mamba"] * 9 + ["attention"],
    }
    on = cluster.parse("2 x H200").accelerator
    one, two = (group(SMALL | kinds | {"mamba_n_groups": groups}, ranks=2) for groups in (1, 2))
    sums = [roofline.exchange(found, on, 1000, 1) for found in (one, two)]
    assert sums[0] - sums[1] == pytest.approx(9 * roofline.all_reduce(on, 2, 1, 4000), rel=1e-6)
    tokens = 1 << 20
    products = 2 * ((one.parameters() - one.head) * tokens + one.head)
    pairs = tokens * (tokens + 1) // 2 * one.shape.heads // 2 * one.shape.head_size
    expected = (
        products + 4 * pairs + 9 * 4 * tokens * one.shape.recurrent.value_heads // 2 * 256 * one.shape.recurrent.value_size
    ) / on.flops
    assert roofline.prefill(one, on, tokens) == pytest.approx(expected + roofline.exchange(one, on, tokens, 1), rel=1e-6)
