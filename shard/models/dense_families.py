"""Model families with one dense MLP in each layer: config.json to `Shape`. A new family is a new entry in `DENSE`."""

from collections.abc import Callable
from dataclasses import replace

from .fields import AGAIN, FULL, SLIDING, Config, expect, number, shown
from .parts import biased, cap, common, layer_kinds, layers_of, nope_layers, pattern_of, uniform_windows, windows_of
from .ropes import MISTRAL_YARN, rope, ropes_by_kind, rotary_size, stretched, with_only_rope, with_rope
from .shape import Shape, Unsupported

# transformers' defaults, which some checkpoints rely on.
APERTUS: Config = {"max_position_embeddings": 65_536, "rms_norm_eps": 1e-5, "rope_theta": 12e6}
APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
APERTUS_NORMS = ("attention_layernorm", "", "feedforward_layernorm", "")
ARCEE: Config = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
MISTRAL: Config = {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
MINISTRAL_3: Config = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5}
MINISTRAL_3_ROPE = MISTRAL_YARN | {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384}
GEMMA: Config = {"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True, "max_position_embeddings": 8192}
AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
AROUND_GLM = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
BEHIND = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
HELIUM: Config = {
    "num_key_value_heads": 20,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
    "rope_theta": 1e5,
}
CWM: Config = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 8192,
    "rope_theta": 1e6,
}
CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GLM: Config = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1.5625e-7}
HUNYUAN: Config = {"rms_norm_eps": 1e-5}
INTERNLM3: Config = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5}
BIASES = (("qkv_bias", "attention_bias"), ("bias", "mlp_bias"))  # InternLM3's names, and transformers'
HYPERCLOVA_NORMS = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
GRANITE_SWA: Config = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "sliding_window": 128,
}
IQUEST: Config = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
OLMO: Config = {"rms_norm_eps": 1e-5}
OLMO3_THETA = 5e5
ERNIE: Config = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
SEED_OSS: Config = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288, "attention_bias": True}
PHI3: Config = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
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


def llama(config: Config) -> Shape:
    return replace(biased(common(config), config), mlp_bias=config.get("mlp_bias", False))


def _apertus(config: Config) -> Shape:
    """Apertus: Llama with norms of query and key heads, and an ungated MLP: xIELU with parameters of each layer."""
    base = biased(common(with_rope(APERTUS | config, APERTUS_ROPE), activations=("xielu",)), config)
    return replace(base, qk_norm=True, norms=APERTUS_NORMS, ungated="xielu")


def _arcee(config: Config) -> Shape:
    """Arcee: Llama with an ungated MLP."""
    base = biased(common(ARCEE | config, activations=("relu2",)), config)
    return replace(base, ungated="relu2", mlp_bias=config.get("mlp_bias", False))


def _mistral(config: Config) -> Shape:
    base = common(MISTRAL | config)
    return replace(base, windows=uniform_windows(config, base.layers, 4096))


def _ministral(config: Config) -> Shape:
    """Ministral of 2024: a sliding window in all layers, if any, except those that config.json names."""
    base, window = common(MISTRAL | config), config.get("sliding_window", 4096)
    return replace(base, windows=windows_of(config, layer_kinds(config, base.layers, lambda layer: window is not None)))


def _ministral_3(config: Config) -> Shape:
    """Ministral 3: queries are scaled by their position."""
    given = with_rope(MINISTRAL_3 | config, MINISTRAL_3_ROPE)
    base = common(given)
    return replace(base, windows=uniform_windows(given, base.layers))


def qwen(config: Config) -> Shape:
    """Qwen 2 and 3: layers from `max_window_layers` on have a sliding window, if any."""
    base = common({"num_key_value_heads": 32, "max_position_embeddings": 32_768} | config)
    if not config.get("use_sliding_window") or not config.get("sliding_window", 4096):  # transformers' own defaults, here and below
        return base
    first = config.get("max_window_layers", 28)
    if first is None:
        raise Unsupported(f"config.json says use_sliding_window, and max_window_layers null: {AGAIN}")
    return replace(base, windows=windows_of(config, layer_kinds(config, base.layers, lambda layer: layer >= first)))


