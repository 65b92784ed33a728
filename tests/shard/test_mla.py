"""Models with multi-head latent attention (MLA), some with an indexer (sparse attention): shapes, parameters and bytes from
config.json against transformers' configurations and models, tensor names, and refusals. Logits and tokens:
test_against_transformers.py."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from penstock.kernels import indexed
from penstock.launcher import roofline
from penstock.shard import memory
from penstock.shard.config import ShardConfig
from penstock.shard.loading import load
from penstock.shard.models.draft_families import draft_shape
from penstock.shard.models.families import shape
from penstock.shard.models.shape import Shape, Unsupported
from penstock.shard.models.traits import HyperConnections, Index, Latent, Mixture, elements
from penstock.tests.shard import tiny
from penstock.tests.shard.test_weights import WEIGHTS, assert_same_weights, load_decoder

DEEPSEEK_V3_SIZES = {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
}
# As in the config.json files of DeepSeek's repositories.
YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
V3 = DEEPSEEK_V3_SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "max_position_embeddings": 163_840,
    "rope_scaling": YARN,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
}
V2 = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102_400,
    "hidden_size": 5120,
    "intermediate_size": 12_288,
    "num_hidden_layers": 60,
    "n_routed_experts": 160,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "n_group": 8,
    "topk_group": 3,
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0,
}
V32 = V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
GLM_5 = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 154_880,
    "hidden_size": 6144,
    "intermediate_size": 12_288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
}
K2 = V3 | {
    "model_type": "kimi_k2",
    "vocab_size": 163_840,
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize(
    ("config", "billions", "active_billions", "cached"),
    [(V3, 671.03, 37.55, 61 * 576), (V2, 235.74, 21.38, 60 * 576), (K2, 1026.41, 32.86, 61 * 576)],
)
def test_parameters_and_kv_size_of_published_mla_models(
    config: dict[str, Any], billions: float, active_billions: float, cached: int
) -> None:
    """Published: 671 billion parameters, 37 of them active for a token; 236 and 21; 1,000 and 32."""
    found = shape(config)
    assert found.parameters() / 1e9 == pytest.approx(billions, abs=0.01)
    assert found.parameters(tokens=1) / 1e9 == pytest.approx(active_billions, abs=0.01)
    assert [found.kv_elements(ranks) for ranks in (1, 8)] == [cached] * 2
    assert found.max_positions == 163_840
    assert found.attention_scale == pytest.approx(192**-0.5 * 1.36889**2, rel=1e-4)
    found.check_ranks(16)


def test_parameters_and_bytes_of_published_models_with_an_indexer() -> None:
    """DeepSeek V3.2 has V3's parameters and 14 million more per layer; GLM 5 has 744 billion, 40 of them active for a token."""
    found, v3 = shape(V32), shape(V3)
    indexer_parameters = 64 * 128 * 1536 + 128 * 7168 + 64 * 7168 + 2 * 128
    assert found.parameters() - v3.parameters() == 61 * indexer_parameters
    assert found.index == Index(heads=64, size=128, most=2048)
    assert [found.kv_elements(ranks) for ranks in (1, 8)] == [61 * 704] * 2
    float32_parameters = 58 * 256 * (7168 + 1) + 61 * 64 * 7168  # routers, their score corrections and the indexer's head weights
    weight_bytes = found.weight_bytes(8, 2, "cuda", "bfloat16", packed=False)
    assert weight_bytes == 2 * (found.parameters(8) + found.rotary_elements + float32_parameters)
    found = shape(GLM_5)
    assert found.parameters() / 1e9 == pytest.approx(743.9, abs=0.1)
    assert found.parameters(tokens=1) / 1e9 == pytest.approx(
        41.8, abs=0.1
    )  # 0.95 of them in the embedding table, of which one row is read
    assert found.index == Index(heads=32, size=128, most=2048, neighbours=True)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"index_topk_freq": 4},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"index_topk_freq": 0},
        {"index_topk_pattern": "FSSFFSFSSS"},
        {"indexer_types": ["full", *["shared"] * 9], "index_topk_freq": 2},
        {"indexer_types": ["full", *["shared"] * 10]},
    ],
)
def test_layers_that_share_an_indexer_are_those_of_transformers(more: dict[str, Any]) -> None:
    """Also if config.json does not list indexer_types. Layers without an indexer of their own cache no indexer keys."""
    config = GLM_5 | {"num_hidden_layers": 10} | more
    kinds = transformers.GlmMoeDsaConfig(**config).indexer_types[:10]
    found = shape(config)
    assert [layer in found.indexing for layer in range(10)] == [kind == "full" for kind in kinds]
    assert [found.slot(1, layer)[2] for layer in range(10)] == [704 if kind == "full" else 576 for kind in kinds]
    index = found.index
    assert index is not None
    assert shape(config | {"indexer_types": ["full"] * 10}).parameters() - found.parameters() == len(index.borrowing) * (
        elements(index.matrices(2048, found.hidden)) + index.beside(found.hidden)
    )


