"""Mistral Large 4: MLA, with sparse attention by an index whose queries are projected from the stream; scalable softmax in both,
rotary embedding with learned frequency factors, and none in one layer of four."""

from dataclasses import replace

from .fields import AGAIN, Config, expect, number, said
from .latent_families import FEATURES, index_sharing_layers, latent_shape, with_latent, with_softmax_router
from .parts import nope_layers
from .ropes import with_rope
from .shape import Shape, Unsupported
from .sparse_families import scored_by_kinds
from .traits import Index

# transformers' defaults.
MISTRAL_LARGE_4: Config = FEATURES | {
    "qk_nope_head_dim": 64,
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 6144,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "final_logit_softcapping": 30.0,
}
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
# transformers' names, and Mistral's own, which transformers also writes.
NAMES = (
    ("model.language_model.embed_tokens.", "tok_embeddings."),
    ("model.language_model.rotary_emb.", "lerope."),
    *(("model.language_model.", ""), ("lm_head.", "output."), (".self_attn.", ".attention.")),
    *((".q_proj.", ".wq."), (".o_proj.", ".wo."), (".kv_a_proj_with_mqa.", ".wkv_a_with_mqa."), (".kv_b_proj.", ".wkv_b.")),
    *((".kv_a_layernorm.", ".kv_a_norm."), (".input_layernorm.", ".attention_norm."), (".post_attention_layernorm.", ".ffn_norm.")),
    *((".softmax_scaling.scale", ".ssmax_scaling.s"), (".softmax_scaling.bias", ".ssmax_scaling.b")),
    *((f".mlp.{part}.", f".{part}.") for part in ("gate", "experts", "shared_experts")),
    *((".mlp.", ".feed_forward."), (".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3.")),
)


def mistral_large_4(config: Config) -> Shape:
    """The language model. Every layer has latents of its own."""
    layers = config["num_hidden_layers"]
    expect(said(config), kv_source_layers=[*range(layers)], q_lora_rank=None, norm_topk_prob=True, rope_interleave=True)
    given = with_rope(MISTRAL_LARGE_4 | config | {"q_lora_rank": None}, ROPE)
    base = latent_shape(given)
    index = Index(
        heads=given["index_n_heads"],
        size=given["index_head_dim"],
        most=given["index_topk"],
        neighbours=True,
        borrowing=index_sharing_layers(config),
        streaming=True,
        scalable_softmax=True,
    )
    assert base.latent is not None
    if index.size < base.latent.turned:
        raise Unsupported(
            f"config.json says index_head_dim {index.size} and qk_rope_head_dim {base.latent.turned}: an index needs heads as "
            f"large as what turns of keys: {AGAIN}"
        )
    base = replace(
        with_latent(base, epsilon=base.norm_epsilon, index=index, apart=False),
        rope=replace(base.rope, learned=True),
        nope_layers=nope_layers(given, layers, given.get("no_rope_layers")),
        scalable_softmax=True,
        final_softcap=number(given, "final_logit_softcapping"),
        aliases=NAMES,
    )
    return with_softmax_router(scored_by_kinds(base, given), normalized=True, precise=True)
