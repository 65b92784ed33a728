"""Config.json files of architectures that are not Llama's: defaults of missing fields and parameter counts against transformers'
configurations and models, fields with several names, and the refusal of unsupported or invalid values."""

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

from penstock.shard.config import ShardConfig
from penstock.shard.loading import load
from penstock.shard.models.families import FAMILIES, shape
from penstock.shard.models.fields import PUBLISHED
from penstock.shard.models.heads import HeadAttention
from penstock.shard.models.image_families import IMAGES
from penstock.shard.models.mlp import MixtureOfExperts
from penstock.shard.models.shape import Unsupported
from penstock.shard.models.traits import Mixture
from penstock.shard.sequence import sequences
from penstock.shard.step import Span
from penstock.tests.shard import configurations, tiny
from penstock.tests.shard.configurations import LONGROPE, SMALL, YARN
from penstock.tests.shard.test_against_transformers import assert_logits_close, prompt
from penstock.tests.shard.test_weights import assert_same_weights


def config(architecture: str, **more: Any) -> dict[str, Any]:
    return SMALL | {"architectures": [architecture]} | more


@pytest.mark.parametrize(
    ("architecture", "config_class"),
    [
        ("AfmoeForCausalLM", transformers.AfmoeConfig),
        ("ApertusForCausalLM", transformers.ApertusConfig),
        ("ArceeForCausalLM", transformers.ArceeConfig),
        ("CohereForCausalLM", transformers.CohereConfig),
        ("Cohere2ForCausalLM", transformers.Cohere2Config),
        ("Cohere2MoeForCausalLM", transformers.Cohere2MoeConfig),
        ("CwmForCausalLM", transformers.CwmConfig),
        ("Dots1ForCausalLM", transformers.Dots1Config),
        ("Ernie4_5ForCausalLM", transformers.Ernie4_5Config),
        ("Ernie4_5_MoeForCausalLM", transformers.Ernie4_5_MoeConfig),
        ("Exaone4ForCausalLM", transformers.Exaone4Config),
        ("ExaoneMoeForCausalLM", transformers.ExaoneMoeConfig),
        ("FlexOlmoForCausalLM", transformers.FlexOlmoConfig),
        ("FlintForCausalLM", transformers.FlintConfig),
        ("GemmaForCausalLM", transformers.GemmaConfig),
        ("Gemma2ForCausalLM", transformers.Gemma2Config),
        ("Gemma3ForCausalLM", transformers.Gemma3TextConfig),
        ("GlmForCausalLM", transformers.GlmConfig),
        ("Glm4ForCausalLM", transformers.Glm4Config),
        ("Glm4MoeForCausalLM", transformers.Glm4MoeConfig),
        ("GraniteForCausalLM", transformers.GraniteConfig),
        ("GraniteMoeForCausalLM", transformers.GraniteMoeConfig),
        ("GraniteMoeSWAForCausalLM", transformers.GraniteMoeSWAConfig),
        ("GraniteMoeSharedForCausalLM", transformers.GraniteMoeSharedConfig),
        ("GraniteSWAForCausalLM", transformers.GraniteSWAConfig),
        ("HunYuanDenseV1ForCausalLM", transformers.HunYuanDenseV1Config),
        ("HunYuanMoEV1ForCausalLM", transformers.HunYuanMoEV1Config),
        ("HyperCLOVAXForCausalLM", transformers.HyperCLOVAXConfig),
        ("HYV3ForCausalLM", transformers.HYV3Config),
        ("InternLM3ForCausalLM", transformers.InternLM3Config),
        ("IQuestCoderForCausalLM", transformers.IQuestCoderConfig),
        ("Jais2ForCausalLM", transformers.Jais2Config),
        ("Lfm2ForCausalLM", transformers.Lfm2Config),
        ("LlamaForCausalLM", transformers.LlamaConfig),
        ("MellumForCausalLM", transformers.MellumConfig),
        ("MiniMaxM2ForCausalLM", transformers.MiniMaxM2Config),
        ("MinistralForCausalLM", transformers.MinistralConfig),
        ("MistralForCausalLM", transformers.MistralConfig),
        ("MixtralForCausalLM", transformers.MixtralConfig),
        ("NanoChatForCausalLM", transformers.NanoChatConfig),
        ("NemotronForCausalLM", transformers.NemotronConfig),
        ("Olmo2ForCausalLM", transformers.Olmo2Config),
        ("Olmo3ForCausalLM", transformers.Olmo3Config),
        ("OlmoeForCausalLM", transformers.OlmoeConfig),
        ("Phi3ForCausalLM", transformers.Phi3Config),
        ("PhimoeForCausalLM", transformers.PhimoeConfig),
        ("Qwen2ForCausalLM", transformers.Qwen2Config),
        ("Qwen2MoeForCausalLM", transformers.Qwen2MoeConfig),
        ("Qwen3ForCausalLM", transformers.Qwen3Config),
        ("Qwen3MoeForCausalLM", transformers.Qwen3MoeConfig),
        ("SeedOssForCausalLM", transformers.SeedOssConfig),
        ("SmolLM3ForCausalLM", transformers.SmolLM3Config),
        ("SolarOpenForCausalLM", transformers.SolarOpenConfig),
        ("StableLmForCausalLM", transformers.StableLmConfig),
        ("Starcoder2ForCausalLM", transformers.Starcoder2Config),
        ("VaultGemmaForCausalLM", transformers.VaultGemmaConfig),
    ],
)
def test_fields_missing_in_config_json_have_transformers_defaults(architecture: str, config_class: Any) -> None:
    fields = {
        "vocab_size": 32_064,
        "hidden_size": 4096,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
    }
    expected, found = config_class(**fields), shape({"architectures": [architecture]} | fields)
    ropes = expected.rope_parameters
    assert found.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    epsilons = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")
    [epsilon] = {getattr(expected, name, None) for name in epsilons} - {None}
    assert (found.norm_epsilon, found.max_positions) == (epsilon, expected.max_position_embeddings)
    assert (found.kv_heads, found.head_size) == (expected.num_key_value_heads or 32, getattr(expected, "head_dim", None) or 128)
    assert found.tied == expected.tie_word_embeddings
    assert (found.rotary_size or found.head_size) == int(found.head_size * ropes.get("partial_rotary_factor", 1))
    names = ("attention_bias", "qkv_bias", "use_bias", "use_qkv_bias")
    [bias] = {getattr(expected, name, None) for name in names} - {None} or {architecture == "Qwen2ForCausalLM"}
    assert found.qkv_bias == bias
    assert found.logit_divisor == 1 / getattr(expected, "logit_scale", 1)
    assert found.qk_norm == getattr(expected, "use_qk_norm", found.qk_norm)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4},
        {"sliding_window": 8, "sliding_window_pattern": 2},
    ],
)
@pytest.mark.parametrize(
    ("architecture", "config_class"),
    [
        ("AfmoeForCausalLM", transformers.AfmoeConfig),
        ("Cohere2ForCausalLM", transformers.Cohere2Config),
        ("CwmForCausalLM", transformers.CwmConfig),
        ("Dots1ForCausalLM", transformers.Dots1Config),
        ("Exaone4ForCausalLM", transformers.Exaone4Config),
        ("MinistralForCausalLM", transformers.MinistralConfig),
        ("Olmo3ForCausalLM", transformers.Olmo3Config),
        ("Qwen2MoeForCausalLM", transformers.Qwen2MoeConfig),
        ("SmolLM3ForCausalLM", transformers.SmolLM3Config),
    ],
)
def test_layer_types_missing_in_config_json_are_those_of_transformers(
    architecture: str, config_class: Any, more: dict[str, Any]
) -> None:
    """Configs that transformers saves list layer types; others may leave them out."""
    fields = SMALL | {"num_hidden_layers": 9} | more
    expected, found = config_class(**fields), shape({"architectures": [architecture]} | fields)
    assert [window > 0 for window in found.windows] == [kind == "sliding_attention" for kind in expected.layer_types]
    assert set(found.windows) <= {0, expected.sliding_window}
    layers_without_rope = [layer for layer, has_rope in enumerate(getattr(expected, "no_rope_layers", [])) if not has_rope]
    if architecture in ("AfmoeForCausalLM", "Exaone4ForCausalLM", "Cohere2ForCausalLM"):
        layers_without_rope = [layer for layer, kind in enumerate(expected.layer_types) if kind == "full_attention"]
    assert sorted(found.nope_layers) == layers_without_rope
    expected_count = 9 // more.get("sliding_window_pattern", 4)
    counts = {
        "AfmoeForCausalLM": 2,
        "SmolLM3ForCausalLM": 2,
        "Exaone4ForCausalLM": expected_count,
        "Cohere2ForCausalLM": expected_count,
    }
    assert len(layers_without_rope) == counts.get(architecture, 0)


