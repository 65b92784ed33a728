"""Which architectures there are: how a Hugging Face config.json becomes a `Shape`. Data for the one decoder.

Knows no tensor and imports no torch, so that the launcher can plan with it. A new family is a new entry in `FAMILIES`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .fields import AGAIN, FULL, SLIDING, Config, check, number, shown
from .quantization import quantization
from .ropes import rope, rope_of, ropes_by_kind, rotary_size
from .shape import Mixture, Quantization, Shape, Unsupported

WITH_IMAGES = ("Gemma3ForConditionalGeneration",)  # whose text is described by itself
BESIDE_TEXT = ("tie_word_embeddings", "quantization_config")  # and these fields are beside that
# transformers' defaults, which some checkpoints rely on.
MISTRAL: Config = {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
GEMMA: Config = {"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True, "max_position_embeddings": 8192}
AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
AROUND_GLM = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
BEHIND = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
GLM: Config = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1.5625e-7}
OLMO: Config = {"rms_norm_eps": 1e-5}
OLMO3_THETA = 5e5
PHI3: Config = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
GPT_OSS: Config = {
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 7.0,
    "rope_theta": 150_000.0,
}
GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
STEEP = 1.702  # of gpt-oss's gates
SMOLLM3: Config = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "rope_theta": 2e6,
}
GEMMA3: Config = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "max_position_embeddings": 131_072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def shape(config: Config) -> Shape:
    """The shape of the model that `config` (a parsed config.json) describes.

    Raises Unsupported for an architecture, an activation or a rotary embedding that the decoder doesn't have, and for a
    field that is missing.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Unsupported(f"config.json says architectures {names!r}, a list of names is needed: download the model again")
    for name in names:
        if name in FAMILIES:
            try:
                own = _text(config) if name in WITH_IMAGES else config
                check(own, name)
                return _sound(FAMILIES[name](own), own.get("layer_types"))
            except KeyError as error:
                raise Unsupported(f"config.json of a {name} lacks {error}: is it complete?") from None
    asked = ", ".join(names) or "none named"
    raise Unsupported(f"architecture {asked} is not supported: this version serves {', '.join(sorted(FAMILIES))}")


def _text(config: Config) -> Config:
    """Of a model that has images as well, what is about text: all that is served of it."""
    own = config["text_config"]
    if not isinstance(own, dict):
        raise Unsupported(f"config.json says text_config {shown(own)}, an object is needed: {AGAIN}")
    return {name: config[name] for name in BESIDE_TEXT if name in config} | own | {"architectures": config["architectures"]}


def _sound(found: Shape, kinds: list[Any] | None) -> Shape:
    """The same. Raises Unsupported if its numbers contradict each other, or the `kinds` of layers that config.json names."""
    if found.heads % found.kv_heads:
        raise Unsupported(
            f"config.json says {found.heads} attention heads and {found.kv_heads} key/value heads, of which the first must be a "
            f"multiple: {AGAIN}"
        )
    unknown = set(map(str, kinds or ())) - {FULL, SLIDING}
    if unknown:
        raise Unsupported(f"layer_types {', '.join(sorted(unknown))} are not supported: the decoder has full and sliding attention")
    for layer, (kind, window) in enumerate(zip(kinds or (), found.windows, strict=False)):
        if (kind == SLIDING) != (window > 0):
            raise Unsupported(
                f"config.json says layer_types {kind!r} for layer {layer}, and by its other fields that layer's window is "
                f"{window or 'none'} (see sliding_window, use_sliding_window): {AGAIN}"
            )
    return found


def _common(config: Config, activation: str = "hidden_act", activations: tuple[str, ...] = ("silu",)) -> Shape:
    """What is the same for all. activation: the field that names it, one of `activations`, of which the first is assumed."""
    named = config.get(activation) or activations[0]
    if named not in activations:
        raise Unsupported(f"{activation} {shown(named)} is not supported: for this family the decoder has {activations[0]}")
    heads, hidden, layers = config["num_attention_heads"], config["hidden_size"], config["num_hidden_layers"]
    turning = rope(config)
    head_size = config.get("head_dim") or hidden // heads
    if head_size < 2 or head_size % 2:
        raise Unsupported(f"config.json means heads of {head_size} numbers, an even number is needed: {AGAIN}")
    return Shape(
        architecture=config["architectures"][0],
        vocabulary=config["vocab_size"],
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=head_size,
        attention_scale=head_size**-0.5,
        intermediate=config["intermediate_size"],
        norm_epsilon=number(config, "rms_norm_eps", 1e-6, 1.0),
        max_positions=max(config.get("max_position_embeddings", 2048), turning.reach),
        tied=config.get("tie_word_embeddings", False),
        rope=turning,
        windows=(0,) * layers,
        quantization=quantization(config),
    )