def _qwen2(config: Config) -> Shape:
    return replace(qwen(config), qkv_bias=True)


def qwen3(config: Config) -> Shape:
    return replace(biased(qwen({"head_dim": 128, **config}), config), qk_norm=True)


def _smollm3(config: Config) -> Shape:
    """SmolLM 3: Llama, but some layers have no rotary embedding, and these may have a sliding window."""
    base = llama(SMOLLM3 | config)
    still = nope_layers(config, base.layers, config.get("no_rope_layers"))
    kinds = layer_kinds(config, base.layers, lambda layer: layer in still)
    window = (config.get("use_sliding_window") and config.get("sliding_window")) or 0
    return replace(base, nope_layers=still, windows=tuple(window if kind == SLIDING else 0 for kind in kinds))


def _cwm(config: Config) -> Shape:
    """Meta's Code World Model: Llama with a sliding window, and full attention in one layer of four, beginning with the first."""
    given = with_rope(CWM | config, CWM_ROPE)
    base = replace(common(given), mlp_bias=given.get("mlp_bias", False))
    return replace(base, windows=windows_of(given, layer_kinds(given, base.layers, lambda layer: layer % 4 > 0)))


def _helium(config: Config) -> Shape:
    """Helium: Llama with interleaved rotary embedding, and no bias in attention's output projection."""
    return replace(llama(HELIUM | config), output_bias=False, rotary_neighbours=True)


def hunyuan(config: Config) -> Shape:
    """HunYuan: Llama with norms of query and key heads after the rotary embedding."""
    expect(config, use_qk_norm=True, use_cla=False)
    base = _at_length(biased(common(HUNYUAN | config), config))
    return replace(
        base,
        rope=stretched(config, base.rope, base.head_size),
        qk_norm=True,
        qk_norm_behind=True,
        attention_parts=("query_layernorm", "key_layernorm", "o_proj"),
    )


def _internlm3(config: Config) -> Shape:
    """InternLM 3: Llama with one switch for all biases, which has two names each for attention and MLP."""
    given = INTERNLM3 | config
    attention, mlp = (given.get(name, given.get(other, False)) for name, other in BIASES)
    if attention != mlp:
        raise Unsupported(f"config.json says qkv_bias {shown(attention)} and bias {shown(mlp)}: the decoder has them alike here")
    return llama(given | {"attention_bias": attention, "mlp_bias": mlp})


def _iquest(config: Config) -> Shape:
    """IQuest Coder: Llama."""
    expect(config, clip_qkv=None, use_sliding_window=False)
    return llama(IQUEST | config)


def _nanochat(config: Config) -> Shape:
    """NanoChat: norms without gains, one of them before all layers, and those of heads after the rotary embedding, where the order
    does not matter; squared ReLU without gates. The rotation is in the opposite direction."""
    base = _at_length(biased(common(config, activations=("relu2",)), config))
    return replace(
        base,
        plain_norms=True,
        first_norm="norm",
        qk_norm=True,
        rotary_reversed=True,
        ungated="relu2",
        mlp_parts=("", "", "fc1", "fc2"),
        final_softcap=cap(config, "final_logit_softcapping", 15.0),
    )


def _at_length(base: Shape) -> Shape:
    """The same shape. Raises Unsupported if the rotary embedding scales lengths, which a norm after it would undo."""
    if base.rope.amplitude != 1:
        raise Unsupported(
            f"rotary scaling {base.rope.kind!r} is not supported: for this family the decoder has none that changes lengths"
        )
    return base


def granite(config: Config) -> Shape:
    """Granite: Llama with scaling factors (muP: Yang et al. 2022, arXiv:2203.03466)."""
    names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    attention, embedding, residual, logits = (number(config, name, 1.0) for name in names)
    return replace(
        llama(config), attention_scale=attention, embedding_factor=embedding, residual_factor=residual, logit_divisor=logits
    )


