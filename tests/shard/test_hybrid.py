"""Hybrid models, with linear attention, state spaces or short convolutions beside attention: the shapes that are read from
config.json against transformers' configurations, sizes of recurrent states, tensor names and number formats of checkpoints, and
speculative decoding with recurrent states. Logits and tokens are checked in test_against_transformers.py."""

import functools
import json
import shutil
from math import inf
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from penstock.kernels.quantized import Quantized
from penstock.proto.shard_pb2 import WarmupRequest
from penstock.shard import memory
from penstock.shard.cache import Cache
from penstock.shard.config import ShardConfig
from penstock.shard.engine import Engine
from penstock.shard.loading import load
from penstock.shard.memory import Measured
from penstock.shard.models.decoder import Decoder
from penstock.shard.models.families import shape
from penstock.shard.models.kimi_linear_attention import KimiDeltaAttention
from penstock.shard.models.linear_attention import GatedDelta, LinearAttention
from penstock.shard.models.recurrent_shapes import KimiDeltaShape, LinearAttentionShape, ShortConvolutionShape, StateSpaceShape
from penstock.shard.models.shape import Unsupported
from penstock.shard.models.short_convolutions import ShortConvolutions
from penstock.shard.pages import page_table
from penstock.shard.service import Service
from penstock.shard.weights import DummyWeights
from penstock.tests.shard import configurations, fake_cuda, lora, packing, test_speculation, tiny
from penstock.tests.shard.driver import UNLIMITED, Results, Traffic, drive
from penstock.tests.shard.test_against_transformers import all_pages_free, prompt
from penstock.tests.shard.test_quantized import SINGLE_RANK, build_decoder, logits
from penstock.tests.shard.test_sharing import pages_of_largest_group
from penstock.tests.shard.test_speculation import sample_groups
from penstock.tests.shard.test_weights import WEIGHTS, LoadingRank, assert_same_weights, load_decoder

ARCHITECTURES = {
    "Qwen3NextForCausalLM": transformers.Qwen3NextConfig,
    "Qwen3_5ForCausalLM": transformers.Qwen3_5TextConfig,
    "Qwen3_5MoeForCausalLM": transformers.Qwen3_5MoeTextConfig,
}
REQUIRED_FIELDS = {"vocab_size": 1000, "hidden_size": 4096, "num_hidden_layers": 9, "num_attention_heads": 32}


def config(architecture: str = "Qwen3NextForCausalLM", **more: Any) -> dict[str, Any]:
    return REQUIRED_FIELDS | {"intermediate_size": 512, "architectures": [architecture]} | more


