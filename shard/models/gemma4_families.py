"""Gemma 4: layers with full attention have other heads than those with a sliding window. A new variant is a new entry in
`GEMMA4`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .dense_families import AROUND, gemma
from .fields import AGAIN, FULL, SIZES, SLIDING, Config, boolean, shown
from .parts import cap, layer_kinds, windows_of
from .ropes import rope_of_kind, ropes_by_kind
from .shape import Shape, Unsupported
from .traits import Keys, Mixture, PerLayerShape

# transformers' defaults, which some checkpoints rely on.
TEXT: Config = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "final_logit_softcapping": None,
}
UNIFIED: Config = TEXT | {"max_position_embeddings": 262_144, "sliding_window": 1024}
ROPES: Config = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
HEAD_SIZE = 512  # of layers with full attention


def gemma4(config: Config) -> Shape:
    """Gemma 4: full attention in one layer of six; after each layer the stream is multiplied by a scalar of the layer. E2B and E4B
    have per-layer embeddings, and their last layers share keys and values."""
    config = TEXT | config
    for name in ("enable_moe_block", "use_double_wide_mlp"):
        boolean(name, config.get(name, False))
    base, sparse = sharing_keys(_text(config), config), config.get("enable_moe_block", False)
    if config.get("use_double_wide_mlp") and base.kv_shared_layers:
        if sparse:
            raise Unsupported(
                "use_double_wide_mlp together with enable_moe_block is not supported: only MLPs without experts are wider"
            )
        widths = (base.intermediate,) * base.with_keys + (2 * base.intermediate,) * base.kv_shared_layers
        base = replace(base, widths=widths)
    untold = config.get("hidden_size_per_layer_input", 256) in (0, None)
    base = replace(base, inputs=None if untold else per_layer_inputs(config, base.vocabulary))
    return replace(base, mixtures=(_mixture(config, base),) * base.layers) if sparse else base


def per_layer_inputs(config: Config, least: int) -> PerLayerShape:
    """The per-layer embeddings; where config.json doesn't mention them, the model has them. least: rows that the table must
    have."""
    size, rows = config.get("hidden_size_per_layer_input", 256), config.get("vocab_size_per_layer_input", 262_144)
    for name, value, lowest in (("hidden_size_per_layer_input", size, 1), ("vocab_size_per_layer_input", rows, least)):
        if type(value) is not int or not lowest <= value <= SIZES["vocab_size"]:
            raise Unsupported(f"config.json says {name} {shown(value)}, an integer from {lowest} on is needed: {AGAIN}")
    padding = config.get("pad_token_id", 0)
    if type(padding) is not int or not 0 <= padding < rows:
        raise Unsupported(f"config.json says pad_token_id {shown(padding)}, a token is needed, which stands for images': {AGAIN}")
    return PerLayerShape(size=size, vocabulary=rows, padding=padding)


def sharing_keys(base: Shape, config: Config) -> Shape:
    """The shape with the number of last layers that share keys and values."""
    count = config.get("num_kv_shared_layers") or 0
    keyed = base.layers - count if type(count) is int else 0
    if not 0 < keyed <= base.layers or set(base.windows[:keyed]) != set(base.windows):
        raise Unsupported(
            f"config.json says num_kv_shared_layers {shown(count)}: before these there must be layers of all kinds, whose keys "
            f"they see: {AGAIN}"
        )
    return replace(base, kv_shared_layers=count)


def _mixture(config: Config, base: Shape) -> Mixture:
    """The 26B-A4B's experts, beside the MLP."""
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if type(config[name]) is not int or config[name] < 1:
            raise Unsupported(
                f"config.json says {name} {shown(config[name])}, and there are experts: an integer is needed: {AGAIN}"
            )
    return Mixture(
        experts=config["num_experts"],
        chosen=config["top_k_experts"],
        size=config["moe_intermediate_size"],
        normalized=True,
        shared=base.intermediate,
        shared_name="mlp",
        shared_gate="",
        beside=True,
        name="",
        router="router.proj",
    )


def gemma4_unified(config: Config) -> Shape:
    """The same without separate image and sound encoders: the 12B."""
    if config.get("num_kv_shared_layers"):
        raise Unsupported("num_kv_shared_layers is not supported: for this family each layer of the decoder has its own keys")
    return _text(UNIFIED | config)


def _text(config: Config) -> Shape:
    seen = config.get("use_bidirectional_attention")
    layers = config["num_hidden_layers"]
    kinds = layer_kinds(config, layers, lambda layer: (layer + 1) % 6 > 0 and layer + 1 < layers)
    full, local = ropes_by_kind({**config, "rope_parameters": config.get("rope_parameters") or ROPES}, 1e6, 1e4)
    plain = config | {
        "use_bidirectional_attention": None if seen == "vision" else seen,  # of image tokens alone
        "rope_parameters": {"rope_theta": 1e4},
    }
    base = gemma(plain, "hidden_activation")
    return replace(
        base,
        centered_norms=False,
        norms=AROUND,
        windows=windows_of(config, kinds),
        rope=rope_of_kind(full),
        local_rope=rope_of_kind(local),
        global_keys=_global_keys(config, base, kinds),
        attention_scale=1.0,
        qk_norm=True,
        value_norm=True,
        layer_factors=True,
        final_softcap=cap(config, "final_logit_softcapping", 0.0),
    )


def _global_keys(config: Config, base: Shape, kinds: Sequence[Any]) -> Keys:
    """The key heads of layers with full attention: given layer by layer, as transformers 5 writes it, or by the models' own
    fields."""
    joint = boolean("attention_k_eq_v", config.get("attention_k_eq_v", False))
    given = config.get("per_layer_config")
    if isinstance(given, dict):  # transformers pads layer numbers: "04"
        given = {str(int(layer)) if layer.isdecimal() else layer: own for layer, own in given.items()}
    own: Any = {"head_dim": config.get("global_head_dim", HEAD_SIZE)}
    if joint and config.get("num_global_key_value_heads") is not None:
        own |= {"num_key_value_heads": config["num_global_key_value_heads"]}
    if given is not None:
        full = [str(layer) for layer, kind in enumerate(kinds) if kind == FULL]
        alike = isinstance(given, dict) and set(given) <= set(full)
        each = [given.get(layer, {}) for layer in full] if alike else []
        own = each[0] if each else {}
        alike = alike and isinstance(own, dict) and all(one == own for one in each)
        if not alike or set(own) - {"head_dim", "num_key_value_heads"}:
            raise Unsupported(
                f"config.json says per_layer_config {shown(given)}: the decoder has one head_dim and num_key_value_heads for all "
                "layers that see all, and one for all that slide"
            )
    own = {"head_dim": base.head_size, "num_key_value_heads": base.kv_heads} | own
    for name, value in own.items():
        if type(value) is not int or not 1 <= value <= SIZES[name]:
            raise Unsupported(f"config.json says {name} {shown(value)} of layers that see all, an integer is needed: {AGAIN}")
    return Keys(heads=own["num_key_value_heads"], size=own["head_dim"], values=not joint)


GEMMA4: dict[str, Callable[[Config], Shape]] = {
    "Gemma4ForCausalLM": gemma4,
    "Gemma4UnifiedForCausalLM": gemma4_unified,
}
