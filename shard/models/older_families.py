"""Model families of 2019 to 2024 (GPT-2, BLOOM, Falcon, OPT, ...), whose config.json has other field names, and whose checkpoints
other tensor names. A new family is a new entry in `OLDER`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .fields import AGAIN, Config, boolean, expect, number, said, shown
from .layer_norm_families import BEFORE_BOTH
from .parts import cap, common
from .ropes import rotary_size
from .shape import PLAIN, Shape, Unsupported
from .traits import Alibi, Layout, Mixture

FIELDS = {  # older names of fields, and the present ones
    "n_embd": "hidden_size",
    "n_embed": "hidden_size",
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "seq_length": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "ffn_dim": "intermediate_size",
    "ffn_hidden_size": "intermediate_size",
    "num_kv_heads": "num_key_value_heads",
    "kv_n_heads": "num_key_value_heads",
    "moe_top_k": "moe_k",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "window_size": "sliding_window",
    "layer_norm_epsilon": "layer_norm_eps",
    "activation": "hidden_act",
    "activation_function": "hidden_act",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
}
WITHIN = ("attn_config", "ffn_config")  # fields with fields of their own
ACTIVATIONS = {  # transformers' names, and ours
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "exact_gelu",
    "relu": "relu",
}


def _queries_keys_values(theirs: str) -> tuple[tuple[str, str], ...]:
    """Our names of the query, key and value projections, and the checkpoint's; {} is replaced by the letter, where they are not
    fused."""
    return tuple((f"self_attn.{part}_proj", theirs.format(part)) for part in "qkv")


GPT2: Config = {"max_position_embeddings": 1024, "tie_word_embeddings": True}
GPT2_NAMES = (
    ("embed_tokens", "wte"),
    ("embed_positions", "wpe"),
    ("norm", "ln_f"),
    ("input_layernorm", "ln_1"),
    ("post_attention_layernorm", "ln_2"),
    *_queries_keys_values("attn.c_attn"),
    ("self_attn.o_proj", "attn.c_proj"),
    ("mlp.up_proj", "mlp.c_fc"),
    ("mlp.down_proj", "mlp.c_proj"),
)
BLOCKS = Layout(roots=("transformer.", ""), layers="h", names=GPT2_NAMES, joint=True)
GPTJ_NAMES = (
    ("embed_tokens", "wte"),
    ("norm", "ln_f"),
    ("input_layernorm", "ln_1"),
    *_queries_keys_values("attn.{}_proj"),
    ("self_attn.o_proj", "attn.out_proj"),
    ("mlp.up_proj", "mlp.fc_in"),
    ("mlp.down_proj", "mlp.fc_out"),
)
GPT_NEO_NAMES = (
    *GPT2_NAMES,  # of which the following are replaced
    *_queries_keys_values("attn.attention.{}_proj"),
    ("self_attn.o_proj", "attn.attention.out_proj"),
)
NEOX_NAMES = (
    ("embed_tokens", "embed_in"),
    ("norm", "final_layer_norm"),
    ("lm_head", "embed_out"),
    *_queries_keys_values("attention.query_key_value"),
    ("self_attn.o_proj", "attention.dense"),
    ("mlp.up_proj", "mlp.dense_h_to_4h"),
    ("mlp.down_proj", "mlp.dense_4h_to_h"),
)
FALCON_NAMES = (
    ("embed_tokens", "word_embeddings"),
    ("norm", "ln_f"),
    *_queries_keys_values("self_attention.query_key_value"),
    ("self_attn.o_proj", "self_attention.dense"),
    ("mlp.up_proj", "mlp.dense_h_to_4h"),
    ("mlp.down_proj", "mlp.dense_4h_to_h"),
)
BLOOM_NAMES = (*FALCON_NAMES, ("embed_norm", "word_embeddings_layernorm"))
MPT = {  # values that are supported
    "attn_type": "multihead_attention",
    "norm_type": "low_precision_layernorm",
    "expansion_ratio": 4,
    "logit_scale": None,
}
MPT_NAMES = (
    ("embed_tokens", "wte"),
    ("norm", "norm_f"),
    ("input_layernorm", "norm_1"),
    ("post_attention_layernorm", "norm_2"),
    *_queries_keys_values("attn.Wqkv"),
    ("self_attn.o_proj", "attn.out_proj"),
    ("mlp.up_proj", "ffn.up_proj"),
    ("mlp.down_proj", "ffn.down_proj"),
)
DBRX: Config = {"num_key_value_heads": 1, "moe_num_experts": 4, "moe_k": 1}
DBRX_NAMES = (
    ("embed_tokens", "wte"),
    ("norm", "norm_f"),
    ("input_layernorm", "norm_attn_norm.norm_1"),
    ("post_attention_layernorm", "norm_attn_norm.norm_2"),
    *_queries_keys_values("norm_attn_norm.attn.Wqkv"),
    ("self_attn.o_proj", "norm_attn_norm.attn.out_proj"),
    ("mlp.gate", "ffn.router.layer"),
    ("mlp.experts", "ffn.experts.mlp"),
)
TWO_NORMS = (("input_layernorm", "ln_attn"), ("post_attention_layernorm", "ln_mlp"))
OPT_NAMES = (
    ("embed_tokens", "embed_tokens"),
    ("norm", "final_layer_norm"),
    ("input_layernorm", "self_attn_layer_norm"),
    ("post_attention_layernorm", "final_layer_norm"),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("mlp.up_proj", "fc1"),
    ("mlp.down_proj", "fc2"),
)


def today(config: Config) -> Config:
    """The config with present field names. Where the MLP's size is missing, it is four times the hidden size."""
    inner = (config.get(name) for name in WITHIN)
    every = *(fields for fields in inner if isinstance(fields, dict)), config
    found = {FIELDS.get(name, name): value for fields in every for name, value in fields.items()}
    if found.get("intermediate_size") is None and isinstance(found.get("hidden_size"), int):
        found["intermediate_size"] = 4 * found["hidden_size"]
    return found


