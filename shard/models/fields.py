"""Validation of config.json: any field may hold anything, so what is read of it is checked here."""

from collections.abc import Mapping, Sequence
from typing import Any

from .shape import Unsupported

Config = dict[str, Any]

# The bound of each integer field, by powers of two, so that a wrong one is found before anything is computed with it: far beyond
# every model there is, and far below where an allocation or a loop over them would never end.
SIZES = {
    name: 1 << bits
    for bits, names in {
        30: "max_position_embeddings sliding_window sliding_window_size attention_chunk_size floor_scale",
        24: "vocab_size",
        22: """
            intermediate_size moe_intermediate_size shared_expert_intermediate_size prefix_dense_intermediate_size
            share_expert_dim dense_intermediate_size shared_intermediate_size mamba_d_ssm moe_shared_expert_intermediate_size
            block_ff_dim block_multiple_of intermediate_size_mlp
        """,
        20: "hidden_size index_topk index_block_size index_topk_blocks index_local_blocks moe_latent_size",
        16: "q_lora_rank laurel_rank gated_norm_rank o_lora_rank",
        14: "num_attention_heads num_key_value_heads num_sliding_attention_heads o_groups",
        12: """
            num_hidden_layers head_dim max_window_layers num_local_experts num_experts num_experts_per_tok decoder_sparse_step
            no_rope_layer_interval n_routed_experts n_shared_experts num_shared_experts n_group topk_group first_k_dense_replace
            num_dense_layers global_attn_every_n_layers prefix_dense_sliding_window_pattern rotary_dim kv_lora_rank moe_k
            moe_num_experts moe_num_shared_experts moe_layer_start_index moe_layer_end_index moe_layer_interval
            full_attention_interval linear_num_heads linear_num_key_heads linear_num_value_heads mamba_n_heads mamba_n_groups
            mamba_num_heads n_groups interleave_moe_layer_step
        """,
        10: """
            qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim index_n_heads index_kpool hc_sinkhorn_iters
            linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state ssm_state_size mamba_head_dim
        """,
        6: "hc_mult altup_num_inputs linear_conv_kernel_dim mamba_d_conv mamba_expand conv_kernel conv_L_cache",
    }.items()
    for name in names.split()
}
LEAST = {
    **dict.fromkeys(("sliding_window", "max_window_layers", "n_shared_experts", "first_k_dense_replace"), 0),
    **dict.fromkeys(("moe_num_shared_experts", "moe_layer_start_index", "num_dense_layers"), 0),
    "moe_layer_end_index": -1,  # the last layer
    # Taps of convolutions: with one there would be no state.
    **dict.fromkeys(("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache"), 2),
}
LEAST_OF = {  # the same, by model_type
    "cohere2_moe": {"num_shared_experts": 0},
    "glm5_next_text": {"qk_rope_head_dim": 0, "head_dim": 0},
    "granitemoehybrid": {"num_local_experts": 0, "num_experts_per_tok": 0},
    "granitemoeshared": {"shared_intermediate_size": 0},
    "granitemoe_swa": {"shared_intermediate_size": 0},
    # Fields of other models with experts, which these have not: MiniMax M2's own config.json and Qwen 3 Coder's say 0.
    "minimax_m2": {"shared_intermediate_size": 0},
    "qwen3_moe": {"shared_expert_intermediate_size": 0},
}
# Integer fields that may be null, which means that there is none.
MAY_BE_NULL = (
    *("mamba_d_ssm", "moe_latent_size", "attention_chunk_size", "num_sliding_attention_heads"),
    *("num_key_value_heads", "head_dim", "sliding_window", "sliding_window_size", "max_window_layers"),
    *("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "q_lora_rank"),
)
NULL_OF = {  # the same, by model_type: no experts, or the default number of features
    "cohere2_moe": ("prefix_dense_intermediate_size",),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), ("num_experts", "moe_intermediate_size")),
    "hunyuan_v1_moe": ("moe_intermediate_size",),
    "minicpm3": ("v_head_dim",),
    "olmo_hybrid": ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
}
LISTS_OF = {  # fields that may be a list, with a number for each layer, by model_type
    "gemma3n_text": ("intermediate_size",),
    "hunyuan_v1_moe": ("moe_intermediate_size",),
}
AGAIN = "is it the model's own? Download it again"
ELSE = "take a draft model that was made for this one, or a small model of the same family"
# Values of `layer_types`.
FULL, SLIDING, INDEXED, LINEAR = "full_attention", "sliding_attention", "indexed_attention", "linear_attention"
CHUNKED = "chunked_attention"  # Llama 4's
BLOCKS = "minimax_m3_sparse"
COMPRESSED = "compressed_sparse_attention", "heavily_compressed_attention"  # DeepSeek V4's
SHORT = "conv"  # LFM2's
# Their names in transformers 4, and the last one until transformers 5.17.
FORMERLY = {"attention": FULL, "mamba": LINEAR, "deepseek_sparse_attention": INDEXED}
SWITCHES = (
    *("tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias", "qkv_bias", "use_bias"),
    *("use_sliding_window", "use_qk_norm", "qk_layernorm", "norm_topk_prob", "use_qkv_bias", "use_parallel_residual"),
    *("rope_interleave", "mamba_conv_bias", "mamba_proj_bias", "use_cla", "mup_enabled", "lm_head_bias"),
    *("mamba_rms_norm", "mamba_norm_before_gate", "projectors_bias"),
    *("conv_bias", "block_auto_adjust_ff_dim", "use_expert_bias", "tie_embedding", "use_post_norm"),
    *("use_sandwich_norm", "use_attention_gate", "linear_allow_neg_eigval"),
)
# The model_type of an architecture where it does not follow from the name.
MODEL_TYPES = {
    "KimiLinearForCausalLM": "kimi_linear",
    "GraniteMoeSWAForCausalLM": "granitemoe_swa",
    "GraniteSWAForCausalLM": "granite_swa",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",
    "Cohere2MoeForCausalLM": "cohere2_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "FlexOlmoForCausalLM": "flex_olmo",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3nForCausalLM": "gemma3n_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "FalconH1ForCausalLM": "falcon_h1",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "ExaoneMoeForCausalLM": "exaone_moe",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "HYV4ForCausalLM": "hy_v4",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTNeoForCausalLM": "gpt_neo",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GptOssForCausalLM": "gpt_oss",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "HYV3ForCausalLM": "hy_v3",
    "Llama4ForCausalLM": "llama4_text",
    "LongcatFlashForCausalLM": "longcat_flash",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MiniMaxM3VLForCausalLM": "minimax_m3_vl_text",
    "NemotronHForCausalLM": "nemotron_h",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen4ExpForCausalLM": "qwen4_exp_text",
    "SeedOssForCausalLM": "seed_oss",
    "SolarOpenForCausalLM": "solar_open",
}

