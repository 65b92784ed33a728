"""GLM 5 Next: Kimi's linear attention in three layers of four, in the others MLA without a rotary embedding and with sparse
attention to pools of tokens; manifold-constrained hyper-connections (mHC), whose streams are mixed with each other."""

from dataclasses import replace
from typing import Any

from .fields import AGAIN, INDEXED, LEAST, LINEAR, SIZES, Config, boolean, expect, number, said, shown, whole
from .hybrid_families import linear_layers
from .kimi_families import INNER, kimi_delta
from .latent_families import GLM_5, index_sharing_layers, latent_shape, with_latent
from .recurrent_shapes import KimiDeltaShape
from .ropes import ROPES
from .shape import Shape, Unsupported
from .sparse_families import EXPERTS, PLAIN_MLP, scored_by_kinds, with_experts
from .traits import HyperConnections, Index

# transformers' defaults.
GLM_5_NEXT: Config = GLM_5 | {
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 256,
    "max_position_embeddings": 1_048_576,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "linear_head_dim": 128,
    "linear_num_heads": 64,
    "linear_conv_kernel_dim": 4,
    "linear_lower_bound": -5.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "index_kpool": 16,
}
NAMES = (("attn_hc.", "hc_attn_"), ("ffn_hc.", "hc_ffn_"))  # transformers' names, and the hub's


def glm_5_next(config: Config) -> Shape:
    """The language model."""
    expect(said(config), scoring_func="sigmoid", topk_method="noaux_tc", qk_rope_head_dim=0, mlp_bias=False)
    expect(said(config), num_key_value_heads=config["num_attention_heads"])
    given = GLM_5_NEXT | config | _inner(config) | dict.fromkeys(ROPES) | {"rope_interleave": False}
    layers = given["num_hidden_layers"]
    if given.get("mlp_layer_types") is None:
        given["mlp_layer_types"] = [PLAIN_MLP if layer < 3 else EXPERTS for layer in range(layers)]
    base = latent_shape(given)
    kinds = given.get("layer_types") or [INDEXED if layer % 4 == 3 else LINEAR for layer in range(layers)]
    recurrent = linear_layers(kinds)
    others = frozenset(range(layers)) - recurrent
    base = with_latent(base, epsilon=base.norm_epsilon, index=_index(given, others))
    limit = number(given, "swiglu_limit", 10.0)
    return replace(
        with_experts(scored_by_kinds(base, given), limit=limit, shared_limit=limit, form="before"),
        hyper=HyperConnections(
            count=given["hc_mult"],
            magnitude=2.0,
            epsilon=number(given, "hc_eps", 1e-6),
            rounds=given["hc_sinkhorn_iters"],
            averaged=True,
        ),
        recurrent=_linear(given, recurrent) if recurrent else None,
        nope_layers=frozenset(range(layers)),
        mlp_limits=(limit,) * layers,
        mlp_form="before",
        aliases=NAMES,
        modules=(("self_attn.f_", "self_attn.forget_gate.f_"),),
    )


def _inner(config: Config) -> Config:
    """Fields of linear attention, which may be in an object of their own."""
    inner = config.get("linear_attn_config")
    if inner is None:
        return {}
    if not isinstance(inner, dict):
        raise Unsupported(f"config.json says linear_attn_config {shown(inner)}, an object is needed: {AGAIN}")
    found: Config = {ours: inner[theirs] for theirs, ours in INNER.items() if theirs in inner}
    for name, value in found.items():
        whole(name, value, LEAST.get(name, 1), SIZES[name])
    bound = inner.get("gate_lower_bound", (GLM_5_NEXT | config)["linear_lower_bound"])
    if boolean("safe_gate", inner.get("safe_gate", True)) and bound is None:
        bound = GLM_5_NEXT["linear_lower_bound"]
    return found | {"linear_lower_bound": bound}


def _linear(given: Config, layers: frozenset[int]) -> KimiDeltaShape:
    bound: Any = given["linear_lower_bound"]
    if bound is not None and (type(bound) not in (int, float) or not -1e12 <= bound < 0):
        raise Unsupported(f"config.json says linear_lower_bound {shown(bound)}, a number below 0, or null, is needed: {AGAIN}")
    return kimi_delta(given, layers, float(bound or 0))


def _index(given: Config, attending: frozenset[int]) -> Index:
    """The index. attending: layers with attention, of which some may reuse the index of another."""
    pool, most = given["index_kpool"], given["index_topk"]
    if most % pool:
        raise Unsupported(
            f"config.json says index_topk {most} and index_kpool {pool}, of which the first must be a multiple: {AGAIN}"
        )
    if pool > 1:
        expect(given, index_kpool_always_select_tail=True)
    if given["q_lora_rank"] is None:
        raise Unsupported(f"config.json says q_lora_rank null: an index needs latents of queries: {AGAIN}")
    return Index(
        heads=given["index_n_heads"],
        size=given["index_head_dim"],
        most=most,
        borrowing=index_sharing_layers(given, attending),
        pool=pool if pool > 1 else 0,
    )