@pytest.mark.parametrize(
    "fields", [{}, {"full_attention_interval": 2}, {"layer_types": ["full_attention", "linear_attention"] * 4}]
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_qwen_hybrid_shapes_equal_transformers_config(architecture: str, fields: dict[str, Any]) -> None:
    fields |= {"num_hidden_layers": len(fields.get("layer_types", "123456789"))}
    found, expected = shape(config(architecture, **fields)), ARCHITECTURES[architecture](**REQUIRED_FIELDS | fields)
    layers = [layer for layer, kind in enumerate(expected.layer_types) if kind == "linear_attention"]
    assert found.recurrent == LinearAttentionShape(
        layers=frozenset(layers),
        key_heads=expected.linear_num_key_heads,
        value_heads=expected.linear_num_value_heads,
        key_size=expected.linear_key_head_dim,
        value_size=expected.linear_value_head_dim,
        width=expected.linear_conv_kernel_dim,
        joint=2 if "Next" in architecture else 4,
    )
    assert sorted([*found.attending, *layers]) == list(range(expected.num_hidden_layers))
    assert (found.kv_heads, found.head_size) == (expected.num_key_value_heads, expected.head_dim)
    assert (found.norm_epsilon, found.max_positions) == (expected.rms_norm_eps, expected.max_position_embeddings)
    rope = expected.rope_parameters
    assert (found.rope.theta, found.rotary_size) == (rope["rope_theta"], expected.head_dim * rope["partial_rotary_factor"])
    assert found.tied == expected.tie_word_embeddings
    for mixture in filter(None, found.mixtures):
        assert (mixture.experts, mixture.chosen) == (expected.num_experts, expected.num_experts_per_tok)
        assert (mixture.size, mixture.shared) == (expected.moe_intermediate_size, expected.shared_expert_intermediate_size)
        assert mixture.normalized == getattr(expected, "norm_topk_prob", True)
    assert {mixture is not None for mixture in found.mixtures} == {hasattr(expected, "num_experts")}


KIMI_LINEAR_ON_THE_HUB = {  # fields of the hub's config.json, with fewer layers and experts
    "num_hidden_layers": 6,
    "model_max_length": 4096,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "num_shared_experts": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "moe_renormalize": False,
    "moe_router_activation_func": "sigmoid",
    "mla_use_nope": True,
    "head_dim": 72,
    "q_lora_rank": None,
    "linear_attn_config": {
        "full_attn_layers": [3, 6],
        "kda_layers": [1, 2, 4, 5],
        "head_dim": 64,
        "num_heads": 16,
        "short_conv_kernel_size": 5,
    },
}


@pytest.mark.parametrize(
    "fields", [{}, KIMI_LINEAR_ON_THE_HUB, {"layer_types": ["full_attention", *["linear_attention"] * 8], "linear_num_heads": 8}]
)
def test_kimi_linear_shapes_equal_transformers_config(fields: dict[str, Any]) -> None:
    """Whether config.json has the hub's field names or those of transformers."""
    found, expected = shape(config("KimiLinearForCausalLM", **fields)), transformers.KimiLinearConfig(**REQUIRED_FIELDS | fields)
    assert found == shape(expected.to_dict() | config("KimiLinearForCausalLM", num_hidden_layers=found.layers))
    layers = [layer for layer, kind in enumerate(expected.layer_types) if kind == "linear_attention"]
    heads, size = expected.linear_num_heads, expected.linear_head_dim
    sizes = {"key_heads": heads, "value_heads": heads, "key_size": size, "value_size": size}
    assert found.recurrent == KimiDeltaShape(layers=frozenset(layers), width=expected.linear_conv_kernel_dim, **sizes)
    assert found.attending == [layer for layer in range(found.layers) if layer not in layers]
    assert (found.max_positions, found.turns) == (expected.max_position_embeddings, False)
    *_, mixture = found.mixtures
    assert mixture is not None
    assert (mixture.experts, mixture.chosen, mixture.groups) == (
        expected.num_local_experts,
        expected.num_experts_per_tok,
        expected.n_group,
    )
    assert (mixture.normalized, mixture.shared) == (expected.norm_topk_prob, expected.n_shared_experts * mixture.size)


def test_kimi_linear_checkpoint_with_the_hubs_mlp_names_is_loaded(tmp_path: Path) -> None:
    """The hub calls the MLPs of dense layers `mlp`, where transformers writes `block_sparse_moe`; and its A_log has one
    dimension."""
    folder = Path(shutil.copytree(tiny.folder("kimi-linear"), tmp_path / "model"))
    stored = safetensors.torch.load_file(folder / WEIGHTS)
    for name in [name for name in stored if ".0.block_sparse_moe." in name or ".3.block_sparse_moe." in name]:
        stored[name.replace("block_sparse_moe", "mlp")] = stored.pop(name)
    stored |= {name: values.flatten() for name, values in stored.items() if "A_log" in name}
    safetensors.torch.save_file(stored, folder / WEIGHTS, {"format": "pt"})
    assert_same_weights(load_decoder(folder), tiny.decoder("kimi-linear"))


def granite_config(**more: Any) -> dict[str, Any]:
    return config("GraniteMoeHybridForCausalLM", layer_types=["mamba", "attention", "mamba"] * 3) | more


@pytest.mark.parametrize(
    "more",
    [
        {"hidden_size": 8192},
        {
            "mamba_n_heads": 64,
            "mamba_d_head": 128,
            "mamba_n_groups": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 3,
            "shared_intermediate_size": 96,
            "num_local_experts": 6,
            "num_experts_per_tok": 5,
            "position_embedding_type": "rope",
            "num_key_value_heads": 8,
        },
        {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "nope",
            "logits_scaling": 3,
            "mamba_expand": 4,
        },
    ],
)
def test_granite_4_shapes_equal_transformers_config(more: dict[str, Any]) -> None:
    fields = granite_config(**more)
    found = shape(fields)
    expected = transformers.GraniteMoeHybridConfig(**{name: value for name, value in fields.items() if name != "architectures"})
    assert found.recurrent == StateSpaceShape(
        layers=frozenset({0, 2, 3, 5, 6, 8}),
        key_heads=expected.mamba_n_groups,
        value_heads=expected.mamba_n_heads,
        key_size=expected.mamba_d_state,
        value_size=expected.mamba_d_head,
        width=expected.mamba_d_conv,
        limits=expected.time_step_limit,
    )
    assert found == shape(fields | {"layer_types": expected.layer_types})  # today's names of layer types
    assert found.nope_layers == (set() if expected.position_embedding_type == "rope" else set(range(9)))
    assert (found.kv_heads, found.max_positions, found.norm_epsilon) == (expected.num_key_value_heads, 2048, expected.rms_norm_eps)
    assert (found.intermediate, found.logit_divisor) == (expected.shared_intermediate_size, expected.logits_scaling)
    assert [mixture is not None for mixture in found.mixtures] == [expected.num_local_experts > 0] * 9
    for mixture in filter(None, found.mixtures):
        assert (mixture.experts, mixture.chosen) == (expected.num_local_experts, expected.num_experts_per_tok)
        assert (mixture.size, mixture.shared) == (expected.intermediate_size, expected.shared_intermediate_size)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_key_value_heads": None, "partial_rotary_factor": 0.25, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.75}, "mamba_n_groups": 8},
    ],
)
def test_bamba_shapes_equal_transformers_config(more: dict[str, Any]) -> None:
    found = shape(config("BambaForCausalLM", attn_layer_indices=[3, 7], **more))
    expected = transformers.BambaConfig(**REQUIRED_FIELDS, attn_layer_indices=[3, 7], **more)
    assert found.attending == [3, 7]
    assert found.recurrent is not None
    assert (found.recurrent.value_heads, found.recurrent.key_heads) == (expected.mamba_n_heads, expected.mamba_n_groups)
    assert (found.recurrent.value_size, found.recurrent.key_size) == (expected.mamba_d_head, expected.mamba_d_state)
    assert found.recurrent.limits == expected.time_step_limit
    assert (found.kv_heads, found.max_positions) == (expected.num_key_value_heads, expected.max_position_embeddings)
    assert (found.norm_epsilon, found.mlp_bias) == (expected.rms_norm_eps, expected.mlp_bias)
    rope = expected.rope_parameters
    assert (found.rope.theta, found.rotary_size) == (rope["rope_theta"], 128 * rope["partial_rotary_factor"])


def falcon_h1_config(**more: Any) -> dict[str, Any]:
    return config("FalconH1ForCausalLM", **more)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "mamba_d_ssm": None,
            "mamba_expand": 1,
            "mamba_n_heads": 64,
            "mamba_n_groups": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 3,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "num_key_value_heads": None,
            "time_step_limit": [0.1, 2.0],
            "rope_theta": 1e11,
            "tie_word_embeddings": True,
            "lm_head_multiplier": 0.02,
            "embedding_multiplier": 5.5,
            "max_position_embeddings": 77,
        },
    ],
)
def test_falcon_h1_shapes_equal_transformers_config(more: dict[str, Any]) -> None:
    found = shape(falcon_h1_config(**more))
    expected = transformers.FalconH1Config(
        **{name: value for name, value in falcon_h1_config(**more).items() if name != "architectures"}
    )
    assert found.attending == list(range(9))
    assert found.recurrent == StateSpaceShape(
        layers=frozenset(range(9)),
        along=True,
        key_heads=expected.mamba_n_groups,
        value_heads=expected.mamba_n_heads,
        key_size=expected.mamba_d_state,
        value_size=expected.mamba_d_head,
        width=expected.mamba_d_conv,
        limits=expected.time_step_limit,
        normal=expected.mamba_rms_norm,
    )
    assert (found.kv_heads, found.max_positions) == (expected.num_key_value_heads, expected.max_position_embeddings)
    assert (found.norm_epsilon, found.tied) == (expected.rms_norm_eps, expected.tie_word_embeddings)
    assert (found.rope.theta, found.embedding_factor) == (expected.rope_parameters["rope_theta"], expected.embedding_multiplier)
    assert found.logit_divisor == 1 / expected.lm_head_multiplier