def _base(config: Config, activations: tuple[str, ...], layout: Layout) -> Shape:
    """activations: supported ones, of which the first is the default."""
    base = common(config | {"rms_norm_eps": number(config, "layer_norm_eps", 1e-5, 1.0)}, "hidden_act", activations)
    if base.quantization:
        raise Unsupported(
            f"{base.architecture} with weights of few bits is not supported: take the checkpoint with all of them, and --quantize"
        )
    return replace(base, layout=layout, layer_norms=True)


def _common(config: Config, activation: str, layout: Layout, biases: bool) -> Shape:
    """activation: the default."""
    return replace(
        _base(config, (activation, *ACTIVATIONS), layout),
        norm_bias=True,
        qkv_bias=biases,
        output_bias=biases,
        mlp_bias=biases,
        ungated=ACTIVATIONS[config.get("hidden_act") or activation],
    )


def _switch(config: Config, name: str, usual: bool) -> bool:
    value = config.get(name)
    return usual if value is None else boolean(name, value)


def _learned(base: Shape, first: int = 0) -> Shape:
    """The shape with learned position embeddings instead of a rotary embedding."""
    return replace(base, learned=first, nope_layers=frozenset(range(base.layers)))


def _leaning(base: Shape, steepest: float = 8.0, rounded: bool = False) -> Shape:
    """The shape with ALiBi instead of a rotary embedding. steepest: the last head's slope is 2 to the power of minus this."""
    if base.kv_heads != base.heads:
        raise Unsupported(
            f"alibi is not supported where {base.heads} heads share {base.kv_heads} keys: the decoder has one for each"
        )
    slopes = _slopes(base.heads, steepest)
    # transformers scales Falcon's rounded biases together with the products, as Falcon was trained; others are added after scaling.
    alibi = Alibi(slopes=slopes if rounded else tuple(slope / base.attention_scale for slope in slopes), rounded=rounded)
    return replace(base, alibi=alibi, nope_layers=frozenset(range(base.layers)))


def _slopes(heads: int, steepest: float) -> tuple[float, ...]:
    """ALiBi slopes: a geometric sequence. If the number of heads is no power of two, every other one of those for the next power of
    two, then some between."""
    count = 1 << (heads - 1).bit_length()
    every = [2.0 ** (-steepest * place / count) for place in range(1, count + 1)]
    return tuple(every if count == heads else [*every[1::2], *every[::2]][:heads])


def _blocks(config: Config, activation: str, layout: Layout) -> Shape:
    """GPT-2's layers."""
    expect(said(config), add_cross_attention=False)
    base = _common(GPT2 | config, activation, layout, biases=True)
    return _learned(base if _switch(config, "scale_attn_weights", True) else replace(base, attention_scale=1.0))