@pytest.mark.parametrize(
    ("architecture", "config_class"),
    [
        ("AXK1ForCausalLM", transformers.AXK1Config),
        ("AXK2ForCausalLM", transformers.AXK2Config),
        ("FlintForCausalLM", transformers.FlintConfig),
        ("GraniteMoeSWAForCausalLM", transformers.GraniteMoeSWAConfig),
        ("GraniteSWAForCausalLM", transformers.GraniteSWAConfig),
        ("Kolibri1ForCausalLM", transformers.Kolibri1Config),
        ("LagunaForCausalLM", transformers.LagunaConfig),
        ("Lfm3ForCausalLM", transformers.Lfm3Config),
        ("MiMoV2FlashForCausalLM", transformers.MiMoV2FlashConfig),
        ("MiniCPM3ForCausalLM", transformers.MiniCPM3Config),
    ],
)
def test_minimal_config_gives_the_same_shape_as_one_saved_by_transformers(architecture: str, config_class: Any) -> None:
    """Defaults of layer types, sliding windows, rotary embeddings and experts."""
    written = config_class(num_hidden_layers=14).to_dict() | {"architectures": [architecture]}
    names = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "architectures")
    required_fields = {"intermediate_size": 88} | {name: written[name] for name in names if name in written}
    assert shape(required_fields) == shape(required_fields | written)


@pytest.mark.parametrize("pattern", [1, 2])
@pytest.mark.parametrize("dense", [0, 3])
def test_layer_types_of_command_a_plus_are_those_of_transformers(pattern: int, dense: int) -> None:
    """Dense layers have a sliding window pattern of their own."""
    more = {"num_hidden_layers": 9, "first_k_dense_replace": dense, "prefix_dense_sliding_window_pattern": pattern}
    expected = transformers.Cohere2MoeConfig(**SMALL | more | {"sliding_window_pattern": 3})
    found = shape(config("Cohere2MoeForCausalLM", sliding_window_pattern=3, **more))
    kinds = {"layer_types": expected.layer_types, "mlp_layer_types": expected.mlp_layer_types}
    assert found == shape(
        config("Cohere2MoeForCausalLM", prefix_dense_sliding_window_pattern=pattern, num_hidden_layers=9, **kinds)
    )
    assert [mixture is None for mixture in found.mixtures] == [kind == "dense" for kind in expected.mlp_layer_types]