def nemotron_h_config(**more: Any) -> dict[str, Any]:
    return {name: value for name, value in config("NemotronHForCausalLM").items() if name in ("vocab_size", "hidden_size")} | {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "MEM*E-M",
        **more,
    }


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "num_hidden_layers": 7,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "mamba_num_heads": 12,
            "mamba_head_dim": 40,
            "mamba_n_groups": 3,
            "ssm_state_size": 16,
            "mamba_d_conv": 3,
            "mamba_dt_min": 0.0,
            "layer_norm_epsilon": 1e-3,
            "intermediate_size": 96,
        },
        {
            "hybrid_override_pattern": None,
            "layers_block_type": ["mamba", "attention", "moe", "moe"],
            "n_routed_experts": 12,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 5,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 128,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "max_position_embeddings": 999,
        },
    ],
)
def test_nemotron_h_shapes_equal_transformers_config(more: dict[str, Any]) -> None:
    fields = {name: value for name, value in nemotron_h_config(**more).items() if value is not None}
    found = shape(fields)
    expected = transformers.NemotronHConfig(**{name: value for name, value in fields.items() if name != "architectures"})
    kinds = expected.layers_block_type
    layers_by_kind = {
        kind: {layer for layer, layer_kind in enumerate(kinds) if layer_kind == kind} for kind in ("mlp", "moe", "full_attention")
    }
    assert found.layers == len(kinds)
    assert set(found.attending) == layers_by_kind["full_attention"]
    assert found.without_attention == layers_by_kind["mlp"] | layers_by_kind["moe"]
    assert found.recurrent == StateSpaceShape(
        layers=frozenset(range(len(kinds))) - found.without_attention - layers_by_kind["full_attention"],
        key_heads=expected.n_groups,
        value_heads=expected.mamba_num_heads,
        key_size=expected.ssm_state_size,
        value_size=expected.mamba_head_dim,
        width=expected.conv_kernel,
        limits=(expected.time_step_min, inf),
        home="mixer",
    )
    assert found.without_mlp == found.recurrent.layers | layers_by_kind["full_attention"]
    assert (found.heads, found.kv_heads, found.head_size) == (
        expected.num_attention_heads,
        expected.num_key_value_heads,
        expected.head_dim,
    )
    assert (found.intermediate, found.norm_epsilon) == (expected.intermediate_size, expected.layer_norm_epsilon)
    assert (found.max_positions, found.nope_layers) == (expected.max_position_embeddings, set(range(found.layers)))
    assert {layer for layer, mixture in enumerate(found.mixtures) if mixture} == layers_by_kind["moe"]
    mixture = next(filter(None, found.mixtures))
    assert (mixture.experts, mixture.chosen) == (expected.n_routed_experts, expected.num_experts_per_tok)
    assert (mixture.groups, mixture.groups_chosen, mixture.factor) == (
        expected.n_group,
        expected.topk_group,
        expected.routed_scaling_factor,
    )
    assert (mixture.size, mixture.shared) == (expected.moe_intermediate_size, expected.moe_shared_expert_intermediate_size)
    assert (mixture.normalized, mixture.latent) == (expected.norm_topk_prob, expected.moe_latent_size or 0)


def lfm2_config(**more: Any) -> dict[str, Any]:
    return config("Lfm2ForCausalLM", layer_types=["conv", "full_attention", "conv"] * 3) | more


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"layer_types": None, "full_attn_idxs": [2, 5], "conv_L_cache": 4, "conv_bias": True, "tie_embedding": False},
        {"block_ff_dim": 6656, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 100, "rope_theta": 5.0},
        {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": False, "norm_eps": 1e-3},
    ],
)
def test_lfm2_shapes_equal_transformers_config(more: dict[str, Any]) -> None:
    found = shape(lfm2_config(**more))
    expected = transformers.Lfm2Config(**{name: value for name, value in lfm2_config(**more).items() if name != "architectures"})
    assert found.recurrent == ShortConvolutionShape(
        layers=frozenset(layer for layer, kind in enumerate(expected.layer_types) if kind == "conv"),
        width=expected.conv_L_cache,
        size=4096,
        biased=expected.conv_bias,
    )
    with torch.device("meta"):
        reference_mlp = transformers.models.lfm2.modeling_lfm2.Lfm2MLP(expected)
    assert (found.intermediate, found.norm_epsilon) == (reference_mlp.w1.out_features, expected.norm_eps)
    assert (found.tied, found.rope.theta) == (expected.tie_word_embeddings, expected.rope_parameters["rope_theta"])
    assert shape(lfm2_config(block_ffn_dim_multiplier=None)).intermediate == 512 * 2 // 3  # transformers 5 no longer accepts this


def test_lfm2_moe_shapes_equal_transformers_config() -> None:
    other_fields = lfm2_config(
        num_experts_per_tok=3, norm_topk_prob=False, use_expert_bias=False, routed_scaling_factor=2.5, num_dense_layers=0
    )
    for more in (lfm2_config(), other_fields):
        fields = more | {"architectures": ["Lfm2MoeForCausalLM"]}
        found = shape({name: value for name, value in fields.items() if name != "num_attention_heads"})
        expected = transformers.Lfm2MoeConfig(**{name: value for name, value in fields.items() if name != "architectures"})
        assert (found.heads, found.kv_heads, found.intermediate) == (32, expected.num_key_value_heads, 512)
        assert [mixture is None for mixture in found.mixtures] == [layer < expected.num_dense_layers for layer in range(9)]
        mixture = found.mixtures[-1]
        assert mixture is not None
        assert (mixture.experts, mixture.chosen) == (expected.num_experts, expected.num_experts_per_tok)
        assert (mixture.size, mixture.factor) == (expected.moe_intermediate_size, expected.routed_scaling_factor)
        assert (mixture.normalized, bool(mixture.correction)) == (expected.norm_topk_prob, expected.use_expert_bias)


@pytest.mark.parametrize(
    ("time_step_limit", "limits"),
    [
        (None, (0, inf)),
        ([0, inf], (0, inf)),
        ([0.0, {"__float__": "Infinity"}], (0, inf)),
        ([0.1, {"__float__": "Infinity"}], (0.1, inf)),
        ([0.0, 1e308], (0, inf)),
        ([0.0, 2], (0, 2)),
    ],
)
def test_time_step_limit_is_read_with_json_infinities(time_step_limit: Any, limits: tuple[float, float]) -> None:
    linear = shape(granite_config(time_step_limit=time_step_limit)).recurrent
    assert linear is not None
    assert linear.limits == limits


