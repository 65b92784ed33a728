"""Meta's Llama 4 (2025): three layers of four have a rotary embedding and chunked attention; the fourth has full attention and no
rotary embedding. Experts in every layer, or in every other one."""

from collections.abc import Callable
from dataclasses import replace

from .fields import AGAIN, CHUNKED, Config, number, shown
from .parts import biased, common, layer_kinds, nope_layers
from .shape import Shape, Unsupported
from .traits import Mixture, TemperatureTuning

# transformers' defaults, which some checkpoints rely on.
DEFAULTS: Config = {
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "vocab_size": 202_048,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "attention_chunk_size": 8192,
}


def _llama4(config: Config) -> Shape:
    """Llama 4: experts' weights multiply their input. In layers with rotary embedding queries and keys have norms without gains; in
    the others queries are scaled by their position."""
    given = DEFAULTS | config
    base = biased(common(given), given)
    norms = given.get("use_qk_norm", True)
    if norms and base.rope.amplitude != 1:
        raise Unsupported(
            f"use_qk_norm with rotary scaling {base.rope.kind!r} is not supported: norms are behind the embedding there"
        )
    still = nope_layers(given, base.layers, given.get("no_rope_layers") or None)
    chunk = given["attention_chunk_size"] or 0
    kinds = layer_kinds(given, base.layers, lambda layer: chunk > 0 and layer not in still, CHUNKED)
    if CHUNKED in kinds and not chunk:
        raise Unsupported(f"config.json says attention_chunk_size null, and there are layers that see chunks: {AGAIN}")
    return replace(
        base,
        intermediate=given["intermediate_size_mlp"],
        mixtures=_mixtures(given, base),
        windows=tuple(chunk if kind == CHUNKED else 0 for kind in kinds),
        chunked=CHUNKED in kinds,
        nope_layers=still,
        nope_query_scale=_growth(given) if still else None,
        turned_norm=norms,
        rotary_neighbours=True,
        mlp_name="feed_forward",
    )


def _mixtures(given: Config, base: Shape) -> tuple[Mixture | None, ...]:
    """The mixture of experts of each layer; None: it has an MLP."""
    layers, step = given.get("moe_layers"), given.get("interleave_moe_layer_step", 1)
    layers = list(range(step - 1, base.layers, step)) if layers is None else layers
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise Unsupported(f"config.json says moe_layers {shown(layers)}, a list of numbers is needed: {AGAIN}")
    mixture = Mixture(
        experts=given.get("num_local_experts", 16),
        chosen=given.get("num_experts_per_tok", 1),
        size=base.intermediate,
        normalized=False,
        shared=base.intermediate,
        shared_gate="",
        scores="sigmoid",
        inputs_first=True,
        entering=True,
        name="feed_forward",
        router="router",
    )
    return tuple(mixture if layer in layers else None for layer in range(base.layers))


def _growth(given: Config) -> TemperatureTuning | None:
    """Temperature tuning, which checkpoints give as a number, or as true."""
    if not given.get("attn_temperature_tuning", True):
        return None
    return TemperatureTuning(strength=number(given, "attn_scale", 0.1), positions=given.get("floor_scale", 8192))


LLAMA4: dict[str, Callable[[Config], Shape]] = {"Llama4ForCausalLM": _llama4}
