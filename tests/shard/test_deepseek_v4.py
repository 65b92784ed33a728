"""DeepSeek V4: its shape from config.json against transformers, limits on pages, ranks and draft tokens, tensor names and number
formats of checkpoints. Logits and tokens on one and two ranks: test_against_transformers.py."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from penstock.launcher import roofline
from penstock.proto.speculation import Speculation
from penstock.shard.models.compression import CompressedLatent
from penstock.shard.models.draft_families import check_speculation
from penstock.shard.models.families import shape
from penstock.shard.models.shape import Shape, Unsupported
from penstock.shard.models.traits import HyperConnections, Quantization, Rope
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import sequences as tokens_of
from penstock.shard.step import Span
from penstock.tests.shard import packing, tiny
from penstock.tests.shard.test_against_transformers import assert_logits_close, prompt
from penstock.tests.shard.test_weights import WEIGHTS, assert_same_weights, load_decoder

# Fields of config.json of the smaller model on the hub.
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129_280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "qk_rope_head_dim": 64,
    "topk_method": "noaux_tc",
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65_536, "beta_fast": 32, "beta_slow": 1},
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
}
QUANTIZED = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def shape_of(**fields: Any) -> Shape:
    return shape(FLASH | fields)


def test_shape_and_parameters_equal_transformers() -> None:
    """Also defaults of missing fields. 284 billion parameters, 14 of them active for a token."""
    found, config = shape_of(), transformers.DeepseekV4Config(**FLASH)
    with torch.device("meta"):
        model = transformers.DeepseekV4ForCausalLM(config)
    corrections = [values for key, values in model.named_buffers() if "correction" in key]
    assert found.parameters() == sum(values.numel() for values in (*model.parameters(), *corrections))
    assert (round(found.parameters() / 1e9), round(found.parameters(tokens=1) / 1e9)) == (284, 14)
    assert found == shape({"architectures": FLASH["architectures"]} | config.to_dict())
    assert [found.slot(ranks, layer) for ranks in (1, 8) for layer in (0, 2, 3)] == [(1, 1, 512), (1, 1, 3072), (1, 1, 1536)] * 2
    assert found.compressed is not None
    assert found.compressed.kinds == ((4, 512), (128, 0))
    assert found.hyper == HyperConnections(count=4, magnitude=2.0, epsilon=1e-6, rounds=20)
    assert found.local_rope == Rope(theta=10_000.0)
    assert (found.rope.theta, found.rope.factor, found.rope.amplitude) == (160_000.0, 16.0, 1.0)
    assert [bool(mixture and mixture.hashed) for mixture in found.mixtures[:4]] == [True, True, True, False]
    assert found.windows[:4] == (128, 128, 0, 0)
    assert found.fitting == [1, 2, 4, 8, 16, 32, 64]
    assert not found.replayed


def test_fields_missing_in_config_json_have_transformers_defaults() -> None:
    fields = {name: value for name, value in FLASH.items() if name not in ("compress_ratios", "num_hash_layers", "rope_scaling")}
    config = transformers.DeepseekV4Config(**fields)
    found = shape(fields)
    assert found == shape(config.to_dict() | {"architectures": FLASH["architectures"]})
    assert found.compressed is not None
    assert found.compressed.rates[:4] == (128, 128, 128, 4)


def test_older_names_of_compression_fields_are_read() -> None:
    older_fields = {"compress_rate_csa": 8, "compress_rate_hca": 64, "partial_rotary_factor": 0.25}
    config = transformers.DeepseekV4Config(**FLASH | older_fields)
    found = shape_of(**older_fields)
    assert found.compressed is not None
    assert found.compressed.kinds == ((8, 512), (64, 0))
    assert config.compress_rates == {SPARSE: 8, HEAVY: 64}
    assert found.compressed.turned == config.qk_rope_head_dim == 128


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads 8 is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"o_groups": 7}, "o_groups 7, of 64 attention heads"),
        ({"o_groups": 0}, "o_groups 0, an integer from 1"),
        ({"sliding_window": 0}, "sliding_window 0, an integer from 1"),
        ({"compress_ratios": [0, 4]}, r"compress_ratios \[0, 4\], one of 0, 4, 128 is needed for each"),
        ({"compress_ratios": [3] * 43}, "one of 0, 4, 128 is needed for each"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types full_attention are not supported"),
        ({"compress_rates": [4]}, r"compress_rates \[4\], an object is needed"),
        ({"compress_rates": {SPARSE: 0, HEAVY: 2}}, f"compress_rates of {SPARSE} 0, an integer from 1"),
        ({"compress_rates": {SPARSE: 4}}, f"of which {HEAVY} is missing"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types .*'hash_moe' or 'moe' is needed"),
        ({"num_hash_layers": -1}, "num_hash_layers -1, an integer from 0"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported: .* sqrtsoftplus and sigmoid"),
        ({"qk_rope_head_dim": 63}, "63 of 512 features of a head turn, an even number"),
        ({"index_head_dim": 32}, "index_head_dim 32, and 64 features of a head turn"),
        ({"rope_scaling": {"type": "llama3"}}, "rotary scaling 'llama3' is not supported"),
        ({"rope_parameters": {"rope_type": "default"}}, "both rope_parameters and rope_scaling"),
        ({"swiglu_limit": 0}, "swiglu_limit 0, a number above 0"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters 0, an integer from 1"),
        ({"quantization_config": QUANTIZED, "expert_dtype": "fp3"}, "expert_dtype 'fp3' is not supported beside fp8"),
        ({"quantization_config": QUANTIZED | {"moe_quant_algo": "MXFP8"}}, "moe_quant_algo 'MXFP8' is not supported beside fp8"),
    ],
)
def test_unsupported_or_invalid_config_is_refused_by_field_name(field: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        shape_of(**field)


def test_limits_on_pages_ranks_cache_format_and_draft_trees() -> None:
    """Pages of any size; ranks that divide output groups, or that these divide; a KV cache of 16 bits at least; draft tokens in
    chains only."""
    found = shape_of(num_attention_heads=24, o_groups=8, moe_intermediate_size=48)
    found.check_pages(5)
    assert found.fitting == [1, 2, 4, 8, 24]
    with pytest.raises(Unsupported, match="8 groups of heads can't be divided by 3 ranks"):
        found.check_ranks(3)
    with pytest.raises(Unsupported, match="what is compressed has more bits than keys of fp8_e4m3fn"):
        found.check_cache("fp8_e4m3fn")
    check_speculation(found, Speculation(draft="x", widths=(1, 1)))
    with pytest.raises(Unsupported, match="drafts must be a chain"):
        check_speculation(found, Speculation(draft="x", widths=(2, 1)))


def test_fp4_experts_beside_fp8_matrices_are_read_from_either_field() -> None:
    """expert_dtype is beside quantization_config or within it. The hub's model has 158 GB, NVIDIA's 167."""
    hubs, nvidias = Quantization(method="fp8", kind="fp4", group=32), Quantization(method="modelopt", kind="nvfp4", group=16)
    for expected, size, fields in (
        (hubs, 158, {"quantization_config": QUANTIZED, "expert_dtype": "fp4"}),
        (hubs, 158, {"quantization_config": QUANTIZED | {"expert_dtype": "fp4"}}),
        (nvidias, 167, {"quantization_config": QUANTIZED | {"moe_quant_algo": "NVFP4"}, "expert_dtype": "fp4"}),
    ):
        found = shape_of(**fields)
        assert found.quantization == Quantization(method="fp8", kind="fp8", group=128, block=128, others=(expected,))
        assert {mixture and mixture.quantization for mixture in found.mixtures} == {expected}
        assert round(found.weight_bytes(1, 2, "cuda", "bfloat16", packed=False) / 1e9) == size


def test_roofline_counts_window_keys_compressed_entries_and_indexer_keys() -> None:
    """128 keys in each layer; 512 entries and the indexer keys of all entries in sparse layers, all entries in the others."""
    found = shape_of()
    assert isinstance(found.latent, CompressedLatent)
    group = roofline.Group(shape=found, ranks=1, nodes=1, item=2, token_bytes=found.kv_elements(1) * 2)
    sparse, heavy = (found.latent.rates.count(rate) for rate in (4, 128))
    elements = 43 * 128 * 512 + sparse * (512 * 512 + 32_768 // 4 * 128) + heavy * 32_768 // 128 * 512
    assert roofline.context_bytes(group, 32_768) == 2 * elements


def stored_tensors(name: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(tiny.folder(name) / WEIGHTS)


def save_checkpoint(tensors: dict[str, torch.Tensor], folder: Path, source: str, **config: Any) -> Path:
    shutil.copytree(tiny.folder(source), folder)
    safetensors.torch.save_file({name: values.contiguous() for name, values in tensors.items()}, folder / WEIGHTS)
    config_json = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(config_json))
    return folder


def test_checkpoint_with_the_hubs_tensor_names_is_loaded(tmp_path: Path) -> None:
    """transformers' names have another prefix and another name of the keys' norm. Multi-token prediction layers are ignored."""
    tensors = stored_tensors("deepseek-v4-entries")
    assert "model.layers.0.attn.norm.weight" in tensors
    hub = {name.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm."): values for name, values in tensors.items()}
    hub |= {"embed.weight": hub.pop("embed_tokens.weight"), "mtp.0.norm.weight": torch.zeros(3)}
    hub = {name.replace("hc_head.hc_", "hc_head_"): values for name, values in hub.items()}
    assert_same_weights(
        load_decoder(save_checkpoint(hub, tmp_path / "hub", "deepseek-v4-entries")), tiny.decoder("deepseek-v4-entries")
    )


def test_missing_or_invalid_expert_hash_table_is_refused(tmp_path: Path) -> None:
    tensors = {name: values for name, values in stored_tensors("deepseek-v4").items() if "tid2eid" not in name}
    with pytest.raises(Unsupported, match=r"there is no tensor model\.layers\.0\.mlp\.gate\.tid2eid"):
        load_decoder(save_checkpoint(tensors, tmp_path / "lacking", "deepseek-v4"))
    tensors["model.layers.0.mlp.gate.tid2eid"] = torch.full((131, 2), 6)
    with pytest.raises(Unsupported, match=r"tid2eid is \[131, 2\], \[131, 2\] numbers of 6 experts"):
        load_decoder(save_checkpoint(tensors, tmp_path / "beyond", "deepseek-v4"))


def random_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random 4-bit codes, two in a byte, an exponent for each 32 inputs, and the dequantized weight."""
    codes = torch.randint(0, 16, weight.shape, generator=torch.Generator().manual_seed(len(weight)), dtype=torch.uint8)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    exponents = torch.arange(weight.numel() // 32, dtype=torch.uint8).view(len(weight), -1) % 5 + 122
    values = torch.where(codes > 7, -1.0, 1.0) * numbers[(codes & 7).long()]
    plain = values * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
    return packed, exponents.view(torch.float8_e8m0fnu), plain


def test_fp4_experts_and_fp8_matrices_load_as_their_dequantized_weights(tmp_path: Path) -> None:
    """With exponents as scales. The projections that compute compressed entries are not quantized."""
    tensors = stored_tensors("deepseek-v4-entries")
    plain, quantized = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if ".experts." in name and weight.shape[1] % 32 == 0:
            quantized[name], quantized[name.replace("weight", "scale")], plain[name] = random_mxfp4(weight)
        elif ".wq_a." in name or ".wo_a." in name:
            blocks = torch.full((-(-len(weight) // 16), -(-weight.shape[1] // 16)), 125, dtype=torch.uint8)
            quantized[name], quantized[name.replace("weight", "scale")] = (
                weight.to(torch.float8_e4m3fn),
                blocks.view(torch.float8_e8m0fnu),
            )
            plain[name] = quantized[name].float() / 4
    assert sum(values.dtype == torch.int8 for values in quantized.values()) > 8
    config = {"quantization_config": QUANTIZED | {"weight_block_size": [16, 16]}}
    expected = load_decoder(save_checkpoint(plain, tmp_path / "plain", "deepseek-v4-entries"))
    for folder, fields in (
        ("quantized", {"expert_dtype": "fp4"}),
        ("unnamed", {}),
    ):  # V4 Flash's first config.json has no such field
        checkpoint = save_checkpoint(quantized, tmp_path / folder, "deepseek-v4-entries", **config, **fields)
        assert_same_weights(load_decoder(checkpoint), expected)


def test_nvfp4_experts_beside_fp8_matrices_load_as_their_dequantized_weights(tmp_path: Path) -> None:
    """As in NVIDIA's checkpoints of V4 Flash: a field of their own says so, and `expert_dtype` is that of the original."""
    tensors = stored_tensors("deepseek-v4-entries")
    plain, quantized = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if ".experts." in name:
            codes, plain[name] = packing.nvfp4(packing.FORMATS["modelopt-nvfp4"], weight)
            quantized |= {name.replace("weight", part): values for part, values in codes.items()}
        elif ".wq_a." in name:
            blocks = torch.full((-(-len(weight) // 16), -(-weight.shape[1] // 16)), 125, dtype=torch.uint8)
            scales = blocks.view(torch.float8_e8m0fnu)
            quantized[name], quantized[name.replace("weight", "scale")] = weight.to(torch.float8_e4m3fn), scales
            plain[name] = quantized[name].float() / 4
    assert sum(values.dtype == torch.uint8 for values in quantized.values()) > 8
    config = QUANTIZED | {"weight_block_size": [16, 16], "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"}
    checkpoint = save_checkpoint(
        quantized, tmp_path / "quantized", "deepseek-v4-entries", quantization_config=config, expert_dtype="fp4"
    )
    expected = load_decoder(save_checkpoint(plain, tmp_path / "plain", "deepseek-v4-entries"))
    assert_same_weights(load_decoder(checkpoint), expected)


@pytest.mark.parametrize("name", ["deepseek-v4", "deepseek-v4-entries"])
def test_logits_on_four_ranks_equal_transformers(name: str) -> None:
    """Each rank has one output group, or a quarter of the only one."""
    tokens = prompt(3, 60)

    def work(ranks: Ranks) -> torch.Tensor:
        engine = tiny.rank_engine(name, ranks)
        [sequence], _ = tokens_of(tokens, 1)
        with torch.inference_mode():
            engine.pool.extend(sequence.pages, len(tokens))
            logits = engine.decoder.logits(engine.forward([Span(sequence, 0, sequence.tokens, wanted=60)]))
        return torch.empty(0) if logits is None else logits.clone()

    assert_logits_close(tiny.ThreadedRanks(4).run(work)[0], tiny.expected_logits(name, tokens))