def test_time_step_limit_of_nemotron_3_ultra_means_no_limit() -> None:
    assert shape(nemotron_h_config(time_step_limit=[0.0, 1e308])) == shape(nemotron_h_config())


def test_qwen3_next_without_linear_attention_layers_keeps_attention_gates() -> None:
    found = shape(config(layer_types=["full_attention"] * 9))
    assert found.recurrent is None
    assert found.gates
    assert found.state_bytes(1, 2) == 0


def test_kv_cache_and_state_sizes_of_qwen3_next() -> None:
    """Expected values are computed by hand."""
    found = shape(config(hidden_size=2048, num_hidden_layers=48, num_attention_heads=16))
    assert found.kv_elements(2) == 12 * 2 * 256
    assert found.state_bytes(1, 2) == 36 * (32 * 128 * 128 * 4 + 3 * (2 * 16 + 32) * 128 * 2)
    assert found.state_bytes(2, 2) * 2 == found.state_bytes(1, 2)
    assert found.kv_elements(4) == found.kv_elements(2)  # since the model has two key heads
    assert found.fitting == [1, 2, 4, 8, 16]
    with pytest.raises(Unsupported, match=r"3 key heads of linear attention can't be divided by 2 ranks: use --num-shard 1$"):
        shape(config(linear_num_key_heads=3, linear_num_value_heads=6)).check_ranks(2)


def test_kv_cache_and_state_sizes_of_granite_4_h_small() -> None:
    """Expected values are computed by hand; every rank has the only group of B and C."""
    kinds = [kind for block in range(4) for kind in ["mamba"] * (9 if block else 5) + ["attention"]] + ["mamba"] * 4
    found = shape(granite_config(num_hidden_layers=40, layer_types=kinds, num_key_value_heads=8, mamba_d_state=128))
    assert found.kv_elements(1) == 4 * 2 * 8 * 128
    assert found.state_bytes(1, 2) == 36 * (128 * 128 * 64 * 4 + 3 * (128 * 64 + 2 * 128) * 2)
    assert found.state_bytes(4, 2) == 36 * (32 * 128 * 64 * 4 + 3 * (32 * 64 + 2 * 128) * 2)
    assert found.fitting == [1, 2, 4, 8, 16, 32]
    for heads, groups, message in ((16, 1, "16 heads of"), (96, 6, "6 key heads of")):
        indivisible = granite_config(hidden_size=96 * 32, mamba_n_heads=heads, mamba_n_groups=groups)
        with pytest.raises(Unsupported, match=f"{message} linear attention can't be divided by 32 ranks"):
            shape(indivisible).check_ranks(32)