def _llama(config: Config) -> Shape:
    bias = config.get("attention_bias", False)
    return replace(_common(config), qkv_bias=bias, output_bias=bias, mlp_bias=config.get("mlp_bias", False))


def _mistral(config: Config) -> Shape:
    base = _common(MISTRAL | config)
    return replace(base, windows=(config.get("sliding_window", 4096) or 0,) * base.layers)


def _qwen(config: Config) -> Shape:
    """Both generations slide in the layers from `max_window_layers` on, if at all."""
    base = _common({"num_key_value_heads": 32, "max_position_embeddings": 32_768} | config)
    window = config.get("sliding_window", 4096)  # transformers' own defaults, here and below
    if not config.get("use_sliding_window") or not window:
        return base
    first = config.get("max_window_layers", 28)
    if first is None:
        raise Unsupported(f"config.json says use_sliding_window, and max_window_layers null: {AGAIN}")
    kinds = config.get("layer_types") or [SLIDING if layer >= first else FULL for layer in range(base.layers)]
    return replace(base, windows=tuple(window if kind == SLIDING else 0 for kind in kinds))


def _qwen2(config: Config) -> Shape:
    return replace(_qwen(config), qkv_bias=True)


def _qwen3(config: Config) -> Shape:
    bias = config.get("attention_bias", False)
    return replace(_qwen({"head_dim": 128, **config}), qk_norm=True, qkv_bias=bias, output_bias=bias)


def _smollm3(config: Config) -> Shape:
    """Llama, but that some layers have no rotary embedding, and that those may slide."""
    base = _llama(SMOLLM3 | config)
    turning = config.get("no_rope_layers")  # 1 where a layer has one
    if turning is None:
        interval = config.get("no_rope_layer_interval", 4)
        turning = [int((layer + 1) % interval > 0) for layer in range(base.layers)]
    if not isinstance(turning, list) or len(turning) < base.layers or not all(type(one) is int for one in turning):
        raise Unsupported(
            f"config.json says no_rope_layers {shown(turning)}, 0 or 1 for each of num_hidden_layers is needed: {AGAIN}"
        )
    still = frozenset(layer for layer in range(base.layers) if not turning[layer])
    kinds = config.get("layer_types") or [SLIDING if layer in still else FULL for layer in range(base.layers)]
    window = (config.get("use_sliding_window") and config.get("sliding_window")) or 0
    return replace(base, unturned=still, windows=tuple(window if kind == SLIDING else 0 for kind in kinds))


def _granite(config: Config) -> Shape:
    """Llama, scaled (Yang et al. 2022, arXiv:2203.03466)."""
    names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    attention, embedding, residual, logits = (number(config, name, 1.0) for name in names)
    return replace(
        _llama(config), attention_scale=attention, embedding_factor=embedding, residual_factor=residual, logit_divisor=logits
    )


