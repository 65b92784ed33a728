"""LongCat Flash (Meituan 2025, arXiv:2509.01322): a layer of its checkpoint is two of ours, each of MLA and an MLP. Shortcut
experts read what the first one's MLP reads; some are identity experts (Jin et al. 2024, arXiv:2410.07348)."""

from collections.abc import Callable
from dataclasses import replace

from .fields import AGAIN, SIZES, Config, expect, number, said, shown, whole
from .latent_families import FEATURES, latent_shape
from .shape import Shape, Unsupported
from .traits import Mixture

# transformers' defaults.
LONGCAT: Config = FEATURES | {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e7,
    "n_routed_experts": 512,
}
# Its names of fields, the usual ones, and defaults.
FIELDS = {
    "ffn_hidden_size": ("intermediate_size", 12_288),
    "moe_topk": ("num_experts_per_tok", 12),
    "expert_ffn_hidden_size": ("moe_intermediate_size", 2048),
}
PAIRED = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlps")


def _longcat(config: Config) -> Shape:
    """LongCat Flash: query and key-value latents are scaled; here the projections from them are."""
    expect(
        said(config),
        attention_method="MLA",
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
        norm_topk_prob=False,
        rope_interleave=True,
        router_bias=False,
        zero_expert_type="identity",
    )
    given = LONGCAT | config | {"num_hidden_layers": _layers(config)}
    given |= {ours: whole(theirs, config.get(theirs, usual), 1, SIZES[ours]) for theirs, (ours, usual) in FIELDS.items()}
    base = latent_shape(given)
    _check_features(given)
    scales = (("q_b_proj", given["q_lora_rank"]), ("kv_b_proj", given["kv_lora_rank"]))
    mixture = _mixture(given, base)
    return replace(
        base,
        factors=tuple((f"self_attn.{name}", (base.hidden / size) ** 0.5) for name, size in scales),
        mixtures=(mixture, None) * (base.layers // 2),
        mlp_name="mlps",
        paired=PAIRED,
    )


def _layers(config: Config) -> int:
    """The number of our layers. num_hidden_layers may be that, or half of it, where num_layers gives the checkpoint's own
    number."""
    name, most = "num_hidden_layers", SIZES["num_hidden_layers"]
    if "num_layers" not in config:
        return whole(name, config[name], 2, most) // 2 * 2
    own = whole("num_layers", config["num_layers"], 1, most // 2)
    if config.get(name, own) not in (own, 2 * own):
        raise Unsupported(f"config.json says num_layers {own}, and {name} {shown(config[name])}, which are twice as many: {AGAIN}")
    return 2 * own


def _check_features(given: Config) -> None:
    """Raises Unsupported for sizes that contradict each other, or without query latents."""
    turned = given["qk_rope_head_dim"]
    sizes = {"head_dim": turned, "qk_head_dim": given["qk_nope_head_dim"] + turned}
    for name, size in sizes.items():
        if given.get(name) not in (None, size):
            raise Unsupported(f"config.json says {name} {shown(given[name])}, and its other sizes mean {size}: {AGAIN}")
    if given["q_lora_rank"] is None:
        raise Unsupported("q_lora_rank null is not supported: for this family the decoder makes queries of latents")


def _mixture(given: Config, base: Shape) -> Mixture:
    return Mixture(
        experts=given["n_routed_experts"],
        idle=whole("zero_expert_num", given.get("zero_expert_num", 256), 0, SIZES["n_routed_experts"]),
        chosen=given["num_experts_per_tok"],
        size=given["moe_intermediate_size"],
        normalized=False,
        correction="router.e_score_correction_bias",
        factor=number(given, "routed_scaling_factor", 6.0),
        router="router.classifier",
        shared=base.intermediate,
        shared_name=".mlps",
        shared_gate="",
        later=True,
    )


LONGCAT_FLASH: dict[str, Callable[[Config], Shape]] = {"LongcatFlashForCausalLM": _longcat}
