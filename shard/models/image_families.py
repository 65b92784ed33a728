"""Multimodal families: the language models of architectures with images; `vision` has their image encoders. A new family is a new
entry in `IMAGES`.

For text alone each token has one position. Where image tokens have three, the sections of the rotary embedding (`mrope`) say which
position rotates which pair of features.
"""

from collections.abc import Callable
from dataclasses import replace

from .dense_families import DENSE
from .fields import AGAIN, Config, expect, shown
from .gemma3n_families import GEMMA3N
from .gemma4_families import GEMMA4
from .glm5_next_families import glm_5_next
from .hybrid_families import HYBRID
from .latent_families import LATENT, deepseek_ocr, hy_4_vl
from .llama4_families import LLAMA4
from .mistral_large4_families import mistral_large_4
from .qwen4_families import qwen_4
from .ropes import ROPES
from .shape import Shape, Unsupported
from .sliding_families import step_3
from .sparse_families import SPARSE

# transformers' defaults, which some checkpoints rely on.
LLAMA: Config = {  # LLaVA's config.json leaves out defaults; perhaps Idefics', too
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
MISTRAL: Config = LLAMA | {"intermediate_size": 14_336}
QWEN2_VL: Config = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
QWEN3_VL: Config = {"max_position_embeddings": 128_000, "rope_theta": 5e5}
QWEN3_VL_MOE: Config = QWEN3_VL | {
    "num_key_value_heads": 16,
    "num_local_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
}
GLM_4V: Config = {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
GLM_4V_MOE: Config = {"max_position_embeddings": 65_536, "attention_bias": True}
GLM_OCR: Config = {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
PADDLE: Config = {"num_key_value_heads": 2, "head_dim": 128, "rope_theta": 5e5, "max_position_embeddings": 131_072}
# Fields beside text_config that concern the text.
TIES = "tie_word_embeddings"
BESIDE_TEXT = (TIES, "quantization_config", "quantization", "image_token_id")
BESIDE_COUNTS = (  # in which the first of these fields counts, not that of text_config
    *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    *("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "InternVLForConditionalGeneration"),
    *("DeepseekOcr2ForConditionalGeneration", "MistralLarge4ForConditionalGeneration", "Glm5NextForConditionalGeneration"),
    *("LlavaNextForConditionalGeneration", "Idefics2ForConditionalGeneration", "Exaone4_5_ForConditionalGeneration"),
    *("Qwen4ExpForConditionalGeneration", "HYV4VLForConditionalGeneration", "Step3p7ForConditionalGeneration"),
)
TIED = (
    "Lfm3VlForConditionalGeneration",
    "LightOnOcrForConditionalGeneration",
    "PaddleOCRVLForConditionalGeneration",
)  # the same, and true by default
EITHER_COUNTS = (  # in which it counts in either place
    *("LlavaForConditionalGeneration", "LlavaOnevisionForConditionalGeneration", "GlmOcrForConditionalGeneration"),
    *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "MiniMaxM3SparseForConditionalGeneration"),
    *("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"),
)

# The text is of one family, whatever model_type text_config names, as in transformers.
NAMELESS = ("MiniMaxM3SparseForConditionalGeneration",)

Family = Callable[[Config], Shape]


def _llama(config: Config) -> Shape:
    return DENSE["LlamaForCausalLM"](LLAMA | config)


def _mistral(config: Config) -> Shape:
    return DENSE["MistralForCausalLM"](MISTRAL | config)


def _qwen2_vl(config: Config) -> Shape:
    return DENSE["Qwen2ForCausalLM"](QWEN2_VL | config)


def _qwen3_vl(config: Config) -> Shape:
    """What images add to the first layers (DeepStack) doesn't concern text."""
    return DENSE["Qwen3ForCausalLM"](QWEN3_VL | config)


def _qwen3_vl_moe(config: Config) -> Shape:
    expect(config, norm_topk_prob=True)
    return SPARSE["Qwen3MoeForCausalLM"](QWEN3_VL_MOE | config | _head(config))


def _head(config: Config) -> Config:
    """The head size, which may be null or follow from other fields."""
    return {"head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]}


def _glm_4v(config: Config) -> Shape:
    return DENSE["Glm4ForCausalLM"](GLM_4V | config | {"head_dim": config["hidden_size"] // config["num_attention_heads"]})


def _glm_ocr(config: Config) -> Shape:
    return replace(DENSE["Glm4ForCausalLM"](GLM_4V | GLM_OCR | config | _head(config)), qkv_bias=False)


def _paddle(config: Config) -> Shape:
    """ERNIE 4.5 without interleaving in the rotary embedding."""
    return replace(DENSE["Ernie4_5ForCausalLM"](PADDLE | config), rotary_neighbours=False)


def _glm_4v_moe(config: Config) -> Shape:
    return SPARSE["Glm4MoeForCausalLM"](GLM_4V_MOE | config)


KIMI = {"kimi_k2": LATENT["DeepseekV3ForCausalLM"], "deepseek_v3": LATENT["DeepseekV3ForCausalLM"]}
LLAVA = {"llama": _llama, "mistral": _mistral, "qwen2": DENSE["Qwen2ForCausalLM"]}
# For each architecture, the families of its language model, by model_type.
IMAGES: dict[str, dict[str, Family]] = {
    "DeepseekOcr2ForConditionalGeneration": {"deepseek_ocr2_text": deepseek_ocr},
    "Exaone4_5_ForConditionalGeneration": dict.fromkeys(("exaone4", "exaone4_5_text"), DENSE["Exaone4ForCausalLM"]),
    "Gemma3ForConditionalGeneration": {"gemma3_text": DENSE["Gemma3ForCausalLM"]},
    "Gemma3nForConditionalGeneration": {"gemma3n_text": GEMMA3N["Gemma3nForCausalLM"]},
    "Gemma4ForConditionalGeneration": {"gemma4_text": GEMMA4["Gemma4ForCausalLM"]},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": GEMMA4["Gemma4UnifiedForCausalLM"]},
    "Glm5NextForConditionalGeneration": dict.fromkeys(("glm5_next_text", "glm5_next"), glm_5_next),
    "Glm46VForConditionalGeneration": {"glm4v_text": _glm_4v, "glm4v_moe_text": _glm_4v_moe},
    "GlmOcrForConditionalGeneration": {"glm_ocr_text": _glm_ocr},
    "Glm4vForConditionalGeneration": {"glm4v_text": _glm_4v},
    "Glm4vMoeForConditionalGeneration": {"glm4v_moe_text": _glm_4v_moe},
    "HYV4VLForConditionalGeneration": {"hy_v4_vl_text": hy_4_vl},
    "Idefics2ForConditionalGeneration": {"mistral": _mistral},
    "Idefics3ForConditionalGeneration": {"llama": _llama},
    "InternVLForConditionalGeneration": {
        "qwen2": DENSE["Qwen2ForCausalLM"],
        "qwen3": DENSE["Qwen3ForCausalLM"],
        "qwen3_moe": SPARSE["Qwen3MoeForCausalLM"],
        "llama": DENSE["LlamaForCausalLM"],
    },
    "KimiK25ForConditionalGeneration": KIMI,
    "Kimi_K25ForConditionalGeneration": KIMI,
    "Llama4ForConditionalGeneration": {"llama4_text": LLAMA4["Llama4ForCausalLM"]},
    "Lfm3VlForConditionalGeneration": {"lfm3": HYBRID["Lfm3ForCausalLM"]},
    "LightOnOcrForConditionalGeneration": {"qwen3": DENSE["Qwen3ForCausalLM"]},
    "LlavaForConditionalGeneration": LLAVA,
    "LlavaNextForConditionalGeneration": LLAVA | {"granite": DENSE["GraniteForCausalLM"]},
    "LlavaOnevisionForConditionalGeneration": LLAVA,
    "MiniMaxM3SparseForConditionalGeneration": {"minimax_m3_vl_text": SPARSE["MiniMaxM3VLForCausalLM"]},
    "Mistral3ForConditionalGeneration": {
        "mistral": DENSE["MistralForCausalLM"],
        "ministral3": DENSE["Ministral3ForCausalLM"],
        "mistral4": LATENT["Mistral4ForCausalLM"],
    },
    "MistralLarge4ForConditionalGeneration": {"mistral_large4_text": mistral_large_4},
    "PaddleOCRVLForConditionalGeneration": dict.fromkeys(("paddleocr_vl_text", "paddleocr_vl"), _paddle),
    "Qwen2VLForConditionalGeneration": {"qwen2_vl_text": _qwen2_vl, "qwen2_vl": _qwen2_vl},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": _qwen2_vl, "qwen2_5_vl": _qwen2_vl},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": _qwen3_vl},
    "Qwen3VLMoeForConditionalGeneration": {"qwen3_vl_moe_text": _qwen3_vl_moe},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": HYBRID["Qwen3_5ForCausalLM"]},
    "SmolVLMForConditionalGeneration": {"llama": _llama},
    "Step3p7ForConditionalGeneration": {"step3p5": step_3},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": HYBRID["Qwen3_5MoeForCausalLM"]},
    "Qwen4ExpForConditionalGeneration": {"qwen4_exp_text": qwen_4},
}


# Default sections: pairs of features rotated by time, row and column positions, and whether the three interleave.
SECTIONS: dict[str, tuple[list[int], bool]] = {
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text", "glm_ocr_text"), ([8, 12, 12], False)),
    **dict.fromkeys(
        ("paddleocr_vl", "paddleocr_vl_text", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), ([16, 24, 24], False)
    ),
    "hy_v4_vl_text": ([12, 10, 10], True),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), ([24, 20, 20], True)),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), ([11, 11, 10], True)),
}


def seeing(text: Config, kind: str, found: Shape) -> Shape:
    """The shape with what is different for image tokens. text: the text's config; kind: its model_type."""
    if kind == "gemma3_text":
        return replace(found, whole_images=tuple(sorted(set(found.windows))))
    if kind in ("gemma4_text", "gemma4_unified_text") and text.get("use_bidirectional_attention") == "vision":
        return replace(found, whole_images=tuple(sorted({window for window in found.windows if window})))
    if kind == "granite":
        return replace(found, image_factor=found.embedding_factor)
    return _turned(text, kind, found) if kind in SECTIONS else found


def _turned(text: Config, kind: str, found: Shape) -> Shape:
    """The shape with mrope sections, unless config.json has invalid ones, which don't concern text: `vision` refuses them."""
    said = [values["mrope_section"] for name in ROPES if isinstance(values := text.get(name), dict) and "mrope_section" in values]
    default, by_turns = SECTIONS[kind]
    sections, pairs = (said or [default])[0], (found.rotary_size or found.turning_size(0)) // 2
    if (
        not isinstance(sections, list)
        or len(sections) != len(default)
        or not all(type(one) is int and 0 <= one <= pairs for one in sections)
    ):
        return found
    if by_turns:
        axes = [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(pairs)]
    else:
        axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    return replace(found, rope=replace(found.rope, axes=tuple(axes))) if len(axes) == pairs else found


def text_of(config: Config, architecture: str) -> Config:
    """The text's config: text_config, or for old descriptions of Qwen 2 VL the whole."""
    own = config if "text_config" not in config and "hidden_size" in config else config["text_config"]
    if not isinstance(own, dict):
        raise Unsupported(f"config.json says text_config {shown(own)}, an object is needed: {AGAIN}")
    beside = {name: config[name] for name in BESIDE_TEXT if name in config}
    found = beside | own | {"architectures": config["architectures"]}
    if architecture in BESIDE_COUNTS and TIES in beside:
        found[TIES] = beside[TIES]
    elif architecture in TIED:
        found[TIES] = beside.get(TIES, True)
    elif architecture in EITHER_COUNTS:
        found[TIES] = beside.get(TIES) or own.get(TIES, False)
    if architecture in NAMELESS:
        found.pop("model_type", None)
    return found
