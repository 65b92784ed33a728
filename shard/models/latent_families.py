"""Model families with multi-head latent attention (MLA), and DeepSeek-OCR 2's text. A new family is a new entry in `LATENT`."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .fields import AGAIN, Config, expect, number, said, shown
from .parts import biased, common, layers_of
from .ropes import MISTRAL_YARN, sharpness, with_rope
from .shape import Shape, Unsupported
from .sparse_families import scored, scored_by_kinds, with_experts
from .traits import Gates, HyperConnections, Index, Latent

# transformers' defaults, which some checkpoints rely on.
FEATURES: Config = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
DEEPSEEK_V3: Config = FEATURES | {
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
DEEPSEEK_V32: Config = DEEPSEEK_V3 | {
    "max_position_embeddings": 163_840,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}
GLM_5: Config = DEEPSEEK_V32 | {
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
}
GLM_FLASH: Config = FEATURES | {
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
}
MISTRAL_4: Config = FEATURES | {
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "max_position_embeddings": 1_048_576,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
}
MISTRAL_4_ROPE = MISTRAL_YARN | {"rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
AX_K1: Config = DEEPSEEK_V3 | {"max_position_embeddings": 32_768, "n_routed_experts": 192, "first_k_dense_replace": 1}
AX_K2: Config = DEEPSEEK_V32 | {
    "kv_lora_rank": 128,
    "q_lora_rank": 384,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "max_position_embeddings": 131_072,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_n_heads": 16,
    "gated_norm_rank": 16,
}
# transformers' names, and the hub's, which transformers also writes.
AX_K2_NAMES = ((".mlp.fc1.", ".W_down."), (".mlp.fc2.", ".W_up."), (".q_gate_proj.", ".q_b_proj."))
MINICPM: Config = FEATURES | {
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": None,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
HY_4: Config = FEATURES | {
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 16,
    "hc_mult": 4,
}
DEEPSEEK_OCR: Config = {
    "num_experts_per_tok": None,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
    "max_position_embeddings": 2048,
}
HY_4_VL: Config = {"q_lora_rank": 2048, "moe_intermediate_size": 2048, "index_n_heads": 32}
# Hyper-connections, gates and sinks: transformers' names, and those of checkpoints, of which none was at hand.
HY_4_NAMES = (
    *(("attn_hc.", f"{place}.hc_") for place in ("hc_attn_layer", "hc_pre.hc_attn_layer", "hc_attn_layer.hc_pre")),
    *(("ffn_hc.", f"{place}.hc_") for place in ("hc_mlp_layer", "hc_pre.hc_mlp_layer", "hc_mlp_layer.hc_pre")),
    *(("hc_head.hc_", f"{place}hc_head_") for place in ("", "hc_pre.", "hc_head.", "hc_pre.hc_head.", "hc_head.hc_pre.")),
    ("gate_proj", "linear_gate"),
    ("sinks", "learnable_sink_param"),
)
OWN, OTHERS = "full", "shared"  # values of `indexer_types`
LETTERS = {"F": OWN, "S": OTHERS}
YOUTU: Config = FEATURES | {"max_position_embeddings": 131_072, "tie_word_embeddings": True}


def latent_shape(config: Config) -> Shape:
    """What all MLA families have in common. config: with all of `FEATURES`."""
    latent = Latent(
        size=config["kv_lora_rank"],
        turned=config["qk_rope_head_dim"],
        plain=config["qk_nope_head_dim"],
        values=config["v_head_dim"],
        queries=config["q_lora_rank"] or 0,
    )
    if latent.turned % 2:
        raise Unsupported(f"config.json says qk_rope_head_dim {latent.turned}, an even number is needed: {AGAIN}")
    if config.get("moe_layer_freq", 1) != 1:
        raise Unsupported(f"moe_layer_freq {shown(config['moe_layer_freq'])} is not supported: the decoder has 1")
    return replace(
        biased(common(config | {"head_dim": 2, "num_key_value_heads": 1}), config),
        head_size=latent.size + latent.turned,
        latent=latent,
        attention_scale=(latent.plain + latent.turned) ** -0.5 * sharpness(config) ** 2,
        rotary_neighbours=config.get("rope_interleave", True),
    )


def _deepseek_v3(config: Config) -> Shape:
    """DeepSeek V3 (DeepSeek-AI 2024, arXiv:2412.19437) and Kimi K2. Experts are chosen by sigmoid scores with a correction bias."""
    expect(said(config), scoring_func="sigmoid", topk_method="noaux_tc")
    return scored(latent_shape(DEEPSEEK_V3 | config), DEEPSEEK_V3 | config)


def _glm_flash(config: Config) -> Shape:
    """GLM 4.7 Flash: DeepSeek V3, but config.json may say which layers have experts."""
    given = GLM_FLASH | config
    return scored_by_kinds(latent_shape(given), given)


def _deepseek_v32(config: Config) -> Shape:
    """DeepSeek V3.2 (DeepSeek-AI 2025, arXiv:2512.02556): V3 with sparse attention to tokens that an index chooses."""
    return _indexed(DEEPSEEK_V32 | config, neighbours=False)


def _glm_5(config: Config) -> Shape:
    """GLM 5: DeepSeek V3.2 with interleaved features in the index; some layers may reuse the index of another."""
    return _indexed(GLM_5 | config, neighbours=True, borrowing=index_sharing_layers(config))


def index_sharing_layers(config: Config, attending: frozenset[int] | None = None) -> frozenset[int]:
    """Layers without an index of their own: given by name, by letters, or by an interval. attending: layers to consider, if not
    all."""
    layers = config["num_hidden_layers"]
    attending = frozenset(range(layers)) if attending is None else attending
    every, first = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
    if type(every) is not int or type(first) is not int:
        raise Unsupported(f"config.json says index_topk_freq {shown(every)} and index_skip_topk_offset {shown(first)}: {AGAIN}")
    kinds = config.get("indexer_types")
    if kinds is None and (letters := config.get("index_topk_pattern")) is not None:
        kinds = [LETTERS.get(letter, letter) for letter in letters] if isinstance(letters, str) else letters
    if kinds is None:
        kinds = [OTHERS if max(layer - first + 1, 0) % max(every, 1) else OWN for layer in range(layers)]
    kinds = kinds[:layers] if isinstance(kinds, list) else kinds  # there may be one for a multi-token prediction layer
    known = isinstance(kinds, list) and len(kinds) >= layers and {OWN, OTHERS}.issuperset(map(str, kinds))
    if not isinstance(kinds, list) or not known or kinds[min(attending)] != OWN:
        raise Unsupported(
            f"config.json says indexer_types {shown(kinds)}, {OWN!r} or {OTHERS!r} is needed for each of num_hidden_layers, the "
            f"first of which has its own: {AGAIN}"
        )
    return layers_of(kinds, OTHERS) & attending


def _indexed(given: Config, neighbours: bool, borrowing: frozenset[int] = frozenset(), turned_last: bool = False) -> Shape:
    expect(said(given), scoring_func="sigmoid", topk_method="noaux_tc")
    base = latent_shape(given)
    index = Index(
        heads=given["index_n_heads"],
        size=given["index_head_dim"],
        most=given["index_topk"],
        neighbours=neighbours,
        borrowing=borrowing,
        turned_last=turned_last,
        epsilon=base.norm_epsilon if turned_last else 1e-6,
    )
    if base.latent is None or not base.latent.queries or index.size < base.latent.turned:
        raise Unsupported(
            f"config.json says q_lora_rank {shown(given['q_lora_rank'])}, index_head_dim {index.size} and qk_rope_head_dim "
            f"{given['qk_rope_head_dim']}: an index needs latents of queries, and heads as large as what turns of keys"
        )
    return scored_by_kinds(with_latent(base, index=index), given)


def with_latent(base: Shape, **fields: Any) -> Shape:
    """The shape with these fields of its latents replaced."""
    assert base.latent is not None
    return replace(base, latent=replace(base.latent, **fields))


def _deepseek_v2(config: Config) -> Shape:
    """DeepSeek V2 (DeepSeek-AI 2024, arXiv:2405.04434). Router scores are a softmax, and a group of experts is rated by its best
    one."""
    expect(said(config), scoring_func="softmax", norm_topk_prob=False, mlp_bias=False)
    given = (
        FEATURES
        | {"first_k_dense_replace": 0, "n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2}
        | config
    )
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise Unsupported(f"topk_method {shown(method)} is not supported: the decoder has greedy and group_limited_greedy")
    base = scored(latent_shape(given), given if method != "greedy" else given | {"n_group": 1, "topk_group": 1})
    return with_softmax_router(base, best=1, precise=True)


def deepseek_ocr(config: Config) -> Shape:
    """The text model of DeepSeek-OCR 2 (2026): multi-head attention without latents, DeepSeek V2's experts."""
    expect(config, mlp_bias=False, topk_method="greedy")
    given = DEEPSEEK_OCR | config
    if given["num_experts_per_tok"] is None:
        raise KeyError("num_experts_per_tok")
    base = biased(common({name: value for name, value in given.items() if name != "head_dim"}), given)
    return with_softmax_router(scored_by_kinds(base, given | {"n_group": 1, "topk_group": 1}), best=1, precise=True)


