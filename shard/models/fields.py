"""Fields of a config.json, each of which may be anything: what is read of them is checked here."""

import math
from collections.abc import Mapping
from typing import Any

from .shape import Unsupported

Config = dict[str, Any]

# What the fields of a config.json may be, so that one that lies is found before anything is computed with it. Bounds are far beyond
# every model there is, and far below where an allocation or a loop over them would never end.
SIZES = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 12,
    "max_position_embeddings": 1 << 30,
    "sliding_window": 1 << 30,
    "max_window_layers": 1 << 12,
    "num_local_experts": 1 << 12,
    "num_experts": 1 << 12,
    "num_experts_per_tok": 1 << 12,
    "moe_intermediate_size": 1 << 22,
    "shared_expert_intermediate_size": 1 << 22,
    "decoder_sparse_step": 1 << 12,
    "no_rope_layer_interval": 1 << 12,
}
MAY_BE_NULL = ("num_key_value_heads", "head_dim", "sliding_window", "max_window_layers")  # and means that there is none
AGAIN = "is it the model's own? Download it again"
FULL, SLIDING = "full_attention", "sliding_attention"  # of `layer_types`
SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "use_sliding_window", "norm_topk_prob")
# What transformers calls a model where its architecture's name doesn't say so.
MODEL_TYPES = {
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "GptOssForCausalLM": "gpt_oss",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def check(config: Config, architecture: str) -> None:
    """Raises Unsupported if a field that we read can't be what it says."""
    kind, own = config.get("model_type"), MODEL_TYPES.get(architecture, architecture.removesuffix("ForCausalLM").lower())
    if kind not in (None, own):
        raise Unsupported(
            f"config.json says model_type {shown(kind)}, and architecture {architecture}, which is {own!r}: transformers goes by "
            f"the first, penstock by the second; {AGAIN}"
        )
    for name, most in SIZES.items():
        value = config.get(name, 1)
        least = 0 if name in ("sliding_window", "max_window_layers") else 1
        if value is None and name in MAY_BE_NULL:
            continue
        if type(value) is not int or not least <= value <= most:
            raise Unsupported(f"config.json says {name} {shown(value)}, an integer from {least} to {most} is needed: {AGAIN}")
    for name in SWITCHES:
        if not isinstance(config.get(name, False), bool):
            raise Unsupported(f"config.json says {name} {shown(config[name])}, true or false is needed: {AGAIN}")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != config["num_hidden_layers"]):
        raise Unsupported(f"config.json says layer_types {shown(kinds)}, a name for each of num_hidden_layers is needed: {AGAIN}")


def number(values: Mapping[str, Any], name: str, default: float | None = None, most: float = 1e12) -> float:
    """A number above 0. Raises KeyError if it is not there and has no default."""
    value = values[name] if default is None else values.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and 0 < value <= most):
        raise Unsupported(f"config.json says {name} {shown(value)}, a number above 0 up to {most:g} is needed: {AGAIN}")
    return float(value)


def shown(value: object) -> str:
    return repr(value)[:40]
