"""Architectures that are not Llama's: what their config.json files leave out, and what is refused by name."""

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
from penstock.tests.shard.test_oracle import close, prompt
from penstock.tests.shard.test_weights import same


def config(architecture: str, **more: Any) -> dict[str, Any]:
    return SMALL | {"architectures": [architecture]} | more


@pytest.mark.parametrize(
    ("architecture", "theirs"),
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
def test_what_is_left_out_is_transformers_default(architecture: str, theirs: Any) -> None:
    said = {"vocab_size": 32_064, "hidden_size": 4096, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 32}
    expected, found = theirs(**said), shape({"architectures": [architecture]} | said)
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
    ("architecture", "theirs"),
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
def test_layers_are_of_transformers_kinds(architecture: str, theirs: Any, more: dict[str, Any]) -> None:
    """Where config.json does not name them: those that transformers writes do."""
    said = SMALL | {"num_hidden_layers": 9} | more
    expected, found = theirs(**said), shape({"architectures": [architecture]} | said)
    assert [window > 0 for window in found.windows] == [kind == "sliding_attention" for kind in expected.layer_types]
    assert set(found.windows) <= {0, expected.sliding_window}
    still = [layer for layer, turns in enumerate(getattr(expected, "no_rope_layers", [])) if not turns]
    if architecture in ("AfmoeForCausalLM", "Exaone4ForCausalLM", "Cohere2ForCausalLM"):
        still = [layer for layer, kind in enumerate(expected.layer_types) if kind == "full_attention"]
    assert sorted(found.nope_layers) == still
    every = 9 // more.get("sliding_window_pattern", 4)
    counts = {"AfmoeForCausalLM": 2, "SmolLM3ForCausalLM": 2, "Exaone4ForCausalLM": every, "Cohere2ForCausalLM": every}
    assert len(still) == counts.get(architecture, 0)


@pytest.mark.parametrize(
    ("architecture", "theirs"),
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
def test_all_is_as_when_transformers_has_written_it(architecture: str, theirs: Any) -> None:
    """Kinds of layers, windows, rotary embeddings, experts: the usual ones are those that it writes."""
    written = theirs(num_hidden_layers=14).to_dict() | {"architectures": [architecture]}
    names = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "architectures")
    usual = {"intermediate_size": 88} | {name: written[name] for name in names if name in written}
    assert shape(usual) == shape(usual | written)


@pytest.mark.parametrize("pattern", [1, 2])
@pytest.mark.parametrize("dense", [0, 3])
def test_layers_of_command_a_plus_are_of_transformers_kinds(pattern: int, dense: int) -> None:
    """Those without experts slide by a pattern of their own."""
    more = {"num_hidden_layers": 9, "first_k_dense_replace": dense, "prefix_dense_sliding_window_pattern": pattern}
    theirs = transformers.Cohere2MoeConfig(**SMALL | more | {"sliding_window_pattern": 3})
    found = shape(config("Cohere2MoeForCausalLM", sliding_window_pattern=3, **more))
    kinds = {"layer_types": theirs.layer_types, "mlp_layer_types": theirs.mlp_layer_types}
    assert found == shape(
        config("Cohere2MoeForCausalLM", prefix_dense_sliding_window_pattern=pattern, num_hidden_layers=9, **kinds)
    )
    assert [mixture is None for mixture in found.mixtures] == [kind == "dense" for kind in theirs.mlp_layer_types]


@pytest.mark.parametrize("name", sorted(configurations.FAMILIES))
def test_parameters_are_counted_as_transformers_has_them(name: str) -> None:
    theirs = tiny.reference(name)
    corrections = [values for key, values in theirs.named_buffers() if "correction" in key or "expert_bias" in key]
    found = tiny.decoder(name).shape
    outside = ["vision_tower", "projector", "visual."]
    if found.index and not found.index.pool:
        outside.append("index_kpool")  # of pools of one token, whose keys are their own
    own = [values for key, values in theirs.named_parameters() if not any(part in key for part in outside)]
    padding = (found.learned or 0) * found.hidden  # rows of OPT's positions, which nobody looks at
    mixtures = filter(None, found.mixtures)
    padding += sum(
        2 * one.idle * one.size * found.hidden for one in mixtures
    )  # of experts that do nothing, half of what others have
    assert found.parameters() + padding == sum(values.numel() for values in (*own, *corrections))


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
def test_bytes_are_planned_as_they_are_held(name: str, dtype: str) -> None:
    model = load(ShardConfig(folder=str(tiny.folder(name)), model=name, dtype=dtype), lambda stage: None).decoder
    planned = model.shape.weight_bytes(1, 4 if dtype == "float32" else 2, "cpu", dtype, not model.head.shared)
    assert planned == model.weight_bytes


def test_the_documents_name_every_architecture() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    named = set(re.findall(r"`(\w+(?:For\w+|LMHeadModel))`", text))
    assert named == set(FAMILIES | IMAGES) | set(PUBLISHED)


def test_experts_are_transformers_by_default() -> None:
    theirs = transformers.Qwen3MoeConfig()
    expected = Mixture(
        experts=theirs.num_experts,
        chosen=theirs.num_experts_per_tok,
        size=theirs.moe_intermediate_size,
        normalized=theirs.norm_topk_prob,
    )
    assert shape(config("Qwen3MoeForCausalLM")).mixtures == (expected,) * 2
    theirs = transformers.Qwen2MoeConfig()
    shared = Mixture(
        experts=theirs.num_experts,
        chosen=theirs.num_experts_per_tok,
        size=theirs.moe_intermediate_size,
        normalized=theirs.norm_topk_prob,
        shared=theirs.shared_expert_intermediate_size,
    )
    assert shape(config("Qwen2MoeForCausalLM")).mixtures == (shared,) * 2
    first, second = transformers.MixtralConfig(), shape(config("MixtralForCausalLM")).mixtures[0]
    assert second is not None
    assert (second.experts, second.chosen) == (first.num_local_experts, first.num_experts_per_tok)
    granite, [same, _] = transformers.GraniteMoeConfig(), shape(config("GraniteMoeForCausalLM")).mixtures
    assert same is not None
    assert (same.experts, same.chosen, same.shared) == (granite.num_local_experts, granite.num_experts_per_tok, 0)
    assert shape(config("GraniteMoeSharedForCausalLM")).mixtures == (same,) * 2
    assert shape(config("MixtralForCausalLM")).windows == (first.sliding_window or 0,) * 2


def made(name: str) -> tuple[Mixture | None, ...]:
    return shape(config(f"{name}ForCausalLM", num_hidden_layers=3)).mixtures


def test_experts_with_scores_of_their_own_are_transformers_by_default() -> None:
    glm, dots, minimax, ernie, olmoe = map(made, ("Glm4Moe", "Dots1", "MiniMaxM2", "Ernie4_5_Moe", "Olmoe"))
    theirs = transformers.Glm4MoeConfig()
    of_glm = Mixture(
        experts=theirs.n_routed_experts,
        chosen=theirs.num_experts_per_tok,
        size=theirs.moe_intermediate_size,
        normalized=theirs.norm_topk_prob,
        sigmoid=True,
        correction="gate.e_score_correction_bias",
        groups=theirs.n_group,
        groups_chosen=theirs.topk_group,
        factor=theirs.routed_scaling_factor,
        shared=theirs.n_shared_experts * theirs.moe_intermediate_size,
        shared_name="shared_experts",
        shared_gate="",
    )
    assert glm == (None, of_glm, of_glm)
    assert theirs.first_k_dense_replace == 1
    theirs = transformers.Dots1Config()
    assert dots == (replace(of_glm, normalized=theirs.norm_topk_prob, shared=0),) * 3
    theirs = transformers.ExaoneMoeConfig()
    names = {"experts": theirs.num_experts, "size": theirs.moe_intermediate_size, "factor": theirs.routed_scaling_factor}
    expected = replace(of_glm, **names, shared=theirs.moe_intermediate_size, correction="e_score_correction_bias")
    assert made("ExaoneMoe") == (None, expected, expected)
    theirs = transformers.SolarOpenConfig()
    names = {"experts": theirs.n_routed_experts, "size": theirs.moe_intermediate_size, "factor": theirs.routed_scaling_factor}
    assert made("SolarOpen") == (replace(of_glm, **names, shared=theirs.moe_intermediate_size),) * 3
    theirs = transformers.AfmoeConfig()
    names = {"experts": theirs.num_experts, "chosen": theirs.num_experts_per_tok, "factor": theirs.route_scale}
    expected = replace(of_glm, **names, shared=2 * theirs.moe_intermediate_size, correction="expert_bias", router="router.gate")
    assert made("Afmoe") == (None, expected, expected)
    theirs = transformers.HYV3Config()
    names = {"experts": theirs.num_experts, "size": theirs.moe_intermediate_size, "factor": theirs.router_scaling_factor}
    expected = replace(of_glm, **names, shared=theirs.moe_intermediate_size, correction="expert_bias")
    assert made("HYV3") == (None, *(replace(expected, router="router.gate", shared_name="shared_mlp"),) * 2)
    theirs = transformers.MellumConfig()
    [mellum] = set(made("Mellum"))
    assert mellum == Mixture(experts=theirs.num_experts, chosen=theirs.num_experts_per_tok, size=896, normalized=True)
    theirs = transformers.MiniMaxM2Config()
    assert [(one.experts, one.chosen, one.size) for one in minimax if one] == [(theirs.num_experts, 8, 88)] * 3
    theirs = transformers.Ernie4_5_MoeConfig(num_hidden_layers=3)
    found = [(one.experts, one.chosen, one.size, one.shared) for one in ernie if one]
    size = theirs.moe_intermediate_size
    assert found == [(theirs.moe_num_experts, theirs.moe_k, size, theirs.moe_num_shared_experts * size)] * 2
    assert ernie[0] is None
    theirs = transformers.OlmoeConfig()
    assert [(one.experts, one.chosen, one.normalized) for one in olmoe if one] == [
        (theirs.num_experts, 8, theirs.norm_topk_prob)
    ] * 3


@pytest.mark.parametrize(
    "more",
    [
        {"moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_num_shared_experts": 3},
        {"moe_layer_interval": 3, "moe_layer_start_index": 3, "moe_layer_end_index": 6, "moe_num_shared_experts": 0},
    ],
)
def test_ernies_experts_are_where_transformers_has_them(more: dict[str, Any]) -> None:
    said = SMALL | {"num_hidden_layers": 9, "moe_num_experts": 3, "moe_k": 2} | more
    with torch.device("meta"):
        theirs = transformers.Ernie4_5_MoeForCausalLM(transformers.Ernie4_5_MoeConfig(**said))
    found = shape({"architectures": ["Ernie4_5_MoeForCausalLM"]} | said)
    assert [mixture is not None for mixture in found.mixtures] == [hasattr(layer.mlp, "experts") for layer in theirs.model.layers]
    assert found.parameters() == theirs.num_parameters()


def test_dots_slides_only_by_a_window() -> None:
    said = SMALL | {"num_hidden_layers": 4, "sliding_window": None, "max_window_layers": 2, "num_experts_per_tok": 2}
    assert set(transformers.Dots1Config(**said).layer_types) == {"full_attention"}
    assert shape({"architectures": ["Dots1ForCausalLM"]} | said).windows == (0,) * 4


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


MSCALES = LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.0, "original_max_position_embeddings": 64}
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
def test_sizes_are_those_in_the_models_names(architecture: str, sizes: dict[str, Any], billions: int, active: int) -> None:
    found = shape({"architectures": [architecture]} | sizes)
    assert found.parameters() / 1e9 == pytest.approx(billions, abs=1)
    tables = found.vocabulary * found.hidden * (1 if found.tied else 2)  # which some who name models leave out
    assert found.parameters(tokens=1) - tables < (active + 0.5) * 1e9 < found.parameters(tokens=1) + 1e9