def _phi3(config: Config) -> Shape:
    """Also Phi 4."""
    base = _common(PHI3 | config)
    turned = rotary_size(config, base.head_size)
    for factors in (base.rope.short, base.rope.long):
        if len(factors) not in (0, turned // 2):
            raise Unsupported(f"config.json says {len(factors)} factors of longrope, {turned // 2} are needed: {AGAIN}")
    return replace(
        base,
        joined=("qkv_proj", "gate_up_proj"),
        windows=(config.get("sliding_window") or 0,) * base.layers,
        rotary_size=turned,
    )


def _glm(config: Config) -> Shape:
    """GLM 4 of 2024. Half of each head turns, neighbours together."""
    base = _common(GLM | config)
    return replace(
        base,
        qkv_bias=config.get("attention_bias", True),
        joined=("gate_up_proj",),
        rotary_size=rotary_size(config, base.head_size, 0.5),
        rotary_neighbours=True,
    )


def _glm4(config: Config) -> Shape:
    """GLM 4 of 2025."""
    return replace(_glm(config), norms=AROUND_GLM)


def _mixtral(config: Config) -> Shape:
    """Experts in every layer."""
    base = _common(MISTRAL | {"rms_norm_eps": 1e-5, "rope_theta": 1e6} | config)
    mixture = _chosen(
        Mixture(
            experts=config.get("num_local_experts", 8),
            chosen=config.get("num_experts_per_tok", 2),
            size=base.intermediate,
            normalized=True,
            name="block_sparse_moe",
            names=("w1", "w3", "w2"),
        )
    )
    return replace(base, mixtures=(mixture,) * base.layers, windows=(config.get("sliding_window") or 0,) * base.layers)


def _qwen3_moe(config: Config) -> Shape:
    """Experts in every layer, or in some. All layers slide, if any."""
    base = _qwen3({"num_key_value_heads": 4} | config | {"max_window_layers": 0})
    experts: int = config.get("num_experts") or config.get("num_local_experts", 128)
    mixture = _chosen(
        Mixture(
            experts=experts,
            chosen=config.get("num_experts_per_tok", 8),
            size=config.get("moe_intermediate_size", 768),
            normalized=config.get("norm_topk_prob", False),
        )
    )
    return _mixed(base, config, mixture)


def _qwen2_moe(config: Config) -> Shape:
    """One expert of each layer is for all tokens. Every other one of the first layers slides, if any."""
    base = _common({"num_key_value_heads": 16, "max_position_embeddings": 32_768} | config)
    mixture = _chosen(
        Mixture(
            experts=config.get("num_experts", 60),
            chosen=config.get("num_experts_per_tok", 4),
            size=config.get("moe_intermediate_size", 1408),
            normalized=config.get("norm_topk_prob", False),
            shared=config.get("shared_expert_intermediate_size", 5632),
        )
    )
    last = config.get("max_window_layers", 28)
    if last is None:
        raise Unsupported(f"config.json says max_window_layers null, a number of layers is needed: {AGAIN}")
    slides = config.get("use_sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if slides and layer < last and layer % 2 == 0 else FULL for layer in range(base.layers)]
    windows = _windows(config if slides else {"sliding_window": 0}, kinds)
    return replace(_mixed(base, config, mixture), qkv_bias=config.get("qkv_bias", True), windows=windows)


def _mixed(base: Shape, config: Config, mixture: Mixture) -> Shape:
    """The same, with experts in every layer, or in some."""
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise Unsupported(f"config.json says mlp_only_layers {shown(dense)}, a list of numbers is needed: {AGAIN}")
    sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(base.layers)]
    return replace(base, mixtures=tuple(mixture if each else None for each in sparse))


def _gpt_oss(config: Config) -> Shape:
    """OpenAI 2025, arXiv:2508.10925. Every other layer slides; heads have sinks, experts biases, limits, and 4 bits as stored."""
    given = GPT_OSS | config
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        given["rope_parameters"] = GPT_OSS_ROPE
    stored, few = config.get("quantization_config"), None
    if isinstance(stored, dict) and stored.get("quant_method") == "mxfp4":
        del given["quantization_config"]
        few = Quantization(method="mxfp4", kind="fp4", group=32)
    bias = given.get("attention_bias", True)
    base = _common(given)
    alpha = number(given, "swiglu_alpha", STEEP)
    if alpha != STEEP:
        raise Unsupported(f"config.json says swiglu_alpha {alpha:g}, which is not supported: the decoder has {STEEP}")
    mixture = _chosen(
        Mixture(
            experts=given["num_local_experts"],
            chosen=given["num_experts_per_tok"],
            size=base.intermediate,
            normalized=True,
            quantization=few,
            biased=True,
            limit=number(given, "swiglu_limit"),
            interleaved=True,
            router="router",
        )
    )
    kinds = given.get("layer_types") or [FULL if layer % 2 else SLIDING for layer in range(base.layers)]
    windows, mixtures = _windows(given, kinds), (mixture,) * base.layers
    return replace(base, windows=windows, mixtures=mixtures, sinks=True, qkv_bias=bias, output_bias=bias)


def _chosen(mixture: Mixture) -> Mixture:
    """The same. Raises Unsupported if tokens are to choose more experts than there are."""
    if mixture.chosen > mixture.experts:
        raise Unsupported(f"config.json says num_experts_per_tok {mixture.chosen}, of {mixture.experts} experts: {AGAIN}")
    return mixture


def _gemma(config: Config, activation: str = "hidden_act") -> Shape:
    """The first generation, which said "gelu" and meant its approximation, and what all of them have in common."""
    if config.get("use_bidirectional_attention"):
        raise Unsupported("use_bidirectional_attention is not supported: the decoder's tokens see those before them")
    approximated = ("gelu_pytorch_tanh", "gelu") if activation == "hidden_act" else ("gelu_pytorch_tanh",)
    bias = config.get("attention_bias", False)
    base = _common(GEMMA | config, activation, approximated)
    factor = base.hidden**0.5
    return replace(base, gelu=True, centered_norms=True, embedding_factor=factor, qkv_bias=bias, output_bias=bias)


def _gemma2(config: Config) -> Shape:
    """Every other layer slides."""
    base = _gemma({"num_attention_heads": 8, "num_key_value_heads": 4} | config, "hidden_activation")
    kinds = config.get("layer_types") or [FULL if layer % 2 else SLIDING for layer in range(base.layers)]
    return replace(
        base,
        norms=AROUND,
        windows=_windows(config, kinds),
        attention_scale=number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=_cap(config, "attn_logit_softcapping", 50.0),
        final_softcap=_cap(config, "final_logit_softcapping", 30.0),
    )


def _windows(config: Config, kinds: list[Any]) -> tuple[int, ...]:
    """Of the layers of these kinds. Raises Unsupported if some slide, and how far is not said."""
    window = config.get("sliding_window", 4096) or 0
    if SLIDING in kinds and not window:
        raise Unsupported(
            f"config.json says sliding_window {shown(config['sliding_window'])}, and there are layers that slide: {AGAIN}"
        )
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def _cap(config: Config, name: str, default: float) -> float:
    """null: there is none."""
    value = config.get(name, default)
    return 0.0 if value is None else number({name: value}, name)


def _gemma3(config: Config) -> Shape:
    """One layer in six sees all, and has another rotary embedding than those that slide."""
    full, local = ropes_by_kind(config, 1e6, 1e4)
    pattern, layers = config.get("sliding_window_pattern", 6), config.get("num_hidden_layers", 26)
    if type(pattern) is not int or pattern < 1:
        raise Unsupported(f"config.json says sliding_window_pattern {shown(pattern)}, an integer from 1 on is needed: {AGAIN}")
    kinds = config.get("layer_types") or [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]
    base = _gemma2(GEMMA3 | config | {"layer_types": kinds, "rope_parameters": full, "rope_scaling": None})
    # transformers reads attn_logit_softcapping, and leaves it at that.
    local_rope = rope_of(GEMMA3 | config | {"rope_parameters": local}, "rope_parameters")
    return replace(base, softcap=0.0, qk_norm=True, local_rope=local_rope)


def _olmo2(config: Config) -> Shape:
    """Norms behind attention and MLP alone, and of all queries, and all keys, of a token together."""
    bias = config.get("attention_bias", False)
    base = _common(OLMO | config)
    return replace(base, qkv_bias=bias, output_bias=bias, joint_qk_norm=True, norms=BEHIND)


def _olmo3(config: Config) -> Shape:
    """One layer in four sees all; only its rotary embedding may be scaled. Those that slide don't go by the model's theta."""
    theta = number(config, "rope_theta", OLMO3_THETA)
    full, local = ropes_by_kind({**config, "rope_theta": theta, "rope_local_base_freq": OLMO3_THETA}, theta, OLMO3_THETA)
    base = _olmo2(config | {"rope_parameters": full, "rope_scaling": None})
    local_rope = rope_of(OLMO | config | {"rope_parameters": local}, "rope_parameters")
    kinds = config.get("layer_types") or [SLIDING if (layer + 1) % 4 else FULL for layer in range(base.layers)]
    return replace(base, windows=_windows(config, kinds), local_rope=local_rope if local_rope != base.rope else None)


FAMILIES: dict[str, Callable[[Config], Shape]] = {
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
    "GlmForCausalLM": _glm,
    "Glm4ForCausalLM": _glm4,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteForCausalLM": _granite,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo3,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "SmolLM3ForCausalLM": _smollm3,
}
