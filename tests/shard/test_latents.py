"""Models whose keys and values are made of latents: what config.json says of them. What they compute: test_oracle.py."""

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
from penstock.shard.models.traits import HyperConnections, Index, Latent, Mixture
from penstock.tests.shard import tiny
from penstock.tests.shard.test_weights import WEIGHTS, decoder, same

NEEDED = {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
}
# As DeepSeek's repositories have it.
YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
V3 = NEEDED | {
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
    ("config", "all_of_them", "of_a_token", "cached"),
    [(V3, 671.03, 37.55, 61 * 576), (V2, 235.74, 21.38, 60 * 576), (K2, 1026.41, 32.86, 61 * 576)],
)
def test_published_models(config: dict[str, Any], all_of_them: float, of_a_token: float, cached: int) -> None:
    """671 and 37, 236 and 21, 1,000 and 32 billion parameters."""
    found = shape(config)
    assert found.parameters() / 1e9 == pytest.approx(all_of_them, abs=0.01)
    assert found.parameters(tokens=1) / 1e9 == pytest.approx(of_a_token, abs=0.01)
    assert [found.kv_elements(ranks) for ranks in (1, 8)] == [cached] * 2
    assert found.max_positions == 163_840
    assert found.attention_scale == pytest.approx(192**-0.5 * 1.36889**2, rel=1e-4)
    found.check_ranks(16)


def test_published_models_with_an_index() -> None:
    """DeepSeek V3.2 is V3 and 14 million parameters a layer; GLM 5 has 744 billion, 40 of them for a token."""
    found, before = shape(V32), shape(V3)
    own = 64 * 128 * 1536 + 128 * 7168 + 64 * 7168 + 2 * 128
    assert found.parameters() - before.parameters() == 61 * own
    assert found.index == Index(heads=64, size=128, most=2048)
    assert [found.kv_elements(ranks) for ranks in (1, 8)] == [61 * 704] * 2
    wide = 58 * 256 * (7168 + 1) + 61 * 64 * 7168  # in float32: routers, what corrects them, and weights of the index's heads
    held = found.weight_bytes(8, 2, "cuda", "bfloat16", packed=False)
    assert held == 2 * (found.parameters(8) + found.rotary_elements + wide)
    found = shape(GLM_5)
    assert found.parameters() / 1e9 == pytest.approx(743.9, abs=0.1)
    assert found.parameters(tokens=1) / 1e9 == pytest.approx(41.8, abs=0.1)  # 0.95 of them in a table of which a row is read
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
def test_layers_without_an_index_are_transformers(more: dict[str, Any]) -> None:
    """Where config.json does not name them, too. Of their tokens no keys of an index are cached."""
    given = GLM_5 | {"num_hidden_layers": 10} | more
    kinds = transformers.GlmMoeDsaConfig(**given).indexer_types[:10]
    found = shape(given)
    assert [layer in found.indexing for layer in range(10)] == [kind == "full" for kind in kinds]
    assert [found.slot(1, layer)[2] for layer in range(10)] == [704 if kind == "full" else 576 for kind in kinds]
    index = found.index
    assert index is not None
    assert shape(given | {"indexer_types": ["full"] * 10}).parameters() - found.parameters() == len(
        index.borrowing
    ) * index.elements(2048, found.hidden)


def test_what_layers_with_an_index_were_called_before() -> None:
    """By transformers until 5.17."""
    given = GLM_5 | {"num_hidden_layers": 10}
    assert shape(given | {"layer_types": ["deepseek_sparse_attention"] * 10}) == shape(given)


def test_layers_without_an_index_choose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are computed once for each layer that has an index."""
    counted = []
    right = indexed.scores
    monkeypatch.setattr(indexed, "scores", lambda *given: counted.append(1) or right(*given))
    engine = tiny.engine("glm-5-borrowing")
    engine.prefill(1, [tiny.group(1, range(1, 40), 2)], [(1, 39)], 39, [])
    assert len(counted) == 2


def test_memory_for_what_an_index_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, 64 tokens at once among all that they see."""
    free = 1 << 32
    monkeypatch.setattr(memory, "_sample", lambda *given: memory.Measured(64, 1 << 20, 1.0))
    monkeypatch.setattr(memory, "_available", lambda device: free)
    rooms = {}
    for name in ("deepseek-v3", "deepseek-v32"):
        engine = tiny.engine(name, 16, 4)
        pages, *_ = memory.size_pool(engine, 0, 1.0, 128, 4, 100_000, 100_000)
        shape = engine.decoder.shape
        token = 4 * shape.kv_elements(1)
        rooms[name] = free - 2 * (1 << 20) - 2 * 100_000 * token // shape.layers - pages * 16 * token
        rooms[name] -= memory._expanded(engine, 128, 100_000)  # of models without an index
    assert 0 <= rooms["deepseek-v3"] < 1 << 16
    assert 0 <= rooms["deepseek-v32"] - 64 * 100_000 * 32 < 1 << 16