@pytest.mark.parametrize(("said", "expected"), [(131_072, 131_072), (4096, 8192), (None, 8192)])
def test_command_r_says_elsewhere_how_far_it_goes(said: int | None, expected: int) -> None:
    """As the hub has it: 8,192 in the usual field."""
    assert shape(config("CohereForCausalLM", max_position_embeddings=8192, model_max_length=said)).max_positions == expected


def test_routers_with_scores_of_their_own_are_not_rounded() -> None:
    """What they choose by differs in the last bits of float32."""
    folder = tiny.folder("ernie-moe")
    found = load(ShardConfig(folder=str(folder), model="m", dtype="bfloat16"), lambda stage: None).decoder.layers[1].mlp
    gate = tiny.reference("ernie-moe").model.layers[1].mlp.gate
    assert isinstance(found, MixtureOfExperts)
    assert found.correction is not None
    assert found.correction.equal(gate.moe_statics.e_score_correction_bias[0])
    torch.testing.assert_close(found.router(torch.eye(64)), gate.weight.T, atol=1e-6, rtol=1e-6)
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    _, shares, chosen = gate(x.float())
    mine = [dict(zip(*pair, strict=True)) for pair in zip(found.route(x)[1].tolist(), found.route(x)[0].tolist(), strict=True)]
    theirs = [dict(zip(*pair, strict=True)) for pair in zip(chosen.tolist(), shares.tolist(), strict=True)]
    assert mine == [pytest.approx(each, rel=1e-5) for each in theirs]