def _mistral_4(config: Config) -> Shape:
    """Mistral Small 4: DeepSeek V2, where a group is rated by its best two experts. Queries are scaled by their position."""
    given = with_rope(MISTRAL_4 | config, MISTRAL_4_ROPE)
    return with_softmax_router(scored(latent_shape(given), given))


def _youtu(config: Config) -> Shape:
    """Youtu, without experts."""
    return latent_shape(YOUTU | config)


def _ax_k1(config: Config) -> Shape:
    """SK Telecom's A.X K1: DeepSeek V3 with a norm after experts. Most checkpoints have no correction bias."""
    base = scored_by_kinds(latent_shape(AX_K1 | config), AX_K1 | config)
    return replace(with_experts(base, uncorrected=True), experts_norm="post_mlp_layernorm")


def _ax_k2(config: Config) -> Shape:
    """SK Telecom's A.X K2: DeepSeek V3.2 with gated attention, and gates on the norms before attention and experts."""
    expect(config, rope_interleave=True)
    base = with_latent(_indexed(AX_K2 | config, neighbours=False), gated=True)
    return replace(
        with_experts(base, zeroed=True),
        norm_gates=(AX_K2 | config)["gated_norm_rank"],
        aliases=AX_K2_NAMES,
        modules=(("q_gate_proj", "q_b_proj"),),
    )