def test_ranks_divide_heads() -> None:
    with pytest.raises(Unsupported, match="128 attention heads can't be divided by 3 ranks: use --num-shard 1, 2, 4"):
        shape(V3).check_ranks(3)


def latent_of(theirs: Any) -> Latent:
    return Latent(
        size=theirs.kv_lora_rank,
        turned=theirs.qk_rope_head_dim,
        plain=theirs.qk_nope_head_dim,
        values=theirs.v_head_dim,
        queries=theirs.q_lora_rank or 0,
    )


def mixture_of(theirs: Any, **more: Any) -> Mixture:
    return Mixture(
        experts=theirs.n_routed_experts,
        chosen=theirs.num_experts_per_tok,
        size=theirs.moe_intermediate_size,
        groups=theirs.n_group or 1,
        groups_chosen=theirs.topk_group or 1,
        factor=theirs.routed_scaling_factor,
        shared=theirs.moe_intermediate_size * theirs.n_shared_experts,
        shared_name="shared_experts",
        shared_gate="",
        normalized=theirs.norm_topk_prob,
        **more,
    )


def made(name: str, **more: Any) -> Shape:
    return shape({"architectures": [f"{name}ForCausalLM"]} | NEEDED | {"num_hidden_layers": 5} | more)


def test_defaults_are_transformers() -> None:
    scored: dict[str, Any] = {"sigmoid": True, "correction": "gate.e_score_correction_bias"}
    theirs: Any = transformers.DeepseekV3Config()
    found = made("DeepseekV3")
    assert found.latent == latent_of(theirs)
    assert found.mixtures == (None,) * 3 + (mixture_of(theirs, **scored),) * 2
    assert found.max_positions == theirs.max_position_embeddings
    theirs = transformers.Glm4MoeLiteConfig()
    found = made("Glm4MoeLite")
    assert found.latent == latent_of(theirs)
    assert found.mixtures == (None,) + (mixture_of(theirs, **scored),) * 4
    assert (found.max_positions, found.norm_epsilon) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    theirs = transformers.DeepseekV2Config(num_experts_per_tok=6)
    found = made("DeepseekV2", num_experts_per_tok=6)
    assert found.latent == latent_of(theirs)
    assert found.mixtures == (mixture_of(theirs, best=1, precise=True),) * 5


@pytest.mark.parametrize(
    "name", ["DeepseekV2", "DeepseekV3", "DeepseekV32", "Glm4MoeLite", "GlmMoeDsa", "Ministral3", "Mistral4", "Youtu"]
)
def test_what_is_left_out_is_what_transformers_writes(name: str) -> None:
    """Also of rotary embeddings, which Mistral's grow with."""
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


def test_queries_may_be_made_of_the_residual_stream() -> None:
    found = made("DeepseekV3", q_lora_rank=None)
    assert found.latent is not None
    assert found.latent.queries == 0
    assert tiny.decoder("deepseek-v3-biases").layers[0].attention.inward.shape[0] == 8 * 20 + 32