def test_layers_with_attention_and_state_space_have_kv_cache_and_state() -> None:
    """Expected values are computed by hand."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    found = shape(falcon_h1_config(**sizes, mamba_d_ssm=3072, mamba_n_heads=48, intermediate_size=4096, vocab_size=65537))
    assert found.kv_elements(1) == 24 * 2 * 2 * 128
    assert found.state_bytes(1, 2) == 24 * (48 * 256 * 64 * 4 + 3 * (3072 + 2 * 256) * 2)


def test_kv_cache_and_state_sizes_of_lfm2_1_2b() -> None:
    """Computed by hand: the channels of two tokens in each of ten layers, and 12 KiB per token in the six layers with attention."""
    kinds = ["conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv", "conv"] + ["full_attention", "conv"] * 4
    found = shape(lfm2_config(hidden_size=2048, num_hidden_layers=16, layer_types=kinds, intermediate_size=12288, vocab_size=65536))
    assert found.state_bytes(1, 2) == 10 * 2 * 2048 * 2
    assert found.state_bytes(4, 2) == 10 * 2 * 512 * 2
    assert found.kv_elements(1) == 6 * 2 * 8 * 64
    assert round(found.parameters() / 1e6) == 1170
    assert found.fitting == [1, 2, 4, 8, 16, 32]
    with pytest.raises(Unsupported, match="80 channels of short convolutions can't be divided by 32 ranks: use --num-shard 1, 2"):
        shape(lfm2_config(hidden_size=80, head_dim=4, num_key_value_heads=2)).check_ranks(32)


def olmo_hybrid_config(**more: Any) -> dict[str, Any]:
    fields = {"vocab_size": 100_352, "hidden_size": 3840, "intermediate_size": 11_008, "num_hidden_layers": 32}
    return fields | {"num_attention_heads": 30, "architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid"} | more


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_hidden_layers": 3, "linear_allow_neg_eigval": False},
        {"rope_theta": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"linear_num_key_heads": 15, "linear_key_head_dim": None, "linear_value_head_dim": 64},
        {"num_key_value_heads": 6, "linear_key_head_dim": 32, "attention_bias": True},
    ],
)
def test_olmo_hybrid_shapes_equal_transformers_config(more: dict[str, Any]) -> None:
    """Also parameter counts and the defaults of missing or null fields. The published model has 7 billion parameters."""
    expected, found = transformers.OlmoHybridConfig.from_dict(olmo_hybrid_config(**more)), shape(olmo_hybrid_config(**more))
    with torch.device("meta"):
        model = transformers.OlmoHybridForCausalLM(expected)
    assert found.parameters() == model.num_parameters()
    assert found == shape(expected.to_dict() | {"architectures": ["OlmoHybridForCausalLM"]})
    assert found.attending == [layer for layer, kind in enumerate(expected.layer_types) if kind == "full_attention"]
    assert found.turns == (model.model.rotary_emb is not None)
    assert more or round(found.parameters() / 1e8) == 74
    assert found.max_positions == expected.max_position_embeddings
    linear = found.recurrent
    assert isinstance(linear, LinearAttentionShape)
    assert linear.strongest == 1 + expected.linear_allow_neg_eigval


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["olmo-hybrid", "olmo-hybrid-still"])
def test_olmo_hybrid_checkpoints_with_hub_and_transformers_names_are_loaded(name: str, rank: int, tmp_path: Path) -> None:
    """The hub's checkpoints have one convolution each for queries, keys and values, in their sizes; transformers' have a joint
    one."""
    folder, linear = Path(shutil.copytree(tiny.folder(name), tmp_path / "hub")), tiny.decoder(name).shape.recurrent
    assert isinstance(linear, LinearAttentionShape)
    stored = safetensors.torch.load_file(folder / WEIGHTS)
    for layer in linear.layers:
        names = [f"model.layers.{layer}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
        joined = torch.cat([stored[tensor_name] for tensor_name in names])
        assert {len(stored[tensor_name]) for tensor_name in names} != set(linear.sizes)
        stored |= dict(zip(names, (part.contiguous() for part in joined.split(list(linear.sizes))), strict=True))
    for layer in tiny.decoder(name).shape.attending:
        prefix = f"model.layers.{layer}."
        stored[f"{prefix}post_attention_layernorm.weight"] = stored.pop(f"{prefix}feedforward_layer_norm.weight")
    safetensors.torch.save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    assert_same_weights(build_decoder(folder, LoadingRank(rank)), build_decoder(tiny.folder(name), LoadingRank(rank)))
    tiny.reference(name).save_pretrained(tmp_path / "own", save_original_format=False)
    assert f"model.layers.{min(linear.layers)}.linear_attn.conv1d.weight" in safetensors.torch.load_file(tmp_path / "own" / WEIGHTS)
    assert_same_weights(build_decoder(tmp_path / "own", LoadingRank(rank)), build_decoder(tiny.folder(name), LoadingRank(rank)))


@pytest.mark.parametrize(
    ("config_json", "message"),
    [
        (olmo_hybrid_config(layer_types=["linear_attention"] * 32), "layers of linear attention alone"),
        (olmo_hybrid_config(layer_types=["linear_attention", "sliding_attention"] * 16), "sliding_attention are not supported"),
        (
            olmo_hybrid_config(linear_num_key_heads=7),
            "linear_num_value_heads 30 and linear_num_key_heads 7, of which the first must be",
        ),
        (olmo_hybrid_config(linear_num_value_heads=0), "linear_num_value_heads 0, an integer from 1"),
        (olmo_hybrid_config(linear_allow_neg_eigval=2), "linear_allow_neg_eigval 2, true or false"),
        (olmo_hybrid_config(rope_parameters={"rope_type": "ntk", "rope_theta": 1e4}), "rotary scaling 'ntk' is not supported"),
        (olmo_hybrid_config(model_type="olmo3"), "which is 'olmo_hybrid'"),
        (lfm2_config(layer_types=["conv"] * 9), "layers of conv alone"),
        (falcon_h1_config(projectors_bias=True), "projectors_bias true is not supported: for this family the decoder has none"),
        (falcon_h1_config(attention_bias=True), "attention_bias true is not supported"),
        (falcon_h1_config(mlp_bias=True), "mlp_bias true is not supported"),
        (falcon_h1_config(mamba_rms_norm=True), "mamba_norm_before_gate true is not supported where mamba_rms_norm is true"),
        (falcon_h1_config(mamba_rms_norm="no"), "mamba_rms_norm 'no', true or false"),
        (falcon_h1_config(mamba_d_ssm=1000), "mamba_n_heads 128 and mamba_d_head 'auto', and by .* are 1000 features"),
        (falcon_h1_config(mlp_multipliers=[1.0]), "mlp_multipliers .1.0., a list of 2 numbers"),
        (falcon_h1_config(ssm_multipliers=[1.0, 1, 1, 1, "x"]), "ssm_multipliers 'x', a number above 0"),
        (falcon_h1_config(key_multiplier=0), "key_multiplier 0, a number above 0"),
        (falcon_h1_config(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (nemotron_h_config(hybrid_override_pattern="MX*"), "config.json says layers .*, each is to be one of linear_attention"),
        (nemotron_h_config(hybrid_override_pattern=""), "config.json says layers"),
        (nemotron_h_config(hybrid_override_pattern="M-E"), "no layer that attends"),
        (nemotron_h_config(layers_block_type=["mlp", {}]), "config.json says layers"),
        (nemotron_h_config(layers_block_type="M*"), "config.json says layers 'M.'"),
        (
            nemotron_h_config(mlp_hidden_act="silu"),
            "mlp_hidden_act 'silu' is not supported: for this family the decoder has 'relu2'",
        ),
        (nemotron_h_config(mlp_bias=True), "mlp_bias true is not supported"),
        (nemotron_h_config(mlp_hidden_act=None), "mlp_hidden_act null is not supported"),
        (nemotron_h_config(sliding_window=0), "sliding_window 0 is not supported"),
        (nemotron_h_config(mamba_conv_bias=False), "use_conv_bias false is not supported"),
        (nemotron_h_config(moe_latent_size=0), "moe_latent_size 0, an integer from 1"),
        (nemotron_h_config(sliding_window=64), "sliding_window 64 is not supported: for this family the decoder has none"),
        (nemotron_h_config(tie_word_embeddings=True), "tie_word_embeddings true is not supported"),
        (nemotron_h_config(time_step_limit=[0.0, 1.0]), "time_step_limit .0.0, 1.0. is not supported"),
        (nemotron_h_config(time_step_min="x"), "time_step_min 'x', a number"),
        (nemotron_h_config(mamba_num_heads=12), "mamba_n_heads 12 and mamba_n_groups 8"),
        (nemotron_h_config(n_routed_experts=6, n_group=4), "n_group 4 and topk_group 1, of 6 experts"),
        (nemotron_h_config(conv_kernel=1), "conv_kernel 1, an integer from 2"),
        ({name: value for name, value in nemotron_h_config().items() if "pattern" not in name}, "lacks 'hybrid_override_pattern'"),
        (lfm2_config(layer_types=["conv", "linear_attention", "full_attention"] * 3), "linear_attention .*full attention and conv"),
        (lfm2_config(layer_types=["full_attention"] * 8 + ["sliding_attention"]), "'sliding_attention' for layer 8"),
        (lfm2_config(layer_types=None, full_attn_idxs="all"), "full_attn_idxs 'all', a list of numbers"),
        (lfm2_config(conv_L_cache=1), "conv_L_cache 1, an integer from 2"),
        (lfm2_config(conv_bias="yes"), "conv_bias 'yes', true or false"),
        (lfm2_config(block_multiple_of=0), "block_multiple_of 0, an integer from 1"),
        (lfm2_config(block_ffn_dim_multiplier=-1), "block_ffn_dim_multiplier -1, a number above 0"),
        (lfm2_config(norm_eps=2), "norm_eps 2, a number above 0 up to 1"),
        (lfm2_config(model_type="lfm2_moe"), "which is 'lfm2'"),
        (
            lfm2_config(architectures=["Lfm2MoeForCausalLM"], num_experts=4, num_experts_per_tok=5),
            "num_experts_per_tok 5, of 4 experts",
        ),
        (config("Lfm2MoeForCausalLM"), "lacks 'layer_types'"),
        (config("Lfm2MoeForCausalLM", layer_types=None), "layer_types null, a name for each"),
        (config("Qwen3NextForCausalLM", layer_types=["conv", "full_attention", "linear_attention"] * 3), "conv are not supported"),
        (config("KimiLinearForCausalLM", linear_attn_config=[1]), r"linear_attn_config \[1\], an object"),
        (config("KimiLinearForCausalLM", linear_attn_config={"head_dim": "64"}), "linear_head_dim '64', an integer"),
        (config("KimiLinearForCausalLM", layer_types=["linear_attention"] * 9), "layers of linear attention alone"),
        (config("KimiLinearForCausalLM", mla_use_nope=False), "mla_use_nope false is not supported"),
        (config("KimiLinearForCausalLM", moe_renormalize=1), "moe_renormalize 1, true or false"),
        (
            config("KimiLinearForCausalLM", **KIMI_LINEAR_ON_THE_HUB | {"num_hidden_layers": 7}),
            "counts other layers .* than 1 to 7",
        ),
        (config("KimiLinearForCausalLM", linear_attn_config={"full_attn_layers": [1], "kda_layers": [1]}), r"kda_layers \[1\]"),
        (granite_config(position_embedding_type="alibi"), "position_embedding_type 'alibi' is not supported.* nope and rope"),
        (granite_config(layer_types=["mamba"] * 9), "layers of linear attention alone"),
        (granite_config(layer_types=None), "layers of linear attention alone"),
        (granite_config(layer_types=["mamba", "attention", "sliding_attention"] * 3), "sliding_attention are not supported"),
        (granite_config(layer_types=["mamba", ["attention"], "attention"] * 3), "are not supported"),
        (granite_config(mamba_n_heads=120), "mamba_n_heads 120 and mamba_d_head 'auto', and by .* are 8192 features"),
        (granite_config(mamba_d_head=32), "mamba_n_heads 128 and mamba_d_head 32"),
        (granite_config(mamba_n_groups=3), "mamba_n_heads 128 and mamba_n_groups 3, of which the first must be"),
        (granite_config(mamba_d_conv=1), "mamba_d_conv 1, an integer from 2"),
        (granite_config(mamba_expand=2.5), "mamba_expand 2.5, an integer"),
        (granite_config(mamba_conv_bias=False), "mamba_conv_bias false is not supported: for this family the decoder has true"),
        (granite_config(mamba_proj_bias=True), "mamba_proj_bias true is not supported: for this family the decoder has none"),
        (granite_config(mamba_proj_bias="no"), "mamba_proj_bias 'no', true or false"),
        (granite_config(time_step_limit=[0.0]), "time_step_limit .0.0., two numbers are needed"),
        (granite_config(time_step_limit=[2, 1]), "time_step_limit .2, 1., two numbers are needed"),
        (granite_config(time_step_limit=[0, "x"]), "time_step_limit 'x', a number"),
        (granite_config(time_step_limit=0.1), "time_step_limit 0.1, two numbers"),
        (granite_config(num_local_experts=4, num_experts_per_tok=5), "num_experts_per_tok 5, of 4 experts"),
        (granite_config(num_experts_per_tok=0), "num_experts_per_tok 0, of 8 experts"),
        (granite_config(shared_intermediate_size=0), "shared_intermediate_size 0, an integer from 1"),
        (config("BambaForCausalLM"), "layers of linear attention alone"),
        (config("BambaForCausalLM", attn_layer_indices=[1, "2"]), "attn_layer_indices .1, '2'., a list of numbers"),
        (config("BambaForCausalLM", attn_layer_indices=3), "attn_layer_indices 3, a list of numbers"),
        (granite_config(model_type="granite"), "which is 'granitemoehybrid'"),
        (config(linear_num_key_heads=5), "linear_num_value_heads 32 and linear_num_key_heads 5, of which the first must be"),
        (config(linear_conv_kernel_dim=1), "linear_conv_kernel_dim 1, an integer from 2"),
        (config(linear_key_head_dim="128"), "linear_key_head_dim '128', an integer"),
        (config(full_attention_interval=None), "full_attention_interval null, an integer"),
        (config(full_attention_interval=10), "layers of linear attention alone"),
        (config(layer_types=["linear_attention"] * 9), "layers of linear attention alone"),
        (
            config(layer_types=["linear_attention", "full_attention", "sliding_attention"] * 3),
            "sliding_attention are not supported",
        ),
        (config(partial_rotary_factor=0.02), "partial_rotary_factor 0.02, 5 of 256"),
        (config(num_experts=8, num_experts_per_tok=9), "num_experts_per_tok 9, of 8 experts"),
        (config("Qwen3_5MoeForCausalLM", norm_topk_prob=False), "norm_topk_prob false is not supported"),
        (config("Qwen3_5ForCausalLM", attn_output_gate=False), "attn_output_gate false is not supported"),
        (config("Qwen3_5ForCausalLM", attn_output_gate=None), "attn_output_gate null is not supported"),
        (config("Qwen3_5ForCausalLM", attn_output_gate=1), "attn_output_gate 1 is not supported"),
        (config("Qwen3_5ForCausalLM", model_type="qwen3_next"), "which is 'qwen3_5_text'"),
        (
            config("LlamaForCausalLM", layer_types=["linear_attention"] * 9),
            "linear_attention are not supported.* full and sliding attention",
        ),
    ],
)
def test_unsupported_or_invalid_config_is_refused_by_field_name(config_json: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        shape(config_json)


def first_linear_attention(model: Decoder) -> LinearAttention:
    attention = model.layers[0].attention
    assert isinstance(attention, LinearAttention)
    return attention


def recurrent_weights(model: Decoder) -> Tensor:
    """Weights of the first recurrent layer that are cut between ranks: decay rates of heads, or filters of channels."""
    kinds = ShortConvolutions | LinearAttention | KimiDeltaAttention
    attention = next(reader for layer in model.layers for reader in layer.readers if isinstance(reader, kinds))
    return attention.taps if isinstance(attention, ShortConvolutions) else attention.rates


def test_decay_rates_and_offsets_stay_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    """Since small errors of decay rates add up over positions. Other weights have the model's number format."""
    folder = Path(shutil.copytree(tiny.folder("qwen3.5"), tmp_path / "model"))
    stored = safetensors.torch.load_file(folder / WEIGHTS)
    exact = load_decoder(folder)
    rounded = {key: value if key.endswith(("A_log", "dt_bias")) else value.bfloat16() for key, value in stored.items()}
    safetensors.torch.save_file(rounded, folder / WEIGHTS, metadata={"format": "pt"})
    found, expected = first_linear_attention(load_decoder(folder, dtype="bfloat16")), first_linear_attention(exact)
    assert isinstance(found, GatedDelta)
    assert found.rates.equal(expected.rates)
    assert found.rates.equal(-stored["model.layers.0.linear_attn.A_log"].exp())
    assert found.offsets.equal(expected.offsets)
    assert found.taps.dtype == found.gains.dtype == torch.bfloat16