def test_older_layer_type_of_sparse_attention_is_read() -> None:
    """transformers wrote it until 5.17."""
    config = GLM_5 | {"num_hidden_layers": 10}
    assert shape(config | {"layer_types": ["deepseek_sparse_attention"] * 10}) == shape(config)


def test_layers_that_share_an_indexer_compute_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are computed once for each layer with an indexer of its own: twice in four layers."""
    score_calls = []
    scores = indexed.scores
    monkeypatch.setattr(indexed, "scores", lambda *given: score_calls.append(1) or scores(*given))
    engine = tiny.engine("glm-5-borrowing")
    engine.prefill(1, [tiny.group(1, range(1, 40), 2)], [(1, 39)], 39, [])
    assert len(score_calls) == 2


def test_memory_for_indexer_scores_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU scores are computed for 64 query tokens at once, over their whole context."""
    free = 1 << 32
    monkeypatch.setattr(memory, "_sample", lambda *given: memory.Measured(64, 1 << 20, 1.0))
    monkeypatch.setattr(memory, "_available", lambda device: free)
    reserved = {}
    for name in ("deepseek-v3", "deepseek-v32"):
        engine = tiny.engine(name, 16, 4)
        pages, *_ = memory.size_pool(engine, 0, 1.0, 128, 4, 100_000, 100_000)
        shape = engine.decoder.shape
        token = 4 * shape.kv_elements(1)
        reserved[name] = free - 2 * (1 << 20) - 2 * 100_000 * token // shape.layers - pages * 16 * token
        reserved[name] -= memory._expansion_bytes(engine, 128, 100_000)  # reserved only for models without an indexer
    assert 0 <= reserved["deepseek-v3"] < 1 << 16
    assert 0 <= reserved["deepseek-v32"] - 64 * 100_000 * 32 < 1 << 16


def test_ranks_that_do_not_divide_the_attention_heads_are_refused() -> None:
    with pytest.raises(Unsupported, match="128 attention heads can't be divided by 3 ranks: use --num-shard 1, 2, 4"):
        shape(V3).check_ranks(3)


def expected_latent(config: Any) -> Latent:
    return Latent(
        size=config.kv_lora_rank,
        turned=config.qk_rope_head_dim,
        plain=config.qk_nope_head_dim,
        values=config.v_head_dim,
        queries=config.q_lora_rank or 0,
    )


def expected_mixture(config: Any, **more: Any) -> Mixture:
    return Mixture(
        experts=config.n_routed_experts,
        chosen=config.num_experts_per_tok,
        size=config.moe_intermediate_size,
        groups=config.n_group or 1,
        groups_chosen=config.topk_group or 1,
        factor=config.routed_scaling_factor,
        shared=config.moe_intermediate_size * config.n_shared_experts,
        shared_name="shared_experts",
        shared_gate="",
        normalized=config.norm_topk_prob,
        **more,
    )


def shape_of(name: str, **more: Any) -> Shape:
    return shape({"architectures": [f"{name}ForCausalLM"]} | DEEPSEEK_V3_SIZES | {"num_hidden_layers": 5} | more)


def test_defaults_of_mla_models_are_those_of_transformers() -> None:
    router_fields: dict[str, Any] = {"scores": "sigmoid", "correction": "gate.e_score_correction_bias"}
    config: Any = transformers.DeepseekV3Config()
    found = shape_of("DeepseekV3")
    assert found.latent == expected_latent(config)
    assert found.mixtures == (None,) * 3 + (expected_mixture(config, **router_fields),) * 2
    assert found.max_positions == config.max_position_embeddings
    config = transformers.Glm4MoeLiteConfig()
    found = shape_of("Glm4MoeLite")
    assert found.latent == expected_latent(config)
    assert found.mixtures == (None,) + (expected_mixture(config, **router_fields),) * 4
    assert (found.max_positions, found.norm_epsilon) == (config.max_position_embeddings, config.rms_norm_eps)
    config = transformers.DeepseekV2Config(num_experts_per_tok=6)
    found = shape_of("DeepseekV2", num_experts_per_tok=6)
    assert found.latent == expected_latent(config)
    assert found.mixtures == (expected_mixture(config, best=1, precise=True),) * 5