@pytest.mark.parametrize("name", sorted(configurations.FAMILIES))
def test_parameter_count_equals_transformers(name: str) -> None:
    reference = tiny.reference(name)
    corrections = [values for key, values in reference.named_buffers() if "correction" in key or "expert_bias" in key]
    found = tiny.decoder(name).shape
    not_text = ["vision_tower", "projector", "visual."]
    if found.index and not found.index.pool:
        not_text.append("index_kpool")  # no parameters if pools have one token, whose key is the token's own
    parameters = [values for key, values in reference.named_parameters() if not any(part in key for part in not_text)]
    unused = (found.learned or 0) * found.hidden  # rows of OPT's position table that are never read
    mixtures = filter(None, found.mixtures)
    unused += sum(
        2 * mixture.idle * mixture.size * found.hidden for mixture in mixtures
    )  # of zero-computation experts: half as many as other experts have
    assert found.parameters() + unused == sum(values.numel() for values in (*parameters, *corrections))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [
        *(
            "bloom",
            "dbrx",
            "deepseek-v3",
            "gemma3n",
            "longcat",
            "gemma4",
            "gemma4-e",
            "gemma4-experts",
            "hunyuan",
            "mpt",
            "nanochat",
        ),
        *("llama4", "llama4-full", "llama4-steps", "ministral3", "mistral4", "mistral-large4", "mistral-large4-plain"),
    ],
)
def test_planned_weight_bytes_equal_the_loaded_bytes(name: str, dtype: str) -> None:
    model = load(ShardConfig(folder=str(tiny.folder(name)), model=name, dtype=dtype), lambda stage: None).decoder
    planned = model.shape.weight_bytes(1, 4 if dtype == "float32" else 2, "cpu", dtype, not model.head.shared)
    assert planned == model.weight_bytes


def test_docs_list_every_supported_architecture() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    named = set(re.findall(r"`(\w+(?:For\w+|LMHeadModel))`", text))
    assert named == set(FAMILIES | IMAGES) | set(PUBLISHED)


def test_moe_defaults_of_softmax_routers_are_those_of_transformers() -> None:
    defaults = transformers.Qwen3MoeConfig()
    expected = Mixture(
        experts=defaults.num_experts,
        chosen=defaults.num_experts_per_tok,
        size=defaults.moe_intermediate_size,
        normalized=defaults.norm_topk_prob,
    )
    assert shape(config("Qwen3MoeForCausalLM")).mixtures == (expected,) * 2
    defaults = transformers.Qwen2MoeConfig()
    shared = Mixture(
        experts=defaults.num_experts,
        chosen=defaults.num_experts_per_tok,
        size=defaults.moe_intermediate_size,
        normalized=defaults.norm_topk_prob,
        shared=defaults.shared_expert_intermediate_size,
    )
    assert shape(config("Qwen2MoeForCausalLM")).mixtures == (shared,) * 2
    mixtral, mixtral_mixture = transformers.MixtralConfig(), shape(config("MixtralForCausalLM")).mixtures[0]
    assert mixtral_mixture is not None
    assert (mixtral_mixture.experts, mixtral_mixture.chosen) == (mixtral.num_local_experts, mixtral.num_experts_per_tok)
    granite, [granite_mixture, _] = transformers.GraniteMoeConfig(), shape(config("GraniteMoeForCausalLM")).mixtures
    assert granite_mixture is not None
    assert (granite_mixture.experts, granite_mixture.chosen, granite_mixture.shared) == (
        granite.num_local_experts,
        granite.num_experts_per_tok,
        0,
    )
    assert shape(config("GraniteMoeSharedForCausalLM")).mixtures == (granite_mixture,) * 2
    assert shape(config("MixtralForCausalLM")).windows == (mixtral.sliding_window or 0,) * 2


def mixtures_of(name: str) -> tuple[Mixture | None, ...]:
    return shape(config(f"{name}ForCausalLM", num_hidden_layers=3)).mixtures


def test_moe_defaults_of_sigmoid_routers_are_those_of_transformers() -> None:
    glm, dots, minimax, ernie, olmoe = map(mixtures_of, ("Glm4Moe", "Dots1", "MiniMaxM2", "Ernie4_5_Moe", "Olmoe"))
    defaults = transformers.Glm4MoeConfig()
    glm_mixture = Mixture(
        experts=defaults.n_routed_experts,
        chosen=defaults.num_experts_per_tok,
        size=defaults.moe_intermediate_size,
        normalized=defaults.norm_topk_prob,
        scores="sigmoid",
        correction="gate.e_score_correction_bias",
        groups=defaults.n_group,
        groups_chosen=defaults.topk_group,
        factor=defaults.routed_scaling_factor,
        shared=defaults.n_shared_experts * defaults.moe_intermediate_size,
        shared_name="shared_experts",
        shared_gate="",
    )
    assert glm == (None, glm_mixture, glm_mixture)
    assert defaults.first_k_dense_replace == 1
    defaults = transformers.Dots1Config()
    assert dots == (replace(glm_mixture, normalized=defaults.norm_topk_prob, shared=0),) * 3
    defaults = transformers.ExaoneMoeConfig()
    names = {"experts": defaults.num_experts, "size": defaults.moe_intermediate_size, "factor": defaults.routed_scaling_factor}
    expected = replace(glm_mixture, **names, shared=defaults.moe_intermediate_size, correction="e_score_correction_bias")
    assert mixtures_of("ExaoneMoe") == (None, expected, expected)
    defaults = transformers.SolarOpenConfig()
    names = {"experts": defaults.n_routed_experts, "size": defaults.moe_intermediate_size, "factor": defaults.routed_scaling_factor}
    assert mixtures_of("SolarOpen") == (replace(glm_mixture, **names, shared=defaults.moe_intermediate_size),) * 3
    defaults = transformers.AfmoeConfig()
    names = {"experts": defaults.num_experts, "chosen": defaults.num_experts_per_tok, "factor": defaults.route_scale}
    expected = replace(
        glm_mixture, **names, shared=2 * defaults.moe_intermediate_size, correction="expert_bias", router="router.gate"
    )
    assert mixtures_of("Afmoe") == (None, expected, expected)
    defaults = transformers.HYV3Config()
    names = {"experts": defaults.num_experts, "size": defaults.moe_intermediate_size, "factor": defaults.router_scaling_factor}
    expected = replace(glm_mixture, **names, shared=defaults.moe_intermediate_size, correction="expert_bias")
    assert mixtures_of("HYV3") == (None, *(replace(expected, router="router.gate", shared_name="shared_mlp"),) * 2)
    defaults = transformers.MellumConfig()
    [mellum] = set(mixtures_of("Mellum"))
    assert mellum == Mixture(experts=defaults.num_experts, chosen=defaults.num_experts_per_tok, size=896, normalized=True)
    defaults = transformers.MiniMaxM2Config()
    assert [(one.experts, one.chosen, one.size) for one in minimax if one] == [(defaults.num_experts, 8, 88)] * 3
    defaults = transformers.Ernie4_5_MoeConfig(num_hidden_layers=3)
    found = [(one.experts, one.chosen, one.size, one.shared) for one in ernie if one]
    size = defaults.moe_intermediate_size
    assert found == [(defaults.moe_num_experts, defaults.moe_k, size, defaults.moe_num_shared_experts * size)] * 2
    assert ernie[0] is None
    defaults = transformers.OlmoeConfig()
    assert [(one.experts, one.chosen, one.normalized) for one in olmoe if one] == [
        (defaults.num_experts, 8, defaults.norm_topk_prob)
    ] * 3


