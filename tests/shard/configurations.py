"""Configurations of tiny models of every family, as objects of transformers' classes, by the names that tests use for the
models."""

from collections.abc import Callable
from typing import Any

import transformers

VOCABULARY = 131  # odd, so that two ranks have tables of different sizes
ATTENTION_CHUNK = 16  # positions: the chunk of chunked attention, or a block of sparse attention
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
BOS_AND_EOS = {"bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
YARN_WITH_MSCALE = YARN | {"beta_fast": 8.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}
YARN_WITH_QUERY_SCALING = YARN | {
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
QWEN3_MOE = SMALL | {
    "head_dim": 16,
    "num_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 3,
}
SMOLLM3 = SMALL | {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
QWEN2_MOE = QWEN3_MOE | {"shared_expert_intermediate_size": 36}
WITHOUT_KV_HEADS = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
MINIMAX_3 = SMALL | {
    "head_dim": 16,
    "rotary_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "intermediate_size": 20,
    "dense_intermediate_size": 88,
    "shared_intermediate_size": 36,
    "num_hidden_layers": 4,
    "num_local_experts": 9,
    "num_experts_per_tok": 3,
    "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    "index_head_dim": 16,
    "index_block_size": ATTENTION_CHUNK,
    "index_topk_blocks": 3,
    "swiglu_limit": 0.7,
}
FALCON = (
    {name: value for name, value in WITHOUT_KV_HEADS.items() if name != "intermediate_size"} | BOS_AND_EOS | {"ffn_hidden_size": 88}
)
OPT = {name: value for name, value in WITHOUT_KV_HEADS.items() if name != "intermediate_size"} | BOS_AND_EOS | {"ffn_dim": 88}
GPT2 = BOS_AND_EOS | {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 512}
BLOOM = BOS_AND_EOS | {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 8}
MPT = BOS_AND_EOS | {"vocab_size": VOCABULARY, "d_model": 72, "n_layers": 2, "n_heads": 6, "max_seq_len": 512}
DBRX = {"vocab_size": VOCABULARY, "d_model": 64, "n_layers": 2, "n_heads": 8, "max_seq_len": 512}
SCAN_CHUNK = 16  # tokens that transformers' state spaces scan at once; shorter pieces are padded
WINDOW = 8  # less than the context of every test
GPT_NEO = BOS_AND_EOS | {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 8,
    "max_position_embeddings": 512,
    "window_size": WINDOW,
}

# Soft caps that the logits of these models come near to, so that they matter.
GEMMA: dict[str, Any] = SMALL | {"head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": WINDOW}
GEMMA2 = GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0}
LLAMA4 = SMALL | {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 20,
    "intermediate_size_mlp": 44,
    "num_local_experts": 5,
    "attention_chunk_size": ATTENTION_CHUNK,
}
GEMMA4 = SMALL | {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
}
GEMMA3N = {name: value for name, value in SMALL.items() if name != "intermediate_size"} | {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 100,  # smaller than the vocabulary
    "laurel_rank": 6,
}
GEMMA4_E = GEMMA4 | {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 150,
}
GEMMA4_MOE = GEMMA4 | {"enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 20}
PHI4 = SMALL | {"hidden_size": 128, "partial_rotary_factor": 0.75, "pad_token_id": 0, "eos_token_id": 1}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0, 1.1, 1.3, 1.6, 2.0],
    "long_factor": [1.0, 1.2, 1.7, 3.0, 9.0, 20.0],
}
GPT_OSS = SMALL | {
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "swiglu_limit": 0.8,  # so that it matters
}
GLM_MOE = SMALL | {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "routed_scaling_factor": 1.7,
}
MLA = {name: value for name, value in GLM_MOE.items() if name != "head_dim"} | {
    "moe_intermediate_size": 24,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
KIMI = {name: value for name, value in MLA.items() if name not in ("n_routed_experts", "first_k_dense_replace")} | {
    **BOS_AND_EOS,
    "num_hidden_layers": 4,
    "q_lora_rank": None,
    "pad_token_id": 0,
    "linear_head_dim": 12,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
}
MLA_WITH_INDEXER = MLA | {"num_key_value_heads": 8, "index_topk": 6, "index_head_dim": 16, "index_n_heads": 12}
HY_4 = MLA_WITH_INDEXER | {
    "num_experts_per_tok": 3,
    "n_routed_experts": 8,
    "indexer_types": ["full", "shared", "full"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "hc_mult": 3,
    "pad_token_id": 0,
    **BOS_AND_EOS,
}
MISTRAL_LARGE_4 = {name: value for name, value in MLA_WITH_INDEXER.items() if name not in ("q_lora_rank",)} | {
    "num_hidden_layers": 4,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
}
GLM_5_NEXT = {
    name: value for name, value in MLA_WITH_INDEXER.items() if name not in ("qk_rope_head_dim", "first_k_dense_replace")
} | {
    **BOS_AND_EOS,
    "pad_token_id": 0,
    "num_hidden_layers": 4,
    "index_topk": 8,
    "index_kpool": 4,
    "linear_head_dim": 12,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "hc_mult": 3,
}
DEEPSEEK_V4 = {name: value for name, value in SMALL.items() if name not in ("intermediate_size", "num_key_value_heads")} | {
    **BOS_AND_EOS,
    "pad_token_id": 0,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "head_dim": 16,
    "qk_rope_head_dim": 6,
    "q_lora_rank": 24,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 10},
    "sliding_window": WINDOW,
    "o_groups": 4,
    "o_lora_rank": 12,
    "index_n_heads": 12,
    "index_head_dim": 8,
    "index_topk": 5,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "hc_mult": 3,
}
GLM_5_NEXT_VISION = {"depth": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8, "projection_intermediate_size": 8}
TINY_VISION = {"model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
AFMOE = SMALL | {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "route_scale": 1.7,
    "sliding_window": WINDOW,
}
COHERE2_MOE = (
    SMALL
    | BOS_AND_EOS
    | {
        "head_dim": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "prefix_dense_intermediate_size": 36,
    }
)
ERNIE_MOE = SMALL | {"num_hidden_layers": 4, "moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 20}
EXAONE_MOE = SMALL | {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_group": 2,
    "topk_group": 1,
}
HYBRID = SMALL | {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
HYBRID_MOE = HYBRID | {
    "num_hidden_layers": 3,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 36,
}
QWEN_4 = {name: value for name, value in HYBRID_MOE.items() if name not in ("intermediate_size", "full_attention_interval")} | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "indexer_n_heads": 16,  # so many heads that scores seldom tie at 0
    "indexer_kv_heads": 1,
    "indexer_head_dim": 12,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "hc_count": 3,
    "hc_lowrank": 10,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 24,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "split_ngram_parts": 5,
    "eos_token_id": 2,
}
OLMO_HYBRID = SMALL | {"num_hidden_layers": 3, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "pad_token_id": 0}
GRANITE: dict[str, Any] = SMALL | {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.5,
    "residual_multiplier": 0.4,
    "logits_scaling": 1.7,
}
GRANITE4 = GRANITE | {
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
    "mamba_chunk_size": SCAN_CHUNK,
    "shared_intermediate_size": 36,
}
FALCON_H1 = SMALL | {
    "mamba_n_heads": 8,
    "mamba_d_ssm": 80,
    "mamba_d_state": 12,
    "mamba_chunk_size": SCAN_CHUNK,
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 0.5,
    "ssm_out_multiplier": 1.4,
    "mlp_multipliers": [1.6, 0.4],
    "ssm_multipliers": [1.5, 0.7, 1.2, 0.8, 1.3],
}
LFM2 = SMALL | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}
LAGUNA = QWEN2_MOE | {"sliding_window": WINDOW}
LFM3 = (
    SMALL | BOS_AND_EOS | {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": WINDOW, "conv_L_cache": 5, "pad_token_id": 0}
)
NEMOTRON = {name: value for name, value in SMALL.items() if name != "num_hidden_layers"} | {
    "head_dim": 12,
    "ssm_state_size": 12,
    "chunk_size": SCAN_CHUNK,
    "mamba_num_heads": 8,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "time_step_min": 0.05,  # so that it matters
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 36,
    "routed_scaling_factor": 1.7,
}
GLM = SMALL | {"head_dim": 16, "pad_token_id": 0, "eos_token_id": 1}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

LONGCAT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_layers": 2,
    "num_attention_heads": 8,
    "ffn_hidden_size": 88,
    "max_position_embeddings": 512,
    "q_lora_rank": 16,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 6,
    "moe_topk": 4,
    "expert_ffn_hidden_size": 24,
}

# A suffix says what a variant has: -plain few optional parts, -biases biases, -window sliding windows, -full full attention in all
# layers, -part partial rotary features, -still no rotary embeddings, -steps and -step experts in every second layer, -sets and
# -groups group-limited routing, -busy no zero-computation experts, -borrowing layers that share an indexer, -pools an indexer that
# selects pools of tokens, -entries compressed entries in all layers, -values values that are not the keys, -narrow MLPs of one
# width, -elements gates per element, -limit clamped activations, -rms RMS norms.
FAMILIES: dict[str, Callable[[], Any]] = {
    "afmoe": lambda: transformers.AfmoeConfig(**AFMOE, global_attn_every_n_layers=2, mup_enabled=True),
    "apertus": lambda: transformers.ApertusConfig(**SMALL, attention_bias=True),
    "arcee": lambda: transformers.ArceeConfig(**SMALL, mlp_bias=True),
    "ax-k1": lambda: transformers.AXK1Config(
        **MLA | BOS_AND_EOS, n_group=4, topk_group=2, mlp_layer_types=["sparse", "dense", "sparse"]
    ),
    "ax-k2": lambda: transformers.AXK2Config(
        **MLA_WITH_INDEXER | BOS_AND_EOS | {"num_hidden_layers": 2, "q_lora_rank": 16},  # so that little is rounded
        gated_norm_rank=5,
        attention_bias=True,
        rms_norm_eps=0.1,
        rope_parameters=dict(YARN_WITH_MSCALE),
    ),
    "ax-k2-groups": lambda: transformers.AXK2Config(
        **MLA_WITH_INDEXER | BOS_AND_EOS | {"num_hidden_layers": 2},
        gated_norm_rank=8,
        n_group=4,
        topk_group=2,
        mlp_layer_types=["sparse", "dense"],
    ),
    "bamba": lambda: transformers.BambaConfig(
        **SMALL | {"num_hidden_layers": 3, "mamba_chunk_size": SCAN_CHUNK},
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_n_groups=4,
        mamba_d_state=12,
    ),
    "bloom": lambda: transformers.BloomConfig(**BLOOM),
    "cohere": lambda: transformers.CohereConfig(**SMALL, logit_scale=0.3, attention_bias=True, pad_token_id=0, **BOS_AND_EOS),
    "cohere2": lambda: transformers.Cohere2Config(**SMALL | {"num_hidden_layers": 4}, sliding_window=WINDOW, **BOS_AND_EOS),
    "cohere2-moe": lambda: transformers.Cohere2MoeConfig(
        **COHERE2_MOE, num_shared_experts=2, expert_selection_fn="sigmoid", first_k_dense_replace=1
    ),
    "cohere2-moe-rms": lambda: transformers.Cohere2MoeConfig(
        **COHERE2_MOE, num_shared_experts=1, rms_norm_eps=0.1, shared_expert_combination_strategy="sum", attention_bias=True
    ),
    "cwm": lambda: transformers.CwmConfig(**SMALL, head_dim=16, sliding_window=WINDOW, mlp_bias=True, rope_parameters=LLAMA3),
    "dbrx": lambda: transformers.DbrxConfig(
        **DBRX,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        attn_config={"kv_n_heads": 4, "clip_qkv": 0.7, "rope_theta": 500.0},
        ffn_config={"ffn_hidden_size": 20, "moe_num_experts": 5, "moe_top_k": 3},
    ),
    "deepseek-v2": lambda: transformers.DeepseekV2Config(**MLA, attention_bias=True, rope_parameters=dict(YARN_WITH_MSCALE)),
    "deepseek-v2-sets": lambda: transformers.DeepseekV2Config(
        **MLA | {"q_lora_rank": None}, attention_bias=True, topk_method="group_limited_greedy", n_group=4, topk_group=2
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(**MLA, n_group=4, topk_group=2, rope_parameters=dict(YARN_WITH_MSCALE)),
    "deepseek-v3-biases": lambda: transformers.DeepseekV3Config(
        **MLA | {"q_lora_rank": None}, n_group=1, topk_group=1, attention_bias=True, rope_interleave=False
    ),
    "deepseek-v32": lambda: transformers.DeepseekV32Config(
        **MLA_WITH_INDEXER, n_group=4, topk_group=2, rope_parameters=dict(YARN_WITH_MSCALE)
    ),
    "dots1": lambda: transformers.Dots1Config(**GLM_MOE, n_shared_experts=2, n_group=4, topk_group=2, first_k_dense_replace=1),
    "dots1-window": lambda: transformers.Dots1Config(
        **GLM_MOE, n_shared_experts=1, attention_bias=True, norm_topk_prob=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "ernie": lambda: transformers.Ernie4_5Config(**SMALL, head_dim=16, tie_word_embeddings=False),
    "ernie-moe": lambda: transformers.Ernie4_5_MoeConfig(**ERNIE_MOE, moe_layer_end_index=2, tie_word_embeddings=True),
    "exaone-moe": lambda: transformers.ExaoneMoeConfig(
        **EXAONE_MOE, sliding_window=WINDOW, sliding_window_pattern=2, mlp_layer_types=["dense", "sparse", "dense", "sparse"]
    ),
    "exaone4": lambda: transformers.Exaone4Config(
        **SMALL | {"num_hidden_layers": 4}, sliding_window=WINDOW, sliding_window_pattern=2, rope_parameters=LLAMA3
    ),
    "exaone4-full": lambda: transformers.Exaone4Config(**SMALL, sliding_window=None, layer_types=["full_attention"] * 2),
    "falcon-h1": lambda: transformers.FalconH1Config(**FALCON_H1, mamba_n_groups=2, head_dim=16),
    "falcon-h1-norms": lambda: transformers.FalconH1Config(**FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=False),
    "falcon": lambda: transformers.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=4),
    "falcon-rw": lambda: transformers.FalconConfig(**FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "flint": lambda: transformers.FlintConfig(
        **QWEN2_MOE | {"num_hidden_layers": 5}, sliding_window=WINDOW, mlp_only_layers=[1], attention_bias=True
    ),
    "flex-olmo": lambda: transformers.FlexOlmoConfig(**SMALL, num_experts=6, num_experts_per_tok=3, pad_token_id=0),
    "gemma": lambda: transformers.GemmaConfig(**SMALL, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(**GEMMA2),
    "gemma2-biases": lambda: transformers.Gemma2Config(**GEMMA, attention_bias=True, tie_word_embeddings=False),
    "gemma2-full": lambda: transformers.Gemma2Config(**GEMMA2, layer_types=["full_attention"] * 2),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **GEMMA2 | {"num_hidden_layers": 3}, sliding_window_pattern=2, rope_parameters=GEMMA3_ROPES
    ),
    "gemma3n": lambda: transformers.Gemma3nTextConfig(
        **GEMMA3N, intermediate_size=[88, 64, 88, 104], activation_sparsity_pattern=[0.9, 0.0, 0.5, 0.3]
    ),
    "gemma3n-plain": lambda: transformers.Gemma3nTextConfig(
        **GEMMA3N | {"altup_num_inputs": 2, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 150},
        intermediate_size=88,
        altup_active_idx=1,
        rms_norm_eps=0.1,
        altup_correct_scale=False,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(**GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=2),
    "gemma4-experts": lambda: transformers.Gemma4TextConfig(**GEMMA4_MOE, attention_k_eq_v=True),
    "gemma4-values": lambda: transformers.Gemma4TextConfig(
        **GEMMA4 | {"global_head_dim": 24}, attention_bias=True, final_logit_softcapping=9.0
    ),
    "gemma4-e": lambda: transformers.Gemma4TextConfig(**GEMMA4_E, use_double_wide_mlp=True),
    "gemma4-e-narrow": lambda: transformers.Gemma4TextConfig(**GEMMA4_E | {"num_kv_shared_layers": 1}, attention_k_eq_v=True),
    "gemma4-unified": lambda: transformers.Gemma4UnifiedTextConfig(
        **GEMMA4 | {"head_dim": 32, "global_head_dim": 8}, attention_k_eq_v=True, attention_bias=True, tie_word_embeddings=False
    ),
    "glm": lambda: transformers.GlmConfig(**GLM, partial_rotary_factor=1.0, attention_bias=False),
    "glm4": lambda: transformers.Glm4Config(**GLM, rope_parameters=dict(YARN)),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(**GLM_MOE, use_qk_norm=True, attention_bias=True, n_group=2, topk_group=1),
    "glm-5": lambda: transformers.GlmMoeDsaConfig(
        **MLA_WITH_INDEXER, mlp_layer_types=["dense", "sparse", "dense"], attention_bias=True, rms_norm_eps=0.1
    ),
    "glm-5-borrowing": lambda: transformers.GlmMoeDsaConfig(
        **MLA_WITH_INDEXER | {"num_hidden_layers": 4}, indexer_types=["full", "shared", "full", "shared"]
    ),
    "glm-5-next": lambda: transformers.Glm5NextConfig(
        text_config=GLM_5_NEXT | {"attention_bias": True, "n_group": 4, "topk_group": 2, "rms_norm_eps": 0.1, "hc_eps": 0.01},
        vision_config=GLM_5_NEXT_VISION,
    ),
    "glm-5-pools": lambda: transformers.Glm5NextConfig(
        text_config=GLM_5_NEXT
        # In the first layer scores of equal tokens tie, which does not change that layer's own output.
        | {"layer_types": ["indexed_attention"] * 4, "indexer_types": ["full", "full", "shared", "full"]}
        | {"index_kpool": 2, "hc_mult": 4},
        vision_config=GLM_5_NEXT_VISION,
    ),
    "glm-5-next-plain": lambda: transformers.Glm5NextConfig(
        text_config=GLM_5_NEXT | {"index_kpool": 1, "linear_lower_bound": None, "hc_mult": 2, "swiglu_limit": 0.2},
        vision_config=GLM_5_NEXT_VISION,
    ),
    "deepseek-v4": lambda: transformers.DeepseekV4Config(
        **DEEPSEEK_V4,
        rms_norm_eps=0.1,
        hc_eps=0.01,
        swiglu_limit=0.2,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "deepseek-v4-entries": lambda: (
        transformers.DeepseekV4Config(  # no layers with only a sliding window; fewer output groups than ranks
            **DEEPSEEK_V4
            | {"layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"] * 2, "num_hidden_layers": 4}
            | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32}}
            | {"o_groups": 1, "hc_mult": 2, "scoring_func": "sigmoid", "mlp_layer_types": ["moe", "hash_moe"] * 2},
        )
    ),
    "glm4-moe-lite": lambda: transformers.Glm4MoeLiteConfig(**MLA, mlp_layer_types=["sparse", "dense", "sparse"], rms_norm_eps=0.1),
    "gpt-bigcode": lambda: transformers.GPTBigCodeConfig(**GPT2),
    "gpt-neo": lambda: transformers.GPTNeoConfig(**GPT_NEO, attention_types=[[["global", "local"], 1]]),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**WITHOUT_KV_HEADS | BOS_AND_EOS, rotary_pct=0.5),
    "gpt-oss": lambda: transformers.GptOssConfig(**GPT_OSS, rope_parameters=YARN_WITH_MSCALE),
    "gpt-oss-full": lambda: transformers.GptOssConfig(
        **GPT_OSS, attention_bias=False, layer_types=["full_attention"] * 2, tie_word_embeddings=True
    ),
    "gpt2": lambda: transformers.GPT2Config(**GPT2, n_inner=88),
    "gptj": lambda: transformers.GPTJConfig(**GPT2, rotary_dim=4),
    "granite": lambda: transformers.GraniteConfig(**GRANITE, attention_bias=True),
    "granite-moe": lambda: transformers.GraniteMoeConfig(**GRANITE, num_local_experts=7, num_experts_per_tok=3),
    "granite-moe-shared": lambda: transformers.GraniteMoeSharedConfig(
        **GRANITE, num_local_experts=5, shared_intermediate_size=36, attention_bias=True
    ),
    "granite-4": lambda: transformers.GraniteMoeHybridConfig(
        **GRANITE4 | {"layer_types": ["attention"] * 3}, num_local_experts=0, position_embedding_type="rope", attention_bias=True
    ),
    "granite-4-h": lambda: transformers.GraniteMoeHybridConfig(**GRANITE4, num_local_experts=0, num_experts_per_tok=0),
    "granite-4-h-moe": lambda: transformers.GraniteMoeHybridConfig(
        **GRANITE4 | {"intermediate_size": 20, "mamba_d_conv": 3},
        mamba_n_groups=2,
        num_local_experts=7,
        num_experts_per_tok=3,
        position_embedding_type="rope",
        tie_word_embeddings=True,
    ),
    "granite-swa": lambda: transformers.GraniteSWAConfig(
        **GRANITE | BOS_AND_EOS, sliding_window=WINDOW, attention_bias=True, layer_rope_theta=[500.0, 100.0]
    ),
    "granite-swa-moe": lambda: transformers.GraniteMoeSWAConfig(
        **GRANITE | {"num_hidden_layers": 3, "intermediate_size": 20},
        num_local_experts=7,
        num_experts_per_tok=3,
        shared_intermediate_size=36,
        sliding_window=WINDOW,
        layer_rope_theta=[0, 100.0, 0],
    ),
    "helium": lambda: transformers.HeliumConfig(**SMALL, head_dim=8, attention_bias=True, mlp_bias=True),
    "hunyuan": lambda: transformers.HunYuanDenseV1Config(
        **SMALL, head_dim=16, rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 3.0, "factor": 1.0}
    ),
    "hunyuan-moe": lambda: transformers.HunYuanMoEV1Config(
        **SMALL, head_dim=16, num_experts=7, moe_topk=[3, 1], attention_bias=True
    ),
    "hy-4": lambda: transformers.HYV4Config(**HY_4, attention_bias=True),
    "hy-4-limit": lambda: transformers.HYV4Config(
        **HY_4 | {"indexer_types": ["full"] * 3, "mlp_layer_types": ["sparse"] * 3, "swiglu_limit": 0.2, "hc_mult": 2}
    ),
    "hyperclova": lambda: transformers.HyperCLOVAXConfig(**GRANITE, attention_bias=True),
    "hyperclova-plain": lambda: transformers.HyperCLOVAXConfig(
        **GRANITE | {"attention_multiplier": None}, use_post_norm=False, mlp_bias=True
    ),
    "jais2": lambda: transformers.Jais2Config(**SMALL),
    "kimi-linear": lambda: transformers.KimiLinearConfig(
        **KIMI, num_experts=8, num_expert_group=2, topk_group=1, layer_types=["linear_attention", "full_attention"] * 2
    ),
    "kolibri": lambda: transformers.Kolibri1Config(
        **{name: value for name, value in QWEN2_MOE.items() if name != "intermediate_size"},
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        norm_topk_prob=True,
    ),
    "laguna": lambda: transformers.LagunaConfig(
        **LAGUNA,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        num_attention_heads_per_layer=[8, 4, 8],
        moe_routed_scaling_factor=1.7,
        attention_bias=True,
        rope_parameters={
            "full_attention": YARN | {"partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
    ),
    "laguna-elements": lambda: transformers.LagunaConfig(
        **LAGUNA, gating="per-element", layer_types=["full_attention"] * 3, mlp_layer_types=["sparse", "dense", "sparse"]
    ),
    "lfm2": lambda: transformers.Lfm2Config(**LFM2, conv_bias=True, conv_L_cache=4, block_multiple_of=8),
    "lfm2-moe": lambda: transformers.Lfm2MoeConfig(
        **LFM2, moe_intermediate_size=20, num_dense_layers=1, num_experts=7, num_experts_per_tok=3, tie_word_embeddings=False
    ),
    "lfm3": lambda: transformers.Lfm3Config(
        **LFM3, layer_types=["conv", "full_attention", "sliding_attention", "conv"], attention_bias=True, conv_bias=True
    ),
    "lfm3-plain": lambda: transformers.Lfm3Config(
        **LFM3,
        layer_types=["full_attention", "conv", "full_attention", "conv"],
        use_sandwich_norm=False,
        use_attention_gate=False,
        tie_word_embeddings=False,
    ),
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "llama-3.1": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "llama-linear": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LINEAR),
    "llama-yarn": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=YARN_WITH_MSCALE),
    "llama-tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama-biases": lambda: transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama4": lambda: transformers.Llama4TextConfig(**LLAMA4, floor_scale=6, attn_scale=0.4, rope_parameters=LLAMA3),
    "llama4-steps": lambda: transformers.Llama4TextConfig(
        **LLAMA4 | {"num_experts_per_tok": 3, "intermediate_size": 32},
        interleave_moe_layer_step=2,
        use_qk_norm=False,
        attention_bias=True,
        no_rope_layers=[0, 1, 1, 0],
    ),
    "llama4-full": lambda: transformers.Llama4TextConfig(
        **LLAMA4 | {"attention_chunk_size": None}, moe_layers=[1], attn_temperature_tuning=False, tie_word_embeddings=True
    ),
    "mistral": lambda: transformers.MistralConfig(**SMALL, head_dim=8, sliding_window=WINDOW),
    "longcat": lambda: transformers.LongcatFlashConfig(
        **LONGCAT, zero_expert_num=3, attention_bias=True, rope_parameters=dict(YARN_WITH_MSCALE)
    ),
    "longcat-busy": lambda: transformers.LongcatFlashConfig(
        **LONGCAT | {"num_layers": 1}, zero_expert_num=0, routed_scaling_factor=1.5, rms_norm_eps=0.1, tie_word_embeddings=True
    ),
    "ministral": lambda: transformers.MinistralConfig(
        **SMALL, head_dim=16, sliding_window=WINDOW, layer_types=["full_attention", "sliding_attention"]
    ),
    "ministral3": lambda: transformers.Ministral3Config(**SMALL, head_dim=16, rope_parameters=dict(YARN_WITH_QUERY_SCALING)),
    "mistral4": lambda: transformers.Mistral4Config(**MLA, n_group=4, topk_group=2, rope_parameters=dict(YARN_WITH_QUERY_SCALING)),
    "hy-v3": lambda: transformers.HYV3Config(
        **{name: value for name, value in EXAONE_MOE.items() if "group" not in name}, num_shared_experts=2, attention_bias=True
    ),
    "mellum": lambda: transformers.MellumConfig(
        **{name: value for name, value in EXAONE_MOE.items() if "group" not in name},
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
    ),
    "mimo": lambda: transformers.MiMoV2FlashConfig(
        **GLM_MOE | {"num_key_value_heads": 2, "head_dim": 24},
        v_head_dim=16,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        attention_bias=True,
        n_group=2,
        topk_group=1,
    ),
    "minicpm3": lambda: transformers.MiniCPM3Config(
        **{name: value for name, value in MLA.items() if name not in ("v_head_dim",)} | {"num_key_value_heads": 8},
        scale_emb=2.5,
        scale_depth=0.7,
        dim_model_base=40,
        attention_bias=True,
    ),
    "minimax-m2": lambda: transformers.MiniMaxM2Config(
        **SMALL, head_dim=16, num_local_experts=9, num_experts_per_tok=3, rotary_dim=8
    ),
    "minimax-m3": lambda: transformers.MiniMaxM3VLTextConfig(**MINIMAX_3, index_local_blocks=2, tie_word_embeddings=True),
    "minimax-m3-plain": lambda: transformers.MiniMaxM3VLTextConfig(**MINIMAX_3 | {"layer_types": None, "mlp_layer_types": None}),
    "mistral-large4": lambda: transformers.MistralLarge4Config(
        text_config=MISTRAL_LARGE_4
        | {"attention_bias": True, "n_group": 4, "topk_group": 2, "rope_parameters": dict(YARN_WITH_MSCALE)}
        | {"no_rope_layers": [1, 0, 1, 0], "indexer_types": ["full", "full", "shared", "shared"], "rms_norm_eps": 0.1},
        vision_config=TINY_VISION,
    ),
    "mistral-large4-plain": lambda: transformers.MistralLarge4Config(
        text_config=MISTRAL_LARGE_4 | {"final_logit_softcapping": 5.0}, vision_config=TINY_VISION
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=5, num_experts_per_tok=2),
    "mpt": lambda: transformers.MptConfig(**MPT, attn_config={"clip_qkv": 0.7}),
    "nanochat": lambda: transformers.NanoChatConfig(**SMALL, final_logit_softcapping=9.0, attention_bias=True),
    "nemotron": lambda: transformers.NemotronConfig(**SMALL, head_dim=16, partial_rotary_factor=0.25),
    "nemotron-h": lambda: transformers.NemotronHConfig(**NEMOTRON | {"conv_kernel": 3}, hybrid_override_pattern="-ME*-M"),
    "nemotron-h-moe": lambda: transformers.NemotronHConfig(
        **NEMOTRON,
        n_group=4,
        topk_group=2,
        moe_latent_size=28,
        layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
    ),
    "olmo": lambda: transformers.OlmoConfig(**SMALL, attention_bias=True, clip_qkv=0.7),
    "olmoe": lambda: transformers.OlmoeConfig(**SMALL, num_experts=7, num_experts_per_tok=3, norm_topk_prob=True, clip_qkv=0.9),
    "olmo2": lambda: transformers.Olmo2Config(**SMALL, attention_bias=True, rope_parameters=LLAMA3),
    "olmo3": lambda: transformers.Olmo3Config(
        **SMALL | {"num_hidden_layers": 4},
        sliding_window=WINDOW,
        rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "olmo-hybrid": lambda: transformers.OlmoHybridConfig(
        **OLMO_HYBRID, layer_types=["linear_attention", "full_attention", "linear_attention"], attention_bias=True
    ),
    "olmo-hybrid-still": lambda: transformers.OlmoHybridConfig(
        **OLMO_HYBRID | {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_value_head_dim": 14},
        rope_parameters={"rope_type": "default", "rope_theta": None},
        linear_allow_neg_eigval=False,
        linear_conv_kernel_dim=3,
        rms_norm_eps=0.1,
    ),
    "opt": lambda: transformers.OPTConfig(**OPT),
    "phi": lambda: transformers.PhiConfig(**SMALL),
    "phi3": lambda: transformers.Phi3Config(**SMALL, pad_token_id=0, eos_token_id=1),
    "phi3-longrope": lambda: transformers.Phi3Config(
        **PHI4, original_max_position_embeddings=512, rope_parameters=LONGROPE | {"attention_factor": 1.2}
    ),
    "phi3-part": lambda: transformers.Phi3Config(**PHI4),
    "phi3-window": lambda: transformers.Phi3Config(**SMALL, sliding_window=WINDOW, pad_token_id=0, eos_token_id=1),
    "phimoe": lambda: transformers.PhimoeConfig(
        **SMALL, num_local_experts=5, router_jitter_noise=0.3, lm_head_bias=True, attention_bias=True
    ),
    "phimoe-longrope": lambda: transformers.PhimoeConfig(
        **SMALL | {"hidden_size": 96},
        num_local_experts=5,
        sliding_window=WINDOW,
        rope_parameters=LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": 512},
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(**QWEN2_MOE, norm_topk_prob=True),
    "qwen2-moe-window": lambda: transformers.Qwen2MoeConfig(
        **QWEN2_MOE, mlp_only_layers=[1], qkv_bias=False, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen2-window": lambda: transformers.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen2-yarn": lambda: transformers.Qwen2Config(**SMALL, rope_parameters=YARN),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**QWEN3_MOE, mlp_only_layers=[1], norm_topk_prob=True),
    "qwen3-moe-step": lambda: transformers.Qwen3MoeConfig(
        **QWEN3_MOE, decoder_sparse_step=2, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3-next": lambda: transformers.Qwen3NextConfig(**HYBRID_MOE, mlp_only_layers=[1], norm_topk_prob=False),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(
        **HYBRID | {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3},
        partial_rotary_factor=0.5,
        attention_bias=True,
    ),
    "qwen3.5-moe": lambda: transformers.Qwen3_5MoeTextConfig(
        **{name: value for name, value in HYBRID_MOE.items() if name != "intermediate_size"}, tie_word_embeddings=True
    ),
    "qwen4-exp": lambda: transformers.Qwen4ExpTextConfig(**QWEN_4, partial_rotary_factor=0.5),
    "qwen4-exp-plain": lambda: transformers.Qwen4ExpTextConfig(
        **QWEN_4
        | {"ple_layer_ids": None, "indexer_head_dim": 16, "indexer_compress_ratio": 2, "hc_count": 2, "eos_token_id": None}
        | {"norm_topk_prob": False, "tie_word_embeddings": True},
        attention_bias=True,
        output_gate_type="sigmoid",
    ),
    "seed-oss": lambda: transformers.SeedOssConfig(**SMALL, head_dim=16, attention_out_bias=True),
    "solar-open": lambda: transformers.SolarOpenConfig(
        **{name: value for name, value in GLM_MOE.items() if name != "intermediate_size"},
        attention_bias=True,
        n_group=2,
        topk_group=1,
    ),
    "stablelm": lambda: transformers.StableLmConfig(**SMALL, use_qkv_bias=True),
    "stablelm-parallel": lambda: transformers.StableLmConfig(
        **SMALL | {"hidden_size": 128}, use_parallel_residual=True, rope_parameters=YARN | {"partial_rotary_factor": 0.5}
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(**SMALL, **BOS_AND_EOS),
    "starcoder2-window": lambda: transformers.Starcoder2Config(**SMALL, sliding_window=WINDOW, use_bias=False, **BOS_AND_EOS),
    "smollm3": lambda: transformers.SmolLM3Config(**SMOLLM3),
    "smollm3-window": lambda: transformers.SmolLM3Config(
        **SMOLLM3 | {"no_rope_layers": [0, 1, 0], "rope_parameters": YARN_WITH_MSCALE},
        use_sliding_window=True,
        sliding_window=WINDOW,
        attention_bias=True,
        mlp_bias=True,
    ),
    "vaultgemma": lambda: transformers.VaultGemmaConfig(**GEMMA2),
    "youtu": lambda: transformers.YoutuConfig(
        **{name: value for name, value in MLA.items() if name in SMALL or "_dim" in name or "_rank" in name}
    ),
}
HYBRIDS = [
    name
    for name in FAMILIES
    if name.startswith(
        (
            "bamba",
            "falcon-h1",
            "glm-5-next",
            "granite-4-h",
            "kimi-linear",
            "lfm",
            "nemotron-h",
            "olmo-hybrid",
            "qwen3-next",
            "qwen3.5",
            "qwen4",
        )
    )
]
FOUR_TOKENS: dict[str, Any] = {
    "vocab_size": 4,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
ONE_KV_HEAD, TWO_KV_HEADS = {"num_key_value_heads": 1}, {"num_key_value_heads": 2}
FEW_HEADS: dict[str, Any] = SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2}
# Variants for single tests, not tested as families: a vocabulary as large as the demo model's (words), one of 4 tokens, so that
# answers can be enumerated (four), fewer positions than sequences have tokens (short), so few heads that Triton's interpreter
# computes them in reasonable time (few-heads), and fewer key heads than ranks (one-key, two-keys).
EXTRA_MODELS: dict[str, Callable[[], Any]] = {
    "dbrx-shares": lambda: transformers.DbrxConfig(
        **DBRX | {"d_model": 96},
        attn_config={"kv_n_heads": 2, "clip_qkv": 2, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 8, "moe_num_experts": 6, "moe_top_k": 2, "moe_normalize_expert_weights": None},
    ),
    "falcon-7b": lambda: transformers.FalconConfig(**FALCON, bias=True, tie_word_embeddings=False),
    "falcon-one-norm": lambda: transformers.FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "falcon-serial": lambda: transformers.FalconConfig(**FALCON, multi_query=False, parallel_attn=False),
    "gpt-bigcode-heads": lambda: transformers.GPTBigCodeConfig(**GPT2, multi_query=False, scale_attn_weights=False),
    "gpt-neox-serial": lambda: transformers.GPTNeoXConfig(
        **WITHOUT_KV_HEADS | BOS_AND_EOS,
        use_parallel_residual=False,
        attention_bias=False,
        tie_word_embeddings=True,
        hidden_act="relu",
    ),
    "opt-plain": lambda: transformers.OPTConfig(
        **OPT, layer_norm_elementwise_affine=False, enable_bias=False, activation_function="gelu", tie_word_embeddings=False
    ),
    "words": lambda: transformers.LlamaConfig(**SMALL | {"vocab_size": 2048, "num_hidden_layers": 1}),
    "words-wide": lambda: transformers.LlamaConfig(**SMALL | {"vocab_size": 2048, "intermediate_size": 192}),
    "four": lambda: transformers.LlamaConfig(**FOUR_TOKENS),
    "longrope": lambda: transformers.Phi3Config(
        **PHI4 | {"max_position_embeddings": 64, "num_hidden_layers": 1},
        original_max_position_embeddings=16,
        rope_parameters=dict(LONGROPE),
    ),
    "short": lambda: transformers.LlamaConfig(**SMALL | {"max_position_embeddings": 64}),
    "few-heads": lambda: transformers.LlamaConfig(**FEW_HEADS),
    "few-heads-bloom": lambda: transformers.BloomConfig(**BLOOM | {"n_head": 4}),
    "few-heads-deepseek": lambda: transformers.DeepseekV3Config(**MLA | FEW_HEADS, n_group=4, topk_group=2),
    "few-heads-kimi-linear": lambda: transformers.KimiLinearConfig(
        **KIMI | FEW_HEADS | {"num_hidden_layers": 4}, num_experts=8, layer_types=["linear_attention", "full_attention"] * 2
    ),
    "few-heads-laguna": lambda: transformers.LagunaConfig(
        **LAGUNA | FEW_HEADS,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads_per_layer=[4, 2],
    ),
    "few-heads-longcat": lambda: transformers.LongcatFlashConfig(
        **LONGCAT | {"num_layers": 1, "num_attention_heads": 4}, zero_expert_num=4
    ),
    "few-heads-minimax-m3": lambda: transformers.MiniMaxM3VLTextConfig(
        **MINIMAX_3
        | FEW_HEADS
        | {"layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"]}
        | {"index_n_heads": 2, "index_block_size": 4, "index_topk_blocks": 2},
    ),
    "two-keys-minimax-m3": lambda: transformers.MiniMaxM3VLTextConfig(
        **MINIMAX_3
        | {"num_key_value_heads": 2, "intermediate_size": 24, "shared_intermediate_size": 40}
        | {"index_n_heads": 2, "index_block_size": 4},
    ),
    "few-heads-mimo": lambda: transformers.MiMoV2FlashConfig(
        **GLM_MOE | FEW_HEADS | {"num_key_value_heads": 1, "head_dim": 24},
        v_head_dim=16,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"],
        mlp_layer_types=["sparse"] * 2,
    ),
    "few-heads-glm-5": lambda: transformers.GlmMoeDsaConfig(
        **MLA_WITH_INDEXER | FEW_HEADS | {"num_hidden_layers": 3}, indexer_types=["full", "shared", "full"]
    ),
    "few-heads-ax-k2": lambda: transformers.AXK2Config(**MLA_WITH_INDEXER | FEW_HEADS | BOS_AND_EOS, gated_norm_rank=6),
    "few-heads-glm-5-next": lambda: transformers.Glm5NextConfig(
        text_config=GLM_5_NEXT
        | FEW_HEADS
        | {
            "num_key_value_heads": 4,
            "layer_types": ["linear_attention", "indexed_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        vision_config=GLM_5_NEXT_VISION,
    ),
    "few-heads-deepseek-v4": lambda: transformers.DeepseekV4Config(
        **DEEPSEEK_V4 | {"num_attention_heads": 4, "o_groups": 2, "index_topk": 2, "sliding_window": 5}
    ),
    "few-heads-hy-4": lambda: transformers.HYV4Config(**HY_4 | FEW_HEADS | {"num_hidden_layers": 3}),
    "few-heads-mistral-large4": lambda: transformers.MistralLarge4Config(
        text_config=MISTRAL_LARGE_4
        | FEW_HEADS
        | {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}
        | {"indexer_types": ["full", "full", "shared", "shared"]},
        vision_config=TINY_VISION,
    ),
    "few-heads-olmo-hybrid": lambda: transformers.OlmoHybridConfig(
        **OLMO_HYBRID | FEW_HEADS, layer_types=["linear_attention", "full_attention"]
    ),
    "few-heads-granite-4-h": lambda: transformers.GraniteMoeHybridConfig(
        **GRANITE4 | FEW_HEADS | {"num_hidden_layers": 3, "mamba_n_heads": 4}, num_local_experts=5, num_experts_per_tok=2
    ),
    "few-heads-falcon-h1": lambda: transformers.FalconH1Config(**FALCON_H1 | FEW_HEADS | {"mamba_n_heads": 4}),
    "few-heads-lfm2-moe": lambda: transformers.Lfm2MoeConfig(
        **LFM2 | FEW_HEADS | {"num_hidden_layers": 4}, moe_intermediate_size=20, num_dense_layers=1, num_experts=5, conv_bias=True
    ),
    "few-heads-nemotron-h": lambda: transformers.NemotronHConfig(
        **NEMOTRON | {name: FEW_HEADS[name] for name in ("num_attention_heads", "num_key_value_heads")} | {"mamba_num_heads": 4},
        hybrid_override_pattern="ME*-",
    ),
    "few-heads-qwen3.5": lambda: transformers.Qwen3_5TextConfig(**HYBRID | FEW_HEADS),
    "few-heads-qwen4-exp": lambda: transformers.Qwen4ExpTextConfig(
        **QWEN_4
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "layer_types": QWEN_4["layer_types"][:2]}
        | {"hidden_size": 32, "indexer_n_heads": 8, "ple_layer_ids": [1], "num_experts": 4, "hc_count": 2}
        | {"linear_num_value_heads": 2},
        partial_rotary_factor=0.5,
    ),
    "few-heads-qwen3": lambda: transformers.Qwen3Config(**FEW_HEADS, head_dim=16),
    "few-heads-gemma2": lambda: transformers.Gemma2Config(**GEMMA2 | FEW_HEADS),
    "few-heads-gemma3n": lambda: transformers.Gemma3nTextConfig(
        **GEMMA3N | {"num_attention_heads": 4, "num_key_value_heads": 2},
        intermediate_size=88,
        activation_sparsity_pattern=[0.5] * 4,
    ),
    "gemma3n-wide": lambda: transformers.Gemma3nTextConfig(
        **GEMMA3N | {"hidden_size_per_layer_input": 64}, intermediate_size=[192, 128] * 2
    ),
    "few-heads-gemma4": lambda: transformers.Gemma4TextConfig(
        **GEMMA4 | FEW_HEADS | {"num_hidden_layers": 4}, attention_k_eq_v=True, num_global_key_value_heads=1
    ),
    "few-heads-gemma4-e": lambda: transformers.Gemma4TextConfig(**GEMMA4_E | FEW_HEADS | {"num_hidden_layers": 4}),
    "few-heads-gemma4-experts": lambda: transformers.Gemma4TextConfig(**GEMMA4_MOE | FEW_HEADS | {"num_hidden_layers": 4}),
    "few-heads-gpt-oss": lambda: transformers.GptOssConfig(**GPT_OSS | FEW_HEADS),
    "one-key-llama": lambda: transformers.LlamaConfig(**SMALL | ONE_KV_HEAD),
    "one-key-gpt-oss": lambda: transformers.GptOssConfig(**GPT_OSS | ONE_KV_HEAD),
    "two-keys-minimax-m2": lambda: transformers.MiniMaxM2Config(
        **SMALL | TWO_KV_HEADS, head_dim=16, num_local_experts=9, num_experts_per_tok=3, rotary_dim=8
    ),
    "two-keys-olmo2": lambda: transformers.Olmo2Config(**SMALL | TWO_KV_HEADS, attention_bias=True, rope_parameters=LLAMA3),
    "two-keys-phi3": lambda: transformers.Phi3Config(**SMALL | TWO_KV_HEADS, pad_token_id=0, eos_token_id=1),
    "two-keys-qwen2": lambda: transformers.Qwen2Config(**SMALL | TWO_KV_HEADS),
    "two-keys-qwen3-next": lambda: transformers.Qwen3NextConfig(
        **HYBRID_MOE | TWO_KV_HEADS | {"linear_num_key_heads": 4, "linear_num_value_heads": 4}, attention_bias=True
    ),
    "qwen3.5-wide": lambda: transformers.Qwen3_5TextConfig(
        **HYBRID | {"intermediate_size": 192, "linear_key_head_dim": 16, "linear_num_value_heads": 4, "linear_value_head_dim": 32}
    ),
    "lfm2-wide": lambda: transformers.Lfm2Config(**LFM2 | {"intermediate_size": 192}, block_auto_adjust_ff_dim=False),
    "granite-4-h-wide": lambda: transformers.GraniteMoeHybridConfig(
        **GRANITE4 | {"mamba_d_state": 16, "shared_intermediate_size": 192}, num_local_experts=0
    ),
    "gemma4-e-wide": lambda: transformers.Gemma4TextConfig(
        **GEMMA4_E | {"hidden_size_per_layer_input": 64, "intermediate_size": 192}, use_double_wide_mlp=True
    ),
    "mixtral-wide": lambda: transformers.MixtralConfig(**FEW_HEADS | {"intermediate_size": 192}, num_local_experts=4),
    "gpt-oss-blocks": lambda: transformers.GptOssConfig(**GPT_OSS | {"intermediate_size": 96}),
    "few-heads-llama4": lambda: transformers.Llama4TextConfig(
        **LLAMA4 | FEW_HEADS | {"num_hidden_layers": 2, "attention_chunk_size": 8, "floor_scale": 6}, no_rope_layers=[1, 0]
    ),
    "two-keys-llama4": lambda: transformers.Llama4TextConfig(**LLAMA4 | TWO_KV_HEADS, attention_bias=True),
    "llama4-wide": lambda: transformers.Llama4TextConfig(
        **LLAMA4 | {"num_hidden_layers": 3, "intermediate_size": 128, "intermediate_size_mlp": 192}, interleave_moe_layer_step=2
    ),
    "few-heads-mixtral": lambda: transformers.MixtralConfig(**FEW_HEADS, num_local_experts=5, num_experts_per_tok=2),
    "few-heads-olmo3": lambda: transformers.Olmo3Config(**FEW_HEADS, sliding_window=WINDOW),
    "few-heads-qwen2-moe": lambda: transformers.Qwen2MoeConfig(**QWEN2_MOE | FEW_HEADS),
    "few-heads-window": lambda: transformers.Qwen2Config(
        **FEW_HEADS, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
}