@pytest.mark.parametrize(
    "name", ["DeepseekV2", "DeepseekV3", "DeepseekV32", "Glm4MoeLite", "GlmMoeDsa", "Ministral3", "Mistral4", "Youtu"]
)
def test_minimal_config_gives_the_same_shape_as_one_saved_by_transformers(name: str) -> None:
    """Also those of rotary embeddings, from which the scaling of Mistral's queries follows."""
    config: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    more: dict[str, Any] = {"num_experts_per_tok": 3} if name == "DeepseekV2" else {}
    config |= {"architectures": [f"{name}ForCausalLM"]} | more
    assert shape(config) == shape(getattr(transformers, f"{name}Config")(**config).to_dict())


def test_queries_without_low_rank_projection_are_supported() -> None:
    found = shape_of("DeepseekV3", q_lora_rank=None)
    assert found.latent is not None
    assert found.latent.queries == 0
    assert tiny.decoder("deepseek-v3-biases").layers[0].attention.inward.shape[0] == 8 * 20 + 32


def test_youtus_older_model_type_is_read() -> None:
    assert shape_of("Youtu", model_type="youtu_llm") == shape_of("Youtu", model_type="youtu") == shape_of("Youtu")


@pytest.mark.parametrize(
    ("name", "field", "words"),
    [
        ("DeepseekV3", {"qk_rope_head_dim": 63}, "qk_rope_head_dim 63, an even number is needed"),
        ("DeepseekV3", {"kv_lora_rank": None}, "kv_lora_rank null, an integer from 1"),
        ("DeepseekV3", {"v_head_dim": 0}, "v_head_dim 0, an integer from 1"),
        (
            "DeepseekV3",
            {"scoring_func": "softmax"},
            "scoring_func 'softmax' is not supported: for this family the decoder has 'sigm",
        ),
        ("DeepseekV3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ("DeepseekV3", {"rope_interleave": 1}, "rope_interleave 1, true or false is needed"),
        ("DeepseekV3", {"model_type": "kimi_k3"}, "model_type 'kimi_k3'"),
        ("DeepseekV32", {"index_topk": 0}, "index_topk 0, an integer from 1"),
        ("DeepseekV32", {"q_lora_rank": None}, "q_lora_rank null, index_head_dim 128 and .* needs latents of queries"),
        ("DeepseekV32", {"index_head_dim": 32}, "index_head_dim 32 and qk_rope_head_dim 64: .* heads as large as what turns"),
        ("DeepseekV32", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ("DeepseekV32", {"layer_types": ["full_attention"] * 5}, "layer_types full_attention are not supported"),
        ("GlmMoeDsa", {"indexer_types": ["full"] * 4}, "indexer_types .*, 'full' or 'shared' is needed for each"),
        ("GlmMoeDsa", {"indexer_types": ["shared"] + ["full"] * 4}, "first of which has its own"),
        ("GlmMoeDsa", {"index_topk_freq": "4"}, "index_topk_freq '4'"),
        ("GlmMoeDsa", {"index_topk_pattern": "FXFSF"}, "indexer_types .*'X'"),
        ("DeepseekV2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported: the decoder has greedy and group"),
        ("DeepseekV2", {"norm_topk_prob": True}, "norm_topk_prob true is not supported"),
        ("Glm4MoeLite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types .'dense'., 'dense' or 'sparse' is needed for each of"),
        ("Glm4MoeLite", {"mlp_layer_types": ["dense"] * 4 + ["other"]}, "'dense' or 'sparse' is needed for each"),
    ],
)
def test_unsupported_or_invalid_config_is_refused_by_field_name(name: str, field: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        shape_of(name, **field)


HY_4 = {
    "architectures": ["HYV4ForCausalLM"],
    "model_type": "hy_v4",
    "vocab_size": 120_832,
    "hidden_size": 2816,
    "intermediate_size": 6912,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}


def test_hy_4_shape_equals_transformers() -> None:
    """Also parameter counts and defaults of missing fields. 58 billion parameters, 5 of them active for a token."""
    found, config = shape(HY_4), transformers.HYV4Config(**HY_4)
    with torch.device("meta"):
        model = transformers.HYV4ForCausalLM(config)
    corrections = [values for key, values in model.named_buffers() if "correction" in key]
    assert found.parameters() == sum(values.numel() for values in (*model.parameters(), *corrections))
    assert found == shape(config.to_dict())
    assert found.hyper == HyperConnections(count=4, magnitude=2.0, epsilon=1e-6)
    assert [layer in found.indexing for layer in range(34)] == [kind == "full" for kind in config.indexer_types]
    mixture = found.mixtures[-1]
    assert mixture is not None
    assert (mixture.limit, mixture.form) == (10.0, "before")
    assert shape(HY_4 | {"swiglu_limit": 0}).mixtures[-1] == replace(mixture, limit=0.0, form="steep")


def test_hy_4_vl_text_shape_equals_transformers() -> None:
    """Also parameter counts and defaults. The text has 770 billion parameters, 49 of them active for a token."""
    text = {"vocab_size": 120_832, "hidden_size": 6144, "intermediate_size": 18_432, "num_hidden_layers": 78}
    text |= {"num_attention_heads": 64, "num_key_value_heads": 64}
    config_json = {"architectures": ["HYV4VLForConditionalGeneration"], "model_type": "hy_v4_vl", "text_config": text}
    found, config = shape(config_json), transformers.HYV4VLConfig(text_config=text)
    with torch.device("meta"):
        model = transformers.HYV4VLForConditionalGeneration(config)
    corrections = [values for key, values in model.named_buffers() if "correction" in key]
    text_parameters = [values for key, values in model.named_parameters() if "vision_tower" not in key]
    assert found.parameters() == sum(values.numel() for values in (*text_parameters, *corrections))
    assert found == shape(config.to_dict() | {"architectures": config_json["architectures"]})
    assert found.latent is not None
    assert (found.latent.epsilon, found.rotary_neighbours, found.rope.axes[:6]) == (1e-5, True, (0, 1, 2, 0, 1, 2))
    assert found.rope.axes == tuple(pair % 3 if pair < 3 * [12, 10, 10][pair % 3] else 0 for pair in range(32))


@pytest.mark.parametrize(
    "renames",
    [
        {"hc_pre.hc_attn_layer.hc_": "hc_attn_layer.hc_pre.hc_", "hc_pre.hc_mlp_layer.hc_": "hc_mlp_layer.hc_pre.hc_"},
        {"hc_pre.hc_attn_layer.": "hc_attn_layer.", "hc_pre.hc_mlp_layer.": "hc_mlp_layer.", "hc_pre.hc_head.": "hc_head."},
        {"mlp.linear_gate": "mlp.gate_proj", "shared_experts.linear_gate": "shared_experts.gate_proj", "hc_pre.hc_head.": ""},
    ],
)
def test_hy_4_alternative_tensor_names_are_read(renames: dict[str, str], tmp_path: Path) -> None:
    """transformers reads these names; since no checkpoint was available, other orders of the parts of a name are accepted as
    well."""
    stored = safetensors.torch.load_file(tiny.folder("hy-4") / WEIGHTS)
    for stored_name, other_name in renames.items():
        assert any(stored_name in name for name in stored)
        stored = {name.replace(stored_name, other_name): values for name, values in stored.items()}
    folder = Path(shutil.copytree(tiny.folder("hy-4"), tmp_path / "other"))
    safetensors.torch.save_file(stored, folder / WEIGHTS)
    assert_same_weights(load_decoder(folder), tiny.decoder("hy-4"))


def test_deepseek_ocr_2_text_shape_equals_transformers() -> None:
    """Also defaults of missing fields. The text has 3 billion parameters, 0.6 of them active for a token."""
    text = {"vocab_size": 129_280, "hidden_size": 1280, "intermediate_size": 6848, "num_hidden_layers": 12}
    text |= {"num_attention_heads": 10, "moe_intermediate_size": 896, "num_experts_per_tok": 6}
    text |= {"mlp_layer_types": ["dense", *["sparse"] * 11]}
    config_json = {"architectures": ["DeepseekOcr2ForConditionalGeneration"], "model_type": "deepseek_ocr2", "text_config": text}
    found, config = shape(config_json), transformers.DeepseekOcr2Config(text_config=text)
    with torch.device("meta"):
        model = transformers.DeepseekOcr2ForConditionalGeneration(config)
    not_text = ("vision_tower", "multi_modal_projector", "view_separator")
    text_parameters = [values for key, values in model.named_parameters() if not any(part in key for part in not_text)]
    assert found.parameters() == sum(values.numel() for values in text_parameters)
    assert found == shape(config.to_dict() | {"architectures": config_json["architectures"]})
    with pytest.raises(Unsupported, match="topk_method 'noaux_tc' is not supported"):
        shape(config_json | {"text_config": text | {"topk_method": "noaux_tc"}})
    with pytest.raises(Unsupported, match="lacks 'num_experts_per_tok'"):
        shape(config_json | {"text_config": {name: value for name, value in text.items() if name != "num_experts_per_tok"}})


def test_hy_4_ignores_rope_interleave() -> None:
    """transformers has no such field for this family: rotary features of a pair are never adjacent."""
    assert not shape(HY_4 | {"rope_interleave": True}).rotary_neighbours


def test_roofline_counts_float32_output_matrix_and_logits_of_hy_4() -> None:
    """Bytes that are read for logits, and bytes that ranks gather."""
    groups = [
        roofline.Group(shape=model, ranks=2, nodes=1, item=2, token_bytes=model.kv_elements(2) * 2)
        for model in (shape(HY_4), replace(shape(HY_4), precise_logits=False))
    ]
    precise, bfloat16 = (group.read(1) for group in groups)
    assert precise - bfloat16 == 2 * 120_832 // 2 * 2816
    accelerator = roofline.Accelerator(memory=1, bandwidth=1, flops=1, link=1, network=1, latency=0, network_latency=0)
    assert roofline.gather(groups[0], accelerator, 3) == 2 * roofline.gather(groups[1], accelerator, 3) == 3 * 4 * 120_832 // 2


def test_eagle3_draft_head_for_a_model_with_several_residual_streams_is_refused() -> None:
    head = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 120_832, "hidden_size": 2816, "num_hidden_layers": 1}
    with pytest.raises(Unsupported, match="goes by the residual stream, of which HYV4ForCausalLM has several"):
        draft_shape(head, shape(HY_4))


def test_hy_4_output_matrix_stays_float32_in_a_bfloat16_model() -> None:
    """Whatever the model's number format is."""
    model = load(ShardConfig(folder=str(tiny.folder("hy-4")), model="m", dtype="bfloat16"), lambda stage: None).decoder
    hidden = torch.randn(3, 64).bfloat16()
    found = model.logits(hidden)
    exact = hidden.float() @ tiny.reference("hy-4").lm_head.weight.t()
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


MISTRAL_LARGE = {
    "vocab_size": 204_800,
    "hidden_size": 6144,
    "intermediate_size": 24_576,
    "num_hidden_layers": 72,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
}


def mistral_large(text: dict[str, Any] | None = None, **more: Any) -> Shape:
    config_json = {"architectures": ["MistralLarge4ForConditionalGeneration"], "model_type": "mistral_large4"}
    return shape(config_json | {"text_config": MISTRAL_LARGE | (text or {})} | more)


def test_mistral_large_4_text_shape_equals_transformers() -> None:
    """Also parameter counts and defaults of missing fields. 1,050 billion parameters, 53 of them active for a token; one of these
    is the embedding table, of which one row is read."""
    found, config = mistral_large(), transformers.MistralLarge4Config(text_config=MISTRAL_LARGE)
    with torch.device("meta"):
        model = transformers.MistralLarge4ForConditionalGeneration(config)
    text_parameters = [values for key, values in model.named_parameters() if "vision_tower" not in key and "projector" not in key]
    assert found.parameters() == sum(values.numel() for values in text_parameters)
    assert (round(found.parameters() / 1e9), round(found.parameters(tokens=1) / 1e9)) == (1050, 53)
    assert found == mistral_large(config.to_dict()["text_config"])
    assert sorted(found.nope_layers) == [layer for layer, has_rope in enumerate(config.text_config.no_rope_layers) if not has_rope]
    assert (found.rope.learned, found.rope.amplitude, found.rope.reach, found.final_softcap) == (True, 1.0, 1 << 20, 30.0)
    assert [found.slot(1, layer) for layer in (0, 3)] == [(1, 1, 576 + 128)] * 2
    latent = found.latent_of(3)
    assert latent is not None
    assert (latent.plain, latent.turned, latent.width) == (128, 0, 512)
    assert found.rotary_elements == replace(found, scalable_softmax=False).rotary_elements + (1 << 20)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"kv_source_layers": [0, *range(71)]}, "kv_source_layers .* is not supported: for this family the decoder has .0, 1, 2"),
        ({"q_lora_rank": 1536}, "q_lora_rank 1536 is not supported: for this family the decoder has none"),
        ({"norm_topk_prob": False}, "norm_topk_prob false is not supported"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers .1, 0., 0 or 1 for each of num_hidden_layers"),
        ({"index_head_dim": 32}, "index_head_dim 32 and qk_rope_head_dim 64: an index needs heads as large"),
        ({"final_logit_softcapping": None}, "final_logit_softcapping null, a number above 0"),
        ({"indexer_types": ["shared"] * 72}, "indexer_types .*, the first of which has its own"),
        ({"model_type": "mistral_large5_text"}, "model_type 'mistral_large5_text'"),
    ],
)
def test_unsupported_or_invalid_mistral_large_4_config_is_refused_by_field_name(field: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        mistral_large(field)


def test_learned_rotary_frequencies_stay_float32_in_a_bfloat16_model() -> None:
    """The checkpoint's tensor of frequencies is read in float32."""
    model = load(ShardConfig(folder=str(tiny.folder("mistral-large4")), model="m", dtype="bfloat16"), lambda stage: None).decoder
    rotary = tiny.reference("mistral-large4").model.language_model.rotary_emb
    assert model.waves is not None
    assert model.waves.equal(rotary.alpha)
    frequencies = rotary.inv_freq * rotary.alpha.exp()
    cosines = (5 * frequencies).cos() * rotary.attention_scaling
    torch.testing.assert_close(model.rotary[5, 0, 0, :4].float(), cosines.bfloat16().float(), rtol=0, atol=0)


AX_K2 = {
    "architectures": ["AXK2ForCausalLM"],
    "model_type": "axk2",
    "vocab_size": 163_840,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}


def test_ax_k2_shape_equals_transformers() -> None:
    """Also parameter counts and defaults of missing fields. 20 billion parameters, 2 of them active for a token."""
    found, config = shape(AX_K2), transformers.AXK2Config(**AX_K2)
    with torch.device("meta"):
        model = transformers.AXK2ForCausalLM(config)
    corrections = [values for key, values in model.named_buffers() if "correction" in key]
    assert found.parameters() == sum(values.numel() for values in (*model.parameters(), *corrections))
    assert found == shape(config.to_dict())
    assert found == shape(AX_K2 | {"n_group": None, "topk_group": None})
    assert (found.norm_gates, found.latent and found.latent.gated) == (16, True)
    mixture = found.mixtures[-1]
    assert mixture is not None
    assert (mixture.zeroed, mixture.groups) == (True, 1)
    assert found.gated_norms(0) == ["input_layernorm", ""]
    assert found.gated_norms(1) == ["input_layernorm", "post_attention_layernorm"]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"gated_norm_rank": 0}, "gated_norm_rank 0, an integer from 1"),
        ({"gated_norm_rank": None}, "gated_norm_rank null, an integer from 1"),
        ({"q_lora_rank": None}, "q_lora_rank null, index_head_dim 128 and .* needs latents of queries"),
        ({"n_group": 3, "topk_group": 1}, "n_group 3 and topk_group 1, of 128 experts"),
        ({"rope_interleave": False}, "rope_interleave false is not supported: for this family the decoder has true"),
    ],
)
def test_unsupported_or_invalid_ax_k2_config_is_refused_by_field_name(field: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        shape(AX_K2 | field)


def test_gates_of_norms_are_not_quantized(tmp_path: Path) -> None:
    """Not even with `--quantize`."""
    found = load(ShardConfig(folder=str(tiny.folder("ax-k2")), model="m", dtype="bfloat16", quantize="int4"), lambda stage: None)
    gates = [gate for layer in found.decoder.layers for gate in layer.norm_gates]
    assert [gate is None for gate in gates] == [False, True, False, False]
    model = found.decoder
    assert model.shape.weight_bytes(1, 2, "cpu", "bfloat16", not model.head.shared) == model.weight_bytes