def _minicpm_3(config: Config) -> Shape:
    """MiniCPM 3: no experts, and scaling factors (Hu et al. 2024, arXiv:2404.06395)."""
    given = MINICPM | config
    values = given["v_head_dim"] or given["hidden_size"] // given["num_attention_heads"]
    base = latent_shape(given | {"v_head_dim": values, "rope_interleave": False})
    depth = math.sqrt(base.layers)
    scale = depth if "scale_depth" in given and given["scale_depth"] is None else number(given, "scale_depth", 1.4)
    model = base.hidden if "dim_model_base" in given and given["dim_model_base"] is None else number(given, "dim_model_base", 256.0)
    return replace(
        base,
        embedding_factor=number(given, "scale_emb", 12.0),
        residual_factor=scale / depth,
        logit_divisor=base.hidden / model,
    )


def hy_4_vl(config: Config) -> Shape:
    """Hy 4's language model with images: the latents' norms have the model's epsilon, and the rotary embedding is interleaved."""
    found = _hy_4(HY_4_VL | config, neighbours=True)
    return with_latent(found, epsilon=found.norm_epsilon)


def _hy_4(config: Config, neighbours: bool = False) -> Shape:
    """Tencent's Hy 4: GLM 5 with hyper-connections, gated attention, attention sinks, and experts with clamped gates."""
    usual = [OWN if layer == 0 or (layer - 1) % 4 == 0 else OTHERS for layer in range(config["num_hidden_layers"])]
    given = HY_4 | {"routed_scaling_factor": 2.827, "indexer_types": usual} | config | {"rope_interleave": neighbours}
    base = _indexed(given, neighbours=neighbours, borrowing=index_sharing_layers(given), turned_last=True)
    limit = config.get("swiglu_limit", 10.0)
    if type(limit) not in (int, float) or limit > 0:
        base = with_experts(base, limit=number(given, "swiglu_limit", 10.0), form="before")
    epsilon = number(given, "hc_eps", 1e-6)
    return replace(
        base,
        hyper=HyperConnections(count=given["hc_mult"], magnitude=number(given, "hc_magnitude", 2.0), epsilon=epsilon),
        gates=Gates(name="gate_proj"),
        sinks="sinks",
        precise_logits=True,
        aliases=HY_4_NAMES,
    )


def with_softmax_router(base: Shape, **more: Any) -> Shape:
    """The same shape, but router scores are a softmax without correction bias."""
    return with_experts(base, scores="softmax", correction="", **more)


LATENT: dict[str, Callable[[Config], Shape]] = {
    "AXK1ForCausalLM": _ax_k1,
    "AXK2ForCausalLM": _ax_k2,
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "DeepseekV32ForCausalLM": _deepseek_v32,
    "GlmMoeDsaForCausalLM": _glm_5,
    "Glm4MoeLiteForCausalLM": _glm_flash,
    "HYV4ForCausalLM": _hy_4,
    "MiniCPM3ForCausalLM": _minicpm_3,
    "Mistral4ForCausalLM": _mistral_4,
    "YoutuForCausalLM": _youtu,
}
