"""Model families with layer norms, which subtract the mean, and relatives of theirs. A new family is a new entry in
`LAYER_NORM`."""

from collections.abc import Callable
from dataclasses import replace

from .fields import FULL, SLIDING, Config, expect, number, shown
from .parts import biased, cap, common, layer_kinds, layers_of, pattern_of, uniform_windows, windows_of
from .ropes import rotary_size, with_amplitude
from .shape import Shape, Unsupported
from .sparse_families import EXPERTS, PLAIN_MLP, by_kinds
from .traits import Mixture

# transformers' defaults, which some checkpoints rely on.
COHERE: Config = {"max_position_embeddings": 8192, "tie_word_embeddings": True, "rope_theta": 5e5}
COHERE2_MOE: Config = {
    "rope_theta": 1e4,
    "head_dim": 128,
    "first_k_dense_replace": 0,
    "prefix_dense_sliding_window_pattern": 1,
    "prefix_dense_intermediate_size": None,
    "rms_norm_eps": None,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 0,
    "norm_topk_prob": True,
    "expert_selection_fn": "softmax",
    "shared_expert_combination_strategy": "average",
}
PHIMOE: Config = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
}
STABLELM: Config = {"num_key_value_heads": 32, "max_position_embeddings": 4096}
STARCODER2: Config = {"num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True}
BEFORE_BOTH = ("input_layernorm", "", "", "")


def _common(config: Config, epsilon: str, activation: str = "silu") -> Shape:
    """epsilon: the field that has the norms'."""
    base = common(config | {"rms_norm_eps": number(config, epsilon, 1e-5, 1.0)}, "hidden_act", (activation,))
    return replace(base, layer_norms=True)


def _cohere(config: Config) -> Shape:
    """Command R: interleaved rotary embedding."""
    expect(config, use_qk_norm=False)
    base = biased(_common(COHERE | config, "layer_norm_eps"), config)
    return replace(
        base,
        # The first Command R says 8,192 where others say their context length, and 131,072 here, for which it was trained.
        max_positions=max(base.max_positions, int(number(config, "model_max_length", 1.0, 1 << 30))),
        norms=BEFORE_BOTH,
        parallel=True,
        rotary_neighbours=True,
        logit_divisor=1 / number(config, "logit_scale", 0.0625),
    )


def _cohere2(config: Config) -> Shape:
    """Command R7B and A: full attention in one layer of four, without a rotary embedding."""
    base = _cohere({"rope_theta": 1e4} | config)
    kinds = layer_kinds(config, base.layers, lambda layer: (layer + 1) % pattern_of(config, 4) > 0)
    still = layers_of(kinds, FULL)
    return replace(base, windows=windows_of(config, kinds), nope_layers=still)


def _olmo(config: Config) -> Shape:
    """OLMo, the first generation: Llama, but for its norms, whose epsilon config.json does not give, and clipped queries, keys and
    values."""
    base = biased(common(config | {"rms_norm_eps": 1e-5}), config)
    return replace(base, layer_norms=True, plain_norms=True, qkv_limit=cap(config, "clip_qkv", None))


def _phi(config: Config) -> Shape:
    """Phi 1 to 2: parallel attention and ungated MLP, biases everywhere. Half of each head rotates."""
    expect(config, qk_layernorm=False)
    base = _common(config, "layer_norm_eps", "gelu_new")
    return replace(
        base,
        norm_bias=True,
        parallel=True,
        norms=BEFORE_BOTH,
        last_norm="final_layernorm",
        rotary_size=rotary_size(config, base.head_size, 0.5),
        qkv_bias=True,
        output_bias=True,
        attention_parts=("", "", "dense"),
        mlp_bias=True,
        ungated="gelu",
        mlp_parts=("", "", "fc1", "fc2"),
        logit_bias=True,
    )


def _phimoe(config: Config) -> Shape:
    """Phi 3.5 MoE: two experts in every layer, by sparse mixers. With longrope transformers 5.24 uses the short factors whatever
    the context length; the decoder uses the long ones as for other models, as the model was trained."""
    given = PHIMOE | with_amplitude(config)
    if given["num_experts_per_tok"] != 2:
        raise Unsupported(
            f"num_experts_per_tok {given['num_experts_per_tok']} is not supported: for this family the decoder has 2, as "
            "transformers has"
        )
    base = biased(_common(given, "rms_norm_eps"), given)
    mixture = Mixture(
        experts=given["num_local_experts"],
        chosen=2,
        size=base.intermediate,
        normalized=False,
        near=2 * number(given, "router_jitter_noise", 0.01, 1.0),
        name="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )
    return replace(
        base,
        norm_bias=True,
        logit_bias=given.get("lm_head_bias", False),
        mixtures=(mixture,) * base.layers,
        windows=uniform_windows(given, base.layers),
    )


def _stablelm(config: Config) -> Shape:
    """StableLM: a quarter of each head rotates."""
    expect(config, qk_layernorm=False)
    base = _common(STABLELM | config, "layer_norm_eps")
    parallel = config.get("use_parallel_residual", False)
    return replace(
        base,
        norm_bias=True,
        parallel=parallel,
        norms=BEFORE_BOTH if parallel else base.norms,
        rotary_size=rotary_size(config, base.head_size, 0.25),
        qkv_bias=config.get("use_qkv_bias", False),
    )


def _starcoder2(config: Config) -> Shape:
    """StarCoder 2: all layers have a sliding window, if any."""
    base, bias = _common(STARCODER2 | config, "norm_epsilon", "gelu_pytorch_tanh"), config.get("use_bias", True)
    return replace(
        base,
        norm_bias=True,
        ungated="gelu",
        mlp_parts=("", "", "c_fc", "c_proj"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        windows=uniform_windows(config, base.layers),
    )


def _cohere2_moe(config: Config) -> Shape:
    """Command A+: parallel attention and experts, after dense first layers whose sliding windows follow a pattern of their own."""
    given = COHERE2_MOE | config
    if given.get("rope_scaling") and not given.get("rope_parameters"):
        raise Unsupported("rope_scaling alone is not supported: for this family transformers goes by rope_parameters")
    dense, before, behind = given["first_k_dense_replace"], given["prefix_dense_sliding_window_pattern"], pattern_of(given, 4)
    base = _cohere(given | {"intermediate_size": given["prefix_dense_intermediate_size"] or given["intermediate_size"]})
    kinds = layer_kinds(
        given, base.layers, lambda layer: (layer + 1) % before > 0 if layer < dense else (layer - dense + 1) % behind > 0
    )
    mlps = given.get("mlp_layer_types") or [PLAIN_MLP if layer < dense else EXPERTS for layer in range(base.layers)]
    mixtures = by_kinds(mlps, _averaged(given), base.layers)
    turned = [kind == SLIDING or (mixture is None and before == 1) for kind, mixture in zip(kinds, mixtures, strict=True)]
    return replace(
        base,
        layer_norms=given["rms_norm_eps"] is None,
        norm_epsilon=base.norm_epsilon if given["rms_norm_eps"] is None else number(given, "rms_norm_eps", most=1.0),
        windows=windows_of(given, kinds),
        nope_layers=frozenset(layer for layer, turns in enumerate(turned) if not turns),
        mixtures=mixtures,
    )


def _averaged(given: Config) -> Mixture:
    """Command A+'s experts, whose sum with the shared expert may be halved."""
    scores, how = given["expert_selection_fn"], given["shared_expert_combination_strategy"]
    if scores not in ("sigmoid", "softmax"):
        raise Unsupported(f"expert_selection_fn {shown(scores)} is not supported: the decoder has sigmoid and softmax")
    if how not in ("average", "sum"):
        raise Unsupported(f"shared_expert_combination_strategy {shown(how)} is not supported: the decoder has average and sum")
    shared = given["intermediate_size"] * given["num_shared_experts"]
    factor = 0.5 if shared and how == "average" else 1.0
    return Mixture(
        experts=given["num_experts"],
        chosen=given["num_experts_per_tok"],
        size=given["intermediate_size"],
        normalized=scores == "softmax" or given["norm_topk_prob"],
        scores=scores,
        factor=factor,
        shared=shared,
        shared_name="shared_experts",
        shared_gate="",
        shared_factor=factor,
    )


def _nemotron(config: Config) -> Shape:
    """Minitron and Nemotron Mini. Norm gains are stored minus 1, and half of each head rotates."""
    base = _squared(config | {"layer_norm_eps": number(config, "norm_eps", 1e-5, 1.0)}, 4096)
    return replace(base, centered_norms=True, rotary_size=rotary_size(config, base.head_size, 0.5))


def _jais2(config: Config) -> Shape:
    return _squared({"attention_bias": True, "mlp_bias": True} | config, 8192)


def _squared(config: Config, positions: int) -> Shape:
    """Ungated MLP with squared ReLU; positions: the default context length."""
    base = biased(_common({"max_position_embeddings": positions} | config, "layer_norm_eps", "relu2"), config)
    return replace(base, norm_bias=True, ungated="relu2", mlp_bias=config.get("mlp_bias", False))


LAYER_NORM: dict[str, Callable[[Config], Shape]] = {
    "CohereForCausalLM": _cohere,
    "Cohere2ForCausalLM": _cohere2,
    "Cohere2MoeForCausalLM": _cohere2_moe,
    "Jais2ForCausalLM": _jais2,
    "NemotronForCausalLM": _nemotron,
    "OlmoForCausalLM": _olmo,
    "PhiForCausalLM": _phi,
    "PhimoeForCausalLM": _phimoe,
    "StableLmForCausalLM": _stablelm,
    "Starcoder2ForCausalLM": _starcoder2,
}