@pytest.mark.parametrize(
    "more",
    [
        {"moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_num_shared_experts": 3},
        {"moe_layer_interval": 3, "moe_layer_start_index": 3, "moe_layer_end_index": 6, "moe_num_shared_experts": 0},
    ],
)
def test_ernie_moe_layers_are_those_of_transformers(more: dict[str, Any]) -> None:
    fields = SMALL | {"num_hidden_layers": 9, "moe_num_experts": 3, "moe_k": 2} | more
    with torch.device("meta"):
        reference = transformers.Ernie4_5_MoeForCausalLM(transformers.Ernie4_5_MoeConfig(**fields))
    found = shape({"architectures": ["Ernie4_5_MoeForCausalLM"]} | fields)
    assert [mixture is not None for mixture in found.mixtures] == [
        hasattr(layer.mlp, "experts") for layer in reference.model.layers
    ]
    assert found.parameters() == reference.num_parameters()


def test_dots1_without_a_sliding_window_has_full_attention_in_all_layers() -> None:
    fields = SMALL | {"num_hidden_layers": 4, "sliding_window": None, "max_window_layers": 2, "num_experts_per_tok": 2}
    assert set(transformers.Dots1Config(**fields).layer_types) == {"full_attention"}
    assert shape({"architectures": ["Dots1ForCausalLM"]} | fields).windows == (0,) * 4


GLM_AIR = {
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 10_944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
}
DOTS = {
    "vocab_size": 152_064,
    "hidden_size": 4096,
    "intermediate_size": 10_944,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}
MINIMAX = {
    "vocab_size": 200_064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
}
ERNIE = {
    "vocab_size": 103_424,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
}
OLMOE = {
    "vocab_size": 50_304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
}


LONGROPE_WITH_MSCALES = LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.0, "original_max_position_embeddings": 64}
QWEN3_NEXT = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
}
QWEN3_5 = {
    "vocab_size": 248_320,
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "linear_num_value_heads": 48,
}
NEMOTRON_3 = {
    "vocab_size": 131_072,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}