def test_youtu_by_its_first_name() -> None:
    assert made("Youtu", model_type="youtu_llm") == made("Youtu", model_type="youtu") == made("Youtu")


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
def test_what_is_refused(name: str, field: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        made(name, **field)


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


def test_hy_4_is_transformers() -> None:
    """Its sizes, and what is left out; 58 billion parameters, 5 of them for a token."""
    found, theirs = shape(HY_4), transformers.HYV4Config(**HY_4)
    with torch.device("meta"):
        model = transformers.HYV4ForCausalLM(theirs)
    corrections = [values for key, values in model.named_buffers() if "correction" in key]
    assert found.parameters() == sum(values.numel() for values in (*model.parameters(), *corrections))
    assert found == shape(theirs.to_dict())
    assert found.hyper == HyperConnections(count=4, magnitude=2.0, epsilon=1e-6)
    assert [layer in found.indexing for layer in range(34)] == [kind == "full" for kind in theirs.indexer_types]
    mixture = found.mixtures[-1]
    assert mixture is not None
    assert (mixture.limit, mixture.form) == (10.0, "before")
    assert shape(HY_4 | {"swiglu_limit": 0}).mixtures[-1] == replace(mixture, limit=0.0, form="steep")


def test_hy_4_beside_images_is_transformers() -> None:
    """Likewise: 770 billion parameters of text, 49 of them for a token."""
    text = {"vocab_size": 120_832, "hidden_size": 6144, "intermediate_size": 18_432, "num_hidden_layers": 78}
    text |= {"num_attention_heads": 64, "num_key_value_heads": 64}
    said = {"architectures": ["HYV4VLForConditionalGeneration"], "model_type": "hy_v4_vl", "text_config": text}
    found, theirs = shape(said), transformers.HYV4VLConfig(text_config=text)
    with torch.device("meta"):
        model = transformers.HYV4VLForConditionalGeneration(theirs)
    corrections = [values for key, values in model.named_buffers() if "correction" in key]
    own = [values for key, values in model.named_parameters() if "vision_tower" not in key]
    assert found.parameters() == sum(values.numel() for values in (*own, *corrections))
    assert found == shape(theirs.to_dict() | {"architectures": said["architectures"]})
    assert found.latent is not None
    assert (found.latent.epsilon, found.rotary_neighbours, found.rope.axes[:6]) == (1e-5, True, (0, 1, 2, 0, 1, 2))
    assert found.rope.axes == tuple(pair % 3 if pair < 3 * [12, 10, 10][pair % 3] else 0 for pair in range(32))


@pytest.mark.parametrize(
    "beginnings",
    [
        {"hc_pre.hc_attn_layer.hc_": "hc_attn_layer.hc_pre.hc_", "hc_pre.hc_mlp_layer.hc_": "hc_mlp_layer.hc_pre.hc_"},
        {"hc_pre.hc_attn_layer.": "hc_attn_layer.", "hc_pre.hc_mlp_layer.": "hc_mlp_layer.", "hc_pre.hc_head.": "hc_head."},
        {"mlp.linear_gate": "mlp.gate_proj", "shared_experts.linear_gate": "shared_experts.gate_proj", "hc_pre.hc_head.": ""},
    ],
)
def test_hy_4s_names(beginnings: dict[str, str], tmp_path: Path) -> None:
    """No checkpoint was at hand: transformers takes these, and what stands between the parts may stand elsewhere."""
    stored = safetensors.torch.load_file(tiny.folder("hy-4") / WEIGHTS)
    for ours, theirs in beginnings.items():
        assert any(ours in name for name in stored)
        stored = {name.replace(ours, theirs): values for name, values in stored.items()}
    folder = Path(shutil.copytree(tiny.folder("hy-4"), tmp_path / "other"))
    safetensors.torch.save_file(stored, folder / WEIGHTS)
    same(decoder(folder), tiny.decoder("hy-4"))


def test_deepseek_ocr_2_is_transformers() -> None:
    """3 billion parameters of text, 0.6 of them for a token; what is left out is as there."""
    text = {"vocab_size": 129_280, "hidden_size": 1280, "intermediate_size": 6848, "num_hidden_layers": 12}
    text |= {"num_attention_heads": 10, "moe_intermediate_size": 896, "num_experts_per_tok": 6}
    text |= {"mlp_layer_types": ["dense", *["sparse"] * 11]}
    said = {"architectures": ["DeepseekOcr2ForConditionalGeneration"], "model_type": "deepseek_ocr2", "text_config": text}
    found, theirs = shape(said), transformers.DeepseekOcr2Config(text_config=text)
    with torch.device("meta"):
        model = transformers.DeepseekOcr2ForConditionalGeneration(theirs)
    outside = ("vision_tower", "multi_modal_projector", "view_separator")
    own = [values for key, values in model.named_parameters() if not any(part in key for part in outside)]
    assert found.parameters() == sum(values.numel() for values in own)
    assert found == shape(theirs.to_dict() | {"architectures": said["architectures"]})
    with pytest.raises(Unsupported, match="topk_method 'noaux_tc' is not supported"):
        shape(said | {"text_config": text | {"topk_method": "noaux_tc"}})
    with pytest.raises(Unsupported, match="lacks 'num_experts_per_tok'"):
        shape(said | {"text_config": {name: value for name, value in text.items() if name != "num_experts_per_tok"}})


def test_hy_4s_pairs_never_lie_side_by_side() -> None:
    """transformers has no such field for it."""
    assert not shape(HY_4 | {"rope_interleave": True}).rotary_neighbours


def test_hy_4s_logits_are_read_and_sent_in_float32() -> None:
    """By the estimate of its speed."""
    groups = [
        roofline.Group(shape=own, ranks=2, nodes=1, item=2, token_bytes=own.kv_elements(2) * 2)
        for own in (shape(HY_4), replace(shape(HY_4), precise_logits=False))
    ]
    precise, other = (group.read(1) for group in groups)
    assert precise - other == 2 * 120_832 // 2 * 2816
    on = roofline.Accelerator(memory=1, bandwidth=1, flops=1, link=1, network=1, latency=0, network_latency=0)
    assert roofline.gather(groups[0], on, 3) == 2 * roofline.gather(groups[1], on, 3) == 3 * 4 * 120_832 // 2


def test_eagle_wants_one_stream() -> None:
    head = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 120_832, "hidden_size": 2816, "num_hidden_layers": 1}
    with pytest.raises(Unsupported, match="goes by the residual stream, of which HYV4ForCausalLM has several"):
        draft_shape(head, shape(HY_4))