def test_mtp_layers_of_the_checkpoint_are_ignored(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny.folder("qwen3-next"), tmp_path / "model"))
    stored = safetensors.torch.load_file(folder / WEIGHTS)
    mtp_tensors = {f"mtp.{key.removeprefix('model.')}": value + 1 for key, value in stored.items() if "layers.1." in key}
    safetensors.torch.save_file(
        stored | mtp_tensors | {"mtp.fc.weight": torch.ones(64, 128)}, folder / WEIGHTS, metadata={"format": "pt"}
    )
    assert_same_weights(load_decoder(folder), tiny.decoder("qwen3-next"))


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_quantized_gate_projections_are_loaded_as_dequantized_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suffixes = ("in_proj_ba.weight", "in_proj_b.weight", "in_proj_a.weight")
    monkeypatch.setattr(packing, "PROJECTIONS", (*packing.PROJECTIONS, *suffixes))
    quantized, plain = packing.checkpoints(name, "float8", tmp_path)
    assert_same_weights(load_decoder(quantized), load_decoder(plain))
    assert_same_weights(build_decoder(quantized, LoadingRank(1)), build_decoder(plain, LoadingRank(1)))


@pytest.mark.parametrize("name", ["granite-4-h-wide", "qwen3.5-wide"])
@pytest.mark.parametrize("form", ["", "packed-zeros"])
def test_linear_attention_projections_stay_quantized_and_gates_do_not(
    form: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether quantized by `--quantize` or in the checkpoint. The projections of gates, decays and time steps have all bits."""
    monkeypatch.setattr(packing.FORMATS["packed-zeros"], "size", 32)
    tokens = prompt(2, 50)
    quantized, plain = packing.checkpoints(name, form, tmp_path) if form else (tiny.folder(name), tiny.folder(name))
    for rank in (SINGLE_RANK, LoadingRank(1)):
        found, expected = (
            first_linear_attention(build_decoder(folder, rank, torch.bfloat16, quantized))
            for folder, quantized in ((quantized, "" if form else "int4"), (plain, ""))
        )
        assert isinstance(found.inward, Quantized)
        assert isinstance(found.output, Quantized)
        assert found.gating is not None
        rows = torch.eye(64, dtype=torch.bfloat16)
        assert found.gating(rows).equal(expected.inward(rows)[:, -found.gating.shape[0] :])
    if form:
        exact = logits(load_decoder(plain), tokens)
        errors = [(logits(load_decoder(folder, dtype="bfloat16"), tokens) - exact).norm() for folder in (quantized, plain)]
        assert errors[0] < 1.5 * errors[1]


def test_dummy_weights_of_two_ranks_join_to_those_of_one(tmp_path: Path) -> None:
    for name in configurations.HYBRIDS:
        config_json = json.loads((tiny.folder(name) / "config.json").read_text())
        model = shape(config_json)
        source = DummyWeights(torch.float32, tiny.CPU, lambda read: None)
        rank_models = [Decoder(model, source, LoadingRank(rank), tiny.CPU) for rank in range(2)]
        found = torch.cat([recurrent_weights(rank_model) for rank_model in rank_models])
        assert found.equal(recurrent_weights(Decoder(model, source, SINGLE_RANK, tiny.CPU)))


def test_adapter_that_changes_convolutions_is_refused(tmp_path: Path) -> None:
    adapter = lora.adapter(tiny.folder("qwen3.5"), tmp_path / "adapter", 1)
    stored = safetensors.torch.load_file(adapter / lora.WEIGHTS)
    convolution_tensors = {
        f"base_model.model.model.layers.0.linear_attn.conv1d.lora_{factor}.weight": torch.ones(4, 4) for factor in "AB"
    }
    safetensors.torch.save_file(stored | convolution_tensors, adapter / lora.WEIGHTS)
    with pytest.raises(Unsupported, match=r"adapter a changes layers.0.linear_attn.conv1d, which is not supported.*merge it"):
        load_decoder(tiny.folder("qwen3.5"), adapters=(("a", str(adapter)),))


# Memory


def test_allocated_state_bytes_equal_the_planned_bytes() -> None:
    """No states are allocated before the number of sequences is known."""
    engine = load(ShardConfig(folder=str(tiny.folder("qwen3-next")), model="m"), lambda stage: None)
    assert engine.cache.slots == 0
    engine.resize(8, 5)
    state_bytes = sum(part.nbytes for state in engine.cache.states.values() for part in (state.windows, state.memories))
    assert state_bytes == engine.sequences(5, 1 << 60)[1] == engine.decoder.shape.states_bytes(1, 4, 5, prefix_caching=True)
    assert state_bytes == (1 + 5 + 2) * engine.decoder.shape.state_bytes(1, 4)


def test_measured_step_memory_does_not_include_recurrent_states() -> None:
    """The states of 64 sequences, 4 MiB each, don't grow with the tokens of a step."""
    fields = config("Qwen3_5ForCausalLM", hidden_size=64, num_hidden_layers=2, full_attention_interval=2, linear_num_value_heads=64)
    model = shape(fields | {"linear_num_key_heads": 1, "num_attention_heads": 2, "num_key_value_heads": 1})
    engine = Engine(Decoder(model, DummyWeights(torch.float32, tiny.CPU, lambda read: None), SINGLE_RANK, tiny.CPU), tiny.CPU, 16)
    *_, sample = memory.size_pool(engine, 4, 0.9, 64, 64, 64, 64)
    assert sample.tokens == 64
    assert sample.bytes < 128 << 20
    assert engine.cache.slots == engine.pool.pages == 0


def test_measured_step_includes_the_end_of_its_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the step is the largest one, with logits, however long prompts are."""
    monkeypatch.setattr(memory, "SAMPLE_TOKENS", 500)
    *_, sample = memory.size_pool(tiny.engine("qwen3.5"), 4, 0.9, 500, 1, 1, 500)
    assert sample.tokens == 500


def test_copying_states_needs_no_temporary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Because no step with forking sequences is measured."""
    with fake_cuda.device(monkeypatch, shapes=1000) as device, torch.inference_mode():
        cache = Cache(shape(config()), 1, 1, 16, torch.bfloat16, torch.device("cuda"), 16)
        allocated = device.most
        cache.copy_states([(1 + number, 9 + number) for number in range(8)])
        assert device.most == allocated > 16 * 7 * 32 * 128 * 128 * 4


@functools.cache
def result_without_drafts(name: str) -> Results:
    return drive(tiny.engine(name, 16, 2000, prefix_caching=False), sample_groups(0), Traffic())


@pytest.mark.parametrize(
    ("name", "proposer", "drafts", "page_size", "chunk", "prefix_caching"),
    [
        ("granite-4-h-moe", "right", 8, 1, UNLIMITED, True),
        ("granite-4-h-moe", "chains", 4, 1, 7, True),
        ("lfm2", "lookup", 4, 4, UNLIMITED, False),
        ("lfm2", "right", 4, 16, 7, True),
        ("lfm2", "chains", 8, 4, 7, False),
        ("qwen3-next", "right", 8, 1, UNLIMITED, True),
        ("qwen3-next", "chains", 1, 16, UNLIMITED, True),
        ("qwen3-next", "chains", 4, 1, 7, True),
        ("olmo-hybrid", "chains", 4, 4, 7, True),
        ("glm-5-next", "chains", 4, 4, 7, True),
        ("glm-5-pools", "chains", 8, 16, 7, True),
        ("glm-5-pools", "right", 4, 4, UNLIMITED, False),
        ("qwen4-exp", "chains", 4, 4, 7, True),
        ("deepseek-v4", "chains", 4, 1, 7, True),
        ("qwen3.5", "right", 4, 16, 7, True),
        ("qwen3.5", "chains", 8, 4, 7, False),
    ],
)
def test_speculation_with_recurrent_states_changes_no_token(
    name: str, proposer: str, drafts: int, page_size: int, chunk: int, prefix_caching: bool
) -> None:
    plain, groups = result_without_drafts(name), sample_groups(drafts)
    engine = tiny.engine(name, page_size, pages_of_largest_group(groups, page_size) + 40 // page_size, prefix_caching)
    test_speculation.set_proposer(engine, proposer, plain)
    result = drive(engine, groups, Traffic(chunk, pause=0.05), seed=drafts)
    assert result.tokens == plain.tokens
    assert result.finishes == plain.finishes
    assert result.drafted > 0
    assert result.accepted > 100 or proposer == "lookup" or drafts == 1
    assert result.pauses
    assert all_pages_free(engine)


def test_all_drafts_of_a_perfect_proposer_are_accepted() -> None:
    engine = tiny.engine("qwen3.5")
    test_speculation.set_proposer(engine, "right", result_without_drafts("qwen3.5"))
    result = drive(engine, sample_groups(6), Traffic())
    assert result.accepted == result.drafted > 200


@pytest.mark.parametrize(("name", "recomputed_tokens"), [("qwen3.5", 8 * 4), ("llama", 0)])
def test_measured_step_includes_accepted_drafts_that_are_recomputed(
    name: str, recomputed_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step filled by prompts, as many accepted draft tokens as possible are recomputed beside max_step_tokens."""
    measured_tokens: list[int] = []

    def size(engine: Engine, pages: int, fraction: float, tokens: int, *rest: object) -> tuple[int, int, Measured]:
        measured_tokens.append(tokens)
        return 100, 8, Measured(1, 0, 1.0)

    monkeypatch.setattr("penstock.shard.service.size_pool", size)
    config = ShardConfig(folder=str(tiny.folder(name)), model=name, speculate="ngram=4")
    service = Service(config, lambda code: None)
    service._engine = load(config, lambda stage: None)
    service._measure(WarmupRequest(max_step_tokens=48, max_step_rows=40, max_total_tokens=256, max_sequences=8))
    assert measured_tokens == [48 + recomputed_tokens]


@pytest.mark.parametrize("choices", [1, 2])
def test_reported_page_growth_does_not_depend_on_drafts_yet_to_be_recomputed(choices: int) -> None:
    """The next steps continue behind all accepted tokens and need pages for them, though fewer tokens have been computed."""
    group = tiny.group(0, prompt(1, 9), 40, drafts=4, continuations=[(choice, prompt(2, 8)) for choice in range(choices)])
    for sequence in group.sequences:
        sequence.pages = page_table(range(1, 6))
    group.decodes, reported = True, set()
    for computed in (16, 13, 11):
        for sequence in group.sequences:
            sequence.computed = computed
        reported.add(group.standing(4))
    [(_, grow, _)] = reported
    assert grow == choices * 2  # pages for two steps of 5 tokens each, beyond the 16 tokens accepted so far


def test_recomputed_drafts_are_not_counted_as_decode_tokens() -> None:
    """The router takes the decode tokens of a step without its draft tokens for the number of sequences, from which it learns what
    drafts gain."""
    engine, [group] = tiny.engine("qwen3.5"), [candidate for candidate in sample_groups(4) if candidate.uid == 3]
    test_speculation.set_proposer(engine, "right", result_without_drafts("qwen3.5"))
    engine.prefill(0, [group], [(3, UNLIMITED)], UNLIMITED, [])
    [sequence], most_recomputed = group.sequences, 0
    while group.uid in engine.books.groups:
        length, recomputed = len(sequence.tokens), len(sequence.tokens) - sequence.computed
        step = engine.decode([0])
        assert step.decode_tokens == 1 + step.drafted
        assert step.decode_keys == sum(range(length, length + 1 + step.drafted))
        most_recomputed = max(most_recomputed, recomputed)
    assert most_recomputed > 2