LFM_2 = {
    "vocab_size": 65_536,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "num_hidden_layers": 24,
    "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
}
GRANITE_4_H = {
    "vocab_size": 100_352,
    "hidden_size": 4096,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_d_state": 128,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "tie_word_embeddings": True,
}
QWEN3_5_MOE = {"vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16}


@pytest.mark.parametrize(
    ("architecture", "sizes", "billions", "active"),
    [
        ("Glm4MoeForCausalLM", GLM_AIR, 106, 12),
        ("Dots1ForCausalLM", DOTS, 142, 14),
        ("MiniMaxM2ForCausalLM", MINIMAX, 229, 10),
        ("Ernie4_5_MoeForCausalLM", ERNIE, 21, 3),
        ("OlmoeForCausalLM", OLMOE, 7, 1),
        ("GraniteMoeHybridForCausalLM", GRANITE_4_H, 32, 9),
        ("Lfm2MoeForCausalLM", LFM_2, 8, 1),
        ("NemotronHForCausalLM", NEMOTRON_3, 32, 3),
        ("Qwen3NextForCausalLM", QWEN3_NEXT, 80, 3),
        ("Qwen3_5ForCausalLM", QWEN3_5, 27, 25),
        ("Qwen3_5MoeForCausalLM", QWEN3_5_MOE, 35, 3),
    ],
)
def test_total_and_active_parameters_match_the_published_models(
    architecture: str, sizes: dict[str, Any], billions: int, active: int
) -> None:
    found = shape({"architectures": [architecture]} | sizes)
    assert found.parameters() / 1e9 == pytest.approx(billions, abs=1)
    embedding_and_output = found.vocabulary * found.hidden * (1 if found.tied else 2)  # which some model names do not count
    assert found.parameters(tokens=1) - embedding_and_output < (active + 0.5) * 1e9 < found.parameters(tokens=1) + 1e9


@pytest.mark.parametrize(("model_max_length", "expected"), [(131_072, 131_072), (4096, 8192), (None, 8192)])
def test_command_r_context_length_comes_from_model_max_length(model_max_length: int | None, expected: int) -> None:
    """The hub's config.json has 8,192 in max_position_embeddings."""
    assert (
        shape(config("CohereForCausalLM", max_position_embeddings=8192, model_max_length=model_max_length)).max_positions
        == expected
    )


def test_router_with_score_correction_stays_float32_in_a_bfloat16_model() -> None:
    """Scores with a correction may differ only in the last bits of float32."""
    folder = tiny.folder("ernie-moe")
    found = load(ShardConfig(folder=str(folder), model="m", dtype="bfloat16"), lambda stage: None).decoder.layers[1].mlp
    gate = tiny.reference("ernie-moe").model.layers[1].mlp.gate
    assert isinstance(found, MixtureOfExperts)
    assert found.correction is not None
    assert found.correction.equal(gate.moe_statics.e_score_correction_bias[0])
    torch.testing.assert_close(found.router(torch.eye(64)), gate.weight.T, atol=1e-6, rtol=1e-6)
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    _, shares, chosen = gate(x.float())
    found_weights = [
        dict(zip(*pair, strict=True)) for pair in zip(found.route(x)[1].tolist(), found.route(x)[0].tolist(), strict=True)
    ]
    expected_weights = [dict(zip(*pair, strict=True)) for pair in zip(chosen.tolist(), shares.tolist(), strict=True)]
    assert found_weights == [pytest.approx(each, rel=1e-5) for each in expected_weights]


def test_lfm2_moe_expert_weights_of_tiny_scores_sum_to_less_than_1() -> None:
    """LFM2 adds a constant to the sum by which scores are divided."""
    found, reference = tiny.decoder("lfm2-moe").layers[1].mlp, tiny.reference("lfm2-moe").model.layers[1].feed_forward
    assert isinstance(found, MixtureOfExperts)
    with torch.inference_mode():
        x = torch.linalg.lstsq(reference.gate.weight, torch.full((7, 1), -12.0)).solution.T
        _, shares, chosen = reference.gate(x, reference.expert_bias)
    weights, experts = found.route(x)
    assert (experts.tolist(), weights.sum().item()) == (chosen.tolist(), pytest.approx(shares.sum().item(), rel=1e-5))
    assert weights.sum() < 0.96


def test_missing_score_correction_is_accepted_for_ax_k1_only(tmp_path: Path) -> None:
    """The hub's checkpoint of A.X K1 lacks it; other models must have it."""
    for name, optional in (("ax-k1", True), ("deepseek-v3", False)):
        folder = shutil.copytree(tiny.folder(name), tmp_path / name)
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        remaining = {key: values for key, values in tensors.items() if "correction" not in key}
        assert len(remaining) < len(tensors)
        safetensors.torch.save_file(remaining, folder / "model.safetensors", {"format": "pt"})
        config = ShardConfig(folder=str(folder), model="m")
        if not optional:
            with pytest.raises(Unsupported, match="e_score_correction_bias"):
                load(config, lambda stage: None)
            continue
        found = load(config, lambda stage: None).decoder.layers[0].mlp
        assert isinstance(found, MixtureOfExperts)
        x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
        chosen = tiny.reference(name).model.layers[0].mlp.gate(x)[2]
        corrected = tiny.decoder(name).layers[0].mlp
        assert isinstance(corrected, MixtureOfExperts)
        assert corrected.correction is not None
        assert corrected.correction.count_nonzero()
        assert corrected.route(x)[1].sort(1).values.equal(chosen.sort(1).values)
        assert not found.route(x)[1].sort(1).values.equal(chosen.sort(1).values)


def test_laguna_rope_field_beside_the_layer_types_applies_to_each_of_them() -> None:
    """As in the hub's config.json, within rope_parameters."""
    ropes = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
    shared_field = {"original_max_position_embeddings": YARN["original_max_position_embeddings"]}
    without_it = {name: value for name, value in YARN.items() if name not in shared_field}
    fields = {"layer_types": ["full_attention", "sliding_attention"], "rope_parameters": ropes}
    expected = shape(config("LagunaForCausalLM", **fields))
    assert expected.rope.kind == "yarn"
    assert expected == shape(
        config("LagunaForCausalLM", **fields | {"rope_parameters": ropes | {"full_attention": without_it} | shared_field})
    )


def test_mimo_config_fields_of_the_hub_are_read() -> None:
    """The published values give the same shape as transformers' defaults; other values are taken over."""
    usual = {
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
        "moe_layer_freq": [0, *[1] * 6],
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "rope_theta": 5_000_000,
        "swa_rope_theta": 10_000,
        "partial_rotary_factor": 0.334,
        "layernorm_epsilon": 1e-5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    sizes = {"num_hidden_layers": 7, "num_attention_heads": 16, "num_key_value_heads": 4}
    assert shape(config("MiMoV2FlashForCausalLM", **sizes, **usual)) == shape(config("MiMoV2FlashForCausalLM", **sizes))
    others = {"hybrid_layer_pattern": [1, 0] * 3 + [1], "moe_layer_freq": [1] * 7, "rope_theta": 100, "swa_rope_theta": 200}
    others |= {"partial_rotary_factor": 0.5, "layernorm_epsilon": 0.1}
    found = shape(config("MiMoV2FlashForCausalLM", **sizes, **usual | others))
    assert [window > 0 for window in found.windows] == [True, False] * 3 + [True]
    assert all(found.mixtures)
    assert found.local_rope is not None
    assert (found.rope.theta, found.local_rope.theta, found.rotary_size, found.norm_epsilon) == (100, 200, 96, 0.1)


def test_mimo_sliding_window_size_excludes_the_token_itself() -> None:
    """sliding_window, transformers' field, includes it."""
    assert max(shape(config("MiMoV2FlashForCausalLM", sliding_window_size=7)).windows) == 8
    assert max(shape(config("MiMoV2FlashForCausalLM", sliding_window=7)).windows) == 7


@pytest.mark.parametrize("name", ["mistral", "ministral3", "mistral4"])
def test_text_of_a_mistral3_checkpoint_with_an_untied_output_matrix_is_loaded(name: str, tmp_path: Path) -> None:
    """As on the hub, where no field says whether embeddings are tied, and the text's model_type names the family."""
    reference = tiny.reference(name)
    (text := reference.config.to_dict()).pop("tie_word_embeddings")
    config_json = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    tensors = {f"language_model.{name}": values.contiguous() for name, values in reference.state_dict().items()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = load(ShardConfig(folder=str(tmp_path), model="m"), lambda stage: None).decoder
    assert_same_weights(found, tiny.decoder(name))
    assert replace(found.shape, architecture="") == replace(tiny.decoder(name).shape, architecture="")


def test_fields_beside_text_config_apply_to_the_text() -> None:
    """quantization_config and tie_word_embeddings of a model with images may stand beside text_config."""
    text = config("MistralForCausalLM")
    del text["architectures"]
    fields = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    quantization_config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    found = shape(fields | {"quantization_config": quantization_config, "tie_word_embeddings": True})
    assert found.tied
    assert found.quantization is not None
    assert (found.quantization.kind, found.quantization.group) == ("int4", 32)
    assert not shape(fields | {"text_config": text | {"tie_word_embeddings": False}, "tie_word_embeddings": True}).tied
    assert shape(fields).quantization is None


def test_calibrated_k_scale_is_ignored_if_keys_are_cached_without_norm_gains(tmp_path: Path) -> None:
    """Their norm comes after rotary embeddings, and its gains are multiplied into the queries."""
    scales = {f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor(0.25) for layer in range(2) for name in "kv"}
    reference = tiny.reference("hunyuan")
    (tmp_path / "config.json").write_text(reference.config.to_json_string())
    tensors = {name: values.contiguous() for name, values in reference.state_dict().items()} | scales
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = load(ShardConfig(folder=str(tmp_path), model="m"), lambda stage: None).decoder.layers[1].attention
    assert isinstance(found, HeadAttention)
    assert found.scales is not None
    assert found.scales.tolist() == [[1.0] * 4, [0.25] * 4]


@pytest.mark.parametrize(("longest", "tokens"), [(0, 40), (17, 17), (16, 16), (3, 3)])
def test_longrope_factors_depend_on_the_longest_possible_context(longest: int, tokens: int) -> None:
    """transformers switches to the long factors if the current context is longer than 16 tokens; penstock uses them for all
    contexts if the longest may be."""
    engine = load(ShardConfig(folder=str(tiny.folder("longrope")), model="m", longest=longest), lambda stage: None)
    engine.resize(8)
    prompt_tokens = prompt(1, tokens)
    [sequence], _ = sequences(prompt_tokens, 1)
    engine.pool.extend(sequence.pages, tokens)
    found = engine.decoder.logits(engine.forward([Span(sequence, 0, prompt_tokens, wanted=tokens)]))
    assert found is not None
    assert_logits_close(found, tiny.expected_logits("longrope", prompt_tokens))
    assert engine.decoder.shape.max_positions == (longest or 64)


@pytest.mark.parametrize("names", [("qkv_bias", "bias"), ("attention_bias", "mlp_bias")])
def test_internlm3_biases_are_read_by_either_field_name(names: tuple[str, str]) -> None:
    found = shape(config("InternLM3ForCausalLM", head_dim=8, **dict.fromkeys(names, True)))
    llama = config("LlamaForCausalLM", attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5)
    assert replace(found, architecture="LlamaForCausalLM") == shape(llama)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_number_of_experts_is_read_by_either_field_name(name: str) -> None:
    """The hub's configs and those of transformers 5 use different names."""
    [found, _] = shape(config("Qwen3MoeForCausalLM", **{name: 12})).mixtures
    assert found is not None
    assert found.experts == 12


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, [True] * 6),
        ({"mlp_only_layers": [0, 4]}, [False, True, True, True, False, True]),
        ({"decoder_sparse_step": 3}, [False, False, True, False, False, True]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [False, False, False, True, False, True]),
    ],
)
def test_moe_layers_follow_sparse_step_and_mlp_only_layers(more: dict[str, Any], expected: list[bool]) -> None:
    found = shape(config("Qwen3MoeForCausalLM", num_hidden_layers=6, **more))
    assert [mixture is not None for mixture in found.mixtures] == expected
    assert found.parameters(tokens=1) < found.parameters(tokens=2) < found.parameters()


