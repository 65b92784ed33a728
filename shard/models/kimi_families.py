"""Kimi Linear: MLA in some layers, and linear attention (Kimi Delta Attention) in the others (Kimi Team 2025, arXiv:2510.26692)."""

from collections.abc import Callable
from dataclasses import replace

from .fields import AGAIN, FULL, LEAST, LINEAR, SIZES, Config, boolean, expect, said, shown, whole
from .hybrid_families import linear_layers
from .latent_families import latent_shape
from .parts import layer_kinds
from .recurrent_shapes import KimiDeltaShape
from .shape import Shape, Unsupported
from .sparse_families import scored_by_kinds, with_experts

# transformers' defaults.
KIMI: Config = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
}
# Its names of fields, and the usual ones.
NAMES = {
    "model_max_length": "max_position_embeddings",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
}
INNER = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim"}
MLP_NAMES = ("mlp.", "block_sparse_moe.")  # of dense MLPs: the hub's, and that which transformers writes
LAYERS = {"full_attn_layers": FULL, "kda_layers": LINEAR}  # lists of layers, counted from 1


def _kimi_linear(config: Config) -> Shape:
    """Kimi Linear: no layer has a rotary embedding; experts are chosen by sigmoid scores with a correction bias."""
    expect(config, moe_router_activation_func="sigmoid", mla_use_nope=True)
    inner = config.get("linear_attn_config") or {}
    if not isinstance(inner, dict):
        raise Unsupported(f"config.json says linear_attn_config {shown(inner)}, an object is needed: {AGAIN}")
    named = said(_named(config, NAMES) | _named(inner, INNER))
    boolean("moe_renormalize", named.get("norm_topk_prob", True))
    for name in named.keys() - {"norm_topk_prob"}:
        whole(name, named[name], LEAST.get(name, 1), SIZES[name])
    given = KIMI | config | named
    base = latent_shape(given | {"rope_interleave": False})
    kinds = layer_kinds(config, base.layers, lambda layer: not layer or layer % 4 > 0, LINEAR)
    if not config.get("layer_types") and all(name in inner for name in LAYERS):
        kinds = _counted(inner, base.layers)
    layers = linear_layers(kinds)
    return replace(
        with_experts(scored_by_kinds(base, given), name="block_sparse_moe", names=("w1", "w3", "w2")),
        recurrent=kimi_delta(given, layers) if layers else None,
        nope_layers=frozenset(range(base.layers)),
        aliases=(MLP_NAMES,),
        modules=(MLP_NAMES, MLP_NAMES[::-1], ("self_attn.f_", "self_attn.forget_gate.f_")),
    )


def kimi_delta(given: Config, layers: frozenset[int], bound: float = 0.0) -> KimiDeltaShape:
    """Kimi Delta Attention in these layers."""
    heads, size, width = given["linear_num_heads"], given["linear_head_dim"], given["linear_conv_kernel_dim"]
    return KimiDeltaShape(
        layers=layers, key_heads=heads, value_heads=heads, key_size=size, value_size=size, width=width, bound=bound
    )


def _named(config: Config, names: dict[str, str]) -> Config:
    return {ours: config[theirs] for theirs, ours in names.items() if theirs in config}


def _counted(inner: Config, layers: int) -> list[str]:
    """The kind of each layer, from two lists of layer numbers."""
    found = dict[int, str]()
    for name, kind in LAYERS.items():
        counted = inner[name]
        if not isinstance(counted, list) or not all(type(layer) is int and layer - 1 not in found for layer in counted):
            raise Unsupported(f"config.json says {name} {shown(counted)}, numbers of layers are needed, each once: {AGAIN}")
        found |= {layer - 1: kind for layer in counted}
    if sorted(found) != list(range(layers)):
        raise Unsupported(f"config.json counts other layers in {' and '.join(LAYERS)} than 1 to {layers}: {AGAIN}")
    return [found[layer] for layer in range(layers)]


KIMI_LINEAR: dict[str, Callable[[Config], Shape]] = {"KimiLinearForCausalLM": _kimi_linear}