# Architectures as checkpoints name them that were published before transformers had a class, and its name for them.
PUBLISHED = {
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
}
ALIASES = {"kimi_k2": "deepseek_v3", "youtu_llm": "youtu", "AXK1": "axk1"}  # of model_type


def types_of(architecture: str) -> list[str]:
    """Possible values of model_type."""
    own = MODEL_TYPES.get(architecture, architecture.removesuffix("ForCausalLM").lower())
    return [own, *(alias for alias, kind in ALIASES.items() if kind == own)]


def renamed(config: Config) -> Config:
    """The config with current names of layer types, and without those of multi-token prediction layers, which may follow the
    others."""
    kinds, layers, more = (config.get(name) for name in ("layer_types", "num_hidden_layers", "num_nextn_predict_layers"))
    if isinstance(kinds, list) and type(layers) is type(more) is int and more > 0 and len(kinds) == layers + more:
        kinds = kinds[:layers]
    return config | {"layer_types": [FORMERLY.get(str(kind), kind) for kind in kinds]} if isinstance(kinds, list) else config


def check(config: Config, architecture: str, types: Sequence[str]) -> None:
    """Raises Unsupported if a field that is read has an impossible value. types: possible values of model_type."""
    kind = config.get("model_type")
    if kind is not None and kind not in types:
        raise Unsupported(
            f"config.json says model_type {shown(kind)}, and architecture {architecture}, which is {types[0]!r}: transformers goes "
            f"by the first, penstock by the second; {AGAIN}"
        )
    for name, most in SIZES.items():
        least = (LEAST | LEAST_OF.get(types[0], {})).get(name, 1)
        value = config.get(name, least)
        if value is None and name in (*MAY_BE_NULL, *NULL_OF.get(types[0], ())):
            continue
        listed = isinstance(value, list) and name in LISTS_OF.get(types[0], ())
        for one in value if listed else [value]:
            whole(name, one, least, most)
    for name in SWITCHES:
        boolean(name, config.get(name, False))
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != config["num_hidden_layers"]):
        raise Unsupported(f"config.json says layer_types {shown(kinds)}, a name for each of num_hidden_layers is needed: {AGAIN}")


def whole(name: str, value: object, least: int, most: int) -> int:
    """The field's value. Raises Unsupported if it is no integer in this range."""
    if type(value) is not int or not least <= value <= most:
        raise Unsupported(f"config.json says {name} {shown(value)}, an integer from {least} to {most} is needed: {AGAIN}")
    return value


def boolean(name: str, value: object) -> bool:
    """The field's value. Raises Unsupported if it is no boolean."""
    if not isinstance(value, bool):
        raise Unsupported(f"config.json says {name} {shown(value)}, true or false is needed: {AGAIN}")
    return value


def number(values: Mapping[str, Any], name: str, default: float | None = None, most: float = 1e12) -> float:
    """A positive number. Raises KeyError if it is missing and has no default."""
    value = values[name] if default is None else values.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise Unsupported(f"config.json says {name} {shown(value)}, a number above 0 up to {most:g} is needed: {AGAIN}")
    return float(value)


def expect(config: Config, **usual: object) -> None:
    """Raises Unsupported if one of these fields is there and has another value."""
    for name, value in usual.items():
        found = config.get(name, value)
        if found != value or isinstance(found, bool) is not isinstance(value, bool):
            has = shown(value) if value else "none"
            raise Unsupported(f"{name} {shown(found)} is not supported: for this family the decoder has {has}")


def said(config: Config) -> Config:
    """The config without null fields, where transformers takes null for a missing field."""
    return {name: value for name, value in config.items() if value is not None}


def shown(value: object) -> str:
    """The value as config.json has it, if it is one word there."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else repr(value)[:40]