def test_scores_that_are_hardly_any_have_smaller_shares() -> None:
    """LFM2's, which adds something to the sum that they are divided by."""
    found, theirs = tiny.decoder("lfm2-moe").layers[1].mlp, tiny.reference("lfm2-moe").model.layers[1].feed_forward
    assert isinstance(found, MixtureOfExperts)
    with torch.inference_mode():
        x = torch.linalg.lstsq(theirs.gate.weight, torch.full((7, 1), -12.0)).solution.T
        _, shares, chosen = theirs.gate(x, theirs.expert_bias)
    own, numbers = found.route(x)
    assert (numbers.tolist(), own.sum().item()) == (chosen.tolist(), pytest.approx(shares.sum().item(), rel=1e-5))
    assert own.sum() < 0.96


def test_what_corrects_scores_may_be_missing(tmp_path: Path) -> None:
    """Of A.X K1, as the hub has it; of others it must be there."""
    for name, able in (("ax-k1", True), ("deepseek-v3", False)):
        folder = shutil.copytree(tiny.folder(name), tmp_path / name)
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        left = {key: values for key, values in tensors.items() if "correction" not in key}
        assert len(left) < len(tensors)
        safetensors.torch.save_file(left, folder / "model.safetensors", {"format": "pt"})
        config = ShardConfig(folder=str(folder), model="m")
        if not able:
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