def _gpt2(config: Config) -> Shape:
    """GPT-2 (Radford et al. 2019)."""
    expect(said(config), scale_attn_by_inverse_layer_idx=False)
    return _blocks(config, "gelu_new", replace(BLOCKS, transposed=True))


def _gpt_bigcode(config: Config) -> Shape:
    """StarCoder and SantaCoder (Li et al. 2023, arXiv:2305.06161): multi-query attention, or multi-head."""
    shared = _switch(config, "multi_query", True)
    base = _blocks(config, "gelu_pytorch_tanh", replace(BLOCKS, grouped=True))
    return replace(base, kv_heads=1 if shared else base.heads)


def _bloom(config: Config) -> Shape:
    """BLOOM (Workshop 2022, arXiv:2211.05100), with a norm before all layers."""
    expect(said(config), apply_residual_connection_post_layernorm=False)
    layout = Layout(roots=("transformer.", ""), layers="h", names=BLOOM_NAMES, joint=True, grouped=True)
    base = _common({"tie_word_embeddings": True} | config, "gelu_pytorch_tanh", layout, biases=True)
    return _leaning(replace(base, first_norm="embed_norm"))


def _mpt(config: Config) -> Shape:
    """MPT (MosaicML 2023), without biases."""
    expect(said(config), prefix_lm=False, qk_ln=False, alibi=True, no_bias=True)
    expect(config, **MPT)
    layout = Layout(roots=("transformer.",), layers="blocks", names=MPT_NAMES, joint=True)
    base = _common({"tie_word_embeddings": True} | config, "gelu", layout, biases=False)
    scale = cap(config, "softmax_scale", None) or base.attention_scale
    base = replace(base, norm_bias=False, qkv_limit=cap(config, "clip_qkv", None), attention_scale=scale)
    return _leaning(base, number(config, "alibi_bias_max", 8.0))


def _gptj(config: Config) -> Shape:
    """GPT-J (Wang and Komatsuzaki 2021): interleaved rotary embedding, no biases in attention."""
    layout = Layout(roots=("transformer.",), layers="h", names=GPTJ_NAMES)
    base = _common(config, "gelu_new", layout, biases=True)
    turned = config.get("rotary_dim", 64)
    if turned % 2 or turned > base.head_size:
        raise Unsupported(f"config.json says rotary_dim {shown(turned)}, an even number up to {base.head_size} is needed: {AGAIN}")
    return replace(
        base,
        qkv_bias=False,
        output_bias=False,
        logit_bias=True,
        parallel=True,
        norms=BEFORE_BOTH,
        rotary_size=turned,
        rotary_neighbours=True,
    )


def _gpt_neo(config: Config) -> Shape:
    """GPT-Neo (Black et al. 2021): attention scores are not scaled, and some layers have a sliding window."""
    layout = Layout(roots=("transformer.", ""), layers="h", names=GPT_NEO_NAMES)
    given = {"tie_word_embeddings": True, "sliding_window": 256} | config
    base = _common(given, "gelu_new", layout, biases=True)
    kinds = _repeated(given.get("attention_types", [[["global", "local"], 12]]))
    if len(kinds) != base.layers or not {*kinds} <= {"global", "local"}:
        raise Unsupported(
            f"config.json says attention_types {shown(given.get('attention_types'))}, global or local for each of "
            f"{base.layers} layers is needed: {AGAIN}"
        )
    windows = tuple(given["sliding_window"] if kind == "local" else 0 for kind in kinds)
    return _learned(replace(base, qkv_bias=False, attention_scale=1.0, windows=windows))


def _repeated(types: Any) -> list[str]:
    """Kinds of layers from [kinds, repetitions] pairs."""
    try:
        return [str(kind) for kinds, count in types for _ in range(min(count, 1 << 12)) for kind in kinds]
    except (TypeError, ValueError):
        return []


def _gpt_neox(config: Config) -> Shape:
    """GPT-NeoX and Pythia (Black et al. 2022, arXiv:2204.06745). A quarter of each head rotates; an MLP parallel to attention has a
    norm of its own."""
    layout = Layout(roots=("gpt_neox.",), layers="layers", names=NEOX_NAMES, joint=True, grouped=True)
    base = _common(config, "gelu", layout, biases=True)
    bias = _switch(config, "attention_bias", True)
    return replace(
        base,
        qkv_bias=bias,
        output_bias=bias,
        parallel=_switch(config, "use_parallel_residual", True),
        rotary_size=rotary_size(config, base.head_size, 0.25),
    )