def _hyperclova(config: Config) -> Shape:
    """HyperCLOVA X: Granite with norms after attention and MLP, too. Logits are multiplied, where Granite's are divided."""
    given = config | {"logits_scaling": 1 / number(config, "logits_scaling", 1.0)}
    base = granite(given)
    scale = number(config, "attention_multiplier", base.head_size**-0.5)
    return replace(base, attention_scale=scale, norms=HYPERCLOVA_NORMS if config.get("use_post_norm", True) else base.norms)


def _granite_swa(config: Config) -> Shape:
    """Granite with a sliding window, full attention in one layer of four, beginning with the first, and attention sinks."""
    given = GRANITE_SWA | config
    return with_thetas(granite(given), given)


def with_thetas(base: Shape, given: Config) -> Shape:
    """The same with sinks and windows, and a theta for each layer, or 0: no rotary embedding."""
    kinds = layer_kinds(given, base.layers, lambda layer: layer % 4 > 0)
    thetas = given.get("layer_rope_theta")
    thetas = [base.rope.theta] * base.layers if thetas is None else thetas
    if not isinstance(thetas, list) or len(thetas) != base.layers or not all(type(theta) in (int, float) for theta in thetas):
        raise Unsupported(f"config.json says layer_rope_theta {shown(thetas)}, a number for each layer is needed: {AGAIN}")
    still = frozenset(layer for layer, theta in enumerate(thetas) if not theta)
    turned = {kind: {thetas[layer] for layer in range(base.layers) if kinds[layer] == kind} - {0} for kind in (FULL, SLIDING)}
    if max(map(len, turned.values())) > 1:
        raise Unsupported(
            f"layer_rope_theta {shown(thetas)} is not supported: the decoder has one for {FULL}, and one for {SLIDING}"
        )
    full, local = (
        replace(base.rope, theta=number({"layer_rope_theta": theta}, "layer_rope_theta")) if theta else None
        for theta in (next(iter(turned[kind]), 0) for kind in (FULL, SLIDING))
    )
    found = replace(base, sinks="sinks", windows=windows_of(given, kinds), nope_layers=still, rope=full or local or base.rope)
    return replace(found, local_rope=local if full and local != full else None)


def _phi3(config: Config) -> Shape:
    """Phi 3 and 4."""
    base = common(PHI3 | config)
    return replace(
        base,
        joined=("qkv_proj", "gate_up_proj"),
        windows=uniform_windows(config, base.layers),
        rotary_size=rotary_size(config, base.head_size),
    )


def _glm(config: Config) -> Shape:
    """GLM 4 of 2024: half of each head rotates, interleaved."""
    base = common(GLM | config)
    return replace(
        base,
        qkv_bias=config.get("attention_bias", True),
        joined=("gate_up_proj",),
        rotary_size=rotary_size(config, base.head_size, 0.5),
        rotary_neighbours=True,
    )


def _glm4(config: Config) -> Shape:
    """GLM 4 of 2025, with norms after attention and MLP, too."""
    return replace(_glm(config), norms=AROUND_GLM)


def gemma(config: Config, activation: str = "hidden_act") -> Shape:
    """Gemma: the first generation, which said "gelu" and meant its tanh approximation, and what all generations have in common."""
    if config.get("use_bidirectional_attention"):
        raise Unsupported("use_bidirectional_attention is not supported: the decoder's tokens see those before them")
    approximated = ("gelu_pytorch_tanh", "gelu") if activation == "hidden_act" else ("gelu_pytorch_tanh",)
    base = biased(common(GEMMA | config, activation, approximated), config)
    return replace(base, gelu=True, centered_norms=True, embedding_factor=base.hidden**0.5)


def _gemma2(config: Config) -> Shape:
    """Gemma 2: a sliding window in every other layer."""
    base = gemma({"num_attention_heads": 8, "num_key_value_heads": 4} | config, "hidden_activation")
    return replace(
        base,
        norms=AROUND,
        windows=windows_of(config, layer_kinds(config, base.layers, lambda layer: layer % 2 == 0)),
        attention_scale=number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=cap(config, "attn_logit_softcapping", 50.0),
        final_softcap=cap(config, "final_logit_softcapping", 30.0),
    )


def _vault_gemma(config: Config) -> Shape:
    """VaultGemma: Gemma 2 with norms before attention and MLP alone."""
    return replace(_gemma2(config), norms=("input_layernorm", "", "pre_feedforward_layernorm", ""))