def test_what_laguna_says_of_all_layers_counts_for_each() -> None:
    """As the hub has it, within rope_parameters."""
    ropes = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
    scalar = {"original_max_position_embeddings": YARN["original_max_position_embeddings"]}
    left = {name: value for name, value in YARN.items() if name not in scalar}
    said = {"layer_types": ["full_attention", "sliding_attention"], "rope_parameters": ropes}
    expected = shape(config("LagunaForCausalLM", **said))
    assert expected.rope.kind == "yarn"
    assert expected == shape(config("LagunaForCausalLM", **said | {"rope_parameters": ropes | {"full_attention": left} | scalar}))


def test_mimo_says_in_its_own_words_what_it_is() -> None:
    """As the hub has it. Where these are the usual ones transformers' defaults say the same."""
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


def test_how_far_mimo_looks_back_does_not_count_the_token_itself() -> None:
    """In its own field."""
    assert max(shape(config("MiMoV2FlashForCausalLM", sliding_window_size=7)).windows) == 8
    assert max(shape(config("MiMoV2FlashForCausalLM", sliding_window=7)).windows) == 7


@pytest.mark.parametrize("name", ["mistral", "ministral3", "mistral4"])
def test_the_text_of_a_model_with_images_and_a_head_of_its_own(name: str, tmp_path: Path) -> None:
    """As the hub has it, where nothing says that tables are tied. The text's model_type says which family it is."""
    own = tiny.reference(name)
    (text := own.config.to_dict()).pop("tie_word_embeddings")
    said = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(said))
    tensors = {f"language_model.{name}": values.contiguous() for name, values in own.state_dict().items()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = load(ShardConfig(folder=str(tmp_path), model="m"), lambda stage: None).decoder
    same(found, tiny.decoder(name))
    assert replace(found.shape, architecture="") == replace(tiny.decoder(name).shape, architecture="")


def test_what_stands_beside_the_description_of_the_text() -> None:
    """Of few bits, and of tables, a model with images may speak for all of it."""
    text = config("MistralForCausalLM")
    del text["architectures"]
    said = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    few = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    found = shape(said | {"quantization_config": few, "tie_word_embeddings": True})
    assert found.tied
    assert found.quantization is not None
    assert (found.quantization.kind, found.quantization.group) == ("int4", 32)
    assert not shape(said | {"text_config": text | {"tie_word_embeddings": False}, "tie_word_embeddings": True}).tied
    assert shape(said).quantization is None


def test_keys_that_are_cached_without_gains_have_no_calibrated_scale(tmp_path: Path) -> None:
    """Their norms' are behind rotary: queries are multiplied by them."""
    scales = {f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor(0.25) for layer in range(2) for name in "kv"}
    own = tiny.reference("hunyuan")
    (tmp_path / "config.json").write_text(own.config.to_json_string())
    tensors = {name: values.contiguous() for name, values in own.state_dict().items()} | scales
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = load(ShardConfig(folder=str(tmp_path), model="m"), lambda stage: None).decoder.layers[1].attention
    assert isinstance(found, HeadAttention)
    assert found.scales is not None
    assert found.scales.tolist() == [[1.0] * 4, [0.25] * 4]


@pytest.mark.parametrize(("longest", "tokens"), [(0, 40), (17, 17), (16, 16), (3, 3)])
def test_longropes_factors_go_by_the_longest_context(longest: int, tokens: int) -> None:
    """With all of them transformers takes the long ones if this context is longer than 16 tokens; we always do."""
    engine = load(ShardConfig(folder=str(tiny.folder("longrope")), model="m", longest=longest), lambda stage: None)
    engine.resize(8)
    asked = prompt(1, tokens)
    [sequence], _ = sequences(asked, 1)
    engine.pool.extend(sequence.pages, tokens)
    found = engine.decoder.logits(engine.forward([Span(sequence, 0, asked, wanted=tokens)]))
    assert found is not None
    close(found, tiny.expected_logits("longrope", asked))
    assert engine.decoder.shape.max_positions == (longest or 64)


@pytest.mark.parametrize("names", [("qkv_bias", "bias"), ("attention_bias", "mlp_bias")])
def test_either_names_of_internlms_biases(names: tuple[str, str]) -> None:
    found = shape(config("InternLM3ForCausalLM", head_dim=8, **dict.fromkeys(names, True)))
    same = config("LlamaForCausalLM", attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5)
    assert replace(found, architecture="LlamaForCausalLM") == shape(same)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_either_name_of_the_number_of_experts(name: str) -> None:
    """Hub and transformers 5 differ."""
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
def test_layers_with_experts(more: dict[str, Any], expected: list[bool]) -> None:
    found = shape(config("Qwen3MoeForCausalLM", num_hidden_layers=6, **more))
    assert [mixture is not None for mixture in found.mixtures] == expected
    assert found.parameters(tokens=1) < found.parameters(tokens=2) < found.parameters()


def test_ranks_divide_what_is_there() -> None:
    """Features of the one MLP count only where a layer has one."""
    odd = config("Qwen3MoeForCausalLM", intermediate_size=87, moe_intermediate_size=20, num_experts=4, num_experts_per_tok=2)
    shape(odd).check_ranks(2)
    shared = odd | {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 35}
    with pytest.raises(Unsupported, match="35 intermediate features of the shared expert can't be divided by 2"):
        shape(shared).check_ranks(2)
    with pytest.raises(Unsupported, match="87 intermediate features can't be divided by 2"):
        shape(odd | {"mlp_only_layers": [0]}).check_ranks(2)
    with pytest.raises(Unsupported, match=r"21 intermediate features of an expert .* use --num-shard 1$"):
        shape(odd | {"moe_intermediate_size": 21}).check_ranks(2)


@pytest.mark.parametrize(
    ("architecture", "field"),
    [("MiniMaxM2ForCausalLM", "shared_intermediate_size"), ("Qwen3MoeForCausalLM", "shared_expert_intermediate_size")],
)
def test_shared_experts_that_are_none(architecture: str, field: str) -> None:
    """As in the config.json of MiniMax M2 and of Qwen 3 Coder 480B."""
    assert shape(config(architecture, **{field: 0})) == shape(config(architecture))


@pytest.mark.parametrize(
    ("architecture", "theirs"),
    [("Qwen3ForCausalLM", transformers.Qwen3Config), ("Qwen3MoeForCausalLM", transformers.Qwen3MoeConfig)],
)
def test_heads_whose_size_is_not_said(architecture: str, theirs: Any) -> None:
    """Of Qwen 3 it is a number of its own, of its MoE it follows from the number of heads."""
    said = {"vocab_size": 99, "hidden_size": 2048, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 32}
    model = transformers.AutoModelForCausalLM.from_config(theirs(**said, num_key_value_heads=4, num_experts=8))
    found = shape({"architectures": [architecture], "num_key_value_heads": 4} | said)
    assert found.head_size == model.model.layers[0].self_attn.head_dim


def test_what_hunyuan_a13b_says_of_each_layer() -> None:
    """As in its own config.json; transformers reads the first alone."""
    lists = {"moe_topk": [2, 2], "moe_intermediate_size": [96, 96], "num_shared_expert": [1, 1]}
    given = config("HunYuanMoEV1ForCausalLM", intermediate_size=96, num_hidden_layers=2, num_experts=4)
    assert shape(given | lists) == shape(given | {"moe_topk": 2})
    for name, value in (("moe_intermediate_size", [96, 48]), ("num_shared_expert", [1, 2])):
        with pytest.raises(Unsupported, match=f"{name} .* is not supported"):
            shape(given | lists | {name: value})


@pytest.mark.parametrize(("published", "ours"), PUBLISHED.items())
def test_architectures_by_the_names_of_their_own_code(published: str, ours: str) -> None:
    assert shape(config(published)) == shape(config(ours))


PARTS = {"full_attention": {"partial_rotary_factor": 0.5}, "sliding_attention": {"partial_rotary_factor": 0.25}}


@pytest.mark.parametrize(
    ("given", "message"),
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
        (config("PhimoeForCausalLM", rope_scaling=MSCALES | {"long_mscale": 2.0}), "short_mscale 1 and long_mscale 2"),
        (config("PhimoeForCausalLM", rope_scaling=MSCALES), "6 factors of longrope, 4 are needed"),
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
        (config("MiMoV2FlashForCausalLM", rope_parameters=PARTS), "partial_rotary_factor differs"),
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
def test_what_is_wrong_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        shape(given)