def _dbrx(config: Config) -> Shape:
    """DBRX (Databricks 2024): stacked experts, layer norms without biases."""
    within = _object(config, "ffn_config")
    given = DBRX | config | {"intermediate_size": within.get("ffn_hidden_size", 3584)}
    activation, shares = _object(within, "ffn_act_fn"), config.get("moe_normalize_expert_weights", 1)
    if shares not in (None, 1):
        raise Unsupported(
            f"moe_normalize_expert_weights {shown(shares)} is not supported: for this family the decoder has 1, by which shares "
            "add up to 1, and null"
        )
    layout = Layout(roots=("transformer.",), layers="blocks", names=DBRX_NAMES, joint=True)
    base = _base(given | {"hidden_act": activation.get("name")}, ("silu",), layout)
    if base.rope.theta != config.get("rope_theta", base.rope.theta):
        raise Unsupported(
            f"config.json says rope_theta {shown(config['rope_theta'])} of attention, and {base.rope.theta:g} in rope_parameters, "
            "which transformers 5 fills in: leave out what is not the model's own"
        )
    mixture = Mixture(
        experts=given["moe_num_experts"],
        chosen=given["moe_k"],
        size=given["intermediate_size"],
        normalized=shares is not None,
        by_kind=True,
        names=("w1", "v1", "w2"),
    )
    return replace(base, qkv_limit=cap(config, "clip_qkv", None), mixtures=(mixture,) * base.layers)


def _object(values: Config, name: str) -> Config:
    """A field with fields of its own; {}: there is none."""
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise Unsupported(f"config.json says {name} {shown(found)}, an object is needed: {AGAIN}")
    return found


def _falcon(config: Config) -> Shape:
    """Falcon 1 and 2 (Almazrouei et al. 2023, arXiv:2311.16867), of which the larger ones have separate norms for parallel
    attention and MLP."""
    newer, shared = _switch(config, "new_decoder_architecture", False), _switch(config, "multi_query", True)
    parallel = newer or _switch(config, "parallel_attn", True)
    two = newer and (config.get("num_ln_in_parallel_attn") or 2) == 2
    layout = Layout(
        roots=("transformer.",),
        layers="h",
        names=(*FALCON_NAMES, *(TWO_NORMS if two else ())),
        joint=True,
        grouped=True,
    )
    base = _common({"tie_word_embeddings": True} | config, "gelu", layout, _switch(config, "bias", False))
    base = replace(
        base,
        kv_heads=base.kv_heads if newer else 1 if shared else base.heads,
        parallel=parallel,
        norms=PLAIN if two or not parallel else BEFORE_BOTH,
    )
    return _leaning(base, rounded=True) if _switch(config, "alibi", False) else base


def _opt(config: Config) -> Shape:
    """OPT and Galactica (Zhang et al. 2022, arXiv:2205.01068)."""
    expect(said(config), do_layer_norm_before=True, _remove_final_layer_norm=False)
    embedded = config.get("word_embed_proj_dim") or config["hidden_size"]
    if embedded != config["hidden_size"]:
        raise Unsupported(f"word_embed_proj_dim {shown(embedded)} is not supported: for this family the decoder has hidden_size")
    layout = Layout(roots=("model.decoder.", "decoder.", ""), layers="layers", names=OPT_NAMES)
    base = _common({"tie_word_embeddings": True} | config, "relu", layout, _switch(config, "enable_bias", True))
    affine = _switch(config, "layer_norm_elementwise_affine", True)
    # Its table of positions begins with two rows for padding.
    return _learned(replace(base, plain_norms=not affine, norm_bias=affine), first=2)


OLDER: dict[str, Callable[[Config], Shape]] = {
    "BloomForCausalLM": _bloom,
    "DbrxForCausalLM": _dbrx,
    "FalconForCausalLM": _falcon,
    "GPT2LMHeadModel": _gpt2,
    "GPTBigCodeForCausalLM": _gpt_bigcode,
    "GPTJForCausalLM": _gptj,
    "GPTNeoForCausalLM": _gpt_neo,
    "GPTNeoXForCausalLM": _gpt_neox,
    "MPTForCausalLM": _mpt,  # as the models' own code names it
    "MptForCausalLM": _mpt,
    "OPTForCausalLM": _opt,
}