def test_only_mlp_sizes_that_some_layer_uses_must_be_divisible_by_ranks() -> None:
    """The dense MLP's intermediate size matters only if a layer has one."""
    moe_config = config("Qwen3MoeForCausalLM", intermediate_size=87, moe_intermediate_size=20, num_experts=4, num_experts_per_tok=2)
    shape(moe_config).check_ranks(2)
    shared_expert_config = moe_config | {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 35}
    with pytest.raises(Unsupported, match="35 intermediate features of the shared expert can't be divided by 2"):
        shape(shared_expert_config).check_ranks(2)
    with pytest.raises(Unsupported, match="87 intermediate features can't be divided by 2"):
        shape(moe_config | {"mlp_only_layers": [0]}).check_ranks(2)
    with pytest.raises(Unsupported, match=r"21 intermediate features of an expert .* use --num-shard 1$"):
        shape(moe_config | {"moe_intermediate_size": 21}).check_ranks(2)


@pytest.mark.parametrize(
    ("architecture", "field"),
    [("MiniMaxM2ForCausalLM", "shared_intermediate_size"), ("Qwen3MoeForCausalLM", "shared_expert_intermediate_size")],
)
def test_shared_expert_size_of_0_means_no_shared_experts(architecture: str, field: str) -> None:
    """As in the config.json of MiniMax M2 and of Qwen 3 Coder 480B."""
    assert shape(config(architecture, **{field: 0})) == shape(config(architecture))


@pytest.mark.parametrize(
    ("architecture", "config_class"),
    [("Qwen3ForCausalLM", transformers.Qwen3Config), ("Qwen3MoeForCausalLM", transformers.Qwen3MoeConfig)],
)
def test_missing_head_dim_is_that_of_transformers(architecture: str, config_class: Any) -> None:
    """Qwen 3 has a fixed default; in its MoE models it follows from the number of heads."""
    fields = {"vocab_size": 99, "hidden_size": 2048, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 32}
    model = transformers.AutoModelForCausalLM.from_config(config_class(**fields, num_key_value_heads=4, num_experts=8))
    found = shape({"architectures": [architecture], "num_key_value_heads": 4} | fields)
    assert found.head_size == model.model.layers[0].self_attn.head_dim