def _gemma3(config: Config) -> Shape:
    """Gemma 3: full attention in one layer of six, with another rotary embedding than in layers with a sliding window."""
    full, local = ropes_by_kind(config, 1e6, 1e4)
    kinds = layer_kinds(config, config.get("num_hidden_layers", 26), lambda layer: (layer + 1) % pattern_of(config, 6) > 0)
    base = _gemma2(with_only_rope(GEMMA3 | config | {"layer_types": kinds}, full))
    # transformers reads attn_logit_softcapping and does not use it.
    return replace(base, softcap=0.0, qk_norm=True, local_rope=rope(with_only_rope(GEMMA3 | config, local)))


def _olmo2(config: Config) -> Shape:
    """OLMo 2: norms after attention and MLP alone, and one norm over all queries of a token, and over all its keys."""
    return replace(biased(common(OLMO | config), config), joint_qk_norm=True, norms=BEHIND)


def _olmo3(config: Config) -> Shape:
    """OLMo 3: full attention in one layer of four; only its rotary embedding may be scaled. Layers with a sliding window don't use
    the model's theta."""
    theta = number(config, "rope_theta", OLMO3_THETA)
    full, local = ropes_by_kind({**config, "rope_theta": theta, "rope_local_base_freq": OLMO3_THETA}, theta, OLMO3_THETA)
    base, local_rope = _olmo2(with_only_rope(config, full)), rope(with_only_rope(OLMO | config, local))
    kinds = layer_kinds(config, base.layers, lambda layer: (layer + 1) % 4 > 0)
    return replace(base, windows=windows_of(config, kinds), local_rope=local_rope if local_rope != base.rope else None)


def _seed_oss(config: Config) -> Shape:
    """Seed-OSS: Llama with larger heads, and a switch for each bias."""
    base = llama(SEED_OSS | config)
    return replace(base, output_bias=config.get("attention_out_bias", False))


def ernie(config: Config) -> Shape:
    """ERNIE 4.5: Llama with interleaved rotary embedding."""
    expect(config, use_bias=False)
    return replace(common(ERNIE | config), rotary_neighbours=True)


def exaone4(config: Config) -> Shape:
    """EXAONE 4: norms after attention and MLP alone. Where some layers have a sliding window, those with full attention have no
    rotary embedding."""
    base = common({"num_key_value_heads": 32, "rms_norm_eps": 1e-5} | config)
    window = config.get("sliding_window", 4096)
    kinds = layer_kinds(config, base.layers, lambda layer: (layer + 1) % pattern_of(config, 4) > 0 and window)
    still = layers_of(kinds, FULL) if window else frozenset[int]()
    return replace(base, qk_norm=True, norms=BEHIND, windows=windows_of(config, kinds), nope_layers=still)


DENSE: dict[str, Callable[[Config], Shape]] = {
    "ApertusForCausalLM": _apertus,
    "ArceeForCausalLM": _arcee,
    "CwmForCausalLM": _cwm,
    "Ernie4_5ForCausalLM": ernie,
    "Exaone4ForCausalLM": exaone4,
    "GemmaForCausalLM": gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "GlmForCausalLM": _glm,
    "Glm4ForCausalLM": _glm4,
    "GraniteForCausalLM": granite,
    "GraniteSWAForCausalLM": _granite_swa,
    "HeliumForCausalLM": _helium,
    "HunYuanDenseV1ForCausalLM": hunyuan,
    "HyperCLOVAXForCausalLM": _hyperclova,
    "InternLM3ForCausalLM": _internlm3,
    "IQuestCoderForCausalLM": _iquest,
    "LlamaForCausalLM": llama,
    "MinistralForCausalLM": _ministral,
    "Ministral3ForCausalLM": _ministral_3,
    "MistralForCausalLM": _mistral,
    "NanoChatForCausalLM": _nanochat,
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo3,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": qwen3,
    "SeedOssForCausalLM": _seed_oss,
    "SmolLM3ForCausalLM": _smollm3,
    "VaultGemmaForCausalLM": _vault_gemma,
}