def test_an_output_matrix_in_float32() -> None:
    """Hy 4's is, whatever the model is computed in, and the plan knows."""
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
    said = {"architectures": ["MistralLarge4ForConditionalGeneration"], "model_type": "mistral_large4"}
    return shape(said | {"text_config": MISTRAL_LARGE | (text or {})} | more)


def test_mistral_large_4_is_transformers() -> None:
    """Its sizes, and what is left out; 1,050 billion parameters, 53 of them for a token, one in a table of which a row is read."""
    found, theirs = mistral_large(), transformers.MistralLarge4Config(text_config=MISTRAL_LARGE)
    with torch.device("meta"):
        model = transformers.MistralLarge4ForConditionalGeneration(theirs)
    own = [values for key, values in model.named_parameters() if "vision_tower" not in key and "projector" not in key]
    assert found.parameters() == sum(values.numel() for values in own)
    assert (round(found.parameters() / 1e9), round(found.parameters(tokens=1) / 1e9)) == (1050, 53)
    assert found == mistral_large(theirs.to_dict()["text_config"])
    assert sorted(found.nope_layers) == [layer for layer, turns in enumerate(theirs.text_config.no_rope_layers) if not turns]
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
def test_what_is_refused_of_mistral_large_4(field: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        mistral_large(field)


def test_waves_of_mistral_large_4_are_not_rounded() -> None:
    """What the checkpoint has of them is read in float32, in a model of 16 bits, too."""
    model = load(ShardConfig(folder=str(tiny.folder("mistral-large4")), model="m", dtype="bfloat16"), lambda stage: None).decoder
    theirs = tiny.reference("mistral-large4").model.language_model.rotary_emb
    assert model.waves is not None
    assert model.waves.equal(theirs.alpha)
    turning = theirs.inv_freq * theirs.alpha.exp()
    angles = (5 * turning).cos() * theirs.attention_scaling
    torch.testing.assert_close(model.rotary[5, 0, 0, :4].float(), angles.bfloat16().float(), rtol=0, atol=0)


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


def test_ax_k2_is_transformers() -> None:
    """Its sizes, and what is left out: 20 billion parameters, 2 of them for a token."""
    found, theirs = shape(AX_K2), transformers.AXK2Config(**AX_K2)
    with torch.device("meta"):
        model = transformers.AXK2ForCausalLM(theirs)
    corrections = [values for key, values in model.named_buffers() if "correction" in key]
    assert found.parameters() == sum(values.numel() for values in (*model.parameters(), *corrections))
    assert found == shape(theirs.to_dict())
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
def test_what_is_refused_of_ax_k2(field: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        shape(AX_K2 | field)


def test_gates_of_norms_have_all_bits(tmp_path: Path) -> None:
    """Also where weights are rounded when they are loaded."""
    found = load(ShardConfig(folder=str(tiny.folder("ax-k2")), model="m", dtype="bfloat16", quantize="int4"), lambda stage: None)
    gates = [gate for layer in found.decoder.layers for gate in layer.norm_gates]
    assert [gate is None for gate in gates] == [False, True, False, False]
    model = found.decoder
    assert model.shape.weight_bytes(1, 2, "cpu", "bfloat16", not model.head.shared) == model.weight_bytes