def test_per_layer_lists_of_hunyuan_a13b_are_read_if_all_layers_are_alike() -> None:
    """As in its own config.json; transformers reads the first entry only."""
    lists = {"moe_topk": [2, 2], "moe_intermediate_size": [96, 96], "num_shared_expert": [1, 1]}
    given = config("HunYuanMoEV1ForCausalLM", intermediate_size=96, num_hidden_layers=2, num_experts=4)
    assert shape(given | lists) == shape(given | {"moe_topk": 2})
    for name, value in (("moe_intermediate_size", [96, 48]), ("num_shared_expert", [1, 2])):
        with pytest.raises(Unsupported, match=f"{name} .* is not supported"):
            shape(given | lists | {name: value})


@pytest.mark.parametrize(("published", "ours"), PUBLISHED.items())
def test_architecture_names_of_the_authors_own_code_are_read(published: str, ours: str) -> None:
    assert shape(config(published)) == shape(config(ours))


DIFFERENT_PARTIAL_ROTARY_FACTORS = {
    "full_attention": {"partial_rotary_factor": 0.5},
    "sliding_attention": {"partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize(
    ("config_json", "message"),
    [
        (config("MixtralForCausalLM", num_local_experts=2, num_experts_per_tok=3), "num_experts_per_tok 3, of 2 experts"),
        (config("MixtralForCausalLM", num_local_experts="8"), "num_local_experts '8', an integer"),
        (config("Qwen2MoeForCausalLM", shared_expert_intermediate_size=0), "shared_expert_intermediate_size 0, an integer"),
        (
            config("Qwen2MoeForCausalLM", layer_types=["full_attention", "sliding_attention"]),
            "sliding_window 0, and there are layers",
        ),
        (config("Qwen2MoeForCausalLM", max_window_layers=None), "max_window_layers null"),
        (config("Qwen2MoeForCausalLM", num_experts_per_tok=61), "num_experts_per_tok 61, of 60 experts"),
        (config("Qwen3MoeForCausalLM", mlp_only_layers="0"), "mlp_only_layers '0', a list"),
        (config("Qwen3MoeForCausalLM", mlp_only_layers=[0.5]), r"mlp_only_layers \[0.5\], a list"),
        (config("Qwen3MoeForCausalLM", decoder_sparse_step=0), "decoder_sparse_step 0"),
        (config("Qwen3MoeForCausalLM", norm_topk_prob=1), "norm_topk_prob 1, true or false"),
        (config("Qwen3MoeForCausalLM", model_type="qwen3"), "which is 'qwen3_moe'"),
        (config("CohereForCausalLM", use_qk_norm=True), "use_qk_norm true is not supported"),
        (config("Cohere2MoeForCausalLM", rope_scaling=YARN), "rope_scaling alone is not supported"),
        (config("Cohere2MoeForCausalLM", expert_selection_fn="relu"), "expert_selection_fn 'relu' is not supported"),
        (config("Cohere2MoeForCausalLM", shared_expert_combination_strategy="max"), "strategy 'max' is not supported"),
        (config("CohereForCausalLM", logit_scale="1"), "logit_scale '1', a number above 0"),
        (config("CohereForCausalLM", model_max_length="8192"), "model_max_length '8192', a number above 0"),
        (config("StableLmForCausalLM", qk_layernorm=True), "qk_layernorm true is not supported"),
        (config("StableLmForCausalLM", use_parallel_residual=1), "use_parallel_residual 1, true or false"),
        (config("Starcoder2ForCausalLM", hidden_act="relu"), "hidden_act 'relu' is not supported"),
        (config("AfmoeForCausalLM", attention_bias=True), "attention_bias true is not supported"),
        (config("AfmoeForCausalLM", score_func=None), "score_func null is not supported"),
        (config("AfmoeForCausalLM", score_func="softmax"), "score_func 'softmax' is not supported"),
        (config("ArceeForCausalLM", hidden_act="silu"), "hidden_act 'silu' is not supported: .* relu2"),
        (config("Glm4MoeForCausalLM", n_group=3), "n_group 3 and topk_group 1, of 128 experts"),
        (config("Glm4MoeForCausalLM", n_group=128), "n_group 128"),
        (config("Glm4MoeForCausalLM", topk_group=2), "n_group 1 and topk_group 2"),
        (config("Glm4MoeForCausalLM", n_group=32), "num_experts_per_tok 8, of 4 experts"),
        (config("Glm4MoeForCausalLM", first_k_dense_replace=-1), "first_k_dense_replace -1, an integer from 0"),
        (config("Glm4MoeForCausalLM", routed_scaling_factor=0), "routed_scaling_factor 0, a number above 0"),
        (config("Glm4MoeForCausalLM", routed_scaling_factor=10**400), "routed_scaling_factor 10*, a number above 0"),
        (config("Ernie4_5ForCausalLM", use_bias=True), "use_bias true is not supported"),
        (config("Ernie4_5_MoeForCausalLM", moe_layer_end_index=-2), "moe_layer_end_index -2, an integer from -1"),
        (config("Exaone4ForCausalLM", sliding_window_pattern="LLLG"), "sliding_window_pattern 'LLLG', an integer"),
        (config("HunYuanDenseV1ForCausalLM", use_cla=True), "use_cla true is not supported"),
        (config("HunYuanDenseV1ForCausalLM", use_qk_norm=False), "use_qk_norm false is not supported"),
        (config("HunYuanDenseV1ForCausalLM", rope_scaling=YARN), "'yarn' is not supported"),
        (config("HunYuanMoEV1ForCausalLM", num_experts=4, moe_topk=[2]), r"moe_topk \[2\], a number"),
        (config("HunYuanMoEV1ForCausalLM", num_experts=4, moe_topk=5), "num_experts_per_tok 5, of 4 experts"),
        (config("InternLM3ForCausalLM", qkv_bias=True, bias=False), "qkv_bias true and bias false"),
        (config("IQuestCoderForCausalLM", clip_qkv=8.0), "clip_qkv 8.0 is not supported"),
        (config("MiniMaxM2ForCausalLM", rotary_dim=5), r"an even number is needed"),
        (config("OlmoForCausalLM", clip_qkv=-8.0), "clip_qkv -8.0, a number above 0"),
        (config("Phi3ForCausalLM", partial_rotary_factor=0.4), "partial_rotary_factor 0.4, 3 of 8"),
        (config("Phi3ForCausalLM", rope_parameters={"partial_rotary_factor": 1.5}), "partial_rotary_factor 1.5, a number above 0"),
        (config("Phi3ForCausalLM", rope_scaling={"type": "longrope"}), "lacks 'short_factor'"),
        (config("Phi3ForCausalLM", rope_scaling=LONGROPE), "6 factors of longrope, 4 are needed"),
        (config("Phi3ForCausalLM", rope_scaling=LONGROPE | {"long_factor": [0.0]}), "long_factor 0.0, a number above 0"),
        (config("Phi3ForCausalLM", rope_scaling=LONGROPE | {"long_factor": 2}), "long_factor 2, a list"),
        (config("PhiForCausalLM", qk_layernorm=True), "qk_layernorm true is not supported"),
        (config("PhimoeForCausalLM", rope_scaling=YARN), "'yarn' is not supported: .* longrope"),
        (
            config("PhimoeForCausalLM", rope_scaling=LONGROPE_WITH_MSCALES | {"long_mscale": 2.0}),
            "short_mscale 1 and long_mscale 2",
        ),
        (config("PhimoeForCausalLM", rope_scaling=LONGROPE_WITH_MSCALES), "6 factors of longrope, 4 are needed"),
        (config("PhimoeForCausalLM", num_experts_per_tok=3), "num_experts_per_tok 3 is not supported"),
        (
            config("LlamaForCausalLM", rope_scaling=LONGROPE),
            "'longrope' is not supported: .* with original_max_position_embeddings",
        ),
        (
            config("LlamaForCausalLM", rope_scaling=LONGROPE, original_max_position_embeddings=8),
            "6 factors of longrope, 4 are needed",
        ),
        (config("GraniteForCausalLM", logits_scaling=0), "logits_scaling 0, a number above 0"),
        (config("GraniteSWAForCausalLM", layer_rope_theta=[1e4]), r"layer_rope_theta \[10000.0\], a number for each layer"),
        (config("GraniteSWAForCausalLM", layer_rope_theta=[[1], [2]]), "a number for each layer"),
        (config("GraniteSWAForCausalLM", layer_rope_theta=[1, 2], layer_types=["full_attention"] * 2), "one for full_attention"),
        (config("LagunaForCausalLM", num_attention_heads_per_layer=[8]), "a number for each layer"),
        (config("LagunaForCausalLM", num_attention_heads_per_layer=[8, 16]), "as many in all layers of a kind"),
        (config("LagunaForCausalLM", num_attention_heads_per_layer=[8, "8"]), "num_attention_heads_per_layer '8', an integer"),
        (
            config("LagunaForCausalLM", gating=False),
            "gating false is not supported: the decoder has true, 'per-head', 'per-element'",
        ),
        (config("LagunaForCausalLM", moe_router_logit_softcapping=30.0), "moe_router_logit_softcapping 30.0"),
        (
            config(
                "LagunaForCausalLM",
                num_attention_heads_per_layer=[6, 8],
                num_key_value_heads=4,
                layer_types=["full_attention", "sliding_attention"],
            ),
            "6 attention heads and 4 key/value heads",
        ),
        (config("LagunaForCausalLM", moe_router_score_func="sqrtsoftplus"), "moe_router_score_func 'sqrtsoftplus' is not"),
        (config("LagunaForCausalLM", swa_attention_sink_enabled=True), "swa_attention_sink_enabled true is not supported"),
        (config("MiMoV2FlashForCausalLM", hybrid_layer_pattern=[0, 2]), r"hybrid_layer_pattern \[0, 2\], 0 or 1 for each layer"),
        (config("MiMoV2FlashForCausalLM", add_full_attention_sink_bias=True), "add_full_attention_sink_bias true is not supported"),
        (config("MiMoV2FlashForCausalLM", swa_num_key_value_heads=4), "swa_num_key_value_heads 4 is not supported"),
        (config("MiMoV2FlashForCausalLM", v_head_dim=256), "v_head_dim 256 and head_dim 192"),
        (config("MiMoV2FlashForCausalLM", rope_parameters=DIFFERENT_PARTIAL_ROTARY_FACTORS), "partial_rotary_factor differs"),
        (config("MiniCPM3ForCausalLM", rope_scaling=LONGROPE | {"original_max_position_embeddings": 8}), "6 factors of longrope"),
        (config("Lfm3ForCausalLM", layer_types=["conv", "sliding_attention"], sliding_window=None), "sliding_window null"),
        (config("Olmo3ForCausalLM", sliding_window=None), "sliding_window null, and there are layers that slide"),
        (config("Olmo3ForCausalLM", rope_parameters={"rope_type": "default"}), "an object for each kind"),
        (config("SmolLM3ForCausalLM", no_rope_layers=[1]), r"no_rope_layers \[1\], 0 or 1 for each"),
        (config("SmolLM3ForCausalLM", no_rope_layers=["0", "1"]), "no_rope_layers"),
        (config("SmolLM3ForCausalLM", no_rope_layer_interval=0), "no_rope_layer_interval 0"),
        (config("SmolLM3ForCausalLM", layer_types=["full_attention", "sliding_attention"]), "layer's window is none"),
    ],
)
def test_unsupported_or_invalid_config_is_refused_by_field_name(config_json: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        shape(config_json)
